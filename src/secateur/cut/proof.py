"""The proof: a cut model computes what the zeroed one does, on batches and token by token with the cache. Cuts nothing.

It is made in float64. In a model's own dtype a right cut may differ from the zeroed model by more than a wrong one, since
shorter sums round in another way and deep models make rounding grow: to 4e-4 of the logits in SmolLM2-135M in float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.errors import ProofError, SettingError, first_line
from secateur.model.families import anatomy, task_of
from secateur.model.losses import Batch, device_of, predictions
from secateur.model.zeroing import zeroed
from secateur.search.damage import free_memory
from secateur.units import Unit

# As a share of the logits' scale. Right cuts of tiny models of all families differ by at most 3e-15, those of SmolLM2-135M by
# 5e-13, and a thousandth of one of its weights shows as 1e-5.
TOLERANCE = 1e-8
WHOLE, BLOCKS = "float64", "float64, one block at a time"
ROWS = 4  # texts or images of a batch that are compared
PROMPT = 16  # tokens that are continued
NEW_TOKENS = {WHOLE: 64, BLOCKS: 8}  # one block at a time, each token converts all weights anew


@dataclass(frozen=True)
class Proof:
    """How closely a cut model computes what the zeroed one does.

    >>> print(prove(model, selection.units, small, calibration[:2]))
    """

    difference: float  # the largest difference between two logits
    scale: float  # the largest absolute logit
    tolerance: float  # the largest difference allowed, as a share of the scale
    batches: int
    tokens: int = 0  # number of tokens continued greedily with the K/V cache
    same_tokens: int = 0
    tied_tokens: int = 0  # tokens that differ only because the zeroed model's two highest logits are equal up to rounding
    precision: str = ""  # WHOLE or BLOCKS; empty in the records of proofs in the model's own dtype

    @property
    def relative(self) -> float:
        return self.difference / self.scale if self.scale else self.difference

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"relative": self.relative}

    def __str__(self) -> str:
        text = f"the cut model's outputs differ from the zeroed model's by at most {self.relative:.1e} of their scale"
        text += f" (computed in {self.precision})" if self.precision else ""
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

    Copies of both are run in float64, one after the other. If there is no memory for a copy, it is converted block by block.

    >>> prove(model, selection.units, shrink(model, selection.units), calibration[:2])
    """
    if not batches:
        raise SettingError("A proof needs at least one batch.")
    precision = WHOLE if _fits(model) else BLOCKS
    blocks = [layer.name for layer in anatomy(model)] if precision == BLOCKS else []
    there = {name for name, _ in small.named_modules()}  # a cut model may have fewer blocks
    new_tokens = NEW_TOKENS[precision] if task_of(model) == "text" else 0
    few = [{name: tensor[:ROWS] for name, tensor in batch.items()} for batch in batches]
    done = iter(range(1, 2 * len(few) + 1))

    def outputs(copied: nn.Module) -> Iterator[Tensor]:
        for batch in few:
            yield _outputs(copied, batch)
            if progress:
                progress(next(done), 2 * len(few))

    with torch.inference_mode(), _Float64():
        copied = _copy(model, blocks)
        with zeroed(copied, units):
            expected = list(outputs(copied))
            tokens = list(_continue(copied, few[0], new_tokens))
        scale = float(torch.stack([logits.abs().max() for logits in expected]).max())
        if not math.isfinite(scale):
            raise ProofError("The zeroed model's logits are not finite, so the cut cannot be proved and is refused.")
        del copied  # the memory is for one
        copied = _copy(small, [name for name in blocks if name in there])
        with _run_errors():
            differences = [_difference(one, other) for one, other in zip(expected, outputs(copied), strict=True)]
            said = list(_continue(copied, few[0], new_tokens, tokens))
        differences += [_difference(one, other) for one, other in zip(tokens, said, strict=True)]
    difference = float(torch.tensor(differences, dtype=torch.float64).max())  # nan if one of them is
    same, tied = 0, 0
    for one, other in zip(tokens, said, strict=True):
        if one.argmax() == other.argmax():
            same += 1
        else:
            highest = one.topk(2).values
            tied += bool(highest[0] - highest[1] <= 2 * TOLERANCE * scale)
    proof = Proof(difference, scale, TOLERANCE, len(few), len(tokens), same, tied, precision)
    if not proof.relative <= TOLERANCE or same + tied < len(tokens):
        raise ProofError(f"The cut is refused, since {proof}; at most {TOLERANCE:g} of the scale is allowed.")
    return proof


def _outputs(model: nn.Module, batch: Batch) -> Tensor:
    """The logits, or the embeddings, of a batch."""
    device = device_of(model)
    wide = {name: tensor.to(device, torch.float64) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    return predictions(model, wide)


def _continue(model: Any, batch: Batch, n: int, tokens: Sequence[Tensor] = ()) -> Iterator[Tensor]:
    """The logits of up to n tokens that continue a text: those that `tokens`, or else these logits themselves, rate highest."""
    if not n:
        return
    context = getattr(model.config, "max_position_embeddings", None)
    length = min(PROMPT + n, context) if isinstance(context, int) else PROMPT + n
    ids = batch["input_ids"][:1, : min(PROMPT, length // 2)].to(device_of(model))
    cache = None
    for i in range(min(n, length - ids.shape[1])):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1]
        yield logits
        ids = (tokens[i] if tokens else logits).argmax().view(1, 1)


class _Float64(TorchFunctionMode):
    """Wherever a model asks for float32 (norms, softmax, rotary angles), give it float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _fits(model: nn.Module) -> bool:
    """Whether half of the free memory holds a copy in float64; the other half is for what the copy computes."""
    size = sum(tensor.numel() for tensor in _tensors(model))
    return 2 * size * torch.float64.itemsize <= free_memory(_device(device_of(model)))


def _copy(model: nn.Module, blocks: Sequence[str]) -> Any:
    """A copy in float64 and evaluation mode. These blocks share the model's weights, and convert them whenever they run."""
    shared = {id(tensor): tensor for name in blocks for tensor in _tensors(model.get_submodule(name))}
    memo = _converted(tensor for tensor in _tensors(model) if id(tensor) not in shared)
    copied: Any = copy.deepcopy(model, memo | shared)
    for name in blocks:
        block = copied.get_submodule(name)
        block.forward = _converting(block)
    config = getattr(copied, "config", None)
    if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
        copied.set_attn_implementation("sdpa")  # flash attention has no float64
    if getattr(config, "_experts_implementation", None) not in (None, "eager"):
        copied.set_experts_implementation("eager")  # grouped products have none either
    return copied.eval()


def _converting(block: nn.Module) -> Callable[..., Any]:
    """The block's forward, run by a copy in float64 that is made for this call."""
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return copy.deepcopy(forward, _converted(_tensors(block)))(*args, **kwargs)

    return run


def _converted(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """The tensors in float64, as a memo for deepcopy: they take the places of the originals, and none is copied twice."""
    memo: dict[int, Any] = {}
    for tensor in tensors:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        wide = tensor.detach().to(_device(tensor.device), dtype)
        memo[id(tensor)] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
    return memo


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _device(device: torch.device) -> torch.device:
    """The device itself, or the CPU in place of one that has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


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
