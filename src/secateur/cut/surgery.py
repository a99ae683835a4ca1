"""Surgery: copy a model with physically smaller tensors. proof.py proves that the copy computes what the zeroed one does."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import SelectionError, UnsupportedModel, not_one_of
from secateur.model.families import (
    FAMILIES,
    PACKED,
    PER_HEAD,
    SEPARATE,
    Family,
    Layer,
    anatomy,
    classes_of,
    family_of,
    input_dim,
    layer_of,
    task_of,
    weight_of,
)
from secateur.model.shrunk import LayerLayout, Layout, bias_tables, describe, fit, layout_of
from secateur.settings import FREE, LAYOUTS, UNIFORM
from secateur.tasks import TASKS
from secateur.units import MLP, Unit


@dataclass(frozen=True)
class Kept:
    """What is left of a block, as indices into the heads and channels it had."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    channels: tuple[int, ...]  # of the MLP
    kv_index: tuple[int, ...]  # for each kept head, the position of its K/V head in `kv_heads`

    @property
    def even(self) -> bool:
        """Whether all K/V heads serve the same number of heads."""
        return len({self.kv_index.count(i) for i in range(len(self.kv_heads))}) <= 1


def shrink(model: nn.Module, units: Iterable[Unit], layout: str = FREE) -> nn.Module:
    """Return a copy of the model with the units cut out; the model itself does not change.

    If all layers lost the same and the config can describe that, the copy is an ordinary model with other settings. The layout
    "uniform" requires this. Otherwise the copy stores its counts layer by layer, see shrunk.py.

    >>> small = shrink(model, selection.units)
    """
    if layout not in LAYOUTS:
        raise not_one_of("layout", layout, LAYOUTS)
    layers, family = anatomy(model), FAMILIES[family_of(model)]
    kept = kept_of(layers, units)
    settings = _uniform_settings(model, family, layers, kept)
    if layout == UNIFORM:
        _require_uniform(settings)
    sliced = {}
    for parameter, dim, indices in _cuts(layers, kept):
        with torch.no_grad():
            values = parameter.index_select(dim, torch.tensor(indices, dtype=torch.long, device=parameter.device))
        sliced[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    small = copy.deepcopy(model, dict(sliced))  # this memo puts the smaller tensors in place of the large ones
    counts = _layout(family, layers, kept)
    fit(small, counts)
    if isinstance(settings, str):
        describe(small, counts, _auto_classes(small), _config_words(family))
    else:
        _change_settings(small, settings)
    return small


def check_uniform(model: nn.Module, units: Iterable[Unit]) -> None:
    """Refuse, before any work, units whose removal no stock config can describe."""
    layers, family = anatomy(model), FAMILIES[family_of(model)]
    _require_uniform(_uniform_settings(model, family, layers, kept_of(layers, units)))


def _require_uniform(settings: dict[str, Any] | str) -> None:
    """Raise a SelectionError if there is a reason in place of the settings."""
    if isinstance(settings, str):
        raise SelectionError(f"The layout cannot be uniform: {settings}. Use --layout free.")


def kept_of(layers: Sequence[Layer], units: Iterable[Unit]) -> list[Kept]:
    """What each block keeps without the units. A K/V head is removed with the last of its heads."""
    removed: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in layers]  # heads and MLP channels
    for unit in units:
        layer = layer_of(layers, unit)
        for part in layer.ranges(unit):
            removed[unit.layer][part.side == MLP].update(part.channels if part.side == MLP else layer.heads_in(part.channels))
    kept = []
    for layer, (removed_heads, removed_channels) in zip(layers, removed, strict=True):
        heads = tuple(h for h in range(layer.heads) if h not in removed_heads)
        kv_heads = tuple(sorted({layer.kv_of[h] for h in heads}))
        channels = tuple(c for c in range(layer.mlp_width) if c not in removed_channels)
        kept.append(Kept(heads, kv_heads, channels, tuple(kv_heads.index(layer.kv_of[h]) for h in heads)))
    return kept


