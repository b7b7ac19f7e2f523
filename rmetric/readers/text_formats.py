"""Text formats of one line a step, as a table: nanoGPT, Megatron-LM, torchtitan and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from math import log, nan

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import (
    Cells,
    Clock,
    FirstRank,
    Lines,
    Overflows,
    TextFormat,
    fields,
    number_in,
    pieces,
    put,
    rank_of,
    row,
    whole,
)

Values = Mapping[str, str]
#: Completes the cells of a row from the named values of its line; the last argument is what it
#: keeps from line to line of a file, with the ``step`` that the line has.
Finish = Callable[[Values, Cells, dict[str, float]], None]

_VALUE = r"[-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf(?:inity)?)"


@dataclass(frozen=True)
class LineForm:
    """One form of a line.

    Attributes:
        pattern: searched in the line, in any case. Its named groups are the step (without one it is
            that of the line before), targets, and ``rest``, from which `added` and `values` are
            read.
        added: patterns whose named groups are further targets.
        values: splits the rest into names and values.
        names: target -> names of its value in `values`; the first that is present counts.
        finish: adds what is computed; a ``step`` that it sets replaces that of the line.
        dated: a date on the line gives the time.
        once: a line that repeats the step of the last one of this form is left out.
    """

    pattern: str
    _: KW_ONLY
    added: Sequence[re.Pattern[str]] = ()
    values: Callable[[str], Values] | None = None
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    finish: Finish | None = None
    dated: bool = False
    once: bool = False

    @cached_property
    def search(self) -> Callable[[str], re.Match[str] | None]:
        return re.compile(self.pattern, re.IGNORECASE).search

    def cells(self, texts: dict[str, str | None], state: dict[str, float]) -> Cells:
        """The cells of a line whose pattern found these groups."""
        rest = texts.pop("rest", None) or ""
        for pattern in self.added:
            if match := pattern.search(rest):
                texts |= match.groupdict()
        values = self.values(rest) if self.values is not None else {}
        for target, names in self.names.items():
            texts[target] = next((values[name] for name in names if name in values), None)
        cells: Cells = {}
        put(cells, **texts)
        if self.finish is not None:
            self.finish(values, cells, state)
        return cells


def _format(
    name: str,
    *forms: LineForm,
    mark: re.Pattern[str] | None = None,
    needs_loss: bool = False,
    one_rank: bool = False,
    overflow: re.Pattern[str] | None = None,
    notes: Callable[[str], list[str]] = lambda head: [],
    other_names: tuple[str, ...] = (),
) -> TextFormat:
    """A text format, whose lines have one of `forms`, which are tried in their order.

    Without a `mark` a line of any form is one. Where it `needs_loss`, rows without a training or
    validation loss are left out. Where all ranks print its lines, `one_rank` is read. `overflow` is
    the line of a step that was left out, see `Overflows`.
    """

    def rows(lines: Lines) -> Iterator[Row]:
        clock, rank, overflows, step = Clock(), FirstRank(), Overflows(overflow), "0"
        state: dict[str, float] = {}
        last_of_form: dict[int, str] = {}
        for line, text in pieces(lines):
            if overflows.take_overflow(text):
                continue
            for place, form in enumerate(forms):
                match = form.search(text)
                if match and not (form.once and last_of_form.get(place) == match["step"]):
                    break
            else:
                continue
            texts = match.groupdict()
            step = last_of_form[place] = texts.pop("step", None) or step
            state["step"] = float(step)
            cells = form.cells(texts, state)
            step = str(cells.pop("step", step))
            if not cells or (needs_loss and not cells.keys() & {"loss", "eval_loss"}):
                continue
            if one_rank and not rank.accepts(rank_of(text), {"step": float(step), **cells}):
                continue
            if form.dated:
                put(cells, time=clock.read(text))
            if cells.keys() != {"eval_loss"}:
                cells = overflows.take() | cells
            yield row(line, step, cells)

    return TextFormat(
        name=name, mark=mark or _any_of(*forms), rows=rows, notes=notes, other_names=other_names
    )


def _any_of(*forms: LineForm) -> re.Pattern[str]:
    # Two forms may name the same groups, one pattern may not.
    patterns = (re.sub(r"\?P<\w+>", "?:", form.pattern) for form in forms)
    return re.compile("|".join(patterns), re.IGNORECASE | re.MULTILINE)


_ADDED = (
    re.compile(r"\b(?:lr|learning[ _]rate)[: =]+(?P<learning_rate>\S+)", re.IGNORECASE),
    re.compile(
        r"(?:\bgrad(?:ient)?[ _]?norm|\bgnorm|\| *norm)[: =]+(?P<grad_norm>\S+)", re.IGNORECASE
    ),
)

NANOGPT = _format(
    "nanoGPT text",
    LineForm(
        rf"\biter (?P<step>\d+): loss (?P<loss>{_VALUE})(?=,|\s|$)(?P<rest>.*)",
        added=_ADDED,
    ),
    # The loss is a mean over many batches of the training split.
    LineForm(
        rf"\b(?:step|iter) (?P<step>\d+): train loss (?P<loss>{_VALUE}), "
        rf"val(?:id(?:ation)?)? loss (?P<eval_loss>{_VALUE})(?P<rest>.*)",
        added=_ADDED,
    ),
    LineForm(  # llama2.c
        rf"^(?P<step>\d+) \| loss (?P<loss>{_VALUE}) \| lr (?P<learning_rate>\S+) \| \S+?ms"
    ),
)

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0}
_DURATION = re.compile(r"([\d.]+)(ms|s|min|m)$")
_MODDED_PAIR = re.compile(r"(?<![\w/])[\d_/]*([A-Za-z][\w/]*):\s?(\S+)")


def _training_time(values: Values, cells: Cells, state: dict[str, float]) -> None:
    """``train_time:900ms`` as seconds."""
    found = _DURATION.match(str(values.get("train_time", values.get("t"))))
    value = number_in(found[1]) if found else None
    if found is not None and value is not None:
        cells["time"] = value * _UNITS[found[2]]


MODDED_NANOGPT = _format(
    "modded-nanogpt text",
    LineForm(
        r"\bstep:\s?(?P<step>\d+)(?:/\d+)?\s+(?P<rest>.*)",
        values=lambda text: dict(_MODDED_PAIR.findall(text)),
        names={
            "loss": ("train_loss", "loss"),
            "eval_loss": ("val_loss",),
            "grad_norm": ("grad_norm", "gnorm"),
            "learning_rate": ("lr",),
        },
        finish=_training_time,
    ),
    # The log begins with the program's source, so the line's form in the source counts as well.
    mark=re.compile(
        r"\bstep:\s?\d+/\d+ .{0,300}?\b(?:train_|val_)?loss:\s?[-+\dni]|step:\{.{0,300}_loss:\{",
        re.IGNORECASE,
    ),
    needs_loss=True,
)

_LLM_C = (
    LineForm(  # the screen, which counts from 1
        rf"^ *step +(?P<step>\d+)(?: */ *\d+)? *\|\s*(?:train )?loss:? (?P<loss>{_VALUE})"
        r"(?=[\s|,])(?P<rest>.*)",
        added=_ADDED,
    ),
    LineForm(  # main.log
        rf"^s:(?P<step>\d+) (?:trl:(?P<loss>{_VALUE})|tel:(?P<eval_loss>{_VALUE}))"
        r"(?: lr:(?P<learning_rate>\S+) norm:(?P<grad_norm>\S+))?\s*$"
    ),
    LineForm(  # build-nanogpt's log.txt
        rf"^(?P<step>\d+) (?:train (?P<loss>{_VALUE})|val (?P<eval_loss>{_VALUE}))\s*$"
    ),
)
LLM_C = _format(
    "llm.c or build-nanogpt text",
    *_LLM_C,
    LineForm(rf"^\s*val(?:idation)? loss:? (?P<eval_loss>{_VALUE})\s*$"),
    mark=_any_of(*_LLM_C),
)

TORCHTITAN = _format(
    "torchtitan text",
    LineForm(
        r"\b(validate )?step:\s+(?P<step>\d+)\s+(?:\w*_)?loss:\s+"
        r"(?(1)(?P<eval_loss>\S+)|(?P<loss>\S+))(?P<rest>.*)",
        added=_ADDED,
        dated=True,
    ),
    mark=re.compile(
        r"\bstep:\s+\d+\s+(?:global_avg_)?loss:\s+\S+\s+.{0,300}(?:grad_norm|memory|tps):\s"
    ),
    one_rank=True,
)

_TORCHTUNE_PAIR = re.compile(r"\b(\w+):(\S+)")
TORCHTUNE = _format(
    "torchtune text",
    LineForm(
        r"\bStep (?P<step>\d+) \| (?P<rest>.*)",
        values=lambda text: dict(_TORCHTUNE_PAIR.findall(text)),
        names={
            "loss": ("loss",),
            "eval_loss": ("val_loss", "valid_loss"),
            "grad_norm": ("grad_norm",),
            "learning_rate": ("lr",),
        },
    ),
    # The progress bar is drawn again and again with the loss of the last step.
    LineForm(r"(?:^|:)\s*\d+\|(?P<step>\d+)\|Loss: (?P<loss>[-+\w.]+):", once=True),
    mark=re.compile(
        r"\bStep \d+ \| (?:\w+:\S+ )*(?:val_|valid_)?loss:[-+\dni]|\b\d+\|\d+\|Loss: [-\dni]"
    ),
)

#: nanochat's evaluation in bits per byte, which is not a loss per token.
BITS = "validation_bpb"
_BITS_LEFT_OUT = (
    "the evaluation is in bits per byte, which is not a loss per token: it was left out; "
    f"--map eval_loss={BITS} reads it"
)


def _summed_time(values: Values, cells: Cells, state: dict[str, float]) -> None:
    """The sum of the steps' durations ``dt``, up to the first step that prints none."""
    if "loss" not in cells:
        return
    took, step = number_in(values.get("dt")), state["step"]
    if took is None or state.get("timed", step - 1) != step - 1:
        state["timed"] = -1
        return
    cells["time"] = state["time"] = state.get("time", 0.0) + took / 1000
    state["timed"] = step


