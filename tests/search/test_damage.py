from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakes import losses_of
from secateur.errors import ModelError, SettingError
from secateur.model.families import Layer, anatomy, candidate_units
from secateur.model.losses import output_layer
from secateur.model.shrunk import counting
from secateur.search.damage import DamageMeter
from secateur.search.select import Asked
from secateur.selection import Pull
from secateur.units import HEAD, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, deep_gpt2, deep_llama, hook_count, loss_without, tiny_batches

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


def recorded(unit: Unit, batches: tuple[int, ...], base: tuple[float, ...], masked: tuple[float, ...]) -> Pull:
    """A pull as a journal holds it."""
    return Pull(0, unit, batches, base, masked, damage=0.0, reward=0.5, forwards=0)


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
    found_base, found_masked = losses_of(meter, unit, drawn)
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
    base, masked = losses_of(DamageMeter(model, batches, batches_per_pull=1), HEAD_1, [0])
    assert base + masked == pytest.approx(expected, abs=1e-6)


def test_a_committed_unit_is_gone_from_the_base_and_the_masked_loss_of_later_measurements() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 3)
    meter = DamageMeter(model, batches)
    losses_of(meter, GROUP_3, [0, 2])
    meter.commit(HEAD_1)
    meter.commit(HEAD_2)
    base, masked = losses_of(meter, GROUP_3, [0, 2])
    chosen = [batches[0], batches[2]]
    assert base == pytest.approx(losses_by_hand(model, chosen, [HEAD_1, HEAD_2]), abs=1e-6)
    assert masked == pytest.approx(losses_by_hand(model, chosen, [HEAD_1, HEAD_2, GROUP_3]), abs=1e-6)
    assert hook_count(model) == 0


def test_the_base_loss_of_a_batch_is_measured_once_until_a_unit_is_committed() -> None:
    model = FAMILIES_TINY["gpt2"]()
    passes = Passes(model)
    meter = DamageMeter(model, tiny_batches(model, 3))
    losses_of(meter, HEAD_1, [0, 1])
    assert passes.count == meter.forwards == 4  # 2 batches, with and without
    losses_of(meter, HEAD_2, [0, 1])
    assert passes.count == meter.forwards == 6  # 3 passes a batch for 2 units, not 4
    losses_of(meter, GROUP_3, [1, 2])
    assert passes.count == meter.forwards == 9  # batch 2 is new
    meter.commit(HEAD_1)
    losses_of(meter, HEAD_2, [0, 1])
    assert passes.count == meter.forwards == 13  # a new base
    assert meter.pulls == 4


def test_shared_base_losses_give_the_damage_that_separate_measurements_give() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    shared = DamageMeter(model, batches)
    losses_of(shared, HEAD_2, [0, 1, 2, 3])
    assert losses_of(shared, HEAD_1, [3, 1]) == losses_of(DamageMeter(model, batches), HEAD_1, [3, 1])


def test_recalled_losses_stand_for_measured_ones_until_a_unit_is_committed() -> None:
    model = FAMILIES_TINY["gpt2"]()
    passes = Passes(model)
    meter = DamageMeter(model, tiny_batches(model, 2))
    meter.recall(recorded(HEAD_1, (0, 1), (5.0, 6.0), (7.0, 8.0)))
    assert losses_of(meter, HEAD_1, [1, 0]) == ([6.0, 5.0], [8.0, 7.0])
    assert (passes.count, meter.forwards, meter.pulls) == (0, 0, 2)
    assert losses_of(meter, GROUP_3, [1, 0])[0] == [6.0, 5.0]
    assert passes.count == meter.forwards == 2
    meter.commit(HEAD_2)
    base, masked = losses_of(meter, HEAD_1, [0])
    assert 5.0 not in base
    assert 7.0 not in masked


