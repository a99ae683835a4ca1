"""Grids: a TOML file that describes tables, the runs that these tables need, and the loop that does the runs.

A run is one configuration and seed. A run that two tables share is done once. Runs that choose the same units (because only
the evaluation data differ, or because the method does not depend on the seed) choose them once.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from secateur.errors import SettingError, first_line, not_one_of
from secateur.experiment.store import EVERY, FAILED, Plan, PlannedCell, PlannedTable, Record, Store
from secateur.experiment.work import failed_record
from secateur.experiment.workers import KnownBase, KnownChoice, Task, TaskRun, perform_all
from secateur.files import jsonio
from secateur.methods import METHODS, method as method_row
from secateur.settings import (
    ADDRESS,
    DISTANCE,
    LABELS,
    NONE,
    Judging,
    Settings,
    check_holdout,
    check_type,
    keywords,
    ratio_and_goal,
)
from secateur.watcher import GridProgress
from secateur.workers.pools import Where

# The tables that a grid can make, by task: the paper's by number, and our ablations.
TABLES = {"text": ("4", "6", "7", "10", "ablation", "search"), "image": ("8", "9", "ablation", "search")}
DATA_NAMES = {"wikitext2": "WikiText-2", "lambada": "LAMBADA", "imagenette": "Imagenette", "imagenette2-320": "Imagenette"}
ANY_SEED = 1  # if a choice does not depend on the seed

CUT = ("documents", "holdout")  # how the data are cut, if that is given
GOALS = ("keep_params", "keep_flops", "keep_latency")
OF_THE_CELL = {"target", "ratio", "method", "seed", "layout", "device", "data", *GOALS}
SHARED = {"task": str, "seeds": list, "models": (list, dict), "settings": dict}
OF_A_TABLE = {"target": str, "ratios": list, "methods": list, "data": list, "vary": dict}


def grid_settings() -> list[str]:
    """The settings that a grid can give to its runs; the others belong to a cell of a table or to the machine."""
    return [name for name, (group, _) in keywords().items() if group in (Settings, Judging) and name not in OF_THE_CELL]


@dataclass(frozen=True)
class Run:
    """One configuration and seed, with the key of its record and the names of its model and data in tables."""

    model: str
    data: str
    task: str
    settings: Settings
    judging: Judging
    seed: int | None  # None: neither the choice nor the evaluation depends on it
    varied: str = ""  # the setting that an ablation varies and its value

    @cached_property
    def key(self) -> str:
        return jsonio.fingerprint([self.choice_key, self.judging.to_json(), self.seed])

    @cached_property
    def choice_key(self) -> str:
        """Runs with the same choice key choose the same units."""
        return jsonio.fingerprint({name: value for name, value in self.settings.to_json().items() if name != "device"})

    @cached_property
    def base_key(self) -> str:
        """Runs with the same base key are judged against the same dense model on the same batches."""
        settings = {name: getattr(self.settings, name) for name in ("model", "dtype", "seq_len", "batch_size")}
        settings |= {name: value for name in CUT if (value := getattr(self.settings, name)) is not None}
        seed = self.seed if self.task == "image" else None  # only images are drawn by seed
        return jsonio.fingerprint([settings, self.judging.to_json(), seed])

    def __str__(self) -> str:
        seed = "" if self.seed is None else f" seed {self.seed}"
        what = f"{self.settings.target} {self.settings.ratio:g} {self.settings.method}"
        return f"{self.model} {what}{self.varied}{seed} on {self.data}"


@dataclass(frozen=True)
class Cell:
    """A cell of a table, in which methods are compared: the runs by method and seed."""

    data: str
    model: str
    target: str
    ratio: float
    vary: dict[str, Any]
    runs: dict[str, dict[int | None, Run]]

    def plan(self) -> PlannedCell:
        keys = {
            method: {EVERY if seed is None else str(seed): run.key for seed, run in runs.items()}
            for method, runs in self.runs.items()
        }
        return PlannedCell(self.data, self.model, self.target, self.ratio, self.vary, keys)


@dataclass(frozen=True)
class Table:
    number: str
    task: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """The content of a grid file: tables of cells of runs."""

    name: str
    tables: tuple[Table, ...]

    @cached_property
    def runs(self) -> list[Run]:
        """Every run once, grouped by model and then by seed."""
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

    def plan(self) -> Plan:
        tables = (PlannedTable(t.number, t.task, tuple(cell.plan() for cell in t.cells)) for t in self.tables)
        return Plan(self.name, tuple(tables))


def read_grid(path: Path) -> Grid:
    """The grid that a TOML file describes.

    >>> read_grid(Path("runs/table9.toml")).runs
    """
    try:
        fields = tomllib.loads(jsonio.read_text(path))
    except OSError as error:
        raise SettingError(f"Cannot read the grid {path}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
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
    def value_of(name: str, default: Any = None) -> Any:
        value = section.get(name, shared.get(name, default))
        if value is None:
            raise SettingError(f"{where} has no {name}; give it in that table, or for all tables at the head of the file.")
        return value

    number, task = value_of("number"), value_of("task")
    if task not in TABLES:
        raise not_one_of(f"task of {where}", task, TABLES)
    if number not in TABLES[task]:
        raise not_one_of(f"number of {where}, whose task is {task!r},", number, TABLES[task])
    settings = _settings_of_methods(where, section, shared, _listed(where, "methods", value_of("methods"), str))
    common = {**shared.get("settings", {}), **section.get("settings", {})}
    data = value_of("data", [common.get("calibration", Settings.calibration)])
    seeds = _listed(where, "seeds", value_of("seeds"), int)
    cells = [
        _cell(task, label, model, value_of("target"), float(ratio), evaluation, seeds, varied, settings)
        for evaluation in _listed(where, "data", data, str)
        for label, model in _models(where, section.get("models"), shared.get("models"))
        for ratio in _listed(where, "ratios", value_of("ratios"), (int, float))
        for varied in _varied(where, value_of("vary", {}))
    ]
    return Table(number, task, tuple(cells))


def _settings_of_methods(
    where: str, section: dict[str, Any], shared: dict[str, Any], methods: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The settings of each method: the method's own override those for all methods, and the table's override the file's."""
    by_method: dict[str, dict[str, Any]] = {}
    for method in methods:
        if method not in METHODS:
            raise not_one_of(f"method of {where}", method, METHODS)
        by_method[method] = {}
        for part in ("settings", method):
            by_method[method] |= {**shared.get(part, {}), **section.get(part, {})}
    for name in ("settings", *METHODS):  # also the settings of methods that the table does not use
        _check_settings(where, {**shared.get(name, {}), **section.get(name, {})})
    return by_method


