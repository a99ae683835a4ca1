"""What a command says is so: what it finds from an earlier start is believed only if it is what was written."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from grids import write_grid
from secateur.experiment import work
from tiny import CLASSES, FAMILIES_TINY, randomised
from worlds import FILES, SEQ_LEN, Run, World, check_refused, contents, prune_command

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


# What belongs together


def selected(world: World, place: Path, run: Run, *more: object) -> Path:
    assert run(*prune_command(world, place, *more)).code == 0
    return place / "selection.json"


def judged(world: World, selection: Path, *more: object, model: object = None) -> list[object]:
    options = ("--data", world.text, "--device", "cpu", "--seq-len", SEQ_LEN)
    return ["evaluate", model or world.text_model, "--selection", selection, *options, *more]


def cut_of(world: World, selection: Path, *more: object, model: object = None) -> list[object]:
    place = selection.with_name("small")
    return [
        "shrink",
        model or world.text_model,
        "--selection",
        selection,
        "--device",
        "cpu",
        "--no-measure",
        "-o",
        place,
        *more,
    ]


def another_model(world: World, place: Path) -> Path:
    """A model of the same shapes with other weights."""
    folder = Path(shutil.copytree(world.text_model, place))
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 0.5 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("command", [judged, cut_of])
def test_a_selection_is_for_its_own_model_in_every_precision(
    command: Callable[..., list[object]], world: World, tmp_path: Path, run: Run
) -> None:
    selection, other = selected(world, tmp_path / "chosen", run), another_model(world, tmp_path / "other")
    for dtype in ("float32", "bfloat16"):
        sentence = check_refused(run(*command(world, selection, "--dtype", dtype, model=other)), tmp_path / "chosen" / "small")
        assert "another one" in sentence and str(other) in sentence
    assert run(*command(world, selection, "--dtype", "bfloat16")).code == 0


@pytest.mark.parametrize("command", [judged, cut_of])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kind": "head", "layer": 1, "index": 2}, {"kind": "kv_group", "layer": 1, "index": 2}),
        ({"kind": "mlp", "layer": 0, "index": 1, "width": 4}, {"kind": "mlp", "layer": 0, "index": 0, "width": 8}),
    ],
)
def test_units_that_overlap_are_not_counted_twice(
    first: dict[str, Any], second: dict[str, Any], command: Callable[..., list[object]], world: World, tmp_path: Path, run: Run
) -> None:
    selection = selected(world, tmp_path / "chosen", run)
    selection.write_text(json.dumps(json.loads(selection.read_text()) | {"units": [first, second]}))
    assert re.search(f"{first['kind']} .*{second['kind']} .*overlap", check_refused(run(*command(world, selection))))


def test_a_selection_and_an_evaluation_of_other_units_are_not_taken_together(world: World, tmp_path: Path, run: Run) -> None:
    selection = selected(world, tmp_path / "out", run, *CUT)
    for path in tmp_path.glob("out/*"):  # as a kill leaves it before the cut
        if path.name not in FILES:
            path.unlink()
    fields = json.loads(selection.read_text())
    selection.write_text(json.dumps(fields | {"units": fields["units"][:1]}))
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", *CUT)), tmp_path / "out" / "config.json")
    assert "selection.json" in sentence and "evaluation.json" in sentence


@pytest.mark.parametrize(
    "more", [["--seq-len", 8], ["--evaluation-batches", 2], ["--batch-size", 2], ["--dtype", "bfloat16"]], ids=str
)
def test_a_result_of_other_settings_is_not_overwritten(more: list[object], world: World, tmp_path: Path, run: Run) -> None:
    place = tmp_path / "evaluation.json"
    command = ["evaluate", world.text_model, "--data", world.text, "--device", "cpu", "--seq-len", SEQ_LEN, "-o", place]
    assert run(*command).code == 0
    before = place.read_bytes()
    assert str(place) in check_refused(run(*command, *more))
    assert place.read_bytes() == before and run(*command).code == 0


def test_a_form_of_repair_without_a_name_is_refused(world: World, tmp_path: Path, run: Run) -> None:
    refused = check_refused(
        run(*prune_command(world, tmp_path / "out", *CUT, "--repair", "--repair-form", "")), tmp_path / "out"
    )
    assert "form of repair" in refused


@pytest.mark.parametrize("target", ["mlp", "both"])
def test_a_group_wider_than_every_mlp_is_refused(target: str, world: World, tmp_path: Path, run: Run) -> None:
    wide = ("--target", target, "--group-width", 1000)
    for ran in (run(*prune_command(world, tmp_path / "out", *wide)), run("units", world.text_model, *wide)):
        assert re.search(r"\b1000\b.*\b14\b", check_refused(ran, tmp_path / "out"))
    assert run("units", world.text_model, "--target", "head", "--group-width", 1000).code == 0


@pytest.mark.usefixtures("fresh_workplace")
def test_a_grid_of_which_every_run_failed_does_not_end_well(
    world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(work, "choose", fail)
    ran = run("grid", write_grid(world, tmp_path), "-o", tmp_path / "store", "--device", "cpu")
    assert ran.code == 2 and re.match("0 runs done, 14 failed", ran.out)
    assert [line for line in ran.err.splitlines() if line.startswith("error: All 14 runs failed")]


# Data that choose and data that judge


def shifted(text: str) -> str:
    """By a word, which is a token: every window begins one later."""
    return text.partition(" ")[2]


def second_half(text: str) -> str:
    return text[len(text) // 2 :]


@pytest.fixture(scope="module")
def long_rows(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The world with a model that takes texts of more than a few tokens."""
    folder = Path(shutil.copytree(world.text_model, tmp_path_factory.mktemp("long") / "model"))
    model: Any = FAMILIES_TINY["gpt2"]()
    model.config.n_positions = 64
    randomised(type(model)(model.config)).save_pretrained(folder)  # type: ignore[operator]
    return World(folder, world.image_model, world.text, world.images)


