"""How fast paired damage is measured, against the plain way, in one run: python benchmarks/damage.py [--json FILE] [MODEL ...]

The plain way calls the model with its own loss twice a batch, once with the unit zeroed. Ours is `DamageMeter` with warm base
runs. Both measure the same units, spread over the model, on the same batches, in turn, so that a noisy machine troubles both
alike. FLOPs are counted by torch; their ratio is what reusing whole blocks allows if nothing but matrix products took time.

A MODEL is a folder, or `shape:NAME` for random weights in the shape of a model that Secateur knows (shape:gpt2).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from secateur.damage import DamageMeter
from secateur.families import candidate_units, task_of
from secateur.models import load, load_shapes
from secateur.units import Unit
from secateur.zeroing import zeroed

BATCHES_PER_PULL = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["shape:gpt2", "shape:swin_tiny_patch4_window7_224"])
    parser.add_argument("--pulls", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {given.pulls} pulls of {BATCHES_PER_PULL} batches a row")
    print("| model | target | speedup | FLOP ratio | plain s/pull | ours s/pull | largest difference |")
    print("|---" * 7 + "|")
    rows = []
    for name in given.models:
        model = random_weights(name.removeprefix("shape:")) if name.startswith("shape:") else load(name)[0]
        text = task_of(model) == "text"
        for target in ("head", "mlp") if text else ("head",):
            row = compare(model, target, given.pulls) | {"name": f"{Path(name).name} {target}"}
            rows.append(row)
            ratios = f"{row['speedup']:.2f} | {row['flop_ratio']:.2f}"
            seconds = f"{row['plain_seconds']:.3f} | {row['seconds']:.3f}"
            print(f"| {Path(name).name} | {target} | {ratios} | {seconds} | {row['difference']:.1e} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def random_weights(name: str) -> nn.Module:
    model = load_shapes(name).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model


def compare(model: nn.Module, target: str, pulls: int) -> dict[str, Any]:
    batches = make_batches(model)
    units = candidate_units(model, target)
    chosen = [units[i] for i in np.linspace(0, len(units) - 1, pulls).astype(int)]
    meter = DamageMeter(model, batches, batches_per_pull=BATCHES_PER_PULL)
    indices = range(BATCHES_PER_PULL)
    meter.measure(chosen[0], indices)  # warm
    plain_pull(model, batches, chosen[0])
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    difference = 0.0
    for unit in chosen:
        started = time.perf_counter()
        expected = plain_pull(model, batches, unit)
        seconds["plain"].append(time.perf_counter() - started)
        started = time.perf_counter()
        found = meter.measure(unit, indices)
        seconds["ours"].append(time.perf_counter() - started)
        difference = max(
            difference, *(abs(a - b) for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=True))
        )
    with FlopCounterMode(display=False) as plain_flops:
        plain_pull(model, batches, chosen[0])
    with FlopCounterMode(display=False) as our_flops:
        for unit in chosen:
            meter.measure(unit, indices)
    return {
        "speedup": sum(seconds["plain"]) / sum(seconds["ours"]),
        "flop_ratio": plain_flops.get_total_flops() * pulls / our_flops.get_total_flops(),
        "plain_seconds": statistics.fmean(seconds["plain"]),
        "seconds": statistics.fmean(seconds["ours"]),
        "difference": difference,
    }


def make_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """4 texts of 128 tokens, or 8 images of 224 x 224, a batch."""
    generator = torch.Generator().manual_seed(1)
    if task_of(model) == "text":
        tokens = [torch.randint(0, 1000, (4, 128), generator=generator) for _ in range(BATCHES_PER_PULL)]
        return [{"input_ids": ids, "labels": ids} for ids in tokens]
    return [
        {"pixel_values": torch.randn(8, 3, 224, 224, generator=generator), "labels": torch.arange(8)}
        for _ in range(BATCHES_PER_PULL)
    ]


def plain_pull(model: Any, batches: list[dict[str, Tensor]], unit: Unit) -> tuple[list[float], list[float]]:
    options = {"use_cache": False} if "input_ids" in batches[0] else {}
    with torch.inference_mode():
        base = [float(model(**batch, **options).loss) for batch in batches]
        with zeroed(model, [unit]):
            return base, [float(model(**batch, **options).loss) for batch in batches]


if __name__ == "__main__":
    main()
