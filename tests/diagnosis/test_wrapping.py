"""What a tool puts before every line changes no answer; what may be ranks or steps stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.reading.lines import _layers as wrapping
from rmetric.diagnosis.reading.lines import unwrapped

WRAPPED = [
    "> {line}",
    "> > {line}",
    "{at:6d}\t{line}",
    "[stdout] {line}",
    "    {line}",
    "> \t{line}",
]
LOG = [
    "Traceback (most recent call last):", '  File "fit.py", line 3, in main', "    run()",
    "KeyError: 'x'", "", "step 3 loss 2.1", "[rank3] lost a peer", "srun: error: n7: task 3",
]  # fmt: skip


@given(st.integers(1, 10**6), st.sampled_from(WRAPPED))
def test_it_is_removed_wherever_the_numbers_begin(first, form):
    text = "\n".join(form.format(at=first + at, line=line) for at, line in enumerate(LOG))
    assert unwrapped(text.encode()).decode().split("\n") == LOG


@pytest.mark.parametrize(
    "lines",
    [
        [f"{step}: loss {4 - step / 50}" for step in range(1, 99)],
        [f"{step}:loss {4 - step / 50}" for step in range(1, 99)],
        [f"[{step}] loss {4 - step / 50}" for step in range(1, 99)],
        [f"{rank}: hello from gpu {rank}" for rank in range(1, 17)],
        [f"[{rank}] NCCL INFO comm {rank} ready" for rank in range(8)],
        [f"{rank}: {word}" for rank, word in enumerate(["some", "words", "of", "ranks"])],
        [f"{1700000000 + at} INFO event {'abcdefgh'[at % 8]}" for at in range(40)],
        [f" iteration {at}/ 500 | lm loss: 2.1 |" for at in range(40)],
        [f"12:00:{at:02d} INFO {'abcdefgh'[at % 8]}" for at in range(40)],
        [f"[rank{at % 8}] > step {at}" for at in range(40)],
        [f">>> print({at})" for at in range(40)],
        ["> a", "b", "c", "> d"],
    ],
)
def test_ranks_steps_and_times_stay(lines):
    assert not wrapping([line.encode() for line in lines])
    text = "\n".join(lines).encode()
    assert unwrapped(text) == text


def test_what_was_done_is_told(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"> {line}\n" for line in LOG * 3))
    notes = " ".join(diagnose([tmp_path], jobs=1).notes)
    assert "a mark, number or indent before every line was left out" in notes


def test_lines_without_it_stay_as_they_are():
    lines = ["> a", "> b", "> c"] * 9 + ["d", "  e"]
    assert unwrapped("\n".join(lines).encode()).decode().split("\n")[-2:] == ["d", "  e"]
