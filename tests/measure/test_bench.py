from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes import losses_of
from secateur.errors import ModelError, SettingError
from secateur.measure.bench import (
    FlopTable,
    Row,
    bench,
    compare_pulls,
    compare_selection,
    markdown,
    open_model,
    plain_loss,
    plain_pull,
    random_batches,
)
from secateur.model.families import candidate_units, task_of
from secateur.model.loading import load
from secateur.model.losses import batch_loss
from secateur.search.damage import DamageMeter
from secateur.selection import Pull
from secateur.units import HEAD, MLP, Unit
from tiny import EMBEDDINGS, FAMILIES_TINY, IMAGE, VOCABULARY, hook_count, randomised, tiny_batch, tiny_batches
from worlds import Listener, World


def roomy(name: str) -> nn.Module:
    """The tiny model with room for the texts of 128 tokens and the 8 classes of the benchmark."""
    model: Any = FAMILIES_TINY[name]()
    model.config.max_position_embeddings = 128
    model.config.num_labels = 8
    return randomised(type(model)(model.config))


# FLOPs, by hand: the tiny Llama has a width of 16, 4 heads of 4 over 2 K/V heads, an MLP of 14, 32 tokens and 3 blocks.
B, T = 3, 10
ROWS = B * T
ATTENTION = 4 * B * 4 * T * T * 4
OUT = 2 * ROWS * 16 * 16
MLP_IN, MLP_OUT = 2 * 2 * ROWS * 16 * 14, 2 * ROWS * 14 * 16
QKV = 2 * ROWS * 16 * (16 + 8 + 8)
BLOCK = QKV + ATTENTION + OUT + MLP_IN + MLP_OUT
LOGITS = 2 * B * (T - 1) * 16 * VOCABULARY  # nothing follows the last token


def llama_table() -> FlopTable:
    model = FAMILIES_TINY["llama"]()
    return FlopTable(model, tiny_batch(model))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_least_flops_of_a_unit_are_those_from_its_projection_on(layer: int) -> None:
    table, later = llama_table(), (2 - layer) * BLOCK + LOGITS
    assert {table.masked(Unit(HEAD, layer, i)) for i in range(4)} == {OUT + MLP_IN + MLP_OUT + later}
    assert {table.masked(Unit(MLP, layer, i, 4)) for i in range(4)} == {MLP_OUT + later}


@pytest.mark.parametrize("name", FAMILIES_TINY)
def test_the_least_flops_fall_from_block_to_block_and_a_group_needs_fewer_than_a_head(name: str) -> None:
    model = FAMILIES_TINY[name]()
    table = FlopTable(model, tiny_batch(model))
    layers = range(len({unit.layer for unit in candidate_units(model)}))
    heads, groups = ([table.masked(Unit(kind, i, 0)) for i in layers] for kind in (HEAD, MLP))
    for flops in (heads, groups):
        assert flops == sorted(set(flops), reverse=True)
        assert flops[-1] > 0
    assert all(group < head for head, group in zip(heads, groups, strict=True))
    assert hook_count(model) == 0


def test_a_search_needs_each_masked_run_once_and_each_base_run_from_the_first_block_changed_since_its_last() -> None:
    table = llama_table()
    a, b, c = Unit(HEAD, 0, 0), Unit(HEAD, 1, 0), Unit(MLP, 2, 0, 4)

    def pull(step: int, unit: Unit, *batches: int) -> Pull:
        losses = (0.0,) * len(batches)
        return Pull(step, unit, batches, losses, losses, 0.0, 0.5, 0)

    first = [pull(0, a, 0, 1), pull(0, b, 1, 2), pull(0, a, 1, 0)]  # the third is the first once more
    whole = 3 * BLOCK + LOGITS
    least = 2 * table.masked(a) + 2 * table.masked(b) + 3 * whole
    assert table.searched(first, [b]) == least
    second = [pull(1, a, 0)]  # after b, in block 1
    least += table.masked(a) + 2 * BLOCK + LOGITS
    assert table.searched(first + second, [b, c]) == least
    third = [pull(2, a, 0, 1, 3)]  # after c, in block 2: batch 0 last ran under b, batch 1 under nothing, batch 3 never
    least += 3 * table.masked(a) + (BLOCK + LOGITS) + (2 * BLOCK + LOGITS) + whole
    assert table.searched(first + second + third, [b, c, a]) == least


# The plain way


