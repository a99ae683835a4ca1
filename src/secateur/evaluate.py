"""Evaluation: loss with perplexity, or with top-1 and top-5, of a model as it stands (zeroed or not)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from secateur.losses import IGNORED, Batch, evaluating, row_losses


@dataclass(frozen=True)
class Evaluation:
    """What a model scores on some batches. A non-finite batch makes the loss non-finite; it is never left out."""

    loss: float  # mean over all predicted tokens, or all images
    rows: int  # how many of them
    batch_losses: tuple[float, ...]
    perplexity: float | None = None
    last_word_accuracy: float | None = None
    top1: float | None = None
    top5: float | None = None

    @property
    def nonfinite_batches(self) -> int:
        return sum(not math.isfinite(loss) for loss in self.batch_losses)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in fields.items() if value is not None} | {
            "nonfinite_batches": self.nonfinite_batches
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Evaluation:
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        numbers = {name: float(value) for name, value in known.items() if name not in ("rows", "batch_losses")}
        return cls(**numbers, rows=int(known["rows"]), batch_losses=tuple(float(loss) for loss in known["batch_losses"]))


def evaluate(model: nn.Module, batches: Sequence[Batch], progress: Callable[[int, int], None] | None = None) -> Evaluation:
    """Loss, and what goes with it, over all batches.

    >>> with zeroed(model, selection.units):
    ...     pruned = evaluate(model, batches)
    """
    text = "input_ids" in batches[0]
    losses: list[float] = []
    loss_sum, rows, in_top1, in_top5, words, words_right = 0.0, 0, 0, 0, 0, 0
    with torch.inference_mode(), evaluating(model):
        for i, batch in enumerate(batches):
            found, labels, best = row_losses(model, batch, best=not text or "last_word" in batch)
            total, n = float(found.sum()), int((labels != IGNORED).sum())
            if not n:
                continue  # nothing is predicted here
            losses.append(total / n)
            loss_sum, rows = loss_sum + total, rows + n
            right = best == labels[:, None] if best is not None else None  # (rows, 1 or 5)
            if right is not None and not text:
                in_top1, in_top5 = in_top1 + int(right[:, 0].sum()), in_top5 + int(right.sum())
            elif right is not None:
                last = batch["last_word"][:, 1:].to(labels.device)  # the first token is predicted by nothing
                right = (right.view(last.shape) | ~last).all(-1)  # a word is right when all of it is
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


def changes(dense: Evaluation, pruned: Evaluation) -> dict[str, float]:
    """What pruning changed: negative delta_top1 is accuracy lost, positive ppl_change_percent is perplexity gained."""
    found = {"delta_loss": pruned.loss - dense.loss}
    if dense.perplexity is not None and pruned.perplexity is not None:
        found["ppl_change_percent"] = 100 * (pruned.perplexity / dense.perplexity - 1)
    for name in ("top1", "top5", "last_word_accuracy"):
        if getattr(dense, name) is not None:
            found[f"delta_{name}"] = getattr(pruned, name) - getattr(dense, name)
    return found


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan
