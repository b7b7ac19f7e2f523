"""The replay script as users meet it: what it writes, what it prints, its exit codes."""

from __future__ import annotations

import csv
import hashlib
import resource
import signal
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replay_and_analyze_logs as script
from rmetric import Record, RMetric, RMetricConfig, Run, Truth
from rmetric.cli.main import main
from rmetric.evaluation import Study
from rmetric.logs import run_lines
from rmetric.replay.scored_run import score_run
from rmetric.reporting.replay_report import INDEX_NAMES, safe_name
from studies.paper.script import provenance
from tests.cli.test_exit_codes import ROOT, code_of
from tests.records.test_logs import strict

GOOD = "step,loss,grad_norm\n" + "".join(f"{s},{4 - s / 10},1.5\n" for s in range(1, 11))


@pytest.fixture
def replay(tmp_path, monkeypatch):
    """Run the script in an empty folder; returns its exit code and the folder of results.

    A dict of arguments has files to write first, by their names, which are given to it.
    """
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, plots: str = "none") -> tuple[int, Path]:
        given = []
        for argument in arguments:
            given += map(str, argument if isinstance(argument, dict) else [argument])
            for name, text in argument.items() if isinstance(argument, dict) else ():
                Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return script.main([*given, "--out", "out", "--plots", plots]), tmp_path / "out"

    return call


def own_records() -> list[Record]:
    common = dict(worker_gradient_norms=(1.0, 1.0), events=())
    losses = {15: 5.0, 25: 5.0}
    return [
        Record(step=s, time=5.0 * s, validation_loss=losses.get(s, 3.0), **common)
        for s in range(1, 31)
    ]


def own_log(id: str, **changes) -> bytes:
    fate = dict(fault="LR_SPIKE", onset_step=20, outcome="failed", failure_kind="diverged")
    truth = Truth(**(fate | dict(failure_step=30) | changes))
    return b"".join(run_lines(Run(id=id, records=own_records(), truth=truth), RMetricConfig()))


def summary(out: Path, name: str) -> dict:
    return strict((out / name / "summary.json").read_bytes())


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def index(out: Path) -> list[dict[str, str]]:
    return table(out / "index.csv")


