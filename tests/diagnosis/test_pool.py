"""Event statistics of successful jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.facts.job import Event, Job, JobStream, Match, Occurrence
from rmetric.diagnosis.pool import (
    FREQUENT,
    Pool,
    PoolEvent,
    learn,
    ordinary,
)
from rmetric.diagnosis.templates.events import OTHERS
from rmetric.logs import LogError


def at(order: int, event: int = 0) -> Occurrence:
    return Occurrence(
        file="a.log", line=order, stream="a.log", time=None, order=order, event=event, text="x"
    )


def job(said: dict[str, int], matched: dict[str, str] | None = None, succeeded: bool = True) -> Job:
    """A job that says these templates so often; `matched` is template -> signature."""
    made = Job(streams={"a.log": JobStream(name="a.log")})
    for number, (template, count) in enumerate(said.items()):
        first = at(number, number)
        made.events.append(
            Event(
                number=number, template=template, first=first, last=first, counts={"a.log": count}
            )
        )
        signature = (matched or {}).get(template)
        if signature:
            made.matches[signature, "a.log"] = Match(
                signature=signature, stream="a.log", count=count, first=first, last=first,
                events={number},
            )  # fmt: skip
    made.stages = [("train", at(0))]
    made.succeeded = at(99) if succeeded else None
    return made


JOBS = [
    job({"opened <PATH>": 2, "step <N> done": 100}),
    job({"opened <PATH>": 4, "step <N> done": 100, "warned of <N> things": 1}),
    job({"opened <PATH>": 0, "step <N> done": 400, "odd thing": 1}, succeeded=False),
]


class TestLearn:
    def test_shares_and_means(self) -> None:
        pool = learn("seven billion", JOBS)
        assert (pool.name, pool.jobs, pool.succeeded) == ("seven billion", 3, 2)
        assert pool.stages == {"train": 1.0}
        step = pool.find("step <N> done")
        assert step is not None
        assert (step.jobs, step.mean) == (1.0, 200.0)
        warned = pool.find("warned of <N> things")
        assert warned is not None
        assert warned.jobs == pytest.approx(1 / 3)

    def test_what_is_not_told_apart_is_not_learnt(self) -> None:
        assert learn("a", [job({OTHERS: 5, "step": 1})]).find(OTHERS) is None

    @pytest.mark.parametrize(("name", "jobs"), [("a", []), (" ", JOBS)])
    def test_needs_a_name_and_a_job(self, name: str, jobs: list[Job]) -> None:
        with pytest.raises(ValueError, match="needs a name and at least one job"):
            learn(name, jobs)


class TestUse:
    def test_ordinary_are_those_that_are_frequent(self) -> None:
        pool = learn("a", JOBS)
        one = job({"step <N> done": 1, "warned of <N> things": 1, "never said": 1})
        assert ordinary(one, pool) == {0}
        assert 1 / 3 < FREQUENT <= 1.0

    def test_a_word_that_differs_makes_it_not_ordinary(self) -> None:
        pool = learn("a", [job({"saved <PATH> in <N> seconds": 1})])
        assert ordinary(job({"lost <PATH> in <N> seconds": 1}), pool) == set()
        assert ordinary(job({"saved <*> in <N> seconds": 1}), pool) == {0}

    def test_signatures_are_kept_apart(self) -> None:
        """A line that a signature matched is not what healthy jobs say in the same words."""
        pool = learn("a", [job({"exit code <N>": 1})])
        assert ordinary(job({"exit code <N>": 1}), pool) == {0}
        assert ordinary(job({"exit code <N>": 1}, {"exit code <N>": "killed"}), pool) == set()


class TestFile:
    @given(
        st.dictionaries(
            st.text("abc <>*N", min_size=1, max_size=12), st.integers(1, 50), max_size=5
        )
    )
    def test_what_is_saved_is_read(self, said: dict[str, int]) -> None:
        pool = learn("a", [job(said), job({"x": 1})])
        assert _read_back(pool) == pool

    def test_same_jobs_same_bytes(self, tmp_path: Path) -> None:
        for name in "ab":
            learn("a", JOBS).save(tmp_path / name)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("format", 2, "`int` <= 1 - at `$.format`: found 2"),
            ("format", None, "`int`, got `null` - at `$.format`: found None"),
            ("jobs", 0, "`int` >= 1 - at `$.jobs`: found 0"),
            ("jobs", "3", "`int`, got `str` - at `$.jobs`: found '3'"),
            ("job", 7, "`str`, got `int` - at `$.job`: found 7"),
            ("events", {}, "`array`, got `object` - at `$.events`: found {}"),
            ("events", [7], "`object`, got `int` - at `$.events[0]`: found 7"),
            ("events", [{"template": "a", "mean": 1}], "missing required field `jobs` - at `$.ev"),
            (
                "events",
                [{"template": "a", "mean": 1, "jobs": 2}],
                "`float` <= 1.0 - at `$.events[0].jobs`: found 2",
            ),
            (
                "events",
                [{"template": "a", "mean": 1, "jobs": 1, "signature": 4}],
                "`str`, got `int` - at `$.events[0].signature`: found 4",
            ),
            ("stages", {"train": 0}, "`float` > 0.0 - at `$.stages[...]`: found {'train': 0}"),
        ],
    )
    def test_errors_name_file_and_field(
        self, tmp_path: Path, field: str, value: Any, words: str
    ) -> None:
        path = tmp_path / "pool.json"
        path.write_text(json.dumps(msgspec.to_builtins(learn("a", JOBS)) | {field: value}))
        with pytest.raises(LogError) as error:
            Pool.load(path)
        assert str(path) in str(error.value)
        assert words in str(error.value)

    @pytest.mark.parametrize("text", ["", "[1]", "{", "\x00\xff"])
    def test_what_is_no_pool(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "pool.json"
        path.write_text(text)
        with pytest.raises(LogError, match="no pool"):
            Pool.load(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(LogError, match="cannot be read"):
            Pool.load(tmp_path / "none.json")


def _read_back(pool: Pool) -> Pool:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        pool.save(Path(name) / "pool.json")
        return Pool.load(Path(name) / "pool.json")


def test_a_usual_event_says_what_it_is() -> None:
    one = PoolEvent(template="a", signature="", jobs=0.5, mean=2.0)
    assert Pool(name="a", jobs=2, succeeded=0, stages={}, events=(one,)).find("a") is one
