"""Repair without training: change what is left of an output projection so that it gives what the whole projection gave.

Removing units takes input channels from an output projection y = W x + b. Let K be the channels that stay and R the removed
ones. Least squares over the calibration positions, in closed form, gives the new columns W' and the new bias b' that minimise

    E |W x + b - W' x_K - b'|^2 + ridge |W' - W_K|^2

The change D = W' - W_K solves D (M_KK + ridge) = W_R M_RK. The ridge pulls towards the old columns: where the data say nothing,
nothing changes. If the projection has a bias, M are covariances and b' = b + W_R mu_R - D mu_K. If it has none (Llama), M are
second moments and no bias is added, so that the family's class still builds the checkpoint. The cheap form changes the bias
alone: W' = W_K and b' = b + W_R mu_R.

x is the input of the projection in the dense model, and E weights positions as model/moments.py says. The dearer form goes
layer by layer, on what really arrives in the cut model: layered.py.

None of this uses the loss, so a repair can do harm. Some batches are held out, and a repair that does not lower their loss is
undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.cut.layered import repair_layers
from secateur.cut.surgery import blocks_left, kept_of
from secateur.errors import SelectionError, SettingError, not_one_of
from secateur.model.accounting import total_parameters
from secateur.model.families import anatomy, input_dim, weight_of
from secateur.model.losses import Batch, Loss, batch_losses, evaluating
from secateur.model.moments import DAMPING, Moments, gather
from secateur.settings import AUTO, BIAS, LAYERED, LEAST_SQUARES, NONE, REPAIRS
from secateur.units import Unit

_IN_WORDS = {LEAST_SQUARES: "least squares", LAYERED: "least squares layer by layer", BIAS: "their biases"}
FORMS = REPAIRS
MEMORY = 2**32  # bytes of moments in memory at the same time


@dataclass(frozen=True)
class Repair:
    """Which forms of repair were tried, and which was kept.

    >>> repair(model, selection.units, small, calibration).losses
    """

    form: str  # "least squares", "layered", "bias", or "none" if no repair was kept
    losses: dict[str, float]  # mean loss of the held-out batches by form, including "none"
    declined: dict[str, str] = field(default_factory=dict)  # by form: why it was not kept
    projections: int = 0  # number changed
    fitted_on: int = 0  # number of batches
    held_out: int = 0  # number of batches
    size: int | None = None  # texts or images, if others were asked for than those that chose

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "size" or value is not None}

    def __str__(self) -> str:
        others = "; ".join(f"{form}: {reason}" for form, reason in self.declined.items())
        if self.form == NONE:
            return f"The cut model was not repaired ({others})."
        text = (
            f"{self.projections} output projections were repaired by {_IN_WORDS[self.form]} on {self.fitted_on} batches: "
            f"the loss of {self.held_out} held-out batches went from {self.losses[NONE]:.4f} to {self.losses[self.form]:.4f}"
        )
        return text + (f" ({others})." if others else ".")


def repair(
    model: nn.Module,
    units: Iterable[Unit],
    small: nn.Module,
    batches: Sequence[Batch],
    *,
    form: str = LEAST_SQUARES,
    damping: float = DAMPING,
    held_out: float = 0.25,
    memory: int = MEMORY,
    loss: Loss | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Repair:
    """Change the output projections of `small`, which is `shrink(model, units)`, to make up for the channels they lost.

    The last `held_out` share of the batches, at least one, judges the repair. The other batches fit it; they are run once, or
    more often if the moments take more than `memory` bytes, and layer by layer about three times. The form "auto" tries all
    forms and keeps the best one. `small` changes only if that lowers the held-out loss; otherwise it stays the same to the bit.

    >>> print(repair(model, selection.units, small, calibration, form="auto"))
    """
    _check(form, damping, held_out, memory, len(batches))
    units = list(units)
    projections = _projections(model, units, small)
    biased = [projection for projection in projections if projection.bias is not None]
    n_held = min(max(1, int(held_out * len(batches))), len(batches) - 1)
    fitting, judging = batches[:-n_held], batches[-n_held:]
    forms = _forms(form, model, small, projections, len(fitting))
    if not forms:
        reason = "no output projection lost a channel" + (
            ", and experts are not repaired" if any(layer.experts for layer in anatomy(model)) else ""
        )
        return Repair(NONE, {}, {LEAST_SQUARES if form == AUTO else form: reason})
    if form == BIAS and not biased:
        raise _no_bias()
    products = LEAST_SQUARES in forms
    chunks = list(_chunks(projections if products else biased, memory, products=products)) if {*forms} - {LAYERED} else []
    blocks = len(anatomy(model)) if LAYERED in forms else 0
    report_progress = _progress_reporter(progress, (len(chunks) + blocks) * len(fitting) + (1 + len(forms)) * n_held)

    solutions: dict[str, list[Solution]] = {name: [] for name in forms}
    for chunk in chunks:
        for projection, moments in _moments(model, chunk, fitting, products=products, report_progress=report_progress):
            if LEAST_SQUARES in forms:
                solutions[LEAST_SQUARES].append(_least_squares(projection, moments, damping))
            if BIAS in forms and projection.bias is not None:
                solutions[BIAS].append(_bias_only(projection, moments))
    if LAYERED in forms:
        solutions[LAYERED] = _layered(model, units, small, fitting, report_progress)
    chosen, losses, declined = _judge(small, solutions, judging, loss, report_progress)
    if form == AUTO and not biased and projections:
        declined[BIAS] = "the output projections have none"
    return Repair(chosen, losses, declined, len(solutions.get(chosen, ())), len(fitting), n_held)


def _forms(form: str, model: nn.Module, small: nn.Module, projections: Sequence[Projection], n_fitting: int) -> list[str]:
    """The forms to try. Where only whole blocks or sub-layers went, the layered one alone can make up for them."""
    lost = len(projections) > 0
    whole = not lost and total_parameters(small) < total_parameters(model) and not any(x.experts for x in anatomy(model))
    layered = [LAYERED] if (lost or whole) and n_fitting > 1 else []
    if form == LAYERED:
        return layered
    if form != AUTO:
        return [form] if lost else []
    biased = any(projection.bias is not None for projection in projections)
    return [*layered, *([LEAST_SQUARES] if lost else []), *([BIAS] if biased else [])]


def _layered(
    model: nn.Module,
    units: Sequence[Unit],
    small: nn.Module,
    batches: Sequence[Batch],
    report_progress: Callable[[int], None],
) -> list[Solution]:
    """What a repair layer by layer makes of the projections of `small`, which stays as it is."""
    outs = [module for layer in anatomy(small) for module in layer.outs]
    before = [Solution(module, [value.detach().clone() for value in _parameters(module)]) for module in outs]
    try:
        changed = repair_layers(model, units, small, batches, report_progress)
        return [Solution(module, [value.detach().clone() for value in _parameters(module)]) for module in changed]
    finally:
        _write(before)


def _judge(
    small: nn.Module,
    solutions: Mapping[str, list[Solution]],
    batches: Sequence[Batch],
    loss: Loss | None,
    report_progress: Callable[[int], None],
) -> tuple[str, dict[str, float], dict[str, str]]:
    """Write the form with the lowest loss into `small`, or leave it unrepaired if no form lowers its loss.

    Returns the chosen form, the losses by form, and why each other form was declined.
    """
    chosen, losses, declined = NONE, {NONE: _loss(small, batches, loss, report_progress)}, {}
    modules = {solution.projection for of_form in solutions.values() for solution in of_form}
    unrepaired = [Solution(module, [value.detach().clone() for value in _parameters(module)]) for module in modules]
    try:
        for form, of_form in solutions.items():
            if not all(bool(value.isfinite().all()) for solution in of_form for value in solution.values):
                declined[form] = "the fitted values are not finite"
                report_progress(len(batches))
                continue
            _write(of_form)
            losses[form] = _loss(small, batches, loss, report_progress)
            _write(unrepaired)
        chosen = min((form for form in losses if math.isfinite(losses[form])), key=losses.__getitem__, default=NONE)
    finally:
        _write(unrepaired if chosen == NONE else solutions[chosen])
    for form, judged in losses.items():
        if form not in (NONE, chosen):
            declined[form] = f"the held-out loss would be {judged:.4f}, without it {losses[NONE]:.4f}"
    return chosen, losses, declined


@dataclass(frozen=True, eq=False)
class Projection:
    """An output projection that lost input channels, in the dense and in the cut model."""

    dense: nn.Module
    small: nn.Module
    kept: Tensor  # indices of dense input channels
    removed: Tensor

    @property
    def bias(self) -> Tensor | None:
        return self.dense.bias if isinstance(self.dense.bias, Tensor) else None

    def columns(self, channels: Tensor) -> Tensor:
        """The columns of the dense weight for these channels, (outputs, channels), in float64 to solve equations with."""
        weight = weight_of(self.dense).detach().to("cpu", torch.float64)
        return (weight if input_dim(self.dense) == 1 else weight.T).index_select(1, channels)

    def solution(self, weight: Tensor, bias: Tensor | None) -> Solution:
        """A weight (outputs, kept) and a bias, in the layout, device and dtype of the cut model's projection."""
        values = [weight if input_dim(self.small) == 1 else weight.T] + ([] if bias is None else [bias])
        return Solution(self.small, [v.to(p.device, p.dtype) for v, p in zip(values, _parameters(self.small), strict=True)])


