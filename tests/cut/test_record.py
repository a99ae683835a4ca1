from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from secateur.cut.proof import BLOCKS, Proof
from secateur.cut.record import (
    RECORD,
    CutRecord,
    cost_in_words,
    goal_sentence,
    markdown,
    measured_where,
    measurement_table,
    model_card,
    read_record,
    removed,
    unit_lines,
    verdict,
)
from secateur.cut.repair import Repair
from secateur.errors import OutputError
from secateur.files import jsonio
from secateur.judgement import Evaluation
from secateur.measure.speed import Measurement, Timing
from secateur.selection import Reached
from secateur.settings import Provenance, Settings
from secateur.units import Unit

UNITS = (Unit("head", 0, 1), Unit("head", 2, 0), Unit("head", 2, 2), Unit("mlp", 1, 0, 4))
MADE_WITH = Provenance(Settings("gpt2", method="ucb", target="both", seed=42, calibration="wikitext2"), "m1", "c1")
PLAIN = CutRecord(
    key="k",
    model="gpt2",
    model_digest="m1",
    family="gpt2",
    task="text",
    layout="free",
    dense_params=1_000_000,
    params=876_543,
    proof=Proof(difference=2e-5, scale=10.0, tolerance=1e-4, batches=2, tokens=8, same_tokens=7, tied_tokens=1),
    pulls=1234,
    units=UNITS,
    selection_digest="s",
    versions={"torch": "2.0"},
    made_with=MADE_WITH,
)
MEASURED = Measurement(
    dense_params=1_000_000,
    small_params=876_543,
    dense_bytes=4_000_000,
    small_bytes=3_506_172,
    timings=(
        Timing("prefill", 8, (10.0, 12.0, 11.0), (8.0, 8.5, 9.0), 100.0, 60.0),
        Timing("decode", 8, (2.0, 2.1, 2.2), (2.3, 2.2, 2.4), 100.0, 60.0),
    ),
    tokens=128,
    new_tokens=16,
    threads=1,
    device="cpu",
    dtype="float32",
    torch_version="2.0",
    dense_disk=4_100_000,
    small_disk=3_600_000,
)
FULL = replace(
    PLAIN,
    proof=Proof(2e-12, 10.0, 1e-8, batches=2, tokens=8, same_tokens=7, tied_tokens=1, precision=BLOCKS),
    repair=Repair("bias", {"none": 3.0, "bias": 2.5}, {"least squares": "it is not finite"}, 2, 6, 2),
    goal=Reached("latency", 0.8, 0.79, 0.81),
    shrunk=Evaluation(1.5, 100, (1.5, 1.5), perplexity=4.48),
    dense=Evaluation(1.25, 100, (1.25, 1.25), perplexity=3.49),
    zeroed=Evaluation(math.nan, 100, (math.nan, 1.5), perplexity=math.nan),
    data="wikitext2",
    measurement=MEASURED,
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# The record


def written(record: CutRecord) -> dict[str, Any]:
    """secateur.json in this folder, beside a config."""
    Path("config.json").write_text("{}")
    jsonio.write(Path(RECORD), record.to_json())
    fields: dict[str, Any] = json.loads(Path(RECORD).read_text(), parse_constant=pytest.fail)
    return fields


@pytest.mark.parametrize("record", [PLAIN, FULL, replace(PLAIN, made_with=None)], ids=["plain", "full", "made by hand"])
def test_a_record_is_plain_json_and_comes_back(record: CutRecord) -> None:
    fields = written(record)
    found = read_record(Path())
    assert found is not None
    assert jsonio.dumps(found.to_json()) == jsonio.dumps(record.to_json())  # as text: nan is not equal to itself
    assert replace(found, zeroed=None) == replace(record, zeroed=None)
    assert fields["format"] == 1
    assert fields["units"] == [unit.to_json() for unit in record.units]


def test_the_words_of_a_record_are_those_that_files_have_always_had() -> None:
    about = ["format", "key", "model", "model_digest", "family", "task", "layout", "dense_params", "params", "proof"]
    rest = ["pulls", "settings", "versions", "selection_digest", "units"]
    assert list(written(PLAIN)) == about + rest
    full = written(FULL)
    assert list(full) == [*about, "repair", "goal", *rest, "shrunk", "dense", "masked", "data", "measurement"]
    assert full["masked"]["loss"] == "nan" and full["masked"]["nonfinite_batches"] == 1
    assert full["settings"]["method"] == "ucb" and full["settings"]["model_digest"] == "m1"
    assert full["proof"]["relative"] == pytest.approx(2e-13) and full["proof"]["precision"] == "float64, one block at a time"
    assert full["proof"]["sentence"] == str(FULL.proof) and full["repair"]["sentence"] == str(FULL.repair)
    assert written(replace(PLAIN, made_with=None))["settings"] == {}


def test_a_record_from_before_proofs_had_a_precision_comes_back() -> None:
    fields = written(PLAIN)
    del fields["proof"]["precision"]
    jsonio.write(Path(RECORD), fields)
    assert read_record(Path()) == PLAIN
    assert "computed in" not in str(PLAIN.proof) and "(computed in float64, one block at a time)" in str(FULL.proof)


@pytest.mark.parametrize("content", ["", "[]", "5", "null", "{}", '"words"', '{"format": ', '{"formats": 1}', '{"format": 1}'])
def test_a_record_of_somebody_elses_is_refused_by_its_name(content: str) -> None:
    Path(RECORD).write_text(content)
    Path("config.json").write_text("{}")
    with pytest.raises(OutputError, match=rf"{RECORD}.*-o") as caught:
        read_record(Path())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        {"units": [{"kind": "tail", "layer": 0, "index": 0}]},
        {"units": None},
        {"params": "many"},
        {"proof": {}},
        {"settings": []},
        {"settings": None},
        {"settings": {"ratio": 0.5}},
        {"settings": "words"},
        {"masked": {"loss": 1.0}},
        {"measurement": {"timings": []}},
        {"goal": {"what": "latency"}},
    ],
    ids=str,
)
def test_a_damaged_record_is_refused_by_its_name(damage: dict[str, Any]) -> None:
    fields = written(FULL) | damage
    Path(RECORD).write_text(json.dumps(fields))
    with pytest.raises(OutputError, match=RECORD):
        read_record(Path())


