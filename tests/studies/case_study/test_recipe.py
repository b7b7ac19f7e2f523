"""How a model is trained on a device, and the estimate of the memory that it takes; 4 bits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rmetric.guard.planner.cluster import GIB, in_words
from studies.case_study import models
from studies.case_study.models import Recipe, read_config
from studies.case_study.report import hardware_of
from studies.case_study.settings import QWEN_3B, TINY, CaseStudyError, Settings
from tests.studies.case_study.runs import mini, run, write_mini_model
from tests.studies.case_study.test_training import losses_of, trained

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/case_study.md").read_text(encoding="utf-8")
NUMBER = 3_085_938_688  # of weights, as the model's card says, embeddings once
CPU = models.Device(kind="cpu", name="CPU", free=20 * GIB, has_bfloat16=False)
FULL = Recipe(device="cuda", dtype=torch.bfloat16, lora=False, gradient_checkpointing=False)
LORA = replace(FULL, dtype=torch.float16, lora=True, gradient_checkpointing=True)


def gpu(name: str, size: float, *, bfloat16: bool = True) -> models.Device:
    return models.Device(kind="cuda", name=name, free=int(0.97 * size * GIB), has_bfloat16=bfloat16)


T4 = gpu("Tesla T4", 14.7, bfloat16=False)
H200 = gpu("NVIDIA H200", 139.8)
RTX_4060 = gpu("NVIDIA GeForce RTX 4060", 7.6)


@pytest.fixture(autouse=True)
def large_host(monkeypatch):
    """The machine of the tests is not that of the GPU."""
    monkeypatch.setattr("studies.case_study.models.check_fits", lambda *_: None)


@pytest.mark.parametrize(
    ("device", "recipe", "row"),
    [
        (T4, "LoRA in float16 with loss scaling, gradient checkpointing", "T4"),
        (gpu("NVIDIA L4", 22.5), "LoRA in bfloat16, gradient checkpointing", "L4"),
        (gpu("NVIDIA A100-SXM4-80GB", 79.3), "full fine-tuning in bfloat16", "A100"),
        (H200, "full fine-tuning in bfloat16", "A100"),
        (RTX_4060, "LoRA on 4-bit weights (NF4) in bfloat16, gradient checkpointing", "RTX 4060"),
        (gpu("NVIDIA GeForce RTX 2070", 7.6, bfloat16=False),
         "LoRA on 4-bit weights (NF4) in float16 with loss scaling, gradient checkpointing",
         "RTX 4060"),
        (CPU, "LoRA in float32, gradient checkpointing", "processor"),
    ],
)  # fmt: skip
def test_the_paper_s_model_gets_the_recipe_that_its_device_has_room_for(device, recipe, row):
    plan = models.plan_training(read_config(QWEN_3B), Settings(), device)
    needed = sum(plan.memory.values())
    assert str(plan.recipe) == recipe
    assert needed <= 0.9 * device.free
    assert in_words(needed) in str(plan)
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    assert line.endswith(f"| {in_words(needed)} |")


@pytest.mark.parametrize(
    ("device", "method", "length", "message"),
    [
        (RTX_4060, "lora", 512, "on NVIDIA GeForce RTX 4060: LoRA in bfloat16, gradient"),
        (gpu("GTX 1650", 3.8), "auto", 512, "LoRA on 4-bit weights .* needs 4.5 GiB, and of the"),
        (T4, "full", 512, "What helps: --lora, on a GPU --qlora, a lower --sequence-length; --ti"),
        (T4, "lora", 8192, "LoRA in float16 with loss scaling, gradient checkpointing needs"),
        (CPU, "qlora", 512, "--qlora needs an NVIDIA GPU"),
    ],
)
def test_what_does_not_fit_is_refused(device, method, length, message):
    with pytest.raises(CaseStudyError, match=message):
        models.plan_training(read_config(QWEN_3B), Settings(sequence_length=length), device, method)


def test_a_host_without_room_for_the_state_before_the_onset_is_reported(monkeypatch):
    def refuse(needed: int, what: str) -> None:
        assert needed == 3 * 4 * NUMBER
        raise MemoryError(f"{what} do not fit")

    monkeypatch.setattr("studies.case_study.models.check_fits", refuse)
    with pytest.raises(CaseStudyError, match="states from before the onset do not fit; --lora"):
        models.plan_training(read_config(QWEN_3B), Settings(), H200)


def test_too_little_memory_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("studies.case_study.models.find_device", lambda kind, float16: T4)
    done = run("--random-weights", "--full", "--out", tmp_path / "out")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "too little memory on Tesla T4: full fine-tuning in float16" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("study", "recipe"), [("twins_bf16", FULL), ("twins_fp16", LORA)])
def test_the_estimate_is_near_what_an_h100_took(study, recipe):
    path = ROOT / "studies/gpu/results/h100" / study / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert summary["method"]["chosen"] == str(recipe)
    took = max(entry["cost"]["peak_memory_bytes"] for entry in summary["runs"].values())
    memory = models.memory_needed(read_config(QWEN_3B), recipe, Settings())
    assert sum(memory.values()) - memory["cuda_context"] == pytest.approx(took, rel=0.01)
    assert memory["gradients"] == 4 * summary["method"]["trained_weights"]


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
    device = models.find_device()
    assert (device.kind, device.name, device.free) == ("cuda", "Tesla T4", 14 * GIB)
    assert not device.has_bfloat16  # emulated on it, and slow
    assert models.find_device("cpu").kind == "cpu"
    assert models.find_device("cpu").free > 0
    monkeypatch.setattr(Properties, "major", 9)
    assert models.find_device().has_bfloat16
    assert not models.find_device(float16=True).has_bfloat16


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


# -- 4-bit weights, which bitsandbytes packs on the processor too


def test_without_bitsandbytes_it_says_what_to_install_before_anything_is_loaded(
    model, dataset, tmp_path, monkeypatch
):
    monkeypatch.setattr("studies.case_study.models.find_device", lambda kind, float16: RTX_4060)
    monkeypatch.setattr(models, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(models, "_pretrained", lambda *_: pytest.fail("loaded"))
    result = run(*mini(model, dataset, tmp_path / "out"), "--qlora")
    assert result.code == 2
    assert "LoRA on 4-bit weights (NF4) in bfloat16" in result.err
    assert "needs the package bitsandbytes" in result.err
    assert "pip install -e '.[study,live,qlora]'" in result.err
    assert not (tmp_path / "out").exists()


needs_bitsandbytes = pytest.mark.skipif(
    not models.is_bitsandbytes_available(), reason="bitsandbytes is not installed"
)


RECIPE = replace(FULL, device="cpu", lora=True, four_bit=True, gradient_checkpointing=True)


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory) -> Path:
    """A model of which each tensor is a whole number of blocks, in its folder."""
    return write_mini_model(tmp_path_factory.mktemp("model"), read_config(TINY))


def bytes_of(weight: torch.nn.Parameter) -> int:
    """With the constants of its quantisation, without the table that all weights share."""
    state = getattr(weight, "quant_state", None)
    parts = () if state is None else (state.absmax, state.offset, state.code, state.state2.absmax)
    return weight.nbytes + sum(part.nbytes for part in parts)


@needs_bitsandbytes
@pytest.mark.parametrize("random_weights", [False, True])
def test_a_loaded_4_bit_model_is_as_large_as_planned(in_blocks, random_weights):
    config = read_config(str(in_blocks))
    settings = Settings(model=str(in_blocks), random_weights=random_weights)
    loaded = models.load_model(settings, config, RECIPE)
    planned = models.memory_needed(config, RECIPE, settings)
    frozen = [p for p in loaded.parameters() if not p.requires_grad]
    assert sum(map(bytes_of, frozen)) == pytest.approx(planned["frozen_weights"], rel=0.03)
    trained = sum(p.numel() for p in loaded.parameters() if p.requires_grad)
    assert planned["gradients"] == 4 * trained


@needs_bitsandbytes
def test_4_bit_weights_are_trained_on_and_stay_as_they_are(
    in_blocks, dataset, tmp_path, monkeypatch
):
    # Some processors' weights are packed anew for an evaluation, those of GPUs never.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    training = trained(RECIPE, in_blocks, dataset, tmp_path / "x.jsonl", steps=6)
    assert training.monitor.usable, training.monitor.problem
    weights = dict(training.model.named_parameters())
    fresh = models.load_model(Settings(model=str(in_blocks)), read_config(str(in_blocks)), RECIPE)
    for name, before in fresh.named_parameters():
        assert torch.equal(before, weights[name]) is not before.requires_grad, name
        assert ("lora" in name) is before.requires_grad
    first, last = losses_of(tmp_path / "x.jsonl")
    assert last < first
