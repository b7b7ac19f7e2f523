"""Reader of any text with a step and a loss in it: the last one tried.

``step=120 loss=3.2``, ``Epoch 1 Iter 20/500: loss 3.2``, ``| step 5 | train loss 2.1 |``, a
heading ``[step=10/100]`` with values below it, progress bars. Two lines that so give a
step and a loss make a file a log. The notes list which name was read as which target.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from math import inf, isfinite
from typing import Any

from rmetric._util.printed import counted
from rmetric.readers.columns import POLICY, choose_columns
from rmetric.readers.names import PRINTED, TARGETS, is_loss, plain_name
from rmetric.readers.rows import Row
from rmetric.readers.text_parts import DATE, FAR, Clock, FirstRank, Lines, pieces, rank_of

NAME = "text with a step and a loss on a line"
NAME_WITHOUT_STEP = "text with a loss on its lines and no step"

Names = Mapping[str, tuple[str, ...]]
_JUDGED = {"loss", "eval_loss", "reward"}
#: Targets whose numbers have decimals, so that a comma in one may be that of the decimals.
_DECIMALS = ("loss", "eval_loss", "grad_norm", "learning_rate")
#: An evaluation's loss beside a training loss; alone it may be anything.
_SPLITS = ("val", "valid")
_MAY_BE = re.compile(r"loss|entropy|\btrain\W{1,3}\d", re.IGNORECASE)
#: A setting, or a line of a program: it heads nothing.
_ASSIGNMENT = re.compile(r"\s*[\w.]+\s*(?::\s*\w+\s*)?=[^=]*(?:#.*)?$")
_EVALUATION = re.compile(
    r"(?<![\w/])(?:val|valid|validation|eval|evaluation|evaluating|dev)(?![\w/])", re.I
)
#: Lines with a step by which it is known that a log states them.
_ENOUGH = 100
#: A rounded step, which several records have.
_ROUNDED = re.compile(r"\bsteps?[:= ]\s*[\d.]+[KM]\b", re.IGNORECASE)
_TEST = re.compile(r"^\W*(?:\w+\W+)?test(?:ing)?(?![\w/])", re.IGNORECASE)


def matches(head: str, mapping: Mapping[str, str] | None = None) -> bool:
    if not mapping and not _MAY_BE.search(head):
        return False
    steps = set()
    for given in rows(enumerate(head.splitlines(), start=1), mapping):
        if given.cells.keys() & _JUDGED:
            steps.add(given.cells["step"])
        if len(steps) == 2:
            return True
    return False


def rows(
    lines: Lines, mapping: Mapping[str, str] | None = None, place: Place | None = None
) -> Iterator[Row]:
    """Rows by the names of `TARGETS`; `mapping` (target -> name in the log) goes first."""
    names, known = _names(mapping)
    place, clock, rank = place or Place(), Clock(), FirstRank()
    for line, text in pieces(lines):
        time = clock.read(text)
        found = taken_apart(text, known)
        cells = _cells(found, names, text)
        step = place.of(Words() if _ASSIGNMENT.match(text) else found, names["step"], cells)
        if step is None or not cells.keys() & {*_JUDGED, "grad_norm"}:
            continue
        one_line: dict[str, Any] = {"text": text} if _ROUNDED.search(text) else {}
        if rank.accepts(rank_of(text), {"step": step, **cells, **one_line}):
            if time is not None:
                cells["time"] = time
            yield Row(line, {"step": step, **cells})
    if place.left_out:
        lines_left_out = counted(place.left_out, "line")
        place.notes.append(f"left out: {lines_left_out} with an epoch, a loss and no step")


def lacks_steps(head: str, mapping: Mapping[str, str]) -> bool:
    """True if `rows` leaves out most lines with an epoch and a loss, which state no step."""
    place = Place()
    found = list(islice(rows(enumerate(head.splitlines()), mapping, place), _ENOUGH))
    return not found or sum("loss" in row.cells for row in found) < place.left_out


def is_without_step(head: str) -> bool:
    """True if three lines state a training loss; called where no line has a step."""
    found = counted_rows(enumerate(head.splitlines(), start=1))
    return sum("loss" in row.cells for row in found) >= 3


def counted_rows(lines: Lines, mapping: Mapping[str, str] | None = None) -> Iterator[Row]:
    """Rows of a text that states no step: its training losses are counted from 0.

    An evaluation belongs to the training loss before it. Only a loss whose name has no word
    before it is read: ``policy loss 0.2`` is a part of one.
    """
    names, known = _names(mapping)
    step, rank = -1, FirstRank()
    for line, text in pieces(lines):
        found = taken_apart(text, known)
        cells = _cells(replace(found, loose={}), names, text)
        step_after = step + ("loss" in cells)
        if not cells.keys() & _JUDGED or step_after < 0:
            continue
        row = {"step": step_after, **cells}
        if rank.accepts(rank_of(text), row):
            step = step_after
            yield Row(line, row)


def hint(head: str) -> str:
    """The --map that would read a text like this; empty where nothing is called a loss."""
    names = list(_names_in(head))
    chosen = choose_columns(names, {}).by_target
    if not {"loss", "eval_loss"} & chosen.keys():
        if not (losses := [name for name in names if "loss" in name]):
            return ""
        chosen["loss"] = losses[0]
    order = [target for target in TARGETS if target in chosen and target != "run"]
    return " ".join(f"--map {target}={chosen[target]}" for target in order)


def readable_names(head: str, most: int = 12) -> list[str]:
    """Names that may be a loss, among the most frequent ones: they stand beside a step."""
    names = [name for name, _ in _names_in(head).most_common(most) if name not in _USUAL_NAMES[1]]
    return [name for name in names if matches(head, {"loss": name})]


def _names_in(head: str) -> Counter[str]:
    lines = (taken_apart(text, frozenset()) for _, text in pieces(enumerate(head.splitlines())))
    return Counter(name for line in lines for name in (*line.exact, *line.loose))


def stated_step(text: str) -> int | None:
    """The step of a line that states a loss or a gradient's norm too; None for any other line.

    An epoch is not a step, and neither is a number without a name.

    >>> stated_step("{'global_steps': 120, 'eval_loss': 2.1}"), stated_step("save_steps=500")
    (120, None)
    """
    names, known = _USUAL_NAMES
    found = taken_apart(text, known)
    if not _cells(found, names, text) and not any(map(is_loss, (*found.exact, *found.loose))):
        return None
    target = TARGETS["step"]
    for values in (found.exact, found.loose):
        steps = (n for n in values if n != "epoch" and (n in target.names or target.means(n)))
        for name in (*names["step"], *steps):
            if (step := _whole(values.get(name))) is not None:
                return step
    return None


def guessed(head: str, mapping: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """Notes on how names in the beginning of a file were guessed, and the mapping that results."""
    names, known = _names(mapping)
    taken: dict[str, str] = {}
    counters: dict[str, set[float]] = {name: set() for name in names["step"]}
    steps, epochs = False, False
    for _, text in pieces(enumerate(head.splitlines())):
        found = taken_apart(text, known)
        if not _cells(found, names, text).keys() & _JUDGED:
            continue
        for target in names.keys() - mapping.keys():
            if name := _taken(found, names[target]):
                taken.setdefault(target, name)
        for name in counters.keys() & found.exact.keys():
            counters[name].add(found.exact[name])
        steps = steps or _step(found, names["step"])[0] is not None
        epochs = epochs or found.get("epoch") is not None
    # ``iter 16 step 1: loss 2.1`` has a line for each micro-batch, of which many make a step.
    finest = max(counters, key=lambda name: len(counters[name]))
    if len(counters[finest]) > 2 * len(next(filter(None, counters.values()), ())):
        notes, mapping = guessed(head, {**mapping, "step": finest})
        return [f"the step is {finest!r}, which differs on most lines with a loss", *notes], mapping
    if epochs and not steps and "step" not in taken:
        taken["step"] = "epoch"
    words = ", ".join(f"{name!r} as {target}" for target, name in sorted(taken.items()))
    words = words or "the names of its numbers"
    notes = [f"guessed from lines of an unknown program: {words}; --map TARGET=NAME says otherwise"]
    if taken.get("step") == "epoch":
        notes.append("no step is stated: a step is an epoch")
    return notes, mapping


def _names(mapping: Mapping[str, str] | None = None) -> tuple[Names, frozenset[str]]:
    """Target -> names of it, in their order, with those of a mapping alone; and all of these."""
    names: dict[str, tuple[str, ...]] = {}
    for target, printed in (PRINTED | dict.fromkeys(POLICY, "")).items():
        usual = () if target == "step" or target not in TARGETS else TARGETS[target].names
        names[target] = tuple(dict.fromkeys((*printed.split(), *usual)))
    names |= {target: (plain_name(name),) for target, name in (mapping or {}).items()}
    known = {name for printed in names.values() for name in printed}
    return names, frozenset(known | {"epoch", "train", *_SPLITS})


_USUAL_NAMES = _names()


def _cells(found: Words, names: Names, text: str) -> dict[str, Any]:
    taken = {target: _taken(found, known) for target, known in names.items() if target != "step"}
    if split := _taken(found, _SPLITS):
        taken["loss"] = taken["loss"] or ("train" if "train" in found.exact else None)
        taken["eval_loss"] = taken["eval_loss"] or (split if taken["loss"] else None)
    loss = taken["loss"]
    if loss and "train" not in loss and not taken["eval_loss"]:
        # The word for an evaluation may stand elsewhere on the line.
        plain = DATE.sub(" ", text)
        if _EVALUATION.search(plain):
            taken |= {"loss": None, "eval_loss": loss}
        elif _TEST.search(plain):
            taken["loss"] = None
    values: dict[str, Any] = {target: found.get(name) for target, name in taken.items() if name}
    # The text cannot be read as a number later, which gives an error with its line.
    for target in _DECIMALS:
        if words := found.commas.get(taken[target] or ""):
            values[target] = words
    return {target: value for target, value in values.items() if value is not None}


def _taken(found: Words, names: Iterable[str]) -> str | None:
    """The first of `names` on the line, those that stand alone before their number first."""
    for values in (found.exact, found.loose):
        for name in names:
            if name in values:
                return name
    return None


@dataclass(slots=True)
class Place:
    """Step of a line; an epoch may count its steps from the beginning again."""

    last: int | None = None  # the step of the last line that had one
    raw: int = -1  # its own count
    epoch: float = inf  # that it was in
    now: float = inf  # the epoch that was named last
    offset: int = 0
    total: int | None = None
    heads: bool = False  # the last line held no loss, and so heads those below it ...
    given: set[str] = field(default_factory=set)  # ... which gave this so far
    counts_steps: bool = False
    left_out: int = 0  # lines with an epoch, a training loss and no step
    notes: list[str] = field(default_factory=list)

    def of(self, found: Words, names: Iterable[str], cells: dict[str, Any]) -> int | None:
        raw, total, alone = _step(found, names)
        epoch, losses = found.get("epoch"), cells.keys() & _JUDGED
        self.now = self.now if epoch is None else epoch
        if losses == {"eval_loss"} and self.total and total not in (None, self.total):
            raw = None  # it counts its own batches
        if raw is not None:
            self.counts_steps = self.counts_steps or bool(losses)
        elif not self.counts_steps:
            raw, alone = _whole(epoch), "epoch" in found.exact
        if raw is None or not (losses or alone):
            return self._below(cells, of_epoch=epoch is not None)
        if self.now > self.epoch and (raw < self.raw or (raw == self.raw and "loss" in cells)):
            self.offset += self.total or self.raw
        epochs = found.totals.get("epoch", 0) if "loss" in cells else 0
        if self.now <= 1 and self.now < self.epoch < epochs:
            self.offset = 0  # started again before its last epoch
        self.raw, self.total, self.epoch = raw, total or self.total, self.now
        self.last, self.heads, self.given = raw + self.offset, not losses, set()
        return self.last

    def _below(self, cells: dict[str, Any], *, of_epoch: bool) -> int | None:
        """Step of a line that states none: the heading's, or the last step for an evaluation."""
        for target in self.given if self.heads else {"loss", "grad_norm"}:
            self.left_out += cells.pop(target, None) is not None and target == "loss" and of_epoch
        self.given |= cells.keys()
        return self.last


