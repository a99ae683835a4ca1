"""Functional zeroing: run a model as if some units were not there (Eq. 8-11). The weights stay untouched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.model.families import Layer, anatomy, layer_of
from secateur.units import Unit


def zeroed(model: nn.Module, units: Iterable[Unit]) -> AbstractContextManager[None]:
    """Zero the outputs of `units` while the `with` block lasts; such blocks may be nested.

    >>> with zeroed(model, [Unit("head", 0, 3)]):
    ...     logits = model(**batch).logits
    """
    return zeroed_in_parts(anatomy(model), [list(units)])


@contextmanager
def zeroed_in_parts(layers: Sequence[Layer], parts: Sequence[Iterable[Unit]]) -> Iterator[None]:
    """The same for batches that consist of equal parts, one after another: each part has its own units zeroed."""
    zeroed_ranges: dict[nn.Module, list[tuple[int, range]]] = defaultdict(list)  # by projection: part and channels
    for part, units in enumerate(parts):
        for unit in units:
            for unit_range in layer_of(layers, unit).ranges(unit):
                zeroed_ranges[unit_range.projection].append((part, unit_range.channels))
    handles = []
    try:
        for projection, ranges in zeroed_ranges.items():
            handles.append(projection.register_forward_pre_hook(_zeroing_hook(len(parts), ranges)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeroing_hook(n_parts: int, ranges: list[tuple[int, range]]) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A hook that zeroes channels in the input of a projection; `ranges` are pairs of a part and its channels."""
    mask: Tensor | None = None

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal mask
        x = args[0]  # (rows, ..., channels); rows may be windows or tokens, but the rows of a part are consecutive
        if mask is None or mask.device != x.device:
            with torch.inference_mode(False):  # the first pass may be in inference mode, and a later one need gradients
                mask = torch.zeros(n_parts, x.shape[-1], dtype=torch.bool)
                for part, channels in ranges:
                    mask[part, channels.start : channels.stop] = True
                mask = mask.to(x.device)
        parts = x.unflatten(0, (n_parts, len(x) // n_parts))
        # Fill instead of multiplying by 0: an infinite activation of a removed unit must not turn into nan.
        return (parts.masked_fill(mask.view(n_parts, *[1] * (x.dim() - 1), -1), 0).flatten(0, 1), *args[1:])

    return hook
