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
    GRADIENT_PASSES,
    ArmStats,
    Belief,
    Choice,
    Conversation,
    Heard,
    Moment,
    Plan,
    Planner,
    Policy,
    Posterior,
    Request,
    Slope,
    Spent,
    check_search,
    reward,
)
from secateur.selection import Pull, Selection, Step, paired_damages
from secateur.streams import POLICY, POOLS, stream
from secateur.units import EXPERT, Unit, counts_by_layer, n_selected
from secateur.watcher import Following, Progress, Watcher, watcher_of

Asked = tuple[Unit, tuple[int, ...]]  # a pull to make: a unit, and the batches to measure it on


class Measured(NamedTuple):
    """The losses of one pull, batch by batch, and the model passes it took."""

    base_losses: tuple[float, ...]
    masked_losses: tuple[float, ...]
    forwards: int


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

    def has_gradients(self, units: Sequence[Unit]) -> bool:
        """Whether the loss has gradients in the masks of these units."""
        ...

    def slopes(self, units: Sequence[Unit], n_batches: int) -> list[Slope]:
        """The slope of each unit from so many batches; the next pulls are made on these batches."""
        ...

    def firsts(self, unit: Unit, batches: Sequence[int]) -> tuple[float, ...]:
        """The first-order term of each of these batches; empty if gradients of one were not taken under the present mask."""
        ...


@dataclass(frozen=True)
class Screen:
    """Consider only the `size` remaining candidates of lowest score.

    >>> screen = Screen(unit_scores("magnitude", model, units), size=4)
    >>> select(meter, units, policy=UCB(), ratio=0.1, screen=screen).units
    """

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
    watcher: Following = None,
) -> Selection:
    """Algorithm 1: at each step the policy measures candidates of a pool and chooses one, which is zeroed from then on.

    A step may spend `pulls_per_step` pulls; a policy that plans has a budget of its own, and may choose several units in a
    step. A `goal` ends the search in place of the ratio; experts need one. A `prior` is a belief about some units before the
    first step. The `watcher` is called after each pull and each step. Where the policy looked at gradients, the selection has
    an estimate of every candidate's damage; of a selected one it is what was known when it was chosen.

    >>> select(DamageMeter(model, batches), candidate_units(model), policy=UCB(), ratio=0.10)
    """
    check_search(pulls_per_step=pulls_per_step, temperature=temperature)
    watcher, goal = watcher_of(watcher), goal or _count(ratio, units)
    candidates = Candidates(units, goal, screen, stream(seed, POOLS))
    beliefs, policy_rng = Beliefs(prior or {}), stream(seed, POLICY)
    selected: list[Unit] = []
    steps: list[Step] = []
    trace: list[Pull] = []
    passes = Passes(1 + max((unit.layer for unit in units), default=0))
    looks = isinstance(policy, Planner) and isinstance(meter, Foreteller) and meter.has_gradients(units)
    while len(selected) < (n_steps := goal.n_steps(selected)):
        pool = candidates.pool(selected, policy.pool_size, pulls_per_step)
        plan, priced = Plan(1, pulls_per_step), goal.after(selected)
        if isinstance(policy, Planner):
            plan = policy.plan(n_steps, n_steps - len(selected), Spent(passes.count, len(trace)), gradients=looks)
            if plan.gradient_batches and isinstance(meter, Foreteller):
                watcher.look(len(selected), n_steps, plan.gradient_batches)
                passes.count += GRADIENT_PASSES * beliefs.look(meter, pool, plan.gradient_batches, priced)
        search = _StepSearch(len(selected), n_steps, pool, plan, meter, priced, temperature, journal, watcher, passes)
        options = {"wanted": plan.units, "left": n_steps - len(selected)} if isinstance(policy, Planner) else {}
        choice = search.hold(policy.run(beliefs.of(pool), plan.pulls, policy_rng, **options))
        trace += search.pulls
        beliefs.hear(pool, search.heard)
        if not candidates.learn(pool, search.stats):
            continue  # every unit of the pool broke the loss, and other candidates are left: try those
        for one in (choice, *choice.more):
            if len(selected) >= min(search.step + plan.units, goal.n_steps(selected)):
                break
            if goal.open([pool[one.arm]], selected):
                steps.append(search.record(one, len(selected)))
                selected.append(pool[one.arm])
                meter.commit(pool[one.arm])
                passes.commit(pool[one.arm])
                watcher.chosen(steps[-1], n_steps)
    looked = meter.gradient_batches if isinstance(meter, Foreteller) else 0
    return Selection(
        tuple(selected),
        steps=tuple(steps),
        trace=tuple(trace),
        gradient_batches=looked,
        passes=passes.count,
        candidates=counts_by_layer(units),
        estimates=beliefs.estimates(units, goal) if looked else {},
    )


