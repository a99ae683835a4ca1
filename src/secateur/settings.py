"""Settings: what a user can decide, each with its default, its help line and its check. Knows no model and no tensor.

The command line's options, the grid's keys, Python's keywords and the table in docs/settings.md come from the fields below.
`None` means that the value is left to the model's task, to the machine, or unset, as the help line says.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from secateur.errors import SettingError, not_one_of
from secateur.fields import MOST, Checked as _Checked, check_field, setting as _setting
from secateur.healing import HEALING, Healing
from secateur.methods import GRADIENTS, METHODS, Method, method, scoring
from secateur.search.policies import FORWARDS, GRADIENT_PASSES, PULLS, UCB, check_search
from secateur.series import shares_of
from secateur.streams import POOLS, stream
from secateur.tasks import TASKS, TEXT
from secateur.units import GROUP_WIDTH, HEAD, MLP, TARGETS, check_ratio, kinds_of, nested
from secateur.workers.pools import MOST as MANY, Where

CHOOSING, SEARCH, DATA, CUTTING, MACHINE = "What to remove", "How to search", "Data", "Cutting", "Machine and output"
SECTIONS = (CHOOSING, SEARCH, DATA, CUTTING, HEALING, MACHINE)
BUILTIN = "builtin"  # the text that every Python carries
MAP = "map"  # a device: the blocks of a model lie on several GPUs
KNOWN_DATA = (BUILTIN, "wikitext2", "lambada")
FREE, UNIFORM, NONE = "free", "uniform", "none"  # layouts; "none" cuts nothing, and as a screen keeps everything
PARAMS, FLOPS, LATENCY = "parameters", "FLOPs", "latency"
LEAST_SQUARES, LAYERED, BIAS, AUTO = "least squares", "layered", "bias", "auto"
LAYOUTS = (FREE, UNIFORM)
ADDRESS, FISHER, ACTIVATION = "address", "fisher", "activation"
GROUPINGS = (ADDRESS, FISHER, ACTIVATION)
ZEROED, REPAIRED = "zeroed", "repaired"
DAMAGES = (ZEROED, REPAIRED)
LABELS, DISTANCE = "labels", "distance"  # losses; any other is a function of the user's own
JOINED, LINES, JSONL = "joined", "lines", "jsonl"
DOCUMENTS = (JOINED, LINES, JSONL)
REPAIRS = (LEAST_SQUARES, LAYERED, BIAS, AUTO)
DTYPES = ("float32", "bfloat16", "float16")
DATA_NAMES = "builtin, wikitext2, lambada, a text, jsonl or parquet file, a folder, a hub data set"
DEFAULT_BUDGET = "300forwards"
SECONDS = "s"
OF_A_STEP = ("pulls_per_step", "batches_per_pull", "batches_per_step", "temperature")  # a method with a budget reads none
OLD_NAMES = {"target_params": "keep_params", "target_flops": "keep_flops", "target_latency": "keep_latency"}


def _screens() -> list[str]:
    return [*scoring(), NONE]


def _scored_on_batches() -> list[str]:
    return [name for name, row in METHODS.items() if not row.policy and row.needs_batches]


def needs_ratio(method: str) -> SettingError:
    """The error for a method that chooses a set of a given size where a goal is set."""
    return SettingError(
        f"The method {method} chooses a number of units wherever they are, so it needs a --ratio, without a goal (--keep-...), "
        "a uniform layout or experts: choose another --method."
    )


@dataclass(frozen=True)
class Settings(_Checked):
    """What decides which units are chosen. The defaults are the paper's (section 4) where it names one.
    >>> Settings("gpt2", target="mlp", ratio=0.05)
    """

    model: str
    target: str = _setting(
        HEAD, CHOOSING, lambda: f"Which kinds of units may go: {', '.join(TARGETS)}, or other kinds joined by +."
    )
    ratio: float = _setting(0.10, CHOOSING, "Share of the units to remove: 0.10 is a tenth.", unless_goal=True)
    method: str = _setting("auto", CHOOSING, lambda: f"How units are chosen: {', '.join(METHODS)}.", choices=lambda: METHODS)
    seed: int = _setting(42, SEARCH, "Same seed and settings, same selection.")
    budget: str | None = _setting(
        None,
        SEARCH,
        "What auto may spend in all: 2000forwards (model passes of one batch), 256pulls (measurements), or 300s, which a "
        "measured pass turns into forwards. [default: 300forwards]",
        added=True,
    )
    pulls_per_step: int = _setting(  # T_step; G for greedy
        32, SEARCH, "Paired measurements for each unit removed, but by auto.", least=1, most=10**6
    )
    batches_per_pull: int = _setting(2, SEARCH, "Calibration batches in a measurement; auto takes 1.", least=1)  # b_pull
    batches_per_step: int | None = _setting(
        None,
        SEARCH,
        "Batches that the measurements for one unit share: fewer model passes. [default: 0, draw from all]",
        least=0,
        unset=0,
    )
    stack: int = _setting(
        1, MACHINE, "Masked runs per forward pass; may pay on a GPU, see secateur bench --stack.", least=1, most=2**16
    )  # may change the last digits of a loss, so it is recorded
    temperature: float = _setting(
        0.02, SEARCH, "Scale of the damage: one of this size earns reward 0.27, none earns 0.5."
    )  # tau
    ucb_c: float = _setting(1.5, SEARCH, "How much UCB explores.")
    pool_size: int | None = _setting(
        None,
        SEARCH,
        "Candidates tried for each unit removed, by ucb and ts. [default: 0, twice the root of those left]",
        least=0,
        unset=0,
    )
    screen: int | None = _setting(
        None,
        SEARCH,
        "Consider only this many candidates of lowest score; 0 considers all. [default: 48 for text, 0 for images]",
        least=0,
        by_task=(48, 0),
    )
    screen_by: str = _setting(
        "magnitude",
        SEARCH,
        lambda: f"Score that --screen keeps the lowest of: {', '.join(_screens())}.",
        choices=_screens,
        words="screening rule",
    )
    group_width: int = _setting(GROUP_WIDTH, CHOOSING, "MLP channels in a group.", least=1)  # g0
    group_by: str = _setting(
        ADDRESS,
        CHOOSING,
        "Which MLP channels make a group. address: neighbours, as in the paper; or those that matter alike, by a score: fisher "
        "(the Fisher information of a mask) or activation (what the channels carry, times their weights). "
        "[default: activation by auto, address by other methods and of experts]",
        choices=lambda: GROUPINGS,
        words="grouping",
        added=True,
        decided=True,
    )
    damage: str = _setting(
        ZEROED,
        SEARCH,
        "What a measurement asks. zeroed: what the loss is without a unit; repaired: what it is when the channels that stay "
        "make up for the unit, as a repair lets them. [default: repaired by auto with --repair for texts, else zeroed]",
        choices=lambda: DAMAGES,
        added=True,
        decided=True,
    )
    score_batches: int = _setting(
        16,
        SEARCH,
        lambda: f"Calibration batches for {', '.join(_scored_on_batches())}.",
        least=1,
    )
    calibration: str = _setting(BUILTIN, DATA, f"Data that choose: {DATA_NAMES}.")
    calibration_size: int | None = _setting(
        None, DATA, "Texts or images to calibrate on, at most. [default: 512 texts, 1024 images]", least=1, by_task=(512, 1024)
    )
    seq_len: int = _setting(128, DATA, "Tokens in a text.", least=2)
    batch_size: int | None = _setting(
        None, DATA, "Texts or images in a batch. [default: 4 texts, 8 images]", least=1, most=2**20, by_task=(4, 8)
    )
    loss: str | None = _setting(
        None,
        DATA,
        "What is measured: labels (what the data say is right), distance (from the dense model's own outputs, without labels), "
        "or a function of your own, module:function or file.py:function. "
        "[default: labels if there are any]",
        added=True,
    )
    documents: str | None = _setting(
        None,
        DATA,
        "How texts are cut. joined: into windows of one long text; lines: each line or record is a document of its own; jsonl: "
        "the same, of JSON lines. [default: found out from the data]",
        choices=lambda: DOCUMENTS,
        words="form of the documents",
        added=True,
    )
    holdout: float | None = _setting(
        None,
        DATA,
        "Share kept for judging of data without splits, one file or a flat folder. [default: none, they are refused]",
        added=True,
    )
    layout: str = _setting(
        FREE,
        CHOOSING,
        "free: each layer loses what it can do without; uniform: each layer loses the same, and any loader reads the result; "
        "none: nothing is cut.",
        choices=lambda: (*LAYOUTS, NONE),
    )
    keep_params: float | None = _setting(
        None,
        CHOOSING,
        "Instead of a ratio: the share of the parameters to keep; several, as 0.9,0.8,0.7, give a smaller model each.",
        share=True,
        several=True,
        unset=0,
        recorded="target_params",
        words="goal for parameters",
    )
    keep_flops: float | None = _setting(
        None,
        CHOOSING,
        "Instead of a ratio: the share of the FLOPs to keep; several, as 0.9,0.8,0.7, give a smaller model each.",
        share=True,
        several=True,
        unset=0,
        recorded="target_flops",
        words="goal for FLOPs",
    )
    keep_latency: float | None = _setting(
        None,
        CHOOSING,
        "Instead of a ratio: the share of the time to keep, by a table measured on this machine; several, as 0.9,0.8,0.7, "
        "give a smaller model each.",
        share=True,
        several=True,
        unset=0,
        recorded="target_latency",
        words="goal for latency",
    )
    device: str = _setting(
        AUTO, MACHINE, "cpu, cuda, mps, auto for the best there is, or map: the model over all GPUs, to choose and to judge."
    )
    dtype: str = _setting("float32", MACHINE, f"Precision of the weights: {', '.join(DTYPES)}.", choices=lambda: DTYPES)

    @property
    def row(self) -> Method:
        """The method's row in METHODS."""
        return method(self.method)

    @property
    def screening(self) -> bool:
        """Whether a score narrows the candidates before they are measured."""
        return self.row.policy is not None and self.row.screens and bool(self.screen) and self.screen_by != NONE

    @property
    def scored_by(self) -> str:
        """The method whose score or set is computed: the method itself, or the screen's; "" where there is none."""
        return self.method if not self.row.policy else self.screen_by if self.screening else ""

    @property
    def scores_batches(self) -> bool:
        """Whether that score or set is taken on calibration batches."""
        return bool(self.scored_by) and METHODS[self.scored_by].needs_batches

    @property
    def planned(self) -> bool:
        """Whether the method divides a budget of its own among its steps."""
        return "budget" in self.row.settings

    @property
    def amount(self) -> tuple[float, str]:
        """The budget as a number and what it counts."""
        match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({SECONDS}|{FORWARDS}|{PULLS})\s*", self.budget or DEFAULT_BUDGET)
        if not match or not 0 < float(match[1]) <= MOST:
            raise SettingError(
                f"The budget is {self.budget!r}, but must be seconds, forwards or pulls: 300s, 2000forwards or 256pulls."
            )
        return float(match[1]), match[2]

    @property
    def orders_channels(self) -> bool:
        """Whether a score orders the MLP channels before they are grouped."""
        return self.group_by != ADDRESS and MLP in kinds_of(self.target)

    @property
    def fills(self) -> bool:
        """Whether units are measured with their channels predicted from those that stay."""
        return self.damage == REPAIRED and self.row.policy is not None

    def score_passes(self, n_calibration: int) -> int:
        """The model passes of that score or set, of this many calibration batches in all."""
        return METHODS[self.scored_by].passes(min(self.score_batches, n_calibration)) if self.scores_batches else 0

    def score_cost(self, n_calibration: int) -> int:
        """The same as the cost of forward passes: one with gradients costs more."""
        passes = self.score_passes(n_calibration)
        cost = passes * (GRADIENT_PASSES if passes and METHODS[self.scored_by].needs == GRADIENTS else 1)
        ordering = min(self.score_batches, n_calibration) * (GRADIENT_PASSES if self.group_by == FISHER else 1)
        return cost + (ordering if self.orders_channels else 0) + (n_calibration if self.fills else 0)

    @property
    def keep(self) -> tuple[str, float] | None:
        """The goal: a cost, and the share of it to keep; None where the ratio decides."""
        return next(iter(self._goals().items()), None)

    def _goals(self) -> dict[str, float]:
        asked = {PARAMS: self.keep_params, FLOPS: self.keep_flops, LATENCY: self.keep_latency}
        return {what: share for what, share in asked.items() if share is not None}

    def check(self) -> None:
        super().check()
        kinds_of(self.target)
        check_ratio(self.ratio)
        check_search(pulls_per_step=self.pulls_per_step, temperature=self.temperature)
        UCB(self.ucb_c)
        if self.budget is not None:
            if not self.planned:
                raise SettingError(f"The budget is for --method auto; of {self.method} it is --pulls-per-step.")
            _ = self.amount
        stream(self.seed, POOLS)
        if self.loss and self.loss not in (LABELS, DISTANCE) and not re.fullmatch(r".+:[A-Za-z_]\w*", self.loss):
            raise SettingError(
                f"The loss is {self.loss!r}, but must be {LABELS}, {DISTANCE}, or a function written "
                "module:function or file.py:function."
            )
        if self.holdout is not None and not 0 < self.holdout <= 0.5:
            raise SettingError(f"The holdout is {self.holdout}, but must lie between 0 and 0.5: 0.1 keeps a tenth for judging.")
        if self.row.search and (self.keep or self.layout == UNIFORM):
            raise needs_ratio(self.method)
        if self.row.search and nested(self.target):
            raise SettingError(
                f"The method {self.method} chooses a set of units of which none may be inside another, but the target is "
                f"{self.target!r}: choose another --method, or a --target of one granularity."
            )
        if len(self._goals()) > 1:
            raise SettingError(f"There are {len(self._goals())} goals ({', '.join(self._goals())}); set one of them.")

    def unused(self) -> set[str]:
        """The names of settings that the method does not read."""
        unused = {name for row in METHODS.values() for name in row.settings} - set(self.row.settings)
        if not self.row.policy:
            unused |= {*OF_A_STEP, "stack", "damage"}
        if self.planned:
            unused |= set(OF_A_STEP)
        if not self.screening:
            unused |= {"screen_by"}
        if not self.orders_channels:
            unused |= {"group_by"}
        if not (self.scores_batches or self.orders_channels):
            unused |= {"score_batches"}
        return unused

    def without_unused(self) -> Settings:
        """The same with settings that the method does not read at their defaults, so that they make no second run in a grid."""
        unused = self.unused()
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings) if field.name in unused}
        return replace(self, **defaults, screen=self.screen if self.screening else 0)


