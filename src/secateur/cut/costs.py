"""Costs: what units cost in parameters, FLOPs or milliseconds on this machine, and the goals expressed in these costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from secateur.cut.surgery import check_cuttable, check_uniform, kept_of, parameters_left, shrink
from secateur.errors import OutputError, SettingError
from secateur.files import jsonio
from secateur.measure import flops
from secateur.measure.speed import measure, run_of
from secateur.model.accounting import total_parameters
from secateur.model.families import Layer, anatomy
from secateur.model.loading import Opened
from secateur.model.losses import evaluating
from secateur.search.goals import Goal, Quota, Share
from secateur.settings import FLOPS, LATENCY, NONE, PARAMS, UNIFORM, Settings
from secateur.units import BLOCK, EXPERT, HEAD, KINDS, MLP, Unit, outermost
from secateur.watcher import Watcher

BATCH_SIZE = 8  # texts or images in the run whose FLOPs or time a goal limits
SHARES = (0.25, 0.5, 0.75)  # shares of each layer's units that are cut out to measure the latency table

Table = dict[str, list[list[float]]]


def goal_of(
    settings: Settings, opened: Opened, units: Sequence[Unit], table_file: Path | None, watcher: Watcher
) -> Goal | None:
    """The goal that the settings give to a search; None if the ratio alone decides.

    Experts always have a quota, since a config has one number of experts for all layers.

    `table_file` keeps the latency table of a run, so that a restarted run decides by the same numbers.
    """
    model, share = opened.model, None
    experts = any(unit.kind == EXPERT for unit in units)
    if settings.layout != NONE:
        check_cuttable(model, units)
    if settings.keep:
        what, _ = settings.keep
        if experts and what != PARAMS:
            raise SettingError(
                f"Removing experts saves no {what}, since each token takes as many as before: use --keep-params or --ratio."
            )
        share = _share_of(settings, *settings.keep, opened, units, table_file, watcher)
    kinds = {unit.kind for unit in units}
    if settings.layout == UNIFORM and BLOCK in kinds:  # any blocks may go: the others stay as they are
        if len(kinds) > 1:
            raise SettingError(
                "A uniform layout loses whole blocks or parts of every block, not both: leave one out of --target."
            )
        check_uniform(model, units[-1:])
        return share
    if settings.layout != UNIFORM and not experts:
        return share
    quota = uniform_quota(model, units, settings.ratio, share)
    if settings.layout == UNIFORM:
        check_uniform(model, quota.example())
    return quota


def _share_of(
    settings: Settings,
    what: str,
    share: float,
    opened: Opened,
    units: Sequence[Unit],
    table_file: Path | None,
    watcher: Watcher,
) -> Share:
    """The goal to keep a share of the cost `what`."""
    model = opened.model
    if what == PARAMS:
        return parameter_goal(model, units, share)
    if what == FLOPS:
        return flop_goal(model, units, share, settings.seq_len)
    weight = next(model.parameters())
    key = jsonio.fingerprint(
        [opened.digest, settings.target, settings.group_width, settings.seq_len, str(weight.device), str(weight.dtype)]
    )
    table = read_table(table_file, key, units) if table_file else None
    if table is None:
        watcher.stage("measuring what units cost on this machine")
        table = latency_table(model, units, settings.seq_len, watcher.evaluated)
    goal = latency_goal(model, units, share, settings.seq_len, table)
    if table_file:
        keep_table(table_file, key, table)
    return goal


def parameter_goal(model: nn.Module, units: Sequence[Unit], share: float) -> Share:
    """The goal to keep this share of the parameters."""
    total = total_parameters(model)
    return _goal(model, PARAMS, share, lambda removed: parameters_left(model, removed) / total, units)


def flop_goal(model: nn.Module, units: Sequence[Unit], share: float, tokens: int) -> Share:
    """The goal to keep this share of the FLOPs of a prompt, or of a batch of images."""
    shares = FlopShares(model, tokens)
    return _goal(model, FLOPS, share, lambda removed: 1 - shares.saved(removed), units)


def latency_goal(model: nn.Module, units: Sequence[Unit], share: float, tokens: int, table: Table) -> Share:
    """The goal to keep this share of the time of a prompt, or of a batch of images, as the latency table estimates it."""
    shares = FlopShares(model, tokens)

    def left(removed: Sequence[Unit]) -> float:
        by_curve: dict[str, list[Unit]] = defaultdict(list)
        for unit in outermost(removed):
            by_curve[_curve(unit)].append(unit)
        return 1 - sum(_interpolate(table[curve], shares.saved(together)) for curve, together in by_curve.items())

    return _goal(model, LATENCY, share, left, units)


def _goal(model: nn.Module, what: str, share: float, left: Callable[[Sequence[Unit]], float], units: Sequence[Unit]) -> Share:
    """A goal in shares of the cost `what`; `left` is called once for all units of the same size in a layer."""
    layers = anatomy(model)
    cost_by_size: dict[Any, float] = {}
    costs = {}
    for unit in units:
        layer = layers[unit.layer]
        # A head that shares its K/V head with no other saves that as well.
        sharing = layer.kv_of.count(layer.kv_of[unit.index]) if unit.kind == HEAD else 0
        key = (unit.kind, unit.layer, layer.size(unit), sharing)
        if key not in cost_by_size:
            cost_by_size[key] = 1 - left([unit])
        costs[unit] = cost_by_size[key]
    return Share(what, share, left, costs)


class FlopShares:
    """The share of the FLOPs of a prompt, or of a batch of images, that removing units saves.

    One run of the model counts its FLOPs and notes the sizes; the share of any units is then computed from these.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self._layers = anatomy(model)
        self._sizes: dict[tuple[int, str], tuple[int, int]] = {}  # rows and sequence length of its input

        def note_sizes(i: int, side: str) -> Callable[..., None]:
            copies = max(1, self._layers[i].experts_per_token) if side == MLP else 1  # each token is a row of several experts

            def hook(module: nn.Module, args: Any) -> None:
                x = args[0]
                self._sizes[i, side] = (copies * x.shape[:-1].numel(), x.shape[-2])

            return hook

        hooks = [
            module.register_forward_pre_hook(note_sizes(i, side))
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
        """The share of the FLOPs that a model without these units saves."""
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
            saved += projected + attended + 2 * mlp_rows * layer.width * channels * (2 + layer.gated)
        return saved / self._total


def latency_table(
    model: nn.Module, units: Sequence[Unit], tokens: int, progress: Callable[[int, int], None] | None = None
) -> Table:
    """For each curve, pairs of the share of FLOPs that a cut saves and the share of time it saves on this machine.

    They are measured on models with a quarter, a half and three quarters of the units cut out of every layer, or of the layers
    if the units are whole.
    """
    table: Table = {}
    curves = list(dict.fromkeys(map(_curve, units)))
    for n, curve in enumerate(curves):
        points = [[0.0, 0.0]]
        previous: list[Unit] = []
        for m, share in enumerate(SHARES):
            cut = _share_of_each_layer([unit for unit in units if _curve(unit) == curve], share)
            if cut != previous:  # with few units, a half and three quarters may be the same ones
                previous = cut
                timing = measure(model, shrink(model, cut), batch_sizes=(BATCH_SIZE,), tokens=tokens, new_tokens=1).timings[0]
                points.append([1 - 1 / timing.flop_ratio, 1 - 1 / timing.speedup.value])
            if progress:
                progress(n * len(SHARES) + m + 1, len(curves) * len(SHARES))
        # A larger cut never saves less time, even if a noisy clock says so.
        table[curve] = [[x, max(y for _, y in points[: i + 1])] for i, (x, _) in enumerate(points)]
    return table


@dataclass(frozen=True)
class _TableFile:
    """The fields of latency.json."""

    key: str
    table: dict[str, list[tuple[float, float]]]


def read_table(path: Path, key: str, units: Sequence[Unit]) -> Table | None:
    """The latency table that an earlier start of this run wrote; None if there is none, or if it is another run's."""
    if not path.exists():
        return None
    try:
        stored = jsonio.decode(jsonio.read(path), _TableFile)
        if stored.key != key:
            return None
        if set(stored.table) != {*map(_curve, units)} or not all(
            points and np.isfinite(points).all() for points in stored.table.values()
        ):
            raise ValueError("a point is missing")
        return {side: [list(point) for point in points] for side, points in stored.table.items()}
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} is not a latency table of Secateur's, or is damaged; delete it to measure again.") from error


