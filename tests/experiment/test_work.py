from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import secateur as sc
from grids import records_of, write_grid
from secateur.errors import SettingError
from secateur.experiment import work
from secateur.experiment.grid import GridResult, read_grid, run_grid
from secateur.experiment.store import DONE, FAILED, RECORDS, read_store, read_tables
from secateur.experiment.tables import render
from secateur.judgement import Evaluation, Judgement
from secateur.measure.evaluate import evaluate
from secateur.measure.judge import judge
from secateur.selection import Selection
from secateur.steps import choose
from worlds import World

pytestmark = pytest.mark.usefixtures("fresh_workplace")

ALL_METHODS = '"random", "magnitude", "wanda", "taylor", "fisher", "greedy", "ucb", "ts", "auto"'


def with_all_methods(text: str) -> str:
    few = 'auto = { budget = "12pulls" }'
    return text.replace('"random", "magnitude", "fisher", "greedy", "ucb", "ts"]', f"{ALL_METHODS}]\n{few}")


@pytest.mark.parametrize("task", ["text", "image"])
def test_every_run_has_a_record_that_says_all_of_it(world: World, tmp_path: Path, task: str) -> None:
    grid = read_grid(write_grid(world, tmp_path, task, with_all_methods))
    assert run_grid(grid, tmp_path / "store") == GridResult(len(grid.runs), 0, 0)
    records, _ = read_store(tmp_path / "store")
    for run in grid.runs:
        record = records[run.key]
        assert (record.status, record.seed, record.model) == (DONE, run.seed, "Tiny")
        assert record.settings.method == run.settings.method
        assert set(record.versions) >= {"torch", "secateur"} and record.machine["threads"] >= 1
        judged = record.judgement
        assert judged and len(judged.zeroed.batch_losses) == len(judged.dense.batch_losses) > 1
        assert len(judged.units) == 3 and judged.zeroed_percent > 0
        searched = run.settings.method in ("greedy", "ucb", "ts", "auto")
        assert judged.pulls == (12 if searched else 0) or (run.settings.method == "auto" and judged.pulls >= 3)
        assert (judged.forwards > 0) == searched
        assert (record.score_passes > 0) == (run.settings.method in ("wanda", "taylor", "fisher"))
        assert record.total_seconds == record.selection_seconds + record.evaluation_seconds
    for table in read_tables(tmp_path / "store"):
        for cell in table.cells:
            assert all(len(cell.valid(method)) == len(runs) for method, runs in cell.runs.items())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "image"])
def test_a_record_is_what_prune_finds(world: World, tmp_path: Path, task: str) -> None:
    model, data = world.of(task)
    run_grid(read_grid(write_grid(world, tmp_path, task, with_all_methods)), tmp_path / "store")
    for record in records_of(tmp_path / "store"):
        if record.seed not in (None, record.settings.seed):
            continue  # a choice of weights alone, made with another seed
        settings = asdict(record.settings) | {"calibration": str(data), "device": "cpu"}
        del settings["model"]
        assert record.judgement == sc.prune(str(model), **settings).record.judgement, record.settings.method


def test_methods_of_a_cell_share_their_base_and_images_are_drawn_by_seed(world: World, tmp_path: Path) -> None:
    path = write_grid(world, tmp_path, "image", lambda text: text.replace("seq_len", "evaluation_size = 9\nseq_len"))
    run_grid(read_grid(path), tmp_path / "store")
    records = records_of(tmp_path / "store")
    bases = {(record.seed, record.data_digest, record.judgement and record.judgement.dense) for record in records}
    assert len(bases) == 2
    first, second = (record for record in records if record.settings.method == "magnitude")
    assert first.judgement and second.judgement and first.judgement.units == second.judgement.units
    assert first.data_digest != second.data_digest


