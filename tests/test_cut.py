from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import secateur as sc
from secateur import jsonio
from secateur.card import goal_sentence, markdown, model_card, removed, unit_lines
from secateur.checkpoint import CARD, RECORD
from secateur.cut import check_cut_place, cut
from secateur.surgery import shrink
from test_prune import SEQ_LEN, Listener, World, loaded, make_world

measure: Any = sys.modules[sc.Measurement.__module__]
cutting = sys.modules[cut.__module__]  # the package's name for it is the function
UNITS = (sc.Unit("head", 0, 1), sc.Unit("head", 2, 0), sc.Unit("head", 2, 2), sc.Unit("mlp", 1, 0, 4))
EVEN = tuple(sc.Unit("mlp", layer, 0, 4) for layer in range(3))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "peak_memory", lambda name, **settings: 1_000_000 + len(name))


def selected(units: tuple[sc.Unit, ...] = UNITS, **settings: Any) -> sc.Selection:
    return sc.Selection(units, settings={"method": "ucb", "target": "both", "seed": 42, "calibration": "text"} | settings)


def run(world: World, out: Path, task: str = "text", units: tuple[sc.Unit, ...] = UNITS, **options: Any) -> dict[str, Any]:
    folder, _ = world.of(task)
    model, calibration, evaluation = loaded(world, task)
    processor = sc.load(str(folder), device="cpu")[1]
    settings: dict[str, Any] = {"measuring": False, "calibration": calibration, "processor": processor, "name": str(folder)}
    settings |= {"evaluation": evaluation, "tokens": SEQ_LEN}
    return cut(model, options.pop("selection", selected(units)), out, **settings | options)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# cut


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("units", [UNITS, EVEN], ids=["free", "uniform"])
def test_the_checkpoint_computes_what_the_masked_model_does_and_the_record_says_so(
    task: str, units: tuple[sc.Unit, ...], world: World, tmp_path: Path
) -> None:
    record = run(world, tmp_path / "small", task, units)
    model, _, evaluation = loaded(world, task)
    with sc.zeroed(model, units):
        masked = sc.evaluate(model, evaluation)
    small, _ = sc.load(str(tmp_path / "small"), device="cpu")
    assert record["shrunk"]["loss"] == pytest.approx(masked.loss, rel=1e-5)
    assert record["shrunk"]["loss"] == sc.evaluate(small, evaluation).loss
    assert jsonio.to_json(record) == json.loads((tmp_path / "small" / RECORD).read_text(), parse_constant=pytest.fail)
    assert record["params"] == sum(p.numel() for p in small.parameters()) == sc.parameters_left(model, units)
    assert record["dense_params"] == sum(p.numel() for p in model.parameters())
    assert record["layout"] == ("free" if units == UNITS else "uniform")
    assert record["units"] == [unit.to_json() for unit in units]
    assert record["proof"]["relative"] <= record["proof"]["tolerance"]
    assert record["versions"]["torch"] == torch.__version__
    assert not [name for name in files(tmp_path) if name.endswith((".bin", ".pt", ".pkl"))]
    assert not list((tmp_path / "small").glob(".*"))


def test_the_digest_changes_with_the_selection(world: World, tmp_path: Path) -> None:
    found = [
        run(world, tmp_path / str(i), selection=selection)
        for i, selection in enumerate([selected(), selected(), selected(seed=43), selected(UNITS[:3])])
    ]
    first, same, seed, units = (record["selection_digest"] for record in found)
    assert first == same and len({first, seed, units}) == 3
    assert len({record["key"] for record in found}) == 2  # the same units are the same cut, whoever chose them


