"""Kills: a command is ended at random moments, outright, and started again; what it writes is to be as if nothing had been.

A moment is a random time of the run, or one of its file operations: these are few, and what they leave half done matters.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import forks
from grids import TIMINGS
from kinds import CHOICE, FLAGS, PRUNE, Arguments, Good
from secateur.cut import heal as healing

FILE_EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.listdir",
    "shutil.rmtree",
    "tempfile.mkdtemp",
}
ENDED_BY = (-signal.SIGKILL, -signal.SIGALRM, 0)  # 0: it had ended before
NO_CLUSTER = "No Ray cluster answers at 'local'"  # on a busy machine its start may take longer than Ray waits
UNLIKE = re.compile(r'"(\w*seconds|replayed_pulls|machine)": [^,}\n]+')  # what differs from one run to the next


def select(good: Good, place: Path) -> Arguments:
    return ["select", good.root / "gpt2", "--calibration", good.root / "text", *FLAGS, *CHOICE, "-o", place / "chosen.json"]


def prune(good: Good, place: Path) -> Arguments:
    flags = [*FLAGS, *CHOICE, *PRUNE, "--repair"]
    return ["prune", good.root / "gpt2", "--calibration", good.root / "text", *flags, "-o", place]


def shrink(good: Good, place: Path) -> Arguments:
    selection = good.root / "gpt2-small" / "selection.json"
    return ["shrink", good.root / "gpt2", "--selection", selection, "--device", "cpu", "--no-measure", "--repair", "-o", place]


def heal(good: Good, place: Path) -> Arguments:
    flags = ["--calibration", good.root / "text", "--evaluation-batches", 2, "--device", "cpu", "--no-measure"]
    return ["heal", good.root / "gpt2", good.root / "gpt2-small", *flags, "--heal", "20steps", "-o", place]


def grid(good: Good, place: Path) -> Arguments:
    return ["grid", good.root / "tiny.toml", "-o", place]


class Killed(NamedTuple):
    command: Callable[[Good, Path], Arguments]
    share: float  # of all kills
    options: tuple[object, ...] = ()
    seconds: float = 0  # that it may take, where its start is too slow to measure them; it leaves what `grid` does here


KILLED = {
    "kills of select": Killed(select, 0.25),
    "kills of prune": Killed(prune, 0.4),
    "kills of shrink": Killed(shrink, 0.1),
    "kills of heal": Killed(heal, 0.05),
    "kills of grid": Killed(grid, 0.1),
    "kills of grid in processes": Killed(grid, 0.05, ("--workers", 1, "--threads", 1), seconds=8),
    "kills of grid on Ray": Killed(grid, 0.05, ("--ray", "local"), seconds=20),
}


def run_kills(name: str, n_kills: int, good: Good, root: Path, rng: random.Random) -> Iterator[str]:
    """What was wrong after each kill; "" if nothing was."""
    command, _, options, seconds = KILLED[name]
    if seconds:
        whole, events = _lasting(good.root / "store"), 0
    else:
        whole, seconds, events = _whole([*command(good, root / "whole"), *options], root)
    for number in range(n_kills):
        place = root / f"killed-{number}"
        again = [*command(good, place), *options]
        for _ in range(rng.choice((1, 1, 2))):  # now and then twice
            at = rng.randrange(1, events + 1) if events and rng.random() < 0.5 else rng.uniform(0.001, seconds)
            killed = forks.run(again, root, before=lambda at=at: _kill_at(at), limited=False)  # type: ignore[misc]
        if killed.code not in ENDED_BY and NO_CLUSTER not in killed.err:
            yield f"the run that was to be killed ended with {killed.code}: {killed.err[-300:]}"
            continue
        for _ in range(3):
            ran = forks.run(again, root, limited=False)
            if NO_CLUSTER not in ran.err:
                break
        if ran.code != 0:
            yield f"started again, it ended with {ran.code}: {ran.err[-300:]}"
        else:
            yield _difference(whole, _lasting(place))
        shutil.rmtree(place, ignore_errors=True)


def _whole(command: Arguments, root: Path) -> tuple[dict[str, Any], float, int]:
    """What a run leaves that is not killed, its seconds, and its file operations."""
    shared = mmap.mmap(-1, 8)  # with the fork

    def count(number: int) -> None:
        healing.EVERY = 0.0  # as in the runs that are killed
        shared[:] = number.to_bytes(8)

    started = time.monotonic()
    ran = forks.run(command, root, before=lambda: _at_each_event(count), limited=False)
    if ran.code != 0:
        raise RuntimeError(f"{command} ended with {ran.code}: {ran.err}")
    return _lasting(root / "whole"), time.monotonic() - started, int.from_bytes(shared[:])


def _kill_at(moment: float) -> None:
    """End this process outright at a file operation, by its number, or after so many seconds."""
    healing.EVERY = 0.0  # a state after each step, so that there is one to be killed at
    if isinstance(moment, int):
        _at_each_event(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == moment else None)
    else:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, moment)


def _at_each_event(call: Callable[[int], None]) -> None:
    numbers = itertools.count(1)
    sys.addaudithook(lambda event, details: call(next(numbers)) if event in FILE_EVENTS else None)


def _lasting(folder: Path) -> dict[str, Any]:
    """The files of a folder without what differs from one run to the next."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name == "results.jsonl":
            records = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = {
                record["key"]: {field: value for field, value in record.items() if field not in {*TIMINGS, "digest"}}
                for record in records
            }
        else:
            found[name] = UNLIKE.sub("", path.read_text()) if path.suffix == ".json" else path.read_bytes()
    return found


def _difference(whole: dict[str, Any], found: dict[str, Any]) -> str:
    names = sorted(name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name))
    return f"other files than without a kill: {', '.join(names)}" if names else ""
