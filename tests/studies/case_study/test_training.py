"""The case study as a whole, on a model that trains in a second."""

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import run_case_study
from rmetric.evaluation import PROTOCOLS
from rmetric.logs import read_log
from rmetric.records import Record
from rmetric.replay.scored_run import score_run
from rmetric.reporting.page import trace_of_r_metric
from rmetric.reporting.replay_report import verdicts
from run_case_study import Training, train
from studies.case_study.data import load_data
from studies.case_study.models import Recipe, load_model, load_tokenizer, read_config
from studies.case_study.report import NoHardware, table_of
from studies.case_study.settings import Settings, faults_of
from tests.studies.case_study.runs import ONSET, STEPS, finished, mini, run

ROOT = Path(__file__).parents[3]
CONTROL, FAULT = "model_NONE_s0.jsonl", "model_LR_SPIKE_s0.jsonl"


@pytest.fixture(scope="module")
def study(model, dataset, tmp_path_factory) -> Path:
    """The output of a whole study: control and fault."""
    out = tmp_path_factory.mktemp("study") / "out"
    finished(*mini(model, dataset, out))
    return out


def measured(path: Path) -> list[Record]:
    """The records of a log without clock and memory in use, which no two runs share."""
    clock = ["time", "memory", *(n for n in Record.__slots__ if n.endswith("_seconds"))]
    return [replace(record, **dict.fromkeys(clock)) for record in read_log(path).records]


def losses_of(log: Path) -> tuple[float, float]:
    """Of the first and the last step, whose gradient is neither lost nor as large as its scale."""
    first, *_, last = read_log(log).records
    assert 0 < last.gradient_norm < 100
    return first.training_loss, last.training_loss


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_all_that_is_promised_is_there_and_the_twins_part_to_the_bit_at_the_fault(study):
    files = {"summary.json", "case_study.png", "case_study.pdf", "claims.md", "replayed"}
    assert {path.name for path in study.iterdir()} == files | {CONTROL, FAULT}
    for log in (CONTROL, FAULT):
        assert (study / "replayed" / Path(log).stem / "report.html").stat().st_size > 1000
    assert (study / "replayed/index.html").is_file()
    control, fault = measured(study / CONTROL), measured(study / FAULT)
    assert len(control) == len(fault) == STEPS
    assert control[: ONSET - 1] == fault[: ONSET - 1]
    for before, after in zip(control[ONSET - 1 :], fault[ONSET - 1 :], strict=True):
        assert before != after


def test_the_summary_says_what_the_evaluation_says_of_the_logs_where_and_at_what_cost(study):
    whole = summary(study)
    assert whole["device"]["kind"] == "cpu"
    assert {"torch", "transformers", "rmetric", "python"} <= set(whole["versions"])
    for run_of in whole["runs"].values():
        scored = score_run(read_log(study / f"{run_of['id']}.jsonl"))
        truth = scored.run.truth
        assert run_of["outcome"] == truth.outcome
        assert run_of["onset_step"] == truth.onset_step
        for protocol, verdict in verdicts(scored, trace_of_r_metric(scored)).items():
            assert run_of["r_metric"][protocol].items() >= verdict.items()
        assert set(PROTOCOLS) <= set(run_of["r_metric"])
        alerts = [phase["alerts"] for phase in run_of["r_metric"]["alerts"].values()]
        assert sum(alerts) == len(trace_of_r_metric(scored).alarm_steps)
        cost = run_of["cost"]
        assert 0 < cost["timed_steps"] <= 20
        ratio = cost["seconds_per_step"] / cost["seconds_per_step_without_monitor"]
        assert cost["monitoring_percent"] == pytest.approx(100 * (ratio - 1))
        assert 0 < cost["percent_of_time_inside_monitor_calls"] < 100
        assert run_of["hardware"]["source"] == "no GPU: no hardware events, λ is 0"


def test_a_nan_that_reaches_the_weights_ends_the_run_as_non_finite(model, dataset, tmp_path):
    out = tmp_path / "out"
    finished(*mini(model, dataset, out, "--fault", "nan_gradient"))
    run_of = summary(out)["runs"]["NAN_GRADIENT"]
    assert (run_of["failure_kind"], run_of["failure_step"]) == ("non_finite", ONSET + 1)
    assert run_of["steps"] == 16  # the next evaluation sees it
    log = (out / f"{run_of['id']}.jsonl").read_text()
    assert '"source":"non_finite"' in log
    assert (out / "case_study.png").stat().st_size > 0


def test_each_fault_has_a_run_that_starts_from_the_control(study, model, dataset, tmp_path):
    out = tmp_path / "out"
    faults = "sign_flip_all:2,gradient_scale,label_shuffle,lr_spike"
    result = finished(*mini(model, dataset, out), "--fault", faults)
    runs = summary(out)["runs"]
    assert list(runs) == [
        "control", "SIGN_FLIP_ALL-2", "GRADIENT_SCALE", "LABEL_SHUFFLE", "LR_SPIKE"
    ]  # fmt: skip
    assert measured(out / FAULT) == measured(study / FAULT)  # whatever came between
    control = measured(study / CONTROL)
    for entry in list(runs.values())[1:]:
        faulty = measured(out / f"{entry['id']}.jsonl")
        assert faulty[: ONSET - 1] == control[: ONSET - 1]
        assert faulty[ONSET].training_loss != control[ONSET].training_loss
    # One of four workers, a hundred times.
    norms = measured(out / "model_GRADIENT_SCALE_s0.jsonl")[ONSET - 1].worker_gradient_norms
    usual = control[ONSET - 1].worker_gradient_norms
    assert norms[0] == pytest.approx(100 * usual[0], rel=1e-4)
    assert norms[1:] == usual[1:]
    assert table_of(summary(out)) in result.out
    assert set(summary(out)["seconds"]) == {"of_processor", "set_up", "training"}


