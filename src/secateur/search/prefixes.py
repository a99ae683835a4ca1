"""Prefixes: the block outputs of each batch, kept within a memory budget, and runs that start from them.

Zeroing a unit in block l changes nothing before the projection that it enters, so its run starts there. The blocks before l
are skipped, block l gets the kept output of block l-1, and inside block l the attention (for a head), or the attention and the
first half of the MLP (for a group), return their kept outputs. The model's own forward runs around all this. In a block with
experts the MLP runs whole, from the router on: only the attention returns its kept output.

When memory runs short, the values that save the least for their size are dropped first: batches of earlier steps, then values
inside blocks (they save part of one block), then every second block output (a run starts a block earlier), then whole batches.

Runs may go side by side on copies of a model that share its weights, so the layers to work on are an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from secateur.model.families import Layer
from secateur.model.losses import handing_on, standing_in
from secateur.model.shrunk import counting
from secateur.units import HEAD, MLP


@dataclass
class Kept:
    """The kept values of one block on one batch; None where a value is not kept."""

    output: Any = None
    entering: dict[str, Tensor] = field(default_factory=dict)  # by side: the input of its output projection
    attention: Tensor | None = None  # its output

    @property
    def bytes(self) -> int:
        """The memory that the values hold; a view holds the whole tensor behind it."""
        outputs = self.output if isinstance(self.output, tuple) else (self.output,)
        held = [x.untyped_storage() for x in (*outputs, *self.entering.values(), self.attention) if x is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


class Prefixes:
    """The kept values of all batches, under the committed units."""

    def __init__(self, n_layers: int, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self.was_full = False
        self._inside = True  # whether values inside blocks are kept
        self._stride = 1  # the output of every `stride`-th block is kept
        self._wanted: frozenset[int] | None = None  # the batches that this step draws from; None: all
        self._kept: OrderedDict[int, dict[int, Kept]] = OrderedDict()  # by batch, least recently used first; then by block
        self._n_layers = n_layers
        self._n_given: dict[tuple[int, str], int] = {}  # by block and side: the length of the tuple that is stood in for, or 0
        self._lock = RLock()

    def want(self, batches: frozenset[int]) -> None:
        """Prefer to keep these batches from now on."""
        self._wanted = batches

    def cut(self, layer: int) -> None:
        """Drop the values of block `layer`, which has changed, and of all later blocks."""
        for blocks in self._kept.values():
            for i in [i for i in blocks if i >= layer]:
                self.bytes -= blocks.pop(i).bytes

    @contextmanager
    def recorded(self, layers: Sequence[Layer], batch: int, kinds: Set[str]) -> Iterator[None]:
        """Run a batch from the first block whose output is not kept, and keep the values that units on these sides need."""
        if not self.budget:
            yield
            return
        start = 1 + self._last_kept([batch], self._n_layers)
        with ExitStack() as stack:
            stack.enter_context(self.resumed(layers, [batch], start))
            for i in range(start, self._n_layers):
                self._record(stack, layers[i], batch, i, kinds)
            yield

    @contextmanager
    def resumed(self, layers: Sequence[Layer], batches: Sequence[int], at: int, kind: str | None = None) -> Iterator[None]:
        """Start a run of one or several batches at the last kept block output before block `at`.

        With a `kind` (HEAD or MLP) the run is for units on that side of block `at`, or later ones, and starts inside the block.
        """
        with ExitStack() as stack:
            with self._lock:
                last = self._last_kept(batches, at)
                outputs = [self._kept[batch][last].output for batch in batches] if last >= 0 else []
                inside = [self._kept.get(batch, {}).get(at, Kept()) for batch in batches]
            if outputs:
                output = _join(outputs)
                for layer in layers[:last]:  # nothing reads their outputs, which only need the right shape
                    stack.enter_context(standing_in(layer.block, handing_on(output)))
                stack.enter_context(standing_in(layers[last].block, lambda *args, **options: output))
            if kind and last == at - 1 and all(_can_start(layers[at], kept, kind) for kept in inside):
                _start_inside(stack, layers[at], inside, kind, self._n_given.get((at, kind), 0))
            yield

    def _last_kept(self, batches: Sequence[int], at: int) -> int:
        """The last block before `at` whose output is kept for all of these batches, or -1. Marks the batches as used."""
        with self._lock:
            for batch in self._kept.keys() & set(batches):
                self._kept.move_to_end(batch)
            kept = [{i for i, one in self._kept.get(batch, {}).items() if one.output is not None} for batch in batches]
            return max((i for i in set.intersection(*kept) if i < at), default=-1)

    def _record(self, stack: ExitStack, layer: Layer, batch: int, i: int, kinds: Set[str]) -> None:
        kept = Kept()
        inner = counting(layer.attention)
        given: Tensor | None = None  # by the inner attention
        projected: Tensor | None = None

        def gave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal kept, given, projected
            if i + 1 < self._n_layers:  # no run starts after the last block
                kept.output = output
            self._put(batch, i, self._worth_keeping(i, kept))
            kept, given, projected = Kept(), None, None  # free at once what is not kept

        def projects(module: nn.Module, args: Any, output: Tensor) -> None:
            nonlocal projected
            projected = output

        def attended(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal given
            n, output = (len(output), output[0]) if isinstance(output, tuple) else (0, output)
            if module is inner:
                given, self._n_given[i, HEAD] = output, n
            if module is not layer.attention:
                return
            self._n_given[i, MLP] = n
            if not _same(given, projected if inner is layer.attention else kept.entering.get(HEAD)):
                kept.entering.pop(HEAD, None)  # the attention does more after its heads: it cannot be skipped
            if MLP in kinds:
                kept.attention = output

        def enters(kind: str) -> Callable[[nn.Module, Any], None]:
            return lambda module, args: kept.entering.update({kind: args[0]})

        # First of all hooks: other hooks change a kept value when it is used; they must not have changed it before.
        hooks = [layer.block.register_forward_hook(gave, prepend=True)]
        if self._inside:
            hooks += [module.register_forward_hook(attended, prepend=True) for module in {inner, layer.attention}]
            hooks.append(layer.out.register_forward_hook(projects))
            for kind, projection in zip((HEAD, MLP), layer.outs, strict=False):
                if kind in kinds:
                    hooks.append(projection.register_forward_pre_hook(enters(kind), prepend=True))
        for hook in hooks:
            stack.callback(hook.remove)

    def _worth_keeping(self, i: int, kept: Kept) -> Kept:
        """The values that are kept at the present settings."""
        output = kept.output if (i + 1) % self._stride == 0 else None
        return replace(kept, output=output) if self._inside else Kept(output)

    def _put(self, batch: int, i: int, kept: Kept) -> None:
        with self._lock:
            blocks = self._kept.setdefault(batch, {})
            self.bytes -= blocks.pop(i, Kept()).bytes
            blocks[i] = kept
            self.bytes += kept.bytes
            while self.bytes > self.budget:
                self._drop_least_useful(batch, i)
                self.bytes = sum(one.bytes for blocks in self._kept.values() for one in blocks.values())

    def _drop_least_useful(self, batch: int, i: int) -> None:
        """Make room for block `i` of the `batch` that is being recorded."""
        others = [other for other in self._kept if other != batch]
        stale = [other for other in others if self._wanted is not None and other not in self._wanted]
        if stale:
            del self._kept[stale[0]]
            return
        self.was_full = True
        if not self._inside and 2 * self._stride > self._n_layers / 2:  # below that, keeping fewer batches is better
            if others:
                del self._kept[others[0]]
            else:
                del self._kept[batch][i]
            return
        if self._inside:
            self._inside = False
        else:
            self._stride *= 2
        for blocks in self._kept.values():
            for j, kept in list(blocks.items()):
                blocks[j] = self._worth_keeping(j, kept)


def _can_start(layer: Layer, kept: Kept, kind: str) -> bool:
    """Whether what a run that starts on this side of the block needs is kept."""
    return kept.attention is not None if kind == MLP and layer.experts else kind in kept.entering


def _start_inside(stack: ExitStack, layer: Layer, kept: Sequence[Kept], kind: str, n_given: int) -> None:
    """Make a block start at the output projection of this side, or behind the attention if its MLP has experts."""
    entering = _join([one.entering.get(kind) for one in kept])
    skipped = counting(layer.attention) if kind == HEAD else layer.attention  # in BERT the projection follows the skipped part

    def attend(*args: Any, **options: Any) -> Any:
        if kind == MLP:
            output = _join([one.attention for one in kept])
        else:
            output = layer.out(entering) if skipped is layer.attention else entering
        return (output, *[None] * (n_given - 1)) if n_given else output

    stack.enter_context(standing_in(skipped, attend))
    if kind == HEAD or layer.experts:
        return
    width = (1 + layer.mlp_packed) * layer.mlp_width
    for projection in layer.mlp_in:
        # Any values of the right shape: the output projection gets the kept input.
        stack.enter_context(standing_in(projection, lambda x: x.new_zeros(1).expand(*x.shape[:-1], width)))
    hook = layer.mlp_out.register_forward_pre_hook(lambda module, args: (entering, *args[1:]), prepend=True)
    stack.callback(hook.remove)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are the same values in memory."""
    return one is not None and other is not None and one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _join(items: Sequence[Any]) -> Any:
    """Concatenate the tensors of several batches; tuples element by element."""
    if len(items) == 1 or items[0] is None:
        return items[0]
    if isinstance(items[0], tuple):
        return tuple(_join(column) for column in zip(*items, strict=True))
    return torch.cat(list(items))