def keep_table(path: Path, key: str, table: Table) -> None:
    """Write the latency table of the run that the key identifies."""
    jsonio.write(path, {"key": key, "table": table})


def _curve(unit: Unit) -> str:
    """The curve of the latency table that a unit is on: of its kind for a whole, of its side of a block for a part."""
    return unit.kind if unit.whole else unit.side


def _share_of_each_layer(units: Sequence[Unit], share: float) -> list[Unit]:
    """This share of the units of each layer, or of all if they are whole; the first ones."""
    if units[0].whole:
        return list(units[: round(share * len(units))])
    by_layer: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        by_layer[unit.layer].append(unit)
    return [unit for of_layer in by_layer.values() for unit in of_layer[: round(share * len(of_layer))]]


def _interpolate(points: Sequence[Sequence[float]], x: float) -> float:
    """The value at `x`: linear between the points, and beyond the last one along the line through the last two."""
    xs, ys = zip(*points, strict=True)
    if x <= xs[-1] or len(xs) < 2:
        return float(np.interp(x, xs, ys))
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if xs[-1] > xs[-2] else 0.0
    return float(ys[-1] + slope * (x - xs[-1]))


def uniform_quota(model: nn.Module, units: Sequence[Unit], ratio: float, goal: Share | None = None) -> Quota:
    """The quota that takes equally many units from every layer: nearest to the ratio or, with a goal, the least that meets it.

    A smaller last group of MLP channels stays. If several heads share a K/V head, all K/V heads lose equally many heads. If
    layers differ in size (Swin), all lose the same share.
    """
    layers = anatomy(model)
    kinds = list(dict.fromkeys(unit.kind for unit in units))
    if goal:
        if len(kinds) > 1:
            raise SettingError("A uniform layout with a goal takes units of one kind: choose --target head, mlp or kv_group.")
        of_kind = _UnitsOfKind(layers, units)
        for n in range(1, of_kind.most + 1):
            quota = of_kind.quota(n)
            if quota and goal.left(quota.example()) <= goal.share:
                return replace(quota, share=goal)
        advice = "" if EXPERT in kinds else ", or use --layout free"
        raise SettingError(
            f"No uniform cut leaves at most {goal.share:.1%} of the {goal.what}; ask for a larger share{advice}."
        )
    cells: dict[Unit, Hashable] = {}
    room: dict[Any, int] = {}
    for kind in kinds:
        of_kind = _UnitsOfKind(layers, [unit for unit in units if unit.kind == kind])
        wanted = max(1, round(ratio * of_kind.smallest))
        quota = of_kind.quota(wanted) if wanted <= of_kind.most else None
        if quota is None:
            possible = [n / of_kind.smallest for n in range(1, of_kind.most + 1) if of_kind.quota(n)]
            nearest = ", ".join(f"{share:.3f}" for share in sorted(sorted(possible, key=lambda share: abs(share - ratio))[:3]))
            raise SettingError(
                f"A ratio of {ratio} cannot be taken evenly from every layer"
                + (f"; these can: {nearest}. Choose one of them, " if possible else ", and no other ratio can. Choose ")
                + ("another --target." if kind == EXPERT else "another --target, or --layout free.")
            )
        cells |= quota.cells
        room |= quota.room
    return Quota(cells, room)


