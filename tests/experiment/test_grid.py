from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grids import grid_command, lasting, n_lines, records_of, write_grid
from secateur.errors import SettingError
from secateur.experiment import work
from secateur.experiment.grid import GridResult, Run, read_grid, run_grid
from secateur.experiment.store import FAILED, RECORDS, read_store, read_tables
from secateur.selection import Selection
from secateur.steps import choose
from secateur.watcher import GridProgress
from stalling import TASKS
from worlds import ROOT, World

pytestmark = pytest.mark.usefixtures("fresh_workplace")

RUNS = ROOT / "runs"
SCORED = ("magnitude", "wanda", "taylor", "fisher")
SEARCHED = ("random", "greedy", "ucb", "ts")


# The files


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("table4", dict.fromkeys(SEARCHED, 35) | dict.fromkeys(SCORED, 7)),
        ("table6", dict.fromkeys(SEARCHED, 15) | dict.fromkeys(SCORED, 3)),
        ("table7", dict.fromkeys(SEARCHED, 20) | {"magnitude": 4}),
        ("table8", dict.fromkeys(("greedy", "ts", "ucb"), 15)),
        ("table9", dict.fromkeys((*SEARCHED, "magnitude"), 15)),
        ("table10", dict.fromkeys(SEARCHED, 18) | {"magnitude": 2, "taylor": 1, "fisher": 1, "wanda": 1}),
        ("here-deit", dict.fromkeys((*SEARCHED, *SCORED), 5) | {"greedy": 10}),
    ],
)
def test_the_grids_of_the_papers_tables_have_its_runs(name: str, expected: dict[str, int]) -> None:
    assert Counter(run.settings.method for run in read_grid(RUNS / f"{name}.toml").runs) == expected


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_grid_file_reads(path: Path) -> None:
    grid = read_grid(path)
    assert grid.name == path.stem
    assert len({run.key for run in grid.runs}) == len(grid.runs) > 0
    json.dumps(grid.plan().to_json())


def test_the_papers_protocol_is_read_off_its_tables() -> None:
    eight, nine, four = (read_grid(RUNS / f"table{n}.toml") for n in (8, 9, 4))
    for grid, greedy in ((eight, 64), (nine, 32)):
        for run in grid.runs:
            if run.settings.method in ("ucb", "ts", "greedy"):
                pulls = greedy if run.settings.method == "greedy" else 64
                assert (run.settings.pulls_per_step, run.settings.batches_per_pull) == (pulls, 1)
            assert (run.judging.size, run.settings.calibration_size, run.settings.batch_size) == (2000, 1024, 8)
            assert run.seed in (1, 2, 3, 42, 123)
    bandits = {run.key for run in eight.runs if run.settings.method != "greedy"}
    assert bandits < {run.key for run in nine.runs}
    for run in four.runs:
        if run.settings.method in ("ucb", "ts", "greedy"):
            assert (run.settings.pulls_per_step, run.settings.batches_per_pull, run.settings.screen) == (32, 2, 48)
            assert (run.settings.temperature, run.settings.group_width) == (0.02, 32)
        assert (run.settings.seq_len, run.settings.calibration_size, run.judging.max_batches) == (128, 512, 80)
    scored = {"wanda": 70, "taylor": 14, "fisher": 14}  # Table B1's 69.9 and 14.3
    for name in ("table4", "table6", "table10", "table10-half"):
        runs = [run for run in read_grid(RUNS / f"{name}.toml").runs if run.settings.method in scored]
        assert runs and all(run.settings.score_batches == scored[run.settings.method] for run in runs)


def test_batches_per_pull_are_asked_with_the_papers_seeds_and_fifteen_more_and_share_the_runs_that_are_there() -> None:
    found, here = (read_grid(RUNS / f"{name}.toml").runs for name in ("search-bpull", "here-deit"))
    counts = Counter((run.settings.method, run.settings.batches_per_pull) for run in found)
    assert counts == {(method, n): 20 for method in ("greedy", "ucb", "ts") for n in (1, 2, 4)}
    assert len({run.key for run in found} & {run.key for run in here}) == 3 * 5


