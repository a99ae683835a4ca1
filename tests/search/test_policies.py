from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import pytest

from fakes import POLICIES
from secateur.errors import SettingError
from secateur.search.policies import (
    UCB,
    ArmStats,
    Array,
    Auto,
    Belief,
    Choice,
    Greedy,
    Heard,
    Policy,
    Request,
    Thompson,
    check_search,
    reward,
    sureness,
)

EVERY: list[Policy] = [*POLICIES, UCB(c=0), Auto(carry=0), Auto(carry=1)]
World = Callable[[int, int], Heard]  # what a pull of an arm measures, the how-manieth pull of the conversation it may be


@dataclass
class Talk:
    """A conversation with a policy, from its first request to its choice."""

    requests: list[Request] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    choice: Choice = field(default_factory=lambda: Choice(-1))

    @property
    def counts(self) -> Counter[int]:
        return Counter(heard.arm for heard in self.heard)

    @property
    def broken(self) -> set[int]:
        return {heard.arm for heard in self.heard if heard.broken}


def talk(
    policy: Policy, world: World, n_arms: int, budget: int, *, seed: int = 0, beliefs: Sequence[Belief] | None = None
) -> Talk:
    """Answers a policy's requests, and fails where it spends more than its budget or asks for what there is not."""
    made = Talk()
    conversation = policy.run(beliefs or [Belief()] * n_arms, budget, np.random.default_rng(seed))
    try:
        request = next(conversation)
        while True:
            assert request.arms and request.pulls >= 1
            assert set(request.arms) <= set(range(n_arms))
            assert len(made.heard) + len(request.arms) * request.pulls <= budget
            made.requests.append(request)
            first = len(made.heard)
            made.heard += [world(arm, first + i) for i, arm in enumerate(request.arms * request.pulls)]
            request = conversation.send(made.heard[first:])
    except StopIteration as end:
        made.choice = end.value
    return made


def heard(arm: int, *damages: float, blamed: bool = True) -> Heard:
    mean = sum(damages) / len(damages)
    return Heard(arm, damages, reward(mean, 0.1), blamed and not math.isfinite(mean))


def earning(value: Callable[[int, int], float]) -> World:
    """Rewards alone; what an arm does not earn is its damage."""

    def world(arm: int, n: int) -> Heard:
        earned = value(arm, n)
        return Heard(arm, (1 - earned,), earned)

    return world


def noisy_rewards(means: Array, seed: int) -> World:
    rng = np.random.default_rng([seed, 1])
    return earning(lambda arm, n: float(np.clip(rng.normal(means[arm], 0.15), 0, 1)))


def noisy(arm: int, n: int) -> Heard:
    """Arm 4 of any ten is best."""
    rng = np.random.default_rng([arm, n])
    return heard(arm, *(0.02 * (arm - 4) ** 2 + 0.05 * rng.normal(size=2)))


def every_third_broken(arm: int, n: int) -> Heard:
    return heard(arm, math.nan, 0.1) if arm % 3 == 0 else noisy(arm, n)


def all_broken(arm: int, n: int) -> Heard:
    return heard(arm, math.inf, 0.1)


def fickle(arm: int, n: int) -> Heard:
    """Every arm breaks the loss now and then; arm 4 looks best all the same."""
    return heard(arm, math.nan, math.nan) if n % 4 == arm % 4 else noisy(arm, n)


def bases_broken(arm: int, n: int) -> Heard:
    """Half of the base losses are not finite, which is no arm's fault."""
    return heard(arm, math.nan, math.nan, blamed=False) if n % 2 else noisy(arm, n)


def nothing_finite(arm: int, n: int) -> Heard:
    return heard(arm, math.nan, math.nan, blamed=False)


def equal(arm: int, n: int) -> Heard:
    return heard(arm, 0.0, 0.0)


WORLDS: list[World] = [noisy, every_third_broken, all_broken, fickle, bases_broken, nothing_finite, equal]


def some_known(n_arms: int) -> list[Belief]:
    return [Belief(), *(Belief(0.1 * (arm % 4), 0.01, 1 + arm % 3) for arm in range(1, n_arms))]


