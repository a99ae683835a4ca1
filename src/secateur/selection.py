"""Selection: the ordered units that a search chose, with its settings and every measurement. Plain data; knows no model.

This is the JSON that moves between commands: `select` writes it, `evaluate` and `shrink` read it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from secateur.errors import SelectionError, SettingError, first_line
from secateur.files import jsonio
from secateur.files.frames import frame
from secateur.report.map import map_of, rows_of
from secateur.search.policies import GRADIENT_PASSES
from secateur.settings import Provenance
from secateur.units import Unit

FORMAT = 1  # of selection.json


@dataclass(frozen=True)
class Source:
    """Where batches came from: enough to say which data it was, and to recognise it later."""

    name: str
    split: str
    files: tuple[str, ...] = ()  # digests of whole files, where a file is read whole
    rows: tuple[str, ...] = ()  # digests of the single windows or images
    marks: tuple[str, ...] = ()  # by which the same content is known in another form; none in older files

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(" ".join(self.rows).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        fields = {"name": self.name, "split": self.split, "files": list(self.files), "rows": list(self.rows)}
        return fields | ({"marks": list(self.marks)} if self.marks else {})


def paired_damages(base_losses: Sequence[float], masked_losses: Sequence[float]) -> tuple[float, ...]:
    """Masked minus base loss, batch by batch; their mean is the damage of Eq. 18."""
    return tuple(masked - base for masked, base in zip(masked_losses, base_losses, strict=True))


@dataclass(frozen=True)
class Pull:
    """One paired candidate evaluation: base and masked loss on the same batches (Eq. 16-19).

    >>> selection.trace[0].unit, selection.trace[0].damage
    """

    step: int
    unit: Unit
    batches: tuple[int, ...]
    base_losses: tuple[float, ...]
    masked_losses: tuple[float, ...]
    damage: float
    reward: float
    forwards: int  # model passes that it took

    def __post_init__(self) -> None:
        if not len(self.batches) == len(self.base_losses) == len(self.masked_losses):
            raise ValueError("a pull has a base and a masked loss for each of its batches")

    @property
    def damages(self) -> tuple[float, ...]:
        """The paired damage on each batch."""
        return paired_damages(self.base_losses, self.masked_losses)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"unit": self.unit.to_json()}


@dataclass(frozen=True)
class Step:
    """How one unit was chosen. The mean reward and the posterior mean are the chosen unit's (section 3.7).

    >>> [(step.unit, step.damage, step.sure) for step in selection.steps]
    """

    step: int
    unit: Unit
    mean_reward: float
    posterior_mean: float
    unit_pulls: int
    pool: int  # candidates in the pool
    evaluated: int  # those that were measured
    broken: int  # those whose mask made the loss non-finite
    sure: float | None = None  # the probability that the choice is right: docs/search.md; None: unknown
    damage: float = math.nan  # of the unit, as the policy believes; the mean of its pulls where it says nothing
    passes: float = 0.0  # forward passes of one batch until then; partial runs count in part

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"unit": self.unit.to_json()}


@dataclass(frozen=True)
class Reached:
    """A goal, and what the selected units reached of it: shares of the dense model's cost that are left."""

    what: str
    asked: float
    got: float
    measured: float | None = None  # of a latency goal: what was measured on the smaller model

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Selection:
    """Ordered units, the settings that led to them, and the trace of every pull.

    >>> selection.save("sel.json")
    >>> Selection.load("sel.json").units == selection.units
    True
    """

    units: tuple[Unit, ...]
    made_with: Provenance | None = None  # settings and digests; None where `select` was called directly
    steps: tuple[Step, ...] = ()
    trace: tuple[Pull, ...] = ()
    scores: dict[Unit, float] = field(default_factory=dict)  # of a static method: every candidate's score
    versions: dict[str, str] = field(default_factory=dict)
    calibration: Source | None = None  # the data that chose, so that they are kept from judging
    goal: Reached | None = None
    gradient_batches: int = 0  # batches whose gradients the search took
    passes: float = 0.0  # what the choice cost, in forward passes of one batch; partial runs count in part
    candidates: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by kind: units in each layer; none in older files
    estimates: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)  # by kind, layer and index: see `select`

    @property
    def pulls(self) -> int:
        """Paired candidate evaluations spent: the tables' Evals."""
        return len(self.trace)

    @property
    def forwards(self) -> int:
        """Model passes spent; fewer than two for each batch of a pull, since base losses are shared within a step."""
        return sum(pull.forwards for pull in self.trace) + GRADIENT_PASSES * self.gradient_batches

    @property
    def progress(self) -> tuple[tuple[float, float], ...]:
        """After each chosen unit: the forward passes so far, and the sum of the damages believed of the chosen units."""
        spent_before = self.passes - self.steps[-1].passes if self.steps else 0.0  # on scores
        damages = itertools.accumulate(step.damage for step in self.steps)
        return tuple((spent_before + step.passes, damage) for step, damage in zip(self.steps, damages, strict=True))

    @property
    def nonfinite_pulls(self) -> int:
        return sum(not math.isfinite(pull.damage) for pull in self.trace)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "settings": self.made_with.to_json() if self.made_with else {},
            "versions": self.versions,
            "pulls": self.pulls,
            "forwards": self.forwards,
            "nonfinite_pulls": self.nonfinite_pulls,
            **({"gradient_batches": self.gradient_batches} if self.gradient_batches else {}),
            "passes": self.passes,
            "calibration": self.calibration.to_json() if self.calibration else {},
            "goal": self.goal.to_json() if self.goal else {},
            **({"candidates": self.candidates} if self.candidates else {}),
            **({"estimates": self.estimates} if self.estimates else {}),
            "units": [unit.to_json() for unit in self.units],
            "steps": [step.to_json() for step in self.steps],
            "scores": [{**unit.to_json(), "score": score} for unit, score in self.scores.items()],
            "trace": [pull.to_json() for pull in self.trace],
        }

    def to_frame(self) -> Any:
        """A pandas data frame with a row for each candidate: its damage with its interval, measurements, order."""
        return frame(rows_of(self))

    def _repr_html_(self) -> str:
        return map_of(self).html

    def save(self, path: str | Path) -> None:
        """Write the selection as one JSON document with a line for each pull, so that line tools can read it too."""
        fields = jsonio.to_json(self.to_json())
        lists = {name: fields.pop(name) for name in ("units", "steps", "scores", "trace")}
        settings = json.dumps(fields.pop("settings"), indent=1, ensure_ascii=False)
        parts = [f'"settings": {settings}', *(f'"{name}": {json.dumps(value)}' for name, value in fields.items())]
        for name, items in lists.items():
            rows = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in items)
            parts.append(f'"{name}": [\n  {rows}\n]' if items else f'"{name}": []')
        jsonio.write_text(Path(path), "{\n" + ",\n".join(parts) + "\n}\n")

    @classmethod
    def load(cls, path: str | Path) -> Selection:
        """Read a selection.json.

        >>> Selection.load("out/selection.json").units
        """
        try:
            fields = jsonio.read(Path(path))
        except OSError as error:
            raise SelectionError(f"Cannot read the selection {path}: {error.strerror or error}.") from error
        except ValueError as error:
            raise SelectionError(f"{path} is not a selection: it does not hold valid JSON ({error}).") from error
        if not isinstance(fields, dict) or "units" not in fields:
            raise SelectionError(f"{path} is not a selection: it has no list of units.")
        if fields.get("format") != FORMAT:
            raise SelectionError(f"{path} has format {fields.get('format')!r}; this version of Secateur reads format {FORMAT}.")
        try:
            return _decoded(fields)
        except (ValueError, SettingError) as error:
            raise SelectionError(f"{path} is a damaged selection: {first_line(error)}") from error


