"""The steps of the job: open, choose, judge, cut, compare; one call for each command. `prune` makes them one after another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from secateur.checks import check_evaluate, check_heal, check_one_device, check_select, check_shrink, cut_as, shared_settings
from secateur.cut.checkpoint import (
    check_cut,
    check_cut_place,
    cut_key,
    finished_cut,
    keep_record,
    save_cut,
    write_cut,
)
from secateur.cut.costs import goal_of
from secateur.cut.record import CutRecord
from secateur.data.batches import Batches, check_apart
from secateur.data.check import remarks
from secateur.data.load import load_batches
from secateur.errors import OutputError, SelectionError
from secateur.files import jsonio
from secateur.files.journal import UNCHECKED, Journal, check_same_run
from secateur.files.places import check_record_file, only_writer
from secateur.healer import Healer, forget, heal_settings, healer_of, record_to_heal
from secateur.judgement import Evaluation, Judgement
from secateur.measure.evaluate import evaluate
from secateur.measure.judge import judge
from secateur.measure.memory import disk_bytes, peak_memory
from secateur.measure.speed import Measurement, check_measure, measure
from secateur.model.accounting import zeroed_percent
from secateur.model.devices import products_dtype
from secateur.model.families import anatomy, candidate_units, check_disjoint, check_group_width, task_of
from secateur.model.loading import Opened, digest, load_model, open_model
from secateur.model.losses import own_loss
from secateur.model.zeroing import zeroed
from secateur.search.choose import choose_units, provenance
from secateur.search.scores import channel_orders
from secateur.selection import Reached, Selection
from secateur.settings import BUILTIN, FREE, LATENCY, Cutting, Job, Machine, Provenance, Settings, make_job
from secateur.units import Unit
from secateur.watcher import Followed, Following, Watcher, watcher_of
from secateur.workers.team import join

JUDGED_BY = ("seq_len", "batch_size", "seed", "loss", "documents", "holdout", "dtype")  # of the settings, besides the data
NEW_TOKENS = 16  # decoded for the measurement


def open_job(job: Job, watcher: Watcher) -> tuple[Opened, Job]:
    """The job's model, and the job with the defaults of its task."""
    settings = job.settings
    loss = own_loss(settings.loss)
    watcher.stage(f"loading {settings.model}")
    opened = open_model(
        settings.model, device=settings.device, dtype=settings.dtype, trust_remote_code=job.machine.trust_remote_code
    )
    opened = replace(opened, loss=loss)
    check_group_width(opened.model, settings.target, settings.group_width)
    experts = any(layer.experts for layer in anatomy(opened.model))
    job = job.for_task(task_of(opened.model), experts=experts)
    if job.healing.amount:
        job = job._replace(healing=replace(job.healing, dtype=products_dtype(opened.model, job.healing.dtype)))
    return opened, job


def calibration_of(opened: Opened, settings: Settings, watcher: Watcher) -> Batches:
    """The batches that choose."""
    watcher.stage("reading data")
    batches = _calibration(opened, settings, settings.calibration_size or 0, watcher)
    _remark(opened, batches, watcher)
    return batches


def _calibration(opened: Opened, settings: Settings, size: int, watcher: Watcher) -> Batches:
    return load_batches(
        opened.model, opened.processor, settings.calibration, settings, split="train", size=size, progress=watcher.evaluated
    )


def evaluation_of(opened: Opened, job: Job, watcher: Watcher | None = None) -> Batches:
    """The batches that judge; a watcher is told about them."""
    judging = job.judging
    batches = load_batches(
        opened.model,
        opened.processor,
        judging.data or "",
        job.settings,
        split="test",
        size=judging.size or 0,
        most=judging.max_batches or 0,
        progress=watcher_of(watcher).evaluated,
    )
    if watcher:
        _remark(opened, batches, watcher)
    return batches


def repair_data_of(opened: Opened, job: Job, calibration: Batches, evaluation: Batches | None, watcher: Watcher) -> Batches:
    """The batches that the repair is fitted to: those that choose, or another number of the same data."""
    if job.cutting.repair_size is None:
        return calibration
    watcher.stage("reading repair data")
    batches = _calibration(opened, job.settings, job.cutting.repair_size, watcher)
    if evaluation is not None and (remark := check_apart(batches.source, evaluation.source)):
        watcher.say(remark.replace("which chose the units", "which repairs"))
    return batches


