from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.cut.surgery import shrink
from secateur.model import shrunk
from secateur.model.devices import multiplying_as_torch_does
from secateur.model.families import anatomy, candidate_units, task_of
from secateur.model.shrunk import LARGEST, LayerLayout, Layout, fit, layout_of
from secateur.model.zeroing import zeroed
from secateur.tasks import TASKS
from secateur.units import HEAD, KV_GROUP, MLP, Unit
from tiny import CAUSAL, CUTTABLE, FAMILIES_TINY, GROUP, TIMM, logits_of, randomised, tf, tiny_batch

STOCK = [name for name in CUTTABLE if name not in TIMM]
CLASSES = [name for name in STOCK if name not in ("opt post-norm", "gpt_neox sequential", "llama mha")]
UNEVEN = [Unit(HEAD, 0, 0), Unit(MLP, 1, 2, GROUP), Unit(HEAD, 2, 0), Unit(HEAD, 2, 1)]


def emptied(model: nn.Module, *layers: int) -> list[Unit]:
    return [unit for unit in candidate_units(model, "both", GROUP) if unit.layer in layers]


def tied_llama() -> Any:
    config: Any = copy.deepcopy(FAMILIES_TINY["llama"]().config)
    config.tie_word_embeddings = True
    return randomised(tf.LlamaForCausalLM(config))


def plain_gpt2() -> Any:
    """Of which the config does not say how wide an MLP is: 4 times the model's width."""
    config: Any = copy.deepcopy(FAMILIES_TINY["gpt2"]().config)
    config.n_inner = None
    return randomised(tf.GPT2LMHeadModel(config))


# The layout

LLAMA = Layout(
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="o_proj",
    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
    mlp_out="mlp.down_proj",
    layers=(
        LayerLayout("model.layers.0", heads=3, kv_heads=2, head_dim=4, mlp_width=14, kv_index=(0, 1, 1)),
        LayerLayout("model.layers.1", heads=4, kv_heads=2, head_dim=4, mlp_width=10),
        LayerLayout("model.layers.2", heads=0, kv_heads=0, head_dim=4, mlp_width=0),
    ),
)


def test_a_layout_is_plain_json_and_comes_back() -> None:
    fields = LLAMA.to_json()
    assert Layout.from_json(json.loads(json.dumps(fields))) == LLAMA
    assert fields == {
        "family": {
            "attention": "self_attn",
            "qkv": ["q_proj", "k_proj", "v_proj"],
            "out": "o_proj",
            "mlp_in": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp_out": "mlp.down_proj",
        },
        "layers": [
            {"block": "model.layers.0", "heads": 3, "kv_heads": 2, "head_dim": 4, "mlp_width": 14, "kv_index": [0, 1, 1]},
            {"block": "model.layers.1", "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp_width": 10},
            {"block": "model.layers.2", "heads": 0, "kv_heads": 0, "head_dim": 4, "mlp_width": 0},
        ],
    }


@pytest.mark.parametrize("name", CUTTABLE)
def test_the_layout_of_a_cut_comes_back_and_lists_what_its_blocks_have(name: str) -> None:
    model = FAMILIES_TINY[name]()
    small = shrink(model, [*emptied(model, 0), *UNEVEN[1:]])
    layout = layout_of(small)
    assert layout is not None and layout_of(model) is None
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    for layer, said in zip(anatomy(small), layout.layers, strict=True):
        counts = (layer.name, layer.heads, layer.kv_heads, layer.head_dim, layer.mlp_width)
        assert (said.block, said.heads, said.kv_heads, said.head_dim, said.mlp_width) == counts
        assert said.kv_index in (None, layer.kv_of)


def test_no_index_of_kv_heads_may_be_said_as_null() -> None:
    fields = LLAMA.to_json()
    fields["layers"][1]["kv_index"] = None
    assert Layout.from_json(fields) == LLAMA


Edit = Callable[[dict[str, Any]], Any]


