"""From the rows of a dataset, or the bundled text, to the micro-batch of every step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, load_dataset
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from studies.case_study.models import loaded
from studies.case_study.settings import BUNDLED, DATASET, IGNORED, CaseStudyError, Settings

DATASET_CONFIG = "educational_instruct"  # of DATASET
NUM_EXAMPLES = 6000  # of the bundled text
#: Suffix of a file -> the reader of `datasets`.
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
#: Columns of a question and its answer, of messages, or of a text; the first that are there count.
COLUMNS = (
    ("instruction", "output"), ("instruction", "response"), ("prompt", "completion"),
    ("prompt", "response"), ("question", "answer"), ("messages",), ("text",),
)  # fmt: skip
Messages = list[dict[str, str]]
Text = tuple[list[int], list[int]]  # token ids and labels, one each
Tokens = NDArray[np.int64]


def read_rows(source: str, seed: int = 0) -> Any:
    """The rows of a local file or folder, of a dataset on the hub, or of the bundled text."""
    if source == BUNDLED:
        return Dataset.from_list(list(examples(NUM_EXAMPLES, seed)))
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in READERS:
            raise CaseStudyError(
                f"--dataset {source}: {path.suffix or 'no suffix'} is not known; "
                f"accepted are {', '.join(READERS)}"
            )
        arguments: dict[str, Any] = dict(path=READERS[path.suffix], data_files=str(path))
    elif path.is_dir():  # it may be a copy of DATASET
        inside = path / DATASET_CONFIG
        arguments = dict(path=str(inside if inside.is_dir() else path))
    else:
        arguments = dict(path=source, name=DATASET_CONFIG if source == DATASET else None)
    return loaded(source, "--dataset", lambda _: load_dataset(**arguments, split="train"))


def messages_of(row: dict[str, Any], source: str) -> Messages:
    """A row as messages, of which the last is learnt."""
    columns = next((names for names in COLUMNS if row.keys() >= {*names}), None)
    if columns is None:
        raise CaseStudyError(
            f"--dataset {source}: none of its columns is known to hold text; found "
            f"{', '.join(map(str, row))}; accepted are {', '.join(map(' with '.join, COLUMNS))}"
        )
    found = row[columns[0]]
    if columns != ("messages",):
        roles = ("user", "assistant")[-len(columns) :]
        found = [dict(role=r, content=row[c]) for r, c in zip(roles, columns, strict=True)]
    try:
        return [{"role": str(m["role"]), "content": str(m["content"] or "")} for m in found]
    except (TypeError, KeyError):
        raise CaseStudyError(
            f"--dataset {source}: found {found!r:.80} under 'messages'; each message has "
            "a role and a content"
        ) from None


def tokens_of(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Token ids and labels, one each; those of all but the last message are IGNORED."""
    before, answer = messages[:-1], messages[-1]["content"] if messages else ""
    question = "".join(f"{message['content']}\n" for message in before)
    if before and tokenizer.chat_template:  # the form that the model was made for
        shown: Any = tokenizer.apply_chat_template
        start = str(shown(before, tokenize=False, add_generation_prompt=True))
        whole = str(shown([*before, messages[-1] | {"role": "assistant"}], tokenize=False))
        if whole.startswith(start):
            question, answer = start, whole[len(start) :]
    read, learnt = (
        tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        for text in (question, answer)
    )
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in learnt[-2:]:
        learnt = [*learnt, tokenizer.eos_token_id]
    return [*read, *learnt], [*[IGNORED] * len(read), *learnt]