def _remark(opened: Opened, batches: Batches, watcher: Watcher) -> None:
    for sentence in remarks(opened.model, opened.processor, batches):
        watcher.say(sentence)


# Choose


def choose(
    opened: Opened,
    calibration: Batches,
    settings: Settings,
    *,
    units: Sequence[Unit] | None = None,
    machine: Machine | None = None,
    journal: Journal | None = None,
    table_file: Path | None = None,
    watcher: Following = None,
) -> Selection:
    """The units of a model that the settings choose; `table_file` keeps the latency table of a run that may be stopped.

    >>> choose(opened, calibration, Settings("gpt2", ratio=0.1, budget="64pulls")).units
    """
    watcher = watcher_of(watcher)
    units = units_of(opened, calibration, settings, watcher) if units is None else units
    goal = goal_of(settings, opened, units, table_file, watcher)
    return choose_units(
        opened, calibration, settings, units=units, goal=goal, machine=machine, journal=journal, watcher=watcher
    )


def units_of(opened: Opened, calibration: Batches, settings: Settings, watcher: Watcher) -> list[Unit]:
    """The candidates; their MLP channels are grouped as the settings say."""
    orders = None
    if settings.orders_channels:
        watcher.stage("grouping MLP channels")
        batches = Followed(calibration[: settings.score_batches], watcher.evaluated)
        orders = channel_orders(opened.model, settings.group_by, batches, opened.loss)
    return candidate_units(opened.model, settings.target, settings.group_width, orders)


@dataclass(frozen=True)
class Chosen:
    """The result of the command `select`."""

    selection: Selection
    zeroed_percent: float
    files: tuple[Path, ...]


def select_to(model: str, out: Path, *, watcher: Following = None, **settings: Any) -> Chosen:
    """Choose units of a model and write them to a file, with a journal beside it; goes on where it was stopped.

    >>> select_to("gpt2", Path("sel.json"), ratio=0.1, budget="64pulls").selection.units
    """
    watcher = watcher_of(watcher)
    job = make_job(model, **settings)
    check_select(job, out)
    opened, job = open_job(job, watcher)
    calibration = calibration_of(opened, job.settings, watcher)
    made_with = provenance(opened, job.settings, calibration)
    selection_of_this_run(out, made_with)  # refuses to overwrite another run's
    stem = out.name.removesuffix(".json")
    with Journal(out.with_name(f"{stem}.journal.jsonl"), made_with.to_json()) as journal:
        say_unchecked(journal, watcher)
        table_file = out.with_name(f"{stem}.latency.json")
        selection = choose(
            opened, calibration, job.settings, machine=job.machine, journal=journal, table_file=table_file, watcher=watcher
        )
    selection.save(out)
    files = tuple(path for path in (out, journal.path) if path.exists())
    return Chosen(selection, zeroed_percent(opened.model, selection.units), files)


def say_unchecked(journal: Journal | None, watcher: Watcher) -> None:
    """Tell the user if the journal that is continued has no checksums."""
    if journal and not journal.checked:
        watcher.say(UNCHECKED.format(journal.path))


def selection_of_this_run(path: Path, made_with: Provenance) -> Selection | None:
    """The selection that an earlier start wrote, if there is one; the selection of another run is an error."""
    if not path.exists():
        return None
    try:
        selection = Selection.load(path)
    except SelectionError as error:
        raise OutputError(f"{error} It is not overwritten: choose another place with -o, or move it away.") from error
    check_same_run(path, selection.made_with.to_json() if selection.made_with else {}, made_with.to_json())
    return selection


def check_selection(opened: Opened, selection: Selection) -> None:
    """Refuse a selection that was made for another model."""
    if selection.made_with and selection.made_with.model_digest:
        made_with = selection.made_with
        digest_here = _digest_in(opened, made_with.settings.dtype)
        if made_with.model_digest != digest_here:
            raise SelectionError(
                f"The selection was made for the model {made_with.settings.model!r} (digest {made_with.model_digest}), and "
                f"{opened.name!r} is another one (digest {digest_here}); give the model it was made for."
            )
    check_disjoint(opened.model, selection.units)
    with zeroed(opened.model, selection.units):
        pass  # units that the model does not have are refused here


