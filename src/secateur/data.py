"""Batches of text and images, and the promise that what chooses never judges.

Text becomes windows of a fixed number of tokens, images go through the model's own preprocessing. A source is a file, a
folder, a known name, or a hub data set; a folder's train split calibrates and its test or val split evaluates.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import itertools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from secateur.errors import DataError, MissingExtra, SettingError, first_line
from secateur.losses import IGNORED, Batch
from secateur.models import asking_hub
from secateur.streams import DATA, stream

BUILTIN = "builtin"
HUB_NAMES = {  # known names -> hub data set, configuration (Table 2)
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "lambada": ("cimec/lambada", "plain_text"),
}
SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val")}  # a split -> the names it goes by, best first
TEXT_SUFFIXES = (".txt", ".text", ".md", ".raw", ".tokens", ".jsonl", ".parquet")
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif")


@dataclass(frozen=True)
class Source:
    """Where batches came from: enough to say which data it was, and to notice it again."""

    name: str
    split: str
    files: tuple[str, ...] = ()  # digests of whole files, where a file is read whole
    rows: tuple[str, ...] = ()  # digests of the single windows or images

    @property
    def digest(self) -> str:
        return _digest(" ".join(self.rows).encode())

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "split": self.split, "files": list(self.files), "rows": list(self.rows)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Source:
        return cls(fields["name"], fields["split"], tuple(fields["files"]), tuple(fields["rows"]))


@dataclass(frozen=True)
class Batches(Sequence[Batch]):
    """Batches in a fixed order, with their source."""

    items: Sequence[Batch]
    source: Source

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        return self.items[index]


def check_apart(calibration: Source, evaluation: Source) -> None:
    """Refuse to judge on the data that chose."""
    shared = set(calibration.rows) & set(evaluation.rows)
    same_file = set(calibration.files) & set(evaluation.files)
    whole = same_file or len(shared) == len(evaluation.rows)
    if whole and calibration.name == evaluation.name:
        raise DataError(
            f"The data {evaluation.name!r} has no held-out split: what chose the units would judge them. "
            "Give other data with --data."
        )
    if shared or same_file:
        how_much = f"{len(shared)} of its {len(evaluation.rows)} rows" if shared else "the same file"
        raise DataError(
            f"The evaluation data {evaluation.name!r} ({evaluation.split}) is what the units were chosen on ({how_much} of "
            f"{calibration.name!r}); give another file or split with --data or --calibration."
        )


# Text


def text_batches(
    name: str, tokenizer: Any, *, split: str = "train", limit: int | None = None, seq_len: int = 128, batch_size: int = 4
) -> Batches:
    """At most `limit` texts of `seq_len` tokens from a file, a folder, a known name or a hub data set.

    The documents are joined by newlines and cut into windows that do not overlap; what is left over at the end is dropped.
    LAMBADA's passages stay apart, one a row, cut to their last `seq_len` tokens, with the last word marked.

    >>> text_batches("wikitext2", tokenizer, split="test", limit=1024)
    """
    if seq_len < 2:
        raise SettingError(f"The sequence length is {seq_len}, but must be at least 2: the first token predicts nothing.")
    _check_counts(limit, batch_size)
    documents, files = _documents(name, split)
    prefix = _prefix(tokenizer)
    if _is_lambada(Path(name)):
        passages = (_passage_row(text, tokenizer, prefix, seq_len) for text in documents)
        rows = list(itertools.islice((row for row in passages if row is not None), limit))
    else:
        rows = [_row(window, seq_len) for window in _windows(documents, tokenizer, prefix, limit=limit, seq_len=seq_len)]
    if not rows:
        raise DataError(
            f"The text {name!r} ({split}) holds less than one text of {seq_len} tokens; give more text or a smaller --seq-len."
        )
    source = Source(name, split, files, tuple(_digest(row["input_ids"].numpy().tobytes()) for row in rows))
    items = [
        {key: torch.stack([row[key] for row in rows[i : i + batch_size]]) for key in rows[0]}
        for i in range(0, len(rows), batch_size)
    ]
    return Batches(items, source)


def _windows(
    documents: Iterable[str], tokenizer: Any, prefix: list[int], *, limit: int | None, seq_len: int
) -> Iterator[list[int]]:
    length = seq_len - len(prefix)
    texts = iter(documents)
    waiting: list[int] = []
    made = 0
    # Tokenised a few hundred lines at a time, so that a long file is not read in vain.
    while some := list(itertools.islice(texts, 256)):
        waiting += tokenizer("\n".join(some) + "\n", add_special_tokens=False, verbose=False)["input_ids"]
        whole = len(waiting) - len(waiting) % length
        for start in range(0, whole, length):
            if made == limit:
                return
            yield prefix + waiting[start : start + length]
            made += 1
        del waiting[:whole]


def _is_lambada(path: Path) -> bool:
    """By its name, or by its folder's name where a file is only called after its split."""
    split_file = path.stem in {name for names in SPLITS.values() for name in names}
    return any(part.lower().startswith("lambada") for part in path.parts[-2 if split_file else -1 :])


