"""Traces of detectors with the reasons of their alarms: the input of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import nan

import numpy as np

from rmetric.detectors import DETECTORS, make_detector
from rmetric.detectors.calibrated import Thresholds
from rmetric.detectors.log_end import WithLogEnd
from rmetric.evaluation import Trace
from rmetric.evaluation.traces import SEED, generator_for
from rmetric.metric import reason_for
from rmetric.records import Run
from rmetric.replay.scored_run import ScoredRun
from rmetric.reporting.page.series import Floats

#: Name of the trace of R as a log states it.
STATED = "stated"
SYMBOLS = {"failure_rate": "λ", "gradient_variance": "σ²", "loss_drift": "ΔL"}
#: Records between two calls of `on_records`.
REPORTED_EVERY = 4096


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """The record at which a detector began to alarm, or judged its alarm anew.

    Attributes:
        position: of the record in the run.
        verdict: the detector's own, such as ``recovering spike``; empty where it has none.
        until: position of the record at which it ended or was judged anew; None where it lasts.
        ended: why it ended, where it did and the detector states that.
    """

    position: int
    step: int
    reason: str
    verdict: str = ""
    until: int | None = None
    ended: str = ""


@dataclass(frozen=True, kw_only=True)
class DetectorTrace(Trace):
    """One detector on one run, with a row for each record, and the words of its alarms.

    Attributes:
        title: for people.
        threshold: of the score; None where the detector states none.
        began: each time that it began to alarm, with its reason.
        evidence: label -> how unusual, in units of its threshold, shape (T,).
        contributions: of λ, σ² and ΔL to a calibrated R, by their names, shape (T,).
    """

    title: str
    threshold: float | None
    began: list[Alarm]
    evidence: dict[str, Floats] = field(default_factory=dict)
    contributions: dict[str, Floats] = field(default_factory=dict)

    @property
    def alarm_steps(self) -> list[int]:
        """The step at which each alarm began; a change of its verdict does not begin another."""
        return [int(step) for step in self.steps[self.begins]]


def trace_with_reasons(
    name: str,
    run: Run,
    thresholds: Thresholds | None = None,
    on_records: Callable[[int, int], None] | None = None,
) -> DetectorTrace:
    """Show `run` to a fresh detector of `DETECTORS`, and keep its words beside its score.

    It also alarms where losses stay away or nothing is learnt, and at the end, as `rmetric watch`.
    `on_records` is called now and then with the number of records shown, and of all.
    """
    entry = DETECTORS[name]
    made = make_detector(name, generator_for(SEED, name, run.id), thresholds)
    if entry.sees_future:
        made.fit(run)  # type: ignore[attr-defined]
    detector = WithLogEnd(made)
    count = len(run.records)
    scores, alarms = np.full(count, nan), np.zeros(count, dtype=bool)
    evidence: dict[str, Floats] = {}
    contributions: dict[str, Floats] = {}
    began: list[Alarm] = []
    before = (False, "")
    for position, record in enumerate(run.records):
        if on_records is not None and position % REPORTED_EVERY == 0:
            on_records(position, count)
        detector.update(record)
        if position == count - 1:
            detector.finish(run.unread)
        scores[position], alarms[position] = detector.score, detector.alarm
        now = (detector.alarm, detector.verdict)
        if before[0] and now != before:
            ended = "" if now[0] else str(getattr(detector, "ended", ""))
            began[-1] = replace(began[-1], until=position, ended=ended)
        if now[0] and now != before:
            # The verdict has a place of its own on the page.
            reason = detector.reason.removeprefix(f"{now[1]}: ")
            began.append(Alarm(position=position, step=record.step, reason=reason, verdict=now[1]))
        before = now
        _note(evidence, (getattr(detector, "evidence", None) or {}).items(), position, count)
        parts = getattr(detector, "contributions", None)
        _note(contributions, parts._asdict().items() if parts else (), position, count)
    return DetectorTrace(
        detector=name,
        run_id=run.id,
        title=entry.title,
        threshold=1.0 if name == "calibrated" else getattr(detector, "threshold", None),
        steps=np.array([record.step for record in run.records], dtype=np.int64),
        scores=scores,
        alarms=alarms,
        began=began,
        evidence=evidence,
        contributions=contributions,
    )


def _note(
    columns: dict[str, Floats], values: Iterable[tuple[str, float]], position: int, count: int
) -> None:
    for label, value in values:
        if label not in columns:
            columns[label] = np.full(count, nan)
        columns[label][position] = value


def trace_of_r_metric(scored: ScoredRun) -> DetectorTrace:
    """The trace of the R-Metric, which a replay has scored already."""
    return _trace_of(
        scored, "r_metric", "R-Metric, as published", scored.config.threshold,
        scores=[score.score for score in scored.scores],
        alarms=[score.alarm for score in scored.scores],
        reason=lambda i: reason_for(scored.config, *scored.scores[i][1:4]),
    )  # fmt: skip


def trace_of_stated(scored: ScoredRun) -> DetectorTrace | None:
    """The trace of R as the log states it; None where it states none."""
    stated = scored.stated
    if stated is None:
        return None
    return _trace_of(
        scored, STATED, "R as the log states it", stated.threshold,
        scores=[nan if score is None else score for score in stated.scores],
        alarms=stated.alarms,
        reason=lambda i: (
            f"R {stated.scores[i]:.2f} as the log states it, limit {stated.threshold_words}: "
            "compare the other detectors"
        ),
    )  # fmt: skip


def _trace_of(
    scored: ScoredRun, name: str, title: str, threshold: float, *, scores: Sequence[float],
    alarms: Sequence[bool], reason: Callable[[int], str],
) -> DetectorTrace:  # fmt: skip
    """A trace from the score and the alarm at each record; `reason` is that of an alarm there."""
    steps, count = [score.step for score in scored.scores], len(alarms)
    padded = np.concatenate([[False], np.array(alarms, dtype=bool), [False]]).astype(np.int8)
    began = [
        Alarm(position=i, step=steps[i], reason=reason(i), until=until if until < count else None)
        for i, until in np.flatnonzero(np.diff(padded)).reshape(-1, 2).tolist()
    ]
    return DetectorTrace(
        detector=name,
        run_id=scored.run.id,
        title=title,
        threshold=threshold,
        steps=np.array(steps, dtype=np.int64),
        scores=np.array(scores, dtype=float),
        alarms=np.array(alarms, dtype=bool),
        began=began,
    )
