from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from secateur.cut.proof import prove
from secateur.cut.surgery import Kept, check_uniform, kept_of, parameters_left, shrink
from secateur.errors import SelectionError, SettingError, UnsupportedModel
from secateur.model.accounting import effective_parameters, zeroed_percent
from secateur.model.families import Layer, Range, anatomy, candidate_units, expert_weights, input_dim, layer_of, weight_of
from secateur.model.shrunk import CODE, Shrunk, layout_of
from secateur.model.zeroing import zeroed, zeroed_in_parts
from secateur.settings import FREE, UNIFORM
from secateur.units import HEAD, KV_GROUP, MLP, Unit
from tiny import CAUSAL, CUTTABLE, EVERYWHERE, FAMILIES_TINY, GROUP, TIMM, hook_count, logits_of, randomised, tf, tiny_batch

GROUPED = [
    name
    for name in CAUSAL
    if name in CUTTABLE and name not in ("gpt2", "opt", "opt post-norm", "gpt_neox", "gpt_neox sequential")
]
STOCK = [name for name in CUTTABLE if name not in TIMM]  # transformers' families
# DINOv2's config says the width of the MLPs as a whole multiple; SigLIP's sets that of the pooling head, which stays, too.
EVEN = [name for name in STOCK if name not in ("dinov2", "siglip_vision_model")]
every_family = pytest.mark.parametrize("name", CUTTABLE)
# One for all tests, so that each of them would see if another had changed it.
dense: Callable[[str], Any] = functools.cache(lambda name: FAMILIES_TINY[name]())

# Of llama's 4 heads over 2 K/V heads: the 1st K/V head keeps one head and the 2nd two; all; the 2nd K/V head keeps one.
UNEVEN = [Unit(HEAD, 0, 0), Unit(MLP, 1, 2, GROUP), Unit(HEAD, 2, 0), Unit(HEAD, 2, 1), Unit(HEAD, 2, 3)]


def all_of(model: nn.Module, target: str, *layers: int) -> list[Unit]:
    return [unit for unit in candidate_units(model, target, GROUP) if unit.layer in layers]