def test_a_unit_is_measured_once_on_a_batch_until_a_unit_is_committed() -> None:
    model = FAMILIES_TINY["gpt2"]()
    passes = Passes(model)
    meter = DamageMeter(model, tiny_batches(model, 3))
    first = losses_of(meter, HEAD_1, [0, 1])
    again = losses_of(meter, HEAD_1, [1, 2])
    assert (again[0][0], again[1][0]) == (first[0][1], first[1][1])
    assert passes.count == meter.forwards == 6  # batch 2 alone is new, with and without
    meter.commit(HEAD_2)
    losses_of(meter, HEAD_1, [1])
    assert passes.count == meter.forwards == 8


def test_a_seed_fixes_the_draws_whatever_is_measured_between_them() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 6)
    plain, busy, other = (DamageMeter(model, batches, batches_per_pull=3, seed=seed) for seed in (1, 1, 2))
    draws = []
    for _ in range(5):
        draws.append(busy.draw())
        losses_of(busy, HEAD_1, draws[-1])
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
    losses_of(meter, HEAD_1, [0, 2])
    with pytest.raises(ModelError, match=r"batch 1\b.*nan"):
        losses_of(meter, HEAD_1, [0, 1])
    assert hook_count(model) == 0


@pytest.mark.parametrize("batches_per_pull", [-1, 0, 4])
def test_batches_per_pull_out_of_range_is_a_setting_error_that_says_the_range(batches_per_pull: int) -> None:
    model = FAMILIES_TINY["gpt2"]()
    with pytest.raises(SettingError, match=rf"per.pull.*{batches_per_pull}\b.*1 to 3\b"):
        DamageMeter(model, tiny_batches(model, 3), batches_per_pull=batches_per_pull)


def test_a_model_in_train_mode_is_measured_without_dropout_and_left_as_it_was() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    expected = losses_of(DamageMeter(model, batches), HEAD_1, [0, 1])
    model.train()
    model.get_submodule("transformer.h.1").eval()
    training = [module.training for module in model.modules()]
    assert float(model(**batches[0]).loss.detach()) != pytest.approx(expected[0][0], abs=1e-4), "this model has no dropout"
    assert losses_of(DamageMeter(model, batches), HEAD_1, [0, 1]) == expected
    assert [module.training for module in model.modules()] == training


