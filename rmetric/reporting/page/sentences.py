"""Sentences of a page: on each detector, on the stated outcome, on the decisions of a rescue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import numpy as np

from rmetric._util.printed import counted
from rmetric.evaluation import judge
from rmetric.metric import HEALTHY_ALARMED
from rmetric.metric_settings import settings_of
from rmetric.records import LogEvent, Run
from rmetric.reporting.page.traces import DetectorTrace

_CAUTION = (
    f"As published it alarms in {HEALTHY_ALARMED} % of healthy public runs, so its alarm does not "
    "count for the verdict."
)


class DetectorSummary(NamedTuple):
    """Sentences on one detector; empty where there is nothing to state.

    Attributes:
        caution: what to keep in mind of this detector.
        headline, reason: whether and where it alarms first, and why.
        details: sentences about the rest of the run.
        judgement, tone: how right it was, where the truth is known; ``good``, ``bad``, or
            ``plain`` where it is unknown.
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
    judgement, tone = _judged(run, trace)
    scored = trace.detector == "r_metric" and _has_scores(trace)
    is_papers = scored and settings_of(run).config.variant == "paper"
    headline = "No alarm" if _has_scores(trace) else "Nothing to judge by"
    if first is not None:
        verdict = f": {first.verdict}" if first.verdict else ""
        headline = f"First alarm at step {first.step:,}{verdict}"
    return DetectorSummary(
        name=trace.detector,
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
    sentences = ["No fault was injected."]
    if truth.fault != "NONE":
        severity = "" if truth.severity is None else f", severity {truth.severity:g}"
        kind = "Benign change" if truth.benign else "Fault"
        sentences = [f"{kind}: {truth.fault}{severity}."]
    if truth.onset_step is not None:
        sentences.append(f"Onset at step {truth.onset_step:,}.")
    if truth.failure_kind:
        sentences.append(f"Kind of failure: {truth.failure_kind}.")
    return " ".join(sentences)


def _details(trace: DetectorTrace) -> list[str]:
    details = _later(trace)
    if trace.began:
        times, in_alarm = counted(len(trace.alarm_steps), "alarm"), int(trace.alarms.sum())
        details.append(f"{times}; in alarm at {in_alarm:,} of {len(trace.alarms):,} records.")
    known = ~np.isnan(trace.scores)
    if not known.any():
        return [*details, "The log holds nothing that it works on."]
    highest = int(np.nanargmax(np.where(known, trace.scores, -np.inf)))
    score, step = trace.scores[highest], int(trace.steps[highest])
    threshold = "" if trace.threshold is None else f"; the threshold is {trace.threshold:g}"
    words = f"Highest score {score:.3g}, at step {step:,}" if score else "Score 0 at every record"
    return [*details, f"{words}{threshold}."]


def _later(trace: DetectorTrace) -> list[str]:
    """How the first alarm went on."""
    later = []
    for before, alarm in zip([None, *trace.began], trace.began, strict=False):
        if before is not None and before.until == alarm.position and alarm.verdict:
            later.append(f"Judged {alarm.verdict} from step {alarm.step:,}.")
        elif before is not None:
            break
        if alarm.ended and alarm.until is not None:
            later.append(f"Over at step {int(trace.steps[alarm.until]):,}: {alarm.ended}.")
    return later


def _judged(run: Run, trace: DetectorTrace) -> tuple[str, str]:
    """Verdict by the causal rule, and its tone; empty where the truth is unknown."""
    if run.truth is None or not _has_scores(trace):
        return "", "plain"
    truth, first = run.truth, trace.first_alert
    of_run = judge([run], [trace], "causal")
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
        early = f"A false alarm: {counted(before, 'step')} before the fault existed."
        return f"{early} The rule as published counts it as a hit.", "bad"
    return "Too late: the run had failed by then.", "bad"


def _has_scores(trace: DetectorTrace) -> bool:
    return bool(trace.began) or not np.isnan(trace.scores).all()


def decisions_of(run: Run) -> list[LogEvent]:
    """The decisions of a rescue among the events of the run's log."""
    return [event for event in run.log_events if event.kind == "decision"]


def short_words(event: LogEvent) -> str:
    """A decision without step and reason.

    >>> short_words(LogEvent(step=713, kind="decision", name="go_back", reason="", to=690))
    'went back to 690'
    """
    to = "" if event.to is None else f"{event.to:,}"
    known = {"leave_out": "left out", "go_back": f"went back to {to}", "hold": f"held at {to}"}
    return known.get(event.name, event.name.replace("_", " "))


def summed_up(decisions: Sequence[LogEvent]) -> str:
    """The number of each kind, in one line.

    >>> went = LogEvent(step=713, kind="decision", name="go_back", reason="", to=690)
    >>> summed_up([went, went])
    'Went back 2 times'
    """
    counts = Counter(event.name for event in decisions)
    parts = []
    if back := counts.pop("go_back", 0):
        parts.append("went back once" if back == 1 else f"went back {back:,} times")
    if left := counts.pop("leave_out", 0):
        parts.append(f"{counted(left, 'step')} left out")
    if counts.pop("hold", 0):
        parts.append(short_words([event for event in decisions if event.name == "hold"][-1]))
    parts += [f"{name.replace('_', ' ')}: {count:,}" for name, count in counts.items()]
    words = ", ".join(parts)
    return words[:1].upper() + words[1:]
