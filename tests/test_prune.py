from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import secateur as sc
from secateur.data.batches import Batches
from secateur.files import jsonio
from secateur.methods import METHODS, searching
from secateur.selection import Source
from secateur.watcher import Progress, Watcher
from tiny import FAMILIES_TINY, GROUP, hook_count
from worlds import FILES, N_UNITS, SEQ_LEN, SMALL, K, Listener, World, contents, loaded, make_tokenizer, small

tf: Any = transformers  # its classes are not typed


class Stopping(Watcher):
    """Stops a run in the middle of its second step."""

    def pull(self, progress: Progress) -> None:
        if (progress.step, progress.pull) == (1, 2):
            raise KeyboardInterrupt


def prune(world: World, task: str = "text", **settings: Any) -> sc.PruneResult:
    folder, data = world.of(task)
    return sc.prune(str(folder), **({"calibration": str(data), "device": "cpu"} | small(settings)))


def chosen(world: World, task: str, **settings: Any) -> tuple[sc.Opened, sc.Selection]:
    """The units that the same settings choose, without prune."""
    opened = sc.open_model(str(world.of(task)[0]), device="cpu")
    asked = sc.Settings(opened.name, calibration=str(world.of(task)[1]), device="cpu", **small(settings))
    return opened, sc.choose(opened, loaded(world, task)[1], asked.for_task(task))


# The public names


def test_every_public_name_exists_once_and_in_the_order_that_ruff_sorts_by() -> None:
    assert [name for name in sc.__all__ if not hasattr(sc, name)] == []
    assert len(set(sc.__all__)) == len(sc.__all__)
    # Constants first, then classes, then the rest.
    assert sc.__all__ == sorted(sc.__all__, key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name))


def test_the_front_door_of_the_design_works_step_by_step(world: World) -> None:
    model, tokenizer = sc.load(str(world.text_model))
    calibration = sc.text_batches(str(world.text), tokenizer, split="train", limit=512, seq_len=SEQ_LEN)
    units = sc.candidate_units(model, target="head")
    meter = sc.DamageMeter(model, calibration, batches_per_pull=2, seed=42)
    selection = sc.select(meter, units, policy=sc.UCB(c=1.5), ratio=0.10, pulls_per_step=32, temperature=0.02, seed=42)
    assert len(units) == 9
    assert len(selection.units) == 1
    assert meter.pulls == 32
    held_out = sc.text_batches(str(world.text), tokenizer, split="test", seq_len=SEQ_LEN)
    dense = sc.perplexity(model, held_out)
    with sc.zeroed(model, selection.units):
        pruned = sc.perplexity(model, held_out)
    assert 1 < dense < math.inf and 1 < pruned < math.inf and pruned != dense
    assert hook_count(model) == 0


# prune


@pytest.mark.slow
@pytest.mark.parametrize(("method", "task"), [*((method, "text") for method in METHODS), ("auto", "image"), ("wanda", "image")])
def test_prune_finds_what_choose_and_judge_find_step_by_step(method: str, task: str, world: World) -> None:
    result = prune(world, task, method=method, target="both", group_by="address")
    opened, selection = chosen(world, task, method=method, target="both")
    assert selection == result.selection
    assert sc.judge(opened.model, selection, loaded(world, task)[2]) == result.record.judgement


def test_the_perplexity_is_that_of_a_model_whose_head_weights_are_zeroed_by_hand(world: World) -> None:
    result = prune(world, method="magnitude")
    model, tokenizer = sc.load(str(world.text_model), device="cpu")
    with torch.no_grad():
        for unit in result.selection.units:  # heads are 4 wide; Conv1D keeps a weight as (inputs, outputs)
            model.transformer.h[unit.layer].attn.c_proj.weight[4 * unit.index : 4 * unit.index + 4] = 0  # type: ignore[union-attr, index]
    tokens = tokenizer((world.text / "test.txt").read_text(), add_special_tokens=False)["input_ids"]
    windows = torch.tensor(tokens[: len(tokens) // SEQ_LEN * SEQ_LEN]).view(-1, SEQ_LEN)
    with torch.no_grad():
        logits = model(input_ids=windows).logits[:, :-1]
    loss = float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))
    assert result.record.judgement.zeroed.loss == pytest.approx(loss, rel=1e-5)
    assert result.record.judgement.zeroed.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert result.record.judgement.zeroed.rows == windows[:, 1:].numel()


