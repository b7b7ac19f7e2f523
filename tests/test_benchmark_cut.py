"""Answers to logs of which a part was cut away: what is cut, what is counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from studies.diagnosis_benchmark.blind.job import dumped
from studies.diagnosis_benchmark.blind.make import jobs
from studies.diagnosis_benchmark.cut import CUTS, RESULTS, main, one_alone, without_one

PAGE = Path(__file__).parents[1] / "docs" / "diagnosis_evaluation.md"


def test_each_cut_is_a_row_and_the_same_at_each_run(tmp_path: Path) -> None:
    name, files, told = next(jobs("development", 1))
    job = tmp_path / "development" / name
    for path, data in files.items():
        (job / "logs" / path).parent.mkdir(parents=True, exist_ok=True)
        (job / "logs" / path).write_bytes(data)
    (job / "manifest.json").write_bytes(dumped(told))
    for out in ("one.csv", "two.csv"):
        given = ["--written", str(tmp_path), "--out", str(tmp_path / out), "--jobs", "1"]
        assert main(given) == 0
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    found = pd.read_csv(tmp_path / "one.csv", index_col="Logs")
    assert list(found.index) == [*CUTS]
    assert (found["Sure and right"] <= found["Sure"]).all()
    assert found["Jobs"].max() == 1


def test_a_folder_without_jobs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--written", str(tmp_path)])


def test_what_is_cut() -> None:
    lines = [b"line %d" % at for at in range(100)]
    files = {"a.log": b"\n".join([*lines, b""]), "b.json": b"{}\n"}
    for name, cut in CUTS.items():
        left = cut(files, np.random.default_rng(1))
        if cut in (without_one, one_alone):
            assert len(left) == 1
            continue
        kept = left["a.log"].splitlines()
        assert left["b.json"] == files["b.json"], name
        assert 0 < len(kept) < 100, name
        assert set(kept) < set(lines), name


def test_the_documents_table_is_that_of_the_results() -> None:
    found = pd.read_csv(RESULTS / "cut.csv")
    assert list(found["Logs"]) == [*CUTS]
    page = PAGE.read_text(encoding="utf-8")
    for row in found.itertuples(index=False):
        assert f"| {' | '.join(map(str, row))} |\n" in page
