"""The search as it went, in four charts: what was measured, of which units, what was believed, and how sure each choice was."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from secateur.report.charts import Series, bars, density, plot
from secateur.report.html import Html, Picture, count, details, figure, number, picture, table, tag
from secateur.report.map import cells_of

if TYPE_CHECKING:
    from secateur.selection import Selection

MOST_BARS = 220


def curves_of(selection: Selection) -> Picture:
    """The search of a selection in four charts, for a notebook.

    >>> curves_of(Selection.load("out/selection.json"))
    """
    return picture(draw_search(selection))


def draw_search(selection: Selection) -> Html:
    """The charts of a search; a static method has no search, and a sentence says so."""
    if not selection.trace:
        return tag("p", "Nothing was measured: the units were chosen by their scores.")
    charts = [_measurements(selection), _per_unit(selection), _belief(selection), _sureness(selection)]
    return tag("div", *charts, class_="charts")


def _measurements(selection: Selection) -> Html:
    points = [(float(i), pull.damage) for i, pull in enumerate(selection.trace, 1)]
    ends: dict[int, int] = {}
    for i, pull in enumerate(selection.trace, 1):
        ends[pull.step] = i
    chosen = []
    for step in selection.steps:
        at = max((end for start, end in ends.items() if start <= step.step), default=0)
        if math.isfinite(step.damage):
            chosen.append(
                (
                    float(at),
                    step.damage,
                    f"Number {step.step + 1}: {step.unit}\nDamage as believed {number(step.damage, 3, sign=True)}",
                )
            )
    marked = Series(
        "a unit is removed, with its damage as believed", [(x, y) for x, y, _ in chosen], words=[w for *_, w in chosen], look=1
    )
    about = f"The damage of each of {count(len(points), 'measurement')} in the order in which they were made"
    drawn = density(points, about=about, x_label="measurement", y_label="damage", marked=marked)
    broken = selection.nonfinite_pulls
    note = f"{count(broken, 'measurement')} made the loss non-finite." if broken else ""
    rows = [_step_row(selection, i) for i in range(len(selection.steps))]
    columns = [
        "Removed as",
        "Unit",
        "Damage as believed",
        "Sure",
        "Its measurements",
        "Candidates",
        "Measured",
        "Passes so far",
    ]
    listed = details("The steps as a table", table(columns, rows, caption="How each unit was chosen", sortable=True))
    return figure("Damage of each measurement", drawn, listed, note=note)


def _step_row(selection: Selection, i: int) -> list[str]:
    step = selection.steps[i]
    sure = "–" if step.sure is None else f"{step.sure:.0%}"
    counts = [str(n) for n in (step.unit_pulls, step.pool, step.evaluated)]
    return [str(i + 1), str(step.unit), number(step.damage, 3, sign=True), sure, *counts, number(step.passes)]


def _per_unit(selection: Selection) -> Html:
    every = cells_of(selection)
    cells = sorted((cell for cell in every if cell.pulls), key=lambda cell: -cell.pulls)
    shown = cells[:MOST_BARS]
    words = [cell.words() for cell in shown]
    about = f"How often each of {count(len(cells), 'measured unit')} was measured, from the most often on"
    drawn = bars(
        [float(cell.pulls) for cell in shown],
        [cell.order is not None for cell in shown],
        words,
        about=about,
        x_label="units, from the most measured on",
        y_label="measurements",
    )
    never = len(every) - len(cells)
    note = "Filled: removed. " + (f"{count(never, 'unit')} were never measured. " if never > 1 else "")
    note += f"{len(cells) - len(shown):,} more have at most {shown[-1].pulls}." if len(cells) > len(shown) else ""
    rows = [[str(cell.unit), str(cell.pulls), "yes" if cell.order else ""] for cell in shown]
    listed = details(
        "As a table", table(["Unit", "Measurements", "Removed"], rows, caption="Measurements of units", sortable=True)
    )
    return figure("Measurements of each unit", drawn, listed, note=note)


def _belief(selection: Selection) -> Html:
    points = [(float(i), damage) for i, (_, damage) in enumerate(selection.progress, 1)]
    words = [f"After {i:.0f} of {len(points)} units: {number(damage, 3, sign=True)}" for i, damage in points]
    about = f"The sum of the damages believed of the removed units, after each of {len(points)}"
    drawn = plot(
        [Series("", points, words=words, line=True)],
        about=about,
        x_label="units removed",
        y_label="sum of believed damages",
        lines=[(0.0, "")],
    )
    rows = [
        [f"{i:.0f}", number(damage, 3, sign=True), number(passes)]
        for (i, damage), (passes, _) in zip(points, selection.progress, strict=True)
    ]
    columns = ["Units removed", "Sum of believed damages", "Forward passes so far"]
    return figure(
        "Belief as units were removed", drawn, details("As a table", table(columns, rows, caption="Belief", sortable=True))
    )


def _sureness(selection: Selection) -> Html:
    points = [(float(i), step.sure) for i, step in enumerate(selection.steps, 1) if step.sure is not None]
    if not points:
        return figure("How sure each choice was", tag("p", "The search did not say.", class_="note"))
    words = [f"Number {i:.0f}, {selection.steps[int(i) - 1].unit}: {sure:.0%}" for i, sure in points]
    drawn = plot(
        [Series("", points, words=words)],
        about=f"The probability that each of {len(points)} choices is right, by what was measured",
        x_label="unit, in order of removal",
        y_label="probability that it is right",
        lines=[(0.5, "even")],
        y_range=(0.0, 1.05),
    )
    doubtful = sum(sure < 0.5 for _, sure in points)
    note = (
        f"{doubtful} of {len(points)} choices were less sure than even: more budget would tell them apart." if doubtful else ""
    )
    rows = [[f"{i:.0f}", str(selection.steps[int(i) - 1].unit), f"{sure:.0%}"] for i, sure in points]
    listed = details(
        "As a table", table(["Removed as", "Unit", "Sure"], rows, caption="How sure each choice was", sortable=True)
    )
    return figure("How sure each choice was", drawn, listed, note=note)