def without(name: str) -> Edit:
    return lambda fields: fields["family"].pop(name)


def named(name: str, value: Any) -> Edit:
    return lambda fields: fields["family"].update({name: value})


def in_a_layer(edit: Edit) -> Edit:
    return lambda fields: edit(fields["layers"][0])


MALFORMED_LAYERS: dict[str, Edit] = {
    "no block": lambda layer: layer.pop("block"),
    "block a number": lambda layer: layer.update(block=0),
    "no heads": lambda layer: layer.pop("heads"),
    "no K/V heads": lambda layer: layer.pop("kv_heads"),
    "no width of a head": lambda layer: layer.pop("head_dim"),
    "no MLP": lambda layer: layer.pop("mlp_width"),
    "heads negative": lambda layer: layer.update(heads=-3),
    "heads a fraction": lambda layer: layer.update(heads=3.0),
    "heads a word": lambda layer: layer.update(heads="3"),
    "heads null": lambda layer: layer.update(heads=None),
    "K/V heads a truth": lambda layer: layer.update(heads=1, kv_heads=True, kv_index=[0]),
    "width of a head a list": lambda layer: layer.update(head_dim=[4]),
    "MLP too wide for any model": lambda layer: layer.update(mlp_width=LARGEST),
    "an unknown key": lambda layer: layer.update(experts=2),
    "index gone": lambda layer: layer.pop("kv_index"),
    "index null": lambda layer: layer.update(kv_index=None),
    "index short": lambda layer: layer.update(kv_index=[0, 1]),
    "index long": lambda layer: layer.update(kv_index=[0, 0, 1, 1]),
    "index descending": lambda layer: layer.update(kv_index=[1, 1, 0]),
    "index of one K/V head": lambda layer: layer.update(kv_index=[0, 0, 0]),
    "index of a K/V head that is not there": lambda layer: layer.update(kv_index=[0, 1, 2]),
    "index with a gap": lambda layer: layer.update(kv_index=[0, 2, 2]),
    "index negative": lambda layer: layer.update(kv_index=[-1, 0, 1]),
    "index of fractions": lambda layer: layer.update(kv_index=[0.0, 1.0, 1.0]),
    "index of truths": lambda layer: layer.update(kv_index=[False, True, True]),
    "index a word": lambda layer: layer.update(kv_index="011"),
    "index a number": lambda layer: layer.update(kv_index=7),
    "index an object": lambda layer: layer.update(kv_index={"0": 1}),
    "heads without K/V heads": lambda layer: layer.update(kv_heads=0, kv_index=None),
    "K/V heads without heads": lambda layer: layer.update(heads=0, kv_index=[]),
}
MALFORMED: dict[str, Edit] = {
    "empty": lambda fields: fields.clear(),
    "an unknown key": lambda fields: fields.update(format=2),
    "no family": lambda fields: fields.pop("family"),
    "family null": lambda fields: fields.update(family=None),
    "family a word": lambda fields: fields.update(family="llama"),
    "family a list": lambda fields: fields.update(family=["self_attn"]),
    "an unknown name": lambda fields: fields["family"].update(norm="norm"),
    "layers among the names": lambda fields: fields["family"].update(layers=[]),
    "no layers": lambda fields: fields.pop("layers"),
    "layers null": lambda fields: fields.update(layers=None),
    "layers a number": lambda fields: fields.update(layers=3),
    "layers an object": lambda fields: fields.update(layers={"0": fields["layers"][0]}),
    "a layer null": lambda fields: fields["layers"].append(None),
    "a layer a list": lambda fields: fields["layers"].append([1, 2]),
    "a layer a word": lambda fields: fields["layers"].append("model.layers.3"),
    **{f"no {name}": without(name) for name in ("attention", "qkv", "out", "mlp_in", "mlp_out")},
    **{f"{name} {no!r}": named(name, no) for name in ("attention", "out", "mlp_out") for no in (None, 3, ["o_proj"])},
    **{
        f"{name} {no!r}": named(name, no)
        for name in ("qkv", "mlp_in")
        for no in (None, 3, "c_attn", [], [None], [3], {"q": "k"})
    },
    **{f"layer: {how}": in_a_layer(edit) for how, edit in MALFORMED_LAYERS.items()},
}


