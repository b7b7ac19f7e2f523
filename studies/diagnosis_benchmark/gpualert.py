"""The GPUAlert corpus: logs of failed single processes, labelled with 15 classes.

github.com/Parv-01/gpualert-eval at f402b79 (MIT). A folder holds its corpus.tar.xz and labels.jsonl
(a log a line: id, mode, source, log_path in the archive). Its first lines that name the injected
fault are removed.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rmetric.diagnosis.decide import diagnose
from studies.common.processes import mapped
from studies.common.table import Cell, Table
from studies.diagnosis_benchmark.cause_meanings import FAMILIES

#: First words of the line that names the fault.
INJECT_PREFIX = b"[inject] "
#: Macro-F1 that its authors state for their rules and two baselines, on the same logs.
PUBLISHED = {
    "GPUAlert's rules, as published": 0.998,
    "grep, as published": 0.830,
    "the traceback alone, as published": 0.559,
}


@dataclass(frozen=True)
class Classified:
    """A log: its label and its source there, and the diagnosis' outcome, cause and family."""

    id: str
    mode: str
    source: str
    outcome: str
    cause: str
    family: str
    confidence: float

    @property
    def answer(self) -> str:
        """Class of the family; empty where no class has it."""
        return next((mode for mode, family in FAMILIES.items() if family == self.family), "")


def classified(folder: Path, processes: int) -> list[Classified]:
    """Each log of the corpus, diagnosed alone.

    Raises ValueError for a label of no class or of no log, OSError without corpus or labels.
    """
    with TemporaryDirectory() as work, tarfile.open(folder / "corpus.tar.xz") as tar:
        labels: list[dict[str, str]] = []
        files: list[Path] = []
        for line in (folder / "labels.jsonl").read_text(encoding="utf-8").splitlines():
            label = json.loads(line)
            if label["mode"] not in FAMILIES or label["log_path"] not in tar.getnames():
                raise ValueError(f"{folder / 'labels.jsonl'}: no class or no log: {line}")
            text = tar.extractfile(label["log_path"]).read()  # type: ignore[union-attr]
            log = Path(work, f"{len(files):03d}", "job.log")
            log.parent.mkdir()
            log.write_bytes(text.partition(b"\n")[2] if text.startswith(INJECT_PREFIX) else text)
            labels.append(label)
            files.append(log)
        return mapped(_classified, labels, files, processes=processes)


def _classified(label: dict[str, str], log: Path) -> Classified:
    diagnosis = diagnose([log.parent], jobs=1)
    answer = (diagnosis.outcome, diagnosis.cause or "", diagnosis.family, diagnosis.confidence)
    return Classified(label["id"], label["mode"], label["source"], *answer)


def macro_f1(logs: Sequence[Classified]) -> float:
    """Mean over the classes of the F1 of each."""
    from sklearn.metrics import f1_score

    labels, answers = [log.mode for log in logs], [log.answer for log in logs]
    return float(f1_score(labels, answers, labels=[*FAMILIES], average="macro", zero_division=0.0))


def table(logs: Sequence[Classified]) -> Table:
    """Macro-F1 beside what was published, and the logs that are right by their source."""
    sources = sorted({log.source for log in logs})
    right = [[log.mode == log.answer for log in logs if log.source == source] for source in sources]
    rows: list[tuple[Cell, ...]] = [
        ("`rmetric diagnose`", macro_f1(logs), *(f"{sum(hits)} of {len(hits)}" for hits in right))
    ]
    for who, published in PUBLISHED.items():
        rows.append((who, published, *[""] * len(sources)))
    missed = [f"{log.id} ({log.family or 'none'})" for log in logs if log.mode != log.answer]
    return Table(
        "gpualert",
        f"GPUAlert: {len(logs)} logs of single processes, 15 classes",
        ["Method | Macro-F1:3", *(f"Right, {source}:3" for source in sources)],
        rows,
        notes=[f"Another family: {', '.join(missed)}."] if missed else [],
    )
