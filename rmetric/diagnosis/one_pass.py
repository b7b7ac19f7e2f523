"""The one pass over a file: most lines are counted by their form, the others are read.

The hot loop is `FilePass._take`: a line whose form is known to be quiet (templates/facts.py)
costs a look-up and is put on its speaker's list, which is counted as a whole (`_settle`) at the
end of the block or when the speaker says anything else. All else goes through `_slow`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter

from rmetric.diagnosis.job import HEAD, MAX_NAMED, MAX_TEXT, TAIL, Occurrence
from rmetric.diagnosis.part import Part
from rmetric.diagnosis.patterns.iterations import IterationWatch
from rmetric.diagnosis.patterns.stages import next_stage
from rmetric.diagnosis.patterns.steps import Told
from rmetric.diagnosis.reading.joining import NEXT, Kind
from rmetric.diagnosis.reading.prefixes import NOBODY, Prefixes, Who
from rmetric.diagnosis.reading.source import Source
from rmetric.diagnosis.reading.text import clean
from rmetric.diagnosis.reading.world import World
from rmetric.diagnosis.signature import Signature
from rmetric.diagnosis.speaker import Form, Open, Raw, SoFar, Speaker
from rmetric.diagnosis.summing_up import occurrence_of, part_of
from rmetric.diagnosis.templates.events import OTHERS
from rmetric.diagnosis.templates.facts import JOB_ID, Facts
from rmetric.diagnosis.templates.places import Heads, StepPlace, TimePlace, prefix_place
from rmetric.diagnosis.templates.remembered import SHORTEST_FORM, Remembered
from rmetric.diagnosis.tools import Tools

#: Different masked texts of a file; what comes after is counted as "<others>".
MAX_TEXTS = 20_000
#: Bytes of a line that are looked at, from its beginning and its end.
HALF_LINE = MAX_TEXT
#: Changes of stage that are kept of a speaker, job numbers of a file.
MAX_STAGES, MAX_JOB_IDS = 200, 20
#: Speakers of a file that are told apart.
MAX_SPEAKERS = 1 << 15
#: Forms of prefixes that a file is expected to have.
MAX_HEADS = 1000
_DIGITS = b"0123456789"
_PLACE = itemgetter(0)


class FilePass:
    """Reads one file to a `Part`."""

    def __init__(self, source: Source, tools: Tools) -> None:
        self.source, self.tools = source, tools
        self.prefixes = Prefixes.learn(source.sample())
        self.forms: Remembered[Form] = Remembered()
        self.watch, self.world = IterationWatch(self._placed), World()
        #: the lines before the block, its lines, and their forms, where it came so far.
        self.number, self.lines, self.forms_of = 0, list[bytes](), list[Form]()
        self.speakers: dict[Who, Speaker] = {}
        #: pattern of a form of prefix -> who says lines that have it.
        self.heads: dict[bytes, Heads[Speaker]] = {}
        self.own = self._speaker(NOBODY)
        self.template_of: dict[tuple[str, str], int] = {}
        self.first: list[Raw | None] = []
        self.last: list[Raw | None] = []
        #: template that an entry had at first -> the one that it has with all its lines.
        self.became: dict[int, int] = {}
        self.left_out = 0
        self.succeeded: Raw | None = None
        self.job_ids: dict[str, int] = {}

    def read(self, told: Callable[[int], None] | None = None) -> Part:
        """All of it; `told` is called with the bytes of each part that was read."""
        for lines in self.source.chunks():
            if told is not None:
                told(sum(map(len, lines)) + len(lines))
            if max(map(len, lines), default=0) > 2 * HALF_LINE:
                lines = [_shortened(line) for line in lines]
            self._take(lines)
        self._finish()
        return part_of(self)

    def _take(self, lines: list[bytes]) -> None:
        known, own = self.forms.young.get, self.own
        keys = b"\n".join(lines).translate(None, _DIGITS).split(b"\n")
        forms: list[Form] = []
        self.lines, self.forms_of = lines, forms
        for at, key in enumerate(keys):
            form = known(key)
            if form is None:
                form = self._form(lines[at], key)
            forms.append(form)
            speaker: Speaker | None = own
            if form.heads is not None:
                line = lines[at]
                for length in form.heads.lengths:
                    speaker = form.heads.said_by.get(line[:length])
                    if speaker is not None:
                        break
                else:
                    speaker, _ = form.heads.find(line)
            if (
                form.slow
                or speaker is None
                or speaker.slow
                or (form.stays is not None and speaker.stage not in form.stays)
            ):
                self._slow(self.number + at + 1, lines[at], form)
                continue
            speaker.heard.append(at)
        for speaker in self.speakers.values():
            self._settle(speaker)
            self._show(speaker)
        self.number += len(lines)

    def _settle(self, speaker: Speaker) -> None:
        """Count what was heard of a speaker, and tell the steps in it."""
        heard = speaker.heard
        if not heard:
            return
        said = [self.forms_of[at].template for at in heard]
        speaker.counts.update(said)
        steps = self._tell_all(speaker, said)

        def raw(at: int) -> Raw:
            step = steps[bisect_right(steps, at, key=_PLACE) - 1][1]
            number, template = self.number + at + 1, self.forms_of[at].template
            return (number, self.lines[at], template, speaker, step, speaker.stage, None)

        speaker.tail.extend(map(raw, heard[-TAIL:]))
        for template, at in dict(zip(said, heard, strict=True)).items():
            last = self.last[template]
            if last is None or last[0] <= self.number + at:
                self.last[template] = raw(at)
        heard.clear()

    def _tell_all(self, speaker: Speaker, said: list[int]) -> list[tuple[int, int | None]]:
        """From which place in the block on the speaker was at which step."""
        steps, shown = [(-1, speaker.step)], 0
        for order, at in enumerate(speaker.heard):
            form = self.forms_of[at]
            if form.step is None:
                continue
            line = self.lines[at]
            step = form.step.told(line)
            if step is not None:
                if shown < order:
                    speaker.unwatched += said[shown:order]
                self._tell(speaker, self.number + at + 1, line, form, step)
                steps.append((at, speaker.step))
                shown = order + 1
        speaker.unwatched += said[shown:]
        return steps

    def _speaker(self, who: Who) -> Speaker:
        speaker = self.speakers.get(who)
        if speaker is None:
            if len(self.speakers) > MAX_SPEAKERS:
                return self.own
            speaker = self.speakers[who] = Speaker(str(len(self.speakers)), who)
        return speaker

    def _said_by(self, line: bytes, form: Form) -> tuple[Speaker, int]:
        """Who says a line, and where its text begins."""
        if form.heads is None:
            return self.own, self.prefixes.start(line)
        speaker, start = form.heads.find(line)
        if speaker is None:
            who, start = self.prefixes.split(line)
            speaker = self._speaker(who)
            form.heads.learn(line, speaker)
        return speaker, start

    def _slow(self, number: int, line: bytes, form: Form) -> None:
        speaker, start = self._said_by(line, form)
        self._settle(speaker)
        text = line[start:]
        facts = form.facts
        joined, speaker.state = NEXT[speaker.state][facts.kind]
        if facts.world:
            stream = self.source.name + ("" if speaker is self.own else f" {speaker.key}")
            self.world.take(clean(text), speaker.who, stream)
        if facts.job_id:
            self._job_id(number, text)
        if facts.kind != Kind.BLANK and not (joined and self._joined(speaker, text, facts)):
            self._begin(speaker, number, line, text, form)
        speaker.slow = bool(speaker.open or speaker.state or speaker.fresh)

    def _form(self, line: bytes, key: bytes | None = None) -> Form:
        key = line.translate(None, _DIGITS) if key is None else key
        form = self.forms.get(key)
        if form is None:
            who, start = self.prefixes.split(line)
            heads = None if who is NOBODY else self._heads(line)
            form = Form(self.tools.facts(line[start:]), heads)
            if len(key) >= SHORTEST_FORM:
                self.forms.put(key, form)
        return form

    def _heads(self, line: bytes) -> Heads[Speaker]:
        pattern = prefix_place(self.prefixes, line)
        if pattern.pattern not in self.heads and len(self.heads) >= MAX_HEADS:
            self.heads.clear()
        return self.heads.setdefault(pattern.pattern, Heads(pattern))

    def _joined(self, speaker: Speaker, text: bytes, facts: Facts) -> bool:
        """Whether the line could be added to the speaker's entry."""
        entry = speaker.open or self._reopened(speaker)
        if entry is None or entry.entry.full:
            return False
        if facts.kind == Kind.EXCEPTION:
            entry.says = facts
        elif facts.exception:
            if entry.says.exception or entry.says is not entry.facts:
                return False  # of another rank that writes to the same file
            entry.says = facts
        entry.entry.add(clean(text))
        entry.look |= facts.look
        return True

    def _reopened(self, speaker: Speaker) -> Open | None:
        """The last entry, counted already, that turns out to have more lines."""
        if not speaker.tail or speaker.tail[-1][6] is not None:
            return None
        raw = speaker.tail.pop()
        speaker.counts[raw[2]] -= 1
        if speaker.head[-1] is raw:
            speaker.head.pop()
        text = raw[1][self.prefixes.split(raw[1])[1] :]
        speaker.open = Open(raw, self._form(raw[1]).facts, text)
        speaker.open.told, speaker.open.watched = self._tells(raw), True
        return speaker.open

    @staticmethod
    def _tells(raw: Raw) -> bool:
        """Whether the entry is the one that told its speaker's last step."""
        at = raw[3].last_step_at
        return at is not None and at[0] == raw[0]

    def _begin(self, speaker: Speaker, number: int, line: bytes, text: bytes, form: Form) -> None:
        if speaker.open is not None:
            self._close(speaker)
        facts = form.facts
        if form.template < 0:
            form.template = self._template(facts.template, facts.cls)
            form.slow = not facts.quiet
        step = self._step(line, form, len(line) - len(text)) if facts.step else None
        if step is not None:
            self._tell(speaker, number, line, form, step)
        raw: Raw = (number, line, form.template, speaker, speaker.step, speaker.stage, None)
        stage = next_stage(speaker.stage, facts.stage)
        if stage != speaker.stage:
            raw = self._enter(speaker, raw, stage)
        if speaker.state or facts.alone:
            speaker.open = Open(raw, facts, text)
            speaker.open.told = speaker.open.watched = step is not None
        else:
            self._count(speaker, raw, step is not None)

    def _step(self, line: bytes, form: Form, start: int) -> Told | None:
        if form.step is None:
            form.step = StepPlace(line, self._told, start)
        return form.step.told(line)

    def _told(self, line: bytes) -> Told | None:
        who, start = self.prefixes.split(line)
        start = self.prefixes.start(line) if who is NOBODY else start
        return self.tools.told(line[start:].decode("utf-8", "replace"))

    def _tell(self, speaker: Speaker, number: int, line: bytes, form: Form, step: Told) -> None:
        if speaker.unwatched:
            self._show(speaker)
        if form.time is None:
            form.time = TimePlace(line, self.prefixes)
        raw: Raw = (number, line, form.template, speaker, step.step, speaker.stage, None)
        time = form.time.time(line)
        speaker.step = self.watch.tell(speaker.key, step, form.template, raw, time)
        if not speaker.steps:
            speaker.first_step = speaker.step
        speaker.steps += 1
        speaker.last_step_at = raw

    def _placed(self, raw: Raw, time: float | None) -> Occurrence:
        line = raw[1]
        text = clean(line[self.prefixes.split(line)[1] :])
        return occurrence_of(self.source, raw, text, time)

    def _enter(self, speaker: Speaker, raw: Raw, stage: str) -> Raw:
        self._show(speaker)
        self.watch.enter(speaker.key, stage)
        speaker.stage = stage
        raw = (*raw[:5], stage, raw[6])
        if len(speaker.stages) < MAX_STAGES:
            speaker.stages.append((stage, raw))
        return raw

    def _close(self, speaker: Speaker) -> None:
        entry = speaker.open
        assert entry is not None
        speaker.open = None
        text, level = entry.entry.text(), entry.facts.level
        found = self.tools.find(text, level) if entry.look else []
        template = entry.raw[2]
        if not entry.told:  # a step's line stays one event, whatever else it says
            template = self._template(
                entry.says.template, found[0][0].id if found else entry.says.cls
            )
            self.became[entry.raw[2]] = template
        raw = (*entry.raw[:2], template, *entry.raw[3:6], text)
        self._count(speaker, raw, entry.watched)
        if found:
            self._match(speaker, raw, *found[0])

    def _count(self, speaker: Speaker, raw: Raw, watched: bool) -> None:
        template = raw[2]
        speaker.counts[template] += 1
        if self.first[template] is None:
            self.first[template] = raw
        self.last[template] = raw
        speaker.tail.append(raw)
        if len(speaker.head) < HEAD:
            speaker.head.append(raw)
        if not watched:
            speaker.unwatched.append(template)
        if speaker.fresh:
            if speaker.first_time is None:
                speaker.first_time = self.prefixes.time(raw[1])
            timed = speaker.first_time is not None and len(speaker.head) == HEAD
            speaker.fresh = 0 if timed else speaker.fresh - 1

    def _match(
        self, speaker: Speaker, raw: Raw, signature: Signature, fields: dict[str, str]
    ) -> None:
        match = speaker.found.get(signature.id)
        if match is None:
            match = speaker.found[signature.id] = SoFar(raw)
        match.count += 1
        if fields and len(match.named) < MAX_NAMED and fields not in match.named:
            match.named.append(fields)
        match.last = raw
        match.templates.setdefault(raw[2], raw)
        if signature.role == "success":
            self.succeeded = raw

    def _template(self, text: str, cls: str) -> int:
        template = self.template_of.get((cls, text))
        if template is None:
            if len(self.template_of) >= MAX_TEXTS and text != OTHERS:
                self.left_out += 1
                return self._template(OTHERS, cls)
            template = self.template_of[cls, text] = len(self.first)
            self.first.append(None)
            self.last.append(None)
        return template

    def _job_id(self, number: int, text: bytes) -> None:
        for groups in JOB_ID.findall(clean(text)):
            if len(self.job_ids) < MAX_JOB_IDS:
                self.job_ids.setdefault("".join(groups), number)

    def _finish(self) -> None:
        for speaker in self.speakers.values():
            if speaker.open is not None:
                self._close(speaker)
            self._show(speaker)

    def _show(self, speaker: Speaker) -> None:
        """Hand what was said since to the watch over iterations."""
        if speaker.unwatched:
            self.watch.take(speaker.key, speaker.unwatched)
            speaker.unwatched.clear()


def _shortened(line: bytes) -> bytes:
    if len(line) <= 2 * HALF_LINE:
        return line
    return line[:HALF_LINE] + b" ... " + line[-HALF_LINE:]
