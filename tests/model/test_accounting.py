from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

from secateur.errors import SettingError
from secateur.model.accounting import (
    effective_parameters,
    inventory,
    total_parameters,
    zeroed_percent,
    zeroed_percent_range,
)
from secateur.model.families import anatomy, candidate_units
from secateur.model.loading import load_shapes
from secateur.units import HEAD, KV_GROUP, MLP, Unit, n_selected
from tiny import FAMILIES_TINY, GROUP

GPT2, GPT2_MEDIUM = "gpt2", "gpt2-medium"
OPT_125M, OPT_350M = "facebook/opt-125m", "facebook/opt-350m"
PYTHIA_160M, PYTHIA_410M = "EleutherAI/pythia-160m", "EleutherAI/pythia-410m"
QWEN, SMOLLM = "Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-360M"
VIT, DEIT = "google/vit-base-patch16-224", "facebook/deit-tiny-patch16-224"
SWIN = "microsoft/swin-tiny-patch4-window7-224"

TABLE_3 = [  # model, target, ratio, k, K, unit ratio and Z as printed; the 17th row, Swin-Tiny, is a range and has its own test
    (GPT2, HEAD, 0.10, 14, 144, "9.72", "2.2141"),
    (GPT2_MEDIUM, HEAD, 0.10, 38, 384, "9.90", "2.8095"),
    (OPT_125M, HEAD, 0.10, 14, 144, "9.72", "2.1999"),
    (OPT_350M, HEAD, 0.10, 38, 384, "9.90", "3.0099"),
    (PYTHIA_160M, HEAD, 0.10, 14, 144, "9.72", "1.6974"),
    (PYTHIA_410M, HEAD, 0.10, 38, 384, "9.90", "2.4594"),
    (QWEN, HEAD, 0.10, 34, 336, "10.12", "0.7893"),
    (GPT2, MLP, 0.03, 35, 1152, "3.04", "1.3834"),
    (GPT2, MLP, 0.05, 58, 1152, "5.03", "2.2924"),
    (GPT2, MLP, 0.08, 92, 1152, "7.99", "3.6362"),
    (SMOLLM, HEAD, 0.02, 10, 480, "2.08", "0.3396"),
    (SMOLLM, HEAD, 0.03, 14, 480, "2.92", "0.4755"),
    (SMOLLM, HEAD, 0.05, 24, 480, "5.00", "0.8151"),
    (SMOLLM, HEAD, 0.10, 48, 480, "10.00", "1.6302"),
    (VIT, HEAD, 0.10, 14, 144, "9.72", "3.1827"),
    (DEIT, HEAD, 0.10, 4, 36, "11.11", "3.4522"),
]

TOTALS = {
    GPT2: 124_439_808,
    GPT2_MEDIUM: 354_823_168,
    OPT_125M: 125_239_296,
    OPT_350M: 331_196_416,
    PYTHIA_160M: 162_322_944,
    PYTHIA_410M: 405_334_016,
    QWEN: 494_032_768,
    SMOLLM: 361_821_120,
    VIT: 86_567_656,
    DEIT: 5_717_416,
    SWIN: 28_288_354,
}

shapes = functools.cache(load_shapes)


@pytest.mark.parametrize(("name", "target", "ratio", "k", "n_candidates", "unit_ratio", "percent"), TABLE_3)
def test_a_row_of_table_3_comes_out_as_printed(
    name: str, target: str, ratio: float, k: int, n_candidates: int, unit_ratio: str, percent: str
) -> None:
    model = shapes(name)
    units = candidate_units(model, target)
    assert len(units) == n_candidates
    assert n_selected(ratio, len(units)) == k
    assert f"{100 * k / len(units):.2f}" == unit_ratio
    assert f"{zeroed_percent(model, units[:k]):.4f}" == percent
    assert f"{zeroed_percent(model, units[-k:]):.4f}" == percent


def test_the_swin_row_of_table_3_is_a_range_whose_low_end_is_the_narrow_stages() -> None:
    model = shapes(SWIN)
    units = candidate_units(model, HEAD)
    k = n_selected(0.10, len(units))
    assert (k, len(units)) == (14, 138)
    stage_1 = [unit for unit in units if unit.layer in (0, 1)]
    stage_2 = [unit for unit in units if unit.layer in (2, 3)]
    assert (len(stage_1), len(stage_2)) == (6, 12)
    low, high = zeroed_percent_range(model, units, k)
    assert f"{zeroed_percent(model, stage_1 + stage_2[:8]):.4f}" == f"{low:.4f}" == "0.9604"
    assert high == zeroed_percent(model, units[-14:])
    assert low < 3.1844 < high


