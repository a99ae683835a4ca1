"""JSON files: written whole or not at all, and always valid: nan and infinities are written as strings."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from secateur.errors import OutputError, SettingError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """The value with every non-finite number replaced by the string "nan", "inf" or "-inf", which `float()` reads back."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def decode(fields: Any, kind: type[T]) -> T:
    """Convert plain data to a dataclass and check every field; a ValueError says what is wrong and where.

    >>> decode({"kind": "head", "layer": 0, "index": 3}, Unit)
    Unit(kind='head', layer=0, index=3, width=0)
    """
    try:
        return msgspec.convert(fields, kind, strict=False)  # not strict: our files hold numbers such as "nan"
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at ")
        place = where.removeprefix("$").lstrip(".")
        sentence = what.replace("Expected object", "Expected an object")
        raise ValueError(f"{sentence} at {place}" if place else sentence) from error
    except SettingError as error:  # raised by the dataclass's own checks, such as an unknown kind of unit
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read(path: Path) -> Any:
    """The content of a JSON file. Raises OSError if the file cannot be read, ValueError if it is not JSON."""
    return loads(read_bytes(path))


def loads(data: bytes) -> Any:
    """The value that JSON in UTF-8 holds; a ValueError if it holds none, or one that could not be written again."""
    text = data.decode("utf-8")
    try:
        value = json.loads(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()  # halves of characters, such as "\ud800", cannot be
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def read_text(path: Path) -> str:
    """The text of a regular file; an OSError for anything else."""
    return read_bytes(path).decode("utf-8")


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; an OSError for anything else, since a device or a pipe may never end."""
    if is_special(path):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_bytes()


def is_special(path: Path) -> bool:
    """Whether a path is there and is neither a regular file nor a folder, nor a link to one: a device, a pipe, a socket."""
    return path.exists() and not (path.is_file() or path.is_dir())


def dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(to_json(value), indent=indent, allow_nan=False, ensure_ascii=False)


def fingerprint(value: Any) -> str:
    """A digest of plain data that does not depend on the order of keys."""
    text = json.dumps(to_json(value), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    write_text(path, dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a temporary file, then rename it: a reader sees the old file or the new one, never half of it.

    All files but checkpoints and journals are written here. A symbolic link stays, and the file that it leads to is replaced.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:200]}.part")  # the next start replaces what a killed one left
    try:
        refuse_special(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # x: a link that someone else put there is not followed
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from error


def refuse_special(path: Path) -> None:
    """Refuse to write to a device, a pipe or a socket: a rename would replace it."""
    if is_special(path):
        raise OutputError(f"{path} is not a regular file, and is not overwritten; choose another place with -o.")


def cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(f"Cannot write {path}: {error.strerror or error}. Choose another place with -o, or make room there.")
