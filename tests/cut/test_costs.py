from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from secateur.cut import costs
from secateur.cut.costs import (
    BATCH_SIZE,
    FlopShares,
    Table,
    flop_goal,
    goal_of,
    keep_table,
    latency_goal,
    latency_table,
    parameter_goal,
    read_table,
    uniform_quota,
)
from secateur.cut.surgery import parameters_left, shrink
from secateur.errors import OutputError, SecateurError, SelectionError, SettingError
from secateur.measure import flops
from secateur.measure.speed import run_of
from secateur.model.families import anatomy, candidate_units
from secateur.model.loading import Opened
from secateur.search.goals import Quota, Share
from secateur.search.select import select_by_score
from secateur.settings import FLOPS, LATENCY, PARAMS, UNIFORM, Settings
from secateur.units import HEAD, KV_GROUP, MLP, Unit
from secateur.watcher import Watcher
from tiny import CUTTABLE, EVERYWHERE, FAMILIES_TINY, GROUP, hook_count

TOKENS = 9
every_family = pytest.mark.parametrize("name", CUTTABLE)
dense: Callable[[str], Any] = functools.cache(lambda name: FAMILIES_TINY[name]())
shares_of: Callable[[str], FlopShares] = functools.cache(lambda name: FlopShares(dense(name), TOKENS))


def counted(model: nn.Module) -> int:
    with torch.inference_mode():
        return flops.count(run_of(model, BATCH_SIZE, TOKENS))


@functools.cache
def dense_flops(name: str) -> int:
    return counted(dense(name))


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def drawn(units: Sequence[Unit], seed: int = 0) -> dict[Unit, float]:
    rng = random.Random(seed)
    return {unit: rng.random() for unit in units}


def sentence(caught: pytest.ExceptionInfo[Exception], *words: str) -> None:
    said = str(caught.value)
    assert said.endswith(".") and "\n" not in said and all(word in said for word in words), said


# What units cost


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("target", EVERYWHERE)
def test_the_shares_of_flops_and_parameters_are_those_counted_in_the_cut_model(name: str, target: str) -> None:
    model = dense(name)
    units, rng = candidate_units(model, target, GROUP), random.Random(target)
    table, total, goal = shares_of(name), dense_flops(name), parameter_goal(model, units, 0.999)
    emptied = [unit for unit in units if unit.layer == 1]
    for cut in (units[:1], rng.sample(units, 2 * len(units) // 3), emptied):
        small = shrink(model, cut)
        assert table.saved(cut) == pytest.approx(1 - counted(small) / total, abs=1e-12)
        assert goal.left(cut) == count(small) / count(model)
    assert table.saved([]) == 0
    assert hook_count(model) == 0


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "swin", "timm deit distilled"])
@pytest.mark.parametrize("make", [parameter_goal, functools.partial(flop_goal, tokens=TOKENS)], ids=["parameters", "FLOPs"])
def test_a_units_cost_is_what_goes_with_it_alone(name: str, make: Callable[..., Share]) -> None:
    model = dense(name)
    for target in EVERYWHERE:
        units = candidate_units(model, target, GROUP)
        goal = make(model, units, 0.999)
        assert {unit: pytest.approx(1 - goal.left([unit]), abs=1e-12) for unit in units} == goal.costs
        assert min(goal.costs.values()) > 0


def test_after_an_uneven_cut_groups_and_heads_of_a_layer_have_costs_of_their_own() -> None:
    model = shrink(dense("llama"), [Unit(HEAD, 0, 0), Unit(HEAD, 1, 3)])  # K/V heads of one head beside those of two
    for target in ("kv_group", "head"):
        units = candidate_units(model, target, GROUP)
        goal = parameter_goal(model, units, 0.9)
        assert {unit: pytest.approx(1 - goal.left([unit])) for unit in units} == goal.costs


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("target", ["both", "kv_group"])
def test_a_target_is_met_by_the_last_unit_and_not_before(name: str, target: str) -> None:
    model = dense(name)
    units, total = candidate_units(model, target, GROUP), count(model)
    for make in (parameter_goal, functools.partial(flop_goal, tokens=TOKENS)):
        any_goal = make(model, units, 0.9999)
        reach = any_goal.left(units)
        for seed, part in enumerate((0.0, 0.3, 0.999, 1.0)):
            share = min(reach + (1 - reach) * (1 - part), 1 - 1e-9)
            goal = replace(any_goal, share=share)
            chosen = select_by_score(drawn(units, seed), goal=goal).units
            assert goal.left(chosen) <= share < goal.left(chosen[:-1])
            if make is parameter_goal:
                assert goal.left(chosen) == count(shrink(model, chosen)) / total


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, math.nan, math.inf])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(SettingError, match=rf"{share}.*between 0 and 1"):
        parameter_goal(dense("gpt2"), candidate_units(dense("gpt2")), share)


