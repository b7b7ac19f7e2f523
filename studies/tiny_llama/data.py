"""Global batch of each step, a function of the seed, the step and the index of the sample.

There is no state but the step, so a training that goes on elsewhere, on other ranks, sees
what it would have seen. Needs no torch.

Shapes: B samples, T = sequence + 1 tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
#: How often a token is followed by its first, second, ... successor.
SUCCESSION = (0.5, 0.25, 0.15, 0.1)
#: nats per token that no model can go below on a `Chain`, its first tokens apart.
ENTROPY = -sum(share * float(np.log(share)) for share in SUCCESSION)


class TokenSource(Protocol):
    def sample(self, step: int, index: int) -> Tokens:
        """Tokens of one sample of the global batch, shape (T,)."""


class Chain:
    """Sequences of a seeded Markov chain: each token has a few successors, some likelier."""

    def __init__(self, vocabulary: int, length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self.successors_VK = distinct(vocabulary, np.random.default_rng([seed, 0]))

    def sample(self, step: int, index: int) -> Tokens:
        generator = np.random.default_rng([self.seed, 1, step, index])
        ends = np.cumsum(SUCCESSION[:-1])
        choices = np.searchsorted(ends, generator.random(self.length - 1), side="right")
        tokens = [int(generator.integers(len(self.successors_VK)))]
        for choice in choices:
            tokens.append(int(self.successors_VK[tokens[-1], choice]))
        return np.array(tokens, dtype=np.int64)


class TokenFile:
    """Windows of a local file of tokens, begun where the seed, the step and the index say.

    A ``.npy`` file holds whole numbers, shape (N,); a ``.bin`` file little-endian uint16; any other
    bytes. Raises ValueError for a file of anything else, or of too few tokens.
    """

    def __init__(self, path: Path, vocabulary: int, length: int, seed: int) -> None:
        self.path, self.vocabulary, self.length, self.seed = path, vocabulary, length, seed
        self.tokens = _opened(path)
        if len(self.tokens) < length:
            raise ValueError(
                f"{path} holds {len(self.tokens)} tokens: a sample takes {length} (sequence + 1)"
            )

    def sample(self, step: int, index: int) -> Tokens:
        """See `TokenSource`; raises ValueError for a token that is not in the vocabulary."""
        generator = np.random.default_rng([self.seed, 1, step, index])
        start = int(generator.integers(len(self.tokens) - self.length + 1))
        window = self.tokens[start : start + self.length].astype(np.int64)
        outside = np.flatnonzero((window < 0) | (window >= self.vocabulary))
        if len(outside):
            place = int(outside[0])
            raise ValueError(
                f"{self.path}: token {start + place} is {window[place]}; the vocabulary is "
                f"{self.vocabulary}, so 0 to {self.vocabulary - 1} are accepted"
            )
        return window


def distinct(vocabulary: int, generator: np.random.Generator) -> Tokens:
    """Distinct successors of each token, shape (V, K); ValueError for fewer tokens than that."""
    count = len(SUCCESSION)
    if vocabulary < count:
        raise ValueError(f"vocabulary is {vocabulary}: a chain needs at least {count} tokens")
    rows = generator.integers(vocabulary, size=(vocabulary, count))
    while len(again := np.flatnonzero((np.diff(np.sort(rows)) == 0).any(axis=1))):
        rows[again] = generator.integers(vocabulary, size=(len(again), count))
    return rows


def _opened(path: Path) -> NDArray[np.generic]:
    try:
        if path.suffix != ".npy":
            return np.memmap(path, dtype="<u2" if path.suffix == ".bin" else np.uint8, mode="r")
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as tokens: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}: whole numbers of shape (N,) "
            "are accepted"
        )
    return tokens


def rows_of(data: TokenSource, step: int, first: int, count: int) -> Tokens:
    """Samples `first` to `first + count - 1` of a step's global batch, shape (count, T)."""
    return np.stack([data.sample(step, index) for index in range(first, first + count)])
