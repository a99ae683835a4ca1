"""Load data by name as the batches that a model takes: texts for a language model, images for a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from secateur.data.batches import Batches
from secateur.data.examples import example_batches, masked_batches
from secateur.data.images import ImageItems, image_batches
from secateur.data.texts import text_batches
from secateur.errors import DataError, ModelError, SettingError, reasons
from secateur.model.families import context_of, task_of
from secateur.model.losses import REFERENCE, Batch, evaluating, outputs, reference_of
from secateur.settings import BUILTIN, DISTANCE, LABELS, Settings
from secateur.tasks import IMAGE, MASKED, TASKS, TEXT, TEXT_CLASSES
from secateur.watcher import Followed, Report, silent


def load_batches(
    model: nn.Module,
    processor: Any,
    name: str,
    settings: Settings,
    *,
    split: str,
    size: int,
    most: int = 0,
    keep: bool = False,
    train: bool = False,
    progress: Report = silent,
) -> Batches:
    """Batches of the kind that the model takes: at most `most`, unless it is 0. `keep` holds images in memory, as
    always those that choose.

    `progress` gets the number of images, or of batches whose outputs are computed, done and in all.

    Where there are no labels, or the calibration data are to choose without them, the batches hold the dense model's outputs,
    unless they are there to `train` on: then these are computed as they are needed.
    """
    batch_size = settings.batch_size
    assert batch_size is not None  # set by Settings.for_task
    limit = min(size, most * batch_size) if most else size
    read = _read_texts if TASKS[task_of(model)].inputs == TEXT else _read_images
    with reasons(DataError, f"The data {name!r} ({split}) cannot be read for this model"):
        kept = keep or (split == "train" and not train)
        batches = read(model, processor, name, settings, split=split, limit=limit, keep=kept, progress=progress)
    with (
        reasons(ModelError, f"The model cannot compute the data {name!r} ({split})"),
        torch.inference_mode(),
        evaluating(model),
    ):
        outputs(model, batches[0])
    labelled = has_labels(batches)
    if settings.loss == LABELS and not labelled and not train:
        raise DataError(f"The data {name!r} ({split}) have no labels for a model for {task_of(model)}; use --loss distance.")
    own = settings.loss not in (None, LABELS, DISTANCE)
    by_distance = not own and (not labelled or (settings.loss == DISTANCE and split == "train"))
    return with_reference(model, batches, progress) if by_distance and not train else batches


def _read_texts(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    settings: Settings,
    *,
    split: str,
    limit: int,
    keep: bool,
    progress: Report,
) -> Batches:
    task, batch_size = task_of(model), settings.batch_size or 1
    common: dict[str, Any] = {"split": split, "limit": limit, "batch_size": batch_size}
    common |= {"documents": settings.documents, "holdout": settings.holdout}
    common["seq_len"] = _checked_length(model, settings.seq_len)
    if task == TEXT:
        batches = text_batches(name, tokenizer, **common)
    elif task == MASKED and _wants_labels(settings, split):
        batches = masked_batches(name, tokenizer, seed=settings.seed, **common)
    else:
        classes = {label: i for i, label in enumerate(class_names(model))} if task == TEXT_CLASSES else None
        batches = example_batches(name, tokenizer, classes=classes, **common)
    _check_tokens(model, batches)
    return batches


def _read_images(
    model: nn.Module,
    processor: Any,
    name: str,
    settings: Settings,
    *,
    split: str,
    limit: int,
    keep: bool,
    progress: Report,
) -> Batches:
    if name == BUILTIN:
        option = "--calibration" if split == "train" else "--data"
        raise DataError(f"An image model needs images: give a folder of them with {option}.")
    labelled = task_of(model) == IMAGE and _wants_labels(settings, split)
    return image_batches(
        name,
        processor,
        classes=class_names(model) if labelled else None,
        split=split,
        limit=limit,
        batch_size=settings.batch_size or 1,
        seed=settings.seed,
        keep=keep,
        holdout=settings.holdout,
        progress=progress,
    )


def has_labels(batches: Batches) -> bool:
    items = batches.items
    return items.labelled if isinstance(items, ImageItems) else "labels" in items[0]


def _wants_labels(settings: Settings, split: str) -> bool:
    """Whether labels are read: a distance chooses without them, and what judges has them if it can."""
    return settings.loss != DISTANCE or split != "train"


@dataclass(frozen=True)
class _Referenced(Sequence[Batch]):
    """Batches, each with what the dense model gave for it."""

    items: Sequence[Batch]
    references: list[Tensor]

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return {**self.items[index], REFERENCE: self.references[index]}


def with_reference(model: nn.Module, batches: Batches, progress: Report = silent) -> Batches:
    """The batches with the model's own outputs, from which distances are measured: run it before anything is zeroed.

    >>> DamageMeter(model, with_reference(model, batches))
    """
    with torch.inference_mode(), evaluating(model):
        references = [reference_of(model, batch) for batch in Followed(batches, progress)]
    return replace(batches, items=_Referenced(batches.items, references))


def _checked_length(model: nn.Module, seq_len: int) -> int:
    context = context_of(model)
    if context is not None and seq_len > context:
        raise SettingError(f"The sequence length is {seq_len}, but the model takes at most {context} tokens.")
    return seq_len


def _check_tokens(model: nn.Module, batches: Batches) -> None:
    network: Any = model  # mypy takes every attribute of a module for a tensor
    n_tokens = network.get_input_embeddings().num_embeddings
    largest = max(int(batch["input_ids"].max()) for batch in batches)
    if largest >= n_tokens:
        raise ModelError(
            f"The tokenizer gives token {largest}, but the model has only {n_tokens}: it is another model's tokenizer."
        )


def class_names(model: nn.Module) -> list[str]:
    """The names of a classifier's outputs, in order; numbers if it has no names."""
    network: Any = model
    names = getattr(getattr(network, "config", None), "id2label", None)
    if not names:
        return [str(i) for i in range(network.num_classes)]
    if missing := [i for i in range(len(names)) if i not in names]:
        raise ModelError(
            f"The config.json of the model names {len(names)} classes in its id2label, but not the one with the number "
            f"{missing[0]}: mend the config, or use --loss distance."
        )
    return [str(names[i]) for i in range(len(names))]
