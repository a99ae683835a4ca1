"""The paper's figures from a store, one per ablation, and what the choices cost, as SVG and PNG.

Seeds are points beside their mean. Every method has a colour that the colour-blind tell apart, and a marker and a dash that do
without colour.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from secateur.errors import MissingExtra, StoreError, reasons
from secateur.experiment.paper import paper_row, spread_of
from secateur.experiment.store import Cell, Record, Table, cells_of, slug
from secateur.files import jsonio
from secateur.methods import METHODS, label, searching

FIGURES = {  # what is drawn, as its axis says it
    "ppl_change_percent": "change of perplexity (%)",
    "delta_top1": "drop of Top-1 (percentage points)",
    "delta_loss": "increase of the held-out loss",
}
BARS = "bars: ± 1 standard deviation over seeds"
FORMATS = ("svg", "png")
BUDGETS = {"pulls_per_step", "batches_per_pull", "score_batches", "budget"}  # settings whose values are other costs
TRUE_TO = 0.1  # losses below it are drawn to scale where costs are
LOSSES = (-0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)  # labels of that axis
FEW_LABELS_FROM = 50  # the end of a logarithmic axis over its beginning, from which on only powers of ten have labels
MARKERS = 12  # of a curve over many units
LOG_FROM = 4  # the largest value of a setting over its smallest, from which on the axis is logarithmic
STYLE = {
    "text.parse_math": False,  # a name with dollar signs is no formula
    "svg.hashsalt": "secateur",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 2.6,
    "figure.constrained_layout.use": True,
}
DENSE = {"color": "black", "linewidth": 1.0, "zorder": 1}
PAPER = {"color": "black", "zorder": 5, "marker": "|", "linestyle": "", "markersize": 13, "markeredgewidth": 1.6}
PAPER_DASH = (0, (6, 3))

Paint = Callable[[Any], Any]


def draw(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write Figure 1 and every figure for which the store has results; returns the paths in the paper's order.

    >>> draw(read_tables(Path("results/deit")), Path("figures"))
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("matplotlib", "experiment", "Drawing figures") from error
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for name, paint in _figures(tables):
            drawn = {}
            with reasons(StoreError, f"The figure {name} cannot be drawn"):
                picture = paint(pyplot)
                for form in FORMATS:
                    data = io.BytesIO()
                    metadata = {"Date": None} if form == "svg" else {"Software": None}  # so that equal results give equal bytes
                    picture.savefig(data, format=form, dpi=160, bbox_inches="tight", metadata=metadata)
                    drawn[folder / f"{name}.{form}"] = data.getvalue()
                pyplot.close(picture)
            for path, content in drawn.items():
                jsonio.write_bytes(path, content)
            written += drawn
    return written


def _figures(tables: Sequence[Table]) -> Iterable[tuple[str, Paint]]:
    yield "figure1", _pipeline
    groups = {number: [c for c in cells_of(tables, number) if _has_any(c)] for number in ("6", "8", "9", "10")}
    yield from _over_ratios("figure2", "6", groups["6"], "MLP groups removed (%)")
    if groups["8"]:
        yield "figure3", _strips("8", groups["8"], ["delta_top1"], searching(), evals=True)
    if groups["9"]:
        yield "figure4", _strips("9", groups["9"], ["delta_top1", "delta_loss"], searching())
        yield "figureB1", _strips("9", groups["9"], ["delta_top1"], list(METHODS))
    yield from _over_ratios("figureB2", "10", groups["10"], "attention heads removed (%)")
    varied = [cell for cell in cells_of(tables, "ablation") if _has_any(cell)]
    for setting in dict.fromkeys(name for cell in varied for name in cell.vary):
        of_setting = [cell for cell in varied if setting in cell.vary]
        for suffix, cells in _by_place(of_setting):
            values = [cell.vary[setting] for cell in cells]
            words = setting.replace("_", " ")
            yield f"ablation-{setting.replace('_', '-')}{suffix}", _curves(_paper_table(cells[0]), cells, values, words)
    yield from _costs(tables)


def _over_ratios(name: str, number: str, cells: list[Cell], x_label: str) -> Iterable[tuple[str, Paint]]:
    names = list(dict.fromkeys(cell.name for cell in cells))
    for model in names:
        of_model = [cell for cell in cells if cell.name == model]
        percents = [round(cell.ratio * 100, 9) for cell in of_model]
        one = _strips(number, of_model, [of_model[0].metric], list(METHODS))
        many = _curves(number, of_model, percents, x_label)
        yield name if len(names) == 1 else f"{name}-{slug(model)}", many if len(of_model) > 1 else one


# Methods side by side


def _strips(
    number: str, cells: Sequence[Cell], figures: Sequence[str], methods: Sequence[str], *, evals: bool = False
) -> Paint:
    """One line per method: its seeds, and its mean with the deviation above them; one panel per figure and model."""

    def paint(plt: Any) -> Any:
        drawn = _drawn(cells, methods)
        size = (2.0 + 3.8 * len(cells), len(figures) * (0.9 + 0.38 * len(drawn)))
        picture, panels = plt.subplots(len(figures), len(cells), figsize=size, squeeze=False, sharey=True)
        in_paper = False
        for row, name in zip(panels, figures, strict=True):
            for panel, cell in zip(row, cells, strict=True):
                for y, method in enumerate(drawn):
                    in_paper |= _strip(panel, cell, method, name, y, _papers(number, cell, method, name))
                    pulls = cell.spread(method, "pulls")
                    if evals and pulls and pulls.valid:
                        panel.text(1.02, y, f"{pulls.mean:.0f} evals", transform=panel.get_yaxis_transform(), va="center")
                panel.axvline(0, **DENSE)
                panel.set(xlabel=FIGURES[name], yticks=range(len(drawn)), yticklabels=[label(method) for method in drawn])
                panel.set_ylim(len(drawn) - 0.4, -0.6)
                panel.grid(visible=False, axis="y")
        for top, bottom, cell in zip(panels[0], panels[-1], cells, strict=True):
            top.set_title(_title(cell), fontsize=9)
            bottom.set_xlabel(f"{FIGURES[figures[-1]]}\n{BARS}", linespacing=1.35)
        _explain(plt, picture, PAPER if in_paper else {})
        return picture

    return paint


def _strip(panel: Any, cell: Cell, method: str, name: str, y: float, papers: float | None) -> bool:
    """Draw a method's line; whether it holds a value of the paper."""
    look = METHODS[method].look
    values = _values(cell, method, name)
    panel.plot(values, [y + 0.2] * len(values), "o", color=look.colour, markersize=4, alpha=0.55, markeredgewidth=0)
    error = statistics.stdev(values) if len(values) > 1 else 0.0
    if values:
        mean = statistics.fmean(values)
        panel.errorbar(mean, y - 0.1, xerr=error, marker=look.marker, color=look.colour, markersize=7, capsize=2.5, zorder=4)
    if note := _note(cell, method):
        panel.annotate(note, (statistics.fmean(values) if values else 0, y - 0.25), ha="center", va="bottom", fontsize=7)
    if papers is not None:
        panel.plot([papers], [y - 0.1], **PAPER)
    return papers is not None


