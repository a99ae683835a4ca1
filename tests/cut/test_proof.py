from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.cut.proof import Proof, prove
from secateur.cut.surgery import shrink
from secateur.errors import ProofError, SettingError
from secateur.model.families import candidate_units, task_of
from secateur.model.zeroing import zeroed
from secateur.units import HEAD, MLP, Unit
from tiny import CUTTABLE, FAMILIES_TINY, GROUP, hook_count, logits_of, tiny_batch, tiny_batches

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
def test_a_wrong_cut_is_refused(how: str) -> None:
    model = dense("llama")
    small, batches = shrink(model, UNEVEN), tiny_batches(model, 2)
    prove(model, UNEVEN, small, batches)
    with pytest.raises(ProofError, match=r"refused" if how == "does not run" else r"refused.* 0\.0001 .*scale"):
        prove(model, UNEVEN, broken(small, how), batches)


@pytest.mark.parametrize("name", CUTTABLE)
def test_every_family_is_proved_and_another_cut_or_the_dense_model_is_not(name: str) -> None:
    model = dense(name)
    batch = tiny_batch(model)
    units = some_of(model)
    proof = prove(model, units, shrink(model, units), [batch])
    assert proof.tokens == proof.same_tokens == (8 if task_of(model) == "text" else 0)
    assert 0 < proof.scale < 1e3 and proof.relative == proof.difference / proof.scale < 1e-4
    for other in (model, shrink(model, [Unit(HEAD, 0, 0), *units[1:]])):
        with pytest.raises(ProofError):
            prove(model, units, other, [batch])


def test_the_proof_says_what_it_saw() -> None:
    model = dense("llama")
    batches = tiny_batches(model, 2)
    small, seen = shrink(model, UNEVEN), list[tuple[int, int]]()
    proof = prove(model, UNEVEN, small, batches, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    logits = [zeroed_logits(model, UNEVEN, batch) for batch in batches]
    assert proof.scale == float(torch.cat(logits).abs().max())
    worst = max(float((logits_of(small, batch) - one).abs().max()) for batch, one in zip(batches, logits, strict=True))
    assert proof.difference >= worst  # tokens are in it, too
    assert proof.to_json() == {
        "difference": proof.difference,
        "scale": proof.scale,
        "tolerance": 1e-4,
        "batches": 2,
        "tokens": 8,
        "same_tokens": 8,
        "tied_tokens": 0,
        "relative": proof.difference / proof.scale,
    }
    json.dumps(proof.to_json())
    assert "8 of 8 tokens" in str(proof) and "ties" not in str(proof)
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
    model = FAMILIES_TINY["llama"]()
    head = model.get_parameter("lm_head.weight").data
    head[17] = head[16]  # two tokens whose logits are always the same, and of which one is always the highest
    head[:16] *= 1e-3
    head[18:] *= 1e-3
    small = shrink(model, UNEVEN)
    small.get_parameter("lm_head.weight").data[16] *= 1 - 1e-6
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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 5e-2)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gemma2", "vit", "swin", "timm vit"])
def test_half_precision_is_proved_by_a_tolerance_of_its_own(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = FAMILIES_TINY[name]().to(dtype)
    units = some_of(model)
    assert prove(model, units, shrink(model, units), [tiny_batch(model)]).tolerance == tolerance


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