def test_a_run_gets_scores_summary_and_plot(replay):
    code, out = replay({"a.csv": GOOD}, plots="all")
    assert code == 0
    assert {path.name for path in (out / "a").iterdir()} == {
        "report.html", "scores.csv", "summary.json", "case_study.png", "case_study.pdf",
    }  # fmt: skip
    assert (out / "a" / "case_study.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "a" / "case_study.pdf").read_bytes().startswith(b"%PDF")
    found = summary(out, "a")
    assert (found["num_records"], found["variance_source"]) == (10, "trailing")
    assert found["loss_used"] == "training_loss"
    assert any("the training loss" in note for note in found["notes"])
    assert any("not disagreement between workers" in note for note in found["notes"])
    assert any("λ is undefined" in note for note in found["notes"])
    assert "a.csv" in (out / "index.md").read_text()


def test_the_scores_are_those_of_the_metric(replay):
    _, out = replay({"run.jsonl": own_log("run")})
    lines = table(out / "run" / "scores.csv")
    metric = RMetric()
    for line, record in zip(lines, own_records(), strict=True):
        metric.update(record)
        assert int(line["step"]) == record.step
        assert float(line["r_metric"]) == metric.score
        assert int(line["alert"]) == metric.alarm
        loss_drift = float(line["loss_drift"] or "nan")
        assert loss_drift == pytest.approx(metric.raw.loss_drift, nan_ok=True)


def test_the_pages_link_each_other_and_tell_how_to_make_them_again(replay):
    logs = {"a b.csv": GOOD.replace("loss", "ce"), "c.csv": "step,ce\n1,three\n"}
    _, out = replay(logs, "--map", "loss=ce", "--preset", "case_study")
    index_page = (out / "index.html").read_text()
    assert 'href="a_b/report.html"' in index_page
    assert "c.csv, line 2" in index_page
    run_page = (out / "a_b" / "report.html").read_text()
    assert 'href="../index.html"' in run_page
    command = "python -m rmetric replay &#39;a b.csv&#39; --preset case_study --map loss=ce"
    assert command in run_page
    digest = hashlib.sha256(logs["a b.csv"].encode()).hexdigest()
    assert digest in run_page
    assert summary(out, "a_b")["sha256"] == digest


def test_what_the_detectors_say_is_in_scores_summary_and_page(replay, monkeypatch):
    monkeypatch.setattr("rmetric.reporting.replay_report.WATCHED_BY", ("always", "loss_rise"))
    _, out = replay({"run.jsonl": own_log("run")})
    lines = table(out / "run" / "scores.csv")
    assert {line["always_alarm"] for line in lines} == {"1"}
    assert {line["loss_rise_alarm"] for line in lines} == {"0"}
    assert len({len(line) for line in lines}) == 1
    assert summary(out, "run")["detectors"]["always"]["first_alarm_step"] == 1
    assert "Always alarm" in (out / "run" / "report.html").read_text()
    entry = summary(out, "run")["detectors"]["r_metric"]
    assert (entry["first_alarm_step"], entry["num_alarms"]) == (15, 2)
    assert entry["num_records_in_alarm"] == summary(out, "run")["num_records_in_alert"]
    assert "ΔL 0.70" in entry["alarms"][0]["reason"]


def test_lead_is_given_under_each_protocol(replay):
    early = own_log("early", onset_step=10)
    _, out = replay({"run.jsonl": own_log("run"), "early.jsonl": early})
    assert summary(out, "run")["first_alert_step"] == 15
    premature = summary(out, "run")["verdicts"]
    assert premature["published"] == {"hit": True, "false_alarm": False, "lead_steps": 15}
    assert premature["causal"] == {"hit": False, "false_alarm": True, "lead_steps": None}
    assert premature["causal_unlatched"] == {"hit": True, "false_alarm": True, "lead_steps": 5}
    assert summary(out, "early")["verdicts"]["causal"]["lead_steps"] == 15


def test_an_ablation_log_is_replayed_in_its_own_mode(replay):
    run = Run(id="run", records=[Record(step=s, validation_loss=float(s)) for s in (1, 2, 3, 4)])
    lines = run_lines(run, RMetricConfig(threshold=0.8), "DELTA_L_ONLY")
    _, out = replay({"run.jsonl": b"".join(lines)})
    found = summary(out, "run")
    assert (found["mode"], found["settings"]) == ("DELTA_L_ONLY", "as logged")
    assert (found["max_r"], found["config"]["threshold"]) == (1.0, 0.8)
    assert any("equals the logged r_metric at all 4" in note for note in found["notes"])
    _, out = replay("run.jsonl", "--preset", "case_study")
    found = summary(out, "run")
    assert (found["settings"], found["config"]["component_window"]) == ("case_study", 100)
    assert found["mode"] == "DELTA_L_ONLY"
    assert found["config"]["weights"]["gradient_variance"] == 0.0


def test_one_evaluation_has_no_past_so_the_training_loss_is_followed(replay):
    text = "step,loss,val_loss\n1,3,\n2,2,{}\n3,4,4\n"
    _, out = replay({"a.csv": text.format(""), "b.csv": text.format(2)})
    used = [summary(out, name)["loss_used"] for name in "ab"]
    assert used == ["training_loss", "validation_loss"]
    assert any("one evaluation only" in note for note in summary(out, "a")["notes"])


def test_the_same_log_gives_the_same_bytes(replay):
    results = []
    for _ in range(2):
        _, out = replay({"a.csv": GOOD}, plots="all")
        results.append({p: p.read_bytes() for p in out.rglob("*") if p.is_file()})
    assert results[0] == results[1]


def test_without_a_path_the_script_alone_has_a_default(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["replay"])
    assert "error: the following arguments are required: PATH" in capsys.readouterr().err
    assert script.main([]) == 2
    assert "logs_FULL_METRIC" in capsys.readouterr().err
    (tmp_path / "logs_FULL_METRIC").mkdir()
    (tmp_path / "logs_FULL_METRIC" / "run.jsonl").write_bytes(own_log("run"))
    assert script.main(["--plots", "none"]) == 0
    assert (tmp_path / "results" / "replay" / "run" / "summary.json").is_file()


def test_plots_are_drawn_for_the_first_runs_and_that_is_printed(replay, tmp_path, capsys):
    for name in "abc":
        (tmp_path / f"{name}.csv").write_text(GOOD)
    _, out = replay("*.csv", plots="1")
    assert [path.parent.name for path in sorted(out.rglob("*.png"))] == ["a"]
    assert "PNG and PDF beside the page: for 1 of 3 runs; --plots all" in capsys.readouterr().out


def test_the_command_draws_nothing_unless_asked_and_the_script_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(GOOD)
    code = "import sys; from rmetric.cli.main import main; main(['replay', 'a.csv'])"
    heavy = f"{code}; print({{'matplotlib', 'joblib', 'pandas', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, check=True)
    assert done.stdout.endswith(b"set()\n")
    assert b"PNG" not in done.stdout
    assert not list(tmp_path.rglob("*.png"))
    assert script.parse_arguments(["a.csv"]).num_plots == 20
    assert script.parse_arguments(["a.csv", "--plots"]).plots == sys.maxsize


def test_the_console_begins_with_a_summary_and_the_runs_that_were_alarmed(replay, capsys):
    absorbed = own_log("b", outcome="absorbed", failure_kind=None)
    losses = [2.0 + 0.01 * (s % 3) for s in range(60)] + [9.0] * 3
    rise = "step,loss\n" + "".join(f"{s},{loss}\n" for s, loss in enumerate(losses))
    assert replay({"a.csv": GOOD, "b.jsonl": absorbed, "c.csv": rise})[0] == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "3 runs: 1 cannot tell, 2 healthy; 1 alarmed (calibrated detector), "
        "2 alarmed (R-Metric as published, which alarms in 62 % of healthy public runs), "
        "1 alarmed by R as their logs state it; by their logs 1 absorbed"
    )
    assert lines[1] == "c: CANNOT TELL: the log ends 2 steps after a rise at step 60"
    assert lines[2] == "    loss 2.01 -> 9; log more steps."
    assert lines[3].startswith("    live alarm (calibrated detector): at step 6")
    assert sum("62 %" in line for line in lines) == 1, "once a command"
    assert any(line.startswith("    as its log states: R alarms at step ") for line in lines)
    names = [line.split(":")[0] for line in lines[1:] if not line.startswith(" ")]
    assert names[:3] == ["c", "a", "b"]


