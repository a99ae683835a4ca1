"""The page of a prune, and of whatever else is asked for: one self-contained HTML file, made from files without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from secateur.errors import OutputError
from secateur.files import jsonio
from secateur.files.places import check_file
from secateur.judgement import Changed
from secateur.methods import label
from secateur.report.charts import Member, Strip, family, strips
from secateur.report.html import MARK, Html, between, count, details, figure, joined, number, page, table, tag
from secateur.report.map import draw_map
from secateur.report.run import FIGURES, SHARES, Run, Stage, Timed, change, is_run, level, read_run
from secateur.report.search import draw_search
from secateur.series import DENSE, table as series_table
from secateur.units import KINDS, Unit, outermost

REPORT = "report.html"
LONGEST = 80  # letters of a name in a heading
WORKLOADS = {"prefill": "a prompt", "decode": "a token", "encode": "texts", "forward": "images"}


def write_report(place: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a prune's folder or of a store; gives its path, by default report.html in the folder.

    >>> write_report("out/")
    """
    place = Path(place)
    folder = place.parent if place.is_file() or place.name == "results.jsonl" else place
    path = Path(out) if out is not None else folder / REPORT
    check_file(path, REPORT)
    if path.exists() and MARK not in jsonio.read_bytes(path)[:2000].decode("utf-8", "replace"):
        raise OutputError(f"{path} is not a report of Secateur's, and is not overwritten; choose another place with -o.")
    if not folder.is_dir():
        raise OutputError(f"There is no folder {folder}: give the folder of a prune, or a store.")
    if place != folder or ((folder / "results.jsonl").exists() and not is_run(folder)):
        from secateur.report.store import store_page

        text = store_page(folder)
    else:
        text = run_page(read_run(folder))
    jsonio.write_text(path, text)
    return path


# The page of a prune


def run_page(run: Run) -> str:
    """The page of a prune."""
    name = Path(run.model).name or run.model
    name = name if len(name) <= LONGEST else name[:LONGEST] + "…"
    head = joined(
        [
            tag("p", "Pruned with Secateur", class_="eyebrow"),
            tag("h1", name),
            tag("p", verdict(run), class_="verdict"),
            _tiles(run),
        ]
    )
    sections = [
        ("result", "Result", _result(run)),
        ("map", "Map of the model", draw_map(run.selection) if run.selection.units else Html("")),
        ("search", "The search", draw_search(run.selection)),
        ("series", "A series of cuts", _series(run)),
        ("samples", "Samples", _samples(run)),
        ("repeat", "Repeat it", _repeat(run)),
    ]
    return page(f"{name}, pruned", head, sections)


def verdict(run: Run) -> str:
    """What was removed, what it cost and what it won, in a sentence or two."""
    said = f"Without {removed(run.selection.units)}"
    if run.cut:
        said += f" ({1 - run.cut.params / run.cut.dense_params:.1%} of its parameters)"
    if len(run.stages) < 2:
        return f"{said}, the model was not judged."
    dense, last = run.stages[0].evaluation, run.stages[-1].evaluation
    words, more_is_better = FIGURES[run.figure]
    values = [shown(getattr(stage, run.figure), run.figure) for stage in (dense, last)]
    if not math.isfinite(last.loss):
        return f"{said}, the loss is not finite: this cut failed."
    gap, interval = change(dense, last, run.figure)
    unsure = interval is not None and interval[0] <= 0 <= interval[1]
    better = (gap > 0) == more_is_better
    moved = "stays at" if values[0] == values[1] else "goes from"
    text = f"{said}, {words} {moved} {values[0]}" + ("" if values[0] == values[1] else f" to {values[1]}")
    text += ", which these data cannot tell from no change" if unsure and values[0] != values[1] else ""
    text += ", which is better" if better and gap and not unsure else ""
    return f"{text}{_faster(run)}."


def _faster(run: Run) -> str:
    measurement = run.cut.measurement if run.cut else None
    if measurement is None:
        return "" if run.cut else "; nothing was cut"
    speedups = [timing.speedup for timing in measurement.timings]
    sure = [speedup for speedup in speedups if speedup.low > 1]
    if not sure:
        slower = all(speedup.high < 1 for speedup in speedups)
        return f", and it is {'slower' if slower else 'not measurably faster'}"
    low, high = min(s.value for s in sure), max(s.value for s in sure)
    times = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    where = "" if len(sure) == len(speedups) else f" in {len(sure)} of {len(speedups)} workloads"
    return f", and it is {times} times as fast{where}"


