"""The table of docs/performance.md: python benchmarks/damage.py [--json FILE] [--selection]

SmolLM2-135M heads and MLP groups, DeiT-Tiny heads, and the shapes of GPT-2 and Swin-Tiny with random weights; with --selection
also a whole search on SmolLM2-135M from a cold start, which takes half an hour. `secateur bench` does the same for any model.
SmolLM2-135M is made by scripts/smollm2.py; DeiT-Tiny is looked for in $SECATEUR_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from secateur.measure.bench import Row, compare_pulls, compare_selection, markdown, open_model

ROOT = Path(__file__).parents[1]
SMOLLM2 = str(ROOT / ".cache" / "SmolLM2-135M-Instruct")
DEIT = str(Path(os.environ.get("SECATEUR_DATA", ROOT.parent / "shared" / "data")) / "deit-tiny")
ROWS = (
    ("SmolLM2-135M heads", SMOLLM2, "head"),
    ("SmolLM2-135M MLP groups", SMOLLM2, "mlp"),
    ("DeiT-Tiny heads", DEIT, "head"),
    ("GPT-2 shape heads", "shape:gpt2", "head"),
    ("Swin-Tiny shape heads", "shape:swin_tiny_patch4_window7_224", "head"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pulls", type=int, default=12, help="a row")
    parser.add_argument("--stack", type=int, default=1)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--selection", action="store_true")
    parser.add_argument("--steps", type=int, default=0, help="only the first steps of the selection")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = {"stack": given.stack, "lanes": given.lanes}
    print(f"{torch.get_num_threads()} threads, {given.pulls} pulls a row, {options}\n")
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(markdown(rows) if len(rows) == 1 else markdown([row]).splitlines()[-1], flush=True)
        if given.json:
            given.json.write_text(json.dumps({"rows": [row.to_json() for row in rows]}, indent=1) + "\n")

    for name, model, target in ROWS:
        if given.only not in name:
            continue
        if not model.startswith("shape:") and not Path(model).exists():
            print(f"{name} is left out: there is no {model}.", file=sys.stderr)
            continue
        add(compare_pulls(open_model(model), name, target=target, pulls=given.pulls, **options))
    if given.selection:
        add(compare_selection(open_model(SMOLLM2), "SmolLM2-135M selection", steps=given.steps, **options))


if __name__ == "__main__":
    main()
