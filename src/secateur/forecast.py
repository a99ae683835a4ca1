"""Forecast: what a prune or a choice would do and how long it would take here, from a few measured pulls. Writes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from secateur.checks import check_prune, check_select
from secateur.cut.checkpoint import check_cut, check_cut_place
from secateur.cut.costs import goal_of
from secateur.data.batches import Batches, check_apart
from secateur.healing import Healing
from secateur.measure.evaluate import evaluate
from secateur.methods import GRADIENTS, METHODS
from secateur.model.families import candidate_units, family_of, task_of
from secateur.model.loading import Opened
from secateur.model.losses import device_of
from secateur.search.choose import in_forwards, meter_of
from secateur.search.damage import DamageMeter, default_lanes, free_memory
from secateur.search.goals import Count
from secateur.search.policies import GRADIENT_PASSES, Moment, Slope
from secateur.search.scores import channel_orders, unit_scores
from secateur.search.select import Asked, Measured, Screen, select
from secateur.selection import Pull
from secateur.settings import GROUPS, NONE, ZEROED, Cutting, Job, Judging, Machine, Settings, keywords, make_job
from secateur.steps import calibration_of, evaluation_of, open_job, repair_data_of
from secateur.streams import BATCHES, stream
from secateur.tasks import TASKS, TEXT
from secateur.units import MLP, Unit, kinds_of, n_selected
from secateur.watcher import Following, Watcher, watcher_of

Value = str | int | float | bool | None
REHEARSED = 16  # steps of a search that are played through; more are like them


@dataclass(frozen=True)
class Forecast:
    """What would be done. `forwards` and `seconds` are estimates, and with a goal `removed` and `pulls` are, too.

    >>> forecast_of("gpt2", ratio=0.1, calibration="wikitext2").seconds
    """

    model: str
    family: str
    task: str
    candidates: int
    removed: int
    goal: str | None  # the goal in words; None where the ratio decides
    calibration_batches: int
    evaluation_batches: int
    pulls: int  # 0: the method scores candidates and measures none
    forwards: int
    seconds: dict[str, float]  # by stage
    more: tuple[str, ...]  # stages that come on top, whose time is not known
    settings: dict[str, Value]  # those that apply, with the defaults of the task and the machine

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_seconds": self.total_seconds}


def forecast_of(
    model: str, *, out: Path | None = None, judged: bool = True, watcher: Following = None, **settings: Any
) -> Forecast:
    """What `prune`, or where `judged` is false `select_to`, would do with the same arguments; refuses what they refuse.

    Loads the model and the data, plays the search through with invented damages, and measures a few pulls and batches.

    >>> forecast_of("gpt2", ratio=0.1, calibration="wikitext2").pulls
    """
    watcher, job = watcher_of(watcher), make_job(model, **settings)
    cuts = judged and out is not None and job.settings.layout != NONE
    if judged:
        check_prune(job, out)
    elif out:
        check_select(job, out)
    if out and cuts:
        check_cut_place(out, followed_by="selection.json")
    started = time.perf_counter()
    opened, job = open_job(job, watcher)
    calibration = calibration_of(opened, job.settings, watcher)
    evaluation = evaluation_of(opened, job) if judged else None
    loading = time.perf_counter() - started
    if evaluation:
        check_apart(calibration.source, evaluation.source)
        check_cut(opened, job.cutting, len(repair_data_of(opened, job, calibration, evaluation, watcher)))
    units = candidate_units(opened.model, job.settings.target, job.settings.group_width)
    watcher.stage("measuring a few pulls")
    removed = _removed(opened, job.settings, units, watcher)
    choosing, runs, pool = _choosing(opened, calibration, job, units, removed)
    seconds = {"loading": loading, "choosing": choosing + _grouping_seconds(opened, calibration, job.settings)}
    if evaluation:
        seconds["evaluating"] = _batch_seconds(opened, evaluation) * len(evaluation) * (3 if cuts else 2)
    more = ["measuring what units cost"] if job.settings.keep_latency else []
    if cuts:
        more += ["cutting", "proving", *(["repairing"] if job.cutting.repair else [])]
        more += [f"healing for {job.healing.amount}"] if job.healing.amount else []
        more += ["measuring dense against small"] if job.cutting.measure else []
    keep = job.settings.keep
    return Forecast(
        model=opened.name,
        family=family_of(opened.model),
        task=task_of(opened.model),
        candidates=len(units),
        removed=removed,
        goal=f"keep {keep[1]:g} of the {keep[0]}" if keep else None,
        calibration_batches=len(calibration),
        evaluation_batches=len(evaluation) if evaluation else 0,
        pulls=runs.pulls,
        forwards=runs.forwards,
        seconds=seconds,
        more=tuple(more),
        settings=_applying(opened, job, len(calibration), pool, judged=judged, cuts=cuts),
    )


def _removed(opened: Opened, settings: Settings, units: Sequence[Unit], watcher: Watcher) -> int:
    """How many units would go. The time that units save takes long to measure: here their FLOPs stand for it."""
    known = replace(settings, keep_flops=settings.keep_latency or settings.keep_flops, keep_latency=None)
    goal = goal_of(known, opened, units, None, watcher)
    return goal.n_steps([]) if goal else n_selected(settings.ratio, len(units))


def _grouping_seconds(opened: Opened, calibration: Batches, settings: Settings) -> float:
    """The time that the scores of MLP channels would take, by one batch."""
    if not settings.orders_channels:
        return 0.0
    started = time.perf_counter()
    channel_orders(opened.model, settings.group_by, calibration[:1], opened.loss)
    return (time.perf_counter() - started) * min(settings.score_batches, len(calibration))


# The search, played through


class _Runs(NamedTuple):
    """The work of a search, in pulls and model passes."""

    pulls: int = 0
    first: int = 0  # passes without a further unit, on batches that are new
    again: int = 0  # the same on batches whose block outputs are kept up to the unit that was selected last
    together: int = 0  # passes with a unit masked, in requests for several
    alone: int = 0
    gradients: int = 0  # batches whose gradients are taken

    @property
    def forwards(self) -> int:
        return self.first + self.again + self.together + self.alone + GRADIENT_PASSES * self.gradients


class _Rehearsal:
    """A meter that measures nothing. It draws batches as the real one does, invents damages, and counts the runs."""

    def __init__(self, n_batches: int, settings: Settings, *, gradients: bool) -> None:
        self._n, self._settings, self._gradients = n_batches, settings, gradients
        self._rng = stream(settings.seed, BATCHES)
        self._seen: set[int] = set()
        self.runs = _Runs()
        self._begin_step()

    @property
    def gradient_batches(self) -> int:
        return self.runs.gradients

    def _begin_step(self) -> None:
        size = self._n if self._settings.planned else self._settings.batches_per_step or self._n
        self._step_batches = self._rng.choice(self._n, size=size, replace=False)
        self._done: set[int | tuple[Unit, int]] = set()

    def draw(self) -> tuple[int, ...]:
        size = 1 if self._settings.planned else self._settings.batches_per_pull
        drawn = self._rng.choice(self._step_batches, size=size, replace=False)
        return tuple(int(i) for i in drawn)

    def measure(self, pulls: Sequence[Asked]) -> Iterator[Measured]:
        for unit, batches in pulls:
            base = set(batches) - self._done
            masked = {(unit, i) for i in batches} - self._done
            self._done |= base | masked
            first = len(base - self._seen)
            self._seen |= base
            together = len(masked) if len(pulls) > 1 else 0
            work = _Runs(1, first, len(base) - first, together, len(masked) - together)
            self.runs = _Runs(*(a + b for a, b in zip(self.runs, work, strict=True)))
            damages = self._rng.normal(0, self._settings.temperature, len(batches))
            yield Measured((0.0,) * len(batches), tuple(damages.tolist()), len(base) + len(masked))

    def has_gradients(self, units: Sequence[Unit]) -> bool:
        return self._gradients

    def slopes(self, units: Sequence[Unit], n_batches: int) -> list[Slope]:
        self.runs = self.runs._replace(gradients=self.runs.gradients + min(n_batches, self._n))
        return [Slope(Moment(0.0, 1.0, 1), 1.0)] * len(units)

    def firsts(self, unit: Unit, batches: Sequence[int]) -> tuple[float, ...]:
        return ()

    def recall(self, pull: Pull) -> None: ...

    def commit(self, unit: Unit) -> None:
        self._begin_step()


def _rehearsed(
    settings: Settings, n_batches: int, units: Sequence[Unit], removed: int, screen: Screen | None, *, gradients: bool
) -> _Runs:
    """The runs of the whole search, from those of its first steps; a budget is for all steps, so that all are played."""
    assert settings.row.policy
    steps = removed if settings.planned else min(removed, REHEARSED)
    meter = _Rehearsal(n_batches, settings, gradients=gradients)
    select(
        meter,
        units,
        policy=settings.row.policy(settings),
        goal=Count(steps),
        pulls_per_step=settings.pulls_per_step,
        temperature=settings.temperature,
        seed=settings.seed,
        screen=screen,
    )
    pulls, first, again, together, alone, looked = meter.runs
    scale = removed / steps
    later = round((first + again) * scale) - first  # after some steps hardly a batch is new
    return _Runs(round(pulls * scale), first, later, round(together * scale), round(alone * scale), round(looked * scale))


# Time


def _choosing(
    opened: Opened, calibration: Batches, job: Job, units: Sequence[Unit], removed: int
) -> tuple[float, _Runs, int | None]:
    """The seconds of the choice, the runs that are made for it, and the candidates of its first pool."""
    settings, screen, scoring = job.settings, None, 0.0
    score = settings.scored_by
    if settings.row.search:
        a_pass = _batch_seconds(opened, calibration) * (3 if settings.row.needs == GRADIENTS else 1)
        return a_pass * settings.score_passes(len(calibration)), _Runs(), None
    if score:
        started = time.perf_counter()
        scores = unit_scores(score, opened.model, units, batches=calibration[:1], seed=settings.seed)
        n_batches = min(settings.score_batches, len(calibration)) if METHODS[score].needs_batches else 1
        scoring = (time.perf_counter() - started) * n_batches
        screen = Screen(scores, settings.screen or len(units))
    policy_of = settings.row.policy
    if policy_of is None:
        return scoring, _Runs(), None
    if settings.fills:  # learnt in a pass over all batches; a pull then takes about as long as without
        scoring += _batch_seconds(opened, calibration) * len(calibration)
    # Refuses budgets that these batches do not allow.
    meter = meter_of(opened, calibration, replace(settings, damage=ZEROED), job.machine)
    settings = in_forwards(settings, meter)
    runs = _rehearsed(
        settings, len(calibration), units, removed, screen, gradients=settings.planned and meter.has_gradients(units)
    )
    kept = screen.kept(units) if screen else units
    with closing(meter):
        costs = _run_seconds(meter, kept, gradients=runs.gradients > 0)
    pool = min(len(kept), policy_of(settings).pool_size(len(kept), settings.pulls_per_step))
    return scoring + sum(n * cost for n, cost in zip(runs, costs, strict=True)), runs, pool


class _Costs(NamedTuple):
    """The seconds of each of the `_Runs`."""

    pulls: float
    first: float
    again: float
    together: float
    alone: float
    gradients: float = 0.0


def _run_seconds(meter: DamageMeter, units: Sequence[Unit], *, gradients: bool) -> _Costs:
    """Measure a few pulls on early, middle and late blocks: at once, one after another, on new batches, after a commit."""
    ordered = sorted(units, key=lambda unit: unit.layer)
    spread = [ordered[i * (len(ordered) - 1) // 7] for i in range(8)]  # the same unit twice if there are fewer
    batches = meter.draw()
    n = len(batches)
    _seconds(meter, [(spread[0], batches)])  # warms up, and keeps the block outputs
    together = _seconds(meter, [(spread[i], batches) for i in (1, 3, 6)]) / (3 * n)
    alone = sum(_seconds(meter, [(spread[i], batches)]) for i in (2, 4, 5)) / (3 * n)
    others = [i for i in range(len(meter.batches)) if i not in batches][:n]
    first = _seconds(meter, [(spread[4], others)]) / len(others) - alone if others else alone
    meter.commit(spread[3])
    again = _seconds(meter, [(spread[5], batches)]) / n - alone
    costs = _Costs(0.0, max(first, 0.0), max(again, 0.0), together, alone)
    if gradients:
        started = time.perf_counter()
        meter.slopes(units, 1)
        costs = costs._replace(gradients=time.perf_counter() - started)
    return costs


def _seconds(meter: DamageMeter, pulls: Sequence[tuple[Unit, Sequence[int]]]) -> float:
    started = time.perf_counter()
    for _ in meter.measure([(unit, tuple(batches)) for unit, batches in pulls]):
        pass
    return time.perf_counter() - started


def _batch_seconds(opened: Opened, evaluation: Batches) -> float:
    """The time of a batch, from the second and third; the first warms up."""
    evaluate(opened.model, evaluation[:1], loss=opened.loss)
    measured = evaluation[1:3] or evaluation[:1]
    started = time.perf_counter()
    evaluate(opened.model, measured, loss=opened.loss)
    return (time.perf_counter() - started) / len(measured)


# Settings


def _applying(opened: Opened, job: Job, n_batches: int, pool: int | None, *, judged: bool, cuts: bool) -> dict[str, Value]:
    """The settings that this job reads, with what the task and the machine decide in place of None."""
    groups = {Settings, Machine, *([Judging] if judged else []), *([Cutting] if cuts else [])}
    groups |= {Healing} if cuts and job.healing.amount else set()
    parts = dict(zip(GROUPS, job, strict=False))  # then come what was given, and the shares
    left_out = job.settings.unused() | ({"ratio"} if job.settings.keep else set())
    if not job.settings.row.policy:
        left_out |= {"screen", "lanes", "cache_memory", "workers", "ray"}
    if not job.machine.ray:
        left_out |= {"ray", "cpus_per_worker", "gpus_per_worker"}
    if MLP not in kinds_of(job.settings.target):
        left_out |= {"group_width"}
    if TASKS[task_of(opened.model)].inputs != TEXT:
        left_out |= {"seq_len"}
    here: dict[str, Value] = {
        "device": opened.device,
        "batches_per_step": job.settings.batches_per_step or n_batches,
        "pool_size": job.settings.pool_size or pool,
        "lanes": job.machine.lanes or default_lanes(opened.model),
        "cache_memory": job.machine.cache_memory,
    }
    if here["cache_memory"] is None:
        here["cache_memory"] = free_memory(device_of(opened.model)) // 2
    return {
        name: here.get(name, getattr(parts[group], field.name))
        for name, (group, field) in keywords().items()
        if group in groups and name not in left_out
    }
