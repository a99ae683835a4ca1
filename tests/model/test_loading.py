from __future__ import annotations

import json
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from secateur.data.images import image_batches
from secateur.errors import MissingExtra, ModelError, SettingError, UnsupportedModel
from secateur.measure.evaluate import evaluate
from secateur.model.devices import resolve_device
from secateur.model.families import anatomy
from secateur.model.loading import KNOWN_MODELS, digest, load, load_model, load_shapes, open_model, versions
from tiny import (
    CLASSES,
    FAMILIES_TINY,
    IMAGE,
    REAL_DATA,
    character_tokenizer,
    logits_of,
    randomised,
    tiny_batch,
    tiny_tokenizer,
    without_network,
)
from worlds import one_sentence

tf: Any = transformers
TIMM_ARCHITECTURE, TIMM_IMAGE = "test_vit", 160  # a VisionTransformer of 300,000 parameters
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders then have short names, and the length of a message does not hang on where pytest puts them."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    without_network(monkeypatch)


def save_text_model(folder: str, name: str = "gpt2", tokenizer: Any = None) -> nn.Module:
    model: Any = FAMILIES_TINY[name]()
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def save_image_model(folder: str, name: str = "vit") -> nn.Module:
    model: Any = FAMILIES_TINY[name]()
    model.save_pretrained(folder)
    size = {"height": IMAGE, "width": IMAGE}
    tf.ViTImageProcessor(size=size, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4]).save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def timm_model(classes: int = CLASSES) -> nn.Module:
    return randomised(timm.create_model(TIMM_ARCHITECTURE, num_classes=classes))


def save_timm_model(folder: str) -> nn.Module:
    """A folder in the form of timm's hub repositories."""
    model = timm_model()
    Path(folder).mkdir()
    save_file(model.state_dict(), Path(folder, WEIGHTS))
    preprocessing = {
        "input_size": [3, TIMM_IMAGE, TIMM_IMAGE],
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
    }
    config = {"architecture": TIMM_ARCHITECTURE, "num_classes": CLASSES, "pretrained_cfg": preprocessing}
    Path(folder, "config.json").write_text(json.dumps(config))
    return model


def some_images(size: tuple[int, int], n: int = 2) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for _ in range(n)]


def normalised(images: list[Image.Image], size: int, resample: Image.Resampling) -> Tensor:
    """The preprocessing of the saved models by hand: resized by PIL, scaled to 0..1, less the mean, over the deviation."""
    pixels = np.stack([np.asarray(image.resize((size, size), resample)) for image in images]).astype(np.float64) / 255
    return torch.from_numpy((pixels - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4]).permute(0, 3, 1, 2).float()


def edit_config(folder: str, **fields: Any) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder: str, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    path = Path(folder, WEIGHTS)
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