def _varied(where: str, vary: dict[str, Any]) -> list[dict[str, Any]]:
    """The setting that an ablation varies, one dict per value; one empty dict if the table varies nothing."""
    if len(vary) > 1 or any(not isinstance(values, list) or not values for values in vary.values()):
        raise SettingError(
            f"vary of {where} must name one setting with a list of its values, as in vary.temperature = [0.01, 0.1]."
        )
    varied = [{name: value} for name, values in vary.items() for value in values] or [{}]
    for setting in varied:
        _check_settings(where, setting)
    return varied


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
    for method, method_settings in settings.items():
        options = method_settings | vary
        judging = Judging(data, options.pop("evaluation_size", None), options.pop("evaluation_batches", None))
        judging.check()
        judging = judging.for_task(task)
        runs[method] = {}
        grouped = Settings(model, target, group_by=options.get("group_by", ADDRESS)).orders_channels  # by calibration data
        seeded = method_row(method).depends_on_seed(task) or (task == "image" and grouped)
        for seed in seeds:
            # Evaluation images are drawn by seed, texts are not: a choice that does not depend on the seed is judged once per
            # seed on images, and once in all on texts.
            choice_seed = seed if seeded else seeds[0] if task == "image" else ANY_SEED
            run_seed = None if not seeded and task == "text" else seed
            choice = Settings(model, target, ratio, method, choice_seed, layout=NONE, **options).for_task(task)
            choice.check()
            if choice.loss not in (None, LABELS, DISTANCE):
                raise SettingError(
                    f"The loss of a grid is {choice.loss!r}, but must be {LABELS} or {DISTANCE}: labels judge all runs."
                )
            check_holdout(choice, data)
            runs[method][run_seed] = Run(label, name, task, choice.without_unused(), judging, run_seed, varied)
    bases = {(task == "image" and run.seed, run.base_key) for of_method in runs.values() for run in of_method.values()}
    if len(bases) > len({seed for seed, _ in bases}):
        raise SettingError(
            "the methods of a table must be judged alike: give batch_size, seq_len, dtype, documents, holdout, evaluation_size "
            "and evaluation_batches for all of them, not for one."
        )
    return Cell(name, label, target, ratio, vary, runs)


