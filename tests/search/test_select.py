from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import BANDITS, POLICIES, UNITS, FakeMeter, harmless_few, spread, with_pool
from secateur.errors import SettingError
from secateur.files.journal import Journal
from secateur.model.families import candidate_units
from secateur.search.damage import DamageMeter
from secateur.search.goals import Count, Share
from secateur.search.policies import (
    PULLS,
    UCB,
    Auto,
    Belief,
    Budget,
    Choice,
    Conversation,
    Greedy,
    Heard,
    Moment,
    Policy,
    Request,
    Slope,
    Thompson,
)
from secateur.search.select import Asked, Beliefs, Measured, Meter, Screen, select, select_by_score
from secateur.selection import Pull, Selection
from secateur.units import HEAD, MLP, Unit, enumerate_units
from secateur.watcher import Progress
from tiny import FAMILIES_TINY, GROUP, tiny_batches
from worlds import Listener


def pulls_of_step(selection: Selection, step: int) -> list[Pull]:
    return [pull for pull in selection.trace if pull.step == step]


def test_the_fake_meter_has_all_that_selection_asks_of_a_meter() -> None:
    meter: Meter = FakeMeter(spread(UNITS))
    assert list(meter.measure([])) == []


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_harmless_units_are_chosen(policy: Policy, seed: int) -> None:
    few = [UNITS[2], UNITS[11], UNITS[19], UNITS[35]]
    meter = FakeMeter(harmless_few(UNITS, few), seed=seed)
    selection = select(meter, UNITS, policy=with_pool(policy, 36), ratio=0.1, pulls_per_step=100, seed=seed)
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
@pytest.mark.parametrize("policy", BANDITS, ids=repr)
def test_the_pool_holds_two_square_roots_of_the_remaining_candidates(policy: Policy, remaining: int, size: int) -> None:
    units = enumerate_units([remaining], [], target="head")
    selection = select(FakeMeter(spread(units)), units, policy=policy, goal=Count(1), pulls_per_step=200)
    assert selection.steps[0].pool == size
    pulled = {pull.unit for pull in selection.trace}
    assert pulled <= set(units)
    if policy == UCB():  # pulls all of its pool
        assert len(pulled) == size


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (7, 7), (36, 36), (1000, 36)])
@pytest.mark.parametrize("policy", BANDITS, ids=repr)
def test_a_pool_size_is_kept_up_to_the_candidates_that_remain(policy: Policy, asked: int, got: int) -> None:
    policy = with_pool(policy, asked)
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=policy, ratio=0.1, pulls_per_step=40)
    assert selection.steps[0].pool == got
    pulled = {pull.unit for pull in pulls_of_step(selection, 0)}
    assert len(pulled) == got or (isinstance(policy, Thompson) and len(pulled) <= got)


def test_auto_has_all_that_remain_in_its_pool_and_greedy_as_many_as_its_budget() -> None:
    for policy, pools in ((Auto(), [36, 35, 34, 33]), (Greedy(), [8] * 4)):
        selection = select(FakeMeter(spread(UNITS)), UNITS, policy=policy, ratio=0.1, pulls_per_step=8)
        assert [step.pool for step in selection.steps] == pools


def test_pools_are_drawn_anew_at_each_step_from_all_that_remain() -> None:
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=UCB(), ratio=0.5, pulls_per_step=12)
    pools = [frozenset(pull.unit for pull in pulls_of_step(selection, step)) for step in range(18)]
    assert [step.pool for step in selection.steps] == [math.floor(2 * math.sqrt(36 - s)) for s in range(18)]
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
        assert selection.steps[step].evaluated == len(evaluated) <= 3 < selection.steps[step].pool


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_more_units_than_the_screen_holds_can_be_selected_as_it_is_drawn_anew_at_each_step(policy: Policy) -> None:
    units = enumerate_units([20] * 10, [], target="head")
    scores = {unit: float(score) for unit, score in zip(units, np.random.default_rng(3).random(200), strict=True)}
    meter = FakeMeter(spread(units))
    selection = select(meter, units, policy=policy, ratio=0.3, pulls_per_step=6, screen=Screen(scores, 48))
    assert len(set(selection.units)) == 60
    for step in range(60):
        remaining = set(units) - set(selection.units[:step])
        lowest = sorted(remaining, key=scores.__getitem__)[:48]
        assert {pull.unit for pull in pulls_of_step(selection, step)} <= set(lowest)


