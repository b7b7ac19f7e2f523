"""Lines of the failure logs, labelled by reading: the tables are whole and fit the bytes."""

import csv
import gzip
import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.authors_data import DATA

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "studies/diagnosis_benchmark/data"
LOGS = DATA / "failure_logs"
SPLITS = ("development", "held_out")
ROLES = ("cause", "symptom", "echo", "context")
COLUMNS = ["file", "line", "sha256", "role", "reason"]

Row = dict[str, str]


def table(name: str) -> list[Row]:
    with (TABLES / name).open(newline="") as handle:
        return list(csv.DictReader(handle))


def labels(split: str) -> list[Row]:
    return table(f"failure_labels_{split}.csv")


def lines(name: str) -> list[bytes]:
    raw = (LOGS / name).read_bytes()
    return (gzip.decompress(raw) if name.endswith(".gz") else raw).split(b"\n")


@pytest.mark.parametrize("split", SPLITS)
def test_every_row_is_whole_and_stands_once(split: str) -> None:
    rows = labels(split)
    assert list(rows[0]) == COLUMNS
    for row in rows:
        assert row["role"] in ROLES, row
        assert int(row["line"]) >= 1, row
        assert re.fullmatch("[0-9a-f]{16}", row["sha256"]), row
        assert row["reason"].strip(), row
    assert max(Counter((row["file"], row["line"]) for row in rows).values()) == 1


@pytest.mark.parametrize("split", SPLITS)
def test_exactly_the_jobs_of_the_split_that_did_not_end_well_have_a_cause(split: str) -> None:
    manifest = {row["file"]: row for row in table("failure_logs.csv")}
    unwell = {
        name
        for name, row in manifest.items()
        if row["split"] == split and row["outcome"] in ("failed", "terminated")
    }
    rows = labels(split)
    assert {row["file"] for row in rows} == unwell
    assert {row["file"] for row in rows if row["role"] == "cause"} == unwell


def test_the_page_counts_what_the_tables_hold() -> None:
    page = (TABLES / "failure_labels.md").read_text()
    for split in SPLITS:
        rows = labels(split)
        roles = Counter(row["role"] for row in rows)
        numbers = [len({row["file"] for row in rows}), *(roles[role] for role in ROLES), len(rows)]
        assert f"| {split} | {' | '.join(map(str, numbers))} |" in page


@pytest.mark.skipif(
    not (LOGS / "labels.csv").is_file(),
    reason="failure logs are absent: put them in ../shared/data or name them with RMETRIC_DATA",
)
@pytest.mark.parametrize("split", SPLITS)
def test_every_hash_is_that_of_its_line(split: str) -> None:
    read = {name: lines(name) for name in {row["file"] for row in labels(split)}}
    for row in labels(split):
        line = read[row["file"]][int(row["line"]) - 1].rstrip(b"\r\n")
        assert line.strip(), row
        assert hashlib.sha256(line).hexdigest()[:16] == row["sha256"], row
