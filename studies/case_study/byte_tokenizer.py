"""A tokenizer that knows bytes and an end, for models that are trained from nothing."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
