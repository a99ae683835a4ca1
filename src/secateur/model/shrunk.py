"""A model whose layers differ in their counts of heads and MLP channels: how it is described, built and run.

This file imports nothing from Secateur: a copy of it is written beside the weights, so that transformers can load them where
Secateur is not installed (`trust_remote_code=True`). It reads the counts from the config's field `secateur`, a `Layout` as
JSON: `{"family": the names of the projections, "layers": [{"block": "model.layers.0", "heads": 8, "kv_heads": 3,
"head_dim": 64, "mlp_width": 1504, "kv_index": [0, 0, 1, 1, 1, 2, 2, 2]}, ...]}`. No other file reads or writes that field's
contents.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

INDEXED = "kv_indexed_"  # prefix of an attention implementation that first gives each head its K/V head
CODE = "modeling_shrunk"  # the name of this file's copy beside the weights
# The name of an empty tensor among the weights. A loader without this code lists it with the shapes that do not fit.
HINT = "PASS trust_remote_code=True TO from_pretrained"
HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")  # the names that attention modules have for the width of a head

LARGEST = 2**24  # counts in a layout must be smaller


@dataclass(frozen=True)
class LayerLayout:
    """What is left of a block. `kv_index` is the K/V head of each head, or None if the heads share the K/V heads evenly."""

    block: str
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    kv_index: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        counts = (self.heads, self.kv_heads, self.head_dim, self.mlp_width)
        if not isinstance(self.block, str) or not all(type(n) is int and 0 <= n < LARGEST for n in counts):
            raise ValueError("a block needs a name and its counts")
        if self.kv_index is None:
            fits = self.heads % self.kv_heads == 0 if self.kv_heads else self.heads == 0
        else:
            index = list(self.kv_index)
            fits = all(type(i) is int for i in index) and len(index) == self.heads
            fits = fits and index == sorted(index) and set(index) == set(range(self.kv_heads))
        if not fits:
            raise ValueError(f"the heads of {self.block} do not fit its K/V heads")


@dataclass(frozen=True)
class Layout:
    """What is left of each block of a model, and the paths of the projections in a block (as in families.py)."""

    attention: str
    qkv: tuple[str, ...]
    out: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    layers: tuple[LayerLayout, ...]
    experts: str = ""  # the module that holds the experts; a block without it has the MLP's projections

    def __post_init__(self) -> None:
        names = (self.attention, *self.qkv, self.out, *self.mlp_in, self.mlp_out, self.experts)
        if not self.qkv or not self.mlp_in or not all(isinstance(name, str) for name in names):
            raise ValueError("a projection has no name, or one that is not a string")

    def to_json(self) -> dict[str, Any]:
        names = {"attention": self.attention, "qkv": list(self.qkv), "out": self.out}
        names |= {"mlp_in": list(self.mlp_in), "mlp_out": self.mlp_out}
        names |= {"experts": self.experts} if self.experts else {}
        layers = [
            {name: list(value) if name == "kv_index" else value for name, value in asdict(layer).items() if value is not None}
            for layer in self.layers
        ]
        return {"family": names, "layers": layers}

    @classmethod
    def from_json(cls, fields: Any) -> Layout:
        """The layout in the field of a config; a ValueError if it is not a layout, or has unknown fields."""
        try:
            if {*fields} != {"family", "layers"}:
                raise KeyError
            names = {**fields["family"], **{name: _tuple(fields["family"][name]) for name in ("qkv", "mlp_in")}}
            layers = [LayerLayout(**{**layer, "kv_index": _tuple(layer.get("kv_index"))}) for layer in fields["layers"]]
            return cls(**names, layers=tuple(layers))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("the field `secateur` has missing, unknown or wrong entries") from error


def _tuple(values: Any) -> Any:
    """A JSON list as a tuple; anything else is an error, also a string, which tuple() would split into letters."""
    if values is not None and not isinstance(values, list):
        raise TypeError
    return None if values is None else tuple(values)


def layout_of(model: Any) -> Layout | None:
    """The layout that a model carries; None if it is an ordinary model."""
    fields = getattr(getattr(model, "config", model), "secateur", None)
    return Layout.from_json(fields) if isinstance(fields, dict) else None


def describe(model: Any, layout: Layout, classes: dict[str, str], words: dict[str, str]) -> None:
    """Write a layout into the config of a model that has its counts, so that the model is saved and loaded with them.

    `classes` are the Auto classes that know the model's type, each with the class that it loads. `words` maps "heads",
    "mlp_width", "experts_mlp_width" (in a block with experts) and, if the config has such a setting, "head_dim" to the config's
    names for them. Without "mlp_width" (Swin,
    whose config counts stages) the stock field `per_layer_config` is left out.
    """
    config = getattr(model, "config", None)
    if config is None:  # a timm model
        model.secateur = layout.to_json()
        return
    own: Any = type(model)
    model.__class__ = shrunk_class(own)
    config.secateur = layout.to_json()
    config.auto_map = {auto: f"{CODE}.Shrunk{name}" for auto, name in classes.items()}
    if "head_dim" in words:
        setattr(config, words["head_dim"], layout.layers[0].head_dim)
    if "mlp_width" in words:
        per_layer = {i: _stock_settings(model, layout, layer, words) for i, layer in enumerate(layout.layers)}
        config.allow_global_per_layer_attribute_access = True  # otherwise transformers' checks cannot read the config
        config.per_layer_config = per_layer


def _stock_settings(model: Any, layout: Layout, layer: LayerLayout, words: dict[str, str]) -> dict[str, Any]:
    """The entry of a layer in transformers' `per_layer_config`."""
    block = _block(model, layer.block)
    experts = _experts(block, layout)
    mlp_width = words["experts_mlp_width" if experts else "mlp_width"]
    counts: dict[str, Any] = {words["heads"]: layer.heads, mlp_width: layer.mlp_width}
    if hasattr(model.config, "num_key_value_heads"):
        counts["num_key_value_heads"] = layer.kv_heads
    outs = {"attention": f"{layout.attention}.{layout.out}"} | ({} if experts else {"mlp": layout.mlp_out})
    sizes = {"attention": layer.heads, "mlp": layer.mlp_width}
    # A skipped part computes nothing. An empty part whose output projection has a bias still adds it: there the count is 0.
    skip = [name for name, out in outs.items() if not sizes[name] and block.get_submodule(out).bias is None]
    return counts | ({"skip": skip} if skip else {})


