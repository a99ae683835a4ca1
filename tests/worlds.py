"""A small world on disk: a tiny language model, a tiny image model, data for both; and what a command left behind."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from PIL import Image

import secateur as sc
from secateur.data.batches import Batches
from secateur.selection import Step
from secateur.watcher import Progress, Watcher
from tiny import CLASSES, FAMILIES_TINY, GROUP, VOCABULARY

tf: Any = transformers  # its classes are not typed

ROOT = Path(__file__).parents[1]
SEQ_LEN = 16  # all that the tiny models take
WORDS = ("the", "a", "red", "small", "old", "cat", "dog", "bird", "sees", "finds", "near", "under", "tree", "and", "sings")
SMALL: dict[str, Any] = {
    "method": "ucb",
    "ratio": 0.3,
    "pulls_per_step": 4,
    "group_width": GROUP,
    "seq_len": SEQ_LEN,
    "layout": "none",
}
BUDGET = "24pulls"  # of auto
GOALS = {f"{word}_{what}" for word in ("keep", "target") for what in ("params", "flops", "latency")}
N_UNITS = {"head": 9, "mlp": 12, "both": 21}  # 3 blocks with 3 heads and 14 MLP channels in groups of 4
K = {"head": 3, "mlp": 4, "both": 6}  # Eq. 6 at a ratio of 0.3


def small(settings: Mapping[str, Any]) -> dict[str, Any]:
    """SMALL with these settings, without its ratio beside a goal, and with a budget in place of its pulls a step for auto."""
    planned = settings.get("method") == "auto"
    left_out = ({"ratio"} if GOALS & settings.keys() else set()) | ({"pulls_per_step"} if planned else set())
    kept = {name: value for name, value in SMALL.items() if name not in left_out}
    return kept | ({"budget": BUDGET} if planned else {}) | dict(settings)


@dataclass(frozen=True)
class World:
    """A tiny model with its tokenizer, one with its image processor, and data for both, as folders."""

    text_model: Path
    image_model: Path
    text: Path
    images: Path

    def of(self, task: str) -> tuple[Path, Path]:
        return (self.text_model, self.text) if task == "text" else (self.image_model, self.images)


def make_world(root: Path) -> World:
    world = World(root / "gpt2", root / "vit", root / "text", root / "images")
    write_texts(world.text)
    write_images(world.images)
    tf.logging.disable_progress_bar()
    FAMILIES_TINY["gpt2"]().save_pretrained(world.text_model)  # type: ignore[operator]
    make_tokenizer(world.text / "train.txt").save_pretrained(world.text_model)
    FAMILIES_TINY["vit"]().save_pretrained(world.image_model)  # type: ignore[operator]
    size = {"height": SEQ_LEN, "width": SEQ_LEN}
    processor = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "do_rescale": True, "size": size}
    normal = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (world.image_model / "preprocessor_config.json").write_text(json.dumps(processor | normal))
    return world


@dataclass(frozen=True)
class Encoders:
    """A tiny encoder of each task as folders, and data for them: texts, texts with labels, images without classes."""

    masked: Path
    classes: Path
    sentences: Path  # a sentence-transformers folder
    tower: Path
    text: Path
    labelled: Path
    images: Path


def make_encoders(root: Path, world: World) -> Encoders:
    names = ("bert", "bert-classes", "sentences", "clip", "labelled", "images")
    masked, classes, sentences, tower, labelled, images = (root / name for name in names)
    encoders = Encoders(masked, classes, sentences, tower, world.text, labelled, images)
    tokenizer = make_encoder_tokenizer(world.text / "train.txt")
    tf.logging.disable_progress_bar()
    for folder, name in ((encoders.masked, "bert"), (encoders.classes, "bert classes"), (encoders.tower, "clip_vision_model")):
        FAMILIES_TINY[name]().save_pretrained(folder)  # type: ignore[operator]
        if name == "clip_vision_model":
            (folder / "preprocessor_config.json").write_bytes((world.image_model / "preprocessor_config.json").read_bytes())
        else:
            tokenizer.save_pretrained(folder)
    save_sentence_encoder(encoders.sentences, FAMILIES_TINY["bert embeddings"](), tokenizer)
    encoders.labelled.mkdir()
    for split in ("train", "test"):
        lines = (world.text / f"{split}.txt").read_text().splitlines()
        rows = [{"text": line, "label": len(line) % CLASSES} for line in lines]
        (encoders.labelled / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rng = np.random.default_rng(1)
    for split in ("train", "val"):
        (encoders.images / split).mkdir(parents=True)
        for i in range(16):
            Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(encoders.images / split / f"{i}.png")
    return encoders


def save_sentence_encoder(folder: Path, model: Any, tokenizer: Any, *, inner: str = "", pooling: Any = None) -> None:
    """A folder as sentence-transformers writes it: the transformer, perhaps in a folder inside, its pooling, and a norm."""
    for part in (model, tokenizer):
        part.save_pretrained(folder / inner)
    kinds = [("Transformer", inner), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    fields = {"word_embedding_dimension": 12, "pooling_mode_mean_tokens": True} if pooling is None else pooling
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    (folder / "2_Normalize").mkdir()
    (folder / inner / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": SEQ_LEN, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": "cosine"}))


def make_encoder_tokenizer(corpus: Path) -> Any:
    """One token a word, [cls] and [sep] around a text, as the tiny encoders number them."""
    special = ["[cls]", "[sep]", "[pad]", "[unk]", "[mask]"]
    trained = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[unk]"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trained.train([str(corpus)], tokenizers.trainers.WordLevelTrainer(special_tokens=special))
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="[cls] $A [sep]", pair="[cls] $A [sep] $B:1 [sep]:1", special_tokens=[("[cls]", 0), ("[sep]", 1)]
    )
    names = {"cls_token": "[cls]", "sep_token": "[sep]", "pad_token": "[pad]", "unk_token": "[unk]", "mask_token": "[mask]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return tf.PreTrainedTokenizerFast(tokenizer_object=trained, model_input_names=inputs, **names)


def make_tokenizer(corpus: Path) -> Any:
    trained = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[unk]"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trained.train([str(corpus)], tokenizers.trainers.WordLevelTrainer(special_tokens=["[bos]", "[eos]", "[unk]"]))
    assert trained.get_vocab_size() <= VOCABULARY
    return tf.PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="[unk]", bos_token="[bos]", eos_token="[eos]")


def write_texts(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        sentences = [" ".join(rng.choice(WORDS) for _ in range(9)) for _ in range(60)]
        paragraphs = ("\n".join(sentences[i : i + 10]) for i in range(0, 60, 10))  # blank lines: it is running text
        (folder / f"{split}.txt").write_text("\n\n".join(paragraphs) + "\n")


def write_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(CLASSES):
            (folder / split / f"LABEL_{label}").mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / f"LABEL_{label}" / f"{i}.jpg")


def with_config(folder: Path, **fields: Any) -> Path:
    """The folder of a model, with some fields of its config.json changed."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def loaded(world: World, task: str) -> tuple[Any, Batches, Batches]:
    """The model, its calibration batches and its evaluation batches, all through the public names."""
    folder, data = world.of(task)
    model, processor = sc.load(str(folder), device="cpu")
    if task == "text":
        splits = [sc.text_batches(str(data), processor, split=split, seq_len=SEQ_LEN) for split in ("train", "test")]
    else:
        classes = [f"LABEL_{i}" for i in range(CLASSES)]
        splits = [sc.image_batches(str(data), processor, classes=classes, split=split) for split in ("train", "test")]
    return model, splits[0], splits[1]


