"""The whole job in one call: load, choose, judge, cut, measure. `steps.py` has each step as a call of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from secateur.checks import check_prune
from secateur.cut.checkpoint import check_cut, check_cut_place
from secateur.cut.costs import goal_of
from secateur.cut.record import CutRecord, read_record
from secateur.data.batches import Batches, check_apart
from secateur.errors import OutputError, first_line
from secateur.files import jsonio
from secateur.files.journal import Journal, check_same_run
from secateur.healer import Healer, healer_of
from secateur.judgement import SAMPLES, Evaluation, JudgedOn, Judgement, PruneRecord
from secateur.measure.judge import judge_apart
from secateur.measure.samples import read_samples, sample
from secateur.model.families import candidate_units
from secateur.model.loading import Opened, load_model
from secateur.report.page import write_report
from secateur.search.choose import provenance
from secateur.search.goals import Goal
from secateur.selection import Selection
from secateur.series import DENSE, FILE, Cut, Series, folder_of
from secateur.settings import NONE, Job, make_job
from secateur.steps import (
    calibration_of,
    choose,
    cut,
    evaluation_of,
    open_job,
    repair_data_of,
    say_unchecked,
    selection_of_this_run,
    units_of,
)
from secateur.units import Unit
from secateur.watcher import Following, Watcher, watcher_of


@dataclass(frozen=True)
class PruneResult:
    """The result of `prune`: the selection, the judgement, and where the files are.

    >>> result = prune("gpt2", ratio=0.1, calibration="wikitext2", layout="none")
    >>> result.selection.units, result.record.judgement.changes
    """

    selection: Selection
    record: PruneRecord  # evaluation.json
    out: Path | None
    cut: CutRecord | None = None  # secateur.json, if a smaller model was written; of a series the smallest
    series: Series | None = None  # series.json, if several shares were asked for

    def to_frame(self) -> Any:
        """A pandas data frame with a row for each candidate."""
        return self.selection.to_frame()

    def _repr_html_(self) -> str:
        parts = (self.record.judgement, self.cut, self.selection)
        return "".join(part._repr_html_() for part in parts if part)


def prune(model: str, *, out: str | Path | None = None, watcher: Following = None, **settings: Any) -> PruneResult:
    """Choose units of a model, evaluate it with and without them, cut them out, and measure the smaller model.

    Writes selection.json, evaluation.json and, unless the layout is "none", the smaller checkpoint to `out`. Further keywords
    are the settings in docs/settings.md. Started again with the same arguments after it was stopped, it goes on.

    >>> prune("gpt2", ratio=0.10, calibration="wikitext2", out="gpt2-pruned")
    """
    watcher, folder = watcher_of(watcher), Path(out) if out is not None else None
    job = make_job(model, **settings)
    check_prune(job, folder)
    cuts = folder is not None and job.settings.layout != NONE
    if folder and cuts and job.shares:
        for share in job.shares:
            check_cut_place(folder / folder_of(share), followed_by="selection.json")
    elif folder and cuts:
        check_cut_place(folder, followed_by="selection.json")
    opened, job = open_job(job, watcher)
    calibration = calibration_of(opened, job.settings, watcher)
    other = job.judging.data != job.settings.calibration  # of the same data all has been said
    evaluation = evaluation_of(opened, job, watcher if other else None)
    if remark := check_apart(calibration.source, evaluation.source):
        watcher.say(remark)
    repairing = repair_data_of(opened, job, calibration, evaluation, watcher)
    check_cut(opened, job.cutting, len(repairing))
    healer = healer_of(opened, job, evaluation, watcher)
    selection, record = _chosen_and_judged(opened, calibration, evaluation, job, folder, watcher)
    if folder is None or not cuts:
        result = PruneResult(selection, record, folder)
    else:
        made = _Cutter(opened, calibration, repairing, evaluation, job, healer, watcher)
        if job.shares:
            result = made.series(selection, record, folder)
        else:
            result = PruneResult(selection, record, folder, made.cut(selection, folder, record.judgement))
    _show(result, opened, evaluation, watcher)
    return result


@dataclass(frozen=True)
class _Cutter:
    """Cuts selections of one job out of its model."""

    opened: Opened
    calibration: Batches
    repairing: Batches
    evaluation: Batches
    job: Job
    healer: Healer | None
    watcher: Watcher

    def cut(self, selection: Selection, folder: Path, judgement: Judgement | None) -> CutRecord:
        return cut(
            self.opened,
            selection,
            folder,
            calibration=self.calibration,
            repairing=self.repairing,
            layout=self.job.settings.layout,
            evaluation=self.evaluation,
            judgement=judgement,
            cutting=self.job.cutting,
            healer=self.healer,
            tokens=self.job.settings.seq_len,
            again=True,
            watcher=self.watcher,
        )

    def series(self, selection: Selection, record: PruneRecord, folder: Path) -> PruneResult:
        """A smaller model for each share, each in a folder of its own: the first units of the selection that meet it."""
        settings, model = self.job.settings, self.opened.model
        units = candidate_units(model, settings.target, settings.group_width)
        goal = goal_of(settings, self.opened, units, folder / "latency.json", self.watcher)
        assert goal
        made: list[CutRecord] = []
        for share in self.job.shares:
            self.watcher.say(f"The cut that keeps {share:g}:")
            own, place = _first_that_meet(selection, goal, share), folder / folder_of(share)
            known = read_record(place)
            judgement = record.judgement if own.units == selection.units else None
            if judgement is None and not (known and known.zeroed):
                judgement = judge_apart(
                    model,
                    own,
                    self.evaluation,
                    candidates=record.judgement.candidates,
                    dense=record.judgement.dense,
                    loss=self.opened.loss,
                    watcher=self.watcher,
                )
            own.save(place / "selection.json")  # first: by it a start after a kill knows the model for this run's
            made.append(self.cut(own, place, judgement))
        series = _series(made, self.job.shares, record.judgement.dense)
        jsonio.write(folder / FILE, series.to_json())
        return PruneResult(selection, record, folder, made[-1], series)


def _first_that_meet(selection: Selection, goal: Goal, share: float) -> Selection:
    """The selection's first units, as many as leave at most this share."""
    n = next((n for n in range(1, len(selection.units)) if _left(goal, selection.units[:n]) <= share), len(selection.units))
    reached = goal.reached(selection.units[:n])
    return replace(
        selection,
        units=selection.units[:n],
        steps=selection.steps[:n],
        goal=replace(reached, asked=share) if reached else None,
    )


