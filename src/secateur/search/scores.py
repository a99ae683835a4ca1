"""Static scores of units (Eq. 32-36): a high score means keep. Each needs at most one pass over the calibration batches.

A score function takes (model, units, batches, seed); a row of methods.py names it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import SettingError, not_one_of
from secateur.methods import METHODS, choosing_sets, scoring
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
from secateur.model.moments import DAMPING, Fills, Moments, Squares, gather
from secateur.selection import Selection
from secateur.settings import FISHER
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
    scores: dict[Unit, float] = _asked(method, model, units, batches, loss)(seed)
    return scores


def unit_set(
    method: str,
    model: nn.Module,
    units: Sequence[Unit],
    *,
    k: int,
    batches: Sequence[Batch],
    loss: Loss | None = None,
    seed: int = 42,
) -> Selection:
    """The `k` units that a method of METHODS chooses as a whole set.

    >>> unit_set("kwon", model, candidate_units(model), k=10, batches=calibration).units
    """
    if method not in choosing_sets():
        raise not_one_of("method that chooses sets", method, choosing_sets())
    if not 1 <= k < len(units):
        raise SettingError(f"The method {method} is asked for {k} of {len(units)} units, but some must go and some must stay.")
    chosen: Selection = _asked(method, model, units, batches, loss)(k, seed)
    return chosen


def _asked(
    method: str, model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], loss: Loss | None
) -> Callable[..., Any]:
    """The function of a method with what it looks at, once that has been checked."""
    row = METHODS[method]
    if row.needs_batches and not batches:
        raise SettingError(f"The method {method} needs calibration batches.")
    if not row.experts:
        refuse_experts(method, model, units)
    own = {"loss": loss} if loss and row.takes_loss else {}
    return partial(row.scorer(), model, units, batches, **own)


def refuse_experts(method: str, model: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse units that are experts, or channels of experts."""
    layers = anatomy(model)
    if any(layer_of(layers, unit).experts and unit.side == MLP for unit in units):
        raise SettingError(f"The method {method} scores heads and channels, but not those of experts: choose another --method.")


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

    return per_unit(model, units, score)


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

    return per_unit(model, units, score)


def taylor_scores(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42, loss: Loss | None = None
) -> dict[Unit, float]:
    """The absolute sum of weight times gradient: the first-order change of the loss (Eq. 35)."""
    gradients = gradients_of(model, units, batches, loss)
    return per_unit(model, units, lambda slices: abs(sum(_total(times_gradient(s, gradients)) for s in slices)))


def fisher_scores(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42, loss: Loss | None = None
) -> dict[Unit, float]:
    """The sum of squares of weight times gradient (Eq. 36)."""
    gradients = gradients_of(model, units, batches, loss)
    return per_unit(model, units, lambda slices: sum(_total(times_gradient(s, gradients) ** 2) for s in slices))


def obs_scores(model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], seed: int = 42) -> dict[Unit, float]:
    """The squared error that a unit's removal adds to its output projection when the columns that stay make up for it.

    This is the structured optimal brain surgeon. The units of a projection are removed one after another, those of the least
    error first, and the columns are corrected after each, so that of two units that carry the same only one scores low. A few
    go at a time: a 64th of those left.
    """
    by_projection = by_output(model, units)
    moments = {projection: Moments(projection) for projection in by_projection}
    gather(model, moments, batches)
    scores: dict[Unit, float] = {}
    for projection, channels in by_projection.items():
        for unit, score in _obs(projection, moments.pop(projection), channels).items():
            scores[unit] = scores.get(unit, 0.0) + score  # a block has two projections
    return {unit: scores[unit] for unit in units}


def by_output(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, dict[Unit, list[int]]]:
    """The output projections that units enter, each with its units and their channels."""
    layers = anatomy(model)
    found: dict[nn.Module, dict[Unit, list[int]]] = defaultdict(dict)
    for unit in units:
        for part in layer_of(layers, unit).ranges(unit):
            found[part.projection][unit] = list(part.channels)
    return dict(found)


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


def gradients_of(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], loss: Loss | None = None
) -> dict[int, Tensor]:
    """The gradient of the mean calibration loss in every parameter that the units touch, by the parameter's id.

    The model stays as it was: no `.grad` is written and `requires_grad` is restored.
    """
    parameters = list({id(s.parameter): s.parameter for slices in _slices(model, units).values() for s in slices}.values())
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    with _requiring(model, parameters):
        for batch in batches:
            value = _differentiable_loss(model, batch, loss)
            for total, gradient in zip(sums, torch.autograd.grad(value, parameters), strict=True):
                total += gradient / len(batches)
    return {id(parameter): total for parameter, total in zip(parameters, sums, strict=True)}


