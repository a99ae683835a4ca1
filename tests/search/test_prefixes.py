from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes import losses_of
from secateur.model.families import Layer, anatomy
from secateur.model.losses import batch_loss
from secateur.model.shrunk import counting
from secateur.search.damage import DamageMeter
from secateur.search.prefixes import Kept, Prefixes
from secateur.units import HEAD, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, deep_llama, loss_without, tiny_batches

PARTS = ("block", "attention", "qkv", "out", "mlp_in", "mlp_out")
MIB = 2**20


class Runs:
    """Counts how often the modules of each block run themselves; one that is stood in for does not.

    In a block with experts the router counts as `mlp_in`. The experts count as `mlp_out`, and are stood in for to be zeroed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()
        self.layers = anatomy(model)
        for i, layer in enumerate(self.layers):
            for part in PARTS:
                for module in modules_of(layer, part):
                    module.register_forward_hook(lambda module, *_, key=(i, part): self._add(module, key))

    def _add(self, module: nn.Module, key: tuple[int, str]) -> None:
        self.counts[key] += "forward" not in module.__dict__

    def taken(self) -> list[dict[str, int]]:
        """By block; each part that ran, with how often all of its modules ran."""
        runs: list[dict[str, int]] = []
        for i, layer in enumerate(self.layers):
            times = {part: self.counts[i, part] / len(modules_of(layer, part)) for part in PARTS}
            assert all(count == int(count) for count in times.values())
            runs.append({part: int(count) for part, count in times.items() if count})
        self.counts.clear()
        return runs

    def blocks(self) -> list[int]:
        return [runs.get("block", 0) for runs in self.taken()]


def modules_of(layer: Layer, part: str) -> tuple[nn.Module, ...]:
    modules = layer.router if part == "mlp_in" and layer.router else getattr(layer, part)
    return modules if isinstance(modules, tuple) else (modules,)


WHOLE = dict.fromkeys(PARTS, 1)


def from_its_heads_on(layer: Layer) -> dict[str, int]:
    """What runs in a block that starts where its heads are done: in BERT the attention goes on after its projection."""
    goes_on = {} if counting(layer.attention) is layer.attention else {"attention": 1}
    return {"block": 1, "out": 1, "mlp_in": 1, "mlp_out": 1} | goes_on


OUTPUT_BYTES = 3 * 10 * 16 * 4  # of a block of the deep Llama on a tiny batch: texts, tokens, width, float32


@pytest.mark.parametrize("family", FAMILIES_TINY)
def test_a_run_for_a_head_starts_at_the_out_projection_of_its_block(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 1)
    runs = Runs(model)
    meter = DamageMeter(model, batches, batches_per_pull=1)
    losses_of(meter, Unit(HEAD, 1, 0), [0])
    assert [one["out"] for one in runs.taken()] == [1] + [2] * (len(anatomy(model)) - 1)
    unit = Unit(HEAD, 1, 1)
    _, masked = losses_of(meter, unit, [0])
    assert runs.taken() == [{}, from_its_heads_on(anatomy(model)[1]), *[WHOLE] * (len(anatomy(model)) - 2)]
    assert masked == [loss_without(model, batches[0], [unit])]


@pytest.mark.parametrize("family", FAMILIES_TINY)
def test_a_run_for_an_mlp_group_starts_at_the_last_projection_of_its_block(family: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 1)
    runs = Runs(model)
    meter = DamageMeter(model, batches, batches_per_pull=1)
    losses_of(meter, Unit(MLP, 1, 0, GROUP), [0])
    experts = anatomy(model)[1].experts
    assert [one["mlp_out"] for one in runs.taken()] == [1, 1 if experts else 2] + [2] * (len(anatomy(model)) - 2)
    unit = Unit(MLP, 1, 1, GROUP)
    _, masked = losses_of(meter, unit, [0])
    inside = {"block": 1, "mlp_in": 1} if experts else {"block": 1, "mlp_out": 1}
    assert runs.taken() == [{}, inside, *[WHOLE] * (len(anatomy(model)) - 2)]
    assert masked == [loss_without(model, batches[0], [unit])]


@pytest.mark.parametrize("family", FAMILIES_TINY)
@pytest.mark.parametrize("kind", [HEAD, MLP])
def test_runs_start_inside_the_first_and_the_last_block_too(family: str, kind: str) -> None:
    model = FAMILIES_TINY[family]()
    batches = tiny_batches(model, 1)
    last = len(anatomy(model)) - 1
    runs = Runs(model)
    meter = DamageMeter(model, batches, batches_per_pull=1)
    losses_of(meter, Unit(kind, 0, 0, GROUP), [0])
    runs.taken()
    for layer in (0, last):
        experts = kind == MLP and runs.layers[layer].experts
        inside = from_its_heads_on(anatomy(model)[0]) if kind == HEAD else {"block": 1, "mlp_out": 1}
        inside = {"block": 1, "mlp_in": 1} if experts else inside
        expected = [inside, *[WHOLE] * last] if layer == 0 else [*[{}] * last, inside]
        unit = Unit(kind, layer, 1, GROUP)
        assert losses_of(meter, unit, [0])[1] == [loss_without(model, batches[0], [unit])]
        runs.counts[layer, "mlp_out"] += bool(experts)  # the run above stood in for them too
        runs.counts -= Counter({(i, part): len(modules_of(one, part)) for i, one in enumerate(runs.layers) for part in PARTS})
        assert runs.taken() == expected


def test_a_stack_starts_inside_the_first_of_its_blocks_where_the_heads_of_that_block_enter() -> None:
    model = FAMILIES_TINY["llama"]()
    batches = tiny_batches(model, 2)
    runs = Runs(model)
    meter = DamageMeter(model, batches, stack=4)
    losses_of(meter, Unit(MLP, 2, 0, GROUP), [0, 1])
    losses_of(meter, Unit(HEAD, 2, 0), [0, 1])
    meter.commit(Unit(MLP, 0, 3, GROUP))
    losses_of(meter, Unit(HEAD, 2, 1), [0, 1])  # what is kept now is for both kinds
    runs.taken()
    groups = [Unit(MLP, 1, 0, GROUP), Unit(MLP, 2, 1, GROUP)]
    request = meter.measure([(unit, (0, 1)) for unit in groups])
    first = next(request)
    assert runs.taken() == [{}, {"block": 1, "mlp_out": 1}, WHOLE]
    assert next(request).masked_losses != first.masked_losses
    assert runs.taken() == [{}, {}, {}]
    mixed = [Unit(MLP, 1, 1, GROUP), Unit(HEAD, 1, 0)]
    next(meter.measure([(unit, (0, 1)) for unit in mixed]))
    assert runs.taken() == [{}, {"block": 1, "out": 1, "mlp_in": 1, "mlp_out": 1}, WHOLE]
    committed = Unit(MLP, 0, 3, GROUP)
    for unit in (*groups, *mixed):
        by_hand = [loss_without(model, batch, [committed, unit]) for batch in batches]
        assert losses_of(meter, unit, [0, 1])[1] == pytest.approx(by_hand, abs=1e-6)


def test_an_attention_that_does_something_after_its_projection_runs_whole_for_a_head() -> None:
    model = FAMILIES_TINY["gpt2"]()
    for layer in anatomy(model):  # in GPT-2 this follows the projection, inside the attention
        layer.attention.add_module("resid_dropout", nn.LayerNorm(12))
    batches = tiny_batches(model, 1)
    runs = Runs(model)
    meter = DamageMeter(model, batches, batches_per_pull=1)
    losses_of(meter, Unit(HEAD, 1, 0), [0])
    runs.taken()
    unit = Unit(HEAD, 1, 1)
    assert losses_of(meter, unit, [0])[1][0] == loss_without(model, batches[0], [unit])
    assert runs.taken()[1]["qkv"] == 2  # by the meter and by hand
    group = Unit(MLP, 1, 1, GROUP)
    losses_of(meter, group, [0])
    meter.commit(Unit(HEAD, 0, 0))
    losses_of(meter, Unit(MLP, 1, 0, GROUP), [0])
    runs.taken()
    losses_of(meter, group, [0])
    assert runs.taken() == [{}, {"block": 1, "mlp_out": 1}, WHOLE]  # what the attention gave is known all the same


def test_an_attention_that_changes_its_heads_before_the_projection_runs_whole_for_a_head() -> None:
    model: Any = FAMILIES_TINY["bert"]()
    for layer in model.bert.encoder.layer:  # what the inner attention gives is then not what enters the projection
        dense = layer.attention.output
        dense.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    batches = tiny_batches(model, 1)
    runs = Runs(model)
    meter = DamageMeter(model, batches, batches_per_pull=1, lanes=1)
    losses_of(meter, Unit(HEAD, 1, 0), [0])
    runs.taken()
    unit = Unit(HEAD, 1, 1)
    assert losses_of(meter, unit, [0])[1][0] == loss_without(model, batches[0], [unit])
    assert runs.taken()[1]["qkv"] == 2  # by the meter and by hand


def test_without_room_inside_the_blocks_a_run_starts_with_the_unit_s_whole_block() -> None:
    model = deep_llama()
    batches = tiny_batches(model, 2)
    runs = Runs(model)
    meter = DamageMeter(model, batches, cache_memory=14 * OUTPUT_BYTES)  # 7 outputs for each of the 2 batches
    for i in (0, 1, 0):
        losses_of(meter, Unit(HEAD, 7, 0), [i])
    meter.commit(Unit(HEAD, 0, 0))
    losses_of(meter, Unit(HEAD, 7, 0), [0, 1])
    assert meter.cached_bytes == 14 * OUTPUT_BYTES
    assert meter.cache_was_full
    runs.taken()
    for layer in range(8):
        for kind in (HEAD, MLP):
            unit = Unit(kind, layer, 1, GROUP)
            losses_of(meter, unit, [0, 1])
            assert runs.blocks() == [0] * layer + [2] * (8 - layer)
            assert losses_of(meter, unit, [0])[1] == [loss_without(model, batches[0], [Unit(HEAD, 0, 0), unit])]
            runs.taken()


@pytest.mark.parametrize(("outputs", "stride"), [(8, 2), (3, 4)])
def test_thinned_outputs_let_a_run_start_at_the_nearest_kept_block_before(outputs: int, stride: int) -> None:
    model = deep_llama()
    batches = tiny_batches(model, 2)
    runs = Runs(model)
    meter = DamageMeter(model, batches, cache_memory=outputs * OUTPUT_BYTES)
    first = Unit(HEAD, 7, 0)
    losses_of(meter, first, [0, 1])
    meter.commit(Unit(HEAD, 0, 0))  # so that all is kept anew
    losses_of(meter, first, [0, 1])
    assert meter.cached_bytes == 2 * (8 // stride - 1) * OUTPUT_BYTES
    runs.taken()
    for layer in range(8):
        for kind in (HEAD, MLP):
            unit = Unit(kind, layer, 1, GROUP)
            base, masked = losses_of(meter, unit, [0, 1])
            start = layer // stride * stride
            assert runs.blocks() == [0] * start + [2] * (8 - start)
            assert base == [loss_without(model, batch, [Unit(HEAD, 0, 0)]) for batch in batches]
            assert masked == [loss_without(model, batch, [Unit(HEAD, 0, 0), unit]) for batch in batches]
            runs.taken()
    meter.commit(Unit(HEAD, 6, 2))
    assert losses_of(meter, Unit(HEAD, 7, 2), [0])[0] == [loss_without(model, batches[0], [Unit(HEAD, 0, 0), Unit(HEAD, 6, 2)])]


def test_a_batch_of_an_earlier_step_goes_before_anything_else_does() -> None:
    model = deep_llama(4)
    batches = tiny_batches(model, 3)
    layers = anatomy(model)
    prefixes = Prefixes(4, budget=3 * 2 * OUTPUT_BYTES + 4 * 2 * OUTPUT_BYTES)  # outputs and what enters, of 2 batches
    prefixes.want(frozenset({0, 2}))

    def record(batch: int) -> None:
        with torch.inference_mode(), prefixes.recorded(layers, batch, {HEAD}):
            batch_loss(model, batches[batch])

    record(0)
    one = prefixes.bytes
    assert one == 7 * OUTPUT_BYTES
    record(1)
    assert (prefixes.bytes, prefixes.was_full) == (2 * one, False)
    record(2)
    assert (prefixes.bytes, prefixes.was_full) == (2 * one, False)
    runs = Runs(model)
    for batch, expected in ((0, [0, 0, 0, 1]), (2, [0, 0, 0, 1]), (1, [1, 1, 1, 1])):
        with torch.inference_mode(), prefixes.resumed(layers, [batch], 3, HEAD):
            batch_loss(model, batches[batch])
        assert runs.blocks() == expected


def test_when_nothing_of_a_batch_fits_beside_the_others_the_least_recently_used_batch_goes() -> None:
    model = deep_llama(2)
    batches = tiny_batches(model, 3)
    layers = anatomy(model)
    prefixes = Prefixes(2, budget=2 * OUTPUT_BYTES)
    runs = Runs(model)

    def record(batch: int) -> list[int]:
        with torch.inference_mode(), prefixes.recorded(layers, batch, set()):
            batch_loss(model, batches[batch])
        return runs.blocks()

    assert [record(i) for i in (0, 1, 0)] == [[1, 1], [1, 1], [0, 1]]
    assert (prefixes.bytes, prefixes.was_full) == (2 * OUTPUT_BYTES, False)
    assert record(2) == [1, 1]
    assert (prefixes.bytes, prefixes.was_full) == (2 * OUTPUT_BYTES, True)
    assert record(0) == [0, 1]
    assert record(1) == [1, 1]
    assert prefixes.bytes == 2 * OUTPUT_BYTES


def test_a_changed_block_ends_what_it_and_those_after_it_gave_and_nothing_before() -> None:
    model = deep_llama(4)
    (batch,) = tiny_batches(model, 1)
    layers = anatomy(model)
    prefixes = Prefixes(4, budget=2**20)
    runs = Runs(model)
    for layer, expected in ((3, [1, 1, 1, 1]), (2, [0, 0, 0, 1]), (0, [0, 0, 1, 1]), (3, [1, 1, 1, 1]), (3, [0, 0, 0, 1])):
        with torch.inference_mode(), prefixes.recorded(layers, 0, {HEAD}):
            batch_loss(model, batch)
        assert runs.blocks() == expected
        assert prefixes.bytes == 7 * OUTPUT_BYTES
        prefixes.cut(layer)
        assert prefixes.bytes == 2 * layer * OUTPUT_BYTES


def test_the_bytes_of_what_is_kept_are_those_of_whole_storages_each_counted_once() -> None:
    whole = torch.zeros(100)
    assert Kept().bytes == 0
    assert Kept(output=whole[:1]).bytes == 400
    assert Kept(output=(whole[:1], None), entering={HEAD: whole[50:].view(5, 10)}, attention=whole).bytes == 400
    other = torch.zeros(30, dtype=torch.float64)
    assert Kept(output=(whole, other[3:]), entering={HEAD: torch.zeros(2), MLP: whole}).bytes == 400 + 240 + 8
    assert Kept(attention=other[:0]).bytes == 240


def test_a_view_that_a_block_gives_is_counted_with_all_of_what_it_keeps_alive() -> None:
    model = deep_llama(2)
    (batch,) = tiny_batches(model, 1)
    layers = anatomy(model)

    block: Any = layers[0].block
    forward = block.forward

    def in_a_large_one(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        large = output.new_zeros(1000, *output.shape)
        large[7] = output
        return large[7]

    block.forward = in_a_large_one
    for budget, expected in ((10**8, 1000 * OUTPUT_BYTES), (999 * OUTPUT_BYTES, 0)):
        prefixes = Prefixes(2, budget)
        with torch.inference_mode(), prefixes.recorded(layers, 0, set()):
            batch_loss(model, batch)
        assert prefixes.bytes == expected


def test_dropping_what_is_inside_blocks_in_the_middle_of_a_run_is_not_undone_by_the_rest_of_it() -> None:
    model = deep_llama()
    (batch,) = tiny_batches(model, 1)
    prefixes = Prefixes(8, budget=7 * OUTPUT_BYTES)  # just the outputs
    with torch.inference_mode(), prefixes.recorded(anatomy(model), 0, {HEAD, MLP}):
        batch_loss(model, batch)
    assert prefixes.bytes == 7 * OUTPUT_BYTES


MEMORY = """
import json, sys
import psutil, torch
torch.set_num_threads(1)
from secateur.model.loading import mend_torchvision
mend_torchvision()
from transformers import LlamaConfig, LlamaForCausalLM
from secateur.model.families import anatomy
from secateur.search.damage import DamageMeter
from secateur.selection import Pull
from secateur.units import HEAD, MLP, Unit