@dataclass(frozen=True)
class Judging(_Checked):
    """What decides how a selection is judged.
    >>> Judging(data="lambada", max_batches=16)
    """

    data: str | None = _setting(
        None,
        DATA,
        "Data that judge, named in the same ways; never those that chose. [default: the held-out split of --calibration]",
        unset="",
    )
    size: int | None = _setting(
        None,
        DATA,
        "Texts or images to evaluate on, at most. [default: 1024 texts, 2000 images]",
        flag="evaluation_size",
        words="evaluation size",
        least=1,
        by_task=(1024, 2000),
    )
    max_batches: int | None = _setting(
        None,
        DATA,
        "Batches to evaluate on, at most; 0 is all. [default: 80 of texts, all of images]",
        flag="evaluation_batches",
        words="evaluation batches",
        least=0,
        by_task=(80, 0),
    )


@dataclass(frozen=True)
class Cutting(_Checked):
    """What decides how the smaller model is made from a selection.
    >>> cut(opened, selection, "small/", calibration=calibration, cutting=Cutting(repair="auto", measure=False))
    """

    repair: str | None = _setting(
        None,
        CUTTING,
        "Fit what is left to make up for what is gone; kept only if it helps.",
        choices=lambda: REPAIRS,
        unset="",
        hidden=True,  # the command line has --repair and --repair-form
    )
    repair_size: int | None = _setting(
        None,
        CUTTING,
        "Texts or images that the repair is fitted to, at most: the more, the better the fit. [default: those that choose]",
        least=2,
        added=True,
    )
    measure: bool = _setting(True, CUTTING, "Measure dense against small at the end.")
    max_shard_size: str = _setting("5GB", CUTTING, "The largest file of weights.")

    def check(self) -> None:
        super().check()
        size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*[KMGT]i?B", self.max_shard_size)
        if self.repair_size is not None and not self.repair:
            raise SettingError("There is a --repair-size, but nothing is repaired: add --repair.")
        if not size or not float(size[1]):
            raise SettingError(f"The max_shard_size is {self.max_shard_size!r}, but must be a size such as 500MB or 5GB.")


