"""DamageMeter: what a unit's removal costs, measured on the same batches with and without it (Eq. 16-18)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from secateur.errors import ModelError, SettingError
from secateur.losses import Batch, batch_loss, evaluating
from secateur.streams import BATCHES, stream
from secateur.units import Unit
from secateur.zeroing import zeroed


class DamageMeter:
    """Measures units one at a time on top of those already committed, and counts the model passes it makes.

    Owns the one cache there is: the base loss of each batch under the committed units. `commit` is all that empties it.

    >>> meter = DamageMeter(model, batches, batches_per_pull=2, seed=42)
    >>> meter.damage(Unit("head", 0, 3))
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], *, batches_per_pull: int = 2, seed: int = 42) -> None:
        if not 1 <= batches_per_pull <= len(batches):
            raise SettingError(
                f"The batches per pull are {batches_per_pull}, but must be 1 to {len(batches)}, the batches there are."
            )
        self.model = model
        self.batches = batches
        self.batches_per_pull = batches_per_pull
        self.committed: list[Unit] = []
        self.pulls = 0
        self.forwards = 0
        self._rng = stream(seed, BATCHES)
        self._base_losses: dict[int, float] = {}

    def draw(self) -> tuple[int, ...]:
        """The batches of one pull, all different."""
        return tuple(int(i) for i in self._rng.choice(len(self.batches), size=self.batches_per_pull, replace=False))

    def measure(self, unit: Unit, batches: Sequence[int]) -> tuple[list[float], list[float]]:
        """Base and masked loss of each of the batches, given what is committed (Eq. 16 and 17)."""
        self.pulls += 1
        with torch.inference_mode(), evaluating(self.model), zeroed(self.model, self.committed):
            base = [self._base_loss(i) for i in batches]
            with zeroed(self.model, [unit]):
                masked = [self._loss(i) for i in batches]
        return base, masked

    def damage(self, unit: Unit) -> float:
        """The paired damage of a unit on freshly drawn batches (Eq. 18)."""
        base, masked = self.measure(unit, self.draw())
        return sum(m - b for m, b in zip(masked, base, strict=True)) / len(base)

    def recall(self, batches: Sequence[int], base_losses: Sequence[float]) -> None:
        """Take base losses that a journal holds, as if they had been measured here."""
        self.pulls += 1
        self._base_losses.update(zip(batches, base_losses, strict=True))

    def commit(self, unit: Unit) -> None:
        """Keep the unit out from now on."""
        self.committed.append(unit)
        self._base_losses.clear()

    def _base_loss(self, i: int) -> float:
        if i not in self._base_losses:
            loss = self._loss(i)
            if not self.committed and not math.isfinite(loss):
                raise ModelError(
                    f"The dense model's loss on calibration batch {i} is {loss}: nothing can be measured against it. "
                    "Try --dtype float32, or look at the data."
                )
            self._base_losses[i] = loss
        return self._base_losses[i]

    def _loss(self, i: int) -> float:
        self.forwards += 1
        return float(batch_loss(self.model, self.batches[i]))
