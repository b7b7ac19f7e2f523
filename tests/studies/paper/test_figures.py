"""The figures: what they are drawn from, and the script that writes them."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

import generate_all_figures
from rmetric.evaluation import evaluate, read_study, trace_all
from rmetric.metric import RMetricConfig
from rmetric.records import Record, Run, Truth
from rmetric.reporting.style import COLUMN_WIDTH, LEAST_POINTS, TEXT_WIDTH, style
from rmetric.simulation import FAULTS, RunSpec
from rmetric.simulation.study import run_study
from studies.paper.figures import build_figures, diagram, diagrams, dot_version
from studies.paper.figures.diagram import by_columns, draw
from studies.paper.figures.example_runs import pick_examples
from studies.paper.figures.failure_process import MECHANISM, failure_process, name_of
from studies.paper.figures.lead_times import failures
from studies.paper.figures.threshold_curves import DETECTORS_NEEDED, THRESHOLDS, curves
from tests.studies.paper.small_study import Result, run_script

ROOT = Path(__file__).resolve().parents[3]
FIGURES = (
    *("figure1_system", "figure2_failure_process", "figure3_example_runs"),
    *("figure4_thresholds", "figure5_lead_times"),
)
#: Architecture, fault and severity of small runs that end in every way there is.
RUNS = (
    ("Llama-3-8B", "NONE", None),
    ("Llama-3-8B", "LR_SPIKE", 3),
    ("Llama-3-8B", "LR_SPIKE", 60),
    ("Mistral-7B", "LR_SPIKE", 60),
    ("Mistral-7B", "GRADIENT_EXPLOSION", 1e39),
    ("Llama-3-8B", "EXPERT_FAILURE", 4),
    ("GPT-4-MoE", "EXPERT_FAILURE", 4),
    ("Llama-3-8B", "NODE_FAILURE", 500),
    ("Llama-3-8B", "DOMAIN_SHIFT", 0.2),
)


def run(logs: Path, folder: Path) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing letter or an empty axis is only warned of
        return run_script(generate_all_figures.main, logs, folder)


def specs(runs=RUNS):
    return [
        RunSpec(
            experiment_id=f"{architecture}_{fault}_{severity}",
            architecture=architecture,
            fault=fault,
            severity=severity,
            onset_step=150,
            total_steps=300,
            evaluate_every=10,
        )
        for architecture, fault, severity in runs
    ]


def write_logs(folder: Path, modes=("FULL_METRIC",), runs=RUNS) -> Path:
    for _ in run_study(specs(runs), modes, folder, num_processes=1):
        pass
    return folder


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    return write_logs(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def drawn(logs, tmp_path_factory) -> Result:
    style_before = dict(matplotlib.rcParams)
    result = run(logs, tmp_path_factory.mktemp("figures") / "new" / "folder")
    assert dict(matplotlib.rcParams) == style_before
    return result


@pytest.fixture(scope="module")
def study(logs):
    return read_study(logs)


@pytest.fixture(scope="module")
def traces(study):
    return {name: trace_all(name, study.reference) for name in DETECTORS_NEEDED}


def test_it_writes_every_figure_in_both_forms_and_says_what_was_drawn_from_what(drawn, study):
    assert drawn.code == 0, drawn.err
    assert f"only {len(RUNS)} runs, of which 5 failed" in drawn.err
    files = {path.name for path in drawn.folder.iterdir()}
    assert files == {f"{n}.{kind}" for n in FIGURES for kind in ("pdf", "png")} | {
        "provenance.json", "README.md",
    }  # fmt: skip
    for name in FIGURES:  # ready to print, and without a date
        content = (drawn.folder / f"{name}.pdf").read_bytes()
        assert content.startswith(b"%PDF")
        assert b"/FontFile2" in content
        assert not {word for word in (b"/Type3", b"/CreationDate") if word in content}
        with Image.open(drawn.folder / f"{name}.png") as image:
            assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
            assert "Software" not in image.info
    provenance = json.loads((drawn.folder / "provenance.json").read_text())
    assert tuple(provenance["captions"]) == FIGURES
    assert provenance["logs"]["sha256"] == study.digest
    assert provenance["versions"]["matplotlib"] == matplotlib.__version__
    for example in pick_examples(study.reference):
        assert example.run.id in provenance["captions"]["figure3_example_runs"]


def test_the_same_logs_give_the_same_bytes_in_any_process(drawn, logs):
    provenance = drawn.folder / "provenance.json"
    # Results that are the same keep the commit that made them first.
    provenance.write_text(re.sub('"commit": .*?,', '"commit": "a1",', provenance.read_text()))
    before = drawn.bytes_of()
    command = [sys.executable, "generate_all_figures.py", "--logs", logs, "--out", drawn.folder]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert drawn.bytes_of() == before


def test_without_graphviz_all_are_drawn_and_one_line_says_what_to_install(
    drawn, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    logs = write_logs(tmp_path, ("FULL_METRIC", "LAMBDA_ONLY", "SIGMA_ONLY", "DELTA_L_ONLY"))
    without = run(logs, tmp_path / "figures")
    assert without.code == 0
    assert without.err.count("apt-get install graphviz") == 1
    assert without.bytes_of().keys() == drawn.bytes_of().keys()
    # Nor do the ablations' own logs change a figure: theirs are the same runs.
    assert without.bytes_of(*FIGURES[2:]) == drawn.bytes_of(*FIGURES[2:])


def test_places_that_are_kept_need_no_graphviz(study, tmp_path, monkeypatch):
    system, _ = diagrams(study)
    layout = by_columns(system)
    layout = replace(layout, height=layout.height + 1)
    monkeypatch.setattr(diagram, "PLACED", tmp_path / "placed.json")
    placed = {diagram.digest(system): {"layout": asdict(layout)}}
    diagram.PLACED.write_text(json.dumps(placed))
    with style():
        _, _, first = next(build_figures(study, with_dot=False))
        assert first.get_figheight() == draw(system, layout).get_figheight()
        assert first.get_figheight() > draw(system, by_columns(system)).get_figheight()


def test_a_cut_log_is_named_and_left_out_though_no_failure_remains(tmp_path):
    logs = write_logs(tmp_path, runs=RUNS[:3]) / "logs_FULL_METRIC"
    cut = logs / f"{specs()[2].experiment_id}.jsonl"
    cut.write_bytes(cut.read_bytes()[:-300])
    result = run(tmp_path, tmp_path / "figures")
    assert result.code == 1
    assert result.err.count(cut.name) == 1
    assert "only 2 runs, of which 0 failed" in result.err
    assert set(FIGURES) < {path.stem for path in result.folder.iterdir()}


def texts_drawn(figure) -> list[tuple[Text, Bbox]]:
    """Every text that reaches the paper, and the room it takes."""
    drawn = []

    def draw(self, renderer):
        if self.get_visible() and self.get_text().strip():
            drawn.append((self, self.get_window_extent(renderer)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", draw)
        FigureCanvasAgg(figure).draw()
    return drawn


def test_what_was_not_logged_has_a_word_in_the_legend(logs, study):
    without = read_study(logs)
    for run in without.reference:
        run.records[:] = [replace(record, events=None) for record in run.records]
    for name, label in (
        ("figure3_example_runs", "n(λ), not logged"),
        ("figure4_thresholds", "R-Metric, λ only: not logged"),
    ):
        assert label in words_of(name, without)
        assert not any("logged" in words for words in words_of(name, study))


def words_of(name, study):
    with style():
        figures = build_figures(study, with_dot=False)
        figure = next(figure for each, _, figure in figures if each == name)
    return [text.get_text() for text in figure.findobj(Text)]


@pytest.mark.parametrize("with_dot", [False, True])
def test_no_text_is_small_or_covers_another_or_leaves_the_page(study, with_dot):
    """A figure is printed without scaling: it is as wide as one column, or as both."""
    if with_dot and dot_version() is None:
        pytest.skip("Graphviz is not installed")
    with style():
        for name, _, figure in build_figures(study, with_dot=with_dot):
            assert figure.get_figwidth() in (pytest.approx(COLUMN_WIDTH), pytest.approx(TEXT_WIDTH))
            texts = texts_drawn(figure)
            assert len(texts) > 10
            page = figure.bbox.padded(1)
            for text, room in texts:
                assert text.get_fontsize() >= LEAST_POINTS, (name, text)
                assert page.contains(room.x0, room.y0), (name, text)
                assert page.contains(room.x1, room.y1), (name, text)
            for (text, room), (other, taken) in combinations(texts, 2):
                wide = min(room.x1, taken.x1) - max(room.x0, taken.x0)
                high = min(room.y1, taken.y1) - max(room.y0, taken.y0)
                assert min(wide, high) < 1, (name, text, other)


#: How runs may have gone, also as no log has shown yet.
truths = st.builds(
    Truth,
    fault=st.sampled_from(["NONE", "NEW_FAULT", *MECHANISM]),
    benign=st.booleans(),
    applicable=st.booleans(),
    outcome=st.sampled_from(["healthy", "absorbed", "not_applicable", "failed"]),
    failure_kind=st.sampled_from([None, "degraded", "non_finite", "crashed"]),
)


@given(st.lists(truths, min_size=1, max_size=30))
def test_as_many_runs_leave_a_box_as_enter_it(listed):
    diagram = failure_process([Run(id=str(i), records=[], truth=t) for i, t in enumerate(listed)])
    entering, leaving = Counter(), Counter()
    for edge in diagram.edges:
        leaving[edge.tail] += int(edge.label)
        entering[edge.head] += int(edge.label)
    assert leaving["all"] == len(listed)
    assert sum(entering[end] for end in diagram.ends) == len(listed)
    for name in set(diagram.nodes) - {"all", *diagram.ends}:
        assert entering[name] == leaving[name]
    ends = Counter(name_of(truth) for truth in listed)
    assert ends == {end: entering[end] for end in diagram.ends}


def test_every_fault_has_its_mechanism_and_each_end_and_a_benign_change_one_example(study):
    assert set(MECHANISM) == set(FAULTS) - {"NONE"}
    kinds = [example.kind for example in pick_examples(study.reference)]
    assert kinds == [
        "healthy", "absorbed", "degraded", "diverged", "non_finite", "lost_worker",
        "benign change",
    ]  # fmt: skip


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms())
def test_the_example_is_the_middle_one_whatever_the_order(delays, shuffled: random.Random):
    runs = [
        Run(
            id=f"{i:02d}",
            records=[],
            truth=Truth(
                fault="LR_SPIKE", onset_step=100, outcome="failed", failure_kind="diverged",
                failure_step=100 + delay,
            ),
        )
        for i, delay in enumerate(delays)
    ]  # fmt: skip
    shuffled.shuffle(runs)
    [example] = pick_examples(runs)
    delay = delays[int(example.run.id)]
    assert delay == sorted(delays)[(len(delays) - 1) // 2]
    below = sum(other < delay for other in delays)
    assert below <= (len(delays) - 1) // 2 < below + delays.count(delay)


@pytest.mark.parametrize("protocol", ["published", "causal"])
def test_at_its_own_threshold_a_curve_meets_its_operating_point(study, traces, protocol):
    at = THRESHOLDS.index(RMetricConfig.simulation().threshold)
    for name, curve in curves(study.reference, traces, protocol).items():
        assert curve.sweep.hits[at] == curve.operating.hits, name
        assert curve.sweep.false_alarms[at] == curve.operating.false_alarms, name
        assert curve.sweep.f1[at] == pytest.approx(curve.operating.f1.point), name
        # By the published rule a higher threshold never finds more.
        assert protocol != "published" or curve.sweep.hits.is_monotonic_decreasing
    highest = max(trace.scores.max() for trace in traces["r_metric"])
    assert min(THRESHOLDS) == 0
    assert highest <= max(THRESHOLDS) == pytest.approx(1.28)  # the authors' weights add up to it


def test_leads_are_those_of_the_protocols(study, traces):
    found = failures(study.reference, traces["r_metric"])
    assert len(found) == sum(run.truth.failed for run in study.reference) == 5
    for protocol in ("published", "causal"):
        scores = evaluate(study.reference, traces["r_metric"], protocol)
        leads = found[protocol].dropna()
        assert len(leads) == scores.hits
        if len(leads):
            assert leads.mean() == pytest.approx(scores.lead_steps.point)
    for detector in traces.values():
        found = failures(study.reference, detector)
        for leads in (found.causal.dropna(), found.any_alert.dropna()):
            assert leads.between(0, found.time_left[leads.index], inclusive="right").all()
        first = found[found.causal.notna()]
        assert (first.causal == first.published).all()
        assert (first.causal == first.any_alert).all()


def test_a_failure_without_a_known_onset_has_no_time_left_and_is_left_out():
    truth = Truth(fault="LR_SPIKE", outcome="failed", failure_kind="?", failure_step=40)
    unknown = Run(id="r", records=[Record(step=s, validation_loss=2.0) for s in (10, 20, 30)])
    unknown.truth = truth
    assert failures([unknown], trace_all("r_metric", [unknown])).empty


# docs/simulator.md, from fewer and shorter runs than the real one


@pytest.fixture(scope="module")
def script():
    path = ROOT / "docs" / "make_simulator_figure.py"
    specification = importlib.util.spec_from_file_location("make_simulator_figure", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.REPETITIONS, module.ONSET, module.STEPS = 1, 150, 300
    module.MULTIPLES, module.WORKERS, module.SETTLED = (1, 40), (2, 32), 100
    return module


def test_the_script_draws_the_figure(script, tmp_path):
    assert script.main(["--out", str(tmp_path / "new")]) == 0
    with Image.open(tmp_path / "new" / "simulator.png") as image:
        assert image.width == pytest.approx(300 * TEXT_WIDTH, abs=1)
        assert "Software" not in image.info


@given(st.floats(0.1, 1000), st.floats(0.05, 2))
def test_the_fit_finds_the_power_it_is_shown(script, coefficient, exponent):
    tokens = np.geomspace(1e6, 1e10, 50)
    found = script.power_law(tokens, coefficient / tokens**exponent)
    assert found == pytest.approx((coefficient, exponent), rel=1e-6)
