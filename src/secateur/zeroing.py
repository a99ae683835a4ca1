"""Functional zeroing: run a model as if some units were not there (Eq. 8-11). The weights stay untouched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.families import anatomy, layer_of
from secateur.units import Unit


@contextmanager
def zeroed(model: nn.Module, units: Iterable[Unit]) -> Iterator[None]:
    """Zero the outputs of `units` while the block lasts; blocks may be nested.

    >>> with zeroed(model, [Unit("head", 0, 3)]):
    ...     logits = model(**batch).logits
    """
    layers = anatomy(model)
    dropped: dict[nn.Module, list[range]] = defaultdict(list)
    for unit in units:
        layer = layer_of(layers, unit)
        dropped[layer.projection(unit)].append(layer.channels(unit))
    handles = []
    try:
        for projection, ranges in dropped.items():
            handles.append(projection.register_forward_pre_hook(_zeroing_hook(ranges)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeroing_hook(ranges: list[range]) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    mask: Tensor | None = None

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal mask
        x = args[0]  # (..., channels)
        if mask is None or mask.device != x.device:
            with torch.inference_mode(False):  # the first pass may be in inference mode and a later one want gradients
                mask = torch.zeros(x.shape[-1], dtype=torch.bool)
                for channels in ranges:
                    mask[channels.start : channels.stop] = True
                mask = mask.to(x.device)
        # Filled rather than multiplied by 0: an infinite activation of a removed unit must not turn into nan.
        return (x.masked_fill(mask, 0), *args[1:])

    return hook
