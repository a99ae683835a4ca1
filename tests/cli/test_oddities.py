"""Odd models, data, places and moments: each is taken, or refused in one sentence that says why, before any search."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secateur.model import accounting
from worlds import Run, World, check_refused, contents, prune_command, with_config


def copied(world: World, place: Path, task: str = "text") -> Path:
    return Path(shutil.copytree(world.of(task)[0], place / "model"))


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a JSON file."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


# Models


def preprocessed(**fields: Any) -> Callable[[World, Path], Path]:
    def made(world: World, place: Path) -> Path:
        changed(copied(world, place, "image") / "preprocessor_config.json", lambda old: old | fields)
        return place / "model"

    return made


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (preprocessed(size={"height": 24, "width": 24}), r"24.*16"),
        (preprocessed(size={"height": 100_000, "width": 100_000}), "100,000 pixels"),
        (preprocessed(do_center_crop=True, crop_size={"height": 100_000, "width": 4}), "100,000 pixels"),
        (preprocessed(do_center_crop=True, crop_size={"height": 3, "width": 3}), "3 x 3"),
        (preprocessed(image_mean=[0.5]), "mean must have 3"),
        (preprocessed(image_std=["x"] * 3), "'x'"),
        (preprocessed(resample=99), "99"),
        (lambda world, place: with_config(copied(world, place, "image"), dtype="int8"), "int8"),
        (lambda world, place: with_config(copied(world, place, "image"), dtype="bool"), "bool"),
        (
            lambda world, place: with_config(copied(world, place, "image"), id2label={0: "a", 7: "b", 2: "c", 3: "d", 4: "e"}),
            "id2label.* 1",
        ),
        (lambda world, place: with_config(copied(world, place, "image"), architectures=True), "bool"),
    ],
)
def test_an_image_model_that_does_not_fit_itself_is_one_sentence_before_the_search(
    made: Callable[[World, Path], Path], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", task="image", model=made(world, tmp_path)))
    assert re.search(said, check_refused(ran, tmp_path / "out"))
    assert "choosing" not in ran.err


def test_a_tokenizer_without_its_unknown_token_is_one_sentence(world: World, tmp_path: Path, run: Run) -> None:
    def without(fields: Any) -> Any:
        del fields["model"]["vocab"]["[unk]"]
        return fields | {"added_tokens": []}

    changed(copied(world, tmp_path) / "tokenizer.json", without)
    (tmp_path / "data.txt").write_text("zebra " * 100)
    command = ["evaluate", tmp_path / "model", "--data", tmp_path / "data.txt", "--seq-len", 16, "--documents", "joined"]
    assert re.search(r"data\.txt.*UNK", check_refused(run(*command)))


# Data


@pytest.mark.parametrize(
    "line", ['{"text": "\\ud800"}', '{"text": ["the cat"]}', "[" * 100_000, '{"text": ' + "9" * 5000 + "}"]
)
def test_a_line_that_is_no_text_is_named(line: str, world: World, tmp_path: Path, run: Run) -> None:
    (tmp_path / "some.jsonl").write_text('{"text": "the cat"}\n' + line + "\n")
    refused = check_refused(run(*prune_command(world, tmp_path / "out", "--calibration", tmp_path / "some.jsonl")))
    assert re.search(r"Line 2 of .*some\.jsonl", refused)


def test_files_whose_names_are_not_utf8_are_read_and_such_an_argument_is_refused(
    world: World, tmp_path: Path, run: Run
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        shutil.copyfile(world.text / f"{split}.txt", data / f"{split}-caf\udce9.txt")
    assert run(*prune_command(world, tmp_path / "out", "--calibration", data)).code == 0
    refused = check_refused(run(*prune_command(world, tmp_path / "caf\udce9")))
    assert "UTF-8" in refused and not (tmp_path / "caf\udce9").exists()


# Places


def test_a_place_in_the_data_is_refused(world: World, tmp_path: Path, run: Run) -> None:
    data = Path(shutil.copytree(world.text, tmp_path / "data"))
    (tmp_path / "link").symlink_to("data")
    before = contents(data)
    for out in (data, data / "out", tmp_path / "link" / "out"):
        refused = check_refused(run(*prune_command(world, out, "--calibration", data)))
        assert str(out) in refused and "--calibration" in refused
    assert "--data" in check_refused(run(*prune_command(world, data / "out", "--data", data)))
    select = ["select", world.text_model, "--calibration", data, "-o", data / "selection.json"]
    assert str(data) in check_refused(run(*select))
    assert contents(data) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "merges.txt", "modeling_shrunk.py"])
def test_a_foreign_file_of_a_models_name_is_refused_before_the_search(
    name: str, world: World, tmp_path: Path, run: Run
) -> None:
    (tmp_path / name).write_text("mine")
    ran = run(*prune_command(world, tmp_path, "--layout", "free", "--no-measure"))
    assert str(tmp_path / name) in check_refused(ran)
    assert "loading" not in ran.err and contents(tmp_path) == {name: b"mine"}


def test_a_file_of_another_name_stays_beside_the_model(world: World, tmp_path: Path, run: Run) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert run(*prune_command(world, tmp_path, "--layout", "free", "--no-measure")).code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "config.json").exists()


def test_a_file_that_is_no_store_is_not_cut_off(world: World, tmp_path: Path, run: Run) -> None:
    (tmp_path / "results.jsonl").write_text("mine")
    (tmp_path / "grid.toml").write_text(GRID.format(model=world.text_model, data=world.text))
    assert "results.jsonl" in check_refused(run("grid", tmp_path / "grid.toml", "-o", tmp_path))
    assert (tmp_path / "results.jsonl").read_text() == "mine"


GRID = """
task = "text"
seeds = [1]
target = "head"
ratios = [0.3]
models = ["{model}"]
settings = {{calibration = "{data}", seq_len = 16}}
table = [{{number = "4", methods = ["random"]}}]
"""


def test_of_two_shrinks_into_one_folder_the_second_is_refused_at_once(world: World, tmp_path: Path, run: Run) -> None:
    fcntl = pytest.importorskip("fcntl")
    assert run(*prune_command(world, tmp_path / "chosen")).code == 0
    (tmp_path / "out").mkdir()
    other = os.open(tmp_path / "out", os.O_RDONLY)
    command = ["shrink", world.text_model, "--selection", tmp_path / "chosen" / "selection.json", "-o", tmp_path / "out"]
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        ran = run(*command, "--no-measure")
        assert "Another run" in check_refused(ran) and "loading" not in ran.err
    finally:
        os.close(other)
    assert run(*command, "--no-measure").code == 0


def test_a_disk_that_is_full_when_the_tokenizer_is_written_leaves_no_model(world: World, tmp_path: Path, run: Run) -> None:
    resource = pytest.importorskip("resource")

    def longer(fields: Any) -> Any:
        words = fields["model"]["vocab"]
        return fields | {"model": fields["model"] | {"vocab": words | {f"word-{i}": len(words) + i for i in range(20_000)}}}

    changed(copied(world, tmp_path) / "tokenizer.json", longer)  # larger than the weights
    command = prune_command(world, tmp_path / "out", "--layout", "free", "--no-measure", model=tmp_path / "model")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        refused = check_refused(run(*command))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "out") in refused and "too large" in refused
    assert sorted(contents(tmp_path / "out")) == ["evaluation.json", "journal.jsonl", "selection.json"]
    assert run(*command).code == 0


# Moments

INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                {then}

sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
from secateur.cli.app import main
sys.argv = ["secateur", "units", "gpt2"]
main()
"""


