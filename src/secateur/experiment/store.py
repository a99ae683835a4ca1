"""The store: a folder with results.jsonl, which has one line per ended run, and with plans, which list the runs of each grid.

Lines are only appended, by one writer at a time. A run that was tried again has two lines, and the later one counts. A torn
last line (the process died while writing it) is cut off. Every record carries its own digest, so that edits by hand are
noticed. `read_tables` returns the records arranged in the tables that the grids planned.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from secateur.errors import StoreError, first_line
from secateur.files import jsonio
from secateur.files.lines import Lines
from secateur.judgement import Judgement
from secateur.settings import Judging, Settings

FORMAT = 1  # of a record and of a plan
RECORDS, PLANS = "results.jsonl", "plans"
DONE, FAILED = "done", "failed"
EVERY = "*"  # in a plan, instead of a seed: this one run stands for every seed
TEXT_METRIC, IMAGE_METRIC = "ppl_change_percent", "delta_top1"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Record:
    """A run that ended: its configuration and its results. A run that raised an error has a reason and no judgement."""

    key: str
    status: str  # DONE or FAILED
    grid: str
    model: str
    data: str
    seed: int | None
    settings: Settings
    judging: Judging
    choice_key: str
    base_key: str
    versions: dict[str, str]
    reason: str = ""
    judgement: Judgement | None = None
    score_passes: int = 0  # model passes of a score or a set; one with a gradient counts once
    passes: float | None = None  # forward passes of a calibration batch: partial ones by blocks, a gradient as three
    pass_flops: float | None = None  # FLOPs of one such pass
    progress: tuple[tuple[float, float], ...] = ()  # after each chosen unit: passes so far, and the estimated damage
    selection_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    total_seconds: float = 0.0
    model_digest: str = ""
    calibration_digest: str = ""
    data_digest: str = ""
    machine: dict[str, Any] = field(default_factory=dict)

    def figure(self, name: str) -> float:
        """A number of the record, such as "dense.top1", "zeroed.loss", "delta_top1", "pulls" or "selection_seconds"."""
        if self.judgement is None:
            raise StoreError(f"The run {self.key} failed ({self.reason}) and has no {name}.")
        side, _, part = name.rpartition(".")
        if side:
            return float(getattr(getattr(self.judgement, side), part))
        if name in self.judgement.changes:
            return self.judgement.changes[name]
        return float(getattr(self.judgement if hasattr(self.judgement, name) else self, name))

    @property
    def flops(self) -> float | None:
        """Forward FLOPs of the choice; None if the record does not say."""
        return None if self.passes is None or self.pass_flops is None else self.passes * self.pass_flops

    def to_json(self) -> dict[str, Any]:
        settings = {name: value for name, value in self.settings.to_json().items() if name != "device"}  # not part of the run
        names = ("key", "status", "grid", "model", "data", "seed")
        fields = {name: getattr(self, name) for name in names} | {"settings": settings, "judging": self.judging.to_json()}
        fields |= {name: getattr(self, name) for name in ("choice_key", "base_key", "versions")}
        if self.reason:
            fields["reason"] = self.reason
        if self.judgement:
            fields |= self.judgement.to_json()
            cost = ("score_passes", "selection_seconds", "evaluation_seconds", "total_seconds")
            origin = ("model_digest", "calibration_digest", "machine", "data_digest")
            fields |= {name: getattr(self, name) for name in (*cost, *origin)}
            counted = {name: getattr(self, name) for name in ("passes", "pass_flops", "progress")}
            fields |= {name: value for name, value in counted.items() if value not in (None, ())}  # older records have none
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Record:
        """The record that a line holds; raises ValueError if it holds none."""
        record = jsonio.decode(fields, cls)
        settings = Settings.from_json(fields["settings"])
        judgement = Judgement.from_json(fields) if "dense" in fields else None
        return replace(record, settings=settings, judgement=judgement)


class Store:
    """The only writer of a store.

    >>> with Store(Path("results")) as store:
    ...     store.append(record)
    """

    def __init__(self, folder: Path, say: Say = lambda sentence: None) -> None:
        self.folder = folder
        busy = f"Another grid is writing to {folder} right now; wait for it, or choose another store with -o."
        self._lines = Lines(folder / RECORDS, busy)
        try:
            lines, torn = self._lines.read()
            self.records = _parse(self._lines.path, lines)
            if torn:
                _check_torn(self._lines.path, torn)
                self._lines.drop(torn)
                say(f"The last line of {self._lines.path} was torn and has been removed; its run will be done again.")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()

    def append(self, record: Record) -> None:
        """Write a record to disk; it replaces earlier records of its run."""
        self._lines.append([sealed(record.to_json())], sync=True)
        self.records[record.key] = record

    def keep_plan(self, plan: Plan) -> None:
        """Write the plan of a grid; it replaces an earlier plan of the same name."""
        jsonio.write(self.folder / PLANS / f"{plan.grid}.json", plan.to_json())


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record's line: the format, the record, and a digest of both."""
    fields = {name: value for name, value in jsonio.to_json({"format": FORMAT, **record}).items() if name != "digest"}
    return fields | {"digest": jsonio.fingerprint(fields)}


