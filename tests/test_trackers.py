"""Trackers: what TensorBoard's own reader finds in its files, and what the examples tell MLflow and W&B."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import secateur as sc
from worlds import Run, World, prune_command

ROOT = Path(__file__).parents[1]


def test_tensorboard_reads_what_was_written(world: World, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    ran = run(*prune_command(world, tmp_path / "out", "--tensorboard", board))
    assert ran.code == 0 and ran.complaints == []
    events = EventAccumulator(str(board))
    events.Reload()
    selection = sc.Selection.load(tmp_path / "out" / "selection.json")
    assert [event.value for event in events.Scalars("search/damage of a pull")] == pytest.approx(
        [pull.damage for pull in selection.trace], rel=1e-6
    )
    assert [event.value for event in events.Scalars("chosen/damage")] == pytest.approx(
        [step.damage for step in selection.steps], rel=1e-6
    )
    assert {"dense/loss", "dense/perplexity", "zeroed/loss", "chosen/forward passes"} <= {*events.Tags()["scalars"]}


def test_a_missing_tensorboard_is_one_sentence_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sc.MissingExtra, match=r"TensorBoard.*pip install tensorboard"):
        sc.TensorBoard(tmp_path / "board")
    assert not (tmp_path / "board").exists()


def run_example(name: str, tracker: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run an example as a user would, with a module in the tracker's place that notes every call."""
    fake = MagicMock()
    monkeypatch.setitem(sys.modules, tracker, fake)
    settings = tmp_path / "settings.toml"
    lines = [f'calibration = "{world.text}"', 'device = "cpu"', 'layout = "none"', "seq_len = 16", 'method = "ucb"']
    settings.write_text("\n".join([*lines, "ratio = 0.3", "pulls_per_step = 4", "calibration_size = 8", "evaluation_size = 4"]))
    monkeypatch.setattr(sys, "argv", [name, str(world.text_model), str(tmp_path / "out"), str(settings)])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return fake


def test_the_example_for_mlflow_logs_each_pull_and_each_result(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = run_example("with_mlflow.py", "mlflow", world, tmp_path, monkeypatch)
    selection = sc.Selection.load(tmp_path / "out" / "selection.json")
    logged = [call.args for call in mlflow.log_metric.call_args_list]
    assert logged == [("pull.damage", pull.damage) for pull in selection.trace]
    metrics = {name: value for call in mlflow.log_metrics.call_args_list for name, value in call.args[0].items()}
    assert metrics["chosen.damage"] == selection.steps[-1].damage and {"dense.perplexity", "zeroed.loss"} <= metrics.keys()
    assert mlflow.log_params.call_args.args[0]["ratio"] == 0.3
    mlflow.log_artifact.assert_called_once_with(str(tmp_path / "out" / "selection.json"))


def test_the_example_for_wandb_logs_each_pull_and_each_result(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = run_example("with_wandb.py", "wandb", world, tmp_path, monkeypatch)
    run = wandb.init.return_value.__enter__.return_value
    selection = sc.Selection.load(tmp_path / "out" / "selection.json")
    pulls = [call.args[0]["pull/damage"] for call in run.log.call_args_list if "pull/damage" in call.args[0]]
    assert pulls == [pull.damage for pull in selection.trace]
    summed = {name for call in run.summary.update.call_args_list for name in call.args[0]}
    assert {"dense/perplexity", "zeroed/loss"} <= summed
    assert wandb.init.call_args.kwargs["config"]["model"] == str(world.text_model)
