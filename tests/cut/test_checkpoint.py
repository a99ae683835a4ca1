from __future__ import annotations

import copy
import errno
import functools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from secateur.cut.checkpoint import check_cut_place, load_shrunk, refuse_model, save_shrunk
from secateur.cut.record import CARD, RECORD
from secateur.cut.surgery import shrink
from secateur.errors import ModelError, OutputError, ProofError, SecateurError
from secateur.model.families import anatomy, candidate_units, task_of
from secateur.model.loading import load, load_model, load_shapes, stored_dtype, timm_arguments
from secateur.model.shrunk import layout_of
from secateur.tasks import TASKS
from secateur.units import HEAD, MLP, Unit
from tiny import CLASSES, CUTTABLE, FAMILIES_TINY, GROUP, IMAGE, logits_of, randomised, tf, tiny_batch, tiny_tokenizer

WEIGHTS = "model.safetensors"
_VIT: dict[str, Any] = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 12, "num_heads": 3, "mlp_ratio": 1.25, "depth": 3}
_SWIN: dict[str, Any] = {"img_size": IMAGE, "patch_size": 2, "window_size": 2, "embed_dim": 12, "mlp_ratio": 1.25}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "timm vit": ("vit_tiny_patch16_224", _VIT),
    "timm deit distilled": ("deit_tiny_distilled_patch16_224", _VIT),
    "timm swin": ("swin_tiny_patch4_window7_224", _SWIN | {"depths": (2, 2), "num_heads": (3, 6)}),
}
UNEVEN = [Unit(HEAD, 0, 0), Unit(MLP, 1, 0, GROUP)]
# DINOv2's config says the width of the MLPs as a whole multiple; SigLIP's sets that of the pooling head, which stays, too.
NEVER_EVEN = ("dinov2", "siglip_vision_model")


@functools.cache
def dense(name: str) -> Any:
    if name not in TIMM:
        return FAMILIES_TINY[name]()
    architecture, arguments = TIMM[name]
    return randomised(timm.create_model(architecture, num_classes=CLASSES, **arguments))


def arguments_of(name: str) -> dict[str, Any]:
    return TIMM[name][1] if name in TIMM else {}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tf.logging.disable_progress_bar()


def even_units(model: nn.Module) -> list[Unit]:
    """The first channel of every MLP, twice as many where there are twice as many; a group where there are experts."""
    layers = anatomy(model)
    least = min(layer.mlp_width for layer in layers)
    return [
        Unit(MLP, i, j, GROUP if layer.experts else 1)
        for i, layer in enumerate(layers)
        for j in range(layer.mlp_width // least)
    ]


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def edit_config(folder: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = Path(folder, "config.json")
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))


def refused(act: Callable[[], Any], *words: str, kind: type[Exception] = ModelError) -> None:
    with pytest.raises(kind) as caught:
        act()
    said = str(caught.value)
    assert said.endswith((".", "!")) and "\n" not in said and len(said) < 500, said
    assert all(word in said for word in words), said


