"""Static scores of units (Eq. 32-36): a high score means keep. Each needs at most one pass over the calibration batches.

A score function takes (model, units, batches, seed); a row of methods.py names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import SettingError, not_one_of
from secateur.methods import GRADIENTS, METHODS, scoring
from secateur.model.families import Layer, Slice, anatomy, expert_weights, input_dim, layer_of, task_of, weight_of
from secateur.model.losses import (
    IGNORED,
    REFERENCE,
    Batch,
    Loss,
    batch_loss,
    evaluating,
    outputs,
    predictions,
    real_positions,
)
from secateur.model.moments import DAMPING, Moments, gather
from secateur.streams import SCORES, stream
from secateur.tasks import TASKS, TEXT
from secateur.units import MLP, Unit


def unit_scores(
    method: str,
    model: nn.Module,
    units: Sequence[Unit],
    *,
    batches: Sequence[Batch] = (),
    loss: Loss | None = None,
    seed: int = 42,
) -> dict[Unit, float]:
    """The score of every unit by a static method of METHODS; gradients are of the batches' loss, or of one of the user's own.

    >>> scores = unit_scores("taylor", model, candidate_units(model), batches=calibration)
    """
    if method not in scoring():
        raise not_one_of("static method", method, scoring())
    if METHODS[method].needs_batches and not batches:
        raise SettingError(f"The method {method} needs calibration batches.")
    own = {"loss": loss} if loss and METHODS[method].needs == GRADIENTS else {}
    scores: dict[Unit, float] = METHODS[method].scorer()(model, units, batches, seed, **own)
    return scores


def random_scores(model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch] = (), seed: int = 42) -> dict[Unit, float]:
    """Independent draws: the k lowest are a uniform k-subset (Eq. 32)."""
    return dict(zip(units, stream(seed, SCORES).random(len(units)).tolist(), strict=True))


def magnitude_scores(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch] = (), seed: int = 42
) -> dict[Unit, float]:
    """The mean absolute value of the unit's own parameters (Eq. 33)."""

    def score(slices: list[Slice]) -> float:
        values = [s.of(s.parameter.detach()).float() for s in slices]
        return sum(_total(value.abs()) for value in values) / sum(value.numel() for value in values)

    return _per_unit(model, units, score)


def wanda_scores(model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42) -> dict[Unit, float]:
    """Weight magnitude times the norm of the input channel it meets, summed over the unit's weights (Eq. 34)."""
    norms = _input_norms(model, units, batches)

    def score(slices: list[Slice]) -> float:
        total = 0.0
        for s in slices:
            if s.parameter.dim() == 1:
                continue  # a bias has no input channel
            weight = s.of(s.parameter.detach()).float().abs()
            total += _total(weight * s.of(norms[id(s.parameter)].expand_as(s.parameter)))
        return total

    return _per_unit(model, units, score)


def taylor_scores(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42, loss: Loss | None = None
) -> dict[Unit, float]:
    """The absolute sum of weight times gradient: the first-order change of the loss (Eq. 35)."""
    gradients = _gradients(model, units, batches, loss)
    return _per_unit(model, units, lambda slices: abs(sum(_total(_times_gradient(s, gradients)) for s in slices)))


def fisher_scores(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42, loss: Loss | None = None
) -> dict[Unit, float]:
    """The sum of squares of weight times gradient (Eq. 36)."""
    gradients = _gradients(model, units, batches, loss)
    return _per_unit(model, units, lambda slices: sum(_total(_times_gradient(s, gradients) ** 2) for s in slices))


def obs_scores(model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42) -> dict[Unit, float]:
    """The squared error that a unit's removal adds to its output projection when the columns that stay make up for it.

    This is the structured optimal brain surgeon. The units of a projection are removed one after another, those of the least
    error first, and the columns are corrected after each, so that of two units that carry the same only one scores low. A few
    go at a time: a 64th of those left.
    """
    layers = anatomy(model)
    if any(layer_of(layers, unit).experts and unit.side == MLP for unit in units):
        raise SettingError("The method obs scores heads and channels, but not those of experts: choose another --method.")
    by_projection: dict[nn.Module, dict[Unit, list[int]]] = defaultdict(dict)
    for unit in units:
        for part in layer_of(layers, unit).ranges(unit):
            by_projection[part.projection][unit] = list(part.channels)
    moments = {projection: Moments(projection) for projection in by_projection}
    gather(model, moments, batches)
    scores: dict[Unit, float] = {}
    for projection, channels in by_projection.items():
        scores |= _obs(projection, moments.pop(projection), channels)
    return {unit: scores[unit] for unit in units}


