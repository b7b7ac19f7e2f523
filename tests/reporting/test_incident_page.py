"""The page of one incident: what it says, that logs stay text on it, that it needs nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rmetric.diagnosis.report.incident import incident_page, on_axis, timelines
from rmetric.diagnosis.report.result import Candidate, Diagnosis
from rmetric.logs import LogError
from rmetric.telemetry.lines import event_line
from rmetric.telemetry.reading import GpuSign, Reading
from tests.diagnosis.diagnoses import THEN, echo, evidence, out_of_memory, suspect
from tests.reporting.page.pages import HOSTILE, TEXTS, Found

STEP_SECONDS = 14.0


def job():
    stages = [("launch", -7200), ("train", -6500), ("checkpoint", -60)]
    return dict(
        out_of_memory().job,
        stages=[dict(stage=name, time=THEN + at, file="a.log", line=1) for name, at in stages],
        last_step_time=THEN - 5,
    )


@pytest.fixture
def metrics(tmp_path):
    """431 steps whose loss breaks at step 420."""
    path = tmp_path / "run.csv"
    lines = ["step,elapsed_seconds,loss"]
    lines += [
        f"{s},{s * STEP_SECONDS},{3 - s / 431 + (s % 7) / 100 + 6 * (s > 420):.4f}"
        for s in range(1, 432)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def telemetry(tmp_path):
    """Two GPUs of node-03, of which the second falls off the bus 40 s before the cause."""
    path = tmp_path / "gpus.jsonl"
    events = [
        Reading(gpu=gpu, time=THEN - 600 + 60 * i, temperature_celsius=60)
        for i in range(12)
        for gpu in (0, 1)
    ]
    events.append(GpuSign(gpu=1, time=THEN - 40, kind="xid_79"))
    events.sort(key=lambda event: event.time)
    path.write_bytes(b"".join(event_line(event, "node-03") for event in events))
    return path


def test_it_says_what_the_verdict_says_and_without_a_training_log_has_no_script():
    found = Found(incident_page(out_of_memory()))
    for words in (
        "A GPU ran out of memory", "93 % (sure)", "rank 12 on node-03", "User acts",
        "Lower the micro batch.", "node-03/rank_12.log:8812", "2. echo", "A collective timed out",
        "Iteration 429 was the first", "the clock of node-05 is 3 h ahead", "1,234,567",
        "FAILED: A GPU ran out of memory, rank 12 on node-03, at step 431 (train)",
    ):  # fmt: skip
        assert words in found.text, words
    assert "The GPUs" not in found.text
    assert {"canvas", "script"}.isdisjoint(found.tags)
    assert "script-src 'none'" in found.values("meta", "content")[0]


@pytest.mark.parametrize(
    ("diagnosis", "words"),
    [
        (Diagnosis(outcome="healthy", confidence=0.97), ["no failure found", "97 %"]),
        (
            Diagnosis(outcome="unknown", title="Outcome unknown: the log ends without a fault",
                      candidates=(Candidate(cause="x", title="The node was lost", confidence=0.2,
                                            why="it is silent"),)),
            ["the log ends without a fault", "Not known", "What it may be", "The node was lost"],
        ),
        (out_of_memory(outcome="terminated"), ["terminated"]),
        (out_of_memory(nodes=()), ["No node stands out"]),
    ],
    ids=["healthy", "unknown", "terminated", "nobody"],
)  # fmt: skip
def test_each_outcome_has_its_page(diagnosis, words):
    text = Found(incident_page(diagnosis)).text
    assert all(word in text for word in words)


def hostile(text):
    return out_of_memory(
        title=text, why=text, family=text, stage=text, to_do=(text,), notes=(text,),
        cause=text, events=(evidence(text=text, file=text, why=text, who=(text,)),
                            echo(who=(text,), why=text)),
        nodes=(suspect(node=text, why=text, name=text),),
        candidates=(Candidate(cause=text, title=text, confidence=0.3, why=text),),
        job=job() | {"stages": [dict(stage=text, time=THEN - 9, file=text, line=1)]},
    )  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_in_a_log_becomes_markup(text):
    html = incident_page(hostile(text))
    found, plain = Found(html), Found(incident_page(out_of_memory(job=job())))
    assert set(found.tags) == set(plain.tags)
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert not [value for _, name, value in found.attributes if name == "style"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", html)
    assert text != HOSTILE or HOSTILE in found.text


def test_it_needs_nothing_beside_itself_and_is_the_same_each_time(metrics, telemetry):
    diagnosis = out_of_memory(job=job())
    html = incident_page(diagnosis, metrics=metrics, telemetry=telemetry)
    assert html == incident_page(diagnosis, metrics=metrics, telemetry=telemetry)
    found = Found(html)
    links = [value for _, name, value in found.attributes if name in ("src", "href", "action")]
    assert all(value.startswith(("#", "data:")) for value in links)
    assert "default-src 'none'" in Found(html).values("meta", "content")[0]


def test_all_that_has_a_time_stands_on_one_axis(metrics, telemetry):
    found = Found(incident_page(out_of_memory(job=job()), metrics=metrics, telemetry=telemetry))
    assert found.values("svg", "aria-label") == [
        "Stage", "Alarms of the calibrated detector", "GPU node-03:1",
        "What indicates the failure",
        # around the failure: the alarm was before
        "Stage", "GPU node-03:1", "1. cause: A GPU ran out of memory",
        "2. echo: A collective timed out",
    ]  # fmt: skip
    assert "On the axis of time it is placed by step 431, which both tell." in found.text
    # The second axis is for moments that stick together alone.
    diagnosis = out_of_memory(job=job())
    times = sorted(event.time for event in diagnosis.events)
    beside = max(0.1 * (times[-1] - times[0]), 5.0)
    (_, near), _ = timelines(diagnosis, None, None)
    assert (near.start, near.end) == (times[0] - beside, times[-1] + beside)
    for others in ((), (replace(diagnosis.events[1], time=THEN - 6000),)):
        events = (diagnosis.events[0], *others)
        assert len(timelines(replace(diagnosis, events=events), None, None)[0]) == 1


def test_an_alarm_is_placed_by_the_step_that_both_logs_state(metrics):
    html = incident_page(out_of_memory(job=job()), metrics=metrics)
    lane = re.search(r'aria-label="Alarms of the calibrated detector">(.*?)</svg>', html, re.S)
    place = float(re.search(r'x1="([\d.]+)%"', lane[1])[1])
    step = int(re.search(r"alarm at step (\d+)", lane[1])[1])
    time = THEN - 5 - (431 - step) * STEP_SECONDS
    first, last = out_of_memory().job["first_time"], out_of_memory().job["last_time"]
    assert 421 <= step <= 425
    assert place == pytest.approx(100 * (time - first) / (last - first), abs=0.01)


def test_the_logs_steps_are_drawn_into_the_loss_and_those_of_another_count_noted(metrics):
    found = Found(incident_page(out_of_memory(), metrics=metrics))
    lines = {line["label"]: line["step"] for line in found.data["lines"]}
    assert lines["the logs' last step"] == 431
    assert lines["the logs' first iteration that differs"] == 429
    assert not any("as published" in label for label in lines)
    assert [panel["name"] for panel in found.data["panels"]] == ["loss", "score_calibrated"]
    assert "Its alarms are not on the axis of time" in found.text
    other = Found(incident_page(out_of_memory(iteration=10**7), metrics=metrics))
    assert "the logs' last step" not in [line["label"] for line in other.data["lines"]]
    note = "The logs' last step, 10,000,000, is not drawn: this log's steps are 1 to 431"
    assert note in other.text


def test_the_gpu_that_failed_is_set_beside_the_cause(telemetry):
    found = Found(incident_page(out_of_memory(), telemetry=telemetry))
    assert "GPU node-03:1: fatal" in found.text
    assert "40 s before the cause" in found.text
    assert "The logs point to its node too." in found.text
    assert "1 of 2 GPUs were not always healthy." in found.text
    other = Found(incident_page(out_of_memory(nodes=()), telemetry=telemetry))
    assert "The logs point to its node too." not in other.text


def test_a_recording_of_another_day_is_noted(telemetry):
    later = replace(
        out_of_memory(), time=THEN + 1e6, events=(evidence(time=THEN + 1e6),),
        job=dict(files=1, lines=1, first_time=THEN + 1e6 - 60, last_time=THEN + 1e6),
    )  # fmt: skip
    found = Found(incident_page(later, telemetry=telemetry))
    assert "does not overlap with the logs' times" in found.text
    assert found.values("svg", "aria-label") == ["1. cause: A GPU ran out of memory"]


def test_events_without_a_date_are_in_the_table_only():
    mixed = out_of_memory(events=(evidence(time=None), evidence(time=4821.5), echo()))
    text = Found(incident_page(mixed)).text
    assert "1 event without a time: only in the table." in text
    assert "1 event whose time has no date and year: only in the table." in text
    assert "4821.5 s on its own clock" in text
    once = out_of_memory(events=(evidence(),), job={})
    assert "The logs state one time only, 2024-05-03 02:14:07." in Found(incident_page(once)).text
    none = out_of_memory(events=(evidence(time=None),), job={}, time=None)
    assert "nothing stands on an axis of time" in Found(incident_page(none)).text


def test_what_cannot_be_read_is_an_error_that_names_it(tmp_path):
    rubbish = tmp_path / "rubbish.jsonl"
    rubbish.write_text("no telemetry\n")
    with pytest.raises(LogError, match=r"rubbish\.jsonl"):
        incident_page(out_of_memory(), telemetry=rubbish)
    with pytest.raises(LogError, match=r"rubbish\.jsonl"):
        incident_page(out_of_memory(), metrics=rubbish)


@pytest.mark.parametrize("time", [None, float("nan"), float("inf"), 4821.5, 1e300, -1.0])
def test_what_is_no_date_is_not_on_an_axis(time):
    assert not on_axis(time)
    html = incident_page(out_of_memory(events=(evidence(time=time),), time=time))
    assert "A GPU ran out of memory" in html
