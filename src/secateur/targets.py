"""What units cost, and how many of them a target takes: parameters, FLOPs, or milliseconds on this machine."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from secateur import flops, jsonio
from secateur.accounting import total_parameters
from secateur.errors import OutputError, SettingError
from secateur.families import Layer, anatomy
from secateur.losses import evaluating
from secateur.measure import measure, run_of
from secateur.selection import Goal, Quota
from secateur.surgery import kept_of, parameters_left, shrink
from secateur.units import HEAD, KV_GROUP, MLP, Unit

PARAMS, FLOPS, LATENCY = "parameters", "FLOPs", "latency"
BATCH_SIZE = 8  # texts or images in the run whose FLOPs and time a target is about
SHARES = (0.25, 0.5, 0.75)  # of a layer's units: where the latency table is measured

Table = dict[str, list[list[float]]]


def parameter_goal(model: nn.Module, units: Sequence[Unit], share: float) -> Goal:
    """To leave this share of the parameters."""
    total = total_parameters(model)
    return _goal(model, PARAMS, share, lambda some: parameters_left(model, some) / total, units)


def flop_goal(model: nn.Module, units: Sequence[Unit], share: float, tokens: int) -> Goal:
    """To leave this share of the FLOPs of a prompt, or of a batch of images."""
    table = FlopShares(model, tokens)
    return _goal(model, FLOPS, share, lambda some: 1 - table.saved(some), units)


def latency_goal(model: nn.Module, units: Sequence[Unit], share: float, tokens: int, table: Table) -> Goal:
    """To leave this share of the time that a prompt, or a batch of images, takes, as far as a table of this machine's says."""
    shares = FlopShares(model, tokens)

    def left(some: Sequence[Unit]) -> float:
        by_side: dict[str, list[Unit]] = defaultdict(list)
        for unit in some:
            by_side[unit.side].append(unit)
        return 1 - sum(_read(table[side], shares.saved(few)) for side, few in by_side.items())

    return _goal(model, LATENCY, share, left, units)


def _goal(model: nn.Module, what: str, share: float, left: Callable[[Sequence[Unit]], float], units: Sequence[Unit]) -> Goal:
    layers = anatomy(model)
    alike: dict[Any, float] = {}  # what is asked once of all units that are of one size
    costs = {}
    for unit in units:
        layer = layers[unit.layer]
        sharing = layer.kv_of.count(layer.kv_of[unit.index]) if unit.kind == HEAD else 0  # a lone head takes its K/V head along
        key = (unit.kind, unit.layer, len(layer.channels(unit)), sharing)
        if key not in alike:
            alike[key] = 1 - left([unit])
        costs[unit] = alike[key]
    return Goal(what, share, left, costs)


class FlopShares:
    """What share of the FLOPs of a prompt, or of a batch of images, goes with units: counted once, and then worked out."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self._layers = anatomy(model)
        self._sizes: dict[tuple[int, str], tuple[int, int]] = {}  # positions that enter a projection, and those attended to

        def note(i: int, side: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                x = args[0]
                self._sizes[i, side] = (x.shape[:-1].numel(), x.shape[-2])

            return hook

        hooks = [
            module.register_forward_pre_hook(note(i, side))
            for i, layer in enumerate(self._layers)
            for side, module in ((HEAD, layer.out), (MLP, layer.mlp_out))
        ]
        try:
            with torch.inference_mode(), evaluating(model):
                self._total = flops.count(run_of(model, BATCH_SIZE, tokens))
        finally:
            for hook in hooks:
                hook.remove()

    def saved(self, units: Sequence[Unit]) -> float:
        """The share that a model without these units does not need."""
        saved = 0
        touched = {unit.layer for unit in units}
        for i, (layer, kept) in enumerate(zip(self._layers, kept_of(self._layers, units), strict=True)):
            if i not in touched:
                continue
            (rows, length), (mlp_rows, _) = self._sizes[i, HEAD], self._sizes[i, MLP]
            heads, kv_heads = layer.heads - len(kept.heads), layer.kv_heads - len(kept.kv_heads)
            channels = layer.mlp_width - len(kept.channels)
            projected = 2 * rows * layer.width * layer.head_dim * (2 * heads + 2 * kv_heads)  # query and output, key and value
            attended = 2 * rows * length * layer.head_dim * 2 * heads
            saved += projected + attended + 2 * mlp_rows * layer.width * channels * (len(layer.mlp_in) + 1)
        return saved / self._total


def latency_table(
    model: nn.Module, units: Sequence[Unit], tokens: int, progress: Callable[[int, int], None] | None = None
) -> Table:
    """How much faster the model gets on this machine, by the side of the block that is cut: pairs of FLOPs and time saved.

    Measured on models with a quarter, a half and three quarters of the units cut out of every layer.
    """
    table: Table = {}
    sides = list(dict.fromkeys(unit.side for unit in units))
    for n, side in enumerate(sides):
        points = [[0.0, 0.0]]
        before: list[Unit] = []
        for m, share in enumerate(SHARES):
            cut = _evenly([unit for unit in units if unit.side == side], share)
            if cut != before:  # where there are few units, a half and three quarters may be the same ones
                before = cut
                timing = measure(model, shrink(model, cut), batch_sizes=(BATCH_SIZE,), tokens=tokens, new_tokens=1).timings[0]
                points.append([1 - 1 / timing.flop_ratio, 1 - 1 / timing.speedup.value])
            if progress:
                progress(n * len(SHARES) + m + 1, len(sides) * len(SHARES))
        # A larger cut saves no less: a noisy clock must not say so.
        table[side] = [[x, max(y for _, y in points[: i + 1])] for i, (x, _) in enumerate(points)]
    return table


def read_table(path: Path, key: str, units: Sequence[Unit]) -> Table | None:
    """The latency table that a run has kept, so that it goes on with the figures it began with; None if it is another's."""
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        table = {str(side): [[float(x), float(y)] for x, y in points] for side, points in fields["table"].items()}
        if fields["key"] != key:
            return None
        if set(table) != {unit.side for unit in units} or not all(x and np.isfinite(x).all() for x in table.values()):
            raise ValueError("a point is missing")
        return table
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OutputError(f"{path} is not a latency table of Secateur's, or is damaged; delete it to measure anew.") from error


