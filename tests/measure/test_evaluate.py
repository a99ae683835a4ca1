from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from secateur.data.texts import text_batches
from secateur.measure.evaluate import evaluate, perplexity
from secateur.model.zeroing import zeroed
from secateur.units import HEAD, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, hook_count, randomised, tiny_batch, tiny_batches, tiny_tokenizer

tf: Any = transformers
TEXT = ["gpt2", "opt post-norm", "gpt_neox", "llama", "gemma2"]
IMAGES = ["vit", "deit distilled", "swin", "timm vit", "timm deit distilled", "timm swin"]  # transformers' outputs and tensors


class NextToken(nn.Module):
    """A language model that always expects token i to be followed by i + 1."""

    def __init__(self, vocabulary: int = 20) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(vocabulary).roll(1, dims=1) * 5)

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Any:
        return tf.modeling_outputs.CausalLMOutput(logits=self.table[input_ids])


class Echo(nn.Module):
    """An image classifier that gives its input, (images, classes), back as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(1))

    def forward(self, pixel_values: Tensor) -> Tensor:
        return pixel_values


def token_losses(model: Any, batch: dict[str, Tensor]) -> list[float]:
    """The loss of each predicted token, one at a time, from its own text cut off before it."""
    losses = []
    with torch.no_grad():
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            for t in range(1, len(ids)):
                if labels[t] != -100:
                    logits = model(input_ids=ids[None, :t]).logits[0, -1].tolist()
                    highest = max(logits)
                    total = highest + math.log(sum(math.exp(x - highest) for x in logits))
                    losses.append(total - logits[int(labels[t])])
    return losses


def ragged_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Three batches that predict 26, 2 and 4 tokens."""
    one, two, three = tiny_batches(model, 3)
    two["labels"][:, :] = -100
    two["labels"][1, 4:6] = two["input_ids"][1, 4:6]
    three["labels"][:2, 2:] = -100
    three["labels"][2, 4:] = -100
    return [one, two, three]


# Text


@pytest.mark.parametrize("name", TEXT)
def test_the_loss_is_the_mean_over_all_predicted_tokens_and_not_over_batches(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = ragged_batches(model)
    losses = [token_losses(model, batch) for batch in batches]
    counts = [len(some) for some in losses]
    assert counts == [26, 2, 4]
    expected = sum(map(sum, losses)) / sum(counts)
    found = evaluate(model, batches)
    assert found.loss == pytest.approx(expected, abs=2e-5)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=2e-5)
    assert found.rows == 32
    assert found.batch_losses == pytest.approx([sum(some) / len(some) for some in losses], abs=2e-5)
    assert abs(sum(found.batch_losses) / 3 - expected) > 1e-3  # the mean of the batches is another number


