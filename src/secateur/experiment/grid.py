"""Grids: a TOML file that reads like the tables it makes, the runs it stands for, and the loop that does them.

A run is one configuration and seed. Runs that two tables share are done once; runs that choose the same units (judged on other
data, or a static method's for another seed) choose them once.
"""

from __future__ import annotations

import dataclasses
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from secateur import jsonio
from secateur.errors import SettingError, first_line, not_one_of
from secateur.experiment.results import BANDITS, EVERY
from secateur.experiment.store import Record, Store
from secateur.experiment.work import Task, failed_record
from secateur.experiment.workers import Where, perform_all
from secateur.prune import AUTO, METHODS, NONE, Judging, Settings
from secateur.scores import STATIC_METHODS
from secateur.watcher import GridProgress

# The shapes a table can have, by its task: the paper's, and ours.
TABLES = {"text": ("4", "6", "7", "10", "ablation"), "image": ("8", "9", "ablation")}
DATA_NAMES = {"wikitext2": "WikiText-2", "lambada": "LAMBADA", "imagenette": "Imagenette", "imagenette2-320": "Imagenette"}
SEEDED = ("random", "greedy", "ucb", "ts")  # methods whose choice depends on the seed; the others are run once
ANY_SEED = 1  # where a choice depends on none

OF_THE_CELL = {"model", "target", "ratio", "method", "seed", "layout", "device"}
SETTINGS = {
    f.name: f.default for f in dataclasses.fields(Settings) if f.name not in OF_THE_CELL and not f.name.startswith("target_")
} | {"evaluation_size": AUTO, "evaluation_batches": AUTO}
SHARED = {"task": str, "seeds": list, "models": (list, dict), "settings": dict}
OF_A_TABLE = {"target": str, "ratios": list, "methods": list, "data": list, "vary": dict}


@dataclass(frozen=True)
class Run:
    """One configuration and seed: the key its record is found by, and what a table calls its model and data."""

    model: str
    data: str
    task: str
    settings: Settings
    judging: Judging
    seed: int | None  # None: neither the choice nor the judgement depends on one
    varied: str = ""  # what an ablation says of it

    @cached_property
    def key(self) -> str:
        return jsonio.fingerprint([self.choice_key, dataclasses.asdict(self.judging), self.seed])

    @cached_property
    def choice_key(self) -> str:
        """Runs that agree in this choose the same units."""
        return jsonio.fingerprint(plain_settings(self.settings))

    @cached_property
    def base_key(self) -> str:
        """Runs that agree in this are judged against the same dense model on the same batches."""
        of_base = {name: getattr(self.settings, name) for name in ("model", "dtype", "seq_len", "batch_size")}
        drawn = self.seed if self.task == "image" else None
        return jsonio.fingerprint([of_base, dataclasses.asdict(self.judging), drawn])

    def __str__(self) -> str:
        seed = "" if self.seed is None else f" seed {self.seed}"
        what = f"{self.settings.target} {self.settings.ratio:g} {self.settings.method}"
        return f"{self.model} {what}{self.varied}{seed} on {self.data}"


@dataclass(frozen=True)
class Cell:
    """What methods are compared in: a place of a table, with every method's runs by their seeds."""

    data: str
    model: str
    target: str
    ratio: float
    vary: dict[str, Any]
    runs: dict[str, dict[int | None, Run]]

    def to_json(self) -> dict[str, Any]:
        keys = {
            method: {EVERY if seed is None else str(seed): run.key for seed, run in runs.items()}
            for method, runs in self.runs.items()
        }
        names = ("data", "model", "target", "ratio", "vary")
        return {name: getattr(self, name) for name in names} | {"runs": keys}


@dataclass(frozen=True)
class Table:
    number: str
    task: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """What a grid file says: tables of cells of runs."""

    name: str
    tables: tuple[Table, ...]

    @cached_property
    def runs(self) -> list[Run]:
        """Every run once, those together that share a model, then those that share a seed."""
        runs = {
            run.key: run
            for table in self.tables
            for cell in table.cells
            for of_method in cell.runs.values()
            for run in of_method.values()
        }
        models = list(dict.fromkeys(run.settings.model for run in runs.values()))
        seeds = list(dict.fromkeys(run.seed for run in runs.values()))
        return sorted(runs.values(), key=lambda r: (models.index(r.settings.model), seeds.index(r.seed), r.choice_key))

    def to_json(self) -> dict[str, Any]:
        tables = [{"number": t.number, "task": t.task, "cells": [cell.to_json() for cell in t.cells]} for t in self.tables]
        return {"grid": self.name, "tables": tables}


def plain_settings(settings: Settings) -> dict[str, Any]:
    """What a record says of the settings: the device is the machine's affair."""
    return {name: value for name, value in dataclasses.asdict(settings).items() if name != "device"}


