from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from secateur.errors import StoreError
from secateur.experiment.compare import (
    INTERVALS,
    against_baseline,
    batch_interval,
    compare,
    excludes_zero,
    p_value_range,
    paired,
    q_values,
    summary,
)
from secateur.experiment.grid import Cell
from secateur.experiment.paper import paper_row, spread_of
from secateur.experiment.store import Record, read_tables
from secateur.methods import label
from stores import failed, fill, judged, units, with_top1

SEEDS = range(20)


# The statistics


@pytest.mark.parametrize("seed", SEEDS)
def test_paired_tests_are_those_of_two_samples_and_of_statsmodels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 9))
    ours, theirs = rng.normal(0.5, 1, n), rng.normal(0, 2, n)
    found = paired(ours - theirs)
    assert found.n == n
    assert found.mean == pytest.approx((ours - theirs).mean())
    assert found.t_p == pytest.approx(scipy.stats.ttest_rel(ours, theirs).pvalue)
    described = DescrStatsW(ours - theirs)
    assert found.deviation == pytest.approx(described.std * math.sqrt(n / (n - 1)))
    assert found.t_p == pytest.approx(described.ttest_mean(0)[1])
    assert found.t == pytest.approx(described.tconfint_mean(0.05))
    assert excludes_zero(found.t) == (found.t_p < 0.05)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [2, 4, 5])
def test_the_bootstrap_intervals_are_those_of_every_resample_there_is(n: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=n)
    means = np.array([np.mean(draw) for draw in itertools.product(values, repeat=n)])
    found = paired(values)
    assert found.resamples == len(means) == n**n
    assert found.percentile == pytest.approx((np.quantile(means, 0.025), np.quantile(means, 0.975)))
    assert found.bca == pytest.approx(bca(values, means))
    assert paired(values, seed=1) == found


def bca(values: np.ndarray[Any, Any], means: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """The BCa interval by Efron's formulas: the bias by the share of resamples below the mean, the skew by the jackknife."""
    normal = scipy.stats.norm
    bias = normal.ppf(((means < values.mean()).mean() + (means <= values.mean()).mean()) / 2)
    left_out = np.array([np.delete(values, i).mean() for i in range(len(values))])
    apart = left_out.mean() - left_out
    skew = (apart**3).sum() / (6 * (apart**2).sum() ** 1.5)
    levels = [bias + normal.ppf(level) for level in (0.025, 0.975)]
    return tuple(float(np.quantile(means, normal.cdf(bias + level / (1 - skew * level)))) for level in levels)


def test_the_bootstrap_of_many_pairs_draws_its_resamples() -> None:
    values = np.random.default_rng(0).normal(size=20)
    found = paired(values)
    assert found.resamples == 10_000
    for interval, method in ((found.percentile, "percentile"), (found.bca, "BCa")):
        theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=50_000, method=method, rng=1).confidence_interval
        assert interval == pytest.approx(theirs, abs=0.02)
    assert paired(values) == found


def test_five_pairs_make_both_bootstraps_too_narrow_and_the_t_interval_right() -> None:
    rng = np.random.default_rng(0)
    found = [paired(rng.normal(size=5)) for _ in range(1000)]
    covers = {name: np.mean([getattr(f, name)[0] <= 0 <= getattr(f, name)[1] for f in found]) for name in INTERVALS}
    assert 0.82 < covers["percentile"] < 0.88 and 0.82 < covers["bca"] < 0.88  # docs/experiments.md says 85%
    assert 0.93 < covers["t"] < 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_wilcoxon_is_exact(seed: int) -> None:
    values = np.random.default_rng(seed).normal(0.7, 1, 5)
    ranks = scipy.stats.rankdata(np.abs(values))
    sums = [sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign) for signs in itertools.product((0, 1), repeat=5)]
    mine = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    low, high = min(mine, sum(ranks) - mine), max(mine, sum(ranks) - mine)
    share = sum(s <= low or s >= high for s in sums) / len(sums)
    assert paired(values).wilcoxon_p == pytest.approx(min(1.0, share))


def test_five_pairs_that_all_agree_cannot_bring_wilcoxon_below_a_sixteenth() -> None:
    found = paired([-1.0, -2.0, -3.0, -4.0, -5.0])
    assert found.wilcoxon_p == pytest.approx(1 / 16)
    assert found.t_p < 0.05


