"""Prune pretrained transformers by measured, paired damage. The README shows the way in; docs/method.md the equations."""

from secateur.accounting import effective_parameters, total_parameters, zeroed_percent
from secateur.checkpoint import load_shrunk, save_shrunk
from secateur.cut import cut
from secateur.damage import DamageMeter
from secateur.data import Batches, image_batches, text_batches
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
from secateur.evaluate import Evaluation, evaluate, perplexity
from secateur.families import FAMILIES, candidate_units
from secateur.journal import Journal
from secateur.measure import Measurement, measure
from secateur.models import load, load_shapes
from secateur.policies import UCB, ArmStats, Greedy, Policy, Thompson, reward
from secateur.prune import PruneResult, Settings, prune
from secateur.recovery import Repair, repair
from secateur.scores import unit_scores
from secateur.selection import Selection, select, select_by_score
from secateur.surgery import Proof, parameters_left, prove, shrink
from secateur.units import Unit
from secateur.zeroing import zeroed

__all__ = [
    "FAMILIES",
    "UCB",
    "ArmStats",
    "Batches",
    "DamageMeter",
    "DataError",
    "Evaluation",
    "Greedy",
    "Journal",
    "Measurement",
    "MissingExtra",
    "ModelError",
    "OutputError",
    "Policy",
    "Proof",
    "ProofError",
    "PruneResult",
    "Repair",
    "SecateurError",
    "Selection",
    "SelectionError",
    "SettingError",
    "Settings",
    "StoreError",
    "Thompson",
    "Unit",
    "UnsupportedModel",
    "candidate_units",
    "cut",
    "effective_parameters",
    "evaluate",
    "image_batches",
    "load",
    "load_shapes",
    "load_shrunk",
    "measure",
    "parameters_left",
    "perplexity",
    "prove",
    "prune",
    "repair",
    "reward",
    "save_shrunk",
    "select",
    "select_by_score",
    "shrink",
    "text_batches",
    "total_parameters",
    "unit_scores",
    "zeroed",
    "zeroed_percent",
]
