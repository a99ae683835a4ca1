from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secateur import jsonio
from secateur.damage import DamageMeter
from secateur.errors import SelectionError, SettingError
from secateur.families import candidate_units
from secateur.journal import Journal
from secateur.policies import UCB, Greedy, Policy, Thompson
from secateur.selection import (
    Goal,
    Meter,
    Progress,
    Pull,
    Quota,
    Selection,
    active_pool,
    screened,
    select,
    select_by_score,
)
from secateur.streams import BATCHES, stream
from secateur.units import HEAD, MLP, Unit, enumerate_units
from tiny import FAMILIES_TINY, GROUP, tiny_batches

POLICIES: list[Policy] = [UCB(), Thompson(), Greedy()]
BANDITS: list[Policy] = [UCB(), Thompson()]
UNITS = enumerate_units([6] * 6, [], target="head")  # 36, as in DeiT-Tiny


class FakeMeter:
    """A Meter without a model: each unit has a fixed damage, each of its batches some seeded noise."""

    def __init__(
        self, damages: Mapping[Unit, float], *, seed: int = 42, noise: float = 0.005, stop_at: int | None = None
    ) -> None:
        self.damages = damages
        self.seed = seed
        self.noise = noise
        self.stop_at = stop_at  # the measurement that never comes back
        self.committed: list[Unit] = []
        self.measured: list[Unit] = []
        self.expected: list[list[tuple[Unit, tuple[int, ...]]]] = []
        self.forwards = 0
        self.draws = 0
        self._rng = stream(seed, BATCHES)
        self._base: dict[int, float] = {}

    def draw(self) -> tuple[int, ...]:
        self.draws += 1
        return tuple(int(b) for b in self._rng.choice(8, size=2, replace=False))

    def measure(self, unit: Unit, batches: Sequence[int]) -> tuple[list[float], list[float]]:
        assert unit not in self.committed
        if len(self.measured) == self.stop_at:
            self.stop()
        self.measured.append(unit)
        for batch in batches:
            if batch not in self._base:
                self._base[batch] = 3 + batch / 10 + sum(self.damages[c] for c in self.committed)
                self.forwards += 1
        self.forwards += len(batches)
        base = [self._base[batch] for batch in batches]
        return base, [b + self.damage(unit) + self._noise(unit, batch) for b, batch in zip(base, batches, strict=True)]

    def expect(self, pulls: Iterable[tuple[Unit, Sequence[int]]]) -> None:
        self.expected.append([(unit, tuple(batches)) for unit, batches in pulls])

    def recall(self, unit: Unit, batches: Sequence[int], base_losses: Sequence[float], masked_losses: Sequence[float]) -> None:
        self._base.update(zip(batches, base_losses, strict=True))

    def commit(self, unit: Unit) -> None:
        self.committed.append(unit)
        self._base.clear()

    def damage(self, unit: Unit) -> float:
        return self.damages[unit]

    def stop(self) -> None:
        raise KeyboardInterrupt

    def _noise(self, unit: Unit, batch: int) -> float:
        place = [self.seed, batch, unit.layer, unit.index, len(self.committed)]
        return self.noise * float(np.random.default_rng(place).normal()) if self.noise else 0.0


def spread(units: Sequence[Unit]) -> dict[Unit, float]:
    """A different damage for each unit, in no order of layer or index."""
    return dict(zip(units, np.random.default_rng(7).permutation(np.linspace(-0.05, 0.15, len(units))).tolist(), strict=True))


def harmless_few(units: Sequence[Unit], few: Sequence[Unit]) -> dict[Unit, float]:
    return {unit: -0.05 if unit in few else 0.1 for unit in units}


def written(selection: Selection) -> str:
    """All of a selection as text: equal texts are equal selections, also where a damage is nan."""
    return jsonio.dumps(selection.to_json())


def pulls_of_step(selection: Selection, step: int) -> list[Pull]:
    return [pull for pull in selection.trace if pull.step == step]


def test_the_fake_meter_has_all_that_selection_asks_of_a_meter() -> None:
    meter: Meter = FakeMeter(spread(UNITS))
    assert meter.forwards == 0


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_harmless_units_are_chosen(policy: Policy, seed: int) -> None:
    few = [UNITS[2], UNITS[11], UNITS[19], UNITS[35]]
    meter = FakeMeter(harmless_few(UNITS, few), seed=seed)
    selection = select(meter, UNITS, policy=policy, ratio=0.1, pulls_per_step=100, pool_size=len(UNITS), seed=seed)
    assert set(selection.units) == set(few)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_each_step_keeps_out_the_least_harmful_of_the_units_it_evaluated(policy: Policy) -> None:
    damages = spread(UNITS)
    selection = select(FakeMeter(damages, noise=0), UNITS, policy=policy, ratio=0.2, pulls_per_step=16)
    for step, unit in enumerate(selection.units):
        assert unit == min((pull.unit for pull in pulls_of_step(selection, step)), key=damages.__getitem__)


