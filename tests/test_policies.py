from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from secateur.errors import SettingError
from secateur.policies import UCB, ArmStats, Greedy, Policy, Thompson, reward

POLICIES: list[Policy] = [UCB(), UCB(c=0), Thompson(), Greedy()]


def pulled(n_arms: int, pulls: list[tuple[int, float]]) -> ArmStats:
    stats = ArmStats(n_arms)
    for arm, value in pulls:
        stats.update(arm, value)
    return stats


def random_pulls(n_arms: int, n: int, seed: int) -> list[tuple[int, float]]:
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(n_arms)), float(rng.random())) for _ in range(n)]


@pytest.mark.parametrize("temperature", [0.001, 0.02, 1.0, 50.0])
def test_no_damage_earns_one_half_at_any_temperature(temperature: float) -> None:
    assert reward(0.0, temperature) == 0.5


@pytest.mark.parametrize(("damage", "temperature"), [(0.02, 0.02), (-0.03, 0.02), (0.5, 0.1), (-2.0, 1.0), (0.004, 0.02)])
def test_reward_is_equation_19(damage: float, temperature: float) -> None:
    assert reward(damage, temperature) == pytest.approx(1 / (1 + math.exp(damage / temperature)), rel=1e-15)


def test_reward_falls_as_damage_grows() -> None:
    rewards = [reward(float(damage), 0.02) for damage in np.linspace(-0.5, 0.5, 401)]
    assert all(less > more for less, more in itertools.pairwise(rewards))


@pytest.mark.parametrize("damage", [1e-9, 1.0, 1e3, 1e300, 1.7e308])
def test_extreme_damages_stay_within_0_and_1_and_never_tie_with_a_broken_one(damage: float) -> None:
    for temperature in (1e-300, 0.02, 1e6):
        assert 0 < reward(damage, temperature) <= 0.5
        assert 0.5 <= reward(-damage, temperature) <= 1


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_a_non_finite_damage_earns_nothing(damage: float) -> None:
    assert reward(damage, 0.02) == 0


def test_running_means_equal_the_plain_means_of_each_arms_rewards() -> None:
    pulls = random_pulls(7, 500, seed=1)
    stats = pulled(7, pulls)
    for arm in range(7):
        rewards = [value for pulled_arm, value in pulls if pulled_arm == arm]
        assert stats.counts[arm] == len(rewards)
        assert stats.means[arm] == pytest.approx(math.fsum(rewards) / len(rewards), rel=1e-12)


def test_pseudo_counts_equal_the_updates_of_equations_24_and_26_made_one_by_one() -> None:
    alpha, beta = [1.0] * 5, [1.0] * 5
    stats = ArmStats(5)
    assert (stats.alpha.tolist(), stats.beta.tolist()) == (alpha, beta)
    for arm, value in random_pulls(5, 200, seed=2):
        stats.update(arm, value)
        alpha[arm] += value
        beta[arm] += 1 - value
        np.testing.assert_allclose(stats.alpha, alpha, rtol=1e-12)
        np.testing.assert_allclose(stats.beta, beta, rtol=1e-12)


def test_posterior_mean_is_pulled_towards_one_half() -> None:
    stats = pulled(3, [(0, 0.9), (1, 0.9), (1, 0.9), (1, 0.9)])
    np.testing.assert_allclose(stats.posterior_means, [1.9 / 3, 3.7 / 5, 0.5])


def test_the_best_arm_has_the_largest_mean_not_the_largest_posterior_mean() -> None:
    stats = pulled(3, [(0, 0.9), (1, 0.85), (1, 0.85), (1, 0.85)])
    assert stats.posterior_means.argmax() == 1
    assert stats.best() == 0


def test_the_best_arm_is_an_evaluated_one_also_when_it_earned_nothing() -> None:
    assert pulled(4, [(2, 0.0)]).best() == 2
    assert pulled(4, [(3, 0.0), (1, 0.1)]).best() == 1


def test_a_broken_arm_loses_to_any_sound_evaluated_arm_whatever_it_earned_before() -> None:
    stats = pulled(3, [(0, 0.99), (1, 0.0)])
    stats.update(0, 0.0, finite=False)
    stats.update(0, 0.99)
    assert stats.means[0] > stats.means[1]
    assert stats.best() == 1
    assert not stats.all_broken


