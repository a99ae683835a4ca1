"""Losses of tasks beyond the next token, and the distance from the dense model where there are no labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.data.batches import Batches
from secateur.data.load import with_reference
from secateur.errors import DataError
from secateur.measure.evaluate import evaluate
from secateur.model import losses
from secateur.model.losses import (
    IGNORED,
    REFERENCE,
    Batch,
    batch_loss,
    embeddings,
    output_layer,
    part_losses,
    reference_of,
    row_losses,
)
from secateur.model.zeroing import zeroed
from secateur.selection import Source
from secateur.units import HEAD, MLP, Unit
from tiny import (
    CLASSES,
    EMBEDDINGS,
    FAMILIES_TINY,
    GROUP,
    MASKED,
    TOWERS,
    VOCABULARY,
    logits_of,
    randomised,
    tf,
    tiny_batch,
    tiny_batches,
)

UNITS = [Unit(HEAD, 0, 1), Unit(MLP, 1, 0, GROUP), Unit(HEAD, 2, 0)]


def with_classes(kind: Any, n: int) -> nn.Module:
    source: Any = FAMILIES_TINY["bert"]()
    return randomised(kind(tf.BertConfig(**source.config.to_dict() | {"num_labels": n})))


def token_classifier() -> nn.Module:
    return with_classes(tf.BertForTokenClassification, CLASSES)


def classifier(n: int) -> nn.Module:
    return with_classes(tf.BertForSequenceClassification, n)


def referenced(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The batch without labels, with the outputs of the model as it is now."""
    given = {key: value for key, value in batch.items() if key not in ("labels", REFERENCE)}
    with torch.no_grad():
        return given | {REFERENCE: reference_of(model, given)}