def _models(where: str, own: Any, shared: Any) -> list[tuple[str, str]]:
    """Each model of a table: its label and the name to load it by."""
    names = {**shared} if isinstance(shared, dict) else {}
    models = own if own is not None else shared
    if models is None:
        raise SettingError(f"{where} has no models; give a list of names, or a table of labels and names.")
    if isinstance(models, dict):
        pairs = list(models.items())
    else:
        pairs = [(label, names.get(label, label)) for label in _listed(where, "models", models, str)]
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
            raise SettingError(f"{name} of {where} is {value!r}, which has the wrong type.")


def _check_settings(where: str, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if name in GOALS:
            raise ratio_and_goal()
        if name not in grid_settings():
            raise not_one_of(f"setting of {where}", name, sorted(grid_settings()))
        check_type(name, value, where)


# The loop


@dataclass(frozen=True)
class GridResult:
    """How a grid ended: the counts of runs, and the problems that kept the rest from starting."""

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
    """Do every run of the grid that has no record in the store, and append each record as its run ends.

    A run that raises an error becomes a failed record. A model or data set that cannot be loaded is a problem of this machine,
    not of its runs: these are left, the others go on, and the next call tries them again.
    """
    where = where or Where()
    with Store(folder, say) as store:
        store.keep_plan(grid.plan())
        existing = {run.key: store.records[run.key] for run in grid.runs if run.key in store.records}
        retried = {key for key, record in existing.items() if retry_failed and record.judgement is None}
        todo = [run for run in grid.runs if run.key not in existing or run.key in retried]
        ended = [record for key, record in existing.items() if key not in retried]
        state = _State(grid.name, store, ended, todo, where.workers, device, trust_remote_code)
        tasks = [list(runs) for _, runs in groupby(todo, key=lambda run: (run.choice_key, run.seed))]
        problems: dict[tuple[str, ...], str] = {}  # by what `_needs` returns
        said: set[str] = set()
        progress(state.progress(""))

        def prepare(runs: list[Run]) -> Task | None:
            if _needs(runs) in problems:
                state.task_ended(runs)  # it may have started before, with a worker that died
                return None
            state.task_started(runs)
            return state.task(runs)

        for runs, outcome in perform_all(tasks, prepare, where):
            state.task_ended(runs)
            for sentence in outcome.remarks:
                if sentence not in said:
                    say(sentence)
            said |= set(outcome.remarks)
            if outcome.problem:
                problems[_needs(runs)] = outcome.problem
                continue
            records = outcome.records
            if outcome.lost:
                task = state.task(runs)
                records = tuple(failed_record(task, run, outcome.lost) for run in task.runs)
            for run, record in zip(runs, records, strict=True):
                store.append(record)
                state.run_ended(run)
                progress(state.progress(f"{run}: {_result(record)}"))
        return GridResult(state.done, state.failed, state.left, tuple(dict.fromkeys(problems.values())))


@dataclass
class _State:
    """What the driver of a running grid keeps track of."""

    grid: str
    store: Store
    existing: list[Record]
    todo: list[Run]
    workers: int
    device: str
    trust_remote_code: bool

    def __post_init__(self) -> None:
        self.failed = sum(record.status == FAILED for record in self.existing)
        self.done = len(self.existing) - self.failed
        self._waiting = {run.key: run for run in self.todo}
        self._since: dict[str, float] = {}  # when each running task started, by its first run's key
        self._running = max(1, self.workers)  # tasks at once: the number of workers, or the most seen on a cluster

    @property
    def left(self) -> int:
        return len(self._waiting)

    def task(self, runs: Sequence[Run]) -> Task:
        """The task for a worker, with the choice of units and the dense model's evaluation if the store has them."""
        first = runs[0]
        records = [record for record in self.store.records.values() if record.judgement]
        choice = next((record for record in records if record.choice_key == first.choice_key), None)
        calibrated = (r for r in records if _calibration(r.settings, first.task) == _calibration(first.settings, first.task))
        return Task(
            grid=self.grid,
            task=first.task,
            settings=replace(first.settings, device=self.device),
            choice_key=first.choice_key,
            runs=tuple(
                TaskRun(run.key, run.base_key, run.model, run.data, run.seed, run.judging, _base(records, run.base_key))
                for run in runs
            ),
            choice=_known_choice(choice) if choice else None,
            model_digest=choice.model_digest if choice else None,
            calibration_digest=next((record.calibration_digest for record in calibrated), None),
            trust_remote_code=self.trust_remote_code,
        )

    def task_started(self, runs: Sequence[Run]) -> None:
        self._since[runs[0].key] = time.monotonic()
        self._running = max(self._running, len(self._since))

    def task_ended(self, runs: Sequence[Run]) -> None:
        self._since.pop(runs[0].key, None)

    def run_ended(self, run: Run) -> None:
        failed = self.store.records[run.key].status == FAILED
        self._waiting.pop(run.key, None)
        self.failed += failed
        self.done += not failed

    def progress(self, latest: str) -> GridProgress:
        return GridProgress(self.done, self.failed, self.left, self._seconds_left(), latest)

    def _seconds_left(self) -> float | None:
        """Remaining time: mean duration of similar runs, minus elapsed, divided by the number running."""
        records = [record for record in self.store.records.values() if record.judgement]
        if not records:
            return None
        durations: dict[tuple[str, ...], list[float]] = {}
        for record in records:
            for name in ("selection_seconds", "evaluation_seconds"):
                for kind in _kinds(record.settings.method, record.settings.target, record.model):
                    durations.setdefault((name, *kind), []).append(getattr(record, name))

        def mean_duration(run: Run, name: str) -> float:
            kinds = _kinds(run.settings.method, run.settings.target, run.model)
            similar = next(durations[name, *kind] for kind in reversed(kinds) if (name, *kind) in durations)
            return sum(similar) / len(similar)

        to_choose = {run.choice_key: run for run in self._waiting.values()}
        for record in records:
            to_choose.pop(record.choice_key, None)
        work = sum(mean_duration(run, "evaluation_seconds") for run in self._waiting.values())
        work += sum(mean_duration(run, "selection_seconds") for run in to_choose.values())
        elapsed = sum(time.monotonic() - since for since in self._since.values())
        return max(0.0, work - elapsed) / self._running


def _kinds(*names: str) -> list[tuple[str, ...]]:
    """The groups of similar runs that a run belongs to, from all runs to the runs with all of these names in common."""
    return [names[:n] for n in range(len(names) + 1)]


def _needs(runs: Sequence[Run]) -> tuple[str, ...]:
    """The model and the data that a task loads, and the settings that it loads them with."""
    settings = runs[0].settings
    form = (settings.dtype, *(str(getattr(settings, name)) for name in ("seq_len", "batch_size", *CUT)))
    return settings.model, *form, settings.calibration, *sorted({run.judging.data or "" for run in runs})


def _calibration(settings: Settings, task: str) -> list[Any]:
    """Values that are equal for settings with the same calibration data."""
    names = ["model", "calibration", "calibration_size", "seq_len", *CUT, *(["seed"] if task == "image" else [])]
    return [getattr(settings, name) for name in names]


def _base(records: Sequence[Record], base_key: str) -> KnownBase | None:
    record = next((record for record in records if record.base_key == base_key), None)
    if record is None or record.judgement is None:
        return None
    return KnownBase(record.judgement.dense, record.model_digest, record.data_digest)


def _known_choice(record: Record) -> KnownChoice:
    judgement = record.judgement
    assert judgement  # `_State.task` passes no other records
    return KnownChoice(
        judgement.units,
        judgement.pulls,
        judgement.forwards,
        judgement.nonfinite_pulls,
        record.score_passes,
        record.selection_seconds,
        record.passes,
        record.pass_flops,
        record.progress,
    )


def _result(record: Record) -> str:
    if record.status == FAILED or record.judgement is None:
        return f"failed, {record.reason}"
    forms = {"ppl_change_percent": "perplexity {:+.2f}%", "delta_top1": "top-1 {:+.4f}"}
    changes = record.judgement.changes
    return ", ".join(form.format(changes[name]) for name, form in forms.items() if name in changes)
