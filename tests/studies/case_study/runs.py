"""A model and a dataset small enough to train in a second, and a way to run the script."""

import json
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import run_case_study
from studies.case_study.data import examples
from studies.case_study.models import byte_tokenizer
from tests.studies.paper.small_study import Result, captured

STEPS, EVAL_EVERY, ONSET, LASTS = 24, 4, 13, 3

run = partial(captured, run_case_study.main)


def finished(*arguments: str | Path) -> Result:
    result = run(*arguments)
    assert result.code == 0, result.err
    return result


def write_mini_model(folder: Path, config: Qwen2Config | None = None) -> Path:
    """Eight thousand weights, or those of `config`, with a tokenizer: a folder as users have."""
    config = config or Qwen2Config(
        vocab_size=257, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, max_position_embeddings=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_examples(path: Path, count: int, seed: int = 0) -> Path:
    """The bundled text as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in examples(count, seed)))
    return path


def mini(model: Path, dataset: Path, out: Path, *more: str | Path) -> list[str | Path]:
    """The options of a study of 24 steps."""
    return [
        "--model", model, "--dataset", dataset, "--out", out, "--device", "cpu",
        "--steps", str(STEPS), "--eval-every", str(EVAL_EVERY),
        "--onset", str(ONSET), "--duration", str(LASTS), "--learning-rate", "0.003",
        "--fault", "LR_SPIKE",
        "--sequence-length", "32", "--eval-sequences", "2", *more,
    ]  # fmt: skip
