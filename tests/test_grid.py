from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

import secateur as sc
from secateur.errors import SettingError, StoreError
from secateur.evaluate import evaluate
from secateur.experiment import work, workers
from secateur.experiment.grid import Grid, GridResult, read_grid, run_grid
from secateur.experiment.results import read_tables
from secateur.experiment.store import RECORDS, Store, read_store
from secateur.experiment.tables import render
from secateur.experiment.workers import Where
from secateur.prune import METHODS, choose_units, judge
from secateur.watcher import GridProgress
from test_prune import SEQ_LEN, World, make_world
from tiny import GROUP

RUNS = Path(__file__).parents[1] / "runs"
GRID = """
task = "{task}"
seeds = [1, 2]
target = "head"
ratios = [0.3]

[settings]
calibration = "{data}"
pulls_per_step = 4
group_width = %d
seq_len = %d

[models]
Tiny = "{model}"

[[table]]
number = "{number}"
methods = ["random", "magnitude", "fisher", "greedy", "ucb", "ts"]

[[table]]
number = "ablation"
methods = ["ucb", "greedy"]
vary.pool_size = [3, 4]
""" % (GROUP, SEQ_LEN)  # noqa: UP031 - the braces are for what differs
TIMINGS = {"selection_seconds", "evaluation_seconds", "total_seconds", "machine", "digest"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def fresh_workplace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_here", work.Workplace())


def written(world: World, folder: Path, task: str = "text", change: Callable[[str], str] = str) -> Path:
    model, data = world.of(task)
    text = GRID.replace("{task}", task).replace("{model}", str(model)).replace("{data}", str(data))
    path = folder / "tiny.toml"
    path.write_text(change(text.replace("{number}", "4" if task == "text" else "9")))
    return path


def lasting(folder: Path) -> dict[str, dict[str, Any]]:
    """The records without what differs from time to time and from machine to machine."""
    return {
        key: {name: value for name, value in record.items() if name not in TIMINGS}
        for key, record in read_store(folder)[0].items()
    }


# The files


def runs_of(grid: Grid) -> dict[str, int]:
    counts = dict.fromkeys((run.settings.method for run in grid.runs), 0)
    for run in grid.runs:
        counts[run.settings.method] += 1
    return counts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("table4", {m: 35 if m in ("random", "greedy", "ucb", "ts") else 7 for m in METHODS}),
        ("table6", {m: 15 if m in ("random", "greedy", "ucb", "ts") else 3 for m in METHODS}),
        ("table7", {"random": 20, "magnitude": 4, "greedy": 20, "ucb": 20, "ts": 20}),
        ("table8", dict.fromkeys(("greedy", "ts", "ucb"), 15)),
        ("table9", dict.fromkeys(("greedy", "ts", "ucb", "magnitude", "random"), 15)),
        ("table10", {"random": 18, "greedy": 18, "ucb": 18, "ts": 18, "magnitude": 2, "taylor": 1, "fisher": 1, "wanda": 1}),
        ("here-deit", {m: 10 if m == "greedy" else 5 for m in METHODS}),
    ],
)
def test_the_grids_of_the_papers_tables_have_its_runs(name: str, expected: dict[str, int]) -> None:
    assert runs_of(read_grid(RUNS / f"{name}.toml")) == expected


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_grid_file_reads(path: Path) -> None:
    grid = read_grid(path)
    assert grid.name == path.stem
    assert len({run.key for run in grid.runs}) == len(grid.runs) > 0
    json.dumps(grid.to_json())


