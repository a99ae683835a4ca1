"""What `auto` adds: distances beside losses, gradients that foretell damages, posteriors, and several units a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes import UNITS, FakeMeter, spread, written
from secateur.data.batches import Batches
from secateur.data.load import with_reference
from secateur.files.journal import Journal
from secateur.model.families import candidate_units
from secateur.model.losses import BESIDE, REFERENCE, batch_loss, part_losses, part_losses_and_distances, reference_of
from secateur.model.zeroing import zeroed
from secateur.search.damage import DamageMeter
from secateur.search.policies import Auto, Belief, Heard, Moment, Posterior
from secateur.search.select import select
from secateur.selection import Pull, Selection, Source
from secateur.units import HEAD, MLP, Unit
from tiny import CAUSAL, FAMILIES_TINY, GROUP, IMAGES, MASKED, tiny_batches

LABELLED = [*CAUSAL, *MASKED, *IMAGES]
GONE = [Unit(HEAD, 0, 1), Unit(MLP, 1, 0, GROUP)]


def beside(model: torch.nn.Module, n: int) -> list[dict[str, torch.Tensor]]:
    """Batches with labels and, beside them, what the dense model gives."""
    with torch.inference_mode():
        return [{**batch, BESIDE: reference_of(model, batch)} for batch in tiny_batches(model, n)]


# Distances beside losses


@pytest.mark.parametrize("name", LABELLED)
def test_one_pass_gives_the_loss_by_labels_and_the_distance(name: str) -> None:
    model = FAMILIES_TINY[name]()
    both = beside(model, 2)
    joined = {key: torch.cat([batch[key] for batch in both]) for key in both[0]}
    with torch.inference_mode(), zeroed(model, GONE):
        losses, distances = part_losses_and_distances(model, joined, 2)
        for i, batch in enumerate(both):
            labelled = {key: x for key, x in batch.items() if key != BESIDE}
            by_distance = {**labelled, REFERENCE: batch[BESIDE]}
            assert float(losses[i]) == pytest.approx(float(batch_loss(model, labelled)), rel=1e-5)
            assert float(distances[i]) == pytest.approx(float(part_losses(model, by_distance, 1)[0]), rel=1e-4, abs=1e-6)
            assert float(distances[i]) > 1e-6


def test_labels_that_do_not_count_are_left_out_of_the_loss_beside_a_distance() -> None:
    model = FAMILIES_TINY["llama"]()
    batch = dict(tiny_batches(model, 1)[0])
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, -2:] = 0
    with torch.inference_mode():
        expected = float(batch_loss(model, batch))
        batch[BESIDE] = reference_of(model, batch)
        losses, distances = part_losses_and_distances(model, batch, 1)
    assert float(losses[0]) == pytest.approx(expected, rel=1e-5)
    assert float(distances[0]) == pytest.approx(0, abs=1e-6)  # nothing is zeroed


@pytest.mark.parametrize("name", ["gpt2", "vit"])
@pytest.mark.parametrize(("stack", "lanes"), [(1, 1), (2, 1), (1, 2)])
def test_a_meter_measures_both_and_a_cache_changes_neither(name: str, stack: int, lanes: int) -> None:
    model = FAMILIES_TINY[name]()
    batches = beside(model, 3)
    pulls = [(unit, (0, 2)) for unit in candidate_units(model, HEAD)[:4]]
    plain = list(DamageMeter(model, batches, cache_memory=0, lanes=1).measure(pulls))
    found = list(DamageMeter(model, batches, stack=stack, lanes=lanes).measure(pulls))
    for ours, theirs in zip(found, plain, strict=True):
        for part in ("base_losses", "masked_losses", "base_distances", "masked_distances"):
            assert len(getattr(ours, part)) == 2
            assert getattr(ours, part) == pytest.approx(getattr(theirs, part), rel=1e-5, abs=1e-7)
        assert ours.base_distances == pytest.approx((0, 0), abs=1e-6)  # nothing is committed yet
        assert min(ours.masked_distances) > 0


def test_batches_get_what_the_dense_model_gives_beside_their_labels() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = Batches(tiny_batches(model, 2), Source("tiny", "train"))
    found = with_reference(model, batches, beside=True)
    assert all({"labels", BESIDE} <= batch.keys() and REFERENCE not in batch for batch in found)


def test_distances_are_written_only_where_they_were_measured() -> None:
    plain = Pull(0, UNITS[0], (0,), (1.0,), (1.5,), 0.5, 0.4, 2)
    assert "base_distances" not in plain.to_json()
    both = Pull(0, UNITS[0], (0,), (1.0,), (1.5,), 0.5, 0.4, 2, (0.25,), (0.75,))
    assert both.distances == (0.5,)
    assert both.to_json()["masked_distances"] == (0.75,)
    with pytest.raises(ValueError, match="distance for each"):
        Pull(0, UNITS[0], (0,), (1.0,), (1.5,), 0.5, 0.4, 2, (0.25,), ())


# Gradients that foretell damages


@pytest.mark.parametrize(("name", "target"), [("llama", HEAD), ("vit", MLP)])
def test_the_slopes_are_the_first_and_second_order_terms_of_removal(name: str, target: str) -> None:
    model = FAMILIES_TINY[name]()
    units, batches = candidate_units(model, target, GROUP), tiny_batches(model, 4)
    meter = DamageMeter(model, batches)
    meter.commit(units[0])
    slopes = np.array(meter.slopes(units[1:], 4))
    assert slopes.shape == (len(units) - 1, 2)
    assert (slopes[:, 1] >= 0).all()
    assert meter.gradient_batches == 4
    with zeroed(model, [units[0]]):
        gradients = np.array([examples_gradient(model, unit, batches) for unit in units[1:]])
    tokens = 28 / 3 if name == "llama" else 1  # labels that count in a text
    assert slopes[:, 1] == pytest.approx(tokens * (gradients**2).mean(1) / 2, rel=5e-3, abs=1e-7)
    first = -gradients.mean(1)
    assert (np.abs(slopes[:, 0]) <= np.abs(first) * 1.01 + 1e-6).all()  # shrunk, never turned round
    assert (slopes[:, 0] * first >= -1e-9).all()


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


def test_without_evidence_the_posterior_is_what_gradients_foretell() -> None:
    posterior = Posterior([Belief(slopes=(0.1, 0.2)), Belief(slopes=(-0.1, 0.05))], carry=0.5)
    assert posterior.means == pytest.approx([0.3, -0.05])


def test_measurements_outweigh_what_gradients_foretell_as_they_grow() -> None:
    posterior = Posterior([Belief(slopes=(0.0, 0.3)), Belief(slopes=(0.0, 0.1)), Belief(slopes=(0.0, 0.2))], carry=0.5)
    rng, distances = np.random.default_rng(0), []
    for _ in range(60):
        posterior.hear([Heard(0, (0.02 + 0.02 * rng.normal(),), 0.5), Heard(1, (0.3 + 0.02 * rng.normal(),), 0.5)])
        distances.append(abs(float(posterior.means[0]) - 0.02))
    assert distances[-1] < 0.01 < distances[0]
    assert posterior.means[0] < posterior.means[2] < posterior.means[1]
    assert posterior.variances[0] < posterior.variances[2]  # the third was never measured


def test_distances_steady_noisy_damages_and_give_way_to_them() -> None:
    """Two arms of equal damage: by few measurements their distances decide, by many their damages."""

    def heard(n: int, bias: float) -> Posterior:
        posterior, rng = Posterior([Belief()] * 6, carry=0.5), np.random.default_rng(1)
        for _ in range(n):
            for arm in range(6):
                distance = 0.1 * arm + 0.01 * rng.normal()
                wrong = bias if arm == 0 else 0.0
                posterior.hear([Heard(arm, (distance + wrong + 0.5 * rng.normal(),), 0.5, distances=(distance,))])
        return posterior

    few = heard(2, bias=0.0)
    assert list(np.argsort(few.means)) == list(range(6))  # the damages' own noise, 0.5, would hide that order
    many = heard(400, bias=2.0)
    assert many.means[0] == max(many.means)  # the labels say that the first arm does harm


def test_what_earlier_steps_measured_counts_as_much_as_carry_says() -> None:
    known = [Belief(mean=0.2, variance=0.01, count=8), Belief(mean=0.1, variance=0.01, count=8)]
    assert Posterior(known, carry=1).means == pytest.approx([0.2, 0.1])
    forgotten = Posterior(known, carry=0)
    assert not np.isfinite(forgotten.means).any()
    with_distances = [Belief(0.2, 0.01, 8, distance=Moment(0.3, 0.01, 8), bias=Moment(-0.1, 0.01, 8))] * 2
    assert Posterior(with_distances, carry=1).means == pytest.approx([0.2, 0.2])


# The search


def found_by(meter: Any, k: int, **options: Any) -> Selection:
    return select(meter, UNITS, policy=Auto(), ratio=k / 36, pulls_per_step=options.pop("pulls", 24), **options)


class Foretelling(FakeMeter):
    """Gradients that say the truth, twice as large."""

    gradient_batches = 0

    def slopes(self, units: Any, n_batches: int) -> list[tuple[float, ...]]:
        return [(0.0, 2 * self.damages[unit]) for unit in units]


def test_passes_with_gradients_are_counted_three_times_and_kept_in_the_file(tmp_path: Path) -> None:
    model = FAMILIES_TINY["gpt2"]()
    units = candidate_units(model, HEAD)
    meter = DamageMeter(model, tiny_batches(model, 4))
    selection = select(meter, units, policy=Auto(), ratio=2 / len(units), pulls_per_step=12)
    assert selection.gradient_batches == meter.gradient_batches == 2
    assert selection.forwards == meter.forwards + 3 * 2 == sum(pull.forwards for pull in selection.trace) + 6
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

    class Lying(FakeMeter):
        gradient_batches = 0

        def slopes(self, units: Any, n_batches: int) -> list[tuple[float, ...]]:
            return [(0.0, 0.1 if self.damages[unit] > 0.05 else 0.11) for unit in units]

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