class Solution(NamedTuple):
    """New values for the parameters of a projection of the cut model."""

    projection: nn.Module
    values: list[Tensor]  # of the weight, and of the bias if there is one


def _moments(
    model: nn.Module,
    projections: Sequence[Projection],
    batches: Sequence[Batch],
    *,
    products: bool,
    report_progress: Callable[[int], None],
) -> list[tuple[Projection, Moments]]:
    """The moments of what enters each projection in the dense model."""
    none = torch.arange(0)
    pairs = [(projection, Moments(projection.dense, projection.kept if products else none)) for projection in projections]
    gather(model, {projection.dense: moments for projection, moments in pairs}, batches, report_progress)
    return pairs


def _least_squares(projection: Projection, moments: Moments, damping: float) -> Solution:
    """W' and b' as the head of this file defines them."""
    kept, removed, bias = projection.kept, projection.removed, projection.bias
    mean, products = moments.means()
    if bias is not None:
        products = products - mean[kept, None] * mean
    gram = products[:, kept]  # M_KK
    ridge = damping * gram.diagonal().sum() / max(1, len(kept))
    lost = products[:, removed] @ projection.columns(removed).T  # M_KR W_R^T: (kept, outputs)
    change = _solve(gram + ridge * torch.eye(len(kept), dtype=gram.dtype), lost).T  # D: (outputs, kept)
    if bias is not None:
        bias = bias.detach().to("cpu", torch.float64) + projection.columns(removed) @ mean[removed] - change @ mean[kept]
    return projection.solution(projection.columns(kept) + change, bias)


