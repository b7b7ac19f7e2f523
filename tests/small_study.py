"""A study small enough to be killed in a test: `python small_study.py DIR [runs]`."""

from __future__ import annotations

import sys
from pathlib import Path

from rmetric.metric import RMetricConfig
from rmetric.simulation import RunSpec, study

MODES = ("FULL_METRIC", "SIGMA_ONLY")


def specs(number: int = 12) -> list[RunSpec]:
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


def run(out: Path, number: int = 12, **options) -> None:
    study.BATCH = 2
    config = RMetricConfig.simulation()
    study.clear_parts(out, MODES)
    missing = study.missing_runs(specs(number), MODES, out, config)
    for _ in study.run_study(missing, MODES, out, config=config, **options):
        pass


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.jsonl"))}


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), num_processes=2)
