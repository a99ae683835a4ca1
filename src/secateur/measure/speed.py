"""Speed: parameters, bytes, FLOPs and time of two models, measured in one run. memory.py measures the peak of memory.

A language model has two workloads: "prefill", one call on a prompt for the logits of its last token, and "decode", one token
after another with the K/V cache of the prompt. Any other model has one, a call on a batch: "encode" for texts, "forward" for
images. Tokens and images are random: neither time nor FLOPs depend on their values.

The two models take turns on the same input, and the speedup is the median of the turns' ratios, so that a machine that is slow
for a while slows both alike.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from secateur.errors import SettingError
from secateur.files import jsonio
from secateur.measure import flops
from secateur.model.devices import multiplying_as_torch_does
from secateur.model.families import context_of, task_of
from secateur.model.losses import Batch, device_of, evaluating, outputs
from secateur.tasks import IMAGE, TASKS, TEXT

PREFILL, DECODE, ENCODE, FORWARD = "prefill", "decode", "encode", "forward"
CONFIDENCE = 0.95
MOST_THREADS = 1024  # with very many, torch dies as it starts them
_SPOKEN = {PREFILL: "Prefill", DECODE: "Decoding", ENCODE: "Encoding", FORWARD: "The forward pass"}

T = TypeVar("T")
Run = Callable[[], object]  # the work that is timed


class Median(NamedTuple):
    """A median with its 95% confidence interval, valid for any distribution."""

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> Median:
    """The median of a sample with its confidence interval, which lies between two values of the sample.

    Each value is below the true median with probability one half. With fewer than 6 values the interval is the whole range, and
    covers the true median less often than 95%.

    >>> median([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 8.0, 9.0, 7.0])
    Median(value=5.0, low=2.0, high=8.0)
    """
    ordered, n = sorted(values), len(values)
    # The probability that the true median is outside when `cut` values are left out at each end.
    missed = [2 * sum(math.comb(n, i) for i in range(cut + 1)) / 2**n for cut in range(n // 2)]
    cut = max((cut for cut in range(n // 2) if missed[cut] <= 1 - CONFIDENCE), default=0)
    return Median(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut])


@dataclass(frozen=True)
class Timing:
    """A workload on both models. Milliseconds and FLOPs are those of one call, for the whole batch.

    A call of "decode" makes one token of each text; its figures are means over the new tokens of a run.
    """

    name: str  # "prefill", "decode", "encode" or "forward"
    batch_size: int
    dense_ms: tuple[float, ...]  # one for each repetition, in the same order for both models
    small_ms: tuple[float, ...]
    dense_flops: float
    small_flops: float

    @property
    def dense_median(self) -> Median:
        return median(self.dense_ms)

    @property
    def small_median(self) -> Median:
        return median(self.small_ms)

    @property
    def speedup(self) -> Median:
        """How many times as fast the small model is: the median over repetitions."""
        return median([dense / small for dense, small in zip(self.dense_ms, self.small_ms, strict=True)])

    @property
    def flop_ratio(self) -> float:
        return self.dense_flops / self.small_flops

    @property
    def gain_share(self) -> float | None:
        """The share of time saved divided by the share of FLOPs saved; 1 means that all of it became speed."""
        saved = 1 - self.small_flops / self.dense_flops
        return (1 - 1 / self.speedup.value) / saved if saved > 0 else None

    @property
    def dense_images_per_second(self) -> float | None:
        return self._images_per_second(self.dense_median)

    @property
    def small_images_per_second(self) -> float | None:
        return self._images_per_second(self.small_median)

    def _images_per_second(self, ms: Median) -> float | None:
        return 1000 * self.batch_size / ms.value if self.name == FORWARD else None

    def verdict(self) -> str | None:
        """A sentence if the interval of the speedup does not lie above 1; else None."""
        value, low, high = self.speedup
        if low > 1:
            return None
        slower = "slower" if high < 1 else "not faster"
        saved = 1 - self.small_flops / self.dense_flops
        gone = f"though {saved:.1%} of its FLOPs are gone" if saved > 0 else "and none of its FLOPs are gone"
        what = f"{_SPOKEN[self.name]} at batch {self.batch_size}"
        return f"{what} is {slower}: dense/small {value:.2f} ({low:.2f} to {high:.2f}), {gone}."

    def to_json(self) -> dict[str, Any]:
        medians = {name: getattr(self, name)._asdict() for name in ("dense_median", "small_median", "speedup")}
        derived = ("flop_ratio", "gain_share", "dense_images_per_second", "small_images_per_second")
        result: dict[str, Any] = jsonio.to_json(asdict(self) | medians | {name: getattr(self, name) for name in derived})
        return result


@dataclass(frozen=True)
class Measurement:
    """Two models side by side. `measure` leaves disk and memory None; `steps.compare` fills them in.

    >>> measure(model, small, batch_sizes=[1], repeats=3).verdicts()
    """

    dense_params: int  # tied weights count once
    small_params: int
    dense_bytes: int  # of the parameters, in memory
    small_bytes: int
    timings: tuple[Timing, ...]
    tokens: int | None  # in a prompt: as asked for, or as many as the models take; None for images
    new_tokens: int | None
    threads: int
    device: str
    dtype: str
    torch_version: str
    dense_disk: int | None = None  # bytes, of `disk_bytes`
    small_disk: int | None = None
    dense_memory: int | None = None  # bytes, of `peak_memory`
    small_memory: int | None = None

    @property
    def of_a_batch(self) -> Timing:
        """The first workload of several texts or images: what goals for latency are about."""
        return next((timing for timing in self.timings if timing.batch_size > 1), self.timings[0])

    def verdicts(self) -> list[str]:
        """A sentence for every workload without a sure speedup."""
        return [verdict for timing in self.timings if (verdict := timing.verdict())]

    def to_json(self) -> dict[str, Any]:
        more = {"timings": [timing.to_json() for timing in self.timings], "verdicts": self.verdicts()}
        result: dict[str, Any] = jsonio.to_json(asdict(self) | more)
        return result


def measure(
    dense: nn.Module,
    small: nn.Module,
    *,
    batch_sizes: Sequence[int] = (1, 8),
    tokens: int = 128,
    new_tokens: int = 16,
    repeats: int = 9,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Time both models on the same work in turns; `progress` gets the number of repetitions done, and of all.

    The prompt is shortened where `max_position_embeddings` leaves no room for it and the new tokens.

    >>> measurement = measure(model, small, batch_sizes=[1], repeats=3)
    >>> measurement.timings[0].speedup.value, measurement.verdicts()
    """
    threads = torch.get_num_threads() if threads is None else threads
    check_measure(batch_sizes, tokens, new_tokens, repeats, threads)
    models = (dense, small)
    task = _same("task", [task_of(model) for model in models])
    text = TASKS[task].inputs == TEXT
    device = _same("device", [device_of(model) for model in models])
    dtype = _same("dtype", [_dtype_of(model) for model in models])
    tokens = room_for(models, tokens, new_tokens) if text else tokens
    with evaluating(dense), evaluating(small), torch.inference_mode(), multiplying_as_torch_does(), _threads(threads):
        works = workloads(models, batch_sizes, tokens, new_tokens)
        done = itertools.count(1)

        def report() -> None:
            if progress:
                progress(next(done), repeats * len(works))

        timings = [_in_turns(workload, dense, small, repeats, report) for workload in works]
    return Measurement(
        dense_params=_n_parameters(dense),
        small_params=_n_parameters(small),
        dense_bytes=_n_bytes(dense),
        small_bytes=_n_bytes(small),
        timings=tuple(timings),
        tokens=tokens if text else None,
        new_tokens=new_tokens if task == TEXT else None,
        threads=threads,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        torch_version=torch.__version__,
    )


