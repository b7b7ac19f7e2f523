"""Options, output folders and messages that the two analysis scripts share."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rmetric.evaluation import Study, intervals, traces
from rmetric.logs import write_atomically
from studies.common.provenance import commit, versions
from studies.paper.tables import FEW_RUNS

#: Recipes whose results lie in a folder of that name below results/.
OWN_FOLDER = ("emergent", "stress")
PROVENANCE = "provenance.json"
#: Packages whose versions stand in the provenance.
PACKAGES = ("numpy", "scipy", "scikit-learn", "joblib")


def parser(description: str | None, what: str) -> argparse.ArgumentParser:
    """The options of a script that makes the `what` of a study."""
    out = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument(
        "--logs", type=Path, default=Path(), metavar="DIR",
        help="the folder that holds the logs_<MODE>/ folders (default: here)",
    )  # fmt: skip
    out.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"where the {what} go (default: results/{what} for the published study, "
        f"results/emergent/{what} and results/stress/{what} for the others, results/sample/{what} "
        "where there are too few runs to stand for a study)",
    )  # fmt: skip
    return out


def folder_for(study: Study, what: str) -> Path:
    """The default folder for the `what` of a study; only its own recipe's results are replaced."""
    if len(study.reference) < FEW_RUNS:
        return Path("results", "sample", what)
    recipes = {run.config.get("recipe") for run in study.reference}
    own = [name for name in OWN_FOLDER if recipes == {name}]
    return Path("results", *own, what)


def report_inputs(study: Study) -> None:
    """Print warnings about the logs."""
    for skipped in study.skipped:
        warn(f"skipped {skipped}")
    recipes = sorted({str(run.config.get("recipe")) for run in study.reference})
    if len(recipes) > 1:
        warn(f"runs of several studies are pooled: recipes {', '.join(recipes)}")
    stated = {str(run.config["seed"]) for run in study.reference if "seed" in run.config}
    if len(stated) > 1:
        warn(f"runs of several seeds are pooled: {', '.join(sorted(stated))}")
    numbers = {mode: len(runs) for mode, runs in study.runs.items()}
    if len(set(numbers.values())) > 1:
        counts = ", ".join(f"{mode} {number}" for mode, number in numbers.items())
        warn(f"the modes have different numbers of runs, so their rows do not compare: {counts}")
    odd = {note for run in study.reference for note in run.notes if "not understood" in note}
    for note in sorted(odd):
        warn(note)


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


@contextmanager
def provenance(folder: Path, script: str, study: Study) -> Iterator[dict[str, Any]]:
    """Write the results of a study in `folder` inside; provenance.json of them comes last.

    Yields its entries, to which others may be added. Where results and entries stay as they were,
    the last ones are kept, with the commit and versions by which these bytes were first made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before, path = _results_in(folder), folder / PROVENANCE
    arguments = ["python", script, "--logs", study.folder, "--out", folder]
    made = {"command": shlex.join(map(str, arguments)), **_sources(study)}
    yield made
    made = json.loads(json.dumps(made))
    try:
        last = json.loads(path.read_bytes())
        kept = {**made, "commit": last["commit"], "versions": last["versions"]} == last
    except (OSError, ValueError, KeyError, TypeError):
        kept = False
    if not kept or _results_in(folder) != before:
        write_atomically(path, [json.dumps(made, indent=2, ensure_ascii=False).encode(), b"\n"])


def _sources(study: Study) -> dict[str, Any]:
    """Logs, seeds, versions and commit; no times, so that a rerun writes the same."""
    runs = [run for of_mode in study.runs.values() for run in of_mode]
    stated = [run.config["seed"] for run in runs if "seed" in run.config]
    seeds = {seed if isinstance(seed, int) else str(seed) for seed in stated}
    return {
        "logs": {
            "sha256": study.digest,
            "num_logs": {mode: len(of_mode) for mode, of_mode in study.runs.items()},
            "missing": study.missing,
            "skipped": study.skipped,
        },
        "seeds": {
            "study": sorted(seeds, key=lambda seed: (isinstance(seed, str), seed)),
            "detectors": traces.SEED,
            "bootstrap": intervals.SEED,
        },
        "bootstrap_resamples": intervals.NUM_RESAMPLES,
        "versions": versions(PACKAGES),
        "commit": commit(),
    }


def _results_in(folder: Path) -> dict[str, bytes]:
    """The files of a folder of results by their names, without provenance.json."""
    files = [path for path in folder.glob("*.*") if path.is_file() and path.name != PROVENANCE]
    return {path.name: path.read_bytes() for path in files}