def mask_gradients(
    model: nn.Module,
    units: Sequence[Unit],
    batches: Sequence[Batch],
    loss: Loss | None = None,
    fills: Fills | None = None,
) -> Tensor:
    """The derivative of each example's loss in a mask of each unit, at the mask 1: (examples, units), float32 on the CPU.

    The mask of a unit multiplies its channels where they enter the output projection; 0 would remove it. An example is a row of
    a batch: a text or an image. Its loss is its share of the batch's mean loss times the rows of the batch, so that the mean
    over a batch's examples is the derivative of the batch's loss. A batch takes one backward pass, since no row of a model in
    evaluation mode looks at another. With `fills` the mask leads from the unit's channels to what the others say of them.

    >>> fisher = mask_gradients(model, units, batches).square().sum(0)
    """
    refuse_experts("of mask gradients", model, units)
    entering = by_output(model, units)
    places = {unit: i for i, unit in enumerate(units)}
    found = []
    if fills:
        for rows, tensors in _entering_gradients(model, list(entering), batches, loss):
            of_batch = torch.zeros(rows, len(units))
            for projection, (x, gradients) in tensors.items():
                for unit, slope in _filled_slopes(fills, projection, x, gradients, entering[projection]):
                    of_batch[:, places[unit]] += slope.view(rows, -1).sum(1).cpu()
            found.append(of_batch)
        return torch.cat(found)
    for rows, per_channel in _channel_gradients(model, list(entering), batches, loss):
        of_batch = torch.zeros(rows, len(units))
        for projection, gradients in per_channel.items():
            for unit, channels in entering[projection].items():
                of_batch[:, places[unit]] += gradients[:, channels].sum(1)
        found.append(of_batch)
    return torch.cat(found)


def _filled_slopes(
    fills: Fills, projection: nn.Module, x: Tensor, gradients: Tensor, units: Mapping[Unit, list[int]]
) -> Iterator[tuple[Unit, Tensor]]:
    """Each unit of a projection with the sum over its channels of gradient times what is lost, by position.

    A part loses what the channels that stay do not say of it; a whole, of which nothing stays, all it gives.
    """
    place = fills.places[projection]
    parts = {unit: channels for unit, channels in units.items() if not unit.whole}
    lost = fills.residuals(place, x, list(parts.values())) if parts else []
    for unit, residual in zip(parts, lost, strict=True):
        own = fills.kept(place, parts[unit]).to(x.device)
        yield unit, (gradients.index_select(-1, own) * residual).sum(-1).flatten()
    for unit in units:
        if unit.whole:
            yield unit, (gradients * x).sum(-1).flatten()


