"""One search on real workers: processes of this machine and a Ray cluster, from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import psutil
import pytest

import secateur as sc
from secateur.watcher import Progress
from worlds import SMALL, Listener, Ran, Run, World, check_refused, prune_command

KEPT = ("selection.json", "journal.jsonl")
MANY = ["--pulls-per-step", 400, "--method", "greedy", "--ratio", 0.9]


def same_files(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in KEPT)


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "secateur", *map(str, arguments)]
    paths = os.pathsep.join(os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    heed = None if sys.platform == "win32" else lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's "&" ignores it
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, preexec_fn=heed, **pipes)


class Killer(Listener):
    """Kills one of the workers at the fifth pull."""

    def __init__(self) -> None:
        super().__init__()
        self._others, self.killed = set(active_children()), 0

    def pull(self, progress: Progress) -> None:
        super().pull(progress)
        if len(self.pulls) == 5:
            (set(active_children()) - self._others).pop().kill()
            self.killed += 1


@pytest.mark.slow
def test_a_worker_that_is_killed_midway_changes_no_byte_and_all_are_gone_in_the_end(world: World, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "method": "greedy", "pulls_per_step": 12, "calibration": str(world.text)}
    sc.prune(str(world.text_model), out=tmp_path / "one", device="cpu", **settings)
    others, killer = set(active_children()), Killer()
    sc.prune(str(world.text_model), out=tmp_path / "many", device="cpu", workers=2, watcher=killer, **settings)
    assert killer.killed == 1 and set(active_children()) <= others
    assert same_files(tmp_path / "one", tmp_path / "many")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_a_run_with_workers_that_is_stopped_leaves_none_and_goes_on_to_the_same_bytes(
    stop: signal.Signals, world: World, tmp_path: Path, run: Run
) -> None:
    command, journal = prune_command(world, tmp_path / "cut", *MANY), tmp_path / "cut" / "journal.jsonl"
    driver = start(*command, "--workers", 2)
    try:
        while not journal.exists() or journal.read_bytes().count(b"\n") < 10:
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.01)
        workers = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(stop)
        out, err = driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    assert len(workers) >= 2
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    if stop == signal.SIGINT:
        assert (driver.returncode, len(Ran(130, out, err).complaints)) == (130, 1), err
    assert run(*command, "--workers", 1).code == 0
    assert run(*prune_command(world, tmp_path / "whole", *MANY)).code == 0
    assert same_files(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_a_ray_cluster_makes_the_same_files_and_prints_nothing_of_its_own(world: World, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    options = ["--method", "auto", "--budget", "30forwards"]
    driver = start(*prune_command(world, tmp_path / "ray", *options, "--ray", "local", "--json"))
    out, err = driver.communicate(timeout=400)
    ran = Ran(driver.returncode, out, err)
    assert (ran.code, ran.complaints) == (0, []), err
    assert ran.document
    assert run(*prune_command(world, tmp_path / "here", *options)).code == 0
    assert same_files(tmp_path / "ray", tmp_path / "here")


@pytest.mark.slow
def test_a_ray_address_where_nobody_answers_is_one_sentence(world: World, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    ran = run(*prune_command(world, tmp_path / "ray", "--ray", "127.0.0.1:1"))
    assert ran.code == 2 and len(ran.complaints) == 1
    assert "127.0.0.1:1" in ran.complaints[0] and "Ray" in ran.complaints[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", -1], ["workers", "-1"]),
        (["--workers", 10**6], ["workers", "1,024"]),
        (["--workers", 2, "--ray", "local"], ["--workers", "--ray"]),
        (["--ray", "local", "--gpus-per-worker", -1], ["gpus per worker", "-1"]),
    ],
    ids=str,
)
def test_workers_that_cannot_be_are_refused(
    options: list[object], words: list[str], world: World, tmp_path: Path, run: Run
) -> None:
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", *options)), tmp_path / "out")
    assert all(word in sentence for word in words)
