"""Tables and figures of stores that are filled with the paper's own numbers: what comes out must be what the paper prints."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from secateur.errors import StoreError
from secateur.experiment.compare import against_baseline, compare, summary
from secateur.experiment.figures import draw
from secateur.experiment.grid import Cell, read_grid
from secateur.experiment.paper import KEYS, paper_row, spread_of
from secateur.experiment.results import LABELS, Spread, Table, read_tables
from secateur.experiment.store import Store
from secateur.experiment.tables import Rendered, comma_separated, latex, markdown, render, shown

RUNS = Path(__file__).parents[1] / "runs"
STANDARD = (-1.2649110640673518, -0.6324555320336759, 0.0, 0.6324555320336759, 1.2649110640673518)  # mean 0, deviation 1

Fields = dict[str, Any]
Fill = Callable[[Cell, str, int], Fields | None]


def fill(folder: Path, name: str, fields_of: Fill) -> None:
    """A store with a record for each run of a grid, as `fields_of` a cell, a method and the number of a seed says."""
    grid = read_grid(RUNS / f"{name}.toml")
    with Store(folder) as store:
        store.keep_plan(grid.to_json())
        for table in grid.tables:
            for cell in table.cells:
                for method, runs in cell.runs.items():
                    for i, run in enumerate(runs.values()):
                        fields = fields_of(cell, method, i)
                        if fields is not None and run.key not in store.records:
                            store.append({"key": run.key, "base_key": run.base_key, "seed": run.seed} | usual(i) | fields)


def usual(i: int) -> Fields:
    losses = {"batch_losses": [1.0 + i, 2.0, 3.0], "loss": 2.0}
    about = {"model_digest": "m", "data_digest": "d", "total_params": 5_717_416, "candidates": 36, "units": [{}] * 4}
    cost = {"pulls": 0, "forwards": 0, "score_passes": 0, "selection_seconds": 1.0, "total_seconds": 2.0}
    return (
        {"status": "done", "dense": dict(losses), "pruned": dict(losses), "zeroed_percent": 3.4522, "unit_ratio": 1 / 9}
        | about
        | cost
    )


def drawn(entry: str, i: int, n: int = 5) -> float:
    """The i-th of n values whose mean and deviation an entry of the paper prints."""
    found = spread_of(entry)
    assert found, entry
    values = [STANDARD[j] for j in range(5)] if n == 5 else [-1.0, 0.0, 1.0]
    return found[0] + (0 if math.isnan(found[1]) else found[1] * values[i])


def text_store(folder: Path) -> list[Table]:
    def four(cell: Cell, method: str, i: int) -> Fields:
        (row, details) = paper_row("4", cell.model), paper_row("A1", cell.model, "10%", LABELS[method])
        assert row and details
        return language(row[LABELS[method]], details, i)

    def six(cell: Cell, method: str, i: int) -> Fields:
        ratio = f"{cell.ratio:.0%}"
        row, details = paper_row("6", ratio, "gpt2"), paper_row("A2", "gpt2", ratio, LABELS[method])
        assert row and details
        return language(row[LABELS[method]], details, i)

    def seven(cell: Cell, method: str, i: int) -> Fields:
        row, details = paper_row("7", cell.model), paper_row("A3", cell.model, "10%", LABELS[method])
        assert row and details
        return language(row[LABELS[method]], details, i)

    def language(change: str, details: dict[str, str], i: int) -> Fields:
        pruned = {"perplexity": float(details["Final PPL"]), "batch_losses": [1.0 + i, 2.0, 3.0], "loss": 2.0}
        zeroed = float(details["Effective zeroed params"].rstrip("%"))
        searched = "MAB" in details.get("Evals/time note", "")
        return {"ppl_change_percent": drawn(change, i), "pruned": pruned, "zeroed_percent": zeroed, "pulls": 32 * searched}

    for name, fields_of in (("table4", four), ("table6", six), ("table7", seven)):
        fill(folder, name, fields_of)
    return read_tables(folder)


def image_store(folder: Path) -> list[Table]:
    def of(table: str, appendix: str) -> Fill:
        def fields(cell: Cell, method: str, i: int) -> Fields:
            row, details = (
                paper_row(table, cell.model, LABELS[method]),
                paper_row(appendix, *appendix_key(appendix, cell, method)),
            )
            assert row and details
            base = row.get("Dense Top-1", "0.8 ± 0.01")
            dense = {"top1": drawn(base, i), "loss": 1.0, "batch_losses": [1.0, 2.0]}
            pruned: Fields = {"top1": drawn(details["Top-1 after"], i), "top5": drawn(details["Top-5 after"], i)}
            pruned |= {"loss": drawn(details["Loss after"], i), "batch_losses": [1.0 + i, 2.0]}
            found = {"dense": dense, "pruned": pruned, "delta_top1": drawn(details["Δ Top-1"], i)}
            found |= {"delta_top5": drawn(details.get("Δ Top-5", "0"), i), "delta_loss": drawn(details["Δ loss"], i)}
            found |= {"zeroed_percent": drawn(details["Zeroed %"], i), "pulls": int(details["Evals"])}
            return found | {"selection_seconds": drawn(details.get("Time (s)", "0"), i)}

        return fields

    fill(folder / "8", "table8", of("8", "A5"))
    fill(folder / "9", "table9", of("9", "A4"))
    return read_tables(folder / "8") + read_tables(folder / "9")


def appendix_key(appendix: str, cell: Cell, method: str) -> tuple[str, ...]:
    return (cell.model, LABELS[method]) if appendix == "A5" else (cell.model, f"{cell.ratio:.2f}", LABELS[method])


@pytest.fixture(scope="module")
def text_tables(tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    return text_store(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def image_tables(tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    return image_store(tmp_path_factory.mktemp("image"))


def by_number(tables: list[Table], number: str) -> Rendered:
    return next(rendered for rendered in render(tables) if rendered.number == number)


def pairs(rendered: Rendered) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Each of our rows with the paper's."""
    for row in rendered.rows:
        theirs = paper_row(rendered.number, *row.key)
        assert theirs, row.key
        yield dict(zip(rendered.columns, row.cells, strict=True)), theirs


