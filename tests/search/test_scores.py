from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import SettingError
from secateur.methods import METHODS, choosing_sets, scoring, searching
from secateur.model.families import anatomy, candidate_units, input_dim, weight_of
from secateur.model.moments import DAMPING, Moments, gather
from secateur.search.scores import unit_scores
from secateur.units import HEAD, KV_GROUP, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, hook_count, logits_of, tiny_batches

Entry = tuple[str, str, tuple[int, ...], int | None]  # module, its parameter, the index into it, the input channel it meets


def gpt2_entries(unit: Unit) -> list[Entry]:
    """d = 12, 3 heads of 4; Conv1D weights are (inputs, outputs), and c_attn is [Q | K | V]."""
    block, d, channels = f"transformer.h.{unit.layer}", 12, own_channels(unit, 14)
    if unit.kind == HEAD:
        first, made, last = (
            f"{block}.attn.c_attn",
            [part * d + c for part in range(3) for c in channels],
            f"{block}.attn.c_proj",
        )
    else:
        first, made, last = f"{block}.mlp.c_fc", channels, f"{block}.mlp.c_proj"
    entries: list[Entry] = [(first, "weight", (i, o), i) for i in range(d) for o in made]
    entries += [(first, "bias", (o,), None) for o in made]
    return entries + [(last, "weight", (i, o), i) for i in channels for o in range(d)]


