from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file, save_file

import secateur as sc
from secateur import cli
from secateur.prune import METHODS, SEARCH_METHODS, choose_units
from test_prune import N_UNITS, SEQ_LEN, K, World, loaded, make_world
from tiny import FAMILIES_TINY, GROUP, randomised

tf: Any = transformers  # its classes are not typed

SMALL = ["--ratio", "0.3", "--pulls-per-step", "4", "--group-width", str(GROUP), "--seq-len", str(SEQ_LEN), "--device", "cpu"]
SMALL += ["--layout", "none"]
PROGRESS = re.compile(
    r"(loading|reading|choosing|evaluating|measuring|taking over|cutting|proving|repairing|writing) .*"
    r"|step \d+/\d+: (head|mlp) \d+\.\d+ \(reward \d\.\d+\)"
)
COMMANDS = ("prune", "select", "shrink", "measure", "evaluate", "units", "bench", "grid", "compare", "tables", "figures")
FILES = ["evaluation.json", "journal.jsonl", "selection.json"]


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit code and what it wrote."""

    code: int | str | None
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output, which is one JSON document without nan and the infinities, and nothing else."""
        return json.loads(self.out, parse_constant=pytest.fail)

    @property
    def complaints(self) -> list[str]:
        """The lines on standard error that are not progress."""
        return [line for line in self.err.splitlines() if not PROGRESS.fullmatch(line)]


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in this process, and puts back what `main` changes of the process."""
    for name, value in {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", sys.argv)
    verbosity, terminate = tf.logging.get_verbosity(), signal.getsignal(signal.SIGTERM)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["secateur", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return Ran(exit.value.code, *capsys.readouterr())

    yield call
    tf.logging.set_verbosity(verbosity)
    signal.signal(signal.SIGTERM, terminate)


def prune_command(world: World, out: Path, *more: object, task: str = "text", model: object = None) -> list[object]:
    folder, data = world.of(task)
    return ["prune", model or folder, "--calibration", data, *SMALL, "-o", out, *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_refused(ran: Ran, *left_out: Path) -> str:
    """One sentence beside the progress, exit code 2, and nothing at the places left out; gives the sentence."""
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.complaints) == 1, ran.err
    assert ran.complaints[0].startswith("error: ")
    assert [str(path) for path in left_out if path.exists()] == []
    return ran.complaints[0].removeprefix("error: ")


# prune


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("target", ["head", "mlp", "both"])
@pytest.mark.parametrize("method", METHODS)
def test_prune_writes_k_units_of_the_target_and_what_an_evaluation_with_the_library_gives(
    method: str, target: str, task: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", "--method", method, "--target", target, "--json", task=task))
    assert (ran.code, ran.complaints) == (0, [])
    searched = method in SEARCH_METHODS
    assert sorted(contents(tmp_path / "out")) == [name for name in FILES if searched or name != "journal.jsonl"]
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    selection = sc.Selection.load(tmp_path / "out" / "selection.json")
    assert len(set(selection.units)) == len(selection.units) == K[target]
    assert {unit.kind for unit in selection.units} <= ({"head", "mlp"} if target == "both" else {target})
    pulls = 4 * K[target] if searched else 0
    assert written["pulls"] == selection.pulls == pulls
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


@pytest.mark.parametrize("task", ["text", "image"])
def test_select_and_then_evaluate_give_what_prune_gives(task: str, world: World, tmp_path: Path, run: Run) -> None:
    folder, data = world.of(task)
    pruned = run(*prune_command(world, tmp_path / "out", "--json", task=task)).document
    chosen = run("select", folder, "--calibration", data, *SMALL, "-o", tmp_path / "sel.json", "--json")
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


def test_evaluate_without_a_selection_gives_the_dense_model_alone(world: World, run: Run) -> None:
    ran = run("evaluate", world.text_model, "--data", world.text, "--seq-len", SEQ_LEN, "--json")
    model, _, evaluation = loaded(world, "text")
    assert ran.document["dense"]["perplexity"] == sc.perplexity(model, evaluation)
    assert "pruned" not in ran.document


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_pulls(world: World, tmp_path: Path, run: Run) -> None:
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(*prune_command(world, tmp_path / place, "--seed", seed)).code == 0
    first, again, other = ((tmp_path / place / "selection.json").read_bytes() for place in "abc")
    assert first == again
    pulled = [[(pull["unit"], pull["batches"]) for pull in json.loads(text)["trace"]] for text in (first, other)]
    assert pulled[0] != pulled[1]


def test_the_cache_changes_no_byte_of_the_selection(world: World, tmp_path: Path, run: Run) -> None:
    for memory in (0, 1):
        assert run(*prune_command(world, tmp_path / str(memory), "--cache-memory", memory)).code == 0
    assert (tmp_path / "0" / "selection.json").read_bytes() == (tmp_path / "1" / "selection.json").read_bytes()


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("command", ["prune", "select"])
def test_stacked_runs_and_lanes_choose_the_same_units_and_the_stack_is_recorded(
    command: str, task: str, world: World, tmp_path: Path, run: Run
) -> None:
    folder, data = world.of(task)

    def chosen(place: str, *options: object) -> sc.Selection:
        out = tmp_path / place if command == "prune" else tmp_path / place / "selection.json"
        ran = run(command, folder, "--calibration", data, *SMALL, "-o", out, *options)
        assert (ran.code, ran.complaints) == (0, [])
        return sc.Selection.load(tmp_path / place / "selection.json")

    plain, stacked = chosen("plain", "--lanes", 1), chosen("stacked", "--stack", 2, "--lanes", 2)
    assert stacked.units == plain.units
    assert stacked.settings == plain.settings | {"stack": 2}
    assert plain.settings["stack"] == 1
    assert stacked.forwards == plain.forwards
    chosen("lanes", "--lanes", 3)
    written = [(tmp_path / place / "selection.json").read_bytes() for place in ("plain", "lanes")]
    assert written[0] == written[1]


def test_a_run_with_another_stack_is_another_run_and_with_other_lanes_the_same(world: World, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path, "--lanes", 1)).code == 0
    assert "(stack 1, now 2)" in check_refused(run(*prune_command(world, tmp_path, "--stack", 2)))
    assert run(*prune_command(world, tmp_path, "--lanes", 2)).code == 0


def test_another_seed_gives_another_random_selection(world: World, tmp_path: Path, run: Run) -> None:
    drawn = [
        run(*prune_command(world, tmp_path / str(seed), "--method", "random", "--seed", seed, "--json")) for seed in (1, 2)
    ]
    assert drawn[0].document["units"] != drawn[1].document["units"]


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
    assert f"3 units zeroed: {record['zeroed_percent']:.4f}% of {record['total_params']:,} parameters" in shown.out
    for name in FILES:
        assert str(tmp_path / "out" / name) in shown.out


# units


def test_units_counts_a_known_model_without_its_weights(run: Run) -> None:
    document = run("units", "gpt2", "--json").document
    assert (document["candidates"], document["selected"], document["total_params"]) == (144, 14, 124439808)
    assert document["unit_ratio"] == pytest.approx(14 / 144)
    head = 4 * 768 * 64 + 3 * 64  # Eq. 12
    assert document["zeroed_percent"] == pytest.approx(100 * 14 * head / 124439808, abs=1e-4)
    assert [layer["params"] for layer in document["layers"]] == [12 * head] * 12


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "microsoft/swin-tiny-patch4-window7-224"])
def test_units_gives_a_range_where_units_differ_in_size(name: str, run: Run) -> None:
    document = run("units", name, "--json").document
    assert (document["candidates"], document["selected"], document["total_params"]) == (138, 14, 28288354)
    low, high = document["zeroed_percent"]
    first, second, last = (4 * width * 32 + 3 * 32 for width in (96, 192, 768))  # a head of each stage (Eq. 12)
    assert low == pytest.approx(100 * (6 * first + 8 * second) / 28288354, abs=1e-4)  # the first stage has 6 heads in all
    assert high == pytest.approx(100 * 14 * last / 28288354, abs=1e-4)


@pytest.mark.parametrize("target", ["head", "mlp", "both"])
def test_units_needs_only_the_config_of_a_folder(target: str, world: World, tmp_path: Path, run: Run) -> None:
    shutil.copy(world.text_model / "config.json", tmp_path)
    options = ["--target", target, "--group-width", GROUP, "--ratio", 0.3, "--json"]
    whole, bare = run("units", world.text_model, *options).document, run("units", tmp_path, *options).document
    assert whole | {"model": ""} == bare | {"model": ""}
    assert (bare["candidates"], bare["selected"]) == (N_UNITS[target], K[target])
    assert bare["total_params"] == sum(parameter.numel() for parameter in FAMILIES_TINY["gpt2"]().parameters())


def test_the_table_of_units_shows_its_numbers_whole_at_eighty_columns(run: Run) -> None:
    ran = run("units", "gpt2")
    assert ran.code == 0
    assert ran.out.count(f"{12 * (4 * 768 * 64 + 3 * 64):,}") == 12
    assert "…" not in ran.out


# bench


@pytest.fixture(scope="module")
def roomy(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models by task, with room for the texts of 128 tokens and the 8 classes of the benchmark."""
    folders = {}
    for task, fields in (("text", {"n_positions": 128}), ("image", {"num_labels": 8})):
        folders[task] = Path(shutil.copytree(world.of(task)[0], tmp_path_factory.mktemp("roomy") / f"{task}-model"))
        model: Any = FAMILIES_TINY["gpt2" if task == "text" else "vit"]()
        for name, value in fields.items():
            setattr(model.config, name, value)
        randomised(type(model)(model.config)).save_pretrained(folders[task])  # type: ignore[operator]
    return folders


