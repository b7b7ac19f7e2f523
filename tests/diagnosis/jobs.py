"""Hand-made `Job` objects, as a pass over logs builds them."""

from rmetric.diagnosis.facts.job import HEAD, Event, Job, JobStream, Occurrence

USUAL = ("start rank", "model built", "step <NUM> loss <NUM>", "saved", "finished")


class Maker:
    """Says entries in order; one file a rank unless told otherwise."""

    def __init__(self, world=8, *, shared=False, skew=None, node_of=None):
        self.job = Job(world_size=world)
        self.shared, self.skew, self.node_of = shared, skew or {}, node_of
        self.numbers = {}
        self.order = 0

    def say(self, rank, template, *, time=None, step=None):
        name, file = f"rank {rank}", "all.log" if self.shared else f"rank_{rank}.log"
        self.order += 1
        one = Occurrence(
            file=file,
            line=self.order,
            stream=name,
            time=None if time is None else 1.7e9 + time + self.skew.get(rank, 0.0),
            order=self.order,
            event=self.numbers.setdefault(template, len(self.numbers)),
            text=template,
            step=step,
        )
        self._hear(rank, one)
        self._count(template, one)

    def _hear(self, rank, one):
        stream = self.job.streams.get(one.stream)
        if stream is None:
            node = self.node_of and self.node_of(rank)
            stream = JobStream(name=one.stream, rank=rank, node=node, first_time=one.time)
            self.job.streams[one.stream] = stream
        self.job.files[one.file] = self.job.files.get(one.file, 0) + 1
        stream.files.add(one.file)
        if one.time is not None:
            begin, end = self.job.spans.get(one.file, (one.time, one.time))
            self.job.spans[one.file] = (min(begin, one.time), max(end, one.time))
        stream.entries += 1
        stream.tail.append(one)
        if len(stream.head) < HEAD:
            stream.head.append(one)
        stream.last_time = one.time
        if one.step is not None:
            stream.steps += 1
            stream.last_step, stream.last_step_at = one.step, one

    def _count(self, template, one):
        if one.event == len(self.job.events):
            self.job.events.append(Event(number=one.event, template=template, first=one, last=one))
        event = self.job.events[one.event]
        event.last = one
        event.counts[one.stream] = event.counts.get(one.stream, 0) + 1

    def train(self, ranks, *, steps=20, first=0, leader=True, end=True):
        """All say the same at the same moments; rank 0 says more, if it is a `leader`."""
        for template in USUAL[:2]:
            for rank in ranks:
                self.say(rank, template, time=0.01 * rank)
        for step in range(first, steps):
            for rank in ranks:
                self.say(rank, USUAL[2], time=10.0 + step, step=step)
                if rank == 0 and leader:
                    self.say(rank, "learning rate <NUM>", time=10.0 + step)
        for template in USUAL[3:] if end else ():
            for rank in ranks:
                self.say(rank, template, time=11.0 + steps)
        return self


def healthy(world=8, **options):
    return Maker(world, **options).train(range(world)).job


def killed(world, bad, *, order=None, **options):
    """One stops after step 9; the others wait for it and time out half an hour later."""
    order = list(order or range(world))
    maker = Maker(world, **options).train(order, steps=10, end=False)
    for rank in order:
        if rank != bad:
            maker.say(rank, "watchdog caught collective operation timeout", time=1820.0)
            maker.say(rank, "aborting the process", time=1821.0)
    return maker.job
