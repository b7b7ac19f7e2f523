"""State of one GPU at one time, signs between readings, and the events that follow from both."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from rmetric._util.strict_json import encode, refused

R = TypeVar("R", bound="JsonRecord")

#: Seconds since the epoch at the end of the year 9999, the greatest accepted time.
LAST_TIME = 253_402_300_799.0
GpuIndex = Annotated[int, msgspec.Meta(ge=0)]
Time = Annotated[float, msgspec.Meta(ge=0.0, le=LAST_TIME)]


class JsonRecord:
    """Base of the records that are written as JSON objects."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """JSON object; fields without a value are absent."""
        return {
            name: encode(sorted(value) if isinstance(value, frozenset) else value)
            for name, value in asdict(self).items()  # type: ignore[call-overload]
            if value is not None
        }

    @classmethod
    def from_json(cls: type[R], entry: dict[str, Any]) -> R:
        """Inverse of `as_json`; unknown keys are ignored, and null is absent.

        Raises ValueError, which names the key and the value found, for an invalid one.
        """
        try:
            known = {name: value for name, value in entry.items() if value is not None}
            return msgspec.convert(_plain(known), cls)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ValueError(refused(entry, error)) from None


def _plain(value: Any) -> Any:
    """Non-finite numbers from their names, and whole numbers as ints."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, str):
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(JsonRecord):
    """State of one GPU; a value that GPU or driver do not report is None, never 0.

    Attributes:
        gpu: index, as nvidia-smi counts.
        time: seconds; on `time.monotonic`'s clock from `NvmlEvents`, since the epoch in
            what is written.
        slowdown_temperature_celsius: above it the GPU slows itself down.
        utilisation_percent: share of the last sample period with a kernel running;
            memory_busy_percent, with traffic in memory, not how full that is.
        sm_clock_mhz, memory_clock_mhz: at present; with max, the most that this GPU can do.
        throttle_reasons: of ``software_power_cap``, ``software_thermal``,
            ``hardware_thermal``, ``power_brake`` and ``hardware_slowdown``, which
            the driver sets beside the two before it.
        ecc_corrected_errors, ecc_uncorrected_errors, pcie_replays and nvlink_replays (packets sent
            again), nvlink_recoveries (links trained again), nvlink_crc_errors (packets that
            arrived damaged): since the driver was loaded; those of NVLink over all links. Remapped
            rows or retired pages, of which a GPU has one, and lifetime errors: of the GPU's life.
        row_remap_pending, page_retirement_pending: done at the next reset.
        row_remap_failed: there are no spare rows left where one was needed.
        recovery_action: the driver's recommendation, of `RECOVERY_ACTIONS` or ``unknown_N``
            for a newer number N; reported by drivers from about 570.
    """

    gpu: GpuIndex
    time: Time
    temperature_celsius: float | None = None
    slowdown_temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilisation_percent: float | None = None
    memory_busy_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    throttle_reasons: frozenset[str] | None = None
    ecc_corrected_errors: int | None = None
    ecc_uncorrected_errors: int | None = None
    ecc_corrected_errors_lifetime: int | None = None
    ecc_uncorrected_errors_lifetime: int | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    retired_pages: int | None = None
    page_retirement_pending: bool | None = None
    pcie_replays: int | None = None
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    nvlink_crc_errors: int | None = None
    recovery_action: str | None = None

    @property
    def memory_occupancy(self) -> float | None:
        """Share of the memory in use, 0 to 1."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return self.memory_used_bytes / self.memory_total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSign(JsonRecord):
    """An event of one GPU between two readings, or a failure to read it.

    Attributes:
        gpu, time: as of a `Reading`.
        kind: an Xid's (`xid.xid_kind`), ``gpu_lost``, ``gpu_reset_required``, or
            ``driver_loaded`` where the driver was gone and is there again.
    """

    gpu: GpuIndex
    time: Time
    kind: str


#: By NVML's number for it.
RECOVERY_ACTIONS = ("none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset",
                    "recover_imex_domain", "bus_reset", "system_reboot")  # fmt: skip

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

    A counter that rose is one event a reading; one that fell (the driver was loaded again) is the
    new level. A state is an event when it begins. The first reading gives no event.

    An incident lasts until `quiet` seconds have passed without it: a state that
    flickers, or an Xid that is repeated for every channel torn down, counts once.
    Its weakness: one fault that shows in two places (an Xid and a counter) is two.

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
        """The GPU does not respond: a state like any other."""
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

    A software power cap does not count: it is normal for a GPU under load.
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