def bench(run: Run, path: Path, *arguments: object) -> list[dict[str, Any]]:
    """The rows that the benchmark wrote, of which its table has a line each."""
    ran = run("bench", *arguments, "--device", "cpu", "--json", path)
    assert (ran.code, ran.complaints) == (0, [])
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document.keys() == {"rows"}
    rows: list[dict[str, Any]] = document["rows"]
    head, rule, *lines = ran.out.splitlines()
    assert head.startswith("| what | speedup |") and set(rule) == {"|", "-"}
    assert [line.split(" | ")[:2] for line in lines] == [[f"| {row['name']}", f"{row['speedup']:.2f}"] for row in rows]
    for row in rows:
        assert all(value > 0 and math.isfinite(value) for name, value in row.items() if isinstance(value, float) and value)
        assert min(row[name] for name in ("speedup", "flop_limit", "plain_flops", "least_flops", "peak", "seconds")) > 0
        assert row["difference"] < 1e-4
    return rows


def test_bench_shows_a_line_for_each_model_and_writes_its_numbers(roomy: dict[str, Path], tmp_path: Path, run: Run) -> None:
    rows = bench(run, tmp_path / "new" / "bench.json", roomy["text"], roomy["image"], "--pulls", 2)
    assert [(row["name"], row["pulls"]) for row in rows] == [("text-model head", 2), ("image-model head", 2)]
    for row in rows:
        assert 1 < row["flop_ratio"] <= row["flop_limit"] * 1.0001
        assert row["flop_ratio"] == row["plain_flops"] / row["flops"]
        assert row["speedup"] == row["plain_seconds"] / row["seconds"]
    assert list(contents(tmp_path)) == ["new/bench.json"]


