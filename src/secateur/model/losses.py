"""From a batch to losses: the one place that calls a model (Eq. 16).

A batch is a dict of tensors. Whatever the model's forward takes is passed on: `input_ids` with their `attention_mask`, or
`pixel_values`. `labels` say what is right: the next tokens of a text (shifted here, as transformers does), the tokens at masked
places, or the class of a text or image; -100 marks what does not count. Without labels, `reference` holds what the dense model
gave, and the loss is the distance from it. A row is a predicted token, a text or an image. Padding counts nowhere.

The logits of a text are never in memory all at once: a language model's output layer runs over pieces of the vocabulary that
fit in the processor's cache, and the log-sum-exps of the pieces are combined. The logits of 1,024 positions and 152k tokens
would take 600 MB. (A search's gradients need them all; `divergence` computes its own, piece by piece.)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import DataError, SettingError, UnsupportedModel, first_line
from secateur.model.families import task_of
from secateur.settings import DISTANCE, LABELS
from secateur.tasks import IMAGE, MASKED, TASKS, TEXT, TOKEN_CLASSES

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]  # of a user's own: the mean loss of a batch, or the loss of each row
IGNORED = -100
REFERENCE = "reference"
OWN = ("labels", REFERENCE, "last_word")  # entries of a batch that are not for the model
CPU_PIECE, PIECE = 2**18, 2**25  # logits in a piece: 1 MiB fits in a CPU's cache, other devices are faster on large matrices
TRAINED_PIECE, LEAST_ROWS = 2**24, 16  # logits in a piece where gradients are wanted, and rows for any number of classes
LEAST_WIDTH = 256  # of a piece, for any number of rows: a narrower matrix product is slow


class Rows(NamedTuple):
    """The losses, labels and best classes of the rows of a batch."""

    losses: Tensor  # (rows,) in float32; 0 if the label is -100
    labels: Tensor  # (rows,) the right classes, or the dense model's; -100 where nothing counts
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


def handing_on(like: Any) -> Callable[..., Any]:
    """A forward for a block that is passed over: it returns its input, in the form of `like`, which is a block's output."""

    def forward(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        return (hidden_states, *[None] * (len(like) - 1)) if isinstance(like, tuple) else hidden_states

    return forward


def batch_loss(model: nn.Module, batch: Batch, loss: Loss | None = None) -> Tensor:
    """L(B), the mean loss of a batch over its predicted tokens, texts or images (Eq. 16), or what a `loss` of your own says."""
    return part_losses(model, batch, 1, loss)[0]


def part_losses(model: nn.Module, batch: Batch, parts: int, loss: Loss | None = None) -> Tensor:
    """The mean loss of each part of a batch that consists of equal parts, one after another."""
    if loss is not None:
        return _own_losses(loss, model, batch, parts)
    losses, labels, _ = row_losses(model, batch)
    return losses.view(parts, -1).sum(1) / (labels.view(parts, -1) != IGNORED).sum(1)


def batch_losses(model: nn.Module, batch: Batch, loss: Loss | None = None) -> tuple[float, int]:
    """The sum of the losses of a batch's rows, and how many rows count; a loss of the user's own counts every batch alike."""
    if loss is not None:
        return float(batch_loss(model, batch, loss)), 1
    losses, labels, _ = row_losses(model, batch)
    return float(losses.sum()), int((labels != IGNORED).sum())


def _own_losses(loss: Loss, model: nn.Module, batch: Batch, parts: int) -> Tensor:
    losses = loss(model, batch)
    if not isinstance(losses, Tensor) or losses.dim() > 1 or not losses.numel():
        raise SettingError("A loss of your own must give a tensor: the mean loss of the batch, or one loss for each row.")
    if losses.dim() == 0 and parts > 1:
        raise SettingError("A loss of your own that gives one mean for a batch cannot be stacked: use --stack 1.")
    return losses.float().view(parts, -1).mean(1)


def row_losses(model: nn.Module, batch: Batch, *, best: bool = False) -> Rows:
    """The loss of each row of a batch. `best` also asks for the best class of a token, or the five best classes otherwise.

    The best class of a row whose loss is nan is -1.
    """
    if "labels" not in batch and REFERENCE not in batch:
        raise DataError("A batch has no labels; give some, or measure the distance from the dense model (loss='distance').")
    if REFERENCE in batch:
        losses, labels, highest = _distances(model, batch, best=best)
    elif (head := output_layer(model) if batch["labels"].dim() == 2 else None) is not None:
        losses, labels, highest = _losses_by_pieces(model, head, batch, best=best)
    else:
        logits, labels = predict(model, batch)
        losses = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
        highest = _highest(logits, 1 if batch["labels"].dim() == 2 else 5) if best else None
    return Rows(losses, labels, None if highest is None else highest.masked_fill(losses.isnan()[:, None], -1))


def _highest(logits: Tensor, n: int) -> Tensor:
    return logits.argmax(-1, keepdim=True) if n == 1 else logits.topk(min(n, logits.shape[-1])).indices


def _losses_by_pieces(model: nn.Module, head: nn.Linear, batch: Batch, *, best: bool) -> Rows:
    """The cross-entropy of each row: log-sum-exp minus the label's logit, both computed piece by piece over the vocabulary."""
    shifted, last_hidden = _predicts_next(model), _before(model, head, batch)
    hidden = (last_hidden[:, :-1] if shifted else last_hidden).flatten(0, 1)  # (rows, width of the model)
    labels = _row_labels(batch, shifted=shifted).to(hidden.device)
    if shifted:
        return _pieces(model, head, hidden, labels, best=best)
    counted = labels != IGNORED  # few of the tokens are masked, and the others need no logits
    few = _pieces(model, head, hidden[counted], labels[counted], best=best)
    losses = few.losses.new_zeros(len(labels)).masked_scatter(counted, few.losses)
    if few.best is None:
        return Rows(losses, labels, None)
    return Rows(losses, labels, torch.full_like(labels, -1).masked_scatter(counted, few.best[:, 0])[:, None])


def _pieces(model: nn.Module, head: nn.Linear, hidden: Tensor, labels: Tensor, *, best: bool) -> Rows:
    sums: list[Tensor] = []
    label_logits = hidden.new_full((len(hidden),), torch.nan, dtype=torch.float32)  # stays nan if the label is not a class
    highest = _Highest(labels) if best else None
    for start, stop in _pieces_of(head, hidden):
        logits = _logits(model, head, hidden, start, stop)  # (rows, classes of the piece)
        sums.append(logits.logsumexp(-1))
        in_piece = (labels >= start) & (labels < stop)
        gathered = logits.gather(1, (labels - start).clamp(0, stop - start - 1)[:, None])[:, 0]
        label_logits = torch.where(in_piece, gathered, label_logits)
        if highest:
            highest.add(logits, start)
    losses = torch.stack(sums).logsumexp(0) - label_logits
    return Rows(losses.masked_fill(labels == IGNORED, 0), labels, highest.classes[:, None] if highest else None)


class _Highest:
    """The class of the highest logit of each row, over the pieces seen so far."""

    def __init__(self, labels: Tensor) -> None:
        self.logits = torch.full_like(labels, -torch.inf, dtype=torch.float32)
        self.classes = torch.full_like(labels, -1)

    def add(self, logits: Tensor, start: int) -> None:
        highest, index = logits.max(-1)
        self.classes = torch.where(highest > self.logits, index + start, self.classes)
        self.logits = torch.maximum(self.logits, highest)


def _pieces_of(head: nn.Linear, hidden: Tensor) -> Iterator[tuple[int, int]]:
    """The first and last class of each piece of the vocabulary."""
    width = max(LEAST_WIDTH, (CPU_PIECE if hidden.device.type == "cpu" else PIECE) // max(1, len(hidden)))
    for start in range(0, head.out_features, width):
        yield start, min(start + width, head.out_features)


def _logits(model: nn.Module, head: nn.Linear, hidden: Tensor, start: int, stop: int) -> Tensor:
    logits = F.linear(hidden, head.weight[start:stop], None if head.bias is None else head.bias[start:stop])
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)  # Gemma's, after the output layer
    return (logits if cap is None else torch.tanh(logits / cap) * cap).float()


def own_loss(name: str | None) -> Loss | None:
    """The function that a setting names as module:function or file.py:function; None if it names a loss of ours."""
    if name in (None, LABELS, DISTANCE):
        return None
    place, _, function = str(name).rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except FileNotFoundError as error:
        raise SettingError(f"There is no file {place} for the loss {name!r}.") from error
    except Exception as error:  # it is the user's code, which may raise anything
        raise SettingError(f"The loss {name!r} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    found: Any = getattr(module, function, None)
    if not callable(found):
        raise SettingError(f"The loss {name!r} names no function: {place} has none called {function}.")

    def own(model: nn.Module, batch: Batch) -> Tensor:
        try:
            losses: Tensor = found(model, batch)
        except Exception as error:
            raise SettingError(f"The loss {name!r} failed: {type(error).__name__}: {first_line(error)}") from error
        return losses

    return own


# The distance from the dense model


def reference_of(model: nn.Module, batch: Batch) -> Tensor:
    """What a distance is measured from: the model's embeddings, its logits, or what enters its output layer."""
    if TASKS[task_of(model)].embeds:
        return embeddings(model, batch)
    head = output_layer(model) if TASKS[task_of(model)].per_token else None
    return outputs(model, batch).logits if head is None else _before(model, head, batch)


def _distances(model: nn.Module, batch: Batch, *, best: bool) -> Rows:
    """The distance of each row from its reference: 1 - cosine of embeddings, or the KL divergence of the distribution."""
    task = TASKS[task_of(model)]
    reference = batch[REFERENCE]
    if task.embeds:
        found = embeddings(model, batch)
        distances = 1 - F.cosine_similarity(found, reference.to(found.device), dim=-1)
        return Rows(distances, torch.zeros(len(distances), dtype=torch.long, device=distances.device), None)
    head = output_layer(model) if task.per_token else None
    if head is not None:
        return _divergence_by_pieces(model, head, batch, reference, best=best)
    logits = outputs(model, batch).logits
    expected, found = (x.flatten(0, -2).float() for x in (reference.to(logits.device), logits))
    real = real_positions(batch) if task.per_token else None
    labels = expected.argmax(-1) if real is None else expected.argmax(-1).masked_fill(~real.to(expected.device), IGNORED)
    losses = (expected.softmax(-1) * (expected.log_softmax(-1) - found.log_softmax(-1))).sum(-1)
    return Rows(losses.masked_fill(labels == IGNORED, 0), labels, _highest(found, 1) if best else None)


def _divergence_by_pieces(model: nn.Module, head: nn.Linear, batch: Batch, reference: Tensor, *, best: bool) -> Rows:
    """KL(p || q) = E_p[log p - log q] of each token, in one pass over the pieces of the vocabulary.

    With a running maximum m of p's logits it sums exp(p - m) and exp(p - m) (p - q); log-sum-exps complete the rest.
    """
    hidden = _before(model, head, batch)
    real = real_positions(batch)
    counted = torch.ones(hidden.shape[:2].numel(), dtype=torch.bool) if real is None else real
    counted = counted.to(hidden.device)
    q_hidden, p_hidden = (x.flatten(0, 1)[counted] for x in (hidden, reference.to(hidden)))
    rows = torch.zeros(len(q_hidden), dtype=torch.long, device=hidden.device)
    highest = (_Highest(rows), _Highest(rows))
    top = torch.full_like(rows, -torch.inf, dtype=torch.float32)
    mass, gaps = torch.zeros_like(top), torch.zeros_like(top)
    sums: list[Tensor] = []
    for start, stop in _pieces_of(head, q_hidden):
        p, q = (_logits(model, head, x, start, stop) for x in (p_hidden, q_hidden))
        new_top = torch.maximum(top, p.amax(-1))
        shrink, weights = (top - new_top).exp(), (p - new_top[:, None]).exp()
        mass, gaps, top = mass * shrink + weights.sum(-1), gaps * shrink + (weights * (p - q)).sum(-1), new_top
        sums.append(q.logsumexp(-1))
        highest[0].add(p, start)
        highest[1].add(q, start)
    divergence = gaps / mass - (top + mass.log()) + torch.stack(sums).logsumexp(0)
    losses = divergence.new_zeros(len(counted)).masked_scatter(counted, divergence)
    labels = torch.full((len(counted),), IGNORED, device=hidden.device).masked_scatter(counted, highest[0].classes)
    found = torch.full_like(labels, -1).masked_scatter(counted, highest[1].classes)
    return Rows(losses, labels, found[:, None] if best else None)


# The same with gradients, to train by


def divergence(dense: nn.Module, small: nn.Module, batch: Batch, reference: Tensor, labels: float = 0.0) -> Tensor:
    """The mean distance of a model's outputs from what `reference_of` gave for the dense one, which gradients go through.

    It is 1 - cosine of embeddings, or the KL divergence of the distributions, to which `labels` times the mean
    cross-entropy of the labels is added.
    """
    task = TASKS[task_of(small)]
    reference = reference.to(device_of(small))
    if task.embeds:
        return (1 - F.cosine_similarity(embeddings(small, batch), reference, dim=-1)).mean()
    heads = [output_layer(model) for model in (dense, small)] if task.per_token else [None, None]
    real = real_positions(batch) if task.per_token else None
    found = outputs(small, batch).logits if heads[0] is None or heads[1] is None else _before(small, heads[1], batch)
    counted = slice(None) if real is None else real.to(found.device)
    q, p = (x.flatten(0, -2)[counted] for x in (found, reference))
    right = _labels_at(small, batch).to(q.device)[counted] if labels else None
    n_right = int((right != IGNORED).sum()) if right is not None else 0
    if heads[0] is not None and heads[1] is not None:
        capped = [getattr(getattr(model, "config", None), "final_logit_softcapping", None) for model in (dense, small)]
        sides = (_Head(p.to(heads[0].weight.dtype), heads[0], capped[0]), _Head(q, heads[1], capped[1]))
        share = labels * len(q) / n_right if n_right else 0.0
        total: Tensor = _Divergence.apply(q, heads[1].weight, heads[1].bias, sides, right, share, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return total / max(1, len(q))
    expected, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    mean = (expected.exp() * (expected - log_q)).sum(-1).mean()
    return mean if right is None or not n_right else mean + labels * F.nll_loss(log_q, right, ignore_index=IGNORED)


def _labels_at(model: nn.Module, batch: Batch) -> Tensor:
    """The label of what each row predicts: as many as there are positions, texts or images."""
    labels = batch["labels"]
    if labels.dim() == 2 and _predicts_next(model):
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return labels.flatten()


class _Head(NamedTuple):
    """An output layer, and what enters it."""

    hidden: Tensor  # (rows, width)
    layer: nn.Linear
    cap: float | None  # Gemma's, after the output layer

    def logits(self, rows: slice) -> Tensor:
        logits = F.linear(self.hidden[rows], self.layer.weight, self.layer.bias).float()
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class _Divergence(torch.autograd.Function):
    """The sum over rows of KL(p || q), and `share` times the cross-entropy of the labels.

    The gradient of both in the logits is known, q - p and q - label, so it goes through the output layer at once, some rows at
    a time: no logits are kept for a backward pass, or computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sides: tuple[_Head, _Head],
        labels: Tensor | None,
        share: float,
        wanted: bool,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        trained = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        gradients = [
            torch.zeros_like(x, dtype=torch.float32) if wanted and needed and x is not None else None for x, needed in trained
        ]
        step = max(LEAST_ROWS, TRAINED_PIECE // weight.shape[0])
        for start in range(0, len(hidden), step):
            rows = slice(start, start + step)
            log_p = sides[0].logits(rows).log_softmax(-1)
            logits = sides[1].logits(rows)
            log_q = logits.log_softmax(-1)
            p = log_p.exp()
            total += torch.linalg.vecdot(p, log_p.sub_(log_q)).sum()
            right = None if labels is None else labels[rows]
            counted = None if right is None else (right != IGNORED).nonzero()[:, 0]
            if right is not None and counted is not None:
                total -= share * log_q[counted, right[counted]].sum()
            if not wanted:
                continue
            slope = log_q.exp_()  # of the loss in the logits
            if right is None or counted is None:
                slope -= p
            else:
                scale = torch.ones(len(slope), 1, device=slope.device)
                scale[counted] += share
                slope = slope * scale - p
                slope[counted, right[counted]] -= share
            if sides[1].cap is not None:
                slope *= 1 - (logits / sides[1].cap).square()
            slope = slope.to(weight.dtype)
            if gradients[0] is not None:
                gradients[0][rows] = slope @ weight
            if gradients[1] is not None:
                gradients[1].addmm_(slope.T, hidden[rows].to(weight.dtype))
            if gradients[2] is not None:
                gradients[2] += slope.sum(0)
        ctx.gradients = [
            None if g is None or x is None else g.to(x.dtype) for g, x in zip(gradients, (hidden, weight, bias), strict=True)
        ]
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g.mul_(slope) for g in ctx.gradients]
        return (*scaled, None, None, None, None)


# Calling the model


def outputs(model: nn.Module, batch: Batch) -> Any:
    """What the model gives for a batch, with every entry that its forward takes; a tensor of logits also has that name."""
    device, dtype = device_of(model), next(model.parameters()).dtype
    names = _accepted(getattr(model.forward, "__func__", model.forward))
    given = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in batch.items() if name not in OWN}
    if names is not None and not names & given.keys():  # timm's models take the images alone
        result = model(given["pixel_values"])
    else:
        passed = {name: x for name, x in given.items() if names is None or name in names}
        result = model(**passed, **({"use_cache": False} if names and "use_cache" in names else {}))
    return _Logits(result) if isinstance(result, Tensor) else result


class _Logits(NamedTuple):
    logits: Tensor


@functools.cache
def _accepted(forward: Callable[..., Any]) -> frozenset[str] | None:
    """The names that a model's forward takes; None if it takes any."""
    parameters = inspect.signature(forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any and not {"input_ids", "pixel_values"} & parameters.keys() else frozenset(parameters)


def predictions(model: nn.Module, batch: Batch) -> Tensor:
    """The logits (rows, classes), or the embeddings (rows, width), of a batch with or without labels."""
    try:
        task = task_of(model)
    except UnsupportedModel:
        task = TEXT if batch["labels"].dim() == 2 else IMAGE
    if TASKS[task].embeds:
        return embeddings(model, batch)
    logits: Tensor = outputs(model, batch).logits
    return logits[:, :-1].flatten(0, 1) if task == TEXT else logits.flatten(0, -2)  # the token at t is predicted at t - 1


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits (rows, classes) and labels (rows,) of a batch with labels."""
    logits = predictions(model, batch)
    labels = batch["labels"] if batch["labels"].dim() < 2 else _row_labels(batch, shifted=_predicts_next(model))
    return logits, labels.to(logits.device)


def _row_labels(batch: Batch, *, shifted: bool) -> Tensor:
    """The labels of the predicted tokens, one row each; those of padding do not count."""
    labels, mask = batch["labels"], batch.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:
        labels = labels.masked_fill(mask.to(labels.device) == 0, IGNORED)
    return (labels[:, 1:] if shifted else labels).flatten()


def real_positions(batch: Batch) -> Tensor | None:
    """Which positions of a batch of texts are not padding, one after another; None if all are real, or for images."""
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if mask is not None and mask.dim() == 2:
        return mask.flatten() != 0
    return (labels != IGNORED).flatten() if "input_ids" in batch and labels is not None and labels.dim() == 2 else None


def _predicts_next(model: nn.Module) -> bool:
    """Whether a model of texts predicts the token after each position; else it says something of the token itself."""
    try:
        return task_of(model) not in (MASKED, TOKEN_CLASSES)
    except UnsupportedModel:
        return True


def embeddings(model: nn.Module, batch: Batch) -> Tensor:
    """The embedding of each text or image (rows, width), in float32.

    An image's is the pooled output. A text's is the mean of its tokens, unless the model says otherwise in its attribute
    `pooling`, which `load` sets from a sentence-transformers folder.
    """
    found = outputs(model, batch)
    tokens: Tensor = found.last_hidden_state.float()
    if "pixel_values" in batch:
        pooled = getattr(found, "image_embeds", None)
        pooled = getattr(found, "pooler_output", None) if pooled is None else pooled
        return tokens[:, 0] if pooled is None else pooled.float().flatten(1)
    mask = batch.get("attention_mask")
    real = (torch.ones(tokens.shape[:2]) if mask is None else mask).to(tokens.device, tokens.dtype)
    pooling = getattr(model, "pooling", "mean")
    if pooling == "cls":
        return tokens[:, 0]
    if pooling == "lasttoken":
        return tokens[torch.arange(len(tokens)), (real * torch.arange(1, tokens.shape[1] + 1, device=real.device)).argmax(1)]
    if pooling == "max":
        return tokens.masked_fill(real[..., None] == 0, -torch.inf).amax(1)
    return (tokens * real[..., None]).sum(1) / real.sum(1, keepdim=True)


def _before(model: nn.Module, head: nn.Linear, batch: Batch) -> Tensor:
    """What enters the output layer (batch, time, width), which itself does not run."""
    inputs: list[Tensor] = []

    def capture(x: Tensor) -> Tensor:
        inputs.append(x)
        return x[..., :0]  # an empty tensor of logits, so that the model's forward can finish

    with standing_in(head, capture):
        outputs(model, batch)
    return inputs[0].to(head.weight.device)


def output_layer(model: nn.Module) -> nn.Linear | None:
    """The layer that computes a language model's logits, if it is a plain nn.Linear with its weights loaded and no hooks."""
    network: Any = model
    head = network.get_output_embeddings() if hasattr(network, "get_output_embeddings") else None
    if type(head) is not nn.Linear or head.weight.is_meta or head._forward_hooks or head._forward_pre_hooks:
        return None
    return head
