"""The commands for one model: each parses, calls one function of the library, and shows what it gave.

That function is imported when all that needs no model is checked: torch takes seconds, and help and refusals come at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.checks import check_evaluate, check_prune, check_select, check_shrink, shared_settings
from secateur.cli.display import (
    Bars,
    show_cut,
    show_evaluation,
    show_forecast,
    show_goal,
    show_inventory,
    show_measurement,
    show_units,
    stdout,
    without_batch_losses,
)
from secateur.cli.options import (
    CHOICE,
    JOB,
    MODEL,
    AsJson,
    DryRun,
    Model,
    OutFile,
    OutFolder,
    Repair,
    RepairForm,
    names_of,
    repair_of,
    takes,
)
from secateur.files import jsonio
from secateur.files.places import check_file
from secateur.selection import Selection
from secateur.settings import CUTTING, DATA, MACHINE, SEARCH, Machine, make_job

FILES = ("report.html", "selection.json", "evaluation.json", "journal.jsonl", "secateur.json", "README.md", "samples.json")
SHOWN = ("settings", "versions", "pulls", "forwards", "nonfinite_pulls", "goal", "units", "steps")  # of a selection


@takes(*JOB, config=True)
def prune(
    model: Model,
    out: OutFolder,
    repair: Repair = False,
    repair_form: RepairForm = "auto",
    dry_run: DryRun = False,
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
        _forecast(model, out, settings, as_json=as_json, judged=True)
        return
    from secateur.prune import prune as prune_model

    with Bars() as watcher:
        result = prune_model(model, out=out, watcher=watcher, **settings)
    if as_json:
        more = {"cut": without_batch_losses(result.cut.to_json())} if result.cut else {}
        print(jsonio.dumps(without_batch_losses(result.record.to_json()) | more, indent=1))
        return
    show_evaluation(result.record.judgement.dense, result.record.judgement, result.cut)
    show_units(result.selection)
    if result.cut:
        show_cut(result.cut)
    stdout.print("\nFiles: " + ", ".join(str(out / name) for name in FILES if (out / name).exists()))


def _forecast(model: str, out: Path, settings: dict[str, Any], *, as_json: bool, judged: bool) -> None:
    """Show what prune, or with `judged` false select, would do."""
    from secateur.forecast import forecast_of

    with Bars() as watcher:
        forecast = forecast_of(model, out=out, judged=judged, watcher=watcher, **settings)
    if as_json:
        print(jsonio.dumps(forecast.to_json(), indent=1))
    else:
        show_forecast(forecast)


@takes(*CHOICE, *names_of(Machine), config=True)
def select(model: Model, out: OutFile, dry_run: DryRun = False, as_json: AsJson = False, **settings: Any) -> None:
    """Choose units and write them to a file; `evaluate` judges them."""
    check_select(make_job(model, **settings), out)
    if dry_run:
        _forecast(model, out, settings, as_json=as_json, judged=False)
        return
    from secateur.steps import select_to

    with Bars() as watcher:
        chosen = select_to(model, out, watcher=watcher, **settings)
    if as_json:
        fields = chosen.selection.to_json()
        percent = {"zeroed_percent": chosen.zeroed_percent}
        print(jsonio.dumps({name: fields[name] for name in SHOWN} | percent, indent=1))
        return
    show_units(chosen.selection)
    if chosen.selection.goal:
        show_goal(chosen.selection.goal)
    stdout.print("\nFiles: " + ", ".join(map(str, chosen.files)))


@takes(
    "calibration",
    "calibration_size",
    "documents",
    "measure",
    "max_shard_size",
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
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Cut the units of a selection out of a model, prove that it computes what the zeroed one does, and write it."""
    settings |= repair_of(repair, repair_form)
    check_shrink(make_job(model, **shared_settings(Selection.load(selection), settings)), out, layout)
    from secateur.steps import shrink_to

    with Bars() as watcher:
        chosen, record = shrink_to(model, selection, out, layout=layout, watcher=watcher, **settings)
    if as_json:
        print(jsonio.dumps(record.to_json(), indent=1))
        return
    show_units(chosen)
    show_cut(record)
    stdout.print(f"\nWritten to {out}")


@takes(*MODEL)
def measure(
    dense: Annotated[str, typer.Argument(help="The dense model: a folder, a hub name, or timm:NAME.", show_default=False)],
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
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Measure two models side by side: parameters, bytes, memory, FLOPs, and the time of prompts, tokens or images."""
    from secateur.steps import compare_models

    with Bars() as watcher:
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
    else:
        show_measurement(measurement)


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
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Evaluate a model with and without selected units: perplexity for text, top-1 and top-5 for images."""
    check_evaluate(make_job(model, **settings), out)
    if selection:
        Selection.load(selection)
    from secateur.steps import evaluate_on

    with Bars() as watcher:
        evaluated = evaluate_on(model, selection=selection, out=out, watcher=watcher, **settings)
    if as_json:
        print(jsonio.dumps(without_batch_losses(evaluated.to_json()), indent=1))
    else:
        show_evaluation(evaluated.dense, evaluated.judgement)


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
    **settings: Any,
) -> None:
    """Measure how fast damage is measured on this machine, against calling the model twice for every measurement."""
    if json_file:
        check_file(json_file, "bench.json", holds="rows")
    from secateur.measure.bench import DEFAULT_MODELS, bench as bench_models, markdown

    with Bars() as watcher:
        rows = bench_models(
            models or DEFAULT_MODELS, pulls=pulls, selection=selection, steps=steps, watcher=watcher, **settings
        )
    stdout.print(markdown(rows))
    if json_file:
        jsonio.write(json_file, {"rows": [row.to_json() for row in rows]})


COMMANDS = (prune, select, shrink, measure, evaluate, units, bench)