@pytest.mark.parametrize("name", ["gpt2", "llama", "swin", "timm vit"])
def test_what_all_candidates_together_cannot_give_is_refused_with_what_would_be_left(name: str) -> None:
    model = dense(name)
    units = candidate_units(model)
    least = parameters_left(model, units) / count(model)
    with pytest.raises(SettingError) as caught:
        parameter_goal(model, units, least - 0.01)
    sentence(caught, f"{least:.1%}", f"{least - 0.01:.1%}", "parameters", "--target")
    assert select_by_score(drawn(units), goal=parameter_goal(model, units, least)).units  # this much can be had


# A uniform layout


def taken(model: nn.Module, target: str, ratio: float, group: int = GROUP) -> dict[tuple[str, int], list[int]]:
    """The indices that go, by kind and layer, under the quota and scores drawn at random."""
    units = candidate_units(model, target, group)
    quota = uniform_quota(model, units, ratio)
    found: dict[tuple[str, int], list[int]] = {}
    for seed in range(3):
        chosen = select_by_score(drawn(units, seed), goal=quota).units
        assert len(chosen) == len(quota.example()) == quota.n_steps([]) == quota.n_steps(chosen)
        assert Counter(quota.cells[unit] for unit in chosen) == Counter(quota.room)
        assert Counter(quota.cells[unit] for unit in quota.example()) == Counter(quota.room)
        found = {}
        for unit in chosen:
            found.setdefault((unit.kind, unit.layer), []).append(unit.index)
    return found


@pytest.mark.parametrize(
    ("name", "target", "ratio", "each"),
    [
        ("llama mha", "head", 0.25, 1),
        ("llama mha", "head", 0.7, 3),
        ("llama", "head", 0.5, 2),
        ("qwen2", "head", 0.3, 2),
        ("qwen2", "head", 0.7, 4),
        ("gemma", "head", 0.3, 1),
        ("llama", "kv_group", 0.5, 1),
        ("gpt2", "mlp", 0.3, 1),
        ("vit", "mlp", 0.6, 2),
    ],
)
def test_every_layer_loses_as_many(name: str, target: str, ratio: float, each: int) -> None:
    model = dense(name)
    found = taken(model, target, ratio)
    layers = anatomy(model)
    assert {kind_layer: len(indices) for kind_layer, indices in found.items()} == {(target, i): each for i in range(3)}
    for (kind, i), indices in found.items():
        if kind == HEAD:  # as many of each K/V head's
            shares = Counter(layers[i].kv_of[index] for index in indices)
            if layers[i].grouped_query:
                assert len(shares) == layers[i].kv_heads and len(set(shares.values())) == 1
        if kind == MLP:  # 14 channels in groups of 4: the last has 2
            assert 3 not in indices


def test_two_kinds_each_have_a_quota_of_their_own() -> None:
    found = taken(dense("llama"), "both", 0.5)
    assert {place: len(indices) for place, indices in found.items()} == {
        (kind, layer): 2 for kind in (HEAD, MLP) for layer in range(3)
    }


@pytest.mark.parametrize(
    ("target", "group", "ratio", "of"), [("head", GROUP, 1 / 3, 1), ("mlp", 3, 0.4, 2), ("mlp", 15, 0.5, 0)]
)
@pytest.mark.parametrize("name", ["swin", "timm swin"])
def test_swins_layers_lose_the_same_share(name: str, target: str, group: int, ratio: float, of: int) -> None:
    """Heads 3 and 6 in its two stages, channels 15 and 30."""
    if not of:  # one group of 15 in the first stage: it cannot go
        with pytest.raises(SettingError):
            taken(dense(name), target, ratio, group)
        return
    found = taken(dense(name), target, ratio, group)
    assert {layer: len(indices) for (_, layer), indices in found.items()} == {0: of, 1: of, 2: 2 * of, 3: 2 * of}


