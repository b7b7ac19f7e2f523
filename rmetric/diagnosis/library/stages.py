"""Rules that assign a training stage to a log entry (L4, section 4.4), read from stages.yaml.

Only announcements of work are rules. An error states what failed, not the current stage, so the
stage of a crash is that of the lines before it. Settings, commands and tracebacks are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from rmetric.diagnosis.library.files import LOADER
from rmetric.diagnosis.reading.steps import match_step
from rmetric.diagnosis.reading.text import WordIndex


class StageRule(NamedTuple):
    """One way in which an entry states its stage: a row of stages.yaml."""

    stage: str
    program: str
    gates: Sequence[str]
    patterns: Sequence[str]
    example: str


_TABLE = Path(__file__).with_name("stages.yaml").read_text(encoding="utf-8")
#: The first that matches counts.
RULES = [StageRule(**entry) for entry in yaml.load(_TABLE, LOADER)]
_PATTERNS = [re.compile("|".join(rule.patterns)) for rule in RULES]
_GATES = WordIndex((gate.encode(), at) for at, rule in enumerate(RULES) for gate in rule.gates)
_MLPERF = ":::ml"  # :::MLLOG and :::MLL
#: Entries that name stages without being in one.
_NONE = re.compile(
    r"traceback \(most recent|^\s*file \"|\b(error|exception)\b[:\]]|\bfailed\b|\bno module named\b"
)
#: What a rank says before it reads data or a checkpoint and does not come back.
_WAITS_IN = {
    "checkpoint": re.compile(
        r"(?i)check-?point|ckpt|\bsav(?:e|ing)\b|state[_ ]dict|write_(?:data|files)"
    ),
    "load data": re.compile(
        r"(?i)\bshards?\b|\bdata\.py\b|\w+_iterator\b|data_?loader|data_?set|fetch|download"
        r"|mini-?batch|next[ _]batch"
        r"|\b(?:s3|gs|gcs|az|hdfs)://|\bcorpus\b|\bmemmap\b|\bread(?:ing)? samples?\b"
        r"|\.(?:tar|mds|arrow|parquet|jsonl|tfrecord|np[yz]|bin|zst)\b"
    ),
}
_WORKING = ("train", "evaluate", "checkpoint", "tear-down")
_START = ("initialise", "load data", "compile")


def stated_stage(text: str, rules: Sequence[int] | None = None, *, may_step: bool = True) -> str:
    """The stage that an entry states, of `job.STAGES`; "" where it states none."""
    text = text[:500]
    lower = text.lower()
    rules = possible_rules(lower.encode()) if rules is None else rules
    found = next((RULES[at].stage for at in rules if _PATTERNS[at].search(lower)), "")
    if not found and may_step and _MLPERF not in lower and match_step(text):
        found = "train"
    return "" if found and _NONE.search(lower) else found


def possible_rules(form: bytes, words: Collection[bytes] | None = None) -> Sequence[int]:
    """Places in `RULES` of those that may match an entry, whatever its digits are."""
    return sorted(set(_GATES.items(form, words)))


def awaited(text: str) -> str:
    """The stage, "load data" or "checkpoint", for which an entry or a stack waits; "" for none."""
    return next((stage for stage, words in _WAITS_IN.items() if words.search(text)), "")


def stage_of_wait(text: str) -> str:
    """The stage at which a rank waits whose last entry or stack this is; "" for none."""
    return awaited(text) or stated_stage(text)


def next_stage(now: str, stated: str) -> str:
    """The stage after an entry that states `stated`, "" for none.

    A job that works does not go back to its start by the lines of a start: communicators are made
    and kernels compiled when they are first needed. Only a launch begins anew.
    """
    return now if not stated or (now in _WORKING and stated in _START) else stated
