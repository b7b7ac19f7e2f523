"""`rmetric compare`: verdicts on trainings whose difference is known, and what it writes."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from rmetric.cli.main import main
from rmetric.evaluation import compare
from rmetric.readers import read_log
from rmetric.reporting.comparison import as_markdown
from tests.cli.test_exit_codes import code_of

STEPS = 400


def course(seed=0, *, end=2.0, later=0.0, noise=0.03, steps=STEPS, evaluate=20, speed=1.0):
    """Entries of a training; `later` is added from the middle on."""
    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        level = end + (4 - end) * np.exp(-step / 80) + later * (step > STEPS // 2)
        entry = {"step": step, "elapsed": step / speed, "loss": level + rng.normal(0, noise)}
        if evaluate and step % evaluate == 0:
            entry["eval_loss"] = level + rng.normal(0, noise / 4)
        yield entry


def write(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def runs(folder, name, count=1, first=0, **settings):
    return [
        read_log(write(folder / f"{name}{n}.jsonl", course(first + n, **settings))).run
        for n in range(count)
    ]


#: Verdict -> how the candidate is made otherwise than the reference.
KINDS = {
    "as_good": {},
    "worse": {"later": 0.2},
    "better": {"end": 1.8},
    "cannot_tell": {"noise": 2},
}


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("evaluate", [20, 50, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_known_difference_is_found(tmp_path, seeds, evaluate, kind):
    reference = runs(tmp_path, "a", seeds, evaluate=evaluate, noise=0.01)
    candidate = runs(tmp_path, "b", seeds, 50, evaluate=evaluate, **{"noise": 0.01} | KINDS[kind])
    found = compare(reference, candidate)
    assert found.kind == kind, found
    assert found.loss == ("validation_loss" if evaluate else "training_loss")
    assert found.over_seeds == (seeds > 1)
    if kind == "worse":
        assert STEPS // 2 - 25 <= found.parted <= STEPS // 2 + 50


def test_equal_trainings_are_rarely_called_different(tmp_path):
    kinds = [
        compare(
            runs(tmp_path, "a", 1, 100 * n, noise=0.05),
            runs(tmp_path, "b", 1, 100 * n + 50, noise=0.05),
        ).kind
        for n in range(40)
    ]
    assert sum(kind in ("worse", "better") for kind in kinds) <= 4  # the interval is of 95 %


def test_swapping_the_sides_swaps_the_verdict(tmp_path):
    a, b = runs(tmp_path, "a", 2), runs(tmp_path, "b", 2, 50, later=0.3)
    there, back = compare(a, b), compare(b, a)
    assert (there.kind, back.kind) == ("worse", "better")
    assert there.difference == pytest.approx([-back.difference[n] for n in (0, 2, 1)])
    assert there.parted == back.parted


def test_a_failed_run_is_worse_whatever_its_loss(tmp_path):
    failed = [e | ({"loss": "nan"} if e["step"] > 300 else {}) for e in course(1)]
    run = read_log(write(tmp_path / "failed.jsonl", failed)).run
    found = compare(runs(tmp_path, "a"), [run])
    assert found.kind == "worse"
    assert found.reasons[0] == "failed: NOT FINITE from step 301 to the end"
    assert found.alarms == (0, 1)
    assert compare([run], [run]).kind == "as_good"


def test_speeds_and_memory_are_compared(tmp_path):
    before, after = runs(tmp_path, "a"), runs(tmp_path, "b", 1, 9, speed=1.5)
    assert compare(before, after).memory is None
    for run, most in ((before[0], 2e9), (after[0], 3e9)):
        for record in run.records[:100]:
            record.memory = {"device": most * record.step / run.records[99].step}
    found = compare(before, after)
    assert found.speeds == pytest.approx({"steps": 1.5})
    assert found.memory == pytest.approx(1.5)
    assert "| 1.5 (steps) | 1.5 | 0 → 0 | 0 of 1 |" in as_markdown("a", {"b": found})


def test_a_slower_candidate_is_reported_by_each_column_that_states_it(tmp_path, capsys):
    for name, pace in (("a", 1.0), ("b", 0.7)):
        rows = [
            {"step": n, "loss": 2 + 1 / n, "step_time_ms": 500 / pace, "tokens/s": 9000 * pace}
            for n in range(1, 60)
        ]
        write(tmp_path / f"{name}.jsonl", rows)
    sides = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    gate = tmp_path / "gate.md"
    assert main(["compare", *sides, "--gate", str(gate)]) == 0
    out = capsys.readouterr().out
    assert "    steps a second: 0.7 times the reference's\n" in out
    assert "    tokens a second: 0.7 times the reference's\n" in out
    assert "| 0.7 (steps), 0.7 (tokens) | - |" in gate.read_text()


def test_the_command_prints_and_writes_its_verdicts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, settings in {"a": {}, "b": {}, "c": {"later": 0.2}}.items():
        write(tmp_path / f"{name}.jsonl", course(ord(name), **settings))
    (tmp_path / "step_1").write_text("built")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step_1"))
    files = ["--gate", "junit.xml", "--gate", "summary", "--gate", "step_1", "--page", "page.html"]
    assert main(["compare", "a.jsonl", "b.jsonl", "c.jsonl", *files]) == 3
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("b.jsonl: AS GOOD: validation loss 2.0")
    assert lines[2].startswith("c.jsonl: WORSE: validation loss 2.0")
    assert "they part at step " in lines[2]
    assert "seeds differ by more" in err
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    assert suite[1][0].get("message").startswith("WORSE")
    summary = (tmp_path / "summary").read_text()
    assert (tmp_path / "step_1").read_text() == f"built\n{summary}"
    assert summary.startswith("## Compared with a.jsonl")
    assert "| c.jsonl | worse |" in summary
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "they part at step" in page


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["a.jsonl", "a.jsonl"], 2, "a.jsonl is given twice"),
        (["a.jsonl", "missing.jsonl"], 2, "missing.jsonl: no such file or folder"),
        (["a.jsonl", "b.jsonl", "--tolerance", "x"], 2, "from 0 to below 100"),
        (["a.jsonl", "b.jsonl", "--page", "none/p.html"], 1, "none/p.html: cannot be written"),
        (["a.jsonl", "b.jsonl", "--page", "b.jsonl"], 2, "it is read too, and would be lost"),
        (["a.jsonl", "b.jsonl", "--gate", "a.jsonl"], 2, "it is read too, and would be lost"),
        (["a.jsonl", "odd.jsonl"], 1, "odd.jsonl"),
        (["a.jsonl", "short.jsonl"], 5, ""),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", course(ord(name)))
    write(tmp_path / "short.jsonl", course(3, steps=30, evaluate=0))
    (tmp_path / "odd.jsonl").write_text("nothing\n")
    assert code_of("rmetric compare", *arguments) == code
    assert words in capsys.readouterr().err
