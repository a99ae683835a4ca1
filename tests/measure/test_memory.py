from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from secateur.errors import ModelError, SettingError
from secateur.measure.memory import disk_bytes, peak_memory
from tiny import FAMILIES_TINY, tf, tiny_tokenizer


def test_the_bytes_on_disk_are_those_of_the_safetensors(tmp_path: Path) -> None:
    for name, size in {"a.safetensors": 10, "b.safetensors": 5, "config.json": 100, "old.bin": 1000}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    assert disk_bytes(tmp_path) == 15
    for nothing in (tmp_path / "none", tmp_path / "a.safetensors"):
        with pytest.raises(ModelError, match="no weights"):
            disk_bytes(nothing)


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_the_peak_of_memory_is_the_models_without_the_libraries(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8}
    large = tf.LlamaConfig(vocab_size=2**19, tie_word_embeddings=True, **shape)
    names = saved(FAMILIES_TINY["llama"](), tmp_path / "tiny"), saved(tf.LlamaForCausalLM(large), tmp_path / "large")
    peaks = [peak_memory(name, device="cpu", dtype="float32", batch_size=1, tokens=4) for name in names]
    if None in peaks:
        pytest.skip("no peak is kept here")
    tiny, big = (peak for peak in peaks if peak is not None)
    assert 0 < tiny < 50e6  # the libraries alone are some 400 MB
    weights = 2**19 * 32 * 4
    assert weights < big - tiny < 3 * weights


def test_what_stops_the_process_is_said_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as error:
        peak_memory(str(tmp_path), device="cpu")
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "complaint", "says"),
    [(-9, "", "-9"), (1, "Traceback\nMemoryError: no more.\n", "MemoryError: no more"), (0, "", "0")],
)
def test_a_process_that_dies_is_an_error_about_the_model(
    code: int, complaint: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: subprocess.CompletedProcess([], code, "", complaint))
    with pytest.raises(ModelError, match=rf"memory of gpt2.*{says}\.$") as error:
        peak_memory("gpt2")
    assert "Traceback" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("answered", [None, 7])
def test_the_answer_is_the_last_line_of_what_the_process_says(answered: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(json.loads(command[-1]))
        return subprocess.CompletedProcess(command, 0, f"Loading\n{json.dumps({'bytes': answered})}\n", "a warning")

    monkeypatch.setattr(subprocess, "run", run)
    assert peak_memory("gpt2", device="cpu", dtype="bfloat16", batch_size=2, tokens=3, trust_remote_code=True) == answered
    settings = {"name": "gpt2", "device": "cpu", "dtype": "bfloat16", "batch_size": 2, "tokens": 3}
    assert asked == [settings | {"new_tokens": 4, "trust_remote_code": True}]


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"tokens": 0}, {"new_tokens": -1}])
def test_a_workload_that_cannot_be_run_starts_no_process(bad: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("a process was started"))
    with pytest.raises(SettingError, match="at least 1"):
        peak_memory("gpt2", **bad)  # type: ignore[arg-type]
