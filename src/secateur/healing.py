"""Healing: what decides a short distillation from the dense model into the cut one. Knows no model and no tensor."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from secateur.errors import SettingError
from secateur.fields import MOST, Checked, setting

HEALING = "Healing"  # the section of these settings
SECONDS, TOKENS, EXAMPLES, STEPS = "seconds", "tokens", "examples", "steps"
UNITS = {  # what may stand after a number -> what it counts, and how many of these
    "s": (SECONDS, 1),
    "min": (SECONDS, 60),
    "h": (SECONDS, 3600),
    TOKENS: (TOKENS, 1),
    "texts": (EXAMPLES, 1),
    "images": (EXAMPLES, 1),
    EXAMPLES: (EXAMPLES, 1),
    STEPS: (STEPS, 1),
}
PRECISIONS = ("float32", "bfloat16")
DEFAULT_AMOUNT = "10min"  # of the command that does nothing else


@dataclass(frozen=True)
class Healing(Checked):
    """What decides how a cut model is healed.

    >>> Healing("300steps", lora=8)
    """

    amount: str | None = setting(
        None,
        HEALING,
        "Train the cut model to give what the dense one gives: 30min or 90s, which timed steps turn into steps once; "
        "200000tokens, 5000images, 5000texts or 300steps. Kept only if it helps. [default: none]",
        flag="heal",
        words="amount of healing",
        unset="",
    )
    data: str | None = setting(
        None,
        HEALING,
        "Data to heal on, named as the others; never those that judge. [default: the train split of --calibration]",
        flag="heal_data",
        words="healing data",
        unset="",
    )
    size: int | None = setting(
        None,
        HEALING,
        "Texts or images to heal on, at most; the last few only judge the healing. [default: 20000]",
        flag="heal_size",
        words="healing size",
        least=2,
        by_task=(20000, 20000),
    )
    batch_size: int | None = setting(
        None,
        HEALING,
        "Texts or images in a step, --batch-size of them at a time. [default: 8 texts, 32 images]",
        flag="heal_batch_size",
        words="healing batch size",
        least=1,
        most=2**20,
        by_task=(8, 32),
    )
    rate: float | None = setting(
        None,
        HEALING,
        "The highest learning rate. [default: 0.0001, with LoRA 0.001]",
        flag="heal_rate",
        words="learning rate",
    )
    hidden: float = setting(
        1.0,
        HEALING,
        "Weight of the distance of block outputs from the dense model's, beside the divergence of its outputs; 0 is none.",
        flag="heal_hidden",
        words="weight of hidden states",
    )
    labels: float = setting(
        0.0,
        HEALING,
        "Weight of the labels' loss. It adapts the model to the data, which no dense model had: see --heal-dense.",
        flag="heal_labels",
        words="weight of the labels",
    )
    lora: int | None = setting(
        None,
        HEALING,
        "Train adapters of this rank (LoRA, by peft), merged before the model is written. [default: all weights]",
        flag="heal_lora",
        words="LoRA rank",
        least=0,
        most=2**16,
        unset=0,
    )
    dtype: str | None = setting(
        None,
        HEALING,
        "Precision of products, float32 or bfloat16; weights are trained in float32. [default: bfloat16 where that is fast]",
        flag="heal_dtype",
        words="precision of healing",
        choices=lambda: PRECISIONS,
        unset="",
    )
    checkpointing: bool = setting(
        False,
        HEALING,
        "Compute the activations of each block twice and keep none: less memory, a third more time.",
        flag="heal_checkpointing",
    )
    augment: bool = setting(
        True, HEALING, "Mirror images at random and show parts of them; the dense model says what it sees.", flag="heal_augment"
    )
    dense: bool = setting(
        True,
        HEALING,
        "With labels, treat a copy of the dense model in the same way and evaluate it: about as long as the healing again.",
        flag="heal_dense",
    )

    @property
    def counted(self) -> tuple[float, str]:
        """The amount as a number and what it counts: seconds, tokens, examples or steps."""
        match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})\s*", self.amount or "")
        if not match or not 0 < float(match[1]) <= MOST:
            raise SettingError(
                f"The amount of healing is {self.amount!r}, but must be a time, or a number of tokens, texts, images or steps: "
                "30min, 90s, 200000tokens, 5000images, 300steps."
            )
        what, times = UNITS[match[2]]
        return float(match[1]) * times, what

    def check(self) -> None:
        super().check()
        if self.amount is not None:
            _ = self.counted
        elif changed := [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]:
            flag = changed[0].metadata["flag"].replace("_", "-")
            raise SettingError(f"There is a --{flag}, but nothing is healed: say how much, such as --heal 10min.")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise SettingError(f"The learning rate is {self.rate}, but must be more than 0 and at most 1: 0.0001 is usual.")
        for words, weight in (("hidden states", self.hidden), ("labels", self.labels)):
            if not 0 <= weight <= MOST:
                raise SettingError(f"The weight of {words} is {weight}, but must be 0 or more.")

    def to_key(self) -> dict[str, Any]:
        """What decides the healed weights: all but the dense model beside it and what only saves memory."""
        return {name: value for name, value in self.to_json().items() if name not in ("dense", "data", "checkpointing")}
