"""Set up and run everything, with nothing but Python: `python3 tasks.py reproduce`.

    reproduce   environment; the published study, its tables and figures, a replay; both other
                studies and their tables
    case-study  environment with torch, then the case study in small: three real runs on a CPU
    benchmark   environment, then every detector on the laboratory and the stress study
    demo-guard  environment with torch, then a training that loses a GPU and goes on
    demo-rescue environment with torch, then three failing trainings with and without rescue
    test        environment, then the tests
    check       environment, then linter and type checker
    verify      environment with torch, then each number of the documents against its results;
                recomputes what takes minutes, green or red a line
    docs        environment, then the documents as a site, in site/
    setup       only the environment, in .venv

`make reproduce`, `make demo-guard` and so on do the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

EXAMPLES = ["run_037_llama-3-8b_lr_spike_rep1", "run_169_gpt-4-moe_none_rep1"]
STEPS = {
    "the published study: 720 simulated runs": ["run_modern_experiments.py"],
    "its tables": ["generate_paper_tables.py"],
    "its figures": ["generate_all_figures.py"],
    "a replay of two logs": [
        "replay_and_analyze_logs.py",
        *(f"logs_FULL_METRIC/{name}.jsonl" for name in EXAMPLES),
    ],
    "the emergent study: its matrix, 180 runs whose failures emerge": [
        "run_modern_experiments.py", "--recipe", "emergent",
    ],
    "the tables of the emergent study": ["generate_paper_tables.py", "--logs", "emergent_study"],
    "the stress study: 720 runs with more faults, benign changes and random onsets": [
        "run_modern_experiments.py", "--recipe", "stress",
    ],
    "the tables of the stress study": ["generate_paper_tables.py", "--logs", "stress_study"],
}  # fmt: skip
RESULTS = {
    "logs": "logs_FULL_METRIC/, one folder an ablation, emergent_study/, stress_study/",
    "tables": "results/tables/ (start with table3_detectors.md and table5_claims.md)",
    "figures": "results/figures/",
    "replay": "results/replay/",
    "emergent": "results/emergent/tables/",
    "stress": "results/stress/tables/",
}


def set_up(extra: str) -> None:
    """Make .venv and install what this needs, unless that was done already."""
    if sys.version_info < (3, 10):  # noqa: UP036 (an older Python must get this line)
        sys.exit(f"Python 3.10 or newer is needed; this is {sys.version.split()[0]}")
    if not PYTHON.exists():
        print(f"making the environment {ENVIRONMENT}", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=False)
        if made.returncode != 0:
            shutil.rmtree(ENVIRONMENT, ignore_errors=True)
            sys.exit("could not make it; on Debian and Ubuntu: apt-get install python3-venv")
    target, stamp = f".[{extra}]", ENVIRONMENT / f".installed-{extra}"
    given = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    wanted = hashlib.sha256(b"".join(given)).hexdigest()
    whole = ENVIRONMENT / ".installed-dev"  # which the rest is part of
    if any(done.exists() and done.read_text() == wanted for done in (stamp, whole)):
        return
    print("installing what it needs (a minute or two)", flush=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    run([*pip, "--editable", target])
    stamp.write_text(wanted)


def run(command: list[str]) -> None:
    """Run a command in the repository's root; end with its exit status if it fails."""
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status != 0:
        print(f"failed with exit status {status}: {' '.join(command)}", file=sys.stderr)
        sys.exit(status)


def reproduce() -> None:
    set_up("study")
    for number, (title, command) in enumerate(STEPS.items(), start=1):
        began = time.monotonic()
        print(f"\n== {number}/{len(STEPS)} {title}", flush=True)
        run([str(PYTHON), *command])
        print(f"-- {time.monotonic() - began:.1f} s", flush=True)
    print("\nDone. What was made:")
    for what, where in RESULTS.items():
        print(f"  {what:8} {where}")


#: Tasks that pass further arguments on -> the command that takes them.
PASSED_ON = {
    "case-study": "run_case_study.py",
    "benchmark": "-m studies.detector_benchmark",
    "demo-guard": "-m studies.tiny_llama.guard_demo",
    "demo-rescue": "-m studies.fault_lab.rescue.demo",
    "test": "-m pytest",
    "docs": "-m mkdocs build --strict",
}
#: Tasks that are one command -> the extras it needs, and its default arguments.
ALONE: dict[str, tuple[str, list[str]]] = {
    "case-study": ("study,live", ["--tiny"]),
    "benchmark": ("study", ["--data", "lab", "stress", "--out", "results/sample/detection"]),
    "demo-guard": ("study,live,guard", []),
    "demo-rescue": ("study,live", []),
    "docs": ("docs", []),
}


def pass_on(task: str) -> None:
    extra, usual = ALONE[task]
    set_up(extra)
    run([str(PYTHON), *PASSED_ON[task].split(), *(sys.argv[2:] or usual)])


def test() -> None:
    set_up("dev")
    workers = str(min((os.cpu_count() or 1) + 1, 8))  # some tests wait
    given = [argument for argument in sys.argv[2:] if argument != "--all"]
    # In the order of their names: by number of tests, a long one alone in its file comes last.
    spread = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [str(PYTHON), "-m", "pytest", *spread]
    run([*command, *given])
    if "--all" in sys.argv[2:]:
        print("\n== the longer tests, and those of the studies", flush=True)
        run([*command, "-m", "(long or studies) and not slow", *given])


def check() -> None:
    set_up("dev")
    run([str(PYTHON), "-m", "ruff", "check", "."])
    run([str(PYTHON), "-m", "ruff", "format", "--check", "."])
    run([str(PYTHON), "-m", "mypy"])


def verify() -> None:
    set_up("study,diagnosis,live")
    run([str(PYTHON), "-m", "studies.claims"])


TASKS: dict[str, Callable[[], None]] = {
    "reproduce": reproduce,
    **{task: partial(pass_on, task) for task in ALONE},
    "test": test,
    "check": check,
    "verify": verify,
    "setup": lambda: set_up("dev"),
}


def help_of(task: str) -> str:
    """What the docstring above says of a task, and where further arguments go."""
    lines = (__doc__ or "").splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:1] == [task])
    last = next(i for i in range(first + 1, len(lines)) if not lines[i].startswith(" " * 16))
    words = " ".join(" ".join(lines[first:last]).split()[1:])
    usage = f"usage: python3 tasks.py {task}"
    if task not in PASSED_ON:
        return f"{usage}\n\n{words}"
    command = f"{PYTHON.relative_to(ROOT)} {PASSED_ON[task]}"
    return (
        f"{usage} [ARGUMENTS]\n\n{words}\n\nFurther arguments are those of `{command}`; after "
        f"`tasks.py setup`, `{command} --help` lists them."
    )


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in TASKS:
        print(__doc__)
        return 0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2
    task, given = sys.argv[1], sys.argv[2:]
    if "-h" in given or "--help" in given:
        print(help_of(task))
        return 0
    if given and task not in PASSED_ON:
        print(f"error: {task} takes no arguments: found {' '.join(given)}", file=sys.stderr)
        return 2
    try:
        TASKS[task]()
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
