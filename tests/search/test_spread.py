"""One search on many workers: the same to the byte as on none. Here the workers live in this process, behind a pickle."""

from __future__ import annotations

import pickle
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import secateur as sc
from fakes import written
from secateur.data.batches import Batches
from secateur.errors import ModelError, SettingError
from secateur.model.losses import batch_loss
from secateur.search import spread
from secateur.search.choose import choose_units, meter_of
from secateur.search.spread import Ask, Desk, Opening
from secateur.settings import Machine, Settings, make_job
from secateur.steps import calibration_of, open_job, select_to
from secateur.watcher import Progress, Watcher
from secateur.workers.crew import TRIES, Crew, WorkerLost
from secateur.workers.pools import Part, Where
from worlds import SMALL, Listener, World, one_sentence


class Desks:
    """A pool of workers in this process, which answer in any order; `deaths` of them die of a task, after some answers."""

    def __init__(self, room: int, opening: Opening, deaths: int, after: int = 5) -> None:
        self.room = room
        self.started = 0
        self.closed = False
        self.asks: list[tuple[int, Ask]] = []  # a worker, and what it was asked
        self.opening, self._deaths, self._after = opening, deaths, after
        self._tasks: dict[int, Any] = {}
        self._desks: dict[int, Desk | None] = {}
        self._rng = np.random.default_rng(0)
        self._handles = count()

    def start(self) -> tuple[int, int]:
        self.started += 1
        return self.started, self.give(self.started, self.opening)

    def give(self, worker: int, task: Any) -> int:
        handle = next(self._handles)
        self._tasks[handle] = pickle.loads(pickle.dumps(task))
        return handle

    def first(self, awaited: Iterable[int]) -> int:
        return int(self._rng.choice(list(awaited)))

    def answer(self, worker: int, awaited: int) -> Any:
        task = self._tasks.pop(awaited)
        if isinstance(task, Ask) and self._deaths and len(self.asks) >= self._after:
            self._deaths -= 1
            raise WorkerLost("exit code -9")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spread, "_desk", self._desks.get(worker))
            answer = spread.perform(task, Part(memory=1 / self.room))
            self._desks[worker] = spread._desk
        if isinstance(task, Ask):
            self.asks.append((worker, task))
        return pickle.loads(pickle.dumps(answer))

    def close(self) -> None:
        self.closed = True


@dataclass
class Hall:
    """The pools that were made, and how many workers of the next one die."""

    pools: list[Desks] = field(default_factory=list)
    deaths: int = 0

    @contextmanager
    def crew_at(self, where: Where, work: str, greeting: Any) -> Iterator[Crew]:
        self.pools.append(Desks(where.workers, greeting, self.deaths))
        with closing(Crew(self.pools[-1])) as crew:
            yield crew


@pytest.fixture
def hall(monkeypatch: pytest.MonkeyPatch) -> Hall:
    """Workers of this process in place of others."""
    made = Hall()
    monkeypatch.setattr(spread, "crew_at", made.crew_at)
    return made


def opened_and_read(world: World, task: str = "text", **settings: Any) -> tuple[sc.Opened, Batches, Settings]:
    model, data = world.of(task)
    job = make_job(str(model), **SMALL | {"calibration": str(data), "device": "cpu"} | settings)
    opened, job = open_job(job, Watcher())
    return opened, calibration_of(opened, job.settings, Watcher()), job.settings


def chosen(world: World, machine: Machine | None = None, task: str = "text", **settings: Any) -> str:
    """The selection as text."""
    opened, batches, asked = opened_and_read(world, task, **settings)
    units = sc.candidate_units(opened.model, asked.target, asked.group_width)
    return written(choose_units(opened, batches, asked, units=units, machine=machine))


CASES: dict[str, dict[str, Any]] = {
    "ucb": {"method": "ucb"},
    "greedy": {"method": "greedy", "target": "both"},
    "few batches a step": {"method": "ucb", "batches_per_step": 3, "batches_per_pull": 2},
    "auto, with gradients": {"method": "auto", "pulls_per_step": 16},
    "gradients": {"method": "auto", "target": "mlp", "budget": "60forwards"},
    "the distance": {"method": "ts", "loss": "distance"},
    "images": {"method": "auto", "task": "image", "target": "both", "budget": "40pulls"},
    "after repair": {"method": "auto", "target": "both", "budget": "60forwards", "damage": "repaired"},
    "stacked": {"method": "greedy", "stack": 3, "target": "both", "pulls_per_step": 9},
}


