"""Is one training as good as another? Runs side by side, at equal steps, beyond their noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite, sqrt
from statistics import fmean, median, stdev
from typing import Literal

import numpy as np

from rmetric.evaluation.loss_course import Floats
from rmetric.evaluation.run_verdict import judge_run
from rmetric.evaluation.traces import trace
from rmetric.evaluation.verdict_words import RunVerdict, levels
from rmetric.records import Run

Kind = Literal["better", "as_good", "worse", "cannot_tell"]

#: The common steps are cut into so many stretches; the last ones are the end.
STRETCHES, END = 20, 2
_FEWEST = 2 * STRETCHES
_FEWEST_EVALUATIONS = 5
#: Quantiles of Student's t, two-sided 95 %, by degrees of freedom; the last for all above.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.13, 2.04, 1.98)
_T_FREEDOM = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 30, 100)


@dataclass(frozen=True)
class Course:
    """One loss of a side, of one or more seeds.

    Attributes:
        steps: middle of each stretch, shape (stretches,).
        means: of each stretch over the seeds, same shape.
        ends: level of each seed at the end.
    """

    steps: Floats
    means: Floats
    ends: tuple[float, ...]

    @property
    def end(self) -> float:
        return fmean(self.ends)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate beside its reference.

    Attributes:
        kind: `better`, `as_good`, `worse` (than the reference, beyond tolerance and noise), or
            `cannot_tell`.
        reasons: of that, in words; the first is the verdict's own.
        loss: name of the judged loss; None if no loss is logged on both sides.
        reference, candidate: its course on either side; None without one.
        difference: candidate minus reference at the end, and its 95 % interval; None without one.
        parted: first step from which the candidate's loss stays away, beyond tolerance and noise;
            None if it does not.
        speeds: ``steps``, ``tokens`` and ``samples`` a second, candidate over reference, of those
            that both sides log.
        memory: the same of the highest device memory, or else host memory, that was logged.
        alarms: how often the calibrated detector's alarm began, of the reference's runs and of the
            candidate's.
        verdicts: of each run of the candidate, by its id.
        over_seeds: the interval is over the seeds of both sides, else over the noise within runs.
    """

    kind: Kind
    reasons: list[str]
    loss: str | None = None
    reference: Course | None = None
    candidate: Course | None = None
    difference: tuple[float, float, float] | None = None
    parted: int | None = None
    speeds: dict[str, float] = field(default_factory=dict)
    memory: float | None = None
    alarms: tuple[int, int] = (0, 0)
    verdicts: dict[str, RunVerdict] = field(default_factory=dict)
    over_seeds: bool = False

    @property
    def text(self) -> str:
        return f"{self.kind.replace('_', ' ').upper()}: {'; '.join(self.reasons)}"


class Side:
    """The runs of one side, one a seed, each judged once however often they are compared."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    @cached_property
    def verdicts(self) -> dict[str, RunVerdict]:
        return {
            run.id: judge_run(run.records, unread=run.unread, findings=run.findings)
            for run in self.runs
        }

    @property
    def bad(self) -> list[str]:
        return [f"{id}: {v.text}" for id, v in self.verdicts.items() if v.severity == "bad"]

    @cached_property
    def alarms(self) -> int:
        return sum(int(trace("calibrated", run).begins.sum()) for run in self.runs)

    @cached_property
    def measures(self) -> dict[str, float]:
        """The usual value of each measure that all runs log."""
        of_runs = [_measures(run) for run in self.runs]
        names = [name for name in of_runs[0] if all(name in measures for measures in of_runs)]
        return {name: median(measures[name] for measures in of_runs) for name in names}


def compare(
    reference: Side | Sequence[Run], candidate: Sequence[Run], tolerance: float = 0.01
) -> Comparison:
    """Judge whether the candidate is as good as the reference.

    Args:
        reference: runs of one side, one a seed; a `Side` where several candidates are compared.
        candidate: those of the other. With two or more on both sides the interval is over seeds
            (Welch); else over the noise within the runs, which is less.
        tolerance: share of the reference's level by which the loss may differ.

    Returns:
        The comparison by the validation loss, where both sides have at least five evaluations,
        else by the training loss, up to the last step that both reached.
    """
    before = reference if isinstance(reference, Side) else Side(reference)
    now = Side(candidate)
    bad = now.bad  # without one nothing hangs on the reference's verdicts
    if bad and len(bad) / len(now.verdicts) <= len(before.bad) / len(before.verdicts):
        bad = []
    ratios = {
        name: value / before.measures[name]
        for name, value in now.measures.items()
        if name in before.measures
    }
    return replace(
        _compared(before.runs, candidate, tolerance, bad),
        memory=ratios.pop("memory", None), speeds=ratios, verdicts=now.verdicts,
        alarms=(before.alarms, now.alarms),
    )  # fmt: skip


def note(found: Mapping[str, Comparison]) -> str:
    """A note on what the intervals leave out; empty if they are over seeds."""
    if all(result.over_seeds or result.difference is None for result in found.values()):
        return ""
    return "With one run a side the interval is of the noise within the runs: seeds differ by more."


def _compared(
    reference: Sequence[Run], candidate: Sequence[Run], tolerance: float, bad: list[str]
) -> Comparison:
    for loss, least in (("validation_loss", _FEWEST_EVALUATIONS), ("training_loss", _FEWEST)):
        if (courses := _courses(reference, candidate, loss, least)) is not None:
            return _judge(loss, *courses, tolerance, bad)
    if bad:
        return Comparison(kind="worse", reasons=bad)
    words = f"no loss has {_FEWEST} common records, or {_FEWEST_EVALUATIONS} evaluations"
    return Comparison(kind="cannot_tell", reasons=[words])


def _courses(
    reference: Sequence[Run], candidate: Sequence[Run], loss: str, least: int
) -> tuple[Course, Course] | None:
    series = [[_series(run, loss) for run in side] for side in (reference, candidate)]
    if any(len(values) < least for side in series for _, values in side):
        return None
    first = max(steps[0] for side in series for steps, _ in side)
    last = min(steps[-1] for side in series for steps, _ in side)
    number = min(STRETCHES, *(len(values) for side in series for _, values in side))
    if last - first < number:
        return None
    edges = np.linspace(first, last, number + 1)
    return _course(series[0], edges), _course(series[1], edges)


def _series(run: Run, loss: str) -> tuple[Floats, Floats]:
    found = {
        record.step: value
        for record in run.records
        if (value := getattr(record, loss)) is not None and isfinite(value)
    }
    steps = sorted(found)
    return np.array(steps, float), np.array([found[step] for step in steps])


def _course(side: Sequence[tuple[Floats, Floats]], edges: Floats) -> Course:
    """Means of stretches; one without a value of its own gets what lies between its neighbours'."""
    middles = (edges[:-1] + edges[1:]) / 2
    by_seed = []
    for steps, values in side:
        place = np.clip(np.searchsorted(edges, steps, "right") - 1, 0, len(middles) - 1)
        inside = (steps >= edges[0]) & (steps <= edges[-1])
        known = np.bincount(place[inside], minlength=len(middles))
        total = np.bincount(place[inside], values[inside], minlength=len(middles))
        have = known > 0
        by_seed.append(np.interp(middles, middles[have], total[have] / known[have]))
    ends = tuple(float(seed[-END:].mean()) for seed in by_seed)
    return Course(middles, np.mean(by_seed, axis=0), ends)


