"""Worth of rescue: GPU-days lost to failures of the training itself, with and without it.

Loss spikes, divergences and silent corruption, which the simulated jobs do not have. Outcomes
come from the tables of `python -m studies.fault_lab.rescue --report`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from rmetric.evaluation import Estimate
from studies.common.csv_rows import read_dicts
from studies.common.table import Cell, Table
from studies.fleet import published
from studies.fleet.closed_form import gpu_days_lost, lost_by_hand, lost_with_rescue
from studies.fleet.cost import SAVES, a_job

RESULTS = Path(__file__).resolve().parents[1] / "fault_lab" / "results"
POLICY, AT_NAN = "Rescue", "Restart at NaN, checkpoint every 50 steps"
NUM_GPUS = 2048
DIVERGENCE_RATES = (0.01, 0.1, 1.0)
NOTICED = {"10 min": 600.0, "1 h": 3600.0, "8 h": 28_800.0}
HOURLY, RESTART, FAST_RESTART = 3600.0, 600.0, 60.0
STEP_SECONDS = 10.0
#: Mean duration of a fault in the laboratory, and mean steps from onset to end of its runs.
FAULT_STEPS, RUN_STEPS = 100, 220


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Measured outcomes of rescue, by default of one that does nothing.

    Attributes:
        averted, held: shares of the failing runs.
        at_nan: share of the failing runs that a restart at NaN averts.
        extra: steps tried again in a failing run, over those of its fault.
        false_runs: benign changes and absorbed faults to a failing run.
        false_extra: share of their steps that is tried again.
        false_held: share of them that is held or lost.
        ends: averted and held, at the lower and upper ends of their intervals.
    """

    averted: float = 0.0
    held: float = 0.0
    at_nan: float = 0.0
    extra: float = 0.0
    false_runs: float = 0.0
    false_extra: float = 0.0
    false_held: float = 0.0
    ends: tuple[tuple[float, float], ...] = ()


def outcomes() -> Outcomes:
    """Read the tables of the rescue study; raises OSError, or ValueError for a missing number."""
    shares, harm = RESULTS / "rescue.csv", RESULTS / "rescue_harm.csv"
    averted, good = (
        [_number(shares, POLICY, f"{name}, share{end}") for end in ("", " low", " high")]
        for name in ("Averted", "Averted or held")
    )
    failing = _number(shares, POLICY, "Failing runs")
    others = _number(harm, POLICY, "Benign and absorbed")
    if not failing or not others:
        raise ValueError(f"{RESULTS}: {POLICY!r} has no failing or no other runs; it needs both")
    return Outcomes(
        averted=averted[0],
        held=good[0] - averted[0],
        at_nan=_number(shares, AT_NAN, "Averted, share"),
        extra=_number(shares, POLICY, "Extra steps over fault's steps"),
        false_runs=others / failing,
        false_extra=_number(harm, POLICY, "Extra steps (%)") / 100,
        false_held=_number(harm, POLICY, "Held or lost") / others,
        ends=tuple((low, high - low) for low, high in zip(averted[1:], good[1:], strict=True)),
    )


def _number(path: Path, policy: str, column: str) -> float:
    rows = [row for row in read_dicts(path) if row.get("Policy") == policy]
    cell = rows[0].get(column) if rows else None
    try:
        value = float(cell or "")
    except ValueError:
        value = float("nan")
    if not (isfinite(value) and value >= 0):
        raise ValueError(
            f"{path}: {column!r} of {policy!r} is {cell!r}: it must be a number of at least 0, as "
            "`python -m studies.fault_lab.rescue --report` writes it"
        )
    return value


class Lost(NamedTuple):
    """GPU-days of 1,000 lost to failures of the training.

    Attributes:
        hourly: saves every hour that block, restarts of 600 s.
        quick: asynchronous saves at Young/Daly's interval, restarts of 60 s.
        rescue: these and rescue.
        false: the part of `rescue` by rescues of runs that do not fail.
    """

    hourly: float
    quick: float
    rescue: float
    false: float