def _prefix(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, if the tokenizer puts one before every text (OPT, Llama, Gemma)."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos] else []


def _row(ids: Sequence[int], seq_len: int) -> dict[str, Tensor]:
    """Padded on the right; a causal model never looks there, and the labels say to predict nothing there."""
    padding = seq_len - len(ids)
    return {
        "input_ids": torch.tensor([*ids, *[ids[-1]] * padding]),
        "labels": torch.tensor([*ids, *[IGNORED] * padding]),
    }


def _passage_row(text: str, tokenizer: Any, prefix: list[int], seq_len: int) -> dict[str, Tensor] | None:
    """A row of its own for a passage; none for one so short that nothing is predicted."""
    context, _, last_word = text.rstrip().rpartition(" ")
    before: list[int] = tokenizer(context, add_special_tokens=False, verbose=False)["input_ids"]
    whole: list[int] = tokenizer(f"{context} {last_word}", add_special_tokens=False, verbose=False)["input_ids"]
    n_last = max(1, len(whole) - len(before))
    ids = prefix + whole[-(seq_len - len(prefix)) :]
    if len(ids) < 2:
        return None
    row = _row(ids, seq_len)
    position = torch.arange(seq_len)
    return row | {"last_word": (position >= len(ids) - n_last) & (position < len(ids))}


def _documents(name: str, split: str) -> tuple[Iterator[str], tuple[str, ...]]:
    """The non-blank texts of a source in order, and digests by which the source is known again."""
    if name and os.path.exists(name):
        files = _split_files(Path(name), split) if os.path.isdir(name) else [Path(name)]
        digests = tuple(_digest_file(file) for file in files)
        return (text for file in files for text in _read_texts(file)), digests
    if name == BUILTIN:
        topics = _builtin_topics(split)
        return iter(topics), (_digest("\n".join(topics).encode()),)
    if name in HUB_NAMES or re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name):
        return _hub_texts(name, split), (_digest(f"{HUB_NAMES.get(name, name)} {split}".encode()),)
    raise DataError(
        f"There is no text {name!r}: it is neither a file or folder nor one of {', '.join((BUILTIN, *HUB_NAMES))}, "
        "nor a hub data set written OWNER/NAME or OWNER/NAME:CONFIGURATION."
    )


def _builtin_topics(split: str) -> list[str]:
    """The language reference that every Python carries: one topic in four evaluates, the others calibrate.

    Some topics quote others; a long paragraph that calibrates is left out of what evaluates.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    calibration = [topics[name] for i, name in enumerate(names) if i % 4]
    if split == "train":
        return calibration
    seen = {paragraph.strip() for text in calibration for paragraph in text.split("\n\n")}
    evaluation = (topics[name].split("\n\n") for i, name in enumerate(names) if i % 4 == 0)
    return ["\n\n".join(p for p in paragraphs if len(p) <= 80 or p.strip() not in seen) for paragraphs in evaluation]


def _split_files(folder: Path, split: str) -> list[Path]:
    """The files of one split: those named after it, or in a folder named after it; all, if none is named after any."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"The folder {folder} holds no text: expected files ending in {', '.join(TEXT_SUFFIXES)}.")

    def is_of(file: Path, name: str) -> bool:
        words = re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())
        return name in words

    for name in SPLITS.get(split, (split,)):
        if found := [file for file in files if is_of(file, name)]:
            return found
    if any(is_of(file, name) for file in files for names in SPLITS.values() for name in names):
        raise DataError(
            f"The folder {folder} holds no {split} split; its files are {', '.join(file.name for file in files[:5])}."
        )
    return files


def _read_texts(path: Path) -> Iterator[str]:
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path)
        else:
            with open(path, encoding="utf-8-sig") as file:
                for number, line in enumerate(file, 1):
                    text = _json_text(path, number, line) if suffix == ".jsonl" and line.strip() else line.rstrip("\r\n")
                    if text.strip():
                        yield text
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}.") from error


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise DataError(f'Line {number} of {path} is not a JSON object with a "text".')
    return text.rstrip("\r\n")


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "datasets", f"The parquet file {path}") from error
    try:
        column = pyarrow.parquet.read_table(path, columns=["text"]).column("text")
        if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
            raise KeyError(f"it is of the type {column.type}")
    except (pyarrow.ArrowException, KeyError) as error:
        raise DataError(f'{path} cannot be read as a parquet file with a column "text": {first_line(error)}') from error
    yield from (text.rstrip("\r\n") for text in column.to_pylist() if text and text.strip())


