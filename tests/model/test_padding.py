"""Padding counts nowhere: not in losses, damages, scores or repairs, at whichever end of a text it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.cut.repair import repair
from secateur.cut.surgery import shrink
from secateur.model.families import anatomy, candidate_units, task_of
from secateur.model.losses import IGNORED, REFERENCE, batch_loss, batch_losses, embeddings, reference_of
from secateur.search.damage import DamageMeter
from secateur.search.scores import unit_scores
from secateur.units import HEAD, MLP, Unit
from tiny import CAUSAL, CLASSES, FAMILIES_TINY, GROUP, TEXT_CLASSES, TEXT_EMBEDDINGS, TEXT_ENCODERS, VOCABULARY

LENGTHS = (10, 6, 3)
PAD = 2
LEFT, RIGHT = "left", "right"
Batch = dict[str, Tensor]

EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")  # tests/test_experts.py zeroes theirs by hand
every_text_family = pytest.mark.parametrize("name", [*CAUSAL, *TEXT_ENCODERS])
either_end = pytest.mark.parametrize("end", [LEFT, RIGHT])


def rows(model: nn.Module, seed: int = 0) -> list[Batch]:
    """Three texts of different lengths, each a batch without padding, with the labels of the model's task."""
    rng, found = torch.Generator().manual_seed(seed), []
    task = task_of(model)
    for length in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (1, length), generator=rng)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if task == "text":
            batch["labels"] = ids.clone()
        elif task == "masked text":
            batch["labels"] = ids.masked_fill(torch.arange(length) % 3 != 1, IGNORED)
        elif task == "text classes":
            batch["labels"] = torch.randint(0, CLASSES, (1,), generator=rng)
        else:
            with torch.no_grad():  # not the model's own, from which every distance would be 0
                batch[REFERENCE] = embeddings(model, batch) + torch.randn(1, 12, generator=rng)
        found.append(batch)
    return found


