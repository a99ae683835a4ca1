"""Runs of one model side by side: each lane has its own copy of the modules, all share the weights.

Hooks and stand-ins belong to modules, so that runs which differ in them cannot share those. Threads are enough: nearly all the
time is spent in torch, which lets other threads work meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from secateur.families import Layer, anatomy
from secateur.losses import evaluating
from secateur.units import Unit
from secateur.zeroing import zeroed_in_parts

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lane(NamedTuple):
    model: nn.Module
    layers: tuple[Layer, ...]


class Lanes:
    """The model itself, and as many copies as runs may go side by side."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.count = count
        self._own = Lane(model, anatomy(model))
        self._free: SimpleQueue[Lane] | None = None  # copies that nobody runs
        self._pool: ThreadPoolExecutor | None = None

    def map(self, work: Callable[[Lane, Item], Result], items: Sequence[Item], zeroed: Sequence[Unit]) -> list[Result]:
        """Do the work for each item, on a model without the `zeroed` units."""
        if self.count == 1 or len(items) < 2 or _is_hooked(self._own.model):
            return [_work(work, self._own, item, zeroed) for item in items]
        if self._pool is None or self._free is None:
            self._pool, self._free = ThreadPoolExecutor(self.count), SimpleQueue()
            for _ in range(self.count):
                twin = _twin(self._own.model)
                self._free.put(Lane(twin, anatomy(twin)))
        free, threads = self._free, torch.get_num_threads()

        def run(item: Item) -> Result:
            torch.set_num_threads(max(1, threads // min(self.count, len(items))))  # of this thread alone
            lane = free.get()
            try:
                return _work(work, lane, item, zeroed)
            finally:
                free.put(lane)

        futures = [self._pool.submit(run, item) for item in items]
        try:
            wait(futures)  # all of them: after a failure nothing is to go on in the background
        finally:
            torch.set_num_threads(threads)  # what threads to come start with
        return [future.result() for future in futures]


def _work(work: Callable[[Lane, Item], Result], lane: Lane, item: Item, zeroed: Sequence[Unit]) -> Result:
    with torch.inference_mode(), evaluating(lane.model), zeroed_in_parts(lane.layers, [zeroed]):
        return work(lane, item)


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the modules with the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _is_hooked(model: nn.Module) -> bool:
    """Whether somebody watches or changes the model's runs: then they are made on the model itself."""
    return any(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())