class Passes:
    """Counts forward passes of one batch. A run counts from the first block that is new in it on, as a meter computes it.

    That is the block of its unit for a masked run, and for a base run the first in which a unit went since its batch was run.
    """

    def __init__(self, n_blocks: int) -> None:
        self.count = 0.0
        self._n_blocks = n_blocks
        self._stale: dict[int, int] = {}  # by batch: the first block that is new since its base run; n_blocks: none
        self._done: set[tuple[int, Unit]] = set()  # masked runs since the last commit

    def add(self, pull: Pull) -> None:
        for batch in pull.batches:
            blocks = self._n_blocks - self._stale.get(batch, 0)
            self._stale[batch] = self._n_blocks
            if (batch, pull.unit) not in self._done:
                blocks += self._n_blocks - pull.unit.layer
                self._done.add((batch, pull.unit))
            self.count += blocks / self._n_blocks

    def commit(self, unit: Unit) -> None:
        self._done.clear()
        self._stale = {batch: min(first, unit.layer) for batch, first in self._stale.items()}


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

    def hear(self, pool: Sequence[Unit], heard: Sequence[Heard]) -> None:
        """Add what a policy heard; non-finite damages are left out."""
        for pull in heard:
            belief = self._known.get(pool[pull.arm], Belief())
            for damage, first in zip_longest(pull.damages, pull.firsts, fillvalue=0.0):
                if math.isfinite(damage):
                    belief = replace(belief, **vars(_updated(belief, damage)), rest=_updated(belief.rest, damage - first))
            self._known[pool[pull.arm]] = belief

    def look(self, meter: Foreteller, pool: Sequence[Unit], n_batches: int, goal: Goal) -> int:
        """Take in what gradients say under the present mask, beside what they said before; return how many batches it took."""
        before = meter.gradient_batches
        for unit, slope in zip(pool, meter.slopes(pool, n_batches), strict=True):
            belief, weight = self._known.get(unit, Belief()), goal.weight(unit)
            first = replace(slope.first, mean=slope.first.mean / weight, variance=slope.first.variance / weight**2)
            new = Slope(first, slope.second / weight)
            self._known[unit] = replace(belief, slope=_merged(belief.slope, new) if belief.slope else new)
        return meter.gradient_batches - before

    def estimates(self, units: Sequence[Unit], goal: Goal) -> dict[str, tuple[tuple[float, ...], ...]]:
        """The damage to expect of each unit by all that is known, to four digits; by kind, layer and index."""
        with np.errstate(divide="ignore", invalid="ignore"):  # gradients that are all zero foretell nothing: nan
            means = Posterior(self.of(units), carry=1.0).means
        known = {
            (unit.kind, unit.layer, unit.index): float(f"{mean * goal.weight(unit):.4g}")
            for unit, mean in zip(units, means, strict=True)
        }
        return {
            kind: tuple(tuple(known.get((kind, layer, i), math.nan) for i in range(n)) for layer, n in enumerate(counts))
            for kind, counts in counts_by_layer(units).items()
        }


