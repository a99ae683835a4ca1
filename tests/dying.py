"""Stands in for secateur.experiment.work in workers that are to die: every task kills its worker."""

import os
from typing import NoReturn

from secateur.experiment.workers import Task
from secateur.workers.pools import Part


def perform(task: Task, part: Part) -> NoReturn:
    os._exit(7)
