from __future__ import annotations

import json
import math
from typing import Any

import pytest

from secateur.errors import SettingError
from secateur.files import jsonio
from secateur.units import GROUP_WIDTH, HEAD, KV_GROUP, MLP, Unit, enumerate_units, n_selected


def test_every_head_of_every_block_is_a_candidate_in_block_order() -> None:
    assert enumerate_units([2, 1, 3], [64, 64, 64], target="head") == [
        Unit(HEAD, 0, 0),
        Unit(HEAD, 0, 1),
        Unit(HEAD, 1, 0),
        Unit(HEAD, 2, 0),
        Unit(HEAD, 2, 1),
        Unit(HEAD, 2, 2),
    ]


@pytest.mark.parametrize(
    ("width", "group_width", "groups"), [(64, 32, 2), (65, 32, 3), (63, 32, 2), (10, 32, 1), (7, 1, 7), (7, 2, 4)]
)
def test_an_mlp_is_cut_into_groups_of_the_nominal_width_and_a_smaller_last_one(
    width: int, group_width: int, groups: int
) -> None:
    units = enumerate_units([4], [width], target="mlp", group_width=group_width)
    assert units == [Unit(MLP, 0, q, group_width) for q in range(groups)]


def test_blocks_of_different_mlp_widths_get_different_numbers_of_groups() -> None:
    units = enumerate_units([4, 4, 4], [64, 70, 10], target="mlp")
    assert [sum(unit.layer == layer for unit in units) for layer in range(3)] == [2, 3, 1]


def test_both_targets_together_are_disjoint_where_layer_and_index_coincide() -> None:
    heads = enumerate_units([2, 2], [64, 64], target="head")
    groups = enumerate_units([2, 2], [64, 64], target="mlp")
    both = enumerate_units([2, 2], [64, 64], target="both")
    assert {(u.layer, u.index) for u in heads} == {(u.layer, u.index) for u in groups}
    assert set(heads).isdisjoint(groups)
    assert both == heads + groups
    assert len(set(both)) == len(heads) + len(groups) == 8


@pytest.mark.parametrize(("kv_heads", "groups"), [([1, 2, 4], [1, 2, 4]), (None, [4, 4, 4]), ([0, 1, 0], [0, 1, 0])])
def test_a_block_has_a_group_for_each_kv_head_and_without_a_count_one_for_each_head(
    kv_heads: list[int] | None, groups: list[int]
) -> None:
    expected = [Unit(KV_GROUP, layer, i) for layer, n in enumerate(groups) for i in range(n)]
    assert enumerate_units([4, 4, 4], [64, 64, 10], target="kv_group", kv_heads=kv_heads) == expected
    with_mlps = enumerate_units([4, 4, 4], [64, 64, 10], target="kv_group+mlp", kv_heads=kv_heads)
    assert with_mlps == expected + enumerate_units([4, 4, 4], [64, 64, 10], target="mlp")
    assert enumerate_units([4] * 3, [64] * 3, target="both", kv_heads=kv_heads) == enumerate_units(
        [4] * 3, [64] * 3, target="both"
    )


def test_a_kv_group_belongs_to_the_attention_and_is_no_head() -> None:
    assert (Unit(HEAD, 0, 1).side, Unit(KV_GROUP, 0, 1).side, Unit(MLP, 0, 1).side) == (HEAD, HEAD, MLP)
    assert Unit(KV_GROUP, 0, 1) != Unit(HEAD, 0, 1)
    assert Unit(KV_GROUP, 0, 1, 32) == Unit(KV_GROUP, 0, 1) and Unit(KV_GROUP, 0, 1, 32).width == 0
    assert str(Unit(KV_GROUP, 2, 1)) == "kv_group 2.1"
    assert Unit(KV_GROUP, 2, 1).to_json() == {"kind": "kv_group", "layer": 2, "index": 1}


def test_gpt2_has_the_candidates_that_the_paper_counts() -> None:
    heads, widths = [12] * 12, [3072] * 12
    assert len(enumerate_units(heads, widths, target="head")) == 144
    assert len(enumerate_units(heads, widths, target="mlp")) == 1152
    assert len(enumerate_units(heads, widths, target="both")) == 144 + 1152


def test_an_unknown_target_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(SettingError, match=r"'neuron'.*head, mlp, both, kv_group, kv_group\+mlp"):
        enumerate_units([2], [64], target="neuron")


@pytest.mark.parametrize("group_width", [0, -32])
def test_a_group_width_below_one_is_refused(group_width: int) -> None:
    with pytest.raises(SettingError, match=str(group_width)):
        enumerate_units([2], [64], target="mlp", group_width=group_width)


