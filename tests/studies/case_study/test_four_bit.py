"""The case study on 4-bit weights, which bitsandbytes packs on the processor too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from studies.case_study import models
from studies.case_study.bundled import byte_tokenizer, tiny_qwen, write_examples
from studies.case_study.models import load_model, read_config
from studies.case_study.plan import Recipe, memory_needed
from studies.case_study.settings import Settings
from tests.studies.case_study.runs import run
from tests.studies.case_study.test_plan import RTX_4060


def test_without_bitsandbytes_it_says_what_to_install_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("studies.case_study.plan.find_device", lambda kind, float16: RTX_4060)
    monkeypatch.setattr(models, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(models, "_pretrained", lambda *_: pytest.fail("loaded"))
    result = run("--random-weights", "--out", tmp_path / "out")
    assert result.code == 2
    assert "bitsandbytes" in result.err
    assert "pip install -e '.[live,qlora]'" in result.err
    assert "LoRA on 4-bit weights (NF4) in bfloat16" in result.err
    assert not (tmp_path / "out").exists()


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
    assert found["weights"] == planned["weights"]
    assert found["weights_4bit"] == planned["weights_4bit"] > 0
    assert found["adapters"] == planned["adapters"] * 4 // 6  # copies come with the arithmetic
    constants = planned["quantisation_constants"]
    assert constants - 4096 <= found["quantisation_constants"] <= constants


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
