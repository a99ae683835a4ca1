"""Moments: weighted sums over what enters the output projections of a model, from which repairs and OBS scores are computed.

A position x has the weight 1 / (|x|^2 + c), where c is the median |x|^2. Language models have a few positions (the first of a
text, some delimiters) whose activations are a thousand times larger than the others'. With equal weights these positions decide
everything: when SmolLM2-135M's block 28 lost the channel behind them, the cut cost 0.05 nats and its repair 2.4. The next norm
in the model makes all positions count alike, and so do the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from secateur.model.families import Layer, anatomy, input_dim, layer_of, weight_of
from secateur.model.losses import Batch, evaluating, outputs, real_positions
from secateur.units import HEAD, KINDS, MLP, Unit

DAMPING = 0.03  # the ridge of a least-squares problem, as a multiple of the mean diagonal entry of its matrix


class Sums(Protocol):
    """Something that is computed from what enters a projection, some positions at a time."""

    def add(self, x: Tensor) -> None:
        """Take in (positions, channels)."""
        ...


class Weights:
    """The weights of positions, 1 / (|x|^2 + c)."""

    def __init__(self) -> None:
        self.usual: Tensor | None = None  # c: the median |x|^2 of the first batch

    def of(self, x: Tensor) -> Tensor:
        """The weight of each row of (positions, channels) in float32."""
        squares = x.square().sum(1)
        if self.usual is None:
            self.usual = squares.median().clamp(min=torch.finfo(x.dtype).tiny)
        return (squares + self.usual).reciprocal()


class Squares:
    """The weighted sum of the squares of each channel over the positions seen so far."""

    def __init__(self) -> None:
        self.weights = Weights()
        self.sums = torch.zeros(())

    def add(self, x: Tensor) -> None:
        if len(x):
            x = x.float()
            self.sums = self.sums.to(x.device) + (self.weights.of(x)[:, None] * x.square()).sum(0)


class Moments:
    """Weighted sums over the positions seen so far: of each channel, and of the products of some channels with all.

    The sums are in float32, which every device has. That is precise enough, since no weighted position is large: a repair
    computed from them in float64 differs by 4e-6 from one with float64 sums (SmolLM2-135M, 16 batches).
    """

    def __init__(self, projection: nn.Module, channels: Tensor | None = None) -> None:
        weight = weight_of(projection)
        n = weight.shape[input_dim(projection)]
        self.channels = (torch.arange(n) if channels is None else channels).to(weight.device)
        self.weighing = Weights()
        self.weights = torch.zeros((), device=weight.device)
        self.sums = torch.zeros(n, device=weight.device)
        self.products = torch.zeros(len(self.channels), n, device=weight.device)

    def add(self, x: Tensor) -> None:
        if not len(x):
            return
        x = x.float()  # (positions, channels)
        weights = self.weighing.of(x)
        weighted = weights[:, None] * x
        self.weights += weights.sum()
        self.sums += weighted.sum(0)
        if len(self.products):
            self.products += weighted.index_select(1, self.channels).T @ x

    def means(self) -> tuple[Tensor, Tensor]:
        """The weighted means of the channels (channels,) and of the products (some channels, channels), in float64."""
        total = self.weights.item() or 1.0  # 0 if no position was seen: then all sums are 0 too
        return self.sums.to("cpu", torch.float64) / total, self.products.to("cpu", torch.float64) / total


def gather(
    model: nn.Module,
    moments: Mapping[nn.Module, Sums],
    batches: Sequence[Batch],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run the batches through the model and add to the sums what enters each projection, without padding."""
    real: Tensor | None = None  # the positions of the current batch that are not padding; None for all

    def add(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].flatten(0, -2)
        moments[module].add(x if real is None else x[real.to(x.device)])

    handles = [projection.register_forward_pre_hook(add) for projection in moments]
    try:
        with torch.inference_mode(), evaluating(model):
            for batch in batches:
                real = real_positions(batch)
                outputs(model, batch)
                if progress:
                    progress(1)
    finally:
        for handle in handles:
            handle.remove()