def test_measuring_leaves_no_hook_and_no_gradient() -> None:
    model = FAMILIES_TINY["gpt2"]()
    meter = DamageMeter(model, tiny_batches(model, 2))
    meter.commit(HEAD_2)
    meter.damage(HEAD_1)
    assert hook_count(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@contextmanager
def block_runs(model: nn.Module) -> Iterator[list[int]]:
    """How often each block really runs meanwhile; a block that hands back a kept output does not reach its insides."""
    counts = [0] * len(anatomy(model))

    def add(i: int) -> None:
        counts[i] += 1

    handles = [layer.mlp_out.register_forward_hook(lambda *_, i=i: add(i)) for i, layer in enumerate(anatomy(model))]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def most_threads(model: nn.Module) -> int:
    """How many threads runs may have without another last bit: a product of few rows, as experts make, depends on them."""
    return 1 if any(layer.experts for layer in anatomy(model)) else 2


MODELS = FAMILIES_TINY | {"gpt2 deep": deep_gpt2, "llama deep": deep_llama}  # deep enough to thin the outputs twice


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
    loss_without(model, batch, [])
    for handle in handles:
        handle.remove()
    return given


@pytest.mark.slow
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
        losses_of(roomy, unit, range(4))
    roomy.commit(units[0])
    losses_of(roomy, units[-1], range(4))
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
    fresh = set(units)  # of this step: not measured and not committed
    for step in range(10):
        unit = units[rng.integers(len(units))]
        fresh.discard(unit)
        if step % 4 == 3:
            committed.append(unit)
            fresh = set(units) - set(committed)
            for meter in meters:
                meter.commit(unit)
            continue
        drawn = [int(i) for i in rng.choice(4, size=4 if step % 4 == 0 else 2, replace=False)]
        base = [loss_without(model, batches[i], committed) for i in drawn]
        masked = [loss_without(model, batches[i], [*committed, unit]) for i in drawn]
        for meter in meters:
            with threads(most_threads(model) if meter in (side_by_side, tight_side_by_side) else 1):
                assert losses_of(meter, unit, drawn) == (base, masked)
            assert meter.cached_bytes <= meter.cache_memory
    assert not roomy.cache_was_full
    assert not side_by_side.cache_was_full
    assert all(meter.cache_was_full for meter in (inside_dropped, thinned, tight_side_by_side, evicted, nothing_fits))
    assert nothing_fits.cached_bytes == none.cached_bytes == 0
    assert evicted.cached_bytes > 0
    assert {meter.forwards for meter in meters} == {none.forwards}
    assert hook_count(model) == 0

    def runs_from_the_first_block(meter: DamageMeter, layer: int) -> int:
        """For how many of the batches a masked run for a unit in `layer` starts there: all base runs are made."""
        unit = min(unit for unit in fresh if unit.layer == layer)
        with block_runs(model) as runs:
            losses_of(meter, unit, range(4))
        return runs[0]

    for meter in (thinned, evicted):  # with every second output dropped, that of the first block is gone on all batches
        assert (runs_from_the_first_block(meter, 1) == 4) == (n_layers > 3)
    assert 1 <= runs_from_the_first_block(evicted, n_layers - 1) < 4  # some batches are gone, not all
    assert runs_from_the_first_block(roomy, 1) == 0
    assert runs_from_the_first_block(none, 1) == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_whole_request_measured_side_by_side_or_stacked_gives_the_same_losses_and_the_same_counts(family: str) -> None:
    model = MODELS[family]()
    batches = tiny_batches(model, 4)
    units = candidate_units(model, "both", GROUP)
    single = DamageMeter(model, batches, lanes=1)
    side_by_side = DamageMeter(model, batches, lanes=2)
    stacked = DamageMeter(model, batches, lanes=1, stack=3)
    both = DamageMeter(model, batches, lanes=2, stack=3, cache_memory=20_000)
    rng = np.random.default_rng(6)
    for _ in range(3):
        pulls: list[Asked] = [
            (units[rng.integers(len(units))], tuple(map(int, rng.choice(4, 2, replace=False)))) for _ in range(5)
        ]
        requests = {meter: meter.measure(pulls) for meter in (side_by_side, stacked, both)}
        for expected in single.measure(pulls):
            for meter, request in requests.items():
                with threads(1 if meter is stacked else most_threads(model)):
                    found = next(request)
                assert found.base_losses == expected.base_losses
                digits = 0.0 if meter.stack == 1 else 1e-6  # side by side, they are the same to the bit
                assert found.masked_losses == pytest.approx(expected.masked_losses, rel=digits, abs=digits)
                assert found.forwards == expected.forwards
                assert (meter.pulls, meter.forwards) == (single.pulls, single.forwards)
                assert meter.cached_bytes <= meter.cache_memory
        assert [next(request, None) for request in requests.values()] == [None] * 3
        for meter in (single, *requests):
            meter.commit(pulls[0][0])
    assert hook_count(model) == 0


def test_each_pull_of_a_request_is_measured_when_it_is_asked_for_and_says_what_it_took() -> None:
    model = FAMILIES_TINY["gpt2"]()
    passes = Passes(model)
    meter = DamageMeter(model, tiny_batches(model, 3), lanes=1)
    request = meter.measure([(HEAD_1, (0, 1)), (HEAD_2, (1, 2)), (HEAD_1, (1, 0)), (HEAD_2, (0, 2))])
    assert (passes.count, meter.forwards, meter.pulls) == (0, 0, 0)
    made = 0
    for pull, forwards in enumerate((4, 3, 0, 1)):  # with and without; one new base; nothing new; one new masked loss
        assert next(request).forwards == forwards
        made += forwards
        assert (passes.count, meter.forwards, meter.pulls) == (made, made, pull + 1)
    assert list(request) == []


@pytest.mark.parametrize(("stack", "lanes", "ahead"), [(1, 1, 0), (1, 2, 1), (2, 1, 1), (2, 2, 3), (9, 1, 3)])
def test_pulls_of_one_request_are_measured_beside_the_first_and_counted_when_they_are_asked_for(
    stack: int, lanes: int, ahead: int
) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 1)
    meter = DamageMeter(model, batches, batches_per_pull=1, stack=stack, lanes=lanes)
    losses_of(meter, GROUP_3, [0])  # the base run
    units = [HEAD_1, Unit(HEAD, 1, 0), Unit(HEAD, 1, 2), Unit(HEAD, 2, 0)]
    by_hand = [loss_without(model, batches[0], [unit]) for unit in units]
    request = meter.measure([(unit, (0,)) for unit in units])
    found = [next(request)]
    passes = Passes(model)  # only now: a model that is watched runs one pull after another
    for i in range(1, 4):
        found.append(next(request))
        assert (meter.pulls, meter.forwards) == (2 + i, 3 + i)
        assert (passes.count == 0) == (i <= ahead)
    assert [one.masked_losses[0] for one in found] == pytest.approx(by_hand, abs=1e-6)
    assert [one.forwards for one in found] == [1] * 4


