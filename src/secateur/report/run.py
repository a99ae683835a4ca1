"""What the files of a prune say, read without a model and without torch: all that its page shows."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from secateur.errors import OutputError, SelectionError, first_line
from secateur.files import jsonio
from secateur.healing import Healing
from secateur.judgement import SAMPLES, Evaluation, PruneRecord, Samples
from secateur.report.intervals import mean_interval, share_interval
from secateur.selection import Reached, Selection
from secateur.series import Series, read_series
from secateur.settings import REPAIRS, Settings, keywords

T = TypeVar("T")
Interval = tuple[float, float]
SELECTION, EVALUATION, CUT, JOURNAL = "selection.json", "evaluation.json", "secateur.json", "journal.jsonl"
FIGURES = {  # what a model is judged by, the first that it has, and whether more is better
    "perplexity": ("perplexity", False),
    "top1": ("top-1 accuracy", True),
    "agreement": ("agreement with the dense model", True),
    "cosine": ("cosine to the dense model", True),
    "loss": ("loss", False),
}
SHARES = ("top1", "top5", "agreement", "last_word_accuracy")


@dataclass(frozen=True)
class Middle:
    """A median with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Timed:
    """A workload on both models, of secateur.json."""

    name: str
    batch_size: int
    dense_median: Middle
    small_median: Middle
    speedup: Middle
    flop_ratio: float


@dataclass(frozen=True)
class Measured:
    """The measurement of both models, of secateur.json."""

    dense_params: int
    small_params: int
    dense_bytes: int
    small_bytes: int
    timings: tuple[Timed, ...]
    threads: int
    device: str
    dtype: str
    torch_version: str
    tokens: int | None = None
    dense_disk: int | None = None
    small_disk: int | None = None
    dense_memory: int | None = None
    small_memory: int | None = None


@dataclass(frozen=True)
class Told:
    """A proof, a repair or a healing: what it says of itself in a sentence."""

    sentence: str = ""
    form: str = ""
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    declined: dict[str, str] = dataclasses.field(default_factory=dict)
    size: int | None = None  # of a repair: texts or images, if it was asked for
    dense: Evaluation | None = None  # of a healing: the dense model after the same treatment
    steps: int = 0  # of a healing, as are the next two
    data: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """secateur.json, as far as a page shows it."""

    model: str
    task: str
    layout: str
    dense_params: int
    params: int
    proof: Told
    repair: Told | None = None
    heal: Told | None = None
    goal: Reached | None = None
    shrunk: Evaluation | None = None
    unhealed: Evaluation | None = None
    measurement: Measured | None = None


@dataclass(frozen=True)
class Stage:
    """The model at one stage: dense, zeroed, cut..."""

    name: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Run:
    """A prune as its files tell it."""

    folder: Path
    selection: Selection
    record: PruneRecord | None = None
    cut: Cut | None = None
    samples: Samples | None = None
    series: Series | None = None

    @cached_property
    def stages(self) -> list[Stage]:
        """The evaluations that were made, the dense model's first."""
        if self.record is None:
            return []
        judgement, cut = self.record.judgement, self.cut
        found: list[tuple[str, Evaluation | None]] = [("dense", judgement.dense)]
        if cut and cut.heal:
            found.append(("dense, healed alike", cut.heal.dense))
        found.append(("zeroed", judgement.zeroed))
        if cut:
            repaired = cut.repair is not None and cut.repair.form not in ("", "none")
            before = "cut and repaired" if repaired else "cut"
            healed = "cut, repaired and healed" if repaired else "cut and healed"
            found += [(before, cut.unhealed), (healed if cut.heal else before, cut.shrunk)]
        return [Stage(name, evaluation) for name, evaluation in found if evaluation]

    @property
    def settings(self) -> Settings | None:
        made_with = self.selection.made_with
        return made_with.settings if made_with else None

    @property
    def model(self) -> str:
        return self.settings.model if self.settings else self.cut.model if self.cut else "a model"

    @property
    def figure(self) -> str:
        """The figure of FIGURES by which this model is judged."""
        dense = self.stages[0].evaluation if self.stages else None
        return next((name for name in FIGURES if dense and getattr(dense, name) is not None), "loss")

    def command(self, out: str) -> str:
        """The command that repeats the prune: the settings that are not at their defaults."""
        return " ".join(["secateur", "prune", *map(shlex.quote, self._words()), "-o", shlex.quote(out)])

    def _words(self) -> Iterator[str]:
        if self.settings is None:
            return
        yield self.settings.model
        given = dict(self._given(self.settings))
        for name, value in given.items():
            flag = f"--{name.replace('_', '-')}"
            yield from [flag, str(value)] if value is not True else [flag]
        if self.cut and self.cut.repair:
            tried = [form for form in REPAIRS if form in {**self.cut.repair.losses, **self.cut.repair.declined}]
            yield "--repair"
            yield from ["--repair-form", tried[0].replace(" ", "-")] if len(tried) == 1 else []
            yield from ["--repair-size", str(self.cut.repair.size)] if self.cut.repair.size else []
        if self.cut and self.cut.heal:
            yield from self._healing(self.cut.heal, self.settings.calibration, self.cut.task)
        if self.cut and not self.cut.measurement:
            yield "--no-measure"

    def _healing(self, heal: Told, calibration: str, task: str) -> Iterator[str]:
        """The options of a healing that differ from the defaults; its amount in steps, which are the same everywhere."""
        yield from ["--heal", f"{heal.steps}steps"]
        yield from ["--heal-data", heal.data] if heal.data not in ("", calibration) else []
        defaults = Healing().for_task(task).to_json()
        for name, (group, field) in keywords().items():
            value = heal.settings.get(field.name) if group is Healing and field.name != "amount" else None
            if value is not None and value != defaults[field.name]:
                flag = name.replace("_", "-")
                yield from ["--no-" + flag] if value is False else ["--" + flag, str(value)]

    def _given(self, settings: Settings) -> Iterator[tuple[str, Any]]:
        """The settings of the search and of the judging that differ from the defaults of the model's task."""
        task = self.cut.task if self.cut else None
        defaults = Settings("").for_task(task) if task else Settings("")
        unread = settings.unused()
        for name, (group, field) in keywords().items():
            if group is Settings and name not in unread:
                value = getattr(settings, field.name)
                same = value == getattr(defaults, field.name) or (field.name == "ratio" and settings.keep)
                if value is not None and not same and not (name == "screen" and not settings.row.screens):
                    yield name, self._forwards or value if name == "budget" else value
        if self.record:
            judged = self.record.judged_on
            if judged.data != settings.calibration:
                yield "data", judged.data
            for name, asked in (("evaluation_size", judged.size), ("evaluation_batches", judged.max_batches)):
                by_task = keywords()[name][1].metadata["by_task"]
                if not task or asked != by_task[0 if task != "image" else 1]:
                    yield name, asked

    @cached_property
    def _forwards(self) -> str | None:
        """What a budget of seconds came to, which the journal keeps."""
        try:
            lines = (self.folder / JOURNAL).read_bytes().split(b"\n", 3)[:3]
            facts = [fields for line in lines if isinstance(fields := jsonio.loads(line), dict)]
            return next((f"{fields['value']}forwards" for fields in facts if fields.get("fact") == "forwards"), None)
        except (OSError, ValueError, KeyError):
            return None


