from __future__ import annotations

import copy
import functools
import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from secateur.cut import proof as proof_module
from secateur.cut.proof import BLOCKS, TOLERANCE, WHOLE, Proof, prove
from secateur.cut.surgery import shrink
from secateur.errors import ProofError, SettingError
from secateur.model.families import anatomy, candidate_units, task_of, weight_of
from secateur.model.zeroing import zeroed
from secateur.units import HEAD, MLP, Unit
from tiny import CUTTABLE, FAMILIES_TINY, GROUP, deep_llama, hook_count, logits_of, tiny_batch, tiny_batches

# One for all tests, so that each of them would see if another had changed it.
dense: Callable[[str], Any] = functools.cache(lambda name: FAMILIES_TINY[name]())

# Of llama's 4 heads over 2 K/V heads: the 1st K/V head keeps one head and the 2nd two; all; the 2nd K/V head keeps one.
UNEVEN = [Unit(HEAD, 0, 0), Unit(MLP, 1, 2, GROUP), Unit(HEAD, 2, 0), Unit(HEAD, 2, 1), Unit(HEAD, 2, 3)]


def some_of(model: nn.Module) -> list[Unit]:
    """A head of the first block, the last group of the second, and all of the third."""
    return [Unit(HEAD, 0, 1), Unit(MLP, 1, 3, GROUP), *(u for u in candidate_units(model, "both", GROUP) if u.layer == 2)]


def zeroed_logits(model: nn.Module, units: Sequence[Unit], batch: dict[str, Tensor]) -> Tensor:
    with zeroed(model, units):
        return logits_of(model, batch)


def broken(small: nn.Module, how: str) -> nn.Module:
    """One thing in one tensor that a wrong cut could have done."""
    small = copy.deepcopy(small)
    q = small.get_parameter("model.layers.0.self_attn.q_proj.weight").data  # 3 heads of 4 rows
    up, down = (small.get_parameter(f"model.layers.1.mlp.{p}_proj.weight").data for p in ("up", "down"))
    attention: Any = small.get_submodule("model.layers.0.self_attn")
    if how == "heads in another order":
        q[:8] = q[[4, 5, 6, 7, 0, 1, 2, 3]]
    elif how == "two rows swapped":
        up[[2, 5]] = up[[5, 2]]
    elif how == "a column of a neighbour":
        down[:, 3] = down[:, 4]
    elif how == "the wrong K/V head":
        attention.kv_index = [0, 0, 1]
    elif how == "a thousandth":
        down[0, 0] += 1e-3 * float(down.abs().max())
        q[0, 0] *= 1.01
        small.get_parameter("lm_head.weight").data.mul_(1 + 1e-3)
    elif how == "not a number":
        up[0, 0] = math.nan
    elif how == "infinite":
        small.get_parameter("lm_head.weight").data[0, 0] = math.inf
    elif how == "another shape":
        small.get_submodule("lm_head").weight = nn.Parameter(torch.zeros(31, 16))
    elif how == "does not run":
        small.get_submodule("model.layers.1.mlp.up_proj").weight = nn.Parameter(torch.zeros(9, 16))
    return small


