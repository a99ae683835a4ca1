"""Texts as batches: rows of a fixed number of tokens. Knows no images and no model.

A source is a file, a folder, a known name, or a hub data set; a folder's train split is for calibration, its
test or val split for evaluation. Its documents, one a line or record, are joined and cut into windows, or stay separate.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from secateur.data.batches import SPLITS, Batches, check_counts, digest, digest_file, has_splits, part_of
from secateur.data.overlap import text_marks
from secateur.errors import DataError, MissingExtra, SettingError, first_line, not_one_of
from secateur.model.loading import asking_hub
from secateur.model.losses import IGNORED
from secateur.selection import Source
from secateur.settings import BUILTIN, DOCUMENTS, JOINED, JSONL, LINES

HUB_NAMES = {  # known names -> hub data set, configuration (Table 2)
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "lambada": ("cimec/lambada", "plain_text"),
}
TEXT_SUFFIXES = (".txt", ".text", ".md", ".raw", ".tokens", ".jsonl", ".parquet")
SEPARATORS = {".csv": ",", ".tsv": "\t"}  # files of records with a column "text"
SAMPLE = 256  # documents that are looked at to find out how they are cut


def text_batches(
    name: str,
    tokenizer: Any,
    *,
    split: str = "train",
    limit: int | None = None,
    seq_len: int = 128,
    batch_size: int = 4,
    documents: str | None = None,
    holdout: float | None = None,
) -> Batches:
    """At most `limit` texts of `seq_len` tokens from a file, a folder, a known name or a hub data set.

    `documents` says how they are cut. "joined": they are joined by newlines and cut into windows that do not overlap; an
    incomplete last window is dropped. "lines": each line or record is a document of its own, in rows of its own, padded on the
    right. "jsonl": the same, and each line is a JSON object with a "text". None finds it out from the data. LAMBADA's passages
    stay separate, one per row, cut to their last `seq_len` tokens, with the last word marked.

    Of a file or folder without splits, `holdout` keeps this share of the documents for the split "test".

    >>> text_batches("wikitext2", tokenizer, split="test", limit=1024)
    """
    if seq_len < 2:
        raise SettingError(f"The sequence length is {seq_len}, but must be at least 2: the first token predicts nothing.")
    if documents not in (None, *DOCUMENTS):
        raise not_one_of("form of the documents", documents, DOCUMENTS)
    check_counts(limit, batch_size)
    passages = documents != JOINED and _is_named(Path(name), "lambada")
    text = documents_of(
        name, tokenizer, split=split, seq_len=seq_len, documents=LINES if passages else documents, holdout=holdout
    )
    prefix = _prefix(tokenizer)
    if passages:
        found = (_passage_row(passage, tokenizer, prefix, seq_len) for passage in text.documents)
        rows = list(itertools.islice((row for row in found if row is not None), limit))
    elif text.separate:
        rows = list(itertools.islice(_document_rows(text.documents, tokenizer, prefix, seq_len), limit))
    else:
        cut = windows(text.documents, tokenizer, prefix, limit=limit, seq_len=seq_len)
        rows = [_row(window, seq_len) for window in cut]
    if not rows:
        raise too_few(name, split, seq_len, separate=text.separate, held_out=holdout is not None)
    marks = text_marks(row["input_ids"][row["labels"] != IGNORED].tolist() for row in rows)
    source = Source(name, split, text.files, tuple(_digest_row(row) for row in rows), marks)
    items = [
        {key: torch.stack([row[key] for row in rows[i : i + batch_size]]) for key in rows[0]}
        for i in range(0, len(rows), batch_size)
    ]
    return Batches(items, source, text.note, text.joined)


def too_few(name: str, split: str, seq_len: int, *, separate: bool, held_out: bool) -> DataError:
    """The error for a source that gives no row."""
    least = "no text of at least 2" if separate else f"less than one text of {seq_len}"
    more = "more text or another --holdout" if held_out else "more text or a smaller --seq-len"
    return DataError(f"The text {name!r} ({split}) holds {least} tokens; give {more}.")


class Documents(NamedTuple):
    """The documents of a source, and how they are to be cut into rows."""

    documents: Iterable[str]
    separate: bool  # each document makes rows of its own
    files: tuple[str, ...]  # digests that identify the source
    note: str  # a sentence for the user, if something was found out
    joined: bool  # several documents are joined, which a user may not have meant


def documents_of(
    name: str, tokenizer: Any, *, split: str, seq_len: int, documents: str | None = None, holdout: float | None = None
) -> Documents:
    """The documents of a file, a folder, a known name or a hub data set, in order."""
    text = _find(name, split, json_lines=documents == JSONL)
    if name == BUILTIN:
        _check_builtin_fits(tokenizer, split)
    how, note = _how_cut(name, split, text, tokenizer, documents, seq_len)
    files, found = text.digests(), text.documents()
    if holdout is not None:
        if text.is_split:
            raise has_splits(name)
        found = _part(text, how, holdout, split)
        files = tuple(part_of(file, holdout, how, "train" if split == "train" else "test") for file in files)
    joined = how == JOINED and name != BUILTIN and len(list(itertools.islice(text.documents(), 2))) == 2
    return Documents(found, how == LINES, files, note, joined)


def _how_cut(name: str, split: str, text: _Text, tokenizer: Any, documents: str | None, seq_len: int) -> tuple[str, str]:
    """Whether documents are joined or separate, and a sentence about it if that was found out from the data.

    Running text has blank lines between its paragraphs. If there are hardly any, and most documents fit in a row, each is
    taken for a document of its own. All splits of a source are cut as its train split is.
    """
    if documents is not None:
        return (JOINED if documents == JOINED else LINES), ""
    if name == BUILTIN or _is_named(Path(name), "wikitext"):  # WikiText is also about without its blank lines
        return JOINED, ""
    if text.is_split and split != "train":
        with contextlib.suppress(DataError):
            text = _find(name, "train")
    sample, n_lines, n_blank = [], 0, 0
    for n_lines_read, line in enumerate(text.read(), 1):
        if line.strip():
            sample.append(line)
            n_lines, n_blank = n_lines_read, n_lines_read - len(sample)  # those at the end do not count
        if len(sample) == SAMPLE:
            break
    if len(sample) < 2 or n_blank >= 0.02 * n_lines:
        return JOINED, ""
    n_short = sum(len(ids) <= seq_len for ids in tokenizer(sample, verbose=False)["input_ids"])
    if n_short <= len(sample) / 2:
        return JOINED, ""
    return LINES, (
        f"Each {text.unit} of {name} is a document of its own: most fit in {seq_len} tokens. "
        "--documents joined would join them."
    )


def _part(text: _Text, how: str, holdout: float, split: str) -> Iterator[str]:
    """The documents held out, or the others: the last ones if they are joined, else by a hash, so that copies stay together."""
    if how == LINES:
        return (document for document in text.documents() if is_held_out(document, holdout) == (split != "train"))
    n_documents = sum(1 for _ in text.documents())
    first = n_documents - max(1, round(holdout * n_documents))
    return itertools.islice(text.documents(), 0, first) if split == "train" else itertools.islice(text.documents(), first, None)


def is_held_out(document: str, holdout: float) -> bool:
    plain = " ".join(document.casefold().split())
    return int(digest(plain.encode()), 16) < holdout * 16**12


def _check_builtin_fits(tokenizer: Any, split: str) -> None:
    """Refuse to choose by Python's manual the units of a model whose tokenizer does not know such text."""
    text = "\n".join(_builtin_topics("train"))[:2000]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    n_unknown = sum(token == tokenizer.unk_token_id for token in ids)
    read = Counter(letter for letter in tokenizer.decode(ids, skip_special_tokens=True) if letter.isalpha())
    # Some tokenizers lower the case; one that raises it is not for English.
    letters = [Counter(letter for letter in form if letter.isalpha()) for form in (text, text.lower())]
    lost = min((form - read).total() / form.total() for form in letters)
    if n_unknown > 0.1 * len(ids) or lost > 0.1:
        what = f"{n_unknown / len(ids):.0%} of its tokens" if n_unknown > 0.1 * len(ids) else f"{lost:.0%} of its letters"
        raise DataError(
            "The built-in text does not fit the model: it is Python's manual, in English, and the tokenizer does not know "
            f"{what}; give text of the model's own kind with {'--calibration' if split == 'train' else '--data'}."
        )


