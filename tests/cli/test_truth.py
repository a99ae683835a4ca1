"""What a command says is so: what it finds from an earlier start is believed only if it is what was written."""

from __future__ import annotations

import json
import random
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


# Journals


def interrupted(world: World, place: Path, run: Run) -> tuple[list[object], Path]:
    """A command that was killed when all was measured and nothing else written, and its journal."""
    command = prune_command(world, place)
    assert run(*command).code == 0
    for name in ("selection.json", "evaluation.json"):
        (place / name).unlink()
    return command, place / "journal.jsonl"


def without_checksums(journal: Path) -> None:
    """As a version before checksums wrote it."""
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        del record["checksum"]
    journal.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def test_no_flipped_bit_of_a_journal_changes_a_selection_in_silence(world: World, tmp_path: Path, run: Run) -> None:
    command, journal = interrupted(world, tmp_path / "out", run)
    whole, rng = journal.read_bytes(), random.Random(0)
    for _ in range(30):
        data = bytearray(whole)
        data[rng.randrange(len(data) - 1)] ^= 1 << rng.randrange(8)
        journal.write_bytes(data)
        assert str(journal) in check_refused(run(*command), tmp_path / "out" / "selection.json")
    journal.write_bytes(whole)
    ran = run(*command)
    assert (ran.code, ran.complaints) == (0, [])


def test_a_line_that_is_lost_or_exchanged_is_noticed(world: World, tmp_path: Path, run: Run) -> None:
    command, journal = interrupted(world, tmp_path / "out", run)
    lines = journal.read_text().splitlines(keepends=True)
    for changed in (lines[:2] + lines[3:], [lines[0], lines[2], lines[1], *lines[3:]], lines[:3] + lines[2:]):
        journal.write_text("".join(changed))
        assert "checksum" in check_refused(run(*command))


@pytest.mark.parametrize(("name", "value"), [("reward", 0.999), ("damage", -1.0), ("masked_losses", [1.0, 1.0])])
def test_a_number_that_its_losses_do_not_give_is_refused_without_checksums_too(
    name: str, value: object, world: World, tmp_path: Path, run: Run
) -> None:
    command, journal = interrupted(world, tmp_path / "out", run)
    without_checksums(journal)
    lines = journal.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {name: value})
    journal.write_text("\n".join(lines) + "\n")
    sentence = [line for line in run(*command).complaints if line.startswith("error: ")]
    assert len(sentence) == 1 and f"Line 3 of {journal}" in sentence[0]
    assert not (tmp_path / "out" / "selection.json").exists()


def test_a_journal_from_before_checksums_is_continued_and_said_to_be_one(world: World, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path / "whole")).code == 0
    command, journal = interrupted(world, tmp_path / "out", run)
    without_checksums(journal)
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:4]))
    ran = run(*command)
    assert ran.code == 0 and ["before its lines had checksums" in line for line in ran.complaints] == [True]
    assert journal.read_text() == "".join(lines)
    units = [json.loads((tmp_path / name / "selection.json").read_text())["units"] for name in ("whole", "out")]
    assert units[0] == units[1]
