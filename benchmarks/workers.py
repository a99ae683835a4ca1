"""One search on many workers against one process: python benchmarks/workers.py [MODEL ...] [--workers 2] [--repeats 7]

The same measurements, in turns, by one process with its lanes and by workers that share its threads: units spread over the
model on two common batches, as a round of auto asks for them, with base runs made before. Losses must be the same to the
bit. SmolLM2-135M is made by scripts/smollm2.py; DeiT-Tiny is looked for in $SECATEUR_DATA.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from secateur.data.batches import Batches
from secateur.measure.bench import random_batches
from secateur.model.families import candidate_units
from secateur.model.loading import open_model
from secateur.search.choose import meter_of
from secateur.search.damage import DamageMeter
from secateur.search.select import Measured
from secateur.selection import Source
from secateur.settings import Machine, Settings
from secateur.units import Unit

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / ".cache" / "SmolLM2-135M-Instruct"
DEIT = Path(os.environ.get("SECATEUR_DATA", ROOT.parent / "shared" / "data")) / "deit-tiny"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[str(path) for path in (SMOLLM2, DEIT) if path.exists()])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pulls", type=int, default=6, help="a repeat")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    print(f"{torch.get_num_threads()} threads; {given.repeats} repeats of {given.pulls} pulls, in turns\n")
    print("| model | s/pull, one process | s/pull, workers | times as fast: median | lowest | highest | start, s |")
    print("|---|---|---|---|---|---|---|")
    for name in given.models:
        compare(name, given.workers, given.pulls, given.repeats)


def compare(name: str, workers: int, pulls: int, repeats: int) -> None:
    opened, settings = open_model(name, device="cpu"), Settings(name, device="cpu")
    batches = Batches(random_batches(opened.model, 2), Source("random", "train"))
    units = candidate_units(opened.model, "head")
    needed = 2 + pulls * repeats
    units = [units[i * len(units) // needed] for i in range(needed)] if needed <= len(units) else units
    meters = [meter_of(opened, batches, settings, Machine(workers=n)) for n in (0, workers)]
    with closing(meters[0]), closing(meters[1]):
        warming, units = units[:2], units[2:]
        started = time.perf_counter()
        seconds_of(meters[1], warming)
        start = time.perf_counter() - started
        seconds_of(meters[0], warming)
        both: list[list[float]] = [[], []]
        for repeat in range(min(repeats, len(units) // pulls)):
            asked = units[repeat::repeats][:pulls]  # early, middle and late blocks each time
            found = []
            for i in (0, 1) if repeat % 2 else (1, 0):
                seconds, measured = seconds_of(meters[i], asked)
                both[i].append(seconds / len(asked))
                found.append(measured)
            assert found[0] == found[1], "the losses differ"
    ratios = sorted(one / many for one, many in zip(*both, strict=True))
    cells = [Path(name).name, *(f"{statistics.median(times):.3f}" for times in both)]
    cells += [f"{ratio:.2f}" for ratio in (statistics.median(ratios), ratios[0], ratios[-1])]
    print(f"| {' | '.join(cells)} | {start:.1f} |", flush=True)


def seconds_of(meter: DamageMeter, units: Sequence[Unit]) -> tuple[float, list[Measured]]:
    started = time.perf_counter()
    measured = list(meter.measure([(unit, (0, 1)) for unit in units]))
    return time.perf_counter() - started, measured


if __name__ == "__main__":
    main()
