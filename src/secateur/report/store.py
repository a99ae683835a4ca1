"""The page of a store: methods beside each other, what they cost, the tables, and the runs that failed. Reads records only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from secateur.errors import MissingExtra
from secateur.experiment.compare import Comparison, compare, excludes_zero
from secateur.experiment.store import FAILED, Cell, Record, Spread, Table, read_tables
from secateur.experiment.tables import render
from secateur.methods import BANDIT, METHODS, label
from secateur.report.charts import SHAPES, Series, Strip, plot, strips
from secateur.report.html import Html, between, count, details, figure, joined, number, page, table, tag
from secateur.report.intervals import mean_interval

METRICS = {"ppl_change_percent": "change of perplexity (%)", "delta_top1": "drop of top-1 (points)"}
MOST_ROWS = 16  # of a chart of comparisons
FAR = 20  # the largest mean over the smallest, from which on a logarithmic axis is kinder


def store_page(folder: Path) -> str:
    """The page of a store."""
    tables = read_tables(folder)
    cells = _different(cell for one in tables for cell in one.cells)
    records = {record.key: record for cell in cells for record in cell.records()}
    failed = [record for record in records.values() if record.status == FAILED]
    planned = len({key for cell in cells for keys in cell.keys.values() for key in keys.values()})
    name, looks = folder.resolve().name, _looks(cells)
    head = joined(
        [
            tag("p", "A store of Secateur's", class_="eyebrow"),
            tag("h1", name),
            tag("p", _verdict(cells), class_="verdict"),
            _tiles(cells, records, failed, planned),
        ]
    )
    sections = [
        ("methods", "The methods beside each other", _methods(cells, _titles(tables, cells), looks)),
        ("comparisons", "Comparisons", _comparisons(tables, looks)),
        ("cost", "Cost against damage", _costs(cells, looks)),
        ("failed", "Failed and missing runs", _failed(failed, planned - len(records))),
        ("tables", "Tables", _tables(tables)),
        ("origin", "Where it comes from", _origin(tables, list(records.values()))),
    ]
    return page(f"{name}: results", head, sections)


def _different(cells: Iterable[Cell]) -> list[Cell]:
    """The cells, each once: two tables may show the same runs."""
    found: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        key = tuple(key for keys in cell.keys.values() for key in keys.values())
        found.setdefault((cell.place, *cell.vary.items(), *key), cell)
    return list(found.values())


def _verdict(cells: Sequence[Cell]) -> str:
    """Which methods came out best."""
    cells = [cell for cell in cells if len(cell.runs) > 1] or cells
    best = [method for cell in cells if (method := _best(cell))]
    if not best:
        return "No cell of this store has a valid run yet."
    counts = {method: best.count(method) for method in dict.fromkeys(best)}
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    if len(cells) == 1:
        return f"{label(ranked[0][0])} lost least, by the mean over its seeds."
    words = ", ".join(f"{label(method)} in {n}" for method, n in ranked[:4])
    return f"Of {len(cells)} comparisons of methods, the least was lost, by the mean over seeds, by {words}."


def _best(cell: Cell) -> str | None:
    means = {
        method: _loss(cell, spread) for method in cell.runs if (spread := cell.spread(method, cell.metric)) and spread.valid
    }
    return min(means, key=means.__getitem__, default=None)


def _loss(cell: Cell, spread: Spread) -> float:
    return _scale(cell) * spread.mean


def _scale(cell: Cell) -> float:
    """So that larger is worse: a change of perplexity as it is, an accuracy as a drop in points."""
    return -100 if cell.metric == "delta_top1" else 1


def _tiles(cells: Sequence[Cell], records: dict[str, Record], failed: Sequence[Record], planned: int) -> Html:
    methods = {method for cell in cells for method in cell.runs}
    seconds = sum(record.total_seconds for record in records.values())
    pulls = sum(record.judgement.pulls for record in records.values() if record.judgement)
    tiles = [
        ("runs", f"{len(records):,}", f"of {planned:,} planned"),
        ("failed", str(len(failed)), "kept and counted, in no mean"),
        ("methods", str(len(methods)), f"in {count(len(cells), 'cell')}"),
        ("measurements", f"{pulls:,}", "paired, in all runs"),
        ("time", f"{seconds / 3600:,.1f} h", "of all runs together"),
    ]
    return tag(
        "div", *(tag("div", tag("p", a), tag("strong", b), tag("small", c), class_="tile") for a, b, c in tiles), class_="tiles"
    )


def _name(cell: Cell) -> str:
    return f"{cell.name}, {cell.ratio:.0%} {cell.target}, {cell.data}"


def _looks(cells: Sequence[Cell]) -> dict[str, int]:
    """A colour and a shape for each method, the same in all charts; bandits have the first."""
    present = {method for cell in cells for method in cell.runs}
    order = sorted(METHODS, key=lambda name: METHODS[name].role != BANDIT)
    known = [method for method in order if method in present]
    return {method: i % len(SHAPES) for i, method in enumerate([*known, *sorted(present - {*known})])}


def _titles(tables: Sequence[Table], cells: Sequence[Cell]) -> list[str]:
    """What each cell is about; two of the same place are told apart by their tables."""
    names = [_name(cell) for cell in cells]
    numbers = [next(table.number for table in tables if cell in table.cells) for cell in cells]
    return [f"{name} (table {n})" if names.count(name) > 1 else name for name, n in zip(names, numbers, strict=True)]


def _methods(cells: Sequence[Cell], titles: Sequence[str], looks: dict[str, int]) -> Html:
    drawn = []
    for cell, title in zip(cells, titles, strict=True):
        rows, listed = [], []
        for method in sorted(cell.runs, key=lambda m: (_mean(cell, m), m)):
            values = [_scale(cell) * record.figure(cell.metric) for record in cell.valid(method).values()]
            spread = cell.spread(method, cell.metric)
            interval = mean_interval(values)
            valid = f"{spread.valid}/{spread.planned} runs" if spread else ""
            ends = between(*interval, 3) if interval else "–"
            mean = statistics.fmean(values) if values else math.nan
            words = f"{label(method)}: {number(mean, 3)}\n95% over seeds: {ends}\n{valid}"
            rows.append(Strip(label(method), values, mean, interval, words, looks[method], valid if not values else ""))
            pulls = cell.spread(method, "pulls")
            listed.append([label(method), number(mean, 4), ends, valid, f"{pulls.mean:,.0f}" if pulls and pulls.valid else "–"])
        what = METRICS[cell.metric]
        finite = [row.mean for row in rows if math.isfinite(row.mean)]
        log = bool(finite) and min([v for row in rows for v in row.values] or [0]) > 0 and max(finite) > FAR * min(finite)
        known = [row for row in rows if row.values] or rows
        about = f"{what} of each method: " + "; ".join(row.words.replace("\n", ", ") for row in rows)
        # The interval of a mean over few seeds may reach below zero, where a logarithmic axis has no place.
        shown = [replace(row, interval=None) if log and row.interval and row.interval[0] <= 0 else row for row in known]
        chart = strips(
            shown, about=about, x_label=what + (", logarithmic" if log else ""), level=None if log else (0.0, "dense"), log=log
        )
        columns = ["Method", what, "95% over seeds", "Valid", "Measurements"]
        more = details("As a table", table(columns, listed, caption=title, sortable=True))
        missing = [row.name for row in rows if not row.values]
        note = f"No valid run: {', '.join(missing)}." if missing else ""
        drawn.append(figure(title, chart, more, note=note))
    note = tag(
        "p", "Small dots are seeds; the mark is their mean with its 95% interval (Student's t). Left is better.", class_="note"
    )
    return joined([note, tag("div", *drawn, class_="charts")])


def _mean(cell: Cell, method: str) -> float:
    spread = cell.spread(method, cell.metric)
    return _loss(cell, spread) if spread and spread.valid else math.inf


def _comparisons(tables: Sequence[Table], looks: dict[str, int]) -> Html:
    try:
        comparisons = compare(tables)
    except MissingExtra as error:
        return tag("p", str(error))
    if not comparisons:
        return Html("")
    rows = [_comparison_row(c) for c in comparisons]
    sure = sum(excludes_zero(c.result.t) for c in comparisons)
    against = [c for c in comparisons if c.baseline in ("greedy", "random")]
    said = (
        f"Each bandit against each other method, paired over seeds: {sure} of {len(comparisons):,} t intervals exclude zero. "
        "Differences are method minus baseline, of the change of perplexity in percent or of the drop of top-1 in points: "
        "negative favours the bandit."
    )
    parts: list[object] = [tag("p", said)]
    if against:
        parts.append(tag("div", *_difference_charts(against, looks), class_="charts"))
    columns = ["Bandit", "Baseline", "Where", "Pairs", "Difference", "t 95%", "p", "q"]
    parts.append(
        details(f"All {len(rows):,} comparisons as a table", table(columns, rows, caption="Comparisons", sortable=True))
    )
    return joined(parts)


def _comparison_row(c: Comparison) -> list[str]:
    scale = 100 if c.cell.task == "image" else 1
    low, high = (end * scale for end in c.result.t)
    figures = [
        number(c.result.mean * scale, 3, sign=True),
        between(low, high, 3, sign=True),
        number(c.result.t_p, 3),
        number(c.q, 3),
    ]
    return [label(c.method), label(c.baseline), _name(c.cell), f"{c.result.n}/{c.planned}", *figures]


def _difference_charts(comparisons: Sequence[Comparison], looks: dict[str, int]) -> Iterable[Html]:
    for task in dict.fromkeys(c.cell.task for c in comparisons):
        of_task = [c for c in comparisons if c.cell.task == task and math.isfinite(c.result.mean)]
        scale = 100 if task == "image" else 1
        rows = []
        for c in of_task[:MOST_ROWS]:
            low, high = (end * scale for end in c.result.t)
            interval = (low, high) if math.isfinite(low) else None
            gap = f"{number(c.result.mean * scale, 3, sign=True)}\n95%: {between(low, high, 3, sign=True)}"
            words = f"{label(c.method)} − {label(c.baseline)}: {gap}\n{_name(c.cell)}"
            short = f"{label(c.method).removeprefix('MAB-')} − {label(c.baseline).removeprefix('Budgeted ')}"
            rows.append(Strip(short, (), c.result.mean * scale, interval, words, looks[c.method], c.cell.model[:22]))
        if rows:
            what = "drop of top-1 (points)" if task == "image" else "change of perplexity (%)"
            about = f"Differences in the {what}: " + "; ".join(row.words.replace("\n", ", ") for row in rows)
            drawn = strips(rows, about=about, x_label="bandit minus baseline", level=(0.0, ""))
            note = f"The first {MOST_ROWS} of {len(of_task)}; the table has all." if len(of_task) > MOST_ROWS else ""
            yield figure(f"Bandits against greedy and random: {what}", drawn, note=note)


def _costs(cells: Sequence[Cell], looks: dict[str, int]) -> Html:
    """Forward passes of each run against what its choice lost."""
    drawn = []
    for place in dict.fromkeys(cell.place for cell in cells):
        of_place = [cell for cell in cells if cell.place == place]
        name = _name(replace(of_place[0], vary={}))
        methods = [m for m in METHODS if any(m in cell.runs for cell in of_place)]
        series, listed = [], []
        for method in methods:
            runs = {r.key: r for cell in of_place for r in cell.valid(method).values()}
            costs = [(_cost(record), record.figure("delta_loss")) for record in runs.values()]
            known = [(cost, damage) for cost, damage in costs if cost > 0 and math.isfinite(damage)]
            if not costs:
                continue
            words = [f"{label(method)}: {number(cost)} passes\nloss {number(damage, 3, sign=True)}" for cost, damage in known]
            if known:
                series.append(Series(label(method), known, words=words, look=looks[method]))
            mean = statistics.fmean(damage for _, damage in costs)
            listed.append(
                [
                    label(method),
                    number(statistics.fmean(cost for cost, _ in costs)),
                    number(mean, 3, sign=True),
                    str(len(costs)),
                ]
            )
        if series:
            damages = [damage for one in series for _, damage in one.points]
            far = min(damages) > 0 and max(damages) > FAR * min(damages)
            chart = plot(
                series,
                about="Forward passes of each choice against the rise of the held-out loss: "
                + "; ".join(f"{r[0]}: {r[1]} passes, {r[2]}" for r in listed),
                x_label="forward passes of one batch, logarithmic",
                y_label="rise of the held-out loss" + (", logarithmic" if far else ""),
                x_log=True,
                y_log=far,
                lines=[] if far else [(0.0, "dense")],
            )
            free = [row[0] for row in listed if row[0] not in {one.name for one in series}]
            note = f"Without any pass, and so not drawn: {', '.join(free)}." if free else ""
            table_of = table(["Method", "Passes, mean", "Rise of the loss, mean", "Runs"], listed, caption=name, sortable=True)
            drawn.append(figure(name, chart, details("As a table", table_of), note=note))
    return tag("div", *drawn, class_="charts") if drawn else Html("")


def _cost(record: Record) -> float:
    """Forward passes of one batch; of records from before these were counted, the model passes as they were made."""
    if record.passes is not None:
        return record.passes
    return record.score_passes + (record.judgement.forwards if record.judgement else 0)


def _failed(failed: Sequence[Record], missing: int) -> Html:
    parts: list[object] = []
    if missing > 0:
        parts.append(
            tag(
                "p",
                f"{count(missing, 'planned run')} has no record yet."
                if missing == 1
                else f"{missing:,} planned runs have no record yet.",
            )
        )
    if not failed:
        parts.append(tag("p", "No run failed."))
    else:
        rows = [
            [r.model, r.data, r.settings.target, label(r.settings.method), str(r.seed), r.reason or "the metric is not finite"]
            for r in failed
        ]
        parts.append(table(["Model", "Data", "Target", "Method", "Seed", "Why"], rows, caption="Failed runs", sortable=True))
    return joined(parts)


def _tables(tables: Sequence[Table]) -> Html:
    parts = []
    for rendered in render(tables):
        notes = [tag("p", note, class_="note") for note in rendered.notes]
        shown = table(rendered.columns, [row.cells for row in rendered.rows], caption=rendered.title, sortable=True)
        parts.append(
            details(f"{rendered.number}: {rendered.title}" if rendered.number[-1:].isdigit() else rendered.title, shown, *notes)
        )
    return joined(parts)


def _origin(tables: Sequence[Table], records: Sequence[Record]) -> Html:
    versions = {", ".join(f"{name} {version}" for name, version in record.versions.items()) for record in records}
    machines = {", ".join(f"{name} {value}" for name, value in record.machine.items()) for record in records if record.machine}
    facts = [("Grids", ", ".join(dict.fromkeys(table.grid for table in tables)))]
    facts += [("Versions", "; ".join(sorted(versions)[:3])), ("Machines", "; ".join(sorted(machines)[:3]) or "not recorded")]
    facts.append(
        ("Repeat it", "secateur grid FILE -o STORE, with the grid file of each name above; what is there is not run again.")
    )
    return tag("dl", *(part for name, text in facts for part in (tag("dt", name), tag("dd", text))), class_="facts")