NANOCHAT = _format(
    "nanochat text",
    LineForm(
        r"\bstep (?P<step>\d+)(?:\s*/\s*\d+)?(?: \([\d.]+ ?%\))? \| (?P<rest>.*)",
        values=fields,
        names={
            "loss": ("loss", "training loss", "train loss"),
            "eval_loss": ("validation loss", "val loss"),
            "grad_norm": ("grad norm", "grad_norm", "gnorm", "gn"),
            "learning_rate": ("lr", "learning rate"),
            BITS: ("validation bpb", "val bpb"),
        },
        finish=_summed_time,
    ),
    mark=re.compile(
        r"\bstep \d+(?:\s*/\s*\d+)? \([\d.]+ ?%\) \| (?:train(?:ing)? )?loss: "
        r"|\bstep \d+(?:/\d+)? \| (?:training loss: .{0,100}\| *lrm: |validation (?:bpb|loss): )",
        re.IGNORECASE,
    ),
    other_names=(BITS,),
    notes=lambda head: [_BITS_LEFT_OUT] if "bpb:" in head else [],
)

_OVERFLOW = re.compile(
    r"overflow.{0,40}skipping step.{0,20}attempted loss scale: *([\w.+]+)"
    r"(?:, *(?:reducing to|but))? *([\w.+]*)",
    re.IGNORECASE,
)
_MEGATRON_LOSSES = ("lm loss", "lm_loss", "loss", "train loss", "reduced_train_loss")
_AUXILIARY = ("scale", "balanc", "aux", "z_loss", "z loss", "mtp", "moe", "sop", "ppl")


