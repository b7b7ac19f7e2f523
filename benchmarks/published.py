"""The time of 300 published studies in one batch, compared with the exact simulator.

    python benchmarks/published.py

The exact form steps through one run after the other in Python and scores it with the streamed
metric; it is timed on a few studies, alternating with the batch. Processor time, one core. Goal:
300 studies of 180 runs, simulated and scored, in 20 s.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import write_report
from rmetric.evaluation import judge, score
from rmetric.simulation.published import published_specs, simulate_published
from studies.paper.analysis import metric_trace
from studies.paper.anatomy import AUTHORS, PUBLISHED, over_seeds, r_metric

STUDIES, RUNS, TURNS = 300, 180, 3


def exact(seed: int) -> float:
    """F1 of one study by the exact form."""
    runs = list(simulate_published(published_specs()[:RUNS], Random(seed)))
    traces = [metric_trace("r_metric", run, config=AUTHORS) for run in runs]
    return score(judge(runs, traces, "published")).f1.point


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    at_once, one_by_one, means = [], [], []
    for turn in range(TURNS):
        began = time.process_time()
        [found] = over_seeds(PUBLISHED, [r_metric(AUTHORS)], STUDIES)
        at_once.append(time.process_time() - began)
        means.append(float(found.published_f1.mean()))
        began = time.process_time()
        exact(turn)
        one_by_one.append(time.process_time() - began)
    batch_s, study_s = median(at_once), median(one_by_one)
    report = {
        "studies": STUDIES,
        "runs_each": RUNS,
        "batch_s": round(batch_s, 2),
        "exact_s_a_study": round(study_s, 3),
        "ratio": round(STUDIES * study_s / batch_s, 1),
        "mean_f1": round(means[0], 4),
    }
    print(f"{STUDIES} studies of {RUNS} runs: {batch_s:.2f} s (goal 20), mean F1 {means[0]:.3f}")
    print(f"one study by the exact form: {study_s:.2f} s; {report['ratio']} times as long for all")
    print(f"written: results/benchmarks/{write_report('published', report).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
