from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from secateur.errors import OutputError, StoreError
from secateur.experiment.store import PLANS, RECORDS, Store, read_store, sealed


def record(key: str, **fields: Any) -> dict[str, Any]:
    return {"key": key, "status": "done", **fields}


def filled(folder: Path, n: int = 3) -> Path:
    with Store(folder) as store:
        for i in range(n):
            store.append(record(f"run-{i}", loss=i / 3))
    return folder / RECORDS


def test_records_come_back_as_they_were_written_and_the_later_of_two_counts(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(record("a", loss=0.1, units=[{"kind": "head"}], bad=math.nan))
        store.append(record("b", loss=2))
        store.append(record("a", loss=0.3))
    records, plans = read_store(tmp_path)
    assert plans == []
    assert [(key, found["loss"]) for key, found in records.items()] == [("a", 0.3), ("b", 2)]
    lines = (tmp_path / RECORDS).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["key"] for line in lines] == ["a", "b", "a"]
    assert json.loads(lines[0])["bad"] == "nan"
    with Store(tmp_path) as again:
        assert again.records == records


def test_a_record_is_on_disk_before_the_store_is_closed(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(record("a"))
        assert list(read_store(tmp_path)[0]) == ["a"]


def test_wherever_the_file_was_torn_the_whole_lines_stay_and_the_next_record_follows_them(tmp_path: Path) -> None:
    whole = filled(tmp_path / "whole").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        folder = tmp_path / "torn"
        folder.mkdir(exist_ok=True)
        (folder / RECORDS).write_bytes(whole[:length])
        said: list[str] = []
        kept = [f"run-{i}" for i, end in enumerate(ends) if end <= length]
        assert list(read_store(folder)[0]) == kept
        with Store(folder, said.append) as store:
            assert list(store.records) == kept
            store.append(record("next"))
        assert list(read_store(folder)[0]) == [*kept, "next"]
        torn = length not in (0, *ends)
        assert bool(said) == torn
        assert not torn or "torn" in said[0]


def test_reading_a_torn_store_says_so_and_changes_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    before, said = path.read_bytes(), []  # type: ignore[var-annotated]
    assert list(read_store(tmp_path, said.append)[0]) == ["run-0", "run-1"]
    assert len(said) == 1 and "torn" in said[0]
    assert path.read_bytes() == before


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(record("a"))
        with pytest.raises(OutputError, match="Another grid is writing"):
            Store(tmp_path)
        assert list(read_store(tmp_path)[0]) == ["a"]
    with Store(tmp_path) as store:
        assert list(store.records) == ["a"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda line: line.replace(b"0.333", b"0.334"), "Line 2 .* was edited"),
        (lambda line: line.replace(b'"done"', b'"failed"'), "Line 2 .* was edited"),
        (lambda line: line.replace(b'"format": 1', b'"format": 7'), "Line 2 .* has format 7"),
        (lambda line: b"{", "Line 2 .* is not a record"),
        (lambda line: b"[]", "Line 2 .* is not a record"),
        (lambda line: b"", "Line 2 .* is not a record"),
        (lambda line: b'{"key": "a"}', "Line 2 .* is not a record"),
    ],
)
def test_a_line_that_is_not_what_was_written_is_named(tmp_path: Path, change: Any, complaint: str) -> None:
    path = filled(tmp_path)
    lines = path.read_bytes().splitlines()
    assert change(lines[1]) != lines[1]
    lines[1] = change(lines[1])
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    for read in (read_store, Store):
        with pytest.raises(StoreError, match=complaint):
            read(tmp_path)
    assert path.read_bytes() == before


def test_the_digest_is_of_everything_in_the_record() -> None:
    first = sealed(record("a", dense={"loss": 1.0}))
    assert sealed(first) == first
    for other in (
        record("b", dense={"loss": 1.0}),
        record("a", dense={"loss": 1.1}),
        record("a", dense={"loss": 1.0}, seed=None),
    ):
        assert sealed(other)["digest"] != first["digest"]


def test_a_full_disk_is_one_sentence_and_what_was_written_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Store(tmp_path) as store:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match=f"Cannot write {path}: No space left on device"):
            store.append(record("late"))
    monkeypatch.undo()
    assert list(read_store(tmp_path)[0])[:3] == ["run-0", "run-1", "run-2"]


def test_a_place_that_is_no_store_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"There is no store at .*secateur grid FILE"):
        read_store(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="Cannot write"):
        Store(tmp_path / "file")
    with pytest.raises(StoreError, match="Cannot read the store"):
        read_store(tmp_path / "file")


def test_plans_are_kept_by_name_and_replaced(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for tables in ([1], [2]):
            store.keep_plan({"grid": "b", "tables": tables})
        store.keep_plan({"grid": "a", "tables": [3]})
    _, plans = read_store(tmp_path)
    assert [(plan["grid"], plan["tables"]) for plan in plans] == [("a", [3]), ("b", [2])]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "is not a plan"), ("{}", "is not a plan"), ('{"format": 2, "grid": "a", "tables": []}', "format 2")],
)
def test_a_broken_plan_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    filled(tmp_path)
    (tmp_path / PLANS).mkdir()
    (tmp_path / PLANS / "a.json").write_text(text)
    with pytest.raises(StoreError, match=complaint):
        read_store(tmp_path)
