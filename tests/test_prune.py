from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

import secateur as sc
from secateur import jsonio
from secateur.data import Batches, Source
from secateur.prune import METHODS, SEARCH_METHODS, choose_units, judge
from secateur.selection import Progress
from secateur.watcher import Watcher
from tiny import CLASSES, FAMILIES_TINY, GROUP, VOCABULARY, hook_count

tf: Any = transformers  # its classes are not typed

SEQ_LEN = 16  # all that the tiny models take
WORDS = ("the", "a", "red", "small", "old", "cat", "dog", "bird", "sees", "finds", "near", "under", "tree", "and", "sings")
SMALL: dict[str, Any] = {"ratio": 0.3, "pulls_per_step": 4, "group_width": GROUP, "seq_len": SEQ_LEN, "layout": "none"}
N_UNITS = {"head": 9, "mlp": 12, "both": 21}  # 3 blocks with 3 heads and 14 MLP channels in groups of 4
K = {"head": 3, "mlp": 4, "both": 6}  # Eq. 6 at a ratio of 0.3


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
        (folder / f"{split}.txt").write_text("\n".join(sentences) + "\n")


def write_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(CLASSES):
            (folder / split / f"LABEL_{label}").mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / f"LABEL_{label}" / f"{i}.jpg")


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


def prune(world: World, task: str = "text", **settings: Any) -> sc.PruneResult:
    folder, data = world.of(task)
    return sc.prune(str(folder), **({"calibration": str(data), "device": "cpu"} | SMALL | settings))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


class Listener(Watcher):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.said: list[str] = []
        self.pulls: list[Progress] = []
        self.evaluations: list[tuple[int, int]] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def pull(self, progress: Progress) -> None:
        self.pulls.append(progress)

    def evaluated(self, batch: int, n_batches: int) -> None:
        self.evaluations.append((batch, n_batches))


# The public names


def test_every_public_name_exists_once_and_in_the_order_that_ruff_sorts_by() -> None:
    assert [name for name in sc.__all__ if not hasattr(sc, name)] == []
    assert len(set(sc.__all__)) == len(sc.__all__)
    # Constants first, then classes, then the rest.
    assert sc.__all__ == sorted(sc.__all__, key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name))


def test_the_front_door_of_the_design_works_step_by_step(world: World) -> None:
    model, tokenizer = sc.load(str(world.text_model))
    calibration = sc.text_batches(str(world.text), tokenizer, split="train", limit=512, seq_len=SEQ_LEN)
    units = sc.candidate_units(model, target="head")
    meter = sc.DamageMeter(model, calibration, batches_per_pull=2, seed=42)
    selection = sc.select(meter, units, policy=sc.UCB(c=1.5), ratio=0.10, pulls_per_step=32, temperature=0.02, seed=42)
    assert len(units) == 9
    assert len(selection.units) == 1
    assert meter.pulls == 32
    held_out = sc.text_batches(str(world.text), tokenizer, split="test", seq_len=SEQ_LEN)
    dense = sc.perplexity(model, held_out)
    with sc.zeroed(model, selection.units):
        pruned = sc.perplexity(model, held_out)
    assert 1 < dense < math.inf and 1 < pruned < math.inf and pruned != dense
    assert hook_count(model) == 0


# prune


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("method", METHODS)
def test_prune_finds_what_choose_units_and_judge_find_step_by_step(method: str, task: str, world: World) -> None:
    result = prune(world, task, method=method, target="both")
    model, calibration, evaluation = loaded(world, task)
    folder, data = world.of(task)
    settings = sc.Settings(str(folder), method=method, target="both", calibration=str(data), device="cpu", **SMALL)
    selection = choose_units(model, calibration, settings.for_task(task))
    assert selection.units == result.selection.units
    assert selection.trace == result.selection.trace
    assert selection.scores == result.selection.scores
    judged = judge(model, selection, evaluation)
    assert jsonio.to_json(judged) == {name: jsonio.to_json(result.record[name]) for name in judged}


