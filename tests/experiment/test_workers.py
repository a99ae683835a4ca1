from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest

from dying_once import DEATH
from grids import grid_command, lasting, n_lines, records_of, write_grid
from secateur.experiment import workers
from secateur.experiment.grid import GridResult, read_grid, run_grid
from secateur.watcher import GridProgress
from secateur.workers.crew import TRIES
from secateur.workers.pools import Where
from worlds import World

pytestmark = pytest.mark.usefixtures("fresh_workplace")


@pytest.mark.slow
def test_two_processes_make_the_records_that_one_does(world: World, tmp_path: Path) -> None:
    grid = read_grid(write_grid(world, tmp_path))
    run_grid(grid, tmp_path / "here")
    result = run_grid(grid, tmp_path / "there", where=Where(workers=2, threads=1))
    assert result == GridResult(len(grid.runs), 0, 0)
    assert lasting(tmp_path / "here") == lasting(tmp_path / "there")


@pytest.mark.slow
def test_a_worker_that_dies_of_a_task_is_replaced_and_its_runs_are_done(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    death = tmp_path / "death"
    monkeypatch.setenv(DEATH, str(death))
    monkeypatch.setattr(workers, "WORK", "dying_once")
    grid = read_grid(write_grid(world, tmp_path))
    result = run_grid(grid, tmp_path / "store", where=Where(workers=2, threads=1))
    assert death.exists() and result == GridResult(len(grid.runs), 0, 0)
    assert n_lines(tmp_path / "store") == len(grid.runs)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_its_runs_are_done(world: World, tmp_path: Path) -> None:
    grid = read_grid(write_grid(world, tmp_path))
    others, killed = set(active_children()), []

    def kill_the_only_one(progress: GridProgress) -> None:
        if progress.done == 2:
            (worker,) = set(active_children()) - others
            worker.kill()
            killed.append(worker)

    result = run_grid(grid, tmp_path / "store", where=Where(workers=1, threads=1), progress=kill_the_only_one)
    assert len(killed) == 1 and result == GridResult(len(grid.runs), 0, 0)
    assert n_lines(tmp_path / "store") == len(grid.runs)


@pytest.mark.slow
def test_a_task_that_kills_every_worker_becomes_a_failed_record(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "WORK", "dying")
    text = write_grid(world, tmp_path).read_text().split("[[table]]")[0] + '[[table]]\nnumber = "4"\nmethods = ["magnitude"]\n'
    (tmp_path / "one.toml").write_text(text)
    assert run_grid(read_grid(tmp_path / "one.toml"), tmp_path / "store", where=Where(workers=2)) == GridResult(0, 1, 0)
    (record,) = records_of(tmp_path / "store")
    assert f"{TRIES} times" in record.reason and "exit code 7" in record.reason


@pytest.mark.slow
def test_a_grid_on_a_ray_cluster_survives_the_loss_of_a_worker_and_makes_the_same_records(world: World, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    path, store, death = write_grid(world, tmp_path), tmp_path / "store", tmp_path / "death"
    command, environment = grid_command(path, store, "--ray", "local", "--json", work="dying_once")
    ran = subprocess.run(command, capture_output=True, text=True, env=environment | {DEATH: str(death)}, timeout=400)
    grid = read_grid(path)
    assert ran.returncode == 0, ran.stderr
    assert death.exists(), "no worker was lost"
    assert json.loads(ran.stdout) == {"done": len(grid.runs), "failed": 0, "left": 0, "problems": []}
    run_grid(grid, tmp_path / "here")
    assert lasting(store) == lasting(tmp_path / "here")


@pytest.mark.slow
def test_a_ray_address_where_nobody_answers_is_one_sentence(world: World, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    command, environment = grid_command(write_grid(world, tmp_path), tmp_path / "store", "--ray", "127.0.0.1:1")
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 2 and "127.0.0.1:1" in ran.stderr and "Ray" in ran.stderr
    assert "Traceback" not in ran.stderr


def trap(folder: Path) -> Path:
    """A folder with modules that are named like Python's and torch's, and that leave a file if one imports them."""
    folder.mkdir()
    for name in ("pickle", "torch", "transformers"):
        (folder / f"{name}.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()\n")
    return folder


@pytest.mark.parametrize("where", [["--workers", "1"], pytest.param(["--ray", "local"], marks=pytest.mark.slow)], ids=str)
def test_no_worker_runs_code_from_the_folder_in_which_the_command_is_started(
    where: list[str], world: World, tmp_path: Path
) -> None:
    if "--ray" in where:
        pytest.importorskip("ray", reason="the extra ray is not installed")
    only = '[[table]]\nnumber = "4"\nmethods = ["magnitude"]\n'
    grid = write_grid(world, tmp_path, change=lambda text: text.split("[[table]]")[0] + only)
    # As pip's script `secateur` does it: the folder of the script is where Python looks first, not the working directory.
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "secateur"
    script.write_text("from secateur.cli.app import main\nif __name__ == '__main__':\n    main()\n")
    folder = trap(tmp_path / "trap")
    command = [sys.executable, str(script), "grid", str(grid), "-o", str(tmp_path / "store"), "--json", *where]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert [path.name for path in folder.glob("*.ran")] == []
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"done": 1, "failed": 0, "left": 0, "problems": []}
