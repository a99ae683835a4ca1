"""Bandit policies: who is pulled next (Eq. 19-27). Sees arms 0..n-1; never a unit, never a tensor.

A policy is a frozen setting with one method; what a step has learnt is in `ArmStats`, which both policies share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from secateur.errors import SettingError

Array = npt.NDArray[np.float64]


def reward(damage: float, temperature: float) -> float:
    """Smooth bounded reward: 0.5 at no damage, towards 1 where removal helps (Eq. 19); a non-finite damage earns 0."""
    if not math.isfinite(damage):
        return 0.0
    return 1 / (1 + math.exp(min(max(damage / temperature, -500.0), 500.0)))  # clipped only so that exp cannot overflow


class ArmStats:
    """What the pulls of one step have shown of its n arms: counts and mean rewards (Eq. 20)."""

    def __init__(self, n_arms: int) -> None:
        self.counts = np.zeros(n_arms, dtype=np.int64)
        self.means = np.zeros(n_arms)
        self.broken = np.zeros(n_arms, dtype=bool)  # arms that ever gave a non-finite damage

    def update(self, arm: int, reward: float, *, finite: bool = True) -> None:
        self.counts[arm] += 1
        self.means[arm] += (reward - self.means[arm]) / self.counts[arm]
        self.broken[arm] |= not finite

    @property
    def alpha(self) -> Array:
        """Beta pseudo-counts: 1 plus the sum of rewards (Eq. 24 and 26)."""
        return 1 + self.counts * self.means

    @property
    def beta(self) -> Array:
        return 1 + self.counts * (1 - self.means)

    @property
    def posterior_means(self) -> Array:
        """The uncertainty-smoothed diagnostic of section 3.7; it decides nothing."""
        alpha, beta = self.alpha, self.beta
        return alpha / (alpha + beta)

    def best(self) -> int:
        """The evaluated arm of the largest mean reward (Eq. 23 = Eq. 27), a broken one only if all are broken."""
        evaluated = self.counts > 0
        sound = evaluated & ~self.broken
        return int(np.argmax(np.where(sound if sound.any() else evaluated, self.means, -np.inf)))

    @property
    def all_broken(self) -> bool:
        """Every evaluated arm gave a non-finite damage at least once."""
        return not (~self.broken[self.counts > 0]).any()


class Policy(Protocol):
    """The one thing a policy does."""

    def choose(self, stats: ArmStats, rng: np.random.Generator) -> int: ...


@dataclass(frozen=True)
class UCB:
    """MAB-UCB: unevaluated arms first, then the largest mean + c * sqrt(log N / n) (Eq. 21 and 22)."""

    c: float = 1.5

    def __post_init__(self) -> None:
        if not (self.c >= 0 and math.isfinite(self.c)):
            raise SettingError(f"The UCB exploration constant is {self.c}, but must be a finite number, 0 or more.")

    def choose(self, stats: ArmStats, rng: np.random.Generator) -> int:
        if (stats.counts == 0).any():
            return int(np.argmin(stats.counts))  # the first of them; the pool's order is random already
        bonus = self.c * np.sqrt(np.log(stats.counts.sum()) / stats.counts)
        return int(np.argmax(stats.means + bonus))


@dataclass(frozen=True)
class Thompson:
    """Fractional-Beta MAB-TS: one draw an arm, the largest is pulled (Eq. 25)."""

    def choose(self, stats: ArmStats, rng: np.random.Generator) -> int:
        return int(np.argmax(rng.beta(stats.alpha, stats.beta)))


@dataclass(frozen=True)
class Greedy:
    """Budgeted greedy (Eq. 37): every arm of the trial set once, all on the same batches; the best one wins."""

    def choose(self, stats: ArmStats, rng: np.random.Generator) -> int:
        return int(np.argmin(stats.counts))
