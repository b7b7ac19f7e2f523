"""NVML's calls, with its return codes turned into what they mean for a watcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rmetric.telemetry.reading import RECOVERY_ACTIONS, Reading

#: Return codes after which NVML must be opened again.
CLOSED = {
    1: "NVML is no longer open: the driver went away, or another part of this program closed it",
    9: "the NVIDIA driver is not loaded",
    12: "NVML is not on this machine: there is no NVIDIA driver, or this container does not see it",
    18: "the NVIDIA driver was changed under this process: its library and kernel module differ",
}
#: Those of them that mean that the driver itself is away.
DRIVER_AWAY = (9, 12, 18)
#: Return codes by which a GPU is gone, as kinds of events.
GPU_GONE_ERRORS = {15: "gpu_lost", 16: "gpu_reset_required", 28: "gpu_lost"}

#: Numbers of NVML's fields, from its header: 91, 230, and one field a counter of NVLink.
#: Older GPUs report sums over their links, later ones each link for itself.
LINK_COUNT, RECOVERY_ACTION = 91, 230
NVLINK_SUMS = {"nvlink_replays": (52,), "nvlink_recoveries": (59,), "nvlink_crc_errors": (38, 45)}
NVLINK_OF_A_LINK = {"nvlink_replays": 161, "nvlink_recoveries": 162, "nvlink_crc_errors": 163}
#: The member of a field's union that holds its value, by NVML's number of the type.
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

#: Field of a reading -> the function nvmlDeviceGet... that gives it, and its arguments.
CALLS: dict[str, tuple[Any, ...]] = {
    "temperature_celsius": ("Temperature", 0),
    "slowdown_temperature_celsius": ("TemperatureThreshold", 1),
    "power_watts": ("PowerUsage",),
    "power_limit_watts": ("EnforcedPowerLimit",),
    "sm_clock_mhz": ("ClockInfo", 1),
    "sm_clock_max_mhz": ("MaxClockInfo", 1),
    "memory_clock_mhz": ("ClockInfo", 2),
    "memory_clock_max_mhz": ("MaxClockInfo", 2),
    "pcie_replays": ("PcieReplayCounter",),
    "ecc_corrected_errors": ("TotalEccErrors", 0, 0),
    "ecc_uncorrected_errors": ("TotalEccErrors", 1, 0),
    "ecc_corrected_errors_lifetime": ("TotalEccErrors", 0, 1),
    "ecc_uncorrected_errors_lifetime": ("TotalEccErrors", 1, 1),
}
THROTTLE_BITS = {
    0x04: "software_power_cap",
    0x08: "hardware_slowdown",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}


class NvmlClosed(Exception):
    """NVML cannot be used and must be opened again; the message gives the reason.

    `driver_away` is True where the driver itself is gone, and not only this connection.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.driver_away = code in DRIVER_AWAY


