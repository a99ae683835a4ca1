from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from secateur.files import jsonio
from secateur.judgement import Evaluation, JudgedOn, Judgement, PruneRecord, changes
from secateur.selection import Reached, Source
from secateur.settings import Judging, Provenance, Settings
from secateur.units import HEAD, MLP, Unit

DENSE = Evaluation(2.0, 10, (1.5, 2.5), perplexity=8.0, last_word_accuracy=0.5)
WITHOUT = Evaluation(2.25, 10, (2.0, 2.5), perplexity=10.0, last_word_accuracy=0.375)
JUDGEMENT = Judgement(
    dense=DENSE,
    zeroed=WITHOUT,
    units=(Unit(HEAD, 0, 1), Unit(MLP, 2, 3, 4)),
    candidates=8,
    total_params=1000,
    zeroed_percent=12.5,
    pulls=64,
    forwards=100,
    nonfinite_pulls=1,
    goal=Reached("FLOPs", 0.8, 0.79),
)
RECORD = PruneRecord(
    made_with=Provenance(Settings("gpt2", ratio=0.2, keep_flops=0.8), "0123", "4567"),
    judged_on=JudgedOn.of(Judging("text/", 1024, 80), Source("text/", "test", (), ("a", "b", "c"))),
    judgement=JUDGEMENT,
    selection_seconds=1.5,
    replayed_pulls=7,
)


def on_disk(fields: dict[str, Any]) -> Any:
    return json.loads(jsonio.dumps(fields), parse_constant=pytest.fail)


# On disk


def test_an_evaluation_that_is_not_finite_is_written_as_strict_json() -> None:
    found = Evaluation(math.nan, 12, (1.5, math.nan, math.inf), perplexity=math.nan, last_word_accuracy=0.25)
    assert on_disk(found.to_json()) == {
        "loss": "nan",
        "rows": 12,
        "batch_losses": [1.5, "nan", "inf"],
        "perplexity": "nan",
        "last_word_accuracy": 0.25,
        "nonfinite_batches": 2,
    }


def test_a_judgement_says_what_its_units_amount_to_and_what_they_changed() -> None:
    written = on_disk(JUDGEMENT.to_json())
    assert written["dense"] == on_disk(DENSE.to_json()) and written["pruned"] == on_disk(WITHOUT.to_json())
    assert written["unit_ratio"] == JUDGEMENT.unit_ratio == 2 / 8
    assert written.items() >= JUDGEMENT.changes.items() == changes(DENSE, WITHOUT).items()
    assert written["goal"] == {"what": "FLOPs", "asked": 0.8, "got": 0.79}


USELESS = replace(
    JUDGEMENT, zeroed=Evaluation(math.inf, 10, (2.0, math.inf), perplexity=math.inf, last_word_accuracy=0.0), goal=None
)


@pytest.mark.parametrize("judgement", [JUDGEMENT, USELESS], ids=["with a goal", "not finite"])
def test_a_judgement_comes_back_from_json_as_it_went(judgement: Judgement) -> None:
    assert Judgement.from_json(on_disk(judgement.to_json())) == judgement


def test_a_record_comes_back_from_json_as_it_went() -> None:
    written = on_disk(RECORD.to_json())
    assert written["judging"] == {"data": "text/", "size": 1024, "max_batches": 80, "rows": 3} | {
        "data_digest": RECORD.judged_on.data_digest
    }
    assert PruneRecord.from_json(written) == RECORD


@pytest.mark.parametrize("missing", ["settings", "judging", "dense", "pruned", "units", "candidates", "selection_seconds"])
def test_a_record_that_lacks_something_is_a_value_error_that_names_it(missing: str) -> None:
    written = on_disk(RECORD.to_json())
    del written[missing]
    with pytest.raises(ValueError, match="zeroed" if missing == "pruned" else missing):
        PruneRecord.from_json(written)


@pytest.mark.parametrize("fields", [[], 5, "text", {"settings": [], "judging": 1}], ids=str)
def test_json_that_is_no_record_is_a_value_error(fields: Any) -> None:
    with pytest.raises(ValueError):
        PruneRecord.from_json(fields)


# What zeroing changed


def test_changes_of_a_text_model_are_by_hand() -> None:
    dense = Evaluation(2.0, 10, (2.0,), perplexity=8.0, last_word_accuracy=0.5)
    without = Evaluation(2.25, 10, (2.25,), perplexity=10.0, last_word_accuracy=0.375)
    assert changes(dense, without) == {"delta_loss": 0.25, "ppl_change_percent": 25.0, "delta_last_word_accuracy": -0.125}


def test_changes_of_an_image_model_are_by_hand() -> None:
    dense = Evaluation(1.0, 8, (1.0,), top1=0.75, top5=1.0)
    without = Evaluation(0.5, 8, (0.5,), top1=0.875, top5=0.5)
    assert changes(dense, without) == {"delta_loss": -0.5, "delta_top1": 0.125, "delta_top5": -0.5}


def test_a_failed_evaluation_is_a_failed_change_and_not_an_exception() -> None:
    dense = Evaluation(2.0, 10, (2.0,), perplexity=8.0)
    failed = Evaluation(math.nan, 10, (math.nan,), perplexity=math.nan)
    exploded = Evaluation(1e6, 10, (1e6,), perplexity=math.inf)
    assert all(math.isnan(value) for value in changes(dense, failed).values())
    assert changes(dense, exploded)["ppl_change_percent"] == math.inf
