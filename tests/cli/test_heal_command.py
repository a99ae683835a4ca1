from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from worlds import SEQ_LEN, Run, World, check_refused, contents, prune_command

HEAL = ["--heal", "12steps", "--heal-rate", "0.003"]
CUT = ["--layout", "free", "--no-measure", "--method", "magnitude", "--evaluation-batches", "2"]


def heal_command(world: World, small: Path, out: Path, *more: object) -> list[object]:
    flags = ["--evaluation-batches", "2", "--no-measure", "--device", "cpu", *HEAL]
    return ["heal", world.text_model, small, *flags, "-o", out, *more]


@pytest.fixture(scope="module")
def small(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cut model; read only."""
    folder = tmp_path_factory.mktemp("cut") / "small"
    settings: dict[str, Any] = {"calibration": str(world.text), "seq_len": SEQ_LEN, "measure": False, "group_width": 4}
    settings |= {"method": "magnitude", "ratio": 0.3, "evaluation_batches": 2, "device": "cpu"}
    sc.prune(str(world.text_model), out=folder, **settings)
    return folder


def test_prune_heals_what_it_cut_and_tells_all_of_it(world: World, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    command = prune_command(world, out, *CUT, "--repair", *HEAL, "--heal-labels", "0.5")
    ran = run(*command)
    assert (ran.code, ran.complaints) == (0, []) and "Healed on" in " ".join(ran.out.split())
    record = json.loads((out / "secateur.json").read_text())
    healed = record["heal"]
    assert healed["steps"] == 12 and healed["seen"] > 0 and healed["what"] == "tokens" and healed["trained"] == 1
    assert healed["losses"][str(healed["best"])] < healed["losses"]["0"]
    assert record["shrunk"]["loss"] != record["unhealed"]["loss"] and healed["dense"]["loss"] != record["dense"]["loss"]
    again = sc.evaluate_on(str(out), data=str(world.text), seq_len=SEQ_LEN, evaluation_batches=2, device="cpu")
    assert record["shrunk"]["loss"] == again.dense.loss
    card = (out / "README.md").read_text()
    assert "before healing" in card and "dense, treated alike" in card and "## Healing" in card
    assert not (out / ".healing").exists()
    before = contents(out)
    assert run(*command).code == 0 and contents(out) == before
    other = run(*prune_command(world, out, *CUT, "--repair", *HEAL))
    assert "another cut" in check_refused(other)


def test_heal_writes_a_healed_copy_of_a_cut_model(small: Path, world: World, tmp_path: Path, run: Run) -> None:
    before, out = contents(small), tmp_path / "healed"
    ran = run(*heal_command(world, small, out, "--json"))
    assert (ran.code, ran.complaints) == (0, []) and contents(small) == before
    cut, record = (json.loads((folder / "secateur.json").read_text()) for folder in (small, out))
    assert ran.document["heal"] == record["heal"] and "divergence from itself is 0" in record["heal"]["sentence"]
    assert record["unhealed"] == cut["shrunk"] and record["dense"] == cut["dense"] and record["masked"] == cut["masked"]
    assert record["units"] == cut["units"] and record["proof"] == cut["proof"] and record["key"] != cut["key"]
    one, other = sc.load_shrunk(small), sc.load_shrunk(out)
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert "already" in check_refused(run(*heal_command(world, out, tmp_path / "twice")), tmp_path / "twice")


def test_heal_stopped_midway_goes_on_to_the_same_files(
    small: Path, world: World, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*heal_command(world, small, tmp_path / "whole")).code == 0
    from secateur.cut import heal as healing

    write = healing._Place.write

    def stop(place: Any, run: Any) -> None:
        write(place, run)
        if run.at.step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(healing, "EVERY", 0.0)
    monkeypatch.setattr(healing._Place, "write", stop)
    stopped = run(*heal_command(world, small, tmp_path / "killed"))
    assert stopped.code == 130 and "goes on" in stopped.err
    assert (tmp_path / "killed" / ".healing" / "state.safetensors").exists()
    ran = run(*heal_command(world, small, tmp_path / "killed"))
    assert ran.code == 0
    whole, killed = (contents(tmp_path / name) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys() and whole["model.safetensors"] == killed["model.safetensors"]


def test_healing_data_that_judge_are_refused_before_any_work(small: Path, world: World, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    for command in (
        heal_command(world, small, out, "--heal-data", world.text / "test.txt"),
        prune_command(world, out, *CUT, *HEAL, "--heal-data", world.text / "test.txt"),
    ):
        assert "overlap the evaluation data" in check_refused(run(*command), out)


def test_heal_refuses_what_is_no_cut_of_this_model(small: Path, world: World, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    flags = ["--calibration", world.text, "--device", "cpu", "-o", out]
    assert "no cut model with its record" in check_refused(run("heal", world.text_model, world.text_model, *flags), out)
    assert "was cut out of" in check_refused(run("heal", small, small, *flags), out)
    assert "There is no folder" in check_refused(run("heal", world.text_model, tmp_path / "nosuch", *flags), out)
    assert "is not overwritten" in check_refused(run("heal", world.text_model, small, *flags[:-1], small))
    assert "no data 'nosuch'" in check_refused(run(*heal_command(world, small, out, "--heal-data", "nosuch")), out)
    assert "nothing to heal" in check_refused(run(*prune_command(world, out, *HEAL)), out)


def test_images_heal_from_a_folder_with_lora(world: World, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    ran = run(*prune_command(world, out, *CUT, *HEAL, "--heal-lora", "2", "--heal-batch-size", "16", task="image"))
    assert (ran.code, ran.complaints) == (0, [])
    healed = json.loads((out / "secateur.json").read_text())["heal"]
    assert healed["lora"] == 2 and healed["what"] == "images" and healed["seen"] == 12 * 16


def launched(n: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in several processes, as torchrun, and accelerate launch on several GPUs, start them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(n)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, "-m", "secateur", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_several_processes_heal_as_one_does(small: Path, world: World, tmp_path: Path, run: Run) -> None:
    same = ["--heal-labels", "0.5", "--heal-dtype", "float32", "--batch-size", "4", "--json"]
    alone = run(*heal_command(world, small, tmp_path / "alone", *same))
    together = launched(2, *heal_command(world, small, tmp_path / "together", *same))
    assert alone.code == 0 and together.returncode == 0, together.stderr
    one, two = alone.document["heal"], json.loads(together.stdout)["heal"]  # one document: of the first process
    assert two["seen"] == one["seen"] and two["best"] == one["best"] > 0
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["dense"]["loss"] == pytest.approx(one["dense"]["loss"], rel=1e-4)
    weights = [sc.load_shrunk(tmp_path / name).state_dict() for name in ("alone", "together")]
    assert all(torch.allclose(value, weights[1][name], atol=1e-5) for name, value in weights[0].items())


@pytest.mark.slow
def test_a_launcher_of_other_commands_is_told_off(world: World, tmp_path: Path) -> None:
    ran = launched(2, *prune_command(world, tmp_path / "out", *CUT))
    assert ran.returncode != 0 and "which has work for one" in ran.stderr and not (tmp_path / "out").exists()