def read_grid(path: Path) -> Grid:
    """The grid that a TOML file describes.

    >>> read_grid(Path("runs/table9.toml")).runs
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"Cannot read the grid {path}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"The grid {path} is not valid TOML: {first_line(error)}") from error
    try:
        return _grid(path.stem, fields)
    except SettingError as error:
        raise SettingError(f"In the grid {path}: {error}") from error


def _grid(name: str, fields: dict[str, Any]) -> Grid:
    sections = fields.pop("table", None)
    if not isinstance(sections, list) or not sections or not all(isinstance(section, dict) for section in sections):
        raise SettingError("there is no [[table]]; give at least one, with its number, target, ratios and methods.")
    methods = dict.fromkeys(METHODS, dict)
    _check_keys("the file", fields, SHARED | OF_A_TABLE | methods)
    tables = []
    for i, section in enumerate(sections, 1):
        where = f"table {section.get('number', i)}"
        _check_keys(where, section, {"number": str} | SHARED | OF_A_TABLE | methods)
        tables.append(_table(where, section, fields))
    return Grid(name, tuple(tables))


def _table(where: str, section: dict[str, Any], shared: dict[str, Any]) -> Table:
    def of(name: str, default: Any = None) -> Any:
        value = section.get(name, shared.get(name, default))
        if value is None:
            raise SettingError(f"{where} has no {name}; give it there, or for all tables at the head of the file.")
        return value

    number, task = of("number"), of("task")
    if task not in TABLES:
        raise not_one_of(f"task of {where}", task, TABLES)
    if number not in TABLES[task]:
        raise not_one_of(f"number of {where}, whose task is {task!r},", number, TABLES[task])
    settings = {**shared.get("settings", {}), **section.get("settings", {})}
    per_method = {method: {**shared.get(method, {}), **section.get(method, {})} for method in METHODS}
    for of_method in (settings, *per_method.values()):
        _check_settings(where, of_method)
    data = of("data", [settings.get("calibration", Settings.calibration)])
    vary = of("vary", {})
    if len(vary) > 1 or any(not isinstance(values, list) or not values for values in vary.values()):
        raise SettingError(
            f"vary of {where} must name one setting with a list of its values, as in vary.temperature = [0.01, 0.1]."
        )
    varied = [{name: value} for name, values in vary.items() for value in values] or [{}]
    for setting in varied:
        _check_settings(where, setting)
    seeds = _listed(where, "seeds", of("seeds"), int)
    methods = _listed(where, "methods", of("methods"), str)
    for method in methods:
        if method not in METHODS:
            raise not_one_of(f"method of {where}", method, METHODS)
    of_methods = {method: settings | per_method[method] for method in methods}
    cells = [
        _cell(task, label, model, of("target"), float(ratio), judge, seeds, setting, of_methods)
        for judge in _listed(where, "data", data, str)
        for label, model in _models(where, section.get("models"), shared.get("models"))
        for ratio in _listed(where, "ratios", of("ratios"), (int, float))
        for setting in varied
    ]
    return Table(number, task, tuple(cells))


def _cell(
    task: str,
    label: str,
    model: str,
    target: str,
    ratio: float,
    data: str,
    seeds: Sequence[int],
    vary: dict[str, Any],
    settings: dict[str, dict[str, Any]],
) -> Cell:
    name = DATA_NAMES.get(Path(data).name.lower(), Path(data).name)
    varied = "".join(f" {setting} {value}" for setting, value in vary.items())
    runs: dict[str, dict[int | None, Run]] = {}
    for method, given in settings.items():
        wanted = given | vary
        judging = Judging(data, wanted.pop("evaluation_size", AUTO), wanted.pop("evaluation_batches", AUTO))
        judging.check()
        judging = judging.for_task(task, data)
        runs[method] = {}
        for seed in seeds:
            # Images are drawn by seed and texts are not: a static choice is judged anew for every seed, or once and for all.
            chooser = seed if method in SEEDED else seeds[0] if task == "image" else ANY_SEED
            shown = None if method not in SEEDED and task == "text" else seed
            chosen = Settings(model, target, ratio, method, chooser, layout=NONE, **wanted).for_task(task)
            chosen.check()
            runs[method][shown] = Run(label, name, task, _without_what_is_not_used(chosen), judging, shown, varied)
    bases = {(task == "image" and run.seed, run.base_key) for of_method in runs.values() for run in of_method.values()}
    if len(bases) > len({seed for seed, _ in bases}):
        raise SettingError(
            "the methods of a table must be judged alike: give batch_size, seq_len, dtype, evaluation_size and "
            "evaluation_batches for all of them, not for one."
        )
    return Cell(name, label, target, ratio, vary, runs)


def _without_what_is_not_used(settings: Settings) -> Settings:
    """Settings that a method does not look at are put back to their defaults: they make no second run."""
    static = settings.method in STATIC_METHODS
    screening = not static and settings.screen > 0 and settings.screen_by != NONE
    unused = []
    if static:
        unused += ["pulls_per_step", "batches_per_pull", "batches_per_step", "stack", "temperature"]
    if settings.method != "ucb":
        unused += ["ucb_c"]
    if settings.method not in BANDITS:
        unused += ["pool_size"]
    if not screening:
        unused += ["screen_by"]
    if not settings.scores_batches:
        unused += ["score_batches"]
    defaults: dict[str, Any] = {name: SETTINGS[name] for name in unused}
    return dataclasses.replace(settings, **defaults, screen=settings.screen if screening else 0)


def _models(where: str, own: Any, shared: Any) -> list[tuple[str, str]]:
    """What a table calls each model, and the name to load it by."""
    named = {**shared} if isinstance(shared, dict) else {}
    asked = own if own is not None else shared
    if asked is None:
        raise SettingError(f"{where} has no models; give a list of names, or a table of labels and names.")
    if isinstance(asked, dict):
        pairs = list(asked.items())
    else:
        pairs = [(name, named.get(name, name)) for name in _listed(where, "models", asked, str)]
    if not pairs or not all(isinstance(name, str) and name for _, name in pairs):
        raise SettingError(f"models of {where} must be a list of names, or a table of labels and names.")
    return pairs


def _listed(where: str, name: str, value: Any, kind: type | tuple[type, ...]) -> list[Any]:
    fits = isinstance(value, list) and value and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
    if not fits or len({str(v) for v in value}) < len(value):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise SettingError(
            f"{name} of {where} is {value!r}, but must be a list of {' or '.join(k.__name__ for k in kinds)} without repeats."
        )
    return list(value)


def _check_keys(where: str, fields: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name not in known:
            raise not_one_of(f"key in {where}", name, sorted(known))
        if not isinstance(value, known[name]):
            raise SettingError(f"{name} of {where} is {value!r}, which is not of the kind that is needed there.")


def _check_settings(where: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in SETTINGS:
            raise not_one_of(f"setting of {where}", name, sorted(SETTINGS))
        kind = type(SETTINGS[name])
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise SettingError(f"{name} of {where} is {value!r}, but must be of the kind {kind.__name__}.")


# The loop


@dataclass(frozen=True)
class GridResult:
    """How a grid ended: what was done, and what kept the rest from being begun."""

    done: int
    failed: int
    left: int
    problems: tuple[str, ...] = ()


def run_grid(
    grid: Grid,
    folder: Path,
    *,
    where: Where | None = None,
    retry_failed: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Callable[[GridProgress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> GridResult:
    """Do every run of the grid that has no record in the store, and write each down as it ends.

    A run that raises becomes a failed record. A model or data set that cannot be had is a problem of this machine and not of
    its runs: they are left, the others go on, and the same call tries them again.
    """
    with Store(folder, say) as store:
        store.keep_plan(grid.to_json())
        kept = {run.key: store.records[run.key] for run in grid.runs if run.key in store.records}
        again = {key for key, record in kept.items() if retry_failed and "dense" not in record}
        todo = [run for run in grid.runs if run.key not in kept or run.key in again]
        where = where or Where()
        state = _State(store, [r for key, r in kept.items() if key not in again], todo, where.workers)
        tasks = [list(runs) for _, runs in groupby(todo, key=lambda run: (run.choice_key, run.seed))]
        options = {"grid": grid.name, "device": device, "trust_remote_code": trust_remote_code}
        problems: dict[tuple[str, ...], str] = {}  # by what could not be had
        progress(state.progress(""))

        def prepare(runs: list[Run]) -> Task | None:
            if _needs(runs) in problems:
                state.back(runs)  # where its worker was lost
                return None
            state.begun(runs)
            return state.task(runs) | options

        for runs, outcome in perform_all(tasks, prepare, where):
            state.back(runs)
            if problem := outcome.get("problem"):
                problems[_needs(runs)] = problem
                continue
            records = outcome.get("records")
            if records is None:
                task = state.task(runs) | options
                records = [failed_record(task, i, outcome["lost"]) for i in range(len(runs))]
            for run, record in zip(runs, records, strict=True):
                store.append(record)
                state.ended(run)
                progress(state.progress(f"{run}: {_told(store.records[run.key])}"))
        return GridResult(state.done, state.failed, state.left, tuple(dict.fromkeys(problems.values())))


@dataclass
class _State:
    """What the driver knows while a grid runs."""

    store: Store
    before: list[Record]
    todo: list[Run]
    workers: int = 0

    def __post_init__(self) -> None:
        self.failed = sum(record["status"] == "failed" for record in self.before)
        self.done = len(self.before) - self.failed
        self._waiting = {run.key: run for run in self.todo}
        self._since: dict[str, float] = {}  # when the tasks that are being done were begun
        self._at_once = max(1, self.workers)  # tasks under way: as asked for, or as seen on a cluster

    @property
    def left(self) -> int:
        return len(self._waiting)

    def task(self, runs: Sequence[Run]) -> Task:
        """What a worker is told, with whatever the store already knows of the choice and of the dense model."""
        first, settings = runs[0], plain_settings(runs[0].settings)
        records = [record for record in self.store.records.values() if "dense" in record]
        choice = next((r for r in records if r["choice_key"] == first.choice_key), None)
        calibrated = (r for r in records if _calibration(r["settings"], first.task) == _calibration(settings, first.task))
        known = ("units", "pulls", "forwards", "nonfinite_pulls", "score_passes", "selection_seconds", "model_digest")
        return {
            "task": first.task,
            "settings": settings,
            "calibration_digest": next((r["calibration_digest"] for r in calibrated), None),
            "choice_key": first.choice_key,
            "choice": {name: choice[name] for name in known} if choice else None,
            "runs": [
                {
                    "key": run.key,
                    "base_key": run.base_key,
                    "model": run.model,
                    "data": run.data,
                    "seed": run.seed,
                    "judging": dataclasses.asdict(run.judging),
                    "base": next((_base(r) for r in records if r["base_key"] == run.base_key), None),
                }
                for run in runs
            ],
        }

    def begun(self, runs: Sequence[Run]) -> None:
        self._since[runs[0].key] = time.monotonic()
        self._at_once = max(self._at_once, len(self._since))

    def back(self, runs: Sequence[Run]) -> None:
        self._since.pop(runs[0].key, None)

    def ended(self, run: Run) -> None:
        record = self.store.records[run.key]
        self._waiting.pop(run.key, None)
        self.failed += record["status"] == "failed"
        self.done += record["status"] != "failed"

    def progress(self, latest: str) -> GridProgress:
        return GridProgress(self.done, self.failed, self.left, self._seconds_left(), latest)

    def _seconds_left(self) -> float | None:
        """By what runs of the same kind took, less what the tasks under way have had, over as many as go on at once."""
        records = [record for record in self.store.records.values() if "total_seconds" in record]
        if not records:
            return None
        spent: dict[tuple[str, ...], list[float]] = {}
        for record in records:
            for name in ("selection_seconds", "evaluation_seconds"):
                for kind in _kinds(record["settings"]["method"], record["settings"]["target"], record["model"]):
                    spent.setdefault((name, *kind), []).append(record[name])

        def usual(run: Run, name: str) -> float:
            kinds = _kinds(run.settings.method, run.settings.target, run.model)
            known = next(spent[name, *kind] for kind in reversed(kinds) if (name, *kind) in spent)
            return sum(known) / len(known)

        choosers = {run.choice_key: run for run in self._waiting.values()}
        for record in records:
            choosers.pop(record["choice_key"], None)
        work = sum(usual(run, "evaluation_seconds") for run in self._waiting.values())
        work += sum(usual(run, "selection_seconds") for run in choosers.values())
        under_way = sum(time.monotonic() - since for since in self._since.values())
        return max(0.0, work - under_way) / self._at_once


def _kinds(*names: str) -> list[tuple[str, ...]]:
    """What runs may have in common, from nothing to all of these."""
    return [names[:n] for n in range(len(names) + 1)]


def _needs(runs: Sequence[Run]) -> tuple[str, ...]:
    """The model and the data that a task cannot be begun without, and the form it wants them in."""
    settings = runs[0].settings
    form = (settings.dtype, str(settings.seq_len), str(settings.batch_size))
    return settings.model, *form, settings.calibration, *sorted({run.judging.data for run in runs})


def _calibration(settings: Mapping[str, Any], task: str) -> list[Any]:
    """Settings that agree in this choose by the same data."""
    names = ["model", "calibration", "calibration_size", "seq_len", *(["seed"] if task == "image" else [])]
    return [settings[name] for name in names]


def _base(record: Record) -> dict[str, Any]:
    return {name: record[name] for name in ("dense", "model_digest", "data_digest")}


def _told(record: Record) -> str:
    if record["status"] == "failed":
        return f"failed, {record['reason']}"
    shown = {"ppl_change_percent": "perplexity {:+.2f}%", "delta_top1": "top-1 {:+.4f}"}
    return ", ".join(form.format(float(record[name])) for name, form in shown.items() if name in record)