@pytest.mark.parametrize("policy", BANDITS, ids=repr)
@pytest.mark.parametrize("pulls_per_step", [1, 5, 32])
def test_a_bandit_spends_k_times_the_pulls_per_step(policy: Policy, pulls_per_step: int) -> None:
    meter = FakeMeter(spread(UNITS))
    selection = select(meter, UNITS, policy=policy, ratio=0.1, pulls_per_step=pulls_per_step)
    assert len(selection.units) == 4
    assert selection.pulls == len(meter.measured) == meter.draws == 4 * pulls_per_step
    assert [len(pulls_of_step(selection, step)) for step in range(4)] == [pulls_per_step] * 4


@pytest.mark.parametrize(("budget", "per_step"), [(64, [36, 35, 34, 33]), (34, [34, 34, 34, 33]), (10, [10] * 4)])
def test_greedy_pulls_each_unit_of_its_trial_set_once_and_no_more_than_are_left(budget: int, per_step: list[int]) -> None:
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=Greedy(), ratio=0.1, pulls_per_step=budget)
    assert [len({pull.unit for pull in pulls_of_step(selection, step)}) for step in range(4)] == per_step
    assert selection.pulls == sum(per_step)


def test_greedy_on_36_candidates_with_64_trials_spends_the_138_evaluations_of_table_8() -> None:
    assert select(FakeMeter(spread(UNITS)), UNITS, policy=Greedy(), ratio=0.1, pulls_per_step=64).pulls == 138


def test_greedy_compares_the_units_of_a_step_on_the_same_batches_and_draws_new_ones_for_the_next() -> None:
    meter = FakeMeter(spread(UNITS))
    selection = select(meter, UNITS, policy=Greedy(), ratio=0.2, pulls_per_step=8)
    batches = [{pull.batches for pull in pulls_of_step(selection, step)} for step in range(7)]
    assert [len(drawn) for drawn in batches] == [1] * 7
    assert len(set.union(*batches)) > 1
    assert meter.draws == 7


def test_a_pull_holds_the_mean_paired_damage_of_its_batches_and_its_reward() -> None:
    for pull in select(FakeMeter(spread(UNITS)), UNITS, policy=UCB(), ratio=0.1, temperature=0.05).trace:
        paired = [m - b for m, b in zip(pull.masked_losses, pull.base_losses, strict=True)]
        assert len(paired) == len(pull.batches) == 2
        assert pull.damage == pytest.approx(sum(paired) / 2)
        assert pull.reward == pytest.approx(1 / (1 + math.exp(pull.damage / 0.05)))


def test_a_selection_counts_the_forwards_that_the_meter_made() -> None:
    meter = FakeMeter(spread(UNITS))
    selection = select(meter, UNITS, policy=UCB(), ratio=0.1)
    assert selection.forwards == meter.forwards
    assert 2 * selection.pulls < selection.forwards < 4 * selection.pulls


@pytest.mark.parametrize(
    ("remaining", "size"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 4), (7, 5), (36, 12), (144, 24), (1152, 67)]
)
def test_the_pool_holds_two_square_roots_of_the_remaining_candidates(remaining: int, size: int) -> None:
    units = enumerate_units([remaining], [], target="head")
    pool = active_pool(units, np.random.default_rng(0))
    assert len(pool) == len(set(pool)) == size
    assert set(pool) <= set(units)


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (7, 7), (36, 36), (1000, 36)])
def test_a_pool_size_is_kept_up_to_the_candidates_that_remain(asked: int, got: int) -> None:
    assert len(set(active_pool(UNITS, np.random.default_rng(0), asked))) == got
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=UCB(), ratio=0.1, pulls_per_step=40, pool_size=asked)
    assert selection.steps[0]["pool"] == got
    assert len({pull.unit for pull in pulls_of_step(selection, 0)}) == got


def test_pools_are_drawn_anew_at_each_step_from_all_that_remain() -> None:
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=UCB(), ratio=0.5, pulls_per_step=12)
    pools = [frozenset(pull.unit for pull in pulls_of_step(selection, step)) for step in range(18)]
    assert [step["pool"] for step in selection.steps] == [math.floor(2 * math.sqrt(36 - s)) for s in range(18)]
    assert len(set(pools)) == 18
    assert frozenset.union(*pools) == set(UNITS)


def test_policies_with_the_same_seed_meet_the_same_pools_and_batches() -> None:
    ucb, thompson = (select(FakeMeter(spread(UNITS)), UNITS, policy=policy, ratio=0.1) for policy in BANDITS)
    assert {pull.unit for pull in pulls_of_step(thompson, 0)} <= {pull.unit for pull in pulls_of_step(ucb, 0)}
    assert [pull.batches for pull in thompson.trace] == [pull.batches for pull in ucb.trace]


