"""The tables of a study, each from the traces of the detectors on its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import nan

import numpy as np

from rmetric.evaluation import PROTOCOLS, Estimate, Scores, Study, score
from rmetric.evaluation.intervals import NUM_RESAMPLES
from rmetric.metric import PAPER_WEIGHTS, Components
from rmetric.records import Run
from studies.common.real_runs import Summary
from studies.common.table import Cell, Table, numbered, show
from studies.paper import claims, published_tables
from studies.paper.analysis import ENTRIES, REFERENCE_DETECTOR, Analysis, ceiling
from studies.paper.claims import FEW_RUNS
from studies.paper.transfer import architecture, mean_loss, mean_overfit, transfers

#: Rows of table 3 for a detector that knows the truth -> whether it waits for the onset to pass.
CEILINGS = {"Ceiling (knows the truth)": False, "Ceiling, after the onset step": True}
COUNTS, RATIOS, LEAD = "n | Failed | TP | FP | FN", "Precision | Recall | F1:3", "Lead (steps):0"
INTERVALS = (
    f"Brackets: 95 % interval, bootstrap over runs, {NUM_RESAMPLES} resamples; where all runs are "
    "alike it has no width, which is no certainty. –: undefined, nothing to divide by. "
    "F1 = 2 TP / (2 TP + FP + FN), so 0 for a detector silent while runs fail."
)
LEADS = (
    "Lead: failure minus first alert, mean over the hits. The published rule counts alerts from "
    "before the fault, and alerts after the failure with a lead below 0."
)


def build_tables(
    study: Study, case_studies: Sequence[Summary] = (), *, num_processes: int = 1
) -> tuple[list[Table], list[str]]:
    """The numbered tables of a study, and a sentence for each log that states another R-Metric.

    The recipe in the logs selects the tables. `case_studies` are summaries of the real runs that
    table 5 reports.
    """
    if published_tables.is_published(study):
        taken_apart = published_tables.PublishedAnalysis.of(study, num_processes=num_processes)
        metric = taken_apart.metric
        made = [
            published_tables.approaches(taken_apart),
            scenarios(metric),
            published_tables.published_detectors(taken_apart),
            published_tables.faults(taken_apart),
            published_tables.claims_table(taken_apart, case_studies),
            weights(metric),
            published_tables.anatomy_table(taken_apart),
        ]
        return numbered(made), metric.disagreements
    analysis = Analysis.of(study, num_processes=num_processes)
    return tables_of(analysis, case_studies), analysis.disagreements


def tables_of(analysis: Analysis, case_studies: Sequence[Summary] = ()) -> list[Table]:
    """The tables of a study whose failures emerge, or of unknown logs."""
    made = [make(analysis) for make in (approaches, scenarios, detectors, faults)]
    return numbered([*made, claims.claims(analysis, case_studies), weights(analysis)])


def approaches(analysis: Analysis) -> Table:
    """Table 1: existing approaches and their lead times."""
    measured = {
        "loss_rise": ("heuristic", "validation loss"),
        "loss_slope": ("heuristic", "validation loss"),
        "loss_z_score": ("heuristic", "validation loss"),
        "gradient_norm": ("heuristic", "gradient norm"),
        "isolation_forest": ("outlier detection, afterwards", "validation loss of the whole run"),
        REFERENCE_DETECTOR: ("score, online", "hardware events, workers' gradients, loss"),
    }
    rows: list[tuple[Cell, ...]] = [
        ("Periodic checkpoints", "reaction to a failure", "everything", *[None] * 5,
         "qualitative: acts after the failure, no lead by construction")
    ]  # fmt: skip
    for name, (kind, scope) in measured.items():
        then, now = (analysis.scores(name, protocol) for protocol in ("published", "causal"))
        paper = f"{claims.PAPER_LEAD_STEPS} steps" if name == REFERENCE_DETECTOR else None
        rows.append(
            (ENTRIES[name].title, kind, scope, then.lead_steps, now.recall, now.lead_steps,
             now.lead_minutes, paper, "lead and recall measured on these logs")
        )  # fmt: skip
    return Table(
        "table1_approaches",
        "Existing approaches: what kind, what scope, what lead time",
        "Approach | Kind (qualitative) | Scope (qualitative) | "
        "Lead, published rule (steps):0 | Recall, causal rule | Lead, causal rule (steps):0 | "
        "Lead, causal rule (min):1 | Paper: lead | Basis:wide",
        rows,
        notes=[LEADS, INTERVALS, *_few(analysis.study.reference)],
    )


def scenarios(analysis: Analysis) -> Table:
    """Table 2: the matrix of the study and its outcomes."""
    runs = analysis.study.reference
    cells: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((architecture(run), _fault(run)), []).append(run)
    rows = [(*names, *_scenario(cells[names])) for names in sorted(cells)]
    return Table(
        "table2_scenarios",
        "The scenario matrix and what became of its runs",
        (
            "Architecture | Fault | Severities | n | Applicable | Healthy | Absorbed | "
            "Not applicable | Failed | Failure kinds",
            *(f"Onset to failure, {q} % (steps):0" for q in (10, 50, 90)),
        ),
        [*rows, ("All", "", None, *_scenario(runs)[1:])],
        notes=[_modes_and_faults(runs), *_few(runs)],
        grouped=True,
    )


def detectors(analysis: Analysis) -> Table:
    """Table 3 of the emergent and stress studies; the paper's is `published_detectors`."""

    def row(protocol: str, title: str, scores: Scores, *cells: Cell) -> tuple[Cell, ...]:
        difference, paper = cells or (None, None)
        return (PROTOCOLS[protocol].title, title, *_counts(scores), *_ratios(scores), difference,
                scores.lead_steps, scores.lead_minutes.point, paper)  # fmt: skip

    rows: list[tuple[Cell, ...]] = []
    for protocol in PROTOCOLS:
        for name in analysis.traces:
            is_reference = name == REFERENCE_DETECTOR
            difference = None if is_reference else analysis.f1_difference(name, protocol)
            paper = claims.PAPER_F1 if is_reference and protocol == "published" else None
            scores = analysis.scores(name, protocol)
            rows.append(row(protocol, ENTRIES[name].title, scores, difference, paper))
        # The published rule takes alerts at any time, so nothing is out of its reach.
        for title, after in CEILINGS.items() if protocol != "published" else ():
            best = score(ceiling(analysis.study.reference, protocol, after_onset=after))
            rows.append(row(protocol, title, best))
    return Table(
        "table3_detectors",
        "R-Metric, its ablations, baselines and anchors under each protocol",
        ("Protocol | Detector", COUNTS, RATIOS, "ΔF1", LEAD, "Lead (min):1 | Paper: F1:3"),
        rows,
        notes=[
            *(f"{about.title}: {about.question}" for about in PROTOCOLS.values()),
            INTERVALS,
            "Ceiling: alarms at the first record between fault and failure; no detector on these "
            "logs exceeds it, as the failing runs it misses have no such record. After the onset "
            "step: without the record of that step, which comes before its update and shows "
            "nothing of a fault in the update.",
            "ΔF1: F1 minus R-Metric's, paired: the same resamples of the same runs.",
            LEADS,
            claims.in_plain_words(analysis),
            *_missing(analysis),
            *_few(analysis.study.reference),
        ],
        grouped=True,
    )


