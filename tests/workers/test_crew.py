from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

import pytest

from secateur.errors import ModelError, SettingError
from secateur.workers.crew import TRIES, Crew, WorkerLost


class FakePool:
    """Workers that die as they start or of their first task, never come, fail, or answer with the task at once."""

    def __init__(self, *fates: str) -> None:
        self.room = len(fates)
        self.closed = False
        self.started = 0
        self._fates = iter(fates)
        self._n_answers = 0
        self._tasks: dict[str, Any] = {}

    def start(self) -> tuple[str, str]:
        self.started += 1
        fate = next(self._fates, "works" if self.started > TRIES + self.room else "dies")
        return f"{fate} {self.started}", self._answer_of(f"{fate} {self.started}", None)

    def give(self, worker: str, task: Any) -> str:
        return self._answer_of(worker, task)

    def first(self, awaited: Iterable[str]) -> str:
        return next(answer for answer in awaited if not answer.startswith("never"))

    def answer(self, worker: str, awaited: str) -> Any:
        task = self._tasks.pop(awaited)
        if worker.startswith("dies") or (worker.startswith("falls") and task):
            raise WorkerLost("exit code 1")
        return ModelError("no such model") if worker.startswith("fails") else task

    def close(self) -> None:
        self.closed = True

    def _answer_of(self, worker: str, task: Any) -> str:
        self._n_answers += 1
        self._tasks[f"{worker} {self._n_answers}"] = task
        return f"{worker} {self._n_answers}"


def task_of(item: str, worker: Any) -> str:
    return item.upper()


def test_no_task_waits_for_a_worker_that_does_not_come() -> None:
    pool = FakePool("never", "works")
    with closing(Crew(pool)) as crew:
        assert list(crew.perform(["a", "b", "c"], task_of)) == [("a", "A"), ("b", "B"), ("c", "C")]
    assert pool.closed


def test_a_task_that_need_not_be_done_when_its_turn_comes_is_left_out() -> None:
    crew = Crew(FakePool("works"))
    assert [item for item, _ in crew.perform(["a", "b", "c"], lambda n, _: None if n == "b" else n)] == ["a", "c"]


def test_workers_that_all_die_as_they_start_are_an_error() -> None:
    with pytest.raises(SettingError, match=r"start.*exit code 1"):
        list(Crew(FakePool("dies", "dies")).perform(["a", "b", "c"], task_of))


def test_a_worker_that_dies_of_a_task_is_replaced_and_the_task_is_done() -> None:
    pool = FakePool("falls", "works")
    assert sorted(Crew(pool).perform(["a", "b", "c"], task_of)) == [("a", "A"), ("b", "B"), ("c", "C")]


def test_a_task_that_kills_every_worker_is_given_up_and_the_others_are_done() -> None:
    found = dict(Crew(FakePool(*["falls"] * TRIES)).perform(["a"], task_of))
    assert isinstance(found["a"], WorkerLost) and f"{TRIES} times" in str(found["a"])


def test_an_answer_that_is_an_error_is_raised() -> None:
    with pytest.raises(ModelError, match="no such model"):
        list(Crew(FakePool("fails")).perform(["a"], task_of))


def test_workers_are_started_when_there_is_work_for_them_and_stay_for_the_next_request() -> None:
    pool = FakePool("works", "works", "works")
    crew = Crew(pool)
    for items, workers in ((["a"], 1), (["b"], 1), (["c", "d", "e", "f"], 3), (["g", "h"], 3)):
        assert len(list(crew.perform(items, task_of))) == len(items)
        assert pool.started == len(crew.workers) == workers


def test_answers_that_nobody_waits_for_any_more_are_passed_over() -> None:
    crew = Crew(FakePool("works", "works"))
    assert next(crew.perform(["a", "b", "c"], task_of))
    assert sorted(crew.perform(["d", "e"], task_of)) == [("d", "D"), ("e", "E")]


def test_a_worker_gets_the_item_that_is_picked_for_it_or_none() -> None:
    given: list[tuple[str, str]] = []

    def prepare(item: str, worker: str) -> str:
        given.append((worker, item))
        return item

    def pick(worker: str, waiting: Any) -> int | None:
        return len(waiting) - 1 if worker == "works 1" else None

    crew = Crew(FakePool("works", "works"))
    assert [item for item, _ in crew.perform(["a", "b", "c"], prepare, pick)] == ["c", "b", "a"]
    assert given == [("works 1", item) for item in "cba"]
