"""What the audits found, as a log states it: in verdict, page, summary and exit code."""

from __future__ import annotations

import json

import pytest

from rmetric import Record, RMetricConfig, Run
from rmetric.cli.main import main
from rmetric.evaluation import judge_run
from rmetric.logs import run_lines
from rmetric.readers import read_log
from rmetric.records import AuditFinding
from tests.reporting.page.pages import HOSTILE, Found, page

ROWS = [
    {"part": "weights", "was": "norm 29", "now": "norm 29", "equal": True, "outlook": ""},
    {"part": "moments", "was": "norm 0.2", "now": "lost, norm 0", "equal": False,
     "outlook": "steps of another size"},
]  # fmt: skip
LOST = {"event": "AUDIT", "kind": "not_restored", "severity": "error", "step": 41, "rows": ROWS,
        "words": "not everything came back:\n  part  saved  now\n  moments ..."}  # fmt: skip
HINT = LOST | {"kind": "same_order", "severity": "hint", "words": "shuffle", "rows": [], "step": 60}
SAID = "not everything came back: moments: lost, norm 0 (was norm 0.2)"
TO_DO = f"mend what the audits found: step 41: {SAID}"


def write_log(folder, *entries, end=2.0, last=200):
    records = [Record(step=s, training_loss=end + 2 * 0.97**s) for s in range(1, last + 1)]
    first, *lines = run_lines(Run(id="tiny", records=records), RMetricConfig())
    path = folder / "run.jsonl"
    path.write_bytes(b"".join([first, *(json.dumps(e).encode() + b"\n" for e in entries), *lines]))
    return path


def test_an_error_of_an_audit_is_the_verdict_s_to_do_and_its_table_on_the_page(
    tmp_path, capsys, monkeypatch
):
    log = write_log(tmp_path, LOST, HINT)
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(log), "--out", "out", "--exit-on-alarm"]) == 4
    out = capsys.readouterr().out
    assert "1 run: 1 with errors by their audits" in out
    assert "tiny: HEALTHY: no failure seen, but the audits found 1 error\n" in out
    assert f"To do: {TO_DO}.\n" in out
    assert "To do: nothing" not in out
    assert "audits: not_restored (error) at step 41, same_order (hint) at step 60\n" in out
    summary = json.loads((tmp_path / "out/tiny/summary.json").read_text())
    assert (summary["verdict"]["kind"], summary["verdict"]["severity"]) == (
        "audit_errors",
        "warning",
    )
    assert [found["kind"] for found in summary["findings"]] == ["not_restored", "same_order"]
    assert summary["findings"][0]["rows"][1]["was"] == "norm 0.2"
    text = " ".join(Found((tmp_path / "out/tiny/report.html").read_text()).text.split())
    assert f"{TO_DO}." in text
    assert "same_order (hint)shuffle" in text
    assert "Resume at step 41 partsavednowwhat the loss shows weightsnorm 29equal" in text
    assert "momentsnorm 0.2lost, norm 0steps of another size" in text


def test_hints_alone_leave_the_verdict_as_it_is(tmp_path):
    run = read_log(write_log(tmp_path, HINT)).run
    assert judge_run(run.records, findings=run.findings) == judge_run(run.records)
    assert "Audits" in Found(page(run)).text


@pytest.mark.parametrize(
    ("last", "end", "text", "kind"),
    [
        (4, 2.0, "CANNOT TELL: 4 records, but the audits found 3 errors", "audit_errors"),
        (200, float("nan"), "NOT FINITE from step 1 to the end; the audits found 3 errors",
         "not_finite"),
    ],
)  # fmt: skip
def test_errors_stand_beside_any_verdict(tmp_path, last, end, text, kind):
    run = read_log(write_log(tmp_path, *[LOST] * 3, last=last, end=end)).run
    found = judge_run(run.records, findings=run.findings)
    assert (found.text, found.kind) == (text, kind)
    assert found.advice.endswith(f"{SAID}; 1 more")


def test_what_an_audit_says_is_text(tmp_path):
    hostile = LOST | {"words": HOSTILE, "kind": HOSTILE, "severity": HOSTILE}
    run = read_log(write_log(tmp_path, hostile | {"rows": [dict.fromkeys(ROWS[0], HOSTILE)]})).run
    assert HOSTILE not in page(run)
    assert HOSTILE in Found(page(run)).text


def test_a_finding_of_a_wrong_type_is_an_error_of_its_line(tmp_path):
    with pytest.raises(ValueError, match=r"line 2: 'rows': found 3; a list is accepted"):
        read_log(write_log(tmp_path, LOST | {"rows": 3}))


def test_a_finding_without_a_step_or_a_table_is_one(tmp_path):
    run = read_log(write_log(tmp_path, {"event": "AUDIT", "words": "all is well"})).run
    assert run.findings == [AuditFinding(step=0, kind="", severity="", words="all is well")]
