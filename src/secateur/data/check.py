"""What the user should know about data before they choose or judge: whether the model and its tokenizer seem to know them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from secateur.data.batches import Batches
from secateur.model.losses import IGNORED, REFERENCE, Batch, batch_loss, evaluating

NEAR_GUESSING = 0.9  # of the loss of a model that knows nothing
MOST_UNKNOWN = 0.03
MOST_OF_ONE = 0.5


def remarks(model: nn.Module, tokenizer: Any, batches: Batches) -> list[str]:
    """What was found out about the data, and the warnings."""
    return [*([batches.note] if batches.note else []), *warnings(model, tokenizer, batches)]


def warnings(model: nn.Module, tokenizer: Any, batches: Batches) -> list[str]:
    """A sentence for each sign that the model was not made for these texts, or not for texts cut like this; none for images."""
    if "input_ids" not in batches[0]:
        return []
    name, tokens = batches.source.name, [_tokens(batch) for batch in batches]
    found = []
    loss, guessing = _dense_loss(model, batches[0]), _guessing(model)
    if loss > NEAR_GUESSING * guessing:
        cut = "; --documents lines would take each line for a document of its own" if batches.joined else ""
        found.append(
            f"The dense model's loss on {name} is {loss:.2f}, and that of a blind guess is {guessing:.2f}: it does not know "
            f"such text, or not cut like this{cut}."
        )
    unknown = _unknown(tokenizer, torch.cat(tokens))
    if unknown > MOST_UNKNOWN:
        found.append(
            f"{unknown:.0%} of the tokens of {name} are unknown to the tokenizer: check that it is text for this model."
        )
    if sum(_commonest(of_batch) > MOST_OF_ONE for of_batch in tokens) > len(tokens) / 2:
        found.append(f"More than half of the tokens of {name} are one and the same: check that it is text for this model.")
    return found


def _tokens(batch: Batch) -> Tensor:
    """The tokens of a batch without the padding."""
    ids = batch["input_ids"]
    if "attention_mask" in batch:
        return ids[batch["attention_mask"].bool()]
    labels = batch.get("labels")
    return ids[labels != IGNORED] if labels is not None and labels.shape == ids.shape else ids.flatten()


def _dense_loss(model: nn.Module, batch: Batch) -> float:
    """The loss of a model that predicts tokens; 0 for any other."""
    labels = batch.get("labels")
    if labels is None or labels.shape != batch["input_ids"].shape or REFERENCE in batch:
        return 0.0
    with torch.inference_mode(), evaluating(model):
        return float(batch_loss(model, batch))


def _guessing(model: nn.Module) -> float:
    network: Any = model  # mypy takes every attribute of a module for a tensor
    return math.log(network.get_input_embeddings().num_embeddings)


def _unknown(tokenizer: Any, tokens: Tensor) -> float:
    """The share of unknown tokens; 0 if the unknown token also begins or ends texts, as GPT-2's does."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return 0.0
    return float((tokens == unknown).float().mean())


def _commonest(tokens: Tensor) -> float:
    """The share of the commonest token."""
    return float(tokens.bincount().max() / len(tokens))
