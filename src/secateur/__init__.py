"""Prune pretrained transformers by measured, paired damage. The README shows the way in; docs/method.md the equations.

A public name is imported when it is first used: torch takes seconds, and much of what is here can do without it.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secateur.cut.checkpoint import load_shrunk, save_shrunk
    from secateur.cut.heal import Heal, heal
    from secateur.cut.proof import Proof, prove
    from secateur.cut.record import CutRecord
    from secateur.cut.repair import Repair, repair
    from secateur.cut.surgery import parameters_left, shrink
    from secateur.data.batches import Batches
    from secateur.data.examples import example_batches, masked_batches
    from secateur.data.images import image_batches
    from secateur.data.load import with_reference
    from secateur.data.texts import text_batches
    from secateur.errors import (
        DataError,
        MissingExtra,
        ModelError,
        OutputError,
        ProofError,
        SecateurError,
        SelectionError,
        SettingError,
        StoreError,
        UnsupportedModel,
    )
    from secateur.files.journal import Journal
    from secateur.forecast import Forecast, forecast_of
    from secateur.healing import Healing
    from secateur.judgement import Evaluation, Judgement
    from secateur.measure.evaluate import evaluate, perplexity
    from secateur.measure.judge import judge
    from secateur.measure.speed import Measurement, measure
    from secateur.methods import METHODS, Method
    from secateur.model.accounting import effective_parameters, inventory, total_parameters, zeroed_percent
    from secateur.model.families import FAMILIES, Family, candidate_units
    from secateur.model.loading import Opened, load, load_shapes, open_model
    from secateur.model.moments import fills_of
    from secateur.model.zeroing import zeroed
    from secateur.prune import PruneResult, prune
    from secateur.report.html import Picture
    from secateur.report.map import map_of
    from secateur.report.page import write_report
    from secateur.report.search import curves_of
    from secateur.search.damage import DamageMeter
    from secateur.search.goals import Goal
    from secateur.search.policies import (
        UCB,
        ArmStats,
        Auto,
        Belief,
        Choice,
        Greedy,
        Heard,
        Plan,
        Planner,
        Policy,
        Request,
        Thompson,
        reward,
    )
    from secateur.search.scores import unit_scores
    from secateur.search.select import Screen, select, select_by_score
    from secateur.selection import Pull, Selection, Step
    from secateur.settings import Cutting, Judging, Machine, Settings
    from secateur.steps import choose, compare_models, cut, evaluate_on, heal_to, select_to, shrink_to
    from secateur.trackers import TensorBoard
    from secateur.units import Unit
    from secateur.watcher import Watcher, Watchers

__all__ = [
    "FAMILIES",
    "METHODS",
    "UCB",
    "ArmStats",
    "Auto",
    "Batches",
    "Belief",
    "Choice",
    "CutRecord",
    "Cutting",
    "DamageMeter",
    "DataError",
    "Evaluation",
    "Family",
    "Forecast",
    "Goal",
    "Greedy",
    "Heal",
    "Healing",
    "Heard",
    "Journal",
    "Judgement",
    "Judging",
    "Machine",
    "Measurement",
    "Method",
    "MissingExtra",
    "ModelError",
    "Opened",
    "OutputError",
    "Picture",
    "Plan",
    "Planner",
    "Policy",
    "Proof",
    "ProofError",
    "PruneResult",
    "Pull",
    "Repair",
    "Request",
    "Screen",
    "SecateurError",
    "Selection",
    "SelectionError",
    "SettingError",
    "Settings",
    "Step",
    "StoreError",
    "TensorBoard",
    "Thompson",
    "Unit",
    "UnsupportedModel",
    "Watcher",
    "Watchers",
    "candidate_units",
    "choose",
    "compare_models",
    "curves_of",
    "cut",
    "effective_parameters",
    "evaluate",
    "evaluate_on",
    "example_batches",
    "fills_of",
    "forecast_of",
    "heal",
    "heal_to",
    "image_batches",
    "inventory",
    "judge",
    "load",
    "load_shapes",
    "load_shrunk",
    "map_of",
    "masked_batches",
    "measure",
    "open_model",
    "parameters_left",
    "perplexity",
    "prove",
    "prune",
    "repair",
    "reward",
    "save_shrunk",
    "select",
    "select_by_score",
    "select_to",
    "shrink",
    "shrink_to",
    "text_batches",
    "total_parameters",
    "unit_scores",
    "with_reference",
    "write_report",
    "zeroed",
    "zeroed_percent",
]

_HOMES = {  # a module, and the public names that live in it
    "cut.checkpoint": "load_shrunk save_shrunk",
    "cut.heal": "Heal heal",
    "cut.proof": "Proof prove",
    "cut.record": "CutRecord",
    "cut.repair": "Repair repair",
    "cut.surgery": "parameters_left shrink",
    "data.batches": "Batches",
    "data.examples": "example_batches masked_batches",
    "data.images": "image_batches",
    "data.load": "with_reference",
    "data.texts": "text_batches",
    "errors": "DataError MissingExtra ModelError OutputError ProofError SecateurError SelectionError SettingError StoreError "
    "UnsupportedModel",
    "files.journal": "Journal",
    "forecast": "Forecast forecast_of",
    "healing": "Healing",
    "judgement": "Evaluation Judgement",
    "measure.evaluate": "evaluate perplexity",
    "measure.judge": "judge",
    "measure.speed": "Measurement measure",
    "methods": "METHODS Method",
    "model.accounting": "effective_parameters inventory total_parameters zeroed_percent",
    "model.families": "FAMILIES Family candidate_units",
    "model.loading": "Opened load load_shapes open_model",
    "model.moments": "fills_of",
    "model.zeroing": "zeroed",
    "prune": "PruneResult prune",
    "report.html": "Picture",
    "report.map": "map_of",
    "report.page": "write_report",
    "report.search": "curves_of",
    "search.damage": "DamageMeter",
    "search.goals": "Goal",
    "search.policies": "UCB ArmStats Auto Belief Choice Greedy Heard Plan Planner Policy Request Thompson reward",
    "search.scores": "unit_scores",
    "search.select": "Screen select select_by_score",
    "selection": "Pull Selection Step",
    "settings": "Cutting Judging Machine Settings",
    "steps": "choose compare_models cut evaluate_on heal_to select_to shrink_to",
    "trackers": "TensorBoard",
    "units": "Unit",
    "watcher": "Watcher Watchers",
}
_HOME = {name: f"secateur.{module}" for module, names in _HOMES.items() for name in names.split()}


class _Package(ModuleType):
    """The package: it imports a public name when it is first asked for.

    `prune`, `cut` and `measure` are functions and also the modules where more is found. Python sets a module as an attribute of
    its package whenever anything imports it; here that is ignored, so that `secateur.cut` is the function in any order of
    imports. `from secateur.cut.proof import prove` asks no attribute, and works.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
