"""Where a cut model goes next, as docs/deploy.md says: ONNX, torch.compile, int8, GGUF."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.model.shrunk import layout_of
from secateur.units import HEAD, KV_GROUP, MLP
from tiny import FAMILIES_TINY, GROUP, IMAGE, REAL_DATA, VOCABULARY, logits_of, tf, tiny_batch
from to_onnx import difference, export, wrapped
from worlds import ROOT, World

DEIT = REAL_DATA / "deit-tiny"
needs_deit = pytest.mark.skipif(not (DEIT / "config.json").exists(), reason=f"no DeiT-Tiny in {DEIT.parent}")
ONNX = [find_spec(name) is not None for name in ("onnx", "onnxruntime", "onnxscript")]
needs_onnx = pytest.mark.skipif(not all(ONNX), reason="no onnx, onnxruntime or onnxscript: pip install 'secateur[onnx]'")
exporting = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.onnx uses what torch.utils will lose

# One of each kind of graph; the other families are built like one of these. torch.onnx has no word for experts' products.
FAMILIES = ["gpt2", "gemma3_text", "swin", "timm vit", "modernbert"]  # each of another make; an export is slow
UNIFORM = {"gpt2": MLP, "opt": MLP, "llama": KV_GROUP, "vit": MLP}


def recipe(heading: str) -> str:
    """The Python code below a heading of docs/deploy.md."""
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    return page.split(f"\n## {heading}\n")[1].split("```python\n")[1].split("```")[0]


def free_cut(model: nn.Module) -> list[sc.Unit]:
    """A head of the first block, so that shared K/V heads serve unlike numbers; all heads of the second; 5 MLP channels."""
    heads = [unit for unit in sc.candidate_units(model, target="head") if unit.layer == 1]
    return [sc.Unit(HEAD, 0, 0), *heads, sc.Unit(MLP, 2, 0, 5)]


def uniform_cut(model: nn.Module, name: str) -> list[sc.Unit]:
    return [sc.Unit(UNIFORM[name], layer, 0, GROUP if UNIFORM[name] == MLP else 1) for layer in range(3)]


def cut(name: str, layout: str) -> nn.Module:
    model = FAMILIES_TINY[name]()
    small = sc.shrink(model, free_cut(model) if layout == "free" else uniform_cut(model, name))
    assert (layout_of(small) is not None or hasattr(small, "secateur")) == (layout == "free")
    return small


def given(model: nn.Module, batch: int, length: int) -> dict[str, Tensor]:
    """Texts of which the first is padded on the right and the last on the left, or images."""
    rng = torch.Generator().manual_seed(batch)
    if not hasattr(getattr(model, "config", None), "vocab_size"):
        return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE, generator=rng)}
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - length // 3 :] = 0
    mask[batch - 1, : length // 4] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=rng), "attention_mask": mask}


def both_logits(model: nn.Module, path: Path, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of the file and of the model, those of padding left out: there each runtime says something else."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})[0])
    with torch.no_grad():
        expected = wrapped(model)[0](**inputs)
    assert found.shape == expected.shape
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else ...
    return found[real], expected[real]


def share(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# ONNX

CUTS = [*((name, "free") for name in FAMILIES), ("llama", "uniform")]


@pytest.mark.slow
@needs_onnx
@exporting
@pytest.mark.parametrize(("name", "layout"), CUTS, ids=[" ".join(case) for case in CUTS])
def test_onnxruntime_gives_the_logits_of_a_cut_model_for_batches_of_other_shapes(
    name: str, layout: str, tmp_path: Path
) -> None:
    small = cut(name, layout)
    export(small, tmp_path / "small.onnx")
    for batch, length in ((3, 13), (1, 5)):
        assert share(*both_logits(small, tmp_path / "small.onnx", **given(small, batch, length))) < 1e-4


def test_the_free_cut_has_uneven_groups_no_heads_and_an_odd_mlp() -> None:
    layout = layout_of(cut("llama", "free"))
    assert layout is not None
    assert [layer.heads for layer in layout.layers] == [3, 0, 4]
    assert layout.layers[0].kv_index == (0, 1, 1)
    assert [layer.mlp_width for layer in layout.layers] == [14, 14, 9]


@pytest.mark.slow
@needs_onnx
@exporting
@pytest.mark.parametrize("task", ["text", "image"])
def test_the_script_writes_a_saved_cut_as_onnx_and_says_how_close_it_is(
    task: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, processor = sc.load(str(world.of(task)[0]), device="cpu")
    sc.save_shrunk(sc.shrink(model, free_cut(model)), "small", processor=processor)
    monkeypatch.setattr(sys, "argv", ["to_onnx.py", "small/", "small.onnx"])
    runpy.run_path(str(ROOT / "examples" / "to_onnx.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("small.onnx") and float(said.split("at most ")[1].split()[0]) < 1e-4
    if task == "text":
        names: dict[str, Any] = {}
        exec(recipe("ONNX"), names)
        assert names["logits"].shape == (*names["inputs"]["input_ids"].shape, VOCABULARY)


@pytest.mark.slow
@needs_onnx
@exporting
def test_the_script_sees_that_a_file_is_another_models(tmp_path: Path) -> None:
    export(cut("vit", "uniform"), tmp_path / "other.onnx")
    assert difference(cut("vit", "free"), tmp_path / "other.onnx") > 1e-2


@pytest.mark.slow
@needs_onnx
@exporting
@needs_deit
def test_onnxruntime_gives_the_logits_of_deit_tiny_with_unlike_layers(tmp_path: Path) -> None:
    model, _ = sc.load(str(DEIT), device="cpu")
    units = [*(sc.Unit(HEAD, 6, head) for head in range(3)), sc.Unit(HEAD, 2, 1), sc.Unit(MLP, 4, 0, 64)]
    small = sc.shrink(model, units)
    export(small, tmp_path / "small.onnx")
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    assert share(*both_logits(small, tmp_path / "small.onnx", pixel_values=pixels)) < 1e-4


@pytest.mark.slow
@needs_onnx
@exporting
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_onnxruntime_makes_int8_of_a_cut_model_that_says_nearly_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = cut(name, "free")
    export(small, "small.onnx")
    exec(recipe("Int8 by onnxruntime"), {})
    types = {node.op_type for node in pytest.importorskip("onnx").load("small-int8.onnx").graph.node}
    assert "MatMulInteger" in types
    found, expected = both_logits(small, Path("small-int8.onnx"), **given(small, 9, 13))
    assert 0 < share(found, expected) < 0.3
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8


# torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "swin", "timm vit"])
def test_a_cut_model_is_compiled_as_one_graph(name: str) -> None:
    small = cut(name, "free")
    module, _ = wrapped(small)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for batch in (3, 2):
            inputs = given(small, batch, 12)
            assert torch.equal(compiled(**inputs), module(**inputs))


COMPILER = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor imports what uses it
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler, or no headers of Python")
def test_inductor_compiles_a_cut_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    small: Any = cut("llama", "free")
    sc.save_shrunk(small, "small")
    names: dict[str, Any] = {}
    torch._dynamo.reset()
    exec(recipe("torch.compile"), names)
    ids = tiny_batch(small)["input_ids"]
    with torch.no_grad():
        found = names["compiled"](ids, use_cache=False).logits.cpu()
        assert share(found, small(ids, use_cache=False).logits) < 1e-4


# torchao: in a process of its own, since transformers imports it wherever it is installed, and it then writes to stderr

TORCHAO = Path(sys.prefix, "torchao")  # where the Makefile puts it
CHECK = """
ids, expected = torch.load("expected.pt")
kinds = [type(module.weight).__name__ for module in again.modules() if isinstance(module, nn.Linear)]
assert kinds.count("Int8Tensor") == 18 and kinds.count("Parameter") == 4, kinds  # four are empty
with torch.no_grad():
    found, read = (model.cpu()(ids, use_cache=False).logits for model in (small, again))
