"""Repair without training: what is left of an output projection is made to give what all of it gave.

Removing units takes input channels from an output projection y = W x + b. The columns of those that stay (K; R are gone) and
the bias are changed by least squares over the calibration positions, in closed form, so that

    E |W x + b - W' x_K - b'|^2 + ridge |W' - W_K|^2

is smallest: D = W' - W_K solves D (M_KK + ridge) = W_R M_RK. The ridge pulls towards the columns as they were: where the data
say nothing, nothing changes. Where the projection has a bias, M are covariances and b' = b + W_R mu_R - D mu_K. Where it has
none (Llama), M are second moments and none is added: the checkpoint stays what its family's class builds. The bias alone,
W' = W_K and b' = b + W_R mu_R, is the cheap form.

x is what enters the projection in the dense model, and E weighs a position by 1 / (|x|^2 + c), with c its usual |x|^2. Language
models have a few positions whose activations are a thousand times as large as others' (the first of a text, some delimiters).
With equal weights these decide everything: where SmolLM2-135M's block 28 lost the channel behind them, its repair cost 2.4 nats
and the cut itself 0.05. The norm that comes next lets them count for no more than others, and so does the weight.

None of this sees the loss, so that a repair can be worse than none. Batches are held out, and what does not lower their loss is
undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.errors import SelectionError, SettingError, not_one_of
from secateur.families import anatomy, input_dim, weight_of
from secateur.losses import IGNORED, Batch, batch_loss, evaluating, row_losses
from secateur.surgery import kept_of
from secateur.units import Unit

LEAST_SQUARES, BIAS, AUTO, NONE = "least squares", "bias", "auto", "none"
_IN_WORDS = {LEAST_SQUARES: "least squares", BIAS: "their biases"}
FORMS = (LEAST_SQUARES, BIAS, AUTO)
DAMPING = 0.03  # the ridge, in mean diagonals of M_KK
MEMORY = 2**32  # bytes of moments that are held at once


@dataclass(frozen=True)
class Repair:
    """What was tried and what was kept."""

    form: str  # "least squares", "bias", or "none" where it was declined
    losses: dict[str, float]  # mean loss of the held-out batches by form, "none" among them
    declined: dict[str, str] = field(default_factory=dict)  # of each form that is not kept, why
    projections: int = 0  # how many were changed
    fitted_on: int = 0  # batches
    held_out: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

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
    progress: Callable[[int, int], None] | None = None,
) -> Repair:
    """Change the output projections of `small`, which is `shrink(model, units)`, to make up for what they lost.

    The last part of the batches, `held_out` of them and at least one, judges; the others are gone through once, or as often as
    it takes to hold no more than `memory` bytes of moments at a time. The form "auto" tries both and keeps the better. `small`
    is changed only if that lowers the held-out loss; else it is left as it was, to the bit.

    >>> print(repair(model, selection.units, small, calibration, form="auto"))
    """
    _check(form, damping, held_out, memory, len(batches))
    projections = _projections(model, units, small)
    biased = [projection for projection in projections if projection.bias is not None]
    if not projections:
        return Repair(NONE, {}, {LEAST_SQUARES if form == AUTO else form: "no output projection lost a channel"})
    if form == BIAS and not biased:
        raise _no_bias()
    forms = [form] if form != AUTO else [LEAST_SQUARES, BIAS] if biased else [LEAST_SQUARES]
    products = LEAST_SQUARES in forms
    n_held = min(max(1, int(held_out * len(batches))), len(batches) - 1)
    fitting, judging = batches[:-n_held], batches[-n_held:]
    chunks = list(_chunks(projections if products else biased, memory, products=products))
    tell = _teller(progress, len(chunks) * len(fitting) + (1 + len(forms)) * n_held)

    found: dict[str, list[Solution]] = {name: [] for name in forms}
    for chunk in chunks:
        for projection, moments in _moments(model, chunk, fitting, products=products, tell=tell):
            if LEAST_SQUARES in forms:
                found[LEAST_SQUARES].append(_least_squares(projection, moments, damping))
            if BIAS in forms and projection.bias is not None:
                found[BIAS].append(_bias_only(projection, moments))
    chosen, losses, declined = _judge(small, found, judging, tell)
    if form == AUTO and not biased:
        declined[BIAS] = "the output projections have none"
    return Repair(chosen, losses, declined, len(found.get(chosen, ())), len(fitting), n_held)


def _judge(
    small: nn.Module, found: Mapping[str, list[Solution]], batches: Sequence[Batch], tell: Callable[[int], None]
) -> tuple[str, dict[str, float], dict[str, str]]:
    """Write the form of the lowest loss, or none: the form, the losses, and why others are not kept."""
    chosen, losses, declined = NONE, {NONE: _loss(small, batches, tell)}, {}
    modules = {solution.projection for solutions in found.values() for solution in solutions}
    as_it_was = [Solution(module, [value.detach().clone() for value in _parameters(module)]) for module in modules]
    try:
        for form, solutions in found.items():
            if not all(bool(value.isfinite().all()) for solution in solutions for value in solution.values):
                declined[form] = "what it makes of the calibration batches is not finite"
                tell(len(batches))
                continue
            _write(solutions)
            losses[form] = _loss(small, batches, tell)
            _write(as_it_was)
        chosen = min((form for form in losses if math.isfinite(losses[form])), key=losses.__getitem__, default=NONE)
    finally:
        _write(as_it_was if chosen == NONE else found[chosen])
    for form, loss in losses.items():
        if form not in (NONE, chosen):
            declined[form] = f"the held-out loss would be {loss:.4f}, without it {losses[NONE]:.4f}"
    return chosen, losses, declined


@dataclass(frozen=True, eq=False)
class Projection:
    """An output projection that lost input channels, in both models."""

    dense: nn.Module
    small: nn.Module
    kept: Tensor  # indices into the channels it had
    gone: Tensor

    @property
    def bias(self) -> Tensor | None:
        return self.dense.bias if isinstance(self.dense.bias, Tensor) else None

    def columns(self, channels: Tensor) -> Tensor:
        """(outputs, channels) of the weight, in the precision that equations are solved in."""
        weight = weight_of(self.dense).detach().to("cpu", torch.float64)
        return (weight if input_dim(self.dense) == 1 else weight.T).index_select(1, channels)

    def solution(self, weight: Tensor, bias: Tensor | None) -> Solution:
        """A weight (outputs, kept) and a bias, as the cut model's projection holds them."""
        values = [weight if input_dim(self.small) == 1 else weight.T] + ([] if bias is None else [bias])
        return Solution(self.small, [v.to(p.device, p.dtype) for v, p in zip(values, _parameters(self.small), strict=True)])


