from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from secateur.measure import bench as measured_bench
from tiny import FAMILIES_TINY, randomised
from worlds import Run, World, check_refused, contents


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


@pytest.mark.slow
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
    monkeypatch.setattr(measured_bench, "DEFAULT_MODELS", (str(roomy["image"]), str(roomy["text"])))
    rows = bench(run, tmp_path / "bench.json", "--pulls", 1)
    assert [row["name"] for row in rows] == ["image-model head", "text-model head"]


@pytest.mark.parametrize("task", ["text", "image"])
def test_bench_measures_a_model_of_few_positions_or_few_classes(task: str, world: World, tmp_path: Path, run: Run) -> None:
    assert len(bench(run, tmp_path / "bench.json", world.of(task)[0], "--pulls", 2)) == 1


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/model"], "'/no/such/model'"),
        (["nobody/nothing-at-all"], "nobody/nothing-at-all.*local folder"),
        (["shape:nothing-at-all"], "nothing-at-all.*local folder"),
        (["shape:/no/such/model"], "'/no/such/model'"),
        (["MODEL", "--target", "heads"], "'heads'.*mean 'head'"),
        (["MODEL", "--pulls", "0"], r"pulls.*\b0\b"),
        (["MODEL", "--pulls", "-1"], r"pulls.*-1\b"),
        (["MODEL", "--pulls", "two"], "--pulls"),
        (["MODEL", "--selection", "--steps", "-1"], r"steps.*-1\b"),
        (["MODEL", "--selection", "--steps", "9"], r"steps.*\b9\b"),
        (["MODEL", "--selection", "--steps", "10"], r"steps.*\b10\b"),
        (["MODEL", "--dtype", "float8"], "'float8'.*float32, bfloat16, float16"),
        (["MODEL", "--device", "gpu"], "'gpu'.*--device cpu"),
        (["shape:MODEL", "--dtype", "float8"], "'float8'.*float32, bfloat16, float16"),
        (["shape:MODEL", "--device", "gpu"], "'gpu'.*--device cpu"),
        (["MODEL", "--stack", "0"], r"stack.*\b0\b"),
        (["MODEL", "--lanes", "0"], r"lanes.*\b0\b"),
        (["MODEL", "--lanes", "-3"], r"lanes.*-3\b"),
        (["MODEL", "--cache-memory", "-2"], "cache memory.*-2"),
        (["MODEL", "/no/such/model", "--pulls", "1"], "'/no/such/model'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_benchmark_that_cannot_be_made_is_one_sentence_and_leaves_nothing(
    arguments: list[str], said: str, roomy: dict[str, Path], tmp_path: Path, run: Run
) -> None:
    arguments = [argument.replace("MODEL", str(roomy["text"])) for argument in arguments]
    sentence = check_refused(run("bench", *arguments, "--json", tmp_path / "new" / "bench.json"), tmp_path / "new")
    assert re.search(said, sentence)


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
    assert ran.complaints[0].startswith("error: ") and str(Path(place).parent) in ran.complaints[0]
    assert not Path(place).parent.exists()
