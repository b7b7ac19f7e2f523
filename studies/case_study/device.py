"""Where a case study trains: what the device is and how much memory is free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from studies.case_study.settings import CaseStudyError

GIB = 2**30
#: Of a container whose memory is limited, which the system's own count does not know.
CONTAINER = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or the processor.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        name: as the driver states it.
        free, total: memory in bytes, at the time of asking.
        has_bfloat16: whether its arithmetic knows bfloat16.
        capability: of a GPU, as the vendor counts; empty for the processor.
    """

    kind: str
    name: str
    free: int
    total: int
    has_bfloat16: bool
    capability: str = ""

    @property
    def slug(self) -> str:
        """The name as part of a folder's: ``t4``, ``l4``, ``a100-sxm4-80gb``, ``cpu``."""
        if self.kind == "cpu":
            return "cpu"
        plain = re.sub(r"(?i)nvidia|tesla|geforce", "", self.name)
        return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "gpu"

    def __str__(self) -> str:
        capability = f", compute capability {self.capability}" if self.capability else ""
        return f"{self.name}, {self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free{capability}"


def find_device(kind: str = "auto") -> Device:
    """The device to train on: a GPU where there is one, unless `kind` says which.

    Raises CaseStudyError where CUDA is asked for and torch cannot use it.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return _processor()
    if not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        raise CaseStudyError(
            f"--device cuda: torch {torch.__version__} (built for {built}) finds no usable GPU; "
            "--device cpu trains on the processor, --tiny a small model there"
        )
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return Device(
        kind="cuda",
        name=properties.name,
        free=free,
        total=total,
        # is_bf16_supported() is also True where bfloat16 is only emulated, as on a T4.
        has_bfloat16=properties.major >= 8,
        capability=f"{properties.major}.{properties.minor}",
    )


def _processor() -> Device:
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    limit = _container_limit()
    if limit is not None:
        free, total = min(free, limit[0]), min(total, limit[1])
    return Device(kind="cpu", name="CPU", free=free, total=total, has_bfloat16=False)


def _container_limit() -> tuple[int, int] | None:
    """(free, total) of the container that this runs in; None where nothing is limited."""
    try:
        most, used = (int(path.read_text()) for path in CONTAINER)
    except (OSError, ValueError):
        return None
    return max(0, most - used), most
