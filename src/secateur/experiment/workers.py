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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

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
    if where.ray:
        with contextlib.redirect_stdout(sys.stderr):  # Ray's own messages are no result
            yield from _on_ray(tasks, prepare, where)
    elif where.workers:
        yield from _in_processes(tasks, prepare, where)
    else:
        for item in tasks:
            if task := prepare(item):
                yield item, _perform(WORK, task | {"threads": where.threads})


def _perform(work: str, task: Task) -> Outcome:
    outcome: Outcome = importlib.import_module(work).perform(task)
    return outcome


# Processes


def _in_processes(tasks: Sequence[Item], prepare: Prepare[Item], where: Where) -> Iterator[tuple[Item, Outcome]]:
    count = min(where.workers, len(tasks))
    share = {"threads": where.threads or max(1, _cores() // where.workers), "memory_share": 1 / where.workers}
    waiting = list(tasks)[::-1]
    tries: Counter[int] = Counter()
    idle = [_Worker() for _ in range(count)]
    busy: dict[Connection, tuple[_Worker, Item]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                item = waiting.pop()
                if task := prepare(item):
                    worker = idle.pop()
                    tries[id(item)] += 1
                    busy[worker.connection] = worker, item
                    with contextlib.suppress(OSError):  # one that died meanwhile is found out below
                        worker.connection.send(task | share)
            for connection in wait(list(busy)) if busy else ():
                assert isinstance(connection, Connection)
                worker, item = busy.pop(connection)
                try:
                    outcome = connection.recv()
                except (EOFError, OSError):
                    code = worker.stop()
                    idle.append(_Worker())
                    if tries[id(item)] < TRIES:
                        waiting.append(item)
                    else:
                        yield item, {"lost": f"its worker was lost {TRIES} times, the last time with exit code {code}"}
                    continue
                idle.append(worker)
                yield item, outcome
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.stop()


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take torch's threads along, and they do not survive it
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(WORK, theirs), daemon=True)
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
        while True:
            connection.send(_perform(work, connection.recv()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Ray


def _on_ray(tasks: Sequence[Item], prepare: Prepare[Item], where: Where) -> Iterator[tuple[Item, Outcome]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for it to be told
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray", "Running a grid on a Ray cluster") from error
    try:
        if where.ray == LOCAL:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        else:
            _knock(where.ray)
            ray.init(address=where.ray, log_to_driver=False, logging_level="ERROR")
    except (RuntimeError, ValueError, OSError) as error:
        raise SettingError(
            f"No Ray cluster answers at {where.ray!r}: {first_line(error)} Start one with `ray start --head`, or take --ray "
            "local."
        ) from error
    try:
        there = ray.cluster_resources()
        slots = [there.get(name, 0) // wanted for name, wanted in (("CPU", where.cpus), ("GPU", where.gpus)) if wanted]
        if not (n_slots := int(min(slots, default=1))):
            raise SettingError(
                f"A run asks for {where.cpus:g} CPUs and {where.gpus:g} GPUs, and the cluster has {there.get('CPU', 0):g} and "
                f"{there.get('GPU', 0):g}; ask for less with --cpus-per-run and --gpus-per-run."
            )
        share = {"threads": where.threads or max(1, int(where.cpus)), "memory_share": min(1.0, 1 / n_slots)}
        # Ray gives a task whose worker died to another one; workers live on, and keep what they loaded, from task to task.
        remote = ray.remote(num_cpus=where.cpus, num_gpus=where.gpus, max_retries=TRIES - 1)(_perform)
        waiting = list(tasks)[::-1]
        busy: dict[Any, Item] = {}
        while waiting or busy:
            while waiting and len(busy) < n_slots:
                item = waiting.pop()
                if task := prepare(item):
                    busy[remote.remote(WORK, task | share)] = item
            if not busy:
                break
            (ready,), _ = ray.wait(list(busy), num_returns=1)
            item = busy.pop(ready)
            try:
                yield item, ray.get(ready)
            except ray.exceptions.RayError as error:
                yield item, {"lost": f"its worker was lost {TRIES} times: {first_line(error)}"}
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Whether anybody answers there at all: Ray itself would go on asking for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ValueError("An address is HOST:PORT, ray://HOST:PORT or auto.")
    socket.create_connection((host, int(port)), timeout=5).close()
