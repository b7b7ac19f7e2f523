"""Logs from collectors: what they put before every line, their tables, and their JSON."""

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
from rmetric.diagnosis.reading.prefixes import PrefixParser
from rmetric.diagnosis.reading.records import RECORD_FORMS, Export, keys_of
from rmetric.diagnosis.reading.source import LogSource

TRACEBACK = """\
Traceback (most recent call last):
  File "/srv/fit.py", line 30, in main
    batch = next(batches)
OSError: [Errno 116] Stale file handle: '/data/part-7'"""
BAD, PODS, STEPS = 2, 4, 40
POD, AT = "fit-worker-{pod}", "2026-02-03T04:05:{second:02d}"
#: Collector -> what it puts before a line, and what the job calls its writer.
COLLECTORS = {
    "kubectl": ("[pod/" + POD + "/main] " + AT + ".123456789Z ", "node " + POD),
    "docker": (AT + ".123456789Z ", "{file}"),
    "compose": ("fit-{pod}  | " + AT + ".12Z ", "node fit-{pod}"),
    "stern": (POD + " main ", "node " + POD),
    "stern -t": (POD + " main " + AT + ".12Z ", "node " + POD),
    "loki": (AT + 'Z {{app="fit", pod="fit-{pod}", stream="stderr"}} ', "node fit-{pod}"),
    "journal": (AT + "+0000 node{pod} python3[7{pod}]: ", "node node{pod}"),
    "syslog": ("Feb  3 04:05:{second:02d} node{pod} python3[7{pod}]: ", "node node{pod}"),
    "sagemaker": (AT + ".000Z [1,mpirank:{pod},algo-1]<stderr>:", "rank {pod}"),
    "srun behind a time": ("2026-02-03 04:05:{second:02d} {pod}: ", "rank {pod}"),
    "brackets": ("[2026-02-03 04:05:{second:02d}] ", "{file}"),
    "mpirun": ("[1,{pod}]<stderr>:", "rank {pod}"),
    "torchrun": ("[default{pod}]:", "rank {pod}"),
}


@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_traceback_is_one_entry_of_its_pod_and_the_collectors_time_is_read(
    collector: str, tmp_path: Path
) -> None:
    form, name = COLLECTORS[collector]
    rows = [(pod, 0, f"worker ready, world_size={PODS}") for pod in range(PODS)]
    rows += [(pod, at, f"step {at} loss 2.{at}") for at in range(1, STEPS) for pod in range(PODS)]
    rows += [(BAD, STEPS, line) for line in TRACEBACK.replace("main\n", "main\n\n").splitlines()]
    path = tmp_path / "all.log"
    path.write_text("".join(f"{form.format(pod=pod, second=at)}{text}\n" for pod, at, text in rows))
    job = ingest([path], SignatureLibrary.shipped())
    stream = job.streams[name.format(pod=BAD, file=path)]
    assert stream.last is not None
    assert (stream.last.text, stream.last_step) == (TRACEBACK, STEPS - 1)
    assert f"step {STEPS - 1} loss 2.{STEPS - 1}" in {entry.text for entry in stream.tail}
    times = stream.first_time, stream.last_time
    assert (None if times[1] is None else times[1] - times[0]) == (
        STEPS if "{second" in form else None
    )


