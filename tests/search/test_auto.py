"""What `auto` adds: gradients that foretell damages, posteriors, a budget for the whole search, and several units a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes import UNITS, FakeMeter, spread, written
from secateur.files.journal import Journal
from secateur.model.families import candidate_units
from secateur.model.losses import batch_loss
from secateur.model.zeroing import zeroed
from secateur.search.damage import DamageMeter
from secateur.search.policies import (
    GRADIENT_PASSES,
    PULL_PASSES,
    PULLS,
    Auto,
    Belief,
    Budget,
    Heard,
    Moment,
    Posterior,
    Slope,
    Spent,
)
from secateur.search.select import Passes, select
from secateur.selection import Pull, Selection
from secateur.units import HEAD, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, tiny_batches

# Gradients that foretell damages


@pytest.mark.parametrize(("name", "target"), [("llama", HEAD), ("vit", MLP)])
def test_the_slopes_are_the_first_and_second_order_terms_of_removal(name: str, target: str) -> None:
    model = FAMILIES_TINY[name]()
    units, batches = candidate_units(model, target, GROUP), tiny_batches(model, 4)
    meter = DamageMeter(model, batches, batches_per_pull=1)
    meter.commit(units[0])
    slopes = meter.slopes(units[1:], 4)
    assert meter.gradient_batches == 4
    with zeroed(model, [units[0]]):
        gradients = np.array([examples_gradient(model, unit, batches) for unit in units[1:]])
    tokens = 28 / 3 if name == "llama" else 1  # labels that count in a text
    assert [slope.second for slope in slopes] == pytest.approx(tokens * (gradients**2).mean(1) / 2, rel=5e-3, abs=1e-7)
    assert [slope.first.mean for slope in slopes] == pytest.approx(-gradients.mean(1), rel=5e-3, abs=5e-4)
    assert [slope.first.variance for slope in slopes] == pytest.approx(gradients.var(1, ddof=1), rel=5e-3, abs=1e-7)
    assert {slope.first.count for slope in slopes} == {gradients.shape[1]}
    rows = gradients.shape[1] // 4
    drawn = [meter.draw()[0] for _ in range(4)]
    assert sorted(drawn) == [0, 1, 2, 3]  # the batches of the gradients, each once
    for i in drawn:
        expected = -gradients[:, rows * i : rows * (i + 1)].mean(1)
        found = [meter.firsts(unit, (i,))[0] for unit in units[1:]]
        assert found == pytest.approx(expected, rel=5e-3, abs=2e-3)
    meter.commit(units[1])
    assert meter.firsts(units[2], (0,)) == ()  # they were taken under another mask


def examples_gradient(model: Any, unit: Unit, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """The derivative of each example's loss in the unit's mask, by finite differences in float64."""
    from secateur.model.families import anatomy, layer_of

    step, found = 1e-4, []
    model = model.double()
    (part,) = layer_of(anatomy(model), unit).ranges(unit)
    scale = 1.0

    def multiply(module: Any, args: Any) -> Any:
        x = args[0].clone()
        x[..., list(part.channels)] *= scale
        return (x, *args[1:])

    handle = part.projection.register_forward_pre_hook(multiply)
    try:
        with torch.inference_mode():
            for batch in batches:
                rows = len(batch["labels"])
                share = rows / counted(batch["labels"])
                for row in range(rows):
                    one, values = {key: x[row : row + 1] for key, x in batch.items()}, []
                    for scale in (1 + step, 1 - step):  # noqa: B007 (the hook reads it)
                        values.append(_loss64(model, one) * share)
                    found.append((values[0] - values[1]) / (2 * step))
    finally:
        handle.remove()
        model.float()
    return found


def counted(labels: torch.Tensor) -> int:
    return int((labels[:, 1:] != -100).sum()) if labels.dim() == 2 else len(labels)


def _loss64(model: Any, batch: dict[str, torch.Tensor]) -> float:
    given = {key: x.double() if x.is_floating_point() else x for key, x in batch.items() if key != "labels"}
    logits, labels = model(**given).logits, batch["labels"]
    if labels.dim() == 2:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return float(torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum"))


def test_every_batch_gives_gradients_once_before_any_gives_them_again() -> None:
    model = FAMILIES_TINY["gpt2"]()
    meter = DamageMeter(model, tiny_batches(model, 5))
    order = [meter._next_gradient_batch() for _ in range(10)]
    assert sorted(order[:5]) == sorted(order[5:]) == list(range(5))
    again = DamageMeter(model, tiny_batches(model, 5))
    assert [again._next_gradient_batch() for _ in range(10)] == order


# Posteriors


def sloped(first: float, second: float, *, noise: float = 1e-6, count: float = 1000, **more: Any) -> Belief:
    """A belief whose first-order term has this much noise left after so many examples."""
    return Belief(slope=Slope(Moment(first, noise * count, count), second), **more)


def test_without_evidence_the_posterior_is_what_gradients_foretell() -> None:
    posterior = Posterior([sloped(0.1, 0.2), sloped(-0.1, 0.05)], carry=0.5)
    assert posterior.means == pytest.approx([0.3, -0.05], rel=1e-3)


def test_first_order_terms_count_as_little_as_their_noise_explains_of_them() -> None:
    rng = np.random.default_rng(0)
    firsts = rng.normal(0, 0.1, 400)
    for noise, trust in ((0.0025, 0.75), (0.02, 0.0)):  # a quarter of their square, and more than all of it
        posterior = Posterior([sloped(first, 0.2, noise=noise) for first in firsts.tolist()], carry=0.5)
        assert posterior.means - 0.2 == pytest.approx(trust * firsts, abs=0.01)


@pytest.mark.parametrize("n", [4, 8, 40])
def test_what_few_examples_say_by_chance_is_not_taken_for_a_slope(n: int) -> None:
    """The slopes are 0, and noise and means are estimated from n examples each."""
    examples = np.random.default_rng(1).normal(0, 1, (2000, n))
    beliefs = [sloped(one.mean(), 0.2, noise=one.var(ddof=1) / n, count=n) for one in examples]
    found = Posterior(beliefs, carry=0.5).means - 0.2
    assert np.abs(found).mean() < 0.1 * np.abs(examples.mean(1)).mean()


def test_measurements_outweigh_what_gradients_foretell_as_they_grow() -> None:
    posterior = Posterior([sloped(0, 0.3), sloped(0, 0.1), sloped(0, 0.2)], carry=0.5)
    rng, distances = np.random.default_rng(0), []
    for _ in range(60):
        posterior.hear([Heard(0, (0.02 + 0.02 * rng.normal(),), 0.5), Heard(1, (0.3 + 0.02 * rng.normal(),), 0.5)])
        distances.append(abs(float(posterior.means[0]) - 0.02))
    assert distances[-1] < 0.01 < distances[0]
    assert posterior.means[0] < posterior.means[2] < posterior.means[1]
    assert posterior.variances[0] < posterior.variances[2]  # the third was never measured


def test_the_first_order_term_of_a_batch_is_taken_off_what_was_measured_on_it() -> None:
    """The damages of the two arms differ by 0.1 in truth; a noise of 1 is in the damage and in the first-order term alike."""
    rng = np.random.default_rng(1)
    found = {}
    for known in (True, False):
        posterior = Posterior([sloped(0, 0.2), sloped(0, 0.2)], carry=0.5)
        for _ in range(20):
            noise = rng.normal(0, 1, 2)
            posterior.hear(
                [Heard(arm, (0.2 + 0.1 * arm + n,), 0.5, firsts=(n,) if known else ()) for arm, n in enumerate(noise.tolist())]
            )
        found[known] = posterior.means
    assert found[True] == pytest.approx([0.2, 0.3], abs=0.01)
    assert abs(found[False][1] - 0.3) > 0.03


def test_without_gradients_arms_that_were_not_measured_are_believed_to_be_like_the_others() -> None:
    posterior = Posterior([Belief()] * 3, carry=0.5)
    for _ in range(4):
        posterior.hear([Heard(0, (0.1, 0.12), 0.5), Heard(1, (0.3, 0.32), 0.5)])
    assert posterior.means[0] < posterior.means[2] < posterior.means[1]
    assert posterior.means[2] == pytest.approx(0.21, abs=0.01)


def test_what_earlier_steps_measured_counts_as_much_as_carry_says() -> None:
    before = Moment(0.2, 0.0001, 8), Moment(0.1, 0.0001, 8)
    known = [sloped(0, 0.15, rest=rest) for rest in before]
    assert Posterior(known, carry=1).means == pytest.approx([0.2, 0.1], abs=0.005)
    assert Posterior(known, carry=0).means == pytest.approx([0.15, 0.15])


def test_the_outlook_says_which_arms_are_among_the_best_and_what_the_choice_may_cost() -> None:
    clear = Posterior([sloped(0, second) for second in (0.1, 0.2, 0.3, 5.0)], carry=0.5)
    clear.variances = np.full(4, 1e-12)
    sound, rng = np.ones(4, dtype=bool), np.random.default_rng(0)
    chances, regret = clear.outlook(2, sound, rng)
    assert chances.tolist() == [1, 1, 0, 0] and regret == pytest.approx(0, abs=1e-9)
    assert clear.outlook(2, np.array([False, True, True, True]), rng)[0].tolist() == [0, 1, 1, 0]
    even = Posterior([sloped(0, 0.1)] * 4, carry=0.5)
    even.variances = np.full(4, 0.01)
    chances, regret = even.outlook(1, sound, rng)
    assert chances == pytest.approx([0.25] * 4, abs=0.04)
    assert regret == pytest.approx(0.1 * 1.03, abs=0.01)  # the least of four standard normal numbers is -1.03 on average


# The search


def found_by(meter: Any, k: int, pulls: int = 24, **options: Any) -> Selection:
    """A search that may make so many pulls for each unit, and as many passes' worth of gradients."""
    return select(meter, UNITS, policy=Auto(Budget(pulls * k, PULLS)), ratio=k / 36, **options)


