"""Comparisons: each bandit against each baseline in each cell, paired over seeds, corrected over the whole family of tests.

The statistics functions take and return plain numbers; scipy does the arithmetic. Reads stores, writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secateur.errors import MissingExtra, StoreError
from secateur.experiment.store import Cell, Record, Table
from secateur.methods import bandits
from secateur.units import Unit

RESAMPLES = 10_000  # of a bootstrap, if there are more than MOST_EXACT
MOST_EXACT = 50_000  # with so many resamples or fewer (six pairs have 6^6 = 46,656), every one is taken
LEVEL = 0.95
LANGUAGE = ("4", "6", "7", "10")  # tables whose comparisons form the family of Table 11
HIGHLIGHTED = ("4", "6", "7")  # tables whose comparisons Table 11 counts
CLAIMED = ("greedy", "random")  # the baselines that matter: the same budget without a bandit, and no search at all
ALPHA = 0.05
INTERVALS = ("percentile", "bca", "t")  # fields of Paired

Interval = tuple[float, float]


@dataclass(frozen=True)
class Paired:
    """Statistics of paired differences; where lower is better, negative favours the method."""

    n: int
    mean: float
    deviation: float
    percentile: Interval  # bootstrap; too narrow for few pairs: no resample is more extreme than the most extreme pair
    bca: Interval  # the bootstrap corrected for bias and skew; too narrow as well
    t: Interval  # assumes normal differences, and is wide for few pairs
    t_p: float
    wilcoxon_p: float  # two-sided and exact, so that five pairs never give less than 1/16
    resamples: int = 0  # of the bootstrap: n^n if all were taken, RESAMPLES if they were drawn


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
    test: int = 0  # its number in the family; comparisons with mostly the same selections are one test
    q: float = float("nan")  # over the family
    wilcoxon_q: float = float("nan")
    q_claimed: float = float("nan")  # over the tests against CLAIMED alone; nan for the others

    def to_json(self) -> dict[str, Any]:
        cell = self.cell
        about = {name: getattr(cell, name) for name in ("data", "model", "target", "ratio", "vary")}
        about["metric"] = "top1_drop" if cell.task == "image" else cell.metric  # a change of Top-1 has the other sign
        counts = {"tables": list(self.tables), "method": self.method, "baseline": self.baseline, "planned": self.planned}
        result = {name: getattr(self.result, name) for name in Paired.__dataclass_fields__}
        rest = ("batch_mean", "batch_interval", "test", "q", "wilcoxon_q", "q_claimed")
        return about | counts | result | {name: getattr(self, name) for name in rest}


def compare(tables: Iterable[Table], *, methods: Sequence[str] | None = None) -> list[Comparison]:
    """Compare each of `methods` (the bandits if None) with each baseline of its cell; q-values are over all of these tests.

    A baseline is a method that is not in `methods`. The family is every test that was run, not only those that are shown or
    came out well.
    """
    methods = bandits() if methods is None else methods
    found: dict[tuple[Any, ...], tuple[Cell, str, str, list[str]]] = {}
    for table in tables:
        for cell in table.cells:
            for method in (method for method in methods if method in cell.runs):
                for baseline in (other for other in cell.runs if other not in methods):
                    runs = tuple(tuple(cell.keys[name].values()) for name in (method, baseline))
                    # A comparison of the same runs that is in two tables is one comparison.
                    found.setdefault(runs, (cell, method, baseline, []))[3].append(table.number)
    comparisons = [_comparison(cell, tuple(dict.fromkeys(numbers)), *names) for cell, *names, numbers in found.values()]
    return _corrected(comparisons)


def _corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with their tests' numbers and q-values. A test of several comparisons has the largest p of theirs."""
    tests: list[list[Comparison]] = []
    numbers = []
    for comparison in comparisons:
        number = next((i for i, test in enumerate(tests) if _mostly_the_same(test[0], comparison)), len(tests))
        if number == len(tests):
            tests.append([])
        tests[number].append(comparison)
        numbers.append(number)
    p = [_largest([c.result.t_p for c in test]) for test in tests]
    q = q_values(p)
    wilcoxon_q = q_values([_largest([c.result.wilcoxon_p for c in test]) for test in tests])
    q_claimed = q_values([p[i] if test[0].baseline in CLAIMED else math.nan for i, test in enumerate(tests)])
    return [
        replace(c, test=i + 1, q=q[i], wilcoxon_q=wilcoxon_q[i], q_claimed=q_claimed[i])
        for c, i in zip(comparisons, numbers, strict=True)
    ]


