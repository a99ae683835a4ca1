from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from secateur.errors import SelectionError
from secateur.model.families import anatomy
from secateur.model.zeroing import zeroed, zeroed_in_parts
from secateur.units import HEAD, KV_GROUP, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, hook_count, logits_of, tiny_batch, tiny_batches

HEADS = [Unit(HEAD, 0, 1), Unit(HEAD, 2, 0)]
GROUPS = [Unit(MLP, 0, 3, GROUP), Unit(MLP, 1, 0, GROUP)]
every_family = pytest.mark.parametrize("name", FAMILIES_TINY)


class Interruption(Exception):
    pass


@every_family
def test_leaving_the_block_leaves_nothing_behind(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batch = tiny_batch(model)
    dense, state = logits_of(model, batch), {key: value.clone() for key, value in model.state_dict().items()}
    assert hook_count(model) == 0
    with zeroed(model, HEADS + GROUPS):
        assert not torch.equal(logits_of(model, batch), dense)
    assert hook_count(model) == 0
    assert torch.equal(logits_of(model, batch), dense)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def entering(model: nn.Module, projections: list[nn.Module], batch: dict[str, Tensor]) -> list[Tensor]:
    """What each projection computes with, behind all hooks that are there already."""
    seen: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[module] = args[0].clone()

    handles = [projection.register_forward_pre_hook(note) for projection in projections]
    logits_of(model, batch)
    for handle in handles:
        handle.remove()
    return [seen[projection] for projection in projections]


@every_family
@pytest.mark.parametrize("kind", [HEAD, KV_GROUP, MLP])
def test_what_enters_a_projection_is_0_in_the_units_ranges_and_as_it_was_elsewhere(name: str, kind: str) -> None:
    model = FAMILIES_TINY[name]()
    layer, batch = anatomy(model)[1], tiny_batch(model)
    if kind == MLP and layer.experts:
        pytest.skip("the channels of experts enter no projection that is a module; tests/test_experts.py looks at their losses")
    for index in range(layer.count(Unit(kind, 1, 0, GROUP))):
        unit = Unit(kind, 1, index, GROUP)
        (part,) = layer.ranges(unit)
        before = [projection for one in anatomy(model)[:1] for projection in one.outs] + [part.projection]
        dense = entering(model, before, batch)
        with zeroed(model, [unit]):
            found = entering(model, before, batch)
        assert dense[-1][..., list(part.channels)].abs().max() > 0
        dense[-1][..., list(part.channels)] = 0
        assert all(torch.equal(one, other) for one, other in zip(dense, found, strict=True))
        assert len(part.channels) == layer.size(unit)


def test_an_exception_inside_the_block_leaves_nothing_behind() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batch = tiny_batch(model)
    dense = logits_of(model, batch)
    with pytest.raises(Interruption), zeroed(model, HEADS + GROUPS):
        logits_of(model, batch)
        raise Interruption
    assert hook_count(model) == 0
    assert torch.equal(logits_of(model, batch), dense)


def test_an_exception_inside_the_models_forward_leaves_nothing_behind() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batch = tiny_batch(model)
    dense = logits_of(model, batch)
    with pytest.raises(IndexError), zeroed(model, HEADS + GROUPS):
        logits_of(model, batch | {"input_ids": batch["input_ids"] + 1000})  # there are no such tokens
    assert hook_count(model) == 0
    assert torch.equal(logits_of(model, batch), dense)


@every_family
def test_a_zeroed_kv_group_is_its_zeroed_heads(name: str) -> None:
    model = FAMILIES_TINY[name]()
    layer, batch = anatomy(model)[1], tiny_batch(model)
    per_kv = layer.heads // layer.kv_heads
    dense = logits_of(model, batch)
    for index in range(layer.kv_heads):
        with zeroed(model, [Unit(HEAD, 1, index * per_kv + h) for h in range(per_kv)]):
            expected = logits_of(model, batch)
        with zeroed(model, [Unit(KV_GROUP, 1, index)]):
            assert torch.equal(logits_of(model, batch), expected)
        with zeroed(model, [Unit(KV_GROUP, 1, index), Unit(HEAD, 1, index * per_kv)]):  # the head twice
            assert torch.equal(logits_of(model, batch), expected)
        assert (expected - dense).abs().max() > 1e-3


@pytest.mark.parametrize("bad", [Unit(HEAD, 0, 3), Unit(KV_GROUP, 0, 3), Unit(MLP, 0, 4, GROUP), Unit(HEAD, 3, 0)], ids=str)
def test_a_unit_that_is_not_there_is_refused_before_anything_is_changed(bad: Unit) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batch = tiny_batch(model)
    dense = logits_of(model, batch)
    with pytest.raises(SelectionError), zeroed(model, [*HEADS, bad]):
        pytest.fail("the block was entered")
    assert hook_count(model) == 0
    assert torch.equal(logits_of(model, batch), dense)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ([Unit(HEAD, 0, 0)], [Unit(HEAD, 0, 1)]),
        ([Unit(MLP, 1, 3, GROUP)], [Unit(MLP, 1, 0, GROUP)]),
        (HEADS, GROUPS),
        (HEADS, HEADS),
    ],
    ids=["the same attention", "the same MLP", "heads and groups", "the same units"],
)
def test_nested_blocks_add_up_and_end_one_by_one(outer: list[Unit], inner: list[Unit]) -> None:
    model = FAMILIES_TINY["llama"]()
    batch = tiny_batch(model)
    with zeroed(model, outer):
        only_outer = logits_of(model, batch)
    with zeroed(model, outer + inner):
        both = logits_of(model, batch)
    with zeroed(model, outer):
        with zeroed(model, inner):
            assert torch.equal(logits_of(model, batch), both)
        assert torch.equal(logits_of(model, batch), only_outer)
    assert hook_count(model) == 0


