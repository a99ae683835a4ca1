"""The command line's front door: the commands, the exit codes, and one sentence for every error a user can cause.

Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# The rest is imported when main runs, which knows what to do if it is interrupted.
from secateur.errors import SecateurError, SettingError, first_line, out_of_memory

if TYPE_CHECKING:
    import typer

WRITTEN = {  # by a command that goes on after it was stopped, where its -o says
    "prune": ("{}/journal.jsonl", "{}/selection.json", "{}/evaluation.json", "{}/secateur.json"),
    "select": ("{}.journal.jsonl", "{}.json"),
    "shrink": ("{}/secateur.json",),
    "heal": ("{}/.healing", "{}/secateur.json"),
    "grid": ("{}/results.jsonl",),
}
UNFORESEEN = 70  # the exit code of an error that no one foresaw
LONGEST = 1000  # characters of a message
LOST_AFTER = 1.0  # seconds after which a signal that nothing came of is sent again


def make_app() -> typer.Typer:
    """The command line."""
    import typer

    from secateur.cli import commands, experiment

    app = typer.Typer(
        name="secateur",
        help="Prune attention heads and MLP channel groups of a pretrained transformer, chosen by measured damage.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            print(f"secateur {importlib.metadata.version('secateur')}")
            raise typer.Exit

    def root(
        version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=print_version),
    ) -> None: ...

    app.callback(epilog="Example: secateur prune HuggingFaceTB/SmolLM2-135M --ratio 0.05 --calibration wikitext2 -o out/")(root)
    for command in (*commands.COMMANDS, *experiment.COMMANDS):
        app.command()(command.for_typer())
    return app


def main() -> NoReturn:
    """Run the command line. A user's error becomes one sentence and exit code 2, never a traceback."""
    stopped: list[int] = []  # the signals that asked to end
    ending = threading.Event()

    def stop(number: int, frame: Any) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    def say(ignored: Any) -> None:
        if not (stopped and issubclass(ignored.exc_type, KeyboardInterrupt)):
            sys.__unraisablehook__(ignored)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    sys.unraisablehook = say
    threading.Thread(target=_repeat_what_is_lost, args=(stopped, ending), daemon=True).start()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    _mend_streams()
    arguments = sys.argv[1:] or ["--help"]
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        code = 130
    except SecateurError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        _silence_stdout()
        raise SystemExit(1) from None
    except Exception as error:
        if not stopped:  # else a library made something else of the interruption, as some do while they are imported
            _fail_of(error, arguments)
        code = 130
    finally:
        ending.set()
    if code == 130:
        _say_stopped(arguments)
        raise SystemExit(code)
    raise SystemExit(code if isinstance(code, int) else 0)


def _repeat_what_is_lost(stopped: Sequence[int], ending: threading.Event) -> None:
    """Send a signal again that asked to end and was lost.

    Python drops what is raised while an object is deleted, and a library may drop what is raised while it asks for an
    attribute. What is not lost is being handled, in the blocks that clean up, or has reached `main`.
    """
    unheard = 0
    while not ending.wait(LOST_AFTER / 2):
        unheard = unheard + 1 if stopped and not _handled() else 0
        if unheard == 2:
            os.kill(os.getpid(), stopped[-1])
            unheard = 0


def _handled() -> bool:
    """Whether the main thread is in a block that an interruption led to."""
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # Python 3.11 has a triple
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _run(arguments: Sequence[str]) -> Any:
    """Run a command and return its exit code, if it has one."""
    from secateur.cli.display import stderr
    from secateur.cli.options import check_arguments, with_new_names
    from secateur.workers.team import team_size

    arguments = with_new_names(arguments, stderr.print)
    check_arguments(arguments)
    if (size := team_size()) > 1 and arguments[0] != "heal":
        raise SettingError(
            f"A launcher started {size} processes of secateur {arguments[0]}, which has work for one: start it alone; what "
            "several devices share is secateur heal."
        )
    code = make_app()(args=arguments, standalone_mode=False)
    sys.stdout.flush()
    return code


def _fail_of(error: Exception, arguments: Sequence[str]) -> NoReturn:
    """One sentence about an error that is not Secateur's own."""
    if isinstance(error, OSError):
        _silence_stdout()
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.", 2)
    if out_of_memory(error):
        _fail("There is no memory left: try a smaller --batch-size, --seq-len or --cache-memory.", 2)
    if hasattr(error, "format_message"):  # the parser's own: a missing or unknown option
        _fail(f"{error.format_message().rstrip('.')}. See secateur --help.", 2)
    try:
        handle, path = tempfile.mkstemp(prefix="secateur-", suffix=".txt")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            version = importlib.metadata.version("secateur")
            file.write(f"secateur {version}, Python {platform.python_version()}, {platform.platform()}\n")
            file.write(f"secateur {shlex.join(arguments)}\n\n{''.join(traceback.format_exception(error))}")
        place = f" The full report is in {path}; please send it to the maintainers."
    except OSError:
        place = " There is no room for a report."
    _fail(f"Something went wrong that no one foresaw ({type(error).__name__}): {first_line(error)}{place}", UNFORESEEN)


def _mend_streams() -> None:
    """Let a stream that is closed lead nowhere, and one that cannot write a character write its number, as JSON has it."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends
        elif hasattr(stream, "reconfigure"):
            codecs.register_error("escape", _escaped)
            stream.reconfigure(errors="escape")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """What to write in place of characters that a stream's encoding does not have, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _silence_stdout() -> None:
    """Redirect standard output, which cannot be written, to nowhere, so that Python does not try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_stopped(arguments: Sequence[str]) -> None:
    """Say in a line what a stopped command has saved, and the command that goes on, as it was typed."""
    from secateur.cli.display import stderr

    name = "python -m secateur" if Path(sys.argv[0]).name == "__main__.py" else "secateur"
    typed = f"{name} {shlex.join(arguments)}"
    saved = _saved(arguments)
    if saved:
        stderr.print(f"Stopped. {saved} The same command goes on from there: {typed}")
    else:
        stderr.print(f"Stopped. Nothing was saved; the same command starts again: {typed}")


def _saved(arguments: Sequence[str]) -> str:
    """A sentence about what a command has written to the place that its -o names; nothing if that is nothing."""
    places = [value for flag, value in itertools.pairwise(arguments) if flag in ("-o", "--out")]
    places += [argument.removeprefix("--out=") for argument in arguments if argument.startswith("--out=")]
    places += [argument[2:] for argument in arguments if argument.startswith("-o") and argument != "-o"]
    command = arguments[0]
    if not places or command not in WRITTEN or "--dry-run" in arguments or "--plan" in arguments:
        return ""
    out = places[-1].removesuffix(".json") if command == "select" else places[-1]
    paths = [Path(pattern.format(out)) for pattern in WRITTEN[command]]
    found = ", ".join(str(path) for path in paths if path.exists())
    with contextlib.suppress(OSError), open(paths[0], "rb") as file:
        if command in ("prune", "select"):
            found = found.replace(str(paths[0]), f"{max(0, sum(1 for _ in file) - 1):,} measurements in {paths[0]}", 1)
    return f"Saved: {found}." if found else ""


def _fail(message: str, code: int) -> NoReturn:
    from secateur.cli.display import stderr

    line = " ".join(message.splitlines())
    stderr.print(f"error: {line if len(line) <= LONGEST else line[: LONGEST - 3] + '...'}")
    raise SystemExit(code)
