"""The tiny GRPO runs, and how a log is counted."""

import pytest

pytest.importorskip("torch")

from studies.common.csv_rows import read_dicts
from studies.reinforcement.__main__ import FOLDER, main, public
from studies.reinforcement.grpo import FAULTS, train

SHORT = {"steps": 14, "onset": 8}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_nothing_before_its_onset(fault):
    control, run = train(1, **SHORT), train(1, fault, **SHORT)
    assert run[:7] == control[:7]
    assert (run[8:] == control[8:]) == (fault == "none")


def test_rewards_are_learnt():
    rewards = [row["reward"] for row in train(0)]
    assert sum(rewards[-30:]) > 1.2 * sum(rewards[:30])


def test_labels_and_results_belong_together():
    for part in ("open", "kept"):
        rows = list(public(FOLDER / "missing", part))
        assert {row["judged"] for row in rows} == {"unread"}
        judged = read_dicts(FOLDER / "results" / f"logs_{part}.csv")
        assert [row["file"] for row in judged] == [row["file"] for row in rows]


def test_the_command_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("studies.reinforcement.grpo.train", lambda *_: train(0, **SHORT))
    assert main(["--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "none: right 1" in capsys.readouterr().out
    assert len((tmp_path / "injected.csv").read_text().splitlines()) == 1 + len(FAULTS)
