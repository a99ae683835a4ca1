"""What stands in for removed channels (model/moments.py, model/zeroing.py), and the damage that is left after a repair."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes import losses_of
from secateur.model.families import anatomy, candidate_units, input_dim, layer_of, weight_of
from secateur.model.losses import batch_loss
from secateur.model.moments import DAMPING, Moments, fills_of, gather
from secateur.model.zeroing import zeroed
from secateur.search.damage import DamageMeter
from secateur.search.scores import mask_gradients
from secateur.units import ATTENTION, HEAD, MLP, Unit
from tiny import CUTTABLE, FAMILIES_TINY, GROUP, deep_llama, hook_count, loss_without, tiny_batches

UNITS = [Unit(HEAD, 0, 1), Unit(HEAD, 2, 0), Unit(MLP, 0, 2, GROUP), Unit(MLP, 0, 1, GROUP), Unit(MLP, 1, 0, GROUP)]
DENSE = [name for name in CUTTABLE if not any(layer.experts for layer in anatomy(FAMILIES_TINY[name]()))]

Batch = dict[str, Tensor]


def repaired_by_hand(model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch]) -> nn.Module:
    """A copy whose removed channels are read by no one, and whose other columns are those of least squares with a ridge."""
    made, layers = copy.deepcopy(model), anatomy(model)
    removed: dict[str, set[int]] = {}
    names = {module: name for name, module in model.named_modules()}
    for unit in units:
        for part in layer_of(layers, unit).ranges(unit):
            removed.setdefault(names[part.projection], set()).update(part.channels)
    moments = {model.get_submodule(name): Moments(model.get_submodule(name)) for name in removed}
    gather(model, moments, batches)
    for name, gone in removed.items():
        projection = made.get_submodule(name)
        mean, gram = moments[model.get_submodule(name)].means()
        bias = projection.bias if isinstance(projection.bias, Tensor) else None
        if bias is not None:
            gram = gram - mean[:, None] * mean
        gram = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        goes = torch.zeros(len(gram), dtype=torch.bool)
        goes[list(gone)] = True
        predict = torch.linalg.lstsq(gram[~goes][:, ~goes], gram[~goes][:, goes]).solution  # (kept, gone)
        weight = weight_of(projection).detach().double()
        columns = weight.clone() if input_dim(projection) == 1 else weight.T.clone()  # (outputs, channels)
        new = torch.zeros_like(columns)
        new[:, ~goes] = columns[:, ~goes] + columns[:, goes] @ predict.T
        with torch.no_grad():
            weight_of(projection).copy_(new if input_dim(projection) == 1 else new.T)
            if bias is not None:
                bias.add_((columns @ mean - new @ mean).to(bias.dtype))
    return made


@pytest.mark.parametrize("name", DENSE)
def test_filled_in_channels_are_a_repair_by_least_squares(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 6)
    fills = fills_of(model, candidate_units(model, "both", GROUP), batches)
    for unit in UNITS:
        fills.commit(unit)
    by_hand = repaired_by_hand(model, UNITS, batches)
    for batch in batches[:2]:
        with torch.inference_mode():
            expected = float(batch_loss(by_hand, batch))
            with zeroed(model, UNITS, fills):
                assert float(batch_loss(model, batch)) == pytest.approx(expected, rel=2e-4, abs=2e-4)
    assert hook_count(model) == 0


def test_a_unit_on_top_of_committed_ones_is_what_it_is_when_it_is_committed_too() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 6)
    units = candidate_units(model, "both", GROUP)
    before, after = fills_of(model, units, batches), fills_of(model, units, batches)
    *first, last = UNITS
    for unit in first:
        before.commit(unit)
    for unit in [last, *reversed(first)]:  # in any order
        after.commit(unit)
    for unit in UNITS:
        assert loss_without(model, batches[0], [unit]) != 0
    with torch.inference_mode():
        with zeroed(model, first, before), zeroed(model, [last], before):
            nested = float(batch_loss(model, batches[0]))
        with zeroed(model, UNITS, after):
            assert float(batch_loss(model, batches[0])) == pytest.approx(nested, abs=1e-5)


def test_a_projection_that_loses_everything_gives_its_mean_or_nothing() -> None:
    for name in ("gpt2", "llama"):
        model = FAMILIES_TINY[name]()
        batches = tiny_batches(model, 4)
        units = [unit for unit in candidate_units(model, "mlp", GROUP) if unit.layer == 1]
        fills = fills_of(model, units, batches)
        for unit in units:
            fills.commit(unit)
        with torch.inference_mode(), zeroed(model, units, fills):
            filled = float(batch_loss(model, batches[0]))
        if name == "llama":  # without a bias there is nothing to hold a mean
            assert filled == pytest.approx(loss_without(model, batches[0], units), abs=1e-6)
        else:
            by_hand = copy.deepcopy(model)
            layer = anatomy(by_hand)[1]
            moments = {anatomy(model)[1].mlp_out: Moments(anatomy(model)[1].mlp_out)}
            gather(model, moments, batches)
            mean = next(iter(moments.values())).means()[0].float()
            with torch.no_grad():
                layer.mlp_out.bias.add_(mean @ weight_of(layer.mlp_out))  # type: ignore[operator]
                weight_of(layer.mlp_out).zero_()
                assert filled == pytest.approx(float(batch_loss(by_hand, batches[0])), abs=1e-5)


@pytest.mark.parametrize("committed", [[], UNITS[:3]], ids=["none committed", "three committed"])
def test_damage_after_repair_is_the_same_with_and_without_cache_lanes_and_stacks(committed: list[Unit]) -> None:
    model = deep_llama(4)
    batches = tiny_batches(model, 4)
    units = candidate_units(model, "kv_group+mlp", GROUP)
    wanted = [unit for unit in units if unit.layer in (0, 1, 3)]
    found = []
    ways: list[dict[str, Any]] = [
        {"cache_memory": 0, "lanes": 1},
        {"lanes": 1},
        {"lanes": 2},
        {"lanes": 1, "stack": 3},
    ]
    for options in ways:
        meter = DamageMeter(model, batches, batches_per_pull=2, fills=fills_of(model, units, batches), **options)
        for unit in committed:
            meter.commit(unit)
        found.append([losses_of(meter, unit, (0, 3)) for unit in wanted])
    assert found[0] == found[1] == found[2]
    for stacked, plain in zip(found[3], found[0], strict=True):
        assert [*stacked[0], *stacked[1]] == pytest.approx([*plain[0], *plain[1]], abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_the_mask_gradient_is_the_derivative_of_the_way_from_a_unit_to_its_prediction(name: str) -> None:
    model = FAMILIES_TINY[name]().double()
    batches = [{key: x.double() if x.is_floating_point() else x for key, x in b.items()} for b in tiny_batches(model, 4)]
    units = [*candidate_units(model, "both", GROUP), Unit(ATTENTION, 1, 0)]
    committed = [Unit(HEAD, 1, 0), Unit(MLP, 1, 1, GROUP)]
    fills = fills_of(model, units, batches)
    for unit in committed:
        fills.commit(unit)
    wanted = [Unit(HEAD, 1, 1), Unit(MLP, 1, 2, GROUP), Unit(MLP, 0, 0, GROUP), Unit(MLP, 2, 3, GROUP)]
    with zeroed(model, committed, fills):
        gradients = mask_gradients(model, wanted, batches[:1], fills=fills).mean(0)
        for unit, gradient in zip(wanted, gradients.tolist(), strict=True):
            part = layer_of(anatomy(model), unit).ranges(unit)[0]
            fill, step = fills.of((unit.layer, part.side), part.channels), 1e-2

            def towards(module: nn.Module, args: tuple[Tensor, ...], share: float, fill: object = fill) -> tuple[Tensor, ...]:
                return (args[0] + share * (args[0] - fill(args[0])), *args[1:])  # type: ignore[operator]

            losses = []
            for share in (step, -step):
                hook = part.projection.register_forward_pre_hook(
                    lambda module, args, share=share: towards(module, args, share),
                    prepend=True,
                )
                with torch.no_grad():
                    losses.append(float(batch_loss(model, batches[0])))
                hook.remove()
            assert gradient == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=2e-2, abs=1e-4)
