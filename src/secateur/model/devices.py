"""Devices: where a model runs, and how its products are computed there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from secateur.errors import SettingError, first_line
from secateur.half import can_multiply, prepare_half
from secateur.settings import MAP

DEVICES = ("cpu", "cuda", "mps")
PROCESSOR = Path("/proc/cpuinfo")
SHAPES = ((512, 576, 1536), (64, 4096, 192), (3, 64, 64))  # of products that are tried: rows, inputs, outputs
AS_PRECISE = 4.0  # times the error of torch's own products; products in half precision err a thousand times as much


def resolve_device(device: str, dtype: str | None = None) -> torch.device:
    """The device of this name, tried out, on a CPU also in a dtype; "auto" is a GPU if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in DEVICES or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise SettingError(
            f"The device is {device!r}, but must be auto, {', '.join(DEVICES)}, or a numbered one such as cuda:1. "
            "Try --device cpu."
        )
    try:
        resolved = torch.device(device)
        torch.zeros(1, device=resolved).item()
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"The device {device!r} cannot be used here: {first_line(error)} Try --device cpu.") from error
    if resolved.type == "cpu":
        if dtype is not None:
            prepare_half(dtype)  # first: it must come before torch computes
        multiply_in_full_width()
    return resolved


def device_name(model: nn.Module) -> str:
    """The device of a model, such as "cuda:0"; MAP if its parameters lie on several."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else MAP


def products_dtype(model: nn.Module, asked: str | None) -> str:
    """The precision of a training's products: as asked, or bfloat16 where the device is faster in it, or that of the model."""
    weight = next(model.parameters())
    kind, given = weight.device.type, str(weight.dtype).removeprefix("torch.")
    if asked and kind == "cpu":
        prepare_half(asked)
    if asked or given != "float32":
        return asked or given
    if kind == "cpu":
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)  # torch 2.5 does not say
        fast = native() and can_multiply("bfloat16")
    else:
        fast = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if fast else given


@functools.cache
def multiply_in_full_width() -> bool:
    """Let float32 products on a CPU use vectors as wide as it has; whether anything had to be set for it.

    torch multiplies by MKL, which takes kernels for 512-bit vectors on Intel's processors alone. On others oneDNN, which torch
    brings along too, is about twice as fast. The setting for it also permits oneDNN to round to bfloat16, which it does only
    where the processor has matrix units: products are tried first, and it stays unset unless they are as precise.
    """
    setting = _setting()
    if setting is None or torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    if not PROCESSOR.exists() or "GenuineIntel" in PROCESSOR.read_text():
        return False
    before, plain = setting.fp32_precision, _errors()
    setting.fp32_precision = "bf16"
    if any(wide > AS_PRECISE * own for wide, own in zip(_errors(), plain, strict=True)):
        setting.fp32_precision = before
        return False
    return True


@contextlib.contextmanager
def multiplying_as_torch_does() -> Iterator[None]:
    """While the block lasts, products are those of a process that only uses torch: what is timed is what a user will see."""
    setting = _setting()
    if setting is None:
        yield
        return
    before, setting.fp32_precision = setting.fp32_precision, "none"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _setting() -> Any:
    """Where torch keeps the precision of oneDNN's products; None in an older torch, which has no such place."""
    setting = getattr(torch.backends.mkldnn, "matmul", None)
    return setting if hasattr(setting, "fp32_precision") else None


def _errors() -> list[float]:
    """The largest error of a product of each shape, computed in float32."""
    errors = []
    for rows, inputs, outputs in SHAPES:
        draw = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, inputs, generator=draw) for n in (rows, outputs))
        errors.append(float((F.linear(x, weight).double() - F.linear(x.double(), weight.double())).abs().max()))
    return errors
