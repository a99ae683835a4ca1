"""Checks of output paths before any work: they must be writable and must not hold anything else."""

from __future__ import annotations

import os
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


def check_file(path: Path, example: str) -> None:
    """Refuse a path that is a folder, or whose folder cannot be written; `example` is the file name to suggest."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name the file to write, such as {path / example}.")
    check_folder(path.absolute().parent)


def check_record_file(path: Path, about: dict[str, Any]) -> None:
    """Refuse a file that holds anything but an earlier record with the values in `about`."""
    check_file(path, "evaluation.json")
    try:
        record = jsonio.read(path) if path.exists() else about
        matches = {name: record.get(name) for name in about} == about
    except (OSError, ValueError, AttributeError):
        matches = False
    if not matches:
        raise OutputError(f"{path} holds something else and is not overwritten; choose another place with -o.")
