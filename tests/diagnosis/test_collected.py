"""Logs from collectors that put a time, a pod or a node before every line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading.prefixes import PrefixParser
from rmetric.diagnosis.reading.records import Export

POD, AT = "fit-worker-{pod}", "2026-02-03T04:05:{second:02d}"
#: Collector -> what it puts before a line, and what the job calls who says it.
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
TRACEBACK = """\
Traceback (most recent call last):
  File "/srv/fit.py", line 41, in <module>
    main()
  File "/srv/fit.py", line 30, in main

    batch = next(batches)
OSError: [Errno 116] Stale file handle: '/data/part-7'"""
BAD, PODS, STEPS = 2, 4, 40


def written(path: Path, before: Callable[[int, int], str]) -> Path:
    """A job of which one pod raises an exception."""
    lines = [before(pod, 0) + f"worker ready, world_size={PODS}" for pod in range(PODS)]
    for step in range(1, STEPS):
        lines += [before(pod, step) + f"step {step} loss {4 / step:.3f}" for pod in range(PODS)]
    lines += [before(BAD, STEPS) + line for line in TRACEBACK.splitlines()]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path) -> Job:
    return ingest([path], SignatureLibrary.shipped())


@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_traceback_is_one_entry_of_its_pod_and_the_collectors_time_is_read(
    collector: str, tmp_path: Path
) -> None:
    form, name = COLLECTORS[collector]
    path = written(tmp_path / "all.log", lambda pod, at: form.format(pod=pod, second=at))
    stream = read(path).streams[name.format(pod=BAD, file=path)]
    assert stream.last is not None
    assert stream.last.text == TRACEBACK.replace("\n\n", "\n")
    assert stream.last_step == STEPS - 1
    said = {one.text for one in stream.tail if one.step is not None}
    assert f"step {STEPS - 1} loss {4 / (STEPS - 1):.3f}" in said
    times = stream.first_time, stream.last_time
    assert (None if times[1] is None else times[1] - times[0]) == (
        STEPS if "{second" in form else None
    )


def test_a_node_of_several_ranks_is_none_of_them(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    lines = [f"node-0{at % 2}: step {at} said, world_size=8\n" for at in range(40)]
    lines += [f"node-0{node}: [rank{4 * node}]: lost a peer\n" for node in range(2)]
    path.write_text("".join(lines))
    assert {"rank 0", "rank 4", "node node-00", "node node-01"} == set(read(path).streams)


OWN_TIMES = [
    # Programs that write a time themselves, and their tracebacks without one.
    [b"2026-02-03 04:05:06,123 INFO step %d" % at for at in range(40)]
    + [b"Traceback (most recent call last):", b'  File "fit.py", line 3', b"OSError: no"],
    [b"[2026-02-03 04:05:06]   step %d" % at for at in range(40)],
]


@pytest.mark.parametrize("lines", OWN_TIMES)
def test_a_program_s_own_times_stay(lines: list[bytes]) -> None:
    learnt = PrefixParser.learn(lines)
    assert learnt.behind is None
    assert learnt.start(lines[0]) == 0


def test_columns_behind_a_time_are_no_indentation() -> None:
    lines = [b"2026-02-03T04:05:06.5Z  INFO fit: step %d" % at for at in range(40)]
    learnt = PrefixParser.learn(lines)
    assert lines[0][learnt.start(lines[0]) :] == b"INFO fit: step 0"


def cell(text: str) -> str:
    """As such a table has it."""
    return '"' + text.replace('"', '""') + '"' if any(one in text for one in ',;"\n') else text


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("TIMESTAMP,SEVERITY,POD_NAME,MESSAGE", "{time},ERROR,{pod},{text}"),
        ("TIMESTAMP\tSEVERITY\tTASK_NAME\tMESSAGE", "{time}\tERROR\t{pod}\t{text}"),
        ("@timestamp,kubernetes.pod_name,log,stream", "{time},{pod},{text},stderr"),
        ('"Time";"Host";"Line"', '"{time}";"{pod}";{text}'),
    ],
)
def test_a_table_of_log_lines(tmp_path, header: str, row: str, newest_first: bool) -> None:
    """What is `ERROR` is all that was written to stderr; only one worker wrote of a failure."""
    lines = [
        (f"worker-{worker}", f"step {step}, loss 2.{step}")
        for step in range(40)
        for worker in range(4)
    ]
    lines.append(("worker-2", "OSError: [Errno 28] No space left on device: '/ckpt, \"new\"'"))
    lines.append(("service", "Job failed."))
    rows = [
        row.format(
            time=f"2025-05-06T17:{at // 60:02}:{at % 60:02}.{at:06}Z",
            pod=pod,
            text=cell(text) if "," in header or ";" in header else text,
        )
        for at, (pod, text) in enumerate(lines)
    ]
    (tmp_path / "export.csv").write_text("\n".join([header, *rows[:: -1 if newest_first else 1]]))
    found = diagnose(tmp_path)
    assert (found.outcome, found.cause) == ("failed", "disk_full")
    assert [one.name for one in found.nodes[:1]] == ["node worker-2"]
    assert found.iteration == 39


def lines(*rows: bytes) -> list[bytes]:
    """The lines that the rows of a table become, without that of its head."""
    table = Export.of(rows[0])
    assert table is not None
    return b"".join(table.blocks(iter([b"\n".join(rows)]))).splitlines()[1:]


def test_what_is_no_row_of_a_table_stays_as_it_is() -> None:
    """A text may go on in the next line, and a comma within quotes parts no columns."""
    rows = [b'1,"a,b,c', b'the rest"', b'1,pod-2,"one, two"']
    assert lines(b"time,pod,message", *rows) == [rows[0], b"the rest", b"[pod/pod-2] 1 one, two"]


def test_events_in_a_table_read_as_those_that_kubectl_prints(tmp_path: Path) -> None:
    steps = [f"2025-05-06T17:{at // 60:02}:{at % 60:02}Z step {at} loss 2.1" for at in range(90)]
    (tmp_path / "fit-0.log").write_text("\n".join(steps) + "\n")
    rows = [
        "LAST_TIMESTAMP(UTC)\tTYPE\tREASON\tOBJECT\tMESSAGE\tSOURCE",
        "2025-05-06T17:01:40Z\tWarning\tOOMKilling\tnode/gpu-1\tMemory cgroup out of memory: "
        "Killed process 228 (python3) total-vm:1kB\tkernel-monitor",
    ]
    (tmp_path / "events.tsv").write_text("\n".join(rows) + "\n")
    row = b"10:00\tNormal\tPulled\tpod/a-1\tdone\tkubelet"
    assert lines(rows[0].encode(), row) == [b"10:00 Normal Pulled pod/a-1 done"]
    assert diagnose(tmp_path).cause == "cgroup_out_of_memory"
