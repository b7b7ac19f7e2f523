"""Written jobs: the same bytes for a seed, labels that point at lines, and loadable as cases.

Nothing here holds text of the sealed jobs.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from studies.diagnosis_benchmark.blind.__main__ import main
from studies.diagnosis_benchmark.blind.cases import written_jobs
from studies.diagnosis_benchmark.blind.causes import CAUSES
from studies.diagnosis_benchmark.blind.make import ARCHIVES, jobs, packed, sealed_as

SEAL = Path(__file__).parents[1] / "studies/diagnosis_benchmark/results/blind_seal.json"
Made = list[tuple[str, dict[str, bytes], dict[str, Any]]]


@pytest.fixture(scope="module")
def sealed() -> Made:
    return list(jobs("sealed", 2))


@pytest.fixture(scope="module")
def development() -> Made:
    return list(jobs("development", 1))


def lines_of(data: bytes) -> list[str]:
    if data[:2] == b"\x1f\x8b":
        data = zlib.decompressobj(31).decompress(data)
    return data.decode().split("\n")


def test_sealed_jobs_are_those_of_the_seal(tmp_path: Path) -> None:
    sealed_as("sealed", 2, tmp_path / "seal.json")
    assert json.loads((tmp_path / "seal.json").read_text()) == json.loads(SEAL.read_text())


def test_another_seed_gives_other_jobs(development: Made) -> None:
    other = list(jobs("development", 7))
    assert [files for _, files, _ in other] != [files for _, files, _ in development]


def test_sealed_jobs_are_80_in_18_kinds(sealed: Made) -> None:
    kinds = Counter(told["made_as"] for _, _, told in sealed)
    well = [told for _, _, told in sealed
            if told["outcome"] == "healthy" or told["cause_group"] == "outside"]  # fmt: skip
    assert (len(sealed), len(kinds), len(well)) == (80, 18, 20)


def test_development_shows_only_kinds_that_are_less_than_half(
    development: Made, sealed: Made
) -> None:
    shown = {told["made_as"] for _, _, told in development}
    assert len(shown) == 8
    assert shown < {told["made_as"] for _, _, told in sealed}


def test_no_log_of_one_split_is_in_the_other(development: Made, sealed: Made) -> None:
    def logs(made: Made) -> set[bytes]:
        return {data for _, files, _ in made for data in files.values()}

    assert not logs(development) & logs(sealed)


@pytest.mark.parametrize("split", ["development", "sealed"])
def test_labels_point_at_lines_that_are_there(split: str, request: pytest.FixtureRequest) -> None:
    for name, files, told in request.getfixturevalue(split):
        for label in told["labels"]:
            lines = lines_of(files[label["file"]])
            assert 1 <= label["line"] <= len(lines), (name, label)
        roles = {label["role"] for label in told["labels"]}
        assert bool(roles & {"cause", "symptom"}) == (told["outcome"] != "healthy"), name


@pytest.mark.parametrize("split", ["development", "sealed"])
def test_a_rank_or_node_that_is_labelled_stands_in_the_logs(
    split: str, request: pytest.FixtureRequest
) -> None:
    for name, files, told in request.getfixturevalue(split):
        text = "\n".join([*files, *("\n".join(lines_of(data)) for path, data in files.items()
                                    if not path.startswith("flight_recorder"))])  # fmt: skip
        if told["node"]:
            assert told["node"] in text, name
        if told["rank"] is not None:
            assert str(told["rank"]) in text, name
            assert 0 <= told["rank"] < told["world_size"], name
            assert told["node"] in (None, told["node_of_rank"][str(told["rank"])]), name


def test_each_job_has_words_and_an_account_of_its_attempts(sealed: Made) -> None:
    for name, _, told in sealed:
        last = told["attempts"][-1]
        assert (last["outcome"], last["cause_class"]) == (
            told["outcome"], told["cause_class"]), name  # fmt: skip
        assert told["causes"][0] == told["cause_class"], name
        assert set(told["causes"]) <= set(CAUSES), name
        assert told["truth"].endswith("."), name


def test_written_jobs_load_as_cases(tmp_path: Path, development: Made) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    cases = written_jobs(tmp_path / "development")
    assert [one.case.name for one in cases] == [name for name, _, _ in development]
    for one, (_, files, told) in zip(cases, development, strict=True):
        assert one.told == told
        assert one.case.is_healthy == (told["outcome"] == "healthy")
        for path, data in files.items():
            assert (one.case.folder / path).read_bytes() == data


def test_loading_a_manifest_that_lacks_something_names_it(tmp_path: Path) -> None:
    (tmp_path / "job-000").mkdir()
    (tmp_path / "job-000" / "manifest.json").write_text('{"outcome": "failed", "labels": []}')
    with pytest.raises(ValueError, match=r"manifest\.json: 'group' is missing"):
        written_jobs(tmp_path)


def test_a_cut_archive_cannot_be_read_to_its_end(sealed: Made) -> None:
    cut = [data for _, files, _ in sealed for path, data in files.items() if path.endswith(".gz")]
    assert cut
    for data in cut:
        with pytest.raises(EOFError):
            gzip.decompress(data)


#: Jobs whose logs were refused at the first look, and so are in none of its tables.
REFUSED = {"twelfth": ["job-d7"]}


@pytest.mark.parametrize("split", ARCHIVES)
def test_archived_jobs_are_those_of_their_first_look(
    split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--split", split, "--out", str(tmp_path)]) == 0
    cases = written_jobs(tmp_path / split)
    assert f"{split}: {len(cases)} jobs" in capsys.readouterr().out
    manifests = hashlib.sha256()
    for one in cases:
        if one.case.name not in REFUSED.get(split, ()):
            manifests.update((tmp_path / split / one.case.name / "manifest.json").read_bytes())
        for label in one.case.labels:
            lines = lines_of((one.case.folder / label.file).read_bytes())
            assert 1 <= label.line <= len(lines), (one.case.name, label)
    look = SEAL.parent / f"first_look_{split}" / "provenance.json"
    if split == "opened":  # there was none
        assert not look.exists()
        return
    known = json.loads(look.read_text())["data"][f"written_{split}"]["inputs"]
    assert manifests.hexdigest() == known["manifests_sha256"]


def test_packing_keeps_the_jobs_and_not_their_times(tmp_path: Path) -> None:
    main(["--out", str(tmp_path)])
    first = packed(tmp_path / "development", tmp_path / "first.tar.xz")
    for path in (tmp_path / "development").rglob("*"):
        os.utime(path, (0, 7))
    assert packed(tmp_path / "development", tmp_path / "second.tar.xz") == first


def test_an_archive_has_no_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--split", "second", "--seed", "3", "--out", str(tmp_path)])
    assert "--split second is an archive" in capsys.readouterr().err