class GpuGone(Exception):
    """One GPU does not respond; `kind` is the kind of the event."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class NvmlLibrary:
    """NVML, opened by the module pynvml. Any call may raise NvmlClosed."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[int, Any] = {}
        self._link_fields: dict[int, list[tuple[str, Any]]] = {}
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise NvmlClosed(CLOSED.get(error.value, f"NVML: {error}"), error.value) from None
        self._event_set = self._ask(nvml.nvmlEventSetCreate)

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            if self._event_set is not None:
                self._nvml.nvmlEventSetFree(self._event_set)
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def count(self) -> int:
        """Number of GPUs; also detects an unloaded driver."""
        return self._ask(self._nvml.nvmlDeviceGetCount) or 0

    def find(self, devices: Sequence[int | str] | None) -> list[int]:
        """Indices of GPUs given by index or UUID; None for those visible to CUDA."""
        count = self.count()
        if count == 0:
            raise NvmlClosed("the NVIDIA driver lists no GPU")
        requested = _visible_to_cuda() if devices is None else devices
        if requested is None:
            return list(range(count))
        found = [gpu for device in requested for gpu in range(count) if self._is(gpu, device)]
        if len(found) != len(requested) or not found:
            listed = f"the driver lists {count}, from 0"
            raise NvmlClosed(f"the GPUs asked for are {list(requested)!r}; {listed}")
        return found

    def read(self, gpu: int, time: float) -> Reading:
        """Read one GPU. Raises GpuGone if it does not respond."""
        nvml = self._nvml
        try:
            return self._reading(gpu, self._handle(gpu), time)
        except nvml.NVMLError as error:
            if error.value in CLOSED:
                raise NvmlClosed(CLOSED[error.value], error.value) from None
            self._handles.pop(gpu, None)
            kind = GPU_GONE_ERRORS.get(error.value, "gpu_lost")
            raise GpuGone(f"GPU {gpu} does not answer: {error}", kind) from None

    def next_xid(self, seconds: float, otherwise: Callable[[float], Any]) -> tuple[int, int] | None:
        """GPU and number of the next Xid; None if none came within `seconds`.

        Where NVML cannot wait for Xids, `otherwise(seconds)` does the waiting.
        """
        nvml = self._nvml
        try:
            if self._event_set is not None:
                event = nvml.nvmlEventSetWait(self._event_set, round(1000 * seconds))
                return nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
        otherwise(seconds)
        return None

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a call; None if GPU, driver or permissions do not provide it."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in CLOSED:
                raise NvmlClosed(CLOSED[error.value], error.value) from None
            if error.value in GPU_GONE_ERRORS:
                raise
            return None

    def _handle(self, gpu: int) -> Any:
        if gpu not in self._handles:
            nvml = self._nvml
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
            if self._event_set is not None:
                xids = nvml.nvmlEventTypeXidCriticalError
                self._ask(nvml.nvmlDeviceRegisterEvents, handle, xids, self._event_set)
            self._handles[gpu] = handle
        return self._handles[gpu]

    def _is(self, gpu: int, device: int | str) -> bool:
        """`device` is the index of this GPU, or the beginning of its UUID."""
        if str(device).lstrip("-").isdigit():
            return int(device) == gpu
        nvml = self._nvml
        with suppress(nvml.NVMLError):
            return str(nvml.nvmlDeviceGetUUID(self._handle(gpu))).startswith(str(device))
        return False

    def _reading(self, gpu: int, handle: Any, time: float) -> Reading:
        nvml, ask = self._nvml, self._ask
        values = {
            name: ask(getattr(nvml, f"nvmlDeviceGet{call}"), handle, *arguments)
            for name, (call, *arguments) in CALLS.items()
        }
        for name in ("power_watts", "power_limit_watts"):  # NVML has milliwatts
            values[name] = None if values[name] is None else values[name] / 1000
        utilisation = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        remaps = ask(nvml.nvmlDeviceGetRemappedRows, handle) or (None,) * 4
        pages = [ask(nvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in (0, 1)]
        pending = ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        bits = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        throttled = frozenset(word for bit, word in THROTTLE_BITS.items() if (bits or 0) & bit)
        return Reading(
            gpu=gpu,
            time=time,
            **values,
            throttle_reasons=None if bits is None else throttled,
            utilisation_percent=utilisation and utilisation.gpu,
            memory_busy_percent=utilisation and utilisation.memory,
            memory_used_bytes=memory and memory.used,
            memory_total_bytes=memory and memory.total,
            remapped_rows_correctable=remaps[0],
            remapped_rows_uncorrectable=remaps[1],
            row_remap_pending=_flag(remaps[2]),
            row_remap_failed=_flag(remaps[3]),
            retired_pages=None if None in pages else len(pages[0]) + len(pages[1]),
            page_retirement_pending=_flag(pending),
            **self._links(gpu, handle),
            recovery_action=_action(self._fields(handle, [RECOVERY_ACTION])[0]),
        )

    def _links(self, gpu: int, handle: Any) -> dict[str, int | None]:
        """NVLink errors over all links, in whichever of two ways this GPU reports them."""
        if gpu not in self._link_fields:
            self._link_fields[gpu] = self._find_link_fields(handle)
        fields = self._link_fields[gpu]
        sums: dict[str, int | None] = dict.fromkeys(NVLINK_OF_A_LINK)
        for (name, _), value in zip(
            fields, self._fields(handle, [n for _, n in fields]), strict=True
        ):
            if value is not None:  # inactive links report none
                sums[name] = (sums[name] or 0) + value
        return sums

    def _find_link_fields(self, handle: Any) -> list[tuple[str, Any]]:
        sums = [(name, number) for name, ids in NVLINK_SUMS.items() for number in ids]
        if any(value is not None for value in self._fields(handle, [n for _, n in sums])):
            return sums
        links = range(self._fields(handle, [LINK_COUNT])[0] or 0)
        of_links = NVLINK_OF_A_LINK.items()
        return [(name, (number, link)) for name, number in of_links for link in links]

    def _fields(self, handle: Any, ids: list[Any]) -> list[Any]:
        """Values of fields, or of (field, link); None for each that is not reported."""
        found = self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, ids) if ids else []
        return [None] * len(ids) if found is None else [_value(field) for field in found]


def _value(field: Any) -> Any:
    if field.nvmlReturn != 0 or not 0 <= field.valueType < len(VALUE_MEMBERS):
        return None
    return getattr(field.value, VALUE_MEMBERS[field.valueType])


def _action(value: int | None) -> str | None:
    if value is None:
        return None
    return RECOVERY_ACTIONS[value] if value < len(RECOVERY_ACTIONS) else f"unknown_{value}"


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _visible_to_cuda() -> list[str] | None:
    """GPUs in CUDA_VISIBLE_DEVICES; None for every GPU, also if it names parts of one."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or "MIG" in named:
        return None
    return [name.strip() for name in named.split(",") if name.strip()]
