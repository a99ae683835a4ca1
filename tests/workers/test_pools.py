from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from secateur.errors import MissingExtra, SettingError
from secateur.workers.crew import TRIES, WorkerLost
from secateur.workers.pools import Part, Where, crew_at

WORK = "simple_work"


def same(item: Any, worker: Any) -> Any:
    return item


@pytest.mark.parametrize(
    ("where", "complaint"),
    [({"workers": -1}, "workers.*-1"), ({"threads": -1}, "threads.*-1"), ({"workers": 2, "ray": "local"}, "--workers.*--ray")],
)
def test_places_that_cannot_be_are_refused(where: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        Where(**where)


def test_processes_answer_with_their_share_of_the_machine_and_are_gone_at_the_end() -> None:
    others = set(active_children())
    with crew_at(Where(workers=2, threads=3), WORK, "hello") as crew:
        found = [answer for _, answer in crew.perform(range(1, 9), same)]
        assert len(set(active_children()) - others) == 2
    assert sorted(task for task, _, _ in found) == list(range(1, 9))
    assert {part for _, part, _ in found} == {Part(threads=3, memory=0.5)}
    assert os.getpid() not in {process for _, _, process in found}
    assert set(active_children()) <= others


def test_a_process_that_dies_is_replaced_and_a_task_that_kills_three_is_given_up() -> None:
    with crew_at(Where(workers=1), WORK) as crew:
        found = dict(crew.perform([1, "die", 2], same))
    assert [found[1][0], found[2][0]] == [1, 2]
    assert isinstance(found["die"], WorkerLost)
    assert f"{TRIES} times" in str(found["die"]) and "exit code 7" in str(found["die"])


def test_processes_that_die_of_the_greeting_are_one_sentence() -> None:
    with crew_at(Where(workers=1), WORK, "die") as crew, pytest.raises(SettingError, match=r"start.*exit code 7"):
        list(crew.perform([1], same))


BUSY = """
import sys
from pathlib import Path
from secateur.workers.pools import Where, crew_at

if __name__ == "__main__":
    with crew_at(Where(workers=1), "simple_work") as crew:
        list(crew.perform([Path(sys.argv[1])], lambda item, worker: item))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_busy_worker_survives_its_driver(stop: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    driver = subprocess.Popen(
        [sys.executable, str(tmp_path / "busy.py"), str(tmp_path / "process")],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's "&" ignores it
    )
    try:
        deadline = monotonic() + 120
        while not ((tmp_path / "process").exists() and (tmp_path / "process").read_text()):
            assert driver.poll() is None and monotonic() < deadline, "the worker did not come to its task"
            sleep(0.01)
        worker = psutil.Process(int((tmp_path / "process").read_text()))
        driver.send_signal(stop)
        driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    worker.wait(timeout=60)


def test_ray_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match="'ray'"), crew_at(Where(ray="local"), WORK):
        pass
