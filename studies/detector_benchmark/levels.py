"""How often the calibrated detector watches and alarms in healthy runs.

    python -m studies.detector_benchmark.levels --real-logs DIR    # writes levels.md

The runs are the controls of the laboratory's two sets and, with --real-logs, the public runs that
are labelled healthy. All are known by now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from scipy.stats import chi2

from rmetric._util.errors import exit_code_of, exit_with, fail
from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.logs import write_atomically
from rmetric.records import Run
from studies.common.command import command_parser
from studies.common.renderers import to_markdown, to_text
from studies.common.table import Cell, Table
from studies.detector_benchmark.data_sets import LAB_FOLDER, LAB_PARTS, VARIED_PARTS, DataSet, lab
from studies.detector_benchmark.real_logs import real

OUT = Path("studies", "detector_benchmark", "results")


def levels_of(runs: Iterable[Run]) -> Counter[str]:
    """Numbers of runs, records, and episodes (watches, alarms); one may be both of these."""
    found: Counter[str] = Counter()
    for run in runs:
        detector = CalibratedDetector()
        levels = ["quiet", *(detector.update(record).level for record in run.records)]
        pairs = list(pairwise(levels))
        found["watches"] += sum(was == "quiet" != now for was, now in pairs)
        found["alarms"] += sum(was != "alarm" == now for was, now in pairs)
        found += Counter(runs=1, records=len(run.records))
    return found


def controls(data: DataSet) -> list[Run]:
    """The runs without any fault or change."""
    chosen = data.cases.of_kind("control")
    return [run for run, is_control in zip(data.runs, chosen, strict=True) if is_control]


def table(found: dict[str, Counter[str]]) -> Table:
    total = sum(found.values(), Counter[str]())
    rows: list[tuple[Cell, ...]] = [
        # The last is the largest rate that gives so few alarms in one of twenty samples.
        (name, counts["runs"], counts["records"], counts["watches"],
         round(counts["records"] / counts["watches"]) if counts["watches"] else None,
         counts["alarms"], round(counts["records"] / poisson_limit(counts["alarms"])))
        for name, counts in {**found, "all": total}.items()
    ]  # fmt: skip
    return Table(
        "levels",
        "watch and alarm of the calibrated detector in healthy runs",
        "Healthy runs | Runs | Records | Watches | Records between two watches | Alarms | "
        "Records between two alarms, at least (95 %)",
        rows,
        notes=["All of these runs are known by now; most were while the detector was built."],
    )


def poisson_limit(count: int) -> float:
    """Upper 95 % limit of the mean of a Poisson number of which `count` was seen."""
    return float(chi2.ppf(0.95, 2 * (count + 1)) / 2)


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("detector_benchmark.levels", __doc__)
    parser.add_argument("--lab", type=Path, default=LAB_FOLDER, help="archives of the laboratory")
    parser.add_argument("--real-logs", type=Path, metavar="DIR", help="public logs, see fetch.py")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        found = {
            f"laboratory, {which} set": levels_of(
                controls(lab(parts, options.lab, open_sealed=True))
            )
            for which, parts in (("first", LAB_PARTS), ("second", VARIED_PARTS))
        }
        if options.real_logs is not None:
            found["public logs"] = levels_of(controls(real(options.real_logs)))
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out / "levels.md", [to_markdown(table(found)).encode()])
    except (OSError, ValueError) as error:
        return fail(error, exit_code_of(error))
    print(to_text(table(found)))
    return 0


if __name__ == "__main__":
    exit_with(main)
