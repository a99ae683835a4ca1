"""Surgery: a model with physically smaller tensors, and the proof that it computes what the zeroed one does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import ProofError, SelectionError, SettingError, UnsupportedModel, first_line, not_one_of
from secateur.families import (
    FAMILIES,
    PACKED,
    PER_HEAD,
    SEPARATE,
    Family,
    Layer,
    anatomy,
    family_of,
    input_dim,
    layer_of,
    task_of,
    weight_of,
)
from secateur.losses import Batch, device_of, evaluating, predict
from secateur.shrunk import CODE, bias_tables, fit, shrunk_class
from secateur.units import MLP, Unit
from secateur.zeroing import zeroed

FREE, UNIFORM = "free", "uniform"
LAYOUTS = (FREE, UNIFORM)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the logits' scale
PROMPT, NEW_TOKENS = 16, 64  # of the text that is continued for the proof


@dataclass(frozen=True)
class Kept:
    """What is left of a block, as indices into what it had."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    channels: tuple[int, ...]  # of the MLP
    kv_index: tuple[int, ...]  # of each kept head, the kept K/V head it looks at

    @property
    def even(self) -> bool:
        """Whether every K/V head serves as many heads as every other."""
        return len({self.kv_index.count(i) for i in range(len(self.kv_heads))}) <= 1


def shrink(model: nn.Module, units: Iterable[Unit], layout: str = FREE) -> nn.Module:
    """A copy of the model with the units cut out; the model itself stays as it is.

    A model whose layers all lost the same is an ordinary model with another config, wherever its config can say so; the layout
    "uniform" insists on that. Other models carry their counts layer by layer, see shrunk.py.

    >>> small = shrink(model, selection.units)
    """
    if layout not in LAYOUTS:
        raise not_one_of("layout", layout, LAYOUTS)
    layers, family = anatomy(model), FAMILIES[family_of(model)]
    kept = kept_of(layers, units)
    settings = _uniform_settings(model, family, layers, kept)
    if layout == UNIFORM:
        _insist(settings)
    sliced = {}
    for parameter, dim, indices in _cuts(layers, kept):
        with torch.no_grad():
            values = parameter.index_select(dim, torch.tensor(indices, dtype=torch.long, device=parameter.device))
        sliced[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    small = copy.deepcopy(model, dict(sliced))  # with the smaller tensors where the large ones were
    counts = _layout(family, layers, kept)
    fit(small, counts)
    if isinstance(settings, str):
        _describe_layers(small, family, layers, kept, counts)
    else:
        _describe(small, settings)
    return small


def check_uniform(model: nn.Module, units: Iterable[Unit]) -> None:
    """Refuse, before any work, units whose removal no stock config could describe."""
    layers, family = anatomy(model), FAMILIES[family_of(model)]
    _insist(_uniform_settings(model, family, layers, kept_of(layers, units)))


def _insist(settings: dict[str, Any] | str) -> None:
    if isinstance(settings, str):
        raise SelectionError(f"The layout cannot be uniform: {settings}. Use --layout free.")


def kept_of(layers: Sequence[Layer], units: Iterable[Unit]) -> list[Kept]:
    """What each block keeps when the units go. A K/V head goes with the last of its heads."""
    gone: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in layers]
    for unit in units:
        layer = layer_of(layers, unit)
        unit_channels = layer.channels(unit)  # refuses a unit that is not there
        gone[unit.layer][unit.kind == MLP].update(unit_channels if unit.kind == MLP else layer.heads_of(unit))
    kept = []
    for layer, (heads_gone, channels_gone) in zip(layers, gone, strict=True):
        heads = tuple(h for h in range(layer.heads) if h not in heads_gone)
        kv_heads = tuple(sorted({layer.kv_of[h] for h in heads}))
        channels = tuple(c for c in range(layer.mlp_width) if c not in channels_gone)
        kept.append(Kept(heads, kv_heads, channels, tuple(kv_heads.index(layer.kv_of[h]) for h in heads)))
    return kept