def test_screening_keeps_the_lowest_scores_in_the_order_of_the_candidates_and_takes_nan_last() -> None:
    a, b, c, d, e = (Unit(HEAD, 0, i) for i in range(5))
    scores = {a: 3.0, b: math.nan, c: 1.0, d: -math.inf, e: 2.0}
    assert Screen(scores, 2).kept([a, b, c, d, e]) == [c, e]
    assert Screen(scores, 3).kept([a, b, c, d, e]) == [a, c, e]
    assert Screen(scores, 10).kept([e, d, b, a]) == [e, d, b, a]


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
    selection = select(meter, UNITS, policy=with_pool(policy, 36), ratio=0.1, pulls_per_step=100)
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
    assert sum(step.broken for step in selection.steps) > 0


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_pools_of_broken_units_alone_select_nothing_while_a_finite_unit_is_left(policy: Policy) -> None:
    sound = {UNITS[8], UNITS[20], UNITS[33]}
    damages = {unit: 5.0 if unit in sound else math.nan for unit in UNITS}
    selection = select(FakeMeter(damages), UNITS, policy=with_pool(policy, 2), ratio=0.08, pulls_per_step=2)
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
    selection = select(meter, UNITS, policy=UCB(pool=36), ratio=0.1, pulls_per_step=200)
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
    selection = select(FakeMeter(damages), UNITS, policy=with_pool(policy, 36), ratio=0.1, pulls_per_step=100)
    assert set(selection.units) == set(few)


def test_progress_tells_of_every_pull_and_of_the_best_unit_so_far() -> None:
    damages, listener = spread(UNITS), Listener()
    meter = FakeMeter(damages, noise=0)
    selection = select(meter, UNITS, policy=UCB(), ratio=0.1, pulls_per_step=8, watcher=listener)
    told = listener.pulls
    assert [(p.step, p.pull) for p in told] == [(step, pull) for step in range(4) for pull in range(1, 9)]
    assert {(p.n_steps, p.budget, p.replayed) for p in told} == {(4, 8, False)}
    for i, p in enumerate(told):
        so_far = [pull for pull in selection.trace[: i + 1] if pull.step == p.step]
        assert p.best == min((pull.unit for pull in so_far), key=damages.__getitem__)
        assert p.best_damage == pytest.approx(np.mean([pull.damage for pull in so_far if pull.unit == p.best]))
    assert listener.steps == list(selection.steps)


@pytest.mark.parametrize("policy", [UCB(), Thompson(), Greedy()], ids=repr)
def test_a_step_tells_of_the_mean_damage_that_its_own_pulls_measured_of_the_chosen_unit(policy: Policy) -> None:
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=policy, ratio=0.1, pulls_per_step=12)
    pulled = [
        [pull.damage for pull in selection.trace if (pull.step, pull.unit) == (step.step, step.unit)]
        for step in selection.steps
    ]
    assert [step.damage for step in selection.steps] == [pytest.approx(np.mean(damages)) for damages in pulled]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("pulls_per_step", 0),
        ("pulls_per_step", -1),
        ("temperature", 0.0),
        ("temperature", -0.02),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("ratio", 0.0),
        ("ratio", 1.5),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_value_before_anything_is_measured(setting: str, value: float) -> None:
    meter = FakeMeter(spread(UNITS))
    settings: dict[str, Any] = {"ratio": 0.1, setting: value}
    with pytest.raises(SettingError, match=str(value)):
        select(meter, UNITS, policy=UCB(), **settings)
    assert meter.draws == meter.forwards == 0


@pytest.mark.parametrize("size", [0, -48])
def test_a_screen_that_keeps_nothing_is_refused_with_its_size(size: int) -> None:
    with pytest.raises(SettingError, match=str(size)):
        Screen(spread(UNITS), size)


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


