"""Facts about a line that do not depend on its digits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rmetric.diagnosis.reading.joining import kind_of
from rmetric.diagnosis.reading.text import clean, level
from rmetric.diagnosis.reading.world import may_describe_world
from rmetric.diagnosis.templates.masks import masked, plain_numbers
from rmetric.diagnosis.templates.recent_cache import RecentCache

#: An exception's line, wherever it stands: other ranks' fragments may be around it.
EXCEPTION = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b: ")
#: Code that names an exception, where none is raised.
_CODE = re.compile(r"(?:\b(?:except|raise|as)\b|[\"'(#`,])\s*$")
#: What a structured line is about: :::MLLOG {"key": "run_stop", ...}, {"event": "eval", ...}.
_KEY = re.compile(r"\{.*?\"(?:key|event|event_name)\": ?\"([\w./-]+)\"")
#: Lines that may tell the number of the scheduler's job.
JOB_ID = re.compile(
    r"(?i)\bSLURM_JOB_?ID\W{1,3}(\d+)|\*\*\* (?:JOB|STEP) (\d+)|\bjob[ _]?id\W{1,3}(\d+)"
    r"|\b(?:Terminated|allocation|srun:) job (\d+)|\bjob allocation (\d+)"
)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts shared by all lines that differ only in their digits.

    Attributes:
        kind: what it is among the lines of an entry (`reading.joining.Kind`).
        template: with what varies masked.
        cls: lines of different classes are different events, however alike they read: the level,
            and the key of a structured line.
        level: that it gives itself.
        stage: that it tells, "" for none.
        look: a signature may match an entry with this line.
        alone: one may match the line by itself.
        step: it may tell a step.
        world: it may tell the size or the layout of the job.
        job_id: it may tell the scheduler's number of the job.
        exception: an exception stands in it.
    """

    kind: int
    template: str
    cls: str
    level: str
    stage: str
    look: bool
    alone: bool
    step: bool
    world: bool
    job_id: bool
    exception: bool

    @property
    def quiet(self) -> bool:
        """There is nothing to do but count it, and to note the step and the stage that it tells."""
        return not (self.kind or self.alone or self.world or self.job_id)


class Signatures(Protocol):
    """The part of `SignatureLibrary` used here."""

    def gate(self, form: bytes) -> bool: ...

    def may_match(self, plain: str, level: str) -> bool: ...


class StageRules(Protocol):
    """The part of `Stages` used here."""

    def of(self, text: str) -> str: ...

    def gate(self, form: bytes) -> bool: ...


class FactsOf:
    """Works out the facts of lines, and remembers those of late.

    It may be shared by the files of a job: what it says of a line depends on the line alone.
    """

    def __init__(
        self, library: Signatures, stages: StageRules, may_state_step: Callable[[str], bool]
    ) -> None:
        self.library, self.stages, self.may_state_step = library, stages, may_state_step
        self.known: RecentCache[Facts] = RecentCache()

    def __call__(self, line: bytes) -> Facts:
        """Facts of a line without its prefix."""
        plain = plain_numbers(line)
        facts = self.known.get(plain)
        if facts is None:
            facts = self._worked_out(plain)
            self.known.put(plain, facts)
        return facts

    def _worked_out(self, plain: bytes) -> Facts:
        text = clean(plain)
        own_level, key = level(text), _KEY.search(text)
        form = plain.lower().translate(None, b"0")
        look = self.library.gate(form)
        return Facts(
            kind=int(kind_of(plain)),
            template=masked(text),
            cls=f"{own_level}:{key[1]}" if key else own_level,
            level=own_level,
            stage=self.stages.of(text) if self.stages.gate(form) else "",
            look=look,
            alone=look and self.library.may_match(text, own_level),
            step=self.may_state_step(plain.decode("utf-8", "replace")),
            world=may_describe_world(form),
            job_id=JOB_ID.search(text) is not None,
            exception=_has_exception(text),
        )


def _has_exception(text: str) -> bool:
    """At the head of the line or behind other words; indented alone it is part of an entry."""
    found = EXCEPTION.search(text)
    if found is None:
        return False
    before = text[: found.start()]
    return not before or (not before.isspace() and _CODE.search(before) is None)
