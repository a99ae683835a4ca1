"""The paper's tables from a store, with the paper's columns and rounding, and a table for each ablation.

A cell without runs says that they are missing; failed runs are counted but not in the mean. With `beside_paper` each row is
followed by the paper's row.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from secateur.experiment.compare import HIGHLIGHTED, LANGUAGE, compare, summary
from secateur.experiment.paper import KEYS, paper_row
from secateur.experiment.store import Cell, Record, Spread, Table, cells_of, slug
from secateur.methods import METHODS, bandits, label
from secateur.units import KINDS

MISSING, FAILED = "missing", "NaN/failure"
TITLES = {
    "3": "Parameter accounting: effective zeroed parameters under functional zeroing",
    "4": "Attention-head pruning, percent perplexity change; lower is better",
    "5": "Best MAB method against the best other",
    "6": "MLP-group pruning, percent perplexity change; lower is better",
    "7": "LAMBADA, attention-head pruning chosen on WikiText-2, percent perplexity change",
    "8": "Imagenette, matched evaluation budget",
    "9": "Imagenette, full screening",
    "10": "Sensitivity over ratios, failed runs counted",
    "11": "Paired comparisons against budgeted greedy",
    "A1": "Attention-head pruning in detail",
    "A2": "MLP-group pruning in detail",
    "A3": "LAMBADA in detail",
    "A4": "Imagenette screening in detail",
    "A5": "Imagenette at a matched budget in detail",
    "B1": "Selection cost",
    "B2": "Paired comparisons against budgeted greedy",
}
ONE_BASE = (
    "Every method of a row is judged on the same batches and against the same dense model. In the paper the Wanda-style, "
    "Taylor and Fisher entries of gpt2 and facebook/opt-125m imply another dense perplexity (63.08, 74.24) than the rest of "
    "their rows (63.51, 75.52)."
)
EIGHT_AND_NINE = (
    "Tables 8 and 9 of the paper print different figures for the bandits at equal counts of evaluations (DeiT-Tiny MAB-UCB "
    "-0.0240 and -0.0178) and do not say what differed; here both are of the same runs."
)
BOOTSTRAP = (
    "The bootstrap is the percentile one, over every resample of up to six pairs and over 10,000 of more. Five pairs make it "
    "optimistic: the t interval stands below it."
)
BY_SEED = "The images that judge are drawn by seed, hence the spread of the dense model and of static methods."
NOTES = {
    "4": [ONE_BASE],
    "A1": [ONE_BASE],
    "8": [EIGHT_AND_NINE, BY_SEED, "Greedy tries up to 64 candidates a step, or all that remain where those are fewer."],
    "A5": [EIGHT_AND_NINE, BY_SEED],
    "9": [EIGHT_AND_NINE, BY_SEED],
    "A4": [EIGHT_AND_NINE, BY_SEED],
    "11": [BOOTSTRAP],
    "B2": [BOOTSTRAP],
    "B1": [
        "Forward batches are model passes as they were made: base losses are shared within a step. The paper counts two a "
        "batch, and its 1,851 evaluations over 310 units at 10% are about 60 a step where its text says 32."
    ],
}


@dataclass(frozen=True)
class Row:
    key: tuple[str, ...]  # identifies the row, also in the paper's table
    cells: list[str]


@dataclass(frozen=True)
class Rendered:
    """A table as text, to be written in one of FORMS."""

    number: str
    name: str  # the name of its files, without suffix
    title: str
    columns: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def render(tables: Sequence[Table], *, beside_paper: bool = False) -> list[Rendered]:
    """Every table for which the store has runs.

    >>> print(markdown(render(read_tables(Path("results/deit")), beside_paper=True)[0]))
    """
    all_rendered = [rendered for build in BUILDERS for rendered in build(tables)]
    return [_beside_paper(rendered) for rendered in all_rendered] if beside_paper else all_rendered


# From cells to rows


def _by_method(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Tables 4 and 7: one row per model, one column per method."""
    for number in ("4", "7"):
        cells = list(cells_of(tables, number))
        if cells:
            methods = _methods(cells)
            rows = [
                Row((cell.model,), [cell.name, *(percent(cell.spread(method, cell.metric)) for method in methods)])
                for cell in cells
            ]
            yield _rendered(number, ["Model", *(label(m) for m in methods)], rows)


