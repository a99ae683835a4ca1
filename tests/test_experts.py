"""Mixture-of-experts: experts as units, and the channels inside of them, from zeroing to the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import secateur as sc
from fakes import losses_of
from secateur.cut.checkpoint import load_shrunk, save_shrunk
from secateur.cut.costs import FlopShares, goal_of
from secateur.cut.proof import prove
from secateur.cut.repair import repair
from secateur.cut.surgery import parameters_left, shrink
from secateur.errors import SelectionError, SettingError, UnsupportedModel
from secateur.measure import flops
from secateur.measure.bench import FlopTable, compare_pulls, compare_selection
from secateur.methods import METHODS, scoring
from secateur.model.accounting import effective_parameters, total_parameters, zeroed_percent
from secateur.model.families import anatomy, candidate_units
from secateur.model.loading import Opened
from secateur.model.losses import batch_loss
from secateur.model.shrunk import layout_of
from secateur.model.zeroing import zeroed, zeroed_in_parts
from secateur.search.damage import DamageMeter, default_lanes
from secateur.search.goals import Goal, Quota
from secateur.search.scores import unit_scores
from secateur.search.select import select_by_score
from secateur.settings import UNIFORM, Settings
from secateur.units import EXPERT, HEAD, KV_GROUP, MLP, Unit
from secateur.watcher import Watcher
from tiny import FAMILIES_TINY, GROUP, hook_count, logits_of, loss_without, tf, tiny_batch, tiny_batches
from worlds import Run, World, check_refused, flags_beside, make_tokenizer, one_sentence

# Blocks with 4 experts, of which each token takes 2; the last block of the Qwen2-MoE is dense.
BLOCKS = {"mixtral": (0, 1, 2), "qwen2_moe": (0, 1), "qwen3_moe": (0, 1, 2), "olmoe": (0, 1, 2)}
every_family = pytest.mark.parametrize("name", BLOCKS)
SETTING = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_local_experts", "olmoe": "num_experts"}


def even(name: str, n: int = 1) -> list[Unit]:
    """As many experts of every block that has some, others in each."""
    return [Unit(EXPERT, layer, (layer + 2 * i) % 4) for layer in BLOCKS[name] for i in range(n)]


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@contextmanager
def without_by_hand(model: Any, units: Iterable[Unit]) -> Iterator[None]:
    """The same by another way: the routers' logits of the removed experts are minus infinity before the softmax."""
    removed: dict[int, list[int]] = {}
    for unit in units:
        removed.setdefault(unit.layer, []).append(unit.index)

    def routing(router: Any, gone: list[int]) -> Callable[[Tensor], Any]:
        def forward(hidden: Tensor) -> Any:
            logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
            logits[:, gone] = -math.inf
            values, chosen = torch.topk(torch.softmax(logits.float(), -1), router.top_k, dim=-1)
            if getattr(router, "norm_topk_prob", True):
                values = values / values.sum(-1, keepdim=True)
            return logits, values, chosen

        return forward

    routers = {model.model.layers[layer].mlp.gate: gone for layer, gone in removed.items()}
    for router, gone in routers.items():
        router.forward = routing(router, gone)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def loss_by_hand(model: nn.Module, batch: dict[str, Tensor], units: Iterable[Unit]) -> float:
    with torch.inference_mode(), without_by_hand(model, units):
        return float(batch_loss(model, batch))


# What there is


@every_family
def test_the_candidates_are_the_experts_of_the_blocks_that_have_some(name: str) -> None:
    model = FAMILIES_TINY[name]()
    assert candidate_units(model, "expert") == [Unit(EXPERT, layer, i) for layer in BLOCKS[name] for i in range(4)]
    assert [(layer.experts, layer.experts_per_token) for layer in anatomy(model)] == [
        (4, 2) if i in BLOCKS[name] else (0, 0) for i in range(3)
    ]


def test_a_model_without_experts_and_an_expert_that_is_not_there_are_refused() -> None:
    with pytest.raises(SettingError) as caught:
        candidate_units(FAMILIES_TINY["llama"](), "expert")
    assert "no experts" in one_sentence(caught, "LlamaForCausalLM", "--target")
    for model, unit in ((FAMILIES_TINY["mixtral"](), Unit(EXPERT, 0, 4)), (FAMILIES_TINY["qwen2_moe"](), Unit(EXPERT, 2, 0))):
        with pytest.raises(SelectionError, match=rf"no unit {unit}.* has \d experts"), zeroed(model, [unit]):
            pytest.fail("the block was entered")
        assert replaced(model) == []