def test_a_node_of_several_ranks_is_none_of_them(tmp_path: Path) -> None:
    lines = [f"node-0{at % 2}: step {at} said, world_size=8\n" for at in range(40)]
    lines += [f"node-0{node}: [rank{4 * node}]: lost a peer\n" for node in range(2)]
    (tmp_path / "all.log").write_text("".join(lines))
    streams = ingest([tmp_path], SignatureLibrary.shipped()).streams
    assert set(streams) == {"rank 0", "rank 4", "node node-00", "node node-01"}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([b"2026-02-03T04:05:06.5Z  INFO fit: step %d" % at for at in range(40)],
         b"INFO fit: step 0"),  # columns behind a time are not indentation
        # Programs that write a time themselves, and their tracebacks without one.
        ([b"2026-02-03 04:05:06,123 INFO step %d" % at for at in range(40)]
         + [b"Traceback (most recent call last):", b'  File "fit.py", line 3', b"OSError: no"],
         b"2026-02-03 04:05:06,123 INFO step 0"),
        ([b"[2026-02-03 04:05:06]   step %d" % at for at in range(40)],
         b"[2026-02-03 04:05:06]   step 0"),
    ],
    ids=["a collector's", "a program's", "a program's in brackets"],
)  # fmt: skip
def test_the_time_of_a_collector_goes_and_a_program_s_own_stays(
    lines: list[bytes], text: bytes
) -> None:
    assert lines[0][PrefixParser.learn(lines).start(lines[0]) :] == text


# tables


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("TIMESTAMP,SEVERITY,POD_NAME,MESSAGE", '{time},ERROR,{pod},"{text}"'),
        ("TIMESTAMP\tSEVERITY\tTASK_NAME\tMESSAGE", "{time}\tERROR\t{pod}\t{text}"),
        ("@timestamp,kubernetes.pod_name,log,stream", '{time},{pod},"{text}",stderr'),
        ('"Time";"Host";"Line"', '"{time}";"{pod}";"{text}"'),
    ],
)
def test_a_table_of_log_lines(tmp_path, header: str, row: str, newest_first: bool) -> None:
    """What is `ERROR` is all that was written to stderr; only one worker wrote of a failure."""
    quote = "" if "\t" in header else '"'
    lines = [(f"worker-{at % 4}", f"step {at // 4}, loss 2.{at // 4}") for at in range(160)]
    full = f"OSError: [Errno 28] No space left on device: '/ckpt, {quote}\"new{quote}\"'"
    lines += [("worker-2", full), ("service", "Job failed.")]
    rows = [
        row.format(time=f"2025-05-06T17:{at // 60:02}:{at % 60:02}.{at:06}Z", pod=pod, text=text)
        for at, (pod, text) in enumerate(lines)
    ]
    (tmp_path / "export.csv").write_text("\n".join([header, *rows[:: -1 if newest_first else 1]]))
    found = diagnose(tmp_path)
    assert (found.outcome, found.cause) == ("failed", "disk_full")
    assert [suspect.name for suspect in found.nodes[:1]] == ["node worker-2"]
    assert found.iteration == 39


def lines_of(*rows: bytes) -> list[bytes]:
    """The lines that the rows of a table become, without that of its head."""
    table = Export.of(rows[0])
    assert table is not None
    return b"".join(table.blocks(iter([b"\n".join(rows)]))).splitlines()[1:]


@pytest.mark.parametrize(
    "time", ["May  6 10:00:30", "20250506100000", "[2025-05-06 10:00:30]", "inf"]
)
def test_times_of_a_table_stay_as_they_are_written(time: str) -> None:
    (line,) = lines_of(b"time,host,message", f"{time},gpu-1,NCCL error".encode())
    assert line.decode() == f"[pod/gpu-1] {time} NCCL error"


def test_a_time_without_end_is_none() -> None:
    record = b'{"textPayload": "NCCL error", "timestamp": "inf"}'
    export = Export.of(record)
    assert export is not None
    assert b"".join(export.blocks(iter([record]))).strip() == b"NCCL error"


def test_what_is_no_row_of_a_table_stays_and_events_read_as_kubectl_prints_them() -> None:
    """A text may go on in the next line, and a comma within quotes parts no columns."""
    rows = [b'1,"a,b,c', b'the rest"', b'1,pod-2,"one, two"']
    assert lines_of(b"time,pod,message", *rows) == [
        rows[0], b"the rest", b"[pod/pod-2] 1 one, two",
    ]  # fmt: skip
    header = b"LAST_TIMESTAMP(UTC)\tTYPE\tREASON\tOBJECT\tMESSAGE\tSOURCE"
    row = b"10:00\tNormal\tPulled\tpod/a-1\tdone\tkubelet"
    assert lines_of(header, row) == [b"10:00 Normal Pulled pod/a-1 done"]