def is_run(folder: Path) -> bool:
    """Whether a folder holds the files of a prune."""
    return (folder / SELECTION).is_file()


def read_run(folder: Path) -> Run:
    """What the files in a folder say. Only selection.json must be there; a damaged file is an error."""
    if not is_run(folder):
        raise SelectionError(f"{folder} holds neither {SELECTION} nor results.jsonl: give the folder of a prune, or a store.")
    evaluated = _read(folder / EVALUATION)
    try:
        record = PruneRecord.from_json(evaluated) if evaluated is not None else None
    except ValueError as error:
        raise OutputError(
            f"{folder / EVALUATION} is not an evaluation of Secateur's, or is damaged: {first_line(error)}"
        ) from error
    selection = Selection.load(folder / SELECTION)
    return Run(folder, selection, record, _decoded(folder / CUT, Cut), _decoded(folder / SAMPLES, Samples), read_series(folder))


def _read(path: Path) -> Any:
    """The value that a file holds; None if there is no such file."""
    try:
        return jsonio.read(path) if path.exists() else None
    except OSError as error:
        raise OutputError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise OutputError(f"{path} does not hold valid JSON: {first_line(error)} Move it away, or make it again.") from error


def _decoded(path: Path, kind: type[T]) -> T | None:
    value = _read(path)
    return None if value is None else _converted(path, value, kind)


def _converted(path: Path, value: Any, kind: type[T]) -> T:
    try:
        return jsonio.decode(value, kind)
    except ValueError as error:
        raise OutputError(f"{path} is not a file of Secateur's, or is damaged: {first_line(error)}") from error


# Figures with their intervals


def level(evaluation: Evaluation, figure: str) -> tuple[float, Interval | None]:
    """A figure of a model and its 95% interval: over batches, or of a share of rows."""
    value = getattr(evaluation, figure)
    if figure in SHARES:
        return value, share_interval(value, evaluation.rows)
    interval = mean_interval(evaluation.batch_losses)
    if figure == "perplexity" and interval:
        return value, (_exp(interval[0]), _exp(interval[1]))
    return value, interval if figure == "loss" else None


def change(dense: Evaluation, other: Evaluation, figure: str) -> tuple[float, Interval | None]:
    """What changed, in percent for a perplexity and in points for a share; paired over batches where that can be."""
    if figure == "perplexity" or figure == "loss":
        paired = len(dense.batch_losses) == len(other.batch_losses)
        gaps = [b - a for a, b in zip(dense.batch_losses, other.batch_losses, strict=False)] if paired else []
        interval = mean_interval(gaps)
        if figure == "loss":
            return other.loss - dense.loss, interval
        ends = tuple(100 * (_exp(end) - 1) for end in interval) if interval else None
        gap = other.loss - dense.loss
        return 100 * (_exp(gap) - 1), (ends[0], ends[1]) if ends else None
    scale = 100 if figure in SHARES else 1
    return scale * (getattr(other, figure) - getattr(dense, figure)), None


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
