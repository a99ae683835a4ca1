from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from secateur.data.batches import Batches, check_apart
from secateur.data.images import image_batches
from secateur.errors import DataError, SettingError
from worlds import one_sentence

IMAGENETTE = {  # WordNet id -> its place among ImageNet's 1000 classes
    "n01440764": 0,
    "n02102040": 217,
    "n02979186": 482,
    "n03000684": 491,
    "n03028079": 497,
    "n03394916": 566,
    "n03417042": 569,
    "n03425413": 571,
    "n03445777": 574,
    "n03888257": 701,
}
NAMELESS = [f"LABEL_{i}" for i in range(1000)]


def some_image(seed: int, size: int = 12) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_images(root: Path, folders: Sequence[str], each: int = 2, suffix: str = ".png", seed: int = 0) -> str:
    """`each` images a folder, no two alike."""
    for i, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        for j in range(each):
            some_image(seed + i * each + j).save(root / folder / f"{j}{suffix}")
    return str(root)


def pixels(images: list[Any]) -> Tensor:
    """Preprocessing that changes nothing; an image that is not RGB does not fit."""
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def labels_by_image(batches: Batches, root: Path) -> dict[str, int]:
    """The folder of each image drawn, found again by its pixels -> the label it was given."""
    folders = {np.array(Image.open(path).convert("RGB")).tobytes(): path.parent.name for path in root.rglob("*.png")}
    images = torch.cat([batch["pixel_values"] for batch in batches]).permute(0, 2, 3, 1)
    labels = torch.cat([batch["labels"] for batch in batches])
    return {folders[image.numpy().tobytes()]: int(label) for image, label in zip(images, labels, strict=True)}


def test_folders_named_by_class_get_the_class_s_label(tmp_path: Path) -> None:
    write_images(tmp_path, ["dog", "Tabby cat", "fire_engine"])
    batches = image_batches(str(tmp_path), pixels, classes=["fire engine", "dog", "tree", "tabby-cat"], batch_size=4)
    assert labels_by_image(batches, tmp_path) == {"dog": 1, "Tabby cat": 3, "fire_engine": 0}
    assert [len(batch["labels"]) for batch in batches] == [4, 2]


@pytest.mark.parametrize("split", ["train", "test"])
def test_imagenettes_ten_wordnet_ids_are_ten_of_the_thousand_classes(tmp_path: Path, split: str) -> None:
    write_images(tmp_path / "train", list(IMAGENETTE), each=1)
    write_images(tmp_path / "val", list(IMAGENETTE), each=1, seed=100)
    batches = image_batches(str(tmp_path), pixels, classes=NAMELESS, split=split)
    assert labels_by_image(batches, tmp_path / ("train" if split == "train" else "val")) == IMAGENETTE


def test_wordnet_ids_serve_beside_labels_that_have_names(tmp_path: Path) -> None:
    write_images(tmp_path, ["n01440764", "n01443537"])
    classes = ["tench, Tinca tinca", "goldfish, Carassius auratus", *(f"class {i}" for i in range(998))]
    batches = image_batches(str(tmp_path), pixels, classes=classes)
    assert labels_by_image(batches, tmp_path) == {"n01440764": 0, "n01443537": 1}


@pytest.mark.parametrize("folder", ["tench", "Tinca tinca", "tinca_tinca", "TENCH", "tench, Tinca tinca"])
def test_a_folder_may_go_by_any_of_its_class_s_synonyms(tmp_path: Path, folder: str) -> None:
    write_images(tmp_path, [folder])
    batches = image_batches(str(tmp_path), pixels, classes=["goldfish, Carassius auratus", "tench, Tinca tinca"])
    assert labels_by_image(batches, tmp_path) == {folder: 1}


@pytest.mark.parametrize(
    ("folder", "classes", "says"),
    [
        ("crane", NAMELESS, "several"),  # the bird and the machine
        ("crane", ["crane, bird", "crane, machine"], "several"),
        ("n99999999", NAMELESS, "not a"),
        ("n01440764", ["tench", "goldfish"], "not a"),  # WordNet ids are those of the 1000 classes
        ("gargoyle", ["tench", "goldfish"], "not a"),
    ],
)
def test_a_folder_that_is_no_class_or_several_is_refused_by_name(
    tmp_path: Path, folder: str, classes: list[str], says: str
) -> None:
    write_images(tmp_path, [folder])
    with pytest.raises(DataError) as caught:
        image_batches(str(tmp_path), pixels, classes=classes)
    assert says in one_sentence(caught, repr(folder))


