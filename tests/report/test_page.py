from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

import secateur as sc
from runs import make_selection, write_run
from secateur.experiment.store import FAILED, Plan, PlannedCell, PlannedTable, Store
from secateur.files import jsonio
from secateur.healing import Healing
from secateur.judgement import Samples
from secateur.report.charts import Axis, Member, density, family
from secateur.report.html import number, tag
from secateur.report.intervals import mean_interval, share_interval, t_quantile
from secateur.report.map import cells_of, rows_of
from secateur.report.page import REPORT, verdict
from secateur.report.run import change, level, read_run
from stores import judged, make_record
from worlds import Run, World, check_refused, prune_command

CUT = ["--layout", "free", "--no-measure", "--calibration-size", 16, "--evaluation-batches", 2]


# The numbers


@pytest.mark.parametrize("freedom", [2, 3, 4, 9, 30, 200])
def test_the_quantile_of_t_is_that_of_scipy_within_a_hundredth(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)


def test_intervals_are_those_of_scipy() -> None:
    values = [1.0, 2.0, 4.0, 5.0, 8.0]
    expected = stats.t.interval(0.95, 4, loc=4.0, scale=stats.sem(values))
    assert mean_interval(values) == pytest.approx(tuple(expected), rel=0.01)
    wilson = stats.binomtest(72, 100).proportion_ci(method="wilson")
    assert share_interval(0.72, 100) == pytest.approx((wilson.low, wilson.high))
    assert mean_interval([1.0]) is None and mean_interval([1.0, math.nan]) is None


def test_a_change_of_perplexity_is_paired_over_batches(tmp_path: Path) -> None:
    dense, zeroed, _ = (stage.evaluation for stage in read_run(write_run(tmp_path)).stages)
    gap, interval = change(dense, zeroed, "perplexity")
    assert gap == pytest.approx(100 * (math.exp(0.1) - 1))
    assert interval == pytest.approx((gap, gap))  # every batch lost the same, however much the batches differ
    value, around = level(dense, "perplexity")
    assert value == 20.0 and around and around[0] < math.exp(3) < around[1]


def test_cells_are_all_candidates_with_their_measurements() -> None:
    selection = make_selection()
    cells = {(cell.unit.kind, cell.unit.layer, cell.unit.index): cell for cell in cells_of(selection)}
    assert len(cells) == 72 + 24
    first = cells[(selection.units[0].kind, selection.units[0].layer, selection.units[0].index)]
    own = [pull for pull in selection.trace if pull.unit == selection.units[0]]
    assert (first.order, first.pulls) == (1, len(own))
    assert first.damage == pytest.approx(sum(sum(pull.damages) for pull in own) / sum(len(pull.batches) for pull in own))
    assert sum(cell.never for cell in cells.values()) == 96 - len({pull.unit for pull in selection.trace}) > 0
    assert rows_of(selection)[0].keys() >= {"kind", "layer", "index", "order", "damage", "low", "high", "pulls"}


def test_units_inside_a_removed_whole_are_gone_with_it() -> None:
    units = (sc.Unit("attention", 1, 0),)
    selection = sc.Selection(units, candidates={"attention": (1, 1), "head": (2, 2)})
    gone = [(cell.unit.kind, cell.unit.layer) for cell in cells_of(selection) if cell.inside]
    assert gone == [("head", 1), ("head", 1)]


@pytest.mark.parametrize(("value", "text"), [(0.00123456, "0.001235"), (1234567.0, "1,234,567"), (-2.5, "−2.500"), (0, "0")])
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("axis", [Axis(0, 1, 0, 1), Axis(-3, 17, 0, 1), Axis(0.02, 900, 0, 1, log=True), Axis(3, 3.2, 0, 1)])
def test_ticks_are_a_few_round_numbers_on_the_axis(axis: Axis) -> None:
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8 and all(axis.low <= tick <= axis.high for tick in ticks)


def test_what_is_not_html_is_escaped() -> None:
    assert tag("p", "<b>&", title='"x') == '<p title="&quot;x">&lt;b&gt;&amp;</p>'


def test_a_family_has_a_point_for_each_member() -> None:
    drawn = family([Member("dense", 1.0, 20.0, dense=True), Member("nine tenths", 0.9, 21.0)], metric="perplexity")
    assert "nine tenths: perplexity 21.00 at 0.90 of the time" in drawn and drawn.count("<title>") == 2


# The page of a prune


def test_the_verdict_says_what_went_what_it_cost_and_what_it_won(tmp_path: Path) -> None:
    said = verdict(read_run(write_run(tmp_path)))
    assert said.startswith("Without ") and "10.0% of its parameters" in said
    assert "perplexity goes from 20.00 to 22.00" in said and "1.25 times as fast" in said


def test_the_command_repeats_the_prune(tmp_path: Path) -> None:
    command = shlex.split(read_run(write_run(tmp_path, "a model's name")).command("out/"))
    assert command[:3] == ["secateur", "prune", "a model's name"] and command[-2:] == ["-o", "out/"]
    given = dict(zip(command[3:-2:2], command[4:-2:2], strict=True))
    assert given["--target"] == "both" and given["--pulls-per-step"] == "40" and given["--ratio"] == "0.05"
    assert given["--data"] == "a model's name" and given["--evaluation-batches"] == "4"
    assert "--temperature" not in given and "--budget" not in given


