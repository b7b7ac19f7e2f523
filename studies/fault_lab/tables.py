"""Tables of the laboratory: failures, their times, and the signals before them.

Outcomes and times are those of all runs. Signals and detectors use the calibration and
development runs alone: the test part is reserved for the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import nan

import numpy as np

from rmetric.detectors import IN_PAPER
from rmetric.evaluation import judge, score, trace_all
from rmetric.evaluation.intervals import wilson
from rmetric.records import Run
from studies.common.table import Cell, Table
from studies.fault_lab.signals import SIGNALS, SignalResponse, area, response

QUARTILES = (25, 50, 75)
WILSON = "Shares with 95 % Wilson intervals."
SEALED = "Calibration and development runs only; the test part is kept for the benchmark."


def times_to_failure(runs: Iterable[Run]) -> list[int]:
    """Steps from the onset to the failure, of the runs that failed."""
    return [
        run.truth.failure_step - run.truth.onset_step
        for run in runs
        if run.truth and run.truth.failure_step is not None and run.truth.onset_step is not None
    ]


def quartiles(times: Sequence[int]) -> tuple[float, ...]:
    return tuple(np.percentile(times, QUARTILES).tolist()) if times else (nan,) * 3


def by_fault(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Fault -> its runs; faults before benign changes, those that fail most first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        assert run.truth is not None
        groups.setdefault(run.truth.fault, []).append(run)

    def rank(item: tuple[str, list[Run]]) -> tuple:
        name, members = item
        truth = members[0].truth
        assert truth is not None
        times = times_to_failure(members)
        middle = float(np.median(times)) if times else np.inf
        return name == "NONE", truth.benign, -failed_share(members), middle, name

    return dict(sorted(groups.items(), key=rank))


def failed_share(runs: Sequence[Run]) -> float:
    return sum(run.truth is not None and run.truth.failed for run in runs) / len(runs)


def outcomes(runs: Sequence[Run], by_severity: bool = False) -> Table:
    """Outcomes of the runs under each fault, and times to failure."""
    return Table(
        "outcomes_by_severity" if by_severity else "outcomes",
        "Failures and times to failure" + (", by severity" if by_severity else ""),
        (
            "Fault",
            "Severity" if by_severity else "Kind",
            "Runs | Failed (share) | Not finite | Diverged | Degraded | "
            "Onset to failure, 25 % (steps):0 | 50 %:0 | 75 %:0",
        ),
        list(_severity_rows(runs) if by_severity else _fault_rows(runs)),
        notes=[WILSON, "All runs of the campaign, the test part's outcomes included."],
        grouped=by_severity,
    )


def _severity_rows(runs: Sequence[Run]) -> Iterator[tuple[Cell, ...]]:
    for name, members in by_fault(runs).items():
        severities: dict[float, list[Run]] = {}
        for run in members:
            severity = run.truth.severity if run.truth else None
            severities.setdefault(severity or 0.0, []).append(run)
        for severity, equal in sorted(severities.items()):
            yield name, f"{severity:g}", *_outcome(equal)


def _fault_rows(runs: Sequence[Run]) -> Iterator[tuple[Cell, ...]]:
    """A row for each fault, then for all faults and for all benign changes."""
    for name, members in by_fault(runs).items():
        kind = "control" if name == "NONE" else "benign" if _benign(members[0]) else "fault"
        yield name, kind, *_outcome(members)
    disturbed = [run for run in runs if run.truth and run.truth.fault != "NONE"]
    for benign, title in ((False, "all faults"), (True, "all benign changes")):
        members = [run for run in disturbed if _benign(run) is benign]
        yield title, "benign" if benign else "fault", *_outcome(members)


def _outcome(runs: Sequence[Run]) -> tuple[Cell, ...]:
    kinds = [run.truth.failure_kind for run in runs if run.truth and run.truth.failed]
    counts = [kinds.count(kind) for kind in ("non_finite", "diverged", "degraded")]
    return len(runs), wilson(len(kinds), len(runs)), *counts, *quartiles(times_to_failure(runs))


def all_responses(runs: Sequence[Run]) -> dict[str, list[SignalResponse]]:
    """Signal -> its response in each disturbed run, compared with the run's control."""
    controls = {run.id: run for run in runs}
    branches = [run for run in runs if run.config.get("branch_of")]
    return {
        name: [response(signal, run, controls[run.config["branch_of"]]) for run in branches]
        for name, signal in SIGNALS.items()
    }