@pytest.mark.parametrize("policy", BANDITS, ids=repr)
def test_with_fewer_pulls_than_units_in_the_pool_only_evaluated_units_are_selected(policy: Policy) -> None:
    harmful = dict.fromkeys(UNITS, 5.0)
    selection = select(FakeMeter(harmful), UNITS, policy=policy, ratio=0.3, pulls_per_step=3)
    for step, unit in enumerate(selection.units):
        evaluated = {pull.unit for pull in pulls_of_step(selection, step)}
        assert unit in evaluated
        assert selection.steps[step]["evaluated"] == len(evaluated) <= 3 < selection.steps[step]["pool"]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_more_units_than_the_screen_holds_can_be_selected_as_it_is_drawn_anew_at_each_step(policy: Policy) -> None:
    units = enumerate_units([20] * 10, [], target="head")
    scores = {unit: float(score) for unit, score in zip(units, np.random.default_rng(3).random(200), strict=True)}
    meter = FakeMeter(spread(units))
    selection = select(meter, units, policy=policy, ratio=0.3, pulls_per_step=6, screen=48, screen_scores=scores)
    assert len(set(selection.units)) == 60
    for step in range(60):
        remaining = set(units) - set(selection.units[:step])
        lowest = sorted(remaining, key=scores.__getitem__)[:48]
        assert {pull.unit for pull in pulls_of_step(selection, step)} <= set(lowest)


def test_screening_keeps_the_lowest_scores_in_the_order_of_the_candidates_and_takes_nan_last() -> None:
    a, b, c, d, e = (Unit(HEAD, 0, i) for i in range(5))
    scores = {a: 3.0, b: math.nan, c: 1.0, d: -math.inf, e: 2.0}
    assert screened([a, b, c, d, e], scores, 2) == [c, e]
    assert screened([a, b, c, d, e], scores, 3) == [a, c, e]
    assert screened([e, d, b, a], scores, 10) == [e, d, b, a]


def test_a_screen_without_scores_is_refused() -> None:
    with pytest.raises(SettingError, match="48"):
        select(FakeMeter(spread(UNITS)), UNITS, policy=UCB(), ratio=0.1, screen=48)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_same_seed_gives_the_same_selection_and_the_same_bytes(policy: Policy, tmp_path: Path) -> None:
    first, second = (select(FakeMeter(spread(UNITS), seed=5), UNITS, policy=policy, ratio=0.1, seed=5) for _ in range(2))
    assert first == second
    first.save(tmp_path / "first.json")
    second.save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_another_seed_pulls_other_units_even_on_the_same_batches(policy: Policy) -> None:
    def units_pulled(seed: int) -> list[Unit]:
        meter = FakeMeter(spread(UNITS), seed=5)
        return [pull.unit for pull in select(meter, UNITS, policy=policy, ratio=0.1, pulls_per_step=8, seed=seed).trace]

    assert units_pulled(1) != units_pulled(2)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(SettingError, match="-1"):
        select(FakeMeter(spread(UNITS)), UNITS, policy=UCB(), ratio=0.1, seed=-1)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_selected_units_are_committed_in_order_and_never_pulled_again(policy: Policy) -> None:
    meter = FakeMeter(spread(UNITS))
    selection = select(meter, UNITS, policy=policy, ratio=0.5, pulls_per_step=6)
    assert meter.committed == list(selection.units)
    assert len(set(selection.units)) == 18
    for step in range(18):
        assert {pull.unit for pull in pulls_of_step(selection, step)}.isdisjoint(selection.units[:step])


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_of_two_units_that_stand_in_for_each_other_only_one_is_selected(policy: Policy) -> None:
    twins = {UNITS[4], UNITS[30]}

    class Redundant(FakeMeter):
        def damage(self, unit: Unit) -> float:
            return 2.0 if unit in twins and twins & set(self.committed) else self.damages[unit]

    meter = Redundant(harmless_few(UNITS, list(twins)))
    selection = select(meter, UNITS, policy=policy, ratio=0.1, pulls_per_step=100, pool_size=len(UNITS))
    assert len(twins & set(selection.units)) == 1


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_unit_that_breaks_the_loss_earns_nothing_is_counted_and_is_not_selected(policy: Policy, bad: float) -> None:
    broken = set(UNITS[::2])
    damages = {unit: bad if unit in broken else 5.0 for unit in UNITS}
    selection = select(FakeMeter(damages), UNITS, policy=policy, ratio=0.5, pulls_per_step=8)
    assert set(selection.units) == set(UNITS) - broken
    nonfinite = [pull for pull in selection.trace if pull.unit in broken]
    assert len(nonfinite) == selection.nonfinite_pulls > 0
    assert {pull.reward for pull in nonfinite} == {0.0}
    assert not any(math.isfinite(pull.damage) for pull in nonfinite)
    assert sum(step["broken"] for step in selection.steps) > 0


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_pools_of_broken_units_alone_select_nothing_while_a_finite_unit_is_left(policy: Policy) -> None:
    sound = {UNITS[8], UNITS[20], UNITS[33]}
    damages = {unit: 5.0 if unit in sound else math.nan for unit in UNITS}
    selection = select(FakeMeter(damages), UNITS, policy=policy, ratio=0.08, pulls_per_step=2, pool_size=2)
    assert set(selection.units) == sound
    finite_by_step = [any(math.isfinite(pull.damage) for pull in pulls_of_step(selection, step)) for step in range(3)]
    assert finite_by_step == [True] * 3
    assert selection.pulls > 3 * 2