class OneBadBatch(FakeMeter):
    """After the first commit, batch 0 gives a non-finite base loss, whoever is masked."""

    def measure(self, pulls: Sequence[Asked]) -> Iterator[Measured]:
        for (_, batches), found in zip(pulls, super().measure(pulls), strict=True):
            bad = [bool(self.committed) and i == 0 for i in batches]
            base = tuple(math.nan if bad else loss for bad, loss in zip(bad, found.base_losses, strict=True))
            yield found._replace(base_losses=base)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_unit_is_not_blamed_for_a_base_loss_that_is_not_finite(policy: Policy) -> None:
    damages = spread(UNITS)
    meter = OneBadBatch(damages)
    selection = select(meter, UNITS, policy=with_pool(policy, 36), ratio=0.3, pulls_per_step=40)
    assert selection.nonfinite_pulls > 0 or isinstance(policy, Auto)  # which may be sure before it meets that batch
    assert all(step.broken == 0 for step in selection.steps)
    assert all(step.sure is None or 0 <= step.sure <= 1 for step in selection.steps)
    if isinstance(policy, UCB | Thompson):
        assert selection.pulls == len(selection.units) * 40


# The conversation with a policy


@dataclass(frozen=True)
class Scripted:
    """Asks for the same at every step, whatever it hears, and remembers all that it is told."""

    requests: tuple[Request, ...]
    choice: Choice
    beliefs: list[list[Belief]] = field(default_factory=list)
    heard: list[Sequence[Heard]] = field(default_factory=list)

    def pool_size(self, remaining: int, budget: int) -> int:
        return remaining

    def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
        self.beliefs.append(list(beliefs))
        for request in self.requests:
            self.heard.append((yield request))
        return self.choice


def scripted(*requests: Request, choice: int = 0, sure: float | None = None) -> Scripted:
    return Scripted(requests, Choice(choice, sure))


def test_a_whole_request_reaches_the_meter_at_once_round_by_round() -> None:
    meter, policy = FakeMeter(spread(UNITS)), scripted(Request((5, 0, 2)), Request((4,), pulls=3), Request((0, 3), pulls=2))
    selection = select(meter, UNITS, policy=policy, goal=Count(1))
    assert [len(request) for request in meter.requests] == [3, 3, 4]
    asked = [pull for request in meter.requests for pull in request]
    assert asked == [(pull.unit, pull.batches) for pull in selection.trace]
    arms = [heard.arm for answer in policy.heard for heard in answer]
    assert arms == [5, 0, 2, 4, 4, 4, 0, 3, 0, 3]
    by_arm = dict(zip(arms, (unit for unit, _ in asked), strict=True))
    assert [by_arm[arm] for arm in arms] == [unit for unit, _ in asked]
    assert selection.units == (by_arm[0],)


def test_a_policy_hears_the_damages_and_the_reward_of_each_pull_in_the_order_it_asked_for_them() -> None:
    policy = scripted(Request((1, 0)), Request((1,), pulls=2))
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=policy, goal=Count(2))
    heard = [(one.damages, one.reward, one.broken) for answer in policy.heard for one in answer]
    assert heard == [(pull.damages, pull.reward, False) for pull in selection.trace]
    assert [len(answer) for answer in policy.heard] == [2, 2, 2, 2]


def test_a_policy_hears_which_masks_broke_the_loss() -> None:
    policy = scripted(Request(tuple(range(36))))
    broken = set(UNITS[::3])
    meter = FakeMeter(spread(UNITS) | dict.fromkeys(broken, math.inf))
    select(meter, UNITS, policy=policy, goal=Count(1), pulls_per_step=36)
    assert {unit for unit, heard in zip(meter.measured, policy.heard[0], strict=True) if heard.broken} == broken


