"""The verdicts and the plot, from the committed logs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from rmetric.evaluation import Trace, trace
from rmetric.logs import read_log
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.style import TEXT_WIDTH, style
from studies.case_study.plot import plot_twins
from studies.case_study.report import verdict

RESULTS = Path(__file__).resolve().parents[3] / "results/case_study_cpu_tiny"


@pytest.fixture(scope="module")
def scored() -> dict[str, ScoredRun]:
    runs = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))["runs"]
    return {n: score_run(read_log(RESULTS / f"{run['id']}.jsonl")) for n, run in runs.items()}


@pytest.fixture(scope="module")
def calibrated(scored) -> dict[str, Trace]:
    return {name: trace("calibrated", run.run) for name, run in scored.items()}


def panels(figure: Figure, label: str) -> list:
    return [axes for axes in figure.axes if axes.get_ylabel() == label]


def test_the_plot_has_the_calibrated_score_its_threshold_and_its_first_alarm(scored, calibrated):
    with style():
        figure = plot_twins(scored, calibrated)
    of_calibrated = figure.axes[-len(scored) :]  # the lowest row, a column for each run
    assert len(figure.axes) == 3 * len(scored)
    assert panels(figure, "calibrated") == of_calibrated[:1]
    for axes, name in zip(of_calibrated, scored, strict=True):
        said = calibrated[name]
        curve, threshold, marker, *_ = axes.lines
        assert np.array_equal(curve.get_ydata(), said.scores, equal_nan=True)
        assert set(threshold.get_ydata()) == {1.0}
        firsts = [] if said.first_alert is None else [said.first_alert]
        assert list(marker.get_xdata()) == firsts
        shaded = axes.collections[0].get_paths()  # one interval in a run with a fault
        assert len(shaded) == len(firsts)
        low, high = axes.get_ylim()
        assert low < 0 < 1 < np.nanmax(said.scores) < high or np.nanmax(said.scores) < 1 < high
    assert len({axes.get_ylim() for axes in of_calibrated}) == 1
    sizes = [text.get_fontsize() for axes in figure.axes for text in (
        axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *axes.get_xticklabels(),
        *axes.get_yticklabels(), *figure.legends[0].get_texts(),
    )]  # fmt: skip
    assert min(sizes) >= 7.0  # points, at the width that it is printed at
    assert figure.get_size_inches()[0] == TEXT_WIDTH


ONSET = 200


@pytest.mark.parametrize(
    ("failure", "first", "said"),
    [
        (230, None, "missed"),
        (None, None, "no alarm"),
        (230, 199, "199: false alarm"),
        (230, 200, "200: 30 steps ahead"),
        (230, 229, "229: 1 step ahead"),
        (230, 230, "230: too late"),
        (None, 199, "199: false alarm"),
        (None, 200, "200: on a fault that was absorbed"),
    ],
)
def test_the_verdict_is_that_of_the_causal_rule(failure, first, said):
    run = {"onset_step": ONSET, "failure_step": failure}
    assert verdict(run, first) == said
    # Without a fault each alarm is false, also where the run fails by itself.
    control = verdict(run | {"onset_step": None}, first)
    assert control == (said if first is None else f"{first}: false alarm")
