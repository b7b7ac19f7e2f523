"""Parse the training step of a log entry, in the formats of common trainers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from rmetric.readers.text_pairs import stated_step


class StepMatch(NamedTuple):
    """A step and the form of its line; the lines of one form make one count."""

    form: str
    step: int


#: Form of lines that count samples, which stand in for steps where there are none.
SAMPLES = "samples_count"
#: Words before the number that make it a setting, a plan or another counter than training's.
_REFUSED = re.compile(
    r"\b(max\w*|min|total|num|number|every|each|until|till|per|warm-?up|sav\w+|load\w*|resum\w+|"
    r"restor\w+|exit\w*|last|previous|next|from|since|interval|eval\w*|valid\w*|val|test\w*|"
    r"docker|checkpoint\w*|ckpt|decay|skipp\w+)\b"
    r"|\b(?:chain|setup|build) $"  # of jobs, or of an installation
    r"|\bjob(?:[ _]?id)?[ =:]*\d+[, ]+$"  # a scheduler's step of a job
)
#: A whole number that is no part of a longer one, a fraction, a date or a quantity.
_NUMBER = r"(?P<step>\d{1,3}(?:,\d{3})+(?!\d)|\d{1,12})(?![\w%]|\.\d|-\d)"
_OPEN = r"['\"]?[ \t]*[:=#]?[ \t]*['\"]?[\[(<]?[ \t]*"
_WORD = re.compile(
    r"(?<![\w./-])(?P<word>(?:global|train|training|current|optimizer|optim|opt)?[ _]?"
    r"(?:step|iteration|iter|update|upd)(?:[ _]num)?|num_updates|it(?=[ \t]*[:=])|batch_idx"
    # "it" is a word of prose too, but not where a line's text begins with it.
    r"|(?:(?<=^)|(?<=\] )|(?<=[|>] ))it(?= +\d+ \w))" + _OPEN + _NUMBER
)
_OF_EPOCH = re.compile(
    r"\bepochs?\b[^\d\n]{0,4}(?P<epoch>\d+)(?P<of>[ \t]*/[ \t]*\d+)?[^\n]{0,40}?"
    r"(?:\[|\b(?:step|iter|iteration|batch)\b[: \[]*)[ \t]*(?P<step>\d+)[ \t]*/[ \t]*(?P<all>\d+)"
)
_BAR = re.compile(r"(?<!\d)(?:\d+%\|[^\n|]*\| *)?(?P<step>\d+)/(?P<all>\d+) \[\d+:\d+[^\n\r\]]*")
_BETWEEN_BARS = re.compile(r"[\n|\r]")
_ENDLESS_BAR = re.compile(r"^(?P<what>[^\n|\d]*)(?P<step>\d+)it \[\d+:\d+")
_ANY_BAR = re.compile(r"\d/\d+ \[\d+:\d|\dit \[\d+:\d")
_BAR_OF_TRAINING = re.compile(
    r"^(?:train(ing)?|epochs?|steps?|iter(ation)?s?|it|progress|rank|of|\d|\W)*$"
)
_EPOCH = re.compile(r"\bepochs? *\[?(\d+)")
_BATCHES = re.compile(
    r"\bbatch(?:es)? *=? *\[? *(\d+) */ *\d+|(\d+)/ *\d+ batches\b|\] batch \[(\d+)\]"
)
_ROW = re.compile(r"^ *(\d+)/\d+ +[\d.]+g +[\d.]")
_SHORT = re.compile(r"^(?:\d+\||s:)(\d+)(?:\|loss\b| trl:)")
_COMPOSER = re.compile(r"\[ba=(\d+)\]\[event=")
_MLPERF = re.compile(r"\W*:::ml")
_SAMPLES = re.compile(r"\"(?P<word>step_num|iter_num|step|samples_count)\": *(?P<step>\d+)\b")
_OF_EVALUATION = re.compile(r"\"(key\": *\")?(eval|valid)\w*\"")
_MLPERF_KEY = re.compile(r"\"key\": *\"(\w+)\"(?:, *\"value\": *\{\"(\w+)\")?")
_LOSSES = ("loss", "entropy", "xent", "grad_norm", "gnorm")
#: With the number that the words name: no mark parts them (`text_pairs.name_in`).
_BESIDE_LOSS = re.compile(
    r"(?:step|iter(?:\(\w+\))?|update|batch|\bit\b)[^|,;\[\](){}<>]*"
    r"(?:=\s*\{\s*'[^']*':)?[:=(\[{\s'\"]*[-+]?\.?\d"
)
_DOCKER = re.compile(r"^step \d+/\d+ : ")


def _mlperf(text: str) -> StepMatch | None:
    found, key = _SAMPLES.search(text), _MLPERF_KEY.search(text)
    if found is None or key is None or _OF_EVALUATION.search(text):
        return None
    form = f"{key[1]} {key[2] or ''} {found['word']}"
    return StepMatch(SAMPLES if found["word"] == SAMPLES else form, int(found["step"]))


def _progress_bar(text: str) -> StepMatch | None:
    """tqdm; "Epoch 3: 45%|..| 120/267 [" counts epochs from 0, as Lightning does."""
    # The last bar of an entry is the newest; what it counts stands behind the one before.
    begin, found = 0, None
    for bar in _BAR.finditer(text):
        begin, found = found.end() if found else 0, bar
    if found is not None:
        what = _BETWEEN_BARS.split(text[begin : found.start()])[-1]
    else:
        found = _ENDLESS_BAR.search(text)
        what = found["what"] if found else ""
    if found is None or not _BAR_OF_TRAINING.match(what):
        return None
    step, epoch = int(found["step"]), _EPOCH.search(what)
    if epoch and "all" in found.groupdict():
        step += int(epoch[1]) * int(found["all"])
    return StepMatch("bar", step)


def _of_epoch(text: str) -> StepMatch | None:
    """Epochs count from 1 in "Epoch [3/10], Step [120/267]", from 0 in "Epoch: [3][120/267]"."""
    found = _OF_EPOCH.search(text)
    if found is None or _REFUSED.search(text[: found.start()][-60:]):
        return None
    epoch = int(found["epoch"]) - (found["of"] is not None)
    return StepMatch("of epoch", max(0, epoch) * int(found["all"]) + int(found["step"]))


def _word(text: str) -> StepMatch | None:
    for found in _WORD.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if not _REFUSED.search(line[-30:]) and not _DOCKER.match(text):
            step = int(found["step"].replace(",", ""))
            return StepMatch(found["word"].strip(" _").replace(" ", "_"), step)
    return None


def _beside_loss(text: str) -> StepMatch | None:
    """A step in the words of the readers of training logs (rmetric/readers/names.py)."""
    if _WORD.search(text):  # refused
        return None
    line = next((line for line in text.split("\n") if any(loss in line for loss in _LOSSES)), "")
    step = stated_step(line)
    return None if step is None else StepMatch("beside a loss", step)


def _alone(form: str, pattern: re.Pattern[str], text: str) -> StepMatch | None:
    found = pattern.search(text)
    if found is None or _REFUSED.search(text[: found.start()][-30:]):
        return None
    return StepMatch(form, int(next(filter(None, found.groups()))))


class _Form(NamedTuple):
    """One way to state a step: an entry in lower case with one of the parts and a match has it.

    The parts are quicker to look for; the pattern matches "0" for any number too.
    """

    parts: tuple[str, ...]
    pattern: re.Pattern[str]
    read: Callable[[str], StepMatch | None]


_OF_MLPERF = _Form((":::ml",), _SAMPLES, _mlperf)
_FORMS = (
    _Form((" [",), _ANY_BAR, _progress_bar),  # tqdm
    _Form(("epoch",), _OF_EPOCH, _of_epoch),
    _Form(("step", "it", "upd", "batch_idx"), _WORD, _word),
    _Form(("batch",), _BATCHES, partial(_alone, "batches", _BATCHES)),
    _Form(_LOSSES, _BESIDE_LOSS, _beside_loss),
    # A row of the table that YOLO prints: an epoch, the memory, the losses.
    _Form(("g ",), _ROW, partial(_alone, "row", _ROW)),
    _Form(("|loss", " trl:"), _SHORT, partial(_alone, "short", _SHORT)),  # torchtune, llm.c
    _Form(("[ba=",), _COMPOSER, partial(_alone, "batch of engine", _COMPOSER)),  # Composer
)
_PARTS = [(part, at) for at, form in enumerate(_FORMS) for part in form.parts]
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
    if _NO_STEP.search(text):
        return None
    return next((found for form in _forms_of(text) if (found := form.read(text))), None)


def planned_steps(text: str, step: int) -> int | None:
    """The planned number of steps, where the entry states it beside its step.

    >>> planned_steps(" iteration       30/    1000 | consumed samples: 120", 30)
    1000
    """
    found = re.search(rf"(?<![\d.]){step}[\])]?[ \t]*(?:/|\bof\b)[ \t]*(\d{{1,12}})(?![\d.])", text)
    return int(found[1]) if found and int(found[1]) >= step else None


def may_state_step(plain: str) -> bool:
    """Return False only if `match_step` is None whatever the numbers; `plain` has "0" for each."""
    return bool(_forms_of(plain[:_SOUGHT].lower()))


def _forms_of(text: str) -> list[_Form]:
    """The forms in which an entry in lower case may state a step."""
    if _MLPERF.match(text):
        return [_OF_MLPERF] if _SAMPLES.search(text) else []
    near = sorted({at for part, at in _PARTS if part in text})
    return [_FORMS[at] for at in near if _FORMS[at].pattern.search(text)]
