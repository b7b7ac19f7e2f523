"""From a GPU's successive readings to events: what rose, and what began."""

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
    """The counters of one GPU, each as it was when it was last told.

    >>> counters = Counters()
    >>> [counters.rise(Reading(gpu=0, time=0.0, pcie_replays=n), "pcie_replays") for n in (7, 9, 0)]
    [0, 2, 0]
    """

    def __init__(self) -> None:
        self.told: dict[str, int] = {}

    def rise(self, reading: Reading, counter: str) -> int:
        """By how much a counter rose since it was last told; a fall is a new level, and none."""
        now: int | None = getattr(reading, counter)
        if now is None:
            return 0
        before, self.told[counter] = self.told.get(counter, now), now
        return max(0, now - before)


class Changes:
    """What is new about one GPU: `update(reading)` returns the kinds of its events.

    A counter that rose is one event a reading, however far it rose; one that fell
    (the driver was loaded again) is the new level. A state is an event when it
    begins. The first reading is what there was before, and gives no event.

    An incident lasts until `quiet` seconds have passed without it: a state that
    flickers, or an Xid that is told again for every channel torn down, counts once.
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
        """The GPU does not answer, which is a state like any other."""
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
    """The troubles that hold at a reading.

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