def test_a_unit_that_broke_the_loss_once_is_not_selected_though_its_other_pulls_look_best() -> None:
    fickle = UNITS[10]

    class Fickle(FakeMeter):
        def damage(self, unit: Unit) -> float:
            return math.nan if unit == fickle and self.measured.count(fickle) == 2 else self.damages[unit]

    meter = Fickle(harmless_few(UNITS, [fickle]))
    selection = select(meter, UNITS, policy=UCB(), ratio=0.1, pulls_per_step=200, pool_size=len(UNITS))
    assert meter.measured.count(fickle) > 2
    assert selection.nonfinite_pulls == 1
    assert fickle not in selection.units


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_when_more_units_are_asked_for_than_are_sound_the_sound_ones_go_first(policy: Policy) -> None:
    sound = {UNITS[8], UNITS[20], UNITS[33]}
    damages = {unit: 5.0 if unit in sound else math.nan for unit in UNITS}
    selection = select(FakeMeter(damages), UNITS, policy=policy, ratio=6 / 36, pulls_per_step=4)
    assert set(selection.units[:3]) == sound
    assert len(set(selection.units)) == 6


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_run_in_which_every_unit_is_broken_still_ends_with_k_units(policy: Policy) -> None:
    selection = select(FakeMeter(dict.fromkeys(UNITS, math.nan)), UNITS, policy=policy, ratio=0.1, pulls_per_step=4)
    assert len(set(selection.units)) == 4
    assert selection.nonfinite_pulls == selection.pulls >= 4
    assert {pull.reward for pull in selection.trace} == {0.0}


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_candidate_is_broken_only_by_its_own_measurement_not_by_a_broken_neighbour_in_the_pool(policy: Policy) -> None:
    few = [UNITS[2], UNITS[11], UNITS[19], UNITS[35]]
    damages = harmless_few(UNITS, few) | dict.fromkeys(UNITS[20:30], math.nan)
    selection = select(FakeMeter(damages), UNITS, policy=policy, ratio=0.1, pulls_per_step=100, pool_size=len(UNITS))
    assert set(selection.units) == set(few)


def test_progress_tells_of_every_pull_and_of_the_best_unit_so_far() -> None:
    told: list[Progress] = []
    damages = spread(UNITS)
    meter = FakeMeter(damages, noise=0)
    selection = select(meter, UNITS, policy=UCB(), ratio=0.1, pulls_per_step=8, progress=told.append)
    assert [(p.step, p.pull) for p in told] == [(step, pull) for step in range(4) for pull in range(1, 9)]
    assert {(p.n_steps, p.n_pulls, p.replayed) for p in told} == {(4, 8, False)}
    for i, p in enumerate(told):
        so_far = [pull.unit for pull in selection.trace[: i + 1] if pull.step == p.step]
        assert p.best == min(so_far, key=damages.__getitem__)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("pulls_per_step", 0),
        ("pulls_per_step", -1),
        ("temperature", 0.0),
        ("temperature", -0.02),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("pool_size", 0),
        ("pool_size", -2),
        ("screen", 0),
        ("screen", -48),
        ("ratio", 0.0),
        ("ratio", 1.5),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_value_before_anything_is_measured(setting: str, value: float) -> None:
    meter = FakeMeter(spread(UNITS))
    settings: dict[str, Any] = {"ratio": 0.1, "screen_scores": spread(UNITS), setting: value}
    with pytest.raises(SettingError, match=str(value)):
        select(meter, UNITS, policy=UCB(), **settings)
    assert meter.draws == meter.forwards == 0


def test_a_static_method_selects_the_lowest_scores() -> None:
    scores = spread(UNITS)
    selection = select_by_score(scores, ratio=0.2)
    assert list(selection.units) == sorted(UNITS, key=scores.__getitem__)[:7]
    assert selection.scores == scores
    assert selection.pulls == selection.forwards == 0


def test_equal_scores_go_to_the_earlier_unit() -> None:
    units = [Unit(MLP, 3, 0), Unit(HEAD, 5, 0), Unit(HEAD, 0, 0), Unit(HEAD, 1, 0), Unit(HEAD, 2, 0)]
    selection = select_by_score(dict(zip(units, [1.0, 0.0, 1.0, 0.0, 1.0], strict=True)), ratio=0.6)
    assert selection.units == (units[1], units[3], units[0])


def test_non_finite_scores_are_selected_last() -> None:
    units = UNITS[:6]
    scores = dict(zip(units, [math.nan, -math.inf, 9.0, math.inf, -9.0, 0.0], strict=True))
    assert select_by_score(scores, ratio=0.5).units == (units[4], units[5], units[2])
    assert set(select_by_score(scores, ratio=0.7).units[:3]) == {units[4], units[5], units[2]}


