"""Texts as batches for encoders: tokens masked for a masked language model, labelled texts, or texts alone. Knows no model.

Each text is tokenised as the tokenizer does it, special tokens included, and padded to the longest of its batch. Labels come
from the field `label` of a jsonl, csv, tsv or parquet file; `text_pair` is the second text of a pair.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.data.batches import Batches, check_counts, digest, digest_file, has_splits, part_of
from secateur.data.overlap import text_marks
from secateur.data.texts import documents_of, is_held_out, is_text, split_files, too_few, windows
from secateur.errors import DataError, MissingExtra, SettingError, first_line
from secateur.model.losses import IGNORED
from secateur.selection import Source
from secateur.settings import BUILTIN, JOINED, LINES
from secateur.streams import DATA, stream

MASKED_SHARE = 0.15  # of the tokens, as BERT was trained
TABLES = (".jsonl", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Example:
    """A text, with the second text of a pair and a label where the data have them."""

    text: str
    pair: str | None = None
    label: str | int | None = None


def masked_batches(
    name: str,
    tokenizer: Any,
    *,
    split: str,
    limit: int | None,
    seq_len: int,
    batch_size: int,
    seed: int,
    documents: str | None = None,
    holdout: float | None = None,
) -> Batches:
    """Texts with some tokens replaced by the mask token, by seed; only these have labels. Joined texts fill whole windows.

    >>> model, tokenizer = load("bert-base-uncased")
    >>> masked_batches("wikitext2", tokenizer, split="train", limit=64, seq_len=16, batch_size=8, seed=42)
    """
    check_counts(limit, batch_size)
    if tokenizer.mask_token_id is None:
        raise DataError(
            "The tokenizer has no mask token, so that no token can be hidden for the model to find; use --loss distance."
        )
    text = documents_of(name, tokenizer, split=split, seq_len=seq_len, documents=documents, holdout=holdout)
    before, after = _special_tokens(tokenizer)
    if text.separate:
        examples = itertools.islice((Example(document) for document in text.documents), limit)
        rows = [row for row in _tokenised(examples, tokenizer, seq_len) if len(row["input_ids"]) > len(before) + len(after)]
    else:
        inner = windows(text.documents, tokenizer, [], limit=limit, seq_len=seq_len - len(before) - len(after))
        rows = [{"input_ids": [*before, *window, *after]} for window in inner]
    if not rows:
        raise too_few(name, split, seq_len, separate=text.separate, held_out=holdout is not None)
    rng, special = stream(seed, DATA), set(tokenizer.all_special_ids)
    masked = []
    for row in rows:
        ids = row["input_ids"]
        places = [i for i, token in enumerate(ids) if token not in special] or [len(ids) // 2]
        hidden = set(rng.choice(places, size=max(1, round(MASKED_SHARE * len(places))), replace=False).tolist())
        labels = [token if i in hidden else IGNORED for i, token in enumerate(ids)]
        masked.append(
            row | {"input_ids": [tokenizer.mask_token_id if i in hidden else t for i, t in enumerate(ids)], "labels": labels}
        )
    source = Source(name, split, text.files, _row_digests(rows), text_marks(row["input_ids"] for row in rows))
    return Batches(_items(masked, tokenizer, batch_size), source, text.note, text.joined)


def example_batches(
    name: str,
    tokenizer: Any,
    *,
    split: str,
    limit: int | None,
    seq_len: int,
    batch_size: int,
    classes: Mapping[str, int] | None = None,
    documents: str | None = None,
    holdout: float | None = None,
) -> Batches:
    """Texts, each a row; with `classes` (names to numbers) and if every text has a label, the batches have labels too.

    >>> example_batches("wikitext2", tokenizer, split="train", limit=64, seq_len=64, batch_size=8)
    """
    check_counts(limit, batch_size)
    if documents == JOINED:
        raise SettingError("This model takes each text by itself, so that documents cannot be joined: use --documents lines.")
    examples, files = _examples(name, tokenizer, split=split, seq_len=seq_len, documents=documents, holdout=holdout)
    taken = list(itertools.islice(examples, limit))
    rows = list(_tokenised(taken, tokenizer, seq_len))
    if classes is not None and taken and all(example.label is not None for example in taken):
        rows = [row | {"labels": _class(example, classes, name)} for row, example in zip(rows, taken, strict=True)]
    if not rows:
        raise too_few(name, split, seq_len, separate=True, held_out=holdout is not None)
    source = Source(name, split, files, _row_digests(rows), text_marks(row["input_ids"] for row in rows))
    return Batches(_items(rows, tokenizer, batch_size), source)


def _tokenised(examples: Iterable[Example], tokenizer: Any, seq_len: int) -> Iterator[dict[str, Any]]:
    for example in examples:
        pair = () if example.pair is None else (example.pair,)
        yield dict(tokenizer(example.text, *pair, truncation=True, max_length=seq_len, verbose=False))


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after every text."""
    probe = tokenizer("", verbose=False)["input_ids"]
    return list(probe[: (len(probe) + 1) // 2]), list(probe[(len(probe) + 1) // 2 :])


def _row_digests(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(digest(json.dumps(row["input_ids"]).encode()) for row in rows)


def _items(rows: Sequence[Mapping[str, Any]], tokenizer: Any, batch_size: int) -> list[dict[str, Tensor]]:
    return [_padded(rows[i : i + batch_size], tokenizer) for i in range(0, len(rows), batch_size)]


def _padded(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Tensor]:
    """One batch, padded on the right; the attention mask says where."""
    longest = max(len(row["input_ids"]) for row in rows)
    filler = {"input_ids": tokenizer.pad_token_id or 0, "labels": IGNORED}
    batch: dict[str, Tensor] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if isinstance(values[0], list):
            values = [[*value, *[filler.get(key, 0)] * (longest - len(value))] for value in values]
        batch[key] = torch.tensor(values)
    lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
    return batch | {"attention_mask": (torch.arange(longest) < lengths).long()}


def _class(example: Example, classes: Mapping[str, int], name: str) -> int:
    """The number of an example's label among the model's classes."""
    label, numbers = str(example.label), set(classes.values())
    known = {key.lower(): number for key, number in classes.items()}
    found = known.get(label.lower(), int(label) if label.isdecimal() else -1)
    if found not in numbers:
        raise DataError(
            f"The label {label!r} in {name} is not a class of the model, which has {len(numbers)} "
            f"({', '.join(list(classes)[:3])}, ...): use their names or numbers."
        )
    return found


def _examples(
    name: str, tokenizer: Any, *, split: str, seq_len: int, documents: str | None, holdout: float | None
) -> tuple[Iterator[Example], tuple[str, ...]]:
    """The examples of a source in order, and digests that identify it."""
    if name and os.path.exists(name):
        folder = os.path.isdir(name)
        files, is_split = split_files(Path(name), split, (*TABLES, ".txt")) if folder else ([Path(name)], False)
        if all(file.suffix.lower() in TABLES for file in files):
            read = (example for file in files for example in _read_table(file))
            digests = tuple(digest_file(file) for file in files)
            if holdout is None:
                return read, digests
            if is_split:
                raise has_splits(name)
            part = "train" if split == "train" else "test"
            digests = tuple(part_of(file, holdout, LINES, part) for file in digests)
            return (one for one in read if is_held_out(one.text, holdout) == (part == "test")), digests
    text = documents_of(name, tokenizer, split=split, seq_len=seq_len, documents=documents or LINES, holdout=holdout)
    found = text.documents
    if name == BUILTIN:  # a topic is far longer than what an encoder is asked about
        found = (part.strip() for topic in found for part in topic.split("\n\n") if len(part.split()) > 8)
    return (Example(document) for document in found), text.files


def _read_table(path: Path) -> Iterator[Example]:
    """The rows of a file of records with a `text`."""
    for number, fields in enumerate(_records(path), 1):
        text = fields.get("text") if isinstance(fields, dict) else None
        if not is_text(text):
            raise DataError(f'Row {number} of {path} has no "text".')
        if text.strip():
            pair, label = fields.get("text_pair"), fields.get("label")
            yield Example(text, pair if is_text(pair) else None, label if isinstance(label, int | str) else None)


def _records(path: Path) -> Iterator[Any]:
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            try:
                import pyarrow.parquet
            except ImportError as error:
                raise MissingExtra("pyarrow", "datasets", f"The parquet file {path}") from error
            yield from pyarrow.parquet.read_table(path).to_pylist()
            return
        with open(path, encoding="utf-8-sig", newline="") as file:
            if suffix == ".jsonl":
                yield from (json.loads(line) for line in file if line.strip())
            else:
                yield from csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ",")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}.") from error
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors, or OSErrors
        raise DataError(f"Cannot read {path} as a {suffix[1:]} file: {first_line(error)}") from error
