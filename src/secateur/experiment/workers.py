"""Workers: do tasks in this process, in other processes, or on a Ray cluster. Writes no record and loads no model."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

from secateur.errors import MissingExtra, SettingError, first_line
from secateur.experiment.store import Record
from secateur.judgement import Evaluation
from secateur.settings import Judging, Settings
from secateur.units import Unit

Item = TypeVar("Item")

LOCAL = "local"
MOST = 1024  # of workers, and of threads, with very many of which torch dies as it starts them
TRIES = 3  # how often a task is tried if its workers die
WORK = "secateur.experiment.work"  # the module that performs a task; each worker imports it


@dataclass(frozen=True)
class Where:
    """Where tasks are done: in this process, in `workers` other processes, or on the Ray cluster at `ray`."""

    workers: int = 0
    ray: str = ""
    cpus: float = 1.0  # per run on the cluster
    gpus: float = 0.0  # per run on the cluster
    threads: int = 0  # per worker; 0: its share of the cores

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("cpus", 0), ("gpus", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise SettingError(f"The {name} are {getattr(self, name)}, but must be at least {least}.")
            if getattr(self, name) > MOST:
                raise SettingError(f"The {name} are {getattr(self, name)}, but must be at most {MOST}.")
        if self.workers and self.ray:
            raise SettingError("Runs are done by local workers or on a Ray cluster, not both: give --workers or --ray.")


@dataclass(frozen=True)
class KnownChoice:
    """A choice of units and what it cost, from the store or newly made."""

    units: tuple[Unit, ...]
    pulls: int
    forwards: int
    nonfinite_pulls: int
    score_passes: int
    selection_seconds: float


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
class Part:
    """A worker's share of its machine."""

    threads: int = 0  # 0: torch decides
    memory: float = 1.0  # fraction of the free memory


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
    if not tasks:
        return
    if where.ray:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints messages, but stdout is for results
            yield from perform_in_pool(tasks, prepare, _Cluster(where))
    elif where.workers:
        yield from perform_in_pool(tasks, prepare, _Processes(where))
    else:
        for item in tasks:
            if task := prepare(item):
                yield item, _perform(WORK, task, Part(where.threads))


def _perform(work: str, task: Task, part: Part) -> Outcome:
    outcome: Outcome = importlib.import_module(work).perform(task, part)
    return outcome


# Workers


class WorkerLost(Exception):
    """A worker died; the message says how."""


class Pool(Protocol):
    """Workers of one kind. `start` and `give` return the handle of an answer to come, `awaited` below."""

    room: int
    part: Part  # each worker's

    def start(self) -> tuple[Any, Any]: ...  # a worker, and the handle of its answer that it has started
    def give(self, worker: Any, task: Task) -> Any: ...
    def first(self, awaited: Iterable[Any]) -> Any: ...  # the handle of an answer that has come
    def answer(self, worker: Any, awaited: Any) -> Outcome: ...  # raises WorkerLost if the worker died
    def close(self) -> None: ...


def perform_in_pool(tasks: Sequence[Item], prepare: Prepare[Item], pool: Pool) -> Iterator[tuple[Item, Outcome]]:
    """As `perform_all`, in a pool. Tasks go only to workers that have started: a cluster may have no room for all."""
    waiting = list(tasks)[::-1]
    tries: Counter[int] = Counter()
    idle: list[Any] = []
    busy: dict[Any, tuple[Any, Item | None]] = {}  # by handle: the worker and its item, or None while it starts
    failed_starts = 0  # workers in a row that died before they had started

    def start() -> None:
        worker, awaited = pool.start()
        busy[awaited] = worker, None

    with contextlib.closing(pool):
        for _ in range(min(pool.room, len(tasks))):
            start()
        while True:
            while waiting and idle:
                item = waiting.pop()
                if task := prepare(item):
                    tries[id(item)] += 1
                    worker = idle.pop()
                    busy[pool.give(worker, task)] = worker, item
            if not waiting and all(item is None for _, item in busy.values()):
                return
            awaited = pool.first(busy)
            worker, ended = busy.pop(awaited)
            try:
                outcome = pool.answer(worker, awaited)
            except WorkerLost as lost:
                start()
                if ended is None:
                    failed_starts += 1
                    if failed_starts == TRIES:
                        raise SettingError(f"The workers die as they start, the last one with {lost}.") from lost
                elif tries[id(ended)] < TRIES:
                    waiting.append(ended)
                else:
                    yield ended, Outcome(lost=f"its worker died {TRIES} times, the last time with {lost}")
                continue
            idle.append(worker)
            if ended is None:
                failed_starts = 0
            else:
                yield ended, outcome


