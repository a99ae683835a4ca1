"""Run commands in forks of a process that has imported everything: as apart as other processes, and started in milliseconds.

What uses this must have no thread of its own, and must not have computed with torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_SECONDS, WALL_SECONDS = 60, 300
MORE_MEMORY = 6 * 2**30  # that a command may ask for


@dataclass(frozen=True)
class Ran:
    """How a command ended: its exit code, the negative number of the signal that ended it, or None if it did not end."""

    code: int | None
    out: str
    err: str


def run(arguments: Sequence[object], place: Path, *, before: Callable[[], None] = lambda: None, limited: bool = True) -> Ran:
    """Run a command of Secateur's in a fork, with `place` as its folder for what it prints; `before` is called there first."""
    from secateur.cli import app

    def work() -> None:
        sys.argv = ["secateur", *map(str, arguments)]
        before()
        app.main()

    return call(work, place, limited=limited)


def call(work: Callable[[], object], place: Path, *, limited: bool = True) -> Ran:
    """Call a function in a fork, whose processor time and memory are limited; what it started ends with it."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(work, place, limited)
    status = _wait(pid)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    return Ran(code, _read(place / "stdout"), _read(place / "stderr"))


def _child(work: Callable[[], object], place: Path, limited: bool) -> None:
    import resource  # not everywhere

    code: Any = 1
    try:
        os.setsid()  # so that it can be ended with the processes that it starts
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if limited:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, used + MORE_MEMORY))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                code = code or 120
        os._exit(code)


def _wait(pid: int) -> int | None:
    """The status of a child once it ends; None if it does not, and is killed."""
    ended = os.pidfd_open(pid)
    try:
        in_time, _, _ = select.select([ended], [], [], WALL_SECONDS)
    finally:
        os.close(ended)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return status if in_time else None


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def import_all(names: Sequence[str]) -> None:
    """Import modules, so that no fork needs to; those that cannot be imported by name are left out."""
    import importlib

    for name in names:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except Exception:
                continue
