"""Sentences at the top of a page: first alarm, details and verdict of each detector."""

from __future__ import annotations

from math import isnan
from typing import NamedTuple

import numpy as np

from rmetric._util.printed import counted
from rmetric.evaluation import judge
from rmetric.metric import HEALTHY_ALARMED
from rmetric.metric_settings import settings_of
from rmetric.records import Run
from rmetric.reporting.page.traces import DetectorTrace

_CAUTION = (
    f"As published it alarms in {HEALTHY_ALARMED} % of healthy public runs, so its alarm does not "
    "count for the verdict."
)


class DetectorSummary(NamedTuple):
    """Sentences on one detector.

    Attributes:
        caution: what to keep in mind of this detector; empty where there is nothing.
        headline: whether and where it alarms first.
        reason: of that alarm; empty without one.
        details: sentences about the rest of the run.
        judgement: how right it was, where the truth is known.
        tone: ``good``, ``bad``, or ``plain`` where nobody knows.
        alarmed: whether it ever alarmed.
    """

    name: str
    title: str
    caution: str
    headline: str
    reason: str
    details: list[str]
    judgement: str
    tone: str
    alarmed: bool


def summarise(run: Run, trace: DetectorTrace) -> DetectorSummary:
    first = trace.began[0] if trace.began else None
    judgement, tone = judged(run, trace)
    scored = trace.name == "r_metric" and _has_scores(trace)
    is_papers = scored and settings_of(run).config.variant == "paper"
    headline = "No alarm" if _has_scores(trace) else "Nothing to judge by"
    if first is not None:
        verdict = f": {first.verdict}" if first.verdict else ""
        headline = f"First alarm at step {first.step:,}{verdict}"
    return DetectorSummary(
        name=trace.name,
        title=trace.title,
        caution=_CAUTION if is_papers else "",
        headline=headline,
        reason=first.reason if first else "",
        details=_details(trace),
        judgement=judgement,
        tone=tone,
        alarmed=first is not None,
    )


def truth_sentences(run: Run) -> str:
    """Fault and failure of the run in sentences; empty where both are unknown."""
    truth = run.truth
    if truth is None:
        return ""
    if truth.fault == "NONE":
        sentences = ["No fault was injected."]
    else:
        severity = "" if truth.severity is None else f", severity {truth.severity:g}"
        kind = "Benign change" if truth.benign else "Fault"
        sentences = [f"{kind}: {truth.fault}{severity}."]
    if truth.onset_step is not None:
        sentences.append(f"Onset at step {truth.onset_step:,}.")
    if truth.failure_kind:
        sentences.append(f"Kind of failure: {truth.failure_kind}.")
    return " ".join(sentences)


def _details(trace: DetectorTrace) -> list[str]:
    details = []
    if trace.began:
        in_alarm = int(trace.alarms.sum())
        times = counted(trace.num_alarms, "alarm")
        details += _later(trace)
        details.append(f"{times}; in alarm at {in_alarm:,} of {len(trace.alarms):,} records.")
    known = ~np.isnan(trace.scores)
    if not known.any():
        details.append("The log holds nothing that it works on.")
        return details
    highest = int(np.nanargmax(np.where(known, trace.scores, -np.inf)))
    score, step = trace.scores[highest], int(trace.steps[highest])
    threshold = "" if trace.threshold is None else f"; the threshold is {trace.threshold:g}"
    if score == 0:
        details.append(f"Score 0 at every record{threshold}.")
    else:
        details.append(f"Highest score {score:.3g}, at step {step:,}{threshold}.")
    return details


def _later(trace: DetectorTrace) -> list[str]:
    later = []
    for before, alarm in zip([None, *trace.began], trace.began, strict=False):
        if before is not None and before.until == alarm.position and alarm.verdict:
            later.append(f"Judged {alarm.verdict} from step {alarm.step:,}.")
        elif before is not None:
            break
        if alarm.ended and alarm.until is not None:
            later.append(f"Over at step {int(trace.steps[alarm.until]):,}: {alarm.ended}.")
    return later


def judged(run: Run, trace: DetectorTrace) -> tuple[str, str]:
    """Verdict by the causal rule, and its tone; empty where the truth is unknown."""
    if run.truth is None or not _has_scores(trace):
        return "", "plain"
    truth, first = run.truth, trace.first_alarm
    of_run = judge([run], [trace.as_trace(run.id)], "causal")
    if first is None:
        if not truth.failed:
            return "Right: the run did not fail.", "good"
        return "Missed: the run failed and there was no alarm.", "bad"
    if bool(of_run.hit[0]):
        lead = float(of_run.lead_steps[0])
        ahead = "" if isnan(lead) else f", {counted(int(lead), 'step')} before the failure"
        return f"In time: after the onset of the fault{ahead}.", "good"
    if not truth.failed:
        absorbed = ", it absorbed the fault" if truth.outcome == "absorbed" else ""
        return f"A false alarm: the run did not fail{absorbed}.", "bad"
    if bool(of_run.false_alarm[0]):
        before = truth.onset_step - first if truth.onset_step is not None else 0
        return (
            f"A false alarm: {counted(before, 'step')} before the fault existed. The rule as "
            "published counts it as a hit.",
            "bad",
        )
    return "Too late: the run had failed by then.", "bad"


def _has_scores(trace: DetectorTrace) -> bool:
    return bool(trace.began) or not np.isnan(trace.scores).all()
