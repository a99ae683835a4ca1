"""Half precision is tried in another process before it is used: here the trial is a stand-in that dies where it is to die."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from secateur import half
from secateur.errors import SettingError
from secateur.half import SETTING, WITHOUT_AMX, can_multiply, prepare_half
from secateur.model.devices import products_dtype
from worlds import Run, World, check_refused

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_OF_AMX = f"import os, signal; os.environ.get('{SETTING}') == '{WITHOUT_AMX}' or os.kill(os.getpid(), signal.SIGILL)"
NOTED = "import os; os.open({path!r}, os.O_CREAT | os.O_EXCL)"  # fails if it is started twice


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been tried yet, and nothing of it stays."""
    monkeypatch.delenv(SETTING, raising=False)
    for tried in (prepare_half, can_multiply):
        tried.cache_clear()
    yield
    for tried in (prepare_half, can_multiply):
        tried.cache_clear()


def test_a_processor_that_shows_amx_and_forbids_it_is_used_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "TRIAL", DIES_OF_AMX)
    prepare_half("bfloat16")
    assert os.environ[SETTING] == WITHOUT_AMX


@pytest.mark.parametrize("given", [None, "AVX2"])
def test_a_processor_without_half_precision_is_one_sentence(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "TRIAL", DIES if given is None else DIES_OF_AMX)
    if given:
        monkeypatch.setenv(SETTING, given)  # the user's own, which is not replaced
    with pytest.raises(SettingError, match=r"bfloat16.*SIGILL.*--dtype float32"):
        prepare_half("bfloat16")
    assert os.environ.get(SETTING) == given


def test_float32_needs_no_trial_and_a_dtype_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setattr(half, "TRIAL", DIES)
    prepare_half("float32")
    monkeypatch.setattr(half, "TRIAL", NOTED.format(path=f"{tmp_path}/tried"))
    prepare_half("float16")
    prepare_half("float16")
    assert SETTING not in os.environ


def test_a_command_in_half_precision_asks_first(world: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "TRIAL", DIES)
    command = ["evaluate", world.text_model, "--data", world.text, "--seq-len", 16, "--device", "cpu"]
    assert "SIGILL" in check_refused(run(*command, "--dtype", "bfloat16"))
    assert run(*command).code == 0


@pytest.mark.parametrize(
    ("native", "trial", "given", "asked", "expected"),
    [
        (True, "", "float32", None, "bfloat16"),
        (True, DIES, "float32", None, "float32"),  # without a word: nobody asked for it
        (False, "", "float32", None, "float32"),
        (False, "", "float32", "bfloat16", "bfloat16"),
        (True, "", "float32", "float32", "float32"),
        (False, "", "bfloat16", None, "bfloat16"),
    ],
)
def test_healing_multiplies_in_half_precision_where_that_is_fast_and_works(
    native: bool, trial: str, given: str, asked: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half, "TRIAL", trial)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    assert products_dtype(torch.nn.Linear(2, 2, dtype=getattr(torch, given)), asked) == expected
    assert SETTING not in os.environ


@pytest.mark.parametrize("dtype", half.HALF)
def test_the_trial_itself_ends_well_or_says_how(dtype: str) -> None:
    try:
        prepare_half(dtype)
    except SettingError as error:
        assert "SIG" in str(error)
