"""Kinds of bad input: which file is spoilt, how, and the commands that then read it. The good files are made once."""

from __future__ import annotations

import json
import os
import random
import shutil
import unittest.mock
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
from forks import Ran
from grids import write_grid
from mutations import Spoil, spoil_bytes, spoil_json, spoil_lines, spoil_toml, spoil_value
from worlds import SMALL, Encoders, World, make_encoders, make_world

Arguments = list[object]
FLAGS = ["--device", "cpu", "--seq-len", "16"]
CHOICE = ["--ratio", "0.3", "--pulls-per-step", "3", "--group-width", "4", "--method", "ucb"]
MEASURED = ["--tokens", 8, "--new-tokens", 2, "--repeats", 3, "--batch-size", 1, "--no-memory", "--device", "cpu"]
PRUNE = ["--no-measure", "--evaluation-batches", "2", "--lanes", "1", "--cache-memory", "0.01"]


@dataclass(frozen=True)
class Good:
    """A folder with one good file or folder of everything; no case changes it."""

    root: Path

    @property
    def world(self) -> World:
        return World(self.root / "gpt2", self.root / "vit", self.root / "text", self.root / "images")

    @property
    def encoders(self) -> Encoders:
        names = ("bert", "bert-classes", "sentences", "clip")
        masked, classes, sentences, tower = (self.root / name for name in names)
        return Encoders(masked, classes, sentences, tower, self.root / "text", self.root / "labelled", self.root / "plain")


class First(random.Random):
    """Always chooses the first."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


def make_good(root: Path) -> list[str]:
    """Make the good files, and run each command that reads them; the modules that all this imported."""
    import sys

    import pyarrow
    import pyarrow.parquet
    import timm

    good = Good(root)
    world = make_world(root)
    (root / "images").rename(root / "kept")  # make_encoders has images of its own
    make_encoders(root, world)
    (root / "images").rename(root / "plain")
    (root / "kept").rename(root / "images")
    small: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    tiny: Any = timm.create_model("vit_tiny_patch16_224", **small)
    tiny.pretrained_cfg["input_size"] = (3, 16, 16)
    timm.models.save_for_hf(tiny, str(root / "timm"), model_args=small, safe_serialization=True)
    write_index(good)
    for split in ("train", "test"):
        lines = [line for line in (world.text / f"{split}.txt").read_text().splitlines() if line]
        write_texts(root, split, lines)
        for folder in ("texts.parquet",):
            (root / folder).mkdir(exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.table({"text": lines}), root / folder / f"{split}.parquet")
    write_grid(world, root, change=lambda text: text.replace("[1, 2]", "[1]").replace('"fisher", "greedy", ', '"greedy", '))
    for model, data in (("gpt2", "text"), ("vit", "images")):
        flags = [*FLAGS, *CHOICE, *PRUNE]
        succeed("prune", root / model, "--calibration", root / data, *flags, "-o", root / f"{model}-small")
    with unittest.mock.patch("secateur.cut.costs.measure", by_parameters):  # a clock would not do for so small a model
        succeed(*goes_on_quick(good, root / "quick", First())[0])
    succeed("grid", root / "tiny.toml", "-o", root / "store")
    (root / "settings.toml").write_text(
        "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**SMALL, "device": "cpu", "method": "random"}.items())
    )
    for kind in KINDS:
        for command in kind.commands(good, root / kind.base, First()):
            if command[0] not in ("prune", "select", "shrink", "grid"):
                succeed(*command)
    for name in ("select", "shrink", "measure", "bench", "figures"):
        succeed(*usual(good, name, root / "usual" / name))
    return sorted(sys.modules)


def succeed(*arguments: object) -> None:
    """Run a command here, which is to succeed."""
    import contextlib
    import io
    import sys

    from secateur.cli import app

    sys.argv = ["secateur", *map(str, arguments)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            app.main()
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"{arguments} ended with {error.code}: {said.getvalue()}") from error


def by_parameters(model: Any, small: Any, **settings: Any) -> Any:
    """A measurement in which a model's time is its number of parameters."""
    ratio = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in small.parameters())
    return SimpleNamespace(timings=[SimpleNamespace(flop_ratio=ratio, speedup=SimpleNamespace(value=ratio))])


