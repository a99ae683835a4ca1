"""Watcher: follows a run. The command line draws its progress bars with one, and trackers log with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from secateur.selection import Step
from secateur.units import Unit

if TYPE_CHECKING:
    from secateur.cut.repair import Repair
    from secateur.judgement import Evaluation
    from secateur.measure.speed import Measurement

T = TypeVar("T")
Report = Callable[[int, int], None]  # gets how many parts of a stage are done, and of how many


@dataclass(frozen=True)
class Progress:
    """Where a search stands, after a pull."""

    step: int
    n_steps: int
    pull: int
    budget: int  # pulls that the step may spend
    best: Unit
    best_damage: float  # its mean damage in this step
    replayed: bool  # the pull comes from the journal of an earlier start
    unit: Unit  # the one that was measured
    damage: float  # as this pull measured it
    units: int = 1  # that the step chooses


@dataclass(frozen=True)
class GridProgress:
    """Where a grid stands, after a run."""

    done: int
    failed: int
    left: int
    seconds_left: float | None
    latest: str  # a sentence about the run that ended last


@dataclass(frozen=True)
class HealProgress:
    """Where a healing stands, after a step."""

    step: int
    n_steps: int
    loss: float  # the latest held-out divergence, and the labels' weighted loss
    before: float  # that before the first step
    judged: bool = False  # whether it is new


class Watcher:
    """Follows a run; this one does nothing. Override the methods you need. An error that one raises ends the run.

    >>> class Log(Watcher):
    ...     def chosen(self, step, n_steps):
    ...         print(step.unit, step.damage)
    >>> prune("gpt2", out="small/", watcher=[Log(), TensorBoard("runs/")])
    """

    def stage(self, name: str) -> None:
        """A stage of the run begins."""

    def say(self, sentence: str) -> None:
        """Something that the user should know."""

    def look(self, step: int, n_steps: int, n_batches: int) -> None:
        """A step begins with the gradients of so many batches."""

    def pull(self, progress: Progress) -> None:
        """A unit was measured."""

    def chosen(self, step: Step, n_steps: int) -> None:
        """A unit was selected, in a search of about `n_steps` steps."""

    def evaluated(self, batch: int, n_batches: int) -> None:
        """This many batches, or other parts, of the present stage are done."""

    def judged(self, side: str, evaluation: Evaluation) -> None:
        """The "dense" model, the one with the units "zeroed", or the "checkpoint" was evaluated."""

    def repaired(self, repair: Repair) -> None:
        """The cut model was repaired."""

    def healed(self, progress: HealProgress) -> None:
        """A step of a healing is done."""

    def measured(self, measurement: Measurement) -> None:
        """The dense and the small model were measured side by side."""


class Watchers(Watcher):
    """Several watchers as one: each hears everything, in the order given.

    >>> prune("gpt2", ratio=0.10, out="small/", watcher=Watchers(Watcher(), TensorBoard("runs/")))
    """

    def __init__(self, *watchers: Watcher) -> None:
        self.watchers = watchers


def _to_each(event: str) -> Callable[..., None]:
    def tell(self: Watchers, *arguments: Any, **named: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, event)(*arguments, **named)

    return tell


EVENTS = tuple(name for name in vars(Watcher) if not name.startswith("_"))
for _event in EVENTS:
    setattr(Watchers, _event, _to_each(_event))

Following = Watcher | Sequence[Watcher] | None  # what a function that can be followed takes


def watcher_of(watcher: Following) -> Watcher:
    """One watcher that stands for those given: for none, one that does nothing."""
    if watcher is None:
        return Watcher()
    return watcher if isinstance(watcher, Watcher) else Watchers(*watcher)


def silent(done: int, of: int) -> None:
    """Report to nobody."""


class Followed(Sequence[T]):
    """A sequence that reports how far a loop over it has come: the number of items done, and of all."""

    def __init__(self, items: Sequence[T], report: Report) -> None:
        self._items, self._report = items, report

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._items[index]

    def __iter__(self) -> Iterator[T]:
        for done, item in enumerate(self._items, 1):
            yield item
            self._report(done, len(self._items))
