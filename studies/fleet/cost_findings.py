"""Findings of the cost study as sentences with the numbers of the tables."""

from __future__ import annotations

from rmetric.evaluation import Estimate
from studies.fleet import training_failures
from studies.fleet.closed_form import most_an_emergency_saves
from studies.fleet.cost import SAVES, TODAY, a_job
from studies.fleet.cost_tables import BIG, LEADS, VARIANTS, Get, shrink_jobs, variant, ways
from studies.fleet.job_settings import FailurePredictor
from studies.fleet.training_failures import Outcomes, outcomes


def sentences(get: Get) -> dict[str, list[str]]:
    """By the names of their places on the page."""
    return {
        "words most": _most(get),
        "words warning": _warning(get),
        "words shrinking": _shrinking(get),
        "words matters": _matters(get),
        "words training_failures": training_failure_lines(outcomes()),
    }


def points(gain: Estimate) -> str:
    return f"{gain.point:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}] points"


def _most(get: Get) -> list[str]:
    lines = []
    for saves in SAVES:
        job = a_job(BIG, saves)
        mtbf, interval = job.fleet.seconds_between_failures, job.saves.interval_seconds or 0.0
        bound = 100 * most_an_emergency_saves(
            mtbf=mtbf, interval=interval, durable=job.saves.durable_seconds, recall=TODAY.recall
        )
        won = get(a_job(BIG, saves, FailurePredictor(recall=1.0))).gain(get(job))
        lines.append(
            f"{BIG:,} GPUs, {saves} saves: a failure every {mtbf / 3600:.1f} h, a save every "
            f"{interval / 60:.0f} minutes. A predictor with a recall of {TODAY.recall:g} can gain "
            f"at most {bound:.1f} points of ETTR; a predictor with recall 1 and no false alarms "
            f"gains {points(won)} in the simulation."
        )
    return lines


def verdict(gain: Estimate) -> str:
    """Decide by the interval, not by the point estimate."""
    return "pays" if gain.low > 0 else "costs" if gain.high < 0 else "makes no clear difference"


def _warning(get: Get) -> list[str]:
    short, *_, long = LEADS
    usual, _, again, dropped = VARIANTS
    alarms = TODAY.false_alarms_per_gpu_day

    def gain(lead: float, words: str, rate: float = 0.0) -> str:
        return points(variant(get, "asynchronous", lead, words, rate))

    return [
        f"Earlier is not better. With a recall of 0.5, no false alarms and asynchronous saves on "
        f"{BIG:,} GPUs, one save at the first sign wins {gain(short, usual)} with a mean lead of "
        f"{short / 60:.0f} minutes and {gain(long, usual)} with {long / 60:.0f}: the save is old "
        "when the failure comes, and the regular ones would have been made anyway.",
        f"Saving again while the sign stands wins {gain(short, again)} and {gain(long, again)}; "
        f"with today's false alarms {gain(short, again, alarms)} and {gain(long, again, alarms)}.",
        f"Taking the node out wins {gain(short, dropped)} and {gain(long, dropped)}, however early "
        f"the sign; with today's false alarms, each of which costs a restart, "
        f"{gain(short, dropped, alarms)} and {gain(long, dropped, alarms)}.",
    ]


def _shrinking(get: Get) -> list[str]:
    lines = []
    for size, share, words in ((64, 0.0, "no spare"), (BIG, 0.0, "no spare"), (BIG, 0.01, "1 %")):
        waits, shrinks, _ = (100 * get(job).ettr.point for job in shrink_jobs(size, share).values())
        lines.append(
            f"{size:,} GPUs, {words}{' of spares' if share else ''}: ETTR {waits:.1f} % waiting, "
            f"{shrinks:.1f} % shrinking."
        )
    return lines


def _matters(get: Get) -> list[str]:
    jobs = ways(BIG)
    first, second, *others = jobs
    gains = {f"{second.capitalize()} instead of synchronous ones": (second, first)}
    gains |= {w.removeprefix("asynchronous, ").capitalize(): (w, second) for w in others}
    return [
        f"{words}: {points(get(jobs[new]).gain(get(jobs[old])))}."
        for words, (new, old) in gains.items()
    ]


def training_failure_lines(found: Outcomes | None) -> list[str]:
    if found is None:
        return ["The outcomes of rescue are not measured yet."]
    lines = []
    for rate in training_failures.RATES:
        lost = training_failures.losses(rate, 3600.0, found)
        saved = training_failures.gain(rate, 3600.0, found)
        lines.append(
            f"{rate:g} failures in 1,000 GPU-days, a person acts after 1 h: {lost.hourly:.2f} of "
            f"1,000 GPU-days are lost with hourly saves, {lost.quick:.2f} with asynchronous saves "
            f"and fast restarts, {lost.rescue:.2f} with rescue, which {verdict(saved)} "
            f"({saved.point:+.2f} [{saved.low:+.2f}, {saved.high:+.2f}] GPU-days) before its "
            f"snapshots: they may take {max(saved.point, 0) / 10:.2g} % of a step's time."
        )
    return lines
