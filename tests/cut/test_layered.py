from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.cut.layered import RIDGES, repair_layers
from secateur.cut.repair import repair
from secateur.cut.surgery import shrink
from secateur.model.families import anatomy, weight_of
from secateur.model.losses import batch_loss
from secateur.settings import AUTO, LAYERED
from secateur.units import ATTENTION, BLOCK, HEAD, MLP, Unit
from tiny import CUTTABLE, FAMILIES_TINY, GROUP, hook_count, tiny_batches

UNITS = [Unit(HEAD, 0, 1), Unit(MLP, 1, 0, GROUP), Unit(MLP, 1, 2, GROUP)]


def streams(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """What each block gives."""
    found: list[Any] = []
    hooks = [layer.block.register_forward_hook(lambda m, a, out: found.append(out)) for layer in anatomy(model)]
    with torch.no_grad():
        batch_loss(model, batch)
    for hook in hooks:
        hook.remove()
    return [out[0] if isinstance(out, tuple) else out for out in found]


def entering(model: nn.Module, projection: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What enters a projection and what it gives, position by position."""
    found: list[tuple[Tensor, Tensor]] = []
    hook = projection.register_forward_hook(lambda m, args, out: found.append((args[0], out)))
    with torch.no_grad():
        batch_loss(model, batch)
    hook.remove()
    x, out = found[0]
    return x.flatten(0, -2).double(), out.flatten(0, -2).double()


def weighted(sizes: list[Tensor]) -> list[Tensor]:
    """The roots of the positions' weights, 1 / (|h|^2 + c), c the median of the first batch."""
    squares = [size.square().sum(1) for size in sizes]
    return [(1 / (square + squares[0].median())).sqrt()[:, None] for square in squares]


def test_the_first_cut_projection_is_fitted_by_least_squares_with_the_ridge_that_errs_least_on_other_batches() -> None:
    model, unit = FAMILIES_TINY["llama"](), Unit(HEAD, 0, 1)
    batches = tiny_batches(model, 10)  # eight fit, two choose the ridge
    small = shrink(model, [unit])
    cut = copy.deepcopy(small)
    repair_layers(model, [unit], small, batches)
    layer, own = anatomy(model)[0], anatomy(cut)[0]
    real = [(batch["labels"] != -100).flatten() for batch in batches]
    goals = [entering(model, layer.out, batch)[1][ok] for batch, ok in zip(batches, real, strict=True)]
    inputs = [entering(cut, own.out, batch)[0][ok] for batch, ok in zip(batches, real, strict=True)]
    embed = model.get_submodule("model.embed_tokens")
    embedded = [embed(b["input_ids"]).flatten(0, -2).detach().double()[ok] for b, ok in zip(batches, real, strict=True)]
    roots = weighted(embedded[:8]) + weighted(embedded[8:])
    x, y = (torch.cat([root * one for root, one in zip(roots[:8], parts[:8], strict=True)]) for parts in (inputs, goals))
    other_x, other_y = (torch.cat([r * p for r, p in zip(roots[8:], parts[8:], strict=True)]) for parts in (inputs, goals))
    old = weight_of(own.out).detach().double().T
    scale = (x * x).sum(0).mean()
    tried = [
        old + torch.linalg.solve(x.T @ x + ridge * scale * torch.eye(x.shape[1]).double(), x.T @ (y - x @ old))
        for ridge in RIDGES
    ]
    best = min([old, *tried], key=lambda weight: float((other_y - other_x @ weight).square().sum()))
    assert best is not old
    torch.testing.assert_close(weight_of(anatomy(small)[0].out).detach().double().T, best, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", CUTTABLE)
def test_every_family_is_repaired_and_the_dense_model_stays_as_it_is(name: str) -> None:
    model = FAMILIES_TINY[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = shrink(model, UNITS)
    changed = repair_layers(model, UNITS, small, tiny_batches(model, 6))
    assert changed and all(bool(weight_of(module).isfinite().all()) for module in changed)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert hook_count(model) == hook_count(small) == 0
    assert not any("forward" in vars(module) for each in (model, small) for module in each.modules())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "vit"])
@pytest.mark.parametrize("units", [UNITS, [Unit(BLOCK, 1, 0)], [Unit(ATTENTION, 1, 0)]], ids=["parts", "block", "attention"])
def test_the_stream_comes_nearer_to_the_dense_one_also_after_whole_parts_are_gone(name: str, units: list[Unit]) -> None:
    model = FAMILIES_TINY[name]()
    batches, held_out = tiny_batches(model, 40), tiny_batches(model, 44)[40:]
    small = shrink(model, units)

    def error() -> float:
        pairs = [(streams(model, batch)[-1], streams(small, batch)[-1]) for batch in held_out]
        return sum(float((dense - cut).square().sum()) for dense, cut in pairs)

    before = error()
    repair_layers(model, units, small, batches)
    assert error() < before


def test_a_cut_of_a_whole_block_is_repaired_by_layers_and_by_auto() -> None:
    model = FAMILIES_TINY["llama"]()
    for form in (LAYERED, AUTO):
        found = repair(model, [Unit(BLOCK, 1, 0)], shrink(model, [Unit(BLOCK, 1, 0)]), tiny_batches(model, 12), form=form)
        assert LAYERED in found.losses and math.isfinite(found.losses[LAYERED])


def test_nothing_changes_before_the_first_cut() -> None:
    model, unit = FAMILIES_TINY["gpt2"](), Unit(MLP, 2, 0, GROUP)
    small = shrink(model, [unit])
    cut = copy.deepcopy(small)
    changed: list[Any] = repair_layers(model, [unit], small, tiny_batches(model, 20))
    assert changed == [anatomy(small)[2].mlp_out]
    for layer, other in zip(anatomy(small)[:2], anatomy(cut)[:2], strict=True):
        for one, same in zip(layer.outs, other.outs, strict=True):
            assert torch.equal(weight_of(one), weight_of(same))