class Shrunk:
    """A mixin that makes a transformers model class build and save the shrunk form."""

    _keys_to_ignore_on_load_unexpected = (re.escape(HINT),)  # replaced in each class by its base's and this one

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        per_layer = config.to_dict().get("per_layer_config")
        config.per_layer_config = None  # so that the class reads the dense counts without a warning for each
        super().__init__(config, *args, **options)  # type: ignore[call-arg]
        config.per_layer_config = per_layer
        fit(self, Layout.from_json(config.secateur))

    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        state = options.pop("state_dict", None)
        options["state_dict"] = {**(self.state_dict() if state is None else state), HINT: torch.zeros(0, dtype=self.dtype)}
        result = super().save_pretrained(save_directory, *args, **options)  # type: ignore[misc]
        code_file = os.path.join(save_directory, f"{CODE}.py")
        if not (os.path.exists(code_file) and os.path.samefile(__file__, code_file)):
            shutil.copyfile(__file__, code_file)
        return result


@functools.cache
def shrunk_class(base: Any) -> Any:
    """The shrunk form of a transformers model class."""
    if issubclass(base, Shrunk):
        return base
    ignored = [*(base._keys_to_ignore_on_load_unexpected or ()), *Shrunk._keys_to_ignore_on_load_unexpected]
    fields = {"__module__": __name__, "_keys_to_ignore_on_load_unexpected": ignored}
    made = type(f"Shrunk{base.__name__}", (Shrunk, base), fields)
    _share_renames(base.__name__, made.__name__)
    return made


def _share_renames(name: str, shrunk_name: str) -> None:
    """Let a shrunk class have the renames of tensors that transformers knows by the name of its class (ViTModel).

    Without them ViT's blocks would be drawn anew, since files have the tensors' old names.
    """
    from transformers import conversion_mapping

    renames = conversion_mapping.get_checkpoint_conversion_mapping(name)
    if renames:
        conversion_mapping.register_checkpoint_conversion_mapping(shrunk_name, renames, overwrite=True)


