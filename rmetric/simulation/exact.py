"""exp, log and a half cosine from additions, multiplications and divisions alone.

NumPy's and the C library's versions differ in the last bit between processors,
and a diverging run makes that bit visible. IEEE arithmetic does not differ, so
with these the same seed gives the same log on every machine. Good to about two
units in the last place.
"""

from __future__ import annotations

from math import factorial

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LN2_HIGH = 0.6931471803691238  # the leading bits, so that k * high is exact
_LN2_LOW = 1.9082149292705877e-10
_LOG2_E = 1.4426950408889634
_SQRT_HALF = 0.7071067811865476
_PI = 3.141592653589793


_LOG_SERIES = [1.0 / n for n in range(23, 0, -2)]
_EXP_SERIES = [1.0 / factorial(n) for n in range(10, -1, -1)]


def log(x: Floats) -> Floats:
    """Natural logarithm of positive, finite numbers; nan for inf and nan."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    exponent = exponent - small
    # log m = 2 artanh((m - 1) / (m + 1)), as a series in the square
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(_LOG_SERIES, ratio * ratio)
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * ratio * series)


def exp(x: Floats) -> Floats:
    """Exponential function, for |x| up to 700; nan for nan."""
    halvings = np.rint(x * _LOG2_E)
    rest = (x - halvings * _LN2_HIGH) - halvings * _LN2_LOW
    # A quarter of the rest needs a shorter series; squaring twice puts it back.
    root = _polynomial(_EXP_SERIES, 0.25 * rest)
    root *= root
    root *= root
    return np.ldexp(root, halvings.astype(np.int32))


def half_cosine(fraction: Floats) -> Floats:
    """(1 + cos(pi f)) / 2: from 1 at f = 0 to 0 at f = 1."""
    angle = _PI * (0.5 - fraction)
    sine = [(-1.0) ** n / factorial(2 * n + 1) for n in range(11, -1, -1)]
    return 0.5 + 0.5 * angle * _polynomial(sine, angle * angle)


def _polynomial(coefficients: list[float], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total
