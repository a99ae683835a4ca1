"""Repair layer by layer: fit every output projection of the cut model to what the dense model has at the same place.

The blocks are repaired in order, each on what really arrives from the repaired blocks before it. The goal of an output
projection is the dense model's stream of hidden states right after it, so that a projection also makes up for what was lost
before, and the one before a removed block for that block. A projection y = W x + b that adds to the stream h is fitted by
least squares with a ridge that pulls towards the old weights: it minimises

    E |goal - h - W' x - b'|^2 + ridge |W' - W|^2

Where a norm or a scale lies between the projection and the stream (BERT, Gemma 2, DINOv2), the goal is the dense projection's
own output instead. A part of the batches chooses the ridge, for each projection its own, or that it stays as it is.

A block is run by letting the blocks before it return what is kept; nothing behind it runs. In memory are four values for each
position and channel of the stream. The work is that of about three forward passes without the output layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.cut.surgery import blocks_left, kept_of
from secateur.model.families import Layer, anatomy, input_dim, weight_of
from secateur.model.losses import Batch, evaluating, handing_on, outputs, real_positions, standing_in
from secateur.model.moments import Weights
from secateur.units import Unit

RIDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # multiples of the mean diagonal entry of the matrix
CHOOSING = 0.2  # the share of the batches that choose the ridge
WORTHWHILE = 1e-6  # the part of what is wanted that a fit must win: below it all is rounding
ADDITIVE = 1e-3  # the relative error up to which a block is its input plus its two projections' outputs


class _Reached(Exception):
    """What was wanted of a run has been computed."""


@dataclass
class Run:
    """What a run of one block showed."""

    entering: Any = None  # the block's input
    given: dict[nn.Module, Tensor] = field(default_factory=dict)  # outputs of its projections
    taken: dict[nn.Module, Tensor] = field(default_factory=dict)  # their inputs
    output: Any = None  # of the block, as it gave it


def repair_layers(
    model: nn.Module,
    units: Sequence[Unit],
    small: nn.Module,
    batches: Sequence[Batch],
    progress: Callable[[int], None] | None = None,
) -> list[nn.Module]:
    """Fit the output projections of `small`, which is `shrink(model, units)`, in place; return those that were changed.

    `progress` gets 1 for every batch that has gone through a block.
    """
    layers = anatomy(model)
    stay = blocks_left(model, layers, kept_of(layers, units))
    n_choosing = max(1, int(CHOOSING * len(batches)))
    with torch.inference_mode(), evaluating(model), evaluating(small):
        work = _Work(model, small, batches, len(batches) - n_choosing, progress)
        return work.repair(stay)


class _Work:
    """The kept values of a repair: for each batch the output of the last block, dense and cut."""

    def __init__(
        self,
        model: nn.Module,
        small: nn.Module,
        batches: Sequence[Batch],
        n_fitting: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._model, self._small, self._batches, self._n_fitting = model, small, batches, n_fitting
        self._layers, self._small_layers = anatomy(model), anatomy(small)
        self._dense: list[Any] = [None] * len(batches)
        self._cut: list[Any] = [None] * len(batches)
        self._same = True  # nothing was lost so far, so that both models have the same stream
        self._progress = progress or (lambda n: None)

    def repair(self, stay: Sequence[int]) -> list[nn.Module]:
        for i in range(stay[0] if stay else 0):  # removed blocks before the first one that stays
            self._advance(i)
            self._same = False
        changed: list[nn.Module] = []
        for place, (i, following) in enumerate(zip(stay, [*stay[1:], len(self._layers)], strict=True)):
            layer, own = self._layers[i], self._small_layers[place]
            self._same &= [weight_of(one).shape for one in layer.outs] == [weight_of(one).shape for one in own.outs]
            goals = self._dense_block(i)
            for skipped in range(i + 1, following):
                self._advance(skipped)
                self._same = False
            if self._same:
                self._cut = list(self._dense)
                continue
            streams = [_tensor(output) for output in self._dense] if goals.additive else goals.mlp
            for projection, wanted in zip(own.outs, (goals.attention, streams), strict=False):
                if weight_of(projection).shape[input_dim(projection)] and self._fit(place, projection, wanted, goals):
                    changed.append(projection)
            for n, batch in enumerate(self._batches):
                self._cut[n] = _run(self._small, self._small_layers, place, batch, self._cut[n]).output
        return changed

    def _advance(self, i: int) -> None:
        """Run a block of the dense model alone."""
        for n, batch in enumerate(self._batches):
            self._dense[n] = _run(self._model, self._layers, i, batch, self._dense[n]).output
            self._progress(1)

    def _dense_block(self, i: int) -> _Goals:
        layer, goals = self._layers[i], _Goals()
        for n, batch in enumerate(self._batches):
            ran = _run(self._model, self._layers, i, batch, self._dense[n])
            if n == 0:
                goals.additive = _adds_up(ran, layer)
            self._dense[n] = ran.output
            attention = ran.given[layer.out]
            goals.attention.append(ran.entering + attention if goals.additive else attention)
            if not goals.additive:
                goals.mlp.append(ran.given.get(layer.mlp_out, attention))
            goals.entering.append(ran.entering)
            self._progress(1)
        return goals

    def _fit(self, place: int, projection: nn.Module, wanted: Sequence[Tensor], goals: _Goals) -> bool:
        """Fit a projection of the cut model to what is wanted of it; whether it was changed."""
        layer = self._small_layers[place]
        fitting, choosing = _Squares(projection), _Squares(projection)
        for n, batch in enumerate(self._batches):
            ran = _run(self._small, self._small_layers, place, batch, self._cut[n], until=projection)
            goal, x = wanted[n], ran.taken[projection]
            if goals.additive:
                goal = goal - ran.entering
                if projection is not layer.out:
                    goal = goal - ran.given[layer.out]
            size = goals.entering[n] if goals.additive else x
            real = real_positions(batch)
            rows = [one.flatten(0, -2).float() for one in (x, goal, size)]
            rows = rows if real is None else [one[real.to(one.device)] for one in rows]
            (fitting if n < self._n_fitting else choosing).add(*rows)
        return fitting.usable and choosing.usable and _solve(projection, fitting, choosing)


@dataclass
class _Goals:
    """What the dense model has, batch by batch."""

    attention: list[Tensor] = field(default_factory=list)  # the stream after the attention, or what its projection gives
    mlp: list[Tensor] = field(default_factory=list)  # what the MLP's projection gives, if the block does not add up
    entering: list[Tensor] = field(default_factory=list)
    additive: bool = False  # the block is its input plus what its projections give


class _Squares:
    """Weighted sums of products of what enters a projection, a 1 for its bias, and of what is wanted of it."""

    def __init__(self, projection: nn.Module) -> None:
        self._biased = isinstance(projection.bias, Tensor)
        self._weighing = Weights()
        self.weight, self.wanted = 0.0, 0.0
        self.inputs: Tensor | None = None  # (channels, channels)
        self.products: Tensor | None = None  # (channels, outputs)

    def add(self, x: Tensor, wanted: Tensor, size: Tensor) -> None:
        """Take in (positions, channels), what is wanted there, and what the weight of a position is computed from."""
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1) if self._biased else x
        weights = self._weighing.of(size)[:, None]
        weighted = weights * x
        self.inputs = weighted.T @ x + (0 if self.inputs is None else self.inputs)
        self.products = weighted.T @ wanted + (0 if self.products is None else self.products)
        self.weight += float(weights.sum())
        self.wanted += float((weights * wanted.square()).sum())

    @property
    def usable(self) -> bool:
        """Whether a position was seen, and all values were finite."""
        sums = [one for one in (self.inputs, self.products) if one is not None]
        return self.weight > 0 and math.isfinite(self.wanted) and all(bool(one.isfinite().all()) for one in sums)

    def means(self) -> tuple[Tensor, Tensor]:
        assert self.inputs is not None and self.products is not None
        return tuple(one.to("cpu", torch.float64) / self.weight for one in (self.inputs, self.products))  # type: ignore[return-value]

    def error(self, weight: Tensor) -> float:
        """The mean squared error of a weight (channels, outputs)."""
        inputs, products = self.means()
        return self.wanted / self.weight + float(((inputs @ weight - 2 * products) * weight).sum())


def _solve(projection: nn.Module, fitting: _Squares, choosing: _Squares) -> bool:
    """Write the weight of the ridge that errs the least where nothing was fitted; whether one errs less than the old weight."""
    across = input_dim(projection) == 1
    parameter, bias = weight_of(projection), projection.bias if isinstance(projection.bias, Tensor) else None
    old = (parameter.T if across else parameter).to("cpu", torch.float64)  # (channels, outputs)
    if bias is not None:
        old = torch.cat([old, bias.to("cpu", torch.float64)[None]])
    inputs, products = fitting.means()
    mean = inputs.diagonal()[: parameter.shape[input_dim(projection)]].mean()
    pulled = torch.full((len(inputs),), float(mean), dtype=torch.float64)
    if bias is not None:
        pulled[-1] = 1e-6 * mean  # nothing pulls a bias back but rounding
    missing, best = products - inputs @ old, None
    least = choosing.error(old) - WORTHWHILE * choosing.wanted / choosing.weight
    for ridge in RIDGES:
        factor, failed = torch.linalg.cholesky_ex(inputs + ridge * pulled.diag())
        if failed:
            continue
        found = old + torch.cholesky_solve(missing, factor)
        error = choosing.error(found)
        if bool(found.isfinite().all()) and error < least:
            best, least = found, error
    if best is None:
        return False
    weight = best if bias is None else best[:-1]
    parameter.copy_(weight.T if across else weight)
    if bias is not None:
        bias.copy_(best[-1])
    return True


def _run(model: nn.Module, layers: Sequence[Layer], i: int, batch: Batch, before: Any, until: nn.Module | None = None) -> Run:
    """Run block `i` of a model on what the block before it gave; `until` a projection is reached, or to its end."""
    layer, ran = layers[i], Run()

    def enters(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        ran.entering = args[0] if args else options["hidden_states"]

    def takes(module: nn.Module, args: tuple[Any, ...]) -> None:
        ran.taken[module] = args[0]
        if module is until:
            raise _Reached

    def gives(module: nn.Module, args: Any, output: Tensor) -> None:
        ran.given[module] = output

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        ran.output = output
        raise _Reached

    with ExitStack() as stack:
        for earlier in layers[: max(0, i - 1)]:
            stack.enter_context(standing_in(earlier.block, handing_on(before)))
        if i:
            stack.enter_context(standing_in(layers[i - 1].block, lambda *args, **options: before))
        hooks = [layer.block.register_forward_pre_hook(enters, with_kwargs=True), layer.block.register_forward_hook(ends)]
        for projection in layer.outs:
            hooks.append(projection.register_forward_pre_hook(takes))
            hooks.append(projection.register_forward_hook(gives))
        for hook in hooks:
            stack.callback(hook.remove)
        with suppress(_Reached):
            outputs(model, batch)
    return ran


def _tensor(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _adds_up(ran: Run, layer: Layer) -> bool:
    """Whether the block gave its input plus what its two projections gave."""
    output, parts = _tensor(ran.output), [ran.entering, *(ran.given.get(one) for one in layer.outs)]
    if len(layer.outs) < 2 or any(part is None or part.shape != output.shape for part in parts):
        return False
    missing = (output - torch.stack(parts).sum(0)).float().norm()
    return bool(missing <= ADDITIVE * output.float().norm())