def removed(units: Sequence[Unit]) -> str:
    """How many units of each kind were removed, in words."""
    counts = {kind: sum(unit.kind == kind for unit in outermost(units)) for kind in KINDS}
    return " and ".join(count(n, KINDS[kind].words) for kind, n in counts.items() if n) or "anything"


def shown(value: float, figure: str) -> str:
    return f"{value:.1%}" if figure in SHARES else number(value)


def _tiles(run: Run) -> Html:
    """The figures that people look for first."""
    tiles = []
    if len(run.stages) > 1:
        dense, last = run.stages[0].evaluation, run.stages[-1].evaluation
        values = [shown(getattr(stage, run.figure), run.figure) for stage in (dense, last)]
        tiles.append(
            (FIGURES[run.figure][0], values[1], f"dense {values[0]}; {_changed(run.stages[0], run.stages[-1], run.figure)}")
        )
    if cut := run.cut:
        tiles.append(
            (
                "parameters",
                f"{cut.params / 1e6:,.1f} M",
                f"{cut.params / cut.dense_params:.1%} of {cut.dense_params / 1e6:,.1f} M",
            )
        )
        measurement = cut.measurement
        if measurement and measurement.small_disk and measurement.dense_disk:
            mega = measurement.small_disk / 1e6, measurement.dense_disk / 1e6
            tiles.append(("on disk", f"{mega[0]:,.1f} MB", f"dense {mega[1]:,.1f} MB"))
        if measurement and measurement.timings:
            timing = max(measurement.timings, key=lambda timing: timing.speedup.value)
            value, low, high = timing.speedup.value, timing.speedup.low, timing.speedup.high
            tiles.append(("speed, at best", f"{value:.2f}×", f"{_work(timing)}; 95%: {low:.2f} to {high:.2f}"))
        tiles.append(("proof", "✓ equal", "it computes what the zeroed model does"))
    return tag(
        "div", *(tag("div", tag("p", a), tag("strong", b), tag("small", c), class_="tile") for a, b, c in tiles), class_="tiles"
    )


def _work(timing: Timed) -> str:
    return f"{WORKLOADS.get(timing.name, timing.name)}, batch {timing.batch_size}"


def _changed(dense: Stage, other: Stage, figure: str) -> str:
    gap, interval = change(dense.evaluation, other.evaluation, figure)
    unit = "%" if figure == "perplexity" else " points" if figure in SHARES else ""
    text = f"{gap:+.2f}".replace("-", "−") if unit else number(gap, 3, sign=True)
    ends = [f"{end:+.2f}".replace("-", "−") if unit else number(end, 3, sign=True) for end in interval or ()]
    return f"{text}{unit}" + (f" (95%: {ends[0]} to {ends[1]})" if interval else "")


def _result(run: Run) -> Html:
    """The stages of the model in a table, the proof, and time."""
    if not run.stages:
        return tag("p", "This folder has no evaluation.json: the selection was not judged.")
    names = [name for name in FIGURES if all(getattr(stage.evaluation, name) is not None for stage in run.stages)]
    names += [name for name in ("top5", "last_word_accuracy") if getattr(run.stages[0].evaluation, name) is not None]
    columns = ["Model", "Parameters", *(f"{_title(name)} (95%)" for name in names), f"Change of {_title(run.figure)}"]
    rows = []
    for stage in run.stages:
        row: list[object] = [stage.name, _parameters(run, stage)]
        for name in names:
            value, interval = level(stage.evaluation, name)
            ends = tag("small", " to ".join(shown(end, name) for end in interval)) if interval else ""
            row.append(joined([shown(value, name), Html(" "), ends]))
        rows.append([*row, "" if stage is run.stages[0] else _changed(run.stages[0], stage, run.figure)])
    judgement = run.record.judgement if run.record else None
    on = run.record.judged_on if run.record else None
    parts: list[object] = [table(columns, rows, caption="The model at each stage")]
    if on and judgement:
        which = f"{judgement.dense.rows:,} rows of {on.data}, which chose nothing"
        how = "means over batches, and changes are paired batch by batch"
        how = "shares of so many rows" if run.figure in SHARES else how
        parts.append(tag("p", f"Judged on {which}; intervals are of {how}.", class_="note"))
    parts.append(_trust(run))
    if run.cut and run.cut.measurement and run.cut.measurement.timings:
        parts.append(_speed(run))
    return joined(parts)


