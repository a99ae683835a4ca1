"""MLP groups of channels that matter alike, in every family: from the scores to the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from grids import records_of, write_grid
from secateur.cut.proof import TOLERANCE, prove
from secateur.cut.surgery import shrink
from secateur.errors import SecateurError, SelectionError, SettingError
from secateur.experiment.grid import read_grid, run_grid
from secateur.forecast import forecast_of
from secateur.model.accounting import zeroed_percent
from secateur.model.families import anatomy, candidate_units, check_disjoint, input_dim, weight_of
from secateur.model.losses import real_positions
from secateur.model.zeroing import zeroed
from secateur.search.scores import channel_orders, mask_gradients, unit_scores
from secateur.settings import ACTIVATION, ADDRESS, FISHER
from secateur.steps import evaluate_on, select_to, shrink_to
from secateur.units import MLP, Unit
from tiny import FAMILIES_TINY, GROUP, logits_of, loss_without, tiny_batches
from worlds import SMALL, Listener, World

WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
FAMILIES = [name for name in FAMILIES_TINY if name not in WITH_EXPERTS]


def grouped(model: nn.Module, target: str = MLP, by: str = ACTIVATION) -> list[Unit]:
    return candidate_units(model, target, GROUP, channel_orders(model, by, tiny_batches(model, 2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_groups_of_a_block_hold_each_channel_once_and_those_of_low_score_first(family: str) -> None:
    model = FAMILIES_TINY[family]()
    orders = channel_orders(model, ACTIVATION, tiny_batches(model, 2))
    units = candidate_units(model, MLP, GROUP, orders)
    assert len(units) == len(candidate_units(model, MLP, GROUP))
    for i, layer in enumerate(anatomy(model)):
        groups = [unit for unit in units if unit.layer == i]
        assert sorted(orders[i]) == sorted(c for unit in groups for c in unit.channels) == list(range(layer.mlp_width))
        assert [sorted(orders[i][q * GROUP : (q + 1) * GROUP]) for q in range(len(groups))] == [
            list(unit.channels) for unit in groups
        ]
    assert any(order != sorted(order) for order in orders)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_is_zeroed_and_cut_where_its_channels_are(family: str) -> None:
    model = FAMILIES_TINY[family]()
    units = [unit for unit in grouped(model) if unit.index in (0, 2)]
    batches = tiny_batches(model, 2)
    with zeroed(model, units):
        expected = logits_of(model, batches[0])
    small = shrink(model, units)
    torch.testing.assert_close(logits_of(small, batches[0]), expected, rtol=1e-4, atol=1e-4)
    assert prove(model, units, small, batches).relative <= TOLERANCE
    by_address = [Unit(unit.kind, unit.layer, unit.index, unit.width) for unit in units]
    assert not torch.allclose(expected, zeroed_logits(model, by_address, batches[0]))
    assert zeroed_percent(model, units) == zeroed_percent(model, by_address)
    check_disjoint(model, units)
    kept = [c for c in range(anatomy(model)[0].mlp_width) if not any(c in u.channels for u in units if u.layer == 0)]
    out, small_out = anatomy(model)[0].mlp_out, anatomy(small)[0].mlp_out
    assert torch.equal(weight_of(small_out), weight_of(out).index_select(input_dim(out), torch.tensor(kept)))


def zeroed_logits(model: nn.Module, units: list[Unit], batch: dict[str, Tensor]) -> Tensor:
    with zeroed(model, units):
        return logits_of(model, batch)


@pytest.mark.parametrize("family", ["gpt2", "llama", "modernbert", "timm vit", "swin", "bert embeddings"])
def test_the_orders_are_those_of_the_scores_computed_channel_by_channel(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 2)
    single = candidate_units(model, MLP, 1)
    fisher = dict(zip(single, mask_gradients(model, single, batches).square().sum(0).tolist(), strict=True))
    entered: dict[nn.Module, list[Tensor]] = {layer.mlp_out: [] for layer in anatomy(model)}
    hooks = [
        one.register_forward_pre_hook(lambda module, args: entered[module].append(args[0].flatten(0, -2))) for one in entered
    ]
    reals = []
    for batch in batches:
        logits_of(model, batch)
        real = real_positions(batch)
        reals.append(slice(None) if real is None else real)
    for hook in hooks:
        hook.remove()
    for i, layer in enumerate(anatomy(model)):
        own = [fisher[unit] for unit in single if unit.layer == i]
        order = channel_orders(model, FISHER, batches)[i]
        assert [own[c] for c in order] == pytest.approx(sorted(own), rel=1e-4)
        xs = [x[real].double() for x, real in zip(entered[layer.mlp_out], reals, strict=True)]
        usual = xs[0].square().sum(1).median()
        moment = sum((x.square() / (x.square().sum(1, keepdim=True) + usual)).sum(0) for x in xs)
        norms = weight_of(layer.mlp_out).detach().double().square().sum(1 - input_dim(layer.mlp_out))
        scores = (moment * norms).tolist()
        order = channel_orders(model, ACTIVATION, batches)[i]
        assert [scores[c] for c in order] == pytest.approx(sorted(scores), rel=1e-4)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "taylor", "fisher", "obs", "flap", "llmpruner"])
def test_a_group_of_listed_channels_scores_as_the_same_channels_next_to_one_another_do(method: str) -> None:
    """Permuting an MLP changes nothing that it computes, so a listed group is an ordinary one of a permuted model."""
    model: Any = FAMILIES_TINY["llama"]()
    batches = tiny_batches(model, 2)
    orders = channel_orders(model, FISHER, batches)
    listed = candidate_units(model, MLP, GROUP, orders)
    scores = unit_scores(method, model, listed, batches=batches)
    with torch.no_grad():
        for layer, order in zip(model.model.layers, orders, strict=True):
            places = torch.tensor([c for q in range(0, len(order), GROUP) for c in sorted(order[q : q + GROUP])])
            for module in (layer.mlp.gate_proj, layer.mlp.up_proj):
                module.weight.copy_(module.weight[places])
            layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, places])
    by_address = candidate_units(model, MLP, GROUP)
    expected = unit_scores(method, model, by_address, batches=batches)
    assert list(scores.values()) == pytest.approx(list(expected.values()), rel=1e-3)
    assert loss_without(model, batches[0], by_address[:3]) == pytest.approx(
        loss_without(FAMILIES_TINY["llama"](), batches[0], listed[:3]), rel=1e-5
    )


def test_the_meter_measures_listed_groups_alike_with_and_without_its_cache() -> None:
    model = FAMILIES_TINY["llama"]()
    batches, units = tiny_batches(model, 2), grouped(model, "both")
    for memory in (0, 2**30):
        meter = sc.DamageMeter(model, batches, batches_per_pull=2, cache_memory=memory, seed=0)
        meter.commit(units[-1])
        for unit in units[:-1]:
            measured = next(meter.measure([(unit, (0, 1))]))
            expected = [loss_without(model, batch, [unit, units[-1]]) for batch in batches]
            assert list(measured.masked_losses) == expected


def test_channels_of_experts_and_no_data_are_refused() -> None:
    for family in WITH_EXPERTS:
        model = FAMILIES_TINY[family]()
        with pytest.raises(SettingError, match="experts can only be grouped by address"):
            channel_orders(model, ACTIVATION, tiny_batches(model, 1))
    with pytest.raises(SettingError, match="calibration batches, and there are none"):
        channel_orders(FAMILIES_TINY["gpt2"](), FISHER, [])
    with pytest.raises(SettingError, match="address, fisher, activation"):
        sc.prune("m", group_by="likeness")


def test_a_unit_lists_its_channels_once_each_and_in_order() -> None:
    unit = Unit(MLP, 1, 0, 4, (2, 5, 9))
    assert unit.to_json() == {"kind": "mlp", "layer": 1, "index": 0, "width": 4, "channels": [2, 5, 9]}
    assert unit != Unit(MLP, 1, 0, 4)
    for wrong in ((5, 2), (2, 2), (-1, 2), (0, 1, 2, 3, 4)):
        with pytest.raises(SettingError, match="at most 4 different ones in ascending order"):
            Unit(MLP, 1, 0, 4, wrong)
    with pytest.raises(SettingError):
        Unit("head", 1, 0, 0, (1,))
    model = FAMILIES_TINY["gpt2"]()  # 14 channels
    with (
        pytest.raises(SelectionError, match="channel 14: block 0 has 14 MLP channels"),
        zeroed(model, [Unit(MLP, 0, 0, 4, (1, 14))]),
    ):
        pass


# The whole job


def settings_of(world: World, task: str = "text", **more: Any) -> dict[str, Any]:
    return {"calibration": str(world.of(task)[1]), "device": "cpu", "target": "mlp", "measure": False} | SMALL | more


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("by", [FISHER, ACTIVATION])
def test_a_selection_is_judged_and_cut_alike_by_prune_and_by_the_commands_on_the_original_weights(
    task: str, by: str, world: World, tmp_path: Path
) -> None:
    model = str(world.of(task)[0])
    asked = settings_of(world, task, group_by=by, layout="free", repair="auto")
    result = sc.prune(model, out=tmp_path / "out", **asked)
    assert all(unit.channels for unit in result.selection.units)
    path = tmp_path / "out" / "selection.json"
    assert sc.Selection.load(path).units == result.selection.units
    assert json.loads(path.read_text())["settings"]["group_by"] == by
    judged = evaluate_on(model, selection=path, data=asked["calibration"], device="cpu", seq_len=asked["seq_len"])
    assert judged.judgement is not None and judged.judgement.zeroed == result.record.judgement.zeroed
    _, record = shrink_to(model, path, tmp_path / "again", device="cpu", repair="auto", measure=False)
    assert result.cut is not None and record.units == result.cut.units and record.key == result.cut.key
    small, again = (sc.load_shrunk(folder, device="cpu").state_dict() for folder in (tmp_path / "out", tmp_path / "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in small.items())
    assert sc.prune(model, out=tmp_path / "out", **asked).selection == result.selection  # started again, it is finished


def test_a_search_that_was_stopped_goes_on_with_the_same_groups(world: World, tmp_path: Path) -> None:
    class Stopping(Listener):
        def pull(self, progress: Any) -> None:
            if (progress.step, progress.pull) == (1, 2):
                raise KeyboardInterrupt

    asked = {name: value for name, value in settings_of(world, group_by=FISHER, method="ucb").items() if name != "measure"}
    model, out = str(world.text_model), tmp_path / "sel.json"
    with pytest.raises(KeyboardInterrupt):
        select_to(model, out, watcher=Stopping(), **asked)
    gone_on = select_to(model, out, **asked).selection
    assert gone_on == select_to(model, tmp_path / "whole.json", **asked).selection
    with pytest.raises(SecateurError, match="group_by"):
        select_to(model, out, **asked | {"group_by": ADDRESS})


def test_a_target_without_mlp_groups_is_not_scored(world: World) -> None:
    listener = Listener()
    result = sc.prune(str(world.text_model), watcher=listener, **settings_of(world, target="head", group_by=FISHER))
    assert "grouping MLP channels" not in listener.stages
    assert result.selection.units == sc.prune(str(world.text_model), **settings_of(world, target="head")).selection.units
    one = sc.Settings("m", target="head", group_by=FISHER, score_batches=3, method="magnitude")
    assert one.without_unused() == sc.Settings("m", target="head", method="magnitude", screen=0)
    other = sc.Settings("m", target="mlp", group_by=FISHER, score_batches=3, method="magnitude")
    assert (other.without_unused().group_by, other.without_unused().score_batches) == (FISHER, 3)
    assert (other.score_cost(10), sc.Settings("m", target="mlp", group_by=ACTIVATION, method="magnitude").score_cost(10)) == (
        9,
        10,
    )


def test_a_grid_varies_the_grouping_and_keeps_the_channels_of_its_choices(world: World, tmp_path: Path) -> None:
    table = '[[table]]\nnumber = "4"\ntarget = "mlp"\nmethods = ["magnitude"]\nvary.group_by = ["address", "fisher"]\n'
    grid = read_grid(write_grid(world, tmp_path, change=lambda text: text.partition("[[table]]")[0] + table))
    run_grid(grid, tmp_path / "store", device="cpu")
    records = {record.settings.group_by: record for record in records_of(tmp_path / "store")}
    assert {*records} == {ADDRESS, FISHER}
    units = {by: record.judgement.units for by, record in records.items() if record.judgement}
    assert all(unit.channels for unit in units[FISHER]) and not any(unit.channels for unit in units[ADDRESS])
    asked = settings_of(world, group_by=FISHER, method="magnitude")
    assert sc.prune(str(world.text_model), **asked).selection.units == units[FISHER]


def test_on_images_a_grouping_makes_every_choice_depend_on_the_seed_that_draws_them(world: World, tmp_path: Path) -> None:
    table = '[[table]]\nnumber = "9"\ntarget = "mlp"\nmethods = ["magnitude"]\nvary.group_by = ["address", "fisher"]\n'
    runs = read_grid(write_grid(world, tmp_path, "image", lambda text: text.partition("[[table]]")[0] + table)).runs
    seeds = {by: {run.settings.seed for run in runs if run.settings.group_by == by} for by in (ADDRESS, FISHER)}
    assert seeds == {ADDRESS: {1}, FISHER: {1, 2}}


def test_a_forecast_counts_the_time_of_the_scores(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings_of(world, method="magnitude", score_batches=2)
    plain = forecast_of(str(world.text_model), **asked)
    scored: list[int] = []
    monkeypatch.setattr("secateur.forecast.channel_orders", lambda model, by, batches, loss: scored.append(len(batches)))
    monkeypatch.setattr("secateur.forecast.time.perf_counter", iter(range(10**6)).__next__)
    counted = forecast_of(str(world.text_model), group_by=ACTIVATION, **asked)
    assert scored == [1] and counted.candidates == plain.candidates
    assert counted.seconds["choosing"] - forecast_of(str(world.text_model), **asked).seconds["choosing"] == 2  # a tick a batch