torch.manual_seed(0)
shape = dict(hidden_size=256, num_hidden_layers=8, num_attention_heads=8, intermediate_size=768, vocab_size=1000)
model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=128, **shape)).eval()
ids = [torch.randint(0, 1000, (4, 128)) for _ in range(6)]
batches = [{"input_ids": x, "labels": x} for x in ids]
process, peak = psutil.Process(), 0

def look(*args):
    global peak
    peak = max(peak, process.memory_info().rss)

for layer in anatomy(model):
    for module in (layer.block, layer.out, layer.mlp_out, *layer.mlp_in):
        module.register_forward_hook(look)

def measure(cache_memory, chosen=range(6)):
    global peak
    before, peak = process.memory_info().rss, 0
    meter = DamageMeter(model, batches, cache_memory=cache_memory, lanes=1)
    for kind in (HEAD, MLP):  # known already: tells both kinds and runs nothing
        meter.recall(Pull(0, Unit(kind, 7, 0), (0,), (1.0,), (1.0,), 0.0, 0.5, 0))
        next(meter.measure([(Unit(kind, 7, 0), (0,))]))
    meter.commit(Unit(HEAD, 7, 7))
    next(meter.measure([(Unit(HEAD, 7, 0), tuple(chosen))]))
    after = process.memory_info().rss
    return {"budget": cache_memory, "kept": meter.cached_bytes, "peak": peak, "grown": after - before}