@every_family
def test_an_expert_accounts_for_its_three_projections_and_its_row_of_the_router(name: str) -> None:
    model = FAMILIES_TINY[name]()
    layer = anatomy(model)[0]
    unit, d = Unit(EXPERT, 0, 1), layer.width
    assert effective_parameters(layer, unit) == sum(s.of(s.parameter).numel() for s in layer.slices(unit)) == 3 * d * 16 + d
    group = Unit(MLP, 0, 1, GROUP)
    assert (
        effective_parameters(layer, group) == sum(s.of(s.parameter).numel() for s in layer.slices(group)) == 4 * 3 * d * GROUP
    )
    gone = total_parameters(model) * zeroed_percent(model, even(name)) / 100
    assert total_parameters(model) - parameters_left(model, even(name)) == pytest.approx(gone)


# Zeroing


@every_family
@pytest.mark.parametrize("n", [1, 2])
def test_zeroed_experts_are_experts_that_the_router_gives_no_chance(name: str, n: int) -> None:
    model = FAMILIES_TINY[name]()
    batch = tiny_batch(model)
    dense = logits_of(model, batch)
    for units in ([Unit(EXPERT, 1, 3)], even(name, n)):
        with without_by_hand(model, units):
            expected = logits_of(model, batch)
        with zeroed(model, units):
            found = logits_of(model, batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (found - dense).abs().max() > 1e-3
    assert replaced(model) == [] and hook_count(model) == 0
    assert torch.equal(logits_of(model, batch), dense)


@every_family
def test_each_part_of_a_batch_is_routed_without_its_own_experts(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 3)
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    parts = [[Unit(EXPERT, 0, 1), Unit(MLP, 1, 0, GROUP)], [], [Unit(EXPERT, 0, 3), Unit(EXPERT, 0, 0), Unit(EXPERT, 1, 2)]]
    whole = [Unit(EXPERT, 1, 3), Unit(MLP, 0, 2, GROUP), Unit(HEAD, 1, 1)]
    with zeroed(model, whole), zeroed_in_parts(anatomy(model), parts):
        together = logits_of(model, joined).chunk(3)
    for batch, units, found in zip(batches, parts, together, strict=True):
        with zeroed(model, whole + units):
            torch.testing.assert_close(found, logits_of(model, batch), rtol=1e-5, atol=1e-5)
    assert replaced(model) == []


@pytest.mark.parametrize("kind", [EXPERT, MLP])
def test_nested_blocks_add_up_whatever_their_parts_and_end_one_by_one(kind: str) -> None:
    model = FAMILIES_TINY["mixtral"]()
    batches, layers = tiny_batches(model, 2), anatomy(model)
    joined = {key: torch.cat([batch[key] for batch in batches] * 3) for key in batches[0]}  # 18 rows: 2 parts, or 3
    one, other = Unit(kind, 1, 0, GROUP), Unit(kind, 1, 3, GROUP)
    with zeroed_in_parts(layers, [[one], []]):
        outer = logits_of(model, joined)
        with zeroed_in_parts(layers, [[], [other], [one]]):
            both = logits_of(model, joined)
        assert torch.equal(logits_of(model, joined), outer)
    with zeroed_in_parts(layers, [[one], [one], [one, other], [other], [one], [one]]):
        torch.testing.assert_close(both, logits_of(model, joined), rtol=1e-5, atol=1e-5)
    assert replaced(model) == []


def test_an_exception_leaves_no_module_replaced() -> None:
    model = FAMILIES_TINY["qwen2_moe"]()
    batch = tiny_batch(model)
    dense = logits_of(model, batch)
    with pytest.raises(IndexError), zeroed(model, [*even("qwen2_moe"), Unit(MLP, 0, 0, GROUP)]):
        logits_of(model, batch | {"input_ids": batch["input_ids"] + 1000})  # there are no such tokens
    assert replaced(model) == []
    assert torch.equal(logits_of(model, batch), dense)


def test_too_many_experts_are_refused_in_zeroing_nested_or_not_and_in_surgery() -> None:
    model = FAMILIES_TINY["mixtral"]()
    three = [Unit(EXPERT, 1, i) for i in range(3)]
    with pytest.raises(SelectionError) as caught, zeroed(model, three):
        pytest.fail("the block was entered")
    one_sentence(caught, "model.layers.1", "4 experts", "takes 2", "at most 2", "not 3")
    with zeroed(model, three[:2]), pytest.raises(SelectionError, match="at most 2"), zeroed(model, three[2:]):
        pytest.fail("the block was entered")
    with pytest.raises(SelectionError, match="at most 2"):
        shrink(model, [Unit(EXPERT, layer, i) for layer in range(3) for i in range(3)])
    assert replaced(model) == []


def test_the_routers_logits_have_the_dense_form_with_minus_infinity_for_what_is_gone() -> None:
    model = FAMILIES_TINY["mixtral"]()
    with torch.no_grad(), zeroed(model, [Unit(EXPERT, 1, 2)]):
        found = model(input_ids=tiny_batch(model)["input_ids"], output_router_logits=True).router_logits
    assert [tuple(logits.shape) for logits in found] == [(30, 4)] * 3
    assert found[1].isinf().all(0).tolist() == [False, False, True, False]
    assert found[0].isfinite().all() and found[2].isfinite().all()


def test_a_zeroed_model_can_be_differentiated_and_no_gradient_reaches_what_is_zeroed() -> None:
    model: Any = FAMILIES_TINY["mixtral"]()
    with zeroed(model, [Unit(EXPERT, 1, 2), Unit(MLP, 1, 0, GROUP)]):
        model(input_ids=tiny_batch(model)["input_ids"]).logits.square().sum().backward()
    moe = model.model.layers[1].mlp
    assert moe.gate.weight.grad.abs().sum(1).gt(0).tolist() == [True, True, False, True]
    for parameter in (moe.experts.gate_up_proj, moe.experts.down_proj):
        assert parameter.grad.abs().sum((1, 2)).gt(0).tolist() == [True, True, False, True]
    assert (moe.experts.down_proj.grad[..., :GROUP] == 0).all()


def test_channels_of_experts_in_one_fused_kernel_are_refused_rather_than_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fused(experts: Any, hidden: Tensor, *args: Any) -> Tensor:
        return torch.zeros_like(hidden)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "fused", fused)
    model: Any = FAMILIES_TINY["mixtral"]()
    model.config._experts_implementation = "fused"
    with zeroed(model, [Unit(EXPERT, 0, 0)]):
        logits_of(model, tiny_batch(model))
    with pytest.raises(UnsupportedModel, match=r"fused kernel.*set_experts_implementation"), zeroed(model, [Unit(MLP, 0, 0)]):
        logits_of(model, tiny_batch(model))