def _step(found: Words, names: Iterable[str]) -> tuple[int | None, int | None, bool]:
    """The step on a line, what it counts to, and whether no other word is before the number."""
    for values in (found.exact, found.loose):
        for name in names:
            step = _whole(values.get(name))
            # Beside a count ``[500/9000]`` a batch is its size.
            if step is not None and not (name == "batch" and found.unnamed):
                return step, found.totals.get(name), values is found.exact
    return (*found.unnamed, False) if found.unnamed else (None, None, False)


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and 0 <= value < FAR and value == int(value) else None


THOUSANDS = r"\d{1,3}(?:,\d{3})+"
_NUMBER = re.compile(
    rf"(?<![\w.])([-+]?(?:{THOUSANDS}|\d+)(?:\.\d*)?(?:e[-+]?\d+)?|[-+]?\.\d+(?:e[-+]?\d+)?"
    r"|[-+]?nan|[-+]?inf(?:inity)?)"
    r"(?:\s*/\s*(\d[\d,]*))?([KMBG](?![\w/])|%|ms|it/s|s/it|[smhx])?(?!\.*\w)",
    re.IGNORECASE,
)
#: Neither a list, nor a date, nor two groups of thousands.
_COMMA = re.compile(r"[-+]?\d+,\d+(?:e[-+]?\d+)?(?![\w./:-]|,\d)", re.IGNORECASE)
_TIMES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
#: ``grad_norm={'default': 1.5}`` is a number with a name of its own.
_DICT_OF_ONE = re.compile(r"=\s*\{\s*'[^']*':")
_OF_A_SPLIT = re.compile(r"\b(epoch|iter)\((\w+)\)", re.IGNORECASE)
_BREAK = re.compile(r"[|,;\[\](){}<>]|\s-\s|--")
_FILLING = ("is", "of", "value", "mean", "avg", "at")
#: A word before a name that makes it another thing's, or a value that is not this step's.
_ANOTHERS = re.compile(
    r"(?:best|min|minimum|max|maximum|lowest|highest|previous|prev|last|initial|final|target|total"
    r"|aux|auxiliary|z|kl|moe|router|balance|balancing|load|test|mtp|reg|regularization|per|sec"
    r"|num|number|warmup|seconds|every)"
)


