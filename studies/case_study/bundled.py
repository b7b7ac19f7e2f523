"""Models and text that are made here, as the folders and files that users have.

So they go through the same loading as everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from studies.case_study.settings import BUNDLED, QWEN_3B, TINY, Settings

#: What is kept of a list, in words and as a condition on x; {n} is a number.
CHOICES = (
    ("all items", ""),
    ("the even numbers", " if x % 2 == 0"),
    ("the odd numbers", " if x % 2 == 1"),
    ("the numbers above {n}", " if x > {n}"),
    ("the numbers below {n}", " if x < {n}"),
    ("the multiples of {n}", " if x % {n} == 0"),
    ("the numbers other than {n}", " if x != {n}"),
)
#: What is done to each, in words and as an expression of x.
CHANGES = (
    ("", "x"),
    ("squares of ", "x * x"),
    ("doubles of ", "2 * x"),
    ("absolute values of ", "abs(x)"),
    ("remainders by {m} of ", "x % {m}"),
    ("texts of ", "str(x)"),
    ("negatives of ", "-x"),
)
#: What becomes of the result: in words, the wrapped expression, and the end of the name.
RESULTS = (
    ("the sum", "sum({} for x in {}{})", "sum"),
    ("the largest", "max({} for x in {}{})", "largest"),
    ("the smallest", "min({} for x in {}{})", "smallest"),
    ("a list", "[{} for x in {}{}]", "list"),
    ("a sorted list", "sorted({} for x in {}{})", "sorted"),
    ("the number", "len([{} for x in {}{}])", "count"),
    ("a set", "{{{} for x in {}{}}}", "set"),
)
LISTS = ("numbers", "values", "items", "scores", "ages", "prices", "row", "data")
ASKING = (
    "Write a function that returns {}.",
    "How do I get {} in Python?",
    "Give me a Python function for {}.",
    "I need {}. Show the code.",
)


def examples(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """`count` rows with the columns instruction and output; the same for the same seed.

    >>> row = next(examples(1))
    >>> row["output"].startswith("def ")
    True
    """
    generator = np.random.default_rng(seed)
    for _ in range(count):
        kept, condition = CHOICES[generator.integers(len(CHOICES))]
        change, expression = CHANGES[generator.integers(len(CHANGES))]
        result, form, end = RESULTS[generator.integers(len(RESULTS))]
        name = LISTS[generator.integers(len(LISTS))]
        asking = ASKING[generator.integers(len(ASKING))]
        numbers = {"n": int(generator.integers(2, 100)), "m": int(generator.integers(2, 10))}
        wanted = f"{result} of the {change}{kept} in {name}".format(**numbers)
        code = form.format(expression.format(**numbers), name, condition.format(**numbers))
        yield {
            "instruction": asking.format(wanted),
            "output": f"def {end}_of_{name}({name}):\n    return {code}\n",
        }


def write_examples(path: Path, count: int, seed: int = 0) -> None:
    """The same as JSONL, which the case study reads like any dataset."""
    lines = (json.dumps(row) + "\n" for row in examples(count, seed))
    path.write_text("".join(lines), encoding="utf-8")


END = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, 256 of them, and one that ends a text.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.decode(tokenizer("1 → 2").input_ids), len(tokenizer)
    ('1 → 2', 257)
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(bytes_alone)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = build(tokenizer_object=tokenizer, eos_token=END)
    return made


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
            byte_tokenizer().save_pretrained(model)
            if settings.model == QWEN_3B:
                qwen_3b().save_pretrained(model)
            else:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(settings.seed)
                    Qwen2ForCausalLM(tiny_qwen()).save_pretrained(model)
        if dataset == BUNDLED:
            dataset = str(folder / "questions.jsonl")
            write_examples(Path(dataset), NUM_EXAMPLES, settings.seed)
        yield Sources(model, dataset)


def tiny_qwen() -> Qwen2Config:
    """A hundred thousand weights, which any processor trains in a minute."""
    return Qwen2Config(
        vocab_size=257, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip


def qwen_3b() -> Qwen2Config:
    """The architecture of Qwen2.5-3B, for random weights where nothing can be downloaded."""
    rope: Any = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, max_position_embeddings=32768,
        tie_word_embeddings=True, rope_parameters=rope,
    )  # fmt: skip