def _best(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Table 5: the best bandit against the best other method."""
    rows = []
    for cell in cells_of(tables, "4"):
        spreads = {m: s for m in cell.runs if (s := cell.spread(m, cell.metric))}
        bandit = _lowest({m: s for m, s in spreads.items() if m in bandits()})
        other = _lowest({m: s for m, s in spreads.items() if m not in bandits()})
        best = [MISSING if m is None else f"{label(m)}: {percent(spreads[m])}" for m in (bandit, other)]
        advantage = f"{spreads[other].mean - spreads[bandit].mean:.2f} percentage points" if bandit and other else MISSING
        rows.append(Row((cell.model,), [cell.name, *best, advantage]))
    if rows:
        yield _rendered("5", ["Model", "Best MAB", "Best non-MAB baseline", "MAB advantage over best non-MAB"], rows)


def _lowest(spreads: dict[str, Spread]) -> str | None:
    """The method with the lowest mean; None while any method lacks runs, because its mean might become the lowest."""
    if any(spread.missing for spread in spreads.values()):
        return None
    return min((m for m, s in spreads.items() if s.valid), key=lambda m: spreads[m].mean, default=None)


def _by_ratio(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Table 6: one row per ratio, one table per model."""
    for of_model in _by_name(cells_of(tables, "6")):
        model = of_model[0].model
        methods = _methods(of_model)
        rows = [
            Row(
                (_ratio(cell), model),
                [_ratio(cell), *(percent(cell.spread(method, cell.metric)) for method in methods)],
            )
            for cell in of_model
        ]
        columns = [f"{'GPT-2' if model == 'gpt2' else model} MLP prune ratio", *(label(m) for m in methods)]
        yield _rendered("6", columns, rows, of=of_model[0])


def _matched(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Table 8: one row per model and method."""
    columns: dict[str, Show] = {
        "Evals": _evals,
        "Pruned Top-1": _number("zeroed.top1"),
        "Δ Top-1": _number("delta_top1"),
        "Pruned loss": _number("zeroed.loss"),
        "Zeroed %": _number("zeroed_percent"),
    }
    yield from _long("8", cells_of(tables, "8"), ("Model", "Method"), columns)


def _screening(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Table 9: one row per model and method."""
    columns: dict[str, Show] = {
        "Dense Top-1": _number("dense.top1"),
        "Pruned Top-1": _number("zeroed.top1"),
        "Δ Top-1": _number("delta_top1"),
        "Pruned loss": _number("zeroed.loss"),
        "Evals": _evals,
    }
    yield from _long("9", cells_of(tables, "9"), ("Model", "Method"), columns)


def _sensitivity(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Table 10: one row per ratio and method, with a column that counts valid runs; one table per model and precision."""
    for cells in _by_name(cells_of(tables, "10")):
        rows = []
        for cell in cells:
            for method in cell.runs:
                spread = cell.spread(method, cell.metric)
                assert spread
                amounts = [_share(cell, method), _zeroed(cell, method)]
                valid = f"{spread.valid}/{spread.ended}" if spread.ended else MISSING
                change = shown(spread, 2, "%", count_failed=False)  # they have their own column here
                rows.append(
                    Row((_ratio(cell), label(method), cell.model), [_ratio(cell), *amounts, label(method), change, valid])
                )
        columns = [
            "Ratio",
            "Actual unit ratio",
            "Effective zeroed params",
            "Method",
            "PPL change (finite mean ± std)",
            "Valid runs",
        ]
        yield _rendered("10", columns, rows, of=cells[0])


def _language_details(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Appendix Tables A1 to A3."""
    for number, source in (("A1", "4"), ("A2", "6"), ("A3", "7")):
        columns: dict[str, Show] = {
            "Final PPL": _mean("zeroed.perplexity"),
            "PPL change": lambda cell, method: percent(cell.spread(method, cell.metric)),
            "Effective zeroed params": _zeroed,
        }
        if number == "A1":
            columns["Evals/time note"] = _note
        yield from _long(number, cells_of(tables, source), ("Dataset", "Model", "Target", "Ratio", "Method"), columns)


def _vision_details(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Appendix Tables A4 and A5."""
    figures: dict[str, Show] = {
        "Loss after": _number("zeroed.loss"),
        "Δ loss": _number("delta_loss"),
        "Top-1 after": _number("zeroed.top1"),
        "Δ Top-1": _number("delta_top1"),
        "Top-5 after": _number("zeroed.top5"),
        "Δ Top-5": _number("delta_top5"),
        "Zeroed %": _number("zeroed_percent"),
        "Evals": _evals,
    }
    screening = figures | {"Time (s)": _number("selection_seconds", 2)}
    names = ("Dataset", "Model", "Target", "Ratio", "Method")
    yield from _long("A4", cells_of(tables, "9"), names, screening)
    order = ("Evals", "Loss after", "Δ loss", "Top-1 after", "Δ Top-1", "Top-5 after", "Zeroed %")
    yield from _long("A5", cells_of(tables, "8"), ("Model", "Method"), {name: figures[name] for name in order})


def _accounting(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Table 3: the parameters zeroed for each model, target and ratio; a range if the means of methods differ."""
    places: dict[tuple[str, ...], list[Cell]] = {}
    for cell in (cell for table in tables for cell in table.cells if not cell.vary):
        if any(record.judgement for record in cell.records()):
            places.setdefault((cell.model, *_target_and_ratio(cell)), []).append(cell)
    rows = []
    for place, cells_of_place in places.items():
        by_method = [
            [record for record in cell.records(method) if record.judgement] for cell in cells_of_place for method in cell.runs
        ]
        percents = [statistics.fmean(r.figure("zeroed_percent") for r in records) for records in by_method if records]
        low, high = min(percents), max(percents)
        total = int(next(record for records in by_method for record in records).figure("total_params"))
        cells = [
            *place,
            _share(cells_of_place[0]),
            _millions(total),
            _range(low, high, "{:.4f}%"),
            _range(total * low / 1e8, total * high / 1e8, "{:.2f}M"),
            _range(total * (1 - high / 100) / 1e6, total * (1 - low / 100) / 1e6, "{:.2f}M"),
        ]
        rows.append(Row(place, cells))
    if rows:
        columns = ["Model", "Target", "Nominal prune ratio", "Actual unit ratio", "Nominal params before"]
        columns += ["Effective zeroed params", "Approx. params zeroed", "Approx. active params after"]
        yield _rendered("3", columns, rows)


def _significance(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Tables 11 and B2: counts over the language comparisons against greedy; q-values are over all language comparisons."""
    language = [table for table in tables if table.number in LANGUAGE and table.task == "text"]
    family = compare(language)
    highlighted = [c for c in family if c.baseline == "greedy" and set(c.tables) & set(HIGHLIGHTED)]
    if not highlighted:
        return
    counts, n = summary(highlighted, family), len(highlighted)
    short = sum(c.result.n < c.planned for c in highlighted)
    incomplete = f" [{short} of them without all pairs of seeds]" if short else ""
    size = f"{counts.family}-test family" + ("" if counts.tested == counts.family else f", {counts.tested} tested")
    rows = [
        Row(("Highlighted MAB vs greedy rows",), ["Highlighted MAB vs greedy rows", str(n) + incomplete]),
        Row(("Bootstrap 95% CI excludes zero",), ["Bootstrap 95% CI excludes zero", f"{counts.percentile}/{n}"]),
        Row(("t 95% CI excludes zero",), ["t 95% CI excludes zero", f"{counts.t}/{n}"]),
        Row(("Paired p < 0.05",), ["Paired p < 0.05", f"{counts.p}/{n}"]),
        Row(("BH q < 0.05 (116-test family)",), [f"BH q < 0.05 ({size})", f"{counts.q}/{n}"]),
    ]
    for number in ("11", "B2"):
        yield _rendered(number, ["Metric", "Value"], rows)


def _cost(tables: Sequence[Table]) -> Iterable[Rendered]:
    """Table B1: the mean cost of a selection over all rows of Table 4."""
    cells = list(cells_of(tables, "4"))
    rows = []
    for method in _methods(cells):
        records = [record for cell in cells for record in cell.records(method) if record.judgement]
        if not records:
            rows.append(Row((label(method),), [label(method), *[MISSING] * 5]))
            continue

        def mean(name: str, records: list[Record] = records) -> float:
            return statistics.fmean(record.figure(name) for record in records)

        passes = mean("forwards") + mean("score_passes")
        planned = sum(len(cell.runs.get(method, {})) for cell in cells)
        incomplete = f" [{len(records)} of {planned} runs]" if len(records) < planned else ""
        cells_of_row = [f"{mean('pulls'):.0f}{incomplete}", f"{passes:.1f}", f"{mean('selection_seconds'):.2f}"]
        cells_of_row += [f"{mean('total_seconds'):.2f}", f"{mean('candidates'):.1f}"]
        rows.append(Row((label(method),), [label(method), *cells_of_row]))
    if rows:
        columns = ["Method", "Candidate evals", "Forward batches", "Selection time (s)", "Total time (s)", "Mean total units"]
        yield _rendered("B1", columns, rows)


def _costs(tables: Sequence[Table]) -> Iterable[Rendered]:
    """What each choice cost, in forward passes of a calibration batch and in FLOPs, and what it is worth; not the paper's."""
    rows: dict[tuple[str, ...], Row] = {}  # by the runs: two tables may share them
    for cell in (cell for table in tables for cell in table.cells):
        for method in cell.runs:
            records = [record for record in cell.valid(method).values() if record.passes is not None]
            if not records:
                continue
            passes = statistics.fmean(record.passes or 0.0 for record in records)
            flops = [record.flops / 1e15 for record in records if record.flops is not None]
            seconds = statistics.fmean(record.selection_seconds for record in records)
            cost = [f"{passes:.1f}", f"{statistics.fmean(flops):.4g}" if flops else "", f"{seconds:.1f}"]
            change = cell.spread(method, cell.metric)
            worth = [shown(cell.spread(method, "delta_loss"), 4), percent(change) if cell.task == "text" else shown(change, 4)]
            about = [cell.name, cell.data, _kind(cell), _ratio(cell), label(method), _evals(cell, method)]
            rows.setdefault(tuple(cell.keys[method].values()), Row((str(cell), method), [*about, *cost, *worth]))
    if rows:
        columns = ["Model", "Dataset", "Target", "Ratio", "Method", "Pulls", "Passes", "PFLOP", "Seconds", "Δ loss", "Change"]
        note = (
            "Passes are forward passes of one calibration batch: a partial one counts by its blocks, one with a gradient three "
            "times. The change is of perplexity or of Top-1."
        )
        yield Rendered("costs", "costs", "What a choice costs and what it is worth", columns, list(rows.values()), [note])


def _ablations(tables: Sequence[Table]) -> Iterable[Rendered]:
    """One row per value of the varied setting, one column per method; the paper has no such tables."""
    cells = list(cells_of(tables, "ablation"))
    for name in dict.fromkeys(name for cell in cells for name in cell.vary):
        varied = [cell for cell in cells if name in cell.vary]
        methods = _methods(varied)
        several = len({cell.place for cell in varied}) > 1
        rows = []
        for cell in varied:
            about = [cell.model, cell.data, _kind(cell), _ratio(cell)] if several else []
            values = [
                percent(s) if cell.task == "text" else shown(s, 4) for s in (cell.spread(m, cell.metric) for m in methods)
            ]
            evals = [_evals(cell, method) for method in methods]
            rows.append(Row((str(cell),), [*about, str(cell.vary[name]), *values, *evals]))
        what = "change of perplexity" if varied[0].task == "text" else "change of Top-1"
        words = name.replace("_", " ")
        columns = [*(["Model", "Dataset", "Target", "Ratio"] if several else []), words.capitalize()]
        columns += [*(label(m) for m in methods), *(f"{label(m)} evals" for m in methods)]
        where = "" if several else f" ({replace(varied[0], vary={})})"
        yield Rendered("ablation", f"ablation-{name.replace('_', '-')}", f"Ablation of {words}: {what}{where}", columns, rows)


BUILDERS: tuple[Callable[[Sequence[Table]], Iterable[Rendered]], ...] = (
    _accounting,
    _by_method,
    _best,
    _by_ratio,
    _matched,
    _screening,
    _sensitivity,
    _significance,
    _language_details,
    _vision_details,
    _cost,
    _ablations,
    _costs,
)

Show = Callable[[Cell, str], str]


def _long(number: str, cells: Iterable[Cell], names: tuple[str, ...], columns: dict[str, Show]) -> Iterable[Rendered]:
    """A table with one row per method of a cell: the columns `names` identify it, the others are its figures."""
    rows = []
    for cell in cells:
        target, ratio = _target_and_ratio(cell)
        for method in cell.runs:
            values = {
                "Dataset": cell.data,
                "Model": cell.model,
                "Target": target,
                "Ratio": ratio,
                "Method": label(method),
            }
            key = tuple(values[name] for name in names if name in KEYS[number][0])
            values["Model"] = cell.name
            rows.append(Row(key, [*(values[name] for name in names), *(show(cell, method) for show in columns.values())]))
    if rows:
        yield _rendered(number, [*names, *columns], rows)


def _rendered(number: str, columns: list[str], rows: list[Row], of: Cell | None = None) -> Rendered:
    """The table under its number; of one model and what it varies, if `of` is one of its cells."""
    in_paper = any(paper_row(number, *row.key) for row in rows)
    parts = [of.model if not in_paper else "", of.varied] if of else []
    name = "-".join([f"table{number}", *(slug(part) for part in parts if part)])
    title = TITLES[number] + (f" ({of.name})" if of else "")
    return Rendered(number, name, title, columns, rows, list(NOTES.get(number, [])))


def _by_name(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells of each model and of each value of what is varied."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.name, []).append(cell)
    return list(groups.values())


def _methods(cells: Iterable[Cell]) -> list[str]:
    """The methods of the cells, in the order of METHODS; unknown ones last."""
    methods = {method for cell in cells for method in cell.runs}
    return [*(method for method in METHODS if method in methods), *sorted(methods - set(METHODS))]


def shown(spread: Spread | None, digits: int, unit: str = "", *, count_failed: bool = True) -> str:
    """A mean with its deviation, and a note if runs failed or are missing."""
    if spread is None:
        return ""
    if not spread.ended:
        return MISSING
    if not spread.valid:
        return FAILED + (f" [{spread.ended} of {spread.planned} runs]" if spread.missing else "")
    text = f"{spread.mean:.{digits}f}"
    if spread.deviation:
        text += f" ± {spread.deviation:.{digits}f}"
    text += unit
    if count_failed and spread.valid < spread.ended:
        text += f" ({spread.valid}/{spread.ended})"
    return text + (f" [{spread.ended} of {spread.planned} runs]" if spread.missing else "")


def percent(spread: Spread | None) -> str:
    return shown(spread, 2, "%")


def _number(name: str, digits: int = 4) -> Show:
    return lambda cell, method: shown(cell.spread(method, name), digits)


def _mean(name: str) -> Show:
    def show(cell: Cell, method: str) -> str:
        spread = cell.spread(method, name)
        return shown(spread and replace(spread, deviation=None), 4)

    return show


def _evals(cell: Cell, method: str) -> str:
    return shown(cell.spread(method, "pulls"), 0)


def _zeroed(cell: Cell, method: str) -> str:
    values = [record.figure("zeroed_percent") for record in cell.records(method) if record.judgement]
    return _range(min(values), max(values), "{:.4f}%") if values else MISSING


def _share(cell: Cell, method: str | None = None) -> str:
    judgement = next((record.judgement for record in cell.records(method) if record.judgement), None)
    if judgement is None:
        return MISSING
    share = f"{judgement.unit_ratio:.2%}"
    return f"{len(judgement.units)}/{judgement.candidates} ({share})" if cell.task == "image" else share


def _note(cell: Cell, method: str) -> str:
    spread = cell.spread(method, "pulls")
    if spread is None or not spread.valid:
        return MISSING if spread is None or not spread.ended else FAILED
    return f"{spread.mean:.0f} evals" if spread.mean else "Static/no selection evals"


def _target_and_ratio(cell: Cell) -> tuple[str, str]:
    """The target and the ratio, as the paper writes them for texts and for images."""
    if cell.task == "image":
        return {"head": "attention heads"}.get(cell.target, cell.target), f"{cell.ratio:.2f}"
    return _kind(cell), _ratio(cell)


def _kind(cell: Cell) -> str:
    return KINDS[cell.target].label if cell.target in KINDS else cell.target


def _ratio(cell: Cell) -> str:
    return f"{cell.ratio * 100:g}%"


def _millions(count: int) -> str:
    return f"{count / 1e6:.0f}M" if count >= 1e8 else f"{count / 1e6:.1f}M"


def _range(low: float, high: float, form: str) -> str:
    ends = form.format(low), form.format(high)
    return ends[0] if ends[0] == ends[1] else "-".join(ends)


# Beside the paper


def _beside_paper(rendered: Rendered) -> Rendered:
    """Add the paper's row below each of our rows, under our columns."""
    if rendered.number not in KEYS:
        return replace(rendered, notes=[*rendered.notes, "The paper has no such table."])
    rows = []
    for row in rendered.rows:
        printed = paper_row(rendered.number, *row.key)
        cells = [printed.get(name, "") for name in rendered.columns] if printed else ["no such row"]
        blanks = [""] * (len(rendered.columns) - len(cells))
        rows += [Row(row.key, ["ours", *row.cells]), Row(row.key, ["paper", *cells, *blanks])]
    return replace(rendered, columns=["", *rendered.columns], rows=rows)


# Output formats


def markdown(rendered: Rendered) -> str:
    table = markdown_table(rendered.columns, [row.cells for row in rendered.rows])
    return "\n".join([f"**{_heading(rendered)}**", "", table, *(f"\n{note}" for note in rendered.notes)]) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(_line(cells) for cells in (columns, ["---"] * len(columns), *rows))


def _heading(rendered: Rendered) -> str:
    return f"Table {rendered.number}. {rendered.title}" if rendered.number in KEYS else rendered.title


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def comma_separated(rendered: Rendered) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rendered.columns)
    writer.writerows(row.cells for row in rendered.rows)
    return text.getvalue()


LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "Δ": r"$\Delta$", "~": r"\textasciitilde{}", "<": r"$<$", ">": r"$>$"}
LATEX |= {"^": r"\textasciicircum{}"} | {character: "\\" + character for character in "%&#_${}"}


def latex(rendered: Rendered) -> str:
    def escaped(text: str) -> str:
        return "".join(LATEX.get(character, character) for character in text)

    rows = [" & ".join(map(escaped, cells)) + r" \\" for cells in (rendered.columns, *(row.cells for row in rendered.rows))]
    body = [r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule"]
    notes = [rf"\par\footnotesize {escaped(note)}" for note in rendered.notes]
    label = "tab:" + rendered.name.removeprefix("table")
    lines = [
        r"\begin{table}",
        rf"\caption{{{escaped(rendered.title)}}}\label{{{label}}}",
        rf"\begin{{tabular}}{{{'l' * len(rendered.columns)}}}",
        *body,
        r"\end{tabular}",
        *notes,
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


FORMS = {"md": markdown, "csv": comma_separated, "tex": latex}
