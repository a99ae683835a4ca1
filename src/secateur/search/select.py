"""The search: build the mask one unit at a time (section 3.8, Algorithm 1).

Meets the model only through a `Meter`; knows no tensor. The journal, if there is one, holds every pull already made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from secateur.errors import SettingError
from secateur.files import jsonio
from secateur.files.journal import Journal
from secateur.search.goals import Count, Goal
from secateur.search.policies import (
    ArmStats,
    Belief,
    Choice,
    Conversation,
    Heard,
    Moment,
    Plan,
    Planner,
    Policy,
    Request,
    check_search,
    reward,
)
from secateur.selection import Pull, Selection, Step, paired_damages
from secateur.streams import POLICY, POOLS, stream
from secateur.units import EXPERT, Unit, n_selected
from secateur.watcher import Progress, Watcher

Asked = tuple[Unit, tuple[int, ...]]  # a pull to make: a unit, and the batches to measure it on


class Measured(NamedTuple):
    """The losses of one pull, batch by batch, the model passes it took, and distances where they are measured beside."""

    base_losses: tuple[float, ...]
    masked_losses: tuple[float, ...]
    forwards: int
    base_distances: tuple[float, ...] = ()
    masked_distances: tuple[float, ...] = ()


class Meter(Protocol):
    """What a search needs of a model: draw calibration batches, measure units on them, zero a unit from then on."""

    def draw(self) -> tuple[int, ...]: ...
    def measure(self, pulls: Sequence[Asked]) -> Iterator[Measured]: ...
    def recall(self, pull: Pull) -> None: ...
    def commit(self, unit: Unit) -> None: ...


@runtime_checkable
class Foreteller(Protocol):
    """A meter that can also say what gradients foretell of the units' damages."""

    gradient_batches: int  # taken so far

    def slopes(self, units: Sequence[Unit], n_batches: int) -> list[tuple[float, ...]]: ...


@dataclass(frozen=True)
class Screen:
    """Consider only the `size` remaining candidates of lowest score."""

    scores: Mapping[Unit, float]
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise SettingError(f"The screen keeps {self.size} candidates, but must keep at least 1.")

    def kept(self, remaining: Sequence[Unit]) -> list[Unit]:
        """The remaining candidates of lowest score, in the order they came in; non-finite scores come last."""
        lowest = set(by_score(remaining, self.scores)[: self.size])
        return [unit for unit in remaining if unit in lowest]


def select(
    meter: Meter,
    units: Sequence[Unit],
    *,
    policy: Policy | Planner,
    ratio: float = 0.10,
    goal: Goal | None = None,
    pulls_per_step: int = 32,
    temperature: float = 0.02,
    seed: int = 42,
    screen: Screen | None = None,
    prior: Mapping[Unit, Belief] | None = None,
    journal: Journal | None = None,
    watcher: Watcher | None = None,
) -> Selection:
    """Algorithm 1: at each step the policy measures candidates of a pool and chooses one, which is zeroed from then on.

    A step may spend `pulls_per_step` pulls. A `goal` ends the search in place of the ratio; experts need one. A `prior` is a
    belief about some units before the first step. The `watcher` is called after each pull and each step.

    >>> select(DamageMeter(model, batches), candidate_units(model), policy=UCB(), ratio=0.10)
    """
    check_search(pulls_per_step=pulls_per_step, temperature=temperature)
    watcher, goal = watcher or Watcher(), goal or _count(ratio, units)
    candidates = Candidates(units, goal, screen, stream(seed, POOLS))
    beliefs, policy_rng = Beliefs(prior or {}), stream(seed, POLICY)
    selected: list[Unit] = []
    steps: list[Step] = []
    trace: list[Pull] = []
    while len(selected) < (n_steps := goal.n_steps(selected)):
        pool = candidates.pool(selected, policy.pool_size, pulls_per_step)
        plan, priced = Plan(1, pulls_per_step), goal.after(selected)
        if isinstance(policy, Planner):
            foretells = isinstance(meter, Foreteller)
            plan = policy.plan(n_steps, n_steps - len(selected), pulls_per_step, gradients=foretells)
            if plan.gradient_batches and isinstance(meter, Foreteller):
                beliefs.foresee(pool, meter.slopes(pool, plan.gradient_batches), priced)
        search = _StepSearch(len(selected), n_steps, pool, plan.pulls, meter, priced, temperature, journal, watcher)
        options = {"wanted": plan.units} if plan.units > 1 else {}
        choice = search.hold(policy.run(beliefs.of(pool), plan.pulls, policy_rng, **options))
        trace += search.pulls
        beliefs.hear(search.pulls, priced)
        if not candidates.learn(pool, search.stats):
            continue  # every unit of the pool broke the loss, and other candidates are left: try those
        for one in (choice, *choice.more):
            if len(selected) >= min(search.step + plan.units, goal.n_steps(selected)):
                break
            if goal.open([pool[one.arm]], selected):
                steps.append(search.record(one, len(selected)))
                selected.append(pool[one.arm])
                meter.commit(pool[one.arm])
                watcher.chosen(steps[-1], n_steps, search.mean_damage(one.arm))
    return Selection(units=tuple(selected), steps=tuple(steps), trace=tuple(trace), gradient_batches=_gradient_batches(meter))


