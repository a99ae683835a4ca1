"""The commands for one model: each parses, calls one function of the library, and shows what it gave.

That function is imported when all that needs no model is checked: torch takes seconds, and help and refusals come at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.checks import check_evaluate, check_heal, check_prune, check_select, check_shrink, shared_settings
from secateur.cli.display import (
    following,
    show_cut,
    show_evaluation,
    show_forecast,
    show_goal,
    show_healed,
    show_inventory,
    show_loading,
    show_measurement,
    show_next,
    show_series,
    show_units,
    stdout,
    without_batch_losses,
)
from secateur.cli.options import (
    CHOICE,
    HEAL,
    JOB,
    MODEL,
    AsJson,
    Board,
    DryRun,
    Model,
    OutFile,
    OutFolder,
    Quiet,
    Repair,
    RepairForm,
    names_of,
    repair_of,
    takes,
)
from secateur.files import jsonio
from secateur.files.places import check_file
from secateur.healing import DEFAULT_AMOUNT
from secateur.selection import Selection
from secateur.settings import CUTTING, DATA, MACHINE, SEARCH, Machine, make_job

Dense = Annotated[str, typer.Argument(help="The dense model: a folder, a hub name, or timm:NAME.", show_default=False)]
FILES = (
    "report.html",
    "selection.json",
    "evaluation.json",
    "journal.jsonl",
    "series.json",
    "secateur.json",
    "README.md",
    "samples.json",
)
SHOWN = ("settings", "versions", "pulls", "forwards", "nonfinite_pulls", "goal", "units", "steps")  # of a selection


@takes(*JOB, config=True)
def prune(
    model: Model,
    out: OutFolder,
    repair: Repair = False,
    repair_form: RepairForm = "auto",
    dry_run: DryRun = False,
    tensorboard: Board = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """The main job: choose units, evaluate the model with and without them, cut them out, and measure the smaller model.

    Writes the smaller checkpoint with a model card, report.html, selection.json, evaluation.json and the journal of every
    measurement.
    Stopped at any moment and started again with the same command, it goes on where it was and ends with the same selection.
    """
    settings |= repair_of(repair, repair_form)
    check_prune(make_job(model, **settings), out)
    if dry_run:
        _forecast(model, out, settings, as_json=as_json, judged=True, quiet=quiet)
        return
    from secateur.prune import prune as prune_model

    with following(quiet, tensorboard) as watcher:
        result = prune_model(model, out=out, watcher=watcher, **settings)
    if as_json:
        more = {"cut": without_batch_losses(result.cut.to_json())} if result.cut else {}
        more |= {"series": result.series.to_json()} if result.series else {}
        print(jsonio.dumps(without_batch_losses(result.record.to_json()) | more, indent=1))
        return
    show_evaluation(result.record.judgement.dense, result.record.judgement, result.cut)
    show_units(result.selection, model, trust_remote_code=settings.get("trust_remote_code", False))
    if result.series:
        show_series(result.series, out)
    elif result.cut:
        show_cut(result.cut)
    stdout.print("\nFiles: " + ", ".join(str(out / name) for name in FILES if (out / name).exists()))
    if result.cut:
        place = out / (result.series.knee or result.series.cuts[-1].name) if result.series else out
        show_loading(result.cut, place, quiet=quiet)
    else:
        show_next("secateur", "shrink", model, "--selection", out / "selection.json", "-o", out / "small", quiet=quiet)


def _forecast(model: str, out: Path, settings: dict[str, Any], *, as_json: bool, judged: bool, quiet: bool) -> None:
    """Show what prune, or with `judged` false select, would do."""
    from secateur.forecast import forecast_of

    with following(quiet) as watcher:
        forecast = forecast_of(model, out=out, judged=judged, watcher=watcher, **settings)
    if as_json:
        print(jsonio.dumps(forecast.to_json(), indent=1))
    else:
        show_forecast(forecast)


@takes(*CHOICE, *names_of(Machine), config=True)
def select(
    model: Model,
    out: OutFile,
    dry_run: DryRun = False,
    tensorboard: Board = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Choose units and write them to a file; `evaluate` judges them."""
    check_select(make_job(model, **settings), out)
    if dry_run:
        _forecast(model, out, settings, as_json=as_json, judged=False, quiet=quiet)
        return
    from secateur.steps import select_to

    with following(quiet, tensorboard) as watcher:
        chosen = select_to(model, out, watcher=watcher, **settings)
    if as_json:
        fields = chosen.selection.to_json()
        percent = {"zeroed_percent": chosen.zeroed_percent}
        print(jsonio.dumps({name: fields[name] for name in SHOWN} | percent, indent=1))
        return
    show_units(chosen.selection, model, trust_remote_code=settings.get("trust_remote_code", False))
    if chosen.selection.goal:
        show_goal(chosen.selection.goal)
    stdout.print("\nFiles: " + ", ".join(map(str, chosen.files)))
    data = ["--data", settings["calibration"]] if settings.get("calibration") else []
    show_next("secateur", "evaluate", model, "--selection", out, *data, quiet=quiet)