def _title(name: str) -> str:
    return {"top5": "top-5 accuracy", "last_word_accuracy": "last-word accuracy"}.get(name) or FIGURES[name][0]


def _parameters(run: Run, stage: Stage) -> str:
    judgement = run.record.judgement if run.record else None
    if stage.name.startswith("dense") or not judgement:
        return f"{judgement.total_params:,}" if judgement else ""
    if stage.name == "zeroed":
        return f"{judgement.zeroed_percent:.2f}% zeroed"
    return f"{run.cut.params:,}" if run.cut else ""


def _trust(run: Run) -> Html:
    """Why the numbers can be believed: the proof, the repair, the goal."""
    said = []
    if cut := run.cut:
        said.append(("Proved", f"On calibration batches {cut.proof.sentence}."))
        said += [
            (name, told.sentence) for name, told in (("Repair", cut.repair), ("Healing", cut.heal)) if told and told.sentence
        ]
        how = "stock from_pretrained loads it" if cut.layout == "uniform" else "secateur.load_shrunk loads it"
        said.append(("Layout", f"{cut.layout}: {how}."))
    goal = (run.cut.goal if run.cut else None) or run.selection.goal
    if goal:
        measured = f"; {goal.measured:.1%} were measured afterwards" if goal.measured is not None else ""
        said.append(("Goal", f"{goal.asked:.1%} of the {goal.what} were asked for, and {goal.got:.2%} are left{measured}."))
    selection = run.selection
    gradients = f", gradients of {count(selection.gradient_batches, 'batch', 'batches')}" if selection.gradient_batches else ""
    said.append(
        (
            "Search",
            f"{count(selection.pulls, 'paired measurement')}{gradients}, {number(selection.passes)} forward passes.",
        )
    )
    return tag("dl", *(part for name, text in said for part in (tag("dt", name), tag("dd", text))), class_="facts")


def _speed(run: Run) -> Html:
    assert run.cut and run.cut.measurement
    measurement = run.cut.measurement
    rows = []
    for timing in measurement.timings:
        sides = [f"{m.value:,.1f} ms ({between(m.low, m.high, 3)})" for m in (timing.dense_median, timing.small_median)]
        times = f"{timing.speedup.value:.2f} ({timing.speedup.low:.2f} to {timing.speedup.high:.2f})"
        rows.append([_work(timing), *sides, times, f"{timing.flop_ratio:.2f}"])
    drawn = strips(
        [
            Strip(
                f"{WORKLOADS.get(t.name, t.name)}",
                mean=t.speedup.value,
                interval=(t.speedup.low, t.speedup.high),
                words=_speed_words(t),
                also=f"batch {t.batch_size}",
            )
            for t in measurement.timings
        ],
        about="How many times as fast the small model is in each workload: " + "; ".join(f"{row[0]}: {row[3]}" for row in rows),
        x_label="dense time / small time (1 is no gain)",
        level=(1.0, "as fast"),
    )
    columns = ["Workload", "Dense", "Small", "Dense / small", "FLOPs dense / small"]
    sizes = [
        ("Peak memory", measurement.dense_memory, measurement.small_memory),
        ("On disk", measurement.dense_disk, measurement.small_disk),
    ]
    rows += [[name, f"{a / 1e6:,.1f} MB", f"{b / 1e6:,.1f} MB", f"{a / b:.2f}", ""] for name, a, b in sizes if a and b]
    length = f", a prompt has {measurement.tokens} tokens" if measurement.tokens else ""
    machine = f"{measurement.device}, {count(measurement.threads, 'thread')}, {measurement.dtype}"
    version = f"torch {measurement.torch_version}"
    where = f"Medians with 95% intervals, the models taking turns: {machine}, {version}{length}."
    listed = details("Times and sizes as a table", table(columns, rows, caption="Dense against small"))
    return tag("div", figure("Speed", drawn, listed, note=where), class_="charts one")


