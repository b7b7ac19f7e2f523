"""The tables of the risk evaluation."""

from __future__ import annotations

from rmetric.evaluation.intervals import Estimate, wilson
from studies.common.table import Cell, Table, numbered, percent
from studies.fleet import published
from studies.fleet import risk_estimates as estimates
from studies.fleet.gpu_failures import MEDIAN_LEAD_HOURS
from studies.fleet.gpu_usage import HOUR
from studies.fleet.predictors import PREDICTORS
from studies.fleet.risk_estimates import Strata
from studies.fleet.risk_evaluation import HORIZONS, found_leads

#: The share of failures with a sign that is published, and others to see what hangs on it.
SHARE = published.PRECURSORS_SEEN / published.PRECURSORS_ASKED
SHARES = (0.1, SHARE, 0.5, 1.0)
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
        [(100 * share, 100 * share, 100 * share * of_a_gpu) for share in SHARES],
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
    return Table(
        f"risk_{horizon.replace(' ', '')}",
        f"An alarm is right if a failure follows within {horizon}",
        "Predictor | GPU failures announced (%):1 | of those with a sign (%):1 | "
        "of those without (%):1 | by chance at its rate (%):1 | "
        "only detected as they happen (%):1 | Precision (%):3 | Median lead (h):1 | "
        "announced with a sign (n) | False alarms a GPU-day:4 | a 1000 GPU-days:1 | "
        "Healthy readings with an alarm (%):2",
        [_score(strata, horizon, one.name, one.title) for one in PREDICTORS],
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


def _score(strata: Strata, horizon: str, name: str, title: str) -> tuple[Cell, ...]:
    found = estimates.recall(strata, SHARE, horizon, name)
    false = estimates.false_alarms(strata, horizon, name)
    leads = [lead / HOUR for lead in found_leads(strata["with_sign"], horizon, name)]
    return (
        title,
        percent(found),
        percent(estimates.recall_in(strata, "with_sign", horizon, name)),
        percent(estimates.recall_in(strata, "without", horizon, name)),
        100 * estimates.by_chance(false, horizon),
        percent(estimates.at_failure(strata, SHARE, horizon, name)),
        percent(estimates.precision(found, false)),
        estimates.median(leads),
        len(leads),
        false,
        Estimate(*(1000 * bound for bound in false)),
        percent(estimates.firing(strata, horizon, name)),
    )


def _shares(strata: Strata) -> Table:
    false = {
        (horizon, one.name): estimates.false_alarms(strata, horizon, one.name)
        for horizon in HORIZONS
        for one in PREDICTORS
    }
    rows: list[tuple[Cell, ...]] = []
    for share in SHARES:
        for one in PREDICTORS:
            row: list[Cell] = [f"{100 * share:.0f} %", one.title]
            for horizon in HORIZONS:
                found = estimates.recall(strata, share, horizon, one.name)
                right = estimates.precision(found, false[horizon, one.name])
                row += [percent(found), percent(right)]
            rows.append(tuple(row))
    of_horizon = [
        head for h in HORIZONS for head in (f"Announced, {h} (%):1", f"Precision, {h} (%):3")
    ]
    return Table(
        "risk_shares",
        "Effect of the share of failures with a sign",
        ("With a sign | Predictor", *of_horizon),
        rows,
        notes=["The same histories throughout: the share only weights the two strata of failures."],
        grouped=True,
    )


def _signs(strata: Strata) -> Table:
    horizon, _ = HORIZONS
    of_sign = {
        sign: {"with_sign": [one for one in strata["with_sign"] if one.sign == sign]}
        for sign in MEDIAN_LEAD_HOURS
    }
    return Table(
        "risk_signs",
        f"Failures announced within {horizon}, by the sign before them (%)",
        ("Predictor", *(f"{sign} (n = {len(of_sign[sign]['with_sign'])}):0" for sign in of_sign)),
        [
            (
                one.title,
                *(
                    percent(estimates.recall_in(part, "with_sign", horizon, one.name))
                    for part in of_sign.values()
                ),
            )
            for one in PREDICTORS
        ],
        notes=["Signs, their mixture by cause and how strong they get are set by hand."],
    )


def _sample(strata: Strata) -> Table:
    horizon, _ = HORIZONS
    days = sum(one.judged[horizon]["never"].days for one in strata["healthy"])
    failures = published.FAILURES_PER_GPU_DAY
    return Table(
        "risk_sample",
        "What was sampled, and what it stands for",
        "Stratum | Histories | GPU-days:0 | Occurs a 1000 GPU-days:3",
        [
            ("healthy", len(strata["healthy"]), days, None),
            (
                "contained error without a failure",
                len(strata["contained"]),
                estimates.CONTAINED_DAYS * len(strata["contained"]),
                1000 * estimates.CONTAINED_PER_GPU_DAY,
            ),
            ("failure with a sign", len(strata["with_sign"]), None, 1000 * failures * SHARE),
            ("failure without", len(strata["without"]), None, 1000 * failures * (1 - SHARE)),
        ],
        notes=[
            "A reading every 10 s. The other GPU-days of a failing GPU weigh as healthy ones do: "
            "failures are too rare to matter there.",
            "Contained errors: one uncorrectable error in 88,768 h of an H100 (arXiv 2503.11901, "
            "read in a secondary copy), less the failures of HBM and SRAM above; two clusters.",
        ],
    )