def parameters_left(model: nn.Module, units: Iterable[Unit]) -> int:
    """How many parameters the model has once the units are cut out."""
    layers = anatomy(model)
    cuts = _cuts(layers, kept_of(layers, units))
    gone = sum(parameter.numel() // parameter.shape[dim] * (parameter.shape[dim] - len(kept)) for parameter, dim, kept in cuts)
    return sum(parameter.numel() for parameter in model.parameters()) - gone


Cut = tuple[Tensor, int, Sequence[int]]  # a parameter that becomes smaller, in which dimension, and the indices that stay


def _cuts(layers: Sequence[Layer], kept: Sequence[Kept]) -> list[Cut]:
    cuts = [cut for layer, rest in zip(layers, kept, strict=True) for cut in _block_cuts(layer, rest)]
    return [(parameter, dim, indices) for parameter, dim, indices in cuts if len(indices) < parameter.shape[dim]]


def _block_cuts(layer: Layer, kept: Kept) -> list[Cut]:
    if getattr(layer.attention, "gate", None) is not None:  # some of timm's
        raise UnsupportedModel(f"{layer.name} has a gate after its heads, which Secateur does not know how to cut.")
    d = layer.head_dim
    heads, kv_heads = ([i * d + c for i in some for c in range(d)] for some in (kept.heads, kept.kv_heads))
    if layer.packing == SEPARATE:
        rows: list[Sequence[int]] = [heads, kv_heads, kv_heads]
    elif layer.packing == PACKED:
        rows = [[part * layer.heads * d + row for part in range(3) for row in heads]]
    else:
        assert layer.packing == PER_HEAD
        rows = [[3 * d * i + c for i in kept.heads for c in range(3 * d)]]
    cuts: list[Cut] = []
    for module, indices in (*zip(layer.qkv, rows, strict=True), *((module, kept.channels) for module in layer.mlp_in)):
        cuts.append((weight_of(module), 1 - input_dim(module), indices))
        if isinstance(module.bias, Tensor):
            cuts.append((module.bias, 0, indices))
    for module, indices in ((layer.out, heads), (layer.mlp_out, kept.channels)):
        cuts.append((weight_of(module), input_dim(module), indices))
    return cuts + [(table, 1, kept.heads) for _, table in bias_tables(layer.attention)]


def _layout(family: Family, layers: Sequence[Layer], kept: Sequence[Kept]) -> dict[str, Any]:
    """What shrunk.py needs to build the model."""
    names = {name: value for name, value in asdict(family).items() if name in ("attention", "qkv", "out", "mlp_in", "mlp_out")}
    counts = [
        {
            "block": layer.name,
            "heads": len(rest.heads),
            "kv_heads": len(rest.kv_heads),
            "head_dim": layer.head_dim,
            "mlp_width": len(rest.channels),
        }
        | ({} if rest.even else {"kv_index": list(rest.kv_index)})
        for layer, rest in zip(layers, kept, strict=True)
    ]
    return {"family": {name: list(v) if isinstance(v, tuple) else v for name, v in names.items()}, "layers": counts}


def _describe_layers(small: Any, family: Family, layers: Sequence[Layer], kept: Sequence[Kept], layout: dict[str, Any]) -> None:
    """Let a model say of each layer what is left of it."""
    config = getattr(small, "config", None)
    if config is None:  # timm's
        small.secateur = layout
        return
    own: Any = type(small)
    small.__class__ = shrunk_class(own)
    config.secateur = layout
    task = "AutoModelForCausalLM" if family.task == "text" else "AutoModelForImageClassification"
    config.auto_map = {task: f"{CODE}.{type(small).__name__}"}
    if family.head_dim_setting:
        config.head_dim = layers[0].head_dim
    if family.mlp_setting != "mlp_ratio":  # Swin, whose config counts stages and knows no widths
        described = {i: _described(config, family, layers[i], rest) for i, rest in enumerate(kept)}
        config.allow_global_per_layer_attribute_access = True  # else transformers' own checks of a config refuse to read it
        config.per_layer_config = described


def _described(config: Any, family: Family, layer: Layer, kept: Kept) -> dict[str, Any]:
    """A layer in the words of transformers' `per_layer_config`."""
    counts = {"num_attention_heads": len(kept.heads), family.mlp_setting: len(kept.channels)}
    if hasattr(config, "num_key_value_heads"):
        counts["num_key_value_heads"] = len(kept.kv_heads)
    # Nothing may be left of what is skipped, so that one with a bias is described by a count of 0.
    skip = [
        name
        for name, left, out in (("attention", kept.heads, layer.out), ("mlp", kept.channels, layer.mlp_out))
        if not left and not isinstance(out.bias, Tensor)
    ]
    return counts | ({"skip": skip} if skip else {})


def _describe(small: Any, settings: dict[str, Any]) -> None:
    """Let a model say that it is an ordinary one with other settings."""
    if not hasattr(small, "config"):  # timm's
        small.model_args = settings
        return
    for name, value in settings.items():
        setattr(small.config, name, value)


def _uniform_settings(model: Any, family: Family, layers: Sequence[Layer], kept: Sequence[Kept]) -> dict[str, Any] | str:
    """The settings that make a stock model of what is left, or why there are none."""
    pairs = list(zip(layers, kept, strict=True))
    settings: dict[str, Any] = {}
    if layout_of(model):
        return "the model's layers differed before"
    if any(len(rest.heads) < layer.heads for layer, rest in pairs):
        if not family.head_dim_setting:
            return f"in the family {family_of(model)!r} a head's width follows from the model's, so that all heads must stay"
        counts = {(len(rest.heads), len(rest.kv_heads)) for rest in kept}
        if len(counts) > 1 or not all(rest.even for rest in kept):
            return "the layers lost different numbers of heads, or their K/V heads serve different numbers of heads"
        heads, kv_heads = counts.pop()
        if not heads:
            return "no head would be left"
        settings = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": layers[0].head_dim}
    if any(len(rest.channels) < layer.mlp_width for layer, rest in pairs):
        by_ratio = family.mlp_setting == "mlp_ratio"
        widths = {_ratio(len(rest.channels), layer.width) if by_ratio else len(rest.channels) for layer, rest in pairs}
        if len(widths) > 1:
            return "the layers lost different numbers of MLP channels"
        settings[family.mlp_setting] = widths.pop()
        if not settings[family.mlp_setting]:
            return "no MLP channel would be left"
    return _refusal(model, settings, _cuts(layers, kept)) or settings


def _refusal(model: Any, settings: dict[str, Any], cuts: Sequence[Cut]) -> str | None:
    """Why the model's class, given these settings, does not build what is left; None where it does."""
    if not hasattr(model, "config"):
        return None  # timm's are rebuilt where they are saved
    config = copy.deepcopy(model.config)
    for name, value in settings.items():
        setattr(config, name, value)
    try:
        config.validate()
        with torch.device("meta"):
            stock = type(model)(config)
    except Exception as error:  # whatever a config or a model does not like
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"transformers says: {lines[-1].strip().rstrip('.')}"
    smaller = {id(parameter): (dim, len(kept)) for parameter, dim, kept in cuts}
    for (name, ours), (_, theirs) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        shape = list(ours.shape)
        if id(ours) in smaller:
            dim, size = smaller[id(ours)]
            shape[dim] = size
        if shape != list(theirs.shape):
            return f"a {config.model_type} config cannot say what is left ({name})"
    return None


def layout_of(model: Any) -> dict[str, Any] | None:
    """What a model says of its layers, if they differ."""
    found = getattr(getattr(model, "config", model), "secateur", None)
    return found if isinstance(found, dict) else None


def _ratio(width: int, of: int) -> float:
    """A ratio whose product, cut to an integer as the models do, is the width again."""
    ratio = width / of
    return ratio if int(of * ratio) == width else math.nextafter(ratio, math.inf)


@dataclass(frozen=True)
class Proof:
    """How nearly a cut model computes what the zeroed one does."""

    difference: float  # the largest between two logits
    scale: float  # the largest logit
    tolerance: float  # of the scale
    batches: int
    tokens: int = 0  # continued greedily with the K/V cache
    same_tokens: int = 0
    tied_tokens: int = 0  # others, where the zeroed model's two highest logits are as near as rounding

    @property
    def relative(self) -> float:
        return self.difference / self.scale if self.scale else self.difference

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"relative": self.relative}

    def __str__(self) -> str:
        text = f"the cut model's logits differ from the zeroed model's by at most {self.relative:.1e} of their scale"
        if self.tokens:
            text += f", and {self.same_tokens} of {self.tokens} tokens of a text continued with the cache are the same"
        return text + (f" ({self.tied_tokens} more are ties)" if self.tied_tokens else "")