@dataclass(frozen=True)
class _Scored:
    """A unit and its score, as selection.json lists them."""

    kind: str
    layer: int
    index: int
    score: float
    width: int = 0
    channels: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Document:
    """selection.json, as it is read."""

    settings: dict[str, Any]
    versions: dict[str, str]
    calibration: dict[str, Any]
    units: tuple[Unit, ...]
    steps: tuple[Step, ...]
    scores: tuple[_Scored, ...]
    trace: tuple[Pull, ...]
    goal: dict[str, Any] = field(default_factory=dict)
    gradient_batches: int = 0
    passes: float = 0.0
    candidates: dict[str, tuple[int, ...]] = field(default_factory=dict)
    estimates: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)


def _decoded(fields: dict[str, Any]) -> Selection:
    document = jsonio.decode(fields, _Document)
    if len(set(document.units)) < len(document.units):
        raise ValueError("a unit is in it twice")
    return Selection(
        units=document.units,
        made_with=Provenance.from_json(document.settings) if document.settings else None,
        steps=document.steps,
        trace=document.trace,
        scores={Unit(row.kind, row.layer, row.index, row.width, row.channels): row.score for row in document.scores},
        versions=document.versions,
        calibration=jsonio.decode(document.calibration, Source) if document.calibration else None,
        goal=jsonio.decode(document.goal, Reached) if document.goal else None,
        gradient_batches=document.gradient_batches,
        passes=document.passes,
        candidates=document.candidates,
        estimates=document.estimates,
    )
