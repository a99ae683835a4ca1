"""What a cut has won: parameters, bytes, memory, FLOPs and time of two models, measured in one run.

The workloads of a text model are "prefill", one call on a prompt that gives the logits of its last token, and "decode", one
token after another with the keys and values of the prompt kept. That of an image model is "forward", one call on a batch.
Tokens and images are random: neither time nor FLOPs depend on what they say.

The two models take turns on the same input, and the speedup is the median of the turns' ratios, so that a machine that slows
down for a while troubles both alike.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
from torch import Tensor, nn

from secateur import flops, jsonio
from secateur.errors import ModelError, SecateurError, SettingError, first_line
from secateur.families import task_of
from secateur.losses import device_of, evaluating
from secateur.models import load_model, load_shapes, resolve_device

PREFILL, DECODE, FORWARD = "prefill", "decode", "forward"
CONFIDENCE = 0.95
_SPOKEN = {PREFILL: "Prefill", DECODE: "Decoding", FORWARD: "The forward pass"}

T = TypeVar("T")
Run = Callable[[], object]  # what the clock is held to


class Median(NamedTuple):
    """A median and an interval that holds the true one in 95% of all cases, whatever the distribution."""

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> Median:
    """The interval lies between two values of the sample, as many below the one as above the other.

    Each value falls below the true median as a fair coin falls. Of fewer than 6 values the interval is the whole range, which
    holds it less often than in 95% of all cases.

    >>> median([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 8.0, 9.0, 7.0])
    Median(value=5.0, low=2.0, high=8.0)
    """
    ordered, n = sorted(values), len(values)
    # How often the true median is outside when `cut` values are left out at each end.
    missed = [2 * sum(math.comb(n, i) for i in range(cut + 1)) / 2**n for cut in range(n // 2)]
    cut = max((cut for cut in range(n // 2) if missed[cut] <= 1 - CONFIDENCE), default=0)
    return Median(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut])


@dataclass(frozen=True)
class Timing:
    """A workload on both models. Milliseconds and FLOPs are those of one call of the model, for the whole batch.

    A call of "decode" makes one token of each text; its figures are means over the new tokens of a run.
    """

    name: str  # "prefill", "decode" or "forward"
    batch_size: int
    dense_ms: tuple[float, ...]  # one a repetition, the same one in both
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
        """How many times as fast the small model is, repetition by repetition."""
        return median([dense / small for dense, small in zip(self.dense_ms, self.small_ms, strict=True)])

    @property
    def flop_ratio(self) -> float:
        return self.dense_flops / self.small_flops

    @property
    def gain_share(self) -> float | None:
        """The share of time saved, by the speedup, over the share of FLOPs saved: 1 is all that the FLOPs promised."""
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
        """A sentence if the small model is not faster for sure."""
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
    """Two models side by side. `measure` leaves out the disk and the memory: put them in with `dataclasses.replace`."""

    dense_params: int  # tied weights count once
    small_params: int
    dense_bytes: int  # of the parameters, in memory
    small_bytes: int
    timings: tuple[Timing, ...]
    tokens: int | None  # in a prompt: those asked for, or what the models have room for; None for images
    new_tokens: int | None
    threads: int
    device: str
    dtype: str
    torch_version: str
    dense_disk: int | None = None  # bytes, of `disk_bytes`
    small_disk: int | None = None
    dense_memory: int | None = None  # bytes, of `peak_memory`
    small_memory: int | None = None

    def verdicts(self) -> list[str]:
        """A sentence for every workload on which the small model is not faster for sure."""
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
    """Time both models on the same work in turns; `progress` is told the repetitions done, of how many.

    Of a text model's `max_position_embeddings` the prompt takes no more than the new tokens leave.

    >>> measurement = measure(model, shrunk)
    >>> measurement.timings[0].speedup.value, measurement.verdicts()
    """
    threads = torch.get_num_threads() if threads is None else threads
    check_measure(batch_sizes, tokens, new_tokens, repeats, threads)
    models = (dense, small)
    text = _same("task", [task_of(model) for model in models]) == "text"
    device = _same("device", [device_of(model) for model in models])
    dtype = _same("dtype", [_dtype_of(model) for model in models])
    if text:
        tokens = _room_for_prompt(models, tokens, new_tokens)
    with evaluating(dense), evaluating(small), torch.inference_mode(), _threads(threads):
        workloads = _workloads(models, batch_sizes, tokens, new_tokens)
        done = itertools.count(1)

        def tell() -> None:
            if progress:
                progress(next(done), repeats * len(workloads))

        timings = [_in_turns(workload, dense, small, repeats, tell) for workload in workloads]
    return Measurement(
        dense_params=_n_parameters(dense),
        small_params=_n_parameters(small),
        dense_bytes=_n_bytes(dense),
        small_bytes=_n_bytes(small),
        timings=tuple(timings),
        tokens=tokens if text else None,
        new_tokens=new_tokens if text else None,
        threads=threads,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        torch_version=torch.__version__,
    )


def check_measure(batch_sizes: Sequence[int], tokens: int, new_tokens: int, repeats: int, threads: int) -> None:
    """Refuse what cannot be measured, before anything is loaded."""
    if not batch_sizes:
        raise SettingError("There is no batch size: give at least one.")
    _check_sizes(batch_sizes, tokens, new_tokens)
    _at_least(3, "number of repeats", repeats)
    _at_least(1, "number of threads", threads)


def run_of(model: nn.Module, batch_size: int, tokens: int) -> Run:
    """One run of what a model spends most of its time with: a prompt, or a batch of images."""
    if task_of(model) == "text":
        tokens = _room_for_prompt([model], tokens, 1)
    return _workloads([model], [batch_size], tokens, 1)[0].open(model)()


def disk_bytes(folder: Path) -> int:
    """What the weights in a folder take on disk: its safetensors files."""
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    if not sizes:
        raise ModelError(f"The folder {folder} holds no weights: there is no .safetensors file in it.")
    return sum(sizes)


def image_shape(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that an image model takes."""
    network: Any = model
    size = network.config.image_size if hasattr(network, "config") else network.patch_embed.img_size  # the latter is timm's
    height, width = (size, size) if isinstance(size, int) else size
    return 3, height, width


