"""Accounting: how many parameters units account for (Eq. 12-15). Also works on a model without weights (the meta device).

These are the paper's effective counts: the parameters that functional zeroing disables, not what a smaller file would save.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from secateur.model.families import Layer, anatomy, candidate_units, check_group_width, family_of, layer_of
from secateur.model.loading import load_shapes
from secateur.units import EXPERT, GROUP_WIDTH, HEAD, MLP, Unit, kinds_of, n_selected, outermost


def total_parameters(model: nn.Module) -> int:
    """P_total, the number of parameters; tied weights count once.

    >>> total_parameters(load_shapes("gpt2"))
    """
    return sum(parameter.numel() for parameter in model.parameters())


def effective_parameters(layer: Layer, unit: Unit) -> int:
    """P_j, the number of parameters that one unit of `layer` accounts for (Eq. 12-14).

    >>> from secateur.model.families import anatomy
    >>> effective_parameters(anatomy(model)[0], Unit("head", 0, 0))
    """
    d, total = layer.width, 0
    for part in layer.ranges(unit):
        width = len(part.channels)
        if part.side == EXPERT:
            total += 3 * d * layer.mlp_width + d  # the last is its row of the router
            continue
        if part.side == MLP and layer.experts:
            total += layer.experts * 3 * d * width  # experts have no biases
            continue
        if part.side == MLP:
            total += 3 * d * width + 2 * width if layer.gated else 2 * d * width + width
            continue
        shared = len(layer.own_kv_heads(unit, layer.heads_in(part.channels))) * layer.head_dim  # outputs of K, and as many of V
        biased = shared and isinstance(layer.qkv[0].bias, Tensor)  # Eq. 13 counts no biases under grouped queries
        total += 2 * d * (width + shared) + (width + 2 * shared if biased else 0)
    outs = [part.projection.bias for part in layer.ranges(unit) if part.whole]
    return total + sum(bias.numel() for bias in outs if isinstance(bias, Tensor))


def zeroed_percent(model: nn.Module, units: Iterable[Unit]) -> float:
    """Z(S), the effective zeroed parameters as a percentage of all parameters (Eq. 15).

    >>> zeroed_percent(model, selection.units)
    """
    layers = anatomy(model)
    zeroed = sum(effective_parameters(layer_of(layers, unit), unit) for unit in outermost(set(units)))
    return 100 * zeroed / total_parameters(model)


def zeroed_percent_range(model: nn.Module, candidates: Sequence[Unit], k: int) -> tuple[float, float]:
    """The lowest and the highest Z(S) of any k candidates; they differ if units differ in size (Swin)."""
    layers = anatomy(model)
    sizes = sorted(effective_parameters(layer_of(layers, unit), unit) for unit in candidates)
    total = total_parameters(model)
    return 100 * sum(sizes[:k]) / total, 100 * sum(sizes[len(sizes) - k :]) / total


@dataclass(frozen=True)
class LayerInventory:
    """One block: its counts, its number of candidates and their parameters."""

    layer: int
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    units: int
    params: int
    experts: int = 0


@dataclass(frozen=True)
class Inventory:
    """What could be removed from a model, layer by layer, and how much a ratio would select."""

    model: str
    family: str
    target: str
    ratio: float
    candidates: int
    selected: int
    total_params: int
    zeroed_percent: tuple[float, float]  # lowest and highest
    layers: tuple[LayerInventory, ...]

    @property
    def unit_ratio(self) -> float:
        return self.selected / self.candidates

    def to_json(self) -> dict[str, Any]:
        low, high = self.zeroed_percent
        fields = asdict(self)
        layers = fields.pop("layers")
        if not any(layer["experts"] for layer in layers):
            layers = [{name: value for name, value in layer.items() if name != "experts"} for layer in layers]
        total, _ = fields.pop("total_params"), fields.pop("zeroed_percent")
        percent = low if low == high else [low, high]
        more = {"unit_ratio": self.unit_ratio, "total_params": total, "zeroed_percent": percent, "layers": list(layers)}
        return fields | more


def inventory(
    name: str,
    *,
    target: str = HEAD,
    ratio: float = 0.10,
    group_width: int = GROUP_WIDTH,
    trust_remote_code: bool = False,
) -> Inventory:
    """List what could be removed from a model; only its config is read.

    >>> inventory("gpt2", target="both").candidates
    """
    model = load_shapes(name, trust_remote_code=trust_remote_code)
    candidates, blocks = candidate_units(model, target, group_width), anatomy(model)
    check_group_width(model, target, group_width)
    k = n_selected(ratio, len(candidates))
    if target == EXPERT:  # equally many in each block that has some, as cut/costs.py takes them
        k = sum(max(1, round(ratio * block.experts)) for block in blocks if block.experts)
    low, high = (round(percent, 4) for percent in zeroed_percent_range(model, candidates, k))
    layers = []
    for i, layer in enumerate(blocks):
        units = [unit for unit in candidates if unit.layer == i]
        params = sum(effective_parameters(layer, unit) for unit in units)
        counts = (layer.heads, layer.kv_heads, layer.head_dim, layer.mlp_width)
        layers.append(LayerInventory(i, layer.name, *counts, len(units), params, layer.experts))
    return Inventory(
        name, family_of(model), target, ratio, len(candidates), k, total_parameters(model), (low, high), tuple(layers)
    )


def unit_counts(
    name: str, target: str, group_width: int = GROUP_WIDTH, *, trust_remote_code: bool = False
) -> dict[str, list[int]]:
    """How many candidates of each kind of the target each block of a model has; only its config is read.

    >>> unit_counts("gpt2", "head")["head"]
    [12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12]
    """
    model = load_shapes(name, trust_remote_code=trust_remote_code)
    counts = {kind: [0] * len(anatomy(model)) for kind in kinds_of(target)}
    for unit in candidate_units(model, target, group_width):
        counts[unit.kind][unit.layer] += 1
    return counts
