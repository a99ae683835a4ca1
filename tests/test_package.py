"""The front door of the package: public names come when they are used, and are never mistaken for modules of the same name."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import secateur as sc

HEAVY = ("torch", "transformers", "pandas", "matplotlib")


def told(code: str) -> str:
    """What a fresh process prints."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def imported_for_type_checkers() -> dict[str, str]:
    """The public names that the file shows to a type checker, and their modules."""
    tree = ast.parse(Path(sc.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    lines = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in lines for alias in line.names}


def test_type_checkers_users_and_the_table_of_homes_know_the_same_names() -> None:
    assert imported_for_type_checkers() == sc._HOME
    assert sorted(sc.__all__) == sorted(imported_for_type_checkers())
    assert set(sc.__all__) <= set(dir(sc))


@pytest.mark.parametrize("name", sc.__all__)
def test_a_public_name_is_what_its_module_has_and_no_module(name: str) -> None:
    home = importlib.import_module(imported_for_type_checkers()[name])
    assert getattr(sc, name) is getattr(home, name)
    assert not inspect.ismodule(getattr(sc, name))


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'secateur'.*'prun'"):
        sc.prun  # type: ignore[attr-defined] # noqa: B018


def test_the_package_and_its_plain_names_come_without_tensors() -> None:
    light = "sc.SecateurError, sc.Settings, sc.Unit, sc.Selection, sc.METHODS, sc.UCB, sc.Watcher"
    assert told(f"import sys, secateur as sc; {light}; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


ORDERS = {
    "the functions first": "import secateur as sc; sc.prune, sc.cut, sc.measure; import secateur.cut, secateur.measure.speed",
    "the modules first": "import secateur.prune, secateur.cut, secateur.measure; import secateur as sc",
    "names of the modules": "from secateur.cut.proof import prove; from secateur.measure.speed import Measurement",
    "the module prune": "from secateur.prune import PruneResult, prune",
    "from the package": "from secateur import cut, measure, prune; assert measure.__module__ == 'secateur.measure.speed'",
    "all names": "from secateur import *; assert callable(cut) and callable(prune)",
    "other names": "import secateur as sc; sc.prove, sc.Measurement, sc.PruneResult; from secateur.cut import costs",
}


@pytest.mark.parametrize(
    "order", [order if i < 2 else pytest.param(order, marks=pytest.mark.slow) for i, order in enumerate(ORDERS)]
)
def test_a_function_that_is_named_like_a_module_is_the_function_in_any_order_of_imports(order: str) -> None:
    kinds = "print(*(f'{type(it).__name__} {it.__name__}' for it in (sc.prune, sc.cut, sc.measure)), sep=', ')"
    assert told(f"{ORDERS[order]}\nimport secateur as sc\n{kinds}") == "function prune, function cut, function measure"