# Methods over a setting or a ratio


def _curves(number: str, cells: Sequence[Cell], values: Sequence[Any], x_label: str) -> Paint:
    """One curve per method over the cells: the seeds, the mean with the deviation, and the paper's value of the method."""

    def paint(plt: Any) -> Any:
        numeric = not any(isinstance(value, str | bool) for value in values)  # words are not joined by a line
        at_ratios = len({cell.ratio for cell in cells}) > 1  # then the paper's value is another at each of them
        xs = [float(value) for value in values] if numeric else [float(i) for i in range(len(values))]
        low, high = min(xs), max(xs)
        log = numeric and not at_ratios and low > 0 and high / low >= LOG_FROM
        picture, axes = plt.subplots(figsize=(6.2, 3.4))
        methods = _drawn(cells, list(METHODS))
        in_paper = False
        for n, method in enumerate(methods):
            aside = (n - (len(methods) - 1) / 2) * 0.015  # so that error bars do not hide each other
            places = [x * (high / low) ** aside if log else x + (high - low or 1) * aside for x in xs]
            beside = [x * (high / low) ** 0.02 if log else x + (high - low or 1) * 0.02 for x in places]
            _curve(axes, cells, method, places, beside, joined=numeric)
            papers = [_papers(number, cell, method, cell.metric) for cell in cells]
            look = METHODS[method].look
            for x, value in zip(places, papers, strict=True):
                if value is not None and at_ratios:
                    axes.plot([x], [value], "_", markersize=15, markeredgewidth=1.6, color=look.colour)
            if not at_ratios and papers[0] is not None:
                axes.axhline(papers[0], color=look.colour, linestyle=PAPER_DASH, linewidth=1.2, zorder=1)
            in_paper |= any(value is not None for value in papers)
        for x, cell in zip(xs, cells, strict=True):
            if failed := [label(m) for m in methods if cell.records(m) and not cell.valid(m)]:
                words = "\n".join(["no valid run:", *failed])
                axes.text(x, 0.99, words, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=7)
        axes.axhline(0, **DENSE)
        if log:
            axes.set_xscale("log")
        axes.set_xticks(xs, [f"{value:g}" if numeric else str(value) for value in values])
        axes.minorticks_off()
        axes.set_xlabel(x_label)
        axes.set_ylabel(f"{FIGURES[cells[0].metric]}\n{BARS}", linespacing=1.35)
        axes.set_title(_title(cells[0]) if not at_ratios else f"{cells[0].name} on {cells[0].data}", fontsize=9)
        if not numeric:
            axes.set_xlim(-0.5, len(xs) - 0.5)
        sign = {"marker": "_", "linestyle": "", "markersize": 15} if at_ratios else {"linestyle": PAPER_DASH}
        _explain(plt, picture, sign if in_paper else {}, methods)
        return picture

    return paint