def full_selection(damages: Mapping[Unit, float]) -> Selection:
    made = select(FakeMeter(damages), list(damages), policy=UCB(), ratio=0.1, pulls_per_step=40, pool_size=36)
    return Selection(
        units=(*made.units, Unit(MLP, 2, 1, 16)),
        settings={"model": "gpt2-ü", "ratio": 0.1, "screen": None, "nested": {"data": ["a", "b"]}},
        steps=made.steps,
        trace=made.trace,
        scores=spread(UNITS),
        versions={"secateur": "0.1.0"},
        calibration={"name": "wikitext2", "split": "train", "files": [], "rows": ["a", "b"]},
    )


def test_a_selection_comes_back_from_its_file_equal_in_full(tmp_path: Path) -> None:
    selection = full_selection(spread(UNITS))
    selection.save(tmp_path / "new" / "selection.json")
    again = Selection.load(tmp_path / "new" / "selection.json")
    assert again == selection
    assert (again.pulls, again.forwards) == (selection.pulls, selection.forwards)


def test_non_finite_damages_and_scores_come_back_from_a_file_of_strict_json(tmp_path: Path) -> None:
    bad = dict(zip(UNITS[:3], [math.nan, math.inf, -math.inf], strict=True))
    made = full_selection(spread(UNITS) | bad)
    selection = replace(made, scores=made.scores | bad)
    assert {str(pull.damage) for pull in selection.trace} >= {"nan", "inf", "-inf"}
    selection.save(tmp_path / "selection.json")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    fields = json.loads((tmp_path / "selection.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert fields["nonfinite_pulls"] == selection.nonfinite_pulls > 0
    again = Selection.load(tmp_path / "selection.json")
    assert written(again) == written(selection)
    assert again.nonfinite_pulls == selection.nonfinite_pulls
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "selection.json").read_bytes()


def test_an_empty_selection_comes_back_from_its_file(tmp_path: Path) -> None:
    Selection(units=()).save(tmp_path / "selection.json")
    assert Selection.load(tmp_path / "selection.json") == Selection(units=())


def refused(path: Path) -> str:
    """The message with which a file is refused: one line that ends as a sentence and names the file."""
    with pytest.raises(SelectionError) as caught:
        Selection.load(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert str(path) in message
    return message


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe\x00", b'{"units": [', b"[]", b"{}", b"5", b"null", b'"units"'])
def test_a_file_that_is_no_selection_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    path.write_bytes(content)
    assert "is not a selection" in refused(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "selection.json")
    assert "Cannot read" in refused(tmp_path)


@pytest.mark.parametrize("name", ["format", "settings", "versions", "calibration", "units", "steps", "scores", "trace"])
def test_a_selection_that_lacks_a_field_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    full_selection(spread(UNITS)).save(path)
    fields = json.loads(path.read_text(encoding="utf-8"))
    del fields[name]
    path.write_text(json.dumps(fields))
    assert name in refused(path)


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_a_selection_of_another_format_is_refused_and_the_format_is_named(number: Any, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(full_selection(spread(UNITS)).to_json() | {"format": number}))
    assert f"format {number!r}" in refused(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("units",), 5),
        (("units",), None),
        (("units", 0), "head 0.1"),
        (("units", 0, "kind"), "neuron"),
        (("units", 0, "layer"), -1),
        (("units", 0, "layer"), math.inf),
        (("settings",), None),
        (("settings",), "none"),
        (("versions",), 3),
        (("steps",), 3),
        (("scores",), 3),
        (("scores", 0, "score"), "high"),
        (("scores", 0), None),
        (("trace",), 3),
        (("trace", 0), None),
        (("trace", 0), {}),
        (("trace", 0, "damage"), "much"),
        (("trace", 0, "batches"), 3),
        (("trace", 0, "batches", 0), math.inf),
        (("trace", 0, "unit", "layer"), "first"),
        (("trace", 0, "forwards"), math.inf),
        (("calibration",), 3),
    ],
    ids=str,
)
def test_a_selection_with_a_damaged_field_is_refused(place: tuple[str | int, ...], value: Any, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    fields = json.loads(written(full_selection(spread(UNITS))))
    inner = fields
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(fields))
    with pytest.raises(SelectionError):
        Selection.load(path)


def test_a_file_with_a_damaged_unit_is_named_in_its_refusal(tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(Selection(units=()).to_json() | {"units": [{"kind": "head", "layer": -1, "index": 0}]}))
    assert "not a unit" in refused(path)


class OneBadBatch(FakeMeter):
    """After the first commit, batch 0 gives a non-finite base loss, whoever is masked."""

    def measure(self, unit: Unit, batches: Sequence[int]) -> tuple[list[float], list[float]]:
        base, masked = super().measure(unit, batches)
        if self.committed:
            base = [math.nan if i == 0 else loss for i, loss in zip(batches, base, strict=True)]
        return base, masked


def test_a_unit_is_not_blamed_for_a_base_loss_that_is_not_finite() -> None:
    damages = spread(UNITS)
    meter = OneBadBatch(damages)
    selection = select(meter, UNITS, policy=UCB(), ratio=0.3, pulls_per_step=40, pool_size=36)
    assert selection.nonfinite_pulls > 0
    assert all(step["broken"] == 0 for step in selection.steps)
    assert selection.pulls == len(selection.units) * 40


