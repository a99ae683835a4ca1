"""What more batches a pull would bring: python benchmarks/noise.py MODEL IMAGES [--batches 64] [--searches 500]

UCB, Thompson sampling and greedy with 1, 2 and 4 batches a pull, many times over. A search with the model takes minutes, so the
damage of each head alone is measured once on many batches, and the searches are replayed from this table: by the rules of the
library, but as if heads did not interact. The last row is a search without noise. What a search chose is judged by a table of
other images, of the validation split. Which of two settings is better, and by how much, shows here; a true search loses more,
since heads do interact.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import fmean, quantiles

import numpy as np
import torch
from limits import damages_of
from numpy.typing import NDArray

import secateur as sc
from secateur.model.families import candidate_units
from secateur.search.policies import UCB, Greedy, Policy, Thompson
from secateur.search.select import Asked, Measured, select
from secateur.selection import Pull
from secateur.settings import make_job
from secateur.steps import calibration_of, evaluation_of, open_job
from secateur.streams import BATCHES, stream
from secateur.units import Unit

Table = NDArray[np.float64]  # the damage of each head alone on each batch
METHODS: dict[str, tuple[Policy, int]] = {"ucb": (UCB(), 64), "ts": (Thompson(), 64), "greedy": (Greedy(), 32)}  # pulls a step


class Replay:
    """A meter that reads damages from a table: (units, batches)."""

    def __init__(self, units: Sequence[Unit], table: Table, batches_per_pull: int, seed: int) -> None:
        self._rows = dict(zip(units, table, strict=True))
        self._n, self._drawn = table.shape[1], batches_per_pull
        self._rng = stream(seed, BATCHES)

    def draw(self) -> tuple[int, ...]:
        return tuple(self._rng.choice(self._n, size=self._drawn, replace=False).tolist())

    def measure(self, pulls: Sequence[Asked]) -> Iterator[Measured]:
        for unit, batches in pulls:
            damages = tuple(float(self._rows[unit][i]) for i in batches)
            yield Measured(tuple(0.0 for _ in damages), damages, 0)

    def recall(self, pull: Pull) -> None: ...
    def commit(self, unit: Unit) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("images", help="a folder with the splits train and val")
    parser.add_argument("--heads", type=int, default=4, help="to choose")
    parser.add_argument("--batches", type=int, default=64, help="of 8 images, to choose and to judge")
    parser.add_argument("--searches", type=int, default=500)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    asked = {"calibration": given.images, "calibration_size": 8 * given.batches, "evaluation_size": 8 * given.batches}
    opened, job = open_job(make_job(given.model, seed=1, batch_size=8, device="cpu", **asked), sc.Watcher())
    units = candidate_units(opened.model, "head")
    choosing, judging = (
        damages_of(opened.model, units, batches)
        for batches in (list(calibration_of(opened, job.settings, sc.Watcher())), list(evaluation_of(opened, job)))
    )
    within = float(np.sqrt(choosing.var(1, ddof=1).mean()))
    print(
        f"{opened.name}: a batch's damage deviates by {within:.3f} within a head, by {choosing.mean(1).std():.3f} between heads"
    )
    print("| method | batches a pull | loss | of so many searches, 5% to 95% |\n|---|---|---|---|")
    for name, (policy, pulls) in METHODS.items():
        for batches in (1, 2, 4):
            lost = [
                _lost(units, choosing, judging, policy, pulls, batches, seed, given.heads) for seed in range(given.searches)
            ]
            low, *_, high = quantiles(lost, n=20)
            print(f"| {name} | {batches} | {fmean(lost):+.4f} | {low:+.4f} to {high:+.4f} |", flush=True)
    best = np.argsort(choosing.mean(1))[: given.heads]
    print(f"| without noise | {given.batches} | {judging.mean(1)[best].sum():+.4f} | |")


def _lost(
    units: Sequence[Unit], choosing: Table, judging: Table, policy: Policy, pulls: int, batches: int, seed: int, n: int
) -> float:
    """The loss on the other images without the heads that a replayed search chose, as if they did not interact."""
    meter = Replay(units, choosing, batches, seed)
    chosen = select(meter, units, policy=policy, ratio=n / len(units), pulls_per_step=pulls, seed=seed).units
    return float(judging.mean(1)[[units.index(unit) for unit in chosen]].sum())


if __name__ == "__main__":
    main()
