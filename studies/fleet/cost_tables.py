"""Tables of the cost study; each requests the jobs that it needs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from rmetric.evaluation import Estimate
from rmetric.guard.policy import expected_ettr
from studies.common.table import Cell, Table, numbered, percent
from studies.fleet import training_failures
from studies.fleet.closed_form import exact_ettr, false_alarm_costs, hit_saves, unsaved_ettr
from studies.fleet.cost import (
    RATES,
    RECALLS,
    SAVES,
    SIZES,
    TODAY,
    UNSAVED_DAYS,
    Measured,
    a_job,
    mean,
    one_percent,
)
from studies.fleet.job_settings import DAY, FailurePredictor, FleetJob

Get = Callable[[FleetJob], Measured]
BIG = SIZES[-1]
#: Sizes whose break-even is computed.
BREAK_EVEN_SIZES = SIZES[2:]
#: False alarms to a failure, where their cost is measured: about twice today's.
ALARMS_PER_FAILURE = 4.0
#: Words -> false alarms a GPU-day.
FALSE_ALARM_RATES = {"no false alarms": 0.0, "today's": TODAY.false_alarms_per_gpu_day}


def tables(get: Get) -> list[Table]:
    made = [make(get) for make in (_strategies, _break_even, _variants, _where_it_goes, _shrinking,
                                   _rates, _checks)]  # fmt: skip
    return numbered([*made, training_failures.table(training_failures.outcomes())])


def _strategies(get: Get) -> Table:
    # Words -> interval (None: Young/Daly's) and predictor.
    strategies: dict[str, tuple[float | None, FailurePredictor]] = {
        "every hour": (3600.0, FailurePredictor()),
        "Young/Daly": (None, FailurePredictor()),
    }
    for (words, alarms), recall in product(FALSE_ALARM_RATES.items(), RECALLS):
        predictor = FailurePredictor(recall=recall, false_alarms_per_gpu_day=alarms)
        strategies[f"+ emergency, recall {recall:g}, {words}"] = None, predictor
    rows: list[tuple[Cell, ...]] = []
    for size in SIZES:
        mtbf = a_job(size, "synchronous").fleet.seconds_between_failures
        none = 100 * unsaved_ettr(mtbf=mtbf, work=UNSAVED_DAYS * DAY, restart=600.0)
        rows.append((f"{size:,}", "no saves (7 days)", none, None, none, None))
        for words, (interval, predictor) in strategies.items():
            cells = [
                percent(get(a_job(size, saves, predictor, interval=interval, **fleet)).ettr)
                for saves in SAVES
                for fleet in (one_percent(size), one_percent(size, shrinks=True))
            ]
            rows.append((f"{size:,}", words, *cells))
    return Table(
        "ettr",
        "ETTR (%) by fleet and strategy, at the failure rate of RSC-1",
        ("GPUs | Saves", *(f"{saves}, {how}" for saves in SAVES for how in ("waits", "shrinks"))),
        rows,
        notes=[
            "One spare node to 100 (none to 8 or 64 GPUs); a node that failed is back after 24 h. "
            "'Waits': for all of its nodes; 'shrinks': goes on with whole replicas, each a 128th "
            "of the fleet, at least a node.",
            "No saves: a job of 7 days that begins anew after each failure and always has a node; "
            "by its closed form, as it would never end in a simulation.",
            "Today's: 0.84 false alarms a day on 504 GPUs (arXiv 2605.09370); the recall measured "
            f"there is {TODAY.recall:g}.",
            "Synchronous saves block for 120 s; asynchronous ones for 20 s, and are durable after "
            "120 s. A restart takes 600 s.",
        ],
        grouped=True,
    )


class BreakEven(NamedTuple):
    """Gain of a hit and cost of a false alarm on one fleet, each alone against no warnings.

    Attributes:
        hit: seconds that a failure which is warned of saves.
        alarm: seconds that a false alarm costs, where there are some to a failure.
        rare: that one costs by the closed form where they are few: `alarm` agrees, but on
            small fleets it drowns in the noise.
        paid_for: how many of the rare ones a hit pays for.
    """

    hit: Estimate
    alarm: Estimate
    rare: float
    paid_for: Estimate


def break_even(get: Get, size: int, saves: str) -> BreakEven:
    """A gain in ETTR times the mean time between failures is seconds a failure."""
    job = a_job(size, saves)
    mtbf = job.fleet.seconds_between_failures
    rate = ALARMS_PER_FAILURE * job.fleet.failures_per_node_day / job.fleet.gpus_per_node
    base = get(job)
    hits = get(a_job(size, saves, FailurePredictor(recall=1.0)))
    alarms = get(a_job(size, saves, FailurePredictor(false_alarms_per_gpu_day=rate)))
    hit = mean((hits.ettr_S - base.ettr_S) * mtbf)
    rare = false_alarm_costs(blocking=job.saves.blocking_seconds, least_gap=job.saves.least_gap)
    return BreakEven(
        hit=hit,
        alarm=mean((base.ettr_S - alarms.ettr_S) * mtbf / ALARMS_PER_FAILURE),
        rare=rare,
        paid_for=Estimate(*(bound / rare for bound in hit)),
    )


def _break_even(get: Get) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for size, saves in product(BREAK_EVEN_SIZES, SAVES):
        job, found = a_job(size, saves), break_even(get, size, saves)
        interval, blocking = job.saves.interval_seconds or 0.0, job.saves.blocking_seconds
        just = hit_saves(interval=interval, blocking=blocking, least_gap=job.saves.least_gap)
        precision = 100 / (1 + found.paid_for.point)
        gain = get(a_job(size, saves, TODAY)).gain(get(job))
        rows.append((f"{size:,}", saves, interval / 60, found.hit, just, found.alarm,
                     found.rare, found.paid_for, precision, gain))  # fmt: skip
    hits = TODAY.recall * RATES["RSC-1"] / 8
    right = hits / (hits + TODAY.false_alarms_per_gpu_day)
    return Table(
        "break_even",
        "What a warning saves, what a false alarm costs, and when the two are even",
        "GPUs | Saves | Interval (min):0 | A hit saves (s):0 | just in time (s):0 | "
        "A false alarm costs (s):1 | a rare one (s):1 | False alarms a hit pays for:1 | "
        "Precision needed (%):0 | Gain of today's predictor (points)",
        rows,
        notes=[
            "Against Young/Daly's interval without a predictor, seed by seed under the same "
            "failures; a node is always there. A hit: every failure is warned of, 10 minutes ahead "
            "in the mean, exponentially distributed, and there are no false alarms. False alarms: "
            f"{ALARMS_PER_FAILURE:g} to a failure, and no hits.",
            "Just in time, a rare one: to first order (`studies.fleet.closed_form`), for warnings "
            "that come just before the failure and alarms that are few in an interval. What a hit "
            "pays for is counted in rare ones.",
            f"Today's predictor: recall {TODAY.recall:g}, "
            f"{TODAY.false_alarms_per_gpu_day:.2g} false alarms a GPU-day; at the failure rate of "
            f"RSC-1 {100 * right:.0f} % of its alarms are right.",
        ],
        grouped=True,
    )


#: What may be otherwise about a warning -> settings of the predictor, and of the filter.
VARIANTS: dict[str, tuple[dict[str, bool], float]] = {
    "as the guard does it": ({}, 0.25),
    "without the filter on the gap": ({}, 0.0),
    "asks again while it stands": ({"repeats": True}, 0.25),
    "and the node is dropped": ({"drops": True}, 0.25),
}
LEADS = (300.0, 600.0, 3600.0)


def variant(get: Get, saves: str, lead: float, words: str, alarms: float) -> Estimate:
    settings, least_gap = VARIANTS[words]
    predictor = FailurePredictor(
        recall=0.5, mean_lead_seconds=lead, false_alarms_per_gpu_day=alarms, **settings
    )
    return get(a_job(BIG, saves, predictor, least_gap=least_gap)).gain(get(a_job(BIG, saves)))


def _variants(get: Get) -> Table:
    rows: list[dict[str, Cell]] = []
    for lead, words in product(LEADS, VARIANTS):
        rows.append({"Mean lead": f"{lead / 60:.0f} min", "A warning": words})
        for saves, (alarms, rate) in product(SAVES, FALSE_ALARM_RATES.items()):
            rows[-1][f"{saves}, {alarms}"] = variant(get, saves, lead, words, rate)
    return Table.of(
        "variants",
        f"Gain (points of ETTR) of a recall of 0.5 on {BIG:,} GPUs, by what a warning does",
        rows,
        notes=[
            "A false alarm lasts as long as a warning comes early: the predictor cannot tell "
            "them apart. A node that is dropped has a substitute at once; the restart is paid.",
        ],
        grouped=True,
    )


def ways(size: int) -> dict[str, FleetJob]:
    """Improvements of a big fleet, one at a time."""
    best = FailurePredictor(recall=0.9)

    def job(predictor: FailurePredictor | None = None, **settings: Any) -> FleetJob:
        return a_job(size, "asynchronous", predictor, **one_percent(size, **settings))

    return {
        "synchronous saves, restart 600 s, waits": a_job(size, "synchronous", **one_percent(size)),
        "asynchronous saves": job(),
        "asynchronous, recall 0.9, no false alarms": job(best),
        "asynchronous, today's predictor": job(TODAY),
        "asynchronous, shrinks": job(shrinks=True),
        "asynchronous, restart 300 s": job(restart_seconds=300.0),
        "asynchronous, restart 60 s": job(restart_seconds=60.0),
        "asynchronous, restart 60 s, shrinks, recall 0.9": job(
            best, restart_seconds=60.0, shrinks=True
        ),
    }


def _where_it_goes(get: Get) -> Table:
    shown = ("lost", "saving", "restarting", "waiting", "slow")
    rows: list[tuple[Cell, ...]] = []
    for words, job in ways(BIG).items():
        shares = (100 * float(get(job).shares_S[name].mean()) for name in shown)
        rows.append((words, percent(get(job).ettr), *shares))
    return Table(
        "where_it_goes",
        f"Where the time of {BIG:,} GPUs goes (% of the time on the clock)",
        ("What is done | ETTR", *(f"{name.capitalize()}:1" for name in shown)),
        rows,
        notes=[
            "Lost: computed and rolled back. Waiting: for a node. Slow: computing with fewer "
            "nodes, the part that is missing. One spare to 100 nodes, back after 24 h."
        ],
    )


def shrink_jobs(size: int, share: float | None) -> dict[str, FleetJob]:
    """How a job that is short of nodes goes on; `share` of spares, None for always one."""
    spares = {"num_spares": None if share is None else round(share * size / 8)}
    settings = one_percent(size) | spares
    hows: dict[str, dict[str, Any]] = {"waits": {}, "shrinks": {"shrinks": True}}
    hows["shrinks, grows only at failures"] = {"shrinks": True, "grows": False}
    return {how: a_job(size, "asynchronous", **settings, **new) for how, new in hows.items()}


SPARES = {"none": 0.0, "1 %": 0.01, "always one": None}


def _shrinking(get: Get) -> Table:
    rows = [
        {"GPUs": f"{size:,}", "Spares": spares}
        | {how: percent(get(job).ettr) for how, job in shrink_jobs(size, share).items()}
        for size, (spares, share) in product(SIZES[1:], SPARES.items())
    ]
    return Table.of(
        "shrinking",
        "ETTR (%) with spares and without, asynchronous saves, no warnings",
        rows,
        notes=["A node that failed is back after 24 h. Growing costs a restart after a save."],
        grouped=True,
    )


def _rates(get: Get) -> Table:
    rows: list[tuple[Cell, ...]] = []
    cases = [(name, rate, 1.0) for name, rate in RATES.items()] + [
        ("RSC-1, in bursts (Weibull 0.7)", RATES["RSC-1"], 0.7)
    ]
    for name, rate, shape in cases:
        settings: dict[str, Any] = {"failures_per_node_day": rate, "weibull_shape": shape}
        base = a_job(BIG, "asynchronous", **settings)
        today = get(a_job(BIG, "asynchronous", TODAY, **settings))
        all_told = get(a_job(BIG, "asynchronous", FailurePredictor(recall=1.0), **settings))
        rows.append(
            (name, 1000 * rate, base.fleet.seconds_between_failures / 3600,
             percent(get(base).ettr), all_told.gain(get(base)), today.gain(get(base)))
        )  # fmt: skip
    return Table(
        "rates",
        f"{BIG:,} GPUs at published failure rates, asynchronous saves",
        "Rate of | Failures a 1000 node-days | Hours between failures:1 | "
        "ETTR (%), Young/Daly | Gain of recall 1, no false alarms | Gain of today's predictor",
        rows,
        notes=[
            "RSC-1, RSC-2: arXiv 2410.21680. Llama 3 405B: 419 unexpected interruptions in 54 days "
            "on 16,384 GPUs (arXiv 2407.21783); both read in secondary copies. Bursts: the time "
            "between failures of a large system is Weibull of shape 0.7 to 0.8 (Schroeder and "
            "Gibson, DSN 2006).",
        ],
    )


def _checks(get: Get) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for size, saves in product(SIZES, SAVES):
        job = a_job(size, saves)
        mtbf, interval = job.fleet.seconds_between_failures, job.saves.interval_seconds or 0.0
        blocking, restart = job.saves.blocking_seconds, job.fleet.restart_seconds
        exact = 100 * exact_ettr(
            mtbf=mtbf, interval=interval, blocking=blocking,
            durable=job.saves.durable_seconds, restart=restart,
        )  # fmt: skip
        published = 100 * expected_ettr(
            interval, failures_per_hour=3600 / mtbf, save_seconds=blocking, restart_seconds=restart
        )
        found = percent(get(job).ettr)
        apart = [100 * (found.point / form - 1) for form in (exact, published)]
        rows.append((f"{size:,}", saves, found, exact, apart[0], published, apart[1]))
    return Table(
        "checks",
        "The simulation against what can be computed (ETTR in %, a node is always there)",
        "GPUs | Saves | Simulated:3 | Exact:3 | apart (%):3 | arXiv 2410.21680:3 | apart (%):3",
        rows,
        notes=[
            "Exact: renewal theory, `studies.fleet.closed_form`. The published form is of first "
            "order in the failure rate, and counts an asynchronous save as durable at once.",
        ],
        grouped=True,
    )
