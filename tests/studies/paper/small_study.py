"""Studies small enough to be killed in a test: run this module with KIND DIR."""

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from rmetric.metric import RMetricConfig
from rmetric.simulation import RunSpec, study
from studies.paper.published_study import run_published_study

MODES = ("FULL_METRIC", "SIGMA_ONLY")
#: Runs of a small study of each kind; the published ones go by much faster.
NUMBER = {"emergent": 12, "published": 90}


def specs() -> list[RunSpec]:
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
        for i in range(NUMBER["emergent"])
    ]


def run(out: Path, **options) -> None:
    study.BATCH = 2
    config = RMetricConfig.simulation()
    study.clear_parts(out, MODES)
    missing = study.missing_runs(specs(), MODES, out, config)
    for _ in study.run_study(missing, MODES, out, config=config, **options):
        pass


def run_kind(kind: str, out: Path, processes: int = 1) -> None:
    """A small study of either kind, as far as it is missing."""
    if kind == "emergent":
        run(out, num_processes=processes)
    else:
        for _ in run_published_study(out, limit=NUMBER[kind]):
            pass


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.jsonl"))}


class Result(NamedTuple):
    """What a script did."""

    code: int
    out: str
    err: str
    folder: Path = Path()

    def bytes_of(self, *names: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())
                if not names or path.stem in names}  # fmt: skip


def captured(main: Callable[[list[str]], int], *arguments: str | Path) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Result(code, out.getvalue(), err.getvalue())


def run_script(main: Callable[[list[str]], int], logs: Path, folder: Path) -> Result:
    return captured(main, "--logs", logs, "--out", folder)._replace(folder=folder)


if __name__ == "__main__":
    run_kind(sys.argv[1], Path(sys.argv[2]), processes=2)
