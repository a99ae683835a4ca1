from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from secateur.data.batches import Batches
from secateur.data.check import remarks, warnings
from secateur.selection import Source
from secateur.steps import evaluate_on
from tiny import FAMILIES_TINY, IMAGE, VOCABULARY
from worlds import SEQ_LEN, Listener, World, make_tokenizer

tf: Any = transformers  # its classes are not typed

NOTHING = math.log(VOCABULARY)


@pytest.fixture(scope="module")
def tokenizer(world: World) -> Any:
    return make_tokenizer(world.text / "train.txt")


def flat_model(*, favourite: int | None = None) -> Any:
    """A model that gives every token the same probability, or almost all of it to one token."""
    model: Any = FAMILIES_TINY["gpt_neox"]()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        if favourite is not None:
            model.gpt_neox.final_layer_norm.weight.zero_()
            model.gpt_neox.final_layer_norm.bias.fill_(1)
            model.get_output_embeddings().weight[favourite].fill_(1)
    return model


def batches_of(rows: list[list[int]], labels: list[list[int]] | None = None, **more: Any) -> Batches:
    items = [
        {"input_ids": torch.tensor([row]), "labels": torch.tensor([of])} for row, of in zip(rows, labels or rows, strict=True)
    ]
    return Batches(items, Source("some text", "train"), **more)


VARIED = [[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 3, 4]]


def test_a_model_that_only_guesses_is_said_with_both_losses(tokenizer: Any) -> None:
    (said,) = warnings(flat_model(), tokenizer, batches_of(VARIED))
    assert "some text" in said and said.count(f"{NOTHING:.2f}") == 2 and "--documents" not in said


def test_where_lines_were_joined_the_other_way_is_proposed(tokenizer: Any) -> None:
    (said,) = warnings(flat_model(), tokenizer, batches_of(VARIED, joined=True))
    assert "--documents lines" in said


def test_nothing_is_said_of_a_model_that_knows_the_text(tokenizer: Any) -> None:
    model = flat_model(favourite=5)
    assert len(warnings(model, tokenizer, batches_of([[5, 6]]))) == 1
    assert warnings(model, tokenizer, batches_of([[6, 5]])) == []


@pytest.mark.parametrize(("n_unknown", "share"), [(1, ""), (4, "4%"), (30, "30%")])
def test_unknown_tokens_are_said_from_three_percent(tokenizer: Any, n_unknown: int, share: str) -> None:
    row = [tokenizer.unk_token_id] * n_unknown + [3 + i % 13 for i in range(100 - n_unknown)]
    rows = [row[i : i + 10] for i in range(0, 100, 10)]
    said = [sentence for sentence in warnings(flat_model(), tokenizer, batches_of(rows)) if "unknown" in sentence]
    assert len(said) == bool(share) and all(share in sentence and "some text" in sentence for sentence in said)


def test_an_unknown_token_that_also_ends_texts_is_not_counted(world: World) -> None:
    tokenizer = make_tokenizer(world.text / "train.txt")
    tokenizer.eos_token = tokenizer.unk_token
    rows = [[tokenizer.unk_token_id, 3, 4, 5]]
    assert not any("unknown" in sentence for sentence in warnings(flat_model(), tokenizer, batches_of(rows)))


@pytest.mark.parametrize(
    ("rows", "labels", "said"),
    [
        ([[7, 7, 7, 7, 3, 4]], None, True),
        ([[7, 7, 7, 3, 4, 5]], None, False),  # half, not more
        ([[3, 4, 5, 5, 5, 5, 5, 5]], [[3, 4, 5, -100, -100, -100, -100, -100]], False),  # padding
        ([[7, 7, 7, 7], [3, 4, 5, 6], [3, 4, 5, 6]], None, False),
        ([[7, 7, 7, 7], [8, 8, 8, 8], [3, 4, 5, 6]], None, True),
    ],
)
def test_batches_that_hold_mostly_one_token_are_said(
    tokenizer: Any, rows: list[list[int]], labels: list[list[int]] | None, said: bool
) -> None:
    found = warnings(flat_model(), tokenizer, batches_of(rows, labels))
    assert any("one and the same" in sentence for sentence in found) == said


def test_what_was_found_out_comes_first_and_once(tokenizer: Any) -> None:
    batches = batches_of(VARIED, note="It was found out.")
    assert remarks(flat_model(), tokenizer, batches) == ["It was found out.", *warnings(flat_model(), tokenizer, batches)]


def test_nothing_is_said_of_images() -> None:
    batch: dict[str, Tensor] = {"pixel_values": torch.zeros(2, 3, IMAGE, IMAGE), "labels": torch.zeros(2, dtype=torch.long)}
    assert remarks(FAMILIES_TINY["vit"](), None, Batches([batch], Source("images", "train"))) == []


def test_a_check_leaves_the_mode_of_the_model(tokenizer: Any) -> None:
    model = flat_model().train()
    warnings(model, tokenizer, batches_of(VARIED))
    assert model.training


def test_an_evaluation_says_it_once(world: World, tmp_path: Path) -> None:
    listener = Listener()
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(["the cat sees a bird"] * 40))
    evaluate_on(str(world.text_model), data=str(path), seq_len=SEQ_LEN, device="cpu", watcher=listener)
    assert [("document of its own" in sentence, "dense" in sentence) for sentence in listener.said] == [
        (True, False),
        (False, True),
    ]
