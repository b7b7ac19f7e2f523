"""Estimates of the risk evaluation from the sampled strata, and their tables.

Shares have Wilson's interval, weighted sums of strata that of Zou and Donner (2008, "Construction
of confidence intervals: a closed-form approach"), medians that of order statistics. A rate
of false alarms has the wider of two intervals: a bootstrap over GPUs, which includes the
correlation of alarms on one GPU, and the exact Poisson interval, which has a width even without
alarms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from math import exp, isnan, nan, sqrt

import numpy as np
import pandas as pd
from scipy.stats import binom, chi2

from rmetric.evaluation.intervals import Estimate, estimate, wilson
from studies.common.table import Cell, Table, numbered, percent
from studies.fleet import published
from studies.fleet.gpu_usage import DAY, HOUR, MEDIAN_LEAD_HOURS
from studies.fleet.predictors import PREDICTORS
from studies.fleet.risk_evaluation import HORIZONS, LEAST_LEAD, STRATA, Strata

#: Contained errors a GPU-day: the published rate, less those that ended a run.
CONTAINED_PER_GPU_DAY = published.MEMORY_ERRORS_PER_GPU_DAY - (
    (published.INTERRUPTIONS["hbm"] + published.INTERRUPTIONS["sram"]) / published.GPU_DAYS
)
CONTAINED_DAYS = 2.0  # of one history of that stratum


def poisson(count: int, exposure: float) -> Estimate:
    """A rate with its exact 95 % interval (Garwood 1936).

    >>> [round(x, 2) for x in poisson(0, 1.0)]
    [0.0, 0.0, 3.69]
    """
    low = chi2.ppf(0.025, 2 * count) / 2 if count else 0.0
    high = chi2.ppf(0.975, 2 * count + 2) / 2
    return Estimate(count / exposure, float(low) / exposure, float(high) / exposure)


def weighted(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Weighted sum of independent estimates, with weights of at least 0."""
    point = sum(weight * part.point for weight, part in parts)
    below = sqrt(sum((weight * (part.point - part.low)) ** 2 for weight, part in parts))
    above = sqrt(sum((weight * (part.high - part.point)) ** 2 for weight, part in parts))
    return Estimate(point, max(0.0, point - below), point + above)


def recall_in(strata: Strata, stratum: str, horizon: str, name: str) -> Estimate:
    """Share of the failures of one stratum that were announced."""
    return _announced(strata[stratum, horizon, name].leads)


def _announced(leads: pd.Series[float]) -> Estimate:
    return wilson(int(leads.notna().sum()), len(leads))


def _of_failures(share: float, of: Callable[[str], Estimate]) -> Estimate:
    """Estimate for all failures from `of` its two strata; `share` of them have a sign."""
    return weighted([(share, of("with_sign")), (1 - share, of("without"))])


def recall(strata: Strata, share: float, horizon: str, name: str) -> Estimate:
    """Share of a GPU's failures that were announced, where `share` of them have a sign."""
    return _of_failures(share, lambda stratum: recall_in(strata, stratum, horizon, name))


def at_failure(strata: Strata, share: float, horizon: str, name: str) -> Estimate:
    """Share of a GPU's failures that were not announced, but detected as they happened."""

    def of(stratum: str) -> Estimate:
        seen = strata[stratum, horizon, name].at_failure
        return wilson(int(seen.sum()), len(seen))

    return _of_failures(share, of)


def false_alarms(strata: Strata, horizon: str, name: str) -> Estimate:
    """False alarms a GPU-day."""
    a_window = mean(strata["contained", horizon, name].num_false)
    in_windows = CONTAINED_PER_GPU_DAY * CONTAINED_DAYS
    return weighted(
        [(1 - in_windows, _ordinary(strata, horizon, name)), (CONTAINED_PER_GPU_DAY, a_window)]
    )


def mean(values: pd.Series[float]) -> Estimate:
    """Mean with its bootstrap interval."""
    numbers = values.to_numpy(dtype=float)
    return estimate(lambda drawn: drawn @ numbers / drawn.sum(axis=1), len(numbers))


