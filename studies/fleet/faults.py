"""`python -m studies.fleet faults FILE`: repairs and repeated failures of a recorded fleet."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from studies.common.table import Table, percent
from studies.fleet.cost import a_job, measure, one_percent
from studies.fleet.cost_report import PACKAGES
from studies.fleet.job_settings import DAY, FleetJob
from studies.fleet.writing import write

NAME = "faults"
HELP = "the value of spares and shrinking with the repairs and repeated failures of a trace"
OUT = Path("studies", "fleet", "results", "faults")
#: A node that fails again within so many days of its repair has relapsed.
WINDOW_DAYS = 7.0
#: Repairs take up to months: shorter jobs would end before they are short of nodes.
CLOCK_DAYS = 120.0
CASES = ("24 h", "recorded", "and relapses")
FLEET_SIZES, SPARE_SHARES, NUM_SEEDS = (512, 2048, 16_384), (0.01, 0.02, 0.04, 0.06), 8


def read_faults(path: Path) -> dict[str, Any]:
    """The settings of a `Fleet` that a trace as InfiniteHBD's has: repairs and relapses, seconds.

    Overlapping faults of a node are one, to the first end. The share is of the repaired nodes that
    are followed for `WINDOW_DAYS`. Raises ValueError for files without repairs or relapses.
    """
    try:
        rows = [(float(event["event_time"]), event["event_type"] == "fault_start", event["node_id"])
                for event in json.loads(path.read_bytes())]  # fmt: skip
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: no list of event_time, event_type, node_id: {error!r}") from None
    repairs, gaps, followed, last = [], [], 0, max((row[0] for row in rows), default=0.0)
    begun: dict[str, float] = {}
    back: dict[str, float] = {}
    # Stable: a fault may end at the time at which it starts.
    for time, starts, node in sorted(rows, key=lambda row: row[0]):
        if starts and node not in begun:
            begun[node] = time
            if time - back.get(node, -inf) <= WINDOW_DAYS:
                gaps.append((time - back[node]) * DAY)
        elif not starts and node in begun:
            repairs.append((time - begun.pop(node)) * DAY)
            back[node] = time
            followed += time <= last - WINDOW_DAYS
    if not gaps or followed <= len(gaps):
        raise ValueError(f"{path}: {len(repairs)} repairs, {len(gaps)} relapses: too few")
    share = len(gaps) / followed
    return {"repairs": tuple(repairs), "relapse_gaps": tuple(gaps), "relapse_share": share}


def cases(trace: dict[str, Any], size: int, share: float) -> list[FleetJob]:
    """Three kinds of repairs (assumed, of the trace, with relapses), each waiting and shrinking."""
    settings, days = one_percent(size, num_spares=round(share * size / 8)), CLOCK_DAYS * DAY
    base = replace(a_job(size, "asynchronous", **settings), work_seconds=days, longest_seconds=days)
    news: tuple[dict[str, Any], ...] = ({}, {"repairs": trace["repairs"]}, trace)
    fleets = [replace(base.fleet, shrinks=how, **new) for new in news for how in (False, True)]
    return [replace(base, fleet=fleet) for fleet in fleets]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="FILE", help="fault_trace.json of InfiniteHBD")


def run(options: argparse.Namespace) -> int:
    trace = read_faults(options.trace)
    jobs = {case: cases(trace, *case) for case in product(FLEET_SIZES, SPARE_SHARES)}
    found = measure([job for row in jobs.values() for job in row], NUM_SEEDS, options.jobs)
    days_R = np.array(trace["repairs"]) / DAY
    notes = [
        f"Asynchronous saves, no warnings, failures as on RSC-1, {CLOCK_DAYS:g} days that begin "
        "with all nodes. With relapses as many nodes fail in all: first failures are fewer.",
        f"{options.trace.name}: {len(days_R)} repairs, median {np.median(days_R):.2f} days, mean "
        f"{days_R.mean():.1f}; {100 * trace['relapse_share']:.0f} % of the repaired nodes fail "
        f"again within {WINDOW_DAYS:g} days.",
    ]
    made = Table(
        NAME,
        "ETTR (%) with assumed repairs, with recorded ones, and with nodes that fail again",
        ("GPUs | Spares", *(f"{what}, {how}" for what in CASES for how in ("waits", "shrinks"))),
        [(f"{size:,}", f"{100 * share:.0f} %", *(percent(found[job].ettr) for job in row))
         for (size, share), row in jobs.items()],
        notes,
        grouped=True,
    )  # fmt: skip
    digest = hashlib.sha256(options.trace.read_bytes()).hexdigest()
    write(options.out, [made], {}, {"sha256": digest, "seeds": NUM_SEEDS}, PACKAGES)
    return 0
