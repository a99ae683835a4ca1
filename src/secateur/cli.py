"""The command line: each command parses, calls, shows. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.table import Table

from secateur import jsonio
from secateur.accounting import effective_parameters, total_parameters, zeroed_percent, zeroed_percent_range
from secateur.bench import DEFAULT_MODELS, compare_pulls, compare_selection, markdown, open_model as open_bench_model
from secateur.card import goal_sentence
from secateur.checkpoint import check_shard_size
from secateur.cut import check_cut, check_cut_place, compare, cut
from secateur.data import BUILTIN
from secateur.errors import OutputError, SecateurError, SelectionError, not_one_of
from secateur.evaluate import evaluate as evaluate_model
from secateur.experiment import commands
from secateur.families import anatomy, candidate_units, family_of, task_of
from secateur.journal import Journal
from secateur.measure import check_measure
from secateur.models import load_model, load_shapes
from secateur.options import (
    CUTTING,
    DATA,
    MACHINE,
    SEARCH,
    AsJson,
    BatchSize,
    CacheMemory,
    Calibration,
    CalibrationSize,
    Data,
    Device,
    Dtype,
    EvaluationBatches,
    EvaluationSize,
    GroupWidth,
    Lanes,
    Layout,
    Measuring,
    Method,
    Model,
    PoolSize,
    PullBatches,
    Pulls,
    Ratio,
    Repair,
    RepairForm,
    ScoreBatches,
    Screen,
    ScreenBy,
    Seed,
    SeqLen,
    ShardSize,
    Stack,
    StepBatches,
    Target,
    TargetFlops,
    TargetLatency,
    TargetParams,
    Temperature,
    Trust,
    UcbC,
    gibibytes,
    lanes_of,
    repair_form_of,
)
from secateur.prune import (
    AUTO,
    Judging,
    Settings,
    check_place,
    check_record_place,
    check_selection,
    choose_units,
    judge,
    load_batches,
    make_settings,
    open_model,
    plain_path,
    prune as prune_model,
    refuse_other_selection,
    run_settings,
)
from secateur.screen import Bars, show_cut, show_evaluation, show_measurement, show_units, stderr, stdout, without_batch_losses
from secateur.selection import Selection
from secateur.surgery import FREE, LAYOUTS
from secateur.units import TARGETS, n_selected

app = typer.Typer(
    name="secateur",
    help="Prune attention heads and MLP channel groups of a pretrained transformer, chosen by measured damage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"secateur {importlib.metadata.version('secateur')}")
        raise typer.Exit


SETTINGS = {field.name for field in dataclasses.fields(Settings)}
FILES = ("selection.json", "evaluation.json", "journal.jsonl", "secateur.json", "README.md")


@app.callback(
    epilog="Example: secateur prune HuggingFaceTB/SmolLM2-135M --ratio 0.05 --calibration wikitext2 -o out/",
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


@app.command()
def prune(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the results.", show_default=False)],
    target: Target = Settings.target,
    ratio: Ratio = Settings.ratio,
    target_params: TargetParams = Settings.target_params,
    target_flops: TargetFlops = Settings.target_flops,
    target_latency: TargetLatency = Settings.target_latency,
    method: Method = Settings.method,
    layout: Layout = Settings.layout,
    group_width: GroupWidth = Settings.group_width,
    seed: Seed = Settings.seed,
    pulls_per_step: Pulls = Settings.pulls_per_step,
    batches_per_pull: PullBatches = Settings.batches_per_pull,
    batches_per_step: StepBatches = Settings.batches_per_step,
    temperature: Temperature = Settings.temperature,
    ucb_c: UcbC = Settings.ucb_c,
    pool_size: PoolSize = Settings.pool_size,
    screen: Screen = Settings.screen,
    screen_by: ScreenBy = Settings.screen_by,
    score_batches: ScoreBatches = Settings.score_batches,
    calibration: Calibration = Settings.calibration,
    data: Data = "",
    seq_len: SeqLen = Settings.seq_len,
    batch_size: BatchSize = Settings.batch_size,
    calibration_size: CalibrationSize = Settings.calibration_size,
    evaluation_size: EvaluationSize = AUTO,
    evaluation_batches: EvaluationBatches = AUTO,
    repair: Repair = False,
    repair_form: RepairForm = "auto",
    measure: Measuring = True,
    device: Device = Settings.device,
    dtype: Dtype = Settings.dtype,
    cache_memory: CacheMemory = AUTO,
    stack: Stack = Settings.stack,
    lanes: Lanes = AUTO,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """The main job: choose units, evaluate the model with and without them, cut them out, and measure what was won.

    Writes the smaller checkpoint with a model card, selection.json, evaluation.json and the journal of every measurement.
    Stopped at any moment and started again with the same command, it goes on where it was and ends with the same selection.
    """
    settings = {name: value for name, value in locals().items() if name in SETTINGS}
    with Bars() as watcher:
        result = prune_model(
            **settings,
            out=out,
            data=data,
            evaluation_size=evaluation_size,
            evaluation_batches=evaluation_batches,
            repair=repair_form_of(repair_form) if repair else "",
            measuring=measure,
            cache_memory=gibibytes(cache_memory),
            lanes=lanes_of(lanes),
            trust_remote_code=trust_remote_code,
            watcher=watcher,
        )
    if as_json:
        more = {"cut": without_batch_losses(result.cut)} if result.cut else {}
        print(jsonio.dumps(without_batch_losses(result.record) | more, indent=1))
        return
    show_evaluation(result.record, result.cut)
    show_units(result.selection)
    if result.cut:
        show_cut(result.cut)
    stdout.print("\nFiles: " + ", ".join(str(out / name) for name in FILES if (out / name).exists()))


@app.command()
def select(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="The selection file to write.", show_default=False)],
    target: Target = Settings.target,
    ratio: Ratio = Settings.ratio,
    target_params: TargetParams = Settings.target_params,
    target_flops: TargetFlops = Settings.target_flops,
    target_latency: TargetLatency = Settings.target_latency,
    method: Method = Settings.method,
    layout: Layout = Settings.layout,
    group_width: GroupWidth = Settings.group_width,
    seed: Seed = Settings.seed,
    pulls_per_step: Pulls = Settings.pulls_per_step,
    batches_per_pull: PullBatches = Settings.batches_per_pull,
    batches_per_step: StepBatches = Settings.batches_per_step,
    temperature: Temperature = Settings.temperature,
    ucb_c: UcbC = Settings.ucb_c,
    pool_size: PoolSize = Settings.pool_size,
    screen: Screen = Settings.screen,
    screen_by: ScreenBy = Settings.screen_by,
    score_batches: ScoreBatches = Settings.score_batches,
    calibration: Calibration = Settings.calibration,
    seq_len: SeqLen = Settings.seq_len,
    batch_size: BatchSize = Settings.batch_size,
    calibration_size: CalibrationSize = Settings.calibration_size,
    device: Device = Settings.device,
    dtype: Dtype = Settings.dtype,
    cache_memory: CacheMemory = AUTO,
    stack: Stack = Settings.stack,
    lanes: Lanes = AUTO,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Choose units and write them to a file; `evaluate` judges them."""
    settings = make_settings(**{name: value for name, value in locals().items() if name in SETTINGS})
    settings.check()
    machine: dict[str, Any] = {"cache_memory": gibibytes(cache_memory), "lanes": lanes_of(lanes)}
    if out.is_dir():
        raise OutputError(f"{out} is a folder; name the file to write, such as {out / 'selection.json'}.")
    check_place(out.absolute().parent)
    with Bars() as watcher:
        network, processor, settings = open_model(settings, trust_remote_code=trust_remote_code, watcher=watcher)
        watcher.stage("reading data")
        size = settings.calibration_size
        batches = load_batches(network, processor, settings.calibration, settings, split="train", size=size)
        ours = run_settings(network, settings, batches)
        refuse_other_selection(out, ours)
        with Journal(out.with_name(out.name.removesuffix(".json") + ".journal.jsonl"), ours) as journal:
            kept_table = out.with_name(out.name.removesuffix(".json") + ".latency.json")
            selection = choose_units(
                network, batches, settings, **machine, journal=journal, latency_file=kept_table, watcher=watcher
            )
    selection.save(out)
    if as_json:
        fields = selection.to_json()
        shown = ("settings", "versions", "pulls", "forwards", "nonfinite_pulls", "goal", "units", "steps")
        percent = {"zeroed_percent": zeroed_percent(network, selection.units)}
        print(jsonio.dumps({name: fields[name] for name in shown} | percent, indent=1))
        return
    show_units(selection)
    if selection.goal:
        stdout.print(goal_sentence(selection.goal))
    stdout.print("\nFiles: " + ", ".join(str(path) for path in (out, journal.path) if path.exists()))


