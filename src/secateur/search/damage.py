"""DamageMeter: what a unit's removal costs, measured on the same batches with and without it (Eq. 16-18).

Nothing is computed twice. Zeroing or committing a unit in block l changes nothing before the projection that it enters. The
meter keeps the losses and the block outputs of each batch under the committed units, and a run starts at the first value that
is new (prefixes.py). Losses are the same to the bit as those of full runs.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from secateur.errors import ModelError, SettingError
from secateur.model.families import anatomy
from secateur.model.losses import IGNORED, REFERENCE, Batch, Loss, device_of, evaluating, part_losses
from secateur.model.zeroing import zeroed, zeroed_in_parts
from secateur.search.lanes import Lane, Lanes
from secateur.search.policies import Moment, Slope
from secateur.search.prefixes import Prefixes
from secateur.search.scores import differentiable, mask_gradients
from secateur.search.select import Asked, Measured
from secateur.selection import Pull, paired_damages
from secateur.streams import BATCHES, GRADIENTS, stream
from secateur.units import HEAD, MLP, Unit


class DamageMeter:
    """Measures units one at a time on top of those already committed, and counts the model passes it makes.

    `cache_memory` is the number of bytes for kept block outputs, by default half of the free memory. With `batches_per_step`
    the pulls between two commits share that many batches, drawn anew after each commit; None draws from all batches. `stack`
    is the number of masked runs per forward pass. `lanes` is the number of runs side by side, each with its share of the
    threads, by default 2 on a CPU with at least 2 threads. `loss` is a function of your own, loss(model, batch), that gives the
    mean loss of a batch or the loss of each row; without one the batch's labels decide (model/losses.py). The batches are
    dictionaries of tensors from any iterable.

    >>> meter = DamageMeter(model, batches, batches_per_pull=2, seed=42)
    >>> meter.damage(Unit("head", 0, 3))
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        *,
        loss: Loss | None = None,
        batches_per_pull: int = 2,
        batches_per_step: int | None = None,
        cache_memory: int | None = None,
        stack: int = 1,
        lanes: int | None = None,
        seed: int = 42,
    ) -> None:
        batches = batches if isinstance(batches, Sequence) else list(batches)
        self.batches_per_step = batches_per_step or len(batches)
        if not 1 <= self.batches_per_step <= len(batches):
            raise SettingError(
                f"The batches per step are {batches_per_step}, but must be 1 to {len(batches)}, the number of batches."
            )
        if not 1 <= batches_per_pull <= self.batches_per_step:
            raise SettingError(
                f"The batches per pull are {batches_per_pull}, but must be 1 to {self.batches_per_step}, the batches per step."
            )
        for name, value in (("stack is", stack), ("lanes are", lanes)):
            if value is not None and value < 1:
                raise SettingError(f"The {name} {value}, but must be at least 1.")
        self.model = model
        self.batches = batches
        self.loss = loss
        self.batches_per_pull = batches_per_pull
        self.stack = stack
        self._lanes = Lanes(model, default_lanes(model) if lanes is None else lanes)
        self.committed: list[Unit] = []
        self.pulls = 0
        self.forwards = 0  # a stacked forward pass counts once for each run in it
        self.cache_memory = free_memory(device_of(model)) // 2 if cache_memory is None else cache_memory
        self.gradient_batches = 0  # batches whose gradients were taken: each costs three forward passes
        self._rng = stream(seed, BATCHES)
        self._gradient_rng, self._gradient_order = stream(seed, GRADIENTS), list[int]()
        self._prefixes = Prefixes(len(anatomy(model)), self.cache_memory)
        self._kinds: set[str] = set()  # sides of the units measured so far
        self._base_losses: dict[int, float] = {}  # this and the next two hold for the present step
        self._masked_losses: dict[tuple[Unit, int], float] = {}
        self._counted: set[Any] = set()  # the losses that a pull has asked for: some are measured before that
        self._expected: list[tuple[Unit, int]] = []
        self._firsts: dict[tuple[Unit, int], float] = {}  # by unit and batch: the first-order term under the committed units
        self._drawn_from: list[int] = []  # the batches of these, in turn
        self._draw_step()

    @property
    def cache_was_full(self) -> bool:
        """Whether the memory was too small for all block outputs."""
        return self._prefixes.was_full

    @property
    def cached_bytes(self) -> int:
        """The size of the kept block outputs."""
        return self._prefixes.bytes

    def draw(self) -> tuple[int, ...]:
        """Draw the batches of one pull, all different; after a look at gradients their batches in turn."""
        if self._drawn_from:
            n = min(self.batches_per_pull, len(self._drawn_from))
            drawn, self._drawn_from = self._drawn_from[:n], [*self._drawn_from[n:], *self._drawn_from[:n]]
            return tuple(drawn)
        return tuple(int(i) for i in self._rng.choice(self._step_batches, size=self.batches_per_pull, replace=False))

    def measure(self, pulls: Sequence[Asked]) -> Iterator[Measured]:
        """Base and masked losses of each pull, in order, given what is committed (Eq. 16 and 17).

        Runs of later pulls may be made beside or stacked with those of earlier ones, since the whole request is known.
        """
        self._expected = [(unit, i) for unit, batches in pulls for i in batches]
        for unit, batches in pulls:
            yield self._measure_pull(unit, batches)

    def damage(self, unit: Unit) -> float:
        """The paired damage of a unit on freshly drawn batches (Eq. 18)."""
        measured = next(self.measure([(unit, self.draw())]))
        return sum(paired_damages(measured.base_losses, measured.masked_losses)) / len(measured.base_losses)

    def has_gradients(self, units: Sequence[Unit]) -> bool:
        """Whether slopes can be taken: not of experts, nor of a loss of one's own that torch cannot differentiate."""
        if any(layer.experts for layer in anatomy(self.model)):
            return False
        return self.loss is None or differentiable(self.model, self.batches[0], self.loss)

    def slopes(self, units: Sequence[Unit], n_batches: int) -> list[Slope]:
        """What gradients under the committed units foretell of each unit's damage: its terms of first and second order.

        A mask m multiplies the unit, and removal takes it from 1 to 0: the loss changes by -L'(1) + L''(1) / 2. The second
        derivative is taken as the mean square of the examples' first ones (the Fisher information), times the predictions that
        an example's loss is the mean of: the slopes of single tokens are all but independent. The batches come in an order of
        their own, each once before any comes again, and the pulls until the next commit are made on them.
        """
        wanted = [self._next_gradient_batch() for _ in range(min(n_batches, len(self.batches)))]
        batches = [self.batches[i] for i in wanted]
        with zeroed(self.model, self.committed):
            gradients = mask_gradients(self.model, units, batches, self.loss).double()
        self.gradient_batches += len(wanted)
        self._drawn_from, self._firsts = wanted, {}
        squares = gradients.square().mean(0)
        second = (squares * _predictions(batches) / 2).tolist()
        if REFERENCE in self.batches[0]:
            gradients = torch.zeros_like(gradients)  # a distance is least, and flat, at the dense model
        rows = iter(gradients.split([len(next(iter(batch.values()))) for batch in batches]))
        for i in wanted:
            self._firsts.update({(unit, i): -g for unit, g in zip(units, next(rows).mean(0).tolist(), strict=True)})
        means, variances = (-gradients.mean(0)).tolist(), gradients.var(0).tolist()
        moments = [Moment(mean, variance, len(gradients)) for mean, variance in zip(means, variances, strict=True)]
        return [Slope(moment, value) for moment, value in zip(moments, second, strict=True)]

    def firsts(self, unit: Unit, batches: Sequence[int]) -> tuple[float, ...]:
        """The first-order term of the unit's damage on each of these batches, if gradients were taken since the last commit."""
        found = [self._firsts.get((unit, i)) for i in batches]
        return tuple(first for first in found if first is not None) if None not in found else ()

    def pass_seconds(self) -> float:
        """The time of a forward pass of one batch; counts nothing."""
        with torch.inference_mode(), evaluating(self.model):
            self._losses(self.model, self.batches[0], 1)  # warms up
            started = time.perf_counter()
            self._losses(self.model, self.batches[0], 1)
            return time.perf_counter() - started

    def _next_gradient_batch(self) -> int:
        if not self._gradient_order:
            self._gradient_order = self._gradient_rng.permutation(len(self.batches)).tolist()
        return int(self._gradient_order.pop())

    def recall(self, pull: Pull) -> None:
        """Take over losses from a journal, as if they had been measured here."""
        pairs = [(pull.unit, i) for i in pull.batches]
        self.pulls += 1
        self._counted.update([*pull.batches, *pairs])
        self._base_losses.update(zip(pull.batches, pull.base_losses, strict=True))
        self._masked_losses.update(zip(pairs, pull.masked_losses, strict=True))

    def commit(self, unit: Unit) -> None:
        """Zero the unit from now on. This alone invalidates the cache."""
        self.committed.append(unit)
        self._expected = []
        self._base_losses, self._masked_losses = {}, {}
        self._counted, self._firsts, self._drawn_from = set(), {}, []
        self._prefixes.cut(unit.layer)
        self._draw_step()

    def _measure_pull(self, unit: Unit, batches: Sequence[int]) -> Measured:
        pairs = [(unit, i) for i in batches]
        before = self.forwards
        self.pulls += 1
        self._count([*batches, *pairs])
        self._kinds.add(unit.side)
        self._measure_with_companions([pair for pair in dict.fromkeys(pairs) if pair not in self._masked_losses], batches)
        base, masked = (self._base_losses[i] for i in batches), (self._masked_losses[pair] for pair in pairs)
        return Measured(tuple(base), tuple(masked), self.forwards - before)

    def _count(self, runs: Iterable[Any]) -> None:
        """Count the runs that no earlier pull of this step asked for."""
        new = set(runs) - self._counted
        self.forwards += len(new)
        self._counted |= new

    def _draw_step(self) -> None:
        self._step_batches: Any = len(self.batches)
        if self.batches_per_step < len(self.batches):
            self._step_batches = self._rng.choice(len(self.batches), size=self.batches_per_step, replace=False)
            self._prefixes.want(frozenset(self._step_batches.tolist()))

    def _measure_with_companions(self, pairs: Sequence[tuple[Unit, int]], batches: Iterable[int]) -> None:
        """Measure these pairs, and with free lanes or stack places also pairs of later pulls in nearby blocks."""
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
            loss = self._losses(lane.model, self.batches[i], 1)[0]
        if not self.committed and not math.isfinite(loss):
            raise ModelError(
                f"The dense model's loss on calibration batch {i} is {loss}: nothing can be measured against it. "
                "Try --dtype float32, or look at the data."
            )
        return loss

    def _runs(self, pairs: Iterable[tuple[Unit, int]]) -> Iterator[list[tuple[Unit, int]]]:
        """Group pairs into runs: batches of one shape, units in neighbouring blocks."""
        alike: dict[Any, list[tuple[Unit, int]]] = defaultdict(list)
        for unit, i in sorted(pairs, key=lambda pair: pair[0].layer):
            alike[_shapes(self.batches[i]) if self.stack > 1 else None].append((unit, i))
        for together in alike.values():
            for start in range(0, len(together), self.stack):
                yield together[start : start + self.stack]

    def _run_losses(self, lane: Lane, run: Sequence[tuple[Unit, int]]) -> list[float]:
        """The masked losses of each pair of one run."""
        first = run[0][0].layer
        kind = HEAD if any(unit.side == HEAD for unit, _ in run if unit.layer == first) else MLP
        batches = [self.batches[i] for _, i in run]
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]} if len(run) > 1 else batches[0]
        masks = zeroed_in_parts(lane.layers, [[unit] for unit, _ in run])
        with masks, self._prefixes.resumed(lane.layers, [i for _, i in run], first, kind):
            return self._losses(lane.model, joined, len(run))

    def _losses(self, model: nn.Module, batch: Batch, parts: int) -> list[float]:
        return [float(loss) for loss in part_losses(model, batch, parts, self.loss).tolist()]


def free_memory(device: torch.device) -> int:
    """Free bytes on a device, or in the machine for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(psutil.virtual_memory().available)


def default_lanes(model: nn.Module) -> int:
    """2 on a CPU: two runs side by side are faster than one after the other (docs/performance.md).

    A model with experts has 1: the last bit of a product of few rows depends on the number of threads, and lanes change that.
    """
    if any(layer.experts for layer in anatomy(model)):
        return 1
    return min(2, torch.get_num_threads()) if device_of(model).type == "cpu" else 1


def _predictions(batches: Sequence[Batch]) -> float:
    """How many predictions the loss of one row of a batch is the mean of: one, but of a text the tokens that count."""
    labels = [batch["labels"] for batch in batches if "labels" in batch and batch["labels"].dim() == 2]
    return max(1.0, sum(int((x != IGNORED).sum()) for x in labels) / sum(map(len, labels))) if labels else 1.0


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))
