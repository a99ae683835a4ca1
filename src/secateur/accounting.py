"""How many parameters a set of units stands for (Eq. 12-15). Works on a model without weights (the meta device).

These are the paper's effective counts: what functional zeroing puts out of work, not what a smaller file would save.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from secateur.families import Layer, anatomy, layer_of
from secateur.units import HEAD, MLP, Unit


def total_parameters(model: nn.Module) -> int:
    """P_total; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def effective_parameters(layer: Layer, unit: Unit) -> int:
    """P_j, the parameters that one unit of `layer` stands for (Eq. 12-14)."""
    d, width = layer.width, len(layer.channels(unit))
    if unit.kind == MLP:
        return 3 * d * width + 2 * width if layer.gated else 2 * d * width + width
    if unit.kind == HEAD and layer.grouped_query:
        return 2 * d * width
    biased = isinstance(layer.qkv[0].bias, Tensor)
    shared = width if unit.kind == HEAD else layer.head_dim  # of K and V each; a K/V group has one K/V head for all its heads
    return 2 * d * (width + shared) + (width + 2 * shared if biased else 0)


def zeroed_percent(model: nn.Module, units: Iterable[Unit]) -> float:
    """Z(S), the effective zeroed parameters in percent of all (Eq. 15)."""
    layers = anatomy(model)
    zeroed = sum(effective_parameters(layer_of(layers, unit), unit) for unit in set(units))
    return 100 * zeroed / total_parameters(model)


def zeroed_percent_range(model: nn.Module, candidates: Sequence[Unit], k: int) -> tuple[float, float]:
    """The least and the most that Z(S) can be for k of the candidates; they differ where units differ in size (Swin)."""
    layers = anatomy(model)
    sizes = sorted(effective_parameters(layer_of(layers, unit), unit) for unit in candidates)
    total = total_parameters(model)
    return 100 * sum(sizes[:k]) / total, 100 * sum(sizes[len(sizes) - k :]) / total
