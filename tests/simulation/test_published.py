"""The published simulator: equal to the authors' logs, and what follows from its equations."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import mean

import pytest

import run_modern_experiments
from rmetric.evaluation import read_study
from rmetric.metric import MODES, PAPER_WEIGHTS, RMetricConfig
from rmetric.records import Run
from rmetric.simulation.published import (
    ACTING,
    LONGEST_FAULT,
    PUBLISHED_FAULTS,
    WITHOUT_EFFECT,
    PublishedDynamics,
    PublishedSpec,
    published_specs,
    simulate_published,
)
from tests.authors_data import needs_authors_logs, seed_1
from tests.studies.paper import small_study

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "logs_FULL_METRIC"
SPECS = published_specs()
ONSET = PublishedDynamics().onset_step
AUTHORS = RMetricConfig.authors_simulator()

#: Step of the first alarm and of the failure, as in the authors' logs of seed 1. The last runs
#: hang on every draw before them.
SEED_1 = {
    "run_005_llama-3-8b_expert_failure_rep5": (300, None),
    "run_037_llama-3-8b_lr_spike_rep1": (2500, 2508),
    "run_043_llama-3-8b_lr_spike_rep7": (300, 2504),
    "run_146_gpt-4-moe_gradient_explosion_rep2": (300, 2507),
    "run_180_gpt-4-moe_none_rep12": (None, None),
    "run_348_gpt-4-moe_lr_spike_rep12": (None, 2502),
    "run_517_gpt-4-moe_lr_spike_rep1": (200, 2503),
    "run_528_gpt-4-moe_lr_spike_rep12": (300, 2507),
    "run_540_gpt-4-moe_none_rep12": (300, None),
    "run_697_gpt-4-moe_lr_spike_rep1": (None, 2505),
    "run_708_gpt-4-moe_lr_spike_rep12": (2500, 2505),
    "run_720_gpt-4-moe_none_rep12": (None, None),
}


@lru_cache(maxsize=4)
def study(seed: int) -> list[Run]:
    return list(simulate_published(SPECS, Random(seed), seed=seed))


@pytest.fixture(scope="module")
def by_option(tmp_path_factory) -> dict[str, list[dict]]:
    """The entries of the 720 logs of `--preset authors_simulator`, by `logs_<MODE>/<name>`."""
    out = tmp_path_factory.mktemp("authors")
    assert run_modern_experiments.main(["--out", str(out), "--preset", "authors_simulator"]) == 0
    return {name: entries_of(log) for name, log in small_study.contents(out).items()}


def entries_of(log: bytes) -> list[dict]:
    """Start, METRICS and end, which the authors' logs have too."""
    entries = [json.loads(line) for line in log.splitlines()]
    return [entry for entry in entries if entry["event"] != "FAULT_INJECTED"]


def first_alarm_and_failure(log: list[dict]) -> tuple[int | None, int | None]:
    _, *rows, last = log
    alarms = [step for step, score in scores_of(rows) if score > AUTHORS.threshold]
    return alarms[0] if alarms else None, failure_of(last)


def scores_of(rows: list[dict]) -> list[tuple[int, float]]:
    return [(row["step"], row["r_metric"]) for row in rows]


def failure_of(last: dict) -> int | None:
    return last["step"] if last["event"] == "EXPERIMENT_FAILURE" else None


@needs_authors_logs
def test_every_r_and_every_failure_of_the_authors_comes_back_to_the_last_bit(by_option):
    theirs = seed_1()
    assert len(theirs) == 720
    assert set(theirs) == set(by_option)
    for name, log in theirs.items():
        (first, *rows, last), (our_first, *our_rows, our_last) = entries_of(log), by_option[name]
        stated, ours = first["config"], our_first["config"]
        shared = stated.keys() & ours.keys()
        assert shared >= {"experiment_id", "METRIC_MODE", "alert_thresholds", "fault_injection"}
        assert {key: stated[key] for key in shared} == {key: ours[key] for key in shared}
        assert scores_of(our_rows) == scores_of(rows)
        assert failure_of(our_last) == failure_of(last)


def test_alarms_and_failures_of_seed_1_are_those_of_the_authors(by_option):
    found = {Path(name).stem: first_alarm_and_failure(log) for name, log in by_option.items()}
    assert {name: found[name] for name in SEED_1} == SEED_1


