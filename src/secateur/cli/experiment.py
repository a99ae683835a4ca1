"""The commands for comparing methods: grid, compare, tables, figures. Each parses, calls, shows.

What a command needs is imported when it runs: help and refusals come at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secateur.cli.display import GridBars, show_next, stderr, stdout
from secateur.cli.options import AsJson, Quiet, takes
from secateur.errors import SettingError, not_one_of
from secateur.files import jsonio
from secateur.files.places import check_folder
from secateur.methods import METHODS, label

if TYPE_CHECKING:
    from secateur.experiment.compare import Comparison, Summary
    from secateur.experiment.grid import Grid

WHERE = "Where to run"
ALL = "all"
StoreFolder = Annotated[Path, typer.Argument(help="The store that `secateur grid` wrote.", show_default=False)]


@takes("device", "trust_remote_code")
def grid(
    file: Annotated[Path, typer.Argument(help="The grid, a TOML file such as runs/table9.toml.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="The store: a folder for the records.", show_default=False)],
    plan: Annotated[bool, typer.Option("--plan", help="Only show what there is to do.", rich_help_panel=WHERE)] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try runs again that raised an error.", rich_help_panel=WHERE)
    ] = False,
    workers: Annotated[int, typer.Option(help="Local processes; 0 runs in this one.", rich_help_panel=WHERE)] = 0,
    ray: Annotated[
        str, typer.Option(help="A Ray cluster's address, or local.", show_default=False, rich_help_panel=WHERE)
    ] = "",
    cpus_per_run: Annotated[float, typer.Option(help="CPUs that a run on Ray asks for.", rich_help_panel=WHERE)] = 1,
    gpus_per_run: Annotated[float, typer.Option(help="GPUs that a run on Ray asks for.", rich_help_panel=WHERE)] = 0,
    threads: Annotated[
        int,
        typer.Option(
            help="Threads of each worker. \\[default: its share of the cores]", show_default=False, rich_help_panel=WHERE
        ),
    ] = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Do every run of a grid that has no record in the store yet.

    Kill it at any moment and start it again: what has ended is not done twice. A run that raises an error becomes a failed
    record, and the grid goes on. Runs whose model or data cannot be loaded are left for another time.
    """
    from secateur.experiment.grid import read_grid, run_grid
    from secateur.workers.pools import Where

    where = Where(workers, ray, cpus_per_run, gpus_per_run, threads)
    wanted = read_grid(file)
    if plan:
        _show_plan(wanted, out, as_json)
        return
    with GridBars(len(wanted.runs), quiet=quiet) as bars:
        result = run_grid(
            wanted,
            out,
            where=where,
            retry_failed=retry_failed,
            progress=bars.ran,
            say=bars.say,
            **settings,
        )
    if as_json:
        counts = {"done": result.done, "failed": result.failed, "left": result.left, "problems": list(result.problems)}
        print(jsonio.dumps(counts, indent=1))
    else:
        stdout.print(f"{result.done} runs done, {result.failed} failed, {result.left} left. Records: {out / 'results.jsonl'}")
    for problem in result.problems:
        stderr.print(f"error: {problem}")
    if result.failed and not result.done:
        stderr.print(f"error: All {result.failed} runs failed; their records say why: {out / 'results.jsonl'}.")
    if result.problems or (result.failed and not result.done):
        raise typer.Exit(2)
    if not as_json:
        show_next("secateur", "tables", out, quiet=quiet)


def _show_plan(wanted: Grid, store: Path, as_json: bool) -> None:
    from rich.table import Table

    from secateur.experiment.store import RECORDS, read_store

    ended = read_store(store, stderr.print)[0] if (store / RECORDS).exists() else {}
    left = {run.key for run in wanted.runs} - set(ended)
    if as_json:
        print(jsonio.dumps(wanted.plan().to_json() | {"left": sorted(left)}, indent=1))
        return
    shown = Table("table", "cells", "methods", "runs", "left")
    for table in wanted.tables:
        methods = dict.fromkeys(method for cell in table.cells for method in cell.runs)
        keys = {run.key for cell in table.cells for runs in cell.runs.values() for run in runs.values()}
        shown.add_row(table.number, str(len(table.cells)), ", ".join(methods), str(len(keys)), str(len(keys & left)))
    stdout.print(shown)
    models = Counter(run.model for run in wanted.runs)
    counts = ", ".join(f"{model} {n}" for model, n in models.items())
    stdout.print(f"{len(wanted.runs)} runs in all: {counts}; {len(left)} left.")


@takes()
def compare(
    store: StoreFolder,
    against: Annotated[str, typer.Option(help="The baseline, or all.")] = "greedy",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare this one with all the others; may be given again. \\[default: the bandits]", show_default=False
        ),
    ] = None,
    interval: Annotated[
        str, typer.Option(help="The interval shown: t, or a bootstrap, percentile or bca; --json has all three.")
    ] = "t",
    as_json: AsJson = False,
) -> None:
    """The bandits against a baseline, paired over seeds: intervals, tests, and q-values over the whole family of tests.

    The family is every bandit against every other method in every cell of the store, whatever is shown of it.
    """
    for what, name in (("baseline", against), *(("method", name) for name in method or ())):
        if name not in METHODS and (what, name) != ("baseline", ALL):
            raise not_one_of(what, name, METHODS)
    from secateur.experiment.compare import CLAIMED, INTERVALS, against_baseline, compare as compare_cells, summary
    from secateur.experiment.store import read_tables
    from secateur.experiment.tables import markdown_table

    if interval not in INTERVALS:
        raise not_one_of("interval", interval, INTERVALS)
    family = compare_cells(read_tables(store, stderr.print), methods=method or None)
    shown = family if against == ALL and family else against_baseline(family, against)
    counts = summary(shown, family)
    if as_json:
        sizes = {name: getattr(counts, name) for name in ("family", "tested", "claimed")} | {"claims": list(CLAIMED)}
        print(jsonio.dumps({"comparisons": [c.to_json() for c in shown]} | sizes, indent=1))
        return
    columns = f"test,table,cell,method,baseline,pairs,difference,{interval} 95%,p,Wilcoxon p,q,q of claims,loss 95%".split(",")
    print(markdown_table(columns, [_comparison_row(c, interval) for c in shown]), end="\n\n")
    for sentence in _readings(shown, counts):
        stdout.print(sentence)
    show_next("secateur", "tables", store)


