"""Event statistics of successful jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.pool import FREQUENT, Pool, learn, ordinary
from rmetric.diagnosis.templates import OTHERS
from rmetric.logs import LogError
from tests.diagnosis.jobs import Maker


def job(counts: dict[str, int], matched: tuple[str, ...] = (), succeeded: bool = True) -> Job:
    """A job that logs these templates so often; a signature matches those in `matched`."""
    maker = Maker()
    for template, count in counts.items():
        for _ in range(count):
            last = maker.say("a.log", template, signature="killed" if template in matched else "")
    maker.job.stages = [("train", last)] if counts else []
    maker.job.succeeded = last if counts and succeeded else None
    return maker.job


JOBS = [
    job({"opened <PATH>": 2, "step <N> done": 100}),
    job({"opened <PATH>": 4, "step <N> done": 100, "warned of <N> things": 1}),
    job({"step <N> done": 400, "odd thing": 1}, succeeded=False),
]


def test_shares_and_means() -> None:
    pool = learn("seven billion", JOBS)
    assert (pool.name, pool.jobs, pool.succeeded) == ("seven billion", 3, 2)
    assert pool.stages == {"train": 1.0}
    step = pool.find("step <N> done")
    assert step is not None
    assert (step.jobs, step.mean) == (1.0, 200.0)
    warned = pool.find("warned of <N> things")
    assert warned is not None
    assert warned.jobs == pytest.approx(1 / 3)
    for name, jobs in (("a", []), (" ", JOBS)):
        with pytest.raises(ValueError, match="needs a name and at least one job"):
            learn(name, jobs)


def test_ordinary_are_those_that_are_frequent() -> None:
    pool = learn("a", JOBS)
    new = job({"step <N> done": 1, "warned of <N> things": 1, "never said": 1})
    assert ordinary(new, pool) == {0}
    assert 1 / 3 < FREQUENT <= 1.0


def test_a_word_that_differs_makes_it_not_ordinary() -> None:
    pool = learn("a", [job({"saved <PATH> in <N> seconds": 1})])
    assert ordinary(job({"lost <PATH> in <N> seconds": 1}), pool) == set()
    assert ordinary(job({"saved <*> in <N> seconds": 1}), pool) == {0}


def test_signatures_are_kept_apart() -> None:
    """A line that a signature matched is not what healthy jobs log in the same words."""
    pool = learn("a", [job({"exit code <N>": 1})])
    assert ordinary(job({"exit code <N>": 1}), pool) == {0}
    assert ordinary(job({"exit code <N>": 1}, ("exit code <N>",)), pool) == set()


@given(
    st.dictionaries(st.text("abc <>*N", min_size=1, max_size=12), st.integers(1, 50), max_size=5)
)
def test_what_is_saved_is_read(tmp_path_factory, counts: dict[str, int]) -> None:
    pool = learn("a", [job(counts), job({"x": 1, OTHERS: 5})])
    pool.save(path := tmp_path_factory.mktemp("pool") / "pool.json")
    assert Pool.load(path) == pool
    assert pool.find(OTHERS) is None  # what is not told apart is not learnt


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("format", 2, "`int` <= 1 - at `$.format`: found 2"),
        ("jobs", 0, "`int` >= 1 - at `$.jobs`: found 0"),
        ("events", {}, "`array`, got `object` - at `$.events`: found {}"),
        ("events", [{"template": "a", "mean": 1}], "missing required field `jobs` - at `$.ev"),
        ("stages", {"train": 0}, "`float` > 0.0 - at `$.stages[...]`: found {'train': 0}"),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, field: str, value: Any, words: str) -> None:
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(msgspec.to_builtins(learn("a", JOBS)) | {field: value}))
    with pytest.raises(LogError) as error:
        Pool.load(path)
    assert str(path) in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00\xff"])
def test_what_is_no_pool(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pool.json"
    path.write_text(text)
    with pytest.raises(LogError, match="no pool"):
        Pool.load(path)
    with pytest.raises(LogError, match="cannot be read"):
        Pool.load(tmp_path / "none.json")
