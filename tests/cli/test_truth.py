"""What a command says is so: what it finds from an earlier start is believed only if it is what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from worlds import Run, World, check_refused, contents, prune_command

CUT = ("--layout", "free", "--no-measure")


# Checkpoints


def emptied(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def deleted(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_off(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:40])


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def flipped(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("destroy", [emptied, deleted, cut_off, without_config, flipped])
def test_a_destroyed_checkpoint_is_cut_again(destroy: Callable[[Path], None], world: World, tmp_path: Path, run: Run) -> None:
    command = prune_command(world, tmp_path / "out", *CUT)
    assert run(*command).code == 0
    before = contents(tmp_path / "out")
    destroy(tmp_path / "out")
    hurt = {name: data for name, data in contents(tmp_path / "out").items() if before[name] != data}
    ran = run(*command)
    assert ran.code == 0 and [line for line in ran.complaints if "not as it was written" in line and "cut again" in line]
    after = contents(tmp_path / "out")
    assert {name: data for name, data in after.items() if name in before} == before
    assert {name.removesuffix(".changed"): data for name, data in after.items() if name not in before} == hurt
    assert run(*command).complaints == []


def test_shrink_does_not_replace_a_model_that_was_changed_and_makes_a_torn_one_whole(
    world: World, tmp_path: Path, run: Run
) -> None:
    assert run(*prune_command(world, tmp_path / "chosen")).code == 0
    selection, out = tmp_path / "chosen" / "selection.json", tmp_path / "small"
    command = ["shrink", world.text_model, "--selection", selection, "--device", "cpu", "--no-measure", "-o", out]
    assert run(*command).code == 0
    before = contents(out)
    flipped(out)
    changed = contents(out)
    sentence = check_refused(run(*command))
    assert "model.safetensors" in sentence and str(out) in sentence and contents(out) == changed
    deleted(out)
    assert run(*command).code == 0 and contents(out) == before


def test_a_record_that_names_files_outside_its_folder_removes_nothing_there(world: World, tmp_path: Path, run: Run) -> None:
    command = prune_command(world, tmp_path / "out", *CUT)
    assert run(*command).code == 0
    (tmp_path / "mine").write_text("mine")
    path = tmp_path / "out" / "secateur.json"
    fields = json.loads(path.read_text())
    fields["files"]["../mine"] = {"bytes": 1, "sha256": ""}
    path.write_text(json.dumps(fields))
    assert str(path) in check_refused(run(*command))
    assert (tmp_path / "mine").read_text() == "mine"
