"""The case study on 4-bit weights: the plan on meta tensors, and real loading and training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from studies.case_study import models
from studies.case_study.bundled import byte_tokenizer, qwen_3b, tiny_qwen, write_examples
from studies.case_study.models import load_model, read_config
from studies.case_study.plan import (
    GIB,
    Device,
    Plan,
    Recipe,
    in_units,
    memory_needed,
    plan_training,
)
from studies.case_study.settings import CaseStudyError, Settings
from tests.studies.case_study.runs import run

PAGE = (Path(__file__).resolve().parents[3] / "docs/case_study.md").read_text(encoding="utf-8")
CPU = Device(kind="cpu", name="CPU", free=20 * GIB, total=24 * GIB, has_bfloat16=False)


def gpu(name: str, size: float, *, bfloat16: bool = True) -> Device:
    free = int(0.97 * size * GIB)
    return Device(kind="cuda", name=name, free=free, total=int(size * GIB), has_bfloat16=bfloat16)


T4 = gpu("Tesla T4", 14.7, bfloat16=False)
L4 = gpu("NVIDIA L4", 22.5)
RTX_4060 = gpu("NVIDIA GeForce RTX 4060", 7.6)
RTX_2070 = gpu("NVIDIA GeForce RTX 2070", 7.6, bfloat16=False)


def planned(device: Device, method: str = "auto", **changes: int) -> Plan:
    return plan_training(qwen_3b(), Settings(**changes), device, method)


# -- the plan


@pytest.mark.parametrize(
    ("device", "recipe"),
    [
        (RTX_4060, "LoRA on 4-bit weights (NF4) in bfloat16, gradient checkpointing"),
        (RTX_2070,
         "LoRA on 4-bit weights (NF4) in float16 with loss scaling, gradient checkpointing"),
    ],
    ids=["bfloat16", "float16"],
)  # fmt: skip
def test_the_3b_model_gets_4_bit_weights_where_16_bits_do_not_fit(device, recipe):
    plan = planned(device)
    assert str(plan.recipe) == recipe
    assert plan.memory.fits(device)


def test_the_reason_for_4_bits_is_what_lora_would_have_needed():
    assert "LoRA in bfloat16, gradient checkpointing needs 8.3 GiB" in planned(RTX_4060).reason


def test_the_page_states_what_an_8_gb_card_is_planned_with():
    [line] = [line for line in PAGE.splitlines() if line.startswith("| RTX 4060")]
    assert line.endswith(f"| {in_units(planned(RTX_4060).memory.total)} |")
    assert str(planned(RTX_4060).memory) in " ".join(PAGE.split())


def test_4_bit_weights_their_constants_and_all_else_are_counted_apart():
    linear = 36 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 11008)
    outside = 3_085_938_688 - linear  # embeddings, also of the output; norms; biases
    memory = planned(RTX_4060).memory
    assert memory.weights_4bit == linear // 2
    assert memory.weights == 2 * outside
    # A byte for a block of 64 weights, 4 bytes for 256 of those, and small tables.
    constants = linear // 64 + 4 * linear // (64 * 256)
    assert constants < memory.quantisation_constants < 1.02 * constants
    rank, layer = 16, (2 * 4096 + 2 * (2048 + 256) + 3 * (2048 + 11008))
    trained = 36 * rank * layer
    assert memory.adapters == trained * (4 + 2)  # float32, and a copy in bfloat16
    assert (memory.gradients, memory.optimiser) == (4 * trained, 8 * trained)
    assert memory.cuda_context == GIB
    assert memory.logits >= 2 * 4 * 512 * 151936
    assert memory.scratch == 2 * 2048 * 11008  # a weight unpacked
    assert memory.activations > 0
    shown = str(memory)
    for part in ("weights 4bit 1.3 GiB", "quantisation constants", "adapters", "cuda context"):
        assert part in shown
    assert "4bit" not in str(planned(L4).memory)


def test_what_is_asked_for_is_not_replaced_by_4_bits_nor_4_bits_by_more():
    with pytest.raises(CaseStudyError, match="What helps: --qlora fits"):
        planned(RTX_4060, "lora")
    assert planned(gpu("NVIDIA H200", 139.8), "qlora").recipe.four_bit


@pytest.mark.parametrize(
    ("size", "helps"),
    [(3.8, "--tiny trains a small model"), (4.7, "--sequence-length 256 fits; --tiny")],
)
def test_a_card_that_is_too_small_for_4_bits_is_refused_with_the_numbers(size, helps):
    small = gpu("NVIDIA GeForce GTX 1650", size, bfloat16=False)
    needed = planned(RTX_2070).memory.total
    with pytest.raises(CaseStudyError) as caught:
        planned(small)
    error = str(caught.value)
    assert f"{planned(RTX_2070).recipe} needs {in_units(needed)}" in error
    assert f"of the {in_units(small.free)} free 90% can be planned for" in error
    assert f"What helps: {helps}" in error


def test_a_processor_is_never_given_4_bits():
    poor = Device(kind="cpu", name="CPU", free=8 * GIB, total=8 * GIB, has_bfloat16=False)
    with pytest.raises(CaseStudyError) as caught:
        planned(poor)
    assert "qlora" not in str(caught.value)
    with pytest.raises(CaseStudyError, match="--qlora needs an NVIDIA GPU") as caught:
        planned(CPU, "qlora")
    assert "--lora or --full" in str(caught.value)


# -- what is said where 4 bits cannot be


def test_without_bitsandbytes_it_says_what_to_install_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("studies.case_study.plan.find_device", lambda kind: RTX_4060)
    monkeypatch.setattr(models, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(models, "_pretrained", lambda *_: pytest.fail("loaded"))
    result = run("--random-weights", "--out", tmp_path / "out")
    assert result.code == 2
    assert "bitsandbytes" in result.err
    assert "pip install -e '.[live,qlora]'" in result.err
    assert "LoRA on 4-bit weights (NF4) in bfloat16" in result.err
    assert not (tmp_path / "out").exists()


# -- the real thing, on the processor, for which bitsandbytes has kernels

needs_bitsandbytes = pytest.mark.skipif(
    not models.is_bitsandbytes_available(), reason="bitsandbytes is not installed"
)


@pytest.fixture
def layout_of_gpus(monkeypatch):
    """Some processors' weights are packed anew for an evaluation, those of GPUs never."""
    import bitsandbytes.nn.modules

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)


