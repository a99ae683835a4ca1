from __future__ import annotations

import copy
import errno
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.cut import heal as healing_module
from secateur.cut.heal import Heal, heal
from secateur.cut.surgery import shrink
from secateur.errors import DataError, MissingExtra, OutputError, SelectionError, SettingError
from secateur.files import jsonio
from secateur.healing import Healing
from secateur.model.losses import divergence, reference_of
from secateur.units import BLOCK, HEAD, MLP, Unit
from secateur.watcher import HealProgress, Watcher
from tiny import FAMILIES_TINY, GROUP, hook_count, tiny_batches
from worlds import one_sentence

UNITS = [Unit(HEAD, 0, 1), Unit(MLP, 0, 3, GROUP), Unit(MLP, 1, 0, GROUP)]
Batch = dict[str, Tensor]


def world_of(name: str) -> tuple[nn.Module, nn.Module, list[Batch], list[Batch]]:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 6)
    return model, shrink(model, UNITS), batches[:4], batches[4:]


def healed(
    name: str, *, small: nn.Module | None = None, more: dict[str, Any] | None = None, **options: Any
) -> tuple[nn.Module, Heal]:
    """A cut model after a few steps of healing, and the record of it."""
    model, cut, batches, held_out = world_of(name)
    small = cut if small is None else small
    settings: dict[str, Any] = {"amount": "12steps", "rate": 3e-3, **options}
    return small, heal(model, UNITS, small, batches, held_out=held_out, healing=Healing(**settings), **(more or {}))


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