@dataclass(frozen=True)
class Machine(_Checked):
    """How the work is done; none of it changes a result.
    >>> choose(opened, calibration, Settings("gpt2", budget="64pulls"), machine=Machine(lanes=1)).units
    """

    cache_memory: int | None = _setting(
        None,
        MACHINE,
        "GiB for kept block outputs; 0 keeps none. Changes the speed, not the result. [default: half of what is free]",
        words="cache memory",
        least=0,
        most=2**60,
    )  # in bytes; the command line takes GiB
    lanes: int | None = _setting(
        None,
        MACHINE,
        "Runs side by side, sharing the threads. [default: 2 on a CPU, 1 elsewhere and with experts]",
        least=1,
        most=256,
    )
    trust_remote_code: bool = _setting(False, MACHINE, "Run code that the checkpoint brings along.")
    workers: int = _setting(
        0,
        MACHINE,
        "Local processes that measure, each with a copy of the model; 0 measures in this one.",
        least=0,
        most=MANY,
    )
    ray: str | None = _setting(
        None, MACHINE, "A Ray cluster's address, or local: measure on its workers. [default: none]", unset=""
    )
    cpus_per_worker: float = _setting(1.0, MACHINE, "CPUs that a worker on Ray asks for.", least=0, most=MANY)
    gpus_per_worker: float = _setting(0.0, MACHINE, "GPUs that a worker on Ray asks for.", least=0, most=MANY)

    @property
    def elsewhere(self) -> bool:
        """Whether units are measured by workers."""
        return bool(self.workers or self.ray)

    @property
    def where(self) -> Where:
        """Where units are measured."""
        return Where(self.workers, self.ray or "", self.cpus_per_worker, self.gpus_per_worker)

    def check(self) -> None:
        super().check()
        _ = self.where  # refuses what cannot be


