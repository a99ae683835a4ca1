from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import secateur as sc
from secateur.methods import METHODS, searching
from tiny import GROUP
from worlds import FILES, FLAGS, SEQ_LEN, K, Run, World, check_refused, contents, loaded, prune_command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "target", "task"),
    [
        *((method, "both", "text") for method in METHODS),
        *(("auto", target, "image") for target in ("head", "mlp", "both")),
        ("ucb", "mlp", "image"),
        ("fisher", "head", "image"),
    ],
)
def test_prune_writes_k_units_of_the_target_and_what_an_evaluation_with_the_library_gives(
    method: str, target: str, task: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", "--method", method, "--target", target, "--json", task=task))
    assert (ran.code, ran.complaints) == (0, [])
    searched = method in searching()
    written = [name for name in (*FILES, "report.html") if searched or name != "journal.jsonl"]
    assert sorted(contents(tmp_path / "out")) == sorted(written)
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    selection = sc.Selection.load(tmp_path / "out" / "selection.json")
    assert len(set(selection.units)) == len(selection.units) == K[target]
    assert {unit.kind for unit in selection.units} <= ({"head", "mlp"} if target == "both" else {target})
    pulls = selection.pulls if method == "auto" else 4 * K[target] if searched else 0
    assert written["pulls"] == selection.pulls == pulls >= (K[target] if searched else 0)
    if searched:
        assert (tmp_path / "out" / "journal.jsonl").read_text().count("\n") == pulls + 1
    model, _, evaluation = loaded(world, task)
    dense = sc.evaluate(model, evaluation)
    with sc.zeroed(model, selection.units):
        pruned = sc.evaluate(model, evaluation)
    names = ["loss", "perplexity"] if task == "text" else ["loss", "top1", "top5"]
    for side, found in (("dense", dense), ("pruned", pruned)):
        assert {name: written[side][name] for name in names} == {name: getattr(found, name) for name in names}
        assert written[side]["batch_losses"] == list(found.batch_losses)
    assert written["delta_loss"] == pruned.loss - dense.loss
    if task == "text":
        assert written["ppl_change_percent"] == pytest.approx(100 * (math.exp(pruned.loss - dense.loss) - 1))
    else:
        assert written["delta_top1"] == pruned.top1 - dense.top1  # type: ignore[operator]
    for side in ("dense", "pruned"):
        del written[side]["batch_losses"]  # what is printed leaves out the long lists
    assert ran.document == written


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_pulls(world: World, tmp_path: Path, run: Run) -> None:
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(*prune_command(world, tmp_path / place, "--seed", seed)).code == 0
    first, again, other = ((tmp_path / place / "selection.json").read_bytes() for place in "abc")
    assert first == again
    pulled = [[(pull["unit"], pull["batches"]) for pull in json.loads(text)["trace"]] for text in (first, other)]
    assert pulled[0] != pulled[1]


def test_another_seed_gives_another_random_selection(world: World, tmp_path: Path, run: Run) -> None:
    drawn = [
        run(*prune_command(world, tmp_path / str(seed), "--method", "random", "--seed", seed, "--json")) for seed in (1, 2)
    ]
    assert drawn[0].document["units"] != drawn[1].document["units"]


def test_the_cache_changes_no_byte_of_the_selection(world: World, tmp_path: Path, run: Run) -> None:
    for memory in (0, 1):
        assert run(*prune_command(world, tmp_path / str(memory), "--cache-memory", memory)).code == 0
    assert (tmp_path / "0" / "selection.json").read_bytes() == (tmp_path / "1" / "selection.json").read_bytes()


def test_a_run_with_another_stack_is_another_run_and_with_other_lanes_the_same(world: World, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path, "--lanes", 1)).code == 0
    assert "stack 1, now 2" in check_refused(run(*prune_command(world, tmp_path, "--stack", 2)))
    assert run(*prune_command(world, tmp_path, "--lanes", 2)).code == 0


