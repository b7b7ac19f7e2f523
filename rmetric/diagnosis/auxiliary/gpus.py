"""Read what `nvidia-smi --query-gpu=... --format=csv -l N` wrote beside the logs of a job.

A kernel of NCCL that waits for another rank keeps its GPU at 100 % with little power. A GPU that is
idle meanwhile is of the rank that the others wait for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from rmetric.diagnosis.reading.lines import unwrapped
from rmetric.diagnosis.reading.timestamps import parse

if TYPE_CHECKING:
    import pandas as pd

#: Per cent from which a GPU is busy, and up to which it is idle.
BUSY, IDLE = 95.0, 5.0
#: Least share of the GPUs that spin while the others wait for the rest.
MIN_SPINNING_SHARE = 0.6
#: Power of a GPU that spins, as a share of its own while the training made steps.
MAX_POWER_SHARE = 0.6
#: Least number of readings of a GPU before and after the last step.
MIN_READINGS = 3
#: The names of the columns; above them a person may have kept the command.
_HEADER = re.compile(
    r"\A(?:(?:[$#>][^\n]*|\s*)\n){0,5}?"
    r"(?P<names>[^\n=]*\btimestamp\b[^\n=]*\butilization\.gpu\b[^\n=]*\n)"
)
_HOST = re.compile(r"(?i)^(?:host(?:name)?|node(?:name)?)$")
_GPU = re.compile(r"(?i)^(?:index|gpu|gpu_index)$")


class GpuMonitor(NamedTuple):
    """The readings of one file.

    Attributes:
        table: columns "time" (seconds, as `parse` has them), "node" (None where nothing tells
            it), "gpu" (its number on the node), "busy" (per cent) and "power" (watt; NaN where it
            is not recorded).
    """

    name: str
    table: pd.DataFrame


class Spinning(NamedTuple):
    """GPUs that wait in a kernel for others, to the end of a monitor.

    Attributes:
        until: time of the last reading.
        idle: (node, number of the GPU on it) of those that do nothing meanwhile.
        number: of those that spin.
    """

    until: float
    idle: tuple[tuple[str | None, int], ...]
    number: int


def is_monitor(head: bytes) -> bool:
    r"""True for the first bytes of a table of nvidia-smi with times and the GPUs' utilisation.

    >>> is_monitor(b"timestamp, index, utilization.gpu [%], power.draw [W]\n")
    True
    """
    if b"utilization.gpu" not in head:
        return False
    return _HEADER.match(unwrapped(head).decode("utf-8", "replace")) is not None


def read_monitor(text: str, name: str, node: str | None) -> GpuMonitor:
    """Read a table; a row that is cut or states no time is left out.

    Args:
        text: content of the file.
        name: of the file, as it is shown.
        node: of all its GPUs, by the file's name; None where a column tells it, or nothing.
    """
    import pandas as pd

    header = _HEADER.match(text)
    table = text[header.start("names") :] if header else text
    read = pd.read_csv(StringIO(table), skipinitialspace=True, dtype=str, on_bad_lines="skip")
    read.columns = [str(one).partition(" [")[0].strip() for one in read.columns]
    if "timestamp" not in read:
        raise ValueError("a table of nvidia-smi without a column timestamp")

    def numbers(column: str) -> Any:
        found = read[column].str.extract(r"^([\d.]+)")[0] if column in read else np.nan
        return pd.to_numeric(found, errors="coerce")

    hosts = next((read[one] for one in read.columns if _HOST.match(one)), None)
    gpus = next((one for one in read.columns if _GPU.match(one)), None)
    times = [parse(one) if isinstance(one, str) else None for one in read["timestamp"]]
    readings = pd.DataFrame(
        {
            "time": [np.nan if one is None else one[0] for one in times],
            "node": node if hosts is None else hosts.where(hosts.notna(), None),
            "gpu": 0 if gpus is None else pd.to_numeric(read[gpus], errors="coerce"),
            "busy": numbers("utilization.gpu"),
            "power": numbers("power.draw"),
        }
    )
    return GpuMonitor(name, readings.dropna(subset=["time", "gpu", "busy"]))


def spinning(monitors: Sequence[GpuMonitor], last_step: float) -> Spinning | None:
    """The GPUs that spin after the last step; None where most of them do something else.

    Each must have been read before that step too, at more power.
    """
    idle, until, number = list[tuple[str | None, int]](), list[float](), 0
    for one in monitors:
        for key, readings in one.table.groupby(["node", "gpu"], dropna=False):
            node, gpu = cast("tuple[Any, Any]", key)
            before = readings[readings["time"] <= last_step]
            after = readings[readings["time"] > last_step].iloc[1:]  # the next one may average
            if min(len(before), len(after)) < MIN_READINGS:
                continue
            number += 1
            power = after["power"].median() <= MAX_POWER_SHARE * before["power"].median()
            if power and bool((after["busy"] >= BUSY).all()):
                until.append(float(after["time"].max()))
            elif bool((after["busy"] <= IDLE).all()) and before["busy"].median() > IDLE:
                idle.append((node if isinstance(node, str) else None, int(gpu)))
    if not until or len(until) < MIN_SPINNING_SHARE * number:
        return None
    return Spinning(max(until), tuple(idle), len(until))
