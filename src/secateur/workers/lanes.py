"""Lanes: runs of one model side by side. Each lane has its own copy of the modules; all lanes share the weights.

Hooks and replaced forwards belong to modules, so runs that differ in them need modules of their own. Threads are enough:
nearly all the time is spent in torch, which lets other threads run meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from secateur.model.families import Layer, anatomy
from secateur.model.losses import evaluating
from secateur.model.moments import Fills
from secateur.model.zeroing import zeroed_in_parts
from secateur.units import Unit

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lane(NamedTuple):
    model: nn.Module
    layers: tuple[Layer, ...]


class Lanes:
    """The model, and a copy for each run that may go side by side."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.count = count
        self._own = Lane(model, anatomy(model))
        self._free: SimpleQueue[Lane] | None = None  # copies that are not running
        self._pool: ThreadPoolExecutor | None = None

    def map(
        self,
        work: Callable[[Lane, Item], Result],
        items: Sequence[Item],
        zeroed: Sequence[Unit],
        fills: Fills | None = None,
    ) -> list[Result]:
        """Do the work for each item, on a model without the `zeroed` units, which the `fills` make up for."""
        if self.count == 1 or len(items) < 2 or _is_hooked(self._own.model):
            return [_work(work, self._own, item, zeroed, fills) for item in items]
        if self._pool is None or self._free is None:
            self._pool, self._free = ThreadPoolExecutor(self.count), SimpleQueue()
            for _ in range(self.count):
                twin = _twin(self._own.model)
                self._free.put(Lane(twin, anatomy(twin)))
        free, threads = self._free, torch.get_num_threads()

        def run(item: Item) -> Result:
            torch.set_num_threads(max(1, threads // min(self.count, len(items))))  # for this thread only
            lane = free.get()
            try:
                return _work(work, lane, item, zeroed, fills)
            finally:
                free.put(lane)

        futures = [self._pool.submit(run, item) for item in items]
        try:
            wait(futures)  # for all of them: after an error nothing may go on in the background
        finally:
            torch.set_num_threads(threads)  # the default of new threads
        return [future.result() for future in futures]


def _work(work: Callable[[Lane, Item], Result], lane: Lane, item: Item, zeroed: Sequence[Unit], fills: Fills | None) -> Result:
    with torch.inference_mode(), evaluating(lane.model), zeroed_in_parts(lane.layers, [zeroed], fills):
        return work(lane, item)


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the modules with the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _is_hooked(model: nn.Module) -> bool:
    """Whether the model has hooks or replaced forwards: then all runs are made on the model itself."""
    return any(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())