@pytest.mark.parametrize("found", [2, "1", None])
def test_a_record_of_another_format_is_refused(found: Any) -> None:
    Path(RECORD).write_text(json.dumps({"format": found}))
    Path("config.json").write_text("{}")
    with pytest.raises(OutputError, match=f"{RECORD}.*format {found!r}"):
        read_record(Path())


def test_no_record_is_none() -> None:
    assert read_record(Path()) is None
    assert read_record(Path("nowhere")) is None
    Path(RECORD).write_text("of a model that did not get its config.json")
    assert read_record(Path()) is None


# The card


def test_a_card_says_what_was_removed_and_how() -> None:
    card = model_card(PLAIN)
    for words in (
        "3 attention heads and 1 MLP channel group",
        "876,543 of 1,000,000 parameters (87.7%)",
        "- head 0.1\n- head 2.0,2\n- mlp 1.0",
        "1,234 ",
        "method `ucb`",
        "target `both`",
        "seed `42`",
        "`wikitext2`",
        str(PLAIN.proof),
    ):
        assert words in card
    assert card.startswith('---\nbase_model: "gpt2"\n')
    assert "not evaluated" in card
    assert "## Repair" not in card and "## Goal" not in card and "## What it won" not in card


def test_a_card_says_what_it_cost_and_won() -> None:
    card = model_card(FULL)
    for words in ("## Repair", str(FULL.repair), "## Goal", "80.0%", "79.00%", "81.00%", "## What it won"):
        assert words in card
    assert verdict(MEASURED, cost_in_words(FULL)) in card
    assert "| perplexity | 3.4900 | nan | 4.4800 |" in card and "| non-finite batches | 0.0000 | 1.0000 | 0.0000 |" in card
    assert "not evaluated" not in card and "`wikitext2`, which did not choose" in card


@pytest.mark.parametrize(
    ("family", "task", "layout", "says", "not_said"),
    [
        ("gpt2", "text", "free", ["secateur.load_shrunk", "AutoModelForCausalLM", "trust_remote_code=True"], "timm"),
        ("gpt2", "text", "uniform", ['AutoModelForCausalLM.from_pretrained("FOLDER")'], "trust_remote_code"),
        ("vit", "image", "uniform", ["AutoModelForImageClassification", "image-classification"], "load_shrunk"),
        ("timm/VisionTransformer", "image", "free", ["secateur.load_shrunk", "library_name: timm"], "from_pretrained"),
        ("timm/VisionTransformer", "image", "uniform", ["timm.create_model", "local-dir:FOLDER"], "secateur.load"),
    ],
)
def test_a_card_says_how_to_load_the_model(family: str, task: str, layout: str, says: list[str], not_said: str) -> None:
    card = model_card(replace(PLAIN, family=family, task=task, layout=layout))
    assert all(words in card for words in says) and not_said not in card


@pytest.mark.parametrize("name", ["a`b", "a\nb\n# Title", "<script>alert(1)</script>", 'a"b\\c', "a\r\nb: c", "模型", "---\nx"])
def test_an_odd_name_breaks_neither_the_card_nor_its_head(name: str) -> None:
    settings = replace(MADE_WITH.settings, calibration=name, method=name)
    shrunk = Evaluation(1.0, 1, (1.0,))
    card = model_card(replace(PLAIN, model=name, made_with=replace(MADE_WITH, settings=settings), data=name, shrunk=shrunk))
    outside_of_code = card.split("---", 2)[2].split("`")[::2]
    assert not any("<script" in text for text in outside_of_code)
    plain = model_card(replace(PLAIN, data="text", shrunk=shrunk))
    assert len(card.splitlines()) == len(plain.splitlines())
    assert card.count("`") - name.count("`") == plain.count("`")  # its own are in the head alone
    head = card.splitlines()[1].removeprefix("base_model: ")
    assert json.loads(head) == name


