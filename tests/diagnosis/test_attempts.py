"""Attempts of a job that were appended to one file."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.facts.starts import Mark, attempt_starts
from rmetric.diagnosis.ingest import ingest_attempts
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading import source

START = [
    "+ srun --nodes=2 python train.py --config base.yaml",
    "torch 2.4.0, CUDA 12.1, NCCL 2.20",
    "initializing torch distributed ...",
    "building GPT model ...",
    "> number of parameters on rank 0: 124439808",
    "> building train, validation, and test datasets ...",
]
OOM = [
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in <module>',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]
KEY = [
    "Traceback (most recent call last):",
    '  File "train.py", line 31, in load',
    "KeyError: 'optimizer'",
]
DONE = ["Training completed.", "exiting program after 500 iterations"]


def steps(first: int, last: int, minute: int = 0) -> list[str]:
    return [
        f"[2024-04-08 02:{minute % 60:02}:{step % 60:02}] iteration {step}/ 500 | loss 3.{step:03}"
        for step in range(first, last + 1)
    ]


@pytest.mark.parametrize("block", [200, 1000, 1 << 20])
def test_an_attempt_reads_as_in_a_file_of_its_own(tmp_path, monkeypatch, block):
    """Wherever the blocks of the file end."""
    monkeypatch.setattr(source, "BLOCK", block)
    parts = [
        [*START, *steps(1, 40), *OOM],
        [*START, *steps(21, 60), *KEY],
        [*START[1:], *steps(41, 50, 30), *KEY],
        [*START, *steps(51, 70), *DONE],
    ]
    path, library = tmp_path / "job.log", SignatureLibrary.shipped()
    path.write_text("".join(f"{line}\n" for part in parts for line in part))
    jobs = ingest_attempts([tmp_path], library)
    assert len(jobs) == len(parts)
    for job, lines in zip(jobs, parts, strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
        (alone,) = ingest_attempts([tmp_path], library)
        assert _content(job) == _content(alone)


def _content(job: Job) -> dict[str, object]:
    """All but where it stands."""
    return {
        "events": Counter({event.template: event.count for event in job.events}),
        "matches": {key: match.count for key, match in job.matches.items()},
        "texts": {
            name: [
                (entry.text, entry.time, entry.step, entry.stage)
                for entry in [*log.head, *log.tail]
            ]
            for name, log in job.streams.items()
        },
        "steps": {name: (log.steps, log.longest_pause) for name, log in job.streams.items()},
        "stages": [stage for stage, _ in job.stages],
        "succeeded": job.succeeded and job.succeeded.text,
    }


marks = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60
)


@given(marks)
def test_starts_are_lines_of_marks_in_order(entries):
    found, line, made, ends = [], 0, 0, 0
    for template, more_steps, more_ends, ended in entries:
        line, made, ends = line + 1, made + more_steps, ends + more_ends
        found.append(Mark(line, template, made, ends, ended))
    starts = [mark.line for mark in attempt_starts(found)]
    assert starts == sorted(set(starts))
    assert set(starts) <= {mark.line for mark in found[1:]}


@given(st.integers(1, 12), st.integers(2, 30), st.integers(1, 9))
def test_a_beginning_that_is_repeated_whole_is_found_each_time(ranks, times, made):
    """A beginning has at least three entries, each written by as many ranks."""
    found: list[Mark] = []
    expected = []
    for attempt in range(times):
        expected.append(len(found) + 1)
        for template in range(3):
            for _ in range(ranks):
                found.append(Mark(len(found) + 1, template, made * attempt * 3, attempt, True))
    assert [mark.line for mark in attempt_starts(found)] == expected[1:]


def test_ranks_that_begin_behind_another_ones_failure_begin_no_attempt():
    """Each writes its beginning once, and the second attempt writes all of them again."""
    ranks = [(template, rank) for rank in range(6) for template in range(3)]
    again = [(line, *pair) for line, pair in enumerate([*ranks, *ranks], 1)]
    found = [Mark(line, template, 0, (line > 9) + (line > 18), True, rank)
             for line, template, rank in again]  # fmt: skip
    assert [mark.line for mark in attempt_starts(found)] == [19]
