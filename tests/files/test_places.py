from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secateur.errors import OutputError
from secateur.files import jsonio
from secateur.files.places import check_file, check_folder, check_record_file, only_writer
from worlds import contents, one_sentence

RECORD: dict[str, Any] = {"model": "gpt2", "selection": None, "data": "text/"}


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that cannot be written, whoever runs the tests."""
    folder, access = tmp_path / "locked", os.access
    folder.mkdir()

    def refusing(path: Any, mode: int) -> bool:
        return access(path, mode) and not (Path(path) == folder and mode & os.W_OK)

    monkeypatch.setattr(os, "access", refusing)
    return folder


# Folders


@pytest.mark.parametrize("place", [".", "out", "deep/down/in/out"])
def test_a_folder_that_is_there_or_can_be_made_is_taken_and_not_made(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_folder(tmp_path / place)
    monkeypatch.chdir(tmp_path)
    check_folder(Path(place))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
        with pytest.raises(OutputError) as caught:
            check_folder(place)
        one_sentence(caught, place)
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_folder_that_cannot_be_written_is_refused_with_all_below_it(locked: Path) -> None:
    for place in (locked, locked / "out", locked / "deep" / "out"):
        with pytest.raises(OutputError) as caught:
            check_folder(place)
        one_sentence(caught, place, locked)
    check_folder(locked.parent / "out")


# Files


@pytest.mark.parametrize("place", ["selection.json", "deep/selection.json"])
def test_a_file_that_can_be_made_is_taken_and_not_made(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_file(tmp_path / place, "selection.json")
    monkeypatch.chdir(tmp_path)
    check_file(Path(place), "selection.json")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_already_is_taken_and_left(tmp_path: Path) -> None:
    (tmp_path / "selection.json").write_text("mine")
    check_file(tmp_path / "selection.json", "selection.json")
    assert contents(tmp_path) == {"selection.json": b"mine"}


def test_a_folder_in_a_files_place_is_refused_with_a_name_that_would_do(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        check_file(tmp_path, "selection.json")
    one_sentence(caught, tmp_path, tmp_path / "selection.json")


def test_a_file_in_a_folder_that_cannot_be_written_is_refused(locked: Path) -> None:
    with pytest.raises(OutputError) as caught:
        check_file(locked / "selection.json", "selection.json")
    one_sentence(caught, locked)


def test_a_file_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError) as caught:
        check_file(tmp_path / "file" / "selection.json", "selection.json")
    one_sentence(caught, tmp_path / "file")


# Records


def test_a_record_about_the_same_things_may_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    check_record_file(path, RECORD)
    assert not path.exists()
    jsonio.write(path, RECORD | {"dense": {"loss": 3.5}})
    check_record_file(path, RECORD)


def _other_model(path: Path) -> None:
    jsonio.write(path, RECORD | {"model": "opt", "dense": {}})


def _less(path: Path) -> None:
    jsonio.write(path, {"model": "gpt2", "selection": None})


def _list(path: Path) -> None:
    jsonio.write(path, [RECORD])


def _text(path: Path) -> None:
    path.write_text("my diary")


def _empty(path: Path) -> None:
    path.touch()


def _bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


def _too_deep(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("write", [_other_model, _less, _list, _text, _empty, _bytes, _too_deep])
def test_a_file_that_holds_anything_else_is_refused_and_left(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    write(path)
    before = path.read_bytes()
    with pytest.raises(OutputError) as caught:
        check_record_file(path, RECORD)
    one_sentence(caught, path)
    assert path.read_bytes() == before


def test_a_record_where_no_file_can_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        check_record_file(tmp_path, RECORD)
    one_sentence(caught, tmp_path)


def test_a_folder_has_one_writer_who_may_go_in_again(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    refused: list[str] = []

    def another() -> None:
        try:
            with only_writer(tmp_path / "out"):
                pass
        except OutputError as error:
            refused.append(str(error))

    with only_writer(tmp_path / "out"), only_writer(tmp_path / "out"):
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
    assert len(refused) == 1 and "Another run" in refused[0] and str(tmp_path / "out") in refused[0]
    assert not (tmp_path / "out").exists()  # nothing was written
    another()
    assert len(refused) == 1


def test_a_folder_that_was_there_or_that_was_written_to_stays(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        pass
    with only_writer(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert (tmp_path / "new" / "file").exists()