LONG = ("--seq-len", 64, "--documents", "joined", "--batches-per-pull", 1, "--batch-size", 2)


@pytest.mark.parametrize("form", [shifted, second_half])
def test_a_text_that_chose_does_not_judge_in_another_form(
    form: Callable[[str], str], long_rows: World, tmp_path: Path, run: Run
) -> None:
    text = long_rows.text / "train.txt"
    (tmp_path / "other.txt").write_text(form(text.read_text()))
    data = ("--calibration", text, "--data", tmp_path / "other.txt")
    sentence = check_refused(run(*prune_command(long_rows, tmp_path / "out", *LONG, *data)), tmp_path / "out")
    assert re.search(r"other\.txt.*overlaps.*\b([5-9]\d|100)%.*at most 10%", sentence)
    selection = selected(long_rows, tmp_path / "chosen", run, *LONG)
    judge = judged(long_rows, selection, "--seq-len", 64, "--documents", "joined", "--data", tmp_path / "other.txt")
    assert re.search(r"overlaps.*\b([5-9]\d|100)%", check_refused(run(*judge)))


def test_a_small_share_of_text_that_chose_is_said(long_rows: World, tmp_path: Path, run: Run) -> None:
    sentences = (long_rows.text / "train.txt").read_text().replace("\n\n", "\n").splitlines()
    mixed = tmp_path / "mixed.txt"
    mixed.write_text("\n".join(sentences[8:13]) + "\n" + (long_rows.text / "test.txt").read_text())
    ran = run(
        *prune_command(long_rows, tmp_path / "out", *LONG, "--calibration", long_rows.text / "train.txt", "--data", mixed)
    )
    said = [line for line in ran.complaints if "chose the units" in line]
    assert ran.code == 0 and len(said) == 1 and re.match(rf"[2-9]% of .*{mixed}", said[0])


def pictures(folder: Path, seed: int) -> list[Path]:
    """Images that differ from each other as photographs do: by what is bright and what is dark."""
    rng = np.random.default_rng(seed)
    paths = [folder / f"LABEL_{label}" / f"{i}.png" for label in range(CLASSES) for i in range(4)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize((96, 96), Image.Resampling.BICUBIC).save(path)
    return paths


def encoded_anew(path: Path) -> bytes:
    data = io.BytesIO()
    Image.open(path).save(data, "JPEG", quality=70)
    return data.getvalue()


def with_more_bytes(path: Path) -> bytes:
    return path.read_bytes() + b"more"


@pytest.mark.parametrize(("form", "n", "said"), [(encoded_anew, 2 * CLASSES, "50%"), (with_more_bytes, 1, "same pixels")])
def test_an_image_that_chose_does_not_judge_in_another_form(
    form: Callable[[Path], bytes], n: int, said: str, world: World, tmp_path: Path, run: Run
) -> None:
    mine = World(world.text_model, world.image_model, world.text, tmp_path / "images")
    train, val = pictures(mine.images / "train", 1), pictures(mine.images / "val", 2)
    assert run(*prune_command(mine, tmp_path / "apart", task="image")).complaints == []
    for old, new in list(zip(train, val, strict=True))[:n]:
        new.write_bytes(form(old))
    sentence = check_refused(run(*prune_command(mine, tmp_path / "out", task="image")), tmp_path / "out")
    assert re.search(f"overlaps.*{said}", sentence)