# JSON

Entry = tuple[datetime, str, str]
BEGIN = datetime(2026, 2, 3, 4, 5, tzinfo=timezone.utc)


def entries() -> list[Entry]:
    """When, which pod, what; the exception of one pod is one entry of several lines."""
    found = list[Entry]()
    for at in range(STEPS):
        for pod in range(PODS):
            time = BEGIN + timedelta(seconds=10 * at, milliseconds=pod)
            text = f"step {at} loss {4 / (at + 1):.3f}" if at else f"ready, world_size={PODS}"
            found.append((time, f"fit-worker-{pod}", text))
    found.append((BEGIN + timedelta(seconds=10 * STEPS), f"fit-worker-{BAD}", TRACEBACK))
    return found


def iso(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)


#: Collector -> its record of an entry.
RECORDS: dict[str, Callable[[datetime, str, str], dict[str, Any]]] = {
    "cloud logging, text": lambda time, pod, text: {
        "insertId": "a", "resource": {"type": "k8s_container", "labels": {"pod_name": pod}},
        "severity": "ERROR", "textPayload": text + "\n", "timestamp": iso(time),
    },
    "cloud logging, message": lambda time, pod, text: {
        "jsonPayload": {"message": text, "attrs": {"tag": "workerpool0-0"}},
        "labels": {"compute.googleapis.com/resource_name": pod}, "timestamp": iso(time),
    },
    "fluentd": lambda time, pod, text: {
        "log": text, "stream": "stderr", "time": iso(time),
        "kubernetes": {"pod_name": pod, "host": "gpu-1", "container_name": "fit"},
    },
    "filebeat": lambda time, pod, text: {
        "@timestamp": iso(time), "message": text, "agent": {"type": "filebeat"},
        "host": {"name": "gpu-1"}, "kubernetes": {"pod": {"name": pod}},
    },
    "logcli": lambda time, pod, text: {
        "labels": {"app": "fit", "pod": pod}, "line": text, "timestamp": iso(time),
    },
    "cloudwatch": lambda time, pod, text: {
        "logStreamName": pod, "timestamp": milliseconds(time), "message": text,
        "ingestionTime": milliseconds(time) + 90,
    },
    "datadog": lambda time, pod, text: {
        "id": "a", "attributes": {"timestamp": iso(time), "message": text, "host": pod},
    },
    "splunk": lambda time, pod, text: {
        "result": {"_time": iso(time), "_raw": text, "host": pod},
    },
    "elastic": lambda time, pod, text: {
        "_index": "logs", "_source": {"@timestamp": iso(time), "message": text, "host": pod},
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


@pytest.mark.parametrize("collector", RECORD_FORMS)
def test_a_record_of_a_collector_is_known_by_its_keys(collector: str) -> None:
    record = RECORD_FORMS[collector].example
    assert Export.of(json.dumps(record).encode()) is not None
    fits = {name: form.fits(keys_of(record)) for name, form in RECORD_FORMS.items()}
    assert fits == {name: name == collector for name in RECORD_FORMS}


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("collector", RECORDS)
def test_a_job_is_read_from_records(collector: str, document: str, tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    path.write_text(DOCUMENTS[document]([RECORDS[collector](*entry) for entry in entries()]))
    check(path)


def test_an_answer_of_loki_has_a_list_of_lines_for_each_stream(tmp_path: Path) -> None:
    results = [
        {
            "stream": {"app": "fit", "pod": pod},
            "values": [
                [str(milliseconds(time) * 10**6), text] for time, of, text in entries() if of == pod
            ],
        }
        for pod in sorted({pod for _, pod, _ in entries()})
    ]
    path = tmp_path / "loki.json"
    path.write_text(json.dumps({"status": "success", "data": {"result": results}}))
    check(path)


def test_the_journal_is_read_as_it_prints_itself(tmp_path: Path) -> None:
    messages = [
        "NVRM: GPU 0000:3b:00.0",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        list(b"bytes \xff that are no UTF-8"),
    ]
    about = {"_HOSTNAME": "gpu-7", "SYSLOG_IDENTIFIER": "kernel"}
    path = tmp_path / "journal.json"
    path.write_text(
        "\n".join(
            json.dumps({"__REALTIME_TIMESTAMP": f"177009150000000{at}", "MESSAGE": text, **about})
            for at, text in enumerate(messages)
        )
    )
    found = diagnose([path])
    assert (found.cause, found.nodes[0].name) == ("xid_79_fallen_off_the_bus", "node gpu-7")
    assert found.events[0].line == 2


def test_lines_are_those_of_their_records(tmp_path: Path) -> None:
    records = [RECORDS["fluentd"](*entry) for entry in entries()]
    path = tmp_path / "pods.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\nno record\n")
    source = LogSource(path=path, name="pods.jsonl", size=path.stat().st_size)
    lines = [line for some in source.chunks() for line in some]
    last = len(records)  # which has several lines
    assert [source.line(number) for number in range(1, len(lines) + 1)] == [
        *range(1, last), *[last] * len(TRACEBACK.splitlines()), last + 1,
    ]  # fmt: skip
    assert lines[-1] == b"no record"


def test_records_of_a_folder_are_read_cut_off_too_and_settings_are_not(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("step 1\nstep 2\n")
    (tmp_path / "config.json").write_text(json.dumps({"lr": 0.1, "layers": [{"size": 3}]}))
    text = json.dumps([RECORDS["cloudwatch"](*entry) for entry in entries()], indent=1)
    (tmp_path / "export.json").write_text(text[:-40])
    job = ingest([tmp_path], SignatureLibrary.shipped())
    assert job.streams["node fit-worker-0"].last_step == STEPS - 1
    assert "left out: 1 settings" in " ".join(job.notes)


@pytest.mark.parametrize("size", [7, 1000])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_of_any_size_give_the_same_lines(document: str, size: int) -> None:
    made = [RECORDS["filebeat"](time, pod, f"{line} 失败") for time, pod, line in entries()]
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


def test_events_of_kubernetes_are_read_with_their_times(tmp_path: Path) -> None:
    events = [
        {
            "lastTimestamp": iso(BEGIN + timedelta(seconds=10 * at)), "type": "Warning",
            "reason": "Evict" if at == 9 else "Pulled", "involvedObject": {"kind": "Pod"},
            "message": "Pod is evicted, because of preempt" if at == 9 else f"pulled {at}",
        }
        for at in range(10)
    ]  # fmt: skip
    path = tmp_path / "events.json"
    path.write_text(json.dumps(events, indent=2))
    found = diagnose([path])
    assert (found.family, found.time) == ("preempted", (BEGIN + timedelta(seconds=90)).timestamp())


@pytest.mark.parametrize(
    "beside",
    [
        {"stream": "stderr", "time": iso(BEGIN)},
        {"time": iso(BEGIN)},
        {"@timestamp": iso(BEGIN)},
        {},
        {"attrs": {"tag": "a"}, "time": iso(BEGIN)},
        {"container_id": "f00", "container_name": "/fit", "source": "stderr"},
    ],
    ids=["docker", "a time alone", "another key", "nothing", "attributes", "fluentd's driver"],
)
def test_a_line_of_a_container_is_read_whatever_stands_beside_it(tmp_path, beside):
    path = tmp_path / "log"
    lines = ["step 1 loss 2.5", *TRACEBACK.splitlines()]
    records = [{"log": f"{line}\n", **beside} for line in lines]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert diagnose([path]).cause == "nfs_stale_handle"
