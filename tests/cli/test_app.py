"""The front door: help, the options there are, signals, standard output, exit codes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from secateur.cli.app import make_app
from secateur.settings import keywords
from worlds import Ran, Run, World, check_refused, contents, prune_command

ONE_MODEL = ("prune", "select", "shrink", "heal", "measure", "evaluate", "units", "bench")
COMMANDS = (*ONE_MODEL, "grid", "compare", "tables", "figures", "report")


def parameters_of(command: str) -> list[Any]:
    """The arguments and options of a command, as its parser knows them."""
    group: Any = typer.main.get_command(make_app())
    found: list[Any] = group.commands[command].params
    return found


def options_of(command: str) -> list[str]:
    """The long form of each option."""
    return [max(parameter.opts, key=len) for parameter in parameters_of(command) if parameter.opts[0].startswith("-")]


# Help


def defaults_in(line: str) -> list[str]:
    """What a help line says in brackets of its default."""
    return re.findall(r"\[default: [^\]]*\]", line)


def words(text: str) -> str:
    """The text without frames, and without what its breaking into lines and columns changed."""
    return re.sub(r"[\s\u2500-\u257f]+", "", text)


def test_the_commands_are_these_and_secateur_alone_shows_them(run: Run) -> None:
    group: Any = typer.main.get_command(make_app())
    assert tuple(group.commands) == COMMANDS
    ran = run()
    assert all(re.search(rf"^\W*{command} ", ran.out + ran.err, re.MULTILINE) for command in COMMANDS)


def test_the_version_is_that_of_the_package(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split() == ["secateur", importlib.metadata.version("secateur")]


def test_the_shell_completes_commands_and_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SECATEUR_COMPLETE", "complete_bash")
    for typed, found in (("secateur me", ["measure"]), ("secateur prune --calib", ["--calibration", "--calibration-size"])):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
        assert run().out.split() == found


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_lists_each_of_its_options_once(
    command: str, flag: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    ran = run(command, flag)
    assert (ran.code, ran.err) == (0, "")
    listed = re.findall(r"^\W{1,6}(--[a-z-]+)", ran.out, re.MULTILINE)
    options = options_of(command)
    assert options
    assert sorted(listed) == sorted({*options, "--help"})


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_every_default_that_its_lines_name(
    command: str, columns: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in brackets is markup to rich, which used to swallow "[default: 48 for text, 0 for images]"."""
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = words(run(command, "--help").out)
    named = [text for parameter in parameters_of(command) for text in defaults_in(parameter.help or "")]
    assert named or command in ("units", "compare", "tables", "figures", "report")
    assert [text for text in named if words(text) not in shown] == []