@pytest.mark.parametrize("how", MALFORMED)
def test_every_layout_that_is_malformed_is_a_value_error(how: str) -> None:
    fields = LLAMA.to_json()
    MALFORMED[how](fields)
    with pytest.raises(ValueError):
        Layout.from_json(fields)


@pytest.mark.parametrize("fields", [None, 5, "free", [], [1], ["family", "layers"], {"family"}, True], ids=repr)
def test_what_is_no_object_is_a_value_error(fields: Any) -> None:
    with pytest.raises(ValueError):
        Layout.from_json(fields)


@pytest.mark.parametrize(("heads", "kv_heads", "fits"), [(4, 2, True), (4, 4, True), (3, 2, False), (0, 0, True)])
def test_without_an_index_the_kv_heads_must_serve_as_many_heads_each(heads: int, kv_heads: int, fits: bool) -> None:
    fields = LLAMA.to_json()
    fields["layers"][1] |= {"heads": heads, "kv_heads": kv_heads}
    if fits:
        assert Layout.from_json(fields).layers[1] == replace(LLAMA.layers[1], heads=heads, kv_heads=kv_heads)
    else:
        with pytest.raises(ValueError, match=r"model\.layers\.1"):
            Layout.from_json(fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"mlp_width": 15}, "15.*14"), ({"heads": 6, "kv_index": (0, 0, 0, 1, 1, 1)}, "24.*16"), ({"head_dim": 2}, "2.*4")],
    ids=str,
)
def test_a_layout_larger_than_the_dense_model_or_of_other_heads_does_not_fit_it(change: dict[str, Any], says: str) -> None:
    layer = replace(LLAMA.layers[0], **change)
    with pytest.raises(ValueError, match=says):
        fit(FAMILIES_TINY["llama"](), replace(LLAMA, layers=(layer,)))


def test_what_else_a_config_calls_secateur_is_no_layout() -> None:
    model: Any = FAMILIES_TINY["llama"]()
    assert layout_of(model) is layout_of(model.config) is None
    model.config.secateur = "pruned with it"
    assert layout_of(model) is None


# Saved, and loaded where there is no Secateur

