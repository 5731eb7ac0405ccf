"""The cumulative distribution function of the beta distribution and its inverse, in plain Python."""

from __future__ import annotations

import math

_TINY = 1e-300
"""Replaces zero denominators in Lentz's method."""
_TERMS = 500
"""The most terms of the continued fraction."""


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return min(1.0, max(0.0, x))
    front = math.exp(_log_front(x, a, b))
    # The fraction converges fast only below the mean. Above it, I_x(a, b) = 1 - I_{1 - x}(b, a).
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1.0 - x, b, a) / b


def beta_quantile(share: float, a: float, b: float) -> float:
    """The x with I_x(a, b) = share. Newton's method, with bisection whenever a step would leave the known bracket."""
    if not 0 < share < 1:
        return min(1.0, max(0.0, share))
    low, high, x = 0.0, 1.0, a / (a + b)
    for _ in range(200):
        error = beta_cdf(x, a, b) - share
        low, high = (low, x) if error > 0 else (x, high)
        # The derivative of the distribution function is the density x^(a - 1) (1 - x)^(b - 1) / B(a, b).
        density = math.exp(_log_front(x, a, b) - math.log(x) - math.log1p(-x))
        after = x - error / density if density > 0 else -1.0
        if not low < after < high:
            after = (low + high) / 2
        if error == 0 or after == x or abs(after - x) <= 1e-16 * x or not 0 < after < 1:
            return x
        x = after
    return x


def _log_front(x: float, a: float, b: float) -> float:
    return (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )  # x^a (1 - x)^b / B(a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction 1 / (1 + d1 / (1 + d2 / …)), evaluated front to back (Lentz's method), with

    d(2m) = m (b - m) x / ((a + 2m - 1)(a + 2m)),  d(2m + 1) = -(a + m)(a + b + m) x / ((a + 2m)(a + 2m + 1)).
    """
    value, c, d = 1.0, 1.0, 0.0
    for term in range(_TERMS):
        m = term // 2
        if term == 0:
            step = 1.0
        elif term % 2 == 0:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / _nonzero(1.0 + step * d)
        c = _nonzero(1.0 + step / c)
        value *= c * d
        if term > 0 and abs(1.0 - c * d) < 1e-15:
            break
    return value - 1.0


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
