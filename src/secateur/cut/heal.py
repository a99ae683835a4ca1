"""Healing: a short distillation from the dense model into the cut one, which trains what a closed-form repair cannot reach.

The loss of a batch is KL(dense || small) over the outputs, plus a weighted distance of the block outputs: the mean over blocks
and positions of |s - d|^2 / (|d|^2 + c), where c is the median |d|^2. Without that denominator the few huge positions of a
language model would decide everything (model/moments.py). A block that was removed has nothing to compare.

Held-out batches judge: their divergence is taken at the beginning, now and then, and at the end, and the best weights are kept,
those before the first step among them. A state on disk lets a healing that was killed go on to the same weights, to the bit:
the order of the batches comes from the seed, nothing else is random, and a time becomes a number of steps once. Several
processes share the batches of a step (workers/team.py); the first alone judges and keeps the state.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from secateur.cut.surgery import blocks_left, kept_of
from secateur.errors import DataError, MissingExtra, OutputError, SelectionError, SettingError
from secateur.files import jsonio
from secateur.healing import EXAMPLES, SECONDS, STEPS, TOKENS, Healing
from secateur.judgement import Evaluation
from secateur.model.families import anatomy
from secateur.model.losses import Batch, device_of, divergence, evaluating, real_positions, reference_of, standing_in
from secateur.streams import HEALING, stream
from secateur.units import Unit
from secateur.watcher import HealProgress, Watcher
from secateur.workers.team import Team

CHECKS = 8  # times that the held-out batches are looked at, besides the beginning
CLIP = 1.0  # the largest norm of a gradient
WARM_UP, LEAST_WARM_UP = 0.05, 20  # of the steps, and steps: AdamW's first ones are large whatever the gradient
BETAS = (0.9, 0.95)
RATES = {False: 1e-4, True: 1e-3}  # the default learning rates: of all weights, and of LoRA
EVERY = 180.0  # seconds from one state to the next
TRIALS = 2  # timed steps
SMALLEST_PART = 0.6  # of an image's sides, that a random part shows
STATE, PLAN = "state.safetensors", "plan.json"


@dataclass(frozen=True)
class Heal:
    """What a healing did.

    >>> heal(model, selection.units, small, batches[:-2], held_out=batches[-2:], healing=Healing("2steps")).seen
    """

    data: str
    seen: int  # tokens, or images
    what: str  # "tokens" or "images"
    steps: int
    losses: dict[int, float]  # held-out divergence, and the labels' weighted loss, by step; that at step 0 is before healing
    best: int  # the step whose weights were kept; 0 for none
    rate: float
    trained: float  # share of the parameters
    rows: int  # texts or images in the healing data
    held_out: int  # batches
    skipped: int = 0  # steps with a non-finite loss or gradient
    stopped: int | None = None  # the step at which too many of them ended it
    lora: int | None = None
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    dense: Evaluation | None = None  # the dense model after the same treatment
    about_dense: str = ""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"dense": self.dense.to_json() if self.dense else None}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def _judged_by(self) -> str:
        labels = self.settings.get("labels")
        return "divergence from the dense model" + (f" plus {labels:g} times the labels' loss" if labels else "")

    def __str__(self) -> str:
        how = (
            f"LoRA of rank {self.lora}, {self.trained:.2%} of the parameters"
            if self.lora
            else f"{self.trained:.0%} of the weights"
        )
        text = (
            f"Healed on {self.seen:,} {self.what} of {self.data} in {self.steps:,} steps ({how}, learning rate {self.rate:g}): "
            f"the {self._judged_by} on {self.held_out} held-out batches went from {self.losses[0]:.4f} to "
            f"{self.losses[self.best]:.4f}"
        )
        if not self.best:
            kept = f"did not lower the {self._judged_by} on held-out batches, {self.losses[0]:.4f}, and was undone"
            text = f"Healing for {self.steps:,} steps on {self.data} {kept}"
        if self.stopped is not None:
            text += f"; it ended at step {self.stopped:,}, since {self.skipped} steps were not finite"
        elif self.skipped:
            text += f"; {self.skipped} steps were not finite and left out"
        return " ".join([f"{text}.", *([self.about_dense] if self.about_dense else [])])


def heal(
    model: nn.Module,
    units: Iterable[Unit],
    small: nn.Module,
    batches: Sequence[Batch],
    *,
    held_out: Sequence[Batch],
    healing: Healing,
    seed: int = 42,
    data: str = "batches",
    state: Path | None = None,
    key: str = "",
    every: float | None = None,
    team: Team | None = None,
    watcher: Watcher | None = None,
) -> Heal:
    """Train `small`, which is `shrink(model, units)` or was repaired after it, to give what the dense model gives.

    `small` ends with the best weights by the divergence of the `held_out` batches, the first ones among them. `state` is a
    folder for what a killed healing needs to go on, of the run that `key` names; it is written every so many
    seconds. All processes of a `team` call this with the same arguments and end with the same weights, but for the best ones,
    which only the first has.

    >>> heal(model, selection.units, small, batches[:-2], held_out=batches[-2:], healing=Healing("2steps")).losses
    """
    watcher, team = watcher or Watcher(), team or Team()
    check_healable(model, batches, held_out, healing)
    pairs = _matched(model, units, small)
    with _trainable(small, healing, seed) as (parameters, trained), evaluating(model), evaluating(small):
        run = _Run(model, small, pairs, parameters, batches, healing, seed, team)
        judge, place = _never_better, None
        if team.leads:
            judge = partial(_judged, run, held_out, [_reference(model, batch) for batch in held_out])
            place = _Place(state, key) if state else None
        planned = team.shared(place.planned() if place else 0)
        n_steps = planned or team.shared(_n_steps(run, judge))
        if place:
            place.start(run, n_steps)
        _together(run)
        stopped = _train(run, n_steps, judge, place, EVERY if every is None else every, watcher)
    return Heal(
        data=data,
        seen=run.at.seen,
        what=_what(batches[0]),
        steps=run.at.step,
        losses=run.at.losses,
        best=run.at.best,
        rate=run.rate,
        trained=trained,
        rows=_rows(batches[0]) * (len(batches) - 1) + _rows(batches[-1]),
        held_out=len(held_out),
        skipped=run.at.skipped,
        stopped=run.at.step if stopped else None,
        lora=healing.lora,
        seconds=run.at.seconds,
        settings=healing.to_key(),
    )


def check_healable(model: nn.Module, batches: Sequence[Batch], held_out: Sequence[Batch], healing: Healing) -> None:
    """Refuse, before any work, a healing that these data or this model do not allow."""
    healing.check()
    if not batches or not held_out:
        raise DataError("Healing needs at least 2 batches, one to train on and one to judge it by; give more data.")
    if healing.labels and "labels" not in batches[0]:
        raise SettingError("The healing data have no labels, so that --heal-labels has nothing to weigh: leave it out.")
    if healing.counted[1] == TOKENS and "input_ids" not in batches[0]:
        raise SettingError(f"The amount of healing is {healing.amount!r}, but images have no tokens: give 5000images or 30min.")
    if next(model.parameters()).dtype == torch.float16:
        raise SettingError("Gradients in float16 vanish: heal with --dtype bfloat16 or float32.")
    if healing.lora:
        _peft()


# One step


@dataclass
class _At:
    """Where a healing stands: what a state on disk holds besides the weights."""

    step: int = 0
    seen: int = 0
    skipped: int = 0
    seconds: float = 0.0
    best: int = 0
    losses: dict[int, float] = field(default_factory=dict)


class _Run:
    """A healing: what trains and what is trained, with the optimiser and where it stands."""

    def __init__(
        self,
        dense: nn.Module,
        small: nn.Module,
        pairs: Sequence[tuple[nn.Module, nn.Module]],
        parameters: dict[str, nn.Parameter],
        batches: Sequence[Batch],
        healing: Healing,
        seed: int,
        team: Team,
    ) -> None:
        self.team = team
        self.dense, self.small, self.parameters = dense, small, parameters
        self.blocks = tuple(zip(*pairs, strict=True)) if healing.hidden and pairs else ((), ())
        self.recomputed = [block for _, block in pairs] if healing.checkpointing else []
        self.batches, self.healing, self.seed = batches, healing, seed
        self.rate = healing.rate or RATES[bool(healing.lora)]
        self.per_step = max(1, round((healing.batch_size or _rows(batches[0])) / _rows(batches[0])))  # batches
        self.at = _At()
        self.best = self.copies()
        self.optimiser = self.new_optimiser()
        dtype = getattr(torch, healing.dtype) if healing.dtype else next(dense.parameters()).dtype
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if dtype != torch.float32:
            self.autocast = partial(torch.autocast, device_of(small).type, dtype)

    def new_optimiser(self) -> torch.optim.AdamW:
        fused = device_of(self.small).type in ("cpu", "cuda", "mps")
        return torch.optim.AdamW(self.parameters.values(), lr=self.rate, betas=BETAS, weight_decay=0.0, fused=fused)

    def copies(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def put(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])

    def gradients(self, batches: Sequence[Batch]) -> bool:
        """Add up the gradients of a step's batches, of which this process is given its own; whether all of them are finite."""
        self.optimiser.zero_grad(set_to_none=True)
        finite = True
        for batch in batches:
            loss = self.loss(batch) / self.per_step
            finite = bool(loss.isfinite())
            if not finite:
                break
            loss.backward()
        if self.team.total(0 if finite else 1):
            return False
        if self.team.size > 1:
            for parameter in self.parameters.values():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.team.add(parameter.grad for parameter in self.parameters.values() if parameter.grad is not None)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        return bool(norm.isfinite())

    def loss(self, batch: Batch) -> Tensor:
        dense_blocks, small_blocks = self.blocks
        with torch.no_grad(), self.autocast(), _outputs_of(dense_blocks) as expected:
            reference = reference_of(self.dense, batch)
        with _outputs_of(small_blocks) as found, ExitStack() as stack:
            stack.enter_context(self.autocast())
            for block in self.recomputed:
                stack.enter_context(_recomputed(block))
            loss = divergence(self.dense, self.small, batch, reference, self.healing.labels)
        if not found:
            return loss
        real = real_positions(batch)
        distances = [_distance(d, s, real) for d, s in zip(expected, found, strict=True)]
        return loss + self.healing.hidden * torch.stack(distances).mean()


