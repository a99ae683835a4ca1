"""Comparisons: each bandit against a baseline in each cell, paired over seeds, corrected over the whole family of tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from secateur.errors import StoreError
from secateur.experiment.results import BANDITS, Cell, Table, figure
from secateur.experiment.stats import Interval, Paired, batch_interval, excludes_zero, paired, q_values

LANGUAGE = ("4", "6", "7", "10")  # tables whose comparisons make up the family of Table 11
HIGHLIGHTED = ("4", "6", "7")  # and those that it counts
ALPHA = 0.05


@dataclass(frozen=True)
class Comparison:
    """A method against a baseline in a cell. Differences are method minus baseline, so that negative favours the method."""

    tables: tuple[str, ...]
    cell: Cell
    method: str
    baseline: str
    planned: int  # pairs; those with a failed or missing run are not in `result`
    result: Paired
    batch_mean: float  # of the loss
    batch_interval: Interval
    q: float = float("nan")
    wilcoxon_q: float = float("nan")

    def to_json(self) -> dict[str, Any]:
        cell = self.cell
        where = {name: getattr(cell, name) for name in ("data", "model", "target", "ratio", "vary", "metric")}
        counts = {"tables": list(self.tables), "method": self.method, "baseline": self.baseline, "planned": self.planned}
        found = {name: getattr(self.result, name) for name in Paired.__dataclass_fields__}
        own = {name: getattr(self, name) for name in ("batch_mean", "batch_interval", "q", "wilcoxon_q")}
        return where | counts | found | own


def compare(tables: Iterable[Table], *, methods: Sequence[str] = BANDITS) -> list[Comparison]:
    """Every method against every other kind of method, in every cell; q-values are over all of these tests.

    That is the family: what was run decides it, and not what is shown of it or comes out well.
    """
    places: dict[tuple[Any, ...], tuple[Cell, str, str, list[str]]] = {}
    for table in tables:
        for cell in table.cells:
            for method in (method for method in methods if method in cell.runs):
                for baseline in (other for other in cell.runs if other not in methods):
                    runs = tuple(tuple(cell.keys[name].values()) for name in (method, baseline))
                    # A comparison that two tables have is one test.
                    places.setdefault(runs, (cell, method, baseline, []))[3].append(table.number)
    made = [_comparison(cell, tuple(dict.fromkeys(numbers)), *names) for cell, *names, numbers in places.values()]
    q = q_values([comparison.result.t_p for comparison in made])
    wilcoxon_q = q_values([comparison.result.wilcoxon_p for comparison in made])
    return [replace(c, q=q[i], wilcoxon_q=wilcoxon_q[i]) for i, c in enumerate(made)]


def _comparison(cell: Cell, tables: tuple[str, ...], method: str, baseline: str) -> Comparison:
    pairs, planned = cell.paired(method, baseline)
    sign = -1 if cell.task == "image" else 1  # of top-1, more is better
    result = paired([sign * (figure(ours, cell.metric) - figure(theirs, cell.metric)) for ours, theirs in pairs])
    losses = [
        [float(a) - float(b) for a, b in zip(ours["pruned"]["batch_losses"], theirs["pruned"]["batch_losses"], strict=True)]
        for ours, theirs in pairs
    ]
    same = len({ours["data_digest"] for ours, _ in pairs}) == 1
    return Comparison(tables, cell, method, baseline, planned, result, *batch_interval(losses, same_batches=same))


@dataclass(frozen=True)
class Summary:
    """The counts of Table 11."""

    bootstrap: int  # comparisons whose interval excludes zero
    t_interval: int
    p: int  # below 0.05
    q: int
    family: int
    tested: int  # of the family, those with a p-value


def summary(shown: Sequence[Comparison], family: Sequence[Comparison]) -> Summary:
    """How many of the comparisons shown stand out, as Table 11 counts them."""
    return Summary(
        bootstrap=sum(excludes_zero(c.result.bootstrap) for c in shown),
        t_interval=sum(excludes_zero(c.result.t_interval) for c in shown),
        p=sum(c.result.t_p < ALPHA for c in shown),
        q=sum(c.q < ALPHA for c in shown),
        family=len(family),
        tested=sum(not math.isnan(c.result.t_p) for c in family),
    )


def against_baseline(comparisons: Sequence[Comparison], against: str) -> list[Comparison]:
    """Those against one baseline; a baseline that nothing was compared with is an error."""
    shown = [c for c in comparisons if c.baseline == against]
    if not shown:
        there = sorted({c.baseline for c in comparisons})
        raise StoreError(
            f"The store has no comparison against {against!r}"
            + (f"; there are those against {', '.join(there)}." if there else ": no cell has a bandit and another method.")
        )
    return shown
