"""Each rival against a direct computation on a tiny model."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import SettingError
from secateur.methods import GENERATIONS, MASKS_PER_BATCH, METHODS, OFFSPRING, SURVIVORS, choosing_sets
from secateur.model.families import anatomy, candidate_units, input_dim, weight_of
from secateur.model.losses import batch_loss, predict, reference_of
from secateur.model.zeroing import zeroed
from secateur.rivals.scores import Fluctuation, ridge
from secateur.rivals.sets import Cell, Levels, even_levels, evolved, mutated, rearranged
from secateur.search.scores import mask_gradients, unit_scores, unit_set
from secateur.streams import SCORES, stream
from secateur.units import HEAD, KV_GROUP, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, hook_count, logits_of, loss_without, tiny_batches
from worlds import Run, World, check_refused, prune_command

Batches = list[dict[str, Tensor]]


def channels_of(model: nn.Module, unit: Unit) -> tuple[nn.Module, list[int]]:
    (part,) = anatomy(model)[unit.layer].ranges(unit)
    return part.projection, list(part.channels)


def scaled_loss(model: nn.Module, batch: dict[str, Tensor], unit: Unit, row: int, scale: float) -> float:
    """The batch's loss with one unit's channels multiplied in one row alone."""
    projection, channels = channels_of(model, unit)

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].clone()
        n = len(x) // len(next(iter(batch.values())))  # windows of an image
        x[row * n : (row + 1) * n, ..., channels] *= scale
        return (x, *args[1:])

    handle = projection.register_forward_pre_hook(hook)
    with torch.no_grad():
        loss = float(F.cross_entropy(*predict(model, batch)))  # in the double precision of the model, for small differences
    handle.remove()
    return loss


# Mask gradients

FAMILIES = ["gpt2", "llama", "gpt_neox", "vit", "timm swin", "bert", "bert classes"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_gradient_is_the_slope_of_one_examples_loss_in_the_mask_of_one_unit(family: str) -> None:
    model = FAMILIES_TINY[family]().double()
    batches = tiny_batches(model, 2)
    batches = [{name: x.double() if x.is_floating_point() else x for name, x in batch.items()} for batch in batches]
    units = [Unit(HEAD, 0, 0), Unit(HEAD, 1, 2), Unit(MLP, 1, 3, GROUP), Unit(KV_GROUP, 1, 0)]
    gradients = mask_gradients(model, units, batches)
    assert gradients.shape == (6, 4)
    for (b, row), (i, unit) in itertools.product(((0, 1), (1, 0), (1, 2)), enumerate(units)):
        step = 3e-3  # Llama's norms compute in single precision
        up, down = (scaled_loss(model, batches[b], unit, row, 1 + s) for s in (step, -step))
        slope = 3 * (up - down) / (2 * step)  # a row is a third of the batch
        assert float(gradients[3 * b + row, i]) == pytest.approx(slope, rel=3e-3, abs=3e-4)


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_mask_gradients_take_one_pass_a_batch_and_leave_the_model_as_it_was(family: str) -> None:
    model = FAMILIES_TINY[family]().train()
    model.requires_grad_(False)
    batches, passes = tiny_batches(model, 3), list[int]()
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        mask_gradients(model, candidate_units(model, "both", GROUP), batches)
    handle.remove()
    assert len(passes) == 3
    assert hook_count(model) == 0 and all(module.training for module in model.modules())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


def test_mask_gradients_are_of_a_loss_of_ones_own() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches, units = tiny_batches(model, 1), candidate_units(model)
    plain = mask_gradients(model, units, batches)
    tripled = mask_gradients(model, units, batches, lambda model, batch: 3 * batch_loss(model, batch))
    assert torch.allclose(tripled, 3 * plain, rtol=1e-4)


@pytest.mark.parametrize("family", ["bert embeddings", "dinov2", "xlm-roberta"])
def test_mask_gradients_of_a_model_without_labels_are_not_zero(family: str) -> None:
    model = FAMILIES_TINY[family]()
    gradients = mask_gradients(model, candidate_units(model), tiny_batches(model, 1))
    assert gradients.isfinite().all() and (gradients.abs().sum(0) > 0).all()


def test_experts_are_refused_in_one_sentence() -> None:
    model = FAMILIES_TINY["mixtral"]()
    batches, heads, experts = tiny_batches(model, 1), candidate_units(model), candidate_units(model, "expert")
    assert mask_gradients(model, heads, batches).shape == (3, len(heads))
    with pytest.raises(SettingError, match="experts"):
        mask_gradients(model, experts, batches)
    for method in choosing_sets():
        with pytest.raises(SettingError, match=f"{method}.*experts"):
            unit_set(method, model, experts, k=2, batches=batches)
        assert len(unit_set(method, model, heads, k=2, batches=batches).units) == 2


# FLAP


def entering(model: nn.Module, projection: nn.Module, batches: Batches) -> np.ndarray[Any, Any]:
    """What enters a projection at all positions that are not padding, in numpy."""
    seen: list[Tensor] = []
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
    for batch in batches:
        logits_of(model, batch)
    handle.remove()
    padded = "input_ids" in batches[0] and "attention_mask" not in batches[0]
    real = [
        (batch["labels"] != -100).flatten() if padded else torch.ones(len(x), dtype=torch.bool)
        for batch, x in zip(batches, seen, strict=True)
    ]
    return torch.cat([x[keep] for x, keep in zip(seen, real, strict=True)]).numpy().astype(np.float64)


@pytest.mark.parametrize("family", ["gpt2", "llama", "timm vit", "timm swin"])
@pytest.mark.parametrize("target", ["both", "kv_group+mlp"])
def test_flap_is_the_standardised_variance_of_channels_times_their_squared_weights(family: str, target: str) -> None:
    model = FAMILIES_TINY[family]()
    batches, units = tiny_batches(model, 3), candidate_units(model, target, GROUP)
    scores = unit_scores("flap", model, units, batches=batches)
    for unit in units:
        projection, channels = channels_of(model, unit)
        weight = weight_of(projection).detach().numpy().astype(np.float64)
        weight = weight if input_dim(projection) == 1 else weight.T
        metric = entering(model, projection, batches).var(axis=0, ddof=1) * (weight**2).sum(axis=0)
        standard = (metric - metric.mean()) / metric.std(ddof=1)
        assert scores[unit] == pytest.approx(standard[channels].mean(), rel=1e-3, abs=1e-5)


def test_the_fluctuation_of_a_large_constant_is_none_and_small_changes_on_it_are_seen() -> None:
    seen, rng = Fluctuation(), np.random.default_rng(0)
    values = 1000 + rng.normal(0, 0.1, (60, 2))
    values[:, 0] = 1000
    for piece in np.split(values, [1, 8, 8, 40]):
        seen.add(torch.tensor(piece))
    constant, changing = seen.variance().tolist()
    assert constant < 1e-9 and changing == pytest.approx(values[:, 1].var(ddof=1), rel=1e-2)


# LLM-Pruner


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_llmpruner_is_the_sum_of_the_magnitudes_of_weight_times_gradient(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 2)
    units = [Unit(HEAD, 0, 1), Unit(MLP, 2, 3, GROUP), Unit(KV_GROUP, 1, 1)]
    twin: Any = copy.deepcopy(model)
    for batch in batches:
        (twin(input_ids=batch["input_ids"], labels=batch["labels"]).loss / 2).backward()
    scores = unit_scores("llmpruner", model, units, batches=batches)
    for unit in units:
        by_hand = 0.0
        for s in anatomy(twin)[unit.layer].slices(unit):
            assert s.parameter.grad is not None
            by_hand += float(s.of(s.parameter.detach() * s.parameter.grad).abs().sum())
        assert scores[unit] == pytest.approx(by_hand, rel=1e-4)
        assert scores[unit] > unit_scores("taylor", model, [unit], batches=batches)[unit]


# Bonsai


def test_the_ridge_finds_a_linear_damage_and_shrinks_what_is_noise() -> None:
    rng = np.random.default_rng(0)
    masks = (rng.random((200, 30)) < 0.15).astype(float)
    true = rng.normal(0, 1, 30)
    assert ridge(masks, masks @ true + 5) == pytest.approx(true, abs=0.02)  # an offset is no unit's
    noisy = ridge(masks, masks @ true + rng.normal(0, 0.3, 200))
    assert np.corrcoef(noisy, true)[0, 1] > 0.98
    assert np.abs(ridge(masks, rng.normal(0, 1, 200))).mean() < 0.1
    few = ridge(masks[:20], masks[:20] @ true)  # fewer masks than units
    assert np.isfinite(few).all() and np.corrcoef(few, true)[0, 1] > 0.3


def test_the_ridge_has_the_penalty_of_least_error_when_each_row_is_left_out_in_turn() -> None:
    rng = np.random.default_rng(1)
    x, true = (rng.random((40, 25)) < 0.2).astype(float), rng.normal(0, 0.3, 25)
    y = x @ true + rng.normal(0, 0.5, 40)

    def fitted(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], penalty: float) -> tuple[np.ndarray[Any, Any], float]:
        a, b = x - x.mean(0), y - y.mean()
        slope = np.linalg.solve(a.T @ a + penalty * np.eye(25), a.T @ b)
        return slope, float(y.mean() - x.mean(0) @ slope)

    centred = x - x.mean(0)
    unit = (centred**2).sum() / 25
    errors = {}
    for penalty in 10.0 ** np.arange(-3, 4) * unit:
        left_out = []
        for i in range(40):
            slope, offset = fitted(np.delete(x, i, 0), np.delete(y, i), penalty)
            left_out.append((y[i] - offset - x[i] @ slope) ** 2)
        errors[penalty] = np.mean(left_out)
    best = min(errors, key=errors.__getitem__)
    assert ridge(x, y) == pytest.approx(fitted(x, y, best)[0])


def test_bonsai_regresses_the_damage_of_random_masks_on_what_they_remove() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches, units = tiny_batches(model, 3), candidate_units(model, "both", GROUP)  # 21
    rng, rows, damages = stream(7, SCORES), [], []
    for batch in batches:
        dense = loss_without(model, batch, [])
        for _ in range(MASKS_PER_BATCH):
            n = max(1, round(rng.uniform(0.05, 0.20) * 21))
            gone = rng.choice(21, size=n, replace=False).tolist()
            rows.append([float(i in gone) for i in range(21)])
            damages.append(loss_without(model, batch, [units[i] for i in gone]) - dense)
    by_hand = ridge(np.array(rows), np.array(damages))
    scores = unit_scores("bonsai", model, units, batches=batches, seed=7)
    assert [scores[unit] for unit in units] == pytest.approx(by_hand.tolist(), rel=1e-5)


def test_bonsai_knows_units_whose_damage_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["gpt2"]()
    units = candidate_units(model)
    harm = {unit: float(i) for i, unit in enumerate(units)}
    removed: list[Unit] = []

    def zero(model: nn.Module, gone: Sequence[Unit]) -> Any:
        removed[:] = gone
        return zeroed(model, gone)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        found = torch.tensor(2.0 + sum(harm[unit] for unit in removed))
        removed.clear()
        return found

    monkeypatch.setattr("secateur.rivals.scores.zeroed", zero)
    scores = unit_scores("bonsai", model, units, batches=tiny_batches(model, 4), loss=loss)
    assert sorted(units, key=scores.__getitem__) == units
    assert [scores[unit] for unit in units] == pytest.approx(list(harm.values()), abs=0.1)


# Kwon et al.


def block_sum(fisher: Tensor, gone: Sequence[int]) -> float:
    return float(fisher[list(gone)][:, list(gone)].sum())


def test_the_rearrangement_finds_masks_that_cancel_each_other() -> None:
    # Two masks of least diagonal act alike; a third undoes the first. Found by brute force: 0 and 2.
    gradients = torch.tensor([[1.0, 1.0, -1.1, 3.0], [0.0, 0.1, 0.1, 0.0]])
    fisher = gradients.T @ gradients
    best = min(itertools.combinations(range(4), 2), key=lambda gone: block_sum(fisher, gone))
    assert sorted(rearranged(fisher, 2)) == list(best) == [0, 2]


@pytest.mark.parametrize("seed", range(8))
def test_the_rearrangement_lies_between_its_start_and_the_best_set(seed: int) -> None:
    gradients = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    fisher = gradients.T @ gradients
    for n in range(8):
        found, start = rearranged(fisher, n), fisher.diagonal().argsort()[:n].tolist()
        assert len(set(found)) == n
        best = min(block_sum(fisher, gone) for gone in itertools.combinations(range(7), n))
        assert best - 1e-9 <= block_sum(fisher, found) <= block_sum(fisher, start) + 1e-9
    assert rearranged(torch.diag(torch.arange(7.0)), 3) == [0, 1, 2]  # without interactions the start is the best


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit"])
def test_kwon_removes_from_each_layer_as_many_as_the_diagonal_says_and_exchanges_them_there(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches, units = tiny_batches(model, 2), candidate_units(model, "both", GROUP)
    chosen = unit_set("kwon", model, units, k=8, batches=batches)
    gradients = mask_gradients(model, units, batches)
    diagonal = dict(zip(units, gradients.square().sum(0).tolist(), strict=True))
    assert [chosen.scores[unit] for unit in units] == pytest.approx(list(diagonal.values()), rel=1e-5)
    lowest = sorted(units, key=diagonal.__getitem__)[:8]
    assert len(set(chosen.units)) == 8
    assert Counter((u.layer, u.kind) for u in chosen.units) == Counter((u.layer, u.kind) for u in lowest)

    def harm(gone: Sequence[Unit], layer: int, kind: str) -> float:
        own = [units.index(unit) for unit in gone if (unit.layer, unit.kind) == (layer, kind)]
        return float(gradients[:, own].sum(1).square().sum())

    for layer, kind in itertools.product(range(3), (HEAD, MLP)):
        assert harm(chosen.units, layer, kind) <= harm(lowest, layer, kind) + 1e-6


# EvoPress

CELLS: dict[Cell, list[Unit]] = {(layer, HEAD): [Unit(HEAD, layer, i) for i in range(4)] for layer in range(5)}


def test_the_evolution_starts_with_the_same_share_in_every_cell() -> None:
    assert even_levels({(0, HEAD): 4, (1, HEAD): 4}, 4) == {(0, HEAD): 2, (1, HEAD): 2}
    assert even_levels({(0, HEAD): 4, (0, MLP): 12}, 5) == {(0, HEAD): 1, (0, MLP): 4}
    assert even_levels({(0, HEAD): 3, (1, HEAD): 3, (2, HEAD): 3}, 2) == {(0, HEAD): 1, (1, HEAD): 1, (2, HEAD): 0}


def test_a_mutation_moves_one_to_three_removals_and_keeps_their_number() -> None:
    rng, moved = np.random.default_rng(0), Counter[int]()
    for _ in range(300):
        levels = dict(zip(CELLS, rng.multinomial(6, [0.2] * 5).clip(0, 4).tolist(), strict=True))
        other = mutated(levels, CELLS, rng)
        assert sum(other.values()) == sum(levels.values())
        assert all(0 <= n <= 4 for n in other.values())
        moved[sum(abs(other[cell] - levels[cell]) for cell in CELLS) // 2] += 1
    assert set(moved) == {0, 1, 2, 3} and moved[1] > moved[2] > moved[3] > 0


def test_the_evolution_finds_the_best_levels_and_measures_in_growing_steps() -> None:
    asked: list[int] = []

    def fitness(levels: Levels, batches: Sequence[int]) -> float:
        asked.append(len(batches))
        return sum((n * cell[0]) ** 2 for cell, n in levels.items()) + 0.001 * sum(batches)

    best = evolved(even_levels(dict.fromkeys(CELLS, 4), 6), CELLS, fitness, 8, np.random.default_rng(0))
    assert best == {(0, HEAD): 4, (1, HEAD): 2, (2, HEAD): 0, (3, HEAD): 0, (4, HEAD): 0}
    assert asked == [8, *([1] * OFFSPRING + [2] * SURVIVORS + [8]) * GENERATIONS]


def test_the_evolution_is_not_led_astray_by_a_loss_that_is_not_finite() -> None:
    def fitness(levels: Levels, batches: Sequence[int]) -> float:
        return math.nan if levels[0, HEAD] else float(levels[4, HEAD])

    best = evolved(even_levels(dict.fromkeys(CELLS, 4), 5), CELLS, fitness, 1, np.random.default_rng(0))
    assert best[0, HEAD] == best[4, HEAD] == 0


def divergence(model: nn.Module, batches: Batches, gone: Sequence[Unit]) -> float:
    """The mean KL divergence of classes from the dense model's, computed from whole logits."""
    values = []
    for batch in batches:
        with zeroed(model, gone):
            found = logits_of(model, batch).log_softmax(-1)
        values.append(float(F.kl_div(found, logits_of(model, batch).log_softmax(-1), log_target=True, reduction="batchmean")))
    return float(np.mean(values))


