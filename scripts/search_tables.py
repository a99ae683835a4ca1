"""Write the tables of docs/search.md, and README's short one, from the stores of the study: python scripts/search_tables.py

`secateur grid runs/search-deit.toml -o results/search-deit` makes a store, and runs/search-smollm2.toml the other.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from secateur.cut.record import markdown
from secateur.experiment.compare import Comparison, Interval, compare, excludes_zero, paired
from secateur.experiment.store import Cell, Record, Spread, Table, read_tables
from secateur.methods import label

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "search.md", ROOT / "README.md")
SHORT = "SmolLM2-135M 20% of the MLP groups", ("auto", "fisher", "llmpruner", "kwon", "flap")  # README's place and methods
STORES = tuple(ROOT / "results" / name for name in ("search-deit", "search-smollm2"))
OURS = "auto"
UNITS = {"head": "heads", "mlp": "MLP groups"}


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """A page with every table that it has a place for as the stores have it."""
    for name, table in tables().items():
        page = re.sub(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", rf"\g<1>{table}\n\g<2>", page, flags=re.DOTALL)
    return page


def tables() -> dict[str, str]:
    """Each table by its name: one for each model, target and ratio."""
    found: dict[str, str] = {}
    for store in STORES:
        read = read_tables(store)
        compared = {(c.cell.place, c.baseline): c for c in compare(of_search(read), methods=[OURS])}
        for place in dict.fromkeys(cell.place for table in read for cell in table.cells):
            cells = [cell for table in read for cell in table.cells if cell.place == place]
            found[name_of(place)] = _table(cells, {b: c for (where, b), c in compared.items() if where == place})
        if short := [cell for table in of_search(read) for cell in table.cells if name_of(cell.place) == SHORT[0]]:
            found["short"] = _short(short)
    return found


def of_search(read: Sequence[Table]) -> list[Table]:
    """The tables in which methods are compared, without those that only vary a budget."""
    return [table for table in read if table.number == "search"]


def name_of(place: tuple[str, str, str, float]) -> str:
    model, _, target, ratio = place
    return f"{model} {ratio:.0%} of the {UNITS[target]}"


def _table(cells: Sequence[Cell], compared: dict[str, Comparison]) -> str:
    """A row for each method, from the least loss on; of `auto` one for each budget."""
    text = cells[0].task == "text"
    rows: dict[str, tuple[float, list[str]]] = {}
    for cell in cells:
        for method in cell.runs:
            records = list(cell.valid(method).values())
            loss, change = cell.spread(method, "delta_loss"), cell.spread(method, cell.metric)
            name = label(method) + (f" {records[0].settings.budget}" if method == OURS and records else "")
            if name in rows or not (records and loss and change):
                continue
            lost = [spread(loss, 1, 3), spread(change, 1 if text else 100, 1)]
            figures = [f"{passes_of(records):,.0f}", str(len(records)), *lost, *_less(compared.get(method))]
            rows[name] = loss.mean, [name, *figures]
    metric = "perplexity, %" if text else "top-1, points"
    titles = ["method", "passes", "seeds", "loss", metric, f"`{OURS}` against it, by batches", "by seeds"]
    return markdown(titles, [row for _, row in sorted(rows.values(), key=lambda row: row[0])])


def _short(cells: Sequence[Cell]) -> str:
    """One row with each method's change of perplexity, from the cell in which it has the most seeds."""
    found = []
    for method in SHORT[1]:
        of = max(cells, key=lambda cell: len(cell.valid(method))).spread(method, cells[0].metric)
        found.append(f"{spread(of, 1, 1)}%" if of else "")
    return markdown([label(method) for method in SHORT[1]], [[f"**{found[0]}**", *found[1:]]])


def passes_of(records: Sequence[Record]) -> float:
    return statistics.fmean(record.passes or 0.0 for record in records)


def spread(of: Spread, times: float, digits: int) -> str:
    deviation = "" if of.deviation is None else f" ± {times * of.deviation:.{digits}f}"
    return f"{times * of.mean:+.{digits}f}{deviation}"


def _less(comparison: Comparison | None) -> list[str]:
    """The loss of `auto` less that of the method, with 95% intervals; bold where zero is not in it."""
    if comparison is None:
        return ["", ""]
    pairs, _ = comparison.cell.paired(comparison.method, comparison.baseline)
    by_seeds = paired([one.figure("delta_loss") - other.figure("delta_loss") for one, other in pairs])
    return [_interval(comparison.batch_mean, comparison.batch_interval), _interval(by_seeds.mean, by_seeds.t)]


def _interval(mean: float, interval: Interval) -> str:
    if math.isnan(interval[0]):
        return ""  # of one seed
    text = f"{mean:+.3f} ({interval[0]:+.3f} to {interval[1]:+.3f})"
    return f"**{text}**" if excludes_zero(interval) else text


if __name__ == "__main__":
    main()
