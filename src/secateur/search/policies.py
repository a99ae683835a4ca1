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
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from secateur.errors import SettingError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Moment:
    """Mean and variance of something on one batch, and from how many batches."""

    mean: float = math.nan
    variance: float = math.nan
    count: float = 0.0  # 0: nothing is known


@dataclass(frozen=True)
class Belief(Moment):
    """What is known of an arm beforehand: first of all its damage."""

    distance: Moment = Moment()  # what its removal adds to the distance from the dense model, where that is measured beside
    bias: Moment = Moment()  # damage minus distance
    slopes: tuple[float, ...] = ()  # what gradients foretell: the terms of first and second order, which add up to the damage


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
    distances: tuple[float, ...] = ()  # the same by the distance from the dense model, where it is measured beside the loss


@dataclass(frozen=True)
class Choice:
    """The arm that a policy chose, and the probability, by what it measured, that the arm is better than the runner-up."""

    arm: int
    sure: float | None = None  # None: there was no other arm to compare with
    more: tuple[Choice, ...] = ()  # the next best arms that it measured, if it was asked for several


Conversation = Generator[Request, Sequence[Heard], Choice]


class Policy(Protocol):
    """A rule of search. Settings are its fields; what it learns lives in one conversation."""

    def pool_size(self, remaining: int, budget: int) -> int:
        """How many of the remaining candidates it wants as arms; one draw by seed takes them."""
        ...

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        """Choose one of `len(beliefs)` arms with at most `budget` pulls."""
        ...


@dataclass(frozen=True)
class Plan:
    """What a policy wants to do in one step."""

    units: int  # to choose
    pulls: int
    gradient_batches: int = 0


@runtime_checkable
class Planner(Protocol):
    """A policy that may choose several units in a step, and look at gradients first."""

    def pool_size(self, remaining: int, budget: int) -> int: ...

    def plan(self, total: int, left: int, pulls_per_step: int, *, gradients: bool) -> Plan:
        """The next step of a search for `total` units of which `left` are still to be chosen, with or without gradients."""
        ...

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator, wanted: int = 1) -> Conversation:
        """Choose `wanted` arms."""
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


