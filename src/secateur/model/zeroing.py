"""Functional zeroing: run a model as if some units were not there (Eq. 8-11). The weights stay untouched.

With `fills` (moments.py) the model runs as if it had been repaired after the cut: removed channels are not zeroed, but
predicted from those that stay.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import UnsupportedModel
from secateur.model.families import Layer, anatomy, layer_of
from secateur.model.losses import standing_in
from secateur.model.moments import Fill, Fills, Place
from secateur.units import BLOCK, EXPERT, Unit


def zeroed(model: nn.Module, units: Iterable[Unit], fills: Fills | None = None) -> AbstractContextManager[None]:
    """Zero the outputs of `units` while the `with` block lasts; such blocks may be nested.

    With `fills` an outer block has the units that are committed there, and an inner one may have one that is not.

    >>> with zeroed(model, [Unit("head", 0, 3)]):
    ...     logits = model(**batch).logits
    """
    return zeroed_in_parts(anatomy(model), [list(units)], fills)


@contextmanager
def zeroed_in_parts(layers: Sequence[Layer], parts: Sequence[Iterable[Unit]], fills: Fills | None = None) -> Iterator[None]:
    """The same for batches that consist of equal parts, one after another: each part has its own units zeroed."""
    zeroed_ranges: dict[nn.Module, list[tuple[int, Sequence[int]]]] = defaultdict(list)  # by projection: part and channels
    places: dict[nn.Module, Place] = {}
    silent: dict[nn.Module, set[int]] = defaultdict(set)  # by projection: the parts in which it gives nothing
    skipped: dict[nn.Module, set[int]] = defaultdict(set)  # by block: the parts in which it gives what it gets
    without: dict[
        tuple[int, bool], list[set[int]]
    ] = {}  # in blocks with experts: the experts, or channels, each part is without
    for part, units in enumerate(parts):
        for unit in units:
            layer = layer_of(layers, unit)
            for unit_range in layer.ranges(unit):
                if unit.kind == BLOCK:
                    skipped[layer.block].add(part)
                    continue
                if layer.experts and unit_range.projection is layer.mlp_out:
                    removed = without.setdefault((unit.layer, unit_range.side == EXPERT), [set() for _ in parts])
                    removed[part].update(unit_range.channels)
                elif unit_range.whole:
                    silent[unit_range.projection].add(part)
                else:
                    zeroed_ranges[unit_range.projection].append((part, unit_range.channels))
                    places[unit_range.projection] = (unit.layer, unit_range.side)
    with ExitStack() as stack:
        for (i, experts), removed in without.items():
            layer = layers[i]
            module = layer.router if experts else layer.mlp_out
            assert module is not None
            forward = _Without(module, partial(_route if experts else _run_experts, layer), removed)
            if experts:
                for gone in forward.parts:
                    layer.check_experts(gone)
            stack.enter_context(standing_in(module, forward))
        for projection, ranges in zeroed_ranges.items():
            # The first of the hooks: what an outer block predicts from these channels it predicts from what is filled in here.
            hook = projection.register_forward_pre_hook(
                _filling_hook(len(parts), _fills_of(fills, places[projection], ranges))
                if fills
                else _zeroing_hook(len(parts), ranges),
                prepend=fills is not None,
            )
            stack.callback(hook.remove)
        for projection, of_parts in silent.items():
            hook = projection.register_forward_hook(_silencing_hook(len(parts), of_parts))
            stack.callback(hook.remove)
        for block, of_parts in skipped.items():  # not a hook: another forward may stand in for this one
            stack.enter_context(standing_in(block, _skipping(block.forward, len(parts), of_parts)))
        yield


def _zeroing_hook(
    n_parts: int, ranges: list[tuple[int, Sequence[int]]]
) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A hook that zeroes channels in the input of a projection; `ranges` are pairs of a part and its channels."""
    mask: Tensor | None = None

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal mask
        x = args[0]  # (rows, ..., channels); rows may be windows or tokens, but the rows of a part are consecutive
        if mask is None or mask.device != x.device:
            with torch.inference_mode(False):  # the first pass may be in inference mode, and a later one need gradients
                mask = torch.zeros(n_parts, x.shape[-1], dtype=torch.bool)
                for part, channels in ranges:
                    mask[part, list(channels)] = True
                mask = mask.to(x.device)
        parts = x.unflatten(0, (n_parts, len(x) // n_parts))
        # Fill instead of multiplying by 0: an infinite activation of a removed unit must not turn into nan.
        return (parts.masked_fill(mask.view(n_parts, *[1] * (x.dim() - 1), -1), 0).flatten(0, 1), *args[1:])

    return hook


def _fills_of(fills: Fills, place: Place, ranges: list[tuple[int, Sequence[int]]]) -> dict[int, Fill]:
    """By part: how its removed channels follow from those that stay."""
    by_part: dict[int, list[int]] = defaultdict(list)
    for part, channels in ranges:
        by_part[part].extend(channels)
    return {part: fills.of(place, channels) for part, channels in by_part.items()}


def _filling_hook(n_parts: int, fills: dict[int, Fill]) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A hook that predicts channels in the input of a projection from the others, part by part."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = args[0].chunk(n_parts)
        filled = [fills[i](part) if i in fills else part for i, part in enumerate(parts)]
        return (torch.cat(filled) if n_parts > 1 else filled[0], *args[1:])

    return hook


def _silencing_hook(n_parts: int, silent: set[int]) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    """A hook that zeroes the output of a projection, bias included, in these parts."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        mask = torch.tensor([part in silent for part in range(n_parts)], device=output.device)
        parts: Tensor = output.unflatten(0, (n_parts, len(output) // n_parts))
        return parts.masked_fill(mask.view(n_parts, *[1] * output.dim()), 0).flatten(0, 1)

    return hook


def _skipping(forward: Callable[..., Any], n_parts: int, skipped: set[int]) -> Callable[..., Any]:
    """A block's forward that gives what it gets in these parts. It runs all the same, and so keeps the cache of its keys."""

    def run(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        given = forward(hidden_states, *args, **options)
        output = given[0] if isinstance(given, tuple) else given
        mask = torch.tensor([part in skipped for part in range(n_parts)], device=output.device)
        mask = mask.repeat_interleave(len(output) // n_parts).view(-1, *[1] * (output.dim() - 1))
        output = torch.where(mask, hidden_states.to(output.device), output)  # they differ where a device map changes devices
        return (output, *given[1:]) if isinstance(given, tuple) else output

    return run


class _Without:
    """A forward for a module of a block with experts: each part of the tokens is `run` without its own experts or channels.

    It stands in for the module's own forward, and for one of the same kind that stands there already: then both hold.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], parts: Sequence[Iterable[int]]) -> None:
        self.run = run  # takes what is removed and the module's arguments
        self.parts = [frozenset(part) for part in parts]
        outer = module.__dict__.get("forward")
        if isinstance(outer, _Without):
            n = math.lcm(len(self.parts), len(outer.parts))
            both = [[x[i * len(x) // n] for x in (self.parts, outer.parts)] for i in range(n)]
            self.parts = [one | other for one, other in both]
            outer = outer.own
        self.own: Callable[..., Any] = outer or type(module).forward.__get__(module)

    def __call__(self, *args: Tensor) -> Any:
        n_tokens = len(args[0]) // len(self.parts)  # the tokens of a part are consecutive
        outputs, start = [], 0
        for removed, alike in groupby(self.parts):
            length = n_tokens * len(list(alike))
            some = [x.narrow(0, start, length) for x in args]
            outputs.append(self.run(removed, *some) if removed else self.own(*some))
            start += length
        if len(outputs) == 1:
            return outputs[0]
        return tuple(map(torch.cat, zip(*outputs, strict=True))) if isinstance(outputs[0], tuple) else torch.cat(outputs)


def _route(layer: Layer, removed: frozenset[int], *args: Tensor) -> Any:
    """Route without some experts: the router runs with the rows of the others, and so chooses among them, as after a cut."""
    router: Any = layer.router
    kept = torch.tensor([i for i in range(layer.experts) if i not in removed], device=router.weight.device)
    logits, scores, chosen = _variant(router, weight=router.weight.index_select(0, kept)).forward(*args)
    all_logits = logits.new_full((len(logits), layer.experts), -math.inf)  # in the form of the dense model's
    return all_logits.index_copy(1, kept, logits), scores, kept[chosen]


def _run_experts(layer: Layer, removed: frozenset[int], *args: Tensor) -> Any:
    """Run all experts without some of their inner channels, which are zeroed behind the activation of their gates."""
    activate: Any = layer.mlp_out.act_fn
    mask = torch.zeros(layer.mlp_width, dtype=torch.bool)
    mask[list(removed)] = True
    mask, ran = mask.to(args[0].device), False

    def activate_others(x: Tensor) -> Tensor:
        nonlocal ran
        ran = True
        return activate(x).masked_fill(mask, 0)  # type: ignore[no-any-return]

    output = _variant(layer.mlp_out, act_fn=activate_others).forward(*args)
    if not ran:
        raise UnsupportedModel(
            f"The experts of {layer.name} run in one fused kernel, inside of which Secateur cannot zero channels: "
            'call model.set_experts_implementation("grouped_mm") first.'
        )
    return output


def _variant(module: nn.Module, **attributes: Any) -> Any:
    """A copy of a module that shares all but these attributes and has its class's forward."""
    variant = copy.copy(module)
    variant.__dict__.pop("forward", None)
    variant.__dict__.update(attributes)  # found before the module's own parameters and submodules
    return variant