def rounded(cells: dict[str, str]) -> dict[str, str]:
    """Zero deviations as ours are written: the paper prints some and leaves out others."""
    return {name: re.sub(r" ± 0\.0+$", "", cell) for name, cell in cells.items()}


@pytest.mark.parametrize(("number", "n"), [("4", 7), ("6", 3), ("7", 4)])
def test_language_tables_are_the_papers_to_the_letter(text_tables: list[Table], number: str, n: int) -> None:
    rendered = by_number(text_tables, number)
    assert len(rendered.rows) == n
    for ours, theirs in pairs(rendered):
        assert ours == theirs


@pytest.mark.parametrize(("number", "n"), [("A1", 56), ("A2", 24), ("A3", 20)])
def test_the_language_details_are_the_papers_to_the_letter(text_tables: list[Table], number: str, n: int) -> None:
    rendered = by_number(text_tables, number)
    assert len(rendered.rows) == n
    for ours, theirs in pairs(rendered):
        note = ours.pop("Evals/time note", None)
        assert ours == {name: value for name, value in theirs.items() if name in ours}
        assert note in (None, "32 evals", "Static/no selection evals")


@pytest.mark.parametrize(("number", "n"), [("8", 9), ("9", 15), ("A5", 9)])
def test_vision_tables_are_the_papers_to_the_letter(image_tables: list[Table], number: str, n: int) -> None:
    rendered = by_number(image_tables, number)
    assert len(rendered.rows) == n
    for ours, theirs in pairs(rendered):
        assert ours == theirs


def test_the_vision_details_are_the_papers_but_for_the_names(image_tables: list[Table]) -> None:
    rendered = by_number(image_tables, "A4")
    assert len(rendered.rows) == 15
    for ours, theirs in pairs(rendered):
        names = [name for name in theirs if name not in ("Model", "Method")]
        assert {name: rounded(ours)[name] for name in names} == {name: rounded(theirs)[name] for name in names}


def test_table_5_finds_the_papers_best_and_its_advantage(text_tables: list[Table]) -> None:
    rendered = by_number(text_tables, "5")
    for ours, theirs in pairs(rendered):
        assert {n: ours[n] for n in ("Model", "Best MAB", "Best non-MAB baseline")} == {
            n: theirs[n] for n in ("Model", "Best MAB", "Best non-MAB baseline")
        }
        advantage = "MAB advantage over best non-MAB"  # which the paper takes from values that it does not print
        assert float(ours[advantage].split()[0]) == pytest.approx(float(theirs[advantage].split()[0]), abs=0.0101)


