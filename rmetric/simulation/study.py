"""The studies whose failures emerge: which runs, and how they get into their folders.

`emergent_specs` is the matrix of the published study, `stress_specs` ours. `run_study`
writes what is missing and leaves alone what is whole, so a study that was stopped at any
moment ends, when it is started again, with the bytes of one that was not. The study on the
authors' own simulator is in `published_study`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np

from rmetric._util.durable import write_atomically
from rmetric._util.workers import delayed
from rmetric.logs import log_path, run_lines, start_line
from rmetric.metric import MODES, RMetricConfig
from rmetric.simulation.architectures import ARCHITECTURES
from rmetric.simulation.engine import RunSpec, config_of, simulate
from rmetric.simulation.faults import FAULTS

ABANDONED_SECONDS = 60  # a log is written in far less

BATCH = 48  # runs stepped together; changes no number

EMERGENT_FAULTS = ("EXPERT_FAILURE", "ROUTER_IMBALANCE", "GRADIENT_EXPLOSION", "LR_SPIKE", "NONE")
EMERGENT_REPETITIONS = 12
STRESS_REPETITIONS = 5
STRESS_CONTROLS = 30  # runs without a fault, per architecture


def emergent_specs(seed: int = 0) -> list[RunSpec]:
    """The matrix of the published study: 3 architectures x 5 faults x 12 repetitions.

    The repetitions go through the fault's severities in turn, the severest first.
    """
    return [
        RunSpec(
            experiment_id=f"{architecture}_{name}_r{repetition:02d}",
            architecture=architecture,
            fault=name,
            severity=severities[repetition % len(severities)],
            seed=seed,
            recipe="emergent",
            repetition=repetition,
        )
        for architecture in ARCHITECTURES
        for name in EMERGENT_FAULTS
        for severities in [FAULTS[name].severities[::-1]]
        for repetition in range(EMERGENT_REPETITIONS)
    ]


def stress_specs(seed: int = 0) -> list[RunSpec]:
    """Our own 720 runs: every fault and benign change, several severities, random onsets."""
    specs = []
    for architecture in ARCHITECTURES:
        for name, kind in FAULTS.items():
            repetitions = STRESS_CONTROLS if name == "NONE" else STRESS_REPETITIONS
            for severity in kind.stress_severities or kind.severities:
                for repetition in range(repetitions):
                    run_id = f"{architecture}_{name}_s{severity:g}_r{repetition:02d}"
                    specs.append(
                        RunSpec(
                            experiment_id=run_id,
                            architecture=architecture,
                            fault=name,
                            severity=severity,
                            onset_step=_random_onset(seed, run_id),
                            seed=seed,
                            total_steps=2000,
                            evaluate_every=10,
                            recipe="stress",
                            repetition=repetition,
                        )
                    )
    return specs


def _random_onset(seed: int, run_id: str) -> int:
    return int(np.random.default_rng([seed, *run_id.encode(), 1]).integers(600, 1401))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A study by name: its runs, the modes of the metric that it logs, and where to."""

    specs: Callable[[int], list[RunSpec]]
    modes: tuple[str, ...]
    out: Path


RECIPES = {
    "emergent": Recipe(specs=emergent_specs, modes=tuple(MODES), out=Path("emergent_study")),
    "stress": Recipe(specs=stress_specs, modes=("FULL_METRIC",), out=Path("stress_study")),
}


class StudyError(RuntimeError):
    """A folder that this study cannot go on in; states which file and why."""


def mode_folder(out: Path, mode: str) -> Path:
    return out / f"logs_{mode}"


def missing_runs(
    specs: Iterable[RunSpec], modes: Sequence[str], out: Path, config: RMetricConfig
) -> list[RunSpec]:
    """The runs that lack a whole log in any mode.

    Raises StudyError where a log of the same name is another run's.
    """
    return [
        spec
        for spec in specs
        if not all(
            _is_whole(log_path(mode_folder(out, mode), spec.experiment_id), spec, mode, config)
            for mode in modes
        )
    ]


