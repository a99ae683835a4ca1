"""What can be done with a shrunk model: lm-eval's harness scores it, and torch.export makes a program of it."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.model.shrunk import layout_of
from secateur.units import HEAD, KV_GROUP, MLP
from tiny import FAMILIES_TINY, GROUP, REAL_DATA, needs_smollm2, randomised, tf, tiny_batch, tiny_tokenizer, without_network

DEIT, LAMBADA = REAL_DATA / "deit-tiny", REAL_DATA / "lambada" / "lambada_test.jsonl"
needs_deit = pytest.mark.skipif(not (DEIT / "config.json").exists(), reason=f"no DeiT-Tiny in {DEIT.parent}")
needs_lambada = pytest.mark.skipif(not LAMBADA.exists(), reason=f"no LAMBADA in {LAMBADA.parent}")

UNEVEN = [sc.Unit(HEAD, 0, 0), sc.Unit(MLP, 1, 2, GROUP), sc.Unit(HEAD, 2, 0), sc.Unit(HEAD, 2, 1)]
EVEN = [sc.Unit(KV_GROUP, layer, 0) for layer in range(3)]


def tenth_of_heads(model: nn.Module) -> list[sc.Unit]:
    heads = sc.candidate_units(model, target="head")
    return random.Random(0).sample(heads, len(heads) // 10)


# lm-eval

TEXTS = ["the cat sat", "a cat", "the dog saw the cat", "cat the the", "dogs", "see the cat"]
CHOICES = [" the", " cat", " dog sat"]


def tiny_llama(tokenizer: Any) -> Any:
    """That of tiny.py for longer texts of another vocabulary."""
    config: Any = copy.deepcopy(FAMILIES_TINY["llama"]().config)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 64
    return randomised(tf.LlamaForCausalLM(config))


def tiny_tasks(folder: Path) -> list[dict[str, Any]]:
    rows = [{"text": text, "choices": CHOICES, "answer": i % len(CHOICES)} for i, text in enumerate(TEXTS)]
    data = local_data(folder, rows)
    choice = {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "choices"}
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    metric = {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
    return [
        {"task": "choice", "doc_to_target": "answer", "target_delimiter": "", **choice, **data},
        {"task": "rolling", "metric_list": [metric], **rolling, **data},
    ]


def local_data(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a task says of its data where they are a file."""
    path = folder / "items.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = {"data_files": {"test": str(path)}, "cache_dir": str(folder / "datasets")}
    return {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}


def evaluated(model: Any, tasks: list[dict[str, Any]], **settings: Any) -> Any:
    """What lm-eval says, with none of the tasks that it brings along: they take long to list."""
    lm_eval: Any = pytest.importorskip("lm_eval")
    manager = pytest.importorskip("lm_eval.tasks").TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **settings)


def harness(model: nn.Module, tokenizer: Any) -> Any:
    return pytest.importorskip("lm_eval.models.huggingface").HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)


def answers(found: Any, task: str) -> Tensor:
    """Of each item, the log likelihoods; each with whether greedy decoding says the same, unless the task is rolling."""
    rows = sorted(found["samples"][task], key=lambda row: int(row["doc_id"]))
    return torch.tensor([row["filtered_resps"] for row in rows], dtype=torch.float64)


def likelihood(model: Any, tokenizer: Any, prompt: str, text: str) -> list[float]:
    """That of a text after a prompt, by hand; and whether greedy decoding says the same."""
    before, after = (tokenizer(part)["input_ids"] for part in (prompt, text))
    before = before or [tokenizer.bos_token_id]
    with torch.no_grad():
        logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return [logits.log_softmax(-1)[range(len(after)), after].sum().item(), logits.argmax(-1).tolist() == after]


