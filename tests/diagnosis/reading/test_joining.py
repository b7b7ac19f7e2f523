"""Joining of lines into entries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.reading.text import KINDS, MAX_TEXT, TRANSITIONS, kind_of, shortened
from studies.diagnosis_benchmark.corpus import TABLES

ONE = TABLES["entries"]


def entries(text: str) -> list[str]:
    """The entries of a log, as the pass over it makes them."""
    found: list[list[str]] = []
    state = ""
    for line in text.strip("\n").split("\n"):
        kind = kind_of(line.encode())
        joined, state = TRANSITIONS[state][kind]
        if kind != "blank":
            found += [] if joined and found else [[]]
            found[-1].append(line)
    return ["\n".join(lines) for lines in found]


@pytest.mark.parametrize("name", ONE)
def test_one_entry(name):
    text = ONE[name].strip("\n")
    around = entries(f"before\n{text}\nafter\nafter that")
    lines = "\n".join(line for line in text.split("\n") if line)
    assert around == ["before", lines, "after", "after that"]


APART = """
 iteration 1/ 10 | loss 2.5
 iteration 2/ 10 | loss 2.4
   50%|#####     | 5/10 [00:01<00:01]
    step 3 loss 2.3
Epoch 1: begin
ValueError: one rank
ValueError: another rank
Traceback (most recent call last):
Traceback (most recent call last):
INFO: said
-----------
a title
-----------
*** said ***
"""


def test_lines_that_are_entries_of_their_own():
    assert entries(APART) == APART.strip("\n").split("\n")


def test_the_table_is_whole():
    assert {kind.opens for kind in KINDS.values()} < TRANSITIONS.keys()
    # An open entry never ends by an empty line, and a plain line that is not joined ends it.
    for state, row in TRANSITIONS.items():
        assert row.keys() == {"", *KINDS}
        assert {after for _, after in row.values()} <= TRANSITIONS.keys()
        assert row["blank"] == (True, state)
        joined, after = row[""]
        assert joined == (state in ("led", "framed"))
        assert joined or after == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_line_has_its_examples(kind):
    assert {kind_of(line.encode()) for line in KINDS[kind].examples} == {kind}


@given(st.binary(max_size=100), st.integers(0, 9))
def test_the_kind_does_not_depend_on_the_digits(line, digit):
    zero = bytes(48 if 48 <= byte <= 57 else byte for byte in line)
    other = bytes(48 + digit if 48 <= byte <= 57 else byte for byte in line)
    assert kind_of(zero) == kind_of(other)


@given(st.lists(st.text(max_size=1500), min_size=1, max_size=30))
def test_an_entry_keeps_its_beginning_and_its_end(lines):
    whole = "\n".join(lines)
    text = shortened(whole)
    assert len(text) <= MAX_TEXT
    if len(whole) <= MAX_TEXT:
        assert text == whole
    else:
        assert text[: MAX_TEXT // 2] == whole[: MAX_TEXT // 2]
        assert text[-1900:] == whole[-1900:]
