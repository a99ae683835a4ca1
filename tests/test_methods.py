"""A method is one row of methods.py: everything else finds it there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from settings_page import page

import secateur as sc
from secateur.errors import SettingError
from secateur.experiment.compare import compare
from secateur.experiment.figures import draw
from secateur.experiment.grid import read_grid, run_grid
from secateur.experiment.store import read_tables
from secateur.experiment.tables import render
from secateur.methods import (
    ACTIVATIONS,
    BANDIT,
    METHODS,
    RIVAL,
    Look,
    Method,
    bandits,
    choosing_sets,
    label,
    method,
    scoring,
    searching,
)
from secateur.search.policies import Greedy
from secateur.units import Unit
from worlds import SEQ_LEN, Run, World

NEW = {
    "mine": Method("My bandit", "a policy of my own", BANDIT, Look("#000000", "o", "-"), policy=lambda _: Greedy(), draws=True),
    "last": Method("Last first", "the last unit first", RIVAL, Look("#999999", "x", ":"), score=f"{__name__}:last_first"),
}


def last_first(model: Any, units: Sequence[Unit], batches: Any = (), seed: int = 0) -> dict[Unit, float]:
    return {unit: -float(i) for i, unit in enumerate(units)}


@pytest.fixture
def new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in NEW.items():
        monkeypatch.setitem(METHODS, name, row)


SMALL = ["--ratio", "0.3", "--pulls-per-step", "4", "--seq-len", SEQ_LEN, "--device", "cpu", "--layout", "none"]


@pytest.mark.usefixtures("new_rows")
@pytest.mark.parametrize("name", NEW)
def test_the_command_line_has_a_new_row(name: str, world: World, tmp_path: Path, run: Run) -> None:
    assert name in run("prune", "--help").out
    model, data = world.of("text")
    ran = run("prune", model, "--method", name, "--calibration", data, *SMALL, "-o", tmp_path / name, "--json")
    assert ran.code == 0, ran.err
    assert ran.document["settings"]["method"] == name
    chosen = [(unit["layer"], unit["index"]) for unit in ran.document["units"]]
    assert len(chosen) == 3
    if name == "last":
        assert chosen == [(2, 2), (2, 1), (2, 0)]


@pytest.mark.usefixtures("new_rows")
def test_a_new_score_can_screen(world: World, tmp_path: Path, run: Run) -> None:
    model, data = world.of("text")
    options = ["--method", "ucb", "--screen", "4", "--screen-by", "last", "--calibration", data, *SMALL]
    ran = run("select", model, *options, "-o", tmp_path / "sel.json")
    assert ran.code == 0, ran.err
    first = [pull.unit for pull in sc.Selection.load(tmp_path / "sel.json").trace if pull.step == 0]
    assert {(unit.layer, unit.index) for unit in first} <= {(2, 2), (2, 1), (2, 0), (1, 2)}


@pytest.mark.usefixtures("new_rows", "fresh_workplace")
def test_grid_comparison_tables_and_figures_have_a_new_row(world: World, tmp_path: Path) -> None:
    model, data = world.of("text")
    path = tmp_path / "new.toml"
    path.write_text(
        f"""
        task = "text"
        seeds = [1, 2]
        target = "head"
        ratios = [0.3]
        models = {{ Tiny = "{model}" }}
        settings = {{ calibration = "{data}", pulls_per_step = 4, seq_len = {SEQ_LEN} }}
        [[table]]
        number = "4"
        methods = ["mine", "last", "greedy"]
        mine = {{ pulls_per_step = 3 }}
        """
    )
    assert run_grid(read_grid(path), tmp_path / "store", device="cpu").done == 5  # the score chooses once for all seeds
    tables = read_tables(tmp_path / "store")
    assert {(c.method, c.baseline) for c in compare(tables)} == {("mine", "last"), ("mine", "greedy")}
    rendered = {table.number: table for table in render(tables)}
    assert {"My bandit", "Last first", "Budgeted greedy"} <= set(rendered["4"].columns)
    assert "My bandit" in rendered["5"].rows[0].cells[1]
    assert {"My bandit", "Last first"} <= {row.key[-1] for row in rendered["A1"].rows}
    assert any("figure" in file.name for file in draw(tables, tmp_path / "figures"))


@pytest.mark.usefixtures("new_rows", "fresh_workplace")
def test_figures_draw_a_new_row(world: World, tmp_path: Path) -> None:
    model, data = world.of("image")
    path = tmp_path / "new.toml"
    path.write_text(
        f"""
        task = "image"
        seeds = [1]
        target = "head"
        ratios = [0.3]
        models = {{ Tiny = "{model}" }}
        settings = {{ calibration = "{data}", pulls_per_step = 4 }}
        [[table]]
        number = "9"
        methods = ["mine", "last", "ucb"]
        """
    )
    run_grid(read_grid(path), tmp_path / "store", device="cpu")
    draw(read_tables(tmp_path / "store"), tmp_path / "figures")
    both, measured = ((tmp_path / "figures" / name).read_text() for name in ("figureB1.svg", "figure4.svg"))
    assert all(f"<!-- {name} -->" in both for name in ("My bandit", "Last first"))
    assert "<!-- My bandit -->" in measured and "<!-- Last first -->" not in measured


@pytest.mark.usefixtures("new_rows")
def test_the_docs_have_a_new_row() -> None:
    assert "| `mine` | My bandit | measuring | bandit |" in page()
    assert "| `last` | Last first | a score of weights | rival | - |" in page()


@pytest.mark.usefixtures("new_rows")
def test_the_lists_of_methods_come_from_the_table() -> None:
    assert "mine" in searching() and "mine" in bandits() and "mine" not in scoring()
    assert "last" in scoring() and "last" not in searching() and "last" not in bandits()
    assert label("last") == "Last first" and label("gone") == "gone"


def test_a_method_either_measures_or_scores_or_chooses_a_set() -> None:
    for name, row in METHODS.items():
        assert [row.policy is not None, bool(row.score), bool(row.search)].count(True) == 1, name
        assert row.policy or callable(row.scorer())
    assert sorted([*searching(), *scoring(), *choosing_sets()]) == sorted(METHODS)


def test_what_another_tool_chooses_by_is_called_our_implementation() -> None:
    named = {name for name, row in METHODS.items() if row.help.startswith("our implementation of ")}
    assert named == {"obs", "flap", "llmpruner", "bonsai", "kwon", "evopress"}
    assert {METHODS[name].role for name in named} == {RIVAL}


@pytest.mark.parametrize(
    ("name", "text", "image"),
    [
        ("random", True, True),
        ("magnitude", False, False),
        ("wanda", False, True),
        ("taylor", False, True),
        ("fisher", False, True),
        ("greedy", True, True),
        ("ucb", True, True),
    ],
)
def test_what_depends_on_the_seed_differs_between_texts_and_images(name: str, text: bool, image: bool) -> None:
    assert (METHODS[name].depends_on_seed("text"), METHODS[name].depends_on_seed("image")) == (text, image)


def test_a_score_that_looks_at_activations_needs_batches_and_depends_on_the_images() -> None:
    row = Method("X", "x", RIVAL, Look("#000000", "o", "-"), score="a:b", needs=ACTIVATIONS)
    assert row.needs_batches and row.depends_on_seed("image") and not row.depends_on_seed("text")


def test_an_unknown_method_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(SettingError, match=r"'fischer'.*'fisher'"):
        method("fischer")


def test_the_names_of_the_methods_are_plain_words_for_files() -> None:
    assert all(json.dumps(name).strip('"').isalnum() for name in METHODS)