@pytest.mark.parametrize("name", [name for name in FAMILIES_TINY if name not in EMBEDDINGS])  # these have no loss of their own
def test_the_models_own_loss_is_the_loss_that_is_measured(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batch = tiny_batch(model)
    with torch.inference_mode():
        assert plain_loss(model, batch) == pytest.approx(float(batch_loss(model, batch)), abs=1e-5)


@pytest.mark.parametrize("unit", [Unit(HEAD, 1, 0), Unit(MLP, 1, 0, 4)], ids=str)
@pytest.mark.parametrize("name", ["llama", "timm swin"])
def test_a_plain_pull_gives_the_losses_that_the_meter_gives(name: str, unit: Unit) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 2)
    base, masked, forwards, *_ = plain_pull(model, batches, unit)
    expected = losses_of(DamageMeter(model, batches), unit, (0, 1))
    assert base == pytest.approx(expected[0], abs=1e-5)
    assert masked == pytest.approx(expected[1], abs=1e-5)
    assert forwards == 4
    assert min(abs(m - b) for m, b in zip(masked, base, strict=True)) > 1e-4
    assert hook_count(model) == 0


@pytest.mark.parametrize("name", ["bert", "bert classes", "bert embeddings", "dinov2"])
def test_an_encoder_is_refused_by_the_benchmark_with_its_task(name: str) -> None:
    with pytest.raises(SettingError, match=task_of(FAMILIES_TINY[name]())):
        random_batches(FAMILIES_TINY[name](), 1)


@pytest.mark.parametrize("name", ["gpt2", "vit", "timm swin"])
def test_random_batches_are_of_the_models_kind_differ_and_come_again(name: str) -> None:
    model = FAMILIES_TINY[name]()
    if name == "timm swin":  # as timm's create_model leaves it
        model.default_cfg = {"input_size": (3, IMAGE, IMAGE)}  # type: ignore[assignment]
    first, second = (random_batches(model, 2) for _ in range(2))
    key = "input_ids" if name == "gpt2" else "pixel_values"
    assert first[0].keys() == {key, "labels"}
    assert tuple(first[0][key].shape)[1:] in {(16,), (3, IMAGE, IMAGE)}  # this GPT-2 takes 16 tokens at most
    if name == "gpt2":
        assert 0 <= int(first[0][key].min()) < int(first[0][key].max()) == VOCABULARY - 1
    assert not torch.equal(first[0][key], first[1][key])
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[field], other[field]) for field in one)


# Models


def test_a_model_is_opened_by_its_folder(world: World) -> None:
    model, expected = open_model(str(world.text_model), device="cpu"), load(str(world.text_model), device="cpu")[0]
    assert {name: tensor.sum() for name, tensor in model.state_dict().items()} == {
        name: tensor.sum() for name, tensor in expected.state_dict().items()
    }


@pytest.mark.parametrize("task", ["text", "image"])
def test_a_shape_needs_the_config_alone_and_always_gives_the_same_random_weights(
    task: str, world: World, tmp_path: Path
) -> None:
    folder = world.of(task)[0]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    own = load(str(folder), device="cpu")[0]
    first, second = (open_model(f"shape:{tmp_path}", device="cpu") for _ in range(2))
    assert type(first) is type(own)
    assert not first.training
    weights: list[dict[str, Tensor]] = [model.state_dict() for model in (own, first, second)]
    assert [name for name in weights[0] if weights[0][name].shape != weights[1][name].shape] == []
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    values = torch.cat([tensor.detach().flatten() for tensor in first.parameters()])
    assert values.isfinite().all()
    assert float(values.std()) == pytest.approx(0.02, rel=0.1)
    with torch.inference_mode():
        assert math.isfinite(float(batch_loss(first, tiny_batch(first))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shape_has_the_dtype_that_was_asked_for(dtype: str, world: World) -> None:
    model = open_model(f"shape:{world.text_model}", device="cpu", dtype=dtype)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{dtype}"}


def test_a_shape_that_is_not_there_and_a_dtype_that_is_none_are_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing"):
        open_model(f"shape:{tmp_path / 'nothing'}")
    with pytest.raises(SettingError, match=r"'float8'.*float32"):
        open_model(f"shape:{world.text_model}", dtype="float8")
    with pytest.raises(SettingError, match="'gpu'"):
        open_model(f"shape:{world.text_model}", device="gpu")


# Comparisons


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("gpt2", HEAD, {}),
        ("llama", MLP, {"stack": 2}),
        ("swin", HEAD, {"lanes": 2}),
        ("vit", MLP, {"stack": 2, "lanes": 2}),
        ("gpt2", HEAD, {"cache_memory": 0}),
    ],
)
def test_pulls_are_compared_in_loss_and_flops(name: str, target: str, options: dict[str, int]) -> None:
    told: list[tuple[int, int]] = []
    row = compare_pulls(
        roomy(name), "a name", target=target, pulls=2, progress=lambda *made: told.append(made), **{"lanes": 1} | options
    )
    assert (row.name, row.pulls, told) == ("a name", 2, [(1, 2), (2, 2)])
    assert row.difference < 1e-4
    assert min(row.seconds, row.plain_seconds, row.peak) > 0
    assert row.flops is not None and row.flop_ratio is not None
    assert 0 < row.flop_ratio <= row.flop_limit * 1.0001
    if "cache_memory" in options:
        # The base runs were made before, and nothing else is saved but the logits of the last tokens.
        assert row.flops == pytest.approx(row.plain_flops / 2, rel=1e-3)
    else:
        assert row.flops < row.plain_flops / 2


