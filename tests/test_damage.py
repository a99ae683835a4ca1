from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.damage import DamageMeter
from secateur.errors import ModelError, SettingError
from secateur.families import Layer, anatomy, candidate_units
from secateur.lanes import Lane, Lanes
from secateur.losses import batch_loss
from secateur.units import HEAD, MLP, Unit
from secateur.zeroing import zeroed
from tiny import FAMILIES_TINY, GROUP, VOCABULARY, hook_count, randomised, tf, tiny_batches

HEAD_1, HEAD_2, GROUP_3 = Unit(HEAD, 1, 1), Unit(HEAD, 0, 2), Unit(MLP, 2, 3, GROUP)
ROWS = {  # tiny GPT-2's Conv1D keeps a row for each input: heads are 4 wide, the last of 14 channels' groups of 4 is 2 wide
    HEAD_1: ("transformer.h.1.attn.c_proj.weight", slice(4, 8)),
    HEAD_2: ("transformer.h.0.attn.c_proj.weight", slice(8, 12)),
    GROUP_3: ("transformer.h.2.mlp.c_proj.weight", slice(12, 14)),
}


def losses_by_hand(model: nn.Module, batches: list[dict[str, Tensor]], units: list[Unit]) -> list[float]:
    """transformers' own loss of a copy in which the units' rows are 0."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        for unit in units:
            name, rows = ROWS[unit]
            model.get_parameter(name)[rows] = 0
        return [float(model(**batch).loss) for batch in batches]


class Passes:
    """Counts the passes that the model really makes."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        model.register_forward_hook(self._add)

    def _add(self, module: nn.Module, args: Any, output: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("unit", ROWS, ids=str)
def test_damage_is_the_loss_without_the_unit_minus_the_loss_with_it_on_the_same_batches(unit: Unit) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 5)
    drawn = DamageMeter(model, batches, batches_per_pull=3, seed=7).draw()
    chosen = [batches[i] for i in drawn]
    base, masked = losses_by_hand(model, chosen, []), losses_by_hand(model, chosen, [unit])
    expected = sum(m - b for m, b in zip(masked, base, strict=True)) / 3
    assert abs(expected) > 1e-4
    meter = DamageMeter(model, batches, batches_per_pull=3, seed=7)
    assert meter.damage(unit) == pytest.approx(expected, abs=1e-6)
    found_base, found_masked = meter.measure(unit, drawn)
    assert found_base == pytest.approx(base, abs=1e-6)
    assert found_masked == pytest.approx(masked, abs=1e-6)


def test_the_loss_of_images_is_the_cross_entropy_of_their_labels() -> None:
    model = FAMILIES_TINY["timm vit"]()
    (batch,) = batches = tiny_batches(model, 1)
    twin = copy.deepcopy(model)
    expected = []
    with torch.no_grad():
        for columns in (slice(0, 0), slice(4, 8)):
            twin.get_parameter("blocks.1.attn.proj.weight")[:, columns] = 0
            expected.append(float(F.cross_entropy(twin(batch["pixel_values"]), batch["labels"])))
    base, masked = DamageMeter(model, batches, batches_per_pull=1).measure(HEAD_1, [0])
    assert base + masked == pytest.approx(expected, abs=1e-6)


def test_a_committed_unit_is_gone_from_the_base_and_the_masked_loss_of_later_measurements() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 3)
    meter = DamageMeter(model, batches)
    meter.measure(GROUP_3, [0, 2])
    meter.commit(HEAD_1)
    meter.commit(HEAD_2)
    base, masked = meter.measure(GROUP_3, [0, 2])
    chosen = [batches[0], batches[2]]
    assert base == pytest.approx(losses_by_hand(model, chosen, [HEAD_1, HEAD_2]), abs=1e-6)
    assert masked == pytest.approx(losses_by_hand(model, chosen, [HEAD_1, HEAD_2, GROUP_3]), abs=1e-6)
    assert hook_count(model) == 0


def test_the_base_loss_of_a_batch_is_measured_once_until_a_unit_is_committed() -> None:
    model = FAMILIES_TINY["gpt2"]()
    passes = Passes(model)
    meter = DamageMeter(model, tiny_batches(model, 3))
    meter.measure(HEAD_1, [0, 1])
    assert passes.count == meter.forwards == 4  # 2 batches, with and without
    meter.measure(HEAD_2, [0, 1])
    assert passes.count == meter.forwards == 6  # 3 passes a batch for 2 units, not 4
    meter.measure(GROUP_3, [1, 2])
    assert passes.count == meter.forwards == 9  # batch 2 is new
    meter.commit(HEAD_1)
    meter.measure(HEAD_2, [0, 1])
    assert passes.count == meter.forwards == 13  # a new base
    assert meter.pulls == 4