@pytest.mark.parametrize("policy", EVERY, ids=repr)
class TestEveryPolicy:
    """What `select` counts on, whichever policy it has."""

    @pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.__name__)
    @pytest.mark.parametrize(
        ("n_arms", "budget"),
        [(1, 1), (1, 2), (1, 40), (2, 1), (2, 2), (2, 3), (13, 1), (13, 2), (13, 5), (13, 12), (13, 13), (13, 14), (13, 200)],
    )
    def test_keeps_to_its_budget_and_its_arms_and_names_one_it_measured(
        self, policy: Policy, world: World, n_arms: int, budget: int
    ) -> None:
        for beliefs, seed in itertools.product((None, some_known(n_arms)), range(3)):
            made = talk(policy, world, n_arms, budget, seed=seed, beliefs=beliefs)  # checks the budget and the arms
            assert made.requests
            assert made.counts[made.choice.arm] > 0
            sound = set(made.counts) - made.broken
            assert made.choice.arm in (sound or made.broken)
            assert made.choice.sure is None or 0 <= made.choice.sure <= 1
            if not sound - {made.choice.arm}:
                assert made.choice.sure is None  # there is nothing to compare with

    @pytest.mark.parametrize("world", [noisy, every_third_broken], ids=lambda world: world.__name__)
    @pytest.mark.parametrize("budget", [1, 6, 50])
    def test_depends_on_nothing_but_the_answers_and_the_generator(self, policy: Policy, world: World, budget: int) -> None:
        first = talk(policy, world, 9, budget, seed=5)
        talk(policy, all_broken, 4, 20, seed=6)  # leaves nothing behind
        assert written(talk(policy, world, 9, budget, seed=5)) == written(first)
        assert written(talk(copy.deepcopy(policy), world, 9, budget, seed=5)) == written(first)

    def test_two_conversations_at_a_time_do_not_meddle(self, policy: Policy) -> None:
        alone = talk(policy, noisy, 5, 8, seed=1)
        here, there = (policy.run([Belief()] * 5, 8, np.random.default_rng(seed)) for seed in (1, 2))
        request, other = next(here), next(there)
        requests, n = [request], 0
        with pytest.raises(StopIteration) as end:
            while True:
                there_heard = [heard(arm, 1.0, -1.0) for arm in other.arms]
                answers = [noisy(arm, n + i) for i, arm in enumerate(request.arms)]
                n += len(answers)
                request = here.send(answers)
                requests.append(request)
                try:
                    other = there.send(there_heard)
                except StopIteration:
                    there = policy.run([Belief()] * 5, 8, np.random.default_rng(3))
                    other = next(there)
        assert (requests, end.value.value) == (alone.requests, alone.choice)

    def test_leaves_the_beliefs_as_they_are(self, policy: Policy) -> None:
        beliefs = some_known(7)
        before = repr(beliefs)
        talk(policy, noisy, 7, 30, beliefs=beliefs)
        assert repr(beliefs) == before

    @pytest.mark.parametrize("remaining", [1, 2, 36, 1152])
    @pytest.mark.parametrize("budget", [1, 2, 32])
    def test_wants_at_least_one_arm(self, policy: Policy, remaining: int, budget: int) -> None:
        assert policy.pool_size(remaining, budget) >= 1

    def test_chooses_the_best_of_the_arms_it_measured_where_there_is_no_noise(self, policy: Policy) -> None:
        damages = np.random.default_rng(1).permutation(np.linspace(-0.2, 0.3, 12)).tolist()
        for seed, budget in itertools.product(range(5), (1, 4, 12, 60)):
            made = talk(policy, lambda arm, _: heard(arm, damages[arm], damages[arm]), 12, budget, seed=seed)
            assert made.choice.arm == min(made.counts, key=damages.__getitem__)

    def test_chooses_a_sound_arm_however_harmful_before_a_broken_one(self, policy: Policy) -> None:
        made = talk(policy, lambda arm, _: heard(arm, 1e6 if arm == 3 else math.nan), 8, 30)
        if made.counts[3]:
            assert made.choice.arm == 3


def written(made: Talk) -> str:
    return repr(made)  # nan is equal to nan here