def padded(batches: Sequence[Batch], end: str, *, filler: int = PAD, positions: bool = False) -> Batch:
    """The texts as one batch; with `positions`, those that the tokens have without the padding."""
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    fillers = {"input_ids": filler, "attention_mask": 0, "labels": IGNORED}
    joined = {}
    for key in batches[0]:
        values = []
        for batch in batches:
            missing = longest - batch["input_ids"].shape[1]
            per_token = key in fillers and batch[key].dim() == 2
            widths = (missing, 0) if end == LEFT else (0, missing)
            values.append(F.pad(batch[key], widths, value=fillers[key]) if per_token else batch[key])
        joined[key] = torch.cat(values)
    if positions:
        joined["position_ids"] = (joined["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return joined


def batch_of(model: nn.Module, name: str, end: str, seed: int = 0, filler: int = PAD) -> Batch:
    """A padded batch; a causal model that is padded at its left is told the positions, as `generate` does."""
    return padded(rows(model, seed), end, filler=filler, positions=end == LEFT and name in CAUSAL)


def own_loss(model: Any, batch: Batch) -> Tensor:
    """What transformers says; of embeddings, the mean distance of the mean of each text's own tokens."""
    if REFERENCE not in batch:
        loss: Tensor = model(**batch).loss
        return loss
    given = {key: value for key, value in batch.items() if key != REFERENCE}
    tokens, mask = model(**given).last_hidden_state, batch["attention_mask"]
    pooled = torch.stack([row[real == 1].mean(0) for row, real in zip(tokens, mask, strict=True)])
    return (1 - F.cosine_similarity(pooled, batch[REFERENCE])).mean()


# Losses


@every_text_family
@either_end
def test_a_padded_batch_has_the_loss_that_the_model_itself_says(name: str, end: str) -> None:
    model = FAMILIES_TINY[name]()
    batch = batch_of(model, name, end)
    with torch.no_grad():
        assert float(batch_loss(model, batch)) == pytest.approx(float(own_loss(model, batch)), abs=1e-5)
        without = {key: value for key, value in batch.items() if key != "attention_mask"}
        if name not in ("roberta", "xlm-roberta") and not (end == RIGHT and name in CAUSAL):
            # A causal model does not look ahead at padding, and RoBERTa knows its padding by the token for the positions.
            assert abs(float(batch_loss(model, without)) - float(batch_loss(model, batch))) > 1e-4  # the mask matters


@every_text_family
def test_a_batch_padded_at_its_right_has_the_mean_loss_of_its_texts_alone(name: str) -> None:
    model = FAMILIES_TINY[name]()
    alone = rows(model)
    with torch.no_grad():
        total, n = (sum(numbers) for numbers in zip(*(batch_losses(model, batch) for batch in alone), strict=True))
        found = batch_losses(model, batch_of(model, name, RIGHT))
    assert found[1] == n
    assert found[0] / found[1] == pytest.approx(total / n, abs=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_told_its_positions_has_the_mean_loss_of_its_texts_alone_at_the_left_too(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batch = batch_of(model, name, LEFT)
    for row, length in enumerate(LENGTHS):
        batch["labels"][row, -length] = IGNORED  # transformers lets the padding before a text predict its first token
    with torch.no_grad():
        total, n = (sum(numbers) for numbers in zip(*(batch_losses(model, one) for one in rows(model)), strict=True))
        found = batch_losses(model, batch)
    assert found[1] == n
    assert found[0] / found[1] == pytest.approx(total / n, abs=1e-5)


def test_labels_on_padding_count_no_more_than_the_padding_does() -> None:
    for name in ("llama", "bert"):
        model = FAMILIES_TINY[name]()
        batch = batch_of(model, name, RIGHT)
        spoilt = batch | {"labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, 5)}
        with torch.no_grad():
            assert float(batch_loss(model, spoilt)) == float(batch_loss(model, batch))


# Damages

UNITS = [Unit(HEAD, 1, 0), Unit(MLP, 1, 1, GROUP), Unit(HEAD, 2, 1)]
COMMITTED = Unit(HEAD, 0, 1)
WAYS: list[dict[str, Any]] = [
    {"stack": 1, "lanes": 1},
    {"stack": 1, "lanes": 2, "cache_memory": 0},
    {"stack": 2, "lanes": 1, "cache_memory": 0},
    {"stack": 2, "lanes": 2},
]


def without_columns(model: nn.Module, units: Sequence[Unit]) -> nn.Module:
    """A copy whose output projections have zeros where the units enter, by weights alone."""
    model = copy.deepcopy(model)
    for unit in units:
        layer = anatomy(model)[unit.layer]
        module: Any = layer.mlp_out if unit.kind == MLP else layer.out
        width = GROUP if unit.kind == MLP else layer.head_dim
        weight = module.weight.data if hasattr(module, "nf") else module.weight.data.T  # Conv1D: a row for each input
        weight[unit.index * width : (unit.index + 1) * width] = 0
    return model


@pytest.mark.parametrize("name", [name for name in (*CAUSAL, *TEXT_ENCODERS) if name not in EXPERTS])
@either_end
def test_damages_on_padded_batches_are_those_of_columns_zeroed_by_hand_in_every_way_of_measuring(name: str, end: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = [batch_of(model, name, end, seed) for seed in range(2)]
    with torch.no_grad():
        base = [float(own_loss(without_columns(model, [COMMITTED]), batch)) for batch in batches]
        masked = [[float(own_loss(without_columns(model, [COMMITTED, unit]), batch)) for batch in batches] for unit in UNITS]
    for way in WAYS:
        meter = DamageMeter(model, batches, **way)
        meter.commit(COMMITTED)
        found = list(meter.measure([(unit, (0, 1)) for unit in UNITS]))
        for one, expected in zip(found, masked, strict=True):
            assert one.base_losses == pytest.approx(base, abs=1e-5), way
            assert one.masked_losses == pytest.approx(expected, abs=1e-5), way
    assert min(abs(one - b) for losses in masked for one, b in zip(losses, base, strict=True)) > 1e-6  # something was measured


# Scores and repairs


@every_text_family
def test_wandas_norms_of_a_padded_batch_are_those_of_its_texts_alone(name: str) -> None:
    model = FAMILIES_TINY[name]()
    units = candidate_units(model, "both", GROUP)
    alone = unit_scores("wanda", model, units, batches=rows(model))
    for end in (LEFT, RIGHT) if name in CAUSAL else (RIGHT,):  # an encoder is not told its positions
        found = unit_scores("wanda", model, units, batches=[batch_of(model, name, end)])
        assert list(found.values()) == pytest.approx(list(alone.values()), rel=1e-4)


# RoBERTa counts positions by the token of the padding, so that another one there moves them.
by_any_filler = pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "bert classes", "bert embeddings", "modernbert"])


@by_any_filler
@pytest.mark.parametrize("method", ["wanda", "taylor", "fisher"])
def test_what_is_written_on_the_padding_changes_no_score(name: str, method: str) -> None:
    model = FAMILIES_TINY[name]()
    units = candidate_units(model, "both", GROUP)
    found = [unit_scores(method, model, units, batches=[batch_of(model, name, RIGHT, filler=filler)]) for filler in (PAD, 9)]
    assert list(found[0].values()) == pytest.approx(list(found[1].values()), rel=1e-4, abs=1e-7)
    assert any(score > 1e-4 for score in found[0].values())


@by_any_filler
def test_what_is_written_on_the_padding_changes_no_repair(name: str) -> None:
    model = FAMILIES_TINY[name]()
    states: list[list[dict[str, Tensor]]] = []
    for filler in (PAD, 9):
        small = shrink(model, UNITS)
        batches = [batch_of(model, name, RIGHT, seed, filler) for seed in range(3)]
        seen: list[dict[str, Tensor]] = []
        repair(model, UNITS, small, batches, progress=_kept(small, seen))
        states.append(seen)
    assert len(states[0]) == len(states[1])
    for one, other in zip(*states, strict=True):
        for key, value in one.items():
            torch.testing.assert_close(value, other[key], rtol=1e-3, atol=1e-4, msg=key)
    repaired, cut = states[0][-1], dict(shrink(model, UNITS).state_dict())
    assert any(not torch.equal(value, cut[key]) for key, value in repaired.items())  # a form was written, and compared


def _kept(small: nn.Module, seen: list[dict[str, Tensor]]) -> Callable[[int, int], None]:
    """Remembers what the model was each time that progress is told: also while a form is judged that is undone later."""
    return lambda *_: seen.append({key: value.clone() for key, value in small.state_dict().items()})


# Distances


@every_text_family
@either_end
def test_the_distance_of_a_padded_batch_from_the_dense_model_leaves_the_padding_out(name: str, end: str) -> None:
    model = FAMILIES_TINY[name]()
    batch = {key: value for key, value in batch_of(model, name, end).items() if key not in ("labels", REFERENCE)}
    with torch.no_grad():
        batch[REFERENCE] = reference_of(model, batch)
        total, n = batch_losses(model, batch)
        assert total == pytest.approx(0, abs=1e-4)
        assert n == (3 if name in (*TEXT_CLASSES, *TEXT_EMBEDDINGS) else sum(LENGTHS))
        if name in CAUSAL or task_of(model) == "masked text":
            spoilt = batch[REFERENCE].masked_fill(batch["attention_mask"][..., None] == 0, 7.0)
            assert batch_losses(model, batch | {REFERENCE: spoilt}) == (total, n)