def test_the_flops_of_a_text_model_are_the_least_that_exact_losses_need() -> None:
    row = compare_pulls(roomy("llama"), "", pulls=4, lanes=1)
    assert row.flops == row.least_flops


def test_the_lanes_change_no_flops() -> None:
    one, two = (compare_pulls(roomy("gpt2"), "", pulls=2, lanes=lanes) for lanes in (1, 2))
    assert (one.flops, one.plain_flops, one.least_flops) == (two.flops, two.plain_flops, two.least_flops)


def test_no_unit_is_pulled_twice_however_many_pulls_are_asked_for() -> None:
    assert compare_pulls(roomy("gpt2"), "", pulls=1000).pulls == 8  # of 9 heads, one of which warms up


@pytest.mark.parametrize("pulls", [0, -1])
def test_a_comparison_of_no_pulls_is_refused(pulls: int) -> None:
    with pytest.raises(SettingError, match=rf"pulls.*{pulls}\b"):
        compare_pulls(FAMILIES_TINY["gpt2"](), "", pulls=pulls)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "n_steps"), [("llama", 0, 1), ("vit", 2, 2)])
def test_a_search_is_compared_over_all_its_pulls(name: str, steps: int, n_steps: int) -> None:
    told: list[tuple[int, int]] = []
    model = roomy(name)
    row = compare_selection(model, "a name", steps=steps, progress=lambda *made: told.append(made))
    assert (row.name, row.pulls) == ("a name", 32 * n_steps)
    assert told == [(i + 1, 32 * n_steps) for i in range(32 * n_steps)]
    assert row.difference < 1e-4
    assert (row.flops, row.flop_ratio, row.peak_fraction) == (None, None, None)
    assert 1 < row.flop_limit < math.inf
    assert min(row.seconds, row.plain_seconds) > 0
    assert hook_count(model) == 0


@pytest.mark.slow
@pytest.mark.parametrize("selection", [False, True])
def test_there_is_a_row_for_each_model_and_the_watcher_hears_of_every_pull(selection: bool, world: World) -> None:
    names, watcher = [str(world.text_model), f"shape:{world.text_model}"], Listener()
    rows = bench(names, pulls=2, selection=selection, steps=1, device="cpu", watcher=watcher)
    n_pulls = 32 if selection else 2
    assert [row.pulls for row in rows] == [n_pulls] * 2
    assert all("gpt2 head" in row.name and ("selection" in row.name) == selection for row in rows)
    assert [name for stage in watcher.stages for name in stage.split() if name in names] == [n for n in names for _ in "12"]
    assert watcher.evaluations == [(i + 1, n_pulls) for i in range(n_pulls)] * 2


def test_a_target_that_is_none_is_refused_before_any_model_is_opened() -> None:
    with pytest.raises(SettingError, match=r"'tail'.*head"):
        bench(["no such model"], target="tail")


# Rows

ROW = Row(
    "tiny head", 4, plain_seconds=0.5, seconds=0.125, plain_flops=900, flops=300, least_flops=200, peak=4800, difference=0
)


def test_a_row_derives_its_ratios_from_what_was_measured() -> None:
    assert (ROW.speedup, ROW.flop_ratio, ROW.flop_limit, ROW.peak_fraction) == (4, 3, 4.5, 0.5)
    fields = json.loads(json.dumps(ROW.to_json()))
    derived = {"speedup": 4, "flop_ratio": 3, "flop_limit": 4.5, "peak_fraction": 0.5}
    measured = {"name": "tiny head", "pulls": 4, "plain_seconds": 0.5, "seconds": 0.125}
    assert fields == derived | measured | {
        "plain_flops": 900,
        "flops": 300,
        "least_flops": 200,
        "peak": 4800,
        "difference": 0,
    }


def test_the_table_has_a_line_a_row_and_a_dash_for_what_was_not_counted() -> None:
    uncounted = Row("search", 32, 0.5, 0.25, plain_flops=900, flops=None, least_flops=300, peak=4800, difference=1.5e-6)
    header, rule, *lines = markdown([ROW, uncounted]).splitlines()
    assert header.count("|") == rule.count("|") == 9
    assert re.search(r"speedup.*FLOP ratio.*FLOP limit.*peak.*plain.*difference", header)
    assert lines == [
        "| tiny head | 4.00 | 3.00 | 4.50 | 50% | 0.500 | 0.125 | 0.0e+00 |",
        "| search | 2.00 | - | 3.00 | - | 0.500 | 0.250 | 1.5e-06 |",
    ]
