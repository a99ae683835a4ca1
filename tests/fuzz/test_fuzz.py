"""A part of the fuzzer, and eight kills; `make fuzz` runs all of it. What counts as rightly answered is tested here too."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from forks import Ran
from kinds import defect
from mutations import Spoil, spoil_bytes, spoil_json, spoil_lines, spoil_toml

CASES, KILLS = 1, 8


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks are waited for in Linux's way")
def test_bad_input_and_kills_are_answered_rightly(tmp_path: Path) -> None:
    report = tmp_path / "defects.jsonl"
    program = Path(__file__).with_name("run.py")
    command = [sys.executable, program, "--cases", CASES, "--kills", KILLS, "--report", report]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}\n{report.read_text() if report.exists() else ''}"
    tried, right = next(line for line in ran.stdout.splitlines() if line.startswith("all ")).split()[1:]
    assert tried == right and int(tried) > 20 * CASES + KILLS


@pytest.mark.parametrize(
    ("code", "err", "wrong"),
    [
        (0, "loading x ...\n", ""),
        (2, "loading x ...\nerror: There is no x.\n", ""),
        (0, "error: There is no x.\n", "success with an error"),
        (2, "", "without a sentence"),
        (1, "", "exit code 1"),
        (70, "error: Something went wrong.\n", "unforeseen"),
        (1, "Traceback (most recent call last):\n  x\nKeyError: 'y'\n", "KeyError: 'y'"),
        (2, f"error: {'a' * 2000}\n", "2007 characters"),
        (-11, "", "signal 11"),
        (None, "", "did not end"),
    ],
)
def test_a_success_or_one_sentence_is_right_and_nothing_else(code: int | None, err: str, wrong: str) -> None:
    found = defect(Ran(code, "", err))
    assert wrong in found and bool(found) == bool(wrong)


@pytest.mark.parametrize(
    ("spoil", "content"),
    [
        (spoil_bytes, b"some text"),
        (spoil_json, b'{"a": [1, {"b": "c"}]}'),
        (spoil_lines, b'{"a": 1}\n{"a": 2}\n'),
        (spoil_toml, b'a = 1\n[b]\nc = ["d"]\n'),
    ],
)
def test_a_seed_spoils_a_file_in_one_way_and_others_in_others(spoil: Spoil, content: bytes) -> None:
    spoilt = [spoil(content, random.Random(seed)) for seed in range(100)]
    assert spoilt == [spoil(content, random.Random(seed)) for seed in range(100)]
    assert len(set(spoilt)) > 50
    if spoil is spoil_json:
        assert sum(_is_json(one) for one in spoilt) > 50  # most get past the parser


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True
