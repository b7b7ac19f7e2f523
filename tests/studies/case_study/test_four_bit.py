"""The case study on 4-bit weights, which bitsandbytes packs on the processor too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from studies.case_study import models
from studies.case_study.models import Recipe, load_model, memory_needed, read_config
from studies.case_study.settings import TINY, Settings
from tests.studies.case_study.runs import mini, run, write_examples, write_mini_model
from tests.studies.case_study.test_recipe import RTX_4060


def test_without_bitsandbytes_it_says_what_to_install_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    model = write_mini_model(tmp_path / "model")
    data = write_examples(tmp_path / "questions.jsonl", 60)
    monkeypatch.setattr("studies.case_study.models.find_device", lambda kind, float16: RTX_4060)
    monkeypatch.setattr(models, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(models, "_pretrained", lambda *_: pytest.fail("loaded"))
    result = run(*mini(model, data, tmp_path / "out"), "--qlora")
    assert result.code == 2
    assert "LoRA on 4-bit weights (NF4) in bfloat16" in result.err
    assert "needs the package bitsandbytes" in result.err
    assert "pip install -e '.[study,live,qlora]'" in result.err
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
    return write_mini_model(tmp_path_factory.mktemp("model"), read_config(TINY))


def bytes_of(weight: torch.nn.Parameter) -> int:
    """With the constants of its quantisation, without the table that all weights share."""
    state = getattr(weight, "quant_state", None)
    parts = () if state is None else (state.absmax, state.offset, state.code, state.state2.absmax)
    return weight.nbytes + sum(part.nbytes for part in parts)


@needs_bitsandbytes
@pytest.mark.parametrize("random_weights", [False, True])
def test_a_loaded_4_bit_model_is_as_large_as_planned(model, random_weights):
    config = read_config(str(model))
    settings = Settings(model=str(model), random_weights=random_weights)
    loaded = load_model(settings, config, RECIPE)
    planned = memory_needed(config, RECIPE, settings)
    frozen = [p for p in loaded.parameters() if not p.requires_grad]
    assert sum(map(bytes_of, frozen)) == pytest.approx(planned["frozen_weights"], rel=0.03)
    trained = sum(p.numel() for p in loaded.parameters() if p.requires_grad)
    assert planned["gradients"] == 4 * trained


@needs_bitsandbytes
@pytest.mark.usefixtures("layout_of_gpus")
def test_4_bit_weights_are_trained_on_and_stay_as_they_are(model, tmp_path):
    from tests.studies.case_study.test_training import trained

    data = write_examples(tmp_path / "questions.jsonl", 120)
    training = trained(RECIPE, model, data, tmp_path / "x.jsonl", steps=6)
    assert training.monitor.usable, training.monitor.problem
    weights = dict(training.model.named_parameters())
    fresh = load_model(Settings(model=str(model)), read_config(str(model)), RECIPE)
    for name, before in fresh.named_parameters():
        assert torch.equal(before, weights[name]) is not before.requires_grad, name
        assert ("lora" in name) is before.requires_grad
    from rmetric.logs import read_log

    first, *_, last = read_log(tmp_path / "x.jsonl").records
    assert last.training_loss < first.training_loss
    assert 0 < last.gradient_norm < 100
