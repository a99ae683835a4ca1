"""Spread: makes the runs of one search on many workers, each with its own copy of the model. The driver decides and writes.

A worker keeps the block outputs of the batches it has run, so that a batch goes to the same worker again. Another one takes
over a part of its runs where that is faster. No loss depends on who measured it. First the driver's side, then the worker's.
"""

from __future__ import annotations

import io
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from secateur.errors import ModelError, SecateurError, SettingError
from secateur.model.families import anatomy
from secateur.model.loading import Opened, digest, load_model
from secateur.model.losses import Batch, device_of, own_loss
from secateur.model.moments import Fills
from secateur.search.damage import Here, Made, Pair, Run, default_lanes, free_memory
from secateur.settings import DISTANCE, LABELS, MAP, Machine, Settings
from secateur.units import Unit
from secateur.workers.crew import Crew, Pick, WorkerLost, in_order
from secateur.workers.pools import Part, crew_at

WORK = "secateur.search.spread"  # the module that each worker imports
PARTS = 16  # tasks that a worker gets of a large request: few enough to hand out quickly, enough to end together
WORTHWHILE = 3  # runs of another worker from which on one takes over its batch: the base run costs as much as two of them


@dataclass(frozen=True)
class Opening:
    """The first thing that a worker is told: the model to load."""

    model: str
    digest: str
    device: str
    dtype: str
    trust_remote_code: bool
    loss: str | None
    lanes: int
    cache_memory: int | None  # of all workers of a machine
    fills: bytes | None = None  # what stands in for removed channels, packed


@dataclass(frozen=True)
class Ask:
    """Runs to be made, or a batch whose gradients are to be taken, under the committed units."""

    committed: tuple[Unit, ...]
    wanted: frozenset[int] | None  # batches whose block outputs are best kept; None: all
    batches: frozenset[int]  # that are used
    runs: tuple[Run, ...] = ()
    kinds: Set[str] = frozenset()  # sides of the blocks for whose units block outputs are kept
    slopes: tuple[Unit, ...] = ()
    sent: Mapping[int, bytes] = field(default_factory=dict)  # batches that the worker does not have yet


@dataclass(frozen=True)
class Answer:
    """What was asked: the losses of the runs, or the gradients of the batch."""

    base: dict[int, float]
    masked: dict[Pair, float]
    gradients: Any = None  # as a numpy array
    cache_was_full: bool = False