def test_table_10_counts_failed_runs_and_averages_the_others(tmp_path: Path) -> None:
    def ten(cell: Cell, method: str, i: int) -> Fields:
        row = paper_row("10", f"{cell.ratio:.0%}", LABELS[method], cell.model)
        assert row
        valid, planned = map(int, row["Valid runs"].split("/"))
        about = {"unit_ratio": float(row["Actual unit ratio"].rstrip("%")) / 100}
        about["zeroed_percent"] = float(row["Effective zeroed params"].rstrip("%"))
        if i >= valid:
            return about | {"status": "failed", "reason": "not finite", "ppl_change_percent": "nan"}
        found = spread_of(row["PPL change (finite mean ± std)"])
        assert found and planned in (3, 5)
        values = statistics_of(valid, *found)
        return about | {"ppl_change_percent": values[i]}

    fill(tmp_path, "table10", ten)
    rendered = by_number(read_tables(tmp_path), "10")
    assert len(rendered.rows) == 21
    for ours, theirs in pairs(rendered):
        if ours["Method"] in ("Magnitude", "Taylor", "Fisher", "Wanda-style"):  # which we run once
            assert (ours.pop("Valid runs"), theirs["Valid runs"]) == ("0/1", "0/3")
        assert ours == {name: theirs[name] for name in ours}


def statistics_of(n: int, mean: float, deviation: float) -> list[float]:
    """n values with this mean and sample deviation."""
    raw = [float(i) for i in range(n)]
    centre, spread = statistics.fmean(raw), statistics.stdev(raw) if n > 1 else 1.0
    return [mean + deviation * (value - centre) / spread for value in raw]


def test_table_3_has_the_papers_shares(text_tables: list[Table]) -> None:
    for ours, theirs in pairs(by_number(text_tables, "3")):
        assert ours["Effective zeroed params"] == theirs["Effective zeroed params"]
        assert (ours["Model"], ours["Target"]) == (theirs["Model"], theirs["Target"])


def test_table_3_has_the_papers_range_where_methods_take_heads_of_other_widths(image_tables: list[Table]) -> None:
    found = {ours["Model"]: (ours, theirs) for ours, theirs in pairs(by_number(image_tables, "3"))}
    ours, theirs = found["Swin-Tiny"]
    assert ours["Effective zeroed params"] == theirs["Effective zeroed params"]


def test_table_11_counts_28_of_a_family_of_all_language_tests(text_tables: list[Table]) -> None:
    rendered = by_number(text_tables, "11")
    values = {row.cells[0]: row.cells[1] for row in rendered.rows}
    family = compare(text_tables)
    # 10 cells with six other methods, and 4 with three, for two bandits.
    assert len(family) == 2 * (10 * 6 + 4 * 3)
    assert values["Highlighted MAB vs greedy rows"] == "28"
    counts = summary(against_baseline(family, "greedy"), family)
    assert values["Bootstrap 95% CI excludes zero"] == f"{counts.bootstrap}/28"
    assert values["Paired p < 0.05"] == f"{counts.p}/28"
    assert f"BH q < 0.05 ({len(family)}-test family)" in values


def test_a_comparison_that_two_tables_share_is_one_test(tmp_path: Path) -> None:
    def fields(cell: Cell, method: str, i: int) -> Fields:
        return {"delta_top1": -0.01 * i - 0.001 * len(method) * i * i}

    fill(tmp_path, "here-deit", fields)
    family = compare(read_tables(tmp_path))
    # Six methods against two bandits, and greedy of Table 8 besides that of Table 9.
    assert len(family) == 2 * 6 + 2
    assert sorted({c.tables for c in family}) == [("8",), ("9",)]
    assert {c.baseline for c in family} == {"greedy", "magnitude", "random", "wanda", "taylor", "fisher"}
    with pytest.raises(StoreError, match="no comparison against 'ucb'; there are those against fisher, greedy"):
        against_baseline(family, "ucb")


