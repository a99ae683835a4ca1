"""One task of a grid, done: plain data in, records out. The same function runs here, in another process, or on a cluster.

A worker keeps the model it loaded last, with its batches and what the dense model scored on them, for the tasks to come.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from secateur import jsonio
from secateur.damage import free_memory
from secateur.data import Batches, Source, check_apart
from secateur.errors import SecateurError, SettingError, first_line
from secateur.evaluate import Evaluation, evaluate
from secateur.experiment.store import Record
from secateur.families import task_of
from secateur.losses import device_of
from secateur.models import digest, load, versions
from secateur.prune import Judging, Settings, choose_units, judge, load_batches
from secateur.selection import Selection
from secateur.units import Unit

Task = dict[str, Any]  # the settings of one choice of units, and the runs that judge it
IMAGE_BYTES = 3 * 224 * 224 * 4
CHANGES = ("delta_loss", "ppl_change_percent", "delta_top1")  # what tables average


class Workplace:
    """What a worker keeps between tasks."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._of: tuple[str, ...] | None = None
        self._model: nn.Module | None = None
        self._processor: Any = None
        self.digest = ""
        self._batches: dict[tuple[Any, ...], Batches] = {}
        self._sources: dict[tuple[Any, ...], Source] = {}
        self._dense: dict[str, Evaluation] = {}

    def open(self, settings: Settings, trust_remote_code: bool) -> nn.Module:
        wanted = (settings.model, settings.device, settings.dtype)
        if self._model is None or self._of != wanted:
            self._forget()  # before there are two of them
            self._model, self._processor = load(
                settings.model, device=settings.device, dtype=settings.dtype, trust_remote_code=trust_remote_code
            )
            self._of, self.digest = wanted, digest(self._model)
        return self._model

    def batches(self, name: str, settings: Settings, split: str, size: int, most: int = 0) -> Batches:
        key = self._key(name, settings, split, size, most)
        if key not in self._batches:
            assert self._model
            if task_of(self._model) == "image":  # images of another seed are not asked for again soon, and are large
                self._batches = {old: kept for old, kept in self._batches.items() if old[1] != split}
            roomy = 2 * size * IMAGE_BYTES < psutil.virtual_memory().available
            self._batches[key] = load_batches(
                self._model, self._processor, name, settings, split=split, size=size, most=most, keep=roomy
            )
            self._sources[key] = self._batches[key].source
        return self._batches[key]

    def source(self, name: str, settings: Settings, split: str, size: int) -> Source:
        """Where such batches come from, also when they have been let go of."""
        known = self._sources.get(self._key(name, settings, split, size, 0))
        return known or self.batches(name, settings, split, size).source

    def _key(self, name: str, settings: Settings, split: str, size: int, most: int) -> tuple[Any, ...]:
        assert self._model
        seed = settings.seed if task_of(self._model) == "image" else None
        return name, split, size, most, settings.seq_len, settings.batch_size, seed

    def dense(self, run: dict[str, Any], batches: Batches) -> Evaluation:
        """What the dense model scores: known from an earlier run's record or task, or measured now."""
        base, key = run["base"], run["base_key"]
        if base:
            if (base["model_digest"], base["data_digest"]) != (self.digest, batches.source.digest):
                raise SettingError(
                    f"The store has {run['model']} on {run['data']} with other weights or other data than are here; "
                    "choose another store with -o, or put back what was there."
                )
            self._dense.setdefault(key, Evaluation.from_json(base["dense"]))
        if key not in self._dense:
            assert self._model
            self._dense[key] = evaluate(self._model, batches)
        return self._dense[key]


_here = Workplace()