def test_a_stack_makes_one_run_of_several_and_only_of_batches_of_one_shape() -> None:
    model = FAMILIES_TINY["llama"]()
    batches = tiny_batches(model, 3)
    batches[2] = {name: tensor[:, :7] for name, tensor in batches[2].items()}
    passes = Passes(model)
    pulls = [(unit, (0, 1, 2)) for unit in (HEAD_1, HEAD_2, GROUP_3)]
    expected = [losses_of(DamageMeter(model, batches), *pull) for pull in pulls]
    passes.count = 0
    meter = DamageMeter(model, batches, stack=9)
    request = meter.measure(pulls)
    first = next(request)
    assert passes.count == 3 + 2  # the base runs, one for two batches times three units, one for the shorter batch
    found = [first, *request]
    assert passes.count == 5
    for one, (base_by_hand, masked_by_hand) in zip(found, expected, strict=True):
        assert list(one.base_losses) == base_by_hand
        assert one.masked_losses == pytest.approx(masked_by_hand, abs=1e-6)
    assert meter.forwards == 12


@pytest.mark.parametrize(("stack", "lanes"), [(1, 2), (3, 1), (2, 2)])
def test_a_request_that_is_given_up_half_way_changes_no_number_of_those_after_it(stack: int, lanes: int) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    units = candidate_units(model, "both", GROUP)[::4]
    meter = DamageMeter(model, batches, stack=stack, lanes=lanes)
    given_up = meter.measure([(unit, (0, 1)) for unit in units])
    assert next(given_up).forwards == 2 + 2
    made: list[Asked] = [(units[-1], (1, 0)), (units[2], (3, 2)), (units[0], (0, 1))]  # another order, and other batches
    by_hand = [[[loss_without(model, batches[i], gone) for i in drawn] for gone in ([], [unit])] for unit, drawn in made]
    digits = 0.0 if stack == 1 else 1e-6
    found = list(meter.measure(made))
    for one, (base, masked) in zip(found, by_hand, strict=True):
        assert list(one.base_losses) == base
        assert one.masked_losses == pytest.approx(masked, abs=digits, rel=0)
    assert [one.forwards for one in found] == [2, 4, 0]  # the last is what the first request gave
    assert (meter.pulls, meter.forwards) == (4, 10)
    meter.commit(units[1])
    found_base, found_masked = losses_of(meter, units[3], [0, 1])
    assert found_base == [loss_without(model, batches[i], [units[1]]) for i in (0, 1)]
    by_hand_masked = [loss_without(model, batches[i], [units[1], units[3]]) for i in (0, 1)]
    assert found_masked == pytest.approx(by_hand_masked, abs=digits, rel=0)
    assert (meter.pulls, meter.forwards) == (5, 10 + 4)


