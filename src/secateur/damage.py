"""DamageMeter: what a unit's removal costs, measured on the same batches with and without it (Eq. 16-18).

A unit in block l leaves blocks 0 to l-1 as they were, and so does committing it. The meter therefore keeps, for each batch, its
base loss and its block outputs under the committed units; a run starts at the first block that is new, while the blocks before
it hand back what they gave before. The model's own forward still runs around them, and the numbers are the same to the bit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from secateur.errors import ModelError, SettingError
from secateur.families import anatomy
from secateur.losses import Batch, batch_loss, device_of, evaluating
from secateur.streams import BATCHES, stream
from secateur.units import Unit
from secateur.zeroing import zeroed


class DamageMeter:
    """Measures units one at a time on top of those already committed, and counts the model passes it makes.

    `cache_memory` bounds the bytes of kept block outputs; by default half of the memory that is free. `batches_per_step` lets
    the pulls between two commits share that many batches, drawn anew after each commit; 0 draws from all of them.

    >>> meter = DamageMeter(model, batches, batches_per_pull=2, seed=42)
    >>> meter.damage(Unit("head", 0, 3))
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        *,
        batches_per_pull: int = 2,
        batches_per_step: int = 0,
        cache_memory: int | None = None,
        seed: int = 42,
    ) -> None:
        self.batches_per_step = batches_per_step or len(batches)
        if not 1 <= self.batches_per_step <= len(batches):
            raise SettingError(
                f"The batches per step are {batches_per_step}, but must be 1 to {len(batches)}, the batches there are."
            )
        if not 1 <= batches_per_pull <= self.batches_per_step:
            raise SettingError(
                f"The batches per pull are {batches_per_pull}, but must be 1 to {self.batches_per_step}, those to draw from."
            )
        self.model = model
        self.batches = batches
        self.batches_per_pull = batches_per_pull
        self.committed: list[Unit] = []
        self.pulls = 0
        self.forwards = 0
        self._rng = stream(seed, BATCHES)
        self._base_losses: dict[int, float] = {}
        self._blocks = [layer.block for layer in anatomy(model)]
        self.cache_memory = free_memory(device_of(model)) // 2 if cache_memory is None else cache_memory
        self._prefixes = _Prefixes(self.cache_memory)
        self._draw_step()

    @property
    def cache_was_full(self) -> bool:
        """Whether outputs had to be dropped, or were not kept, for want of memory."""
        return self._prefixes.was_full

    @property
    def cached_bytes(self) -> int:
        """The size of the kept block outputs."""
        return self._prefixes.bytes

    def draw(self) -> tuple[int, ...]:
        """The batches of one pull, all different."""
        return tuple(int(i) for i in self._rng.choice(self._step_batches, size=self.batches_per_pull, replace=False))

    def measure(self, unit: Unit, batches: Sequence[int]) -> tuple[list[float], list[float]]:
        """Base and masked loss of each of the batches, given what is committed (Eq. 16 and 17)."""
        self.pulls += 1
        with torch.inference_mode(), evaluating(self.model), zeroed(self.model, self.committed):
            base = [self._base_loss(i) for i in batches]
            with zeroed(self.model, [unit]):
                masked = [self._loss(i, self._prefixes.get(i)[: unit.layer]) for i in batches]
        return base, masked

    def damage(self, unit: Unit) -> float:
        """The paired damage of a unit on freshly drawn batches (Eq. 18)."""
        base, masked = self.measure(unit, self.draw())
        return sum(m - b for m, b in zip(masked, base, strict=True)) / len(base)

    def recall(self, batches: Sequence[int], base_losses: Sequence[float]) -> None:
        """Take base losses that a journal holds, as if they had been measured here."""
        self.pulls += 1
        self._base_losses.update(zip(batches, base_losses, strict=True))

    def commit(self, unit: Unit) -> None:
        """Keep the unit out from now on. Nothing else ends what is cached."""
        self.committed.append(unit)
        self._base_losses.clear()
        self._prefixes.cut(unit.layer)
        self._draw_step()

    def _draw_step(self) -> None:
        self._step_batches: Any = len(self.batches)
        if self.batches_per_step < len(self.batches):
            self._step_batches = self._rng.choice(len(self.batches), size=self.batches_per_step, replace=False)

    def _base_loss(self, i: int) -> float:
        if i not in self._base_losses:
            outputs = list(self._prefixes.get(i))
            # With no cache nothing is recorded either: a whole pass of block outputs may be more than the device holds.
            with _recorded(self._blocks[len(outputs) :] if self.cache_memory else [], outputs):
                loss = self._loss(i, outputs[:])
            self._prefixes.put(i, outputs)
            if not self.committed and not math.isfinite(loss):
                raise ModelError(
                    f"The dense model's loss on calibration batch {i} is {loss}: nothing can be measured against it. "
                    "Try --dtype float32, or look at the data."
                )
            self._base_losses[i] = loss
        return self._base_losses[i]

    def _loss(self, i: int, prefix: Sequence[Any]) -> float:
        """The loss of a batch, from the first block whose output is not given."""
        self.forwards += 1
        with _replayed(self._blocks, prefix):
            return float(batch_loss(self.model, self.batches[i]))


class _Prefixes:
    """The outputs of each batch's first blocks under the committed units; the least recently used batch goes first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self.was_full = False
        self._outputs: OrderedDict[int, list[Any]] = OrderedDict()

    def get(self, batch: int) -> list[Any]:
        if batch not in self._outputs:
            return []
        self._outputs.move_to_end(batch)
        return self._outputs[batch]

    def put(self, batch: int, outputs: list[Any]) -> None:
        self.drop(batch)
        size = _bytes(outputs)
        self.was_full |= self.bytes + size > self.budget
        if size > self.budget:
            return
        while self.bytes + size > self.budget:
            self.drop(next(iter(self._outputs)))
        self._outputs[batch] = outputs
        self.bytes += size

    def drop(self, batch: int) -> None:
        self.bytes -= _bytes(self._outputs.pop(batch, []))

    def cut(self, layer: int) -> None:
        """Block `layer` has changed: its outputs and those after it are no longer true."""
        for outputs in self._outputs.values():
            self.bytes -= _bytes(outputs[layer:])
            del outputs[layer:]


@contextmanager
def _recorded(blocks: Sequence[nn.Module], outputs: list[Any]) -> Iterator[None]:
    """Append what each block gives, in the order in which they run."""

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output)

    handles = [block.register_forward_hook(record) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replayed(blocks: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Let the first blocks hand back `outputs` instead of running."""
    replaced: list[tuple[nn.Module, Callable[..., Any] | None]] = []
    try:
        for block, output in zip(blocks, outputs, strict=False):
            replaced.append((block, block.__dict__.get("forward")))  # device maps put a forward of their own there
            block.forward = lambda *args, _output=output, **kwargs: _output
        yield
    finally:
        for block, forward in replaced:
            del block.forward
            if forward is not None:
                block.forward = forward


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device, or in the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(psutil.virtual_memory().available)


def _bytes(output: Any) -> int:
    if isinstance(output, Tensor):
        return output.numel() * output.element_size()
    return sum(_bytes(item) for item in output) if isinstance(output, list | tuple) else 0
