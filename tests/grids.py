"""A small grid over the tiny world: its file, the command that runs it, and what its store says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from secateur.experiment.store import RECORDS, Record, read_store
from tiny import GROUP
from worlds import SEQ_LEN, World

GRID = """
task = "{task}"
seeds = [1, 2]
target = "head"
ratios = [0.3]

[settings]
calibration = "{data}"
pulls_per_step = 4
group_width = %d
seq_len = %d

[models]
Tiny = "{model}"

[[table]]
number = "{number}"
methods = ["random", "magnitude", "fisher", "greedy", "ucb", "ts"]

[[table]]
number = "ablation"
methods = ["ucb", "greedy"]
vary.pool_size = [3, 4]
""" % (GROUP, SEQ_LEN)  # noqa: UP031 - the braces are for what differs
TIMINGS = {"selection_seconds", "evaluation_seconds", "total_seconds", "machine"}


def write_grid(world: World, folder: Path, task: str = "text", change: Callable[[str], str] = str) -> Path:
    model, data = world.of(task)
    text = GRID.replace("{task}", task).replace("{model}", str(model)).replace("{data}", str(data))
    path = folder / "tiny.toml"
    path.write_text(change(text.replace("{number}", "4" if task == "text" else "9")))
    return path


def records_of(folder: Path) -> list[Record]:
    return list(read_store(folder)[0].values())


def n_lines(folder: Path) -> int:
    """The records that a store has on disk, whole ones only."""
    path = folder / RECORDS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def lasting(folder: Path) -> dict[str, dict[str, Any]]:
    """The records without what differs from time to time and from machine to machine."""
    return {
        record.key: {name: value for name, value in record.to_json().items() if name not in TIMINGS}
        for record in records_of(folder)
    }


def grid_command(path: Path, store: Path, *options: str, work: str = "") -> tuple[list[str], dict[str, str]]:
    """The command for another process, and its environment; `work` names a module of tests/ that does the tasks."""
    stand_in = f"workers.WORK = {work!r}; " if work else ""
    program = f"from secateur.cli.app import main; from secateur.experiment import workers; {stand_in}main()"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", program, "grid", str(path), "-o", str(store), *options]
    return command, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
