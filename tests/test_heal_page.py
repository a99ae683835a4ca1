"""What docs/heal.md and docs/cuts.md say of the whole healing is what results/healed.jsonl holds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from secateur.experiment.compare import batch_interval
from worlds import ROOT

CUT, HEALED = (json.loads(line) for line in (ROOT / "results" / "healed.jsonl").read_text(encoding="utf-8").splitlines())


def change(made: dict[str, Any], dense: dict[str, Any]) -> tuple[str, str, str]:
    """By how many percent the perplexity is above the dense model's, and the ends of its paired interval over batches."""
    assert made["rows"] == dense["rows"]
    differences = [a - b for a, b in zip(made["batch_losses"], dense["batch_losses"], strict=True)]
    _, ends = batch_interval([differences], same_batches=True)
    first, low, high = (f"{100 * (math.exp(x) - 1):+.1f}%" for x in (made["loss"] - dense["loss"], *ends))
    return first, low, high


def claims() -> dict[str, list[str]]:
    dense = HEALED["dense"]
    before, after, repaired = (
        change(x, y) for x, y in ((HEALED["before"], dense), (HEALED["made"], dense), (CUT["made"], CUT["dense"]))
    )
    looks = HEALED["held_out_divergence"]
    return {
        "heal.md": [
            f"| dense | {dense['perplexity']:.2f} | | |",
            f"| cut and repaired | {HEALED['before']['perplexity']:.2f} | {before[0]} | {before[1]} to {before[2]} |",
            f"| healed for half an hour | {HEALED['made']['perplexity']:.2f} | {after[0]} | {after[1]} to {after[2]} |",
            f"{HEALED['steps']} steps, {HEALED['tokens']:,} tokens",
            f"{HEALED['seconds'] / 60:.1f} minutes; held-out divergence {looks['0']:.4f} before, {looks['298']:.4f} half-way, "
            f"{looks[str(HEALED['steps'])]:.4f} at the end",
            CUT["command"],
            HEALED["command"],
        ],
        "../README.md": [f"{before[0]} as cut and repaired, without any training; {after[0]} after half an hour"],
        "cuts.md": [
            f"from {before[0]} to **{after[0]}** of the dense model's perplexity (paired 95%: {after[1]} to {after[2]})",
            f"perplexity {CUT['made']['perplexity']:.2f} ({repaired[0]}, paired 95%: {repaired[1]} to {repaired[2]})",
        ],
    }


@pytest.mark.parametrize("page", ["heal.md", "cuts.md", "../README.md"])
def test_the_page_says_what_was_recorded_of_the_whole_healing(page: str) -> None:
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    assert [claim for claim in claims()[page] if claim not in text] == []
