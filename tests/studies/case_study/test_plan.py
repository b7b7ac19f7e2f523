"""The plan that is printed before a weight is loaded, from the real shapes on the meta device."""

from __future__ import annotations

import re
from functools import cache

import huggingface_hub
import pytest

from studies.case_study import models
from studies.case_study.bundled import qwen_3b
from studies.case_study.faults import faults_of
from studies.case_study.models import Download
from studies.case_study.plan import device_named, in_units, plan_training
from studies.case_study.plan_text import (
    plan_lines,
    seconds_needed,
    step_flops,
    steps_of,
)
from studies.case_study.settings import MODEL, Settings
from tests.studies.case_study.runs import run

SETTINGS = Settings()
FAULTS = faults_of(SETTINGS)
NUMBER = 3_085_938_688


@cache
def planned(gpu: str, method: str = "auto"):
    return plan_training(qwen_3b(), SETTINGS, device_named(gpu), method)


def test_the_plan_of_a_t4_names_every_part_and_loads_nothing(monkeypatch):
    monkeypatch.setattr("studies.case_study.models.load_model", lambda *a, **k: pytest.fail("load"))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: pytest.fail("asked"))
    done = run("--plan", "T4")
    assert done.code == 0, done.err
    for part in (
        "weights  ", "adapters", "gradients", "optimiser", "activations", "logits", "cuda context",
        "no bfloat16 of its own: float16", "LoRA in float16 with loss scaling",
        "snapshots  up to 3",
        "full fine-tuning in float16 with loss scaling, gradient checkpointing needs",
        "control 800 steps, LR_SPIKE 401 steps, LR_RUNAWAY 401 steps",
    ):  # fmt: skip
        assert part in done.out
    assert re.search(r"time +\d+ min to [\d.]+ (min|h), set-up left out", done.out)


@pytest.mark.parametrize("gpu", ["t4", "l4", "h200"])
def test_the_parts_add_up_to_the_total_which_fits(gpu):
    plan, device = planned(gpu), device_named(gpu)
    assert sum(size for _, size in plan.memory.parts()) == plan.memory.total
    assert plan.memory.fits(device)
    assert plan.weights == NUMBER
    assert plan.memory.logits >= 512 * 151936 * (4 + 8)  # kept once at least, and two gradients


def test_a_step_costs_six_operations_a_weight_and_token_and_repeats_what_is_not_kept():
    tokens = 4 * 512
    assert step_flops(planned("h200"), SETTINGS) == 6 * NUMBER * tokens
    assert step_flops(planned("t4"), SETTINGS) == (4 + 2) * NUMBER * tokens  # LoRA, checkpointing


def test_runs_share_the_steps_of_the_control_up_to_the_fault():
    assert steps_of(SETTINGS, FAULTS, control=True) == 800 + 2 * 401
    assert steps_of(SETTINGS, FAULTS, control=False) == 2 * 800
    assert steps_of(SETTINGS, [], control=True) == 800


def test_a_faster_gpu_and_fewer_steps_need_less_time():
    def highest(gpu: str, settings: Settings = SETTINGS) -> float:
        needed = seconds_needed(planned(gpu), settings, device_named(gpu), FAULTS, control=True)
        assert needed is not None
        assert 0 < needed[0] < needed[1]
        return needed[1]

    assert highest("h200") < highest("l4") < highest("t4")
    assert highest("t4", Settings(max_steps=400)) < highest("t4")


def test_an_unknown_gpu_is_refused_with_those_that_are_known():
    done = run("--plan", "voodoo")
    assert done.code == 2
    assert "--plan voodoo: known are t4, l4" in done.err


def test_what_is_downloaded_is_said_with_its_size():
    downloads = [Download(kind="model", name="a/b", size=6 * 2**30)]
    lines = plan_lines(
        planned("l4"), SETTINGS, device_named("l4"), FAULTS, control=True, checkpoint_every=100,
        downloads=downloads,
    )  # fmt: skip
    assert lines[-1] == "download   model a/b (6.0 GiB)"


class Listed:
    """What the hub lists of a repository."""

    def __init__(self, **sizes: int) -> None:
        names = {name.replace("__", "/").replace("_", "."): size for name, size in sizes.items()}
        self.siblings = [
            type("File", (), {"rfilename": name, "size": size}) for name, size in names.items()
        ]


def test_the_sizes_are_those_of_the_files_that_would_be_fetched(monkeypatch):
    listed = {
        "model": Listed(model_safetensors=600, model_bin=500, config_json=7, README_md=1000),
        "dataset": Listed(a_parquet=40, README_md=1000, b_jsonl=2),
    }
    monkeypatch.setattr(
        huggingface_hub.HfApi, "repo_info", lambda self, name, repo_type, **_: listed[repo_type]
    )
    monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "_cached", lambda kind: set())
    found = models.find_missing("a/b", "c/d", random_weights=False)
    assert [one.size for one in found] == [607, 42]
    [model, _] = models.find_missing("a/b", "c/d", random_weights=True)
    assert model.size == 7  # the weights are drawn
    monkeypatch.setattr(models, "_cached", lambda kind: {"a/b", "c/d"})
    assert models.find_missing("a/b", "c/d", random_weights=False) == []


def test_the_stated_size_of_the_default_model_is_that_of_its_weights():
    assert models.QWEN_3B_BYTES == 2 * NUMBER
    assert in_units(models.QWEN_3B_BYTES) == "5.7 GiB"
    assert MODEL == "Qwen/Qwen2.5-3B-Instruct"