@pytest.mark.parametrize(
    ("ratio", "candidates", "selected"),
    [
        (0.10, 144, 14),
        (0.10, 384, 38),
        (0.10, 336, 34),
        (0.03, 1152, 35),
        (0.05, 1152, 58),
        (0.08, 1152, 92),
        (0.02, 480, 10),
        (0.03, 480, 14),
        (0.05, 480, 24),
        (0.10, 480, 48),
        (0.10, 36, 4),
        (0.10, 138, 14),
    ],
)
def test_the_ratio_selects_as_many_units_as_in_the_paper(ratio: float, candidates: int, selected: int) -> None:
    assert n_selected(ratio, candidates) == selected


@pytest.mark.parametrize(("ratio", "candidates"), [(0.001, 144), (1e-300, 2), (0.1, 4)])
def test_at_least_one_unit_is_selected(ratio: float, candidates: int) -> None:
    assert n_selected(ratio, candidates) == 1


@pytest.mark.parametrize("ratio", [0, 1, 1.5, math.nan, math.inf, -math.inf, -0.1])
def test_a_ratio_that_is_not_strictly_between_0_and_1_is_refused(ratio: float) -> None:
    with pytest.raises(SettingError, match=rf"ratio\D* {ratio}\b"):
        n_selected(ratio, 144)


@pytest.mark.parametrize(("ratio", "candidates"), [(0.99, 10), (0.1, 1)])
def test_a_ratio_that_would_leave_no_candidate_is_refused(ratio: float, candidates: int) -> None:
    with pytest.raises(SettingError, match=rf"{ratio}.* {candidates}\b"):
        n_selected(ratio, candidates)


def test_a_model_without_units_is_said_to_have_none() -> None:
    with pytest.raises(SettingError, match=r"nothing to remove.*no layers"):
        n_selected(0.1, 0)


def test_a_head_has_no_width_and_is_one_unit_whatever_width_was_given() -> None:
    assert Unit(HEAD, 3, 5, 32) == Unit(HEAD, 3, 5)
    assert len({Unit(HEAD, 3, 5, 32), Unit(HEAD, 3, 5)}) == 1
    assert Unit(HEAD, 3, 5, 32).width == 0


def test_an_mlp_group_without_a_width_has_the_nominal_one_and_differs_from_another_partitions() -> None:
    assert Unit(MLP, 3, 5).width == GROUP_WIDTH
    assert Unit(MLP, 3, 5) == Unit(MLP, 3, 5, GROUP_WIDTH)
    assert hash(Unit(MLP, 3, 5)) == hash(Unit(MLP, 3, 5, GROUP_WIDTH))
    assert Unit(MLP, 3, 5) != Unit(MLP, 3, 5, 16)


def test_units_differ_by_kind_layer_and_index() -> None:
    assert len({Unit(HEAD, 0, 0), Unit(MLP, 0, 0), Unit(HEAD, 1, 0), Unit(HEAD, 0, 1)}) == 4


@pytest.mark.parametrize("fields", [("neuron", 0, 0, 0), ("head", -1, 0, 0), ("head", 0, -1, 0), ("mlp", 0, 0, -32)])
def test_a_unit_of_unknown_kind_or_negative_place_is_refused(fields: tuple[str, int, int, int]) -> None:
    with pytest.raises(SettingError):
        Unit(*fields)


@pytest.mark.parametrize(
    "unit", [Unit(HEAD, 0, 0), Unit(HEAD, 11, 7), Unit(KV_GROUP, 3, 1), Unit(MLP, 2, 95), Unit(MLP, 2, 95, 16)]
)
def test_a_unit_comes_back_from_json_as_it_went(unit: Unit) -> None:
    assert jsonio.decode(json.loads(json.dumps(unit.to_json())), Unit) == unit


def test_an_mlp_unit_written_without_a_width_is_read_with_the_nominal_one() -> None:
    assert jsonio.decode({"kind": "mlp", "layer": 1, "index": 2}, Unit) == Unit(MLP, 1, 2, GROUP_WIDTH)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        5,
        "head 0.1",
        [],
        ["head", 0, 1],
        {},
        {"layer": 0, "index": 1},
        {"kind": "head", "index": 1},
        {"kind": "head", "layer": 0},
        {"kind": "neuron", "layer": 0, "index": 1},
        {"kind": "head", "layer": -1, "index": 1},
        {"kind": "head", "layer": "first", "index": 1},
        {"kind": "head", "layer": None, "index": 1},
        {"kind": "head", "layer": [0], "index": 1},
        {"kind": "head", "layer": math.nan, "index": 1},
        {"kind": "head", "layer": math.inf, "index": 1},
        {"kind": "head", "layer": 0, "index": 1.5},
        {"kind": "mlp", "layer": 0, "index": 1, "width": -32},
        {"kind": "mlp", "layer": 0, "index": 1, "width": "wide"},
    ],
    ids=str,
)
def test_json_that_is_no_unit_is_refused(fields: Any) -> None:
    with pytest.raises(ValueError):
        jsonio.decode(fields, Unit)