def _is_whole(path: Path, spec: RunSpec, mode: str, config: RMetricConfig) -> bool:
    if not path.exists():
        return False
    content = path.read_bytes()
    first = start_line(config_of(spec), spec.experiment_id, config, mode)
    if not first.startswith(content[: len(first)]):
        raise another_run(path)
    last = content.rstrip(b"\n").rpartition(b"\n")[2]
    return content.endswith(b"}\n") and b'"event":"EXPERIMENT_' in last


def another_run(path: Path) -> StudyError:
    return StudyError(
        f"{path} is the log of another run (another seed, recipe, preset or version): "
        "choose another --out, or remove it"
    )


def refuse_other_studies(out: Path, names: Mapping[str, Collection[str]]) -> None:
    """Raise StudyError where the folders hold logs of another study.

    The tables take all logs of a folder, so two studies in one would be pooled.

    Args:
        out: the folder of the logs_<MODE>/ folders.
        names: of the study's runs, by mode.
    """
    others = {
        mode: sorted({path.stem for path in mode_folder(out, mode).glob("*.jsonl")} - set(known))
        for mode, known in names.items()
    }
    found = [mode for mode, ids in others.items() if ids]
    if found:
        folders = ", ".join(str(mode_folder(out, mode)) for mode in found)
        raise StudyError(
            f"{sum(map(len, others.values()))} logs in {folders} are of another study "
            f"(as {others[found[0]][0]}.jsonl) and would be pooled with this one: "
            "choose another --out, or move or remove them"
        )


def clear_parts(out: Path, modes: Sequence[str]) -> None:
    """Remove the unfinished files of a study that was killed, not those of one that runs."""
    for mode in modes:
        for part in mode_folder(out, mode).glob(".*.part"):
            if time.time() - part.stat().st_mtime > ABANDONED_SECONDS:
                part.unlink(missing_ok=True)


def simulate_logs(
    specs: Sequence[RunSpec], modes: Sequence[str], config: RMetricConfig
) -> list[tuple[str, str, bytes]]:
    """Simulate runs together; (mode, run id, log) for each mode of each."""
    return [
        (mode, run.id, b"".join(run_lines(run, config, mode)))
        for run in simulate(specs)
        for mode in modes
    ]


def run_study(
    specs: Sequence[RunSpec],
    modes: Sequence[str],
    out: Path,
    *,
    num_processes: int = -1,
    backend: AbstractContextManager[Any] | None = None,
    config: RMetricConfig | None = None,
) -> Iterator[int]:
    """Write the logs of these runs; yields the number of runs finished each time.

    Args:
        specs: the runs still to do; see `missing_runs`.
        modes: of the metric; one log each.
        out: the logs go to `logs_<MODE>/` below it.
        num_processes: as joblib's n_jobs; -1 for one a core.
        backend: a joblib.parallel_config to run under; None for local processes.
        config: of the metric; None for that of the simulation.
    """
    config = config or RMetricConfig.simulation()
    for mode in modes:
        mode_folder(out, mode).mkdir(parents=True, exist_ok=True)
    with backend or nullcontext():
        parallel = joblib.Parallel(n_jobs=num_processes, return_as="generator_unordered")
        tasks = (delayed(simulate_logs)(batch, modes, config) for batch in batches(specs))
        for logs in parallel(tasks):
            for mode, run_id, log in logs:
                write_atomically(log_path(mode_folder(out, mode), run_id), [log])
            yield len(logs) // len(modes)


def batches(specs: Sequence[RunSpec]) -> Iterator[list[RunSpec]]:
    """Runs of one shape, at most `BATCH` together."""
    by_shape: dict[tuple[int, int, int], list[RunSpec]] = {}
    for spec in specs:
        shape = (spec.num_workers, spec.total_steps, spec.evaluate_every)
        by_shape.setdefault(shape, []).append(spec)
    for alike in by_shape.values():
        number = -(-len(alike) // BATCH)
        # Dealt in turn, so that disturbed runs, which cost twice, spread over the batches.
        yield from (alike[i::number] for i in range(number))