measure(0, range(1))  # warms up: buffers of libraries
json.dump([measure(budget) for budget in map(int, sys.argv[1:])], sys.stdout)
"""


@pytest.fixture(scope="module")
def memory() -> list[dict[str, int]]:
    """Of a process that measures with each of these budgets: bytes kept, by how much it grew, and its peak."""
    budgets = [0, 2 * MIB, 40 * MIB, 2**40]
    settings = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, budgets)],
        env=os.environ | settings | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    results: list[dict[str, int]] = json.loads(done.stdout)
    assert [result["budget"] for result in results] == budgets
    return results


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the settings that give freed memory back at once are glibc's")


@pytest.mark.slow
@LINUX
def test_memory_grows_by_what_is_kept(memory: list[dict[str, int]]) -> None:
    assert memory[0]["kept"] == 0
    assert memory[-1]["kept"] > 128 * MIB
    for result in memory:
        assert result["kept"] <= result["budget"]
        assert result["grown"] == pytest.approx(result["kept"], rel=0.15, abs=8 * MIB)
    assert memory[-1]["peak"] - memory[0]["peak"] == pytest.approx(memory[-1]["kept"], rel=0.15, abs=8 * MIB)


@LINUX
def test_the_peak_of_memory_is_the_budget_above_that_without_a_cache(memory: list[dict[str, int]]) -> None:
    for result in memory[:-1]:
        assert result["peak"] - memory[0]["peak"] <= 1.15 * result["budget"] + 8 * MIB


def test_what_is_dropped_or_not_kept_is_free_before_the_run_goes_on() -> None:
    model = deep_llama()
    (batch,) = tiny_batches(model, 1)
    layers = anatomy(model)
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    for layer in layers[:-1]:
        layer.block.register_forward_hook(lambda module, args, output: given.append(weakref.ref(output)))
    layers[-1].block.register_forward_hook(lambda *_: alive.append(sum(one() is not None for one in given)))
    prefixes = Prefixes(8, budget=1)
    with torch.inference_mode(), prefixes.recorded(layers, 0, {HEAD}):
        batch_loss(model, batch)
    assert prefixes.bytes == 0
    assert len(given) == 7
    assert alive == [1]  # the input of the last block
