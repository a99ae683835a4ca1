"""Goals: how many units are removed, and which may still be. Knows costs as numbers; cut/costs.py computes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from secateur.errors import SettingError
from secateur.selection import Reached
from secateur.units import Unit


class Goal(Protocol):
    """When a search ends, and how it compares units until then."""

    def n_steps(self, selected: Sequence[Unit]) -> int:
        """An estimate of the number of units to select in all; equal to `len(selected)` once the goal is met."""
        ...

    def open(self, units: Iterable[Unit], selected: Sequence[Unit]) -> list[Unit]:
        """The units that may still be selected."""
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
        return list(units)

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

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise SettingError(f"The goal is {self.share} of the dense model's {self.what}, but must lie between 0 and 1.")
        least = self.left(list(self.costs))
        if least > self.share:
            raise SettingError(
                f"Without any of the {len(self.costs)} candidates {least:.1%} of the {self.what} would still be left, and "
                f"{self.share:.1%} were asked for; ask for more, or allow more kinds of units with --target."
            )

    @cached_property
    def _mean(self) -> float:
        """The mean cost; kept, since every pull asks for a weight."""
        return sum(self.costs.values()) / len(self.costs)

    def n_steps(self, selected: Sequence[Unit]) -> int:
        missing = self.left(selected) - self.share
        return len(selected) + (0 if missing <= 0 else max(1, math.ceil(missing / self._mean)) if self._mean > 0 else 1)

    def open(self, units: Iterable[Unit], selected: Sequence[Unit]) -> list[Unit]:
        return list(units)

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
