"""The archives of written jobs: the jobs of their first looks, and the commands that judge them."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from studies.diagnosis_benchmark import cut, transformed, written_sets
from studies.diagnosis_benchmark.__main__ import main
from studies.diagnosis_benchmark.cause_meanings import CAUSES
from studies.diagnosis_benchmark.csv_rows import read_rows, write_rows
from studies.diagnosis_benchmark.written_jobs import WrittenScores
from studies.diagnosis_benchmark.written_sets import WrittenSet, digest, packed, unpacked
from studies.diagnosis_benchmark.written_sets import written_sets as known_sets

RESULTS = Path(__file__).parents[3] / "studies" / "diagnosis_benchmark" / "results"
SETS = known_sets()


def length(path: Path) -> int:
    """Lines of a file, of a cut archive as far as it goes."""
    data = path.read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data.count(b"\n") + 1
    count = 1
    try:
        with gzip.open(io.BytesIO(data)) as file:
            while piece := file.read1(1 << 16):
                count += piece.count(b"\n")
    except EOFError:
        pass
    return count


@pytest.mark.long
@pytest.mark.parametrize("name", SETS)
def test_a_set_holds_the_jobs_of_its_first_look_and_labels_of_lines_that_are_there(
    name: str, tmp_path: Path
) -> None:
    jobs = unpacked(SETS[name], tmp_path)
    assert len(jobs) == SETS[name].jobs
    assert digest([SETS[name].archive]) == SETS[name].sha256
    for one in jobs:
        told = one.told
        for label in one.case.labels:
            assert 1 <= label.line <= length(one.case.folder / label.file), (one.case.name, label)
        roles = {label.role for label in one.case.labels}
        assert one.case.is_healthy or roles & {"cause", "symptom"}, one.case.name
        assert set(told["causes"]) <= set(CAUSES)
        assert (told["outcomes"][0], told["causes"][0]) == (told["outcome"], told["cause_class"])


def test_each_set_is_an_archive_and_numbered_ones_had_a_first_look() -> None:
    assert [*SETS] == [*(f"{number:02d}" for number in range(1, len(SETS) - 1)),
                       "development", "opened"]  # fmt: skip
    assert {one.archive for one in SETS.values()} == set(written_sets.SETS.glob("*.tar.xz"))
    looked = {name for name, one in SETS.items() if one.commit and one.first_look}
    assert looked == {name for name in SETS if name.isdecimal()}


def test_the_first_looks_have_each_job_once_and_today_all_sets() -> None:
    for file, numbered in (("first_looks.csv", True), ("written.csv", False)):
        rows = read_rows(RESULTS / file, WrittenScores)
        assert len({(row.set, row.job) for row in rows}) == len(rows)
        sets = [one for one in SETS.values() if one.commit or not numbered]
        assert {one.name: one.jobs for one in sets} == pd.Series(
            [row.set for row in rows]
        ).value_counts().to_dict()


def test_set_01_is_that_of_its_seal() -> None:
    sealed, told = io.BytesIO(), json.loads((RESULTS / "blind_seal.json").read_text())
    with (
        tarfile.open(SETS["01"].archive) as archive,
        tarfile.open(fileobj=sealed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        files = [one for one in archive.getmembers() if one.isfile()]
        for member in sorted(files, key=lambda one: one.name.split("/", 1)):
            info = tarfile.TarInfo(f"sealed/{member.name}")
            info.size = member.size
            tar.addfile(info, archive.extractfile(member))
    assert hashlib.sha256(sealed.getvalue()).hexdigest() == told["sha256_of_tar"]
    assert told["set"] == "01"


def test_a_manifest_that_lacks_something_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no job"):
        written_sets.written_jobs(tmp_path)
    (tmp_path / "job-000").mkdir()
    (tmp_path / "job-000" / "manifest.json").write_text('{"outcome": "failed", "labels": []}')
    with pytest.raises(ValueError, match=r"manifest\.json: 'cause_class' is missing"):
        written_sets.written_jobs(tmp_path)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sets, 02 and development, of a job each; returns a folder for results."""
    jobs = unpacked(SETS["development"], tmp_path / "all")
    two = {one.told["variant"]: one for one in jobs}
    rows = []
    for name, variant, commit in (("02", "requeued, four", "abc"), ("development", "full", "")):
        folder = tmp_path / "parts" / name
        folder.mkdir(parents=True)
        job = two[variant].case.folder.parent
        job.rename(folder / job.name)
        sha = packed(folder, tmp_path / f"{name}.tar.xz")
        rows.append(WrittenSet(name, "somebody", 1, "2026-01-01" if commit else "", commit, sha))
    with open(tmp_path / "sets.csv", "w", newline="") as file:
        csv.writer(file).writerows([WrittenSet._fields, *rows])
    monkeypatch.setattr(written_sets, "SETS", tmp_path)
    return tmp_path / "out"


