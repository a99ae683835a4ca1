"""The tables of docs/cuts.md: python benchmarks/cuts.py OUT [--only NAME] [--without VARIANTS] [--seeds 1,2,3]

Cuts SmolLM2-135M and DeiT-Tiny to four fifths of their FLOPs, and DeiT-Tiny to nine tenths of its parameters, as `secateur
prune` does, with everything that makes a cut better and with each of these things left out in turn. Prints what is left and
what each is worth, a row a cut and a mean over the seeds. A line for each cut goes to results/cuts.jsonl, and a cut that has
one is not made again; OUT keeps the checkpoints, from which a killed cut goes on. SmolLM2-135M is made by
scripts/smollm2.py; DeiT-Tiny, Imagenette and WikiText-2 are looked for in $SECATEUR_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from secateur.cut.record import markdown
from secateur.files import jsonio
from secateur.prune import prune

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SECATEUR_DATA", ROOT.parent / "shared" / "data"))
STORE = ROOT / "results" / "cuts.jsonl"
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
MORE_DATA = "four times the data for the repair"
WITHOUT: dict[str, dict[str, Any]] = {  # what is left out, or put in
    "all": {},
    "groups by address": {"group_by": "address"},
    "groups of 16 channels": {"group_width": 16},
    "damage before repair": {"damage": "zeroed"},
    "damage after repair": {"damage": "repaired"},
    "repair all at once": {"repair": "least squares"},
    "Fisher for the search": {"method": "fisher", "budget": None, "group_by": "activation"},
    "whole sub-layers as well": {"wholes": True},
    MORE_DATA: {"repair_size": 768},
}
SAME_SEARCH = ("repair all at once", MORE_DATA)  # as in "all"
ONLY_FOR = {  # auto measures damage after repair on texts alone; Imagenette has no images that a repair has not seen
    "deit-flops80": tuple(name for name in WITHOUT if name not in ("groups of 16 channels", "damage before repair", MORE_DATA)),
    "deit-params90": ("all",),
    "smollm2-flops80": tuple(name for name in WITHOUT if name != "damage after repair"),
}
WHOLES = {"both": "head+mlp+attention+mlp_layer", "kv_group+mlp": "kv_group+mlp+attention+mlp_layer"}


@dataclass(frozen=True)
class Made:
    """A cut that was made: perplexities or shares of top-1, and where they come from."""

    cut: str
    variant: str
    seed: int
    left: float  # share of the parameters
    dense: float
    zeroed: float
    repaired: float
    losses: dict[str, float]  # of the same three
    form: str  # of the repair that was kept
    held_out: dict[str, float]  # losses that decided between the forms
    passes: float  # of the search
    versions: dict[str, str]

    @property
    def change(self) -> float:
        """In percent of perplexity, or in points of top-1."""
        return 100 * (self.repaired / self.dense - 1 if self.text else self.repaired - self.dense)

    @property
    def text(self) -> bool:
        return self.cut.startswith("smollm2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cuts whose name has this in it")
    parser.add_argument("--without", default="", help="variants, by parts of their names with commas between")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of the searches")
    given = parser.parse_args()
    for name in (name for name in CUTS if given.only in name):
        for variant in ONLY_FOR[name]:
            if any(part in variant for part in given.without.split(",")):
                for seed in map(int, given.seeds.split(",")):
                    _make(name, variant, seed, given.out)
    print(table())


def read_made() -> list[Made]:
    """The cuts that have a line in the store."""
    return [jsonio.decode(json.loads(line), Made) for line in STORE.read_text().splitlines()] if STORE.exists() else []


def table() -> str:
    """A row for each cut and variant that has lines, with means over its seeds."""
    found: dict[tuple[str, str], list[Made]] = {(name, variant): [] for name in CUTS for variant in WITHOUT}
    for one in read_made():
        found[one.cut, one.variant].append(one)
    titles = ["cut", "what differs", "parameters left", "dense", "zeroed", "repaired", "change", "seeds", "repair"]
    return markdown(titles, [_row(made) for made in found.values() if made])


def _make(name: str, variant: str, seed: int, folder: Path) -> None:
    """Make a cut and add its line, unless it has one."""
    if any((one.cut, one.variant, one.seed) == (name, variant, seed) for one in read_made()):
        return
    out = folder / f"{name} {variant} {seed}".replace(" ", "-")
    if variant in SAME_SEARCH:
        _take_over(folder / f"{name}-all-{seed}", out)
    asked = {"repair": "auto"} | CUTS[name] | WITHOUT[variant] | {"seed": seed}
    if asked.pop("wholes", False):
        asked["target"] = WHOLES[asked["target"]]
    result = prune(**{key: value for key, value in asked.items() if value is not None}, out=out, measure=False)
    record = result.cut
    assert record and record.repair and record.dense and record.zeroed and record.shrunk
    sides = {"dense": record.dense, "zeroed": record.zeroed, "repaired": record.shrunk}
    figures = {side: float(found.perplexity or found.top1 or 0.0) for side, found in sides.items()}
    made = Made(
        cut=name,
        variant=variant,
        seed=seed,
        left=record.params / record.dense_params,
        **figures,
        losses={side: found.loss for side, found in sides.items()},
        form=record.repair.form,
        held_out=record.repair.losses,
        passes=result.selection.passes,
        versions=record.versions,
    )
    with open(STORE, "a") as file:
        file.write(jsonio.dumps(asdict(made)) + "\n")
    print(jsonio.dumps(asdict(made)), flush=True)


def _take_over(searched: Path, out: Path) -> None:
    """Let a cut begin with what another one has chosen and evaluated."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("journal.jsonl", "selection.json", "evaluation.json"):
        if (searched / name).exists() and not (out / name).exists():
            shutil.copyfile(searched / name, out / name)


def _row(made: Sequence[Made]) -> list[str]:
    """A row of the table: means over the seeds."""
    columns = zip(*((one.dense, one.zeroed, one.repaired) for one in made), strict=True)
    text, changes = made[0].text, [one.change for one in made]
    means = [f"{mean(column):.2f}" if text else f"{100 * mean(column):.2f}%" for column in columns]
    spread = f" ± {stdev(changes):.2f}" if len(changes) > 1 else ""
    forms = "/".join(dict.fromkeys(one.form for one in made))
    left = f"{mean(one.left for one in made):.2%}"
    change = f"{mean(changes):+.2f}{spread}{'%' if text else ' points'}"
    return [made[0].cut, made[0].variant, left, *means, change, str(len(made)), forms]


if __name__ == "__main__":
    main()