def pulled(n_arms: int, pulls: list[tuple[int, float]]) -> ArmStats:
    stats = ArmStats(n_arms)
    stats.hear([Heard(arm, (), value) for arm, value in pulls])
    return stats


def broke(arm: int) -> list[Heard]:
    return [Heard(arm, (math.nan,), 0.0, broken=True)]


def random_pulls(n_arms: int, n: int, seed: int) -> list[tuple[int, float]]:
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(n_arms)), float(rng.random())) for _ in range(n)]


# Rewards


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


@pytest.mark.parametrize(
    ("pulls_per_step", "temperature", "shown"), [(0, 0.02, "0"), (-1, 0.02, "-1"), (8, 0.0, "0.0"), (8, math.nan, "nan")]
)
def test_a_search_that_cannot_work_is_refused_with_the_value(pulls_per_step: int, temperature: float, shown: str) -> None:
    with pytest.raises(SettingError, match=f" {shown},"):
        check_search(pulls_per_step=pulls_per_step, temperature=temperature)


# What the pulls of a step have shown


def test_running_means_equal_the_plain_means_of_each_arms_rewards() -> None:
    pulls = random_pulls(7, 500, seed=1)
    stats = pulled(7, pulls)
    assert stats.pulls == 500
    for arm in range(7):
        rewards = [value for pulled_arm, value in pulls if pulled_arm == arm]
        assert stats.counts[arm] == len(rewards)
        assert stats.means[arm] == pytest.approx(math.fsum(rewards) / len(rewards), rel=1e-12)


def test_pseudo_counts_equal_the_updates_of_equations_24_and_26_made_one_by_one() -> None:
    alpha, beta = [1.0] * 5, [1.0] * 5
    stats = ArmStats(5)
    assert (stats.alpha.tolist(), stats.beta.tolist()) == (alpha, beta)
    for arm, value in random_pulls(5, 200, seed=2):
        stats.hear([Heard(arm, (), value)])
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
    assert stats.best() == stats.choice().arm == 0


def test_the_best_arm_is_an_evaluated_one_also_when_it_earned_nothing() -> None:
    assert pulled(4, [(2, 0.0)]).best() == 2
    assert pulled(4, [(3, 0.0), (1, 0.1)]).best() == 1


def test_a_broken_arm_loses_to_any_sound_evaluated_arm_whatever_it_earned_before() -> None:
    stats = pulled(3, [(0, 0.99), (1, 0.0)])
    stats.hear([*broke(0), Heard(0, (), 0.99)])
    assert stats.means[0] > stats.means[1]
    assert stats.best() == 1
    assert not stats.all_broken


def test_when_every_evaluated_arm_is_broken_the_best_is_still_an_evaluated_one() -> None:
    stats = pulled(4, [(3, 0.6)])
    stats.hear([*broke(3), *broke(1)])
    assert stats.all_broken
    assert stats.best() == 3
    assert stats.choice() == Choice(3, None)


# How sure a choice is


def test_sureness_is_how_often_the_best_is_below_the_lowest_of_the_others() -> None:
    means, variances = np.array([0.3, 0.1, 0.2, 0.0]), np.array([0.01, 0.02, 0.03, 0.0])
    others = np.array([True, True, True, False])
    draws = np.random.default_rng(0).normal(means, np.sqrt(variances), (200_000, 4))
    sure = sureness(1, means, variances, others)
    assert sure == pytest.approx(float((draws[:, 1] < draws[:, 2]).mean()), abs=0.005)
    assert sure == pytest.approx(NormalDist().cdf(0.1 / math.sqrt(0.05)))


def test_equal_arms_are_a_coin_s_toss_and_arms_without_noise_are_not() -> None:
    both = np.array([True, True])
    for variance in (0.0, 0.1, math.inf):
        assert sureness(0, np.array([0.2, 0.2]), np.full(2, variance), both) == 0.5
    assert sureness(0, np.array([0.1, 0.2]), np.zeros(2), both) == 1
    assert sureness(1, np.array([0.1, 0.2]), np.zeros(2), both) == 0
    assert sureness(0, np.array([0.1, 0.2]), np.full(2, math.inf), both) == 0.5  # nothing is known of the noise


