"""What a tool puts before every line changes no answer; what may be ranks or steps stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.reading.lines import _layers as wrapping
from rmetric.diagnosis.reading.lines import unwrapped
from studies.diagnosis_benchmark.written_sets import opened

WRAPPED = {
    "quoted": lambda number, line: f"> {line}",
    "quoted twice": lambda number, line: f"> > {line}",
    "cat -n": lambda number, line: f"{number:6d}\t{line}",
    "grep -n": lambda number, line: f"{number}:{line}",
    "in brackets": lambda number, line: f"[{number}] {line}",
    "of a stream": lambda number, line: f"[stdout] {line}",
    "set in": lambda number, line: f"    {line}",
    "coloured": lambda number, line: f"\x1b[32m{line}\x1b[0m",
    "with blanks": lambda number, line: f"{line}  ",
    "quoted and set in": lambda number, line: f"> \t{line}",
}


def wrapped(text: str, wrap) -> str:
    return "".join(f"{wrap(at, line)}\n" for at, line in enumerate(text.splitlines(), 1))


def answer(folder, files):
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    found = diagnose([folder], jobs=1)
    where = [one.name for one in found.nodes]
    return found.outcome, found.title, found.stage, found.iteration, where


@pytest.fixture(scope="module")
def some():
    """Files of some development jobs, one of each kind."""
    with opened(["development"]) as jobs:
        folders = [one.case.folder for one in jobs[::5]]
        return [
            {
                str(path.relative_to(at)): path.read_bytes()
                for path in at.rglob("*")
                if path.is_file()
            }
            for at in folders
        ]


@pytest.mark.long
@pytest.mark.parametrize("how", WRAPPED)
def test_an_answer_is_that_of_the_log_without_it(tmp_path, how, some):
    for number, files in enumerate(some):
        around = {
            path: wrapped(data.decode(), WRAPPED[how]).encode()
            for path, data in files.items()
            if data.count(b"\n") >= 3 and b"\r" not in data and not path.endswith(".gz")
        }
        plain = {path: files[path] for path in around}
        assert answer(tmp_path / f"{number}-b", around) == answer(tmp_path / f"{number}-a", plain)


LOG = [
    "Traceback (most recent call last):", '  File "fit.py", line 3, in main', "    run()",
    "KeyError: 'x'", "", "step 3 loss 2.1", "[rank3] lost a peer", "srun: error: n7: task 3",
]  # fmt: skip


@given(st.integers(1, 10**6), st.sampled_from(["quoted", "cat -n", "grep -n", "in brackets"]))
def test_it_is_removed_wherever_the_numbers_begin(first, how):
    text = "\n".join(WRAPPED[how](first + at, line) for at, line in enumerate(LOG))
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
    (tmp_path / "a.log").write_text(wrapped("\n".join(LOG * 3), WRAPPED["quoted"]))
    notes = " ".join(diagnose([tmp_path], jobs=1).notes)
    assert "a mark, number or indent before every line was left out" in notes


def test_lines_without_it_stay_as_they_are():
    lines = ["> a", "> b", "> c"] * 9 + ["d", "  e"]
    assert unwrapped("\n".join(lines).encode()).decode().split("\n")[-2:] == ["d", "  e"]