def cut(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Let every piece of the vocabulary be so many classes wide."""
    monkeypatch.setattr(losses, "CPU_PIECE", 0)
    monkeypatch.setattr(losses, "LEAST_WIDTH", width)


# With labels


@pytest.mark.parametrize("make", [FAMILIES_TINY["bert classes"], token_classifier], ids=["texts", "tokens"])
def test_the_loss_of_a_classifier_of_texts_or_tokens_is_the_models_own(make: Any) -> None:
    model = make()
    for seed in range(3):
        batch = tiny_batch(model, seed)
        batch["labels"] = batch["labels"] % CLASSES if batch["labels"].dim() == 1 else batch["labels"].remainder(CLASSES)
        if batch["labels"].dim() == 2:
            batch["labels"][batch["attention_mask"] == 0] = IGNORED
        with torch.no_grad():
            assert float(batch_loss(model, batch)) == pytest.approx(float(model(**batch).loss), abs=1e-6)


@pytest.mark.parametrize("name", MASKED)
def test_only_masked_tokens_get_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY[name]()
    batch, linear, seen = tiny_batch(model), F.linear, []
    head = output_layer(model)
    assert head is not None

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() == head.weight.untyped_storage().data_ptr():
            seen.append(len(x))
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", spy)
    with torch.no_grad():
        row_losses(model, batch)
    assert seen == [int((batch["labels"] != IGNORED).sum())]


def test_a_text_classifiers_best_classes_are_its_five_highest_or_all() -> None:
    for n, shown in ((9, 5), (3, 3)):
        model = classifier(n)
        batch = tiny_batch(model) | {"labels": torch.tensor([0, 1, 2])}
        with torch.no_grad():
            found = row_losses(model, batch, best=True)
        assert found.best is not None and found.best.shape == (3, shown)
        assert torch.equal(found.best, logits_of(model, batch).argsort(-1, descending=True)[:, :shown])


def test_a_batch_without_labels_or_reference_is_refused() -> None:
    model = FAMILIES_TINY["bert"]()
    batch = {key: value for key, value in tiny_batch(model).items() if key != "labels"}
    with pytest.raises(DataError, match=r"no labels.*distance"):
        batch_loss(model, batch)


# Without


def divergence(model: Any, batch: Batch, units: list[Unit]) -> tuple[Tensor, Tensor, Tensor]:
    """KL(dense || zeroed) of each row in float64 from whole logits, and the best classes of both."""
    given = {key: value for key, value in batch.items() if key != REFERENCE}
    with torch.no_grad():
        p = model(**given).logits.double().flatten(0, -2)
        with zeroed(model, units):
            q = model(**given).logits.double().flatten(0, -2)
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), p.argmax(-1), q.argmax(-1)


def capped() -> nn.Module:
    model: Any = FAMILIES_TINY["gemma2"]()
    model.config.final_logit_softcapping = 2.0
    return model  # type: ignore[no-any-return]


BY_PIECES = ["gpt_neox", "llama", *MASKED]


@pytest.mark.parametrize("width", [1, 5, VOCABULARY])
@pytest.mark.parametrize("name", [*BY_PIECES, "capped"])
def test_the_divergence_by_pieces_is_that_of_whole_logits_in_double_precision(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = capped() if name == "capped" else FAMILIES_TINY[name]()
    batch = referenced(model, tiny_batch(model))
    expected, dense_best, best = divergence(model, batch, UNITS)
    real = batch.get("attention_mask", torch.ones(3, 10)).flatten() == 1
    cut(monkeypatch, width)
    with torch.no_grad(), zeroed(model, UNITS):
        found = row_losses(model, batch, best=True)
        mean = float(batch_loss(model, batch))
    torch.testing.assert_close(found.losses[real].double(), expected[real], rtol=1e-4, atol=1e-5)
    assert (found.losses[~real] == 0).all() and (found.labels[~real] == IGNORED).all()
    assert torch.equal(found.labels[real], dense_best[real])
    assert found.best is not None and torch.equal(found.best[real, 0], best[real])
    assert mean == pytest.approx(float(expected[real].mean()), rel=1e-4)
    assert float(expected.min()) > 1e-4 and len(set(best.tolist())) > 1


@pytest.mark.parametrize(
    "make", [FAMILIES_TINY["bert classes"], FAMILIES_TINY["vit"], token_classifier], ids=["texts", "images", "tokens"]
)
def test_the_divergence_of_a_classifier_is_that_of_its_classes(make: Any) -> None:
    model = make()
    batch = referenced(model, tiny_batch(model))
    expected, dense_best, best = divergence(model, batch, UNITS)
    per_token = len(expected) > 3
    real = batch["attention_mask"].flatten() == 1 if per_token else torch.ones(3, dtype=torch.bool)
    with torch.no_grad(), zeroed(model, UNITS):
        found = row_losses(model, batch, best=True)
    torch.testing.assert_close(found.losses[real].double(), expected[real], rtol=1e-4, atol=1e-6)
    assert torch.equal(found.labels[real], dense_best[real])
    assert found.best is not None and torch.equal(found.best[real, 0], best[real])


def test_a_divergence_of_large_logits_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = FAMILIES_TINY["llama"]()
    batch = referenced(model, tiny_batch(model))
    with torch.no_grad():
        model.lm_head.weight.mul_(2000)  # the reference is what enters the layer, so that it changes with it
    expected, _, _ = divergence(model, batch, UNITS)
    for width in (3, VOCABULARY):
        cut(monkeypatch, width)
        with torch.no_grad(), zeroed(model, UNITS):
            found = row_losses(model, batch).losses
        assert found.isfinite().all()
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_distance_of_embeddings_is_one_minus_their_cosine(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batch = tiny_batch(model)
    with torch.no_grad():
        assert float(batch_loss(model, batch)) == pytest.approx(0, abs=1e-6)
        with zeroed(model, UNITS):
            found, now = row_losses(model, batch), embeddings(model, batch)
    then = batch[REFERENCE]
    expected = 1 - (now * then).sum(-1) / now.norm(dim=-1) / then.norm(dim=-1)
    assert now.shape == (3, 15 if name == "dinov2" else 12)
    torch.testing.assert_close(found.losses, expected, rtol=1e-4, atol=1e-6)
    assert found.losses.min() > 1e-5 and (found.labels == 0).all() and found.best is None


@pytest.mark.parametrize("name", ["llama", "bert", "bert classes", "vit", "bert embeddings", "dinov2"])
def test_each_part_of_a_batch_has_the_distance_it_has_alone(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = [referenced(model, batch) for batch in tiny_batches(model, 3)]
    together = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    with torch.no_grad(), zeroed(model, UNITS):
        alone = torch.stack([batch_loss(model, batch) for batch in batches])
        torch.testing.assert_close(part_losses(model, together, 3), alone, rtol=1e-4, atol=1e-6)
    assert len({round(loss, 6) for loss in alone.tolist()}) == 3


def test_with_reference_gives_each_batch_the_outputs_of_the_model_as_it_is_then() -> None:
    model = FAMILIES_TINY["bert"]().train()
    items = [{key: value for key, value in batch.items() if key != "labels"} for batch in tiny_batches(model, 3)]
    source = Source("here", "train", (), ("a", "b", "c"))
    found = with_reference(model, Batches(items, source))
    assert model.training and found.source == source and len(found) == len(found[:]) == 3
    model.eval()
    for batch, given, again in zip(found, items, found[:], strict=True):
        assert batch.keys() == {*given, REFERENCE} == again.keys()
        with torch.no_grad():
            assert torch.equal(batch[REFERENCE], reference_of(model, given))
            assert float(batch_loss(model, batch)) == pytest.approx(0, abs=1e-5)


# Embeddings of texts and images


def tokens_of(model: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        tokens: Tensor = model(**{key: value for key, value in batch.items() if key != REFERENCE}).last_hidden_state
    return tokens


@pytest.mark.parametrize("end", ["left", "right"])
@pytest.mark.parametrize("pooling", [None, "mean", "cls", "max", "lasttoken"])
def test_a_texts_embedding_is_pooled_as_the_model_says(pooling: str | None, end: str) -> None:
    model: Any = FAMILIES_TINY["bert embeddings"]()
    batch = tiny_batch(model)
    if end == "left":
        batch |= {"attention_mask": batch["attention_mask"].flip(1)}
    if pooling:
        model.pooling = pooling
    tokens = tokens_of(model, batch)
    expected = []
    for row, mask in zip(tokens, batch["attention_mask"], strict=True):
        real = row[mask == 1]
        by_hand = {"mean": real.mean(0), "max": real.max(0).values, "lasttoken": real[-1], "cls": row[0]}
        expected.append(by_hand[pooling or "mean"])
    with torch.no_grad():
        torch.testing.assert_close(embeddings(model, batch), torch.stack(expected))


def test_texts_without_a_mask_are_pooled_whole() -> None:
    model = FAMILIES_TINY["bert embeddings"]()
    batch = {"input_ids": tiny_batch(model)["input_ids"]}
    with torch.no_grad():
        torch.testing.assert_close(embeddings(model, batch), tokens_of(model, batch).mean(1))


@pytest.mark.parametrize("name", TOWERS)
def test_an_images_embedding_is_the_pooled_output(name: str) -> None:
    model: Any = FAMILIES_TINY[name]()
    batch = tiny_batch(model)
    with torch.no_grad():
        pooled = model(pixel_values=batch["pixel_values"]).pooler_output
        assert torch.equal(embeddings(model, batch), pooled)


def test_embeddings_of_half_precision_are_compared_in_full() -> None:
    model = FAMILIES_TINY["bert embeddings"]().to(torch.bfloat16)
    batch = referenced(model, tiny_batch(model))
    assert batch[REFERENCE].dtype == torch.float32
    with torch.no_grad():
        assert float(batch_loss(model, batch)) == pytest.approx(0, abs=1e-5)


# Figures


def figures(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    found = evaluate(model, batches)
    names = ("perplexity", "top1", "top5", "agreement", "cosine", "last_word_accuracy")
    return {name: value for name in names if (value := getattr(found, name)) is not None}


def test_a_masked_language_model_is_judged_by_perplexity_and_the_share_of_tokens_it_finds() -> None:
    model = FAMILIES_TINY["bert"]()
    batches = tiny_batches(model, 3)
    right = n = 0
    total = 0.0
    for batch in batches:
        counted = batch["labels"].flatten() != IGNORED
        logits, labels = logits_of(model, batch)[counted], batch["labels"].flatten()[counted]
        right, n = right + int((logits.argmax(-1) == labels).sum()), n + int(counted.sum())
        total += float(F.cross_entropy(logits, labels, reduction="sum"))
    assert figures(model, batches) == {"perplexity": pytest.approx(math.exp(total / n)), "top1": pytest.approx(right / n)}
    assert evaluate(model, batches).rows == n


@pytest.mark.parametrize(("n", "names"), [(3, {"top1"}), (5, {"top1"}), (9, {"top1", "top5"})])
def test_a_text_classifier_of_few_classes_has_no_top_five(n: int, names: set[str]) -> None:
    model = classifier(n)
    batch = tiny_batch(model)
    batch["labels"] = logits_of(model, batch).argsort(-1, descending=True)[:, 1]  # the second best is right
    found = figures(model, [batch])
    assert set(found) == names and found["top1"] == 0 and found.get("top5", 1) == 1


@pytest.mark.parametrize("name", ["gpt2", "bert", "bert classes", "vit"])
def test_without_labels_a_model_is_judged_by_how_often_it_agrees_with_the_dense_one(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = [referenced(model, batch) for batch in tiny_batches(model, 3)]
    assert figures(model, batches) == {"agreement": 1.0}
    same = n = 0
    many = [Unit(HEAD, layer, head) for layer in range(3) for head in range(2)]
    for batch in batches:
        _, dense_best, best = divergence(model, batch, many)
        real = batch["attention_mask"].flatten() == 1 if name == "bert" else torch.ones(len(best), dtype=torch.bool)
        same, n = same + int((dense_best == best)[real].sum()), n + int(real.sum())
    with zeroed(model, many):
        assert figures(model, batches) == {"agreement": pytest.approx(same / n)}
    assert 0 < same < n or name == "bert classes"


@pytest.mark.parametrize("name", ["bert embeddings", "clip_vision_model"])
def test_embeddings_are_judged_by_their_cosine_to_the_dense_ones(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 2)
    assert figures(model, batches) == {"cosine": pytest.approx(1, abs=1e-6)}
    with zeroed(model, UNITS):
        similar = [F.cosine_similarity(logits_of(model, batch), batch[REFERENCE]) for batch in batches]
        found = evaluate(model, batches)
    assert found.cosine == pytest.approx(float(torch.cat(similar).mean()), abs=1e-6)
    assert found.cosine is not None and found.loss == pytest.approx(1 - found.cosine)
