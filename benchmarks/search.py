"""Compare searches at their cost in forward passes: the figures of docs/search.md.

    python benchmarks/search.py MODEL DATA --runs auto:both:128 ucb::64 --seeds 1 2 3 [--target head] [--ratio 0.1] ...

A run is METHOD:LOSS:PULLS_PER_STEP; an empty loss is the labels. Costs are forward passes of one batch: a masked run counts
from the block of its unit on, a base run from the first block that has changed since its batch was last run, and a batch with
gradients counts three. All runs are judged on the same batches, which chose nothing.
"""

from __future__ import annotations

import argparse
from typing import Any

import secateur as sc
from secateur.model.families import task_of
from secateur.search.choose import meter_of
from secateur.search.scores import unit_scores, unit_set
from secateur.search.select import Screen, select, select_by_score
from secateur.selection import Selection
from secateur.settings import Job, make_job
from secateur.steps import calibration_of, evaluation_of, open_job
from secateur.units import n_selected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--runs", nargs="+", default=["auto:both:128", "ucb::64"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--target", default="head")
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--calibration-size", type=int)
    parser.add_argument("--evaluation-size", type=int, default=1000)
    arguments = parser.parse_args()
    common: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("target", "ratio", "batch_size", "calibration_size", "evaluation_size")
        if getattr(arguments, name) is not None
    }
    common |= {"calibration": arguments.data, "batches_per_pull": 1}
    opened, job = open_job(make_job(arguments.model, **common, seed=1), sc.Watcher())
    evaluation = evaluation_of(opened, job)
    dense = sc.evaluate(opened.model, evaluation)
    print("| method | loss | pulls a step | seed | change of the loss | change of top-1 | pulls | forward passes |")
    print("|---|---|---|---|---|---|---|---|")
    for run in arguments.runs:
        method, loss, pulls = run.split(":")
        for seed in arguments.seeds:
            own = {"loss": loss} if loss else {}
            settings = make_job(
                arguments.model, **common, **own, seed=seed, method=method, pulls_per_step=int(pulls or 32)
            ).for_task(task_of(opened.model))
            chosen, cost = choose(opened, settings)
            with sc.zeroed(opened.model, chosen.units):
                found = sc.evaluate(opened.model, evaluation)
            top1 = "" if found.top1 is None or dense.top1 is None else f"{found.top1 - dense.top1:+.3f}"
            what = f"| {method} | {loss or 'labels'} | {pulls} | {seed} | {found.loss - dense.loss:+.4f} | {top1} "
            print(f"{what}| {chosen.pulls} | {cost:.0f} |", flush=True)


def choose(opened: sc.Opened, job: Job) -> tuple[Selection, float]:
    """What the settings choose, and its cost in forward passes."""
    settings = job.settings
    calibration = calibration_of(opened, settings, sc.Watcher())
    units = sc.candidate_units(opened.model, settings.target, settings.group_width)
    batches, k = calibration[: settings.score_batches], n_selected(settings.ratio, len(units))
    scoring: dict[str, Any] = {"batches": batches, "seed": settings.seed}
    passes = settings.row.passes(len(batches)) * (3 if settings.row.needs == "gradients" else 1)
    if settings.row.search:
        return unit_set(settings.method, opened.model, units, k=k, **scoring), passes
    if settings.row.policy is None:
        return select_by_score(unit_scores(settings.method, opened.model, units, **scoring), ratio=settings.ratio), passes
    meter = meter_of(opened, calibration, settings, job.machine)
    screen, screened = None, 0
    if settings.screening:
        screen = Screen(unit_scores(settings.screen_by, opened.model, units, **scoring), settings.screen or len(units))
        screened = len(batches) * 3 if settings.screen_by in ("fisher", "taylor") else 0
    chosen = select(
        meter,
        units,
        policy=settings.row.policy(settings),
        ratio=settings.ratio,
        pulls_per_step=settings.pulls_per_step,
        temperature=settings.temperature,
        seed=settings.seed,
        screen=screen,
    )
    return chosen, chosen.passes + screened


if __name__ == "__main__":
    main()