def llama_entries(unit: Unit) -> list[Entry]:
    """d = 16, 4 query heads of 4 over 2 K/V heads; nn.Linear weights are (outputs, inputs), and there are no biases."""
    block, d, channels = f"model.layers.{unit.layer}", 16, own_channels(unit, 14)
    if unit.kind == KV_GROUP:
        channels = list(range(8 * unit.index, 8 * unit.index + 8))
    firsts = [f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"] if unit.kind == MLP else [f"{block}.self_attn.q_proj"]
    last = f"{block}.mlp.down_proj" if unit.kind == MLP else f"{block}.self_attn.o_proj"
    entries: list[Entry] = [(first, "weight", (o, i), i) for first in firsts for i in range(d) for o in channels]
    if unit.kind == KV_GROUP:
        shared, own = [f"{block}.self_attn.{p}_proj" for p in "kv"], range(4 * unit.index, 4 * unit.index + 4)
        entries += [(first, "weight", (o, i), i) for first in shared for i in range(d) for o in own]
    return entries + [(last, "weight", (o, i), i) for i in channels for o in range(d)]


def timm_entries(unit: Unit) -> list[Entry]:
    """d = 12, 3 heads of 4; nn.Linear weights are (outputs, inputs), and qkv is [Q | K | V]."""
    block, d, channels = f"blocks.{unit.layer}", 12, own_channels(unit, 15)
    if unit.kind == HEAD:
        first, made, last = f"{block}.attn.qkv", [part * d + c for part in range(3) for c in channels], f"{block}.attn.proj"
    else:
        first, made, last = f"{block}.mlp.fc1", channels, f"{block}.mlp.fc2"
    entries: list[Entry] = [(first, "weight", (o, i), i) for i in range(d) for o in made]
    entries += [(first, "bias", (o,), None) for o in made]
    return entries + [(last, "weight", (o, i), i) for i in channels for o in range(d)]


def own_channels(unit: Unit, mlp_width: int) -> list[int]:
    last = 4 * unit.index + 4 if unit.kind == HEAD else min(4 * unit.index + 4, mlp_width)
    return list(range(4 * unit.index, last))


MODELS: dict[str, Callable[[Unit], list[Entry]]] = {"gpt2": gpt2_entries, "llama": llama_entries, "timm vit": timm_entries}
UNITS = [Unit(HEAD, 0, 0), Unit(HEAD, 1, 2), Unit(MLP, 0, 1, GROUP), Unit(MLP, 2, 3, GROUP)]
CASES = [*((name, UNITS) for name in MODELS), ("llama", [Unit(KV_GROUP, 0, 0), Unit(KV_GROUP, 1, 1)])]
FROZEN = "transformer.h.0.attn.c_attn.weight"
every_model = pytest.mark.parametrize(("name", "units"), CASES, ids=[*MODELS, "K/V groups of llama"])


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "input_ids" in batch:
        loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def mean_gradients(model: nn.Module, batches: list[dict[str, Tensor]]) -> nn.Module:
    """A copy whose `.grad` is that of the mean loss."""
    model = copy.deepcopy(model)
    for batch in batches:
        (plain_loss(model, batch) / len(batches)).backward()
    return model


def channel_norms(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The 2-norm of every input channel of every module that is given a tensor, over all positions that are not padding."""
    model, seen = copy.deepcopy(model), dict[str, list[Tensor]]()
    real = torch.ones(0, dtype=torch.bool)

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                rows = args[0].detach().reshape(-1, args[0].shape[-1])
                seen.setdefault(name, []).append(rows[real] if len(rows) == len(real) else rows)

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(keep(name))
    for batch in batches:
        real = (batch["labels"] != -100).flatten() if "input_ids" in batch else real
        logits_of(model, batch)
    return {name: torch.cat(inputs).norm(dim=0) for name, inputs in seen.items()}


def value(model: nn.Module, entry: Entry) -> float:
    module, parameter, index, _ = entry
    return float(model.get_parameter(f"{module}.{parameter}").detach()[index])


def gradient(model: nn.Module, entry: Entry) -> float:
    module, parameter, index, _ = entry
    grad = model.get_parameter(f"{module}.{parameter}").grad
    assert grad is not None
    return float(grad[index])


@every_model
def test_magnitude_is_the_mean_absolute_value_of_the_units_own_parameters(name: str, units: list[Unit]) -> None:
    model = FAMILIES_TINY[name]()
    scores = unit_scores("magnitude", model, units)
    for unit in units:
        values = [abs(value(model, entry)) for entry in MODELS[name](unit)]
        assert scores[unit] == pytest.approx(sum(values) / len(values), rel=1e-5)


@every_model
def test_wanda_is_the_sum_of_each_weights_magnitude_times_the_norm_of_the_channel_it_meets(
    name: str, units: list[Unit]
) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 3)
    norms = channel_norms(model, batches)
    scores = unit_scores("wanda", model, units, batches=batches)
    for unit in units:
        weights = [entry for entry in MODELS[name](unit) if entry[3] is not None]
        total = sum(abs(value(model, entry)) * float(norms[entry[0]][entry[3]]) for entry in weights)
        assert scores[unit] == pytest.approx(total, rel=1e-4)


@every_model
def test_taylor_is_the_magnitude_of_the_summed_weight_times_gradient(name: str, units: list[Unit]) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 3)
    twin = mean_gradients(model, batches)
    scores = unit_scores("taylor", model, units, batches=batches)
    for unit in units:
        terms = [value(twin, entry) * gradient(twin, entry) for entry in MODELS[name](unit)]
        assert scores[unit] == pytest.approx(abs(sum(terms)), abs=1e-5 * sum(map(abs, terms)))


@every_model
def test_fisher_is_the_sum_of_squared_weight_times_gradient(name: str, units: list[Unit]) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 3)
    twin = mean_gradients(model, batches)
    scores = unit_scores("fisher", model, units, batches=batches)
    for unit in units:
        terms = [(value(twin, entry) * gradient(twin, entry)) ** 2 for entry in MODELS[name](unit)]
        assert scores[unit] == pytest.approx(sum(terms), rel=1e-4)


def test_the_random_scores_lowest_k_are_a_uniform_subset_over_seeds() -> None:
    model, units = nn.Identity(), [Unit(HEAD, 0, h) for h in range(5)]  # random never looks at the model
    seen: Counter[frozenset[Unit]] = Counter()
    for seed in range(2000):
        scores = unit_scores("random", model, units, seed=seed)
        seen[frozenset(sorted(units, key=scores.__getitem__)[:2])] += 1
    expected = 2000 / math.comb(5, 2)
    chi_squared = sum((seen[frozenset(pair)] - expected) ** 2 / expected for pair in itertools.combinations(units, 2))
    assert chi_squared < 27.9  # the 99.9 % point for 9 degrees of freedom


def test_random_scores_follow_the_seed() -> None:
    model = FAMILIES_TINY["gpt2"]()
    units = candidate_units(model)
    assert unit_scores("random", model, units, seed=1) == unit_scores("random", model, units, seed=1)
    assert unit_scores("random", model, units, seed=1) != unit_scores("random", model, units, seed=2)


@pytest.mark.parametrize("name", FAMILIES_TINY)
def test_every_method_scores_every_unit_of_every_family_with_a_finite_number(name: str) -> None:
    model = FAMILIES_TINY[name]()
    units = candidate_units(model, "both", GROUP) + candidate_units(model, "kv_group")
    batches = tiny_batches(model, 1)
    experts = any(layer.experts for layer in anatomy(model))
    for method in scoring():
        if experts and not METHODS[method].experts:
            with pytest.raises(SettingError, match="experts"):
                unit_scores(method, model, units, batches=batches)
            continue
        scores = unit_scores(method, model, units, batches=batches)
        assert list(scores) == units
        assert all(math.isfinite(score) for score in scores.values())
        assert method in ("flap", "bonsai") or min(scores.values()) >= 0
        assert len(set(scores.values())) > len(units) // 2, f"{method} does not tell units apart"


@pytest.mark.parametrize("method", scoring())
def test_scoring_leaves_the_model_as_it_was(method: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    dense, state = logits_of(model, batches[0]), copy.deepcopy(model.state_dict())
    model.get_parameter(FROZEN).requires_grad_(False)
    model.get_submodule("transformer.h.0").train()
    training = [module.training for module in model.modules()]
    unit_scores(method, model, UNITS, batches=batches)
    assert hook_count(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [key for key, parameter in model.named_parameters() if not parameter.requires_grad] == [FROZEN]
    assert [module.training for module in model.modules()] == training
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(logits_of(model.eval(), batches[0]), dense)


@pytest.mark.parametrize("method", ["wanda", "taylor"])
def test_a_batch_that_fails_in_the_middle_leaves_the_model_as_it_was(method: str) -> None:
    model = FAMILIES_TINY["gpt2"]().train()
    model.get_parameter(FROZEN).requires_grad_(False)
    good, bad = tiny_batches(model, 2)
    with pytest.raises(IndexError):
        unit_scores(method, model, UNITS, batches=[good, bad | {"input_ids": bad["input_ids"] + 1000}])
    assert hook_count(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [key for key, parameter in model.named_parameters() if not parameter.requires_grad] == [FROZEN]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("method", ["wanda", "taylor", "fisher"])
def test_a_model_in_train_mode_is_scored_without_dropout(method: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    calm = unit_scores(method, model, UNITS, batches=batches)
    assert unit_scores(method, model.train(), UNITS, batches=batches) == calm


@pytest.mark.parametrize("method", ["taylor", "fisher"])
def test_gradients_are_taken_where_the_caller_has_turned_them_off(method: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    scores = unit_scores(method, model, UNITS, batches=batches)
    with torch.no_grad():
        assert unit_scores(method, model.requires_grad_(False), UNITS, batches=batches) == scores


@pytest.mark.parametrize("method", ["wanda", "taylor", "fisher"])
def test_a_method_that_needs_batches_says_so(method: str) -> None:
    with pytest.raises(SettingError, match=rf"{method}.*batches"):
        unit_scores(method, FAMILIES_TINY["gpt2"](), UNITS)


@pytest.mark.parametrize("method", ["luck", *searching(), *choosing_sets()])
def test_a_method_that_is_unknown_or_has_no_score_is_refused_with_those_that_have_one(method: str) -> None:
    assert scoring() == ["random", "magnitude", "wanda", "taylor", "fisher", "obs", "flap", "llmpruner", "bonsai"]
    with pytest.raises(SettingError, match=f"'{method}'.*{'.*'.join(scoring())}"):
        unit_scores(method, FAMILIES_TINY["gpt2"](), UNITS)


def compensated_error(model: nn.Module, projection: nn.Module, batches: list[dict[str, Tensor]], gone: list[int]) -> float:
    """The least ridge error of a projection without some inputs, its other columns and bias free: solved as a plain system."""
    moments = Moments(projection)
    gather(model, {projection: moments}, batches)
    mean, gram = moments.means()
    weight = weight_of(projection).detach().double()
    weight = weight if input_dim(projection) == 1 else weight.T
    gram = gram - mean[:, None] * mean if isinstance(projection.bias, Tensor) else gram
    gram = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    stay = [i for i in range(len(gram)) if i not in gone]
    columns = torch.linalg.solve(gram[stay][:, stay], gram[stay] @ weight.T).T
    error = weight.clone()
    error[:, stay] -= columns
    return float((error @ gram * error).sum())


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize(("kind", "width"), [(HEAD, 0), (MLP, GROUP), (MLP, 1)])
def test_obs_adds_up_to_the_error_that_is_left_when_the_other_columns_make_up_for_it(
    family: str, kind: str, width: int
) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 4)
    layer = anatomy(model)[1]
    units = [unit for unit in candidate_units(model, kind, width or GROUP) if unit.layer == 1]
    scores = unit_scores("obs", model, units, batches=batches)
    order = sorted(scores, key=scores.__getitem__)
    total, gone = 0.0, list[int]()
    for unit in order[: len(order) // 2]:
        (part,) = layer.ranges(unit)
        total, gone = total + scores[unit], [*gone, *part.channels]
        left = compensated_error(model, part.projection, batches, gone)
        # A unit's score is raised to that of the one before it, so that sums may be above.
        assert left <= total * (1 + 1e-6)
        assert unit is not order[0] or left == pytest.approx(total, rel=1e-6)


def test_of_two_channels_that_carry_the_same_obs_removes_one_and_keeps_the_other() -> None:
    model = FAMILIES_TINY["gpt2"]()
    first: Any = anatomy(model)[0].mlp_in[0]
    with torch.no_grad():
        first.weight[:, 5], first.bias[5] = first.weight[:, 3], first.bias[3]
    units = [unit for unit in candidate_units(model, MLP, 1) if unit.layer == 0]
    scores = unit_scores("obs", model, units, batches=tiny_batches(model, 6))
    twins = sorted(scores[Unit(MLP, 0, i, 1)] for i in (3, 5))
    assert twins[0] < 0.2 * twins[1]