def _speed_words(timing: Timed) -> str:
    times = timing.speedup
    lines = [f"{_work(timing)}: {times.value:.2f} times as fast", f"95%: {times.low:.2f} to {times.high:.2f}"]
    return "\n".join([*lines, f"FLOPs: {timing.flop_ratio:.2f} times fewer"])


def _series(run: Run) -> Html:
    if not run.series:
        return Html("")
    titles, rows = series_table(run.series)
    members = [
        Member(cut.name, cut.time, cut.quality, folder=cut.name, dense=cut.name == DENSE)
        for cut in run.series.cuts
        if cut.time is not None
    ]
    drawn = tag("div", family(members, metric=FIGURES[run.series.figure][0]), class_="charts one") if len(members) > 1 else ""
    knee = f"The knee is {run.series.knee}: after it quality falls faster than time." if run.series.knee else ""
    return joined([drawn, tag("p", knee), table(titles, rows, caption="Each cut has a folder of its name", sortable=True)])


def _samples(run: Run) -> Html:
    samples = run.samples
    if samples is None or not (samples.continued or samples.looked_at):
        return Html("")
    parts: list[object] = []
    for one in samples.continued:
        sides = [("The dense model", one.dense), ("The small model", one.small), ("The text itself", one.text)]
        columns = [tag("div", tag("h4", name), tag("p", "… ", said or "(nothing)")) for name, said in sides]
        parts.append(
            tag("article", tag("p", one.prompt, " …", class_="prompt"), tag("div", *columns, class_="sides"), class_="sample")
        )
    if samples.looked_at:
        many = f"{samples.differ} of {count(samples.looked_at, 'example')} got another class"
        parts.append(tag("p", f"{many}{'; some of them:' if samples.changed else '.'}"))
        parts.append(tag("div", *(_changed_class(one) for one in samples.changed), class_="gallery"))
    return joined(parts)


def _changed_class(one: Changed) -> Html:
    safe = one.image.startswith("data:image/jpeg;base64,")
    picture = (
        tag("img", src=one.image, alt=f"an example of {one.label or 'unknown class'}") if safe else tag("blockquote", one.text)
    )

    def line(who: str, said: str) -> Html:
        right = (" ✓" if said == one.label else " ✗") if one.label else ""
        return tag("p", tag("span", who, class_="soft"), " ", said, right)

    truth = [tag("p", tag("b", one.label))] if one.label else []
    return tag("div", picture, *truth, line("dense:", one.dense), line("small:", one.small), class_="changed")


def _repeat(run: Run) -> Html:
    """The command, the settings, the data and the versions."""
    parts: list[object] = []
    if settings := run.settings:
        command = run.command("out/")
        copy = tag("button", "Copy", type="button", class_="copy", data_copies="command")
        parts.append(tag("div", tag("pre", tag("code", command, id="command"), tabindex=0), copy, class_="command"))
        rows = [[name, "" if value is None else str(value)] for name, value in settings.to_json().items()]
        rows.insert(0, ["method, in words", label(settings.method)])
        parts.append(details("All settings", table(["Setting", "Value"], rows, caption="Settings", sortable=True)))
    facts = []
    if source := run.selection.calibration:
        facts.append(
            ("Chosen on", f"{source.name}, {source.split}: {len(source.rows):,} texts or images, digest {source.digest}")
        )
    if run.record:
        judged = run.record.judged_on
        facts.append(("Judged on", f"{judged.data}: {judged.rows:,} texts or images, digest {judged.data_digest}"))
    if run.selection.made_with:
        facts.append(("Model", f"{run.model}, digest {run.selection.made_with.model_digest}"))
    facts.append(
        ("Versions", ", ".join(f"{name} {version}" for name, version in run.selection.versions.items()) or "not recorded")
    )
    parts.append(tag("dl", *(part for name, text in facts for part in (tag("dt", name), tag("dd", text))), class_="facts"))
    return joined(parts)