def test_only_one_optimiser_is_in_memory_at_a_time(model, dataset, tmp_path, monkeypatch):
    made = []

    def train_alone(*arguments):
        gc.collect()
        assert [ref for ref in made if ref() is not None] == []
        training = train(*arguments)
        made.append(weakref.ref(training.optimizer))
        return training

    monkeypatch.setattr(run_case_study, "train", train_alone)
    finished(*mini(model, dataset, tmp_path / "out"))
    assert len(made) == 2


def test_a_control_that_breaks_down_before_the_onset_ends_the_study(model, dataset, tmp_path):
    result = run(*mini(model, dataset, tmp_path / "out"), "--learning-rate", "1e30")
    assert result.code == 2
    assert "error: the undisturbed run broke down at step 4, before the onset" in result.err


def test_a_run_from_step_1_equals_the_run_from_the_state_before_the_fault(model, dataset, tmp_path):
    settings = {"steps": 12, "recipe": CPU, "model": model, "dataset": dataset}
    control = trained(log=tmp_path / "control.jsonl", **settings)
    options = settings | {"fault": "SIGN_FLIP_ALL"}
    whole = trained(log=tmp_path / "whole.jsonl", **options)
    last = measured(tmp_path / "whole.jsonl")[FIRST - 2 :]
    assert len(last) == 12 - FIRST + 2
    for name in ("continued.jsonl", "again.jsonl"):
        continued = trained(log=tmp_path / name, state=control.state_before_fault, **options)
        assert measured(tmp_path / name) == last
        for weight, ours in whole.weights.items():
            assert torch.equal(ours, continued.weights[weight])


@pytest.mark.parametrize("fault", ["", "SIGN_FLIP_ALL"])
def test_the_weights_are_equal_bit_for_bit_with_and_without_the_monitor(
    model, dataset, tmp_path, fault
):
    watched = trained(CPU, model, dataset, tmp_path / "a.jsonl", steps=12, fault=fault)
    alone = trained(CPU, model, dataset, None, steps=12, fault=fault)
    assert len(read_log(tmp_path / "a.jsonl").records) == 12
    pairs = zip(watched.model.named_parameters(), alone.model.named_parameters(), strict=True)
    for (name, param), (_, other) in pairs:
        assert torch.equal(param, other), name
    fresh = load_model(Settings(model=str(model)), read_config(str(model)), CPU)
    assert not all(
        torch.equal(p, q)
        for p, q in zip(fresh.parameters(), watched.model.parameters(), strict=True)
    )


# -- the recipes of GPUs, on the processor


CPU = Recipe(device="cpu", dtype=torch.float32, lora=False, gradient_checkpointing=False)
FIRST = 5  # step under the fault


def trained(
    recipe: Recipe, model: Path, dataset: Path, log: Path | None, steps: int = 4, fault: str = "",
    state: dict | None = None,
) -> Training:  # fmt: skip
    settings = Settings(
        model=str(model), dataset=str(dataset), max_steps=steps, fault_step=min(FIRST, steps),
        eval_every=1, sequence_length=32, eval_sequences=2, learning_rate=3e-3, warm_up=0,
    )  # fmt: skip
    config = read_config(str(model))
    data = load_data(settings, config, load_tokenizer(str(model)))
    loaded = load_model(settings, config, recipe)
    acting = faults_of(fault, FIRST, 3)[0] if fault else None
    return train(loaded, recipe, settings, data, acting, log, {}, state)


def test_the_source_of_hardware_events_is_closed_with_its_run(
    model, dataset, tmp_path, monkeypatch
):
    class Gpu(NoHardware):
        is_open = True

        def close(self) -> None:
            self.is_open = False

    hardware = Gpu()
    monkeypatch.setattr("studies.case_study.report.hardware_of", lambda device: (hardware, "a GPU"))
    training = trained(CPU, model, dataset, tmp_path / "x.jsonl")
    assert (training.hardware, hardware.is_open) == ("a GPU", False)


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
    first, last = losses_of(tmp_path / "x.jsonl")
    assert first != last


def test_random_weights_need_no_weights_in_the_folder(model, dataset, tmp_path):
    bare = tmp_path / "model"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((model / name).read_bytes())
    assert run(*mini(bare, dataset, tmp_path / "a")).code == 2
    finished(*mini(bare, dataset, tmp_path / "b", "--random-weights"))


def test_tiny_runs_to_the_end_and_needs_nothing(tmp_path):
    command = [sys.executable, "run_case_study.py", "--tiny", "--device", "cpu"]
    command += ["--out", str(tmp_path / "o")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = summary(tmp_path / "o")["runs"]
    assert {name: run["outcome"] for name, run in runs.items()} == {
        "control": "healthy", "LR_SPIKE": "absorbed", "LR_RUNAWAY": "failed"
    }  # fmt: skip
    assert all(run["steps"] == 400 for run in runs.values())
    assert table_of(summary(tmp_path / "o")) in done.stdout
    seconds = summary(tmp_path / "o")["seconds"]
    assert seconds["of_processor"] < 120