def _ordinary(strata: Strata, horizon: str, name: str) -> Estimate:
    healthy = strata["healthy", horizon, name]
    numbers, days = healthy.num_false.to_numpy(dtype=float), healthy.days.to_numpy(dtype=float)
    exact = poisson(int(numbers.sum()), float(days.sum()))
    drawn = estimate(lambda counts: (counts @ numbers) / (counts @ days), numbers.size)
    return Estimate(exact.point, min(exact.low, drawn.low), max(exact.high, drawn.high))


def precision(found: Estimate, false: Estimate) -> Estimate:
    """Precision of the alarms; its interval combines the extremes of both rates."""

    def share(recalled: float, alarms: float) -> float:
        right = published.FAILURES_PER_GPU_DAY * recalled
        return right / (right + alarms) if right + alarms > 0 else nan

    point = share(found.point, false.point)
    if isnan(point):
        return Estimate(nan, nan, nan)
    return Estimate(point, share(found.low, false.high), share(found.high, false.low))


def by_chance(false: Estimate, horizon: str) -> float:
    """Recall of alarms of the same rate at random times."""
    return 1 - exp(-false.point * (HORIZONS[horizon] - LEAST_LEAD) / DAY)


def firing(strata: Strata, horizon: str, name: str) -> Estimate:
    """Share of the readings of healthy GPUs at which it alarms."""
    return mean(strata["healthy", horizon, name].firing)


def median(values: Sequence[float]) -> Estimate:
    """Median with an interval from order statistics; nan without values."""
    if not values:
        return Estimate(nan, nan, nan)
    ordered = np.sort(values)
    low = int(max(0, binom.ppf(0.025, ordered.size, 0.5) - 1))
    high = int(min(ordered.size - 1, binom.ppf(0.975, ordered.size, 0.5)))
    return Estimate(float(np.median(ordered)), float(ordered[low]), float(ordered[high]))


# -- the tables

#: The share of failures with a sign that is published, and others to see what hangs on it.
SHARE = published.PRECURSORS_SEEN / published.PRECURSORS_ASKED
FAILING_SHARES = (0.1, SHARE, 0.5, 1.0)
#: What running the original code showed of a healthy day, in percent.
KNOWN_FIRING = 28.6


def tables(strata: Strata) -> list[Table]:
    scores = [_scores(strata, horizon) for horizon in HORIZONS]
    return numbered([_bound(), *scores, _shares(strata), _signs(strata), _sample(strata)])


def _bound() -> Table:
    of_a_gpu = published.NUM_OF_A_GPU / published.NUM_INTERRUPTIONS
    published_share = percent(wilson(published.PRECURSORS_SEEN, published.PRECURSORS_ASKED))
    return Table(
        "risk_bound",
        "Upper bound for predictors that use a GPU's telemetry",
        "GPU failures with a sign (%):0 | Most GPU failures announced (%):0 | "
        "Most interruptions announced (%):1",
        [(100 * share, 100 * share, 100 * share * of_a_gpu) for share in FAILING_SHARES],
        notes=[
            f"{published.NUM_OF_A_GPU} of {published.NUM_INTERRUPTIONS} unexpected interruptions "
            f"were failures of a GPU ({', '.join(published.OF_A_GPU)}); the others show nothing "
            "on a GPU before they happen. Llama 3 405B, 54 days on 16,384 H100 (arXiv "
            "2407.21783; counts read in a secondary copy).",
            f"With a sign: {published.PRECURSORS_SEEN} of {published.PRECURSORS_ASKED} on 504 B200 "
            f"(arXiv 2605.09370), that is {published_share.point:.0f} % with an interval from "
            f"{published_share.low:.0f} to {published_share.high:.0f} %; the other rows are "
            "suppositions.",
            "Above the bound, what is 'announced' is announced by chance.",
        ],
    )


def _scores(strata: Strata, horizon: str) -> Table:
    return Table.of(
        f"risk_{horizon.replace(' ', '')}",
        f"An alarm is right if a failure follows within {horizon}",
        [_score(strata, horizon, predictor.name, predictor.title) for predictor in PREDICTORS],
        notes=[
            f"{100 * SHARE:.0f} % of the failures have a sign. Those without are hit by chance; "
            "'by chance at its rate' is what as many alarms at random times would hit.",
            "The first alarm of an incident counts, with at least 60 s of lead; an incident ends "
            "after 10 minutes without an alarm. 'Always on' therefore warns once, too early.",
            "Median lead: of the failures with a sign that were announced; lead times are set by "
            "hand, so this compares predictors and predicts nothing.",
            "Brackets are 95 % intervals; n are in the table of the sample.",
        ],
    )


