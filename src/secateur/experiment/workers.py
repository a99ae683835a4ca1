"""The tasks of a grid, done in this process, in other processes, or on a Ray cluster. Writes no record and loads no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from secateur.experiment.store import Record
from secateur.judgement import Evaluation
from secateur.settings import Judging, Settings
from secateur.units import Unit
from secateur.workers.crew import WorkerLost
from secateur.workers.pools import Part, Where, crew_at, perform_here

Item = TypeVar("Item")

WORK = "secateur.experiment.work"  # the module that performs a task; each worker imports it


@dataclass(frozen=True)
class KnownChoice:
    """A choice of units and what it cost, from the store or newly made."""

    units: tuple[Unit, ...]
    pulls: int
    forwards: int
    nonfinite_pulls: int
    score_passes: int
    selection_seconds: float
    passes: float | None = None
    pass_flops: float | None = None
    progress: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class KnownBase:
    """The dense model's evaluation from the store, with digests of the model and the data to check."""

    dense: Evaluation
    model_digest: str
    data_digest: str


@dataclass(frozen=True)
class TaskRun:
    """One run of a task: the keys of its record, and the data that judge it."""

    key: str
    base_key: str
    model: str
    data: str
    seed: int | None
    judging: Judging
    base: KnownBase | None = None


@dataclass(frozen=True)
class Task:
    """The settings of one choice of units, and the runs that judge it."""

    grid: str
    task: str
    settings: Settings
    choice_key: str
    runs: tuple[TaskRun, ...]
    choice: KnownChoice | None = None
    model_digest: str | None = None  # weights that the store's choice was made with
    calibration_digest: str | None = None  # calibration data that the store's records were made with
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a task: a record for each run, or a problem that kept it from starting, or how its worker died."""

    records: tuple[Record, ...] = ()
    problem: str = ""
    lost: str = ""
    remarks: tuple[str, ...] = ()  # about the data that were read for it


Prepare = Callable[[Item], Task | None]


def perform_all(tasks: Sequence[Item], prepare: Prepare[Item], where: Where) -> Iterator[tuple[Item, Outcome]]:
    """Do the task of each item, and yield the item with the outcome of its task when it ends.

    `prepare` makes the task of an item just before it is done, or returns None if it need not be done.
    """
    if not where.ray and not where.workers:
        for item in tasks:
            if task := prepare(item):
                yield item, perform_here(WORK, task, Part(where.threads))
        return
    if tasks:
        with crew_at(where, WORK) as crew:
            for item, answer in crew.perform(tasks, lambda item, worker: prepare(item)):
                yield item, Outcome(lost=str(answer)) if isinstance(answer, WorkerLost) else answer
