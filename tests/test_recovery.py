from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur import recovery
from secateur.errors import SelectionError, SettingError
from secateur.families import anatomy, candidate_units, input_dim, weight_of
from secateur.losses import IGNORED, batch_loss
from secateur.recovery import AUTO, BIAS, LEAST_SQUARES, NONE, Moments, Repair, repair
from secateur.surgery import kept_of, shrink
from secateur.units import HEAD, KV_GROUP, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, hook_count, logits_of, tiny_batch, tiny_batches

UNITS = [Unit(HEAD, 0, 1), Unit(HEAD, 2, 0), Unit(MLP, 0, 3, GROUP), Unit(MLP, 1, 0, GROUP)]
every_family = pytest.mark.parametrize("name", FAMILIES_TINY)


def as_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_state(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def accept_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every repair seem better than none."""
    losses = iter([9.0, *[1.0] * 99])
    monkeypatch.setattr(recovery, "_loss", lambda model, batches, tell: next(losses))


def matrix(module: nn.Module) -> Tensor:
    """(outputs, inputs), in float64."""
    weight = weight_of(module).detach().double()
    return weight if input_dim(module) == 1 else weight.T


def bias_of(module: nn.Module) -> Tensor | None:
    return module.bias.detach().double() if isinstance(module.bias, Tensor) else None


def inputs_of(model: nn.Module, module: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """What enters a module over all positions of all batches that are not padding, in float64."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in batches:
            batch_loss(model, batch)
            if "input_ids" in batch:
                seen[-1] = seen[-1][batch["labels"].flatten() != IGNORED]
    handle.remove()
    return torch.cat(seen).double()


def weights_of(model: nn.Module, module: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """(positions, 1): what a position counts for."""
    usual = inputs_of(model, module, batches[:1]).square().sum(1).median()
    return 1 / (inputs_of(model, module, batches).square().sum(1, keepdim=True) + usual)


def lost_projections(model: nn.Module, small: nn.Module, units: list[Unit]) -> list[tuple[nn.Module, nn.Module, list[int]]]:
    layers = anatomy(model)
    found: list[tuple[nn.Module, nn.Module, list[int]]] = []
    for layer, left, kept in zip(layers, anatomy(small), kept_of(layers, units), strict=True):
        if len(kept.heads) < layer.heads:
            found.append((layer.out, left.out, [h * layer.head_dim + c for h in kept.heads for c in range(layer.head_dim)]))
        if len(kept.channels) < layer.mlp_width:
            found.append((layer.mlp_out, left.mlp_out, list(kept.channels)))
    return found


@every_family
def test_the_columns_and_biases_are_those_of_lstsq_on_all_positions_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY[name]()
    batches, damping = tiny_batches(model, 7), 0.05
    small = shrink(model, UNITS)
    accept_anything(monkeypatch)
    found = repair(model, UNITS, small, batches, damping=damping)
    projections = lost_projections(model, small, UNITS)
    assert (found.form, found.projections, found.fitted_on, found.held_out) == (LEAST_SQUARES, len(projections), 6, 1)
    for dense, left, kept in projections:
        x = inputs_of(model, dense, batches[:6])
        root = weights_of(model, dense, batches[:6]).sqrt()
        gone = [c for c in range(x.shape[1]) if c not in kept]
        columns, lost = x[:, kept], x[:, gone] @ matrix(dense)[:, gone].T
        bias = bias_of(dense)
        total = root.square().sum()
        mean = (root.square() * columns).sum(0) / total if bias is not None else torch.zeros(len(kept)).double()
        centred = root * (columns - mean)
        ridge = (damping * centred.square().sum() / len(kept)).sqrt()
        ones = root if bias is not None else torch.zeros_like(root)  # the column of the bias
        rows = torch.cat(
            [torch.cat([root * columns, ones], 1), torch.cat([ridge * torch.eye(len(kept)), torch.zeros(len(kept), 1)], 1)]
        )
        right = torch.cat([root * lost, torch.zeros(len(kept), lost.shape[1])])
        change = torch.linalg.lstsq(rows, right, driver="gelsd").solution
        torch.testing.assert_close(matrix(left), matrix(dense)[:, kept] + change[:-1].T, rtol=1e-4, atol=1e-4)
        if bias is not None:
            torch.testing.assert_close(bias_of(left), bias + change[-1], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(matrix(left), matrix(dense)[:, kept], atol=1e-3)


@every_family
def test_the_bias_form_adds_the_mean_of_what_was_lost_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY[name]()
    small, batches = shrink(model, UNITS), tiny_batches(model, 5)
    cut = as_state(small)
    projections = lost_projections(model, small, UNITS)
    biases = [
        f"{n}.bias" for n, m in small.named_modules() if any(m is left for _, left, _ in projections) and m.bias is not None
    ]
    if not biases:
        with pytest.raises(SettingError, match="have no bias"):
            repair(model, UNITS, small, batches, form=BIAS)
        assert same_state(small, cut)
        return
    accept_anything(monkeypatch)
    found = repair(model, UNITS, small, batches, form=BIAS)
    assert found.form == BIAS and found.projections == len(biases)
    changed = [key for key, value in small.state_dict().items() if not torch.equal(value, cut[key])]
    assert changed == [key for key in cut if key in biases]
    for dense, left, kept in projections:
        if (bias := bias_of(dense)) is not None:
            x = inputs_of(model, dense, batches[:4])
            weights = weights_of(model, dense, batches[:4])
            mean = (weights * x).sum(0) / weights.sum()
            mean[kept] = 0
            torch.testing.assert_close(bias_of(left), bias + matrix(dense) @ mean, rtol=1e-4, atol=1e-5)


def exact(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with the labels that the model itself finds likeliest, so that what computes the same has the lowest loss."""
    labels = logits_of(model, batch).argmax(-1)
    return batch | {"labels": torch.cat([batch["input_ids"][:, :1], labels.view(len(batch["input_ids"]), -1)], 1)}


def test_a_removed_channel_that_the_others_make_up_is_repaired_exactly() -> None:
    model = FAMILIES_TINY["llama"]()
    for module, factor in zip(anatomy(model)[1].mlp_in, (1, 2), strict=True):
        weight_of(module).data[0] = factor * weight_of(module).data[5]  # channel 0 of the MLP is twice channel 5
    batches = [exact(model, batch) for batch in tiny_batches(model, 12)]
    units = [Unit(MLP, 1, 0, 1)]
    small = shrink(model, units)
    dense = logits_of(model, batches[-1])
    assert not torch.allclose(logits_of(small, batches[-1]), dense, atol=1e-2)
    found = repair(model, units, small, batches, damping=1e-9)
    assert found.form == LEAST_SQUARES
    torch.testing.assert_close(logits_of(small, batches[-1]), dense, rtol=1e-3, atol=1e-4)


def test_a_removed_channel_that_never_changes_is_repaired_exactly_by_the_bias() -> None:
    model = FAMILIES_TINY["gpt2"]()
    layer: Any = anatomy(model)[1]
    layer.mlp_in[0].weight.data[:, 0] = 0  # (inputs, outputs): what is left of channel 0 is its bias
    layer.mlp_in[0].bias.data[0] = 3
    batches = [exact(model, batch) for batch in tiny_batches(model, 4)]
    units = [Unit(MLP, 1, 0, 1)]
    small = shrink(model, units)
    dense = logits_of(model, batches[-1])
    assert not torch.allclose(logits_of(small, batches[-1]), dense, atol=1e-2)
    found = repair(model, units, small, batches, form=BIAS)
    assert (found.form, found.projections) == (BIAS, 1)
    torch.testing.assert_close(logits_of(small, batches[-1]), dense, rtol=1e-4, atol=1e-4)


def test_endless_damping_changes_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["llama"]()
    small, batches = shrink(model, UNITS), tiny_batches(model, 3)
    cut = as_state(small)
    accept_anything(monkeypatch)
    assert repair(model, UNITS, small, batches, damping=1e15).form == LEAST_SQUARES
    assert same_state(small, cut)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "qwen2", "swin", "timm vit"])
def test_of_an_emptied_layer_only_the_bias_can_be_repaired(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY[name]()
    layers = anatomy(model)
    units = [Unit(HEAD, 1, h) for h in range(layers[1].heads)] + [Unit(MLP, 1, c, 1) for c in range(layers[1].mlp_width)]
    batches, small = tiny_batches(model, 3), shrink(model, units)
    accept_anything(monkeypatch)
    repair(model, units, small, batches)
    logits_of(small, batches[0])
    for dense, left, kept in lost_projections(model, small, units):
        assert not kept
        bias = bias_of(dense)
        if bias is not None:
            x = inputs_of(model, dense, batches[:2])
            weights = weights_of(model, dense, batches[:2])
            mean = (weights * x).sum(0) / weights.sum()
            torch.testing.assert_close(bias_of(left), bias + matrix(dense) @ mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [LEAST_SQUARES, BIAS])
def test_what_comes_in_parts_is_what_comes_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first batch, which says what is usual, cut into rows, and a pass over them for every projection."""
    model = FAMILIES_TINY["opt"]()
    batches = tiny_batches(model, 5)
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for batch in batches[1:4] for i in range(3)]
    smalls = []
    for given, memory in ((batches, recovery.MEMORY), ([batches[0], *rows, batches[-1]], 1)):
        smalls.append(shrink(model, UNITS))
        accept_anything(monkeypatch)
        found = repair(model, UNITS, smalls[-1], given, form=form, held_out=1 / len(given), memory=memory)
        assert (found.projections, found.fitted_on, found.held_out) == (4, len(given) - 1, 1)
    for one, other in zip(smalls[0].parameters(), smalls[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_padding_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["llama"]()
    batches = tiny_batches(model, 3)
    padded = []
    for batch in batches:  # causal: what stands behind a text does not reach it
        ids = torch.cat([batch["input_ids"], torch.full((3, 5), 7)], 1)
        padded.append({"input_ids": ids, "labels": torch.cat([batch["labels"], torch.full((3, 5), IGNORED)], 1)})
    smalls = []
    for given in (batches, padded):
        smalls.append(shrink(model, UNITS))
        accept_anything(monkeypatch)
        repair(model, UNITS, smalls[-1], given)
    for one, other in zip(smalls[0].parameters(), smalls[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_no_position_decides_however_large_or_small_its_activations() -> None:
    projection = recovery._projection(nn.Linear(3, 2), nn.Linear(2, 2), [0, 1])
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for scale in (0, 1, 1e6):
        moments = Moments(projection, products=True)
        moments.add(x[:0])  # a batch of nothing but padding
        moments.add(x[:25])
        moments.add(torch.cat([scale * x[25:26], x[26:]]))
        found.append(moments.means())
    for mean, products in found:
        torch.testing.assert_close(mean, found[1][0], rtol=0, atol=0.05)
        torch.testing.assert_close(products, found[1][1], rtol=0, atol=0.1)


def test_channels_that_are_always_0_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["opt"]()  # its activation is ReLU
    layer: Any = anatomy(model)[1]
    layer.mlp_in[0].bias.data.fill_(-1e6)
    units = [Unit(MLP, 1, 0, GROUP)]
    small = shrink(model, units)
    cut = as_state(small)
    accept_anything(monkeypatch)
    assert repair(model, units, small, tiny_batches(model, 3), form=AUTO).form == LEAST_SQUARES
    assert same_state(small, cut)


def test_a_form_is_judged_without_what_another_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with a bias, MLP without: the bias form leaves the MLP alone."""
    model = FAMILIES_TINY["llama"]()
    for layer in anatomy(model):
        layer.out.bias = nn.Parameter(torch.ones(layer.width))
    small = shrink(model, UNITS)
    cut, seen = as_state(small), []

    def loss(model: nn.Module, batches: Any, tell: Any) -> float:
        seen.append([key for key, value in model.state_dict().items() if not torch.equal(value, cut[key])])
        return 5.0 - len(seen)

    monkeypatch.setattr(recovery, "_loss", loss)
    found = repair(model, UNITS, small, tiny_batches(model, 3), form=AUTO)
    biases = [f"model.layers.{i}.self_attn.o_proj.bias" for i in (0, 2)]
    assert (found.form, found.projections) == (BIAS, 2)
    assert seen[0] == [] and seen[2] == biases and len(seen[1]) == 6
    assert [key for key, value in small.state_dict().items() if not torch.equal(value, cut[key])] == biases


@every_family
def test_a_repair_that_does_not_lower_the_held_out_loss_is_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY[name]()
    small, state = shrink(model, UNITS), as_state(model)
    cut = as_state(small)
    losses = iter([2.0, 2.0, 2.5])
    monkeypatch.setattr(recovery, "_loss", lambda *_: next(losses))
    found = repair(model, UNITS, small, tiny_batches(model, 3), form=AUTO)
    assert (found.form, found.projections, found.losses[NONE], found.losses[LEAST_SQUARES]) == (NONE, 0, 2.0, 2.0)
    assert same_state(small, cut) and same_state(model, state)
    assert "was not repaired (" in str(found) and "least squares: the held-out loss would be 2.0000, without it 2.0000" in str(
        found
    )


def test_batches_unlike_those_that_judge_are_noticed() -> None:
    """No monkeypatching: what was fitted on one token over and over does not help with texts."""
    model = FAMILIES_TINY["opt"]()
    monotone = tiny_batch(model) | {"input_ids": torch.full((3, 10), 9)}
    batches = [monotone, monotone, exact(model, tiny_batch(model, 5))]
    small = shrink(model, UNITS)
    cut = as_state(small)
    found = repair(model, UNITS, small, batches, damping=1e-6)
    assert found.form == NONE and same_state(small, cut)
    assert found.losses[LEAST_SQUARES] > found.losses[NONE]


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ((3.0, 2.0, 1.0), BIAS),
        ((3.0, 1.0, 2.0), LEAST_SQUARES),
        ((3.0, math.nan, math.inf), NONE),
        ((3.0, math.nan, 2.0), BIAS),
        ((math.nan, 2.0, 3.0), LEAST_SQUARES),
        ((math.inf, math.nan, math.nan), NONE),
    ],
)
def test_the_lowest_finite_loss_is_kept(losses: tuple[float, ...], kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["opt"]()
    batches = tiny_batches(model, 2)
    states = {}
    for form in (LEAST_SQUARES, BIAS):
        states[form] = shrink(model, UNITS)
        accept_anything(monkeypatch)
        repair(model, UNITS, states[form], batches, form=form)
    states[NONE] = shrink(model, UNITS)
    small, given = shrink(model, UNITS), iter(losses)
    monkeypatch.setattr(recovery, "_loss", lambda *_: next(given))
    found = repair(model, UNITS, small, batches, form=AUTO)
    assert found.form == kept
    assert same_state(small, as_state(states[kept]))
    assert set(found.declined) == {LEAST_SQUARES, BIAS} - {kept}


def test_the_held_out_loss_is_the_mean_over_all_predicted_tokens() -> None:
    model = FAMILIES_TINY["opt"]()
    batches = tiny_batches(model, 4)
    few = batches[3]["labels"].clone()
    few[:, 3:] = IGNORED
    batches[3] = batches[3] | {"labels": few}
    found = repair(model, UNITS, small := shrink(model, UNITS), batches, held_out=0.5)
    with torch.no_grad():
        cut = shrink(model, UNITS)
        n = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches[2:]]
        for form, judged in ((NONE, cut), (found.form, small)):
            means = [float(batch_loss(judged, batch)) for batch in batches[2:]]
            assert found.losses[form] == pytest.approx((means[0] * n[0] + means[1] * n[1]) / sum(n), rel=1e-5)


def test_activations_that_are_not_finite_are_never_written() -> None:
    model = FAMILIES_TINY["opt"]()
    layer: Any = anatomy(model)[1]
    layer.mlp_in[0].bias.data[0] = math.inf  # of a removed channel: the cut model is sound
    small, batches = shrink(model, UNITS), tiny_batches(model, 3)
    cut = as_state(small)
    found = repair(model, UNITS, small, batches, form=AUTO)
    assert found.form == NONE and list(found.losses) == [NONE] and math.isfinite(found.losses[NONE])
    assert set(found.declined) == {LEAST_SQUARES, BIAS}
    assert "not finite" in str(found) and same_state(small, cut)


def test_held_out_batches_in_which_nothing_is_predicted_repair_nothing() -> None:
    model = FAMILIES_TINY["llama"]()
    batches = tiny_batches(model, 2)
    batches[1] = batches[1] | {"labels": torch.full((3, 10), IGNORED)}
    small = shrink(model, UNITS)
    cut = as_state(small)
    assert repair(model, UNITS, small, batches).form == NONE and same_state(small, cut)


def test_calibration_batches_of_nothing_but_padding_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["opt"]()
    batches = tiny_batches(model, 2)
    batches[0] = batches[0] | {"labels": torch.full((3, 10), IGNORED)}
    small = shrink(model, UNITS)
    cut = as_state(small)
    accept_anything(monkeypatch)
    assert repair(model, UNITS, small, batches).form == LEAST_SQUARES
    assert same_state(small, cut)


def test_a_model_without_biases_has_no_bias_form_and_says_so() -> None:
    model = FAMILIES_TINY["llama"]()
    found = repair(model, UNITS, shrink(model, UNITS), tiny_batches(model, 3), form=AUTO)
    assert BIAS not in found.losses and "have none" in found.declined[BIAS] and "bias: " in str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "timm vit"])
def test_half_precision_is_solved_in_full_and_stays_what_it_is(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FAMILIES_TINY[name]()
    half = copy.deepcopy(full).to(dtype)
    full = copy.deepcopy(half).float()
    batches, smalls = tiny_batches(full, 3), []
    for model in (full, half):
        smalls.append(shrink(model, UNITS))
        accept_anything(monkeypatch)
        repair(model, UNITS, smalls[-1], batches, damping=0.1)
    assert {parameter.dtype for parameter in smalls[1].parameters()} == {dtype}
    for one, other in zip(smalls[0].parameters(), smalls[1].parameters(), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=0.1, atol=0.1)


def test_a_solution_too_large_for_the_models_precision_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["gpt2"]().half()
    monkeypatch.setattr(recovery, "_solve", lambda matrix, right: torch.full_like(right, 1e6))
    small = shrink(model, UNITS)
    cut = as_state(small)
    found = repair(model, UNITS, small, tiny_batches(model, 2))
    assert "not finite" in found.declined[LEAST_SQUARES] and same_state(small, cut)


def test_k_v_groups_are_repaired_like_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["llama"]()
    group, heads = [Unit(KV_GROUP, 1, 0)], [Unit(HEAD, 1, 0), Unit(HEAD, 1, 1)]
    smalls = []
    for units in (group, heads):
        smalls.append(shrink(model, units))
        accept_anything(monkeypatch)
        repair(model, units, smalls[-1], tiny_batches(model, 3))
    assert same_state(smalls[0], as_state(smalls[1]))


def test_singular_equations_have_the_smallest_solution() -> None:
    matrix, right = torch.diag(torch.tensor([2.0, 0.0])).double(), torch.tensor([[4.0], [0.0]]).double()
    torch.testing.assert_close(recovery._solve(matrix, right), torch.tensor([[2.0], [0.0]]).double())
    assert recovery._solve(torch.zeros(2, 2).double(), torch.zeros(2, 3).double()).eq(0).all()
    assert recovery._solve(torch.full((2, 2), math.nan).double(), right).isnan().all()
    assert recovery._solve(torch.zeros(0, 0).double(), torch.zeros(0, 3).double()).shape == (0, 3)


class Interruption(Exception):
    pass


@pytest.mark.parametrize("at", [1, 3, 4, 5, 6])
def test_an_interruption_leaves_both_models_as_they_were(at: int) -> None:
    """3 batches to fit, one judgement of the cut model and one of each form."""
    model = FAMILIES_TINY["opt"]()
    small, state = shrink(model, UNITS), as_state(model)
    cut = as_state(small)

    def stop(done: int, total: int) -> None:
        if done == at:
            raise Interruption

    with pytest.raises(Interruption):
        repair(model, UNITS, small, tiny_batches(model, 4), form=AUTO, progress=stop)
    assert hook_count(model) == hook_count(small) == 0
    assert same_state(model, state) and same_state(small, cut)


def test_dropout_is_off_the_dense_model_untouched_and_all_modes_are_put_back() -> None:
    model = FAMILIES_TINY["opt"]()
    small, state = shrink(model, UNITS), as_state(model)
    still = copy.deepcopy(small)
    expected = repair(model, UNITS, still, tiny_batches(model, 4), form=AUTO)
    model.train()
    small.train()
    flags = [parameter.requires_grad for parameter in small.parameters()]
    assert repair(model, UNITS, small, tiny_batches(model, 4), form=AUTO) == expected
    assert same_state(small, as_state(still))
    assert model.training and small.training and same_state(model, state)
    assert hook_count(model) == hook_count(small) == 0
    assert [parameter.requires_grad for parameter in small.parameters()] == flags
    assert all(parameter.grad is None and parameter.is_leaf for parameter in small.parameters())
    assert not any(parameter.is_inference() for parameter in small.parameters())


@pytest.mark.parametrize("break_it", [False, True])
def test_progress_goes_up_by_one_to_the_end(break_it: bool) -> None:
    model = FAMILIES_TINY["opt"]()
    if break_it:
        layer: Any = anatomy(model)[1]
        layer.mlp_in[0].bias.data[0] = math.inf
    told: list[tuple[int, int]] = []
    repair(model, UNITS, shrink(model, UNITS), tiny_batches(model, 4), form=AUTO, progress=lambda *step: told.append(step))
    assert told == [(i, 6) for i in range(1, 7)]


def test_nothing_removed_is_nothing_to_repair() -> None:
    model = FAMILIES_TINY["llama"]()
    found = repair(model, [], shrink(model, []), tiny_batches(model, 2))
    assert found.form == NONE and found.losses == {} and "no output projection lost a channel" in str(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "least square"}, "Did you mean 'least squares'"),
        ({"damping": 0.0}, "damping is 0.0"),
        ({"damping": math.nan}, "damping is nan"),
        ({"held_out": 0.0}, "held out is 0.0"),
        ({"held_out": 1.0}, "held out is 1.0"),
        ({"memory": 0}, "memory for moments is 0"),
        ({"n": 1}, "at least 2 batches"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(options: dict[str, Any], said: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    settings = {"n": 4} | options
    batches = tiny_batches(model, settings.pop("n"))

    def never(done: int, total: int) -> None:
        pytest.fail("work was begun")

    with pytest.raises(SettingError, match=said):
        repair(model, UNITS, shrink(model, UNITS), batches, progress=never, **settings)


def test_a_cut_of_other_units_is_refused() -> None:
    model = FAMILIES_TINY["gpt2"]()
    with pytest.raises(SelectionError, match="not the model with these units cut out"):
        repair(model, UNITS, shrink(model, UNITS[:-1]), tiny_batches(model, 2))


@pytest.mark.parametrize(
    ("n", "held_out", "expected"), [(2, 0.25, (1, 1)), (8, 0.25, (6, 2)), (3, 0.9, (1, 2)), (4, 0.99, (1, 3))]
)
def test_the_last_part_of_the_batches_is_held_out(n: int, held_out: float, expected: tuple[int, int]) -> None:
    model = FAMILIES_TINY["llama"]()
    found = repair(model, UNITS, shrink(model, UNITS), tiny_batches(model, n), held_out=held_out)
    assert (found.fitted_on, found.held_out) == expected


def test_a_repair_can_be_written_down() -> None:
    found = Repair(LEAST_SQUARES, {NONE: 3.0, LEAST_SQUARES: 2.5}, {BIAS: "the output projections have none"}, 4, 6, 2)
    assert json.loads(json.dumps(found.to_json()))["losses"] == {NONE: 3.0, LEAST_SQUARES: 2.5}
    assert str(found) == (
        "4 output projections were repaired by least squares on 6 batches: the loss of 2 held-out batches went from 3.0000 to "
        "2.5000 (bias: the output projections have none)."
    )


def test_the_candidates_of_a_whole_model_can_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["gpt2"]()
    units = candidate_units(model, "both", GROUP)
    small = shrink(model, units)
    accept_anything(monkeypatch)
    assert repair(model, units, small, tiny_batches(model, 2), form=AUTO).projections == 2 * len(anatomy(model))
    assert logits_of(small, tiny_batch(model)).isfinite().all()