def test_the_bootstrap_of_five_pairs_is_narrower_than_the_t_interval() -> None:
    for seed in SEEDS:
        found = paired(np.random.default_rng(seed).normal(size=5))
        assert found.t[0] < found.percentile[0] < found.percentile[1] < found.t[1]


@pytest.mark.parametrize(("values", "p"), [([], math.nan), ([1.0], math.nan), ([0.0] * 5, 1.0), ([2.0] * 5, math.nan)])
def test_what_no_test_can_judge_has_no_p_value(values: list[float], p: float) -> None:
    found = paired(values)
    assert found.n == len(values)
    assert [found.t_p, found.wilcoxon_p] == pytest.approx([p, p], nan_ok=True)
    assert found.mean == pytest.approx(np.mean(values) if values else math.nan, nan_ok=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_q_values_are_those_of_statsmodels(seed: int) -> None:
    p = np.random.default_rng(seed).uniform(size=30) ** 3
    assert q_values(list(p)) == pytest.approx(multipletests(p, method="fdr_bh")[1])


def test_tests_without_a_p_value_have_no_q_value_and_do_not_count() -> None:
    p = [0.01, math.nan, 0.04, 0.03]
    q = q_values(p)
    assert math.isnan(q[1])
    assert [q[0], q[2], q[3]] == pytest.approx(multipletests([0.01, 0.04, 0.03], method="fdr_bh")[1])
    assert q_values([]) == [] and math.isnan(q_values([math.nan])[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_batch_interval_of_one_seed_is_a_t_interval_over_its_batches(seed: int) -> None:
    row = np.random.default_rng(seed).normal(size=12)
    mean, interval = batch_interval([row], same_batches=True)
    assert mean == pytest.approx(row.mean())
    assert interval == pytest.approx(DescrStatsW(row).tconfint_mean(0.05))


def test_seeds_on_the_same_batches_are_averaged_batch_by_batch_first() -> None:
    rng = np.random.default_rng(0)
    common = rng.normal(size=40)
    rows = [common + rng.normal(0, 0.01, 40) for _ in range(5)]
    _, shared = batch_interval(rows, same_batches=True)
    assert shared == pytest.approx(DescrStatsW(np.mean(rows, axis=0)).tconfint_mean(0.05))


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_an_interval_over_batches_of_several_seeds_covers_the_truth_also_where_seeds_drew_the_same_images(share: float) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        common, own = rng.normal(0.3, 1, 40), rng.normal(0.3, 1, (3, 40))
        rows = [np.where(rng.random(40) < share, common, row) for row in own]
        low, high = batch_interval(rows, same_batches=False)[1]
        hits += low <= 0.3 <= high
    assert hits / 400 >= 0.93
    assert share < 1 or hits / 400 <= 0.98


@pytest.mark.parametrize("seed", SEEDS)
def test_the_p_value_of_a_paired_test_lies_in_the_range_that_the_deviations_allow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours, theirs = rng.normal(0, 1, 5), rng.normal(1, 2, 5) * rng.choice((-1, 1))
    low, high = p_value_range(float((ours - theirs).mean()), (float(ours.std(ddof=1)), float(theirs.std(ddof=1))), 5)
    assert low <= scipy.stats.ttest_rel(ours, theirs).pvalue <= high


def test_the_counts_of_the_papers_table_11_are_among_those_that_its_means_and_deviations_allow() -> None:
    models = ["gpt2", "gpt2-medium", "facebook/opt-125m", "facebook/opt-350m", "EleutherAI/pythia-160m"]
    models += ["EleutherAI/pythia-410m", "Qwen/Qwen2.5-0.5B"]
    rows: list[Any] = [paper_row("4", model) for model in models]
    rows += [paper_row("6", ratio, "gpt2") for ratio in ("3%", "5%", "8%")]
    rows += [paper_row("7", m) for m in ("EleutherAI/pythia-410m", "Qwen/Qwen2.5-0.5B", "facebook/opt-350m", "gpt2-medium")]
    ranges = []
    for row in rows:
        greedy = spread_of(row[label("greedy")])
        for bandit in ("ucb", "ts"):
            ours = spread_of(row[label(bandit)])
            assert greedy and ours
            ranges.append(p_value_range(ours[0] - greedy[0], (ours[1], greedy[1]), 5))
    assert len(ranges) == 28
    surely, possibly = sum(high < 0.05 for _, high in ranges), sum(low < 0.05 for low, _ in ranges)
    assert surely <= 11 <= possibly
    # BH over 116 tests leaves a test at q < 0.05 only if some p is below 0.05 * 116 / 116, and six of them need p's of
    # at most 6 * 0.05 / 116 unless more of the family are as small: enough of the 28 can be.
    assert sum(low < 6 * 0.05 / 116 for low, _ in ranges) >= 6


# The comparisons


def test_a_comparison_that_two_tables_share_is_one_test(tmp_path: Path) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        other = record.settings.pulls_per_step == 64 and method == "greedy"  # greedy of Table 8
        return judged(with_top1(record, -0.01 * i - 0.001 * len(method) * i * i), units=units(4 + other))

    fill(tmp_path, "here-deit", of_run)
    family = compare(read_tables(tmp_path))
    # Six methods against two bandits, and greedy of Table 8 besides that of Table 9.
    assert [c.test for c in family] == list(range(1, 2 * 6 + 2 + 1))
    assert sorted({c.tables for c in family}) == [("8",), ("9",)]
    assert {c.baseline for c in family} == {"greedy", "magnitude", "random", "wanda", "taylor", "fisher"}
    with pytest.raises(StoreError, match=r"'ucb'.*fisher, greedy"):
        against_baseline(family, "ucb")


@pytest.mark.parametrize(("differ", "tests"), [(0, 12), (2, 12), (3, 14)])
def test_comparisons_whose_seeds_mostly_chose_the_same_units_are_one_test(tmp_path: Path, differ: int, tests: int) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        other = record.settings.pulls_per_step == 64 and method == "greedy" and i < differ
        drop = 0.01 * i + 0.002 * len(method) * i * i + 0.03 * other
        return judged(with_top1(record, -drop), units=units(4 + other))

    fill(tmp_path, "here-deit", of_run)
    family = compare(read_tables(tmp_path))
    shown = against_baseline(family, "greedy")
    assert (len(family), summary(shown, family).family, len({c.test for c in shown})) == (14, tests, tests - 10)
    for bandit in ("ucb", "ts"):
        nine, eight = (c for c in shown if c.method == bandit)
        assert (nine.test == eight.test) == (tests == 12)
    # Each test enters the correction once, by its largest p.
    p = {number: max(c.result.t_p for c in family if c.test == number) for number in {c.test for c in family}}
    assert [c.q for c in family] == pytest.approx(
        [dict(zip(p, q_values(list(p.values())), strict=True))[c.test] for c in family]
    )


def test_the_baselines_of_the_claims_are_also_corrected_among_themselves(tmp_path: Path) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        return judged(with_top1(record, -0.01 * i - 0.002 * len(method) * i * i), units=units(len(method)))

    fill(tmp_path, "table9", of_run)
    family = compare(read_tables(tmp_path))
    claimed = [c for c in family if c.baseline in ("greedy", "random")]
    assert summary(claimed, family).claimed == len(claimed) == 3 * 2 * 2
    assert [c.q_claimed for c in claimed] == pytest.approx(q_values([c.result.t_p for c in claimed]))
    assert all(math.isnan(c.q_claimed) for c in family if c.baseline == "magnitude")


def test_a_comparison_is_of_the_drop_and_pairs_seed_with_seed(tmp_path: Path) -> None:
    drops = {"ucb": [0.01, 0.02, 0.03, 0.04, 0.06], "greedy": [0.03, 0.03, 0.05, 0.04, 0.09]}

    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        if method == "greedy" and i == 4:
            return failed(with_top1(record, math.nan))
        record = judged(record, zeroed={"batch_losses": (1.0 + i + len(method), 2.0, 4.0)})
        return with_top1(record, -drops.get(method, [0.2] * 5)[i])

    fill(tmp_path, "table8", of_run)
    found = next(c for c in compare(read_tables(tmp_path)) if (c.method, c.baseline) == ("ucb", "greedy"))
    assert (found.result.n, found.planned) == (4, 5)
    assert found.result.mean == pytest.approx(statistics.fmean([-0.02, -0.01, -0.02, 0.0]))
    assert found.batch_mean == pytest.approx(-1.0)
    document = found.to_json()
    assert (document["planned"], document["metric"]) == (5, "top1_drop")  # a drop is not called a change
    assert document["mean"] == found.result.mean
