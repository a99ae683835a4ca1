"""Checks of output paths before any work: they must be writable and must not hold anything else."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from secateur.errors import OutputError
from secateur.files import jsonio


def check_folder(path: Path) -> None:
    """Refuse a folder that cannot be written."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if path.exists() and not path.is_dir():
        raise OutputError(f"Cannot write to {path}: it is a file, but a folder is needed. Choose another place.")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"Cannot write to {path}: {existing} is not a writable folder. Choose another place.")


_held: dict[str, int] = {}  # the folders that this process alone may write to, each with the thread that does


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a model to a folder while the block lasts; an error if one does so already.

    The folder is made if it is not there, and removed if nothing was written to it.
    """
    place, new = os.path.realpath(folder), not folder.exists()
    if _held.get(place) == threading.get_ident():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY) if sys.platform != "win32" else None  # Windows has no such lock
    try:
        if lock is not None:
            _lock(lock, folder)
        _held[place] = threading.get_ident()
        try:
            yield
        finally:
            del _held[place]
    finally:
        if lock is not None:
            os.close(lock)
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails, as it should, if files were written


def _lock(file: int, folder: Path) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(f"Another run is writing a model to {folder} now; wait for it, or choose another -o.") from error


def check_file(path: Path, example: str, holds: str = "") -> None:
    """Refuse a path that is a folder or a device, or whose folder cannot be written; `example` is the file name to suggest.

    With `holds`, a file that is there must be a JSON object with this field, else it is not ours to replace.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name the file to write, such as {path / example}.")
    jsonio.refuse_special(path)
    check_folder(path.absolute().parent)
    if holds and path.exists() and not _has(path, holds):
        raise _something_else(path)


def check_record_file(path: Path, about: dict[str, Any]) -> None:
    """Refuse a file that holds anything but an earlier record with the values in `about`."""
    check_file(path, "evaluation.json")
    try:
        record = jsonio.read(path) if path.exists() else about
        matches = {name: record.get(name) for name in about} == about
    except (OSError, ValueError, AttributeError):
        matches = False
    if not matches:
        raise _something_else(path)


def _has(path: Path, name: str) -> bool:
    try:
        fields = jsonio.read(path)
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and name in fields


def _something_else(path: Path) -> OutputError:
    return OutputError(f"{path} holds something else and is not overwritten; choose another place with -o.")