def write_index(good: Good) -> None:
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(good.world.text_model, good.root / "indexed"))
    tensors = list(load_file(folder / "model.safetensors"))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_texts(root: Path, split: str, lines: Sequence[str]) -> None:
    """Each line as a record of a jsonl, csv or tsv file."""
    records = {
        "jsonl": "".join(json.dumps({"text": line, "label": len(line) % 5}) + "\n" for line in lines),
        "csv": "text,label\n" + "".join(f'"{line}",{len(line) % 5}\n' for line in lines),
        "tsv": "text\tlabel\n" + "".join(f"{line}\t{len(line) % 5}\n" for line in lines),
    }
    for suffix, content in records.items():
        (root / f"texts.{suffix}").mkdir(exist_ok=True)
        (root / f"texts.{suffix}" / f"{split}.{suffix}").write_text(content)


# The kinds


@dataclass(frozen=True)
class Kind:
    """`base` is copied from the good files, `file` in it is spoilt, and one of the `commands` is run on it."""

    name: str
    base: str
    file: str
    spoil: Spoil
    commands: Callable[[Good, Path, random.Random], list[Arguments]]
    wrong: Callable[[Good, Path, Ran], str] = lambda good, place, ran: ""  # what is wrong about a success


def reads_texts(good: Good, model: Path, rng: random.Random) -> list[Arguments]:
    out = model.parent / "out"
    return [
        ["evaluate", model, "--data", good.world.text, *FLAGS, "--evaluation-batches", 1],
        ["units", model, "--target", rng.choice(("head", "mlp", "block")), "--group-width", 4],
        ["prune", model, "--calibration", good.world.text, *FLAGS, *CHOICE, *PRUNE, "-o", out, "--method", "random"],
        ["measure", good.world.text_model, model, *MEASURED],
    ]


def reads_images(good: Good, model: Path, rng: random.Random) -> list[Arguments]:
    out = model.parent / "out"
    return [
        ["evaluate", model, "--data", good.world.images, *FLAGS, "--evaluation-batches", 1],
        ["units", model],
        ["prune", model, "--calibration", good.world.images, *FLAGS, *CHOICE, *PRUNE, "-o", out, "--method", "random"],
    ]


def evaluates(good: Good, model: Path, rng: random.Random) -> list[Arguments]:
    return reads_texts(good, model, rng)[:1]


def evaluates_images(good: Good, model: Path, rng: random.Random) -> list[Arguments]:
    return reads_images(good, model, rng)[:1]


def encodes(good: Good, model: Path, rng: random.Random) -> list[Arguments]:
    return [["evaluate", model, "--data", good.root / "texts.jsonl", *FLAGS, "--evaluation-batches", 1]]


def reads_selection(good: Good, folder: Path, rng: random.Random) -> list[Arguments]:
    chosen = ["--selection", folder / "selection.json"]
    return [
        ["evaluate", good.world.text_model, *chosen, "--data", good.world.text, *FLAGS, "--evaluation-batches", 1],
        ["shrink", good.world.text_model, *chosen, "-o", folder.parent / "out", "--device", "cpu", "--no-measure"],
    ]


def goes_on(good: Good, folder: Path, rng: random.Random) -> list[Arguments]:
    flags = [*FLAGS, *CHOICE, *PRUNE]
    return [["prune", good.world.text_model, "--calibration", good.world.text, *flags, "-o", folder]]


def goes_on_quick(good: Good, folder: Path, rng: random.Random) -> list[Arguments]:
    flags = [*FLAGS, *CHOICE[2:], *PRUNE, "--keep-latency", "0.9", "--target", "both"]
    return [["prune", good.world.text_model, "--calibration", good.world.text, *flags, "-o", folder]]


def replays(good: Good, folder: Path, rng: random.Random) -> list[Arguments]:
    """The same with only its journal left."""
    for path in list(folder.iterdir()):
        if path.name != "journal.jsonl" and folder != good.root / "gpt2-small":
            path.unlink()
    return goes_on(good, folder, rng)