@pytest.mark.parametrize("case", CASES)
def test_the_selection_is_the_same_to_the_byte_whatever_the_number_of_workers(case: str, world: World, hall: Hall) -> None:
    plain = chosen(world, **CASES[case])
    assert not hall.pools
    for workers in (1, 2, 5):
        assert chosen(world, Machine(workers=workers), **CASES[case]) == plain
        pool = hall.pools.pop()
        assert pool.asks and 1 <= pool.started <= workers


@pytest.mark.parametrize(
    "machine", [Machine(workers=2, lanes=2), Machine(workers=3, cache_memory=0)], ids=["lanes", "no cache"]
)
def test_lanes_and_the_cache_of_the_workers_change_nothing(machine: Machine, world: World, hall: Hall) -> None:
    settings: dict[str, Any] = {"method": "greedy", "target": "both", "pulls_per_step": 12}
    assert chosen(world, machine, **settings) == chosen(world, **settings)


def test_the_measurements_of_workers_that_die_are_asked_again(world: World, hall: Hall) -> None:
    plain = chosen(world, method="greedy", pulls_per_step=8)
    hall.deaths = TRIES - 1
    assert chosen(world, Machine(workers=2), method="greedy", pulls_per_step=8) == plain
    assert hall.pools[0].started == 2 + hall.deaths


def test_a_measurement_that_kills_its_workers_again_and_again_is_one_sentence(world: World, hall: Hall) -> None:
    hall.deaths = 10**6
    with pytest.raises(SettingError) as caught:
        chosen(world, Machine(workers=1), method="greedy")
    assert f"{TRIES} times" in one_sentence(caught, "exit code -9", "--cache-memory")


class Stopping(Watcher):
    def pull(self, progress: Progress) -> None:
        if (progress.step, progress.pull) == (1, 2):
            raise KeyboardInterrupt


def test_a_search_that_was_stopped_goes_on_with_other_workers_to_the_same_files(
    world: World, tmp_path: Path, hall: Hall
) -> None:
    def select(name: str, watcher: Watcher | None = None, **more: Any) -> bytes:
        given = SMALL | {"calibration": str(world.text), "device": "cpu", "method": "greedy"}
        select_to(str(world.text_model), tmp_path / name, watcher=watcher, **given | more)
        return (tmp_path / name).read_bytes() + (tmp_path / name).with_suffix(".journal.jsonl").read_bytes()

    whole = select("whole.json")
    with pytest.raises(KeyboardInterrupt):
        select("cut.json", Stopping(), workers=3)
    assert select("cut.json", workers=2) == whole
    again = len(hall.pools)
    (tmp_path / "cut.json").unlink()
    assert select("cut.json", workers=2) == whole
    assert len(hall.pools) == again, "workers were started for a search whose pulls are all in the journal"


def test_a_batch_is_sent_to_a_worker_once_and_stays_with_it_while_there_is_enough_to_do(world: World, hall: Hall) -> None:
    opened, batches, settings = opened_and_read(world)
    units = sc.candidate_units(opened.model, "head")
    with closing(meter_of(opened, batches, settings, Machine(workers=2, lanes=1))) as meter:
        for _ in range(2):
            list(meter.measure([(unit, (0, 1)) for unit in units]))
            meter.commit(units.pop())
    (pool,) = hall.pools
    for batch in (0, 1):
        sent = [worker for worker, ask in pool.asks if batch in ask.sent]
        assert len(sent) == len(set(sent)) >= 1
    for worker in (1, 2):
        runs = Counter(batch for who, ask in pool.asks for batch in ask.batches if who == worker)
        assert runs.most_common(1)[0][1] >= len(units), f"worker {worker} has no batch of its own: {runs}"


def test_more_workers_than_batches_share_the_runs_of_a_batch(world: World, hall: Hall) -> None:
    opened, batches, settings = opened_and_read(world, target="both")
    units = sc.candidate_units(opened.model, "both", settings.group_width)
    with closing(meter_of(opened, batches, settings, Machine(workers=4, lanes=1))) as meter:
        list(meter.measure([(unit, (0,)) for unit in units]))
    (pool,) = hall.pools
    assert {worker for worker, _ in pool.asks} == {1, 2, 3, 4}


