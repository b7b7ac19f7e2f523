"""Calibrate the confidence of a diagnosis.

The score of the evidence is set by hand (the signatures' confidences, the weights of ranks). It is
mapped to the share of right answers with such evidence, by the kind of the evidence. The table,
confidence.json, is fitted to labelled logs by studies/diagnosis_benchmark/fit_confidence.py. Where
the evidence is indirect or contradictory the result is never sure.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rmetric.diagnosis.causes import Cause
from rmetric.diagnosis.inferred_causes import HUNG
from rmetric.diagnosis.job import Job
from rmetric.diagnosis.ordering import Ordering
from rmetric.diagnosis.result import LIKELY

#: Least confidence of an answer.
MIN_CONFIDENCE = 0.05
#: Evidence whose score is below this is never sure. At the first looks at written jobs 33 of 46
#: causes scored 0.8 to 0.9 were right, and 84 of 85 from here (studies/diagnosis_benchmark).
MIN_SURE_SCORE = 0.92
MOST_UNSURE = 0.79
#: Kinds of evidence, with the largest confidence that each may have.
KINDS = {
    "cause": 0.98,
    "contradicted cause": MOST_UNSURE,
    "ending": 0.98,
    "ending without progress": MOST_UNSURE,
    "symptom": MOST_UNSURE,
    "echo": MOST_UNSURE,
    "hang": MOST_UNSURE,
    "missing rank": MOST_UNSURE,
    "no cause": MOST_UNSURE,
    "planned end": 0.98,
    "no failure": MOST_UNSURE,
    # The verdict on a healthy job below 0.5 is "perhaps".
    "log stops": 0.45,
    "unknown": 0.45,
}
#: An ending follows the last step within so many seconds, or times the longest pause of steps.
MAX_SECONDS_WITHOUT_STEP = 120.0
MAX_PAUSES_WITHOUT_STEP = 5.0
#: A cause of another family with this share of the score contradicts.
RIVAL_SHARE = 0.9

#: Kind -> (score, confidence) in rising order; linear between, constant beyond.
Table = Mapping[str, Sequence[tuple[float, float]]]


class Basis(NamedTuple):
    """The kind of evidence, of `KINDS`, and what speaks against it ("" for nothing)."""

    kind: str
    against: str = ""


#: Seconds by which the clocks of a scheduler and of a program may differ.
MAX_CLOCK_SECONDS = 300.0


def calibrated(basis: Basis, score: float, table: Table | None = None) -> float:
    """The confidence for a score of the evidence, both 0 to 1.

    Args:
        basis: the kind of evidence.
        score: of the evidence.
        table: None for the shipped one. A kind that it lacks keeps its score.
    """
    knots = (shipped_table() if table is None else table).get(basis.kind, ())
    value = _interpolated(knots, score) if knots else score
    highest = KINDS[basis.kind] if score >= MIN_SURE_SCORE else min(KINDS[basis.kind], MOST_UNSURE)
    return round(min(max(value, MIN_CONFIDENCE), highest), 3) if score else 0.0


def _interpolated(knots: Sequence[tuple[float, float]], score: float) -> float:
    place = bisect_left([at for at, _ in knots], score)
    if place == 0:
        return knots[0][1]
    if place == len(knots):
        return knots[-1][1]
    (low, before), (high, after) = knots[place - 1], knots[place]
    return before + (after - before) * (score - low) / (high - low)


@cache
def shipped_table() -> Table:
    """The table that comes with rmetric."""
    content = json.loads(Path(__file__).with_name("confidence.json").read_text(encoding="utf-8"))
    return {kind: [(at, value) for at, value in knots] for kind, knots in content["table"].items()}


def basis_of(
    job: Job,
    causes: Sequence[Cause],
    ordering: Ordering,
    outcome: str,
    cause: str | None,
    score: float,
) -> Basis:
    """The evidence that a decision rests on.

    Args:
        job: the job.
        causes: that were not survived.
        ordering: of the job's entries.
        outcome: of the diagnosis.
        cause: of the diagnosis; None for none.
        score: of the evidence.
    """
    lead = next((one for one in causes if one.signature.id == cause), None)
    if lead is None:
        return _without_signature(job, outcome, cause, score)
    role = lead.signature.role
    if role == "cause" and (against := _rival(lead, causes)):
        return Basis("contradicted cause", against)
    if role == "ending" and (against := _stood_still(job, lead, ordering)):
        return Basis("ending without progress", against)
    return Basis(role)


def _without_signature(job: Job, outcome: str, cause: str | None, score: float) -> Basis:
    if cause is not None:
        return Basis("hang" if cause == HUNG.id else "missing rank")
    if outcome != "healthy":
        return Basis("no cause" if outcome == "failed" else "unknown")
    if score < LIKELY:
        return Basis("log stops")
    return Basis("planned end" if job.succeeded is not None else "no failure")


def _rival(lead: Cause, causes: Sequence[Cause]) -> str:
    for one in causes:
        if (
            one.signature.family != lead.signature.family
            and one.signature.role in ("cause", "ending")
            and one.score >= RIVAL_SHARE * lead.score
        ):
            return f"another fault is as likely: {one.signature.title}"
    return ""


def _stood_still(job: Job, lead: Cause, ordering: Ordering) -> str:
    """Describe an ending before which the training may have stood still."""
    if not job.trained:
        return "no training step was logged before the end"
    if (job.beside is not None and job.beside.stacks) or any(
        ordering.after(lead.first, dump) for one in job.streams.values() for dump in one.stacks
    ):
        return "stacks of its processes were taken, as of one that stands still"
    stepping = [one for one in job.streams.values() if one.last_step_at is not None]
    times = [ordering.dated(one.last_step_at) for one in stepping if one.last_step_at is not None]
    end, last = (
        ordering.dated(lead.first),
        max((one for one in times if one is not None), default=None),
    )
    # An end before the last step is by another clock, whose zone is not known.
    if end is None or last is None or end < last - MAX_CLOCK_SECONDS:
        return "the time from the last step to the end is not known"
    longest = max(one.longest_pause for one in stepping)
    if end - last > max(MAX_SECONDS_WITHOUT_STEP, MAX_PAUSES_WITHOUT_STEP * longest):
        return "the last step was logged long before the end"
    return ""