class Batch(NamedTuple):
    """Token ids and labels, shape (sequences, length)."""

    tokens_BL: Tokens
    labels_BL: Tokens


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sequences of one length, shapes (N, L); a batch depends on the seed and its number alone."""

    tokens_NL: Tokens
    labels_NL: Tokens
    seed: int = 0

    def __len__(self) -> int:
        return len(self.tokens_NL)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.tokens_NL.tobytes() + self.labels_NL.tobytes()).hexdigest()

    def batch(self, number: int, size: int) -> Batch:
        """The batch of this number, from 0; every epoch has an order of its own."""
        epochs, places = np.divmod(np.arange(number * size, (number + 1) * size), len(self))
        orders = {
            epoch: np.random.default_rng([self.seed, epoch]).permutation(len(self))
            for epoch in set(epochs.tolist())
        }
        chosen = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return Batch(self.tokens_NL[chosen], self.labels_NL[chosen])

    def in_order(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self), size):
            yield Batch(self.tokens_NL[start : start + size], self.labels_NL[start : start + size])


class Data(NamedTuple):
    """Training and held-out sequences; `vocabulary` is the number of tokens."""

    training: Blocks
    held_out: Blocks
    vocabulary: int


def load_data(
    settings: Settings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Data:
    """The sequences that the steps will use, shuffled by the seed; the held-out ones first."""
    source, rows = settings.dataset, read_rows(settings.dataset, settings.seed)
    order = np.random.default_rng(settings.seed).permutation(len(rows))
    texts = (tokens_of(messages_of(rows[int(row)], source), tokenizer) for row in order)
    held_out = _pack(texts, settings.eval_sequences, settings)
    most = settings.max_steps * settings.micro_batches * settings.micro_batch_size
    training = _pack(texts, most, settings)
    if len(held_out) < settings.eval_sequences or len(training) == 0:
        raise CaseStudyError(
            f"--dataset {source}: its {len(rows)} rows do not fill {settings.eval_sequences} "
            f"held-out sequences of {settings.sequence_length} tokens and one more to train on; "
            "--sequence-length and --eval-sequences can be less"
        )
    known = config.get_text_config().vocab_size
    highest = max(int(part.tokens_NL.max()) for part in (training, held_out))
    if highest >= known:
        raise CaseStudyError(
            f"--model {settings.model}: its tokenizer gives token {highest} and the model knows "
            f"{known}: they do not belong together"
        )
    return Data(training, held_out, min(len(tokenizer), known))


def _pack(texts: Iterator[Text], wanted: int, settings: Settings) -> Blocks:
    """Texts one after the other, cut into blocks; those with nothing to learn are left out."""
    length = settings.sequence_length
    tokens: list[int] = []
    labels: list[int] = []
    blocks: list[Text] = []
    while len(blocks) < wanted and (text := next(texts, None)):
        tokens += text[0]
        labels += text[1]
        while len(tokens) >= length and len(blocks) < wanted:
            if any(label != IGNORED for label in labels[1:length]):
                blocks.append((tokens[:length], labels[:length]))
            del tokens[:length], labels[:length]
    whole_N2L = np.array(blocks, dtype=np.int64).reshape(len(blocks), 2, length)
    return Blocks(tokens_NL=whole_N2L[:, 0], labels_NL=whole_N2L[:, 1], seed=settings.seed)


# -- the bundled text: questions about small Python functions

#: What is kept of a list, in words and as a condition on x; {n} is a number.
CHOICES = (
    ("all items", ""), ("the even numbers", " if x % 2 == 0"),
    ("the odd numbers", " if x % 2 == 1"), ("the numbers above {n}", " if x > {n}"),
    ("the numbers below {n}", " if x < {n}"), ("the multiples of {n}", " if x % {n} == 0"),
    ("the numbers other than {n}", " if x != {n}"),
)  # fmt: skip
#: What is done to each, in words and as an expression of x.
CHANGES = (
    ("", "x"), ("squares of ", "x * x"), ("doubles of ", "2 * x"),
    ("absolute values of ", "abs(x)"), ("remainders by {m} of ", "x % {m}"),
    ("texts of ", "str(x)"), ("negatives of ", "-x"),
)  # fmt: skip
#: What becomes of the result: in words, the wrapped expression, and the end of the name.
RESULTS = (
    ("the sum", "sum({} for x in {}{})", "sum"),
    ("the largest", "max({} for x in {}{})", "largest"),
    ("the smallest", "min({} for x in {}{})", "smallest"), ("a list", "[{} for x in {}{}]", "list"),
    ("a sorted list", "sorted({} for x in {}{})", "sorted"),
    ("the number", "len([{} for x in {}{}])", "count"), ("a set", "{{{} for x in {}{}}}", "set"),
)  # fmt: skip
LISTS = ("numbers", "values", "items", "scores", "ages", "prices", "row", "data")
ASKING = (
    "Write a function that returns {}.", "How do I get {} in Python?",
    "Give me a Python function for {}.", "I need {}. Show the code.",
)  # fmt: skip


def examples(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """`count` rows with the columns instruction and output; the same for the same seed."""
    generator, tables = np.random.default_rng(seed), (CHOICES, CHANGES, RESULTS, LISTS, ASKING)
    for _ in range(count):
        drawn: Any = [table[generator.integers(len(table))] for table in tables]
        (kept, condition), (change, expression), (result, form, end), name, asking = drawn
        numbers = {"n": int(generator.integers(2, 100)), "m": int(generator.integers(2, 10))}
        wanted = f"{result} of the {change}{kept} in {name}".format(**numbers)
        code = form.format(expression.format(**numbers), name, condition.format(**numbers))
        function = f"def {end}_of_{name}({name}):\n    return {code}\n"
        yield {"instruction": asking.format(wanted), "output": function}