def keep_table(path: Path, key: str, table: Table) -> None:
    jsonio.write_text(path, jsonio.dumps({"key": key, "table": table}, indent=1) + "\n")


def _evenly(units: Sequence[Unit], share: float) -> list[Unit]:
    """This share of each layer's units."""
    by_layer: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        by_layer[unit.layer].append(unit)
    return [unit for few in by_layer.values() for unit in few[: round(share * len(few))]]


def _read(points: Sequence[Sequence[float]], x: float) -> float:
    """Between the points of a table in straight lines, and beyond its end in that of the last two."""
    xs, ys = zip(*points, strict=True)
    if x <= xs[-1] or len(xs) < 2:
        return float(np.interp(x, xs, ys))
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if xs[-1] > xs[-2] else 0.0
    return float(ys[-1] + slope * (x - xs[-1]))


def uniform_quota(model: nn.Module, units: Sequence[Unit], ratio: float, goal: Goal | None = None) -> Quota:
    """The quota that takes the same from every layer, nearest to the ratio; with a goal, the least that meets it.

    A smaller last group of MLP channels stays. Where several heads share a K/V head, each K/V head loses as many of them. Where
    layers differ in size (Swin), each loses the same share.
    """
    layers = anatomy(model)
    kinds = list(dict.fromkeys(unit.kind for unit in units))
    if goal:
        if len(kinds) > 1:
            raise SettingError("A uniform layout with a target takes units of one kind: choose --target head, mlp or kv_group.")
        whole = _KindOfUnit(layers, units)
        for n in range(1, whole.smallest):
            quota = whole.quota(n)
            if quota and goal.left(quota.some()) <= goal.share:
                return quota
        raise SettingError(
            f"No number of units of every layer leaves {goal.share:.1%} of the {goal.what}; ask for more, or use --layout free."
        )
    cells: dict[Unit, Hashable] = {}
    room: dict[Any, int] = {}
    for kind in kinds:
        of_kind = _KindOfUnit(layers, [unit for unit in units if unit.kind == kind])
        wanted = max(1, round(ratio * of_kind.smallest))
        quota = of_kind.quota(wanted) if wanted < of_kind.smallest else None
        if quota is None:
            can = [n / of_kind.smallest for n in range(1, of_kind.smallest) if of_kind.quota(n)]
            nearest = ", ".join(f"{share:.3f}" for share in sorted(sorted(can, key=lambda share: abs(share - ratio))[:3]))
            raise SettingError(
                f"A ratio of {ratio} cannot be taken evenly from every layer"
                + (f"; these can: {nearest}. Choose one of them" if can else ", and no other can. Choose")
                + ", another --target, or --layout free."
            )
        cells |= quota.cells
        room |= quota.room
    return Quota(cells, room)


class _KindOfUnit:
    """The units of one kind, layer by layer."""

    def __init__(self, layers: Sequence[Layer], units: Sequence[Unit]) -> None:
        self._layers = layers
        self._whole = [unit for unit in units if unit.kind != MLP or len(layers[unit.layer].channels(unit)) == unit.width]
        self._counts = Counter(unit.layer for unit in self._whole)
        kind = units[0].kind
        self._grouped = kind == HEAD and any(layer.grouped_query for layer in layers)
        self.smallest = min((self._counts[i] for i in range(len(layers))), default=0)
        if not self.smallest:
            names = {HEAD: "head", KV_GROUP: "K/V group", MLP: "whole group of MLP channels"}
            raise SettingError(f"The layout cannot be uniform: there is a layer without a {names[kind]}. Use --layout free.")

    def quota(self, n: int) -> Quota | None:
        """`n` of the smallest layer's units, and the same share of the others'; None where that is no whole number."""
        cells: dict[Unit, Hashable] = {}
        room: dict[Any, int] = {}
        for unit in self._whole:
            layer = self._layers[unit.layer]
            group = layer.kv_of[unit.index] if self._grouped else None
            of_layer, rest = divmod(n * self._counts[unit.layer], self.smallest)
            of_cell, rest_of_cell = divmod(of_layer, layer.kv_heads if self._grouped else 1)
            if rest or rest_of_cell:
                return None
            cells[unit] = cell = (unit.kind, unit.layer, group)
            room[cell] = of_cell
        return Quota(cells, room)
