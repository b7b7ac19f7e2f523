"""Views of the laboratory's runs: what is left out is gone, and the truth is the same."""

from __future__ import annotations

import pytest

from rmetric.evaluation.protocols import alerts_of
from rmetric.evaluation.traces import trace
from studies.detector_benchmark.cases import Cases
from studies.detector_benchmark.data_sets import DataSet
from studies.detector_benchmark.views import (
    DETECTORS,
    FIRST,
    VIEWS,
    measured,
    results_of,
    seen_as,
    table,
)
from tests.studies.benchmark.runs import ONSET, made_run, rising

RUNS = [
    made_run("control"),
    made_run("rises", "fault", failure=80, training_loss=rising(ONSET)),
    made_run("announced", "benign"),
]


@pytest.mark.parametrize("title", VIEWS)
def test_a_view_keeps_its_signals_and_steps(title):
    keep, every = VIEWS[title]
    for run in RUNS:
        seen = seen_as(run, keep, every)
        assert [r.step for r in seen.records] == [
            r.step for r in run.records if r.step % every == 0
        ]
        factor = 0.03 if "0.03" in title else 1.0
        for ours, theirs in zip(seen.records, run.records[every - 1 :: every], strict=True):
            assert ours.training_loss == pytest.approx(theirs.training_loss * factor)
            shown = {"gradient_norm": "norm", "validation_loss": "validation"}
            for name, word in shown.items():
                kept = "all signals" in title or word in title
                assert getattr(ours, name) == (getattr(theirs, name) if kept else None)


def test_each_view_has_a_row_for_each_detector():
    cases = Cases.of(RUNS, [run.id for run in RUNS])
    data = DataSet(name="lab", title="made", runs=RUNS, cases=cases, group="runs", inputs={})
    results = results_of(data, measured(data), FIRST)
    assert results["runs"] == {"all": 3, "failed": 1, "benign": 1, "control": 1}
    shown = table(results)
    assert len(shown.rows) == len(VIEWS) * len(DETECTORS)
    found = results["views"]["training loss"]["calibrated"]
    assert (found["hits"], found["control"]) == (1, 0)
    traces = [trace("calibrated", seen_as(run, *VIEWS["training loss"])) for run in RUNS]
    assert alerts_of(cases.windows, traces).first[1] < 80
