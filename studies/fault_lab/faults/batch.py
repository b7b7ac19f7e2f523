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
    Fault(
        name="DATA_CORRUPTION", act=corrupt_data, severities=(0.1, 0.3, 0.6, 1.0),
        duration_steps=100, highest=1,
        unit="share of the bytes that are random", summary="Part of every batch is random bytes.",
    ),
    Fault(
        name="LABEL_SHUFFLE", act=shuffle_labels, severities=(0.3, 0.6, 1.0), duration_steps=100,
        highest=1,
        unit="share of the labels that change places", summary="Labels of a batch are mixed up.",
    ),
    Fault(
        name="BAD_BATCH", act=corrupt_data, severities=(0.3, 0.6, 1.0), duration_steps=1, highest=1,
        benign=True,
        unit="share of the bytes that are random", summary="One batch of rubbish.",
    ),
    Fault(
        name="REPEATED_BATCH", act=repeat_batch, severities=(3, 10), duration_steps=10, lowest=1,
        whole=True, benign=True,
        unit="steps on the same batch", summary="The loader hands out one batch several times.",
    ),
)  # fmt: skip
