"""Stands in for secateur.experiment.work in workers that are to die: every task kills its worker."""

import os
from typing import NoReturn

from secateur.experiment.workers import Part, Task


def perform(task: Task, part: Part) -> NoReturn:
    os._exit(7)