LOADER = """
import importlib, json, sys, warnings
sys.modules["secateur"] = None
sys.modules["torchvision"] = None  # not needed, and some are built for another torch
try:
    importlib.import_module("secateur.model.shrunk")
    sys.exit("Secateur can be imported")
except ImportError:
    pass
import torch, transformers
warnings.simplefilter("error")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
root, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
told = {}

def logits(model, batch):
    with torch.no_grad():
        found = model.eval()(**batch)
        return found.logits if "logits" in found else found.last_hidden_state

def tied(model):
    embeddings = model.get_output_embeddings()
    return embeddings is not None and embeddings.weight is model.get_input_embeddings().weight

def blocks_by(auto, folder, cut):  # the class that is loaded, how many of the blocks' tensors are those of the cut, the others
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    own, same, wrong = model.state_dict(), 0, []
    names = tuple(layer["block"] + "." for layer in model.config.secateur["layers"])
    for key, value in cut.state_dict().items():
        if key.startswith(names):
            places = (key, key.partition(".")[2], f"{model.base_model_prefix}.{key}")
            if any(place in own and torch.equal(own[place], value) for place in places):
                same += 1
            else:
                wrong.append(key)
    return [type(model).__name__, same, wrong]

by_every_auto = json.load(open(f"{root}/autos.json"))
for name, auto in json.load(open(f"{root}/cases.json")).items():
    told[name] = says = {}
    auto, batch = getattr(transformers, auto), torch.load(f"{root}/{name}/batch.pt")
    expected, generated = batch.pop("logits"), batch.pop("generated", None)
    if name != "uniform":
        try:
            auto.from_pretrained(f"{root}/{name}/model")
            says["without trust"] = "loaded"
        except RuntimeError as error:
            says["without trust"] = str(error)
    trusted = {} if name == "uniform" else {"trust_remote_code": True}
    model, info = auto.from_pretrained(f"{root}/{name}/model", output_loading_info=True, **trusted)
    says["loading"] = {key: sorted(map(str, value)) for key, value in info.items()}
    same = torch.allclose if name == "qwen2_moe" else torch.equal  # see test_checkpoint.py
    says["equal"] = same(logits(model, batch), expected)
    says["class"], says["module"] = type(model).__name__, type(model).__module__
    says["tied"] = tied(model)
    says["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    if generated is not None:
        found = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        says["generated"] = torch.equal(found, generated)
    model.save_pretrained(f"{root}/{name}/again")
    again = auto.from_pretrained(f"{root}/{name}/again", **trusted)
    says["again"] = same(logits(again, batch), expected)
    again.save_pretrained(f"{root}/{name}/again")  # over itself
    config = transformers.AutoConfig.from_pretrained(f"{root}/{name}/again")
    if config.is_heterogeneous:
        width = {"gpt2": "n_inner", "opt": "ffn_dim", "distilbert": "hidden_dim"}.get(config.model_type, "intermediate_size")
        dense = getattr(config, "mlp_only_layers", range(config.num_hidden_layers))  # the others have experts (Qwen-MoE)
        widths = [width if i in dense else "moe_intermediate_size" for i in range(config.num_hidden_layers)]
        layers = zip(config.per_layer_config, widths)
        says["layers"] = [[layer.num_attention_heads, getattr(layer, width)] for layer, width in layers]
    if name in by_every_auto:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a head that the file does not have is drawn anew, which transformers says
            says["autos"] = {auto: blocks_by(auto, f"{root}/{name}/again", again) for auto in config.auto_map}
    if name == "tied":
        half = auto.from_pretrained(f"{root}/{name}/again", dtype=torch.bfloat16, **trusted)
        says["dtypes"] = sorted({str(parameter.dtype) for parameter in half.parameters()})
json.dump(told, open(f"{root}/told.json", "w"))
"""


def saved_models() -> dict[str, Any]:
    """Of each family one with uneven layers, the first emptied in every second one; others by what is special in them."""
    models = {}
    for i, name in enumerate(CLASSES):
        model = FAMILIES_TINY[name]()
        models[name] = shrink(model, UNEVEN if i % 2 else [*emptied(model, 0), *UNEVEN[1:]])
    models["tied"] = shrink(tied_llama(), UNEVEN)
    models["plain gpt2"] = shrink(plain_gpt2(), [Unit(HEAD, i, i) for i in range(3)])
    llama = FAMILIES_TINY["llama"]()
    models["every layer uneven"] = shrink(llama, [Unit(HEAD, i, i) for i in range(3)])
    models["nothing left"] = shrink(llama, emptied(llama, 0, 1, 2))
    models["cut twice"] = shrink(shrink(FAMILIES_TINY["qwen2"](), UNEVEN), [Unit(KV_GROUP, 0, 1), Unit(HEAD, 1, 5)])
    models["uniform"] = shrink(llama, [Unit(KV_GROUP, i, i % 2) for i in range(3)])
    return models


SAVED = [*CLASSES, "tied", "plain gpt2", "every layer uneven", "nothing left", "cut twice", "uniform"]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return saved_models()