# There and back


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in CUTTABLE for layout in ("free", "uniform") if layout == "free" or name not in NEVER_EVEN],
)
def test_a_saved_model_comes_back_to_the_bit(name: str, layout: str) -> None:
    model = dense(name)
    small = shrink(model, UNEVEN if layout == "free" else even_units(model))
    save_shrunk(small, "small", model_args=arguments_of(name))
    again = load_shrunk("small", device="cpu")
    batch = tiny_batch(model)
    # The gate of the Qwen2-MoE's shared expert is a product with one vector: its last bit depends on where that lies in memory.
    same = functools.partial(torch.allclose, atol=1e-6) if name == "qwen2_moe" else torch.equal
    assert same(logits_of(again, batch), logits_of(small, batch))
    assert {key: (value.dtype, value.shape) for key, value in again.state_dict().items()} == {
        key: (value.dtype, value.shape) for key, value in small.state_dict().items()
    }
    assert layout_of(again) == layout_of(small) and (layout_of(again) is None) == (layout == "uniform")
    assert anatomy(again)[0].heads == anatomy(small)[0].heads
    assert not again.training
    shapes = load_shapes("small")
    assert [parameter.shape for parameter in shapes.parameters()] == [parameter.shape for parameter in small.parameters()]
    assert not any(path.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")) for path in files())
    assert not any(".writing" in path for path in files())
    modes = {oct(path.stat().st_mode & 0o777) for path in Path("small").iterdir()}
    assert len(modes) == 1
    if layout == "uniform":
        if name in TIMM:
            stock: Any = timm.create_model("local-dir:small", pretrained=True).eval()
        else:
            stock = getattr(tf, TASKS[task_of(model)].auto_class).from_pretrained("small")
            assert type(stock).__module__.startswith("transformers.")
        assert same(logits_of(stock, batch), logits_of(small, batch))


@pytest.mark.parametrize("name", ["gpt2", "llama", "swin", "timm vit"])
def test_a_model_cut_twice_comes_back(name: str) -> None:
    model = dense(name)
    for i, units in enumerate([even_units(model), UNEVEN, [Unit(HEAD, 0, 0), Unit(HEAD, 1, 1)]]):
        small = shrink(model, units)
        save_shrunk(small, f"cut{i}", model_args=arguments_of(name) | timm_arguments(f"cut{i - 1}"))
        model = load_shrunk(f"cut{i}", device="cpu")
        batch = tiny_batch(model)
        assert torch.equal(logits_of(model, batch), logits_of(small, batch))


@pytest.mark.parametrize("name", ["gpt2", "gemma", "opt"])
def test_tied_weights_are_tied_after_reading(name: str) -> None:
    model = dense(name)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    save_shrunk(shrink(model, UNEVEN), "small")
    again: Any = load_shrunk("small", device="cpu")
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert "lm_head.weight" not in load_file(Path("small", WEIGHTS))


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_a_model_is_written_in_the_dtype_asked_for_and_is_itself_left_alone(name: str) -> None:
    source = copy.deepcopy(dense(name)).to(torch.bfloat16)
    model = copy.deepcopy(source).to(torch.float32)
    small = shrink(model, UNEVEN)
    save_shrunk(small, "small", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(Path("small", WEIGHTS)).values()} == {torch.bfloat16}
    assert next(small.parameters()).dtype == torch.float32
    assert stored_dtype("small") == torch.bfloat16
    again = load_shrunk("small", device="cpu")
    expected = shrink(source, UNEVEN).state_dict()
    for key, tensor in again.state_dict().items():
        if tensor.is_floating_point():
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected[key])
    assert next(load_shrunk("small", device="cpu", dtype="float32").parameters()).dtype == torch.float32


def test_weights_in_several_files_come_back_and_one_that_is_missing_is_missed() -> None:
    small = shrink(dense("llama"), UNEVEN)
    save_shrunk(small, "small", max_shard_size="2KB")
    shards = sorted(Path("small").glob("*.safetensors"))
    assert len(shards) > 2
    batch = tiny_batch(small)
    assert torch.equal(logits_of(load_shrunk("small", device="cpu"), batch), logits_of(small, batch))
    assert len({path.stat().st_mode for path in shards}) == 1
    shards[1].unlink()
    refused(lambda: load_shrunk("small", device="cpu"), "small")


def test_tokenizer_generation_config_record_and_card_go_along() -> None:
    model = dense("gpt2")
    model.generation_config.max_new_tokens = 7
    try:
        save_shrunk(shrink(model, UNEVEN), "small", processor=tiny_tokenizer(), record={"model": "m"}, card="# Card\n")
    finally:
        model.generation_config.max_new_tokens = None
    again, tokenizer = load("small", device="cpu")
    assert tokenizer("the cat")["input_ids"] == tiny_tokenizer()("the cat")["input_ids"]
    assert again.generation_config.max_new_tokens == 7  # type: ignore[union-attr]
    record = json.loads(Path("small", RECORD).read_text())
    assert set(record.pop("files")) == {path.name for path in Path("small").iterdir()} - {RECORD, CARD}
    assert record == {"format": 1, "model": "m"}
    assert Path("small", CARD).read_text() == "# Card\n"


def test_an_image_processor_goes_along() -> None:
    tf.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained("dense")
    dense("vit").save_pretrained("dense")
    model, processor = load("dense", device="cpu")
    save_shrunk(shrink(model, UNEVEN), "small", processor=processor)
    assert load("small", device="cpu")[1].processor.size == processor.processor.size


def test_a_timm_folder_keeps_its_preprocessing_and_its_classes() -> None:
    save_shrunk(shrink(dense("timm vit"), UNEVEN), "small", model_args=_VIT)
    fields = json.loads(Path("small", "config.json").read_text())
    assert (fields["architecture"], fields["num_classes"]) == ("vit_tiny_patch16_224", CLASSES)
    again = load_shrunk("small", device="cpu")
    assert tuple(again.pretrained_cfg["mean"]) == dense("timm vit").pretrained_cfg["mean"]  # type: ignore[index]


