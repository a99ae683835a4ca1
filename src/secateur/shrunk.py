"""A model whose layers differ in their counts of heads and MLP channels: how it is built, and how it runs.

Nothing of Secateur's is imported here: a copy of this file is written beside the weights, so that transformers can load them
where Secateur is not installed (`trust_remote_code=True`). What it needs to know is the config's field `secateur`:
`{"family": the names of the projections, "layers": [{"block": "model.layers.0", "heads": 8, "kv_heads": 3, "head_dim": 64,
"mlp_width": 1504, "kv_index": [0, 0, 1, 1, 1, 2, 2, 2]}, ...]}`. `kv_index` is there where the heads do not share the K/V heads
evenly: of each head, the K/V head it looks at.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

INDEXED = "kv_indexed_"  # before the name of an attention implementation: the same, after K/V heads went to their heads
CODE = "modeling_shrunk"  # what this file is called beside the weights


class Shrunk:
    """What is put before a transformers model class to make it build and save the shrunk form."""

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        described = config.to_dict().get("per_layer_config")
        config.per_layer_config = None  # so that the class may read the dense counts without a warning for each
        super().__init__(config, *args, **options)  # type: ignore[call-arg]
        config.per_layer_config = described
        fit(self, config.secateur)

    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        given = super().save_pretrained(save_directory, *args, **options)  # type: ignore[misc]
        beside = os.path.join(save_directory, f"{CODE}.py")
        if not (os.path.exists(beside) and os.path.samefile(__file__, beside)):
            shutil.copyfile(__file__, beside)
        return given


@functools.cache
def shrunk_class(base: Any) -> Any:
    """The shrunk form of a transformers model class."""
    return base if issubclass(base, Shrunk) else type(f"Shrunk{base.__name__}", (Shrunk, base), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """`ShrunkLlamaForCausalLM` and the like, as the config's auto_map names them."""
    if name.startswith("Shrunk"):
        import transformers

        return shrunk_class(getattr(transformers, name.removeprefix("Shrunk")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fit(model: Any, layout: dict[str, Any]) -> None:
    """Give the blocks of a model the counts of a layout: resize what is not of that size yet, and tell the modules."""
    family = layout["family"]
    for counts in layout["layers"]:
        block = model.get_submodule(counts["block"])
        attention = block.get_submodule(family["attention"])
        inner, kv_inner, width = (
            counts["heads"] * counts["head_dim"],
            counts["kv_heads"] * counts["head_dim"],
            counts["mlp_width"],
        )
        qkv = [attention.get_submodule(path) for path in family["qkv"]]
        sizes = (inner, kv_inner, kv_inner) if len(qkv) == 3 else (3 * inner,)
        for module, size in zip(qkv, sizes, strict=True):
            _resize(module, outputs=size)
        _resize(attention.get_submodule(family["out"]), inputs=inner)
        for path in family["mlp_in"]:
            _resize(block.get_submodule(path), outputs=width)
        _resize(block.get_submodule(family["mlp_out"]), inputs=width)
        for name, table in bias_tables(attention):
            owner = attention.get_submodule(name.rpartition(".")[0])
            owner.relative_position_bias_table = _resized(table, (table.shape[0], counts["heads"]))
        _tell(attention, counts, family["out"])


def bias_tables(attention: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Swin's relative position biases: a column for each head."""
    return [(name, table) for name, table in attention.named_parameters() if name.endswith("relative_position_bias_table")]


def _tell(attention: Any, counts: dict[str, Any], out: str) -> None:
    """Set what an attention module knows of its heads."""
    known = getattr(attention, "head_dim", getattr(attention, "head_size", counts["head_dim"]))
    if known != counts["head_dim"]:
        raise ValueError(f"a head is to be {counts['head_dim']} wide, and the dense model's are {known}")
    heads, kv_heads = counts["heads"], counts["kv_heads"]
    inner = heads * counts["head_dim"]
    told = {"num_heads": heads, "num_attention_heads": heads, "split_size": inner, "attn_dim": inner}
    for name, value in told.items():
        if hasattr(attention, name):
            setattr(attention, name, value)
    if not hasattr(attention, "head_size"):  # GPT-NeoX's word for it
        attention.head_dim = counts["head_dim"]
    if hasattr(attention, "num_key_value_groups"):
        index = counts.get("kv_index")
        attention.kv_index = index
        attention.num_key_value_groups = 1 if index or not kv_heads else heads // kv_heads
        config = attention.config
        config = config.config if isinstance(config, _IndexedConfig) else config
        attention.config = _IndexedConfig(config) if index else config
    if not heads and not isinstance(attention, _Emptied):
        attention.out_name = out
        _turn(attention, _Emptied)


class _Turned:
    """A module whose class was put together here: pickle and the like cannot find it by name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        first, base = type(self).__bases__
        return _revived, (first, base), self.__dict__


class _Emptied(_Turned):
    """An attention without heads: what is left of it is its output projection's bias."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        given = self.get_submodule(self.out_name)(hidden_states[..., :0])
        cache = options.get("past_key_values", options.get("layer_past"))
        if cache is not None:  # one number a token, so that the cache knows how many there were
            token = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
            cache.update(token, token, self.layer_idx)
        return (given, None) if hasattr(self, "config") else given  # timm's modules, which give one tensor, have no config


class _EmptiedConv1D(_Turned):
    """A projection of no inputs: its bias. nn.Linear can do that by itself, GPT-2's Conv1D cannot."""

    def forward(self: Any, x: Tensor) -> Tensor:
        bias: Tensor = self.bias
        return bias.expand(*x.shape[:-1], -1).clone()  # not a view: who gets it may write into it


class _IndexedConfig:
    """A layer's view of the config, which names the attention that hands each head its K/V head."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        if name == "config" or name.startswith("__"):
            raise AttributeError(name)  # while a copy of this object is being made
        value = getattr(self.config, name)
        if name != "_attn_implementation":
            return value
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if INDEXED + value not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(INDEXED + value, _indexed(value))
        return INDEXED + value


def _indexed(implementation: str) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        shares = [module.kv_index.count(i) for i in range(key.shape[1])]
        # Views and one copy, as where the shares are even: an index tensor would have to be brought to the device.
        key, value = (
            torch.cat([x[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(shares)], dim=1) for x in (key, value)
        )
        return inner(module, query, key, value, *args, **options)

    return attend


def _resize(module: Any, *, inputs: int | None = None, outputs: int | None = None) -> None:
    """Give a projection other numbers of inputs and outputs; its values are then new."""
    transposed = hasattr(module, "nf")  # transformers' Conv1D keeps its weight as (inputs, outputs)
    now = module.weight.shape if transposed else module.weight.shape[::-1]
    inputs, outputs = now[0] if inputs is None else inputs, now[1] if outputs is None else outputs
    if inputs > now[0] or outputs > now[1]:
        raise ValueError(f"a layer is to have {inputs} to {outputs} channels, and the dense one has {now[0]} to {now[1]}")
    module.weight = _resized(module.weight, (inputs, outputs) if transposed else (outputs, inputs))
    if module.bias is not None:
        module.bias = _resized(module.bias, (outputs,))
    if transposed:
        module.nx, module.nf = inputs, outputs
        if not inputs and not isinstance(module, _EmptiedConv1D):
            _turn(module, _EmptiedConv1D)
    else:
        module.in_features, module.out_features = inputs, outputs


def _resized(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    if parameter.shape == shape:
        return parameter
    values = parameter.new_empty(shape).normal_(0, 0.02)  # what a model has that is made from a config alone
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _turn(module: Any, first: Any) -> None:
    """Put a class before a module's own."""
    base: Any = type(module)
    module.__class__ = _joined(first, base)


def _revived(first: Any, base: Any) -> Any:
    kind = _joined(first, base)
    return kind.__new__(kind)


@functools.cache
def _joined(first: Any, base: Any) -> Any:
    return type(f"{first.__name__.lstrip('_')}{base.__name__}", (first, base), {"__module__": base.__module__})
