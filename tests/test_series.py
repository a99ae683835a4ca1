from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import secateur as sc
from secateur.errors import OutputError, SettingError
from secateur.series import Cut, Series, read_series, shares_of
from secateur.settings import make_job
from worlds import Run, World, prune_command, small


def series(*points: tuple[float, float]) -> Series:
    """The dense model and cuts of these times and losses."""
    cuts = [Cut(f"cut {i}" if i else "dense", 10, loss, loss, time=t) for i, (t, loss) in enumerate(points)]
    return Series("latency", "perplexity", tuple(cuts))


def prune(world: World, out: Path, **settings: Any) -> sc.PruneResult:
    asked = {
        "calibration": str(world.text),
        "device": "cpu",
        "target": "mlp",
        "method": "fisher",
        "measure": False,
        "layout": "free",
    }
    return sc.prune(str(world.text_model), out=out, **small(asked | settings))


def test_the_knee_is_the_cut_farthest_below_the_line_from_dense_to_the_smallest() -> None:
    assert series((1.0, 2.0), (0.9, 2.02), (0.8, 2.1), (0.7, 2.5)).knee == "cut 2"
    assert series((1.0, 2.0), (0.9, 2.01), (0.8, 2.4), (0.7, 2.5)).knee == "cut 1"


@pytest.mark.parametrize(
    "points",
    [
        ((1.0, 2.0), (0.9, 2.1)),  # two points make no curve
        ((1.0, 2.0), (0.9, 2.3), (0.8, 2.4)),  # quality falls at once
        ((1.0, 2.0), (0.9, float("nan")), (0.8, 2.4)),
        ((1.0, 2.0), (0.9, 1.9), (0.8, 1.8)),  # nothing is lost
    ],
)
def test_there_is_no_knee_where_no_cut_lies_below_the_line(points: tuple[tuple[float, float], ...]) -> None:
    assert series(*points).knee is None


def test_several_shares_give_nested_cuts_of_one_search_each_in_its_folder(world: World, tmp_path: Path) -> None:
    result = prune(world, tmp_path / "out", keep_params=[0.8, 0.95, 0.9])
    assert result.series and result.cut
    assert [cut.name for cut in result.series.cuts] == ["dense", "0.95", "0.9", "0.8"]
    chosen = []
    for cut in result.series.cuts[1:]:
        folder = tmp_path / "out" / cut.name
        units = sc.Selection.load(folder / "selection.json").units
        assert units == result.selection.units[: len(units)]
        chosen.append(units)
        record = json.loads((folder / "secateur.json").read_text())
        assert record["params"] == cut.params == sum(p.numel() for p in sc.load_shrunk(folder).parameters())
        assert record["shrunk"]["loss"] == pytest.approx(record["masked"]["loss"], abs=1e-5)
        assert cut.left is not None and cut.left <= float(cut.name) and record["goal"]["asked"] == float(cut.name)
    assert len(chosen[0]) < len(chosen[1]) < len(chosen[2]) == len(result.selection.units)
    assert read_series(tmp_path / "out") == result.series
    single = prune(world, tmp_path / "single", keep_params=0.8)
    assert single.selection.units == result.selection.units and single.series is None


def test_a_series_that_was_stopped_goes_on_and_ends_the_same(world: World, tmp_path: Path) -> None:
    whole = prune(world, tmp_path / "whole", keep_params="0.95,0.8").series
    out = tmp_path / "stopped"
    prune(world, out, keep_params="0.95,0.8")
    for name in ("0.8/config.json", "series.json"):
        (out / name).unlink()
    before = (out / "0.95" / "model.safetensors").stat().st_mtime_ns
    assert prune(world, out, keep_params="0.95,0.8").series == whole
    assert (out / "0.95" / "model.safetensors").stat().st_mtime_ns == before


def test_a_series_that_is_stopped_after_a_model_was_written_goes_on(world: World, tmp_path: Path) -> None:
    class Stopping(sc.Watcher):
        def stage(self, name: str) -> None:
            if name == "evaluating the checkpoint":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(world, tmp_path, keep_params="0.95,0.8", watcher=Stopping())
    assert (tmp_path / "0.95" / "config.json").exists()
    result = prune(world, tmp_path, keep_params="0.95,0.8")
    assert result.series and [cut.name for cut in result.series.cuts] == ["dense", "0.95", "0.8"]


def test_a_damaged_series_is_one_sentence(tmp_path: Path) -> None:
    assert read_series(tmp_path) is None
    (tmp_path / "series.json").write_text('{"what": 3}')
    with pytest.raises(OutputError, match=r"series\.json is not a series"):
        read_series(tmp_path)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"keep_flops": "0.9,none"}, r"goal for FLOPs.*'0\.9,none'.*0\.9,0\.8"),
        ({"keep_flops": []}, "share such as"),
        ({"keep_flops": [0.9, 1.2]}, r"1\.2.*between 0 and 1"),
        ({"keep_flops": [0.9, 0.8], "layout": "uniform"}, "--layout free"),
        ({"keep_flops": [0.9, 0.8], "keep_params": 0.8}, "2 goals"),
    ],
)
def test_shares_that_make_no_series_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        make_job("gpt2", **asked)


def test_shares_are_numbers_texts_or_lists_without_repetition() -> None:
    assert shares_of("0.7, 0.9,0.8") == shares_of([0.8, 0.9, 0.7, 0.8]) == (0.9, 0.8, 0.7)
    assert shares_of(0.8) == (0.8,)
    assert shares_of("") is None


def test_the_command_shows_every_cut_and_names_the_files(world: World, tmp_path: Path, run: Run) -> None:
    asked = ["--target", "mlp", "--method", "fisher", "--layout", "free", "--keep-params", "0.9,0.8", "--no-measure"]
    ran = run(*prune_command(world, tmp_path / "out", *asked))
    assert ran.code == 0, ran.err
    assert all(re.search(rf"{name}\W+[\d,]+\W", ran.out) for name in ("dense", r"0\.9", r"0\.8"))
    assert 'load_shrunk("' + str(tmp_path / "out" / "0.8") in ran.err.replace("\n", "")
    assert "series.json" in ran.out and (tmp_path / "out" / "0.9" / "config.json").exists()
