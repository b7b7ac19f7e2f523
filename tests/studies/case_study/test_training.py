"""The case study as a whole, on a model that trains in a second."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rmetric.evaluation import PROTOCOLS
from rmetric.logs import read_log
from rmetric.monitor.step_recorder import Hardware
from rmetric.records import Record
from rmetric.replay.scored_run import score_run
from rmetric.reporting.page import trace_of_r_metric
from rmetric.reporting.replay_report import replay_logs, verdicts
from rmetric.telemetry.reading import Reading
from run_case_study import Training, train
from studies.case_study.bundled import write_examples
from studies.case_study.data import Data, make_blocks, read_rows
from studies.case_study.faults import faults_of
from studies.case_study.models import load_model, load_tokenizer, read_config
from studies.case_study.plan import Recipe
from studies.case_study.settings import Settings
from studies.case_study.twins import NoHardware
from tests.studies.case_study.runs import (
    LASTS,
    ONSET,
    STEPS,
    mini,
    run,
    write_mini_model,
)

ROOT = Path(__file__).parents[3]
CONTROL, FAULT = "model_NONE_s0.jsonl", "model_LR_SPIKE_s0.jsonl"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums must come in one order, and a model this small gains nothing from two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_mini_model(tmp_path_factory.mktemp("mini") / "model")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    write_examples(path, 120)
    return path


@pytest.fixture(scope="module")
def study(model, dataset, tmp_path_factory) -> Path:
    """The output of a whole study: control and fault."""
    out = tmp_path_factory.mktemp("study") / "out"
    result = run(*mini(model, dataset, out))
    assert result.code == 0, result.err
    return out


def measured(path: Path) -> list[Record]:
    """The records of a log without clock and memory in use, which no two runs share."""
    clock = dict.fromkeys(
        ["time", "memory", *(n for n in Record.__slots__ if n.endswith("_seconds"))]
    )
    return [replace(record, **clock) for record in read_log(path).records]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_everything_that_is_promised_is_there_and_nothing_else(study):
    assert sorted(path.name for path in study.iterdir()) == sorted(
        ["summary.json", "results.csv", "case_study.png", "case_study.pdf", "claims.md",
         "case_study.html", CONTROL, FAULT,
         *(log.replace("jsonl", "html") for log in (CONTROL, FAULT))]
    )  # fmt: skip


def test_the_twins_are_equal_to_the_last_bit_before_the_fault_and_not_after(study):
    control, fault = measured(study / CONTROL), measured(study / FAULT)
    assert len(control) == len(fault) == STEPS
    assert control[: ONSET - 1] == fault[: ONSET - 1]
    for before, after in zip(control[ONSET - 1 :], fault[ONSET - 1 :], strict=True):
        assert before != after


def test_the_fault_is_the_learning_rate_times_fifteen_while_it_acts(study):
    rates = {r.step: r.learning_rate for r in read_log(study / FAULT).records}
    twin = {r.step: r.learning_rate for r in read_log(study / CONTROL).records}
    for step, rate in rates.items():
        factor = 15 if ONSET <= step < ONSET + LASTS else 1
        assert rate == pytest.approx(factor * twin[step])


def test_a_run_from_the_start_is_the_run_that_branched_off(study, model, dataset, tmp_path):
    result = run(*mini(model, dataset, tmp_path / "out", "--no-control"))
    assert result.code == 0, result.err
    assert measured(tmp_path / "out" / FAULT) == measured(study / FAULT)
    assert list(summary(tmp_path / "out")["runs"]) == ["LR_SPIKE"]


def test_the_logs_replay_with_the_very_scores_that_they_state(study, tmp_path):
    replayed = replay_logs([study / CONTROL, study / FAULT], tmp_path, most_plots=0)
    assert replayed.num_runs == 2
    assert not replayed.failed
    for log in (CONTROL, FAULT):
        notes = json.loads((tmp_path / Path(log).stem / "summary.json").read_text())["notes"]
        assert any(f"equals the logged r_metric at all {STEPS} records" in note for note in notes)


def test_the_summary_says_what_the_evaluation_says_of_the_logs(study):
    for run_of in summary(study)["runs"].values():
        scored = score_run(read_log(study / f"{run_of['id']}.jsonl"))
        truth = scored.run.truth
        assert run_of["outcome"] == truth.outcome
        assert run_of["onset_step"] == truth.onset_step
        for protocol, verdict in verdicts(scored, trace_of_r_metric(scored)).items():
            assert run_of["r_metric"][protocol].items() >= verdict.items()
        assert set(PROTOCOLS) <= set(run_of["r_metric"])
        alerts = [phase["alerts"] for phase in run_of["r_metric"]["alerts"].values()]
        assert sum(alerts) == len(scored.alert_steps)


def test_the_summary_tells_where_it_was_measured_and_what_it_cost(study):
    whole = summary(study)
    assert whole["device"]["kind"] == "cpu"
    assert {"torch", "transformers", "rmetric", "python"} <= set(whole["versions"])
    for run_of in whole["runs"].values():
        cost = run_of["cost"]
        assert 0 < cost["timed_steps"] <= 20
        ratio = cost["seconds_per_step"] / cost["seconds_per_step_without_monitor"]
        assert cost["monitoring_percent"] == pytest.approx(100 * (ratio - 1))
        assert 0 < cost["percent_of_time_inside_monitor_calls"] < 100
        assert run_of["hardware"]["source"] == "no GPU: no hardware events, λ is 0"


def test_a_folder_that_is_taken_is_refused(study, model, dataset):
    before = {path.name: path.read_bytes() for path in study.iterdir()}
    result = run(*mini(model, dataset, study))
    assert result.code == 2
    assert "it holds a case study already; --resume goes on with it" in result.err
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before


def test_resuming_another_study_names_what_differs(study, model, dataset):
    result = run(*mini(model, dataset, study, "--resume", "--seed", "1"))
    assert result.code == 2
    assert "seed is 0 there and 1 here" in result.err
    assert "sha256" not in result.err or "there and" in result.err


def test_resuming_a_finished_study_trains_nothing_and_changes_no_log(study, model, dataset):
    logs = [(study / log).read_bytes() for log in (CONTROL, FAULT)]
    result = run(*mini(model, dataset, study, "--resume"))
    assert result.code == 0, result.err
    assert [(study / log).read_bytes() for log in (CONTROL, FAULT)] == logs


@pytest.mark.slow
def test_a_control_alone_is_completed_by_its_fault_later(study, model, dataset, tmp_path):
    out = tmp_path / "out"
    begun = run(*mini(model, dataset, out, "--control", "--resume"))
    assert begun.code == 0
    assert f"--resume: {out} holds no case study; a new one begins" in begun.err
    assert list(summary(out)["runs"]) == ["control"]
    resumed = run(*mini(model, dataset, out, "--resume"))
    assert resumed.code == 0
    assert "a new one begins" not in resumed.err
    for log in (CONTROL, FAULT):
        assert measured(out / log) == measured(study / log)


@pytest.mark.parametrize("kill_in", [pytest.param(CONTROL, marks=pytest.mark.slow), FAULT])
@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    start, study, model, dataset, tmp_path, kill_in
):
    out = tmp_path / "out"
    options = [str(option) for option in mini(model, dataset, out)]
    killed = start(
        [sys.executable, "-c", KILLED_LATE.format(options=options, log=kill_in)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert killed.wait(timeout=300) == -signal.SIGKILL
    assert (out / "checkpoints").is_dir()
    assert len(measured(out / kill_in)) < STEPS
    result = run(*mini(model, dataset, out, "--resume"))
    assert result.code == 0, result.err
    for log in (CONTROL, FAULT):
        assert measured(out / log) == measured(study / log)
    assert not (out / "checkpoints").exists()
    ours, theirs = summary(out)["runs"], summary(study)["runs"]
    for name in ("control", "LR_SPIKE"):
        assert ours[name]["r_metric"]["alerts"] == theirs[name]["r_metric"]["alerts"]
        assert (
            ours[name]["r_metric"]["first_alert_step"]
            == (theirs[name]["r_metric"]["first_alert_step"])
        )


#: Trains, and is killed like by the system two steps after its third checkpoint.
KILLED_LATE = """
import os, signal, sys, torch
torch.set_num_threads(1)
import run_case_study
from run_case_study import Training
make_step = Training.make_step
def make_step_or_die(self):
    if self.step == 17 and self.monitor and {log!r} == self.monitor.log_path.name:
        os.kill(os.getpid(), signal.SIGKILL)
    make_step(self)