def test_a_card_of_a_selection_made_by_hand_is_still_a_sentence() -> None:
    card = model_card(replace(PLAIN, made_with=None, pulls=0))
    assert "By Secateur" not in card and "`-`" not in card and "None" not in card


def test_a_card_shows_figures_that_all_sides_have_and_words_for_nan() -> None:
    dense, shrunk = Evaluation(1.0, 9, (1.0, 1.0), top1=0.5), Evaluation(math.nan, 9, (math.nan, math.nan))
    card = model_card(replace(PLAIN, dense=dense, shrunk=shrunk, data="text"))
    assert "| loss | 1.0000 | nan |" in card and "top-1" not in card and "| non-finite batches | 0" in card
    assert "non-finite" not in model_card(replace(PLAIN, dense=dense, shrunk=dense, data="text"))


# Its sentences and tables


def test_units_are_counted_by_kind_and_listed_by_layer() -> None:
    assert removed([Unit("kv_group", 1, 0)]) == "1 K/V group"
    assert removed(UNITS) == "3 attention heads and 1 MLP channel group"
    assert unit_lines([Unit("head", 10, 2), Unit("head", 2, 11), Unit("head", 2, 3)]) == ["head 2.3,11", "head 10.2"]


def test_tables_and_goals_in_words() -> None:
    assert markdown(["", "a"], [["b", "1"]]) == "|  | a |\n| --- | --- |\n| b | 1 |"
    goal = Reached("FLOPs", 0.8, 0.7954)
    assert all(words in goal_sentence(goal) for words in ("80.0%", "FLOPs", "79.54%")) and "measured" not in goal_sentence(goal)
    assert "81.00%" in goal_sentence(replace(goal, measured=0.81))


def test_a_measurement_is_a_table_of_dense_and_small_with_what_was_measured() -> None:
    titles, rows = measurement_table(MEASURED)
    assert len(titles) == 5 and {len(row) for row in rows} == {5}
    table = {row[0]: row[1:] for row in rows}
    assert table["parameters"] == ["1,000,000", "876,543", "1.141", ""]
    assert table["MB on disk"] == ["4.1", "3.6", "1.139", ""]
    assert not any("memory" in title for title in table)  # which was not measured
    prompt = next(row for title, row in table.items() if "prompt" in title)
    assert prompt == ["11.0 (10.0 to 12.0)", "8.5 (8.0 to 9.0)", "1.25 (1.22 to 1.41)", "1.67"]
    peaks = measurement_table(replace(MEASURED, dense_memory=2_000_000, small_memory=1_000_000))[1]
    assert next(row for row in peaks if "memory" in row[0])[1:4] == ["2.0", "1.0", "2.000"]


def test_a_verdict_sums_up_what_is_faster_and_what_is_not_with_the_cost() -> None:
    cost = "+1.07% perplexity"
    assert cost_in_words(FULL) == "+28.37% perplexity" and cost_in_words(PLAIN) == ""
    assert verdict(MEASURED, cost) == (
        "The small model is 1.25 times as fast for prompts at batch 8, at +1.07% perplexity. "
        "It is slower for tokens at batch 8 (0.92 times as fast), though 40.0% of the FLOPs are gone."
    )
    same = [Timing(name, size, (1.0, 1.1, 0.9), (1.0,) * 3, 100.0, 99.0) for size in (1, 8) for name in ("prefill", "decode")]
    assert verdict(replace(MEASURED, timings=tuple(same)), cost) == (
        "The small model is not surely faster for prompts and tokens at batch 1 and 8 (1.00 times as fast), "
        "though 1.0% of the FLOPs are gone, at +1.07% perplexity."
    )
    faster = tuple(replace(MEASURED.timings[0], batch_size=size) for size in (1, 8))
    assert verdict(replace(MEASURED, timings=faster)) == "The small model is 1.25 times as fast for prompts at batch 1 and 8."


def test_an_image_models_speed_is_in_images_a_second() -> None:
    forward = Timing("forward", 8, (10.0, 10.0, 10.0), (8.0, 8.0, 8.0), 100.0, 60.0)
    _, rows = measurement_table(replace(MEASURED, timings=(forward,)))
    assert "images a second" in rows[-1][0] and rows[-1][1:3] == ["800.0", "1000.0"]


def test_where_it_was_measured_is_said_with_the_repetitions_and_the_threads() -> None:
    said = measured_where(MEASURED)
    assert all(words in said for words in ("3 repetitions", "cpu", "1 thread,", "float32", "torch 2.0", "128 tokens"))
    assert "4 threads" in measured_where(replace(MEASURED, threads=4)) and "tokens" not in measured_where(
        replace(MEASURED, tokens=None)
    )
