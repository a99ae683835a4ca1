"""What a store has for its grids: tables of cells, each method's records by seed, and which are missing or failed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateur.errors import StoreError
from secateur.experiment.store import Record, read_store

EVERY = "*"  # in a plan: the one run that stands for every seed
BANDITS = ("ucb", "ts")
TEXT_METRIC, IMAGE_METRIC = "ppl_change_percent", "delta_top1"
LABELS = {
    "random": "Random",
    "magnitude": "Magnitude",
    "wanda": "Wanda-style",
    "taylor": "Taylor",
    "fisher": "Fisher",
    "greedy": "Budgeted greedy",
    "ucb": "MAB-UCB",
    "ts": "MAB-TS",
}


@dataclass(frozen=True)
class Spread:
    """A mean over seeds; failed runs are out of it and in the counts."""

    mean: float
    deviation: float | None  # of the sample; None for a single value
    valid: int  # runs in the mean
    ended: int  # runs with a record
    planned: int

    @property
    def missing(self) -> int:
        return self.planned - self.ended


@dataclass(frozen=True)
class Cell:
    """One place where methods are compared: its records by method and seed; None where there is none yet."""

    data: str
    model: str
    target: str
    ratio: float
    vary: dict[str, Any]
    task: str
    keys: dict[str, dict[str, str]]  # of the runs that were planned
    runs: dict[str, dict[str, Record | None]]

    @property
    def metric(self) -> str:
        return TEXT_METRIC if self.task == "text" else IMAGE_METRIC

    def records(self, method: str | None = None) -> list[Record]:
        """Those that ended, with failed ones."""
        methods = [self.runs.get(method, {})] if method else list(self.runs.values())
        return [record for runs in methods for record in runs.values() if record is not None]

    def valid(self, method: str) -> dict[str, Record]:
        """Those that ended well, by seed."""
        found = self.runs.get(method, {})
        return {seed: record for seed, record in found.items() if record is not None and record["status"] == "done"}

    def spread(self, method: str, name: str) -> Spread | None:
        """Mean and deviation of a figure ("pruned.top1" is the top1 of what was pruned); None where nothing was planned."""
        if method not in self.runs:
            return None
        values = [figure(record, name) for record in self.valid(method).values()]
        return Spread(
            mean=statistics.fmean(values) if values else math.nan,
            deviation=statistics.stdev(values) if len(values) > 1 else None,
            valid=len(values),
            ended=len(self.records(method)),
            planned=len(self.runs[method]),
        )

    def seeds(self) -> list[str]:
        return sorted({seed for runs in self.runs.values() for seed in runs if seed != EVERY}, key=int)

    def paired(self, method: str, baseline: str) -> tuple[list[tuple[Record, Record]], int]:
        """The runs of both with a seed in common and a finite loss, and how many such pairs were planned."""
        seeds = [seed for seed in self.seeds() if _of_seed(self.runs[method], seed) and _of_seed(self.runs[baseline], seed)]
        ours, theirs = self.valid(method), self.valid(baseline)
        pairs = [
            (ours[a], theirs[b])
            for a, b in ((_of_seed(self.runs[method], seed), _of_seed(self.runs[baseline], seed)) for seed in seeds)
            if a in ours and b in theirs
        ]
        return pairs, len(seeds)

    def __str__(self) -> str:
        varied = "".join(f" {name} {value}" for name, value in self.vary.items())
        return f"{self.model} {self.target} {self.ratio:g} on {self.data}{varied}"


@dataclass(frozen=True)
class Table:
    """A table of a grid."""

    grid: str
    number: str
    task: str
    cells: tuple[Cell, ...]


def read_tables(folder: Path, say: Any = lambda sentence: None) -> list[Table]:
    """Every table of every grid that was run on the store, in the order of their files.

    >>> read_tables(Path("results/deit"))[0].cells[0].spread("ucb", "pruned.top1")
    """
    records, plans = read_store(folder, say)
    if not plans:
        raise StoreError(f"The store {folder} has no plan of a grid; run `secateur grid FILE -o {folder}` again to write it.")
    try:
        tables = [_table(plan["grid"], table, records) for plan in plans for table in plan["tables"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StoreError(f"A plan in {folder} is damaged (it lacks {error}); run its grid again to write it anew.") from error
    for table in tables:
        for cell in table.cells:
            _check_one_base(cell)
    return tables


def _table(grid: str, fields: dict[str, Any], records: dict[str, Record]) -> Table:
    cells = tuple(
        Cell(
            **{name: cell[name] for name in ("data", "model", "target", "ratio", "vary")},
            task=fields["task"],
            keys=cell["runs"],
            runs={method: {seed: records.get(key) for seed, key in keys.items()} for method, keys in cell["runs"].items()},
        )
        for cell in fields["cells"]
    )
    return Table(grid, fields["number"], fields["task"], cells)


def _check_one_base(cell: Cell) -> None:
    """All methods of a cell are judged on the same batches and against the same dense model, seed by seed."""
    bases: dict[str, set[tuple[str, str]]] = {}
    for record in cell.records():
        if "dense" in record:
            bases.setdefault(record["base_key"], set()).add((record["model_digest"], record["data_digest"]))
    if any(len(digests) > 1 for digests in bases.values()):
        raise StoreError(f"The records of {cell} are of different weights or data, and cannot be compared; run them anew.")


def figure(record: Record, name: str) -> float:
    """A number of a record; a dot leads into a part of it."""
    value: Any = record
    for part in name.split("."):
        value = value[part]
    return float(value)


def cells_of(tables: Iterable[Table], *numbers: str) -> Iterator[Cell]:
    """The cells of the tables with these numbers."""
    return (cell for table in tables if table.number in numbers for cell in table.cells)


def _of_seed(runs: dict[str, Record | None], seed: str) -> str | None:
    """The seed under which a method has its run for a seed: a static method's one run stands for all."""
    return seed if seed in runs else EVERY if EVERY in runs else None


def slug(name: str) -> str:
    """A name as a part of a file's name."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name).strip("-")
