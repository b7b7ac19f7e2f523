"""Logs as LSF, docker and kubectl keep them, and ranks that only a device's number tells."""

from __future__ import annotations

from rmetric.diagnosis.reading.lsf import LsfReports


def test_a_report_of_lsf_stands_behind_its_output() -> None:
    reports = LsfReports()
    out = reports.moved([b"Sender: LSF System <a>", b"TERM_OWNER: killed", b"The output (if any)"])
    out += reports.moved([b"step 1", b"step 2"])
    assert [*out, *reports.rest()] == [b"step 1", b"step 2", b"", b"TERM_OWNER: killed", b""]
    assert reports.pieces == [(1, 4), (3, 1)]
    assert LsfReports().moved([b"step 1", b"Sender: no report"]) == [
        b"step 1",
        b"Sender: no report",
    ]
