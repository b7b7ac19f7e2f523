"""Examples packed into sequences of one length, and the batch of every step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from studies.case_study.examples import reader_of, tokens_of
from studies.case_study.rows import Rows
from studies.case_study.settings import IGNORED, CaseStudyError, Settings

Tokens = NDArray[np.int64]


class Batch(NamedTuple):
    """Token ids and labels, shape (sequences, length)."""

    tokens_BL: Tokens
    labels_BL: Tokens


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sequences of one length, shapes (N, L); one example follows another in them.

    A batch depends on the seed and the step alone, so a run that goes on after a
    kill sees what it would have seen.
    """

    tokens_NL: Tokens
    labels_NL: Tokens
    seed: int = 0

    def __len__(self) -> int:
        return len(self.tokens_NL)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.tokens_NL.tobytes() + self.labels_NL.tobytes()).hexdigest()

    def batch(self, number: int, size: int) -> Batch:
        """The batch of this number, from 0; every epoch has an order of its own."""
        wanted = np.arange(number * size, (number + 1) * size)
        epochs, places = np.divmod(wanted, len(self))
        orders = {epoch: self._order(epoch) for epoch in set(epochs.tolist())}
        chosen = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return Batch(self.tokens_NL[chosen], self.labels_NL[chosen])

    def in_order(self, size: int) -> Iterator[Batch]:
        """All of them, once, `size` at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield Batch(self.tokens_NL[part], self.labels_NL[part])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self))


def make_blocks(
    rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> tuple[Blocks, Blocks]:
    """(training, held out): as many blocks as the steps will use, in an order by the seed."""
    read = reader_of(rows, source)
    order = iter(np.random.default_rng(settings.seed).permutation(len(rows)))
    most = settings.max_steps * settings.micro_batches * settings.micro_batch_size

    def pack(wanted: int) -> Blocks:
        return _pack(
            (tokens_of(read(rows[int(row)]), tokenizer) for row in order), wanted, settings
        )

    held_out = pack(settings.eval_sequences)
    training = pack(most)
    if len(held_out) < settings.eval_sequences or len(training) == 0:
        length = settings.sequence_length
        raise CaseStudyError(
            f"--dataset {source}: its {len(rows)} rows do not fill {settings.eval_sequences} "
            f"held-out sequences of {length} tokens and one more to train on; --sequence-length "
            "and --eval-sequences can be less"
        )
    return training, held_out


def _pack(
    examples: Iterator[tuple[list[int], list[int]]], wanted: int, settings: Settings
) -> Blocks:
    """Examples one after the other, cut into blocks; those with nothing to learn are left out."""
    length = settings.sequence_length
    tokens: list[int] = []
    labels: list[int] = []
    blocks: list[tuple[list[int], list[int]]] = []
    while len(blocks) < wanted:
        example = next(examples, None)
        if example is None:
            break
        tokens += example[0]
        labels += example[1]
        while len(tokens) >= length and len(blocks) < wanted:
            if any(label != IGNORED for label in labels[1:length]):
                blocks.append((tokens[:length], labels[:length]))
            del tokens[:length], labels[:length]
    shape = (len(blocks), length)
    return Blocks(
        tokens_NL=np.array([t for t, _ in blocks], dtype=np.int64).reshape(shape),
        labels_NL=np.array([label for _, label in blocks], dtype=np.int64).reshape(shape),
        seed=settings.seed,
    )
