"""Fields: what a setting is: its default, its help line and its check. Knows no setting itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from secateur.errors import SettingError, not_one_of
from secateur.files import jsonio
from secateur.tasks import TASKS, TEXT

MOST = 10**9  # of anything that is counted

T = TypeVar("T", bound="Checked")


def setting(default: Any, section: str, help: str | Callable[[], str], **more: Any) -> Any:
    """A field that a user sets.

    Besides the help line `more` can say: `least` and `most` (the smallest and the largest value; what has a least is a count),
    `share` (it lies between 0 and 1), `several` (more than one may be given: a series of cuts), `choices`, `by_task` (its
    defaults for texts and for images), `unset` (what files and flags say for None), `decided` (where the user does not set it,
    other settings decide, as the help line says), `recorded` (its name in files), `flag` (its name on the command line and in
    grids, where that differs), `words` (its name in sentences), `hidden` (it has no option of its own), `added` (files leave it
    out at its default, so that those written before it was added stay the same), `unless_goal` (the command line passes it on
    only where the user gave it, for it cannot stand beside a goal).
    """
    return dataclasses.field(default=default, metadata={"section": section, "help": help, **more})


class Checked:
    """Settings whose fields carry their own checks."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "unset" in field.metadata and getattr(self, field.name) == field.metadata["unset"]:
                object.__setattr__(self, field.name, None)

    def check(self) -> None:
        """Refuse values that cannot work, before anything is loaded."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            check_field(field, getattr(self, field.name))

    def for_task(self: T, task: str) -> T:
        """The same settings with the defaults of a task of TASKS in place of None: those for texts or those for images."""
        which = 0 if TASKS[task].inputs == TEXT else 1
        fields = [field for field in dataclasses.fields(self) if "by_task" in field.metadata]  # type: ignore[arg-type]
        left = {field.name: field.metadata["by_task"][which] for field in fields if getattr(self, field.name) is None}
        return replace(self, **left)  # type: ignore[type-var]

    def to_json(self) -> dict[str, Any]:
        """The settings as files hold them."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {field: getattr(self, field.name) for field in fields}
        values = {
            field: value for field, value in values.items() if not (field.metadata.get("added") and value == field.default)
        }
        return {
            field.metadata.get("recorded", field.name): field.metadata.get("unset") if value is None else value
            for field, value in values.items()
        }

    @classmethod
    def from_json(cls: type[T], fields: Mapping[str, Any]) -> T:
        """The settings that a file holds; a ValueError if it holds none."""
        names = {field.metadata.get("recorded", field.name): field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return jsonio.decode({names.get(name, name): value for name, value in fields.items()}, cls)


def check_field(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value that a setting cannot have."""
    if value is None:
        return
    words, about = field.metadata.get("words", field.name.replace("_", " ")), field.metadata
    if "least" in about and value < about["least"]:
        raise SettingError(f"The {words} is {value}, but must be at least {about['least']}.")
    if "least" in about and value > about.get("most", MOST):
        raise SettingError(f"The {words} is {value}, but must be at most {about.get('most', MOST):,}.")
    if "choices" in about and value not in about["choices"]():
        raise not_one_of(words, value, list(about["choices"]()))
    if "share" in about and not 0 < value < 1:
        raise SettingError(f"The {words} is {value}, but must lie between 0 and 1: 0.8 leaves four fifths.")