@pytest.mark.parametrize(("mean", "measured"), [(0.2, False), (math.inf, True)])
def test_without_another_arm_of_which_something_is_known_nothing_is_said(mean: float, measured: bool) -> None:
    assert sureness(0, np.array([0.1, mean]), np.ones(2), np.array([True, measured])) is None


def test_the_more_is_measured_the_surer_a_choice() -> None:
    sure = [pulled(2, [(0, 0.7), (1, 0.4)] * n).choice().sure or 0 for n in (1, 4, 16, 64, 1024)]
    assert all(less < more for less, more in itertools.pairwise(sure))
    assert 0.5 < sure[0] < 0.7 and sure[-1] > 0.999


# UCB, Thompson sampling and greedy


def test_ucb_evaluates_each_arm_once_before_any_arm_twice() -> None:
    made = talk(UCB(), earning(lambda arm, n: 0.99 if n == 0 else 0.01), 9, 12)
    assert [one.arm for one in made.heard[:9]] == list(range(9))
    assert made.requests[0] == Request(tuple(range(9)))
    assert [len(request.arms) * request.pulls for request in made.requests[1:]] == [1] * 3
    assert not any(request.common for request in made.requests)


@pytest.mark.parametrize("c", [0, 0.3, 1.5, 10])
def test_ucb_pulls_the_arm_of_the_largest_index_of_equation_22(c: float) -> None:
    rng = np.random.default_rng(3)
    made = talk(UCB(c=c), earning(lambda arm, n: float(rng.random())), 6, 300)
    assert len(made.heard) == 300
    rewards: list[list[float]] = [[] for _ in range(6)]
    for t, one in enumerate(made.heard):
        if t >= 6:
            index = [math.fsum(r) / len(r) + c * math.sqrt(math.log(t) / len(r)) for r in rewards]
            assert one.arm == index.index(max(index))
        rewards[one.arm].append(one.reward)


@pytest.mark.parametrize("c", [math.nan, math.inf, -math.inf, -0.1])
def test_an_exploration_constant_that_is_negative_or_not_finite_is_refused(c: float) -> None:
    with pytest.raises(SettingError, match=str(c)):
        UCB(c=c)


@pytest.mark.parametrize("kind", [UCB, Thompson])
@pytest.mark.parametrize("size", [0, -2])
def test_a_pool_without_arms_is_refused_with_its_size(kind: type[UCB] | type[Thompson], size: int) -> None:
    with pytest.raises(SettingError, match=str(size)):
        kind(pool=size)


def test_thompson_sampling_pulls_the_arm_of_the_largest_draw_of_equation_25() -> None:
    values = np.random.default_rng(8).random(100)
    made = talk(Thompson(), earning(lambda arm, n: float(values[n])), 5, 100, seed=9)
    assert made.requests == [Request((one.arm,)) for one in made.heard]
    alpha, beta, rng = np.ones(5), np.ones(5), np.random.default_rng(9)
    for one, value in zip(made.heard, values, strict=True):
        assert one.arm == int(np.argmax(rng.beta(alpha, beta)))
        alpha[one.arm] += value
        beta[one.arm] += 1 - value


@pytest.mark.parametrize(("budget", "pulls"), [(8, 8), (50, 8), (5, 5)])
def test_greedy_pulls_every_arm_once_and_all_on_the_same_batches(budget: int, pulls: int) -> None:
    made = talk(Greedy(), earning(lambda arm, n: 1 / (n + 1)), 8, budget)
    assert made.requests == [Request(tuple(range(pulls)), common=True)]
    assert made.choice.arm == 0


@pytest.mark.parametrize("policy", [UCB(), Thompson()], ids=repr)
def test_bandits_find_the_best_of_ten_noisy_arms_and_spend_more_on_it_than_a_uniform_rule(policy: Policy) -> None:
    means = np.array([0.35, 0.45, 0.4, 0.3, 0.5, 0.45, 0.75, 0.4, 0.5, 0.3])
    budget, best, found, spent = 200, 6, 0, 0
    for seed in range(40):
        made = talk(policy, noisy_rewards(means, seed), 10, budget, seed=seed)
        found += made.choice.arm == best
        spent += made.counts[best]
    assert found >= 36
    assert spent / 40 > 1.5 * budget / 10