def _megatron_loss(found: Values, endings: tuple[str, ...] = ("",)) -> float | None:
    """The language model's loss, or the first other one that is not an auxiliary loss."""
    names = [name + ending for name in _MEGATRON_LOSSES for ending in endings]
    names += [n for n in found if n.endswith(tuple(f"loss{e}" for e in endings))]
    for name in names:
        value = number_in(found.get(name))
        if value is not None and not any(word in name for word in _AUXILIARY):
            return value
    return None


def _iteration(values: Values, cells: Cells, state: dict[str, float]) -> None:
    """Iterations that were left out are counted; the loss is missing where all of them were."""
    loss = _megatron_loss(values)
    skipped = number_in(values.get("number of skipped iterations"))
    if number_in(values.get("number of nan iterations")) and not loss:
        loss = nan
    put(cells, loss=loss, skipped=None if skipped is None else skipped > 0)
    # NeMo counts an epoch's iterations, and all of them beside it.
    if step := whole(values.get("global_step")):
        cells["step"] = step


def _validation(values: Values, cells: Cells, state: dict[str, float]) -> None:
    put(cells, eval_loss=_megatron_loss(values, (" value", "_value")))


MEGATRON = _format(
    "Megatron-LM, Megatron-DeepSpeed, GPT-NeoX or NeMo text",
    LineForm(
        r"\biteration:?\s+(?P<step>\d+)\s*/\s*\d+\s*\|(?P<rest>.*)",
        values=fields,
        names={
            "grad_norm": ("grad norm", "grad_norm"),
            "learning_rate": ("learning rate", "lr"),
            "eval_loss": ("val_loss",),
            "loss_scale": ("loss scale",),
            "parameter_norm": ("params norm",),
        },
        finish=_iteration,
        dated=True,
    ),
    LineForm(
        r"\bvalidation (?:loss|results) at (?:iteration (?P<step>\d+)|the end of training)"
        r"(?![^|]*test)[^|]*\|(?P<rest>.*)",
        values=fields,
        finish=_validation,
    ),
    mark=re.compile(
        r"\biteration:?\s+\d+\s*/\s*\d+\s*\|"
        r".{0,600}(?:loss|elapsed time|learning rate|skipped iterations)"
        r"|\bvalidation (?:loss|results) at iteration \d+[^|]*\| *lm[ _]loss"
    ),
    overflow=_OVERFLOW,
)