def reads_store(good: Good, store: Path, rng: random.Random) -> list[Arguments]:
    return [
        ["tables", store],
        ["compare", store, "--against", "random"],
        ["figures", store, "-o", store.parent / "figures"],
        ["grid", good.root / "tiny.toml", "-o", store, "--plan"],
        ["grid", good.root / "tiny.toml", "-o", store],
    ]


def reads_grid(good: Good, file: Path, rng: random.Random) -> list[Arguments]:
    return [["grid", file, "-o", file.parent / "new-store", "--plan"]]


def reads_settings(good: Good, file: Path, rng: random.Random) -> list[Arguments]:
    model = [good.world.text_model, "--calibration", good.world.text, "--config", file]
    return [["prune", *model, "-o", file.parent / "out"], ["select", *model, "-o", file.parent / "out.json"]]


def reads_data(good: Good, data: Path, rng: random.Random) -> list[Arguments]:
    models = (good.root / "gpt2", good.root / "bert", good.root / "bert-classes", good.root / "sentences")
    options = [[], ["--documents", "lines"], ["--documents", "joined"], ["--documents", "jsonl"]]
    asked = [*FLAGS, "--evaluation-batches", 1, *rng.choice(options)]
    data = next(data.glob("test.[ct]sv"), data)  # these are not looked for in a folder
    return [["evaluate", model, "--data", data, *asked] for model in models]


def judges_images(good: Good, data: Path, rng: random.Random) -> list[Arguments]:
    return [["evaluate", good.root / model, "--data", data, *FLAGS, "--seed", 1] for model in ("vit", "clip", "timm")]


def spoil_unchecked(content: bytes, rng: random.Random) -> bytes:
    """A journal from before there were checksums, spoilt: nothing but the types of its fields shows it."""
    records = [json.loads(line) for line in content.splitlines()]
    plain = [{name: value for name, value in record.items() if name != "checksum"} for record in records]
    return spoil_lines("".join(json.dumps(record) + "\n" for record in plain).encode(), rng)


def spoil_sealed(content: bytes, rng: random.Random) -> bytes:
    """A store with a spoilt record whose digest was computed anew."""
    from secateur.experiment.store import sealed

    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    spoilt = spoil_value(json.loads(lines[at]), rng)
    lines[at] = json.dumps(sealed(spoilt) if isinstance(spoilt, dict) else spoilt).encode() + b"\n"
    return b"".join(lines)


def another_selection(good: Good, place: Path, ran: Ran) -> str:
    same = (place / "selection.json").read_bytes() == (good.root / "gpt2-small" / "selection.json").read_bytes()
    return "" if same else "another selection, from a changed journal"


def another_model(good: Good, place: Path, ran: Ran) -> str:
    same = (place / "model.safetensors").read_bytes() == (good.root / "gpt2-small" / "model.safetensors").read_bytes()
    return "" if same else "a changed model is called finished"