def test_where_a_goal_counts_costs_a_policy_hears_damages_per_weight() -> None:
    costs = {unit: 0.01 + 0.001 * i for i, unit in enumerate(UNITS)}
    goal = Share("pounds", 0.98, lambda some: 1 - sum(costs[unit] for unit in some), costs)
    policy = scripted(Request((0, 1, 2)))
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=policy, goal=goal)
    mean = sum(costs.values()) / 36
    for pull, heard in zip(selection.trace, [heard for answer in policy.heard for heard in answer], strict=True):
        assert heard.damages == pytest.approx([damage * mean / costs[pull.unit] for damage in pull.damages])


def test_each_pull_has_fresh_batches_unless_the_arms_are_to_share_them() -> None:
    meter = FakeMeter(spread(UNITS))
    fresh = select(meter, UNITS, policy=scripted(Request((0, 1, 2), pulls=2)), goal=Count(1))
    drawn = FakeMeter({})
    assert [pull.batches for pull in fresh.trace] == [drawn.draw() for _ in range(6)]
    assert meter.draws == 6

    meter = FakeMeter(spread(UNITS))
    shared = select(meter, UNITS, policy=scripted(Request((0, 1, 2), pulls=2, common=True), Request((1,))), goal=Count(1))
    drawn = FakeMeter({})
    first, second, third = drawn.draw(), drawn.draw(), drawn.draw()
    assert [pull.batches for pull in shared.trace] == [first] * 3 + [second] * 3 + [third]
    assert meter.draws == 3


def test_a_policy_may_stop_before_its_budget_is_spent() -> None:
    meter, listener = FakeMeter(spread(UNITS)), Listener()
    selection = select(meter, UNITS, policy=scripted(Request((7,)), choice=7), goal=Count(4), watcher=listener)
    assert len(selection.units) == 4
    assert selection.pulls == len(meter.measured) == 4
    assert [(told.pull, told.budget) for told in listener.pulls] == [(1, 32)] * 4


def test_a_policy_may_spend_its_whole_budget() -> None:
    policy = scripted(Request((0, 1), pulls=2), Request((2,)))
    assert select(FakeMeter(spread(UNITS)), UNITS, policy=policy, goal=Count(2), pulls_per_step=5).pulls == 10


@pytest.mark.parametrize(
    ("policy", "measured"),
    [
        (scripted(Request((0, 1, 2, 3, 4, 5))), 0),
        (scripted(Request((0,), pulls=6)), 0),
        (scripted(Request((0, 1), pulls=2), Request((0, 1))), 4),
        (scripted(Request((0, 1, 2, 3, 4)), Request((0,))), 5),
    ],
)
def test_a_policy_that_overspends_is_an_error_and_what_it_has_not_is_not_measured(policy: Scripted, measured: int) -> None:
    meter = FakeMeter(spread(UNITS))
    with pytest.raises(ValueError, match=f"{5 - measured} left"):
        select(meter, UNITS, policy=policy, goal=Count(1), pulls_per_step=5)
    assert len(meter.measured) == measured


@pytest.mark.parametrize("request_", [Request(()), Request((0,), pulls=0)])
def test_a_policy_that_asks_for_nothing_is_an_error(request_: Request) -> None:
    with pytest.raises(ValueError, match="0 pulls"):
        select(FakeMeter(spread(UNITS)), UNITS, policy=scripted(request_), goal=Count(1))


@pytest.mark.parametrize("arm", [-1, len(UNITS)])
def test_a_policy_that_asks_for_an_arm_that_is_not_there_is_an_error(arm: int) -> None:
    meter = FakeMeter(spread(UNITS))
    with pytest.raises(ValueError, match=f"arms.*{arm}"):
        select(meter, UNITS, policy=scripted(Request((0, arm))), goal=Count(1))
    assert meter.measured == []


@pytest.mark.parametrize("requests", [(), (Request((0, 1, 2)),), (Request((0,), pulls=4), Request((2,)))])
def test_a_policy_that_names_an_arm_it_has_not_measured_is_an_error(requests: tuple[Request, ...]) -> None:
    meter = FakeMeter(spread(UNITS))
    with pytest.raises(ValueError, match="arm 3"):
        select(meter, UNITS, policy=scripted(*requests, choice=3), goal=Count(1))
    assert meter.committed == []


