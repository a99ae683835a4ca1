"""A loss of the user's own: in Python as a function, on the command line by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakes import losses_of
from secateur.cut.repair import repair
from secateur.cut.surgery import shrink
from secateur.errors import SettingError, UnsupportedModel
from secateur.measure.evaluate import evaluate
from secateur.model.families import anatomy, task_of
from secateur.model.losses import Batch, batch_loss, own_loss, part_losses
from secateur.model.zeroing import zeroed
from secateur.search.damage import DamageMeter
from secateur.search.scores import unit_scores
from secateur.units import HEAD, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, randomised, tf, tiny_batch, tiny_batches
from worlds import Run, World, check_refused, one_sentence, prune_command

UNITS = [Unit(HEAD, 0, 1), Unit(HEAD, 1, 0), Unit(MLP, 2, 1, GROUP)]


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["input_ids"]).logits
    return logits.square().mean()


def squares(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["input_ids"]).logits
    return logits.square().mean((1, 2))


def by_hand(model: nn.Module, batch: Batch, units: list[Unit]) -> float:
    with torch.no_grad(), zeroed(model, units):
        return float(mean_square(model, batch))


# In Python


@pytest.mark.parametrize("loss", [mean_square, squares], ids=["a mean", "rows"])
@pytest.mark.parametrize("way", [{"lanes": 1}, {"lanes": 2, "cache_memory": 0}], ids=["cached", "two lanes"])
def test_a_meter_measures_a_loss_of_ones_own(loss: Any, way: dict[str, Any]) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    meter = DamageMeter(model, batches, loss=loss, **way)
    meter.commit(UNITS[0])
    for unit in UNITS[1:]:
        base, masked = losses_of(meter, unit, [0, 1])
        assert base == pytest.approx([by_hand(model, batch, UNITS[:1]) for batch in batches], rel=1e-5)
        assert masked == pytest.approx([by_hand(model, batch, [UNITS[0], unit]) for batch in batches], rel=1e-5)
        assert base != masked


def test_the_loss_of_each_row_can_be_stacked_and_a_mean_cannot() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)
    stacked = DamageMeter(model, batches, loss=squares, stack=2, lanes=1)
    found = list(stacked.measure([(unit, (0, 1)) for unit in UNITS]))
    for unit, one in zip(UNITS, found, strict=True):
        assert one.masked_losses == pytest.approx([by_hand(model, batch, [unit]) for batch in batches], rel=1e-5)
    with pytest.raises(SettingError, match=r"mean.*--stack 1"):
        losses_of(DamageMeter(model, batches, loss=mean_square, stack=2, lanes=1), UNITS[0], [0, 1])


@pytest.mark.parametrize(
    "given", [1.5, None, (torch.ones(3),), torch.ones(3, 2), torch.ones(0)], ids=["number", "none", "tuple", "matrix", "empty"]
)
def test_what_is_neither_a_mean_nor_rows_is_refused(given: Any) -> None:
    model = FAMILIES_TINY["gpt2"]()
    with pytest.raises(SettingError, match=r"must give a tensor"):
        batch_loss(model, tiny_batch(model), lambda model, batch: given)


def test_rows_are_shared_out_among_the_parts_in_order() -> None:
    model = FAMILIES_TINY["gpt2"]()
    rows = torch.tensor([1.0, 3.0, 10.0, 30.0])
    assert part_losses(model, {}, 2, lambda *_: rows).tolist() == [2, 20]
    assert part_losses(model, {}, 1, lambda *_: rows.double()).tolist() == [11]


def test_the_batches_may_come_from_a_generator_and_hold_what_the_loss_alone_knows() -> None:
    model = FAMILIES_TINY["gpt2"]()

    def batches() -> Iterator[dict[str, Tensor]]:
        for batch in tiny_batches(model, 3):
            yield {"tokens": batch["input_ids"], "weight": torch.rand(3, generator=torch.Generator().manual_seed(0))}

    def weighted(model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(input_ids=batch["tokens"]).logits
        return (logits.square().mean((1, 2)) * batch["weight"]).mean()

    meter = DamageMeter(model, batches(), loss=weighted, lanes=1)
    base, masked = losses_of(meter, UNITS[1], [0, 2])
    with torch.no_grad():
        expected = [float(weighted(model, batch)) for batch in batches()]
        assert base == pytest.approx([expected[0], expected[2]])
        with zeroed(model, UNITS[1:2]):
            assert masked == pytest.approx([float(weighted(model, batch)) for batch in batches()][::2])


def test_a_head_that_no_task_knows_is_measured_with_a_loss_of_ones_own() -> None:
    model = randomised(tf.BertForQuestionAnswering(FAMILIES_TINY["bert"]().config))
    with pytest.raises(UnsupportedModel, match=r"BertForQuestionAnswering.*loss of your own.*AutoModelForMaskedLM"):
        task_of(model)
    batches = [
        {key: batch[key] for key in ("input_ids", "attention_mask")} for batch in tiny_batches(FAMILIES_TINY["bert"](), 2)
    ]

    def start_at_one(model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(**batch).start_logits
        return F.cross_entropy(logits, torch.ones(len(logits), dtype=torch.long), reduction="none")

    for stack in (1, 2):
        meter = DamageMeter(model, batches, loss=start_at_one, stack=stack, lanes=1)
        for unit, one in zip(UNITS, meter.measure([(unit, (0, 1)) for unit in UNITS]), strict=True):
            with torch.no_grad(), zeroed(model, [unit]):
                assert one.masked_losses == pytest.approx(
                    [float(start_at_one(model, batch).mean()) for batch in batches], abs=1e-5
                )
    assert len(anatomy(model)) == 3
    found = evaluate(model, batches, loss=start_at_one)
    with torch.no_grad():
        expected = [float(start_at_one(model, batch).mean()) for batch in batches]
    assert found.batch_losses == pytest.approx(expected, abs=1e-5)


def test_evaluation_scores_and_repair_take_the_loss_too() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 4)
    found = evaluate(model, batches, loss=mean_square)
    expected = [by_hand(model, batch, []) for batch in batches]
    assert found.batch_losses == pytest.approx(expected) and found.loss == pytest.approx(sum(expected) / 4)
    assert (found.rows, found.perplexity, found.top1) == (4, None, None)
    scores = [unit_scores("taylor", model, UNITS, batches=batches, loss=loss) for loss in (None, mean_square, squares)]
    assert scores[0] != scores[1]
    assert list(scores[1].values()) == pytest.approx(list(scores[2].values()), rel=1e-4)
    small = shrink(model, UNITS)
    done = repair(model, UNITS, small, batches, loss=mean_square)
    assert done.losses["none"] == pytest.approx(by_hand(shrink(model, UNITS), batches[-1], []), rel=1e-4)


# By name


def write_loss(path: Path, body: str = "return model(input_ids=batch['input_ids']).logits.square().mean()") -> Path:
    path.write_text(f"import torch\n\n\ndef loss(model, batch):\n    {body}\n")
    return path


@pytest.mark.parametrize("way", ["fisher", "auto"])
def test_a_loss_without_gradient_is_refused_where_gradients_are_asked_for(way: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches = tiny_batches(model, 2)

    def wrong(model: nn.Module, batch: Batch) -> Tensor:
        best: Tensor = model(input_ids=batch["input_ids"]).logits.argmax(-1)
        return (best != 3).float().mean()

    with pytest.raises(SettingError, match="has no gradient: choose a --method"):
        if way == "fisher":
            unit_scores("fisher", model, UNITS, batches=batches, loss=wrong)
        else:
            DamageMeter(model, batches, loss=wrong).slopes(UNITS, 2)


def test_a_function_is_found_in_a_module_or_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_loss(tmp_path / "losses_of_mine.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = FAMILIES_TINY["gpt2"]()
    batch = tiny_batch(model)
    try:
        for name in (f"{file}:loss", "losses_of_mine:loss"):
            found = own_loss(name)
            assert found is not None and found(model, batch).item() == pytest.approx(by_hand(model, batch, []))
    finally:
        sys.modules.pop("losses_of_mine", None)
    assert own_loss(None) is own_loss("labels") is own_loss("distance") is None


@pytest.mark.parametrize(
    ("body", "name", "says"),
    [
        (None, "missing.py:loss", "no file"),
        ("x = 1", "mine.py:loss", "none called loss"),
        ("loss = 7", "mine.py:loss", "none called loss"),
        ("import quux_of_nowhere", "mine.py:loss", "ModuleNotFoundError"),
        ("1 / 0", "mine.py:loss", "ZeroDivisionError"),
        ("def (", "mine.py:loss", "SyntaxError"),
        (None, "quux_of_nowhere:loss", "ModuleNotFoundError"),
        (None, "quux.of.nowhere:loss", "ModuleNotFoundError"),
        (None, "math:loss", "none called loss"),
        (None, "folder/mine:loss", "ModuleNotFoundError"),
        (None, ".relative:loss", "TypeError"),
    ],
)
def test_a_name_without_a_function_is_one_sentence(
    body: str | None, name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if body is not None:
        Path("mine.py").write_text(body + "\n")
    with pytest.raises(SettingError) as caught:
        own_loss(name)
    one_sentence(caught, name.rpartition(":")[0], says)


# On the command line


def test_prune_chooses_judges_and_says_its_loss(world: World, tmp_path: Path, run: Run) -> None:
    file = write_loss(tmp_path / "mine.py")
    ran = run(*prune_command(world, tmp_path / "out", "--loss", f"{file}:loss", "--json"))
    assert (ran.code, ran.complaints) == (0, [])
    assert ran.document["dense"].keys() >= {"loss", "rows"} and "perplexity" not in ran.document["dense"]
    usual = run(*prune_command(world, tmp_path / "usual", "--json")).document
    assert usual["dense"]["loss"] != ran.document["dense"]["loss"]
    assert f"{file}:loss" in (tmp_path / "out" / "selection.json").read_text()
    again = check_refused(run(*prune_command(world, tmp_path / "out")))
    assert "loss" in again  # another loss is another run


def test_prune_takes_a_loss_from_a_module(world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_loss(tmp_path / "module_of_mine.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        ran = run(*prune_command(world, tmp_path / "out", "--loss", "module_of_mine:loss", "--json"))
    finally:
        sys.modules.pop("module_of_mine", None)
    assert (ran.code, ran.complaints) == (0, [])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("missing.py:loss", "missing.py"),
        ("mine.py:other", "other"),
        ("broken.py:loss", "quux_of_nowhere"),
        ("quux_of_nowhere:loss", "quux_of_nowhere"),
        ("mine.py", "module:function"),
        ("mine.py:", "module:function"),
        ("perplexity", "labels, distance"),
    ],
)
def test_a_loss_that_cannot_be_had_is_one_sentence_and_nothing_is_written(
    given: str, says: str, world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_loss(Path("mine.py"))
    Path("broken.py").write_text("import quux_of_nowhere\n")
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", "--loss", given)), tmp_path / "out")
    assert says in sentence


@pytest.mark.parametrize(
    ("body", "more", "says"),
    [
        ("return 1.5", (), "must give a tensor"),
        ("return model(input_ids=batch['input_ids']).logits.mean()", ("--stack", 2), "--stack 1"),
    ],
)
def test_a_loss_that_gives_something_else_is_one_sentence(
    body: str, more: tuple[object, ...], says: str, world: World, tmp_path: Path, run: Run
) -> None:
    file = write_loss(tmp_path / "mine.py", body)
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", "--loss", f"{file}:loss", *more)))
    assert says in sentence


def test_an_error_inside_the_loss_is_told_in_one_sentence(world: World, tmp_path: Path, run: Run) -> None:
    file = write_loss(tmp_path / "mine.py", "return batch['no_such_entry']")
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", "--loss", f"{file}:loss")))
    assert f"{file}:loss" in sentence and "KeyError: 'no_such_entry'" in sentence


def test_an_error_inside_a_function_that_python_was_given_comes_out_as_it_is() -> None:
    model = FAMILIES_TINY["gpt2"]()
    with pytest.raises(KeyError, match="no_such_entry"):
        batch_loss(model, tiny_batch(model), lambda model, batch: batch["no_such_entry"])
