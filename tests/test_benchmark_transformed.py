"""The comparison of answers to transformed logs: what is changed, what is counted."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from studies.diagnosis_benchmark.blind.make import jobs
from studies.diagnosis_benchmark.transformed import KEPT, LOST, RESULTS, changed, main

PAGE = Path(__file__).parents[1] / "docs" / "diagnosis_evaluation.md"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    name, files, _ = next(jobs("development", 1))
    for path, data in files.items():
        file = tmp_path / "development" / name / "logs" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path


def test_each_transformation_is_a_row_and_the_answers_to_kept_logs_agree(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = written / "found.csv"
    assert main(["--written", str(written), "--out", str(out), "--jobs", "1"]) == 0
    found = pd.read_csv(out).set_index("Logs")
    assert list(found.index) == [*KEPT, *LOST]
    kept = found[found["Lost"] == "nothing"].drop(index="broken at 120 columns")
    assert set(kept["Another outcome or cause"]) == {0}
    assert str(out) in capsys.readouterr().out


def test_a_folder_without_jobs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--written", str(tmp_path)])


def test_every_transformation_changes_text_and_no_dump(tmp_path: Path) -> None:
    text, dump = tmp_path / "a.log", tmp_path / "trace_0"
    lines = [f'10.0.0.1 "x" /a/b/{at} 12:00:01.5 ' + "y" * 200 for at in range(9)]
    text.write_text("\n".join([*lines, "  z"]) + "\n")
    dump.write_bytes(b"\x80\x04\x95\xff")
    for name, change in {**KEPT, **LOST}.items():
        assert changed(text, change) != text.read_bytes(), name
        assert changed(dump, change) == dump.read_bytes()
    assert changed(text, None) == text.read_bytes()


def test_the_documents_table_is_that_of_the_results() -> None:
    now, before = (
        pd.read_csv(RESULTS / f"transformed{name}.csv", index_col="Logs")
        for name in ("", "_before")
    )
    assert list(now.index) == list(before.index) == [*KEPT, *LOST]
    assert set(now["Jobs"]) == set(before["Jobs"]) == {420}
    page = PAGE.read_text(encoding="utf-8")
    for logs in now.index:
        cells = [
            table.loc[logs, column]
            for column in ("Another outcome or cause", "Another answer in anything")
            for table in (now, before)
        ]
        name = f"{logs} *" if logs in LOST else logs
        assert f"| {name} | {' | '.join(map(str, cells))} |\n" in page
