"""Make the manifest of the public training logs (studies/detector_benchmark/data/real_logs.csv).

    python benchmarks/real_logs.py LABELS_FOLDER

LABELS_FOLDER has labels.csv and the files that it names. The manifest has each log's place of
publication (repository, commit, path), its format and the outcome of the run, but no content of the
logs. `published_bytes` is `yes` if the local file is identical to the published one, so that
sha256 and bytes apply to both, and `unknown` for text logs, of which only the step lines may have
been kept.

Runs of one configuration are not independent: `group` names it. It is the submission and workload
for AlgoPerf (trials and studies together), the sweep, optimiser and rate for sweeps, the settings
for experiments that repeat, the folder below records/ for collections of records, else the
repository.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import sys
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rmetric.logs import write_atomically
from studies.detector_benchmark.real_logs import COLUMNS, MANIFEST


def group_of(row: dict[str, str]) -> str:
    """The independent configuration of a labelled run."""
    repository, path, run = row["repo"], PurePosixPath(row["path"]), row["run"]
    if found := re.match(r"algoperf_v05_(.+)_s\d+_(.+)_t\d+$", run):
        return f"{repository}: {found[1]} {found[2]}"
    if found := re.match(r"sweep_(\w+?)__", run):
        setting = re.match(r"\w+ lr=[\d.]*\d", row["note"])
        return f"{repository}: {found[1]} {setting[0] if setting else 'other'}"
    if found := re.match(r"cs336x_(.+)_[0-9a-f]+$", run):
        return f"{repository}: {found[1]}"
    if path.parts[0] == "records":
        return f"{repository}: {'/'.join(path.parts[1:3])}"
    return repository


def manifest_row(row: dict[str, str], folder: Path) -> dict[str, str]:
    content = (folder / row["local_file"]).read_bytes()
    return {
        "run": row["run"],
        "repository": row["repo"],
        "commit": row["commit"],
        "path": row["path"],
        "file": PurePosixPath(row["local_file"]).name,
        "run_in_file": row["run_id_in_file"],
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": str(len(content)),
        "published_bytes": "unknown" if row["format"].startswith("text") else "yes",
        "licence": row["licence"].split(" (")[0],
        "format": row["format"],
        "label": row["label"],
        "onset": row["onset_step"],
        "confidence": row["label_confidence"],
        "group": group_of(row),
    }


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    with open(folder / "labels.csv", newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["run"])
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(manifest_row(row, folder) for row in rows)
    write_atomically(MANIFEST, [out.getvalue().encode()])
    groups = {group_of(row) for row in rows}
    print(f"{len(rows)} runs of {len(groups)} configurations: {MANIFEST}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
