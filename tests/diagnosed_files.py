"""Diagnoses of files that a test writes."""

from __future__ import annotations

from pathlib import Path

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.result import Diagnosis


def written(path: Path, **files: list[str]) -> Diagnosis:
    """The diagnosis of files; the last "_" of a name stands for its dot."""
    for name, lines in files.items():
        stem, _, suffix = name.rpartition("_")
        (path / f"{stem}.{suffix}").write_text("\n".join(lines) + "\n")
    return diagnose([path])
