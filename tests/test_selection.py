from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import UNITS, FakeMeter, spread, written
from secateur.errors import SelectionError
from secateur.search.policies import UCB
from secateur.search.select import select
from secateur.selection import Reached, Selection, Source
from secateur.settings import Provenance, Settings
from secateur.units import MLP, Unit


def full_selection(damages: Mapping[Unit, float]) -> Selection:
    made = select(FakeMeter(damages), list(damages), policy=UCB(pool=36), ratio=0.1, pulls_per_step=40)
    return Selection(
        units=(*made.units, Unit(MLP, 2, 1, 16)),
        made_with=Provenance(Settings("gpt2-ü", ratio=0.1, keep_flops=0.8), "0123abcd", "cdef4567"),
        steps=made.steps,
        trace=made.trace,
        scores=spread(UNITS),
        versions={"secateur": "0.1.0"},
        calibration=Source("wikitext2", "train", (), ("a", "b")),
        goal=Reached("FLOPs", 0.8, 0.79),
    )


def test_a_selection_comes_back_from_its_file_equal_in_full(tmp_path: Path) -> None:
    selection = full_selection(spread(UNITS))
    selection.save(tmp_path / "new" / "selection.json")
    again = Selection.load(tmp_path / "new" / "selection.json")
    assert again == selection
    assert (again.pulls, again.forwards) == (selection.pulls, selection.forwards)


def test_non_finite_damages_and_scores_come_back_from_a_file_of_strict_json(tmp_path: Path) -> None:
    bad = dict(zip(UNITS[:3], [math.nan, math.inf, -math.inf], strict=True))
    made = full_selection(spread(UNITS) | bad)
    selection = replace(made, scores=made.scores | bad)
    assert {str(pull.damage) for pull in selection.trace} >= {"nan", "inf", "-inf"}
    selection.save(tmp_path / "selection.json")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    fields = json.loads((tmp_path / "selection.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert fields["nonfinite_pulls"] == selection.nonfinite_pulls > 0
    again = Selection.load(tmp_path / "selection.json")
    assert written(again) == written(selection)
    assert again.nonfinite_pulls == selection.nonfinite_pulls
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "selection.json").read_bytes()


def test_an_empty_selection_comes_back_from_its_file(tmp_path: Path) -> None:
    Selection(units=()).save(tmp_path / "selection.json")
    assert Selection.load(tmp_path / "selection.json") == Selection(units=())


def refused(path: Path) -> str:
    """The message with which a file is refused: one line that ends as a sentence and names the file."""
    with pytest.raises(SelectionError) as caught:
        Selection.load(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert str(path) in message
    return message


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe\x00", b'{"units": [', b"[]", b"{}", b"5", b"null", b'"units"'])
def test_a_file_that_is_no_selection_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    path.write_bytes(content)
    assert "is not a selection" in refused(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "selection.json")
    assert "Cannot read" in refused(tmp_path)


@pytest.mark.parametrize("name", ["format", "settings", "versions", "calibration", "units", "steps", "scores", "trace"])
def test_a_selection_that_lacks_a_field_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    full_selection(spread(UNITS)).save(path)
    fields = json.loads(path.read_text(encoding="utf-8"))
    del fields[name]
    path.write_text(json.dumps(fields))
    assert name in refused(path)


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_a_selection_of_another_format_is_refused_and_the_format_is_named(number: Any, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(full_selection(spread(UNITS)).to_json() | {"format": number}))
    assert f"format {number!r}" in refused(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("units",), 5),
        (("units",), None),
        (("units", 0), "head 0.1"),
        (("units", 0, "kind"), "neuron"),
        (("units", 0, "layer"), -1),
        (("units", 0, "layer"), math.inf),
        (("settings",), None),
        (("settings",), "none"),
        (("versions",), 3),
        (("settings", "model"), 3),
        (("settings", "ratio"), "little"),
        (("steps",), 3),
        (("steps", 0), {}),
        (("steps", 0, "unit", "kind"), "neuron"),
        (("steps", 0, "sure"), "very"),
        (("scores",), 3),
        (("scores", 0, "score"), "high"),
        (("scores", 0, "score"), None),
        (("scores", 0, "score"), [1.0]),
        (("scores", 0), None),
        (("scores", 0), {"kind": "head", "layer": 0, "index": 0}),
        (("trace",), 3),
        (("trace", 0), None),
        (("trace", 0), {}),
        (("trace", 0, "damage"), "much"),
        (("trace", 0, "batches"), 3),
        (("trace", 0, "batches", 0), math.inf),
        (("trace", 0, "unit", "layer"), "first"),
        (("trace", 0, "forwards"), math.inf),
        (("calibration",), 3),
        (("calibration", "rows"), 3),
        (("calibration", "name"), None),
        (("goal",), 3),
        (("goal", "got"), "enough"),
    ],
    ids=str,
)
def test_a_selection_with_a_damaged_field_is_refused(place: tuple[str | int, ...], value: Any, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    fields = json.loads(written(full_selection(spread(UNITS))))
    inner = fields
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(fields))
    with pytest.raises(SelectionError):
        Selection.load(path)


def test_a_file_with_a_damaged_unit_is_named_in_its_refusal(tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(Selection(units=()).to_json() | {"units": [{"kind": "head", "layer": -1, "index": 0}]}))
    message = refused(path)
    assert "unit" in message and "-1" in message


@pytest.mark.parametrize("goal", [Reached("FLOPs", 0.8, 0.79), Reached("latency", 0.8, 0.79, measured=0.81)])
def test_a_selection_keeps_its_goal_and_one_written_before_there_were_goals_has_none(goal: Reached, tmp_path: Path) -> None:
    Selection((UNITS[0],), goal=goal).save(tmp_path / "a.json")
    assert Selection.load(tmp_path / "a.json").goal == goal
    fields = json.loads((tmp_path / "a.json").read_text())
    assert {"what": goal.what, "asked": 0.8, "got": 0.79}.items() <= fields["goal"].items()
    del fields["goal"]
    (tmp_path / "a.json").write_text(json.dumps(fields))
    assert Selection.load(tmp_path / "a.json").goal is None


def test_a_selection_written_before_steps_said_how_sure_they_are_is_read(tmp_path: Path) -> None:
    selection = full_selection(spread(UNITS))
    assert all(step.sure is not None for step in selection.steps)
    selection.save(tmp_path / "a.json")
    fields = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    for step in fields["steps"]:
        del step["sure"]
    (tmp_path / "a.json").write_text(json.dumps(fields))
    assert Selection.load(tmp_path / "a.json").steps == tuple(replace(step, sure=None) for step in selection.steps)


def test_a_unit_that_is_in_a_selection_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    Selection((UNITS[0], UNITS[1], UNITS[0])).save(path)
    assert "twice" in refused(path)