def check_measure(batch_sizes: Sequence[int], tokens: int, new_tokens: int, repeats: int, threads: int) -> None:
    """Refuse numbers that cannot work, before a model is loaded."""
    if not batch_sizes:
        raise SettingError("There is no batch size: give at least one.")
    check_sizes(batch_sizes, tokens, new_tokens)
    _at_least(3, "number of repeats", repeats)
    _at_least(1, "number of threads", threads)
    if threads > MOST_THREADS:
        raise SettingError(f"The number of threads is {threads}, but must be at most {MOST_THREADS}.")


def run_of(model: nn.Module, batch_size: int, tokens: int) -> Run:
    """A function that makes one typical run of a model: a prompt, or a batch of images."""
    return workloads([model], [batch_size], room_for([model], tokens, 1), 1)[0].open(model)()


def image_shape(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that an image model takes."""
    network: Any = model
    size = (
        network.config.image_size if hasattr(network, "config") else network.patch_embed.img_size
    )  # timm's models have no config
    height, width = (size, size) if isinstance(size, int) else size
    return 3, height, width


# The workloads


class Workload(NamedTuple):
    name: str
    batch_size: int
    calls: int  # of the model, in a run
    open: Callable[[nn.Module], Callable[[], Run]]  # open(model)() is a run that can be timed


def workloads(models: Sequence[nn.Module], batch_sizes: Sequence[int], tokens: int, new_tokens: int) -> list[Workload]:
    """The workloads of models that do the same task on the same device, with the same input for all."""
    generator = torch.Generator().manual_seed(0)
    networks: Sequence[Any] = models
    device = device_of(models[0])
    workloads = []
    task = task_of(models[0])
    if TASKS[task].inputs == IMAGE:
        shape = _same("shape of images", [image_shape(model) for model in models])
        for n in batch_sizes:
            images = torch.randn(n, *shape, generator=generator).to(device, _dtype_of(models[0]))
            workloads.append(Workload(FORWARD, n, 1, partial(_call, inputs={"pixel_values": images})))
        return workloads
    n_tokens = min(network.get_input_embeddings().num_embeddings for network in networks)
    if task != TEXT:
        for n in batch_sizes:
            ids = torch.randint(0, n_tokens, (n, tokens), generator=generator).to(device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            workloads.append(Workload(ENCODE, n, 1, partial(_call, inputs=inputs)))
        return workloads
    # Only the last logits of a prompt, as in generation: all of them can take more FLOPs than the blocks.
    takes_keep = all("logits_to_keep" in inspect.signature(network.forward).parameters for network in networks)
    keep = {"logits_to_keep": 1} if takes_keep else {}
    for n in batch_sizes:
        ids = torch.randint(0, n_tokens, (n, tokens + new_tokens), generator=generator).to(device)
        workloads.append(Workload(PREFILL, n, 1, partial(_prefill, ids=ids[:, :tokens], keep=keep)))
        workloads.append(Workload(DECODE, n, new_tokens, partial(_decode, ids=ids, tokens=tokens, keep=keep)))
    return workloads


def _in_turns(workload: Workload, dense: nn.Module, small: nn.Module, repeats: int, report: Callable[[], None]) -> Timing:
    device = device_of(dense)
    ready = [workload.open(model) for model in (dense, small)]
    counted = [flops.count(make_run()) / workload.calls for make_run in ready]
    for make_run in ready:
        make_run()()  # to warm up
    ms: tuple[list[float], list[float]] = ([], [])
    for i in range(repeats):
        for which in (0, 1) if i % 2 == 0 else (1, 0):  # so that neither model always comes second
            ms[which].append(_milliseconds(ready[which](), device) / workload.calls)
        report()
    return Timing(workload.name, workload.batch_size, tuple(ms[0]), tuple(ms[1]), *counted)


def _call(model: nn.Module, inputs: Batch) -> Callable[[], Run]:
    return lambda: lambda: outputs(model, inputs)


def _prefill(model: nn.Module, ids: Tensor, keep: dict[str, int]) -> Callable[[], Run]:
    return lambda: lambda: model(input_ids=ids, use_cache=False, **keep)


def _decode(model: nn.Module, ids: Tensor, tokens: int, keep: dict[str, int]) -> Callable[[], Run]:
    filled = model(input_ids=ids[:, :tokens], use_cache=True, **keep).past_key_values

    def make_run() -> Run:
        cache = copy.deepcopy(filled)  # a run extends it, and a cache with a sliding window cannot be cut back

        def run() -> None:
            for i in range(tokens, ids.shape[1]):
                model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True, **keep)

        return run

    return make_run


def room_for(models: Sequence[nn.Module], tokens: int, new_tokens: int) -> int:
    """The number of tokens, or as many as the models leave room for beside the new ones that a language model makes."""
    for model in models:
        task, places = task_of(model), context_of(model)
        new = new_tokens if task == TEXT else 0
        if places is not None and TASKS[task].inputs == TEXT:
            if places <= new:
                raise SettingError(f"The number of new tokens is {new}, but the model has room for {places} in all.")
            tokens = min(tokens, places - new)
    return tokens


def _milliseconds(run: Run, device: torch.device) -> float:
    started = _now(device)
    run()
    return (_now(device) - started) * 1000


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Checks and counts


def check_sizes(batch_sizes: Sequence[int], tokens: int, new_tokens: int) -> None:
    for size in batch_sizes:
        _at_least(1, "batch size", size)
    _at_least(1, "number of tokens", tokens)
    _at_least(1, "number of new tokens", new_tokens)


def _at_least(least: int, what: str, value: int) -> None:
    if value < least:
        raise SettingError(f"The {what} is {value}, but must be at least {least}.")


def _same(what: str, values: Sequence[T]) -> T:
    """The value that all models share; an error if they differ."""
    for value in values:
        if value != values[0]:
            raise SettingError(f"The models must have the same {what}, but have {values[0]} (dense) and {value} (small).")
    return values[0]


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _n_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _n_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
