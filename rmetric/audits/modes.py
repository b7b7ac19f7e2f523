"""Is the model in the mode that the loop believes: training, evaluation, mixed precision?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite, log
from typing import Any

import torch
from torch import Tensor, nn

from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding, Severity
from rmetric.audits.fingerprint import plain
from rmetric.audits.training import OwnHook, Seen, Training

#: Steps in a row until a mode is reported; more from the first step on, where it may be meant.
MIN_STEPS_IN_MODE, MIN_STEPS_FROM_START = 3, 20
#: Equal losses in a row.
EQUAL = 10
#: A first loss so many times that of a uniform guess, and one nat more.
ABOVE_UNIFORM = 1.5
#: Passes, and weights of one parameter, that are looked at in a step.
_MOST = 4096
#: Layers that work otherwise in evaluation mode.
_LAYERS = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class Modes(Audit):
    """Modes of the forward passes, gradients that are kept, autocast, the loss itself.

    Its weakness: only calls of the model itself are seen, not those of its parts, and of a compiled
    one only where the monitor has what `torch.compile` returned.
    """

    name = "modes"

    def __init__(self) -> None:
        super().__init__()
        self._layers: list[nn.Module] = []
        self._device = "cpu"
        self._passes: list[bool] = []  # with gradients: the model was in training mode
        #: Autocast was on around the layer, and its output is of half precision.
        self._casts: list[tuple[bool, bool]] = []
        self._kept: list[Tensor | bool] = []  # gradients were there when a backward pass began
        self._at_work = ""  # layer that worked as in training in a pass without gradients
        self._last_input, self._sampled = 0, False  # one input in passes that follow each other
        self._seen_passes: list[bool] = []
        self._seen_casts: list[tuple[bool, bool]] = []
        self._listens, self._trained = True, False
        self._last_loss: float | None = None
        self._in_a_row: Counter[str] = Counter()

    def install(self, training: Training) -> Iterator[Callable[[], Any]]:
        root = training.root
        self._layers = [
            m for m in root.modules() if isinstance(m, _LAYERS) and getattr(m, "p", 1.0) > 0
        ]
        yield training.model.register_forward_pre_hook(OwnHook(self._before_forward)).remove
        compiled = any(getattr(m, "_compiled_call_impl", None) for m in root.modules())
        layer = next((m for m in root.modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
        if layer is not None and not compiled and training.model is root:
            self._device = layer.weight.device.type
            yield layer.register_forward_hook(OwnHook(self._after_layer)).remove
        held = training.host_facts()["rates"] >= 0
        whole = [
            p
            for p, there in zip(training.parameters, held, strict=True)
            if there and p.requires_grad and not hasattr(p, "device_mesh") and not p.is_meta
        ]
        if whole:
            yield self._follow(whole[-1])

    def _follow(self, parameter: nn.Parameter) -> Callable[[], None]:
        """Look at a parameter's gradient when a backward pass is about to add to it."""

        def before(_: Tensor) -> None:
            if self._listens and len(self._kept) < _MOST:
                there = parameter.grad
                few = None if there is None else plain(there.detach()).flatten()[:_MOST]
                self._kept.append(False if few is None else (few != 0).any())

        handle: Any = parameter.register_hook(OwnHook(before))  # type: ignore[no-untyped-call]
        remove: Callable[[], None] = handle.remove
        return remove

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            if len(self._passes) < _MOST:
                self._passes.append(module.training)
            return
        first = id(inputs[0]) if inputs else 0
        self._sampled |= first == self._last_input != 0
        self._last_input = first
        if not self._at_work:
            self._at_work = next((type(m).__name__ for m in self._layers if m.training), "")

    def _after_layer(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.is_grad_enabled() and module.training and len(self._casts) < _MOST:
            cast = isinstance(output, Tensor) and output.dtype != torch.float32
            self._casts.append((torch.is_autocast_enabled(self._device), cast))

    def measure(self, training: Training) -> Mapping[str, Tensor]:
        self._seen_passes, self._passes = self._passes, []
        self._seen_casts, self._casts = self._casts, []
        kept, self._kept = self._kept, []
        self._at_work, self._last_input, self._sampled = "", 0, False
        self._listens = training.step <= MIN_STEPS_FROM_START
        if not kept:
            return {}
        where = next((t.device for t in kept if isinstance(t, Tensor)), torch.device("cpu"))
        return {"kept": torch.stack([torch.as_tensor(t, device=where) for t in kept]).all()}

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        yield from self._mode(seen)
        kept = bool(seen.values["kept"][0]) if "kept" in seen.values else False
        if self._is_usual("kept", kept and sum(training.made.values()) > 1):
            yield from self.find("gradients_kept", seen.step, times=MIN_STEPS_IN_MODE)
        scaling = training.scaler is not None and training.scaler.is_enabled()
        single = training.parameters[0].dtype == torch.float32
        wanted = training.autocast or scaling or any(around for around, _ in self._seen_casts)
        single &= bool(self._seen_casts) and not any(cast for _, cast in self._seen_casts)
        if self._is_usual("cast", wanted and single):
            why = "a GradScaler is used" if scaling else "it was asked for"
            yield from self.find("no_autocast", seen.step, why=why)
        trains = (seen.rates >= 0).any() and (seen.trainable & (seen.rates >= 0)).any()
        if self._is_usual("graph", seen.full and trains and not (seen.peaks >= 0).any()):
            yield from self.find("no_graph", seen.step, times=MIN_STEPS_IN_MODE)
        yield from self._loss(training, seen)

    def on_evaluation(self, training: Training) -> Iterable[Finding]:
        if self._at_work:
            # Passes over the same input may be averaged over the dropout on purpose.
            severity: Severity = "hint" if self._sampled else "error"
            kind = "training_mode_in_evaluation"
            yield from self.find(kind, training.step, severity, layer=self._at_work)

    def _mode(self, seen: Seen) -> Iterable[Finding]:
        if not self._seen_passes:
            return
        self._trained |= any(self._seen_passes)
        needed = MIN_STEPS_IN_MODE if self._trained else MIN_STEPS_FROM_START
        if self._is_usual("evaluation", not any(self._seen_passes), needed):
            severity: Severity = "error" if self._trained and self._layers else "hint"
            kind = "evaluation_mode_in_training"
            yield from self.find(kind, seen.step, severity, times=needed)

    def _loss(self, training: Training, seen: Seen) -> Iterable[Finding]:
        loss, last = seen.loss, self._last_loss
        self._last_loss = loss
        if loss is None or not isfinite(loss):
            return
        moved = not seen.full or bool((seen.peaks > 0).any())
        if self._is_usual("equal", loss == last != 0.0 and moved, EQUAL) and not _is_half(loss):
            yield from self.find("constant_loss", seen.step, loss=f"{loss:.9g}", times=EQUAL)
        if seen.step == 1 and (words := _vocabulary(training.root)):
            uniform = log(words)
            if loss > ABOVE_UNIFORM * uniform + 1.0:
                values = {"loss": f"{loss:.3g}", "words": f"{words:,}", "uniform": f"{uniform:.3g}"}
                yield from self.find("high_first_loss", 1, "hint", **values)

    def _is_usual(self, what: str, there: Any, needed: int = MIN_STEPS_IN_MODE) -> bool:
        """True if it was there at so many steps in a row."""
        self._in_a_row[what] = self._in_a_row[what] + 1 if there else 0
        return self._in_a_row[what] >= needed


def _vocabulary(root: nn.Module) -> int | None:
    """Number of words that the model may say: of an output layer as wide as an embedding."""
    known = getattr(getattr(root, "config", None), "vocab_size", None)
    if isinstance(known, int):
        return known
    embedded = {m.num_embeddings for m in root.modules() if isinstance(m, nn.Embedding)}
    wide = [m.out_features for m in root.modules() if isinstance(m, nn.Linear)]
    return wide[-1] if wide and wide[-1] in embedded else None


def _is_half(loss: float) -> bool:
    """True if a half-precision type holds the number, where equal losses are to be expected."""
    kinds = (torch.bfloat16, torch.float16)
    return any(torch.tensor(loss).to(kind).item() == loss for kind in kinds)