def _mostly_the_same(one: Comparison, other: Comparison) -> bool:
    """Whether the two are of one method and baseline in one place, and most of their pairs chose the same units.

    Such as Tables 8 and 9, where greedy may try more candidates in one and yet end with the same units: almost the same
    numbers would count as two tests.
    """
    if (one.method, one.baseline, one.cell.place) != (other.method, other.baseline, other.cell.place):
        return False
    ours, theirs = (_chosen(comparison) for comparison in (one, other))
    equal = sum(theirs.get(base) == chosen for base, chosen in ours.items())
    return 2 * equal > max(len(ours), len(theirs))


def _chosen(comparison: Comparison) -> dict[tuple[str, int | None], tuple[frozenset[Unit], ...]]:
    """What the method and the baseline chose, for each pair; pairs are known by what judged them and by their seed."""
    pairs, _ = comparison.cell.paired(comparison.method, comparison.baseline)
    return {(a.base_key, a.seed if b.seed is None else b.seed): (_units(a), _units(b)) for a, b in pairs}


def _units(record: Record) -> frozenset[Unit]:
    assert record.judgement  # the runs of a pair did not fail
    return frozenset(record.judgement.units)


def _largest(p_values: Sequence[float]) -> float:
    return max((p for p in p_values if not math.isnan(p)), default=math.nan)


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

    percentile: int  # comparisons whose interval excludes zero
    bca: int
    t: int
    p: int  # comparisons below 0.05
    q: int
    q_claimed: int
    tests: int  # among the comparisons; fewer than these if some are one test
    family: int  # tests in all
    tested: int  # those of them that have a p-value
    claimed: int  # those of them that are against CLAIMED


def summary(shown: Sequence[Comparison], family: Sequence[Comparison]) -> Summary:
    """How many of the comparisons shown are significant, counted as in Table 11."""
    return Summary(
        percentile=sum(excludes_zero(c.result.percentile) for c in shown),
        bca=sum(excludes_zero(c.result.bca) for c in shown),
        t=sum(excludes_zero(c.result.t) for c in shown),
        p=sum(c.result.t_p < ALPHA for c in shown),
        q=sum(c.q < ALPHA for c in shown),
        q_claimed=sum(c.q_claimed < ALPHA for c in shown),
        tests=len({c.test for c in shown}),
        family=len({c.test for c in family}),
        tested=len({c.test for c in family if not math.isnan(c.q)}),
        claimed=len({c.test for c in family if c.baseline in CLAIMED}),
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

    >>> paired([-1.2, -0.4, -2.0, -0.9, -1.1]).t
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    undefined = (math.nan, math.nan)
    if n < 2:
        mean = float(values.mean()) if n else math.nan
        return Paired(n, mean, math.nan, undefined, undefined, undefined, math.nan, math.nan)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if np.ptp(values) == 0:  # the tests need differences that vary
        p = 1.0 if mean == 0 else math.nan
        return Paired(n, mean, 0.0, (mean, mean), (mean, mean), (mean, mean), p, p)
    stats = _scipy_stats()
    means = _bootstrap_means(values, seed)
    t = stats.ttest_1samp(values, 0.0)
    return Paired(
        n,
        mean,
        deviation,
        _bootstrap(values, means, "percentile"),
        _bootstrap(values, means, "BCa"),
        _ends(t.confidence_interval(LEVEL)),
        float(t.pvalue),
        float(stats.wilcoxon(values).pvalue),
        len(means),
    )


def _bootstrap_means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """The mean of every resample that there is; of RESAMPLES drawn ones if there are too many."""
    n = len(values)
    if n**n <= MOST_EXACT:
        drawn = np.indices((n,) * n).reshape(n, -1)
    else:
        drawn = np.random.default_rng(seed).integers(n, size=(n, RESAMPLES))
    means: NDArray[np.float64] = values[drawn].mean(axis=0)
    return means


def _bootstrap(values: NDArray[np.float64], means: NDArray[np.float64], method: str) -> Interval:
    """The interval that scipy makes of these resamples' means."""
    known = SimpleNamespace(bootstrap_distribution=means)
    found = _scipy_stats().bootstrap(
        (values,), np.mean, confidence_level=LEVEL, n_resamples=0, bootstrap_result=known, method=method
    )
    return _ends(found.confidence_interval)


def _ends(interval: Any) -> Interval:
    return float(interval.low), float(interval.high)


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
