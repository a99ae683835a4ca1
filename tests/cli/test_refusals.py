"""What a user can get wrong: one sentence on standard error, exit code 2, and nothing written."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import secateur as sc
from grids import write_grid
from worlds import FILES, SEQ_LEN, Run, World, check_refused, contents, prune_command, with_config

# Settings


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--ratio", "0", r"ratio.*\b0\.0\b"),
        ("--ratio", "1", r"ratio.*\b1\.0\b"),
        ("--ratio", "1.5", r"ratio.*\b1\.5\b"),
        ("--ratio", "nan", "ratio.*nan"),
        ("--ratio", "-1", r"ratio.*-1\.0\b"),
        ("--ratio", "abc", "--ratio"),
        ("--ratio", "0.99", r"ratio.*0\.99.*\b9\b"),
        ("--method", "ucbb", "'ucbb'.*greedy, ucb, ts, auto.*mean 'ucb'"),
        ("--target", "heads", "'heads'.*head, mlp, both"),
        ("--dtype", "float8", "'float8'.*float32, bfloat16, float16"),
        ("--device", "gpu", "'gpu'.*--device cpu"),
        ("--device", "meta", "'meta'"),
        ("--seed", "-1", r"seed.*-1\b"),
        ("--seed", "1.5", "--seed"),
        ("--pulls-per-step", "0", r"pulls per step.*\b0\b"),
        ("--temperature", "0", r"temperature.*\b0\.0\b"),
        ("--temperature", "nan", "temperature.*nan"),
        ("--batches-per-pull", "0", r"batches per pull.*\b0\b"),
        ("--batches-per-pull", "100", r"batches per pull.*\b100\b.*\b1 to \d"),
        ("--batches-per-step", "-1", r"batches per step.*-1\b"),
        ("--batches-per-step", "100", r"batches per step.*\b100\b.*\b1 to \d"),
        ("--stack", "0", r"stack.*\b0\b"),
        ("--stack", "1.5", "--stack"),
        ("--lanes", "0", r"lanes.*\b0\b"),
        ("--lanes", "-3", r"lanes.*-3\b"),
        ("--cache-memory", "-2", "cache memory.*-2"),
        ("--cache-memory", "nan", "cache memory.*nan"),
        ("--ucb-c", "-1", "UCB.*-1"),
        ("--pool-size", "-1", r"pool size.*-1\b"),
        ("--screen", "-2", r"screen.*-2\b"),
        ("--score-batches", "0", r"score batches.*\b0\b"),
        ("--group-width", "0", r"group width.*\b0\b"),
        ("--batch-size", "0", r"batch size.*\b0\b"),
        ("--calibration-size", "0", r"calibration size.*\b0\b"),
        ("--evaluation-size", "0", r"evaluation size.*\b0\b"),
        ("--evaluation-batches", "-2", r"evaluation batches.*-2\b"),
        ("--seq-len", "1", r"seq len.*\b1\b.*\b2\b"),
        ("--seq-len", "17", r"\b17\b.*\b16\b"),
        ("--calibration", "nosuch", "'nosuch'"),
        ("--data", "nosuch", "'nosuch'"),
        ("--nosuch", "1", "--nosuch"),
        ("--cache-memory", "1e308", r"cache memory.*1e\+308"),
        ("--lanes", str(2**31), r"lanes.*2147483648.*\b256\b"),
        ("--pulls-per-step", "1000000000", r"pulls per step.*1000000000.*1,000,000"),
        ("--batch-size", "99999999999", r"batch size.*99999999999.*1,048,576"),
        ("--evaluation-size", "99999999999", r"evaluation size.*99999999999"),
        ("--stack", "99999999999", r"stack.*99999999999"),
    ],
)
def test_a_bad_setting_is_one_sentence_and_leaves_nothing(
    option: str, value: str, said: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", option, value))
    assert re.search(said, check_refused(ran, tmp_path / "out"))


@pytest.mark.parametrize("threads", [100_000, 2**31])
def test_more_threads_than_torch_survives_are_refused(threads: int, world: World, tmp_path: Path, run: Run) -> None:
    for ran in (
        run("measure", world.text_model, world.text_model, "--threads", threads),
        run("grid", write_grid(world, tmp_path), "-o", tmp_path / "store", "--threads", threads),
    ):
        assert re.search(rf"threads.*{threads}.*\b1024\b", check_refused(ran, tmp_path / "store"))


@pytest.mark.parametrize("option", [["-o", ""], ["--out="], ["--config", ""]], ids=str)
def test_an_empty_name_is_not_the_current_folder(
    option: list[str], world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is empty" in check_refused(run(*prune_command(world, tmp_path / "out"), *option))
    assert "is empty" in check_refused(run("units", ""))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blocks", [10_000, 10**9])
def test_a_config_of_more_blocks_than_any_model_has_is_refused_at_once(
    blocks: int, world: World, tmp_path: Path, run: Run
) -> None:
    folder = with_config(copied(world, tmp_path), n_layer=blocks)
    for ran in (run("units", folder), run(*prune_command(world, tmp_path / "out", model=folder))):
        assert re.search(rf"{blocks:,} blocks", check_refused(ran, tmp_path / "out"))


def test_after_a_refused_setting_the_mended_command_works_in_the_same_place(world: World, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path / "out", "--batches-per-pull", 100)).code == 2
    mended = run(*prune_command(world, tmp_path / "out", "--batches-per-pull", 1))
    assert (mended.code, mended.complaints) == (0, [])


def test_a_misspelt_method_is_answered_with_the_one_it_resembles(world: World, tmp_path: Path, run: Run) -> None:
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", "--method", "magnitud")), tmp_path / "out")
    assert re.search(r"'magnitud'.*mean 'magnitude'", sentence)


# Models


def copied(world: World, place: Path, task: str = "text") -> Path:
    return Path(shutil.copytree(world.of(task)[0], place / "model"))


def without_weights(world: World, place: Path) -> Path:
    (copied(world, place) / "model.safetensors").unlink()
    return place / "model"


def with_cut_weights(world: World, place: Path) -> Path:
    path = copied(world, place) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return place / "model"


def with_pickled_weights(world: World, place: Path) -> Path:
    torch.save({}, without_weights(world, place) / "pytorch_model.bin")
    return place / "model"


def without_tokenizer(world: World, place: Path) -> Path:
    for path in copied(world, place).glob("tokenizer*"):
        path.unlink()
    return place / "model"


def with_words_beyond_the_embedding(world: World, place: Path) -> Path:
    """The tokenizer of another model: its numbers go beyond the embedding."""
    path = copied(world, place) / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["model"]["vocab"] = {word: i + 1000 for word, i in fields["model"]["vocab"].items()}
    path.write_text(json.dumps(fields | {"added_tokens": []}))
    return place / "model"


def with_nan_weights(world: World, place: Path) -> Path:
    path = copied(world, place) / "model.safetensors"
    weights = load_file(path)
    weights["transformer.ln_f.weight"].fill_(math.nan)
    save_file(weights, path, metadata={"format": "pt"})
    return place / "model"


def empty_folder(world: World, place: Path) -> Path:
    (place / "model").mkdir()
    return place / "model"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (without_weights, "safetensors"),
        (with_pickled_weights, "safetensors"),
        (with_cut_weights, r"model.*(damaged|cut short)"),
        (lambda world, place: with_config(copied(world, place), model_type="martian"), "martian"),
        (lambda world, place: with_config(copied(world, place), model_type="mpnet"), "'mpnet'"),
        (lambda world, place: with_config(copied(world, place), n_layer=5), r"\b24\b"),
        (lambda world, place: with_config(copied(world, place), n_embd=24), r"^(?!.*above report).*(shape|size)"),
        (without_tokenizer, "tokenizer"),
        (with_words_beyond_the_embedding, "tokenizer|vocabulary|embedding"),
        (with_nan_weights, r"loss.*\bnan\b"),
        (lambda world, place: with_config(copied(world, place), n_layer="three"), r"n_layer'?:? .*\w"),
        (lambda world, place: with_config(copied(world, place), n_layer=0), "no layers"),
        (lambda world, place: with_config(copied(world, place), activation_function="nosuch"), "'nosuch' is missing, or is no"),
        (empty_folder, r"config\.json"),
        (lambda world, place: place / "no" / "such" / "model", "no/such/model"),
        (lambda world, place: world.text / "train.txt", r"train\.txt.*file"),
    ],
    ids=[
        "no weights",
        "pickled weights",
        "cut weights",
        "unknown type",
        "unknown family",
        "too few tensors",
        "other shapes",
        "no tokenizer",
        "other tokenizer",
        "nan weights",
        "a word for a number",
        "no layers",
        "unknown activation",
        "empty folder",
        "missing",
        "file",
    ],
)
def test_a_model_that_cannot_be_used_is_one_sentence_and_leaves_nothing(
    made: Callable[[World, Path], Path], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", model=made(world, tmp_path)))
    assert re.search(said, check_refused(ran, tmp_path / "out"))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("command", ["prune", "units"])
def test_a_model_name_without_the_hub_is_one_sentence(command: str, world: World, tmp_path: Path, run: Run) -> None:
    whole = prune_command(world, tmp_path / "out", model="nobody/nothing-at-all")
    sentence = check_refused(run(*(whole if command == "prune" else ["units", "nobody/nothing-at-all"])), tmp_path / "out")
    assert "nobody/nothing-at-all" in sentence
    assert "local folder" in sentence


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["wikitext2", "nobody/nothing-at-all"])
def test_a_data_set_name_without_the_hub_is_one_sentence(name: str, world: World, tmp_path: Path, run: Run) -> None:
    sentence = check_refused(run(*prune_command(world, tmp_path / "out", "--calibration", name)), tmp_path / "out")
    assert "local file or folder" in sentence


# Data


def text_of(content: bytes) -> Callable[[World, Path], list[object]]:
    def options(world: World, place: Path) -> list[object]:
        (place / "some.txt").write_bytes(content)
        return ["--calibration", place / "some.txt", "--data", world.text]

    return options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (text_of(b""), r"some\.txt.*one text"),
        (text_of(b"the cat sees\n"), r"some\.txt.*one text.*\b16\b"),
        (text_of(b"caf\xe9 " * 99), r"some\.txt.*UTF-8"),
        (lambda world, place: ["--calibration", world.text / "train.txt"], "held-out"),
        (lambda world, place: ["--data", world.text / "train.txt"], r"train\.txt.*chose"),
        (lambda world, place: ["--calibration", world.images], "no text"),
        (lambda world, place: ["--calibration", empty_folder(world, place)], "no text"),
    ],
    ids=["empty", "shorter than a window", "not UTF-8", "the same file", "the same file in a folder", "images", "empty folder"],
)
def test_text_that_cannot_be_used_is_one_sentence_and_leaves_nothing(
    options: Callable[[World, Path], list[object]], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    ran = run(*prune_command(world, tmp_path / "out", *options(world, tmp_path)))
    assert re.search(said, check_refused(ran, tmp_path / "out"))


def cut_an_image(images: Path) -> None:
    path = images / "train" / "LABEL_3" / "2.jpg"
    path.write_bytes(path.read_bytes()[:-100])


def remove_the_images(images: Path) -> None:
    shutil.rmtree(images / "train")
    (images / "train").mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut_an_image, r"LABEL_3/2\.jpg"),
        (lambda images: (images / "train" / "LABEL_0").rename(images / "train" / "zebra"), "'zebra'.*class"),
        (lambda images: shutil.rmtree(images / "val"), "test split"),
        (lambda images: shutil.copytree(images / "train", images / "val", dirs_exist_ok=True), "held-out"),
        (remove_the_images, "no images"),
    ],
    ids=["broken image", "unknown class", "no images to judge on", "the same images", "no images to choose on"],
)
def test_images_that_cannot_be_used_are_one_sentence_and_leave_nothing(
    spoil: Callable[[Path], object], said: str, world: World, tmp_path: Path, run: Run
) -> None:
    spoil(Path(shutil.copytree(world.images, tmp_path / "images")))
    ran = run(*prune_command(world, tmp_path / "out", "--calibration", tmp_path / "images", task="image"))
    assert re.search(said, check_refused(ran, tmp_path / "out"))


# Places


@pytest.mark.parametrize("place", ["file", "file/below", "file/further/below"])
@pytest.mark.parametrize("command", ["prune", "select", "evaluate"])
def test_a_place_below_a_file_is_refused_before_the_model_is_read(
    command: str, place: str, world: World, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "file").write_text("mine")
    out = tmp_path / place if command == "prune" else tmp_path / place / "result.json"
    data = "--data" if command == "evaluate" else "--calibration"
    ran = run(command, world.text_model, data, world.text, "--seq-len", SEQ_LEN, "-o", out)
    assert str(tmp_path / "file") in check_refused(ran)
    assert "loading" not in ran.err
    assert contents(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("command", ["select", "evaluate"])
def test_a_folder_where_a_file_is_to_be_written_is_refused_before_the_model_is_read(
    command: str, world: World, tmp_path: Path, run: Run
) -> None:
    data = "--data" if command == "evaluate" else "--calibration"
    ran = run(command, world.text_model, data, world.text, "--seq-len", SEQ_LEN, "-o", tmp_path)
    assert str(tmp_path) in check_refused(ran)
    assert "loading" not in ran.err
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("place", ["/proc/secateur", "/sys/secateur", "/proc/self/secateur"])
def test_a_place_where_even_root_cannot_write_is_one_sentence(place: str, world: World, run: Run) -> None:
    if not Path(place).parent.exists():
        pytest.skip(f"{Path(place).parent} is Linux's")
    assert place in check_refused(run(*prune_command(world, Path(place))))


@pytest.mark.parametrize("kept", FILES)
def test_another_runs_file_is_refused_and_left_as_it_was(kept: str, world: World, tmp_path: Path, run: Run) -> None:
    assert run(*prune_command(world, tmp_path)).code == 0
    for name in FILES:
        if name != kept:
            (tmp_path / name).unlink()
    before = contents(tmp_path)
    assert kept in check_refused(run(*prune_command(world, tmp_path, "--seed", 7)))
    assert contents(tmp_path) == before


def test_a_place_where_another_run_is_at_work_is_refused(world: World, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("fcntl")
    with sc.Journal(tmp_path / "journal.jsonl", {}):
        before = contents(tmp_path)
        refused = check_refused(run(*prune_command(world, tmp_path)))
        assert re.search(r"[Aa]nother run", refused) and "journal.jsonl" in refused
        assert contents(tmp_path) == before


@pytest.mark.parametrize("stage", ["first line of the journal", "journal", "selection", "evaluation"])
def test_a_full_disk_is_one_sentence_and_once_there_is_room_the_run_ends_the_same(
    stage: str, world: World, tmp_path: Path, run: Run
) -> None:
    resource = pytest.importorskip("resource")
    # For the evaluation, one that is larger than the other files: many batches, no pulls, little calibration data.
    long = ["--method", "random", "--calibration-size", 2, "--batch-size", 1, "--evaluation-batches", 0]
    command = long if stage == "evaluation" else []
    assert run(*prune_command(world, tmp_path / "whole", *command)).code == 0
    sizes = {name: len(content) for name, content in contents(tmp_path / "whole").items()}
    room = {
        "first line of the journal": 100,
        "journal": sizes.get("journal.jsonl", 0) // 2,
        "selection": sizes.get("journal.jsonl", 0),
        "evaluation": sizes["evaluation.json"] - 40,  # the seconds in it have more or fewer digits
    }[stage]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        ran = run(*prune_command(world, tmp_path / "out", *command))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "out" / stage.split()[-1]) in check_refused(ran)
    assert set(contents(tmp_path / "out")) <= set(FILES)
    assert run(*prune_command(world, tmp_path / "out", *command)).code == 0
    for name in sizes.keys() - {"evaluation.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