def faults(analysis: Analysis) -> Table:
    """Table 4: R-Metric by fault type."""
    names = np.array([_fault(run) for run in analysis.study.reference])
    observable = ceiling(analysis.study.reference, "causal", after_onset=True).hit
    rows: list[tuple[Cell, ...]] = []
    for protocol, about in PROTOCOLS.items():
        outcomes = analysis.outcomes(REFERENCE_DETECTOR, protocol)
        for name in sorted(set(names.tolist())):
            scores = score(outcomes.select(names == name))
            num_observable = int(observable[names == name].sum())
            rows.append(
                (about.title, name, *_counts(scores), num_observable, *_ratios(scores),
                 scores.lead_steps)
            )  # fmt: skip
    return Table(
        "table4_faults",
        "R-Metric by fault type under each protocol",
        ("Protocol | Fault", COUNTS, "Observable", RATIOS, LEAD),
        rows,
        notes=[
            "Observable: failing runs with at least one record after the onset step and before "
            "the failure. The others can be announced at the onset step or not at all.",
            INTERVALS,
            LEADS,
            *_few(analysis.study.reference),
        ],
        grouped=True,
    )


def weights(analysis: Analysis) -> Table:
    """Table 6: weights fitted on one architecture and used on another."""
    rows: list[tuple[Cell, ...]] = []
    for protocol, grid in analysis.weight_grids.items():
        title = PROTOCOLS[protocol].title
        for moved in transfers(grid):
            rows.append(
                (title, moved.fitted_on, " / ".join(map(_weights, moved.weights)),
                 moved.tested_on, moved.num_runs, moved.paper_f1, moved.seen_f1, moved.own_f1,
                 moved.moved_f1, moved.overfit_percent, moved.loss_percent,
                 claims.PAPER_TRANSFER)
            )  # fmt: skip
        rows.append(
            (title, "mean", "", "", len(grid.architectures), *[None] * 4,
             mean_overfit(grid), mean_loss(grid), claims.PAPER_TRANSFER)
        )  # fmt: skip
    return Table(
        "table6_transfer",
        "Weights fitted on one architecture, used on another",
        "Protocol | Fitted on | λ, σ², ΔL | Tested on | n | F1, paper's weights | "
        "F1, own weights in sample | F1, own weights | F1, weights moved | Over-fit (%):1 | "
        "Loss (%):1 | Paper: loss",
        rows,
        notes=[
            "Fitted: the weights of highest F1 on a grid from 0 to 1 in steps of 0.05, threshold "
            f"0.57; ties go to the nearest to the paper's {_weights(PAPER_WEIGHTS)}. The runs of "
            "each architecture are halved by the parity of their repetition; weights are fitted "
            "on one half (even / odd), here or elsewhere, and tested on the other half here, both "
            "ways, pooled. So own and moved weights are both out of sample.",
            "Over-fit: 1 - F1 of the own weights / their F1 on the half they were fitted on, what "
            "fitting loses without any move. Loss: 1 - F1 of the moved weights / F1 of the own; "
            "below 0 where the moved do better. Means: the same of the mean F1s, over "
            "the architectures and over the pairs. "
            "An architecture with runs in one half only is left out.",
            INTERVALS + " The weights are not fitted again in each resample.",
            *([] if rows else ["No rows: the logs hold none of the signals that R is made of."]),
            *_few(analysis.study.reference),
        ],
        grouped=True,
    )


