"""The forms in which an entry of a log states its training step, for the diagnosis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from rmetric.readers.text_pairs import THOUSANDS, stated_step


class StepMatch(NamedTuple):
    """A step and the form of its line; the lines of one form make one count."""

    form: str
    step: int


class StepForm(NamedTuple):
    """One form: in an entry in lower case with a gate, `read` makes the step of the first match.

    The gates are quicker to look for; the pattern matches "0" for any number too.
    """

    name: str
    gates: tuple[str, ...]
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str], str], StepMatch | None]


#: Form of lines that count samples, which stand in for steps where there are none.
SAMPLES = "samples_count"
#: tqdm's percentage and bar, which stand before its count.
BAR = r"\d+%\|[^|\n]*\|"
#: Words before the number that make it a setting, a plan or another counter than training's.
_REFUSED = re.compile(
    r"\b(max\w*|min|total|num|number|every|each|until|till|per|warm-?up|sav\w+|load\w*|resum\w+|"
    r"restor\w+|exit\w*|last|previous|next|from|since|interval|eval\w*|valid\w*|val|test\w*|"
    r"docker|checkpoint\w*|ckpt|decay|skipp\w+)\b"
    r"|\b(?:chain|setup|build) $"  # of jobs, or of an installation
    r"|\bjob(?:[ _]?id)?[ =:]*\d+[, ]+$"  # a scheduler's step of a job
)
_WORD = re.compile(
    r"(?<![\w./-])(?P<word>(?:global|train|training|current|optimizer|optim|opt)?[ _]?"
    r"(?:step|iteration|iter|update|upd)(?:[ _]num)?|num_updates|it(?=[ \t]*[:=])|batch_idx"
    # "it" is a word of prose too, but not where a line's text begins with it.
    r"|(?:(?<=^)|(?<=\] )|(?<=[|>] ))it(?= +\d+ \w))['\"]?[ \t]*[:=#]?[ \t]*['\"]?[\[(<]?[ \t]*"
    # A whole number that is not part of a longer one, a fraction, a date or a quantity.
    rf"(?P<step>{THOUSANDS}(?!\d)|\d{{1,12}})(?![\w%]|\.\d|-\d)"
)
_DOCKER = re.compile(r"^step \d+/\d+ : ")
_OF_EPOCH = re.compile(
    r"\bepochs?\b[^\d\n]{0,4}(?P<epoch>\d+)(?P<of>[ \t]*/[ \t]*\d+)?[^\n]{0,40}?"
    r"(?:\[|\b(?:step|iter|iteration|batch)\b[: \[]*)[ \t]*(?P<step>\d+)[ \t]*/[ \t]*(?P<all>\d+)"
)
_COUNTED_BAR = re.compile(rf"(?<!\d)(?:{BAR} *)?(?P<step>\d+)/(?P<all>\d+) \[\d+:\d+[^\n\r\]]*")
_ENDLESS_BAR = re.compile(r"^(?P<what>[^\n|\d]*)(?P<step>\d+)it \[\d+:\d+")
_BAR_OF_TRAINING = re.compile(
    r"^(?:train(ing)?|epochs?|steps?|iter(ation)?s?|it|progress|rank|of|\d|\W)*$"
)
_EPOCH = re.compile(r"\bepochs? *\[?(\d+)")
_BATCHES = re.compile(
    r"\bbatch(?:es)? *=? *\[? *(\d+) */ *\d+|(\d+)/ *\d+ batches\b|\] batch \[(\d+)\]"
)
_SHORT = re.compile(r"^(?:\d+\||s:)(\d+)(?:\|loss\b| trl:)")
_MLPERF = re.compile(r"\W*:::ml")
_COUNTER = re.compile(r"\"(?P<word>step_num|iter_num|step|samples_count)\": *(?P<step>\d+)\b")
_OF_EVALUATION = re.compile(r"\"(key\": *\")?(eval|valid)\w*\"")
_MLPERF_KEY = re.compile(r"\"key\": *\"(\w+)\"(?:, *\"value\": *\{\"(\w+)\")?")
_LOSS_WORDS = ("loss", "entropy", "xent", "grad_norm", "gnorm")
#: With the number that the words name: no mark parts them (`text_pairs.name_in`).
_BESIDE_LOSS = re.compile(
    r"(?:step|iter(?:\(\w+\))?|update|batch|\bit\b)[^|,;\[\](){}<>]*"
    r"(?:=\s*\{\s*'[^']*':)?[:=(\[{\s'\"]*[-+]?\.?\d"
)


def _mlperf(found: re.Match[str], form: str) -> StepMatch | None:
    key, word = _MLPERF_KEY.search(found.string), found["word"]
    if key is None or _OF_EVALUATION.search(found.string):
        return None
    form = SAMPLES if word == SAMPLES else f"{key[1]} {key[2] or ''} {word}"
    return StepMatch(form, int(found["step"]))


def _progress_bar(first: re.Match[str], form: str) -> StepMatch | None:
    """tqdm; "Epoch 3: 45%|..| 120/267 [" counts epochs from 0, as Lightning does."""
    text, begin, found = first.string, 0, _ENDLESS_BAR.match(first.string)
    what = found["what"] if found else ""
    # The last bar of an entry is the newest; what it counts stands behind the one before.
    for bar in _COUNTED_BAR.finditer(text):
        what = re.split(r"[\n|\r]", text[begin : bar.start()])[-1]
        begin, found = bar.end(), bar
    if found is None or not _BAR_OF_TRAINING.match(what):
        return None
    step, epoch = int(found["step"]), _EPOCH.search(what)
    if epoch and found.re is _COUNTED_BAR:
        step += int(epoch[1]) * int(found["all"])
    return StepMatch(form, step)


def _of_epoch(found: re.Match[str], form: str) -> StepMatch | None:
    """Epochs count from 1 in "Epoch [3/10], Step [120/267]", from 0 in "Epoch: [3][120/267]"."""
    if _REFUSED.search(found.string[: found.start()][-60:]):
        return None
    epoch = int(found["epoch"]) - (found["of"] is not None)
    return StepMatch(form, max(0, epoch) * int(found["all"]) + int(found["step"]))


def _word(first: re.Match[str], form: str) -> StepMatch | None:
    text = first.string
    for found in () if _DOCKER.match(text) else _WORD.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if not _REFUSED.search(line[-30:]):
            form = found["word"].strip(" _").replace(" ", "_")
            return StepMatch(form, int(found["step"].replace(",", "")))
    return None


def _beside_loss(found: re.Match[str], form: str) -> StepMatch | None:
    """A step in the words of the readers of training logs (rmetric/readers/names.py)."""
    if _WORD.search(found.string):  # refused
        return None
    lines = (line for line in found.string.split("\n") if any(loss in line for loss in _LOSS_WORDS))
    step = stated_step(next(lines, ""))
    return None if step is None else StepMatch(form, step)


def _number(found: re.Match[str], form: str) -> StepMatch | None:
    if _REFUSED.search(found.string[: found.start()][-30:]):
        return None
    return StepMatch(form, int(next(filter(None, found.groups()))))


#: The first that states a step counts. Lines with MLPerf's mark have its form or none.
STEP_FORMS = [
    StepForm("MLPerf", (":::ml",), _COUNTER, _mlperf),
    StepForm("bar", (" [",), re.compile(r"\d/\d+ \[\d+:\d|\dit \[\d+:\d"), _progress_bar),
    StepForm("of epoch", ("epoch",), _OF_EPOCH, _of_epoch),
    StepForm("word", ("step", "it", "upd", "batch_idx"), _WORD, _word),
    StepForm("batches", ("batch",), _BATCHES, _number),
    StepForm("beside a loss", _LOSS_WORDS, _BESIDE_LOSS, _beside_loss),
    # A row of the table that YOLO prints: an epoch, the memory, the losses.
    StepForm("row", ("g ",), re.compile(r"^ *(\d+)/\d+ +[\d.]+g +[\d.]"), _number),
    StepForm("short", ("|loss", " trl:"), _SHORT, _number),  # torchtune, llm.c
    StepForm("batch of engine", ("[ba=",), re.compile(r"\[ba=(\d+)\]\[event="), _number),
]
#: Characters of an entry in which its step is sought.
_SOUGHT = 2000
#: A traceback, or the table of values that wandb prints at the end.
_NO_STEP = re.compile(r"traceback \(most|^\s*(?:file \"|wandb: )")


@lru_cache(maxsize=512)
def match_step(text: str) -> StepMatch | None:
    """The training step that an entry states.

    Steps of evaluations, settings ("save_steps=500", "train_iters ... 5000", "step_size") and
    plans ("resume from iteration 500") are none. Where MLPerf's log keys name no step, the
    number of samples stands in for it.
    """
    text = text[:_SOUGHT].lower()
    forms = () if _NO_STEP.search(text) else _forms_of(text)
    return next(filter(None, (form.read(found, form.name) for form, found in forms)), None)


def may_state_step(plain: str) -> bool:
    """Return False only if `match_step` is None whatever the numbers; `plain` has "0" for each."""
    return any(True for _ in _forms_of(plain[:_SOUGHT].lower()))


def _forms_of(text: str) -> Iterator[tuple[StepForm, re.Match[str]]]:
    """The forms in which an entry in lower case may state a step, each with its first match."""
    forms = STEP_FORMS[:1] if _MLPERF.match(text) else STEP_FORMS[1:]
    near = (form for form in forms if any(map(text.__contains__, form.gates)))
    return ((form, found) for form in near if (found := form.pattern.search(text)))


def planned_steps(text: str, step: int) -> int | None:
    """The planned number of steps, where the entry states it beside its step.

    >>> planned_steps(" iteration       30/    1000 | consumed samples: 120", 30)
    1000
    """
    found = re.search(rf"(?<![\d.]){step}[\])]?[ \t]*(?:/|\bof\b)[ \t]*(\d{{1,12}})(?![\d.])", text)
    return int(found[1]) if found and int(found[1]) >= step else None
