"""Half precision on processors that end a process for it, tried out in another process. Imports no torch itself.

On virtual machines whose processor shows matrix units (AMX) but forbids them, a product in bfloat16 is an illegal instruction.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys

from secateur.errors import SettingError

HALF = ("bfloat16", "float16")
SETTING, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"  # oneDNN reads it when torch first computes with it
TRIAL = """
import torch
x = torch.ones(2, 64, 8, 8, dtype=torch.{dtype})
torch.nn.functional.linear(x.flatten(2).transpose(1, 2), x[0, :, 0].repeat(1, 8))
torch.nn.functional.conv2d(x, x[:, :, :2, :2])
"""


@functools.cache
def prepare_half(dtype: str) -> None:
    """Make sure that products in a dtype do not end this process; a SettingError if nothing helps.

    Call it before torch computes. Where it is needed, it sets oneDNN's environment variable for this process and its children.
    """
    if dtype not in HALF or not (ended := _trial(dtype, {})):
        return
    if SETTING not in os.environ and not _trial(dtype, {SETTING: WITHOUT_AMX}):
        os.environ[SETTING] = WITHOUT_AMX
        return
    raise SettingError(f"This processor cannot compute in {dtype}: a trial ended with {ended}. Use --dtype float32.")


@functools.cache
def can_multiply(dtype: str) -> bool:
    """Whether products in a dtype work here as things are: nothing is set, so that it may be asked at any time."""
    return not _trial(dtype, {})


def _trial(dtype: str, setting: dict[str, str]) -> str:
    """How a process that multiplies in a dtype ended; "" if well."""
    command = [sys.executable, "-P", "-c", TRIAL.format(dtype=dtype)]  # -P: nothing is imported from the working directory
    ran = subprocess.run(command, env=os.environ | setting, stdin=subprocess.DEVNULL, capture_output=True)
    try:
        return signal.Signals(-ran.returncode).name if ran.returncode else ""
    except ValueError:
        return f"exit code {ran.returncode}"
