"""Checkpoints of shrunk models: a folder of safetensors and JSON that loads again, with a model card that says what was done.

The model is read back and compared before its files move into the folder, which then holds all of them or none.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.cut.heal import Heal
from secateur.cut.proof import prove
from secateur.cut.record import CARD, FORMAT, RECORD, CutRecord, changed_files, model_card, read_record, written_files
from secateur.cut.repair import check_repairable, repair as repair_model
from secateur.cut.surgery import shrink
from secateur.errors import ModelError, OutputError, ProofError, SelectionError, reasons
from secateur.files import jsonio
from secateur.files.places import only_writer
from secateur.files.sentences import sentence_modules
from secateur.judgement import Evaluation
from secateur.model.accounting import total_parameters
from secateur.model.families import family_of, task_of
from secateur.model.loading import Opened, load_model, stored_dtype, timm_arguments, versions
from secateur.model.losses import Batch
from secateur.model.shrunk import CODE, layout_of
from secateur.selection import Selection
from secateur.settings import FREE, UNIFORM, Cutting
from secateur.units import Unit
from secateur.watcher import Watcher

PROOF_BATCHES = 2
WRITTEN = (  # by transformers, timm and sentence-transformers, besides the weights
    "config.json",
    "generation_config.json",
    f"{CODE}.py",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
# Heals a cut model without these units in place; the folder is for its state. Gives also the evaluation before.
HealStep = Callable[[Sequence[Unit], nn.Module, Path], tuple[Heal, Evaluation | None]]
ASIDE = ".changed"  # after the name of a file that is kept in place of being overwritten


def save_shrunk(
    small: nn.Module,
    folder: str | Path,
    *,
    processor: Any = None,
    record: Mapping[str, Any] | None = None,
    card: str | None = None,
    dtype: torch.dtype | None = None,
    model_args: Mapping[str, Any] | None = None,
    sentence_folder: str | Path | None = None,
    max_shard_size: str = "5GB",
) -> nn.Module:
    """Write a model to a folder that `load_shrunk` reads, and stock loaders too if its layers are alike.

    The `processor` (tokenizer or image processor), the `record` (secateur.json) and the `card` (README.md) are written as well.
    The weights are written in `dtype`, by default the model's own. `model_args` are the arguments that timm created the dense
    model with; `sentence_folder` is the dense model's folder, if sentence-transformers reads it: its other modules are copied.
    Other files in the folder stay; a folder that already holds a model is an error. Returns the model as it was
    read back, on the CPU.

    >>> save_shrunk(small, "small/", processor=tokenizer)
    """
    place = Path(folder)
    refuse_model(place)
    Cutting(max_shard_size=max_shard_size).check()
    if dtype is not None and next(small.parameters()).dtype != dtype:
        small = copy.deepcopy(small).to(dtype)
    with _staging_folder(place) as staging:
        with reasons(OutputError, f"Cannot write the model to {place}"):
            if hasattr(small, "config"):
                with _without_sampling_settings(small):
                    small.save_pretrained(staging, max_shard_size=max_shard_size)  # type: ignore[operator]
            else:
                _save_timm(small, staging, dict(model_args or {}))
            if processor is not None and hasattr(processor, "save_pretrained"):
                processor.save_pretrained(staging)
            if sentence_folder is not None:
                _copy_sentence_modules(Path(sentence_folder), staging)
        files = {name: file.to_json() for name, file in written_files(staging).items()}
        fields = {"format": FORMAT, **(record or {}), "files": files}
        (staging / RECORD).write_text(jsonio.dumps(fields, indent=1) + "\n", encoding="utf-8")
        (staging / CARD).write_text(card or f"# {place.name}\n\nA model pruned with Secateur.\n", encoding="utf-8")
        reloaded = _read_back(small, staging)
    return reloaded


def load_shrunk(folder: str | Path, *, device: str = "auto", dtype: str | None = None) -> nn.Module:
    """Load a model that `save_shrunk` wrote, by default in the dtype it was written in. No code from the folder is run.

    >>> small = load_shrunk("small/")
    """
    if not Path(folder).is_dir():
        raise ModelError(f"There is no folder {folder}: give one that holds a shrunk model.")
    return load_model(str(folder), device=device, dtype=dtype)


def cut_key(opened: Opened, selection: Selection, layout: str, cutting: Cutting, heal: str = "") -> str:
    """A fingerprint of everything that determines the written model: cuts with the same key write the same one."""
    units = [unit.to_json() for unit in selection.units]
    cut = cutting.to_json()
    fields = {"units": units, "model": opened.digest, "layout": layout, "repair": cut["repair"]}
    fields |= {"repair_size": cut["repair_size"]} if "repair_size" in cut else {}
    return jsonio.fingerprint(fields | ({"heal": heal} if heal else {}))


def write_cut(
    opened: Opened,
    selection: Selection,
    folder: Path,
    *,
    key: str,
    calibration: Sequence[Batch],
    repairing: Sequence[Batch],
    layout: str,
    cutting: Cutting,
    heal: HealStep | None = None,
    watcher: Watcher,
) -> tuple[CutRecord, nn.Module]:
    """Cut the units out of a model, prove the cut, repair and heal it if asked to, and write it.

    Returns the record and the model as it was read back.
    """
    if not selection.units:
        raise SelectionError("The selection is empty: there is nothing to cut.")
    refuse_model(folder)
    model, units = opened.model, selection.units
    watcher.stage("cutting")
    small = shrink(model, units, layout)
    watcher.stage("proving that the cut model computes what the zeroed one does")
    proof = prove(model, units, small, calibration[:PROOF_BATCHES], watcher.evaluated)
    params = total_parameters(small)
    repaired = None
    if cutting.repair:
        watcher.stage("repairing")
        repaired = repair_model(
            model, units, small, repairing, form=cutting.repair, loss=opened.loss, progress=watcher.evaluated
        )
        repaired = replace(repaired, size=cutting.repair_size)
        watcher.repaired(repaired)
    healed, unhealed = None, None
    if heal:
        with only_writer(folder):
            healed, unhealed = heal(units, small, folder)
    fields = selection.to_json()
    record = CutRecord(
        key=key,
        model=opened.name,
        model_digest=opened.digest,
        family=family_of(model),
        task=task_of(model),
        layout=FREE if layout_of(small) else UNIFORM,
        dense_params=total_parameters(model),
        params=params,
        proof=proof,
        pulls=selection.pulls,
        units=units,
        selection_digest=jsonio.fingerprint({part: fields[part] for part in ("settings", "units", "trace")}),
        versions=versions(),
        made_with=selection.made_with,
        repair=repaired,
        heal=healed,
        unhealed=unhealed,
        goal=selection.goal,
    )
    return save_cut(opened, small, record, folder, cutting.max_shard_size, watcher)


def save_cut(
    opened: Opened, small: nn.Module, record: CutRecord, folder: Path, max_shard_size: str, watcher: Watcher
) -> tuple[CutRecord, nn.Module]:
    """Write a cut of an opened model with its record; returns the record and the model as it was read back."""
    watcher.stage(f"writing {folder}")
    reloaded = save_shrunk(
        small,
        folder,
        processor=opened.processor,
        record=record.to_json(),
        card=model_card(record),
        dtype=_dtype_to_write(opened.model, stored_dtype(opened.name, trust_remote_code=opened.trust_remote_code)),
        model_args=timm_arguments(opened.name),
        sentence_folder=opened.name if sentence_modules(opened.name) else None,
        max_shard_size=max_shard_size,
    )
    return read_record(folder) or record, reloaded


def finished_cut(folder: Path, key: str, *, again: bool, watcher: Watcher) -> CutRecord | None:
    """The record of the cut with this key, if its files are as they were written; another cut is an error.

    If files are missing, the rest is removed, so that the cut can be made again: None. So it is with `again` if files were
    changed; these are kept under another name. Otherwise that is an error.
    """
    record = read_record(folder)
    if record is None:
        return None
    if record.key != key:
        raise other_cut(folder)
    changed = changed_files(folder, record)
    if not changed:
        return record
    names = ", ".join(changed)
    aside = [name for name, there in changed.items() if there]
    if aside and not again:
        raise OutputError(
            f"{folder} holds the model of this cut, but not as it was written ({names}); move it away, or choose another place "
            "with -o."
        )
    card = folder / CARD
    if card.is_file() and card.read_bytes() != model_card(record).encode():
        aside.append(CARD)
    for name in aside:
        os.replace(folder / name, folder / f"{name}{ASIDE}")
    for name in (*record.files, RECORD, CARD):
        (folder / name).unlink(missing_ok=True)
    kept = f" What was there is kept as {', '.join(f'{name}{ASIDE}' for name in aside)}." if aside else ""
    watcher.say(f"The model in {folder} is not as it was written ({names}), so that it is cut again.{kept}")
    return None


def keep_record(folder: Path, record: CutRecord) -> None:
    """Rewrite secateur.json and the model card of a model that is already in the folder."""
    jsonio.write_text(folder / CARD, model_card(record))  # first: a start after a kill sees by the record what is missing
    jsonio.write(folder / RECORD, record.to_json())


def _dtype_to_write(model: nn.Module, stored: torch.dtype | None) -> torch.dtype:
    """The dense checkpoint's dtype, or the model's if loading rounded the weights."""
    own = next(model.parameters()).dtype
    return stored if stored is not None and stored.itemsize <= own.itemsize else own


def check_cut_place(folder: Path, followed_by: str = "") -> None:
    """Refuse, before any work, a folder that holds another model.

    `followed_by` names a file that this run writes beside its model: a model without that file is another run's.
    """
    if read_record(folder) is None:
        refuse_model(folder)
    elif followed_by and not (folder / followed_by).exists():
        raise other_cut(folder)


def check_cut(opened: Opened, cutting: Cutting, n_batches: int) -> None:
    """Refuse, before any search, a repair that this model or this number of batches does not allow."""
    if cutting.repair:
        check_repairable(opened.model, cutting.repair, n_batches)


def other_cut(folder: Path) -> OutputError:
    """The error for a folder that holds the model of another cut."""
    return OutputError(f"{folder} holds the model of another cut and is not overwritten; choose another place with -o.")


def refuse_model(folder: Path) -> None:
    """Refuse a folder that already holds a model, a file of the name of one of a model's, a model card or a record."""
    existing = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    existing += [folder / name for name in (CARD, RECORD, *WRITTEN) if (folder / name).exists()]
    if existing:
        raise _not_overwritten(existing[0])