def test_each_default_that_is_left_to_the_task_is_in_the_help_of_prune(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    lines = run("prune", "--help").out.splitlines()
    left = {name: field.metadata["by_task"] for name, (_, field) in keywords().items() if "by_task" in field.metadata}
    assert left["screen"] == (48, 0) and len(left) >= 5
    for name, values in left.items():
        (line,) = (line for line in lines if re.match(rf"\W*--{name.replace('_', '-')}\s", line))
        found = defaults_in(line)
        assert len(found) == 1, line
        for value in values:
            assert re.search(rf"\b{value}\b" if value else r"\b0\b|\ball\b", found[0]), line


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_of_prune_shows_the_default_of_every_setting_that_has_one(
    columns: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    entries = re.split(r"^\W*--", run("prune", "--help").out, flags=re.MULTILINE)[1:]
    shown = {re.split(r"\s", entry, maxsplit=1)[0].replace("-", "_"): words(entry) for entry in entries}
    without = {
        "keep_params",
        "keep_flops",
        "keep_latency",
        "trust_remote_code",
        "heal_checkpointing",
    }  # goals are not set, flags are off
    for name, (_, field) in keywords().items():
        if name in without or field.metadata.get("hidden"):
            continue
        assert "[default:" in shown[name], name
        if field.default is not None and field.default is not True and not field.metadata.get("decided"):
            assert f"[default:{field.default}]" in shown[name]


def test_prune_has_an_option_for_every_setting() -> None:
    options = set(options_of("prune"))
    hidden = [name for name, (_, field) in keywords().items() if field.metadata.get("hidden")]
    assert hidden == ["repair"] and {"--repair", "--repair-form"} <= options  # which have two options of the command's own
    missing = [name for name in keywords() if f"--{name.replace('_', '-')}" not in options]
    assert missing == []


@pytest.mark.parametrize("arguments", [["prune"], ["prune", "gpt2"], ["prun"], ["units", "gpt2", "more"]], ids=" ".join)
def test_a_command_that_lacks_something_is_one_sentence(arguments: list[str], run: Run) -> None:
    check_refused(run(*arguments))


# Without tensors

WATCHED = """
import sys
from secateur.cli.app import main
sys.argv = ["secateur", *sys.argv[1:]]
try:
    main()
finally:
    heavy = [name for name in ("torch", "transformers", "pandas", "matplotlib", "scipy") if name in sys.modules]
    print("HEAVY", heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("prune --help", 0),
        ("tables --help", 0),
        ("prune x --ratio 2 -o y", 2),
        ("prune x --nosuch 1", 2),
        ("prune x --config nosuch.toml -o y", 2),
        ("select x --calibration nosuch -o y.json", 2),
        ("evaluate x --selection nosuch.json", 2),
        ("shrink x --selection nosuch.json -o y", 2),
        ("tables nosuch", 2),
        ("compare nosuch", 2),
        ("report nosuch", 2),
    ],
)
def test_help_and_what_needs_no_model_come_without_tensors(command: str, code: int, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WATCHED, *command.split()], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert ran.returncode == code, ran.stderr
    assert ran.stderr.splitlines()[-1] == "HEAVY []"
    assert list(tmp_path.iterdir()) == []


# Processes

SLOW = ["--pulls-per-step", 4000, "--batches-per-pull", 1]  # 12000 pulls


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "secateur", *map(str, arguments)]
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


INTERRUPTED = """
import os, signal, time
from secateur.cli import app

class Leaving:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

def deleting():
    leaving = Leaving()
    del leaving
    time.sleep(60)

def swallowing():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except BaseException:
        pass
    time.sleep(60)

def cleaning():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    finally:
        time.sleep(2.5)
        print("cleaned")

app._run = lambda arguments: {how}()
app.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("how", ["deleting", "swallowing", "cleaning"])
def test_a_stop_is_heard_even_where_it_was_lost_and_not_repeated_where_it_was_not(how: str) -> None:
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell's "&" ignores it
    command = [sys.executable, "-c", INTERRUPTED.replace("{how}", how), "units"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, preexec_fn=heed)
    assert ran.returncode == 130 and "Stopped." in ran.stderr
    assert ran.stdout == ("cleaned\n" if how == "cleaning" else "")


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_run_that_is_asked_to_stop_says_how_to_go_on(stop: signal.Signals, world: World, tmp_path: Path) -> None:
    ran = stop_at(tmp_path / "journal.jsonl", 50, start(*prune_command(world, tmp_path, *SLOW)), stop)
    assert (ran.code, ran.out) == (130, "")
    assert sorted(contents(tmp_path)) == ["journal.jsonl"]
    assert len(ran.complaints) == 1
    assert re.search(r"^Stopped\. Saved: \d+ measurements in .*journal\.jsonl\. The same command goes on", ran.complaints[0])
    typed = prune_command(world, tmp_path, *SLOW)
    assert ran.complaints[0].endswith(f": python -m secateur {shlex.join(map(str, typed))}")


@pytest.mark.slow
def test_a_process_prints_one_json_document_and_nothing_else(world: World, tmp_path: Path, run: Run) -> None:
    process = start(*prune_command(world, tmp_path / "process", "--json"))
    out, err = process.communicate(timeout=120)
    ran = Ran(process.returncode, out, err)
    assert (ran.code, ran.complaints) == (0, [])
    here = run(*prune_command(world, tmp_path / "here", "--json")).document
    assert ran.document | {"selection_seconds": 0} == here | {"selection_seconds": 0}
    assert (tmp_path / "process" / "selection.json").read_bytes() == (tmp_path / "here" / "selection.json").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_standard_output_that_takes_nothing_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "secateur", "units", "gpt2", "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode not in (0, None)
    assert len(ended.stderr.splitlines()) == 1 and ended.stderr.startswith("error: "), ended.stderr
