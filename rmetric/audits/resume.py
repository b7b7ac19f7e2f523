"""Did everything come back that the checkpoint should hold?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rmetric.audits.batches import tensors_in
from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding, Severity
from rmetric.audits.fingerprint import fingerprint, fingerprints, joined, local
from rmetric.audits.training import OwnHook, Seen, Training, rate_of

#: What the loss shows where a part is lost.
OUTLOOK = {
    "weights": "the loss begins where those weights were",
    "moments": "the first steps are of another size: often a rise of the loss within some tens of "
    "steps",
    "optimizer step": "the bias correction begins anew: large first steps",
    "rate": "each step is smaller or larger than it would have been, from the first one on",
    "scheduler": "warm-up and decay begin anew: the loss rises while the rate does",
    "scaler": "some steps overflow and are left out",
    "data": "it trains on data already seen: their loss is too low, and later data may be missed",
    "data skipped": "the batches between are left out, and the loss does not show it",
    "first data": "right if an epoch begins there; otherwise it trains on data already seen",
    "other data": "further on than the log goes, or in another order; the loss does not show it",
    "EMA": "evaluations with the averages are worse until they have caught up",
    "buffers": "running statistics and the like are other ones: evaluations are worse for a while",
    "random states": "dropout and shuffling differ from an undisturbed run; harmless by itself",
}
#: Parts that differ in a sound resume too.
_HARMLESS = {"scaler", "random states", "first data", "other data"}


@dataclass(frozen=True)
class Row:
    """A part of the training's state before and after a resume; `key` of `OUTLOOK`."""

    part: str
    was: str
    now: str
    equal: bool
    key: str = ""


def table(rows: Iterable[Row]) -> str:
    """Part, saved value, present one and what the loss will show; a line each.

    >>> print(table([Row("rate", "0.1", "0.1", True)]))
    <BLANKLINE>
      part             saved                  now
      rate             0.1                    equal
    """
    lines = [("part", "saved", "now", "")]
    for row in rows:
        lines.append((row.part, row.was, "equal" if row.equal else row.now, _outlook(row)))
    form = "\n  {:<16} {:<22} {:<28} {}"
    return "".join(form.format(*line).rstrip(" ") for line in lines)


def _outlook(row: Row) -> str:
    return "" if row.equal else OUTLOOK[row.key or row.part]


class Resume(Audit):
    """Compares the state at the first step after a checkpoint was loaded with that at its save.

    Its weakness: which batch was due is only known where the epochs are alike, or where the run
    went on after the save and its log is there; of other data only a return to the first or the
    last batches shows. Shards are only compared at the same number of ranks, buffers and random
    states only where the forward pass is seen (`Modes`).
    """

    name = "resume"

    def __init__(self) -> None:
        super().__init__()
        self._saved: Mapping[str, Any] = {}
        self._rows: list[Row] | None = None
        self._listens = False
        self._before: dict[str, Any] = {}  # what the first forward pass changes

    def install(self, training: Training) -> Iterator[Callable[[], Any]]:
        yield training.model.register_forward_pre_hook(OwnHook(self._before_forward)).remove

    def restart(self) -> None:
        self._listens, self._before = True, {}
        self._raised.clear()  # each resume by itself

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        if self._listens:
            self._listens = False
            self._before = {"random": _random_states(), "buffers": _buffers(model)}

    def on_save(self, training: Training) -> Mapping[str, Any]:
        return state_of(training)

    def on_resume(self, training: Training, saved: Mapping[str, Any]) -> Iterable[Finding]:
        own, now = dict(saved.get(self.name) or {}), state_of(training)
        self._saved = saved
        if isinstance(own.get("weights"), list):  # else of another version
            if not self._before:  # no forward pass was seen, and what it changes has changed
                own |= {"random": None, "buffers": None}
            self._rows = list(_rows(own, now | self._before))
        return ()

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        if self._rows is None:
            return
        rows, self._rows = self._rows, None
        batches = self._saved.get("batches")
        if "batches" in seen.values and batches:
            batch = int(joined(seen.values["batches"])[0])
            logged = {e["after"]: e["batches"] for e in self._saved.get("logged", ())}
            rows += _data(batch, batches, logged, training.epoch)
        lost = [row for row in rows if not row.equal]
        kind = "not_restored" if lost else "restored"
        parts = [row.part for row in rows]
        unseen = "" if "data" in parts else "; whether data are left out does not show"
        words = {"lost": table(rows), "parts": ", ".join(parts) + unseen}
        harm = {row.key or row.part for row in lost} - _HARMLESS
        severity: Severity = "error" if harm else "hint"
        with_outlook = [asdict(row) | {"outlook": _outlook(row)} for row in rows]
        yield from self.find(kind, seen.step, severity, table=with_outlook, **words)