@dataclass(slots=True)
class Words:
    """The numbers of one line.

    Attributes:
        exact: values by name, where the words before them are the name and nothing else.
        loose: values by name, where there are more words before the name.
        totals: the ``b`` of a value that is ``a/b``.
        commas: texts by name of numbers such as 3,47 and 3,471, whose comma is that of the
            decimals or that of the thousands.
        unnamed: a count ``a/b`` without a name, as progress bars have it, or else a whole
            number that the line begins with.
    """

    exact: dict[str, float] = field(default_factory=dict)
    loose: dict[str, float] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    commas: dict[str, str] = field(default_factory=dict)
    unnamed: tuple[int, int | None] | None = None

    def get(self, name: str) -> float | None:
        return self.exact.get(name, self.loose.get(name))


def taken_apart(text: str, known: frozenset[str]) -> Words:
    """The numbers of `text` by name; `known` are the names looked for in longer phrases."""
    text = _DICT_OF_ONE.sub("=", DATE.sub(" ", text)).replace("'", "").replace('"', "")
    text = _OF_A_SPLIT.sub(r"\2 \1", text)
    line, end = Words(), 0
    for number in _NUMBER.finditer(text):
        name, exact = name_in(text[max(end, number.start() - 120) : number.start()], known)
        end = number.end()
        value = float(number[1].replace(",", "")) * _TIMES.get((number[3] or "").upper(), 1.0)
        total = int(number[2].replace(",", "")[:18]) if number[2] else None
        if name and number[3] != "%":
            (line.exact if exact else line.loose).setdefault(name, value)
            if comma := _COMMA.match(text, number.start()):
                line.commas.setdefault(name, comma[0])
            if total is not None:
                line.totals.setdefault(name, total)
        elif not name and line.unnamed is None and (total or _begins(text, number)):
            line.unnamed = (int(value), total) if isfinite(value) else None
    return line