def _document_rows(documents: Iterable[str], tokenizer: Any, prefix: list[int], seq_len: int) -> Iterator[dict[str, Tensor]]:
    """The rows of documents that stay separate: one each, or several consecutive ones if it is longer than a row."""
    length = seq_len - len(prefix)
    texts = iter(documents)
    while chunk := list(itertools.islice(texts, SAMPLE)):
        for ids in tokenizer(chunk, verbose=False)["input_ids"]:
            for start in range(len(prefix), len(ids), length):
                piece = [*prefix, *ids[start : start + length]]
                if len(piece) >= 2:  # fewer predict nothing
                    yield _row(piece, seq_len)


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


def _is_named(path: Path, word: str) -> bool:
    """Whether a name starts with a word: the file's, or its folder's if the file is only named after its split."""
    split_file = path.stem in {name for names in SPLITS.values() for name in names}
    return any(part.lower().startswith(word) for part in path.parts[-2 if split_file else -1 :])


def _prefix(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, if the tokenizer puts one before every text (OPT, Llama, Gemma)."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    # Any text that the tokenizer knows shows it; a vocabulary of amino acids or bases need not know "a". The token
    # itself shows nothing, and would make the answer hang on the order of the vocabulary, which is random.
    for probe in itertools.chain("a", tokenizer.get_vocab()):
        plain = tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"]
        if plain and bos not in plain:
            return [bos] if tokenizer(probe, verbose=False)["input_ids"][: 1 + len(plain)] == [bos, *plain] else []
    return []


def _row(ids: Sequence[int], seq_len: int) -> dict[str, Tensor]:
    """One row, padded on the right: a causal model never looks ahead, and the loss ignores the padded labels."""
    padding = seq_len - len(ids)
    return {
        "input_ids": torch.tensor([*ids, *[ids[-1]] * padding]),
        "labels": torch.tensor([*ids, *[IGNORED] * padding]),
    }


def _digest_row(row: Mapping[str, Tensor]) -> str:
    """The digest of a row's tokens; of a passage it also covers the padding, as the digests in old selections do."""
    ids = row["input_ids"] if "last_word" in row else row["input_ids"][row["labels"] != IGNORED]
    return digest(ids.numpy().tobytes())


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


@dataclass(frozen=True)
class _Text:
    """A source of text, or a split of one: how its lines or records are read, and what identifies it."""

    read: Callable[[], Iterable[str]]  # in order, with the blank ones
    unit: str  # what a document is: a line or a record
    is_split: bool  # other data belong to the source
    paths: Sequence[Path] = ()
    identity: str = ""  # where there are no files

    def documents(self) -> Iterator[str]:
        return (text for text in self.read() if text.strip())

    def digests(self) -> tuple[str, ...]:
        return tuple(digest_file(path) for path in self.paths) or (digest(self.identity.encode()),)


def _find(name: str, split: str, *, json_lines: bool = False) -> _Text:
    if name and os.path.exists(name):
        files, is_split = split_files(Path(name), split) if os.path.isdir(name) else ([Path(name)], False)
        unit = "record" if json_lines or files[0].suffix.lower() in (".jsonl", ".parquet", *SEPARATORS) else "line"
        return _Text(lambda: (text for file in files for text in _read_texts(file, json_lines)), unit, is_split, files)
    if name != BUILTIN and name not in HUB_NAMES and not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name):
        raise DataError(
            f"There is no text {name!r}: it is neither a file or folder nor one of {', '.join((BUILTIN, *HUB_NAMES))}, "
            "nor a hub data set written OWNER/NAME or OWNER/NAME:CONFIGURATION."
        )
    if json_lines:
        raise DataError(f"The text {name!r} is not a file of JSON lines: give --documents lines or joined.")
    if name == BUILTIN:
        topics = _builtin_topics(split)
        return _Text(lambda: topics, "record", True, identity="\n".join(topics))
    column = _hub_texts(name, split)
    texts = lambda: ((text or "").rstrip("\r\n") for text in column)  # noqa: E731
    return _Text(texts, "record", True, identity=f"{HUB_NAMES.get(name, name)} {split}")


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


