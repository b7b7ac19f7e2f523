"""Hand-made `Job` objects, as a pass over logs builds them, and what is known before evidence."""

from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.evidence import Scene
from rmetric.diagnosis.facts.job import HEAD, Event, Job, JobStream, Match, Occurrence
from rmetric.diagnosis.faults import ended_alone, find_faults
from rmetric.diagnosis.pool import HealthyReference

USUAL = ("start rank", "model built", "step <NUM> loss <NUM>", "saved", "finished")


class Maker:
    """Logs entries in order; entries of one text are of one event.

    `ranks` have streams before they log anything; times count from `epoch`.
    """

    def __init__(self, world=None, *, ranks=0, shared=False, skew=None, node_of=None, epoch=1.7e9):
        self.job = Job(world_size=world)
        self.shared, self.skew, self.epoch = shared, skew or {}, epoch
        self.node_of = node_of or (lambda rank: None)
        self.numbers = {}
        self.order = 0
        for rank in range(ranks):
            self._stream(rank)

    def _stream(self, who):
        rank, name = (who, f"rank {who}") if isinstance(who, int) else (None, who)
        if name not in self.job.streams:
            node = None if rank is None else self.node_of(rank)
            self.job.streams[name] = JobStream(name=name, rank=rank, node=node)
        return self.job.streams[name]

    def say(self, who, text, *, time=None, step=None, signature="", quote=None):
        """An entry of a rank or of a stream; `quote` is its text where `text` is its form."""
        stream = self._stream(who)
        file = "all.log" if self.shared else f"{stream.name.replace(' ', '_')}.log"
        line = self.job.files[file] = self.job.files.get(file, 0) + 1
        entry = Occurrence(
            file=file,
            line=line,
            stream=stream.name,
            time=None if time is None else self.epoch + time + self.skew.get(who, 0.0),
            order=self.order,
            event=self.numbers.setdefault(text, len(self.numbers)),
            text=quote or text,
            step=stream.last_step if step is None else step,
            stage="train",
        )
        self.order += 1
        self._count(stream, entry, text)
        if step is not None:
            stream.steps, stream.last_step, stream.last_step_at = stream.steps + 1, step, entry
        if signature:
            key = signature, stream.name
            new = Match(signature=signature, stream=stream.name, count=0, first=entry, last=entry)
            match = self.job.matches.setdefault(key, new)
            match.count, match.last = match.count + 1, entry
            match.events.add(entry.event)
        return entry

    def _count(self, stream, new, template):
        if new.event == len(self.job.events):
            self.job.events.append(Event(number=new.event, template=template, first=new, last=new))
        event = self.job.events[new.event]
        event.last = new
        event.counts[stream.name] = event.counts.get(stream.name, 0) + 1
        stream.entries += 1
        stream.files.add(new.file)
        stream.tail.append(new)
        stream.stage = new.stage
        if len(stream.head) < HEAD:
            stream.head.append(new)
        if new.time is not None:
            begin, end = self.job.spans.get(new.file, (new.time, new.time))
            self.job.spans[new.file] = (min(begin, new.time), max(end, new.time))
            stream.first_time = new.time if stream.first_time is None else stream.first_time
            stream.last_time = new.time

    def steps(self, first, last):
        for step in range(first, last + 1):
            for stream in [*self.job.streams.values()]:
                self.say(stream.rank, "step <*> loss <*>", step=step)

    def train(self, ranks, *, steps=20, end=True):
        """All log the same at the same moments; rank 0 logs more."""
        for template in USUAL[:2]:
            for rank in ranks:
                self.say(rank, template, time=0.01 * rank)
        for step in range(steps):
            for rank in ranks:
                self.say(rank, USUAL[2], time=10.0 + step, step=step)
                if rank == 0:
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


def scene_of(job, library=None, *, siblings=(), offsets=None):
    """library: id -> signature of the matches of the job."""
    ordering = Ordering(job=job, offsets=offsets or {})
    alone = ended_alone(job, library or {})
    return Scene(
        job=job,
        ordering=ordering,
        faults=find_faults(job, library or {}, ordering, alone),
        alone=alone,
        known=HealthyReference.of(job, siblings, None),
    )