def test_the_choices_of_table_7_are_those_of_table_4() -> None:
    four, seven = (read_grid(RUNS / f"table{n}.toml") for n in (4, 7))
    assert {run.choice_key for run in seven.runs} < {run.choice_key for run in four.runs}
    assert not {run.key for run in seven.runs} & {run.key for run in four.runs}


def scored_runs(world: World, folder: Path, task: str, seeds: str = "[1, 2]") -> dict[str, list[Run]]:
    """The runs of the four methods that only score, by method."""

    def change(text: str) -> str:
        text = text.replace("seeds = [1, 2]", f"seeds = {seeds}")
        return re.sub("methods = .*", f"methods = {json.dumps(SCORED)}", text, count=1)

    runs = read_grid(write_grid(world, folder, task, change)).runs
    return {method: [run for run in runs if run.settings.method == method] for method in SCORED}


def test_on_texts_a_score_is_run_once_for_all_seeds(world: World, tmp_path: Path) -> None:
    found, other = (scored_runs(world, tmp_path, "text", seeds) for seeds in ("[1, 2]", "[42, 1]"))
    for method in SCORED:
        assert [run.seed for run in found[method]] == [None], method
        assert [run.key for run in found[method]] == [run.key for run in other[method]], method


def test_on_images_a_score_of_weights_chooses_once_and_is_judged_for_every_seed(world: World, tmp_path: Path) -> None:
    runs = scored_runs(world, tmp_path, "image")["magnitude"]
    assert [run.seed for run in runs] == [1, 2]
    assert len({run.choice_key for run in runs}) == 1
    assert len({run.key for run in runs}) == 2


def test_on_images_a_score_that_looks_at_batches_chooses_with_the_seed_of_the_run(world: World, tmp_path: Path) -> None:
    found = scored_runs(world, tmp_path, "image")
    for method in ("wanda", "taylor", "fisher"):
        assert [(run.seed, run.settings.seed) for run in found[method]] == [(1, 1), (2, 2)], method
        assert len({run.choice_key for run in found[method]}) == 2, method


@pytest.mark.parametrize("task", ["text", "image"])
def test_a_precision_can_be_varied_and_has_its_own_dense_model(world: World, tmp_path: Path, task: str) -> None:
    def change(text: str) -> str:
        return text.replace("vary.pool_size = [3, 4]", 'vary.dtype = ["float32", "bfloat16", "float16"]')

    grid = read_grid(write_grid(world, tmp_path, task, change))
    assert run_grid(grid, tmp_path / "store").failed == 0
    cells = read_tables(tmp_path / "store")[1].cells
    assert [cell.name for cell in cells] == ["Tiny, dtype float32", "Tiny, dtype bfloat16", "Tiny, dtype float16"]
    dense = {record.judgement.dense.loss for cell in cells for record in cell.records("ucb") if record.judgement}
    assert len(dense) == 3 * (1 if task == "text" else 2)  # images are drawn by seed


