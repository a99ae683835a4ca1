from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import secateur as sc
from secateur.methods import METHODS, searching
from worlds import Listener, Run, World, check_refused, contents, prune_command, small

CUT: dict[str, Any] = {"layout": "free", "measure": False, "calibration_size": 16}


def foretold(world: World, *, task: str = "text", **settings: Any) -> sc.Forecast:
    model, data = world.of(task)
    return sc.forecast_of(str(model), calibration=str(data), device="cpu", **small(settings))


def chosen(world: World, out: Path, **settings: Any) -> sc.Selection:
    return sc.select_to(str(world.text_model), out, calibration=str(world.text), device="cpu", **small(settings)).selection


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", ["head", "both"])
def test_pulls_and_units_are_those_of_the_real_search_and_forwards_are_near(
    method: str, target: str, world: World, tmp_path: Path
) -> None:
    forecast = foretold(world, method=method, target=target)
    selection = chosen(world, tmp_path / "s.json", method=method, target=target)
    assert forecast.removed == len(selection.units)
    # auto may be sure before its budget is spent, and invented damages do not tell when.
    assert forecast.pulls == (pytest.approx(selection.pulls, rel=0.5) if method == "auto" else selection.pulls)
    assert (forecast.pulls > 0) == (method in searching())
    assert selection.forwards * 0.7 <= forecast.forwards <= selection.forwards * 1.3
    assert all(seconds > 0 for seconds in forecast.seconds.values())
    assert set(forecast.seconds) == {"loading", "choosing", "evaluating"}


def test_a_long_search_is_told_from_its_first_steps(world: World, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target": "mlp", "group_width": 1, "ratio": 0.5, "screen": 0}  # 21 of 42
    forecast, selection = foretold(world, **settings), chosen(world, tmp_path / "s.json", **settings)
    assert (
        (forecast.candidates, forecast.removed, forecast.pulls) == (42, 21, 84) == (42, len(selection.units), selection.pulls)
    )
    assert selection.forwards * 0.8 <= forecast.forwards <= selection.forwards * 1.2


@pytest.mark.parametrize("task", ["text", "image"])
def test_the_settings_are_those_that_apply_with_the_defaults_of_task_and_machine(task: str, world: World) -> None:
    forecast = foretold(world, task=task)
    assert (forecast.family, forecast.task) == ({"text": "gpt2", "image": "vit"}[task], task)
    expected = {"text": (48, 4, 512, 80), "image": (0, 8, 1024, 0)}[task]
    names = ("screen", "batch_size", "calibration_size", "evaluation_batches")
    assert tuple(forecast.settings[name] for name in names) == expected
    assert forecast.settings["device"] == "cpu" and forecast.settings["pool_size"] == 6
    assert forecast.settings["batches_per_step"] == forecast.calibration_batches
    assert isinstance(forecast.settings["cache_memory"], int) and forecast.settings["lanes"] in (1, 2)
    assert forecast.settings["data"] == forecast.settings["calibration"] == str(world.of(task)[1])
    assert not forecast.settings.keys() & {"measure", "group_width"} and ("seq_len" in forecast.settings) == (task == "text")
    scored = foretold(world, task=task, method="magnitude").settings
    assert not scored.keys() & {"pulls_per_step", "ucb_c", "pool_size", "screen", "lanes"}


@pytest.mark.parametrize("goal", ["keep_params", "keep_flops", "keep_latency"])
def test_a_goal_is_told_with_about_how_many_units_it_takes(goal: str, world: World, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target": "both", goal: 0.9}
    forecast = foretold(world, **settings)
    assert forecast.goal is not None and forecast.goal.startswith("keep 0.9 of the ")
    assert "ratio" not in forecast.settings and 0 < forecast.removed < 21
    assert ("measuring what units cost" in forecast.more) == (goal == "keep_latency")
    if goal != "keep_latency":
        assert abs(forecast.removed - len(chosen(world, tmp_path / "s.json", **settings).units)) <= 3


def test_what_comes_on_top_is_named(world: World, tmp_path: Path) -> None:
    assert foretold(world).more == ()
    cut = foretold(world, out=tmp_path / "out", **CUT | {"repair": "bias", "measure": True, "heal": "9s"})
    assert cut.more == ("cutting", "proving", "repairing", "healing for 9s", "measuring dense against small")
    assert cut.settings["heal"] == "9s" and "heal" not in foretold(world).settings
    assert (cut.settings["repair"], cut.settings["measure"]) == ("bias", True)
    assert not (tmp_path / "out").exists()


def test_the_forecast_leaves_the_model_as_it_was_and_does_not_cut(world: World, tmp_path: Path) -> None:
    listener = Listener()
    first = foretold(world, watcher=listener)
    assert first.pulls == foretold(world).pulls and first.forwards == foretold(world).forwards
    assert not [stage for stage in listener.stages if stage.startswith(("choosing", "cutting", "evaluating"))]


# The command


def test_a_dry_run_of_prune_writes_nothing_and_says_pulls_time_and_defaults(world: World, tmp_path: Path, run: Run) -> None:
    ran = run(*prune_command(world, tmp_path / "out", "--dry-run"))
    assert (ran.code, ran.complaints) == (0, [])
    for words in ("12 pulls, about", "3 of 9 candidates", "on this machine", "calibration_size", "cache_memory", "GiB"):
        assert words in ran.out
    assert contents(tmp_path) == {}
    document = run(*prune_command(world, tmp_path / "out", "--dry-run", "--json")).document
    assert (document["pulls"], document["removed"], document["candidates"]) == (12, 3, 9)
    assert document["total_seconds"] == pytest.approx(sum(document["seconds"].values()))


def test_a_dry_run_of_select_judges_nothing(world: World, tmp_path: Path, run: Run) -> None:
    command = ["select", world.text_model, "--calibration", world.text, "--seq-len", 16, "-o", tmp_path / "s.json", "--dry-run"]
    document = run(*command, "--json").document
    assert set(document["seconds"]) == {"loading", "choosing"} and document["evaluation_batches"] == 0
    assert "data" not in document["settings"] and "measure" not in document["settings"]
    assert contents(tmp_path) == {}


def test_a_dry_run_of_a_static_method_says_that_there_are_no_pulls(world: World, tmp_path: Path, run: Run) -> None:
    assert "No pulls: taylor" in run(*prune_command(world, tmp_path / "out", "--dry-run", "--method", "taylor")).out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batches-per-pull", 100], "batches per pull"),
        (["--calibration", "nosuch"], "nosuch"),
        (["--layout", "uniform"], "--layout free"),
        (["--repair"], "repair"),
        (["--keep-params", 0.01, "--layout", "free"], "candidates"),
    ],
    ids=str,
)
def test_a_dry_run_refuses_what_the_real_run_refuses(
    options: list[object], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    assert said in check_refused(run(*prune_command(world, tmp_path / "out", "--dry-run", *options)), tmp_path / "out")
