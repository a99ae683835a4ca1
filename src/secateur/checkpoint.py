"""Checkpoints of shrunk models: safetensors and JSON in a folder that loads again, with a card that says what was done.

What is written is read back and compared before it takes its place: a folder is there whole, or not at all.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur import jsonio
from secateur.errors import ModelError, OutputError, ProofError, SettingError, first_line
from secateur.models import load_model
from secateur.surgery import layout_of

RECORD = "secateur.json"
CARD = "README.md"
FORMAT = 1  # of secateur.json


def save_shrunk(
    small: nn.Module,
    folder: str | Path,
    *,
    processor: Any = None,
    record: Mapping[str, Any] | None = None,
    card: str | None = None,
    dtype: torch.dtype | None = None,
    model_args: Mapping[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write a model to a folder that `load_shrunk` reads, and a stock loader too where its layers are alike.

    The `processor` (tokenizer or image processor), the `record` (secateur.json) and the `card` (README.md) go along. The
    weights are written in `dtype`, by default the model's own. `model_args` is what timm made the dense model with. Other files
    in the folder stay; a model that is there already is an error.

    >>> save_shrunk(small, "small/", processor=tokenizer)
    """
    place = Path(folder)
    refuse_model(place)
    check_shard_size(max_shard_size)
    if dtype is not None and next(small.parameters()).dtype != dtype:
        small = copy.deepcopy(small).to(dtype)
    with _beside(place) as beside:
        with _writing(place):
            if hasattr(small, "config"):
                with _sound_generation(small):
                    small.save_pretrained(beside, max_shard_size=max_shard_size)  # type: ignore[operator]
            else:
                _save_timm(small, beside, dict(model_args or {}))
            if processor is not None and hasattr(processor, "save_pretrained"):
                processor.save_pretrained(beside)
        (beside / RECORD).write_text(jsonio.dumps({"format": FORMAT, **(record or {})}, indent=1) + "\n", encoding="utf-8")
        (beside / CARD).write_text(card or f"# {place.name}\n\nA model pruned with Secateur.\n", encoding="utf-8")
        _check_same(small, beside)


def load_shrunk(folder: str | Path, *, device: str = "auto", dtype: str | None = None) -> nn.Module:
    """The model in a folder that `save_shrunk` wrote, in the dtype it was written in. No code from the folder is run.

    >>> small = load_shrunk("small/")
    """
    if not Path(folder).is_dir():
        raise ModelError(f"There is no folder {folder}: give one that holds a shrunk model.")
    return load_model(str(folder), device=device, dtype=dtype)


def read_record(folder: Path) -> dict[str, Any] | None:
    """What secateur.json says of the model beside it; None where there is no model."""
    path = folder / RECORD
    if not path.exists() or not (folder / "config.json").exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise OutputError(f"{path} has format {fields['format']!r}; this version of Secateur reads format {FORMAT}.")
        return dict(fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} is not a record of Secateur's, or is damaged; move it away or choose another -o.") from error


def refuse_model(folder: Path) -> None:
    """Refuse to write a model where one is, or something that would have to give way."""
    there = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    there += [folder / name for name in ("config.json", CARD, RECORD) if (folder / name).exists()]
    if there:
        raise _in_the_way(there[0])


def _in_the_way(path: Path) -> OutputError:
    return OutputError(f"{path} is there already and is not overwritten; choose another place with -o, or move it away.")


def check_shard_size(size: str) -> None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*[KMGT]i?B", size)
    if not found or not float(found[1]):
        raise SettingError(f"The largest file of weights is {size!r}, but must be a size such as 500MB or 5GB.")


@contextlib.contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """A folder to write into, whose files then move to their place, config.json last: without it nothing is loaded."""
    from safetensors import SafetensorError

    new = not place.exists()
    moved: list[Path] = []
    try:
        place.mkdir(parents=True, exist_ok=True)
        for left in place.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)  # by a process that was killed
        beside = Path(tempfile.mkdtemp(prefix=".writing-", dir=place))
        try:
            yield beside
            for weights in beside.glob("*.safetensors"):
                shutil.copymode(beside / RECORD, weights)  # as any other file: safetensors lets nobody else read them
            order = {RECORD: 1, "config.json": 2}
            files = sorted(beside.iterdir(), key=lambda path: order.get(path.name, 0))
            for path in files:
                if (place / path.name).exists():
                    raise _in_the_way(place / path.name)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            for path in files:
                moved.append(place / path.name)
                os.replace(path, place / path.name)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except BaseException as error:
        for path in moved:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            cause = error if isinstance(error, OSError) else OSError(f"the weights could not be written ({error})")
            raise jsonio.cannot_write(place, cause) from error
        raise
    finally:
        if new:
            with contextlib.suppress(OSError):
                place.rmdir()  # if nothing came of it


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Whatever a library says of a model that it will not write, as one sentence of ours."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        raise OutputError(f"The model cannot be written to {place}: {first_line(error)}") from error


@contextlib.contextmanager
def _sound_generation(small: Any) -> Iterator[None]:
    """While a model is written, leave out how it would sample if it does not: transformers refuses to write that."""
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
        raise ModelError("The model does not say which of timm's architectures it is: make it with timm.create_model.")
    save_for_hf(small, str(folder), model_args=model_args | getattr(small, "model_args", {}), safe_serialization=True)
    layout = layout_of(small)
    if layout is not None:
        path = folder / "config.json"
        fields = json.loads(path.read_text(encoding="utf-8")) | {"secateur": layout}
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _check_same(small: nn.Module, folder: Path) -> None:
    """Read back what was written: every tensor must be there, to the bit."""
    again = load_model(str(folder), device="cpu").state_dict()
    for name, tensor in small.state_dict().items():
        if name not in again or again[name].dtype != tensor.dtype or not _equal(tensor, again[name]):
            raise ProofError(f"What was written is not what was cut: {name} differs when read back; nothing is kept.")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    a = a.detach().cpu()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
