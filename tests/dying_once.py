"""Stands in for secateur.experiment.work: the first task of all kills its worker, the others are done."""

import os
from pathlib import Path

from secateur.experiment import work
from secateur.experiment.workers import Outcome, Task
from secateur.workers.pools import Part

DEATH = "SECATEUR_TEST_DEATH"  # the environment variable with the path of the file that says that a worker has died


def perform(task: Task, part: Part) -> Outcome:
    try:
        Path(os.environ[DEATH]).touch(exist_ok=False)
    except FileExistsError:
        return work.perform(task, part)
    os._exit(9)