class _UnitsOfKind:
    """The units of one kind, layer by layer."""

    def __init__(self, layers: Sequence[Layer], units: Sequence[Unit]) -> None:
        self._layers = layers
        self._whole = [unit for unit in units if unit.kind != MLP or layers[unit.layer].size(unit) == unit.width]
        self._counts = Counter(unit.layer for unit in self._whole)
        kind = units[0].kind
        self._grouped = kind == HEAD and any(layer.grouped_query for layer in layers)
        concerned = [i for i, layer in enumerate(layers) if layer.experts or kind != EXPERT]
        self.smallest = min((self._counts[i] for i in concerned), default=0)
        stay = max(layers[i].experts_per_token for i in concerned) if kind == EXPERT else 1
        self.most = self.smallest - stay  # how many may go from the smallest layer
        if not self.smallest:
            what = f"whole {KINDS[kind].words}"
            raise SettingError(f"The layout cannot be uniform: a layer has no {what}. Use --layout free.")

    def quota(self, n: int) -> Quota | None:
        """The quota of `n` units in the smallest layer and the same share of the others; None if that is not a whole number."""
        cells: dict[Unit, Hashable] = {}
        room: dict[Any, int] = {}
        for unit in self._whole:
            layer = self._layers[unit.layer]
            group = layer.kv_of[unit.index] if self._grouped else None
            of_layer, layer_remainder = divmod(n * self._counts[unit.layer], self.smallest)
            of_cell, cell_remainder = divmod(of_layer, layer.kv_heads if self._grouped else 1)
            if layer_remainder or cell_remainder:
                return None
            cells[unit] = cell = (unit.kind, unit.layer, group)
            room[cell] = of_cell
        return Quota(cells, room)
