"""Facts about a line that do not depend on its digits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from rmetric.diagnosis.facts.statements import Statement, may_state
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.library.load import Matches
from rmetric.diagnosis.library.stages import possible_rules, stated_stage
from rmetric.diagnosis.reading.joining import kind_of
from rmetric.diagnosis.reading.steps import may_state_step
from rmetric.diagnosis.reading.text import clean, level
from rmetric.diagnosis.reading.word_index import runs_of
from rmetric.diagnosis.templates.masks import masked, plain_numbers, plain_pointers

#: An exception's line, wherever it stands: other ranks' fragments may be around it.
EXCEPTION = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b: ")
#: Code that names an exception, where none is raised.
_CODE = re.compile(r"(?:\b(?:except|raise|as)\b|[\"'(#`,])\s*$")
#: What a structured line is about: :::MLLOG {"key": "run_stop", ...}, {"event": "eval", ...}. It is
#: looked for behind the first brace: behind each it would take the square of a line's length.
_KEY = re.compile(r"[^{]*\{.*?\"(?:key|event|event_name)\": ?\"([\w./-]+)\"")
#: The number of the scheduler's job.
JOB_ID = re.compile(
    r"(?i)\bSLURM_JOB_?ID\W{1,3}(\d+)|\*\*\* (?:JOB|STEP) (\d+)|(?<!:)\bjob[ _]?id\W{1,3}(\d+)"
    r"|\b(?:Terminated|allocation|srun:) job (\d+)|\bjob allocation (\d+)"
)
#: Entries of a cache.
MAX_ENTRIES = 32_768
#: Longer keys are not remembered.
LONGEST_KEY = 2048
#: Nor are forms of fewer bytes: "1" and an empty line differ.
SHORTEST_FORM = 8

Value = TypeVar("Value")


class BoundedCache(dict[bytes, Value]):
    """A dictionary that forgets everything when it is full."""

    def __init__(self, most: int = MAX_ENTRIES) -> None:
        super().__init__()
        self._most = most

    def put(self, key: bytes, value: Value) -> None:
        if len(key) <= LONGEST_KEY:
            if len(self) >= self._most:
                self.clear()
            self[key] = value


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts shared by all lines that differ only in their digits and hexadecimal numbers.

    Attributes:
        kind: its part in an entry of several lines (`reading.joining.Kind`).
        template: with what varies masked.
        cls: lines of different classes are different events, however similar: the level, and the
            key of a structured line.
        level: as it states it.
        stage: as it states it, "" for none.
        look: a signature may match an entry with this line.
        alone: one may match the line by itself.
        step, job_id: it may state a step, the scheduler's number of the job.
        world: what it may state of the size and the layout of the job.
        exception: it holds an exception.
    """

    kind: int
    template: str
    cls: str
    level: str
    stage: str
    look: bool
    alone: bool
    step: bool
    world: tuple[Statement, ...]
    job_id: bool
    exception: bool

    @property
    def quiet(self) -> bool:
        """Nothing is needed of its stream but to count it, and to record its step and stage."""
        return not (self.kind or self.alone)

    @property
    def told(self) -> bool:
        """It may state what holds for the whole job."""
        return bool(self.world or self.job_id)


class LineAnalyser:
    """Facts of lines and signatures of entries, with caches that the files of a process share.

    Attributes:
        readers: forms of prefixes -> the shapes of lines in files that use them.
    """

    def __init__(self, library: SignatureLibrary) -> None:
        self.library = library
        self.readers: dict[object, Any] = {}
        self._facts: BoundedCache[Facts] = BoundedCache()
        self._matches: BoundedCache[Matches] = BoundedCache(2048)

    def facts(self, line: bytes) -> Facts:
        """Facts of a line without its prefix."""
        plain = plain_pointers(plain_numbers(line.rstrip()))
        facts = self._facts.get(plain)
        if facts is None:
            facts = self._new_facts(plain)
            self._facts.put(plain, facts)
        return facts

    def find(self, text: str, level: str) -> Matches:
        """As `SignatureLibrary.find`."""
        key = f"{level}\n{text}".encode()
        found = self._matches.get(key)
        if found is None:
            found = self.library.find(text, level)
            self._matches.put(key, found)
        return found

    def _new_facts(self, plain: bytes) -> Facts:
        text = clean(plain)
        own_level, key = level(text), _KEY.match(text)
        form = plain.lower().translate(None, b"0")
        runs = runs_of(form)
        look, rules = self.library.gate(form, runs), possible_rules(form, runs)
        step = may_state_step(plain.decode("utf-8", "replace"))
        named = "Error" in text or "Exception" in text or "Interrupt" in text
        raised = EXCEPTION.search(text) if named else None
        before = text[: raised.start()] if raised else ""
        return Facts(
            kind=int(kind_of(plain)),
            template=masked(text),
            cls=f"{own_level}:{key[1]}" if key else own_level,
            level=own_level,
            stage=stated_stage(text, rules, may_step=step) if rules or step else "",
            look=look,
            alone=look and self.library.may_match(text, own_level),
            step=step,
            world=may_state(text.replace("0", ""), form, runs),
            job_id=(b"job" in form or b"*** step" in form) and JOB_ID.search(text) is not None,
            # Behind nothing but an indent it is part of an entry.
            exception=raised is not None and not before.isspace() and not _CODE.search(before),
        )
