from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from secateur.errors import OutputError, StoreError
from secateur.experiment import figures
from secateur.experiment.store import (
    FAILED,
    PLANS,
    RECORDS,
    Plan,
    PlannedCell,
    PlannedTable,
    Store,
    read_store,
    read_tables,
    sealed,
)
from secateur.experiment.tables import FORMS, markdown, render
from secateur.files import jsonio
from stores import judged, make_record, with_perplexity
from worlds import ROOT


def filled(folder: Path, n: int = 3) -> Path:
    with Store(folder) as store:
        for i in range(n):
            store.append(make_record(f"run-{i}", selection_seconds=i / 3))
    return folder / RECORDS


def test_records_come_back_as_they_were_written_and_the_later_of_two_counts(tmp_path: Path) -> None:
    first = judged(make_record("a"), zeroed={"loss": math.nan, "batch_losses": (1.0, math.inf)})
    other, later = with_perplexity(make_record("b", seed=None), 12.5), make_record("a", evaluation_seconds=0.3)
    with Store(tmp_path) as store:
        for record in (first, other, later):
            store.append(record)
    records, plans = read_store(tmp_path)
    assert plans == []
    assert list(records.items()) == [("a", later), ("b", other)]
    lines = (tmp_path / RECORDS).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["key"] for line in lines] == ["a", "b", "a"]
    assert json.loads(lines[0])["pruned"]["loss"] == "nan"
    with Store(tmp_path) as again:
        assert again.records == records


def test_the_cost_in_passes_comes_back_and_older_records_have_none(tmp_path: Path) -> None:
    counted = make_record("a", passes=12.5, pass_flops=2e9, progress=((3.25, 0.01), (12.5, math.nan)))
    with Store(tmp_path) as store:
        for record in (counted, make_record("b")):
            store.append(record)
    found = read_store(tmp_path)[0]
    assert (found["a"].flops, found["a"].progress[0]) == (2.5e10, (3.25, 0.01))
    assert math.isnan(found["a"].progress[1][1])
    assert found["b"].flops is None and found["b"].progress == ()
    assert not {"passes", "pass_flops", "progress"} & set(make_record("b").to_json())


def test_what_is_not_finite_comes_back_as_it_was(tmp_path: Path) -> None:
    losses = {"loss": math.nan, "batch_losses": (1.0, math.inf), "perplexity": math.nan}
    with Store(tmp_path) as store:
        store.append(judged(make_record("a"), zeroed=losses))
    found = read_store(tmp_path)[0]["a"].judgement
    assert found and math.isnan(found.zeroed.loss) and found.zeroed.perplexity is not None
    assert math.isnan(found.zeroed.perplexity) and found.zeroed.batch_losses == (1.0, math.inf)
    assert found.zeroed.nonfinite_batches == 1


def test_a_run_that_raised_has_a_reason_and_no_figures(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(make_record("a", status=FAILED, reason="the lamp went out", judgement=None))
    found = read_store(tmp_path)[0]["a"]
    assert (found.status, found.reason, found.judgement) == (FAILED, "the lamp went out", None)
    with pytest.raises(StoreError, match=r"the lamp went out.*zeroed.loss"):
        found.figure("zeroed.loss")


def test_a_figure_is_found_by_its_name() -> None:
    record = judged(with_perplexity(make_record("a"), 12.5, 90.0), dense={"loss": 1.5}, pulls=32)
    names = ("dense.loss", "zeroed.loss", "delta_loss", "zeroed.perplexity", "pulls", "selection_seconds", "unit_ratio")
    assert [record.figure(name) for name in names] == pytest.approx([1.5, 2.0, 0.5, 90.0, 32, 1.0, 1 / 9])
    assert record.figure("ppl_change_percent") == pytest.approx(12.5)


def test_a_record_is_on_disk_before_the_store_is_closed(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(make_record("a"))
        assert list(read_store(tmp_path)[0]) == ["a"]


def test_wherever_the_file_was_torn_the_whole_lines_stay_and_the_next_record_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power is lost here, and it takes long so many times
    with Store(tmp_path / "whole") as store:
        for i in range(2):
            store.append(make_record(f"run-{i}", status=FAILED, reason="x", judgement=None))  # the shortest there are
    whole = (tmp_path / "whole" / RECORDS).read_bytes()
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
            store.append(make_record("next"))
        assert list(read_store(folder)[0]) == [*kept, "next"]
        torn = length not in (0, *ends)
        assert bool(said) == torn
        assert not torn or "torn" in said[0]


def test_reading_a_torn_store_says_so_and_changes_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    before = path.read_bytes()
    said: list[str] = []
    assert list(read_store(tmp_path, said.append)[0]) == ["run-0", "run-1"]
    assert len(said) == 1 and "torn" in said[0]
    assert path.read_bytes() == before


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(make_record("a"))
        with pytest.raises(OutputError, match=r"grid.*writing") as caught:
            Store(tmp_path)
        assert str(tmp_path) in str(caught.value)
        assert list(read_store(tmp_path)[0]) == ["a"]
    with Store(tmp_path) as store:
        assert list(store.records) == ["a"]


def without_settings(line: bytes) -> bytes:
    """A line with a digest that is right, and yet no record."""
    return jsonio.dumps(sealed({name: value for name, value in json.loads(line).items() if name != "settings"})).encode()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda line: line.replace(b"0.333", b"0.334"), "Line 2.*edited"),
        (lambda line: line.replace(b'"done"', b'"failed"'), "Line 2.*edited"),
        (lambda line: line.replace(b'"format": 1', b'"format": 7'), "Line 2.*format 7"),
        (lambda line: b"{", "Line 2.*not a record"),
        (lambda line: b"[]", "Line 2.*not a record"),
        (lambda line: b"", "Line 2.*not a record"),
        (lambda line: b'{"key": "a"}', "Line 2.*not a record"),
        (without_settings, "Line 2.*not a record"),
    ],
)
def test_a_line_that_is_not_what_was_written_is_named(tmp_path: Path, change: Callable[[bytes], bytes], complaint: str) -> None:
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
    record = judged(make_record("a"), dense={"loss": 1.0})
    first = sealed(record.to_json())
    assert sealed(first) == first
    for other in (replace(record, key="b"), judged(record, dense={"loss": 1.1}), replace(record, seed=None)):
        assert sealed(other.to_json())["digest"] != first["digest"]
    assert sealed(record.to_json() | {"more": 1})["digest"] != first["digest"]


