"""The benchmark: how fast paired damage is measured here, against the plain way, in one run.

The plain way calls the model with its own loss twice a batch, once with the unit zeroed; ours is `DamageMeter`. Both take
turns on the same units and batches, so that a noisy machine slows both alike. FLOPs are those of matrix products and
attention, counted as they run.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.checks import check_one_device
from secateur.errors import SettingError, not_one_of
from secateur.measure import flops
from secateur.measure.speed import image_shape
from secateur.model.devices import resolve_device
from secateur.model.families import anatomy, candidate_units, task_of
from secateur.model.loading import DTYPES, load, load_shapes
from secateur.model.losses import Batch, batch_loss, device_of
from secateur.model.zeroing import zeroed
from secateur.search.damage import DamageMeter
from secateur.search.goals import Quota
from secateur.search.policies import UCB
from secateur.search.select import Asked, Measured, select
from secateur.selection import Pull
from secateur.tasks import IMAGE, TEXT
from secateur.units import EXPERT, HEAD, MLP, Unit, kinds_of, n_selected
from secateur.watcher import Following, watcher_of

T = TypeVar("T")
Progress = Callable[[int, int], None]  # pulls made, of how many

SHAPE = "shape:"  # prefix of a known model's name: random weights in its shape
DEFAULT_MODELS = ("shape:gpt2", "shape:swin_tiny_patch4_window7_224")
TEXTS, TOKENS, IMAGES = 4, 128, 8  # in a batch
N_BATCHES, BATCHES_PER_PULL, BATCHES_PER_STEP, PULLS_PER_STEP = 128, 2, 8, 32


@dataclass(frozen=True)
class Row:
    """One comparison. Seconds and FLOPs are means over the pulls."""

    name: str
    pulls: int
    plain_seconds: float
    seconds: float
    plain_flops: float
    flops: float | None  # None in a search: counting would slow it down
    least_flops: float  # the least for exact losses: from each unit's projection on, and each base run once
    peak: float  # FLOPs a second of a large matrix product
    difference: float  # the largest, between our loss and the model's own

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds

    @property
    def flop_ratio(self) -> float | None:
        return self.plain_flops / self.flops if self.flops else None

    @property
    def flop_limit(self) -> float:
        return self.plain_flops / self.least_flops

    @property
    def peak_fraction(self) -> float | None:
        return self.flops / self.seconds / self.peak if self.flops else None

    def to_json(self) -> dict[str, Any]:
        derived = ("speedup", "flop_ratio", "flop_limit", "peak_fraction")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    names = ("what", "speedup", "FLOP ratio", "FLOP limit", "of peak", "plain s/pull", "s/pull", "difference")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        ratio = "-" if row.flop_ratio is None else f"{row.flop_ratio:.2f}"
        peak = "-" if row.peak_fraction is None else f"{row.peak_fraction:.0%}"
        seconds = f"{row.plain_seconds:.3f} | {row.seconds:.3f}"
        lines.append(
            f"| {row.name} | {row.speedup:.2f} | {ratio} | {row.flop_limit:.2f} | {peak} | {seconds} | {row.difference:.1e} |"
        )
    return "\n".join(lines)


def open_model(name: str, *, device: str = "auto", dtype: str = "float32", trust_remote_code: bool = False) -> nn.Module:
    """A model by name, or with random weights: `shape:gpt2`."""
    if not name.startswith(SHAPE):
        return load(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)[0]
    if dtype not in DTYPES:
        raise not_one_of("dtype", dtype, DTYPES)
    model = load_shapes(name.removeprefix(SHAPE)).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model.to(device=resolve_device(device, dtype), dtype=DTYPES[dtype])


def bench(
    names: Sequence[str],
    *,
    target: str = HEAD,
    pulls: int = 12,
    selection: bool = False,
    steps: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    watcher: Following = None,
    **options: Any,
) -> list[Row]:
    """A row for each model: some pulls, or with `selection` a whole search; the `options` are the meter's.

    >>> bench(["shape:gpt2"], pulls=4)[0].speedup
    """
    check_one_device(device)
    watcher = watcher_of(watcher)
    kinds_of(target)
    rows = []
    for name in names:
        watcher.stage(f"loading {name}")
        model = open_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        watcher.stage(f"measuring {name}")
        title = f"{Path(name).name} {target}{' selection' if selection else ''}"
        about: dict[str, Any] = {"target": target, "progress": watcher.evaluated}
        if selection:
            rows.append(compare_selection(model, title, steps=steps, **about, **options))
        else:
            rows.append(compare_pulls(model, title, pulls=pulls, **about, **options))
    return rows


def compare_pulls(
    model: nn.Module, name: str, *, target: str = HEAD, pulls: int = 12, progress: Progress | None = None, **options: Any
) -> Row:
    """Compare pulls of units spread over the model, asked for at once, with base runs made before.

    The `options` are the meter's: stack, lanes, cache_memory.
    """
    if pulls < 1:
        raise SettingError(f"The pulls are {pulls}, but must be at least 1.")
    batches = random_batches(model, BATCHES_PER_PULL)
    drawn = tuple(range(BATCHES_PER_PULL))
    units = candidate_units(model, target)
    warming = {unit.kind: unit for unit in reversed(units)}.values()  # one of each kind
    units = [unit for unit in units if unit not in warming]  # a unit measured twice would cost nothing
    if not units:
        raise SettingError(f"{name} has too few units to compare: two of a kind are needed.")
    chosen = [units[i] for i in np.linspace(0, len(units) - 1, min(pulls, len(units))).astype(int)]
    pulls = len(chosen)
    clock = _Clock(model)

    def measure(**more: Any) -> Iterator[Measured]:
        """The measurements of a new meter, after its base runs."""
        meter = DamageMeter(model, batches, batches_per_pull=BATCHES_PER_PULL, **options | more)
        for unit in warming:
            next(meter.measure([(unit, drawn)]))
        return meter.measure([(unit, drawn) for unit in chosen])

    measurements = measure()
    plain_pull(model, batches, chosen[0])
    difference = 0.0
    for i, unit in enumerate(chosen):
        expected = clock.time("plain", lambda: plain_pull(model, batches, unit))  # noqa: B023 (called at once)
        losses = clock.time("ours", lambda: next(measurements))
        difference = max(difference, _difference(expected, losses))
        if progress:
            progress(i + 1, pulls)
    again = measure(lanes=1)  # the same runs in this thread, the only one that torch's counter sees
    least = FlopTable(model, batches[0])
    return Row(
        name=name,
        pulls=pulls,
        plain_seconds=clock.seconds["plain"] / pulls,
        seconds=clock.seconds["ours"] / pulls,
        plain_flops=flops.count(lambda: plain_pull(model, batches, chosen[0])),
        flops=flops.count(lambda: list(again)) / pulls,
        least_flops=sum(least.masked(unit) for unit in chosen) / pulls * BATCHES_PER_PULL,
        peak=clock.peak,
        difference=difference,
    )


def compare_selection(
    model: nn.Module, name: str, *, target: str = HEAD, steps: int = 0, progress: Progress | None = None, **options: Any
) -> Row:
    """Compare a search by UCB from a cold start: a tenth of the units, or the first `steps`; 32 pulls a step from 8 batches.

    The plain way is timed on one pull a step, with the units committed so far zeroed.
    """
    units = candidate_units(model, target)
    if not 0 <= steps < len(units):
        raise SettingError(f"The steps are {steps}, but must be 0 to {len(units) - 1}: {name} has {len(units)} units.")
    batches = random_batches(model, N_BATCHES)
    clock = _Clock(model)
    differences: list[float] = []

    class Sampled(DamageMeter):
        def measure(self, pulls: Sequence[Asked]) -> Iterator[Measured]:
            measurements = super().measure(pulls)
            for unit, batches in pulls:
                losses = clock.time("ours", lambda: next(measurements))
                if self.pulls % PULLS_PER_STEP == PULLS_PER_STEP // 2:
                    drawn = [self.batches[i] for i in batches]
                    with zeroed(self.model, self.committed):
                        expected = clock.time("plain", lambda: plain_pull(self.model, drawn, unit))  # noqa: B023
                    differences.append(_difference(expected, losses))
                if progress:
                    progress(self.pulls, k * PULLS_PER_STEP)
                yield losses

    ratio = steps / len(units) if steps else 0.10
    k, goal = n_selected(ratio, len(units)), None
    if target == EXPERT:  # one of each layer
        goal = Quota({unit: unit.layer for unit in units}, {unit.layer: 1 for unit in units})
        k = goal.n_steps([])
    plain_pull(model, batches[:BATCHES_PER_PULL], units[0])
    meter = Sampled(model, batches, batches_per_pull=BATCHES_PER_PULL, batches_per_step=BATCHES_PER_STEP, **options)
    trace = select(meter, units, policy=UCB(), ratio=ratio, goal=goal, pulls_per_step=PULLS_PER_STEP).trace
    least = FlopTable(model, batches[0]).searched(trace, meter.committed) / len(trace)
    return Row(
        name=name,
        pulls=len(trace),
        plain_seconds=clock.seconds["plain"] / len(differences),
        seconds=clock.seconds["ours"] / len(trace),
        plain_flops=flops.count(lambda: plain_pull(model, batches[:BATCHES_PER_PULL], units[0])),
        flops=None,
        least_flops=least,
        peak=clock.peak,
        difference=max(differences),
    )


def plain_pull(model: Any, batches: Sequence[Batch], unit: Unit) -> Measured:
    """Measure a unit the plain way: two calls of the model with its own loss for each batch."""
    with torch.inference_mode():
        base = tuple(plain_loss(model, batch) for batch in batches)
        with zeroed(model, [unit]):
            return Measured(base, tuple(plain_loss(model, batch) for batch in batches), 2 * len(batches))


def plain_loss(model: Any, batch: Batch) -> float:
    device = device_of(model)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    if task_of(model) == TEXT:
        return float(model(**batch, use_cache=False).loss)
    if "labels" in inspect.signature(model.forward).parameters:
        return float(model(**batch).loss)
    output = model(batch["pixel_values"])
    return float(F.cross_entropy(output if isinstance(output, Tensor) else output.logits, batch["labels"]))


def random_batches(model: nn.Module, n: int) -> list[dict[str, Tensor]]:
    """Batches of 4 texts of 128 random tokens, or of 8 random images."""
    network: Any = model
    generator = torch.Generator().manual_seed(1)
    if task_of(model) not in (TEXT, IMAGE):
        raise SettingError(f"The benchmark takes language models and image classifiers, not models for {task_of(model)}.")
    if task_of(model) == TEXT:
        n_tokens = network.get_input_embeddings().num_embeddings
        length = min(TOKENS, getattr(network.config, "max_position_embeddings", TOKENS))
        tokens = [torch.randint(0, n_tokens, (TEXTS, length), generator=generator) for _ in range(n)]
        return [{"input_ids": ids, "labels": ids} for ids in tokens]
    dtype = next(model.parameters()).dtype
    shape = (IMAGES, *image_shape(model))
    n_classes = network.config.num_labels if hasattr(network, "config") else network.num_classes
    labels = torch.arange(IMAGES) % n_classes
    return [{"pixel_values": torch.randn(shape, generator=generator).to(dtype), "labels": labels} for _ in range(n)]


class FlopTable:
    """The FLOPs of a run on one batch before each block and each output projection."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        counter = flops.counter()
        self._before: dict[tuple[str, int], int] = {}  # by block, or kind of unit, and layer

        def note(key: tuple[str, int]) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                self._before[key] = counter.get_total_flops()

            return hook

        hooks = []
        for i, layer in enumerate(anatomy(model)):
            mlp = layer.router or layer.mlp_out  # a masked run of a block with experts starts at the router
            for name, module in (("block", layer.block), (HEAD, layer.out), (MLP, mlp)):
                hooks.append(module.register_forward_pre_hook(note((name, i))))
        try:
            with torch.inference_mode(), counter:
                batch_loss(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        self._total = counter.get_total_flops()

    def masked(self, unit: Unit) -> int:
        """The FLOPs of a masked run: from the unit's projection to the end."""
        return self._total - self._before[unit.side, unit.layer]

    def searched(self, trace: Sequence[Pull], units: Sequence[Unit]) -> int:
        """The least FLOPs of a search: each masked run once, each base run from the first block changed since the last one."""
        least = 0
        last_run: dict[int, int] = {}
        for step in range(len(units)):
            pairs = {(pull.unit, i) for pull in trace if pull.step == step for i in pull.batches}
            least += sum(self.masked(unit) for unit, _ in pairs)
            for i in {i for _, i in pairs}:
                changed = min((unit.layer for unit in units[last_run[i] : step]), default=0) if i in last_run else 0
                least += self._total - self._before["block", changed]
                last_run[i] = step
        return least


class _Clock:
    """Adds up seconds by name, and measures the machine's peak between the measurements."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.peak = 0.0
        self._like = torch.randn(1024, 1024, device=device_of(model)).to(next(model.parameters()).dtype)

    def time(self, name: str, work: Callable[[], T]) -> T:
        started = self._now()
        result = work()
        self.seconds[name] += self._now() - started
        started = self._now()
        self._like @ self._like
        self.peak = max(self.peak, 2 * 1024**3 / (self._now() - started))
        return result

    def _now(self) -> float:
        if self._like.device.type != "cpu":
            torch.accelerator.synchronize(self._like.device)
        return time.perf_counter()


def _difference(expected: Measured, actual: Measured) -> float:
    pairs = zip((*expected.base_losses, *expected.masked_losses), (*actual.base_losses, *actual.masked_losses), strict=True)
    return max(abs(a - b) for a, b in pairs)
