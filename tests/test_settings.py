"""Settings have one home: the command line, grids, Python and the docs all agree with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from settings_page import PAGE, page

from secateur.errors import SettingError
from secateur.experiment.grid import grid_settings
from secateur.methods import METHODS
from secateur.settings import (
    FLOPS,
    OLD_NAMES,
    SECTIONS,
    Judging,
    Provenance,
    Settings,
    check_type,
    keywords,
    make_job,
    plain_path,
)
from worlds import Run

# What a run's key is made of since the first store: a change here would orphan every record.
RECORDED = [
    "model",
    "target",
    "ratio",
    "method",
    "seed",
    "pulls_per_step",
    "batches_per_pull",
    "batches_per_step",
    "stack",
    "temperature",
    "ucb_c",
    "pool_size",
    "screen",
    "screen_by",
    "group_width",
    "score_batches",
    "calibration",
    "calibration_size",
    "seq_len",
    "batch_size",
    "layout",
    "target_params",
    "target_flops",
    "target_latency",
    "device",
    "dtype",
]


def test_files_have_the_settings_by_the_names_they_always_had() -> None:
    written = Settings("m").for_task("text").to_json()
    assert list(written) == RECORDED
    assert [written[name] for name in ("pool_size", "batches_per_step", "target_params", "screen")] == [0, 0, 0, 48]
    assert list(Judging("d").for_task("image").to_json().items()) == [("data", "d"), ("size", 2000), ("max_batches", 0)]


@pytest.mark.parametrize(
    "settings",
    [
        Settings("m", documents="lines", holdout=0.1),
        Settings("m"),
        Settings("m", pool_size=7, keep_flops=0.8, screen=3).for_task("image"),
        Settings("m", batches_per_step=2),
    ],
)
def test_settings_are_read_back_as_they_were_written(settings: Settings) -> None:
    settings = settings.for_task("text")
    assert Settings.from_json(settings.to_json()) == settings
    made_with = Provenance(settings, "a-b", "c")
    assert Provenance.from_json(made_with.to_json()) == made_with


@pytest.mark.parametrize(("name", "value"), [("seed", "x"), ("ratio", []), ("model", 3), ("batch_size", 1.5)])
def test_settings_of_another_type_are_not_read(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.from_json({"model": "m", name: value})


def test_the_page_of_settings_is_made_from_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_help_of_prune_has_every_setting(run: Run) -> None:
    shown = run("prune", "--help").out
    missing = [name for name in keywords() if f"--{name.replace('_', '-')}" not in shown]
    assert missing == []


def test_every_setting_has_a_section_and_a_help_line() -> None:
    for name, (_, field) in keywords().items():
        text = field.metadata["help"]
        assert field.metadata["section"] in SECTIONS, name
        assert (text() if callable(text) else text).endswith((".", "]")), name


def test_grids_take_settings_and_judging_but_not_what_a_cell_or_a_machine_decides() -> None:
    assert {"temperature", "screen_by", "evaluation_size", "batch_size"} <= set(grid_settings())
    assert not {"model", "seed", "device", "lanes", "repair", "keep_params", "data", "layout"} & set(grid_settings())


def test_what_is_left_to_the_task_becomes_the_papers() -> None:
    text, image = make_job("m").for_task("text"), make_job("m", calibration="pictures").for_task("image")
    assert (text.settings.screen, text.settings.calibration_size, text.settings.batch_size) == (48, 512, 4)
    assert (image.settings.screen, image.settings.calibration_size, image.settings.batch_size) == (0, 1024, 8)
    assert (text.judging.size, text.judging.max_batches, text.judging.data) == (1024, 80, "builtin")
    assert (image.judging.size, image.judging.max_batches, image.judging.data) == (2000, 0, "pictures")
    given = make_job("m", screen=5, batch_size=2, evaluation_batches=3).for_task("text")
    assert (given.settings.screen, given.settings.batch_size, given.judging.max_batches) == (5, 2, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ratio": 1.5}, "ratio.*1.5"),
        ({"temperature": 0}, "temperature.*0"),
        ({"pulls_per_step": 0}, "pulls per step.*0"),
        ({"batches_per_pull": 0}, "batches per pull.*0"),
        ({"screen": -1}, "screen.*-1"),
        ({"screen_by": "wandas"}, "wandas.*wanda"),
        ({"method": "ucbb"}, "ucbb.*ucb"),
        ({"target": "heads"}, "heads.*head"),
        ({"layout": "even"}, "layout.*even"),
        ({"dtype": "int8"}, "dtype.*int8"),
        ({"seed": -1}, "seed.*-1"),
        ({"ucb_c": float("nan")}, "UCB.*nan"),
        ({"keep_params": 1.2}, "parameters.*1.2"),
        ({"keep_params": 0.5, "keep_flops": 0.5}, "2 goals"),
        ({"keep_params": 0.5, "ratio": 0.1}, "ratio.*goal"),
        ({"keep_flops": 0.5, "ratio": 0.2}, "ratio.*goal"),
        ({"documents": "line"}, "documents.*line"),
        ({"holdout": 0}, "holdout.*0"),
        ({"holdout": 0.6}, "holdout.*0.6"),
        ({"holdout": float("nan")}, "holdout.*nan"),
        ({"holdout": 0.1, "calibration": "one", "data": "two"}, "'one'.*'two'.*--holdout"),
        ({"evaluation_size": 0}, "evaluation size.*0"),
        ({"evaluation_batches": -1}, "evaluation batches.*-1"),
        ({"repair": "glue"}, "repair.*glue"),
        ({"lanes": 0}, "lanes.*0"),
        ({"cache_memory": -1}, "cache memory.*-1"),
        ({"temprature": 1.0}, "temprature.*temperature"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        make_job("m", **given)


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_goes_on_working_with_a_warning(old: str) -> None:
    with pytest.warns(FutureWarning, match=OLD_NAMES[old]):
        job = make_job("m", **{old: 0.8})
    assert job == make_job("m", **{OLD_NAMES[old]: 0.8})


def test_a_ratio_beside_no_goal_and_a_goal_beside_no_ratio_are_taken() -> None:
    assert make_job("m", ratio=0.2, keep_params=None, keep_flops=0).settings.ratio == 0.2
    assert make_job("m", keep_params=0.8).settings.ratio == Settings.ratio
    assert make_job("m", holdout=0.1, calibration="one", data="one").settings.holdout == 0.1


def test_a_goal_is_a_cost_and_the_share_to_keep() -> None:
    assert make_job("m", keep_flops=0.8).settings.keep == (FLOPS, 0.8)
    assert make_job("m").settings.keep is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("pool_size", 2.5), ("screen_by", 3), ("seq_len", True), ("evaluation_size", "9")],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"{name} of table 4.*"):
        check_type(name, value, "table 4")


def test_values_of_the_right_type_pass() -> None:
    for name, value in (("temperature", 1), ("pool_size", 4), ("pool_size", None), ("screen_by", "fisher")):
        check_type(name, value, "table 4")


@pytest.mark.parametrize("method", METHODS)
def test_settings_that_a_method_does_not_read_make_no_other_run(method: str) -> None:
    settings = Settings("m", method=method, screen=0).for_task("text")
    other = dataclasses.replace(settings, ucb_c=9.0, pool_size=3, screen_by="fisher", score_batches=3, temperature=0.5)
    plain, varied = settings.without_unused(), other.without_unused()
    differing = {f.name for f in dataclasses.fields(Settings) if getattr(plain, f.name) != getattr(varied, f.name)}
    row = METHODS[method]
    expected = set(row.settings) - {"budget"}
    if not settings.planned:
        expected |= {"temperature"} if row.policy else {"score_batches"} if row.needs_batches else set()
    assert differing == expected


def test_a_path_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    assert plain_path(f"{tmp_path}/./x/..") == f"{tmp_path}/./x/.."  # there is no such folder
    assert plain_path(f"{tmp_path}//") == str(tmp_path)
    assert plain_path("gpt2") == "gpt2"


def test_settings_do_not_change_and_have_no_sentinels() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings("m").ratio = 0.2  # type: ignore[misc]
    assert Settings("m", pool_size=0).pool_size is None and Settings("m", keep_params=0).keep_params is None


@pytest.mark.parametrize(
    ("task", "more", "damage"),
    [
        ("text", {"repair": "auto"}, "repaired"),
        ("text", {}, "zeroed"),
        ("text", {"repair": "auto", "damage": "zeroed"}, "zeroed"),
        ("text", {"repair": "auto", "method": "ucb"}, "zeroed"),
        ("image", {"repair": "auto"}, "zeroed"),
        ("image", {"repair": "auto", "damage": "repaired"}, "repaired"),
    ],
)
def test_auto_measures_damage_after_a_repair_on_texts_unless_told_otherwise(
    task: str, more: dict[str, Any], damage: str
) -> None:
    assert make_job("m", **more).for_task(task).settings.damage == damage
