"""Surgery: copy a model with physically smaller tensors. proof.py proves that the copy computes what the zeroed one does."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import SelectionError, SettingError, UnsupportedModel, not_one_of
from secateur.model.families import (
    FAMILIES,
    PACKED,
    PER_HEAD,
    SEPARATE,
    Family,
    Layer,
    anatomy,
    classes_of,
    expert_weights,
    family_of,
    input_dim,
    layer_of,
    task_of,
    weight_of,
)
from secateur.model.shrunk import LayerLayout, Layout, bias_tables, describe, fit, layout_of
from secateur.settings import FREE, LAYOUTS, UNIFORM
from secateur.tasks import TASKS
from secateur.units import BLOCK, EXPERT, HEAD, MLP, Unit

EXPERTS_SETTING = "num_experts"  # Mixtral's config takes it for its num_local_experts
PER_BLOCK = ("layer_types", "mlp_layer_types", "no_rope_layers")  # lists in a config with an entry for each block


@dataclass(frozen=True)
class Kept:
    """What is left of a block, as indices into the heads, channels and experts it had."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    channels: tuple[int, ...]  # of the MLP
    kv_index: tuple[int, ...]  # for each kept head, the position of its K/V head in `kv_heads`
    experts: tuple[int, ...] = ()
    silent: frozenset[str] = frozenset()  # the sides that add nothing any more, not even a bias
    skipped: bool = False  # the block gives what it gets

    @property
    def even(self) -> bool:
        """Whether all K/V heads serve the same number of heads."""
        return len({self.kv_index.count(i) for i in range(len(self.kv_heads))}) <= 1