class Solution(NamedTuple):
    projection: nn.Module
    values: list[Tensor]  # of the weight, and of the bias if it has one


class Moments:
    """Weighted sums over the positions seen so far: of each channel, and of the kept channels' products with every one.

    They are kept in float32, which any device has: weighted, no position is large, and what is solved from them (in float64)
    differs by 4e-6 from what float64 throughout gives (SmolLM2-135M, 16 batches).
    """

    def __init__(self, projection: Projection, *, products: bool) -> None:
        n = len(projection.kept) + len(projection.gone)
        device = weight_of(projection.dense).device
        self.kept = projection.kept.to(device)
        self.usual: Tensor | None = None  # |x|^2: the median of the first batch
        self.weights = torch.zeros((), device=device)
        self.sums = torch.zeros(n, device=device)
        self.products = torch.zeros(len(self.kept) if products else 0, n, device=device)

    def add(self, x: Tensor) -> None:
        if not len(x):
            return
        x = x.float()  # (positions, channels)
        squares = x.square().sum(1)
        if self.usual is None:
            self.usual = squares.median().clamp(min=torch.finfo(x.dtype).tiny)
        weights = (squares + self.usual).reciprocal()
        weighted = weights[:, None] * x
        self.weights += weights.sum()
        self.sums += weighted.sum(0)
        if len(self.products):
            self.products += weighted.index_select(1, self.kept).T @ x

    def means(self) -> tuple[Tensor, Tensor]:
        """Of the channels, and of the products: (channels,) and (kept, channels), in float64."""
        total = self.weights.item() or 1.0  # nothing was seen, and all sums are 0
        return self.sums.to("cpu", torch.float64) / total, self.products.to("cpu", torch.float64) / total


def _moments(
    model: nn.Module,
    projections: Sequence[Projection],
    batches: Sequence[Batch],
    *,
    products: bool,
    tell: Callable[[int], None],
) -> list[tuple[Projection, Moments]]:
    """What enters the projections of the dense model, over all positions of the batches that are not padding."""
    found = [(projection, Moments(projection, products=products)) for projection in projections]
    real: Tensor | None = None  # the positions of the batch at hand that are not padding; None: all

    def adding(moments: Moments) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].flatten(0, -2)
            moments.add(x if real is None else x[real.to(x.device)])

        return hook

    handles = [projection.dense.register_forward_pre_hook(adding(moments)) for projection, moments in found]
    try:
        with torch.inference_mode(), evaluating(model):
            for batch in batches:
                real = (batch["labels"] != IGNORED).flatten() if "input_ids" in batch else None
                batch_loss(model, batch)
                tell(1)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _least_squares(projection: Projection, moments: Moments, damping: float) -> Solution:
    kept, gone, bias = projection.kept, projection.gone, projection.bias
    mean, products = moments.means()
    if bias is not None:
        products = products - mean[kept, None] * mean
    gram = products[:, kept]  # M_KK
    ridge = damping * gram.diagonal().sum() / max(1, len(kept))
    lost = products[:, gone] @ projection.columns(gone).T  # M_KR W_R^T: (kept, outputs)
    change = _solve(gram + ridge * torch.eye(len(kept), dtype=gram.dtype), lost).T  # Delta
    if bias is not None:
        bias = bias.detach().to("cpu", torch.float64) + projection.columns(gone) @ mean[gone] - change @ mean[kept]
    return projection.solution(projection.columns(kept) + change, bias)