def test_a_method_that_measures_nothing_starts_no_workers_and_says_so(world: World, hall: Hall) -> None:
    listener = Listener()
    opened, batches, settings = opened_and_read(world, method="magnitude")
    units = sc.candidate_units(opened.model, "head")
    choose_units(opened, batches, settings, units=units, machine=Machine(workers=2), watcher=listener)
    assert not hall.pools
    assert [sentence for sentence in listener.said if "magnitude" in sentence and "workers" in sentence]


def test_a_dry_run_measures_with_the_workers_and_says_how_many(world: World, hall: Hall) -> None:
    given = SMALL | {"calibration": str(world.text), "device": "cpu", "method": "greedy"}
    forecast = sc.forecast_of(str(world.text_model), workers=2, **given)
    assert forecast.settings["workers"] == 2 and "ray" not in forecast.settings
    (pool,) = hall.pools
    assert pool.started == 2 and pool.closed


# What a worker is told


def test_a_loss_of_the_user_s_own_is_found_by_its_name(world: World, tmp_path: Path, hall: Hall) -> None:
    file = tmp_path / "own.py"
    file.write_text("def loss(model, batch):\n    return model(input_ids=batch['input_ids']).logits.square().mean()\n")
    settings: dict[str, Any] = {"loss": f"{file}:loss", "method": "greedy"}
    assert chosen(world, Machine(workers=2), **settings) == chosen(world, **settings) != chosen(world, method="greedy")


def test_a_loss_without_a_name_is_refused(world: World, hall: Hall) -> None:
    opened, batches, settings = opened_and_read(world)
    with pytest.raises(SettingError, match="module:function"):
        meter_of(replace(opened, loss=batch_loss), batches, settings, Machine(workers=2))
    assert not hall.pools


def test_workers_get_the_device_the_dtype_the_lanes_and_their_share_of_the_cache(world: World, hall: Hall) -> None:
    opened, batches, settings = opened_and_read(world, dtype="bfloat16")
    unit = sc.candidate_units(opened.model, "head")[0]
    machine = Machine(workers=2, lanes=3, cache_memory=3000)
    with closing(meter_of(replace(opened, trust_remote_code=True), batches, settings, machine)) as meter:
        list(meter.measure([(unit, (0, 1))]))
        assert meter.cache_was_full  # 1500 bytes for each worker hold no batch
    opening = hall.pools[0].opening
    assert (opening.device, opening.dtype, opening.lanes, opening.trust_remote_code) == ("cpu", "bfloat16", 3, True)
    with closing(meter_of(opened, batches, replace(settings, device="map"), machine)) as meter:
        list(meter.measure([(unit, (0, 1))]))
    assert hall.pools[1].opening.device == "map"


def test_a_worker_that_finds_no_model_or_another_one_is_one_sentence(world: World, tmp_path: Path, hall: Hall) -> None:
    folder = Path(shutil.copytree(world.text_model, tmp_path / "model"))
    opened, batches, settings = opened_and_read(replace(world, text_model=folder))
    unit = sc.candidate_units(opened.model, "head")[0]
    machine = Machine(workers=1)
    with torch.no_grad():
        next(opened.model.parameters()).add_(1)
    with closing(meter_of(opened, batches, settings, machine)) as meter, pytest.raises(ModelError) as caught:
        list(meter.measure([(unit, (0,))]))
    assert "other weights" in one_sentence(caught, folder)
    shutil.rmtree(folder)
    with closing(meter_of(opened, batches, settings, machine)) as meter, pytest.raises(ModelError) as caught:
        list(meter.measure([(unit, (0,))]))
    one_sentence(caught, folder)


def test_what_breaks_in_a_worker_is_told_with_its_traceback(world: World, hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, batches, settings = opened_and_read(world)
    monkeypatch.setattr(Desk, "answer", lambda desk, ask: 1 // 0)
    meter = meter_of(opened, batches, settings, Machine(workers=1))
    with closing(meter), pytest.raises(RuntimeError, match=r"(?s)worker.*Traceback.*ZeroDivisionError"):
        list(meter.measure([(sc.Unit("head", 0, 1), (0,))]))