def test_as_many_folders_as_nameless_classes_go_in_sorted_order(tmp_path: Path) -> None:
    write_images(tmp_path, ["zebra", "ant", "mule"])
    batches = image_batches(str(tmp_path), pixels, classes=["LABEL_0", "LABEL_1", "LABEL_2"])
    assert labels_by_image(batches, tmp_path) == {"ant": 0, "mule": 1, "zebra": 2}


def test_folders_named_by_nameless_classes_go_by_number_and_not_in_sorted_order(tmp_path: Path) -> None:
    write_images(tmp_path, [str(i) for i in range(11)], each=1)
    batches = image_batches(str(tmp_path), pixels, classes=[str(i) for i in range(11)])
    assert labels_by_image(batches, tmp_path) == {str(i): i for i in range(11)}


def test_fewer_folders_than_nameless_classes_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path, ["ant", "mule"])
    with pytest.raises(DataError, match=r"'ant'.* not a"):
        image_batches(str(tmp_path), pixels, classes=["LABEL_0", "LABEL_1", "LABEL_2"])


def test_images_are_drawn_by_seed(tmp_path: Path) -> None:
    write_images(tmp_path, ["ant", "mule"], each=10)

    def drawn(seed: int, limit: int | None = None) -> tuple[str, ...]:
        return image_batches(str(tmp_path), pixels, classes=["ant", "mule"], seed=seed, limit=limit).source.rows

    assert drawn(1) == drawn(1) != drawn(2)
    assert sorted(drawn(1)) == sorted(drawn(2)) and len(set(drawn(1))) == 20
    assert drawn(1, limit=7) == drawn(1)[:7]
    assert set(drawn(1, limit=7)) != set(drawn(2, limit=7))


def test_the_batches_of_a_seed_hold_the_same_images_in_the_same_order(tmp_path: Path) -> None:
    write_images(tmp_path, ["ant", "mule"], each=6)
    one, two = (image_batches(str(tmp_path), pixels, classes=["ant", "mule"], limit=9, batch_size=4) for _ in range(2))
    assert [len(batch["labels"]) for batch in one] == [4, 4, 1]
    assert {0, 1} <= set(torch.cat([batch["labels"] for batch in one]).tolist())
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a["pixel_values"], b["pixel_values"]) and torch.equal(a["labels"], b["labels"])


def test_keeping_the_images_in_memory_changes_no_value_and_prepares_each_once(tmp_path: Path) -> None:
    write_images(tmp_path, ["ant", "mule"], each=5)
    prepared: list[int] = []

    def counting(images: list[Any]) -> Tensor:
        prepared.append(len(images))
        return pixels(images)

    arguments: dict[str, Any] = {"classes": ["ant", "mule"], "batch_size": 4}
    afresh = image_batches(str(tmp_path), pixels, **arguments)
    kept = image_batches(str(tmp_path), counting, keep=True, **arguments)
    for _ in range(3):
        for a, b in zip(afresh, kept, strict=True):
            assert torch.equal(a["pixel_values"], b["pixel_values"]) and torch.equal(a["labels"], b["labels"])
    assert prepared == [4, 4, 2]
    assert afresh.source == kept.source


def test_a_slice_of_image_batches_is_those_batches(tmp_path: Path) -> None:
    write_images(tmp_path, ["ant"], each=5)
    batches = image_batches(str(tmp_path), pixels, classes=["ant", "mule"], batch_size=2)
    assert [len(batch["labels"]) for batch in batches[1:]] == [2, 1]
    assert torch.equal(batches[1:][0]["pixel_values"], batches[1]["pixel_values"])


_MODES: dict[str, Callable[[Image.Image, Path], None]] = {
    "greyscale": lambda image, path: image.convert("L").save(path),
    "greyscale with alpha": lambda image, path: image.convert("LA").save(path),
    "black and white": lambda image, path: image.convert("1").save(path),
    "RGBA": lambda image, path: image.convert("RGBA").save(path),
    "palette": lambda image, path: image.convert("P").save(path),
    "palette with a transparent colour": lambda image, path: image.convert("P").save(path, transparency=3),
    "palette with half transparent colours": lambda image, path: image.convert("P").save(path, transparency=bytes(range(256))),
}


