"""Comparisons: each bandit against each baseline in each cell, paired over seeds, corrected over the whole family of tests.

The statistics functions take and return plain numbers; scipy does the arithmetic. Reads stores, writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secateur.errors import MissingExtra, StoreError
from secateur.experiment.store import Cell, Record, Table
from secateur.methods import bandits

RESAMPLES = 10_000
LEVEL = 0.95
LANGUAGE = ("4", "6", "7", "10")  # tables whose comparisons form the family of Table 11
HIGHLIGHTED = ("4", "6", "7")  # tables whose comparisons Table 11 counts
ALPHA = 0.05

Interval = tuple[float, float]


@dataclass(frozen=True)
class Paired:
    """Statistics of paired differences; where lower is better, negative favours the method."""

    n: int
    mean: float
    deviation: float
    bootstrap: Interval  # too narrow for few pairs: no resample is more extreme than the most extreme pair
    t_interval: Interval  # assumes normal differences, and is wide for few pairs
    t_p: float
    wilcoxon_p: float  # two-sided and exact, so that five pairs never give less than 1/16


@dataclass(frozen=True)
class Comparison:
    """A method against a baseline in a cell. Differences are signed so that negative favours the method."""

    tables: tuple[str, ...]
    cell: Cell
    method: str
    baseline: str
    planned: int  # pairs; `result` leaves out pairs with a failed or missing run
    result: Paired
    batch_mean: float  # difference of the loss
    batch_interval: Interval
    q: float = float("nan")
    wilcoxon_q: float = float("nan")

    def to_json(self) -> dict[str, Any]:
        cell = self.cell
        about = {name: getattr(cell, name) for name in ("data", "model", "target", "ratio", "vary", "metric")}
        counts = {"tables": list(self.tables), "method": self.method, "baseline": self.baseline, "planned": self.planned}
        result = {name: getattr(self.result, name) for name in Paired.__dataclass_fields__}
        rest = {name: getattr(self, name) for name in ("batch_mean", "batch_interval", "q", "wilcoxon_q")}
        return about | counts | result | rest


def compare(tables: Iterable[Table], *, methods: Sequence[str] | None = None) -> list[Comparison]:
    """Compare each of `methods` (the bandits if None) with each baseline of its cell; q-values are over all of these tests.

    A baseline is a method that is not in `methods`. The family is every test that was run, not only those that are shown or
    came out well.
    """
    methods = bandits() if methods is None else methods
    tests: dict[tuple[Any, ...], tuple[Cell, str, str, list[str]]] = {}
    for table in tables:
        for cell in table.cells:
            for method in (method for method in methods if method in cell.runs):
                for baseline in (other for other in cell.runs if other not in methods):
                    runs = tuple(tuple(cell.keys[name].values()) for name in (method, baseline))
                    # A comparison that is in two tables counts as one test.
                    tests.setdefault(runs, (cell, method, baseline, []))[3].append(table.number)
    comparisons = [_comparison(cell, tuple(dict.fromkeys(numbers)), *names) for cell, *names, numbers in tests.values()]
    q = q_values([comparison.result.t_p for comparison in comparisons])
    wilcoxon_q = q_values([comparison.result.wilcoxon_p for comparison in comparisons])
    return [replace(c, q=q[i], wilcoxon_q=wilcoxon_q[i]) for i, c in enumerate(comparisons)]


def _comparison(cell: Cell, tables: tuple[str, ...], method: str, baseline: str) -> Comparison:
    pairs, planned = cell.paired(method, baseline)
    sign = -1 if cell.task == "image" else 1  # for top-1, higher is better
    result = paired([sign * (record.figure(cell.metric) - other.figure(cell.metric)) for record, other in pairs])
    losses = [[a - b for a, b in zip(_losses(record), _losses(other), strict=True)] for record, other in pairs]
    same = len({record.data_digest for record, _ in pairs}) == 1
    return Comparison(tables, cell, method, baseline, planned, result, *batch_interval(losses, same_batches=same))


def _losses(record: Record) -> tuple[float, ...]:
    assert record.judgement  # the runs of a pair did not fail
    return record.judgement.zeroed.batch_losses


@dataclass(frozen=True)
class Summary:
    """The counts of Table 11."""

    bootstrap: int  # comparisons whose interval excludes zero
    t_interval: int
    p: int  # comparisons below 0.05
    q: int
    family: int
    tested: int  # comparisons of the family that have a p-value


def summary(shown: Sequence[Comparison], family: Sequence[Comparison]) -> Summary:
    """How many of the comparisons shown are significant, counted as in Table 11."""
    return Summary(
        bootstrap=sum(excludes_zero(c.result.bootstrap) for c in shown),
        t_interval=sum(excludes_zero(c.result.t_interval) for c in shown),
        p=sum(c.result.t_p < ALPHA for c in shown),
        q=sum(c.q < ALPHA for c in shown),
        family=len(family),
        tested=sum(not math.isnan(c.result.t_p) for c in family),
    )


def against_baseline(comparisons: Sequence[Comparison], against: str) -> list[Comparison]:
    """The comparisons against one baseline; raises StoreError if there are none."""
    shown = [c for c in comparisons if c.baseline == against]
    if not shown:
        baselines = sorted({c.baseline for c in comparisons})
        raise StoreError(
            f"The store has no comparison against {against!r}"
            + (f"; its baselines are {', '.join(baselines)}." if baselines else ": no cell has a bandit and another method.")
        )
    return shown


# Statistics of a few seeds


def paired(differences: Sequence[float] | NDArray[np.float64], seed: int = 0) -> Paired:
    """Mean, intervals and two-sided tests of independent differences.

    >>> paired([-1.2, -0.4, -2.0, -0.9, -1.1]).t_interval
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    undefined = (math.nan, math.nan)
    if n < 2:
        return Paired(n, float(values.mean()) if n else math.nan, math.nan, undefined, undefined, math.nan, math.nan)
    stats = _scipy_stats()
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if np.ptp(values) == 0:  # the tests need differences that vary
        p = 1.0 if mean == 0 else math.nan
        return Paired(n, mean, 0.0, (mean, mean), (mean, mean), p, p)
    bootstrap = stats.bootstrap(
        (values,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    t = stats.ttest_1samp(values, 0.0)
    t_interval = t.confidence_interval(LEVEL)
    return Paired(
        n,
        mean,
        deviation,
        (float(bootstrap.low), float(bootstrap.high)),
        (float(t_interval.low), float(t_interval.high)),
        float(t.pvalue),
        float(stats.wilcoxon(values).pvalue),
    )


def batch_interval(
    differences: Iterable[Sequence[float] | NDArray[np.float64]], *, same_batches: bool
) -> tuple[float, Interval]:
    """The mean difference of losses over batches and its interval; `differences` has one row of batches per seed.

    It says how well the evaluation data distinguish these selections, not what another seed would select. Seeds are not
    independent here. If they were judged on the same batches, their differences are averaged batch by batch first. If each has
    its own batches, these come from one data set, so that the standard errors are averaged, not reduced by the number of seeds.
    """
    rows = [np.asarray(row, dtype=float) for row in differences]
    if same_batches and len({len(row) for row in rows}) == 1:
        rows = [np.mean(rows, axis=0)]
    mean = float(np.mean([row.mean() for row in rows])) if rows else math.nan
    if not rows or any(len(row) < 2 for row in rows):
        return mean, (math.nan, math.nan)
    error = float(np.mean([row.std(ddof=1) / math.sqrt(len(row)) for row in rows]))
    half_width = float(_scipy_stats().t.ppf(0.5 + LEVEL / 2, min(len(row) for row in rows) - 1)) * error
    return mean, (mean - half_width, mean + half_width)


def q_values(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg q-values over all tests that have a p-value; nan for the others."""
    tested = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    values = [math.nan] * len(p_values)
    if tested:
        adjusted = _scipy_stats().false_discovery_control([p_values[i] for i in tested], method="bh")
        for i, q in zip(tested, adjusted, strict=True):
            values[i] = float(q)
    return values


def excludes_zero(interval: Interval) -> bool:
    return interval[0] > 0 or interval[1] < 0


def p_value_range(mean: float, deviations: tuple[float, float], n: int) -> Interval:
    """The smallest and largest p-value of a paired t test that the two methods' deviations allow.

    A table of means and deviations does not say how two methods correlate over seeds. The deviation of their difference lies
    between the difference and the sum of their deviations.
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