def some_cuts(model: nn.Module, target: str) -> list[list[Unit]]:
    """Many at random; the first block emptied, the middle one, and the last with a few at random."""
    units, rng = candidate_units(model, target, GROUP), random.Random(target)
    few, many = rng.sample(units, max(1, len(units) // 5)), rng.sample(units, 2 * len(units) // 3)
    return [many, all_of(model, target, 0), all_of(model, target, 1), few + all_of(model, target, len(anatomy(model)) - 1)]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def zeroed_logits(model: nn.Module, units: Sequence[Unit], batch: dict[str, Tensor]) -> Tensor:
    with zeroed(model, units):
        return logits_of(model, batch)


def affected(model: nn.Module, units: Sequence[Unit]) -> set[str]:
    """The names of the parameters that a block loses a part of, by their last words; not which part."""
    words = {
        HEAD: (
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "out_proj",
            "attn.c_",
            "query_key",
            "attention.dense",
            "qkv",
            "attn.proj",
            "attention.self.",
            "attention.output.dense",
            "_lin.",
            "attn.W",
        ),
        MLP: (
            *("gate_proj", "up_proj", "down_proj", "fc1", "fc2", "c_fc", "mlp.c_proj", "dense_"),
            *("intermediate.dense", "<output.dense", "ffn.lin", "mlp.W"),
        ),
    }
    outs = (
        *("o_proj.bias", "out_proj.bias", "c_proj.bias", "attn.proj.bias", "fc2.bias", "4h_to_h.bias"),
        *("attention.dense.bias", "output.dense.bias", "out_lin.bias", "lin2.bias"),
    )
    layers, names = anatomy(model), set()
    for unit in units:
        block = layer_of(layers, unit).name + "."
        for name, _ in model.named_parameters():
            rest = name.removeprefix(block)
            if (  # < is where the names of the block itself begin
                rest != name
                and "shared_expert" not in rest
                and (any(word in f"<{rest}" for word in words[unit.side]) or ("bias_table" in rest and unit.side == HEAD))
            ):
                names.add(name)
    return {name for name in names if not name.endswith(outs)}


# The promise, for every family and every target


@every_family
@pytest.mark.parametrize("target", EVERYWHERE)
def test_a_cut_model_gives_the_logits_of_the_zeroed_one_with_the_parameters_that_were_foretold(name: str, target: str) -> None:
    model = dense(name)
    batch, total = tiny_batch(model), count(model)
    for units in some_cuts(model, target):
        small = shrink(model, units)
        close(logits_of(small, batch), zeroed_logits(model, units, batch))
        assert count(small) == parameters_left(model, units) < total
        assert count(small) == total - by_hand_gone(model, units)
        left = [(len(kept.heads), len(kept.kv_heads), len(kept.channels)) for kept in kept_of(anatomy(model), units)]
        assert [(layer.heads, layer.kv_heads, layer.mlp_width) for layer in anatomy(small)] == left
        assert hook_count(small) == 0


def by_hand_gone(model: nn.Module, units: Sequence[Unit]) -> int:
    """The parameters that go, from the shapes alone: 4 (or 3) matrices and their biases for each head or channel that goes."""
    gone = 0
    for i, layer in enumerate(anatomy(model)):
        here = [unit for unit in units if unit.layer == i]
        per_kv = layer.heads // layer.kv_heads
        heads = {unit.index for unit in here if unit.kind == HEAD}
        heads |= {h for unit in here if unit.kind == KV_GROUP for h in range(unit.index * per_kv, (unit.index + 1) * per_kv)}
        kv_heads = {k for k in range(layer.kv_heads) if {k * per_kv + h for h in range(per_kv)} <= heads}
        channels = {c for unit in here if unit.kind == MLP for c in range(layer.mlp_width) if c // GROUP == unit.index}
        biased = layer.qkv[0].bias is not None
        mlp_biased = not layer.experts and layer.mlp_in[0].bias is not None
        gone += layer.head_dim * (len(heads) * (2 * layer.width + biased) + len(kv_heads) * (2 * layer.width + 2 * biased))
        gone += len(channels) * (layer.width * (2 + layer.gated) + mlp_biased) * max(1, layer.experts)
        if "bias_table" in "".join(key for key, _ in layer.attention.named_parameters()):
            gone += len(heads) * 9  # Swin's windows of 2 x 2 have 9 relative positions
    return gone


@every_family
def test_the_model_itself_is_left_alone_and_what_was_not_cut_is_an_equal_copy_of_it(name: str) -> None:
    model: Any = FAMILIES_TINY[name]()
    batch = tiny_batch(model)
    before, logits = copy.deepcopy(model.state_dict()), logits_of(model, batch)
    config = model.config.to_dict() if hasattr(model, "config") else None
    kinds = [type(module) for module in model.modules()]
    told = [{k: v for k, v in vars(module).items() if isinstance(v, int | float | str)} for module in model.modules()]
    units = [Unit(KV_GROUP, 0, 0), Unit(MLP, 1, 3, GROUP), *all_of(model, "both", 2)]
    small = shrink(model, units)

    assert list(model.state_dict()) == list(before) == list(small.state_dict())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert [type(module) for module in model.modules()] == kinds
    assert told == [{k: v for k, v in vars(module).items() if isinstance(v, int | float | str)} for module in model.modules()]
    assert hook_count(model) == 0 and (config is None or model.config.to_dict() == config)
    assert layout_of(model) is None and not hasattr(model, "model_args")

    changed = affected(model, units)
    theirs = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for key, tensor in small.state_dict().items():
        assert tensor.numel() == 0 or tensor.data_ptr() not in theirs, key
        assert tensor.is_contiguous()
        if key in changed:
            assert tensor.shape != before[key].shape, key
        else:
            assert torch.equal(tensor, before[key]), key
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.fill_(7.0)
    assert torch.equal(logits_of(model, batch), logits)


@every_family
def test_what_a_parameter_and_a_module_are_set_to_stays(name: str) -> None:
    model = FAMILIES_TINY[name]()
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 != 0)
    anatomy(model)[0].block.train()
    small = shrink(model, [Unit(HEAD, 0, 1), *all_of(model, "both", 1), Unit(MLP, 2, 0, GROUP)])
    required = [parameter.requires_grad for parameter in model.parameters()]
    assert [parameter.requires_grad for parameter in small.parameters()] == required
    assert [module.training for module in small.modules()] == [module.training for module in model.modules()]
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_leaf for parameter in small.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gemma2", "vit", "swin", "timm vit"])
def test_a_model_of_half_precision_is_cut_in_its_own(name: str, dtype: torch.dtype) -> None:
    model = FAMILIES_TINY[name]().to(dtype)
    units = [Unit(HEAD, 0, 1), Unit(MLP, 1, 3, GROUP), *all_of(model, "both", 2)]
    small = shrink(model, units)
    assert {parameter.dtype for parameter in small.parameters()} == {dtype}
    full = shrink(copy.deepcopy(model).float(), units).state_dict()
    assert all(torch.equal(tensor, full[key].to(dtype)) for key, tensor in small.named_parameters())


@every_family
def test_no_units_are_a_copy_in_the_same_class(name: str) -> None:
    model = dense(name)
    small = shrink(model, [])
    assert small is not model and type(small) is type(model) and layout_of(small) is None
    assert torch.equal(logits_of(small, tiny_batch(model)), logits_of(model, tiny_batch(model)))


def test_the_order_of_units_and_naming_one_twice_change_nothing_and_an_iterator_will_do() -> None:
    model = dense("llama")
    once = shrink(model, UNEVEN).state_dict()
    again = shrink(model, iter([*UNEVEN[::-1], UNEVEN[0], Unit(KV_GROUP, 2, 0)])).state_dict()  # all its heads go in any case
    assert all(torch.equal(tensor, again[key]) for key, tensor in once.items())


@pytest.mark.parametrize("make", [shrink, parameters_left, check_uniform], ids=lambda make: make.__name__)
@pytest.mark.parametrize("bad", [Unit(HEAD, 0, 4), Unit(KV_GROUP, 0, 2), Unit(MLP, 0, 4, GROUP), Unit(KV_GROUP, 3, 0)], ids=str)
def test_a_unit_that_is_not_there_is_refused(make: Callable[..., Any], bad: Unit) -> None:
    with pytest.raises(SelectionError, match=str(bad)):
        make(dense("llama"), [*UNEVEN, bad])


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(SettingError, match=r"layout.*'uniforn'.*free, uniform"):
        shrink(dense("llama"), [], "uniforn")


def test_a_gate_after_the_heads_is_refused() -> None:
    model = randomised(copy.deepcopy(dense("timm vit")))
    attention = anatomy(model)[1].attention
    assert isinstance(attention, Attention)
    attention.gate = nn.Linear(12, 12)
    with pytest.raises(UnsupportedModel, match=r"blocks\.1.*gate"):
        shrink(model, [Unit(HEAD, 0, 0)])


# By hand


def rows(*heads: int, of: int = 4) -> list[int]:
    return [h * of + c for h in heads for c in range(of)]


def expect(small: nn.Module, model: nn.Module, block: str, expected: dict[str, tuple[int, list[int]]]) -> None:
    """Each parameter named is the model's at the indices of the dimension given; no other of the block changed."""
    for key, tensor in model.named_parameters():
        if key.startswith(block + "."):
            dim, indices = expected.get(key.removeprefix(block + "."), (0, list(range(tensor.shape[0]))))
            assert torch.equal(small.get_parameter(key), tensor[indices] if dim == 0 else tensor[:, indices]), key


def test_gpt2s_packed_conv1d_loses_the_columns_of_q_k_and_v_and_the_rows_of_the_output() -> None:
    model = dense("gpt2")  # width 12, 3 heads of 4: Q is columns 0-11 of c_attn, K 12-23, V 24-35
    small: Any = shrink(model, [Unit(HEAD, 1, 1), Unit(MLP, 1, 0, GROUP), Unit(MLP, 1, 3, GROUP)])
    packed = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27, 32, 33, 34, 35]
    middle = [4, 5, 6, 7, 8, 9, 10, 11]
    expected = {"attn.c_attn.weight": (1, packed), "attn.c_attn.bias": (0, packed), "attn.c_proj.weight": (0, packed[:8])}
    expected |= {"mlp.c_fc.weight": (1, middle), "mlp.c_fc.bias": (0, middle), "mlp.c_proj.weight": (0, middle)}
    expect(small, model, "transformer.h.1", expected)
    expect(small, model, "transformer.h.0", {})
    attention, mlp = small.transformer.h[1].attn, small.transformer.h[1].mlp
    assert (attention.num_heads, attention.split_size, attention.head_dim, attention.c_attn.nf) == (2, 8, 4, 24)
    assert (attention.c_proj.nx, attention.c_proj.nf, mlp.c_fc.nf, mlp.c_proj.nx) == (8, 12, 8, 8)


def test_gpt_neox_keeps_q_k_and_v_of_a_head_together() -> None:
    model = dense("gpt_neox")  # width 24, 3 heads of 8: rows 24-47 of the packed projection are q, k and v of head 1
    small = shrink(model, [Unit(HEAD, 2, 1)])
    packed, inner = list(range(24)) + list(range(48, 72)), list(range(8)) + list(range(16, 24))
    names = {"query_key_value.weight": (0, packed), "query_key_value.bias": (0, packed), "dense.weight": (1, inner)}
    expect(small, model, "gpt_neox.layers.2", {f"attention.{key}": value for key, value in names.items()})


def test_timms_packed_qkv_loses_the_rows_of_each_third() -> None:
    model = dense("timm vit")  # width 12, 3 heads of 4
    small: Any = shrink(model, [Unit(HEAD, 0, 0), Unit(HEAD, 0, 2), Unit(MLP, 0, 1, GROUP)])
    packed, channels = [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31], [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14]
    expected = {"attn.qkv.weight": (0, packed), "attn.qkv.bias": (0, packed), "attn.proj.weight": (1, [4, 5, 6, 7])}
    expected |= {"mlp.fc1.weight": (0, channels), "mlp.fc1.bias": (0, channels), "mlp.fc2.weight": (1, channels)}
    expect(small, model, "blocks.0", expected)
    assert (small.blocks[0].attn.num_heads, small.blocks[0].attn.head_dim, small.blocks[0].attn.attn_dim) == (1, 4, 4)
    assert small.secateur["layers"][0] == {"block": "blocks.0", "heads": 1, "kv_heads": 1, "head_dim": 4, "mlp_width": 11}


@pytest.mark.parametrize(
    ("name", "block", "table"),
    [
        ("swin", "swin.encoder.layers.1.blocks.0", "attention.relative_position_bias.relative_position_bias_table"),
        ("timm swin", "layers.1.blocks.0", "attn.relative_position_bias_table"),
    ],
)
def test_swins_table_of_relative_positions_loses_the_columns_of_the_heads(name: str, block: str, table: str) -> None:
    model = dense(name)  # block 2 is the first of the second stage: width 24, 6 heads of 4
    small = shrink(model, [Unit(HEAD, 2, 0), Unit(HEAD, 2, 4)])
    kept = rows(1, 2, 3, 5)
    parts = {f"attention.{p}_proj.{what}": (0, kept) for p in "qkv" for what in ("weight", "bias")}
    packed = [part * 24 + row for part in range(3) for row in kept]
    timm = {"attn.qkv.weight": (0, packed), "attn.qkv.bias": (0, packed), "attn.proj.weight": (1, kept)}
    expected = timm if name == "timm swin" else parts | {"attention.o_proj.weight": (1, kept)}
    expect(small, model, block, expected | {table: (1, [1, 2, 3, 5])})


def test_heads_that_shared_keys_and_values_unevenly_go_on_looking_at_their_own() -> None:
    model = dense("qwen2")  # 6 heads of 4; heads 0-2 look at K/V head 0, 3-5 at 1
    gone = [(0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 3)]
    small: Any = shrink(model, [Unit(HEAD, layer, head) for layer, head in gone])
    kept: list[tuple[list[int], list[int]]] = [
        (rows(0, 2, 3, 4, 5), rows(0, 1)),
        (rows(3, 4, 5), rows(1)),
        (rows(1, 2, 4, 5), rows(0, 1)),
    ]
    for layer, (heads, kv_heads) in enumerate(kept):
        expected = {"q_proj.weight": (0, heads), "q_proj.bias": (0, heads), "o_proj.weight": (1, heads)}
        expected |= {f"{p}_proj.{what}": (0, kv_heads) for p in "kv" for what in ("weight", "bias")}
        expect(small, model, f"model.layers.{layer}", {f"self_attn.{key}": value for key, value in expected.items()})
    attentions = [block.self_attn for block in small.model.layers]
    assert [attention.kv_index for attention in attentions] == [[0, 0, 1, 1, 1], None, None]
    assert [attention.num_key_value_groups for attention in attentions] == [1, 3, 2]
    assert [layer.get("kv_index") for layer in small.config.secateur["layers"]] == [[0, 0, 1, 1, 1], None, None]
    assert [layer.kv_of for layer in anatomy(small)] == [(0, 0, 1, 1, 1), (0, 0, 0), (0, 0, 1, 1)]
    assert [attention.q_proj.out_features for attention in attentions] == [20, 12, 16]


def test_what_a_block_keeps_is_told_as_indices_into_what_it_had() -> None:
    kept = kept_of(anatomy(dense("llama")), [*UNEVEN, Unit(KV_GROUP, 1, 0), Unit(MLP, 2, 3, GROUP)])
    assert kept == [
        Kept(heads=(1, 2, 3), kv_heads=(0, 1), channels=tuple(range(14)), kv_index=(0, 1, 1)),
        Kept(heads=(2, 3), kv_heads=(1,), channels=(*range(8), 12, 13), kv_index=(0, 0)),
        Kept(heads=(2,), kv_heads=(1,), channels=tuple(range(12)), kv_index=(0,)),
    ]
    assert [rest.even for rest in kept] == [False, True, True]


def test_the_counts_of_parameters_need_no_weights() -> None:
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(dense("llama").config)
    assert parameters_left(model, UNEVEN) == parameters_left(dense("llama"), UNEVEN)
    assert zeroed_percent(model, UNEVEN) > 0


# Which channels a unit stands for


class Paired(Layer):
    """A block of which every unit is a head together with the MLP group of its number."""

    def ranges(self, unit: Unit) -> tuple[Range, ...]:
        parts = (Unit(HEAD, unit.layer, unit.index), Unit(MLP, unit.layer, unit.index, GROUP))
        return tuple(found for part in parts for found in super(Paired, self).ranges(part))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama mha", "llama", "swin", "timm vit"])
def test_the_ranges_of_a_unit_are_what_zeroing_surgery_and_accounting_go_by(name: str) -> None:
    model, unit = dense(name), Unit(HEAD, 1, 2)
    apart = [unit, Unit(MLP, 1, 2, GROUP)]
    layers, batch = anatomy(model), tiny_batch(model)
    paired = [Paired(**vars(layer)) for layer in layers]
    with zeroed_in_parts(paired, [[unit]]):
        close(logits_of(model, batch), zeroed_logits(model, apart, batch))
    assert kept_of(paired, [unit]) == kept_of(layers, apart)
    assert effective_parameters(paired[1], unit) == sum(effective_parameters(layers[1], part) for part in apart)
    assert paired[1].size(unit) == sum(layers[1].size(part) for part in apart)
    assert [part.of(part.parameter).tolist() for part in paired[1].slices(unit)] == [
        part.of(part.parameter).tolist() for each in apart for part in layers[1].slices(each)
    ]


@every_family
@pytest.mark.parametrize("target", ["head", "kv_group", "mlp"])
def test_what_an_output_projection_loses_are_the_channels_in_the_units_ranges(name: str, target: str) -> None:
    model = dense(name)
    for unit in all_of(model, target, 2):
        layer, left = anatomy(model)[2], anatomy(shrink(model, [unit]))[2]
        gone = {id(part.projection): part.channels for part in layer.ranges(unit)}
        for before, after in ((layer.out, left.out), (layer.mlp_out, left.mlp_out)):
            stays = [c for c in range(_inputs(before).shape[-1]) if c not in gone.get(id(before), ())]
            assert torch.equal(_inputs(after), _inputs(before)[..., stays])


def _inputs(projection: nn.Module) -> Tensor:
    """Its weight as (outputs, inputs); of experts (experts, outputs, inputs)."""
    if isinstance(projection.down_proj if hasattr(projection, "down_proj") else None, Tensor):
        return expert_weights(projection)[1]
    return weight_of(projection) if input_dim(projection) == 1 else weight_of(projection).T


# Cuts of what was cut before


def after(unit: Unit, first: Sequence[Unit]) -> Unit:
    """The unit's name once the others of its kind and block are gone; groups of GROUP channels go whole."""
    return Unit(
        unit.kind, unit.layer, unit.index - sum((u.kind, u.layer) == (unit.kind, unit.layer) and u < unit for u in first), GROUP
    )


@every_family
@pytest.mark.parametrize("target", ["both", "kv_group+mlp"])
def test_two_cuts_are_one_cut_of_both(name: str, target: str) -> None:
    model = dense(name)
    units = candidate_units(model, target, GROUP)
    for seed, share in ((0, 0.6), (1, 1.0)):
        both = random.Random(seed).sample(units, int(share * len(units)))
        first, second = both[: len(both) // 2], both[len(both) // 2 :]
        halfway = shrink(model, first)
        twice: Any = shrink(halfway, [after(unit, first) for unit in second])
        once: Any = shrink(model, both)
        assert {key: value.shape for key, value in twice.state_dict().items()} == {
            k: v.shape for k, v in once.state_dict().items()
        }
        assert all(torch.equal(tensor, once.state_dict()[key]) for key, tensor in twice.state_dict().items())
        close(logits_of(twice, tiny_batch(model)), logits_of(once, tiny_batch(model)))
        if layout_of(once):
            assert layout_of(twice) == layout_of(once) and type(twice) is type(once)
        if layout_of(once) and layout_of(halfway) and name not in TIMM:
            assert twice.config.to_dict() == once.config.to_dict()


def test_a_group_of_uneven_heads_and_a_head_of_an_uneven_group_are_cut_by_their_new_numbers() -> None:
    model = dense("qwen2")  # heads 0-2 and 3-5
    first = [Unit(HEAD, 0, 0), Unit(HEAD, 1, 1), Unit(HEAD, 2, 5)]  # 1 2 | 3 4 5, 0 2 | 3 4 5, 0 1 2 | 3 4
    second = [Unit(KV_GROUP, 0, 1), Unit(HEAD, 1, 2), Unit(KV_GROUP, 2, 0), Unit(KV_GROUP, 2, 1)]
    together = [
        Unit(HEAD, 0, 0),
        Unit(KV_GROUP, 0, 1),
        Unit(HEAD, 1, 1),
        Unit(HEAD, 1, 3),
        Unit(KV_GROUP, 2, 0),
        Unit(KV_GROUP, 2, 1),
    ]
    uneven = shrink(model, first)
    small: Any = shrink(uneven, second)
    batch = tiny_batch(model)
    close(logits_of(small, batch), zeroed_logits(uneven, second, batch))
    close(logits_of(small, batch), zeroed_logits(model, together, batch))
    assert [(layer.heads, layer.kv_heads, layer.kv_of) for layer in anatomy(small)] == [
        (2, 1, (0, 0)),
        (4, 2, (0, 0, 1, 1)),
        (0, 0, ()),
    ]
    assert [block.self_attn.num_key_value_groups for block in small.model.layers] == [2, 2, 1]
    assert parameters_left(uneven, second) == count(small) == parameters_left(model, together)
    assert small.config.per_layer_config[2].num_key_value_heads == 0
    assert prove(uneven, second, small, [batch]).same_tokens == 8


# Uniform


@pytest.mark.parametrize("name", EVEN)
def test_an_even_cut_of_the_mlps_is_an_ordinary_model_with_another_config(name: str) -> None:
    model = dense(name)
    layers = anatomy(model)
    widths = [layer.mlp_width for layer in layers]
    units = [Unit(MLP, i, q, GROUP) for i, width in enumerate(widths) for q in ((i, i + 2) if width == 30 else (i,))]
    small: Any = shrink(model, units, UNIFORM)
    assert type(small) is type(model) and layout_of(small) is None and not hasattr(small.config, "auto_map")
    stock = randomised(type(model)(type(model.config).from_dict(json.loads(small.config.to_json_string()))))
    stock.load_state_dict(small.state_dict())
    assert torch.equal(logits_of(stock, tiny_batch(model)), logits_of(small, tiny_batch(model)))
    close(logits_of(small, tiny_batch(model)), zeroed_logits(model, units, tiny_batch(model)))
    changed = {key: value for key, value in small.config.to_dict().items() if model.config.to_dict()[key] != value}
    words = {"gpt2": "n_inner", "opt": "ffn_dim", "opt post-norm": "ffn_dim", "swin": "mlp_ratio", "distilbert": "hidden_dim"}
    word = words.get(name, "intermediate_size")
    expected = {word: pytest.approx(11 / 12) if name == "swin" else 10}
    experts = {"moe_intermediate_size": 12}  # of two blocks of the Qwen2-MoE and of all of the Qwen3-MoE
    by_family = {"mixtral": {word: 12}, "qwen2_moe": {word: 10} | experts, "qwen3_moe": experts}
    assert changed == by_family.get(name, expected)


@pytest.mark.parametrize("name", GROUPED)
def test_an_even_cut_of_the_heads_is_an_ordinary_model_where_the_config_names_the_width_of_a_head(name: str) -> None:
    model = dense(name)
    layer = anatomy(model)[0]
    per_kv = layer.heads // layer.kv_heads
    cuts = [[Unit(HEAD, i, 2 * h) for i in range(3) for h in range(2)]] if name == "llama mha" else []
    if per_kv > 1:  # each K/V head loses a head, another one in each block
        cuts.append([Unit(HEAD, i, k * per_kv + i % per_kv) for i in range(3) for k in range(layer.kv_heads)])
    if layer.kv_heads == 2:
        cuts.append([Unit(KV_GROUP, i, i % 2) for i in range(3)])
    assert cuts
    for units in cuts:
        check_uniform(model, units)
        for layout in (FREE, UNIFORM):
            small: Any = shrink(model, units, layout)
            assert type(small) is type(model) and layout_of(small) is None
        heads, kv_heads = kept_of(anatomy(model), units)[0].heads, kept_of(anatomy(model), units)[0].kv_heads
        config = small.config
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
            len(heads),
            len(kv_heads),
            layer.head_dim,
        )
        assert all(type(block.self_attn.config) is type(model.config) for block in small.model.layers)
        stock = type(model)(type(model.config).from_dict(json.loads(config.to_json_string()))).eval()
        stock.load_state_dict(small.state_dict())
        assert torch.equal(logits_of(stock, tiny_batch(model)), logits_of(small, tiny_batch(model)))
        close(logits_of(small, tiny_batch(model)), zeroed_logits(model, units, tiny_batch(model)))


MHA, GQA = "llama mha", "llama"
REFUSALS = [
    (MHA, [Unit(HEAD, i, i) for i in range(3)], r"transformers says: .*16.*3"),  # 16 is no multiple of 3
    (GQA, [Unit(HEAD, i, i) for i in range(3)], "K/V heads serve different numbers of heads"),
    (GQA, [Unit(KV_GROUP, 0, 0)], "the layers lost different numbers of heads"),
    (GQA, [Unit(KV_GROUP, i, k) for i in range(3) for k in range(2)], "no head would be left"),
    (GQA, [Unit(MLP, i, q, GROUP) for i in range(3) for q in range(4)], "no MLP channel would be left"),
    (GQA, [Unit(MLP, i, 0, GROUP) for i in range(2)], "the layers lost different numbers of MLP channels"),
    (GQA, [Unit(MLP, 0, 3, GROUP), Unit(MLP, 1, 0, GROUP), Unit(MLP, 2, 0, GROUP)], "different numbers of MLP channels"),
    ("swin", [Unit(MLP, i, 0, GROUP) for i in range(4)], "different numbers of MLP channels"),
    ("dinov2", [Unit(MLP, i, 0, GROUP) for i in range(3)], "transformers says: .*int"),
    ("siglip_vision_model", [Unit(MLP, i, 0, GROUP) for i in range(3)], r"cannot describe what is left \(head\.mlp"),
    *(
        (name, [Unit(HEAD, i, 0) for i in range(4 if "swin" in name else 3)], "all heads must stay")
        for name in CUTTABLE
        if name not in GROUPED
    ),
]


@pytest.mark.parametrize(("name", "units", "reason"), REFUSALS, ids=[f"{name}: {reason}" for name, _, reason in REFUSALS])
def test_what_no_stock_config_can_say_is_refused_for_uniform_and_made_for_free(
    name: str, units: list[Unit], reason: str
) -> None:
    model = dense(name)
    for make in (check_uniform, functools.partial(shrink, layout=UNIFORM)):
        with pytest.raises(SelectionError, match=f"(?s)uniform.*{reason}.*--layout free") as refusal:
            make(model, units)
        assert "\n" not in str(refusal.value)
    small = shrink(model, units)
    assert layout_of(small) and isinstance(small, Shrunk) == (name in STOCK)
    close(logits_of(small, tiny_batch(model)), zeroed_logits(model, units, tiny_batch(model)))


def test_a_model_whose_layers_differed_before_is_not_uniform_any_more() -> None:
    small = shrink(dense("llama"), UNEVEN)
    with pytest.raises(SelectionError, match=r"uniform.*layers differed before"):
        check_uniform(small, [])


@pytest.mark.parametrize("of", [12, 24, 96, 192, 384, 768, 1000])
def test_every_ratio_gives_its_width_again(of: int) -> None:
    """A config that says `mlp_ratio` is multiplied out and cut to an integer by who reads it, also where floats round down."""
    with torch.device("meta"):
        model = VisionTransformer(img_size=16, patch_size=8, embed_dim=of, num_heads=1, mlp_ratio=4, depth=1, num_classes=0)
    widths = range(1, 4 * of)
    rounded_down = [width for width in widths if int(of * (width / of)) < width]
    for width in {*rounded_down[:40], *widths[:: max(1, len(widths) // 20)]}:
        small: Any = shrink(model, [Unit(MLP, 0, c, 1) for c in range(width, 4 * of)], UNIFORM)
        assert int(of * small.model_args["mlp_ratio"]) == small.blocks[0].mlp.fc1.out_features == width


# What the config says


def layer_words(config: Any) -> tuple[int, int, int]:
    return config.num_attention_heads, config.num_key_value_heads, config.intermediate_size


def test_the_config_says_of_each_layer_what_is_left() -> None:
    model = dense("llama")
    small: Any = shrink(model, [*UNEVEN, *all_of(model, "both", 1)])
    assert small.config.auto_map == {
        auto: f"{CODE}.Shrunk{kind}"
        for auto, kind in {
            "AutoModel": "LlamaModel",
            "AutoModelForCausalLM": "LlamaForCausalLM",
            "AutoModelForSequenceClassification": "LlamaForSequenceClassification",
            "AutoModelForTokenClassification": "LlamaForTokenClassification",
        }.items()
    }
    assert type(small).__name__ == "ShrunkLlamaForCausalLM" and isinstance(small, type(model))
    assert [layer_words(layer) for layer in small.config.per_layer_config] == [(3, 2, 14), (0, 0, 0), (1, 1, 14)]
    assert small.config.to_dict()["per_layer_config"]["1"]["skip"] == ["attention", "mlp"]
    assert small.config.secateur["layers"] == [
        {"block": "model.layers.0", "heads": 3, "kv_heads": 2, "head_dim": 4, "mlp_width": 14, "kv_index": [0, 1, 1]},
        {"block": "model.layers.1", "heads": 0, "kv_heads": 0, "head_dim": 4, "mlp_width": 0},
        {"block": "model.layers.2", "heads": 1, "kv_heads": 1, "head_dim": 4, "mlp_width": 14},
    ]
    json.dumps(small.config.secateur)


def test_a_projection_with_a_bias_is_not_skipped_since_the_bias_stays() -> None:
    model = dense("gpt2")
    small: Any = shrink(model, all_of(model, "both", 1))
    assert small.config.per_layer_config[1].num_attention_heads == small.config.per_layer_config[1].n_inner == 0
    assert "skip" not in small.config.to_dict()["per_layer_config"]["1"]


def test_swin_which_counts_stages_is_not_described_layer_by_layer() -> None:
    fields = {**dense("swin").config.to_dict(), "depths": [1, 1], "num_hidden_layers": 2}
    model = randomised(tf.SwinForImageClassification(tf.SwinConfig.from_dict(fields)))
    small: Any = shrink(model, [Unit(HEAD, 0, 0), Unit(MLP, 1, 0, GROUP)])
    assert "per_layer_config" not in small.config.to_dict()  # whose "mlp_ratio" would be a width


# Tied weights


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "gemma"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_others_do_not_become_so(name: str, tied: bool) -> None:
    config = copy.deepcopy(dense(name).config)
    config.tie_word_embeddings = tied
    model: Any = randomised(type(dense(name))(config))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    units = [Unit(HEAD, 0, 1), *all_of(model, "both", 1)]
    small: Any = shrink(model, units)
    assert (small.get_output_embeddings().weight is small.get_input_embeddings().weight) == tied
    assert count(small) == parameters_left(model, units)
    close(logits_of(small, tiny_batch(model)), zeroed_logits(model, units, tiny_batch(model)))