class Job(NamedTuple):
    """Everything that decides a prune."""

    settings: Settings
    judging: Judging
    cutting: Cutting
    machine: Machine
    healing: Healing
    given: frozenset[str] = frozenset()  # the settings that the user set
    shares: tuple[float, ...] = ()  # of a goal that was given several, from the largest to the smallest

    def for_task(self, task: str, *, experts: bool = False) -> Job:
        """The job with the defaults of a task, for a model with or without experts."""
        settings = self.settings.for_task(task)
        decided: dict[str, Any] = {}
        if settings.planned and not experts:  # the paper's methods group by address, and zero what they measure
            after_repair = self.cutting.repair and TASKS[task].inputs == TEXT  # docs/cuts.md: on images it chooses worse
            decided = {"group_by": ACTIVATION} | ({"damage": REPAIRED} if after_repair else {})
        settings = replace(settings, **{name: value for name, value in decided.items() if name not in self.given})
        judging = replace(self.judging.for_task(task), data=self.judging.data or settings.calibration)
        healing = replace(self.healing.for_task(task), data=self.healing.data or settings.calibration)
        return self._replace(settings=settings, judging=judging, healing=healing)


GROUPS: tuple[type[_Checked], ...] = (Settings, Judging, Cutting, Machine, Healing)