@pytest.mark.parametrize("name", TEXT)
def test_the_loss_of_one_batch_is_transformers_own(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batch = tiny_batch(model)
    with torch.no_grad():
        expected = float(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)
    assert evaluate(model, [batch]).loss == pytest.approx(expected, abs=1e-5)


def test_how_the_texts_are_cut_into_batches_changes_nothing() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = ragged_batches(model)
    rows = [{key: tensor[i : i + 1] for key, tensor in batch.items()} for batch in batches for i in range(3)]
    rows = [row for row in rows if (row["labels"][:, 1:] != -100).any()]
    together = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    expected = evaluate(model, batches)
    for cut in (rows, [together]):
        assert evaluate(model, cut).loss == pytest.approx(expected.loss, abs=1e-5)
        assert evaluate(model, cut).rows == expected.rows


def test_perplexity_is_that_of_the_evaluation() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = ragged_batches(model)
    assert perplexity(model, batches) == evaluate(model, batches).perplexity


def test_a_text_has_perplexity_and_an_image_accuracy() -> None:
    text, image = FAMILIES_TINY["gpt2"](), FAMILIES_TINY["vit"]()
    of_text, of_images = evaluate(text, tiny_batches(text, 2)), evaluate(image, tiny_batches(image, 2))
    assert of_text.perplexity and of_text.top1 is of_text.top5 is of_text.last_word_accuracy is None
    assert of_images.perplexity is of_images.last_word_accuracy is None
    assert of_images.top1 is not None and of_images.top5 is not None


def test_progress_is_told_after_every_batch() -> None:
    model = FAMILIES_TINY["gpt2"]()
    told: list[tuple[int, int]] = []
    evaluate(model, tiny_batches(model, 3), lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


# The last word


def passage(ids: list[int], n_last: int, length: int = 8) -> dict[str, Tensor]:
    """One passage in the form of texts.py, padded on the right."""
    padding = length - len(ids)
    return {
        "input_ids": torch.tensor([[*ids, *[ids[-1]] * padding]]),
        "labels": torch.tensor([[*ids, *[-100] * padding]]),
        "last_word": torch.tensor([[len(ids) - n_last <= t < len(ids) for t in range(length)]]),
    }


RIGHT_OF_ONE, WRONG_OF_ONE = passage([9, 2, 3], 1), passage([2, 3, 9], 1)
RIGHT_OF_THREE, FIRST_WRONG = passage([9, 2, 3, 4, 5], 3), passage([2, 3, 9, 10, 11], 3)
MIDDLE_WRONG, LAST_WRONG = passage([2, 3, 4, 9, 10, 11], 4), passage([2, 3, 4, 5, 9], 3)


@pytest.mark.parametrize(
    ("passages", "accuracy"),
    [
        ([RIGHT_OF_ONE], 1.0),
        ([WRONG_OF_ONE], 0.0),
        ([RIGHT_OF_THREE], 1.0),
        ([FIRST_WRONG], 0.0),
        ([MIDDLE_WRONG], 0.0),
        ([LAST_WRONG], 0.0),
        ([RIGHT_OF_ONE, WRONG_OF_ONE, RIGHT_OF_THREE, LAST_WRONG, FIRST_WRONG], 2 / 5),
    ],
)
def test_a_last_word_is_right_when_all_its_tokens_are_and_nothing_else_counts(
    passages: list[dict[str, Tensor]], accuracy: float
) -> None:
    together = {key: torch.cat([row[key] for row in passages]) for key in passages[0]}
    for batches in (passages, [together]):
        assert evaluate(NextToken(), batches).last_word_accuracy == accuracy


def test_a_passage_of_one_token_is_never_right() -> None:
    """Nothing comes before it, so nothing predicted it."""
    together = {key: torch.cat([passage([2], 1)[key], WRONG_OF_ONE[key]]) for key in WRONG_OF_ONE}
    assert evaluate(NextToken(), [together]).last_word_accuracy == 0


def test_a_batch_that_predicts_nothing_does_not_stop_an_evaluation() -> None:
    batches = [RIGHT_OF_ONE, passage([2], 1)]
    found = evaluate(NextToken(), batches)
    assert found.rows == 2
    assert found.loss == pytest.approx(evaluate(NextToken(), [RIGHT_OF_ONE]).loss)


@pytest.mark.parametrize("puts_bos", [True, False])
def test_passages_of_a_file_score_as_if_each_was_alone_and_not_padded(tmp_path: Path, puts_bos: bool) -> None:
    texts = ["the cat sat on the mat", "a cat", "the cat the cat the cat", "the dog sat by the cat"]
    (tmp_path / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = tiny_tokenizer(puts_bos=puts_bos)
    config = tf.GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=12, n_head=3, n_layer=2)
    model: Any = randomised(tf.GPT2LMHeadModel(config))
    batches = text_batches(str(tmp_path / "lambada.jsonl"), tokenizer, seq_len=32, batch_size=3)
    losses, right = [], []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        n_last = len(tokenizer(" " + text.split()[-1], add_special_tokens=False)["input_ids"])
        losses += token_losses(model, {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])})
        guesses = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        right.append(guesses[-n_last - 1 : -1] == ids[-n_last:])
    found = evaluate(model, batches)
    assert found.rows == len(losses)
    assert found.loss == pytest.approx(sum(losses) / len(losses), abs=2e-5)
    assert found.last_word_accuracy == sum(right) / len(texts)


