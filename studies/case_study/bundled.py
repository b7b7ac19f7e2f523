"""Models and text that are made here, as the folders and files that users have.

So they go through the same loading as everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from studies.case_study.bundled_text import write_examples
from studies.case_study.byte_tokenizer import byte_tokenizer
from studies.case_study.settings import BUNDLED, QWEN_3B, TINY, Settings

NUM_EXAMPLES = 6000


class Sources(NamedTuple):
    """Where the model and the dataset are read from: names on the hub, or local paths."""

    model: str
    dataset: str


@contextmanager
def sources_of(settings: Settings) -> Iterator[Sources]:
    """What `settings` name; what is made here exists inside only."""
    with TemporaryDirectory(prefix="rmetric-") as name:
        folder = Path(name)
        model, dataset = settings.model, settings.dataset
        if model in (TINY, QWEN_3B):
            model = str(folder / "model")
            write_model(Path(model), tiny=settings.model == TINY, seed=settings.seed)
        if dataset == BUNDLED:
            dataset = str(folder / "questions.jsonl")
            write_examples(Path(dataset), NUM_EXAMPLES, settings.seed)
        yield Sources(model, dataset)


def write_model(folder: Path, *, tiny: bool, seed: int) -> None:
    """A tiny model with its weights, or the large one's configuration; and a tokenizer."""
    byte_tokenizer().save_pretrained(folder)
    if tiny:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            Qwen2ForCausalLM(tiny_qwen()).save_pretrained(folder)
    else:
        qwen_3b().save_pretrained(folder)


def tiny_qwen() -> Qwen2Config:
    """A hundred thousand weights, which any processor trains in a minute."""
    return Qwen2Config(
        vocab_size=257,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )


def qwen_3b() -> Qwen2Config:
    """The architecture of Qwen2.5-3B, for random weights where nothing can be downloaded."""
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        intermediate_size=11008,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
    )