def test_the_papers_protocol_is_read_off_its_tables() -> None:
    eight, nine, four = (read_grid(RUNS / f"table{n}.toml") for n in (8, 9, 4))
    for grid, greedy in ((eight, 64), (nine, 32)):
        for run in grid.runs:
            if run.settings.method in ("ucb", "ts", "greedy"):
                pulls = greedy if run.settings.method == "greedy" else 64
                assert (run.settings.pulls_per_step, run.settings.batches_per_pull) == (pulls, 1)
            assert (run.judging.size, run.settings.calibration_size, run.settings.batch_size) == (2000, 1024, 8)
            assert run.seed in (1, 2, 3, 42, 123)
    bandits = {run.key for grid in (eight,) for run in grid.runs if run.settings.method != "greedy"}
    assert bandits < {run.key for run in nine.runs}
    for run in four.runs:
        if run.settings.method in ("ucb", "ts", "greedy"):
            assert (run.settings.pulls_per_step, run.settings.batches_per_pull, run.settings.screen) == (32, 2, 48)
            assert (run.settings.temperature, run.settings.group_width) == (0.02, 32)
        assert (run.settings.seq_len, run.settings.calibration_size, run.judging.max_batches) == (128, 512, 80)


def test_the_choices_of_table_7_are_those_of_table_4() -> None:
    four, seven = (read_grid(RUNS / f"table{n}.toml") for n in (4, 7))
    assert {run.choice_key for run in seven.runs} < {run.choice_key for run in four.runs}
    assert not {run.key for run in seven.runs} & {run.key for run in four.runs}


def test_a_static_method_of_texts_is_run_once_and_one_of_images_is_chosen_once(world: World, tmp_path: Path) -> None:
    text = read_grid(written(world, tmp_path)).runs
    assert [run.seed for run in text if run.settings.method == "magnitude"] == [None]
    other = read_grid(written(world, tmp_path, change=lambda text: text.replace("[1, 2]", "[42, 1]"))).runs
    assert {run.key for run in text if run.seed is None} == {run.key for run in other if run.seed is None}
    images = [run for run in read_grid(written(world, tmp_path, "image")).runs if run.settings.method == "magnitude"]
    assert [run.seed for run in images] == [1, 2]
    assert len({run.choice_key for run in images}) == 1


