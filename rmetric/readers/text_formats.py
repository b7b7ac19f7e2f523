"""Text formats of one line a step, as a table: nanoGPT, nanochat, llm.c, torchtitan and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import (
    Clock,
    FirstRank,
    fields,
    number_in,
    pieces,
    put,
    rank_of,
    row,
)

Cells = dict[str, float | bool]
Values = Mapping[str, str]
#: Adds cells to a row, from the named values of its line, its step and the cells so far.
Complete = Callable[[Values, str, Cells], None]

_VALUE = r"[-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf(?:inity)?)"


@dataclass(frozen=True, kw_only=True)
class LineForm:
    """One form of a line.

    Attributes:
        pattern: searched in the line. Its named groups are the step (without one it is that of the
            line before), targets, and ``rest``, from which `added` and `values` are read.
        added: patterns whose named groups are further targets.
        values: splits the rest into names and values.
        names: target -> names of its value in `values`; the first that is present counts.
        once: a line that repeats the step of the last one of this form is left out.
    """

    pattern: re.Pattern[str]
    added: Sequence[re.Pattern[str]] = ()
    values: Callable[[str], Values] | None = None
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    once: bool = False

    def read(self, found: Mapping[str, str | None]) -> tuple[Cells, Values]:
        """The cells of a line, and its named values."""
        texts = {name: text for name, text in found.items() if name not in ("step", "rest")}
        rest = found.get("rest") or ""
        for pattern in self.added:
            if match := pattern.search(rest):
                texts |= match.groupdict()
        values = self.values(rest) if self.values is not None else {}
        for target, names in self.names.items():
            texts[target] = next((values[name] for name in names if name in values), None)
        cells: Cells = {}
        put(cells, **texts)
        return cells, values


@dataclass(frozen=True, kw_only=True)
class LineFormat:
    """A text format; has what `text_readers.TextReader` asks for.

    Attributes:
        NAME: in messages and in the index.
        MARK: a file whose beginning holds it is in this format.
        forms: of its lines, in the order in which they are tried.
        needs_loss: rows without a training or validation loss are left out.
        ranks: every rank prints the line, with a date: only one rank's rows are kept.
        complete: makes the function that adds further cells, anew for each file.
        OTHER_NAMES: cells that count only where ``--map`` asks for them.
        note: a sentence for the run, and the text in its beginning that calls for it.
    """

    NAME: str
    MARK: re.Pattern[str]
    forms: Sequence[LineForm]
    needs_loss: bool = False
    ranks: bool = False
    complete: Callable[[], Complete] | None = None
    OTHER_NAMES: tuple[str, ...] = ()
    note: tuple[str, str] | None = None

    def notes(self, head: str) -> list[str]:
        return [self.note[1]] if self.note is not None and self.note[0] in head else []

    def rows(self, lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
        clock, rank, step = Clock(), FirstRank(), "0"
        complete = self.complete() if self.complete is not None else None
        last_of_form: dict[int, str] = {}
        for line, text in pieces(lines):
            for place, form in enumerate(self.forms):
                match = form.pattern.search(text)
                found = match.groupdict() if match else {}
                if match and not (form.once and last_of_form.get(place) == found["step"]):
                    break
            else:
                continue
            if "step" in found:
                step = last_of_form[place] = found["step"]
            cells, values = form.read(found)
            if not cells or (self.needs_loss and not cells.keys() & {"loss", "eval_loss"}):
                continue
            if self.ranks:
                if not rank.accepts(rank_of(text), {"step": float(step), **cells}):
                    continue
                put(cells, time=clock.read(text))
            if complete is not None:
                complete(values, step, cells)
            yield row(line, step, cells)


def _any_of(forms: Iterable[LineForm]) -> re.Pattern[str]:
    # Two forms may name the same groups, one pattern may not.
    patterns = (re.sub(r"\?P<\w+>", "?:", form.pattern.pattern) for form in forms)
    return re.compile("|".join(patterns), re.IGNORECASE | re.MULTILINE)


_ADDED = (
    re.compile(r"\b(?:lr|learning[ _]rate)[: =]+(?P<learning_rate>\S+)", re.IGNORECASE),
    re.compile(
        r"(?:\bgrad(?:ient)?[ _]?norm|\bgnorm|\| *norm)[: =]+(?P<grad_norm>\S+)", re.IGNORECASE
    ),
)
_NANOGPT_FORMS = (
    LineForm(
        pattern=re.compile(
            rf"\biter (?P<step>\d+): loss (?P<loss>{_VALUE})(?=,|\s|$)(?P<rest>.*)", re.IGNORECASE
        ),
        added=_ADDED,
    ),
    # The loss is a mean over many batches of the training split.
    LineForm(
        pattern=re.compile(
            rf"\b(?:step|iter) (?P<step>\d+): train loss (?P<loss>{_VALUE}), "
            rf"val(?:id(?:ation)?)? loss (?P<eval_loss>{_VALUE})(?P<rest>.*)",
            re.IGNORECASE,
        ),
        added=_ADDED,
    ),
    LineForm(  # llama2.c
        pattern=re.compile(
            rf"^(?P<step>\d+) \| loss (?P<loss>{_VALUE}) \| lr (?P<learning_rate>\S+) \| \S+?ms",
            re.IGNORECASE,
        )
    ),
)
NANOGPT = LineFormat(NAME="nanoGPT text", MARK=_any_of(_NANOGPT_FORMS), forms=_NANOGPT_FORMS)

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0}
_TIME = re.compile(r"([\d.]+)(ms|s|min|m)$")
_MODDED_PAIR = re.compile(r"(?<![\w/])[\d_/]*([A-Za-z][\w/]*):\s?(\S+)")


def _training_time(values: Values, step: str, cells: Cells) -> None:
    """``train_time:900ms`` as seconds."""
    found = _TIME.match(str(values.get("train_time", values.get("t"))))
    value = number_in(found[1]) if found else None
    if found is not None and value is not None:
        cells["time"] = value * _UNITS[found[2]]


MODDED_NANOGPT = LineFormat(
    NAME="modded-nanogpt text",
    # The log begins with the program's source, so the line's form in the source counts as well.
    MARK=re.compile(
        r"\bstep:\s?\d+/\d+ .{0,300}?\b(?:train_|val_)?loss:\s?[-+\dni]|step:\{.{0,300}_loss:\{",
        re.IGNORECASE,
    ),
    forms=(
        LineForm(
            pattern=re.compile(r"\bstep:\s?(?P<step>\d+)(?:/\d+)?\s+(?P<rest>.*)"),
            values=lambda text: dict(_MODDED_PAIR.findall(text)),
            names={
                "loss": ("train_loss", "loss"),
                "eval_loss": ("val_loss",),
                "grad_norm": ("grad_norm", "gnorm"),
                "learning_rate": ("lr",),
            },
        ),
    ),
    needs_loss=True,
    complete=lambda: _training_time,
)

_LLM_C_FORMS = (
    LineForm(  # the screen, which counts from 1
        pattern=re.compile(
            rf"^ *step +(?P<step>\d+)(?: */ *\d+)? *\|\s*(?:train )?loss:? (?P<loss>{_VALUE})"
            r"(?=[\s|,])(?P<rest>.*)",
            re.IGNORECASE,
        ),
        added=_ADDED,
    ),
    LineForm(  # main.log
        pattern=re.compile(
            rf"^s:(?P<step>\d+) (?:trl:(?P<loss>{_VALUE})|tel:(?P<eval_loss>{_VALUE}))"
            r"(?: lr:(?P<learning_rate>\S+) norm:(?P<grad_norm>\S+))?\s*$",
            re.IGNORECASE,
        )
    ),
    LineForm(  # build-nanogpt's log.txt
        pattern=re.compile(
            rf"^(?P<step>\d+) (?:train (?P<loss>{_VALUE})|val (?P<eval_loss>{_VALUE}))\s*$"
        )
    ),
    LineForm(pattern=re.compile(rf"^\s*val(?:idation)? loss:? (?P<eval_loss>{_VALUE})\s*$", re.I)),
)
LLM_C = LineFormat(
    NAME="llm.c or build-nanogpt text", MARK=_any_of(_LLM_C_FORMS[:-1]), forms=_LLM_C_FORMS
)

TORCHTITAN = LineFormat(
    NAME="torchtitan text",
    MARK=re.compile(
        r"\bstep:\s+\d+\s+(?:global_avg_)?loss:\s+\S+\s+.{0,300}(?:grad_norm|memory|tps):\s"
    ),
    forms=(
        LineForm(
            pattern=re.compile(
                r"\b(validate )?step:\s+(?P<step>\d+)\s+(?:\w*_)?loss:\s+"
                r"(?(1)(?P<eval_loss>\S+)|(?P<loss>\S+))(?P<rest>.*)"
            ),
            added=_ADDED,
        ),
    ),
    ranks=True,
)

_TORCHTUNE_PAIR = re.compile(r"\b(\w+):(\S+)")
TORCHTUNE = LineFormat(
    NAME="torchtune text",
    MARK=re.compile(
        r"\bStep \d+ \| (?:\w+:\S+ )*(?:val_|valid_)?loss:[-+\dni]|\b\d+\|\d+\|Loss: [-\dni]"
    ),
    forms=(
        LineForm(
            pattern=re.compile(r"\bStep (?P<step>\d+) \| (?P<rest>.*)"),
            values=lambda text: dict(_TORCHTUNE_PAIR.findall(text)),
            names={
                "loss": ("loss",),
                "eval_loss": ("val_loss", "valid_loss"),
                "grad_norm": ("grad_norm",),
                "learning_rate": ("lr",),
            },
        ),
        # The progress bar is drawn again and again with the loss of the last step.
        LineForm(
            pattern=re.compile(r"(?:^|:)\s*\d+\|(?P<step>\d+)\|Loss: (?P<loss>[-+\w.]+):"),
            once=True,
        ),
    ),
)

#: nanochat's evaluation in bits per byte, which is no loss per token.
BITS = "validation_bpb"


def _summed_time() -> Complete:
    """The sum of the steps' durations ``dt``, up to the first step that prints none."""
    total, last = 0.0, None

    def complete(values: Values, step: str, cells: Cells) -> None:
        nonlocal total, last
        if "loss" not in cells:
            return
        took = number_in(values.get("dt"))
        known = took is not None and last in (None, float(step) - 1)
        total, last = (total + took / 1000, float(step)) if known and took else (total, -1)
        if known:
            cells["time"] = total

    return complete


NANOCHAT = LineFormat(
    NAME="nanochat text",
    MARK=re.compile(
        r"\bstep \d+(?:\s*/\s*\d+)? \([\d.]+ ?%\) \| (?:train(?:ing)? )?loss: "
        r"|\bstep \d+(?:/\d+)? \| (?:training loss: .{0,100}\| *lrm: |validation (?:bpb|loss): )",
        re.IGNORECASE,
    ),
    forms=(
        LineForm(
            pattern=re.compile(
                r"\bstep (?P<step>\d+)(?:\s*/\s*\d+)?(?: \([\d.]+ ?%\))? \| (?P<rest>.*)", re.I
            ),
            values=fields,
            names={
                "loss": ("loss", "training loss", "train loss"),
                "eval_loss": ("validation loss", "val loss"),
                "grad_norm": ("grad norm", "grad_norm", "gnorm", "gn"),
                "learning_rate": ("lr", "learning rate"),
                BITS: ("validation bpb", "val bpb"),
            },
        ),
    ),
    complete=_summed_time,
    OTHER_NAMES=(BITS,),
    note=(
        "bpb:",
        "the evaluation is in bits per byte, which is no loss per token, and was left out: "
        f"--map eval_loss={BITS} reads it",
    ),
)
