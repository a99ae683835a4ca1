"""Writes docs/commands.md, docs/files.md and docs/python.md from the code: `python scripts/reference_pages.py`.

A test holds the pages to it. docs/settings.md has a script of its own, settings_page.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer.main
from settings_page import table

import secateur
from secateur.cli.app import make_app
from secateur.cut.proof import Proof
from secateur.cut.record import CutRecord
from secateur.cut.repair import Repair
from secateur.experiment.store import Record
from secateur.judgement import Evaluation, Judgement, PruneRecord
from secateur.selection import Pull, Reached, Selection, Source, Step
from secateur.settings import SECTIONS
from secateur.tasks import TASKS
from secateur.units import Unit

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "This page is written by `python scripts/reference_pages.py` from {}.\n"

COMMANDS_HEAD = f"""# Commands

{NOTE.format("the command line itself")}
`secateur COMMAND --help` says the same in the terminal. `python -m secateur` is the command `secateur`. Results go to
standard output, progress and errors to standard error. A command ends with 0, or with 2 and one sentence that says what is
wrong and what to do, or with 130 if it was stopped. `prune`, `select`, `shrink` and `grid` go on where they were stopped:
type the same command again.

`MODEL` is a folder that `save_pretrained` wrote, a hub name, or `timm:NAME` (`timm:NAME@FOLDER` takes local safetensors).
Data are named as [data.md](data.md) says. What each setting means is in [settings.md](settings.md).

The Tab key completes commands and options once the shell knows them. This writes it into the shell's own files, for bash,
zsh, fish and PowerShell; `--show-completion` only prints it:

```
secateur --install-completion
```
"""

MODELS = """A family is named by transformers' `model_type`, or by the class of timm's model. SmolLM2, Llama 1 to 3 and the
like are `llama`, Pythia is `gpt_neox`, Qwen2.5 is `qwen2`. What a model does (next tokens, hidden tokens, classes,
embeddings) follows from its head: [encoders.md](encoders.md). Sentence-transformers folders of these families are read too.
[add-a-family.md](add-a-family.md) adds one.
"""

FILES_HEAD = f"""# Files

{NOTE.format("the classes that are written to them")}
All files are JSON, JSON lines, Markdown, TOML or safetensors: they can be read without Secateur. Numbers that are not finite
are the strings `"nan"`, `"inf"` and `"-inf"`. A file is written whole or not at all.

