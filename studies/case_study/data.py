"""From the rows of a dataset to the micro-batch of every step."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from studies.case_study.bundled import Sources
from studies.case_study.models import is_local, load_tokenizer
from studies.case_study.settings import DATASET, DATASET_CONFIG, IGNORED, CaseStudyError, Settings

Rows = Sequence[dict[str, Any]]


def read_rows(source: str) -> Rows:
    """The rows of a local file or folder, or of a dataset on the hub."""
    rows = _local(Path(source).expanduser()) if is_local(source) else _from_hub(source)
    if len(rows) == 0:
        raise CaseStudyError(f"--dataset {source}: it has no rows")
    return rows


def _from_hub(name: str) -> Rows:
    from datasets import load_dataset  # takes seconds, which local files need not spend

    config = DATASET_CONFIG if name == DATASET else None
    try:
        rows: Rows = load_dataset(name, config, split="train")
        return rows
    except Exception as error:  # whatever is wrong with somebody's dataset, it is said
        reason = " ".join(str(error).split())
        raise CaseStudyError(f"--dataset {name}: it cannot be loaded ({reason[:300]})") from None


def _local(path: Path) -> Rows:
    if not path.exists():
        raise CaseStudyError(f"--dataset {path}: there is no such file or folder")
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in READERS)
    if not files:
        raise CaseStudyError(f"--dataset {path}: no {', '.join(READERS)} file is in it")
    return [row for file in files for row in _read(file)]


def _read(path: Path) -> Rows:
    read = READERS.get(path.suffix)
    if read is None:
        raise CaseStudyError(
            f"--dataset {path}: {path.suffix or 'no suffix'} is not known; "
            f"accepted are {', '.join(READERS)}"
        )
    try:
        rows = read(path)
    except (OSError, ValueError, csv.Error) as error:
        raise CaseStudyError(f"--dataset {path}: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise CaseStudyError(
                f"--dataset {path}, row {number}: found {row!r:.60}, and a row has named columns"
            )
    return rows


def _json_lines(path: Path) -> Rows:
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"line {number} is no JSON ({error})") from None
    return rows


def _json(path: Path) -> Rows:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError("a list of rows is needed")
    return rows


def _csv(path: Path) -> Rows:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _parquet(path: Path) -> Rows:
    from pyarrow import parquet

    rows: Rows = parquet.read_table(path).to_pylist()
    return rows


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


#: Columns that hold a question and its answer; the first pair that is there counts.
PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
)
ACCEPTED = ", ".join([*(f"{q} with {a}" for q, a in PAIRS), "messages", "text"])


class Example(NamedTuple):
    """What is read, as messages, and the answer that is learnt."""

    before: list[dict[str, str]]
    answer: str


def reader_of(rows: Rows, source: str) -> Callable[[dict[str, Any]], Example]:
    """How to read a row, by the columns of the first."""
    columns = list(rows[0])
    for question, answer in PAIRS:
        if question in columns and answer in columns:
            return lambda row: _pair(row[question], row[answer])
    if "messages" in columns:
        return lambda row: _conversation(row["messages"], source)
    if "text" in columns:
        return lambda row: Example([], str(row["text"] or ""))
    raise CaseStudyError(
        f"--dataset {source}: none of its columns is known to hold text; found "
        f"{', '.join(map(str, columns))}; accepted are {ACCEPTED}"
    )


def tokens_of(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids and labels, one each; the question's labels are IGNORED."""
    before, answer = _texts(example, tokenizer)
    read, learnt = (
        tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        for text in (before, answer)
    )
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in learnt[-2:]:
        learnt = [*learnt, tokenizer.eos_token_id]
    return [*read, *learnt], [*[IGNORED] * len(read), *learnt]


