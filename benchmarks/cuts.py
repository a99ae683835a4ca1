"""The tables of docs/cuts.md: python benchmarks/cuts.py OUT [--only NAME] [--seeds 1,2,3] [--measure]

Cuts SmolLM2-135M and DeiT-Tiny to four fifths of their FLOPs, and DeiT-Tiny to nine tenths of its parameters, as `secateur
prune` does, with everything that makes a cut better and with each of these things left out in turn. Prints what is left and
what each is worth, a row a cut and a mean over the seeds. OUT keeps the checkpoints; killed and started again it goes on.
--measure times the models too: choose first without it if the machine is busy, then again with it on an idle one. SmolLM2-135M
is made by scripts/smollm2.py; DeiT-Tiny, Imagenette and WikiText-2 are looked for in $SECATEUR_DATA.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from secateur.cut.record import CutRecord, markdown
from secateur.measure.speed import Measurement
from secateur.prune import prune

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SECATEUR_DATA", ROOT.parent / "shared" / "data"))
SMOLLM2: dict[str, Any] = {
    "model": str(ROOT / ".cache" / "SmolLM2-135M-Instruct"),
    "calibration": str(DATA / "wikitext2"),
    "calibration_size": 192,
    "evaluation_batches": 16,
    "budget": "80forwards",
}
DEIT: dict[str, Any] = {
    "model": str(DATA / "deit-tiny"),
    "calibration": str(DATA / "imagenette"),
    "evaluation_size": 1000,
    "budget": "100forwards",
}
CUTS: dict[str, dict[str, Any]] = {
    "deit-flops80": DEIT | {"target": "both", "keep_flops": 0.8},
    "deit-params90": DEIT | {"target": "both", "keep_params": 0.9},
    "smollm2-flops80": SMOLLM2 | {"target": "kv_group+mlp", "keep_flops": 0.8},
}
WITHOUT: dict[str, dict[str, Any]] = {  # what is left out, or put in
    "all": {},
    "groups by address": {"group_by": "address"},
    "damage before repair": {"damage": "zeroed"},
    "repair all at once": {"repair": "least squares"},
    "Fisher for the search": {"method": "fisher", "budget": None, "group_by": "activation"},
    "whole sub-layers as well": {"wholes": True},
}
SAME_SEARCH = "repair all at once"  # as in "all"
WHOLES = {"both": "head+mlp+attention+mlp_layer", "kv_group+mlp": "kv_group+mlp+attention+mlp_layer"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cuts whose name has this in it")
    parser.add_argument("--without", default="", help="variants, by parts of their names with commas between")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of the searches")
    parser.add_argument("--measure", action="store_true")
    given = parser.parse_args()
    costs, wins = [], []
    for name, settings in CUTS.items():
        for variant, change in WITHOUT.items():
            if given.only not in name or not any(part in variant for part in given.without.split(",")):
                continue
            found = []
            for seed in map(int, given.seeds.split(",")):
                out = given.out / f"{name} {variant} {seed}".replace(" ", "-")
                if variant == SAME_SEARCH:
                    _take_over(given.out / f"{name}-all-{seed}", out)
                record = _cut(settings | change | {"seed": seed}, out, measuring=given.measure)
                found.append(record)
                print(out.name, _figures(record), flush=True)
                if record.measurement:
                    wins += _wins(out.name, record.measurement)
            costs.append([name, variant, *_costs(found)])
    titles = ["cut", "without", "parameters left", "dense", "zeroed", "repaired", "change", "seeds", "repair"]
    print(markdown(titles, costs))
    if wins:
        print()
        print(markdown(["cut", "work", "dense", "small", "dense/small", "FLOPs dense/small", "gain of FLOPs'"], wins))


def _cut(asked: dict[str, Any], out: Path, *, measuring: bool) -> CutRecord:
    """What secateur.json says of a cut that was repaired."""
    asked = {"repair": "auto"} | asked
    if asked.pop("wholes", False):
        asked["target"] = WHOLES[asked["target"]]
    result = prune(**{name: value for name, value in asked.items() if value is not None}, out=out, measure=measuring)
    assert result.cut
    return result.cut


def _take_over(searched: Path, out: Path) -> None:
    """Let a cut begin with what another one has chosen and evaluated."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("journal.jsonl", "selection.json", "evaluation.json"):
        if (searched / name).exists() and not (out / name).exists():
            shutil.copyfile(searched / name, out / name)


def _figures(record: CutRecord) -> list[float]:
    """Perplexity or top-1: dense, zeroed, repaired."""
    key = "perplexity" if record.task == "text" else "top1"
    return [float(getattr(side, key)) for side in (record.dense, record.zeroed, record.shrunk)]


def _costs(found: Sequence[CutRecord]) -> list[str]:
    """A row: means over the seeds, and the change in percent of perplexity or in points of top-1."""
    figures = [_figures(record) for record in found]
    text = found[0].task == "text"
    changes = [100 * (small / dense - 1 if text else small - dense) for dense, _, small in figures]
    spread = f" ± {stdev(changes):.2f}" if len(changes) > 1 else ""
    left = mean(record.params / record.dense_params for record in found)
    means = [f"{mean(column):.2f}" if text else f"{100 * mean(column):.2f}%" for column in zip(*figures, strict=True)]
    forms = "/".join(dict.fromkeys(record.repair.form for record in found if record.repair))
    return [f"{left:.2%}", *means, f"{mean(changes):+.2f}{spread}{'%' if text else ' points'}", str(len(found)), forms]


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
