"""Goals: how many units are removed, and which may still be. Knows costs as numbers; cut/costs.py computes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from secateur.errors import SettingError
from secateur.selection import Reached
from secateur.units import Unit, outermost, selectable


class Goal(Protocol):
    """When a search ends, and how it compares units until then.

    >>> from secateur.search.goals import Count
    >>> len(select(meter, units, policy=UCB(), goal=Count(2)).units)
    2
    """

    def n_steps(self, selected: Sequence[Unit]) -> int:
        """An estimate of the number of units to select in all; equal to `len(selected)` once the goal is met."""
        ...

    def open(self, units: Iterable[Unit], selected: Sequence[Unit]) -> list[Unit]:
        """The units that may still be selected: those of which something is left, and that the goal has room for."""
        ...

    def after(self, selected: Sequence[Unit]) -> Goal:
        """The same goal, whose weights are what the units still save after the selected ones."""
        ...

    def weight(self, unit: Unit) -> float:
        """What removing the unit saves, relative to the mean; damage is compared per weight."""
        ...

    def reached(self, selected: Sequence[Unit]) -> Reached | None:
        """For a goal in shares of a cost: what was asked for and what is left."""
        ...


@dataclass(frozen=True)
class Count:
    """Select `k` units, whichever they are (Eq. 6)."""

    k: int

    def n_steps(self, selected: Sequence[Unit]) -> int:
        return self.k

    def open(self, units: Iterable[Unit], selected: Sequence[Unit]) -> list[Unit]:
        return selectable(units, selected)

    def after(self, selected: Sequence[Unit]) -> Count:
        return self

    def weight(self, unit: Unit) -> float:
        return 1.0

    def reached(self, selected: Sequence[Unit]) -> Reached | None:
        return None


@dataclass(frozen=True)
class Share:
    """Remove units until at most `share` of a cost is left; units are compared by damage per cost."""

    what: str
    share: float
    left: Callable[[Sequence[Unit]], float]  # the share of the cost that is left without these units
    costs: Mapping[Unit, float]  # the share that each unit saves alone; `left` is exact for sets
    mean: float | None = None  # of the costs before any unit was selected; None: of these

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise SettingError(f"The goal is {self.share} of the dense model's {self.what}, but must lie between 0 and 1.")
        if self.mean is not None:
            return  # another goal's, which was checked
        least = self.left(list(self.costs))
        if least > self.share:
            raise SettingError(
                f"Without any of the {len(self.costs)} candidates {least:.1%} of the {self.what} would still be left, and "
                f"{self.share:.1%} were asked for; ask for more, or allow more kinds of units with --target."
            )

    @cached_property
    def _mean(self) -> float:
        """The mean cost; kept, since every pull asks for a weight."""
        return self.mean if self.mean is not None else sum(self.costs.values()) / len(self.costs)

    def n_steps(self, selected: Sequence[Unit]) -> int:
        missing = self.left(selected) - self.share
        return len(selected) + (0 if missing <= 0 else max(1, math.ceil(missing / self._mean)) if self._mean > 0 else 1)

    def open(self, units: Iterable[Unit], selected: Sequence[Unit]) -> list[Unit]:
        left = selectable(units, selected)
        if not any(unit.whole for unit in left):
            return left
        costs = self.after(selected).costs
        return [unit for unit in left if costs[unit] > 0 or not unit.whole]

    def after(self, selected: Sequence[Unit]) -> Share:
        """A whole saves what is left of it: its cost without that of its parts that are gone."""
        wholes = [unit for unit in self.costs if unit.whole]
        if not wholes or not selected:
            return self
        gone: dict[int, list[Unit]] = {}
        for unit in outermost(selected):
            gone.setdefault(unit.layer, []).append(unit)
        left = {whole: self._left_of(whole, gone[whole.layer]) for whole in wholes if whole.layer in gone}
        return replace(self, costs={**self.costs, **left}, mean=self._mean)

    def _left_of(self, whole: Unit, gone: Sequence[Unit]) -> float:
        left = self.costs[whole] - sum(self.costs[unit] for unit in gone if not selectable([unit], [whole]))
        return left if left > 1e-6 * self.costs[whole] else 0.0

    def weight(self, unit: Unit) -> float:
        return max(self.costs[unit] / self._mean, 1e-3) if self._mean > 0 else 1.0

    def reached(self, selected: Sequence[Unit]) -> Reached:
        return Reached(self.what, self.share, self.left(selected))


@dataclass(frozen=True)
class Quota:
    """Select a fixed number of units from each cell of the candidates: a layer, or a K/V group of one.

    A quota that was made to meet a `share` compares units by its costs and reports what is left.
    """

    cells: Mapping[Unit, Hashable]
    room: Mapping[Any, int]  # by cell: the number of units to select
    share: Share | None = None

    def n_steps(self, selected: Sequence[Unit]) -> int:
        return sum(self.room.values())

    def open(self, units: Iterable[Unit], selected: Iterable[Unit]) -> list[Unit]:
        """Units whose cell still has quota."""
        taken = Counter(self.cells[unit] for unit in selected)
        return [unit for unit in units if unit in self.cells and taken[self.cells[unit]] < self.room[self.cells[unit]]]

    def after(self, selected: Sequence[Unit]) -> Quota:
        return self

    def weight(self, unit: Unit) -> float:
        return self.share.weight(unit) if self.share else 1.0

    def reached(self, selected: Sequence[Unit]) -> Reached | None:
        return self.share.reached(selected) if self.share else None

    def example(self) -> list[Unit]:
        """Some selection that fills the quota."""
        taken: list[Unit] = []
        for unit in self.cells:
            taken += self.open([unit], taken)
        return taken