@pytest.mark.parametrize(("name", "total"), TOTALS.items())
def test_the_dense_models_have_their_published_parameter_counts(name: str, total: int) -> None:
    model = shapes(name)
    assert total_parameters(model) == total
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())


@pytest.mark.parametrize(
    ("timm_name", "name"),
    [("vit_base_patch16_224", VIT), ("deit_tiny_patch16_224", DEIT), ("swin_tiny_patch4_window7_224", SWIN)],
)
def test_timms_model_of_the_same_name_counts_the_same(timm_name: str, name: str) -> None:
    ours, timms = shapes(name), shapes(f"timm:{timm_name}")
    assert total_parameters(timms) == TOTALS[name]
    assert candidate_units(timms, "both") == candidate_units(ours, "both")
    for mine, theirs in zip(anatomy(ours), anatomy(timms), strict=True):
        for unit in (Unit(HEAD, 0, 0), Unit(MLP, 0, 0)):
            assert effective_parameters(mine, unit) == effective_parameters(theirs, unit)


def count(model: nn.Module, unit: Unit) -> int:
    return effective_parameters(anatomy(model)[unit.layer], unit)


@pytest.mark.parametrize("name", ["gpt2", "opt", "vit", "timm vit"])
def test_a_head_of_a_biased_attention_is_four_weight_slices_and_three_bias_slices(name: str) -> None:
    assert count(FAMILIES_TINY[name](), Unit(HEAD, 1, 2)) == 4 * 12 * 4 + 3 * 4


def test_a_head_of_an_unbiased_attention_is_four_weight_slices() -> None:
    assert count(FAMILIES_TINY["llama mha"](), Unit(HEAD, 1, 2)) == 4 * 16 * 4


@pytest.mark.parametrize(("name", "d", "head_dim"), [("llama", 16, 4), ("qwen2", 24, 4), ("qwen3", 12, 8), ("gemma", 12, 8)])
def test_a_query_head_that_shares_its_keys_and_values_is_its_query_and_output_slices(name: str, d: int, head_dim: int) -> None:
    assert count(FAMILIES_TINY[name](), Unit(HEAD, 1, 2)) == 2 * d * head_dim


@pytest.mark.parametrize(
    ("name", "d", "heads", "head_dim", "biases"),
    [
        ("llama", 16, 2, 4, 0),
        ("qwen2", 24, 3, 4, 3 + 2),
        ("qwen3", 12, 2, 8, 0),
        ("gemma", 12, 3, 8, 0),
        ("llama mha", 16, 1, 4, 0),
    ],
)
def test_a_kv_group_is_the_slices_of_its_heads_and_those_of_their_keys_and_values(
    name: str, d: int, heads: int, head_dim: int, biases: int
) -> None:
    assert count(FAMILIES_TINY[name](), Unit(KV_GROUP, 1, 0)) == (2 * heads + 2) * d * head_dim + biases * head_dim


@pytest.mark.parametrize("name", FAMILIES_TINY)
def test_the_count_of_a_kv_group_is_the_number_of_parameters_that_are_its_own(name: str) -> None:
    for layer in anatomy(FAMILIES_TINY[name]()):
        for unit in [Unit(KV_GROUP, 0, i) for i in range(layer.kv_heads)]:
            assert effective_parameters(layer, unit) == sum(part.of(part.parameter).numel() for part in layer.slices(unit))
            if not layer.grouped_query:
                assert effective_parameters(layer, unit) == effective_parameters(layer, Unit(HEAD, 0, unit.index))


@pytest.mark.parametrize(("index", "width"), [(0, 4), (2, 4), (3, 2)])
def test_a_group_of_a_plain_mlp_counts_its_true_width_also_when_it_is_the_odd_last_one(index: int, width: int) -> None:
    assert count(FAMILIES_TINY["gpt2"](), Unit(MLP, 2, index, GROUP)) == 2 * 12 * width + width


@pytest.mark.parametrize(("index", "width"), [(0, 4), (2, 4), (3, 2)])
def test_a_group_of_a_gated_mlp_has_three_weight_slices_and_the_papers_two_biases(index: int, width: int) -> None:
    assert count(FAMILIES_TINY["llama"](), Unit(MLP, 2, index, GROUP)) == 3 * 16 * width + 2 * width


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "llama mha", "vit", "deit", "swin", "timm vit", "timm swin"])
def test_the_count_of_a_head_is_the_number_of_parameters_that_are_its_own(name: str) -> None:
    layers = anatomy(FAMILIES_TINY[name]())
    for layer in layers:
        unit = Unit(HEAD, 0, 1)
        assert effective_parameters(layer, unit) == sum(part.of(part.parameter).numel() for part in layer.slices(unit))