def test_calibration_images_are_drawn_by_seed_for_whoever_looks_at_them(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[tuple[str, int, str]] = []

    def seen(opened: Any, calibration: Any, settings: Any, **more: Any) -> Selection:
        chosen.append((settings.method, settings.seed, calibration.source.digest))
        return choose(opened, calibration, settings, **more)

    def change(text: str) -> str:
        return with_all_methods(text).replace("seq_len", "calibration_size = 9\nseq_len")

    monkeypatch.setattr(work, "choose", seen)
    run_grid(read_grid(write_grid(world, tmp_path, "image", change)), tmp_path / "store")
    digests = {seed: digest for method, seed, digest in chosen if method == "ucb"}
    assert digests.keys() == {1, 2} and digests[1] != digests[2]
    for method in ("wanda", "taylor", "fisher"):
        found = sorted(choice for choice in chosen if choice[0] == method)
        assert found == [(method, seed, digest) for seed, digest in sorted(digests.items())]
    assert [choice for choice in chosen if choice[0] == "magnitude"] == [("magnitude", 1, digests[1])]


def test_on_texts_a_score_is_chosen_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    def seen(opened: Any, calibration: Any, settings: Any, **more: Any) -> Selection:
        chosen.append(settings.method)
        return choose(opened, calibration, settings, **more)

    monkeypatch.setattr(work, "choose", seen)
    run_grid(read_grid(write_grid(world, tmp_path, change=with_all_methods)), tmp_path / "store")
    assert {method: chosen.count(method) for method in chosen} == {
        "random": 2,
        "magnitude": 1,
        "wanda": 1,
        "taylor": 1,
        "fisher": 1,
        "greedy": 2,
        "ucb": 6,  # with the pool by rule, and with the two others of the ablation
        "ts": 2,
        "auto": 2,
    }


@pytest.mark.parametrize(("task", "bases"), [("text", 1), ("image", 2)])  # texts are the same for both seeds
def test_a_dense_model_is_evaluated_once_for_each_base(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, bases: int
) -> None:
    found: list[Evaluation] = []

    def counted(*given: Any) -> Evaluation:
        found.append(evaluate(*given))
        return found[-1]

    monkeypatch.setattr(work, "evaluate", counted)
    run_grid(read_grid(write_grid(world, tmp_path, task)), tmp_path / "store")
    assert len(found) == bases


def test_passes_that_a_screen_takes_are_counted(world: World, tmp_path: Path) -> None:
    screened = '[settings]\nscreen = 4\nscreen_by = "fisher"'
    grid = read_grid(write_grid(world, tmp_path, change=lambda text: text.replace("[settings]", screened)))
    run_grid(grid, tmp_path / "store")
    records, _ = read_store(tmp_path / "store")
    for run in grid.runs:
        assert (records[run.key].score_passes > 0) == (run.settings.method in ("fisher", "greedy", "ucb", "ts"))


# What goes wrong


def test_a_loss_that_is_not_finite_makes_a_failed_run_that_keeps_its_numbers(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(model: Any, selection: Any, batches: Any, **more: Any) -> Judgement:
        found = judge(model, selection, batches, **more)
        if selection.made_with.settings.method != "random":
            return found
        losses = (*found.zeroed.batch_losses[:-1], math.nan)
        return replace(found, zeroed=replace(found.zeroed, loss=math.nan, batch_losses=losses))

    monkeypatch.setattr(work, "judge", burst)
    grid = read_grid(write_grid(world, tmp_path))
    assert run_grid(grid, tmp_path / "store").failed == 2
    record = next(record for record in records_of(tmp_path / "store") if record.status == FAILED)
    assert record.judgement and record.judgement.units and math.isnan(record.judgement.zeroed.loss)
    assert f"finite on 1 of {len(record.judgement.zeroed.batch_losses)}" in record.reason
    spread = read_tables(tmp_path / "store")[0].cells[0].spread("random", "ppl_change_percent")
    assert spread and (spread.valid, spread.ended, spread.planned) == (0, 2, 2)
    # It is a fact about the run, and not tried again.
    assert run_grid(grid, tmp_path / "store", retry_failed=True).failed == 2


def dense_batch_burst(found: Judgement) -> Judgement:
    return replace(found, dense=replace(found.dense, batch_losses=(*found.dense.batch_losses[:-1], math.nan)))


def perplexity_burst(found: Judgement) -> Judgement:
    return replace(found, zeroed=replace(found.zeroed, perplexity=math.inf))


@pytest.mark.parametrize(
    ("burst", "reason"), [(dense_batch_burst, "dense.*finite on 1 of"), (perplexity_burst, "ppl_change_percent.*finite")]
)
def test_a_change_that_is_not_finite_is_a_failed_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, burst: Callable[[Judgement], Judgement], reason: str
) -> None:
    monkeypatch.setattr(work, "judge", lambda *given, **more: burst(judge(*given, **more)))
    grid = read_grid(write_grid(world, tmp_path))
    assert run_grid(grid, tmp_path / "store").failed == len(grid.runs)
    assert all(re.search(reason, record.reason) for record in records_of(tmp_path / "store"))
    assert render(read_tables(tmp_path / "store"))


def test_a_dense_model_that_cannot_be_evaluated_is_a_failed_record_and_no_end(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*given: Any) -> None:
        raise RuntimeError("not enough memory")

    grid = read_grid(write_grid(world, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(work, "evaluate", too_large)
        assert run_grid(grid, tmp_path / "store") == GridResult(0, len(grid.runs), 0)
    assert all("not enough memory" in record.reason for record in records_of(tmp_path / "store"))
    assert run_grid(grid, tmp_path / "store", retry_failed=True) == GridResult(len(grid.runs), 0, 0)


def test_a_task_that_is_not_the_models_is_a_problem(world: World, tmp_path: Path) -> None:
    path = write_grid(
        world, tmp_path, change=lambda text: text.replace('task = "text"', 'task = "image"').replace('"4"', '"9"')
    )
    result = run_grid(read_grid(path), tmp_path / "store")
    assert result.done == 0 and all(word in result.problems[0] for word in ("task", "'image'", "'text'"))


def test_a_variable_of_the_environment_is_filled_in_and_not_recorded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(world.text_model.parent)
    grid = read_grid(write_grid(world, tmp_path, change=lambda text: text.replace(root, "$SECATEUR_TEST_DATA")))
    monkeypatch.delenv("SECATEUR_TEST_DATA", raising=False)
    result = run_grid(grid, tmp_path / "store")
    assert (result.done, len(result.problems)) == (0, 1) and "SECATEUR_TEST_DATA" in result.problems[0]
    monkeypatch.setenv("SECATEUR_TEST_DATA", root)
    assert run_grid(grid, tmp_path / "store").left == 0
    assert root not in (tmp_path / "store" / RECORDS).read_text()


@pytest.fixture
def own_world(world: World, tmp_path: Path) -> World:
    """A model for texts and its texts, to be changed."""
    copies = {name: tmp_path / "world" / name for name in ("text_model", "text")}
    for name, copy in copies.items():
        shutil.copytree(getattr(world, name), copy)
    return replace(world, **copies)


def without_random(text: str) -> str:
    return text.replace('"random", ', "")


def test_a_store_of_other_weights_is_not_added_to(own_world: World, tmp_path: Path) -> None:
    run_grid(read_grid(write_grid(own_world, tmp_path, change=without_random)), tmp_path / "store")
    weights = own_world.text_model / "model.safetensors"
    save_file({name: value * 1.01 for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
    work.forget()
    result = run_grid(read_grid(write_grid(own_world, tmp_path)), tmp_path / "store")
    assert (result.left, len(result.problems)) == (2, 1) and "weights" in result.problems[0]


def test_a_store_chosen_by_other_data_is_not_added_to(own_world: World, tmp_path: Path) -> None:
    run_grid(read_grid(write_grid(own_world, tmp_path, change=without_random)), tmp_path / "store")
    texts = own_world.text / "train.txt"
    texts.write_bytes(texts.read_bytes()[texts.stat().st_size // 3 :])
    work.forget()
    result = run_grid(read_grid(write_grid(own_world, tmp_path)), tmp_path / "store")
    assert (result.left, len(result.problems)) == (2, 1)
    assert "chose" in result.problems[0] and str(own_world.text) in result.problems[0]


def test_only_a_variable_of_the_name_itself_can_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECATEUR_PLACE", "/data/$HOME/x")
    monkeypatch.delenv("SECATEUR_NOWHERE", raising=False)
    assert work.expanded("$SECATEUR_PLACE/y") == "/data/$HOME/x/y"
    with pytest.raises(SettingError, match="SECATEUR_NOWHERE, which is not set"):
        work.expanded("${SECATEUR_NOWHERE}/y")
