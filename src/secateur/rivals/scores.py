"""Rivals that score units, written from their papers: FLAP, LLM-Pruner and Bonsai. A high score means keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from secateur.methods import MASKS_PER_BATCH
from secateur.model.families import input_dim, weight_of
from secateur.model.losses import Batch, Loss, batch_loss, evaluating
from secateur.model.moments import gather
from secateur.model.zeroing import zeroed
from secateur.search.scores import by_output, gradients_of, per_unit, times_gradient
from secateur.streams import SCORES, stream
from secateur.units import Unit

Floats = NDArray[np.float64]
REMOVED = (0.05, 0.20)  # of bonsai's masks: the least and the largest share of the units that one removes
RIDGES = 10.0 ** np.arange(-3, 4)  # bonsai's penalties, as multiples of the mean diagonal entry; the data choose


class Fluctuation:
    """The mean and the sum of squared deviations of each channel over the positions seen so far."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, x: Tensor) -> None:
        if not len(x):
            return
        x = x.float()
        mean, total = x.mean(0), self.count + len(x)
        gap = mean - self.mean.to(x.device)
        # Deviations from each batch's own mean: a sum of squares minus a squared sum would lose the small ones.
        self.squares = self.squares.to(x.device) + (x - mean).square().sum(0) + gap.square() * (self.count * len(x) / total)
        self.mean, self.count = self.mean.to(x.device) + gap * (len(x) / total), total

    def variance(self) -> Tensor:
        return self.squares.double().cpu() / max(1, self.count - 1)


def flap_scores(model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42) -> dict[Unit, float]:
    """FLAP (An et al. 2024): the variance of a channel times the squared norm of its weights in the output projection.

    These are standardised over the channels of each projection, so that layers compare, and a unit has the mean over its own
    channels, as FLAP's heads do. A projection whose channels all fluctuate alike scores 0 throughout.
    """
    entering = by_output(model, units)
    seen = {projection: Fluctuation() for projection in entering}
    gather(model, seen, batches)
    scores: dict[Unit, float] = {}
    for projection, channels in entering.items():
        norms = weight_of(projection).detach().double().cpu().square().sum(1 - input_dim(projection))
        metric = seen[projection].variance() * norms
        standard = (metric - metric.mean()) / metric.std().clamp(min=torch.finfo(metric.dtype).tiny)
        for unit, own in channels.items():
            scores[unit] = scores.get(unit, 0.0) + float(standard[own].mean())  # a block has two projections
    return {unit: scores[unit] for unit in units}


def llmpruner_scores(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42, loss: Loss | None = None
) -> dict[Unit, float]:
    """LLM-Pruner (Ma et al. 2023): the sum of |weight times gradient| over all parameters of the unit.

    It is the paper's element-wise importance without the second-order term, summed over the group of coupled weights; Eq. 35
    takes the magnitude after the sum.
    """
    gradients = gradients_of(model, units, batches, loss)
    return per_unit(model, units, lambda slices: sum(float(times_gradient(s, gradients).abs().sum()) for s in slices))


def bonsai_scores(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42, loss: Loss | None = None
) -> dict[Unit, float]:
    """Bonsai (Dery et al. 2024), one round without a prior: forward passes under random masks, then a regression.

    Each batch is measured under MASKS_PER_BATCH masks; each removes a random share of the units, a twentieth to a fifth. The
    score of a unit is its coefficient in a ridge regression of the damage, the loss minus that of the dense model on the same
    batch, on what is removed. Masks whose loss is not finite are left out.
    """
    rng = stream(seed, SCORES)
    removed = np.zeros((len(batches) * MASKS_PER_BATCH, len(units)))
    damages = np.zeros(len(removed))
    with torch.inference_mode(), evaluating(model):
        for i, batch in enumerate(batches):
            dense = float(batch_loss(model, batch, loss))
            for row in range(i * MASKS_PER_BATCH, (i + 1) * MASKS_PER_BATCH):
                n = max(1, round(rng.uniform(*REMOVED) * len(units)))
                gone = rng.choice(len(units), size=n, replace=False)
                removed[row, gone] = 1
                with zeroed(model, [units[j] for j in gone]):
                    damages[row] = float(batch_loss(model, batch, loss)) - dense
    finite = np.isfinite(damages)
    return dict(zip(units, ridge(removed[finite], damages[finite]).tolist(), strict=True))


def ridge(x: Floats, y: Floats) -> Floats:
    """The coefficients of a ridge regression with an intercept, whose penalty has the least leave-one-out error."""
    if len(y) < 2:
        return np.zeros(x.shape[1])
    x, y = x - x.mean(0), y - y.mean()
    u, sizes, v = np.linalg.svd(x, full_matrices=False)
    inside = u.T @ y
    best, least = np.zeros(x.shape[1]), np.inf
    for penalty in RIDGES * (sizes**2).sum() / x.shape[1]:
        shrink = sizes**2 / (sizes**2 + penalty)
        leverage = (u**2 * shrink).sum(1) + 1 / len(y)  # the last is the intercept's
        error = float((((y - u @ (shrink * inside)) / (1 - leverage).clip(1e-9)) ** 2).mean())
        if error < least:
            best, least = v.T @ (sizes / (sizes**2 + penalty) * inside), error
    return best
