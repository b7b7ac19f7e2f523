"""Ways to bring a signal to a scale from 0 to 1, one a file."""

from rmetric.normalisers.min_max import SlidingMinMax

__all__ = ["SlidingMinMax"]
