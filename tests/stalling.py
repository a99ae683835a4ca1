"""Stands in for secateur.experiment.work: two tasks are done, and the third does not end."""

import itertools
import time

from secateur.experiment import work
from secateur.experiment.workers import Outcome, Task
from secateur.workers.pools import Part

TASKS = 2

begun = itertools.count()


def perform(task: Task, part: Part) -> Outcome:
    if next(begun) == TASKS:
        time.sleep(600)
    return work.perform(task, part)
