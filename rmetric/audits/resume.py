"""Did everything come back that the checkpoint should hold?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding, Severity
from rmetric.audits.fingerprint import fingerprint, fingerprints, joined, local
from rmetric.audits.training import Seen, Training, rate_of

#: What the loss shows where a part is lost.
OUTLOOK = {
    "weights": "the loss begins where those weights were",
    "moments": "the first steps are of another size: often a rise of the loss within some tens of "
    "steps",
    "optimizer step": "the bias correction begins anew: large first steps",
    "rate": "each step is smaller or larger than it would have been, from the first one on",
    "scheduler": "warm-up and decay begin anew: the loss rises while the rate does",
    "scaler": "some steps overflow and are left out",
    "data": "data that were seen are trained on again: their loss is too low, and later data may "
    "be missed",
    "random states": "dropout and shuffling differ from an undisturbed run; harmless by itself",
}
#: Parts that differ in a sound resume too.
_HARMLESS = {"scaler", "random states"}


@dataclass(frozen=True)
class Row:
    """A part of the training's state before and after a resume.

    Attributes:
        part: a key of `OUTLOOK`.
        was, now: in words.
        equal: it came back.
    """

    part: str
    was: str
    now: str
    equal: bool

    def __str__(self) -> str:
        if self.equal:
            return f"{self.part}: equal ({self.was})"
        return f"{self.part}: {self.now} (was {self.was}): {OUTLOOK[self.part]}"


class Resume(Audit):
    """Compares the state at the first step after a checkpoint was loaded with that at its save.

    Its weakness: of the data only a return to the first or the last batches shows, and none that
    are left out; shards are only compared at the same number of ranks.
    """

    name = "resume"

    def __init__(self) -> None:
        super().__init__()
        self._batches: Mapping[str, Any] = {}
        self._rows: list[Row] | None = None
        self._listens = False
        self._random: int | None = None

    def install(self, training: Training) -> Iterator[Callable[[], Any]]:
        yield training.model.register_forward_pre_hook(self._before_forward).remove

    def restart(self) -> None:
        self._listens, self._random = True, None  # the next forward pass shows the random states
        self._told.clear()  # each resume by itself

    def _before_forward(self, *_: Any) -> None:
        if self._listens:
            self._listens, self._random = False, _random_states()

    def on_save(self, training: Training) -> Mapping[str, Any]:
        return state_of(training)

    def on_resume(self, training: Training, saved: Mapping[str, Any]) -> Iterable[Finding]:
        own, now = saved.get(self.name) or {}, state_of(training)
        self._batches = saved.get("batches") or {}
        if own:
            if self._random is not None:
                now["random"] = self._random
            self._rows = list(_rows(own, now))
        return ()

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        if self._rows is None:
            return
        rows, self._rows = self._rows, None
        if "batches" in seen.values and (number := self._batches.get("number")):
            batch = int(joined(seen.values["batches"])[0])
            place = _place(batch, self._batches)
            if place is not None:
                rows.append(Row("data", f"at batch {number}", f"begins at batch {place}", False))
        lost = [row for row in rows if not row.equal]
        kind = "not_restored" if lost else "restored"
        words = {"lost": "; ".join(map(str, lost)), "parts": ", ".join(row.part for row in rows)}
        severity: Severity = "error" if {row.part for row in lost} - _HARMLESS else "hint"
        yield from self.find(kind, seen.step, severity, rows=list(map(asdict, rows)), **words)


def _place(batch: int, saved: Mapping[str, Any]) -> int | None:
    """Number of a batch from 0, if it is one of the last or first ones that were trained on."""
    recent: list[int] = list(saved.get("recent", ()))
    firsts: list[int] = list(saved.get("firsts", ()))
    if batch in recent:
        return int(saved["number"]) - len(recent) + recent.index(batch)
    return firsts.index(batch) if batch in firsts else None


def state_of(training: Training) -> dict[str, Any]:
    """What a resume should bring back, as plain values; reads from the device."""
    tensors, step = [], None
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            step = state.get("step", step)
            tensors += [
                v for k, v in state.items() if isinstance(v, Tensor) and k != "step" and v.numel()
            ]
    rates = [rate_of(group) for group in training.groups]
    scaling = training.scaler is not None and training.scaler.is_enabled()
    sharded = any(hasattr(p, "device_mesh") for p in training.parameters)
    return {
        "ranks": training.ranks if sharded else 0,
        "weights": _sum(list(training.parameters)),
        "weight_norm": _norm(list(training.parameters)),
        "moments": _sum(tensors),
        "moment_norm": _norm(tensors),
        "step": None if step is None else int(step),
        "rates": [rate for rate in rates if rate < float("inf")],
        "scheduler": [getattr(s, "last_epoch", None) for s in training.schedulers],
        "scaler": float(training.scaler.get_scale()) if scaling else None,
        "random": _random_states(),
    }


def _rows(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Row]:
    if saved["ranks"] == now["ranks"]:
        for part, norm in (("weights", "weight_norm"), ("moments", "moment_norm")):
            lost = now[norm] == 0 != saved[norm]
            values = f"{saved[norm]:.3g}", f"{'lost, ' if lost else ''}{now[norm]:.3g}"
            if saved[part] != now[part] and values[0] == values[1]:
                values = f"{saved[norm]:.9g}", f"other ones, {now[norm]:.9g}"
            yield Row(part, *values, saved[part] == now[part])
    for part, key in (("optimizer step", "step"), ("scaler", "scaler")):
        if saved[key] is not None or now[key] is not None:
            yield Row(part, _text(saved[key]), _text(now[key]), saved[key] == now[key])
    equal = len(saved["rates"]) == len(now["rates"]) and all(
        abs(a - b) <= 1e-6 * max(a, b) for a, b in zip(saved["rates"], now["rates"], strict=True)
    )
    yield Row("rate", _first(saved["rates"]), _first(now["rates"]), equal)
    if saved["scheduler"] and now["scheduler"]:
        was, there = saved["scheduler"], now["scheduler"]
        yield Row("scheduler", f"step {was[0]}", f"step {there[0]}", was == there)
    equal = saved["random"] == now["random"]
    yield Row("random states", "as saved", "as saved" if equal else "other ones", equal)


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _first(rates: list[float]) -> str:
    return f"{rates[0]:.4g}" if rates else "none"


def _sum(tensors: list[Tensor]) -> int:
    """Of all tensors, in their order."""
    weighted = fingerprints(tensors).cpu()
    order = torch.arange(1, 2 * len(tensors) + 1, 2)
    return int((weighted * order).sum()) if tensors else 0


@torch.no_grad()
def _norm(tensors: list[Tensor]) -> float:
    squares = [local(t.detach()).float().norm().double().cpu() ** 2 for t in tensors]
    return float(f"{float(sum(squares)) ** 0.5:.9g}") if squares else 0.0


def _random_states() -> int:
    whole = fingerprint(torch.get_rng_state())
    if torch.cuda.is_available():
        whole = whole + 3 * fingerprint(torch.cuda.get_rng_state())
    return int(whole)
