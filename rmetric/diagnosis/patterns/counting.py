"""Recognise new steps among lines of one form."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counting:
    """The steps that one form tells."""

    top: int = -1
    highest: int = -1
    rises: int = 0
    below: list[int] = field(default_factory=list)

    def take(self, step: int) -> bool:
        """Return True for a new step: above the last, or a restarted count.

        Ranks that share a log tell a step many times, and the last of them when the first is
        at the next; so a lower one is new only when it is the third in a row that rises.
        """
        if step > self.highest:
            self.highest = step
            self.rises += 1
        if step <= self.top and not self._anew(step):
            return False
        self.top = step
        self.below.clear()
        return True

    def _anew(self, step: int) -> bool:
        if step == self.top or (self.below and step < self.below[-1]):
            self.below = []
        if step < self.top and (not self.below or step > self.below[-1]):
            self.below.append(step)
        return len(self.below) >= 3
