"""Statistics of paired comparisons: what five seeds can say, and what they cannot.

Plain numbers in, plain numbers out; scipy does the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secateur.errors import MissingExtra

RESAMPLES = 10_000
LEVEL = 0.95

Interval = tuple[float, float]


@dataclass(frozen=True)
class Paired:
    """Paired differences, summed up: negative is in favour of the method where less is better."""

    n: int
    mean: float
    deviation: float
    bootstrap: Interval  # optimistic for few pairs: no resample is more extreme than the most extreme pair
    t_interval: Interval  # as wide as so few pairs of a normal difference deserve
    t_p: float
    wilcoxon_p: float  # two-sided and exact: with five pairs never below 1/16


def paired(differences: Sequence[float] | NDArray[np.float64], seed: int = 0) -> Paired:
    """Mean, intervals and two-sided tests of differences that are independent of each other.

    >>> paired([-1.2, -0.4, -2.0, -0.9, -1.1]).t_interval
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    nothing = (math.nan, math.nan)
    if n < 2:
        return Paired(n, float(values.mean()) if n else math.nan, math.nan, nothing, nothing, math.nan, math.nan)
    stats = _scipy_stats()
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if np.ptp(values) == 0:  # no test has anything to say on differences that are all alike
        p = 1.0 if mean == 0 else math.nan
        return Paired(n, mean, 0.0, (mean, mean), (mean, mean), p, p)
    resampled = stats.bootstrap(
        (values,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    t = stats.ttest_1samp(values, 0.0)
    between = t.confidence_interval(LEVEL)
    return Paired(
        n,
        mean,
        deviation,
        (float(resampled.low), float(resampled.high)),
        (float(between.low), float(between.high)),
        float(t.pvalue),
        float(stats.wilcoxon(values).pvalue),
    )


def batch_interval(
    differences: Iterable[Sequence[float] | NDArray[np.float64]], *, same_batches: bool
) -> tuple[float, Interval]:
    """The mean difference of losses over batches and its interval, for the selections at hand: one row of batches a seed.

    It says how well the evaluation data tell two given selections apart, not how the next seed would choose. Seeds are not
    independent in this: those judged on the same batches are averaged batch by batch first, and those with batches of their
    own drew them from one set, so that their standard errors are averaged and not reduced by their number.
    """
    rows = [np.asarray(row, dtype=float) for row in differences]
    if same_batches and len({len(row) for row in rows}) == 1:
        rows = [np.mean(rows, axis=0)]
    mean = float(np.mean([row.mean() for row in rows])) if rows else math.nan
    if not rows or any(len(row) < 2 for row in rows):
        return mean, (math.nan, math.nan)
    error = float(np.mean([row.std(ddof=1) / math.sqrt(len(row)) for row in rows]))
    half = float(_scipy_stats().t.ppf(0.5 + LEVEL / 2, min(len(row) for row in rows) - 1)) * error
    return mean, (mean - half, mean + half)


def q_values(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg over all the tests that have a p-value; nan where there is none."""
    tested = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    found = [math.nan] * len(p_values)
    if tested:
        adjusted = _scipy_stats().false_discovery_control([p_values[i] for i in tested], method="bh")
        for i, q in zip(tested, adjusted, strict=True):
            found[i] = float(q)
    return found


def excludes_zero(interval: Interval) -> bool:
    return interval[0] > 0 or interval[1] < 0


def p_value_range(mean: float, deviations: tuple[float, float], n: int) -> Interval:
    """The least and the largest p-value of a paired t test that two methods' own deviations allow.

    How two methods go together over seeds is not in a table of means and deviations; the deviation of their difference lies
    between the difference and the sum of their own.
    """
    t = _scipy_stats().t
    low, high = abs(deviations[0] - deviations[1]), sum(deviations)

    def p(deviation: float) -> float:
        return float(2 * t.sf(abs(mean) / (deviation / math.sqrt(n)), n - 1)) if deviation else 0.0 if mean else 1.0

    return p(low), p(high)


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtra("scipy", "experiment", "Comparing runs") from error
    return stats