def _counts(scores: Scores) -> tuple[Cell, ...]:
    counted: Sequence[Cell] = (scores.hits, scores.false_alarms, scores.misses)
    return scores.num_runs, scores.num_failed, *(counted if scores.measured else [nan] * 3)


def _ratios(scores: Scores) -> tuple[Estimate, ...]:
    return scores.precision, scores.recall, scores.f1


def _scenario(runs: Sequence[Run]) -> tuple[Cell, ...]:
    truths = [run.truth for run in runs if run.truth is not None]
    outcomes = Counter(truth.outcome for truth in truths)
    kinds = Counter(str(truth.failure_kind) for truth in truths if truth.failed)
    return (
        ", ".join(f"{x:g}" for x in sorted({t.severity for t in truths if t.severity is not None})),
        len(runs),
        sum(truth.applicable for truth in truths),
        *(outcomes[name] for name in ("healthy", "absorbed", "not_applicable", "failed")),
        ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())),
        *claims.onset_to_failure(runs, (10, 50, 90)),
    )


def _modes_and_faults(runs: Sequence[Run]) -> str:
    recipes = {run.config.get("recipe") for run in runs}
    if recipes <= claims.EMERGENT:
        return (
            "Runs of the full metric; the other modes share their trajectories. Not applicable: "
            "the fault has nothing to act on, such as an expert fault on a dense architecture."
        )
    if recipes == {"published"}:
        return (
            "Runs of the full metric; each other mode is a new draw of all runs. Not applicable: "
            "the name of the fault has no effect in this simulator. It has no severities."
        )
    return (
        "Runs of the full metric. The logs do not state whether a fault could act: a run that "
        "does not fail counts as applicable and absorbed."
    )


def _fault(run: Run) -> str:
    return run.truth.fault if run.truth is not None else "unknown"


def _weights(weights: Components) -> str:
    return ", ".join(show(float(weight)) for weight in weights)


def _missing(analysis: Analysis) -> list[str]:
    modes = analysis.study.missing
    return [f"No logs of {', '.join(modes)}: no row for what is read from them."] if modes else []


def _few(runs: Sequence[Run]) -> list[str]:
    if len(runs) >= FEW_RUNS:
        return []
    return [f"n = {len(runs)} is small: the intervals are wide, and the study has 180 runs."]