def _judge(
    loss: str, reference: Course, candidate: Course, tolerance: float, bad: list[str]
) -> Comparison:
    over_seeds = len(reference.ends) > 1 and len(candidate.ends) > 1
    # Neighbours differ by noise and by no smooth course: from second differences, whose variance
    # is 6 times that of white noise; by their median, as where two trainings part one is large.
    seconds = np.abs(np.diff(candidate.means - reference.means, 2))
    noise = float(np.median(seconds)) * 1.4826 / sqrt(6)
    error, freedom = noise / sqrt(END), float(len(reference.means) - 2)
    if over_seeds:
        error, freedom = _welch(reference.ends, candidate.ends)
    difference = candidate.end - reference.end
    quantile = next((t for t, f in zip(_T, _T_FREEDOM, strict=True) if freedom <= f), _T[-1])
    low, high = difference - quantile * error, difference + quantile * error
    allowed = tolerance * abs(reference.end)
    kind: Kind = "cannot_tell"
    if bad or (low > 0 and difference > allowed):
        kind = "worse"
    elif high < 0 and -difference > allowed:
        kind = "better"
    elif high <= allowed:
        kind = "as_good"
    words = (
        f"{levels(loss.replace('_', ' '), reference.end, candidate.end)} at the end, "
        f"{difference:+.3g} [{low:+.3g}, {high:+.3g}]"
    )
    parted = _parted(reference, candidate, max(allowed, 2 * noise))
    reasons = [*bad, words]
    if parted is not None and kind in ("better", "worse"):
        reasons.append(f"they part at step {parted:,}")
    return Comparison(
        kind=kind, reasons=reasons, loss=loss, reference=reference, candidate=candidate,
        difference=(difference, low, high), parted=parted, over_seeds=over_seeds,
    )  # fmt: skip


def _welch(*sides: Sequence[float]) -> tuple[float, float]:
    """Standard error and degrees of freedom of a difference of means."""
    squares = [stdev(ends) ** 2 / len(ends) for ends in sides]
    spread = sum(s**2 / (len(ends) - 1) for s, ends in zip(squares, sides, strict=True))
    return sqrt(sum(squares)), sum(squares) ** 2 / spread if spread else 1.0


def _parted(reference: Course, candidate: Course, least: float) -> int | None:
    apart = candidate.means - reference.means
    far = (np.abs(apart) > least) & (np.sign(apart) == np.sign(apart[-1]))
    if not far[-1]:
        return None
    near = np.flatnonzero(~far)
    first = int(near[-1]) + 1 if len(near) else 0
    return round(float(reference.steps[first]))


def _measures(run: Run) -> dict[str, float]:
    """Logged measures of speed and memory; a measure of 0 is left out."""
    found = {"steps": _speed(run)}
    for name in ("tokens", "samples"):
        logged = [r.throughput[name] for r in run.records if r.throughput and name in r.throughput]
        found[name] = median(logged or [0.0])
    for name in ("device", "host", "device_percent", "host_percent"):
        used = [r.memory[name] for r in run.records if r.memory and name in r.memory]
        if used:
            found["memory"] = max(used)
            break
    return {name: value for name, value in found.items() if value}


def _speed(run: Run) -> float:
    if seconds := [r.step_seconds for r in run.records if r.step_seconds]:
        return 1 / median(seconds)
    timed = [(r.time, r.step) for r in run.records if r.time is not None]
    if len(timed) < 2 or timed[-1][0] <= timed[0][0] or timed[-1][1] <= timed[0][1]:
        return 0.0
    return (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])