def _merged(old: Slope, new: Slope, carry: float = 0.5) -> Slope:
    """Both slopes in one; an example of an earlier step counts `carry` times as much as one of this step."""
    share = carry * old.first.count / (carry * old.first.count + new.first.count)
    mean, variance, second = (
        share * a + (1 - share) * b
        for a, b in (
            (old.first.mean, new.first.mean),
            (old.first.variance, new.first.variance),
            (old.second, new.second),
        )
    )
    return Slope(Moment(mean, variance, carry * old.first.count + new.first.count), second)


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
    plan: Plan
    meter: Meter
    goal: Goal
    temperature: float
    journal: Journal | None
    watcher: Watcher
    passes: Passes
    pulls: list[Pull] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)

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
        if not self.stats.counts[choice.arm] and choice.damage is None:
            raise ValueError(
                f"The policy chose arm {choice.arm}, which it never measured in this step, nor believes anything of."
            )
        return choice

    def _answer(self, request: Request) -> list[Heard]:
        if not all(0 <= arm < len(self.pool) for arm in request.arms):
            raise ValueError(f"The policy asked for the arms {request.arms}, and there are {len(self.pool)}, counted from 0.")
        wanted = len(request.arms) * request.pulls
        if not wanted or self.stats.pulls + wanted > self.plan.pulls:
            raise ValueError(f"The policy asked for {wanted} pulls and has {self.plan.pulls - self.stats.pulls} left.")
        arms, asked = [], []
        for _ in range(request.pulls):
            shared = self.meter.draw() if request.common else None
            for arm in request.arms:
                arms.append(arm)
                asked.append((self.pool[arm], shared or self.meter.draw()))
        answers = []
        for arm, pull in zip(arms, self._made(asked), strict=True):
            self.pulls.append(pull)
            self.passes.add(pull)
            self._damages[arm] += pull.damage
            answers.append(self._heard(arm, pull))
            self.stats.hear(answers[-1:])
            self.watcher.pull(self._where(pull, replayed=self.journal is not None and self.journal.replaying))
        self.heard += answers
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
            pull = Pull(self.step, unit, batches, losses.base_losses, losses.masked_losses, damage, earned, losses.forwards)
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
        firsts = self.meter.firsts(pull.unit, pull.batches) if isinstance(self.meter, Foreteller) else ()
        damages, firsts = (tuple(value / weight for value in values) for values in (pull.damages, firsts))
        return Heard(arm, damages, pull.reward, broken, firsts)

    def _where(self, pull: Pull, *, replayed: bool) -> Progress:
        best = self.stats.best()
        return Progress(
            step=self.step,
            n_steps=self.n_steps,
            pull=self.stats.pulls,
            budget=self.plan.pulls,
            best=self.pool[best],
            best_damage=self.mean_damage(best),
            replayed=replayed,
            unit=pull.unit,
            damage=pull.damage,
            units=self.plan.units,
        )

    def mean_damage(self, arm: int) -> float:
        """The mean of what the pulls of this step measured of an arm."""
        return float(self._damages[arm] / self.stats.counts[arm])

    def record(self, choice: Choice, step: int) -> Step:
        stats, arm = self.stats, choice.arm
        return Step(
            step=step,
            unit=self.pool[arm],
            mean_reward=float(stats.means[arm]) if stats.counts[arm] else math.nan,
            posterior_mean=float(stats.posterior_means[arm]),
            unit_pulls=int(stats.counts[arm]),
            pool=len(stats.counts),
            evaluated=int((stats.counts > 0).sum()),
            broken=int(stats.broken.sum()),
            sure=choice.sure,
            damage=self.mean_damage(arm) if choice.damage is None else choice.damage * self.goal.weight(self.pool[arm]),
            passes=self.passes.count,
        )


def _close(recorded: float, value: float) -> bool:
    """Whether a number is what its losses give, up to the last bits, in which machines differ."""
    return math.isclose(recorded, value, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(recorded) and math.isnan(value))


def select_by_score(scores: Mapping[Unit, float], *, ratio: float = 0.10, goal: Goal | None = None) -> Selection:
    """The units of lowest score, or with a goal of lowest score for their cost: the static methods.

    Ties go to the earlier unit, non-finite scores come last.

    >>> select_by_score(unit_scores("magnitude", model, units), ratio=0.1).units
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
