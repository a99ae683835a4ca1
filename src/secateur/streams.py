"""Named random streams: one seed at the front door, one generator for each purpose.

A new draw in one stream cannot move the others, so a policy that draws more often still meets the same pools and batches.
"""

from __future__ import annotations

import numpy as np

from secateur.errors import SettingError

POOLS, BATCHES, POLICY, SCORES, DATA, GRADIENTS, HEALING = range(7)


def stream(seed: int, name: int, *place: int) -> np.random.Generator:
    """The generator of a purpose; with a `place`, such as a step, one that does not depend on what was drawn before."""
    if seed < 0:
        raise SettingError(f"The seed is {seed}, but must be 0 or more.")
    return np.random.default_rng([seed, name, *place])