@pytest.fixture(params=[WHOLE, BLOCKS])
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the proof is made: with much memory free, or with none."""
    memory = 2**40 if request.param == WHOLE else 0
    monkeypatch.setattr(proof_module, "free_memory", lambda device: memory)
    return str(request.param)


@pytest.mark.parametrize(
    "how",
    [
        "heads in another order",
        "two rows swapped",
        "a column of a neighbour",
        "the wrong K/V head",
        "a thousandth",
        "not a number",
        "infinite",
        "another shape",
        "does not run",
    ],
)
def test_a_wrong_cut_is_refused(how: str, precision: str) -> None:
    model = dense("llama")
    small, batches = shrink(model, UNEVEN), tiny_batches(model, 2)
    prove(model, UNEVEN, small, batches)
    with pytest.raises(
        ProofError, match=r"refused" if how == "does not run" else rf"refused.* \(computed in {precision}\).* 1e-08 "
    ):
        prove(model, UNEVEN, broken(small, how), batches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CUTTABLE)
def test_every_family_is_proved_in_every_dtype_up_to_the_rounding_of_float64(
    name: str, dtype: torch.dtype, precision: str
) -> None:
    model = dense(name) if dtype == torch.float32 else FAMILIES_TINY[name]().to(dtype)
    units = some_of(model)
    proof = prove(model, units, shrink(model, units), tiny_batches(model, 2))
    assert proof.precision == precision and proof.batches == 2 and proof.tolerance == TOLERANCE
    assert proof.tokens == proof.same_tokens == (8 if task_of(model) == "text" else 0)
    assert 0 < proof.scale < 1e3 and proof.relative == proof.difference / proof.scale < 1e-14


@pytest.mark.parametrize("name", CUTTABLE)
def test_in_every_family_another_cut_or_the_dense_model_is_refused(name: str) -> None:
    model = dense(name)
    units = some_of(model)
    for other in (model, shrink(model, [Unit(HEAD, 0, 0), *units[1:]]), shrink(model, units[1:]), shrink(model, units[:-1])):
        with pytest.raises(ProofError, match="refused"):
            prove(model, units, other, [tiny_batch(model)])


def spoilt(small: nn.Module) -> Iterator[nn.Module]:
    """Copies that differ in a thousandth of one weight of the first block, or have lost a bias there."""
    layer = anatomy(small)[0]
    projections = [module for module in (*layer.qkv, *layer.outs, *layer.mlp_in) if isinstance(module.weight, Tensor)]
    for name, module in small.named_modules():
        if module in projections:
            other = copy.deepcopy(small)
            weight = weight_of(other.get_submodule(name)).data.flatten()
            weight[weight.abs().argmax()] *= 1 + 1e-3
            yield other
        # A bias of all keys of a head changes nothing: it adds the same to each score.
        if module in projections and isinstance(module.bias, Tensor) and not name.endswith(("k_proj", "key", "k_lin")):
            other = copy.deepcopy(small)
            other.get_parameter(f"{name}.bias").data.zero_()
            yield other


@pytest.mark.parametrize("name", CUTTABLE)
def test_in_every_family_a_thousandth_of_one_weight_or_a_lost_bias_is_refused(name: str) -> None:
    model = dense(name)
    units, batch = some_of(model), tiny_batch(model)
    wrong = list(spoilt(shrink(model, units)))
    assert len(wrong) >= 4
    for other in wrong:
        with pytest.raises(ProofError, match="refused"):
            prove(model, units, other, [batch])


@pytest.mark.parametrize("name", [name for name in CUTTABLE if anatomy(dense(name))[0].grouped_query and name != "gemma"])
def test_in_every_family_that_shares_kv_heads_a_wrong_kv_head_is_refused(name: str) -> None:
    model = dense(name)
    units = [Unit(HEAD, 0, 0)]
    small: Any = shrink(model, units)
    attention = small.get_submodule(anatomy(model)[0].name).self_attn
    prove(model, units, small, [tiny_batch(model)])
    attention.kv_index[attention.kv_index.index(1)] = 0
    with pytest.raises(ProofError, match="refused"):
        prove(model, units, small, [tiny_batch(model)])


def test_the_proof_says_what_it_saw() -> None:
    model = dense("llama")
    batches = tiny_batches(model, 2)
    small, seen = shrink(model, UNEVEN), list[tuple[int, int]]()
    proof = prove(model, UNEVEN, small, batches, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]  # each batch by each model
    logits = [zeroed_logits(model, UNEVEN, batch) for batch in batches]
    assert proof.scale == pytest.approx(float(torch.cat(logits).abs().max()), rel=1e-5)
    assert proof.to_json() == {
        "difference": proof.difference,
        "scale": proof.scale,
        "tolerance": 1e-8,
        "batches": 2,
        "tokens": 8,
        "same_tokens": 8,
        "tied_tokens": 0,
        "precision": "float64",
        "relative": proof.difference / proof.scale,
    }
    json.dumps(proof.to_json())
    assert "(computed in float64)" in str(proof) and "8 of 8 tokens" in str(proof) and "ties" not in str(proof)
    assert hook_count(model) == hook_count(small) == 0


def test_a_difference_that_shows_only_in_a_later_batch_is_seen() -> None:
    model = dense("llama")
    first, second = tiny_batches(model, 2)
    small: Any = shrink(model, UNEVEN)
    written = small.generate(first["input_ids"][:1, :8], max_new_tokens=8, do_sample=False)
    seen = {*first["input_ids"].flatten().tolist(), *written[0].tolist()}
    absent = next(token for token in range(32) if token not in seen)
    second["input_ids"][0, 0] = absent
    small.get_input_embeddings().weight.data[absent] += 1
    prove(model, UNEVEN, small, [first])
    with pytest.raises(ProofError):
        prove(model, UNEVEN, small, [first, second])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nothing_is_proved_of_a_model_whose_logits_are_not_finite(value: float) -> None:
    model = FAMILIES_TINY["llama"]()
    model.get_parameter("lm_head.weight").data[5, 3] = value
    with pytest.raises(ProofError):
        prove(model, UNEVEN, shrink(model, UNEVEN), [tiny_batch(model)])
    image = FAMILIES_TINY["vit"]()
    image.get_parameter("classifier.bias").data[1] = value
    with pytest.raises(ProofError):
        prove(image, [Unit(HEAD, 0, 0)], shrink(image, [Unit(HEAD, 0, 0)]), [tiny_batch(image)])


def test_an_infinite_activation_of_a_unit_that_goes_is_gone() -> None:
    model = FAMILIES_TINY["llama mha"]()
    model.get_parameter("model.layers.0.self_attn.v_proj.weight").data[:4] = math.inf
    units = [Unit(HEAD, 0, 0)]
    assert prove(model, units, shrink(model, units), [tiny_batch(model)]).same_tokens == 8


def test_tokens_that_differ_where_two_are_equally_likely_are_counted_as_ties() -> None:
    model = FAMILIES_TINY["llama"]().double()
    head = model.get_parameter("lm_head.weight").data
    head[17] = head[16]  # two tokens whose logits are always the same, and of which one is always the highest
    head[:16] *= 1e-3
    head[18:] *= 1e-3
    small = shrink(model, UNEVEN)
    small.get_parameter("lm_head.weight").data[16] *= 1 - 1e-10
    proof = prove(model, UNEVEN, small, [tiny_batch(model)])
    assert proof.same_tokens + proof.tied_tokens == proof.tokens == 8 and proof.tied_tokens > 0
    assert f"{proof.same_tokens} of 8 tokens" in str(proof) and f"({proof.tied_tokens} more are ties)" in str(proof)


def test_a_proof_of_nothing_is_refused_and_one_of_zeros_is_absolute() -> None:
    model = dense("llama")
    with pytest.raises(SettingError, match="at least one batch"):
        prove(model, UNEVEN, shrink(model, UNEVEN), [])
    assert Proof(difference=0.5, scale=0.0, tolerance=1e-4, batches=1).relative == 0.5


def test_the_proof_is_made_without_dropout_and_leaves_the_modes_as_they_were() -> None:
    model = FAMILIES_TINY["gpt2"]()
    units = [Unit(HEAD, 0, 1)]
    small = shrink(model, units).train()
    model.train()
    assert prove(model, units, small, [tiny_batch(model)]).same_tokens == 8
    assert all(module.training for module in (*model.modules(), *small.modules()))


def test_the_proof_changes_neither_model_and_keeps_no_copy(precision: str) -> None:
    model = FAMILIES_TINY["llama"]().to(torch.bfloat16)
    small = shrink(model, UNEVEN)
    before = [
        {name: (id(t), t.dtype, t.clone()) for name, t in one.state_dict(keep_vars=True).items()} for one in (model, small)
    ]
    prove(model, UNEVEN, small, [tiny_batch(model)])
    gc.collect()
    for one, old in zip((model, small), before, strict=True):
        now = one.state_dict(keep_vars=True)
        assert {name: (id(t), t.dtype) for name, t in now.items()} == {name: kept[:2] for name, kept in old.items()}
        assert all(torch.equal(t, old[name][2]) for name, t in now.items())
        assert hook_count(one) == 0 and not any("forward" in vars(module) for module in one.modules())
    assert not [t for t in gc.get_objects() if type(t) is nn.Parameter and t.dtype == torch.float64]


def test_tied_weights_are_converted_once_and_hooks_run_in_the_copies(precision: str) -> None:
    model: Any = FAMILIES_TINY["gpt2"]()
    assert model.lm_head.weight is model.transformer.wte.weight
    units = [Unit(HEAD, 0, 1)]
    small: Any = shrink(model, units)
    seen = list[tuple[torch.dtype, bool]]()

    def look(module: Any, args: Any) -> None:
        assert module is not small
        seen.append((args[0].dtype if args else torch.float64, module.lm_head.weight is module.transformer.wte.weight))

    small.register_forward_pre_hook(look)
    prove(model, units, small, [tiny_batch(model)])
    assert seen == [(torch.float64, True)] * 9  # the batch and 8 tokens


def test_the_memory_that_is_free_decides_whether_blocks_are_converted_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense("vit")
    units = [Unit(HEAD, 0, 1)]
    size = sum(t.numel() for t in (*model.parameters(), *model.buffers())) * 8
    for memory, precision in ((2 * size, WHOLE), (2 * size - 1, BLOCKS)):
        monkeypatch.setattr(proof_module, "free_memory", lambda device, memory=memory: memory)
        assert prove(model, units, shrink(model, units), [tiny_batch(model)]).precision == precision


def test_one_block_at_a_time_no_more_than_one_block_is_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = deep_llama(4)
    small = shrink(model, UNEVEN)
    monkeypatch.setattr(proof_module, "NEW_TOKENS", {BLOCKS: 1})
    monkeypatch.setattr(proof_module, "free_memory", lambda device: 0)
    alive: list[int] = []

    def count(module: Any, args: Any) -> None:
        wide = [one for one in gc.get_objects() if type(one) is nn.Parameter and one.dtype == torch.float64]
        alive.append(sum(one.shape == module.weight.shape for one in wide))

    for block in model.model.layers:
        block.mlp.down_proj.register_forward_pre_hook(count)
    prove(model, UNEVEN, small, [tiny_batch(model)])
    assert alive == [1] * (4 * 2)  # in each block, for the batch and a token


def test_an_attention_without_float64_is_replaced_in_the_copies(precision: str) -> None:
    def flash(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> None:
        raise RuntimeError("this attention has float16 and bfloat16 only")

    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("flash_for_a_test", flash)
    model: Any = FAMILIES_TINY["llama"]()
    model.config._attn_implementation = "flash_for_a_test"
    small: Any = shrink(model, UNEVEN)
    assert prove(model, UNEVEN, small, [tiny_batch(model)]).same_tokens == 8
    assert model.config._attn_implementation == small.config._attn_implementation == "flash_for_a_test"


def test_only_the_first_rows_of_a_large_batch_are_computed() -> None:
    model = dense("vit")
    units = [Unit(HEAD, 0, 1)]
    small, seen = shrink(model, units), list[int]()
    note = lambda module, args, options: seen.append(len(options["pixel_values"]))  # noqa: E731
    small.register_forward_pre_hook(note, with_kwargs=True)
    one = tiny_batch(model)
    many = {name: torch.cat([tensor, tensor]) for name, tensor in one.items()}
    prove(model, units, small, [one, many])
    assert seen == [3, 4]


def test_a_nan_on_the_first_batch_alone_is_not_forgotten() -> None:
    model = FAMILIES_TINY["vit"]()
    units = [Unit(HEAD, 0, 1)]
    small = shrink(model, units)
    calls: list[Any] = []

    def spoil(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(output)
        if len(calls) == 1:
            output.logits.fill_(math.nan)

    small.register_forward_hook(spoil)
    with pytest.raises(ProofError, match="nan"):
        prove(model, units, small, tiny_batches(model, 2))
    assert len(calls) == 2