def test_a_timm_model_of_no_architecture_is_refused_and_leaves_nothing() -> None:
    refused(lambda: save_shrunk(shrink(FAMILIES_TINY["timm vit"](), UNEVEN), "small"), "timm.create_model")
    assert files() == []


@pytest.mark.parametrize("place", ["user@host/small", "a b/smäll", "#1/100%"])
@pytest.mark.parametrize("name", ["gpt2", "timm vit"])
def test_a_folder_may_have_any_name(name: str, place: str) -> None:
    save_shrunk(shrink(dense(name), UNEVEN), place, model_args=arguments_of(name))
    load_shrunk(place, device="cpu")
    load_shapes(place)


def test_weights_that_are_not_finite_come_back() -> None:
    small: Any = shrink(dense("gpt2"), UNEVEN)
    with torch.no_grad():
        small.transformer.ln_f.weight[:2] = torch.tensor([torch.nan, torch.inf])
    save_shrunk(small, "small")
    assert load_shrunk("small", device="cpu").transformer.ln_f.weight[:2].isfinite().sum() == 0  # type: ignore[union-attr, index]


# Where it is written


def test_other_files_in_the_folder_stay() -> None:
    Path("small").mkdir()
    Path("small", "notes.txt").write_text("mine")
    save_shrunk(shrink(dense("gpt2"), UNEVEN), "small")
    assert Path("small", "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", [CARD, "tokenizer.json", "generation_config.json", "modeling_shrunk.py"])
def test_a_file_of_somebody_elses_is_not_overwritten(name: str) -> None:
    Path("small").mkdir()
    Path("small", name).write_text("mine")
    try:
        save_shrunk(shrink(dense("gpt2"), UNEVEN), "small", processor=tiny_tokenizer())
    except OutputError as error:
        assert name in str(error)
    assert Path("small", name).read_text() == "mine"


@pytest.mark.parametrize("there", ["config.json", WEIGHTS, "model-00001-of-00002.safetensors"])
def test_a_model_is_not_written_over_another(there: str) -> None:
    Path("small").mkdir()
    Path("small", there).write_text("mine")
    refused(lambda: save_shrunk(shrink(dense("gpt2"), UNEVEN), "small"), "small", there, "-o", kind=OutputError)
    assert files() == ["small", f"small/{there}"]
    refused(lambda: refuse_model(Path("small")), there, kind=OutputError)
    refuse_model(Path("nowhere"))


def test_a_place_for_a_cut_is_looked_at_before_any_work() -> None:
    check_cut_place(Path())
    Path("config.json").write_text("{}")
    refused(lambda: check_cut_place(Path()), "config.json", "-o", kind=OutputError)
    Path(RECORD).write_text("mine")
    refused(lambda: check_cut_place(Path()), RECORD, kind=OutputError)


def test_a_place_below_a_file_is_one_sentence() -> None:
    Path("file").write_text("mine")
    refused(lambda: save_shrunk(shrink(dense("gpt2"), UNEVEN), "file/small"), "file/small", kind=OutputError)
    assert files() == ["file"]


FULL = OSError(errno.ENOSPC, "No space left on device")


