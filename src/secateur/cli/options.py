"""Options: what the commands take on the command line, made from the fields of settings.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from secateur.cli.config import read_config
from secateur.errors import SettingError, not_one_of
from secateur.healing import Healing
from secateur.settings import (
    CUTTING,
    MACHINE,
    OLD_NAMES,
    REPAIRS,
    SECTIONS,
    Cutting,
    Judging,
    Machine,
    Settings,
    keywords,
    type_of,
)

Model = Annotated[
    str,
    typer.Argument(help="A model folder, a hub name, or timm:NAME (timm:NAME@FOLDER for local weights).", show_default=False),
]
OutFolder = Annotated[Path, typer.Option("-o", "--out", help="Folder for the results.", show_default=False)]
OutFile = Annotated[Path, typer.Option("-o", "--out", help="The file to write.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=MACHINE)]
Repair = Annotated[bool, typer.Option("--repair", help=keywords()["repair"][1].metadata["help"], rich_help_panel=CUTTING)]
Config = Annotated[
    Path | None,
    typer.Option(
        help="A TOML file of settings by their names; what is typed here wins over it.",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Print the result and errors only, no progress.", rich_help_panel=MACHINE)
]
Board = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        help="Also write the run to this folder, for TensorBoard.",
        metavar="FOLDER",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Only say what would be done, and how long it would take; write nothing.", rich_help_panel=MACHINE
    ),
]
RepairForm = Annotated[
    str,
    typer.Option(
        help="layered (block by block), least-squares (all at once), bias, or auto for the best of them.",
        rich_help_panel=CUTTING,
    ),
]


def names_of(*groups: type) -> list[str]:
    """The options of some classes of settings."""
    return [name for name, (group, field) in keywords().items() if group in groups and not field.metadata.get("hidden")]


PATHS = ("-o", "--out", "--selection", "--config", "--json", "--tensorboard")  # options that name a file or folder
CHOICE = names_of(Settings)  # what decides a choice
HEAL = names_of(Healing)
JOB = [*names_of(Settings, Judging, Cutting, Machine), *HEAL]
MODEL = ["device", "dtype", "trust_remote_code"]  # how a model is loaded


@dataclass(frozen=True)
class Command:
    """A function, and the settings that it takes as options."""

    function: Callable[..., None]
    names: tuple[str, ...]
    unset: Sequence[str]
    help: Mapping[str, str]
    config: bool

    def for_typer(self) -> Callable[..., None]:
        """The function with a parameter for each option, as typer reads them; it gets the settings that the user gave."""
        own = inspect.signature(self.function, eval_str=True).parameters.values()
        mine = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
        needed = [parameter for parameter in mine if parameter.default is parameter.empty]
        by_section = sorted(self.names, key=lambda name: SECTIONS.index(keywords()[name][1].metadata["section"]))
        options = [_option(name, self.help.get(name), unset=name in self.unset) for name in by_section]
        ordered = [*needed, *options, *(parameter for parameter in mine if parameter not in needed)]
        in_files = {*self.names, *({parameter.name for parameter in mine} & keywords().keys())}

        @functools.wraps(self.function)
        def called(_context: typer.Context, **options: Any) -> None:
            file = options.pop("config", None)
            given = read_config(file, in_files) if file else {}
            given |= {name: value for name, value in options.items() if _is_typed(_context, name)}
            settings = {name: _converted(name, value) for name, value in given.items() if name in self.names}
            others = {name: given.get(name, value) for name, value in options.items() if name not in self.names}
            self.function(**others, **settings)

        if self.config:
            ordered.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config))
        context = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        ordered = [context, *ordered]
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in ordered]
        )
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        return called


def _is_typed(context: typer.Context, name: str) -> bool:
    """Whether the user typed the option; its default belongs to the function that is called."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def takes(
    *names: str, unset: Sequence[str] = (), help: Mapping[str, str] | None = None, config: bool = False
) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function, with an option for each of these settings; it gets those that the user gave.

    Those that are `unset` have no default here; `help` replaces the help line of some. `config` adds the option for a file.
    """
    return lambda function: Command(function, names, unset, help or {}, config)


def _option(name: str, help: str | None, *, unset: bool) -> inspect.Parameter:
    """The option of a setting, with its help line and its default."""
    field = keywords()[name][1]
    about = field.metadata
    default = None if unset or about.get("unless_goal") or about.get("decided") else field.default
    line = help or (about["help"]() if callable(about["help"]) else about["help"])
    line += f" [default: {field.default}]" if about.get("unless_goal") else ""
    line = line.replace("[default", "\\[default")  # what is in brackets is markup to rich
    kind = float if name == "cache_memory" else str if "several" in about else _plain_type(type_of(name))
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}" if default else flag
    option = typer.Option(
        flag, help=line, rich_help_panel=about["section"], show_default=default is not None and default is not False
    )
    annotation: Any = Annotated[kind if default is not None else kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _plain_type(kind: Any) -> Any:
    """The type without None."""
    return next((part for part in get_args(kind) if part is not type(None)), kind)


def _converted(name: str, value: Any) -> Any:
    return gibibytes(value) if name == "cache_memory" and value is not None else value


def gibibytes(memory: float) -> int:
    """GiB as bytes."""
    if not 0 <= memory <= 2**30:
        raise SettingError(f"The cache memory is {memory:g} GiB, but must be 0 or more, and at most {2**30:,}.")
    return int(memory * 2**30)


def repair_of(repair: bool, form: str) -> dict[str, str]:
    """The setting that --repair and --repair-form stand for; a form that is none is refused, wanted or not."""
    named = form.replace("-", " ")
    if named not in REPAIRS:
        raise not_one_of("form of repair", form, [known.replace(" ", "-") for known in REPAIRS])
    return {"repair": named} if repair else {}


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse an empty name of a file or folder, which would be taken for the current folder, and one that is not UTF-8."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise SettingError(f"The argument {argument!r} is not text in UTF-8: rename the file or folder.")
        flag, equals, value = argument.partition("=")
        empty_after = not argument and (before in PATHS or not before.startswith("-"))
        if empty_after or (equals and not value and flag in PATHS):
            raise SettingError(f"The name after {flag or before or 'the command'} is empty: give a file or folder.")


def with_new_names(arguments: Sequence[str], note: Callable[[str], None]) -> list[str]:
    """The arguments with the present names of options that were renamed; each old name gets a note."""
    flags = {f"--{old.replace('_', '-')}": f"--{new.replace('_', '-')}" for old, new in OLD_NAMES.items()}
    renamed = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in flags:
            note(f"note: {flag} is now called {flags[flag]}.")
        renamed.append(flags.get(flag, flag) + equals + value)
    return renamed
