"""Events from successive readings of a GPU: risen counters and new states."""

from __future__ import annotations

from rmetric.telemetry.reading import Reading

#: Counters of a reading, and the kind of event that a rise of each is.
RISES = {
    "ecc_corrected_errors": "ecc_corrected",
    "ecc_uncorrected_errors": "ecc_uncorrected",
    "remapped_rows_correctable": "row_remapped",
    "remapped_rows_uncorrectable": "row_remapped",
    "retired_pages": "page_retired",
    "pcie_replays": "pcie_replay",
    "nvlink_replays": "nvlink_error",
    "nvlink_recoveries": "nvlink_error",
    "nvlink_crc_errors": "nvlink_error",
}

#: Flags of a reading, each the kind of event that its beginning is.
FLAGS = ("row_remap_pending", "row_remap_failed", "page_retirement_pending")


class Counters:
    """Last known value of each error counter of one GPU.

    >>> counters = Counters()
    >>> [counters.rise(Reading(gpu=0, time=0.0, pcie_replays=n), "pcie_replays") for n in (7, 9, 0)]
    [0, 2, 0]
    """

    def __init__(self) -> None:
        self.last_values: dict[str, int] = {}

    def rise(self, reading: Reading, counter: str) -> int:
        """Increase of a counter since its last value; 0 after a decrease, which is a reset."""
        now: int | None = getattr(reading, counter)
        if now is None:
            return 0
        before, self.last_values[counter] = self.last_values.get(counter, now), now
        return max(0, now - before)


class Changes:
    """Detects events of one GPU: `update(reading)` returns their kinds.

    A counter that rose is one event a reading, however far it rose; one that fell
    (the driver was loaded again) is the new level. A state is an event when it
    begins. The first reading is what there was before, and gives no event.

    An incident lasts until `quiet` seconds have passed without it: a state that
    flickers, or an Xid that is repeated for every channel torn down, counts once.
    Its weakness: one fault that shows in two places (an Xid and a counter) is two.

    Args:
        quiet: seconds, at least 0.

    >>> changes = Changes(quiet=60.0)
    >>> changes.update(Reading(gpu=0, time=0.0, ecc_corrected_errors=7))
    []
    >>> changes.update(Reading(gpu=0, time=10.0, ecc_corrected_errors=9))
    ['ecc_corrected']
    >>> changes.begins("xid_79", 12.0), changes.begins("xid_79", 13.0)
    (True, False)
    """

    def __init__(self, quiet: float) -> None:
        self.quiet = quiet
        self._counters = Counters()
        self._states: set[str] | None = None
        self._last_seen: dict[str, float] = {}

    def update(self, reading: Reading) -> list[str]:
        """Take the next reading, in the order of their times."""
        rises = [kind for counter, kind in RISES.items() if self._counters.rise(reading, counter)]
        return list(dict.fromkeys(rises)) + self._entered(states(reading), reading.time)

    def gone(self, kind: str, time: float) -> list[str]:
        """Record that the GPU does not respond, a state like any other."""
        return self._entered({kind}, time)

    def begins(self, kind: str, time: float) -> bool:
        """Note that `kind` was seen; whether this is the beginning of an incident."""
        last, self._last_seen[kind] = self._last_seen.get(kind), time
        return last is None or time - last > self.quiet

    def _entered(self, now: set[str], time: float) -> list[str]:
        before, self._states = self._states, now
        fresh = [kind for kind in sorted(now) if self.begins(kind, time)]
        return [] if before is None else [kind for kind in fresh if kind not in before]


def states(reading: Reading) -> set[str]:
    """Kinds of the states that a reading shows.

    A software power cap is none: it is how a GPU under load spends its days.
    """
    found = {flag for flag in FLAGS if getattr(reading, flag)}
    reasons = reading.throttle_reasons or frozenset()
    if reasons & {"software_thermal", "hardware_thermal"}:
        found.add("thermal_throttle")
    if "power_brake" in reasons:
        found.add("power_brake")
    if "hardware_slowdown" in reasons and not reasons & {"hardware_thermal", "power_brake"}:
        found.add("hardware_slowdown")
    temperature, limit = reading.temperature_celsius, reading.slowdown_temperature_celsius
    if temperature is not None and limit is not None and temperature > limit:
        found.add("over_temperature")
    return found