@functools.cache
def keywords() -> dict[str, tuple[type[_Checked], dataclasses.Field[Any]]]:
    """Every setting by the name that Python, the command line and grids give it, with the class it belongs to."""
    names = {}
    for group in GROUPS:
        for field in dataclasses.fields(group):  # type: ignore[arg-type]
            if field.name != "model":
                names[field.metadata.get("flag", field.name)] = (group, field)
    return names


def type_of(name: str) -> Any:
    """The type of a setting, as its class declares it; a list too where several may be given."""
    group, field = keywords()[name]
    declared = get_type_hints(group)[field.name]
    return declared | list[float] if "several" in field.metadata else declared


def make_job(model: str, **settings: Any) -> Job:
    """The job that these keywords describe, checked. A path is the same however it is written.

    >>> make_job("gpt2", ratio=0.2, evaluation_batches=10).judging.max_batches
    10
    """
    values: dict[type[_Checked], dict[str, Any]] = {group: {} for group in GROUPS}
    given: set[str] = set()
    shares: tuple[float, ...] = ()
    for name, value in settings.items():
        if name in OLD_NAMES:
            warnings.warn(f"{name} is now called {OLD_NAMES[name]}", FutureWarning, stacklevel=3)
            name = OLD_NAMES[name]
        if name not in keywords():
            raise not_one_of("setting", name, sorted(keywords()))
        given.add(name)
        group, field = keywords()[name]
        if "several" in field.metadata and value is not None and value != 0:  # 0 stands for none in files
            shares = _shares(field, value)
            value = shares[-1]
        values[group][field.name] = plain_path(value) if name in ("calibration", "data", "heal_data") and value else value
    if not model:
        raise SettingError("The name of the model is empty: give a folder, a hub name, or timm:NAME.")
    values[Settings]["model"] = plain_path(model)
    parts: Any = [group(**values[group]) for group in GROUPS]
    job = Job(*parts)._replace(given=frozenset(given), shares=shares if len(shares) > 1 else ())
    for part in (job.settings, job.judging, job.cutting, job.machine, job.healing):
        part.check()
    if settings.get("ratio") is not None and job.settings.keep:
        raise ratio_and_goal()
    if job.shares and job.settings.layout == UNIFORM:
        raise SettingError(
            "Several shares make nested cuts of one search, in which layers differ: use --layout free, or ask for one share."
        )
    check_holdout(job.settings, job.judging.data)
    return job