def _score(strata: Strata, horizon: str, name: str, title: str) -> dict[str, Cell]:
    found = recall(strata, SHARE, horizon, name)
    false = false_alarms(strata, horizon, name)
    leads = strata["with_sign", horizon, name].leads.dropna().astype(float) / HOUR
    return {
        "Predictor": title,
        "GPU failures announced (%):1": percent(found),
        "of those with a sign (%):1": percent(recall_in(strata, "with_sign", horizon, name)),
        "of those without (%):1": percent(recall_in(strata, "without", horizon, name)),
        "by chance at its rate (%):1": 100 * by_chance(false, horizon),
        "only detected as they happen (%):1": percent(at_failure(strata, SHARE, horizon, name)),
        "Precision (%):3": percent(precision(found, false)),
        "Median lead (h):1": median([*leads]),
        "announced with a sign (n)": len(leads),
        "False alarms a GPU-day:4": false,
        "a 1000 GPU-days:1": Estimate(*(1000 * bound for bound in false)),
        "Healthy readings with an alarm (%):2": percent(firing(strata, horizon, name)),
    }


def _shares(strata: Strata) -> Table:
    false = cache(partial(false_alarms, strata))
    rows: list[dict[str, Cell]] = []
    for share, predictor in product(FAILING_SHARES, PREDICTORS):
        rows.append({"With a sign": f"{100 * share:.0f} %", "Predictor": predictor.title})
        for horizon in HORIZONS:
            found = recall(strata, share, horizon, predictor.name)
            right = precision(found, false(horizon, predictor.name))
            rows[-1][f"Announced, {horizon} (%):1"] = percent(found)
            rows[-1][f"Precision, {horizon} (%):3"] = percent(right)
    return Table.of(
        "risk_shares",
        "Effect of the share of failures with a sign",
        rows,
        notes=["The same histories throughout: the share only weights the two strata of failures."],
        grouped=True,
    )


def _signs(strata: Strata) -> Table:
    horizon, _ = HORIZONS
    rows: list[dict[str, Cell]] = []
    for predictor in PREDICTORS:
        rows.append({"Predictor": predictor.title})
        found = strata["with_sign", horizon, predictor.name]
        for sign in MEDIAN_LEAD_HOURS:
            leads = found.leads[found.sign == sign]
            rows[-1][f"{sign} (n = {len(leads)}):0"] = percent(_announced(leads))
    return Table.of(
        "risk_signs",
        f"Failures announced within {horizon}, by the sign before them (%)",
        rows,
        notes=["Signs, their mixture by cause and how strong they get are set by hand."],
    )


def _sample(strata: Strata) -> Table:
    horizon, _ = HORIZONS
    judged = {name: strata[name, horizon, "never"] for name in STRATA}
    number = {name: len(histories) for name, histories in judged.items()}
    days = float(judged["healthy"].days.sum())
    of_contained = CONTAINED_DAYS * number["contained"], 1000 * CONTAINED_PER_GPU_DAY
    failures = 1000 * published.FAILURES_PER_GPU_DAY
    return Table(
        "risk_sample",
        "What was sampled, and what it stands for",
        "Stratum | Histories | GPU-days:0 | Occurs a 1000 GPU-days:3",
        [
            ("healthy", number["healthy"], days, None),
            ("contained error without a failure", number["contained"], *of_contained),
            ("failure with a sign", number["with_sign"], None, failures * SHARE),
            ("failure without", number["without"], None, failures * (1 - SHARE)),
        ],
        notes=[
            "A reading every 10 s. The other GPU-days of a failing GPU weigh as healthy ones do: "
            "failures are too rare to matter there.",
            "Contained errors: one uncorrectable error in 88,768 h of an H100 (arXiv 2503.11901, "
            "read in a secondary copy), less the failures of HBM and SRAM above; two clusters.",
        ],
    )