def _entering_gradients(
    model: nn.Module, projections: Sequence[nn.Module], batches: Sequence[Batch], loss: Loss | None
) -> Iterator[tuple[int, dict[nn.Module, tuple[Tensor, Tensor]]]]:
    """For each batch, its rows, and for each projection what enters it with the gradients there, of the sum of all rows."""
    entering: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # what enters, and a zero that is added to it

    def note(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        zero = torch.zeros_like(args[0], requires_grad=True)
        entering[module] = args[0].detach(), zero
        return (args[0] + zero, *args[1:])

    # The first of the hooks: what is predicted from these channels depends on them.
    handles = [projection.register_forward_pre_hook(note, prepend=True) for projection in projections]
    try:
        with _requiring(model, []):
            for batch in batches:
                entering.clear()
                rows = len(next(iter(batch.values())))
                value = _differentiable_loss(model, batch, loss)
                zeros = [zero for _, zero in entering.values()]
                gradients = torch.autograd.grad(value, zeros, allow_unused=True, materialize_grads=True)
                pairs = zip(entering.items(), gradients, strict=True)
                yield rows, {module: (x, gradient * rows) for (module, (x, _)), gradient in pairs}
    finally:
        for handle in handles:
            handle.remove()


def channel_orders(model: nn.Module, by: str, batches: Sequence[Batch], loss: Loss | None = None) -> list[list[int]]:
    """The MLP channels of each block from the lowest score to the highest, so that neighbours matter alike.

    FISHER is the Fisher information of a mask of the channel (`mask_gradients`). ACTIVATION is the second moment of the channel
    where it enters the output projection, its positions weighted as model/moments.py says, times the squared norm of its
    weights there.
    """
    layers = anatomy(model)
    if not batches:
        raise SettingError(f"MLP channels are ordered by {by} on calibration batches, and there are none.")
    if any(layer.experts for layer in layers):
        raise SettingError("The channels of experts can only be grouped by address: leave --group-by out.")
    projections = [layer.mlp_out for layer in layers]
    scores = (_channel_fisher if by == FISHER else _channel_activations)(model, projections, batches, loss)
    return [score.nan_to_num(nan=math.inf).argsort(stable=True).tolist() for score in scores]


def _channel_fisher(
    model: nn.Module, projections: Sequence[nn.Module], batches: Sequence[Batch], loss: Loss | None
) -> list[Tensor]:
    sums = [torch.zeros(())] * len(projections)
    for _, gradients in _channel_gradients(model, projections, batches, loss):
        sums = [total + gradients[projection].square().sum(0) for total, projection in zip(sums, projections, strict=True)]
    return sums


def _channel_activations(
    model: nn.Module, projections: Sequence[nn.Module], batches: Sequence[Batch], loss: Loss | None
) -> list[Tensor]:
    seen = {projection: Squares() for projection in projections}
    gather(model, seen, batches)
    norms = [weight_of(one).detach().float().square().sum(1 - input_dim(one)) for one in projections]
    return [seen[projection].sums * norm for projection, norm in zip(projections, norms, strict=True)]


def _channel_gradients(
    model: nn.Module, projections: Sequence[nn.Module], batches: Sequence[Batch], loss: Loss | None
) -> Iterator[tuple[int, dict[nn.Module, Tensor]]]:
    """For each batch, its rows and the gradients in a mask of each channel that enters a projection: (rows, channels)."""
    masks: dict[nn.Module, Tensor] = {}  # of the present batch
    rows = 0

    def multiply(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]  # (rows, ..., channels); a text or image may have several rows here, one after another (windows, tokens)
        if module not in masks:
            masks[module] = torch.ones(rows, x.shape[-1], dtype=x.dtype, device=x.device, requires_grad=True)
        parts = x.unflatten(0, (rows, len(x) // rows))
        return ((parts * masks[module].view(rows, *[1] * (x.dim() - 1), -1)).flatten(0, 1), *args[1:])

    handles = [projection.register_forward_pre_hook(multiply) for projection in projections]
    try:
        with _requiring(model, []):
            for batch in batches:
                rows = len(next(iter(batch.values())))
                masks.clear()
                value = _differentiable_loss(model, batch, loss)
                gradients = torch.autograd.grad(value, list(masks.values()), allow_unused=True, materialize_grads=True)
                yield rows, {one: found.detach().float().cpu() * rows for one, found in zip(masks, gradients, strict=True)}
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _requiring(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Gradients of these parameters alone, in evaluation mode, while the block lasts; then all is as it was."""
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad(), evaluating(model):
            yield
    finally:
        for touched, flag in required:
            touched.requires_grad_(flag)


def _differentiable_loss(model: nn.Module, batch: Batch, loss: Loss | None) -> Tensor:
    # Images are prepared when they are first asked for: what was prepared in inference mode has no gradients.
    batch = {name: x.clone() if x.is_inference() else x for name, x in batch.items()}
    value = batch_loss(model, batch, loss) if loss or REFERENCE not in batch else _own_answers_loss(model, batch)
    if not value.requires_grad:
        raise SettingError("The loss of your own has no gradient: choose a --method that needs none, such as ucb.")
    return value


def differentiable(model: nn.Module, batch: Batch, loss: Loss) -> bool:
    """Whether a loss of the user's own has gradients."""
    with _requiring(model, [tensor for tensor in model.parameters() if tensor.is_floating_point()]):
        return batch_loss(model, {name: x.clone() for name, x in batch.items()}, loss).requires_grad


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


def times_gradient(s: Slice, gradients: Mapping[int, Tensor]) -> Tensor:
    return s.of(s.parameter.detach()).float() * s.of(gradients[id(s.parameter)])


def _slices(model: nn.Module, units: Sequence[Unit]) -> dict[Unit, list[Slice]]:
    layers: tuple[Layer, ...] = anatomy(model)
    return {unit: list(layer_of(layers, unit).slices(unit)) for unit in units}


def per_unit(model: nn.Module, units: Sequence[Unit], score: Callable[[list[Slice]], float]) -> dict[Unit, float]:
    return {unit: float(score(slices)) for unit, slices in _slices(model, units).items()}


def _total(values: Tensor) -> float:
    return float(values.sum())
