"""The tables of the study on the pages, and what docs/search.md says of them in words, are what its stores hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_tables import OURS, PAGES, STORES, filled, of_search, passes_of, tables

from secateur.experiment.compare import compare, excludes_zero
from secateur.experiment.store import Cell, Table, read_tables
from secateur.methods import label

DEIT, SMOLLM2 = map(read_tables, STORES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_the_study_are_those_of_its_stores(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == filled(text), "run scripts/search_tables.py"


def test_every_table_has_a_place() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in tables() if f"<!-- {name} -->" not in text] == []


def test_no_run_of_the_study_is_missing_or_failed() -> None:
    cells = [cell for read in (DEIT, SMOLLM2) for table in read for cell in table.cells]
    assert all(len(cell.valid(method)) == len(runs) for cell in cells for method, runs in cell.runs.items())


class Place:
    """The figures of one model, target and ratio."""

    def __init__(self, read: list[Table], target: str, ratio: float) -> None:
        self._cells = [cell for table in read for cell in table.cells if (cell.target, cell.ratio) == (target, ratio)]
        self._searches = [cell for table in of_search(read) for cell in table.cells if cell in self._cells]
        self.rivals = list(dict.fromkeys(m for cell in self._searches for m in cell.runs if m != OURS))
        family = compare(of_search(read), methods=[OURS])
        self._tests = [c for c in family if (c.cell.target, c.cell.ratio) == (target, ratio)]

    def _cell(self, method: str, budget: str | None = None) -> Cell:
        cells = [cell for cell in self._cells if cell.vary == {"budget": budget}] if budget else self._searches
        return max((cell for cell in cells if method in cell.runs), key=lambda cell: len(cell.valid(method)))

    def mean(self, method: str, name: str, budget: str | None = None) -> float:
        spread = self._cell(method, budget).spread(method, name)
        assert spread
        return spread.mean

    def passes(self, method: str, budget: str | None = None) -> str:
        return f"{passes_of(list(self._cell(method, budget).valid(method).values())):.0f} passes"

    def cost(self, method: str, budget: str | None = None) -> str:
        """The change of the perplexity, or the loss, as the page writes it."""
        if self._searches[0].task == "text":
            return f"{self.mean(method, 'ppl_change_percent', budget):+,.1f}%"
        return f"{self.mean(method, 'delta_loss', budget):+.3f}"

    def to_ucb(self, name: str) -> str:
        return f"{self.mean(OURS, name) / self.mean('ucb', name):.0%}"

    @property
    def next_best(self) -> str:
        return min(self.rivals, key=lambda method: self.mean(method, "delta_loss"))

    def told_apart(self) -> str:
        """In how many comparisons the interval over evaluation batches leaves out zero, and `auto` is ahead."""
        ahead = [c for c in self._tests if excludes_zero(c.batch_interval) and c.batch_mean < 0]
        return f"{len(ahead)} of {len(self._tests)}"


def claims() -> list[str]:
    heads, groups, fewer = Place(SMOLLM2, "head", 0.1), Place(SMOLLM2, "mlp", 0.2), Place(SMOLLM2, "mlp", 0.1)
    images, channels = Place(DEIT, "head", 0.1), Place(DEIT, "mlp", 0.2)
    few, fewest = "30forwards", "18forwards"
    second, third, fourth, fifth = (place.next_best for place in (heads, groups, images, channels))
    return [
        f"**Without a tenth of SmolLM2-135M's heads** the perplexity changes by {heads.cost(OURS)} at {heads.passes(OURS)}. "
        f"The next best is {label(second)} with {heads.cost(second)} at {heads.passes(second)}, and UCB has "
        f"{heads.cost('ucb')} at {heads.passes('ucb')}; at {heads.passes(OURS, fewest)} `auto` has {heads.cost(OURS, fewest)}.",
        f"**Without a fifth of its MLP groups** it changes by {groups.cost(OURS)}, and the next best is {label(third)} with "
        f"{groups.cost(third)}; at {groups.passes(OURS, few)} it is {groups.cost(OURS, few)}, where UCB has "
        f"{groups.cost('ucb')} at {groups.passes('ucb')}. Without a tenth of them it is {fewer.cost(OURS)}, and Fisher has "
        f"{fewer.cost('fisher')}.",
        f"**Without four of DeiT-Tiny's heads** the loss rises by {images.cost(OURS)}, {images.to_ucb('delta_loss')} of UCB's "
        f"{images.cost('ucb')} at as many passes, and top-1 falls by {images.to_ucb('delta_top1')} of UCB's drop; at "
        f"{images.passes(OURS, few)}, a tenth, the loss rises by {images.cost(OURS, few)}. {label(fourth)}, with "
        f"{images.passes(fourth)} and one seed, has {images.cost(fourth)}.",
        f"**Without a fifth of its MLP groups** the loss changes by {channels.cost(OURS)}, and the next best is {label(fifth)} "
        f"with {channels.cost(fifth)}.",
        f"in {heads.told_apart()}, {groups.told_apart()} and {fewer.told_apart()} comparisons on SmolLM2-135M, and in "
        f"{images.told_apart()} and {channels.told_apart()} on DeiT-Tiny",
    ]


def test_the_page_of_the_search_says_in_words_what_the_stores_hold() -> None:
    text = " ".join(PAGES[0].read_text(encoding="utf-8").split())
    assert [claim for claim in claims() if claim not in text] == []
