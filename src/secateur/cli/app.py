"""The command line's front door: the commands, the exit codes, and one sentence for every error a user can cause.

Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import warnings
from typing import Annotated, NoReturn, TextIO

import typer

from secateur.cli import commands, experiment
from secateur.cli.display import stderr
from secateur.cli.options import Command, check_not_empty, with_new_names
from secateur.errors import SecateurError

COMMANDS: tuple[Command, ...] = (
    commands.prune,
    commands.select,
    commands.shrink,
    commands.measure,
    commands.evaluate,
    commands.units,
    commands.bench,
    experiment.grid,
    experiment.compare,
    experiment.tables,
    experiment.figures,
)
RESUMABLE = ("prune", "select", "shrink", "grid")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"secateur {importlib.metadata.version('secateur')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


def make_app() -> typer.Typer:
    """The command line."""
    app = typer.Typer(
        name="secateur",
        help="Prune attention heads and MLP channel groups of a pretrained transformer, chosen by measured damage.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog="Example: secateur prune HuggingFaceTB/SmolLM2-135M --ratio 0.05 --calibration wikitext2 -o out/")(
        _root
    )
    for command in COMMANDS:
        app.command()(command.for_typer())
    return app


def main() -> NoReturn:
    """Run the command line. A user's error becomes one sentence and exit code 2, never a traceback."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = with_new_names(sys.argv[1:] or ["--help"], stderr.print)
    try:
        check_not_empty(arguments)
        code = make_app()(args=arguments, standalone_mode=False)
        sys.stdout.flush()
    except SecateurError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        _silence(sys.stdout)
        raise SystemExit(1) from None
    except OSError as error:
        _silence(sys.stdout)
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.", 2)
    except Exception as error:
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            _fail("The device ran out of memory: try a smaller --batch-size, --seq-len or --cache-memory.", 2)
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message().rstrip(".")
        _fail(f"{message}. See secateur --help.", 2)  # the parser's own: a missing or unknown option
    if code == 130:
        _fail("Stopped." + (" The same command goes on from here." if arguments[0] in RESUMABLE else ""), 130)
    raise SystemExit(code if isinstance(code, int) else 0)


def _silence(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to nowhere, so that Python does not try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(message: str, code: int) -> NoReturn:
    stderr.print(f"error: {message}")
    raise SystemExit(code)
