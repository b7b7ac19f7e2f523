"""The demonstration of rescue, run for real on a short training, and what is committed of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from studies.fault_lab.rescue import demo
from tests.studies.lab.training import branch, control

STEPS, ONSET, DURATION = 100, 71, 6


@pytest.fixture(scope="module")
def specs():
    of = control("llama", seed=3, steps=STEPS)
    return of, replace(branch(of, "LR_SPIKE", 25.0, ONSET), duration_steps=DURATION)


@pytest.fixture(scope="module")
def results(specs):
    panel = demo.Panel("rate", "Rate fault", specs[1].run_id, "leave_out_outliers", "skip")
    return demo.train([(panel, *specs)], num_processes=1)


def test_the_files_are_there_and_what_is_printed_is_what_they_hold(results, tmp_path, capsys):
    demo.show(results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rescue.json", "rescue.pdf", "rescue.png",
    ]  # fmt: skip
    [panel] = json.loads((tmp_path / "rescue.json").read_bytes())["panels"]
    printed = capsys.readouterr().out.splitlines()
    assert f"loss of the twin {panel['twin']['final_loss']:.3f} nats" in printed[0]
    assert f"steps {ONSET} to {ONSET + DURATION - 1};" in printed[0]
    for line, (label, run) in zip(printed[1:4], panel["runs"].items(), strict=True):
        found = re.search(rf"{label} +(\S+) nats, +(\d+) extra steps", line)
        assert found is not None, line
        assert float(found[1]) == pytest.approx(run["above"], abs=6e-4)
        assert int(found[2]) == run["extra"]
    assert printed[4].strip() == panel["runs"]["rescue"]["actions"][0][3]
    assert printed[4].strip().startswith("went back from ")


def test_a_run_without_an_end_is_lost(results):
    [panel] = results["panels"]
    stopped = panel["runs"]["rescue"] | {"end": "not_finite", "step": 90}
    assert demo.outcome_words(stopped) == "lost: stopped at step 90"
    assert "not finite" in demo.outcome_words(stopped | {"above": None})
    drawn = demo.demo_figure([panel | {"runs": panel["runs"] | {"rescue": stopped}}])
    assert "lost" in [text.get_text() for text in drawn.axes[0].texts]


def test_numbers_that_are_not_there_are_an_error_that_names_them(tmp_path, capsys):
    assert demo.main(["--redraw", "--out", str(tmp_path)]) == 2
    assert "rescue.json" in capsys.readouterr().err


def test_the_committed_picture_is_drawn_from_the_committed_numbers(tmp_path):
    folder = Path(__file__).resolve().parents[3] / "docs" / "figures"
    committed = json.loads((folder / "rescue.json").read_bytes())
    assert [panel["run"] for panel in committed["panels"]] == [panel.run for panel in demo.PANELS]
    assert demo.text_of(committed) == (folder / "rescue.json").read_text(encoding="utf-8")
    assert (folder / "rescue.png").exists()
