"""Output of the commands that README.md shows, as they print it now."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from studies.claims.table import ROOT

SIMULATED = "logs_demo"
#: Name between the markers in README.md -> the commands as shown there, and their exit codes.
SHOWN = {
    "replay": {
        "python simulator.py --fault LR_SPIKE --severity 15 --seed 7 --eval-every 10 "
        f"--out {SIMULATED}": 0,
        f"rmetric replay {SIMULATED} --out replayed": 0,
    },
    "diagnosis": {
        "rmetric diagnose studies/diagnosis_benchmark/logs/silent_rank "
        "--healthy studies/diagnosis_benchmark/logs/healthy": 3,
    },
}


def printed() -> dict[str, str]:
    """Run the commands in a folder of their own; returns what stands between the markers.

    Raises RuntimeError where a command ends with another exit code than it should.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("simulator.py", "studies"):
            (Path(folder) / name).symlink_to(ROOT / name)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        for name, commands in SHOWN.items():
            lines = []
            for command, code in commands.items():
                given = command.split()
                program = ["-m", "rmetric"] if given[0] == "rmetric" else []
                done = subprocess.run(
                    [sys.executable, *program, *given[1:]],
                    cwd=folder, env=environment, capture_output=True, text=True, check=False,
                )  # fmt: skip
                if done.returncode != code:
                    raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr}")
                lines += [f"$ {command}", done.stdout.strip()]
            found[name] = "\n".join(["```", *lines, "```"])
    return found