def test_packing_keeps_the_jobs_and_not_their_times(small: Path, tmp_path: Path) -> None:
    part = tmp_path / "parts" / "02"
    for path in part.rglob("*"):
        os.utime(path, (0, 7))
    assert packed(part, tmp_path / "again.tar.xz") == known_sets()["02"].sha256


@pytest.mark.long
def test_the_first_run_of_a_numbered_set_is_kept_as_its_first_look(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["written", "--out", str(small), "--jobs", "1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "Number of attempts" in printed
    assert "Expected calibration error" in printed
    today, first = small / "written.csv", small / "first_looks.csv"
    rows = read_rows(today, WrittenScores)
    assert [(row.set, row.cause, row.attempts_found) for row in rows] == [
        ("02", "right", 4), ("development", "right", 1),
    ]  # fmt: skip
    assert [row.set for row in read_rows(first, WrittenScores)] == ["02"]
    write_rows(first, WrittenScores, rows[:0])
    before = today.read_bytes()
    assert main([*command, "--set", "development"]) == 0
    assert today.read_bytes() == before
    assert read_rows(first, WrittenScores) == []
    assert main([*command, "--set", "2"]) == 0
    kept = first.read_bytes().replace(b",yes,right,1,", b",no,wrong,0,")
    assert kept != first.read_bytes()
    first.write_bytes(kept)
    assert main([*command, "--set", "all"]) == 0
    assert first.read_bytes() == kept
    assert today.read_bytes() == before


def test_an_unknown_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["written", "--set", "99"])
    assert ended.value.code == 2
    assert "'99'" in capsys.readouterr().err


@pytest.mark.long
def test_each_cut_is_a_row_and_the_same_at_each_run(small: Path, tmp_path: Path) -> None:
    for out in ("one.csv", "two.csv"):
        assert cut.main(["--out", str(tmp_path / out), "--jobs", "1"]) == 0
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    found = pd.read_csv(tmp_path / "one.csv", index_col="Logs")
    assert list(found.index) == [*cut.CUTS] == list(pd.read_csv(RESULTS / "cut.csv")["Logs"])
    assert (found["Sure and right"] <= found["Sure"]).all()
    assert found["Jobs"].max() == 2


def test_what_is_cut() -> None:
    lines = [b"line %d" % at for at in range(100)]
    files = {"a.log": b"\n".join([*lines, b""]), "b.json": b"{}\n"}
    for name, change in cut.CUTS.items():
        left = change(files, np.random.default_rng(1))
        if change in (cut.without_one, cut.one_alone):
            assert len(left) == 1
            continue
        kept = left["a.log"].splitlines()
        assert left["b.json"] == files["b.json"], name
        assert 0 < len(kept) < 100, name
        assert set(kept) < set(lines), name


@pytest.mark.long
def test_each_transformation_is_a_row_and_the_answers_to_kept_logs_agree(
    small: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.csv"
    assert transformed.main(["--set", "development", "--out", str(out), "--jobs", "1"]) == 0
    found = pd.read_csv(out).set_index("Logs")
    assert list(found.index) == [*transformed.KEPT, *transformed.LOST]
    kept = found[found["Lost"] == "nothing"]
    assert set(kept["Another outcome or cause"]) == {0}


def test_every_transformation_changes_text_and_no_dump() -> None:
    lines = [f'10.0.0.1 "x" /a/b/{at} 12:00:01.5 ' + "y" * 200 for at in range(9)]
    text, dump = ("\n".join([*lines, "  z"]) + "\n").encode(), b"\x80\x04\x95\xff"
    for name, change in {**transformed.KEPT, **transformed.LOST}.items():
        assert transformed.changed("a.log", text, change) != text, name
        assert transformed.changed("trace_0", dump, change) == dump
    assert transformed.changed("a.log", text, None) == text