@pytest.mark.parametrize("name", TEXT)
def test_the_loss_and_the_last_words_are_the_same_in_one_piece_and_in_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 4)
    for batch in batches:
        with torch.no_grad():
            guesses = model(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
        batch["labels"][:2, -2:] = guesses[:2, -2:]  # the first two texts end as the model expects, but
        batch["labels"][1, -2] = (guesses[1, -2] + 1) % 32  # for the first of the two tokens of the second
        batch["last_word"] = torch.zeros_like(batch["labels"], dtype=torch.bool)
        batch["last_word"][:2, -2:] = True
    expected = evaluate(model, batches)
    assert expected.last_word_accuracy == 1 / 2
    monkeypatch.setattr("secateur.model.losses.CPU_PIECE", 0)
    for width in (1, 5, 31):
        monkeypatch.setattr("secateur.model.losses.LEAST_WIDTH", width)
        found = evaluate(model, batches)
        assert found.last_word_accuracy == expected.last_word_accuracy and found.rows == expected.rows
        assert found.loss == pytest.approx(expected.loss, abs=2e-6)
        assert found.batch_losses == pytest.approx(expected.batch_losses, abs=2e-6)


def test_asking_for_the_last_words_does_not_change_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["llama"]()
    batch = tiny_batch(model)
    monkeypatch.setattr("secateur.model.losses.CPU_PIECE", 0)
    monkeypatch.setattr("secateur.model.losses.LEAST_WIDTH", 5)
    with_words = evaluate(model, [batch | {"last_word": torch.ones_like(batch["labels"], dtype=torch.bool)}])
    without = evaluate(model, [batch])
    assert with_words.loss == without.loss and with_words.rows == without.rows
    assert with_words.last_word_accuracy is not None and without.last_word_accuracy is None


def test_no_last_word_of_nan_logits_is_right() -> None:
    model: Any = FAMILIES_TINY["llama"]()
    model.lm_head.weight.data[:] = math.nan
    found = evaluate(model, [passage([3, 0, 0], 2)])  # 0 is what argmax makes of NaN
    assert found.last_word_accuracy == 0 and math.isnan(found.loss)


# Images


def test_top1_and_top5_count_the_images_whose_label_is_among_the_largest_logits() -> None:
    ladder = torch.arange(10.0)  # class 9 is the first guess, class 5 the fifth
    labels = [[9, 5, 4], [0, 9, 8], [7, 3, 6]]
    batches = [{"pixel_values": ladder.repeat(3, 1), "labels": torch.tensor(some)} for some in labels]
    found = evaluate(Echo(), [*batches, {"pixel_values": ladder[None], "labels": torch.tensor([9])}])
    assert found.rows == 10
    assert found.top1 == 3 / 10  # the three 9s
    assert found.top5 == 7 / 10  # and 5, 8, 7, 6


def test_top5_among_fewer_than_five_classes_is_always_met() -> None:
    batch = {"pixel_values": torch.tensor([[1.0, 2, 3], [3, 2, 1], [1, 3, 2]]), "labels": torch.tensor([2, 2, 2])}
    found = evaluate(Echo(), [batch])
    assert found.top1 == 1 / 3 and found.top5 == 1


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_every_kind_of_model_are_scored_one_by_one(name: str) -> None:
    model: Any = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 3)
    batches[2] = {key: tensor[:1] for key, tensor in batches[2].items()}  # a smaller last batch
    losses, right = [], []
    with torch.no_grad():
        for batch in batches:
            for image, label in zip(batch["pixel_values"], batch["labels"], strict=True):
                output = model(image[None])
                logits = (output if isinstance(output, Tensor) else output.logits)[0].double()
                losses.append(float(logits.exp().sum().log() - logits[label]))
                right.append(int(logits.argmax()) == int(label))
    found = evaluate(model, batches)
    assert found.rows == 7
    assert found.loss == pytest.approx(sum(losses) / 7, abs=1e-5)
    assert found.top1 == sum(right) / 7
    assert found.top5 == 1.0  # of five classes


