"""Run each silent error, its control and the sound trainings under the audits.

    python -m studies.silent_errors --set sealed --out studies/silent_errors/results

Writes what was found in each training (SET.jsonl) and the table (SET.csv), and prints the shares.
Each training has processes of its own. An error is named if an audit gives one of the findings that
labels.yaml accepts for it; any finding of severity error in a control or a sound training is false.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rmetric._util.errors import exit_with
from studies.silent_errors.processes import findings, trainings

FOLDER = Path(__file__).parent
#: Modules of `trainings`, each with a list ERRORS or TRAININGS; their authors read no audit.
SETS = ("open", "sealed", "sound")
COLUMNS = (
    "name", "thread", "what", "ranks", "accepted", "found", "severity", "step", "other errors",
    "errors of the control",
)  # fmt: skip


def looked_at(name: str, only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """What was found in each training of a set, with its error and without."""
    for one in trainings(name):
        if only and one.name not in only:
            continue
        entry = {"name": one.name, "thread": one.thread, "what": one.what, "ranks": one.ranks}
        for key, error in (("found", True), ("control", False)):
            if error and name == "sound":
                continue
            try:
                entry[key] = findings(name, one.name, error, one.ranks)
            except RuntimeError as problem:
                entry[key], entry["problem"] = [], str(problem).splitlines()[-1]
        yield entry


def row(entry: dict[str, Any], accepted: list[str]) -> dict[str, Any]:
    """A training in the table."""
    found = entry.get("found", [])
    named = [one for one in found if one["kind"] in accepted]
    best = next((one for one in named if one["severity"] == "error"), named[0] if named else {})
    return {
        **{key: entry[key] for key in ("name", "thread", "what", "ranks")},
        "accepted": " ".join(accepted),
        "found": best.get("kind", ""),
        "severity": best.get("severity", ""),
        "step": best.get("step", ""),
        "other errors": _errors(one for one in found if one["kind"] not in accepted),
        "errors of the control": _errors(entry["control"]) or entry.get("problem", ""),
    }


def _errors(found: Any) -> str:
    return " ".join(f"{f['kind']}@{f['step']}" for f in found if f["severity"] == "error")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.silent_errors", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--set", choices=SETS, default="open", help="trainings")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings alone")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder")
    options = parser.parse_args(argv)
    labels = yaml.safe_load((FOLDER / "labels.yaml").read_text(encoding="utf-8"))
    seen = []
    for entry in looked_at(options.set, options.only):
        seen.append(entry)
        kinds = [f"{one['kind']}@{one['step']}" for one in entry.get("found", entry["control"])]
        print(entry["name"], *kinds, entry.get("problem", ""), flush=True)
    made = [row(entry, labels.get(entry["name"], [])) for entry in seen]
    if not options.only:
        options.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(entry) + "\n" for entry in seen)
        (options.out / f"{options.set}.jsonl").write_text(lines, encoding="utf-8")
        with open(options.out / f"{options.set}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(made)
    print(summary(made))
    return 0


def summary(made: list[dict[str, Any]]) -> str:
    """The shares, in a line."""
    errors = [row for row in made if row["accepted"]]
    named = [row for row in errors if row["severity"] == "error"]
    early = sum(int(row["step"]) <= 20 for row in named)
    hinted = sum(row["severity"] == "hint" for row in errors)
    accused = sum(bool(row["errors of the control"]) for row in made)
    return (
        f"{len(named)} of {len(errors)} errors named as errors ({early} by step 20), {hinted} as a "
        f"hint; {accused} of {len(made)} sound trainings accused"
    )


if __name__ == "__main__":
    sys.exit(exit_with(main))