def _bias_only(projection: Projection, moments: Moments) -> Solution:
    """The cheap form: the columns stay, and b' = b + W_R mu_R."""
    kept, removed, bias = projection.kept, projection.removed, projection.bias
    assert bias is not None
    mean, _ = moments.means()
    bias = bias.detach().to("cpu", torch.float64) + projection.columns(removed) @ mean[removed]
    return projection.solution(projection.columns(kept), bias)


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """The solution X of matrix X = right, for a positive semidefinite matrix; the smallest one if the matrix is singular."""
    if not matrix.isfinite().all():
        return torch.full_like(right, math.nan)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    solution: Tensor = torch.linalg.pinv(matrix, hermitian=True) @ right if failed else torch.cholesky_solve(right, factor)
    return solution


def _projections(model: nn.Module, units: Iterable[Unit], small: nn.Module) -> list[Projection]:
    """The output projections that lost channels, block by block; not those of experts, which see some tokens only."""
    layers, small_layers = anatomy(model), anatomy(small)
    projections: list[Projection] = []
    kept_blocks = kept_of(layers, units)
    left = blocks_left(model, layers, kept_blocks)
    for i, small_layer in zip(left, small_layers, strict=False):
        layer, kept = layers[i], kept_blocks[i]
        d = layer.head_dim
        channels = [h * d + c for h in kept.heads for c in range(d)]
        for dense, cut, stay in zip(layer.outs, small_layer.outs, (channels, kept.channels), strict=False):
            projections.append(_projection(dense, cut, stay))
    fits = [len(p.kept) == weight_of(p.small).shape[input_dim(p.small)] for p in projections]
    if len(left) != len(small_layers) or not all(fits):
        raise SelectionError(
            "The model to repair is not the model with these units cut out: pass the one that shrink(model, units) returned."
        )
    return [p for p in projections if len(p.removed)]


