"""The published study: 720 logs out of one stream of draws.

A run follows from the draws of all runs before it, so none can be simulated alone. A study
that was stopped is drawn again from its start, which takes seconds; a log that is there with
the same bytes stays untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from rmetric._util.durable import write_atomically
from rmetric.logs import log_path, run_lines, start_line
from rmetric.metric import MODES, RMetricConfig
from rmetric.simulation.published import (
    PublishedDynamics,
    PublishedSpec,
    config_of,
    published_specs,
    simulate_published,
)
from rmetric.simulation.study import (
    another_run,
    clear_parts,
    mode_folder,
    refuse_other_studies,
)

RECIPE = "published"
#: Of the metric in every log unless others are given; the mode comes on top. The weights and
#: the threshold are the paper's, the window and ΔL from the first loss those of the simulator.
CONFIG = RMetricConfig.simulation(variant="authors_simulator")
#: The seed whose 720 logs the authors' code was run with, and these were compared with.
SEED = 1


def run_published_study(
    out: Path, seed: int = SEED, limit: int | None = None, config: RMetricConfig = CONFIG
) -> Iterator[bool]:
    """Write the logs below `out`; yields, run by run, whether its log was there.

    `seed` is of Python's `random`, through all runs; `limit` takes the first so many, in the order
    of their draws; `config` is of the metric, without the mode. Raises StudyError before it writes.
    """
    specs = published_specs()
    _check_folders(out, specs, seed, config)
    specs = specs[:limit]
    for mode in {spec.mode: None for spec in specs}:
        mode_folder(out, mode).mkdir(parents=True, exist_ok=True)
    clear_parts(out, list(MODES))
    for spec, run in zip(specs, simulate_published(specs, Random(seed), seed=seed), strict=True):
        path, log = _path(out, spec), b"".join(run_lines(run, config, spec.mode))
        there = path.exists() and path.read_bytes() == log
        if not there:
            write_atomically(path, [log])
        yield there


def _check_folders(out: Path, specs: list[PublishedSpec], seed: int, config: RMetricConfig) -> None:
    """Raise StudyError unless every log in the folders is of this study, whole or cut off."""
    names: dict[str, set[str]] = {mode: set() for mode in MODES}
    for spec in specs:
        names[spec.mode].add(spec.experiment_id)
    refuse_other_studies(out, names)
    for spec in specs:
        path = _path(out, spec)
        if not path.exists():
            continue
        about = config_of(spec, PublishedDynamics(), seed)
        first = start_line(about, spec.experiment_id, config, spec.mode)
        with open(path, "rb") as file:
            if not first.startswith(file.read(len(first))):
                raise another_run(path)


def _path(out: Path, spec: PublishedSpec) -> Path:
    return log_path(mode_folder(out, spec.mode), spec.experiment_id)