def test_a_finished_run_started_again_prints_the_same_and_measures_nothing(
    world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = prune_command(world, tmp_path / "out")
    first = run(*command)
    before = contents(tmp_path)
    monkeypatch.setattr(sc.DamageMeter, "measure", lambda *_: pytest.fail("measured again"))
    again = run(*command)
    assert (again.code, again.out) == (0, first.out)
    assert contents(tmp_path) == before
    assert "evaluating" not in again.err
    assert run(*command, "--json").document["pulls"] == 12


def test_the_tables_say_what_the_json_says(world: World, tmp_path: Path, run: Run) -> None:
    shown = run(*prune_command(world, tmp_path / "out"))
    record = run(*prune_command(world, tmp_path / "out", "--json")).document
    for number in (record["dense"]["perplexity"], record["pruned"]["perplexity"], record["pruned"]["loss"]):
        assert f"{number:.4f}" in shown.out
    assert f"{record['ppl_change_percent']:+.2f}%" in shown.out
    (line,) = (line for line in shown.out.splitlines() if f"{record['total_params']:,} parameters" in line)
    assert line.startswith("3 units") and f"{record['zeroed_percent']:.4f}%" in line
    for name in FILES:
        assert str(tmp_path / "out" / name) in shown.out


# Cutting

CUT = ["--no-measure", "--calibration-size", 16, "--evaluation-batches", 2]


def free(world: World, out: Path, *more: object, **options: Any) -> list[object]:
    """A prune that cuts: the last --layout counts."""
    return prune_command(world, out, "--layout", "free", *CUT, *more, **options)


@pytest.mark.parametrize("task", ["text", "image"])
def test_prune_cuts_and_the_result_is_pruned_again_evaluated_and_counted(
    task: str, world: World, tmp_path: Path, run: Run
) -> None:
    first = run(*free(world, tmp_path / "1", "--target", "both", "--json", task=task))
    assert (first.code, first.complaints) == (0, [])
    record = first.document
    assert record["cut"]["shrunk"]["loss"] == pytest.approx(record["pruned"]["loss"], rel=1e-5)
    second = run(*free(world, tmp_path / "2", "--target", "both", "--json", task=task, model=tmp_path / "1"))
    assert (second.code, second.complaints) == (0, [])
    assert second.document["cut"]["params"] < second.document["cut"]["dense_params"] == record["cut"]["params"]
    data = world.of(task)[1]
    judged = run("evaluate", tmp_path / "2", "--data", data, "--seq-len", SEQ_LEN, "--evaluation-batches", 2, "--json")
    assert judged.document["dense"]["loss"] == pytest.approx(second.document["pruned"]["loss"], rel=1e-5)
    units = run("units", tmp_path / "2", "--group-width", GROUP, "--json").document
    assert units["total_params"] == second.document["cut"]["params"]
    chosen = run("select", tmp_path / "2", "--calibration", data, *FLAGS, "-o", tmp_path / "sel.json")
    assert (chosen.code, chosen.complaints) == (0, [])
    again = run(*free(world, tmp_path / "1", "--target", "both", "--json", task=task))
    assert again.document == record


def test_a_repair_takes_as_many_texts_as_it_is_given(world: World, tmp_path: Path, run: Run) -> None:
    ran = run(*free(world, tmp_path / "out", "--repair", "--repair-form", "least-squares", "--repair-size", 24, "--json"))
    assert (ran.code, ran.complaints) == (0, [])
    found = ran.document["cut"]["repair"]
    assert found["size"] == 24 and found["fitted_on"] + found["held_out"] == 6
    assert "--repair-size 24" in (tmp_path / "out/report.html").read_text()
    shrunk = run(
        *("shrink", world.text_model, "--selection", tmp_path / "out/selection.json", "-o", tmp_path / "again", "--no-measure"),
        *("--repair", "--repair-form", "least-squares", "--repair-size", 24, "--calibration-size", 16, "--json"),
    )
    assert shrunk.document["repair"] == found


def test_a_size_of_a_repair_that_is_not_asked_for_is_refused(world: World, tmp_path: Path, run: Run) -> None:
    ran = run(*free(world, tmp_path / "out", "--repair-size", 24))
    assert ran.code == 2 and "add --repair" in ran.err
    assert not (tmp_path / "out").exists()


def test_prune_writes_weights_in_files_of_the_size_asked_for(world: World, tmp_path: Path, run: Run) -> None:
    for place, options in (("whole", []), ("parts", ["--max-shard-size", "5KB"])):
        ran = run(*free(world, tmp_path / place, *options))
        assert (ran.code, ran.complaints) == (0, [])
    parts = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert [path.name for path in (tmp_path / "whole").glob("*.safetensors")] == ["model.safetensors"]
    assert len(parts) > 1
    whole, again = (sc.load_shrunk(tmp_path / place, device="cpu").state_dict() for place in ("whole", "parts"))
    assert whole.keys() == again.keys() and all(whole[name].equal(again[name]) for name in whole)


@pytest.mark.parametrize("form", ["least-squares", "bias", "auto"])
def test_prune_tries_the_form_of_repair_asked_for(form: str, world: World, tmp_path: Path, run: Run) -> None:
    ran = run(*free(world, tmp_path / "out", "--repair", "--repair-form", form, "--json"))
    assert (ran.code, ran.complaints) == (0, [])
    found = ran.document["cut"]["repair"]
    tried = {"least squares", "layered", "bias"} if form == "auto" else {form.replace("-", " ")}
    assert found["losses"].keys() | found["declined"].keys() == tried | {"none"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keep-params", 0.8, "--keep-flops", 0.8], r"\b2 .*parameters.*FLOPs"),
        (["--keep-params", 0.8, "--ratio", 0.1], "ratio.*goal"),
        (["--holdout", 0.6], r"holdout.*0\.6"),
        (["--keep-latency", 1.5], r"latency.*1\.5.*between 0 and 1"),
        (["--keep-params", "nan"], "parameters.*nan.*between 0 and 1"),
        (["--keep-params", 0.01], r"\b9 candidates.*left.*\b1\.0%"),
        (["--layout", "unifrom"], "'unifrom'.*mean 'uniform'"),
        (["--layout", "uniform"], "--layout free"),
        (["--layout", "uniform", "--target", "both", "--keep-params", 0.9], "one kind"),
        (["--repair", "--repair-form", "leastsquares"], "'leastsquares'.*mean 'least-squares'"),
        (["--repair", "--calibration-size", 4, "--batches-per-pull", 1], r"\b2 batches"),
        (["--max-shard-size", "large"], "'large'.*5GB"),
    ],
    ids=str,
)
def test_a_cut_that_cannot_be_made_is_one_sentence_and_leaves_nothing(
    options: list[object], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    refused = check_refused(run(*free(world, tmp_path / "out", *options)), tmp_path / "out")
    assert re.search(said, refused)