class Trap:
    """Unpickled, it leaves a mark in the current folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("sprung",)


@pytest.fixture
def trap() -> bytes:
    content = pickle.dumps(Trap())
    pickle.loads(content)
    assert Path("sprung").exists()  # it works
    Path("sprung").rmdir()
    return content


# Loading


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt post-norm", "gemma2"])
def test_a_saved_text_model_comes_back_with_its_tokenizer(name: str) -> None:
    saved = save_text_model("model", name)
    model, tokenizer = load("model", device="cpu")
    batch = tiny_batch(saved)
    assert type(model) is type(saved) and not model.training
    assert torch.equal(logits_of(model, batch), logits_of(saved, batch))
    assert tokenizer("the cat sat")["input_ids"] == tiny_tokenizer()("the cat sat")["input_ids"]
    assert tokenizer.decode(tokenizer("the cat sat")["input_ids"]) == "the cat sat"


def test_a_tokenizer_that_puts_a_beginning_token_still_does() -> None:
    save_text_model("model", tokenizer=tiny_tokenizer(puts_bos=True))
    _, tokenizer = load("model", device="cpu")
    assert tokenizer("the cat")["input_ids"][0] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", ["vit", "deit", "swin"])
def test_a_saved_image_model_comes_back_with_its_preprocessing(name: str) -> None:
    saved = save_image_model("model", name)
    model, preprocess = load("model", device="cpu")
    batch = tiny_batch(saved)
    assert type(model) is type(saved) and not model.training
    assert torch.equal(logits_of(model, batch), logits_of(saved, batch))
    images = some_images((23, 31))
    pixels = preprocess(images)
    assert pixels.shape == (2, 3, IMAGE, IMAGE)
    assert torch.allclose(pixels, normalised(images, IMAGE, Image.Resampling.BILINEAR), atol=1e-6)
    with_pil = tf.ViTImageProcessorPil.from_pretrained("model")
    assert torch.equal(pixels, with_pil(images=images, return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize("prefix", ["", "timm:"])
def test_a_timm_folder_comes_back_with_its_preprocessing(prefix: str) -> None:
    saved = save_timm_model("model")
    model, preprocess = load(f"{prefix}model", device="cpu")
    images = some_images((TIMM_IMAGE, TIMM_IMAGE))
    pixels = preprocess(images)
    assert torch.allclose(pixels, normalised(images, TIMM_IMAGE, Image.Resampling.BICUBIC), atol=1e-5)
    with torch.no_grad():
        logits = model(pixels)
        assert torch.equal(logits, saved(pixels))
    assert logits.shape == (2, CLASSES) and not model.training


@pytest.mark.parametrize("where", ["weights", f"weights/{WEIGHTS}"], ids=["a folder", "a file"])
def test_a_timm_model_takes_its_weights_from_where_it_is_told(where: str) -> None:
    saved = timm_model(classes=1000)
    Path("weights").mkdir()
    save_file(saved.state_dict(), Path("weights", WEIGHTS))
    model, preprocess = load(f"timm:{TIMM_ARCHITECTURE}@{where}", device="cpu")
    assert type(model).__name__ == "VisionTransformer"
    pixels = preprocess(some_images((200, 300)))
    assert pixels.shape == (2, 3, TIMM_IMAGE, TIMM_IMAGE)
    with torch.no_grad():
        assert torch.equal(model(pixels), saved(pixels))


@pytest.mark.parametrize("save", [save_text_model, save_image_model, save_timm_model])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_is_loaded_in_the_dtype_asked_for(save: Callable[[str], nn.Module], dtype: str) -> None:
    saved = save("model")
    model, _ = load("model", device="cpu", dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    parameters = zip(saved.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(theirs.to(ours.dtype), ours) for theirs, ours in parameters)


def test_a_checkpoint_in_bfloat16_is_loaded_in_float32_unless_asked_otherwise() -> None:
    model: Any = FAMILIES_TINY["gpt2"]().to(torch.bfloat16)
    model.save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    assert {parameter.dtype for parameter in load("model", device="cpu")[0].parameters()} == {torch.float32}


def test_rotary_tables_stay_in_float32_whatever_the_dtype() -> None:
    save_text_model("model", "llama")
    model: Any = load("model", device="cpu", dtype="bfloat16")[0]
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_checkpoint_in_several_files_is_put_together() -> None:
    saved: Any = save_text_model("model")
    Path("model", WEIGHTS).unlink()
    saved.save_pretrained("model", max_shard_size="2KB")
    assert len(list(Path("model").glob("*.safetensors"))) > 2
    model, _ = load("model", device="cpu")
    assert torch.equal(logits_of(model, tiny_batch(saved)), logits_of(saved, tiny_batch(saved)))


def test_a_model_goes_to_the_device_asked_for() -> None:
    save_text_model("model")
    for device in ("cpu", "auto"):
        model, _ = load("model", device=device)
        assert {parameter.device for parameter in model.parameters()} == {resolve_device(device)}
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is an accelerator here")
def test_without_an_accelerator_the_device_is_the_cpu() -> None:
    assert resolve_device("auto") == torch.device("cpu")


def test_versions_are_those_that_are_imported() -> None:
    found = versions()
    assert (found["torch"], found["transformers"], found["numpy"]) == (torch.__version__, tf.__version__, np.__version__)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


# Opened


@pytest.mark.parametrize("save", [save_text_model, save_image_model, save_timm_model])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_opened_model_is_kept_with_its_name_and_its_processor(save: Callable[[str], nn.Module], dtype: str) -> None:
    save("model")
    opened, (model, _) = open_model("model", device="cpu", dtype=dtype), load("model", device="cpu", dtype=dtype)
    assert (opened.name, opened.device, opened.dtype, opened.trust_remote_code) == ("model", "cpu", dtype, False)
    assert opened.digest == digest(opened.model) == digest(model)
    assert callable(opened.processor)


# Shapes


KNOWN = {  # what the published checkpoints hold
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "google/vit-base-patch16-224": 86_567_656,
    "facebook/deit-tiny-patch16-224": 5_717_416,
    "microsoft/swin-tiny-patch4-window7-224": 28_288_354,
}
TIMM_TWINS = {
    "vit_base_patch16_224": "google/vit-base-patch16-224",
    "deit_tiny_patch16_224": "facebook/deit-tiny-patch16-224",
    "swin_tiny_patch4_window7_224": "microsoft/swin-tiny-patch4-window7-224",
}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_its_published_number_of_parameters_without_a_hub_or_any_weights(name: str) -> None:
    model = load_shapes(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert parameter_count(model) == KNOWN[name]
    assert len(anatomy(model)) in (12, 24, 30, 32)


@pytest.mark.parametrize("twin", TIMM_TWINS)
def test_a_timm_model_has_the_shapes_of_its_twin(twin: str) -> None:
    ours, theirs, by_short_name = load_shapes(f"timm:{twin}"), load_shapes(TIMM_TWINS[twin]), load_shapes(twin)
    assert all(parameter.is_meta for parameter in ours.parameters())
    assert parameter_count(ours) == parameter_count(theirs) == parameter_count(by_short_name) == KNOWN[TIMM_TWINS[twin]]
    assert [layer.heads for layer in anatomy(ours)] == [layer.heads for layer in anatomy(theirs)]
    assert [layer.mlp_width for layer in anatomy(ours)] == [layer.mlp_width for layer in anatomy(theirs)]


def test_every_known_model_is_one_that_these_tests_know() -> None:
    assert set(json.loads(KNOWN_MODELS.read_text())) == {*KNOWN, *TIMM_TWINS}


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt post-norm", "vit", "swin"])
def test_a_config_alone_is_enough_for_shapes(name: str) -> None:
    model: Any = FAMILIES_TINY[name]()
    model.config.save_pretrained("model")
    assert [path.name for path in Path("model").iterdir()] == ["config.json"]
    shapes = load_shapes("model")
    assert {key: value.shape for key, value in shapes.named_parameters()} == {
        key: value.shape for key, value in model.named_parameters()
    }
    assert all(parameter.is_meta for parameter in shapes.parameters())


def test_a_timm_folder_without_weights_is_enough_for_shapes() -> None:
    saved = save_timm_model("model")
    Path("model", WEIGHTS).unlink()
    shapes = load_shapes("model")
    assert [value.shape for value in shapes.parameters()] == [value.shape for value in saved.parameters()]
    assert all(parameter.is_meta for parameter in shapes.parameters())


def test_a_folder_of_a_known_name_is_read_and_not_the_known_model() -> None:
    save_text_model("gpt2")
    assert parameter_count(load_shapes("gpt2")) == parameter_count(FAMILIES_TINY["gpt2"]())


# Digests


@pytest.mark.parametrize("save", [save_text_model, save_image_model, save_timm_model])
def test_a_model_has_one_digest_however_it_is_loaded(save: Callable[[str], nn.Module]) -> None:
    expected = digest(save("model"))
    assert digest(load("model", device="cpu")[0]) == expected
    rounded = digest(load("model", device="cpu", dtype="bfloat16")[0])
    assert rounded[:8] == expected[:8]  # names and shapes; the values are rounded
    assert rounded[8:] != expected[8:]


def test_a_change_to_any_parameter_changes_the_digest() -> None:
    model = FAMILIES_TINY["llama"]()
    digests = {digest(model)}
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.data.add_(0.1)
        digests.add(digest(model))
    assert len(digests) == len(parameters) + 1


def test_a_change_to_one_value_of_a_small_parameter_changes_the_digest() -> None:
    model: Any = FAMILIES_TINY["gpt2"]()
    before = digest(model)
    for i in range(36):
        model.transformer.h[1].attn.c_attn.bias.data[i] += 1
        assert digest(model) != before
        model.transformer.h[1].attn.c_attn.bias.data[i] -= 1


def test_models_of_other_names_shapes_or_values_have_other_digests() -> None:
    digests = [digest(FAMILIES_TINY[name]()) for name in ("gpt2", "opt", "opt post-norm", "llama", "qwen2", "vit", "timm vit")]
    digests.append(digest(randomised(FAMILIES_TINY["gpt2"](), seed=1)))
    assert len(set(digests)) == 8


# Models that cannot be read


def test_a_folder_that_is_not_there_is_one_sentence(no_network: None) -> None:
    for name in ("./no/such/folder", "no-such-model", "nobody/no-such-model", "timm:no_such_model"):
        for call in (load, load_shapes):
            with pytest.raises(ModelError) as caught:
                call(name)
            one_sentence(caught, name.removeprefix("timm:"))


def _no_config(folder: str) -> None:
    Path(folder, "config.json").unlink()


def _broken_config(folder: str) -> None:
    Path(folder, "config.json").write_text('{"model_type": "gpt2",')


def _config_list(folder: str) -> None:
    Path(folder, "config.json").write_text("[1, 2]")


def _config_null(folder: str) -> None:
    Path(folder, "config.json").write_text("null")


def _config_of_no_model(folder: str) -> None:
    Path(folder, "config.json").write_text("{}")


def _no_weights(folder: str) -> None:
    Path(folder, WEIGHTS).unlink()


def _empty_weights(folder: str) -> None:
    Path(folder, WEIGHTS).write_bytes(b"")


def _truncated_weights(folder: str) -> None:
    content = Path(folder, WEIGHTS).read_bytes()
    Path(folder, WEIGHTS).write_bytes(content[: len(content) // 2])


def _text_as_weights(folder: str) -> None:
    Path(folder, WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 1234\n")


def _broken_tokenizer(folder: str) -> None:
    Path(folder, "tokenizer.json").write_text("{")


def _no_preprocessing(folder: str) -> None:
    Path(folder, "preprocessor_config.json").unlink()


def _unknown_architecture(folder: str) -> None:
    edit_config(folder, architecture="no_such_architecture")


CONFIG_DAMAGES = [_no_config, _broken_config, _config_list, _config_null, _config_of_no_model]
WEIGHT_DAMAGES = [_no_weights, _empty_weights, _truncated_weights, _text_as_weights]
DAMAGES = {
    save_text_model: [*CONFIG_DAMAGES, *WEIGHT_DAMAGES, _broken_tokenizer],
    save_image_model: [*CONFIG_DAMAGES, *WEIGHT_DAMAGES, _no_preprocessing],
    save_timm_model: [*CONFIG_DAMAGES, *WEIGHT_DAMAGES, _unknown_architecture],
}


@pytest.mark.parametrize(
    ("save", "damage"),
    [(save, damage) for save, damages in DAMAGES.items() for damage in damages],
    ids=lambda function: function.__name__.strip("_"),
)
def test_a_folder_that_cannot_be_read_is_one_sentence_that_names_it(
    save: Callable[[str], nn.Module], damage: Callable[[str], None]
) -> None:
    save("folder-7")
    damage("folder-7")
    with pytest.raises(ModelError) as caught:
        load("folder-7", device="cpu")
    one_sentence(caught, "folder-7")


@pytest.mark.parametrize("fields", [{"n_layer": "three"}, {"n_head": 0}, {"n_head": 5}, {"n_embd": -12}], ids=str)
def test_a_config_that_makes_no_model_is_one_sentence(fields: dict[str, Any]) -> None:
    save_text_model("folder-7")
    edit_config("folder-7", **fields)
    for call in (load, load_shapes):
        with pytest.raises(ModelError) as caught:
            call("folder-7")
        one_sentence(caught, "folder-7")


@pytest.mark.parametrize("unknown", [True, False])
@pytest.mark.parametrize("letters", ["ACDEFGHIKLMNPQRSTVWY", "ACGT", "01"])
def test_a_tokenizer_that_knows_no_english_is_a_tokenizer(letters: str, unknown: bool) -> None:
    save_text_model("model", tokenizer=character_tokenizer(letters, unknown=unknown))
    _, tokenizer = load("model", device="cpu")
    assert tokenizer.decode(tokenizer(letters)["input_ids"]).replace(" ", "") == letters


def test_letters_that_were_added_to_an_empty_vocabulary_are_a_tokenizer() -> None:
    tokenizer = character_tokenizer("")
    tokenizer.add_tokens(list("ACGT"))
    save_text_model("model", tokenizer=tokenizer)
    assert len(load("model", device="cpu")[1]("GATTACA")["input_ids"]) == 7


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "qwen2", "gpt_neox", "gemma"])
def test_a_text_model_without_tokenizer_files_is_refused(name: str, no_network: None) -> None:
    model: Any = FAMILIES_TINY[name]()
    model.save_pretrained("folder-7")
    with pytest.raises(ModelError) as caught:
        load("folder-7", device="cpu")
    one_sentence(caught, "folder-7", "tokenizer")


of_every_kind_a_tensor = pytest.mark.parametrize(
    ("save", "tensor"),
    [
        (save_text_model, "transformer.h.1.mlp.c_fc.weight"),
        (save_image_model, "classifier.bias"),
        (save_timm_model, "blocks.1.attn.proj.weight"),
    ],
    ids=["text", "image", "timm"],
)


@of_every_kind_a_tensor
def test_a_checkpoint_that_lacks_a_tensor_is_refused_and_the_tensor_named(save: Callable[[str], Any], tensor: str) -> None:
    save("folder-7")
    edit_weights("folder-7", lambda tensors: tensors.pop(tensor))
    with pytest.raises(ModelError) as caught:
        load("folder-7", device="cpu")
    one_sentence(caught, "folder-7", tensor)


@of_every_kind_a_tensor
def test_a_tensor_of_another_shape_is_refused_as_such(save: Callable[[str], Any], tensor: str) -> None:
    save("folder-7")
    edit_weights("folder-7", lambda tensors: tensors.update({tensor: torch.zeros(7)}))
    with pytest.raises(ModelError, match=r"shape|size") as caught:
        load("folder-7", device="cpu")
    one_sentence(caught, "folder-7")


@pytest.mark.parametrize(
    ("save", "says"),
    [
        (lambda weights: None, "folder-7"),
        (lambda weights: weights.write_bytes(b""), "damaged"),
        (lambda weights: weights.write_bytes(b"\x08" + b"\x00" * 7 + b"{}"), "damaged"),
        (lambda weights: save_file({"nothing": torch.zeros(1)}, weights), "another"),
        (lambda weights: save_file(timm_model(classes=7).state_dict(), weights), "shape"),
    ],
    ids=["no file", "an empty file", "a truncated file", "another model's tensors", "another shape"],
)
def test_weights_that_a_timm_model_cannot_take_are_one_sentence(save: Callable[[Path], Any], says: str) -> None:
    Path("folder-7").mkdir()
    save(Path("folder-7", WEIGHTS))
    with pytest.raises(ModelError) as caught:
        load(f"timm:{TIMM_ARCHITECTURE}@folder-7", device="cpu")
    one_sentence(caught, "folder-7", says)


def test_a_timm_weights_folder_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(ModelError) as caught:
        load(f"timm:{TIMM_ARCHITECTURE}@folder-7/folder-8", device="cpu")
    one_sentence(caught, "folder-7/folder-8")


@pytest.mark.parametrize("model_type", ["electra", "t5", "resnet"])
def test_a_model_of_no_known_family_is_refused_by_its_type(model_type: str) -> None:
    Path("model").mkdir()
    Path("model", "config.json").write_text(json.dumps({"model_type": model_type}))
    for call in (load, load_shapes):
        with pytest.raises(UnsupportedModel) as caught:
            call("model")
        one_sentence(caught, repr(model_type), "llama")


def test_a_model_type_that_transformers_does_not_know_is_refused_by_its_name() -> None:
    Path("folder-7").mkdir()
    Path("folder-7", "config.json").write_text(json.dumps({"model_type": "quux"}))
    for call in (load, load_shapes):
        with pytest.raises(ModelError) as caught:
            call("folder-7")
        one_sentence(caught, "folder-7", "quux")


def test_a_timm_model_of_no_known_family_is_refused() -> None:
    Path("weights").mkdir()
    save_file(timm.create_model("test_resnet").state_dict(), Path("weights", WEIGHTS))
    with pytest.raises(UnsupportedModel) as caught:
        load("timm:test_resnet@weights", device="cpu")
    one_sentence(caught, "ResNet")


@pytest.mark.parametrize("name", ["file.safetensors", "file.gguf", "config.json"])
def test_a_file_instead_of_a_folder_is_refused(name: str) -> None:
    Path(name).write_text("{}")
    for call in (load, load_shapes):
        with pytest.raises(ModelError) as caught:
            call(name)
        assert "file" in one_sentence(caught, name)


# Nothing that a checkpoint brings along is run


PICKLES = ["pytorch_model.bin", "model.pth", WEIGHTS]


@pytest.mark.parametrize("save", [save_text_model, save_image_model, save_timm_model])
@pytest.mark.parametrize("file", PICKLES)
def test_a_pickle_is_not_loaded(save: Callable[[str], nn.Module], file: str, trap: bytes) -> None:
    save("folder-7")
    Path("folder-7", WEIGHTS).unlink()
    Path("folder-7", file).write_bytes(trap)
    with pytest.raises(ModelError) as caught:
        load("folder-7", device="cpu")
    assert not Path("sprung").exists()
    one_sentence(caught, "folder-7")


@pytest.mark.parametrize("save", [save_text_model, save_image_model, save_timm_model])
def test_a_checkpoint_that_is_only_a_pickle_is_refused_even_if_it_is_harmless(save: Callable[[str], nn.Module]) -> None:
    model = save("folder-7")
    Path("folder-7", WEIGHTS).unlink()
    torch.save(model.state_dict(), Path("folder-7", "pytorch_model.bin"))
    with pytest.raises(ModelError) as caught:
        load("folder-7", device="cpu")
    one_sentence(caught, "folder-7")


@pytest.mark.parametrize("save", [save_text_model, save_image_model])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_the_refusal_of_a_pickle_gives_one_command_that_converts_it(
    save: Callable[[str], nn.Module], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save("folder 7")
    Path("folder 7", WEIGHTS).unlink()
    torch.save(model.state_dict(), Path("folder 7", file))
    if file != "pytorch_model.bin":
        index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), file)}
        Path("folder 7", "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        load_model("folder 7", device="cpu")
    one_sentence(caught, "folder 7")
    python, option, code, folder = shlex.split(str(caught.value).split("`")[1])
    assert (python, option) == ("python", "-c")
    monkeypatch.setattr(sys, "argv", [option, folder])  # in this process, where a torchvision that fails to load is mended
    exec(code, {})
    batch = tiny_batch(model)
    assert torch.equal(logits_of(load_model("folder 7", device="cpu"), batch), logits_of(model, batch))


def test_without_a_pickle_no_command_is_given() -> None:
    save_text_model("folder-7")
    Path("folder-7", WEIGHTS).unlink()
    with pytest.raises(ModelError) as caught:
        load_model("folder-7", device="cpu")
    assert "python" not in one_sentence(caught, "folder-7")


def test_a_pickle_given_as_a_timm_models_weights_is_not_loaded(trap: bytes) -> None:
    Path("weights.bin").write_bytes(trap)
    with pytest.raises(ModelError) as caught:
        load(f"timm:{TIMM_ARCHITECTURE}@weights.bin", device="cpu")
    assert not Path("sprung").exists()
    one_sentence(caught)


def save_model_with_code(folder: str, model_type: str) -> Path:
    """A model whose config names a module of the folder; imported, the module leaves the mark that is returned."""
    mark = Path("sprung").absolute()
    save_text_model(folder)
    edit_config(folder, model_type=model_type, auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    code = f"import os\nos.mkdir({str(mark)!r})\nfrom transformers import GPT2Config\nclass C(GPT2Config): pass\n"
    Path(folder, "code.py").write_text(code)
    return mark


def test_code_that_a_checkpoint_names_is_not_run_and_the_sentence_says_so() -> None:
    mark = save_model_with_code("folder-7", "quux")
    for call in (load, load_shapes):
        with pytest.raises(ModelError) as caught:
            call("folder-7")
        one_sentence(caught, "folder-7", "code")
        assert not mark.exists()


def test_a_model_of_a_known_family_that_names_code_is_loaded_without_it() -> None:
    mark = save_model_with_code("model", "gpt2")
    model, _ = load("model", device="cpu")
    load_shapes("model")
    assert not mark.exists()
    assert type(model).__module__.startswith("transformers.models.gpt2")


def test_code_is_run_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And so the tests above can fail."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    mark = save_model_with_code("folder-7", "quux")
    with pytest.raises(ModelError):  # its family is not known all the same
        load_shapes("folder-7", trust_remote_code=True)
    assert mark.exists()


def test_code_that_a_tokenizer_names_is_not_run() -> None:
    save_text_model("model")
    fields = json.loads(Path("model", "tokenizer_config.json").read_text())
    fields |= {"auto_map": {"AutoTokenizer": ["code.T", "code.T"]}}
    Path("model", "tokenizer_config.json").write_text(json.dumps(fields))
    Path("model", "code.py").write_text(f"import os\nos.mkdir({str(Path('sprung').absolute())!r})\nclass T: pass\n")
    _, tokenizer = load("model", device="cpu")
    assert not Path("sprung").exists()
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"


# Settings


@pytest.mark.parametrize("dtype", ["float64", "int8", "", "torch.float32"])
def test_an_unknown_dtype_is_refused_before_the_model_is_looked_for(dtype: str) -> None:
    with pytest.raises(SettingError) as caught:
        load("no-such-model", dtype=dtype)
    one_sentence(caught, repr(dtype), "bfloat16")


@pytest.mark.parametrize("device", ["nonsense", "", "cpu:x", "hpu", "meta"])
def test_a_device_that_cannot_be_used_is_refused_before_the_model_is_looked_for(device: str, no_network: None) -> None:
    with pytest.raises(SettingError) as caught:
        load("no-such-model", device=device)
    one_sentence(caught, repr(device), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can be used here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_on_a_machine_without_it_is_one_sentence(device: str) -> None:
    with pytest.raises(SettingError) as caught:
        load("no-such-model", device=device)
    one_sentence(caught, repr(device), "--device cpu")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="MPS can be used here")
def test_mps_on_a_machine_without_it_is_one_sentence() -> None:
    with pytest.raises(SettingError) as caught:
        load("no-such-model", device="mps")
    one_sentence(caught, "'mps'", "--device cpu")


def test_a_timm_model_without_the_timm_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    save_timm_model("model")
    monkeypatch.setitem(sys.modules, "timm", None)
    for name in ("timm:deit_tiny_patch16_224", "model"):
        for call in (load, load_shapes):
            with pytest.raises(MissingExtra, match=r"pip install timm\b.*'timm'") as caught:
                call(name)
            one_sentence(caught, name)


# torchvision


@pytest.mark.slow
def test_a_mended_torchvision_can_be_imported_with_timm_and_transformers() -> None:
    mend = "from secateur.model.loading import mend_torchvision; mend_torchvision(); import torchvision, timm, transformers; "
    code = mend + "transformers.ViTImageProcessor; print(timm.create_model('test_vit').num_classes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr


def test_a_torchvision_whose_operators_load_is_left_alone() -> None:
    script = """