@takes(
    "calibration",
    "calibration_size",
    "documents",
    "repair_size",
    "measure",
    "max_shard_size",
    *HEAL,
    *MODEL,
    unset=["calibration"],
    help={"calibration": "Data that prove the cut, and repair it. [default: those that chose the units]"},
    config=True,
)
def shrink(
    model: Model,
    selection: Annotated[Path, typer.Option(help="The selection to cut out.", show_default=False, rich_help_panel=CUTTING)],
    out: OutFolder,
    layout: Annotated[
        str,
        typer.Option(
            help="free: whatever the selection says; uniform: an error unless any loader can read the result.",
            rich_help_panel=CUTTING,
        ),
    ] = "free",
    repair: Repair = False,
    repair_form: RepairForm = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Cut the units of a selection out of a model, prove that it computes what the zeroed one does, and write it."""
    settings |= repair_of(repair, repair_form)
    check_shrink(make_job(model, **shared_settings(Selection.load(selection), settings)), out, layout)
    from secateur.steps import shrink_to

    with following(quiet) as watcher:
        chosen, record = shrink_to(model, selection, out, layout=layout, watcher=watcher, **settings)
    if as_json:
        print(jsonio.dumps(record.to_json(), indent=1))
        return
    show_units(chosen, model, trust_remote_code=settings.get("trust_remote_code", False))
    show_cut(record)
    stdout.print(f"\nWritten to {out}")
    if record.measurement:
        show_loading(record, out, quiet=quiet)
    else:
        show_next("secateur", "measure", model, out, quiet=quiet)


@takes(
    *HEAL,
    "calibration",
    "documents",
    "holdout",
    "seq_len",
    "batch_size",
    "data",
    "evaluation_size",
    "evaluation_batches",
    "seed",
    "measure",
    "max_shard_size",
    *MODEL,
    unset=["calibration", "seq_len", "batch_size", "seed", "dtype"],
    help={
        "heal": "How much: 30min or 90s, 200000tokens, 5000images, 5000texts or 300steps. [default: 10min]",
        "calibration": "The data that chose the units; their train split heals, unless --heal-data names others.",
        "seed": "The order of the data. [default: the seed that chose the units]",
    },
    config=True,
)
def heal(
    dense: Dense,
    small: Annotated[Path, typer.Argument(help="The folder of a cut of it.", show_default=False)],
    out: OutFolder,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Train a cut model for a while to give what the dense one gives, and write it to another folder.

    Stopped at any moment and started again with the same command, it goes on where it was. torchrun and
    accelerate launch start it on several devices: docs/heal.md.
    """
    check_heal(make_job(dense, **{"heal": DEFAULT_AMOUNT, **settings}), small, out)
    from secateur.steps import heal_to
    from secateur.workers.team import leads

    with following(quiet or not leads()) as watcher:
        record = heal_to(dense, small, out, watcher=watcher, **settings)
    if not leads():
        return
    if as_json:
        print(jsonio.dumps(without_batch_losses(record.to_json()), indent=1))
        return
    show_healed(record)
    show_cut(record)
    stdout.print(f"\nWritten to {out}")
    show_loading(record, out, quiet=quiet)


@takes(*MODEL)
def measure(
    dense: Dense,
    small: Annotated[str, typer.Argument(help="The smaller model, named in the same ways.", show_default=False)],
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.", rich_help_panel=SEARCH)] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded after it.", rich_help_panel=SEARCH)] = 16,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Texts or images at a time. \\[default: 1 and 8]", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Repetitions, the models in turns.", rich_help_panel=SEARCH)] = 9,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU. \\[default: as torch decides]", rich_help_panel=MACHINE)
    ] = None,
    memory: Annotated[
        bool,
        typer.Option("--memory/--no-memory", help="Load each in a process of its own for its peak.", rich_help_panel=MACHINE),
    ] = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Measure two models side by side: parameters, bytes, memory, FLOPs, and the time of prompts, tokens or images."""
    from secateur.steps import compare_models

    with following(quiet) as watcher:
        measurement = compare_models(
            dense,
            small,
            tokens=tokens,
            new_tokens=new_tokens,
            batch_sizes=batch_size or (1, 8),
            repeats=repeats,
            threads=threads or None,
            memory=memory,
            watcher=watcher,
            **settings,
        )
    if as_json:
        print(jsonio.dumps(measurement.to_json(), indent=1))
        return
    show_measurement(measurement)
    data = [] if measurement.tokens else ["--data", "IMAGES"]  # a folder that the user knows
    show_next("secateur", "evaluate", small, *data, quiet=quiet)


@takes(
    "data",
    "documents",
    "holdout",
    "seq_len",
    "batch_size",
    "evaluation_size",
    "evaluation_batches",
    "seed",
    *MODEL,
    help={
        "data": "Data that judge: builtin, wikitext2, lambada, a file, a folder, a hub data set. [default: builtin]",
        "seed": "Which images are drawn.",
    },
    config=True,
)
def evaluate(
    model: Model,
    selection: Annotated[
        Path | None, typer.Option(help="The selection to judge; none evaluates the dense model alone.", rich_help_panel=DATA)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Also write the result to this file.", rich_help_panel=MACHINE)
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Evaluate a model with and without selected units: perplexity for text, top-1 and top-5 for images."""
    check_evaluate(make_job(model, **settings), out)
    if selection:
        Selection.load(selection)
    from secateur.steps import evaluate_on

    with following(quiet) as watcher:
        evaluated = evaluate_on(model, selection=selection, out=out, watcher=watcher, **settings)
    if as_json:
        print(jsonio.dumps(without_batch_losses(evaluated.to_json()), indent=1))
        return
    show_evaluation(evaluated.dense, evaluated.judgement)
    data = ["--calibration", settings["data"]] if settings.get("data") else []
    if selection:
        show_next("secateur", "shrink", model, "--selection", selection, "-o", "small", quiet=quiet)
    else:
        show_next("secateur", "prune", model, "--ratio", 0.1, *data, "-o", "out", quiet=quiet)