def read_store(folder: Path, say: Say = lambda sentence: None) -> tuple[dict[str, Record], list[Plan]]:
    """A store's records by key, and its plans in the order of their names; works while a grid is writing."""
    try:
        data = jsonio.read_bytes(folder / RECORDS)
        plans = [_read_plan(path) for path in sorted((folder / PLANS).glob("*.json"))]
    except FileNotFoundError as error:
        raise StoreError(
            f"There is no store at {folder}: it holds no {RECORDS}. `secateur grid FILE -o {folder}` makes one."
        ) from error
    except OSError as error:
        raise StoreError(f"Cannot read the store {folder}: {error.strerror or error}.") from error
    *lines, torn = data.split(b"\n")
    records = _parse(folder / RECORDS, lines)
    if torn:
        say(f"The last line of {folder / RECORDS} is torn and was ignored.")
    return records, plans


def _check_torn(path: Path, torn: bytes) -> None:
    """Refuse to cut off a last line that no killed grid left."""
    beginning = b'{"format": '
    if not torn.startswith(beginning) and not beginning.startswith(torn):
        raise StoreError(f"{path} is not a store of Secateur's: its last line is no record. Choose another one with -o.")


def _parse(path: Path, lines: list[bytes]) -> dict[str, Record]:
    """The records by key; of two records of one run, the later."""
    records = {}
    for number, line in enumerate(lines, 1):
        place = f"Line {number} of {path}"
        damaged = f"{place} is not a record written by Secateur, or is damaged; delete that line to do its run again."
        try:
            fields = jsonio.loads(line)
            version, seal = fields["format"], fields["digest"]
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(damaged) from error
        if version != FORMAT:
            raise StoreError(
                f"{place} has format {version!r}, but this version of Secateur reads {FORMAT}; use the version "
                "that wrote it, or another store."
            )
        if sealed(fields)["digest"] != seal:
            raise StoreError(
                f"{place} was edited: it no longer agrees with its digest. Undo the edit, or delete that "
                "line to do its run again."
            )
        try:
            record = Record.from_json(fields)
        except (ValueError, KeyError) as error:
            raise StoreError(damaged) from error
        records[record.key] = record
    return records


