"""Choosing: make a selection from a model, calibration batches and settings, with the method that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from secateur.data.batches import Batches
from secateur.files.journal import Journal
from secateur.model.loading import Opened, versions
from secateur.model.moments import fills_of
from secateur.search.damage import DamageMeter
from secateur.search.goals import Count, Goal
from secateur.search.scores import unit_scores, unit_set
from secateur.search.select import Screen, select, select_by_score
from secateur.search.spread import Spread
from secateur.selection import Selection
from secateur.settings import OF_A_STEP, SECONDS, Machine, Provenance, Settings, needs_ratio
from secateur.units import Unit, n_selected
from secateur.watcher import Followed, Following, Watcher, watcher_of


def provenance(opened: Opened, settings: Settings, calibration: Batches) -> Provenance:
    """The settings and digests that a selection depends on."""
    return Provenance(replace(settings, device=opened.device), opened.digest, calibration.source.digest)


def meter_of(
    opened: Opened,
    calibration: Batches,
    settings: Settings,
    machine: Machine,
    *,
    units: Sequence[Unit] = (),
    watcher: Watcher | None = None,
) -> DamageMeter:
    """The meter that measures these candidates as the settings say; its workers, if there are any, live until it is closed."""
    watcher, fills = watcher or Watcher(), None
    if settings.fills:
        watcher.stage("learning what units say of each other")
        fills = fills_of(opened.model, units, calibration, watcher.evaluated)
        watcher.stage("choosing units")
    runner = Spread(opened, calibration, settings, machine, fills) if machine.elsewhere else None
    return DamageMeter(
        opened.model,
        calibration,
        loss=opened.loss,
        batches_per_pull=1 if settings.planned else settings.batches_per_pull,
        batches_per_step=None if settings.planned else settings.batches_per_step,
        cache_memory=machine.cache_memory,
        stack=settings.stack,
        lanes=machine.lanes,
        seed=settings.seed,
        fills=fills,
        runner=runner,
        progress=watcher.evaluated,
    )


def choose_units(
    opened: Opened,
    calibration: Batches,
    settings: Settings,
    *,
    units: Sequence[Unit],
    goal: Goal | None = None,
    machine: Machine | None = None,
    journal: Journal | None = None,
    watcher: Following = None,
) -> Selection:
    """The units that the settings' method chooses from the candidates `units`, with all that a selection.json records."""
    watcher, machine = watcher_of(watcher), machine or Machine()
    watcher.stage("choosing units")
    batches = Followed(calibration[: settings.score_batches], watcher.evaluated)
    if machine.elsewhere and not settings.row.policy:
        watcher.say(f"The method {settings.method} makes no measurements that workers could share: it runs in this process.")
    if settings.row.search:
        k = _count(settings, units, goal)
        chosen = unit_set(settings.method, opened.model, units, k=k, batches=batches, loss=opened.loss, seed=settings.seed)
    elif not settings.row.policy:
        scores = unit_scores(settings.method, opened.model, units, batches=batches, loss=opened.loss, seed=settings.seed)
        chosen = select_by_score(scores, ratio=settings.ratio, goal=goal)
    else:
        meter = meter_of(opened, calibration, settings, machine, units=units, watcher=watcher)
        settings_here, screen = in_forwards(settings, meter, journal, watcher), None
        if settings.screening:
            scores = unit_scores(settings.screen_by, opened.model, units, batches=batches, loss=opened.loss, seed=settings.seed)
            screen = Screen(scores, settings.screen or len(units))
        with closing(meter):
            chosen = select(
                meter,
                units,
                policy=settings.row.policy(settings_here),
                ratio=settings.ratio,
                goal=goal,
                pulls_per_step=settings.pulls_per_step,
                temperature=settings.temperature,
                seed=settings.seed,
                screen=screen,
                journal=journal,
                watcher=watcher,
            )
        if meter.cache_was_full:
            watcher.say("The cache memory did not hold the block outputs of all batches: a larger --cache-memory is faster.")
    return replace(
        chosen,
        made_with=provenance(opened, settings, calibration),
        versions=versions(),
        passes=chosen.passes + settings.score_cost(len(calibration)),
        calibration=calibration.source,
        goal=goal.reached(chosen.units) if goal else None,
    )


def in_forwards(settings: Settings, meter: DamageMeter, journal: Journal | None = None, watcher: Following = None) -> Settings:
    """The same with a budget of seconds turned into forwards, once: a search that goes on takes what its journal says."""
    watcher = watcher_of(watcher)
    if not settings.planned:
        return settings
    if unread := [name for name in OF_A_STEP if getattr(settings, name) != getattr(Settings, name)]:
        watcher.say(f"{settings.method} has a budget for the whole search, --budget, and does not read {', '.join(unread)}.")
    amount, what = settings.amount
    if what != SECONDS:
        return settings

    def find() -> int:
        return max(1, round(amount / meter.pass_seconds()))

    forwards = journal.fact("forwards", find) if journal else find()
    watcher.say(f"{settings.budget} are about {forwards} forwards here; --budget {forwards}forwards repeats this search.")
    return replace(settings, budget=f"{forwards}forwards")


def _count(settings: Settings, units: Sequence[Unit], goal: Goal | None) -> int:
    """How many units a method that chooses whole sets is asked for."""
    if goal is None:
        return n_selected(settings.ratio, len(units))
    if not isinstance(goal, Count):
        raise needs_ratio(settings.method)
    return goal.k