@pytest.mark.parametrize("mode", _MODES)
def test_an_image_of_any_mode_becomes_rgb_without_a_warning(tmp_path: Path, mode: str) -> None:
    (tmp_path / "ant").mkdir()
    _MODES[mode](some_image(0), tmp_path / "ant" / "0.png")
    with Image.open(tmp_path / "ant" / "0.png") as image:
        assert image.mode != "RGB"
        expected = np.array(image.convert("RGBA"))[..., :3]
    batch = image_batches(str(tmp_path), pixels, classes=["ant"])[0]
    assert torch.equal(batch["pixel_values"][0].permute(1, 2, 0), torch.from_numpy(expected))


def test_a_jpeg_of_four_inks_becomes_rgb(tmp_path: Path) -> None:
    (tmp_path / "ant").mkdir()
    some_image(0).convert("CMYK").save(tmp_path / "ant" / "0.JPEG")
    assert image_batches(str(tmp_path), pixels, classes=["ant"])[0]["pixel_values"].shape == (1, 3, 12, 12)


def _encoded(kind: str, size: int = 64) -> bytes:
    file = io.BytesIO()
    some_image(0, size).save(file, kind)
    return file.getvalue()


def _oversized() -> bytes:
    """A bitmap whose header claims 2 ** 40 pixels."""
    content = bytearray(_encoded("BMP"))
    content[18:26] = (1 << 20).to_bytes(4, "little") * 2
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("truncated.jpg", _encoded("JPEG")[:-600]),
        ("truncated.png", _encoded("PNG")[:-600]),
        ("damaged.png", _encoded("PNG")[:60] + b"damage" + _encoded("PNG")[66:]),
        ("text.jpg", b"this is not an image"),
        ("empty.jpg", b""),
        ("oversized.bmp", _oversized()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_image_is_named_at_the_time_of_the_call(tmp_path: Path, name: str, content: bytes) -> None:
    write_images(tmp_path, ["ant"], each=3)
    (tmp_path / "ant" / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        image_batches(str(tmp_path), pixels, classes=["ant"], batch_size=1)
    one_sentence(caught, tmp_path / "ant" / name)


def test_files_that_are_not_images_are_passed_over(tmp_path: Path) -> None:
    write_images(tmp_path, ["ant"], each=3)
    (tmp_path / "README.md").write_text("about these images")
    (tmp_path / "ant" / "notes.txt").write_text("about these ants")
    (tmp_path / "ant" / "._0.png").write_bytes(b"what macOS leaves behind")
    (tmp_path / ".cache").mkdir()
    assert len(image_batches(str(tmp_path), pixels, classes=["ant"]).source.rows) == 3


@pytest.mark.parametrize(("there", "wanted"), [("train", "test"), ("val", "train"), ("test", "train")])
def test_an_image_folder_without_the_split_asked_for_is_refused(tmp_path: Path, there: str, wanted: str) -> None:
    write_images(tmp_path / there, ["ant"])
    with pytest.raises(DataError) as caught:
        image_batches(str(tmp_path), pixels, classes=["ant"], split=wanted)
    assert wanted in one_sentence(caught, tmp_path)


def test_an_image_folder_with_a_test_split_does_not_evaluate_on_its_val_split(tmp_path: Path) -> None:
    write_images(tmp_path / "val", ["ant"], each=2)
    write_images(tmp_path / "test", ["ant"], each=3, seed=50)
    assert len(image_batches(str(tmp_path), pixels, classes=["ant"], split="test").source.rows) == 3


@pytest.mark.parametrize("folders", [[], ["ant"]], ids=["no class folders", "an empty class folder"])
def test_an_image_folder_without_images_is_refused(tmp_path: Path, folders: list[str]) -> None:
    write_images(tmp_path, folders, each=0)
    with pytest.raises(DataError) as caught:
        image_batches(str(tmp_path), pixels, classes=["ant"])
    assert "images" in one_sentence(caught, tmp_path)


def test_an_image_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        image_batches(str(tmp_path / "none"), pixels, classes=["ant"])
    assert "folder" in one_sentence(caught, tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"limit": 0}, r"images.* 0\b"), ({"batch_size": 0}, r"batch size.* 0\b"), ({"seed": -1}, r"seed.* -1\b")],
)
def test_image_counts_and_seeds_that_cannot_work_are_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    write_images(tmp_path, ["ant"])
    with pytest.raises(SettingError, match=says):
        image_batches(str(tmp_path), pixels, classes=["ant"], **settings)


