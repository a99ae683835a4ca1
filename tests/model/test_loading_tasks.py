"""Which class loads a folder, and which part of it: heads by their name, towers of models for two things, sentence encoders."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from secateur.cut.checkpoint import load_shrunk, save_shrunk
from secateur.cut.surgery import shrink
from secateur.errors import ModelError, UnsupportedModel
from secateur.files.sentences import sentence_modules, sentence_pooling
from secateur.model.families import anatomy, task_of
from secateur.model.loading import load, load_model, load_shapes
from secateur.model.losses import embeddings
from secateur.model.shrunk import HINT, layout_of
from secateur.units import HEAD, MLP, Unit
from tiny import FAMILIES_TINY, GROUP, IMAGE, logits_of, randomised, tf, tiny_batch
from worlds import Encoders, World, make_encoder_tokenizer, one_sentence, save_sentence_encoder, with_config

UNEVEN = [Unit(HEAD, 0, 0), Unit(MLP, 1, 0, GROUP)]
_HEADS: dict[str, tuple[str, str, str]] = {  # class: a tiny model with its config, the class, the task
    "BertModel": ("bert", "BertModel", "text embeddings"),
    "BertForMaskedLM": ("bert", "BertForMaskedLM", "masked text"),
    "BertForSequenceClassification": ("bert classes", "BertForSequenceClassification", "text classes"),
    "BertForTokenClassification": ("bert classes", "BertForTokenClassification", "token classes"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM", "text"),
    "LlamaForSequenceClassification": ("llama", "LlamaForSequenceClassification", "text classes"),
    "LlamaModel": ("llama", "LlamaModel", "text embeddings"),
    "ViTModel": ("vit", "ViTModel", "image embeddings"),
    "Dinov2ForImageClassification": ("dinov2", "Dinov2ForImageClassification", "image"),
    "DistilBertForSequenceClassification": ("distilbert", "DistilBertForSequenceClassification", "text classes"),
    "ModernBertModel": ("modernbert", "ModernBertModel", "text embeddings"),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tf.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def tokenizer(encoders: Encoders) -> Any:
    return make_encoder_tokenizer(encoders.text / "train.txt")


def with_head(kind: str, **fields: Any) -> Any:
    """A tiny model of this class."""
    source: Any = FAMILIES_TINY[_HEADS[kind][0]]()
    config = copy.deepcopy(source.config)
    for name, value in fields.items():
        setattr(config, name, value)
    return randomised(getattr(tf, _HEADS[kind][1])(config))


def given(model: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tiny_batch(model).items() if key not in ("labels", "reference")}


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# The head


@pytest.mark.parametrize("kind", _HEADS)
def test_the_class_is_the_one_that_the_checkpoint_names(kind: str) -> None:
    model = with_head(kind)
    model.save_pretrained("model")
    found = load_model("model", device="cpu")
    assert type(found).__name__ == kind and task_of(found) == _HEADS[kind][2]
    assert equal(found, model)
    assert type(load_shapes("model")).__name__ == kind
    small = shrink(model, UNEVEN)
    save_shrunk(small, "small")
    again = load_shrunk("small", device="cpu")
    assert type(again).__name__ == f"Shrunk{kind}" and task_of(again) == _HEADS[kind][2] and equal(again, small)


@pytest.mark.parametrize(
    ("architectures", "expected"), [(None, "BertForMaskedLM"), (["BertForPreTraining"], "BertForMaskedLM")]
)
def test_without_a_name_that_is_known_the_class_is_the_usual_one_of_the_family(architectures: Any, expected: str) -> None:
    with_head("BertForMaskedLM").save_pretrained("model")
    with_config(Path("model"), architectures=architectures)
    assert type(load_model("model", device="cpu")).__name__ == expected


def test_a_checkpoint_that_lacks_the_head_that_it_names_is_refused() -> None:
    with_head("BertModel").save_pretrained("model")
    with_config(Path("model"), architectures=["BertForMaskedLM"])
    with pytest.raises(ModelError) as caught:
        load_model("model", device="cpu")
    assert "lacks" in one_sentence(caught, "model")


@pytest.mark.parametrize("name", ["bert embeddings", "xlm-roberta"])
def test_a_model_that_was_saved_without_its_pooler_is_loaded_without_it_and_cut_too(name: str) -> None:
    whole: Any = FAMILIES_TINY[name]()
    model: Any = randomised(type(whole)(whole.config, add_pooling_layer=False))
    model.save_pretrained("model")
    found: Any = load_model("model", device="cpu")
    assert found.pooler is None and equal(found, model)
    small = shrink(found, UNEVEN)
    again: Any = save_shrunk(small, "small")
    assert again.pooler is None and equal(again, small)


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "dinov2", "clip_vision_model"])
def test_an_encoder_cut_twice_comes_back(name: str) -> None:
    model = FAMILIES_TINY[name]()
    small = shrink(shrink(model, UNEVEN), [Unit(HEAD, 0, 0), Unit(HEAD, 1, 1)])
    again = save_shrunk(small, "small")
    assert equal(again, small) and layout_of(again) == layout_of(small) is not None
    assert torch.equal(logits_of(again, tiny_batch(model)), logits_of(small, tiny_batch(model)))


# Towers


def two_towers(kind: str) -> Any:
    """A whole CLIP or SigLIP, its part for images as tiny as those of tiny.py."""
    vision = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 14}
    vision |= {"image_size": IMAGE, "patch_size": 8}
    text = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 32}
    text |= {"max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if kind == "clip":
        return randomised(tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=6)))
    return randomised(tf.SiglipModel(tf.SiglipConfig(text_config=text | {"projection_size": 8}, vision_config=vision)))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_of_a_model_for_texts_and_images_the_part_for_images_is_loaded_and_cut(kind: str, world: World) -> None:
    whole = two_towers(kind)
    whole.save_pretrained("model")
    Path("model/preprocessor_config.json").write_bytes((world.image_model / "preprocessor_config.json").read_bytes())
    tower, processor = load("model", device="cpu")
    assert task_of(tower) == "image embeddings" and len(anatomy(tower)) == 3
    assert sum(p.numel() for p in load_shapes("model").parameters()) == sum(p.numel() for p in tower.parameters())
    batch = tiny_batch(tower)
    with torch.no_grad():
        expected = whole.vision_model(pixel_values=batch["pixel_values"]).pooler_output
        assert torch.equal(embeddings(tower, batch), expected)
    small = shrink(tower, UNEVEN)
    again = save_shrunk(small, "small", processor=processor)
    assert equal(again, small) and Path("small/preprocessor_config.json").exists()


# Sentence encoders

OLD = {"word_embedding_dimension": 12, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (None, "mean"),
        ({}, "mean"),
        (OLD | {"pooling_mode_mean_tokens": True}, "mean"),
        (OLD | {"pooling_mode_mean_sqrt_len_tokens": True}, "mean"),  # of another length only
        (OLD | {"pooling_mode_cls_token": True}, "cls"),
        (OLD | {"pooling_mode_max_tokens": True}, "max"),
        (OLD | {"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode": "cls", "include_prompt": True}, "cls"),
    ],
)
def test_a_sentence_encoder_pools_as_its_folder_says(pooling: Any, expected: str, inner: str, tokenizer: Any) -> None:
    model = FAMILIES_TINY["bert embeddings"]()
    save_sentence_encoder(Path("model"), model, tokenizer, inner=inner, pooling=pooling)
    found, processor = load("model", device="cpu")
    assert equal(found, model) and processor("the cat")["input_ids"][0] == 0
    assert found.pooling == sentence_pooling("model") == expected
    by_hand: Any = copy.deepcopy(model)
    by_hand.pooling = expected
    with torch.no_grad():
        assert torch.equal(embeddings(found, given(model)), embeddings(by_hand, given(model)))
    assert load_shapes("model").get_parameter("encoder.layer.0.attention.self.query.weight").shape == (12, 12)


def test_a_sentence_encoders_files_come_along_and_its_transformer_lies_in_the_folder_itself(tokenizer: Any) -> None:
    model: Any = FAMILIES_TINY["bert embeddings"]()
    save_sentence_encoder(
        Path("model"), model, tokenizer, inner="0_Transformer", pooling=OLD | {"pooling_mode_cls_token": True}
    )
    Path("model/3_Dense").mkdir()
    modules = json.loads(Path("model/modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    Path("model/modules.json").write_text(json.dumps(modules))
    for name, content in {"config.json": "{}", "model.safetensors": "weights", "pytorch_model.bin": "pickle"}.items():
        Path("model/3_Dense", name).write_text(content)
    loaded, processor = load("model", device="cpu")
    small = shrink(loaded, UNEVEN)
    again: Any = save_shrunk(small, "small", processor=processor, sentence_folder="model")
    assert again.pooling == "cls" and equal(again, small)
    files = {str(path.relative_to("small")) for path in Path("small").rglob("*") if path.is_file()}
    assert files >= {
        "config.json",
        "model.safetensors",
        "modeling_shrunk.py",
        "modules.json",
        "1_Pooling/config.json",
        "3_Dense/config.json",
        "3_Dense/model.safetensors",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "secateur.json",
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert not any(path.endswith(".bin") for path in files)  # a pickle is not taken along
    assert sentence_modules("small") == [
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        ("Normalize", "2_Normalize"),
        ("Dense", "3_Dense"),
    ]
    assert Path("small/1_Pooling/config.json").read_bytes() == Path("model/1_Pooling/config.json").read_bytes()
    assert Path("small/2_Normalize").is_dir()
    twice, _ = load("small", device="cpu")
    assert twice.pooling == "cls" and equal(twice, small)
    assert set(load_file("small/model.safetensors")) == {*small.state_dict(), HINT}


@pytest.mark.parametrize("path", ["../outside", "1_Pooling/../../outside", "/etc"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_list_of_modules_that_leads_out_of_the_folder_is_refused(path: str, place: int, tokenizer: Any) -> None:
    model = FAMILIES_TINY["bert embeddings"]()
    save_sentence_encoder(Path("outside"), model, tokenizer)
    save_sentence_encoder(Path("folder-7"), model, tokenizer)
    modules = json.loads(Path("folder-7/modules.json").read_text())
    modules[place]["path"] = path
    Path("folder-7/modules.json").write_text(json.dumps(modules))
    for call in (load, load_model, load_shapes):
        with pytest.raises(ModelError) as caught:
            call("folder-7")
        assert "outside it" in one_sentence(caught, "folder-7", path)


@pytest.mark.parametrize("content", ["{oops", "7", '["Transformer"]', '[{"type": "Transformer"}]', '{"path": ""}'])
def test_a_list_of_modules_that_is_none_is_refused(content: str, tokenizer: Any) -> None:
    save_sentence_encoder(Path("folder-7"), FAMILIES_TINY["bert embeddings"](), tokenizer)
    Path("folder-7/modules.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        load("folder-7", device="cpu")
    one_sentence(caught, "folder-7", "modules.json")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        (OLD | {"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens"),
        (OLD | {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls and max"),  # side by side
        ({"pooling_mode": ["mean", "max"]}, "max"),
        ([], "1_Pooling"),
        (None, "1_Pooling"),
    ],
)
def test_a_pooling_that_is_not_known_is_refused(fields: Any, says: str, tokenizer: Any) -> None:
    save_sentence_encoder(Path("folder-7"), FAMILIES_TINY["bert embeddings"](), tokenizer, pooling=fields or {})
    if fields is None:
        Path("folder-7/1_Pooling/config.json").unlink()
    else:
        Path("folder-7/1_Pooling/config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError) as caught:
        load("folder-7", device="cpu")
    one_sentence(caught, "folder-7", says)


def test_any_other_folder_has_no_modules_and_no_pooling(world: World) -> None:
    for place in (str(world.text_model), "nowhere", str(world.text / "train.txt")):
        assert sentence_modules(place) == [] and sentence_pooling(place) is None


def test_a_head_without_a_loss_is_refused_with_the_classes_that_have_one() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        task_of(tf.BertForMultipleChoice(FAMILIES_TINY["bert"]().config))
    one_sentence(caught, "BertForMultipleChoice", "AutoModelForMaskedLM", "AutoModelForSequenceClassification")