@app.command()
def shrink(
    model: Model,
    selection: Annotated[Path, typer.Option(help="The selection to cut out.", show_default=False, rich_help_panel=CUTTING)],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the smaller model.", show_default=False)],
    layout: Annotated[
        str,
        typer.Option(
            help="free: whatever the selection says; uniform: an error unless any loader can read the result.",
            rich_help_panel=CUTTING,
        ),
    ] = FREE,
    calibration: Annotated[
        str,
        typer.Option(
            help="What proves the cut, and repairs. [default: what chose the units]", show_default=False, rich_help_panel=DATA
        ),
    ] = "",
    calibration_size: CalibrationSize = AUTO,
    repair: Repair = False,
    repair_form: RepairForm = "auto",
    measure: Measuring = True,
    max_shard_size: ShardSize = "5GB",
    device: Device = Settings.device,
    dtype: Dtype = Settings.dtype,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Cut the units of a selection out of a model, prove that it computes what the masked one does, and write it."""
    chosen = Selection.load(selection)
    form = repair_form_of(repair_form) if repair else ""
    check_place(out)
    check_cut_place(out, form)
    check_shard_size(max_shard_size)
    if layout not in LAYOUTS:
        raise not_one_of("layout", layout, LAYOUTS)
    shared = ("calibration", "seq_len", "batch_size", "seed")
    theirs = {name: value for name, value in chosen.settings.items() if name in shared}
    if any(type(value) is not type(getattr(Settings, name)) for name, value in theirs.items()):
        raise SelectionError(f"{selection} is a damaged selection: its settings are not those of a search.")
    ours = {"calibration": calibration} if calibration else {}
    settings = make_settings(model=model, device=device, dtype=dtype, calibration_size=calibration_size, **theirs | ours)
    settings.check()
    with Bars() as watcher:
        network, processor, settings = open_model(settings, trust_remote_code=trust_remote_code, watcher=watcher)
        check_selection(network, chosen, model)
        watcher.stage("reading data")
        size = settings.calibration_size
        batches = load_batches(network, processor, settings.calibration, settings, split="train", size=size)
        check_cut(network, form, len(batches))
        record = cut(
            network,
            chosen,
            out,
            name=settings.model,
            calibration=batches,
            layout=layout,
            processor=processor,
            repair=form,
            measuring=measure,
            tokens=settings.seq_len,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
            watcher=watcher,
        )
    if as_json:
        print(jsonio.dumps(record, indent=1))
        return
    show_units(chosen)
    show_cut(record)
    stdout.print(f"\nWritten to {out}")


@app.command()
def measure(
    dense: Annotated[str, typer.Argument(help="The dense model: a folder, a hub name, or timm:NAME.", show_default=False)],
    small: Annotated[str, typer.Argument(help="The smaller model, named in the same ways.", show_default=False)],
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.", rich_help_panel=SEARCH)] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded after it.", rich_help_panel=SEARCH)] = 16,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Texts or images at a time. [default: 1 and 8]", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Repetitions, the models in turns.", rich_help_panel=SEARCH)] = 9,
    threads: Annotated[int, typer.Option(help="Threads of the CPU; 0 takes torch's default.", rich_help_panel=MACHINE)] = 0,
    memory: Annotated[
        bool,
        typer.Option("--memory/--no-memory", help="Load each in a process of its own for its peak.", rich_help_panel=MACHINE),
    ] = True,
    device: Device = Settings.device,
    dtype: Dtype = Settings.dtype,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Two models side by side: parameters, bytes, memory, FLOPs, and the time of prompts, tokens or images."""
    check_measure(batch_size or (1, 8), tokens, new_tokens, repeats, threads or 1)
    with Bars() as watcher:
        models = []
        for name in (dense, small):
            watcher.stage(f"loading {name}")
            models.append(load_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code))
        watcher.stage("measuring dense against small")
        found = compare(
            models[0],
            models[1],
            (dense, small),
            tokens=tokens,
            new_tokens=new_tokens,
            batch_sizes=batch_size or (1, 8),
            repeats=repeats,
            threads=threads or None,
            memory=memory,
            trust_remote_code=trust_remote_code,
            watcher=watcher,
        )
    if as_json:
        print(jsonio.dumps(found, indent=1))
    else:
        show_measurement(found)