@pytest.mark.parametrize(("stack", "lanes"), [(1, 2), (3, 1), (2, 2)])
def test_recalled_losses_are_not_measured_again_by_stacks_and_lanes(stack: int, lanes: int) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 3)
    meter = DamageMeter(model, batches, stack=stack, lanes=lanes)
    meter.recall(recorded(HEAD_1, (0, 1), (5.0, 6.0), (7.0, 8.0)))
    request = meter.measure([(HEAD_2, (1, 2)), (HEAD_1, (1, 0)), (GROUP_3, (0, 1))])
    base, masked, forwards, *_ = next(request)
    assert base == (6.0, loss_without(model, batches[2], []))
    assert masked == pytest.approx([loss_without(model, batches[i], [HEAD_2]) for i in (1, 2)], abs=1e-6)
    assert (meter.pulls, meter.forwards, forwards) == (2, 3, 3)  # the base loss of batch 2, and two masked ones
    assert next(request)[:3] == ((6.0, 5.0), (8.0, 7.0), 0)
    assert (meter.pulls, meter.forwards) == (3, 3)
    meter.recall(recorded(GROUP_3, (0, 1), (5.0, 6.0), (9.0, 10.0)))  # whether it was measured ahead or not
    assert next(request)[:3] == ((5.0, 6.0), (9.0, 10.0), 0)
    assert (meter.pulls, meter.forwards) == (5, 3)


def test_a_hooked_model_is_run_itself_and_gives_the_same_losses_with_lanes() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    expected = [[loss_without(model, batch, gone) for batch in batches] for gone in ([], [HEAD_1])]
    passes = Passes(model)
    assert list(losses_of(DamageMeter(model, batches, lanes=2), HEAD_1, range(4))) == expected
    assert passes.count == 8
    assert hook_count(model) == 1
    unwatched = FAMILIES_TINY["gpt2"]()
    assert list(losses_of(DamageMeter(unwatched, batches, lanes=2), HEAD_1, range(4))) == expected


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
    dense = loss_without(model, batch, [])
    for layer in anatomy(model):
        CHANGES[change](layer)
    assert loss_without(model, batch, []) != pytest.approx(dense, abs=1e-4)
    meter = DamageMeter(model, batches, batches_per_pull=1, lanes=2)
    for committed in ([], [HEAD_2]):
        for unit in committed:
            meter.commit(unit)
        for unit in units:
            by_hand = [loss_without(model, batch, committed)], [loss_without(model, batch, [*committed, unit])]
            assert losses_of(meter, unit, [0]) == by_hand


def test_a_model_in_train_mode_is_measured_by_copies_without_dropout_and_left_as_it_was() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    expected = [[loss_without(model, batch, gone) for batch in batches] for gone in ([], [HEAD_1])]
    model.train()
    model.get_submodule("transformer.h.1").eval()
    training = [module.training for module in model.modules()]
    meter = DamageMeter(model, batches, lanes=2)
    assert list(losses_of(meter, HEAD_1, range(4))) == expected
    assert losses_of(meter, HEAD_1, [2, 0]) == ([expected[0][2], expected[0][0]], [expected[1][2], expected[1][0]])
    assert [module.training for module in model.modules()] == training
    assert hook_count(model) == 0


