"""Judgement: what a model scores with and without selected units. Plain data; knows no model and no tensor."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from secateur.files import jsonio
from secateur.files.frames import frame
from secateur.report.html import number, picture, table, tag
from secateur.selection import Reached, Source
from secateur.settings import Judging, Provenance
from secateur.units import Unit


@dataclass(frozen=True)
class Evaluation:
    """What a model scores on some batches. A non-finite batch makes the loss non-finite; it is never left out.

    >>> evaluate(model, evaluation).perplexity
    """

    loss: float  # mean over all predicted tokens, or all images
    rows: int  # number of predicted tokens, or images
    batch_losses: tuple[float, ...]
    perplexity: float | None = None
    last_word_accuracy: float | None = None
    top1: float | None = None
    top5: float | None = None
    agreement: float | None = None  # without labels: the share of rows with the dense model's best class
    cosine: float | None = None  # of embeddings: the mean to the dense model's

    @property
    def figures(self) -> set[str]:
        """The names of the figures that its task has."""
        return {name for name in self.__dataclass_fields__ if getattr(self, name) is not None}

    @property
    def nonfinite_batches(self) -> int:
        return sum(not math.isfinite(loss) for loss in self.batch_losses)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in fields.items() if value is not None} | {
            "nonfinite_batches": self.nonfinite_batches
        }


def changes(dense: Evaluation, zeroed: Evaluation) -> dict[str, float]:
    """What zeroing changed: a negative delta_top1 is accuracy lost, a positive ppl_change_percent is perplexity gained."""
    differences = {"delta_loss": zeroed.loss - dense.loss}
    if dense.perplexity is not None and zeroed.perplexity is not None:
        differences["ppl_change_percent"] = 100 * (zeroed.perplexity / dense.perplexity - 1)
    for name in ("top1", "top5", "last_word_accuracy", "agreement", "cosine"):
        if getattr(dense, name) is not None:
            differences[f"delta_{name}"] = getattr(zeroed, name) - getattr(dense, name)
    return differences


@dataclass(frozen=True)
class Judgement:
    """The model with and without the selected units on the same batches, and what the units amount to.

    >>> judge(model, selection, evaluation).changes["ppl_change_percent"]
    """

    dense: Evaluation
    zeroed: Evaluation  # files call it "pruned"
    units: tuple[Unit, ...]
    candidates: int
    total_params: int
    zeroed_percent: float
    pulls: int
    forwards: int
    nonfinite_pulls: int
    goal: Reached | None = None

    def __post_init__(self) -> None:
        if self.candidates < 1 or not self.dense.figures <= self.zeroed.figures or self.dense.perplexity == 0:
            raise ValueError("it has no candidates, or the side without the units lacks a figure")

    @property
    def unit_ratio(self) -> float:
        return len(self.units) / self.candidates

    @property
    def changes(self) -> dict[str, float]:
        return changes(self.dense, self.zeroed)

    def to_json(self) -> dict[str, Any]:
        return {
            "dense": self.dense.to_json(),
            "pruned": self.zeroed.to_json(),
            **self.changes,
            "units": [unit.to_json() for unit in self.units],
            "candidates": self.candidates,
            "unit_ratio": self.unit_ratio,
            "total_params": self.total_params,
            "zeroed_percent": self.zeroed_percent,
            "pulls": self.pulls,
            "forwards": self.forwards,
            "nonfinite_pulls": self.nonfinite_pulls,
            **({"goal": self.goal.to_json()} if self.goal else {}),
        }

    def _figures(self) -> list[tuple[str, float, float]]:
        """Each figure that both have, with its values."""
        skipped = ("rows", "batch_losses")
        names = [name for name in Evaluation.__dataclass_fields__ if name in self.dense.figures and name not in skipped]
        return [(name, getattr(self.dense, name), getattr(self.zeroed, name)) for name in names]

    def to_frame(self) -> Any:
        """A pandas data frame with a row for each figure: of the dense model, of the zeroed one, and the change."""
        return frame([{"figure": name, "dense": a, "zeroed": b, "change": b - a} for name, a, b in self._figures()])

    def _repr_html_(self) -> str:
        rows = [[name.replace("_", " "), number(a), number(b), number(b - a, 3, sign=True)] for name, a, b in self._figures()]
        said = f"{len(self.units):,} of {self.candidates:,} units zeroed: {self.zeroed_percent:.2f}% of the parameters."
        return picture(table(["", "dense", "zeroed", "change"], rows, caption="Judgement"), tag("p", said, class_="note")).html

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Judgement:
        """The judgement that a file holds; a ValueError if it holds none."""
        return jsonio.decode(fields | ({"zeroed": fields["pruned"]} if "pruned" in fields else {}), cls)


@dataclass(frozen=True)
class JudgedOn:
    """The evaluation data: how they were asked for, and their digest."""

    data: str
    size: int
    max_batches: int
    data_digest: str
    rows: int

    @classmethod
    def of(cls, judging: Judging, source: Source) -> JudgedOn:
        return cls(**judging.to_json(), data_digest=source.digest, rows=len(source.rows))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class PruneRecord:
    """evaluation.json: what was judged, on what, and how long the choice took."""

    made_with: Provenance
    judged_on: JudgedOn
    judgement: Judgement
    selection_seconds: float  # of this start alone
    replayed_pulls: int  # pulls that an earlier start had made

    def to_json(self) -> dict[str, Any]:
        key = {"settings": self.made_with.to_json(), "judging": self.judged_on.to_json()}
        spent = {"selection_seconds": self.selection_seconds, "replayed_pulls": self.replayed_pulls}
        return key | self.judgement.to_json() | spent

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> PruneRecord:
        """The record that evaluation.json holds; a ValueError if it holds none."""
        try:
            return cls(
                Provenance.from_json(fields["settings"]),
                jsonio.decode(fields["judging"], JudgedOn),
                Judgement.from_json(fields),
                float(fields["selection_seconds"]),
                int(fields["replayed_pulls"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it lacks {error}") from error


SAMPLES = "samples.json"


@dataclass(frozen=True)
class Continued:
    """A text from the evaluation data that both models go on with, always by the token they rate highest."""

    prompt: str
    text: str  # how the text itself goes on
    dense: str
    small: str


@dataclass(frozen=True)
class Changed:
    """An image or a text that the small model puts into another class."""

    label: str  # the right class; empty if the data have none
    dense: str
    small: str
    image: str = ""  # a small JPEG as a data URL
    text: str = ""


@dataclass(frozen=True)
class Samples:
    """samples.json: what the dense and the small model do with a few examples of the evaluation data."""

    of: str  # a fingerprint of the small model
    continued: tuple[Continued, ...] = ()
    changed: tuple[Changed, ...] = ()
    looked_at: int = 0  # examples whose classes were compared
    differ: int = 0  # those of them whose class changed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
