"""Healing as a step of the job: its data, what was known before it, and the dense model after the same treatment.

While a model is healed, its folder holds another one, `.healing`, from which a killed run goes on. It is removed when
the healed model is written.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from torch import nn

from secateur.cut.heal import Heal, check_healable, heal
from secateur.cut.record import CutRecord, changed_files, read_record
from secateur.data.batches import Batches, check_apart
from secateur.data.images import ImageItems
from secateur.data.load import load_batches
from secateur.errors import DataError, ModelError, OutputError
from secateur.files import jsonio
from secateur.healing import DEFAULT_AMOUNT, Healing
from secateur.judgement import Evaluation
from secateur.measure.evaluate import evaluate
from secateur.model.loading import Opened, digest
from secateur.model.losses import Batch
from secateur.selection import Source
from secateur.settings import Job
from secateur.units import Unit
from secateur.watcher import Watcher
from secateur.workers.team import Team

PLACE, BEFORE = ".healing", "before.json"
HELD_OUT = 0.05  # of the healing batches, which judge it
MOST_HELD_OUT = 16  # batches: looking at more takes longer than it tells
KEPT_IMAGES = 2048  # in memory; more are read again whenever they are shown


@dataclass(frozen=True)
class Healer:
    """All that heals a cut of one dense model."""

    opened: Opened
    healing: Healing
    source: Source
    batches: Sequence[Batch]
    held_out: Sequence[Batch]
    seed: int
    evaluation: Batches | None
    team: Team
    watcher: Watcher

    @property
    def key(self) -> str:
        """A fingerprint of what decides the healed weights, besides the models."""
        sizes = [len(self.batches), len(self.held_out)]
        return jsonio.fingerprint({"data": self.source.digest, "seed": self.seed, "sizes": sizes, **self.healing.to_key()})

    def __call__(self, units: Sequence[Unit], small: nn.Module, folder: Path) -> tuple[Heal, Evaluation | None]:
        """Heal a cut model in place; what was done, and the evaluation of the model as it was before."""
        place, watcher = folder / PLACE, self.watcher
        small.to(self.opened.device)
        first = jsonio.fingerprint([self.key, self.opened.digest, digest(small)])
        before = self._before(small, place, first)
        watcher.stage("healing")
        done = self._heal(units, small, place, first)
        if not self.healing.labels or not self.healing.dense:
            why = "" if self.healing.labels else "The dense model would not change by this: its divergence from itself is 0."
            return replace(done, about_dense=why), before
        if self.evaluation is None:
            return replace(done, about_dense="The dense model was not treated alike: there are no data to judge it by."), before
        watcher.stage("treating the dense model in the same way")
        treated = copy.deepcopy(self.opened.model)
        same = replace(self, healing=replace(self.healing, amount=f"{done.steps}steps"))
        same._heal((), treated, place / "dense", first)
        if not self.team.leads:
            return done, before
        found = self._evaluated(treated)
        about = f"The dense model after the same treatment has the loss {found.loss:.4f} on the evaluation data."
        return replace(done, dense=found, about_dense=about), before

    def _heal(self, units: Sequence[Unit], small: nn.Module, place: Path, key: str) -> Heal:
        return heal(
            self.opened.model,
            units,
            small,
            self.batches,
            held_out=self.held_out,
            healing=self.healing,
            seed=self.seed,
            data=self.source.name,
            state=place,
            key=key,
            team=self.team,
            watcher=self.watcher,
        )

    def _before(self, small: nn.Module, place: Path, key: str) -> Evaluation | None:
        """The evaluation of the model as it comes, taken over from an earlier start if there was one."""
        if self.evaluation is None or not self.team.leads:
            return None
        path, key = place / BEFORE, jsonio.fingerprint([key, self.evaluation.source.digest])
        try:
            fields = jsonio.read(path) if path.exists() else {}
            if fields.get("key") == key:
                return jsonio.decode(fields["evaluation"], Evaluation)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise OutputError(f"{path} is damaged; delete {place}, and the healing begins anew.") from error
        self.watcher.stage("evaluating the model before healing")
        found = self._evaluated(small)
        jsonio.write(path, {"key": key, "evaluation": found.to_json()})
        return found

    def _evaluated(self, model: nn.Module) -> Evaluation:
        assert self.evaluation is not None
        return evaluate(model, self.evaluation, self.watcher.evaluated, loss=self.opened.loss)


@dataclass(frozen=True)
class _Part(Sequence[Batch]):
    """Some of the batches, each read when it is needed."""

    batches: Batches
    places: range

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        return _Part(self.batches, self.places[index]) if isinstance(index, slice) else self.batches[self.places[index]]


def healer_of(
    opened: Opened, job: Job, evaluation: Batches | None, watcher: Watcher, team: Team | None = None
) -> Healer | None:
    """What heals as the job says; None if it says nothing. Data that overlap the evaluation are refused."""
    healing, settings, team = job.healing, job.settings, team or Team()
    if healing.amount is None:
        return None
    watcher.stage("reading healing data")
    name, size = healing.data or settings.calibration, healing.size or 0
    at_most = math.ceil((healing.batch_size or 1) / team.size)  # each process of a team has a part of a step
    at_once = replace(settings, batch_size=min(at_most, settings.batch_size or 1))
    if name != settings.calibration:
        at_once = replace(at_once, documents=None, holdout=None)  # these say how other data are cut
    found = load_batches(opened.model, opened.processor, name, at_once, split="train", size=size, train=True)
    if isinstance(found.items, ImageItems):
        found = replace(found, items=replace(found.items, keep=len(found.source.rows) <= KEPT_IMAGES))
    if evaluation is not None:
        try:
            remark = check_apart(found.source, evaluation.source)
        except DataError as error:
            raise DataError(
                f"The healing data {name!r} overlap the evaluation data {evaluation.source.name!r}, which would then judge "
                "what they taught: give others with --heal-data or --data."
            ) from error
        if remark:
            watcher.say(remark.replace("which chose the units", "which heals"))
    n_held = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(found))), len(found) - 1)
    first_held = len(found) - n_held
    batches, held_out = _Part(found, range(first_held)), _Part(found, range(first_held, len(found)))
    check_healable(opened.model, batches, held_out, healing)
    return Healer(opened, healing, found.source, batches, held_out, settings.seed, evaluation, team, watcher)


def forget(folder: Path) -> None:
    """Remove what a healing kept to go on with, now that the model is written."""
    shutil.rmtree(folder / PLACE, ignore_errors=True)


def heal_settings(cut: CutRecord, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a healing, with what it takes over from the search that chose the units."""
    known = cut.made_with.settings if cut.made_with else None
    names = ("calibration", "seq_len", "batch_size", "seed", "loss", "documents", "holdout", "dtype")
    shared = {name: getattr(known, name) for name in names} if known else {}
    other = settings.get("calibration") not in (None, shared.get("calibration"))
    shared |= {"documents": None, "holdout": None} if other else {}
    return {**shared, "heal": DEFAULT_AMOUNT, **settings}


def record_to_heal(folder: Path) -> CutRecord:
    """The record of the cut model in a folder; an error if there is none, or the model was changed."""
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}: give one that prune or shrink wrote.")
    record = read_record(folder)
    if record is None:
        raise ModelError(
            f"{folder} holds no cut model with its record, secateur.json: give a folder that prune or shrink wrote."
        )
    if changed := changed_files(folder, record):
        raise ModelError(f"The model in {folder} is not as it was written ({', '.join(changed)}): cut it again.")
    if record.heal:
        raise ModelError(f"The model in {folder} was healed already: heal the cut it came from for longer.")
    return record