def test_an_arm_measured_in_an_earlier_step_is_not_measured_in_this_one() -> None:
    @dataclass(frozen=True)
    class Resting(Scripted):
        def run(self, beliefs: Sequence[Belief], budget: int, rng: np.random.Generator) -> Conversation:
            if not self.beliefs:
                return (yield from super().run(beliefs, budget, rng))
            yield Request((1,))
            return self.choice

    with pytest.raises(ValueError, match="arm 0"):
        select(FakeMeter(spread(UNITS)), UNITS, policy=Resting((Request((0, 1)),), Choice(0)), goal=Count(2))


@pytest.mark.parametrize("sure", [None, 0.0, 0.83])
def test_how_sure_a_policy_was_is_in_the_record_of_the_step(sure: float | None) -> None:
    selection = select(FakeMeter(spread(UNITS)), UNITS, policy=scripted(Request((0,)), sure=sure), goal=Count(2))
    assert [step.sure for step in selection.steps] == [sure, sure]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_step_says_how_sure_its_policy_was(policy: Policy) -> None:
    few = [UNITS[3], UNITS[21]]
    certain, torn = (
        select(FakeMeter(damages, noise=noise), UNITS, policy=with_pool(policy, 36), goal=Count(1), pulls_per_step=400).steps[0]
        for damages, noise in ((harmless_few(UNITS, few[:1]), 0.005), (harmless_few(UNITS, few), 0.05))
    )
    assert certain.sure is not None and torn.sure is not None
    assert 0 <= torn.sure < certain.sure <= 1


@pytest.mark.parametrize(("policy", "pulls_per_step", "first"), [(UCB(), 40, 12), (UCB(), 5, 5), (Greedy(), 8, 8)], ids=repr)
def test_ucb_and_greedy_ask_for_the_first_pulls_of_each_step_at_once(policy: Policy, pulls_per_step: int, first: int) -> None:
    meter = FakeMeter(spread(UNITS))
    selection = select(meter, UNITS, policy=policy, ratio=0.1, pulls_per_step=pulls_per_step)
    long = [request for request in meter.requests if len(request) > 1]
    assert [len(request) for request in long] == [first, *(min(first, 11) for _ in range(3))]  # 2 * root of 35
    for step, request in enumerate(long):
        made = [(pull.unit, pull.batches) for pull in pulls_of_step(selection, step)]
        assert request == made[: len(request)]
    assert sum(map(len, meter.requests)) == selection.pulls == 4 * pulls_per_step


def test_the_pulls_that_ucb_asks_for_at_once_do_not_depend_on_the_answers() -> None:
    meters = [FakeMeter(spread(UNITS)), FakeMeter(harmless_few(UNITS, UNITS[:3]))]
    selections = [select(meter, UNITS, policy=UCB(), ratio=0.1, pulls_per_step=30) for meter in meters]
    assert meters[0].requests[0] == meters[1].requests[0]
    assert pulls_of_step(selections[0], 0)[12:] != pulls_of_step(selections[1], 0)[12:]


def test_thompson_sampling_asks_for_one_pull_at_a_time_as_its_pulls_hang_on_the_answers() -> None:
    meter = FakeMeter(spread(UNITS))
    select(meter, UNITS, policy=Thompson(), ratio=0.1)
    assert [len(request) for request in meter.requests] == [1] * 4 * 32


# Beliefs: what one step passes on to the next


def heard_of(arm: int, *damages: float) -> list[Heard]:
    """Pulls of two batches each."""
    return [Heard(arm, pair, 0.5) for pair in zip(damages[::2], damages[1::2], strict=True)]


def values(n: int, seed: int = 0) -> list[float]:
    return [float(value) for value in np.random.default_rng(seed).normal(0.1, 0.3, n)]