# The workloads


class _Workload(NamedTuple):
    name: str
    batch_size: int
    calls: int  # of the model in a run
    open: Callable[[nn.Module], Callable[[], Run]]  # open(model)() is a run, ready for the clock


def _workloads(models: Sequence[nn.Module], batch_sizes: Sequence[int], tokens: int, new_tokens: int) -> list[_Workload]:
    """The same input for all the models, which do the same task on the same device."""
    generator = torch.Generator().manual_seed(0)
    networks: Sequence[Any] = models
    device = device_of(models[0])
    workloads = []
    if task_of(models[0]) == "image":
        shape = _same("shape of images", [image_shape(model) for model in models])
        for n in batch_sizes:
            images = torch.randn(n, *shape, generator=generator).to(device, _dtype_of(models[0]))
            workloads.append(_Workload(FORWARD, n, 1, partial(_forward, images=images)))
        return workloads
    n_tokens = min(network.get_input_embeddings().num_embeddings for network in networks)
    # As generation does it: only the last logits of a prompt. All of them can take more FLOPs than the blocks, for nothing.
    takes_keep = all("logits_to_keep" in inspect.signature(network.forward).parameters for network in networks)
    keep = {"logits_to_keep": 1} if takes_keep else {}
    for n in batch_sizes:
        ids = torch.randint(0, n_tokens, (n, tokens + new_tokens), generator=generator).to(device)
        workloads.append(_Workload(PREFILL, n, 1, partial(_prefill, ids=ids[:, :tokens], keep=keep)))
        workloads.append(_Workload(DECODE, n, new_tokens, partial(_decode, ids=ids, tokens=tokens, keep=keep)))
    return workloads


def _in_turns(workload: _Workload, dense: nn.Module, small: nn.Module, repeats: int, tell: Callable[[], None]) -> Timing:
    device = device_of(dense)
    ready = [workload.open(model) for model in (dense, small)]
    counted = [flops.count(make_run()) / workload.calls for make_run in ready]
    for make_run in ready:
        make_run()()  # to warm up
    ms: tuple[list[float], list[float]] = ([], [])
    for i in range(repeats):
        for which in (0, 1) if i % 2 == 0 else (1, 0):  # neither is always the one that comes after the other
            ms[which].append(_milliseconds(ready[which](), device) / workload.calls)
        tell()
    return Timing(workload.name, workload.batch_size, tuple(ms[0]), tuple(ms[1]), *counted)


def _forward(model: nn.Module, images: Tensor) -> Callable[[], Run]:
    return lambda: lambda: model(images)


def _prefill(model: nn.Module, ids: Tensor, keep: dict[str, int]) -> Callable[[], Run]:
    return lambda: lambda: model(input_ids=ids, use_cache=False, **keep)


