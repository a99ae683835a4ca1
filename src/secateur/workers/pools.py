"""Pools of workers: processes of this machine, or actors on a Ray cluster. Knows no task and no model.

A worker imports the module `work` and calls its `perform(task, part)` for every task. The first task is the greeting, and the
answer to it says that the worker has started; without a greeting it just answers.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from secateur.errors import MissingExtra, SettingError, first_line
from secateur.workers.crew import Crew, WorkerLost

LOCAL = "local"
MOST = 1024  # of workers, and of threads, with very many of which torch dies as it starts them


@dataclass(frozen=True)
class Where:
    """Where tasks are done: in this process, in `workers` other processes, or on the Ray cluster at `ray`."""

    workers: int = 0
    ray: str = ""
    cpus: float = 1.0  # per worker on the cluster
    gpus: float = 0.0  # per worker on the cluster
    threads: int = 0  # per worker; 0: its share of the cores

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("cpus", 0), ("gpus", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise SettingError(f"The {name} are {getattr(self, name)}, but must be at least {least}.")
            if getattr(self, name) > MOST:
                raise SettingError(f"The {name} are {getattr(self, name)}, but must be at most {MOST}.")
        if self.workers and self.ray:
            raise SettingError("The work is done by local workers or on a Ray cluster, not both: give --workers or --ray.")


@dataclass(frozen=True)
class Part:
    """A worker's share of its machine."""

    threads: int = 0  # 0: torch decides
    memory: float = 1.0  # fraction of the free memory


@contextlib.contextmanager
def crew_at(where: Where, work: str, greeting: Any = None) -> Iterator[Crew]:
    """The workers that are asked for, while the block lasts. Each gets the greeting before anything else."""
    with contextlib.ExitStack() as stack:
        if where.ray:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray prints messages, but stdout is for results
        pool = (_Cluster if where.ray else _Processes)(where, work, greeting)
        yield stack.enter_context(contextlib.closing(Crew(pool)))


def perform_here(work: str, task: Any, part: Part) -> Any:
    """Do a task in this process."""
    return None if task is None else importlib.import_module(work).perform(task, part)


class _Processes:
    """Processes of this machine."""

    def __init__(self, where: Where, work: str, greeting: Any) -> None:
        self.room = where.workers
        self._part = Part(where.threads or max(1, _cores() // where.workers), 1 / where.workers)
        self._work, self._greeting = work, greeting
        self._workers: list[_Process] = []

    def start(self) -> tuple[_Process, Connection]:
        self._workers.append(_Process(self._work))
        return self._workers[-1], self.give(self._workers[-1], self._greeting)

    def give(self, worker: _Process, task: Any) -> Connection:
        with contextlib.suppress(OSError):  # if the worker has died, `answer` says so
            worker.connection.send((task, self._part))
        return worker.connection

    def first(self, awaited: Iterable[Connection]) -> Connection:
        connection = wait(list(awaited))[0]
        assert isinstance(connection, Connection)
        return connection

    def answer(self, worker: _Process, awaited: Connection) -> Any:
        try:
            return awaited.recv()
        except (EOFError, OSError) as error:
            self._workers.remove(worker)
            raise WorkerLost(f"exit code {worker.stop()}") from error

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


class _Process:
    def __init__(self, work: str) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self.connection, worker_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, worker_end), daemon=True)
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
    threading.Thread(target=_die_with_the_driver, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the driver has closed its end
        while True:
            connection.send(perform_here(work, *connection.recv()))


def _die_with_the_driver() -> None:
    """End this process, even if it is busy, when the driver has ended in any way."""
    driver = multiprocessing.parent_process()
    assert driver
    driver.join()
    os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Cluster:
    """Actors on a Ray cluster, which keep their model between tasks. Ray's plain tasks reload it for each run on a GPU."""

    def __init__(self, where: Where, work: str, greeting: Any) -> None:
        self._work, self._greeting = work, greeting
        self._ray = ray = _connect(where.ray)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needs = [(name, count) for name, count in (("CPU", where.cpus), ("GPU", where.gpus)) if count]
        slots = [min((int(node.get(name, 0) // count) for name, count in needs), default=1) for node in nodes]
        self.room = sum(slots)
        if not self.room:
            ray.shutdown()
            most = " and ".join(f"{max((node.get(name, 0) for node in nodes), default=0):g} {name}s" for name in ("CPU", "GPU"))
            raise SettingError(
                f"A worker asks for {where.cpus:g} CPUs and {where.gpus:g} GPUs, but no machine of the cluster has more than "
                f"{most}; ask for fewer of them."
            )
        share = min(1.0, where.gpus) if where.gpus else 1 / max(slots)  # of the memory of a GPU or of a machine
        self._part = Part(where.threads or max(1, int(where.cpus)), share)
        self._actor = ray.remote(num_cpus=where.cpus, num_gpus=where.gpus)(_Actor)
        self._folder = os.getcwd() if where.ray == LOCAL else ""

    def start(self) -> tuple[Any, Any]:
        worker = self._actor.remote(self._folder)
        return worker, self.give(worker, self._greeting)

    def give(self, worker: Any, task: Any) -> Any:
        return worker.perform.remote(self._work, task, self._part)

    def first(self, awaited: Iterable[Any]) -> Any:
        return self._ray.wait(list(awaited), num_returns=1)[0][0]

    def answer(self, worker: Any, awaited: Any) -> Any:
        try:
            return self._ray.get(awaited)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(worker)
            raise WorkerLost(f"{type(error).__name__}: {first_line(error)}") from error

    def close(self) -> None:
        self._ray.shutdown()


class _Actor:
    def __init__(self, folder: str) -> None:
        """Go to the driver's folder, if it is on this machine: relative paths of models and data begin there."""
        if folder:
            os.chdir(folder)

    def perform(self, work: str, task: Any, part: Part) -> Any:
        return perform_here(work, task, part)


def _connect(address: str) -> Any:
    """Connect to the Ray cluster at an address and return the module `ray`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no statistics leave this machine
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray", "Work on a Ray cluster") from error
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