def _curve(
    axes: Any, cells: Sequence[Cell], method: str, places: Sequence[float], beside: Sequence[float], *, joined: bool
) -> None:
    """The means at their places, and the seeds beside them."""
    look = METHODS[method].look
    means = []
    for x, near, cell in zip(places, beside, cells, strict=True):
        values = _values(cell, method, cell.metric)
        axes.plot([near] * len(values), values, "o", color=look.colour, markersize=4, alpha=0.4, markeredgewidth=0)
        if values:
            means.append((x, statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0))
            if note := _note(cell, method):
                axes.annotate(note, (x, means[-1][1]), textcoords="offset points", xytext=(5, 5), fontsize=7)
    if means:
        xs, heights, errors = zip(*means, strict=True)
        line = {"marker": look.marker, "linestyle": look.dash if joined else "", "color": look.colour}
        axes.errorbar(xs, heights, errors, markersize=7, capsize=2.5, linewidth=1.4, zorder=4, **line)


# What a choice costs


def _costs(tables: Sequence[Table]) -> Iterable[tuple[str, Paint]]:
    """The damage against the forward FLOPs of each choice, and how it grew while units were chosen."""
    cells = [cell for table in tables for cell in table.cells if set(cell.vary) <= BUDGETS]
    counted = [cell for cell in cells if any(record.flops is not None for record in _valid(cell))]
    for suffix, of_place in _by_place(counted):
        yield f"cost{suffix}", _cost(of_place)
    traced = [cell for cell in cells if any(record.progress for record in _valid(cell))]
    for suffix, of_place in _by_place(traced):
        yield f"anytime{suffix}", _anytime(of_place)


def _cost(cells: Sequence[Cell]) -> Paint:
    """One point a run and the mean of each method; those of several budgets are joined. What costs nothing is a line."""

    def paint(plt: Any) -> Any:
        picture, axes = plt.subplots(figsize=(6.2, 3.8))
        methods = _drawn(cells, list(METHODS))
        for method in methods:
            look, means = METHODS[method].look, []
            for records in _budgets(cells, method):
                costs = [record.flops or 0.0 for record in records if record.flops is not None]
                damages = [record.figure("delta_loss") for record in records if record.flops is not None]
                if not costs or not all(costs):
                    if damages:
                        height = statistics.fmean(damages)
                        axes.axhline(height, color=look.colour, linestyle=look.dash, linewidth=1.2, zorder=1)
                        words = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom", "fontsize": 7}
                        axes.text(0.99, height, f"{label(method)}: no passes", **words)
                    continue
                axes.plot(costs, damages, "o", color=look.colour, markersize=3.5, alpha=0.4, markeredgewidth=0)
                means.append((statistics.geometric_mean(costs), statistics.fmean(damages)))
            if means:
                line = {"marker": look.marker, "linestyle": look.dash, "color": look.colour}
                axes.plot(*zip(*sorted(means), strict=True), markersize=8, linewidth=1.2, zorder=4, **line)
        _in_powers(axes, "FLOP")
        axes.axhline(0, **DENSE)
        axes.set_yscale("symlog", linthresh=TRUE_TO)  # so that a method that fails does not hide the others
        axes.autoscale(axis="y")
        ticks = [tick for tick in LOSSES if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="forward FLOPs of the choice", ylabel=f"{FIGURES['delta_loss']} (logarithmic beyond {TRUE_TO:g})")
        axes.set_title(_title(cells[0]), fontsize=9)
        _explain(plt, picture, {}, methods)
        return picture

    return paint


