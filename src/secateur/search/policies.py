"""Policies: which arms of a step are measured, and which one wins (Eq. 19-27). Sees arms 0..n-1; never a unit, never a tensor.

A policy is a conversation. It gets the beliefs about its arms, a budget of pulls and a random generator. It yields requests
for measurements and is sent what they measured; it returns its choice. `select` holds the conversation and never asks which
policy it has.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
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
class Slope:
    """What gradients foretell of an arm's damage: the two terms of its expansion in the arm's mask."""

    first: Moment  # of single examples
    second: float


@dataclass(frozen=True)
class Belief(Moment):
    """What is known of an arm beforehand: first of all its damage.

    >>> Belief(mean=0.01, variance=0.0001, count=4).mean
    0.01
    """

    rest: Moment = Moment()  # the damage beyond the first-order term of the same batch
    slope: Slope | None = None


@dataclass(frozen=True)
class Request:
    """Measurements that a policy wants at once: `pulls` of each arm.

    Each pull has batches of its own, or, with `common`, the arms share the batches of their first pulls, of their second, and
    so on.

    >>> Request(arms=(0, 1, 2), pulls=2, common=True).arms
    (0, 1, 2)
    """

    arms: tuple[int, ...]
    pulls: int = 1
    common: bool = False


@dataclass(frozen=True)
class Heard:
    """What one pull measured: the paired damage of each of its batches, and the reward of their mean (Eq. 18 and 19).

    Where a goal counts costs, the damages are divided by what the arm costs, relative to the mean.

    >>> Heard(arm=0, damages=(0.02, 0.04), reward=reward(0.03, 0.02)).damages
    (0.02, 0.04)
    """

    arm: int
    damages: tuple[float, ...]
    reward: float
    broken: bool = False  # the arm's mask made the loss non-finite
    firsts: tuple[float, ...] = ()  # what the gradients of the same batches foretell to first order, where they were taken


@dataclass(frozen=True)
class Choice:
    """The arm that a policy chose, and the probability, by what it measured, that it is the right one.

    >>> Choice(arm=3, sure=0.9).arm
    3
    """

    arm: int
    sure: float | None = None  # None: there was no other arm to compare with
    damage: float | None = None  # the arm's damage as the policy believes
    more: tuple[Choice, ...] = ()  # the next best arms, if it was asked for several


Conversation = Generator[Request, Sequence[Heard], Choice]


class Policy(Protocol):
    """A rule of search. Settings are its fields; what it learns lives in one conversation.

    >>> talk = Greedy().run([Belief(), Belief()], budget=2, rng=None)
    >>> next(talk)
    Request(arms=(0, 1), pulls=1, common=True)
    """

    def pool_size(self, remaining: int, budget: int) -> int:
        """How many of the remaining candidates it wants as arms; one draw by seed takes them."""
        ...

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        """Choose one of `len(beliefs)` arms with at most `budget` pulls."""
        ...


FORWARDS, PULLS = "forwards", "pulls"
GRADIENT_PASSES = 3  # what a batch with gradients costs, in forward passes
PULL_PASSES = 0.6  # what a pull of one batch costs on average: half a pass, and its share of the base run
DRAWS = 2000  # from a posterior, for chances
FEW = 5  # examples from which a first-order term says nothing: the ratio of its square to its noise has no variance


@dataclass(frozen=True)
class Budget:
    """What a whole search may spend: forward passes of one batch, or pulls."""

    amount: float
    of: str = FORWARDS


@dataclass(frozen=True)
class Spent:
    """What a search has spent so far."""

    passes: float = 0.0
    pulls: int = 0


@dataclass(frozen=True)
class Plan:
    """What a policy wants to do in one step.

    >>> Plan(units=4, pulls=32, gradient_batches=8).pulls
    32
    """

    units: int  # to choose
    pulls: int
    gradient_batches: int = 0


@runtime_checkable
class Planner(Protocol):
    """A policy that divides a budget of its own among the steps, may choose several units in one, and may look at gradients.

    >>> isinstance(METHODS["auto"].policy(Settings("gpt2")), Planner)
    True
    """

    def pool_size(self, remaining: int, budget: int) -> int: ...

    def plan(self, total: int, left: int, spent: Spent, *, gradients: bool) -> Plan:
        """The next step of a search for `total` units of which `left` are still to be chosen, with or without gradients."""
        ...

    def run(
        self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator, wanted: int = 1, left: int = 1
    ) -> Conversation:
        """Choose `wanted` arms of the `left` that the search still has to choose."""
        ...


def reward(damage: float, temperature: float) -> float:
    """Smooth bounded reward: 0.5 at no damage, towards 1 where removal helps (Eq. 19); a non-finite damage earns 0.

    >>> reward(0.0, temperature=0.02)
    0.5
    """
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
    """What the pulls of one step have shown of its n arms: counts and mean rewards (Eq. 20).

    >>> stats = ArmStats(2)
    >>> stats.hear([Heard(0, (0.1,), reward(0.1, 0.02)), Heard(1, (-0.1,), reward(-0.1, 0.02))])
    >>> stats.best()
    1
    """

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
    """MAB-UCB: each arm once, then the largest mean + c * sqrt(log N / n) (Eq. 21 and 22).

    >>> select(meter, units, policy=UCB(c=1.0), ratio=0.1).units
    """

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
    """Fractional-Beta MAB-TS: one draw an arm, the largest is pulled (Eq. 25).

    >>> select(meter, units, policy=Thompson(), ratio=0.1).units
    """

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
    """Budgeted greedy (Eq. 37): every arm of the trial set once, all on the same batches; the best one wins.

    >>> select(meter, units, policy=Greedy(), ratio=0.1).units
    """

    def pool_size(self, remaining: int, budget: int) -> int:
        return budget

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        stats = ArmStats(len(beliefs))
        stats.hear((yield Request(tuple(range(min(len(beliefs), budget))), common=True)))
        return stats.choice()


@dataclass(frozen=True)
class Auto:
    """Look at gradients, measure what they show to be harmless, and then what is still in doubt; several units a step.

    A backward pass foretells the damage of all arms at once; a measurement is exact for one arm on one batch. A posterior
    weighs both. Each round of a step measures arms on a common batch: first those of least believed damage, then those
    of which it is least clear whether they are among the best. It stops early once more pulls would hardly change the choice.
    Where there are fewer pulls than units to choose, the doubtful ones get them, and the others go by their gradients.

    >>> select(meter, units, policy=Auto(), ratio=0.1).units
    """

    budget: Budget = Budget(300)
    steps: int = 8  # at most, for any number of units
    looking: float = 0.85  # the share of the budget that goes into gradients
    carry: float = 0.5  # the weight of what earlier steps measured
    enough: float = 0.01  # the expected regret that is accepted, as a share of the mean damage of the arms

    def pool_size(self, remaining: int, budget: int) -> int:
        return remaining

    def plan(self, total: int, left: int, spent: Spent, *, gradients: bool) -> Plan:
        by_pulls = self.budget.of == PULLS
        least = 1 if by_pulls else GRADIENT_PASSES + PULL_PASSES  # what a step costs at least
        steps = max(1, min(self.steps, int(self.budget.amount / least)))
        units = min(left, math.ceil(total / steps))
        room = (self.budget.amount - (spent.pulls if by_pulls else spent.passes)) / math.ceil(left / units)
        measuring = room if by_pulls else room * (1 - self.looking if gradients else 1) / PULL_PASSES
        if not gradients:
            return Plan(units, max(units, int(measuring)))  # no unit is chosen of which nothing is known
        pulls = max(1, int(measuring))
        passes = pulls * PULL_PASSES * self.looking / (1 - self.looking) if by_pulls else room - pulls * PULL_PASSES
        return Plan(units, pulls, max(1, int(passes / GRADIENT_PASSES)))

    def run(
        self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator, wanted: int = 1, left: int = 1
    ) -> Conversation:
        stats, posterior = ArmStats(len(beliefs)), Posterior(beliefs, self.carry)
        wanted = min(wanted, len(beliefs), len(beliefs) if posterior.looked else budget)
        all_measured = budget >= wanted
        shuffled = rng.permutation(len(beliefs))  # so that ties are broken by seed
        first = shuffled[np.argsort(posterior.means[shuffled], kind="stable")]
        arms = first[: max(wanted, math.ceil(budget / 2))]
        if not all_measured:
            chances, _ = posterior.outlook(wanted, ~stats.broken, rng)
            arms = np.argsort(np.abs(chances - 0.5), kind="stable")[: math.ceil(budget / 2)]
        while True:
            heard = yield Request(tuple(sorted(arms.tolist())), common=True)
            stats.hear(heard)
            posterior.hear(heard)
            room = budget - stats.pulls
            chances, regret = posterior.outlook(wanted, ~stats.broken, rng)
            if room < 2 or stats.broken.all() or regret <= self.enough * float(np.abs(posterior.means).mean()):
                chances, _ = posterior.outlook(min(left, len(beliefs)), ~stats.broken, rng)
                return _best_of(stats, posterior, chances, all_measured)
            doubtful = np.argsort(np.where(stats.broken, np.inf, np.abs(chances - 0.5)), kind="stable")
            arms = doubtful[: max(2, math.ceil(room / 2))]


def _best_of(stats: ArmStats, posterior: Posterior, chances: Array, all_measured: bool) -> Choice:
    """The arms from the least believed damage on, and only measured ones if there were pulls for all that are wanted."""
    sound = ((stats.counts > 0) | (not all_measured)) & ~stats.broken
    if not sound.any():
        return stats.choice()
    means = posterior.means
    best = sorted(np.flatnonzero(sound).tolist(), key=means.__getitem__)
    first, *more = (Choice(arm, float(chances[arm]) if len(best) > 1 else None, float(means[arm])) for arm in best)
    return replace(first, more=tuple(more))


class Posterior:
    """Normal posteriors of the arms' mean damages, from gradients and measurements.

    The damage of an arm is the first-order term of its expansion, which gradients give for all arms and many examples, and a
    rest. The first-order term is mostly the labels' noise until there are many examples: it is shrunk by what that noise
    explains. Of the rest the second-order term of the gradients is the prior, up to a factor that is fitted; a measurement
    shows it on its own batch, without most of the noise, for the first-order term of that very batch is taken off. Without
    gradients the rest is the whole damage, and the mean over the arms is the prior.
    """

    def __init__(self, beliefs: Sequence[Belief], carry: float) -> None:
        slopes = [belief.slope for belief in beliefs if belief.slope]
        self.looked = len(slopes) == len(beliefs)  # at gradients
        self._rest = _Gaussian([belief.rest if self.looked else belief for belief in beliefs], carry)
        self._second = _finite([slope.second for slope in slopes]) if self.looked else np.ones(len(beliefs))
        nothing = np.zeros(len(beliefs)), np.zeros(len(beliefs))
        self._first, self._noise = _shrunk([slope.first for slope in slopes]) if self.looked else nothing
        self._size = self._size_of(self._second)
        self._doubt = 0.1  # of the prior before anything is measured, in its own size
        self._update()

    def _size_of(self, second: Array) -> Array:
        """The size of the error of an arm's prior, up to a factor: errors are larger where the terms are."""
        return second + float(self._second.mean())

    def hear(self, heard: Sequence[Heard]) -> None:
        for pull in heard:
            firsts = pull.firsts if self.looked and pull.firsts else [0.0] * len(pull.damages)
            self._rest.add(pull.arm, [damage - first for damage, first in zip(pull.damages, firsts, strict=True)])
        self._update()

    def _update(self) -> None:
        known, counts, measured = self._rest.known, self._rest.counts, self._rest.means
        factor = self._factor(measured[known], counts[known], self._second[known])
        error = (measured - factor * self._second)[known] / self._size[known]
        total = float(np.mean(error**2)) if len(error) else 1.0
        # Of a batch; without two measurements of one arm half of what is left to explain is taken for noise.
        noise = self._rest.batch_variance or 0.5 * total * float(np.mean(self._size**2)) + 1e-16
        extra = float(np.mean(noise / counts[known] / self._size[known] ** 2)) if len(error) else 0.0
        n = len(error)
        spread = max((n * (total - extra) + 2 * self._doubt) / (n + 2), 0.05 * total, 1e-12)  # of an arm's rest about the prior
        prior_variance = spread * self._size**2
        precision = counts / noise
        variances = 1 / (1 / prior_variance + precision)
        rest = variances * (factor * self._second / prior_variance + precision * np.where(known, measured, 0.0))
        self.means: Array = self._first + rest
        self.variances: Array = self._noise + variances

    def _factor(self, measured: Array, counts: Array, second: Array) -> float:
        """What the second-order terms are multiplied by: 1 in theory, drawn from there to what fits the measurements."""
        if not self.looked:
            return float(np.average(measured, weights=counts)) if len(measured) else 0.0
        weights = counts / (counts + 1) / np.maximum(self._size_of(second), 1e-16) ** 2
        drawn = 3 * float(np.mean(weights * second**2)) if len(measured) else 1.0
        fitted = (float((weights * second * measured).sum()) + drawn) / (float((weights * second**2).sum()) + drawn)
        return max(fitted, 0.0)

    def outlook(self, wanted: int, sound: npt.NDArray[np.bool_], rng: np.random.Generator) -> tuple[Array, float]:
        """For each arm the probability that it is one of the `wanted` best; and the regret to expect for the choice made now.

        Both are means over draws from the posterior.
        """
        means = np.where(sound, self.means, 1e9)  # an arm that broke the loss is never among the best
        n = max(100, min(DRAWS, 10**7 // len(means)))  # of very many arms fewer draws, for memory's sake
        draws = means + np.sqrt(self.variances) * rng.standard_normal((n, len(means)))
        best = np.argpartition(draws, wanted - 1, axis=1)[:, :wanted]
        chances = np.bincount(best.ravel(), minlength=len(means)) / n
        chosen = np.argsort(means, kind="stable")[:wanted]
        regret = draws[:, chosen].sum(1) - np.take_along_axis(draws, best, 1).sum(1)
        return chances, float(regret.mean()) / wanted


def _finite(seconds: Sequence[float]) -> Array:
    """The second-order terms; one that is not finite counts as far worse than all others."""
    values = np.array(seconds)
    known = np.isfinite(values)
    return np.where(known, values, 10 * values[known].max(initial=1.0))


def _shrunk(firsts: Sequence[Moment]) -> tuple[Array, Array]:
    """First-order terms, shrunk by the share of their size that the noise of the examples explains, and their variances.

    Of few examples they are nothing but noise: then all are 0.
    """
    means = np.nan_to_num(np.array([first.mean for first in firsts]), nan=0.0, posinf=0.0, neginf=0.0)
    noise = np.nan_to_num(np.array([first.variance / first.count for first in firsts]), nan=0.0, posinf=0.0)
    if not (noise > 0).any():
        return means, np.zeros(len(means))
    signal = float(np.mean(means[noise > 0] ** 2 / noise[noise > 0]))
    n = float(np.mean([first.count for first in firsts]))
    if n <= FEW or signal <= 0:
        return np.zeros(len(means)), np.zeros(len(means))
    by_chance = (n - 1) / (n - 3)  # the mean of these ratios if all were noise: that of an F distribution
    trust = max(0.0, 1 - by_chance / signal)
    return trust * means, trust * noise


class _Gaussian:
    """Means of what was measured of the arms. All arms share one variance of a single batch, pooled over the arms."""

    def __init__(self, beliefs: Sequence[Moment], carry: float) -> None:
        self.counts = np.array([carry * belief.count for belief in beliefs])
        self._sums = np.array([carry * belief.count * belief.mean if belief.count else 0.0 for belief in beliefs])
        spread = [(belief.count - 1) * belief.variance for belief in beliefs if belief.count > 1]
        self._squares = carry * sum(spread)  # of deviations from an arm's own mean
        self._freedom = carry * sum(belief.count - 1 for belief in beliefs if belief.count > 1)

    def add(self, arm: int, values: Sequence[float]) -> None:
        for value in values:
            if not math.isfinite(value):
                continue
            before = self.counts[arm]
            if before > 0:
                self._squares += before / (before + 1) * (value - self._sums[arm] / before) ** 2
                self._freedom += 1
            self.counts[arm] += 1
            self._sums[arm] += value

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        return self.counts > 0

    @property
    def means(self) -> Array:
        known = self.counts > 0
        return np.where(known, self._sums / np.where(known, self.counts, 1), np.inf)

    @property
    def batch_variance(self) -> float | None:
        """Of single measurements about their arm's mean; None without two measurements of any arm."""
        return self._squares / self._freedom if self._freedom > 0 else None
