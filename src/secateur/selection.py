"""Selection: build the mask one unit at a time (section 3.8), and the Selection that comes of it.

Meets the model only through a `Meter`; knows no tensor. The journal, if there is one, holds every pull already made.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from secateur import jsonio
from secateur.errors import SelectionError, SettingError, first_line
from secateur.journal import Journal
from secateur.policies import UCB, ArmStats, Greedy, Policy, reward
from secateur.streams import POLICY, POOLS, stream
from secateur.units import Unit, n_selected

FORMAT = 1  # of selection.json
SOURCE_FIELDS = {"name": str, "split": str, "files": list, "rows": list}  # of its calibration


class Meter(Protocol):
    """What selection needs of a model: draw calibration batches, measure a unit on them, keep a unit out for good."""

    def draw(self) -> tuple[int, ...]: ...
    def measure(self, unit: Unit, batches: Sequence[int]) -> tuple[list[float], list[float]]: ...
    def expect(self, pulls: Iterable[tuple[Unit, Sequence[int]]]) -> None: ...
    def recall(
        self, unit: Unit, batches: Sequence[int], base_losses: Sequence[float], masked_losses: Sequence[float]
    ) -> None: ...
    def commit(self, unit: Unit) -> None: ...
    @property
    def forwards(self) -> int: ...


@dataclass(frozen=True)
class Pull:
    """One paired candidate evaluation: base and masked loss on the same batches (Eq. 16-19)."""

    step: int
    unit: Unit
    batches: tuple[int, ...]
    base_losses: tuple[float, ...]
    masked_losses: tuple[float, ...]
    damage: float
    reward: float
    forwards: int

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"unit": self.unit.to_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Pull:
        pull = cls(
            step=index(fields["step"]),
            unit=Unit.from_json(fields["unit"]),
            batches=tuple(index(b) for b in fields["batches"]),
            base_losses=tuple(float(x) for x in fields["base_losses"]),
            masked_losses=tuple(float(x) for x in fields["masked_losses"]),
            damage=float(fields["damage"]),
            reward=float(fields["reward"]),
            forwards=index(fields["forwards"]),
        )
        if not len(pull.batches) == len(pull.base_losses) == len(pull.masked_losses):
            raise ValueError("a pull has a base and a masked loss for each of its batches")
        return pull


@dataclass(frozen=True)
class Progress:
    """Where a search stands, after a pull."""

    step: int
    n_steps: int
    pull: int
    n_pulls: int
    best: Unit
    best_reward: float
    replayed: bool


@dataclass(frozen=True)
class Selection:
    """Ordered units, the settings that led to them, and the trace of every pull: the JSON that moves between commands."""

    units: tuple[Unit, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    steps: tuple[dict[str, Any], ...] = ()  # per step: the unit, its mean reward and posterior mean, pool and broken counts
    trace: tuple[Pull, ...] = ()
    scores: dict[Unit, float] = field(default_factory=dict)  # of a static method: every candidate's score
    versions: dict[str, str] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)  # what chose, so that it can be kept from judging
    goal: dict[str, Any] = field(default_factory=dict)  # where a target was set: what was asked for, and what was got

    @property
    def pulls(self) -> int:
        """Paired candidate evaluations spent: the tables' Evals."""
        return len(self.trace)

    @property
    def forwards(self) -> int:
        """Model passes spent on those pulls; fewer than two a batch, since base losses are shared within a step."""
        return sum(pull.forwards for pull in self.trace)

    @property
    def nonfinite_pulls(self) -> int:
        return sum(not math.isfinite(pull.damage) for pull in self.trace)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "settings": self.settings,
            "versions": self.versions,
            "pulls": self.pulls,
            "forwards": self.forwards,
            "nonfinite_pulls": self.nonfinite_pulls,
            "calibration": self.calibration,
            "goal": self.goal,
            "units": [unit.to_json() for unit in self.units],
            "steps": list(self.steps),
            "scores": [{**unit.to_json(), "score": score} for unit, score in self.scores.items()],
            "trace": [pull.to_json() for pull in self.trace],
        }

    def save(self, path: str | Path) -> None:
        fields = jsonio.to_json(self.to_json())
        # One line a pull: readable by eye and by line tools, and still one JSON document.
        lists = {name: fields.pop(name) for name in ("units", "steps", "scores", "trace")}
        settings = json.dumps(fields.pop("settings"), indent=1, ensure_ascii=False)
        parts = [f'"settings": {settings}', *(f'"{name}": {json.dumps(value)}' for name, value in fields.items())]
        for name, items in lists.items():
            rows = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in items)
            parts.append(f'"{name}": [\n  {rows}\n]' if items else f'"{name}": []')
        jsonio.write_text(Path(path), "{\n" + ",\n".join(parts) + "\n}\n")

    @classmethod
    def load(cls, path: str | Path) -> Selection:
        """Read a selection.json.

        >>> Selection.load("out/selection.json").units
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SelectionError(f"Cannot read the selection {path}: {error.strerror or error}.") from error
        except ValueError as error:
            raise SelectionError(f"{path} is not a selection: it does not hold valid JSON ({error}).") from error
        if not isinstance(fields, dict) or "units" not in fields:
            raise SelectionError(f"{path} is not a selection: it has no list of units.")
        if fields.get("format") != FORMAT:
            raise SelectionError(f"{path} has format {fields.get('format')!r}; this version of Secateur reads format {FORMAT}.")
        try:
            source = fields["calibration"]
            if source and not all(isinstance(source[name], kind) for name, kind in SOURCE_FIELDS.items()):
                raise TypeError("its calibration is not described as it should be")
            units = tuple(Unit.from_json(unit) for unit in fields["units"])
            if len(set(units)) < len(units):
                raise ValueError("a unit is in it twice")
            return cls(
                units=units,
                settings=dict(fields["settings"]),
                steps=tuple(fields["steps"]),
                trace=tuple(Pull.from_json(pull) for pull in fields["trace"]),
                scores={Unit.from_json(row): float(row["score"]) for row in fields["scores"]},
                versions=dict(fields["versions"]),
                calibration=dict(source),
                goal=dict(fields.get("goal", {})),
            )
        except KeyError as error:
            raise SelectionError(f"{path} is a damaged selection: it lacks {error}.") from error
        except (TypeError, ValueError, AttributeError, SelectionError) as error:
            raise SelectionError(f"{path} is a damaged selection: {first_line(error)}") from error


@dataclass(frozen=True)
class Quota:
    """How many units each cell of the candidates gives, no more and no less: a layer, or a K/V group of one."""

    cells: Mapping[Unit, Hashable]
    room: Mapping[Any, int]

    def open(self, units: Iterable[Unit], selected: Iterable[Unit]) -> list[Unit]:
        """Those of the units whose cells have not given all they are to give."""
        given = Counter(self.cells[unit] for unit in selected)
        return [unit for unit in units if unit in self.cells and given[self.cells[unit]] < self.room[self.cells[unit]]]

    def some(self) -> list[Unit]:
        """Some units that fill it."""
        taken: list[Unit] = []
        for unit in self.cells:
            taken += self.open([unit], taken)
        return taken

    @property
    def n_selected(self) -> int:
        return sum(self.room.values())


@dataclass(frozen=True)
class Goal:
    """To remove units until at most `share` of a cost is left, those first that do the least damage for what they cost."""

    what: str
    share: float
    left: Callable[[Sequence[Unit]], float]  # the share of the cost that is left without these units
    costs: Mapping[Unit, float]  # each unit's own share, about: what is left is asked of `left`

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise SettingError(f"The target is {self.share} of the dense model's {self.what}, but must lie between 0 and 1.")
        least = self.left(list(self.costs))
        if least > self.share:
            raise SettingError(
                f"Without any of the {len(self.costs)} candidates {least:.1%} of the {self.what} would still be left, and "
                f"{self.share:.1%} were asked for; ask for more, or let more kinds of units go with --target."
            )

    def weight(self, unit: Unit) -> float:
        """What the unit costs, as a multiple of what one costs on average."""
        mean = sum(self.costs.values()) / len(self.costs)
        return max(self.costs[unit] / mean, 1e-3) if mean > 0 else 1.0

    def n_steps(self, selected: Sequence[Unit]) -> int:
        """About how many units it takes in all, when these are out: just these, once the goal is met."""
        missing = self.left(selected) - self.share
        mean = sum(self.costs.values()) / len(self.costs)
        return len(selected) + (0 if missing <= 0 else max(1, math.ceil(missing / mean)) if mean > 0 else 1)


def active_pool(remaining: Sequence[Unit], rng: np.random.Generator, size: int | None = None) -> list[Unit]:
    """A_s: a seeded draw of `size` remaining candidates, by default min{|R|, max(2, floor(2 sqrt|R|))} (section 4)."""
    n = len(remaining)
    size = min(n, max(2, math.floor(2 * math.sqrt(n))) if size is None else size)
    return [remaining[i] for i in rng.choice(n, size=size, replace=False)]


def screened(remaining: Sequence[Unit], scores: Mapping[Unit, float], size: int) -> list[Unit]:
    """The `size` remaining candidates of lowest score, in the order they came in."""
    kept = set(_by_score(remaining, scores)[:size])
    return [unit for unit in remaining if unit in kept]


def select(
    meter: Meter,
    units: Sequence[Unit],
    *,
    policy: Policy,
    ratio: float = 0.10,
    goal: Goal | None = None,
    quota: Quota | None = None,
    pulls_per_step: int = 32,
    temperature: float = 0.02,
    seed: int = 42,
    pool_size: int | None = None,
    screen: int | None = None,
    screen_scores: Mapping[Unit, float] | None = None,
    journal: Journal | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Selection:
    """Algorithm 1: at each step let `policy` spend `pulls_per_step` pulls on a pool, then keep out the best unit.

    With a `goal` or a `quota` these say when it is enough, and not the ratio. `screen` narrows each step's remaining candidates
    to those of lowest `screen_scores` before the pool is drawn. With the policy `Greedy()` the pool is the trial set G_s of
    `pulls_per_step` candidates, each pulled once on the same batches.

    >>> select(DamageMeter(model, batches), candidate_units(model), policy=UCB(), ratio=0.10)
    """
    n_steps = _n_steps(len(units), ratio, goal, quota)
    check_search(pulls_per_step=pulls_per_step, temperature=temperature, pool_size=pool_size, screen=screen)
    if screen is not None and screen_scores is None:
        raise SettingError(f"A screen of {screen} candidates needs the scores to screen by.")
    pool_rng, policy_rng = stream(seed, POOLS), stream(seed, POLICY)
    greedy = isinstance(policy, Greedy)
    trace: list[Pull] = []
    steps: list[dict[str, Any]] = []
    selected: list[Unit] = []
    broken: set[Unit] = set()  # masks that made the loss non-finite: last in line from then on

    while len(selected) < (k := n_steps(selected)):
        step = len(selected)
        remaining = [unit for unit in units if unit not in selected]
        remaining = quota.open(remaining, selected) if quota else remaining
        remaining = [unit for unit in remaining if unit not in broken] or remaining
        last_resort = set(remaining) <= broken
        if screen is not None and screen_scores is not None:
            remaining = screened(remaining, screen_scores, screen)
        pool = active_pool(remaining, pool_rng, pulls_per_step if greedy else pool_size)
        common = meter.draw() if greedy else None
        stats = ArmStats(len(pool))  # fresh every step: nothing to reset, nothing to forget
        n_pulls = len(pool) if greedy else pulls_per_step
        draws = [common or meter.draw() for _ in range(n_pulls)]
        if isinstance(policy, UCB | Greedy):  # they pull each arm once, in the pool's order, whatever the answers
            meter.expect(zip(pool, draws, strict=False))
        for i in range(n_pulls):
            arm = policy.choose(stats, policy_rng)
            weight = goal.weight(pool[arm]) if goal else 1.0
            made = _pull(meter, journal, step, pool[arm], draws[i], temperature * weight)
            trace.append(made)
            # A base loss that is not finite is the fault of what was committed before, not of this unit's mask.
            blameless = math.isfinite(made.damage) or not all(map(math.isfinite, made.base_losses))
            stats.update(arm, made.reward, finite=blameless)
            if progress:
                best = stats.best()
                replayed = journal is not None and len(trace) <= journal.n_replayed
                progress(Progress(step, k, i + 1, n_pulls, pool[best], float(stats.means[best]), replayed))
        broken.update(unit for unit, bad in zip(pool, stats.broken, strict=True) if bad)
        if stats.all_broken and not last_resort:
            continue  # nothing finite in this pool and other candidates are left: search on for this step among those
        best = stats.best()
        selected.append(pool[best])
        meter.commit(pool[best])
        steps.append(_step_record(step, pool[best], best, stats))
    return Selection(units=tuple(selected), steps=tuple(steps), trace=tuple(trace))


def _n_steps(n_units: int, ratio: float, goal: Goal | None, quota: Quota | None) -> Callable[[Sequence[Unit]], int]:
    """How many units are to be selected in all, given those that are."""
    if goal and not quota:
        return goal.n_steps
    k = quota.n_selected if quota else n_selected(ratio, n_units)
    return lambda selected: k


def _pull(meter: Meter, journal: Journal | None, step: int, unit: Unit, batches: tuple[int, ...], temperature: float) -> Pull:
    """One pull: taken from the journal if it was made before, measured and written there if not."""
    recorded = journal.replay({"step": step, "unit": unit.to_json(), "batches": batches}) if journal else None
    if journal and recorded is not None:
        try:
            made = Pull.from_json(recorded)
        except (KeyError, TypeError, ValueError) as error:
            raise journal.edited() from error
        meter.recall(made.unit, made.batches, made.base_losses, made.masked_losses)
        return made
    before = meter.forwards
    base, masked = meter.measure(unit, batches)
    damage = sum(m - b for m, b in zip(masked, base, strict=True)) / len(base)  # Eq. 18, over the pull's batches
    earned = reward(damage, temperature)
    made = Pull(step, unit, batches, tuple(base), tuple(masked), damage, earned, meter.forwards - before)
    if journal:
        journal.append(made.to_json())
    return made


def _step_record(step: int, unit: Unit, arm: int, stats: ArmStats) -> dict[str, Any]:
    return {
        "step": step,
        "unit": unit.to_json(),
        "mean_reward": float(stats.means[arm]),
        "posterior_mean": float(stats.posterior_means[arm]),
        "unit_pulls": int(stats.counts[arm]),
        "pool": len(stats.counts),
        "evaluated": int((stats.counts > 0).sum()),
        "broken": int(stats.broken.sum()),
    }


def select_by_score(
    scores: Mapping[Unit, float], *, ratio: float = 0.10, goal: Goal | None = None, quota: Quota | None = None
) -> Selection:
    """The units of lowest score, or with a goal of lowest score for their cost: the static methods.

    Ties go to the earlier unit, non-finite scores come last.
    """
    n_steps = _n_steps(len(scores), ratio, goal, quota)
    per_cost = {unit: score / goal.weight(unit) for unit, score in scores.items()} if goal else scores
    selected: list[Unit] = []
    for unit in _by_score(list(scores), per_cost):
        if len(selected) >= n_steps(selected):
            break
        if not quota or quota.open([unit], selected):
            selected.append(unit)
    return Selection(units=tuple(selected), scores=dict(scores))


def check_search(*, pulls_per_step: int, temperature: float, pool_size: int | None, screen: int | None) -> None:
    """Refuse search settings that cannot work, before anything is loaded or measured."""
    if pulls_per_step < 1:
        raise SettingError(f"The pulls per step are {pulls_per_step}, but must be at least 1.")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise SettingError(f"The reward temperature is {temperature}, but must be a finite number above 0.")
    if pool_size is not None and pool_size < 1:
        raise SettingError(f"The pool size is {pool_size}, but must be at least 1.")
    if screen is not None and screen < 1:
        raise SettingError(f"The screen keeps {screen} candidates, but must keep at least 1.")


def _by_score(units: Sequence[Unit], scores: Mapping[Unit, float]) -> list[Unit]:
    return sorted(units, key=lambda unit: (not math.isfinite(scores[unit]), scores[unit] if math.isfinite(scores[unit]) else 0))