assert torch.equal(found, read)
assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()
assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8
"""


@pytest.mark.slow
@pytest.mark.skipif(not TORCHAO.exists() and find_spec("torchao") is None, reason=f"no torchao in {TORCHAO}")
def test_torchao_makes_int8_of_a_cut_model_which_is_saved_and_read_back(tmp_path: Path) -> None:
    small: Any = cut("llama", "free")
    sc.save_shrunk(small, tmp_path / "small")
    ids = tiny_batch(small)["input_ids"]
    with torch.no_grad():
        torch.save((ids, small(ids, use_cache=False).logits), tmp_path / "expected.pt")
    paths = os.pathsep.join([str(ROOT / "src"), str(TORCHAO), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", recipe("Int8 by torchao") + CHECK]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr


# GGUF


def write_gguf(model: Any, path: Path) -> None:
    """A Llama as a GGUF file without a tokenizer, in the form that llama.cpp's converter writes."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbours, transformers halves
            tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [KV_GROUP, MLP])
def test_a_uniform_cut_of_a_llama_is_a_stock_llama_to_gguf(kind: str, tmp_path: Path) -> None:
    units = [sc.Unit(kind, layer, 1, GROUP if kind == MLP else 1) for layer in range(3)]
    small: Any = sc.shrink(FAMILIES_TINY["llama"](), units, layout="uniform")
    write_gguf(small, tmp_path / "small.gguf")
    read = tf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32)
    assert type(read) is tf.LlamaForCausalLM
    batch = tiny_batch(small)
    assert share(logits_of(read.eval(), batch), logits_of(small, batch)) < 1e-5
