"""What a person sees: progress on a terminal and elsewhere, tables that fit, one verdict, the next command."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from secateur.cli import display
from secateur.measure.speed import Measurement, Timing
from secateur.selection import Step
from secateur.units import Unit
from secateur.watcher import EVENTS, HealProgress, Progress
from worlds import Run, World, prune_command

PULL = Progress(2, 5, 3, 8, Unit("head", 3, 1), -0.00123, False, Unit("head", 2, 0), 0.5)
TIMES = ((10.0, 10.4, 10.2), (10.1, 10.3, 10.2))
LARGE = Measurement(
    dense_params=134_515_008,
    small_params=133_335_360,
    dense_bytes=538_060_032,
    small_bytes=533_341_440,
    timings=tuple(Timing(name, size, *TIMES, 100.0, 99.0) for size in (1, 8) for name in ("prefill", "decode")),
    tokens=128,
    new_tokens=16,
    threads=1,
    device="cpu",
    dtype="float32",
    torch_version="2.0",
    dense_disk=538_090_408,
    small_disk=533_371_600,
    dense_memory=1_538_090_408,
    small_memory=1_533_371_600,
)


def console(
    monkeypatch: pytest.MonkeyPatch, name: str, width: int, *, terminal: bool = True, encoding: str = "utf-8"
) -> io.BytesIO:
    """Put a terminal of some width, or a file, in the place of a stream."""
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    options = {"highlight": False, "markup": False, "soft_wrap": True}
    new = Console(file=file, width=width, force_terminal=terminal, _environ={"TERM": "xterm"}, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(display, name, new)
    return written


def seen(written: io.BytesIO) -> list[str]:
    """The lines, each as it was last drawn, without escape codes."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue().decode())
    return [line.split("\r")[-1] for line in plain.split("\n")]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_on_a_terminal_progress_is_one_line_that_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written = console(monkeypatch, "stderr", width)
    with display.Bars() as bars:
        bars.stage("proving that the cut model computes what the zeroed one does, which takes a while")
        bars.evaluated(2, 8)
        bars.look(2, 5, 16)
        bars.evaluated(3, 16)
        bars.pull(PULL)
        bars._progress.refresh()
    lines = [line for line in re.split(r"[\r\n]+", "\n".join(seen(written))) if line.strip()]
    assert max(map(len, lines)) <= width
    assert any(line.startswith("step 3/5 pull 3/8") and "2/5" in line for line in lines)


def test_elsewhere_progress_is_a_line_a_stage_and_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    written = console(monkeypatch, "stderr", 80, terminal=False)
    with display.Bars() as bars:
        bars.stage("choosing units")
        bars.pull(PULL)
        bars.chosen(Step(2, PULL.best, 0.5, 0.5, 3, 8, 8, 0, damage=-0.00123), 5)
        bars.healed(HealProgress(4, 10, loss=1.25, before=1.5, judged=True))
        bars.healed(HealProgress(5, 10, loss=1.25, before=1.5))
    assert written.getvalue().decode().splitlines() == [
        "choosing units ...",
        "step 3/5: head 3.1 (damage -0.0012)",
        "step 4/10: healing, held-out loss 1.2500 (1.5000 before)",
    ]


def test_a_quiet_command_hears_every_event_and_draws_none(monkeypatch: pytest.MonkeyPatch) -> None:
    written = console(monkeypatch, "stderr", 80)
    with display.following(quiet=True) as watcher:
        watcher.stage("choosing units")
        watcher.pull(PULL)
        watcher.say("something")
    assert written.getvalue() == b"" and {"pull", "judged", "healed", "measured"} <= {*EVENTS}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_table_of_a_large_model_has_a_line_a_row_in_80_columns(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = console(monkeypatch, "stdout", 80, encoding=encoding)
    display.show_measurement(LARGE, "+1.07% perplexity")
    lines = seen(written)
    assert max(map(len, lines)) <= 80
    assert sum("ms, batch" in line and "1.00 (" in line for line in lines) == 4
    assert " ".join(lines).count("not surely faster") == 1 and "at +1.07% perplexity" in " ".join(lines)


def test_in_40_columns_a_row_is_a_line_and_no_number_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    written = console(monkeypatch, "stdout", 40)
    display.show_measurement(LARGE)
    lines = seen(written)
    assert max(map(len, lines)) <= 40 and "…" not in " ".join(lines)
    assert "peak MB in memory: dense 1,538.1, small 1,533.4, dense/small 1.003" in " ".join(lines).replace("  ", " ")


def test_the_list_the_map_and_the_next_command_end_a_prune(world: World, tmp_path: Path, run: Run) -> None:
    ran = run(*prune_command(world, tmp_path / "a b", "--layout", "free", "--no-measure"))
    assert "\n# removed, . kept; a row is a layer, from 0.\n" in ran.out and "\x1b" not in ran.out + ran.err
    assert ran.err.splitlines()[-1] == f'Next, in Python: import secateur; model = secateur.load_shrunk("{tmp_path / "a b"}")'
    quiet = run(*prune_command(world, tmp_path / "a b", "--layout", "free", "--no-measure", "--quiet"))
    assert (quiet.code, quiet.err, quiet.out) == (0, "", ran.out)


def test_the_next_command_works_as_it_is_said(world: World, tmp_path: Path, run: Run) -> None:
    selection = tmp_path / "my sel.json"
    options = ["--calibration", world.images, "--device", "cpu", "--method", "magnitude", "--target", "head", "--ratio", "0.3"]
    ran = run("select", world.image_model, *options, "-o", selection)
    evaluate = shlex.split(ran.err.splitlines()[-1].removeprefix("Next: "))
    assert evaluate[:2] == ["secateur", "evaluate"] and str(selection) in evaluate
    ran = run(*evaluate[1:], "--evaluation-size", "4")
    assert ran.code == 0 and "top-1" in ran.out
    shrink = ["secateur", "shrink", str(world.image_model), "--selection", str(selection), "-o", "small"]
    assert ran.err.splitlines()[-1] == f"Next: {shlex.join(shrink)}"
