"""The paper's figures from a store, and one per ablation, as SVG and PNG in grey: methods differ by hatch, marker and dash."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from secateur.errors import MissingExtra, StoreError, reasons
from secateur.experiment.store import Cell, Table, cells_of, slug
from secateur.files import jsonio
from secateur.methods import METHODS, label, searching

CHANGE = {"text": "perplexity change (%)", "image": "Top-1 drop (percentage points)"}
FORMATS = ("svg", "png")


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
    style = {
        "svg.hashsalt": "secateur",
        "font.size": 9,
        "text.parse_math": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
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


def _figures(tables: Sequence[Table]) -> Iterable[tuple[str, Callable[[Any], Any]]]:
    yield "figure1", _pipeline
    groups = {number: [c for c in cells_of(tables, number) if _has_any(c)] for number in ("6", "8", "9", "10")}
    yield from _lines_over_ratios("figure2", groups["6"], "MLP groups removed (%)")
    if groups["8"]:
        yield "figure3", lambda plt: _bars(plt, groups["8"], ["delta_top1"], searching(), evals=True)
    if groups["9"]:
        yield "figure4", lambda plt: _bars(plt, groups["9"], ["delta_top1", "zeroed.loss"], searching())
        yield "figureB1", lambda plt: _bars(plt, groups["9"], ["delta_top1"], list(METHODS))
    yield from _lines_over_ratios("figureB2", groups["10"], "attention heads removed (%)")
    varied = [cell for cell in cells_of(tables, "ablation") if _has_any(cell)]
    for setting in dict.fromkeys(name for cell in varied for name in cell.vary):
        of_setting = [cell for cell in varied if setting in cell.vary]
        for place in dict.fromkeys(_place(cell) for cell in of_setting):
            cells = [cell for cell in of_setting if _place(cell) == place]
            several = len({_place(cell) for cell in of_setting}) > 1
            name = f"ablation-{setting.replace('_', '-')}" + (f"-{slug(' '.join(map(str, place)))}" if several else "")
            ticks = [str(cell.vary[setting]) for cell in cells]
            title = f"{place[0]}, {place[2]}, {place[3]:.0%} on {place[1]}"
            joined = not any(isinstance(cell.vary[setting], str) for cell in cells)  # words are not joined by a line
            yield name, _curves(cells, ticks, setting.replace("_", " "), title, joined=joined)


def _lines_over_ratios(name: str, cells: list[Cell], x_label: str) -> Iterable[tuple[str, Callable[[Any], Any]]]:
    models = list(dict.fromkeys(cell.model for cell in cells))
    for model in models:
        of_model = [cell for cell in cells if cell.model == model]
        ticks = [f"{cell.ratio * 100:g}" for cell in of_model]
        title = f"{model} on {of_model[0].data}"
        yield name if len(models) == 1 else f"{name}-{slug(model)}", _curves(of_model, ticks, x_label, title)


def _curves(
    cells: Sequence[Cell], ticks: Sequence[str], x_label: str, title: str, *, joined: bool = True
) -> Callable[[Any], Any]:
    """One curve per method over the cells, with the deviation over seeds; a note counts failed or missing runs."""

    def paint(plt: Any) -> Any:
        picture, axes = plt.subplots(figsize=(5.6, 3.4))
        methods = _drawn(cells, list(METHODS))
        spacing = (0.2 if len(cells) > 1 else 0.7) / len(methods)  # so that error bars do not hide each other
        for n, method in enumerate(methods):
            points = []
            for i, cell in enumerate(cells):
                x = i + (n - (len(methods) - 1) / 2) * spacing
                height, error, note = _point(cell, method, cell.metric)
                if height is not None:
                    points.append((x, height, error))
                    if note:
                        axes.annotate(note, (x, height), textcoords="offset points", xytext=(4, 4), fontsize=7)
            look = METHODS[method].look
            if points:
                xs, heights, errors = zip(*points, strict=True)
                color = str(min(0.6, float(look.shade)))
                line = look.dash if joined else ""
                axes.errorbar(
                    xs, heights, errors, label=label(method), marker=look.marker, linestyle=line, color=color, capsize=2
                )
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set(xlabel=x_label, ylabel=CHANGE[cells[0].task], title=title)
        axes.legend(frameon=False, fontsize=8)
        return picture

    return paint


def _bars(plt: Any, cells: Sequence[Cell], figures: Sequence[str], methods: Sequence[str], *, evals: bool = False) -> Any:
    """One group of bars per model, one panel per figure."""
    drawn = _drawn(cells, methods)
    picture, panels = plt.subplots(len(figures), 1, figsize=(1.6 + 1.9 * max(2, len(cells)), 3.0 * len(figures)), squeeze=False)
    width = 0.8 / len(drawn)
    for panel, name in zip(panels[:, 0], figures, strict=True):
        for i, method in enumerate(drawn):
            look = METHODS[method].look
            for j, cell in enumerate(cells):
                height, error, note = _point(cell, method, name)
                x = j + (i - (len(drawn) - 1) / 2) * width
                if height is None:
                    panel.annotate("no valid run", (x, 0), rotation=90, ha="center", va="bottom", fontsize=7)
                    continue
                in_legend = label(method) if not any(_point(c, method, name)[0] is not None for c in cells[:j]) else None
                panel.bar(
                    x,
                    height,
                    width,
                    yerr=error,
                    color=look.shade,
                    hatch=look.hatch,
                    edgecolor="black",
                    label=in_legend,
                    capsize=2,
                )
                pulls = cell.spread(method, "pulls")
                text = (f"{pulls.mean:.0f} evals\n" if evals and pulls else "") + note
                if text:
                    top = (max(height, 0) + error) * 1.02
                    panel.annotate(text.strip(), (x, top), ha="center", va="bottom", fontsize=7)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(cells)), [cell.model for cell in cells])
        panel.set_ylabel(CHANGE["image"] if name == "delta_top1" else "cross-entropy loss")
    panels[0, 0].legend(frameon=False, fontsize=8, ncols=min(4, len(drawn)), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    picture.tight_layout()
    return picture


def _point(cell: Cell, method: str, name: str) -> tuple[float | None, float, str]:
    """Height, deviation, and a note such as "4/5" if runs failed or are missing."""
    spread = cell.spread(method, name)
    if spread is None or not spread.valid:
        return None, 0.0, ""
    scale = -100 if name == "delta_top1" else 1  # accuracy is shown as a drop in percentage points
    note = f"{spread.valid}/{spread.planned}" if spread.valid < spread.planned else ""
    return scale * spread.mean, abs(scale) * (spread.deviation or 0.0), note


def _has_any(cell: Cell) -> bool:
    return any(cell.valid(method) for method in cell.runs)


def _drawn(cells: Sequence[Cell], methods: Sequence[str]) -> list[str]:
    return [method for method in methods if any(cell.valid(method) for cell in cells)]


def _place(cell: Cell) -> tuple[str, str, str, float]:
    return cell.model, cell.data, cell.target, cell.ratio


STAGES = (
    ("pretrained model", "heads and MLP groups\nare the candidates U"),
    ("active pool", "2√|R| of those that remain,\ndrawn by seed"),
    ("pull", "mask one unit; loss on the\nsame batch with and without"),
    ("reward", "1 / (1 + exp(damage / τ))"),
    ("policy", "UCB or Thompson spends\nthe pulls of the step"),
    ("commit", "the unit of largest mean\nreward joins S"),
    ("judge", "held-out data, dense model\nagainst the masked one"),
    ("cut", "smaller tensors, proved\nequal and measured"),
)


def _pipeline(plt: Any) -> Any:
    """Figure 1: how units are selected, with the two loops, and what follows."""
    picture, axes = plt.subplots(figsize=(9.2, 3.4))
    axes.set(xlim=(0, 4.1), ylim=(0.1, 2.35))
    axes.axis("off")
    places = [*((i, 1.5) for i in range(4)), *((i, 0.35) for i in reversed(range(4)))]
    for (x, y), (name, words) in zip(places, STAGES, strict=True):
        in_loop = 0 < STAGES.index((name, words)) < 6
        box = plt.Rectangle((x + 0.05, y), 0.86, 0.58, facecolor="0.92" if in_loop else "1.0", edgecolor="black")
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