class Listener(Watcher):
    """Remembers all it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.said: list[str] = []
        self.pulls: list[Progress] = []
        self.steps: list[Step] = []
        self.evaluations: list[tuple[int, int]] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def pull(self, progress: Progress) -> None:
        self.pulls.append(progress)

    def chosen(self, step: Step, n_steps: int) -> None:
        self.steps.append(step)

    def evaluated(self, batch: int, n_batches: int) -> None:
        self.evaluations.append((batch, n_batches))


def one_sentence(caught: pytest.ExceptionInfo[Exception], *names: object) -> str:
    """The message: one line, not long, with all the names in it; given without them, for a path may hold any word."""
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    for name in map(str, names):
        assert name in message, message
    for name in map(str, names):
        message = message.replace(name, "")
    return message


# The command line

PROGRESS = re.compile(
    r"(loading|reading|grouping|learning|choosing|evaluating|measuring|taking over|cutting) .*"
    r"|(proving|repairing|healing|treating|writing|making) .*"
    r"|step \d+/\d+: (head|mlp|expert) \d+\.\d+ \(damage ([+-]\d+\.\d{4}|[+-]?nan|[+-]inf)\)"
    r"|step \d+/\d+: healing, held-out loss \d+\.\d{4} \(\d+\.\d{4} before\)"
    r"|The dense model's loss on .*"  # the weights are random
    r"|Next(, in Python)?: .*"
)


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit code and what it wrote."""

    code: int | str | None
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output, which is one JSON document without nan and the infinities, and nothing else."""
        return json.loads(self.out, parse_constant=pytest.fail)

    @property
    def complaints(self) -> list[str]:
        """The lines on standard error that are not progress."""
        return [line for line in self.err.splitlines() if not PROGRESS.fullmatch(line)]


Run = Callable[..., Ran]
FILES = ["evaluation.json", "journal.jsonl", "selection.json"]  # what a prune that cuts nothing writes, but for its page
FLAGS = ["--device", "cpu", *(word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value)))]


def flags_beside(options: Sequence[object]) -> list[str]:
    """FLAGS, without the ratio beside a goal, and with a budget in place of the pulls of a step for auto."""
    goal = any(str(option).startswith(("--keep-", "--target-")) for option in options)
    left_out = ["--ratio"] if goal else []
    planned = ("--method", "auto") in pairwise(options)
    left_out += ["--pulls-per-step"] if planned else []
    kept = [(name, value) for name, value in zip(FLAGS[::2], FLAGS[1::2], strict=True) if name not in left_out]
    return [word for pair in kept for word in pair] + (["--budget", BUDGET] if planned else [])


def prune_command(world: World, out: Path, *more: object, task: str = "text", model: object = None) -> list[object]:
    """A small prune that cuts nothing; of an option that `more` names again, the last one counts."""
    folder, data = world.of(task)
    return ["prune", model or folder, "--calibration", data, *flags_beside(more), "-o", out, *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_refused(ran: Ran, *left_out: Path) -> str:
    """One sentence beside the progress, exit code 2, and nothing at the places left out; gives the sentence."""
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.complaints) == 1, ran.err
    assert ran.complaints[0].startswith("error: ")
    assert [str(path) for path in left_out if path.exists()] == []
    return ran.complaints[0].removeprefix("error: ")
