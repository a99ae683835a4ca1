from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from secateur.measure import speed
from secateur.model import devices
from secateur.model.devices import multiply_in_full_width, multiplying_as_torch_does
from tiny import FAMILIES_TINY


@pytest.fixture(autouse=True)
def other_setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A stand-in for torch's setting, on a processor that is not Intel's and has wide vectors; nothing has been tried yet."""
    setting = SimpleNamespace(fp32_precision="none")
    monkeypatch.setattr(devices, "_setting", lambda: setting)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(devices, "PROCESSOR", _cpuinfo("AuthenticAMD"))
    multiply_in_full_width.cache_clear()
    yield setting
    multiply_in_full_width.cache_clear()


def _cpuinfo(vendor: str) -> SimpleNamespace:
    return SimpleNamespace(exists=lambda: True, read_text=lambda: f"vendor_id : {vendor}\n")


def test_wide_products_are_set_where_they_are_as_precise(other_setting: SimpleNamespace) -> None:
    assert multiply_in_full_width()
    assert other_setting.fp32_precision == "bf16"


def test_wide_products_are_left_out_where_they_round_more(
    other_setting: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"none": [1e-5, 1e-5], "bf16": [1e-5, 1e-2]}
    monkeypatch.setattr(devices, "_errors", lambda: errors[other_setting.fp32_precision])
    assert not multiply_in_full_width()
    assert other_setting.fp32_precision == "none"


@pytest.mark.parametrize("why", ["Intel", "narrow", "no MKL", "old torch", "no Linux"])
def test_wide_products_are_left_out_where_there_is_nothing_to_win(
    why: str, other_setting: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "Intel": (devices, "PROCESSOR", _cpuinfo("GenuineIntel")),
        "narrow": (torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
        "no MKL": (torch.backends.mkl, "is_available", lambda: False),
        "old torch": (devices, "_setting", lambda: None),
        "no Linux": (devices, "PROCESSOR", Path("/nowhere")),
    }
    monkeypatch.setattr(*changes[why])
    assert not multiply_in_full_width()
    assert other_setting.fp32_precision == "none"


def test_products_here_are_as_precise_as_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with multiplying_as_torch_does():
        own = devices._errors()
    devices.resolve_device("cpu")
    assert all(error <= devices.AS_PRECISE * plain for error, plain in zip(devices._errors(), own, strict=True))


def test_what_is_timed_multiplies_as_torch_does(other_setting: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_full_width()
    seen: list[str] = []
    in_turns = speed._in_turns

    def noting(*args: object) -> object:
        seen.append(other_setting.fp32_precision)
        return in_turns(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(speed, "_in_turns", noting)
    model = FAMILIES_TINY["llama"]()
    speed.measure(model, model, batch_sizes=[1], tokens=4, new_tokens=2, repeats=3)
    assert set(seen) == {"none"}
    assert other_setting.fp32_precision == "bf16"
