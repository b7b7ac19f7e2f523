"""Studies small enough to be killed in a test: run this module with KIND DIR [runs]."""

from __future__ import annotations

import sys
from pathlib import Path

from rmetric.metric import RMetricConfig
from rmetric.simulation import RunSpec, study
from studies.paper.published_study import run_published_study

MODES = ("FULL_METRIC", "SIGMA_ONLY")
#: Runs of a small study of each kind; the published ones go by much faster.
NUMBER = {"emergent": 12, "published": 90}


def specs(number: int = NUMBER["emergent"]) -> list[RunSpec]:
    names = ("LR_SPIKE", "NONE", "GRADIENT_EXPLOSION")
    return [
        RunSpec(
            experiment_id=f"small_{i:02d}",
            architecture="GPT-4-MoE" if i % 2 else "Llama-3-8B",
            fault=names[i % len(names)],
            total_steps=400,
            onset_step=200,
            evaluate_every=20,
        )
        for i in range(number)
    ]


def run(out: Path, number: int = NUMBER["emergent"], **options) -> None:
    study.BATCH = 2
    config = RMetricConfig.simulation()
    study.clear_parts(out, MODES)
    missing = study.missing_runs(specs(number), MODES, out, config)
    for _ in study.run_study(missing, MODES, out, config=config, **options):
        pass


def run_kind(kind: str, out: Path, number: int | None = None, *, processes: int = 1) -> None:
    """A small study of either kind, as far as it is missing."""
    number = NUMBER[kind] if number is None else number
    if kind == "emergent":
        run(out, number, num_processes=processes)
    else:
        for _ in run_published_study(out, limit=number):
            pass


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.jsonl"))}


if __name__ == "__main__":
    run_kind(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]), processes=2)
