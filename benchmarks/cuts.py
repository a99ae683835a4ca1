"""The table of docs/cuts.md: python benchmarks/cuts.py OUT [--only NAME] [--no-measure]

Cuts SmolLM2-135M and DeiT-Tiny as `secateur prune` does, each without and with repair, and prints what is left, what it costs
and what it wins. OUT keeps the checkpoints; killed and started again it goes on. Choose first with --no-measure if the machine
is busy, then run again without it on an idle one. SmolLM2-135M is made by scripts/smollm2.py; DeiT-Tiny, Imagenette and
WikiText-2 are looked for in $SECATEUR_DATA.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from secateur.cut.record import CutRecord, markdown
from secateur.measure.speed import Measurement
from secateur.prune import prune
from secateur.settings import make_job
from secateur.steps import calibration_of, cut, evaluation_of, open_job
from secateur.watcher import Watcher

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SECATEUR_DATA", ROOT.parent / "shared" / "data"))
SMOLLM2: dict[str, Any] = {
    "model": str(ROOT / ".cache" / "SmolLM2-135M-Instruct"),
    "calibration": str(DATA / "wikitext2"),
    "calibration_size": 256,
    "batches_per_pull": 1,
    "batches_per_step": 8,
    "score_batches": 8,
}
DEIT: dict[str, Any] = {
    "model": str(DATA / "deit-tiny"),
    "calibration": str(DATA / "imagenette"),
    "batches_per_pull": 1,
    "score_batches": 32,
}
EVALUATION_BATCHES = {"text": 32, "image": None}  # None: as many as the task usually has
UNIFORM = {"layout": "uniform"}
CUTS: dict[str, dict[str, Any]] = {
    "smollm2-mlp20-uniform": SMOLLM2 | UNIFORM | {"target": "mlp", "ratio": 0.2, "method": "taylor"},
    "smollm2-kv1-uniform": SMOLLM2 | UNIFORM | {"target": "kv_group", "ratio": 1 / 3, "method": "ucb", "pulls_per_step": 8},
    "smollm2-heads10-free": SMOLLM2 | {"target": "head", "ratio": 0.1, "method": "fisher"},
    "deit-mlp20-uniform": DEIT | UNIFORM | {"target": "mlp", "ratio": 0.2, "method": "taylor"},
    "deit-heads10-free": DEIT | {"target": "head", "ratio": 0.1, "method": "ucb", "pulls_per_step": 64},
    "deit-params90": DEIT | {"target": "both", "keep_params": 0.9, "method": "taylor"},
    "deit-flops80": DEIT | {"target": "both", "keep_flops": 0.8, "method": "taylor"},
    "deit-latency80": DEIT | {"target": "both", "keep_latency": 0.8, "method": "taylor"},
    "smollm2-flops80": SMOLLM2 | {"target": "kv_group+mlp", "keep_flops": 0.8, "method": "taylor"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cuts whose name has this in it")
    parser.add_argument("--no-measure", action="store_true")
    given = parser.parse_args()
    costs, wins = [], []
    for name, settings in CUTS.items():
        if given.only not in name:
            continue
        plain, repaired = _cut(settings, given.out / name, measuring=not given.no_measure)
        costs.append(_costs(name, plain, repaired))
        print(costs[-1], flush=True)
        if plain.measurement:
            wins += _wins(name, plain.measurement)
    titles = ["cut", "layout", "parameters left", "difference", "dense", "zeroed", "checkpoint", "repaired", "repair", "goal"]
    print(markdown(titles, costs))
    if wins:
        print()
        print(markdown(["cut", "work", "dense", "small", "dense/small", "FLOPs dense/small", "gain of FLOPs'"], wins))


def _cut(asked: dict[str, Any], out: Path, *, measuring: bool) -> tuple[CutRecord, CutRecord]:
    """What secateur.json says of the cut, and of the same cut repaired."""
    asked = asked | {"evaluation_batches": EVALUATION_BATCHES["text" if "SmolLM2" in asked["model"] else "image"]}
    result = prune(**asked, out=out, measure=measuring)
    opened, job = open_job(make_job(**asked, repair="auto", measure=False), Watcher())
    repaired = cut(
        opened,
        result.selection,
        out.with_name(f"{out.name}-repaired"),
        calibration=calibration_of(opened, job.settings, Watcher()),
        layout=job.settings.layout,
        evaluation=evaluation_of(opened, job),
        judgement=result.record.judgement,
        cutting=job.cutting,
    )
    assert result.cut
    return result.cut, repaired


def _costs(name: str, plain: CutRecord, repaired: CutRecord) -> list[str]:
    key = "perplexity" if plain.task == "text" else "top1"
    quality = [f"{getattr(side, key):.4f}" for side in (plain.dense, plain.zeroed, plain.shrunk, repaired.shrunk)]
    goal = plain.goal
    reached = ""
    if goal:
        reached = f"{goal.what} {goal.asked}: {goal.got:.4f}"
        reached += f", measured {goal.measured:.3f}" if goal.measured is not None else ""
    left = f"{plain.params:,} ({plain.params / plain.dense_params:.2%})"
    assert repaired.repair
    return [name, plain.layout, left, f"{plain.proof.relative:.1e}", *quality, repaired.repair.form, reached]


def _wins(name: str, found: Measurement) -> list[list[str]]:
    sizes = (("MB on disk", found.dense_disk, found.small_disk), ("peak MB", found.dense_memory, found.small_memory))
    rows = [
        [name, what, f"{dense / 1e6:.1f}", f"{small / 1e6:.1f}", f"{dense / small:.3f}", "", ""]
        for what, dense, small in sizes
        if dense and small
    ]
    for timing in found.timings:
        medians = [f"{side.value:.1f} ms" for side in (timing.dense_median, timing.small_median)]
        shown = "{:.3f} ({:.3f} to {:.3f})".format(*timing.speedup)
        gain = "-" if timing.gain_share is None else f"{timing.gain_share:.0%}"
        rows.append([name, f"{timing.name}, batch {timing.batch_size}", *medians, shown, f"{timing.flop_ratio:.3f}", gain])
    return rows


if __name__ == "__main__":
    main()