def split_files(folder: Path, split: str, suffixes: Sequence[str] = TEXT_SUFFIXES) -> tuple[list[Path], bool]:
    """The files of one split: those with its name in their path; all files, if no path names any split. Whether one does."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
    if not files:
        raise DataError(f"The folder {folder} holds no text: expected files ending in {', '.join(suffixes)}.")

    def belongs_to(file: Path, name: str) -> bool:
        words = re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())
        return name in words

    for name in SPLITS.get(split, (split,)):
        if named := [file for file in files if belongs_to(file, name)]:
            return named, True
    if any(belongs_to(file, name) for file in files for names in SPLITS.values() for name in names):
        raise DataError(
            f"The folder {folder} holds no {split} split; its files are {', '.join(file.name for file in files[:5])}."
        )
    return files, False


def _read_texts(path: Path, json_lines: bool) -> Iterator[str]:
    """The lines or records of a file, with the blank ones."""
    suffix = path.suffix.lower()
    if json_lines and suffix == ".parquet":
        raise DataError(f"{path} is not a file of JSON lines: give --documents lines or joined.")
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path)
        elif suffix in SEPARATORS:
            with open(path, encoding="utf-8-sig", newline="") as file:
                for number, row in enumerate(csv.DictReader(file, delimiter=SEPARATORS[suffix]), 1):
                    if not isinstance(row.get("text"), str):
                        raise DataError(f'Row {number} of {path} has no "text": its first line must name the columns.')
                    yield row["text"].rstrip("\r\n")
        else:
            with open(path, encoding="utf-8-sig") as file:
                for number, line in enumerate(file, 1):
                    is_json = (json_lines or suffix == ".jsonl") and line.strip()
                    yield _json_text(path, number, line) if is_json else line.rstrip("\r\n")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}.") from error
    except csv.Error as error:
        raise DataError(f"Cannot read {path} as a {suffix[1:]} file: {first_line(error)}") from error


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not is_text(text):
        raise DataError(f'Line {number} of {path} is not a JSON object with a "text".')
    return text.rstrip("\r\n")


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is text that can be written: JSON can also hold halves of characters, such as "\\ud800"."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


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
    yield from ((text or "").rstrip("\r\n") for text in column.to_pylist())


def _hub_texts(name: str, split: str) -> Iterable[str | None]:
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
    found: Iterable[str | None] = texts
    return found