@app.command()
def evaluate(
    model: Model,
    selection: Annotated[
        Path | None, typer.Option(help="The selection to judge; none evaluates the dense model alone.", rich_help_panel=DATA)
    ] = None,
    data: Annotated[
        str,
        typer.Option(help="What judges: builtin, wikitext2, lambada, a file, a folder, a hub data set.", rich_help_panel=DATA),
    ] = BUILTIN,
    seq_len: SeqLen = Settings.seq_len,
    batch_size: BatchSize = Settings.batch_size,
    evaluation_size: EvaluationSize = AUTO,
    evaluation_batches: EvaluationBatches = AUTO,
    seed: Annotated[int, typer.Option(help="Which images are drawn.", rich_help_panel=DATA)] = Settings.seed,
    device: Device = Settings.device,
    dtype: Dtype = Settings.dtype,
    trust_remote_code: Trust = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Also write the result to this file.", rich_help_panel=MACHINE)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model with and without selected units: perplexity for text, top-1 and top-5 for images."""
    chosen = Selection.load(selection) if selection else None
    data = plain_path(data)
    settings = Settings(model, seq_len=seq_len, batch_size=batch_size, seed=seed, device=device, dtype=dtype)
    settings.check()
    judging = Judging(data, evaluation_size, evaluation_batches)
    judging.check()
    what = {"model": model, "selection": str(selection) if selection else None, "data": data}
    if out:
        check_record_place(out, what)
    with Bars() as watcher:
        network, processor, settings = open_model(settings, trust_remote_code=trust_remote_code, watcher=watcher)
        if chosen:
            check_selection(network, chosen, model)
        judging = judging.for_task(task_of(network), data)
        watcher.stage("reading data")
        batches = load_batches(network, processor, data, settings, split="test", size=judging.size, most=judging.max_batches)
        if chosen:
            record = judge(network, chosen, batches, watcher=watcher)
        else:
            watcher.stage("evaluating the dense model")
            record = {"dense": evaluate_model(network, batches, watcher.evaluated).to_json()}
    record = what | record
    if out:
        jsonio.write_text(out, jsonio.dumps(record, indent=1) + "\n")
    if as_json:
        print(jsonio.dumps(without_batch_losses(record), indent=1))
    else:
        show_evaluation(record)


@app.command()
def units(
    model: Model,
    target: Target = Settings.target,
    ratio: Ratio = Settings.ratio,
    group_width: GroupWidth = Settings.group_width,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """What could go: candidates and their parameters, layer by layer. Needs a config, no weights."""
    shapes = load_shapes(model, trust_remote_code=trust_remote_code)
    candidates = candidate_units(shapes, target, group_width)
    k = n_selected(ratio, len(candidates))
    low, high = (round(percent, 4) for percent in zeroed_percent_range(shapes, candidates, k))
    total = total_parameters(shapes)
    layers = []
    for i, layer in enumerate(anatomy(shapes)):
        here = [unit for unit in candidates if unit.layer == i]
        layers.append(
            {
                "layer": i,
                "name": layer.name,
                "heads": layer.heads,
                "kv_heads": layer.kv_heads,
                "head_dim": layer.head_dim,
                "mlp_width": layer.mlp_width,
                "units": len(here),
                "params": sum(effective_parameters(layer, unit) for unit in here),
            }
        )
    if as_json:
        record = {
            "model": model,
            "family": family_of(shapes),
            "target": target,
            "ratio": ratio,
            "candidates": len(candidates),
            "selected": k,
            "unit_ratio": k / len(candidates),
            "total_params": total,
            "zeroed_percent": low if low == high else [low, high],
            "layers": layers,
        }
        print(jsonio.dumps(record, indent=1))
        return
    table = Table(box=None)
    for title in ("layer", "heads", "K/V heads", "head width", "MLP width", "units", "parameters"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in layers:
        table.add_row(*(f"{value:,}" for value in row.values() if isinstance(value, int)))
    stdout.print(table)
    percent = f"{low:.4f}%" if low == high else f"{low:.4f}% to {high:.4f}%"
    stdout.print(f"{len(candidates):,} candidates ({target}), {total:,} parameters.")
    stdout.print(f"A ratio of {ratio:g} selects {k:,} ({k / len(candidates):.2%}): {percent} of the parameters.")


@app.command()
def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models as elsewhere, or shape:NAME for random weights. [default: the shapes of GPT-2 and Swin-Tiny]",
            show_default=False,
        ),
    ] = None,
    target: Target = Settings.target,
    pulls: Annotated[int, typer.Option(help="Measurements to compare.", rich_help_panel=SEARCH)] = 12,
    selection: Annotated[
        bool, typer.Option("--selection", help="A whole search from a cold start instead.", rich_help_panel=SEARCH)
    ] = False,
    steps: Annotated[int, typer.Option(help="Only the first steps of that search; 0 is all.", rich_help_panel=SEARCH)] = 0,
    device: Device = Settings.device,
    dtype: Dtype = Settings.dtype,
    cache_memory: CacheMemory = AUTO,
    stack: Stack = Settings.stack,
    lanes: Lanes = AUTO,
    trust_remote_code: Trust = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows to this file.", rich_help_panel=MACHINE)
    ] = None,
) -> None:
    """How fast damage is measured on this machine, against calling the model twice for every measurement."""
    options = {"cache_memory": gibibytes(cache_memory), "stack": stack, "lanes": lanes_of(lanes)}
    if target not in TARGETS:
        raise not_one_of("target", target, TARGETS)
    if json_file:
        if json_file.is_dir():
            raise OutputError(f"{json_file} is a folder; name the file to write, such as {json_file / 'bench.json'}.")
        check_place(json_file.absolute().parent)
    rows = []
    with Bars() as watcher:
        for name in models or DEFAULT_MODELS:
            watcher.stage(f"loading {name}")
            network = open_bench_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
            watcher.stage(f"measuring {name}")
            title = f"{Path(name).name} {target}{' selection' if selection else ''}"
            if selection:
                rows.append(
                    compare_selection(network, title, target=target, steps=steps, progress=watcher.evaluated, **options)
                )
            else:
                rows.append(compare_pulls(network, title, target=target, pulls=pulls, progress=watcher.evaluated, **options))
    stdout.print(markdown(rows))
    if json_file:
        jsonio.write_text(json_file, jsonio.dumps({"rows": [row.to_json() for row in rows]}, indent=1) + "\n")


for command in (commands.grid, commands.compare, commands.tables, commands.figures):
    app.command()(command)


def main() -> NoReturn:
    """Run the command line: errors of the user's become one sentence and exit code 2, never a traceback."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
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
        resumable = sys.argv[1:2] in (["prune"], ["select"], ["shrink"], ["grid"])
        _fail("Stopped." + (" The same command goes on from here." if resumable else ""), 130)
    raise SystemExit(code if isinstance(code, int) else 0)


def _silence(stream: TextIO) -> None:
    """Point a stream that nobody can write to at nothing, so that Python's exit does not try once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(message: str, code: int) -> NoReturn:
    stderr.print(f"error: {message}")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