def test_shared_base_losses_give_the_damage_that_separate_measurements_give() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    shared = DamageMeter(model, batches)
    shared.measure(HEAD_2, [0, 1, 2, 3])
    assert shared.measure(HEAD_1, [3, 1]) == DamageMeter(model, batches).measure(HEAD_1, [3, 1])


def test_recalled_losses_stand_for_measured_ones_until_a_unit_is_committed() -> None:
    model = FAMILIES_TINY["gpt2"]()
    passes = Passes(model)
    meter = DamageMeter(model, tiny_batches(model, 2))
    meter.recall(HEAD_1, [0, 1], [5.0, 6.0], [7.0, 8.0])
    assert meter.measure(HEAD_1, [1, 0]) == ([6.0, 5.0], [8.0, 7.0])
    assert (passes.count, meter.forwards, meter.pulls) == (0, 0, 2)
    assert meter.measure(GROUP_3, [1, 0])[0] == [6.0, 5.0]
    assert passes.count == meter.forwards == 2
    meter.commit(HEAD_2)
    base, masked = meter.measure(HEAD_1, [0])
    assert 5.0 not in base
    assert 7.0 not in masked


def test_a_unit_is_measured_once_on_a_batch_until_a_unit_is_committed() -> None:
    model = FAMILIES_TINY["gpt2"]()
    passes = Passes(model)
    meter = DamageMeter(model, tiny_batches(model, 3))
    first = meter.measure(HEAD_1, [0, 1])
    again = meter.measure(HEAD_1, [1, 2])
    assert (again[0][0], again[1][0]) == (first[0][1], first[1][1])
    assert passes.count == meter.forwards == 6  # batch 2 alone is new, with and without
    meter.commit(HEAD_2)
    meter.measure(HEAD_1, [1])
    assert passes.count == meter.forwards == 8


def test_a_seed_fixes_the_draws_whatever_is_measured_between_them() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 6)
    plain, busy, other = (DamageMeter(model, batches, batches_per_pull=3, seed=seed) for seed in (1, 1, 2))
    draws = []
    for _ in range(5):
        draws.append(busy.draw())
        busy.measure(HEAD_1, draws[-1])
        busy.commit(HEAD_2)
    assert draws == [plain.draw() for _ in range(5)]
    assert draws != [other.draw() for _ in range(5)]


def test_the_batches_of_a_pull_differ_and_every_batch_gets_its_turn() -> None:
    model = FAMILIES_TINY["gpt2"]()
    meter = DamageMeter(model, tiny_batches(model, 5), batches_per_pull=4)
    draws = [meter.draw() for _ in range(50)]
    assert all(len(set(draw)) == len(draw) == 4 for draw in draws)
    assert {i for draw in draws for i in draw} == set(range(5))


def test_a_dense_model_with_a_non_finite_loss_is_an_error_that_names_the_batch() -> None:
    model = FAMILIES_TINY["vit"]()
    batches = tiny_batches(model, 3)
    batches[1]["pixel_values"][0, 0, 0, 0] = float("nan")
    meter = DamageMeter(model, batches)
    meter.measure(HEAD_1, [0, 2])
    with pytest.raises(ModelError, match="calibration batch 1 is nan"):
        meter.measure(HEAD_1, [0, 1])
    assert hook_count(model) == 0


@pytest.mark.parametrize("batches_per_pull", [-1, 0, 4])
def test_batches_per_pull_out_of_range_is_a_setting_error_that_says_the_range(batches_per_pull: int) -> None:
    model = FAMILIES_TINY["gpt2"]()
    with pytest.raises(SettingError, match=f"are {batches_per_pull}, but must be 1 to 3"):
        DamageMeter(model, tiny_batches(model, 3), batches_per_pull=batches_per_pull)