def _bias_only(projection: Projection, moments: Moments) -> Solution:
    kept, gone, bias = projection.kept, projection.gone, projection.bias
    assert bias is not None
    mean, _ = moments.means()
    bias = bias.detach().to("cpu", torch.float64) + projection.columns(gone) @ mean[gone]
    return projection.solution(projection.columns(kept), bias)


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Of a symmetric matrix without negative eigenvalues; where it is singular, the smallest solution."""
    if not matrix.isfinite().all():
        return torch.full_like(right, math.nan)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    solution: Tensor = torch.linalg.pinv(matrix, hermitian=True) @ right if failed else torch.cholesky_solve(right, factor)
    return solution


def _projections(model: nn.Module, units: Iterable[Unit], small: nn.Module) -> list[Projection]:
    """The output projections that lost channels, block by block."""
    layers, small_layers = anatomy(model), anatomy(small)
    found: list[Projection] = []
    for layer, left, kept in zip(layers, small_layers, kept_of(layers, units), strict=False):
        d = layer.head_dim
        channels = [h * d + c for h in kept.heads for c in range(d)]
        found.append(_projection(layer.out, left.out, channels))
        found.append(_projection(layer.mlp_out, left.mlp_out, kept.channels))
    shapes = [len(p.kept) == weight_of(p.small).shape[input_dim(p.small)] for p in found]
    if len(layers) != len(small_layers) or not all(shapes):
        raise SelectionError(
            "The model to repair is not the model with these units cut out: give it what shrink(model, units) gave."
        )
    return [p for p in found if len(p.gone)]


def _projection(dense: nn.Module, small: nn.Module, kept: Sequence[int]) -> Projection:
    gone = torch.ones(weight_of(dense).shape[input_dim(dense)], dtype=torch.bool)
    gone[list(kept)] = False
    return Projection(dense, small, torch.tensor(kept, dtype=torch.long), gone.nonzero()[:, 0])


def _chunks(projections: Sequence[Projection], memory: int, *, products: bool) -> Iterator[list[Projection]]:
    """The projections in runs whose moments are held at the same time."""
    chunk: list[Projection] = []
    used = 0
    for projection in projections:
        size = 4 * len(projection.kept) * (len(projection.kept) + len(projection.gone)) if products else 0
        if chunk and used + size > memory:
            yield chunk
            chunk, used = [], 0
        chunk.append(projection)
        used += size
    yield chunk


def _parameters(module: nn.Module) -> list[Tensor]:
    return [weight_of(module)] + ([module.bias] if isinstance(module.bias, Tensor) else [])


def _write(solutions: Sequence[Solution]) -> None:
    with torch.no_grad():
        for solution in solutions:
            for parameter, values in zip(_parameters(solution.projection), solution.values, strict=True):
                parameter.copy_(values)


def _loss(model: nn.Module, batches: Sequence[Batch], tell: Callable[[int], None]) -> float:
    """The mean over all predicted tokens, or images; nan where there are none."""
    total, rows = 0.0, 0
    with torch.inference_mode(), evaluating(model):
        for batch in batches:
            losses, labels, _ = row_losses(model, batch)
            total, rows = total + float(losses.sum()), rows + int((labels != IGNORED).sum())
            tell(1)
    return total / rows if rows else math.nan


def _teller(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    done = 0

    def tell(n: int) -> None:
        nonlocal done
        done += n
        if progress:
            progress(done, total)

    return tell


def check_repairable(model: nn.Module, form: str, n_batches: int) -> None:
    """Refuse, before any work, a form that this model does not allow, or too few batches."""
    _check(form, DAMPING, 0.25, MEMORY, n_batches)
    outs = [module for layer in anatomy(model) for module in (layer.out, layer.mlp_out)]
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
        raise SettingError(f"The part of the batches that is held out is {held_out}, but must lie between 0 and 1.")
    if memory < 1:
        raise SettingError(f"The memory for moments is {memory} bytes, but must be at least 1.")
    if n_batches < 2:
        raise SettingError(f"A repair needs at least 2 batches, one to fit and one that judges; there are {n_batches}.")
