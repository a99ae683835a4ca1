"""Methods: one row for each way of choosing units. Knows no model and no tensor.

The command line, grids, comparisons, tables, figures and docs all read this table: a new method is a new row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from secateur.errors import not_one_of
from secateur.search.policies import UCB, Auto, Budget, Greedy, Planner, Policy, Thompson

if TYPE_CHECKING:
    from secateur.settings import Settings

BANDIT, BASELINE, RIVAL = "bandit", "baseline", "rival"  # bandits are compared with all the others
WEIGHTS, ACTIVATIONS, GRADIENTS, OUTPUTS = "weights", "activations", "gradients", "outputs"
MASKS_PER_BATCH = 32  # of bonsai: how many random masks each batch is measured under
GENERATIONS, OFFSPRING, SURVIVORS = 32, 16, 4  # of evopress: the offspring meet one batch, the survivors a quarter of them


@dataclass(frozen=True)
class Look:
    """How figures draw a method: colours of Okabe and Ito and of Tol, which the colour-blind tell apart, and a marker and a
    dash for print without colour."""

    colour: str
    marker: str
    dash: str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Method:
    """A row. It has one of three: `policy` makes the policy that measures candidates one by one, `score` names the function
    that scores them, or `search` names the function that chooses a set of them.

    >>> METHODS["ucb"].label
    'MAB-UCB'
    """

    label: str  # in tables and figures
    help: str  # what it does, in a line
    role: str  # in comparisons: BANDIT, BASELINE or RIVAL
    look: Look
    policy: Callable[[Settings], Policy | Planner] | None = None
    score: str = ""  # "module:function"; the function takes (model, units, batches, seed) and gives a score for each unit
    search: str = ""  # the same for a function that takes (model, units, batches, k, seed) and gives a Selection of k units
    needs: str = WEIGHTS  # what a score or a set comes from; all but WEIGHTS take calibration batches
    passes: Callable[[int], int] = lambda batches: batches  # of a score or a set: its model passes on so many batches
    screens: bool = True  # of a policy: it measures only candidates that a score has let through
    experts: bool = True  # can choose among experts and their channels
    draws: bool = False  # makes random choices of its own
    settings: tuple[str, ...] = ()  # settings that this method reads and others may not

    @property
    def needs_batches(self) -> bool:
        return self.policy is not None or self.needs != WEIGHTS

    @property
    def takes_loss(self) -> bool:
        """Whether the function of a score or a set takes a `loss` of the user's own."""
        return self.needs in (GRADIENTS, OUTPUTS)

    def depends_on_seed(self, task: str) -> bool:
        """Whether another seed may choose other units. Calibration images are drawn by seed, texts are not."""
        return self.draws or (task == "image" and self.needs_batches)

    def scorer(self) -> Callable[..., Any]:
        """The function that `score` or `search` names; it is imported only now, since it needs torch."""
        module, _, function = (self.score or self.search).partition(":")
        scorer: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return scorer


_SCORES, _RIVALS = "secateur.search.scores", "secateur.rivals"

