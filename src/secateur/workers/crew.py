"""Crew: gives tasks to the workers of a pool, request after request. Knows no task, no model, and no kind of worker.

A worker that dies is replaced, and its task is given to another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from secateur.errors import SettingError

Item = TypeVar("Item")

TRIES = 3  # how often a task is tried if its workers die


class WorkerLost(Exception):
    """A worker died; the message says how."""


class Pool(Protocol):
    """Workers of one kind. `start` and `give` return the handle of an answer to come, `awaited` below."""

    room: int

    def start(self) -> tuple[Any, Any]: ...  # a worker, and the handle of its answer that it has started
    def give(self, worker: Any, task: Any) -> Any: ...
    def first(self, awaited: Iterable[Any]) -> Any: ...  # the handle of an answer that has come
    def answer(self, worker: Any, awaited: Any) -> Any: ...  # raises WorkerLost if the worker died
    def close(self) -> None: ...


Prepare = Callable[[Item, Any], Any]
Pick = Callable[[Any, Sequence[Item]], int | None]


def in_order(worker: Any, waiting: Sequence[Any]) -> int | None:
    """The item that has waited longest."""
    return 0


class Crew:
    """The workers of a pool. They are started when there is work for them, and stay until the crew is closed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, Any]] = {}  # by handle: the worker and its item, or None if no item awaits the answer
        self._failed_starts = 0  # workers in a row that died before they had started

    @property
    def room(self) -> int:
        """How many workers there are at most."""
        return self._pool.room

    @property
    def workers(self) -> list[Any]:
        return [*self._idle, *(worker for worker, _ in self._busy.values())]

    def perform(self, items: Sequence[Item], prepare: Prepare[Item], pick: Pick[Item] = in_order) -> Iterator[tuple[Item, Any]]:
        """Do the task of each item; yield the item with the answer when it comes, or with a WorkerLost after three losses.

        `prepare` makes the task of an item for a worker just before it is given, or returns None if it need not be done. `pick`
        says which of the waiting items a worker gets next, or None if it is to wait. Tasks go only to workers that have
        started: a cluster may have no room for all. An answer that is an exception is raised.
        """
        waiting, tries = list(items), Counter[int]()
        for _ in range(min(self._pool.room, len(items)) - len(self.workers)):
            self._start()
        try:
            while True:
                self._hand_out(waiting, tries, prepare, pick)
                if not waiting and all(item is None for _, item in self._busy.values()):
                    return
                awaited = self._pool.first(self._busy)
                worker, item = self._busy.pop(awaited)
                try:
                    answer = self._pool.answer(worker, awaited)
                except WorkerLost as lost:
                    self._replace(item, lost)
                    if item is not None and tries[id(item)] < TRIES:
                        waiting.insert(0, item)
                    elif item is not None:
                        yield item, WorkerLost(f"its worker died {TRIES} times, the last time with {lost}")
                    continue
                self._idle.append(worker)
                if isinstance(answer, Exception):
                    raise answer
                if item is None:
                    self._failed_starts = 0
                else:
                    yield item, answer
        finally:
            self._busy = {awaited: (worker, None) for awaited, (worker, _) in self._busy.items()}

    def _hand_out(self, waiting: list[Item], tries: Counter[int], prepare: Prepare[Item], pick: Pick[Item]) -> None:
        """Give the idle workers what they are to do next."""
        for worker in list(self._idle):
            while waiting and (place := pick(worker, waiting)) is not None:
                item = waiting.pop(place)
                task = prepare(item, worker)
                if task is not None:
                    tries[id(item)] += 1
                    self._idle.remove(worker)
                    self._busy[self._pool.give(worker, task)] = worker, item
                    break

    def _start(self) -> None:
        worker, awaited = self._pool.start()
        self._busy[awaited] = worker, None

    def _replace(self, item: Any, lost: WorkerLost) -> None:
        """Start a worker in place of one that died of an item, or before it had started."""
        if item is None:
            self._failed_starts += 1
            if self._failed_starts == TRIES:
                raise SettingError(
                    f"The workers die as they start, the last one with {lost}; if memory runs out, try fewer of them."
                ) from lost
        self._start()

    def close(self) -> None:
        """End the workers, even if they are busy."""
        self._pool.close()
