"""Decisions of a rescue in a log: in the run, on its page and figure, on an incident's page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from rmetric import Record, RMetricConfig, Run
from rmetric.diagnosis.report.incident import incident_page
from rmetric.logs import LogError, run_lines
from rmetric.readers import open_log, read_log
from rmetric.records import LogEvent
from rmetric.reporting.replay_report import replay_logs
from tests.diagnosis.diagnoses import THEN, out_of_memory
from tests.reporting.page.pages import HOSTILE, Found, page

WHY = "went back from 713 to 690 because the loss is 6.1 (usual 2.3); 23 steps; try 2"
BACK = {"event": "RESCUE", "step": 713, "to": 690, "action": "go_back", "reason": WHY, "try": 2,
        "repeated": 23, "workers": [], "settings": False, "data": {}}  # fmt: skip
LEFT = BACK | {"step": 698, "to": None, "action": "leave_out", "reason": "step 698 is left out"}
HELD = BACK | {"step": 740, "action": "hold", "reason": "held at step 690 because it lasts"}
ALERT = {"event": "ALERT", "step": 697, "source": "stall", "reason": "waited", "rank": 0}


def write_log(path: Path, *entries: dict, last: int = 730) -> Path:
    records = [
        Record(step=step, time=14.0 * step, training_loss=3 - step / 999, gradient_norm=1.0)
        for step in range(600, last + 1)
    ]
    first, *lines = run_lines(Run(id="tiny", records=records), RMetricConfig())
    mine = [json.dumps(entry).encode() + b"\n" for entry in entries]
    path.write_bytes(b"".join([first, *lines[:98], *mine, *lines[98:]]))
    return path


@pytest.fixture
def log(tmp_path):
    return write_log(tmp_path / "run.jsonl", ALERT, LEFT, BACK)


EVENTS = [
    LogEvent(step=697, kind="alert", name="stall", reason="waited"),
    LogEvent(step=698, kind="decision", name="leave_out", reason="step 698 is left out"),
    LogEvent(step=713, kind="decision", name="go_back", reason=WHY, to=690),
]


def test_alerts_and_decisions_are_read_into_the_run(log):
    [run] = read_log(log).runs
    assert run.log_events == EVENTS
    assert len(run.records) == 131
    streamed = open_log(log)
    assert sum(1 for _ in streamed) == 131
    assert [run.log_events for run in streamed.runs.values()] == [EVENTS]


def test_a_decision_of_a_wrong_type_is_an_error_that_names_the_line(tmp_path):
    path = write_log(tmp_path / "run.jsonl", BACK | {"to": "the start"})
    with pytest.raises(LogError, match=r"run\.jsonl, line 100: 'to': found 'the start'"):
        read_log(path)


def test_of_very_many_the_first_are_kept_and_a_note_counts_the_others(tmp_path):
    [run] = read_log(write_log(tmp_path / "run.jsonl", *[LEFT] * 1010)).runs
    assert len(run.log_events) == 1000
    assert "10 more alerts and decisions in the log were left out" in run.notes


def test_the_line_has_the_form_of_the_schema():
    schema = Path(__file__).parents[3] / "docs/log_format.schema.json"
    validator = Draft202012Validator(json.loads(schema.read_text()))
    for entry in (BACK, LEFT, HELD | {"folder": "rescue-hold"}, BACK | {"skipped": [691, 713]}):
        validator.validate(entry)
    assert not validator.is_valid({k: v for k, v in BACK.items() if k != "reason"})


class TestPage:
    def test_the_charts_mark_each_decision_and_card_and_table_show_them(self, log):
        found = Found(page(read_log(log).runs[0]))
        lines = [line for line in found.data["lines"] if line["kind"] == "decision"]
        assert [(line["x"], line["label"]) for line in lines] == [
            (698, "left out"),
            (713, "went back to 690"),
        ]
        assert "--decision:" in "".join(found.styles)
        text = " ".join(found.text.split())
        for words in ("Decisions and alerts in the log", WHY, "waited",
                      "Rescue Went back once, 1 step left out"):  # fmt: skip
            assert words in text
        links = {value for _, name, value in found.attributes if name == "data-step"}
        assert {"697", "698", "713"} <= links

    def test_equal_decisions_are_one_mark_and_a_hold_after_the_records_is_on_the_axis(
        self, tmp_path
    ):
        entries = (BACK, LEFT, BACK, BACK | {"reason": HOSTILE}, HELD)
        html = page(read_log(write_log(tmp_path / "run.jsonl", *entries, last=720)).runs[0])
        found = Found(html)
        lines = [line for line in found.data["lines"] if line["kind"] == "decision"]
        assert [line["label"] for line in lines] == [
            "went back to 690, 3 times", "left out", "held at 690"
        ]  # fmt: skip
        assert lines[-1]["x"] == 740 < found.data["range"][1]
        assert HOSTILE not in html
        assert HOSTILE in found.text

    def test_a_page_of_very_many_stays_small_and_counts_them(self, tmp_path):
        left = [LEFT | {"step": step} for step in range(1, 901)]
        found = Found(page(read_log(write_log(tmp_path / "run.jsonl", *left, BACK)).runs[0]))
        lines = [line for line in found.data["lines"] if line["kind"] == "decision"]
        assert (len(lines), lines[-1]["label"]) == (30, "went back to 690")
        assert "801 more" in found.text

    @pytest.mark.parametrize("entries", [(), (ALERT,)], ids=["none", "alert"])
    def test_a_page_without_decisions_is_that_of_the_records_alone(self, tmp_path, entries):
        run = read_log(write_log(tmp_path / "run.jsonl", *entries)).runs[0]
        html = page(run)
        assert "--decision" not in html
        run.log_events = []
        assert page(run) == html

    def test_a_replay_writes_the_decisions_to_page_and_summary(self, log, tmp_path):
        replay_logs([log], tmp_path / "out", most_plots=0)
        folder = tmp_path / "out" / "tiny"
        assert WHY in Found((folder / "report.html").read_text()).text
        summary = json.loads((folder / "summary.json").read_text())
        assert [entry["step"] for entry in summary["decisions"]] == [698, 713]


def test_an_incident_s_page_has_the_decisions_on_its_charts_and_its_timeline(log):
    diagnosis = out_of_memory(
        iteration=730,
        since=None,
        job=dict(out_of_memory().job, last_step_time=THEN - 5),
    )
    found = Found(incident_page(diagnosis, metrics=log))
    assert "Decisions of the rescue" in found.text
    assert f"step 713: {WHY}" in found.text  # of the mark
    assert "Decisions and alerts in the log" in found.text
    assert any(line["kind"] == "decision" for line in found.data["lines"])


def test_a_return_stands_on_the_timeline_where_the_records_after_it_begin(log):
    from rmetric.diagnosis.report.incident import metric_lanes, read_metric

    diagnosis = out_of_memory(iteration=730, job=dict(out_of_memory().job, last_step_time=THEN))
    lanes = metric_lanes(read_metric(log, diagnosis))
    seconds = [THEN - mark.start for mark in lanes["Decisions of the rescue"]]
    assert seconds == pytest.approx([14.0 * (730 - 698), 14.0 * (730 - 690)])