@pytest.mark.parametrize(
    ("name", "target", "group", "ratio"),
    [
        ("llama", "head", GROUP, 0.1),  # half of one head a K/V head
        ("llama", "head", GROUP, 0.9),  # all
        ("llama", "kv_group", GROUP, 0.9),
        ("gemma", "kv_group", GROUP, 0.5),  # there is one
        ("gpt2", "mlp", 16, 0.5),  # no group is whole
        ("swin", "mlp", GROUP, 0.3),  # 3 whole groups, and 7
        ("llama", "both", 16, 0.5),
    ],
)
def test_a_ratio_that_cannot_be_taken_evenly_is_one_sentence(name: str, target: str, group: int, ratio: float) -> None:
    with pytest.raises(SettingError) as caught:
        uniform_quota(dense(name), candidate_units(dense(name), target, group), ratio)
    sentence(caught)


@pytest.mark.parametrize(
    ("name", "target", "ratio", "can"),
    [("llama", "head", 0.1, 1), ("qwen2", "head", 0.05, 2), ("gpt2", "mlp", 0.9, 2), ("swin", "mlp", 0.3, 0)],
)
def test_the_ratios_that_are_advised_can_be_taken(name: str, target: str, ratio: float, can: int) -> None:
    model = dense(name)
    units = candidate_units(model, target, GROUP)
    with pytest.raises(SettingError) as caught:
        uniform_quota(model, units, ratio)
    sentence(caught, str(ratio), "--layout free")
    advised = [float(found) for found in re.findall(r"\b0\.\d{3}\b", str(caught.value))]
    assert len(advised) == can
    for other in advised:
        assert len(select_by_score(drawn(units), goal=uniform_quota(model, units, other)).units) > 0


@pytest.mark.parametrize("name", ["llama", "qwen2", "vit"])
@pytest.mark.parametrize("target", ["head", "kv_group", "mlp"])
@pytest.mark.parametrize("share", [0.97, 0.9])
def test_uniform_with_a_target_takes_the_least_number_that_meets_it(name: str, target: str, share: float) -> None:
    model = dense(name)
    units = candidate_units(model, target, 2)
    layers = anatomy(model)

    def even(n: int) -> list[Unit]:
        """`n` of each layer's, as many of each K/V head's."""
        cut = []
        for i, layer in enumerate(layers):
            here = [unit for unit in units if unit.layer == i]
            if target == HEAD and layer.grouped_query:
                each = n // layer.kv_heads
                here = [unit for unit in here if list(layer.kv_of[: unit.index]).count(layer.kv_of[unit.index]) < each]
            cut += here[:n]
        return cut

    step = layers[0].kv_heads if target == HEAD and layers[0].grouped_query else 1
    most = sum(unit.layer == 0 for unit in units)
    for make in (parameter_goal, functools.partial(flop_goal, tokens=TOKENS)):
        any_goal = make(model, units, 0.9999)
        enough = [n for n in range(step, most, step) if any_goal.left(even(n)) <= share]
        try:
            quota = uniform_quota(model, units, 0.1, replace(any_goal, share=share))
        except SettingError as error:
            assert not enough and f"{share:.1%}" in str(error)
        else:
            assert quota.n_steps([]) == 3 * enough[0]
            reached = quota.reached(quota.example())
            assert reached and (reached.asked, reached.got) == (share, any_goal.left(quota.example())) and reached.got <= share


def test_uniform_with_a_target_and_two_kinds_is_refused() -> None:
    model = dense("llama")
    units = candidate_units(model, "both", GROUP)
    with pytest.raises(SettingError) as caught:
        uniform_quota(model, units, 0.1, parameter_goal(model, units, 0.9))
    sentence(caught, "kind", "--target")


@pytest.mark.parametrize(("name", "target"), [("qwen3", "head"), ("mistral", "kv_group"), ("opt", "mlp"), ("swin", "mlp")])
def test_what_a_quota_takes_is_an_ordinary_model(name: str, target: str) -> None:
    model = dense(name)
    units = candidate_units(model, target, 3)
    chosen = select_by_score(drawn(units), goal=uniform_quota(model, units, 0.5)).units
    assert type(shrink(model, chosen, UNIFORM)) is type(model)


# Latency


def fake_measure(monkeypatch: pytest.MonkeyPatch, gain: Callable[[float], float]) -> list[int]:
    """Timings of which the saved time is a function of the saved FLOPs; the parameters of the models that were timed."""
    timed: list[int] = []

    def measure(model: nn.Module, small: nn.Module, **settings: Any) -> Any:
        timed.append(count(small))
        ratio = counted(model) / counted(small)
        timing = SimpleNamespace(flop_ratio=ratio, speedup=SimpleNamespace(value=1 / (1 - gain(1 - 1 / ratio))))
        return SimpleNamespace(timings=[timing])

    monkeypatch.setattr(costs, "measure", measure)
    return timed


