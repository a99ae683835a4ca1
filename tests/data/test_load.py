from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.data.batches import Batches
from secateur.data.load import class_names, load_batches
from secateur.errors import DataError, ModelError, SettingError
from secateur.settings import BUILTIN, Settings
from tiny import CLASSES, FAMILIES_TINY, tiny_tokenizer
from worlds import SEQ_LEN, World, one_sentence

SETTINGS = {task: Settings("model", seq_len=SEQ_LEN).for_task(task) for task in ("text", "image")}


class Counting:
    """A processor that counts the images it is given."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.images = 0

    def __call__(self, images: list[Any]) -> Tensor:
        self.images += len(images)
        pixels: Tensor = self.processor(images)
        return pixels


def opened(world: World, task: str) -> tuple[nn.Module, Any, str]:
    folder, data = world.of(task)
    model, processor = sc.load(str(folder), device="cpu")
    return model, processor, str(data)


def same(one: Batches, other: Batches) -> bool:
    pairs = zip(one, other, strict=True)
    return one.source == other.source and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_language_model_gets_the_windows_of_a_text(world: World, split: str) -> None:
    model, tokenizer, data = opened(world, "text")
    found = load_batches(model, tokenizer, data, SETTINGS["text"], split=split, size=10)
    assert same(found, sc.text_batches(data, tokenizer, split=split, limit=10, seq_len=SEQ_LEN, batch_size=4))
    assert len(found.source.rows) == 10


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_classifier_gets_the_images_of_its_classes_as_its_seed_draws_them(world: World, split: str) -> None:
    model, processor, data = opened(world, "image")
    classes = [f"LABEL_{i}" for i in range(CLASSES)]
    for seed in (1, 2):
        found = load_batches(model, processor, data, replace(SETTINGS["image"], seed=seed), split=split, size=10)
        expected = sc.image_batches(data, processor, classes=classes, split=split, limit=10, batch_size=8, seed=seed)
        assert same(found, expected) and len(found.source.rows) == 10


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize(("size", "most", "batches", "rows"), [(9, 0, 5, 9), (9, 2, 2, 4), (3, 4, 2, 3), (10_000, 3, 3, 6)])
def test_there_are_so_many_rows_and_so_many_batches_at_most(
    world: World, task: str, size: int, most: int, batches: int, rows: int
) -> None:
    model, processor, data = opened(world, task)
    settings = replace(SETTINGS[task], batch_size=2)
    found = load_batches(model, processor, data, settings, split="train", size=size, most=most)
    assert (len(found), len(found.source.rows)) == (batches, rows)


@pytest.mark.parametrize(("split", "keep", "kept"), [("train", False, True), ("test", False, False), ("test", True, True)])
def test_images_that_are_used_many_times_are_prepared_once(world: World, split: str, keep: bool, kept: bool) -> None:
    model, processor, data = opened(world, "image")
    counting = Counting(processor)
    batches = load_batches(model, counting, data, SETTINGS["image"], split=split, size=10, keep=keep)
    for _ in range(3):
        list(batches)
    assert counting.images == (10 if kept else 30 + 8)  # the model tries the first batch


def test_a_text_longer_than_the_model_takes_is_refused(world: World) -> None:
    model, tokenizer, data = opened(world, "text")
    settings = replace(SETTINGS["text"], seq_len=SEQ_LEN + 1)
    with pytest.raises(SettingError, match=rf"{SEQ_LEN + 1}.*{SEQ_LEN}"):
        load_batches(model, tokenizer, data, settings, split="train", size=10)


def test_the_tokenizer_of_another_model_is_refused(world: World, tmp_path: Path) -> None:
    model, _, _ = opened(world, "text")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and sings\n")
    with pytest.raises(ModelError, match=r"token.*32"):
        load_batches(model, tiny_tokenizer(), str(tmp_path / "text.txt"), SETTINGS["text"], split="train", size=1)


@pytest.mark.parametrize(("split", "option"), [("train", "--calibration"), ("test", "--data")])
def test_an_image_model_has_no_builtin_data_and_the_option_for_them_is_named(world: World, split: str, option: str) -> None:
    model, processor, _ = opened(world, "image")
    with pytest.raises(DataError, match=option) as caught:
        load_batches(model, processor, BUILTIN, SETTINGS["image"], split=split, size=10)
    one_sentence(caught)


def test_classes_go_by_the_names_in_the_config_and_else_by_number() -> None:
    model: Any = FAMILIES_TINY["vit"]()
    assert class_names(model) == [f"LABEL_{i}" for i in range(CLASSES)]
    model.config.id2label = {2: "tree", 0: "ant", 1: "mule"}
    assert class_names(model) == ["ant", "mule", "tree"]
    assert class_names(FAMILIES_TINY["timm vit"]()) == [str(i) for i in range(CLASSES)]
