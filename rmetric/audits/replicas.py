"""Do the ranks that should hold the same hold the same?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding, Severity
from rmetric.audits.fingerprint import halves, joined
from rmetric.audits.training import Seen, Training

#: Parts of the model whose fingerprints are exchanged, each of weights, gradients and moments.
PARTS = 64
REPLICATED_STATE = ("weights", "gradients", "moments")
#: Measured steps in a row with the same batch on two ranks.
SAME_BATCH = 5
#: Measured steps with equal weights, from which on gradients should be equal too.
SAME_WEIGHTS = 3
#: Numbers of a message: step, part of the shards, two halves of the batch; then the fingerprints.
HEAD = 4
WIDTH = HEAD + 2 * PARTS * len(REPLICATED_STATE)


class Replicas(Audit):
    """Fingerprints of weights, exchanged gradients and moments over ranks that are replicas.

    Ranks whose shards are the same part of the model are replicas: all of DistributedDataParallel,
    the replicated tensors of tensor parallelism, the replica groups of HSDP. With three or more the
    odd one is named.

    Its weakness: buffers are not compared, and of more than 64 parameters only parts are named.
    """

    name = "replicas"

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[np.ndarray] = []
        self._key, self._parallel = 0, False
        self._ever_equal: Counter[str] = Counter()  # measured steps
        self._same_batch = 0

    def install(self, training: Training) -> Iterator[Callable[[], Any]]:
        # Megatron's layers mark the parameters of which each rank holds a part of its own.
        own = [getattr(p, "tensor_model_parallel", False) for p in training.parameters]
        places = [n for n, p in enumerate(training.parameters) if p.requires_grad and not own[n]]
        parts = min(PARTS, len(places))
        self._parts = np.array_split(np.array(places, dtype=int), parts) if parts else []
        self._key = _shard(training)
        self._parallel = any(own) or self._key != 0
        yield from ()

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        channel = training.channel
        if channel is None or not self._parts:
            return
        gathered = channel.take()
        if gathered is not None:
            yield from self._compared(training, list(channel.ranks), gathered)
        if seen.full:
            batch = joined(seen.values["batches"])[:1] if "batches" in seen.values else [0]
            row = [float(seen.step), float(self._key), *_halves([int(batch[0])])]
            for kind in REPLICATED_STATE:
                prints = getattr(seen, kind)
                sums = [int(prints[part].sum()) for part in self._parts] if len(prints) else []
                row += _halves(sums + [0] * (PARTS - len(sums)))
            channel.post(row)

    def _compared(
        self, training: Training, ranks: list[int], gathered: np.ndarray
    ) -> Iterable[Finding]:
        steps = gathered[:, 0]
        if training.rank not in ranks or (steps != steps[0]).any():
            return
        alike = gathered[:, 1] == gathered[ranks.index(training.rank), 1]
        rows, there = gathered[alike], [r for r, same in zip(ranks, alike, strict=True) if same]
        if len(there) < 2:
            return
        yield from self._batches(rows, there)
        for number, kind in enumerate(REPLICATED_STATE):
            begin = HEAD + 2 * PARTS * number
            values = rows[:, begin : begin + 2 * PARTS].reshape(len(rows), 2, PARTS)
            apart = (values != values[:1]).any(axis=(0, 1))[: len(self._parts)]
            if apart.any():
                yield from self._apart(training, kind, values, there, apart)
            elif values.any():
                self._ever_equal[kind] += 1

    def _apart(
        self, training: Training, kind: str, values: np.ndarray, ranks: list[int], which: np.ndarray
    ) -> Iterable[Finding]:
        coupled = training.replicated or self._ever_equal["gradients"] > 0
        # Weights that are equal again after a step are kept so by something.
        kept = kind == "gradients" and self._ever_equal["weights"] > SAME_WEIGHTS
        if not coupled and not kept and not self._ever_equal[kind]:
            return  # ranks that never were equal train models of their own
        places = np.flatnonzero(which)
        rows = [row.tobytes() for row in np.ascontiguousarray(values[:, :, places[0]])]
        usual, often = Counter(rows).most_common(1)[0]
        odd = [r for r, row in zip(ranks, rows, strict=True) if row != usual]
        if 2 * often <= len(ranks):
            odd = ranks  # no majority
        names = [training.names[n] for place in places for n in self._parts[place]]
        severity: Severity = "error" if coupled else "hint"
        name = f"{kind}_apart"
        if not self._raised.keys() & {(name, severity), (name, "error")}:  # all follow from one
            yield from self.find(name, training.step, severity, parameters=names, ranks=odd)

    def _batches(self, rows: np.ndarray, ranks: list[int]) -> Iterable[Finding]:
        numbers = [tuple(row[2:HEAD]) for row in rows]
        again = [n for n, count in Counter(numbers).items() if count > 1 and any(n)]
        self._same_batch = self._same_batch + 1 if again and not self._parallel else 0
        if self._same_batch >= SAME_BATCH:
            those = [r for r, number in zip(ranks, numbers, strict=True) if number == again[0]]
            yield from self.find("same_batch_on_ranks", int(rows[0, 0]), ranks=those)


def _halves(wholes: Sequence[int]) -> list[float]:
    rows = halves(torch.tensor(wholes, dtype=torch.int64))
    return [float(number) for number in rows.flatten()]


def _shard(training: Training) -> int:
    """Number of the shard that this rank holds; equal on replicas, 0 without shards."""
    key = 0
    for parameter in training.parameters:
        if (mesh := getattr(parameter, "device_mesh", None)) is None:
            continue
        place, placements = mesh.get_coordinate() or (), getattr(parameter, "placements", ())
        for coordinate, placement in zip(place, placements, strict=False):
            if not placement.is_replicate():
                key = (key * 1009 + coordinate + 1) % 2**31
    return key