def test_a_full_disk_is_one_sentence_and_what_was_written_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Store(tmp_path) as store, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match=f"{path}.*No space left on device"):
            store.append(make_record("late"))
    assert list(read_store(tmp_path)[0])[:3] == ["run-0", "run-1", "run-2"]


def test_a_place_that_is_no_store_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no store.*nowhere.*secateur grid"):
        read_store(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"write.*file"):
        Store(tmp_path / "file")
    with pytest.raises(StoreError, match=r"read.*file"):
        read_store(tmp_path / "file")


# Plans and tables


def planned(number: str) -> PlannedTable:
    return PlannedTable(number, "text", ())


def test_plans_are_kept_by_name_and_replaced(tmp_path: Path) -> None:
    filled(tmp_path)
    with Store(tmp_path) as store:
        for number in ("4", "6"):
            store.keep_plan(Plan("b", (planned(number),)))
        store.keep_plan(Plan("a", (planned("7"),)))
    assert read_store(tmp_path)[1] == [Plan("a", (planned("7"),)), Plan("b", (planned("6"),))]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "plan"), ("{}", "plan"), ('{"format": 2, "grid": "a", "tables": []}', "format 2")],
)
def test_a_broken_plan_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = filled(tmp_path).parent / PLANS / "a.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(StoreError, match=complaint) as caught:
        read_store(tmp_path)
    assert str(path) in str(caught.value)


def test_records_of_two_bases_are_not_compared(tmp_path: Path) -> None:
    cell = PlannedCell("d", "m", "head", 0.1, {}, {"ucb": {"1": "a"}, "greedy": {"1": "b"}})
    with Store(tmp_path) as store:
        store.keep_plan(Plan("g", (PlannedTable("4", "text", (cell,)),)))
        store.append(make_record("a"))
        store.append(make_record("b"))
        assert read_tables(tmp_path)
        for other in ({"model_digest": "another"}, {"data_digest": "another"}):
            store.append(make_record("b", **other))
            with pytest.raises(StoreError, match="weights or data"):
                read_tables(tmp_path)


def test_a_store_without_a_plan_has_no_tables(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(StoreError, match="plan"):
        read_tables(tmp_path)


# The results that the project shows are what its stores say

STORES = sorted(path.parent for path in (ROOT / "results").glob(f"*/{RECORDS}"))


def test_there_are_results() -> None:
    assert {"deit", "smollm2"} <= {store.name for store in STORES}


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
def test_the_tables_beside_a_store_are_those_of_its_records(store: Path) -> None:
    rendered = render(read_tables(store), beside_paper=True)
    expected = {f"{table.name}.{suffix}": form(table) for table in rendered for suffix, form in FORMS.items()}
    found = {path.name: path.read_text(encoding="utf-8") for path in (store / "tables").iterdir()}
    assert found == expected


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
def test_the_figures_beside_a_store_are_those_that_its_records_have(store: Path) -> None:
    names = [name for name, _ in figures._figures(read_tables(store))]
    expected = {f"{name}.{form}" for name in names for form in figures.FORMATS}
    assert {path.name for path in (store / "figures").iterdir()} == expected


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
def test_every_planned_run_has_its_record(store: Path) -> None:
    for table in read_tables(store):
        for cell in table.cells:
            assert all(record for runs in cell.runs.values() for record in runs.values()), str(cell)


def test_the_rows_on_the_page_of_results_are_those_of_the_tables() -> None:
    rows = {
        line
        for store in STORES
        for table in render(read_tables(store), beside_paper=True)
        for line in markdown(table).splitlines()
    }
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    page = text.partition("## In short")[2].partition("\n## ")[2].splitlines()  # test_results.py is about what comes before
    shown = [line for line in page if line.startswith("|")]
    assert shown and set(shown) <= rows