@dataclass(frozen=True)
class Auto:
    """Halving among the arms that gradients and earlier steps show to be harmless, several units a step.

    A backward pass foretells the damage of all units at once; a measurement is exact for one unit on a few batches. A step
    spends half of its pulls' worth on gradients under the present mask, and the rest on measuring the most promising arms on
    common batches. A posterior weighs both by how well they have agreed so far. It stops early once more pulls would hardly
    change the choice.
    """

    steps: int = 8  # at most, for any number of units
    carry: float = 0.5  # the weight of what earlier steps found
    enough: float = 0.99  # the probability that settles a choice

    def pool_size(self, remaining: int, budget: int) -> int:
        return remaining

    def plan(self, total: int, left: int, pulls_per_step: int, *, gradients: bool) -> Plan:
        units = min(left, math.ceil(total / self.steps))
        budget = units * pulls_per_step
        if not gradients:
            return Plan(units, budget)
        # A masked run costs half a forward pass on average, and one with gradients three.
        return Plan(units, max(units, budget // 2), max(1, budget // 2 // 6))

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator, wanted: int = 1) -> Conversation:
        stats, posterior = ArmStats(len(beliefs)), Posterior(beliefs, self.carry)
        wanted = min(wanted, len(beliefs), budget)
        believed = np.where(np.isfinite(posterior.means), posterior.means, -np.inf)  # an unknown arm may be the best
        order = sorted(rng.permutation(len(beliefs)).tolist(), key=believed.__getitem__)
        survivors = order[: min(budget, max(2 * wanted, (budget + 1) // 2))]
        while stats.pulls + len(survivors) <= budget:
            heard = yield Request(tuple(sorted(survivors)), common=True)
            stats.hear(heard)
            posterior.hear(heard)
            sound = [arm for arm in survivors if not stats.broken[arm]]
            means = posterior.means
            ranked = sorted(sound, key=means.__getitem__)
            survivors = ranked[: max(2 * wanted, math.ceil(len(ranked) / 2))]
            if len(survivors) <= wanted or self._settled(stats, posterior, ranked, wanted):
                break
        return self._choice(stats, posterior, wanted)

    def _settled(self, stats: ArmStats, posterior: Posterior, ranked: Sequence[int], wanted: int) -> bool:
        """Whether the last of the best arms is surely better than the first of the others."""
        means, variances = posterior.means, posterior.variances
        others = np.ones(len(means), dtype=bool)
        others[list(ranked[:wanted])] = False
        others &= ~stats.broken
        sure = sureness(ranked[wanted - 1], means, variances, others)
        return sure is not None and sure >= self.enough

    def _choice(self, stats: ArmStats, posterior: Posterior, wanted: int) -> Choice:
        sound = (stats.counts > 0) & ~stats.broken
        if not sound.any():
            return stats.choice()
        means, variances = posterior.means, posterior.variances
        best = sorted(np.flatnonzero(sound).tolist(), key=means.__getitem__)
        rest = sound.copy()
        rest[best[:wanted]] = False
        first, *more = (Choice(arm, sureness(arm, means, variances, rest)) for arm in best)
        return Choice(first.arm, first.sure, tuple(more))


class Posterior:
    """Normal posteriors of the arms' mean damages, from gradients, distances and damages.

    Evidence: the mean damage. Where distances are measured beside it, the mean distance plus as much of the mean bias (damage
    minus distance) as its own noise leaves credible: the distance is steady and a little wrong, the damage right and noisy.
    Prior: a b + c d of the slopes b and d of first and second order. In theory a = c = 1; a least-squares fit to the evidence,
    drawn towards that, corrects them. How far the evidence lies from the fit, beyond its noise, is the prior's own variance.
    """

    def __init__(self, beliefs: Sequence[Belief], carry: float) -> None:
        self._damages = _Gaussian(beliefs, carry)
        self._distances = _Gaussian([belief.distance for belief in beliefs], carry)
        self._biases = _Gaussian([belief.bias for belief in beliefs], carry)
        self._slopes = np.array([belief.slopes for belief in beliefs]) if all(b.slopes for b in beliefs) else None
        self._update()

    def hear(self, heard: Sequence[Heard]) -> None:
        for pull in heard:
            self._damages.add(pull.arm, pull.damages)
            self._distances.add(pull.arm, pull.distances)
            self._biases.add(pull.arm, [a - b for a, b in zip(pull.damages, pull.distances, strict=False)])
        self._update()

    def _update(self) -> None:
        means, variances = self._evidence()
        if self._slopes is None:
            self.means, self.variances = means, variances
            return
        known = np.isfinite(means) & np.isfinite(variances)
        foretold = self._slopes @ _fit(self._slopes[known], means[known], variances[known])
        spread = (means - foretold)[known] ** 2 - variances[known]
        typical = float(np.abs(foretold).mean()) ** 2  # with little evidence the prior is trusted to its own size
        prior_variance = max((float(spread.sum()) + 2 * typical) / (known.sum() + 2), 0.01 * typical, 1e-16)
        precision = np.where(known, 1 / np.where(known, np.maximum(variances, 1e-16), 1.0), 0.0)
        self.variances = 1 / (1 / prior_variance + precision)
        self.means = self.variances * (foretold / prior_variance + precision * np.where(known, means, 0.0))

    def _evidence(self) -> tuple[Array, Array]:
        if not self._distances.known.any():
            return self._damages.means, self._damages.variances
        bias, noise = self._biases.means, self._biases.variances
        both = self._biases.known & np.isfinite(noise)
        if both.sum() < 2:
            return self._distances.means, self._distances.variances
        spread = max(0.0, float(np.var(bias[both], ddof=1) - noise[both].mean()))  # of the true biases
        centre = float(np.average(bias[both], weights=1 / np.maximum(noise[both], 1e-16)))
        trust = np.where(both, spread / np.where(both, spread + noise, 1.0), 0.0) if spread else np.zeros(len(bias))
        means = self._distances.means + centre + trust * np.where(both, bias - centre, 0.0)
        return means, self._distances.variances + trust * spread


def _fit(slopes: Array, means: Array, variances: Array) -> Array:
    """The weights of the slopes that fit the evidence best, drawn towards 1 as strongly as by three arms of the usual kind."""
    ones = np.ones(slopes.shape[1])
    if not len(slopes):
        return ones
    weights = 1 / (variances + float(np.median(variances)) + 1e-16)
    scale = float(weights.mean()) * (slopes**2).mean(0)
    gram = (slopes * weights[:, None]).T @ slopes + np.diag(3 * scale + 1e-30)
    solution: Array = np.linalg.solve(gram, (slopes * weights[:, None]).T @ means + 3 * scale * ones + 1e-30)
    return np.maximum(solution, 0.0)


class _Gaussian:
    """Normal posteriors of the arms' mean damages. All arms share one variance of a single batch, pooled over the arms."""

    def __init__(self, beliefs: Sequence[Moment], carry: float) -> None:
        self._counts = np.array([carry * belief.count for belief in beliefs])
        self._sums = np.array([carry * belief.count * belief.mean if belief.count else 0.0 for belief in beliefs])
        spread = [(belief.count - 1) * belief.variance for belief in beliefs if belief.count > 1]
        self._squares = carry * sum(spread)  # of deviations from an arm's own mean
        self._freedom = carry * sum(belief.count - 1 for belief in beliefs if belief.count > 1)

    def hear(self, heard: Sequence[Heard]) -> None:
        for pull in heard:
            self.add(pull.arm, pull.damages)

    def add(self, arm: int, values: Sequence[float]) -> None:
        for value in values:
            if not math.isfinite(value):
                continue
            before = self._counts[arm]
            if before > 0:
                self._squares += before / (before + 1) * (value - self._sums[arm] / before) ** 2
                self._freedom += 1
            self._counts[arm] += 1
            self._sums[arm] += value

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        return self._counts > 0

    @property
    def means(self) -> Array:
        known = self._counts > 0
        return np.where(known, self._sums / np.where(known, self._counts, 1), np.inf)

    @property
    def variances(self) -> Array:
        """Of the means. Without two measurements of any arm the spread of a batch is not known, and nothing is sure."""
        one = self._squares / self._freedom if self._freedom > 0 else math.inf
        return one / np.where(self._counts > 0, self._counts, 1.0)
