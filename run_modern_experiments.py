"""Step 1: run the study. 720 logs in logs_<MODE>/, from which all else is computed.

    python run_modern_experiments.py                        the published study, here
    python run_modern_experiments.py --recipe emergent      its matrix, in emergent_study/
    python run_modern_experiments.py --recipe stress        ours, in stress_study/

`published` is the study of the paper on its authors' simulator, whose crashes are scripted:
4 modes of the metric x 3 architectures x 5 faults x 12 repetitions, 720 runs from one stream
of draws, equal to theirs under Python's random.seed(SEED). R has the paper's weights; with
--preset authors_simulator it has those of their code and equals theirs too. `emergent` is the
same matrix on our simulator, where failures emerge: 180 runs, each logged in the 4 modes.
`stress` is ours as well: every fault and benign change at three severities with random onsets,
an evaluation every 10 steps.

Stop it whenever you like: started again, it finishes what is missing and ends
with the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.common.command import add_jobs, add_preset, ends_at_once

with ends_at_once():
    from tqdm import tqdm

    from rmetric.metric import MODES, PRESETS
    from rmetric.simulation.published import published_specs
    from rmetric.simulation.study import (
        RECIPES,
        StudyError,
        clear_parts,
        missing_runs,
        mode_folder,
        refuse_other_studies,
        run_study,
    )
    from studies.paper.published_study import CONFIG, SEED, run_published_study
    from studies.paper.published_study import RECIPE as PUBLISHED


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="the logs go to DIR/logs_<MODE>/ (default: here; emergent_study or stress_study "
        "for these recipes)",
    )  # fmt: skip
    parser.add_argument(
        "--recipe", choices=[PUBLISHED, *RECIPES], default=PUBLISHED,
        help="which study (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, metavar="S",
        help=f"of the whole study (default: {SEED} for published, as its logs were compared with "
        "the authors' code, else 0)",
    )  # fmt: skip
    add_preset(parser)
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N runs of the recipe, to try it"
    )
    add_jobs(
        parser,
        "processes; the result does not depend on it, and the published study, one stream of "
        "draws, always takes one",
    )
    parser.add_argument(
        "--backend", choices=["local", "dask"], default="local",
        help="where the runs are simulated: on this machine, or on a Dask cluster whose "
        "workers have rmetric installed (--jobs then does not count)",
    )  # fmt: skip
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="of the Dask cluster, as tcp://host:8786"
    )
    arguments = parser.parse_args(argv)
    if arguments.seed is None:
        arguments.seed = SEED if arguments.recipe == PUBLISHED else 0
    if not 0 <= arguments.seed < 2**63:
        parser.error(f"--seed is {arguments.seed}: it must be at least 0 and below 2^63")
    if arguments.limit is not None and arguments.limit < 1:
        parser.error(f"--limit is {arguments.limit}: at least 1 is needed")
    if (arguments.backend == "dask") != (arguments.scheduler is not None):
        parser.error("--backend dask and --scheduler ADDRESS go together")
    if arguments.recipe == PUBLISHED and arguments.backend == "dask":
        parser.error(
            "--backend dask is not for --recipe published, whose runs are one stream of draws; "
            f"it is for {' and '.join(RECIPES)}"
        )
    return arguments


def dask_backend(address: str):
    """Return the joblib backend of a running Dask cluster."""
    try:
        from dask.distributed import Client
    except ImportError:
        sys.exit("--backend dask needs Dask: pip install -e '.[cluster]'")
    import joblib

    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        sys.exit(f"no Dask scheduler answers at {address}: {error}")
    return joblib.parallel_config(backend="dask", client=client)


def run_published(arguments: argparse.Namespace) -> str:
    """Write the published study; returns what was done, in words."""
    out = arguments.out or Path()
    specs = published_specs()[: arguments.limit]
    config = PRESETS[arguments.preset](variant=CONFIG.variant)
    done = 0
    with tqdm(total=len(specs), unit="run", desc=PUBLISHED) as bar:
        for was_there in run_published_study(out, arguments.seed, arguments.limit, config):
            done += was_there
            bar.update()
    modes = [mode for mode in MODES if any(spec.mode == mode for spec in specs)]
    return summary(len(specs), len(specs), out, modes, done)


def run_emergent(arguments: argparse.Namespace) -> str:
    """Write a study in which failures emerge; returns what was done, in words."""
    recipe = RECIPES[arguments.recipe]
    specs = recipe.specs(arguments.seed)
    out = arguments.out or recipe.out
    modes, config = recipe.modes, PRESETS[arguments.preset]()
    names = [spec.experiment_id for spec in specs]
    refuse_other_studies(out, dict.fromkeys(modes, names))
    specs = specs[: arguments.limit]
    clear_parts(out, modes)
    missing = missing_runs(specs, modes, out, config)
    done = len(specs) - len(missing)
    backend = dask_backend(arguments.scheduler) if arguments.backend == "dask" else None
    processes = None if backend else arguments.jobs
    with tqdm(total=len(specs), initial=done, unit="run", desc=arguments.recipe) as bar:
        for number in run_study(
            missing, modes, out, num_processes=processes, backend=backend, config=config
        ):
            bar.update(number)
    return summary(len(specs), len(specs) * len(modes), out, modes, done)


def summary(runs: int, logs: int, out: Path, modes: Sequence[str], done: int) -> str:
    folders = ", ".join(str(mode_folder(out, mode)) for mode in modes)
    return f"{runs} runs, {logs} logs in {folders} ({done} were there)"


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    run = run_published if arguments.recipe == PUBLISHED else run_emergent
    try:
        print(run(arguments))
    except KeyboardInterrupt:
        print("stopped; start the same command again to finish what is missing", file=sys.stderr)
        return 130
    except StudyError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error}\nwhat is finished is kept; start again to go on", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
