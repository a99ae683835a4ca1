"""95% intervals of what a page shows, without scipy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

Z = statistics.NormalDist().inv_cdf(0.975)


def t_quantile(freedom: float) -> float:
    """The 97.5% quantile of Student's t, by the expansion of Cornish and Fisher: within 1% from two degrees of freedom on."""
    z, n = Z, freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, 1))


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval of a mean; None for fewer than two values or for one that is not finite."""
    array = np.asarray(values, dtype=float)
    if len(array) < 2 or not np.isfinite(array).all():
        return None
    half = t_quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return float(array.mean()) - half, float(array.mean()) + half


def share_interval(share: float, n: int) -> tuple[float, float] | None:
    """Wilson's interval of a share of n rows."""
    if n < 1 or not 0 <= share <= 1:
        return None
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return middle - half, middle + half
