"""Real models, end to end: SmolLM2-135M, which `make test` fetches, and DeiT-Tiny where it lies beside the project."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from tiny import REAL_DATA, SMOLLM2, needs_smollm2
from worlds import Run

DEIT, IMAGENETTE = (REAL_DATA / name for name in ("deit-tiny", "imagenette"))

pytestmark = pytest.mark.slow
needs_deit = pytest.mark.skipif(
    not (DEIT / "config.json").exists() or not IMAGENETTE.is_dir(), reason=f"no DeiT-Tiny and Imagenette in {DEIT.parent}"
)


@needs_smollm2
def test_smollm2_has_134515008_parameters_and_270_heads(smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    assert sc.total_parameters(model) == 134_515_008
    assert len(sc.candidate_units(model, target="head")) == 270


@needs_smollm2
def test_smollm2_predicts_the_builtin_text_and_loses_by_a_head(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    held_out = sc.text_batches("builtin", tokenizer, split="test", limit=4)
    dense = sc.perplexity(model, held_out)
    assert 5 < dense < 60  # some 20 for English prose; 49152 for a model that knows nothing
    with sc.zeroed(model, [sc.Unit("head", 0, h) for h in range(9)]):
        assert dense < sc.perplexity(model, held_out) < math.inf
    assert sc.perplexity(model, held_out) == dense


@needs_smollm2
@pytest.mark.parametrize("unit", [sc.Unit("head", 0, 3), sc.Unit("head", 29, 8)], ids=str)
def test_zeroing_a_head_of_smollm2_equals_zeroing_its_columns_of_o_proj(unit: sc.Unit, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    batch = tokenizer("A secateur cuts what a tree can do without.", return_tensors="pt")
    weight, columns = model.model.layers[unit.layer].self_attn.o_proj.weight, slice(64 * unit.index, 64 * unit.index + 64)
    with torch.no_grad():
        dense = model(**batch).logits
        with sc.zeroed(model, [unit]):
            masked = model(**batch).logits
        kept = weight[:, columns].clone()
        try:
            weight[:, columns] = 0
            by_hand = model(**batch).logits
        finally:
            weight[:, columns] = kept
        torch.testing.assert_close(masked, by_hand)
        assert not torch.allclose(masked, dense)
        assert torch.equal(model(**batch).logits, dense)


@needs_smollm2
def test_smollm2_s_losses_are_the_same_to_the_bit_with_all_that_is_kept_and_side_by_side(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    batches = sc.text_batches("builtin", tokenizer, split="train", limit=4, seq_len=64, batch_size=2)
    committed, units = sc.Unit("head", 12, 4), [sc.Unit("head", 5, 0), sc.Unit("mlp", 14, 3, 128), sc.Unit("head", 29, 8)]
    plain, ours = (sc.DamageMeter(model, batches, cache_memory=memory, lanes=lanes) for memory, lanes in ((0, 1), (None, 2)))
    pulls = [(unit, (0, 1)) for unit in units]
    assert list(ours.measure(pulls)) == list(plain.measure(pulls))
    for meter in (plain, ours):
        meter.commit(committed)
    assert list(ours.measure(pulls[:1])) == list(plain.measure(pulls[:1]))
    assert (ours.forwards, ours.cache_was_full) == (plain.forwards, False)


@needs_smollm2
def test_smollm2_is_pruned_of_two_heads_end_to_end(tmp_path: Path, run: Run) -> None:
    search = ["--ratio", 2 / 270, "--budget", "12forwards"]
    data = ["--batch-size", 1, "--calibration-size", 8, "--evaluation-batches", 2]
    ran = run("prune", SMOLLM2, *search, *data, "--device", "cpu", "--no-measure", "-o", tmp_path, "--json")
    assert (ran.code, ran.complaints) == (0, [])
    record = ran.document
    assert (len(record["units"]), record["nonfinite_pulls"]) == (2, 0)
    selection = sc.Selection.load(tmp_path / "selection.json")
    assert record["pulls"] >= 2 and selection.gradient_batches >= 2 and 6 < selection.passes < 18
    assert record["total_params"] == 134_515_008
    assert record["zeroed_percent"] == pytest.approx(
        100 * 2 * (2 * 576 * 64) / 134_515_008
    )  # Eq. 13: 9 heads share 3 K/V heads
    assert 1 < record["dense"]["perplexity"] < 100
    assert abs(record["ppl_change_percent"]) < 50
    assert len(selection.units) == 2


@needs_deit
def test_deit_tiny_is_pruned_end_to_end_on_imagenette(tmp_path: Path, run: Run) -> None:
    search = ["--ratio", 0.10, "--method", "ucb", "--pulls-per-step", 2, "--batches-per-pull", 1]
    data = ["--calibration", IMAGENETTE, "--calibration-size", 64, "--evaluation-size", 64, "--batch-size", 16]
    ran = run("prune", DEIT, *search, *data, "--device", "cpu", "-o", tmp_path, "--json")
    assert (ran.code, ran.complaints) == (0, [])
    record = ran.document
    assert (len(record["units"]), record["pulls"]) == (4, 8)
    assert (record["total_params"], record["dense"]["rows"]) == (5_717_416, 64)
    assert record["dense"]["top1"] > 0.6
    assert 0.1 < record["pruned"]["top1"] <= record["pruned"]["top5"] <= 1
