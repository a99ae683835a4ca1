"""Models whose blocks lie on several devices. Here all of these are the CPU: what is tested are Accelerate's forwards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import secateur as sc
from fakes import written
from secateur.data.batches import Batches
from secateur.errors import MissingExtra
from secateur.measure.bench import bench
from secateur.model.families import anatomy
from secateur.model.loading import load_model
from secateur.search.choose import choose_units
from secateur.settings import MAP, Settings, make_job
from secateur.steps import calibration_of, open_job
from secateur.watcher import Watcher
from worlds import SMALL, Listener, World, contents, one_sentence

CASES: dict[str, dict[str, Any]] = {
    "ucb": {"method": "ucb", "target": "both"},
    "auto": {"method": "auto", "target": "both", "budget": "60forwards"},
    "after repair": {"method": "auto", "target": "both", "budget": "60forwards", "damage": "repaired"},
    "blocks": {"method": "greedy", "target": "attention+mlp_layer+block"},
    "the distance": {"method": "ts", "loss": "distance"},
    "scores": {"method": "fisher"},
    "images": {"method": "auto", "task": "image", "target": "both", "budget": "40pulls"},
}


def opened_and_read(world: World, task: str = "text", **settings: Any) -> tuple[sc.Opened, Batches, Settings]:
    model, data = world.of(task)
    opened, job = open_job(make_job(str(model), **SMALL | {"calibration": str(data), "device": MAP} | settings), Watcher())
    return opened, calibration_of(opened, job.settings, Watcher()), job.settings


def spread(model: nn.Module) -> None:
    """Give every module with weights the forward with which Accelerate moves what enters it to its device."""
    owners = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    accelerate.dispatch_model(model, dict.fromkeys(owners, "cpu"), main_device="cpu", force_hooks=True)
    assert all("forward" in layer.out.__dict__ for layer in anatomy(model))


@pytest.mark.parametrize("case", CASES)
def test_the_selection_is_that_of_a_model_on_one_device(case: str, world: World) -> None:
    opened, batches, settings = opened_and_read(world, **CASES[case])
    units = sc.candidate_units(opened.model, settings.target, settings.group_width)
    plain = written(choose_units(opened, batches, settings, units=units))
    spread(opened.model)
    assert written(choose_units(opened, batches, settings, units=units)) == plain


@pytest.mark.parametrize("fits", [True, False])
def test_a_model_is_loaded_by_a_device_map_unless_it_does_not_fit(
    fits: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(world.of("text")[0])
    plain: Any = load_model(name)
    from_pretrained, asked = type(plain).from_pretrained, []

    def from_pretrained_here(*args: Any, **options: Any) -> Any:
        asked.append(options["device_map"])
        model, info = from_pretrained(*args, **options)
        return model if fits else accelerate.cpu_offload(model), info

    monkeypatch.setattr(type(plain), "from_pretrained", from_pretrained_here)
    if fits:
        mapped = load_model(name, device=MAP)
        assert not mapped.training
        assert all(torch.equal(one, other) for one, other in zip(mapped.parameters(), plain.parameters(), strict=True))
    else:
        with pytest.raises(sc.ModelError) as caught:
            load_model(name, device=MAP)
        one_sentence(caught, "GPUs", "--dtype bfloat16")
    assert asked == ["auto"]


def test_a_map_needs_accelerate_and_a_model_of_transformers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sc.SettingError) as caught:
        load_model("timm:deit_tiny_patch16_224", device=MAP)
    one_sentence(caught, "timm", "--device map")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find_spec(name))
    with pytest.raises(MissingExtra) as missing:
        load_model(str(world.of("text")[0]), device=MAP)
    one_sentence(missing, "accelerate", "--device map")


def test_what_needs_one_device_is_refused_before_anything_is_loaded(world: World, tmp_path: Path) -> None:
    listener, model = Listener(), str(world.of("text")[0])
    sc.Selection((sc.Unit("head", 0, 0),)).save(tmp_path / "sel.json")
    before = contents(tmp_path)
    on: dict[str, Any] = {"device": MAP, "watcher": listener}
    for refused in (
        lambda: sc.prune(model, out=tmp_path / "out", **on),
        lambda: sc.shrink_to(model, tmp_path / "sel.json", tmp_path / "out", **on),
        lambda: sc.compare_models(model, model, **on),
        lambda: bench([model], **on),
    ):
        with pytest.raises(sc.SettingError) as caught:
            refused()
        one_sentence(caught, "--device map", "--device cpu")
    assert listener.stages == [] and contents(tmp_path) == before
