"""Build the wheel and try it as a newcomer: an empty environment, another folder, a tiny log.

Run by .ci/run. Ends with exit code 1 at the first step that does not do what it should.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: MB of the base installation, without pip; a heavy dependency belongs into an extra.
MOST_MEGABYTES = 95
#: Command that needs an extra -> what its one line of error names.
NEED_AN_EXTRA = {
    "diagnose job.log": '"rmetric[diagnosis]"',
    "replay run.jsonl --out drawn --plots all": '"rmetric[plot]"',
}
STEPS, ONSET = 400, 300


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheel = built(place)
        rmetric = installed(wheel, place / "environment")
        away = place / "away"
        away.mkdir()
        write_log(away / "run.jsonl")
        (away / "job.log").write_text("step 1 loss 2.0\nRuntimeError: CUDA out of memory\n")
        try_commands(rmetric, away)


def built(place: Path) -> Path:
    """The wheel, built from a copy: a build folder in the clone would be packed, too."""
    copy = place / "source"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in output([*listed, "rmetric", "*.toml", "README.md", "LICENSE"], ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    output([*pip, "--wheel-dir", str(place), str(copy)], place)
    [wheel] = place.glob("rmetric-*.whl")
    return wheel


def installed(wheel: Path, environment: Path) -> Path:
    """The `rmetric` command of an environment that has the wheel and what it needs, no more."""
    venv.create(environment, with_pip=True)
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    before = size(environment)
    output([str(programs / "python"), "-m", "pip", "install", "--quiet", str(wheel)], environment)
    megabytes = (size(environment) - before) / 1e6
    print(f"wheel: {wheel.stat().st_size / 1e6:.1f} MB, installed {megabytes:.0f} MB", flush=True)
    if megabytes > MOST_MEGABYTES:
        sys.exit(f"the base installation takes {megabytes:.0f} MB, more than {MOST_MEGABYTES}")
    return programs / "rmetric"


def size(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def write_log(path: Path) -> None:
    """A run whose loss jumps at ONSET and stays."""
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            loss = 2.0 + 2.0 / step**0.5 + 0.03 * ((step * 7919) % 101 - 50) / 50
            loss += 5.0 if step >= ONSET else 0.0
            file.write(json.dumps({"step": step, "loss": loss, "grad_norm": 1.0}) + "\n")


def try_commands(rmetric: Path, away: Path) -> None:
    help_of_all = output([str(rmetric), "--help"], away)
    python = rmetric.parent / "python"
    names = output(
        [str(python), "-c", "from rmetric.cli import COMMANDS; print(*COMMANDS)"], away
    ).split()
    for name in names:
        assert name in help_of_all, f"rmetric --help does not name {name}"
        words = output([str(rmetric), name, "--help"], away)
        assert words.startswith(f"usage: rmetric {name}"), words[:200]
    print(f"--help of {len(names)} commands", flush=True)
    output([str(rmetric), "replay", "run.jsonl", "--out", "replayed"], away)
    pages = [*(away / "replayed" / "run").glob("*.html")]
    assert pages, "no page of the run was written"
    assert pages[0].stat().st_size > 10_000, "the page is empty"
    said = failing([str(rmetric), "watch", "run.jsonl", "--exit-on-alarm"], away)
    assert "alarm" in said, said
    print("replay and watch of a log that diverges", flush=True)
    for command, extra in NEED_AN_EXTRA.items():
        said = failing([str(rmetric), *command.split()], away)
        assert extra in said, said
        assert len(said.strip().splitlines()) == 1, said
    print("a command whose packages are missing names the extra, on one line", flush=True)


def output(command: list[str], folder: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def failing(command: list[str], folder: Path) -> str:
    """All output of a command that must fail, without a traceback."""
    done = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode == 0 or "Traceback" in said:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{said}")
    return said


def clean() -> dict[str, str]:
    """The environment without what would let a program find the clone."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    main()
