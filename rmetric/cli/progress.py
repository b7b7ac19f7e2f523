"""Progress of files that take a while to read: on a terminal, late, and gone at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

#: Seconds until progress is first shown, and between two updates.
FIRST, NEXT = 1.5, 0.5


def _bar(**more: Any) -> tqdm[None]:
    from tqdm import tqdm

    # Without a terminal (`disable=None`) nothing is shown.
    return tqdm(unit_scale=True, leave=False, disable=None, delay=FIRST, mininterval=NEXT, **more)


def reading() -> tqdm[None]:
    """A bar of the bytes of text read, whose sum is not known; call its `update` with them."""
    return _bar(desc="reading", bar_format="{desc}: {n_fmt}B of text so far")


class ReplayProgress:
    """Progress of a long log, with the rate and the time left: bytes read, then records judged.

    The bytes are those of the file, compressed or not.
    """

    def __init__(self) -> None:
        self._stage, self._total = "", 0
        self._bar: tqdm[None] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` are done in a stage, ``"bytes"`` or ``"records"``."""
        if (stage, total) != (self._stage, self._total) or (self._bar and done < self._bar.n):
            self.close()
            self._stage, self._total = stage, total
            desc, unit = ("reading", "B") if stage == "bytes" else ("judging", " records")
            self._bar = _bar(desc=desc, unit=unit, total=total)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove what is shown."""
        if self._bar is not None:
            self._bar.close()
        self._stage, self._total, self._bar = "", 0, None