@pytest.mark.parametrize("family", ["vit", "timm vit"])
def test_evopress_chooses_k_units_that_are_no_farther_from_the_dense_model_than_an_even_share(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches, units = tiny_batches(model, 4), candidate_units(model, "both", GROUP)
    chosen = unit_set("evopress", model, units, k=5, batches=batches)
    assert len(set(chosen.units)) == 5
    order = sorted(units, key=chosen.scores.__getitem__)
    cells = {cell: [u for u in order if (u.layer, u.kind) == cell] for cell in itertools.product(range(3), (HEAD, MLP))}
    start = [u for cell, n in even_levels({cell: len(of) for cell, of in cells.items()}, 5).items() for u in cells[cell][:n]]
    assert len(start) == 5
    assert divergence(model, batches, chosen.units) < divergence(model, batches, start)
    for of in cells.values():  # a cell loses its units in the order of their scores
        gone = [unit in chosen.units for unit in of]
        assert gone == sorted(gone, reverse=True)


def test_evopress_takes_texts_with_labels_or_with_the_dense_models_outputs() -> None:
    model = FAMILIES_TINY["llama"]()
    batches, units = tiny_batches(model, 2), candidate_units(model)
    with torch.no_grad():
        own = [{**batch, "reference": reference_of(model, batch)} for batch in batches]
    for some in (batches, own):
        assert len(set(unit_set("evopress", model, units, k=3, batches=some).units)) == 3


# All of them


@pytest.mark.parametrize("method", choosing_sets())
def test_a_set_is_the_same_for_the_same_seed_and_leaves_the_model_as_it_was(method: str) -> None:
    model = FAMILIES_TINY["gpt2"]().train()
    batches, units = tiny_batches(model, 2), candidate_units(model, "both", GROUP)
    state = copy.deepcopy(model.state_dict())
    first, again = (unit_set(method, model, units, k=4, batches=batches, seed=3) for _ in range(2))
    assert first == again
    assert hook_count(model) == 0 and all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_bonsai_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches, units = tiny_batches(model, 2), candidate_units(model)
    first, again, other = (unit_scores("bonsai", model, units, batches=batches, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("method", ["bonsai", "evopress", "kwon", "flap", "llmpruner"])
def test_a_method_makes_as_many_model_passes_as_its_row_says(method: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches, units, passes = tiny_batches(model, 5), candidate_units(model), list[int]()
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    choose: Callable[[], Any] = (
        (lambda: unit_set(method, model, units, k=3, batches=batches))
        if METHODS[method].search
        else (lambda: unit_scores(method, model, units, batches=batches))
    )
    choose()
    handle.remove()
    assert len(passes) == METHODS[method].passes(5)


def test_a_set_must_leave_some_units_and_take_some() -> None:
    model = FAMILIES_TINY["gpt2"]()
    units, batches = candidate_units(model), tiny_batches(model, 1)
    for k in (0, 9):
        with pytest.raises(SettingError, match=f"kwon is asked for {k} of 9 units"):
            unit_set("kwon", model, units, k=k, batches=batches)
    with pytest.raises(SettingError, match="kwon needs calibration batches"):
        unit_set("kwon", model, units, k=2, batches=[])
    with pytest.raises(SettingError, match=r"fisher.*kwon.*evopress"):
        unit_set("fisher", model, units, k=2, batches=batches)


@pytest.mark.parametrize("method", choosing_sets())
@pytest.mark.parametrize("goal", [("--keep-params", "0.9"), ("--layout", "uniform")])
def test_a_method_that_chooses_sets_needs_a_ratio(
    method: str, goal: tuple[str, str], world: World, tmp_path: Path, run: Run
) -> None:
    said = check_refused(run(*prune_command(world, tmp_path / "out", "--method", method, *goal)), tmp_path / "out")
    assert method in said and "needs a --ratio" in said
