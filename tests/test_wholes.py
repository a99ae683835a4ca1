"""Whole attentions, whole MLPs and whole blocks as units, in every family: from zeroing to the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import nn

import secateur as sc
from secateur.cut.checkpoint import save_shrunk
from secateur.cut.costs import FlopShares, flop_goal, goal_of, latency_goal, latency_table, parameter_goal
from secateur.cut.proof import TOLERANCE, prove
from secateur.cut.record import removed, unit_lines
from secateur.cut.repair import repair
from secateur.cut.surgery import parameters_left, shrink
from secateur.errors import SelectionError, SettingError
from secateur.measure import flops
from secateur.measure.speed import run_of
from secateur.model.accounting import effective_parameters, inventory, zeroed_percent
from secateur.model.families import FAMILIES, anatomy, candidate_units, check_disjoint, family_of, task_of
from secateur.model.shrunk import layout_of
from secateur.model.zeroing import zeroed
from secateur.search.goals import Count
from secateur.search.scores import unit_scores
from secateur.steps import evaluate_on, shrink_to
from secateur.tasks import TASKS
from secateur.units import ATTENTION, BLOCK, HEAD, KV_GROUP, MLP, MLP_LAYER, Unit, kinds_of, outermost, selectable
from secateur.watcher import Watcher
from tiny import CAUSAL, FAMILIES_TINY, GROUP, TIMM, deep_llama, logits_of, loss_without, randomised, tiny_batch, tiny_batches
from worlds import SMALL, World

tf: Any = transformers
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
FAMILIES_WHOLE = [name for name in FAMILIES_TINY if name not in WITH_EXPERTS]
ATTENTION_1, MLP_0, BLOCK_1 = Unit(ATTENTION, 1, 0), Unit(MLP_LAYER, 0, 0), Unit(BLOCK, 1, 0)
CUTS = {
    "attention": [ATTENTION_1],
    "mlp": [MLP_0],
    "sub-layers": [ATTENTION_1, Unit(MLP_LAYER, 1, 0), MLP_0],
    "block": [BLOCK_1],
    "first block": [Unit(BLOCK, 0, 0)],
    "block and parts": [Unit(HEAD, 1, 0), BLOCK_1, Unit(HEAD, 0, 1), Unit(MLP, 2, 1, GROUP), Unit(ATTENTION, 2, 0)],
}


@pytest.mark.parametrize("family", FAMILIES_WHOLE)
@pytest.mark.parametrize("cut", CUTS)
def test_a_zeroed_whole_adds_nothing_not_even_a_bias_and_the_cut_model_is_the_same(family: str, cut: str) -> None:
    model, units, batches = FAMILIES_TINY[family](), CUTS[cut], tiny_batches(FAMILIES_TINY[family](), 2)
    with zeroed(model, units):
        expected = logits_of(model, batches[0])
    by_hand = FAMILIES_TINY[family]()
    layers = anatomy(by_hand)
    with torch.no_grad():
        for unit in units:
            layer = layers[unit.layer]
            if unit.kind in (ATTENTION, MLP_LAYER):
                for parameter in (layer.out if unit.kind == ATTENTION else layer.mlp_out).parameters():
                    parameter.zero_()
            elif unit.kind == BLOCK:
                layer.block.register_forward_hook(hand_on)
        parts = [unit for unit in units if not unit.whole]
        with zeroed(by_hand, parts):
            torch.testing.assert_close(expected, logits_of(by_hand, batches[0]), rtol=1e-4, atol=1e-5)
    small = shrink(model, units)
    assert prove(model, units, small, batches).relative <= TOLERANCE
    assert sum(p.numel() for p in small.parameters()) == parameters_left(model, units)


@pytest.mark.parametrize("family", [name for name in FAMILIES_WHOLE if name not in TIMM])
@pytest.mark.parametrize("cut", ["block", "first block", "block and parts"])
def test_a_checkpoint_without_blocks_loads_and_computes_the_same(family: str, cut: str, tmp_path: Path) -> None:
    model, units = FAMILIES_TINY[family](), CUTS[cut]
    small = shrink(model, units)
    folder = tmp_path / "small"
    save_shrunk(small, folder)
    batch = tiny_batch(model)
    assert torch.equal(logits_of(sc.load_shrunk(folder, device="cpu"), batch), logits_of(small, batch))
    dropped = len(anatomy(model)) - len(anatomy(small))
    assert dropped == (0 if "swin" in family or (family, cut) == ("modernbert", "first block") else 1)
    if dropped and cut != "block and parts":
        assert layout_of(small) is None  # a stock checkpoint with fewer layers
        auto = getattr(tf, TASKS[task_of(model)].auto_class)
        stock = auto.from_pretrained(folder)
        assert stock.config.num_hidden_layers == 2 and len(anatomy(stock)) == 2
        assert torch.equal(logits_of(stock.eval(), batch), logits_of(small, batch))
        shrink(model, units, "uniform")
    else:
        assert layout_of(small) is not None
        with pytest.raises(SelectionError, match="uniform"):
            shrink(model, units, "uniform")


@pytest.mark.parametrize("cut", ["block", "block and parts"])
def test_a_timm_checkpoint_without_blocks_loads_and_computes_the_same(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "mlp_ratio": 1.25, "depth": 3, "patch_size": 8, "img_size": 16}
    model = randomised(timm.create_model("vit_tiny_patch16_224", num_classes=5, **shape))
    small = shrink(model, CUTS[cut])
    monkeypatch.chdir(tmp_path)  # timm takes no absolute path for a local folder
    save_shrunk(small, "small", model_args=shape)
    batch = tiny_batch(model)
    assert torch.equal(logits_of(sc.load_shrunk("small", device="cpu"), batch), logits_of(small, batch))
    assert len(anatomy(small)) == 2 and (layout_of(small) is None) == (cut == "block")
    if cut == "block":
        stock: Any = timm.create_model("local-dir:small", pretrained=True).eval()
        assert len(stock.blocks) == 2 and torch.equal(logits_of(stock, batch), logits_of(small, batch))


@pytest.mark.parametrize("family", CAUSAL)
def test_the_cache_holds_nothing_of_a_block_that_is_gone_and_next_to_nothing_of_an_attention(family: str) -> None:
    model: Any = FAMILIES_TINY[family]()
    if family == "olmoe":
        pytest.skip("its cache is that of qwen3_moe")
    small: Any = shrink(model, [ATTENTION_1] if family in WITH_EXPERTS else [ATTENTION_1, Unit(BLOCK, 2, 0)])
    ids = torch.tensor([[3, 4, 5, 6]])
    cache = small(input_ids=ids, use_cache=True).past_key_values
    assert len(cache.layers) == (3 if family in WITH_EXPERTS else 2)
    assert cache.layers[1].keys.numel() <= ids.numel() < cache.layers[0].keys.numel()


@pytest.mark.parametrize("family", [*WITH_EXPERTS])
def test_a_block_with_experts_has_an_attention_to_lose_and_no_whole_mlp(family: str) -> None:
    model = FAMILIES_TINY[family]()
    assert len(candidate_units(model, ATTENTION)) == 3
    sparse = [i for i, layer in enumerate(anatomy(model)) if layer.experts]
    assert not {unit.layer for unit in candidate_units(model, "block+mlp_layer")} & set(sparse)
    small = shrink(model, [ATTENTION_1])
    assert prove(model, [ATTENTION_1], small, tiny_batches(model, 1)).relative <= TOLERANCE
    with pytest.raises(SelectionError, match=r"There is no unit block 0\.0"), zeroed(model, [Unit(BLOCK, 0, 0)]):
        pass


def hand_on(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]


# Targets and nesting


def test_a_target_joins_kinds_and_refuses_what_cannot_be_joined() -> None:
    assert kinds_of("mlp+attention") == (MLP, ATTENTION) and kinds_of("both") == (HEAD, MLP)
    model = FAMILIES_TINY["llama"]()
    units = candidate_units(model, "block+kv_group+mlp", GROUP)
    assert units == [
        *candidate_units(model, BLOCK),
        *candidate_units(model, KV_GROUP),
        *candidate_units(model, MLP, GROUP),
    ]
    for wrong, why in (("head+kv_group", "same channels"), ("expert+mlp", "go alone"), ("mlp+mlp", "once")):
        with pytest.raises(SettingError, match=why):
            sc.prune("m", target=wrong)
    with pytest.raises(SettingError, match=r"'head\+neuron'.*attention, mlp_layer, block"):
        sc.prune("m", target="head+neuron")
    with pytest.raises(SettingError, match="none may be inside another"):
        sc.prune("m", target="block+mlp", method="kwon")


def test_what_is_inside_a_selected_whole_is_gone_and_counts_once() -> None:
    model = FAMILIES_TINY["llama"]()
    units = candidate_units(model, "block+attention+mlp_layer+kv_group+mlp", GROUP)
    head_1, mlp_1 = Unit(KV_GROUP, 1, 0), Unit(MLP, 1, 0, GROUP)
    without_attention = selectable(units, [ATTENTION_1])
    assert head_1 not in without_attention and ATTENTION_1 not in without_attention
    assert {BLOCK_1, mlp_1, Unit(KV_GROUP, 0, 0)} <= {*without_attention}
    assert not [unit for unit in selectable(units, [BLOCK_1]) if unit.layer == 1]
    assert BLOCK_1 not in selectable(units, [ATTENTION_1, Unit(MLP_LAYER, 1, 0)])
    history = [head_1, Unit(KV_GROUP, 0, 1), ATTENTION_1, mlp_1, BLOCK_1]
    assert outermost(history) == [Unit(KV_GROUP, 0, 1), BLOCK_1]
    assert zeroed_percent(model, history) == zeroed_percent(model, [Unit(KV_GROUP, 0, 1), BLOCK_1])
    assert removed(history) == "1 K/V group and 1 whole block" and unit_lines(history) == ["block 1.0", "kv_group 0.1"]
    check_disjoint(model, history)
    with pytest.raises(SelectionError, match="overlap"):
        check_disjoint(model, [Unit(MLP, 1, 0, 4), Unit(MLP, 1, 1, 3)])
    batch = tiny_batch(model)
    with zeroed(model, history):
        expected = logits_of(model, batch)
    torch.testing.assert_close(logits_of(shrink(model, history), batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "modernbert", "timm vit"])
def test_a_whole_owns_the_parameters_of_its_parts_and_the_bias_behind_them(family: str) -> None:
    model = FAMILIES_TINY[family]()
    layer = anatomy(model)[1]
    outs = {ATTENTION: [layer.out], MLP_LAYER: [layer.mlp_out], BLOCK: [layer.out, layer.mlp_out]}
    for kind, parts in ((ATTENTION, [KV_GROUP]), (MLP_LAYER, [MLP]), (BLOCK, [KV_GROUP, MLP])):
        units = [unit for part in parts for unit in candidate_units(model, part, GROUP) if unit.layer == 1]
        biases = sum(len(out.bias) for out in outs[kind] if isinstance(out.bias, torch.Tensor))
        assert effective_parameters(layer, Unit(kind, 1, 0)) == sum(effective_parameters(layer, u) for u in units) + biases
        owned = sum(s.of(s.parameter).numel() for s in layer.slices(Unit(kind, 1, 0)))
        assert owned == sum(s.of(s.parameter).numel() for unit in units for s in layer.slices(unit)) + biases


@pytest.mark.parametrize("method", ["magnitude", "wanda", "taylor", "fisher", "obs", "flap", "llmpruner", "bonsai"])
def test_every_score_takes_wholes_and_counts_both_sides_of_a_block(method: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    scores = unit_scores(method, model, candidate_units(model, "attention+mlp_layer+block"), batches=batches)
    assert len(scores) == 9
    if method in ("obs", "flap", "wanda", "fisher", "llmpruner"):
        alone = unit_scores(method, model, candidate_units(model, "attention+mlp_layer"), batches=batches)
        block = unit_scores(method, model, candidate_units(model, BLOCK), batches=batches)[BLOCK_1]
        assert block == pytest.approx(alone[ATTENTION_1] + alone[Unit(MLP_LAYER, 1, 0)], rel=1e-4)


# Goals and the search


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit", "swin"])
def test_the_costs_of_wholes_are_what_a_cut_model_saves(family: str) -> None:
    model = FAMILIES_TINY[family]()
    units = candidate_units(model, "block+attention+mlp_layer", GROUP)
    total = sum(p.numel() for p in model.parameters())
    goal = parameter_goal(model, units, 0.9)
    shares = FlopShares(model, 8)
    dense = flops.count(run_of(model, 8, 8))
    for unit in units:
        small = shrink(model, [unit])
        assert goal.costs[unit] == pytest.approx(1 - sum(p.numel() for p in small.parameters()) / total)
        assert shares.saved([unit]) == pytest.approx(1 - flops.count(run_of(small, 8, 8)) / dense, abs=1e-9)


def test_a_whole_weighs_what_is_left_of_it_and_nothing_once_its_parts_are_gone() -> None:
    model = deep_llama(4)
    goal = flop_goal(model, candidate_units(model, "block+attention+kv_group+mlp", GROUP), 0.5, 8)
    first, second = Unit(KV_GROUP, 1, 0), Unit(KV_GROUP, 1, 1)
    after = goal.after([first])
    assert after.weight(ATTENTION_1) == pytest.approx(goal.weight(ATTENTION_1) - goal.weight(first))
    assert after.weight(BLOCK_1) == pytest.approx(goal.weight(BLOCK_1) - goal.weight(first))
    assert after.weight(Unit(BLOCK, 2, 0)) == goal.weight(Unit(BLOCK, 2, 0)) and after.weight(first) == goal.weight(first)
    opened = goal.open(goal.costs, [first, second])
    assert ATTENTION_1 not in opened and BLOCK_1 in opened
    assert Count(3).open([first, ATTENTION_1], [BLOCK_1]) == [] and Count(3).after([first]) == Count(3)


@pytest.mark.parametrize("method", ["ucb", "ts", "greedy", "auto", "fisher"])
def test_a_search_over_granularities_reaches_its_goal_with_nothing_chosen_inside_what_is_gone(
    method: str, world: World, tmp_path: Path
) -> None:
    asked = {name: value for name, value in SMALL.items() if name != "ratio"}
    asked |= {"calibration": str(world.text), "device": "cpu", "target": "block+attention+mlp_layer+head+mlp", "measure": False}
    asked |= {"keep_flops": 0.6, "layout": "free", "method": method}
    result = sc.prune(str(world.text_model), out=tmp_path / "out", **asked)
    chosen = result.selection.units
    for i, unit in enumerate(chosen):
        assert selectable([unit], chosen[:i]) == [unit]
    assert result.selection.goal is not None and result.selection.goal.got <= 0.6
    assert result.cut is not None and result.cut.params == parameters_left(sc.load(str(world.text_model))[0], chosen)
    path = tmp_path / "out" / "selection.json"
    judged = evaluate_on(str(world.text_model), selection=path, data=str(world.text), device="cpu", seq_len=SMALL["seq_len"])
    assert judged.judgement is not None and judged.judgement.zeroed == result.record.judgement.zeroed
    _, record = shrink_to(str(world.text_model), path, tmp_path / "again", device="cpu", measure=False, repair="auto")
    assert record.units == chosen


@pytest.mark.parametrize("memory", [0, 2**30])
def test_the_meter_measures_wholes_as_whole_runs_do_with_and_without_its_cache(memory: int) -> None:
    for family in ("gpt2", "llama", "bert", "swin", "timm vit", "gpt_neox"):
        model = FAMILIES_TINY[family]()
        batches = tiny_batches(model, 2)
        units = candidate_units(model, "block+attention+mlp_layer+head+mlp", GROUP)
        for committed in ([], [Unit(ATTENTION, 0, 0)], [Unit(HEAD, 1, 0), BLOCK_1]):
            meter = sc.DamageMeter(model, batches, batches_per_pull=2, cache_memory=memory, seed=0, stack=2)
            for unit in committed:
                meter.commit(unit)
            some = selectable(units, committed)
            for unit, measured in zip(some, meter.measure([(unit, (0, 1)) for unit in some]), strict=True):
                expected = [loss_without(model, batch, [*committed, unit]) for batch in batches]
                assert list(measured.masked_losses) == pytest.approx(expected, rel=1e-5), (family, unit)


def test_uniform_blocks_are_chosen_anywhere_and_other_mixtures_are_refused(world: World, tmp_path: Path) -> None:
    asked = SMALL | {"calibration": str(world.text), "device": "cpu", "measure": False, "layout": "uniform", "method": "fisher"}
    model = str(world.text_model)
    result = sc.prune(model, out=tmp_path / "out", target="block", **asked)
    assert result.cut is not None and result.cut.layout == "uniform" and len(result.selection.units) == 1
    stock = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stock.config.num_hidden_layers == 2
    with pytest.raises(SettingError, match="whole blocks"):
        sc.prune(model, out=tmp_path / "mixed", target="block+mlp", **asked)
    with pytest.raises(SettingError, match="--layout free"):
        sc.prune(model, out=tmp_path / "attention", target="attention", **asked)


def test_the_latency_table_has_a_curve_for_each_kind_of_whole(tmp_path: Path) -> None:
    model = deep_llama(4)
    units = candidate_units(model, "block+kv_group+mlp", GROUP)
    table = latency_table(model, units, 8)
    assert {*table} == {BLOCK, HEAD, MLP} and all(len(points) > 1 for points in table.values())
    table = {curve: [[0.0, 0.0], [1.0, 1.0]] for curve in table}
    goal = latency_goal(model, units, 0.5, 8, table)
    shares = FlopShares(model, 8)
    history = [Unit(KV_GROUP, 1, 0), BLOCK_1, Unit(MLP, 0, 0, GROUP)]
    assert goal.left(history) == pytest.approx(1 - shares.saved(history))


@pytest.mark.parametrize("form", ["least squares", "auto"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "vit"])
def test_a_repair_finds_the_projections_of_the_blocks_that_stay(family: str, form: str) -> None:
    model = FAMILIES_TINY[family]()
    units = [Unit(BLOCK, 0, 0), Unit(MLP, 1, 0, GROUP), Unit(ATTENTION, 2, 0)]
    small = shrink(model, units)
    assert len(anatomy(small)) == 2
    done = repair(model, units, small, tiny_batches(model, 4), form=form)
    assert done.losses and done.projections <= len([out for layer in anatomy(small) for out in layer.outs])


def test_the_inventory_counts_wholes() -> None:
    listed = inventory("gpt2", target="attention+block", ratio=0.1)
    assert listed.candidates == 24 and [layer.units for layer in listed.layers] == [2] * 12


def test_every_family_says_whether_its_blocks_can_be_counted() -> None:
    for name in FAMILIES_WHOLE:
        model = FAMILIES_TINY[name]()
        setting = FAMILIES[family_of(model)].depth_setting
        assert bool(setting) == ("swin" not in name)
        assert name in TIMM or not setting or getattr(model.config, setting) == len(anatomy(model))
        goal_of(sc.Settings("m", target="block"), sc.Opened("m", model), candidate_units(model, BLOCK), None, Watcher())
