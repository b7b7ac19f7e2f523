"""Measure the case study and the monitor on a GPU; each part is a process of its own.

    python -m studies.gpu --out studies/gpu/results/h200   everything, within --minutes
    python -m studies.gpu --tiny --out gpu_tiny            the same parts, small, on a CPU
    python -m studies.gpu --parts overhead trace           some of them

A part that fails or runs out of time is recorded with its last lines, and the next one starts.
results.json holds the hardware, the versions and what each part measured.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rmetric.logs import write_atomically
from studies.common.command import command_parser

ROOT = Path(__file__).resolve().parents[2]
LINES = 40  # of a failed part that are kept
#: Steps of the three twins: 1.5 times these, as two branch off in the middle.
MOST_STEPS, FEWEST_STEPS = 800, 120
EVALUATIONS, FEWEST_BETWEEN = 40, 5  # of the control, and steps between two
RESERVE = 0.85  # of a part's time that its steps may take, after the set-up
SET_UP = 50.0  # seconds: a branch's state to the host and back, and the steps without the monitor
DRY = 1200.0  # seconds of a part on a CPU, at most
FIRST_GUESS = 1.0  # seconds a step, where no cost was measured before


class Part(NamedTuple):
    """One measurement: arguments after ``python``, and the JSON file that it writes."""

    command: Sequence[str]
    result: str


#: Share of each part of the time that is left, relative to the parts after it, in their order: the
#: cost of a step is measured before the twins need it.
SHARES = {
    "nvml": 0.05, "overhead": 0.1, "equal": 0.05, "twins_bf16": 0.25, "twins_fp16": 0.25,
    "checkpoints": 0.3, "checkpoints_waiting": 0.15, "rescued": 0.08, "snapshots": 0.15,
    "trace": 0.06, "wrapped": 0.1,
}  # fmt: skip
TWINS = {"twins_bf16": [], "twins_fp16": ["--float16", "--lora"]}


def part_of(name: str, out: Path, *, tiny: bool, steps: int, of_twins: Sequence[str] = ()) -> Part:
    """The measurement of that name; `of_twins` are further options of run_case_study.py."""
    if name not in TWINS:
        path = out / f"{name}.json"
        small = ["--tiny"] if tiny else []
        return Part(["-m", "studies.gpu.measure", *small, name, "--out", str(path)], path.name)
    small = ["--tiny", "--device", "cpu"] if tiny else ["--random-weights", *TWINS[name]]
    command = [
        "run_case_study.py", *small, "--steps", str(steps), "--out", str(out / name),
        "--eval-every", str(max(FEWEST_BETWEEN, steps // EVALUATIONS)),
        *of_twins,
    ]  # fmt: skip
    return Part(command, f"{name}/summary.json")


def steps_that_fit(seconds: float, step_seconds: float) -> int:
    """Steps of the control for which three twins take at most `seconds`.

    The control makes all steps, the other two a half each, and evaluations cost as much as a
    fifth of the steps.

    >>> steps_that_fit(600.0, 0.5), steps_that_fit(60.0, 5.0), steps_that_fit(1e6, 0.1)
    (380, 120, 800)
    """
    number = RESERVE * (seconds - SET_UP) / (2.0 * 1.2 * step_seconds)
    return max(FEWEST_STEPS, min(MOST_STEPS, int(number) // 20 * 20))


def run_part(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a part for at most `seconds`; its JSON, or why there is none."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *part.command], cwd=ROOT, timeout=seconds, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        )  # fmt: skip
        output, problem = done.stdout, f"exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        problem = f"not done after {seconds:.0f} s"
    entry: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
    path = folder / part.result
    if not problem and path.is_file():
        return entry | {"measured": json.loads(path.read_text(encoding="utf-8"))}
    lines = output.replace("\r", "\n").splitlines()[-LINES:]
    return entry | {"problem": problem or f"{part.result} was not written", "last_lines": lines}


def step_seconds(done: Mapping[str, Any]) -> float:
    """Seconds of the large model's step, from the part `overhead` if it was measured."""
    measured = done.get("overhead", {}).get("measured", {})
    steps = [model["step_seconds_without"] for model in measured.get("models", {}).values()]
    return max(steps, default=FIRST_GUESS)


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("gpu", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tiny", action="store_true", help="small, on a CPU: a dry run")
    parser.add_argument("--minutes", type=float, default=25.0, help="of all parts (default: 25)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="of the twins (default: as many as fit)"
    )
    parser.add_argument(
        "--twins", default="", metavar="OPTIONS",
        help='further options of run_case_study.py, such as --twins="--onset 40"',
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="default: all")
    options = parser.parse_args(argv)
    out, tiny = options.out.resolve(), options.tiny
    known = [name for name in SHARES if name != "twins_fp16" or not tiny]  # no CPU has float16
    names = list(options.parts or known)
    if unknown := set(names) - set(known):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    done: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    end = time.monotonic() + 60 * options.minutes
    for number, name in enumerate(names):
        left = max(0.0, end - time.monotonic())
        share = SHARES[name] / sum(SHARES[later] for later in names[number:])
        seconds = DRY if tiny else left * share
        fitting = FEWEST_STEPS if tiny else steps_that_fit(seconds, step_seconds(done))
        print(f"{name}: up to {seconds:.0f} s", flush=True)
        of_twins = shlex.split(options.twins)
        steps = options.steps or fitting
        done[name] = run_part(
            part_of(name, out, tiny=tiny, steps=steps, of_twins=of_twins), out, seconds
        )
        print(f"  {done[name].get('problem', 'done')}, {done[name]['seconds']} s", flush=True)
        write_atomically(file, [json.dumps(done, indent=2).encode(), b"\n"])
    failed = [name for name, entry in done.items() if "problem" in entry]
    print(f"{file}" + (f": without {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
