"""From a batch to losses: the one place that calls a model (Eq. 16).

A batch is a dict of tensors: `input_ids` and `labels` (-100 where nothing is to be predicted) for text, `pixel_values`
and `labels` for images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
IGNORED = -100


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off while the block lasts, and then as it was."""
    modes = [(module, module.training) for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (rows, classes) and labels (rows,) of a batch; a row is a predicted token, or an image."""
    device = device_of(model)
    labels = batch["labels"].to(device)
    if "input_ids" in batch:
        logits = model(input_ids=batch["input_ids"].to(device), use_cache=False).logits[:, :-1]  # (batch, time - 1, vocabulary)
        return logits.flatten(0, 1), labels[:, 1:].flatten()  # the token at t is predicted at t - 1
    dtype = next(model.parameters()).dtype
    output = model(batch["pixel_values"].to(device, dtype))
    return output if isinstance(output, Tensor) else output.logits, labels


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row in float32; 0 where the label is -100."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """L(B): the mean loss of a batch over its predicted tokens, or its images (Eq. 16)."""
    logits, labels = predict(model, batch)
    return row_losses(logits, labels).sum() / (labels != IGNORED).sum()