def test_a_comparison_is_of_the_drop_and_pairs_seed_with_seed(tmp_path: Path) -> None:
    drops = {"ucb": [0.01, 0.02, 0.03, 0.04, 0.06], "greedy": [0.03, 0.03, 0.05, 0.04, 0.09]}

    def fields(cell: Cell, method: str, i: int) -> Fields | None:
        if method == "greedy" and i == 4:
            return {"status": "failed", "reason": "x", "delta_top1": "nan"}
        pruned = {"batch_losses": [1.0 + i + len(method), 2.0, 4.0], "loss": 2.0}
        return {"delta_top1": -drops.get(method, [0.2] * 5)[i], "pruned": pruned}

    fill(tmp_path, "table8", fields)
    found = next(c for c in compare(read_tables(tmp_path)) if (c.method, c.baseline) == ("ucb", "greedy"))
    assert (found.result.n, found.planned) == (4, 5)
    assert found.result.mean == pytest.approx(statistics.fmean([-0.02, -0.01, -0.02, 0.0]))
    assert found.batch_mean == pytest.approx(-1.0)
    assert found.to_json()["planned"] == 5


def test_cells_without_a_run_say_so_and_no_value_is_made_up(tmp_path: Path) -> None:
    def fields(cell: Cell, method: str, i: int) -> Fields | None:
        if cell.model != "gpt2" or method == "ts" or (method == "ucb" and i > 1):
            return None
        if method == "greedy":
            return {"status": "failed", "reason": "x", "ppl_change_percent": "nan"}
        if method == "random" and i == 0:
            return {"status": "failed", "reason": "x", "ppl_change_percent": "inf"}
        return {"ppl_change_percent": 1.0 + i, "pruned": {"perplexity": 50.0, "batch_losses": [1.0], "loss": 1.0}}

    fill(tmp_path, "table4", fields)
    tables = read_tables(tmp_path)
    first, second = by_number(tables, "4").rows[:2]
    assert first.cells[1:] == [
        "3.50 ± 1.29% (4/5)",
        "1.00%",
        "1.00%",
        "1.00%",
        "1.00%",
        "NaN/failure",
        "1.50 ± 0.71% [2 of 5 runs]",
        "missing",
    ]
    assert second.cells[1:] == ["missing"] * 8
    assert by_number(tables, "5").rows[0].cells[1:] == ["missing", "Magnitude: 1.00%", "missing"]
    assert by_number(tables, "5").rows[1].cells[1:] == ["missing"] * 3
    costs = {row.cells[0]: row.cells[1] for row in by_number(tables, "B1").rows}
    assert (costs["MAB-UCB"], costs["MAB-TS"], costs["Magnitude"]) == ("0 [2 of 35 runs]", "missing", "0 [1 of 7 runs]")
    assert by_number(tables, "11").rows[0].cells[1] == "14 [14 of them without all pairs of seeds]"
    for rendered in render(tables):
        assert "nan" not in comma_separated(rendered).lower().replace("nan/failure", "")


@pytest.mark.parametrize("store", ["text", "image"])
def test_beside_the_paper_each_row_is_followed_by_the_papers(
    store: str, text_tables: list[Table], image_tables: list[Table]
) -> None:
    for rendered in render(text_tables if store == "text" else image_tables, beside_paper=True):
        assert [row.cells[0] for row in rendered.rows] == ["ours", "paper"] * (len(rendered.rows) // 2)
        assert all(len(row.cells) == len(rendered.columns) for row in rendered.rows)
        for ours, theirs in zip(rendered.rows[::2], rendered.rows[1::2], strict=True):
            known = paper_row(rendered.number, *ours.key)
            assert theirs.cells[1:] == (
                [known.get(name, "") for name in rendered.columns[1:]] if known else ["no such row", *theirs.cells[2:]]
            )


def test_every_table_of_the_paper_that_follows_from_runs_has_a_home(
    text_tables: list[Table], image_tables: list[Table]
) -> None:
    made = {rendered.number for tables in (text_tables, image_tables) for rendered in render(tables)}
    assert made | {"10"} == set(KEYS)


def test_the_forms_hold_the_same_cells(image_tables: list[Table]) -> None:
    for rendered in render(image_tables):
        rows = [row.cells for row in rendered.rows]
        assert list(csv.reader(io.StringIO(comma_separated(rendered)))) == [rendered.columns, *rows]
        lines = [line for line in markdown(rendered).splitlines() if line.startswith("|")]
        assert [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]] == rows
        body = latex(rendered).split(r"\midrule")[1].split(r"\bottomrule")[0]
        assert [line.count("&") for line in body.strip().splitlines()] == [len(rendered.columns) - 1] * len(rows)
        assert not re.search(r"(?<!\\)[%#_]", latex(rendered))