def _distance(dense: Tensor, small: Tensor, real: Tensor | None) -> Tensor:
    """The mean over positions of |s - d|^2 / (|d|^2 + c), where c is the median |d|^2."""
    d, s = dense.flatten(0, -2).float(), small.flatten(0, -2).float()
    if real is not None and len(real) == len(d):
        d, s = d[real.to(d.device)], s[real.to(s.device)]
    squares = d.square().sum(-1)
    weights = (squares + squares.median().clamp(min=torch.finfo(torch.float32).tiny)).reciprocal()
    return ((s - d.to(s.device)).square().sum(-1) * weights.to(s.device)).mean()


@contextmanager
def _outputs_of(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """The list that gets what each block gives while the block of code lasts."""
    given: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        given.append(output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _recomputed(block: nn.Module) -> Iterator[None]:
    """While the block of code lasts, a backward pass computes what is inside the module again."""
    from torch.utils.checkpoint import checkpoint

    again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    with standing_in(block, again):
        yield


def _matched(model: nn.Module, units: Iterable[Unit], small: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The blocks of the cut model, each with the one of the dense model that it was."""
    layers, small_layers = anatomy(model), anatomy(small)
    left = blocks_left(model, layers, kept_of(layers, units))
    if len(left) != len(small_layers):
        raise SelectionError(
            f"The model to heal has {len(small_layers)} blocks, but without these units the dense one has {len(left)}: pass "
            "the one that shrink(model, units) returned."
        )
    return [(layers[i].block, layer.block) for i, layer in zip(left, small_layers, strict=True)]


# What is trained


@contextmanager
def _trainable(small: nn.Module, healing: Healing, seed: int) -> Iterator[tuple[dict[str, nn.Parameter], float]]:
    """The parameters to train by name, and their share; while the block lasts they are in float32.

    Adapters are merged into the weights when it ends, so that the model is what it was.
    """
    total = sum(parameter.numel() for parameter in small.parameters())
    dtypes = {name: parameter.dtype for name, parameter in small.named_parameters()}
    wanted = {name: parameter.requires_grad for name, parameter in small.named_parameters()}
    small.float()
    adapted = _adapt(small, healing.lora, seed) if healing.lora else []
    if not adapted:
        small.requires_grad_(True)
    try:
        parameters = {name: p for name, p in small.named_parameters() if p.requires_grad and p.numel()}
        yield parameters, sum(parameter.numel() for parameter in parameters.values()) / total
    finally:
        for parent, name, layer in adapted:
            layer.merge()
            setattr(parent, name, layer.get_base_layer())
        for name, parameter in small.named_parameters():
            parameter.grad = None
            parameter.data = parameter.data.to(dtypes[name])
            parameter.requires_grad_(wanted[name])


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft", "peft", "Healing with LoRA") from error
    return peft


def _adapt(small: nn.Module, rank: int, seed: int) -> list[tuple[nn.Module, str, Any]]:
    """Put an adapter on every projection of the blocks; each with the module it is in and its name there."""
    peft = _peft()
    inside = {id(m) for layer in anatomy(small) for m in (*layer.qkv, *layer.mlp_in, *layer.outs) if _adaptable(m)}
    names = [name for name, module in small.named_modules() if id(module) in inside]
    if not names:
        raise SettingError("The model has no projections that LoRA could adapt: heal all weights, without --heal-lora.")
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPT-2's projections, whose weights lie the other way
        torch.manual_seed(int(stream(seed, HEALING).integers(2**31)))  # peft draws the adapters
        peft.inject_adapter_in_model(config, small)
    places = [name.rpartition(".") for name in names]
    return [(parent := small.get_submodule(path), name, getattr(parent, name)) for path, _, name in places]


def _adaptable(module: nn.Module) -> bool:
    kind = type(module).__name__
    return kind in ("Linear", "Conv1D") and all(size > 0 for size in module.weight.shape)  # type: ignore[union-attr]


# The whole training


def _train(run: _Run, n_steps: int, judge: Callable[[], float], place: _Place | None, every: float, watcher: Watcher) -> bool:
    """Train to the end and put the best weights back; whether it ended early because too much was not finite."""
    at, order = run.at, _order(run.seed, len(run.batches), n_steps * run.per_step)
    checked = {max(1, n_steps * i // CHECKS) for i in range(1, CHECKS + 1)}
    started, written = time.perf_counter() - at.seconds, time.perf_counter()
    try:
        if 0 not in at.losses:
            at.losses[0] = judge()
        watcher.healed(HealProgress(at.step, n_steps, at.losses[max(at.losses)], at.losses[0]))
        while at.step < n_steps and at.skipped <= 10 + n_steps // 10:
            chosen = order[at.step * run.per_step : (at.step + 1) * run.per_step]
            batches = [_shown(run, i, at.step, j) for j, i in enumerate(chosen) if j % run.team.size == run.team.rank]
            for group in run.optimiser.param_groups:
                group["lr"] = run.rate * _schedule(at.step, n_steps)
            if run.gradients(batches):
                run.optimiser.step()
            else:
                at.skipped += 1
            at.seen += run.team.total(sum(map(_size, batches)))
            at.step += 1
            if at.step in checked:
                at.losses[at.step] = judge()
                if at.losses[at.step] < at.losses[at.best]:
                    at.best, run.best = at.step, run.copies()
            at.seconds = time.perf_counter() - started
            watcher.healed(HealProgress(at.step, n_steps, at.losses[max(at.losses)], at.losses[0], at.step in at.losses))
            if place and time.perf_counter() - written >= every and at.step < n_steps:
                place.write(run)
                written = time.perf_counter()
    finally:
        run.put(run.best)
    return at.step < n_steps


def _schedule(step: int, n_steps: int) -> float:
    """The share of the learning rate at a step: a short warm-up, then half a cosine to a hundredth."""
    warm = max(1, min(n_steps // 2, max(LEAST_WARM_UP, round(WARM_UP * n_steps))))
    share = 0.5 * (1 + math.cos(math.pi * step / n_steps))
    return min(1.0, (step + 1) / warm) * max(0.01, share)


def _order(seed: int, n_batches: int, n: int) -> list[int]:
    """The batches that are trained on: all of them in a random order, then in another one."""
    rng = stream(seed, HEALING)
    order: list[int] = []
    while len(order) < n:
        order += rng.permutation(n_batches).tolist()
    return order[:n]


def _shown(run: _Run, i: int, step: int, part: int) -> Batch:
    """A batch as it is trained on: images are mirrored at random, and cut to a random part."""
    batch = run.batches[i]
    if "pixel_values" not in batch or not run.healing.augment:
        return batch
    rng = stream(run.seed, HEALING, step, part)
    return {**batch, "pixel_values": torch.stack([_part(image, rng) for image in batch["pixel_values"]])}


def _part(image: Tensor, rng: np.random.Generator) -> Tensor:
    if rng.random() < 0.5:
        image = image.flip(-1)
    height, width = image.shape[-2:]
    share = rng.uniform(SMALLEST_PART, 1.0)
    h, w = max(1, round(height * share)), max(1, round(width * share))
    top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
    part = image[..., top : top + h, left : left + w]
    return F.interpolate(part[None], (height, width), mode="bilinear", align_corners=False)[0]


def _reference(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return reference_of(model, batch)


def _never_better() -> float:
    """How a process that does not lead judges."""
    return math.inf


def _together(run: _Run) -> None:
    """Let all processes of a team begin where the first one is."""
    team, run.at = run.team, run.team.shared(run.at)
    if team.size == 1 or not run.at.step:
        return
    for parameter in run.parameters.values():
        moments = run.optimiser.state[parameter]
        if not team.leads:
            moments["step"] = torch.zeros((), device=parameter.device)
            moments |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        team.copy([parameter.data, *(moments[name] for name in ("step", "exp_avg", "exp_avg_sq"))])


def _judged(run: _Run, batches: Sequence[Batch], references: Sequence[Tensor]) -> float:
    """The mean of the loss over the held-out batches, without that of the hidden states."""
    with torch.no_grad(), run.autocast():
        losses = [
            float(divergence(run.dense, run.small, batch, reference, run.healing.labels))
            for batch, reference in zip(batches, references, strict=True)
        ]
    return sum(losses) / len(losses)


def _n_steps(run: _Run, judge: Callable[[], float]) -> int:
    """How many steps the amount of healing is; a time is turned into steps by timing some that change nothing."""
    amount, what = run.healing.counted
    sample = [run.batches[i] for i in range(min(len(run.batches), 16))]
    if what != SECONDS:
        per_batch = {STEPS: 1 / run.per_step, EXAMPLES: _rows(sample[0]), TOKENS: sum(map(_size, sample)) / len(sample)}[what]
        return max(1, math.ceil(amount / (per_batch * run.per_step)))
    optimiser = run.optimiser
    run.optimiser = torch.optim.AdamW(run.parameters.values(), lr=0.0, weight_decay=0.0)
    ticks = []
    for i in range(TRIALS + 1):
        start = time.perf_counter()
        mine = range(run.team.rank, run.per_step, run.team.size)
        run.gradients([_shown(run, (i + j) % len(run.batches), i, j) for j in mine])
        run.optimiser.step()
        ticks.append(time.perf_counter() - start)
    run.optimiser.zero_grad(set_to_none=True)
    run.optimiser = optimiser
    start = time.perf_counter()
    run.at.losses[0] = judge()
    judging = (CHECKS + 1) * (time.perf_counter() - start)
    return max(1, int((amount - sum(ticks) - judging) / min(ticks[1:])))


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _what(batch: Batch) -> str:
    return TOKENS if "input_ids" in batch else "images"


def _size(batch: Batch) -> int:
    """How many tokens, or images, a batch has."""
    if "input_ids" not in batch:
        return _rows(batch)
    real = real_positions(batch)
    return batch["input_ids"].numel() if real is None else int(real.sum())


# The state on disk


class _Place:
    """A folder that holds the state of one healing: its number of steps, and what it had reached."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def planned(self) -> int:
        """How many steps this healing has, if it was found out already; else 0."""
        plan = self.folder / PLAN
        try:
            fields = jsonio.read(plan) if plan.exists() else {}
            n_steps, key = int(fields.get("steps", 0)), fields.get("key", self.key)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise self._damaged(plan) from error
        if key != self.key:
            raise OutputError(f"{self.folder} holds the state of another healing; delete it, or choose another place with -o.")
        return n_steps

    def start(self, run: _Run, n_steps: int) -> None:
        """Keep the number of steps; `run` goes on from the state that is here, if there is one."""
        jsonio.write(self.folder / PLAN, {"key": self.key, "steps": n_steps})
        self._read(run)

    def write(self, run: _Run) -> None:
        """Write the state, whole or not at all."""
        tensors = {f"now/{name}": value.detach() for name, value in run.parameters.items()}
        tensors |= {f"best/{name}": value for name, value in run.best.items()}
        for name, parameter in run.parameters.items():
            of_parameter = run.optimiser.state.get(parameter, {})
            tensors |= {f"adam/{kind}/{name}": value for kind, value in of_parameter.items()}
        about = {"key": self.key, **asdict(run.at)}
        path, temporary = self.folder / STATE, self.folder / f".{STATE}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, temporary, {"at": jsonio.dumps(about)})
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            reason = error if isinstance(error, OSError) else OSError(str(error))
            raise jsonio.cannot_write(path, reason) from error

    def _read(self, run: _Run) -> None:
        path = self.folder / STATE
        if not path.exists():
            return
        try:
            with safe_open(path, "pt") as file:
                about = jsonio.loads(file.metadata()["at"].encode())
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
            if about.pop("key") != self.key:
                raise ValueError("it is of another healing")
            at = jsonio.decode(about, _At)
            now, best = ({name: tensors[f"{part}/{name}"] for name in run.parameters} for part in ("now", "best"))
            run.put(now)
            run.best = {name: value.to(run.parameters[name].device) for name, value in best.items()}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise self._damaged(path) from error
        run.at = at
        for name, parameter in run.parameters.items():
            kinds = {kind: tensors.get(f"adam/{kind}/{name}") for kind in ("step", "exp_avg", "exp_avg_sq")}
            if all(value is not None for value in kinds.values()):
                run.optimiser.state[parameter] = {
                    kind: value.to(parameter.device) for kind, value in kinds.items() if value is not None
                }

    def _damaged(self, path: Path) -> OutputError:
        return OutputError(f"{path} is not the state of this healing, or is damaged; delete {self.folder}, and it begins anew.")
