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

from secateur.card import markdown
from secateur.cut import cut
from secateur.families import task_of
from secateur.prune import Judging, load_batches, make_settings, open_model, prune
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
EVALUATION_BATCHES = {"text": 32, "image": -1}  # -1: as many as the task usually has
UNIFORM = {"layout": "uniform"}
CUTS: dict[str, dict[str, Any]] = {
    "smollm2-mlp20-uniform": SMOLLM2 | UNIFORM | {"target": "mlp", "ratio": 0.2, "method": "taylor"},
    "smollm2-kv1-uniform": SMOLLM2 | UNIFORM | {"target": "kv_group", "ratio": 1 / 3, "method": "ucb", "pulls_per_step": 8},
    "smollm2-heads10-free": SMOLLM2 | {"target": "head", "ratio": 0.1, "method": "fisher"},
    "deit-mlp20-uniform": DEIT | UNIFORM | {"target": "mlp", "ratio": 0.2, "method": "taylor"},
    "deit-heads10-free": DEIT | {"target": "head", "ratio": 0.1, "method": "ucb", "pulls_per_step": 64},
    "deit-params90": DEIT | {"target": "both", "target_params": 0.9, "method": "taylor"},
    "deit-flops80": DEIT | {"target": "both", "target_flops": 0.8, "method": "taylor"},
    "deit-latency80": DEIT | {"target": "both", "target_latency": 0.8, "method": "taylor"},
    "smollm2-flops80": SMOLLM2 | {"target": "kv_group+mlp", "target_flops": 0.8, "method": "taylor"},
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
        if plain.get("measurement"):
            wins += _wins(name, plain)
    titles = ["cut", "layout", "parameters left", "difference", "dense", "masked", "checkpoint", "repaired", "repair", "target"]
    print(markdown(titles, costs))
    if wins:
        print()
        print(markdown(["cut", "work", "dense", "small", "dense/small", "FLOPs dense/small", "gain of FLOPs'"], wins))


def _cut(asked: dict[str, Any], out: Path, *, measuring: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What secateur.json says of the cut, and of the same cut repaired."""
    most = EVALUATION_BATCHES["text" if "SmolLM2" in asked["model"] else "image"]
    result = prune(**asked, out=out, evaluation_batches=most, measuring=measuring)
    model, processor, settings = open_model(make_settings(**asked), trust_remote_code=False, watcher=Watcher())
    judging = Judging(max_batches=most).for_task(task_of(model), settings.calibration)
    size = settings.calibration_size
    calibration = load_batches(model, processor, settings.calibration, settings, split="train", size=size)
    evaluation = load_batches(
        model, processor, judging.data, settings, split="test", size=judging.size, most=judging.max_batches
    )
    repaired = cut(
        model,
        result.selection,
        out.with_name(f"{out.name}-repaired"),
        name=settings.model,
        calibration=calibration,
        layout=settings.layout,
        evaluation=evaluation,
        judged=result.record,
        repair="auto",
        measuring=False,
    )
    assert result.cut
    return result.cut, repaired


def _costs(name: str, plain: dict[str, Any], repaired: dict[str, Any]) -> list[str]:
    key = "perplexity" if plain["task"] == "text" else "top1"
    quality = [f"{float(side[key]):.4f}" for side in (plain["dense"], plain["masked"], plain["shrunk"], repaired["shrunk"])]
    goal = plain.get("goal")
    target = ""
    if goal:
        target = f"{goal['what']} {goal['asked']}: {goal['got']:.4f}"
        target += f", measured {goal['measured']:.3f}" if "measured" in goal else ""
    left = f"{plain['params']:,} ({plain['params'] / plain['dense_params']:.2%})"
    difference = f"{plain['proof']['relative']:.1e}"
    return [name, plain["layout"], left, difference, *quality, repaired["repair"]["form"], target]


def _wins(name: str, record: dict[str, Any]) -> list[list[str]]:
    found = record["measurement"]
    sizes = [
        [name, what, f"{found[f'dense_{key}'] / 1e6:.1f}", f"{found[f'small_{key}'] / 1e6:.1f}", _ratio(found, key), "", ""]
        for key, what in (("disk", "MB on disk"), ("memory", "peak MB"))
        if found.get(f"dense_{key}")
    ]
    times = []
    for timing in found["timings"]:
        medians = [f"{timing[f'{side}_median']['value']:.1f} ms" for side in ("dense", "small")]
        speedup = timing["speedup"]
        shown = f"{speedup['value']:.3f} ({speedup['low']:.3f} to {speedup['high']:.3f})"
        gain = "-" if timing["gain_share"] is None else f"{timing['gain_share']:.0%}"
        work = f"{timing['name']}, batch {timing['batch_size']}"
        times.append([name, work, *medians, shown, f"{timing['flop_ratio']:.3f}", gain])
    return sizes + times


def _ratio(found: dict[str, Any], key: str) -> str:
    return f"{found[f'dense_{key}'] / found[f'small_{key}']:.3f}"


if __name__ == "__main__":
    main()