class Foretelling(FakeMeter):
    """Gradients that say the truth, twice as large."""

    gradient_batches = 0

    def has_gradients(self, units: Any) -> bool:
        return True

    def slopes(self, units: Any, n_batches: int) -> list[Slope]:
        self.gradient_batches += n_batches
        return [Slope(Moment(0.0, 0.0, 1), 2 * self.damages[unit]) for unit in units]

    def firsts(self, unit: Unit, batches: Any) -> tuple[float, ...]:
        return (0.0,) * len(batches)


def test_passes_with_gradients_are_counted_three_times_and_kept_in_the_file(tmp_path: Path) -> None:
    model = FAMILIES_TINY["gpt2"]()
    units = candidate_units(model, HEAD)
    meter = DamageMeter(model, tiny_batches(model, 4))
    selection = select(meter, units, policy=Auto(Budget(30)), ratio=2 / len(units))
    assert selection.gradient_batches == meter.gradient_batches > 2
    gradients = 3 * meter.gradient_batches
    assert selection.forwards == meter.forwards + gradients == sum(pull.forwards for pull in selection.trace) + gradients
    selection.save(tmp_path / "selection.json")
    assert Selection.load(tmp_path / "selection.json").forwards == selection.forwards


def test_at_most_eight_steps_choose_any_number_of_units_and_each_was_measured() -> None:
    for k in (4, 8, 20):
        selection = found_by(Foretelling(spread(UNITS)), k)
        assert len(set(selection.units)) == k == len(selection.steps)
        assert len({pull.step for pull in selection.trace}) <= 8
        assert set(selection.units) <= {pull.unit for pull in selection.trace}
        assert [step.step for step in selection.steps] == list(range(k))


