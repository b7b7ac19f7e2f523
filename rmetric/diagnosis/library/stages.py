"""The training stage of a log entry (L4, section 4.4), by stages.yaml or by its traceback.

The stage of a crash is that of the lines before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from msgspec import Struct, convert

from rmetric._util.lazy import read_yaml
from rmetric.diagnosis.reading.text import WordIndex
from rmetric.readers.step_forms import match_step


class StageRule(Struct, frozen=True):
    """One way in which a text states its stage, "" for none: a row of stages.yaml."""

    stage: str
    patterns: tuple[str, ...]
    example: str
    program: str = ""
    gates: tuple[str, ...] = ()


#: What the texts are -> their rules.
RULES = convert(read_yaml(Path(__file__).with_name("stages.yaml")), dict[str, list[StageRule]])
_PATTERNS = {
    kind: [re.compile("|".join(rule.patterns), re.IGNORECASE) for rule in rules]
    for kind, rules in RULES.items()
}
_STAGE_GATES = WordIndex(
    (gate.encode(), at) for at, rule in enumerate(RULES["entries"]) for gate in rule.gates
)
#: A frame of a traceback, and the functions that its line of code calls.
FRAME = re.compile(
    r"^\s*File \"(?P<path>.{1,400})\", line (?P<line>\d+), in (?P<name>\S+)"
    r"(?:\n(?![ \t]*File \")[ \t]+(?P<code>[^\n]{1,300}))?",
    re.MULTILINE,
)
_CALLS = re.compile(r"\b([A-Za-z_]\w*)\(")
#: Frames of libraries, of the interpreter and of what it makes up.
NOT_OWN = re.compile(r"(?:site|dist)-packages|/lib(?:64)?/python[\d.]*/|[\\/]Lib[\\/]|^<")
_CHAINED = re.compile(
    r"^(?:During handling of the above exception|The above exception was the direct)", re.MULTILINE
)
_WORKING = ("train", "evaluate", "checkpoint", "tear-down")
_START = ("initialise", "load data", "compile")


def stage_by_rules(kind: str, text: str, places: Iterable[int] | None = None) -> str | None:
    """The stage by the first rule, of those at `places`, that matches; None where none does."""
    tried = range(len(RULES[kind])) if places is None else places
    return next((RULES[kind][at].stage for at in tried if _PATTERNS[kind][at].search(text)), None)


def stated_stage(text: str, rules: Sequence[int] | None = None, *, may_step: bool = True) -> str:
    """The stage that an entry states, of `job.STAGES`; "" where it states none."""
    text = text[:500]
    places = possible_rules(text.lower().encode()) if rules is None else rules
    found = stage_by_rules("entries", text, places)
    if found is None:
        return "train" if may_step and match_step(text) else ""
    return found


def possible_rules(form: bytes, words: Collection[bytes] | None = None) -> Sequence[int]:
    """Places of the rules of entries that may match one, whatever its digits are."""
    return sorted(set(_STAGE_GATES.items(form, words)))


def awaited(text: str) -> str:
    """The stage, "load data" or "checkpoint", for which an entry or a stack waits; "" for none."""
    return stage_by_rules("waits", text) or ""


def next_stage(now: str, stated: str) -> str:
    """The stage after an entry that states `stated`, "" for none.

    A job that works does not go back to its start by the lines of a start: communicators are made
    and kernels compiled when they are first needed. Only a launch begins anew.
    """
    return now if not stated or (now in _WORKING and stated in _START) else stated


def stage_of(text: str) -> str:
    """The stage in which the entry's traceback was raised; "" where it is not known."""
    # The first of a chain of exceptions is the failure; the others are of handling it.
    stages = next(filter(None, map(_stages, _CHAINED.split(text))), [""])
    return next((stage for stage in stages if stage != "train"), "train")


def _stages(raised: str) -> list[str]:
    """Stages of a traceback, innermost first: of what a frame calls, its function and its file."""
    stages = list[str | None]()
    for frame in FRAME.finditer(raised):
        path, name = frame["path"], frame["name"]
        of_file = stage_by_rules("files", path)
        if of_file == "":
            continue
        if name != "<module>":  # a whole program may be called after its data
            stages.append(of_file)
        calls = [] if NOT_OWN.search(path) else _CALLS.findall(frame["code"] or "")
        stages += [stage_by_rules("functions", function) for function in (name, *calls)]
    return [stage for stage in reversed(stages) if stage]
