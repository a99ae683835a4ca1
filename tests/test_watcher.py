from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import secateur as sc
from secateur.watcher import EVENTS, Followed, HealProgress, Progress, watcher_of
from worlds import World, small


class Heard(sc.Watcher):
    """Keeps every event with what it came with."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)
        return lambda *arguments: self.events.append((name, arguments))

    def of(self, name: str) -> list[Any]:
        return [arguments for event, arguments in self.events if event == name]


def test_several_watchers_hear_the_same_in_a_whole_prune(world: World, tmp_path: Path) -> None:
    first, second = Heard(), Heard()
    settings = small({"layout": "free", "measure": False, "repair": "auto"})
    result = sc.prune(
        str(world.image_model), calibration=str(world.images), device="cpu", out=tmp_path, watcher=[first, second], **settings
    )
    assert first.events == second.events and result.cut
    pulls: list[Progress] = [progress for (progress,) in first.of("pull")]
    assert [(pull.unit, pull.damage) for pull in pulls] == [(pull.unit, pull.damage) for pull in result.selection.trace]
    assert tuple(step for step, _ in first.of("chosen")) == result.selection.steps
    judged = {"dense": result.record.judgement.dense, "zeroed": result.record.judgement.zeroed, "checkpoint": result.cut.shrunk}
    assert dict(first.of("judged")) == judged
    assert first.of("repaired") == [(result.cut.repair,)]


HEALED = HealProgress(1, 2, loss=0.5, before=0.7)


def test_a_watcher_may_be_one_or_several_or_none() -> None:
    one = sc.Watcher()
    assert watcher_of(one) is one and type(watcher_of(None)) is sc.Watcher
    heard = Heard(), Heard()
    watcher_of(heard).healed(HEALED)
    assert [one.events for one in heard] == [[("healed", (HEALED,))]] * 2


def test_a_watcher_that_overrides_nothing_takes_every_event() -> None:
    for event, arguments in {
        "stage": ("a",),
        "healed": (HEALED,),
        "judged": ("dense", None),
        "repaired": (None,),
    }.items():
        assert getattr(sc.Watcher(), event)(*arguments) is None


def test_a_loop_over_a_followed_sequence_reports_what_is_done() -> None:
    reports: list[tuple[int, int]] = []
    items = Followed("abc", lambda done, of: reports.append((done, of)))
    assert [*items] == ["a", "b", "c"] and reports == [(1, 3), (2, 3), (3, 3)]
    assert (len(items), items[1], items[:2]) == (3, "b", "ab")


def test_an_error_of_a_watcher_ends_the_run(world: World) -> None:
    class Broken(sc.Watcher):
        def stage(self, name: str) -> None:
            raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        sc.prune(str(world.text_model), calibration=str(world.text), device="cpu", watcher=Broken(), **small({}))