def __getattr__(name: str) -> Any:
    """Classes such as `ShrunkLlamaForCausalLM`, which the config's auto_map names."""
    if name.startswith("Shrunk"):
        import transformers

        return shrunk_class(getattr(transformers, name.removeprefix("Shrunk")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fit(model: Any, layout: Layout) -> None:
    """Give the blocks of a model the counts of a layout: resize their parameters and set the counts that modules store."""
    for layer in layout.layers:
        block = _block(model, layer.block)
        attention = block.get_submodule(layout.attention)
        inner, kv_inner = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        qkv = [attention.get_submodule(path) for path in layout.qkv]
        sizes = (inner, kv_inner, kv_inner) if len(qkv) == 3 else (3 * inner,)
        for module, size in zip(qkv, sizes, strict=True):
            _resize(module, outputs=size)
        _resize(attention.get_submodule(layout.out), inputs=inner)
        if experts := _experts(block, layout):
            _resize_experts(experts, layer.mlp_width)
        else:
            mlp_out = block.get_submodule(layout.mlp_out)
            for module in [block.get_submodule(path) for path in layout.mlp_in]:
                packed = _sizes(module)[1] > _sizes(mlp_out)[0]  # gates and inputs are in one projection (ModernBERT)
                _resize(module, outputs=(1 + packed) * layer.mlp_width)
            _resize(mlp_out, inputs=layer.mlp_width)
        for name, table in bias_tables(attention):
            owner = attention.get_submodule(name.rpartition(".")[0])
            owner.relative_position_bias_table = _resized(table, (table.shape[0], layer.heads))
        _set_counts(attention, layer, layout.out)


def _block(model: Any, name: str) -> Any:
    """The block of this name in the model that was cut; that one may have had a head that this one lacks, or lacked one."""
    inner, _, rest = name.partition(".")
    if not hasattr(model, inner):
        inner = getattr(model, "base_model_prefix", "")
        name = f"{inner}.{name}" if inner and hasattr(model, inner) else rest
    return model.get_submodule(name)


def _experts(block: Any, layout: Layout) -> Any:
    """The module that holds a block's experts; None if it has none."""
    parent, _, name = layout.experts.rpartition(".")
    return getattr(block.get_submodule(parent), name, None) if layout.experts else None


def _resize_experts(experts: Any, width: int) -> None:
    """Give all experts another number of inner channels."""
    n, inner, outer = len(experts.down_proj), experts.down_proj.shape[2], experts.down_proj.shape[1]
    if width > inner:
        raise ValueError(f"the layout has experts of {width} channels, but the dense ones have {inner}")
    experts.gate_up_proj = _resized(experts.gate_up_proj, (n, 2 * width, outer))
    experts.down_proj = _resized(experts.down_proj, (n, outer, width))
    experts.intermediate_dim = width
    if not width and not isinstance(experts, _EmptiedExperts):
        _put_class_before(experts, _EmptiedExperts)


def bias_tables(attention: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Swin's tables of relative position biases, with a column for each head, and their names."""
    return [(name, table) for name, table in attention.named_parameters() if name.endswith("relative_position_bias_table")]


def counting(attention: Any) -> Any:
    """The module that stores an attention's counts and computes with them: in BERT it is one inside the attention."""
    inner = getattr(attention, "self", None)
    return inner if isinstance(inner, nn.Module) else attention


def _set_counts(whole: Any, layer: LayerLayout, out: str) -> None:
    """Set the counts that an attention module stores."""
    attention = counting(whole)
    named = next((name for name in HEAD_DIMS if hasattr(attention, name)), "head_dim")
    head_dim = getattr(attention, named, layer.head_dim)
    if head_dim != layer.head_dim:
        raise ValueError(f"the layout's heads are {layer.head_dim} wide, but the dense model's are {head_dim}")
    heads, kv_heads, index = layer.heads, layer.kv_heads, layer.kv_index
    inner = heads * layer.head_dim
    counts = {"num_heads": heads, "num_attention_heads": heads, "n_heads": heads}
    counts |= {"split_size": inner, "attn_dim": inner, "all_head_size": inner}
    for name, value in counts.items():
        if hasattr(attention, name):
            setattr(attention, name, value)
    setattr(attention, named, layer.head_dim)
    if hasattr(attention, "num_key_value_groups"):
        attention.kv_index = None if index is None else list(index)
        attention.num_key_value_groups = 1 if index or not kv_heads else heads // kv_heads
        config = attention.config
        config = config.config if isinstance(config, _IndexedConfig) else config
        attention.config = _IndexedConfig(config) if index else config
    if not heads and not isinstance(attention, _Emptied):
        attention.out_name = "" if attention is not whole else out  # BERT's inner module ends before the output projection
        _put_class_before(attention, _Emptied)


class _Combined:
    """A module whose class was made by `_combined_class`: copy and pickle cannot find that class by its name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        first, base = type(self).__bases__
        return _new_combined, (first, base), self.__dict__


class _Emptied(_Combined):
    """An attention without heads: it gives the bias of its output projection."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        nothing = hidden_states[..., :0]
        output = self.get_submodule(self.out_name)(nothing) if self.out_name else nothing
        cache = options.get("past_key_values", options.get("layer_past"))
        if cache is not None:  # one number for each token, so that the cache knows its length
            token = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
            cache.update(token, token, self.layer_idx)
        return (output, None) if hasattr(self, "config") else output  # timm's modules return one tensor and have no config


class _EmptiedExperts(_Combined):
    """Experts without inner channels: they give 0. The kernel that multiplies by all of them at once takes no empty weights."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


class _EmptiedConv1D(_Combined):
    """A Conv1D (GPT-2) without inputs: it gives its bias. nn.Linear can do that by itself, Conv1D cannot."""

    def forward(self: Any, x: Tensor) -> Tensor:
        bias: Tensor = self.bias
        return bias.expand(*x.shape[:-1], -1).clone()  # not a view: the caller may write into it


class _IndexedConfig:
    """A layer's view of the config that names an attention implementation with `kv_index` applied."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        if name == "config" or name.startswith("__"):
            raise AttributeError(name)  # copy and pickle ask for these before `config` is set
        value = getattr(self.config, name)
        if name != "_attn_implementation":
            return value
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if INDEXED + value not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(INDEXED + value, _indexed(value))
        return INDEXED + value


def _indexed(implementation: str) -> Callable[..., Any]:
    """An attention implementation that first repeats each K/V head for its heads, as `kv_index` says."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        shares = [module.kv_index.count(i) for i in range(key.shape[1])]
        # Views and one copy, as transformers does for even shares: an index tensor would have to be moved to the device.
        key, value = (
            torch.cat([x[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(shares)], dim=1) for x in (key, value)
        )
        return inner(module, query, key, value, *args, **options)

    return attend


def _resize(module: Any, *, inputs: int | None = None, outputs: int | None = None) -> None:
    """Give a projection other numbers of inputs and outputs; resized parameters get new values."""
    transposed = hasattr(module, "nf")
    old_inputs, old_outputs = _sizes(module)
    inputs, outputs = old_inputs if inputs is None else inputs, old_outputs if outputs is None else outputs
    if inputs > old_inputs or outputs > old_outputs:
        raise ValueError(
            f"the layout has a projection of {inputs} to {outputs} channels, but the dense one is {old_inputs} to {old_outputs}"
        )
    module.weight = _resized(module.weight, (inputs, outputs) if transposed else (outputs, inputs))
    if module.bias is not None:
        module.bias = _resized(module.bias, (outputs,))
    if transposed:
        module.nx, module.nf = inputs, outputs
        if not inputs and not isinstance(module, _EmptiedConv1D):
            _put_class_before(module, _EmptiedConv1D)
    else:
        module.in_features, module.out_features = inputs, outputs


def _sizes(module: Any) -> tuple[int, int]:
    """How many inputs and outputs a projection has."""
    shape = module.weight.shape if hasattr(module, "nf") else module.weight.shape[::-1]  # Conv1D keeps (inputs, outputs)
    return shape[0], shape[1]


def _resized(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    """The parameter itself if it has the shape, or else a new one."""
    if parameter.shape == shape:
        return parameter
    values = parameter.new_empty(shape).normal_(0, 0.02)  # as a model made from a config alone would have
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _put_class_before(module: Any, first: Any) -> None:
    """Change a module's class to one that inherits from `first` and then from its own class."""
    base: Any = type(module)
    module.__class__ = _combined_class(first, base)


def _new_combined(first: Any, base: Any) -> Any:
    """An empty instance, to which copy and pickle then give its state."""
    kind = _combined_class(first, base)
    return kind.__new__(kind)


@functools.cache
def _combined_class(first: Any, base: Any) -> Any:
    return type(f"{first.__name__.lstrip('_')}{base.__name__}", (first, base), {"__module__": base.__module__})