def _hub_texts(name: str, split: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "datasets", f"The hub data set {name!r}") from error
    from huggingface_hub import constants

    repository, configuration = HUB_NAMES.get(name) or (name.partition(":")[0], name.partition(":")[2] or None)
    texts: Any = None
    for found in (names := SPLITS.get(split, (split,))):
        try:
            with asking_hub():
                datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE  # read from there once, when datasets was imported
                texts = datasets.load_dataset(repository, configuration, split=found)["text"]
            break
        except Exception as error:  # the hub client raises many kinds, all of them about this one request
            if "Unknown split" in str(error) and found != names[-1]:
                continue
            raise DataError(
                f"The hub data set {repository} ({split}) could not be had: {first_line(error)} "
                f"Check the name and the network, or give a local file or folder."
            ) from error
    return (text.rstrip("\r\n") for text in texts if text and text.strip())


# Images


def image_batches(
    folder: str,
    preprocess: Callable[[list[Any]], Tensor],
    *,
    classes: Sequence[str],
    split: str = "train",
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 42,
    keep: bool = False,
) -> Batches:
    """At most `limit` images drawn by seed from a folder of class folders, or from the split of one that has splits.

    Class folders go by the model's class names (`classes`, in the order of its outputs) or by WordNet ids. Every image is
    read once before anything is returned. `keep` holds the preprocessed images in memory, for batches used many times.
    """
    _check_counts(limit, batch_size)
    root = _image_split(Path(folder), split)
    labelled = _labelled_files(root, classes)
    order = stream(seed, DATA).permutation(len(labelled))[:limit]
    chosen = [labelled[i] for i in order]
    rows = tuple(_digest_image(path) for path, _ in chosen)
    items = _ImageItems([chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)], preprocess, keep)
    return Batches(items, Source(folder, split, (), rows))


@dataclass(frozen=True)
class _ImageItems(Sequence[Batch]):
    groups: list[list[tuple[Path, int]]]
    preprocess: Callable[[list[Any]], Tensor]
    keep: bool
    kept: dict[int, Batch] = field(default_factory=dict)

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
        batch = {
            "pixel_values": self.preprocess([_open_image(path) for path, _ in group]),
            "labels": torch.tensor([label for _, label in group]),
        }
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


def _labelled_files(root: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    index = _class_index([path.name for path in folders], classes)
    found = [
        (file, index[path.name])
        for path in folders
        for file in sorted(path.iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    ]
    if not found:
        raise DataError(f"The folder {root} holds no images: expected class folders of {', '.join(IMAGE_SUFFIXES)} files.")
    return found


def _class_index(folders: Sequence[str], classes: Sequence[str]) -> dict[str, int]:
    """Each folder's position among the model's outputs."""
    known: dict[str, set[int]] = defaultdict(set)
    nameless = all(re.fullmatch(r"(LABEL_)?\d+", label) for label in classes)
    for i, label in enumerate(classes):
        for name in label.split(","):  # ImageNet labels list synonyms: "tench, Tinca tinca"
            known[_plain(name)].add(i)
    if len(classes) == 1000 and (nameless or _plain(classes[0]).startswith("tench")):
        for i, (wnid, name) in enumerate(_imagenet_classes()):
            known[wnid].add(i)
            known[_plain(name)].add(i)
    labels = [_plain(label) for label in classes]
    for label, times in Counter(labels).items():
        if times == 1:  # a whole label is that class, though another class may have it as a synonym
            known[label] = {labels.index(label)}
    if nameless and len(folders) == len(classes) and not any(known.get(_plain(name)) for name in folders):
        return {name: i for i, name in enumerate(sorted(folders))}
    for name in folders:
        places = known.get(_plain(name), set())
        if len(places) != 1:
            what = "is several classes" if places else "is not a class"
            raise DataError(
                f"The image folder's class {name!r} {what} of the model, which has {len(classes)} "
                f"({', '.join(classes[:3])}, ...): name the folders by class name or by WordNet id."
            )
    return {name: next(iter(known[_plain(name)])) for name in folders}


@functools.cache
def _imagenet_classes() -> list[tuple[str, str]]:
    lines = (importlib.resources.files("secateur") / "imagenet.txt").read_text(encoding="utf-8").splitlines()
    return [(wnid, name) for wnid, _, name in (line.partition(" ") for line in lines)]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().lower()


def _open_image(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            # By way of RGBA where a palette has transparent colours, as PIL asks.
            return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # SyntaxError is a broken PNG's
        raise DataError(f"The image {path} cannot be read: {error}. Remove it or get it again.") from error


def _digest_image(path: Path) -> str:
    _open_image(path)
    return _digest_file(path)


def _check_counts(limit: int | None, batch_size: int) -> None:
    if limit is not None and limit < 1:
        raise SettingError(f"The number of texts or images is {limit}, but must be at least 1.")
    if batch_size < 1:
        raise SettingError(f"The batch size is {batch_size}, but must be at least 1.")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _digest_file(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
