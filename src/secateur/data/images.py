"""Images as batches: drawn by seed from class folders and preprocessed as the model needs. Knows no texts."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from secateur.data.batches import SPLITS, Batches, check_counts, digest_file, has_splits
from secateur.data.overlap import image_mark
from secateur.errors import DataError, first_line, reasons
from secateur.model.losses import Batch
from secateur.selection import Source
from secateur.streams import DATA, stream
from secateur.watcher import Followed, Report, silent

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif")
FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "BMP",
    "GIF",
)  # by content; PIL knows others, some of which start a program such as Ghostscript
MOST_PIXELS = 100_000_000  # of one image
IMAGENET = Path(__file__).with_name("imagenet.txt")  # WordNet ids and names of the 1000 classes


def image_batches(
    folder: str,
    preprocess: Callable[[list[Any]], Tensor],
    *,
    classes: Sequence[str] | None,
    split: str = "train",
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 42,
    keep: bool = False,
    holdout: float | None = None,
    progress: Report = silent,
) -> Batches:
    """At most `limit` images, drawn by seed from a folder of class folders, or from its `split` if it has splits.

    Without `classes` the batches have no labels, and the images may lie anywhere in the folder. Class folders are named by the
    model's class names (`classes`, in the order of its outputs) or by WordNet ids. Every image is read once before the batches
    are returned. `keep` holds the preprocessed images in memory, for batches used many times. Of a folder without splits,
    `holdout` keeps this share of every class for the split "test". `progress` gets the number of images read, and of all.

    >>> model, preprocess = load("google/vit-base-patch16-224")
    >>> image_batches("images/", preprocess, classes=list(model.config.id2label.values()), limit=256)
    """
    check_counts(limit, batch_size)
    root = _image_split(Path(folder), split)
    labelled = _image_files(root) if classes is None else _labelled_files(root, classes)
    if holdout is not None:
        if root != Path(folder):
            raise has_splits(folder)
        labelled = _part(labelled, holdout, split)
        if not labelled:
            raise DataError(f"The image folder {folder} has one image a class, of which no share can be held out.")
    order = stream(seed, DATA).permutation(len(labelled))[:limit]
    chosen = [labelled[i] for i in order]
    marks = tuple(image_mark(open_image(path)) for path, _ in Followed(chosen, progress))  # shows, too, that each can be read
    rows = tuple(digest_file(path) for path, _ in chosen)
    items = ImageItems([chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)], preprocess, keep)
    return Batches(items, Source(folder, split, (), rows, marks))


@dataclass(frozen=True)
class ImageItems(Sequence[Batch]):
    """Batches of images, read when they are needed."""

    groups: list[list[tuple[Path, int | None]]]
    preprocess: Callable[[list[Any]], Tensor]
    keep: bool
    kept: dict[int, Batch] = field(default_factory=dict)

    @property
    def labelled(self) -> bool:
        return self.groups[0][0][1] is not None

    def __len__(self) -> int:
        return len(self.groups)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index in self.kept:
            return self.kept[index]
        group = self.groups[index]
        images = [open_image(path) for path, _ in group]
        with reasons(DataError, f"The images from {group[0][0]} on cannot be preprocessed as the model's files ask"):
            batch = {"pixel_values": self.preprocess(images)}
        labels = [label for _, label in group if label is not None]
        batch |= {"labels": torch.tensor(labels)} if labels else {}
        if self.keep:
            self.kept[index] = batch
        return batch


def _image_split(root: Path, split: str) -> Path:
    if not os.path.isdir(root):
        raise DataError(f"There is no image folder {root}: give a folder of class folders, or one with train and val in it.")
    for name in SPLITS.get(split, (split,)):
        if (root / name).is_dir():
            return root / name
    if any((root / name).is_dir() for names in SPLITS.values() for name in names):
        raise DataError(f"The image folder {root} holds no {split} split.")
    return root


def _image_files(root: Path) -> list[tuple[Path, int | None]]:
    """All images in a folder and the folders in it, without labels."""
    files: list[tuple[Path, int | None]] = [(file, None) for file in sorted(root.rglob("*")) if _is_image(file)]
    if not files:
        raise DataError(f"The folder {root} holds no images: expected {', '.join(IMAGE_SUFFIXES)} files.")
    return files


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".") and file.is_file()


def _labelled_files(root: Path, classes: Sequence[str]) -> list[tuple[Path, int | None]]:
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    index = _class_index([path.name for path in folders], classes)
    files: list[tuple[Path, int | None]] = [
        (file, index[path.name]) for path in folders for file in sorted(path.iterdir()) if _is_image(file)
    ]
    if not files:
        raise DataError(f"The folder {root} holds no images: expected class folders of {', '.join(IMAGE_SUFFIXES)} files.")
    return files


def _part(files: Sequence[tuple[Path, int | None]], holdout: float, split: str) -> list[tuple[Path, int | None]]:
    """The images held out, or the others: in each class those with the lowest digests, so that copies are on the same side."""
    digests = {path: digest_file(path) for path, _ in files}
    by_class: dict[int | None, set[str]] = defaultdict(set)
    for path, label in files:
        by_class[label].add(digests[path])
    held_out = {
        (label, digest)
        for label, found in by_class.items()
        for digest in sorted(found)[: min(max(1, round(holdout * len(found))), len(found) - 1)]
    }
    return [(path, label) for path, label in files if ((label, digests[path]) in held_out) == (split != "train")]


def _class_index(folders: Sequence[str], classes: Sequence[str]) -> dict[str, int]:
    """Each folder's position among the model's outputs."""
    known: dict[str, set[int]] = defaultdict(set)
    unnamed = all(re.fullmatch(r"(LABEL_)?\d+", label) for label in classes)
    for i, label in enumerate(classes):
        for name in label.split(","):  # ImageNet labels list synonyms: "tench, Tinca tinca"
            known[_plain(name)].add(i)
    if len(classes) == 1000 and (unnamed or _plain(classes[0]).startswith("tench")):
        for i, (wnid, name) in enumerate(_imagenet_classes()):
            known[wnid].add(i)
            known[_plain(name)].add(i)
    labels = [_plain(label) for label in classes]
    for label, times in Counter(labels).items():
        if times == 1:  # a full label names its own class, even if it is another's synonym
            known[label] = {labels.index(label)}
    if unnamed and len(folders) == len(classes) and not any(known.get(_plain(name)) for name in folders):
        return {name: i for i, name in enumerate(sorted(folders))}
    for name in folders:
        places = known.get(_plain(name), set())
        if len(places) != 1:
            problem = "names several classes" if places else "is not a class"
            raise DataError(
                f"The image folder {name!r} {problem} of the model, which has {len(classes)} "
                f"({', '.join(classes[:3])}, ...): name the folders by class name or by WordNet id."
            )
    return {name: next(iter(known[_plain(name)])) for name in folders}


@functools.cache
def _imagenet_classes() -> list[tuple[str, str]]:
    lines = IMAGENET.read_text(encoding="utf-8").splitlines()
    return [(wnid, name) for wnid, _, name in (line.partition(" ") for line in lines)]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().lower()


def open_image(path: Path) -> Any:
    """The image in a file, in RGB; a file of another format than FORMATS is refused, whatever its name says."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels, and at most {MOST_PIXELS:,} are read")
            # PIL asks to convert a palette with transparent colours to RGBA first.
            return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except UnidentifiedImageError as error:
        kinds = ", ".join(FORMATS)
        raise DataError(
            f"The image {path} cannot be read: it is damaged, or none of {kinds}. Remove it or get it again."
        ) from error
    except Exception as error:  # of a broken image PIL raises all kinds, down to SyntaxError and struct.error
        raise DataError(f"The image {path} cannot be read: {first_line(error)} Remove it or get it again.") from error