def shrink(model: nn.Module, units: Iterable[Unit], layout: str = FREE) -> nn.Module:
    """Return a copy of the model with the units cut out; the model itself does not change.

    If all layers lost the same and the config can describe that, the copy is an ordinary model with other settings. The layout
    "uniform" requires this. Otherwise the copy stores its counts layer by layer, see shrunk.py. All layers must lose equally
    many experts in any case.

    >>> small = shrink(model, selection.units)
    """
    if layout not in LAYOUTS:
        raise not_one_of("layout", layout, LAYOUTS)
    layers, family = anatomy(model), FAMILIES[family_of(model)]
    kept = kept_of(layers, units)
    experts = _experts_left(layers, kept)
    settings = _uniform_settings(model, family, layers, kept)
    if layout == UNIFORM:
        _require_uniform(settings)
    stay = blocks_left(model, layers, kept)
    sliced = {id(bias): nn.Parameter(torch.zeros_like(bias), bias.requires_grad) for bias in _silent_biases(layers, kept)}
    for parameter, dim, indices in _cuts(layers, kept):
        with torch.no_grad():
            index = torch.tensor(indices, dtype=torch.long, device=parameter.device)
            values = sliced.get(id(parameter), parameter).index_select(dim, index)  # experts may be cut in two dimensions
        sliced[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    small = copy.deepcopy(model, dict(sliced))  # this memo puts the smaller tensors in place of the large ones
    if len(stay) < len(layers):
        _drop_blocks(small, layers, stay)
        _change_settings(small, _depth_settings(model, family, layers, stay))
    counts = _layout(family, layers, kept, stay)
    fit(small, counts)
    if experts is not None:
        _set_experts(small, experts)
    if isinstance(settings, str):
        describe(small, counts, _auto_classes(small), _config_words(family))
    else:
        _change_settings(small, settings)
    return small


def check_uniform(model: nn.Module, units: Iterable[Unit]) -> None:
    """Refuse, before any work, units whose removal no stock config can describe."""
    layers, family = anatomy(model), FAMILIES[family_of(model)]
    _require_uniform(_uniform_settings(model, family, layers, kept_of(layers, units)))


def check_cuttable(model: nn.Module, units: Iterable[Unit]) -> None:
    """Refuse, before any work, units that cannot be cut out of this model."""
    layers, units = anatomy(model), list(units)
    _cuts(layers, kept_of(layers, [unit for unit in units if not unit.whole]))
    channels = 16 // next(model.parameters()).element_size()
    grouped = getattr(getattr(model, "config", None), "_experts_implementation", None) == "grouped_mm"
    for unit in units:
        if grouped and unit.kind == MLP and layer_of(layers, unit).experts and unit.width % channels:
            raise SettingError(
                f"torch multiplies by experts whose channels are a multiple of {channels}, but the groups have {unit.width}: "
                f"choose a --group-width that is a multiple of {channels}."
            )


def _require_uniform(settings: dict[str, Any] | str) -> None:
    """Raise a SelectionError if there is a reason in place of the settings."""
    if isinstance(settings, str):
        raise SelectionError(f"The layout cannot be uniform: {settings}. Use --layout free.")


def kept_of(layers: Sequence[Layer], units: Iterable[Unit]) -> list[Kept]:
    """What each block keeps without the units. A K/V head is removed with the last of its heads."""
    removed: list[dict[str, set[int]]] = [{HEAD: set(), MLP: set(), EXPERT: set()} for _ in layers]
    wholes: list[set[str]] = [set() for _ in layers]
    skipped = set()
    for unit in units:
        skipped.update([unit.layer] if unit.kind == BLOCK else [])
        layer = layer_of(layers, unit)
        for part in layer.ranges(unit):
            wholes[unit.layer].update([part.side] if part.whole else [])
            removed[unit.layer][part.side].update(layer.heads_in(part.channels) if part.side == HEAD else part.channels)
    kept = []
    for i, (layer, gone, whole) in enumerate(zip(layers, removed, wholes, strict=True)):
        heads = tuple(h for h in range(layer.heads) if h not in gone[HEAD])
        kv_heads = tuple(sorted({layer.kv_of[h] for h in heads}))
        channels = tuple(c for c in range(layer.mlp_width) if c not in gone[MLP])
        kv_index = tuple(kv_heads.index(layer.kv_of[h]) for h in heads)
        experts = tuple(e for e in range(layer.experts) if e not in gone[EXPERT])
        kept.append(Kept(heads, kv_heads, channels, kv_index, experts, frozenset(whole), i in skipped))
    return kept


def blocks_left(model: nn.Module, layers: Sequence[Layer], kept: Sequence[Kept]) -> list[int]:
    """The blocks that the cut model has: all but those that went as a block, if the config can count them; else all.

    A block takes the place of one before it. That one must have had the same parameters: ModernBERT's first has a norm less.
    """
    family, config = FAMILIES[family_of(model)], getattr(model, "config", None)
    stay = [i for i, block_kept in enumerate(kept) if not block_kept.skipped]
    counted = hasattr(config, family.depth_setting) if config is not None else family.depth_setting == "depth"
    if not stay or not family.depth_setting or not counted or getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return list(range(len(layers)))
    moved = ((layers[i].block, layers[place].block) for place, i in enumerate(stay) if i != place)
    fits = all([*one.state_dict()] == [*other.state_dict()] for one, other in moved)
    return stay if fits else list(range(len(layers)))


def _depth_settings(model: Any, family: Family, layers: Sequence[Layer], stay: Sequence[int]) -> dict[str, Any]:
    """The settings with which the stock class builds only these blocks."""
    if len(stay) == len(layers):
        return {}
    config = getattr(model, "config", None)
    lists = {name: getattr(config, name, None) for name in PER_BLOCK}
    settings = {name: [values[i] for i in stay] for name, values in lists.items() if isinstance(values, list)}
    if stages := getattr(config, "stage_names", None):  # DINOv2 as a backbone gives the last of these
        stages = stages[: len(stay) + 1]
        settings |= {"stage_names": stages, "out_features": stages[-1:]}
    return {family.depth_setting: len(stay), **settings}


def _drop_blocks(small: Any, layers: Sequence[Layer], stay: Sequence[int]) -> None:
    """Take the other blocks out of a copy of the model, and number those that stay."""
    parent, _, name = layers[0].name.rpartition(".")[0].rpartition(".")
    owner = small.get_submodule(parent)
    blocks = [getattr(owner, name)[i] for i in stay]
    setattr(owner, name, nn.Sequential(*blocks) if isinstance(getattr(owner, name), nn.Sequential) else nn.ModuleList(blocks))
    for i, block in enumerate(blocks):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = i


def _silent_biases(layers: Sequence[Layer], kept: Sequence[Kept]) -> list[Tensor]:
    """The biases of the output projections that give nothing any more."""
    pairs = [
        (side in block_kept.silent, out.bias)
        for layer, block_kept in zip(layers, kept, strict=True)
        for side, out in zip((HEAD, MLP), layer.outs, strict=False)
    ]
    return [bias for silent, bias in pairs if silent and isinstance(bias, Tensor)]


def parameters_left(model: nn.Module, units: Iterable[Unit]) -> int:
    """How many parameters the model has after the units are cut out.

    >>> parameters_left(model, selection.units) < total_parameters(model)
    True
    """
    layers = anatomy(model)
    kept = kept_of(layers, units)
    stay = set(blocks_left(model, layers, kept))
    dropped = {id(p) for i, layer in enumerate(layers) if i not in stay for p in layer.block.parameters()}
    shapes = _shapes_left(_cuts(layers, kept))
    return sum(math.prod(shapes.get(id(p), p.shape)) for p in model.parameters() if id(p) not in dropped)


Cut = tuple[Tensor, int, Sequence[int]]  # the parameter that becomes smaller, the dimension, and the indices that stay


def _cuts(layers: Sequence[Layer], kept: Sequence[Kept]) -> list[Cut]:
    """All parameters that become smaller."""
    cuts = [cut for layer, block_kept in zip(layers, kept, strict=True) for cut in _block_cuts(layer, block_kept)]
    return [(parameter, dim, indices) for parameter, dim, indices in cuts if len(indices) < parameter.shape[dim]]


def _shapes_left(cuts: Sequence[Cut]) -> dict[int, list[int]]:
    """The shapes of the smaller parameters, by the id of the parameter."""
    shapes: dict[int, list[int]] = {}
    for parameter, dim, indices in cuts:
        shapes.setdefault(id(parameter), list(parameter.shape))[dim] = len(indices)
    return shapes


def _block_cuts(layer: Layer, kept: Kept) -> list[Cut]:
    """The parameters of a block, with the indices that stay; some may keep all."""
    if getattr(layer.attention, "gate", None) is not None:  # some timm models have one
        raise UnsupportedModel(f"{layer.name} has a gate after its heads, which Secateur cannot cut.")
    if layer.norm_over_heads and len(kept.heads) < layer.heads and HEAD not in kept.silent:
        raise UnsupportedModel(
            f"{layer.name} has a norm over all its heads together, so that none of them can be cut out; "
            "choose --target expert or mlp, or --layout none to zero heads without cutting them."
        )
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
    for module, indices in zip(layer.outs, (heads, kept.channels), strict=False):
        cuts.append((weight_of(module), input_dim(module), indices))
    if layer.router:
        gate_up, down = expert_weights(layer.mlp_out)
        halves = [half * layer.mlp_width + c for half in range(2) for c in kept.channels]
        cuts += [(weight, 0, kept.experts) for weight in (gate_up, down, weight_of(layer.router))]
        cuts += [(gate_up, 1, halves), (down, 2, kept.channels)]
    return cuts + [(table, 1, kept.heads) for _, table in bias_tables(layer.attention)]


def _layout(family: Family, layers: Sequence[Layer], kept: Sequence[Kept], stay: Sequence[int]) -> Layout:
    """The counts of each block after the cut, by its new place."""
    counts = tuple(
        LayerLayout(
            layers[place].name,
            len(block_kept.heads),
            len(block_kept.kv_heads),
            layer.head_dim,
            len(block_kept.channels),
            None if block_kept.even else block_kept.kv_index,
        )
        for place, (layer, block_kept) in enumerate((layers[i], kept[i]) for i in stay)
    )
    return Layout(family.attention, family.qkv, family.out, family.mlp_in, family.mlp_out, counts, family.experts)


def _experts_left(layers: Sequence[Layer], kept: Sequence[Kept]) -> int | None:
    """How many experts each layer that has some keeps; None if all stay."""
    pairs = [(layer, block_kept) for layer, block_kept in zip(layers, kept, strict=True) if layer.experts]
    for layer, block_kept in pairs:
        layer.check_experts(set(range(layer.experts)) - set(block_kept.experts))
    if all(len(block_kept.experts) == layer.experts for layer, block_kept in pairs):
        return None
    counts = {len(block_kept.experts) for _, block_kept in pairs}
    if len(counts) > 1:
        raise SelectionError(
            f"The layers would keep {', '.join(map(str, sorted(counts)))} experts, but a config has one number for all: remove "
            "equally many from every layer that has experts."
        )
    return counts.pop()


def _set_experts(small: Any, n: int) -> None:
    """Set the number of experts in the config of a cut model and in the modules that store it."""
    setattr(small.config, EXPERTS_SETTING, n)
    routed = [module for layer in anatomy(small) if layer.experts for module in (layer.router, layer.mlp_out)]
    for module in (small, *routed):
        if hasattr(module, "num_experts"):
            module.num_experts = n


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
        words["experts_mlp_width"] = family.experts_mlp_setting
    return words


def _change_settings(small: Any, settings: dict[str, Any]) -> None:
    """Make the cut model an ordinary one with these settings in its config."""
    if not hasattr(small, "config"):  # a timm model
        small.model_args = getattr(small, "model_args", {}) | settings
        return
    for name, value in settings.items():
        setattr(small.config, name, value)


def _uniform_settings(model: Any, family: Family, layers: Sequence[Layer], kept: Sequence[Kept]) -> dict[str, Any] | str:
    """The settings with which the stock class builds the cut model, or the reason why there are none."""
    stay = blocks_left(model, layers, kept)
    pairs = [(layers[i], kept[i]) for i in stay]
    settings: dict[str, Any] = {}
    if layout_of(model):
        return "the model's layers differed before"
    if any(len(block_kept.heads) < layer.heads for layer, block_kept in pairs):
        if not family.head_dim_setting:
            return f"in the family {family_of(model)!r} the number of heads sets the width of a head, so all heads must stay"
        counts = {(len(block_kept.heads), len(block_kept.kv_heads)) for _, block_kept in pairs}
        if len(counts) > 1 or not all(block_kept.even for _, block_kept in pairs):
            return "the layers lost different numbers of heads, or their K/V heads serve different numbers of heads"
        heads, kv_heads = counts.pop()
        if not heads:
            return "no head would be left"
        settings = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": layers[0].head_dim}
    for with_experts, setting in ((False, family.mlp_setting), (True, family.experts_mlp_setting)):
        alike = [(layer, block_kept) for layer, block_kept in pairs if bool(layer.experts) == with_experts]
        if all(len(block_kept.channels) == layer.mlp_width for layer, block_kept in alike):
            continue
        sizes = [(len(block_kept.channels), layer.width) for layer, block_kept in alike]
        by_ratio = setting == "mlp_ratio"
        widths = {_ratio(channels, width) if by_ratio else channels for channels, width in sizes}
        if len(widths) > 1:
            return "the layers lost different numbers of MLP channels"
        settings[setting] = widths.pop()
        if not settings[setting]:
            return "no MLP channel would be left"
    experts = _experts_left(layers, kept)
    if experts is not None:
        settings[EXPERTS_SETTING] = experts
    settings |= _depth_settings(model, family, layers, stay)
    dropped = {id(p) for i, layer in enumerate(layers) if i not in stay for p in layer.block.parameters()}
    return _refusal(model, settings, _cuts(layers, kept), dropped) or settings


def _refusal(model: Any, settings: dict[str, Any], cuts: Sequence[Cut], dropped: Set[int]) -> str | None:
    """The reason why the model's class does not build the cut model with these settings; None if it does.

    `dropped` are the ids of parameters that go as a whole.
    """
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
    smaller = _shapes_left(cuts)
    left = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in dropped]
    for (name, parameter), (_, stock_parameter) in zip(left, stock.named_parameters(), strict=True):
        if smaller.get(id(parameter), list(parameter.shape)) != list(stock_parameter.shape):
            return f"a {config.model_type} config cannot describe what is left ({name})"
    return None


def _ratio(width: int, model_width: int) -> float:
    """The ratio for which int(model_width * ratio), as models compute it, is exactly the width."""
    ratio = width / model_width
    return ratio if int(model_width * ratio) == width else math.nextafter(ratio, math.inf)
