from __future__ import annotations

import errno
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secateur.errors import OutputError
from secateur.files import jsonio
from secateur.units import HEAD, MLP, Unit


@dataclass(frozen=True)
class Place:
    row: int
    column: int = 7


@dataclass(frozen=True)
class Note:
    """A dataclass of dataclasses, as our records are."""

    text: str
    value: float
    place: Place
    others: tuple[Place, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    limit: float | None = None
    above: Note | None = None


NOTE = {"text": "a", "value": 1.5, "place": {"row": 1}}


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_non_finite_numbers_are_words_that_float_reads_back() -> None:
    words = strict(jsonio.dumps([math.nan, math.inf, -math.inf, 0.1, np.float64(math.nan)]))
    assert words == ["nan", "inf", "-inf", 0.1, "nan"]
    back = [float(word) for word in words]
    assert math.isnan(back[0])
    assert back[1:4] == [math.inf, -math.inf, 0.1]


def test_non_finite_numbers_are_found_at_any_depth_and_nothing_else_changes() -> None:
    value = {"a": [1, 2.5, "text", None, True, {"b": (math.inf, [math.nan])}], "c": {}, "d": "ü", "e": ""}
    assert strict(jsonio.dumps(value)) == {
        "a": [1, 2.5, "text", None, True, {"b": ["inf", ["nan"]]}],
        "c": {},
        "d": "ü",
        "e": "",
    }


def test_finite_floats_come_back_to_the_last_bit() -> None:
    numbers = [float(x) for x in np.random.default_rng(0).normal(size=200)] + [5e-324, 1.7976931348623157e308, -0.0]
    back = strict(jsonio.dumps(numbers))
    assert [x.hex() for x in back] == [x.hex() for x in numbers]


def test_text_is_written_with_its_folders_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.json"
    jsonio.write_text(path, "old ü\n")
    jsonio.write_text(path, "new\n")
    assert path.read_bytes() == b"new\n"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("before", ["old text", None], ids=["over an old file", "a new file"])
def test_a_write_that_fails_midway_leaves_the_place_as_it_was(
    call: str, before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    if before is not None:
        path.write_text(before)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match="No space left on device") as caught:
        jsonio.write_text(path, "new text")
    assert str(path) in str(caught.value)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == ({} if before is None else {"file.json": before})


def test_a_place_below_a_regular_file_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=re.escape(str(tmp_path / "file" / "selection.json"))):
        jsonio.write_text(tmp_path / "file" / "selection.json", "text")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_too_long_for_the_disk_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=re.escape(str(tmp_path / ("n" * 300)))):
        jsonio.write_text(tmp_path / ("n" * 300), "text")


def test_a_place_that_is_a_folder_is_an_output_error_and_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match=re.escape(str(tmp_path / "out"))):
        jsonio.write_text(tmp_path / "out", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_fingerprint_is_of_what_data_say_and_not_of_their_order() -> None:
    assert jsonio.fingerprint({"a": 1, "b": [1, 2]}) == jsonio.fingerprint({"b": (1, 2), "a": 1})
    assert (
        len({jsonio.fingerprint(data) for data in ({"a": 1}, {"a": 2}, {"b": 1}, [1], [2, 1], [1, 2], float("nan"), "é")}) == 8
    )


# Plain data as dataclasses


def test_nested_data_become_nested_dataclasses() -> None:
    fields = NOTE | {"others": [{"row": 2, "column": 3}, {"row": 4}], "weights": {"x": 1}, "above": NOTE}
    found = jsonio.decode(json.loads(jsonio.dumps(fields)), Note)
    above = Note("a", 1.5, Place(1, 7))
    assert found == Note("a", 1.5, Place(1, 7), (Place(2, 3), Place(4, 7)), {"x": 1.0}, None, above)


def test_numbers_that_are_not_finite_come_back_at_any_depth() -> None:
    numbers = {"value": math.nan, "limit": math.inf, "weights": {"x": -math.inf, "y": math.nan, "z": 0.5}}
    found = jsonio.decode(strict(jsonio.dumps(NOTE | numbers)), Note)
    assert math.isnan(found.value) and math.isnan(found.weights["y"])
    assert (found.limit, found.weights["x"], found.weights["z"]) == (math.inf, -math.inf, 0.5)


def test_names_that_a_dataclass_does_not_have_are_passed_over() -> None:
    assert jsonio.decode(NOTE | {"colour": "red"}, Note) == jsonio.decode(NOTE, Note)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"value": "many"}, "value"),
        ({"value": None}, "value"),
        ({"value": [1.5]}, "value"),
        ({"text": 3}, "text"),
        ({"place": 3}, "place"),
        ({"place": {"row": "first"}}, r"place\.row"),
        ({"place": {"row": 1.5}}, r"place\.row"),
        ({"place": {"row": "nan"}}, r"place\.row"),
        ({"place": {"row": True}}, r"place\.row"),
        ({"others": {"row": 1}}, "others"),
        ({"others": [{"row": 1}, {"row": 1}, {"row": []}]}, r"others\[2\]\.row"),
        ({"weights": {"x": "heavy"}}, "weights"),
        ({"above": NOTE | {"place": {"row": None}}}, r"above\.place\.row"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_a_value_error_that_names_its_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=rf"{place}\b") as caught:
        jsonio.decode(NOTE | fields, Note)
    assert "\n" not in str(caught.value) and "$" not in str(caught.value)


@pytest.mark.parametrize("missing", NOTE)
def test_a_missing_field_is_a_value_error_that_names_it(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        jsonio.decode({name: value for name, value in NOTE.items() if name != missing}, Note)
    with pytest.raises(ValueError, match=f"{missing}.*above"):
        jsonio.decode(NOTE | {"above": {name: value for name, value in NOTE.items() if name != missing}}, Note)


@pytest.mark.parametrize("fields", [None, 5, "text", [], [NOTE], True, {}], ids=str)
def test_data_that_are_no_fields_are_a_value_error(fields: Any) -> None:
    with pytest.raises(ValueError):
        jsonio.decode(fields, Note)


def test_what_a_dataclass_itself_refuses_is_a_value_error() -> None:
    assert jsonio.decode([{"kind": HEAD, "layer": 0, "index": 3}], tuple[Unit, ...]) == (Unit(HEAD, 0, 3),)
    for fields in ({"kind": "neuron", "layer": 0, "index": 1}, {"kind": MLP, "layer": -1, "index": 1}):
        with pytest.raises(ValueError, match=r"neuron|-1"):
            jsonio.decode([fields], tuple[Unit, ...])


def test_data_nested_too_deeply_are_a_value_error() -> None:
    fields: dict[str, Any] = NOTE
    for _ in range(100_000):
        fields = NOTE | {"above": fields}
    with pytest.raises(ValueError, match="deep"):
        jsonio.decode(fields, Note)


# Reading


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    jsonio.write(tmp_path / "file.json", {"a": [1, math.inf, "ü"]})
    assert jsonio.read(tmp_path / "file.json") == {"a": [1, "inf", "ü"]}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b'{"a": 1} more', b"[" * 100_000, b'"\\ud800"'],
    ids=lambda content: content[:9],
)
def test_a_file_that_is_no_json_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError):
        jsonio.read(tmp_path / "file.json")


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        jsonio.read(tmp_path / "file.json")
