"""Data of the toy training: gzipped text shards, one per rank, and their index."""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import torch

VOCABULARY = 64
WIDTH = 16
BATCH = 4
#: A shard is read anew after so many batches.
PER_PASS = 6


def write_shards(folder: Path, world: int, seed: int) -> None:
    """`shard_00000.txt.gz` ..., and index.json with the checksum and size of each."""
    rng = np.random.default_rng(seed)
    index = {}
    for rank in range(world):
        tokens = rng.integers(0, VOCABULARY, size=(BATCH * PER_PASS, WIDTH))
        text = "\n".join(" ".join(map(str, row)) + " | 1.0" for row in tokens)
        packed = gzip.compress(text.encode(), mtime=0)
        (folder / shard_name(rank)).write_bytes(packed)
        index[shard_name(rank)] = {"crc32": zlib.crc32(packed), "records": len(tokens)}
    (folder / "index.json").write_text(json.dumps(index))


def shard_name(rank: int) -> str:
    return f"shard_{rank:05d}.txt.gz"


class Loader:
    """Batches of one rank's shard, over and over.

    Attributes:
        delay: seconds that the storage takes for a batch.
        ready: set while the storage answers.
        buffer_bytes: of the staging buffer through which a shard is read.
    """

    def __init__(self, folder: Path, rank: int, *, checksums: bool) -> None:
        self.path = folder / shard_name(rank)
        self.folder, self.checksums = folder, checksums
        self.delay, self.copies, self.buffer_bytes = 0.0, 1, 1 << 16
        self.ready = threading.Event()
        self.ready.set()
        self.records: list[str] = []
        self.place = 0

    def read(self) -> int:
        """Reads the shard; the number of its records."""
        index = json.loads((self.folder / "index.json").read_text())
        buffer = bytearray(self.buffer_bytes)
        packed = self.path.read_bytes()
        buffer[: len(packed)] = packed
        expected = index[self.path.name]["crc32"]
        if self.checksums and zlib.crc32(packed) != expected:
            raise ValueError(
                f"checksum of {self.path.name} is {zlib.crc32(packed):08x}, "
                f"the index says {expected:08x}"
            )
        self.records = gzip.decompress(packed).decode().splitlines()
        self.place = 0
        parse(self.records[0])
        return len(self.records)

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, shape (batch, WIDTH), and weights, shape (batch,)."""
        self.ready.wait()
        if self.delay:
            time.sleep(self.delay)
        if self.place + BATCH > len(self.records):
            self.read()
        rows = [parse(line) for line in self.records[self.place : self.place + BATCH]]
        self.place += BATCH
        tokens = torch.tensor([row for row, _ in rows]).repeat(self.copies, 1)
        return tokens, torch.tensor([weight for _, weight in rows]).repeat(self.copies)


def parse(line: str) -> tuple[list[int], float]:
    tokens, weight = line.split(" | ")
    return [int(token) for token in tokens.split()], float(weight)
