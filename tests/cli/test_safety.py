"""What no file can make a command do: run a program, read a pickle, reach outside its folder, or replace what is not ours."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import EpsImagePlugin, Image
from safetensors.torch import load_file, save_file

from secateur.data import images
from worlds import Run, World, check_refused, prune_command, with_config

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


def image_world(world: World, place: Path) -> World:
    """The world with images of its own."""
    return World(world.text_model, world.image_model, world.text, Path(shutil.copytree(world.images, place / "images")))


def program(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a program of this name leaves if anyone starts it."""
    place.mkdir()
    (place / name).write_text(f"#!/bin/sh\ntouch {place / 'started'}\n")
    (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    return place / "started"


def test_a_file_named_like_an_image_starts_no_program(
    world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = program(tmp_path / "bin", "gs", monkeypatch)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # not looked for yet
    mine = image_world(world, tmp_path)
    trap = mine.images / "train" / "LABEL_0" / "x.png"
    trap.write_bytes(EPS)
    ran = run(*prune_command(mine, tmp_path / "out", task="image"))
    assert not started.exists()
    sentence = check_refused(ran, tmp_path / "out")
    assert str(trap) in sentence and "JPEG, PNG, WEBP, BMP, GIF" in sentence


def test_an_image_of_too_many_pixels_is_refused_before_it_is_unpacked(
    world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MOST_PIXELS", 1000)
    mine = image_world(world, tmp_path)
    large = mine.images / "train" / "LABEL_0" / "large.png"
    Image.new("RGB", (40, 30)).save(large)
    sentence = check_refused(run(*prune_command(mine, tmp_path / "out", task="image")), tmp_path / "out")
    assert re.search(rf"{re.escape(str(large))}.*40 x 30.*1,000", sentence)


# Weights


def copied(world: World, place: Path) -> Path:
    return Path(shutil.copytree(world.text_model, place / "model"))


def indexed(world: World, place: Path, file: str) -> Path:
    """The model with an index that says that all its tensors are in this file."""
    folder = copied(world, place)
    tensors = list(load_file(folder / "model.safetensors"))
    shutil.move(folder / "model.safetensors", folder / "real.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def index_of_a_pickle(world: World, place: Path) -> Path:
    folder = indexed(world, place, "weights.bin")
    torch.save(load_file(folder / "real.safetensors"), folder / "weights.bin")
    return folder


def index_to_outside(world: World, place: Path) -> Path:
    folder = indexed(world, place, "../outside.safetensors")
    shutil.copyfile(folder / "real.safetensors", place / "outside.safetensors")
    return folder


def another_index(world: World, place: Path) -> Path:
    """The config itself names the index."""
    folder = index_of_a_pickle(world, place)
    (folder / "inner").mkdir()
    shutil.move(folder / "model.safetensors.index.json", folder / "inner" / "w.safetensors.index.json")
    return with_config(folder, transformers_weights="inner/w.safetensors.index.json")


def index_of_nothing(world: World, place: Path) -> Path:
    folder = indexed(world, place, "real.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["real.safetensors"]}')
    return folder


def with_adapter(world: World, place: Path) -> Path:
    folder = copied(world, place)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "gpt2"}')
    return folder


def with_more_blocks(world: World, place: Path) -> Path:
    """The weights of three blocks, and a config that says two."""
    return with_config(copied(world, place), n_layer=2)


def with_kernel(world: World, place: Path) -> Path:
    return with_config(copied(world, place), attn_implementation="owner/repo")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (index_of_a_pickle, r"'weights\.bin'.*safetensors"),
        (another_index, r"'weights\.bin'.*safetensors"),
        (index_to_outside, r"'\.\./outside\.safetensors'.*own folder"),
        (index_of_nothing, "weight_map"),
        (with_adapter, "adapter.*merge_and_unload"),
        (with_more_blocks, r"more blocks.*h\.2\."),
        (with_kernel, "'owner/repo'.*not fetched"),
    ],
)
def test_weights_are_read_from_the_safetensors_of_the_model_and_from_nowhere_else(
    made: Callable[[World, Path], Path], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    folder = made(world, tmp_path)
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", model=folder)), tmp_path / "out")
    assert re.search(said, sentence) and str(folder) in sentence


def test_an_index_of_safetensors_in_the_folder_is_read(world: World, tmp_path: Path, run: Run) -> None:
    ran = run(*prune_command(world, tmp_path / "out", model=indexed(world, tmp_path, "real.safetensors")))
    assert (ran.code, ran.complaints) == (0, [])


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, left: Path) -> None:
        self.left = left

    def __reduce__(self) -> Any:
        return Path.touch, (self.left,)


@pytest.mark.parametrize("prefix", ["timm:local-dir:", "timm:", ""])
def test_a_timm_folder_is_read_from_safetensors_alone(prefix: str, world: World, tmp_path: Path, run: Run) -> None:
    timm: Any = pytest.importorskip("timm")
    folder, small = tmp_path / "model", {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_classes": 3}
    timm.models.save_for_hf(
        timm.create_model("vit_tiny_patch16_224", **small), folder, model_args=small, safe_serialization=True
    )
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    command = prune_command(world, tmp_path / "out", task="image", model=f"{prefix}{folder}")
    refused = check_refused(run(*command))
    assert "safetensors" in refused and "pickle" not in refused
    torch.save(weights, folder / "pytorch_model.bin")  # nothing bad in it, and still not read
    assert "safetensors" in check_refused(run(*command))
    assert not (tmp_path / "exploded").exists()
    save_file(weights, folder / "model.safetensors")
    assert run("units", f"{prefix}{folder}").code == 0


# Places


def fifo(path: Path) -> None:
    os.mkfifo(path)


def socket_file(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only an administrator makes devices")


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


SPECIAL = (fifo, socket_file, device, link_to_fifo)


def writers(world: World, place: Path) -> dict[str, list[object]]:
    """Commands that write one file, at this place."""
    data = ("--device", "cpu", "--seq-len", 16)
    return {
        "bench": ["bench", world.text_model, "--device", "cpu", "--pulls", 1, "--json", place],
        "evaluate": ["evaluate", world.text_model, "--data", world.text, *data, "-o", place],
        "select": ["select", world.text_model, "--calibration", world.text, *data, "--method", "random", "-o", place],
    }


@pytest.mark.parametrize("command", ["bench", "evaluate", "select"])
@pytest.mark.parametrize("made", SPECIAL)
def test_a_device_or_a_pipe_is_not_replaced(
    made: Callable[[Path], None], command: str, world: World, tmp_path: Path, run: Run
) -> None:
    place = tmp_path / "out.json"
    made(place)
    before = os.lstat(place)
    sentence = check_refused(run(*writers(world, place)[command]))
    assert str(place) in sentence and "not a regular file" in sentence
    assert os.path.samestat(before, os.lstat(place))


@pytest.mark.parametrize("command", ["bench", "evaluate", "select"])
@pytest.mark.parametrize("content", ["my thesis", "{}", '["rows"]'])
def test_a_file_that_is_not_ours_is_not_replaced(content: str, command: str, world: World, tmp_path: Path, run: Run) -> None:
    place = tmp_path / "out.json"
    place.write_text(content)
    assert str(place) in check_refused(run(*writers(world, place)[command]))
    assert place.read_text() == content


@pytest.mark.parametrize("command", ["bench", "evaluate", "select"])
def test_a_link_stays_and_the_file_it_leads_to_is_written_and_replaced(
    command: str, world: World, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "place").mkdir()
    link = tmp_path / "out.json"
    link.symlink_to(Path("place") / "real.json")
    for _ in range(2):  # the second finds the file that the first wrote
        assert run(*writers(world, link)[command]).code == 0
        assert link.is_symlink() and "{" in (tmp_path / "place" / "real.json").read_text()


@pytest.mark.parametrize("made", [fifo, device])
def test_what_may_never_end_is_not_read(made: Callable[[Path], None], world: World, tmp_path: Path, run: Run) -> None:
    made(tmp_path / "x")
    x = tmp_path / "x"
    for arguments in (
        prune_command(world, tmp_path / "out", "--calibration", x),
        prune_command(world, tmp_path / "out", "--config", x),
        ["evaluate", world.text_model, "--data", world.text, "--selection", x],
        ["grid", x, "-o", tmp_path / "store"],
    ):
        assert str(x) in check_refused(run(*arguments), tmp_path / "out", tmp_path / "store")
