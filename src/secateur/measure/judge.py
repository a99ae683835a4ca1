"""Judging: evaluate a model with and without selected units, on data that did not choose them."""

from __future__ import annotations

from torch import nn

from secateur.data.batches import Batches, check_apart
from secateur.judgement import Evaluation, Judgement
from secateur.measure.evaluate import evaluate
from secateur.model.accounting import total_parameters, zeroed_percent
from secateur.model.families import candidate_units
from secateur.model.losses import Loss
from secateur.model.zeroing import zeroed
from secateur.selection import Selection
from secateur.settings import Settings
from secateur.watcher import Following, watcher_of


def judge(
    model: nn.Module,
    selection: Selection,
    batches: Batches,
    *,
    dense: Evaluation | None = None,
    loss: Loss | None = None,
    watcher: Following = None,
) -> Judgement:
    """Evaluate the model with and without the selected units; `dense` is the dense evaluation, if it is known already.

    >>> judge(model, selection, evaluation).zeroed.perplexity
    """
    watcher = watcher_of(watcher)
    if selection.calibration and (remark := check_apart(selection.calibration, batches.source)):
        watcher.say(remark)
    settings = selection.made_with.settings if selection.made_with else Settings("")
    candidates = len(candidate_units(model, settings.target, settings.group_width))
    return judge_apart(model, selection, batches, candidates=candidates, dense=dense, loss=loss, watcher=watcher)


def judge_apart(
    model: nn.Module,
    selection: Selection,
    batches: Batches,
    *,
    candidates: int,
    dense: Evaluation | None = None,
    loss: Loss | None = None,
    watcher: Following = None,
) -> Judgement:
    """The same for a caller who knows that the data did not choose, and the number of candidates."""
    watcher = watcher_of(watcher)
    if dense is None:
        watcher.stage("evaluating the dense model")
        dense = evaluate(model, batches, watcher.evaluated, loss=loss)
    watcher.judged("dense", dense)
    watcher.stage("evaluating with the units zeroed")
    with zeroed(model, selection.units):
        without = evaluate(model, batches, watcher.evaluated, loss=loss)
    watcher.judged("zeroed", without)
    return Judgement(
        dense=dense,
        zeroed=without,
        units=selection.units,
        candidates=candidates,
        total_params=total_parameters(model),
        zeroed_percent=zeroed_percent(model, selection.units),
        pulls=selection.pulls,
        forwards=selection.forwards,
        nonfinite_pulls=selection.nonfinite_pulls,
        goal=selection.goal,
    )
