"""DamageMeter: what a unit's removal costs, measured on the same batches with and without it (Eq. 16-18).

Only what is new is computed. A unit in block l leaves everything before its projection as it was, and so does committing it.
The meter keeps, for each batch, its losses and its block outputs under the committed units, and a run starts at the first thing
that is new (prefixes.py). The numbers are the same to the bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from secateur.errors import ModelError, SettingError
from secateur.families import anatomy
from secateur.lanes import Lane, Lanes
from secateur.losses import Batch, batch_loss, device_of, part_losses
from secateur.prefixes import Prefixes
from secateur.streams import BATCHES, stream
from secateur.units import HEAD, MLP, Unit
from secateur.zeroing import zeroed_in_parts


class DamageMeter:
    """Measures units one at a time on top of those already committed, and counts the model passes it makes.

    `cache_memory` bounds the bytes of what is kept; by default half of the memory that is free. `batches_per_step` lets the
    pulls between two commits share that many batches, drawn anew after each commit; 0 draws from all of them. `stack` is how
    many masked runs are made as one, on a batch that many times as large; `lanes` is how many go side by side, each with its
    share of the threads (by default 2 on a CPU that has as many). `expect` tells which may go together.

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
        stack: int = 1,
        lanes: int | None = None,
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
        for name, value in (("stack is", stack), ("lanes are", lanes)):
            if value is not None and value < 1:
                raise SettingError(f"The {name} {value}, but must be at least 1.")
        self.model = model
        self.batches = batches
        self.batches_per_pull = batches_per_pull
        self.stack = stack
        self._lanes = Lanes(model, default_lanes(model) if lanes is None else lanes)
        self.committed: list[Unit] = []
        self.pulls = 0
        self.forwards = 0  # a stacked run counts as one for each of its batches
        self.cache_memory = free_memory(device_of(model)) // 2 if cache_memory is None else cache_memory
        self._rng = stream(seed, BATCHES)
        self._prefixes = Prefixes(len(anatomy(model)), self.cache_memory)
        self._kinds: set[str] = set()  # of the units measured so far
        self._base_losses: dict[int, float] = {}  # these three are of the present step
        self._masked_losses: dict[tuple[Unit, int], float] = {}
        self._counted: set[Any] = set()  # the keys of both that were asked for; a stack measures some before that
        self._expected: list[tuple[Unit, int]] = []
        self._draw_step()

    @property
    def cache_was_full(self) -> bool:
        """Whether something had to be dropped, or was not kept, for want of memory."""
        return self._prefixes.was_full

    @property
    def cached_bytes(self) -> int:
        """The size of what is kept."""
        return self._prefixes.bytes

    def draw(self) -> tuple[int, ...]:
        """The batches of one pull, all different."""
        return tuple(int(i) for i in self._rng.choice(self._step_batches, size=self.batches_per_pull, replace=False))

    def expect(self, pulls: Iterable[tuple[Unit, Sequence[int]]]) -> None:
        """Say which units will be measured on which batches before the next commit, whatever the answers are."""
        self._expected = [(unit, i) for unit, batches in pulls for i in batches]

    def measure(self, unit: Unit, batches: Sequence[int]) -> tuple[list[float], list[float]]:
        """Base and masked loss of each of the batches, given what is committed (Eq. 16 and 17)."""
        pairs = [(unit, i) for i in batches]
        self.pulls += 1
        self._count([*batches, *pairs])
        self._kinds.add(unit.side)
        self._measure_with_companions([pair for pair in dict.fromkeys(pairs) if pair not in self._masked_losses], batches)
        return [self._base_losses[i] for i in batches], [self._masked_losses[pair] for pair in pairs]

    def damage(self, unit: Unit) -> float:
        """The paired damage of a unit on freshly drawn batches (Eq. 18)."""
        base, masked = self.measure(unit, self.draw())
        return sum(m - b for m, b in zip(masked, base, strict=True)) / len(base)

    def recall(self, unit: Unit, batches: Sequence[int], base_losses: Sequence[float], masked_losses: Sequence[float]) -> None:
        """Take losses that a journal holds, as if they had been measured here."""
        pairs = [(unit, i) for i in batches]
        self.pulls += 1
        self._counted.update([*batches, *pairs])
        self._base_losses.update(zip(batches, base_losses, strict=True))
        self._masked_losses.update(zip(pairs, masked_losses, strict=True))

    def commit(self, unit: Unit) -> None:
        """Keep the unit out from now on. Nothing else ends what is cached."""
        self.committed.append(unit)
        self._expected = []
        self._base_losses, self._masked_losses = {}, {}
        self._counted = set()
        self._prefixes.cut(unit.layer)
        self._draw_step()

    def _count(self, runs: Iterable[Any]) -> None:
        """Count the runs that were not asked for before in this step."""
        new = set(runs) - self._counted
        self.forwards += len(new)
        self._counted |= new

    def _draw_step(self) -> None:
        self._step_batches: Any = len(self.batches)
        if self.batches_per_step < len(self.batches):
            self._step_batches = self._rng.choice(len(self.batches), size=self.batches_per_step, replace=False)
            self._prefixes.want(frozenset(self._step_batches.tolist()))

    def _measure_with_companions(self, pairs: Sequence[tuple[Unit, int]], batches: Iterable[int]) -> None:
        """Measure what is missing of these, and where there is room beside it some of what is expected."""
        ahead = [pair for pair in self._expected if pair not in pairs and pair not in self._masked_losses] if pairs else []
        nearest = sorted(dict.fromkeys(ahead), key=lambda pair: abs(pair[0].layer - pairs[0][0].layer))
        wanted = [*pairs, *nearest[: -len(pairs) % (self.stack * self._lanes.count)]]
        missing = [i for i in dict.fromkeys([*batches, *(i for _, i in wanted)]) if i not in self._base_losses]
        self._base_losses.update(zip(missing, self._lanes.map(self._base_loss, missing, self.committed), strict=True))
        runs = list(self._runs(wanted))
        for run, losses in zip(runs, self._lanes.map(self._run_losses, runs, self.committed), strict=True):
            self._masked_losses.update(zip(run, losses, strict=True))

    def _base_loss(self, lane: Lane, i: int) -> float:
        with self._prefixes.recorded(lane.layers, i, self._kinds):
            loss = float(batch_loss(lane.model, self.batches[i]))
        if not self.committed and not math.isfinite(loss):
            raise ModelError(
                f"The dense model's loss on calibration batch {i} is {loss}: nothing can be measured against it. "
                "Try --dtype float32, or look at the data."
            )
        return loss

    def _runs(self, pairs: Iterable[tuple[Unit, int]]) -> Iterator[list[tuple[Unit, int]]]:
        """Pairs that can be measured in one run each: on batches of one shape, in neighbouring blocks."""
        alike: dict[Any, list[tuple[Unit, int]]] = defaultdict(list)
        for unit, i in sorted(pairs, key=lambda pair: pair[0].layer):
            alike[_shapes(self.batches[i]) if self.stack > 1 else None].append((unit, i))
        for together in alike.values():
            for start in range(0, len(together), self.stack):
                yield together[start : start + self.stack]

    def _run_losses(self, lane: Lane, run: Sequence[tuple[Unit, int]]) -> list[float]:
        """The masked losses of one run."""
        first = run[0][0].layer
        kind = HEAD if any(unit.side == HEAD for unit, _ in run if unit.layer == first) else MLP
        batches = [self.batches[i] for _, i in run]
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]} if len(run) > 1 else batches[0]
        masks = zeroed_in_parts(lane.layers, [[unit] for unit, _ in run])
        with masks, self._prefixes.resumed(lane.layers, [i for _, i in run], first, kind):
            return [float(loss) for loss in part_losses(lane.model, joined, len(run)).tolist()]


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device, or in the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(psutil.virtual_memory().available)


def default_lanes(model: nn.Module) -> int:
    """Two runs with half of the threads each are faster than one after the other with all of them (docs/performance.md)."""
    return min(2, torch.get_num_threads()) if device_of(model).type == "cpu" else 1


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))