def _projection(dense: nn.Module, small: nn.Module, kept: Sequence[int]) -> Projection:
    removed = torch.ones(weight_of(dense).shape[input_dim(dense)], dtype=torch.bool)
    removed[list(kept)] = False
    return Projection(dense, small, torch.tensor(kept, dtype=torch.long), removed.nonzero()[:, 0])


def _chunks(projections: Sequence[Projection], memory: int, *, products: bool) -> Iterator[list[Projection]]:
    """Split the projections into chunks whose moments fit in memory together."""
    chunk: list[Projection] = []
    used = 0
    for projection in projections:
        size = 4 * len(projection.kept) * (len(projection.kept) + len(projection.removed)) if products else 0
        if chunk and used + size > memory:
            yield chunk
            chunk, used = [], 0
        chunk.append(projection)
        used += size
    yield chunk


def _parameters(module: nn.Module) -> list[Tensor]:
    """The weight, and the bias if there is one."""
    return [weight_of(module)] + ([module.bias] if isinstance(module.bias, Tensor) else [])


def _write(solutions: Sequence[Solution]) -> None:
    """Copy the solutions into the parameters of their projections."""
    with torch.no_grad():
        for solution in solutions:
            for parameter, values in zip(_parameters(solution.projection), solution.values, strict=True):
                parameter.copy_(values)


def _loss(model: nn.Module, batches: Sequence[Batch], loss: Loss | None, report_progress: Callable[[int], None]) -> float:
    """The mean loss over all predicted tokens, texts or images; nan if there are none."""
    total, rows = 0.0, 0
    with torch.inference_mode(), evaluating(model):
        for batch in batches:
            summed, n = batch_losses(model, batch, loss)
            total, rows = total + summed, rows + n
            report_progress(1)
    return total / rows if rows else math.nan


def _progress_reporter(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """A function that adds to the number of finished batches and passes it on to `progress`."""
    done = 0

    def report_progress(n: int) -> None:
        nonlocal done
        done += n
        if progress:
            progress(done, total)

    return report_progress


def check_repairable(model: nn.Module, form: str, n_batches: int) -> None:
    """Refuse, before any work, a form of repair that this model does not allow, or too few batches."""
    _check(form, DAMPING, 0.25, MEMORY, n_batches)
    outs = [module for layer in anatomy(model) for module in layer.outs]
    if form == BIAS and not any(isinstance(module.bias, Tensor) for module in outs):
        raise _no_bias()


def _no_bias() -> SettingError:
    return SettingError(f"The form of repair is {BIAS!r}, but the output projections have no bias: use {LEAST_SQUARES!r}.")


def _check(form: str, damping: float, held_out: float, memory: int, n_batches: int) -> None:
    if form not in FORMS:
        raise not_one_of("form of repair", form, FORMS)
    if not (math.isfinite(damping) and damping > 0):
        raise SettingError(f"The damping is {damping}, but must be more than 0.")
    if not 0 < held_out < 1:
        raise SettingError(f"The share of batches that is held out is {held_out}, but must lie between 0 and 1.")
    if memory < 1:
        raise SettingError(f"The memory for moments is {memory} bytes, but must be at least 1.")
    if n_batches < 2:
        raise SettingError(f"A repair needs at least 2 batches, one to fit and one to judge; there are {n_batches}.")
