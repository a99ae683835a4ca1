"""Evaluation: loss with perplexity, or with top-1 and top-5, of a model as it is (zeroed or not). Chooses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from secateur.judgement import Evaluation
from secateur.model.losses import IGNORED, Batch, evaluating, row_losses


def evaluate(model: nn.Module, batches: Sequence[Batch], progress: Callable[[int, int], None] | None = None) -> Evaluation:
    """The loss over all batches, with perplexity for texts or top-1 and top-5 for images.

    >>> with zeroed(model, selection.units):
    ...     without = evaluate(model, batches)
    """
    text = "input_ids" in batches[0]
    losses: list[float] = []
    loss_sum, rows, in_top1, in_top5, words, words_right = 0.0, 0, 0, 0, 0, 0
    with torch.inference_mode(), evaluating(model):
        for i, batch in enumerate(batches):
            row_loss, labels, best = row_losses(model, batch, best=not text or "last_word" in batch)
            total, n = float(row_loss.sum()), int((labels != IGNORED).sum())
            if not n:
                continue  # this batch predicts nothing
            losses.append(total / n)
            loss_sum, rows = loss_sum + total, rows + n
            right = best == labels[:, None] if best is not None else None  # (rows, 1 or 5)
            if right is not None and not text:
                in_top1, in_top5 = in_top1 + int(right[:, 0].sum()), in_top5 + int(right.sum())
            elif right is not None:
                last = batch["last_word"][:, 1:].to(labels.device)  # nothing predicts the first token
                right = (right.view(last.shape) | ~last).all(-1)  # a word is right when all its tokens are
                words, words_right = words + int(last.any(-1).sum()), words_right + int((right & last.any(-1)).sum())
            if progress:
                progress(i + 1, len(batches))
    loss = loss_sum / rows
    if not text:
        return Evaluation(loss, rows, tuple(losses), top1=in_top1 / rows, top5=in_top5 / rows)
    accuracy = words_right / words if words else None
    return Evaluation(loss, rows, tuple(losses), perplexity=_exp(loss), last_word_accuracy=accuracy)


def perplexity(model: nn.Module, batches: Sequence[Batch]) -> float:
    """exp of the mean loss over all predicted tokens."""
    return _exp(evaluate(model, batches).loss)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan
