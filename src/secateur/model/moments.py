"""Moments: weighted sums over what enters the output projections of a model, from which repairs and OBS scores are computed.

A position x has the weight 1 / (|x|^2 + c), where c is the median |x|^2. Language models have a few positions (the first of a
text, some delimiters) whose activations are a thousand times larger than the others'. With equal weights these positions decide
everything: when SmolLM2-135M's block 28 lost the channel behind them, the cut cost 0.05 nats and its repair 2.4. The next norm
in the model makes all positions count alike, and so do the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secateur.model.families import input_dim, weight_of
from secateur.model.losses import Batch, evaluating, outputs, real_positions

DAMPING = 0.03  # the ridge of a least-squares problem, as a multiple of the mean diagonal entry of its matrix


class Sums(Protocol):
    """Something that is computed from what enters a projection, some positions at a time."""

    def add(self, x: Tensor) -> None:
        """Take in (positions, channels)."""
        ...


class Weights:
    """The weights of positions, 1 / (|x|^2 + c)."""

    def __init__(self) -> None:
        self.usual: Tensor | None = None  # c: the median |x|^2 of the first batch

    def of(self, x: Tensor) -> Tensor:
        """The weight of each row of (positions, channels) in float32."""
        squares = x.square().sum(1)
        if self.usual is None:
            self.usual = squares.median().clamp(min=torch.finfo(x.dtype).tiny)
        return (squares + self.usual).reciprocal()


class Squares:
    """The weighted sum of the squares of each channel over the positions seen so far."""

    def __init__(self) -> None:
        self.weights = Weights()
        self.sums = torch.zeros(())

    def add(self, x: Tensor) -> None:
        if len(x):
            x = x.float()
            self.sums = self.sums.to(x.device) + (self.weights.of(x)[:, None] * x.square()).sum(0)


class Moments:
    """Weighted sums over the positions seen so far: of each channel, and of the products of some channels with all.

    The sums are in float32, which every device has. That is precise enough, since no weighted position is large: a repair
    computed from them in float64 differs by 4e-6 from one with float64 sums (SmolLM2-135M, 16 batches).
    """

    def __init__(self, projection: nn.Module, channels: Tensor | None = None) -> None:
        weight = weight_of(projection)
        n = weight.shape[input_dim(projection)]
        self.channels = (torch.arange(n) if channels is None else channels).to(weight.device)
        self.weighing = Weights()
        self.weights = torch.zeros((), device=weight.device)
        self.sums = torch.zeros(n, device=weight.device)
        self.products = torch.zeros(len(self.channels), n, device=weight.device)

    def add(self, x: Tensor) -> None:
        if not len(x):
            return
        x = x.float()  # (positions, channels)
        weights = self.weighing.of(x)
        weighted = weights[:, None] * x
        self.weights += weights.sum()
        self.sums += weighted.sum(0)
        if len(self.products):
            self.products += weighted.index_select(1, self.channels).T @ x

    def means(self) -> tuple[Tensor, Tensor]:
        """The weighted means of the channels (channels,) and of the products (some channels, channels), in float64."""
        total = self.weights.item() or 1.0  # 0 if no position was seen: then all sums are 0 too
        return self.sums.to("cpu", torch.float64) / total, self.products.to("cpu", torch.float64) / total


def gather(
    model: nn.Module,
    moments: Mapping[nn.Module, Sums],
    batches: Sequence[Batch],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run the batches through the model and add to the sums what enters each projection, without padding."""
    real: Tensor | None = None  # the positions of the current batch that are not padding; None for all

    def add(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].flatten(0, -2)
        moments[module].add(x if real is None else x[real.to(x.device)])

    handles = [projection.register_forward_pre_hook(add) for projection in moments]
    try:
        with torch.inference_mode(), evaluating(model):
            for batch in batches:
                real = real_positions(batch)
                outputs(model, batch)
                if progress:
                    progress(1)
    finally:
        for handle in handles:
            handle.remove()