def fills_of(
    model: nn.Module, units: Sequence[Unit], batches: Sequence[Batch], progress: Callable[[int, int], None] | None = None
) -> Fills:
    """What stands in for channels of these units when they are gone; the batches are run once.

    >>> meter = DamageMeter(model, batches, fills=fills_of(model, units, batches))
    """
    layers = anatomy(model)
    places = dict.fromkeys((unit.layer, KINDS[unit.kind].sides[0]) for unit in units if not unit.whole)
    moments = {
        (i, side): Moments(_projection(layers[i], side))
        for i, side in places
        if not (layers[i].experts and side == MLP)  # those of experts are no modules of their own
    }
    done = 0

    def report(n: int) -> None:
        nonlocal done
        done += n
        if progress:
            progress(done, len(batches))

    gather(model, {_projection(layers[i], side): one for (i, side), one in moments.items()}, batches, report)
    return Fills.of_moments(layers, moments)


Place = tuple[int, str]  # an output projection: its block, and its side, HEAD or MLP


class Fill(NamedTuple):
    """How some channels follow from others: x[targets] = offset + (x[sources] - means) @ matrix."""

    targets: Tensor
    sources: Tensor
    matrix: Tensor  # (sources, targets)
    means: Tensor  # of the sources; zeros if the projection has no bias that could take an offset over
    offset: Tensor  # (targets,)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., channels) with the targets filled in."""
        given = x.index_select(-1, self.sources).float() - self.means
        return x.index_copy(-1, self.targets, (self.offset + given @ self.matrix).to(x.dtype))

    def on(self, device: torch.device) -> Fill:
        return Fill(*(one.to(device) for one in self))