class Spread:
    """A runner on many workers; they are started with the first runs."""

    def __init__(
        self,
        opened: Opened,
        batches: Sequence[Batch],
        settings: Settings,
        machine: Machine,
        fills: Fills | None = None,
    ) -> None:
        if opened.loss and settings.loss in (None, LABELS, DISTANCE):
            raise SettingError("A loss that is a function cannot be sent to workers: name it, as module:function.")
        share = int(machine.cpus_per_worker) if machine.ray else torch.get_num_threads() // machine.workers
        experts = any(layer.experts for layer in anatomy(opened.model))  # with them, bits depend on threads (default_lanes)
        threads = torch.get_num_threads() if experts else max(1, share)
        self._where = replace(machine.where, threads=threads)
        lanes = machine.lanes or (default_lanes(opened.model) if threads > 1 else 1)
        self._batches, self._lanes = batches, lanes
        self._opening = Opening(
            model=opened.name,
            digest=opened.digest,
            device=MAP if settings.device == MAP else device_of(opened.model).type,
            dtype=opened.dtype,
            trust_remote_code=opened.trust_remote_code,
            loss=settings.loss,
            lanes=lanes,
            cache_memory=machine.cache_memory,
            fills=_packed(fills.state()) if fills else None,
        )
        self._stack = ExitStack()
        self._crew: Crew | None = None
        self._committed: tuple[Unit, ...] = ()
        self._wanted: frozenset[int] | None = None
        self._sent: dict[Any, set[int]] = defaultdict(set)  # by worker: the batches that it has
        self._held: dict[Any, set[int]] = defaultdict(set)  # by worker: the batches whose block outputs it keeps
        self.cache_was_full = False
        self.cached_bytes = 0  # in this process

    def make(self, rounds: Iterable[Sequence[Run]], known: Mapping[int, float], kinds: Set[str]) -> Iterator[Made]:
        wanted = list(rounds)
        tasks = self._together(wanted, self._started().room)
        asks = [self._ask({i for run in runs for _, i in run}, runs=tuple(runs), kinds=kinds) for runs in tasks]
        answers = self._answers(asks, self._pick)
        arrived: set[Pair] = set()
        for runs in wanted:
            new = Made({}, {})
            while not arrived.issuperset(pair for run in runs for pair in run):
                _, answer = next(answers)
                new.base.update(answer.base)
                new.masked.update(answer.masked)
                arrived |= answer.masked.keys()
            yield new

    def gradients(self, units: Sequence[Unit], batches: Sequence[int]) -> Tensor:
        asks = [self._ask({i}, slopes=tuple(units)) for i in batches]
        found = {id(ask): torch.from_numpy(answer.gradients) for ask, answer in self._answers(asks, in_order)}
        return torch.cat([found[id(ask)] for ask in asks])

    def commit(self, unit: Unit) -> None:
        self._committed += (unit,)

    def want(self, batches: frozenset[int]) -> None:
        self._wanted = batches

    def close(self) -> None:
        self._stack.close()
        self._crew = None

    def _together(self, rounds: Iterable[Sequence[Run]], workers: int) -> list[list[Run]]:
        """The runs in order, in tasks on the same batches: as many as go side by side, or more of a large request."""
        runs = [run for runs in rounds for run in runs]
        size = self._lanes * max(1, len(runs) // (self._lanes * PARTS * workers))
        tasks: list[list[Run]] = []
        unfilled: dict[frozenset[int], list[Run]] = {}
        for run in runs:
            on = frozenset(i for _, i in run)
            if on not in unfilled or len(unfilled[on]) == size:
                unfilled[on] = []
                tasks.append(unfilled[on])
            unfilled[on].append(run)
        return tasks

    def _ask(self, batches: Iterable[int], **what: Any) -> Ask:
        return Ask(self._committed, self._wanted, frozenset(batches), **what)

    def _started(self) -> Crew:
        if self._crew is None:
            self._crew = self._stack.enter_context(crew_at(self._where, WORK, self._opening))
        return self._crew

    def _answers(self, asks: Sequence[Ask], pick: Pick[Ask]) -> Iterator[tuple[Ask, Answer]]:
        for ask, answer in self._started().perform(asks, self._with_batches, pick):
            if isinstance(answer, WorkerLost):
                raise SettingError(
                    f"A measurement cannot be made: {answer}. If memory runs out, try fewer workers or less --cache-memory."
                )
            self.cache_was_full |= answer.cache_was_full
            yield ask, answer

    def _with_batches(self, ask: Ask, worker: Any) -> Ask:
        """The same with the batches that the worker does not have."""
        new = ask.batches - self._sent[worker]
        self._sent[worker] |= new
        if ask.runs:
            self._held[worker] |= ask.batches
        return replace(ask, sent={i: _packed(self._batches[i]) for i in new})

    def _pick(self, worker: Any, waiting: Sequence[Ask]) -> int | None:
        """What a worker does next: runs on batches it keeps, then on batches nobody keeps, then a part of another one's."""
        assert self._crew
        own = self._held[worker]
        for place, ask in enumerate(waiting):
            if ask.batches <= own:
                return place
        others = [self._held[other] for other in self._crew.workers if other is not worker]
        runs = Counter[frozenset[int]]()  # that wait, by their batches
        for ask in waiting:
            runs[ask.batches] += len(ask.runs)
        keepers = {batches: {i for i, held in enumerate(others) if batches <= held} for batches in runs}
        if not all(keepers.values()):
            return next(place for place, ask in enumerate(waiting) if not keepers[ask.batches])
        loads = Counter[int]()
        for batches, n in runs.items():
            loads.update(dict.fromkeys(keepers[batches], n))
        busiest, load = loads.most_common(1)[0]
        if load < WORTHWHILE:
            return None
        return max(place for place, ask in enumerate(waiting) if busiest in keepers[ask.batches])


def _packed(batch: Batch) -> bytes:
    file = io.BytesIO()
    own = {name: tensor.detach().cpu().clone() for name, tensor in batch.items()}  # a view would bring all that is behind it
    torch.save(own, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> dict[str, Tensor]:
    unpacked: dict[str, Tensor] = torch.load(io.BytesIO(packed), weights_only=True)
    return unpacked


# The worker's side


class Desk:
    """What a worker has: the model, the batches that it was sent, and their base losses under the committed units."""

    def __init__(self, opening: Opening, part: Part) -> None:
        if part.threads:
            torch.set_num_threads(part.threads)
        loss = own_loss(opening.loss)
        model = load_model(
            opening.model, device=opening.device, dtype=opening.dtype, trust_remote_code=opening.trust_remote_code
        )
        if digest(model) != opening.digest:
            raise ModelError(
                f"A worker finds other weights under the name {opening.model!r} than the driver has: put the same files there."
            )
        memory = free_memory(device_of(model)) // 2 if opening.cache_memory is None else opening.cache_memory
        self._batches: dict[int, Batch] = {}
        self._base: dict[int, float] = {}
        fills = Fills.of_state(anatomy(model), _unpacked(opening.fills)) if opening.fills else None
        self._runner = Here(model, self._batches, loss, opening.lanes, int(memory * part.memory), fills)

    def answer(self, ask: Ask) -> Answer:
        for i, packed in ask.sent.items():
            self._batches[i] = _unpacked(packed)
        for unit in ask.committed[len(self._runner.committed) :]:
            self._runner.commit(unit)
            self._base.clear()
        if ask.wanted is not None:
            self._runner.want(ask.wanted)
        if ask.slopes:
            return Answer({}, {}, self._runner.gradients(ask.slopes, list(ask.batches)).numpy())
        (made,) = self._runner.make([ask.runs], self._base, ask.kinds)
        self._base.update(made.base)
        return Answer({i: self._base[i] for i in ask.batches}, made.masked, cache_was_full=self._runner.cache_was_full)


_desk: Desk | None = None


def perform(task: Opening | Ask, part: Part) -> Answer | Exception | None:
    """Do what the driver asks; an error is an answer."""
    global _desk
    try:
        if isinstance(task, Opening):
            _desk = Desk(task, part)
            return None
        assert _desk
        return _desk.answer(task)
    except SecateurError as error:
        return error
    except Exception:  # a worker that died of a fault of ours would be replaced three times, and the fault be lost
        return RuntimeError(f"A worker failed:\n{traceback.format_exc()}")
