"""Outcome of a simulated run, from its noiseless losses.

The loss is judged every `TRUTH_EVERY` steps without evaluation noise, whatever
the log's own cadence, so that two logs of one run agree. The definitions are
those used on real runs (docs/simulator.md, "What counts as a failure").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TRUTH_EVERY = 10
DIVERGED_RATIO = 1.2  # median of three losses over the best so far, to the end
DEGRADED_NATS = 0.10  # above the twin, at the end


def diverged_at(loss_T: Floats, ratio: float = DIVERGED_RATIO) -> int | None:
    """Index from which the median of three stays 20 % above the best so far, to the end."""
    return _since(median_of_three(loss_T) > ratio * np.minimum.accumulate(loss_T))


def degraded_at(loss_T: Floats, twin_T: Floats, nats: float = DEGRADED_NATS) -> int | None:
    """Index from which the median of three gaps to the twin stays above 0.10 nat, to the end.

    That is when the damage is done. Booking it to the end of the run instead
    would give every late alert a long lead.
    """
    return _since(median_of_three(loss_T - twin_T) > nats)


def soft_failure(
    loss_T: Floats,
    twin_T: Floats | None = None,
    *,
    ratio: float = DIVERGED_RATIO,
    nats: float = DEGRADED_NATS,
    ends_there: bool = False,
) -> tuple[str, int] | None:
    """Diverged or degraded: the graver name, and the index from which either holds.

    A run that hovers about the line of divergence was damaged long before it
    crossed it for good. None where neither holds; without a twin nothing is degraded.

    The median lags: that of a loss that still falls fast is above its best as well.
    With `ends_there` only a run whose last loss itself stands above the line has diverged.
    """
    ends_low = ends_there and not (loss_T[-1:] > ratio * loss_T.min(initial=np.inf)).any()
    found = {"diverged": None if ends_low else diverged_at(loss_T, ratio)}
    if twin_T is not None:
        found["degraded"] = degraded_at(loss_T, twin_T, nats)
    since = {kind: at for kind, at in found.items() if at is not None}
    return (next(iter(since)), min(since.values())) if since else None


def median_of_three(x_T: Floats) -> Floats:
    """Median of each value and the two before it; the first stands in for what is missing."""
    if len(x_T) == 0:
        return x_T
    padded = np.concatenate([x_T[:1], x_T[:1], x_T])
    return np.asarray(np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0))


def _since(holds: NDArray[np.bool_]) -> int | None:
    """First index of the unbroken True stretch that reaches the end; None without one."""
    if len(holds) == 0 or not holds[-1]:
        return None
    broken = np.flatnonzero(~holds)
    return int(broken[-1]) + 1 if len(broken) else 0
