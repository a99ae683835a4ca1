"""The anatomy of a model: its blocks, their projections, and which parameters belong to which unit. Loads nothing.

A family is one row of FAMILIES. Everything downstream (zeroing, scores, accounting) reads `anatomy(model)` and never asks
which family it is. To add one, see docs/add-a-family.md.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import SelectionError, SettingError, UnsupportedModel
from secateur.model.shrunk import HEAD_DIMS, counting
from secateur.tasks import TASKS
from secateur.units import EXPERT, GROUP_WIDTH, HEAD, KINDS, KV_GROUP, MLP, Unit, enumerate_units, kinds_of, outermost

SEPARATE, PACKED, PER_HEAD = "separate", "packed", "per head"


@dataclass(frozen=True)
class Family:
    """Where a model's parts are, as dotted paths: `blocks` starts at the model, others at a block; `*` walks a list.

    >>> row = Family("text", "blocks", "attention", ("q", "k", "v"), "out", ("mlp.up",), "mlp.down")
    """

    task: str  # of TASKS: what its models usually do
    blocks: str  # with the name of the model inside a model with a head, such as "bert" or "model"
    attention: str
    qkv: tuple[str, ...]  # inside the attention
    out: str  # inside the attention: the output projection, whose input holds the heads side by side
    mlp_in: tuple[str, ...]  # two names make a gated MLP
    mlp_out: str
    packing: str = SEPARATE  # or one projection: PACKED is [all Q | all K | all V], PER_HEAD is [q k v] head after head
    mlp_packed: bool = False  # a gated MLP in one projection: [all gates | all inputs], or the other way round
    mlp_setting: str = "intermediate_size"  # the config's name for the MLP width; "mlp_ratio" is a multiple of the model width
    heads_setting: str = "num_attention_heads"  # the config's name for the number of heads
    depth_setting: str = "num_hidden_layers"  # the config's name for the number of blocks; "" where they differ by place
    head_dim_setting: bool = False  # the config sets the width of a head independently of the number of heads
    experts: str = ""  # in blocks that have experts, the module that holds them as three-dimensional parameters
    router: str = ""  # in the same blocks, the module that gives (logits, scores, experts) for each token
    experts_mlp_setting: str = "intermediate_size"  # the config's name for the MLP width of an expert


_LLAMA = Family(
    task="text",
    blocks="model.layers",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="o_proj",
    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
    mlp_out="mlp.down_proj",
    head_dim_setting=True,
)
_MOE = replace(_LLAMA, experts="mlp.experts", router="mlp.gate")
_VIT = Family(
    task="image",
    blocks="vit.layers",
    attention="attention",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="o_proj",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
)
_TIMM = Family(
    task="image",
    blocks="blocks",
    attention="attn",
    qkv=("qkv",),
    out="proj",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
    packing=PACKED,
    mlp_setting="mlp_ratio",
    depth_setting="depth",
)

_BERT = Family(
    task="masked text",
    blocks="bert.encoder.layer",
    attention="attention",
    qkv=("self.query", "self.key", "self.value"),
    out="output.dense",
    mlp_in=("intermediate.dense",),
    mlp_out="output.dense",
)
_CLIP_VISION = Family(
    task="image embeddings",
    blocks="vision_model.encoder.layers",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
)

# The key is transformers' model_type, "timm/" and a class name, or the name of a class of your own: a row can be added at run
# time.
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        task="text",
        blocks="transformer.h",
        attention="attn",
        qkv=("c_attn",),
        out="c_proj",
        mlp_in=("mlp.c_fc",),
        mlp_out="mlp.c_proj",
        packing=PACKED,
        mlp_setting="n_inner",
    ),
    "opt": Family(
        task="text",
        blocks="model.decoder.layers",
        attention="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="out_proj",
        mlp_in=("fc1",),
        mlp_out="fc2",
        mlp_setting="ffn_dim",
    ),
    "gpt_neox": Family(
        task="text",
        blocks="gpt_neox.layers",
        attention="attention",
        qkv=("query_key_value",),
        out="dense",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
        packing=PER_HEAD,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "smollm3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "mixtral": _MOE,
    "qwen2_moe": replace(_MOE, experts_mlp_setting="moe_intermediate_size"),
    "qwen3_moe": replace(_MOE, experts_mlp_setting="moe_intermediate_size"),
    "olmoe": _MOE,
    "vit": _VIT,
    "deit": replace(_VIT, blocks="deit.layers"),
    "swin": replace(_VIT, blocks="swin.encoder.layers.*.blocks", mlp_setting="mlp_ratio", depth_setting=""),
    "dinov2": replace(_VIT, task="image embeddings", blocks="dinov2.encoder.layer", mlp_setting="mlp_ratio"),
    "clip_vision_model": _CLIP_VISION,
    "siglip_vision_model": _CLIP_VISION,
    "bert": _BERT,
    "roberta": replace(_BERT, blocks="roberta.encoder.layer"),
    "xlm-roberta": replace(_BERT, blocks="roberta.encoder.layer"),
    "distilbert": Family(
        task="masked text",
        blocks="distilbert.transformer.layer",
        attention="attention",
        qkv=("q_lin", "k_lin", "v_lin"),
        out="out_lin",
        mlp_in=("ffn.lin1",),
        mlp_out="ffn.lin2",
        mlp_setting="hidden_dim",
        heads_setting="n_heads",
    ),
    "modernbert": Family(
        task="masked text",
        blocks="model.layers",
        attention="attn",
        qkv=("Wqkv",),
        out="Wo",
        mlp_in=("mlp.Wi",),
        mlp_out="mlp.Wo",
        packing=PACKED,
        mlp_packed=True,
    ),
    "timm/VisionTransformer": _TIMM,
    "timm/VisionTransformerDistilled": _TIMM,
    "timm/SwinTransformer": replace(_TIMM, blocks="layers.*.blocks", depth_setting=""),
}


@dataclass(frozen=True)
class Slice:
    """Some places of one dimension of a parameter: a range, or a list of them."""

    module: nn.Module
    parameter: Tensor
    dim: int
    places: Sequence[int]
    over_inputs: bool = False  # the places are inputs of the projection, not outputs

    def of(self, tensor: Tensor) -> Tensor:
        """These places of `tensor`, which has the parameter's shape (the parameter itself, or its gradient)."""
        if isinstance(self.places, range):
            return tensor.narrow(self.dim, self.places.start, len(self.places))
        return tensor.index_select(self.dim, torch.tensor(self.places, device=tensor.device))


