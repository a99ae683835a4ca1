"""From a folder to a smaller one, for tasks that are neither the next token nor the class of an image."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.model.families import anatomy
from tiny import tf
from worlds import FLAGS, Encoders, Ran, Run, check_refused, contents

CUT = ["--layout", "free", "--no-measure", "--calibration-size", 16, "--evaluation-batches", 2, "--batch-size", 4]


@dataclass(frozen=True)
class Kind:
    model: str
    data: str
    figures: tuple[str, ...]  # as the table calls them
    task: str
    pipeline: str
    auto: str


KINDS = {
    "masked": Kind("masked", "text", ("loss", "perplexity", "top-1"), "masked text", "fill-mask", "AutoModelForMaskedLM"),
    "classes": Kind(
        "classes", "labelled", ("loss", "top-1"), "text classes", "text-classification", "AutoModelForSequenceClassification"
    ),
    "unlabelled": Kind(
        "classes", "text", ("loss", "agreement"), "text classes", "text-classification", "AutoModelForSequenceClassification"
    ),
    "sentences": Kind("sentences", "text", ("loss", "cosine"), "text embeddings", "feature-extraction", "AutoModel"),
    "tower": Kind("tower", "images", ("loss", "cosine"), "image embeddings", "image-feature-extraction", "AutoModel"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def command(encoders: Encoders, kind: str, out: Path, *more: object) -> list[object]:
    row = KINDS[kind]
    return ["prune", getattr(encoders, row.model), "--calibration", getattr(encoders, row.data), *FLAGS, *CUT, "-o", out, *more]


def rows_shown(ran: Ran) -> dict[str, list[str]]:
    """The first table of the output: the cells of each row by its first."""
    lines = [line for line in ran.out.splitlines() if line.count("│") >= 3 or line.count("┃") >= 3]
    table: dict[str, list[str]] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.replace("┃", "│").strip("│ ").split("│")]
        table.setdefault(cells[0], cells[1:])
    return table


@every_kind
def test_prune_writes_a_smaller_model_with_the_figures_of_its_task(
    kind: str, encoders: Encoders, tmp_path: Path, run: Run
) -> None:
    row, out = KINDS[kind], tmp_path / "out"
    ran = run(*command(encoders, kind, out))
    assert (ran.code, ran.complaints) == (0, [])
    shown = rows_shown(ran)
    assert (
        tuple(name for name in shown if name in ("loss", "perplexity", "top-1", "top-5", "agreement", "cosine")) == row.figures
    )
    record = json.loads((out / "evaluation.json").read_text(), parse_constant=pytest.fail)
    cut = json.loads((out / "secateur.json").read_text(), parse_constant=pytest.fail)
    assert cut["task"] == row.task
    if row.figures[1] in ("agreement", "cosine"):
        assert record["dense"]["loss"] == pytest.approx(0, abs=1e-5)
        assert record["dense"][row.figures[1]] == pytest.approx(1, abs=1e-5)
        assert record["pruned"]["loss"] > 0 and record["pruned"][row.figures[1]] <= 1
    assert cut["shrunk"]["loss"] == pytest.approx(record["pruned"]["loss"], abs=1e-5)
    card = (out / "README.md").read_text()
    assert f"pipeline_tag: {row.pipeline}" in card and row.auto in card

    small = sc.load_shrunk(out, device="cpu")
    dense, _ = sc.load(str(getattr(encoders, row.model)), device="cpu")
    units = sc.Selection.load(out / "selection.json").units
    gone = [sum(unit.layer == i for unit in units) for i in range(3)]
    assert [layer.heads for layer in anatomy(small)] == [3 - n for n in gone] and len(units) == 3
    assert small.get_parameter(
        f"{anatomy(small)[0].name}.{'layer_norm1' if kind == 'tower' else 'output.LayerNorm'}.weight"
    ).shape == (12,)
    assert type(small).__name__ == f"Shrunk{type(dense).__name__}"


@every_kind
def test_a_finished_run_prints_the_same_again_and_the_checkpoint_is_a_model_for_every_command(
    kind: str, encoders: Encoders, tmp_path: Path, run: Run
) -> None:
    row, out = KINDS[kind], tmp_path / "out"
    first = run(*command(encoders, kind, out))
    before = contents(out)
    again = run(*command(encoders, kind, out))
    assert (again.code, again.out) == (0, first.out) and contents(out) == before
    data = getattr(encoders, row.data)
    common = ["--device", "cpu", "--seq-len", 16, "--data", data, "--evaluation-batches", 2, "--batch-size", 4, "--json"]
    judged = run("evaluate", out, *common)
    assert (judged.code, judged.complaints) == (0, [])
    if row.figures[1] in ("perplexity", "top-1"):  # with labels: without, the model would be compared with itself
        cut = json.loads((out / "secateur.json").read_text())
        assert judged.document["dense"]["loss"] == pytest.approx(cut["shrunk"]["loss"], abs=1e-5)
    units = run("units", out, "--json")
    assert units.code == 0


def test_a_sentence_encoder_stays_a_folder_of_sentence_transformers(encoders: Encoders, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run(*command(encoders, "sentences", out)).code == 0
    files = set(contents(out))
    assert files >= {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"}
    assert files >= {"config.json", "model.safetensors", "tokenizer.json", "selection.json", "evaluation.json", "secateur.json"}
    small: Any = sc.load(str(out), device="cpu")[0]
    assert small.pooling == "mean"


def test_a_uniform_cut_of_an_encoder_loads_with_the_stock_class(encoders: Encoders, tmp_path: Path, run: Run) -> None:
    for kind in ("masked", "classes", "sentences", "tower"):
        out = tmp_path / kind
        ran = run(*command(encoders, kind, out, "--layout", "uniform", "--target", "mlp"))
        assert (ran.code, ran.complaints) == (0, []), kind
        loaded, info = getattr(tf, KINDS[kind].auto).from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        ours = sc.load_shrunk(out, device="cpu")
        assert type(ours) is type(loaded)
        assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in ours.state_dict().items())
        assert not list(out.glob("*.py"))


def test_a_distance_chooses_and_labels_judge(encoders: Encoders, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    ran = run(*command(encoders, "classes", out, "--loss", "distance", "--layout", "none", "--json"))
    assert (ran.code, ran.complaints) == (0, [])
    assert "top1" in ran.document["dense"] and "agreement" not in ran.document["dense"]
    first = json.loads((out / "journal.jsonl").read_text().splitlines()[1])
    assert first["base_losses"] == pytest.approx([0] * len(first["base_losses"]), abs=1e-5)


@pytest.mark.parametrize("kind", ["masked", "classes", "sentences", "tower"])
def test_an_encoder_is_repaired_and_measured(kind: str, encoders: Encoders, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    ran = run(*command(encoders, kind, out, "--repair"))
    assert (ran.code, ran.complaints) == (0, [])
    repaired = json.loads((out / "secateur.json").read_text())["repair"]
    assert {"none", "least squares"} <= set(repaired["losses"])
    bench = run(
        "measure", getattr(encoders, kind), out, "--tokens", 8, "--repeats", 3, "--device", "cpu", "--no-memory", "--json"
    )
    assert (bench.code, bench.complaints) == (0, [])
    workloads = {timing["name"] for timing in bench.document["timings"]}
    assert workloads == {"forward" if kind == "tower" else "encode"}


# Refusals


def test_what_does_not_fit_the_task_is_one_sentence(encoders: Encoders, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    bad = tmp_path / "bad"
    bad.mkdir()
    for split in ("train", "test"):
        (bad / f"{split}.jsonl").write_text('{"text": "the cat", "label": "middling"}\n')
    cases: list[tuple[str, list[object], str]] = [
        ("classes", ["--calibration", bad], "middling"),
        ("sentences", ["--loss", "labels"], "--loss distance"),
        ("tower", ["--loss", "labels"], "--loss distance"),
        ("tower", ["--calibration", "builtin"], "folder of them"),
        ("tower", ["--calibration", encoders.text], "holds no images"),
        ("masked", ["--seq-len", 20], "at most 19"),
        ("masked", ["--layout", "uniform", "--target", "head"], "all heads must stay"),
    ]
    for kind, more, says in cases:
        sentence = check_refused(run(*command(encoders, kind, out, *more)), out)
        assert says in sentence, (kind, more)