def test_beliefs_are_the_mean_and_the_sample_variance_of_all_that_was_measured_of_a_unit() -> None:
    beliefs, pulls = Beliefs({}), [pull for arm in range(6) for pull in heard_of(arm, *values(2 * arm + 2, seed=arm))]
    for order in (pulls[::2], pulls[1::2]):  # in two steps, the units mixed
        beliefs.hear(UNITS[:6], order)
    for arm, belief in enumerate(beliefs.of(UNITS[:6])):
        damages = [damage for pull in pulls if pull.arm == arm for damage in pull.damages]
        assert belief.count == len(damages)
        assert belief.mean == pytest.approx(np.mean(damages), rel=1e-12)
        assert belief.variance == pytest.approx(np.var(damages, ddof=1), rel=1e-9)


def test_nothing_is_believed_of_a_unit_that_was_never_measured() -> None:
    beliefs = Beliefs({})
    beliefs.hear(UNITS, heard_of(1, 0.1, 0.2))
    unknown, known = beliefs.of([UNITS[0], UNITS[1]])
    assert (unknown.count, known.count) == (0, 2)
    assert math.isnan(unknown.mean) and math.isnan(unknown.variance)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_damages_that_are_not_finite_say_nothing_of_a_unit(bad: float) -> None:
    beliefs = Beliefs({})
    beliefs.hear(UNITS, heard_of(0, bad, bad))
    assert beliefs.of([UNITS[0]])[0].count == 0
    beliefs.hear(UNITS, heard_of(0, 0.25, bad))
    (belief,) = beliefs.of([UNITS[0]])
    assert belief.count == 1
    assert belief.mean == pytest.approx(0.25)
    assert math.isnan(belief.variance)


def test_a_prior_counts_as_the_measurements_it_stands_for() -> None:
    damages = values(12)
    before = Belief(float(np.mean(damages[:8])), float(np.var(damages[:8], ddof=1)), 8)
    beliefs = Beliefs({UNITS[0]: before})
    assert beliefs.of(UNITS[:2])[0] == before
    beliefs.hear(UNITS, heard_of(0, *damages[8:]))
    (belief,) = beliefs.of(UNITS[:1])
    assert belief.count == 12
    assert belief.mean == pytest.approx(np.mean(damages))
    assert belief.variance == pytest.approx(np.var(damages, ddof=1))


def test_the_rest_of_a_damage_is_what_the_first_order_term_of_its_batch_leaves() -> None:
    beliefs = Beliefs({})
    beliefs.hear(UNITS, [Heard(0, (0.3, 0.5), 0.5, firsts=(0.1, 0.2)), Heard(1, (0.3, 0.5), 0.5)])
    known, plain = beliefs.of(UNITS[:2])
    assert [known.mean, known.rest.mean, known.rest.count] == pytest.approx([0.4, 0.25, 2])
    assert [plain.mean, plain.rest.mean] == pytest.approx([0.4, 0.4])


class Sloping(FakeMeter):
    """Gradients that differ from step to step."""

    gradient_batches = 0

    def has_gradients(self, units: Sequence[Unit]) -> bool:
        return True

    def slopes(self, units: Sequence[Unit], n_batches: int) -> list[Slope]:
        self.gradient_batches += n_batches
        return [Slope(Moment(0.3 * (1 + len(self.committed)), 0.09, 10), 0.6) for _ in units]

    def firsts(self, unit: Unit, batches: Sequence[int]) -> tuple[float, ...]:
        return ()


def test_slopes_are_per_weight_and_those_of_earlier_steps_count_half() -> None:
    costs = {UNITS[0]: 0.1, UNITS[1]: 0.3}  # weights of 0.5 and 1.5
    goal = Share("pounds", 0.7, lambda some: 1 - sum(costs[unit] for unit in some), costs)
    beliefs, meter = Beliefs({}), Sloping(spread(UNITS))
    assert beliefs.look(meter, list(costs), 3, goal) == 3
    for belief, weight in zip(beliefs.of(list(costs)), (0.5, 1.5), strict=True):
        assert belief.slope and belief.slope.second == pytest.approx(0.6 / weight)
        first = belief.slope.first
        assert [first.mean, first.variance, first.count] == pytest.approx([0.3 / weight, 0.09 / weight**2, 10])
    meter.commit(UNITS[5])
    beliefs.look(meter, [UNITS[0]], 3, goal)
    (belief,) = beliefs.of([UNITS[0]])
    assert belief.slope and belief.slope.first.mean == pytest.approx((0.5 * 0.3 + 0.6) / 1.5 / 0.5)
    assert belief.slope.first.count == 15