def _digest_in(opened: Opened, dtype: str) -> str:
    """The digest of the model's weights in a dtype: another one rounds them, so that they are read again."""
    if dtype == opened.dtype:
        return opened.digest
    return digest(load_model(opened.name, device="cpu", dtype=dtype, trust_remote_code=opened.trust_remote_code))


# Judge


@dataclass(frozen=True)
class Evaluated:
    """The result of the command `evaluate`: a dense model alone, or the judgement of a selection."""

    model: str
    selection: str | None
    data: str
    dense: Evaluation
    judging: dict[str, Any]  # the settings that decide the numbers, as asked for; None where they are left to the task
    judgement: Judgement | None = None

    def to_json(self) -> dict[str, Any]:
        about = {"model": self.model, "selection": self.selection, "data": self.data, "judging": self.judging}
        return about | (self.judgement.to_json() if self.judgement else {"dense": self.dense.to_json()})


def evaluate_on(
    model: str,
    *,
    selection: Path | None = None,
    out: Path | None = None,
    watcher: Following = None,
    **settings: Any,
) -> Evaluated:
    """Evaluate a model with and without the units of a selection file, or as it is; `out` also gets the result.

    >>> evaluate_on("gpt2", selection=Path("sel.json"), data="lambada").judgement.changes
    """
    watcher = watcher_of(watcher)
    chosen = Selection.load(selection) if selection else None
    data = settings.get("data") or settings.get("calibration", BUILTIN)
    job = make_job(model, **{"calibration": data} | cut_as(chosen, data) | settings)
    check_evaluate(job, out)
    data = job.judging.data or job.settings.calibration
    asked = {name: getattr(job.settings, name) for name in JUDGED_BY}
    about: dict[str, Any] = {"model": model, "selection": str(selection) if selection else None, "data": data}
    about["judging"] = asked | {"size": job.judging.size, "max_batches": job.judging.max_batches}
    if out:
        check_record_file(out, about)
    opened, job = open_job(job, watcher)
    if chosen:
        check_selection(opened, chosen)
    watcher.stage("reading data")
    batches = evaluation_of(opened, job, watcher)
    if chosen:
        judgement = judge(opened.model, chosen, batches, loss=opened.loss, watcher=watcher)
        evaluated = Evaluated(**about, dense=judgement.dense, judgement=judgement)
    else:
        watcher.stage("evaluating the dense model")
        evaluated = Evaluated(**about, dense=evaluate(opened.model, batches, watcher.evaluated, loss=opened.loss))
        watcher.judged("dense", evaluated.dense)
    if out:
        jsonio.write(out, evaluated.to_json())
    return evaluated


# Cut


def cut(
    opened: Opened,
    selection: Selection,
    out: str | Path,
    *,
    calibration: Sequence[Any],
    repairing: Sequence[Any] | None = None,
    layout: str = FREE,
    evaluation: Batches | None = None,
    judgement: Judgement | None = None,
    cutting: Cutting | None = None,
    healer: Healer | None = None,
    tokens: int = 128,
    again: bool = False,
    watcher: Following = None,
) -> CutRecord:
    """Write the model without the selected units to `out`, proved equal to the zeroed one; return what secateur.json holds.

    `calibration` proves and repairs, unless there are other batches for `repairing`; `healer` heals, `evaluation` judges the
    checkpoint as it is read back, and `judgement` is what is known of the dense and the zeroed model. Called again after it
    was stopped, it goes on. A finished model whose files were changed is an error, or with `again` cut again.

    >>> cut(open_model("gpt2"), selection, "small/", calibration=batches, cutting=Cutting(measure=False))
    """
    watcher, cutting, folder = watcher_of(watcher), cutting or Cutting(), Path(out)
    cutting.check()
    small = None
    key = cut_key(opened, selection, layout, cutting, healer.key if healer else "")
    record = finished_cut(folder, key, again=again, watcher=watcher)
    if record is None:
        record, small = write_cut(
            opened,
            selection,
            folder,
            key=key,
            calibration=calibration,
            repairing=calibration if repairing is None else repairing,
            layout=layout,
            cutting=cutting,
            heal=healer,
            watcher=watcher,
        )
        small = _as_opened(small, opened)
    before = record
    if evaluation is not None and not record.shrunk:
        watcher.stage("evaluating the checkpoint")
        small = small or load_model(str(folder), device=opened.device, dtype=opened.dtype)
        shrunk = evaluate(small, evaluation, watcher.evaluated, loss=opened.loss)
        watcher.judged("checkpoint", shrunk)
        record = replace(record, shrunk=shrunk, data=evaluation.source.name)
        if judgement:
            record = replace(record, dense=judgement.dense, zeroed=judgement.zeroed)
    if cutting.measure and not record.measurement:
        watcher.stage("measuring dense against small")
        small = small or load_model(str(folder), device=opened.device, dtype=opened.dtype)
        measurement = compare(opened, replace(opened, name=str(folder), model=small), tokens=tokens, watcher=watcher)
        record = replace(record, measurement=measurement, goal=_measured_goal(record.goal, measurement))
    if record != before:
        keep_record(folder, record)
    if healer:
        forget(folder)
    return record


