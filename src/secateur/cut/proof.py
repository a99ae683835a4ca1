"""The proof: a cut model computes what the zeroed one does, on batches and token by token with the cache. Cuts nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import ProofError, SettingError, first_line
from secateur.model.families import task_of
from secateur.model.losses import Batch, device_of, evaluating, predictions
from secateur.model.zeroing import zeroed
from secateur.units import Unit

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # as a share of the logits' scale
PROMPT, NEW_TOKENS = 16, 64  # lengths of the prompt and of the text that continues it


@dataclass(frozen=True)
class Proof:
    """How closely a cut model computes what the zeroed one does."""

    difference: float  # the largest difference between two logits
    scale: float  # the largest absolute logit
    tolerance: float  # the largest difference allowed, as a share of the scale
    batches: int
    tokens: int = 0  # number of tokens continued greedily with the K/V cache
    same_tokens: int = 0
    tied_tokens: int = 0  # tokens that differ only because the zeroed model's two highest logits are equal up to rounding

    @property
    def relative(self) -> float:
        return self.difference / self.scale if self.scale else self.difference

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"relative": self.relative}

    def __str__(self) -> str:
        text = f"the cut model's logits differ from the zeroed model's by at most {self.relative:.1e} of their scale"
        if self.tokens:
            text += f", and {self.same_tokens} of {self.tokens} tokens of a text continued with the cache are the same"
        return text + (f" ({self.tied_tokens} more are ties)" if self.tied_tokens else "")


def prove(
    model: nn.Module,
    units: Sequence[Unit],
    small: nn.Module,
    batches: Sequence[Batch],
    progress: Callable[[int, int], None] | None = None,
) -> Proof:
    """Compare the cut model with the zeroed one on batches and token by token; raise a ProofError if they differ.

    >>> prove(model, selection.units, shrink(model, selection.units), calibration[:2])
    """
    if not batches:
        raise SettingError("A proof needs at least one batch.")
    dtype = next(model.parameters()).dtype
    difference, scale = 0.0, 0.0
    tokens: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode(), evaluating(model), evaluating(small):
        for i, batch in enumerate(batches):
            with zeroed(model, units):
                expected = predictions(model, batch).float()
            with _run_errors():
                actual = predictions(small, batch).float()
            scale = _larger(scale, float(expected.abs().max()))
            difference = _larger(difference, _difference(expected, actual))
            if progress:
                progress(i + 1, len(batches))
        if task_of(model) == "text":
            tokens = _continue(model, units, small, batches[0])
    for expected, actual in tokens:
        difference = _larger(difference, _difference(expected, actual))
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    same, tied = 0, 0
    for expected, actual in tokens:
        if expected.argmax() == actual.argmax():
            same += 1
        else:
            highest = expected.topk(2).values
            tied += bool(highest[0] - highest[1] <= 2 * tolerance * scale)
    proof = Proof(difference, scale, tolerance, len(batches), len(tokens), same, tied)
    if not math.isfinite(scale):
        raise ProofError("The zeroed model's logits are not finite, so the cut cannot be proved and is refused.")
    if not proof.relative <= tolerance or same + tied < len(tokens):
        raise ProofError(f"The cut is refused, since {proof}; at most {tolerance:g} of the scale is allowed.")
    return proof


def _continue(model: Any, units: Sequence[Unit], small: Any, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Continue a text as the zeroed model would, each model with its own cache; the logits of both models for each token."""
    context = getattr(model.config, "max_position_embeddings", None)
    length = PROMPT + NEW_TOKENS if not isinstance(context, int) else min(PROMPT + NEW_TOKENS, context)
    ids = batch["input_ids"][:1, : min(PROMPT, length // 2)].to(device_of(model))
    compared = []
    caches: list[Any] = [None, None]
    for _ in range(length - ids.shape[1]):
        with zeroed(model, units):
            expected = model(input_ids=ids, past_key_values=caches[0], use_cache=True)
        with _run_errors():
            actual = small(input_ids=ids, past_key_values=caches[1], use_cache=True)
        caches = [expected.past_key_values, actual.past_key_values]
        compared.append((expected.logits[0, -1].float(), actual.logits[0, -1].float()))
        ids = compared[-1][0].argmax().view(1, 1)
    return compared


@contextmanager
def _run_errors() -> Iterator[None]:
    """Turn an error that the cut model raises when it runs into a ProofError."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        raise ProofError(f"The cut model cannot be run and is refused: {first_line(error)}") from error


def _difference(expected: Tensor, actual: Tensor) -> float:
    """The largest difference between two logits; infinite if the shapes differ."""
    return float((expected - actual).abs().max()) if expected.shape == actual.shape else math.inf


def _larger(a: float, b: float) -> float:
    """The larger of two numbers; nan if one of them is."""
    return a if math.isnan(a) or b <= a else b
