"""Do one task of a grid: a Task in, records out. The same function runs in this process, in another, or on a cluster.

A worker keeps the model that it loaded last, with its batches and the dense model's evaluations, for the next tasks.
"""

from __future__ import annotations

import math
import os
import platform
import re
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from secateur.data.batches import Batches, check_apart
from secateur.data.check import remarks
from secateur.data.load import load_batches
from secateur.errors import SecateurError, SettingError, first_line
from secateur.experiment.store import DONE, FAILED, Record
from secateur.experiment.workers import KnownChoice, Outcome, Task, TaskRun
from secateur.judgement import Evaluation, Judgement
from secateur.measure import flops
from secateur.measure.evaluate import evaluate
from secateur.measure.judge import judge
from secateur.model.families import task_of
from secateur.model.loading import Opened, open_model, versions
from secateur.model.losses import device_of, evaluating, part_losses
from secateur.search.damage import free_memory
from secateur.selection import Selection, Source
from secateur.settings import Machine, Provenance, Settings
from secateur.steps import choose
from secateur.workers.pools import Part

IMAGE_BYTES = 3 * 224 * 224 * 4
CHANGES = ("delta_loss", "ppl_change_percent", "delta_top1")  # the changes that tables average


class Workplace:
    """The model, batches and dense evaluations that a worker keeps between tasks."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._model_key: tuple[str, ...] | None = None
        self._opened: Opened | None = None
        self._batches: dict[tuple[Any, ...], Batches] = {}
        self._sources: dict[tuple[Any, ...], Source] = {}
        self._dense: dict[str, Evaluation] = {}
        self._flops: dict[Any, float] = {}
        self.remarks: list[str] = []  # about the batches that were read

    @property
    def opened(self) -> Opened:
        assert self._opened
        return self._opened

    def open(self, settings: Settings, trust_remote_code: bool) -> Opened:
        """The model of the settings, loaded unless it is the one kept."""
        key = (settings.model, settings.device, settings.dtype)
        if self._opened is None or self._model_key != key:
            self._forget()  # first, so that memory never holds two models
            self._opened = open_model(
                settings.model, device=settings.device, dtype=settings.dtype, trust_remote_code=trust_remote_code
            )
            self._model_key = key
        return self._opened

    def batches(self, name: str, settings: Settings, split: str, size: int, most: int = 0) -> Batches:
        key = self._key(name, settings, split, size, most)
        if key not in self._batches:
            model = self.opened.model
            if task_of(model) == "image":  # images are large, and those of another seed are not needed soon
                self._batches = {old: batches for old, batches in self._batches.items() if old[1] != split}
            keep = 2 * size * IMAGE_BYTES < psutil.virtual_memory().available
            self._batches[key] = load_batches(
                model, self.opened.processor, name, settings, split=split, size=size, most=most, keep=keep
            )
            self._sources[key] = self._batches[key].source
            if split == "train" or name != settings.calibration:  # of the same data all has been said
                self.remarks += remarks(model, self.opened.processor, self._batches[key])
        return self._batches[key]

    def source(self, name: str, settings: Settings, split: str, size: int) -> Source:
        """The source of such batches, which need not be in memory any more."""
        known = self._sources.get(self._key(name, settings, split, size, 0))
        return known or self.batches(name, settings, split, size).source

    def _key(self, name: str, settings: Settings, split: str, size: int, most: int) -> tuple[Any, ...]:
        seed = settings.seed if task_of(self.opened.model) == "image" else None
        cut = (settings.seq_len, settings.batch_size, settings.documents, settings.holdout, settings.loss)
        return name, split, size, most, *cut, seed

    def pass_flops(self, batches: Batches) -> float:
        """The FLOPs of a forward pass of the first batch."""
        batch = batches[0]
        key = tuple(sorted((name, tuple(tensor.shape)) for name, tensor in batch.items()))
        if key not in self._flops:
            model = self.opened.model
            with torch.inference_mode(), evaluating(model):
                self._flops[key] = flops.count(lambda: part_losses(model, batch, 1))
        return self._flops[key]

    def dense(self, run: TaskRun, batches: Batches) -> Evaluation:
        """The dense model's evaluation: from an earlier record or task, or measured now."""
        if run.base:
            if (run.base.model_digest, run.base.data_digest) != (self.opened.digest, batches.source.digest):
                raise SettingError(
                    f"The store's records of {run.model} on {run.data} were made with other weights or data than this machine "
                    "has; choose another store with -o, or restore the earlier files."
                )
            self._dense.setdefault(run.base_key, run.base.dense)
        if run.base_key not in self._dense:
            self._dense[run.base_key] = evaluate(self.opened.model, batches)
        return self._dense[run.base_key]


_workplace = Workplace()


def forget() -> None:
    """Drop the model, batches and evaluations that were kept."""
    global _workplace
    _workplace = Workplace()


