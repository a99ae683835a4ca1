"""Batches with their source, and the check that calibration and evaluation data differ. Knows neither texts nor images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from secateur.data.overlap import shared_content
from secateur.errors import DataError, SettingError
from secateur.model.losses import Batch
from secateur.selection import Source

MOST_SHARED = 0.1  # of the evaluation data, that the calibration data may hold in another form
WORTH_SAYING = 0.02
SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val")}  # split -> its possible names, preferred first


@dataclass(frozen=True)
class Batches(Sequence[Batch]):
    """Batches in a fixed order, with their source.

    >>> len(calibration), calibration.source.name, calibration.source.digest
    """

    items: Sequence[Batch]
    source: Source
    note: str = ""  # what was found out about the data and decided by it
    joined: bool = False  # whether they are windows of joined lines, each of which could be a document of its own

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        return self.items[index]


def check_apart(calibration: Source, evaluation: Source) -> str:
    """Refuse evaluation data that overlap the calibration data; gives a sentence if a small share does in another form."""
    shared = set(calibration.rows) & set(evaluation.rows)
    same_file = any(_overlap(one, other) for one in calibration.files for other in evaluation.files)
    all_shared = same_file or len(shared) == len(evaluation.rows)
    if same_file and _is_part(calibration) and _is_part(evaluation):
        raise DataError(
            f"The data {evaluation.name!r} was held out in another way when it chose the units; give the --holdout, "
            "--documents and --seq-len that chose them."
        )
    if all_shared and calibration.name == evaluation.name:
        raise DataError(
            f"The data {evaluation.name!r} has no held-out split, so that the data which chose the units would also "
            "judge them. Give other data with --data, or keep a share of these for judging with --holdout 0.1."
        )
    if shared or same_file:
        overlap = f"{len(shared)} of its {len(evaluation.rows)} rows are in" if shared else "it shares a file with"
        raise DataError(
            f"The evaluation data {evaluation.name!r} ({evaluation.split}) overlaps the data that chose the units ({overlap} "
            f"{calibration.name!r}); give another file or split with --data or --calibration."
        )
    share, same_pixels = shared_content(calibration.marks, evaluation.marks)
    if share > MOST_SHARED or same_pixels:
        alike = f"{share:.0%} of it is, in another form,"
        what = alike if share > MOST_SHARED else "it has images with the same pixels as some"
        raise DataError(
            f"The evaluation data {evaluation.name!r} ({evaluation.split}) overlaps the data that chose the units ({what} in "
            f"{calibration.name!r}, and at most {MOST_SHARED:.0%} may be alike); give other data with --data or --calibration."
        )
    if share >= WORTH_SAYING:
        return (
            f"{share:.0%} of the evaluation data {evaluation.name!r} are also in {calibration.name!r}, which chose the units."
        )
    return ""


def has_splits(name: str) -> DataError:
    return DataError(f"The data {name!r} has splits of its own, so that no share of it need be held out: leave out --holdout.")


def part_of(file: str, holdout: float, how: str, split: str) -> str:
    """What identifies one of the two parts, "train" and "test", that a holdout makes of a file by its digest."""
    return f"{file}:{how} {holdout:g}:{split}"


def _is_part(source: Source) -> bool:
    return any(":" in file for file in source.files)


def _overlap(one: str, other: str) -> bool:
    """Whether what is read of two files is the same file's, unless these are its two parts by the same holdout."""
    file, how, split = one.split(":") if ":" in one else (one, "", "")
    other_file, other_how, other_split = other.split(":") if ":" in other else (other, "", "")
    return file == other_file and not (how and how == other_how and split != other_split)


def check_counts(limit: int | None, batch_size: int) -> None:
    if limit is not None and limit < 1:
        raise SettingError(f"The number of texts or images is {limit}, but must be at least 1.")
    if batch_size < 1:
        raise SettingError(f"The batch size is {batch_size}, but must be at least 1.")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def digest_file(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