def test_a_repaired_or_healed_model_is_a_stage_of_its_own(tmp_path: Path) -> None:
    repair = {"form": "bias", "sentence": "Repaired.", "losses": {"none": 1.0, "bias": 0.9}}
    figures = {"loss": 3.05, "rows": 400, "batch_losses": [3.0, 3.1], "perplexity": 21.0}
    healing = Healing("30min", rate=0.001, lora=8, augment=False, dtype="bfloat16", batch_size=8).for_task("text")
    heal = {"sentence": "Healed.", "steps": 12, "data": "other", "settings": healing.to_key()}
    heal |= {"dense": figures | {"perplexity": 19.0}}
    run = read_run(write_run(tmp_path, repair=repair, heal=heal, unhealed=figures))
    names = ["dense", "dense, healed alike", "zeroed", "cut and repaired", "cut, repaired and healed"]
    assert [stage.name for stage in run.stages] == names
    assert [stage.evaluation.perplexity for stage in run.stages] == [20.0, 19.0, 22.0, 21.0, 22.0]
    command = run.command("out/")
    assert "--repair --repair-form bias --heal 12steps --heal-data other" in command
    for option in ("--heal-rate 0.001", "--heal-lora 8", "--no-heal-augment", "--heal-dtype bfloat16"):
        assert option in command
    assert command.count("--heal") == 5 and "30min" not in command  # the rest is at its defaults


def test_only_a_selection_is_enough_for_a_page(tmp_path: Path) -> None:
    make_selection().save(tmp_path / "selection.json")
    text = sc.write_report(tmp_path).read_text()
    assert "was not judged" in text and text.count('class="cell') == 96


def test_many_points_are_drawn_as_how_many_lie_where() -> None:
    points = [(float(i), math.sin(i)) for i in range(50_000)]
    drawn = density(points, about="many", x_label="x", y_label="y")
    assert drawn.count("<rect") <= 90 * 45 and "<circle" not in drawn and len(drawn) < 500_000


# The command


def test_prune_writes_its_page_and_report_writes_it_again(world: World, tmp_path: Path, run: Run) -> None:
    ran = run(*prune_command(world, tmp_path / "out", *CUT))
    assert ran.code == 0 and str(tmp_path / "out" / REPORT) in ran.out
    page = (tmp_path / "out" / REPORT).read_bytes()
    samples = jsonio.decode(json.loads((tmp_path / "out" / "samples.json").read_text()), Samples)
    assert samples.continued[0].dense and samples.continued[0].prompt
    assert run("report", tmp_path / "out").code == 0
    assert (tmp_path / "out" / REPORT).read_bytes() == page
    assert run("report", tmp_path / "out", "-o", tmp_path / "other.html").code == 0
    assert (tmp_path / "other.html").read_bytes() == page


def test_images_that_changed_class_are_kept_as_small_pictures(world: World, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path, *CUT, "--ratio", 0.6, task="image")).code == 0
    samples = jsonio.decode(json.loads((tmp_path / "samples.json").read_text()), Samples)
    assert samples.looked_at > 0 and len(samples.changed) == min(samples.differ, 8)
    assert all(one.image.startswith("data:image/jpeg;base64,") and one.dense != one.small for one in samples.changed)


def test_a_prune_is_finished_even_if_its_page_cannot_be_written(world: World, tmp_path: Path, run: Run) -> None:
    (tmp_path / REPORT).write_text("my notes")
    ran = run(*prune_command(world, tmp_path))
    assert ran.code == 0 and len(ran.complaints) == 1 and "report.html" in ran.complaints[0]
    assert (tmp_path / REPORT).read_text() == "my notes" and (tmp_path / "evaluation.json").exists()


def damaged(folder: Path, name: str, content: str) -> Path:
    write_run(folder)
    (folder / name).write_text(content)
    return folder


REFUSED: dict[str, Any] = {
    "an empty folder": (lambda place: place, "selection.json"),
    "no folder": (lambda place: place / "none", "none"),
    "a damaged selection": (lambda place: damaged(place, "selection.json", "{"), "selection.json"),
    "a damaged evaluation": (lambda place: damaged(place, "evaluation.json", '{"settings": 1}'), "evaluation.json"),
    "a damaged record": (lambda place: damaged(place, "secateur.json", '{"model": []}'), "secateur.json"),
    "damaged samples": (lambda place: damaged(place, "samples.json", "[1]"), "samples.json"),
    "a damaged series": (lambda place: damaged(place, "series.json", '{"what": 3}'), "series.json"),
    "a page of somebody else's": (lambda place: damaged(place, REPORT, "my notes"), "not overwritten"),
    "a torn store": (lambda place: damaged(place, "results.jsonl", "{}\n") / "results.jsonl", "results.jsonl"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shown_is_refused_in_a_sentence(what: str, tmp_path: Path, run: Run) -> None:
    make, word = REFUSED[what]
    assert word in check_refused(run("report", make(tmp_path)))
    assert not (tmp_path / REPORT).exists() or (tmp_path / REPORT).read_text() == "my notes"


def test_a_store_is_shown_with_its_tables_costs_and_failed_runs(tmp_path: Path, run: Run) -> None:
    failed = make_record(
        "a", status=FAILED, reason="<b>no room</b>", judgement=None, settings=replace(sc.Settings("m"), method="ucb")
    )
    runs = {"ucb": {"1": "a"}, "auto": {"1": "b"}}
    cell = PlannedCell("d", "m", "head", 0.1, {}, runs)
    with Store(tmp_path) as store:
        store.append(failed)
        store.append(judged(make_record("b", passes=20.0), dense={"top1": 0.8, "top5": 0.9}, zeroed={"top1": 0.7, "top5": 0.8}))
        store.keep_plan(Plan("g", (PlannedTable("9", "image", (cell,)),)))
    ran = run("report", tmp_path / "results.jsonl")
    assert ran.code == 0, ran.err
    text = (tmp_path / REPORT).read_text()
    assert "Auto: 10.0" in text and "20.00 passes" in text and "Imagenette, full screening" in text
    assert "&lt;b&gt;no room&lt;/b&gt;" in text and "<b>no room" not in text and "No valid run: MAB-UCB" in text
