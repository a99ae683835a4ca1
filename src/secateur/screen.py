"""What a person sees: tables on standard output, progress on standard error."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn, TimeRemainingColumn
from rich.table import Table

from secateur import selection as search
from secateur.card import FIGURES, goal_sentence, measured_where, measurement_table, unit_lines
from secateur.selection import Selection
from secateur.watcher import GridProgress, Watcher

SHOWN = 24  # layers with units
stdout, stderr = (Console(stderr=err, highlight=False, markup=False, soft_wrap=True) for err in (False, True))


class Bars(Watcher):
    """Progress on standard error: bars on a terminal, a line a step elsewhere."""

    def __enter__(self) -> Bars:
        self._progress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=stderr,
            disable=not stderr.is_terminal,
        )
        self._task: Any = None
        self._replaying = False
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def stage(self, name: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=None)
        if not stderr.is_terminal:
            stderr.print(f"{name} ...")

    def say(self, sentence: str) -> None:
        stderr.print(sentence)

    def pull(self, progress: search.Progress) -> None:
        if progress.replayed and not self._replaying:
            stderr.print("taking over the pulls of an earlier start ...")
        self._replaying = progress.replayed
        self._progress.update(
            self._task,
            description=f"step {progress.step + 1}/{progress.n_steps} pull {progress.pull}/{progress.n_pulls} "
            f"best {progress.best} (reward {progress.best_reward:.3f})",
            total=progress.n_steps * progress.n_pulls,
            completed=progress.step * progress.n_pulls + progress.pull,
        )
        if not stderr.is_terminal and progress.pull == progress.n_pulls and not progress.replayed:
            stderr.print(f"step {progress.step + 1}/{progress.n_steps}: {progress.best} (reward {progress.best_reward:.3f})")

    def evaluated(self, batch: int, n_batches: int) -> None:
        self._progress.update(self._task, total=n_batches, completed=batch)


class GridBars:
    """How a grid goes, on standard error: a bar on a terminal, a line a run elsewhere."""

    def __init__(self, n_runs: int) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._progress = RichProgress(*columns, console=stderr, disable=not stderr.is_terminal)
        self._task = self._progress.add_task("reading the store", total=n_runs)

    def __enter__(self) -> GridBars:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def say(self, sentence: str) -> None:
        stderr.print(sentence)

    def ran(self, progress: GridProgress) -> None:
        left = "" if progress.seconds_left is None else f", about {_duration(progress.seconds_left)} left"
        counts = f"{progress.done} done, {progress.failed} failed, {progress.left} left{left}"
        self._progress.update(self._task, description=counts, completed=progress.done + progress.failed)
        stderr.print(f"{progress.latest} ({counts})" if progress.latest else counts)


def show_evaluation(record: dict[str, Any], cut: dict[str, Any] | None = None) -> None:
    dense, pruned, shrunk = record["dense"], record.get("pruned"), (cut or {}).get("shrunk")
    table = Table("", "dense", *(["masked", "change"] if pruned else []), *(["checkpoint"] if shrunk else []))
    for key, name in FIGURES.items():
        if key not in dense or (key == "nonfinite_batches" and not dense[key] and not (pruned and pruned[key])):
            continue
        row = [name, _number(dense[key])]
        if pruned:
            percent = key == "perplexity"
            change = record.get("ppl_change_percent" if percent else f"delta_{key}")
            row += [_number(pruned[key]), _signed(change, "+.2f" if percent else "+.4f", "%" if percent else "")]
        table.add_row(*row, *([_number(shrunk[key])] if shrunk else []))
    stdout.print(table)
    if pruned:
        stdout.print(
            f"{len(record['units'])} units zeroed: {record['zeroed_percent']:.4f}% of {record['total_params']:,} parameters; "
            f"{record['pulls']:,} pulls, {record['forwards']:,} forwards."
        )
        if record.get("goal") and not (cut or {}).get("goal"):
            stdout.print(goal_sentence(record["goal"]))
        if not math.isfinite(float(pruned["loss"])):
            stdout.print("A failed run: the loss with the units zeroed is not finite.")
        if record["nonfinite_pulls"]:
            stdout.print(f"{record['nonfinite_pulls']} pulls gave a non-finite loss; the trace shows them.")


def show_units(selection: Selection) -> None:
    lines = unit_lines([unit.to_json() for unit in selection.units])
    more = f"  and in {len(lines) - SHOWN} more places; the file has them all" if len(lines) > SHOWN else ""
    stdout.print(f"Zeroed ({len(selection.units)}), as layer.index: {'  '.join(lines[:SHOWN])}{more}")


def show_cut(record: dict[str, Any]) -> None:
    left, total = record["params"], record["dense_params"]
    loader = "any loader reads it" if record["layout"] == "uniform" else "secateur.load_shrunk reads it"
    stdout.print(f"\nCut ({record['layout']}; {loader}): {left:,} of {total:,} parameters are left ({left / total:.2%}).")
    stdout.print(f"Proved: {record['proof']['sentence']}.")
    if record.get("repair"):
        stdout.print(record["repair"]["sentence"])
    if record.get("goal"):
        stdout.print(goal_sentence(record["goal"]))
    if record.get("measurement"):
        show_measurement(record["measurement"])


def show_measurement(found: dict[str, Any]) -> None:
    titles, rows = measurement_table(found)
    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    stdout.print(table)
    stdout.print(measured_where(found))
    for verdict in found["verdicts"]:
        stdout.print(verdict)


def _number(value: Any) -> str:
    return f"{value}" if isinstance(value, int) else f"{float(value):.4f}"


def _signed(value: Any, form: str, sign: str) -> str:
    if value is None:
        return ""
    return format(float(value), form) + sign if math.isfinite(float(value)) else str(float(value))


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{round(seconds)} s" if seconds < 90 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def without_batch_losses(record: dict[str, Any]) -> dict[str, Any]:
    """What is printed leaves out the long lists; the files have them."""
    short = {
        side: {name: value for name, value in record[side].items() if name != "batch_losses"}
        for side in ("dense", "pruned", "masked", "shrunk")
        if side in record
    }
    return record | short
