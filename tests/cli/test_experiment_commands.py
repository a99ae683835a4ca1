from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from grids import write_grid
from secateur.experiment.store import RECORDS, read_store
from worlds import Run, World, check_refused

pytestmark = pytest.mark.usefixtures("fresh_workplace")


@pytest.fixture(params=["text", "image"])
def store(request: pytest.FixtureRequest, world: World, tmp_path: Path, run: Run) -> Path:
    ran = run("grid", write_grid(world, tmp_path, request.param), "-o", tmp_path / "store", "--device", "cpu")
    assert ran.code == 0, ran.err
    return tmp_path / "store"


def test_a_plan_says_what_there_is_to_do_and_does_nothing(world: World, tmp_path: Path, run: Run) -> None:
    path = write_grid(world, tmp_path)
    ran = run("grid", path, "-o", tmp_path / "store", "--plan")
    assert ran.code == 0 and re.search("14 runs.*Tiny 14.*14 left", ran.out)
    shown = run("grid", path, "-o", tmp_path / "store", "--plan", "--json").document
    assert [table["number"] for table in shown["tables"]] == ["4", "ablation"] and len(shown["left"]) == 14
    assert not (tmp_path / "store").exists()


def test_a_grid_says_how_far_it_is_and_how_it_ended(world: World, tmp_path: Path, run: Run) -> None:
    command = ("grid", write_grid(world, tmp_path), "-o", tmp_path / "store", "--device", "cpu")
    ran = run(*command)
    assert ran.code == 0
    assert re.match("14 .*done, 0 failed, 0 left", ran.out) and RECORDS in ran.out
    *lines, following = [line for line in ran.err.splitlines() if not line.startswith("The dense model's loss")]
    assert len(lines) == len(ran.err.splitlines()) - 2  # its weights are random, which is said once
    assert following == f"Next: secateur tables {tmp_path / 'store'}"
    assert len(lines) == 15 and lines[0].startswith("0 done, 0 failed, 14 left")
    assert re.search("14 runs.*Tiny 14.*; 0 left", run(*command, "--plan").out)
    assert re.search("Tiny head 0.3.*14 done, 0 failed, 0 left.* 0 s", lines[-1])
    assert run(*command, "--json").document == {"done": 14, "failed": 0, "left": 0, "problems": []}


def test_a_model_that_is_not_there_is_a_sentence_and_the_rest_is_done(world: World, tmp_path: Path, run: Run) -> None:
    path = write_grid(world, tmp_path, change=lambda text: text.replace("[models]", '[models]\nGone = "nowhere"'))
    ran = run("grid", path, "-o", tmp_path / "store", "--device", "cpu")
    assert ran.code == 2 and re.match("14 .*done, 0 failed, 14 left", ran.out)
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "nowhere" in errors[0]


def test_a_bad_grid_or_place_is_refused(world: World, tmp_path: Path, run: Run) -> None:
    path = write_grid(world, tmp_path, change=lambda text: text.replace('"ucb", "ts"', '"ucb", "tss"'))
    refused = check_refused(run("grid", path, "-o", tmp_path / "store"), tmp_path / "store")
    assert "tss" in refused and str(path) in refused
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in check_refused(run("grid", write_grid(world, tmp_path), "-o", tmp_path / "file"))
    both = check_refused(run("grid", path, "-o", tmp_path / "store", "--ray", "local", "--workers", "2"), tmp_path / "store")
    assert "--workers" in both and "--ray" in both


