"""Display: what a person sees. Tables go to standard output, progress to standard error. Decides and computes nothing.

What writes sentences about cuts needs torch, and is imported where it is used: help comes without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn, TimeRemainingColumn
from rich.table import Table

from secateur.settings import UNIFORM
from secateur.watcher import GridProgress, HealProgress, Progress, Watcher

if TYPE_CHECKING:
    from secateur.cut.record import CutRecord
    from secateur.forecast import Forecast
    from secateur.judgement import Evaluation, Judgement
    from secateur.measure.speed import Measurement
    from secateur.model.accounting import Inventory
    from secateur.selection import Reached, Selection, Step

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

    def pull(self, progress: Progress) -> None:
        if progress.replayed and not self._replaying:
            stderr.print("taking over the pulls of an earlier start ...")
        self._replaying = progress.replayed
        self._progress.update(
            self._task,
            description=f"step {progress.step + 1}/{progress.n_steps} pull {progress.pull}/{progress.budget} "
            f"best {progress.best} (damage {progress.best_damage:+.4f})",
            total=progress.n_steps,
            completed=progress.step + progress.units * progress.pull / progress.budget,
        )

    def look(self, step: int, n_steps: int, n_batches: int) -> None:
        description = f"step {step + 1}/{n_steps}: gradients of {n_batches} batches"
        self._progress.update(self._task, description=description, total=n_steps, completed=step)

    def chosen(self, step: Step, n_steps: int) -> None:
        if not stderr.is_terminal and not self._replaying:
            stderr.print(f"step {step.step + 1}/{n_steps}: {step.unit} (damage {step.damage:+.4f})")

    def evaluated(self, batch: int, n_batches: int) -> None:
        self._progress.update(self._task, total=n_batches, completed=batch)

    def healed(self, progress: HealProgress) -> None:
        found = f"healing, held-out divergence {progress.loss:.4f} ({progress.before:.4f} before)"
        self._progress.update(self._task, description=found, total=progress.n_steps, completed=progress.step)
        if progress.judged and not stderr.is_terminal:
            stderr.print(f"step {progress.step}/{progress.n_steps}: {found}")


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


def show_evaluation(dense: Evaluation, judged: Judgement | None = None, cut: CutRecord | None = None) -> None:
    from secateur.cut.record import FIGURES

    sides = {"dense": dense}
    if judged:
        sides["zeroed"] = judged.zeroed
    if cut and cut.unhealed:
        sides["unhealed"] = cut.unhealed
    if cut and cut.shrunk:
        sides["checkpoint"] = cut.shrunk
    written = [title for title in ("unhealed", "checkpoint") if title in sides]
    values = {title: side.to_json() for title, side in sides.items()}
    table = Table("", "dense", *(["zeroed", "change"] if judged else []), *written)
    for key, name in FIGURES.items():
        bad = key == "nonfinite_batches"
        if key not in values["dense"] or (
            bad and not any(values[title][key] for title in ("dense", "zeroed") if title in values)
        ):
            continue
        row = [name, _number(values["dense"][key])]
        if judged:
            percent = key == "perplexity"
            change = judged.changes.get("ppl_change_percent" if percent else f"delta_{key}")
            row += [_number(values["zeroed"].get(key)), _signed(change, "+.2f" if percent else "+.4f", "%" if percent else "")]
        table.add_row(*row, *(_number(values[title].get(key)) for title in written))
    stdout.print(table)
    if judged:
        _show_judged(judged, cut)


def _show_judged(judged: Judgement, cut: CutRecord | None) -> None:
    stdout.print(
        f"{len(judged.units)} units zeroed: {judged.zeroed_percent:.4f}% of {judged.total_params:,} parameters; "
        f"{judged.pulls:,} pulls, {judged.forwards:,} forwards."
    )
    if judged.goal and not (cut and cut.goal):
        show_goal(judged.goal)
    if not math.isfinite(judged.zeroed.loss):
        stdout.print("A failed run: the loss with the units zeroed is not finite.")
    if judged.nonfinite_pulls:
        stdout.print(f"{judged.nonfinite_pulls} pulls gave a non-finite loss; the trace shows them.")


def show_healed(record: CutRecord) -> None:
    """A table of what the model scored on its way."""
    from secateur.cut.record import costs_table

    titles, rows = costs_table(record)
    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    stdout.print(table)


def show_goal(goal: Reached) -> None:
    from secateur.cut.record import goal_sentence

    stdout.print(goal_sentence(goal))


def show_units(selection: Selection) -> None:
    from secateur.cut.record import unit_lines

    lines = unit_lines(selection.units)
    more = f"  and in {len(lines) - SHOWN} more places; the file has them all" if len(lines) > SHOWN else ""
    stdout.print(f"Zeroed ({len(selection.units)}), as layer.index: {'  '.join(lines[:SHOWN])}{more}")


def show_cut(record: CutRecord) -> None:
    left, total = record.params, record.dense_params
    loader = "any loader reads it" if record.layout == UNIFORM else "secateur.load_shrunk reads it"
    stdout.print(f"\nCut ({record.layout}; {loader}): {left:,} of {total:,} parameters are left ({left / total:.2%}).")
    stdout.print(f"Proved: {record.proof}.")
    for mended in (record.repair, record.heal):
        if mended:
            stdout.print(str(mended))
    if record.goal:
        show_goal(record.goal)
    if record.measurement:
        show_measurement(record.measurement)


def show_measurement(measurement: Measurement) -> None:
    from secateur.cut.record import measured_where, measurement_table

    titles, rows = measurement_table(measurement)
    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    stdout.print(table)
    stdout.print(measured_where(measurement))
    for verdict in measurement.verdicts():
        stdout.print(verdict)


def show_inventory(listed: Inventory) -> None:
    table = Table(box=None)
    experts = any(row.experts for row in listed.layers)
    extra = ["experts"] if experts else []
    for title in ("layer", "heads", "K/V heads", "head width", *extra, "MLP width", "units", "parameters"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in listed.layers:
        extra_counts = [row.experts] if experts else []
        counts = (row.layer, row.heads, row.kv_heads, row.head_dim, *extra_counts, row.mlp_width, row.units, row.params)
        table.add_row(*(f"{value:,}" for value in counts))
    stdout.print(table)
    low, high = listed.zeroed_percent
    percent = f"{low:.4f}%" if low == high else f"{low:.4f}% to {high:.4f}%"
    stdout.print(f"{listed.candidates:,} candidates ({listed.target}), {listed.total_params:,} parameters.")
    stdout.print(
        f"A ratio of {listed.ratio:g} selects {listed.selected:,} ({listed.unit_ratio:.2%}): {percent} of the parameters."
    )


def show_forecast(forecast: Forecast) -> None:
    table = Table("setting", "value")
    for name, value in forecast.settings.items():
        if value is not None:
            in_bytes = name == "cache_memory"
            table.add_row(name, f"{int(value) / 2**30:.1f} GiB" if in_bytes else str(value))
    stdout.print(table)
    evaluated = f", {forecast.evaluation_batches} that judge" if forecast.evaluation_batches else ""
    about = f"{forecast.goal}: about " if forecast.goal else ""
    stdout.print(
        f"{forecast.model} ({forecast.family}, {forecast.task}): {forecast.calibration_batches} batches that choose{evaluated}."
    )
    stdout.print(f"Would remove {about}{forecast.removed:,} of {forecast.candidates:,} candidates.")
    if forecast.pulls:
        stdout.print(f"{forecast.pulls:,} pulls, about {forecast.forwards:,} forwards.")
    else:
        stdout.print(f"No pulls: {forecast.settings['method']} scores the candidates, and measures none.")
    parts = ", ".join(f"{stage} {_duration(seconds)}" for stage, seconds in forecast.seconds.items())
    more = f"; {', '.join(forecast.more)} come on top" if forecast.more else ""
    stdout.print(f"About {_duration(forecast.total_seconds)} on this machine, by a few measured pulls: {parts}{more}.")
    stdout.print("Nothing was written.")


def _number(value: Any) -> str:
    return "" if value is None else f"{value}" if isinstance(value, int) else f"{float(value):.4f}"


def _signed(value: float | None, form: str, sign: str) -> str:
    if value is None:
        return ""
    return format(value, form) + sign if math.isfinite(value) else str(value)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{round(seconds)} s" if seconds < 90 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def without_batch_losses(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record for printing, without the long lists of losses; the files have them."""
    sides = [side for side in ("dense", "pruned", "masked", "unhealed", "shrunk") if side in record]
    short = {side: {name: value for name, value in record[side].items() if name != "batch_losses"} for side in sides}
    return {**record, **short}
