"""What a notebook shows, and the notebook in examples/."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import secateur as sc
from runs import make_selection
from stores import make_judgement
from worlds import ROOT, SEQ_LEN, World

NOTEBOOK = ROOT / "examples" / "prune.ipynb"


def executed(cells: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """The names that the cells leave, and the value of each cell's last line."""
    names: dict[str, Any] = {}
    values = []
    for source in cells:
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        values.append(eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last else None)  # type: ignore[attr-defined]
    return names, values


def test_the_notebook_in_examples_runs(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"MODEL": world.text_model, "TEXT": world.text, "OUT": tmp_path / "out", "SEQ_LEN": SEQ_LEN}
    for name, value in places.items():
        monkeypatch.setenv(f"SECATEUR_{name}", str(value))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    names, values = executed(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"])
    result = names["result"]
    shown = [value._repr_html_() for value in values[1:4]]
    assert all(html.startswith('<div class="secateur">') for html in shown)
    assert shown[0].count('class="cell') == shown[1].count('class="cell') == 9
    assert "Proved: " in shown[0] and "Damage of each measurement" in shown[2]
    assert len(names["frame"]) == 9 and names["frame"]["order"].notna().sum() == len(result.selection.units)
    assert values[-1] == tmp_path / "out" / "report.html" and values[-1].exists()


def test_a_judgement_is_a_table_and_a_frame() -> None:
    judgement = make_judgement()
    assert "<table" in judgement._repr_html_() and list(judgement.to_frame()["figure"]) == ["loss"]


def test_without_pandas_a_frame_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(sc.MissingExtra, match=r"pandas.*notebook"):
        make_selection().to_frame()


def test_a_picture_holds_no_script() -> None:
    assert "<script" not in sc.map_of(make_selection()).html + sc.curves_of(make_selection()).html
