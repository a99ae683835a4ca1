"""From a batch to losses: the one place that calls a model (Eq. 16).

A batch is a dict of tensors: `input_ids` and `labels` (-100 for tokens that are not predicted) for text, `pixel_values`
and `labels` for images. A row is a predicted token, or an image.

The logits of a text are never in memory all at once: a language model's output layer runs over pieces of the vocabulary that
fit in the processor's cache, and the log-sum-exps of the pieces are combined. The logits of 1,024 positions and 152k tokens
would take 600 MB. (Gradients need them all.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
IGNORED = -100
CPU_PIECE, PIECE = 2**18, 2**25  # logits in a piece: 1 MiB fits in a CPU's cache, other devices are faster on large matrices
LEAST_WIDTH = 256  # of a piece, for any number of rows: a narrower matrix product is slow


class Rows(NamedTuple):
    """The losses, labels and best classes of the rows of a batch."""

    losses: Tensor  # (rows,) cross-entropy in float32; 0 if the label is -100
    labels: Tensor  # (rows,)
    best: Tensor | None  # (rows, 1 or 5) the classes of the highest logits, if they were asked for


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode (no dropout) while the block lasts, then restore every module's mode."""
    modes = [(module, module.training) for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def standing_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the module's forward by this one while the block lasts."""
    own = module.__dict__.get("forward")  # device maps set a forward on the instance
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """L(B), the mean loss of a batch over its predicted tokens, or its images (Eq. 16)."""
    return part_losses(model, batch, 1)[0]


def part_losses(model: nn.Module, batch: Batch, parts: int) -> Tensor:
    """The mean loss of each part of a batch that consists of equal parts, one after another."""
    losses, labels, _ = row_losses(model, batch)
    return losses.view(parts, -1).sum(1) / (labels.view(parts, -1) != IGNORED).sum(1)


def row_losses(model: nn.Module, batch: Batch, *, best: bool = False) -> Rows:
    """The loss of each row of a batch. `best` also asks for the best class of a token, or the five best classes of an image.

    The best class of a row whose loss is nan is -1.
    """
    text = "input_ids" in batch
    head = output_layer(model) if text else None
    if head is None:
        logits, labels = predict(model, batch)
        losses = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
        highest = _highest(logits, 1 if text else 5) if best else None
    else:
        losses, labels, highest = _losses_by_pieces(model, head, batch, best=best)
    return Rows(losses, labels, None if highest is None else highest.masked_fill(losses.isnan()[:, None], -1))


def _highest(logits: Tensor, n: int) -> Tensor:
    return logits.argmax(-1, keepdim=True) if n == 1 else logits.topk(min(n, logits.shape[-1])).indices


def _losses_by_pieces(model: nn.Module, head: nn.Linear, batch: Batch, *, best: bool) -> Rows:
    """The cross-entropy of each row: log-sum-exp minus the label's logit, both computed piece by piece over the vocabulary."""
    inputs: list[Tensor] = []

    def capture(x: Tensor) -> Tensor:
        inputs.append(x)
        return x[..., :0]  # an empty tensor of logits, so that the model's forward can finish

    with standing_in(head, capture):
        _, labels = predict(model, batch)
    hidden = inputs[0][:, :-1].flatten(0, 1).to(head.weight.device)  # (rows, width of the model)
    labels = labels.to(hidden.device)
    n_rows, n_classes = len(hidden), head.out_features
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)  # Gemma's, after the output layer
    width = max(LEAST_WIDTH, (CPU_PIECE if hidden.device.type == "cpu" else PIECE) // max(1, n_rows))
    sums: list[Tensor] = []
    label_logits = hidden.new_full((n_rows,), torch.nan, dtype=torch.float32)  # stays nan if the label is not a class
    best_logits = hidden.new_full((n_rows,), -torch.inf, dtype=torch.float32)
    best_classes = torch.full_like(labels, -1)
    for start in range(0, n_classes, width):
        stop = min(start + width, n_classes)
        bias = None if head.bias is None else head.bias[start:stop]
        logits = F.linear(hidden, head.weight[start:stop], bias)  # (rows, classes of the piece)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        logits = logits.float()
        sums.append(logits.logsumexp(-1))
        in_piece = (labels >= start) & (labels < stop)
        gathered = logits.gather(1, (labels - start).clamp(0, stop - start - 1)[:, None])[:, 0]
        label_logits = torch.where(in_piece, gathered, label_logits)
        if best:
            highest, index = logits.max(-1)
            best_classes = torch.where(highest > best_logits, index + start, best_classes)
            best_logits = torch.maximum(best_logits, highest)
    losses = torch.stack(sums).logsumexp(0) - label_logits
    return Rows(losses.masked_fill(labels == IGNORED, 0), labels, best_classes[:, None] if best else None)


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits (rows, classes) and labels (rows,) of a batch."""
    device = device_of(model)
    labels = batch["labels"].to(device)
    if "input_ids" in batch:
        logits = model(input_ids=batch["input_ids"].to(device), use_cache=False).logits[:, :-1]  # (batch, time - 1, vocabulary)
        return logits.flatten(0, 1), labels[:, 1:].flatten()  # the token at t is predicted at t - 1
    dtype = next(model.parameters()).dtype
    output = model(batch["pixel_values"].to(device, dtype))
    return output if isinstance(output, Tensor) else output.logits, labels


def output_layer(model: nn.Module) -> nn.Linear | None:
    """The layer that computes a language model's logits, if it is a plain nn.Linear with its weights loaded and no hooks."""
    network: Any = model
    head = network.get_output_embeddings() if hasattr(network, "get_output_embeddings") else None
    if type(head) is not nn.Linear or head.weight.is_meta or head._forward_hooks or head._forward_pre_hooks:
        return None
    return head