@pytest.mark.parametrize("name", ["llama mha", "llama", "vit", "swin"])
@pytest.mark.parametrize("target", ["both", "kv_group"])
def test_where_time_follows_flops_the_latency_left_is_the_flops_left(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(name)
    units = candidate_units(model, target, GROUP)
    fake_measure(monkeypatch, lambda saved: saved)
    goal = latency_goal(model, units, 0.999, TOKENS, latency_table(model, units, TOKENS))
    shares = shares_of(name)
    for n in range(1, len(units) + 1, 2):
        assert goal.left(units[:n]) == pytest.approx(1 - shares.saved(units[:n]))


def test_no_cut_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense("gpt2")  # of 3 heads a half and three quarters are both 2
    timed = fake_measure(monkeypatch, lambda saved: saved)
    table = latency_table(model, candidate_units(model), TOKENS)
    assert len(set(timed)) == len(timed)
    saved = [x for x, _ in table[HEAD]]
    assert saved == sorted(set(saved))


def test_a_table_of_a_noisy_clock_is_made_monotone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense("llama mha")
    units = candidate_units(model, "both", GROUP)
    noise = iter([0.2, 0.1, 0.3, -0.3, -0.1, -0.2])
    fake_measure(monkeypatch, lambda saved: next(noise))
    told: list[tuple[int, int]] = []
    table = latency_table(model, units, TOKENS, lambda *done: told.append(done))
    assert [y for _, y in table[HEAD]] == pytest.approx([0, 0.2, 0.2, 0.3])
    assert [y for _, y in table[MLP]] == [0] * 4
    assert told == [(i + 1, 6) for i in range(6)]
    goal = latency_goal(model, units, 0.9, TOKENS, table)
    left = [goal.left(units[:n]) for n in range(len(units) + 1)]
    assert left == sorted(left, reverse=True)
    assert min(goal.costs.values()) >= 0
    chosen = select_by_score(drawn(units), goal=goal).units
    assert goal.left(chosen) <= 0.9 < goal.left(chosen[:-1])


def test_a_table_in_which_nothing_gets_faster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense("llama")
    units = candidate_units(model, "kv_group")
    fake_measure(monkeypatch, lambda saved: -0.1)
    with pytest.raises(SettingError) as caught:
        latency_goal(model, units, 0.9, TOKENS, latency_table(model, units, TOKENS))
    sentence(caught, "100.0%", "latency")


def test_a_real_table_is_of_this_machine_and_leaves_the_model_alone() -> None:
    model = dense("vit")
    table = latency_table(model, candidate_units(model, "both", GROUP), TOKENS)
    assert table.keys() == {HEAD, MLP}
    for points in table.values():
        assert points[0] == [0, 0]
        assert all(math.isfinite(x) and math.isfinite(y) and x >= 0 and y >= 0 for x, y in points)
        assert [y for _, y in points] == sorted(y for _, y in points)
    assert hook_count(model) == 0


@pytest.mark.parametrize(
    ("where", "saved"), [(0.1, 0.05), (0.2, 0.1), (0.3, 0.3), (0.4, 0.5), (0.5, 0.7)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("side", [HEAD, MLP])
def test_between_and_beyond_its_points_a_table_goes_in_straight_lines(side: str, where: float, saved: float) -> None:
    """At 0.2 of the FLOPs a tenth of the time is saved, at 0.4 a half; `where` in that table the units lie."""
    model = dense("llama mha")
    units = candidate_units(model, "both", GROUP)
    some = [unit for unit in units if unit.kind == side][:3]
    scale = shares_of("llama mha").saved(some) / where
    points = [[0.0, 0.0], [0.2 * scale, 0.1], [0.4 * scale, 0.5]]
    goal = latency_goal(model, units, 0.999, TOKENS, dict.fromkeys((HEAD, MLP), points))
    assert goal.left(some) == pytest.approx(1 - saved)
    assert goal.left([]) == 1


def test_what_two_sides_save_adds_up_and_a_side_without_points_saves_nothing() -> None:
    model = dense("llama mha")
    units = candidate_units(model, "both", GROUP)
    table: Table = {HEAD: [[0.0, 0.0], [0.5, 0.25]], MLP: [[0.0, 0.0]]}
    goal = latency_goal(model, units, 0.999, TOKENS, table)
    heads, groups = ([unit for unit in units if unit.kind == kind] for kind in (HEAD, MLP))
    saved = shares_of("llama mha").saved(heads[:4]) / 2
    assert goal.left(groups) == 1
    assert goal.left(heads[:4]) == goal.left([*heads[:4], *groups]) == pytest.approx(1 - saved)
    steeper = latency_goal(model, units, 0.999, TOKENS, table | {MLP: table[HEAD]})
    assert steeper.left(units) == pytest.approx(1 - shares_of("llama mha").saved(units) / 2)


def test_a_table_is_kept_for_its_own_run(tmp_path: Path) -> None:
    table: Table = {HEAD: [[0.0, 0.0], [0.25, 1 / 3]]}
    path, units = tmp_path / "latency.json", [Unit(HEAD, 0, 0)]
    assert read_table(path, "key", units) is None
    keep_table(path, "key", table)
    assert read_table(path, "key", units) == table
    assert read_table(path, "another", units) is None


DAMAGED = {
    "list": "[]",
    "number": '{"head": 5}',
    "words": '{"head": [[0, 0], ["a", 1]]}',
    "triples": '{"head": [[0, 0, 0]]}',
    "cut short": '{"head": [[0, 0], [0.1, 0.',
    "no points": '{"head": []}',
    "no sides": "{}",
    "nan": '{"head": [[0, 0], [0.2, "nan"]]}',
    "another side": '{"mlp": [[0, 0], [0.2, 0.2]]}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_table_is_one_sentence_that_names_it(content: str, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    content = f'{{"key": "key", "table": {content}}}'
    path.write_text(content)
    model = dense("llama mha")
    with pytest.raises(SecateurError) as caught:
        read_table(path, "key", candidate_units(model))
    assert isinstance(caught.value, OutputError), caught.value
    sentence(caught, str(path), "delete it")
    assert path.read_text() == content


def test_kinds_are_the_sides_of_a_table() -> None:
    assert {Unit(kind, 0, 0).side for kind in (HEAD, KV_GROUP)} == {HEAD}
    assert Unit(MLP, 0, 0).side == MLP


# The goal of a run


def asked(units: Sequence[Unit], **settings: Any) -> Any:
    opened = Opened("m", dense("llama"))
    return goal_of(Settings("m", group_width=GROUP, **settings), opened, units, None, Watcher())


def test_without_a_share_to_keep_the_ratio_decides_freely_or_as_a_quota() -> None:
    units = candidate_units(dense("llama"), "head")
    assert asked(units) is None
    quota = asked(units, layout=UNIFORM, ratio=0.5)
    assert isinstance(quota, Quota) and quota.n_steps([]) == 6 and quota.reached(quota.example()) is None


@pytest.mark.parametrize(("name", "what"), [("keep_params", PARAMS), ("keep_flops", FLOPS), ("keep_latency", LATENCY)])
@pytest.mark.parametrize("layout", ["free", UNIFORM])
def test_a_share_to_keep_is_a_goal_in_that_cost(name: str, what: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measure(monkeypatch, lambda saved: saved)
    model = dense("llama")
    units = candidate_units(model, "head")
    goal = asked(units, layout=layout, seq_len=TOKENS, **{name: 0.9})
    assert isinstance(goal, Quota if layout == UNIFORM else Share)
    chosen = select_by_score(drawn(units), goal=goal).units
    reached = goal.reached(chosen)
    left = parameters_left(model, chosen) / count(model) if what == PARAMS else 1 - shares_of("llama").saved(chosen)
    assert reached and (reached.what, reached.asked) == (what, 0.9)
    assert reached.got == pytest.approx(left) and reached.got <= 0.9


def test_a_latency_table_is_measured_once_and_read_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = fake_measure(monkeypatch, lambda saved: saved)
    units = candidate_units(dense("llama"), "head")
    settings = Settings("m", group_width=GROUP, keep_latency=0.9, seq_len=TOKENS)
    opened, path = Opened("m", dense("llama")), tmp_path / "latency.json"
    goals = [goal_of(settings, opened, units, path, Watcher()) for _ in range(2)]
    assert len(timed) == 3 and goals[0] is not None and goals[1] is not None
    assert goals[0].reached(units) == goals[1].reached(units)
    goal_of(replace(settings, seq_len=TOKENS - 1), opened, units, path, Watcher())  # other prompts take another time
    assert len(timed) == 6


def test_a_uniform_goal_that_no_stock_config_could_describe_is_refused_before_any_search() -> None:
    model = dense("gpt2")
    opened, settings = Opened("m", model), Settings("m", layout=UNIFORM, ratio=0.4)
    with pytest.raises(SelectionError, match=r"uniform.*--layout free"):
        goal_of(settings, opened, candidate_units(model), None, Watcher())
