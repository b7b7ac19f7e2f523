"""Does each step get the data that it should?"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import active_children
from typing import Any

import torch
from torch import Tensor, nn

from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding, Severity
from rmetric.audits.fingerprint import halves, joined, ordered
from rmetric.audits.training import Seen, Training

#: Batches of the past that are known again; first batches of an epoch whose order is compared; last
#: ones that a checkpoint keeps, and first ones after it that the log does.
KNOWN, ORDER, KEPT = 4096, 8, 64
#: Equal batches in a row, until the data are one batch.
SAME = 10
#: Streaks of equal batches, each as long as the one before, until workers draw alike.
STREAKS = 3
#: Elements of a tensor, tensors of a batch and levels of nesting that are looked at.
_ELEMENTS, _TENSORS, _DEPTH = 65536, 8, 3
#: A label that the loss leaves out, as torch's cross entropy has it.
IGNORED = -100
LABELS = ("labels", "label", "targets", "target")


class Batches(Audit):
    """Fingerprints of the batches, their labels and tokens.

    Trainers and `Rescue.steps` hand the batches over; a loop of its own calls
    `monitor.batch_ready(batch)`.

    Its weakness: augmentations differ in each epoch, so the order of augmented data is not known.
    """

    name = "batches"

    def __init__(self) -> None:
        super().__init__()
        self._prints: list[Tensor] = []  # since the last check
        self._labelled: list[Tensor] = []  # share of the labels that count
        self._known: dict[int, int] = {}  # fingerprint -> number of the batch, in this epoch
        self._number = self._same = self._unlabelled = 0
        self._streak = self._streaks = 0  # length of the last one, and how many of that length
        self._workers, self._updated_again = 0, False
        self._given: Callable[[], Tensor | None] = lambda: None  # tensor of the last batch
        self._recent: deque[int] = deque(maxlen=KEPT)
        self._origin: list[int] = []  # first batches of the run
        self._after: list[int] | None = None  # those after the last save
        self._epoch: int | None = None
        self._saved = self._begun = 0  # batches by the last save, and by the epoch's beginning
        self._firsts: list[int] = []  # fingerprints of the first batches of the epoch before
        self._now: list[int] = []

    def restart(self) -> None:
        self._known, self._firsts, self._now = {}, [], []
        self._same = self._streak = self._streaks = 0

    def on_batch(self, training: Training, batch: Any) -> Iterable[Finding]:
        if tensors := tensors_in(batch):
            # A worker's batch is a tensor of its own: who gives one twice makes two steps of it.
            self._updated_again |= self._given() is tensors[0]
            self._given = weakref.ref(tensors[0])
            self._prints.append(_print(tensors))
        if not isinstance(batch, Mapping):
            return
        for labels in (batch.get(name) for name in LABELS):
            if isinstance(labels, Tensor) and labels.dtype == torch.int64 and labels.numel():
                self._labelled.append((labels != IGNORED).double().mean())
        yield from self._tokens(training, batch.get("input_ids"))

    def measure(self, training: Training) -> Mapping[str, Tensor]:
        found = {}
        if self._prints:
            found["batches"] = halves(_stacked(self._prints)).double().flatten()
        if self._labelled:
            found["labelled"] = _stacked(self._labelled).max()
        self._prints, self._labelled = [], []
        return found

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        if "batches" in seen.values:
            for batch in joined(seen.values["batches"]).tolist():
                yield from self._batch(training, batch, seen.step)
        if "labelled" in seen.values:
            without = float(seen.values["labelled"][0]) == 0.0
            self._unlabelled = self._unlabelled + 1 if without else 0
            if self._unlabelled:
                severe: Severity = "error" if self._unlabelled > 1 else "hint"
                yield from self.find("no_labels", seen.step, severe, ignored=IGNORED)

    def on_save(self, training: Training) -> Mapping[str, Any]:
        self._log_after(training)
        self._saved, self._after, recent = self._number, [], list(self._recent)
        chains = [
            [0, self._origin[:]],
            [self._begun, self._now[:]],
            [self._number - len(recent), recent],
        ]
        return {"number": self._number, "epoch": training.epoch, "chains": chains}

    def on_resume(self, training: Training, saved: Mapping[str, Any]) -> Iterable[Finding]:
        self._after = None  # the log keeps what the run trained on that had made the save
        if own := saved.get(self.name):
            self._number = self._begun = own["number"]
            self._origin = list(own["chains"][0][1])
            self._recent.extend(own["chains"][-1][1])
        return ()

    def _batch(self, training: Training, batch: int, step: int) -> Iterable[Finding]:
        if training.epoch != self._epoch:
            self._begin(training.epoch)
        again = self._now[ORDER - 1 :] and self._recent[-1] != batch == self._now[0]
        if again and training.epoch is None:
            self._begin(None)  # as far as is known an epoch begins
        self._number += 1
        earlier = self._known.get(batch)
        self._recent.append(batch)
        if self._number <= ORDER:
            self._origin.append(batch)
        if self._after is not None and len(self._after) < KEPT:
            self._after.append(batch)
            if len(self._after).bit_count() == 1:  # at 1, 2, 4, ...: the run may end at any time
                self._log_after(training)
        if earlier == self._number - 1:
            self._same += 1
        else:
            yield from self._ended(self._same + 1, step)
            self._same = 0
        if earlier is not None:
            yield from self._again(training, earlier, step)
        if len(self._now) < ORDER:
            self._now.append(batch)
            if self._now == self._firsts and len(set(self._now)) == ORDER:
                sampler = getattr(training.loader, "sampler", None)
                shuffles = hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True)
                yield from self.find("same_order", step, "error" if shuffles else "hint")
        self._known[batch] = self._number
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def _log_after(self, training: Training) -> None:
        if self._after:
            training.log("BATCHES", after=self._saved, batches=self._after)

    def _begin(self, epoch: int | None) -> None:
        self._epoch, self._begun = epoch, self._number
        if len(self._now) == ORDER:
            self._firsts = self._now
        self._now, self._known = [], {}

    def _again(self, training: Training, earlier: int, step: int) -> Iterable[Finding]:
        length = _length(training.loader)
        if self._same >= SAME - 1 and length != 1:
            certain = length is not None and training.epoch is not None
            yield from self.find("same_batch", step, "error" if certain else "hint", times=SAME)
        elif not self._same:
            again = f"batch {self._number} is batch {earlier} again"
            yield from self.find("batch_again", step, "hint", again=again)

    def _ended(self, length: int, step: int) -> Iterable[Finding]:
        """A streak of equal batches: workers that draw alike give each batch as often in a row."""
        self._streaks = self._streaks + 1 if length == self._streak else 1
        self._streak = length
        if length == 1 or self._updated_again:
            return
        self._workers = max(self._workers, len(active_children()))  # they end before the epoch
        if self._streaks >= STREAKS and length <= self._workers:
            again = f"each batch comes {length} times in a row"
            yield from self.find("batch_again", step, "hint", again=again)

    def _tokens(self, training: Training, tokens: Any) -> Iterable[Finding]:
        """On the host alone, before a device ends with an error that names nothing."""
        get = getattr(training.root, "get_input_embeddings", None)
        table = get() if callable(get) else None
        if not isinstance(tokens, Tensor) or not isinstance(table, nn.Embedding):
            return
        if tokens.device.type == "cpu" and tokens.numel() and not tokens.is_floating_point():
            low, high = (int(bound) for bound in tokens.aminmax())
            if low < 0 or high >= table.num_embeddings:
                wrong, rows = low if low < 0 else high, f"{table.num_embeddings:,}"
                step = training.step + 1
                yield from self.find("token_outside_vocabulary", step, token=wrong, rows=rows)


def tensors_in(parts: Any, most: int | None = _TENSORS, depth: int = _DEPTH) -> list[Tensor]:
    """The first tensors of a batch or a state, of nested lists and mappings too."""
    if isinstance(parts, Tensor):
        return [parts] if parts.numel() else []
    if not depth or not isinstance(parts, Mapping | list | tuple):
        return []
    each = parts.values() if isinstance(parts, Mapping) else parts
    return [tensor for part in each for tensor in tensors_in(part, most, depth - 1)][:most]


def _stacked(scalars: list[Tensor]) -> Tensor:
    """On the device of the first."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


@torch.no_grad()
def _print(tensors: list[Tensor]) -> Tensor:
    """Checksum of a batch's tensors, int64, on the device."""
    whole = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for place, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        few = flat[:: -(-len(flat) // _ELEMENTS)]
        whole = whole + ordered(few).to(whole.device) * (2 * place + 1) + len(flat)
    return whole


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, AttributeError, NotImplementedError):
        return None
