"""`rmetric telemetry`, as it is run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from rmetric.cli.main import main
from rmetric.guard.run_folder import RunFolder
from rmetric.telemetry.export import JsonlFile
from rmetric.telemetry.lines import GpuVerdict, event_line, read_line
from rmetric.telemetry.reading import GpuSign, Reading
from tests.telemetry.fake_nvml import SOURCE, build, environment_of

T = 1_800_000_000.0  # 2027-01-15 08:00:00Z


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nvml"))


def start(nvml, history, *arguments, gpus=2):
    return subprocess.Popen(
        [sys.executable, "-m", "rmetric", "telemetry", *map(str, arguments)],
        env=os.environ | environment_of(nvml, history, gpus),
        cwd=SOURCE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def recorded(path, last="xid_79", gpu=0):
    events = [
        Reading(gpu=g, time=T + 10 * n, temperature_celsius=61.0, pcie_replays=0)
        for n in range(30)
        for g in (0, 1)
    ]
    events.append(GpuSign(gpu=gpu, time=T + 294, kind=last))
    path.write_bytes(b"".join(event_line(event, "n7") for event in events))
    return path


PLAYED = """\
2027-01-15 08:00:00Z GPU n7:0: healthy
2027-01-15 08:00:00Z GPU n7:1: healthy
2027-01-15 08:04:54Z GPU n7:0: fatal, reboot the node: Xid 79: the GPU has fallen off the bus
GPU n7:0: its score can reach 0.60 at most, below the threshold of 0.95; not known: memory, \
power, utilisation_drop
GPU n7:1: its score can reach 0.60 at most, below the threshold of 0.95; not known: memory, \
power, utilisation_drop
"""


class TestPlayed:
    def test_it_prints_changes_and_how_it_ended(self, tmp_path, capsys):
        assert main(["telemetry", "--play", str(recorded(tmp_path / "r.jsonl"))]) == 3
        assert capsys.readouterr().out == PLAYED

    def test_a_day_without_a_sick_gpu_ends_with_0(self, tmp_path, capsys):
        path = recorded(tmp_path / "r.jsonl", last="application_xid_13")
        assert main(["telemetry", "--play", str(path)]) == 0
        assert "healthy: Xid 13: illegal instruction" in capsys.readouterr().out

    def test_a_run_is_asked_for_a_checkpoint_and_gets_the_verdicts(self, tmp_path, capsys):
        run = tmp_path / "run"
        run.mkdir()
        path = recorded(tmp_path / "r.jsonl")
        arguments = ["telemetry", "--play", str(path), "--run", str(run), "--node", "n7"]
        assert main(arguments) == 3
        request = RunFolder(run).request()
        assert request.number == 1
        assert request.source == "rule"
        assert request.fatal
        assert request.reason == "GPU n7:0: Xid 79: the GPU has fallen off the bus"
        lines = (run / "telemetry" / "n7.jsonl").read_bytes().splitlines()
        assert [read_line(line)[1].level for line in lines] == ["healthy", "healthy", "fatal"]
        assert f"request 1 for a checkpoint is left in {run}" in capsys.readouterr().out

    def test_a_risk_asks_as_a_risk(self, tmp_path):
        path = recorded(tmp_path / "r.jsonl")
        hot = Reading(gpu=1, time=T + 400, temperature_celsius=89.0)
        path.write_bytes(path.read_bytes() + event_line(hot, "n7"))
        arguments = ["telemetry", "--play", str(path), "--run", str(tmp_path), "--threshold", "0.2"]
        assert main(arguments) == 3
        request = RunFolder(tmp_path).request()
        assert request.number == 2
        assert request.source == "risk"
        assert request.reason.startswith("GPU n7:1: risk 0.31, the limit is 0.20: ")
        assert request.fatal  # what the request before it asked for is kept

    @pytest.mark.parametrize(
        ("arguments", "code", "problem"),
        [
            (["--play", "nowhere.jsonl"], 1, "nowhere.jsonl: No such file"),
            (["--play", "bad.jsonl"], 1, "bad.jsonl, line 1: not JSON"),
            (["--play", "r.jsonl", "--interval", "0"], 2, "interval is 0.0: it must be above 0"),
            (["--play", "r.jsonl", "--threshold", "2"], 2, "threshold is 2.0"),
            (["--play", "r.jsonl", "--run", "nowhere"], 2, "--run nowhere: there is no such"),
            (["--play", "r.jsonl", "--once"], 2, "--once reads GPUs"),
            (["--address", "0.0.0.0"], 2, "--address 0.0.0.0 is for --http"),
            (["--play", "r.jsonl", "--jsonl", "no/where.jsonl"], 1, "no/where.jsonl: No such file"),
            (["--play", "r.jsonl", "--jsonl", "/dev/full"], 1, "/dev/full: No space left"),
            (["--play", "r.jsonl", "--textfile", "no/where"], 2, "--textfile no/where: a file in"),
            (["--play", "r.jsonl", "--textfile", "."], 2, "--textfile .: a file in a folder"),
            (["--play", "r.jsonl", "--node", "a/b"], 2, "--node 'a/b': a name that a file"),
            (["--play", "r.jsonl", "--http", "0", "--address", "0.0.0.999"], 1, "0.0.0.999, port"),
            (["--play", "late.jsonl"], 1, "late.jsonl, line 1: Expected `float` <= 253402300799"),
            (["--play", "never.jsonl"], 1, "never.jsonl, line 1: Expected `float` <= 253402300799"),
            (["--play", "minus.jsonl"], 1, "minus.jsonl, line 1: Expected `int` >= 0 - at `$.gpu`"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_bad_input_is_one_clear_error(
        self, tmp_path, monkeypatch, capsys, arguments, code, problem
    ):
        monkeypatch.chdir(tmp_path)
        recorded(tmp_path / "r.jsonl")
        (tmp_path / "bad.jsonl").write_text("{oops\n")
        for name, gpu, time_ in (("late", 0, "1e30"), ("never", 0, "1e999"), ("minus", -1, "1")):
            line = f'{{"event": "READING", "gpu": {gpu}, "time": {time_}}}\n'
            (tmp_path / f"{name}.jsonl").write_text(line)
        assert main(["telemetry", *arguments]) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert problem in error
        assert error.count("\n") == 1

    def test_a_record_that_a_kill_cut_off_is_passed_over(self, tmp_path, capsys):
        path = recorded(tmp_path / "r.jsonl")
        whole = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(whole[:9]) + whole[9][:-20])
        JsonlFile(path).close()  # as a run that goes on does
        with path.open("ab") as file:
            file.writelines([*whole[10:], whole[-1][:-20]])
        assert main(["telemetry", "--play", str(path)]) == 3
        assert capsys.readouterr().out == PLAYED


class TestLive:
    def test_without_a_gpu_it_says_so_and_fails(self, nvml):
        done = start(nvml, [], "--once", gpus=0)
        out, error = done.communicate(timeout=60)
        assert (done.returncode, out) == (1, "")
        assert error == "error: no GPU can be read: the NVIDIA driver lists no GPU\n"

    def test_once_reads_each_gpu_once(self, nvml, tmp_path):
        kept = tmp_path / "kept.jsonl"
        done = start(nvml, [(1, 1, "remap_failed", 1)], "--once", "--jsonl", kept, "--node", "n1")
        out, error = done.communicate(timeout=60)
        assert (done.returncode, error) == (3, "")
        assert re.sub(r"(?m)^\S+ \S+ ", "", out) == (
            "GPU n1:0: healthy\n"
            "GPU n1:1: fatal, take it out of use: no spare row of memory for a failing one\n"
        )
        lines = [json.loads(line) for line in kept.read_bytes().splitlines()]
        assert [(line["event"], line["gpu"]) for line in lines] == [
            ("READING", 0), ("READING", 1), ("VERDICT", 0), ("VERDICT", 1),
        ]  # fmt: skip

    def test_it_goes_on_until_it_is_stopped(self, nvml, tmp_path):
        pytest.importorskip("prometheus_client")
        run = tmp_path / "run"
        run.mkdir()
        text, kept = tmp_path / "gpus.prom", tmp_path / "kept.jsonl"
        running = start(
            nvml, [(20, 1, "xid", 119)],
            "--interval", 0.02, "--node", "n1", "--http", 0, "--textfile", text, "--jsonl", kept,
            "--run", run,
        )  # fmt: skip
        try:
            line = running.stdout.readline()
            url = re.fullmatch(r"metrics: (http://127\.0\.0\.1:\d+/metrics)\n", line)[1]
            end = time.monotonic() + 30
            while RunFolder(run).request() is None and time.monotonic() < end:
                time.sleep(0.02)
            with urllib.request.urlopen(url, timeout=10) as answer:
                served = answer.read().decode()
            running.send_signal(signal.SIGTERM)
            out, error = running.communicate(timeout=30)
        finally:
            running.kill()
        assert (running.returncode, error) == (0, "")
        assert "GPU n1:1: fatal, reset the GPU: Xid 119" in out
        fatal = 'rmetric_gpu_level{gpu="1",level="fatal",node="n1"} 1.0'
        assert fatal in served
        assert fatal in text.read_text()
        assert RunFolder(run).request().reason.startswith("GPU n1:1: Xid 119")
        events = [read_line(line)[1] for line in kept.read_bytes().splitlines()]
        assert any(isinstance(event, GpuSign) and event.kind == "xid_119" for event in events)
        assert any(isinstance(event, GpuVerdict) and event.level == "fatal" for event in events)
        assert all(abs(event.time - time.time()) < 120 for event in events)


def test_a_full_disk_does_not_stop_the_watch(nvml, tmp_path):
    history = [(40, 0, "xid", 79)]
    arguments = ("--interval", "0.05", "--jsonl", "/dev/full", "--run", tmp_path)
    with start(nvml, history, *arguments, gpus=1) as running:
        output = read_until(running, "request 1 for a checkpoint is left")
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 1
        assert running.stderr.read().count("No space left") == 1
    assert "Xid 79" in output
    assert RunFolder(tmp_path).request().fatal


def read_until(running, words):
    output = ""
    while words not in output:
        line = running.stdout.readline()
        assert line, running.stderr.read()
        output += line
    return output
