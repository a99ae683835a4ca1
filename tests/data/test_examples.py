from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from secateur.data.batches import Batches, check_apart, digest_file
from secateur.data.examples import MASKED_SHARE, example_batches, masked_batches
from secateur.data.load import has_labels, load_batches
from secateur.errors import DataError, SettingError
from secateur.model.families import task_of
from secateur.model.loading import load
from secateur.model.losses import IGNORED, REFERENCE
from secateur.settings import Settings
from tiny import FAMILIES_TINY, tiny_tokenizer
from worlds import SEQ_LEN, Encoders, make_encoder_tokenizer, one_sentence

ROWS = [
    {"text": "the red cat sees a dog", "label": "good"},
    {"text": "a bird sings", "label": "bad"},
    {"text": "the old tree", "label": "good"},
]
CLASSES = {"bad": 0, "good": 1}
CLS, SEP, PAD, UNK, MASK = range(5)


@pytest.fixture(scope="module")
def tokenizer(encoders: Encoders) -> Any:
    return make_encoder_tokenizer(encoders.text / "train.txt")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: str, rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a file of the kind that its name says."""
    kind = Path(path).suffix
    if kind == ".jsonl":
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        mark = "\t" if kind == ".tsv" else ","
        lines = [mark.join(rows[0]), *(mark.join(str(value) for value in row.values()) for row in rows)]
        Path(path).write_text("\n".join(lines) + "\n")
    return path


def examples(name: str, tokenizer: Any, **options: Any) -> Batches:
    settings: dict[str, Any] = {"split": "train", "limit": None, "seq_len": SEQ_LEN, "batch_size": 2, "classes": CLASSES}
    return example_batches(name, tokenizer, **settings | options)


def masked(name: str, tokenizer: Any, **options: Any) -> Batches:
    settings: dict[str, Any] = {"split": "train", "limit": None, "seq_len": SEQ_LEN, "batch_size": 4, "seed": 1}
    return masked_batches(name, tokenizer, **settings | options)


def texts(batches: Batches, tokenizer: Any) -> list[str]:
    return [
        tokenizer.decode(ids[mask == 1], skip_special_tokens=True)
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def labels(batches: Batches) -> list[int]:
    return [int(label) for batch in batches for label in batch["labels"]]


# Texts with labels

every_kind = pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])


@every_kind
@pytest.mark.parametrize("by", ["name", "another case", "number"])
def test_every_kind_of_file_gives_its_texts_and_labels_in_order(kind: str, by: str, tokenizer: Any) -> None:
    said: dict[str, Any] = {
        label: {"name": label, "another case": label.upper(), "number": n}[by] for label, n in CLASSES.items()
    }
    file = write(f"data.{kind}", [row | {"label": said[row["label"]]} for row in ROWS])
    found = examples(file, tokenizer)
    assert labels(found) == [1, 0, 1]
    assert texts(found, tokenizer) == [row["text"] for row in ROWS]
    assert [len(batch["input_ids"]) for batch in found] == [2, 1]
    assert found.source.files == (digest_file(Path(file)),)
    assert len(set(found.source.rows)) == 3


def test_a_text_is_tokenised_with_its_special_tokens_and_padded_to_the_longest_of_its_batch(tokenizer: Any) -> None:
    first, second = examples(write("data.jsonl", ROWS), tokenizer)
    assert first["input_ids"].shape == (2, 8) and second["input_ids"].shape == (1, 5)
    assert first["attention_mask"].tolist() == [[1] * 8, [1] * 5 + [0] * 3]
    assert first["input_ids"][1].tolist()[-4:] == [SEP, PAD, PAD, PAD]
    assert first["input_ids"][:, 0].tolist() == [CLS, CLS]
    assert first.keys() == {"input_ids", "token_type_ids", "attention_mask", "labels"}


def test_a_long_text_is_cut_to_the_sequence_length(tokenizer: Any) -> None:
    (batch,) = examples(write("data.jsonl", [{"text": "the cat " * 20}]), tokenizer)
    assert batch["input_ids"].shape == (1, SEQ_LEN) and batch["input_ids"][0, -1] == SEP


@every_kind
def test_the_second_text_of_a_pair_follows_the_first(kind: str, tokenizer: Any) -> None:
    rows = [
        {"text": "the cat", "text_pair": "a dog", "label": 1},
        {"text": "a bird", "text_pair": "the tree sings", "label": 0},
    ]
    (batch,) = examples(write(f"data.{kind}", rows), tokenizer)
    assert tokenizer.decode(batch["input_ids"][0][batch["attention_mask"][0] == 1]) == "[cls] the cat [sep] a dog [sep]"
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1]]  # the padding has 0
    assert labels(examples(f"data.{kind}", tokenizer)) == [1, 0]


@pytest.mark.parametrize("rows", [[{"text": "the cat"}], [*ROWS, {"text": "the cat"}]], ids=["none", "one is missing"])
def test_without_a_label_for_every_text_there_are_none(rows: list[dict[str, Any]], tokenizer: Any) -> None:
    found = examples(write("data.jsonl", rows), tokenizer)
    assert not has_labels(found) and len(texts(found, tokenizer)) == len(rows)


def test_labels_are_read_only_for_a_classifier(tokenizer: Any) -> None:
    assert not has_labels(examples(write("data.jsonl", ROWS), tokenizer, classes=None))


@pytest.mark.parametrize("label", ["middling", 2, "-1", "2", ""])
def test_a_label_that_is_no_class_is_refused_with_the_classes(label: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        examples(write("data.jsonl", [*ROWS, {"text": "the cat", "label": label}]), tokenizer)
    assert "2 (" in one_sentence(caught, repr(str(label)), "data.jsonl", "bad, good")


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("data.jsonl", '{"text": "the cat"}\n{"sentence": "a dog"}\n', "Row 2"),
        ("data.jsonl", '["the cat"]\n', "Row 1"),
        ("data.jsonl", '{"text": 7}\n', "Row 1"),
        ("data.csv", "sentence,label\nthe cat,1\n", "Row 1"),
        ("data.tsv", "text,label\nthe cat,1\n", "Row 1"),  # commas in a file of tabs
    ],
)
def test_a_row_without_a_text_is_refused_by_its_number(name: str, content: str, row: str, tokenizer: Any) -> None:
    Path(name).write_text(content)
    with pytest.raises(DataError) as caught:
        examples(name, tokenizer)
    one_sentence(caught, name, row, '"text"')


@pytest.mark.parametrize(
    ("name", "content"), [("data.jsonl", b"{oops\n"), ("data.parquet", b"PAR2"), ("data.csv", b"text\n\xff\xfe\n")]
)
def test_a_damaged_file_is_one_sentence(name: str, content: bytes, tokenizer: Any) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        examples(name, tokenizer)
    one_sentence(caught, name)


@pytest.mark.parametrize("content", ["", '{"text": " "}\n'])
def test_a_file_without_any_text_is_refused(content: str, tokenizer: Any) -> None:
    Path("data.jsonl").write_text(content)
    with pytest.raises(DataError) as caught:
        examples("data.jsonl", tokenizer)
    one_sentence(caught, "data.jsonl")


def test_a_folder_gives_the_files_of_its_split(tokenizer: Any) -> None:
    Path("data").mkdir()
    for split, rows in (("train", ROWS[:2]), ("test", ROWS[2:])):
        write(f"data/{split}.jsonl", rows)
    found = [examples("data", tokenizer, split=split) for split in ("train", "test")]
    assert [labels(one) for one in found] == [[1, 0], [1]]
    check_apart(found[0].source, found[1].source)
    with pytest.raises(DataError, match="overlaps"):
        check_apart(found[0].source, examples("data/train.jsonl", tokenizer, split="test").source)


def test_a_text_file_gives_a_text_a_line_and_no_labels(tokenizer: Any) -> None:
    Path("data.txt").write_text("the cat\n\na dog sees\n")
    found = examples("data.txt", tokenizer)
    assert texts(found, tokenizer) == ["the cat", "a dog sees"] and not has_labels(found)


def test_the_text_that_comes_with_secateur_is_taken_by_paragraphs() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<s>"
    found = examples("builtin", tokenizer, limit=6)
    assert len(found.source.rows) == 6 and all(batch["input_ids"].shape[1] == SEQ_LEN for batch in found)


@pytest.mark.parametrize(("limit", "size", "shapes"), [(None, 2, [2, 1]), (2, 2, [2]), (2, 1, [1, 1]), (9, 4, [3])])
def test_the_limit_counts_texts_and_the_batch_size_cuts_them(
    limit: int | None, size: int, shapes: list[int], tokenizer: Any
) -> None:
    found = examples(write("data.jsonl", ROWS), tokenizer, limit=limit, batch_size=size)
    assert [len(batch["input_ids"]) for batch in found] == shapes
    assert len(found.source.rows) == sum(shapes)


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"batch_size": 0}])
def test_counts_below_one_are_refused(wrong: dict[str, int], tokenizer: Any, encoders: Encoders) -> None:
    for read in (examples, masked):
        with pytest.raises(SettingError, match="at least 1"):
            read(str(encoders.text), tokenizer, **wrong)


# Masked texts


def test_the_same_seed_masks_the_same_tokens_and_another_seed_others(tokenizer: Any, encoders: Encoders) -> None:
    first, again, other = (masked(str(encoders.text), tokenizer, seed=seed) for seed in (1, 1, 2))
    for one, two in zip(first, again, strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(first, other, strict=True))
    assert first.source == again.source == other.source  # the same texts, whatever is masked in them


@pytest.mark.parametrize("documents", ["joined", "lines"])
def test_a_masked_token_is_the_label_at_its_place_and_no_special_token_is_masked(
    documents: str, tokenizer: Any, encoders: Encoders
) -> None:
    found = masked(str(encoders.text), tokenizer, documents=documents)
    plain = masked(str(encoders.text), tokenizer, documents=documents, seed=9)  # the same texts, masked elsewhere
    n = hidden = 0
    for batch, other in zip(found, plain, strict=True):
        ids, labels = batch["input_ids"], batch["labels"]
        places = labels != IGNORED
        assert torch.equal(ids == MASK, places)
        assert not torch.isin(labels[places], torch.arange(5)).any()
        assert (places.sum(1) >= 1).all()
        assert (ids[batch["attention_mask"] == 0] == PAD).all() and not places[batch["attention_mask"] == 0].any()
        whole, rest = (torch.where(one["labels"] == IGNORED, one["input_ids"], one["labels"]) for one in (batch, other))
        assert torch.equal(whole, rest)  # what is hidden is what was there
        assert (whole[:, 0] == CLS).all()
        hidden, n = hidden + int(places.sum()), n + int((whole > MASK).sum())
    assert hidden / n == pytest.approx(MASKED_SHARE, abs=0.05)


def test_joined_texts_fill_whole_windows_with_the_special_tokens_around_them(tokenizer: Any, encoders: Encoders) -> None:
    found = masked(str(encoders.text), tokenizer, limit=10)
    assert [tuple(batch["input_ids"].shape) for batch in found] == [(4, SEQ_LEN), (4, SEQ_LEN), (2, SEQ_LEN)]
    for batch in found:
        assert (batch["input_ids"][:, 0] == CLS).all() and (batch["input_ids"][:, -1] == SEP).all()
        assert (batch["attention_mask"] == 1).all()
    assert len(found.source.rows) == 10


def test_texts_that_are_not_joined_are_rows_of_their_own(tokenizer: Any) -> None:
    Path("data.txt").write_text("the cat\n\na dog sees a bird\n")
    (batch,) = masked("data.txt", tokenizer, documents="lines")
    assert batch["attention_mask"].sum(1).tolist() == [4, 7]


def test_a_tokenizer_without_a_mask_token_is_refused_with_advice(encoders: Encoders) -> None:
    tokenizer = make_encoder_tokenizer(encoders.text / "train.txt")
    tokenizer.mask_token = None
    with pytest.raises(DataError, match=r"no mask token.*--loss distance"):
        masked(str(encoders.text), tokenizer)


def test_too_little_text_for_a_window_is_refused(tokenizer: Any) -> None:
    Path("data.txt").write_text("the cat\n")
    with pytest.raises(DataError) as caught:
        masked("data.txt", tokenizer)
    one_sentence(caught, "data.txt", "16", "--seq-len")


# What a model gets


def of(folder: Path, data: Path | str, split: str = "train", **settings: Any) -> Batches:
    model, processor = load(str(folder), device="cpu")
    chosen = Settings("model", seq_len=SEQ_LEN, **settings).for_task(task_of(model))
    return load_batches(model, processor, str(data), chosen, split=split, size=8)


def test_each_task_gets_the_batches_that_it_can_be_measured_on(encoders: Encoders) -> None:
    assert {"labels"} <= of(encoders.masked, encoders.text)[0].keys()
    assert of(encoders.masked, encoders.text)[0]["labels"].dim() == 2
    assert of(encoders.classes, encoders.labelled)[0]["labels"].shape == (4,)
    for folder, data in (
        (encoders.classes, encoders.text),
        (encoders.sentences, encoders.labelled),
        (encoders.tower, encoders.images),
    ):
        batch = of(folder, data)[0]
        assert REFERENCE in batch and "labels" not in batch


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_distance_chooses_without_labels_and_what_judges_has_them(encoders: Encoders, split: str) -> None:
    for folder, data in ((encoders.masked, encoders.text), (encoders.classes, encoders.labelled)):
        batch = of(folder, data, split, loss="distance")[0]
        assert (REFERENCE in batch) == (split == "train")  # which counts before any labels
        assert split == "train" or "labels" in batch


def test_asking_for_labels_that_are_not_there_is_refused(encoders: Encoders) -> None:
    for folder, data in (
        (encoders.classes, encoders.text),
        (encoders.sentences, encoders.text),
        (encoders.tower, encoders.images),
    ):
        with pytest.raises(DataError) as caught:
            of(folder, data, loss="labels")
        one_sentence(caught, data, "--loss distance")


def test_a_loss_of_ones_own_gets_the_batches_as_they_are(encoders: Encoders) -> None:
    batch = of(encoders.sentences, encoders.text, loss="module:function")[0]
    assert not {REFERENCE, "labels"} & batch.keys()


def test_roberta_takes_as_many_tokens_as_it_has_positions_after_its_padding(encoders: Encoders, tokenizer: Any) -> None:
    model = FAMILIES_TINY["roberta"]()  # 19 positions, of which the first 3 are before the first token's
    for length, fits in ((16, True), (17, False)):
        settings = Settings("model", seq_len=length).for_task("masked text")
        if fits:
            found = load_batches(model, tokenizer, str(encoders.text), settings, split="train", size=8)
            assert found[0]["input_ids"].shape[1] == 16
        else:
            with pytest.raises(SettingError, match=r"17.*at most 16"):
                load_batches(model, tokenizer, str(encoders.text), settings, split="train", size=8)
