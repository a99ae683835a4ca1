"""A series of cuts: nested selections of one search, a smaller model of each, and quality against time. Plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from secateur.errors import OutputError
from secateur.files import jsonio

FILE = "series.json"
DENSE = "dense"


@dataclass(frozen=True)
class Cut:
    """One model of a series: the dense one, or a cut in a folder of its own."""

    name: str  # DENSE, or the share that was asked for; a folder of this name holds the cut
    params: int
    loss: float
    quality: float  # the figure that the series names
    asked: float | None = None
    left: float | None = None  # the share of the goal's cost that is left
    time: float | None = None  # of the dense model's: measured, 1 is as long
    time_low: float | None = None  # its 95% interval
    time_high: float | None = None


@dataclass(frozen=True)
class Series:
    """The dense model and its cuts, from the largest to the smallest."""

    what: str  # the cost that the goals are in
    figure: str  # perplexity, top1 ...
    cuts: tuple[Cut, ...]

    @property
    def knee(self) -> str | None:
        """The cut after which quality falls faster than time; None if times were not measured, or all lie on a line.

        It is the point farthest below the straight line from the dense model to the smallest one, in loss over time.
        """
        points = [(cut.time, cut.loss) for cut in self.cuts]
        if len(points) < 3 or any(time is None or not math.isfinite(loss) for time, loss in points):
            return None
        times, losses = [float(time or 0) for time, _ in points], [loss for _, loss in points]
        width, height = times[0] - times[-1], losses[-1] - losses[0]
        if width <= 0 or height <= 0:
            return None
        below = [(times[0] - time) / width - (loss - losses[0]) / height for time, loss in zip(times, losses, strict=True)]
        best = max(range(len(below)), key=below.__getitem__)
        return self.cuts[best].name if below[best] > 1e-9 else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"knee": self.knee}


def read_series(folder: Path) -> Series | None:
    """The series that a folder holds; None if it holds none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        fields = jsonio.read(path)
        return jsonio.decode({name: value for name, value in fields.items() if name != "knee"}, Series)
    except (OSError, ValueError, AttributeError) as error:
        raise OutputError(
            f"{path} is not a series of Secateur's, or is damaged; delete it, and prune writes it again."
        ) from error


def folder_of(share: float) -> str:
    """The name of the folder of a cut."""
    return f"{share:g}"


def table(series: Series) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: what each model has, takes and gives."""
    titles = ["cut", "parameters", "time", series.figure, "loss"]
    rows = []
    for cut in series.cuts:
        time = "" if cut.time is None else f"{cut.time:.2f}"
        if cut.time_low is not None and cut.time_high is not None:
            time += f" ({cut.time_low:.2f} to {cut.time_high:.2f})"
        name = cut.name + (" (knee)" if cut.name == series.knee else "")
        rows.append([name, f"{cut.params:,}", time, f"{cut.quality:.4g}", f"{cut.loss:.4f}"])
    return titles, rows


def shares_of(value: Any) -> tuple[float, ...] | None:
    """Shares from the largest to the smallest, of a number, of several, or of a text such as 0.9,0.8; None if it is none."""
    if isinstance(value, str):
        value = value.split(",")
    parts: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    try:
        return tuple(sorted({float(part) for part in parts}, reverse=True)) or None
    except (TypeError, ValueError):
        return None
