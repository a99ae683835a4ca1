"""Charts as inline SVG from plain numbers. They know nothing of models, runs or stores; colours are classes of figure.css."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from secateur.report.html import Html, figure, joined, number, tag

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 74, 14, 12, 46
MOST_POINTS = 2000  # more are drawn as a density
SHAPES = ("dot", "square", "triangle", "diamond", "down", "cross", "plus", "star")
STRIP = 46  # height of a row of `strips`

Point = tuple[float, float]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points that belong together: a colour and a shape of their own, perhaps joined, with intervals and words for each."""

    name: str
    points: Sequence[Point]
    intervals: Sequence[Interval | None] = ()  # of y
    words: Sequence[str] = ()  # what is said of each point
    look: int = 0  # which colour and shape
    line: bool = False
    marks: bool = True
    large: bool = False


@dataclass(frozen=True)
class Axis:
    """From the numbers of an axis to its places."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            math.log10(v) if self.log else v for v in (self.low, self.high, max(value, 1e-300) if self.log else value)
        )
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round numbers on the axis."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 2:
                every = math.ceil((last - first + 1) / wanted)
                return [10.0**power for power in range(first, last + 1, every)]
            return [m * 10.0**p for p in range(first - 1, last + 1) for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]
        rough = (self.high - self.low) / wanted
        if not rough > 0:
            return [self.low]
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis(values: Sequence[float], start: float, end: float, *, log: bool = False, room: float = 0.06) -> Axis:
    """An axis that holds the finite ones of the values, with some room at its ends."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    low, high = min(finite), max(finite)
    if log:
        factor = (high / low) ** room if high > low else 2.0
        return Axis(low / factor, high * factor, start, end, log=True)
    gap = (high - low) * room if high > low else abs(high) * 0.5 or 1.0
    return Axis(low - gap, high + gap, start, end)


def plot(
    series: Sequence[Series],
    *,
    about: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    lines: Sequence[tuple[float, str]] = (),
    x_ticks: Sequence[tuple[float, str]] | None = None,
    y_range: Interval | None = None,
) -> Html:
    """A chart of series of points; `about` says in words what it shows, and `lines` are levels with a name."""
    xs = [x for one in series for x, _ in one.points]
    ends = [end for one in series for interval in one.intervals if interval for end in interval]
    ys = [y for one in series for _, y in one.points] + ends + [y for y, _ in lines]
    across = axis(xs, LEFT, WIDTH - RIGHT, log=x_log)
    up = Axis(*y_range, HEIGHT - BOTTOM, TOP) if y_range else axis(ys, HEIGHT - BOTTOM, TOP, log=y_log)
    parts: list[Html] = [_frame(across, up, x_label, y_label, x_ticks), *(_level(across, up, y, name) for y, name in lines)]
    parts += [_drawn(one, across, up) for one in series]
    named = [one for one in series if one.name]
    return joined([_svg(parts, about), _legend(named) if len(named) > 1 else ""])


def _svg(parts: Sequence[Html], about: str, width: float = WIDTH, height: float = HEIGHT) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", class_="chart", role="img", aria_label=about)