@pytest.mark.parametrize("target", ["head", "mlp", "both"])
def test_the_selection_holds_k_different_units_of_the_target(target: str, world: World) -> None:
    result = prune(world, target=target)
    kinds = {"head", "mlp"} if target == "both" else {target}
    assert len(set(result.selection.units)) == len(result.selection.units) == K[target]
    assert {unit.kind for unit in result.selection.units} <= kinds
    model, _, _ = loaded(world, "text")
    assert len(sc.candidate_units(model, target, GROUP)) == N_UNITS[target]
    assert set(result.selection.units) <= set(sc.candidate_units(model, target, GROUP))
    assert result.record.judgement.zeroed_percent == sc.zeroed_percent(model, result.selection.units)


def test_without_a_place_nothing_is_written(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert prune(world).out is None
    assert list(tmp_path.iterdir()) == []


def test_with_a_place_the_files_hold_what_is_returned(world: World, tmp_path: Path) -> None:
    result = prune(world, out=tmp_path / "new" / "out")
    assert result.out == tmp_path / "new" / "out"
    assert sorted(path.name for path in result.out.iterdir()) == sorted([*FILES, "report.html"])
    assert sc.Selection.load(result.out / "selection.json") == result.selection
    assert json.loads((result.out / "evaluation.json").read_text()) == jsonio.to_json(result.record.to_json())
    header, *pulls = [json.loads(line) for line in (result.out / "journal.jsonl").read_text().splitlines()]
    assert result.selection.made_with is not None
    assert header.pop("checksum") and header == {"settings": result.selection.made_with.to_json()}
    assert len(pulls) == result.selection.pulls


def test_a_finished_run_started_again_measures_and_evaluates_nothing_and_gives_the_same(world: World, tmp_path: Path) -> None:
    first = prune(world, out=tmp_path)
    before = contents(tmp_path)
    listener = Listener()
    again = prune(world, out=tmp_path, watcher=listener)
    assert again.selection == first.selection
    assert again.record == first.record
    assert contents(tmp_path) == before
    assert listener.pulls == []
    assert listener.evaluations == []


@pytest.mark.parametrize("method", searching())
def test_a_run_stopped_in_the_middle_goes_on_to_the_same_files(method: str, world: World, tmp_path: Path) -> None:
    prune(world, method=method, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prune(world, method=method, out=tmp_path / "cut", watcher=Stopping())
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["journal.jsonl"]
    listener = Listener()
    prune(world, method=method, out=tmp_path / "cut", watcher=listener)
    made = [pull.replayed for pull in listener.pulls]
    before = made.count(True)
    assert made == [True] * before + [False] * (len(made) - before)
    assert (before, len(made)) == (6, 12) or (method == "auto" and 2 < before < len(made))
    for name in ("selection.json", "journal.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_stopped_while_it_evaluates_keeps_its_selection_and_then_only_evaluates(world: World, tmp_path: Path) -> None:
    class Stopping(Watcher):
        def evaluated(self, batch: int, n_batches: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(world, out=tmp_path, watcher=Stopping())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.jsonl", "selection.json"]
    listener = Listener()
    again = prune(world, out=tmp_path, watcher=listener)
    assert all(pull.replayed for pull in listener.pulls)
    whole = prune(world)
    assert again.selection == whole.selection
    assert again.record.judgement == whole.record.judgement


def test_a_watcher_hears_of_every_stage_pull_and_batch(world: World) -> None:
    listener = Listener()
    result = prune(world, watcher=listener)
    assert len(listener.pulls) == result.selection.pulls == 12
    assert [(pull.step, pull.pull) for pull in listener.pulls] == [(s, i + 1) for s in range(3) for i in range(4)]
    assert {(pull.n_steps, pull.budget) for pull in listener.pulls} == {(3, 4)}
    assert [step.unit for step in listener.steps] == list(result.selection.units)
    n = len(result.record.judgement.dense.batch_losses)
    assert listener.evaluations == [(i + 1, n) for i in range(n)] * 2
    assert len(listener.stages) == 5


def test_the_evaluation_sizes_bound_the_evaluation_and_leave_the_selection_alone(world: World) -> None:
    whole, few, fewer = prune(world), prune(world, evaluation_batches=2), prune(world, evaluation_size=3)
    assert len(few.record.judgement.dense.batch_losses) == 2
    assert few.record.judgement.dense.batch_losses == whole.record.judgement.dense.batch_losses[:2]
    assert fewer.record.judgement.dense.rows == 3 * (SEQ_LEN - 1)
    assert whole.selection == few.selection == fewer.selection


def test_a_model_that_gives_nan_is_reported_as_nan_in_strict_json(world: World, tmp_path: Path) -> None:
    model: Any = FAMILIES_TINY["gpt2"]()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.nan)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer(world.text / "train.txt").save_pretrained(tmp_path / "model")
    settings: dict[str, Any] = {"calibration": str(world.text), "device": "cpu"} | SMALL
    result = sc.prune(str(tmp_path / "model"), out=tmp_path / "out", **settings | {"method": "random"})
    assert math.isnan(result.record.judgement.zeroed.loss)
    written = (tmp_path / "out" / "evaluation.json").read_text()
    assert json.loads(written, parse_constant=pytest.fail)["pruned"]["perplexity"] == "nan"
    with pytest.raises(sc.ModelError, match=r"loss.* nan"):
        sc.prune(str(tmp_path / "model"), **settings)
    with pytest.raises(sc.ModelError, match=r"loss.* nan"):
        sc.prune(str(tmp_path / "model"), **settings | {"method": "auto"})


# What is refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", 0.0),
        ("ratio", 1.0),
        ("ratio", math.nan),
        ("method", "ucbb"),
        ("target", "heads"),
        ("seed", -1),
        ("pulls_per_step", 0),
        ("temperature", 0.0),
        ("ucb_c", -0.5),
        ("batches_per_pull", 0),
        ("stack", 0),
        ("stack", -2),
        ("group_width", 0),
        ("score_batches", 0),
        ("pool_size", -2),
        ("screen", -2),
        ("dtype", "float8"),
        ("device", "gpu"),
        ("seq_len", 1),
        ("batch_size", 0),
        ("calibration_size", 0),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_the_model_is_read(name: str, value: Any, tmp_path: Path) -> None:
    """The model is not there: an error about it would mean that the setting was looked at too late."""
    with pytest.raises(sc.SettingError, match=str(value)):
        sc.prune(str(tmp_path / "no model"), out=tmp_path / "out", **(SMALL | {name: value}))
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_does_not_exist_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError, match=r"'rato'.*\bratio\b"):
        sc.prune(str(tmp_path / "no model"), rato=0.1)


def test_more_batches_a_pull_than_there_are_is_refused_and_leaves_no_file_behind(world: World, tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError, match="100"):
        prune(world, batches_per_pull=100, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lanes", [0, -3])
def test_fewer_lanes_than_one_are_refused_and_leave_no_file_behind(lanes: int, world: World, tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError, match=f"lanes.*{lanes}"):
        prune(world, lanes=lanes, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", FILES)
def test_what_another_run_wrote_is_refused_and_left_as_it_was(kept: str, world: World, tmp_path: Path) -> None:
    prune(world, out=tmp_path)
    for path in tmp_path.iterdir():
        if path.name != kept:
            path.unlink()
    before = (tmp_path / kept).read_bytes()
    with pytest.raises(sc.OutputError, match=rf"{kept}.*temperature 0\.02.*0\.05"):
        prune(world, out=tmp_path, temperature=0.05)
    assert [path.name for path in tmp_path.iterdir()] == [kept]
    assert (tmp_path / kept).read_bytes() == before


def test_an_evaluation_on_other_data_is_refused_and_left_as_it_was(world: World, tmp_path: Path) -> None:
    prune(world, out=tmp_path)
    before = contents(tmp_path)
    with pytest.raises(sc.OutputError, match=r"evaluation\.json.*another run"):
        prune(world, out=tmp_path, evaluation_batches=2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("content", ["[]", "{}", "my notes", '{"settings": 1, "judging": 2}'])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_somebody_elses_is_refused_and_left_as_it_was(name: str, content: str, world: World, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((sc.OutputError, sc.SelectionError), match=name):
        prune(world, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == content


def test_an_evaluation_that_lost_its_numbers_is_refused_or_made_anew(world: World, tmp_path: Path) -> None:
    whole = prune(world, out=tmp_path)
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({key: whole.record.to_json()[key] for key in ("settings", "judging")}))
    try:
        again = prune(world, out=tmp_path)
        assert again.record.judgement == whole.record.judgement
    except sc.OutputError as error:
        assert "evaluation.json" in str(error)


def test_judging_on_what_chose_is_refused(world: World) -> None:
    opened, selection = chosen(world, "text")
    calibration = loaded(world, "text")[1]
    with pytest.raises(sc.DataError, match=r"held-out.*--data"):
        sc.judge(opened.model, selection, calibration)
    one_shared = Batches(calibration.items[:1], Source("other", "test", rows=calibration.source.rows[-1:]))
    with pytest.raises(sc.DataError, match=r"'other'.*\b1 of.*\b1\b"):
        sc.judge(opened.model, selection, one_shared)


@pytest.mark.parametrize("method", METHODS)
def test_choosing_leaves_the_model_as_it_was(method: str, world: World) -> None:
    model, calibration, evaluation = loaded(world, "text")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dense = sc.evaluate(model, evaluation)
    sc.choose(sc.Opened("tiny", model), calibration, sc.Settings("tiny", **SMALL | {"method": method}).for_task("text"))
    assert hook_count(model) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert sc.evaluate(model, evaluation) == dense


def test_settings_left_to_the_task_become_the_papers() -> None:
    text, image = sc.Settings("m").for_task("text"), sc.Settings("m").for_task("image")
    assert (text.screen, text.calibration_size, text.batch_size) == (48, 512, 4)
    assert (image.screen, image.calibration_size, image.batch_size) == (0, 1024, 8)
    given = replace(text, screen=0, calibration_size=7, batch_size=3)
    assert given.for_task("image") == given


@pytest.mark.parametrize(("memory", "said"), [(None, 0), (3000, 1), (10, 1)])
def test_a_cache_memory_that_is_too_small_is_said_once_and_changes_nothing(
    world: World, tmp_path: Path, memory: int | None, said: int
) -> None:
    listener = Listener()
    result = prune(world, out=tmp_path, cache_memory=memory, watcher=listener)
    assert sum("--cache-memory" in sentence for sentence in listener.said) == said
    assert result.selection.units == prune(world).selection.units


LANED = [("ucb", "text"), ("ts", "image"), ("greedy", "text"), ("ucb", "image"), ("auto", "text"), ("auto", "image")]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "task"), LANED)
def test_lanes_change_nothing_and_a_stack_only_last_digits(method: str, task: str, world: World) -> None:
    plain = prune(world, task, method=method, target="both", lanes=1)
    assert prune(world, task, method=method, target="both", lanes=2).selection == plain.selection
    stacked = prune(world, task, method=method, target="both", lanes=2, stack=3)
    before, after = plain.selection.made_with, stacked.selection.made_with
    assert before is not None and after == replace(before, settings=replace(before.settings, stack=3))
    assert stacked.selection.units == plain.selection.units
    assert stacked.record.judgement == plain.record.judgement  # the number of forwards too
    damages = [[pull.damage for pull in made.selection.trace] for made in (stacked, plain)]
    assert damages[0] == pytest.approx(damages[1], abs=5e-6)


def test_a_run_stopped_in_the_middle_goes_on_with_other_lanes_to_the_same_files(world: World, tmp_path: Path) -> None:
    prune(world, out=tmp_path / "whole", lanes=1)
    with pytest.raises(KeyboardInterrupt):
        prune(world, out=tmp_path / "cut", lanes=2, watcher=Stopping())
    prune(world, out=tmp_path / "cut", lanes=3)
    for name in ("selection.json", "journal.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# Goals and layouts

CHEAP: dict[str, Any] = {"layout": "free", "measure": False, "evaluation_batches": 2, "calibration_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["keep_params", "keep_flops"])
@pytest.mark.parametrize("method", ["ucb", "greedy", "auto", "magnitude"])
@pytest.mark.parametrize("task", ["text", "image"])
def test_a_goal_is_met_by_the_checkpoint(what: str, method: str, task: str, world: World, tmp_path: Path) -> None:
    settings = CHEAP | {"method": method, "target": "both", what: 0.8}
    result = prune(world, task, out=tmp_path, **settings)
    goal = result.selection.goal
    assert goal is not None
    assert (goal.what, goal.asked) == ({"keep_params": "parameters", "keep_flops": "FLOPs"}[what], 0.8)
    assert 0.6 < goal.got <= 0.8
    assert result.record.judgement.goal == goal
    assert result.cut is not None and result.cut.goal == goal
    if what == "keep_params":
        assert result.cut.params / result.cut.dense_params == goal.got


@pytest.mark.parametrize("what", ["params", "flops", "latency"])
@pytest.mark.usefixtures("table_clock")
def test_the_old_name_of_a_goal_warns_the_caller_and_chooses_the_same(what: str, world: World, tmp_path: Path) -> None:
    present: dict[str, Any] = {f"keep_{what}": 0.85}
    former: dict[str, Any] = {f"target_{what}": 0.85}
    new = prune(world, target="mlp", out=tmp_path / "new", **present)
    (tmp_path / "old").mkdir()
    if what == "latency":  # the table of this machine is the same one
        (tmp_path / "old" / "latency.json").write_bytes((tmp_path / "new" / "latency.json").read_bytes())
    with pytest.warns(FutureWarning, match=f"keep_{what}") as warned:
        old = prune(world, target="mlp", out=tmp_path / "old", **former)
    assert [warning.filename for warning in warned] == [__file__]
    assert old.selection == new.selection
    settings = json.loads((tmp_path / "old" / "selection.json").read_text())["settings"]
    assert settings[f"target_{what}"] == 0.85 and f"keep_{what}" not in settings


def test_a_latency_table_is_kept_so_that_a_stopped_run_ends_with_the_same_files(
    table_clock: list[int], world: World, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"target": "mlp", "keep_latency": 0.85}
    prune(world, out=tmp_path / "whole", **settings)
    table_clock.clear()
    with pytest.raises(KeyboardInterrupt):
        prune(world, out=tmp_path / "cut", watcher=Stopping(), **settings)
    assert len(table_clock) == 3
    table = (tmp_path / "cut" / "latency.json").read_bytes()
    prune(world, out=tmp_path / "cut", **settings)
    assert len(table_clock) == 3
    assert (tmp_path / "cut" / "latency.json").read_bytes() == table
    for name in ("selection.json", "journal.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_after_an_unreachable_latency_the_advice_to_let_more_kinds_go_can_be_followed_in_the_same_place(
    table_clock: list[int], world: World, tmp_path: Path
) -> None:
    with pytest.raises(sc.SettingError, match="--target"):
        prune(world, out=tmp_path, keep_latency=0.05)
    prune(world, out=tmp_path, keep_latency=0.8, target="both")


def test_a_latency_table_of_another_model_is_not_used(table_clock: list[int], world: World, tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError, match="--target"):
        prune(world, out=tmp_path, keep_latency=0.05)
    table_clock.clear()
    try:
        prune(world, "image", out=tmp_path, keep_latency=0.9)
    except sc.OutputError:
        return
    assert table_clock


@pytest.mark.parametrize(
    "goals",
    [
        {"keep_params": 0.8, "keep_flops": 0.8},
        {"keep_params": 0.8, "keep_flops": 0.8, "keep_latency": 0.5},
        {"keep_params": 1.0},
        {"keep_flops": -0.1},
        {"keep_latency": math.nan},
        {"layout": "freee"},
        {"repair": "least square", "layout": "free"},
        {"max_shard_size": "large", "layout": "free"},
    ],
    ids=str,
)
def test_goals_and_layouts_that_cannot_work_are_refused_before_the_model_is_read(goals: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(sc.SettingError):
        sc.prune(str(tmp_path / "no model"), out=tmp_path / "out", **small(goals))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["ucb", "magnitude"])
@pytest.mark.parametrize("task", ["text", "image"])
def test_a_uniform_prune_is_read_by_a_stock_loader(method: str, task: str, world: World, tmp_path: Path) -> None:
    result = prune(world, task, out=tmp_path, **SMALL | CHEAP | {"layout": "uniform", "target": "mlp", "method": method})
    assert result.cut is not None and result.cut.layout == "uniform"
    assert sorted(unit.layer for unit in result.selection.units) == [0, 1, 2]
    auto = tf.AutoModelForCausalLM if task == "text" else tf.AutoModelForImageClassification
    assert sum(parameter.numel() for parameter in auto.from_pretrained(tmp_path).parameters()) == result.cut.params


def test_a_uniform_cut_of_heads_that_no_config_can_say_is_refused_before_the_search(world: World, tmp_path: Path) -> None:
    listener = Listener()
    with pytest.raises(sc.SelectionError, match="--layout free"):
        prune(world, out=tmp_path / "out", **SMALL | {"layout": "uniform"}, watcher=listener)
    assert listener.pulls == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("broken", ["too few batches", "another cut"])
def test_what_cannot_be_written_in_the_end_is_refused_before_the_search(broken: str, world: World, tmp_path: Path) -> None:
    settings = SMALL | CHEAP
    if broken == "too few batches":
        settings |= {"repair": "auto", "calibration_size": 4, "batches_per_pull": 1}
    else:
        prune(world, out=tmp_path / "first", **settings)
        (tmp_path / "out").mkdir()
        for path in (tmp_path / "first").iterdir():
            if path.name not in FILES:  # as `shrink` leaves it
                path.rename(tmp_path / "out" / path.name)
        settings |= {"seed": 7, "method": "random"}
    listener = Listener()
    with pytest.raises(sc.SecateurError, match=r"\b2 batches|another cut"):
        prune(world, out=tmp_path / "out", watcher=listener, **settings)
    assert listener.pulls == [] and listener.evaluations == []
    assert not (tmp_path / "out" / "selection.json").exists()
