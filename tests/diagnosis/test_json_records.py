"""Logs that collectors export as JSON: each form gives the same job as the lines themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading.records import Export
from rmetric.diagnosis.reading.source import LogSource

TRACEBACK = """\
Traceback (most recent call last):
  File "/srv/fit.py", line 30, in main
    batch = next(batches)
OSError: [Errno 116] Stale file handle: '/data/part-7'"""
BAD, PODS, STEPS = 2, 4, 40

Entry = tuple[datetime, str, str]


def entries() -> list[Entry]:
    """When, which pod, what; the exception of one pod is one entry of several lines."""
    begin, found = datetime(2026, 2, 3, 4, 5, tzinfo=timezone.utc), list[Entry]()
    for at in range(STEPS):
        for pod in range(PODS):
            time = begin + timedelta(seconds=10 * at, milliseconds=pod)
            said = f"step {at} loss {4 / (at + 1):.3f}" if at else f"ready, world_size={PODS}"
            found.append((time, f"fit-worker-{pod}", said))
    found.append((begin + timedelta(seconds=10 * STEPS), f"fit-worker-{BAD}", TRACEBACK))
    return found


def iso(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)


#: Collector -> its record of an entry.
RECORDS: dict[str, Callable[[datetime, str, str], dict[str, Any]]] = {
    "cloud logging, text": lambda time, pod, said: {
        "insertId": "a", "resource": {"type": "k8s_container", "labels": {"pod_name": pod}},
        "severity": "ERROR", "textPayload": said + "\n", "timestamp": iso(time),
    },
    "cloud logging, message": lambda time, pod, said: {
        "jsonPayload": {"message": said, "attrs": {"tag": "workerpool0-0"}},
        "labels": {"compute.googleapis.com/resource_name": pod}, "timestamp": iso(time),
    },
    "fluentd": lambda time, pod, said: {
        "log": said, "stream": "stderr", "time": iso(time),
        "kubernetes": {"pod_name": pod, "host": "gpu-1", "container_name": "fit"},
    },
    "filebeat": lambda time, pod, said: {
        "@timestamp": iso(time), "message": said, "agent": {"type": "filebeat"},
        "host": {"name": "gpu-1"}, "kubernetes": {"pod": {"name": pod}},
    },
    "logcli": lambda time, pod, said: {
        "labels": {"app": "fit", "pod": pod}, "line": said, "timestamp": iso(time),
    },
    "cloudwatch": lambda time, pod, said: {
        "logStreamName": pod, "timestamp": milliseconds(time), "message": said,
        "ingestionTime": milliseconds(time) + 90,
    },
    "datadog": lambda time, pod, said: {
        "id": "a", "attributes": {"timestamp": iso(time), "message": said, "host": pod},
    },
    "splunk": lambda time, pod, said: {
        "result": {"_time": iso(time), "_raw": said, "host": pod},
    },
    "elastic": lambda time, pod, said: {
        "_index": "logs", "_source": {"@timestamp": iso(time), "message": said, "host": pod},
    },
}  # fmt: skip
#: Document -> the records within it.
DOCUMENTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "a record on each line": lambda records: "\n".join(map(json.dumps, records)) + "\n",
    "a list": lambda records: json.dumps(records, indent=2) + "\n",
    "a list on one line": json.dumps,
    "a list within the answer": lambda records: json.dumps(
        {"took": 5, "hits": {"total": 9, "hits": records}, "next": ""}, indent=1
    ),
    "two answers": lambda records: (
        json.dumps({"events": records[:90], "token": "f/3"}, indent=1)
        + json.dumps({"events": records[90:]}, indent=1)
    ),
    "the newest first": lambda records: json.dumps(records[::-1], indent=2),
}


def check(path: Path) -> None:
    stream = ingest([path], SignatureLibrary.shipped()).streams[f"node fit-worker-{BAD}"]
    assert stream.last is not None
    assert (stream.last.text, stream.last_step) == (TRACEBACK, STEPS - 1)
    assert stream.first_time is not None
    assert stream.last_time == pytest.approx(stream.first_time + 10 * STEPS, abs=0.1)
    found = diagnose([path])
    assert (found.cause, found.nodes[0].name) == ("nfs_stale_handle", f"node fit-worker-{BAD}")


@pytest.mark.long
@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("collector", RECORDS)
def test_a_job_is_read_from_records(collector: str, document: str, tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    path.write_text(DOCUMENTS[document]([RECORDS[collector](*one) for one in entries()]))
    check(path)


def test_an_answer_of_loki_has_a_list_of_lines_for_each_stream(tmp_path: Path) -> None:
    results = [
        {
            "stream": {"app": "fit", "pod": pod},
            "values": [
                [str(milliseconds(time) * 10**6), said] for time, of, said in entries() if of == pod
            ],
        }
        for pod in sorted({pod for _, pod, _ in entries()})
    ]
    path = tmp_path / "loki.json"
    path.write_text(json.dumps({"status": "success", "data": {"result": results}}))
    check(path)


def test_the_journal_is_read_as_it_prints_itself(tmp_path: Path) -> None:
    records = [
        {
            "__REALTIME_TIMESTAMP": f"177009150000000{at}", "_HOSTNAME": "gpu-7",
            "SYSLOG_IDENTIFIER": "kernel", "MESSAGE": message,
        }
        for at, message in enumerate(
            [
                "NVRM: GPU 0000:3b:00.0",
                "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
                list(b"bytes \xff that are no UTF-8"),
            ]
        )
    ]  # fmt: skip
    path = tmp_path / "journal.json"
    path.write_text("\n".join(map(json.dumps, records)))
    found = diagnose([path])
    assert (found.cause, found.nodes[0].name) == ("xid_79_fallen_off_the_bus", "node gpu-7")
    assert found.events[0].line == 2


def test_lines_are_those_of_their_records(tmp_path: Path) -> None:
    records = [RECORDS["fluentd"](*one) for one in entries()]
    path = tmp_path / "pods.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\nno record\n")
    source = LogSource(path=path, name="pods.jsonl", size=path.stat().st_size)
    lines = [line for some in source.chunks() for line in some]
    last = len(records)  # which has several lines
    assert [source.line(number) for number in range(1, len(lines) + 1)] == [
        *range(1, last), *[last] * len(TRACEBACK.splitlines()), last + 1,
    ]  # fmt: skip
    assert lines[-1] == b"no record"


def test_records_of_a_folder_are_read_auxiliary_logs_and_settings_are_not(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("step 1\nstep 2\n")
    (tmp_path / "config.json").write_text(json.dumps({"lr": 0.1, "layers": [{"size": 3}]}))
    records = [RECORDS["cloud logging, text"](*one) for one in entries()]
    (tmp_path / "export.json").write_text(json.dumps(records))
    found = diagnose([tmp_path])
    assert found.cause == "nfs_stale_handle"
    assert "left out: 1 settings" in " ".join(found.notes)


def test_a_document_that_is_cut_off_keeps_what_came_before(tmp_path: Path) -> None:
    records = [RECORDS["cloudwatch"](*one) for one in entries()]
    path = tmp_path / "events.json"
    path.write_text(json.dumps(records, indent=1)[:-200])
    stream = ingest([path], SignatureLibrary.shipped()).streams["node fit-worker-0"]
    assert stream.last_step == STEPS - 1


@pytest.mark.parametrize("size", [7, 1000, 1 << 20])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_of_any_size_give_the_same_lines(document: str, size: int) -> None:
    made = [RECORDS["filebeat"](time, pod, f"{said} 失败") for time, pod, said in entries()]
    text = DOCUMENTS[document](made).encode()

    def read(blocks: list[bytes]) -> tuple[bytes, list[tuple[int, int]]]:
        records = Export.of(text[:4096])
        assert records is not None
        return b"".join(records.blocks(iter(blocks))), records.pieces

    assert read([text[at : at + size] for at in range(0, len(text), size)]) == read([text])


@pytest.mark.parametrize(
    "line",
    [
        '{"time": "2026-02-03T04:05:06Z", "level": "info", "msg": "step", "step": 3, "loss": 2.1}',
        '{"timestamp": "2026-02-03T04:05:06Z", "message": "hi", "host": "gpu-1", "rank": 3}',
        '{"event": "METRICS", "step": 1, "metrics": {"loss": 2.0}}',
        "[2026-02-03 04:05:06] {started}",
        '[{"lr": 0.1}, {"lr": 0.2}]',
        "{" * 5000,
    ],
)
def test_what_a_program_writes_itself_is_left_alone(line: str) -> None:
    assert Export.of(line.encode() + b"\n") is None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_events_of_kubernetes_are_read_with_their_times(document: str, tmp_path: Path) -> None:
    begin = datetime(2026, 2, 3, 4, 5, tzinfo=timezone.utc)
    events = [
        {
            "lastTimestamp": iso(begin + timedelta(seconds=10 * at)), "type": "Warning",
            "reason": "Evict" if at == 9 else "Pulled", "involvedObject": {"kind": "Pod"},
            "message": "Pod is evicted, because of preempt" if at == 9 else f"pulled {at}",
        }
        for at in range(10)
    ]  # fmt: skip
    path = tmp_path / "events.json"
    path.write_text(DOCUMENTS[document](events))
    found = diagnose([path])
    assert (found.family, found.time) == ("preempted", (begin + timedelta(seconds=90)).timestamp())


BESIDE_A_LINE = {
    "docker": {"stream": "stderr", "time": "2026-02-03T04:05:00Z"},
    "a time alone": {"time": "2026-02-03T04:05:00Z"},
    "an upper-case time": {"@timestamp": "2026-02-03T04:05:00Z"},
    "nothing": {},
    "attributes": {"attrs": {"tag": "a"}, "time": "2026-02-03T04:05:00Z"},
    "fluentd's driver": {"container_id": "f00", "container_name": "/fit", "source": "stderr"},
}


@pytest.mark.parametrize("beside", BESIDE_A_LINE)
def test_a_line_of_a_container_is_read_whatever_stands_beside_it(tmp_path, beside):
    said = [
        "step 1 loss 2.5", "Traceback (most recent call last):",
        '  File "/srv/fit.py", line 30, in main', "ValueError: bad config",
    ]  # fmt: skip
    path = tmp_path / "log"
    records = [{"log": f"{line}\n", **BESIDE_A_LINE[beside]} for line in said]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    found = diagnose([path])
    assert found.outcome == "failed"
    assert "bad config" in found.title