def _anytime(cells: Sequence[Cell]) -> Paint:
    """The estimated damage after each chosen unit against what was spent until then: each run, and the mean over seeds."""

    def paint(plt: Any) -> Any:
        picture, axes = plt.subplots(figsize=(6.2, 3.8))
        methods = [m for m in _drawn(cells, list(METHODS)) if any(r.progress for r in _records(cells, m))]
        in_flops = all(r.pass_flops for m in methods for r in _records(cells, m) if r.progress)
        for method in methods:
            look = METHODS[method].look
            for records in _budgets(cells, method):
                curves = []
                for record in (record for record in records if record.progress):
                    scale = (record.pass_flops or 1.0) if in_flops else 1.0
                    curves.append([(passes * scale, damage) for passes, damage in record.progress])
                    axes.plot(*zip(*curves[-1], strict=True), color=look.colour, linewidth=0.7, alpha=0.35)
                # The mean over seeds of the n-th unit, as far as all of them came.
                steps = [tuple(map(statistics.fmean, zip(*step, strict=True))) for step in zip(*curves, strict=False)]
                if steps:
                    line = {"marker": look.marker, "linestyle": look.dash, "color": look.colour}
                    every = math.ceil(len(steps) / MARKERS)
                    axes.plot(*zip(*steps, strict=True), markersize=5, markevery=every, linewidth=1.6, zorder=4, **line)
        _in_powers(axes, "FLOP" if in_flops else "")
        axes.axhline(0, **DENSE)
        spent = "forward FLOPs" if in_flops else "forward passes of a calibration batch"
        axes.set(xlabel=f"{spent} spent so far", ylabel="estimated damage of the units chosen so far")
        axes.set_title(_title(cells[0]), fontsize=9)
        _explain(plt, picture, {}, methods, linewidth=0.7)
        return picture

    return paint


def _in_powers(axes: Any, unit: str) -> None:
    """A logarithmic axis with labels such as "20 TFLOP", as many as there is room for."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < FEW_LABELS_FROM else (1,)))
    axes.xaxis.set_major_formatter(EngFormatter(unit))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _budgets(cells: Sequence[Cell], method: str) -> list[list[Record]]:
    """The method's records by the settings of their choice; a run that two tables share is there once."""
    groups: dict[str, dict[str, Record]] = {}
    for record in _records(cells, method):
        settings = {name: value for name, value in record.settings.to_json().items() if name not in ("seed", "device")}
        groups.setdefault(jsonio.fingerprint(settings), {})[record.key] = record
    return [list(records.values()) for records in groups.values()]


def _records(cells: Sequence[Cell], method: str) -> list[Record]:
    return [record for cell in cells for record in cell.valid(method).values()]


def _valid(cell: Cell) -> list[Record]:
    return [record for method in cell.runs for record in cell.valid(method).values()]


# What is common to them


def _explain(plt: Any, picture: Any, paper: dict[str, Any], methods: Sequence[str] = (), **seed: Any) -> None:
    """The legend outside the axes: the methods, unless the axes name them, and what the other signs mean."""
    looks = {label(method): METHODS[method].look for method in methods}
    signs: dict[str, dict[str, Any]] = {
        name: {"marker": k.marker, "linestyle": k.dash, "color": k.colour} for name, k in looks.items()
    }
    signs["a seed"] = {"color": "0.45", "alpha": 0.6} | (seed or {"marker": "o", "linestyle": "", "markersize": 4})
    if not methods:
        signs["mean over seeds"] = {"marker": "s", "color": "0.45"}
    signs["dense model"] = DENSE
    if paper:
        signs["the paper's mean"] = {"color": "0.45"} | paper
    handles = [plt.Line2D([], [], label=name, **look) for name, look in signs.items()]
    beside, below = {"loc": "outside right upper"}, {"loc": "outside lower center", "ncols": len(handles)}
    picture.legend(handles=handles, **(beside if methods else below))


def _values(cell: Cell, method: str, name: str) -> list[float]:
    """The figure of each valid run, as the axis shows it: accuracy as a drop in percentage points."""
    scale = -100 if name == "delta_top1" else 1
    return [scale * record.figure(name) for record in cell.valid(method).values()]


def _note(cell: Cell, method: str) -> str:
    """Such as "4/5" if runs failed or are missing."""
    spread = cell.spread(method, "pulls")
    if spread is None or spread.valid == spread.planned:
        return ""
    return f"{spread.valid}/{spread.planned}" if spread.valid else "no valid run"