def test_a_comparison_gives_intervals_tests_and_the_family(store: Path, run: Run) -> None:
    ran = run("compare", store)
    assert ran.code == 0, ran.err
    # Table 4 or 9 has four other methods for two bandits, the ablation greedy for UCB at two pool sizes.
    assert "family of 10" in " ".join(ran.out.split())
    found = run("compare", store, "--json").document
    assert (found["family"], len(found["comparisons"])) == (10, 4)
    assert (found["claims"], found["claimed"]) == (["greedy", "random"], 6)
    first = found["comparisons"][0]
    assert (first["baseline"], first["n"], first["planned"]) == ("greedy", 2, 2)
    assert all(first[name][0] <= first["mean"] <= first[name][1] for name in ("percentile", "bca", "t"))
    assert "| bca 95% |" in run("compare", store, "--interval", "bca").out
    assert "'basic'" in check_refused(run("compare", store, "--interval", "basic"))
    assert len(run("compare", store, "--against", "magnitude", "--json").document["comparisons"]) == 2


def test_any_method_can_be_compared_with_all_the_others(store: Path, run: Run) -> None:
    found = run("compare", store, "--method", "ucb", "--against", "all", "--json").document
    first = [c for c in found["comparisons"] if not c["vary"]]
    assert {(c["method"], c["baseline"]) for c in first} == {
        ("ucb", b) for b in ("random", "magnitude", "fisher", "greedy", "ts")
    }
    assert found["family"] == len(found["comparisons"])
    assert "'ucbb'" in check_refused(run("compare", store, "--method", "ucbb"))
    assert "'al'" in check_refused(run("compare", store, "--against", "al"))


def test_tables_are_printed_or_written_in_three_forms(store: Path, tmp_path: Path, run: Run) -> None:
    ran = run("tables", store)
    assert ran.code == 0 and "| Tiny |" in ran.out and "missing" not in ran.out
    assert run("tables", store, "-o", tmp_path / "out").code == 0
    suffixes = {path.suffix for path in (tmp_path / "out").iterdir()}
    assert suffixes == {".md", ".csv", ".tex"}
    assert "no such row" in run("tables", store, "--beside-paper").out
    assert (tmp_path / "out" / "ablation-pool-size.md").exists()
    assert run("tables", store, "--table", "3").out.count("**Table") == 1
    assert "'12'" in check_refused(run("tables", store, "--table", "12"))


@pytest.mark.slow
def test_figures_are_written(store: Path, tmp_path: Path, run: Run) -> None:
    ran = run("figures", store, "-o", tmp_path / "out")
    assert ran.code == 0
    assert {"figure1.svg", "ablation-pool-size.png"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "tables", "figures"])
def test_a_store_that_is_missing_or_edited_is_one_sentence(command: str, store: Path, tmp_path: Path, run: Run) -> None:
    out = ["-o", tmp_path / "out"] if command == "figures" else []
    missing = check_refused(run(command, tmp_path / "none", *out), tmp_path / "out")
    assert "no store" in missing and str(tmp_path / "none") in missing
    path = store / RECORDS
    path.write_bytes(path.read_bytes().replace(b'"zeroed_percent"', b'"zeroed"', 1))
    assert "edited" in check_refused(run(command, store, *out), tmp_path / "out")


def test_a_torn_store_is_read_with_a_warning(store: Path, run: Run) -> None:
    path = store / RECORDS
    n = len(read_store(store)[0])
    path.write_bytes(path.read_bytes()[:-3])
    ran = run("tables", store)
    assert ran.code == 0 and "torn" in ran.err
    assert len(read_store(store)[0]) == n - 1


@pytest.mark.parametrize(("command", "package"), [("compare", "scipy"), ("figures", "matplotlib")])
def test_a_missing_extra_is_one_sentence(
    command: str, package: str, store: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    out = ["-o", tmp_path / "out"] if command == "figures" else []
    refused = check_refused(run(command, store, *out))
    assert f"pip install {package}" in refused and "experiment" in refused


def test_a_plan_is_json_that_says_which_runs_make_a_table(store: Path) -> None:
    (plan,) = (store / "plans").iterdir()
    fields = json.loads(plan.read_text())
    keys = {key for t in fields["tables"] for c in t["cells"] for runs in c["runs"].values() for key in runs.values()}
    assert keys == set(read_store(store)[0])