@pytest.mark.parametrize("unit", [Unit(HEAD, 1, 2), Unit(MLP, 1, 3, GROUP)], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_zeroed_unit_with_non_finite_activations_is_as_silent_as_any_other(unit: Unit, value: float) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batch = tiny_batch(model)
    with zeroed(model, [unit]):
        finite = logits_of(model, batch)
    projection, channels = ("attn.c_attn", slice(24 + 8, 24 + 12)) if unit.kind == HEAD else ("mlp.c_fc", slice(12, 14))
    bias = model.get_submodule(f"transformer.h.1.{projection}").bias
    assert isinstance(bias, nn.Parameter)
    bias.data[channels] = value
    assert not logits_of(model, batch).isfinite().all()
    with zeroed(model, [unit]):
        assert torch.equal(logits_of(model, batch), finite)


def test_zeroing_no_units_is_the_dense_model() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batch = tiny_batch(model)
    dense = logits_of(model, batch)
    with zeroed(model, []):
        assert hook_count(model) == 0
        assert torch.equal(logits_of(model, batch), dense)


def test_the_order_of_the_units_and_naming_one_twice_change_nothing() -> None:
    model = FAMILIES_TINY["llama"]()
    batch = tiny_batch(model)
    with zeroed(model, HEADS + GROUPS):
        once = logits_of(model, batch)
    with zeroed(model, iter([*GROUPS, *HEADS[::-1], HEADS[0]])):
        assert torch.equal(logits_of(model, batch), once)


def test_no_gradient_reaches_a_zeroed_unit_and_it_does_reach_the_others() -> None:
    model = FAMILIES_TINY["llama mha"]()
    batch = tiny_batch(model)
    value = model.get_submodule("model.layers.1.self_attn.v_proj").weight
    assert isinstance(value, nn.Parameter)
    with zeroed(model, [Unit(HEAD, 1, 2)]):
        model(input_ids=batch["input_ids"]).logits.square().sum().backward()
    assert value.grad is not None
    assert (value.grad[8:12] == 0).all()
    assert (value.grad[:8] != 0).all() and (value.grad[12:] != 0).all()


def test_a_zeroed_model_can_be_differentiated_after_a_pass_in_inference_mode() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batch = tiny_batch(model)
    with zeroed(model, HEADS):
        with torch.inference_mode():
            model(input_ids=batch["input_ids"])
        model(input_ids=batch["input_ids"]).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Parts of a batch

PARTS: list[list[Unit]] = [[HEADS[0]], [], [HEADS[1], *GROUPS]]
OTHER_PARTS: list[list[Unit]] = [[GROUPS[1]], [HEADS[0], HEADS[1], GROUPS[0]], [HEADS[0]]]


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@every_family
@pytest.mark.parametrize("parts", [PARTS, OTHER_PARTS], ids=["one, none, several", "a group, several, one"])
def test_each_part_of_a_batch_is_run_without_its_own_units(name: str, parts: list[list[Unit]]) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 3)
    with zeroed_in_parts(anatomy(model), parts):
        together = logits_of(model, joined(batches)).chunk(3)
    assert hook_count(model) == 0
    for batch, units, found in zip(batches, parts, together, strict=True):
        dense = logits_of(model, batch)
        with zeroed(model, units):
            alone = logits_of(model, batch)
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
        assert ((found - dense).abs().max() > 1e-3) == bool(units)


