"""The whole job in one call: load, choose, judge, cut, measure. `steps.py` has each step as a call of its own."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateur.checks import check_prune
from secateur.cut.checkpoint import check_cut, check_cut_place
from secateur.cut.record import CutRecord
from secateur.data.batches import Batches, check_apart
from secateur.errors import OutputError
from secateur.files import jsonio
from secateur.files.journal import Journal, check_same_run
from secateur.judgement import JudgedOn, PruneRecord
from secateur.measure.judge import judge_apart
from secateur.model.loading import Opened
from secateur.search.choose import provenance
from secateur.selection import Selection
from secateur.settings import NONE, Job, make_job
from secateur.steps import calibration_of, choose, cut, evaluation_of, open_job, say_unchecked, selection_of_this_run, units_of
from secateur.watcher import Watcher


@dataclass(frozen=True)
class PruneResult:
    """The result of `prune`: the selection, the judgement, and where the files are.

    >>> result = prune("gpt2", ratio=0.1, calibration="wikitext2", layout="none")
    >>> result.selection.units, result.record.judgement.changes
    """

    selection: Selection
    record: PruneRecord  # evaluation.json
    out: Path | None
    cut: CutRecord | None = None  # secateur.json, if a smaller model was written


def prune(model: str, *, out: str | Path | None = None, watcher: Watcher | None = None, **settings: Any) -> PruneResult:
    """Choose units of a model, evaluate it with and without them, cut them out, and measure the smaller model.

    Writes selection.json, evaluation.json and, unless the layout is "none", the smaller checkpoint to `out`. Further keywords
    are the settings in docs/settings.md. Started again with the same arguments after it was stopped, it goes on.

    >>> prune("gpt2", ratio=0.10, calibration="wikitext2", out="gpt2-pruned")
    """
    watcher, folder = watcher or Watcher(), Path(out) if out is not None else None
    job = make_job(model, **settings)
    check_prune(job, folder)
    cuts = folder is not None and job.settings.layout != NONE
    if folder and cuts:
        check_cut_place(folder, followed_by="selection.json")
    opened, job = open_job(job, watcher)
    calibration = calibration_of(opened, job.settings, watcher)
    other = job.judging.data != job.settings.calibration  # of the same data all has been said
    evaluation = evaluation_of(opened, job, watcher if other else None)
    if remark := check_apart(calibration.source, evaluation.source):
        watcher.say(remark)
    check_cut(opened, job.cutting, len(calibration))
    selection, record = _chosen_and_judged(opened, calibration, evaluation, job, folder, watcher)
    if folder is None or not cuts:
        return PruneResult(selection, record, folder)
    made = cut(
        opened,
        selection,
        folder,
        calibration=calibration,
        layout=job.settings.layout,
        evaluation=evaluation,
        judgement=record.judgement,
        cutting=job.cutting,
        tokens=job.settings.seq_len,
        again=True,
        watcher=watcher,
    )
    return PruneResult(selection, record, folder, made)


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
