"""What one line, entry or name of a file states: tables of lines.yaml, and their laws."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.answer import raised
from rmetric.diagnosis.facts.job import STAGES
from rmetric.diagnosis.library.stages import (
    RULES,
    next_stage,
    possible_rules,
    stage_by_rules,
    stage_of,
    stated_stage,
)
from rmetric.diagnosis.patterns.values import is_not_finite
from rmetric.diagnosis.reading.file_names import identify_files
from rmetric.diagnosis.reading.text import kind_of, level
from rmetric.diagnosis.reading.timestamps import parse
from rmetric.diagnosis.templates import masked
from rmetric.readers.step_forms import match_step, may_state_step
from studies.diagnosis_benchmark.corpus import TABLES


def form(text: str) -> bytes:
    return text.lower().encode().translate(None, b"0123456789")


def zeros(text: str) -> str:
    return re.sub("[0-9]+", "0", text)


#: Table -> what reads a text of it.
READERS = {
    "stages": stated_stage,
    "functions": lambda name: stage_of(FRAME.format("a.py", name)),
    "kinds": lambda text: kind_of(text.encode()),
    "levels": level,
    "templates": lambda text: masked(zeros(text)),
    "losses": is_not_finite,
    "exceptions": raised,
}


@pytest.mark.parametrize("table", READERS)
def test_what_a_text_states(table):
    found = {text: READERS[table](text) for _, text in TABLES[table]}
    assert found == {text: stated for stated, text in TABLES[table]}


def test_what_states_no_time():
    assert [text for text in TABLES["no_times"] if parse(text) is not None] == []


def test_what_states_a_stage_passes_the_gates():
    for stage, text in TABLES["stages"]:
        assert not stage or possible_rules(form(text)) or may_state_step(zeros(text)), text


@pytest.mark.parametrize("case", TABLES["files"], ids=lambda case: " ".join(case["names"][:2]))
def test_what_the_names_of_files_state(case):
    files = identify_files(case["names"])
    for field in ("node", "rank", "local_rank", "node_number"):
        for file, stated in zip(files, case.get(f"{field}s", []), strict=False):
            assert getattr(file, field) == stated
    assert not any(file.ranked for file in files) or "ranked" not in case


# stages


@pytest.mark.parametrize("kind", RULES)
def test_every_rule_of_a_stage_matches_its_example_before_all_others(kind):
    stages = {rule.stage for rule in RULES[kind]}
    assert stages == {"", *STAGES} if kind == "entries" else stages < {"", *STAGES}
    for at, rule in enumerate(RULES[kind]):
        assert re.search("|".join(rule.patterns), rule.example, re.IGNORECASE), rule.example
        assert stage_by_rules(kind, rule.example) == rule.stage
        assert bool(rule.gates) == (kind == "entries")
        assert not rule.gates or at in possible_rules(form(rule.example))
        assert all(gate and form(gate).decode() == gate for gate in rule.gates)


def test_a_job_that_works_does_not_go_back_to_its_start():
    stage = ""
    for line in ("launch", "initialise", "train", "compile", "checkpoint", "load data", ""):
        stage = next_stage(stage, line)
    assert stage == "checkpoint"
    assert next_stage("train", "launch") == "launch"
    assert next_stage("launch", "initialise") == "initialise"


PIECES = st.sampled_from(
    [
        "step", "Step", "steps", "global_step", "iter", "iter(train)", "update", "batch", "it",
        "loss", "loss scale", "grad_norm", "epoch", "eval", "training", "finished", "saving",
        "checkpoint", "data", "start", "loading", "=", ":", "={'a':", "'", '"', "[", "]", "(", "|",
        "/", "%", ",", " - ", "--", "12", "7", "0.5", "1,234", ".5", "1e3", "nan", "٣", "K",
        "2024-01-02 03:04:05",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=12), st.sampled_from(["", " "]))
def test_what_tells_a_step_or_a_stage_passes_the_gates(pieces, gap):
    text = gap.join(pieces)
    if match_step(text) is not None:
        assert may_state_step(zeros(text))
    stage = stated_stage(text)
    rules, step = possible_rules(form(text)), may_state_step(zeros(text))
    assert stated_stage(text, rules, may_step=step) == stage
    assert not stage or rules or step


# tracebacks


def test_of_several_exceptions_the_last_traceback_speaks():
    first = 'Traceback (most recent call last):\n  File "a.py", line 1, in a\nKeyError: 1'
    then = "\nDuring handling of the above exception, another exception occurred:\n"
    text = first + then + first.replace("KeyError: 1", "PlanError: two").replace("a.py", "b.py")
    assert raised(text) == "PlanError in a (b.py:1): two"


FRAME = '  File "{}", line 3, in {}\n'


@pytest.mark.parametrize(
    ("stage", "frames"),
    [
        ("checkpoint", [("a.py", "train"), ("a.py", "save_checkpoint")]),
        ("train", [("a.py", "train"), ("a.py", "check")]),
        ("", [("/datasets/run/model.py", "check")]),
        ("", [("/datasets/train_dataloader.py", "<module>")]),
        # A launcher's own frames, and a list of layers, state no stage.
        ("", [("/lib/torch/distributed/elastic/agent/api.py", "_initialize_workers"),
              ("/lib/torch/nn/modules/container.py", "__getitem__")]),
    ],
)  # fmt: skip
def test_the_stage_is_that_of_the_innermost_frame_that_has_one(stage, frames):
    text = "".join(FRAME.format(*frame) for frame in frames)
    assert stage_of(f"Traceback (most recent call last):\n{text}X: y") == stage


def test_the_stage_of_a_chain_is_that_of_its_first_exception():
    first, then = FRAME.format("a.py", "training_step"), FRAME.format("a.py", "teardown")
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert stage_of(f"{first}X: y\n{chain}{then}Z: w") == "train"
    assert stage_of(FRAME.format("a.py", "main") + f"X: y\n{chain}{then}Z: w") == "tear-down"