class _Processes:
    """Processes of this machine."""

    def __init__(self, where: Where) -> None:
        self.room = where.workers
        self.part = Part(where.threads or max(1, _cores() // where.workers), 1 / where.workers)
        self._workers: list[_Process] = []

    def start(self) -> tuple[_Process, Connection]:
        self._workers.append(_Process())
        return self._workers[-1], self._workers[-1].connection

    def give(self, worker: _Process, task: Task) -> Connection:
        with contextlib.suppress(OSError):  # if the worker has died, `answer` says so
            worker.connection.send((task, self.part))
        return worker.connection

    def first(self, awaited: Iterable[Connection]) -> Connection:
        connection = wait(list(awaited))[0]
        assert isinstance(connection, Connection)
        return connection

    def answer(self, worker: _Process, awaited: Connection) -> Outcome:
        try:
            outcome: Outcome = awaited.recv()
        except (EOFError, OSError) as error:
            self._workers.remove(worker)
            raise WorkerLost(f"exit code {worker.stop()}") from error
        return outcome

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


class _Process:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self.connection, worker_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(WORK, worker_end), daemon=True)
        with _safe_path():
            self._process.start()
        worker_end.close()

    def stop(self) -> int | None:
        """End the process, even if it is busy, and return its exit code."""
        self.connection.close()
        self._process.join(0.2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """While the block lasts, Python processes that start import nothing from the working directory, as with `python -P`.

    They are started with `python -c`, which would look for the standard library there first.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _serve(work: str, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the driver, which stops its workers
    with contextlib.suppress(EOFError, BrokenPipeError):
        connection.send(Outcome())
        while True:
            connection.send(_perform(work, *connection.recv()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Cluster:
    """Actors on a Ray cluster, which keep their model between tasks. Ray's plain tasks reload it for each run on a GPU."""

    def __init__(self, where: Where) -> None:
        self._ray = ray = _connect(where.ray)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needs = [(name, count) for name, count in (("CPU", where.cpus), ("GPU", where.gpus)) if count]
        slots = [min((int(node.get(name, 0) // count) for name, count in needs), default=1) for node in nodes]
        self.room = sum(slots)
        if not self.room:
            ray.shutdown()
            most = " and ".join(f"{max((node.get(name, 0) for node in nodes), default=0):g} {name}s" for name in ("CPU", "GPU"))
            raise SettingError(
                f"A run asks for {where.cpus:g} CPUs and {where.gpus:g} GPUs, but no machine of the cluster has more than "
                f"{most}; ask for less with --cpus-per-run and --gpus-per-run."
            )
        share = min(1.0, where.gpus) if where.gpus else 1 / max(slots)  # of the memory of a GPU or of a machine
        self.part = Part(where.threads or max(1, int(where.cpus)), share)
        self._actor = ray.remote(num_cpus=where.cpus, num_gpus=where.gpus)(_Actor)
        self._folder = os.getcwd() if where.ray == LOCAL else ""

    def start(self) -> tuple[Any, Any]:
        worker = self._actor.remote()
        return worker, worker.ready.remote(self._folder)

    def give(self, worker: Any, task: Task) -> Any:
        return worker.perform.remote(WORK, task, self.part)

    def first(self, awaited: Iterable[Any]) -> Any:
        return self._ray.wait(list(awaited), num_returns=1)[0][0]

    def answer(self, worker: Any, awaited: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(awaited)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(worker)
            raise WorkerLost(f"{type(error).__name__}: {first_line(error)}") from error
        return outcome

    def close(self) -> None:
        self._ray.shutdown()


class _Actor:
    def ready(self, folder: str) -> Outcome:
        """Go to the driver's folder, if it is on this machine: relative paths of models and data begin there."""
        if folder:
            os.chdir(folder)
        return Outcome()

    def perform(self, work: str, task: Task, part: Part) -> Outcome:
        return _perform(work, task, part)


def _connect(address: str) -> Any:
    """Connect to the Ray cluster at an address and return the module `ray`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no statistics leave this machine
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray", "Running a grid on a Ray cluster") from error
    try:
        if address != LOCAL:
            _check_reachable(address)
        # Ray lets its workers import from the folder in which it is started; in the root only an administrator can put files.
        with contextlib.chdir(os.path.abspath(os.sep)):
            if address == LOCAL:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            else:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # a node that does not start in time is a bare one
        raise SettingError(
            f"No Ray cluster answers at {address!r}: {first_line(error)} Start one with `ray start --head`, or use --ray local."
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing answers: Ray itself would keep trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ValueError("The address must be HOST:PORT, ray://HOST:PORT or auto.")
    socket.create_connection((host, int(port)), timeout=5).close()
