"""The plan that is printed before a weight is loaded, from the real shapes on the meta device."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from studies.case_study import preparation
from studies.case_study.bundled import qwen_3b, tiny_qwen
from studies.case_study.faults import faults_of
from studies.case_study.plan import (
    GIB,
    Device,
    Plan,
    Recipe,
    device_named,
    find_device,
    in_units,
    memory_needed,
    plan_training,
    step_flops,
    steps_by_run,
)
from studies.case_study.settings import CaseStudyError, Settings
from studies.case_study.twins import hardware_of, readings_of
from tests.studies.case_study.runs import run

PAGE = (Path(__file__).resolve().parents[3] / "docs/case_study.md").read_text(encoding="utf-8")
NUMBER = 3_085_938_688  # of weights, as the model's card says, embeddings once
CPU = Device(kind="cpu", name="CPU", free=20 * GIB, total=24 * GIB, has_bfloat16=False)


def gpu(name: str, size: float, *, bfloat16: bool = True) -> Device:
    free = int(0.97 * size * GIB)
    return Device(kind="cuda", name=name, free=free, total=int(size * GIB), has_bfloat16=bfloat16)


T4 = gpu("Tesla T4", 14.7, bfloat16=False)
L4 = gpu("NVIDIA L4", 22.5)
H200 = gpu("NVIDIA H200", 139.8)
RTX_4060 = gpu("NVIDIA GeForce RTX 4060", 7.6)
RTX_2070 = gpu("NVIDIA GeForce RTX 2070", 7.6, bfloat16=False)


@cache
def planned(device: Device, method: str = "auto") -> Plan:
    return plan_training(qwen_3b(), Settings(), device, method)


@pytest.mark.parametrize(
    ("device", "slug", "recipe", "row"),
    [
        (T4, "t4", "LoRA in float16 with loss scaling, gradient checkpointing", "T4"),
        (L4, "l4", "LoRA in bfloat16, gradient checkpointing", "L4"),
        (gpu("NVIDIA A100-SXM4-80GB", 79.3), "a100-sxm4-80gb", "full fine-tuning in bfloat16",
         "A100"),
        (H200, "h200", "full fine-tuning in bfloat16", "A100"),
        (RTX_4060, "rtx-4060",
         "LoRA on 4-bit weights (NF4) in bfloat16, gradient checkpointing", "RTX 4060"),
        (RTX_2070, "rtx-2070",
         "LoRA on 4-bit weights (NF4) in float16 with loss scaling, gradient checkpointing",
         "RTX 4060"),
        (CPU, "cpu", "LoRA in float32, gradient checkpointing", "processor"),
    ],
)  # fmt: skip
def test_the_paper_s_model_gets_the_recipe_that_its_device_has_room_for(device, slug, recipe, row):
    plan = planned(device)
    assert (str(plan.recipe), device.slug, plan.weights) == (recipe, slug, NUMBER)
    assert plan.bytes_needed == sum(plan.memory.values()) <= 0.9 * device.free
    assert plan.memory["logits"] >= 512 * 151936 * (4 + 8)  # kept once, and two gradients
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    assert line.endswith(f"| {in_units(plan.bytes_needed)} |")
    kind = "LoRA" if plan.recipe.lora else "all weights"
    state = plan.state_bytes / 1e9
    assert f"{state:.{1 if state < 1 else 0}f} GB for {kind}" in " ".join(PAGE.split())


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
    refused = run("--plan", "voodoo")
    assert (refused.code, "--plan voodoo: known are t4, l4" in refused.err) == (2, True)


def test_a_step_costs_six_operations_a_weight_and_token_and_repeats_what_is_not_kept():
    assert step_flops(planned(H200), Settings()) == 6 * NUMBER * 4 * 512
    # LoRA, whose frozen weights have no gradient; checkpointing, a forward pass more.
    assert step_flops(planned(T4), Settings()) == (4 + 2) * NUMBER * 4 * 512


def test_runs_share_the_steps_of_the_control_up_to_the_fault():
    both = faults_of(Settings())
    assert [*steps_by_run(Settings(), both, control=True).values()] == [800, 401, 401]
    assert steps_by_run(Settings(), both, control=False) == {"LR_SPIKE": 800, "LR_RUNAWAY": 800}


# -- what does not fit


@pytest.mark.parametrize(
    ("device", "method", "length", "said"),
    [
        (RTX_4060, "lora", 512, "What helps: --qlora fits"),
        (gpu("GTX 1650", 3.8), "auto", 512, "What helps: --tiny trains a small model"),
        (gpu("GTX 1650", 4.7), "auto", 512, "What helps: --sequence-length 256 fits; --tiny"),
        (T4, "full", 512, "What helps: --lora fits; --tiny"),
        (T4, "full", 4096, "What helps: --lora --sequence-length 2048 fits"),
        (CPU, "qlora", 512, "--qlora needs an NVIDIA GPU"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(device, method, length, said):
    with pytest.raises(CaseStudyError, match=said) as caught:
        plan_training(qwen_3b(), Settings(sequence_length=length), device, method)
    if device.name == "GTX 1650":
        needed = in_units(planned(RTX_4060).bytes_needed)
        assert f"{planned(RTX_4060).recipe} needs {needed}" in str(caught.value)
        assert f"of the {in_units(device.free)} free 90% can be planned for" in str(caught.value)
    if offered := re.search(r"(?:--(\w+) )?--sequence-length (\d+) fits", str(caught.value)):
        shorter = Settings(sequence_length=int(offered[2]))
        assert plan_training(qwen_3b(), shorter, device, offered[1] or method)


def test_a_processor_is_never_given_4_bits():
    poor = Device(kind="cpu", name="CPU", free=8 * GIB, total=8 * GIB, has_bfloat16=False)
    with pytest.raises(CaseStudyError) as caught:
        planned(poor)
    assert "qlora" not in str(caught.value)
    assert planned(H200, "qlora").recipe.four_bit


def test_too_little_memory_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("studies.case_study.plan.find_device", lambda kind, float16: T4)
    done = run("--random-weights", "--full", "--out", tmp_path / "out")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "too little memory on Tesla T4: full fine-tuning in float16" in done.err
    assert not (tmp_path / "out").exists()


# -- how much memory that takes


def test_the_estimate_of_activations_is_no_less_than_a_real_forward_pass_keeps():
    config = Qwen2Config(**tiny_qwen().to_dict() | {"num_hidden_layers": 5, "layer_types": None})
    recipe = Recipe(device="cpu", dtype=torch.float32, lora=False, gradient_checkpointing=False)
    estimated = memory_needed(config, recipe, sequence_length=64, micro_batch_size=2)
    model = Qwen2ForCausalLM(config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    tokens = torch.zeros((2, 64), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens, use_cache=False)
    real = sum(size for size, _ in kept.values())
    assert real <= estimated["activations"] <= 1.3 * real


def test_everything_that_saves_memory_is_seen_to_save_it():
    def needed(length=512, size=1, *, lora=False, saving=False) -> dict[str, int]:
        recipe = Recipe(device="cpu", dtype=torch.float32, lora=lora, gradient_checkpointing=saving)
        return memory_needed(tiny_qwen(), recipe, sequence_length=length, micro_batch_size=size)

    full = needed()
    number = sum(p.numel() for p in Qwen2ForCausalLM(tiny_qwen()).parameters())
    assert [full[name] for name in ("weights", "gradients", "optimiser")] == [
        4 * number, 4 * number, 8 * number,
    ]  # fmt: skip
    assert needed(saving=True)["activations"] < full["activations"]
    assert needed(lora=True)["optimiser"] < full["optimiser"]
    assert sum(needed(256).values()) < sum(full.values()) < sum(needed(size=2).values())


def test_4_bit_weights_their_constants_and_all_else_are_counted_apart():
    linear = 36 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 11008)
    memory = planned(RTX_4060).memory
    trained = 36 * 16 * (2 * 4096 + 2 * (2048 + 256) + 3 * (2048 + 11008))
    # A byte for a block of 64 weights, 4 bytes for 256 of those, and small tables.
    constants = linear // 64 + 4 * linear // (64 * 256)
    assert constants < memory["quantisation_constants"] < 1.02 * constants
    expected = {
        "weights": 2 * (NUMBER - linear),  # embeddings, also of the output; norms; biases
        "weights_4bit": linear // 2,
        "adapters": trained * (4 + 2),  # float32, and a copy in bfloat16
        "gradients": 4 * trained,
        "optimiser": 8 * trained,
        "scratch": 2 * 2048 * 11008,  # a weight unpacked
        "cuda_context": GIB,
    }
    assert memory.items() >= expected.items()
    parts = [f"{name.replace('_', ' ')} {in_units(size)}" for name, size in memory.items()]
    shown = f"{in_units(planned(RTX_4060).bytes_needed)} ({', '.join(parts)})"
    assert shown in " ".join(PAGE.split())
    assert "LoRA in bfloat16, gradient checkpointing needs 8.3 GiB" in planned(RTX_4060).reason


# -- what is fetched


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
    monkeypatch.setattr(preparation.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(preparation, "_is_cached", lambda kind, name: False)
    found = preparation.find_missing("a/b", "c/d", random_weights=False)
    assert [*map(str, found)] == ["model a/b (0 MiB)", "dataset c/d (0 MiB)"]
    assert [one.size for one in found] == [607, 42]
    [model, _] = preparation.find_missing("a/b", "c/d", random_weights=True)
    assert model.size == 7  # the weights are drawn
    monkeypatch.setattr(preparation, "_is_cached", lambda kind, name: True)
    assert preparation.find_missing("a/b", "c/d", random_weights=False) == []
    assert preparation.QWEN_3B_BYTES == 2 * NUMBER


def test_a_model_in_the_cache_counts_with_its_weights_only(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "snapshot_download", lambda *a, **k: tmp_path)
    assert preparation._is_cached("dataset", "a/b")
    assert not preparation._is_cached("model", "a/b")
    (tmp_path / "model.safetensors").touch()
    assert preparation._is_cached("model", "a/b")


# -- the device and its hardware events


class Properties:
    """What torch says of a GPU."""

    name, major, minor, uuid = "Tesla T4", 7, 5, "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def t4(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (14 * GIB, 15 * GIB))


def test_a_gpu_is_taken_where_there_is_one_and_not_where_the_processor_is_asked_for(
    t4, monkeypatch
):
    device = find_device()
    assert (device.kind, device.slug, device.free) == ("cuda", "t4", 14 * GIB)
    assert device.capability == device_named("t4").capability
    assert not device.has_bfloat16  # emulated on it, and slow
    assert find_device("cpu").kind == "cpu"
    monkeypatch.setattr(Properties, "major", 9)
    assert find_device().has_bfloat16
    assert not find_device(float16=True).has_bfloat16


def test_a_container_s_limit_counts_where_it_is_the_lower(monkeypatch, tmp_path):
    most, used = tmp_path / "memory.max", tmp_path / "memory.current"
    most.write_text(f"{GIB}\n")
    used.write_text(f"{GIB // 4}\n")
    monkeypatch.setattr("studies.case_study.plan.CONTAINER", (most, used))
    device = find_device("cpu")
    assert (device.free, device.total) == (GIB - GIB // 4, GIB)
    most.write_text("max\n")
    assert find_device("cpu").total > GIB


def test_a_processor_has_no_hardware_events_and_says_so():
    hardware, words = hardware_of("cpu")
    assert hardware.poll() == ()
    assert "λ is 0" in words
    assert readings_of(hardware) == []


def test_a_gpu_that_nvml_does_not_answer_for_logs_no_events_at_all(t4, monkeypatch):
    class Silent:
        problem = "the NVIDIA driver is not loaded"
        closed = False

        def __init__(self, devices):
            assert devices == [f"GPU-{Properties.uuid}"]

        def ready(self):
            return False

        def close(self):
            Silent.closed = True

    monkeypatch.setattr("rmetric.telemetry.nvml.NvmlEvents", Silent)
    assert hardware_of("cuda") == (None, "λ is not logged: the NVIDIA driver is not loaded")
    assert Silent.closed
