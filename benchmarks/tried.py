"""Ways to run a model that promise more speed, and where the time goes: python benchmarks/tried.py [MODEL] [--compile]

All in one run, in turn, each against the first. What won is used by DamageMeter; what did not is only here.
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
import torch.nn.functional as F

from secateur.measure.bench import open_model, random_batches
from secateur.model.families import anatomy, candidate_units, task_of
from secateur.model.losses import batch_loss, predict
from secateur.search.damage import DamageMeter

SMOLLM2 = Path(__file__).parents[1] / ".cache" / "SmolLM2-135M-Instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(SMOLLM2))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    model: Any = open_model(given.model)
    batches = random_batches(model, 2)
    with torch.inference_mode():
        compare("blocks", block_ways(model, batches, compiled=given.compile), given.repeats)
        if task_of(model) == "text":
            compare("a batch's loss", loss_ways(model, batches[0]), given.repeats)
    profile_pulls(model, batches)


def block_ways(model: Any, batches: list[dict[str, torch.Tensor]], *, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Two batches through the model without its output layer."""
    body = getattr(model, model.base_model_prefix)
    options = {"use_cache": False} if task_of(model) == "text" else {}
    inputs = [next(iter(batch.values())) for batch in batches]
    copies = [twin(body) for _ in batches]
    pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(max(1, torch.get_num_threads() // 2),))

    def run(body: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():  # a thread's own
            return torch.as_tensor(body(x, **options)[0])

    ways: dict[str, Callable[[], Any]] = {
        "one after the other": lambda: [run(body, x) for x in inputs],
        "side by side, half the threads each": lambda: list(pool.map(run, copies, inputs)),
        "stacked along the batch axis": lambda: run(body, torch.cat(inputs)).chunk(2),
    }
    if compiled:
        compiled_model = twin(model)
        for layer in anatomy(compiled_model):
            layer.block.compile()
        compiled_body = getattr(compiled_model, model.base_model_prefix)
        ways["torch.compile of the blocks"] = lambda: [run(compiled_body, x) for x in inputs]
    return ways


def loss_ways(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    def whole() -> torch.Tensor:
        logits, labels = predict(model, batch)
        return F.cross_entropy(logits.float(), labels)

    return {
        "the model's own loss": lambda: [model(**batch, use_cache=False).loss],
        "logits whole, then cross-entropy": lambda: [whole()],
        "by pieces of the vocabulary": lambda: [batch_loss(model, batch)],
        "the blocks alone": lambda: [getattr(model, model.base_model_prefix)(batch["input_ids"], use_cache=False)[0].mean()],
    }


def twin(model: Any) -> Any:
    """A copy of the modules with the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def compare(title: str, ways: dict[str, Callable[[], Any]], repeats: int) -> None:
    found = {name: way() for name, way in ways.items()}  # warm
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    first, *_ = ways
    print(f"\n| {title}, {torch.get_num_threads()} threads, medians of {repeats} | times as fast | s | largest difference |")
    print("|---" * 4 + "|")
    for name, values in seconds.items():
        difference = max(float((a - b).abs().max()) for a, b in zip(found[first], found[name], strict=True))
        middle = statistics.median(values)
        print(f"| {name} | {statistics.median(seconds[first]) / middle:.2f} | {middle:.3f} | {difference:.1e} |", flush=True)


def profile_pulls(model: Any, batches: list[dict[str, torch.Tensor]]) -> None:
    """The share of each operation in masked runs in the middle of the model, in one lane."""
    meter = DamageMeter(model, batches, lanes=1)
    first, *units = [unit for unit in candidate_units(model) if unit.layer == len(anatomy(model)) // 2]
    list(meter.measure([(first, (0, 1))]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(meter.measure([(unit, (0, 1)) for unit in units]))
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    print("\nMasked runs by operation: " + ", ".join(f"{row.key} {row.self_cpu_time_total / total:.1%}" for row in rows[:12]))


if __name__ == "__main__":
    main()