def _texts(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """In the form that the model was made for, where it states one."""
    if not example.before:
        return "", example.answer
    if tokenizer.chat_template:
        said = {"role": "assistant", "content": example.answer}
        before = str(
            tokenizer.apply_chat_template(
                example.before, tokenize=False, add_generation_prompt=True
            )
        )
        whole = str(tokenizer.apply_chat_template([*example.before, said], tokenize=False))
        if whole.startswith(before):
            return before, whole[len(before) :]
    return "".join(f"{message['content']}\n" for message in example.before), example.answer


def _pair(question: Any, answer: Any) -> Example:
    return Example([{"role": "user", "content": str(question or "")}], str(answer or ""))


def _conversation(messages: Any, source: str) -> Example:
    try:
        said = [{"role": str(m["role"]), "content": str(m["content"] or "")} for m in messages]
    except (TypeError, KeyError):
        raise CaseStudyError(
            f"--dataset {source}: found {messages!r:.80} under 'messages'; each message has "
            "a role and a content"
        ) from None
    return Example(said[:-1], said[-1]["content"] if said else "")


Tokens = NDArray[np.int64]


class Batch(NamedTuple):
    """Token ids and labels, shape (sequences, length)."""

    tokens_BL: Tokens
    labels_BL: Tokens


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sequences of one length, shapes (N, L); one example follows another in them.

    A batch depends on the seed and the step alone, so a run that goes on after a
    kill sees what it would have seen.
    """

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
        wanted = np.arange(number * size, (number + 1) * size)
        epochs, places = np.divmod(wanted, len(self))
        orders = {epoch: self._order(epoch) for epoch in set(epochs.tolist())}
        chosen = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return Batch(self.tokens_NL[chosen], self.labels_NL[chosen])

    def in_order(self, size: int) -> Iterator[Batch]:
        """All of them, once, `size` at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield Batch(self.tokens_NL[part], self.labels_NL[part])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self))


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training and held-out sequences; `vocabulary` is the number of tokens."""

    training: Blocks
    held_out: Blocks
    vocabulary: int


def make_blocks(
    rows: Rows, source: str, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> tuple[Blocks, Blocks]:
    """(training, held out): as many blocks as the steps will use, in an order by the seed."""
    read = reader_of(rows, source)
    order = iter(np.random.default_rng(settings.seed).permutation(len(rows)))
    most = settings.max_steps * settings.micro_batches * settings.micro_batch_size

    def pack(wanted: int) -> Blocks:
        return _pack(
            (tokens_of(read(rows[int(row)]), tokenizer) for row in order), wanted, settings
        )

    held_out = pack(settings.eval_sequences)
    training = pack(most)
    if len(held_out) < settings.eval_sequences or len(training) == 0:
        length = settings.sequence_length
        raise CaseStudyError(
            f"--dataset {source}: its {len(rows)} rows do not fill {settings.eval_sequences} "
            f"held-out sequences of {length} tokens and one more to train on; --sequence-length "
            "and --eval-sequences can be less"
        )
    return training, held_out


def _pack(
    examples: Iterator[tuple[list[int], list[int]]], wanted: int, settings: Settings
) -> Blocks:
    """Examples one after the other, cut into blocks; those with nothing to learn are left out."""
    length = settings.sequence_length
    tokens: list[int] = []
    labels: list[int] = []
    blocks: list[tuple[list[int], list[int]]] = []
    while len(blocks) < wanted and (example := next(examples, None)):
        tokens += example[0]
        labels += example[1]
        while len(tokens) >= length and len(blocks) < wanted:
            if any(label != IGNORED for label in labels[1:length]):
                blocks.append((tokens[:length], labels[:length]))
            del tokens[:length], labels[:length]
    whole_N2L = np.array(blocks, dtype=np.int64).reshape(len(blocks), 2, length)
    return Blocks(tokens_NL=whole_N2L[:, 0], labels_NL=whole_N2L[:, 1], seed=settings.seed)


def load_data(settings: Settings, config: PreTrainedConfig, sources: Sources) -> Data:
    tokenizer = load_tokenizer(sources.model)
    training, held_out = make_blocks(
        read_rows(sources.dataset), sources.dataset, tokenizer, settings
    )
    known = config.get_text_config().vocab_size
    highest = max(int(part.tokens_NL.max()) for part in (training, held_out))
    if highest >= known:
        raise CaseStudyError(
            f"--model {settings.model}: its tokenizer gives token {highest} and the model knows "
            f"{known}: they do not belong together"
        )
    return Data(training=training, held_out=held_out, vocabulary=min(len(tokenizer), known))
