"""Mean and standard deviation over seeds of what `secateur prune` wrote: python benchmarks/summary.py FOLDER

FOLDER holds one output folder a run. Runs go together by method; failed ones (a non-finite loss) are counted, not averaged.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("top1", "delta_top1", "top5", "perplexity", "ppl_change_percent", "loss", "delta_loss", "zeroed_percent")


def main(folder: Path) -> None:
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/evaluation.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        runs.setdefault(record["settings"]["method"], []).append(record)
    if not runs:
        sys.exit(f"No evaluation.json in the folders of {folder}.")
    some = next(iter(runs.values()))[0]
    columns = [name for name in COLUMNS if name in some or name in some["pruned"]]
    print("| method | valid | seeds | pulls | forwards | " + " | ".join(columns) + " | selection s |")
    print("|---" * (len(columns) + 6) + "|")
    for method, records in runs.items():
        valid = [record for record in records if math.isfinite(float(record["pruned"]["loss"]))]
        seeds = ", ".join(
            str(record["settings"]["seed"]) for record in sorted(records, key=lambda r: int(r["settings"]["seed"]))
        )
        cells = [spread([float(r.get(name, r["pruned"].get(name))) for r in valid]) for name in columns]
        counts = [spread([float(r[name]) for r in valid], ".0f") for name in ("pulls", "forwards")]
        seconds = spread([r["selection_seconds"] for r in valid], ".0f")
        print(f"| {method} | {len(valid)}/{len(records)} | {seeds} | " + " | ".join([*counts, *cells, seconds]) + " |")
    dense = {record["settings"]["seed"]: record["dense"] for records in runs.values() for record in records}
    for name in ("top1", "perplexity", "loss"):
        if name in some["dense"]:
            print(f"dense {name}: {spread([float(d[name]) for d in dense.values()])}")


def spread(values: list[float], form: str = ".4f") -> str:
    if not values:
        return "failed"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    mean = format(statistics.fmean(values), form)
    return mean if deviation == 0 else f"{mean} ± {format(deviation, form)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
