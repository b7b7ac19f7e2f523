"""Builder of `Job` objects by hand, as `ingest` would return them."""

from rmetric.diagnosis.facts.job import HEAD, Event, Job, JobStream, Match, Occurrence


class Writer:
    """Writes entries into a job, one after the other.

    >>> writer = Writer(ranks=2)
    >>> writer.say(1, "boom", signature="python_exception").order
    0
    """

    def __init__(self, ranks=4, one_file=True, world_size=None):
        self.job = Job(world_size=world_size)
        self.one_file = one_file
        self.order = 0
        self.numbers = {}
        for rank in range(ranks):
            name = f"rank {rank}"
            self.job.streams[name] = JobStream(name=name, rank=rank)

    def say(self, rank, text, *, time=None, step=None, signature="", stage="train", fields=None):
        name = f"rank {rank}" if isinstance(rank, int) else rank
        stream = self.job.streams.setdefault(name, JobStream(name=name))
        file = "job.log" if self.one_file else f"{name.replace(' ', '_')}.log"
        line = self.job.files[file] = self.job.files.get(file, 0) + 1
        number = self.numbers.setdefault(text, len(self.numbers))
        entry = Occurrence(
            file=file,
            line=line,
            stream=name,
            time=time,
            order=self.order,
            event=number,
            text=text,
            step=stream.last_step if step is None else step,
            stage=stage,
        )
        self.order += 1
        self._count(stream, entry)
        if step is not None:
            stream.steps, stream.last_step, stream.last_step_at = stream.steps + 1, step, entry
        if signature:
            self._match(signature, entry, fields or {})
        return entry

    def steps(self, first, last, ranks=None, time=None):
        for step in range(first, last + 1):
            for name in ranks or [one for one in self.job.streams.values() if one.rank is not None]:
                rank = name if isinstance(name, int) else name.rank
                at = None if time is None else time + step
                self.say(rank, "step <*> loss <*>", step=step, time=at)

    def _count(self, stream, entry):
        if entry.event == len(self.job.events):
            self.job.events.append(
                Event(number=entry.event, template=entry.text, first=entry, last=entry)
            )
        event = self.job.events[entry.event]
        event.last = entry
        event.counts[stream.name] = event.counts.get(stream.name, 0) + 1
        stream.entries += 1
        if len(stream.head) < HEAD:
            stream.head.append(entry)
        stream.files.add(entry.file)
        stream.tail.append(entry)
        stream.stage = entry.stage
        if entry.time is not None:
            stream.last_time = entry.time
            stream.first_time = entry.time if stream.first_time is None else stream.first_time

    def _match(self, signature, entry, fields):
        key = (signature, entry.stream)
        match = self.job.matches.get(key)
        if match is None:
            match = Match(
                signature=signature,
                stream=entry.stream,
                count=0,
                first=entry,
                last=entry,
            )
            self.job.matches[key] = match
        match.count, match.last = match.count + 1, entry
        match.events.add(entry.event)
        if fields and fields not in match.named:
            match.named.append(fields)