def _data(
    batch: int, saved: Mapping[str, Any], logged: Mapping[int, list[int]], epoch: int | None
) -> Iterator[Row]:
    """The place of the first batch, by its fingerprint, among those that are known, if it is there.

    `saved` has the number of batches by the save, and stretches of them: first number,
    fingerprints. `logged` maps the number of batches by a save to those after it.
    """
    number, chains = int(saved["number"]), list(saved["chains"])
    was, last, due = f"next: batch {number:,}", chains[-1][1][-1:], logged.get(number, [])
    shuffled = chains[1][0] > 0 and chains[0][1][: len(chains[1][1])] != chains[1][1]
    chains += [[number - len(last), last + due], *map(list, logged.items())]
    pairs = {pair for _, chain in chains for pair in pairwise(chain)}
    drawn = len(pairs) > len({first for first, _ in pairs})  # with replacement, or one by one
    places = (begin + c.index(batch) for begin, c in chains if batch in c)
    place = min(places, key=lambda place: abs(place - number), default=None)
    if (*last, batch) in pairs:
        yield Row("data", was, was, True)
    elif place is None and due:
        known = f"none of those to {number + len(due) - 1:,}"
        yield Row("data", was, known, False, "other data")
    elif place is not None and not drawn and (due or shuffled or epoch == saved["epoch"]):
        # Where epochs are alike the first batch comes again when one ends.
        unsure = epoch is None and not due and place in (0, chains[1][0])
        key = "data skipped" if place > number else "first data" if unsure else "data"
        yield Row("data", was, f"batch {place:,}", False, key)


def state_of(training: Training) -> dict[str, Any]:
    """State that a resume should restore, as plain values; reads from the device."""
    tensors, step = [], None
    held = {id(p): s for optimizer in training.optimizers for p, s in optimizer.state.items()}
    # In the model's order, so that moments of swapped parameters differ.
    for state in [*(held.pop(id(p), {}) for p in training.parameters), *held.values()]:
        step = state.get("step", step)
        tensors += [
            v for k, v in state.items() if isinstance(v, Tensor) and k != "step" and v.numel()
        ]
    rates = [rate_of(group) for group in training.groups]
    parts: dict[str, list[Tensor]] = {"weights": [*training.parameters], "moments": tensors}
    parts["EMA"] = _averages(training.ema)
    scaling = training.scaler is not None and training.scaler.is_enabled()
    sharded = any(hasattr(p, "device_mesh") for p in training.parameters)
    return {
        "ranks": training.ranks if sharded else 0,
        **{part: [_sum(of_part), _norm(of_part)] for part, of_part in parts.items()},
        "step": None if step is None else int(step),
        "rates": [rate for rate in rates if rate < float("inf")],
        "scheduler": [getattr(s, "last_epoch", None) for s in training.schedulers],
        "scaler": float(training.scaler.get_scale()) if scaling else None,
        "random": _random_states(),
        "buffers": _buffers(training.root),
    }


def _rows(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Row]:
    if saved["ranks"] == now["ranks"]:
        yield from _rows_of_norms(saved, now)
    for part, key in (("optimizer step", "step"), ("scaler", "scaler")):
        if saved[key] is not None or now[key] is not None:
            yield Row(part, _text(saved[key]), _text(now[key]), saved[key] == now[key])
    equal = len(saved["rates"]) == len(now["rates"]) and all(
        abs(a - b) <= 1e-6 * max(a, b) for a, b in zip(saved["rates"], now["rates"], strict=True)
    )
    was, there = (_text(next(iter(state["rates"]), None)) for state in (saved, now))
    yield Row("rate", was, there, equal)
    if saved["scheduler"] and now["scheduler"]:
        was, there = (f"step {state['scheduler'][0]}" for state in (saved, now))
        yield Row("scheduler", was, there, saved["scheduler"] == now["scheduler"])
    for part, key in (("buffers", "buffers"), ("random states", "random")):
        if saved[key]:
            equal = saved[key] == now[key]
            yield Row(part, "as saved", "as saved" if equal else "other ones", equal)


def _rows_of_norms(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Row]:
    for part in ("weights", "moments", "EMA"):
        (was, norm), (there, norm_now) = saved[part], now[part]
        if part == "EMA" and not was:
            continue
        lost = norm_now == 0 != norm
        values = f"norm {norm:.3g}", f"{'lost, ' if lost else ''}norm {norm_now:.3g}"
        if was != there and values[0] == values[1]:
            values = f"norm {norm:.9g}", f"other ones, norm {norm_now:.9g}"
        if part == "EMA" and there == now["weights"][0]:
            values = values[0], f"begun anew, norm {norm_now:.9g}"
        yield Row(part, *values, was == there)


def _averages(ema: Any) -> list[Tensor]:
    """Tensors of weights averages: a module's parameters, or those of a state."""
    if isinstance(ema, nn.Module):
        return list(ema.parameters())
    state = ema.state_dict() if hasattr(ema, "state_dict") else ema
    found = [tensor for tensor in tensors_in(state, most=None) if tensor.is_floating_point()]
    if ema is not None and not found:
        kind = f"{type(ema).__name__} without tensors of floats"
        raise TypeError(f"monitor.ema is {kind}: a module, or tensors in a dict are accepted")
    return found


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.7g}"


def _sum(tensors: list[Tensor]) -> int:
    """Order-sensitive checksum of all tensors."""
    weighted = fingerprints(tensors).cpu()
    order = torch.arange(1, 2 * len(tensors) + 1, 2)
    return int((weighted * order).sum()) if tensors else 0


@torch.no_grad()
def _norm(tensors: list[Tensor]) -> float:
    squares = [local(t.detach()).float().norm().double().cpu() ** 2 for t in tensors]
    return float(f"{float(sum(squares)) ** 0.5:.9g}") if squares else 0.0


def _buffers(model: nn.Module) -> int:
    """Checksum of the buffers that a checkpoint holds."""
    persistent = (
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )
    return _sum([buffer for buffer in persistent if buffer.numel()])


def _random_states() -> int:
    whole = fingerprint(torch.get_rng_state())
    if torch.cuda.is_available():
        whole = whole + 3 * fingerprint(torch.cuda.get_rng_state())
    return int(whole)