def prove(
    model: nn.Module,
    units: Sequence[Unit],
    small: nn.Module,
    batches: Sequence[Batch],
    progress: Callable[[int, int], None] | None = None,
) -> Proof:
    """Compare the cut model with the zeroed one on batches, and token by token; a ProofError where they differ.

    >>> prove(model, selection.units, shrink(model, selection.units), calibration[:2])
    """
    if not batches:
        raise SettingError("A proof needs at least one batch.")
    dtype = next(model.parameters()).dtype
    difference, scale = 0.0, 0.0
    tokens: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode(), evaluating(model), evaluating(small):
        for i, batch in enumerate(batches):
            with zeroed(model, units):
                expected = predict(model, batch)[0].float()
            with _running():
                found = predict(small, batch)[0].float()
            scale = _larger(scale, float(expected.abs().max()))
            difference = _larger(difference, _difference(expected, found))
            if progress:
                progress(i + 1, len(batches))
        if task_of(model) == "text":
            tokens = _continue(model, units, small, batches[0])
    for expected, found in tokens:
        difference = _larger(difference, _difference(expected, found))
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    same, tied = 0, 0
    for expected, found in tokens:
        if expected.argmax() == found.argmax():
            same += 1
        else:
            highest = expected.topk(2).values
            tied += bool(highest[0] - highest[1] <= 2 * tolerance * scale)
    proof = Proof(difference, scale, tolerance, len(batches), len(tokens), same, tied)
    if not math.isfinite(scale):
        raise ProofError("The zeroed model's logits are not finite, so that nothing can be proved of a cut; it is refused.")
    if not proof.relative <= tolerance or same + tied < len(tokens):
        raise ProofError(f"The cut is refused, since {proof}; at most {tolerance:g} of the scale is allowed.")
    return proof


