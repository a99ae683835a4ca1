"""How fast paired damage is measured here, against the plain way, in one run.

The plain way calls the model with its own loss twice a batch, once with the unit zeroed; ours is `DamageMeter`. Both measure
the same units on the same batches, in turn, so that a noisy machine troubles both alike. FLOPs are those of matrix products and
attention, counted as they run.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur import flops
from secateur.damage import DamageMeter
from secateur.errors import SettingError, not_one_of
from secateur.families import anatomy, candidate_units, task_of
from secateur.losses import Batch, batch_loss, device_of
from secateur.measure import image_shape
from secateur.models import DTYPES, load, load_shapes, resolve_device
from secateur.policies import UCB
from secateur.selection import Pull, select
from secateur.units import HEAD, MLP, Unit, n_selected
from secateur.zeroing import zeroed

T = TypeVar("T")
Told = Callable[[int, int], None]  # pulls made, of how many

SHAPE = "shape:"  # before the name of a model that Secateur knows: random weights in its shape
DEFAULT_MODELS = ("shape:gpt2", "shape:swin_tiny_patch4_window7_224")
TEXTS, TOKENS, IMAGES = 4, 128, 8  # in a batch
N_BATCHES, BATCHES_PER_PULL, BATCHES_PER_STEP, PULLS_PER_STEP = 128, 2, 8, 32


@dataclass(frozen=True)
class Row:
    """One comparison. Seconds and FLOPs are those of a pull, on average over the pulls."""

    name: str
    pulls: int
    plain_seconds: float
    seconds: float
    plain_flops: float
    flops: float | None  # not counted in a search: counting would slow it down
    least_flops: float  # what exact losses need: the FLOPs from each unit's projection on, and each base run once
    peak: float  # FLOPs a second of a large matrix product
    difference: float  # the largest between a loss of ours and the model's own

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
    return model.to(device=resolve_device(device), dtype=DTYPES[dtype])


def compare_pulls(
    model: nn.Module, name: str, *, target: str = HEAD, pulls: int = 12, progress: Told | None = None, **options: Any
) -> Row:
    """Pulls of units spread over the model, announced as UCB and greedy announce theirs, with warm base runs.

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

    def warm_meter(**more: Any) -> DamageMeter:
        meter = DamageMeter(model, batches, batches_per_pull=BATCHES_PER_PULL, **options | more)
        for unit in warming:
            meter.measure(unit, drawn)
        meter.expect((unit, drawn) for unit in chosen)
        return meter

    meter = warm_meter()
    plain_pull(model, batches, chosen[0])
    difference = 0.0
    for i, unit in enumerate(chosen):
        expected = clock.time("plain", lambda: plain_pull(model, batches, unit))  # noqa: B023 (called at once)
        found = clock.time("ours", lambda: meter.measure(unit, drawn))  # noqa: B023
        difference = max(difference, _difference(expected, found))
        if progress:
            progress(i + 1, pulls)
    meter = warm_meter(lanes=1)  # the same runs, in this thread, which is the one that the counter sees
    least = FlopTable(model, batches[0])
    return Row(
        name=name,
        pulls=pulls,
        plain_seconds=clock.seconds["plain"] / pulls,
        seconds=clock.seconds["ours"] / pulls,
        plain_flops=flops.count(lambda: plain_pull(model, batches, chosen[0])),
        flops=flops.count(lambda: [meter.measure(unit, drawn) for unit in chosen]) / pulls,
        least_flops=sum(least.masked(unit) for unit in chosen) / pulls * BATCHES_PER_PULL,
        peak=clock.peak,
        difference=difference,
    )


def compare_selection(
    model: nn.Module, name: str, *, target: str = HEAD, steps: int = 0, progress: Told | None = None, **options: Any
) -> Row:
    """A search by UCB from a cold start: a tenth of the units, or the first `steps`; 32 pulls a step from 8 batches.

    What the plain way takes is measured on one pull a step, under the units committed so far.
    """
    units = candidate_units(model, target)
    if not 0 <= steps < len(units):
        raise SettingError(f"The steps are {steps}, but must be 0 to {len(units) - 1}: {name} has {len(units)} units.")
    batches = random_batches(model, N_BATCHES)
    clock = _Clock(model)
    differences: list[float] = []

    class Sampled(DamageMeter):
        def measure(self, unit: Unit, batches: Sequence[int]) -> tuple[list[float], list[float]]:
            found = clock.time("ours", lambda: super(Sampled, self).measure(unit, batches))
            if self.pulls % PULLS_PER_STEP == PULLS_PER_STEP // 2:
                drawn = [self.batches[i] for i in batches]
                with zeroed(self.model, self.committed):
                    expected = clock.time("plain", lambda: plain_pull(self.model, drawn, unit))
                differences.append(_difference(expected, found))
            if progress:
                progress(self.pulls, k * PULLS_PER_STEP)
            return found

    ratio = steps / len(units) if steps else 0.10
    k = n_selected(ratio, len(units))
    plain_pull(model, batches[:BATCHES_PER_PULL], units[0])
    meter = Sampled(model, batches, batches_per_pull=BATCHES_PER_PULL, batches_per_step=BATCHES_PER_STEP, **options)
    trace = select(meter, units, policy=UCB(), ratio=ratio, pulls_per_step=PULLS_PER_STEP).trace
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


def plain_pull(model: Any, batches: Sequence[Batch], unit: Unit) -> tuple[list[float], list[float]]:
    """Two calls of the model with its own loss a batch, one of them with the unit zeroed."""
    with torch.inference_mode():
        base = [plain_loss(model, batch) for batch in batches]
        with zeroed(model, [unit]):
            return base, [plain_loss(model, batch) for batch in batches]


def plain_loss(model: Any, batch: Batch) -> float:
    device = device_of(model)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    if "input_ids" in batch:
        return float(model(**batch, use_cache=False).loss)
    if "labels" in inspect.signature(model.forward).parameters:
        return float(model(**batch).loss)
    output = model(batch["pixel_values"])
    return float(F.cross_entropy(output if isinstance(output, Tensor) else output.logits, batch["labels"]))


def random_batches(model: nn.Module, n: int) -> list[dict[str, Tensor]]:
    """4 texts of 128 random tokens, or 8 random images, a batch."""
    network: Any = model
    generator = torch.Generator().manual_seed(1)
    if task_of(model) == "text":
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
    """The FLOPs of a batch's run, counted up to the point where each block and each projection is entered."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        counter = flops.counter()
        self._before: dict[tuple[str, int], int] = {}  # by block, or kind of unit, and layer

        def note(key: tuple[str, int]) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                self._before[key] = counter.get_total_flops()

            return hook

        hooks = []
        for i, layer in enumerate(anatomy(model)):
            for name, module in (("block", layer.block), (HEAD, layer.out), (MLP, layer.mlp_out)):
                hooks.append(module.register_forward_pre_hook(note((name, i))))
        try:
            with torch.inference_mode(), counter:
                batch_loss(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        self._total = counter.get_total_flops()

    def masked(self, unit: Unit) -> int:
        """From the projection that the unit enters on."""
        return self._total - self._before[unit.side, unit.layer]

    def searched(self, trace: Sequence[Pull], units: Sequence[Unit]) -> int:
        """Of a search that commits `units`: each masked run once, each base run from the first block changed since the last."""
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
    """Adds up seconds by name, and finds the machine's peak between the measurements."""

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


def _difference(expected: tuple[list[float], list[float]], found: tuple[list[float], list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=True))