# What the meter is told, and what it makes of it


class Announced(FakeMeter):
    """Also notes how many units had been measured when something was announced."""

    def __init__(self, damages: Mapping[Unit, float]) -> None:
        super().__init__(damages)
        self.announced_at: list[int] = []

    def expect(self, pulls: Iterable[tuple[Unit, Sequence[int]]]) -> None:
        super().expect(pulls)
        self.announced_at.append(len(self.measured))


@pytest.mark.parametrize(("policy", "pulls_per_step", "first"), [(UCB(), 40, 12), (UCB(), 5, 5), (Greedy(), 8, 8)], ids=repr)
def test_ucb_and_greedy_announce_the_first_pulls_of_each_step_in_order_before_they_are_made(
    policy: Policy, pulls_per_step: int, first: int
) -> None:
    meter = Announced(spread(UNITS))
    selection = select(meter, UNITS, policy=policy, ratio=0.1, pulls_per_step=pulls_per_step)
    assert [len(expected) for expected in meter.expected] == [first, *(min(first, 11) for _ in range(3))]  # 2 * root of 35
    for step, expected in enumerate(meter.expected):
        made = [(pull.unit, pull.batches) for pull in pulls_of_step(selection, step)]
        assert expected == made[: len(expected)]
    assert meter.announced_at == [pulls_per_step * step for step in range(4)]


def test_the_pulls_that_are_announced_do_not_depend_on_the_answers() -> None:
    meters = [Announced(spread(UNITS)), Announced(harmless_few(UNITS, UNITS[:3]))]
    selections = [select(meter, UNITS, policy=UCB(), ratio=0.1, pulls_per_step=30) for meter in meters]
    assert meters[0].expected[0] == meters[1].expected[0]
    assert pulls_of_step(selections[0], 0)[12:] != pulls_of_step(selections[1], 0)[12:]


def test_thompson_sampling_announces_nothing_as_its_pulls_hang_on_the_answers() -> None:
    meter = Announced(spread(UNITS))
    select(meter, UNITS, policy=Thompson(), ratio=0.1)
    assert meter.expected == []


def search(
    name: str, policy: Policy, target: str, *, stack: int = 1, lanes: int = 1, stop_at: int | None = None, **more: Any
) -> Selection:
    """Three steps of six pulls on a tiny model of its own; `stop_at` is the pull after which it is stopped."""
    model = FAMILIES_TINY[name]()
    units = candidate_units(model, target, GROUP)
    meter = DamageMeter(model, tiny_batches(model, 5), batches_per_pull=2, stack=stack, lanes=lanes)
    told: list[Progress] = []

    def progress(made: Progress) -> None:
        told.append(made)
        if len(told) == stop_at:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"ratio": 3 / len(units), "pulls_per_step": 6, "pool_size": 4, "progress": progress}
    selection = select(meter, units, policy=policy, **settings | more)
    assert (len(selection.units), selection.pulls) == (3, 18)
    return selection


