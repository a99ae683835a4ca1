"""Holds the table of who may import whom, by reading the import lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "secateur"
MODULES = sorted(".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py"))

CORE = {"errors", "units", "streams", "jsonio", "lines", "journal", "policies", "selection"}
MODEL = {
    "families",
    "zeroing",
    "accounting",
    "losses",
    "prefixes",
    "lanes",
    "damage",
    "scores",
    "models",
    "shrunk",
    "surgery",
    "flops",
    "recovery",
}

STUDY = {
    f"experiment.{name}" for name in ("compare", "figures", "grid", "paper", "results", "stats", "store", "tables", "workers")
}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "streams": {"errors"},
    "jsonio": {"errors"},
    "policies": {"errors"},
    "lines": {"errors", "jsonio"},
    "journal": {"errors", "jsonio", "lines"},
    "selection": {"errors", "units", "policies", "journal", "jsonio", "streams"},
    "families": {"errors", "units"},
    "zeroing": {"errors", "units", "families"},
    "accounting": {"errors", "units", "families"},
    "losses": set(),
    "flops": set(),
    "prefixes": {"units", "families", "losses"},
    "damage": {"errors", "units", "families", "zeroing", "losses", "prefixes", "lanes", "streams"},
    "lanes": {"units", "families", "losses", "zeroing"},
    "scores": {"errors", "units", "families", "zeroing", "losses", "streams"},
    "models": {"errors", "families", "shrunk"},
    "shrunk": set(),
    "surgery": {"errors", "units", "families", "zeroing", "losses", "shrunk"},
    "recovery": {"errors", "units", "families", "losses", "surgery"},
    "data": {"errors", "families", "losses", "models", "streams", "units"},
    "evaluate": {"errors", "losses", "units", "zeroing", "data", "accounting"},
    "measure": {"errors", "families", "flops", "jsonio", "losses", "models"},
    "targets": {"errors", "jsonio", "units", "families", "flops", "accounting", "losses", "measure", "selection", "surgery"},
    "bench": CORE | MODEL | {"measure"},
    "watcher": {"selection"},
    "card": set(),
    "checkpoint": {"errors", "jsonio", "models", "surgery"},
    "cut": CORE | MODEL | {"card", "checkpoint", "data", "evaluate", "measure", "watcher"},
    "prune": CORE | MODEL | {"checkpoint", "cut", "data", "evaluate", "targets", "watcher"},
    "experiment.__init__": set(),
    "experiment.store": {"errors", "jsonio", "lines"},
    "experiment.stats": {"errors"},
    "experiment.paper": set(),
    "experiment.results": {"errors", "experiment.store"},
    "experiment.compare": {"errors", "experiment.results", "experiment.stats"},
    "experiment.tables": {"experiment.compare", "experiment.paper", "experiment.results"},
    "experiment.figures": {"errors", "jsonio", "experiment.results"},
    "experiment.work": CORE | MODEL | {"data", "evaluate", "prune", "experiment.store"},
    "experiment.workers": {"errors"},
    "experiment.grid": CORE
    | {"prune", "scores", "watcher", "experiment.results", "experiment.store", "experiment.work", "experiment.workers"},
    "experiment.commands": STUDY | {"card", "errors", "jsonio", "options", "screen"},
    "screen": {"card", "selection", "watcher"},
    "options": {"cut", "errors", "models", "prune", "units"},
    "cli": CORE
    | MODEL
    | {
        "bench",
        "card",
        "checkpoint",
        "cut",
        "measure",
        "data",
        "evaluate",
        "prune",
        "watcher",
        "experiment.commands",
        "options",
        "screen",
        "__init__",
    },
    "__init__": CORE | MODEL | {"checkpoint", "cut", "data", "evaluate", "measure", "prune"},
}
TENSORS = {"torch", "torchvision", "transformers", "safetensors", "timm"}
OPTIONAL = {"timm", "datasets", "pyarrow", "gguf", "matplotlib", "ray", "scipy"}


def import_statements(tree: ast.AST, *, top_level: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import lines below a node; `top_level` leaves out those inside functions, which run only when called."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from import_statements(node, top_level=top_level)


def imported_names(module: str, *, top_level: bool = False) -> set[str]:
    """Dotted names that a module imports; `from a import b` counts as `a.b`."""
    tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    names: set[str] = set()
    for statement in import_statements(tree, top_level=top_level):
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        else:
            package = ".".join(filter(None, ["secateur" if statement.level else None, statement.module]))
            names |= {f"{package}.{alias.name}" for alias in statement.names}
    return names


def ours(module: str) -> set[str]:
    """The modules of Secateur that a module imports; a bare `secateur`, or a name re-exported by it, is `__init__`."""
    parts = [name.split(".") for name in imported_names(module) if name.split(".")[0] == "secateur"]
    return {next((name for n in (3, 2) if (name := ".".join(part[1:n])) in MODULES), "__init__") for part in parts}


def third_party(module: str, *, top_level: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imported_names(module, top_level=top_level)}


def reached(module: str) -> set[str]:
    """The module and all of ours that it imports, directly or through others."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += ours(current)
    return seen


def test_the_source_is_where_this_test_looks_for_it() -> None:
    assert {"__init__", "errors", "selection", "damage"} <= set(MODULES)
    assert "units" in ours("selection")
    assert "torch" in third_party("damage", top_level=True)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_those_that_the_table_allows(module: str) -> None:
    assert module in ALLOWED, f"{module}.py is new: write in ALLOWED of {Path(__file__).name} which modules it may import"
    forbidden = ours(module) - ALLOWED[module]
    assert not forbidden, f"{module}.py imports {sorted(forbidden)}; the table allows it {sorted(ALLOWED[module])}"


@pytest.mark.parametrize("module", sorted(CORE | STUDY - {"experiment.grid"}))
def test_the_pure_core_reaches_no_tensor_library(module: str) -> None:
    reaching = {via: found for via in reached(module) if (found := third_party(via) & TENSORS)}
    assert not reaching, f"{module} must work without tensors, but {reaching} are imported on the way"


@pytest.mark.parametrize("module", MODULES)
def test_optional_packages_are_imported_only_inside_the_function_that_needs_them(module: str) -> None:
    assert not third_party(module, top_level=True) & OPTIONAL


def test_the_table_itself_has_no_circle() -> None:
    def below(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"the table allows a circle: {' -> '.join([*path, module])}"
        for allowed in ALLOWED[module]:
            below(allowed, (*path, module))

    for module in ALLOWED:
        below(module, ())
