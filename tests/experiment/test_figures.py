from __future__ import annotations

import math
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from PIL import Image

from secateur.experiment import figures
from secateur.experiment.figures import draw
from secateur.experiment.grid import Cell
from secateur.experiment.store import Record, Table, read_tables
from secateur.methods import METHODS
from stores import failed, fill, judged, with_perplexity, with_top1


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
            assert min(picture.size) > 200 and np.ptp(pixels) > 100


def test_methods_differ_in_colour_and_without_it() -> None:
    looks = [row.look for row in METHODS.values()]
    assert len({look.marker for look in looks}) == len({look.colour for look in looks}) == len(looks)


def pictures(tables: Sequence[Table]) -> dict[str, Any]:
    """The pictures that are drawn of tables, by name, as matplotlib has them."""
    drawn = {name: paint(pyplot) for name, paint in figures._figures(tables)}
    pyplot.close("all")
    return drawn


def points(axes: Any) -> list[tuple[list[float], list[float]]]:
    """What is drawn as points or lines."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def test_legends_are_outside_and_axes_say_what_the_bars_are(text_tables: list[Table], image_tables: list[Table]) -> None:
    for name, picture in (pictures(text_tables) | pictures(image_tables)).items():
        if name != "figure1":
            (legend,) = picture.legends
            assert {"a seed", "dense model", "the paper's mean"} <= {text.get_text() for text in legend.get_texts()}
            assert not any(axes.get_legend() for axes in picture.axes)
            assert any("± 1 standard deviation" in axes.get_xlabel() + axes.get_ylabel() for axes in picture.axes), name


def test_a_strip_has_every_seed_its_mean_the_dense_model_and_the_papers_value(tmp_path: Path) -> None:
    fill(
        tmp_path / "store", "here-deit", lambda record, cell, method, i: with_top1(record, -(i + 1) / 100 - len(method) / 1000)
    )
    (axes,) = pictures(read_tables(tmp_path / "store"))["figureB1"].axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[-2:] == ["MAB-UCB", "MAB-TS"]
    found = [x for x, y in points(axes) if y and round(y[0]) == names.index("MAB-UCB")]
    assert any(x == pytest.approx([1.3, 2.3, 3.3, 4.3, 5.3]) for x in found)
    assert any(x == pytest.approx([3.3]) for x in found)
    assert any(x == pytest.approx([1.78]) for x in found)  # Table 9's
    assert any(x == [0, 0] for x, _ in points(axes))


def test_a_setting_has_a_true_or_logarithmic_axis_and_words_are_not_joined(tmp_path: Path) -> None:
    fill(tmp_path / "store", "ablations", changes_by_seed)
    found = {name: picture.axes[0] for name, picture in pictures(read_tables(tmp_path / "store")).items()}
    assert found["ablation-temperature"].get_xscale() == found["ablation-batches-per-pull"].get_xscale() == "log"
    assert list(found["ablation-temperature"].get_xticks()) == [0.002, 0.01, 0.02, 0.05, 0.2]
    words = found["ablation-screen-by"]
    assert (words.get_xscale(), [text.get_text() for text in words.get_xticklabels()]) == (
        "linear",
        ["none", "magnitude", "fisher"],
    )
    assert all(line.get_linestyle() == "None" for line in words.lines if len(line.get_xdata()) == 3)
    assert any(line.get_linestyle() != "None" for line in found["ablation-temperature"].lines if len(line.get_xdata()) == 5)


def test_ratios_have_a_true_axis(text_tables: list[Table]) -> None:
    (axes,) = pictures(text_tables)["figure2"].axes
    assert axes.get_xscale() == "linear" and list(axes.get_xticks()) == [3.0, 5.0, 8.0]


def test_costs_are_drawn_of_records_that_have_them(tmp_path: Path) -> None:
    def of_run(record: Record, cell: Cell, method: str, i: int) -> Record:
        record = judged(with_top1(record, -0.01), zeroed={"loss": 2.1 + i / 10})
        passes = 0.0 if method == "magnitude" else 100.0 * (i + 1)
        progress = ((passes / 2, 0.01), (passes, 0.02 + i * i)) if method in ("ucb", "ts") else ()
        return replace(record, passes=passes, pass_flops=1e10, progress=progress)

    fill(tmp_path / "store", "here-deit", of_run)
    found = {name: picture.axes[0] for name, picture in pictures(read_tables(tmp_path / "store")).items()}
    assert found["cost"].get_xscale() == found["anytime"].get_xscale() == "log"
    runs = ([1e12, 2e12, 3e12, 4e12, 5e12], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert sum(x == pytest.approx(runs[0]) and y == pytest.approx(runs[1]) for x, y in points(found["cost"])) == 8
    found["cost"].figure.canvas.draw()
    assert {"1 TFLOP", "5 TFLOP"} < {text.get_text() for text in found["cost"].get_xticklabels()}
    assert [text.get_text() for text in found["cost"].get_yticklabels()] == ["0", "0.05", "0.1", "0.2", "0.5"]
    assert any("Magnitude: no passes" in text.get_text() for text in found["cost"].texts)
    mean = ([1.5e12, 3e12], [0.01, 6.02])
    assert sum(x == pytest.approx(mean[0]) and y == pytest.approx(mean[1]) for x, y in points(found["anytime"])) == 2
    assert [text.get_text() for text in found["anytime"].figure.legends[0].get_texts()][:2] == ["MAB-UCB", "MAB-TS"]


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
    assert "4/5" in path.read_text() and "no valid run" in path.read_text()


def test_a_name_that_is_no_formula_is_drawn_as_it_is(image_tables: list[Table], tmp_path: Path) -> None:
    odd = [replace(table, cells=tuple(replace(cell, model=r"$\frac{$") for cell in table.cells)) for table in image_tables]
    assert len(draw(odd, tmp_path / "odd")) == len(draw(image_tables, tmp_path / "plain"))
