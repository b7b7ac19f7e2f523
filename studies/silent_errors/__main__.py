"""Run each silent error, its control and the sound trainings under the audits.

    python -m studies.silent_errors --set sealed --out studies/silent_errors/results
    python -m studies.silent_errors --set sealed --out FOLDER --report       the table alone

Writes what was found in each training (SET.jsonl) and the table (SET.csv); counts all tables of the
folder in summary.csv, and prints it. Exit code 1: a training ended otherwise than it should.
Each training has processes of its own. An error is named if an audit gives one of the findings that
labels.yaml accepts for it; any finding of severity error in a control or a sound training is false.
"not_restored: moments|rate" accepts the finding with one of these parts among those that were lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from rmetric._util.lazy import read_yaml
from studies.common.command import command_parser, exit_with
from studies.silent_errors.processes import findings, trainings, unpacked

FOLDER = Path(__file__).parent
#: Sets of trainings; their authors read no audit.
SETS = ("open", "sealed", "sound", "second", "second_sound")
TOTALS = {"all sealed": ("sealed", "second"), "all sound": ("sound", "second_sound")}
COLUMNS = [
    "name", "thread", "what", "ranks", "accepted", "found", "severity", "step", "other errors",
    "errors of the control",
]  # fmt: skip
COUNTS = [
    "Trainings", "Named", "As errors", "By a hint", "Missed", "No finding exists", "Accused"
]  # fmt: skip


def looked_at(name: str, only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Findings in each training of a set, with its error and without."""
    # A sound training is its own control; the second set's errors have none.
    wanted = {"found": not name.endswith("sound"), "control": name != "second"}
    with unpacked() as folder:
        for run in trainings(folder, name):
            if only and run.name not in only:
                continue
            entry = {"name": run.name, "thread": run.thread, "what": run.what, "ranks": run.ranks}
            for key in filter(wanted.get, wanted):
                try:
                    entry[key] = findings(folder, name, run, key == "found")
                except RuntimeError as problem:
                    entry[key], entry["problem"] = [], str(problem).splitlines()[-1]
            yield entry


def row(entry: dict[str, Any], accepted: list[str]) -> dict[str, Any]:
    """A training in the table."""
    found = entry.get("found", [])
    named = [seen for seen in found if any(_is_named(seen, kind) for kind in accepted)]
    best = next((seen for seen in named if seen["severity"] == "error"), named[0] if named else {})
    return {
        **{key: entry[key] for key in ("name", "thread", "what", "ranks")},
        "accepted": " ".join(accepted),
        "found": best.get("kind", ""),
        "severity": best.get("severity", ""),
        "step": best.get("step", ""),
        "other errors": _errors(seen for seen in found if seen not in named),
        "errors of the control": _errors(entry.get("control", [])),
    }


def _is_named(finding: dict[str, Any], accepted: str) -> bool:
    kind, _, parts = accepted.partition(": ")
    lost = {row["part"] for row in finding.get("rows", ()) if not row["equal"]}
    return bool(finding["kind"] == kind and (not parts or lost & set(parts.split("|"))))


def _errors(found: Any) -> str:
    return " ".join(f"{f['kind']}@{f['step']}" for f in found if f["severity"] == "error")


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("silent_errors", __doc__)
    parser.add_argument("--set", choices=SETS, default="open", help="trainings")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings alone")
    parser.add_argument(
        "--report", action="store_true", help="train nothing: read SET.jsonl in OUT"
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder")
    options = parser.parse_args(argv)
    labels = read_yaml(FOLDER / "labels.yaml")
    lines = options.out / f"{options.set}.jsonl"
    seen = []
    entries = looked_at(options.set, options.only)
    if options.report:
        entries = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
    for entry in entries:
        seen.append(entry)
        shown = entry["found"] if "found" in entry else entry["control"]
        kinds = [f"{finding['kind']}@{finding['step']}" for finding in shown]
        print(entry["name"], *kinds, entry.get("problem", ""), flush=True)
    made = [row(entry, labels.get(entry["name"]) or []) for entry in seen]
    if not options.only:
        options.out.mkdir(parents=True, exist_ok=True)
        lines.write_text("".join(json.dumps(entry) + "\n" for entry in seen), encoding="utf-8")
        pd.DataFrame(made, columns=COLUMNS, dtype=object).to_csv(
            options.out / f"{options.set}.csv", index=False, lineterminator="\n"
        )
        print(write_summary(options.out), end="")
    return int(any("problem" in entry for entry in seen))


def write_summary(folder: Path) -> str:
    """Count the tables of a folder in summary.csv; returns it."""
    counts = {}
    for path in (folder / f"{name}.csv" for name in SETS):
        if path.exists():
            made = pd.read_csv(path, dtype=str, keep_default_na=False)
            errors, hints = (made["severity"] == "error").sum(), (made["severity"] == "hint").sum()
            unnamed = (made["accepted"] == "").sum()
            accused = (made["errors of the control"] != "").sum()
            named = errors + hints
            missed = len(made) - named - unnamed
            counts[path.stem] = len(made), named, errors, hints, missed, unnamed, accused
    table = pd.DataFrame.from_dict(counts, orient="index", columns=COUNTS)
    for total, parts in TOTALS.items():
        table.loc[total] = table.loc[table.index.isin(parts)].sum()
    table.to_csv(folder / "summary.csv", index_label="Set", lineterminator="\n")
    return (folder / "summary.csv").read_text(encoding="utf-8")


if __name__ == "__main__":
    exit_with(main)