def _gradient_batches(meter: Meter) -> int:
    return meter.gradient_batches if isinstance(meter, Foreteller) else 0


class Candidates:
    """The remaining candidates, and the pools drawn from them. A unit that broke the loss is used only if no other is left."""

    def __init__(self, units: Sequence[Unit], goal: Goal, screen: Screen | None, rng: np.random.Generator) -> None:
        self._units, self._goal, self._screen, self._rng = units, goal, screen, rng
        self._broken: set[Unit] = set()
        self._last_resort = False  # only units that broke the loss are left

    def pool(self, selected: Sequence[Unit], size: Callable[[int, int], int], budget: int) -> list[Unit]:
        """A_s: remaining candidates drawn by seed, as many as the policy wants (section 4)."""
        remaining = self._goal.open([unit for unit in self._units if unit not in selected], selected)
        remaining = [unit for unit in remaining if unit not in self._broken] or remaining
        self._last_resort = set(remaining) <= self._broken
        if self._screen:
            remaining = self._screen.kept(remaining)
        n = len(remaining)
        return [remaining[i] for i in self._rng.choice(n, size=min(n, size(n, budget)), replace=False)]

    def learn(self, pool: Sequence[Unit], stats: ArmStats) -> bool:
        """Remember units that broke the loss; False if all measured units did and other candidates are left."""
        self._broken.update(unit for unit, broken in zip(pool, stats.broken, strict=True) if broken)
        return self._last_resort or not stats.all_broken


class Beliefs:
    """What is known of each unit's damage on one batch, from the prior and all measurements so far."""

    def __init__(self, prior: Mapping[Unit, Belief]) -> None:
        self._known = dict(prior)

    def of(self, pool: Sequence[Unit]) -> list[Belief]:
        return [self._known.get(unit, Belief()) for unit in pool]

    def hear(self, pulls: Sequence[Pull], goal: Goal) -> None:
        """Add measurements, per weight, as policies hear them; non-finite ones are left out."""
        for pull in pulls:
            weight, belief = goal.weight(pull.unit), self._known.get(pull.unit, Belief())
            for damage, distance in zip_longest(pull.damages, pull.distances):
                if math.isfinite(damage):
                    belief = replace(belief, **vars(_updated(belief, damage / weight)))
                if distance is not None and math.isfinite(distance):
                    belief = replace(belief, distance=_updated(belief.distance, distance / weight))
                    if math.isfinite(damage):
                        belief = replace(belief, bias=_updated(belief.bias, (damage - distance) / weight))
            self._known[pull.unit] = belief

    def foresee(self, pool: Sequence[Unit], slopes: Sequence[tuple[float, ...]], goal: Goal) -> None:
        """Take in what gradients say under the present mask; what they said before counts half as much."""
        for unit, new in zip(pool, slopes, strict=True):
            now, belief = [value / goal.weight(unit) for value in new], self._known.get(unit, Belief())
            before = belief.slopes or now
            self._known[unit] = replace(belief, slopes=tuple((2 * a + b) / 3 for a, b in zip(now, before, strict=True)))


def _updated(moment: Moment, value: float) -> Moment:
    """Mean and sample variance with one more value (Welford's rule)."""
    if moment.count == 0:
        return Moment(value, math.nan, 1)
    n = moment.count + 1
    squares = (moment.count - 1) * moment.variance if moment.count > 1 else 0.0
    gap = value - moment.mean
    return Moment(moment.mean + gap / n, (squares + gap * gap * moment.count / n) / (n - 1), n)