def _left(goal: Goal, units: Sequence[Unit]) -> float:
    reached = goal.reached(units)
    return reached.got if reached else 1.0


def _series(made: Sequence[CutRecord], shares: Sequence[float], dense: Evaluation) -> Series:
    """The dense model and its cuts by the figure of their task, and by time where it was measured."""
    figure = next(name for name in ("perplexity", "top1", "agreement", "cosine", "loss") if getattr(dense, name) is not None)
    cuts = [Cut(DENSE, made[0].dense_params, dense.loss, getattr(dense, figure), left=1.0, time=1.0)]
    for share, record in zip(shares, made, strict=True):
        assert record.shrunk and record.goal
        time = None
        if record.measurement:
            speedup = record.measurement.of_a_batch.speedup
            time = {"time": 1 / speedup.value, "time_low": 1 / speedup.high, "time_high": 1 / speedup.low}
        cuts.append(
            Cut(
                folder_of(share),
                record.params,
                record.shrunk.loss,
                getattr(record.shrunk, figure),
                asked=share,
                left=record.goal.got,
                **(time or {}),
            )
        )
    assert made[0].goal
    return Series(made[0].goal.what, figure, tuple(cuts))


def _show(result: PruneResult, opened: Opened, evaluation: Batches, watcher: Watcher) -> None:
    """Write samples.json and report.html beside the other files; if that fails, it is said, and nothing else is lost."""
    folder = result.out
    if folder is None:
        return
    watcher.stage("making the report")
    try:
        if result.cut and not result.series:  # the models of a series are in folders of their own
            _keep_samples(result.cut, folder, opened, evaluation)
        write_report(folder)
    except Exception as error:  # whatever a sample or a page runs into, the prune is finished
        watcher.say(f"All but report.html is written: {first_line(error)} `secateur report {folder}` tries it again.")


def _keep_samples(cut: CutRecord, folder: Path, opened: Opened, evaluation: Batches) -> None:
    """Write what both models do with a few examples, unless an earlier start did."""
    of = jsonio.fingerprint({name: file.sha256 for name, file in cut.files.items()})
    if not read_samples(folder / SAMPLES, of):
        small = load_model(str(folder), device=opened.device, dtype=opened.dtype)
        jsonio.write(folder / SAMPLES, sample(opened.model, small, evaluation, opened.processor, of=of).to_json())


def _chosen_and_judged(
    opened: Opened, calibration: Batches, evaluation: Batches, job: Job, folder: Path | None, watcher: Watcher
) -> tuple[Selection, PruneRecord]:
    """The selection and its judgement, read from the folder if an earlier start wrote them there, else made and written."""
    made_with = provenance(opened, job.settings, calibration)
    judged_on = JudgedOn.of(job.judging, evaluation.source)
    done = None
    if folder:
        existing = selection_of_this_run(folder / "selection.json", made_with)
        done = _read_record(folder / "evaluation.json", made_with.to_json() | judged_on.to_json())
        if done and existing:
            if done.judgement.units != existing.units:
                raise OutputError(
                    f"{folder / 'selection.json'} and {folder / 'evaluation.json'} are about other units, so that one of them "
                    "was changed; delete both, and they are made again from the journal."
                )
            return existing, done
    units = units_of(opened, calibration, job.settings, watcher)
    started = time.perf_counter()
    with Journal(folder / "journal.jsonl", made_with.to_json()) if folder else nullcontext() as journal:
        say_unchecked(journal, watcher)
        table_file = folder / "latency.json" if folder else None
        selection = choose(
            opened,
            calibration,
            job.settings,
            units=units,
            machine=job.machine,
            journal=journal,
            table_file=table_file,
            watcher=watcher,
        )
    seconds = time.perf_counter() - started
    if folder:
        selection.save(folder / "selection.json")
    if done:
        return selection, done
    replayed = min(journal.n_replayed, selection.pulls) if journal else 0
    judgement = judge_apart(opened.model, selection, evaluation, candidates=len(units), loss=opened.loss, watcher=watcher)
    record = PruneRecord(made_with, judged_on, judgement, seconds, replayed)
    if folder:
        jsonio.write(folder / "evaluation.json", record.to_json())
    return selection, record


def _read_record(path: Path, key: dict[str, Any]) -> PruneRecord | None:
    """The record of this run, if an earlier start wrote it; the record of another run is an error."""
    if not path.exists():
        return None
    try:
        record = PruneRecord.from_json(jsonio.read(path))
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{path} is not an evaluation of Secateur's, or is damaged; move it away or choose another -o."
        ) from error
    check_same_run(path, record.made_with.to_json() | record.judged_on.to_json(), key)
    return record
