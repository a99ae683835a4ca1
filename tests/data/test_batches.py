from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from secateur.data.batches import Batches, check_apart, check_counts, digest, digest_file
from secateur.errors import DataError, SettingError
from secateur.files import jsonio
from secateur.selection import Source
from worlds import one_sentence

CALIBRATION = Source("a/", "train", ("file 1",), ("row 1", "row 2", "row 3"))


def test_batches_are_a_sequence_that_remembers_its_source() -> None:
    items = [{"labels": torch.tensor([i])} for i in range(4)]
    batches = Batches(items, CALIBRATION)
    assert len(batches) == 4 and batches.source is CALIBRATION
    assert list(batches) == items and batches[1] is items[1] and batches[-1] is items[3]
    assert batches[1:3] == items[1:3]


# Calibration and evaluation apart


def test_data_that_share_neither_file_nor_row_may_calibrate_and_evaluate() -> None:
    check_apart(CALIBRATION, Source("a/", "test", ("file 2",), ("row 4", "row 5")))
    check_apart(CALIBRATION, Source("b/", "train", (), ("row 4",)))


def test_data_cannot_judge_what_they_chose_and_the_sentence_says_how_to_give_others() -> None:
    with pytest.raises(DataError) as caught:
        check_apart(CALIBRATION, CALIBRATION)
    assert "--data" in one_sentence(caught, "a/")


@pytest.mark.parametrize("name", ["a/", "b/"])
def test_a_shared_file_is_refused_whatever_its_name_and_even_where_no_row_is_shared(name: str) -> None:
    with pytest.raises(DataError) as caught:
        check_apart(CALIBRATION, Source(name, "test", ("file 0", "file 1"), ("row 4", "row 5")))
    one_sentence(caught, name)


@pytest.mark.parametrize("name", ["a/", "b/"])
def test_a_single_shared_row_is_refused_and_counted(name: str) -> None:
    with pytest.raises(DataError, match=r"\b1\b.*\b4\b") as caught:
        check_apart(CALIBRATION, Source(name, "test", ("file 2",), ("row 9", "row 8", "row 3", "row 7")))
    one_sentence(caught, repr(name), "test", "'a/'")


def test_the_same_rows_under_another_name_are_refused_and_both_names_are_said() -> None:
    with pytest.raises(DataError, match=r"\b2\b.*\b2\b") as caught:
        check_apart(CALIBRATION, Source("b/", "test", (), ("row 2", "row 1")))
    one_sentence(caught, "'a/'", "'b/'")


def test_a_source_comes_back_from_json_and_is_still_noticed() -> None:
    again = jsonio.decode(json.loads(json.dumps(CALIBRATION.to_json())), Source)
    assert again == CALIBRATION and again.digest == CALIBRATION.digest
    with pytest.raises(DataError):
        check_apart(again, CALIBRATION)


def test_the_digest_of_a_source_is_that_of_its_rows_in_their_order() -> None:
    rows = [("a", "b"), ("b", "a"), ("a",), ("ab",), ()]
    assert len({Source("name", "train", (), some).digest for some in rows}) == 5
    assert Source("name", "train", (), ("a", "b")).digest == Source("other", "test", ("file",), ("a", "b")).digest


# Counts


@pytest.mark.parametrize(
    ("limit", "batch_size", "says"),
    [(0, 1, r"number of texts.* 0\b"), (-3, 1, r"number of texts.* -3\b"), (1, 0, r"batch size.* 0\b"), (None, -1, "-1")],
)
def test_counts_below_one_are_refused(limit: int | None, batch_size: int, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        check_counts(limit, batch_size)


@pytest.mark.parametrize("limit", [None, 1, 1000])
def test_counts_of_at_least_one_or_no_limit_are_taken(limit: int | None) -> None:
    check_counts(limit, 1)


# Digests


def test_a_file_has_the_digest_of_its_content(tmp_path: Path) -> None:
    contents = {"a.txt": b"the cat", "b.txt": b"the cat", "c.txt": b"the mat", "d.txt": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert {name: digest_file(tmp_path / name) for name in contents} == {
        name: digest(content) for name, content in contents.items()
    }
    assert len({digest(content) for content in contents.values()}) == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError) as caught:
            digest_file(path)
        one_sentence(caught, path)
