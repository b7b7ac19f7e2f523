"""A dictionary of bounded size that keeps recently used items."""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")

#: Entries of one generation; there are two.
ENTRIES = 16384
#: Longer keys are not remembered.
LONGEST_KEY = 2048
#: Nor are lines that have fewer bytes without their digits: "1" and an empty line are not alike.
SHORTEST_FORM = 8


class RecentCache(Generic[Value]):
    """The values of bytes, of which the long unused are forgotten.

    When the young are too many they become the old, and the old are forgotten but for those
    that were asked for again.

    Attributes:
        young: look here first, directly: it stays the same object.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self.young: dict[bytes, Value] = {}
        self._old: dict[bytes, Value] = {}
        self._entries = entries

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def get(self, key: bytes) -> Value | None:
        value = self.young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: bytes, value: Value) -> None:
        if len(key) > LONGEST_KEY:
            return
        if len(self.young) >= self._entries:
            self._old = self.young.copy()
            self.young.clear()
        self.young[key] = value