Training.make_step = make_step_or_die
run_case_study.main({options!r})
"""


def test_without_checkpoints_nothing_but_the_results_goes_to_disk(model, dataset, study, tmp_path):
    out = tmp_path / "out"
    result = run(*mini(model, dataset, out, "--checkpoint-every", "0"))
    assert result.code == 0, result.err
    assert measured(out / FAULT) == measured(study / FAULT)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in study.iterdir())


def test_a_nan_that_reaches_the_weights_ends_the_run_as_non_finite(model, dataset, tmp_path):
    out = tmp_path / "out"
    result = run(*mini(model, dataset, out, "--fault", "nan_gradient"))
    assert result.code == 0, result.err
    run_of = summary(out)["runs"]["NAN_GRADIENT"]
    assert (run_of["failure_kind"], run_of["failure_step"]) == ("non_finite", ONSET + 1)
    assert run_of["steps"] == 16  # the next evaluation sees it
    log = (out / f"{run_of['id']}.jsonl").read_text()
    assert '"source":"non_finite"' in log
    assert (out / "case_study.png").stat().st_size > 0


@pytest.mark.parametrize("fault", ["GRADIENT_SCALE", "SECOND_MOMENT_ZEROED", "LABEL_SHUFFLE"])
def test_other_faults_strike_at_their_onset(study, model, dataset, tmp_path, fault):
    out = tmp_path / "out"
    result = run(*mini(model, dataset, out, "--no-control", "--fault", fault))
    assert result.code == 0, result.err
    struck = measured(out / f"model_{fault}_s0.jsonl")
    control = measured(study / CONTROL)
    assert struck[: ONSET - 1] == control[: ONSET - 1]
    assert struck[ONSET].training_loss != control[ONSET].training_loss
    if fault == "GRADIENT_SCALE":  # one of four workers, a hundred times
        norms, usual = struck[ONSET - 1].worker_gradient_norms, control[ONSET - 1]
        assert norms[0] == pytest.approx(100 * usual.worker_gradient_norms[0], rel=1e-4)
        assert norms[1:] == usual.worker_gradient_norms[1:]


def test_each_fault_has_a_run_that_branches_off_the_control(study, model, dataset, tmp_path):
    out = tmp_path / "out"
    result = run(*mini(model, dataset, out), "--fault", "lr_spike,sign_flip_all:2")
    assert result.code == 0, result.err
    runs = summary(out)["runs"]
    assert list(runs) == ["control", "LR_SPIKE", "SIGN_FLIP_ALL-2"]
    assert measured(out / FAULT) == measured(study / FAULT)
    other = measured(out / "model_SIGN_FLIP_ALL-2_s0.jsonl")
    assert other[: ONSET - 1] == measured(study / CONTROL)[: ONSET - 1]
    assert other[ONSET].training_loss != measured(study / CONTROL)[ONSET].training_loss
    assert result.out.rstrip().endswith(summary(out)["sentence"])
    page = (out / "case_study.html").read_text(encoding="utf-8")
    for name, one in runs.items():
        assert name in page
        assert f"{one['id']}.html" in page
        assert (out / f"{one['id']}.html").stat().st_size > 1000
    assert set(summary(out)["seconds"]) == {"of_processor", "set_up", "training", "report"}
    assert str(tmp_path) not in page


@pytest.mark.parametrize("fault", ["", "SIGN_FLIP_ALL"])
def test_the_weights_are_equal_bit_for_bit_with_and_without_the_monitor(
    model, dataset, tmp_path, fault
):
    recipe = Recipe(device="cpu", dtype=torch.float32, lora=False, gradient_checkpointing=False)
    watched = trained(recipe, model, dataset, tmp_path / "a.jsonl", steps=12, fault=fault)
    alone = trained(
        recipe, model, dataset, tmp_path / "b.jsonl", steps=12, fault=fault, monitored=False
    )
    assert len(read_log(tmp_path / "a.jsonl").records) == 12
    assert not (tmp_path / "b.jsonl").exists()
    pairs = zip(watched.model.named_parameters(), alone.model.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        assert torch.equal(one, other), name
    fresh = load_model(str(model), read_config(str(model)), recipe, Settings())
    assert not all(
        torch.equal(p, q)
        for p, q in zip(fresh.parameters(), watched.model.parameters(), strict=True)
    )


# -- the recipes of GPUs, on the processor


def trained(
    recipe: Recipe, model: Path, dataset: Path, log: Path, steps: int = 4, fault: str = "",
    monitored: bool = True, hardware: Hardware | None = None,
) -> Training:  # fmt: skip
    more = {"fault": fault, "fault_step": 5, "fault_steps": 3} if fault else {}
    settings = Settings(
        **more,
        model=str(model), dataset=str(dataset), max_steps=steps, eval_every=1, sequence_length=32,
        eval_sequences=2, learning_rate=3e-3, warm_up=0,
    )  # fmt: skip
    held = make_blocks(read_rows(str(dataset)), "x", load_tokenizer(str(model)), settings)
    data = Data(training=held[0], held_out=held[1], vocabulary=257)
    loaded = load_model(str(model), read_config(str(model)), recipe, settings)
    struck = faults_of(settings)[0] if fault else None
    with torch.random.fork_rng(devices=[]):
        return train(
            loaded, recipe, settings, data, struck, log=log, hardware=hardware, monitored=monitored
        )


class Gpu(NoHardware):
    """Has readings until it is closed, as NVML does."""

    def __init__(self) -> None:
        self.open = True

    def readings(self) -> tuple[Reading, ...]:
        return (Reading(gpu=0, time=1.0, power_watts=300.0),) if self.open else ()

    def close(self) -> None:
        self.open = False


def test_the_readings_are_of_the_time_before_the_hardware_is_closed(model, dataset, tmp_path):
    recipe = Recipe(device="cpu", dtype=torch.float32, lora=False, gradient_checkpointing=False)
    hardware = Gpu()
    training = trained(recipe, model, dataset, tmp_path / "x.jsonl", hardware=hardware)
    assert not hardware.open
    assert training.readings == [{"gpu": 0, "time": 1.0, "power_watts": 300.0}]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lora", [True, False])
def test_every_recipe_trains(dtype, lora, model, dataset, tmp_path):
    recipe = Recipe(device="cpu", dtype=dtype, lora=lora, gradient_checkpointing=lora)
    training = trained(recipe, model, dataset, tmp_path / "x.jsonl")
    assert training.monitor.usable, training.monitor.problem
    weights = {n: p for n, p in training.model.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in weights.values())
    assert all(("lora" in name) is lora for name in weights)
    frozen = [p for p in training.model.parameters() if not p.requires_grad]
    assert all(p.dtype == dtype for p in frozen)
    first, *_, last = read_log(tmp_path / "x.jsonl").records
    assert last.training_loss != first.training_loss
    assert 0 < last.gradient_norm < 100


def test_lower_precision_and_checkpointing_change_the_losses_little(model, dataset, tmp_path):
    def records(name: str, dtype: torch.dtype, *, saving: bool) -> list[Record]:
        recipe = Recipe(device="cpu", dtype=dtype, lora=False, gradient_checkpointing=saving)
        trained(recipe, model, dataset, tmp_path / name)
        return read_log(tmp_path / name).records

    exact = records("exact.jsonl", torch.float32, saving=False)
    coarse = records("coarse.jsonl", torch.float16, saving=False)
    thrifty = records("thrifty.jsonl", torch.float32, saving=True)
    for a, b, c in zip(exact, coarse, thrifty, strict=True):
        assert b.training_loss == pytest.approx(a.training_loss, rel=5e-3)
        assert b.worker_gradient_norms == pytest.approx(a.worker_gradient_norms, rel=5e-2)
        assert c.training_loss == a.training_loss


def test_random_weights_need_no_weights_in_the_folder(model, dataset, tmp_path):
    bare = tmp_path / "model"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((model / name).read_bytes())
    assert run(*mini(bare, dataset, tmp_path / "a")).code == 2
    result = run(*mini(bare, dataset, tmp_path / "b", "--random-weights", "--control"))
    assert result.code == 0, result.err


@pytest.mark.slow
def test_tiny_runs_to_the_end_and_needs_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "run_case_study.py", "--tiny", "--device", "cpu", "--out", tmp_path / "o"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = summary(tmp_path / "o")["runs"]
    assert {name: run["outcome"] for name, run in runs.items()} == {
        "control": "healthy", "LR_SPIKE": "absorbed", "LR_RUNAWAY": "failed"
    }  # fmt: skip
    assert all(run["steps"] == 400 for run in runs.values())
    assert done.stdout.rstrip().splitlines()[-1] == summary(tmp_path / "o")["sentence"]
    seconds = summary(tmp_path / "o")["seconds"]
    assert seconds["of_processor"] < 120
