"""Binding constraint when no layout is feasible."""

from __future__ import annotations

from dataclasses import replace

from rmetric.guard.layout import Layout
from rmetric.guard.planner.cluster import in_words
from rmetric.guard.planner.rules import Problem, broken_rules
from rmetric.guard.planner.search import fits, smallest, splits

#: Rules that can be lifted one at a time; what is left of one is never a layout to use.
LIFTED = ("tensor", "pipeline", "node", "batch")
#: What may be asked of the planner instead, where there is something.
INSTEAD = {"pipeline": "; uneven stages may be allowed", "batch": "; the batch may be let change"}


def why_nothing_fits(problem: Problem) -> tuple[str, list[str]]:
    """Binding constraint, and changes that would make a layout feasible."""
    least = smallest(problem)
    if least is None:
        return _no_layout(problem), _would_help(problem)
    layout, recompute, needed = least
    again = ", with activations computed again" if recompute else ""
    why = (
        f"memory: the smallest layout ({layout}{again}) needs {in_words(needed.total)} on each GPU "
        f"and {problem.cluster.memory_in_words}"
    )
    return why, _would_help(problem)


def _no_layout(problem: Problem) -> str:
    """Constraint when the rules exclude every layout: a requested size is impossible."""
    if not any(True for _ in splits(replace(problem, relaxed=frozenset({"batch"})), hopeless=True)):
        asked = {
            "TP": problem.tensor, "PP": problem.pipeline,
            "CP": problem.context, "EP": problem.expert,
        }  # fmt: skip
        words = ", ".join(
            f"{name} of {'/'.join(map(str, sizes))}" for name, sizes in asked.items() if sizes
        )
        first = Layout(
            tensor=(problem.tensor or (1,))[0],
            pipeline=(problem.pipeline or (1,))[0],
            context=(problem.context or (1,))[0],
            expert=(problem.expert or (1,))[0],
        )
        broken = broken_rules(problem, first, problem.recompute[0])
        reasons = [broken[name] for name in broken if name not in ("batch", "memory")]
        return f"no layout with {words}: {'; '.join(reasons) or 'the sizes exclude each other'}"
    return (
        f"batch: no micro-batch of {', '.join(map(str, problem.micro_batches))} and number of "
        f"copies comes to {problem.samples} samples"
    )


def _would_help(problem: Problem) -> list[str]:
    """Each rule without which something would fit, in words."""
    found = []
    for rule in LIFTED:
        without = fits(replace(problem, relaxed=frozenset({rule})))
        if without is not None:
            broken = broken_rules(problem, without.layout, without.recompute)
            reasons = "; ".join(broken[name] for name in broken if name != "memory")
            found.append(
                f"{without.layout} would fit in memory, but {reasons}{INSTEAD.get(rule, '')}"
            )
    return found
