"""Policies: which arms of a step are measured, and which one wins (Eq. 19-27). Sees arms 0..n-1; never a unit, never a tensor.

A policy is a conversation. It gets the beliefs about its arms, a budget of pulls and a random generator. It yields requests
for measurements and is sent what they measured; it returns its choice. `select` holds the conversation and never asks which
policy it has.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from secateur.errors import SettingError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Belief:
    """What is known of an arm beforehand: mean and variance of its damage on one batch, and from how many batches."""

    mean: float = math.nan
    variance: float = math.nan
    count: float = 0.0  # 0: nothing is known


@dataclass(frozen=True)
class Request:
    """Measurements that a policy wants at once: `pulls` of each arm.

    Each pull has batches of its own, or, with `common`, the arms share the batches of their first pulls, of their second, and
    so on.
    """

    arms: tuple[int, ...]
    pulls: int = 1
    common: bool = False


@dataclass(frozen=True)
class Heard:
    """What one pull measured: the paired damage of each of its batches, and the reward of their mean (Eq. 18 and 19).

    Where a goal counts costs, the damages are divided by what the arm costs, relative to the mean.
    """

    arm: int
    damages: tuple[float, ...]
    reward: float
    broken: bool = False  # the arm's mask made the loss non-finite


@dataclass(frozen=True)
class Choice:
    """The arm that a policy chose, and the probability, by what it measured, that the arm is better than the runner-up."""

    arm: int
    sure: float | None = None  # None: there was no other arm to compare with


Conversation = Generator[Request, Sequence[Heard], Choice]


class Policy(Protocol):
    """A rule of search. Settings are its fields; what it learns lives in one conversation."""

    def pool_size(self, remaining: int, budget: int) -> int:
        """How many of the remaining candidates it wants as arms; one draw by seed takes them."""
        ...

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        """Choose one of `len(beliefs)` arms with at most `budget` pulls."""
        ...


def reward(damage: float, temperature: float) -> float:
    """Smooth bounded reward: 0.5 at no damage, towards 1 where removal helps (Eq. 19); a non-finite damage earns 0."""
    if not math.isfinite(damage):
        return 0.0
    return 1 / (1 + math.exp(min(max(damage / temperature, -500.0), 500.0)))  # clipped only so that exp cannot overflow


def check_search(*, pulls_per_step: int, temperature: float) -> None:
    """Refuse a budget or a temperature that cannot work, before anything is loaded or measured."""
    if pulls_per_step < 1:
        raise SettingError(f"The pulls per step are {pulls_per_step}, but must be at least 1.")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise SettingError(f"The reward temperature is {temperature}, but must be a finite number above 0.")


class ArmStats:
    """What the pulls of one step have shown of its n arms: counts and mean rewards (Eq. 20)."""

    def __init__(self, n_arms: int) -> None:
        self.counts = np.zeros(n_arms, dtype=np.int64)
        self.means = np.zeros(n_arms)
        self.broken = np.zeros(n_arms, dtype=bool)  # arms whose mask ever made the loss non-finite

    @property
    def pulls(self) -> int:
        return int(self.counts.sum())

    def hear(self, heard: Sequence[Heard]) -> None:
        for pull in heard:
            self.counts[pull.arm] += 1
            self.means[pull.arm] += (pull.reward - self.means[pull.arm]) / self.counts[pull.arm]
            self.broken[pull.arm] |= pull.broken

    @property
    def alpha(self) -> Array:
        """Beta pseudo-counts: 1 plus the sum of rewards (Eq. 24 and 26)."""
        return 1 + self.counts * self.means

    @property
    def beta(self) -> Array:
        return 1 + self.counts * (1 - self.means)

    @property
    def posterior_means(self) -> Array:
        """The uncertainty-smoothed diagnostic of section 3.7; it decides nothing."""
        alpha, beta = self.alpha, self.beta
        return alpha / (alpha + beta)

    def best(self) -> int:
        """The evaluated arm of the largest mean reward (Eq. 23 = Eq. 27), a broken one only if all are broken."""
        evaluated = self.counts > 0
        sound = evaluated & ~self.broken
        return int(np.argmax(np.where(sound if sound.any() else evaluated, self.means, -np.inf)))

    def choice(self) -> Choice:
        """The best arm, and how sure it is by the Beta posteriors of Eq. 24 and 26."""
        best = self.best()
        alpha, beta = self.alpha, self.beta
        variances = alpha * beta / ((alpha + beta) ** 2 * (alpha + beta + 1))
        others = (self.counts > 0) & ~self.broken
        return Choice(best, sureness(best, -self.posterior_means, variances, others))

    @property
    def all_broken(self) -> bool:
        """Every evaluated arm made the loss non-finite at least once."""
        return not (~self.broken[self.counts > 0]).any()


def sureness(best: int, means: Array, variances: Array, others: npt.NDArray[np.bool_]) -> float | None:
    """The probability that arm `best` is below the lowest mean of the `others`, for independent normal beliefs."""
    rivals = [i for i in np.flatnonzero(others & np.isfinite(means)) if i != best]
    if not rivals:
        return None
    second = min(rivals, key=lambda i: float(means[i]))
    spread = math.sqrt(float(variances[best] + variances[second]))
    gap = float(means[second] - means[best])
    return NormalDist().cdf(gap / spread) if spread > 0 else float(gap > 0) if gap else 0.5


def _paper_pool(remaining: int, asked: int | None) -> int:
    """|A_s|: as asked, or max(2, floor(2 sqrt|R|)) (section 4)."""
    return max(2, math.floor(2 * math.sqrt(remaining))) if asked is None else asked


def _check_pool(asked: int | None) -> None:
    if asked is not None and asked < 1:
        raise SettingError(f"The pool size is {asked}, but must be at least 1.")


@dataclass(frozen=True)
class UCB:
    """MAB-UCB: each arm once, then the largest mean + c * sqrt(log N / n) (Eq. 21 and 22)."""

    c: float = 1.5
    pool: int | None = None

    def __post_init__(self) -> None:
        if not (self.c >= 0 and math.isfinite(self.c)):
            raise SettingError(f"The UCB exploration constant is {self.c}, but must be a finite number, 0 or more.")
        _check_pool(self.pool)

    def pool_size(self, remaining: int, budget: int) -> int:
        return _paper_pool(remaining, self.pool)

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        stats = ArmStats(len(beliefs))
        stats.hear((yield Request(tuple(range(min(len(beliefs), budget))))))  # in the pool's order, which is random
        while stats.pulls < budget:
            bonus = self.c * np.sqrt(np.log(stats.pulls) / stats.counts)
            stats.hear((yield Request((int(np.argmax(stats.means + bonus)),))))
        return stats.choice()


@dataclass(frozen=True)
class Thompson:
    """Fractional-Beta MAB-TS: one draw an arm, the largest is pulled (Eq. 25)."""

    pool: int | None = None

    def __post_init__(self) -> None:
        _check_pool(self.pool)

    def pool_size(self, remaining: int, budget: int) -> int:
        return _paper_pool(remaining, self.pool)

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        stats = ArmStats(len(beliefs))
        while stats.pulls < budget:
            stats.hear((yield Request((int(np.argmax(rng.beta(stats.alpha, stats.beta))),))))
        return stats.choice()


@dataclass(frozen=True)
class Greedy:
    """Budgeted greedy (Eq. 37): every arm of the trial set once, all on the same batches; the best one wins."""

    def pool_size(self, remaining: int, budget: int) -> int:
        return budget

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        stats = ArmStats(len(beliefs))
        stats.hear((yield Request(tuple(range(min(len(beliefs), budget))), common=True)))
        return stats.choice()


@dataclass(frozen=True)
class Halving:
    """Sequential halving: all arms on common batches, then the better half, and so on; the lowest believed damage wins.

    A measurement of an earlier step counts `carry` times as much as one of this step, since every removed unit changes the
    damage of the others a little. If the budget is too small for all arms, the step starts with the arms of which nothing is
    known, then takes those of lowest believed damage.
    """

    carry: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.carry <= 1:
            raise SettingError(f"The weight of earlier measurements is {self.carry}, but must lie between 0 and 1.")

    def pool_size(self, remaining: int, budget: int) -> int:
        return remaining

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        stats, posterior = ArmStats(len(beliefs)), _Gaussian(beliefs, self.carry)
        believed = [-math.inf if belief.count == 0 else belief.mean for belief in beliefs]  # an unknown arm may be the best
        order = sorted(rng.permutation(len(beliefs)).tolist(), key=believed.__getitem__)
        # m arms, then m/2, then m/4 and so on take just under 2m pulls.
        survivors = order[: min(budget, max(2, (budget + 1) // 2))]
        while stats.pulls + len(survivors) <= budget:
            heard = yield Request(tuple(sorted(survivors)), common=True)
            stats.hear(heard)
            posterior.hear(heard)
            if stats.broken[survivors].all() or len(survivors) == 1:
                break
            sound = [arm for arm in survivors if not stats.broken[arm]]
            ranked = sorted(sound, key=lambda arm: float(posterior.means[arm]))
            survivors = ranked[: max(2, math.ceil(len(ranked) / 2))]
        evaluated = (stats.counts > 0) & ~stats.broken
        if not evaluated.any():
            return stats.choice()
        best = min(np.flatnonzero(evaluated).tolist(), key=lambda arm: float(posterior.means[arm]))
        return Choice(best, sureness(best, posterior.means, posterior.variances, evaluated))


class _Gaussian:
    """Normal posteriors of the arms' mean damages. All arms share one variance of a single batch, pooled over the arms."""

    def __init__(self, beliefs: Sequence[Belief], carry: float) -> None:
        self._counts = np.array([carry * belief.count for belief in beliefs])
        self._sums = np.array([carry * belief.count * belief.mean if belief.count else 0.0 for belief in beliefs])
        spread = [(belief.count - 1) * belief.variance for belief in beliefs if belief.count > 1]
        self._squares = carry * sum(spread)  # of deviations from an arm's own mean
        self._freedom = carry * sum(belief.count - 1 for belief in beliefs if belief.count > 1)

    def hear(self, heard: Sequence[Heard]) -> None:
        for pull in heard:
            finite = [damage for damage in pull.damages if math.isfinite(damage)]
            for damage in finite:
                before = self._counts[pull.arm]
                if before > 0:
                    self._squares += before / (before + 1) * (damage - self._sums[pull.arm] / before) ** 2
                    self._freedom += 1
                self._counts[pull.arm] += 1
                self._sums[pull.arm] += damage

    @property
    def means(self) -> Array:
        known = self._counts > 0
        return np.where(known, self._sums / np.where(known, self._counts, 1), np.inf)

    @property
    def variances(self) -> Array:
        """Of the means. Without two measurements of any arm the spread of a batch is not known, and nothing is sure."""
        one = self._squares / self._freedom if self._freedom > 0 else math.inf
        return one / np.where(self._counts > 0, self._counts, 1.0)
