"""The results that the project shows are what its stores say."""

from __future__ import annotations

from pathlib import Path

import pytest

from secateur.experiment.results import read_tables
from secateur.experiment.store import RECORDS
from secateur.experiment.tables import FORMS, markdown, render

ROOT = Path(__file__).parents[1]
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
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    shown = [line for line in page if line.startswith("|")]
    assert shown and set(shown) <= rows
