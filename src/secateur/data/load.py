"""Load data by name as the batches that a model takes: texts for a language model, images for a classifier."""

from __future__ import annotations

from typing import Any

from torch import nn

from secateur.data.batches import Batches
from secateur.data.images import image_batches
from secateur.data.texts import text_batches
from secateur.errors import DataError, ModelError, SettingError
from secateur.model.families import task_of
from secateur.settings import BUILTIN, Settings


def load_batches(
    model: nn.Module, processor: Any, name: str, settings: Settings, *, split: str, size: int, most: int = 0, keep: bool = False
) -> Batches:
    """Batches of the kind that the model takes: at most `most`, unless it is 0. `keep` holds images in memory."""
    batch_size = settings.batch_size
    assert batch_size is not None  # set by Settings.for_task
    limit = min(size, most * batch_size) if most else size
    if task_of(model) == "text":
        batches = text_batches(
            name,
            processor,
            split=split,
            limit=limit,
            seq_len=_checked_length(model, settings.seq_len),
            batch_size=batch_size,
            documents=settings.documents,
            holdout=settings.holdout,
        )
        _check_tokens(model, batches)
        return batches
    if name == BUILTIN:
        option = "--calibration" if split == "train" else "--data"
        raise DataError(f"An image model needs images: give a folder of them with {option}.")
    return image_batches(
        name,
        processor,
        classes=class_names(model),
        split=split,
        limit=limit,
        batch_size=batch_size,
        seed=settings.seed,
        keep=keep or split == "train",
        holdout=settings.holdout,
    )


def _checked_length(model: nn.Module, seq_len: int) -> int:
    context = getattr(model.config, "max_position_embeddings", None)
    if isinstance(context, int) and seq_len > context:
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
    """The names of an image model's outputs, in order; numbers if it has no names."""
    network: Any = model
    names = getattr(getattr(network, "config", None), "id2label", None)
    return [str(names[i]) for i in range(len(names))] if names else [str(i) for i in range(network.num_classes)]