def failing(at: str, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The disk is full, or the run is stopped, when weights are written, the tokenizer is, or a file moves to its place."""
    if at in ("save_pretrained", "tokenizer"):
        where: Any = tf.PreTrainedModel if at == "save_pretrained" else tf.PreTrainedTokenizerFast
        whole = where.save_pretrained

        def save(self: Any, folder: Any, *args: Any, **options: Any) -> None:
            whole(self, folder, *args, **options)
            raise error

        monkeypatch.setattr(where, "save_pretrained", save)
        return
    replace = os.replace

    def move(source: Any, target: Any, **options: Any) -> None:
        if Path(target).name == at:
            raise error
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", move)


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full", "stopped"])
@pytest.mark.parametrize("at", ["save_pretrained", "tokenizer", WEIGHTS, RECORD, "config.json"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "there"])
def test_a_disk_that_fills_up_or_a_stop_leaves_no_half_of_a_model(
    at: str, error: BaseException, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        Path("small").mkdir()
        Path("small", "selection.json").write_text("{}")
    before = files()
    small = shrink(dense("gpt2"), UNEVEN)
    with monkeypatch.context() as patched:
        failing(at, patched, error)
        if isinstance(error, OSError):
            refused(lambda: save_shrunk(small, "small", processor=tiny_tokenizer()), "No space left", "small", kind=OutputError)
        else:
            with pytest.raises(KeyboardInterrupt):
                save_shrunk(small, "small", processor=tiny_tokenizer())
    assert files() == before
    save_shrunk(small, "small", processor=tiny_tokenizer())
    load_shrunk("small", device="cpu")


def test_a_file_that_may_not_grow_leaves_no_half_of_a_model() -> None:
    resource = pytest.importorskip("resource")
    small = shrink(dense("gpt2"), UNEVEN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        refused(lambda: save_shrunk(small, "small"), "write", "small", kind=OutputError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files() == []


def test_what_reads_back_otherwise_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, key = tf.PreTrainedModel.save_pretrained, "transformer.h.1.mlp.c_proj.bias"

    def save(self: Any, folder: Any, *args: Any, **options: Any) -> None:
        whole(self, folder, *args, **options)
        tensors = load_file(Path(folder, WEIGHTS))
        tensors[key][3] += 1e-7  # by the disk
        save_file(tensors, Path(folder, WEIGHTS), metadata={"format": "pt"})

    monkeypatch.setattr(tf.PreTrainedModel, "save_pretrained", save)
    refused(lambda: save_shrunk(shrink(dense("gpt2"), UNEVEN), "small"), key, kind=ProofError)
    assert files() == []


@pytest.mark.parametrize("size", ["abc", "10", "0", "", "-5GB"])
def test_a_shard_size_that_is_none_is_one_sentence_and_leaves_nothing(size: str) -> None:
    refused(lambda: save_shrunk(shrink(dense("gpt2"), UNEVEN), "small", max_shard_size=size), kind=SecateurError)
    assert files() == []


def test_a_generation_config_that_transformers_reads_but_does_not_write_is_no_traceback() -> None:
    dense("gpt2").save_pretrained("dense")
    Path("dense", "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    model = load_model("dense", device="cpu")
    save_shrunk(shrink(model, UNEVEN), "small")
    load_shrunk("small", device="cpu")


# What is read


def test_a_folder_that_is_none_is_one_sentence() -> None:
    refused(lambda: load_shrunk("nowhere"), "nowhere")
    Path("file").write_text("")
    refused(lambda: load_shrunk("file"), "file")
    Path("empty").mkdir()
    refused(lambda: load_shrunk("empty"), "config.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Cut folders that nobody changes."""
    root = tmp_path_factory.mktemp("saved")
    tf.logging.disable_progress_bar()
    for name in ("llama", "timm vit"):
        processor = tiny_tokenizer() if name == "llama" else None
        save_shrunk(shrink(dense(name), UNEVEN), root / name, processor=processor, model_args=arguments_of(name))
    return {name: root / name for name in ("llama", "timm vit")}


def layer(n: int = 0, /, **counts: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields["secateur"]["layers"][n].update(counts)


TAMPERED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "negative": layer(heads=-1),
    "fraction": layer(mlp_width=13.5),
    "word": layer(mlp_width="14"),
    "null count": layer(heads=None),
    "huge": layer(mlp_width=2**40),
    "large": layer(mlp_width=2**20),
    "too few": layer(heads=1),
    "head width": layer(head_dim="4"),
    "no head width": lambda fields: fields["secateur"]["layers"][0].pop("head_dim"),
    "no block": layer(block="nowhere"),
    "a number as block": layer(block=3),
    "null": lambda fields: fields.update(secateur=None),
    "a word": lambda fields: fields.update(secateur="free"),
    "a list": lambda fields: fields.update(secateur=[1]),
    "empty": lambda fields: fields.update(secateur={}),
    "gone": lambda fields: fields.pop("secateur"),
    "no layers": lambda fields: fields["secateur"].update(layers=[]),
    "layers null": lambda fields: fields["secateur"].update(layers=None),
    "no family": lambda fields: fields["secateur"].pop("family"),
    "family null": lambda fields: fields["secateur"].update(family=None),
}
# Only where K/V heads are shared.
TAMPERED_INDEX: dict[str, Callable[[dict[str, Any]], Any]] = {
    "index of no K/V head": layer(kv_index=[0, 9, 9]),
    "index too short": layer(kv_index=[0]),
    "index as word": layer(kv_index="ab"),
    "index as number": layer(kv_index=7),
    "index descending": layer(kv_index=[1, 1, 0]),
    "index gone": lambda fields: fields["secateur"]["layers"][0].pop("kv_index"),
    "other head width": layer(heads=6, kv_heads=4, head_dim=2, kv_index=[0, 0, 1, 1, 2, 3]),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("llama", "timm vit") for how in TAMPERED] + [("llama", how) for how in TAMPERED_INDEX],
)
def test_a_config_that_was_tampered_with_is_one_sentence(name: str, how: str, saved: dict[str, Path]) -> None:
    shutil.copytree(saved[name], "small")
    edit_config("small", (TAMPERED | TAMPERED_INDEX)[how])
    refused(lambda: load_shrunk("small", device="cpu"), "small")