def test_settings_that_a_method_does_not_use_make_no_second_run(world: World, tmp_path: Path) -> None:
    runs = read_grid(written(world, tmp_path)).runs
    assert sum(run.settings.method == "greedy" for run in runs) == 2  # its trials are not a pool of the size that is varied
    assert sum(run.settings.method == "ucb" for run in runs) == 6


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("ratios", "ratio"), "key in the file is 'ratio'.*Did you mean 'ratios'"),
        (("pulls_per_step", "pull_per_step"), "setting of table 4 is 'pull_per_step'.*Did you mean 'pulls_per_step'"),
        (('"ucb", "ts"]', '"ucb", "thompson"]'), "method of table 4 is 'thompson'"),
        (('"fisher"', '"fischer"'), "Did you mean 'fisher'"),
        (('target = "head"', 'target = "heads"'), "target is 'heads'.*Did you mean 'head'"),
        (('number = "4"', 'number = "5"'), "number of table 5, whose task is 'text', is '5'"),
        (('number = "4"', 'number = "9"'), "number of table 9, whose task is 'text', is '9'"),
        (('number = "4"', 'number = "4"\ngreedy = { evaluation_batches = 2 }'), "must be judged alike"),
        (('number = "4"', 'number = "4"\nucb = { batch_size = 2 }'), "must be judged alike"),
        (('task = "text"', 'task = "texts"'), "task of table 4 is 'texts'.*Did you mean 'text'"),
        (("ratios = [0.3]", "ratios = [1.3]"), "ratio is 1.3"),
        (("ratios = [0.3]", 'ratios = ["0.3"]'), "ratios of table 4 is"),
        (("ratios = [0.3]", "ratios = 0.3"), "ratios of the file is 0.3"),
        (("seeds = [1, 2]", "seeds = [1, 1]"), "without repeats"),
        (("seeds = [1, 2]", "seeds = []"), "seeds of table 4 is"),
        (("seeds = [1, 2]", ""), "has no seeds"),
        (("pulls_per_step = 4", 'pulls_per_step = "4"'), "pulls_per_step of table 4 is '4', but must be of the kind int"),
        (("pulls_per_step = 4", "pulls_per_step = true"), "must be of the kind int"),
        (("pulls_per_step = 4", "pulls_per_step = 0"), "pulls per step are 0"),
        (("pulls_per_step = 4", 'model = "gpt2"'), "setting of table 4 is 'model'"),
        (("vary.pool_size = [3, 4]", "vary.pool_sizes = [3, 4]"), "Did you mean 'pool_size'"),
        (("vary.pool_size = [3, 4]", "vary.pool_size = 3"), "vary of table ablation must name one setting"),
        (("[[table]]", "[table]"), "not valid TOML"),
        (("seeds = [1, 2]", "seeds = [1, 2"), "not valid TOML"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_in_one_sentence_that_names_the_file(
    world: World, tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    path = written(world, tmp_path, change=lambda text: text.replace(*change, 1))
    with pytest.raises(SettingError, match=complaint) as caught:
        read_grid(path)
    assert str(path) in str(caught.value)


def test_a_grid_without_a_table_or_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="Cannot read the grid"):
        read_grid(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(SettingError, match=r"there is no \[\[table\]\]"):
        read_grid(tmp_path / "empty.toml")


# The runs


def test_the_time_left_is_told_by_what_runs_of_the_kind_took(world: World, tmp_path: Path) -> None:
    run_grid(read_grid(written(world, tmp_path)), tmp_path / "store")
    records = list(read_store(tmp_path / "store")[0].values())
    further = read_grid(written(world, tmp_path, change=lambda text: text.replace("seeds = [1, 2]", "seeds = [1, 2, 3]")))
    told: list[GridProgress] = []
    run_grid(further, tmp_path / "store", progress=told.append)
    assert told[0].left == 6

    def mean(method: str) -> float:
        seconds = [record["total_seconds"] for record in records if record["settings"]["method"] == method]
        return float(sum(seconds) / len(seconds))

    # random, greedy (which has no pool), and the bandits with the pool by rule and with two others.
    assert told[0].seconds_left == pytest.approx(mean("random") + mean("greedy") + 3 * mean("ucb") + mean("ts"))


@pytest.mark.parametrize("task", ["text", "image"])
def test_every_run_has_a_record_that_says_all_of_it(world: World, tmp_path: Path, task: str) -> None:
    grid = read_grid(written(world, tmp_path, task))
    told: list[GridProgress] = []
    result = run_grid(grid, tmp_path / "store", progress=told.append)
    assert result == GridResult(len(grid.runs), 0, 0)
    assert [(p.done, p.left) for p in told] == [(i, len(grid.runs) - i) for i in range(len(grid.runs) + 1)]
    assert told[0].seconds_left is None and told[-1].seconds_left == 0
    records, _ = read_store(tmp_path / "store")
    for run in grid.runs:
        record = records[run.key]
        assert (record["status"], record["seed"], record["model"]) == ("done", run.seed, "Tiny")
        assert record["settings"]["method"] == run.settings.method
        assert set(record["versions"]) >= {"torch", "secateur"} and record["machine"]["threads"] >= 1
        assert len(record["pruned"]["batch_losses"]) == len(record["dense"]["batch_losses"]) > 1
        assert len(record["units"]) == 3 and record["zeroed_percent"] > 0
        searched = run.settings.method in ("greedy", "ucb", "ts")
        assert (record["pulls"] == 12) == searched and (record["forwards"] > 0) == searched
        assert (record["score_passes"] > 0) == (run.settings.method == "fisher")
        assert record["total_seconds"] == record["selection_seconds"] + record["evaluation_seconds"]
    for table in read_tables(tmp_path / "store"):
        for cell in table.cells:
            assert all(len(cell.valid(method)) == len(runs) for method, runs in cell.runs.items())


@pytest.mark.parametrize("task", ["text", "image"])
def test_a_record_is_what_prune_finds(world: World, tmp_path: Path, task: str) -> None:
    model, data = world.of(task)
    run_grid(read_grid(written(world, tmp_path, task)), tmp_path / "store")
    for record in read_store(tmp_path / "store")[0].values():
        settings = {k: v for k, v in record["settings"].items() if k not in ("model", "calibration")}
        if record["seed"] not in (None, settings["seed"]):
            continue  # a static choice of another seed's
        found = sc.prune(str(model), calibration=str(data), device="cpu", **settings).record
        for name in ("dense", "pruned", "units", "pulls", "forwards", "zeroed_percent", "unit_ratio"):
            assert record[name] == found[name], name


def test_methods_of_a_cell_share_their_base_and_images_are_drawn_by_seed(world: World, tmp_path: Path) -> None:
    path = written(world, tmp_path, "image", lambda text: text.replace("seq_len", "evaluation_size = 9\nseq_len"))
    run_grid(read_grid(path), tmp_path / "store")
    records = read_store(tmp_path / "store")[0].values()
    bases = {(r["seed"], r["data_digest"], json.dumps(r["dense"])) for r in records}
    assert len(bases) == 2
    magnitude = [r for r in records if r["settings"]["method"] == "magnitude"]
    assert magnitude[0]["units"] == magnitude[1]["units"]
    assert magnitude[0]["data_digest"] != magnitude[1]["data_digest"]


def test_a_dense_model_is_evaluated_once_for_each_base(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for task in ("text", "image"):
        calls: list[int] = []
        monkeypatch.setattr(work, "evaluate", lambda *args, calls=calls: [calls.append(1), evaluate(*args)][1])
        monkeypatch.setattr(work, "_here", work.Workplace())
        run_grid(read_grid(written(world, tmp_path, task)), tmp_path / task)
        counts.append(len(calls))
    assert counts == [1, 2]  # texts are the same for both seeds, images are drawn by seed


def test_what_has_a_record_is_not_done_again(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = read_grid(written(world, tmp_path))
    run_grid(grid, tmp_path / "store")
    before = (tmp_path / "store" / RECORDS).read_bytes()
    monkeypatch.setattr(work, "perform", lambda task: pytest.fail("it was done again"))
    assert run_grid(grid, tmp_path / "store") == GridResult(len(grid.runs), 0, 0)
    assert (tmp_path / "store" / RECORDS).read_bytes() == before


def test_a_choice_is_taken_over_from_the_store_and_not_made_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = read_grid(written(world, tmp_path))
    run_grid(grid, tmp_path / "store")
    elsewhere = tmp_path / "more"
    elsewhere.mkdir()
    (elsewhere / "test.txt").write_text("the old cat sees a small red bird near the tree and sings " * 30)
    path = written(world, tmp_path, change=lambda text: text.replace("ratios", f'data = ["{elsewhere}"]\nratios', 1))
    monkeypatch.setattr(work, "choose_units", lambda *a, **k: pytest.fail("units were chosen again"))
    assert run_grid(read_grid(path), tmp_path / "store").done == len(grid.runs)
    records = read_store(tmp_path / "store")[0]
    assert len(records) == 2 * len(grid.runs)
    for run, other in zip(grid.runs, read_grid(path).runs, strict=True):
        first, second = records[run.key], records[other.key]
        assert (first["units"], first["pulls"], first["data"]) == (second["units"], second["pulls"], "text")
        assert second["data"] == "more" and first["dense"] != second["dense"]


def test_a_run_that_raises_becomes_a_failed_record_and_the_grid_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = read_grid(written(world, tmp_path))
    choose = choose_units

    def breaks(model: Any, calibration: Any, settings: Any, **more: Any) -> Any:
        if settings.method == "ts":
            raise RuntimeError("the lamp went out\nand more of it")
        return choose(model, calibration, settings, **more)

    monkeypatch.setattr(work, "choose_units", breaks)
    assert run_grid(grid, tmp_path / "store") == GridResult(len(grid.runs) - 2, 2, 0)
    failed = [r for r in read_store(tmp_path / "store")[0].values() if r["status"] == "failed"]
    assert {r["settings"]["method"] for r in failed} == {"ts"}
    assert all(r["reason"].startswith("RuntimeError: the lamp went out. (test_grid.py:") for r in failed)
    monkeypatch.undo()
    assert run_grid(grid, tmp_path / "store").failed == 2
    assert run_grid(grid, tmp_path / "store", retry_failed=True) == GridResult(len(grid.runs), 0, 0)
    assert [c.spread("ts", c.metric).valid for c in read_tables(tmp_path / "store")[0].cells] == [2]  # type: ignore[union-attr]


def test_a_loss_that_is_not_finite_makes_a_failed_run_that_keeps_its_numbers(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def burst(model: Any, selection: Any, batches: Any, **more: Any) -> dict[str, Any]:
        found = judge(model, selection, batches, **more)
        if selection.settings["method"] == "random":
            losses = [*found["pruned"]["batch_losses"][:-1], float("nan")]
            found["pruned"] |= {"loss": float("nan"), "batch_losses": losses, "nonfinite_batches": 1}
        return found

    monkeypatch.setattr(work, "judge", burst)
    grid = read_grid(written(world, tmp_path))
    assert run_grid(grid, tmp_path / "store").failed == 2
    record = next(r for r in read_store(tmp_path / "store")[0].values() if r["status"] == "failed")
    assert record["reason"] == f"the loss is not finite on 1 of {len(record['pruned']['batch_losses'])} batches"
    assert record["pruned"]["loss"] == "nan" and record["units"]
    spread = read_tables(tmp_path / "store")[0].cells[0].spread("random", "ppl_change_percent")
    assert spread and (spread.valid, spread.ended, spread.planned) == (0, 2, 2)
    # It is a fact about the run, and not tried again.
    assert run_grid(grid, tmp_path / "store", retry_failed=True).failed == 2


def test_a_model_that_cannot_be_loaded_leaves_its_runs_and_the_others_are_done(world: World, tmp_path: Path) -> None:
    path = written(world, tmp_path, change=lambda text: text.replace("[models]", '[models]\nGone = "nowhere/at-all"'))
    grid = read_grid(path)
    result = run_grid(grid, tmp_path / "store")
    assert (result.done, result.failed, result.left) == (len(grid.runs) // 2, 0, len(grid.runs) // 2)
    assert len(result.problems) == 1 and "nowhere/at-all" in result.problems[0]


def test_a_task_that_is_not_the_models_is_a_problem(world: World, tmp_path: Path) -> None:
    path = written(world, tmp_path, change=lambda text: text.replace('task = "text"', 'task = "image"').replace('"4"', '"9"'))
    result = run_grid(read_grid(path), tmp_path / "store")
    assert result.done == 0 and "a model for 'text'" in result.problems[0]


def test_a_variable_of_the_environment_is_filled_in_and_not_recorded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(world.text_model.parent)
    grid = read_grid(written(world, tmp_path, change=lambda text: text.replace(root, "$SECATEUR_TEST_DATA")))
    monkeypatch.delenv("SECATEUR_TEST_DATA", raising=False)
    result = run_grid(grid, tmp_path / "store")
    assert (result.done, len(result.problems)) == (0, 1) and "SECATEUR_TEST_DATA, which is not set" in result.problems[0]
    monkeypatch.setenv("SECATEUR_TEST_DATA", root)
    assert run_grid(grid, tmp_path / "store").left == 0
    assert root not in (tmp_path / "store" / RECORDS).read_text()


def test_a_store_of_other_weights_is_not_added_to(world: World, tmp_path: Path) -> None:
    first = written(world, tmp_path, change=lambda text: text.replace('"random", ', ""))
    run_grid(read_grid(first), tmp_path / "store")
    weights = world.text_model / "model.safetensors"
    kept = weights.read_bytes()
    try:
        save_file({name: value * 1.01 for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
        work._here = work.Workplace()
        result = run_grid(read_grid(written(world, tmp_path)), tmp_path / "store")
    finally:
        weights.write_bytes(kept)
    assert (result.left, len(result.problems)) == (2, 1) and "other weights" in result.problems[0]


def test_a_store_chosen_by_other_data_is_not_added_to(world: World, tmp_path: Path) -> None:
    first = written(world, tmp_path, change=lambda text: text.replace('"random", ', ""))
    run_grid(read_grid(first), tmp_path / "store")
    texts = next(path for path in world.text.iterdir() if path.name.startswith("train"))
    kept = texts.read_bytes()
    try:
        texts.write_bytes(kept[len(kept) // 3 :])
        work._here = work.Workplace()
        result = run_grid(read_grid(written(world, tmp_path)), tmp_path / "store")
    finally:
        texts.write_bytes(kept)
    assert (result.left, len(result.problems)) == (2, 1) and "by other texts or images" in result.problems[0]


def test_a_dense_model_that_cannot_be_evaluated_is_a_failed_record_and_no_end(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*given: Any) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(work, "evaluate", too_large)
    grid = read_grid(written(world, tmp_path))
    assert run_grid(grid, tmp_path / "store") == GridResult(0, len(grid.runs), 0)
    assert all("not enough memory" in record["reason"] for record in read_store(tmp_path / "store")[0].values())
    monkeypatch.setattr(work, "evaluate", evaluate)
    assert run_grid(grid, tmp_path / "store", retry_failed=True) == GridResult(len(grid.runs), 0, 0)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("dense", {"nonfinite_batches": 1}, "the dense model's loss is not finite on 1 of"),
        ("ppl_change_percent", float("inf"), "ppl_change_percent is not finite"),
    ],
)
def test_a_change_that_is_not_finite_is_a_failed_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, reason: str
) -> None:
    def burst(*given: Any, **more: Any) -> dict[str, Any]:
        found = judge(*given, **more)
        return found | {field: found[field] | value if isinstance(value, dict) else value}

    monkeypatch.setattr(work, "judge", burst)
    grid = read_grid(written(world, tmp_path))
    assert run_grid(grid, tmp_path / "store").failed == len(grid.runs)
    assert all(record["reason"].startswith(reason) for record in read_store(tmp_path / "store")[0].values())
    assert render(read_tables(tmp_path / "store"))


def test_passes_that_a_screen_takes_are_counted(world: World, tmp_path: Path) -> None:
    screened = '[settings]\nscreen = 4\nscreen_by = "fisher"'
    grid = read_grid(written(world, tmp_path, change=lambda text: text.replace("[settings]", screened)))
    run_grid(grid, tmp_path / "store")
    records, _ = read_store(tmp_path / "store")
    for run in grid.runs:
        assert (records[run.key]["score_passes"] > 0) == (run.settings.method in ("fisher", "greedy", "ucb", "ts"))


# Many at once


class FakePool:
    """Workers that die as they start, or never come, or answer at once."""

    share: dict[str, Any] = {}  # noqa: RUF012 - it stays empty

    def __init__(self, *fates: str) -> None:
        self.room, self._fates, self.closed = len(fates), iter(fates), False

    def start(self) -> tuple[str, str]:
        fate = next(self._fates, "dies")
        return fate, f"{fate} {id(object())}"

    def tell(self, worker: str, task: dict[str, Any]) -> str:
        return f"{worker} {task['n']}"

    def first(self, awaited: Any) -> str:
        return next(str(answer) for answer in awaited if not answer.startswith("never"))

    def answer(self, worker: str, awaited: str) -> dict[str, Any]:
        if worker == "dies":
            raise workers._LostError("exit code 1")
        return {"records": [awaited]}

    def close(self) -> None:
        self.closed = True


def test_no_task_waits_for_a_worker_that_does_not_come() -> None:
    pool = FakePool("never", "works")
    done = [item for item, _ in workers._in_pool([1, 2, 3], lambda n: {"n": n}, pool)]
    assert done == [1, 2, 3] and pool.closed


def test_workers_that_all_die_as_they_start_end_the_grid() -> None:
    pool = FakePool("dies", "dies")
    with pytest.raises(SettingError, match="die as they start, the last one with exit code 1"):
        list(workers._in_pool([1, 2, 3], lambda n: {"n": n}, pool))
    assert pool.closed


def test_two_processes_make_the_records_that_one_does(world: World, tmp_path: Path) -> None:
    grid = read_grid(written(world, tmp_path))
    run_grid(grid, tmp_path / "here")
    result = run_grid(grid, tmp_path / "there", where=Where(workers=2, threads=1))
    assert result == GridResult(len(grid.runs), 0, 0)
    assert lasting(tmp_path / "here") == lasting(tmp_path / "there")


def test_a_worker_that_dies_is_replaced_and_its_runs_are_done(world: World, tmp_path: Path) -> None:
    grid = read_grid(written(world, tmp_path))
    killed: list[int] = []

    def kill_one(progress: GridProgress) -> None:
        children = psutil.Process().children(recursive=True)
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        if progress.done >= 2 and not killed and workers:
            killed.append(workers[0].pid)
            workers[0].kill()

    result = run_grid(grid, tmp_path / "store", where=Where(workers=2, threads=1), progress=kill_one)
    assert killed and result == GridResult(len(grid.runs), 0, 0)
    assert (tmp_path / "store" / RECORDS).read_bytes().count(b"\n") == len(grid.runs)


def test_a_task_that_kills_every_worker_becomes_a_failed_record(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "WORK", "dying")
    text = written(world, tmp_path).read_text().split("[[table]]")[0] + '[[table]]\nnumber = "4"\nmethods = ["magnitude"]\n'
    (tmp_path / "one.toml").write_text(text)
    assert run_grid(read_grid(tmp_path / "one.toml"), tmp_path / "store", where=Where(workers=2)) == GridResult(0, 1, 0)
    (record,) = read_store(tmp_path / "store")[0].values()
    assert record["reason"] == "its worker was lost 3 times, the last time with exit code 7"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_grid_killed_midway_loses_nothing_and_repeats_nothing(world: World, tmp_path: Path, stop: signal.Signals) -> None:
    path, store = written(world, tmp_path), tmp_path / "store"
    command = [sys.executable, "-m", "secateur.cli", "grid", str(path), "-o", str(store)]
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell's "&" ignores it
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    try:
        while not (store / RECORDS).exists() or (store / RECORDS).read_bytes().count(b"\n") < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        process.send_signal(stop)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    if stop == signal.SIGINT:
        assert process.returncode == 130 and "The same command goes on from here." in err
    grid = read_grid(path)
    assert run_grid(grid, store).left == 0
    assert (store / RECORDS).read_bytes().count(b"\n") == len(grid.runs)
    run_grid(grid, tmp_path / "whole")
    assert lasting(store) == lasting(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Ray's workers are named otherwise there")
def test_a_grid_on_a_ray_cluster_survives_the_loss_of_a_worker_and_makes_the_same_records(world: World, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    path, store = written(world, tmp_path), tmp_path / "store"
    command = [sys.executable, "-m", "secateur.cli", "grid", str(path), "-o", str(store), "--ray", "local", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killed: list[int] = []
    try:
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if not killed:
                children = psutil.Process(process.pid).children(recursive=True)
                busy = [child for child in children if _title(child).startswith("ray::_Actor.perform")]
                if busy:
                    busy[0].kill()
                    killed.append(busy[0].pid)
            time.sleep(0.01)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    grid = read_grid(path)
    assert killed, "no worker was seen at work"
    assert process.returncode == 0, err
    assert json.loads(out) == {"done": len(grid.runs), "failed": 0, "left": 0, "problems": []}
    run_grid(grid, tmp_path / "here")
    assert lasting(store) == lasting(tmp_path / "here")


def _title(process: psutil.Process) -> str:
    try:
        return str((process.cmdline() or [""])[0])
    except psutil.Error:
        return ""


def test_a_ray_address_where_nobody_answers_is_one_sentence(world: World, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    command = [sys.executable, "-m", "secateur.cli", "grid", str(written(world, tmp_path)), "-o", str(tmp_path / "store")]
    ran = subprocess.run([*command, "--ray", "127.0.0.1:1"], capture_output=True, text=True, timeout=120, env=os.environ)
    assert ran.returncode == 2 and "No Ray cluster answers at '127.0.0.1:1'" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("settings", [{"workers": -1}, {"threads": -1}, {"workers": 2, "ray": "local"}])
def test_places_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        Where(**settings)


def test_records_of_two_bases_are_not_compared(world: World, tmp_path: Path) -> None:
    grid = read_grid(written(world, tmp_path))
    run_grid(grid, tmp_path / "store")
    with Store(tmp_path / "store") as store:
        record = next(iter(store.records.values()))
        store.append(record | {"model_digest": "another"})
    with pytest.raises(StoreError, match="different weights or data"):
        read_tables(tmp_path / "store")