RECIPE = Recipe(
    device="cpu", dtype=torch.bfloat16, lora=True, four_bit=True, gradient_checkpointing=True
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model of which each tensor is a whole number of blocks, in its folder."""
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(tiny_qwen()).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def bytes_of(loaded) -> dict[str, int]:
    """Bytes of the weights of a loaded model, by the names of `Memory`."""
    found = dict.fromkeys(("weights", "weights_4bit", "quantisation_constants", "adapters"), 0)
    seen = set()
    for weight in loaded.parameters():
        state = getattr(weight, "quant_state", None)
        if state is not None:
            parts = state.absmax, state.offset, state.code, state.state2.absmax
            found["quantisation_constants"] += sum(part.nbytes for part in parts)
            if state.state2.code.data_ptr() not in seen:
                seen.add(state.state2.code.data_ptr())
                found["quantisation_constants"] += state.state2.code.nbytes
        name = "weights_4bit" if state else "adapters" if weight.requires_grad else "weights"
        found[name] += weight.nbytes
    return found


@needs_bitsandbytes
@pytest.mark.parametrize("random_weights", [False, True])
def test_a_loaded_4_bit_model_is_as_large_as_planned(model, random_weights):
    config = read_config(str(model))
    loaded = load_model(str(model), config, RECIPE, Settings(random_weights=random_weights))
    planned = memory_needed(config, RECIPE, sequence_length=64, micro_batch_size=1)
    found = bytes_of(loaded)
    assert found["weights"] == planned.weights
    assert found["weights_4bit"] == planned.weights_4bit > 0
    assert found["adapters"] == planned.adapters * 4 // 6  # the copies come with the arithmetic
    assert found["quantisation_constants"] == pytest.approx(
        planned.quantisation_constants, abs=4096
    )
    assert found["quantisation_constants"] <= planned.quantisation_constants


@needs_bitsandbytes
@pytest.mark.usefixtures("layout_of_gpus")
def test_4_bit_weights_are_trained_on_and_stay_as_they_are(model, tmp_path):
    from tests.studies.case_study.test_training import trained

    data = tmp_path / "questions.jsonl"
    write_examples(data, 120)
    training = trained(RECIPE, model, data, tmp_path / "x.jsonl", steps=6)
    assert training.monitor.usable, training.monitor.problem
    weights = dict(training.model.named_parameters())
    fresh = load_model(str(model), read_config(str(model)), RECIPE, Settings())
    for name, before in fresh.named_parameters():
        assert torch.equal(before, weights[name]) is not before.requires_grad, name
        assert ("lora" in name) is before.requires_grad
    from rmetric.logs import read_log

    first, *_, last = read_log(tmp_path / "x.jsonl").records
    assert last.training_loss < first.training_loss
    assert 0 < last.gradient_norm < 100


@needs_bitsandbytes
@pytest.mark.usefixtures("layout_of_gpus")
def test_the_loss_on_4_bit_weights_is_near_that_on_16_bits(model):
    config = read_config(str(model))
    tokens = torch.arange(64).reshape(1, 64) % 257
    losses = []
    for four_bit in (True, False):
        recipe = Recipe(
            device="cpu", dtype=torch.bfloat16, lora=True, four_bit=four_bit,
            gradient_checkpointing=True,
        )  # fmt: skip
        loaded = load_model(str(model), config, recipe, Settings())
        with torch.no_grad():
            losses.append(float(loaded(input_ids=tokens, labels=tokens).loss))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