def test_each_step_begins_with_what_all_earlier_steps_measured() -> None:
    policy, meter = scripted(Request((0, 1, 2), pulls=2)), FakeMeter(spread(UNITS))
    selection = select(meter, UNITS, policy=policy, goal=Count(6))
    for step, given in enumerate(policy.beliefs):
        earlier = [pull for pull in selection.trace if pull.step < step]
        left = set(UNITS) - set(selection.units[:step])
        assert len(given) == len(left)
        measured = {unit: [d for pull in earlier if pull.unit == unit for d in pull.damages] for unit in left}
        known = sorted(float(np.mean(damages)) for damages in measured.values() if damages)
        assert sorted(belief.mean for belief in given if belief.count) == pytest.approx(known)
        assert sorted(belief.count for belief in given) == sorted(map(len, measured.values()))
    assert sum(b.count > 0 for b in policy.beliefs[-1]) > 3


def test_a_prior_is_what_the_first_step_begins_with() -> None:
    prior = {UNITS[4]: Belief(0.1, 0.01, 3), UNITS[9]: Belief(-0.2, 0.02, 5)}
    policy = scripted(Request((0,)))
    select(FakeMeter(spread(UNITS)), UNITS, policy=policy, goal=Count(1), prior=prior)
    assert [belief for belief in policy.beliefs[0] if belief.count] in ([*prior.values()], [*prior.values()][::-1])


def test_the_paper_s_policies_and_greedy_do_not_look_at_a_prior() -> None:
    prior = {unit: Belief(float(i % 5), 0.01, 4) for i, unit in enumerate(UNITS)}
    for policy in (UCB(), Thompson(), Greedy()):
        plain, given = (select(FakeMeter(spread(UNITS)), UNITS, policy=policy, ratio=0.1, prior=p) for p in (None, prior))
        assert given == plain


# With a real meter


class Stopping(Listener):
    """Stops the search after a pull."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at = at

    def pull(self, progress: Progress) -> None:
        super().pull(progress)
        if len(self.pulls) == self.at:
            raise KeyboardInterrupt


def search(
    name: str, policy: Policy, target: str, *, stack: int = 1, lanes: int = 1, stop_at: int | None = None, **more: Any
) -> Selection:
    """Three steps of six pulls on a tiny model of its own; `stop_at` is the pull after which it is stopped."""
    model = FAMILIES_TINY[name]()
    units = candidate_units(model, target, GROUP)
    meter = DamageMeter(model, tiny_batches(model, 5), batches_per_pull=2, stack=stack, lanes=lanes)
    settings: dict[str, Any] = {"ratio": 3 / len(units), "pulls_per_step": 6, "watcher": Stopping(stop_at)}
    policy = Auto(Budget(18, PULLS)) if isinstance(policy, Auto) else with_pool(policy, 4)
    selection = select(meter, units, policy=policy, **settings | more)
    assert len(selection.units) == 3
    if isinstance(policy, Auto):
        assert 9 <= selection.pulls <= 18  # three arms, then the doubtful ones unless the first three settle it
    else:
        assert selection.pulls == 18
    return selection


def assert_same_but_for_last_digits(found: Selection, expected: Selection) -> None:
    assert found.units == expected.units
    assert found.forwards == expected.forwards
    for ours, theirs in zip(found.trace, expected.trace, strict=True):
        losses: dict[str, Any] = {name: getattr(theirs, name) for name in ("base_losses", "masked_losses", "damage", "reward")}
        assert replace(ours, **losses) == theirs
        assert ours.base_losses == pytest.approx(theirs.base_losses, rel=1e-6)
        assert ours.masked_losses == pytest.approx(theirs.masked_losses, rel=1e-6)


@pytest.mark.slow
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
