"""Print what a report of a problem needs: versions, extras, GPUs and permissions.

Nothing is changed or sent. Paths, host names and environment variables are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rmetric._util import __version__
from rmetric._util.errors import FAILED
from rmetric._util.lazy import EXTRAS
from rmetric._util.printed import printable
from rmetric.telemetry.nvml import NvmlEvents

#: Packages whose versions a report needs, by the names under which they are installed.
PACKAGES = (
    *("numpy", "torch", "nvidia-ml-py", "bitsandbytes", "deepspeed", "torchtitan"),
    *("transformers", "accelerate", "datasets", "peft", "trl", "lightning", "pytorch-lightning"),
    *("llamafactory", "ms-swift", "axolotl"),
)
#: Longest wait for the GPU driver, seconds.
DRIVER_SECONDS = 10.0
EXAMPLES = """examples:
  rmetric doctor
  rmetric doctor --json > doctor.json

exit codes: 0 no problem was found; 1 an installed package cannot be imported, or the GPUs that
torch is built for cannot be used; 2 the command line is wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(options: argparse.Namespace) -> int:
    found = examine()
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return FAILED if found["problems"] else 0


def examine() -> dict[str, Any]:
    """All of the report: sections by name, each a mapping or, of GPUs and problems, a list."""
    problems: list[str] = []
    return {
        "rmetric": {
            "version": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "extras": {extra: _presence(modules.split()) for extra, modules in EXTRAS.items()},
        "torch": _torch(problems),
        "gpus": _gpus(),
        "driver": _driver(),
        "permissions": {
            "kernel log": _readable("/dev/kmsg"),
            "stacks of other processes (py-spy)": _may_trace(),
            "shared memory": _size_of("/dev/shm"),
        },
        "problems": problems,
    }


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _presence(modules: list[str]) -> str:
    missing = [module for module in modules if find_spec(module) is None]
    return f"lacks {', '.join(missing)}" if missing else "complete"


def _torch(problems: list[str]) -> dict[str, Any]:
    """How torch was built and what it can use; empty where it is not installed."""
    if find_spec("torch") is None:
        return {}
    try:
        torch = import_module("torch")
        built_for = torch.version.cuda and f"CUDA {torch.version.cuda}"
        built_for = built_for or (torch.version.hip and f"ROCm {torch.version.hip}")
        gpus, dist = torch.cuda.device_count(), torch.distributed
        backends = [
            name
            for name in ("nccl", "gloo", "mpi")
            if getattr(dist, f"is_{name}_available", bool)()
        ]
        if built_for and not gpus:
            problems.append(f"torch is built for {built_for} and sees no GPU")
        names = ", ".join(sorted({torch.cuda.get_device_name(gpu) for gpu in range(gpus)}))
        nccl = torch.cuda.nccl.version() if "nccl" in backends else ()
    except Exception as error:  # a broken installation may raise anything
        problems.append(f"torch cannot be imported: {type(error).__name__}: {error}")
        return {}
    return {
        "built for": built_for or "CPU",
        "GPUs": f"{gpus} {names}".rstrip(),
        "backends": " ".join(backends),
        **({"NCCL": ".".join(map(str, nccl))} if nccl else {}),
    }


def _gpus() -> list[dict[str, Any]]:
    """The driver's data on each GPU; without a GPU, the reason."""
    with NvmlEvents() as hardware:
        if not hardware.ready(DRIVER_SECONDS):
            return [{"problem": hardware.problem}]
        return [
            {
                "gpu": reading.gpu,
                "GiB": round((reading.memory_total_bytes or 0) / 2**30),
                "not readable": " ".join(name for name, at in vars(reading).items() if at is None),
            }
            for reading in hardware.readings()
        ]


def _driver() -> str:
    with suppress(OSError, IndexError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return "no NVIDIA driver in /proc"


def _readable(path: str) -> str:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return f"no ({error.strerror})"
    return "yes"


def _may_trace() -> str:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return "yes"
    return "yes" if scope == "0" or not os.geteuid() else f"no (ptrace_scope is {scope})"


def _size_of(folder: str) -> str:
    try:
        space = os.statvfs(folder)
    except OSError as error:
        return f"none ({error.strerror})"
    return f"{space.f_blocks * space.f_frsize / 2**30:.1f} GiB"


def as_text(found: dict[str, Any]) -> str:
    """The report as lines of a section, a name and a value."""
    lines = []
    for section, content in found.items():
        for entry in content if isinstance(content, list) else [content]:
            words = entry.items() if isinstance(entry, dict) else [(entry,)]
            lines += [f"{section:12} {' '.join(map(str, pair)).rstrip()}" for pair in words]
    return "\n".join(map(printable, lines))
