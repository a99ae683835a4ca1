from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes import POLICIES, UNITS, FakeMeter, spread, with_pool, written
from secateur.errors import SettingError
from secateur.files.journal import Journal
from secateur.search.goals import Count, Goal, Quota, Share
from secateur.search.policies import UCB, Policy
from secateur.search.select import Screen, select, select_by_score
from secateur.selection import Reached, Selection
from secateur.units import HEAD, MLP, Unit, enumerate_units
from worlds import Listener

BOTH = enumerate_units([6] * 3, [64] * 3, target="both", group_width=16)  # 18 heads and 12 groups
ALL = len(BOTH)


def goal_of(costs: Mapping[Unit, float], share: float) -> Share:
    """A cost of which each unit has its own part, whatever else is out."""
    return Share("pounds", share, lambda some: 1 - sum(costs[unit] for unit in some), costs)


def by_kind(head: float, mlp: float) -> dict[Unit, float]:
    return {unit: head if unit.kind == HEAD else mlp for unit in BOTH}


def quiet(damages: Mapping[Unit, float], policy: Policy, **settings: Any) -> Selection:
    """Every unit is tried at every step, without noise."""
    meter = FakeMeter(damages, noise=0)
    return select(meter, list(damages), policy=with_pool(policy, ALL), pulls_per_step=2 * ALL, **settings)


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

    goal = Share("threes", 0.5, left, dict.fromkeys(UNITS, 0.0))
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


def test_an_unreachable_goal_is_refused_with_the_figures() -> None:
    with pytest.raises(SettingError, match=r"30.* 34\.0% .*pounds.* 20\.0% "):
        goal_of(by_kind(0.01, 0.04), 0.2)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, 2.0, math.nan])
def test_a_goal_of_no_share_is_refused(share: float) -> None:
    with pytest.raises(SettingError, match=f" {share} .*pounds"):
        goal_of(by_kind(0.01, 0.04), share)


def test_a_search_with_a_goal_says_how_many_steps_it_may_take_and_ends_at_the_last() -> None:
    listener = Listener()
    chosen = quiet(spread(BOTH), UCB(), goal=goal_of(by_kind(0.02, 0.02), 0.81), watcher=listener)
    assert len(chosen.units) == 10
    assert [progress.n_steps for progress in listener.pulls] == [10] * 10 * 2 * ALL


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
    found = [select_by_score(damages, goal=quota)]
    found += [select(FakeMeter(damages), UNITS, policy=policy, goal=quota, pulls_per_step=5) for policy in POLICIES]
    scores = spread(UNITS)
    found.append(select(FakeMeter(damages), UNITS, policy=UCB(), goal=quota, pulls_per_step=5, screen=Screen(scores, 3)))
    for selection in found:
        assert Counter(unit.layer for unit in selection.units) == room
        assert len(set(selection.units)) == quota.n_steps([]) == quota.n_steps(selection.units) == sum(room.values())
    if not broken:  # of each cell, those of lowest score
        for layer, n in room.items():
            lowest = sorted((unit for unit in UNITS if unit.layer == layer), key=scores.__getitem__)[:n]
            assert {unit for unit in found[0].units if unit.layer == layer} == set(lowest)


def test_a_quota_made_for_a_share_fills_the_quota_weighs_by_the_share_and_reports_it() -> None:
    costs = {unit: 1 / 36 if unit.index % 2 else 1 / 72 for unit in UNITS}
    share = goal_of(costs, 0.9)
    quota = layers_quota(dict.fromkeys(range(6), 1))
    both = Quota(quota.cells, quota.room, share)
    chosen = select_by_score(spread(UNITS), goal=both).units
    assert len(chosen) == 6
    for unit in chosen:  # the lowest score for its cost
        rivals = [other for other in UNITS if other.layer == unit.layer]
        assert unit == min(rivals, key=lambda other: spread(UNITS)[other] / share.weight(other))
    for policy in POLICIES:
        searched = select(FakeMeter(spread(UNITS)), UNITS, policy=policy, goal=both, pulls_per_step=4)
        assert len(searched.units) == 6
    assert [both.weight(unit) for unit in UNITS] == [share.weight(unit) for unit in UNITS]
    assert {quota.weight(unit) for unit in UNITS} == {1.0}
    assert both.reached(chosen) == share.reached(chosen)
    assert quota.reached(chosen) is None


def test_a_quota_opens_what_has_room_and_shows_some_that_fill_it() -> None:
    quota = Quota({UNITS[0]: "a", UNITS[1]: "a", UNITS[2]: "b"}, {"a": 1, "b": 1})
    assert quota.example() == [UNITS[0], UNITS[2]]
    assert quota.open(UNITS, [UNITS[1]]) == [UNITS[2]]
    assert quota.open(UNITS, quota.example()) == []
    assert quota.n_steps([]) == 2


def test_a_count_opens_every_unit_and_weighs_them_alike() -> None:
    goal = Count(3)
    assert [goal.n_steps(UNITS[:n]) for n in range(4)] == [3] * 4
    assert goal.open(UNITS[2:], UNITS[:2]) == UNITS[2:]
    assert {goal.weight(unit) for unit in UNITS} == {1.0}
    assert goal.reached(UNITS[:3]) is None


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("k", [1, 5, 35])
def test_a_count_selects_just_that_many(policy: Policy, k: int) -> None:
    found = select(FakeMeter(spread(UNITS)), UNITS, policy=policy, goal=Count(k), ratio=0.5, pulls_per_step=3)
    assert len(set(found.units)) == k
    assert select_by_score(spread(UNITS), goal=Count(k)).units == tuple(sorted(UNITS, key=spread(UNITS).__getitem__)[:k])


def test_a_share_weighs_units_by_their_cost_and_says_what_is_left() -> None:
    goal = goal_of(by_kind(0.01, 0.04), 0.8)
    heads, groups = [unit for unit in BOTH if unit.kind == HEAD], [unit for unit in BOTH if unit.kind == MLP]
    mean = (18 * 0.01 + 12 * 0.04) / ALL
    assert [goal.weight(unit) for unit in heads] == pytest.approx([0.01 / mean] * 18)
    assert [goal.weight(unit) for unit in groups] == pytest.approx([0.04 / mean] * 12)
    assert goal.open(BOTH, heads) == BOTH
    assert goal.n_steps([]) == math.ceil(0.2 / mean)
    assert goal.n_steps(groups[:6]) == 6  # met
    reached = goal.reached(groups[:4])
    assert reached == Reached("pounds", 0.8, reached.got)
    assert reached.got == pytest.approx(0.84)


def test_every_goal_is_a_goal() -> None:
    share = goal_of(by_kind(0.01, 0.04), 0.8)
    goals: list[Goal] = [Count(2), share, Quota({BOTH[0]: 0}, {0: 1}), Quota({BOTH[0]: 0}, {0: 1}, share)]
    for goal in goals:
        chosen = select_by_score(spread(BOTH), goal=goal).units
        assert goal.n_steps(chosen) == len(chosen) > 0
