"""What one GPU says of itself at one time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One GPU's state; None for whatever this GPU or its driver does not tell.

    Attributes:
        gpu: index, as nvidia-smi counts.
        time: seconds on `time.monotonic`'s clock.
        slowdown_temperature_celsius: above it the GPU slows itself down.
        utilisation_percent: share of the last sample period with a kernel running.
        memory_busy_percent: share of it in which memory was read or written; this
            is traffic, how full the memory is stands in the two fields of bytes.
        throttle_reasons: of ``software_power_cap``, ``software_thermal``,
            ``hardware_thermal``, ``power_brake`` and ``hardware_slowdown``, which
            the driver sets beside the two before it.
        ecc_corrected_errors, ecc_uncorrected_errors: since the driver was loaded.
        remapped_rows, retired_pages: over the GPU's life; a GPU has one or the other.
        row_remap_pending, page_retirement_pending: done at the next reset.
        row_remap_failed: there are no spare rows left where one was needed.
        pcie_replays: packets sent again since the driver was loaded.
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
    throttle_reasons: frozenset[str] | None = None
    ecc_corrected_errors: int | None = None
    ecc_uncorrected_errors: int | None = None
    remapped_rows: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    retired_pages: int | None = None
    page_retirement_pending: bool | None = None
    pcie_replays: int | None = None