def _as_opened(small: nn.Module, opened: Opened) -> nn.Module | None:
    """A model read back from disk, on the device of the dense one; None if it was written in another dtype."""
    same = next(small.parameters()).dtype == next(opened.model.parameters()).dtype
    return small.to(opened.device) if same else None


def _measured_goal(goal: Reached | None, measurement: Measurement) -> Reached | None:
    if goal is None or goal.what != LATENCY:
        return goal
    return replace(goal, measured=1 / measurement.of_a_batch.speedup.value)


def shrink_to(
    model: str, selection: Path, out: Path, *, layout: str = FREE, watcher: Following = None, **settings: Any
) -> tuple[Selection, CutRecord]:
    """Cut the units of a selection file out of a model and write the smaller one; the calibration data prove and repair it.

    >>> shrink_to("gpt2", Path("sel.json"), Path("small"), repair="auto", measure=False)
    """
    watcher, chosen = watcher_of(watcher), Selection.load(selection)
    job = make_job(model, **shared_settings(chosen, settings))
    check_shrink(job, out, layout)
    check_cut_place(out)
    with only_writer(out):
        opened, job = open_job(job, watcher)
        check_selection(opened, chosen)
        calibration = calibration_of(opened, job.settings, watcher)
        repairing = repair_data_of(opened, job, calibration, None, watcher)
        check_cut(opened, job.cutting, len(repairing))
        healer = healer_of(opened, job, None, watcher)
        record = cut(
            opened,
            chosen,
            out,
            calibration=calibration,
            repairing=repairing,
            layout=layout,
            cutting=job.cutting,
            healer=healer,
            tokens=job.settings.seq_len,
            watcher=watcher,
        )
    return chosen, record


# Heal


def heal_to(dense: str, small: str | Path, out: str | Path, *, watcher: Following = None, **settings: Any) -> CutRecord:
    """Heal a checkpoint that `prune` or `shrink` wrote, and write the healed one to another folder; goes on where it stopped.

    Of the processes that `accelerate launch` starts, all train and the first one writes.

    >>> heal_to("gpt2", "small/", "healed", heal="2steps", calibration="wikitext2", measure=False).heal
    """
    watcher, source, out = watcher_of(watcher), Path(small), Path(out)
    cut = record_to_heal(source)
    job = make_job(dense, **heal_settings(cut, settings))
    check_heal(job, source, out)
    check_cut_place(out)
    team = join(job.settings.device)
    if team.size > 1:
        job = job._replace(settings=replace(job.settings, device=team.device))
    with only_writer(out) if team.leads else nullcontext():
        opened, job = open_job(job, watcher)
        _check_cut_of(opened, cut, source)
        evaluation = evaluation_of(opened, job, watcher)
        healer = healer_of(opened, job, evaluation, watcher, team)
        assert healer is not None
        key = jsonio.fingerprint({"cut": cut.key, "heal": healer.key})
        record = team.shared(finished_cut(out, key, again=False, watcher=watcher) if team.leads else None)
        if record is None:
            model = load_model(str(small), device=opened.device, dtype=opened.dtype)
            done, before = healer(cut.units, model, out)
            if not team.leads:
                return replace(cut, key=key, heal=done)
            record = replace(cut, key=key, heal=done, unhealed=before, shrunk=None, measurement=None, files={})
            record, _ = save_cut(opened, model, record, out, job.cutting.max_shard_size, watcher)
        if not team.leads:
            return record
        record = _judged_again(record, cut, opened, evaluation, out, job, watcher)
        forget(out)
    return record