def perform(task: Task) -> dict[str, Any]:
    """Do the runs of a task: {"records": one for each}, or {"problem": why it cannot be begun on this machine}."""
    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    asked = Settings(**task["settings"], device=task["device"])
    try:
        settings = dataclasses.replace(asked, model=expanded(asked.model), calibration=expanded(asked.calibration))
        model = _here.open(settings, task["trust_remote_code"])
        if task_of(model) != task["task"]:
            raise SettingError(f"The grid's task is {task['task']!r}, but {asked.model} is a model for {task_of(model)!r}.")
        calibrating = (settings.calibration, settings, "train", settings.calibration_size)
        source = _here.source(*calibrating)
        judged = [_judged(run, settings) for run in task["runs"]]
        for batches in judged:
            check_apart(source, batches.source)
        dense = [_here.dense(run, batches) for run, batches in zip(task["runs"], judged, strict=True)]
        if task["choice"] and task["choice"]["model_digest"] != _here.digest:
            raise SettingError(
                f"The store chose units of {asked.model} with other weights than are here; choose another store."
            )
        if (task["calibration_digest"] or source.digest) != source.digest:
            raise SettingError(
                f"The store chose units of {asked.model} by other texts or images than {asked.calibration} has now; choose "
                "another store with -o, or put back what was there."
            )
    except SecateurError as error:
        return {"problem": str(error)}
    except Exception as error:  # such as too little memory for the dense model
        return _failed(task, error)
    try:
        choice = task["choice"] or _choose(model, _here.batches(*calibrating), settings, task)
    except Exception as error:
        return _failed(task, error)
    about = {
        "model_digest": _here.digest,
        "calibration_digest": source.digest,
        "machine": machine(model),
    }
    records = []
    for i, (batches, base) in enumerate(zip(judged, dense, strict=True)):
        started = time.perf_counter()
        units = tuple(Unit.from_json(unit) for unit in choice["units"])
        try:
            found = judge(model, Selection(units, dataclasses.asdict(settings)), batches, dense=base)
        except Exception as error:
            records.append(failed_record(task, i, _reason(error)))
            continue
        seconds = time.perf_counter() - started
        spent = {"evaluation_seconds": seconds, "total_seconds": choice["selection_seconds"] + seconds}
        reason = _not_finite(found)
        status = {"status": "failed", "reason": reason} if reason else {"status": "done"}
        about["data_digest"] = batches.source.digest
        records.append(_record(task, i) | status | found | choice | spent | about)
    return {"records": [jsonio.to_json(record) for record in records]}


def _failed(task: Task, error: Exception) -> dict[str, Any]:
    return {"records": [failed_record(task, i, _reason(error)) for i in range(len(task["runs"]))]}


def _not_finite(found: dict[str, Any]) -> str:
    """What is not finite in a judgement; empty where all of it is."""
    for name, what in (("pruned", "the loss"), ("dense", "the dense model's loss")):
        if bad := found[name]["nonfinite_batches"]:
            return f"{what} is not finite on {bad} of {len(found[name]['batch_losses'])} batches"
    there = [name for name in CHANGES if name in found]
    return next((f"{name} is not finite" for name in there if not math.isfinite(float(found[name]))), "")


def failed_record(task: Task, i: int, reason: str) -> Record:
    """The record of a run that raised, or whose worker was lost: its configuration, and why."""
    return _record(task, i) | {"status": "failed", "reason": reason}


def _record(task: Task, i: int) -> Record:
    run = task["runs"][i]
    return {
        "key": run["key"],
        "status": "",
        "grid": task["grid"],
        "model": run["model"],
        "data": run["data"],
        "seed": run["seed"],
        "settings": task["settings"],
        "judging": run["judging"],
        "choice_key": task["choice_key"],
        "base_key": run["base_key"],
        "versions": versions(),
    }


def _choose(model: nn.Module, calibration: Batches, settings: Settings, task: Task) -> dict[str, Any]:
    started = time.perf_counter()
    share = task.get("memory_share") or 1
    memory = int(free_memory(device_of(model)) / 2 * share) if share < 1 else None
    selection = choose_units(model, calibration, settings, cache_memory=memory)
    return {
        "units": [unit.to_json() for unit in selection.units],
        "pulls": selection.pulls,
        "forwards": selection.forwards,
        "nonfinite_pulls": selection.nonfinite_pulls,
        "score_passes": min(settings.score_batches, len(calibration)) if settings.scores_batches else 0,
        "selection_seconds": time.perf_counter() - started,
    }


def _judged(run: dict[str, Any], settings: Settings) -> Batches:
    """The batches that judge a run: drawn by its own seed, whichever seed chose the units."""
    judging = Judging(**run["judging"])
    seeded = settings if run["seed"] is None else dataclasses.replace(settings, seed=run["seed"])
    return _here.batches(expanded(judging.data), seeded, "test", judging.size, judging.max_batches)


def expanded(name: str) -> str:
    """A name with the environment's variables filled in, as in $SECATEUR_DATA/imagenette."""
    found = os.path.expandvars(name)
    if missing := re.search(r"\$\{?(\w+)", found):
        raise SettingError(
            f"{name!r} speaks of the environment variable {missing[1]}, which is not set: set it to the folder in which the "
            "rest of the name is found."
        )
    return found


def machine(model: nn.Module) -> dict[str, Any]:
    """Where a run was made: enough to read its timings by."""
    device = device_of(model)
    found = {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": str(device)}
    return found | ({"accelerator": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"model name\s*:\s*(.+)", text)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _reason(error: Exception) -> str:
    """What a failed record says of an exception: its kind, its first line, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
