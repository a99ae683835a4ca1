"""Records without a model, and stores that are filled with the paper's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from secateur.experiment.grid import Cell, read_grid
from secateur.experiment.paper import paper_row, spread_of
from secateur.experiment.store import DONE, FAILED, Record, Store, Table, read_tables
from secateur.judgement import Evaluation, Judgement
from secateur.methods import label
from secateur.settings import Judging, Settings
from secateur.units import HEAD, Unit
from worlds import ROOT

RUNS = ROOT / "runs"
# Five values of mean 0 and deviation 1, and five others that do not go along with them.
STANDARD = tuple(value / math.sqrt(2.5) for value in (-2, -1, 0, 1, 2))
ACROSS = tuple(value / math.sqrt(3.5) for value in (2, -1, -2, -1, 2))

Fill = Callable[[Record, Cell, str, int], Record | None]


def make_record(key: str, **fields: Any) -> Record:
    """A run that ended well; any of its fields can be given."""
    usual: dict[str, Any] = {"status": DONE, "grid": "g", "model": "m", "data": "d", "seed": 1}
    usual |= {"settings": Settings("m"), "judging": Judging("d"), "choice_key": "c", "base_key": "b", "versions": {}}
    usual |= {"selection_seconds": 1.0, "total_seconds": 2.0, "model_digest": "m", "data_digest": "d"}
    return Record(key=key, **usual | {"judgement": make_judgement()} | fields)


def make_judgement(n_units: int = 4, candidates: int = 36, **fields: Any) -> Judgement:
    evaluation = Evaluation(loss=2.0, rows=3, batch_losses=(1.0, 2.0, 3.0))
    usual: dict[str, Any] = {"dense": evaluation, "zeroed": evaluation, "total_params": 5_717_416, "zeroed_percent": 3.4522}
    usual |= {"units": units(n_units), "candidates": candidates, "pulls": 0, "forwards": 0, "nonfinite_pulls": 0}
    return Judgement(**usual | fields)


def units(n: int) -> tuple[Unit, ...]:
    return tuple(Unit(HEAD, 0, i) for i in range(n))


def judged(record: Record, **fields: Any) -> Record:
    """The record with another judgement; `dense` and `zeroed` name fields of their evaluations."""
    found = record.judgement
    assert found
    for side in ("dense", "zeroed"):
        if side in fields:
            fields[side] = replace(getattr(found, side), **fields[side])
    return replace(record, judgement=replace(found, **fields))


def with_perplexity(record: Record, change: float, final: float | None = None) -> Record:
    """The record with a change of perplexity of so many percent, and with the perplexity that it ends at."""
    dense = 50.0 if final is None else final / (1 + change / 100)
    return judged(record, dense={"perplexity": dense}, zeroed={"perplexity": dense * (1 + change / 100)})


def with_top1(record: Record, change: float) -> Record:
    return judged(record, dense={"top1": 0.8}, zeroed={"top1": 0.8 + change})


def failed(record: Record) -> Record:
    return replace(record, status=FAILED, reason="x")


def fill(folder: Path, name: str, of_run: Fill) -> None:
    """A store with a record for each run of a grid: what `of_run` makes of a usual one, its cell, its method and its place."""
    grid = read_grid(RUNS / f"{name}.toml")
    with Store(folder) as store:
        store.keep_plan(grid.plan())
        for table in grid.tables:
            for cell in table.cells:
                for method, runs in cell.runs.items():
                    for i, run in enumerate(runs.values()):
                        about = {n: getattr(run, n) for n in ("model", "data", "seed", "settings", "judging")}
                        keys = {"choice_key": run.choice_key, "base_key": run.base_key, "grid": grid.name}
                        usual = judged(make_record(run.key, **about, **keys), zeroed={"batch_losses": (1.0 + i, 2.0, 3.0)})
                        record = of_run(usual, cell, method, i)
                        if record is not None and run.key not in store.records:
                            store.append(record)


# The paper's


def drawn(entry: str, i: int) -> float:
    """The i-th of five values whose mean and deviation an entry of the paper prints."""
    mean, deviation = _spread(entry)
    return mean + deviation * STANDARD[i]


def drawn_apart(entry: str, other: str, difference: str, i: int) -> float:
    """The same, such that its distance to `drawn(other, i)` has the deviation that a third entry prints."""
    mean, deviation = _spread(entry)
    theirs, apart = _spread(other)[1], _spread(difference)[1]
    together = (deviation**2 + theirs**2 - apart**2) / (2 * deviation * theirs)  # their correlation
    return mean + deviation * (together * STANDARD[i] + math.sqrt(1 - together**2) * ACROSS[i])


def _spread(entry: str) -> tuple[float, float]:
    found = spread_of(entry)
    assert found, entry
    return found[0], 0.0 if math.isnan(found[1]) else found[1]


def text_store(folder: Path) -> list[Table]:
    """Tables 4, 6 and 7."""

    def of(table: str, appendix: str) -> Fill:
        def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
            ratio = f"{cell.ratio:.0%}"
            row = paper_row(table, *((ratio, "gpt2") if table == "6" else (cell.model,)))
            details = paper_row(appendix, cell.model, ratio, label(method))
            assert row and details
            record = with_perplexity(record, drawn(row[label(method)], i), float(details["Final PPL"]))
            searched = "MAB" in details.get("Evals/time note", "")
            zeroed = float(details["Effective zeroed params"].rstrip("%"))
            return judged(record, zeroed_percent=zeroed, pulls=32 * searched)

        return of_run

    for number, appendix in (("4", "A1"), ("6", "A2"), ("7", "A3")):
        fill(folder, f"table{number}", of(number, appendix))
    return read_tables(folder)


def image_store(folder: Path) -> list[Table]:
    """Tables 8 and 9, each in a store of its own: the paper's bandits differ between them."""

    def of(table: str, appendix: str) -> Fill:
        def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
            place = (cell.model,) if appendix == "A5" else (cell.model, f"{cell.ratio:.2f}")
            row, details = paper_row(table, cell.model, label(method)), paper_row(appendix, *place, label(method))
            assert row and details
            top1, top5, loss = (drawn(details[f"{name} after"], i) for name in ("Top-1", "Top-5", "Loss"))
            if "Dense Top-1" in row:
                dense = drawn_apart(row["Dense Top-1"], details["Top-1 after"], details["Δ Top-1"], i)
            else:
                dense = top1 - drawn(details["Δ Top-1"], i)
            before = {"top5": top5 - drawn(details.get("Δ Top-5", "0"), i), "loss": loss - drawn(details["Δ loss"], i)}
            return judged(
                replace(record, selection_seconds=drawn(details.get("Time (s)", "0"), i)),
                dense={"top1": dense, **before},
                zeroed={"top1": top1, "top5": top5, "loss": loss},
                zeroed_percent=drawn(details["Zeroed %"], i),
                pulls=int(details["Evals"]),
            )

        return of_run

    fill(folder / "8", "table8", of("8", "A5"))
    fill(folder / "9", "table9", of("9", "A4"))
    return read_tables(folder / "8") + read_tables(folder / "9")
