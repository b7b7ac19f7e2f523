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
    rows = []
    for file in files:
        if file.suffix not in READERS:
            raise CaseStudyError(
                f"--dataset {path}: {path.suffix or 'no suffix'} is not known; "
                f"accepted are {', '.join(READERS)}"
            )
        try:
            found = READERS[file.suffix](file)
            for number, row in enumerate(found, start=1):
                if not isinstance(row, dict):
                    raise ValueError(
                        f"row {number}: found {row!r:.60}, and a row has named columns"
                    )
        except (OSError, ValueError, csv.Error) as error:
            raise CaseStudyError(f"--dataset {file}: {error}") from None
        rows += found
    return rows


def _json_lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON ({error})") from None
    return rows


def _json(path: Path) -> list[Any]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError("a list of rows is needed")
    return rows


def _csv(path: Path) -> list[Any]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _parquet(path: Path) -> list[Any]:
    from pyarrow import parquet

    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet,
}  # fmt: skip
#: Columns that hold a question and its answer; the first pair that is there counts.
PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
)
Messages = list[dict[str, str]]


def reader_of(rows: Rows, source: str) -> Callable[[dict[str, Any]], Messages]:
    """How to read a row as messages, of which the last is learnt, by the columns of the first."""
    columns = list(rows[0])
    for question, answer in PAIRS:
        if question in columns and answer in columns:
            return lambda row: [
                {"role": "user", "content": str(row[question] or "")},
                {"role": "assistant", "content": str(row[answer] or "")},
            ]
    if "messages" in columns:
        return lambda row: _conversation(row["messages"], source)
    if "text" in columns:
        return lambda row: [{"role": "assistant", "content": str(row["text"] or "")}]
    accepted = ", ".join([*(f"{q} with {a}" for q, a in PAIRS), "messages", "text"])
    raise CaseStudyError(
        f"--dataset {source}: none of its columns is known to hold text; found "
        f"{', '.join(map(str, columns))}; accepted are {accepted}"
    )


def _conversation(messages: Any, source: str) -> Messages:
    try:
        return [{"role": str(m["role"]), "content": str(m["content"] or "")} for m in messages]
    except (TypeError, KeyError):
        raise CaseStudyError(
            f"--dataset {source}: found {messages!r:.80} under 'messages'; each message has "
            "a role and a content"
        ) from None


def tokens_of(
    messages: Messages, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Token ids and labels, one each; those of all but the last message are IGNORED."""
    read, learnt = (
        tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        for text in _texts(messages, tokenizer)
    )
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in learnt[-2:]:
        learnt = [*learnt, tokenizer.eos_token_id]
    return [*read, *learnt], [*[IGNORED] * len(read), *learnt]


def _texts(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What is read and learnt, in the form that the model was made for where it states one."""
    before, answer = messages[:-1], messages[-1]["content"] if messages else ""
    if before and tokenizer.chat_template:
        shown: Any = tokenizer.apply_chat_template
        start = str(shown(before, tokenize=False, add_generation_prompt=True))
        last = {"role": "assistant", "content": answer}
        whole = str(shown([*before, last], tokenize=False))
        if whole.startswith(start):
            return start, whole[len(start) :]
    return "".join(f"{message['content']}\n" for message in before), answer


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
        epochs, places = np.divmod(np.arange(number * size, (number + 1) * size), len(self))
        orders = {
            epoch: np.random.default_rng([self.seed, epoch]).permutation(len(self))
            for epoch in set(epochs.tolist())
        }
        chosen = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return Batch(self.tokens_NL[chosen], self.labels_NL[chosen])

    def in_order(self, size: int) -> Iterator[Batch]:
        """All of them, once, `size` at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield Batch(self.tokens_NL[part], self.labels_NL[part])


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
    examples = (tokens_of(read(rows[int(row)]), tokenizer) for row in order)
    most = settings.max_steps * settings.micro_batches * settings.micro_batch_size
    held_out = _pack(examples, settings.eval_sequences, settings)
    training = _pack(examples, most, settings)
    if len(held_out) < settings.eval_sequences or len(training) == 0:
        raise CaseStudyError(
            f"--dataset {source}: its {len(rows)} rows do not fill {settings.eval_sequences} "
            f"held-out sequences of {settings.sequence_length} tokens and one more to train on; "
            "--sequence-length and --eval-sequences can be less"
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
    rows = read_rows(sources.dataset)
    training, held_out = make_blocks(rows, sources.dataset, tokenizer, settings)
    known = config.get_text_config().vocab_size
    highest = max(int(part.tokens_NL.max()) for part in (training, held_out))
    if highest >= known:
        raise CaseStudyError(
            f"--model {settings.model}: its tokenizer gives token {highest} and the model knows "
            f"{known}: they do not belong together"
        )
    return Data(training=training, held_out=held_out, vocabulary=min(len(tokenizer), known))