def signals(seen: Mapping[str, Sequence[SignalResponse]]) -> Table:
    """Separation of disturbed runs from their twins by each signal."""

    def share(found: Sequence[SignalResponse], chosen: Callable[[Run], bool]) -> tuple[float, int]:
        kept = [sight for sight in found if chosen(sight.run)]
        return area(kept), len(kept)

    groups: dict[str, Callable[[Run], bool]] = {
        "not finite": lambda run: _kind(run) == "non_finite",
        "diverged": lambda run: _kind(run) == "diverged",
        "degraded": lambda run: _kind(run) == "degraded",
        "absorbed": lambda run: _kind(run) is None and not _benign(run),
        "benign": lambda run: _kind(run) is None and _benign(run),
    }
    rows: list[tuple[Cell, ...]] = []
    for name, found in seen.items():
        failing = share(found, lambda run: _kind(run) is not None)[0]
        rows.append((SIGNALS[name].label, failing, *(share(found, g)[0] for g in groups.values())))
    rows.sort(key=lambda row: -float(row[1]) if isinstance(row[1], float) else 0.0)
    first = next(iter(seen.values()))
    numbers = {name: share(first, chosen)[1] for name, chosen in groups.items()}
    counts = ", ".join(f"{number} {name}" for name, number in numbers.items())
    return Table(
        "signals",
        "Signals before the failure: area under the ROC curve, compared with the exact twin",
        ("Signal | All failing", *(name.capitalize() for name in groups)),
        rows,
        notes=[
            f"{SEALED} Runs: {counts}.",
            "The largest value (of losses and R) or deviation either way (of the rest) from the "
            "onset up to, not including, the failure, or over 60 steps where nothing fails, "
            "against the twin's over the same steps. 0.5 is no information; under benign and "
            "absorbed a high number means false alarms.",
        ],
    )


def signals_by_fault(seen: Mapping[str, Sequence[SignalResponse]]) -> Table:
    """The same for the failing runs of each fault."""
    first = next(iter(seen.values()))
    failing = [sight.run for sight in first if _kind(sight.run) is not None]
    rows: list[tuple[Cell, ...]] = []
    for fault, members in by_fault(failing).items():
        ids = {run.id for run in members}
        areas = [area([s for s in found if s.run.id in ids]) for found in seen.values()]
        rows.append((fault, len(members), *areas))
    return Table(
        "signals_by_fault",
        "Signals before the failure, by fault: area under the ROC curve, failing runs",
        ("Fault | Failing runs", *(SIGNALS[name].label for name in seen)),
        rows,
        notes=[
            SEALED,
            "Few runs per fault: differences between neighbouring rows are not significant.",
        ],
    )


def _kind(run: Run) -> str | None:
    return run.truth.failure_kind if run.truth else None


def _benign(run: Run) -> bool:
    return run.truth is not None and run.truth.benign


def detectors(runs: Sequence[Run], num_processes: int = 1) -> Table:
    """Every registered detector with its own settings, under two protocols."""
    rows: list[tuple[Cell, ...]] = []
    controls = np.array([run.truth is not None and run.truth.fault == "NONE" for run in runs])
    benign = np.array([_benign(run) and _kind(run) is None for run in runs])
    for name, entry in IN_PAPER.items():
        traces = trace_all(name, runs, num_processes=num_processes)
        published = score(judge(runs, traces, "published"))
        verdicts = judge(runs, traces, "causal")
        causal = score(verdicts)
        alarmed = [
            wilson(int((verdicts.false_alarm & chosen).sum()), int(chosen.sum()))
            for chosen in (controls, benign)
        ]
        ratios = published.f1, causal.f1, causal.recall
        rows.append((entry.title, *ratios, *alarmed, causal.median_lead_steps))
    failed = sum(_kind(run) is not None for run in runs)
    return Table(
        "detectors",
        "The detectors with their own settings, on real runs",
        "Detector | F1, published rule | F1, causal rule | Recall, causal | "
        "Controls alarmed | Benign alarmed | Median lead (steps):0",
        rows,
        notes=[
            f"{SEALED} {len(runs)} runs, {failed} failing, {int(controls.sum())} controls, "
            f"{int(benign.sum())} benign.",
            "Published: any alarm at any step counts. Causal: the first alarm must fall between "
            "onset and failure. Branches share their control's steps before the onset, so an "
            "error of a detector there counts several times.",
            "Settings are those of the paper or the detector's own; nothing was fitted here.",
        ],
    )
