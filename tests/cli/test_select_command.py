from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import secateur as sc
from worlds import SEQ_LEN, Run, World, check_refused, contents, flags_beside, prune_command


def select_command(world: World, out: Path, *more: object, task: str = "text") -> list[object]:
    folder, data = world.of(task)
    return ["select", folder, "--calibration", data, *flags_beside(more), "-o", out, *more]


@pytest.mark.parametrize("task", ["text", "image"])
def test_select_and_then_evaluate_give_what_prune_gives(task: str, world: World, tmp_path: Path, run: Run) -> None:
    folder, data = world.of(task)
    pruned = run(*prune_command(world, tmp_path / "out", "--json", task=task)).document
    chosen = run(*select_command(world, tmp_path / "sel.json", "--json", task=task))
    assert (chosen.code, chosen.complaints) == (0, [])
    assert (tmp_path / "sel.json").read_bytes() == (tmp_path / "out" / "selection.json").read_bytes()
    assert chosen.document["units"] == pruned["units"]
    judge = ["evaluate", folder, "--selection", tmp_path / "sel.json", "--data", data, "--seq-len", SEQ_LEN]
    judged = run(*judge, "-o", tmp_path / "judged.json", "--json")
    assert (judged.code, judged.complaints) == (0, [])
    sides = {"loss", "perplexity"} if task == "text" else {"loss", "top1", "top5"}
    assert sides <= judged.document["dense"].keys() and sides <= judged.document["pruned"].keys()
    changes = ["delta_loss", "ppl_change_percent"] if task == "text" else ["delta_loss", "delta_top1", "delta_top5"]
    for name in ("dense", "pruned", "units", "total_params", "zeroed_percent", "pulls", "forwards", *changes):
        assert judged.document[name] == pruned[name]
    written = json.loads((tmp_path / "judged.json").read_text())
    assert written["pruned"]["loss"] == pruned["pruned"]["loss"]
    assert written["pruned"]["batch_losses"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("command", ["prune", "select"])
def test_stacked_runs_and_lanes_choose_the_same_units_and_the_stack_is_recorded(
    command: str, task: str, world: World, tmp_path: Path, run: Run
) -> None:
    def chosen(place: str, *options: object) -> sc.Selection:
        path = tmp_path / place / "selection.json"
        if command == "prune":
            ran = run(*prune_command(world, tmp_path / place, *options, task=task))
        else:
            ran = run(*select_command(world, path, *options, task=task))
        assert (ran.code, ran.complaints) == (0, [])
        return sc.Selection.load(path)

    plain, stacked = chosen("plain", "--lanes", 1), chosen("stacked", "--stack", 2, "--lanes", 2)
    assert stacked.units == plain.units
    assert plain.made_with is not None and plain.made_with.settings.stack == 1
    assert stacked.made_with == replace(plain.made_with, settings=replace(plain.made_with.settings, stack=2))
    assert stacked.forwards == plain.forwards
    chosen("lanes", "--lanes", 3)
    written = [(tmp_path / place / "selection.json").read_bytes() for place in ("plain", "lanes")]
    assert written[0] == written[1]


def test_select_refuses_another_runs_selection_and_any_other_file(world: World, tmp_path: Path, run: Run) -> None:
    assert run(*select_command(world, tmp_path / "sel.json")).code == 0
    (tmp_path / "notes.json").write_text("my notes")
    before = contents(tmp_path)
    refused = check_refused(run(*select_command(world, tmp_path / "sel.json", "--seed", 7)))
    assert "sel.json" in refused and "seed 42, now 7" in refused
    assert "notes.json" in check_refused(run(*select_command(world, tmp_path / "notes.json")))
    assert contents(tmp_path) == before


# Goals


def test_select_says_what_a_goal_left_also_in_json(world: World, tmp_path: Path, run: Run) -> None:
    command = select_command(world, tmp_path / "s.json", "--keep-params", 0.9)
    shown, goal = run(*command).out, run(*command, "--json").document["goal"]
    assert goal["what"] == "parameters" and goal["asked"] == 0.9 and goal["got"] <= 0.9
    (line,) = (line for line in shown.splitlines() if "90.0%" in line)
    assert "parameters" in line and f"{goal['got']:.2%}" in line


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined by ="])
@pytest.mark.parametrize("what", ["params", "flops", "latency"])
@pytest.mark.usefixtures("table_clock")
def test_the_old_name_of_a_goal_gives_a_note_and_the_same_selection(
    what: str, joined: bool, world: World, tmp_path: Path, run: Run
) -> None:
    def chosen(name: str, out: Path) -> tuple[bytes, list[str]]:
        words = [f"--{name}=0.85"] if joined else [f"--{name}", "0.85"]
        ran = run(*select_command(world, out, "--target", "mlp", "--json", *words))
        assert ran.code == 0 and ran.document["goal"]["got"] <= 0.85
        return out.read_bytes(), ran.complaints

    new, nothing = chosen(f"keep-{what}", tmp_path / "new.json")
    assert nothing == []
    if what == "latency":  # the table of this machine is the same one
        (tmp_path / "old.latency.json").write_bytes((tmp_path / "new.latency.json").read_bytes())
    old, notes = chosen(f"target-{what}", tmp_path / "old.json")
    assert old == new
    assert len(notes) == 1
    assert f"--target-{what}" in notes[0] and f"--keep-{what}" in notes[0]


def test_an_old_name_and_the_new_one_are_one_option(world: World, tmp_path: Path, run: Run) -> None:
    """The last one counts, as for any option."""
    ran = run(*select_command(world, tmp_path / "s.json", "--target-params", 0.95, "--keep-params", 0.9, "--json"))
    assert (ran.code, len(ran.complaints)) == (0, 1)
    assert ran.document["goal"]["asked"] == 0.9


def test_a_bad_value_of_an_old_name_is_a_note_and_a_refusal(world: World, tmp_path: Path, run: Run) -> None:
    ran = run(*select_command(world, tmp_path / "s.json", "--target-flops", 1.5))
    assert (ran.code, ran.out) == (2, "")
    note, refused = ran.complaints
    assert "--keep-flops" in note and refused.startswith("error: ") and "1.5" in refused
    assert not (tmp_path / "s.json").exists()
