"""Compare each number that the documents state with the results, and recompute what takes minutes.

    python -m studies.claims
    python -m studies.claims --only published risk

Prints a line for each claim: green, or red with what differs. Exit codes: 0 all are green, 1 some
are red, 2 the command line is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rmetric._util.errors import exit_with
from studies.claims.table import ROOT, Claim, Source, Table, load
from studies.common.command import command_parser
from studies.common.markers import fill

PAGE, README = ROOT / "docs" / "claims.md", ROOT / "README.md"
INTRODUCTION = """# The map of claims

Each number that the README and the documents state, the command that makes it, its run time on two
cores and the tolerance of a recomputed value. `python3 tasks.py verify` recomputes what takes
minutes and prints a green or red line for each; `python -m studies.claims --stated` only compares
with the committed results. This page is made from [claims.yaml](../studies/claims/claims.yaml) by
`python -m studies.claims --write`. Numbers between two markers of a page are made by the command
that the page names first.
"""
_COLOURS = {"green": "\033[32m", "red": "\033[31m"}
SIMULATED = "logs_demo"
#: Name between the markers in README.md -> the commands as shown there, and their exit codes.
SHOWN = {
    "replay": {
        "python simulator.py --fault LR_SPIKE --severity 15 --seed 7 --eval-every 10 "
        f"--out {SIMULATED}": 0,
        f"rmetric replay {SIMULATED} --out replayed": 0,
    },
    "diagnosis": {
        "rmetric diagnose studies/diagnosis_benchmark/data/examples/silent_rank "
        "--healthy studies/diagnosis_benchmark/data/examples/healthy": 3,
    },
}


def main(argv: list[str] | None = None) -> int:
    table = load()
    sources = {claim.source.name: claim.source for claim in table.claims}
    parser = command_parser("claims", __doc__)
    parser.add_argument("--stated", action="store_true", help="recompute nothing")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(sources), help="claims of these sources"
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/claims.md and the output in README.md"
    )
    options = parser.parse_args(argv)
    if options.write:
        PAGE.write_text(page(table), encoding="utf-8")
        shown = printed()
        fill(README, shown.get, shown)
        return 0
    red = 0
    for name in options.only or sources:
        claims = [claim for claim in table.claims if claim.source.name == name]
        red += verify(sources[name], claims, recompute=not options.stated)
    print(f"{len(table.claims)} claims in all, {red} red" if red else "all green")
    return 1 if red else 0


def verify(source: Source, claims: list[Claim], *, recompute: bool) -> int:
    """Print a line for each claim of a source; returns the number of red ones."""
    stated = [problem_stated(claim) for claim in claims]
    if not (recompute and source.recomputed):
        why = "not recomputed" + ("" if source.recomputed else f": {_time(source)}")
        for claim, problem in zip(claims, stated, strict=True):
            line(claim, problem, f"stated as in the results ({why})")
        return sum(map(bool, stated))
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        failure = run(source, folder)
        seconds = time.monotonic() - began
        problems = [
            problem or failure or problem_recomputed(claim, Path(folder) / "results")
            for claim, problem in zip(claims, stated, strict=True)
        ]
    for claim, problem in zip(claims, problems, strict=True):
        line(claim, problem, f"recomputed ({source.name}: {seconds:.0f} s)")
    return sum(map(bool, problems))


def run(source: Source, folder: str) -> str:
    """Run the commands of a source; returns the problem, or nothing."""
    for command in source.commands:
        given = command.format(out=folder).split()
        print(f"... python {command.format(out='DIR')}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, *given], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return f"python {command} ended with exit code {done.returncode}: {last}"
    return ""


def problem_stated(claim: Claim) -> str:
    """Difference between the documents and the committed results; empty if none."""
    try:
        expected = claim.shown(claim.committed())
        for document in claim.documents:
            found = claim.stated((ROOT / document).read_text(encoding="utf-8"))
            if found != expected:
                return f"{document} states {found}, the results have {expected}"
    except ValueError as error:
        return f"{', '.join(claim.documents)}: {error}"
    return ""


def problem_recomputed(claim: Claim, folder: Path) -> str:
    """Difference between the committed and the recomputed results beyond the tolerance."""
    try:
        pairs = [*zip(claim.committed(), claim.read(folder), strict=True)]
    except ValueError as error:
        return str(error)
    if all(abs(was - now) <= claim.tolerance for was, now in pairs):
        return ""
    was, now = (claim.shown(numbers) for numbers in zip(*pairs, strict=True))
    return f"the committed results have {was}, recomputed {now} (tolerance {claim.tolerance:g})"


def line(claim: Claim, problem: str, fine: str) -> None:
    """Print one line, coloured on a terminal."""
    colour = "red" if problem else "green"
    word = f"{colour:5}"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        word = f"{_COLOURS[colour]}{word}\033[0m"
    print(f"{word} {claim.name}: {problem or fine}", flush=True)


def printed() -> dict[str, str]:
    """Run the commands elsewhere; what stands between the markers. RuntimeError where one fails."""
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


def page(table: Table) -> str:
    """Text of docs/claims.md."""
    parts = [INTRODUCTION]
    for source in dict.fromkeys(claim.source for claim in table.claims if claim.listed):
        commands = "`, then `".join(f"python {command}" for command in source.commands)
        again = "recomputed by `verify`" if source.recomputed else "not recomputed by `verify`"
        note = f" {source.note[0].upper()}{source.note[1:]}." if source.note else ""
        parts += [
            f"## {source.name.replace('_', ' ').capitalize()}\n",
            f"`{commands.format(out='DIR')}`: {_time(source)}, {again}.{note} Results: "
            f"[{source.results}](../{source.results}).\n",
            "| Statement | Value | Tolerance | Where |",
            "| --- | --- | ---: | --- |",
        ]
        for claim in (entry for entry in table.claims if entry.listed and entry.source == source):
            places = ", ".join(_link(document) for document in claim.documents)
            text = claim.text.replace("|", "\\|").replace("{}", "…")
            values = ", ".join(claim.shown(claim.committed()))
            parts.append(f"| {text} | {values} | {claim.tolerance:g} | {places} |")
        parts.append("")
    parts += ["## Checked by a test\n", "| Statement | Test |", "| --- | --- |"]
    parts += [f"| {text.replace('{}', '…')} | `{test}` |" for text, test in table.elsewhere.items()]
    return "\n".join(parts) + "\n"


def _link(document: str) -> str:
    name = document.removeprefix("docs/")
    return f"[{name}]({name if name != document else '../' + document})"


def _time(source: Source) -> str:
    if source.minutes >= 120:
        return f"about {source.minutes / 60:.0f} hours"
    return f"about {source.minutes:.0f} minutes"


if __name__ == "__main__":
    exit_with(main)