class StopAt(Watcher):
    """Ends a healing after a step, as a kill does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def healed(self, progress: HealProgress) -> None:
        if progress.step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bert", "bert embeddings", "vit", "timm swin", "mixtral"])
def test_healing_brings_the_outputs_nearer_to_the_dense_models(name: str) -> None:
    model, before, _, held_out = world_of(name)
    small, found = healed(name, checkpointing=name == "gpt2", hidden=0.0 if name == "vit" else 1.0)
    assert found.best > 0 and found.losses[found.best] < found.losses[0]
    with torch.no_grad():
        after = [float(divergence(model, small, batch, reference_of(model, batch))) for batch in held_out]
    assert sum(after) / len(after) == pytest.approx(found.losses[found.best], rel=1e-5)
    assert small.state_dict().keys() == before.state_dict().keys()
    assert hook_count(small) == hook_count(model) == 0 and not any(p.grad is not None for p in small.parameters())
    assert all(bool(p.isfinite().all()) for p in small.parameters())


def test_tied_embeddings_stay_tied() -> None:
    small: Any = healed("gpt2")[0]
    assert small.lm_head.weight is small.transformer.wte.weight


@pytest.mark.parametrize("name", ["gpt2", "timm vit"])
def test_lora_is_merged_into_weights_that_have_the_same_names(name: str) -> None:
    before = world_of(name)[1]
    small, found = healed(name, lora=2, amount="40steps")
    assert found.best > 0 and found.trained < 0.25 and found.lora == 2
    assert small.state_dict().keys() == before.state_dict().keys() and not equal(small, before)
    assert [type(a) for a in small.modules()] == [type(b) for b in before.modules()]


@pytest.mark.parametrize(("name", "options"), [("gpt2", {}), ("vit", {}), ("gpt2", {"lora": 2}), ("gpt2", {"labels": 0.5})])
def test_killed_and_started_again_it_ends_with_the_same_weights_to_the_bit(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    whole, found = healed(name, **options)
    state: dict[str, Any] = {"state": tmp_path / "state", "key": "a", "every": 0.0}
    for step in (5, 9):
        with pytest.raises(KeyboardInterrupt):
            healed(name, more=state | {"watcher": StopAt(step)}, **options)
    small, again = healed(name, more=state, **options)
    assert equal(small, whole)
    assert (again.losses, again.best, again.seen, again.steps) == (found.losses, found.best, found.seen, found.steps)


def test_a_time_becomes_steps_once(tmp_path: Path) -> None:
    state: dict[str, Any] = {"state": tmp_path, "key": "a", "every": 0.0}
    with pytest.raises(KeyboardInterrupt):
        healed("gpt2", amount="2s", more=state | {"watcher": StopAt(2)})
    steps = json.loads((tmp_path / "plan.json").read_text())["steps"]
    jsonio.write(tmp_path / "plan.json", {"key": "a", "steps": 7})
    assert steps > 2
    assert healed("gpt2", amount="2s", more=state)[1].steps == 7


def test_a_state_of_another_healing_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"state": tmp_path, "key": "a", "every": 0.0}
    with pytest.raises(KeyboardInterrupt):
        healed("gpt2", more=state | {"watcher": StopAt(3)})
    with pytest.raises(OutputError) as caught:
        healed("gpt2", more=state | {"key": "b"})
    assert "another healing" in one_sentence(caught, tmp_path)
    (tmp_path / "state.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(OutputError) as caught:
        healed("gpt2", more=state)
    assert "damaged" in one_sentence(caught, tmp_path)


def test_a_full_disk_is_one_sentence_and_the_state_that_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"state": tmp_path, "key": "a", "every": 0.0}
    with pytest.raises(KeyboardInterrupt):
        healed("gpt2", more=state | {"watcher": StopAt(3)})
    there = (tmp_path / "state.safetensors").read_bytes()

    def full(tensors: Any, path: Path, about: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OutputError) as caught:
        patch.setattr(healing_module, "save_file", full)
        healed("gpt2", more=state)
    assert "No space left on device" in one_sentence(caught, tmp_path)
    assert (tmp_path / "state.safetensors").read_bytes() == there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "state.safetensors"]
    assert equal(healed("gpt2", more=state)[0], healed("gpt2")[0])


def test_steps_that_are_not_finite_are_left_out_and_too_many_of_them_end_it() -> None:
    model, small, batches, held_out = world_of("vit")
    before = copy.deepcopy(small)
    broken = [{**batch, "pixel_values": batch["pixel_values"] * torch.nan} for batch in batches]
    found = heal(model, UNITS, small, [*batches, broken[0]], held_out=held_out, healing=Healing("10steps", rate=1e-3))
    assert found.skipped == 2 and found.stopped is None and found.best > 0
    assert all(bool(p.isfinite().all()) for p in small.parameters())
    small = copy.deepcopy(before)
    found = heal(model, UNITS, small, broken, held_out=held_out, healing=Healing("100steps"))
    assert (found.best, found.stopped, found.skipped) == (0, 21, 21) and "21 steps were not finite" in str(found)
    assert equal(small, before)


def test_a_healing_that_does_not_help_is_undone_to_the_bit() -> None:
    before = world_of("gpt2")[1]
    small, found = healed("gpt2", rate=1.0)
    assert found.best == 0 and "was undone" in str(found)
    assert equal(small, before)


def test_a_model_in_half_precision_trains_in_single_and_stays_what_it_was() -> None:
    model, small, batches, held_out = world_of("gpt2")
    model, small = model.to(torch.bfloat16), small.to(torch.bfloat16)
    found = heal(model, UNITS, small, batches, held_out=held_out, healing=Healing("8steps", rate=3e-3))
    assert found.best > 0 and {p.dtype for p in small.parameters()} == {torch.bfloat16}
    with pytest.raises(SettingError, match="float16 vanish"):
        heal(model.to(torch.float16), UNITS, small, batches, held_out=held_out, healing=Healing("8steps"))


def test_products_in_half_precision_train_weights_in_single() -> None:
    one, single = healed("gpt2")
    other, half = healed("gpt2", dtype="bfloat16")
    assert half.best > 0 and {p.dtype for p in other.parameters()} == {torch.float32}
    assert not equal(one, other) and half.losses[half.best] == pytest.approx(single.losses[single.best], rel=0.2)


def test_the_blocks_that_are_left_learn_from_those_they_were() -> None:
    model = FAMILIES_TINY["gpt2"]()
    batches, units = tiny_batches(model, 3), [Unit(BLOCK, 1, 0)]
    small = shrink(model, units)
    given: list[Tensor] = []
    layers: Any = model
    handles = [layers.transformer.h[i].register_forward_hook(lambda *args: given.append(args[2])) for i in (0, 2)]
    found = heal(model, units, small, batches[:2], held_out=batches[2:], healing=Healing("9steps", rate=3e-3, hidden=5.0))
    for handle in handles:
        handle.remove()
    assert found.losses[found.best] < found.losses[0] and len(given) > 0
    with pytest.raises(SelectionError, match="has 2 blocks"):
        heal(model, UNITS, small, batches[:2], held_out=batches[2:], healing=Healing("9steps"))


@pytest.mark.parametrize(
    ("name", "n_batches", "settings", "words"),
    [
        ("gpt2", 0, {}, "at least 2 batches"),
        ("bert embeddings", 2, {"labels": 1.0}, "no labels"),
        ("vit", 2, {"amount": "100tokens"}, "images have no tokens"),
    ],
)
def test_data_that_cannot_heal_are_refused(name: str, n_batches: int, settings: dict[str, Any], words: str) -> None:
    model, small, batches, held_out = world_of(name)
    for batch in batches:
        batch.pop("reference", None)
    with pytest.raises((DataError, SettingError)) as caught:
        heal(model, UNITS, small, batches[:n_batches], held_out=held_out, healing=Healing(**{"amount": "9steps", **settings}))
    assert words in one_sentence(caught)


def test_lora_without_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match="extra 'peft'"):
        healed("gpt2", lora=2)


def seen(batches: Sequence[Batch]) -> int:
    return sum(int((batch["labels"] != -100).sum()) for batch in batches)


def test_tokens_and_texts_become_steps() -> None:
    batches = world_of("gpt2")[2]
    per_step = seen(batches) / len(batches)  # a batch has 3 texts
    assert healed("gpt2", amount=f"{int(3 * per_step)}tokens")[1].steps == 3
    assert healed("gpt2", amount="13texts")[1].steps == 5
    assert healed("gpt2", amount="13texts", batch_size=6)[1].steps == 3