def test_the_perplexity_is_that_of_a_model_whose_head_weights_are_zeroed_by_hand(world: World) -> None:
    result = prune(world, method="magnitude")
    model, tokenizer = sc.load(str(world.text_model), device="cpu")
    with torch.no_grad():
        for unit in result.selection.units:  # heads are 4 wide; Conv1D keeps a weight as (inputs, outputs)
            model.transformer.h[unit.layer].attn.c_proj.weight[4 * unit.index : 4 * unit.index + 4] = 0  # type: ignore[union-attr, index]
    tokens = tokenizer((world.text / "test.txt").read_text(), add_special_tokens=False)["input_ids"]
    windows = torch.tensor(tokens[: len(tokens) // SEQ_LEN * SEQ_LEN]).view(-1, SEQ_LEN)
    with torch.no_grad():
        logits = model(input_ids=windows).logits[:, :-1]
    loss = float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))
    assert result.record["pruned"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert result.record["pruned"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert result.record["pruned"]["rows"] == windows[:, 1:].numel()


@pytest.mark.parametrize("target", ["head", "mlp", "both"])
def test_the_selection_holds_k_different_units_of_the_target(target: str, world: World) -> None:
    result = prune(world, target=target)
    kinds = {"head", "mlp"} if target == "both" else {target}
    assert len(set(result.selection.units)) == len(result.selection.units) == K[target]
    assert {unit.kind for unit in result.selection.units} <= kinds
    model, _, _ = loaded(world, "text")
    assert len(sc.candidate_units(model, target, GROUP)) == N_UNITS[target]
    assert set(result.selection.units) <= set(sc.candidate_units(model, target, GROUP))
    assert result.record["zeroed_percent"] == sc.zeroed_percent(model, result.selection.units)


def test_without_a_place_nothing_is_written(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert prune(world).out is None
    assert list(tmp_path.iterdir()) == []


def test_with_a_place_the_files_hold_what_is_returned(world: World, tmp_path: Path) -> None:
    result = prune(world, out=tmp_path / "new" / "out")
    assert result.out == tmp_path / "new" / "out"
    assert sorted(path.name for path in result.out.iterdir()) == ["evaluation.json", "journal.jsonl", "selection.json"]
    assert sc.Selection.load(result.out / "selection.json") == result.selection
    assert json.loads((result.out / "evaluation.json").read_text()) == jsonio.to_json(result.record)
    header, *pulls = [json.loads(line) for line in (result.out / "journal.jsonl").read_text().splitlines()]
    assert header == {"settings": result.selection.settings}
    assert len(pulls) == result.selection.pulls


def test_a_finished_run_started_again_measures_and_evaluates_nothing_and_gives_the_same(world: World, tmp_path: Path) -> None:
    first = prune(world, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    listener = Listener()
    again = prune(world, out=tmp_path, watcher=listener)
    assert again.selection == first.selection
    assert again.record == first.record
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert listener.pulls == []
    assert listener.evaluations == []


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_a_run_stopped_in_the_middle_goes_on_to_the_same_files(method: str, world: World, tmp_path: Path) -> None:
    class Stopping(Watcher):
        def pull(self, progress: Progress) -> None:
            if (progress.step, progress.pull) == (1, 2):
                raise KeyboardInterrupt

    prune(world, method=method, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prune(world, method=method, out=tmp_path / "cut", watcher=Stopping())
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["journal.jsonl"]
    listener = Listener()
    prune(world, method=method, out=tmp_path / "cut", watcher=listener)
    assert [pull.replayed for pull in listener.pulls] == [True] * 6 + [False] * 6
    for name in ("selection.json", "journal.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_stopped_while_it_evaluates_keeps_its_selection_and_then_only_evaluates(world: World, tmp_path: Path) -> None:
    class Stopping(Watcher):
        def evaluated(self, batch: int, n_batches: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(world, out=tmp_path, watcher=Stopping())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.jsonl", "selection.json"]
    listener = Listener()
    again = prune(world, out=tmp_path, watcher=listener)
    assert all(pull.replayed for pull in listener.pulls)
    whole = prune(world)
    assert again.selection == whole.selection
    assert again.record["pruned"] == whole.record["pruned"]


def test_a_watcher_hears_of_every_stage_pull_and_batch(world: World) -> None:
    listener = Listener()
    result = prune(world, watcher=listener)
    assert len(listener.pulls) == result.selection.pulls == 12
    assert [(pull.step, pull.pull) for pull in listener.pulls] == [(s, i + 1) for s in range(3) for i in range(4)]
    assert {(pull.n_steps, pull.n_pulls) for pull in listener.pulls} == {(3, 4)}
    n = len(result.record["dense"]["batch_losses"])
    assert listener.evaluations == [(i + 1, n) for i in range(n)] * 2
    assert len(listener.stages) == 5


def test_the_evaluation_sizes_bound_the_evaluation_and_leave_the_selection_alone(world: World) -> None:
    whole, few, fewer = prune(world), prune(world, evaluation_batches=2), prune(world, evaluation_size=3)
    assert len(few.record["dense"]["batch_losses"]) == 2
    assert few.record["dense"]["batch_losses"] == whole.record["dense"]["batch_losses"][:2]
    assert fewer.record["dense"]["rows"] == 3 * (SEQ_LEN - 1)
    assert whole.selection == few.selection == fewer.selection


def test_a_model_that_gives_nan_is_reported_as_nan_in_strict_json(world: World, tmp_path: Path) -> None:
    model: Any = FAMILIES_TINY["gpt2"]()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.nan)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer(world.text / "train.txt").save_pretrained(tmp_path / "model")
    settings: dict[str, Any] = {"calibration": str(world.text), "device": "cpu"} | SMALL
    result = sc.prune(str(tmp_path / "model"), method="random", out=tmp_path / "out", **settings)
    assert math.isnan(float(result.record["pruned"]["loss"]))
    written = (tmp_path / "out" / "evaluation.json").read_text()
    assert json.loads(written, parse_constant=pytest.fail)["pruned"]["perplexity"] == "nan"
    with pytest.raises(sc.ModelError, match="loss on calibration batch"):
        sc.prune(str(tmp_path / "model"), method="ucb", **settings)


# What is refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", 0.0),
        ("ratio", 1.0),
        ("ratio", math.nan),
        ("method", "ucbb"),
        ("target", "heads"),
        ("seed", -1),
        ("pulls_per_step", 0),
        ("temperature", 0.0),
        ("ucb_c", -0.5),
        ("batches_per_pull", 0),
        ("stack", 0),
        ("stack", -2),
        ("group_width", 0),
        ("score_batches", 0),
        ("pool_size", -2),
        ("screen", -2),
        ("dtype", "float8"),
        ("device", "gpu"),
        ("seq_len", 1),
        ("batch_size", 0),
        ("calibration_size", 0),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_the_model_is_read(name: str, value: Any, tmp_path: Path) -> None:
    """The model is not there: an error about it would mean that the setting was looked at too late."""
    with pytest.raises(sc.SettingError, match=str(value)):
        sc.prune(str(tmp_path / "no model"), out=tmp_path / "out", **(SMALL | {name: value}))
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_does_not_exist_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError, match=r"'rato'.* ratio,"):
        sc.prune(str(tmp_path / "no model"), rato=0.1)


def test_more_batches_a_pull_than_there_are_is_refused_and_leaves_no_file_behind(world: World, tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError, match="100"):
        prune(world, batches_per_pull=100, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lanes", [0, -3])
def test_fewer_lanes_than_one_are_refused_and_leave_no_file_behind(lanes: int, world: World, tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError, match=f"lanes are {lanes},"):
        prune(world, lanes=lanes, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", ["journal.jsonl", "selection.json", "evaluation.json"])
def test_what_another_run_wrote_is_refused_and_left_as_it_was(kept: str, world: World, tmp_path: Path) -> None:
    prune(world, out=tmp_path)
    for path in tmp_path.iterdir():
        if path.name != kept:
            path.unlink()
    before = (tmp_path / kept).read_bytes()
    with pytest.raises(sc.OutputError, match=rf"{kept} belongs to another run \(temperature 0.02, now 0.05\)"):
        prune(world, out=tmp_path, temperature=0.05)
    assert [path.name for path in tmp_path.iterdir()] == [kept]
    assert (tmp_path / kept).read_bytes() == before


def test_an_evaluation_on_other_data_is_refused_and_left_as_it_was(world: World, tmp_path: Path) -> None:
    prune(world, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(sc.OutputError, match=r"evaluation\.json belongs to another run"):
        prune(world, out=tmp_path, evaluation_batches=2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("content", ["[]", "{}", "my notes", '{"settings": 1, "judging": 2}'])
@pytest.mark.parametrize("name", ["selection.json", "evaluation.json", "journal.jsonl"])
def test_a_file_of_somebody_elses_is_refused_and_left_as_it_was(name: str, content: str, world: World, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((sc.OutputError, sc.SelectionError), match=name):
        prune(world, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == content


def test_an_evaluation_that_lost_its_numbers_is_refused_or_made_anew(world: World, tmp_path: Path) -> None:
    whole = prune(world, out=tmp_path)
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({key: whole.record[key] for key in ("settings", "judging")}))
    try:
        again = prune(world, out=tmp_path)
        assert jsonio.to_json(again.record["pruned"]) == jsonio.to_json(whole.record["pruned"])
    except sc.OutputError as error:
        assert "evaluation.json" in str(error)


def test_judging_on_what_chose_is_refused(world: World) -> None:
    model, calibration, _ = loaded(world, "text")
    settings = sc.Settings(str(world.text_model), **SMALL).for_task("text")
    selection = choose_units(model, calibration, settings)
    with pytest.raises(sc.DataError, match="what chose the units would judge them"):
        judge(model, selection, calibration)
    one_shared = Batches(calibration.items[:1], Source("other", "test", rows=calibration.source.rows[-1:]))
    with pytest.raises(sc.DataError, match="1 of its 1 rows"):
        judge(model, selection, one_shared)


def test_choosing_leaves_the_model_as_it_was(world: World) -> None:
    for method in METHODS:
        model, calibration, evaluation = loaded(world, "text")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        dense = sc.evaluate(model, evaluation)
        choose_units(model, calibration, sc.Settings("tiny", method=method, **SMALL).for_task("text"))
        assert hook_count(model) == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
        assert sc.evaluate(model, evaluation) == dense


def test_settings_left_to_the_task_become_the_papers() -> None:
    text, image = sc.Settings("m").for_task("text"), sc.Settings("m").for_task("image")
    assert (text.screen, text.calibration_size, text.batch_size) == (48, 512, 4)
    assert (image.screen, image.calibration_size, image.batch_size) == (0, 1024, 8)
    given = dataclasses.replace(text, screen=0, calibration_size=7, batch_size=3)
    assert given.for_task("image") == given


@pytest.mark.parametrize(("memory", "said"), [(None, 0), (3000, 1), (10, 1)])
def test_a_cache_memory_that_is_too_small_is_said_once_and_changes_nothing(
    world: World, tmp_path: Path, memory: int | None, said: int
) -> None:
    listener = Listener()
    result = prune(world, out=tmp_path, cache_memory=memory, watcher=listener)
    assert len(listener.said) == said
    assert all("--cache-memory" in sentence for sentence in listener.said)
    assert result.selection.units == prune(world).selection.units


@pytest.mark.parametrize(("method", "task"), [("ucb", "text"), ("ts", "image"), ("greedy", "text"), ("ucb", "image")])
def test_lanes_change_nothing_and_a_stack_only_last_digits(method: str, task: str, world: World) -> None:
    plain = prune(world, task, method=method, target="both", lanes=1)
    assert prune(world, task, method=method, target="both", lanes=2).selection == plain.selection
    stacked = prune(world, task, method=method, target="both", lanes=2, stack=3)
    assert stacked.selection.settings == plain.selection.settings | {"stack": 3}
    assert stacked.selection.units == plain.selection.units
    assert stacked.record["pruned"] == plain.record["pruned"]
    assert stacked.record["forwards"] == plain.record["forwards"]
    damages = [[pull.damage for pull in made.selection.trace] for made in (stacked, plain)]
    assert damages[0] == pytest.approx(damages[1], abs=5e-6)


def test_a_run_stopped_in_the_middle_goes_on_with_other_lanes_to_the_same_files(world: World, tmp_path: Path) -> None:
    class Stopping(Watcher):
        def pull(self, progress: Progress) -> None:
            if (progress.step, progress.pull) == (1, 2):
                raise KeyboardInterrupt

    prune(world, out=tmp_path / "whole", lanes=1)
    with pytest.raises(KeyboardInterrupt):
        prune(world, out=tmp_path / "cut", lanes=2, watcher=Stopping())
    prune(world, out=tmp_path / "cut", lanes=3)
    for name in ("selection.json", "journal.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# Targets and layouts

CHEAP: dict[str, Any] = {"layout": "free", "measuring": False, "evaluation_batches": 2, "calibration_size": 16}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine whose time is a little less each time it is asked; how often it was."""
    asked: list[int] = []

    def measure(model: Any, small: Any, **settings: Any) -> Any:
        asked.append(1)
        ratio = sc.total_parameters(model) / sc.total_parameters(small)
        timing = SimpleNamespace(flop_ratio=ratio, speedup=SimpleNamespace(value=ratio * (1 + 0.01 * len(asked))))
        return SimpleNamespace(timings=[timing])

    monkeypatch.setattr("secateur.targets.measure", measure)
    return asked


@pytest.mark.parametrize("what", ["target_params", "target_flops"])
@pytest.mark.parametrize("method", ["ucb", "greedy", "magnitude"])
@pytest.mark.parametrize("task", ["text", "image"])
def test_a_target_is_met_by_the_checkpoint(what: str, method: str, task: str, world: World, tmp_path: Path) -> None:
    settings = SMALL | CHEAP | {"method": method, "target": "both", what: 0.8}
    result = prune(world, task, out=tmp_path, **settings)
    goal = result.selection.goal
    assert (goal["what"], goal["asked"]) == ({"target_params": "parameters", "target_flops": "FLOPs"}[what], 0.8)
    assert 0.6 < goal["got"] <= 0.8
    assert result.record["goal"] == goal
    assert result.cut is not None and result.cut["goal"] == goal
    if what == "target_params":
        assert result.cut["params"] / result.cut["dense_params"] == goal["got"]


def test_a_latency_table_is_kept_so_that_a_stopped_run_ends_with_the_same_files(
    clock: list[int], world: World, tmp_path: Path
) -> None:
    class Stopping(Watcher):
        def pull(self, progress: Progress) -> None:
            if (progress.step, progress.pull) == (1, 2):
                raise KeyboardInterrupt

    settings: dict[str, Any] = {"target": "mlp", "target_latency": 0.85}
    prune(world, out=tmp_path / "whole", **settings)
    clock.clear()
    with pytest.raises(KeyboardInterrupt):
        prune(world, out=tmp_path / "cut", watcher=Stopping(), **settings)
    assert len(clock) == 3
    table = (tmp_path / "cut" / "latency.json").read_bytes()
    prune(world, out=tmp_path / "cut", **settings)
    assert len(clock) == 3
    assert (tmp_path / "cut" / "latency.json").read_bytes() == table
    for name in ("selection.json", "journal.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_after_an_unreachable_latency_the_advice_to_let_more_kinds_go_can_be_followed_in_the_same_place(
    clock: list[int], world: World, tmp_path: Path
) -> None:
    with pytest.raises(sc.SettingError, match="--target"):
        prune(world, out=tmp_path, target_latency=0.05)
    prune(world, out=tmp_path, target_latency=0.8, target="both")


def test_a_latency_table_of_another_model_is_not_used(clock: list[int], world: World, tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError, match="--target"):
        prune(world, out=tmp_path, target_latency=0.05)
    clock.clear()
    try:
        prune(world, "image", out=tmp_path, target_latency=0.9)
    except sc.OutputError:
        return
    assert clock


@pytest.mark.parametrize(
    "targets",
    [
        {"target_params": 0.8, "target_flops": 0.8},
        {"target_params": 0.8, "target_flops": 0.8, "target_latency": 0.5},
        {"target_params": 1.0},
        {"target_flops": -0.1},
        {"target_latency": math.nan},
        {"layout": "freee"},
        {"repair": "least square", "layout": "free"},
    ],
    ids=str,
)
def test_targets_and_layouts_that_cannot_work_are_refused_before_the_model_is_read(
    targets: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(sc.SettingError):
        sc.prune(str(tmp_path / "no model"), out=tmp_path / "out", **(SMALL | targets))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["ucb", "magnitude"])
@pytest.mark.parametrize("task", ["text", "image"])
def test_a_uniform_prune_is_read_by_a_stock_loader(method: str, task: str, world: World, tmp_path: Path) -> None:
    result = prune(world, task, out=tmp_path, **SMALL | CHEAP | {"layout": "uniform", "target": "mlp", "method": method})
    assert result.cut is not None and result.cut["layout"] == "uniform"
    assert sorted(unit.layer for unit in result.selection.units) == [0, 1, 2]
    auto = tf.AutoModelForCausalLM if task == "text" else tf.AutoModelForImageClassification
    assert sum(parameter.numel() for parameter in auto.from_pretrained(tmp_path).parameters()) == result.cut["params"]


def test_a_uniform_cut_of_heads_that_no_config_can_say_is_refused_before_the_search(world: World, tmp_path: Path) -> None:
    listener = Listener()
    with pytest.raises(sc.SelectionError, match="--layout free"):
        prune(world, out=tmp_path / "out", **SMALL | {"layout": "uniform"}, watcher=listener)
    assert listener.pulls == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("broken", ["too few batches", "another cut"])
def test_what_cannot_be_written_in_the_end_is_refused_before_the_search(broken: str, world: World, tmp_path: Path) -> None:
    settings = SMALL | CHEAP
    if broken == "too few batches":
        settings |= {"repair": "auto", "calibration_size": 4, "batches_per_pull": 1}
    else:
        prune(world, out=tmp_path / "first", **settings)
        (tmp_path / "out").mkdir()
        for path in (tmp_path / "first").iterdir():
            if path.name not in ("selection.json", "evaluation.json", "journal.jsonl"):  # as `shrink` leaves it
                path.rename(tmp_path / "out" / path.name)
        settings |= {"seed": 7, "method": "random"}
    listener = Listener()
    with pytest.raises(sc.SecateurError, match=r"at least 2 batches|another cut"):
        prune(world, out=tmp_path / "out", watcher=listener, **settings)
    assert listener.pulls == [] and listener.evaluations == []
    assert not (tmp_path / "out" / "selection.json").exists()
