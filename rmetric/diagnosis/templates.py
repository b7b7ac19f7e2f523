"""What lines have in common: their text with what varies masked, facts, and events.

Masks and facts do not depend on digits, so that they are computed once for each form of a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from drain3.drain import Drain, LogCluster

from rmetric._util.lazy import read_yaml
from rmetric.diagnosis.facts.statements import Statement, may_state
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.library.stages import possible_rules, stated_stage
from rmetric.diagnosis.reading.text import clean, kind_of, level, runs_of
from rmetric.readers.step_forms import may_state_step

#: Characters of a line that make its template.
MAX_TEMPLATE = 400

#: Name -> patterns and an example; on text with "0" for each number the first that matches counts.
MASKS: dict[str, dict[str, list[str]]] = read_yaml(Path(__file__).with_name("templates.yaml"))
_MASK = re.compile(
    "|".join(f"(?P<{name}>{'|'.join(mask['patterns'])})" for name, mask in MASKS.items())
)
_DIGIT_BYTES = re.compile(rb"[0-9]+")
_POINTERS = re.compile(rb"\b0x[0a-fA-F]+\b")
_TIME_FIRST = re.compile(r"^(?:[\[(]?<TIME>[\])]?[\s,:|-]*)+(?=\S)")


def plain_numbers(line: bytes) -> bytes:
    """The line with every run of digits as "0"."""
    return _DIGIT_BYTES.sub(b"0", line)


def plain_pointers(plain: bytes) -> bytes:
    """A line of `plain_numbers` with every hexadecimal number as "0x0": most are new each time."""
    return _POINTERS.sub(b"0x0", plain) if b"0x" in plain else plain


def masked(text: str) -> str:
    """A text of `plain_numbers` with what varies masked, cut; no time in front."""
    found = _MASK.sub(lambda match: f"<{match.lastgroup}>", text[: 2 * MAX_TEMPLATE])
    return _TIME_FIRST.sub("", " ".join(found.split()))[:MAX_TEMPLATE]


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


class BoundedCache(dict[Any, Value]):
    """A dictionary that forgets everything when it is full."""

    def __init__(self, most: int = MAX_ENTRIES) -> None:
        super().__init__()
        self._most = most

    def put(self, key: Any, value: Value) -> None:
        if len(key) <= LONGEST_KEY:
            if len(self) >= self._most:
                self.clear()
            self[key] = value


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts shared by all lines that differ only in their digits and hexadecimal numbers.

    Attributes:
        cls: lines of different classes are different events, however similar: the level, and the
            key of a structured line.
        kind: of reading/text.yaml, "" for a plain line.
        level, stage: as it states them, "" for none.
        look, alone: a signature may match an entry with this line, the line by itself.
        step, job_id, world: it may state a step, the number of the scheduler's job, these of the
            size and the layout of the job.
    """

    kind: str
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
    def job_wide(self) -> bool:
        """It may state what holds for the whole job."""
        return bool(self.world or self.job_id)


class LineAnalyser:
    """Facts of lines and signatures of entries, with caches that the files of a process share."""

    def __init__(self, library: SignatureLibrary) -> None:
        self.library = library
        #: forms of prefixes -> the shapes of lines in files that use them (forms.py)
        self.readers: dict[object, Any] = {}
        self._facts: BoundedCache[Facts] = BoundedCache()
        #: (text, level) -> as `SignatureLibrary.find`
        self.find = lru_cache(maxsize=2048)(library.find)

    def facts(self, line: bytes) -> Facts:
        """Facts of a line without its prefix."""
        plain = plain_pointers(plain_numbers(line.rstrip()))
        facts = self._facts.get(plain)
        if facts is None:
            facts = self._new_facts(plain)
            self._facts.put(plain, facts)
        return facts

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
            kind=kind_of(plain),
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


#: Events of a job at most; texts that fit none of them are of the event `OTHERS`.
MAX_JOB_EVENTS = 5000
OTHERS = "<others>"
#: A word that differs among the texts of an event.
ANY = "<*>"


class Events:
    """Groups texts to events with Drain (drain3, in memory; no state is loaded).

    A text keeps its first event. Texts of different classes or first words never share one. The
    settings of Drain are ours; L4 states none. `full` texts fit none of `max_events` events.
    """

    def __init__(self, max_events: int = MAX_JOB_EVENTS) -> None:
        self._drain = Drain(
            depth=5, sim_th=0.6, max_children=200, param_str=ANY, parametrize_numeric_tokens=False
        )
        self._max = max_events
        self._number_of: dict[tuple[str, str], int] = {}
        #: by number, and number by cluster of Drain; None is that of `OTHERS`
        self._clusters: list[int | None] = []
        self._of_cluster: dict[int | None, int] = {}
        self.full = 0

    def __len__(self) -> int:
        return len(self._clusters)

    def number(self, text: str, cls: str = "") -> int:
        """The event of a masked text; numbers count from 0."""
        number = self._number_of.get((cls, text))
        if number is None:
            cluster, tokens = None, _tokens(text, cls)
            room = len(self) < self._max or self._search(tokens) is not None
            if text != OTHERS and room:
                cluster = self._drain.add_log_message(" ".join(tokens))[0].cluster_id
            else:
                self.full += 1
            number = self._of_cluster.setdefault(cluster, len(self))
            self._clusters += [cluster] * (number == len(self))
            self._number_of[cls, text] = number
        return number

    def template(self, number: int) -> str:
        """The words that all texts of an event share, <*> for those that differ."""
        cluster = self._clusters[number]
        if cluster is None:
            return OTHERS
        return " ".join(self._drain.id_to_cluster[cluster].log_template_tokens[1:])

    def like(self, text: str, cls: str = "") -> int | None:
        """The event with the same words but for <*> in either; None without one.

        Stricter than `number`, which would take "saved <PATH>" and "lost <PATH>" for one.
        """
        tokens = _tokens(text, cls)
        known, found = self._number_of.get((cls, text)), self._search(tokens)
        if known is not None or found is None:
            return known
        pairs = zip(tokens, found.log_template_tokens, strict=True)
        same = all(token == other or ANY in (token, other) for token, other in pairs)
        return self._of_cluster[found.cluster_id] if same else None

    def _search(self, tokens: list[str]) -> LogCluster | None:
        return self._drain.tree_search(self._drain.root_node, tokens, self._drain.sim_th, False)


def _tokens(text: str, cls: str) -> list[str]:
    # A class is one token, whatever it is called.
    return ["class:" + cls.replace(" ", "_"), *text.split()]
