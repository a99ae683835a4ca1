"""Where the loss of a search for heads goes: python benchmarks/limits.py MODEL IMAGES [--batches 30] [--seed 1]

Exact greedy, as a reference for every search: each step measures candidates on all images that choose, so that nothing but
the images is left to chance, and takes the best one. The first step measures all heads, later ones the best `--shortlist` of
the first. Then each chosen head is exchanged for the best rejected one, if that is better. This is done twice: with images of
the train split, which the model was trained on, and with images of the validation split, which it has not seen. The other
images of the validation split judge all choices. What a search loses more than the first choice is noise, what the exchange
wins is greediness, and what the choice by unseen images wins is transfer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

import secateur as sc
from secateur.measure.evaluate import evaluate
from secateur.model.families import candidate_units
from secateur.model.losses import Batch
from secateur.model.zeroing import zeroed
from secateur.settings import make_job
from secateur.steps import calibration_of, evaluation_of, open_job
from secateur.units import Unit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("images", help="a folder with the splits train and val")
    parser.add_argument("--heads", type=int, default=4, help="to choose")
    parser.add_argument("--batches", type=int, default=30, help="of 8 images that choose")
    parser.add_argument("--judging", type=int, default=1000, help="images that judge")
    parser.add_argument("--shortlist", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1, help="draws the images")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    asked = {
        "calibration": given.images,
        "calibration_size": 8 * given.batches,
        "evaluation_size": 8 * given.batches + given.judging,
        "device": "cpu",
    }
    opened, job = open_job(make_job(given.model, seed=given.seed, batch_size=8, **asked), sc.Watcher())
    seen, unseen = calibration_of(opened, job.settings, sc.Watcher()), evaluation_of(opened, job)
    judging = list(unseen[given.batches :])
    units = candidate_units(opened.model, "head")
    dense = evaluate(opened.model, judging)
    print(f"{opened.name}: {shown(dense)} dense, on {len(judging)} batches that choose nothing")
    print("| chosen by | heads | damage where chosen | loss | top-1 |\n|---|---|---|---|---|")
    for split, batches in (("train", list(seen)), ("validation", list(unseen[: given.batches]))):
        chosen, shortlist, damage = greedy(opened.model, units, batches, given.heads, given.shortlist)
        ways = {"exact greedy": (chosen, damage), "and exchanges": exchanged(opened.model, chosen, shortlist, batches, damage)}
        for way, (heads, there) in ways.items():
            with zeroed(opened.model, heads):
                found = evaluate(opened.model, judging)
            assert found.top1 is not None and dense.top1 is not None
            names = " ".join(f"{unit.layer}.{unit.index}" for unit in sorted(heads))
            change = f"{found.loss - dense.loss:+.4f} | {found.top1 - dense.top1:+.4f}"
            print(f"| {way}, {8 * len(batches)} images of {split} | {names} | {there:+.4f} | {change} |", flush=True)


def greedy(
    model: torch.nn.Module, units: Sequence[Unit], batches: Sequence[Batch], n: int, shortlist: int
) -> tuple[list[Unit], list[Unit], float]:
    """The n units that exact greedy takes, the candidates of its later steps, and the damage of all n."""
    meter = sc.DamageMeter(model, batches, batches_per_pull=len(batches))
    chosen: list[Unit] = []
    candidates, total = list(units), 0.0
    while len(chosen) < n:
        damages = measured(meter, candidates, len(batches))
        best = min(damages, key=damages.__getitem__)
        if not chosen:
            candidates = sorted(candidates, key=damages.__getitem__)[:shortlist]
        total += damages[best]
        chosen.append(best)
        candidates.remove(best)
        meter.commit(best)
    return chosen, [*chosen, *candidates], total


def exchanged(
    model: torch.nn.Module, chosen: Sequence[Unit], shortlist: Iterable[Unit], batches: Sequence[Batch], damage: float
) -> tuple[list[Unit], float]:
    """Each chosen unit in turn gives way to the best one of the shortlist, if that does less damage."""
    chosen = list(chosen)
    for unit in list(chosen):
        others = [one for one in chosen if one != unit]
        meter = sc.DamageMeter(model, batches, batches_per_pull=len(batches))
        for one in others:
            meter.commit(one)
        damages = measured(meter, [one for one in shortlist if one not in others], len(batches))
        best = min(damages, key=damages.__getitem__)
        damage += damages[best] - damages[unit]
        chosen = [*others, best]
    return chosen, damage


def measured(meter: sc.DamageMeter, units: Sequence[Unit], n_batches: int) -> dict[Unit, float]:
    """The damage of each unit, the mean over all batches."""
    return dict(zip(units, by_batch(meter, units, n_batches).mean(1).tolist(), strict=True))


def by_batch(meter: sc.DamageMeter, units: Sequence[Unit], n_batches: int) -> NDArray[np.float64]:
    """The damage of each unit on each batch: (units, batches)."""
    every = tuple(range(n_batches))
    found = meter.measure([(unit, every) for unit in units])
    return np.array([np.subtract(losses.masked_losses, losses.base_losses) for losses in found])


def damages_of(model: torch.nn.Module, units: Sequence[Unit], batches: Sequence[Batch]) -> NDArray[np.float64]:
    """The damage of each unit alone on each batch."""
    return by_batch(sc.DamageMeter(model, batches, batches_per_pull=len(batches)), units, len(batches))


def shown(found: sc.Evaluation) -> str:
    return f"loss {found.loss:.4f}, top-1 {found.top1:.4f}"


if __name__ == "__main__":
    main()