STOPPED = "Stopped. Nothing was saved; the same command starts again: secateur units gpt2\n"


@pytest.mark.parametrize("name", ["typer", "secateur.cli.commands", "torch"])
@pytest.mark.parametrize("then", ["raise", "raise ImportError('half imported')"])
def test_an_interruption_during_imports_is_one_sentence(name: str, then: str) -> None:
    program = INTERRUPTED.format(name=name, then=then)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", STOPPED)


def test_a_closed_standard_output_is_nothing_to_stumble_over() -> None:
    command = f"exec {sys.executable} -m secateur units gpt2 >&-"
    ran = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_an_ascii_output_cannot_write_is_escaped_as_json_has_it(world: World, tmp_path: Path) -> None:
    model = shutil.copytree(world.text_model, tmp_path / "é😀")
    command = [sys.executable, "-m", "secateur", "units", str(model), "--json", "--group-width", "4"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0 and ran.stdout.isascii(), ran.stderr
    assert json.loads(ran.stdout)["model"] == str(model)


# The last resort


def test_what_no_one_foresaw_is_one_sentence_with_the_place_of_a_report(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inventory(*arguments: Any, **settings: Any) -> None:
        raise KeyError("moon")

    monkeypatch.setattr(accounting, "inventory", inventory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = run("units", "gpt2")
    (report,) = tmp_path.iterdir()
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (70, "", 1)
    assert "KeyError" in ran.err and "'moon'" in ran.err and str(report) in ran.err
    assert re.search(r"secateur units gpt2\n(.*\n)*Traceback.*\n(.*\n)*KeyError: 'moon'", report.read_text())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 9 GiB")])
def test_too_little_memory_is_one_sentence(error: Exception, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def inventory(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(accounting, "inventory", inventory)
    assert "no memory left" in check_refused(run("units", "gpt2"))
