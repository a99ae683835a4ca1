"""Prune pretrained transformers by measured, paired damage. The README shows the way in; docs/method.md the equations."""

from secateur.cut.checkpoint import load_shrunk, save_shrunk
from secateur.cut.proof import Proof, prove
from secateur.cut.record import CutRecord
from secateur.cut.repair import Repair, repair
from secateur.cut.surgery import parameters_left, shrink
from secateur.data.batches import Batches
from secateur.data.images import image_batches
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
from secateur.judgement import Evaluation, Judgement
from secateur.measure.evaluate import evaluate, perplexity
from secateur.measure.judge import judge
from secateur.measure.speed import Measurement, measure
from secateur.methods import METHODS, Method
from secateur.model.accounting import effective_parameters, inventory, total_parameters, zeroed_percent
from secateur.model.families import FAMILIES, candidate_units
from secateur.model.loading import Opened, load, load_shapes, open_model
from secateur.model.zeroing import zeroed
from secateur.prune import PruneResult, prune
from secateur.search.damage import DamageMeter
from secateur.search.goals import Goal
from secateur.search.policies import UCB, ArmStats, Belief, Choice, Greedy, Halving, Heard, Policy, Request, Thompson, reward
from secateur.search.scores import unit_scores
from secateur.search.select import Screen, select, select_by_score
from secateur.selection import Pull, Selection, Step
from secateur.settings import Cutting, Judging, Machine, Settings
from secateur.steps import choose, compare_models, cut, evaluate_on, select_to, shrink_to
from secateur.units import Unit
from secateur.watcher import Watcher

__all__ = [
    "FAMILIES",
    "METHODS",
    "UCB",
    "ArmStats",
    "Batches",
    "Belief",
    "Choice",
    "CutRecord",
    "Cutting",
    "DamageMeter",
    "DataError",
    "Evaluation",
    "Goal",
    "Greedy",
    "Halving",
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
    "Thompson",
    "Unit",
    "UnsupportedModel",
    "Watcher",
    "candidate_units",
    "choose",
    "compare_models",
    "cut",
    "effective_parameters",
    "evaluate",
    "evaluate_on",
    "image_batches",
    "inventory",
    "judge",
    "load",
    "load_shapes",
    "load_shrunk",
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
    "zeroed",
    "zeroed_percent",
]