def test_a_run_s_name_writes_on_neither_terminal_nor_index(replay, capsys):
    bad = own_log("x").replace(b'"METRICS"', b'"METRICS","step":"\\u001b[2J"', 1)
    code, out = replay({"run.jsonl": own_log("\x1b[2Jall\nwell|<b>"), "bad.jsonl": bad})
    assert code == 1
    printed = capsys.readouterr()
    assert r"\x1b[2Jall\nwell|<b>: " in printed.out
    shown = (out / "index.md").read_text()
    assert r"| \\x1b[2Jall\\nwell\|\<b> |" in shown
    assert (printed.out + printed.err + shown).replace("\n", "").isprintable()


def test_a_run_without_a_name_of_its_own_has_its_file_s(replay):
    _, out = replay({"tuesday.jsonl": own_log("run"), "other.jsonl": own_log("named")})
    assert [row["id"] for row in index(out)] == ["tuesday", "named"]


def test_a_full_disk_is_one_message_and_leaves_no_half_index(tmp_path):
    (tmp_path / "a.csv").write_text(GOOD)
    most = 8000  # bytes a file: less than a page takes
    done = subprocess.run(
        [sys.executable, "-m", "rmetric", "replay", "a.csv", "--out", "out", "--plots", "none"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: the results cannot be written to out (File too large); what was written before "
        "is kept"
    )
    assert "Traceback" not in done.stderr
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"a", "index.csv", "index.md"}
    assert (tmp_path / "out" / "index.csv").read_text().startswith("folder,id")


RECORDS = {
    "healthy": [Record(step=s, training_loss=3 / s, validation_loss=3 / s) for s in range(1, 200)],
    "diverged": [Record(step=s, training_loss=3.0 + 10.0 ** (s - 20)) for s in range(1, 60)],
    "only nan": [Record(step=s, training_loss=nan) for s in range(1, 5)],
    "every kind": [
        Record(step=1, training_loss=2.0, gradient_norm=inf),
        Record(step=2, training_loss=inf, gradient_norm=nan),
        Record(step=3, validation_loss=-inf),
        Record(step=4, validation_loss=nan, training_loss=-1.0),
        Record(step=2, training_loss=1.0),
    ],
    "one record": [Record(step=7, training_loss=2.0)],
    "no loss": [Record(step=7, failure_rate=2.0, loss_drift=0.1)],
    "three": [Record(step=s, training_loss=2.0) for s in (1, 2, 3)],
}