def test_a_second_run_returns_the_same_record_without_work(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(world, tmp_path, measuring=True)
    before = files(tmp_path)
    for name in ("shrink", "prove", "save_shrunk", "evaluate", "measure", "load_model", "peak_memory", "repair_model"):
        monkeypatch.setattr(cutting, name, lambda *_, **__: pytest.fail("worked again"))
    listener = Listener()
    assert run(world, tmp_path, measuring=True, watcher=listener) == jsonio.to_json(first)
    assert files(tmp_path) == before
    assert listener.stages == []


@pytest.mark.parametrize("stopped", ["compare", "evaluate"])
def test_a_run_stopped_after_writing_goes_on_without_cutting_again(
    stopped: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cutting, stopped, stop)
        run(world, tmp_path / "cut", measuring=True)
    written = (tmp_path / "cut" / "model.safetensors").read_bytes()
    monkeypatch.setattr(cutting, "shrink", lambda *_, **__: pytest.fail("cut again"))
    record = run(world, tmp_path / "cut", measuring=True)
    assert {"shrunk", "measurement", "proof"} <= record.keys()
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == written
    assert jsonio.to_json(record) == json.loads((tmp_path / "cut" / RECORD).read_text())
    assert "## What it won" in (tmp_path / "cut" / CARD).read_text()


def test_what_was_measured_is_in_record_and_card(world: World, tmp_path: Path) -> None:
    judged = {"dense": {"loss": 1.25, "perplexity": 3.5}, "pruned": {"loss": 1.5, "perplexity": 4.5}}
    goal = {"what": "latency", "asked": 0.8, "got": 0.79}
    record = run(world, tmp_path, measuring=True, judged=judged, selection=sc.Selection(UNITS, selected().settings, goal=goal))
    found = record["measurement"]
    assert (found["dense_params"], found["small_params"]) == (record["dense_params"], record["params"])
    assert found["small_disk"] == (tmp_path / "model.safetensors").stat().st_size < found["dense_disk"]
    assert found["small_memory"] == 1_000_000 + len(str(tmp_path))
    batch8 = next(t for t in found["timings"] if (t["name"], t["batch_size"]) == ("prefill", 8))
    assert record["goal"]["measured"] == pytest.approx(1 / batch8["speedup"]["value"])
    card = (tmp_path / CARD).read_text()
    for words in ("3.5000", "4.5000", f"{record['shrunk']['perplexity']:.4f}", "80.0%", "79.00%", "ms for a token, batch 8"):
        assert words in card
    assert (record["dense"], record["masked"]) == (judged["dense"], judged["pruned"])


@pytest.mark.parametrize("form", ["least squares", "bias", "auto"])
def test_a_repair_is_recorded_and_in_the_weights(form: str, world: World, tmp_path: Path) -> None:
    record = run(world, tmp_path / "repaired", repair=form)
    plain = run(world, tmp_path / "plain")
    assert record["repair"]["sentence"] in (tmp_path / "repaired" / CARD).read_text()
    assert record["key"] != plain["key"] and "repair" not in plain
    same = (tmp_path / "repaired/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    assert same == (record["repair"]["form"] == "none")
    assert record["proof"] == plain["proof"]  # it is of the cut, before the repair


def test_a_bfloat16_checkpoint_cut_in_float32_is_written_in_bfloat16_with_its_own_bits(world: World, tmp_path: Path) -> None:
    tokenizer = sc.load(str(world.text_model), device="cpu")[1]
    source: Any = loaded(world, "text")[0].to(torch.bfloat16)
    source.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    model, _ = sc.load(str(tmp_path / "dense"), device="cpu")
    _, calibration, _ = loaded(world, "text")
    name = str(tmp_path / "dense")
    cut(model, selected(), tmp_path / "small", name=name, calibration=calibration, processor=tokenizer, measuring=False)
    found = load_file(tmp_path / "small" / "model.safetensors")
    expected = shrink(source, UNITS).state_dict()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


def test_a_cut_that_fails_its_proof_writes_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(model: nn.Module, units: Any, layout: str) -> nn.Module:
        small: Any = shrink(model, units, layout)
        with torch.no_grad():
            small.transformer.h[0].attn.c_proj.weight[0, 0] += 1
        return small  # type: ignore[no-any-return]

    monkeypatch.setattr(cutting, "shrink", spoiled)
    (tmp_path / "there").mkdir()
    for place in ("new", "there"):
        with pytest.raises(sc.ProofError, match="refused"):
            run(world, tmp_path / place)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["there"]


def test_an_empty_selection_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(sc.SelectionError, match="empty"):
        run(world, tmp_path / "small", selection=sc.Selection(()))
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("change", ["units", "repair", "model", "layout"])
def test_a_folder_with_another_cut_is_refused_and_left_as_it_was(change: str, world: World, tmp_path: Path) -> None:
    run(world, tmp_path, units=EVEN)
    before = files(tmp_path)
    other: dict[str, Any] = {"units": EVEN[:2]} if change == "units" else {"units": EVEN}
    other |= {"repair": {"repair": "bias"}, "layout": {"layout": "uniform"}}.get(change, {})
    with pytest.raises(sc.OutputError, match="another cut"):
        run(world, tmp_path, "image" if change == "model" else "text", **other)
    assert files(tmp_path) == before


def test_a_place_is_looked_at_before_any_work(tmp_path: Path) -> None:
    check_cut_place(tmp_path, "")
    with pytest.raises(sc.SettingError, match=r"'least square'.*Did you mean"):
        check_cut_place(tmp_path, "least square")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(sc.OutputError, match=r"config\.json is there already"):
        check_cut_place(tmp_path, "bias")
    (tmp_path / RECORD).write_text("mine")
    with pytest.raises(sc.OutputError, match=RECORD):
        check_cut_place(tmp_path, "")


def test_a_folder_that_lost_its_config_is_not_taken_for_a_finished_cut(world: World, tmp_path: Path) -> None:
    """As a kill leaves it in the moment before the last file moves to its place."""
    run(world, tmp_path)
    (tmp_path / "config.json").unlink()
    try:
        run(world, tmp_path)
    except sc.OutputError as error:
        assert str(tmp_path) in str(error)
    else:
        sc.load_shrunk(tmp_path, device="cpu")


def test_what_a_kill_left_of_an_earlier_writing_is_cleared_away(world: World, tmp_path: Path) -> None:
    (tmp_path / ".writing-abc").mkdir()
    (tmp_path / ".writing-abc" / "model.safetensors").write_bytes(b"0" * 1000)
    run(world, tmp_path)
    assert not list(tmp_path.glob(".writing-*"))


def test_without_a_tokenizer_a_cut_is_measured_all_the_same(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(name: str, **settings: Any) -> Any:
        return measure._own_peak(name, new_tokens=4, **settings)

    monkeypatch.setattr(cutting, "peak_memory", in_this_process)
    model, calibration, _ = loaded(world, "text")
    name = str(world.text_model)
    record = cut(model, selected(), tmp_path, name=name, calibration=calibration, tokens=4)
    assert record["measurement"]["small_memory"] is None or record["measurement"]["small_memory"] > 0


# The card

RECORDED: dict[str, Any] = {
    "model": "gpt2",
    "family": "gpt2",
    "task": "text",
    "layout": "free",
    "dense_params": 1_000_000,
    "params": 876_543,
    "pulls": 1234,
    "proof": {"batches": 2, "sentence": "they agree"},
    "settings": {"method": "ucb", "target": "both", "seed": 42, "calibration": "wikitext2"},
    "units": [unit.to_json() for unit in UNITS],
}


def test_a_card_says_what_was_removed_and_how() -> None:
    card = model_card(RECORDED)
    for words in (
        "3 attention heads and 1 MLP channel group:",
        "876,543 of 1,000,000 parameters (87.7%)",
        "- head 0.1\n- head 2.0,2\n- mlp 1.0",
        "1,234 paired",
        "seed `42`",
        "It was not evaluated.",
        "they agree",
    ):
        assert words in card
    assert card.startswith('---\nbase_model: "gpt2"\n')
    assert "## Repair" not in card and "## Target" not in card and "## What it won" not in card


@pytest.mark.parametrize(
    ("family", "task", "layout", "says", "not_said"),
    [
        ("gpt2", "text", "free", ["secateur.load_shrunk", "AutoModelForCausalLM", "trust_remote_code=True"], "timm"),
        ("gpt2", "text", "uniform", ['AutoModelForCausalLM.from_pretrained("FOLDER")'], "trust_remote_code"),
        ("vit", "image", "uniform", ["AutoModelForImageClassification", "image-classification"], "load_shrunk"),
        ("timm/VisionTransformer", "image", "free", ["secateur.load_shrunk", "library_name: timm"], "from_pretrained"),
        ("timm/VisionTransformer", "image", "uniform", ["timm.create_model", "local-dir:FOLDER"], "secateur.load"),
    ],
)
def test_a_card_says_how_to_load_the_model(family: str, task: str, layout: str, says: list[str], not_said: str) -> None:
    card = model_card(RECORDED | {"family": family, "task": task, "layout": layout})
    assert all(words in card for words in says) and not_said not in card


@pytest.mark.parametrize("name", ["a`b", "a\nb\n# Title", "<script>alert(1)</script>", 'a"b\\c', "a\r\nb: c", "模型", "---\nx"])
def test_an_odd_name_breaks_neither_the_card_nor_its_head(name: str) -> None:
    odd = RECORDED | {"model": name, "settings": RECORDED["settings"] | {"calibration": name, "method": name}}
    odd |= {"data": name, "shrunk": {"loss": 1.0}}
    card = model_card(odd)
    outside_of_code = card.split("---", 2)[2].split("`")[::2]
    assert not any("<script" in text for text in outside_of_code)
    plain = model_card(RECORDED | {"data": "text", "shrunk": {"loss": 1.0}})
    assert len(card.splitlines()) == len(plain.splitlines())
    assert card.count("`") - name.count("`") == plain.count("`")  # its own are in the head alone
    head = card.splitlines()[1].removeprefix("base_model: ")
    assert json.loads(head) == name


def test_a_card_of_a_selection_made_by_hand_is_still_a_sentence() -> None:
    card = model_card(RECORDED | {"settings": {}})
    assert "By Secateur: ," not in card and "`-`" not in card


def test_units_are_counted_by_kind_and_listed_by_layer() -> None:
    group = sc.Unit("kv_group", 1, 0).to_json()
    assert removed([group]) == "1 K/V group"
    assert unit_lines(
        [sc.Unit("head", 10, 2).to_json(), sc.Unit("head", 2, 11).to_json(), sc.Unit("head", 2, 3).to_json()]
    ) == [
        "head 2.3,11",
        "head 10.2",
    ]


def test_tables_and_goals_in_words() -> None:
    assert markdown(["", "a"], [["b", "1"]]) == "|  | a |\n| --- | --- |\n| b | 1 |"
    goal: dict[str, Any] = {"what": "FLOPs", "asked": 0.8, "got": 0.7954}
    assert goal_sentence(goal) == "80.0% of the dense model's FLOPs were asked for, and 79.54% are left."
    assert "81.00% were measured" in goal_sentence(goal | {"measured": 0.81})


def test_a_card_shows_figures_that_all_sides_have_and_words_for_nan() -> None:
    sides = {"dense": {"loss": 1.0, "top1": 0.5, "nonfinite_batches": 0}, "shrunk": {"loss": "nan", "nonfinite_batches": 2}}
    card = model_card(copy.deepcopy(RECORDED) | sides | {"data": "text"})
    assert "| loss | 1.0000 | nan |" in card and "top-1" not in card and "| non-finite batches | 0" in card