@pytest.fixture(scope="module")
def told(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without Secateur has to say of the models, once saved; one process for all, since it is slow to start."""
    root, cases = tmp_path_factory.mktemp("saved"), {}
    assert list(models) == SAVED
    for name, model in models.items():
        batch = tiny_batch(model)
        cases[name] = TASKS[task_of(model)].auto_class
        model.save_pretrained(root / name / "model")
        batch = {key: value for key, value in batch.items() if key not in ("labels", "reference")}
        with torch.no_grad(), multiplying_as_torch_does():  # as that process will
            found = model(**batch)
            batch["logits"] = found.logits if "logits" in found else found.last_hidden_state
            if task_of(model) == "text":
                batch["generated"] = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        torch.save(batch, root / name / "batch.pt")
    (root / "cases.json").write_text(json.dumps(cases))
    (root / "autos.json").write_text(json.dumps([*AUTO]))
    (root / "loader.py").write_text(LOADER)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "loader.py", str(root), str(torch.get_num_threads())]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((root / "modules").rglob("modeling_shrunk.py"))
    result: dict[str, Any] = json.loads((root / "told.json").read_text())
    return result | {"root": str(root)}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_is_loaded_and_saved_again_where_secateur_cannot_be_imported(
    name: str, told: dict[str, Any], models: dict[str, Any]
) -> None:
    says, small = told[name], models[name]
    assert says["equal"] and says["again"] and says.get("generated", True)
    assert says["class"] == type(small).__name__
    assert says["module"].startswith("transformers.models." if name == "uniform" else "transformers_modules.")
    assert says["module"].endswith("modeling_llama" if name == "uniform" else ".modeling_shrunk")
    assert not any(says["loading"].values()), says["loading"]
    assert says["parameters"] == sum(parameter.numel() for parameter in small.parameters())
    assert says.get("dtypes", ["torch.bfloat16"]) == ["torch.bfloat16"]
    embeddings = small.get_output_embeddings()
    assert says["tied"] == (embeddings is not None and embeddings.weight is small.get_input_embeddings().weight)
    assert name != "tied" or (says["tied"] and "dtypes" in says)


@pytest.mark.parametrize("name", [name for name in SAVED if name != "uniform"])
def test_a_saved_model_is_not_taken_for_an_ordinary_one_without_its_code(name: str, told: dict[str, Any]) -> None:
    assert "ignore_mismatched_sizes" in told[name]["without trust"]


@pytest.mark.parametrize("name", [name for name in SAVED if name not in ("uniform", "swin", "dinov2")])
def test_transformers_own_config_reads_the_counts_of_every_layer(
    name: str, told: dict[str, Any], models: dict[str, Any]
) -> None:
    layers = anatomy(models[name])
    assert told[name]["layers"] == [[layer.heads, layer.mlp_width] for layer in layers]
    for where in ("model", "again"):
        written = json.loads(Path(told["root"], name, where, "config.json").read_text())
        assert Layout.from_json(written["secateur"]) == layout_of(models[name])
        assert written["secateur"] == models[name].config.secateur
        assert f"modeling_shrunk.{type(models[name]).__name__}" in written["auto_map"].values()
        assert Path(told["root"], name, where, "modeling_shrunk.py").read_bytes() == Path(shrunk.__file__).read_bytes()


AUTO = {  # the Auto classes of a free checkpoint, each with the class that it loads
    "llama": {
        "AutoModel": "LlamaModel",
        "AutoModelForCausalLM": "LlamaForCausalLM",
        "AutoModelForSequenceClassification": "LlamaForSequenceClassification",
        "AutoModelForTokenClassification": "LlamaForTokenClassification",
    },
    "gpt2": {
        "AutoModel": "GPT2Model",
        "AutoModelForCausalLM": "GPT2LMHeadModel",
        "AutoModelForSequenceClassification": "GPT2ForSequenceClassification",
        "AutoModelForTokenClassification": "GPT2ForTokenClassification",
    },
    "bert": {
        "AutoModel": "BertModel",
        "AutoModelForCausalLM": "BertLMHeadModel",
        "AutoModelForMaskedLM": "BertForMaskedLM",
        "AutoModelForSequenceClassification": "BertForSequenceClassification",
        "AutoModelForTokenClassification": "BertForTokenClassification",
    },
    "modernbert": {
        "AutoModel": "ModernBertModel",
        "AutoModelForMaskedLM": "ModernBertForMaskedLM",
        "AutoModelForSequenceClassification": "ModernBertForSequenceClassification",
        "AutoModelForTokenClassification": "ModernBertForTokenClassification",
    },
    "vit": {"AutoModel": "ViTModel", "AutoModelForImageClassification": "ViTForImageClassification"},
    "dinov2": {"AutoModel": "Dinov2Model", "AutoModelForImageClassification": "Dinov2ForImageClassification"},
}
AUTO |= {"bert embeddings": AUTO["bert"], "clip_vision_model": {"AutoModel": "CLIPVisionModel"}}
AUTO |= {
    "deit distilled": {"AutoModel": "DeiTModel", "AutoModelForImageClassification": "DeiTForImageClassificationWithTeacher"}
}
AUTO |= {"swin": {"AutoModel": "SwinModel", "AutoModelForImageClassification": "SwinForImageClassification"}}


@pytest.mark.parametrize("name", AUTO)
def test_every_auto_class_that_knows_the_model_loads_the_blocks_that_were_cut(
    name: str, told: dict[str, Any], models: dict[str, Any]
) -> None:
    """Also one with a head that the checkpoint has not, and one without the head that it has."""
    found = told[name]["autos"]
    assert {auto: kind for auto, (kind, _, _) in found.items()} == {auto: f"Shrunk{kind}" for auto, kind in AUTO[name].items()}
    blocks = tuple(f"{layer.name}." for layer in anatomy(models[name]))
    n = sum(key.startswith(blocks) for key in models[name].state_dict())
    assert {(same, tuple(wrong)) for _, same, wrong in found.values()} == {(n, ())}


def test_an_ordinary_model_has_no_code_beside_it(told: dict[str, Any], models: dict[str, Any]) -> None:
    for where in ("model", "again"):
        files = {path.name for path in Path(told["root"], "uniform", where).iterdir()}
        assert files == {"config.json", "generation_config.json", "model.safetensors"}
    written = json.loads(Path(told["root"], "uniform", "again", "config.json").read_text())
    assert not written.keys() & {"auto_map", "secateur", "per_layer_config"}
    assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (2, 1, 4)


def even_units(model: nn.Module) -> list[Unit]:
    """As much of every layer's MLP as a stock config can say, and of its heads, if it can."""
    layers = anatomy(model)
    units = [Unit(MLP, i, q, GROUP) for i, layer in enumerate(layers) for q in ((0, 2) if layer.mlp_width == 30 else (i,))]
    if layers[0].grouped_query and layers[0].kv_heads == 2:
        units += [Unit(KV_GROUP, i, i % 2) for i in range(3)]
    return units


# DINOv2's config says the width of the MLPs as a whole multiple; SigLIP's sets that of the pooling head, which stays, too.
@pytest.mark.parametrize("name", [name for name in STOCK if name not in ("dinov2", "siglip_vision_model")])
def test_an_even_cut_is_saved_and_loaded_as_any_model_of_its_class(name: str, tmp_path: Path) -> None:
    model = FAMILIES_TINY[name]()
    small: Any = shrink(model, even_units(model), "uniform")
    small.save_pretrained(tmp_path)
    autos = {"deit distilled": tf.DeiTForImageClassificationWithTeacher}  # which transformers has no auto class for
    auto = autos.get(name, getattr(tf, TASKS[task_of(model)].auto_class))
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(small) is type(model)
    assert not any(info.values()) and not list(tmp_path.glob("*.py"))
    assert torch.equal(logits_of(again.eval(), tiny_batch(model)), logits_of(small, tiny_batch(model)))


# Generation


def prompts(model: nn.Module) -> dict[str, Tensor]:
    """Three texts of different lengths, padded at their left."""
    ids = tiny_batch(model)["input_ids"][:, :6].clone()
    mask = torch.ones_like(ids)
    for row, padding in ((1, 3), (2, 1)):
        ids[row, :padding], mask[row, :padding] = 2, 0
    return {"input_ids": ids, "attention_mask": mask}


def same_text(model: Any, units: list[Unit], small: Any, **options: Any) -> None:
    settings = prompts(model) | {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False} | options
    with zeroed(model, units):
        expected = model.generate(**settings)
    assert torch.equal(small.generate(**settings), expected)
    assert expected.shape[1] == 10


@pytest.mark.parametrize("name", [name for name in CAUSAL if name in CUTTABLE])
@pytest.mark.parametrize("empty", [False, True], ids=["uneven", "first layer emptied"])
def test_a_shrunk_model_writes_what_the_zeroed_one_does(name: str, empty: bool) -> None:
    model: Any = FAMILIES_TINY[name]()
    units = [*emptied(model, 0), Unit(HEAD, 2, 1)] if empty else UNEVEN
    small: Any = shrink(model, units)
    same_text(model, units, small)
    same_text(model, units, small, num_beams=2)
    same_text(model, units, small, cache_implementation="static")


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("empty", [False, True], ids=["uneven", "first layer emptied"])
def test_the_attention_may_be_changed_after_the_cut_and_the_cache_left_out(name: str, empty: bool) -> None:
    model: Any = FAMILIES_TINY[name]()
    units = [*emptied(model, 0), Unit(HEAD, 2, 1)] if empty else UNEVEN
    small: Any = shrink(model, units)
    batch = tiny_batch(model)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        small.set_attn_implementation(attention)
        assert small.config._attn_implementation == attention
        with zeroed(model, units):
            expected = logits_of(model, batch)
        torch.testing.assert_close(logits_of(small, batch), expected, rtol=1e-4, atol=1e-4)
        same_text(model, units, small, use_cache=False)
    before = FAMILIES_TINY[name]()
    before.set_attn_implementation("eager")  # type: ignore[operator]
    torch.testing.assert_close(logits_of(shrink(before, units), batch), expected, rtol=1e-4, atol=1e-4)


def test_the_maps_of_an_uneven_attention_have_a_row_for_each_head_that_is_left() -> None:
    model: Any = FAMILIES_TINY["llama"]()
    model.set_attn_implementation("eager")
    small: Any = shrink(model, UNEVEN)
    ids = tiny_batch(model)["input_ids"]
    with torch.no_grad():
        found = small(input_ids=ids, output_attentions=True).attentions
        with zeroed(model, UNEVEN):
            expected = model(input_ids=ids, output_attentions=True).attentions
    for maps, kept, dense in zip(found, ([1, 2, 3], [0, 1, 2, 3], [2, 3]), expected, strict=True):
        torch.testing.assert_close(maps, dense[:, kept])


def test_a_cache_of_a_model_with_an_emptied_first_layer_knows_how_long_it_is() -> None:
    model: Any = FAMILIES_TINY["llama"]()
    small: Any = shrink(model, emptied(model, 0))
    ids = tiny_batch(model)["input_ids"]
    with torch.no_grad():
        cache = small(input_ids=ids[:, :7], use_cache=True).past_key_values
        assert cache.get_seq_length() == 7
        rest = small(input_ids=ids[:, 7:], past_key_values=cache).logits
        torch.testing.assert_close(rest, small(input_ids=ids).logits[:, 7:], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 10 and cache.layers[0].keys.numel() == 30  # a number for each token of 3 texts


# Python's own ways of copying


@pytest.mark.parametrize("name", CUTTABLE)
def test_a_shrunk_model_can_be_copied(name: str) -> None:
    model = FAMILIES_TINY[name]()
    small = shrink(model, [*emptied(model, 0), *UNEVEN[1:]])
    again = copy.deepcopy(small)
    assert type(again) is type(small) and layout_of(again) == layout_of(small) is not None
    described: list[Any] = [getattr(one, "config", one) for one in (again, small)]
    assert described[0].secateur is not described[1].secateur
    assert torch.equal(logits_of(again, tiny_batch(model)), logits_of(small, tiny_batch(model)))


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "swin", "timm vit"])
def test_a_shrunk_model_can_be_pickled(name: str) -> None:
    small = shrink(FAMILIES_TINY[name](), UNEVEN)
    again = pickle.loads(pickle.dumps(small))
    assert type(again) is type(small) and pickle.loads(pickle.dumps(type(small))) is type(small)
    assert torch.equal(logits_of(again, tiny_batch(small)), logits_of(small, tiny_batch(small)))