@dataclass
class _StepSearch:
    """One step: answers a policy's requests with measurements, and writes them down."""

    step: int
    n_steps: int
    pool: Sequence[Unit]
    budget: int
    meter: Meter
    goal: Goal
    temperature: float
    journal: Journal | None
    watcher: Watcher
    pulls: list[Pull] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stats = ArmStats(len(self.pool))
        self._damages = np.zeros(len(self.pool))  # by arm: the sum over its pulls

    def hold(self, conversation: Conversation) -> Choice:
        """Answer requests until the policy names its choice."""
        try:
            request = next(conversation)
            while True:
                request = conversation.send(self._answer(request))
        except StopIteration as end:
            choice: Choice = end.value
        if not self.stats.counts[choice.arm]:
            raise ValueError(f"The policy chose arm {choice.arm}, which it never measured in this step.")
        return choice

    def _answer(self, request: Request) -> list[Heard]:
        if not all(0 <= arm < len(self.pool) for arm in request.arms):
            raise ValueError(f"The policy asked for the arms {request.arms}, and there are {len(self.pool)}, counted from 0.")
        wanted = len(request.arms) * request.pulls
        if not wanted or self.stats.pulls + wanted > self.budget:
            raise ValueError(f"The policy asked for {wanted} pulls and has {self.budget - self.stats.pulls} left.")
        arms, asked = [], []
        for _ in range(request.pulls):
            shared = self.meter.draw() if request.common else None
            for arm in request.arms:
                arms.append(arm)
                asked.append((self.pool[arm], shared or self.meter.draw()))
        answers = []
        for arm, pull in zip(arms, self._made(asked), strict=True):
            self.pulls.append(pull)
            self._damages[arm] += pull.damage
            answers.append(self._heard(arm, pull))
            self.stats.hear(answers[-1:])
            self.watcher.pull(self._where(replayed=self.journal is not None and self.journal.replaying))
        return answers

    def _made(self, asked: Sequence[Asked]) -> Iterator[Pull]:
        """The pulls in order: those of an earlier start from the journal, the others measured and written there."""
        replayed = 0
        for unit, batches in asked:
            recorded = self._replayed(unit, batches)
            if recorded is None:
                break
            replayed += 1
            yield recorded
        rest = asked[replayed:]
        if not rest:
            return
        for (unit, batches), losses in zip(rest, self.meter.measure(rest), strict=True):
            damages = paired_damages(losses.base_losses, losses.masked_losses)
            damage = sum(damages) / len(damages)  # Eq. 18, over the pull's batches
            earned = reward(damage, self.temperature * self.goal.weight(unit))
            pull = Pull(
                self.step,
                unit,
                batches,
                losses.base_losses,
                losses.masked_losses,
                damage,
                earned,
                losses.forwards,
                losses.base_distances,
                losses.masked_distances,
            )
            if self.journal:
                self.journal.append(pull.to_json())
            yield pull

    def _replayed(self, unit: Unit, batches: tuple[int, ...]) -> Pull | None:
        recorded = (
            self.journal.replay({"step": self.step, "unit": unit.to_json(), "batches": batches}) if self.journal else None
        )
        if self.journal is None or recorded is None:
            return None
        try:
            pull = jsonio.decode(recorded, Pull)
        except ValueError as error:
            raise self.journal.edited() from error
        damage = sum(pull.damages) / len(pull.damages)
        if not (_close(pull.damage, damage) and _close(pull.reward, reward(damage, self.temperature * self.goal.weight(unit)))):
            raise self.journal.edited()
        self.meter.recall(pull)
        return pull

    def _heard(self, arm: int, pull: Pull) -> Heard:
        weight = self.goal.weight(pull.unit)
        # A base loss that is not finite is the fault of what was committed before, not of this unit's mask.
        broken = not math.isfinite(pull.damage) and all(map(math.isfinite, pull.base_losses))
        damages, distances = (tuple(value / weight for value in values) for values in (pull.damages, pull.distances))
        return Heard(arm, damages, pull.reward, broken, distances)

    def _where(self, *, replayed: bool) -> Progress:
        best = self.stats.best()
        damage = self.mean_damage(best)
        return Progress(self.step, self.n_steps, self.stats.pulls, self.budget, self.pool[best], damage, replayed)

    def mean_damage(self, arm: int) -> float:
        """The mean of what the pulls of this step measured of an arm."""
        return float(self._damages[arm] / self.stats.counts[arm])

    def record(self, choice: Choice, step: int) -> Step:
        stats, arm = self.stats, choice.arm
        return Step(
            step=step,
            unit=self.pool[arm],
            mean_reward=float(stats.means[arm]),
            posterior_mean=float(stats.posterior_means[arm]),
            unit_pulls=int(stats.counts[arm]),
            pool=len(stats.counts),
            evaluated=int((stats.counts > 0).sum()),
            broken=int(stats.broken.sum()),
            sure=choice.sure,
            gradient_batches=_gradient_batches(self.meter),
        )


def _close(recorded: float, value: float) -> bool:
    """Whether a number is what its losses give, up to the last bits, in which machines differ."""
    return math.isclose(recorded, value, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(recorded) and math.isnan(value))


def select_by_score(scores: Mapping[Unit, float], *, ratio: float = 0.10, goal: Goal | None = None) -> Selection:
    """The units of lowest score, or with a goal of lowest score for their cost: the static methods.

    Ties go to the earlier unit, non-finite scores come last.
    """
    goal = goal or _count(ratio, list(scores))
    per_cost = {unit: score / goal.weight(unit) for unit, score in scores.items()}
    selected: list[Unit] = []
    for unit in by_score(list(scores), per_cost):
        if len(selected) >= goal.n_steps(selected):
            break
        selected += goal.open([unit], selected)
    return Selection(units=tuple(selected), scores=dict(scores))


def _count(ratio: float, units: Sequence[Unit]) -> Count:
    """The goal that a ratio alone sets."""
    if any(unit.kind == EXPERT for unit in units):
        raise SettingError(
            "Every layer must lose the same number of experts, so a search for them needs a goal: "
            "goal=secateur.cut.costs.uniform_quota(model, units, ratio)."
        )
    return Count(n_selected(ratio, len(units)))


def by_score(units: Sequence[Unit], scores: Mapping[Unit, float]) -> list[Unit]:
    """The units from the lowest score to the highest; non-finite scores come last."""
    return sorted(units, key=lambda unit: (not math.isfinite(scores[unit]), scores[unit] if math.isfinite(scores[unit]) else 0))
