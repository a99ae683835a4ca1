"""What wide products win on this processor (model/devices.py): python benchmarks/products.py [MODEL ...] [--repeats 9]

Passes of a batch of 4 x 128 tokens or 8 images, as torch multiplies and in full width, in turns. SmolLM2-135M is made by
scripts/smollm2.py; DeiT-Tiny is looked for in $SECATEUR_DATA.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

from secateur.cut.record import markdown
from secateur.measure.speed import median
from secateur.model.devices import multiply_in_full_width, multiplying_as_torch_does
from secateur.model.families import task_of
from secateur.model.loading import load_model
from secateur.model.losses import Batch, batch_loss

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SECATEUR_DATA", ROOT.parent / "shared" / "data"))
MODELS = [str(ROOT / ".cache" / "SmolLM2-135M-Instruct"), str(DATA / "deit-tiny")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if not multiply_in_full_width():
        print("On this processor torch's own products are used: there is nothing to compare.")
        return
    rows = []
    for name in given.models:
        model = load_model(name, device="cpu", dtype="float32")
        batch = _batch(model)
        _pass(model, batch)
        pairs = []
        for _ in range(given.repeats):
            with multiplying_as_torch_does():
                own = _pass(model, batch)
            pairs.append((own, _pass(model, batch)))
        times = median([own[0] / wide[0] for own, wide in pairs])
        difference = max(abs(own[1] - wide[1]) for own, wide in pairs)
        rows.append([Path(name).name, f"{times.value:.2f} ({times.low:.2f} to {times.high:.2f})", f"{difference:.1e}"])
    print(markdown(["model", "times as fast", "largest difference of the loss"], rows))


def _batch(model: nn.Module) -> Batch:
    draw = torch.Generator().manual_seed(0)
    if task_of(model) == "image":
        return {"pixel_values": torch.randn(8, 3, 224, 224, generator=draw), "labels": torch.arange(8)}
    ids = torch.randint(0, 1000, (4, 128), generator=draw)
    return {"input_ids": ids, "labels": ids}


def _pass(model: nn.Module, batch: Batch) -> tuple[float, float]:
    started = time.perf_counter()
    with torch.inference_mode():
        loss = float(batch_loss(model, batch))
    return time.perf_counter() - started, loss


if __name__ == "__main__":
    main()