def _left_out(values: Values, cells: Cells, state: dict[str, float]) -> None:
    # The count goes on from the beginning: it grew, or a step was left out before.
    before, state["skipped"] = state.get("skipped", 0.0), float(cells["skipped"])
    cells["skipped"] = state["skipped"] > before


def _from_perplexity(values: Values, cells: Cells, state: dict[str, float]) -> None:
    perplexity = cells.pop("perplexity", None)
    if perplexity is not None and "eval_loss" not in cells:
        cells["eval_loss"] = log(perplexity) if perplexity > 0 else nan


_DEEPSPEED = (
    LineForm(
        r"\[Rank -?\d+\] step=(?P<step>\d+), skipped=(?P<skipped>\d+), "
        r"lr=\[?\(?(?P<learning_rate>[^,\]\s]+)",
        finish=_left_out,
        dated=True,
    ),
    LineForm(r"\bsteps: (?P<step>\d+) loss: (?P<loss>\S+) iter time", dated=True),
)
_PERPLEXITY = (  # of DeepSpeed-Chat's evaluation
    r"^[^\w\n]{0,20}(?:epoch \d+ )?(?:ppl|perplexity): (?P<perplexity>[\w.+-]+)"
    r"(?:, loss: (?P<eval_loss>\S+))?$"
)
#: The engine knows no loss but the pipeline's; a training that prints its own lines as well is
#: read by another reader.
DEEPSPEED = _format(
    "DeepSpeed text",
    *_DEEPSPEED,
    LineForm(_PERPLEXITY, finish=_from_perplexity),
    mark=re.compile(f"{_any_of(*_DEEPSPEED).pattern}|{_OVERFLOW.pattern}", re.IGNORECASE),
    overflow=_OVERFLOW,
    notes=lambda head: (
        ["the logarithm of an evaluation's perplexity was taken as its loss"]
        if re.search(_PERPLEXITY, head, re.IGNORECASE | re.MULTILINE)
        else []
    ),
)

#: The first that matches reads the file, after those of `text_programs`. DeepSpeed's is tried last.
FORMATS = (MEGATRON, NANOGPT, NANOCHAT, MODDED_NANOGPT, LLM_C, TORCHTITAN, TORCHTUNE)
