"""The one pass over a file: most lines are counted by their form, the others are read.

The hot loop is `FilePass._take`: a line whose form is known to be quiet (templates/facts.py)
costs a look-up and four small writes. All else goes through `_slow`.
"""

from __future__ import annotations

from collections.abc import Callable

from rmetric.diagnosis.job import HEAD, MAX_NAMED, MAX_TEXT
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
from rmetric.diagnosis.templates.places import StepPlace, TimePlace, prefix_place
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
_DIGITS = b"0123456789"


class FilePass:
    """Reads one file to a `Part`."""

    def __init__(self, source: Source, tools: Tools) -> None:
        self.source, self.tools = source, tools
        self.prefixes = Prefixes.learn(source.sample())
        self.forms: Remembered[Form] = Remembered()
        self.watch, self.world = IterationWatch(), World()
        self.number = 0
        self.speakers: dict[Who, Speaker] = {}
        #: groups of a form's prefix -> who says lines that have it.
        self.said_by: dict[tuple[bytes, ...], Speaker] = {}
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
            for speaker in self.speakers.values():
                self._show(speaker)
        self._finish()
        return part_of(self)

    def _take(self, lines: list[bytes]) -> None:
        number, last, said_by, own = self.number, self.last, self.said_by, self.own
        form_of = self.forms.young.get
        for line in lines:
            number += 1
            form = form_of(line.translate(None, _DIGITS))
            if form is None or form.slow:
                self._slow(number, line, form or self._form(line))
                continue
            speaker = own
            if form.prefix is not None:
                found = form.prefix(line)
                speaker = said_by.get(found.groups(), own) if found else own
            if (
                speaker.slow
                or (speaker is own and form.prefix is not None)
                or (form.stays is not None and speaker.stage not in form.stays)
            ):
                self._slow(number, line, form)
                continue
            template = form.template
            speaker.counts[template] += 1
            raw = (number, line, template, speaker, speaker.step, speaker.stage, None)
            last[template] = raw
            speaker.tail.append(raw)
            speaker.unwatched.append(template)
        self.number = number

    def _speaker(self, who: Who) -> Speaker:
        speaker = self.speakers.get(who)
        if speaker is None:
            if len(self.speakers) > MAX_SPEAKERS:
                return self.own
            speaker = self.speakers[who] = Speaker(str(len(self.speakers)), who)
        return speaker

    def _said_by(self, line: bytes, form: Form) -> tuple[Speaker, bytes]:
        """Who says a line, and the line without its prefix."""
        if form.prefix is None:
            return self.own, line[self.prefixes.start(line) :]
        found = form.prefix(line)
        speaker = self.said_by.get(found.groups()) if found else None
        if found is not None and speaker is not None:
            return speaker, line[found.start("text") :]
        who, start = self.prefixes.split(line)
        speaker = self._speaker(who)
        if found is not None:
            if len(self.said_by) > MAX_SPEAKERS:
                self.said_by.clear()
            self.said_by[found.groups()] = speaker
        return speaker, line[start:]

    def _slow(self, number: int, line: bytes, form: Form) -> None:
        speaker, text = self._said_by(line, form)
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

    def _form(self, line: bytes) -> Form:
        key = line.translate(None, _DIGITS)
        form = self.forms.get(key)
        if form is None:
            who, start = self.prefixes.split(line)
            prefix = None if who is NOBODY else prefix_place(self.prefixes, line)
            form = Form(self.tools.facts(line[start:]), prefix)
            if len(key) >= SHORTEST_FORM:
                self.forms.put(key, form)
        return form

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
        step = self._step(text, form) if facts.step else None
        if step is not None:
            self._tell(speaker, number, line, text, form, step)
        raw: Raw = (number, line, form.template, speaker, speaker.step, speaker.stage, None)
        stage = next_stage(speaker.stage, facts.stage)
        if stage != speaker.stage:
            raw = self._enter(speaker, raw, stage)
        if speaker.state or facts.alone:
            speaker.open = Open(raw, facts, text)
            speaker.open.told = speaker.open.watched = step is not None
        else:
            self._count(speaker, raw, step is not None)

    def _step(self, text: bytes, form: Form) -> Told | None:
        if form.step is None:
            form.step = StepPlace(text, self.tools.told)
        return form.step.told(text)

    def _tell(
        self, speaker: Speaker, number: int, line: bytes, text: bytes, form: Form, step: Told
    ) -> None:
        self._show(speaker)
        if form.time is None:
            form.time = TimePlace(line, self.prefixes.time)
        raw: Raw = (number, line, form.template, speaker, step.step, speaker.stage, None)
        place = occurrence_of(self.source, raw, clean(text), form.time.time(line))
        speaker.step = self.watch.tell(speaker.key, step, form.template, place)
        if not speaker.steps:
            speaker.first_step = speaker.step
        speaker.steps += 1
        speaker.last_step_at = raw

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
