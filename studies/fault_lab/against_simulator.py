"""Comparison of the simulator with the laboratory, for the faults that both have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rmetric.records import Run
from rmetric.simulation import simulate
from rmetric.simulation.study import batches, stress_specs
from studies.common.table import Cell, Table
from studies.fault_lab.tables import WILSON, quartiles, times_to_failure, wilson

#: Fault of the simulator -> what is done to a real run for it.
SHARED = {
    "NONE": ("NONE",),
    "LR_SPIKE": ("LR_SPIKE",),
    "GRADIENT_EXPLOSION": ("GRADIENT_EXPLOSION",),
    "DATA_CORRUPTION": ("DATA_CORRUPTION",),
    "GQA_MISMATCH": ("ATTENTION_SCALE",),
    "EXPERT_FAILURE": ("EXPERT_FAILURE",),
    "ROUTER_IMBALANCE": ("ROUTER_IMBALANCE",),
    "DOMAIN_SHIFT": ("DOMAIN_SHIFT",),
    "RATE_REWARMUP": ("RATE_REWARMUP",),
    "BAD_BATCH": ("BAD_BATCH",),
    "NOISY_EVALUATION": ("NOISY_EVALUATION",),
    "BATCH_SIZE_CHANGE": ("BATCH_SIZE_DOWN", "BATCH_SIZE_UP"),
}
#: Those whose severities mean the same in both, so that they are compared one by one.
SAME_SEVERITY = (
    "LR_SPIKE",
    "GRADIENT_EXPLOSION",
    "DATA_CORRUPTION",
    "GQA_MISMATCH",
    "EXPERT_FAILURE",
    "ROUTER_IMBALANCE",
    "RATE_REWARMUP",
)


WORKERS = (
    4  # as many as the laboratory's: one in four outweighs the others sooner than one in eight
)


@dataclass(frozen=True)
class Side:
    """The runs of one side under a fault."""

    runs: Sequence[Run]

    def cells(self) -> tuple[Cell, ...]:
        failed = sum(run.truth is not None and run.truth.failed for run in self.runs)
        times = times_to_failure(self.runs)
        low, middle, high = quartiles(times)
        shown = f"{middle:.0f} ({low:.0f} to {high:.0f})" if times else ""
        return len(self.runs), wilson(failed, len(self.runs)), shown


def simulated(seed: int = 0) -> list[Run]:
    """The stress study's runs under the faults that the laboratory has too, with its workers."""
    specs = [
        replace(spec, num_workers=WORKERS)
        for spec in stress_specs(seed)
        if spec.fault in SHARED and spec.applicable
    ]
    return [run for batch in batches(specs) for run in simulate(batch)]


def comparison(real: Sequence[Run], made: Sequence[Run]) -> Table:
    """Outcome shares and times to failure, side by side."""
    rows: list[tuple[Cell, ...]] = []
    for name, counterparts in SHARED.items():
        ours = [run for run in made if _is(run, (name,))]
        theirs = [run for run in real if _is(run, counterparts)]
        for severity in _severities(ours, theirs) if name in SAME_SEVERITY else [None]:
            left, right = (
                Side([r for r in side if severity is None or _severity(r) == severity])
                for side in (ours, theirs)
            )
            shown = "all" if severity is None else f"{severity:g}"
            rows.append((name, shown, *right.cells(), *left.cells()))
    return Table(
        "simulator",
        "The laboratory and the simulator under the same faults",
        "Fault | Severity | Real runs | Real: failed | Real: onset to failure (steps) | "
        "Simulated runs | Simulated: failed | Simulated: onset to failure (steps)",
        rows,
        notes=[
            f"{WILSON} Times: median (quartiles) of the runs that failed.",
            "Real runs have 400 steps, simulated ones 2000; both have 4 workers, "
            "are evaluated every 10 steps and judged by the same definitions. Faults act for the "
            "same share of the run, but for DATA_CORRUPTION, which lasts to the end in the "
            "simulator, and GQA_MISMATCH: there the attention logits are multiplied for a quarter "
            "of the run; in the laboratory (ATTENTION_SCALE) the query weights are, once, and can "
            "be learnt back.",
        ],
        grouped=True,
    )


def _is(run: Run, names: Iterable[str]) -> bool:
    return run.truth is not None and run.truth.fault in names


def _severity(run: Run) -> float | None:
    return run.truth.severity if run.truth else None


def _severities(*sides: Sequence[Run]) -> list[float | None]:
    return sorted({_severity(run) for side in sides for run in side}, key=lambda s: s or 0.0)
