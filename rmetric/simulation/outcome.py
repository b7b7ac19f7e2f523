"""How a simulated run went, decided by fact.

The loss is judged at every step and without evaluation noise, whatever the
log's own cadence, so that two logs of one run agree. The definitions are those
used on real runs (docs/simulator.md, "What counts as a failure").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DIVERGED_RATIO = 1.2  # median of three losses over the best so far, to the end
DEGRADED_NATS = 0.10  # above the twin, at the end


def diverged_at(loss_T: Floats) -> int | None:
    """Index from which the median of three stays 20 % above the best so far, to the end."""
    if len(loss_T) < 3:
        return None
    before = np.concatenate([loss_T[:1], loss_T[:1], loss_T])
    median = np.median(np.stack([before[:-2], before[1:-1], before[2:]]), axis=0)
    best = np.minimum.accumulate(loss_T)
    return _since(median > DIVERGED_RATIO * best)


def degraded_at(loss_T: Floats, twin_T: Floats) -> int | None:
    """Index from which the loss stays more than 0.10 nat above the twin's, to the end."""
    return _since(loss_T - twin_T > DEGRADED_NATS)


def _since(holds: NDArray[np.bool_]) -> int | None:
    """First index of the unbroken True stretch that reaches the end; None without one."""
    if len(holds) == 0 or not holds[-1]:
        return None
    broken = np.flatnonzero(~holds)
    return int(broken[-1]) + 1 if len(broken) else 0
