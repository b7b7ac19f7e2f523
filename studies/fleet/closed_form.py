"""Exact closed forms of the effective training time ratio (ETTR) of a job.

First-order forms (Young, Daly, arXiv 2410.21680) are in `rmetric.guard.policy`.

Words for the symbols: `mtbf` M, mean seconds between two failures of the whole job (failures
are exponential here); `interval` the computing between two saves; `blocking` the time for which a
save blocks, `durable` from its beginning until it can be used; `restart` from a failure to the
first new step. All in seconds; nodes are always available, and there are no warnings.
"""

from __future__ import annotations

from math import exp, expm1

from rmetric._util.errors import require


def exact_ettr(
    *, mtbf: float, interval: float, blocking: float, durable: float, restart: float
) -> float:
    """ETTR of a long job with regular saves, without approximation.

    After a failure, a period of restart + interval + durable without another failure leads to the
    first new saved state; from then on there is one for each interval + blocking. Renewal theory
    gives

        (D / M) exp(-(u + D + d) / M) / (1 - exp(-(D + w) / M))

    which for d = w is Daly's (2006, equation 20). Raises ValueError for saves that overlap.
    """
    most = interval + blocking
    wanted = f"from blocking, {blocking}, to interval + blocking, {most}"
    require("durable", durable, blocking <= durable <= most, wanted)
    stretch = restart + interval + durable
    return interval / mtbf * exp(-stretch / mtbf) / -expm1(-(interval + blocking) / mtbf)


def unsaved_ettr(*, mtbf: float, work: float, restart: float) -> float:
    """ETTR of a job of `work` seconds without checkpoints: each failure restarts it.

    The expected wall-clock time is (M + u')(exp(W / M) - 1), u' the expected restart. The ratio
    is W over that, which is practically 0 for W far above M.
    """
    if work / mtbf > 700.0:
        return 0.0
    restarted = mtbf * expm1(restart / mtbf)
    return work / ((mtbf + restarted) * expm1(work / mtbf))


def most_an_emergency_saves(
    *, mtbf: float, interval: float, durable: float, recall: float
) -> float:
    """Upper bound of the gain of warnings in the ratio, to first order in 1 / M."""
    return recall * (interval / 2.0 + durable) / mtbf


def hit_saves(*, interval: float, blocking: float, least_gap: float) -> float:
    """Seconds that a warning just in time for a save is worth, to first order in 1 / M.

    The warning comes at any time in the interval. Below `least_gap` of the interval nothing is
    saved; above it the computation since the last save is kept at the cost of one more save.
    """
    return interval * (1.0 - least_gap**2) / 2.0 - blocking * (1.0 - least_gap)


def false_alarm_costs(*, blocking: float, least_gap: float) -> float:
    """Seconds that a rare false alarm costs at Young/Daly's interval, to first order in 1 / M.

    Less than its save, because the next regular one comes a whole interval later. A save
    made at the share x of an interval costs w + x² D² / 2M there, where a training spends
    2 w / D of its time on saves and lost work anyway: w (1 - x)² more. An alarm before
    `least_gap` waits for it.
    """
    left = 1.0 - least_gap
    return blocking * (left**2 * least_gap + left**3 / 3.0)


def gpu_days_lost(
    *, failures_per_1000_gpu_days: float, num_gpus: int, lost_seconds: float
) -> float:
    """GPU-days of 1,000 that a job loses to failures of its training.

    With x = r N L / (1000 * 86400), r the failures in 1,000 GPU-days of training, N the GPUs and
    L the seconds that all of them lose at a failure: 1000 x / (1 + x). Source: renewal-reward
    theorem; a cycle is 1000 / (r N) days of training and L seconds that are lost. To first order
    r N L / 86400, so that only r N, the failures of the job in a time, matters.
    """
    x = failures_per_1000_gpu_days * num_gpus * lost_seconds / (1000.0 * 86_400.0)
    return 1000.0 * x / (1.0 + x)


def lost_by_hand(
    *, notice: float, interval: float, durable: float, restart: float, at_once: float = 0.0
) -> float:
    """Seconds lost at a failure of the training that a person repairs.

    D / 2 + d + u + (1 - z) (n + D), z (`at_once`) the share of failures that end by themselves in
    NaN and are restarted at once from the last save. The others spoil the weights for n (`notice`)
    seconds. As their onset is uncertain and the last save may be tainted, the restart is from the
    save before.
    """
    return interval / 2.0 + durable + restart + (1.0 - at_once) * (notice + interval)


def lost_with_rescue(
    *, averted: float, held: float, extra: float, waiting: float, unrescued: float, false: float
) -> float:
    """Seconds lost at a failure of the training under rescue.

    e + q w + (1 - p - q) L + f: e (`extra`) are the steps that are tried again, in seconds, p and
    q the shares that are averted and held, w (`waiting`) the time until a held run trains again,
    L (`unrescued`) what a failure costs without rescue, f (`false`) the rescues of runs that do
    not fail, to one that does.
    """
    return extra + held * waiting + (1.0 - averted - held) * unrescued + false
