"""Tables of stores that are filled with the paper's own numbers: what comes out must be what the paper prints."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from secateur.experiment.compare import against_baseline, compare, summary
from secateur.experiment.grid import Cell
from secateur.experiment.paper import KEYS, paper_row, spread_of
from secateur.experiment.store import Record, Spread, Table, read_tables
from secateur.experiment.tables import Rendered, comma_separated, latex, markdown, render, shown
from secateur.methods import label
from stores import failed, fill, judged, units, with_perplexity

SMOLLM2_HEADS = 480  # of SmolLM2-360M: 32 layers of 15


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
    def ten(record: Record, cell: Cell, method: str, i: int) -> Record:
        row = paper_row("10", f"{cell.ratio:.0%}", label(method), cell.model)
        assert row
        valid, planned = map(int, row["Valid runs"].split("/"))
        share = float(row["Actual unit ratio"].rstrip("%")) / 100
        zeroed = float(row["Effective zeroed params"].rstrip("%"))
        chosen = units(round(share * SMOLLM2_HEADS))
        record = judged(record, units=chosen, candidates=SMOLLM2_HEADS, zeroed_percent=zeroed)
        if i >= valid:
            return failed(with_perplexity(record, math.nan))
        found = spread_of(row["PPL change (finite mean ± std)"])
        assert found and planned in (3, 5)
        return with_perplexity(record, statistics_of(valid, *found)[i])

    fill(tmp_path, "table10", ten)
    rendered = by_number(read_tables(tmp_path), "10")
    assert len(rendered.rows) == 21
    for ours, theirs in pairs(rendered):
        if ours["Method"] in ("Magnitude", "Taylor", "Fisher", "Wanda-style"):  # which we run once
            assert (ours.pop("Valid runs"), theirs["Valid runs"]) == ("0/1", "0/3")
        assert ours == {name: theirs[name] for name in ours}


def test_table_10_has_a_table_for_each_precision_beside_the_papers_row(tmp_path: Path) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        change = {"float32": 1.0, "bfloat16": 2.0, "float16": math.nan}[record.settings.dtype] + i
        return failed(with_perplexity(record, change)) if math.isnan(change) else with_perplexity(record, change)

    for name in ("table10", "table10-half"):
        fill(tmp_path, name, of_run)
    found = [rendered for rendered in render(read_tables(tmp_path), beside_paper=True) if rendered.number == "10"]
    changes = {r.name: next(row for row in r.rows if "MAB-UCB" in row.cells).cells[-2] for r in found}
    halves = {"table10-dtype-bfloat16": "4.00 ± 1.58%", "table10-dtype-float16": "NaN/failure"}
    assert changes == {"table10": "3.00 ± 1.58%"} | halves
    assert all("no such row" not in row.cells for rendered in found for row in rendered.rows)


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
    assert values["Bootstrap 95% CI excludes zero"] == f"{counts.percentile}/28"
    assert values["Paired p < 0.05"] == f"{counts.p}/28"
    assert f"BH q < 0.05 ({len(family)}-test family)" in values


def test_cells_without_a_run_say_so_and_no_value_is_made_up(tmp_path: Path) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record | None:
        if cell.model != "gpt2" or method == "ts" or (method == "ucb" and i > 1):
            return None
        if method == "greedy":
            return failed(with_perplexity(record, math.nan))
        if method == "random" and i == 0:
            return failed(with_perplexity(record, math.inf))
        return with_perplexity(record, 1.0 + i)

    fill(tmp_path, "table4", of_run)
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
    highlighted = by_number(tables, "11").rows[0].cells[1]
    assert re.fullmatch(r"14 \[14 .*\]", highlighted)  # not one of them has all pairs of seeds
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
    (evaluations,) = by_number(text_tables, "B1").notes
    assert "1,851" in evaluations and "60" in evaluations and "32" in evaluations
    assert any("63.08" in note for note in by_number(text_tables, "4").notes)
    for number in ("8", "9"):
        assert any("-0.0240" in note and "-0.0178" in note for note in by_number(image_tables, number).notes)
    for rendered in render(text_tables) + render(image_tables):
        assert all(note in markdown(rendered) for note in rendered.notes)


def test_runs_that_are_missing_are_told_from_those_that_failed() -> None:
    spread = Spread(mean=1.0, deviation=None, valid=3, ended=4, planned=5)
    assert shown(spread, 2, "%") == "1.00% (3/4) [4 of 5 runs]"
    assert shown(spread, 2, "%", count_failed=False) == "1.00% [4 of 5 runs]"


def test_costs_have_a_row_for_the_runs_of_a_method_however_many_tables_share_them(tmp_path: Path) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        sides = {"dense": {"top1": 0.8, "top5": 0.9}, "zeroed": {"top1": 0.79 - 0.01 * i, "top5": 0.9}}
        record = judged(record, pulls=10 * len(method), **sides)
        counted = method in ("greedy", "ucb", "magnitude")  # the others are older records
        return replace(record, passes=(100.0 + i) * len(method), pass_flops=2e10) if counted else record

    fill(tmp_path, "here-deit", of_run)
    rendered = by_number(read_tables(tmp_path), "costs")
    rows = [dict(zip(rendered.columns, row.cells, strict=True)) for row in rendered.rows]
    # Greedy is of Table 9 and of Table 8, with other settings; UCB is the same in both.
    assert [row["Method"] for row in rows] == ["Budgeted greedy", "MAB-UCB", "Magnitude", "Budgeted greedy"]
    assert (rows[1]["Pulls"], rows[1]["Passes"], rows[1]["PFLOP"]) == ("30", "306.0", "0.00612")
    assert (rows[1]["Seconds"], rows[1]["Change"]) == ("1.0", "-0.0300 ± 0.0158")
    assert markdown(rendered).startswith("**What a choice costs")


def test_a_store_without_passes_has_no_costs(text_tables: list[Table]) -> None:
    assert all(rendered.number != "costs" for rendered in render(text_tables))


def test_an_ablation_has_its_table(tmp_path: Path) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        return judged(with_perplexity(record, len(str(cell.vary)) + i / 10), pulls=10 * len(method))

    fill(tmp_path, "ablations", of_run)
    tables = render(read_tables(tmp_path))
    settings = ("temperature", "pool-size", "pulls-per-step", "batches-per-pull", "group-width", "screen-by")
    assert [rendered.name for rendered in tables] == [f"ablation-{name}" for name in settings]
    rows = next(rendered for rendered in tables if rendered.name == "ablation-screen-by").rows
    assert [row.cells[0] for row in rows] == ["none", "magnitude", "fisher"]
    assert rows[0].cells[-3:] == ["60", "30", "20"]  # greedy, UCB, TS
