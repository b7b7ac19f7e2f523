"""A training that its rescue holds, under `rmetric supervise` and torchrun, for real."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.journal import read_journal
from rmetric.monitor.actions import restore
from tests.rescue.trainings import make_model, make_optimizer

ROOT = Path(__file__).parents[2]


def supervise(folder):
    return subprocess.run(
        [
            *(sys.executable, "-m", "rmetric", "supervise", str(folder), "--gpus", "0-1"),
            *("--layout", "data=2", "--poll-seconds", "0.1", "--backoff-seconds", "0.1"),
            *("--no-spare", "--grace-seconds", "5"),
            *("--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("-m", "tests.rescue.held_training", "--bad-launches", "1"),
        ],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )  # fmt: skip


def test_a_held_training_ends_with_6_and_is_not_restarted_until_somebody_does(tmp_path):
    folder = RunFolder(tmp_path / "run")
    held = supervise(folder.path)
    logs = "\n".join(path.read_text() for path in folder.logs.glob("launch-*.log"))
    assert held.returncode == 6, held.stderr + logs
    verdict = json.loads(folder.verdict_file.read_text())
    assert "it stays" in verdict["reason"]
    assert verdict["on_hold"] == "exit"
    events = read_journal(folder.journal)
    assert [e["event"] for e in events].count("launch") == 1
    assert events[-1]["outcome"] == "held"
    assert "it stays" in folder.summary.read_text()
    # The weights are those of the snapshot: both ranks had ended their part before either exited.
    model = make_model()
    saved = restore(folder.hold, model, make_optimizer("adamw", model.parameters()))
    assert saved["step"] == verdict["step"] == 20
    # A second start is the permission to go on; the fault is over then.
    again = supervise(folder.path)
    assert again.returncode == 0, again.stderr
    events = read_journal(folder.journal)
    assert [e["event"] for e in events].count("launch") == 2
    assert events[-1]["outcome"] == "finished"
