"""Definitions of a hit and of a false alarm: three protocols, each with its question.

Shape suffixes: R runs, T records of one run, X alternatives judged at once
(thresholds, weights); an array without X is one alternative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric._util.strict_json import field, number
from rmetric.evaluation.traces import Trace
from rmetric.records import Run

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: The published cost of a step, for runs whose configuration does not state theirs.
SECONDS_PER_STEP = 5.0


@dataclass(frozen=True, kw_only=True)
class Windows:
    """When each run could be announced, shape (R,).

    Attributes:
        onset: first step under the fault; -inf where unknown: nothing is premature.
        failure: failure step; inf where it did not fail or the step is unknown.
    """

    failed: Bools
    onset: Floats
    failure: Floats
    seconds_per_step: Floats

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Windows:
        """Raises ValueError for a run whose end nobody recorded."""
        truths = []
        for run in runs:
            if run.truth is None:
                raise ValueError(f"run {run.id}: how it ended is unknown, so it cannot be judged")
            truths.append(run.truth)
        return cls(
            failed=np.array([truth.failed for truth in truths], dtype=bool),
            onset=_steps([truth.onset_step for truth in truths], -inf),
            failure=_steps([t.failure_step if t.failed else None for t in truths], inf),
            seconds_per_step=np.array([seconds_per_step(run) for run in runs], dtype=float),
        )


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """When each run was first alarmed, inf for never; shape (X, R) or (R,).

    Attributes:
        first: of all alerts.
        inside: of those from the onset up to, not including, the failure.
    """

    first: Floats
    inside: Floats


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """The verdict on each run; shape (X, R) or (R,).

    Attributes:
        failed: the run failed, shape (R,).
        hit: it failed and was announced.
        false_alarm: it was alarmed for nothing; a failing run can be both.
        lead_steps: failure minus alert of the hits, nan for the others.
        lead_minutes: the same at the run's own cost of a step.
    """

    failed: Bools
    hit: Bools
    false_alarm: Bools
    lead_steps: Floats
    lead_minutes: Floats

    def select(self, chosen_R: NDArray[Any]) -> Outcomes:
        """The same verdicts on some of the runs (a mask or indices)."""
        return Outcomes(
            **{name: getattr(self, name)[..., chosen_R] for name in self.__dataclass_fields__}
        )


#: hit, false alarm, and the alert that the lead is counted from
Verdict = tuple[Bools, Bools, Floats]


def published(windows: Windows, alerts: Alerts) -> Verdict:
    """Any alert, at any step, announces a run that failed."""
    alarmed = alerts.first < inf
    return windows.failed & alarmed, ~windows.failed & alarmed, alerts.first


def causal(windows: Windows, alerts: Alerts) -> Verdict:
    """The first alert decides: before the onset it is a false alarm and the run is missed."""
    inside = (windows.onset <= alerts.first) & (alerts.first < windows.failure)
    return windows.failed & inside, _for_nothing(windows, alerts), alerts.first


def causal_unlatched(windows: Windows, alerts: Alerts) -> Verdict:
    """A premature alert is a false alarm, and a later one in time is still a hit."""
    return windows.failed & (alerts.inside < inf), _for_nothing(windows, alerts), alerts.inside


def _for_nothing(windows: Windows, alerts: Alerts) -> Bools:
    premature = alerts.first < windows.onset
    return (alerts.first < inf) & (~windows.failed | premature)


@dataclass(frozen=True)
class Protocol:
    """One way to score, and the question that it answers."""

    title: str
    question: str
    verdict: Callable[[Windows, Alerts], Verdict]


PROTOCOLS: dict[str, Protocol] = {
    "published": Protocol("published",
        "did a run that failed ever alarm, at any step, before its fault included?", published),
    "causal": Protocol("causal",
        "did the first alert fall after the fault and before the failure?", causal),
    "causal_unlatched": Protocol("causal, any alert",
        "did some alert fall after the fault and before the failure?", causal_unlatched),
}  # fmt: skip


def judge(runs: Sequence[Run], traces: Sequence[Trace], protocol: str) -> Outcomes:
    """The verdict on each run, shape (R,), from the traces of one detector in their order.

    Raises ValueError where a run has no truth, or the protocol (see `PROTOCOLS`) is unknown.
    """
    windows = Windows.of(runs)
    return judge_alerts(windows, alerts_of(windows, traces), protocol)


def judge_alerts(windows: Windows, alerts: Alerts, protocol: str) -> Outcomes:
    """The verdicts for alternatives judged at once."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}: known are {', '.join(PROTOCOLS)}")
    hit, false_alarm, alert = PROTOCOLS[protocol].verdict(windows, alerts)
    known = hit & np.isfinite(windows.failure)
    lead = np.full(hit.shape, np.nan)
    np.subtract(windows.failure, alert, out=lead, where=known)
    return Outcomes(
        failed=windows.failed,
        hit=hit,
        false_alarm=false_alarm,
        lead_steps=lead,
        lead_minutes=lead * windows.seconds_per_step / 60,
    )


def alerts_of(windows: Windows, traces: Sequence[Trace]) -> Alerts:
    """The first alerts of one detector, shape (R,)."""
    alerts = first_alerts(windows, [t.steps for t in traces], (t.alarms[:, None] for t in traces))
    return Alerts(first=alerts.first.ravel(), inside=alerts.inside.ravel())


def first_alerts(
    windows: Windows, steps: Sequence[NDArray[np.int64]], alarms_TX: Iterable[Bools]
) -> Alerts:
    """The first alerts of X alternatives, shape (X, R), from their alarms run by run."""
    first, inside = [], []
    for run, (steps_T, alarms) in enumerate(zip(steps, alarms_TX, strict=True)):
        within = (windows.onset[run] <= steps_T) & (steps_T < windows.failure[run])
        first.append(_first(steps_T, alarms))
        inside.append(_first(steps_T[within], alarms[within]))
    return Alerts(first=np.array(first).T, inside=np.array(inside).T)


def _first(steps_T: NDArray[np.int64], alarms_TX: Bools) -> Floats:
    if len(steps_T) == 0:
        return np.full(alarms_TX.shape[1], inf)
    return np.where(alarms_TX.any(axis=0), steps_T[alarms_TX.argmax(axis=0)], inf)


def seconds_per_step(run: Run) -> float:
    """Seconds a step of the run, from its configuration, or the published 5 s."""
    stated = field(run.config, "seconds_per_step", number)
    return SECONDS_PER_STEP if stated is None else stated


def _steps(steps: Sequence[int | None], unknown: float) -> Floats:
    return np.array([unknown if step is None else step for step in steps], dtype=float)
