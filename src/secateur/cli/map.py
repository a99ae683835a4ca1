"""The map of a model as text: a row a layer, a character a unit, kept or removed. Plain data in, lines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from secateur.units import KINDS, Unit

KEPT, REMOVED = ".", "#"
TALLEST = 12  # rows before layers go side by side
MOST = 40  # rows before those of layers that lost nothing are left out
GAP, MARGIN = "  ", "    "  # between the kinds of a layer; between layers side by side


@dataclass(frozen=True)
class _Column:
    """The units of a kind: which of each layer are gone, and how many a character stands for."""

    kind: str
    gone: Sequence[Sequence[bool]]  # by layer
    scale: int = 1

    def cells(self, layer: int) -> str:
        units = self.gone[layer]
        return "".join(_character(units[i : i + self.scale]) for i in range(0, len(units), self.scale))

    @property
    def title(self) -> str:
        return KINDS[self.kind].label

    @property
    def width(self) -> int:
        """Characters of the longest layer."""
        return max(-(-len(units) // self.scale) for units in self.gone)

    @property
    def span(self) -> int:
        return max(self.width, len(self.title))


def model_map(counts: Mapping[str, Sequence[int]], removed: Sequence[Unit], width: int = 80) -> list[str]:
    """The lines of a map: `counts[kind][layer]` units of each kind, with those removed marked; then a line that explains it.

    The map is plain ASCII and fits the width, down to about 40. Where a layer has more units than fit, a character stands for
    several. What is inside a removed attention, MLP or block is removed with it.

    >>> print(*model_map({"head": [3, 3]}, [Unit("head", 1, 0)]), sep="\\n")
       Head
    0  ...
    1  #..
    # removed, . kept; a row is a layer, from 0.
    """
    n_layers = max(len(units) for units in counts.values())
    columns = [_column(kind, units, removed) for kind, units in counts.items() if any(units)]
    if all(column.width <= 1 for column in columns) and n_layers > 1:
        return _by_layer(columns, n_layers, width)
    label = len(str(n_layers - 1))
    room = width - label - len(columns) * len(GAP)
    while sum(column.span for column in columns) > room and max(column.width for column in columns) > 1:
        widest = max(columns, key=lambda column: column.width)
        columns[columns.index(widest)] = replace(widest, scale=widest.scale + 1)
    titles = GAP.join([" " * label, *(column.title.ljust(column.span) for column in columns)])
    layers = list(range(n_layers))
    if _blocks(titles, n_layers, width) == 1 and n_layers > MOST:
        layers = [layer for layer in layers if any(any(column.gone[layer]) for column in columns)]
    rows = [
        GAP.join([str(layer).rjust(label), *(column.cells(layer).ljust(column.span) for column in columns)]) for layer in layers
    ]
    explained = [f"{REMOVED} removed, {KEPT} kept; a row is a layer, from 0."]
    if len(layers) < n_layers:
        explained.append(f"Of {n_layers} layers, those without a row lost nothing.")
    explained += [
        f"A character is {column.scale} {KINDS[column.kind].words}s; 1 to 9: tenths removed."
        for column in columns
        if column.scale > 1
    ]
    return [*_side_by_side(titles, rows, width), *explained]


def _column(kind: str, counts: Sequence[int], removed: Sequence[Unit]) -> _Column:
    sides = {*KINDS[kind].sides}
    gone = [[False] * n for n in counts]
    for unit in removed:
        if unit.kind == kind:
            gone[unit.layer][unit.index] = True
        elif unit.whole and sides <= {*KINDS[unit.kind].sides}:
            gone[unit.layer] = [True] * len(gone[unit.layer])
    return _Column(kind, gone)


def _character(units: Sequence[bool]) -> str:
    """One unit kept or removed; of several, the tenths that are removed, rounded, but for none and all."""
    if not any(units):
        return KEPT
    return REMOVED if all(units) else str(min(9, max(1, round(10 * sum(units) / len(units)))))


def _blocks(titles: str, n_rows: int, width: int) -> int:
    """How many blocks of rows go side by side: as few as keep them short, as far as they fit."""
    fitting = max(1, (width + len(MARGIN)) // (len(titles) + len(MARGIN)))
    return max(1, min(fitting, -(-n_rows // TALLEST)))


def _side_by_side(titles: str, rows: Sequence[str], width: int) -> list[str]:
    """The rows below their titles, in one block or several beside each other."""
    height = -(-len(rows) // _blocks(titles, len(rows), width)) or 1
    lines = [MARGIN.join([titles] * -(-len(rows) // height))]
    lines += [MARGIN.join(rows[i::height]) for i in range(height)]
    return [line.rstrip() for line in lines]


def _by_layer(columns: Sequence[_Column], n_layers: int, width: int) -> list[str]:
    """A map of whole attentions, MLPs or blocks: a row a kind, a character a layer, as many rows as it takes."""
    label = max(len(column.title) for column in columns)
    room = max(10, (width - label - len(GAP)) // 10 * 10)
    lines = []
    for start in range(0, n_layers, room):
        layers = range(start, min(start + room, n_layers))
        ruler = "".join(str(layer).ljust(10) for layer in layers if layer % 10 == 0)
        lines.append(" " * label + GAP + ruler.rstrip())
        lines += [column.title.ljust(label) + GAP + "".join(column.cells(i) or " " for i in layers) for column in columns]
    return [*lines, f"{REMOVED} removed, {KEPT} kept; a column is a layer, from 0."]