@pytest.mark.parametrize("kind", RECORDS)
def test_every_kind_of_run_can_be_drawn(kind):
    from rmetric.reporting.run_plot import plot_run
    from rmetric.reporting.style import style

    truth = Truth(fault="$x_1", onset_step=2, outcome="failed", failure_kind="x", failure_step=99)
    scored = score_run(Run(id=f"{kind} $\\frac", records=RECORDS[kind], truth=truth))
    with style():
        figure = plot_run(scored)
        figure.canvas.draw()
    loss, _, score = figure.axes
    strange = any(v != v or abs(v) == inf for r in RECORDS[kind]
                  for v in (r.training_loss, r.validation_loss) if v is not None)  # fmt: skip
    labels = " ".join(loss.get_legend_handles_labels()[1])
    assert (" nan" in labels or " infinite" in labels) == strange
    [failure] = [line for line in loss.lines if line.get_label() == "failure: x"]
    assert score.get_xlim()[1] > failure.get_xdata()[0], "the failure is in the picture"


def test_other_files_in_a_folder_are_passed_over_and_named(replay, tmp_path, capsys):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "README.md").write_text("# my runs\n")
    assert replay("logs")[0] == 1
    assert "none of the files is a log" in capsys.readouterr().err
    (folder / "a.csv").write_text(GOOD)
    (folder / "config.json").write_text('{\n "lr": 0.1\n}\n')
    (folder / "other.csv").write_text("name,size\na,1\n")
    assert replay("logs")[0] == 0
    assert "passed over 3 files that are not logs: README.md" in capsys.readouterr().out
    assert replay("logs/README.md")[0] == 1, "named, it is a failure"


def test_earlier_results_are_not_taken_for_logs(replay, tmp_path):
    (tmp_path / "a.csv").write_text(GOOD)
    for folder in (".", tmp_path):
        code, out = replay(folder)
        assert code == 0
        assert [row["id"] for row in index(out)] == ["a"]


@pytest.mark.parametrize(
    "id", ["../../escape", "/etc/passwd", "a\\..\\b", "..", "index.csv", "C:x", "long" * 99]
)
def test_no_run_id_leads_out_of_the_folder(replay, tmp_path, id):
    code, out = replay({"run.jsonl": own_log(id)})
    assert code == 0
    (row,) = index(out)
    assert row["id"] == id
    assert {p.name for p in out.iterdir()} == {row["folder"], *INDEX_NAMES}
    assert {p.name for p in tmp_path.iterdir()} == {"run.jsonl", "out"}


@given(st.text())
def test_a_safe_name_is_one_plain_part_of_a_path(id):
    name = safe_name(id)
    assert Path(name).name == name
    assert name not in ("", ".", "..")
    assert not name.startswith((".", "-"))
    assert len(name) <= 100


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["absent.csv"], "absent.csv: no such file or folder"),
        (["*.absent"], "*.absent: no such file or folder"),
        (["empty"], "empty: no file in this folder"),
        (["a.csv", "--map", "los=x"], "TARGET one of step, loss, eval_loss"),
        (["a.csv", "--map", "loss"], "TARGET=COLUMN is accepted"),
        (["a.csv", "--preset", "best"], "invalid choice"),
        (["a.csv", "--plots", "-1"], "all, none or a number"),
    ],
)
def test_bad_usage_is_one_message_and_code_2(tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text(GOOD)
    assert code_of("replay_and_analyze_logs.py", *arguments) == 2
    assert problem in capsys.readouterr().err


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "1" * 400
OWN = own_log("x").decode()


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("binary.jsonl", "".join(map(chr, range(128))), "a binary file"),
        ("prose.jsonl", "Dear diary,\n", "not a log that replay knows"),
        ("broken.jsonl", OWN.replace('"METRICS"', '"METRICS'), "line 2: "),
        ("step.jsonl", f'{{"step": {LONG}, "loss": 2.0}}\n', "line 1: 'step' is 1111"),
        ("loss.jsonl", f'{{"step": 1, "loss": {LONG}}}\n', "line 1: 'loss' is 1111"),
        ("wide.csv", f"step,loss\n1{'0' * 25},2.0\n", "whole step below 2^63"),
        ("huge.json", f'{{"log_history": [{{"step": {LONG * 20}}}]}}', "thousands of digits"),
        ("deep.json", f'{{"log_history": {DEEP}}}', "nested too deeply"),
        ("objects.jsonl", f'{{"step": 1, "loss": {nested(1000)}}}\n', "nested too deeply"),
        ("own_deep.jsonl", f'{{"event": "METRICS", "step": {DEEP}}}\n', "nested too deeply"),
        ("fast.jsonl", OWN.replace('"config":{', '"config":{"seconds_per_step":"fast",'),
         "line 1: 'seconds_per_step': found 'fast'; a number"),
        ("id.jsonl", OWN.replace('"x"', '"\\ud800"'), "cannot be replayed"),
    ],
)  # fmt: skip
def test_a_damaged_log_fails_alone_in_one_line(replay, tmp_path, capsys, name, content, problem):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).write_text(content)
    (tmp_path / "good.csv").write_text(GOOD)
    # Whatever it holds, a file *.jsonl of a folder is a log.
    code, out = replay("logs" if name.endswith(".jsonl") else f"logs/{name}", "good.csv")
    assert code == 1
    bad, good = index(out)
    assert problem in bad["problem"]
    assert len(bad["problem"].partition("; known are: ")[0]) < 300
    assert (good["id"], good["problem"]) == ("good", "")
    printed = [line for line in capsys.readouterr().err.splitlines() if name in line]
    assert printed == [f"failed: {bad['problem']}"]


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        ('"METRIC_MODE":"FULL_METRIC"', '"METRIC_MODE":["FULL_METRIC"]', "METRIC_MODE is ['FULL"),
        ('"component_window":1000', '"component_window":100000000000', "10000000 was used"),
        ('"loss_window":100', '"loss_window":1' + "0" * 400, "10000000 was used"),
        ('"threshold":0.57', '"threshold":1' + "0" * 400, "metric_settings are not understood"),
    ],
)
def test_settings_beyond_reason_are_not_taken_and_that_is_noted_once(replay, before, after, note):
    text = own_log("run").decode()
    assert before in text
    code, out = replay({"run.jsonl": text.replace(before, after, 1)})
    assert code == 0
    assert [note in n for n in summary(out, "run")["notes"]].count(True) == 1
    assert summary(out, "run")["first_alert_step"] == 15