# Plans, and the tables made from plans and records


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a plan: the keys of its runs, by method and seed."""

    data: str
    model: str
    target: str
    ratio: float
    vary: dict[str, Any]
    runs: dict[str, dict[str, str]]

    def __post_init__(self) -> None:
        if any(seed != EVERY and not seed.isdecimal() for runs in self.runs.values() for seed in runs):
            raise ValueError("a seed of it is not a number")


@dataclass(frozen=True)
class PlannedTable:
    number: str
    task: str
    cells: tuple[PlannedCell, ...]


@dataclass(frozen=True)
class Plan:
    """The runs that a grid consists of."""

    grid: str
    tables: tuple[PlannedTable, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def _read_plan(path: Path) -> Plan:
    try:
        fields = jsonio.read(path)
        version = fields["format"]
        if version != FORMAT:
            raise StoreError(f"{path} has format {version!r}, but this version of Secateur reads {FORMAT}; run its grid again.")
        return jsonio.decode(fields, Plan)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path} is not a plan written by Secateur, or is damaged; run its grid again to replace it: {first_line(error)}"
        ) from error


@dataclass(frozen=True)
class Spread:
    """A mean over seeds; failed runs are counted but not in the mean."""

    mean: float
    deviation: float | None  # sample standard deviation; None for a single value
    valid: int  # runs in the mean
    ended: int  # runs with a record
    planned: int

    @property
    def missing(self) -> int:
        return self.planned - self.ended


@dataclass(frozen=True)
class Cell:
    """A cell in which methods are compared: its records by method and seed, None for a run without a record."""

    data: str
    model: str
    target: str
    ratio: float
    vary: dict[str, Any]
    task: str
    keys: dict[str, dict[str, str]]  # keys of the planned runs, by method and seed
    runs: dict[str, dict[str, Record | None]]

    @property
    def metric(self) -> str:
        return TEXT_METRIC if self.task == "text" else IMAGE_METRIC

    @property
    def place(self) -> tuple[str, str, str, float]:
        """What is pruned and judged, whatever the settings."""
        return self.model, self.data, self.target, self.ratio

    @property
    def name(self) -> str:
        """The model, and the setting that the cell varies: "gpt2, dtype float16"."""
        return ", ".join(filter(None, (self.model, self.varied)))

    @property
    def varied(self) -> str:
        return "".join(f"{name.replace('_', ' ')} {value}" for name, value in self.vary.items())

    def records(self, method: str | None = None) -> list[Record]:
        """The records of runs that ended, failed ones too."""
        methods = [self.runs.get(method, {})] if method else list(self.runs.values())
        return [record for runs in methods for record in runs.values() if record is not None]

    def valid(self, method: str) -> dict[str, Record]:
        """The records of runs that did not fail, by seed."""
        runs = self.runs.get(method, {})
        return {seed: record for seed, record in runs.items() if record is not None and record.status == DONE}

    def spread(self, method: str, name: str) -> Spread | None:
        """Mean and deviation of a figure, such as "zeroed.top1"; None if the cell does not have the method."""
        if method not in self.runs:
            return None
        values = [record.figure(name) for record in self.valid(method).values()]
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
        """Pairs of valid runs of both methods with the same seed, and the number of pairs that were planned."""
        entries = [(_seed_entry(self.runs[method], seed), _seed_entry(self.runs[baseline], seed)) for seed in self.seeds()]
        planned = [(a, b) for a, b in entries if a and b]
        runs, baseline_runs = self.valid(method), self.valid(baseline)
        return [(runs[a], baseline_runs[b]) for a, b in planned if a in runs and b in baseline_runs], len(planned)

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


def read_tables(folder: Path, say: Say = lambda sentence: None) -> list[Table]:
    """Every table of every grid of the store, in the order of the grids' names.

    >>> read_tables(Path("results/deit"))[0].cells[0].spread("ucb", "zeroed.top1")
    """
    records, plans = read_store(folder, say)
    if not plans:
        raise StoreError(f"The store {folder} has no plan of a grid; run `secateur grid FILE -o {folder}` again to write it.")
    tables = [_table(plan.grid, table, records) for plan in plans for table in plan.tables]
    for table in tables:
        for cell in table.cells:
            _check_one_base(cell)
    return tables


def _table(grid: str, table: PlannedTable, records: dict[str, Record]) -> Table:
    cells = tuple(
        Cell(
            cell.data,
            cell.model,
            cell.target,
            cell.ratio,
            cell.vary,
            table.task,
            keys=cell.runs,
            runs={method: {seed: records.get(key) for seed, key in keys.items()} for method, keys in cell.runs.items()},
        )
        for cell in table.cells
    )
    return Table(grid, table.number, table.task, cells)


def _check_one_base(cell: Cell) -> None:
    """Refuse a cell whose records share a base key but were judged with different weights or data."""
    bases: dict[str, set[tuple[str, str]]] = {}
    for record in cell.records():
        if record.judgement:
            bases.setdefault(record.base_key, set()).add((record.model_digest, record.data_digest))
    if any(len(digests) > 1 for digests in bases.values()):
        raise StoreError(
            f"The records of {cell} were made with different weights or data and cannot be compared; do their runs again in a "
            "new store."
        )


def cells_of(tables: Iterable[Table], *numbers: str) -> Iterator[Cell]:
    """The cells of the tables with these numbers."""
    return (cell for table in tables if table.number in numbers for cell in table.cells)


def _seed_entry(runs: dict[str, Record | None], seed: str) -> str | None:
    """The entry of `runs` for a seed: the seed itself, or EVERY if one run stands for all seeds; None if neither is planned."""
    return seed if seed in runs else EVERY if EVERY in runs else None


def slug(name: str) -> str:
    """A name in characters that a file name can have."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name).strip("-")
