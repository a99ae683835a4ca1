"""What no file can make a command do: run a program, read a pickle, reach outside its folder, or replace what is not ours."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image

from secateur.data import images
from worlds import Run, World, check_refused, prune_command

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
