"""--config: settings from a TOML file; what is typed wins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from worlds import SMALL, Run, World, check_refused, contents, prune_command


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def as_toml(**settings: object) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


@pytest.fixture
def config(world: World, tmp_path: Path) -> Path:
    """What the small prune types, as a file."""
    return written(tmp_path / "small.toml", as_toml(calibration=str(world.text), device="cpu", **SMALL))


def test_a_file_gives_the_same_bytes_as_the_options_it_stands_for(world: World, config: Path, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path / "typed", "--batch-size", 2)).code == 0
    config.write_text(config.read_text() + "batch-size = 2\n")  # with a hyphen, as the option has it
    ran = run("prune", world.text_model, "--config", config, "-o", tmp_path / "filed")
    assert (ran.code, ran.complaints) == (0, [])
    typed, filed = (contents(tmp_path / place)["selection.json"] for place in ("typed", "filed"))
    assert typed == filed and json.loads(filed)["settings"]["batch_size"] == 2


def test_what_is_typed_wins_over_the_file_even_where_it_is_the_default(world: World, tmp_path: Path, run: Run) -> None:
    ran = run(
        "select",
        world.text_model,
        "--config",
        written(tmp_path / "other.toml", as_toml(seed=7, target="mlp", group_width=4)),
        "--calibration",
        world.text,
        "--seq-len",
        16,
        "--seed",
        42,
        "--budget",
        "20forwards",
        "-o",
        tmp_path / "s.json",
        "--json",
    )
    assert (ran.code, ran.complaints) == (0, [])
    assert {name: ran.document["settings"][name] for name in ("seed", "target")} == {"seed": 42, "target": "mlp"}


def test_evaluate_and_shrink_take_a_file(world: World, tmp_path: Path, run: Run) -> None:
    assert (
        run(
            "select",
            world.text_model,
            "--calibration",
            world.text,
            "--seq-len",
            16,
            "--pulls-per-step",
            4,
            "-o",
            tmp_path / "s.json",
        ).code
        == 0
    )
    judging = written(tmp_path / "judge.toml", as_toml(data=str(world.text), seq_len=16, evaluation_batches=1))
    judged = run("evaluate", world.text_model, "--config", judging, "--json")
    assert (judged.code, judged.complaints) == (0, [])
    typed = run("evaluate", world.text_model, "--data", world.text, "--seq-len", 16, "--evaluation-batches", 1, "--json")
    assert judged.document == typed.document
    cutting = written(tmp_path / "cut.toml", as_toml(layout="uniform", measure=False))
    refused = run("shrink", world.text_model, "--selection", tmp_path / "s.json", "--config", cutting, "-o", tmp_path / "out")
    assert "--layout free" in check_refused(refused, tmp_path / "out")
    cut = run(
        "shrink",
        world.text_model,
        "--selection",
        tmp_path / "s.json",
        "--config",
        cutting,
        "--layout",
        "free",
        "-o",
        tmp_path / "out",
        "--json",
    )
    assert (cut.code, cut.document["layout"], cut.document.get("measurement")) == (0, "free", None)


@pytest.mark.parametrize(
    ("value", "typed", "tried"),
    [
        (True, [], {"least squares", "layered", "bias"}),
        ("bias", [], {"bias"}),
        ("least squares", ["--repair-form", "bias"], {"bias"}),
        (False, ["--repair"], {"least squares", "layered", "bias"}),
    ],
    ids=["yes", "a form", "another form typed", "no, but typed"],
)
def test_a_repair_in_the_file_is_a_form_or_yes(
    value: object, typed: list[str], tried: set[str], world: World, tmp_path: Path, run: Run
) -> None:
    file = written(tmp_path / "repair.toml", as_toml(repair=value, layout="free", measure=False, calibration_size=16))
    command = [word for word in prune_command(world, tmp_path / "out") if word not in ("--layout", "none")]
    ran = run(*command, "--config", file, "--json", *typed)
    assert (ran.code, ran.complaints) == (0, [])
    found = ran.document["cut"]["repair"]
    assert found["losses"].keys() | found["declined"].keys() == tried | {"none"}


def test_the_cache_memory_of_a_file_is_in_gibibytes_as_on_the_command_line(
    world: World, config: Path, tmp_path: Path, run: Run
) -> None:
    config.write_text(config.read_text() + "cache_memory = 0.5\n")
    ran = run("prune", world.text_model, "--config", config, "-o", tmp_path / "out", "--dry-run", "--json")
    assert (ran.code, ran.complaints) == (0, [])
    assert ran.document["settings"]["cache_memory"] == 2**29


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ratoi = 0.2", "'ratoi'.*mean 'ratio'"),
        ("model = 'gpt2'", "'model'"),
        ("ratio = 'much'", "ratio.*'much'.*float"),
        ("pulls_per_step = 1.5", r"pulls_per_step.*1\.5.*int"),
        ("trust_remote_code = 'yes'", "trust_remote_code.*'yes'.*bool"),
        ("cache_memory = 'all'", "cache_memory.*'all'"),
        ("cache_memory = true", "cache_memory.*True"),
        ("repair = 3", "repair.*3"),
        ("[settings]\nratio = 0.2", "'settings'"),
        ("ratio = ", "TOML"),
        ("batch-size = 2\nbatch_size = 4", "batch_size twice"),
    ],
)
def test_a_file_that_cannot_be_meant_is_one_sentence_with_its_name(
    text: str, said: str, world: World, tmp_path: Path, run: Run
) -> None:
    file = written(tmp_path / "bad.toml", text)
    refused = check_refused(run(*prune_command(world, tmp_path / "out", "--config", file)), tmp_path / "out")
    assert str(file) in refused
    assert re.search(said, refused.replace(str(file), ""))


def test_a_file_that_is_not_there_or_is_no_text_is_one_sentence_with_its_name(world: World, tmp_path: Path, run: Run) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "nosuch.toml", tmp_path / "bytes.toml", tmp_path):
        refused = check_refused(run(*prune_command(world, tmp_path / "out", "--config", file)), tmp_path / "out")
        assert str(file) in refused


def test_a_bad_value_in_the_file_is_refused_as_the_option_would_be(world: World, tmp_path: Path, run: Run) -> None:
    file = written(tmp_path / "bad.toml", "keep_params = 1.5\n")
    refused = check_refused(run(*prune_command(world, tmp_path / "out", "--config", file)), tmp_path / "out")
    assert "parameters" in refused and "1.5" in refused


def test_a_setting_that_the_command_does_not_take_is_refused(world: World, tmp_path: Path, run: Run) -> None:
    file = written(tmp_path / "prune.toml", "ratio = 0.2\n")
    assert "'ratio'" in check_refused(run("evaluate", world.text_model, "--config", file))