def small_last_group() -> nn.Module:
    """14 channels: three groups of 4 and one of 2; torch's grouped product takes no such width."""
    model: Any = tf.MixtralForCausalLM(
        tf.MixtralConfig(
            hidden_size=16,
            intermediate_size=14,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=32,
            max_position_embeddings=16,
        )
    ).eval()
    model.set_experts_implementation("eager")
    return model  # type: ignore[no-any-return]


def test_a_smaller_last_group_is_zeroed_and_cut() -> None:
    model = small_last_group()
    units = [Unit(MLP, 0, 3, GROUP), Unit(MLP, 1, 3, GROUP), Unit(MLP, 1, 0, GROUP), Unit(EXPERT, 0, 0), Unit(EXPERT, 1, 3)]
    small: Any = shrink(model, units)
    assert [tuple(block.mlp.experts.gate_up_proj.shape) for block in small.model.layers] == [(3, 24, 16), (3, 16, 16)]
    assert prove(model, units, small, tiny_batches(model, 2)).relative < 1e-6


# Measuring


@every_family
def test_the_meters_losses_are_those_of_experts_removed_by_hand_cached_or_not_stacked_or_not_with_lanes(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, lanes would change the last bits
    try:
        plain = DamageMeter(model, batches, lanes=1, cache_memory=0)
        exact = [DamageMeter(model, batches, lanes=lanes) for lanes in (1, 2)]
        exact.append(DamageMeter(model, batches, lanes=1, cache_memory=6000))
        stacked = [
            DamageMeter(model, batches, lanes=1, stack=3),
            DamageMeter(model, batches, lanes=2, stack=2, cache_memory=9000),
        ]
        committed: list[Unit] = []
        for commit in (Unit(EXPERT, 1, 0), Unit(EXPERT, 0, 3)):
            units = [Unit(EXPERT, 0, 1), Unit(EXPERT, 1, 2), Unit(EXPERT, 1, 3)]
            pulls = [(unit, (0, 1, 2)) for unit in units]
            truth = list(plain.measure(pulls))
            for (unit, drawn), measured in zip(pulls, truth, strict=True):
                by_hand = [loss_by_hand(model, batches[i], [*committed, unit]) for i in drawn]
                assert measured.masked_losses == pytest.approx(by_hand, abs=1e-5)
                assert list(measured.masked_losses) == [loss_without(model, batches[i], [*committed, unit]) for i in drawn]
            for meter in exact:
                assert [one[:2] for one in meter.measure(pulls)] == [one[:2] for one in truth]
            for meter in stacked:
                for found, expected in zip(meter.measure(pulls), truth, strict=True):
                    assert found.masked_losses == pytest.approx(expected.masked_losses, abs=1e-5)
            for meter in (plain, *exact, *stacked):
                meter.commit(commit)
            committed.append(commit)
        assert default_lanes(model) == 1 and replaced(model) == []
    finally:
        torch.set_num_threads(threads)


@every_family
def test_a_run_for_an_expert_skips_the_blocks_before_and_the_attention_of_its_own(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches, layers = tiny_batches(model, 1), anatomy(model)
    meter = DamageMeter(model, batches, batches_per_pull=1)
    losses_of(meter, Unit(EXPERT, 1, 0), [0])
    ran: list[tuple[int, str]] = []
    for i, layer in enumerate(layers):
        for part, module in (("attention", layer.qkv[0]), ("experts", layer.mlp_out)):
            module.register_forward_hook(lambda *_, key=(i, part): ran.append(key))
    _, masked = losses_of(meter, Unit(EXPERT, 1, 1), [0])
    assert ran == [(1, "experts"), (2, "attention"), (2, "experts")]
    assert masked == [loss_without(model, batches[0], [Unit(EXPERT, 1, 1)])]


@every_family
def test_all_scores_of_experts_are_finite_and_magnitude_is_that_of_their_parameters(name: str) -> None:
    model: Any = FAMILIES_TINY[name]()
    units = candidate_units(model, "expert")
    for method in (name for name in scoring() if METHODS[name].experts):  # the others refuse them
        scores = unit_scores(method, model, units, batches=tiny_batches(model, 2))
        assert list(scores) == units and all(math.isfinite(score) for score in scores.values())
        assert len({round(score, 9) for score in scores.values()}) == len(units)
    moe = model.model.layers[1].mlp
    parts = (moe.experts.gate_up_proj[2], moe.experts.down_proj[2], moe.gate.weight[2])
    by_hand = torch.cat([part.flatten() for part in parts]).abs().mean().item()
    assert unit_scores("magnitude", model, units)[Unit(EXPERT, 1, 2)] == pytest.approx(by_hand)


def test_wanda_weighs_an_expert_by_the_tokens_that_it_gets() -> None:
    model: Any = FAMILIES_TINY["mixtral"]()
    batches = tiny_batches(model, 2)
    moe, seen = model.model.layers[1].mlp, []
    hook = moe.experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    for batch in batches:
        logits_of(model, batch)
    hook.remove()
    x, chosen = torch.cat([args[0] for args in seen]), torch.cat([args[1] for args in seen])
    real = torch.cat([(batch["labels"] != -100).flatten() for batch in batches])  # the others count as padding
    x, chosen = x[real], chosen[real]
    with torch.no_grad():
        given = x[(chosen == 2).any(1)]
        gate, up = F.linear(given, moe.experts.gate_up_proj[2]).chunk(2, -1)
        inner = F.silu(gate) * up
        by_hand = (moe.experts.gate_up_proj[2].abs() * given.norm(dim=0)).sum()
        by_hand += (moe.experts.down_proj[2].abs() * inner.norm(dim=0)).sum()
        channels = (moe.experts.down_proj[2].abs() * inner.norm(dim=0))[:, :GROUP].sum()
        by_hand += (moe.gate.weight[2].abs() * x.norm(dim=0)).sum()
    unit, group = Unit(EXPERT, 1, 2), Unit(MLP, 1, 0, GROUP)
    scores = unit_scores("wanda", model, [unit, group], batches=batches)
    assert scores[unit] == pytest.approx(by_hand.item(), rel=1e-5)
    assert scores[group] > channels.item() > 0


# Cutting


@every_family
@pytest.mark.parametrize("n", [1, 2])
def test_a_cut_model_is_one_of_the_stock_class_and_writes_what_the_zeroed_one_does(name: str, n: int, tmp_path: Path) -> None:
    model: Any = FAMILIES_TINY[name]()
    units, batches = even(name, n), tiny_batches(model, 2)
    small: Any = shrink(model, units, UNIFORM)
    proof = prove(model, units, small, batches)
    assert proof.relative < 1e-6 and proof.same_tokens == proof.tokens == 8
    assert total_parameters(small) == parameters_left(model, units)
    save_shrunk(small, tmp_path / "small")
    assert json.loads((tmp_path / "small" / "config.json").read_text())[SETTING[name]] == 4 - n
    stock = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert type(stock) is type(model)
    prompt = batches[0]["input_ids"][:1, :5]
    with torch.no_grad(), zeroed(model, units):
        expected = model(prompt).logits
        written = model.generate(prompt, max_new_tokens=8, do_sample=False)
    torch.testing.assert_close(stock(prompt).logits, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(stock.generate(prompt, max_new_tokens=8, do_sample=False), written)
    moe = stock.model.layers[0].mlp
    assert (moe.gate.num_experts, moe.experts.num_experts, stock.num_experts) == (4 - n,) * 3
    assert (small.model.layers[0].mlp.gate.num_experts, small.num_experts) == (4 - n, 4 - n)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_go_with_heads_and_channels_that_differ_from_layer_to_layer(name: str, tmp_path: Path) -> None:
    model: Any = FAMILIES_TINY[name]()
    units = [*even(name), Unit(HEAD, 0, 1), Unit(KV_GROUP, 1, 0), Unit(MLP, 1, 2, GROUP), Unit(MLP, 2, 3, GROUP)]
    units += [Unit(MLP, 0, i, GROUP) for i in range(4)]  # all channels of all experts of a block
    small = shrink(model, units)
    prove(model, units, small, tiny_batches(model, 2))
    assert layout_of(small) is not None
    save_shrunk(small, tmp_path / "small")
    again = load_shrunk(tmp_path / "small", device="cpu")
    batch = tiny_batch(model)
    torch.testing.assert_close(logits_of(again, batch), logits_of(small, batch), rtol=1e-5, atol=1e-5)
    assert [layer.mlp_width for layer in anatomy(again)] == [0, 12, 12]  # the dense block had 14
    assert [layer.experts for layer in anatomy(again)] == [3 if i in BLOCKS[name] else 0 for i in range(3)]
    more = even(name)
    twice = shrink(again, more)
    prove(again, more, twice, [batch])
    assert {layer.experts for layer in anatomy(twice)} - {0} == {2}


def test_layers_that_would_keep_different_numbers_of_experts_are_refused() -> None:
    model = FAMILIES_TINY["qwen2_moe"]()
    for units in ([Unit(EXPERT, 0, 0)], [Unit(EXPERT, 0, 0), Unit(EXPERT, 0, 1), Unit(EXPERT, 1, 0)]):
        with pytest.raises(SelectionError) as caught:
            shrink(model, units)
        assert "experts" in one_sentence(caught, "equally many")


def test_the_shared_expert_and_the_dense_block_stay_whole() -> None:
    model: Any = FAMILIES_TINY["qwen2_moe"]()
    small: Any = shrink(model, [*even("qwen2_moe"), Unit(MLP, 0, 0, GROUP), Unit(MLP, 1, 3, GROUP)], UNIFORM)
    assert (small.config.moe_intermediate_size, small.config.intermediate_size, small.config.num_experts) == (12, 14, 3)
    untouched = [key for key in model.state_dict() if "shared_expert" in key or "layers.2" in key]
    assert len(untouched) > 10
    assert all(torch.equal(small.state_dict()[key], model.state_dict()[key]) for key in untouched)


def test_olmoes_heads_are_zeroed_but_not_cut_since_a_norm_runs_over_all_of_them() -> None:
    model = FAMILIES_TINY["olmoe"]()
    units = [Unit(MLP, i, 1, GROUP) for i in range(3)]
    prove(model, units, shrink(model, units, UNIFORM), tiny_batches(model, 2))
    with pytest.raises(UnsupportedModel) as caught:
        shrink(model, [Unit(HEAD, 0, 0)])
    one_sentence(caught, "model.layers.0", "norm over all its heads", "--layout none")
    for target, layout, refused in (("head", "free", True), ("kv_group", "free", True), ("head", "none", False)):
        if refused:
            with pytest.raises(UnsupportedModel, match="norm over all its heads"):
                goal(model, target=target, layout=layout)
        else:
            assert goal(model, target=target, layout=layout) is None


def test_a_repair_leaves_experts_as_they_are_and_says_so() -> None:
    model = FAMILIES_TINY["mixtral"]()
    units, batches = even("mixtral"), tiny_batches(model, 4)
    small = shrink(model, units)
    before = {key: value.clone() for key, value in small.state_dict().items()}
    assert "experts are not repaired" in str(repair(model, units, small, batches))
    assert all(torch.equal(value, before[key]) for key, value in small.state_dict().items())
    units.append(Unit(HEAD, 0, 0))
    found = repair(model, units, shrink(model, units), batches)
    assert found.losses and found.projections <= 1


# Goals


def goal(model: nn.Module, **settings: Any) -> Goal | None:
    chosen = Settings("tiny", group_width=GROUP, **settings)
    units = candidate_units(model, chosen.target, GROUP)
    return goal_of(chosen, Opened("tiny", model, None), units, None, Watcher())


@every_family
@pytest.mark.parametrize("layout", ["free", "uniform", "none"])
@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5])
def test_every_layer_loses_the_same_number_of_experts_whatever_the_layout(name: str, layout: str, ratio: float) -> None:
    model = FAMILIES_TINY[name]()
    quota = goal(model, target="expert", layout=layout, ratio=ratio)
    assert isinstance(quota, Quota)
    scores = {unit: float(unit.layer * 10 + unit.index) for unit in candidate_units(model, "expert")}
    chosen = select_by_score(scores, goal=quota).units
    assert sorted(chosen) == [Unit(EXPERT, layer, i) for layer in BLOCKS[name] for i in range(2 if ratio == 0.5 else 1)]


def test_a_search_without_a_goal_cannot_know_how_many_experts_a_layer_may_lose_and_is_refused() -> None:
    scores = {Unit(EXPERT, 0, i): float(i) for i in range(4)}
    with pytest.raises(SettingError) as caught:
        select_by_score(scores, ratio=0.5)
    one_sentence(caught, "goal=", "uniform_quota")


def test_the_benchmark_measures_experts_one_of_each_layer() -> None:
    model = FAMILIES_TINY["mixtral"]()
    pulls = compare_pulls(model, "tiny", target="expert", pulls=3)
    assert pulls.pulls == 3 and pulls.difference < 1e-5
    search = compare_selection(model, "tiny", target="expert")
    assert search.pulls == 3 * 32 and search.difference < 1e-5


def test_a_ratio_that_would_leave_fewer_experts_than_a_token_takes_is_refused_with_those_that_do() -> None:
    with pytest.raises(SettingError) as caught:
        goal(FAMILIES_TINY["qwen2_moe"](), target="expert", ratio=0.75)
    assert "--layout" not in one_sentence(caught, "0.75", "0.250, 0.500")


def test_a_goal_for_parameters_is_met_by_as_few_experts_as_will_do_and_flops_and_time_are_refused() -> None:
    model = FAMILIES_TINY["mixtral"]()
    share = parameters_left(model, even("mixtral")) / total_parameters(model)
    for keep, n in ((share, 1), (share - 1e-6, 2)):
        quota = goal(model, target="expert", keep_params=keep)
        assert isinstance(quota, Quota) and sum(quota.room.values()) == 3 * n
        assert quota.share is not None and quota.share.left(even("mixtral", n)) <= keep
    for keep_what in ("keep_flops", "keep_latency"):
        with pytest.raises(SettingError) as caught:
            goal(model, target="expert", **{keep_what: 0.9})
        one_sentence(caught, "as many as before", "--keep-params")
    with pytest.raises(SettingError) as caught:
        goal(model, target="expert", keep_params=0.4)
    assert "--layout" not in one_sentence(caught, "40.0%")


def test_a_group_width_that_torch_could_not_multiply_after_a_cut_is_refused_before_the_search() -> None:
    model = FAMILIES_TINY["mixtral"]()
    settings = Settings("tiny", target="mlp", group_width=6)
    with pytest.raises(SettingError, match="--group-width that is a multiple of 4"):
        goal_of(settings, Opened("tiny", model, None), candidate_units(model, "mlp", 6), None, Watcher())


@every_family
def test_the_flops_of_experts_are_those_that_a_plain_loop_over_them_takes(name: str) -> None:
    model: Any = FAMILIES_TINY[name]()
    ids = tiny_batch(model)["input_ids"]
    counted = {}
    for implementation in ("grouped_mm", "eager"):
        model.set_experts_implementation(implementation)
        with torch.inference_mode():
            counted[implementation] = flops.count(lambda: model(input_ids=ids))
    assert counted["grouped_mm"] == counted["eager"]
    groups = [Unit(MLP, 0, 1, GROUP), Unit(MLP, 1, 2, GROUP)]
    small = shrink(model, groups)
    with torch.inference_mode():
        saved = counted["eager"] - flops.count(lambda: small(input_ids=ids))
    assert saved == 2 * 30 * 2 * 3 * anatomy(model)[0].width * 2 * GROUP  # tokens, experts of each, projections
    assert FlopShares(model, 10).saved(even(name)) == 0
    table = FlopTable(model, tiny_batch(model))
    assert table.masked(Unit(EXPERT, 0, 0)) == table.masked(Unit(MLP, 0, 0, GROUP)) > table.masked(Unit(EXPERT, 1, 0))


# From the command line


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Callable[[str], Path]:
    """The folder of a tiny model with a tokenizer."""

    def save(name: str) -> Path:
        FAMILIES_TINY[name]().save_pretrained(tmp_path / name)  # type: ignore[operator]
        make_tokenizer(world.text / "train.txt").save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def command(world: World, model: Path, out: Path, *more: object) -> list[object]:
    flags = flags_beside(more)
    flags = [*flags[: flags.index("--layout")], "--layout", "free", "--no-measure"]
    return ["prune", model, "--calibration", world.text, *flags, "-o", out, "--target", "expert", *more]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_prune_removes_experts_and_writes_a_checkpoint_that_stock_transformers_loads(
    name: str, world: World, tmp_path: Path, run: Run, folder: Callable[[str], Path]
) -> None:
    ran = run(*command(world, folder(name), tmp_path / "out", "--json"))
    assert (ran.code, ran.complaints) == (0, [])
    selection = sc.Selection.load(tmp_path / "out" / "selection.json")
    assert sorted(unit.layer for unit in selection.units) == list(BLOCKS[name])
    assert {unit.kind for unit in selection.units} == {EXPERT}
    record = json.loads((tmp_path / "out" / "secateur.json").read_text())
    assert record["layout"] == "uniform" and record["proof"]["relative"] < 1e-5
    stock = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert getattr(stock.config, SETTING[name]) == 3
    dense, _ = sc.load(str(tmp_path / name), device="cpu")
    batch = tiny_batch(dense)
    with sc.zeroed(dense, selection.units):
        expected = logits_of(dense, batch)
    torch.testing.assert_close(logits_of(stock, batch), expected, rtol=1e-4, atol=1e-4)
    assert f"{len(selection.units)} experts" in (tmp_path / "out" / "README.md").read_text()
    again = run(*command(world, tmp_path / name, tmp_path / "out", "--json"))
    assert (again.code, again.document) == (0, ran.document)


def test_prune_refuses_what_experts_cannot_do_before_it_searches(
    world: World, tmp_path: Path, run: Run, folder: Callable[[str], Path]
) -> None:
    model, out = folder("mixtral"), tmp_path / "out"
    said = check_refused(run(*command(world, model, out, "--ratio", 0.9)), out / "selection.json")
    assert "0.9" in said and "0.250, 0.500" in said
    said = check_refused(run(*command(world, model, out, "--keep-flops", 0.9)), out / "selection.json")
    assert "saves no FLOPs" in said
    said = check_refused(run(*command(world, world.text_model, out)), out / "selection.json")
    assert "no experts" in said


def test_units_lists_the_experts_of_each_layer(run: Run, folder: Callable[[str], Path]) -> None:
    ran = run("units", folder("qwen2_moe"), "--target", "expert", "--json")
    assert [(layer["experts"], layer["units"]) for layer in ran.document["layers"]] == [(4, 4), (4, 4), (0, 0)]
    assert "experts" in run("units", folder("mixtral"), "--target", "expert").out