@pytest.mark.parametrize("name", ["gpt2", "llama", "timm vit"])
def test_a_model_with_an_emptied_layer_can_be_pickled(name: str) -> None:
    model = FAMILIES_TINY[name]()
    small = shrink(model, emptied(model, 0))
    again = pickle.loads(pickle.dumps(small))
    assert torch.equal(logits_of(again, tiny_batch(model)), logits_of(small, tiny_batch(model)))


def test_the_class_of_a_shrunk_model_is_one_and_found_by_its_name() -> None:
    made: Any = shrunk.shrunk_class(tf.LlamaForCausalLM)
    assert made is shrunk.shrunk_class(tf.LlamaForCausalLM) is shrunk.shrunk_class(made) is shrunk.ShrunkLlamaForCausalLM
    assert issubclass(made, tf.LlamaForCausalLM) and made.__name__ == "ShrunkLlamaForCausalLM"
    with pytest.raises(AttributeError, match="LlamaForCausalLM"):
        _ = shrunk.LlamaForCausalLM


# Using the result


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
    ],
)
def test_a_shrunk_model_is_finetuned_with_lora(name: str, modules: list[str]) -> None:
    peft: Any = pytest.importorskip("peft")
    small: Any = shrink(FAMILIES_TINY[name](), UNEVEN)
    small.config.loss_type = "ForCausalLM"
    batch = tiny_batch(small)
    before = {key: parameter.clone() for key, parameter in small.named_parameters()}
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=modules, fan_in_fan_out=name == "gpt2", init_lora_weights="gaussian"
    )
    tuned = peft.get_peft_model(small, settings)
    trained = {key: parameter for key, parameter in tuned.named_parameters() if parameter.requires_grad}
    optimizer, losses = torch.optim.Adam(trained.values(), lr=1e-2), []
    assert trained and all("lora_" in key for key in trained)
    for _ in range(6):
        loss = tuned(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    after = {key.removeprefix("base_model.model.").replace(".base_layer", ""): value for key, value in tuned.named_parameters()}
    assert all(torch.equal(after[key], value) for key, value in before.items())
    tuned.eval()
    expected = logits_of(tuned, batch)
    merged = tuned.merge_and_unload()
    assert type(merged) is type(small) and layout_of(merged)
    torch.testing.assert_close(logits_of(merged, batch), expected, rtol=1e-4, atol=1e-4)
    assert sum(not torch.equal(value, before[key]) for key, value in merged.named_parameters()) == 3 * (
        7 if name == "llama" else 4
    )


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_shrunk_model_is_exported(name: str) -> None:
    model = FAMILIES_TINY[name]()
    units = [Unit(HEAD, 0, 0), *emptied(model, 1), Unit(MLP, 2, 3, GROUP)]
    small: Any = shrink(model, units)
    batch = tiny_batch(model)
    given = {key: value for key, value in batch.items() if key != "labels"} | ({"use_cache": False} if name == "llama" else {})
    with torch.no_grad():
        program = torch.export.export(small, (), given)
        found = program.module()(**given).logits
        with zeroed(model, units):
            expected = model(**given).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, small(**given).logits)
