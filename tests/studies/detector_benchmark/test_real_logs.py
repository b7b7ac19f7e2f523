"""The public logs: the manifest, files from a folder or a server, and what counts as caught."""

import csv
import hashlib
import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks import real_logs as maker
from rmetric.logs import LogError
from studies.detector_benchmark.fetch import fetch, main
from studies.detector_benchmark.measure import Judged, measure_real
from studies.detector_benchmark.real_logs import (
    COLUMNS,
    LABELS,
    MANIFEST,
    Listed,
    read_manifest,
    real,
)
from tests.authors_data import LOGS, needs_training_logs
from tests.studies.detector_benchmark.runs import alarmed

ROOT = Path(__file__).parents[3]


def log(losses: list[float]) -> bytes:
    rows = (json.dumps({"step": 10 * i, "loss": loss}) for i, loss in enumerate(losses, 1))
    return "\n".join(rows).encode() + b"\n"


def line(name: str, content: bytes, **changes: str) -> dict[str, str]:
    return {
        "run": name, "repository": "who/what", "commit": "c0ffee", "path": f"runs/{name}.jsonl",
        "file": f"{name}.jsonl", "run_in_file": "", "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": str(len(content)), "published_bytes": "yes", "licence": "MIT", "format": "jsonl",
        "label": "healthy", "onset": "", "confidence": "high", "group": name,
    } | changes  # fmt: skip


def write_manifest(path: Path, rows: list[dict[str, str]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


CALM = log([3.0] * 40)
BROKEN = log([3.0] * 20 + [9.0] * 20)  # from step 210


@pytest.fixture
def folder(tmp_path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "calm.jsonl").write_bytes(CALM)
    (logs / "broken.jsonl").write_bytes(BROKEN)
    return logs


@pytest.fixture
def manifest(tmp_path) -> Path:
    rows = [line("calm", CALM), line("broken", BROKEN, label="diverged", onset="210")]
    return write_manifest(tmp_path / "manifest.csv", rows)


def test_the_manifest_is_whole():
    listed = read_manifest(ROOT / MANIFEST)
    assert len({entry.run for entry in listed}) == len(listed) == 143
    for entry in listed:
        assert re.fullmatch("[0-9a-f]{64}", entry.sha256)
        assert re.fullmatch("[0-9a-f]{40}", entry.commit)
        assert entry.repository.count("/") == 1
        assert all((entry.path, entry.licence, entry.group))
        assert entry.bytes > 0
        assert entry.label in LABELS
        assert entry.label != "healthy" or entry.onset is None
        # Of a text log only the step lines may have been kept: its digest proves nothing.
        assert entry.published_bytes != entry.format.startswith("text")
    assert sum(entry.label != "healthy" for entry in listed) == 41


@needs_training_logs
def test_the_manifest_is_made_of_the_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "MANIFEST", tmp_path / "made.csv")
    assert maker.main([str(LOGS)]) == 0
    assert (tmp_path / "made.csv").read_bytes() == (ROOT / MANIFEST).read_bytes()


def test_a_manifest_with_other_columns_or_nonsense_is_refused_with_its_line(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("run,label\na,healthy\n")
    with pytest.raises(LogError, match="the columns must be run, repository"):
        read_manifest(other)
    for wrong in ({"label": "sick"}, {"confidence": "sure"}, {"bytes": "many"}):
        path = write_manifest(tmp_path / "wrong.csv", [line("a", b"") | wrong])
        with pytest.raises(LogError, match="line 2"):
            read_manifest(path)


def test_what_is_not_there_or_differs_is_skipped_with_a_line(tmp_path, folder):
    rows = [
        line("calm", CALM),
        line("broken", b"other bytes", label="diverged", onset="210"),
        line("gone", b"x"),
        line("unreadable", b"no log at all\n", published_bytes="unknown"),
    ]
    (folder / "unreadable.jsonl").write_bytes(b"\x00\x01\x02 no log at all\n")
    data = real(folder, write_manifest(tmp_path / "manifest.csv", rows))
    assert [run.id for run in data.runs] == ["calm"]
    gone, differs, unreadable = sorted(data.skipped, key=lambda text: "gone" not in text)
    assert "gone.jsonl: not in" in gone
    assert "other bytes than the manifest's" in differs
    assert "unreadable.jsonl" in unreadable
    assert f"{1} of the 4" in data.notes[0]


def measured(data, *alerts: tuple[int, ...]):
    traces = [alarmed(run, *at) for run, at in zip(data.runs, alerts, strict=True)]
    return measure_real(data, Judged.of(data.cases, traces), references={})


#: first alert -> caught by the plain rule, by the causal rule; the onset is 210, every 10 steps
RULES = {
    210: (1, 1),
    230: (1, 1),  # two intervals late
    240: (0, 0),
    110: (1, 1),  # ten intervals before
    100: (1, 0),
    10: (1, 0),
}


@pytest.mark.parametrize("alert", RULES)
def test_caught_by_the_two_rules(folder, manifest, alert):
    data = real(folder, manifest)
    assert [run.id for run in data.runs] == ["calm", "broken"]
    row = measured(data, (), (alert,))
    assert (row["caught"].point, row["causal"].point) == RULES[alert]
    assert row["healthy"].point == 0
    assert row["missed"]["missed"] == ([] if RULES[alert][0] else ["broken"])
    row = measured(data, (300,), (220,))
    assert row["healthy"].point == row["healthy_high"].point == 1
    assert row["delay_50"] == pytest.approx(1.0)
    assert row["episodes_per_1000"] == pytest.approx(1000 / 40)
    assert row["missed"]["alarmed"] == ["calm"]


@pytest.fixture
def served(tmp_path, manifest):
    """A server's address, its folder, and the lines of the manifest whose files it has."""
    pytest.importorskip("pooch")
    root = tmp_path / "published"
    calm, broken = read_manifest(manifest)
    publish(root, calm, CALM)
    publish(root, broken, BROKEN)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", root, calm, broken
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def publish(root: Path, listed: Listed, content: bytes) -> None:
    path = root / listed.repository / listed.commit / listed.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_files_are_fetched_checked_and_not_fetched_again(served, tmp_path, manifest):
    base, root, *lines = served
    out = tmp_path / "fetched"
    assert [got.problem for got in fetch(lines, out, base_url=base)] == ["", ""]
    assert (out / "calm.jsonl").read_bytes() == CALM
    assert len(real(out, manifest).runs) == 2
    (root / lines[0].repository / lines[0].commit / lines[0].path).unlink()
    assert [got.note for got in fetch(lines, out, base_url=base)] == ["is there"] * 2


def test_other_bytes_and_missing_files_are_reported_and_the_rest_goes_on(
    served, tmp_path, manifest, capsys
):
    base, root, calm, broken = served
    gone = calm._replace(run="gone", file="gone.jsonl", path="gone.jsonl")
    publish(root, calm, b"not what was published")
    out = tmp_path / "fetched"
    found = {got.file: got for got in fetch([calm, gone, broken], out, base_url=base)}
    assert "hash" in found["calm.jsonl"].problem
    assert "404" in found["gone.jsonl"].problem
    assert not found["broken.jsonl"].problem
    assert sorted(path.name for path in out.iterdir()) == ["broken.jsonl"]
    assert main(["--out", str(out), "--manifest", str(manifest), "--base-url", base]) == 1
    printed = capsys.readouterr().out
    assert "broken.jsonl: is there" in printed
    assert printed.endswith(f"1 of 2 files are in {out}\n")
