"""State of one GPU at one time, and signs between readings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from rmetric._util.strict_json import encode, field, flag, items, number, text, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """State of one GPU; a value that GPU or driver do not report is None, never 0.

    Attributes:
        gpu: index, as nvidia-smi counts.
        time: seconds; on `time.monotonic`'s clock from `NvmlEvents`, since the epoch in
            what is written.
        slowdown_temperature_celsius: above it the GPU slows itself down.
        utilisation_percent: share of the last sample period with a kernel running.
        memory_busy_percent: share of it in which memory was read or written; this
            is traffic, how full the memory is stands in the two fields of bytes.
        sm_clock_mhz, memory_clock_mhz: at present; sm_clock_max_mhz and
            memory_clock_max_mhz the most that this GPU can do.
        throttle_reasons: of ``software_power_cap``, ``software_thermal``,
            ``hardware_thermal``, ``power_brake`` and ``hardware_slowdown``, which
            the driver sets beside the two before it.
        ecc_corrected_errors, ecc_uncorrected_errors: since the driver was loaded.
        ecc_corrected_errors_lifetime, ecc_uncorrected_errors_lifetime: over the GPU's life.
        remapped_rows_correctable, remapped_rows_uncorrectable: rows of memory replaced
            for errors of either kind, over the GPU's life.
        retired_pages: likewise; a GPU has remapped rows or retired pages.
        row_remap_pending, page_retirement_pending: done at the next reset.
        row_remap_failed: there are no spare rows left where one was needed.
        pcie_replays: packets sent again since the driver was loaded.
        nvlink_replays, nvlink_recoveries, nvlink_crc_errors: likewise, over all links:
            packets sent again, links trained again, packets that arrived damaged.
        recovery_action: the driver's recommendation, of `RECOVERY_ACTIONS` or ``unknown_N``
            for a newer number N; reported by drivers from about 570.
    """

    gpu: int
    time: float
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

    def as_json(self) -> dict[str, Any]:
        """JSON object; missing values are absent."""
        values = asdict(self)
        if self.throttle_reasons is not None:
            values["throttle_reasons"] = sorted(self.throttle_reasons)
        return {name: encode(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Reading:
        """Inverse of `as_json`; unknown keys are ignored.

        Raises ValueError, naming the key, for an invalid value.
        """
        values = {
            name: value
            for name, read in _READERS.items()
            if (value := field(entry, name, read)) is not None
        }
        missing = {"gpu", "time"} - set(values)
        if missing:
            raise ValueError(f"{min(missing)!r} is missing: a reading has gpu and time")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSign:
    """An event of one GPU between two readings, or a failure to read it.

    Attributes:
        gpu, time: as of a `Reading`.
        kind: an Xid's (`xid.xid_kind`), ``gpu_lost``, ``gpu_reset_required``, or
            ``driver_loaded`` where the driver was gone and is there again.
    """

    gpu: int
    time: float
    kind: str


#: By NVML's number for it.
RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)


def _words(value: Any) -> frozenset[str]:
    return frozenset(text(word) for word in items(value))


_BY_TYPE: dict[str, Callable[[Any], Any]] = {
    "int": whole_number,
    "float": number,
    "bool": flag,
    "str": text,
    "frozenset[str]": _words,
}
_READERS = {
    attribute.name: _BY_TYPE[str(attribute.type).removesuffix(" | None")]
    for attribute in fields(Reading)
}
