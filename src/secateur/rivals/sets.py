"""Rivals that choose a whole set of units, written from their papers: Kwon et al. and EvoPress."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from secateur.methods import GENERATIONS, OFFSPRING, SURVIVORS
from secateur.model.losses import REFERENCE, Batch, Loss, batch_loss, evaluating, reference_of
from secateur.model.zeroing import zeroed
from secateur.search.scores import mask_gradients
from secateur.search.select import by_score
from secateur.selection import Selection
from secateur.streams import SCORES, stream
from secateur.units import Unit

Cell = tuple[int, str]  # a layer and a kind of unit
Levels = dict[Cell, int]  # how many units of each cell are removed


def kwon(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], k: int, seed: int = 42, loss: Loss | None = None
) -> Selection:
    """Kwon et al. (2022): the k units of least Fisher information of their masks, then exchanged within each layer.

    The first step takes the diagonal of the Fisher matrix, the sum over examples of squared mask gradients. The second looks at
    the block of each layer and kind, which knows how its units act together. The paper counts FLOPs where this counts units,
    and rescales the masks that stay, which is what --repair does better.
    """
    gradients = mask_gradients(model, units, batches, loss).double()
    scores = dict(zip(units, gradients.square().sum(0).tolist(), strict=True))
    places = {unit: i for i, unit in enumerate(units)}
    lowest = set(by_score(units, scores)[:k])
    chosen: list[Unit] = []
    for cell in _cells(units, scores).values():
        own = gradients[:, [places[unit] for unit in cell]]
        chosen += [cell[i] for i in rearranged(own.T @ own, sum(unit in lowest for unit in cell))]
    return Selection(units=tuple(by_score(chosen, scores)), scores=scores)


def rearranged(fisher: Tensor, n: int) -> list[int]:
    """Which n of the masks of a Fisher matrix to remove, by Kwon et al.'s greedy exchange.

    It starts from the n of least diagonal. Each other mask, from the least diagonal on, joins them once, and the one leaves
    without which the sum of the block, the second-order change of the loss, is least.
    """
    order = fisher.diagonal().argsort(stable=True).tolist()
    gone: list[int] = order[:n]
    for other in order[n:] if n else []:
        gone.append(other)
        block = fisher[gone][:, gone]
        without = block.sum() - 2 * block.sum(1) + block.diagonal()
        del gone[int(without.argmin())]
    return gone


def evopress(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], k: int, seed: int = 42, loss: Loss | None = None
) -> Selection:
    """EvoPress (Sieberling et al. 2025): an evolution of how many units each layer loses, for the least KL divergence.

    The fitness is the distance from the dense model's own outputs, whatever the loss. It starts with the same share in every
    layer and kind. An offspring moves one to three removals elsewhere. All offspring meet one batch, the survivors a quarter of
    the batches, and the best of these all of them, where it must beat its parent. A layer loses its units in the order of their
    mask Fisher information, where the paper has a database of layers pruned by OBS.
    """
    scores = dict(zip(units, mask_gradients(model, units, batches, loss).square().sum(0).tolist(), strict=True))
    cells = _cells(units, scores)
    rng = stream(seed, SCORES)

    def units_of(levels: Levels) -> list[Unit]:
        return by_score([unit for cell, n in levels.items() for unit in cells[cell][:n]], scores)

    with torch.inference_mode(), evaluating(model):
        targets = [batch if REFERENCE in batch else {**batch, REFERENCE: reference_of(model, batch)} for batch in batches]

        def divergence(levels: Levels, some: Sequence[int]) -> float:
            with zeroed(model, units_of(levels)):
                return math.fsum(float(batch_loss(model, targets[i])) for i in some) / len(some)

        best = evolved(even_levels({cell: len(of) for cell, of in cells.items()}, k), cells, divergence, len(batches), rng)
    return Selection(units=tuple(units_of(best)), scores=scores)


def evolved(
    start: Levels,
    cells: Mapping[Cell, Sequence[Unit]],
    fitness: Callable[[Levels, Sequence[int]], float],
    n_batches: int,
    rng: np.random.Generator,
) -> Levels:
    """The levels that a (1 + OFFSPRING) evolution ends with; `fitness` takes levels and the batches to measure them on."""
    parent, everything = start, range(n_batches)
    value = fitness(parent, everything)
    if len(cells) < 2:
        return parent
    for _ in range(GENERATIONS):
        offspring = [mutated(parent, cells, rng) for _ in range(OFFSPRING)]
        for n, kept in ((1, SURVIVORS), (max(1, n_batches // 4), 1)):
            some = rng.choice(n_batches, size=n, replace=False).tolist()
            values = [fitness(levels, some) for levels in offspring]
            offspring = [offspring[i] for i in _lowest(values)[:kept]]
        child = fitness(offspring[0], everything)
        if child <= value or not math.isfinite(value):
            parent, value = offspring[0], child
    return parent


def mutated(levels: Levels, cells: Mapping[Cell, Sequence[Unit]], rng: np.random.Generator) -> Levels:
    """The same number of removals, one to three of them in other cells; one is the most likely."""
    levels = dict(levels)
    for _ in range(min(rng.integers(1, 4), rng.integers(1, 4))):
        filled = [cell for cell, n in levels.items() if n]
        giver = filled[rng.integers(len(filled))]
        open_cells = [cell for cell, n in levels.items() if n < len(cells[cell]) and cell != giver]
        if open_cells:
            levels[giver] -= 1
            levels[open_cells[rng.integers(len(open_cells))]] += 1
    return levels


def even_levels(sizes: Mapping[Cell, int], k: int) -> Levels:
    """k removals, the same share of each cell; what is left over goes to the cells of the largest remainders, earlier first."""
    total = sum(sizes.values())
    levels = {cell: k * size // total for cell, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda cell: -(k * sizes[cell] % total))
    for cell in by_remainder[: k - sum(levels.values())]:
        levels[cell] += 1
    return levels


def _cells(units: Sequence[Unit], scores: Mapping[Unit, float]) -> dict[Cell, list[Unit]]:
    """The units of each layer and kind, from the lowest score on."""
    cells: dict[Cell, list[Unit]] = defaultdict(list)
    for unit in by_score(units, scores):
        cells[unit.layer, unit.kind].append(unit)
    return {cell: cells[cell] for cell in sorted(cells)}


def _lowest(values: Sequence[float]) -> list[int]:
    """The places of the values from the lowest on; those that are not finite come last."""
    return sorted(
        range(len(values)), key=lambda i: (not math.isfinite(values[i]), values[i] if math.isfinite(values[i]) else 0)
    )