def _check_cut_of(opened: Opened, cut: CutRecord, folder: Path) -> None:
    if cut.model_digest != opened.digest:
        raise SelectionError(
            f"The model in {folder} was cut out of {cut.model!r} (digest {cut.model_digest}), and {opened.name!r} is another "
            f"one (digest {opened.digest}); give the model it was cut out of, in the same --dtype."
        )


def _judged_again(
    record: CutRecord, cut: CutRecord, opened: Opened, evaluation: Batches, out: Path, job: Job, watcher: Watcher
) -> CutRecord:
    """The record with the evaluations of the healed and the dense model, and its measurement, where they are missing."""
    before, name = record, evaluation.source.name
    small: nn.Module | None = None
    if not record.shrunk:
        watcher.stage("evaluating the healed model")
        small = load_model(str(out), device=opened.device, dtype=opened.dtype)
        record = replace(record, shrunk=evaluate(small, evaluation, watcher.evaluated, loss=opened.loss), data=name)
        if not (cut.dense and cut.data == name and record.unhealed == cut.shrunk):
            watcher.stage("evaluating the dense model")
            dense = evaluate(opened.model, evaluation, watcher.evaluated, loss=opened.loss)
            record = replace(record, dense=dense, zeroed=None)
    if job.cutting.measure and not record.measurement:
        watcher.stage("measuring dense against small")
        small = small or load_model(str(out), device=opened.device, dtype=opened.dtype)
        healed = replace(opened, name=str(out), model=small)
        record = replace(record, measurement=compare(opened, healed, tokens=job.settings.seq_len, watcher=watcher))
    if record != before:
        keep_record(out, record)
    return record


# Measure


def compare(
    dense: Opened,
    small: Opened,
    *,
    tokens: int = 128,
    new_tokens: int | None = None,
    batch_sizes: Sequence[int] = (1, 8),
    repeats: int = 9,
    threads: int | None = None,
    memory: bool = True,
    watcher: Following = None,
) -> Measurement:
    """Measure two models side by side: time, size on disk and peak memory."""
    watcher = watcher_of(watcher)
    if new_tokens is None:
        context = getattr(getattr(dense.model, "config", None), "max_position_embeddings", None)
        new_tokens = min(NEW_TOKENS, max(1, context // 2)) if isinstance(context, int) else NEW_TOKENS
    measurement = measure(
        dense.model,
        small.model,
        batch_sizes=batch_sizes,
        tokens=tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        threads=threads,
        progress=watcher.evaluated,
    )
    disk = [disk_bytes(Path(opened.name)) if Path(opened.name).is_dir() else None for opened in (dense, small)]
    peaks: list[int | None] = [None, None]
    if memory:
        watcher.stage("measuring memory")
        peaks = [
            peak_memory(
                opened.name,
                device=measurement.device,
                dtype=measurement.dtype,
                batch_size=max(batch_sizes),
                tokens=tokens,
                trust_remote_code=opened.trust_remote_code,
            )
            for opened in Followed((dense, small), watcher.evaluated)
        ]
    measurement = replace(measurement, dense_disk=disk[0], small_disk=disk[1], dense_memory=peaks[0], small_memory=peaks[1])
    watcher.measured(measurement)
    return measurement


def compare_models(
    dense: str,
    small: str,
    *,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    watcher: Following = None,
    **options: Any,
) -> Measurement:
    """Load two models and measure them side by side; the `options` are those of `compare`.

    >>> compare_models("gpt2", "small/", batch_sizes=[1], repeats=3).timings[0].speedup
    """
    check_one_device(device)
    watcher = watcher_of(watcher)
    new_tokens, threads = options.get("new_tokens"), options.get("threads")
    check_measure(
        options.get("batch_sizes", (1, 8)),
        options.get("tokens", 128),
        NEW_TOKENS if new_tokens is None else new_tokens,
        options.get("repeats", 9),
        1 if threads is None else threads,
    )
    opened = []
    for name in (dense, small):
        watcher.stage(f"loading {name}")
        model = load_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        opened.append(Opened(name, model, None, trust_remote_code))
    watcher.stage("measuring dense against small")
    return compare(*opened, watcher=watcher, **options)
