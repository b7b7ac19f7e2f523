"""A row as a question with its answer, whatever the columns are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from studies.case_study.rows import Rows
from studies.case_study.settings import IGNORED, CaseStudyError

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