def test_the_sample_in_the_repository_is_what_the_study_writes(tmp_path):
    last = max(n for n, spec in enumerate(SPECS) if in_sample(spec)) + 1
    assert run_modern_experiments.main(["--out", str(tmp_path), "--limit", str(last)]) == 0
    sample = {path.stem: path.read_bytes() for path in SAMPLE.glob("*_rep1.jsonl")}
    assert set(sample) == {spec.experiment_id for spec in SPECS if in_sample(spec)}
    for name, log in sample.items():
        assert (tmp_path / "logs_FULL_METRIC" / f"{name}.jsonl").read_bytes() == log, name


def test_the_default_is_the_papers_weights_and_a_preset_the_authors(tmp_path):
    """The runs are the same under both; under the preset the first alarms are the authors'."""
    for name, preset in (("paper", []), ("authors", ["--preset", "authors_simulator"])):
        argv = ["--out", str(tmp_path / name), "--limit", "40", *preset]
        assert run_modern_experiments.main(argv) == 0
    ours, theirs = (read_study(tmp_path / name) for name in ("paper", "authors"))
    assert [run.records for run in ours.reference] == [run.records for run in theirs.reference]
    settings = [study.reference[0].config["metric_settings"] for study in (ours, theirs)]
    assert [(s["weights"], s["threshold"], s["variant"]) for s in settings] == [
        (list(PAPER_WEIGHTS), 0.57, "authors_simulator"),
        ([0.0, 0.5, 0.78], 0.57, "authors_simulator"),
    ]
    logs = small_study.contents(tmp_path / "authors")
    found = {Path(name).stem: first_alarm_and_failure(entries_of(logs[name])) for name in logs}
    among_them = list(SEED_1)[:2]
    assert [found[name] for name in among_them] == [SEED_1[name] for name in among_them]


def in_sample(spec: PublishedSpec) -> bool:
    return spec.mode == "FULL_METRIC" and spec.repetition == 1


# -- what follows from the equations


def test_a_run_fails_6_5_steps_after_the_onset_on_average_and_within_15():
    after = [
        run.truth.failure_step - ONSET for seed in (0, 1) for run in study(seed) if run.truth.failed
    ]
    assert mean(after) == pytest.approx(6.5, abs=0.3)
    assert 0 <= min(after) <= max(after) < LONGEST_FAULT


def lone(fault: str, seed: int = 3, **changes) -> Run:
    [run] = simulate_published([replace(SPECS[0], fault=fault, **changes)], Random(seed))
    return run


def test_a_fault_without_effect_leaves_a_healthy_run():
    assert set(PUBLISHED_FAULTS) - set(ACTING) < set(WITHOUT_EFFECT)
    healthy = lone("NONE")
    for fault in WITHOUT_EFFECT:
        run = lone(fault)
        assert run.records == healthy.records
        assert not run.truth.failed
        assert run.truth.applicable == (fault == "NONE")


def test_the_three_faults_that_act_are_one():
    runs = [lone(fault) for fault in ACTING]
    for run in runs[1:]:
        assert run.records == runs[0].records
        assert run.truth.failure_step == runs[0].truth.failure_step


def test_before_its_onset_a_fault_changes_nothing():
    healthy, struck = lone("NONE").records, lone("LR_SPIKE").records
    assert [r.step for r in struck] == list(range(100, ONSET + 1, 100))
    assert struck[:-1] == healthy[: len(struck) - 1]
    assert struck[-1].training_loss > healthy[len(struck) - 1].training_loss


def test_without_a_recipe_the_script_runs_the_published_study(tmp_path, capsys):
    argv = ["--out", str(tmp_path), "--limit", "3", "--jobs", "1"]
    assert run_modern_experiments.main(argv) == 0
    folder = tmp_path / "logs_FULL_METRIC"
    assert f"3 runs, 3 logs in {folder} (0 were there)" in capsys.readouterr().out
    written = small_study.contents(tmp_path)
    assert set(written) == {f"logs_FULL_METRIC/{s.experiment_id}.jsonl" for s in SPECS[:3]}
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert run_modern_experiments.main([*argv, "--jobs", "2"]) == 0
    assert "(3 were there)" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    assert run_modern_experiments.main([*argv, "--seed", "5"]) == 1
    assert "another run (another seed, recipe, preset or version)" in capsys.readouterr().err
    assert small_study.contents(tmp_path) == written


def test_the_whole_study_is_read_back_without_a_word(tmp_path, capsys):
    assert run_modern_experiments.main(["--out", str(tmp_path)]) == 0
    folders = ", ".join(str(tmp_path / f"logs_{mode}") for mode in MODES)
    assert f"720 runs, 720 logs in {folders} (0 were there)" in capsys.readouterr().out
    found = read_study(tmp_path)
    assert (found.num_logs, found.missing, found.skipped) == (720, [], [])
    assert sum(run.truth.failed for run in found.reference) == 72