def _not_overwritten(path: Path) -> OutputError:
    return OutputError(f"{path} is there already and is not overwritten; choose another place with -o, or move it away.")


@contextlib.contextmanager
def _staging_folder(place: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into; when the block ends without an error, its files move to `place`.

    The record moves first: it says which files belong to the model, so that one of which some are missing is known for one.
    config.json moves last: a folder without it does not load.
    """
    moved: list[Path] = []
    try:
        with only_writer(place):
            for leftover in place.glob(".writing-*"):
                shutil.rmtree(leftover, ignore_errors=True)  # left by a process that was killed
            staging = Path(tempfile.mkdtemp(prefix=".writing-", dir=place))
            try:
                yield staging
                for weights in staging.glob("*.safetensors"):
                    shutil.copymode(staging / RECORD, weights)  # safetensors makes files that only their owner can read
                _move(staging, place, moved)
            except BaseException:
                for path in moved:
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)
                raise
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise jsonio.cannot_write(place, error) from error


def _move(staging: Path, place: Path, moved: list[Path]) -> None:
    """Move the files of a model to their place once all of them are on the disk; `moved` gets each before it is moved."""
    order = {RECORD: -1, "config.json": 1}
    files = sorted(staging.iterdir(), key=lambda path: order.get(path.name, 0))
    for path in files:
        if (place / path.name).exists():
            raise _not_overwritten(place / path.name)
        for written in [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]:
            with open(written, "rb") as file:
                os.fsync(file.fileno())
    for path in files:
        moved.append(place / path.name)
        os.replace(path, place / path.name)


@contextlib.contextmanager
def _without_sampling_settings(small: Any) -> Iterator[None]:
    """While the block lasts, hide the sampling settings of a model that does not sample: transformers refuses to write them."""
    own = getattr(small, "generation_config", None)
    if own is not None and not own.do_sample:
        small.generation_config = copy.deepcopy(own)
        for name in ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            if hasattr(own, name):
                setattr(small.generation_config, name, None)
    try:
        yield
    finally:
        if own is not None:
            small.generation_config = own


def _save_timm(small: Any, folder: Path, model_args: dict[str, Any]) -> None:
    from timm.models import save_for_hf

    if not (getattr(small, "pretrained_cfg", None) or {}).get("architecture"):
        raise ModelError("The model does not name its timm architecture: create it with timm.create_model.")
    save_for_hf(small, str(folder), model_args=model_args | getattr(small, "model_args", {}), safe_serialization=True)
    layout = layout_of(small)
    if layout is not None:
        path = folder / "config.json"
        fields = json.loads(path.read_text(encoding="utf-8")) | {"secateur": layout.to_json()}
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _copy_sentence_modules(source: Path, folder: Path) -> None:
    """Copy what makes a folder one of sentence-transformers: the list of modules, their settings, and modules with weights."""
    modules = sentence_modules(str(source))
    if not modules:
        return
    listed = json.loads((source / "modules.json").read_text(encoding="utf-8"))
    for fields, (kind, path) in zip(listed, modules, strict=True):
        if kind == "Transformer":
            fields["path"] = ""  # the smaller model lies in the folder itself
            settings = [source / path / "sentence_bert_config.json", source / "config_sentence_transformers.json"]
            for file in (file for file in settings if file.is_file()):
                shutil.copyfile(file, folder / file.name)
        elif path and (source / path).is_dir():
            (folder / path).mkdir(parents=True)
            for file in (file for file in (source / path).iterdir() if file.suffix in (".json", ".safetensors")):
                shutil.copyfile(file, folder / path / file.name)
    (folder / "modules.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def _read_back(small: nn.Module, folder: Path) -> nn.Module:
    """Load the model that was written, and check that each of its tensors is the same to the bit."""
    reloaded = load_model(str(folder), device="cpu")
    tensors = reloaded.state_dict()
    for name, tensor in small.state_dict().items():
        if name not in tensors or tensors[name].dtype != tensor.dtype or not _equal(tensor, tensors[name]):
            raise ProofError(f"The written model is not the one that was cut: {name} differs when read back. Nothing is kept.")
    return reloaded


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same values; nan equals nan."""
    a = a.detach().cpu()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