def _obs(projection: nn.Module, moments: Moments, channels: Mapping[Unit, list[int]]) -> dict[Unit, float]:
    weight = weight_of(projection).detach().to("cpu", torch.float64)
    columns = weight.clone() if input_dim(projection) == 1 else weight.T.clone()  # (outputs, channels)
    mean, gram = moments.means()
    if isinstance(projection.bias, Tensor):
        gram = gram - mean[:, None] * mean  # the bias takes the mean over
    ridge = DAMPING * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
    left = {unit: torch.tensor(places) for unit, places in channels.items()}
    scores: dict[Unit, float] = {}
    gone = torch.zeros(len(gram), dtype=torch.bool)
    least = 0.0  # a unit scores no less than one that went before it
    while left:
        errors = _removal_errors(columns, inverse, left)
        going = sorted(errors, key=errors.__getitem__)[: max(1, len(errors) // 64)]
        scores |= {unit: max(least, errors[unit]) for unit in going}
        least = max(scores[unit] for unit in going)
        places = torch.cat([left.pop(unit) for unit in going]).unique()
        update = torch.linalg.solve(inverse[places][:, places], inverse[places])
        columns = columns - columns[:, places] @ update
        inverse = inverse - inverse[:, places] @ update
        gone[places] = True
        left = {unit: own[~gone[own]] for unit, own in left.items()}  # units may overlap: a head and its K/V group
    return scores


def _removal_errors(columns: Tensor, inverse: Tensor, left: Mapping[Unit, Tensor]) -> dict[Unit, float]:
    """tr(W_G (H^-1)_GG^-1 W_G^T) for the channels G of each unit; units of the same size are solved together."""
    by_size: dict[int, list[Unit]] = defaultdict(list)
    for unit, places in left.items():
        by_size[len(places)].append(unit)
    errors: dict[Unit, float] = {}
    for size, of_size in by_size.items():
        if not size:
            errors |= dict.fromkeys(of_size, 0.0)
            continue
        places = torch.stack([left[unit] for unit in of_size])  # (units, size)
        own = columns.T[places]  # (units, size, outputs)
        blocks = inverse[places[:, :, None], places[:, None, :]]
        found = (own * torch.linalg.solve(blocks, own)).sum((1, 2))
        errors |= dict(zip(of_size, found.tolist(), strict=True))
    return errors


def _input_norms(model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch]) -> dict[int, Tensor]:
    """||X_b||_2 of every input channel of every projection that the units touch, over all positions of all batches.

    They are given by the weight's id, in a form that can be expanded to its shape. The inputs of an expert are those of the
    tokens that it gets.
    """
    squares: dict[int, Tensor] = {}
    real: Tensor | None = None  # positions of the present batch that are not padding; None: all

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x, *routed = (arg if real is None else arg[real.to(arg.device)] for arg in (args[0].flatten(0, -2), *args[1:]))
        if module in experts:
            sums = _expert_squares(module, x, routed[0])
        else:
            sums = [(weight_of(module), _squares(x) if input_dim(module) == 1 else _squares(x)[:, None])]
        for weight, total in sums:
            squares[id(weight)] = squares.get(id(weight), 0) + total

    experts = {layer.mlp_out for layer in anatomy(model) if layer.experts}
    modules = {s.module for slices in _slices(model, units).values() for s in slices}
    handles = [module.register_forward_pre_hook(add) for module in modules]
    try:
        with torch.inference_mode(), evaluating(model):
            for batch in batches:
                real = real_positions(batch)
                outputs(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {key: value.sqrt() for key, value in squares.items()}


def _expert_squares(experts: nn.Module, x: Tensor, chosen: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The weights of experts that get (positions, channels) as chosen, each with the sums of squares (experts, 1, inputs)."""
    gate_up, down = expert_weights(experts)
    activate: Any = experts.act_fn
    into, inside = [], []
    for expert in range(len(gate_up)):
        given = x[(chosen == expert).any(1)]
        gate, up = F.linear(given, gate_up[expert]).chunk(2, dim=-1)
        into.append(_squares(given))
        inside.append(_squares(activate(gate) * up))
    return [(gate_up, torch.stack(into)[:, None]), (down, torch.stack(inside)[:, None])]


def _squares(x: Tensor) -> Tensor:
    """The sum of squares of each channel of (positions, channels)."""
    x = x.float()
    return (x * x).sum(0)


def _gradients(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], loss: Loss | None = None
) -> dict[int, Tensor]:
    """The gradient of the mean calibration loss in every parameter that the units touch, by the parameter's id.

    The model stays as it was: no `.grad` is written and `requires_grad` is restored.
    """
    parameters = list({id(s.parameter): s.parameter for slices in _slices(model, units).values() for s in slices}.values())
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    try:
        model.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad(), evaluating(model):
            for batch in batches:
                value = batch_loss(model, batch, loss) if loss or REFERENCE not in batch else _own_answers_loss(model, batch)
                for total, gradient in zip(sums, torch.autograd.grad(value, parameters), strict=True):
                    total += gradient / len(batches)
    finally:
        for touched, flag in required:
            touched.requires_grad_(flag)
    return {id(parameter): total for parameter, total in zip(parameters, sums, strict=True)}


def _own_answers_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A loss for gradients without labels: the distance from the dense model is 0 there, and so is its gradient.

    A classifier gets its own best classes as labels. An embedding is projected onto a random direction: the expected square of
    that gradient is the diagonal of the Gauss-Newton matrix, which is what Fisher stands for.
    """
    found = predictions(model, batch).float()
    if not TASKS[task_of(model)].embeds:
        real = real_positions(batch) if TASKS[task_of(model)].per_token and task_of(model) != TEXT else None
        labels = found.detach().argmax(-1)
        labels = labels if real is None else labels.masked_fill(~real.to(labels.device), IGNORED)
        return F.cross_entropy(found, labels, ignore_index=IGNORED)
    signs = torch.randint(0, 2, found.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return (F.normalize(found, dim=-1) * signs.to(found.device)).sum(-1).mean()


def _times_gradient(s: Slice, gradients: Mapping[int, Tensor]) -> Tensor:
    return s.of(s.parameter.detach()).float() * s.of(gradients[id(s.parameter)])


def _slices(model: nn.Module, units: Sequence[Unit]) -> dict[Unit, list[Slice]]:
    layers: tuple[Layer, ...] = anatomy(model)
    return {unit: list(layer_of(layers, unit).slices(unit)) for unit in units}


def _per_unit(model: nn.Module, units: Sequence[Unit], score: Callable[[list[Slice]], float]) -> dict[Unit, float]:
    return {unit: float(score(slices)) for unit, slices in _slices(model, units).items()}


def _total(values: Tensor) -> float:
    return float(values.sum())