def _begins(text: str, number: re.Match[str]) -> bool:
    """True if a line begins with this whole number, which is not a time of day."""
    if number.start() > 16:
        return False
    before, after = text[: number.start()].strip(" \t[(#"), text[number.end() : number.end() + 2]
    return not before and number[1].isdigit() and not number[3] and not after[1:].isdigit()


@lru_cache(maxsize=4096)
def name_in(before: str, known: frozenset[str]) -> tuple[str, bool]:
    """The name of a number in the words since the number before, and whether it is all of them.

    >>> known = frozenset(["train_loss", "loss", "step"])
    >>> name_in(", Train Loss: ", known), name_in(" INFO step=", known)
    (('train_loss', True), ('step', True))
    >>> name_in("| policy loss ", known), name_in("| best loss ", known), name_in(" - ", known)
    (('loss', False), ('best_loss', True), ('', True))
    """
    stripped = before.rstrip()
    words = stripped.rstrip(":=([{ ")
    if stripped.endswith("="):
        last = words.split()[-2:]  # of ``Train Loss=``, but not of ``epoch done loss=``
        both = words[-1:].isalpha() and plain_name(" ".join(last)) in known
        words = " ".join(last if both else last[-1:])
    words = _BREAK.split(words)[-1].replace(":", " ").replace("=", " ")
    plain = [w for w in (plain_name(word).lstrip("_") for word in words.split()[-8:]) if w]
    if len(plain) > 1 and plain[-1] in _FILLING:
        plain.pop()
    for first in range(len(plain)):
        name = "_".join(plain[first:])
        if name in known:
            if any(_ANOTHERS.fullmatch(word) for word in plain[:first]):
                break
            return name, first == 0
    return "_".join(plain)[-60:], True