| File | Written by | Holds |
| --- | --- | --- |
| `selection.json` | `prune`, `select` | the units in the order they were chosen, the settings, and every measurement |
| `evaluation.json` | `prune`, `evaluate -o` | the loss and the figures of the dense and the zeroed model, batch by batch |
| `secateur.json` | `prune`, `shrink` | what was cut, the proof, the repair, the speed, and a digest of each file |
| `config.json`, `*.safetensors`, tokenizer files | `prune`, `shrink` | the smaller model: [checkpoint.md](checkpoint.md) |
| `modeling_shrunk.py` | `prune`, `shrink` | the code that reads a model whose layers differ, where Secateur is not installed |
| `README.md` | `prune`, `shrink` | the model card |
| `journal.jsonl` | `prune`, `select` | a line for each measurement, as it happens: what a stopped run goes on from |
| `latency.json` | `prune`, `select` with `--keep-latency` | the measured times that the goal is counted by |
| `results.jsonl`, `plans/` | `grid` | a line for each run that ended; what there is to do: [experiments.md](experiments.md) |
| a grid in TOML | you | what `grid` is to do: [experiments.md](experiments.md#a-grid-file) |
| settings in TOML | you | what `--config` takes: [settings.md](settings.md) |
"""
# What each object in the files is made from, and the names that the files have kept from earlier versions.
OBJECTS: dict[str, tuple[type, dict[str, str]]] = {
    "selection.json": (Selection, {"made_with": "settings"}),
    "evaluation.json": (PruneRecord, {"made_with": "settings", "judged_on": "judging"}),
    "secateur.json": (CutRecord, {"made_with": "settings", "zeroed": "masked"}),
    "A line of results.jsonl": (Record, {}),
    "A unit": (Unit, {}),
    "A step": (Step, {}),
    "A pull": (Pull, {}),
    "The source of data": (Source, {}),
    "A goal": (Reached, {}),
    "An evaluation": (Evaluation, {}),
    "A judgement": (Judgement, {"zeroed": "pruned"}),
    "A proof": (Proof, {}),
    "A repair": (Repair, {}),
}
WORDS = {
    "bool": "true or false",
    "str": "text",
    "float": "number",
    "int": "whole number",
    "Reached": "goal",
    "Provenance": "settings and digests",
    "JudgedOn": "the evaluation data",
}
# Keys that are computed when the file is written.
COMPUTED = {
    "selection.json": [
        "`format`, `pulls`, `forwards` and `nonfinite_pulls` are there too; `scores` is a list of units, each with its `score`."
    ],
    "evaluation.json": ["The fields of the judgement stand beside these, not in an object of their own."],
    "secateur.json": ["`format` is there too. The proof and the repair also have a `sentence`."],
    "A line of results.jsonl": ["The fields of the judgement stand beside these, and `digest`, by which an edit is noticed."],
    "An evaluation": ["`nonfinite_batches` is there too. Figures that the task does not have are left out."],
    "A judgement": ["`delta_loss`, `ppl_change_percent` and the like say what zeroing changed; `unit_ratio` is k/K."],
}

PYTHON_HEAD = f"""# Python

{NOTE.format("the docstrings of the public names")}
`import secateur as sc` gives all of these. A name is imported when it is first used, so that the import itself is quick. The
package is typed. The examples are run by the tests, with a tiny model: `model`, `tokenizer`, `calibration` and `evaluation`
(batches), `units`, `meter`, `selection`, `small` (the cut model) and `opened` stand for yours.
"""
ROOMS = {  # the heading of a group of public names, and the modules they live in
    "The whole job": ("prune", "steps", "forecast"),
    "Models": ("model.",),
    "Data": ("data.",),
    "Search": ("search.", "methods"),
    "Cutting": ("cut.", "series"),
    "Measuring": ("measure.",),
    "Plain data": ("selection", "judgement", "units", "settings", "healing", "files."),
    "Looking": ("report.",),
    "Following a run": ("watcher", "trackers"),
    "Errors": ("errors",),
}
TABLES = {  # names that are no class and no function
    "FAMILIES": "The known model families, by transformers' `model_type` or a class name: [add-a-family.md](add-a-family.md).",
    "METHODS": "The methods of choosing units, by the name that `--method` takes: [add-a-policy.md](add-a-policy.md).",
}


def commands_page() -> str:
    """The page of commands as it should be."""
    group: Any = typer.main.get_command(make_app())
    parts = [COMMANDS_HEAD, "\n", table(["Command", "What it does"], [_row(name, it) for name, it in group.commands.items()])]
    known = [
        [title, ", ".join(f"`{name}`" for name, family in secateur.FAMILIES.items() if TASKS[family.task].inputs == data)]
        for data, title in {"text": "Texts", "image": "Images"}.items()
    ]
    parts.append(f"\n## Models\n\n{MODELS}\n{table(['Data', 'Families'], known)}")
    for name, command in group.commands.items():
        needed = [param for param in command.params if param.required or param.param_type_name == "argument"]
        usage = " ".join(_usage(param) for param in needed)
        parts += [f"\n## secateur {name}\n\n{_text(command.help)}\n\n```text\nsecateur {name} {usage} [OPTIONS]\n```\n"]
        by_panel: dict[str, list[list[str]]] = {}
        for param in command.params:
            if not getattr(param, "hidden", False):
                by_panel.setdefault(getattr(param, "rich_help_panel", None) or "", []).append(_option(param))
        for panel in sorted(by_panel, key=lambda title: SECTIONS.index(title) if title in SECTIONS else -1):
            title = panel or "Needed, or general"
            parts.append(f"\n{title}:\n\n{table(['Option', 'Default', 'What it does'], by_panel[panel])}")
    return "".join(parts)


def _row(name: str, command: Any) -> list[str]:
    return [f"[`{name}`](#secateur-{name})", _text(command.help).split("\n\n")[0]]


def _usage(param: Any) -> str:
    if param.param_type_name == "argument":
        name = param.name.upper()
        return name if param.required else f"[{name}]..."
    return f"{param.opts[0]} {param.name.upper()}"


def _option(param: Any) -> list[str]:
    if param.param_type_name == "argument":
        return [f"`{param.name.upper()}`", "", _cell(param.help or "")]
    names = " ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    shown = param.default is not None and param.default is not False and param.default != "" and param.show_default
    default = str(param.default).lower() if isinstance(param.default, bool) else str(param.default)
    return [names, f"`{default}`" if shown else "", _cell(param.help or "")]


def files_page() -> str:
    """The page of files as it should be."""
    parts = [FILES_HEAD]
    for title, (kind, renamed) in OBJECTS.items():
        said = _cell(inspect.getdoc(kind) or "").split(" >>> ")[0].removeprefix(f"{title}: ")
        parts.append(f"\n## {title}\n\n{said[0].upper()}{said[1:]}\n\n")
        rows = [[f"`{renamed.get(name, name)}`", json_type(said), note] for name, said, note in fields_of(kind)]
        parts.append(table(["Field", "Type", "What it is"], rows))
        parts += [f"\n{sentence}\n" for sentence in COMPUTED.get(title, ())]
    return "".join(parts)


def fields_of(kind: type) -> list[tuple[str, str, str]]:
    """The name, the type and the comment of each field of a dataclass."""
    lines = inspect.getsource(kind).splitlines()
    notes: dict[str, str] = {}
    for line in lines:
        found = re.match(r"    (\w+): .*?(?:  # (.*))?$", line)
        if found:
            notes.setdefault(found[1], re.sub('files call it "\\w+"', "", found[2] or ""))
    fields = dataclasses.fields(kind)
    return [(field.name, str(field.type), _cell(notes.get(field.name, ""))) for field in fields]


def json_type(said: str) -> str:
    """A type of Python's as JSON has it, in words."""
    if said.endswith(" | None"):
        return f"{json_type(said.removesuffix(' | None'))}, or not there"
    if many := re.fullmatch(r"tuple\[(.*), \.\.\.\]", said):
        return f"list of {json_type(many[1])}"
    if said.startswith("dict["):
        return "object"
    return WORDS.get(said, said.lower() if said.isidentifier() else f"`{said}`")


def python_page() -> str:
    """The page of public names as it should be."""
    parts = [PYTHON_HEAD]
    for heading, modules in ROOMS.items():
        names = [name for name in secateur.__all__ if _lives_in(name, modules)]
        parts.append(f"\n## {heading}\n")
        parts += [_described(name) for name in names]
    return "".join(parts)


def _lives_in(name: str, modules: tuple[str, ...]) -> bool:
    home = secateur._HOME[name].removeprefix("secateur.")
    return any(home.startswith(module) if module.endswith(".") else home == module for module in modules)


def _described(name: str) -> str:
    it = getattr(secateur, name)
    if name in TABLES:
        return f"\n### {name}\n\n{TABLES[name]}\n"
    said = inspect.getdoc(it) or ""
    text, examples = said.partition(">>> ")[0].strip(), said[said.index(">>> ") :] if ">>> " in said else ""
    parts = [f"\n### {name}\n"]
    if not (inspect.isclass(it) and (issubclass(it, Exception) or getattr(it, "_is_protocol", False))):
        parts.append(f"\n```py\n{signature(name, it)}\n```\n")
    parts.append(f"\n{text}\n")
    if inspect.isclass(it):
        members = [(inner, member) for inner, member in vars(it).items() if _is_public_member(inner, member)]
        rows = [[f"`{inner}`", _cell(_first(member))] for inner, member in members if _first(member)]
        parts.append(f"\n{table(['Member', 'What it gives'], rows)}" if rows else "")
    parts.append(f"\n```pycon\n{examples.strip()}\n```\n" if examples else "")
    return "".join(parts)


def _is_public_member(name: str, member: Any) -> bool:
    return not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, (property, classmethod)))


def _first(member: Any) -> str:
    return (inspect.getdoc(getattr(member, "__func__", member)) or "").split("\n\n")[0]


def signature(name: str, it: Callable[..., Any]) -> str:
    """The signature as one would type it: on one line, or with a line for each argument."""
    parts: list[str] = []
    for parameter in inspect.signature(it).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        mark = "**" if parameter.kind is parameter.VAR_KEYWORD else "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        typed = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        parts.append(f"{mark}{parameter.name}{typed}{default}")
    back = inspect.signature(it).return_annotation
    after = "" if inspect.isclass(it) or back is inspect.Signature.empty else f" -> {_type(back)}"
    line = f"{name}({', '.join(parts)}){after}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){after}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    return "..." if callable(value) or "factory" in repr(value) else repr(value)


def _text(text: str | None) -> str:
    """Paragraphs, each on one line."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\[", "[").replace("|", "\\|")


PAGES = {"commands.md": commands_page, "files.md": files_page, "python.md": python_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