def _on_one_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method on one thread: workers have different numbers of threads, and may not differ in the last bit."""

    @functools.wraps(method)
    def called(*args: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return method(*args)
        finally:
            torch.set_num_threads(threads)

    return called


class Fills:
    """What the channels that stay say of those that go: their best linear prediction, by the moments of the dense model.

    To run a projection on predictions in place of removed channels is to run it repaired by least squares: W x with x_R = P x_K
    is (W_K + W_R P) x_K. So the damage of a unit whose channels are filled in is its damage after repair. A ridge on the
    moments pulls predictions towards the mean. `commit` removes channels for good. Of each projection the inverse H^-1 of the
    kept channels' moments is held, in float64, and updated in closed form (optimal brain surgeon).
    """

    def __init__(self, layers: Sequence[Layer], inverse: Mapping[Place, Tensor], means: Mapping[Place, Tensor]) -> None:
        self._layers = layers
        self.places = {_projection(layer, side): (i, side) for i, layer in enumerate(layers) for side in (HEAD, MLP)}
        self._inverse, self._means = dict(inverse), means
        self._kept = {place: torch.arange(len(mean)) for place, mean in means.items()}  # channels
        self._device = {place: weight_of(projection).device for projection, place in self.places.items() if place in means}
        self._committed: dict[Place, Fill] = {}  # on the devices of the projections, as runs need them

    @classmethod
    def of_moments(cls, layers: Sequence[Layer], moments: Mapping[Place, Moments]) -> Fills:
        inverse, means = {}, {}
        for (layer, side), one in moments.items():
            mean, gram = one.means()
            if isinstance(_projection(layers[layer], side).bias, Tensor):
                gram = gram - mean[:, None] * mean  # the bias takes the mean over
            else:
                mean = torch.zeros_like(mean)
            ridge = DAMPING * gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
            inverse[layer, side] = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
            means[layer, side] = mean
        return cls(layers, inverse, means)

    def state(self) -> dict[str, Tensor]:
        """What `of_state` makes the same from, as long as nothing is committed."""
        inverses = {f"{layer} {side} inverse": one for (layer, side), one in self._inverse.items()}
        return inverses | {f"{layer} {side} means": one for (layer, side), one in self._means.items()}

    @classmethod
    def of_state(cls, layers: Sequence[Layer], state: Mapping[str, Tensor]) -> Fills:
        parts: dict[str, dict[Place, Tensor]] = {"inverse": {}, "means": {}}
        for name, tensor in state.items():
            layer, side, what = name.split()
            parts[what][int(layer), side] = tensor
        return cls(layers, parts["inverse"], parts["means"])

    @_on_one_thread
    def of(self, place: Place, channels: Sequence[int]) -> Fill:
        """The prediction of these channels from all others that stay.

        Channels that are committed are predicted with all of their projection, if no other channel is asked for.
        """
        kept = self._kept[place]
        goes = torch.isin(kept, torch.tensor(list(channels)))
        if not goes.any():
            return self._committed[place]
        return self._predicted(place, goes).on(self._device[place])

    def _predicted(self, place: Place, goes: Tensor) -> Fill:
        """The prediction of some kept channels from the other ones, on the CPU."""
        kept, inverse = self._kept[place], self._inverse[place]
        targets, sources = kept[goes], kept[~goes]
        matrix = -torch.linalg.solve(inverse[goes][:, goes], inverse[goes][:, ~goes]).T  # (sources, targets)
        means = self._means[place]
        return Fill(targets, sources, matrix.float(), means[sources].float(), means[targets].float())

    def kept(self, place: Place, channels: Sequence[int]) -> Tensor:
        """Those of the channels that still stay."""
        own = torch.tensor(list(channels))
        return own[torch.isin(own, self._kept[place])]

    @_on_one_thread
    def commit(self, unit: Unit) -> None:
        """Remove the unit's channels for good; the predictions of those that went before are made from what stays now."""
        for part in layer_of(self._layers, unit).ranges(unit):
            place = (unit.layer, part.side)
            if place not in self._inverse:
                continue
            goes = torch.isin(self._kept[place], torch.tensor(list(part.channels)))
            if not goes.any():
                continue
            fill, before = self._predicted(place, goes), self._committed.get(place)
            stays, inverse = ~goes, self._inverse[place]
            if stays.any():
                update = torch.linalg.solve(inverse[goes][:, goes], inverse[goes][:, stays])
                self._inverse[place] = inverse[stays][:, stays] - inverse[stays][:, goes] @ update
            else:
                self._inverse[place] = inverse.new_zeros(0, 0)
            self._kept[place] = fill.sources
            fill = _after(before.on(fill.matrix.device), fill, stays, goes) if before else fill
            self._committed[place] = fill.on(self._device[place])

    def residuals(self, place: Place, x: Tensor, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        """What the other kept channels do not say of each group's: (..., channels of the group) of the input x."""
        kept, inverse = self._kept[place], self._inverse[place]
        position = torch.full((int(x.shape[-1]),), -1)
        position[kept] = torch.arange(len(kept))
        means = self._means[place].float().to(x.device)
        spread = (x.float() - means).index_select(-1, kept.to(x.device)) @ inverse.float().to(x.device)
        found = []
        for channels in groups:
            own = position[torch.tensor(list(channels))]
            own = own[own >= 0]
            block = torch.linalg.inv(inverse[own][:, own]).float().to(x.device)
            found.append(spread.index_select(-1, own.to(x.device)) @ block)
        return found


def _after(before: Fill, fill: Fill, stays: Tensor, goes: Tensor) -> Fill:
    """The predictions of earlier channels and new ones, all from the sources of the new ones.

    What was predicted from a channel that goes is predicted from its own prediction (the law of iterated expectations).
    """
    earlier = before.matrix[stays] + fill.matrix @ before.matrix[goes]
    return Fill(
        torch.cat([before.targets, fill.targets]),
        fill.sources,
        torch.cat([earlier, fill.matrix], dim=1),
        fill.means,
        torch.cat([before.offset, fill.offset]),
    )


def _projection(layer: Layer, side: str) -> nn.Module:
    return {HEAD: layer.out, MLP: layer.mlp_out}[side]
