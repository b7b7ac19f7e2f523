"""What a log shows of memory and of waiting for data, in words beside the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rmetric.detectors.memory_slope import InputWait, MemorySlope
from rmetric.records import Record


def resource_words(records: Sequence[Record]) -> list[str]:
    """Memory that runs out and an input that is too slow; empty for neither."""
    memory, wait = MemorySlope(), InputWait()
    for record in records:
        memory.update(record)
        wait.update(record)
    return [words for words in (memory.reason, wait.words) if words]