def test_a_model_in_train_mode_is_measured_without_dropout_and_left_as_it_was() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    expected = DamageMeter(model, batches).measure(HEAD_1, [0, 1])
    model.train()
    model.get_submodule("transformer.h.1").eval()
    training = [module.training for module in model.modules()]
    assert float(model(**batches[0]).loss.detach()) != pytest.approx(expected[0][0], abs=1e-4), "this model has no dropout"
    assert DamageMeter(model, batches).measure(HEAD_1, [0, 1]) == expected
    assert [module.training for module in model.modules()] == training


def test_measuring_leaves_no_hook_and_no_gradient() -> None:
    model = FAMILIES_TINY["gpt2"]()
    meter = DamageMeter(model, tiny_batches(model, 2))
    meter.commit(HEAD_2)
    meter.damage(HEAD_1)
    assert hook_count(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


class BlockRuns:
    """Counts how often each block really runs; a block that hands back a kept output does not reach its insides."""

    def __init__(self, model: nn.Module) -> None:
        self.counts = [0] * len(anatomy(model))
        for i, layer in enumerate(anatomy(model)):
            layer.mlp_out.register_forward_hook(lambda *_, i=i: self._add(i))

    def _add(self, i: int) -> None:
        self.counts[i] += 1

    def taken(self) -> list[int]:
        counts, self.counts = self.counts, [0] * len(self.counts)
        return counts


def plain_loss(model: nn.Module, batch: dict[str, Tensor], units: list[Unit]) -> float:
    with torch.inference_mode(), zeroed(model, units):
        return float(batch_loss(model, batch))


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def deep(model: Any, config: Any, **fields: Any) -> nn.Module:
    """Eight blocks, so that their outputs can be thinned twice."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 8}
    return randomised(model(config(max_position_embeddings=16, bos_token_id=0, eos_token_id=1, **shape, **fields)))


MODELS = FAMILIES_TINY | {
    "gpt2 deep": lambda: deep(tf.GPT2LMHeadModel, tf.GPT2Config, n_inner=14),
    "llama deep": lambda: deep(tf.LlamaForCausalLM, tf.LlamaConfig, intermediate_size=14),
}


def storage_bytes(*tensors: Any) -> int:
    """What tensors hold in memory together, views with all of what they look at."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x is not None}.values())


def tensors_of(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def given_by_blocks(model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, tuple[Any, ...]]]:
    """For each block: what it gives, what its attention gives, and what enters its two output projections."""
    given: list[dict[str, tuple[Any, ...]]] = [{} for _ in anatomy(model)]

    def watch(seen: dict[str, tuple[Any, ...]], layer: Layer) -> Iterator[Any]:
        yield layer.block.register_forward_hook(lambda *a: seen.update(output=tensors_of(a[2])))
        yield layer.attention.register_forward_hook(lambda *a: seen.update(attention=tensors_of(a[2])[:1]))
        yield layer.out.register_forward_pre_hook(lambda *a: seen.update({HEAD: a[1]}))
        yield layer.mlp_out.register_forward_pre_hook(lambda *a: seen.update({MLP: a[1]}))

    handles = [handle for seen, layer in zip(given, anatomy(model), strict=True) for handle in watch(seen, layer)]
    plain_loss(model, batch, [])
    for handle in handles:
        handle.remove()
    return given


@pytest.mark.parametrize("family", MODELS)
def test_whatever_is_kept_and_however_it_is_run_no_bit_of_any_loss_changes(family: str) -> None:
    model = MODELS[family]()
    batches = tiny_batches(model, 4)
    units = candidate_units(model, "both", GROUP)
    n_layers = len(anatomy(model))
    sizes = [storage_bytes(*block["output"]) for batch in batches for block in given_by_blocks(model, batch)[:-1]]
    outputs, largest = sum(sizes), max(sizes)
    roomy = DamageMeter(model, batches, lanes=1)
    for unit in (units[0], units[-1]):
        roomy.measure(unit, range(4))
    roomy.commit(units[0])
    roomy.measure(units[-1], range(4))
    everything = roomy.cached_bytes  # for units of both kinds
    assert everything > outputs
    roomy = DamageMeter(model, batches, lanes=1)
    side_by_side = DamageMeter(model, batches, lanes=2)
    inside_dropped = DamageMeter(model, batches, lanes=1, cache_memory=everything - 1)
    thinned = DamageMeter(model, batches, lanes=1, cache_memory=outputs * 2 // 3)
    tight_side_by_side = DamageMeter(model, batches, lanes=2, cache_memory=outputs * 2 // 3)
    evicted = DamageMeter(model, batches, lanes=1, cache_memory=2 * largest)
    nothing_fits = DamageMeter(model, batches, lanes=1, cache_memory=1)
    none = DamageMeter(model, batches, lanes=1, cache_memory=0)
    stale = DamageMeter(model, batches, lanes=1, cache_memory=everything // 2, batches_per_step=2)
    meters = (roomy, side_by_side, inside_dropped, thinned, tight_side_by_side, evicted, nothing_fits, none, stale)
    rng = np.random.default_rng(5)
    committed: list[Unit] = []
    for step in range(10):
        unit = units[rng.integers(len(units))]
        if step % 4 == 3:
            committed.append(unit)
            for meter in meters:
                meter.commit(unit)
            continue
        drawn = [int(i) for i in rng.choice(4, size=4 if step % 4 == 0 else 2, replace=False)]
        base = [plain_loss(model, batches[i], committed) for i in drawn]
        masked = [plain_loss(model, batches[i], [*committed, unit]) for i in drawn]
        for meter in meters:
            with threads(2 if meter in (side_by_side, tight_side_by_side) else 1):
                assert meter.measure(unit, drawn) == (base, masked)
            assert meter.cached_bytes <= meter.cache_memory
    assert not roomy.cache_was_full
    assert not side_by_side.cache_was_full
    assert all(meter.cache_was_full for meter in (inside_dropped, thinned, tight_side_by_side, evicted, nothing_fits))
    assert nothing_fits.cached_bytes == none.cached_bytes == 0
    for meter in (thinned, evicted):
        assert (meter._prefixes._stride > 1) == (n_layers > 3)
    assert 1 <= len(evicted._prefixes._kept) < 4
    assert evicted.cached_bytes > 0
    assert {meter.forwards for meter in meters} == {none.forwards}
    assert hook_count(model) == 0


@pytest.mark.parametrize("family", MODELS)
def test_stacked_runs_of_announced_pulls_give_the_same_losses_and_the_same_counts(family: str) -> None:
    model = MODELS[family]()
    batches = tiny_batches(model, 4)
    units = candidate_units(model, "both", GROUP)
    single = DamageMeter(model, batches, lanes=1)
    stacked = DamageMeter(model, batches, lanes=1, stack=3)
    both = DamageMeter(model, batches, lanes=2, stack=3, cache_memory=20_000)
    rng = np.random.default_rng(6)
    for _ in range(3):
        pulls = [(units[rng.integers(len(units))], tuple(map(int, rng.choice(4, 2, replace=False)))) for _ in range(5)]
        for meter in (stacked, both):
            meter.expect(pulls)
        for unit, drawn in pulls:
            base, masked = single.measure(unit, drawn)
            for meter in (stacked, both):
                with threads(2 if meter is both else 1):
                    found_base, found_masked = meter.measure(unit, drawn)
                assert found_base == base
                assert found_masked == pytest.approx(masked, rel=1e-6, abs=1e-6)
                assert (meter.pulls, meter.forwards) == (single.pulls, single.forwards)
                assert meter.cached_bytes <= meter.cache_memory
        for meter in (single, stacked, both):
            meter.commit(pulls[0][0])


def test_a_stack_makes_one_run_of_several_and_only_of_batches_of_one_shape() -> None:
    model = FAMILIES_TINY["llama"]()
    batches = tiny_batches(model, 3)
    batches[2] = {name: tensor[:, :7] for name, tensor in batches[2].items()}
    passes = Passes(model)
    pulls = [(unit, [0, 1, 2]) for unit in (HEAD_1, HEAD_2, GROUP_3)]
    expected = [DamageMeter(model, batches).measure(*pull) for pull in pulls]
    passes.count = 0
    meter = DamageMeter(model, batches, stack=9)
    meter.expect(pulls)
    found = meter.measure(*pulls[0])
    assert passes.count == 3 + 2  # the base runs, one for two batches times three units, one for the shorter batch
    found_later = [meter.measure(*pull) for pull in pulls[1:]]
    assert passes.count == 5
    for (base, masked), (base_by_hand, masked_by_hand) in zip([found, *found_later], expected, strict=True):
        assert base == base_by_hand
        assert masked == pytest.approx(masked_by_hand, abs=1e-6)
    assert meter.forwards == 12


@pytest.mark.parametrize(("stack", "lanes"), [(1, 2), (3, 1), (2, 2)])
def test_pulls_that_come_in_another_order_than_expected_or_never_change_no_number(stack: int, lanes: int) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    units = candidate_units(model, "both", GROUP)[::4]
    meter = DamageMeter(model, batches, stack=stack, lanes=lanes)
    meter.expect([(unit, [0, 1]) for unit in units])
    made = [(units[-1], [1, 0]), (units[2], [3, 2]), (units[0], [0, 1])]
    by_hand = [[[plain_loss(model, batches[i], gone) for i in drawn] for gone in ([], [unit])] for unit, drawn in made]
    exact = 0.0 if stack == 1 else 1e-6
    for (unit, drawn), (base, masked) in zip(made, by_hand, strict=True):
        found_base, found_masked = meter.measure(unit, drawn)
        assert found_base == base
        assert found_masked == pytest.approx(masked, abs=exact, rel=0)
    assert (meter.pulls, meter.forwards) == (3, 4 + 6)
    meter.commit(units[1])
    found_base, found_masked = meter.measure(units[3], [0, 1])
    assert found_base == [plain_loss(model, batches[i], [units[1]]) for i in (0, 1)]
    by_hand_masked = [plain_loss(model, batches[i], [units[1], units[3]]) for i in (0, 1)]
    assert found_masked == pytest.approx(by_hand_masked, abs=exact, rel=0)
    assert (meter.pulls, meter.forwards) == (4, 4 + 6 + 4)


@pytest.mark.parametrize(("stack", "lanes"), [(1, 2), (3, 1), (2, 2)])
def test_recalled_losses_are_not_measured_again_by_stacks_and_lanes(stack: int, lanes: int) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 3)
    meter = DamageMeter(model, batches, stack=stack, lanes=lanes)
    meter.recall(HEAD_1, [0, 1], [5.0, 6.0], [7.0, 8.0])
    meter.expect([(HEAD_1, [0, 1]), (HEAD_2, [1, 2]), (GROUP_3, [0, 1])])
    base, masked = meter.measure(HEAD_2, [1, 2])
    assert base == [6.0, plain_loss(model, batches[2], [])]
    assert masked == pytest.approx([plain_loss(model, batches[i], [HEAD_2]) for i in (1, 2)], abs=1e-6)
    assert (meter.pulls, meter.forwards) == (2, 3)  # the base loss of batch 2, and two masked ones
    assert meter.measure(HEAD_1, [1, 0]) == ([6.0, 5.0], [8.0, 7.0])
    assert (meter.pulls, meter.forwards) == (3, 3)
    meter.recall(GROUP_3, [0, 1], [5.0, 6.0], [9.0, 10.0])  # whether it was measured ahead or not
    assert meter.measure(GROUP_3, [0, 1]) == ([5.0, 6.0], [9.0, 10.0])
    assert (meter.pulls, meter.forwards) == (5, 3)


def test_copies_of_a_model_run_side_by_side_and_share_its_tensors() -> None:
    model = FAMILIES_TINY["llama"]()
    side_by_side = Barrier(2, timeout=60)

    def work(lane: Lane, item: int) -> nn.Module:
        side_by_side.wait()  # passed only if the other item is at work meanwhile
        return lane.model

    twins = Lanes(model, 2).map(work, [0, 1], [])
    assert twins[0] is not twins[1]
    for twin in twins:
        assert not {id(module) for module in twin.modules()} & {id(module) for module in model.modules()}
        for own, copied in ((model.parameters(), twin.parameters()), (model.buffers(), twin.buffers())):
            pairs = list(itertools.zip_longest(own, copied))
            assert pairs
            assert all(a.data_ptr() == b.data_ptr() and a is b for a, b in pairs)


def test_a_hooked_model_is_run_itself_and_gives_the_same_losses_with_lanes() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    expected = [[plain_loss(model, batch, gone) for batch in batches] for gone in ([], [HEAD_1])]
    passes = Passes(model)
    assert list(DamageMeter(model, batches, lanes=2).measure(HEAD_1, range(4))) == expected
    assert passes.count == 8
    assert hook_count(model) == 1
    unwatched = FAMILIES_TINY["gpt2"]()
    assert list(DamageMeter(unwatched, batches, lanes=2).measure(HEAD_1, range(4))) == expected


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "attention": lambda layer: layer.attention.register_forward_hook(lambda _, args, given: (given[0] * 1.5, *given[1:])),
    "block": lambda layer: layer.block.register_forward_hook(lambda _, args, given: given * 1.25),
    "before the block": lambda layer: layer.block.register_forward_pre_hook(lambda _, args: (args[0] * 1.25, *args[1:])),
    "before out": lambda layer: layer.out.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,)),
    "out": lambda layer: layer.out.register_forward_hook(lambda _, args, given: given * 1.5),
    "mlp_in": lambda layer: layer.mlp_in[0].register_forward_hook(lambda _, args, given: given * 1.5),
    "before mlp_out": lambda layer: layer.mlp_out.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,)),
    "mlp_out": lambda layer: layer.mlp_out.register_forward_hook(lambda _, args, given: given * 1.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_hook_that_changes_what_a_model_does_changes_each_run_alike(change: str) -> None:
    model = FAMILIES_TINY["llama"]()
    (batch,) = batches = tiny_batches(model, 1)
    units = [HEAD_1, Unit(MLP, 1, 0, GROUP), Unit(HEAD, 2, 1), GROUP_3]
    dense = plain_loss(model, batch, [])
    for layer in anatomy(model):
        CHANGES[change](layer)
    assert plain_loss(model, batch, []) != pytest.approx(dense, abs=1e-4)
    meter = DamageMeter(model, batches, batches_per_pull=1, lanes=2)
    for committed in ([], [HEAD_2]):
        for unit in committed:
            meter.commit(unit)
        for unit in units:
            by_hand = [plain_loss(model, batch, committed)], [plain_loss(model, batch, [*committed, unit])]
            assert meter.measure(unit, [0]) == by_hand


def test_a_model_in_train_mode_is_measured_by_copies_without_dropout_and_left_as_it_was() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    expected = [[plain_loss(model, batch, gone) for batch in batches] for gone in ([], [HEAD_1])]
    model.train()
    model.get_submodule("transformer.h.1").eval()
    training = [module.training for module in model.modules()]
    meter = DamageMeter(model, batches, lanes=2)
    assert list(meter.measure(HEAD_1, range(4))) == expected
    assert meter.measure(HEAD_1, [2, 0]) == ([expected[0][2], expected[0][0]], [expected[1][2], expected[1][0]])
    assert [module.training for module in model.modules()] == training
    assert hook_count(model) == 0


@pytest.mark.parametrize(("setting", "match"), [({"stack": 0}, "stack is 0"), ({"lanes": 0}, "lanes are 0")])
def test_a_stack_or_lanes_below_1_are_a_setting_error(setting: dict[str, int], match: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    with pytest.raises(SettingError, match=match):
        DamageMeter(model, batches, stack=setting.get("stack", 1), lanes=setting.get("lanes"))


def test_a_masked_run_starts_at_the_unit_s_block_and_a_base_run_at_the_first_block_that_changed() -> None:
    model = FAMILIES_TINY["llama"]()
    runs = BlockRuns(model)
    meter = DamageMeter(model, tiny_batches(model, 2), seed=1)
    meter.measure(Unit(HEAD, 2, 0), [0])
    assert runs.taken() == [1, 1, 2]  # all blocks for the base loss, the last one again
    meter.measure(Unit(HEAD, 1, 0), [0])
    assert runs.taken() == [0, 1, 1]
    meter.commit(Unit(HEAD, 1, 3))
    meter.measure(Unit(MLP, 2, 0, GROUP), [0])
    assert runs.taken() == [0, 1, 2]  # the base run goes on from block 1


def test_without_cache_memory_every_run_is_a_whole_one() -> None:
    model = FAMILIES_TINY["gpt2"]()
    runs = BlockRuns(model)
    meter = DamageMeter(model, tiny_batches(model, 2), seed=1, cache_memory=0)
    meter.measure(Unit(HEAD, 2, 0), [0])
    assert runs.taken() == [2, 2, 2]


@pytest.mark.parametrize("kinds", [(HEAD,), (MLP,), (HEAD, MLP)], ids=" and ".join)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "swin", "timm vit"])
def test_kept_are_the_outputs_of_all_blocks_but_the_last_and_what_enters_the_measured_kinds_projections(
    family: str, kinds: tuple[str, ...]
) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 3)
    kept = {HEAD: (HEAD,), MLP: (MLP, "attention")}
    expected = [0] * len(anatomy(model))  # bytes by block, of two batches
    for batch in batches[:2]:
        for i, given in enumerate(given_by_blocks(model, batch)):
            names = [name for kind in kinds for name in kept[kind]] + ["output"] * (i + 1 < len(expected))
            expected[i] += storage_bytes(*(x for name in names for x in given[name]))
    meter = DamageMeter(model, batches)
    for kind in kinds:
        meter.recall(Unit(kind, 0, 0, GROUP), [0, 1], [1.0, 1.0], [1.0, 1.0])
        meter.measure(Unit(kind, 0, 0, GROUP), [0, 1])  # known: tells the kind and runs nothing
    assert meter.cached_bytes == 0
    meter.commit(Unit(HEAD, 0, 1))
    meter.measure(Unit(kinds[0], 0, 0, GROUP), [0, 1])
    assert meter.cached_bytes == sum(expected)
    assert 0 not in expected
    meter.commit(Unit(HEAD, 1, 0))
    assert meter.cached_bytes == expected[0]


