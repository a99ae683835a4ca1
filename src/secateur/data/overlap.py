"""Whether two sets of data share content that is not the same to the byte: texts cut elsewhere, images encoded anew.

A source keeps marks of its rows. A text's are hashes of every few tokens in a row (shingles), the lowest of them all; an
image's are a hash of its brightness that survives another encoding, and a digest of its pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

SHINGLE = 32  # tokens, or half of a row if rows are short
LEAST = 16  # tokens; fewer are alike by chance, above all where a token is a letter
MOST_MARKS = 1024  # of a text: the lowest hashes are a fair sample of all
SIDE = 12  # of the grid of brightness steps
ALIKE = 10  # of its 144 steps, at most so many may differ
_DIGITS = 12  # of a shingle's hash and of a digest of pixels
_STEPS = SIDE * SIDE // 4  # hexadecimal digits of the steps


def text_marks(rows: Iterable[Sequence[int]]) -> tuple[str, ...]:
    """The lowest hashes of the shingles of some rows of tokens; a shorter row is one shingle."""
    found, rows = set(), list(rows)
    length = max(LEAST, min(SHINGLE, max((len(row) for row in rows), default=0) // 2))
    for row in rows:
        tokens = np.asarray(row, dtype="<i8").tobytes()
        for start in range(max(1, len(row) - length + 1)):
            piece = tokens[8 * start : 8 * (start + length)]
            found.add(hashlib.blake2b(piece, digest_size=_DIGITS // 2).hexdigest())
    return tuple(sorted(found)[:MOST_MARKS])


def image_mark(image: Any) -> str:
    """The mark of a PIL image: where it gets brighter from left to right, on a coarse grid; and a digest of its pixels."""
    grey = np.asarray(image.convert("L").resize((SIDE + 1, SIDE), resample=4), dtype=np.int16)  # 4: the mean over a box
    bits = (grey[:, 1:] > grey[:, :-1]).flatten()
    pixels = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:_DIGITS]
    return np.packbits(bits).tobytes().hex() + pixels


def shared_content(calibration: Sequence[str], evaluation: Sequence[str]) -> tuple[float, bool]:
    """The share of the evaluation data that is in the calibration data too, and whether images of both have the same pixels."""
    if not calibration or not evaluation or len(calibration[0]) != len(evaluation[0]):
        return 0.0, False
    if len(evaluation[0]) == _DIGITS:
        return _shared_shingles(calibration, evaluation), False
    same = {mark[_STEPS:] for mark in calibration} & {mark[_STEPS:] for mark in evaluation}
    ours, theirs = _steps(calibration), _steps(evaluation)
    alike = [bool(((ours != row).sum(axis=1) <= ALIKE).any()) for row in theirs]
    return sum(alike) / len(alike), bool(same)


def _shared_shingles(calibration: Sequence[str], evaluation: Sequence[str]) -> float:
    # Of a long text only the lowest hashes are kept: both are compared up to where both are complete.
    ends = [marks[-1] for marks in (calibration, evaluation) if len(marks) == MOST_MARKS]
    compared = [mark for mark in evaluation if not ends or mark <= min(ends)]
    known = set(calibration)
    return sum(mark in known for mark in compared) / len(compared) if compared else 0.0


def _steps(marks: Sequence[str]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Each mark's steps as a row of zeros and ones."""
    return np.unpackbits(np.array([list(bytes.fromhex(mark[:_STEPS])) for mark in marks], dtype=np.uint8), axis=1)
