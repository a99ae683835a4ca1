"""Where tasks are done: in this process, in others beside it, or on a Ray cluster. No record is written here."""

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

Item = TypeVar("Item")
Task = dict[str, Any]
Prepare = Callable[[Item], Task | None]
Outcome = dict[str, Any]  # {"records": [...]}, {"problem": sentence} or {"lost": reason}

LOCAL = "local"
TRIES = 3  # a task whose worker died is given to another, this often in all
WORK = "secateur.experiment.work"  # imported by whoever does the work: a driver of other machines needs no model


@dataclass(frozen=True)
class Where:
    """Who does the tasks: this process, `workers` others, or a Ray cluster at `ray`."""

    workers: int = 0
    ray: str = ""
    cpus: float = 1.0  # that a run on the cluster asks for
    gpus: float = 0.0
    threads: int = 0  # of each worker; 0: its share of the cores

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("cpus", 0), ("gpus", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise SettingError(f"The {name} are {getattr(self, name)}, but must be at least {least}.")
        if self.workers and self.ray:
            raise SettingError("Runs go to local workers or to a Ray cluster, not to both: give --workers or --ray.")


def perform_all(tasks: Sequence[Item], prepare: Prepare[Item], where: Where) -> Iterator[tuple[Item, Outcome]]:
    """Each item with the outcome of its task, as they end.

    A task is prepared when its turn comes, and not before; one that need not be done after all is None then.
    """
    if not tasks:
        return
    if where.ray:
        with contextlib.redirect_stdout(sys.stderr):  # Ray's own messages are no result
            yield from _in_pool(tasks, prepare, _Cluster(where))
    elif where.workers:
        yield from _in_pool(tasks, prepare, _Processes(where))
    else:
        for item in tasks:
            if task := prepare(item):
                yield item, _perform(WORK, task | {"threads": where.threads})


def _perform(work: str, task: Task) -> Outcome:
    outcome: Outcome = importlib.import_module(work).perform(task)
    return outcome


# Workers


class _LostError(Exception):
    """A worker died; the message says how."""


class _Pool(Protocol):
    """Workers of one kind. What start and tell return stands for the answer to come, and is used up by it."""

    room: int
    share: Task  # what each worker is told besides its task

    def start(self) -> tuple[Any, Any]: ...  # a worker, and its word that it is there
    def tell(self, worker: Any, task: Task) -> Any: ...
    def first(self, awaited: Iterable[Any]) -> Any: ...  # of the answers, one that has come
    def answer(self, worker: Any, awaited: Any) -> Outcome: ...  # or a _LostError
    def close(self) -> None: ...


def _in_pool(tasks: Sequence[Item], prepare: Prepare[Item], pool: _Pool) -> Iterator[tuple[Item, Outcome]]:
    """A task goes to a worker that has said it is there: none waits for one that a cluster has no room for."""
    waiting = list(tasks)[::-1]
    tries: Counter[int] = Counter()
    idle: list[Any] = []
    busy: dict[Any, tuple[Any, Item | None]] = {}  # by the answer: the worker, and what it does; None: it is starting
    stillborn = 0  # workers in a row that died before they were there

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
                    busy[pool.tell(worker, task | pool.share)] = worker, item
            if not waiting and all(item is None for _, item in busy.values()):
                return
            awaited = pool.first(busy)
            worker, done = busy.pop(awaited)
            try:
                outcome = pool.answer(worker, awaited)
            except _LostError as lost:
                start()
                if done is None:
                    stillborn += 1
                    if stillborn == TRIES:
                        raise SettingError(f"The workers die as they start, the last one with {lost}.") from lost
                elif tries[id(done)] < TRIES:
                    waiting.append(done)
                else:
                    yield done, {"lost": f"its worker was lost {TRIES} times, the last time with {lost}"}
                continue
            idle.append(worker)
            if done is None:
                stillborn = 0
            else:
                yield done, outcome


class _Processes:
    """Processes of this machine."""

    def __init__(self, where: Where) -> None:
        self.room = where.workers
        self.share = {"threads": where.threads or max(1, _cores() // where.workers), "memory_share": 1 / where.workers}
        self._workers: list[_Process] = []

    def start(self) -> tuple[_Process, Connection]:
        self._workers.append(_Process())
        return self._workers[-1], self._workers[-1].connection

    def tell(self, worker: _Process, task: Task) -> Connection:
        with contextlib.suppress(OSError):  # one that died meanwhile does not answer
            worker.connection.send(task)
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
            raise _LostError(f"exit code {worker.stop()}") from error
        return outcome

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


class _Process:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take torch's threads along, and they do not survive it
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(WORK, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def stop(self) -> int | None:
        """End the process, whatever it is doing; its exit code."""
        self.connection.close()
        self._process.join(0.2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _serve(work: str, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver is told, and stops its workers
    with contextlib.suppress(EOFError, BrokenPipeError):
        connection.send({})
        while True:
            connection.send(_perform(work, connection.recv()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Cluster:
    """Actors on a Ray cluster. Ray's plain tasks would have to load a model anew for each run that takes a GPU."""

    def __init__(self, where: Where) -> None:
        self._ray = ray = _joined(where.ray)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needs = [(name, wanted) for name, wanted in (("CPU", where.cpus), ("GPU", where.gpus)) if wanted]
        slots = [min((int(there.get(name, 0) // wanted) for name, wanted in needs), default=1) for there in nodes]
        self.room = sum(slots)
        if not self.room:
            ray.shutdown()
            most = " and ".join(f"{max((n.get(name, 0) for n in nodes), default=0):g} {name}s" for name in ("CPU", "GPU"))
            raise SettingError(
                f"A run asks for {where.cpus:g} CPUs and {where.gpus:g} GPUs, and no machine of the cluster has more than "
                f"{most}; ask for less with --cpus-per-run and --gpus-per-run."
            )
        share = min(1.0, where.gpus) if where.gpus else 1 / max(slots)  # of the memory of a GPU, or of a machine
        self.share = {"threads": where.threads or max(1, int(where.cpus)), "memory_share": share}
        self._actor = ray.remote(num_cpus=where.cpus, num_gpus=where.gpus)(_Actor)

    def start(self) -> tuple[Any, Any]:
        worker = self._actor.remote()
        return worker, worker.here.remote()

    def tell(self, worker: Any, task: Task) -> Any:
        return worker.perform.remote(WORK, task)

    def first(self, awaited: Iterable[Any]) -> Any:
        return self._ray.wait(list(awaited), num_returns=1)[0][0]

    def answer(self, worker: Any, awaited: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(awaited)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(worker)
            raise _LostError(f"{type(error).__name__}: {first_line(error)}") from error
        return outcome

    def close(self) -> None:
        self._ray.shutdown()


class _Actor:
    def here(self) -> Outcome:
        return {}

    def perform(self, work: str, task: Task) -> Outcome:
        return _perform(work, task)


def _joined(address: str) -> Any:
    """Ray, as part of the cluster at an address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for it to be told
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray", "Running a grid on a Ray cluster") from error
    try:
        if address == LOCAL:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        else:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (RuntimeError, ValueError, OSError) as error:
        raise SettingError(
            f"No Ray cluster answers at {address!r}: {first_line(error)} Start one with `ray start --head`, or take "
            "--ray local."
        ) from error
    return ray


def _knock(address: str) -> None:
    """Whether anybody answers there at all: Ray itself would go on asking for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ValueError("An address is HOST:PORT, ray://HOST:PORT or auto.")
    socket.create_connection((host, int(port)), timeout=5).close()
