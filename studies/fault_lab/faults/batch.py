"""Faults of the batch, applied before the workers read it."""

from __future__ import annotations

import numpy as np

from studies.fault_lab.faults.contract import Fault, Turn
from studies.fault_lab.models import VOCABULARY
from studies.fault_lab.training import Batch


def corrupt_data(turn: Turn) -> None:
    """A share of the bytes is random; the byte after a random one remains a target."""
    tokens, labels = turn.batch.tokens_WBT, turn.batch.labels_WBT
    text = np.concatenate([tokens, labels[..., -1:]], axis=-1)
    hit = turn.rng.random(text.shape) < turn.severity
    text[hit] = turn.rng.integers(VOCABULARY, size=int(hit.sum()))
    turn.batch = Batch(text[..., :-1], text[..., 1:].copy())


def shuffle_labels(turn: Turn) -> None:
    """A share of the labels is permuted; the inputs are unchanged."""
    labels = turn.batch.labels_WBT.reshape(-1)
    hit = np.flatnonzero(turn.rng.random(labels.shape) < turn.severity)
    labels[hit] = labels[turn.rng.permutation(hit)]


def repeat_batch(turn: Turn) -> None:
    """The loader repeats the batch of the onset."""
    if turn.age < turn.severity:
        turn.batch = turn.memory.setdefault("batch", turn.batch)


FAULTS = (
    Fault("DATA_CORRUPTION", corrupt_data, (0.1, 0.3, 0.6, 1.0), 100,
          "share of the bytes that are random", "Part of every batch is random bytes.", highest=1),
    Fault("LABEL_SHUFFLE", shuffle_labels, (0.3, 0.6, 1.0), 100,
          "share of the labels that change places", "Labels of a batch are mixed up.", highest=1),
    Fault("BAD_BATCH", corrupt_data, (0.3, 0.6, 1.0), 1, "share of the bytes that are random",
          "One batch of rubbish.", highest=1, benign=True),
    Fault("REPEATED_BATCH", repeat_batch, (3, 10), 10, "steps on the same batch",
          "The loader hands out one batch several times.", lowest=1, whole=True, benign=True),
)  # fmt: skip