def assert_same_but_for_last_digits(found: Selection, expected: Selection) -> None:
    assert found.units == expected.units
    assert found.forwards == expected.forwards
    for ours, theirs in zip(found.trace, expected.trace, strict=True):
        numbers: dict[str, Any] = {"base_losses": (), "masked_losses": (), "damage": 0.0, "reward": 0.0}
        assert replace(ours, **numbers) == replace(theirs, **numbers)
        assert ours.base_losses == pytest.approx(theirs.base_losses, rel=1e-6)
        assert ours.masked_losses == pytest.approx(theirs.masked_losses, rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize(("name", "target"), [("gpt2", HEAD), ("llama", MLP), ("vit", MLP), ("timm swin", HEAD)])
def test_stacked_runs_select_the_same_and_runs_side_by_side_measure_the_same(name: str, target: str, policy: Policy) -> None:
    plain = search(name, policy, target)
    assert search(name, policy, target, lanes=2) == plain
    for lanes in (1, 2):
        assert_same_but_for_last_digits(search(name, policy, target, stack=3, lanes=lanes), plain)


@pytest.mark.parametrize(("stop_at", "lanes"), [(3, 1), (8, 2)])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_stacked_search_that_was_stopped_goes_on_to_the_same_selection(
    policy: Policy, stop_at: int, lanes: int, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    with pytest.raises(KeyboardInterrupt), Journal(path, {}) as journal:
        search("gpt2", policy, HEAD, stack=3, lanes=lanes, stop_at=stop_at, journal=journal)
    with Journal(path, {}) as journal:
        assert journal.n_replayed == stop_at
        resumed = search("gpt2", policy, HEAD, stack=3, lanes=lanes, journal=journal)
    whole = search("gpt2", policy, HEAD, stack=3, lanes=lanes)
    assert_same_but_for_last_digits(resumed, whole)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_search_that_was_stopped_goes_on_with_other_lanes_to_the_same_numbers(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path / "journal.jsonl", {}) as journal:
        search("gpt2", policy, HEAD, lanes=2, stop_at=8, journal=journal)
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        assert search("gpt2", policy, HEAD, lanes=1, journal=journal) == search("gpt2", policy, HEAD, lanes=3)


# Goals and quotas

BOTH = enumerate_units([6] * 3, [64] * 3, target="both", group_width=16)  # 18 heads and 12 groups
ALL = len(BOTH)


def goal_of(costs: Mapping[Unit, float], share: float) -> Goal:
    """A cost of which each unit has its own part, whatever else is out."""
    return Goal("pounds", share, lambda some: 1 - sum(costs[unit] for unit in some), costs)


def by_kind(head: float, mlp: float) -> dict[Unit, float]:
    return {unit: head if unit.kind == HEAD else mlp for unit in BOTH}


def quiet(damages: Mapping[Unit, float], policy: Policy, **settings: Any) -> Selection:
    """Every unit is tried at every step, without noise."""
    meter = FakeMeter(damages, noise=0)
    return select(meter, list(damages), policy=policy, pulls_per_step=2 * ALL, pool_size=ALL, **settings)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("share", [0.99, 0.9, 0.55, 0.4])
def test_units_go_until_the_goal_is_met_and_no_further(policy: Policy, share: float) -> None:
    costs = by_kind(0.01, 0.04)
    goal = goal_of(costs, share)
    for chosen in (quiet(spread(BOTH), policy, goal=goal), select_by_score(spread(BOTH), goal=goal)):
        assert goal.left(chosen.units) <= share < goal.left(chosen.units[:-1])
        assert len(set(chosen.units)) == len(chosen.units)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_damage_for_its_cost_decides_between_kinds(policy: Policy) -> None:
    """A group does three times the damage of a head, at four times or at twice its cost."""
    damages = by_kind(0.01, 0.03)
    for cost, first in ((0.04, MLP), (0.02, HEAD)):
        goal = goal_of(by_kind(0.01, cost), 0.9)
        for chosen in (quiet(damages, policy, goal=goal), select_by_score(damages, goal=goal)):
            assert {unit.kind for unit in chosen.units} == {first}
    assert {unit.kind for unit in quiet(damages, policy, ratio=0.2).units} == {HEAD}


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_unit_that_does_good_goes_before_any_that_does_harm_however_little_it_weighs(policy: Policy) -> None:
    damages = by_kind(0.001, 0.04) | {BOTH[-1]: -0.01, BOTH[0]: -0.002}
    goal = goal_of(by_kind(0.02, 0.001), 0.95)
    for chosen in (quiet(damages, policy, goal=goal), select_by_score(damages, goal=goal)):
        assert set(chosen.units[:2]) == {BOTH[-1], BOTH[0]}
        assert {unit.kind for unit in chosen.units[2:]} == {HEAD}


def test_the_reward_of_a_pull_weighs_its_damage_by_the_units_cost() -> None:
    costs = by_kind(0.01, 0.04)
    mean = (18 * 0.01 + 12 * 0.04) / 30
    chosen = quiet(spread(BOTH), UCB(), goal=goal_of(costs, 0.97), temperature=0.05)
    for pull in chosen.trace:
        assert pull.reward == pytest.approx(1 / (1 + math.exp(pull.damage / (0.05 * costs[pull.unit] / mean))), rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_what_is_left_is_asked_of_the_goal_and_not_summed_up(policy: Policy) -> None:
    """As where a K/V head goes with the last of its heads: nothing is gained before three heads of a layer are out."""

    def left(some: Sequence[Unit]) -> float:
        return 1 - 0.2 * sum(sum(unit.layer == layer for unit in some) // 3 for layer in range(6))

    goal = Goal("threes", 0.5, left, dict.fromkeys(UNITS, 0.0))
    assert {goal.weight(unit) for unit in UNITS} == {1.0}
    chosen = select(FakeMeter(spread(UNITS)), UNITS, policy=policy, goal=goal, pulls_per_step=4)
    assert left(chosen.units) <= 0.5 < left(chosen.units[:-1])


def test_a_unit_without_cost_is_not_weighed_by_nothing() -> None:
    goal = goal_of(by_kind(0.05, 0.0), 0.5)
    assert goal.weight(BOTH[-1]) > 0
    found = quiet(by_kind(0.01, 0.01), UCB(), goal=goal)
    assert {unit.kind for unit in found.units} == {HEAD}
    assert all(math.isfinite(pull.reward) for pull in found.trace)


@pytest.mark.parametrize("broken", [0, 3, ALL])
def test_a_goal_is_met_even_if_masks_break_the_loss(broken: int) -> None:
    damages = spread(BOTH) | dict.fromkeys(BOTH[:broken], math.nan)
    goal = goal_of(by_kind(1 / ALL, 1 / ALL), 0.5)
    assert len(quiet(damages, UCB(), goal=goal).units) == ALL // 2
    assert len(select_by_score(damages, goal=goal).units) == ALL // 2


def test_an_unreachable_goal_is_one_sentence_with_the_figures() -> None:
    with pytest.raises(SettingError, match=r"^Without any of the 30 candidates 34\.0% of the pounds .* 20\.0% .*\.$"):
        goal_of(by_kind(0.01, 0.04), 0.2)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, 2.0, math.nan])
def test_a_goal_of_no_share_is_refused(share: float) -> None:
    with pytest.raises(SettingError, match=f"target is {share} "):
        goal_of(by_kind(0.01, 0.04), share)


def test_a_search_with_a_goal_says_how_many_steps_it_may_take_and_ends_at_the_last() -> None:
    heard: list[Progress] = []
    chosen = quiet(spread(BOTH), UCB(), goal=goal_of(by_kind(0.02, 0.02), 0.81), progress=heard.append)
    assert len(chosen.units) == 10
    assert [progress.n_steps for progress in heard] == [10] * len(heard)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_search_with_a_goal_stopped_in_the_middle_goes_on_to_the_same(policy: Policy, tmp_path: Path) -> None:
    goal = goal_of(by_kind(0.01, 0.04), 0.8)
    whole = select(FakeMeter(spread(BOTH)), BOTH, policy=policy, goal=goal, pulls_per_step=6)
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path / "journal.jsonl", {}) as journal:
        select(FakeMeter(spread(BOTH), stop_at=15), BOTH, policy=policy, goal=goal, pulls_per_step=6, journal=journal)
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        again = select(FakeMeter(spread(BOTH)), BOTH, policy=policy, goal=goal, pulls_per_step=6, journal=journal)
    assert written(again) == written(whole)


def test_a_goal_that_is_met_exactly_is_met() -> None:
    costs = dict.fromkeys(UNITS[:32], 1 / 32)
    assert len(select_by_score(spread(UNITS[:32]), goal=goal_of(costs, 0.75)).units) == 8
    assert len(quiet(spread(UNITS[:32]), UCB(), goal=goal_of(costs, 0.75)).units) == 8


def layers_quota(room: Mapping[int, int]) -> Quota:
    return Quota({unit: unit.layer for unit in UNITS if unit.layer in room}, room)


@pytest.mark.parametrize("room", [dict.fromkeys(range(6), 2), {0: 6, 1: 1, 4: 3}, {3: 1}], ids=str)
@pytest.mark.parametrize("broken", [[], UNITS[:6], UNITS], ids=len)
def test_every_cell_of_a_quota_gives_exactly_its_room(room: dict[int, int], broken: list[Unit]) -> None:
    quota, damages = layers_quota(room), spread(UNITS) | dict.fromkeys(broken, math.nan)
    found = [select_by_score(damages, quota=quota)]
    found += [select(FakeMeter(damages), UNITS, policy=policy, quota=quota, pulls_per_step=5) for policy in POLICIES]
    scores = spread(UNITS)
    found.append(select(FakeMeter(damages), UNITS, policy=UCB(), quota=quota, pulls_per_step=5, screen=3, screen_scores=scores))
    for selection in found:
        assert Counter(unit.layer for unit in selection.units) == room
        assert len(set(selection.units)) == quota.n_selected == sum(room.values())
    if not broken:  # of each cell, those of lowest score
        for layer, n in room.items():
            lowest = sorted((unit for unit in UNITS if unit.layer == layer), key=scores.__getitem__)[:n]
            assert {unit for unit in found[0].units if unit.layer == layer} == set(lowest)


def test_a_quota_and_a_goal_together_fill_the_quota() -> None:
    goal = goal_of(dict.fromkeys(UNITS, 1 / 36), 0.9)
    quota = layers_quota(dict.fromkeys(range(6), 1))
    assert len(select_by_score(spread(UNITS), goal=goal, quota=quota).units) == 6
    assert len(select(FakeMeter(spread(UNITS)), UNITS, policy=UCB(), goal=goal, quota=quota, pulls_per_step=4).units) == 6


def test_a_quota_opens_what_has_room_and_shows_some_that_fill_it() -> None:
    quota = Quota({UNITS[0]: "a", UNITS[1]: "a", UNITS[2]: "b"}, {"a": 1, "b": 1})
    assert quota.some() == [UNITS[0], UNITS[2]]
    assert quota.open(UNITS, [UNITS[1]]) == [UNITS[2]]
    assert quota.open(UNITS, quota.some()) == []
    assert quota.n_selected == 2


def test_a_selection_keeps_its_goal_and_one_written_before_there_were_goals_has_none(tmp_path: Path) -> None:
    selection = Selection((UNITS[0],), goal={"what": "latency", "asked": 0.8, "got": 0.79})
    selection.save(tmp_path / "a.json")
    assert Selection.load(tmp_path / "a.json").goal == selection.goal
    fields = json.loads((tmp_path / "a.json").read_text())
    del fields["goal"]
    (tmp_path / "a.json").write_text(json.dumps(fields))
    assert Selection.load(tmp_path / "a.json").goal == {}