@pytest.mark.slow
def test_lm_eval_says_of_a_shrunk_model_what_is_found_by_hand_and_with_the_zeroed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_network(monkeypatch)
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer)
    sc.save_shrunk(sc.shrink(model, UNEVEN), tmp_path / "small", processor=tokenizer)
    small = sc.load_shrunk(tmp_path / "small", device="cpu")
    layout = layout_of(small)
    assert layout is not None and [layer.kv_index for layer in layout.layers] == [(0, 1, 1), None, None]
    tasks = tiny_tasks(tmp_path)
    found = evaluated(harness(small, tokenizer), tasks)
    by_hand = {
        "choice": [[likelihood(small, tokenizer, text, choice) for choice in CHOICES] for text in TEXTS],
        "rolling": [likelihood(small, tokenizer, "", text)[:1] for text in TEXTS],
    }
    dense = evaluated(harness(model, tokenizer), tasks)
    with sc.zeroed(model, UNEVEN):
        zeroed = evaluated(harness(model, tokenizer), tasks)
    for task, metric in (("choice", "acc,none"), ("rolling", "word_perplexity,none")):
        assert found["results"][task][metric] == pytest.approx(zeroed["results"][task][metric], rel=1e-4)
        said = answers(found, task)
        for expected in (torch.tensor(by_hand[task], dtype=torch.float64), answers(zeroed, task)):
            torch.testing.assert_close(said, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(said, answers(dense, task), rtol=1e-2)
    assert found["config"]["model_num_parameters"] == sc.total_parameters(small) < sc.total_parameters(model)


@pytest.mark.slow
@pytest.mark.parametrize(("units", "trust"), [(UNEVEN, ",trust_remote_code=True"), (EVEN, "")], ids=["uneven", "uniform"])
def test_lm_eval_takes_the_folder_of_a_shrunk_model(
    units: list[sc.Unit], trust: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_network(monkeypatch)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    tokenizer = tiny_tokenizer()
    small = sc.shrink(tiny_llama(tokenizer), units)
    assert (layout_of(small) is None) == (trust == "")
    sc.save_shrunk(small, tmp_path / "small", processor=tokenizer)
    tasks = tiny_tasks(tmp_path)
    found = evaluated("hf", tasks, model_args=f"pretrained={tmp_path / 'small'}{trust}", device="cpu", batch_size=4)
    expected = evaluated(harness(small, tokenizer), tasks)
    assert found["results"] == expected["results"]
    for task in ("choice", "rolling"):
        assert torch.equal(answers(found, task), answers(expected, task))


# The last words of passages, which they can be guessed from: as lm-eval's own task, with a file.
LAST_WORDS: dict[str, Any] = {
    "task": "last_words",
    "output_type": "loglikelihood",
    "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
    "doc_to_target": "{{' ' + text.split(' ')[-1]}}",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}


@pytest.mark.slow
@needs_smollm2
@needs_lambada
def test_lm_eval_says_of_a_shrunk_smollm2_what_it_says_of_the_zeroed_one(
    smollm2: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_network(monkeypatch)
    model, tokenizer = smollm2
    units = tenth_of_heads(model)
    with LAMBADA.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(20), strict=False)]
    task = LAST_WORDS | local_data(tmp_path, rows)
    found = evaluated(harness(sc.shrink(model, units), tokenizer), [task])
    with sc.zeroed(model, units):
        expected = evaluated(harness(model, tokenizer), [task])
    torch.testing.assert_close(answers(found, "last_words"), answers(expected, "last_words"), rtol=1e-3, atol=1e-3)
    assert found["results"]["last_words"]["acc,none"] == expected["results"]["last_words"]["acc,none"]


# torch.export


class Logits(nn.Module):
    """A model that takes and gives one tensor, so that its program needs no class of transformers'."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, batch: Tensor) -> Tensor:
        logits: Tensor = self.model(batch, **self.options).logits
        return logits


RUNNER = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
for batch, logits in torch.load(sys.argv[2]):
    torch.testing.assert_close(program(batch), logits)
assert "transformers" not in sys.modules and "secateur" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("llama", {"use_cache": False}), ("vit", {})], ids=["llama", "vit"])
def test_an_exported_shrunk_model_takes_batches_of_any_size_and_runs_where_there_is_torch_alone(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = FAMILIES_TINY[name]()
    dense, small = Logits(model, **options), Logits(sc.shrink(model, UNEVEN), **options)
    batches = [next(iter(tiny_batch(model, seed=n).values()))[:n] for n in (2, 1, 3)]
    with torch.no_grad():
        program = torch.export.export(small, (batches[0],), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        logits = [small(batch) for batch in batches]
        with sc.zeroed(model, UNEVEN):
            for batch, expected in zip(batches, logits, strict=True):
                assert torch.equal(program.module()(batch), expected)
                torch.testing.assert_close(dense(batch), expected, rtol=1e-4, atol=1e-4)
    torch.export.save(program, tmp_path / "small.pt2")
    torch.save(list(zip(batches, logits, strict=True)), tmp_path / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, tmp_path / "small.pt2", tmp_path / "expected.pt"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def check_export(model: Any, units: Sequence[sc.Unit], **given: Any) -> None:
    small: Any = sc.shrink(model, units)
    with torch.no_grad():
        found = torch.export.export(small, (), given).module()(**given).logits
        assert torch.equal(found, small(**given).logits)
        with sc.zeroed(model, units):
            expected = model(**given).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.slow
@needs_smollm2
def test_smollm2_without_a_tenth_of_its_heads_is_exported(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    text = tokenizer("A secateur cuts what a tree can do without. " * 5, return_tensors="pt")["input_ids"][:, :32]
    assert text.shape == (1, 32)
    check_export(model, tenth_of_heads(model), input_ids=text, use_cache=False)


@pytest.mark.slow
@needs_deit
def test_deit_tiny_without_a_tenth_of_its_heads_is_exported() -> None:
    model, _ = sc.load(str(DEIT), device="cpu")
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    check_export(model, tenth_of_heads(model), pixel_values=pixels)
