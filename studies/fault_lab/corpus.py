"""Training text of the laboratory: Python's sources and documentation, and generated text.

Each corpus has two domains, so that a change of the data mixture is a real one. Text is
bytes; the last tenth of the first domain is held out for evaluation.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

HELD_OUT = 10  # one byte in so many, at the end
GENERATED_WORDS = 60_000


@dataclass(frozen=True)
class Corpus:
    """`home` is trained on, `held_out` of it evaluated; `other` is for a shift of data."""

    home: Bytes
    held_out: Bytes
    other: Bytes
    digest: str


@lru_cache(maxsize=2)
def corpus(name: str) -> Corpus:
    """The corpus called `name`; ValueError names the known ones."""
    if name not in CORPORA:
        raise ValueError(f"unknown corpus {name!r}: known are {', '.join(CORPORA)}")
    text, other = CORPORA[name]()
    split = len(text) - len(text) // HELD_OUT
    digest = hashlib.sha256(text.tobytes() + other.tobytes()).hexdigest()
    return Corpus(text[:split], text[split:], other, digest)


def standard_library() -> tuple[Bytes, Bytes]:
    """The sources of Python's own top-level modules, sorted by name; the other is generated."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return np.frombuffer(sources, np.uint8), generated_text(0)


def documentation() -> tuple[Bytes, Bytes]:
    """Python's own reference manual in English, as in help(); the other is the sources."""
    pages = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(pages.encode(), np.uint8), standard_library()[0]


def generated() -> tuple[Bytes, Bytes]:
    """Two languages from two seeds: the same bytes on every machine."""
    return generated_text(1), generated_text(2)


def generated_text(seed: int) -> Bytes:
    """Text of an artificial language: 300 words, each followed by one of eight, and lines."""
    rng = np.random.default_rng([seed, 20250613])
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)
    popular = 1.0 / np.arange(1, 27)
    words = [
        bytes(rng.choice(letters, size=length, p=popular / popular.sum()))
        for length in rng.integers(2, 9, size=300)
    ]
    followers = rng.integers(len(words), size=(len(words), 8))
    choices = np.minimum(rng.geometric(0.4, size=GENERATED_WORDS) - 1, 7)
    ends = rng.random(GENERATED_WORDS) < 0.1
    parts, word = [], 0
    for choice, end in zip(choices, ends, strict=True):
        word = followers[word, choice]
        parts.append(words[word] + (b".\n" if end else b" "))
    return np.frombuffer(b"".join(parts), np.uint8)


CORPORA: dict[str, Callable[[], tuple[Bytes, Bytes]]] = {
    "standard_library": standard_library,
    "generated": generated,
    "documentation": documentation,
}


def windows(text: Bytes, starts: NDArray[np.integer], length: int) -> Bytes:
    """Stretches of `length` bytes, shape starts.shape + (length,)."""
    return text[starts[..., None] + np.arange(length)]