def _papers(number: str, cell: Cell, method: str, name: str) -> float | None:
    """The paper's mean of a method in one of its tables, as the axis shows it; None if it has none."""
    ratio, row = f"{cell.ratio * 100:g}%", None
    if number == "9":  # the appendix has the loss too
        row = paper_row("A4", cell.model, f"{cell.ratio:.2f}", label(method))
    elif number == "10":
        row = paper_row("10", ratio, label(method), cell.model)
    elif number == "6":
        row = paper_row("6", ratio, cell.model)
    elif ratio == "10%":
        row = paper_row("A5", cell.model, label(method)) if number == "8" else paper_row(number, cell.model)
    columns = {"delta_top1": "Δ Top-1", "delta_loss": "Δ loss"}
    column = "PPL change (finite mean ± std)" if number == "10" else columns.get(name, label(method))
    found = spread_of(row.get(column, "")) if row else None
    return found and (-100 if name == "delta_top1" else 1) * found[0]


def _paper_table(cell: Cell) -> str:
    """The paper's table that has the place of an ablation."""
    if cell.task == "image":
        return "9"
    return "6" if cell.target == "mlp" else "7" if cell.data == "LAMBADA" else "4"


def _has_any(cell: Cell) -> bool:
    return any(cell.valid(method) for method in cell.runs)


def _drawn(cells: Sequence[Cell], methods: Sequence[str]) -> list[str]:
    """The methods that the cells have a run of; what failed is drawn as a note."""
    return [method for method in methods if any(cell.records(method) for cell in cells)]


def _by_place(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """The cells of each place, and what its files' names end in if there are several."""
    places = list(dict.fromkeys(cell.place for cell in cells))
    suffixes = [f"-{slug(' '.join(map(str, place)))}" if len(places) > 1 else "" for place in places]
    return [(suffix, [c for c in cells if c.place == place]) for suffix, place in zip(suffixes, places, strict=True)]


def _title(cell: Cell) -> str:
    what = {"head": "the heads", "mlp": "the MLP groups"}.get(cell.target, cell.target)
    return f"{cell.model}, {cell.ratio:.0%} of {what}, on {cell.data}"


# Figure 1

STAGES = (
    ("pretrained model", "heads and MLP groups\nare the candidates U"),
    ("active pool", "2√|R| of those that remain,\ndrawn by seed"),
    ("pull", "mask one unit; loss on the\nsame batch with and without"),
    ("reward", "1 / (1 + exp(damage / τ))"),
    ("policy", "UCB or Thompson spends\nthe pulls of the step"),
    ("commit", "the unit of largest mean\nreward joins S"),
    ("judge", "held-out data, dense model\nagainst the zeroed one"),
    ("cut", "smaller tensors, proved\nequal and measured"),
)


def _pipeline(plt: Any) -> Any:
    """Figure 1: how units are selected, with the two loops, and what follows."""
    picture, axes = plt.subplots(figsize=(9.2, 3.2))
    axes.set(xlim=(0, 3.97), ylim=(0.3, 2.13))
    axes.axis("off")
    places = [*((i, 1.5) for i in range(4)), *((i, 0.35) for i in reversed(range(4)))]
    for (x, y), (name, words) in zip(places, STAGES, strict=True):
        in_loop = 0 < STAGES.index((name, words)) < 6
        box = plt.Rectangle((x + 0.05, y), 0.86, 0.58, facecolor="#E3EFF8" if in_loop else "1.0", edgecolor="black")
        axes.add_patch(box)
        axes.text(x + 0.48, y + 0.43, name, ha="center", va="center", weight="bold")
        axes.text(x + 0.48, y + 0.2, words, ha="center", va="center", fontsize=6.8)
    arrow = {"arrowstyle": "-|>", "color": "black"}
    for (x0, y0), (x1, y1) in pairwise(places):
        if y0 == y1:
            step = 1 if x1 > x0 else -1
            ends = (x0 + (0.91 if step > 0 else 0.05), y0 + 0.29), (x1 + (0.05 if step > 0 else 0.91), y1 + 0.29)
        else:
            ends = (x0 + 0.48, y0), (x1 + 0.48, y1 + 0.58)
        axes.annotate("", ends[1], ends[0], arrowprops=arrow)
    loop_arrow = {"arrowstyle": "-|>", "color": "0.35", "linestyle": "--"}
    axes.annotate("", (2.48, 1.5), (3.3, 0.93), arrowprops=loop_arrow)
    axes.text(2.62, 1.2, "next pull", fontsize=7.5, color="0.25", ha="center")
    axes.annotate("", (1.48, 1.5), (2.3, 0.93), arrowprops=loop_arrow)
    axes.text(1.62, 1.2, "next step", fontsize=7.5, color="0.25", ha="center")
    return picture
