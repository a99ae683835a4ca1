"""Compare selection methods over seeds on one model: what `secateur prune` does, with the model loaded once.

    python benchmarks/methods.py MODEL OUT --calibration DATA --methods ucb:64 ts:64 greedy:32 magnitude random \\
        --seeds 1 2 3 42 123 --set batches_per_pull=1

METHOD:PULLS gives a method its pulls per step. Each run gets a folder OUT/METHOD-SEED with the files of `secateur prune`; the
dense model is evaluated once a seed. Killed and started again, it goes on. Then: python benchmarks/summary.py OUT
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from secateur.data import check_apart
from secateur.evaluate import evaluate
from secateur.families import task_of
from secateur.models import load
from secateur.prune import Judging, Settings, load_batches, make_settings, prune_loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--evaluation-size", type=int, default=-1)
    parser.add_argument("--evaluation-batches", type=int, default=-1)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="any other setting")
    given = parser.parse_args()
    others = {
        name: float(value) if "." in value else int(value) for name, _, value in (item.partition("=") for item in given.set)
    }
    model, processor = load(given.model)
    task = task_of(model)
    asked: Settings = make_settings(model=given.model, calibration=given.calibration, **others).for_task(task)
    judging = Judging(given.data, given.evaluation_size, given.evaluation_batches).for_task(task, given.calibration)
    for seed in given.seeds:
        settings = dataclasses.replace(asked, seed=seed)
        folders = {method: given.out / f"{method.partition(':')[0]}-{seed}" for method in given.methods}
        if all((folder / "evaluation.json").exists() for folder in folders.values()):
            continue
        calibration = load_batches(
            model, processor, settings.calibration, settings, split="train", size=settings.calibration_size
        )
        evaluation = load_batches(
            model, processor, judging.data, settings, split="test", size=judging.size, most=judging.max_batches
        )
        check_apart(calibration.source, evaluation.source)
        dense = evaluate(model, evaluation)
        for method, folder in folders.items():
            name, _, pulls = method.partition(":")
            run = dataclasses.replace(settings, method=name, pulls_per_step=int(pulls or settings.pulls_per_step))
            result = prune_loaded(model, calibration, evaluation, run, judging, out=folder, dense=dense)
            shown = {key: round(float(value), 4) for key, value in result.record.items() if isinstance(value, float)}
            print(name, seed, shown, flush=True)


def number_or_word(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


if __name__ == "__main__":
    main()