def test_a_sets_percentage_is_the_sum_of_its_units_over_all_parameters() -> None:
    model = FAMILIES_TINY["swin"]()
    units = [Unit(HEAD, 0, 0), Unit(HEAD, 3, 5), Unit(MLP, 1, 3, GROUP), Unit(MLP, 2, 7, GROUP)]
    narrow_head, wide_head = 4 * 12 * 4 + 3 * 4, 4 * 24 * 4 + 3 * 4
    narrow_group, wide_group = 2 * 12 * 3 + 3, 2 * 24 * 2 + 2  # the last groups: 15 = 3 * 4 + 3 and 30 = 7 * 4 + 2
    expected = 100 * (narrow_head + wide_head + narrow_group + wide_group) / sum(p.numel() for p in model.parameters())
    assert zeroed_percent(model, units) == pytest.approx(expected, rel=1e-12)
    assert zeroed_percent(model, []) == 0


def test_tied_weights_count_once() -> None:
    model = FAMILIES_TINY["gpt2"]()
    block = 12 * 36 + 36 + 12 * 12 + 12 + 12 * 14 + 14 + 14 * 12 + 12 + 4 * 12
    assert total_parameters(model) == (32 + 16) * 12 + 3 * block + 2 * 12


def test_the_range_holds_every_subset_and_reaches_both_ends() -> None:
    model = FAMILIES_TINY["swin"]()
    units = candidate_units(model, HEAD)
    low, high = zeroed_percent_range(model, units, 2)
    assert low == zeroed_percent(model, [Unit(HEAD, 0, 0), Unit(HEAD, 1, 0)])
    assert high == zeroed_percent(model, [Unit(HEAD, 2, 0), Unit(HEAD, 3, 0)])
    assert low < zeroed_percent(model, [Unit(HEAD, 0, 0), Unit(HEAD, 3, 0)]) < high
    assert zeroed_percent_range(model, units, len(units)) == pytest.approx((zeroed_percent(model, units),) * 2)


# The inventory


@pytest.mark.parametrize(("name", "family", "target"), [(GPT2, "gpt2", "both"), (QWEN, "qwen2", HEAD), (SWIN, "swin", MLP)])
def test_an_inventory_counts_layer_by_layer_what_could_go_and_what_a_ratio_takes(name: str, family: str, target: str) -> None:
    found, model = inventory(name, target=target, ratio=0.05), shapes(name)
    units = candidate_units(model, target)
    k = n_selected(0.05, len(units))
    assert (found.model, found.family, found.target, found.ratio) == (name, family, target, 0.05)
    assert (found.candidates, found.selected, found.unit_ratio) == (len(units), k, k / len(units))
    assert found.total_params == TOTALS[name]
    assert found.zeroed_percent == pytest.approx(zeroed_percent_range(model, units, k), abs=1e-4)
    for i, (layer, read) in enumerate(zip(found.layers, anatomy(model), strict=True)):
        counts = (layer.heads, layer.kv_heads, layer.head_dim, layer.mlp_width)
        assert (layer.layer, layer.name) == (i, read.name)
        assert counts == (read.heads, read.kv_heads, read.head_dim, read.mlp_width)
        assert layer.params == sum(count(model, unit) for unit in units if unit.layer == i)
    assert sum(layer.units for layer in found.layers) == len(units)


def test_an_inventory_is_plain_data_with_one_percentage_or_two() -> None:
    one, two = (json.loads(json.dumps(inventory(name, target=HEAD).to_json())) for name in (GPT2, SWIN))
    assert (one["zeroed_percent"], one["selected"]) == (2.2141, 14)
    assert two["zeroed_percent"][0] == 0.9604 < two["zeroed_percent"][1]
    assert len(one["layers"]) == 12 and one["unit_ratio"] == 14 / 144
    assert one["layers"][11]["params"] == 12 * (4 * 768 * 64 + 3 * 64)


def test_the_width_of_the_groups_and_the_ratio_are_the_callers() -> None:
    assert inventory(GPT2, target=MLP, group_width=64).candidates == 12 * 48
    with pytest.raises(SettingError, match=r"ratio.*1\.5"):
        inventory(GPT2, ratio=1.5)