# Numbers that are not finite


def test_one_nan_batch_makes_the_loss_nan_and_is_counted() -> None:
    model: Any = FAMILIES_TINY["gpt2"]()
    model.transformer.wpe.weight.data[8] = math.nan  # position 8: only a text of more than 8 tokens meets it
    short = [{key: tensor[:, :8] for key, tensor in batch.items()} for batch in tiny_batches(model, 2)]
    assert math.isfinite(evaluate(model, short).loss)
    found = evaluate(model, [short[0], tiny_batch(model), short[1]])
    assert math.isnan(found.loss) and found.perplexity is not None and math.isnan(found.perplexity)
    assert [math.isnan(loss) for loss in found.batch_losses] == [False, True, False]
    assert found.nonfinite_batches == 1
    assert evaluate(model, short).nonfinite_batches == 0


def test_a_huge_loss_is_an_infinite_perplexity() -> None:
    model: Any = FAMILIES_TINY["gpt_neox"]()
    batches = tiny_batches(model, 2)
    model.get_output_embeddings().weight.data.mul_(1e5)
    found = evaluate(model, batches)
    assert 1000 < found.loss < math.inf
    assert found.perplexity == perplexity(model, batches) == math.inf
    assert found.nonfinite_batches == 0


# The model as it stands


@pytest.mark.parametrize("unit", [Unit(HEAD, 0, 1), Unit(MLP, 1, 0, GROUP)], ids=str)
def test_a_zeroed_model_scores_as_one_whose_weights_are_zero(unit: Unit) -> None:
    model: Any = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 3)
    dense = evaluate(model, batches)
    with zeroed(model, [unit]):
        without = evaluate(model, batches)
    assert hook_count(model) == 0
    assert evaluate(model, batches) == dense
    block = model.transformer.h[unit.layer]
    projection = block.attn.c_proj if unit.kind == HEAD else block.mlp.c_proj
    projection.weight.data[4 * unit.index : 4 * unit.index + 4] = 0  # heads and groups are 4 wide, and these are its inputs
    by_weights = evaluate(model, batches)
    assert without.loss == pytest.approx(by_weights.loss, abs=1e-5)
    assert abs(without.loss - dense.loss) > 1e-3


def test_dropout_is_off_while_evaluating_and_every_part_is_then_in_its_own_mode() -> None:
    model: Any = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    expected = evaluate(model, batches)
    assert not model.training
    model.train()
    model.transformer.h[1].eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    assert model.transformer.drop.p > 0
    assert evaluate(model, batches) == expected
    assert [module.training for module in model.modules()] == modes


def test_a_model_that_fails_is_left_in_its_mode() -> None:
    model = FAMILIES_TINY["gpt2"]().train()
    batch = tiny_batch(model)
    with pytest.raises(IndexError):
        evaluate(model, [batch | {"input_ids": batch["input_ids"] + 1000}])
    assert all(module.training for module in model.modules())


def test_no_gradients_are_kept() -> None:
    model = FAMILIES_TINY["gpt2"]()
    evaluate(model, tiny_batches(model, 2))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "timm swin"])
def test_a_bfloat16_model_scores_nearly_the_same(name: str) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 3)
    expected = evaluate(model, batches)
    found = evaluate(model.to(torch.bfloat16), batches)
    assert found.loss == pytest.approx(expected.loss, rel=0.02)
    assert found.rows == expected.rows
    assert found.loss != expected.loss


def test_a_bfloat16_models_losses_are_added_up_in_full_precision() -> None:
    """Each loss is about 3; in bfloat16 the sum of thousands would stand still at 1024."""
    model = NextToken().to(torch.bfloat16)
    ids = torch.randint(0, 20, (50, 100), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    assert evaluate(model, [batch]).loss == pytest.approx(evaluate(NextToken(), [batch]).loss, rel=1e-4)
