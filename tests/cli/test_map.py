from __future__ import annotations

import pytest

from secateur.cli.map import model_map
from secateur.units import Unit


def test_a_row_is_a_layer_and_a_character_a_unit() -> None:
    lines = model_map({"head": [3, 3], "mlp": [5, 4]}, [Unit("head", 1, 0), Unit("mlp", 0, 4), Unit("mlp", 1, 1)])
    assert lines == [
        "   Head  MLP group",
        "0  ...   ....#",
        "1  #..   .#..",
        "# removed, . kept; a row is a layer, from 0.",
    ]


def test_many_layers_stand_side_by_side() -> None:
    lines = model_map({"kv_group": [3] * 30}, [Unit("kv_group", 7, 0), Unit("kv_group", 29, 2)])
    assert len(lines) == 12 and lines[8] == " 7  #..          17  ...          27  ..."
    assert lines[10] == " 9  ...          19  ...          29  ..#"


def test_what_is_inside_a_removed_whole_is_removed_with_it() -> None:
    counts = {"block": [1, 1, 1], "kv_group": [2] * 3, "mlp": [3] * 3}
    rows = model_map(counts, [Unit("block", 0, 0), Unit("attention", 2, 0)])[1:4]
    assert [row.split()[1:] for row in rows] == [["#", "##", "###"], [".", "..", "..."], [".", "##", "..."]]


def test_whole_layers_are_a_line_with_a_character_a_layer() -> None:
    counts = {"attention": [1] * 24, "mlp_layer": [1] * 24}
    lines = model_map(counts, [Unit("attention", 11, 0), Unit("mlp_layer", 23, 0)], width=60)
    assert lines[:3] == [
        "           0         10        20",
        "Attention  ...........#............",
        "MLP        .......................#",
    ]


def test_of_several_units_a_character_tells_the_tenths_removed_and_the_last_line_the_scale() -> None:
    gone = [Unit("mlp", 0, i) for i in (*range(8), 8, 12, 13, 14)]
    lines = model_map({"mlp": [448] * 2}, gone, width=64)
    assert lines[1].split() == ["0", "#5" + "." * 54] and lines[2].split() == ["1", "." * 56]
    assert lines[-1] == "A character is 8 MLP channel groups; 1 to 9: tenths removed."


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("layers", [2, 30, 126])
def test_a_map_fits_and_is_ascii_and_short(width: int, layers: int) -> None:
    counts = {"kv_group": [8] * layers, "mlp": [512] * layers}
    lines = model_map(counts, [Unit("mlp", layers - 1, 511), Unit("kv_group", 1, 3)], width)
    drawn = lines[: next(i for i, line in enumerate(lines) if line.startswith("#"))]
    assert max(map(len, drawn)) <= width and len(lines) <= 40 and "".join(lines).isascii()
    assert drawn[-1].split()[0] == str(layers - 1) and drawn[-1][-1] != "."
