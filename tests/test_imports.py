"""Holds the plan of the house: which room imports from which, exactly, by reading the import lines."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "secateur"
MODULES = sorted(".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py"))
FOLDERS = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())

PLAIN = {
    "errors",
    "half",
    "units",
    "tasks",
    "streams",
    "fields",
    "healing",
    "settings",
    "methods",
    "selection",
    "series",
    "judgement",
    "watcher",
    "checks",
}  # data and words
EDGES: dict[str, set[str]] = {  # a room, and the rooms it imports from: all of them, and no other
    # Of search only the policies, which methods.py lists; of report what a notebook shows of a selection or a judgement.
    "plain": {"files", "search", "workers", "report"},
    "files": {"plain"},
    "model": {"plain", "files"},
    "data": {"plain", "model"},
    "workers": {"plain", "model"},  # of the model only what lanes copy: processes and clusters know none
    "search": {"plain", "files", "model", "data", "workers"},
    "rivals": {"plain", "model", "search"},  # methods.py names its functions, so that no room imports from it
    "measure": {"plain", "files", "model", "data", "search"},
    "cut": {"plain", "files", "model", "search", "measure", "report", "workers"},  # of the workers only the team that heals
    "job": {"plain", "files", "model", "data", "search", "measure", "cut", "report", "workers"},
    "trackers": {"plain"},  # its package brings torch along, so that it is not plain itself
    "report": {"plain", "files", "experiment"},  # files and records alone: a page is made without a model
    "experiment": {"plain", "files", "model", "data", "search", "measure", "job", "workers"},
    "cli": {"plain", "files", "model", "measure", "cut", "job", "trackers", "experiment", "workers", "report"},
    "secateur": {"plain", "files", "model", "data", "search", "measure", "cut", "job", "trackers", "report"},
}
WITHOUT_TENSORS = {
    *PLAIN,
    *(module for module in MODULES if module.startswith(("files.", "report."))),
    *(f"workers.{name}" for name in ("crew", "pools")),
    *(f"search.{name}" for name in ("policies", "goals", "select")),
    *(f"experiment.{name}" for name in ("store", "compare", "tables", "figures", "paper", "workers")),
}
TENSORS = {"torch", "torchvision", "transformers", "safetensors", "timm"}
OPTIONAL = {"timm", "peft", "datasets", "pyarrow", "gguf", "matplotlib", "pandas", "ray", "scipy", "tensorboard", "accelerate"}
MOST_FILES = 8  # in a folder


def room_of(module: str) -> str:
    first = module.partition(".")[0]
    if first in PLAIN:
        return "plain"
    return {"steps": "job", "healer": "job", "prune": "job", "forecast": "job", "__init__": "secateur", "__main__": "cli"}.get(
        first, first
    )


def import_statements(tree: ast.AST, *, top_level: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import lines below a node; `top_level` leaves out those inside functions, which run only when called."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from import_statements(node, top_level=top_level)


def read(module: str) -> ast.Module:
    return ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def without_type_checking(tree: ast.Module) -> ast.Module:
    """The module without what only a type checker imports."""
    body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(body, [])


def imported_names(module: str, *, top_level: bool = False) -> set[str]:
    """Dotted names that a module imports; `from a import b` counts as `a.b`.

    The package shows its public names to a type checker and imports each when it is first used: there these lines count.
    """
    names: set[str] = set()
    lazy = module == "__init__" and not top_level
    tree = read(module) if lazy else without_type_checking(read(module))
    for statement in import_statements(tree, top_level=top_level):
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        else:
            names |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    return names


@functools.cache
def ours(module: str) -> frozenset[str]:
    """The modules of Secateur that a module imports."""
    parts = [name.split(".") for name in imported_names(module) if name.split(".")[0] == "secateur"]
    return frozenset(next((name for n in (3, 2) if (name := ".".join(part[1:n])) in MODULES), "__init__") for part in parts)


def third_party(module: str, *, top_level: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imported_names(module, top_level=top_level)}


@functools.cache
def reached(module: str) -> frozenset[str]:
    """The module and all of ours that it imports, directly or through others."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += ours(current)
    return frozenset(seen)


def test_the_source_is_where_this_test_looks_for_it() -> None:
    assert {"__init__", "errors", "selection", "search.damage"} <= set(MODULES)
    assert "units" in ours("selection")
    assert "torch" in third_party("search.damage", top_level=True)


def test_the_rooms_import_from_each_other_exactly_as_the_table_says() -> None:
    used: dict[str, set[str]] = {room: set() for room in EDGES}
    for module in MODULES:
        used[room_of(module)] |= {room_of(other) for other in ours(module)} - {room_of(module)}
    assert used == EDGES


def test_what_is_plain_imports_of_the_search_only_the_policies() -> None:
    assert {other for module in PLAIN for other in ours(module) if other.startswith("search.")} == {"search.policies"}


def test_no_module_imports_itself_through_others() -> None:
    for module in MODULES:
        assert module not in {name for other in ours(module) for name in reached(other)}, module


@pytest.mark.parametrize("module", sorted(WITHOUT_TENSORS))
def test_what_is_plain_reaches_no_tensor_library(module: str) -> None:
    reaching = {via: found for via in reached(module) if (found := third_party(via) & TENSORS)}
    assert not reaching, f"{module} must work without tensors, but {reaching} are imported on the way"


@pytest.mark.parametrize("module", MODULES)
def test_optional_packages_are_imported_only_inside_the_function_that_needs_them(module: str) -> None:
    assert not third_party(module, top_level=True) & OPTIONAL


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_at_most_eight_files_and_says_what_it_is_for(folder: str) -> None:
    files = [path for path in (SOURCE / folder).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MOST_FILES
    assert ast.get_docstring(read(f"{folder}.__init__"))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_begins_with_a_sentence_about_itself(module: str) -> None:
    said = ast.get_docstring(read(module))
    assert said and said.splitlines()[0].rstrip().endswith((".", ":"))