def losses(rate: float, notice: float, found: Outcomes) -> Lost:
    """Losses by `rate` failures in 1,000 GPU-days if someone acts `notice` seconds after onset."""
    slow, saves = SAVES["synchronous"], a_job(NUM_GPUS, "asynchronous").saves
    hourly = lost_by_hand(
        notice=notice, interval=HOURLY, durable=slow.durable_seconds, restart=RESTART
    )
    quick = lost_by_hand(
        notice=notice,
        interval=saves.interval_seconds or 0.0,
        durable=saves.durable_seconds,
        restart=FAST_RESTART,
        at_once=found.at_nan,
    )
    waiting = notice + FAST_RESTART
    tried_again = found.false_extra * RUN_STEPS * STEP_SECONDS
    false = found.false_runs * (tried_again + found.false_held * waiting)
    rescue = lost_with_rescue(
        averted=found.averted,
        held=found.held,
        extra=found.extra * FAULT_STEPS * STEP_SECONDS,
        waiting=waiting,
        unrescued=quick,
        false=false,
    )
    first, second, third = (
        gpu_days_lost(failures_per_1000_gpu_days=rate, num_gpus=NUM_GPUS, lost_seconds=seconds)
        for seconds in (hourly, quick, rescue)
    )
    return Lost(first, second, third, third * false / rescue if rescue else 0.0)


def gain(rate: float, notice: float, found: Outcomes) -> Estimate:
    """GPU-days of 1,000 that rescue saves beside asynchronous saves and fast restarts."""
    saved = []
    for averted, held in ((found.averted, found.held), *found.ends):
        lost = losses(rate, notice, replace(found, averted=averted, held=held))
        saved.append(lost.quick - lost.rescue)
    return Estimate(saved[0], min(saved), max(saved))


def table(found: Outcomes) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for rate in DIVERGENCE_RATES:
        for words, notice in NOTICED.items():
            lost, saved = losses(rate, notice, found), gain(rate, notice, found)
            rows.append((f"{rate:g}", 1000 / (rate * NUM_GPUS), words, *lost, saved))
    return Table(
        "training_failures",
        "GPU-days of 1,000 lost to failures of the training itself, "
        f"{NUM_GPUS:,} GPUs, by closed forms",
        "Failures in 1,000 GPU-days | Days between two of the job:1 | A person acts after | "
        "Saves every hour, restart 600 s | Asynchronous saves, restart 60 s | and rescue | "
        "of it false rescues | Rescue saves",
        rows,
        notes=list(_notes(found)),
        number=8,
        grouped=True,
    )


def _notes(found: Outcomes) -> Iterator[str]:
    rates = "; ".join(
        f"{name} {1000 * count / days:.2g}"
        for name, (count, days) in published.TRAINING_FAILURES.items()
    )
    yield (
        f"Published rates in 1,000 GPU-days (chips for PaLM): {rates}. Only rate times GPUs "
        "matters to first order."
    )
    yield (
        "By hand: all GPUs train on spoiled weights until a person acts, who goes back to the save "
        "before the last one that may be good. The saves' own time is in tables 1 to 7."
    )
    yield (
        f"Measured on small models (studies/fault_lab): averted {found.averted:.2f}, held "
        f"{found.held:.2f}, restart at NaN alone averts {found.at_nan:.2f} of the failing runs; "
        f"steps tried again {found.extra:.2f} of the fault's; {found.false_runs:.1f} benign "
        f"changes and absorbed faults to a failing run, of which {found.false_held:.2f} are held "
        f"or lost and which try {100 * found.false_extra:.1f} % of their steps again. Intervals: "
        "the ends of both shares' together, nothing else varied."
    )
    yield (
        f"Assumed: faults of {FAULT_STEPS} steps of {STEP_SECONDS:g} s; the laboratory's mixture "
        "of faults and benign changes; a held run waits as long for a person as an unnoticed "
        "failure, though an alarm is sent. Snapshots are not counted: 0.1 % of a step's time is 1 "
        "GPU-day of 1,000."
    )
