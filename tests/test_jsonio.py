from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secateur import jsonio
from secateur.errors import OutputError


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
    with pytest.raises(OutputError, match="Cannot write"):
        jsonio.write_text(tmp_path / "file" / "selection.json", "text")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_too_long_for_the_disk_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="Cannot write"):
        jsonio.write_text(tmp_path / ("n" * 300), "text")


def test_a_place_that_is_a_folder_is_an_output_error_and_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="Cannot write"):
        jsonio.write_text(tmp_path / "out", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_fingerprint_is_of_what_data_say_and_not_of_their_order() -> None:
    assert jsonio.fingerprint({"a": 1, "b": [1, 2]}) == jsonio.fingerprint({"b": (1, 2), "a": 1})
    assert (
        len({jsonio.fingerprint(data) for data in ({"a": 1}, {"a": 2}, {"b": 1}, [1], [2, 1], [1, 2], float("nan"), "é")}) == 8
    )
