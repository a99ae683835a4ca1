from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import secateur as sc
from secateur.cut import checkpoint
from secateur.cut.record import CARD, RECORD, read_record
from secateur.cut.surgery import shrink
from secateur.files import jsonio
from secateur.model.shrunk import HINT
from secateur.selection import Reached
from secateur.settings import Provenance
from secateur.steps import compare, evaluate_on, select_to, shrink_to
from worlds import SEQ_LEN, WORDS, Listener, World, contents, loaded

UNITS = (sc.Unit("head", 0, 1), sc.Unit("head", 2, 0), sc.Unit("head", 2, 2), sc.Unit("mlp", 1, 0, 4))
EVEN = tuple(sc.Unit("mlp", layer, 0, 4) for layer in range(3))
NO_MEASURE = sc.Cutting(measure=False)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that would measure memory answers at once, by the length of the model's name; none tries half precision."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        name = json.loads(command[-1])["name"]
        return subprocess.CompletedProcess(command, 0, json.dumps({"bytes": 1_000_000 + len(name)}), "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("secateur.model.devices.prepare_half", lambda dtype: None)


def selected(units: tuple[sc.Unit, ...] = UNITS, model_digest: str = "", **settings: Any) -> sc.Selection:
    given: dict[str, Any] = {"model": "m", "target": "both", "seed": 42, "calibration": "text", "seq_len": SEQ_LEN}
    return sc.Selection(units, Provenance(sc.Settings(**given | settings), model_digest, ""))


def opened(world: World, task: str = "text") -> sc.Opened:
    return sc.open_model(str(world.of(task)[0]), device="cpu")


def cut(world: World, out: Path, task: str = "text", units: tuple[sc.Unit, ...] = UNITS, **options: Any) -> sc.CutRecord:
    _, calibration, evaluation = loaded(world, task)
    usual: dict[str, Any] = {"cutting": NO_MEASURE, "calibration": calibration, "evaluation": evaluation, "tokens": SEQ_LEN}
    return sc.cut(opened(world, task), options.pop("selection", selected(units)), out, **usual | options)


# cut


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("units", [UNITS, EVEN], ids=["free", "uniform"])
def test_the_checkpoint_computes_what_the_zeroed_model_does_and_the_record_says_so(
    task: str, units: tuple[sc.Unit, ...], world: World, tmp_path: Path
) -> None:
    record = cut(world, tmp_path / "small", task, units)
    model, _, evaluation = loaded(world, task)
    with sc.zeroed(model, units):
        zeroed = sc.evaluate(model, evaluation)
    small, _ = sc.load(str(tmp_path / "small"), device="cpu")
    assert record.shrunk is not None
    assert record.shrunk.loss == pytest.approx(zeroed.loss, rel=1e-5)
    assert record.shrunk.loss == sc.evaluate(small, evaluation).loss
    written = json.loads((tmp_path / "small" / RECORD).read_text(), parse_constant=pytest.fail)
    assert jsonio.to_json(record.to_json()) == written
    assert read_record(tmp_path / "small") == record
    assert record.params == sum(p.numel() for p in small.parameters()) == sc.parameters_left(model, units)
    assert record.dense_params == sum(p.numel() for p in model.parameters())
    assert record.layout == ("free" if units == UNITS else "uniform")
    assert record.units == units
    assert record.proof.relative <= record.proof.tolerance
    assert record.versions["torch"] == torch.__version__
    assert (record.family, record.task) == ({"text": "gpt2", "image": "vit"}[task], task)
    assert not [name for name in contents(tmp_path) if name.endswith((".bin", ".pt", ".pkl"))]
    assert not list((tmp_path / "small").glob(".*"))


def test_the_digest_changes_with_the_selection(world: World, tmp_path: Path) -> None:
    selections = [selected(), selected(), selected(seed=43), selected(UNITS[:3])]
    found = [cut(world, tmp_path / str(i), selection=selection) for i, selection in enumerate(selections)]
    first, same, seed, units = (record.selection_digest for record in found)
    assert first == same and len({first, seed, units}) == 3
    assert len({record.key for record in found}) == 2  # the same units are the same cut, whoever chose them


def test_a_second_run_returns_the_same_record_without_work(world: World, tmp_path: Path) -> None:
    first = cut(world, tmp_path, cutting=sc.Cutting())
    before, times = contents(tmp_path), {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    listener = Listener()
    assert cut(world, tmp_path, cutting=sc.Cutting(), watcher=listener) == first
    assert contents(tmp_path) == before and {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    assert listener.stages == [] and listener.evaluations == []


class Stopper(Listener):
    """Stops the run where a stage begins."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def stage(self, name: str) -> None:
        super().stage(name)
        if name.startswith(self.at):
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["evaluating", "measuring dense", "measuring memory"])
def test_a_run_stopped_after_writing_goes_on_without_cutting_again(stopped: str, world: World, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        cut(world, tmp_path / "cut", cutting=sc.Cutting(), watcher=Stopper(stopped))
    written = (tmp_path / "cut" / "model.safetensors").read_bytes()
    listener = Listener()
    record = cut(world, tmp_path / "cut", cutting=sc.Cutting(), watcher=listener)
    assert not [stage for stage in listener.stages if stage.startswith(("cutting", "proving", "writing"))]
    assert record.shrunk and record.measurement
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == written
    assert jsonio.to_json(record.to_json()) == json.loads((tmp_path / "cut" / RECORD).read_text())
    assert "## What it won" in (tmp_path / "cut" / CARD).read_text()


def test_a_run_stopped_before_writing_leaves_nothing(world: World, tmp_path: Path) -> None:
    for stopped in ("cutting", "proving", "repairing", "writing"):
        with pytest.raises(KeyboardInterrupt):
            cut(world, tmp_path / "cut", cutting=sc.Cutting(repair="bias"), watcher=Stopper(stopped))
    assert not (tmp_path / "cut").exists()


def test_what_was_measured_is_in_record_and_card(world: World, tmp_path: Path) -> None:
    dense, zeroed = (sc.Evaluation(loss, 9, (loss,), perplexity=perplexity) for loss, perplexity in ((1.25, 3.5), (1.5, 4.5)))
    judgement = sc.Judgement(dense, zeroed, UNITS, 21, 1000, 5.0, pulls=0, forwards=0, nonfinite_pulls=0)
    selection = replace(selected(), goal=Reached("latency", 0.8, 0.79))
    record = cut(world, tmp_path, cutting=sc.Cutting(), judgement=judgement, selection=selection)
    found = record.measurement
    assert found and record.goal and record.shrunk and record.shrunk.perplexity
    assert (found.dense_params, found.small_params) == (record.dense_params, record.params)
    assert found.dense_disk and found.small_disk == (tmp_path / "model.safetensors").stat().st_size < found.dense_disk
    assert found.small_memory == 1_000_000 + len(str(tmp_path))
    batch8 = next(timing for timing in found.timings if (timing.name, timing.batch_size) == ("prefill", 8))
    assert record.goal.measured == pytest.approx(1 / batch8.speedup.value)
    card = (tmp_path / CARD).read_text()
    for words in ("3.5000", "4.5000", f"{record.shrunk.perplexity:.4f}", "80.0%", "79.00%", "ms for a token, batch 8"):
        assert words in card
    assert (record.dense, record.zeroed) == (dense, zeroed)
    assert record.data == str(world.text)


@pytest.mark.parametrize("form", ["least squares", "bias", "auto"])
def test_a_repair_is_recorded_and_in_the_weights(form: str, world: World, tmp_path: Path) -> None:
    record = cut(world, tmp_path / "repaired", cutting=sc.Cutting(repair=form, measure=False))
    plain = cut(world, tmp_path / "plain")
    assert record.repair and str(record.repair) in (tmp_path / "repaired" / CARD).read_text()
    assert record.key != plain.key and plain.repair is None
    same = (tmp_path / "repaired/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    assert same == (record.repair.form == "none")
    assert record.proof == plain.proof  # it is of the cut, before the repair


def test_other_batches_than_those_that_prove_can_repair(world: World, tmp_path: Path) -> None:
    plain = cut(world, tmp_path / "plain", cutting=sc.Cutting(repair="least squares", measure=False))
    cutting = sc.Cutting(repair="least squares", repair_size=6, measure=False)
    _, calibration, _ = loaded(world, "text")
    more = cut(world, tmp_path / "more", cutting=cutting, repairing=[*calibration, *calibration])
    assert plain.repair and more.repair and more.key != plain.key
    assert more.repair.fitted_on + more.repair.held_out == 2 * (plain.repair.fitted_on + plain.repair.held_out)
    assert more.proof == plain.proof
    assert (plain.repair.size, more.repair.size) == (None, 6)


def test_a_bfloat16_checkpoint_cut_in_float32_is_written_in_bfloat16_with_its_own_bits(world: World, tmp_path: Path) -> None:
    source: Any = loaded(world, "text")[0].to(torch.bfloat16)
    source.save_pretrained(tmp_path / "dense")
    opened(world).processor.save_pretrained(tmp_path / "dense")
    _, calibration, evaluation = loaded(world, "text")
    dense = sc.open_model(str(tmp_path / "dense"), device="cpu")
    out = tmp_path / "small"
    record = sc.cut(dense, selected(), out, calibration=calibration, evaluation=evaluation, cutting=NO_MEASURE)
    found = load_file(out / "model.safetensors")
    assert not found.pop(HINT).numel()
    expected = shrink(source, UNITS).state_dict()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    again = sc.load_shrunk(out, device="cpu", dtype="float32")  # in the precision that the dense model was opened in
    assert record.shrunk == sc.evaluate(again, evaluation)


def test_a_cut_that_fails_its_proof_writes_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: Any) -> Any:
        small: Any = shrink(*args)
        with torch.no_grad():
            small.transformer.h[0].attn.c_proj.weight[0, 0] += 1
        return small

    monkeypatch.setattr(checkpoint, "shrink", spoiled)
    (tmp_path / "there").mkdir()
    for place in ("new", "there"):
        with pytest.raises(sc.ProofError, match="refused"):
            cut(world, tmp_path / place)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["there"]


def test_an_empty_selection_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(sc.SelectionError, match="empty"):
        cut(world, tmp_path / "small", selection=sc.Selection(()))
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("change", ["units", "repair", "model", "layout"])
def test_a_folder_with_another_cut_is_refused_and_left_as_it_was(change: str, world: World, tmp_path: Path) -> None:
    cut(world, tmp_path, units=EVEN)
    before = contents(tmp_path)
    other: dict[str, Any] = {"units": EVEN[:2] if change == "units" else EVEN}
    other |= {"layout": "uniform"} if change == "layout" else {}
    other |= {"cutting": sc.Cutting(repair="bias", measure=False)} if change == "repair" else {}
    with pytest.raises(sc.OutputError, match="another cut"):
        cut(world, tmp_path, "image" if change == "model" else "text", **other)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("cutting", "says"),
    [(sc.Cutting(repair="least square"), "'least square'.*'least squares'"), (sc.Cutting(max_shard_size="large"), "'large'")],
    ids=["repair", "shard size"],
)
def test_what_cannot_be_cut_so_is_refused_before_any_work(cutting: sc.Cutting, says: str, world: World, tmp_path: Path) -> None:
    listener = Listener()
    with pytest.raises(sc.SettingError, match=says):
        cut(world, tmp_path / "small", cutting=cutting, watcher=listener)
    assert listener.stages == [] and not (tmp_path / "small").exists()


def test_a_folder_that_lost_its_config_is_not_taken_for_a_finished_cut(world: World, tmp_path: Path) -> None:
    """As a kill leaves it in the moment before the last file moves to its place."""
    cut(world, tmp_path)
    (tmp_path / "config.json").unlink()
    try:
        cut(world, tmp_path)
    except sc.OutputError as error:
        assert str(tmp_path) in str(error)
    else:
        sc.load_shrunk(tmp_path, device="cpu")


def test_a_folder_into_which_another_run_writes_is_left_to_it(world: World, tmp_path: Path) -> None:
    (tmp_path / ".writing-abc").mkdir()
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the other run holds it
        with pytest.raises(sc.OutputError, match="Another run is writing"):
            cut(world, tmp_path)
    finally:
        os.close(lock)
    assert [path.name for path in tmp_path.iterdir()] == [".writing-abc"]
    cut(world, tmp_path)


def test_what_a_kill_left_of_an_earlier_writing_is_cleared_away(world: World, tmp_path: Path) -> None:
    (tmp_path / ".writing-abc").mkdir()
    (tmp_path / ".writing-abc" / "model.safetensors").write_bytes(b"0" * 1000)
    cut(world, tmp_path)
    assert not list(tmp_path.glob(".writing-*"))


def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What `python -c` would do."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(said):
        patched.setattr(sys, "argv", ["-c", command[-1]])
        exec(command[command.index("-c") + 1], {})
    return subprocess.CompletedProcess(command, 0, said.getvalue(), "")


def test_without_a_tokenizer_a_cut_is_measured_all_the_same(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", in_this_process)
    model, calibration, _ = loaded(world, "text")
    record = sc.cut(sc.Opened(str(world.text_model), model), selected(), tmp_path, calibration=calibration, tokens=4)
    assert record.measurement and not list(tmp_path.glob("tokenizer*"))
    assert record.measurement.small_memory is None or record.measurement.small_memory >= 0


# shrink_to


def saved(world: World, folder: Path, task: str = "text", **settings: Any) -> Path:
    """A selection file for the world's model, made on the world's data."""
    selection = selected(model_digest=opened(world, task).digest, calibration=str(world.of(task)[1]), **settings)
    selection.save(folder / "selection.json")
    return folder / "selection.json"


@pytest.mark.parametrize("task", ["text", "image"])
def test_the_units_of_a_file_are_cut_with_the_data_that_chose_them(task: str, world: World, tmp_path: Path) -> None:
    file, listener = saved(world, tmp_path, task), Listener()
    selection, record = sc.shrink_to(
        str(world.of(task)[0]), file, tmp_path / "small", device="cpu", measure=False, repair="auto", watcher=listener
    )
    assert selection == sc.Selection.load(file)
    assert record.units == UNITS and record.made_with == selection.made_with
    assert record == read_record(tmp_path / "small")
    assert record.repair and record.shrunk is None and "not evaluated" in (tmp_path / "small" / CARD).read_text()
    stages = [stage.split()[0] for stage in listener.stages]
    assert stages == ["loading", "reading", "cutting", "proving", "repairing", "writing"]


def test_a_selection_that_does_not_say_how_it_was_made_is_cut_with_the_data_given(world: World, tmp_path: Path) -> None:
    sc.Selection(EVEN).save(tmp_path / "by-hand.json")
    settings: dict[str, Any] = {"calibration": str(world.text), "seq_len": SEQ_LEN, "device": "cpu", "measure": False}
    out = tmp_path / "small"
    selection, record = sc.shrink_to(str(world.text_model), tmp_path / "by-hand.json", out, layout="uniform", **settings)
    assert selection.made_with is None is record.made_with
    assert (record.layout, record.pulls) == ("uniform", 0)


def test_a_selection_made_for_another_model_is_refused(world: World, tmp_path: Path) -> None:
    file = saved(world, tmp_path)
    with pytest.raises(sc.SelectionError, match=opened(world, "text").digest):
        sc.shrink_to(str(world.image_model), file, tmp_path / "small", calibration=str(world.images), device="cpu")
    other: Any = loaded(world, "text")[0]
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    other.save_pretrained(tmp_path / "other")
    opened(world).processor.save_pretrained(tmp_path / "other")
    with pytest.raises(sc.SelectionError, match=opened(world, "text").digest):
        sc.shrink_to(str(tmp_path / "other"), file, tmp_path / "small", device="cpu")
    assert not (tmp_path / "small").exists()


def test_units_that_the_model_does_not_have_are_refused(world: World, tmp_path: Path) -> None:
    sc.Selection((sc.Unit("head", 7, 0),)).save(tmp_path / "other.json")
    with pytest.raises(sc.SelectionError, match=r"head 7\.0"):
        sc.shrink_to(str(world.text_model), tmp_path / "other.json", tmp_path / "small", calibration=str(world.text), seq_len=8)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"layout": "uniforn"}, sc.SettingError, "'uniforn'.*uniform"),
        ({"repair": "least square"}, sc.SettingError, "'least square'.*least squares"),
        ({"max_shard_size": "large"}, sc.SettingError, "'large'"),
        ({"sead": 1}, sc.SettingError, "'sead'.*seed"),
        ({"out": "selection.json"}, sc.OutputError, "selection.json"),
        ({"out": "taken"}, sc.OutputError, "config.json"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    options: dict[str, Any], kind: type[Exception], says: str, world: World, tmp_path: Path
) -> None:
    file, listener = saved(world, tmp_path), Listener()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    before, out = contents(tmp_path), tmp_path / options.pop("out", "small")
    with pytest.raises(kind, match=says):
        sc.shrink_to(str(world.text_model), file, out, watcher=listener, **options)
    assert listener.stages == [] and contents(tmp_path) == before


# compare


def test_two_models_are_compared_with_what_they_take_on_disk_and_in_memory(world: World, tmp_path: Path) -> None:
    cut(world, tmp_path / "small")
    dense, small = opened(world), sc.open_model(str(tmp_path / "small"), device="cpu")
    found = compare(dense, small, tokens=6, batch_sizes=(2, 1), repeats=3)
    sizes = [(Path(one.name) / "model.safetensors").stat().st_size for one in (dense, small)]
    assert [found.dense_disk, found.small_disk] == sizes
    assert [found.dense_memory, found.small_memory] == [1_000_000 + len(one.name) for one in (dense, small)]
    assert (found.tokens, found.new_tokens) == (6, 8)  # half of what the model has room for
    assert [timing.batch_size for timing in found.timings] == [2, 2, 1, 1]
    assert {len(timing.dense_ms) for timing in found.timings} == {3}


def test_a_model_of_no_folder_has_no_size_on_disk_and_memory_is_left_out_on_demand(world: World) -> None:
    dense = opened(world)
    small = replace(dense, name="a/hub-name")
    found = compare(dense, small, tokens=4, new_tokens=2, batch_sizes=(1,), repeats=3, memory=False)
    assert found.dense_disk and found.small_disk is None
    assert found.dense_memory is found.small_memory is None and found.new_tokens == 2


def test_models_are_loaded_by_their_names_and_compared(world: World, tmp_path: Path) -> None:
    cut(world, tmp_path / "small", "image")
    listener = Listener()
    names = str(world.image_model), str(tmp_path / "small")
    found = sc.compare_models(*names, device="cpu", dtype="bfloat16", repeats=3, batch_sizes=(2,), watcher=listener)
    assert (found.device, found.dtype, found.tokens) == ("cpu", "bfloat16", None)
    assert found.dense_params > found.small_params and math.isfinite(found.timings[0].speedup.value)
    assert [stage.split()[0] for stage in listener.stages] == ["loading", "loading", "measuring", "measuring"]


@pytest.mark.parametrize(
    "bad",
    [{"repeats": 2}, {"batch_sizes": ()}, {"batch_sizes": (0,)}, {"tokens": 0}, {"new_tokens": 0}, {"threads": 0}],
    ids=str,
)
def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(bad: dict[str, Any], world: World) -> None:
    listener = Listener()
    with pytest.raises(sc.SettingError):
        sc.compare_models(str(world.text_model), "nowhere", watcher=listener, **bad)
    assert listener.stages == []


# A share of the data held out


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """One file of short documents."""
    rng = random.Random(1)
    path = tmp_path / "lines.txt"
    path.write_text("".join(" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 12))) + "\n" for _ in range(150)))
    return path


CHEAP: dict[str, Any] = {"device": "cpu", "seq_len": SEQ_LEN, "evaluation_batches": 4}


def test_one_file_can_choose_and_judge_and_shrink_with_a_share_held_out(lines: Path, world: World, tmp_path: Path) -> None:
    listener = Listener()
    model, out = str(world.text_model), tmp_path / "out"
    settings: dict[str, Any] = CHEAP | {"calibration": str(lines), "method": "magnitude", "layout": "none"}
    with pytest.raises(sc.DataError, match=r"--holdout 0\.1"):
        sc.prune(model, **settings)
    result = sc.prune(model, out=out, holdout=0.2, watcher=listener, **settings)
    assert sum("document of its own" in sentence for sentence in listener.said) == 1
    assert result.selection.made_with is not None and result.selection.made_with.settings.holdout == 0.2
    evaluated = evaluate_on(model, selection=out / "selection.json", data=str(lines), **CHEAP)
    assert evaluated.dense == result.record.judgement.dense
    _, record = shrink_to(model, out / "selection.json", tmp_path / "small", measure=False, device="cpu")
    assert record.params < record.dense_params


def test_data_held_out_differently_from_those_that_chose_are_refused(lines: Path, world: World, tmp_path: Path) -> None:
    model, out = str(world.text_model), tmp_path / "sel.json"
    select_to(model, out, calibration=str(lines), method="magnitude", holdout=0.2, device="cpu", seq_len=SEQ_LEN)
    with pytest.raises(sc.DataError, match=r"another way.*--holdout"):
        evaluate_on(model, selection=out, data=str(lines), holdout=0.4, **CHEAP)