def test_settings_that_a_method_does_not_use_make_no_second_run(world: World, tmp_path: Path) -> None:
    runs = read_grid(write_grid(world, tmp_path)).runs
    assert sum(run.settings.method == "greedy" for run in runs) == 2  # its trials are not a pool of the size that is varied
    assert sum(run.settings.method == "ucb" for run in runs) == 6


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("ratios", "ratio"), "file.*'ratio'.*'ratios'"),
        (("pulls_per_step", "pull_per_step"), "table 4.*'pull_per_step'.*'pulls_per_step'"),
        (('"ucb", "ts"]', '"ucb", "thompson"]'), "method.*table 4.*'thompson'"),
        (('"fisher"', '"fischer"'), "'fischer'.*'fisher'"),
        (('target = "head"', 'target = "heads"'), "target.*'heads'.*'head'"),
        (('number = "4"', 'number = "5"'), "number.*'text'.*'5'"),
        (('number = "4"', 'number = "9"'), "number.*'text'.*'9'"),
        (('number = "4"', 'number = "4"\ngreedy = { evaluation_batches = 2 }'), "alike.*evaluation_batches"),
        (('number = "4"', 'number = "4"\nucb = { batch_size = 2 }'), "alike.*batch_size"),
        (('task = "text"', 'task = "texts"'), "task.*table 4.*'texts'.*'text'"),
        (("ratios = [0.3]", "ratios = [1.3]"), "ratio.*1.3"),
        (("ratios = [0.3]", 'ratios = ["0.3"]'), "ratios.*table 4.*'0.3'"),
        (("ratios = [0.3]", "ratios = 0.3"), "ratios.*file.*0.3"),
        (("seeds = [1, 2]", "seeds = [1, 1]"), r"seeds.*\[1, 1\].*repeat"),
        (("seeds = [1, 2]", "seeds = []"), r"seeds.*table 4.*\[\]"),
        (("seeds = [1, 2]", ""), "no seeds"),
        (("pulls_per_step = 4", 'pulls_per_step = "4"'), "pulls_per_step.*table 4.*'4'.*int"),
        (("pulls_per_step = 4", "pulls_per_step = true"), "pulls_per_step.*True.*int"),
        (("pulls_per_step = 4", "pulls_per_step = 0"), "pulls.*0"),
        (("pulls_per_step = 4", "keep_params = 0.8"), "ratio.*goal"),
        (("pulls_per_step = 4", 'documents = "line"'), "documents.*'line'.*'lines'"),
        (("pulls_per_step = 4", 'loss = "mine:loss"'), "loss.*'mine:loss'.*labels or distance"),
        (("pulls_per_step = 4", 'holdout = 0.1\ndata = ["other"]'), "'data'"),
        (("ratios = [0.3]", 'ratios = [0.3]\ndata = ["other"]\nucb = { holdout = 0.1 }'), "'other'.*--holdout"),
        (('number = "4"', 'number = "4"\nucb = { documents = "lines" }'), "alike.*documents"),
        (("pulls_per_step = 4", 'model = "gpt2"'), "setting.*table 4.*'model'"),
        (("vary.pool_size = [3, 4]", "vary.pool_sizes = [3, 4]"), "'pool_sizes'.*'pool_size'"),
        (("vary.pool_size = [3, 4]", "vary.pool_size = 3"), "vary.*table ablation.*list"),
        (("[[table]]", "[table]"), "TOML"),
        (("seeds = [1, 2]", "seeds = [1, 2"), "TOML"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_in_one_sentence_that_names_the_file(
    world: World, tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    path = write_grid(world, tmp_path, change=lambda text: text.replace(*change, 1))
    with pytest.raises(SettingError, match=complaint) as caught:
        read_grid(path)
    assert str(path) in str(caught.value)


def test_a_grid_without_a_table_or_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none\.toml"):
        read_grid(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(SettingError, match=r"empty\.toml.*\[\[table\]\]"):
        read_grid(tmp_path / "empty.toml")


# The loop


def test_a_grid_tells_how_far_it_is(world: World, tmp_path: Path) -> None:
    grid = read_grid(write_grid(world, tmp_path))
    told: list[GridProgress] = []
    assert run_grid(grid, tmp_path / "store", progress=told.append) == GridResult(len(grid.runs), 0, 0)
    assert [(p.done, p.left) for p in told] == [(i, len(grid.runs) - i) for i in range(len(grid.runs) + 1)]
    assert told[0].seconds_left is None and told[-1].seconds_left == 0


def test_the_time_left_is_told_by_what_runs_of_the_kind_took(world: World, tmp_path: Path) -> None:
    run_grid(read_grid(write_grid(world, tmp_path)), tmp_path / "store")
    records = records_of(tmp_path / "store")
    further = read_grid(write_grid(world, tmp_path, change=lambda text: text.replace("seeds = [1, 2]", "seeds = [1, 2, 3]")))
    told: list[GridProgress] = []
    run_grid(further, tmp_path / "store", progress=told.append)
    assert told[0].left == 6

    def mean(method: str) -> float:
        seconds = [record.total_seconds for record in records if record.settings.method == method]
        return sum(seconds) / len(seconds)

    # random, greedy (which has no pool), and the bandits with the pool by rule and with two others.
    assert told[0].seconds_left == pytest.approx(mean("random") + mean("greedy") + 3 * mean("ucb") + mean("ts"))


def test_what_has_a_record_is_not_done_again(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = read_grid(write_grid(world, tmp_path))
    run_grid(grid, tmp_path / "store")
    before = (tmp_path / "store" / RECORDS).read_bytes()
    monkeypatch.setattr(work, "perform", lambda task, part: pytest.fail("it was done again"))
    assert run_grid(grid, tmp_path / "store") == GridResult(len(grid.runs), 0, 0)
    assert (tmp_path / "store" / RECORDS).read_bytes() == before


def test_a_choice_is_taken_over_from_the_store_and_not_made_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = read_grid(write_grid(world, tmp_path))
    run_grid(grid, tmp_path / "store")
    elsewhere = tmp_path / "more"
    elsewhere.mkdir()
    (elsewhere / "test.txt").write_text("the old cat sees a small red bird near the tree and sings " * 30)
    path = write_grid(world, tmp_path, change=lambda text: text.replace("ratios", f'data = ["{elsewhere}"]\nratios', 1))
    monkeypatch.setattr(work, "choose", lambda *given, **more: pytest.fail("units were chosen again"))
    assert run_grid(read_grid(path), tmp_path / "store").done == len(grid.runs)
    records = read_store(tmp_path / "store")[0]
    assert len(records) == 2 * len(grid.runs)
    for run, other in zip(grid.runs, read_grid(path).runs, strict=True):
        first, second = records[run.key], records[other.key]
        assert first.judgement and second.judgement
        assert (first.judgement.units, first.judgement.pulls) == (second.judgement.units, second.judgement.pulls)
        assert (first.data, second.data) == ("text", "more")
        assert first.judgement.dense != second.judgement.dense


def breaking(method: str) -> Callable[..., Selection]:
    """`choose`, but one method raises an error."""

    def breaks(opened: Any, calibration: Any, settings: Any, **more: Any) -> Selection:
        if settings.method == method:
            raise RuntimeError("the lamp went out\nand more of it")
        return choose(opened, calibration, settings, **more)

    return breaks


def test_a_run_that_raises_becomes_a_failed_record_and_the_grid_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = read_grid(write_grid(world, tmp_path))
    monkeypatch.setattr(work, "choose", breaking("ts"))
    assert run_grid(grid, tmp_path / "store") == GridResult(len(grid.runs) - 2, 2, 0)
    failed = [record for record in records_of(tmp_path / "store") if record.status == FAILED]
    assert {record.settings.method for record in failed} == {"ts"}
    for record in failed:
        assert record.judgement is None
        assert all(part in record.reason for part in ("RuntimeError", "the lamp went out", "test_grid.py:"))
        assert "and more of it" not in record.reason


def test_a_run_that_raised_is_tried_again_when_that_is_asked_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = read_grid(write_grid(world, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(work, "choose", breaking("ts"))
        run_grid(grid, tmp_path / "store")
    assert run_grid(grid, tmp_path / "store").failed == 2
    assert run_grid(grid, tmp_path / "store", retry_failed=True) == GridResult(len(grid.runs), 0, 0)
    (cell,) = read_tables(tmp_path / "store")[0].cells
    spread = cell.spread("ts", cell.metric)
    assert spread and spread.valid == 2


def test_a_model_that_cannot_be_loaded_leaves_its_runs_and_the_others_are_done(world: World, tmp_path: Path) -> None:
    path = write_grid(world, tmp_path, change=lambda text: text.replace("[models]", '[models]\nGone = "nowhere/at-all"'))
    grid = read_grid(path)
    result = run_grid(grid, tmp_path / "store")
    assert (result.done, result.failed, result.left) == (len(grid.runs) // 2, 0, len(grid.runs) // 2)
    assert len(result.problems) == 1 and "nowhere/at-all" in result.problems[0]


# Stopped midway


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_grid_killed_midway_loses_nothing_and_repeats_nothing(world: World, tmp_path: Path, stop: signal.Signals) -> None:
    path, store = write_grid(world, tmp_path), tmp_path / "store"
    command, environment = grid_command(path, store, work="stalling")
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell's "&" ignores it
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed, env=environment
    )
    try:
        while n_lines(store) < TASKS:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(stop)
        _, err = process.communicate()
    finally:
        process.kill()
        process.wait()
    if stop == signal.SIGINT:
        assert process.returncode == 130 and "same command" in err
    grid = read_grid(path)
    assert n_lines(store) == TASKS < len(grid.runs)
    assert run_grid(grid, store).left == 0
    assert n_lines(store) == len(grid.runs)
    run_grid(grid, tmp_path / "whole")
    assert lasting(store) == lasting(tmp_path / "whole")