def perform(task: Task, part: Part) -> Outcome:
    """Do the runs of a task. If its model or data cannot be loaded, that is a problem of this machine, not a failed run."""
    if part.threads:
        torch.set_num_threads(part.threads)
    requested = task.settings
    try:
        settings = replace(requested, model=expanded(requested.model), calibration=expanded(requested.calibration))
        opened = _workplace.open(settings, task.trust_remote_code)
        if task_of(opened.model) != task.task:
            raise SettingError(
                f"The grid's task is {task.task!r}, but {requested.model} is a model for {task_of(opened.model)!r}."
            )
        calibration = (settings.calibration, settings, "train", settings.calibration_size or 0)
        source = _workplace.source(*calibration)
        evaluation = [_evaluation_batches(run, settings) for run in task.runs]
        for batches in evaluation:
            check_apart(source, batches.source)
        dense = [_workplace.dense(run, batches) for run, batches in zip(task.runs, evaluation, strict=True)]
        _check_same(task, opened, source)
    except SecateurError as error:
        return Outcome(problem=str(error))
    except Exception as error:  # such as not enough memory for the dense model
        return _failed(task, error)
    try:
        choice = task.choice or _choose(opened, _workplace.batches(*calibration), settings, part)
    except Exception as error:
        return _failed(task, error)
    selection = Selection(choice.units, Provenance(settings, opened.digest, source.digest))
    records = []
    for run, batches, base in zip(task.runs, evaluation, dense, strict=True):
        started = time.perf_counter()
        try:
            judgement = judge(opened.model, selection, batches, dense=base)
        except Exception as error:
            records.append(failed_record(task, run, _reason(error)))
            continue
        seconds = time.perf_counter() - started
        records.append(_record(task, run, opened, source, batches.source, choice, judgement, seconds))
    return Outcome(records=tuple(records), remarks=tuple(_workplace.remarks))


def _check_same(task: Task, opened: Opened, source: Source) -> None:
    """Refuse to combine units from the store with other weights or other calibration data."""
    if task.choice and task.model_digest != opened.digest:
        raise SettingError(
            f"The store's units of {task.settings.model} were chosen with other weights than this machine has; choose another "
            "store with -o, or restore the earlier weights."
        )
    if (task.calibration_digest or source.digest) != source.digest:
        raise SettingError(
            f"The store's units of {task.settings.model} were chosen by other texts or images than {task.settings.calibration} "
            "has now; choose another store with -o, or restore the earlier data."
        )


def _record(
    task: Task,
    run: TaskRun,
    opened: Opened,
    calibration: Source,
    data: Source,
    choice: KnownChoice,
    judgement: Judgement,
    seconds: float,
) -> Record:
    reason = _not_finite(judgement)
    return replace(
        failed_record(task, run, reason),
        status=FAILED if reason else DONE,
        judgement=replace(judgement, pulls=choice.pulls, forwards=choice.forwards, nonfinite_pulls=choice.nonfinite_pulls),
        score_passes=choice.score_passes,
        passes=choice.passes,
        pass_flops=choice.pass_flops,
        progress=choice.progress,
        selection_seconds=choice.selection_seconds,
        evaluation_seconds=seconds,
        total_seconds=choice.selection_seconds + seconds,
        model_digest=opened.digest,
        calibration_digest=calibration.digest,
        data_digest=data.digest,
        machine=machine(opened.model),
    )


def _failed(task: Task, error: Exception) -> Outcome:
    return Outcome(records=tuple(failed_record(task, run, _reason(error)) for run in task.runs))


def _not_finite(judgement: Judgement) -> str:
    """Says what is not finite in a judgement; empty if everything is finite."""
    for evaluation, name in ((judgement.zeroed, "the loss"), (judgement.dense, "the dense model's loss")):
        if n_bad := evaluation.nonfinite_batches:
            return f"{name} is not finite on {n_bad} of {len(evaluation.batch_losses)} batches"
    values = {name: judgement.changes[name] for name in CHANGES if name in judgement.changes}
    return next((f"{name} is not finite" for name, value in values.items() if not math.isfinite(value)), "")


def failed_record(task: Task, run: TaskRun, reason: str) -> Record:
    """The record of a run that raised an error or whose worker died: its configuration and the reason."""
    return Record(
        key=run.key,
        status=FAILED,
        grid=task.grid,
        model=run.model,
        data=run.data,
        seed=run.seed,
        settings=task.settings,
        judging=run.judging,
        choice_key=task.choice_key,
        base_key=run.base_key,
        versions=versions(),
        reason=reason,
    )


def _choose(opened: Opened, calibration: Batches, settings: Settings, part: Part) -> KnownChoice:
    started = time.perf_counter()
    memory = int(free_memory(device_of(opened.model)) / 2 * part.memory) if part.memory < 1 else None
    selection = choose(opened, calibration, settings, machine=Machine(cache_memory=memory))
    seconds = time.perf_counter() - started
    return KnownChoice(
        units=selection.units,
        pulls=selection.pulls,
        forwards=selection.forwards,
        nonfinite_pulls=selection.nonfinite_pulls,
        score_passes=settings.score_passes(len(calibration)),
        selection_seconds=seconds,
        passes=selection.passes,
        pass_flops=_workplace.pass_flops(calibration),
        progress=selection.progress,
    )


def _evaluation_batches(run: TaskRun, settings: Settings) -> Batches:
    """The batches that judge a run: drawn by its own seed, even if another seed chose the units."""
    judging = run.judging
    seeded = settings if run.seed is None else replace(settings, seed=run.seed)
    return _workplace.batches(expanded(judging.data or ""), seeded, "test", judging.size or 0, judging.max_batches or 0)


def expanded(name: str) -> str:
    """A name with its environment variables filled in, such as $SECATEUR_DATA/imagenette."""
    missing = [variable for variable in re.findall(r"\$\{?(\w+)", name) if variable not in os.environ]
    if missing:
        raise SettingError(
            f"{name!r} uses the environment variable {missing[0]}, which is not set; set it to the folder that holds the rest "
            "of the path."
        )
    return os.path.expandvars(name)


def machine(model: nn.Module) -> dict[str, Any]:
    """The hardware of a run, which its timings depend on."""
    device = device_of(model)
    hardware = {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": str(device)}
    return hardware | ({"accelerator": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _reason(error: Exception) -> str:
    """The reason in a failed record: the exception's type, its first line, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
