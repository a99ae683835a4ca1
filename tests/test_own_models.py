"""The way of somebody with a model of their own, from training to ONNX: a character-level GPT-2 and a BERT classifier.

Both are trained for some seconds on the manual that every Python carries, so that their losses mean something.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import secateur as sc
from tiny import character_tokenizer, tf
from to_onnx import difference, export
from worlds import Run

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytestmark = pytest.mark.slow
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;()[]{}'\"`*_-+=<>/#@!?%&|~^$\\"
LENGTH = 48
SHAPE = {"num_attention_heads": 4, "num_hidden_layers": 3, "hidden_size": 64, "vocab_size": len(LETTERS) + 4}


def paragraphs() -> list[str]:
    """Paragraphs of the manual, each on one line."""
    from pydoc_data.topics import topics

    parts = [part for name in sorted(topics) for part in topics[name].split("\n\n")]
    found = [("  " if part.startswith("    ") else "") + " ".join(part.split()) for part in parts if len(part) > 30]
    return list({text[: LENGTH - 2]: text for text in found}.values())  # else some would choose and judge


def train(model: Any, draw: Callable[[], dict[str, Tensor]], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        loss = model(**draw()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def to_onnx(folder: Path, path: Path) -> float:
    small = sc.load_shrunk(folder, device="cpu")
    export(small, path)
    return difference(small, path)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    found = paragraphs()
    for split, part in (("train", found[: len(found) * 4 // 5]), ("test", found[len(found) * 4 // 5 :])):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n", encoding="utf-8")
        rows = [{"text": text[:200], "label": "code" if text.startswith("  ") else "prose"} for text in part]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_a_character_level_gpt2_is_trained_pruned_and_runs_as_onnx(run: Run, lines: Path, tmp_path: Path) -> None:
    tokenizer = character_tokenizer(LETTERS, ends=True)
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    model: Any = tf.GPT2LMHeadModel(tf.GPT2Config(n_positions=LENGTH, **SHAPE, **ends))
    texts = [line for line in (lines / "train.txt").read_text(encoding="utf-8").splitlines() if len(line) >= LENGTH]
    rows = torch.tensor([tokenizer(text)["input_ids"][:LENGTH] for text in texts])

    def draw() -> dict[str, Tensor]:
        ids = rows[torch.randint(len(rows), (32,))]
        return {"input_ids": ids, "labels": ids}

    train(model, draw, 150)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        short = [line[: LENGTH - 2] for line in (lines / f"{split}.txt").read_text(encoding="utf-8").splitlines()]
        (data / f"{split}.txt").write_text("\n".join(short) + "\n", encoding="utf-8")
    made = run(
        *("prune", tmp_path / "model", "--calibration", data, "--seq-len", LENGTH, "--target", "both", "--ratio", 0.1),
        *("--method", "auto", "--budget", "60forwards", "--batch-size", 16),
        *("--evaluation-size", 256, "--no-measure", "--repair", "--json", "-o", tmp_path / "out"),
    )
    assert made.code == 0, made.err
    assert "Each line of" in made.err and "blind guess" not in made.err
    result = json.loads(made.out)
    assert result["dense"]["loss"] < 0.75 * math.log(len(LETTERS))
    assert result["cut"]["shrunk"]["loss"] < result["dense"]["loss"] + 0.2
    assert result["cut"]["params"] < result["cut"]["dense_params"]
    assert to_onnx(tmp_path / "out", tmp_path / "small.onnx") < 1e-4


def test_a_bert_classifier_is_trained_pruned_and_runs_as_onnx(run: Run, lines: Path, tmp_path: Path) -> None:
    tokenizer = character_tokenizer(LETTERS, ends=True)
    torch.manual_seed(0)
    labels = {"num_labels": 2, "id2label": {0: "prose", 1: "code"}, "label2id": {"prose": 0, "code": 1}}
    config = tf.BertConfig(intermediate_size=128, max_position_embeddings=LENGTH, pad_token_id=3, **SHAPE, **labels)
    model: Any = tf.BertForSequenceClassification(config)
    rows = [json.loads(line) for line in (lines / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    by_label = [[row["text"] for row in rows if row["label"] == name] for name in ("prose", "code")]

    def draw() -> dict[str, Tensor]:
        chosen = [(label, texts[int(torch.randint(len(texts), ()))]) for label, texts in enumerate(by_label) for _ in range(16)]
        inputs = tokenizer([text for _, text in chosen], truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
        return {**inputs, "labels": torch.tensor([label for label, _ in chosen])}

    train(model, draw, 60)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "rows.jsonl").write_bytes((lines / f"{split}.jsonl").read_bytes())
    made = run(
        *("prune", tmp_path / "model", "--calibration", tmp_path / "data", "--seq-len", LENGTH, "--target", "both"),
        *("--method", "ucb", "--ratio", 0.1, "--pulls-per-step", 8, "--batches-per-pull", 1, "--screen", 0),
        *("--batch-size", 16, "--evaluation-size", 256, "--no-measure", "--json", "-o", tmp_path / "out"),
    )
    assert made.code == 0, made.err
    result = json.loads(made.out)
    assert result["dense"]["top1"] > 0.8
    assert result["cut"]["shrunk"]["top1"] > result["dense"]["top1"] - 0.1
    assert to_onnx(tmp_path / "out", tmp_path / "small.onnx") < 1e-4
