"""Are collapses of reinforcement learning named? In tiny runs with faults, and in public logs.

    python -m studies.reinforcement                              tiny GRPO runs with injected faults
    python -m studies.reinforcement --logs FOLDER --part kept    logs of data/labels_PART.csv

Writes injected.csv, or logs_PART.csv and the counts: of the troubled logs those whose verdict is a
right one, of the healthy ones those accused. The public logs have licences of their own and are not
part of this repository; data/labels_PART.csv names their source and label.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from rmetric._util.errors import exit_with
from rmetric.evaluation import judge_run
from rmetric.readers import LogError, read_log
from studies.common.command import command_parser
from studies.common.csv_rows import read_dicts

FOLDER = Path(__file__).parent
#: Verdicts that say nothing against a run.
_SOUND = ("healthy", "cannot_tell", "unread")


def verdict_of(path: Path) -> tuple[str, str]:
    """Class and words of the verdict on a log's first run."""
    try:
        run = read_log(path).runs[0]
    except LogError as error:
        return "unread", error.problem[:80]
    verdict = judge_run(run.records, unread=run.unread)
    return verdict.kind, verdict.text


def injected(seeds: int) -> Iterator[dict[str, str]]:
    import torch

    from studies.reinforcement.grpo import FAULTS, train

    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        for fault, right in FAULTS.items():
            for seed in range(seeds):
                path = Path(folder, "log.jsonl")
                path.write_text("".join(json.dumps(row) + "\n" for row in train(seed, fault)))
                kind, text = verdict_of(path)
                judged = "right" if kind in right else "missed" if kind in _SOUND else "wrong"
                yield {"fault": fault, "seed": str(seed), "judged": judged, "verdict": text}


def public(folder: Path, part: str) -> Iterator[dict[str, str]]:
    for row in read_dicts(FOLDER / "data" / f"labels_{part}.csv"):
        kind, text = verdict_of(folder / Path(row["file"]).name)
        labels = row["label"].split(";")
        troubled = labels[0] not in ("healthy", "cannot_tell")
        if kind in _SOUND:
            judged = "missed" if troubled else "not accused"
        else:
            judged = "named" if kind in labels else "caught" if troubled else "accused"
        if kind == "unread":
            judged = "unread"
        yield {
            "file": Path(row["file"]).name, "label": row["label"], "strength": row["strength"],
            "judged": judged, "verdict": text,
        }  # fmt: skip


def write(path: Path, rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    found = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(found).to_csv(path, index=False, lineterminator="\n")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("reinforcement", __doc__)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="judge these public logs")
    parser.add_argument("--part", choices=("open", "kept"), default="open", help="of the labels")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each fault")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", metavar="DIR")
    options = parser.parse_args(argv)
    if options.logs is None:
        rows = write(options.out / "injected.csv", injected(options.seeds))
        counts = Counter((row["fault"], row["judged"]) for row in rows)
    else:
        rows = write(options.out / f"logs_{options.part}.csv", public(options.logs, options.part))
        kinds = [row["label"].split(";")[0] for row in rows]
        groups = [kind if kind in ("healthy", "cannot_tell") else "troubled" for kind in kinds]
        counts = Counter(
            (f"{group}, {row['strength']}", row["judged"])
            for group, row in zip(groups, rows, strict=True)
        )
    for (group, judged), number in sorted(counts.items()):
        print(f"{group}: {judged} {number}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_with(main))