@every_family
def test_the_same_units_in_each_part_are_those_units_in_the_whole(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batch = joined(tiny_batches(model, 3))
    with zeroed(model, HEADS + GROUPS):
        whole = logits_of(model, batch)
    with zeroed_in_parts(anatomy(model), [HEADS + GROUPS, GROUPS + HEADS, iter(HEADS + GROUPS)]):
        assert torch.equal(logits_of(model, batch), whole)


def test_parts_without_any_units_are_the_dense_model_and_hook_nothing() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batch = joined(tiny_batches(model, 3))
    dense = logits_of(model, batch)
    with zeroed_in_parts(anatomy(model), [[], [], []]):
        assert hook_count(model) == 0
        assert torch.equal(logits_of(model, batch), dense)


@pytest.mark.parametrize("name", ["gpt2", "swin"])
def test_units_of_the_whole_and_of_the_parts_add_up(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batch, layers = joined(tiny_batches(model, 3)), anatomy(model)
    with zeroed_in_parts(layers, [[*GROUPS, *part] for part in ([HEADS[0]], [], HEADS)]):
        expected = logits_of(model, batch)
    with zeroed(model, GROUPS), zeroed_in_parts(layers, [[HEADS[0]], [], HEADS]):
        assert torch.equal(logits_of(model, batch), expected)


def test_a_unit_that_is_not_there_is_refused_whichever_part_it_is_of() -> None:
    model = FAMILIES_TINY["gpt2"]()
    with pytest.raises(SelectionError), zeroed_in_parts(anatomy(model), [HEADS, [], [Unit(HEAD, 0, 3)]]):
        pytest.fail("the block was entered")
    assert hook_count(model) == 0


@pytest.mark.parametrize("first_in_inference_mode", [False, True])
def test_a_gradient_reaches_a_unit_from_the_parts_that_have_it_and_from_no_other(first_in_inference_mode: bool) -> None:
    model = FAMILIES_TINY["llama mha"]()
    value = model.get_submodule("model.layers.1.self_attn.v_proj").weight
    assert isinstance(value, nn.Parameter)
    tokens = joined(tiny_batches(model, 3))["input_ids"]
    with zeroed_in_parts(anatomy(model), [[Unit(HEAD, 1, 2)], [], [Unit(HEAD, 1, 0)]]):
        if first_in_inference_mode:
            with torch.inference_mode():
                model(input_ids=tokens)
        for part, without in enumerate([range(8, 12), range(0), range(4)]):  # its heads are 4 wide
            model.zero_grad()
            model(input_ids=tokens).logits.chunk(3)[part].square().sum().backward()
            assert value.grad is not None
            assert value.grad.eq(0).all(1).nonzero().flatten().tolist() == list(without)