KINDS = (
    Kind("config.json of a language model", "gpt2", "config.json", spoil_json, reads_texts),
    Kind("config.json of an image model", "vit", "config.json", spoil_json, reads_images),
    Kind("config.json of an encoder", "bert-classes", "config.json", spoil_json, encodes),
    Kind("config.json of timm", "timm", "config.json", spoil_json, reads_images),
    Kind("config.json of a cut model", "gpt2-small", "config.json", spoil_json, reads_texts),
    Kind("safetensors", "gpt2", "model.safetensors", spoil_bytes, evaluates),
    Kind("index of weights", "indexed", "model.safetensors.index.json", spoil_json, evaluates),
    Kind("generation_config.json", "gpt2", "generation_config.json", spoil_json, reads_texts),
    Kind("tokenizer.json", "gpt2", "tokenizer.json", spoil_json, evaluates),
    Kind("tokenizer_config.json", "gpt2", "tokenizer_config.json", spoil_json, reads_texts),
    Kind("preprocessor_config.json", "vit", "preprocessor_config.json", spoil_json, evaluates_images),
    Kind("modules.json", "sentences", "modules.json", spoil_json, encodes),
    Kind("pooling", "sentences", "1_Pooling/config.json", spoil_json, encodes),
    Kind("selection.json", "gpt2-small", "selection.json", spoil_json, reads_selection),
    Kind("journal.jsonl", "gpt2-small", "journal.jsonl", spoil_lines, replays, another_selection),
    Kind("journal without checksums", "gpt2-small", "journal.jsonl", spoil_unchecked, replays),
    Kind("evaluation.json", "gpt2-small", "evaluation.json", spoil_json, goes_on),
    Kind("secateur.json", "gpt2-small", "secateur.json", spoil_json, goes_on),
    Kind("finished weights", "gpt2-small", "model.safetensors", spoil_bytes, goes_on, another_model),
    Kind("latency.json", "quick", "latency.json", spoil_json, goes_on_quick),
    Kind("results.jsonl", "store", "results.jsonl", spoil_lines, reads_store),
    Kind("results.jsonl, sealed anew", "store", "results.jsonl", spoil_sealed, reads_store),
    Kind("plan of a store", "store", "plans/tiny.json", spoil_json, reads_store),
    Kind("grid", "tiny.toml", "", spoil_toml, reads_grid),
    Kind("settings in a file", "settings.toml", "", spoil_toml, reads_settings),
    Kind("text", "text", "test.txt", spoil_bytes, reads_data),
    Kind("jsonl", "texts.jsonl", "test.jsonl", spoil_lines, reads_data),
    Kind("csv", "texts.csv", "test.csv", spoil_bytes, reads_data),
    Kind("tsv", "texts.tsv", "test.tsv", spoil_bytes, reads_data),
    Kind("parquet", "texts.parquet", "test.parquet", spoil_bytes, reads_data),
    Kind("image", "images", "val/LABEL_0/0.jpg", spoil_bytes, judges_images),
)


def run_file_case(kind: Kind, good: Good, place: Path, rng: random.Random) -> tuple[Arguments, Ran, str]:
    """One case of a kind: the command, how it ended, and what was wrong with that."""
    base, copied = good.root / kind.base, place / kind.base
    if base.is_dir():
        shutil.copytree(base, copied)
    else:
        shutil.copyfile(base, copied)
    command = rng.choice(kind.commands(good, copied, rng))
    file = copied / kind.file if kind.file else copied
    file.write_bytes(kind.spoil(file.read_bytes(), rng))
    ran = forks.run(command, place)
    return command, ran, defect(ran) or (kind.wrong(good, copied, ran) if ran.code == 0 else "")


def defect(ran: Ran) -> str:
    """What is wrong with how a command ended: it is to succeed, or to say in one sentence why not. "" if it did."""
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    if ran.code is None:
        return "it did not end"
    if ran.code < 0:
        return f"ended by signal {-ran.code}"
    if "Traceback (most recent call last)" in ran.err:
        return "traceback: " + ran.err.strip().splitlines()[-1][:200]
    if ran.code == 70:
        return "unforeseen: " + (errors[-1] if errors else "")[:200]
    if ran.code not in (0, 2):
        return f"exit code {ran.code}"
    if ran.code == 0 and errors:
        return f"success with an error: {errors[0][:200]}"
    if ran.code == 2 and not errors:
        return f"exit code 2 without a sentence: {ran.err[-200:]}"
    if ran.code == 2 and (long := max(errors, key=len)) and len(long) > 1200:
        return f"a sentence of {len(long)} characters: {long[:100]}"
    return ""


# Arguments and places


WORDS = (
    "", " ", "x", "0", "-1", "1", "3", "0.5", "1e308", "-1e308", "nan", "inf", "2147483648", "9223372036854775808", "1" * 400,
    "é", "\udcff", "../..", ".", "/", "/dev/null", "/dev/full", "/dev/zero", "~", "$HOME", "[bold]x", "%s{}", "a" * 5000, "\n",
    "*", "-", "--", "owner/name", "timm:x", "builtin", "math:sqrt", "x.py:f", "cpu:1", "true",
)  # fmt: skip
UNTRIED = {"ray", "workers", "help", "repeats", "tokens", "new_tokens", "pulls"}  # start a cluster, or are only slow


