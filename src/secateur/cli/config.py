"""Config files: a flat TOML table with the options of a command, for settings that are used again and again."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from secateur.errors import SettingError, first_line, not_one_of
from secateur.files import jsonio
from secateur.settings import check_type


def read_config(path: Path, allowed: Collection[str]) -> dict[str, Any]:
    """The options that a file gives, by the names that the commands' parameters have.

    `repair` is true, false, or the form of the repair: the command line has two options for it.
    """
    values: dict[str, Any] = {}
    for written, value in _read_table(path).items():
        name = written.replace("-", "_")
        if name not in allowed:
            raise not_one_of(f"setting in {path}", written, sorted(allowed))
        if name in values:
            raise SettingError(f"{path} has {name} twice, once with a hyphen and once with an underscore; leave one of them.")
        if name == "repair":
            values |= _repair(value, path)
            continue
        # In GiB, as on the command line, so that a part of one can be given.
        if name != "cache_memory" or not _is_number(value):
            check_type(name, value, str(path))
        values[name] = value
    return values


def _read_table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(jsonio.read_text(path))
    except OSError as error:
        raise SettingError(f"Cannot read the settings in {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # no TOML, or no UTF-8
        raise SettingError(f"{path} does not hold settings as TOML: {first_line(error)}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _repair(value: Any, path: Path) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"repair": value}
    check_type("repair", value, str(path))
    return {"repair": True, "repair_form": value}
