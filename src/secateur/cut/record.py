"""The record of a cut (secateur.json) and the model card (README.md) made from it. Cuts and measures nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from secateur.cut.heal import Heal
from secateur.cut.proof import Proof
from secateur.cut.repair import Repair
from secateur.errors import OutputError
from secateur.files import jsonio
from secateur.judgement import Evaluation, changes
from secateur.measure.speed import Measurement, Median, Timing
from secateur.report.html import picture, table, tag
from secateur.selection import Reached
from secateur.settings import UNIFORM, Provenance
from secateur.tasks import TASKS
from secateur.units import KINDS, Unit, outermost

RECORD, CARD = "secateur.json", "README.md"
FORMAT = 1  # the version of secateur.json
FIGURES = {
    "loss": "loss",
    "perplexity": "perplexity",
    "last_word_accuracy": "last-word accuracy",
    "top1": "top-1",
    "top5": "top-5",
    "agreement": "agreement",
    "cosine": "cosine",
    "nonfinite_batches": "non-finite batches",
}
WORKLOADS = {
    "prefill": "ms for a prompt",
    "decode": "ms for a token",
    "encode": "ms for texts",
    "forward": "images a second",
}
SHORT = {"prefill": "prompt ms", "decode": "token ms", "encode": "texts ms", "forward": "images/s"}
SPOKEN = {"prefill": "prompts", "decode": "tokens", "encode": "texts", "forward": "images"}


@dataclass(frozen=True)
class Written:
    """A file as it was written."""

    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class CutRecord:
    """What was cut and how it was proved; also its loss and its speed, if the cut was evaluated and measured.

    >>> record = cut(opened, selection, "small/", calibration=calibration, cutting=Cutting(measure=False))
    >>> record.params / record.dense_params, record.proof.difference
    """

    key: str  # fingerprint of the units, the model, the layout, the repair and the healing
    model: str
    model_digest: str
    family: str
    task: str
    layout: str
    dense_params: int
    params: int
    proof: Proof
    pulls: int
    units: tuple[Unit, ...]
    selection_digest: str
    versions: dict[str, str] = field(default_factory=dict)
    made_with: Provenance | None = None
    repair: Repair | None = None
    heal: Heal | None = None
    goal: Reached | None = None
    shrunk: Evaluation | None = None
    unhealed: Evaluation | None = None  # what the model scored before it was healed
    dense: Evaluation | None = None
    zeroed: Evaluation | None = None  # files call it "masked"
    data: str | None = None  # the evaluation data
    measurement: Measurement | None = None
    files: dict[str, Written] = field(default_factory=dict)  # by path; none in records that an earlier version wrote

    def to_json(self) -> dict[str, Any]:
        about = ("key", "model", "model_digest", "family", "task", "layout", "dense_params", "params")
        parts: dict[str, Any] = {"format": FORMAT, **{name: getattr(self, name) for name in about}}
        parts["proof"] = self.proof.to_json() | {"sentence": str(self.proof)}
        if self.repair:
            parts["repair"] = self.repair.to_json() | {"sentence": str(self.repair)}
        if self.heal:
            parts["heal"] = self.heal.to_json() | {"sentence": str(self.heal)}
        if self.goal:
            parts["goal"] = self.goal.to_json()
        parts |= {
            "pulls": self.pulls,
            "settings": self.made_with.to_json() if self.made_with else {},
            "versions": self.versions,
            "selection_digest": self.selection_digest,
            "units": [unit.to_json() for unit in self.units],
        }
        sides = {"shrunk": self.shrunk, "unhealed": self.unhealed, "dense": self.dense, "masked": self.zeroed}
        for name, evaluation in sides.items():
            if evaluation:
                parts[name] = evaluation.to_json()
        if self.data is not None:
            parts["data"] = self.data
        if self.measurement:
            parts["measurement"] = self.measurement.to_json()
        if self.files:
            parts["files"] = {name: file.to_json() for name, file in self.files.items()}
        return parts

    def _repr_html_(self) -> str:
        left = f"{self.params:,} of {self.dense_params:,} parameters ({self.params / self.dense_params:.1%}) are left"
        said = [f"{left}, without {removed(self.units)}.", f"Proved: {self.proof}."]
        said += [str(self.repair)] if self.repair else []
        shown = [table(*measurement_table(self.measurement), caption="Dense against small")] if self.measurement else []
        return picture(*(tag("p", sentence) for sentence in said), *shown).html


def read_record(folder: Path) -> CutRecord | None:
    """The record of the model in a folder; None if the folder holds no model with a record."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        fields = jsonio.read(path)
        if fields["format"] != FORMAT:
            raise OutputError(f"{path} has format {fields['format']!r}; this version of Secateur reads format {FORMAT}.")
        made_with = None if fields["settings"] == {} else Provenance.from_json(fields["settings"])
        known = {name: value for name, value in fields.items() if name != "settings"}
        known |= {"zeroed": fields["masked"]} if "masked" in fields else {}
        record = jsonio.decode(known, CutRecord)
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in record.files):
            raise ValueError("it names a file outside its folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not (folder / "config.json").exists():
            return None
        raise OutputError(f"{path} is not a record of Secateur's, or is damaged; move it away or choose another -o.") from error
    if not record.files and not (folder / "config.json").exists():
        return None  # an earlier version wrote config.json last, and no digests
    return replace(record, made_with=made_with)


def written_files(folder: Path) -> dict[str, Written]:
    """The size and the digest of each file of a model; not of the record and the card, which are written again later."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (RECORD, CARD))
    return {path.relative_to(folder).as_posix(): _written(path) for path in paths}


def _written(path: Path) -> Written:
    with open(path, "rb") as file:
        return Written(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def changed_files(folder: Path, record: CutRecord) -> dict[str, bool]:
    """The files of a model that are not as they were written, each with whether it is there at all."""
    changed = {}
    for name, file in record.files.items():
        path = folder / name
        if not path.is_file():
            changed[name] = False
        elif path.stat().st_size != file.bytes or _written(path) != file:
            changed[name] = True
    return changed


def model_card(record: CutRecord) -> str:
    """The text of README.md: what was removed, how it was chosen, what that cost and won, and how to load the model."""
    name = _plain(record.model)
    timm = record.family.startswith("timm/")
    task = TASKS[record.task].pipeline
    library, base = "timm" if timm else "transformers", json.dumps(record.model, ensure_ascii=False)
    parts = [
        f"---\nbase_model: {base}\nlibrary_name: {library}\npipeline_tag: {task}\ntags:\n- pruned\n- secateur\n---",
        f"# `{name}`, pruned",
        f"This is `{name}` without {removed(record.units)}: {record.params:,} of {record.dense_params:,} parameters "
        f"({record.params / record.dense_params:.1%}) are left. `secateur.json` lists the removed units.",
        "## Load it",
        f"```python\n{_loading(record, timm=timm)}\n```",
        "## What was removed, and how it was chosen",
        f"{_chosen(record.made_with)}{record.pulls:,} paired measurements. Units as layer.index, counted from 0:",
        "\n".join(f"- {line}" for line in unit_lines(record.units)),
        "## What it cost",
        _costs(record),
        "## Proof",
        f"On {record.proof.batches} calibration batches {record.proof}.",
    ]
    if record.repair:
        parts += ["## Repair", str(record.repair)]
    if record.heal:
        parts += ["## Healing", str(record.heal)]
    if record.goal:
        parts += ["## Goal", goal_sentence(record.goal)]
    if measurement := record.measurement:
        table = markdown(*measurement_table(measurement))
        parts += ["## What it won", table, measured_where(measurement), verdict(measurement, cost_in_words(record))]
    return "\n\n".join(parts) + "\n"


def _chosen(made_with: Provenance | None) -> str:
    """How the units were chosen: the beginning of a sentence, or nothing if that is not known."""
    if made_with is None:
        return ""
    settings = made_with.settings
    names = ("method", "target", *(["group_by"] if settings.orders_channels else []), "seed")
    how = ", ".join(f"{name.replace('_', ' ')} `{_plain(str(getattr(settings, name)))}`" for name in names)
    return f"By Secateur: {how}, on the calibration data `{_plain(settings.calibration)}`; "


def removed(units: Sequence[Unit]) -> str:
    """How many units of each kind were removed, in words."""
    counts = {kind: sum(unit.kind == kind for unit in outermost(units)) for kind in KINDS}
    return " and ".join(f"{n} {KINDS[kind].words}{'s' if n > 1 else ''}" for kind, n in counts.items() if n)


def unit_lines(units: Sequence[Unit]) -> list[str]:
    """One line for each kind and layer, with the indices of its units: `head 3.5,6`."""
    by_layer: dict[tuple[str, int], list[int]] = {}
    for unit in outermost(units):
        by_layer.setdefault((unit.kind, unit.layer), []).append(unit.index)
    return [f"{kind} {layer}.{','.join(map(str, sorted(indices)))}" for (kind, layer), indices in sorted(by_layer.items())]


def goal_sentence(goal: Reached) -> str:
    """What was asked for and what is left, in a sentence."""
    text = f"{goal.asked:.1%} of the dense model's {goal.what} were asked for, and {goal.got:.2%} are left"
    if goal.measured is not None:
        text += f" by the table measured before; {goal.measured:.2%} were measured afterwards"
    return text + "."


def measurement_table(measurement: Measurement) -> tuple[list[str], list[list[str]]]:
    """The titles and rows of a table that compares the dense and the small model."""
    dense_params, small_params = measurement.dense_params, measurement.small_params
    rows = [["parameters", f"{dense_params:,}", f"{small_params:,}", _ratio(dense_params, small_params), ""]]
    for title, dense_bytes, small_bytes in _sizes(measurement):
        rows.append([title, f"{dense_bytes / 1e6:,.1f}", f"{small_bytes / 1e6:,.1f}", _ratio(dense_bytes, small_bytes), ""])
    for timing in measurement.timings:
        title = WORKLOADS[timing.name]
        sides = [_interval(median, ".1f") for median in (timing.dense_median, timing.small_median)]
        if timing.name == "forward":
            sides = [f"{speed:.1f}" for speed in (timing.dense_images_per_second, timing.small_images_per_second)]
        speedup, flops = _interval(timing.speedup, ".2f"), f"{timing.flop_ratio:.2f}"
        rows.append([f"{title}, batch {timing.batch_size}", *sides, speedup, flops])
    return ["", "dense", "small", "dense/small", "FLOPs dense/small"], rows


def short_table(measurement: Measurement) -> tuple[list[str], list[list[str]]]:
    """The same for a terminal: units in the titles, and one interval a row, that of the ratio."""
    dense_params, small_params = measurement.dense_params, measurement.small_params
    counted = [f"{n / 1e6:,.1f} M" if dense_params >= 1e7 else f"{n:,}" for n in (dense_params, small_params)]
    rows = [["parameters", *counted, _ratio(dense_params, small_params), ""]]
    for title, dense, small in _sizes(measurement):
        rows.append([title, f"{dense / 1e6:,.1f}", f"{small / 1e6:,.1f}", _ratio(dense, small), ""])
    for timing in measurement.timings:
        sides = timing.dense_median.value, timing.small_median.value
        if timing.name == "forward":
            sides = timing.dense_images_per_second or 0.0, timing.small_images_per_second or 0.0
        title = f"{SHORT[timing.name]}, batch {timing.batch_size}"
        speedup, flops = _interval(timing.speedup, ".2f"), f"{timing.flop_ratio:.2f}"
        rows.append([title, *(f"{side:,.1f}" for side in sides), speedup, flops])
    return ["", "dense", "small", "dense/small", "FLOPs"], rows


def _sizes(measurement: Measurement) -> list[tuple[str, int, int]]:
    """Bytes on disk and in memory of both models, where they are known."""
    sizes = (
        ("MB on disk", measurement.dense_disk, measurement.small_disk),
        ("peak MB in memory", measurement.dense_memory, measurement.small_memory),
    )
    return [(title, dense, small) for title, dense, small in sizes if dense and small]


def verdict(measurement: Measurement, cost: str = "") -> str:
    """How much faster the small model is and at what cost, in a sentence or two: what is surely faster, and what is not."""
    faster = [timing for timing in measurement.timings if timing.speedup.low > 1]
    others = [timing for timing in measurement.timings if timing not in faster]
    at = f", at {cost}" if cost else ""
    sentences = [f"The small model is {_times(faster)} as fast for {_works(faster)}{at}."] if faster else []
    if others:
        slower = all(timing.speedup.high < 1 for timing in others)
        shares = {f"{1 - timing.small_flops / timing.dense_flops:.1%}" for timing in others}
        saved = max(1 - timing.small_flops / timing.dense_flops for timing in others)
        up_to = "up to " if len(shares) > 1 else ""
        gone = f"though {up_to}{saved:.1%} of the FLOPs are gone" if saved > 0 else "and none of the FLOPs are gone"
        who = "It" if faster else "The small model"
        found = f"{who} is {'slower' if slower else 'not surely faster'} for {_works(others)} ({_times(others)} as fast)"
        sentences.append(f"{found}, {gone}{'' if faster else at}.")
    return " ".join(sentences)


def _times(timings: Sequence[Timing]) -> str:
    """The medians of the speedups, from the least to the most."""
    medians = sorted(timing.speedup.value for timing in timings)
    least, most = f"{medians[0]:.2f}", f"{medians[-1]:.2f}"
    return f"{least} times" if least == most else f"{least} to {most} times"


def _works(timings: Sequence[Timing]) -> str:
    """What was timed, in words: `prompts at batch 1 and 8 and tokens at batch 8`."""
    batches: dict[str, list[str]] = {}
    for timing in timings:
        batches.setdefault(SPOKEN[timing.name], []).append(str(timing.batch_size))
    if len({tuple(sizes) for sizes in batches.values()}) == 1:
        return f"{' and '.join(batches)} at batch {' and '.join(next(iter(batches.values())))}"
    return ", and ".join(f"{work} at batch {' and '.join(sizes)}" for work, sizes in batches.items())


def cost_in_words(record: CutRecord) -> str:
    """What the checkpoint lost against the dense model: `+1.07% perplexity`; nothing if it was not evaluated."""
    if not (record.dense and record.shrunk):
        return ""
    changed = changes(record.dense, record.shrunk)
    if "ppl_change_percent" in changed:
        return f"{changed['ppl_change_percent']:+.2f}% perplexity"
    for name in ("top1", "agreement"):
        if f"delta_{name}" in changed:
            return f"{100 * changed[f'delta_{name}']:+.2f} points of {FIGURES[name]}"
    name = "cosine" if "delta_cosine" in changed else "loss"
    return f"{changed[f'delta_{name}']:+.4f} {name}"


def measured_where(measurement: Measurement) -> str:
    """How and on which hardware the models were timed, in a sentence."""
    length = f"; a prompt has {measurement.tokens} tokens" if measurement.tokens else ""
    threads = f"{measurement.threads} threads" if measurement.threads != 1 else "1 thread"
    return (
        f"Medians with 95% intervals of {len(measurement.timings[0].dense_ms)} repetitions, the models taking turns: "
        f"{measurement.device}, {threads}, {measurement.dtype}, torch {measurement.torch_version}{length}."
    )


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def costs_table(record: CutRecord) -> tuple[list[str], list[list[str]]]:
    """The titles and rows of a table of the evaluations that were made, with the figures that all of them have."""
    models = {"dense": record.dense, "zeroed": record.zeroed, "before healing": record.unhealed, "this model": record.shrunk}
    models |= {"dense, treated alike": record.heal.dense if record.heal else None}
    evaluations = {title: evaluation.to_json() for title, evaluation in models.items() if evaluation}
    rows = [
        [title, *(f"{float(figures[key]):.4f}" for figures in evaluations.values())]
        for key, title in FIGURES.items()
        if all(key in figures for figures in evaluations.values())
        and (key != "nonfinite_batches" or any(figures[key] for figures in evaluations.values()))
    ]
    return ["", *evaluations], rows


def _costs(record: CutRecord) -> str:
    if not record.shrunk:
        return "It was not evaluated."
    table = markdown(*costs_table(record))
    return f"{table}\n\nEvaluated on `{_plain(str(record.data))}`, which did not choose the units."


def _loading(record: CutRecord, *, timm: bool) -> str:
    """The Python code that loads the model."""
    auto = TASKS[record.task].auto_class
    if record.layout == UNIFORM:
        if timm:
            return 'import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True)'
        return f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("FOLDER")'
    by_secateur = 'import secateur\n\nmodel = secateur.load_shrunk("FOLDER")'
    if timm:
        return by_secateur
    return (
        f"{by_secateur}\n\n# or, if Secateur is not installed, by the code in this folder\nfrom transformers import {auto}\n\n"
        f'model = {auto}.from_pretrained("FOLDER", trust_remote_code=True)'
    )


def loading_line(record: CutRecord, folder: Path) -> str:
    """One line of Python that loads the model in a folder."""
    code = _loading(record, timm=record.family.startswith("timm/")).split("\n\n#")[0]
    package, line = code.split("\n\n")
    where = jsonio.dumps(str(folder))[1:-1]
    return f"{package}; {line.replace('FOLDER', where)}"


def _ratio(dense: int, small: int) -> str:
    return f"{dense / small:.3f}"


def _interval(median: Median, form: str) -> str:
    return f"{median.value:{form}} ({median.low:{form}} to {median.high:{form}})"


def _plain(text: str) -> str:
    """A name that is safe as inline code in Markdown: without backticks and line breaks."""
    return " ".join(text.replace("`", "'").split())
