"""Watcher: follows a run. The command line draws its progress bars with one."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.selection import Step
from secateur.units import Unit


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
    units: int = 1  # that the step chooses


@dataclass(frozen=True)
class GridProgress:
    """Where a grid stands, after a run."""

    done: int
    failed: int
    left: int
    seconds_left: float | None
    latest: str  # a sentence about the run that ended last


class Watcher:
    """Follows a run; this one does nothing. Override the methods you need.

    >>> class Printer(Watcher):
    ...     def chosen(self, step, n_steps):
    ...         print(step.unit, step.damage)
    >>> select(meter, units, policy=UCB(), ratio=0.1, watcher=Printer()).units
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