@pytest.fixture
def draw(replay, monkeypatch):
    """Replay and draw two logs, where the drawing of one raises an error."""

    def call(id: str, error: BaseException) -> tuple[int, Path]:
        def fail(scored, stem, *others):
            if scored.run.id == id:
                raise error

        monkeypatch.setattr("rmetric.reporting.replay_report._draw", fail)
        return replay({"a.csv": GOOD, "b.csv": GOOD}, plots="all")

    return call


@pytest.mark.parametrize("error", [ValueError, OverflowError, MemoryError, RecursionError])
def test_a_run_that_cannot_be_drawn_is_in_the_index_and_the_others_go_on(draw, error):
    code, out = draw("a", error("too much\nof it"))
    assert code == 1
    problem = f"a.csv: cannot be replayed ({error.__name__}: too much of it)"
    assert [row["problem"] for row in index(out)] == [problem, ""]


def test_interrupted_the_replay_keeps_what_it_has_and_exits_130(draw, capsys):
    code, out = draw("b", KeyboardInterrupt())
    assert code == 130
    assert [row["id"] for row in index(out)] == ["a"]
    assert capsys.readouterr().err.splitlines()[-1].startswith("stopped; ")


@pytest.mark.parametrize("name", ["generate_paper_tables.py", "generate_all_figures.py"])
def test_interrupted_a_script_says_so_in_one_line_and_exits_130(start, tmp_path, name):
    command = [sys.executable, "-u", name, "--logs", str(ROOT), "--out", str(tmp_path)]
    for _ in range(5):  # on a busy machine it may be done before it is interrupted
        process = start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.readline()  # the logs are read
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1].decode()
        if process.returncode != 0:
            break
    assert process.returncode == 130, errors
    assert errors.startswith("stopped; ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("seed", [[1, 2], "seven", 7, {"a": 1}])
def test_a_seed_of_any_kind_has_its_place_in_the_provenance(seed, tmp_path):
    runs = [Run(id=str(s), records=[], config={"seed": s}) for s in (3, seed)]
    study = Study(folder=Path(), runs={"FULL_METRIC": runs}, missing=[], skipped=[], digest="")
    stated = seed if isinstance(seed, int) else str(seed)
    with provenance(tmp_path, "", study) as found:
        assert found["seeds"]["study"] == [3, stated]


def test_a_table_that_no_replay_wrote_is_not_overwritten(tmp_path, capsys):
    log = tmp_path / "index.csv"
    log.write_text(GOOD)
    for out in (tmp_path, tmp_path / "made" / ".."):
        assert main(["replay", str(log), "--out", str(out), "--plots", "none"]) == 2
        assert "index.csv was not written by a replay and would be lost" in capsys.readouterr().err
        assert log.read_text() == GOOD
    for _ in range(2):  # its own is
        assert main(["replay", str(log), "--out", str(tmp_path / "out"), "--plots", "none"]) == 0
