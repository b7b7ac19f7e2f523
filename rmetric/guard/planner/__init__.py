"""Planner of the best parallel layout for the remaining GPUs; start with `plan`.

Pure, without torch. `search` ranks the layouts that work, or names the binding constraint;
`rules`, `memory` and `throughput` judge a layout; `report` prints the answer. `model_shape`,
`cluster` and `settings` are the input. docs/planner.md has the equations.
"""

from rmetric.guard.planner.search import LayoutPlan, Option, check, plan
from rmetric.guard.planner.settings import BatchSpec, PlanOptions

__all__ = ["BatchSpec", "LayoutPlan", "Option", "PlanOptions", "check", "plan"]