def _frame(across: Axis, up: Axis, x_label: str, y_label: str, x_ticks: Sequence[tuple[float, str]] | None = None) -> Html:
    bottom, left = up.start, across.start
    parts = []
    for value in up.ticks():
        parts.append(tag("line", x1=left, x2=across.end, y1=up(value), y2=up(value), class_="grid"))
        parts.append(tag("text", short(value), x=left - 7, y=up(value) + 4, text_anchor="end"))
    for value, words in [(v, short(v)) for v in across.ticks()] if x_ticks is None else x_ticks:
        parts.append(tag("line", x1=across(value), x2=across(value), y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", words, x=across(value), y=bottom + 17, text_anchor="middle"))
    parts.append(tag("line", x1=left, x2=across.end, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", x_label, x=(left + across.end) / 2, y=bottom + 38, text_anchor="middle", class_="label"))
    middle = (up.start + up.end) / 2
    turned = f"rotate(-90 14 {middle:g})"
    parts.append(tag("text", y_label, x=14, y=middle, text_anchor="middle", transform=turned, class_="label"))
    return joined(parts)


def _level(across: Axis, up: Axis, y: float, name: str) -> Html:
    line = tag("line", x1=across.start, x2=across.end, y1=up(y), y2=up(y), class_="level")
    return joined([line, tag("text", name, x=across.end, y=up(y) + 14, text_anchor="end", class_="name")])


def _drawn(one: Series, across: Axis, up: Axis) -> Html:
    places = [(across(x), up(y)) for x, y in one.points if math.isfinite(x) and math.isfinite(y)]
    parts = []
    if one.line and len(places) > 1:
        parts.append(tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places), class_="line"))
    for (x, y), interval in zip(one.points, one.intervals, strict=False):
        if interval and math.isfinite(x) and math.isfinite(y):
            parts.append(tag("line", x1=across(x), x2=across(x), y1=up(interval[0]), y2=up(interval[1]), class_="interval"))
    if one.marks:
        words = one.words or [""] * len(one.points)
        finite = [w for w, (x, y) in zip(words, one.points, strict=True) if math.isfinite(x) and math.isfinite(y)]
        size = 5.5 if one.large else 4 if len(places) <= 60 else 2.6 if len(places) <= 400 else 1.7
        many = len(places) > 60
        parts += [shape(one.look, *place, size, said, faint=many) for place, said in zip(places, finite, strict=True)]
    return tag("g", *parts, class_=f"series look{one.look}")


def shape(look: int, x: float, y: float, size: float, words: str = "", *, faint: bool = False) -> Html:
    """A mark whose form tells series apart without colour."""
    said = tag("title", words) if words else ""
    about: dict[str, object] = {"class_": "mark faint" if faint else "mark", "tabindex": 0 if words and not faint else None}
    kind, s, d = SHAPES[look % len(SHAPES)], size * 1.12, size * 0.4
    if kind == "dot":
        return tag("circle", said, cx=x, cy=y, r=size, **about)
    corners = {
        "square": [(-s * 0.9, -s * 0.9), (s * 0.9, -s * 0.9), (s * 0.9, s * 0.9), (-s * 0.9, s * 0.9)],
        "triangle": [(0, -s * 1.15), (s * 1.1, s * 0.85), (-s * 1.1, s * 0.85)],
        "diamond": [(0, -s * 1.3), (s * 1.1, 0), (0, s * 1.3), (-s * 1.1, 0)],
        "down": [(0, s * 1.15), (s * 1.1, -s * 0.85), (-s * 1.1, -s * 0.85)],
        "plus": [(-d, -s), (d, -s), (d, -d), (s, -d), (s, d), (d, d), (d, s), (-d, s), (-d, d), (-s, d), (-s, -d), (-d, -d)],
        "star": [(0, -s * 1.3), (d, -d), (s * 1.3, 0), (d, d), (0, s * 1.3), (-d, d), (-s * 1.3, 0), (-d, -d)],
        "cross": [(-s, -s), (0, -s * 0.35), (s, -s), (s * 0.35, 0), (s, s), (0, s * 0.35), (-s, s), (-s * 0.35, 0)],
    }[kind]
    return tag("polygon", said, points=" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners), **about)


def _legend(series: Sequence[Series]) -> Html:
    return tag("ul", *(tag("li", _key(one.look), one.name) for one in series), class_="legend")


def _key(look: int) -> Html:
    mark = tag("g", shape(look, 7, 7, 4.5), class_=f"series look{look}")
    return tag("svg", mark, viewBox="0 0 14 14", class_="key", aria_hidden="true")


# Many points


def density(
    points: Sequence[Point], *, about: str, x_label: str, y_label: str, marked: Series | None = None, bins: int = 90
) -> Html:
    """Where points lie: each of them if they are few, else how many are in each place. Far ones are drawn at the edge."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    low, high = _middle([y for _, y in finite])
    if marked:
        low, high = min([low, *(y for _, y in marked.points)]), max([high, *(y for _, y in marked.points)])
    gap = (high - low) * 0.06 or 1.0
    across, up = axis([x for x, _ in finite], LEFT, WIDTH - RIGHT, room=0.02), Axis(low - gap, high + gap, HEIGHT - BOTTOM, TOP)
    parts = [_frame(across, up, x_label, y_label)]
    if up.low < 0 < up.high:
        parts.append(_level(across, up, 0.0, ""))
    if len(finite) <= MOST_POINTS:
        parts.append(_drawn(Series("", finite, look=0), across, up))
    else:
        parts.append(_binned(finite, across, up, bins))
    if marked:
        parts.append(_drawn(marked, across, up))
    beyond = sum(not up.low <= y <= up.high for _, y in finite)
    note = f"{beyond:,} of {len(finite):,} lie beyond the edges and are drawn there." if beyond else ""
    keys = tag("ul", tag("li", _key(marked.look), marked.name), class_="legend") if marked else ""
    return joined([_svg(parts, about), keys, tag("p", note, class_="note") if note else ""])


def _middle(values: Sequence[float]) -> Interval:
    """The range of all values but the outermost hundredth on each side, if these are far out."""
    ordered = sorted(values) or [0.0]
    n = len(ordered)
    low, high = ordered[n // 100], ordered[n - 1 - n // 100]
    span = high - low
    return (ordered[0] if ordered[0] > low - span else low), (ordered[-1] if ordered[-1] < high + span else high)


def _binned(points: Sequence[Point], across: Axis, up: Axis, bins: int) -> Html:
    wide, high = (across.end - across.start) / bins, (up.start - up.end) / (bins // 2)
    xs, ys = np.array(points).T
    columns = np.clip((xs - across.low) / (across.high - across.low) * bins, 0, bins - 1).astype(int)
    rows = np.clip((up.high - ys) / (up.high - up.low) * (bins // 2), 0, bins // 2 - 1).astype(int)
    counts = Counter(zip(columns.tolist(), rows.tolist(), strict=True))
    most = math.log1p(max(counts.values(), default=1))
    cells = [
        tag(
            "rect",
            x=across.start + i * wide,
            y=up.end + j * high,
            width=wide + 0.2,
            height=high + 0.2,
            opacity=0.15 + 0.85 * math.log1p(n) / most,
        )
        for (i, j), n in sorted(counts.items())
    ]
    return tag("g", *cells, class_="bins look0")


# Bars


def bars(
    values: Sequence[float], marked: Sequence[bool], words: Sequence[str], *, about: str, x_label: str, y_label: str
) -> Html:
    """Bars side by side; those that are marked are filled, the others are outlined."""
    across, up = Axis(0, max(1, len(values)), LEFT, WIDTH - RIGHT), axis([0.0, *values], HEIGHT - BOTTOM, TOP, room=0.0)
    up = Axis(0, up.high * 1.05 or 1.0, up.start, up.end)
    wide = (across.end - across.start) / max(1, len(values))
    parts = [
        _frame(across, up, x_label, y_label, [(0.5, "1"), (len(values) - 0.5, f"{len(values):,}")] if len(values) > 1 else [])
    ]
    gap = 1.0 if wide > 3 else 0.0
    parts += [
        tag(
            "rect",
            tag("title", said),
            x=across.start + i * wide + gap / 2,
            y=up(value),
            width=max(wide - gap, 0.5),
            height=max(up.start - up(value), 0.0),
            class_="bar chosen" if mark else "bar",
        )
        for i, (value, mark, said) in enumerate(zip(values, marked, words, strict=True))
    ]
    return _svg([tag("g", *parts, class_="look0")], about)


# Rows


@dataclass(frozen=True)
class Strip:
    """A row: single values, their mean with an interval, and words about it."""

    name: str
    values: Sequence[float] = ()
    mean: float = math.nan
    interval: Interval | None = None
    words: str = ""
    look: int = 0
    also: str = ""  # beside the name, in small letters


def strips(
    rows: Sequence[Strip], *, about: str, x_label: str, level: tuple[float, str] | None = None, log: bool = False
) -> Html:
    """One row for each: the single values as small dots below, the mean and its interval above them."""
    left, right = 138, 16
    height = TOP + STRIP * len(rows) + BOTTOM
    ends = [end for row in rows if row.interval for end in row.interval]
    values = [v for row in rows for v in (*row.values, row.mean)] + ends + ([level[0]] if level else [])
    across = axis(values, left, WIDTH - right, log=log)
    up = Axis(0, 1, height - BOTTOM, TOP)
    parts = []
    for value in across.ticks(4):
        parts.append(tag("line", x1=across(value), x2=across(value), y1=TOP, y2=up.start, class_="grid"))
        parts.append(tag("text", short(value), x=across(value), y=up.start + 17, text_anchor="middle"))
    if level:
        parts.append(tag("line", x1=across(level[0]), x2=across(level[0]), y1=TOP, y2=up.start, class_="level"))
    parts.append(tag("text", x_label, x=(left + WIDTH - right) / 2, y=up.start + 38, text_anchor="middle", class_="label"))
    for i, row in enumerate(rows):
        y = TOP + STRIP * (i + 0.5)
        name = row.name if len(row.name) <= 20 else row.name[:19] + "…"
        parts.append(tag("text", name, x=left - 12, y=y + (4 if not row.also else -2), text_anchor="end", class_="row"))
        if row.also:
            parts.append(tag("text", row.also, x=left - 12, y=y + 13, text_anchor="end", class_="name"))
        inner = [shape(0, across(v), y + 11, 2.4, faint=True) for v in row.values if math.isfinite(v)]
        if row.interval:
            inner.append(tag("line", x1=across(row.interval[0]), x2=across(row.interval[1]), y1=y, y2=y, class_="interval"))
        if math.isfinite(row.mean):
            inner.append(shape(row.look, across(row.mean), y, 5.5, row.words))
        parts.append(tag("g", *inner, class_=f"series look{row.look}"))
    return _svg(parts, about, height=height)


def short(value: float) -> str:
    """A number on an axis."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e−").replace("e+", "e").replace("-", "−", 1)
    return f"{value:,.6g}".replace("-", "−")


# A series of cuts


@dataclass(frozen=True)
class Member:
    """A model of a series: how good it is and how long it takes, as a share of the dense model's time."""

    name: str
    time: float
    quality: float
    quality_interval: Interval | None = None
    words: str = ""
    folder: str = ""
    dense: bool = field(default=False)


def family(members: Sequence[Member], *, metric: str) -> Html:
    """The curve of quality against time, the dense model on it; the reader sees where it bends."""
    ordered = sorted(members, key=lambda member: member.time)
    points = [(member.time, member.quality) for member in ordered]
    said = [
        member.words or f"{member.name}: {metric} {number(member.quality)} at {member.time:.2f} of the time"
        for member in ordered
    ]
    curve = Series("", points, [m.quality_interval for m in ordered], said, look=0, line=True, large=True)
    marks = [Series("the dense model", [(m.time, m.quality) for m in ordered if m.dense], look=1, large=True)]
    about = f"{metric} of {len(ordered)} models against their time as a share of the dense model's: " + "; ".join(said)
    drawn = plot(
        [curve, *(one for one in marks if one.points)], about=about, x_label="share of the dense model's time", y_label=metric
    )
    return figure("Quality against time", drawn, note="Each point is a checkpoint; hold the pointer on it, or tab to it.")