def parameters_left(model: nn.Module, units: Iterable[Unit]) -> int:
    """How many parameters the model has after the units are cut out."""
    layers = anatomy(model)
    cuts = _cuts(layers, kept_of(layers, units))
    removed = sum(p.numel() // p.shape[dim] * (p.shape[dim] - len(indices)) for p, dim, indices in cuts)
    return sum(parameter.numel() for parameter in model.parameters()) - removed


Cut = tuple[Tensor, int, Sequence[int]]  # the parameter that becomes smaller, the dimension, and the indices that stay


def _cuts(layers: Sequence[Layer], kept: Sequence[Kept]) -> list[Cut]:
    """All parameters that become smaller."""
    cuts = [cut for layer, block_kept in zip(layers, kept, strict=True) for cut in _block_cuts(layer, block_kept)]
    return [(parameter, dim, indices) for parameter, dim, indices in cuts if len(indices) < parameter.shape[dim]]


def _block_cuts(layer: Layer, kept: Kept) -> list[Cut]:
    """The parameters of a block, with the indices that stay; some may keep all."""
    if getattr(layer.attention, "gate", None) is not None:  # some timm models have one
        raise UnsupportedModel(f"{layer.name} has a gate after its heads, which Secateur cannot cut.")
    d = layer.head_dim
    heads, kv_heads = ([i * d + c for i in indices for c in range(d)] for indices in (kept.heads, kept.kv_heads))
    if layer.packing == SEPARATE:
        rows: list[Sequence[int]] = [heads, kv_heads, kv_heads]
    elif layer.packing == PACKED:
        rows = [[part * layer.heads * d + row for part in range(3) for row in heads]]
    else:
        assert layer.packing == PER_HEAD
        rows = [[3 * d * i + c for i in kept.heads for c in range(3 * d)]]
    cuts: list[Cut] = []
    channels = [half * layer.mlp_width + c for half in range(1 + layer.mlp_packed) for c in kept.channels]
    for module, indices in (*zip(layer.qkv, rows, strict=True), *((module, channels) for module in layer.mlp_in)):
        cuts.append((weight_of(module), 1 - input_dim(module), indices))
        if isinstance(module.bias, Tensor):
            cuts.append((module.bias, 0, indices))
    for module, indices in ((layer.out, heads), (layer.mlp_out, kept.channels)):
        cuts.append((weight_of(module), input_dim(module), indices))
    return cuts + [(table, 1, kept.heads) for _, table in bias_tables(layer.attention)]


def _layout(family: Family, layers: Sequence[Layer], kept: Sequence[Kept]) -> Layout:
    """The counts of each block after the cut."""
    counts = tuple(
        LayerLayout(
            layer.name,
            len(block_kept.heads),
            len(block_kept.kv_heads),
            layer.head_dim,
            len(block_kept.channels),
            None if block_kept.even else block_kept.kv_index,
        )
        for layer, block_kept in zip(layers, kept, strict=True)
    )
    return Layout(family.attention, family.qkv, family.out, family.mlp_in, family.mlp_out, counts)


def _auto_classes(model: nn.Module) -> dict[str, str]:
    """The Auto classes that can load the model, each with the class it loads: the model's own, or one with another head."""
    if not hasattr(model, "config"):
        return {}  # a timm model
    classes = classes_of(family_of(model))
    return classes | {TASKS[task_of(model)].auto_class: type(model).__name__.removeprefix("Shrunk")}


def _config_words(family: Family) -> dict[str, str]:
    """The names that a family's config has for the counts of a layer."""
    words = {"heads": family.heads_setting}
    if family.head_dim_setting:
        words["head_dim"] = "head_dim"
    if family.mlp_setting != "mlp_ratio":
        words["mlp_width"] = family.mlp_setting
    return words


def _change_settings(small: Any, settings: dict[str, Any]) -> None:
    """Make the cut model an ordinary one with these settings in its config."""
    if not hasattr(small, "config"):  # a timm model
        small.model_args = settings
        return
    for name, value in settings.items():
        setattr(small.config, name, value)


def _uniform_settings(model: Any, family: Family, layers: Sequence[Layer], kept: Sequence[Kept]) -> dict[str, Any] | str:
    """The settings with which the stock class builds the cut model, or the reason why there are none."""
    pairs = list(zip(layers, kept, strict=True))
    settings: dict[str, Any] = {}
    if layout_of(model):
        return "the model's layers differed before"
    if any(len(block_kept.heads) < layer.heads for layer, block_kept in pairs):
        if not family.head_dim_setting:
            return f"in the family {family_of(model)!r} the number of heads sets the width of a head, so all heads must stay"
        counts = {(len(block_kept.heads), len(block_kept.kv_heads)) for block_kept in kept}
        if len(counts) > 1 or not all(block_kept.even for block_kept in kept):
            return "the layers lost different numbers of heads, or their K/V heads serve different numbers of heads"
        heads, kv_heads = counts.pop()
        if not heads:
            return "no head would be left"
        settings = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": layers[0].head_dim}
    if any(len(block_kept.channels) < layer.mlp_width for layer, block_kept in pairs):
        sizes = [(len(block_kept.channels), layer.width) for layer, block_kept in pairs]
        by_ratio = family.mlp_setting == "mlp_ratio"
        widths = {_ratio(channels, width) if by_ratio else channels for channels, width in sizes}
        if len(widths) > 1:
            return "the layers lost different numbers of MLP channels"
        settings[family.mlp_setting] = widths.pop()
        if not settings[family.mlp_setting]:
            return "no MLP channel would be left"
    return _refusal(model, settings, _cuts(layers, kept)) or settings


def _refusal(model: Any, settings: dict[str, Any], cuts: Sequence[Cut]) -> str | None:
    """The reason why the model's class does not build the cut model with these settings; None if it does."""
    if not hasattr(model, "config"):
        return None  # a timm model is rebuilt when it is saved
    config = copy.deepcopy(model.config)
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        config.validate()
        with torch.device("meta"):
            stock = type(model)(config)
    except Exception as error:  # configs and models raise errors of any type
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"transformers says: {lines[-1].strip().rstrip('.')}"
    smaller = {id(parameter): (dim, len(indices)) for parameter, dim, indices in cuts}
    for (name, parameter), (_, stock_parameter) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        shape = list(parameter.shape)
        if id(parameter) in smaller:
            dim, size = smaller[id(parameter)]
            shape[dim] = size
        if shape != list(stock_parameter.shape):
            return f"a {config.model_type} config cannot describe what is left ({name})"
    return None


def _ratio(width: int, model_width: int) -> float:
    """The ratio for which int(model_width * ratio), as models compute it, is exactly the width."""
    ratio = width / model_width
    return ratio if int(model_width * ratio) == width else math.nextafter(ratio, math.inf)
