"""Memory that runs out: a level that rises steadily, and the step at which it reaches the end."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from statistics import fmean

from rmetric.detectors.rolling_baseline import Stretches
from rmetric.records import Record

#: Text of an alarm beside the reason.
ADVICE = "look for what keeps tensors or batches (a list of losses, a cache), save before that"
_MEMORY_WORDS = {
    "device": "device memory",
    "host": "host memory",
    "device_percent": "device memory",
    "host_percent": "host memory",
}
#: Stretches for a judgement, and parts of their last half.
_FEWEST, _PARTS = 16, 8
#: Of the mean rise from part to part each has so much; of the rate in the quarter before the last
#: half the last half has so much: caches, pools and peaks rise ever more slowly.
_EACH, _NO_SLOWER = 0.3, 0.8
#: Where the size of the memory is not known, a rise of the last half below this share of the level
#: is none; where it is, an end further away than so many times what was trained: a warm-up.
_RISE_SHARE, _FAR = 0.05, 2.0


class MemorySlope:
    """Alarms where the memory in use rises steadily over at least half of what was trained.

    The lowest value of each stretch is followed (`Stretches`), so evaluations and what waits for a
    garbage collection do not count. A saturating level, steps of a caching allocator and a new
    peak are not leaks: the last half must rise in each of its eighths, no slower than before, and
    above all before it.

    Attributes:
        reason: in words; empty without an alarm.
        since: first step of the rise; 0 without an alarm.
        end_step: at which the memory ends at that rate; None where its size is not known.
    """

    def __init__(self) -> None:
        self._floors = {name: Stretches(min) for name in _MEMORY_WORDS}
        self._reset()

    def _reset(self) -> None:
        self.reason, self.since = "", 0
        self.end_step: int | None = None

    def update(self, record: Record) -> None:
        """Take the next record; one without memory changes nothing."""
        memory, complete = record.memory, False
        if not memory:
            return
        for name in _MEMORY_WORDS:
            if (value := memory.get(name)) is not None and isfinite(value):
                complete = self._floors[name].add(record.step, value) or complete
        if not complete:
            return
        self._reset()
        for name in _MEMORY_WORDS:
            limit = 100.0 if name.endswith("percent") else memory.get(f"{name}_limit")
            if not self.reason and name in memory:
                self._judge(name, record.step, memory[name], limit)

    def _judge(self, name: str, step: int, level: float, limit: float | None) -> None:
        floors = self._floors[name]
        number = len(floors.levels)
        if number < _FEWEST or floors.begins[0] >= floors.begins[-1]:
            return
        half, length = number // 2, number // 2 // _PARTS
        begin = number - _PARTS * length
        parts = [fmean(floors.levels[i : i + length]) for i in range(begin, number, length)]
        rises = [after - before for before, after in pairwise(parts)]
        steps = (floors.begins[-1] - floors.begins[begin]) / (_PARTS * length - 1)
        rate = fmean(rises) / length / steps
        earlier = floors.levels[number // 4 : half]
        middle = len(earlier) // 2
        rise = fmean(earlier[-middle:]) - fmean(earlier[:middle])
        before = rise / (len(earlier) - middle) / steps
        steady = rate > 0 and min(rises) >= _EACH * fmean(rises) and rate >= _NO_SLOWER * before
        if not steady or parts[-1] <= max(floors.levels[:begin]):
            return
        if limit is None:
            if parts[-1] - parts[0] < _RISE_SHARE * parts[-1]:
                return
        else:
            end_step = step + round(max(0.0, limit - level) / rate)
            if end_step - step > _FAR * (step - floors.begins[0]):
                return
            self.end_step = end_step
        unit, factor = ("points", 1.0) if name.endswith("percent") else ("GB", 1e9)
        self.since = floors.begins[begin]
        self.reason = (
            f"{_MEMORY_WORDS[name]} rises by {1000 * rate / factor:.3g} {unit} in 1,000 steps "
            f"since step {self.since:,}"
        )
        if self.end_step is not None:
            self.reason += f", it ends about step {self.end_step:,}"
