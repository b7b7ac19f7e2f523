"""Isolation Forest over the past alone, exactly: as if it had infinitely many trees."""

from __future__ import annotations

from math import log, nan

import numpy as np

from rmetric._util.errors import require
from rmetric.detectors.contract import LossDetector
from rmetric.detectors.rolling_baseline import SortedWindow

EULER = 0.5772156649015329


class OnlineIsolationForest(LossDetector):
    """Isolation of the newest loss by random cuts, among the losses before it, upwards.

        score = 2^(-E[h] / c(n)) where the loss is above their median, else 0
        E[h] = sum over the gaps g between sorted losses of
               length of g / length from the loss to the far end of g
        c(n) = 2 (log(n - 1) + 0.577) - 2 (n - 1) / n

    over the last n = `window` losses, the newest included: a forest fitted anew
    at every record on what is past, where the paper's peeks. In one dimension a
    random cut falls into each gap with a chance proportional to its length, so a
    gap parts the loss from others exactly if it is the first to be cut of all
    the gaps up to it: that gives the mean depth over all trees, without drawing
    any. Losses that are equal stay together, as in the original: c of their
    number is added. Trees are cut down to the end, where the original stops at
    depth log2(n), below which there are inliers alone.

    nan until `least` losses are there. A loss that is nan or ±inf scores inf and
    is not remembered.

    Its weakness: the largest of n values is easily parted whatever they are, so
    noise alone reaches 0.7; there is no threshold that is right for all runs.

    Args:
        threshold: between 0 and 1 (0.6, above which the source calls a point an
            outlier; the paper's 'auto' is 0.5).
        window: losses, at least `least` (256, the source's sample).
        least: losses needed, at least 3 (ours: 20).

    Neither was tuned on any log.

    >>> from rmetric import Record
    >>> forest = OnlineIsolationForest(least=5)
    >>> for step, loss in enumerate([2.0, 2.1, 2.2, 2.1, 9.0], start=1):
    ...     _ = forest.update(Record(step=step, training_loss=loss))
    >>> round(forest.score, 2), forest.alarm
    (0.74, True)

    Source: Liu, Ting, Zhou 2008, "Isolation Forest"; the closed form is ours.
    """

    ON_LOGARITHM = False

    def __init__(self, threshold: float = 0.6, window: int = 256, least: int = 20) -> None:
        require("threshold", threshold, 0 < threshold < 1, "between 0 and 1")
        require("least", least, 3 <= least <= window, f"from 3 to the window of {window} losses")
        super().__init__(threshold)
        self.threshold = threshold
        self.least = least
        self._window = SortedWindow(window)

    def _judge(self, x: float) -> float:
        self._window.remember(x)
        return self._isolation(x) if len(self._window) >= self.least else nan

    def _why(self) -> str:
        return (
            f" is easily parted from the {len(self._window) - 1} before it: isolation "
            f"{self.score:.3f}, above {self.threshold:g}"
        )

    def _isolation(self, loss: float) -> float:
        ordered = self._window.ordered
        count = len(ordered)
        if loss <= ordered[count // 2]:
            return 0.0
        # Halved: the span of huge finite values would overflow.
        depth = mean_depth(np.array(ordered) / 2, loss / 2)
        return float(2.0 ** (-depth / usual_depth(count)))


def mean_depth(ordered: np.ndarray, value: float) -> float:
    """Mean depth of `value`, one of the sorted `ordered`, over all isolation trees."""
    below = ordered[: np.searchsorted(ordered, value, "left") + 1]
    above = ordered[np.searchsorted(ordered, value, "right") - 1 :]
    depth = float((np.diff(below) / (value - below[:-1])).sum())
    depth += float((np.diff(above) / (above[1:] - value)).sum())
    return depth + usual_depth(len(ordered) + 2 - len(below) - len(above))


def usual_depth(count: int) -> float:
    """Mean depth of an unsuccessful search in a random binary tree of `count` values."""
    if count <= 2:
        return float(count - 1)
    return 2 * (log(count - 1) + EULER) - 2 * (count - 1) / count
