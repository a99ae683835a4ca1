"""The table of docs/cuts.md is what results/cuts.jsonl holds."""

from __future__ import annotations

from cuts import read_made, table

from worlds import ROOT


def test_the_table_of_what_each_part_is_worth_is_that_of_the_store() -> None:
    assert table() in (ROOT / "docs" / "cuts.md").read_text(encoding="utf-8")


def test_no_cut_is_counted_twice() -> None:
    keys = [(made.cut, made.variant, made.seed) for made in read_made()]
    assert keys and len(keys) == len(set(keys))