def _decode(model: nn.Module, ids: Tensor, tokens: int, keep: dict[str, int]) -> Callable[[], Run]:
    filled = model(input_ids=ids[:, :tokens], use_cache=True, **keep).past_key_values

    def make_run() -> Run:
        cache = copy.deepcopy(filled)  # a run makes it longer, and one with a sliding window cannot be made shorter again

        def run() -> None:
            for i in range(tokens, ids.shape[1]):
                model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True, **keep)

        return run

    return make_run


def _room_for_prompt(models: Sequence[nn.Module], tokens: int, new_tokens: int) -> int:
    for model in models:
        places = getattr(model.config, "max_position_embeddings", None)
        if isinstance(places, int):
            if places <= new_tokens:
                raise SettingError(f"The number of new tokens is {new_tokens}, but the model has room for {places} in all.")
            tokens = min(tokens, places - new_tokens)
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


# The peak of memory


def peak_memory(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "float32",
    batch_size: int = 8,
    tokens: int = 128,
    new_tokens: int = 4,
    trust_remote_code: bool = False,
) -> int | None:
    """The most bytes that a model takes while a process of its own loads it and runs its workloads once.

    On a CPU what the process had before, which is Python and its libraries, does not count. On CUDA it is
    the device's memory. None where the system keeps no peak.

    >>> peak_memory("out/small", device="cpu")
    """
    _check_sizes([batch_size], tokens, new_tokens)
    settings = {
        "name": name,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
        "tokens": tokens,
        "new_tokens": new_tokens,
        "trust_remote_code": trust_remote_code,
    }
    code = "from secateur.measure import _answer; _answer()"
    command = [sys.executable, "-P", "-c", code, json.dumps(settings)]  # -P: nothing is imported from the working directory
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    said, complained = child.stdout.splitlines(), child.stderr.splitlines()
    if child.returncode != 0 or not said:  # it was killed, or could not even start
        last = complained[-1].rstrip(".") if complained else f"its process ended with {child.returncode}"
        raise ModelError(f"The memory of {name} cannot be measured: {last}.")
    answer = json.loads(said[-1])
    if "error" in answer:
        raise ModelError(answer["error"])
    bytes_: int | None = answer["bytes"]
    return bytes_


def _answer() -> None:
    """What the process of its own runs."""
    try:
        answer: dict[str, int | str | None] = {"bytes": _own_peak(**json.loads(sys.argv[1]))}
    except SecateurError as error:
        answer = {"error": str(error)}
    except Exception as error:
        answer = {"error": first_line(error)}
    print(json.dumps(answer))


def _own_peak(
    name: str, device: str, dtype: str, batch_size: int, tokens: int, new_tokens: int, trust_remote_code: bool
) -> int | None:
    where = resolve_device(device)
    with contextlib.suppress(SecateurError):  # if something is wrong with the model, `load_model` will say so
        load_shapes(name, trust_remote_code=trust_remote_code)  # imports the model's code without its weights
    before = _resident()
    model = load_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    if task_of(model) == "text":
        tokens = _room_for_prompt([model], tokens, new_tokens)
    with torch.inference_mode():
        for workload in _workloads([model], [batch_size], tokens, new_tokens):
            workload.open(model)()()
    if where.type == "cuda":
        return int(torch.cuda.max_memory_allocated(where))
    peak = _peak_resident() if where.type == "cpu" else None
    # Safetensors are mapped, not read. A weight used as it lies in the file counts once, when it is first touched, and the
    # system could take its pages back. One that is turned into another dtype counts twice: in the file, and as the copy. So a
    # float32 checkpoint has a higher peak in bfloat16 than in float32.
    return None if peak is None else max(0, peak - before)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak_resident() -> int | None:
    """The most that was ever resident in this process."""
    if sys.platform == "linux":  # whose ru_maxrss will not do: a child starts with its parent's
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    elif sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes
    else:
        peak: int | None = getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows has one
        return peak


# What is asked, and what is counted


def _check_sizes(batch_sizes: Sequence[int], tokens: int, new_tokens: int) -> None:
    for size in batch_sizes:
        _at_least(1, "batch size", size)
    _at_least(1, "number of tokens", tokens)
    _at_least(1, "number of new tokens", new_tokens)


def _at_least(least: int, what: str, value: int) -> None:
    if value < least:
        raise SettingError(f"The {what} is {value}, but must be at least {least}.")


def _same(what: str, values: Sequence[T]) -> T:
    """What all the models have, the dense one first."""
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