def _readings(shown: Sequence[Comparison], counts: Summary) -> list[str]:
    """What the rows mean and what they come to."""
    from secateur.experiment.compare import CLAIMED, RESAMPLES

    drawn = sorted({c.result.resamples for c in shown if c.result.resamples})
    resamples = " or ".join(f"{n:,} drawn" if n == RESAMPLES else f"all {n:,}" for n in drawn) or "no"
    sentences = [
        "Differences are method minus baseline: of the percent change of perplexity, or of the Top-1 drop in points; negative "
        "favours the method.",
        f"Of {len(shown)} comparisons, {counts.percentile} percentile, {counts.bca} BCa and {counts.t} t intervals exclude "
        f"zero (bootstraps of {resamples} resamples), and {counts.p} have p < 0.05.",
        f"Benjamini-Hochberg: {counts.q} have q < 0.05 over the family of {counts.family} tests, {counts.tested} of which have "
        f"a p-value, and {counts.q_claimed} over the {counts.claimed} tests against the baselines of the paper's claims "
        f"({', '.join(map(label, CLAIMED))}).",
        "With few seeds a bootstrap interval is too narrow and the t interval is to be trusted; five pairs cannot bring "
        "Wilcoxon's p below 0.0625. The last column is about the loss, with an interval over evaluation batches: how surely "
        "these very selections are told apart, not how another seed would choose.",
    ]
    if counts.tests < len(shown):
        once = "Comparisons with the same number are one test, since most of their seeds chose the same units"
        sentences.append(f"{once}: it counts once, by the largest p.")
    return sentences


def _comparison_row(c: Comparison, shown: str) -> list[str]:
    scale, result = (100 if c.cell.task == "image" else 1), c.result

    def between(interval: tuple[float, float], scale: float = scale, digits: int = 2) -> str:
        return f"{interval[0] * scale:+.{digits}f} to {interval[1] * scale:+.{digits}f}"

    return [
        str(c.test),
        ", ".join(c.tables),
        str(c.cell),
        label(c.method),
        label(c.baseline),
        f"{result.n}/{c.planned}",
        f"{result.mean * scale:+.2f}",
        between(getattr(result, shown)),
        f"{result.t_p:.4f}",
        f"{result.wilcoxon_p:.4f}",
        f"{c.q:.4f}",
        "" if math.isnan(c.q_claimed) else f"{c.q_claimed:.4f}",
        between(c.batch_interval, 1, 4),
    ]


@takes()
def tables(
    store: StoreFolder,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for .md, .csv and .tex files; without it, Markdown is printed.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="Only this one, such as 9 or A4; may be given again.", show_default=False)
    ] = None,
    beside_paper: Annotated[bool, typer.Option("--beside-paper", help="The paper's row below each of ours.")] = False,
) -> None:
    """The paper's tables, from the records of a store."""
    if out is not None:
        check_folder(out)
    from secateur.experiment.store import read_tables
    from secateur.experiment.tables import FORMS, markdown, render

    made = render(read_tables(store, stderr.print), beside_paper=beside_paper)
    numbers = [rendered.number for rendered in made]
    for number in table or ():
        if number not in numbers:
            raise SettingError(f"The store has nothing for table {number!r}; it has {', '.join(dict.fromkeys(numbers))}.")
    made = [rendered for rendered in made if not table or rendered.number in table]
    if out is None:
        print("\n".join(markdown(rendered) for rendered in made))
        show_next("secateur", "figures", store, "-o", "figures")
        return
    for rendered in made:
        for suffix, form in FORMS.items():
            jsonio.write_text(out / f"{rendered.name}.{suffix}", form(rendered))
    stdout.print(f"{len(made)} tables written to {out}, each as {', '.join(f'.{suffix}' for suffix in FORMS)}.")
    show_next("secateur", "figures", store, "-o", out)


@takes()
def figures(
    store: StoreFolder,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the pictures.", show_default=False)],
) -> None:
    """The paper's figures, from the records of a store, as SVG and PNG."""
    check_folder(out)
    from secateur.experiment.figures import draw
    from secateur.experiment.store import read_tables

    written = draw(read_tables(store, stderr.print), out)
    stdout.print("Written: " + ", ".join(str(path) for path in written))


@takes()
def report(
    place: Annotated[Path, typer.Argument(help="The folder of a prune, or a store.", show_default=False, metavar="RUN|STORE")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="The page to write. \\[default: report.html in the folder]", show_default=False),
    ] = None,
) -> None:
    """One page to look at, about a prune or a store: what was removed, what it cost, how it was found. Needs no model."""
    from secateur.report.page import write_report

    written = write_report(place, out)
    stdout.print(f"Written: {written} ({written.stat().st_size / 1000:,.0f} kB); open it in a browser.")


COMMANDS = (grid, compare, tables, figures, report)