def test_gradients_that_say_the_truth_lead_to_the_best_units() -> None:
    damages = spread(UNITS)
    best = set(sorted(UNITS, key=damages.__getitem__)[:4])
    assert set(found_by(Foretelling(damages, noise=0.001), 4).units) == best


def test_gradients_that_lie_are_corrected_by_measurements() -> None:
    damages = spread(UNITS)

    class Lying(Foretelling):
        def slopes(self, units: Any, n_batches: int) -> list[Slope]:
            return [Slope(Moment(0.0, 0.0, 1), 0.1 if self.damages[unit] > 0.05 else 0.11) for unit in units]

    chosen = found_by(Lying(damages, noise=0.001), 4, pulls=144).units
    assert max(damages[unit] for unit in chosen) <= sorted(damages.values())[7]


def test_a_choice_that_is_settled_spends_no_more_pulls() -> None:
    clear = {unit: 0.001 if unit in UNITS[:1] else 0.5 for unit in UNITS}
    noisy = found_by(Foretelling(dict.fromkeys(UNITS, 0.1), noise=0.5), 1, pulls=64).pulls
    assert found_by(Foretelling(clear, noise=1e-3), 1, pulls=64).pulls < noisy


@pytest.mark.parametrize("stop_at", [1, 13, 40])
def test_a_search_of_several_units_a_step_that_was_stopped_goes_on_to_the_same(stop_at: int, tmp_path: Path) -> None:
    whole = found_by(Foretelling(spread(UNITS)), 12)

    class Killed(Exception):
        pass

    class Stopped(Foretelling):
        def stop(self) -> None:
            raise Killed

    path = tmp_path / "journal.jsonl"
    with pytest.raises(Killed), Journal(path, {}) as journal:
        found_by(Stopped(spread(UNITS), stop_at=stop_at), 12, journal=journal)
    with Journal(path, {}) as journal:
        assert journal.n_replayed == stop_at
        assert written(found_by(Foretelling(spread(UNITS)), 12, journal=journal)) == written(whole)