@pytest.mark.parametrize(("setting", "match"), [({"stack": 0}, r"stack.*\b0\b"), ({"lanes": 0}, r"lanes.*\b0\b")])
def test_a_stack_or_lanes_below_1_are_a_setting_error(setting: dict[str, int], match: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    with pytest.raises(SettingError, match=match):
        DamageMeter(model, batches, stack=setting.get("stack", 1), lanes=setting.get("lanes"))


def test_a_masked_run_starts_at_the_unit_s_block_and_a_base_run_at_the_first_block_that_changed() -> None:
    model = FAMILIES_TINY["llama"]()
    meter = DamageMeter(model, tiny_batches(model, 2), seed=1)
    with block_runs(model) as runs:
        losses_of(meter, Unit(HEAD, 2, 0), [0])
    assert runs == [1, 1, 2]  # all blocks for the base loss, the last one again
    with block_runs(model) as runs:
        losses_of(meter, Unit(HEAD, 1, 0), [0])
    assert runs == [0, 1, 1]
    meter.commit(Unit(HEAD, 1, 3))
    with block_runs(model) as runs:
        losses_of(meter, Unit(MLP, 2, 0, GROUP), [0])
    assert runs == [0, 1, 2]  # the base run goes on from block 1


def test_without_cache_memory_every_run_is_a_whole_one() -> None:
    model = FAMILIES_TINY["gpt2"]()
    meter = DamageMeter(model, tiny_batches(model, 2), seed=1, cache_memory=0)
    with block_runs(model) as runs:
        losses_of(meter, Unit(HEAD, 2, 0), [0])
    assert runs == [2, 2, 2]


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
        meter.recall(recorded(Unit(kind, 0, 0, GROUP), (0, 1), (1.0, 1.0), (1.0, 1.0)))
        losses_of(meter, Unit(kind, 0, 0, GROUP), [0, 1])  # known: tells the kind and runs nothing
    assert meter.cached_bytes == 0
    meter.commit(Unit(HEAD, 0, 1))
    losses_of(meter, Unit(kinds[0], 0, 0, GROUP), [0, 1])
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
        losses_of(meter, unit, [0, 1])
        batches[0] = {"labels": good["labels"]}
        with pytest.raises(KeyError):
            losses_of(meter, again, [0, 1])
        assert replaced(model) == []
        assert hook_count(model) == 0
        batches[0] = good
        for last in (again, Unit(kind, 2, 1, GROUP)):  # more runs than there are lanes
            assert losses_of(meter, last, [0, 1])[1] == [loss_without(model, batch, [last]) for batch in batches]


@pytest.mark.parametrize("kind", [HEAD, MLP])
@pytest.mark.parametrize("family", FAMILIES_TINY)
def test_no_module_is_left_replaced_when_a_run_fails_half_way(family: str, kind: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 1)
    layers = anatomy(model)
    meter = DamageMeter(model, batches, batches_per_pull=1)
    losses_of(meter, Unit(kind, 1, 0, GROUP), [0])
    stood_in: list[str] = []

    def fail(*args: Any) -> None:
        stood_in.extend(replaced(model))
        raise ZeroDivisionError

    handle = layers[1].mlp_out.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        losses_of(meter, Unit(kind, 1, 1, GROUP), [0])
    handle.remove()
    names = {module: name for name, module in model.named_modules()}
    inside = [layers[1].attention, *layers[1].mlp_in] if kind == MLP else [counting(layers[1].attention)]
    inside += [layers[1].mlp_out] if kind == MLP and layers[1].experts else []
    head = [layer] if (layer := output_layer(model)) else []  # its pieces run by themselves
    assert sorted(stood_in) == sorted(names[module] for module in (layers[0].block, *inside, *head))
    assert replaced(model) == []
    assert hook_count(model) == 0
    unit = Unit(kind, 1, 1, GROUP)
    assert losses_of(meter, unit, [0])[1] == [loss_without(model, batches[0], [unit])]


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


@pytest.mark.parametrize(
    ("per_step", "per_pull", "match"),
    [(1, 2, r"per.pull.*\b2\b.*\b1\b"), (6, 2, r"per.step.*\b6\b.*\b5\b"), (-1, 1, r"per.step.*-1\b.*\b5\b")],
)
def test_batches_per_step_out_of_range_is_a_setting_error_that_says_the_range(per_step: int, per_pull: int, match: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    with pytest.raises(SettingError, match=match):
        DamageMeter(model, tiny_batches(model, 5), batches_per_pull=per_pull, batches_per_step=per_step)