def replaced(model: nn.Module) -> list[str]:
    """The modules whose forward is not their own."""
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama", "swin"])
def test_no_module_is_left_replaced_also_when_a_batch_fails(family: str, lanes: int) -> None:
    model = FAMILIES_TINY[family]()
    batches: list[Any] = tiny_batches(model, 2)
    good = dict(batches[0])
    meter = DamageMeter(model, batches, lanes=lanes)
    for kind in (HEAD, MLP):
        unit, again = Unit(kind, 1, 0, GROUP), Unit(kind, 1, 1, GROUP)
        meter.measure(unit, [0, 1])
        batches[0] = {"labels": good["labels"]}
        with pytest.raises(KeyError):
            meter.measure(again, [0, 1])
        assert replaced(model) == []
        assert hook_count(model) == 0
        batches[0] = good
        for last in (again, Unit(kind, 2, 1, GROUP)):  # more runs than there are lanes
            assert meter.measure(last, [0, 1])[1] == [plain_loss(model, batch, [last]) for batch in batches]


@pytest.mark.parametrize("kind", [HEAD, MLP])
@pytest.mark.parametrize("family", FAMILIES_TINY)
def test_no_module_is_left_replaced_when_a_run_fails_half_way(family: str, kind: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 1)
    layers = anatomy(model)
    meter = DamageMeter(model, batches, batches_per_pull=1)
    meter.measure(Unit(kind, 1, 0, GROUP), [0])
    stood_in: list[str] = []

    def fail(*args: Any) -> None:
        stood_in.extend(replaced(model))
        raise ZeroDivisionError

    handle = layers[1].mlp_out.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        meter.measure(Unit(kind, 1, 1, GROUP), [0])
    handle.remove()
    names = {module: name for name, module in model.named_modules()}
    inside = [layers[1].attention, *(layers[1].mlp_in if kind == MLP else ())]
    head: Any = [model.get_submodule(name) for name in ("lm_head", "embed_out") if name in names.values()]
    assert sorted(stood_in) == sorted(names[module] for module in (layers[0].block, *inside, *head))
    assert replaced(model) == []
    assert hook_count(model) == 0
    unit = Unit(kind, 1, 1, GROUP)
    assert meter.measure(unit, [0])[1] == [plain_loss(model, batches[0], [unit])]


def test_the_pulls_of_a_step_share_its_batches_and_the_next_step_has_others() -> None:
    model = FAMILIES_TINY["gpt2"]()
    meter = DamageMeter(model, tiny_batches(model, 12), batches_per_pull=2, batches_per_step=3, seed=1)
    steps = []
    for layer in range(3):
        drawn = [meter.draw() for _ in range(30)]
        assert all(len(set(pull)) == 2 for pull in drawn)
        steps.append({i for pull in drawn for i in pull})
        meter.commit(Unit(HEAD, layer, 0))
    assert [len(step) for step in steps] == [3, 3, 3]
    assert len({frozenset(step) for step in steps}) > 1


@pytest.mark.parametrize(("per_step", "per_pull"), [(1, 2), (6, 2), (-1, 1)])
def test_batches_per_step_out_of_range_is_a_setting_error(per_step: int, per_pull: int) -> None:
    model = FAMILIES_TINY["gpt2"]()
    with pytest.raises(SettingError, match="batches per"):
        DamageMeter(model, tiny_batches(model, 5), batches_per_pull=per_pull, batches_per_step=per_step)
