"""Planner of the best parallel layout for the remaining GPUs; start with `plan`.

Pure, without torch. `model_shape`, `cluster` and `problem`, which has the constraints, are the
input. docs/planner.md has the equations.
"""

from rmetric.guard.planner.problem import BatchSpec, PlanOptions
from rmetric.guard.planner.search import LayoutPlan, Option, check, plan

__all__ = ["BatchSpec", "LayoutPlan", "Option", "PlanOptions", "check", "plan"]
