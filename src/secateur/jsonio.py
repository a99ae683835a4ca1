"""JSON files: written whole or not at all, and always valid; nan and the infinities are written as words."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from secateur.errors import OutputError


def to_json(value: Any) -> Any:
    """The same value with every non-finite number as the string "nan", "inf" or "-inf"; `float()` reads them back."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(to_json(value), indent=indent, allow_nan=False, ensure_ascii=False)


def fingerprint(value: Any) -> str:
    """A digest of plain data: of what they say, not of their order."""
    text = json.dumps(to_json(value), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write beside the file, then rename: a reader sees the old file or the new one, never half of it."""
    beside = path.with_name(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(f"Cannot write {path}: {error.strerror or error}. Choose another place with -o, or make room there.")
