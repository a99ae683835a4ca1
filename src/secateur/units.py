"""Units: what may be removed, and how many of them (Eq. 1-6). Knows no model and no tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from secateur.errors import SettingError, not_one_of

HEAD, MLP, KV_GROUP, EXPERT = "head", "mlp", "kv_group", "expert"
ATTENTION, MLP_LAYER, BLOCK = "attention", "mlp_layer", "block"
GROUP_WIDTH = 32  # g0, the paper's nominal number of MLP channels in a group


@dataclass(frozen=True)
class Kind:
    """A kind of unit. Its `sides` are the halves of a block it takes channels from: HEAD is the attention, MLP the MLP.

    A `whole` unit is all of its sides: without it they add nothing to the block, not even the bias of their output projection,
    and a block without both gives what it gets.
    """

    sides: tuple[str, ...]
    label: str  # in tables
    words: str  # in sentences
    whole: bool = False


KINDS = {
    HEAD: Kind((HEAD,), "Head", "attention head"),
    MLP: Kind((MLP,), "MLP group", "MLP channel group"),
    KV_GROUP: Kind((HEAD,), "K/V group", "K/V group"),
    EXPERT: Kind((MLP,), "Expert", "expert"),
    ATTENTION: Kind((HEAD,), "Attention", "whole attention", whole=True),
    MLP_LAYER: Kind((MLP,), "MLP", "whole MLP", whole=True),
    BLOCK: Kind((HEAD, MLP), "Block", "whole block", whole=True),
}
TARGETS = {  # those with a name; `kinds_of` reads others
    "head": (HEAD,),
    "mlp": (MLP,),
    "both": (HEAD, MLP),
    "kv_group": (KV_GROUP,),
    "kv_group+mlp": (KV_GROUP, MLP),
    "expert": (EXPERT,),
    "attention": (ATTENTION,),
    "mlp_layer": (MLP_LAYER,),
    "block": (BLOCK,),
    "attention+mlp_layer": (ATTENTION, MLP_LAYER),
    "block+kv_group+mlp": (BLOCK, KV_GROUP, MLP),
}


def kinds_of(target: str) -> tuple[str, ...]:
    """The kinds of units that a target allows: one of TARGETS, or kinds joined by +."""
    if target in TARGETS:
        return TARGETS[target]
    kinds = target.split("+")
    if len(kinds) == 1 or not {*kinds} <= {*KINDS}:
        raise not_one_of("target", target, [*TARGETS, "other kinds joined by +"])
    if len({*kinds}) < len(kinds) or EXPERT in kinds or {HEAD, KV_GROUP} <= {*kinds}:
        raise SettingError(
            f"The target is {target!r}, but a kind can be in it once, heads and K/V groups hold the same channels, and experts "
            "go alone: leave one out."
        )
    return tuple(kinds)


def nested(target: str) -> bool:
    """Whether a unit of the target may be inside another one."""
    kinds = [KINDS[kind] for kind in kinds_of(target)]
    return any(a is not b and a.whole and {*b.sides} <= {*a.sides} for a in kinds for b in kinds)


@dataclass(frozen=True, order=True)
class Unit:
    """A typed structured candidate: head, MLP channel group, K/V group, expert... `index` of block `layer`; counted from 0.

    A head is a query head; a K/V group is a K/V head with all the query heads that share it. An MLP group carries the nominal
    `width` of its partition, so that a unit alone says which channels it means; in a block with experts these are channels of
    all of them. A group that was not made by address lists its `channels`.

    >>> Unit("head", layer=3, index=1).layer
    3
    """

    kind: str
    layer: int
    index: int
    width: int = 0
    channels: tuple[int, ...] = ()  # in ascending order; empty: those from index * width on

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise not_one_of("kind of a unit", self.kind, KINDS)
        if self.layer < 0 or self.index < 0 or self.width < 0:
            raise SettingError(
                f"A unit's layer, index and width are counted from 0, not {self.layer}, {self.index}, {self.width}."
            )
        object.__setattr__(self, "width", (self.width or GROUP_WIDTH) if self.kind == MLP else 0)
        listed = list(self.channels)
        if listed and (listed != sorted(set(listed)) or listed[0] < 0 or len(listed) > self.width):
            raise SettingError(f"The channels of {self} must be at most {self.width} different ones in ascending order.")

    @property
    def side(self) -> str:
        """The half of the block that the unit changes first: HEAD for the attention, MLP for the MLP."""
        return KINDS[self.kind].sides[0]

    @property
    def whole(self) -> bool:
        return KINDS[self.kind].whole

    def __str__(self) -> str:
        return f"{self.kind} {self.layer}.{self.index}"

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"kind": self.kind, "layer": self.layer, "index": self.index}
        fields |= {"width": self.width} if self.kind == MLP else {}
        return fields | ({"channels": list(self.channels)} if self.channels else {})


def enumerate_units(
    heads: Sequence[int],
    mlp_widths: Sequence[int],
    *,
    target: str,
    group_width: int = GROUP_WIDTH,
    kv_heads: Sequence[int] | None = None,
    experts: Sequence[int] = (),
    orders: Sequence[Sequence[int]] | None = None,
) -> list[Unit]:
    """All candidates U of a model with `heads[l]` heads and `mlp_widths[l]` MLP channels in block l (Eq. 1-5).

    Without `kv_heads` every head has a K/V head of its own; `experts[l]` is 0 in a block without experts. `orders[l]` are the
    MLP channels of block l in the order in which they are cut into groups; without it they are in the order of their address.
    """
    kinds = kinds_of(target)
    if group_width < 1:
        raise SettingError(f"The MLP group width is {group_width}, but must be at least 1.")
    groups = [math.ceil(width / group_width) for width in mlp_widths]  # Q_l; the last group may be smaller (Eq. 2)
    counts = {HEAD: heads, MLP: groups, KV_GROUP: heads if kv_heads is None else kv_heads, EXPERT: experts}
    counts[ATTENTION] = [min(1, n) for n in heads]
    counts[MLP_LAYER] = [int(n > 0 and not e) for n, e in zip(mlp_widths, experts or [0] * len(mlp_widths), strict=True)]
    counts[BLOCK] = [a * b for a, b in zip(counts[ATTENTION], counts[MLP_LAYER], strict=False)]
    units = [Unit(kind, layer, i, group_width) for kind in kinds for layer, n in enumerate(counts[kind]) for i in range(n)]
    return [_listing(unit, orders[unit.layer]) if orders and unit.kind == MLP else unit for unit in units]


def _listing(unit: Unit, order: Sequence[int]) -> Unit:
    """The group with its channels, which are in this order."""
    start = unit.index * unit.width
    return replace(unit, channels=tuple(sorted(order[start : start + unit.width])))


def counts_by_layer(units: Iterable[Unit]) -> dict[str, tuple[int, ...]]:
    """For each kind, how many units each layer has: one more than the largest index there.

    >>> counts_by_layer(enumerate_units([3, 3], [], target="head"))
    {'head': (3, 3)}
    """
    ends: dict[str, dict[int, int]] = {}
    for unit in units:
        of_kind = ends.setdefault(unit.kind, {})
        of_kind[unit.layer] = max(of_kind.get(unit.layer, 0), unit.index + 1)
    return {kind: tuple(found.get(layer, 0) for layer in range(max(found) + 1)) for kind, found in ends.items()}


def selectable(units: Iterable[Unit], selected: Sequence[Unit]) -> list[Unit]:
    """The units that are not inside the wholes among the selected ones."""
    gone = {(unit.layer, side) for unit in selected if unit.whole for side in KINDS[unit.kind].sides}
    return [unit for unit in units if not all((unit.layer, side) in gone for side in KINDS[unit.kind].sides)]


def outermost(units: Iterable[Unit]) -> list[Unit]:
    """The units that are not inside another one of them: those of an attention that went later are in it."""
    units = list(units)
    wholes = [unit for unit in units if unit.whole]
    return [unit for unit in units if selectable([unit], [whole for whole in wholes if whole != unit])]


def check_ratio(ratio: float) -> None:
    if not 0 < ratio < 1:  # also refuses nan
        raise SettingError(f"The ratio is {ratio}, but must lie between 0 and 1, both excluded: 0.10 selects a tenth.")


def n_selected(ratio: float, n_candidates: int) -> int:
    """How many of `n_candidates` units a nominal ratio selects (Eq. 6); halves go to the even number, as Python rounds."""
    check_ratio(ratio)
    if not n_candidates:
        raise SettingError("There is nothing to remove: the model has no layers, or no units of this --target.")
    k = max(1, round(ratio * n_candidates))
    if k >= n_candidates:
        raise SettingError(
            f"A ratio of {ratio} selects {k} of {n_candidates} candidates and leaves none; choose a smaller one."
        )
    return k
