"""Memory: what a model takes on disk, and its peak while it runs in a process of its own."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from secateur.errors import ModelError, SecateurError, first_line
from secateur.measure.speed import check_sizes, room_for, workloads
from secateur.model.devices import resolve_device
from secateur.model.loading import load_model, load_shapes


def disk_bytes(folder: Path) -> int:
    """What the weights in a folder take on disk: its safetensors files."""
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    if not sizes:
        raise ModelError(f"The folder {folder} holds no weights: there is no .safetensors file in it.")
    return sum(sizes)


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
    """The peak memory in bytes of a process that loads a model and runs its workloads once.

    On a CPU the memory of Python and its libraries does not count. On CUDA it is the device's memory. None where the system
    keeps no peak.

    >>> peak_memory("out/small", device="cpu")
    """
    check_sizes([batch_size], tokens, new_tokens)
    settings = {
        "name": name,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
        "tokens": tokens,
        "new_tokens": new_tokens,
        "trust_remote_code": trust_remote_code,
    }
    code = "from secateur.measure.memory import answer; answer()"
    command = [sys.executable, "-P", "-c", code, json.dumps(settings)]  # -P: nothing is imported from the working directory
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    said, complained = child.stdout.splitlines(), child.stderr.splitlines()
    if child.returncode != 0 or not said:  # it was killed, or could not start
        last = complained[-1].rstrip(".") if complained else f"its process ended with {child.returncode}"
        raise ModelError(f"The memory of {name} cannot be measured: {last}.")
    answer = json.loads(said[-1])
    if "error" in answer:
        raise ModelError(answer["error"])
    bytes_: int | None = answer["bytes"]
    return bytes_


def answer() -> None:
    """The work of the separate process: print the peak, or an error, as JSON."""
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
    tokens = room_for([model], tokens, new_tokens)
    with torch.inference_mode():
        for workload in workloads([model], [batch_size], tokens, new_tokens):
            workload.open(model)()()
    if where.type == "cuda":
        return int(torch.cuda.max_memory_allocated(where))
    peak = _peak_resident() if where.type == "cpu" else None
    # Safetensors are mapped, not read. A weight used as it is in the file counts once, when it is first touched. A weight
    # converted to another dtype counts twice: in the file, and as the copy. So a float32 checkpoint has a higher peak in
    # bfloat16 than in float32.
    return None if peak is None else max(0, peak - before)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak_resident() -> int | None:
    """The peak resident memory of this process."""
    if sys.platform == "linux":  # not ru_maxrss: a child inherits its parent's
        peak = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(peak[1]) * 1024 if peak else None
    elif sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes
    else:
        peak: int | None = getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows has one
        return peak
