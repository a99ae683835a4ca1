"""The whole job in one call: load, choose units, evaluate, write. Everything here is also reachable step by step."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from secateur import jsonio
from secateur.accounting import total_parameters, zeroed_percent
from secateur.cut import check_cut, check_cut_place, cut
from secateur.damage import DamageMeter
from secateur.data import BUILTIN, Batches, Source, check_apart, image_batches, text_batches
from secateur.errors import DataError, ModelError, OutputError, SelectionError, SettingError, not_one_of
from secateur.evaluate import Evaluation, changes, evaluate
from secateur.families import candidate_units, task_of
from secateur.journal import Journal, check_same_run
from secateur.models import digest, load, versions
from secateur.policies import UCB, Greedy, Policy, Thompson
from secateur.scores import STATIC_METHODS, unit_scores
from secateur.selection import Goal, Selection, check_search, select, select_by_score
from secateur.streams import POOLS, stream
from secateur.surgery import FREE, LAYOUTS, UNIFORM, check_uniform
from secateur.targets import (
    FLOPS,
    LATENCY,
    PARAMS,
    flop_goal,
    keep_table,
    latency_goal,
    latency_table,
    parameter_goal,
    read_table,
    uniform_quota,
)
from secateur.units import GROUP_WIDTH, HEAD, TARGETS, Unit, check_ratio
from secateur.watcher import Watcher
from secateur.zeroing import zeroed

SEARCH_METHODS = ("ucb", "ts", "greedy")
METHODS = (*SEARCH_METHODS, *STATIC_METHODS)
AUTO = -1  # a setting left to the model's task
NONE = "none"  # the layout of those who want no smaller model, and the screen of those who want none
SCREENS = ("magnitude", "fisher", NONE)
LEFT_TO_TASK = {"calibration_size", "batch_size", "size", "max_batches"}


@dataclass(frozen=True)
class Settings:
    """What decides which units are chosen. The defaults are the paper's (section 4) where it names one; AUTO is by task."""

    model: str
    target: str = HEAD
    ratio: float = 0.10
    method: str = "ucb"
    seed: int = 42
    pulls_per_step: int = 32  # T_step; G for greedy
    batches_per_pull: int = 2  # b_pull
    batches_per_step: int = 0  # the pulls of a step draw from this many; 0: from all
    stack: int = 1  # how many masked runs are made as one; may change the last digits of a loss
    temperature: float = 0.02  # tau
    ucb_c: float = 1.5
    pool_size: int = 0  # 0: min{|R|, max(2, floor(2 sqrt|R|))}
    screen: int = AUTO  # keep this many of lowest score before each pool is drawn; 0: all. Text 48, images 0
    screen_by: str = "magnitude"  # whose score; one of SCREENS
    group_width: int = GROUP_WIDTH  # g0
    score_batches: int = 16  # calibration batches that wanda, taylor and fisher look at
    calibration: str = BUILTIN
    calibration_size: int = AUTO  # texts 512, images 1024
    seq_len: int = 128
    batch_size: int = AUTO  # texts 4, images 8
    layout: str = FREE  # "uniform": every layer loses as many; "none": nothing is cut
    target_params: float = 0  # what is to be left of the dense model's, in place of a ratio; 0: the ratio decides
    target_flops: float = 0
    target_latency: float = 0
    device: str = "auto"
    dtype: str = "float32"

    @property
    def scores_batches(self) -> bool:
        """Whether the method's score, or that of its screen, is taken on calibration batches."""
        score = self.method if self.method in STATIC_METHODS else self.screen_by if self.screen > 0 else NONE
        return score in ("wanda", "taylor", "fisher")

    def check(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        check_ratio(self.ratio)
        check_search(
            pulls_per_step=self.pulls_per_step,
            temperature=self.temperature,
            pool_size=self.pool_size or None,
            screen=None if self.screen in (0, AUTO) else self.screen,
        )
        UCB(self.ucb_c)
        if self.method not in METHODS:
            raise not_one_of("method", self.method, METHODS)
        if self.target not in TARGETS:
            raise not_one_of("target", self.target, TARGETS)
        if self.screen_by not in SCREENS:
            raise not_one_of("screening rule", self.screen_by, SCREENS)
        if self.layout not in (*LAYOUTS, NONE):
            raise not_one_of("layout", self.layout, (*LAYOUTS, NONE))
        targets = {name: value for name, value in self._targets().items() if value}
        if len(targets) > 1:
            raise SettingError(f"There are {len(targets)} targets ({', '.join(targets)}); set one of them.")
        for name, value in targets.items():
            if not 0 < value < 1:
                raise SettingError(f"The target for {name} is {value}, but must lie between 0 and 1: 0.8 leaves four fifths.")
        least = {"batches_per_pull": 1, "batches_per_step": 0, "stack": 1, "group_width": 1, "score_batches": 1, "seq_len": 2}
        check_counts(self, least | {"batch_size": 1, "calibration_size": 1})
        stream(self.seed, POOLS)

    def _targets(self) -> dict[str, float]:
        return {PARAMS: self.target_params, FLOPS: self.target_flops, LATENCY: self.target_latency}

    def goal(self, model: nn.Module, units: Sequence[Unit], kept_table: Path | None, watcher: Watcher) -> Goal | None:
        """What the selection is to reach, if it is not a ratio."""
        if self.target_params:
            return parameter_goal(model, units, self.target_params)
        if self.target_flops:
            return flop_goal(model, units, self.target_flops, self.seq_len)
        if not self.target_latency:
            return None
        where = next(model.parameters())
        key = jsonio.fingerprint(
            [digest(model), self.target, self.group_width, self.seq_len, str(where.device), str(where.dtype)]
        )
        table = read_table(kept_table, key, units) if kept_table else None
        if table is None:
            watcher.stage("measuring what units cost on this machine")
            table = latency_table(model, units, self.seq_len, watcher.evaluated)
        goal = latency_goal(model, units, self.target_latency, self.seq_len, table)
        if kept_table:
            keep_table(kept_table, key, table)
        return goal

    def for_task(self, task: str) -> Settings:
        """The same settings with every AUTO replaced."""
        screen, size, batch = (48, 512, 4) if task == "text" else (0, 1024, 8)
        return replace(
            self,
            screen=screen if self.screen == AUTO else self.screen,
            calibration_size=size if self.calibration_size == AUTO else self.calibration_size,
            batch_size=batch if self.batch_size == AUTO else self.batch_size,
        )


@dataclass(frozen=True)
class Judging:
    """What decides how a selection is judged."""

    data: str = ""  # empty: the held-out split of the calibration data
    size: int = AUTO  # texts 1024, images 2000
    max_batches: int = AUTO  # texts 80, images all

    def check(self) -> None:
        check_counts(self, {"size": 1, "max_batches": 0})

    def for_task(self, task: str, calibration: str) -> Judging:
        size, most = (1024, 80) if task == "text" else (2000, 0)
        return Judging(
            data=self.data or calibration,
            size=size if self.size == AUTO else self.size,
            max_batches=most if self.max_batches == AUTO else self.max_batches,
        )


def check_counts(settings: Settings | Judging, least: dict[str, int]) -> None:
    for name, low in least.items():
        value = getattr(settings, name)
        if value < low and not (value == AUTO and name in LEFT_TO_TASK):
            words = {"size": "evaluation size", "max_batches": "evaluation batches"}.get(name, name.replace("_", " "))
            raise SettingError(f"The {words} is {value}, but must be at least {low}.")


@dataclass(frozen=True)
class PruneResult:
    """What `prune` found, as evaluation.json holds it, with the selection and where the files are."""

    selection: Selection
    record: dict[str, Any]
    out: Path | None
    cut: dict[str, Any] | None = None  # as secateur.json holds it, if a smaller model was written


def prune(
    model: str,
    *,
    out: str | Path | None = None,
    data: str = "",
    evaluation_size: int = AUTO,
    evaluation_batches: int = AUTO,
    repair: str = "",
    measuring: bool = True,
    cache_memory: int | None = None,
    lanes: int | None = None,
    trust_remote_code: bool = False,
    watcher: Watcher | None = None,
    **settings: Any,
) -> PruneResult:
    """Choose units of a model, evaluate it with and without them, cut them out, and measure the smaller model.

    Writes selection.json, evaluation.json and, unless the layout is "none", the smaller checkpoint to `out`. `repair` is one of
    recovery.FORMS, or nothing. Further keywords are those of `Settings`. Started again with the same arguments after it was
    stopped, it goes on.

    >>> prune("gpt2", ratio=0.10, calibration="wikitext2", out="gpt2-pruned")
    """
    watcher = watcher or Watcher()
    asked = make_settings(model=model, **settings)
    asked.check()
    judging = Judging(plain_path(data), evaluation_size, evaluation_batches)
    judging.check()
    folder = Path(out) if out is not None else None
    if folder:
        check_place(folder)
        if asked.layout != NONE:
            check_cut_place(folder, repair, followed_by="selection.json")
    if repair and (folder is None or asked.layout == NONE):
        raise SettingError(
            "There is nothing to repair: no smaller model is written without a place for it, or with --layout none."
        )
    network, processor, wanted = open_model(asked, trust_remote_code=trust_remote_code, watcher=watcher)
    judging = judging.for_task(task_of(network), wanted.calibration)
    watcher.stage("reading data")
    calibration = load_batches(network, processor, wanted.calibration, wanted, split="train", size=wanted.calibration_size)
    evaluation = load_batches(
        network, processor, judging.data, wanted, split="test", size=judging.size, most=judging.max_batches
    )
    check_cut(network, repair, len(calibration))
    result = prune_loaded(
        network,
        calibration,
        evaluation,
        wanted,
        judging,
        out=folder,
        cache_memory=cache_memory,
        lanes=lanes,
        watcher=watcher,
    )
    if folder is None or wanted.layout == NONE:
        return result
    done = cut(
        network,
        result.selection,
        folder,
        name=wanted.model,
        layout=wanted.layout,
        processor=processor,
        calibration=calibration,
        evaluation=evaluation,
        judged=result.record,
        repair=repair,
        measuring=measuring,
        tokens=wanted.seq_len,
        trust_remote_code=trust_remote_code,
        watcher=watcher,
    )
    return replace(result, cut=done)


def open_model(settings: Settings, *, trust_remote_code: bool, watcher: Watcher) -> tuple[nn.Module, Any, Settings]:
    """The settings' model with its tokenizer or image processor, and the settings with nothing left to its task."""
    watcher.stage(f"loading {settings.model}")
    model, processor = load(settings.model, device=settings.device, dtype=settings.dtype, trust_remote_code=trust_remote_code)
    return model, processor, settings.for_task(task_of(model))


def prune_loaded(
    model: nn.Module,
    calibration: Batches,
    evaluation: Batches,
    settings: Settings,
    judging: Judging,
    *,
    out: Path | None = None,
    dense: Evaluation | None = None,
    cache_memory: int | None = None,
    lanes: int | None = None,
    watcher: Watcher | None = None,
) -> PruneResult:
    """The same with everything at hand; `dense` is the dense model's evaluation, if it is known already."""
    watcher = watcher or Watcher()
    check_apart(calibration.source, evaluation.source)
    key = {"settings": run_settings(model, settings, calibration), "judging": _judging_settings(judging, evaluation)}
    done = None
    if out:
        refuse_other_selection(out / "selection.json", key["settings"])
        done = _read_record(out / "evaluation.json", key)
        if done and (out / "selection.json").exists():
            return PruneResult(Selection.load(out / "selection.json"), done, out)
    started = time.perf_counter()
    with Journal(out / "journal.jsonl", key["settings"]) if out else nullcontext() as journal:
        selection = choose_units(
            model,
            calibration,
            settings,
            cache_memory=cache_memory,
            lanes=lanes,
            journal=journal,
            latency_file=out / "latency.json" if out else None,
            watcher=watcher,
        )
    # Seconds of this start alone; what an earlier start had measured is counted beside them.
    spent = {
        "selection_seconds": time.perf_counter() - started,
        "replayed_pulls": min(journal.n_replayed, selection.pulls) if journal else 0,
    }
    if out:
        selection.save(out / "selection.json")
    record = done or jsonio.to_json(key | judge(model, selection, evaluation, dense=dense, watcher=watcher) | spent)
    if out and not done:
        jsonio.write_text(out / "evaluation.json", jsonio.dumps(record, indent=1) + "\n")
    return PruneResult(selection, record, out)


def make_settings(**fields: Any) -> Settings:
    """Settings by name; a path counts as the same however it is written."""
    known = {field.name for field in dataclasses.fields(Settings)}
    for name in fields.keys() - known:
        raise not_one_of("setting", name, sorted(known))
    return Settings(**fields | {name: plain_path(fields[name]) for name in ("model", "calibration") if name in fields})


def plain_path(name: str) -> str:
    return os.path.normpath(name) if name and Path(name).exists() else name


def choose_units(
    model: nn.Module,
    calibration: Batches,
    settings: Settings,
    *,
    cache_memory: int | None = None,
    lanes: int | None = None,
    journal: Journal | None = None,
    latency_file: Path | None = None,
    watcher: Watcher | None = None,
) -> Selection:
    """The units that the settings' method chooses, with everything that a selection.json records.

    `latency_file` keeps the table that a latency target is judged by, so that a run that goes on decides as it began.
    """
    watcher = watcher or Watcher()
    settings.check()
    units = candidate_units(model, settings.target, settings.group_width)
    goal = settings.goal(model, units, latency_file, watcher)
    quota = uniform_quota(model, units, settings.ratio, goal) if settings.layout == UNIFORM else None
    if quota:
        check_uniform(model, quota.some())
    watcher.stage("choosing units")
    batches = calibration[: settings.score_batches]
    if settings.method in STATIC_METHODS:
        scores = unit_scores(settings.method, model, units, batches=batches, seed=settings.seed)
        found = select_by_score(scores, ratio=settings.ratio, goal=goal, quota=quota)
    else:
        meter = DamageMeter(
            model,
            calibration,
            batches_per_pull=settings.batches_per_pull,
            batches_per_step=settings.batches_per_step,
            cache_memory=cache_memory,
            stack=settings.stack,
            lanes=lanes,
            seed=settings.seed,
        )
        screening = settings.screen and settings.screen_by != NONE
        found = select(
            meter,
            units,
            policy=_policy(settings),
            ratio=settings.ratio,
            goal=goal,
            quota=quota,
            pulls_per_step=settings.pulls_per_step,
            temperature=settings.temperature,
            seed=settings.seed,
            pool_size=settings.pool_size or None,
            screen=settings.screen if screening else None,
            screen_scores=unit_scores(settings.screen_by, model, units, batches=batches) if screening else None,
            journal=journal,
            progress=watcher.pull,
        )
        if meter.cache_was_full:
            watcher.say("The cache memory did not hold the block outputs of all batches: a larger --cache-memory is faster.")
    ours = run_settings(model, settings, calibration)
    reached = {"what": goal.what, "asked": goal.share, "got": goal.left(found.units)} if goal else {}
    return replace(found, settings=ours, versions=versions(), calibration=calibration.source.to_json(), goal=reached)


def judge(
    model: nn.Module,
    selection: Selection,
    batches: Batches,
    *,
    dense: Evaluation | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """The model with and without the selected units on the same batches, and what the units amount to."""
    watcher = watcher or Watcher()
    if selection.calibration:
        check_apart(Source.from_json(selection.calibration), batches.source)
    settings = selection.settings
    n_candidates = len(candidate_units(model, settings.get("target", HEAD), settings.get("group_width", GROUP_WIDTH)))
    if dense is None:
        watcher.stage("evaluating the dense model")
        dense = evaluate(model, batches, watcher.evaluated)
    watcher.stage("evaluating with the units zeroed")
    with zeroed(model, selection.units):
        pruned = evaluate(model, batches, watcher.evaluated)
    return {
        "dense": dense.to_json(),
        "pruned": pruned.to_json(),
        **changes(dense, pruned),
        "units": [unit.to_json() for unit in selection.units],
        "candidates": n_candidates,
        "unit_ratio": len(selection.units) / n_candidates,
        "total_params": total_parameters(model),
        "zeroed_percent": zeroed_percent(model, selection.units),
        "pulls": selection.pulls,
        "forwards": selection.forwards,
        "nonfinite_pulls": selection.nonfinite_pulls,
        **({"goal": selection.goal} if selection.goal else {}),
    }


def load_batches(
    model: nn.Module, processor: Any, name: str, settings: Settings, *, split: str, size: int, most: int = 0, keep: bool = False
) -> Batches:
    """Batches of the kind that the model takes; at most `most` of them, if that is not 0. `keep` is for many passes."""
    limit = min(size, most * settings.batch_size) if most else size
    if task_of(model) == "text":
        context = getattr(model.config, "max_position_embeddings", None)
        if isinstance(context, int) and settings.seq_len > context:
            raise SettingError(f"The sequence length is {settings.seq_len}, but the model takes at most {context} tokens.")
        batches = text_batches(
            name, processor, split=split, limit=limit, seq_len=settings.seq_len, batch_size=settings.batch_size
        )
        network: Any = model  # to mypy, whatever a module has is a tensor
        n_tokens = network.get_input_embeddings().num_embeddings
        largest = max(int(batch["input_ids"].max()) for batch in batches)
        if largest >= n_tokens:
            raise ModelError(f"The tokenizer gives token {largest}, but the model knows {n_tokens}: it is another model's.")
        return batches
    if name == BUILTIN:
        option = "--calibration" if split == "train" else "--data"
        raise DataError(f"An image model needs images: give a folder of them with {option}.")
    return image_batches(
        name,
        processor,
        classes=class_names(model),
        split=split,
        limit=limit,
        batch_size=settings.batch_size,
        seed=settings.seed,
        keep=keep or split == "train",
    )


def class_names(model: nn.Module) -> list[str]:
    """The names of an image model's outputs, in their order; numbers where it has no names."""
    network: Any = model
    names = getattr(getattr(network, "config", None), "id2label", None)
    return [str(names[i]) for i in range(len(names))] if names else [str(i) for i in range(network.num_classes)]


def check_selection(model: nn.Module, selection: Selection, name: str) -> None:
    """Refuse a selection that was made for another model."""
    theirs, ours = str(selection.settings.get("model_digest", "")), digest(model)
    rounded = selection.settings.get("dtype") != str(next(model.parameters()).dtype).removeprefix("torch.")
    length = 8 if rounded else None  # another dtype rounds the weights: then only names and shapes can be compared
    if theirs and theirs[:length] != ours[:length]:
        raise SelectionError(
            f"The selection was made for the model {selection.settings.get('model')!r} (digest {theirs}), and {name!r} is "
            f"another one (digest {ours}); give the model it was made for."
        )
    with zeroed(model, selection.units):
        pass  # units that the model does not have are refused here


def check_place(path: Path) -> None:
    """Refuse an output place that cannot be written, before any work is done for it."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    if path.exists() and not path.is_dir():
        raise OutputError(f"Cannot write to {path}: it is a file, and a folder is needed. Choose another place.")
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(f"Cannot write to {path}: {place} is not a folder that can be written. Choose another place.")


def check_record_place(out: Path, same: dict[str, Any]) -> None:
    """Refuse, before any work, a place for an evaluation that is a folder or holds something other than this evaluation."""
    check_place(out.absolute().parent)
    if out.is_dir():
        raise OutputError(f"{out} is a folder; name the file to write, such as {out / 'evaluation.json'}.")
    try:
        there = json.loads(out.read_text(encoding="utf-8")) if out.exists() else same
        ours = {name: there.get(name) for name in same} == same
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise OutputError(f"{out} holds something else and is not overwritten; choose another place with -o.")


def run_settings(model: nn.Module, settings: Settings, calibration: Batches) -> dict[str, Any]:
    """The settings and the digests of model and data: two runs that agree in these choose the same units."""
    fields = dataclasses.asdict(settings) | {"device": str(next(model.parameters()).device)}
    return fields | {"model_digest": digest(model), "calibration_digest": calibration.source.digest}


def refuse_other_selection(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to overwrite a selection that other settings made."""
    if not path.exists():
        return
    try:
        theirs = Selection.load(path).settings
    except SelectionError as error:
        raise OutputError(f"{error} It is not overwritten: choose another place with -o, or move it away.") from error
    check_same_run(path, theirs, settings)


def _judging_settings(judging: Judging, evaluation: Batches) -> dict[str, Any]:
    return dataclasses.asdict(judging) | {"data_digest": evaluation.source.digest, "rows": len(evaluation.source.rows)}


def _policy(settings: Settings) -> Policy:
    policies: dict[str, Policy] = {"ucb": UCB(settings.ucb_c), "ts": Thompson(), "greedy": Greedy()}
    return policies[settings.method]


def _read_record(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The record of this very run, if it has ended before; another run's is not to be overwritten."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        theirs = {**record["settings"], **record["judging"]}
        float(record["dense"]["loss"]), float(record["pruned"]["loss"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{path} is not an evaluation of Secateur's, or is damaged; move it away or choose another -o."
        ) from error
    check_same_run(path, theirs, {**key["settings"], **key["judging"]})
    return dict(record)