def test_notes_say_what_the_paper_leaves_open(text_tables: list[Table], image_tables: list[Table]) -> None:
    assert "about 60 a step" in markdown(by_number(text_tables, "B1"))
    assert "63.08" in markdown(by_number(text_tables, "4"))
    for number in ("8", "9"):
        assert "do not say what differed" in markdown(by_number(image_tables, number))


# Figures


def test_figures_are_drawn_for_what_there_is(text_tables: list[Table], image_tables: list[Table], tmp_path: Path) -> None:
    text, image = draw(text_tables, tmp_path / "text"), draw(image_tables, tmp_path / "image")
    assert [path.stem for path in text if path.suffix == ".svg"] == ["figure1", "figure2"]
    assert [path.stem for path in image if path.suffix == ".svg"] == ["figure1", "figure3", "figure4", "figureB1"]
    for path in (*text, *image):
        if path.suffix == ".svg":
            xml.etree.ElementTree.parse(path)
        else:
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            assert min(picture.size) > 200
            assert np.ptp(pixels, axis=-1).max() < 8, "a figure must be readable in grey"


def test_the_same_store_gives_the_same_bytes(image_tables: list[Table], tmp_path: Path) -> None:
    first, second = (draw(image_tables, tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_an_ablation_has_its_table_and_its_figure(tmp_path: Path) -> None:
    def fields(cell: Cell, method: str, i: int) -> Fields:
        return {"ppl_change_percent": len(str(cell.vary)) + i / 10, "pulls": 10 * len(method)}

    fill(tmp_path / "store", "ablations", fields)
    tables = read_tables(tmp_path / "store")
    names = [
        f"ablation-{name}"
        for name in ("temperature", "pool-size", "pulls-per-step", "batches-per-pull", "group-width", "screen-by")
    ]
    assert [rendered.name for rendered in render(tables)] == names
    rows = next(r for r in render(tables) if r.name == "ablation-screen-by").rows
    assert [row.cells[0] for row in rows] == ["none", "magnitude", "fisher"]
    assert rows[0].cells[-3:] == ["60", "30", "20"]  # greedy, UCB, TS
    drawn_names = [path.stem for path in draw(tables, tmp_path / "out") if path.suffix == ".svg"]
    assert drawn_names == ["figure1", *names]


def test_a_figure_of_failed_runs_says_so_and_draws_no_bar(tmp_path: Path) -> None:
    def fields(cell: Cell, method: str, i: int) -> Fields:
        if method == "greedy" or i == 0:
            return {"status": "failed", "reason": "x", "delta_top1": "nan"}
        return {"delta_top1": -0.02 - i / 1000}

    fill(tmp_path / "store", "table8", fields)
    (path,) = [p for p in draw(read_tables(tmp_path / "store"), tmp_path / "out") if p.name == "figure3.svg"]
    assert "4/5" in path.read_text()


def test_runs_that_are_missing_are_told_from_those_that_failed() -> None:
    spread = Spread(mean=1.0, deviation=None, valid=3, ended=4, planned=5)
    assert shown(spread, 2, "%") == "1.00% (3/4) [4 of 5 runs]"
    assert shown(spread, 2, "%", count_failed=False) == "1.00% [4 of 5 runs]"


def test_an_ablation_at_two_ratios_has_two_figures(tmp_path: Path) -> None:
    fill(tmp_path / "store", "ablations", lambda cell, method, i: {"ppl_change_percent": 1.0 + i})
    first = read_tables(tmp_path / "store")[0]
    twice = replace(first, cells=(*first.cells, *(replace(cell, ratio=0.5) for cell in first.cells)))
    names = [path.stem for path in draw([twice], tmp_path / "out") if path.suffix == ".svg"]
    assert names == ["figure1", *(f"ablation-temperature-gpt2-WikiText-2-head-{ratio}" for ratio in (0.1, 0.5))]
