"""The values that the paper prints in its tables 3 to 11, A1 to A5, B1 and B2, looked up by table and row."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

PAPER = Path(__file__).with_name("paper.json")
# Models and methods that the paper's tables name in two ways -> the name used here.
SAME = {
    "deit_tiny_patch16_224": "DeiT-Tiny",
    "swin_tiny_patch4_window7_224": "Swin-Tiny",
    "vit_base_patch16_224": "ViT-B/16",
    "magnitude": "Magnitude",
    "random": "Random",
}
# The columns that identify a row, and what only the paper's caption says of it.
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "3": (("Model", "Target", "Nominal prune ratio"), ()),
    "4": (("Model",), ()),
    "5": (("Model",), ()),
    "6": (("GPT-2 MLP prune ratio",), ("gpt2",)),
    "7": (("Model",), ()),
    "8": (("Model", "Method"), ()),
    "9": (("Model", "Method"), ()),
    "10": (("Ratio", "Method"), ("HuggingFaceTB/SmolLM2-360M",)),
    "11": (("Metric",), ()),
    "A1": (("Model", "Ratio", "Method"), ()),
    "A2": (("Model", "Ratio", "Method"), ()),
    "A3": (("Model", "Ratio", "Method"), ()),
    "A4": (("Model", "Ratio", "Method"), ()),
    "A5": (("Model", "Method"), ()),
    "B1": (("Method",), ()),
    "B2": (("Metric",), ()),
}


def paper_row(number: str, *key: str) -> dict[str, str] | None:
    """A row of one of the paper's tables, by column; None if the table has no such row.

    >>> paper_row("9", "DeiT-Tiny", "MAB-UCB")["Δ Top-1"]
    '-0.0178 ± 0.0077'
    """
    return _rows(number).get(key)


def spread_of(text: str) -> tuple[float, float] | None:
    """Mean and deviation of an entry such as "-0.0178 ± 0.0077" or "861.97%"; None if it is not a number."""
    parts = [part.strip().rstrip("%") for part in text.split("±")]
    try:
        return float(parts[0]), float(parts[1]) if len(parts) > 1 else math.nan
    except ValueError:
        return None


@cache
def _rows(number: str) -> dict[tuple[str, ...], dict[str, str]]:
    table = json.loads(PAPER.read_text(encoding="utf-8"))[number]
    columns, from_caption = KEYS[number]
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["rows"]]
    return {(*(str(SAME.get(row[name], row[name])) for name in columns), *from_caption): row for row in rows}
