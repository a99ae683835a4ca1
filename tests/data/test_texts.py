from __future__ import annotations

import io
import json
import random
import re
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
from torch import Tensor

from secateur.data import texts
from secateur.data.batches import Batches, check_apart
from secateur.data.texts import text_batches
from secateur.errors import DataError, MissingExtra, SettingError
from secateur.settings import BUILTIN
from tiny import REAL_DATA, character_tokenizer, tiny_tokenizer, without_network
from worlds import one_sentence

TOKENIZER = tiny_tokenizer()
WORDS = ("the", "cat", "sat", "on", "mat", "héllo", "dog")


def some_lines(n: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 9))) for _ in range(n)]


def tokens_of(text: str) -> list[int]:
    """The text's tokens by the tokenizer's Rust half, which texts.py does not call."""
    return list(TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def joined(batches: Batches, key: str = "input_ids") -> Tensor:
    return torch.cat([batch[key] for batch in batches])


def text_of(batches: Batches) -> str:
    return str(TOKENIZER.decode(joined(batches).flatten()))


def write_lines(path: Path, lines: Sequence[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def write_jsonl(path: Path, texts: Sequence[Any]) -> str:
    return write_lines(path, [json.dumps({"text": text}) for text in texts])


def write_parquet(path: Path, texts: Sequence[Any], column: str = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({column: texts}), path)
    return str(path)


# Windows


def test_windows_do_not_overlap_and_joined_they_are_the_token_stream(tmp_path: Path) -> None:
    lines = some_lines(700)  # more than are tokenised at a time
    batches = text_batches(write_lines(tmp_path / "text.txt", lines), TOKENIZER, seq_len=16)
    stream = tokens_of("\n".join(lines) + "\n")
    n_windows = len(stream) // 16
    assert joined(batches).shape == (n_windows, 16)
    assert joined(batches).flatten().tolist() == stream[: n_windows * 16]


def test_every_token_of_a_window_is_a_label(tmp_path: Path) -> None:
    batches = text_batches(write_lines(tmp_path / "text.txt", some_lines(20)), TOKENIZER, seq_len=16)
    assert all(torch.equal(batch["labels"], batch["input_ids"]) for batch in batches)


def test_the_windows_of_a_limit_are_the_first_of_all(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", some_lines(50))
    everything, some = text_batches(path, TOKENIZER, seq_len=16), text_batches(path, TOKENIZER, seq_len=16, limit=5)
    assert torch.equal(joined(some), joined(everything)[:5])
    assert some.source.rows == everything.source.rows[:5]


def test_a_limit_beyond_the_text_gives_all_there_is(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", some_lines(50))
    everything, more = text_batches(path, TOKENIZER, seq_len=16), text_batches(path, TOKENIZER, seq_len=16, limit=10_000)
    assert torch.equal(joined(more), joined(everything))


def test_batches_have_the_size_asked_for_and_the_last_one_what_is_left(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", some_lines(50))
    batches = text_batches(path, TOKENIZER, seq_len=16, limit=7, batch_size=3)
    assert [len(batch["input_ids"]) for batch in batches] == [3, 3, 1]
    assert len(batches) == 3 and len(batches.source.rows) == 7
    assert torch.equal(joined(batches), joined(text_batches(path, TOKENIZER, seq_len=16, limit=7, batch_size=100)))


def test_a_text_of_exactly_one_window_is_enough(tmp_path: Path) -> None:
    batches = text_batches(write_lines(tmp_path / "text.txt", ["the cat"]), TOKENIZER, seq_len=3)
    assert text_of(batches) == "the cat\n"


@pytest.mark.parametrize("puts_bos", [True, False], ids=["as OPT and Llama do", "as GPT-2 does not"])
def test_the_beginning_token_is_before_each_window_if_and_only_if_the_tokenizer_puts_it_before_a_text(
    tmp_path: Path, puts_bos: bool
) -> None:
    lines = some_lines(30)
    path = write_lines(tmp_path / "text.txt", lines)
    windows = joined(text_batches(path, tiny_tokenizer(puts_bos=puts_bos), seq_len=16))
    stream = tokens_of("\n".join(lines) + "\n")
    length = 15 if puts_bos else 16
    assert (windows == TOKENIZER.bos_token_id).sum(1).tolist() == [int(puts_bos)] * len(windows)
    assert windows[:, 16 - length :].flatten().tolist() == stream[: len(windows) * length]
    assert puts_bos == bool((windows[:, 0] == TOKENIZER.bos_token_id).all())
    assert len(windows) == len(stream) // length


def test_a_tokenizer_without_a_beginning_token_puts_none(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    path = write_lines(tmp_path / "text.txt", ["the cat"])
    assert torch.equal(joined(text_batches(path, tokenizer, seq_len=3)), joined(text_batches(path, TOKENIZER, seq_len=3)))


# Files and folders


def test_the_same_documents_give_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    lines = [*some_lines(10), "", "  ", *some_lines(10, seed=1)]
    names = [
        write_lines(tmp_path / "text.txt", lines),
        write_jsonl(tmp_path / "text.jsonl", lines),
        write_parquet(tmp_path / "text.parquet", lines),
    ]
    rows = [text_batches(name, TOKENIZER, seq_len=8).source.rows for name in names]
    assert len(rows[0]) > 5
    assert rows[0] == rows[1] == rows[2]


def test_a_document_that_ends_in_a_newline_gives_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    lines = some_lines(10)
    ended = [f"{line}\n" for line in lines]  # as WikiText's rows do
    names = [
        write_lines(tmp_path / "text.txt", lines),
        write_parquet(tmp_path / "text.parquet", ended),
        write_jsonl(tmp_path / "text.jsonl", ended),
    ]
    texts = [text_of(text_batches(name, TOKENIZER, seq_len=8)) for name in names]
    assert texts[0] == texts[1]
    assert texts[0] == texts[2]


def test_a_windows_text_file_gives_the_same_rows(tmp_path: Path) -> None:
    lines = some_lines(10)
    (tmp_path / "dos.txt").write_bytes("\r\n".join(lines).encode())
    unix, dos = write_lines(tmp_path / "unix.txt", lines), str(tmp_path / "dos.txt")
    assert text_batches(dos, TOKENIZER, seq_len=8).source.rows == text_batches(unix, TOKENIZER, seq_len=8).source.rows


def test_a_row_of_a_parquet_file_may_be_missing(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "text.parquet", ["the cat", None, "the mat"])
    assert text_of(text_batches(path, TOKENIZER, seq_len=9)) == "the cat\nthe mat\n"


TRAIN, TEST = ["the train"] * 4, ["the test"] * 4


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.txt", "test.txt"),
        ("wiki.train.tokens.txt", "wiki.test.tokens.txt"),
        ("train/part.txt", "test/part.txt"),
        ("raw/train/a/part.txt", "raw/test/a/part.txt"),
        ("train-00000-of-00001.txt", "test-00000-of-00001.txt"),
        ("TRAIN.TXT", "Test.TXT"),
        ("train.txt", "validation.txt"),
        ("train.txt", "valid.txt"),
        ("train.txt", "val.txt"),
        ("train.txt", "wiki.valid.tokens.txt"),
        ("train/part.txt", "val/part.txt"),
    ],
)
def test_a_folder_gives_the_files_of_the_split_asked_for(tmp_path: Path, train: str, test: str) -> None:
    write_lines(tmp_path / train, TRAIN)
    write_lines(tmp_path / test, TEST)
    for split, lines in (("train", TRAIN), ("test", TEST)):
        batches = text_batches(str(tmp_path), TOKENIZER, split=split, seq_len=4, batch_size=1)
        assert text_of(batches).startswith(lines[0])
        assert batches.source.split == split


def test_a_folder_with_a_test_split_does_not_evaluate_on_its_validation_split(tmp_path: Path) -> None:
    write_lines(tmp_path / "validation.txt", ["the wrong"] * 4)
    write_lines(tmp_path / "test.txt", TEST)
    assert "wrong" not in text_of(text_batches(str(tmp_path), TOKENIZER, split="test", seq_len=4))


def test_the_parts_of_a_split_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "train-1.txt", ["the mat"])
    write_jsonl(tmp_path / "train-0.jsonl", ["the cat"])
    batches = text_batches(str(tmp_path), TOKENIZER, seq_len=9, documents="joined")
    assert text_of(batches) == "the cat\nthe mat\n"
    assert len(batches.source.files) == 2


def test_a_folder_that_knows_no_splits_is_read_whole_for_any(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.txt", ["the cat"])
    write_lines(tmp_path / "b.txt", ["the mat"])
    rows = {text_batches(str(tmp_path), TOKENIZER, split=split, seq_len=9).source.rows for split in ("train", "test")}
    assert len(rows) == 1


@pytest.mark.parametrize(("there", "wanted"), [("train.txt", "test"), ("test.txt", "train"), ("val/a.txt", "train")])
def test_a_folder_without_the_split_asked_for_is_refused(tmp_path: Path, there: str, wanted: str) -> None:
    write_lines(tmp_path / there, TRAIN)
    with pytest.raises(DataError) as caught:
        text_batches(str(tmp_path), TOKENIZER, split=wanted, seq_len=4)
    assert wanted in one_sentence(caught, tmp_path)


def builtin_text(split: str) -> str:
    """The text of a split in one line, without the last tokens, which fill no window."""
    return " ".join(text_of(text_batches(BUILTIN, TOKENIZER, split=split, seq_len=64)).split())


def test_every_builtin_topic_either_calibrates_or_evaluates() -> None:
    from pydoc_data.topics import topics

    train, test = builtin_text("train"), builtin_text("test")
    titles = [" ".join(text.split("\n\n")[0].split()) for text in topics.values()]
    assert sum(title not in train and title not in test for title in titles) <= 1  # one may be in the tail that fills no window
    whole = len(" ".join(" ".join(topics.values()).split()))
    assert 0.95 * whole < len(train) + len(test) < whole  # none does both; what evaluation would repeat is left out
    assert 0.15 < len(test) / whole < 0.35


def test_no_builtin_paragraph_both_calibrates_and_evaluates() -> None:
    from pydoc_data.topics import topics

    train, test = builtin_text("train"), builtin_text("test")
    paragraphs = {" ".join(paragraph.split()) for text in topics.values() for paragraph in text.split("\n\n")}
    both = [paragraph for paragraph in paragraphs if len(paragraph) > 80 and paragraph in train and paragraph in test]
    assert len(paragraphs) > 1000
    assert not both, f"{sum(map(len, both))} characters of {len(test)}"


def test_the_builtin_text_calibrates_and_evaluates_without_a_network() -> None:
    calibration = text_batches(BUILTIN, TOKENIZER, split="train", limit=200)
    evaluation = text_batches(BUILTIN, TOKENIZER, split="test", limit=200)
    assert len(calibration.source.rows) == len(evaluation.source.rows) == 200
    check_apart(calibration.source, evaluation.source)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"the real data is not here: {REAL_DATA}")
@pytest.mark.slow
def test_the_real_wikitext2_gives_windows_of_128_tokens_and_its_splits_are_apart() -> None:
    name = str(REAL_DATA / "wikitext2")
    evaluation = text_batches(name, TOKENIZER, split="test")
    lines = (REAL_DATA / "wikitext2" / "test.txt").read_text(encoding="utf-8").split("\n")
    stream = tokens_of("\n".join(line for line in lines[:300] if line.strip()))
    windows = joined(evaluation)
    assert windows.shape[1] == 128 and len(windows) > 5000
    assert windows.flatten()[: len(stream)].tolist() == stream
    check_apart(text_batches(name, TOKENIZER, split="train").source, evaluation.source)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"the real data is not here: {REAL_DATA}")
@pytest.mark.slow
def test_the_last_word_of_every_real_lambada_passage_is_marked() -> None:
    path = REAL_DATA / "lambada" / "lambada_test.jsonl"
    passages = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    batches = text_batches(str(path), TOKENIZER, split="test", seq_len=256, batch_size=len(passages))
    marked = [TOKENIZER.decode(ids[mark]) for ids, mark in zip(joined(batches), joined(batches, "last_word"), strict=True)]
    assert marked == [" " + passage.split(" ")[-1] for passage in passages]


# LAMBADA


def passages(path: Path, texts: Sequence[str], *, tokenizer: Any = TOKENIZER, seq_len: int = 12) -> dict[str, Tensor]:
    batches = text_batches(write_jsonl(path / "lambada.jsonl", texts), tokenizer, seq_len=seq_len, batch_size=100)
    assert len(batches) == 1
    return dict(batches[0])


def test_lambada_passages_stay_apart_one_a_row_padded_on_the_right(tmp_path: Path) -> None:
    texts = ["the cat the cat", "the mat the hat", "a cat"]
    rows = passages(tmp_path, texts)
    assert rows["input_ids"].shape == (3, 12)
    for text, ids, labels in zip(texts, rows["input_ids"], rows["labels"], strict=True):
        expected = tokens_of(text)
        assert ids[: len(expected)].tolist() == expected
        assert labels.tolist() == expected + [-100] * (12 - len(expected))
        assert TOKENIZER.bos_token_id not in ids  # the padding is a token like any other, which a causal model never sees


@pytest.mark.parametrize("puts_bos", [True, False])
@pytest.mark.parametrize(
    ("text", "last", "n_tokens"),
    [
        ("the mat the cat", " cat", 1),
        ("the cat the mat", " mat", 4),
        ("the cat a héllo", " héllo", 7),
        ("the cat  mat", " mat", 4),
        ("the cat mat \n", " mat", 4),
        ("the cat mat   ", " mat", 4),
        ("the cat sat, it's", " it's", 5),
    ],
)
def test_exactly_the_tokens_of_the_last_word_are_marked(
    tmp_path: Path, text: str, last: str, n_tokens: int, puts_bos: bool
) -> None:
    rows = passages(tmp_path, [text], tokenizer=tiny_tokenizer(puts_bos=puts_bos), seq_len=20)
    ids, marked = rows["input_ids"][0], rows["last_word"][0]
    assert TOKENIZER.decode(ids[marked]) == last
    assert int(marked.sum()) == n_tokens
    assert int(marked.nonzero().max()) == int((rows["labels"][0] != -100).nonzero().max())
    assert bool(ids[0] == TOKENIZER.bos_token_id) == puts_bos


@pytest.mark.parametrize("puts_bos", [True, False])
def test_a_passage_that_is_too_long_loses_its_beginning(tmp_path: Path, puts_bos: bool) -> None:
    text = "the cat the cat the cat mat"
    rows = passages(tmp_path, [text], tokenizer=tiny_tokenizer(puts_bos=puts_bos), seq_len=6)
    expected = [TOKENIZER.bos_token_id, *tokens_of(text)[-5:]] if puts_bos else tokens_of(text)[-6:]
    assert rows["input_ids"][0].tolist() == rows["labels"][0].tolist() == expected
    assert rows["last_word"][0].tolist() == [False, False, True, True, True, True]


def test_the_passages_of_a_limit_are_the_first(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "lambada_test.jsonl", ["the cat", "the mat", "the hat"])
    batches = text_batches(path, TOKENIZER, seq_len=8, limit=2, batch_size=1)
    assert [TOKENIZER.decode(batch["input_ids"][batch["last_word"]]) for batch in batches] == [" cat", " mat"]


def test_a_folder_named_lambada_gives_passages_too(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "lambada" / "train.jsonl", ["the mat"])
    write_jsonl(tmp_path / "lambada" / "test.jsonl", ["the cat", "the hat"])
    batches = text_batches(str(tmp_path / "lambada"), TOKENIZER, split="test", seq_len=8)
    assert joined(batches, "last_word").sum(1).tolist() == [1, 4]


def test_other_texts_have_no_marks(tmp_path: Path) -> None:
    assert "last_word" not in text_batches(write_lines(tmp_path / "text.txt", some_lines(9)), TOKENIZER, seq_len=8)[0]


# Hub data sets


@pytest.fixture
def hub_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the form of a hub data set, two configurations of two splits, that `datasets` really reads."""
    root = tmp_path / "owner" / "name"
    configurations = ("first", "second")
    for configuration in configurations:
        for split in ("train", "test"):
            texts = ["", f"the {configuration} {split} \n", "", "the cat the mat \n"]
            write_parquet(root / configuration / f"{split}-00000-of-00001.parquet", texts)
    files = {name: [{"split": split, "path": f"{name}/{split}-*"} for split in ("train", "test")] for name in configurations}
    front = [{"config_name": name, "data_files": parts} for name, parts in files.items()]
    (root / "README.md").write_text(f"---\nconfigs: {json.dumps(front)}\n---\n")  # JSON is YAML
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # where owner/name is a folder, and owner/name:second is not
    return root


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", ["wikitext2", "owner/name:second"])
def test_a_hub_data_set_gives_the_texts_of_its_configuration_and_split(
    hub_data: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: str
) -> None:
    monkeypatch.setitem(texts.HUB_NAMES, "wikitext2", (str(hub_data), "second"))
    lines = [f"the second {split} ", "the cat the mat "]
    expected = text_batches(write_lines(hub_data.parent / "same.txt", lines), TOKENIZER, seq_len=8)
    batches = text_batches(name, TOKENIZER, split=split, seq_len=8)
    assert batches.source.rows == expected.source.rows
    assert (batches.source.name, batches.source.split) == (name, split)
    assert batches.source.files == text_batches(name, TOKENIZER, split=split, seq_len=4).source.files  # known again by it


def test_lambada_from_the_hub_gives_passages(hub_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(texts.HUB_NAMES, "lambada", (str(hub_data), "first"))
    batches = text_batches("lambada", TOKENIZER, split="test", seq_len=20)
    marked = [TOKENIZER.decode(ids[mark]) for ids, mark in zip(joined(batches), joined(batches, "last_word"), strict=True)]
    assert marked == [" test", " mat"]


@pytest.mark.parametrize(
    ("name", "repository", "configuration"),
    [
        ("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1"),
        ("lambada", "cimec/lambada", "plain_text"),
        ("owner/a-name.1", "owner/a-name.1", None),
        ("owner/name:some_part", "owner/name", "some_part"),
    ],
)
def test_a_name_asks_the_hub_for_its_repository_configuration_and_split(
    monkeypatch: pytest.MonkeyPatch, name: str, repository: str, configuration: str | None
) -> None:
    asked = []

    def load_dataset(*args: Any, **settings: Any) -> dict[str, list[str]]:
        asked.append((*args, settings))
        return {"text": ["the cat the mat"]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(text_batches(name, TOKENIZER, split="test", seq_len=4, documents="joined")) == 1
    assert asked == [(repository, configuration, {"split": "test"})]


def test_a_hub_without_a_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    without_network(monkeypatch)
    with pytest.raises(DataError) as caught:
        text_batches("nobody/no-such-set", TOKENIZER, split="test")
    assert "test" in one_sentence(caught, "nobody/no-such-set", "network")


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach the hub\nand a traceback"), TimeoutError()], ids=repr)
def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*args: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as caught:
        text_batches("wikitext2", TOKENIZER, split="test")
    assert "test" in one_sentence(caught, "Salesforce/wikitext", "network")


@pytest.mark.parametrize(("name", "split"), [("owner/name:third", "train"), ("owner/name:first", "dev")])
def test_a_configuration_or_split_that_the_hub_does_not_have_is_one_sentence(hub_data: Path, name: str, split: str) -> None:
    with pytest.raises(DataError) as caught:
        text_batches(name, TOKENIZER, split=split)
    one_sentence(caught, "owner/name")


def test_a_hub_data_set_without_a_text_column_is_one_sentence(hub_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(hub_data.parent / "other" / "train.parquet", ["the cat"], column="content")
    monkeypatch.setitem(texts.HUB_NAMES, "wikitext2", (str(hub_data.parent / "other"), None))
    with pytest.raises(DataError) as caught:
        text_batches("wikitext2", TOKENIZER)
    assert "text" in one_sentence(caught, hub_data.parent / "other")


def test_a_row_of_a_hub_data_set_may_be_missing(hub_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(hub_data.parent / "gaps" / "train.parquet", ["the cat", None, "the mat"])
    monkeypatch.setitem(texts.HUB_NAMES, "wikitext2", (str(hub_data.parent / "gaps"), None))
    assert text_of(text_batches("wikitext2", TOKENIZER, seq_len=9)) == "the cat\nthe mat\n"


def test_a_hub_data_set_without_the_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"wikitext2.*pip install datasets"):
        text_batches("wikitext2", TOKENIZER)


def test_a_parquet_file_without_the_pyarrow_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "text.parquet", ["the cat the mat"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install pyarrow.*datasets"):
        text_batches(path, TOKENIZER, seq_len=4)


# Texts that cannot serve


def _damaged_parquet() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["the cat the mat"]}), file)
    return file.getvalue()[: -len(file.getvalue()) // 3] + b"PAR1"


def _parquet_of(texts: Sequence[Any], column: str = "text") -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({column: texts}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "8 tokens"),
        ("blank.txt", b"\n \n\t\r\n\n", "8 tokens"),
        ("short.txt", b"the cat", "8 tokens"),
        ("empty.jsonl", b"", "8 tokens"),
        ("latin1.txt", "the cat sat on the mat, séance".encode("latin-1"), "UTF-8"),
        ("binary.jsonl", b'{"text": "\xff\xfe"}\n', "UTF-8"),
        ("broken.jsonl", b'{"text": "the cat"}\n\n{"text": "the\n', r"[Ll]ine 3\b"),
        ("nameless.jsonl", b'{"text": "the cat"}\n{"content": "the mat"}\n', r"[Ll]ine 2\b"),
        ("list.jsonl", b'["the cat"]\n', r"[Ll]ine 1\b"),
        ("string.jsonl", b'"the cat"\n', r"[Ll]ine 1\b"),
        ("number.jsonl", b'{"text": 3}\n', r"[Ll]ine 1\b"),
        ("null.jsonl", b'{"text": null}\n', r"[Ll]ine 1\b"),
        ("empty.parquet", b"", "column.*text"),
        ("text.parquet", b"the cat sat on the mat", "column.*text"),
        ("damaged.parquet", _damaged_parquet(), "column.*text"),
        ("column.parquet", _parquet_of(["the cat"], "content"), "column.*text"),
        ("numbers.parquet", _parquet_of([1, 2, 3]), "column.*text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_cannot_serve_is_one_sentence_that_names_it(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        text_batches(str(tmp_path / name), TOKENIZER, seq_len=8)
    assert re.search(says, one_sentence(caught, tmp_path / name))


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        text_batches(str(tmp_path), TOKENIZER)
    assert "text" in one_sentence(caught, tmp_path)


@pytest.mark.parametrize("name", ["wikitext", "no/such/file.txt", "missing.txt", "", "a" * 300], ids=lambda name: name[:20])
def test_a_name_that_is_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_lines(tmp_path / "a.txt", some_lines(50))  # not what was asked for
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="wikitext2") as caught:  # which is what could have been meant
        text_batches(name, TOKENIZER, seq_len=8)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"seq_len": 1}, r"sequence length.* 1\b"),
        ({"seq_len": 0}, r"sequence length.* 0\b"),
        ({"limit": 0}, r"number of texts.* 0\b"),
        ({"limit": -3}, r"number of texts.* -3\b"),
        ({"batch_size": 0}, r"batch size.* 0\b"),
    ],
)
def test_counts_that_cannot_work_are_refused_before_anything_is_read(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        text_batches("no-such-text", TOKENIZER, **settings)


# Calibration and evaluation apart


def test_the_same_file_cannot_calibrate_and_evaluate_even_where_no_row_is_shared(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", some_lines(50))
    calibration, evaluation = text_batches(path, TOKENIZER, seq_len=8), text_batches(path, TOKENIZER, split="test", seq_len=9)
    assert not set(calibration.source.rows) & set(evaluation.source.rows)
    with pytest.raises(DataError) as caught:
        check_apart(calibration.source, evaluation.source)
    one_sentence(caught, path)


def test_a_copy_of_the_calibration_file_cannot_evaluate(tmp_path: Path) -> None:
    one, two = write_lines(tmp_path / "a.txt", some_lines(50)), write_lines(tmp_path / "b.txt", some_lines(50))
    with pytest.raises(DataError) as caught:
        check_apart(text_batches(one, TOKENIZER, limit=2).source, text_batches(two, TOKENIZER, limit=2).source)
    one_sentence(caught, one, two)


def test_the_same_windows_from_another_file_cannot_evaluate(tmp_path: Path) -> None:
    lines = some_lines(50)
    calibration = text_batches(write_lines(tmp_path / "a.txt", lines), TOKENIZER, seq_len=16, limit=20)
    evaluation = text_batches(write_jsonl(tmp_path / "b.jsonl", lines), TOKENIZER, seq_len=16, limit=30)
    with pytest.raises(DataError, match=r"\b20\b.*\b30\b"):
        check_apart(calibration.source, evaluation.source)


def test_two_splits_of_a_folder_may_calibrate_and_evaluate(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.txt", some_lines(50))
    write_lines(tmp_path / "test.txt", some_lines(50, seed=1))
    sources = [text_batches(str(tmp_path), TOKENIZER, split=split, seq_len=32).source for split in ("train", "test")]
    check_apart(*sources)
    with pytest.raises(DataError):
        check_apart(sources[0], sources[0])


def test_the_digest_of_a_source_tells_rows_and_their_order_apart(tmp_path: Path) -> None:
    one, two = some_lines(30), some_lines(30, seed=1)
    orders = {"a.txt": one, "b.txt": two, "c.txt": one[::-1], "d.txt": one}
    digests = [text_batches(write_lines(tmp_path / name, x), TOKENIZER, seq_len=8).source.digest for name, x in orders.items()]
    assert len(set(digests)) == 3 and digests[0] == digests[3]


# How documents are cut

SHORT = ["the cat", "the mat", "a hat", "the cat the cat"]


@pytest.mark.parametrize("puts_bos", [True, False])
@pytest.mark.parametrize("kind", ["text.txt", "text.jsonl", "text.parquet"])
def test_separate_documents_have_a_row_each_padded_on_the_right(tmp_path: Path, kind: str, puts_bos: bool) -> None:
    write = {".txt": write_lines, ".jsonl": write_jsonl, ".parquet": write_parquet}[Path(kind).suffix]
    tokenizer = tiny_tokenizer(puts_bos=puts_bos)
    batches = text_batches(write(tmp_path / kind, [*SHORT, "", " "]), tokenizer, seq_len=10, documents="lines", batch_size=3)
    assert [batch["input_ids"].shape for batch in batches] == [(3, 10), (1, 10)]
    assert set(batches[0]) == {"input_ids", "labels"}
    for text, ids, labels in zip(SHORT, joined(batches), joined(batches, "labels"), strict=True):
        expected = [TOKENIZER.bos_token_id] * puts_bos + tokens_of(text)
        assert ids[: len(expected)].tolist() == expected
        assert labels.tolist() == expected + [-100] * (10 - len(expected))


def test_a_document_that_ends_with_a_special_token_keeps_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "seqs.txt", ["ACD", "CC"])
    rows = joined(text_batches(path, character_tokenizer("ACD", ends=True), seq_len=6, documents="lines"), "labels")
    assert rows.tolist() == [[0, 4, 5, 6, 1, -100], [0, 5, 5, 1, -100, -100]]


@pytest.mark.parametrize("puts_bos", [True, False])
def test_a_long_document_is_cut_into_windows_of_its_own(tmp_path: Path, puts_bos: bool) -> None:
    long = "the cat the cat the cat the cat the"  # 9 tokens
    path = write_lines(tmp_path / "text.txt", [long, "a cat"])
    rows = joined(text_batches(path, tiny_tokenizer(puts_bos=puts_bos), seq_len=4, documents="lines"), "labels").tolist()
    tokens, bos = tokens_of(long), [TOKENIZER.bos_token_id]
    windows = [bos + tokens[i : i + 3] for i in (0, 3, 6)] if puts_bos else [tokens[0:4], tokens[4:8]]  # not the 9th alone
    short = (bos if puts_bos else []) + tokens_of("a cat")
    assert rows == [*windows, short + [-100] * (4 - len(short))]


def test_a_document_of_one_token_is_left_out_and_a_limit_counts_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", ["the", "a cat", "the", "the cat"])
    batches = text_batches(path, TOKENIZER, seq_len=4, documents="lines")
    assert len(batches.source.rows) == 2
    assert text_batches(path, TOKENIZER, seq_len=4, documents="lines", limit=1).source.rows == batches.source.rows[:1]
    with pytest.raises(DataError) as caught:
        text_batches(write_lines(tmp_path / "short.txt", ["the"] * 3), TOKENIZER, seq_len=4, documents="lines")
    assert "2 tokens" in one_sentence(caught, tmp_path / "short.txt")


def test_documents_that_differ_only_by_a_repeated_end_are_two(tmp_path: Path) -> None:
    rows = text_batches(write_lines(tmp_path / "text.txt", ["aa", "aaa"]), TOKENIZER, seq_len=8, documents="lines").source.rows
    assert len(set(rows)) == 2


def test_json_lines_are_read_from_a_file_of_any_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "corpus.json", SHORT)
    named = write_jsonl(tmp_path / "corpus.jsonl", SHORT)
    rows = text_batches(path, TOKENIZER, seq_len=10, documents="jsonl").source.rows
    assert rows == text_batches(named, TOKENIZER, seq_len=10, documents="lines").source.rows
    with pytest.raises(DataError) as caught:
        text_batches(write_lines(tmp_path / "text.txt", SHORT), TOKENIZER, seq_len=10, documents="jsonl")
    assert "Line 1" in one_sentence(caught, tmp_path / "text.txt") and "text" in str(caught.value)


@pytest.mark.parametrize("name", [BUILTIN, "owner/name", "text.parquet"])
def test_what_is_no_file_of_json_lines_is_not_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_parquet(tmp_path / "text.parquet", SHORT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        text_batches(name, TOKENIZER, seq_len=10, documents="jsonl")
    assert "--documents lines" in one_sentence(caught, name)


def test_another_form_of_documents_is_refused() -> None:
    with pytest.raises(SettingError, match=r"'line'.*mean 'lines'"):
        text_batches(BUILTIN, TOKENIZER, documents="line")


def is_joined(batches: Batches) -> bool:
    return not batches.note and bool((joined(batches, "labels") != -100).all())


@pytest.mark.parametrize(
    ("lines", "seq_len", "separate"),
    [
        (["the cat"] * 60, 8, True),
        (["the cat"] * 60 + [""] * 30, 8, True),  # blank lines at the end part nothing
        ((["the cat"] * 60 + [""]) * 3, 8, True),  # 2 blank lines of 183
        ((["the cat"] * 20 + [""]) * 9, 8, False),  # paragraphs
        (["the cat", ""] * 60, 8, False),
        (["the cat"] * 60, 2, True),  # all fill a row
        (["the cat", "the cat the cat"] * 30, 3, False),  # half of them are longer than a row
        (["the cat", "the cat", "the cat the cat"] * 30, 3, True),
        (["the cat the cat the cat"], 8, False),  # a single text says nothing about others
    ],
)
@pytest.mark.parametrize("write", [write_lines, write_jsonl, write_parquet])
def test_documents_are_separate_where_most_are_short_and_none_is_blank(
    tmp_path: Path, write: Any, lines: list[str], seq_len: int, separate: bool
) -> None:
    suffix = {write_lines: "txt", write_jsonl: "jsonl", write_parquet: "parquet"}[write]
    path = write(tmp_path / f"text.{suffix}", lines)
    if seq_len == 8 and len(lines) == 1:
        with pytest.raises(DataError, match="less than one text of 8"):
            text_batches(path, TOKENIZER, seq_len=seq_len)
        return
    batches = text_batches(path, TOKENIZER, seq_len=seq_len)
    assert is_joined(batches) != separate
    how = "lines" if separate else "joined"
    assert batches.source.rows == text_batches(path, TOKENIZER, seq_len=seq_len, documents=how).source.rows
    if separate:
        assert path in batches.note and f"{seq_len} tokens" in batches.note and "--documents joined" in batches.note
        assert ("line" if suffix == "txt" else "record") in batches.note


def test_what_was_asked_for_is_not_said(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", SHORT * 5)
    assert text_batches(path, TOKENIZER, seq_len=10, documents="lines").note == ""
    assert is_joined(text_batches(path, TOKENIZER, seq_len=10, documents="joined"))


def test_all_splits_of_a_folder_are_cut_as_the_train_split_is(tmp_path: Path) -> None:
    write_lines(tmp_path / "a" / "train.txt", ["the cat"] * 60)
    write_lines(tmp_path / "a" / "test.txt", ["the mat", ""] * 60)
    write_lines(tmp_path / "b" / "train.txt", ["the mat", ""] * 60)
    write_lines(tmp_path / "b" / "test.txt", ["the cat"] * 60)
    for folder, separate in (("a", True), ("b", False)):
        cut = [text_batches(str(tmp_path / folder), TOKENIZER, split=split, seq_len=8) for split in ("train", "test")]
        assert [not is_joined(batches) for batches in cut] == [separate, separate]
    write_lines(tmp_path / "c" / "test.txt", ["the cat"] * 60)  # it has no train split
    assert not is_joined(text_batches(str(tmp_path / "c"), TOKENIZER, split="test", seq_len=8))


@pytest.mark.parametrize("name", ["wikitext.txt", "wikitext2/train.txt", "WikiText-103/test.txt"])
def test_wikitext_is_joined_even_without_its_blank_lines(tmp_path: Path, name: str) -> None:
    assert is_joined(text_batches(write_lines(tmp_path / name, ["the cat"] * 60), TOKENIZER, seq_len=8))


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"the real data is not here: {REAL_DATA}")
@pytest.mark.parametrize("name", ["wikitext2", "wikitext2/train.txt", "wikitext2/test.txt"])
def test_the_real_wikitext_is_joined(name: str) -> None:
    path = str(REAL_DATA / name)
    for seq_len in (128, 1024):
        assert is_joined(text_batches(path, TOKENIZER, seq_len=seq_len, limit=8))


def test_the_documents_of_lambada_are_its_passages_unless_they_are_joined(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "lambada.jsonl", SHORT)
    rows = {how: text_batches(path, TOKENIZER, seq_len=10, documents=how).source.rows for how in (None, "lines", "jsonl")}
    assert len(set(rows.values())) == 1
    assert "last_word" in text_batches(path, TOKENIZER, seq_len=10, documents="lines")[0]
    assert is_joined(text_batches(path, TOKENIZER, seq_len=10, documents="joined"))


# Tokenizers of other alphabets


PROTEIN, DNA = "ACDEFGHIKLMNPQRSTVWYXBUZO", "ACGT"
ENGLISH = string.ascii_letters + string.digits + string.punctuation + " \n"
UPPER = tokenizers.normalizers.Sequence(
    [tokenizers.normalizers.Replace(letter, letter.upper()) for letter in string.ascii_lowercase]
)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "tokenizer",
    [
        character_tokenizer(PROTEIN),
        character_tokenizer(PROTEIN, unknown=False),
        character_tokenizer(PROTEIN, normalizer=UPPER),
        character_tokenizer(PROTEIN + " \n", unknown=False, normalizer=UPPER),
        character_tokenizer(DNA),
        character_tokenizer(DNA, unknown=False),
        character_tokenizer("01", unknown=False),
    ],
)
def test_the_builtin_text_is_refused_where_the_tokenizer_does_not_know_it(tokenizer: Any, split: str) -> None:
    with pytest.raises(DataError) as caught:
        text_batches(BUILTIN, tokenizer, split=split)
    said = one_sentence(caught)
    assert "built-in" in said and ("--calibration" if split == "train" else "--data") in said


@pytest.mark.parametrize(
    "tokenizer",
    [
        tiny_tokenizer(),
        tiny_tokenizer(puts_bos=True),
        character_tokenizer(ENGLISH),
        character_tokenizer(ENGLISH, unknown=False, ends=True),
        character_tokenizer(ENGLISH, normalizer=tokenizers.normalizers.Lowercase()),
    ],
    ids=["bytes", "bytes with a beginning", "characters", "characters without an unknown one", "lower case"],
)
def test_the_builtin_text_fits_a_tokenizer_that_knows_english(tokenizer: Any) -> None:
    assert len(text_batches(BUILTIN, tokenizer, limit=2)) == 1


@pytest.mark.parametrize("unknown", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_the_beginning_token_is_found_in_any_alphabet(tmp_path: Path, unknown: bool, ends: bool) -> None:
    path = write_lines(tmp_path / "seqs.txt", ["ACGT" * 9])
    rows = joined(text_batches(path, character_tokenizer(DNA, unknown=unknown, ends=ends), seq_len=8))
    assert (rows[:, 0] == 0).tolist() == [ends] * len(rows)
    assert 0 not in rows[:, 1:]


def test_a_tokenizer_whose_beginning_and_end_are_one_token_that_it_puts_at_the_end_begins_with_none(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(DNA, unknown=False)
    tokenizer.bos_token = "</s>"
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    own = tokenizer.get_vocab()
    for first in own:  # the order of a vocabulary is random
        tokenizer.get_vocab = lambda first=first: {first: own[first], **own}
        rows = joined(text_batches(write_lines(tmp_path / "seqs.txt", ["ACGT" * 9]), tokenizer, seq_len=8))
        assert 1 not in rows


# A share held out


def held_out(path: str, share: float, **settings: Any) -> tuple[Batches, Batches]:
    options = {"seq_len": 16, "batch_size": 100} | settings
    calibration, evaluation = (text_batches(path, TOKENIZER, split=s, holdout=share, **options) for s in ("train", "test"))
    check_apart(calibration.source, evaluation.source)
    return calibration, evaluation


def test_a_share_of_separate_documents_is_held_out_and_copies_stay_together(tmp_path: Path) -> None:
    lines = [f"{i} the cat" for i in range(400)]
    copies = [*lines, *(f"  {line.upper()} " for line in lines)]
    path = write_lines(tmp_path / "text.txt", copies)
    calibration, evaluation = held_out(path, 0.2, documents="lines")
    whole = text_batches(path, TOKENIZER, seq_len=16, documents="lines")
    assert sorted(calibration.source.rows + evaluation.source.rows) == sorted(whole.source.rows)
    assert 0.12 < len(evaluation.source.rows) / len(copies) < 0.28
    numbers = [
        {"".join(c for c in TOKENIZER.decode(ids) if c.isdigit()) for ids in joined(side)} for side in (calibration, evaluation)
    ]
    assert not numbers[0] & numbers[1]


def test_the_held_out_documents_do_not_depend_on_the_others(tmp_path: Path) -> None:
    lines = [f"the cat {i}" for i in range(100)]
    some = held_out(write_lines(tmp_path / "a.txt", lines[:60]), 0.3, documents="lines")[1].source.rows
    every = held_out(write_lines(tmp_path / "b.txt", lines[::-1]), 0.3, documents="lines")[1].source.rows
    assert some and set(some) < set(every)


def test_the_last_share_of_joined_documents_is_held_out(tmp_path: Path) -> None:
    lines = some_lines(50)
    calibration, evaluation = held_out(write_lines(tmp_path / "text.txt", lines), 0.1, documents="joined")
    for batches, part in ((calibration, lines[:45]), (evaluation, lines[45:])):
        stream = tokens_of("\n".join(part) + "\n")
        assert joined(batches).flatten().tolist() == stream[: len(stream) // 16 * 16]


def test_a_flat_folder_is_held_out_as_one(tmp_path: Path) -> None:
    lines = [f"the cat {i}" for i in range(200)]
    write_lines(tmp_path / "a" / "one.txt", lines[:100])
    write_lines(tmp_path / "a" / "two.txt", lines[100:])
    sides = held_out(str(tmp_path / "a"), 0.2)
    assert [len(side.source.files) for side in sides] == [2, 2]
    assert sum(len(side.source.rows) for side in sides) == 200


@pytest.mark.parametrize("name", [BUILTIN, "owner/name", "folder"])
def test_data_with_splits_need_no_holdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_lines(tmp_path / "folder" / "train.txt", some_lines(50))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **settings: {"text": ["the cat the mat"]})
    with pytest.raises(DataError) as caught:
        text_batches(name, TOKENIZER, seq_len=4, holdout=0.1)
    assert "--holdout" in one_sentence(caught, name)


def test_a_holdout_of_nothing_is_one_sentence(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", ["the cat the mat"])
    for how, split in (("joined", "train"), ("lines", "test")):
        with pytest.raises(DataError) as caught:
            text_batches(path, TOKENIZER, split=split, seq_len=4, documents=how, holdout=1e-9)
        assert "--holdout" in one_sentence(caught, path)


@pytest.mark.parametrize(
    "other",
    [{"holdout": 0.2}, {"holdout": None}, {"documents": "joined"}, {"documents": "joined", "seq_len": 9}],
    ids=str,
)
def test_data_held_out_in_another_way_cannot_judge(tmp_path: Path, other: dict[str, Any]) -> None:
    path = write_lines(tmp_path / "text.txt", [f"the cat {i}" for i in range(200)])
    given: dict[str, Any] = {"documents": "lines", "holdout": 0.1, "seq_len": 16}
    calibration = text_batches(path, TOKENIZER, split="train", **given)
    evaluation = text_batches(path, TOKENIZER, split="test", **given | other)
    with pytest.raises(DataError) as caught:
        check_apart(calibration.source, evaluation.source)
    assert "--holdout" in one_sentence(caught, path)
    check_apart(calibration.source, text_batches(path, TOKENIZER, split="test", **given | {"seq_len": 9}).source)


@pytest.mark.parametrize(("suffix", "mark"), [(".csv", ","), (".tsv", "\t")])
def test_of_a_table_only_the_column_of_texts_is_read(suffix: str, mark: str, tmp_path: Path) -> None:
    lines = some_lines(40)
    path = tmp_path / f"rows{suffix}"
    path.write_text(mark.join(("label", "text")) + "\n" + "".join(f"7{mark}{line}\n" for line in lines))
    plain = write_lines(tmp_path / "plain.txt", lines)
    read, expected = (text_batches(str(name), TOKENIZER, seq_len=16, documents="lines") for name in (path, plain))
    assert torch.equal(joined(read), joined(expected))
    path.write_text("a" + mark + "b\n1" + mark + "2\n")
    with pytest.raises(DataError) as caught:
        text_batches(str(path), TOKENIZER, seq_len=16)
    assert "text" in one_sentence(caught, path)