def test_the_budget_of_forwards_is_kept_and_what_a_step_leaves_goes_to_the_next() -> None:
    model = FAMILIES_TINY["gpt2"]()
    units = candidate_units(model, HEAD)
    for budget in (40, 120):
        meter = DamageMeter(model, tiny_batches(model, 4), batches_per_pull=1)
        selection = select(meter, units, policy=Auto(Budget(budget)), ratio=3 / len(units))
        assert 0.4 * budget < selection.passes < 1.15 * budget
        assert selection.passes == selection.steps[-1].passes
        passes = [point[0] for point in selection.progress]
        assert passes == sorted(passes) and len(passes) == 3


def test_a_budget_of_pulls_is_kept() -> None:
    for budget in (2, 12, 40, 100):
        selection = select(Foretelling(spread(UNITS)), UNITS, policy=Auto(Budget(budget, PULLS)), ratio=4 / 36)
        assert min(4, budget) <= selection.pulls <= budget


def test_units_far_from_the_border_are_not_measured_where_pulls_are_few(tmp_path: Path) -> None:
    damages = spread(UNITS)
    selection = select(Foretelling(damages, noise=0.001), UNITS, policy=Auto(Budget(12, PULLS)), ratio=24 / 36)
    assert 8 <= selection.pulls <= 12 and set(selection.units) == set(sorted(UNITS, key=damages.__getitem__)[:24])
    unmeasured = [step for step in selection.steps if not step.unit_pulls]
    assert len(unmeasured) > 8 and all(math.isfinite(step.damage) and math.isnan(step.mean_reward) for step in unmeasured)
    assert all(step.sure is None or 0 <= step.sure <= 1 for step in selection.steps)
    selection.save(tmp_path / "selection.json")
    assert Selection.load(tmp_path / "selection.json").units == selection.units


@pytest.mark.parametrize("amount", [4, 18, 40, 80, 300])
def test_a_budget_of_forwards_is_for_any_number_of_units(amount: int) -> None:
    policy, spent, left = Auto(Budget(amount)), Spent(), 340
    while left:
        plan = policy.plan(340, left, spent, gradients=True)
        spent = Spent(
            spent.passes + GRADIENT_PASSES * plan.gradient_batches + PULL_PASSES * plan.pulls, spent.pulls + plan.pulls
        )
        left -= plan.units
    assert 0.7 * amount < spent.passes <= 1.05 * amount


def test_experts_and_losses_without_gradients_are_searched_by_measurements_alone() -> None:
    model = FAMILIES_TINY["gpt2"]()
    units = candidate_units(model, HEAD)

    def stiff(model: Any, batch: Any) -> torch.Tensor:
        return batch_loss(model, batch).detach()

    for loss, looks in ((stiff, False), (batch_loss, True)):
        meter = DamageMeter(model, tiny_batches(model, 4), loss=loss, batches_per_pull=1)
        assert meter.has_gradients(units) is looks
        selection = select(meter, units, policy=Auto(Budget(40)), ratio=2 / len(units))
        assert len(selection.units) == 2 and (selection.gradient_batches > 0) is looks


def test_passes_count_a_run_from_the_first_block_that_is_new_in_it() -> None:
    passes = Passes(4)

    def pull(unit: Unit, *batches: int) -> Pull:
        losses = (0.0,) * len(batches)
        return Pull(0, unit, batches, losses, losses, 0.0, 0.5, 1)

    passes.add(pull(Unit(HEAD, 0, 0), 7))
    assert passes.count == 1 + 1  # the base run and the masked one, both from the first block
    passes.add(pull(Unit(HEAD, 3, 0), 7))
    assert passes.count == 2 + 1 / 4  # the base run is there
    passes.add(pull(Unit(HEAD, 3, 0), 7))
    assert passes.count == 2 + 1 / 4  # so is this one
    passes.commit(Unit(HEAD, 2, 1))
    passes.commit(Unit(HEAD, 3, 1))
    passes.add(pull(Unit(HEAD, 1, 0), 7, 8))
    assert passes.count == 2.25 + 2 / 4 + 3 / 4 + 1 + 3 / 4  # the old batch again from block 2 on, the new one whole