def test_the_same_images_under_other_names_cannot_evaluate(tmp_path: Path) -> None:
    write_images(tmp_path / "train", ["ant", "mule"], each=3)
    for path in sorted((tmp_path / "train").rglob("*.png")):
        renamed = tmp_path / "val" / path.parent.name / f"renamed {path.name}"
        renamed.parent.mkdir(parents=True, exist_ok=True)
        renamed.write_bytes(path.read_bytes())
    sources = [image_batches(str(tmp_path), pixels, classes=["ant", "mule"], split=s).source for s in ("train", "test")]
    with pytest.raises(DataError) as caught:
        check_apart(*sources)
    one_sentence(caught, tmp_path)


def test_two_splits_that_share_an_image_are_refused_and_the_sentence_says_that_it_is_one(tmp_path: Path) -> None:
    write_images(tmp_path / "train", ["ant"], each=3)
    write_images(tmp_path / "val", ["ant"], each=3, seed=2)  # its first is the last of those
    sources = [image_batches(str(tmp_path), pixels, classes=["ant"], split=split).source for split in ("train", "test")]
    with pytest.raises(DataError, match=r"\b1\b.*\b3\b"):
        check_apart(*sources)


def test_two_splits_of_different_images_may_calibrate_and_evaluate(tmp_path: Path) -> None:
    write_images(tmp_path / "train", ["ant"], each=3)
    write_images(tmp_path / "val", ["ant"], each=3, seed=50)
    check_apart(*(image_batches(str(tmp_path), pixels, classes=["ant"], split=split).source for split in ("train", "test")))


# A share held out


def test_a_share_of_every_class_is_held_out_whatever_the_seed(tmp_path: Path) -> None:
    root = write_images(tmp_path / "flat", ["LABEL_0", "LABEL_1"], each=10)
    whole = set(image_batches(root, pixels, classes=NAMELESS).source.rows)
    for seed in (1, 2):
        train, test = (
            image_batches(root, pixels, classes=NAMELESS, split=split, seed=seed, holdout=0.2) for split in ("train", "test")
        )
        check_apart(train.source, test.source)
        assert sorted(torch.cat([batch["labels"] for batch in test]).tolist()) == [0, 0, 1, 1]
        assert set(train.source.rows) | set(test.source.rows) == whole and len(train.source.rows) == 16
        assert set(test.source.rows) == set(
            image_batches(root, pixels, classes=NAMELESS, split="test", holdout=0.2).source.rows
        )


def test_copies_of_an_image_are_on_the_same_side(tmp_path: Path) -> None:
    root = Path(write_images(tmp_path / "flat", ["LABEL_0"], each=6))
    for path in sorted((root / "LABEL_0").iterdir()):
        path.with_name(f"copy-{path.name}").write_bytes(path.read_bytes())
    train, test = (image_batches(str(root), pixels, classes=NAMELESS, split=s, holdout=0.3) for s in ("train", "test"))
    assert len(test.source.rows) == 4 and len(set(test.source.rows)) == 2
    check_apart(train.source, test.source)


def test_an_image_folder_with_splits_needs_no_holdout(tmp_path: Path) -> None:
    write_images(tmp_path / "data" / "train", ["LABEL_0"])
    write_images(tmp_path / "data" / "val", ["LABEL_0"], seed=9)
    with pytest.raises(DataError) as caught:
        image_batches(str(tmp_path / "data"), pixels, classes=NAMELESS, holdout=0.1)
    assert "--holdout" in one_sentence(caught, tmp_path / "data")


def test_one_image_a_class_cannot_be_held_out(tmp_path: Path) -> None:
    root = write_images(tmp_path / "flat", ["LABEL_0", "LABEL_1"], each=1)
    with pytest.raises(DataError) as caught:
        image_batches(root, pixels, classes=NAMELESS, split="test", holdout=0.5)
    assert "held out" in one_sentence(caught, root)
