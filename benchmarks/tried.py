"""Ways to run a model's blocks that promise more speed: python benchmarks/tried.py [MODEL] [--compile]

All in one run, in turn, each against the plain one: batch after batch with all threads. What won is used by DamageMeter; what
did not is only here. --compile takes minutes to start.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from secateur.bench import open_model, random_batches
from secateur.families import anatomy, task_of

SMOLLM2 = Path(__file__).parents[1] / ".cache" / "SmolLM2-135M-Instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(SMOLLM2))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    model: Any = open_model(given.model)
    body = getattr(model, model.base_model_prefix)  # without the output layer, which is measured by damage.py
    batches = [next(iter(batch.values())) for batch in random_batches(model, 2)]
    options = {"use_cache": False} if task_of(model) == "text" else {}
    threads = torch.get_num_threads()
    shared = {id(tensor): tensor for tensor in (*body.parameters(), *body.buffers())}
    copies = [copy.deepcopy(body, dict(shared)) for _ in batches]
    pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(max(1, threads // 2),))

    def run(body: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return torch.as_tensor(body(x, **options)[0])

    ways: dict[str, Callable[[], Any]] = {
        "one after the other": lambda: [run(body, x) for x in batches],
        "side by side, half the threads each": lambda: list(pool.map(run, copies, batches)),
        "stacked along the batch axis": lambda: run(body, torch.cat(batches)).chunk(2),
    }
    if given.compile:
        compiled = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        for layer in anatomy(compiled):
            layer.block.compile()
        compiled_body = getattr(compiled, model.base_model_prefix)
        ways["torch.compile of the blocks"] = lambda: [run(compiled_body, x) for x in batches]
    plain = ways["one after the other"]()
    differences: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        started = time.perf_counter()
        found = way()
        print(f"{name}: first run {time.perf_counter() - started:.1f} s", flush=True)
        differences[name] = max(float((a - b).abs().max()) for a, b in zip(plain, found, strict=True))
    for _ in range(given.repeats):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    base = statistics.median(seconds["one after the other"])
    print(f"\n{threads} threads, two batches of {tuple(batches[0].shape)}, medians of {given.repeats}")
    print("| way | times as fast | s | largest difference |\n|---|---|---|---|")
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"| {name} | {base / middle:.2f} | {middle:.3f} | {differences[name]:.1e} |")


if __name__ == "__main__":
    main()
