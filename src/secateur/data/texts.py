"""Texts as batches: windows of a fixed number of tokens. Knows no images and no model.

A source is a file, a folder, a known name, or a hub data set; a folder's train split is for calibration, its
test or val split for evaluation.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.data.batches import SPLITS, Batches, check_counts, digest, digest_file
from secateur.errors import DataError, MissingExtra, SettingError, first_line
from secateur.model.loading import asking_hub
from secateur.model.losses import IGNORED
from secateur.selection import Source
from secateur.settings import BUILTIN

HUB_NAMES = {  # known names -> hub data set, configuration (Table 2)
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "lambada": ("cimec/lambada", "plain_text"),
}
TEXT_SUFFIXES = (".txt", ".text", ".md", ".raw", ".tokens", ".jsonl", ".parquet")


def text_batches(
    name: str, tokenizer: Any, *, split: str = "train", limit: int | None = None, seq_len: int = 128, batch_size: int = 4
) -> Batches:
    """At most `limit` texts of `seq_len` tokens from a file, a folder, a known name or a hub data set.

    The documents are joined by newlines and cut into windows that do not overlap; an incomplete last window is dropped.
    LAMBADA's passages stay separate, one per row, cut to their last `seq_len` tokens, with the last word marked.

    >>> text_batches("wikitext2", tokenizer, split="test", limit=1024)
    """
    if seq_len < 2:
        raise SettingError(f"The sequence length is {seq_len}, but must be at least 2: the first token predicts nothing.")
    check_counts(limit, batch_size)
    documents, files = documents_of(name, split)
    prefix = _prefix(tokenizer)
    if _is_lambada(Path(name)):
        passages = (_passage_row(text, tokenizer, prefix, seq_len) for text in documents)
        rows = list(itertools.islice((row for row in passages if row is not None), limit))
    else:
        rows = [_row(window, seq_len) for window in windows(documents, tokenizer, prefix, limit=limit, seq_len=seq_len)]
    if not rows:
        raise DataError(
            f"The text {name!r} ({split}) holds less than one text of {seq_len} tokens; give more text or a smaller --seq-len."
        )
    source = Source(name, split, files, tuple(digest(row["input_ids"].numpy().tobytes()) for row in rows))
    items = [
        {key: torch.stack([row[key] for row in rows[i : i + batch_size]]) for key in rows[0]}
        for i in range(0, len(rows), batch_size)
    ]
    return Batches(items, source)


def windows(
    documents: Iterable[str], tokenizer: Any, prefix: list[int], *, limit: int | None, seq_len: int
) -> Iterator[list[int]]:
    length = seq_len - len(prefix)
    texts = iter(documents)
    tokens: list[int] = []
    n_windows = 0
    # A few hundred texts at a time: with a limit, most of a long file need not be tokenised.
    while chunk := list(itertools.islice(texts, 256)):
        tokens += tokenizer("\n".join(chunk) + "\n", add_special_tokens=False, verbose=False)["input_ids"]
        n_used = len(tokens) - len(tokens) % length
        for start in range(0, n_used, length):
            if n_windows == limit:
                return
            yield prefix + tokens[start : start + length]
            n_windows += 1
        del tokens[:n_used]


def _is_lambada(path: Path) -> bool:
    """Whether a name starts with "lambada": the file's, or its folder's if the file is only named after its split."""
    split_file = path.stem in {name for names in SPLITS.values() for name in names}
    return any(part.lower().startswith("lambada") for part in path.parts[-2 if split_file else -1 :])


def _prefix(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, if the tokenizer puts one before every text (OPT, Llama, Gemma)."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos] else []


def _row(ids: Sequence[int], seq_len: int) -> dict[str, Tensor]:
    """One row, padded on the right: a causal model never looks ahead, and the loss ignores the padded labels."""
    padding = seq_len - len(ids)
    return {
        "input_ids": torch.tensor([*ids, *[ids[-1]] * padding]),
        "labels": torch.tensor([*ids, *[IGNORED] * padding]),
    }


def _passage_row(text: str, tokenizer: Any, prefix: list[int], seq_len: int) -> dict[str, Tensor] | None:
    """The row of one passage; None if it is too short to predict anything."""
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


def documents_of(name: str, split: str) -> tuple[Iterator[str], tuple[str, ...]]:
    """The non-blank texts of a source in order, and digests that identify the source."""
    if name and os.path.exists(name):
        files = split_files(Path(name), split) if os.path.isdir(name) else [Path(name)]
        digests = tuple(digest_file(file) for file in files)
        return (text for file in files for text in _read_texts(file)), digests
    if name == BUILTIN:
        topics = _builtin_topics(split)
        return iter(topics), (digest("\n".join(topics).encode()),)
    if name in HUB_NAMES or re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name):
        return _hub_texts(name, split), (digest(f"{HUB_NAMES.get(name, name)} {split}".encode()),)
    raise DataError(
        f"There is no text {name!r}: it is neither a file or folder nor one of {', '.join((BUILTIN, *HUB_NAMES))}, "
        "nor a hub data set written OWNER/NAME or OWNER/NAME:CONFIGURATION."
    )


def _builtin_topics(split: str) -> list[str]:
    """The language reference that comes with Python: every fourth topic is for evaluation, the others for calibration.

    Some topics quote others, so that long paragraphs of the calibration topics are left out of the evaluation topics.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    calibration = [topics[name] for i, name in enumerate(names) if i % 4]
    if split == "train":
        return calibration
    seen = {paragraph.strip() for text in calibration for paragraph in text.split("\n\n")}
    evaluation = (topics[name].split("\n\n") for i, name in enumerate(names) if i % 4 == 0)
    return ["\n\n".join(p for p in paragraphs if len(p) <= 80 or p.strip() not in seen) for paragraphs in evaluation]


def split_files(folder: Path, split: str, suffixes: Sequence[str] = TEXT_SUFFIXES) -> list[Path]:
    """The files of one split: those with its name in their path; all files, if no path names any split."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
    if not files:
        raise DataError(f"The folder {folder} holds no text: expected files ending in {', '.join(suffixes)}.")

    def belongs_to(file: Path, name: str) -> bool:
        words = re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())
        return name in words

    for name in SPLITS.get(split, (split,)):
        if named := [file for file in files if belongs_to(file, name)]:
            return named
    if any(belongs_to(file, name) for file in files for names in SPLITS.values() for name in names):
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
            raise KeyError(f"its type is {column.type}")
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
    for split_name in (names := SPLITS.get(split, (split,))):
        try:
            with asking_hub():
                datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE  # datasets copied it when it was imported
                texts = datasets.load_dataset(repository, configuration, split=split_name)["text"]
            break
        except Exception as error:  # the hub client raises many kinds of errors
            if "Unknown split" in str(error) and split_name != names[-1]:
                continue
            raise DataError(
                f"The hub data set {repository} ({split}) cannot be loaded: {first_line(error)} "
                f"Check the name and the network, or give a local file or folder."
            ) from error
    return (text.rstrip("\r\n") for text in texts if text and text.strip())