@dataclass(frozen=True)
class Range:
    """Channels in the input of an output projection: the attention's if the `side` is HEAD, the MLP's if it is MLP.

    In a block with experts the MLP's projection is the module that holds them; EXPERT stands for whole experts of it.
    """

    side: str
    projection: nn.Module
    channels: Sequence[int]  # or, for EXPERT, the experts' numbers
    whole: bool = False  # the projection gives nothing at all, not even its bias


@dataclass(frozen=True)
class Layer:
    """One block of a model: its projections and its counts."""

    name: str
    block: nn.Module
    attention: nn.Module
    qkv: tuple[nn.Module, ...]
    out: nn.Module
    mlp_in: tuple[nn.Module, ...]  # empty in a block with experts
    mlp_out: nn.Module  # in a block with experts, the module that holds them
    packing: str
    mlp_packed: bool
    width: int  # d, the model dimension in this block
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int  # D_l
    kv_of: tuple[int, ...]  # the K/V head of each head, in ascending order
    router: nn.Module | None = None  # in a block with experts
    experts: int = 0
    experts_per_token: int = 0

    @property
    def grouped_query(self) -> bool:
        return self.kv_heads < self.heads

    @property
    def gated(self) -> bool:
        return self.mlp_packed or len(self.mlp_in) == 2 or self.experts > 0

    @property
    def outs(self) -> tuple[nn.Module, ...]:
        """The output projections that are modules of their own; those of experts are not."""
        return (self.out,) if self.experts else (self.out, self.mlp_out)

    @property
    def norm_over_heads(self) -> bool:
        """Whether a norm runs over the queries of all heads together (OLMoE): without a head it would give other values."""
        weight = getattr(getattr(self.attention, "q_norm", None), "weight", None)
        return self.heads > 1 and weight is not None and weight.numel() == self.heads * self.head_dim

    def ranges(self, unit: Unit) -> tuple[Range, ...]:
        """The unit's channels in the input of each output projection that it enters (Eq. 9 and 10)."""
        if unit.index >= (n := self.count(unit)):
            what = f"MLP groups of {unit.width} channels" if unit.kind == MLP else f"{KINDS[unit.kind].words}s"
            raise SelectionError(f"There is no unit {unit}: block {unit.layer} has {n} {what}, counted from 0.")
        if unit.kind == MLP:
            if unit.channels and unit.channels[-1] >= self.mlp_width:
                raise SelectionError(
                    f"There is no unit {unit} with channel {unit.channels[-1]}: block {unit.layer} has {self.mlp_width} MLP "
                    "channels, counted from 0."
                )
            by_address = range(unit.index * unit.width, min((unit.index + 1) * unit.width, self.mlp_width))
            return (Range(MLP, self.mlp_out, unit.channels or by_address),)
        if unit.whole:
            sides = {HEAD: (self.out, self.heads * self.head_dim), MLP: (self.mlp_out, self.mlp_width)}
            found = [(side, *sides[side]) for side in KINDS[unit.kind].sides]
            return tuple(Range(side, projection, range(n), whole=True) for side, projection, n in found)
        if unit.kind == EXPERT:
            return (Range(EXPERT, self.mlp_out, range(unit.index, unit.index + 1)),)
        first, last = unit.index, unit.index + 1
        if unit.kind == KV_GROUP:
            first, last = bisect_left(self.kv_of, unit.index), bisect_right(self.kv_of, unit.index)
        return (Range(HEAD, self.out, range(first * self.head_dim, last * self.head_dim)),)

    def count(self, unit: Unit) -> int:
        """How many units of the unit's kind and width the block has."""
        groups = -(-self.mlp_width // (unit.width or 1))
        if unit.whole:
            there = {HEAD: self.heads > 0, MLP: self.mlp_width > 0 and not self.experts}
            return int(all(there[side] for side in KINDS[unit.kind].sides))
        return {HEAD: self.heads, KV_GROUP: self.kv_heads, MLP: groups, EXPERT: self.experts}[unit.kind]

    def size(self, unit: Unit) -> int:
        """How many channels the unit has; an expert counts as one."""
        return sum(len(part.channels) for part in self.ranges(unit))

    def heads_in(self, channels: Sequence[int]) -> range:
        """The heads that own these input channels of the attention's output projection."""
        return range(channels[0] // self.head_dim, channels[-1] // self.head_dim + 1)

    def own_kv_heads(self, unit: Unit, heads: range) -> range:
        """The K/V heads that belong to this unit, which has these heads, and to no other.

        A K/V head that several query heads share belongs to none of them (Eq. 13), but to their K/V group.
        """
        if unit.kind == HEAD and self.grouped_query:
            return range(0)
        return range(self.kv_of[heads[0]], self.kv_of[heads[-1]] + 1)

    def check_experts(self, removed: Collection[int]) -> None:
        """Refuse to remove so many experts that a token could not have as many as it takes."""
        if self.experts and self.experts - len(set(removed)) < self.experts_per_token:
            raise SelectionError(
                f"{self.name} has {self.experts} experts and each token takes {self.experts_per_token}, so at most "
                f"{self.experts - self.experts_per_token} can be removed, not {len(set(removed))}."
            )

    def slices(self, unit: Unit) -> Iterator[Slice]:
        """The parameters that belong to this unit alone: those that Eq. 12-14 count, and W_j of Eq. 33-36."""
        for part in self.ranges(unit):
            channels = part.channels
            if self.router and part.side in (MLP, EXPERT):
                yield from self._experts_slices(part.side, channels)
                continue
            if part.side == MLP:
                for module in self.mlp_in:
                    for half in range(1 + self.mlp_packed):
                        yield from _outputs(module, _shifted(channels, half * self.mlp_width))
            elif self.packing == PER_HEAD:
                yield from _outputs(self.qkv[0], range(3 * channels[0], 3 * (channels[-1] + 1)))
            elif self.packing == PACKED:
                for third in range(3):
                    yield from _outputs(self.qkv[0], _shifted(channels, third * self.heads * self.head_dim))
            else:
                yield from _outputs(self.qkv[0], channels)
                if kv_heads := self.own_kv_heads(unit, self.heads_in(channels)):
                    for module in self.qkv[1:]:
                        yield from _outputs(module, range(kv_heads.start * self.head_dim, kv_heads.stop * self.head_dim))
            projection = part.projection
            yield Slice(projection, weight_of(projection), input_dim(projection), channels, over_inputs=True)
            if part.whole and isinstance(projection.bias, Tensor):
                yield Slice(projection, projection.bias, 0, range(len(projection.bias)))

    def _experts_slices(self, side: str, places: Sequence[int]) -> Iterator[Slice]:
        """Whole experts with their rows of the router, or channels of all experts."""
        assert self.router is not None
        gate_up, down = expert_weights(self.mlp_out)
        if side == EXPERT:
            yield Slice(self.mlp_out, gate_up, 0, places)
            yield Slice(self.mlp_out, down, 0, places)
            yield Slice(self.router, weight_of(self.router), 0, places)
            return
        for half in range(2):
            yield Slice(self.mlp_out, gate_up, 1, _shifted(places, half * self.mlp_width))
        yield Slice(self.mlp_out, down, 2, places, over_inputs=True)


def family_of(model: nn.Module) -> str:
    """The key of the model's row in FAMILIES."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type in FAMILIES:
        return str(model_type)
    for kind in type(model).__mro__:
        name = f"timm/{kind.__name__}" if kind.__module__.startswith("timm.") else kind.__name__
        if name in FAMILIES:
            return name
    what = f"model_type {model_type!r}" if model_type else f"the class {type(model).__name__}"
    raise unsupported(what)


def task_of(model: nn.Module) -> str:
    """What the model does: a key of TASKS."""
    family = family_of(model)
    usual = FAMILIES[family].task
    if not classes_of(family):
        return usual  # timm's models, and those that transformers does not know
    names = [kind.__name__ for kind in type(model).__mro__]  # a subclass does what its class does
    task = next((task for name in names if (task := task_of_class(family, name))), None)
    if task is None:
        raise UnsupportedModel(
            f"{names[0]} is a {family} model with a head that Secateur has no loss for; pass it to DamageMeter with a loss of "
            f"your own, or load it with one of {', '.join(classes_of(family))}."
        )
    return task


def context_of(model: nn.Module) -> int | None:
    """How many tokens a model takes at most; None if its config does not say."""
    config: Any = getattr(model, "config", None)
    places = getattr(config, "max_position_embeddings", None)
    if not isinstance(places, int):
        return None
    # RoBERTa counts positions from the one after its padding token's.
    return places - config.pad_token_id - 1 if config.model_type in ("roberta", "xlm-roberta") else places


def task_of_class(model_type: str, name: str) -> str | None:
    """The task of a model class of transformers; None if it is none of TASKS."""
    return next((task for task, kinds in _classes(model_type).items() if name in kinds), None)


def classes_of(model_type: str) -> dict[str, str]:
    """Every Auto class of TASKS that knows a model type, with the class that it loads."""
    return {TASKS[task].auto_class: kinds[0] for task, kinds in _classes(model_type).items()}


@functools.cache
def _classes(model_type: str) -> dict[str, tuple[str, ...]]:
    """The names of the classes that do each task, the usual one first."""
    from transformers.models.auto import modeling_auto

    inputs = TASKS[FAMILIES[model_type].task].inputs
    found: dict[str, tuple[str, ...]] = {}
    for task, row in TASKS.items():
        auto: Any = getattr(modeling_auto, row.auto_class)
        kinds = auto._model_mapping._model_mapping.get(model_type)  # names, so that no model's code is imported
        if kinds and row.inputs == inputs:
            found[task] = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    return found


def unsupported(what: str) -> UnsupportedModel:
    """The error for a model that has no row in FAMILIES."""
    return UnsupportedModel(f"No family is known for {what}; known: {', '.join(FAMILIES)}. See docs/add-a-family.md.")


def anatomy(model: nn.Module) -> tuple[Layer, ...]:
    """The blocks of a model of a known family, in the order in which they run."""
    family = FAMILIES[family_of(model)]
    inner, _, rest = family.blocks.partition(".")
    path = family.blocks if hasattr(model, inner) else rest  # a model without a head is the inner one itself
    try:
        return tuple(_read_block(family, name, block) for name, block in _walk(model, path))
    except AttributeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__} is not built like the other models of its family {family_of(model)!r}: {error}. "
            "See docs/add-a-family.md."
        ) from error


def candidate_units(
    model: nn.Module,
    target: str = HEAD,
    group_width: int = GROUP_WIDTH,
    orders: Sequence[Sequence[int]] | None = None,
) -> list[Unit]:
    """All units of `model` that the target allows; `orders` are the MLP channels of each block in the order of their groups.

    >>> units = candidate_units(model, target="head")
    """
    layers = anatomy(model)
    if target == EXPERT and not any(layer.experts for layer in layers):
        raise SettingError(f"The target is {EXPERT!r}, but {type(model).__name__} has no experts: choose another --target.")
    return enumerate_units(
        [layer.heads for layer in layers],
        [layer.mlp_width for layer in layers],
        kv_heads=[layer.kv_heads for layer in layers],
        experts=[layer.experts for layer in layers],
        target=target,
        group_width=group_width,
        orders=orders,
    )


def check_group_width(model: nn.Module, target: str, group_width: int) -> None:
    """Refuse groups wider than every MLP of the model: each would be a whole MLP."""
    widest = max((layer.mlp_width for layer in anatomy(model)), default=0)
    if MLP in kinds_of(target) and group_width > widest > 0:
        raise SettingError(
            f"The group width is {group_width}, but the model's MLPs have {widest} channels, so that a group would be a whole "
            "MLP; choose a smaller --group-width."
        )


def check_disjoint(model: nn.Module, units: Iterable[Unit]) -> None:
    """Refuse units that share channels, such as a head and its K/V group, unless one is a whole with the other in it."""
    layers, taken = anatomy(model), dict[tuple[int, str, int], Unit]()
    for unit in outermost(units):
        for part in layer_of(layers, unit).ranges(unit):
            for channel in part.channels:
                other = taken.setdefault((unit.layer, part.side, channel), unit)
                if other != unit:
                    raise SelectionError(f"The units {other} and {unit} overlap: take one of them out of the selection.")


def layer_of(layers: Sequence[Layer], unit: Unit) -> Layer:
    """The block of a unit."""
    if unit.layer >= len(layers):
        raise SelectionError(f"There is no unit {unit}: the model has {len(layers)} blocks, counted from 0.")
    return layers[unit.layer]


def _read_block(family: Family, name: str, block: nn.Module) -> Layer:
    attention: Any = block.get_submodule(family.attention)  # mypy takes every attribute of a module for a tensor
    out = attention.get_submodule(family.out)
    qkv = tuple(attention.get_submodule(path) for path in family.qkv)
    experts = _submodule(block, family.experts)
    router: Any = _submodule(block, family.router)
    mlp_in = () if experts else tuple(block.get_submodule(path) for path in family.mlp_in)
    mlp_out = experts or block.get_submodule(family.mlp_out)
    inner = _in_features(out)  # heads * head_dim; not always the model dimension (Gemma, Qwen3)
    counted = counting(attention)
    head_dim = next((getattr(counted, name) for name in HEAD_DIMS if hasattr(counted, name)), None)
    if head_dim is None:
        head_dim = inner // counted.num_heads
    heads = inner // head_dim
    kv_heads = _out_features(qkv[1]) // head_dim if family.packing == SEPARATE else heads
    kv_of = getattr(counted, "kv_index", None) or [h * kv_heads // heads for h in range(heads)]  # shrunk.py sets kv_index
    mlp_width = int(expert_weights(experts)[1].shape[2]) if experts else _in_features(mlp_out)
    q_features = _out_features(qkv[0]) if family.packing == SEPARATE else _out_features(qkv[0]) // 3
    if q_features != inner or any(_out_features(module) != (1 + family.mlp_packed) * mlp_width for module in mlp_in):
        raise UnsupportedModel(
            f"The projections of {name} do not fit one another (heads {q_features} to {inner}, "
            f"MLP {[_out_features(module) for module in mlp_in]} to {mlp_width}): Secateur does not know this packing."
        )
    for parent in (attention, getattr(block, "mlp", None)):
        if not isinstance(getattr(parent, "norm", nn.Identity()), nn.Identity):  # in some timm models
            raise UnsupportedModel(f"{name} has a norm before an output projection, which mixes the units' channels.")
    return Layer(
        name=name,
        block=block,
        attention=attention,
        qkv=qkv,
        out=out,
        mlp_in=mlp_in,
        mlp_out=mlp_out,
        packing=family.packing,
        mlp_packed=family.mlp_packed,
        width=_in_features(qkv[0]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        kv_of=tuple(kv_of),
        router=router,
        experts=len(expert_weights(experts)[0]) if experts else 0,
        experts_per_token=router.top_k if experts else 0,
    )


def _submodule(block: nn.Module, path: str) -> nn.Module | None:
    """The module of this path; None if the block has none, or the family names none."""
    try:
        return block.get_submodule(path) if path else None
    except AttributeError:
        return None


def _walk(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The blocks in the list, or the lists, that a path names, each with its own path."""
    head, star, tail = path.partition(".*.")
    for index, item in enumerate(model.get_submodule(head).children()):
        name = f"{head}.{index}"
        if star:
            yield from ((f"{name}.{inner}", block) for inner, block in _walk(item, tail))
        else:
            yield name, item


def _outputs(module: nn.Module, places: Sequence[int]) -> Iterator[Slice]:
    """The rows of a projection that compute these outputs, and their biases."""
    yield Slice(module, weight_of(module), 1 - input_dim(module), places)
    if isinstance(module.bias, Tensor):
        yield Slice(module, module.bias, 0, places)


def _shifted(places: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(places, range):
        return range(places.start + by, places.stop + by)
    return [place + by for place in places]


def expert_weights(experts: nn.Module) -> tuple[Tensor, Tensor]:
    """The projections in, [all gates | all inputs] (experts, 2 * channels, width), and out (experts, width, channels)."""
    assert isinstance(experts.gate_up_proj, Tensor) and isinstance(experts.down_proj, Tensor)
    return experts.gate_up_proj, experts.down_proj


def weight_of(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight


def input_dim(module: nn.Module) -> int:
    """The dimension of a projection's weight that runs over its inputs."""
    # transformers' Conv1D (GPT-2) stores its weight as (inputs, outputs), nn.Linear as (outputs, inputs).
    return 0 if any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) else 1


def _in_features(module: nn.Module) -> int:
    return int(weight_of(module).shape[input_dim(module)])


def _out_features(module: nn.Module) -> int:
    return int(weight_of(module).shape[1 - input_dim(module)])
