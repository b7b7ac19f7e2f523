"""The training stage of a log entry (L4, section 4.4), by stages.yaml or by its traceback.

Only announcements of work are rules. An error states what failed, not the current stage, so the
stage of a crash is that of the lines before it. Settings, commands and tracebacks are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from rmetric.diagnosis.reading import read_yaml
from rmetric.diagnosis.reading.text import WordIndex
from rmetric.readers.step_forms import match_step


class StageRule(NamedTuple):
    """One way in which an entry states its stage: a row of stages.yaml."""

    stage: str
    program: str
    gates: Sequence[str]
    patterns: Sequence[str]
    example: str


#: The first that matches counts.
RULES = [StageRule(**row) for row in read_yaml(Path(__file__).with_name("stages.yaml"))]
_PATTERNS = [re.compile("|".join(rule.patterns)) for rule in RULES]
_RULE_GATES = WordIndex((gate.encode(), at) for at, rule in enumerate(RULES) for gate in rule.gates)
_MLPERF_MARK = ":::ml"  # :::MLLOG and :::MLL
#: Entries that name stages without being in one.
_NONE = re.compile(
    r"traceback \(most recent|^\s*file \"|\b(error|exception)\b[:\]]|\bfailed\b|\bno module named\b"
)
#: What a rank logs before it reads data or a checkpoint and does not come back.
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
#: A frame of a traceback, and the functions that its line of code calls.
FRAME = re.compile(
    r"^\s*File \"(?P<path>.{1,400})\", line (?P<line>\d+), in (?P<name>\S+)"
    r"(?:\n(?![ \t]*File \")[ \t]+(?P<code>[^\n]{1,300}))?",
    re.MULTILINE,
)
_CALLS = re.compile(r"\b([A-Za-z_]\w*)\(")
#: Frames of libraries, of the interpreter and of what it makes up.
NOT_OWN = re.compile(r"(?:site|dist)-packages|/lib(?:64)?/python[\d.]*/|[\\/]Lib[\\/]|^<")
#: Frames without a stage: a launcher starts workers again, a list of layers has items too, and
#: activations are computed again from what is called a checkpoint.
_LAUNCHER_FILES = re.compile(
    r"[\\/]torch[\\/](?:distributed[\\/](?:run|launch|elastic)|nn[\\/]|utils[\\/]checkpoint)"
    r"|tensor_parallel[\\/]random|activation_checkpoint"
)
_CHAINED = re.compile(
    r"^(?:During handling of the above exception|The above exception was the direct)", re.MULTILINE
)
#: Name of a function that stands for a file's -> such files, whatever their functions are called.
_FILES = {
    "checkpoint": re.compile(r"(?i)checkpoint\w*(?:\.py$|[\\/])"),
    "dataset": re.compile(r"(?i)data_?(?:set|loader)s?\w*\.py$|torch[\\/]utils[\\/]data[\\/]"),
}
#: Stage -> words in a function's name; of the innermost frame that any fits the first that does.
_STAGES = {stage: re.compile(words, re.IGNORECASE) for stage, words in {
    "checkpoint": r"checkpoint|save_(?:model|state|pretrained|sharded)|(?:^|\.)_?save$",
    # Validation of arguments or of a result is not that of a model.
    "evaluate": r"^_?(?:run_)?(?:eval\w*|validation\w*)|_(?:eval|validation)"
                r"|(?:^|_)validate(?:_(?:epoch|step|loop|model|one|and))?(?![a-z_])",
    "load data": r"__getitem__|collate|data_?loader|dataset|load_data|_next_data"
                 r"|^_?fetch|get_batch",
    "initialise": r"init_process_group|initiali[sz]e|setup_(?:model|distributed)|build_model"
                  r"|from_pretrained|^_new_process_group|^_?load_(?:state|weights|model|params)"
                  r"|^_?restore",
    "tear-down": r"destroy_process_group|^_?(?:clean_?up|tear_?down|finali[sz]e|__del__)$",
    "compile": r"^compile|_compile|inductor|dynamo",
}.items()}  # fmt: skip
_TRAINS = re.compile(r"^_?(?:inner_)?train(?:ing)?(?:_\w*(?:step|loop|batch|epoch|iter\w*))?$|^fit")
_WORKING = ("train", "evaluate", "checkpoint", "tear-down")
_START = ("initialise", "load data", "compile")


def stated_stage(text: str, rules: Sequence[int] | None = None, *, may_step: bool = True) -> str:
    """The stage that an entry states, of `job.STAGES`; "" where it states none."""
    text = text[:500]
    lower = text.lower()
    rules = possible_rules(lower.encode()) if rules is None else rules
    found = next((RULES[at].stage for at in rules if _PATTERNS[at].search(lower)), "")
    if not found and may_step and _MLPERF_MARK not in lower and match_step(text):
        found = "train"
    return "" if found and _NONE.search(lower) else found


def possible_rules(form: bytes, words: Collection[bytes] | None = None) -> Sequence[int]:
    """Places in `RULES` of those that may match an entry, whatever its digits are."""
    return sorted(set(_RULE_GATES.items(form, words)))


def awaited(text: str) -> str:
    """The stage, "load data" or "checkpoint", for which an entry or a stack waits; "" for none."""
    return next((stage for stage, words in _WAITS_IN.items() if words.search(text)), "")


def next_stage(now: str, stated: str) -> str:
    """The stage after an entry that states `stated`, "" for none.

    A job that works does not go back to its start by the lines of a start: communicators are made
    and kernels compiled when they are first needed. Only a launch begins anew.
    """
    return now if not stated or (now in _WORKING and stated in _START) else stated


def stage_of(text: str) -> str:
    """The stage in which the entry's traceback was raised; "" where it is not known."""
    # The first of a chain of exceptions is the failure; the others are of handling it.
    for raised in _CHAINED.split(text):
        names = _names(raised)
        for name in reversed(names):
            if found := next((stage for stage, words in _STAGES.items() if words.search(name)), ""):
                return found
        if any(map(_TRAINS.search, names)):
            return "train"
    return ""


def _names(raised: str) -> list[str]:
    """Names of functions, outermost first: of each frame's file, its own, and what it calls."""
    names = []
    for frame in FRAME.finditer(raised):
        path, name = frame["path"], frame["name"]
        if _LAUNCHER_FILES.search(path):
            continue
        if name != "<module>":  # a whole program may be called after its data
            names += [function for function, files in _FILES.items() if files.search(path)]
        names.append(name)
        if not NOT_OWN.search(path):
            names += _CALLS.findall(frame["code"] or "")
    return names
