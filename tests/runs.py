"""The files of a prune without a model, for the page that is made from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes import FakeMeter, spread
from secateur.files import jsonio
from secateur.judgement import Changed, Continued, Evaluation, JudgedOn, PruneRecord, Samples
from secateur.search.policies import UCB
from secateur.search.select import select
from secateur.selection import Selection, Source
from secateur.settings import Provenance, Settings
from secateur.units import enumerate_units
from stores import make_judgement

HEADS, GROUPS = [6] * 12, [12 * 32] * 2  # 72 heads, and 12 MLP groups in two layers


def make_selection(name: str = "gpt2", *, pulls: int = 40, **settings: Any) -> Selection:
    """A search over 96 units with a fake meter."""
    units = enumerate_units(HEADS, GROUPS, target="both")
    chosen = select(FakeMeter(spread(units)), units, policy=UCB(), ratio=0.05, pulls_per_step=pulls)
    made_with = Provenance(Settings(name, target="both", method="ucb", ratio=0.05, pulls_per_step=pulls, **settings), "m", "c")
    source = Source(name, "train", rows=("a", "b"))
    return replace(chosen, made_with=made_with, versions={"secateur": name}, calibration=source)


def write_run(folder: Path, name: str = "gpt2", *, selection: Selection | None = None, **cut: Any) -> Path:
    """The folder of a prune; `name` is all that comes from outside."""
    selection = selection or make_selection(name)
    dense = Evaluation(3.0, 400, tuple(3 + i / 10 for i in range(-2, 3)), perplexity=20.0)
    zeroed = Evaluation(3.1, 400, tuple(3.1 + i / 10 for i in range(-2, 3)), perplexity=22.0)
    judgement = make_judgement(dense=dense, zeroed=zeroed, units=selection.units, candidates=96)
    assert selection.made_with
    record = PruneRecord(selection.made_with, JudgedOn(name, 10, 4, "d", 10), judgement, 1.0, 0)
    selection.save(folder / "selection.json")
    jsonio.write(folder / "evaluation.json", record.to_json())
    timing = {"name": "prefill", "batch_size": 1, "flop_ratio": 1.1, "dense_median": middle(10), "small_median": middle(8)}
    fields: dict[str, Any] = {"model": name, "task": "text", "layout": "free", "dense_params": 1000, "params": 900}
    fields |= {"proof": {"sentence": f"proved of {name}"}, "shrunk": zeroed.to_json()}
    fields["measurement"] = {"dense_params": 1000, "small_params": 900, "dense_bytes": 4000, "small_bytes": 3600, "threads": 1}
    fields["measurement"] |= {"device": "cpu", "dtype": "float32", "torch_version": "2", "dense_disk": 4000, "small_disk": 3600}
    fields["measurement"] |= {"timings": [timing | {"speedup": middle(1.25)}]}
    jsonio.write(folder / "secateur.json", fields | cut)
    changed = Changed(name, name, "other", text=name)
    samples = Samples("of", (Continued(name, name, name, name),), (changed,), looked_at=8, differ=1)
    jsonio.write(folder / "samples.json", samples.to_json())
    return folder


def middle(value: float) -> dict[str, float]:
    return {"value": value, "low": value * 0.9, "high": value * 1.1}