METHODS: dict[str, Method] = {  # in the order of the paper's columns
    "random": Method(
        "Random",
        "a uniform draw",
        BASELINE,
        Look("#999999", "x", ":"),
        score=f"{_SCORES}:random_scores",
        draws=True,
    ),
    "magnitude": Method(
        "Magnitude",
        "smallest weights",
        BASELINE,
        Look("#555555", "P", ":"),
        score=f"{_SCORES}:magnitude_scores",
    ),
    "wanda": Method(
        "Wanda-style",
        "smallest weights times activations",
        RIVAL,
        Look("#CC79A7", "D", (0, (1, 2))),
        score=f"{_SCORES}:wanda_scores",
        needs=ACTIVATIONS,
    ),
    "taylor": Method(
        "Taylor",
        "smallest first-order change of the loss",
        RIVAL,
        Look("#B09A00", "v", (0, (4, 1, 1, 1))),
        score=f"{_SCORES}:taylor_scores",
        needs=GRADIENTS,
    ),
    "fisher": Method(
        "Fisher",
        "smallest squared gradient times weight",
        RIVAL,
        Look("#882255", "p", (0, (3, 1))),
        score=f"{_SCORES}:fisher_scores",
        needs=GRADIENTS,
    ),
    "obs": Method(
        "ZipLM (OBS)",
        "our implementation of ZipLM's rule, structured OBS: smallest error of the output projection once its other columns "
        "make up for it; for cuts with --repair",
        RIVAL,
        Look("#44AA99", "*", (0, (1, 1))),
        score=f"{_SCORES}:obs_scores",
        needs=ACTIVATIONS,
        experts=False,
    ),
    "flap": Method(
        "FLAP",
        "our implementation of FLAP: smallest variance of the output projection's inputs times its squared weights, "
        "standardised within each layer; its bias compensation is --repair --repair-form bias",
        RIVAL,
        Look("#C8A24A", "<", (0, (1, 2))),
        score=f"{_RIVALS}.scores:flap_scores",
        needs=ACTIVATIONS,
        experts=False,
    ),
    "llmpruner": Method(
        "LLM-Pruner",
        "our implementation of LLM-Pruner's grouped Taylor: smallest sum of |weight times gradient|",
        RIVAL,
        Look("#AA4499", ">", (0, (1, 3))),
        score=f"{_RIVALS}.scores:llmpruner_scores",
        needs=GRADIENTS,
    ),
    "bonsai": Method(
        "Bonsai",
        "our implementation of Bonsai: the loss under random masks of many units, "
        f"{MASKS_PER_BATCH} for each batch, and a regression",
        RIVAL,
        Look("#7A7A22", "X", (0, (2, 1))),
        score=f"{_RIVALS}.scores:bonsai_scores",
        needs=OUTPUTS,
        passes=lambda batches: batches * (1 + MASKS_PER_BATCH),
        experts=False,
        draws=True,
    ),
    "kwon": Method(
        "Kwon et al.",
        "our implementation of Kwon et al.: smallest Fisher information of a mask, then swaps within each layer; their rescale "
        "is --repair",
        RIVAL,
        Look("#332288", "H", (0, (3, 1))),
        search=f"{_RIVALS}.sets:kwon",
        needs=GRADIENTS,
        experts=False,
    ),
    "evopress": Method(
        "EvoPress",
        f"our implementation of EvoPress: {GENERATIONS} generations of {OFFSPRING} offspring move removals between layers, for "
        "the least KL divergence from the dense model",
        RIVAL,
        Look("#117733", "8", (0, (4, 1))),
        search=f"{_RIVALS}.sets:evopress",
        needs=OUTPUTS,
        passes=lambda batches: 3 * batches + GENERATIONS * (OFFSPRING + SURVIVORS * max(1, batches // 4) + batches),
        experts=False,
        draws=True,
    ),
    "greedy": Method(
        "Budgeted greedy",
        "every candidate of a trial set measured once",
        BASELINE,
        Look("#E69F00", "s", "--"),
        policy=lambda settings: Greedy(),
        draws=True,
    ),
    "ucb": Method(
        "MAB-UCB",
        "the paper's upper-confidence-bound bandit",
        BANDIT,
        Look("#0072B2", "o", "-"),
        policy=lambda settings: UCB(settings.ucb_c, settings.pool_size),
        draws=True,
        settings=("ucb_c", "pool_size"),
    ),
    "ts": Method(
        "MAB-TS",
        "the paper's Thompson sampling",
        BANDIT,
        Look("#56B4E9", "^", "-."),
        policy=lambda settings: Thompson(settings.pool_size),
        draws=True,
        settings=("pool_size",),
    ),
    "auto": Method(
        "Auto",
        "gradients of all candidates first, then measurements of the most promising, within a budget",
        BANDIT,
        Look("#D55E00", "d", "-"),
        policy=lambda settings: Auto(Budget(*settings.amount)),
        screens=False,
        draws=True,
        settings=("budget",),
    ),
}


def method(name: str) -> Method:
    """The row of a method; an unknown name is an error with the nearest known one."""
    if name not in METHODS:
        raise not_one_of("method", name, METHODS)
    return METHODS[name]


def searching() -> list[str]:
    """The methods whose policy measures candidates."""
    return [name for name, row in METHODS.items() if row.policy]


def scoring() -> list[str]:
    """The methods that score candidates; each of them can screen."""
    return [name for name, row in METHODS.items() if row.score]


def choosing_sets() -> list[str]:
    """The methods that choose all units at once; they need to know how many."""
    return [name for name, row in METHODS.items() if row.search]


def bandits() -> list[str]:
    return [name for name, row in METHODS.items() if row.role == BANDIT]


def label(name: str) -> str:
    """The name of a method in tables; a method that this version does not know keeps its own."""
    return METHODS[name].label if name in METHODS else name
