from __future__ import annotations

import math
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from secateur.experiment.figures import draw
from secateur.experiment.grid import Cell
from secateur.experiment.store import Record, Table, read_tables
from stores import failed, fill, with_perplexity, with_top1


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


def changes_by_seed(record: Record, cell: Cell, method: str, i: int) -> Record:
    return with_perplexity(record, 1.0 + i)


def test_an_ablation_has_its_figure(tmp_path: Path) -> None:
    fill(tmp_path / "store", "ablations", changes_by_seed)
    names = [path.stem for path in draw(read_tables(tmp_path / "store"), tmp_path / "out") if path.suffix == ".svg"]
    settings = ("temperature", "pool-size", "pulls-per-step", "batches-per-pull", "group-width", "screen-by")
    assert names == ["figure1", *(f"ablation-{name}" for name in settings)]


def test_an_ablation_at_two_ratios_has_two_figures(tmp_path: Path) -> None:
    fill(tmp_path / "store", "ablations", changes_by_seed)
    first = read_tables(tmp_path / "store")[0]
    twice = replace(first, cells=(*first.cells, *(replace(cell, ratio=0.5) for cell in first.cells)))
    names = [path.stem for path in draw([twice], tmp_path / "out") if path.suffix == ".svg"]
    assert names == ["figure1", *(f"ablation-temperature-gpt2-WikiText-2-head-{ratio}" for ratio in (0.1, 0.5))]


def test_a_figure_of_failed_runs_says_so_and_draws_no_bar(tmp_path: Path) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        if method == "greedy" or i == 0:
            return failed(with_top1(record, math.nan))
        return with_top1(record, -0.02 - i / 1000)

    fill(tmp_path / "store", "table8", of_run)
    (path,) = [p for p in draw(read_tables(tmp_path / "store"), tmp_path / "out") if p.name == "figure3.svg"]
    assert "4/5" in path.read_text()


def test_a_name_that_is_no_formula_is_drawn_as_it_is(image_tables: list[Table], tmp_path: Path) -> None:
    odd = [replace(table, cells=tuple(replace(cell, model=r"$\frac{$") for cell in table.cells)) for table in image_tables]
    assert len(draw(odd, tmp_path / "odd")) == len(draw(image_tables, tmp_path / "plain"))
