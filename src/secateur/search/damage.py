"""DamageMeter: what a unit's removal costs, measured on the same batches with and without it (Eq. 16-18).

Nothing is computed twice. Zeroing or committing a unit in block l changes nothing before the projection that it enters. The
meter keeps the losses of each batch under the committed units, and its runner the block outputs; a run starts at the first
value that is new (prefixes.py). Losses are the same to the bit as those of full runs.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from torch import Tensor, nn

from secateur.errors import ModelError, SettingError
from secateur.model.families import anatomy
from secateur.model.losses import IGNORED, REFERENCE, Batch, Loss, device_of, evaluating, part_losses
from secateur.model.moments import Fills
from secateur.model.zeroing import zeroed, zeroed_in_parts
from secateur.search.policies import Moment, Slope
from secateur.search.prefixes import Prefixes
from secateur.search.scores import differentiable, mask_gradients
from secateur.search.select import Asked, Measured
from secateur.selection import Pull, paired_damages
from secateur.streams import BATCHES, GRADIENTS, stream
from secateur.units import HEAD, MLP, Unit
from secateur.watcher import Followed, Report, silent
from secateur.workers.lanes import Lane, Lanes

Pair = tuple[Unit, int]  # a unit that is zeroed, and a batch
Run = Sequence[Pair]  # made in one forward pass: a single pair, or as many as are stacked


class Made(NamedTuple):
    """The losses of some runs: without their units by batch, and with them by pair."""

    base: dict[int, float]
    masked: dict[Pair, float]


class Runner(Protocol):
    """Makes runs of a model under the committed units: `Here` in this process, or others elsewhere."""

    cache_was_full: bool  # whether the memory was too small for all block outputs
    cached_bytes: int

    def make(self, rounds: Iterable[Sequence[Run]], known: Mapping[int, float], kinds: Set[str]) -> Iterator[Made]:
        """For each round at least its own losses, but for base losses that are known by then.

        Base runs keep what units on the sides `kinds` of their blocks need.
        """
        ...

    def gradients(self, units: Sequence[Unit], batches: Sequence[int]) -> Tensor:
        """The mask gradients (scores.py) of the examples of these batches."""
        ...

    def want(self, batches: frozenset[int]) -> None:
        """Prefer to keep the block outputs of these batches."""
        ...

    def commit(self, unit: Unit) -> None: ...
    def close(self) -> None: ...


class Here:
    """A runner in this process: side by side in lanes, each run from the first value that is new."""

    def __init__(
        self,
        model: nn.Module,
        batches: Mapping[int, Batch] | Sequence[Batch],
        loss: Loss | None,
        lanes: int,
        cache_memory: int,
        fills: Fills | None = None,
        progress: Report = silent,
    ) -> None:
        self._model, self._batches, self._loss, self._fills = model, batches, loss, fills
        self._progress = progress  # of gradients
        self._lanes = Lanes(model, lanes)
        self._prefixes = Prefixes(len(anatomy(model)), cache_memory)
        self._kinds: Set[str] = frozenset()  # sides of the units so far
        self.committed: list[Unit] = []

    @property
    def cache_was_full(self) -> bool:
        return self._prefixes.was_full

    @property
    def cached_bytes(self) -> int:
        return self._prefixes.bytes

    def make(self, rounds: Iterable[Sequence[Run]], known: Mapping[int, float], kinds: Set[str]) -> Iterator[Made]:
        self._kinds = kinds
        for runs in rounds:
            pairs = [pair for run in runs for pair in run]
            missing = [i for i in dict.fromkeys(i for _, i in pairs) if i not in known]
            base = self._lanes.map(self._base_loss, missing, self.committed, self._fills)
            masked = self._lanes.map(self._run_losses, runs, self.committed, self._fills)
            yield Made(dict(zip(missing, base, strict=True)), dict(zip(pairs, chain.from_iterable(masked), strict=True)))

    def gradients(self, units: Sequence[Unit], batches: Sequence[int]) -> Tensor:
        with zeroed(self._model, self.committed, self._fills):
            wanted = Followed([self._batches[i] for i in batches], self._progress)
            return mask_gradients(self._model, units, wanted, self._loss, self._fills)

    def commit(self, unit: Unit) -> None:
        self.committed.append(unit)
        if self._fills:
            self._fills.commit(unit)
        self._prefixes.cut(unit.layer)

    def want(self, batches: frozenset[int]) -> None:
        self._prefixes.want(batches)

    def close(self) -> None: ...

    def _base_loss(self, lane: Lane, i: int) -> float:
        with self._prefixes.recorded(lane.layers, i, self._kinds):
            loss = self._losses(lane.model, self._batches[i], 1)[0]
        if not self.committed and not math.isfinite(loss):
            raise ModelError(
                f"The dense model's loss on calibration batch {i} is {loss}: nothing can be measured against it. "
                "Try --dtype float32, or look at the data."
            )
        return loss

    def _run_losses(self, lane: Lane, run: Run) -> list[float]:
        """The masked losses of each pair of one run."""
        first = run[0][0].layer
        kind = HEAD if any(unit.side == HEAD for unit, _ in run if unit.layer == first) else MLP
        batches = [self._batches[i] for _, i in run]
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]} if len(run) > 1 else batches[0]
        masks = zeroed_in_parts(lane.layers, [[unit] for unit, _ in run], self._fills)
        with masks, self._prefixes.resumed(lane.layers, [i for _, i in run], first, kind):
            return self._losses(lane.model, joined, len(run))

    def _losses(self, model: nn.Module, batch: Batch, parts: int) -> list[float]:
        return [float(loss) for loss in part_losses(model, batch, parts, self._loss).tolist()]


class DamageMeter:
    """Measures units one at a time on top of those already committed, and counts the model passes it makes.

    `cache_memory` is the number of bytes for kept block outputs, by default half of the free memory. With `batches_per_step`
    the pulls between two commits share that many batches, drawn anew after each commit; None draws from all batches. `stack`
    is the number of masked runs per forward pass. `lanes` is the number of runs side by side, each with its share of the
    threads, by default 2 on a CPU with at least 2 threads. `loss` is a function of your own, loss(model, batch), that gives the
    mean loss of a batch or the loss of each row; without one the batch's labels decide (model/losses.py). With `fills`
    (`fills_of`) the damage is the one that is left after a repair. The batches are dictionaries of tensors from any iterable.

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
        fills: Fills | None = None,
        runner: Runner | None = None,
        progress: Report = silent,  # of gradients
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
        self._lanes = default_lanes(model) if lanes is None else lanes
        self.committed: list[Unit] = []
        self.pulls = 0
        self.forwards = 0  # a stacked forward pass counts once for each run in it
        self.cache_memory = free_memory(device_of(model)) // 2 if cache_memory is None else cache_memory
        self.gradient_batches = 0  # batches whose gradients were taken: each costs three forward passes
        self._rng = stream(seed, BATCHES)
        self._gradient_rng, self._gradient_order = stream(seed, GRADIENTS), list[int]()
        self._runner = runner or Here(model, batches, loss, self._lanes, self.cache_memory, fills, progress)
        self._kinds: set[str] = set()  # sides of the units asked for so far
        self._base_losses: dict[int, float] = {}  # this and the next two hold for the present step
        self._masked_losses: dict[Pair, float] = {}
        self._counted: set[Any] = set()  # the losses that a pull has asked for: some are measured before that
        self._firsts: dict[Pair, float] = {}  # the first-order terms under the committed units
        self._drawn_from: list[int] = []  # the batches of these, in turn
        self._draw_step()

    @property
    def cache_was_full(self) -> bool:
        """Whether the memory was too small for all block outputs."""
        return self._runner.cache_was_full

    @property
    def cached_bytes(self) -> int:
        """The size of the kept block outputs."""
        return self._runner.cached_bytes

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
        self._kinds |= {unit.side for unit, _ in pulls}
        made = self._runner.make(self._rounds(pulls), self._base_losses, frozenset(self._kinds))
        for (unit, batches), (base, masked) in zip(pulls, made, strict=True):
            self._base_losses.update((i, base[i]) for i in base.keys() - self._base_losses.keys())  # recalled ones stay
            self._masked_losses.update((pair, masked[pair]) for pair in masked.keys() - self._masked_losses.keys())
            yield self._measured(unit, batches)

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
        gradients = self._runner.gradients(units, wanted).double()
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
            part_losses(self.model, self.batches[0], 1, self.loss)  # warms up
            started = time.perf_counter()
            part_losses(self.model, self.batches[0], 1, self.loss)
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
        self._base_losses, self._masked_losses = {}, {}
        self._counted, self._firsts, self._drawn_from = set(), {}, []
        self._runner.commit(unit)
        self._draw_step()

    def close(self) -> None:
        """End the workers, if there are any."""
        self._runner.close()

    def _measured(self, unit: Unit, batches: Sequence[int]) -> Measured:
        pairs = [(unit, i) for i in batches]
        before = self.forwards
        self.pulls += 1
        self._count([*batches, *pairs])
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
            self._runner.want(frozenset(self._step_batches.tolist()))

    def _rounds(self, pulls: Sequence[Asked]) -> Iterator[list[Run]]:
        """The runs to be made for each pull; with free lanes or stack places also those of later pulls in nearby blocks."""
        left = dict.fromkeys((unit, i) for unit, batches in pulls for i in batches)
        for unit, batches in pulls:
            wanted = [pair for pair in dict.fromkeys((unit, i) for i in batches) if pair in left and self._is_new(pair)]
            if free := -len(wanted) % (self.stack * self._lanes):
                ahead = [pair for pair in left if pair not in wanted and self._is_new(pair)]
                wanted += sorted(ahead, key=_distance_from(unit))[:free]
            for pair in wanted:
                del left[pair]
            yield list(self._runs(wanted))

    def _is_new(self, pair: Pair) -> bool:
        return pair not in self._masked_losses

    def _runs(self, pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
        """Group pairs into runs: batches of one shape, units in neighbouring blocks."""
        alike: dict[Any, list[Pair]] = defaultdict(list)
        for unit, i in sorted(pairs, key=lambda pair: pair[0].layer):
            alike[_shapes(self.batches[i]) if self.stack > 1 else None].append((unit, i))
        for together in alike.values():
            for start in range(0, len(together), self.stack):
                yield together[start : start + self.stack]


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


def _distance_from(unit: Unit) -> Callable[[Pair], int]:
    return lambda pair: abs(pair[0].layer - unit.layer)


def _predictions(batches: Sequence[Batch]) -> float:
    """How many predictions the loss of one row of a batch is the mean of: one, but of a text the tokens that count."""
    labels = [batch["labels"] for batch in batches if "labels" in batch and batch["labels"].dim() == 2]
    return max(1.0, sum(int((x != IGNORED).sum()) for x in labels) / sum(map(len, labels))) if labels else 1.0


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))
