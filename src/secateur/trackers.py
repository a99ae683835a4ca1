"""Trackers: watchers that write what they hear where others look. Ours is TensorBoard; examples/ has MLflow and W&B."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.errors import MissingExtra
from secateur.selection import Step
from secateur.watcher import HealProgress, Progress, Watcher

if TYPE_CHECKING:
    from secateur.cut.repair import Repair
    from secateur.judgement import Evaluation
    from secateur.measure.speed import Measurement


class TensorBoard(Watcher):
    """Writes a run to a folder for TensorBoard, each value when it is known.

    Damages of pulls are by pull, those of chosen units by step; evaluations, repair and speed have one value each. A search
    that goes on after it was stopped writes its first steps again, from the journal.

    >>> prune("gpt2", ratio=0.10, out="small/", watcher=TensorBoard("runs/gpt2"))
    """

    def __init__(self, folder: str | Path) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtra("tensorboard", "tensorboard", "Writing for TensorBoard")
        self.folder = folder
        self._pulls = 0

    @functools.cached_property
    def _writer(self) -> Any:
        """What writes the files: made at the first value, so that a run that is refused leaves none."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder))

    def say(self, sentence: str) -> None:
        self._writer.add_text("notes", sentence)

    def pull(self, progress: Progress) -> None:
        self._pulls += 1
        self._add("search/damage of a pull", progress.damage, self._pulls)
        self._add("search/least mean damage", progress.best_damage, self._pulls)

    def chosen(self, step: Step, n_steps: int) -> None:
        self._add("chosen/damage", step.damage, step.step)
        self._add("chosen/forward passes", step.passes, step.step)
        if step.sure is not None:
            self._add("chosen/sure", step.sure, step.step)
        self._writer.add_text("chosen/unit", str(step.unit), step.step)
        self._writer.flush()  # here and below: so that it shows while the run goes on, and none is lost at its end

    def judged(self, side: str, evaluation: Evaluation) -> None:
        for name in sorted(evaluation.figures - {"batch_losses"}):
            self._add(f"{side}/{name}", getattr(evaluation, name))
        self._writer.flush()

    def repaired(self, repair: Repair) -> None:
        for form, loss in repair.losses.items():
            self._add(f"repair/held-out loss, {form}", loss)
        self._writer.flush()

    def healed(self, progress: HealProgress) -> None:
        if progress.judged:
            self._add("heal/held-out loss", progress.loss, progress.step)
            self._writer.flush()

    def measured(self, measurement: Measurement) -> None:
        self._add("small/parameters", measurement.small_params)
        for timing in measurement.timings:
            self._add(f"speed/{timing.name}, batch {timing.batch_size}", timing.speedup.value)
        self._writer.flush()

    def _add(self, name: str, value: float, step: int = 0) -> None:
        self._writer.add_scalar(name, value, step)