@takes("target", "ratio", "group_width", "trust_remote_code")
def units(model: Model, as_json: AsJson = False, **settings: Any) -> None:
    """List what could be removed: candidates and their parameters, layer by layer. Needs a config, no weights."""
    make_job(model, **settings)
    from secateur.model.accounting import inventory

    listed = inventory(model, **settings)
    if as_json:
        print(jsonio.dumps(listed.to_json(), indent=1))
    else:
        show_inventory(listed)


@takes("target", "cache_memory", "stack", "lanes", *MODEL)
def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models as elsewhere, or shape:NAME for random weights. \\[default: the shapes of GPT-2 and Swin-Tiny]",
            show_default=False,
        ),
    ] = None,
    pulls: Annotated[int, typer.Option(help="Measurements to compare.", rich_help_panel=SEARCH)] = 12,
    selection: Annotated[
        bool, typer.Option("--selection", help="A whole search from a cold start instead.", rich_help_panel=SEARCH)
    ] = False,
    steps: Annotated[int, typer.Option(help="Only the first steps of that search; 0 is all.", rich_help_panel=SEARCH)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows to this file.", rich_help_panel=MACHINE)
    ] = None,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Measure how fast damage is measured on this machine, against calling the model twice for every measurement."""
    if json_file:
        check_file(json_file, "bench.json", holds="rows")
    from secateur.measure.bench import DEFAULT_MODELS, bench as bench_models, markdown

    with following(quiet) as watcher:
        rows = bench_models(
            models or DEFAULT_MODELS, pulls=pulls, selection=selection, steps=steps, watcher=watcher, **settings
        )
    stdout.print(markdown(rows))
    if json_file:
        jsonio.write(json_file, {"rows": [row.to_json() for row in rows]})


COMMANDS = (prune, select, shrink, heal, measure, evaluate, units, bench)