import sys, types, importlib.util, pathlib, tempfile, torch
folder = pathlib.Path(tempfile.mkdtemp(), "torchvision")
folder.mkdir()
(folder / "__init__.py").touch()
(folder / "_C.so").touch()
sys.path.insert(0, str(folder.parent))
loaded = []
torch.ops.load_library = loaded.append
from secateur.model.loading import mend_torchvision
mend_torchvision()
assert loaded == [folder / "_C.so"], loaded
torch.library.Library("torchvision", "DEF").define("nms(Tensor x) -> Tensor")  # fails where it is defined already
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# The real DeiT-Tiny


real_data = pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"the real data is not here: {REAL_DATA}")
DEIT = {"transformers": str(REAL_DATA / "deit-tiny"), "timm": f"timm:deit_tiny_patch16_224@{REAL_DATA / 'deit-tiny-timm'}"}


def imagenette(preprocess: Any, limit: int) -> Any:
    classes = [f"LABEL_{i}" for i in range(1000)]
    return image_batches(str(REAL_DATA / "imagenette"), preprocess, classes=classes, split="test", limit=limit, batch_size=4)


@real_data
@pytest.mark.slow
def test_the_real_deit_tiny_gives_the_same_logits_from_transformers_and_from_timm() -> None:
    (one, preprocess), (two, _) = (load(name, device="cpu") for name in DEIT.values())
    batch = imagenette(preprocess, 4)[0]
    logits = logits_of(one, batch)
    assert torch.allclose(logits, logits_of(two, batch), atol=1e-4)
    assert logits.std() > 0.5


@real_data
@pytest.mark.slow
@pytest.mark.parametrize("library", DEIT)
def test_the_real_deit_tiny_knows_most_of_the_real_images(library: str) -> None:
    model, preprocess = load(DEIT[library], device="cpu")
    found = evaluate(model, imagenette(preprocess, 64))
    assert found.rows == 64
    assert found.top1 is not None and found.top5 is not None
    assert found.top1 > 0.6 and found.top5 > 0.8