def _shares(field: dataclasses.Field[Any], value: Any) -> tuple[float, ...]:
    """The share, or the several, that a goal asks for."""
    shares = shares_of(value)
    if shares is None:
        raise SettingError(
            f"The {field.metadata['words']} is {value!r}, but must be a share such as 0.8, or several such as 0.9,0.8,0.7."
        )
    for share in shares:
        check_field(field, share)
    return shares


def ratio_and_goal() -> SettingError:
    return SettingError("There are both a ratio and a goal (such as --keep-params), but each says how much goes: give one.")


def check_holdout(settings: Settings, data: str | None) -> None:
    """Refuse a holdout beside data of their own to judge on."""
    if settings.holdout is not None and data is not None and data != settings.calibration:
        raise SettingError(
            f"The holdout keeps a share of {settings.calibration!r} for judging, but {data!r} is there to judge: give "
            "--holdout or --data."
        )


def check_type(name: str, value: Any, where: str) -> None:
    """Refuse a value of another type than the setting has."""
    try:
        msgspec.convert(value, type_of(name))
    except msgspec.ValidationError as error:
        wanted = str(error).replace("`", "").partition(",")[0].removeprefix("Expected ").replace(" | null", "")
        raise SettingError(f"{name} of {where} is {value!r}, but must be of the kind {wanted}.") from error


def plain_path(name: str) -> str:
    """An existing path in its normal form; any other name as it is."""
    return os.path.normpath(name) if name and Path(name).exists() else name


@dataclass(frozen=True)
class Provenance:
    """The settings of a search and digests of its model and data: two searches that agree in these choose the same units."""

    settings: Settings
    model_digest: str
    calibration_digest: str

    def to_json(self) -> dict[str, Any]:
        return self.settings.to_json() | {"model_digest": self.model_digest, "calibration_digest": self.calibration_digest}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Provenance:
        digests = [str(fields.get(name, "")) for name in ("model_digest", "calibration_digest")]
        return cls(Settings.from_json(fields), *digests)
