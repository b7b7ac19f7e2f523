"""Which training step does an entry tell? The forms that trainings print, and a learned one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple


class Told(NamedTuple):
    """A step, and the form in which it was told: lines of one form count together."""

    form: str
    step: int


#: Words before the number that make it a setting, a plan or another counter than training's.
_REFUSED = re.compile(
    r"\b(max\w*|min|total|num|number|every|each|until|till|per|warm-?up|sav\w+|load\w*|resum\w+|"
    r"restor\w+|exit\w*|last|previous|next|from|since|interval|eval\w*|valid\w*|val|test\w*|"
    r"docker|checkpoint\w*|ckpt|decay|skipp\w+)\b"
)
#: A whole number that is no part of a longer one, a fraction, a date or a quantity.
_NUMBER = r"(?P<step>\d{1,12})(?![\w%]|\.\d|-\d)"
_OPEN = r"['\"]?[ \t]*[:=#]?[ \t]*['\"]?[\[(<]?[ \t]*"
_WORD = re.compile(
    r"(?<![\w./-])(?P<word>(?:global|train|training|current|optimizer|optim|opt)?[ _]?"
    r"(?:step|iteration|iter)(?:[ _]num)?|num_updates|it(?=[ \t]*[:=])|batch_idx)" + _OPEN + _NUMBER
)
_OF_EPOCH = re.compile(
    r"\bepochs?\b[^\d\n]{0,4}(?P<epoch>\d+)(?P<of>[ \t]*/[ \t]*\d+)?[^\n]{0,40}?"
    r"(?:\[|\b(?:step|iter|iteration|batch)\b[: \[]*)[ \t]*(?P<step>\d+)[ \t]*/[ \t]*(?P<all>\d+)"
)
_BAR = re.compile(
    r"(?P<what>[^\n|\r]*?)(?:\d+%\|[^\n|]*\| *)?(?P<step>\d+)/(?P<all>\d+) \[\d+:\d+[^\n\r\]]*"
)
_ENDLESS_BAR = re.compile(r"^(?P<what>[^\n|\d]*)(?P<step>\d+)it \[\d+:\d+")
_BAR_OF_TRAINING = re.compile(
    r"^\W*((train(ing)?|epochs?|steps?|iter(ation)?s?|it|progress|rank|of)\W*|\d+\W*)*$"
)
_EPOCH = re.compile(r"\bepochs? *\[?(\d+)")
_BATCHES = re.compile(
    r"\bbatch(?:es)? *\[? *(?P<step>\d+) */ *\d+|(?P<other>\d+)/ *\d+ batches\b"
    r"|\] batch \[(?P<in_brackets>\d+)\]"
)
_ROW = re.compile(r"^ *(?P<step>\d+)/\d+ +[\d.]+g +[\d.]")
_SHORT = re.compile(r"^(?:\d+\||s:)(?P<step>\d+)(?:\|loss\b| trl:)")
_SAMPLES = re.compile(r"\"(?P<word>step_num|iter_num|step|samples_count)\": *(?P<step>\d+)\b")
_OF_EVALUATION = re.compile(r"\"(key\": *\")?(eval|valid)\w*\"")
_KEY = re.compile(r"\"key\": *\"(\w+)\"(?:, *\"value\": *\{\"(\w+)\")?")
_DOCKER = re.compile(r"^step \d+/\d+ : ")


def _mlperf(text: str) -> Told | None:
    found, key = _SAMPLES.search(text), _KEY.search(text)
    if found is None or key is None or _OF_EVALUATION.search(text):
        return None
    return Told(f"{key[1]} {key[2] or ''} {found['word']}", int(found["step"]))


def _progress_bar(text: str) -> Told | None:
    """tqdm; "Epoch 3: 45%|..| 120/267 [" counts epochs from 0, as Lightning does."""
    found = None
    for found in _BAR.finditer(text):  # noqa: B007 - the last bar of an entry is the newest
        pass
    if found is None:
        found = _ENDLESS_BAR.search(text)
    if found is None or not _BAR_OF_TRAINING.match(found["what"]):
        return None
    step, epoch = int(found["step"]), _EPOCH.search(found["what"])
    if epoch and "all" in found.groupdict():
        step += int(epoch[1]) * int(found["all"])
    return Told("bar", step)


def _of_epoch(text: str) -> Told | None:
    """ "Epoch [3/10], Step [120/267]" counts epochs from 1, "Epoch: [3][120/267]" from 0."""
    found = _OF_EPOCH.search(text)
    if found is None or _REFUSED.search(text[: found.start()][-60:]):
        return None
    epoch = int(found["epoch"]) - (found["of"] is not None)
    return Told("of epoch", max(0, epoch) * int(found["all"]) + int(found["step"]))


def _word(text: str) -> Told | None:
    for found in _WORD.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if not _REFUSED.search(line[-30:]) and not _DOCKER.match(text):
            return Told(found["word"].strip(" _").replace(" ", "_"), int(found["step"]))
    return None


def _batches(text: str) -> Told | None:
    found = _BATCHES.search(text)
    if found is None or _REFUSED.search(text[: found.start()][-30:]):
        return None
    return Told("batches", int(found["step"] or found["other"] or found["in_brackets"]))


def _row(text: str) -> Told | None:
    """A row of the table that YOLO prints: an epoch, the memory, the losses."""
    found = _ROW.search(text)
    return Told("row", int(found["step"])) if found else None


def _short(text: str) -> Told | None:
    found = _SHORT.search(text)
    return Told("short", int(found["step"])) if found else None


#: (gate, reader): the gate is sought in the entry and must survive the loss of its digits.
_FORMS: tuple[tuple[str, re.Pattern[str], Callable[[str], Told | None]], ...] = (
    ("MLPerf", re.compile(r"^\W*:::ml"), _mlperf),
    ("tqdm", re.compile(r"/\d* \[|it \["), _progress_bar),
    ("epoch", re.compile("epoch"), _of_epoch),
    ("words", re.compile(r"step|iter|num_updates|\bit[ \t]*[:=]|batch_idx"), _word),
    ("batches", re.compile("batch"), _batches),
    ("YOLO", re.compile(r"^ *\d*/\d* +[\d.]*g "), _row),
    ("torchtune, llm.c", re.compile(r"^\d*\|\d*\|loss|^s:\d* trl:"), _short),
)
_GATE = re.compile("|".join(f"(?:{gate.pattern})" for _, gate, _ in _FORMS).encode())
_TRACE = re.compile(r"traceback \(most|^\s*file \"")


def told(text: str) -> Told | None:
    """The training step that an entry tells.

    Steps of evaluations, settings ("save_steps=500", "train_iters ... 5000", "step_size") and
    plans ("resume from iteration 500") are none. Where MLPerf's log keys name no step, the
    number of samples stands in for it.

    >>> told(" iteration       30/    1000 | consumed samples: 120")
    Told(form='iteration', step=30)
    >>> told("save_steps=500") is None
    True
    """
    text = text[:2000].lower()
    if _TRACE.search(text):
        return None
    for _, gate, read in _FORMS:
        if gate.search(text):
            found = read(text)
            if found is not None or read is _mlperf:
                return found
    return None


def step_of(text: str) -> int | None:
    """The training step that an entry tells; None where it tells none."""
    found = told(text)
    return None if found is None else found.step


def planned_steps(text: str, step: int) -> int | None:
    """How many steps there are to be, where the entry that tells a step says so beside it.

    >>> planned_steps(" iteration       30/    1000 | consumed samples: 120", 30)
    1000
    """
    found = re.search(rf"(?<![\d.]){step}[\])]?[ \t]*(?:/|\bof\b)[ \t]*(\d{{1,12}})(?![\d.])", text)
    return int(found[1]) if found and int(found[1]) >= step else None


def step_gate(form: bytes) -> bool:
    """False only if `told` is None whatever the digits.

    Args:
        form: an entry in lower case without its digits.
    """
    return bool(_GATE.search(form))


class RisingNumber:
    """Learns which number of an event counts, where no known form tells the step.

    A number counts when it has risen by the same whole amount `needed` times on end. Dates and
    clock times do not count. An event is given up after `patience` entries.
    """

    _WHOLE = re.compile(r"(?<![\w.:,\-/])\d{1,9}(?![\w:,\-%]|\.\d|/\d+/)")

    def __init__(self, needed: int = 8, patience: int = 40) -> None:
        self._needed, self._patience = needed, patience
        self._last: dict[tuple[str, int], list[int]] = {}
        self._rises: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._heard: dict[tuple[str, int], int] = {}

    def take(self, stream: str, event: int, text: str) -> Told | None:
        """The step that this entry tells, once the event is known to count."""
        key = (stream, event)
        heard = self._heard.get(key, 0) + 1
        if heard > self._patience and not self._counts(key):
            self._last.pop(key, None)
            self._rises.pop(key, None)
            return None
        self._heard[key] = heard
        numbers = [int(one) for one in self._WHOLE.findall(text)[:8]]
        before, self._last[key] = self._last.get(key), numbers
        if before is None or len(before) != len(numbers):
            self._rises[key] = [(0, 0)] * len(numbers)
            return None
        self._rises[key] = [
            self._next(rise, new - old)
            for rise, old, new in zip(self._rises[key], before, numbers, strict=True)
        ]
        place = self._counts(key)
        return None if place is None else Told(f"event {event}", numbers[place])

    @staticmethod
    def _next(rise: tuple[int, int], by: int) -> tuple[int, int]:
        """(amount, times on end) after one more difference."""
        if by <= 0:
            return (0, 0)
        return (by, rise[1] + 1) if by == rise[0] else (by, 1)

    def _counts(self, key: tuple[str, int]) -> int | None:
        for place, (_, times) in enumerate(self._rises.get(key, ())):
            if times >= self._needed:
                return place
        return None
