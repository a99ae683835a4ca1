"""Evaluation: loss with perplexity, or with top-1 and top-5, of a model as it is (zeroed or not). Chooses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from secateur.errors import UnsupportedModel
from secateur.judgement import Evaluation
from secateur.model.families import task_of
from secateur.model.losses import IGNORED, REFERENCE, Batch, Loss, Rows, batch_losses, evaluating, row_losses
from secateur.tasks import MASKED, TASKS, TOKEN_CLASSES


def evaluate(
    model: nn.Module,
    batches: Sequence[Batch],
    progress: Callable[[int, int], None] | None = None,
    *,
    loss: Loss | None = None,
) -> Evaluation:
    """The loss over all batches, with the figures of the model's task: perplexity, top-1 and top-5, or cosine.

    Without labels the loss is the distance from the dense model's own outputs, which the batches hold. A `loss` of the user's
    own gives no other figure.

    >>> with zeroed(model, selection.units):
    ...     without = evaluate(model, batches)
    """
    count = _Count()
    with torch.inference_mode(), evaluating(model):
        for i, batch in enumerate(batches):
            if loss is not None:
                count.add(*batch_losses(model, batch, loss))
            else:
                # The best class costs time where there are as many classes as tokens.
                best = not _predicts_tokens(batch) or _classifies_tokens(model) or "last_word" in batch
                count.add_rows(row_losses(model, batch, best=best), batch)
            if progress:
                progress(i + 1, len(batches))
    mean = count.total / count.rows if count.rows else math.nan
    return Evaluation(mean, count.rows, tuple(count.losses), **({} if loss else count.figures(model, batches[0], mean)))


class _Count:
    """Sums over the batches seen so far."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.total, self.rows = 0.0, 0
        self.in_top1, self.in_top5, self.words, self.words_right = 0, 0, 0, 0

    def add(self, total: float, rows: int) -> None:
        if rows:  # else the batch predicts nothing
            self.losses.append(total / rows)
            self.total, self.rows = self.total + total, self.rows + rows

    def add_rows(self, rows: Rows, batch: Batch) -> None:
        losses, labels, best = rows
        counted = labels != IGNORED
        self.add(float(losses.sum()), int(counted.sum()))
        if best is None or not bool(counted.any()):
            return
        right = (best == labels[:, None]) & counted[:, None]  # (rows, 1 or 5)
        self.in_top1, self.in_top5 = self.in_top1 + int(right[:, 0].sum()), self.in_top5 + int(right.sum())
        if "last_word" in batch:
            last = batch["last_word"][:, 1:].to(labels.device)  # nothing predicts the first token
            known = (right.view(last.shape) | ~last).all(-1)  # a word is right when all its tokens are
            self.words, self.words_right = (
                self.words + int(last.any(-1).sum()),
                self.words_right + int((known & last.any(-1)).sum()),
            )

    def figures(self, model: nn.Module, batch: Batch, loss: float) -> dict[str, float | None]:
        """The figures of the model's task."""
        top1, top5 = (n / max(1, self.rows) for n in (self.in_top1, self.in_top5))
        if REFERENCE in batch:
            return {"cosine": 1 - loss} if TASKS[task_of(model)].embeds else {"agreement": top1}
        if not _predicts_tokens(batch):
            few = "pixel_values" not in batch and _n_classes(model) <= 5
            return {"top1": top1, "top5": None if few else top5}
        if _classifies_tokens(model):
            return {"perplexity": _exp(loss), "top1": top1}
        return {"perplexity": _exp(loss), "last_word_accuracy": self.words_right / self.words if self.words else None}


def _predicts_tokens(batch: Batch) -> bool:
    return "input_ids" in batch and "labels" in batch and batch["labels"].dim() == 2


def _classifies_tokens(model: nn.Module) -> bool:
    """Whether the model says something of the tokens themselves: then the share that is right is a figure people know."""
    try:
        return task_of(model) in (MASKED, TOKEN_CLASSES)
    except UnsupportedModel:
        return False


def _n_classes(model: nn.Module) -> int:
    return int(getattr(getattr(model, "config", None), "num_labels", 0))


def perplexity(model: nn.Module, batches: Sequence[Batch]) -> float:
    """exp of the mean loss over all predicted tokens.

    >>> perplexity(model, evaluation)
    """
    return _exp(evaluate(model, batches).loss)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan
