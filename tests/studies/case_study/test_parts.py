"""The parts of the case study: data, faults, checkpoints."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

from studies.case_study.bundled import byte_tokenizer, examples, tiny_qwen, write_examples
from studies.case_study.data import Batch, Blocks, make_blocks, read_rows, reader_of, tokens_of
from studies.case_study.faults import FAULTS, Fault, faults_of
from studies.case_study.folder import Checkpoints
from studies.case_study.settings import IGNORED, CaseStudyError, Settings, tiny_settings

TOKENIZER = byte_tokenizer()


def fault_of(**settings) -> Fault:
    [fault] = faults_of(Settings(**settings))
    return fault


# -- data


def test_the_tokenizer_s_folder_gives_back_the_same_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tiny_qwen().save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    text = "def f(x):\n\treturn 'ä → 猫'  # 50 %"
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert ids == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert loaded.decode(ids) == text
    assert loaded.eos_token_id == TOKENIZER.eos_token_id == 256


def test_the_bundled_text_is_python_and_the_same_for_the_same_seed():
    rows = list(examples(200, seed=3))
    assert rows == list(examples(200, seed=3))
    assert rows != list(examples(200, seed=4))
    for row in rows:
        compile(row["output"], "bundled", "exec")
    assert len({row["output"] for row in rows}) > 150


def first_tokens(row: dict) -> tuple[list[int], list[int]]:
    return tokens_of(reader_of([row], "x")(row), TOKENIZER)


def test_the_same_words_are_the_same_tokens_whatever_the_columns_are_called():
    pairs = [("instruction", "output"), ("prompt", "completion"), ("question", "answer")]
    said = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]
    rows = [{q: "why?", a: "so.", "id": 1} for q, a in pairs] + [{"messages": said}]
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
    tokens, labels = tokens_of(reader_of([row], "x")(row), chat)
    assert chat.decode(tokens) == "<user>why?\n<assistant>so.\n<|endoftext|>"
    assert chat.decode([x for x in labels if x != IGNORED]) == "so.\n<|endoftext|>"


def test_four_formats_and_a_folder_hold_the_same_rows(tmp_path):
    from pyarrow import Table, parquet

    rows = list(examples(5))
    write_examples(tmp_path / "a.jsonl", 5)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for suffix in ("jsonl", "json", "parquet", "csv"):
        assert list(read_rows(str(tmp_path / f"a.{suffix}"))) == rows
    assert list(read_rows(str(tmp_path))) == rows * 4


def blocks_of(sequence_length: int = 32, **changes: int) -> tuple[Blocks, Blocks]:
    settings = tiny_settings(
        sequence_length=sequence_length, max_steps=20, eval_sequences=3, **changes
    )
    return make_blocks(list(examples(60)), "x", TOKENIZER, settings)


def test_no_held_out_sequence_is_trained_on():
    training, held_out = blocks_of(96)  # in shorter ones the same words may come twice
    trained = {tuple(row) for row in training.tokens_NL}
    assert len(held_out) == 3
    assert not any(tuple(row) in trained for row in held_out.tokens_NL)


def test_every_sequence_has_something_to_learn():
    for part in blocks_of():
        assert ((part.labels_NL[:, 1:] != IGNORED).sum(axis=1) > 0).all()
    assert blocks_of(seed=0)[0].digest == blocks_of(seed=0)[0].digest
    assert blocks_of(seed=0)[0].digest != blocks_of(seed=1)[0].digest


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


# -- faults


def chance() -> np.random.Generator:
    return np.random.default_rng(0)


def batch_of(size: int = 40, length: int = 50) -> Batch:
    tokens = np.tile(np.arange(length), (size, 1))
    labels = tokens.copy()
    labels[:, :10] = IGNORED
    return Batch(tokens, labels)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_acts_from_its_onset_for_its_duration(name):
    fault = fault_of(fault=name, fault_step=100, fault_steps=7)
    assert [step for step in range(90, 120) if fault.acts(step)] == list(range(100, 107))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_strikes_gradients_changes_them_and_no_other_does(name):
    fault = fault_of(fault=name)
    gradient = torch.linspace(-1, 1, 30)
    struck = fault.gradient(gradient, 0, chance())
    strikes = name in ("GRADIENT_SCALE", "SIGN_FLIP_ALL", "GRADIENT_NOISE", "NAN_GRADIENT")
    assert (not torch.equal(struck, gradient)) is strikes is bool(fault.kind.gradient)
    assert torch.equal(gradient, torch.linspace(-1, 1, 30))
    if name != "SIGN_FLIP_ALL":  # the others strike the first worker alone
        assert torch.equal(fault.gradient(gradient, 1, chance()), gradient)


def test_noise_is_as_large_as_it_says():
    gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    noise = fault_of(fault="GRADIENT_NOISE", severity=5.0).gradient(gradient, 0, chance())
    assert float((noise - gradient).norm() / gradient.norm()) == pytest.approx(5.0, rel=0.05)


def test_corrupted_data_is_learnt_as_it_is_read():
    fault = fault_of(fault="DATA_CORRUPTION", severity=0.3)
    clean, spoilt = batch_of(), fault.batch(batch_of(), 257, chance())
    changed = spoilt.tokens_BL != clean.tokens_BL
    assert changed.mean() == pytest.approx(0.3, abs=0.03)
    learnt = clean.labels_BL != IGNORED
    assert np.array_equal(spoilt.labels_BL[learnt], spoilt.tokens_BL[learnt])
    assert (spoilt.labels_BL[~learnt] == IGNORED).all()


def test_shuffled_labels_are_the_same_ones_elsewhere():
    fault = fault_of(fault="LABEL_SHUFFLE", severity=0.5)
    clean, spoilt = batch_of(), fault.batch(batch_of(), 257, chance())
    assert np.array_equal(clean.tokens_BL, spoilt.tokens_BL)
    assert np.array_equal(np.sort(clean.labels_BL), np.sort(spoilt.labels_BL))
    moved = (clean.labels_BL != spoilt.labels_BL).any(axis=1)
    assert 0.3 < moved.mean() < 0.7


def test_a_flipped_bit_is_one_bit_of_one_exponent():
    model = torch.nn.Linear(30, 20)
    before = [p.detach().clone() for p in model.parameters()]
    fault_of(fault="WEIGHT_BIT_FLIP").state(model, None, chance())
    flips = torch.cat(
        [(p.detach().view(torch.int32) ^ old.view(torch.int32)).flatten()
         for p, old in zip(model.parameters(), before, strict=True)]
    )  # fmt: skip
    struck = flips[flips != 0].tolist()
    assert len(struck) == 1
    assert struck[0] in [1 << bit for bit in range(23, 31)]


def test_the_learning_rate_is_multiplied_or_runs_away():
    spike = fault_of(fault="LR_SPIKE")
    assert spike.learning_rate(400, 1e-4) == spike.learning_rate(419, 1e-4) == 15e-4
    runaway = fault_of(fault="LR_RUNAWAY")
    rates = [runaway.learning_rate(step, 1e-4) for step in range(400, 500)]
    assert rates == sorted(rates)
    assert rates[0] > 1e-4


# -- checkpoints


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_checkpoint_does_not_change_with_what_it_was_taken_of(tmp_path, on_disk):
    checkpoints = Checkpoints(tmp_path / "states" if on_disk else None)
    weights = torch.zeros(3)
    checkpoints.save("last", {"step": 4, "weights": {"w": weights}, "alerts": [1, True]})
    weights += 1
    state = checkpoints.load("last")
    assert state["weights"]["w"].tolist() == [0, 0, 0]
    assert (state["step"], state["alerts"]) == (4, [1, True])
    checkpoints.forget("last")
    assert checkpoints.load("last") is None
    assert not (tmp_path / "states").exists()


def test_a_disk_without_room_is_said_before_the_training(tmp_path):
    with pytest.raises(CaseStudyError, match="--checkpoint-every 0"):
        Checkpoints(tmp_path / "states").check_room(10**18, number=2)
    Checkpoints(None).check_room(10**18, number=2)
