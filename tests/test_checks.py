from __future__ import annotations

from pathlib import Path

import pytest

import secateur as sc
from secateur.checks import FILE_SUFFIXES, check_data
from secateur.data.texts import HUB_NAMES, TEXT_SUFFIXES
from secateur.settings import BUILTIN, KNOWN_DATA
from worlds import Listener, World, contents, one_sentence


@pytest.mark.parametrize("name", [*KNOWN_DATA, "owner/name", "owner/name:config", "owner/name-1.0", "."])
def test_data_that_may_be_there_pass(name: str) -> None:
    check_data(name, "--data")


@pytest.mark.parametrize(
    "name", ["nosuch", "no/such/folder", "/nosuch", "./nosuch", "../nosuch", "data/nosuch.txt", "nosuch.jsonl"]
)
def test_data_that_cannot_be_there_are_refused_by_name(name: str) -> None:
    with pytest.raises(sc.DataError) as caught:
        check_data(name, "--calibration")
    assert "file or folder" in one_sentence(caught, repr(name), "--calibration")


def test_the_names_that_are_known_are_those_that_can_be_read() -> None:
    assert (BUILTIN, *HUB_NAMES) == KNOWN_DATA
    assert set(TEXT_SUFFIXES) <= set(FILE_SUFFIXES)


@pytest.mark.parametrize("setting", ["calibration", "data"])
def test_prune_refuses_missing_data_before_it_loads_anything(setting: str, world: World, tmp_path: Path) -> None:
    listener = Listener()
    with pytest.raises(sc.DataError, match=r"nosuch\.txt"):
        sc.prune(str(world.text_model), out=tmp_path / "out", watcher=listener, **{setting: str(tmp_path / "nosuch.txt")})
    assert listener.stages == [] and contents(tmp_path) == {}


def test_each_step_refuses_missing_data_and_places_before_it_loads_anything(world: World, tmp_path: Path) -> None:
    listener, model, missing = Listener(), str(world.text_model), str(tmp_path / "nosuch.txt")
    file = tmp_path / "file"
    file.write_text("")
    sc.Selection((sc.Unit("head", 0, 0),)).save(tmp_path / "sel.json")
    before = contents(tmp_path)
    with pytest.raises(sc.DataError, match=r"nosuch\.txt.*--calibration"):
        sc.select_to(model, tmp_path / "new.json", watcher=listener, calibration=missing)
    with pytest.raises(sc.OutputError, match="file"):
        sc.select_to(model, file / "new.json", watcher=listener)
    with pytest.raises(sc.DataError, match=r"nosuch\.txt.*--data"):
        sc.evaluate_on(model, watcher=listener, data=missing)
    with pytest.raises(sc.SelectionError, match=r"other\.json"):
        sc.evaluate_on(model, selection=tmp_path / "other.json", watcher=listener)
    with pytest.raises(sc.DataError, match=r"nosuch\.txt.*--calibration"):
        sc.shrink_to(model, tmp_path / "sel.json", tmp_path / "out", watcher=listener, calibration=missing)
    with pytest.raises(sc.OutputError, match="file"):
        sc.shrink_to(model, tmp_path / "sel.json", file, watcher=listener)
    assert listener.stages == [] and contents(tmp_path) == before
