"""The parts of the case study: data and faults."""

import csv
import json

import numpy as np
import pytest
import torch

from studies.case_study import data
from studies.case_study.models import byte_tokenizer, read_config
from studies.case_study.settings import BUNDLED, IGNORED, SMALL, TINY, Fault, Settings, faults_of
from tests.studies.case_study.runs import write_examples

TOKENIZER = byte_tokenizer()


def fault_of(text: str, onset: int = 400, duration: int | None = None) -> Fault:
    [fault] = faults_of(text, onset, duration)
    return fault


def test_the_tokenizer_s_folder_gives_back_the_same_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    read_config(TINY).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    text = "def f(x):\n\treturn 'ä → 猫'  # 50 %"
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert ids == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert loaded.decode(ids) == text
    assert loaded.eos_token_id == TOKENIZER.eos_token_id == 256


def first_tokens(row: dict) -> tuple[list[int], list[int]]:
    return data.tokens_of(data.messages_of(row, "x"), TOKENIZER)


def test_the_same_words_are_the_same_tokens_whatever_the_columns_are_called():
    pairs = [("instruction", "output"), ("instruction", "response"), ("prompt", "completion"),
             ("prompt", "response"), ("question", "answer")]  # fmt: skip
    messages = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]
    rows = [{q: "why?", a: "so.", "id": 1} for q, a in pairs] + [{"messages": messages}]
    assert len({str(first_tokens(row)) for row in rows}) == 1


def test_the_question_is_read_and_the_answer_with_its_end_is_learnt():
    tokens, labels = first_tokens({"prompt": "why?", "completion": "so."})
    assert TOKENIZER.decode(tokens) == "why?\nso.<|endoftext|>"
    assert TOKENIZER.decode([label for label in labels if label != IGNORED]) == "so.<|endoftext|>"
    tokens, labels = first_tokens({"text": "why?"})
    assert tokens == labels


def test_a_chat_template_is_used_where_the_tokenizer_has_one():
    chat = byte_tokenizer()
    chat.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = {"instruction": "why?", "output": "so."}
    tokens, labels = data.tokens_of(data.messages_of(row, "x"), chat)
    assert chat.decode(tokens) == "<user>why?\n<assistant>so.\n<|endoftext|>"
    assert chat.decode([x for x in labels if x != IGNORED]) == "so.\n<|endoftext|>"


def test_four_formats_and_a_folder_hold_the_same_rows(tmp_path):
    from pyarrow import Table, parquet

    rows = list(data.examples(5))
    write_examples(tmp_path / "a.jsonl", 5)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for suffix in ("jsonl", "json", "parquet", "csv"):
        assert list(data.read_rows(str(tmp_path / f"a.{suffix}"))) == rows
    (tmp_path / "twice").mkdir()
    for name in ("b.jsonl", "c.jsonl"):
        write_examples(tmp_path / "twice" / name, 5)
    assert list(data.read_rows(str(tmp_path / "twice"))) == rows * 2
    # A copy of the default dataset has its configurations below it.
    (tmp_path / "twice").rename(tmp_path / "educational_instruct")
    assert list(data.read_rows(str(tmp_path))) == rows * 2
    assert list(data.read_rows(BUNDLED, seed=3))[:5] == list(data.examples(5, seed=3))


def blocks_of(sequence_length: int = 32, **changes: int) -> tuple[data.Blocks, data.Blocks]:
    few = {"sequence_length": sequence_length, "max_steps": 20, "eval_sequences": 3}
    settings = Settings(**SMALL | few | changes)
    return data.load_data(settings, read_config(TINY), TOKENIZER)[:2]


def test_no_held_out_sequence_is_trained_on():
    training, held_out = blocks_of(96)  # in shorter ones the same words may come twice
    trained = {tuple(row) for row in training.tokens_NL}
    assert len(held_out) == 3
    assert not any(tuple(row) in trained for row in held_out.tokens_NL)


def test_an_epoch_shows_each_sequence_once_and_the_next_in_another_order():
    training, _ = blocks_of()
    size, number = 3, len(training)
    first, second = (
        np.concatenate([training.batch(i, size).tokens_BL for i in range(start, start + number)])
        for start in (0, number)
    )
    whole = sorted(map(tuple, np.repeat(training.tokens_NL, size, axis=0)))
    assert sorted(map(tuple, first)) == sorted(map(tuple, second)) == whole
    assert not np.array_equal(first, second)


def batch_of(size: int = 40, length: int = 50) -> data.Batch:
    tokens = np.tile(np.arange(length), (size, 1))
    labels = tokens.copy()
    labels[:, :10] = IGNORED
    return data.Batch(tokens, labels)


def test_the_learning_rate_is_multiplied_or_runs_away():
    spike, runaway = fault_of("LR_SPIKE"), fault_of("LR_RUNAWAY")
    assert {spike.rate(spike.severity, step) for step in (1, 20)} == {15.0}
    rates = [runaway.rate(runaway.severity, step) for step in range(1, 101)]
    assert rates == pytest.approx([1.1**step for step in range(1, 101)])


def test_faults_of_gradients_change_them_by_their_severity():
    gradient = torch.linspace(-1, 1, 30)
    scaled, turned, spoilt = (
        fault_of(name).gradient for name in ("GRADIENT_SCALE:7", "SIGN_FLIP_ALL", "NAN_GRADIENT")
    )
    assert torch.equal(scaled(gradient, 7.0), 7 * torch.linspace(-1, 1, 30))
    assert torch.equal(turned(gradient, 2.0), -2 * torch.linspace(-1, 1, 30))
    assert spoilt(gradient, 1.0).isnan().all()


def test_corrupted_data_is_learnt_as_it_is_read_and_shuffled_labels_are_the_same_ones_elsewhere():
    clean, chance = batch_of(), np.random.default_rng(0)
    spoilt = fault_of("DATA_CORRUPTION").batch(batch_of(), 0.3, 257, chance)
    changed = spoilt.tokens_BL != clean.tokens_BL
    assert changed.mean() == pytest.approx(0.3, abs=0.03)
    learnt = clean.labels_BL != IGNORED
    assert np.array_equal(spoilt.labels_BL[learnt], spoilt.tokens_BL[learnt])
    assert (spoilt.labels_BL[~learnt] == IGNORED).all()
    spoilt = fault_of("LABEL_SHUFFLE").batch(batch_of(), 0.5, 257, chance)
    assert np.array_equal(clean.tokens_BL, spoilt.tokens_BL)
    assert np.array_equal(np.sort(clean.labels_BL), np.sort(spoilt.labels_BL))
    moved = (clean.labels_BL != spoilt.labels_BL).any(axis=1)
    assert 0.3 < moved.mean() < 0.7
