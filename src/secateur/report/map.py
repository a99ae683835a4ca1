"""The map of a model: layers by units, coloured by damage, with the selected units in their order. Reads only a selection."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from secateur.report.html import Html, Picture, between, count, details, figure, joined, number, picture, table, tag
from secateur.report.intervals import mean_interval
from secateur.units import KINDS, Unit, counts_by_layer, selectable

if TYPE_CHECKING:
    from secateur.selection import Selection

# From harmless to harmful: viridis from its light end to its dark one, which stays in order without colour vision.
COLOURS = ("#fde725", "#b5de2b", "#6ece58", "#35b779", "#1f9e89", "#26828e", "#31688e", "#3e4989", "#482878", "#440154")
MOST_ROWS = 2000  # of the table
WIDEST = 920  # of the cells of one kind, before they become as small as they may
SMALLEST, LARGEST = 6, 26


@dataclass(frozen=True)
class Cell:
    """A candidate: what was measured of it, and whether it was selected."""

    unit: Unit
    pulls: int = 0
    damage: float = math.nan  # the mean over all batches of its finite pulls, whatever was selected at the time
    interval: tuple[float, float] | None = None
    broken: bool = False  # its mask made the loss non-finite
    order: int | None = None  # 1 was selected first
    sure: float | None = None
    believed: float = math.nan  # the damage that the policy believed when it chose
    score: float | None = None  # of a static method
    estimate: float = math.nan  # by gradients and measurements together, where the search looked at gradients
    inside: bool = False  # gone with a whole attention, MLP or block

    @property
    def value(self) -> float:
        """What colours the cell: the best estimate of the damage that there is, else a score."""
        known = [v for v in (self.estimate, self.damage) if math.isfinite(v)]
        return known[0] if known else math.nan if self.score is None else self.score

    @property
    def never(self) -> bool:
        """Whether a search could have measured it and did not."""
        return not self.pulls and self.score is None

    def words(self) -> str:
        """All of it in words."""
        unit = self.unit
        parts = [f"{KINDS[unit.kind].label} {unit.layer}.{unit.index} (layer {unit.layer}, unit {unit.index})"]
        if self.order:
            sure = f", {self.sure:.0%} sure" if self.sure is not None else ""
            parts.append(f"Removed as number {self.order}{sure}")
        elif self.inside:
            parts.append("Gone with the whole that it is part of")
        if math.isfinite(self.estimate):
            how = "gradients alone" if self.never else "gradients and measurements"
            parts.append(f"Estimated damage {number(self.estimate, 3, sign=True)}, by {how}")
        if math.isfinite(self.damage):
            spread = f" (95%: {between(*self.interval, 3, sign=True)})" if self.interval else ""
            parts.append(f"Measured damage {number(self.damage, 3, sign=True)}{spread}")
        if self.pulls:
            parts.append(count(self.pulls, "measurement"))
        elif self.never:
            parts.append("Never measured")
        if self.score is not None:
            parts.append(f"Score {number(self.score)}")
        if self.broken:
            parts.append("Made the loss non-finite")
        return "\n".join(parts)


def cells_of(selection: Selection) -> list[Cell]:
    """Every candidate of a selection, by kind, layer and index; of an older file, those that it names."""
    damages: dict[tuple[str, int, int], list[float]] = {}
    pulls: dict[tuple[str, int, int], int] = {}
    for pull in selection.trace:
        key = _key(pull.unit)
        pulls[key] = pulls.get(key, 0) + 1
        damages.setdefault(key, []).extend(map(operator.sub, pull.masked_losses, pull.base_losses))
    known = [*selection.units, *selection.scores, *(pull.unit for pull in selection.trace)]
    counts = selection.candidates or counts_by_layer(known)
    units = {_key(unit): unit for unit in known}
    if selection.candidates or selection.scores:
        for kind, of_layers in counts.items():
            for layer, n in enumerate(of_layers):
                for index in range(n):
                    units.setdefault((kind, layer, index), Unit(kind, layer, index))
    steps = {_key(step.unit): step for step in selection.steps}
    order = {_key(unit): i for i, unit in enumerate(selection.units, 1)}
    scores = {_key(unit): score for unit, score in selection.scores.items()}
    left = {_key(unit) for unit in selectable(units.values(), selection.units)}
    cells = []
    for key in sorted(units, key=lambda key: ([*KINDS].index(key[0]), *key[1:])):
        found = damages.get(key, [])
        finite = [damage for damage in found if math.isfinite(damage)]
        step = steps.get(key)
        cells.append(
            Cell(
                units[key],
                pulls.get(key, 0),
                statistics.fmean(finite) if finite else math.nan,
                mean_interval(finite),
                len(finite) < len(found),
                order.get(key),
                step.sure if step else None,
                step.damage if step else math.nan,
                scores.get(key),
                _estimate(selection, key),
                key not in left and key not in order,
            )
        )
    return cells


def _estimate(selection: Selection, key: tuple[str, int, int]) -> float:
    kind, layer, index = key
    try:
        return selection.estimates[kind][layer][index]
    except (KeyError, IndexError):
        return math.nan


def _key(unit: Unit) -> tuple[str, int, int]:
    return unit.kind, unit.layer, unit.index


class Scale(NamedTuple):
    """Colours of the values between the outermost twentieths."""

    low: float
    high: float

    def colour(self, value: float) -> str:
        return COLOURS[self.place(value)]

    def place(self, value: float) -> int:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return min(max(int(share * len(COLOURS)), 0), len(COLOURS) - 1)


def scale_of(cells: Sequence[Cell]) -> Scale:
    values = sorted(cell.value for cell in cells if math.isfinite(cell.value)) or [0.0]
    return Scale(values[len(values) // 20], values[len(values) - 1 - len(values) // 20])


def map_of(selection: Selection) -> Picture:
    """The map of a selection, for a notebook: layers by units, coloured by damage, the selected units in their order.

    >>> map_of(Selection.load("out/selection.json"))
    """
    return picture(draw_map(selection))


def draw_map(selection: Selection) -> Html:
    """The panels of all kinds side by side, what the signs mean, and a table of all units."""
    cells = cells_of(selection)
    scale = scale_of(cells)
    kinds = list(dict.fromkeys(cell.unit.kind for cell in cells))
    by_kind = {kind: [cell for cell in cells if cell.unit.kind == kind] for kind in kinds}
    many = max(cell.unit.layer for cell in cells) > max(cell.unit.index for cell in cells)  # layers; then they go across
    panels = [_panel(kind, of_kind, scale, across=many) for kind, of_kind in by_kind.items()]
    scored = bool(selection.scores) and not selection.trace
    stripes = {"d": "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2"}
    form = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
    inks = {"never": "hatch", "never-light": "hatch light", "never-dark": "hatch dark"}
    patterns = [tag("pattern", tag("path", class_=ink, **stripes), id=name, **form) for name, ink in inks.items()]
    shared = tag("svg", tag("defs", *patterns), width=0, height=0, aria_hidden="true", class_="defs")
    return joined([shared, tag("div", *panels, class_="panels"), _legend(scale, cells, scored=scored), _listed(cells)])


def _panel(kind: str, cells: Sequence[Cell], scale: Scale, *, across: bool) -> Html:
    """The units of one kind: a row for each layer, or with `across` a column for each."""
    layers, width = max(cell.unit.layer for cell in cells) + 1, max(cell.unit.index for cell in cells) + 1
    columns, rows = (layers, width) if across else (width, layers)
    size = min(max(WIDEST // columns, SMALLEST), LARGEST)
    tall = max(size, 11) if rows <= 48 else size
    left, top = 44, 34
    names = ("layer", "unit") if across else ("unit", "layer")
    every = math.ceil(22 / size)
    parts = [
        *(tag("text", i, x=left + (i + 0.5) * size, y=top - 6, text_anchor="middle") for i in range(0, columns, every)),
        *(tag("text", i, x=left - 7, y=top + (i + 0.5) * tall + 4, text_anchor="end") for i in range(rows)),
        tag("text", names[0], x=left, y=11),
        tag("text", names[1], x=11, y=top, transform=f"rotate(-90 11 {top})", text_anchor="end"),
    ]
    for i, cell in enumerate(cells):
        row, column = (cell.unit.index, cell.unit.layer) if across else (cell.unit.layer, cell.unit.index)
        square = _square(cell, scale, left + column * size, top + row * tall, size, tall)
        place = {"data_row": row, "data_column": column, "tabindex": -1 if i else 0}
        state = "cell" + (" chosen" if cell.order else "") + (" never" if cell.never else "")
        parts.append(tag("g", tag("title", cell.words()), square, class_=state, role="img", **place))
    wide, high = left + columns * size + 4, top + rows * tall + 4
    words = KINDS[kind].words
    label = f"Map of {count(len(cells), words)} in {count(layers, 'layer')}; arrow keys go from unit to unit"
    drawn = tag(
        "svg", *parts, width=wide, height=high, viewBox=f"0 0 {wide} {high}", class_="map", role="group", aria_label=label
    )
    chosen = sum(cell.order is not None for cell in cells)
    title = words[0].upper() + words[1:] + "s"
    return figure(title, tag("div", drawn, class_="scroll"), note=f"{chosen:,} of {len(cells):,} removed")


def _square(cell: Cell, scale: Scale, x: float, y: float, wide: float, high: float) -> Html:
    """A cell: its colour, hatched if it was never measured, and its order if it was selected."""
    known = math.isfinite(cell.value)
    ink = "light" if known and scale.place(cell.value) >= 4 else "dark"
    gap = 1 if wide >= 9 else 0.5
    place = {"x": x + gap, "y": y + gap, "width": wide - 2 * gap, "height": high - 2 * gap, "rx": 2 if wide > 12 else 0}
    hatched = f"url(#{'never-light' if ink == 'light' else 'never-dark' if known else 'never'})"
    parts = [tag("rect", fill=scale.colour(cell.value) if known else "none", **place)]
    parts += [tag("rect", fill=hatched, class_="over", **place)] if cell.never else []
    if cell.order and wide >= 17:
        number_at = {"x": x + wide / 2, "y": y + high / 2 + 4, "text_anchor": "middle"}
        parts.append(tag("text", cell.order, class_=f"order {ink}", **number_at))
    elif cell.order:
        parts.append(tag("circle", cx=x + wide / 2, cy=y + high / 2, r=min(wide, high) * 0.22, class_=f"order {ink}"))
    elif cell.inside or cell.broken:
        ends = x + 3, y + 3, x + wide - 3, y + high - 3
        cross = f"M{ends[0]:g},{ends[1]:g} L{ends[2]:g},{ends[3]:g} M{ends[2]:g},{ends[1]:g} L{ends[0]:g},{ends[3]:g}"
        parts.append(tag("path", d=cross, class_=f"gone {ink}"))
    return joined(parts)


def _legend(scale: Scale, cells: Sequence[Cell], *, scored: bool) -> Html:
    """What colours and signs mean."""
    what = "score (low goes first)" if scored else "damage: how much the loss rises without the unit"
    ramp = tag("span", *(tag("i", style=f"background:{colour}") for colour in COLOURS), class_="ramp", aria_hidden="true")
    ends = f"{number(scale.low, 2, sign=not scored)} or less", f"{number(scale.high, 2, sign=not scored)} or more"
    items = [tag("li", ends[0], ramp, ends[1], Html(" "), tag("span", what, class_="soft"))]
    items.append(tag("li", tag("b", "3", class_="sign chosen"), "removed, in this order"))
    if never := sum(cell.never for cell in cells):
        by = ", coloured by gradients alone" if any(math.isfinite(cell.estimate) for cell in cells) else ""
        items.append(tag("li", tag("b", class_="sign hatched"), f"never measured ({never:,}){by}"))
    if any(cell.broken for cell in cells):
        items.append(tag("li", tag("b", "×", class_="sign"), "made the loss non-finite"))
    if any(cell.inside for cell in cells):
        items.append(tag("li", tag("b", "×", class_="sign"), "gone with the whole that it is part of"))
    return tag("ul", *items, class_="legend")


def _listed(cells: Sequence[Cell]) -> Html:
    """A table of the units, the selected ones first, then those of least damage."""
    scored = any(cell.score is not None for cell in cells)
    ordered = sorted(cells, key=lambda cell: (cell.order or math.inf, not math.isfinite(cell.value), cell.value))
    columns = [
        "Unit",
        "Kind",
        "Layer",
        "Removed as",
        "Estimated damage",
        "Measured damage",
        "95% interval",
        "Measurements",
        "Sure",
    ]
    columns += ["Score"] * scored
    rows = []
    for cell in ordered[:MOST_ROWS]:
        row = [
            str(cell.unit),
            KINDS[cell.unit.kind].label,
            str(cell.unit.layer),
            str(cell.order or ""),
            number(cell.estimate if math.isfinite(cell.estimate) else cell.damage, 3, sign=True),
            number(cell.damage, 3, sign=True),
            between(*cell.interval, 3, sign=True) if cell.interval else "–",
            str(cell.pulls),
            "" if cell.sure is None else f"{cell.sure:.0%}",
        ]
        rows.append(row + ([number(cell.score)] if scored else []))
    more = f", the first {MOST_ROWS:,}" if len(cells) > MOST_ROWS else ""
    return details(f"All {len(cells):,} units as a table{more}", table(columns, rows, caption="The units", sortable=True))


def rows_of(selection: Selection) -> list[dict[str, Any]]:
    """A row for each candidate, for a data frame."""
    return [
        {
            "kind": cell.unit.kind,
            "layer": cell.unit.layer,
            "index": cell.unit.index,
            "order": cell.order,
            "estimate": cell.estimate,
            "damage": cell.damage,
            "low": cell.interval[0] if cell.interval else math.nan,
            "high": cell.interval[1] if cell.interval else math.nan,
            "pulls": cell.pulls,
            "sure": math.nan if cell.sure is None else cell.sure,
            "score": math.nan if cell.score is None else cell.score,
        }
        for cell in cells_of(selection)
    ]
