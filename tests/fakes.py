"""A meter without a model, for the search and the journal; and what a meter says of a single pull."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from secateur.files import jsonio
from secateur.search.policies import UCB, Auto, Greedy, Policy, Thompson
from secateur.search.select import Asked, Measured, Meter
from secateur.selection import Pull, Selection
from secateur.streams import BATCHES, stream
from secateur.units import Unit, enumerate_units

POLICIES: list[Policy] = [UCB(), Thompson(), Greedy(), Auto()]
BANDITS: list[Policy] = [UCB(), Thompson()]
UNITS = enumerate_units([6] * 6, [], target="head")  # 36, as in DeiT-Tiny


class FakeMeter:
    """A Meter without a model: each unit has a fixed damage, each of its batches some seeded noise."""

    def __init__(
        self, damages: Mapping[Unit, float], *, seed: int = 42, noise: float = 0.005, stop_at: int | None = None
    ) -> None:
        self.damages = damages
        self.seed = seed
        self.noise = noise
        self.stop_at = stop_at  # the measurement that never comes back
        self.committed: list[Unit] = []
        self.measured: list[Unit] = []
        self.requests: list[list[Asked]] = []  # what was asked for at once
        self.forwards = 0
        self.draws = 0
        self._rng = stream(seed, BATCHES)
        self._base: dict[int, float] = {}

    def draw(self) -> tuple[int, ...]:
        self.draws += 1
        return tuple(int(b) for b in self._rng.choice(8, size=2, replace=False))

    def measure(self, pulls: Sequence[Asked]) -> Iterator[Measured]:
        self.requests.append(list(pulls))
        for unit, batches in pulls:
            yield self._measured(unit, batches)

    def _measured(self, unit: Unit, batches: Sequence[int]) -> Measured:
        assert unit not in self.committed
        before = self.forwards
        if len(self.measured) == self.stop_at:
            self.stop()
        self.measured.append(unit)
        for batch in batches:
            if batch not in self._base:
                self._base[batch] = 3 + batch / 10 + sum(self.damages[c] for c in self.committed)
                self.forwards += 1
        self.forwards += len(batches)
        base = tuple(self._base[batch] for batch in batches)
        masked = tuple(b + self.damage(unit) + self._noise(unit, batch) for b, batch in zip(base, batches, strict=True))
        return Measured(base, masked, self.forwards - before)

    def recall(self, pull: Pull) -> None:
        self._base.update(zip(pull.batches, pull.base_losses, strict=True))

    def commit(self, unit: Unit) -> None:
        self.committed.append(unit)
        self._base.clear()

    def damage(self, unit: Unit) -> float:
        return self.damages[unit]

    def stop(self) -> None:
        raise KeyboardInterrupt

    def _noise(self, unit: Unit, batch: int) -> float:
        place = [self.seed, batch, unit.layer, unit.index, len(self.committed)]
        return self.noise * float(np.random.default_rng(place).normal()) if self.noise else 0.0


def with_pool(policy: Policy, size: int) -> Policy:
    """The policy with a pool of that size, where it has one of a size of its own."""
    return replace(policy, pool=size) if isinstance(policy, UCB | Thompson) else policy


def spread(units: Sequence[Unit]) -> dict[Unit, float]:
    """A different damage for each unit, in no order of layer or index."""
    return dict(zip(units, np.random.default_rng(7).permutation(np.linspace(-0.05, 0.15, len(units))).tolist(), strict=True))


def harmless_few(units: Sequence[Unit], few: Sequence[Unit]) -> dict[Unit, float]:
    return {unit: -0.05 if unit in few else 0.1 for unit in units}


def written(selection: Selection) -> str:
    """All of a selection as text: equal texts are equal selections, also where a damage is nan."""
    return jsonio.dumps(selection.to_json())


def losses_of(meter: Meter, unit: Unit, batches: Iterable[int]) -> tuple[list[float], list[float]]:
    """The base and the masked losses of one pull, asked for alone."""
    (found,) = meter.measure([(unit, tuple(batches))])
    return list(found.base_losses), list(found.masked_losses)
