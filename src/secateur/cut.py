"""From a selection to a smaller checkpoint: shrink, prove, repair, write, read back, evaluate and measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur import jsonio
from secateur.accounting import total_parameters
from secateur.card import model_card
from secateur.checkpoint import CARD, FORMAT, RECORD, check_shard_size, read_record, refuse_model, save_shrunk
from secateur.data import Batches
from secateur.errors import OutputError, SelectionError, not_one_of
from secateur.evaluate import evaluate
from secateur.families import family_of, task_of
from secateur.losses import Batch, device_of
from secateur.measure import disk_bytes, measure, peak_memory
from secateur.models import digest, load_model, stored_dtype, timm_arguments, versions
from secateur.recovery import FORMS, check_repairable, repair as repair_model
from secateur.selection import Selection
from secateur.surgery import FREE, UNIFORM, layout_of, prove, shrink
from secateur.watcher import Watcher

PROOF_BATCHES = 2
NEW_TOKENS = 16  # decoded for the measurement


def cut(
    model: nn.Module,
    selection: Selection,
    out: str | Path,
    *,
    name: str,
    calibration: Sequence[Batch],
    layout: str = FREE,
    processor: Any = None,
    evaluation: Batches | None = None,
    judged: Mapping[str, Any] | None = None,
    repair: str = "",
    measuring: bool = True,
    tokens: int = 128,
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Write the model without the selected units to `out`, proved equal to the zeroed one; return what secateur.json holds.

    `calibration` proves and repairs, `evaluation` judges the checkpoint as it is read back, and `judged` is what is known of
    the dense and the zeroed model. Called again after it was stopped, it goes on.

    >>> cut(model, selection, "small/", name="gpt2", calibration=batches, processor=tokenizer)
    """
    watcher, folder = watcher or Watcher(), Path(out)
    check_repair(repair)
    check_shard_size(max_shard_size)
    if not selection.units:
        raise SelectionError("The selection is empty: there is nothing to cut.")
    units = [unit.to_json() for unit in selection.units]
    key = jsonio.fingerprint({"units": units, "model": digest(model), "layout": layout, "repair": repair})
    record = read_record(folder)
    if record is None:
        record = _write(
            model,
            selection,
            folder,
            name=name,
            key=key,
            calibration=calibration,
            layout=layout,
            processor=processor,
            repair=repair,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
            watcher=watcher,
        )
    elif record.get("key") != key:
        raise OutputError(f"{folder} holds the model of another cut and is not overwritten; choose another place with -o.")
    before = jsonio.to_json(record)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    small: nn.Module | None = None
    if evaluation is not None and "shrunk" not in record:
        watcher.stage("evaluating the checkpoint")
        small = load_model(str(folder), device=str(device_of(model)), dtype=dtype)
        record["shrunk"] = evaluate(small, evaluation, watcher.evaluated).to_json()
        known = {"dense": "dense", "masked": "pruned"}
        record |= {side: judged[key] for side, key in known.items() if judged and key in judged}
        record["data"] = evaluation.source.name
    if measuring and "measurement" not in record:
        context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        watcher.stage("measuring dense against small")
        small = small or load_model(str(folder), device=str(device_of(model)), dtype=dtype)
        record["measurement"] = compare(
            model,
            small,
            (name, str(folder)),
            tokens=tokens,
            new_tokens=min(NEW_TOKENS, max(1, context // 2)) if isinstance(context, int) else NEW_TOKENS,
            trust_remote_code=trust_remote_code,
            watcher=watcher,
        )
        if record.get("goal", {}).get("what") == "latency":
            first = next(timing for timing in record["measurement"]["timings"] if timing["batch_size"] > 1)
            record["goal"] = record["goal"] | {"measured": 1 / first["speedup"]["value"]}
    record = dict(jsonio.to_json(record))
    if record != before:
        jsonio.write_text(folder / RECORD, jsonio.dumps(record, indent=1) + "\n")
        jsonio.write_text(folder / CARD, model_card(record))
    return record


def compare(
    dense: nn.Module,
    small: nn.Module,
    names: tuple[str, str],
    *,
    tokens: int = 128,
    new_tokens: int = NEW_TOKENS,
    batch_sizes: Sequence[int] = (1, 8),
    repeats: int = 9,
    threads: int | None = None,
    memory: bool = True,
    trust_remote_code: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Two models measured side by side, with what they take on disk and in memory; `names` are where they came from."""
    watcher = watcher or Watcher()
    found = measure(
        dense,
        small,
        batch_sizes=batch_sizes,
        tokens=tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        threads=threads,
        progress=watcher.evaluated,
    )
    disk = [disk_bytes(Path(name)) if Path(name).is_dir() else None for name in names]
    peaks: list[int | None] = [None, None]
    if memory:
        watcher.stage("measuring memory")
        peaks = [
            peak_memory(
                name,
                device=found.device,
                dtype=found.dtype,
                batch_size=max(batch_sizes),
                tokens=tokens,
                trust_remote_code=trust_remote_code,
            )
            for name in names
        ]
    return replace(found, dense_disk=disk[0], small_disk=disk[1], dense_memory=peaks[0], small_memory=peaks[1]).to_json()


def check_cut_place(folder: Path, repair: str, followed_by: str = "") -> None:
    """Refuse, before any work, a repair that is none and a place that holds another model.

    A run that goes on has left the file `followed_by` beside its model.
    """
    check_repair(repair)
    if read_record(folder) is None:
        refuse_model(folder)
    elif followed_by and not (folder / followed_by).exists():
        raise OutputError(f"{folder} holds the model of another cut and is not overwritten; choose another place with -o.")


def check_cut(model: nn.Module, repair: str, n_batches: int) -> None:
    """Refuse, before any search, a repair that this model or so few batches do not allow."""
    if repair:
        check_repairable(model, repair, n_batches)


def check_repair(repair: str) -> None:
    if repair and repair not in FORMS:
        raise not_one_of("repair", repair, FORMS)


def _write(
    model: nn.Module,
    selection: Selection,
    folder: Path,
    *,
    name: str,
    key: str,
    calibration: Sequence[Batch],
    layout: str,
    processor: Any,
    repair: str,
    max_shard_size: str,
    trust_remote_code: bool,
    watcher: Watcher,
) -> dict[str, Any]:
    refuse_model(folder)
    watcher.stage("cutting")
    small = shrink(model, selection.units, layout)
    watcher.stage("proving that the cut model computes what the masked one does")
    proof = prove(model, selection.units, small, calibration[:PROOF_BATCHES], watcher.evaluated)
    record: dict[str, Any] = {
        "key": key,
        "model": name,
        "model_digest": digest(model),
        "family": family_of(model),
        "task": task_of(model),
        "layout": FREE if layout_of(small) else UNIFORM,
        "dense_params": total_parameters(model),
        "params": total_parameters(small),
        "proof": proof.to_json() | {"sentence": str(proof)},
    }
    if repair:
        watcher.stage("repairing")
        repaired = repair_model(model, selection.units, small, calibration, form=repair, progress=watcher.evaluated)
        record["repair"] = repaired.to_json() | {"sentence": str(repaired)}
    fields = selection.to_json()
    record |= {
        **({"goal": selection.goal} if selection.goal else {}),
        "pulls": selection.pulls,
        "settings": selection.settings,
        "versions": versions(),
        "selection_digest": jsonio.fingerprint({part: fields[part] for part in ("settings", "units", "trace")}),
        "units": fields["units"],
    }
    watcher.stage(f"writing {folder}")
    save_shrunk(
        small,
        folder,
        processor=processor,
        record=record,
        card=model_card(record),
        dtype=_dtype_to_write(model, stored_dtype(name, trust_remote_code=trust_remote_code)),
        model_args=timm_arguments(name),
        max_shard_size=max_shard_size,
    )
    return {"format": FORMAT, **record}


def _dtype_to_write(model: nn.Module, stored: torch.dtype | None) -> torch.dtype:
    """That of the dense checkpoint; that of the model if it was rounded when it was loaded."""
    own = next(model.parameters()).dtype
    return stored if stored is not None and stored.itemsize <= own.itemsize else own