def usual(good: Good, command: str, place: Path) -> Arguments:
    """A good command of each name."""
    text, data = good.world.text_model, good.world.text
    return {
        "prune": ["prune", text, "--calibration", data, *FLAGS, *CHOICE, *PRUNE, "-o", place / "out"],
        "select": ["select", text, "--calibration", data, *FLAGS, *CHOICE, "-o", place / "out.json"],
        "shrink": [
            "shrink", text, "--selection", good.root / "gpt2-small" / "selection.json", "--device", "cpu", "--no-measure",
            "-o", place / "out",
        ],
        "measure": ["measure", text, good.root / "gpt2-small", *MEASURED],
        "evaluate": ["evaluate", text, "--data", data, *FLAGS, "-o", place / "out.json", "--evaluation-batches", 1],
        "units": ["units", text],
        "bench": ["bench", text, "--pulls", 1, "--device", "cpu", "--json", place / "out.json"],
        "grid": ["grid", good.root / "tiny.toml", "-o", place / "store", "--plan"],
        "compare": ["compare", good.root / "store", "--against", "random"],
        "tables": ["tables", good.root / "store", "-o", place / "tables"],
        "figures": ["figures", good.root / "store", "-o", place / "figures"],
    }[command]  # fmt: skip


def run_argument_case(good: Good, place: Path, rng: random.Random) -> tuple[Arguments, Ran, str]:
    """A good command with a strange value of some option or argument."""
    import typer.main

    from secateur.cli.app import make_app

    commands: dict[str, Any] = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    name = rng.choice(sorted(commands))
    options = [p for p in commands[name].params if p.param_type_name == "option" and p.name not in UNTRIED]
    command = usual(good, name, place)
    if rng.random() < 0.25:
        at = rng.randrange(len(command))
        command[at] = rng.choice(WORDS)
    elif options:
        option = rng.choice(options)
        command += [rng.choice(option.opts), *([] if option.is_flag else [rng.choice(WORDS)])]
    ran = forks.run(command, place, before=lambda: os.chdir(place))
    return command, ran, defect(ran)


def run_place_case(good: Good, place: Path, rng: random.Random) -> tuple[Arguments, Ran, str]:
    """A good command that is to write where something else is, or where nothing can be."""
    name = rng.choice(("prune", "select", "shrink", "evaluate", "bench", "tables", "figures", "grid"))
    command = usual(good, name, place)
    if name == "grid":
        command.remove("--plan")
    at = next(i for i, word in enumerate(command) if word in ("-o", "--json")) + 1
    target = place / "there"
    command[at] = target
    way = rng.choice(list(PLACES))
    kept = PLACES[way](target)
    if way == "inside the data":
        shutil.copytree(good.world.text, target)
        command[at] = target / "out"
        command = [target if word == good.world.text else word for word in command]
    ran = forks.run(command, place, before=lambda: os.chdir(place))
    problem = defect(ran)
    if not problem and kept is not None and kept.exists() and kept.read_bytes() != b"mine":
        problem = "a file of the user's was overwritten"
    return [way, *command], ran, problem


def _file(path: Path) -> Path:
    path.write_text("mine")
    return path


def _in_folder(name: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path.mkdir()
        return _file(path / name)

    return make


def _link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


PLACES: dict[str, Callable[[Path], Path | None]] = {
    "a file": _file,
    "a fifo": os.mkfifo,
    "a link to nowhere": _link("nowhere/at/all"),
    "a link to itself": _link("there"),
    "a device": _link("/dev/null"),
    "a full disk": _link("/dev/full"),
    "an empty folder": Path.mkdir,
    "inside the data": lambda path: None,
    **{
        f"a foreign {name}": _in_folder(name)
        for name in (
            "config.json",
            "README.md",
            "tokenizer.json",
            "selection.json",
            "results.jsonl",
            "journal.jsonl",
            "notes.txt",
        )
    },
}
