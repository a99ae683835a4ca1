from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.damage import DamageMeter
from secateur.errors import ModelError, SettingError
from secateur.families import anatomy, candidate_units
from secateur.losses import batch_loss
from secateur.units import HEAD, MLP, Unit
from secateur.zeroing import zeroed
from tiny import FAMILIES_TINY, GROUP, hook_count, tiny_batches

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


def plain_losses(model: nn.Module, batch: dict[str, Tensor], units: list[Unit]) -> float:
    with torch.inference_mode(), zeroed(model, units):
        return float(batch_loss(model, batch))


@pytest.mark.parametrize("family", FAMILIES_TINY)
def test_kept_block_outputs_change_no_bit_of_any_loss_whatever_is_measured_and_committed(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 4)
    units = candidate_units(model, "both", GROUP)
    roomy = DamageMeter(model, batches, seed=3)
    with torch.inference_mode():
        roomy.measure(units[0], range(4))
    tight = DamageMeter(model, batches, seed=3, cache_memory=roomy.cached_bytes * 3 // 8)  # a batch and a half
    none = DamageMeter(model, batches, seed=3, cache_memory=0)
    rng = np.random.default_rng(5)
    committed: list[Unit] = []
    for _ in range(24):
        unit = units[rng.integers(len(units))]
        if rng.random() < 0.25:
            committed.append(unit)
            for meter in (roomy, tight, none):
                meter.commit(unit)
        else:
            drawn = [int(i) for i in rng.choice(4, size=2, replace=False)]
            base = [plain_losses(model, batches[i], committed) for i in drawn]
            masked = [plain_losses(model, batches[i], [*committed, unit]) for i in drawn]
            for meter in (roomy, tight, none):
                assert meter.measure(unit, drawn) == (base, masked)
                assert meter.cached_bytes <= (tight.cache_memory if meter is tight else roomy.cache_memory)
    assert none.cached_bytes == 0


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


@pytest.mark.parametrize("family", ["gpt2", "swin", "timm vit"])
def test_the_kept_bytes_are_those_of_the_outputs_that_the_blocks_give(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 3)
    given = [0] * len(anatomy(model))

    def add(i: int, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        given[i] += sum(x.numel() * x.element_size() for x in outputs if x is not None)

    handles = [layer.block.register_forward_hook(lambda *a, i=i: add(i, a[2])) for i, layer in enumerate(anatomy(model))]
    for batch in batches[:2]:
        plain_losses(model, batch, [])
    for handle in handles:
        handle.remove()
    meter = DamageMeter(model, batches, seed=1)
    meter.measure(Unit(HEAD, 0, 0), [0, 1])
    assert meter.cached_bytes == sum(given) > 0
    meter.commit(Unit(HEAD, 1, 0))
    assert meter.cached_bytes == given[0]


@pytest.mark.parametrize("family", ["gpt2", "swin"])
def test_no_block_is_left_replaced_also_when_a_batch_fails(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches: list[Any] = tiny_batches(model, 2)
    meter = DamageMeter(model, batches, seed=1)
    meter.measure(Unit(HEAD, 1, 0), [0])
    batches[0] = {"labels": batches[0]["labels"]}
    with pytest.raises(KeyError):
        meter.measure(Unit(HEAD, 1, 0), [0])
    assert all("forward" not in layer.block.__dict__ for layer in anatomy(model))
    assert hook_count(model) == 0


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