def _continue(model: Any, units: Sequence[Unit], small: Any, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """The logits of both models for each token of the text that the zeroed model writes, with their caches."""
    context = getattr(model.config, "max_position_embeddings", None)
    length = PROMPT + NEW_TOKENS if not isinstance(context, int) else min(PROMPT + NEW_TOKENS, context)
    ids = batch["input_ids"][:1, : min(PROMPT, length // 2)].to(device_of(model))
    compared = []
    caches: list[Any] = [None, None]
    for _ in range(length - ids.shape[1]):
        with zeroed(model, units):
            expected = model(input_ids=ids, past_key_values=caches[0], use_cache=True)
        with _running():
            found = small(input_ids=ids, past_key_values=caches[1], use_cache=True)
        caches = [expected.past_key_values, found.past_key_values]
        compared.append((expected.logits[0, -1].float(), found.logits[0, -1].float()))
        ids = compared[-1][0].argmax().view(1, 1)
    return compared


@contextmanager
def _running() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        raise ProofError(f"The cut model cannot be run, so that it is refused: {first_line(error)}") from error


def _difference(expected: Tensor, found: Tensor) -> float:
    return float((expected - found).abs().max()) if expected.shape == found.shape else math.inf


def _larger(a: float, b: float) -> float:
    return b if not b <= a else a  # nan, too