def test_when_every_evaluated_arm_is_broken_the_best_is_still_an_evaluated_one() -> None:
    stats = pulled(4, [(3, 0.6)])
    stats.update(3, 0.0, finite=False)
    stats.update(1, 0.0, finite=False)
    assert stats.all_broken
    assert stats.best() == 3


def test_ucb_evaluates_each_arm_once_before_any_arm_twice() -> None:
    stats, rng = ArmStats(9), np.random.default_rng(0)
    for n in range(9):
        stats.update(UCB().choose(stats, rng), 0.99 if n == 0 else 0.01)
    assert stats.counts.tolist() == [1] * 9


@pytest.mark.parametrize("c", [0, 0.3, 1.5, 10])
def test_ucb_pulls_the_arm_of_the_largest_index_of_equation_22(c: float) -> None:
    rng = np.random.default_rng(3)
    stats = ArmStats(6)
    rewards: list[list[float]] = [[] for _ in range(6)]
    for t in range(300):
        arm = UCB(c=c).choose(stats, rng)
        if t >= 6:
            index = [math.fsum(r) / len(r) + c * math.sqrt(math.log(t) / len(r)) for r in rewards]
            assert arm == index.index(max(index))
        value = float(rng.random())
        rewards[arm].append(value)
        stats.update(arm, value)


@pytest.mark.parametrize("c", [math.nan, math.inf, -math.inf, -0.1])
def test_an_exploration_constant_that_is_negative_or_not_finite_is_refused(c: float) -> None:
    with pytest.raises(SettingError, match=str(c)):
        UCB(c=c)


def test_greedy_pulls_every_arm_once() -> None:
    stats, rng = ArmStats(8), np.random.default_rng(0)
    for n in range(8):
        stats.update(Greedy().choose(stats, rng), 1 / (n + 1))
    assert stats.counts.tolist() == [1] * 8


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
class TestEveryPolicy:
    @pytest.mark.parametrize("n_arms", [1, 2, 13])
    def test_chooses_an_arm_of_the_pool_at_every_point_of_a_step(self, policy: Policy, n_arms: int) -> None:
        rng, stats = np.random.default_rng(4), ArmStats(n_arms)
        for t in range(40):
            arm = policy.choose(stats, rng)
            assert arm in range(n_arms)
            stats.update(arm, 0.0 if t % 5 == 0 else float(rng.random()), finite=t % 5 != 0)

    def test_chooses_the_same_arms_from_the_same_seed(self, policy: Policy) -> None:
        def arms() -> list[int]:
            rng, stats, chosen = np.random.default_rng(5), ArmStats(6), []
            for t in range(50):
                chosen.append(policy.choose(stats, rng))
                stats.update(chosen[-1], (t * 7 % 11) / 11)
            return chosen

        assert arms() == arms()

    def test_leaves_the_statistics_as_they_are(self, policy: Policy) -> None:
        stats = pulled(6, random_pulls(6, 30, seed=6))
        counts, means = stats.counts.copy(), stats.means.copy()
        policy.choose(stats, np.random.default_rng(6))
        np.testing.assert_array_equal(stats.counts, counts)
        np.testing.assert_array_equal(stats.means, means)


@pytest.mark.parametrize("policy", [UCB(), Thompson()], ids=repr)
def test_bandits_find_the_best_of_ten_noisy_arms_and_spend_more_on_it_than_a_uniform_rule(policy: Policy) -> None:
    means = np.array([0.35, 0.45, 0.4, 0.3, 0.5, 0.45, 0.75, 0.4, 0.5, 0.3])
    budget, best, found, spent = 200, 6, 0, 0
    for seed in range(40):
        rng, stats = np.random.default_rng(seed), ArmStats(10)
        for _ in range(budget):
            arm = policy.choose(stats, rng)
            stats.update(arm, float(np.clip(rng.normal(means[arm], 0.15), 0, 1)))
        found += stats.best() == best
        spent += int(stats.counts[best])
    assert found >= 36
    assert spent / 40 > 1.5 * budget / 10
