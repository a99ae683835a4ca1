"""Samples: what the dense and the small model do with a few examples, for people to look at. They decide nothing."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.data.batches import Batches
from secateur.data.load import class_names
from secateur.files import jsonio
from secateur.judgement import Changed, Continued, Samples
from secateur.model.families import context_of, task_of
from secateur.model.losses import Batch, device_of, evaluating, predictions
from secateur.tasks import IMAGE, TEXT, TEXT_CLASSES

TEXTS = 2  # that are continued
PROMPT, NEW_TOKENS = 40, 40
EXAMPLES = 128  # whose classes are compared, at most
SHOWN = 8  # of those whose class changed
PIXELS = 112  # on the longer side of an image
LETTERS = 400  # of a text


def sample(dense: nn.Module, small: nn.Module, batches: Batches, processor: Any, *, of: str) -> Samples:
    """The texts or classes of both models on examples of the evaluation data; empty for other tasks.

    >>> sample(model, load_shrunk("small/"), evaluation, tokenizer, of="").continued[0].small
    """
    task = task_of(dense)
    with torch.inference_mode(), evaluating(dense), evaluating(small):
        if task == TEXT:
            return Samples(of, continued=tuple(_continued(dense, small, batches, processor)))
        if task in (IMAGE, TEXT_CLASSES):
            return _compared(dense, small, batches, processor, of)
    return Samples(of)


def read_samples(path: Path, of: str) -> Samples | None:
    """The samples of this small model that an earlier start wrote; None if there are none."""
    try:
        samples = jsonio.decode(jsonio.read(path), Samples)
    except (OSError, ValueError):
        return None
    return samples if samples.of == of else None


# Texts


def _continued(dense: nn.Module, small: nn.Module, batches: Batches, tokenizer: Any) -> Iterator[Continued]:
    rows = (row for batch in batches for row in _texts(batch))
    for ids in itertools.islice(rows, TEXTS):
        context = context_of(dense)
        room = min(len(ids), PROMPT + NEW_TOKENS) if context is None else min(len(ids), PROMPT + NEW_TOKENS, context)
        prompt = ids[: min(PROMPT, room // 2)]
        new = NEW_TOKENS if context is None else min(NEW_TOKENS, context - len(prompt))
        said = [_continue(model, prompt, new, getattr(tokenizer, "eos_token_id", None)) for model in (dense, small)]
        after = ids[len(prompt) : len(prompt) + new].tolist()
        yield Continued(*(tokenizer.decode(part, skip_special_tokens=True) for part in (prompt.tolist(), after, *said)))


def _texts(batch: Batch) -> Iterator[Tensor]:
    """The tokens of each text, without padding."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    for i in range(len(ids)):
        yield ids[i] if mask is None else ids[i][mask[i].bool()]


def _continue(model: Any, prompt: Tensor, n: int, end: int | None) -> list[int]:
    """At most n tokens after the prompt, each the one that the model rates highest."""
    ids, cache, said = prompt[None].to(device_of(model)), None, []
    for _ in range(n):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        said.append(int(ids))
        if said[-1] == end:
            break
    return said


# Classes


def _compared(dense: nn.Module, small: nn.Module, batches: Batches, processor: Any, of: str) -> Samples:
    names, looked_at, differ = class_names(dense), 0, 0
    changed: list[Changed] = []
    for batch in batches:
        best = [predictions(model, batch).argmax(-1).tolist() for model in (dense, small)]
        labels = batch["labels"].tolist() if "labels" in batch else [None] * len(best[0])
        looked_at += len(labels)
        for i, (label, one, other) in enumerate(zip(labels, *best, strict=True)):
            if one != other:
                differ += 1
                if len(changed) < SHOWN:
                    right = "" if label is None else names[label]
                    changed.append(Changed(right, names[one], names[other], **_shown(batch, i, processor)))
        if looked_at >= EXAMPLES:
            break
    return Samples(of, changed=tuple(changed), looked_at=looked_at, differ=differ)


def _shown(batch: Batch, i: int, processor: Any) -> dict[str, str]:
    """The example as people see it."""
    if "pixel_values" in batch:
        return {"image": _jpeg(batch["pixel_values"][i], processor)}
    (ids,) = itertools.islice(_texts(batch), i, i + 1)
    return {"text": str(processor.decode(ids.tolist(), skip_special_tokens=True))[:LETTERS]}


def _jpeg(pixels: Tensor, processor: Any) -> str:
    """A small picture as a data URL, made from what the model got: normalised colours are turned back."""
    from PIL import Image

    images = getattr(processor, "processor", None)
    colours = [getattr(images, name, None) for name in ("image_mean", "image_std")]
    wide = pixels.detach().float().cpu()
    if all(_a_triple(value) for value in colours):
        mean, deviation = (torch.tensor(value).view(3, 1, 1) for value in colours)
        wide = wide * deviation + mean
    else:
        wide = (wide - wide.min()) / (wide.max() - wide.min()).clamp(min=1e-6)
    array = (wide.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()  # (height, width, 3)
    picture, data = Image.fromarray(array), io.BytesIO()
    picture.thumbnail((PIXELS, PIXELS))
    picture.save(data, format="JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def _a_triple(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 3