@pytest.mark.parametrize("options", [["--stack", 2, "--lanes", 2], ["--target", "mlp"], ["--cache-memory", 0]], ids=str)
def test_bench_takes_the_options_of_the_meter(options: list[object], roomy: dict[str, Path], tmp_path: Path, run: Run) -> None:
    [row] = bench(run, tmp_path / "bench.json", roomy["text"], "--pulls", 2, *options)
    assert row["flop_ratio"] <= row["flop_limit"] * 1.0001
    assert (row["flop_ratio"] < 2.01) == ("--cache-memory" in options)


@pytest.mark.parametrize(("task", "steps"), [("text", 2), ("image", 1)])
def test_bench_compares_a_search_over_the_steps_asked_for(
    task: str, steps: int, roomy: dict[str, Path], tmp_path: Path, run: Run
) -> None:
    [row] = bench(run, tmp_path / "bench.json", roomy[task], "--selection", "--steps", steps)
    assert (row["name"], row["pulls"]) == (f"{task}-model head selection", 32 * steps)
    assert row["flops"] is row["flop_ratio"] is None


def test_bench_without_a_file_writes_none_and_takes_the_shape_of_a_folder(
    roomy: dict[str, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(roomy["text"] / "config.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    ran = run("bench", f"shape:{tmp_path}", "--pulls", 1)
    assert (ran.code, ran.complaints, ran.out.count("\n")) == (0, [], 3)
    assert list(contents(tmp_path)) == ["config.json"]


def test_bench_alone_measures_the_models_it_names_in_its_help(
    roomy: dict[str, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "DEFAULT_MODELS", (str(roomy["image"]), str(roomy["text"])))
    rows = bench(run, tmp_path / "bench.json", "--pulls", 1)
    assert [row["name"] for row in rows] == ["image-model head", "text-model head"]


@pytest.mark.parametrize("task", ["text", "image"])
def test_bench_measures_a_model_of_few_positions_or_few_classes(task: str, world: World, tmp_path: Path, run: Run) -> None:
    assert len(bench(run, tmp_path / "bench.json", world.of(task)[0], "--pulls", 2)) == 1


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/model"], "no folder '/no/such/model'"),
        (["nobody/nothing-at-all"], "nobody/nothing-at-all.*local folder"),
        (["shape:nothing-at-all"], "nothing-at-all.*local folder"),
        (["shape:/no/such/model"], "no folder '/no/such/model'"),
        (["MODEL", "--target", "heads"], "'heads'.*Did you mean 'head'"),
        (["MODEL", "--pulls", "0"], "pulls are 0,"),
        (["MODEL", "--pulls", "-1"], "pulls are -1,"),
        (["MODEL", "--pulls", "two"], "--pulls"),
        (["MODEL", "--selection", "--steps", "-1"], r"is -0\.1|are -1"),
        (["MODEL", "--selection", "--steps", "9"], r"is 1\.0|are 9"),
        (["MODEL", "--selection", "--steps", "10"], r"is 1\.1|are 10"),
        (["MODEL", "--dtype", "float8"], "'float8'.*float32, bfloat16, float16"),
        (["MODEL", "--device", "gpu"], "'gpu'.*--device cpu"),
        (["shape:MODEL", "--dtype", "float8"], "'float8'.*float32, bfloat16, float16"),
        (["shape:MODEL", "--device", "gpu"], "'gpu'.*--device cpu"),
        (["MODEL", "--stack", "0"], "stack is 0"),
        (["MODEL", "--lanes", "0"], "lanes are 0"),
        (["MODEL", "--lanes", "-3"], "lanes are -3"),
        (["MODEL", "--cache-memory", "-2"], "-2"),
        (["MODEL", "/no/such/model", "--pulls", "1"], "no folder '/no/such/model'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_benchmark_that_cannot_be_made_is_one_sentence_and_leaves_nothing(
    arguments: list[str], said: str, roomy: dict[str, Path], tmp_path: Path, run: Run
) -> None:
    arguments = [argument.replace("MODEL", str(roomy["text"])) for argument in arguments]
    sentence = check_refused(run("bench", *arguments, "--json", tmp_path / "new" / "bench.json"), tmp_path / "new")
    assert re.search(said, sentence)


@pytest.mark.parametrize("steps", [-1, 9, 10])
def test_bench_says_how_many_steps_there_can_be(steps: int, roomy: dict[str, Path], run: Run) -> None:
    assert re.search(rf"steps are {steps},", check_refused(run("bench", roomy["text"], "--selection", "--steps", steps)))


@pytest.mark.parametrize("place", ["folder", "file/bench.json", "file/further/bench.json"])
def test_bench_refuses_a_place_that_it_cannot_write_before_a_model_is_read(place: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    ran = run("bench", "/no/such/model", "--json", tmp_path / place)
    assert str(tmp_path / place.removesuffix("/bench.json")) in check_refused(ran)
    assert "loading" not in ran.err
    assert contents(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("place", ["/proc/self/new/bench.json", "/sys/new/bench.json"])
def test_bench_refuses_a_place_where_even_root_cannot_write(place: str, roomy: dict[str, Path], run: Run) -> None:
    ran = run("bench", roomy["text"], "--pulls", 1, "--json", place)
    assert ran.code == 2
    assert len(ran.complaints) == 1, ran.err
    assert re.match(rf"error: Cannot write (to )?{Path(place).parent}", ran.complaints[0])
    assert not Path(place).parent.exists()


# Help


def test_secateur_alone_shows_the_commands(run: Run) -> None:
    ran = run()
    assert all(re.search(rf"^\W*{command} ", ran.out + ran.err, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_lists_each_of_its_options_once(
    command: str, flag: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    ran = run(command, flag)
    assert (ran.code, ran.err) == (0, "")
    parameters: Any = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    options = [max(parameter.opts, key=len) for parameter in parameters if parameter.opts[0].startswith("-")]
    listed = re.findall(r"^\W{1,6}(--[a-z-]+)", ran.out, re.MULTILINE)
    assert options
    assert sorted(listed) == sorted({*options, "--help"})


# Bad settings


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--ratio", "0", "ratio is 0"),
        ("--ratio", "1", "ratio is 1"),
        ("--ratio", "1.5", "1.5"),
        ("--ratio", "nan", "nan"),
        ("--ratio", "-1", "-1"),
        ("--ratio", "abc", "ratio"),
        ("--ratio", "0.99", "9 of 9"),
        ("--method", "ucbb", "ucb, ts, greedy"),
        ("--target", "heads", "head, mlp, both"),
        ("--dtype", "float8", "float32, bfloat16, float16"),
        ("--device", "gpu", "--device cpu"),
        ("--device", "meta", "meta"),
        ("--seed", "-1", "-1"),
        ("--seed", "1.5", "seed"),
        ("--pulls-per-step", "0", "at least 1"),
        ("--temperature", "0", "above 0"),
        ("--temperature", "nan", "nan"),
        ("--batches-per-pull", "0", "at least 1"),
        ("--batches-per-pull", "100", "1 to "),
        ("--batches-per-step", "-1", "batches per step"),
        ("--batches-per-step", "100", "1 to "),
        ("--stack", "0", "stack is 0"),
        ("--stack", "1.5", "stack"),
        ("--lanes", "0", "lanes are 0"),
        ("--lanes", "-3", "lanes are -3"),
        ("--cache-memory", "-2", "-2"),
        ("--cache-memory", "nan", "nan"),
        ("--ucb-c", "-1", "-1"),
        ("--pool-size", "-1", "pool size"),
        ("--screen", "-2", "screen"),
        ("--score-batches", "0", "at least 1"),
        ("--group-width", "0", "at least 1"),
        ("--batch-size", "0", "batch size is 0"),
        ("--calibration-size", "0", "at least 1"),
        ("--evaluation-size", "0", "at least 1"),
        ("--evaluation-batches", "-2", "-2"),
        ("--seq-len", "1", "at least 2"),
        ("--seq-len", "17", "at most 16"),
        ("--calibration", "nosuch", "'nosuch'"),
        ("--data", "nosuch", "'nosuch'"),
        ("--nosuch", "1", "--nosuch"),
    ],
)
def test_a_bad_setting_is_one_sentence_and_leaves_nothing(
    option: str, value: str, said: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", option, value))
    assert said in check_refused(ran, tmp_path / "out")


def test_after_a_refused_setting_the_mended_command_works_in_the_same_place(world: World, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path / "out", "--batches-per-pull", 100)).code == 2
    mended = run(*prune_command(world, tmp_path / "out", "--batches-per-pull", 1))
    assert (mended.code, mended.complaints) == (0, [])


def test_a_misspelt_method_is_answered_with_the_one_it_resembles(world: World, tmp_path: Path, run: Run) -> None:
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", "--method", "magnitud")), tmp_path / "out")
    assert re.search(r"mean '?magnitude'?\?", sentence)


@pytest.mark.parametrize("arguments", [["prune"], ["prune", "gpt2"], ["prun"], ["units", "gpt2", "more"]], ids=" ".join)
def test_a_command_that_lacks_something_is_one_sentence(arguments: list[str], run: Run) -> None:
    check_refused(run(*arguments))


# Bad models


def copied(world: World, place: Path, task: str = "text") -> Path:
    return Path(shutil.copytree(world.of(task)[0], place / "model"))


def with_config(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def without_weights(world: World, place: Path) -> Path:
    (copied(world, place) / "model.safetensors").unlink()
    return place / "model"


def with_cut_weights(world: World, place: Path) -> Path:
    path = copied(world, place) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return place / "model"


def with_pickled_weights(world: World, place: Path) -> Path:
    torch.save({}, without_weights(world, place) / "pytorch_model.bin")
    return place / "model"


def without_tokenizer(world: World, place: Path) -> Path:
    for path in copied(world, place).glob("tokenizer*"):
        path.unlink()
    return place / "model"


def with_words_beyond_the_embedding(world: World, place: Path) -> Path:
    """The tokenizer of another model: its numbers go beyond the embedding."""
    path = copied(world, place) / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["model"]["vocab"] = {word: i + 1000 for word, i in fields["model"]["vocab"].items()}
    path.write_text(json.dumps(fields | {"added_tokens": []}))
    return place / "model"


def with_nan_weights(world: World, place: Path) -> Path:
    path = copied(world, place) / "model.safetensors"
    weights = load_file(path)
    weights["transformer.ln_f.weight"].fill_(math.nan)
    save_file(weights, path, metadata={"format": "pt"})
    return place / "model"


def empty_folder(world: World, place: Path) -> Path:
    (place / "model").mkdir()
    return place / "model"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (without_weights, "safetensors"),
        (with_pickled_weights, "safetensors"),
        (with_cut_weights, "damaged or cut short"),
        (lambda world, place: with_config(copied(world, place), model_type="martian"), "martian"),
        (lambda world, place: with_config(copied(world, place), model_type="bert"), "'bert'"),
        (lambda world, place: with_config(copied(world, place), n_layer=5), "lacks 24"),
        (lambda world, place: with_config(copied(world, place), n_embd=24), r"^(?!.*above report).*(shape|size)"),
        (without_tokenizer, "tokenizer"),
        (with_words_beyond_the_embedding, "tokenizer|vocabulary|embedding"),
        (with_nan_weights, "is nan"),
        (empty_folder, r"config\.json"),
        (lambda world, place: place / "no" / "such" / "model", "There is no folder"),
        (lambda world, place: world.text / "train.txt", "is a file"),
    ],
    ids=[
        "no weights",
        "pickled weights",
        "cut weights",
        "unknown type",
        "unknown family",
        "too few tensors",
        "other shapes",
        "no tokenizer",
        "other tokenizer",
        "nan weights",
        "empty folder",
        "missing",
        "file",
    ],
)
def test_a_model_that_cannot_be_used_is_one_sentence_and_leaves_nothing(
    made: Callable[[World, Path], Path], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", model=made(world, tmp_path)))
    assert re.search(said, check_refused(ran, tmp_path / "out"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No try to reach the hub, which takes some twenty seconds to fail where there is no network."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("command", ["prune", "units"])
def test_a_model_name_without_the_hub_is_one_sentence(command: str, world: World, tmp_path: Path, run: Run) -> None:
    whole = prune_command(world, tmp_path / "out", model="nobody/nothing-at-all")
    sentence = check_refused(run(*(whole if command == "prune" else ["units", "nobody/nothing-at-all"])), tmp_path / "out")
    assert "nobody/nothing-at-all" in sentence
    assert "local folder" in sentence


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["wikitext2", "nobody/nothing-at-all"])
def test_a_data_set_name_without_the_hub_is_one_sentence(name: str, world: World, tmp_path: Path, run: Run) -> None:
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", "--calibration", name)), tmp_path / "out")
    assert "local file or folder" in sentence


# Bad data


def text_of(content: bytes) -> Callable[[World, Path], list[object]]:
    def options(world: World, place: Path) -> list[object]:
        (place / "some.txt").write_bytes(content)
        return ["--calibration", place / "some.txt", "--data", world.text]

    return options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (text_of(b""), "some.txt.*less than one text"),
        (text_of(b"the cat sees\n"), "less than one text of 16 tokens"),
        (text_of(b"caf\xe9 " * 99), "not text in UTF-8"),
        (lambda world, place: ["--calibration", world.text / "train.txt"], "no held-out split"),
        (lambda world, place: ["--data", world.text / "train.txt"], "what the units were chosen on"),
        (lambda world, place: ["--calibration", world.images], "holds no text"),
        (lambda world, place: ["--calibration", place], "holds no text"),
    ],
    ids=["empty", "shorter than a window", "not UTF-8", "the same file", "the same file in a folder", "images", "empty folder"],
)
def test_text_that_cannot_be_used_is_one_sentence_and_leaves_nothing(
    options: Callable[[World, Path], list[object]], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", *options(world, tmp_path)))
    assert re.search(said, check_refused(ran, tmp_path / "out"))


def cut_an_image(images: Path) -> None:
    path = images / "train" / "LABEL_3" / "2.jpg"
    path.write_bytes(path.read_bytes()[:-100])


def remove_the_images(images: Path) -> None:
    shutil.rmtree(images / "train")
    (images / "train").mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut_an_image, r"LABEL_3/2\.jpg cannot be read"),
        (lambda images: (images / "train" / "LABEL_0").rename(images / "train" / "zebra"), "'zebra' is not a class"),
        (lambda images: shutil.rmtree(images / "val"), "no test split"),
        (lambda images: shutil.copytree(images / "train", images / "val", dirs_exist_ok=True), "no held-out split"),
        (remove_the_images, "holds no images"),
    ],
    ids=["broken image", "unknown class", "no images to judge on", "the same images", "no images to choose on"],
)
def test_images_that_cannot_be_used_are_one_sentence_and_leave_nothing(
    spoil: Callable[[Path], object], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    spoil(Path(shutil.copytree(world.images, tmp_path / "images")))
    ran = run(*prune_command(world, tmp_path / "out", "--calibration", tmp_path / "images", task="image"))
    assert re.search(said, check_refused(ran, tmp_path / "out"))


def test_an_image_model_without_images_is_told_which_option_the_command_has(world: World, run: Run) -> None:
    sentence = check_refused(run("evaluate", world.image_model))
    assert "--data" in sentence and "--calibration" not in sentence


# Bad selections


@pytest.fixture(scope="module")
def selection(world: World) -> dict[str, Any]:
    """The fields of a selection of the tiny text model."""
    settings = sc.Settings(str(world.text_model), calibration=str(world.text), seq_len=SEQ_LEN, ratio=0.3, method="magnitude")
    model, calibration, _ = loaded(world, "text")
    fields: dict[str, Any] = json.loads(json.dumps(choose_units(model, calibration, settings.for_task("text")).to_json()))
    return fields


def head(layer: Any, index: Any, kind: str = "head") -> list[dict[str, Any]]:
    return [{"kind": kind, "layer": layer, "index": index}]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"units": head(0, 3)}, "head 0.3.*has 3 heads"),
        ({"units": head(3, 0)}, "head 3.0.*has 3 blocks"),
        ({"units": head(0, 1, "mlp")}, "mlp 0.1"),
        ({"units": head(-1, 0)}, "damaged selection"),
        ({"units": head(0.5, 0)}, "damaged selection"),
        ({"units": head(0, 0, "kv")}, "damaged selection"),
        ({"units": 5}, "damaged selection"),
        ({"settings": None}, "damaged selection"),
        ({"trace": [{}]}, "damaged selection"),
        ({"calibration": {"name": "text"}}, "damaged selection"),
        ({"calibration": {"name": "text", "split": "train", "files": None, "rows": None}}, "damaged selection"),
        ({"format": 2}, "format 2"),
    ],
    ids=str,
)
def test_a_selection_that_cannot_be_used_is_one_sentence(
    changed: dict[str, Any], said: str, selection: dict[str, Any], world: World, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "sel.json").write_text(json.dumps(selection | changed))
    judge = ["evaluate", world.text_model, "--selection", tmp_path / "sel.json", "--data", world.text, "--seq-len", SEQ_LEN]
    assert re.search(said, check_refused(run(*judge, "-o", tmp_path / "judged.json"), tmp_path / "judged.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", None], ids=repr)
def test_a_file_that_is_no_selection_is_one_sentence(content: bytes | None, world: World, tmp_path: Path, run: Run) -> None:
    if content is not None:
        (tmp_path / "sel.json").write_bytes(content)
    assert "sel.json" in check_refused(run("evaluate", world.text_model, "--selection", tmp_path / "sel.json"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_selection_for_another_model_is_refused(
    family: str, selection: dict[str, Any], world: World, tmp_path: Path, run: Run
) -> None:
    model: Any = FAMILIES_TINY[family]()
    with torch.no_grad():
        next(model.parameters()).mul_(2)  # so that it is another one even if it is of the same family
    model.save_pretrained(tmp_path / "other")
    for path in world.text_model.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "other")
    (tmp_path / "sel.json").write_text(json.dumps(selection))
    sentence = check_refused(run("evaluate", tmp_path / "other", "--selection", tmp_path / "sel.json", "--data", world.text))
    assert str(world.text_model) in sentence and str(tmp_path / "other") in sentence


def test_a_selection_is_not_judged_on_what_chose_it(selection: dict[str, Any], world: World, tmp_path: Path, run: Run) -> None:
    (tmp_path / "sel.json").write_text(json.dumps(selection))
    judge = ["evaluate", world.text_model, "--selection", tmp_path / "sel.json", "--data", world.text / "train.txt"]
    for length in (SEQ_LEN, SEQ_LEN - 3):  # other windows of the same file
        assert "what the units were chosen on" in check_refused(run(*judge, "--seq-len", length))


# Bad places


@pytest.mark.parametrize("place", ["file", "file/below", "file/further/below"])
@pytest.mark.parametrize("command", ["prune", "select", "evaluate"])
def test_a_place_below_a_file_is_refused_before_the_model_is_read(
    command: str, place: str, world: World, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "file").write_text("mine")
    out = tmp_path / place if command == "prune" else tmp_path / place / "result.json"
    data = "--data" if command == "evaluate" else "--calibration"
    ran = run(command, world.text_model, data, world.text, "--seq-len", SEQ_LEN, "-o", out)
    assert "Cannot write" in check_refused(ran)
    assert "loading" not in ran.err
    assert contents(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("command", ["select", "evaluate"])
def test_a_folder_where_a_file_is_to_be_written_is_refused_before_the_model_is_read(
    command: str, world: World, tmp_path: Path, run: Run
) -> None:
    data = "--data" if command == "evaluate" else "--calibration"
    ran = run(command, world.text_model, data, world.text, "--seq-len", SEQ_LEN, "-o", tmp_path)
    assert str(tmp_path) in check_refused(ran)
    assert "loading" not in ran.err
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("place", ["/proc/secateur", "/sys/secateur", "/proc/self/secateur"])
def test_a_place_where_even_root_cannot_write_is_one_sentence(place: str, world: World, run: Run) -> None:
    if not Path(place).parent.exists():
        pytest.skip(f"{Path(place).parent} is Linux's")
    assert f"Cannot write to {place}" in check_refused(run(*prune_command(world, Path(place)))).replace("write /", "write to /")


@pytest.mark.parametrize("kept", FILES)
def test_another_runs_file_is_refused_and_left_as_it_was(kept: str, world: World, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path)).code == 0
    for name in FILES:
        if name != kept:
            (tmp_path / name).unlink()
    before = contents(tmp_path)
    assert kept in check_refused(run(*prune_command(world, tmp_path, "--seed", 7)))
    assert contents(tmp_path) == before


def test_select_refuses_another_runs_selection_and_any_other_file(world: World, tmp_path: Path, run: Run) -> None:
    select = ["select", world.text_model, "--calibration", world.text, *SMALL]
    assert run(*select, "-o", tmp_path / "sel.json").code == 0
    (tmp_path / "notes.json").write_text("my notes")
    before = contents(tmp_path)
    assert "sel.json belongs to another run" in check_refused(run(*select, "--seed", 7, "-o", tmp_path / "sel.json"))
    assert "notes.json" in check_refused(run(*select, "-o", tmp_path / "notes.json"))
    assert contents(tmp_path) == before


def test_a_place_where_another_run_is_at_work_is_refused(world: World, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("fcntl")
    with sc.Journal(tmp_path / "journal.jsonl", {}):
        before = contents(tmp_path)
        assert "Another run is writing" in check_refused(run(*prune_command(world, tmp_path)))
        assert contents(tmp_path) == before


@pytest.mark.parametrize("stage", ["first line of the journal", "journal", "selection", "evaluation"])
def test_a_full_disk_is_one_sentence_and_once_there_is_room_the_run_ends_the_same(
    stage: str, world: World, tmp_path: Path, run: Run
) -> None:
    resource = pytest.importorskip("resource")
    # For the evaluation, one that is larger than the other files: many batches, no pulls, little calibration data.
    long = ["--method", "random", "--calibration-size", 2, "--batch-size", 1, "--evaluation-batches", 0]
    command = long if stage == "evaluation" else []
    assert run(*prune_command(world, tmp_path / "whole", *command)).code == 0
    sizes = {name: len(content) for name, content in contents(tmp_path / "whole").items()}
    room = {
        "first line of the journal": 100,
        "journal": sizes.get("journal.jsonl", 0) // 2,
        "selection": sizes.get("journal.jsonl", 0),
        "evaluation": sizes["evaluation.json"] - 40,  # the seconds in it have more or fewer digits
    }[stage]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        ran = run(*prune_command(world, tmp_path / "out", *command))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"Cannot write {tmp_path / 'out' / stage.split()[-1]}" in check_refused(ran)
    assert set(contents(tmp_path / "out")) <= set(FILES)
    assert run(*prune_command(world, tmp_path / "out", *command)).code == 0
    for name in sizes.keys() - {"evaluation.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# Processes

SLOW = ["--pulls-per-step", 4000, "--batches-per-pull", 1]  # 12000 pulls


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "secateur.cli", *map(str, arguments)]
    heed = None if sys.platform == "win32" else lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's "&" ignores it
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)


def stop_at(journal: Path, lines: int, process: subprocess.Popen[str], stop: signal.Signals) -> Ran:
    """Send a signal once the journal has grown to so many lines; what the process left."""
    try:
        deadline = time.monotonic() + 120
        while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
            assert process.poll() is None, f"the run ended before it could be stopped: {process.communicate()}"
            assert time.monotonic() < deadline, f"the journal never came to {lines} lines"
            time.sleep(0.01)
        process.send_signal(stop)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return Ran(process.returncode, out, err)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_run_killed_again_and_again_ends_with_the_same_bytes(world: World, tmp_path: Path, run: Run) -> None:
    command, journal = prune_command(world, tmp_path / "cut", *SLOW), tmp_path / "cut" / "journal.jsonl"
    for lines in (50, 6000):
        killed = stop_at(journal, lines, start(*command), signal.SIGKILL)
        assert (killed.code, killed.out) == (-signal.SIGKILL, "")
        assert not (tmp_path / "cut" / "selection.json").exists()
    assert "taking over" in killed.err
    journal.write_bytes(journal.read_bytes()[:-7])  # as if the last line had not come to the disk
    assert run(*command).code == 0
    assert run(*prune_command(world, tmp_path / "whole", *SLOW)).code == 0
    for name in ("selection.json", "journal.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_run_that_is_asked_to_stop_says_how_to_go_on(stop: signal.Signals, world: World, tmp_path: Path) -> None:
    ran = stop_at(tmp_path / "journal.jsonl", 50, start(*prune_command(world, tmp_path, *SLOW)), stop)
    assert (ran.code, ran.out) == (130, "")
    assert sorted(contents(tmp_path)) == ["journal.jsonl"]
    assert len(ran.complaints) == 1
    assert re.search(r"Stopped\..* same command", ran.complaints[0])


def test_a_process_prints_one_json_document_and_nothing_else(world: World, tmp_path: Path, run: Run) -> None:
    process = start(*prune_command(world, tmp_path / "process", "--json"))
    out, err = process.communicate(timeout=120)
    ran = Ran(process.returncode, out, err)
    assert (ran.code, ran.complaints) == (0, [])
    here = run(*prune_command(world, tmp_path / "here", "--json")).document
    assert ran.document | {"selection_seconds": 0} == here | {"selection_seconds": 0}
    assert (tmp_path / "process" / "selection.json").read_bytes() == (tmp_path / "here" / "selection.json").read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_standard_output_that_takes_nothing_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "secateur.cli", "units", "gpt2", "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode not in (0, None)
    assert len(ended.stderr.splitlines()) == 1 and ended.stderr.startswith("error: "), ended.stderr


# Cutting

CUT = ["--no-measure", "--calibration-size", 16, "--evaluation-batches", 2]


@pytest.fixture(scope="module")
def cuts(world: World, selection: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A selection (sel.json) and the folder that `shrink` makes of it (small), which nobody changes."""
    place = tmp_path_factory.mktemp("cuts")
    (place / "sel.json").write_text(json.dumps(selection))
    model, calibration, _ = loaded(world, "text")
    processor = sc.load(str(world.text_model), device="cpu")[1]
    chosen = sc.Selection.load(place / "sel.json")
    name = str(world.text_model)
    sc.cut(model, chosen, place / "small", name=name, calibration=calibration, processor=processor, measuring=False)
    return place


def free(world: World, out: Path, *more: object, **options: Any) -> list[object]:
    """The last --layout counts."""
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
    chosen = run("select", tmp_path / "2", "--calibration", data, *SMALL, "-o", tmp_path / "sel.json")
    assert (chosen.code, chosen.complaints) == (0, [])
    again = run(*free(world, tmp_path / "1", "--target", "both", "--json", task=task))
    assert again.document == record


def test_shrink_writes_what_it_shows_and_again_the_same(cuts: Path, world: World, tmp_path: Path, run: Run) -> None:
    command = ["shrink", world.text_model, "--selection", cuts / "sel.json", "-o", tmp_path / "small", "--no-measure"]
    shown = run(*command)
    assert (shown.code, shown.complaints) == (0, [])
    record = run(*command, "--json").document
    assert f"{record['params']:,} of {record['dense_params']:,} parameters" in shown.out
    before = contents(tmp_path)
    assert run(*command).out == shown.out
    assert contents(tmp_path) == before
    assert (tmp_path / "small" / "model.safetensors").read_bytes() == (cuts / "small" / "model.safetensors").read_bytes()


def test_select_says_what_a_target_left_also_in_json(world: World, tmp_path: Path, run: Run) -> None:
    command = [
        "select",
        world.text_model,
        "--calibration",
        world.text,
        *SMALL,
        "--target-params",
        0.9,
        "-o",
        tmp_path / "s.json",
    ]
    assert "90.0% of the dense model's parameters were asked for" in run(*command).out
    assert run(*command, "--json").document["goal"]["got"] <= 0.9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target-params", 0.8, "--target-flops", 0.8], "2 targets"),
        (["--target-latency", 1.5], "between 0 and 1"),
        (["--target-params", "nan"], "between 0 and 1"),
        (["--target-params", 0.01], "would still be left"),
        (["--layout", "unifrom"], "Did you mean 'uniform'"),
        (["--layout", "uniform"], "--layout free"),
        (["--layout", "uniform", "--target", "both", "--target-params", 0.9], "one kind"),
        (["--repair", "--repair-form", "leastsquares"], "Did you mean 'least squares'"),
        (["--repair", "--calibration-size", 4, "--batches-per-pull", 1], "at least 2 batches"),
    ],
    ids=str,
)
def test_a_cut_that_cannot_be_made_is_one_sentence_and_leaves_nothing(
    options: list[object], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    assert said in check_refused(run(*free(world, tmp_path / "out", *options)), tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"units": head(0, 3)}, "head 0.3"),
        ({"units": head(3, 0)}, "head 3.0"),
        ({"units": head(0, 1, "mlp")}, "mlp 0.1"),
        ({"units": head(0, 0, "kv")}, "damaged selection"),
        ({"units": []}, "empty"),
        ({"settings": {"model_digest": "00000000-00000000", "dtype": "float32"}}, "another one"),
        ({"settings": {"seq_len": "x"}}, "sel.json|seq"),
        ({"settings": {"calibration": 5}}, "sel.json|calibration"),
        ({"settings": {"batch_size": None}}, "sel.json|batch"),
    ],
    ids=str,
)
def test_shrink_refuses_a_selection_that_it_cannot_use(
    changed: dict[str, Any], said: str, selection: dict[str, Any], world: World, tmp_path: Path, run: Run
) -> None:
    settings = selection["settings"] | changed.get("settings", {})
    (tmp_path / "sel.json").write_text(json.dumps(selection | changed | {"settings": settings}))
    ran = run("shrink", world.text_model, "--selection", tmp_path / "sel.json", "-o", tmp_path / "out", "--no-measure")
    assert re.search(said, check_refused(ran, tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layout", "none"], "free, uniform"),
        (["--layout", "uniform"], "cannot be uniform"),
        (["--repair", "--repair-form", "x"], "'x'"),
        (["--max-shard-size", "abc"], "abc"),
        (["--calibration", "/nowhere"], "/nowhere"),
        (["--dtype", "int8"], "int8"),
        (["--selection", "/nowhere/sel.json"], "/nowhere/sel.json"),
    ],
    ids=str,
)
def test_shrink_refuses_settings_that_cannot_work(
    options: list[str], said: str, cuts: Path, world: World, tmp_path: Path, run: Run
) -> None:
    command = ["shrink", world.text_model, "--selection", cuts / "sel.json", "-o", tmp_path / "out", "--no-measure", *options]
    assert said in check_refused(run(*command), tmp_path / "out")


@pytest.mark.parametrize("there", ["model", "cut", "record", "file"])
def test_shrink_refuses_a_place_with_something_else(there: str, cuts: Path, world: World, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    if there == "file":
        out.write_text("mine")
    elif there == "record":
        out.mkdir()
        (out / "secateur.json").write_text("mine")
    else:
        shutil.copytree(world.text_model if there == "model" else cuts / "small", out)
    before = contents(tmp_path)
    fields = json.loads((cuts / "sel.json").read_text())
    (cuts / "other.json").write_text(json.dumps(fields | {"units": fields["units"][:1]}))
    ran = run("shrink", world.text_model, "--selection", cuts / "other.json", "-o", out, "--no-measure")
    assert str(out) in check_refused(ran)
    assert contents(tmp_path) == before


def test_a_selection_for_the_dense_model_is_not_cut_out_of_the_shrunk_one(cuts: Path, tmp_path: Path, run: Run) -> None:
    ran = run("shrink", cuts / "small", "--selection", cuts / "sel.json", "-o", tmp_path / "out", "--no-measure")
    assert "made for the model" in check_refused(ran, tmp_path / "out")


def test_measure_shows_two_models_of_a_kind(cuts: Path, world: World, run: Run) -> None:
    command = ["measure", world.text_model, cuts / "small", "--no-memory", "--repeats", 3, "--tokens", 4, "--new-tokens", 2]
    found = run(*command, "--batch-size", 2, "--json").document
    assert found["small_params"] < found["dense_params"] and found["small_disk"] > 0
    assert {timing["batch_size"] for timing in found["timings"]} == {2}
    shown = run(*command)
    assert (shown.code, shown.complaints) == (0, [])
    assert f"{found['small_params']:,}" in shown.out and "3 repetitions" in shown.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["IMAGE"], "same task"),
        (["SMALL", "--repeats", 1], "at least 3"),
        (["SMALL", "--new-tokens", 16], "room for 16"),
        (["SMALL", "--batch-size", 0], "batch size is 0"),
        (["SMALL", "--tokens", 0], "tokens is 0"),
        (["SMALL", "--threads", -1], "threads is -1"),
        (["/nowhere"], "/nowhere"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_one_sentence(options: list[Any], said: str, cuts: Path, world: World, run: Run) -> None:
    small = {"IMAGE": world.image_model, "SMALL": cuts / "small"}.get(options[0], options[0])
    assert said in check_refused(run("measure", world.text_model, small, "--no-memory", "--new-tokens", 2, *options[1:]))


@pytest.mark.parametrize("command", ["evaluate", "prune", "select", "units"])
@pytest.mark.parametrize("how", ["code", "counts", "shape", "weights"])
def test_a_tampered_cut_is_one_sentence_and_its_code_is_not_run(
    how: str, command: str, cuts: Path, world: World, tmp_path: Path, run: Run
) -> None:
    if command == "units" and how in ("shape", "weights"):
        pytest.skip("it reads no weights")
    folder = Path(shutil.copytree(cuts / "small", tmp_path / "model"))
    (folder / "modeling_shrunk.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    weights = folder / "model.safetensors"
    if how == "code":
        with_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    elif how == "counts":
        with_config(folder, secateur={"layers": [{"heads": -1}]})
    elif how == "shape":
        tensors = load_file(weights)
        tensors["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(3)
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(weights.read_bytes()[:-8])
    more = {
        "evaluate": ["--data", world.text, "--seq-len", SEQ_LEN, "-o", tmp_path / "out.json"],
        "prune": ["--calibration", world.text, *SMALL, "-o", tmp_path / "out"],
        "select": ["--calibration", world.text, *SMALL, "-o", tmp_path / "out.json"],
        "units": [],
    }[command]
    assert str(folder) in check_refused(run(command, folder, *more), tmp_path / "out", tmp_path / "out.json", tmp_path / "mark")
