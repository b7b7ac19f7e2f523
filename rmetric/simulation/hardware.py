"""Hardware events, stalls and lost workers: what happens beside the mathematics.

Rates come from published fleets (docs/simulator.md). Most failures have no
precursor: of ten failures on 504 B200s two were seen coming (arXiv 2605.09370).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmetric.records import HardwareEvent
from rmetric.simulation.exact import exp, log

#: Corrected errors, retries and throttling that mean nothing, per job (by hand).
BACKGROUND_EVENTS_PER_HOUR = 0.5
BACKGROUND_KINDS = ("ecc_corrected", "thermal_throttle", "link_retry", "xid_application")

#: Interruptions by cause, Llama 3 405B, 54 days on 16,384 H100.
CAUSES = {"gpu": 148, "hbm": 72, "network": 35, "sram": 19, "gsp": 17, "nic": 7, "thermal": 6}
PRECURSORS = {
    "gpu": "xid_contained",
    "hbm": "ecc_corrected",
    "network": "link_retry",
    "sram": "ecc_corrected",
    "gsp": "xid_gsp",
    "nic": "link_flap",
    "thermal": "thermal_throttle",
}
PRECURSOR_SHARE = 0.2  # 2 of 10
PRECURSOR_EVENTS_PER_HOUR = 20.0  # of a node that gives signs (by hand)

STALL_EXPONENT = 1.1  # tail of a slow link's stalls (by hand)
RETRY_SECONDS = 5.0  # a stall this long is reported as a retry (by hand)
TIMEOUT_SECONDS = 600.0  # default time-out of a collective in PyTorch


@dataclass(kw_only=True)
class HardwareHistory:
    """Events, step times and loss of a worker in one run.

    Attributes:
        events: in the order of their times.
        end_seconds: when each step was over, seconds since the start, shape (steps,).
        lost_step: the step in which a worker was lost; None if none was.
    """

    events: list[HardwareEvent]
    end_seconds: NDArray[np.float64]
    lost_step: int | None = None


def simulate_hardware(
    rng: np.random.Generator,
    *,
    num_workers: int,
    total_steps: int,
    seconds_per_step: float,
    process: str | None = None,
    severity: float = 0.0,
    onset_step: int | None = None,
    duration_steps: int = 0,
) -> HardwareHistory:
    """The hardware's side of a run.

    `process` is ``sick_node`` (severity: failures per hour), ``slow_link``
    (severity: delay in ms) or None; it acts from `onset_step` on, counted from 1.
    """
    seconds = np.full(total_steps, seconds_per_step)
    background_rng, fault_rng = rng.spawn(2)
    first = onset_step - 1 if onset_step is not None else total_steps
    acting = slice(first, min(first + duration_steps, total_steps))
    stalls = _stalls(fault_rng, acting, severity) if process == "slow_link" else np.zeros(0)
    seconds[acting][: len(stalls)] += np.minimum(stalls, TIMEOUT_SECONDS)
    end = np.cumsum(seconds)

    history = HardwareHistory(events=[], end_seconds=end)
    _background(background_rng, history, num_workers)
    if process == "slow_link":
        _report_stalls(fault_rng, history, acting.start, stalls, num_workers)
    elif process == "sick_node":
        _sick_node(fault_rng, history, acting, severity, num_workers)
    history.events.sort(key=lambda event: (event.time, event.kind, event.worker))
    return history


def _background(rng: np.random.Generator, history: HardwareHistory, num_workers: int) -> None:
    total = history.end_seconds[-1]
    for _ in range(rng.poisson(BACKGROUND_EVENTS_PER_HOUR * total / 3600.0)):
        kind = BACKGROUND_KINDS[rng.integers(len(BACKGROUND_KINDS))]
        _add(history, rng.random() * total, kind, int(rng.integers(num_workers)))


def _stalls(rng: np.random.Generator, acting: slice, delay_ms: float) -> NDArray[np.float64]:
    """Pareto stalls of the slow link, seconds, one a step; the median is about twice the delay."""
    uniform = 1.0 - rng.random(acting.stop - acting.start)
    return delay_ms / 1000.0 * exp(log(uniform) * (-1.0 / STALL_EXPONENT))


def _report_stalls(
    rng: np.random.Generator,
    history: HardwareHistory,
    first: int,
    stalls: NDArray[np.float64],
    num_workers: int,
) -> None:
    worker = int(rng.integers(num_workers))
    for index in np.flatnonzero(stalls >= RETRY_SECONDS):
        _add(history, history.end_seconds[first + index], "link_retry", worker)
        if stalls[index] >= TIMEOUT_SECONDS:
            history.lost_step = int(first + index + 1)
            return


def _sick_node(
    rng: np.random.Generator,
    history: HardwareHistory,
    acting: slice,
    failures_per_hour: float,
    num_workers: int,
) -> None:
    worker = int(rng.integers(num_workers))
    counts = np.array(list(CAUSES.values()), dtype=float)
    cause = list(CAUSES)[int(rng.choice(len(CAUSES), p=counts / counts.sum()))]
    gives_signs = rng.random() < PRECURSOR_SHARE
    end = history.end_seconds
    begin = end[acting.start - 1] if acting.start else 0.0
    lifetime = rng.exponential(3600.0 / failures_per_hour) if failures_per_hour > 0 else np.inf
    lost_at = begin + lifetime
    last = end[acting.stop - 1]
    if lost_at < last:
        history.lost_step = int(np.searchsorted(end, lost_at)) + 1
    if gives_signs:
        until = min(lost_at, last)
        number = rng.poisson(PRECURSOR_EVENTS_PER_HOUR * (until - begin) / 3600.0)
        for time in rng.uniform(begin, until, number):
            _add(history, time, PRECURSORS[cause], worker)


def _add(history: HardwareHistory, time: float, kind: str, worker: int) -> None:
    history.events.append(HardwareEvent(round(float(time), 3), kind, worker))
