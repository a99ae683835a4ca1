"""Display: what a person sees. Tables go to standard output, progress to standard error. Decides and computes nothing.

What writes sentences about cuts needs torch, and is imported where it is used: help comes without it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress as RichProgress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from secateur.cli.map import model_map
from secateur.errors import SecateurError
from secateur.series import DENSE, Series, table
from secateur.settings import UNIFORM
from secateur.units import GROUP_WIDTH
from secateur.watcher import GridProgress, HealProgress, Progress, Watcher, Watchers

if TYPE_CHECKING:
    from secateur.cut.record import CutRecord
    from secateur.forecast import Forecast
    from secateur.judgement import Evaluation, Judgement
    from secateur.measure.speed import Measurement
    from secateur.model.accounting import Inventory
    from secateur.selection import Reached, Selection, Step

SHOWN = 24  # layers with units
stdout, stderr = (Console(stderr=err, highlight=False, markup=False, soft_wrap=True) for err in (False, True))


class Left(ProgressColumn):
    """How far a stage is and the time left, or the time so far where its length is not known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(_clock(task.elapsed or 0))
        left = "" if task.time_remaining is None else f"  {_clock(task.time_remaining)} left"
        return Text(f"{int(task.completed)}/{int(task.total)}{left}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _is_live() -> bool:
    """Whether standard error can show a line that changes."""
    return stderr.is_terminal and not stderr.is_dumb_terminal


def _one_line() -> RichProgress:
    """One line that changes: what is done, a bar, and the time left; nothing where it cannot be shown."""
    return RichProgress(
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=max(4, min(24, stderr.width // 5))),
        Left(table_column=Column(no_wrap=True)),
        console=stderr,
        expand=True,
        transient=True,
        disable=not _is_live(),
        refresh_per_second=4,
        speed_estimate_period=600,  # seconds: a step of a large model takes minutes
    )


class Bars(Watcher):
    """Progress on standard error: one line with a bar on a terminal, a line a step elsewhere."""

    def __enter__(self) -> Bars:
        self._progress = _one_line()
        self._task: Any = None
        self._replaying = False
        self._begin("starting")
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def stage(self, name: str) -> None:
        self._begin(name)
        if not _is_live():
            stderr.print(f"{name} ...")

    def _begin(self, name: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._stage, self._looking = name, ""  # the latter: what is done before the pulls of a step
        self._task = self._progress.add_task(name, total=None)

    def say(self, sentence: str) -> None:
        stderr.print(sentence)

    def pull(self, progress: Progress) -> None:
        if progress.replayed and not self._replaying:
            stderr.print("taking over the pulls of an earlier start ...")
        if self._replaying and not progress.replayed:
            self._begin(self._stage)  # else what was read from the journal would count as fast work
        self._replaying, self._looking = progress.replayed, ""
        self._progress.update(
            self._task,
            description=f"step {progress.step + 1}/{progress.n_steps} pull {progress.pull}/{progress.budget} "
            f"best {progress.best} (damage {progress.best_damage:+.4f})",
            total=progress.n_steps,
            completed=progress.step + progress.units * progress.pull / progress.budget,
        )

    def look(self, step: int, n_steps: int, n_batches: int) -> None:
        self._looking = f"step {step + 1}/{n_steps}: gradients of {n_batches} batches"
        self._progress.update(self._task, description=self._looking, total=n_steps, completed=step)

    def chosen(self, step: Step, n_steps: int) -> None:
        if not _is_live() and not self._replaying:
            stderr.print(f"step {step.step + 1}/{n_steps}: {step.unit} (damage {step.damage:+.4f})")

    def evaluated(self, batch: int, n_batches: int) -> None:
        if self._looking:  # the bar is that of the steps
            self._progress.update(self._task, description=f"{self._looking}, {batch} done")
        else:
            self._progress.update(self._task, total=n_batches, completed=batch)

    def healed(self, progress: HealProgress) -> None:
        found = f"healing, held-out loss {progress.loss:.4f} ({progress.before:.4f} before)"
        self._progress.update(self._task, description=found, total=progress.n_steps, completed=progress.step)
        if progress.judged and not _is_live():
            stderr.print(f"step {progress.step}/{progress.n_steps}: {found}")


@contextmanager
def following(quiet: bool = False, tensorboard: Path | None = None) -> Iterator[Watcher]:
    """The watcher of a command: progress on standard error unless it is to be quiet, and what TensorBoard reads."""
    more = []
    if tensorboard is not None:
        from secateur.trackers import TensorBoard

        more.append(TensorBoard(tensorboard))
    if quiet:
        yield Watchers(*more)
        return
    with Bars() as bars:
        yield Watchers(bars, *more)


class GridBars:
    """How a grid goes, on standard error: a bar on a terminal, a line a run elsewhere; nothing if it is to be quiet."""

    def __init__(self, n_runs: int, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._progress = _one_line()
        self._progress.disable |= quiet
        self._task = self._progress.add_task("reading the store", total=n_runs)

    def __enter__(self) -> GridBars:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def say(self, sentence: str) -> None:
        if not self._quiet:
            stderr.print(sentence)

    def ran(self, progress: GridProgress) -> None:
        left = "" if progress.seconds_left is None else f", about {_duration(progress.seconds_left)} left"
        counts = f"{progress.done} done, {progress.failed} failed, {progress.left} left{left}"
        self._progress.update(self._task, description=counts, completed=progress.done + progress.failed)
        self.say(f"{progress.latest} ({counts})" if progress.latest else counts)


def tell(sentence: str) -> None:
    """Print a sentence: broken between words on a terminal, and in one line elsewhere."""
    stdout.print(sentence, soft_wrap=not stdout.is_terminal)


def show_next(*words: object, quiet: bool = False) -> None:
    """The command to type next, on standard error, so that a result that is kept in a file is kept without it."""
    if not quiet:
        stderr.print(f"Next: {shlex.join(map(str, words))}")


def show_loading(record: CutRecord, folder: Path, *, quiet: bool = False) -> None:
    """The line of Python that loads a cut model, on standard error."""
    from secateur.cut.record import loading_line

    if not quiet:
        stderr.print(f"Next, in Python: {loading_line(record, folder)}")


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
    titles = ["", "dense", *(["zeroed", "change"] if judged else []), *written]
    rows = []
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
        rows.append([*row, *(_number(values[title].get(key)) for title in written)])
    _show_table(titles, rows)
    if judged:
        _show_judged(judged, cut)


def _show_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, to_the_right: bool = False) -> None:
    """A table of numbers, or where it does not fit a line a row: numbers are never cut short."""
    table = Table(*(Column(title, justify="right" if title and to_the_right else "left") for title in titles))
    for row in rows:
        table.add_row(*row)
    if stdout.measure(table, options=stdout.options.update(max_width=1000)).maximum <= stdout.width:
        stdout.print(table)
        return
    for first, *cells in rows:
        named = zip(titles[1:], cells, strict=True)
        tell(f"{first}: {', '.join(f'{title} {cell}' for title, cell in named if cell)}")


def _show_judged(judged: Judgement, cut: CutRecord | None) -> None:
    tell(
        f"{len(judged.units)} units zeroed: {judged.zeroed_percent:.4f}% of {judged.total_params:,} parameters; "
        f"{judged.pulls:,} pulls, {judged.forwards:,} forwards."
    )
    if judged.goal and not (cut and cut.goal):
        show_goal(judged.goal)
    if not math.isfinite(judged.zeroed.loss):
        tell("A failed run: the loss with the units zeroed is not finite.")
    if judged.nonfinite_pulls:
        tell(f"{judged.nonfinite_pulls} pulls gave a non-finite loss; the trace shows them.")


def show_healed(record: CutRecord) -> None:
    """A table of what the model scored on its way."""
    from secateur.cut.record import costs_table

    _show_table(*costs_table(record))


def show_goal(goal: Reached) -> None:
    from secateur.cut.record import goal_sentence

    tell(goal_sentence(goal))


def show_units(selection: Selection, model: str, *, trust_remote_code: bool = False) -> None:
    """The selected units: a list if they are few, and a map of the model."""
    from secateur.cut.record import unit_lines
    from secateur.model.accounting import unit_counts

    lines = unit_lines(selection.units)
    listed = f", as layer.index: {'  '.join(lines)}" if len(lines) <= SHOWN else "; the file lists them all."
    tell(f"Zeroed ({len(selection.units)}){listed}")
    settings = selection.made_with.settings if selection.made_with else None
    target = settings.target if settings else "+".join(dict.fromkeys(unit.kind for unit in selection.units))
    group_width = next((unit.width for unit in selection.units if unit.width), GROUP_WIDTH)
    try:
        counts = unit_counts(model, target, group_width, trust_remote_code=trust_remote_code)
    except SecateurError:
        return  # the shapes of a model whose code is its own may need its weights
    for line in model_map(counts, selection.units, stdout.width):
        stdout.print(line)


def show_cut(record: CutRecord) -> None:
    from secateur.cut.record import cost_in_words

    left, total = record.params, record.dense_params
    loader = "any loader reads it" if record.layout == UNIFORM else "secateur.load_shrunk reads it"
    tell(f"\nCut ({record.layout}; {loader}): {left:,} of {total:,} parameters are left ({left / total:.2%}).")
    tell(f"Proved: {record.proof}.")
    for mended in (record.repair, record.heal):
        if mended:
            tell(str(mended))
    if record.goal:
        show_goal(record.goal)
    if record.measurement:
        show_measurement(record.measurement, cost_in_words(record))


def show_series(series: Series, out: Path) -> None:
    """A row for the dense model and for each cut, and where the knee is."""
    _show_table(*table(series), to_the_right=True)
    tell("Time is that of a batch; the dense model takes 1. In brackets is the 95% interval.")
    if series.knee and series.knee != DENSE:
        tell(f"The knee of the curve is {series.knee}: after it quality falls faster than time. {out / series.knee} has it.")


def show_measurement(measurement: Measurement, cost: str = "") -> None:
    """The figures side by side, and a sentence that sums them up with what the speed cost."""
    from secateur.cut.record import measured_where, short_table, verdict

    _show_table(*short_table(measurement), to_the_right=True)
    tell(measured_where(measurement))
    tell(verdict(measurement, cost))


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
    tell(f"{listed.candidates:,} candidates ({listed.target}), {listed.total_params:,} parameters.")
    tell(f"A ratio of {listed.ratio:g} selects {listed.selected:,} ({listed.unit_ratio:.2%}): {percent} of the parameters.")


def show_forecast(forecast: Forecast) -> None:
    table = Table("setting", "value")
    for name, value in forecast.settings.items():
        if value is not None:
            in_bytes = name == "cache_memory"
            table.add_row(name, f"{int(value) / 2**30:.1f} GiB" if in_bytes else str(value))
    stdout.print(table)
    evaluated = f", {forecast.evaluation_batches} that judge" if forecast.evaluation_batches else ""
    about = f"{forecast.goal}: about " if forecast.goal else ""
    tell(
        f"{forecast.model} ({forecast.family}, {forecast.task}): {forecast.calibration_batches} batches that choose{evaluated}."
    )
    tell(f"Would remove {about}{forecast.removed:,} of {forecast.candidates:,} candidates.")
    if forecast.pulls:
        tell(f"{forecast.pulls:,} pulls, about {forecast.forwards:,} forwards.")
    else:
        tell(f"No pulls: {forecast.settings['method']} scores the candidates, and measures none.")
    parts = ", ".join(f"{stage} {_duration(seconds)}" for stage, seconds in forecast.seconds.items())
    more = f"; {', '.join(forecast.more)} come on top" if forecast.more else ""
    tell(f"About {_duration(forecast.total_seconds)} on this machine, by a few measured pulls: {parts}{more}.")
    tell("Nothing was written.")


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