@pytest.mark.parametrize("name", ["llama", "timm vit"])
@pytest.mark.parametrize("how", ["negative", "huge", "null count", "no family", "head width"])
def test_shapes_of_a_config_that_was_tampered_with_are_refused_too(name: str, how: str, saved: dict[str, Path]) -> None:
    shutil.copytree(saved[name], "small")
    edit_config("small", TAMPERED[how])
    refused(lambda: load_shapes("small"), "small")


@pytest.mark.parametrize("name", ["llama", "timm vit"])
def test_counts_larger_than_any_model_had_are_refused_before_memory_is_taken(name: str, saved: dict[str, Path]) -> None:
    """Shapes alone cost nothing, but what is listed head by head would fill all memory."""
    shutil.copytree(saved[name], "small")
    edit_config("small", layer(heads=2**30, kv_heads=2**30))
    refused(lambda: load_shapes("small"), "small")


def _resize_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    key = next(key for key in tensors if key.endswith(("down_proj.weight", "fc2.weight")))
    tensors[key] = tensors[key][:, :-1].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[next(key for key in tensors if key.endswith(("down_proj.weight", "fc2.weight")))]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _cut_short(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-64])


def _cut_to_nothing(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("sprung",)


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))


@pytest.mark.parametrize("damage", [_resize_tensor, _drop_tensor, _cut_short, _cut_to_nothing, _pickled])
@pytest.mark.parametrize("name", ["llama", "timm vit"])
def test_damaged_weights_are_one_sentence(name: str, damage: Callable[[Path], None], saved: dict[str, Path]) -> None:
    shutil.copytree(saved[name], "small")
    damage(Path("small"))
    before = files()
    refused(lambda: load_shrunk("small", device="cpu"), "small")
    assert files() == before


CODE = "import os\n\nos.mkdir({mark!r})\n\n\nclass Evil:\n    pass\n"


def code(folder: str, mark: Path) -> None:
    for name in ("modeling_shrunk.py", "evil.py", "tokenization_evil.py", "__init__.py"):
        Path(folder, name).write_text(CODE.format(mark=str(mark)))


def test_the_code_in_a_folder_is_not_run(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(saved["llama"], "small")
    code("small", tmp_path / "sprung")
    load_shrunk("small", device="cpu")
    load("small", device="cpu")
    load_shapes("small")
    monkeypatch.chdir("small")  # nor if it lies where Python looks first
    load(".", device="cpu")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "named",
    [
        {"AutoModelForCausalLM": "evil.Evil"},
        {"AutoConfig": "evil.Evil"},
        {"AutoModelForCausalLM": "evil.Shrunk"},
        {"AutoModelForCausalLM": "evil--modeling_shrunk.ShrunkLlamaForCausalLM"},
        {"AutoModelForCausalLM": "modeling_shrunk.ShrunkLlamaForCausalLM", "AutoTokenizer": ["tokenization_evil.Evil", None]},
        ["evil.Evil"],
        "evil.Evil",
        {"AutoModelForCausalLM": None},
    ],
    ids=str,
)
def test_a_folder_that_names_other_code_is_refused_and_the_code_not_run(
    named: Any, saved: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(saved["llama"], "small")
    code("small", tmp_path / "sprung")
    edit_config("small", lambda fields: fields.update(auto_map=named))
    for act in (lambda: load_shrunk("small", device="cpu"), lambda: load("small", device="cpu"), lambda: load_shapes("small")):
        refused(act, "small")
    assert not (tmp_path / "sprung").exists()


def test_candidates_of_a_loaded_cut_are_those_of_the_cut() -> None:
    small = shrink(dense("llama"), UNEVEN)
    save_shrunk(small, "small")
    for target in ("both", "kv_group"):
        assert candidate_units(load_shrunk("small"), target, GROUP) == candidate_units(small, target, GROUP)
