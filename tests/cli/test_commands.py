from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import secateur as sc
from tiny import FAMILIES_TINY, GROUP
from worlds import FLAGS, N_UNITS, SEQ_LEN, K, Run, World, check_refused, contents, loaded, with_config

# units


def test_units_counts_a_known_model_without_its_weights(run: Run) -> None:
    document = run("units", "gpt2", "--json").document
    assert (document["candidates"], document["selected"], document["total_params"]) == (144, 14, 124439808)
    assert document["unit_ratio"] == pytest.approx(14 / 144)
    head = 4 * 768 * 64 + 3 * 64  # Eq. 12
    assert document["zeroed_percent"] == pytest.approx(100 * 14 * head / 124439808, abs=1e-4)
    assert [layer["params"] for layer in document["layers"]] == [12 * head] * 12


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "microsoft/swin-tiny-patch4-window7-224"])
def test_units_gives_a_range_where_units_differ_in_size(name: str, run: Run) -> None:
    document = run("units", name, "--json").document
    assert (document["candidates"], document["selected"], document["total_params"]) == (138, 14, 28288354)
    low, high = document["zeroed_percent"]
    first, second, last = (4 * width * 32 + 3 * 32 for width in (96, 192, 768))  # a head of each stage (Eq. 12)
    assert low == pytest.approx(100 * (6 * first + 8 * second) / 28288354, abs=1e-4)  # the first stage has 6 heads in all
    assert high == pytest.approx(100 * 14 * last / 28288354, abs=1e-4)


@pytest.mark.parametrize("target", ["head", "mlp", "both"])
def test_units_needs_only_the_config_of_a_folder(target: str, world: World, tmp_path: Path, run: Run) -> None:
    shutil.copy(world.text_model / "config.json", tmp_path)
    options = ["--target", target, "--group-width", GROUP, "--ratio", 0.3, "--json"]
    whole, bare = run("units", world.text_model, *options).document, run("units", tmp_path, *options).document
    assert whole | {"model": ""} == bare | {"model": ""}
    assert (bare["candidates"], bare["selected"]) == (N_UNITS[target], K[target])
    assert bare["total_params"] == sum(parameter.numel() for parameter in FAMILIES_TINY["gpt2"]().parameters())


def test_the_table_of_units_shows_its_numbers_whole_at_eighty_columns(run: Run) -> None:
    ran = run("units", "gpt2")
    assert ran.code == 0
    assert ran.out.count(f"{12 * (4 * 768 * 64 + 3 * 64):,}") == 12
    assert "…" not in ran.out


# evaluate


def test_evaluate_without_a_selection_gives_the_dense_model_alone(world: World, run: Run) -> None:
    ran = run("evaluate", world.text_model, "--data", world.text, "--seq-len", SEQ_LEN, "--json")
    model, _, evaluation = loaded(world, "text")
    assert ran.document["dense"]["perplexity"] == sc.perplexity(model, evaluation)
    assert "pruned" not in ran.document


def test_an_image_model_without_images_is_told_which_option_the_command_has(world: World, run: Run) -> None:
    sentence = check_refused(run("evaluate", world.image_model))
    assert "--data" in sentence and "--calibration" not in sentence


@pytest.fixture(scope="module")
def selection(world: World) -> dict[str, Any]:
    """The fields of a selection of the tiny text model."""
    opened = sc.open_model(str(world.text_model), device="cpu")
    settings = sc.Settings(opened.name, calibration=str(world.text), seq_len=SEQ_LEN, ratio=0.3, method="magnitude")
    chosen = sc.choose(opened, loaded(world, "text")[1], settings.for_task("text"))
    fields: dict[str, Any] = json.loads(json.dumps(chosen.to_json()))
    return fields


def head(layer: Any, index: Any, kind: str = "head") -> list[dict[str, Any]]:
    return [{"kind": kind, "layer": layer, "index": index}]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"units": head(0, 3)}, r"head 0\.3.*\b3\b.*heads"),
        ({"units": head(3, 0)}, r"head 3\.0.*\b3\b.*blocks"),
        ({"units": head(0, 1, "mlp")}, r"mlp 0\.1"),
        ({"units": head(-1, 0)}, r"sel\.json.*damaged"),
        ({"units": head(0.5, 0)}, r"sel\.json.*damaged"),
        ({"units": head(0, 0, "kv")}, r"sel\.json.*damaged"),
        ({"units": 5}, r"sel\.json.*damaged"),
        ({"settings": None}, r"sel\.json.*damaged"),
        ({"trace": [{}]}, r"sel\.json.*damaged"),
        ({"calibration": {"name": "text"}}, r"sel\.json.*damaged"),
        ({"calibration": {"name": "text", "split": "train", "files": None, "rows": None}}, r"sel\.json.*damaged"),
        ({"format": 2}, r"sel\.json.*format 2"),
    ],
    ids=str,
)
def test_a_selection_that_cannot_be_used_is_one_sentence(
    changed: dict[str, Any], said: str, selection: dict[str, Any], world: World, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "sel.json").write_text(json.dumps(selection | changed))
    judge = ["evaluate", world.text_model, "--selection", tmp_path / "sel.json", "--data", world.text, "--seq-len", SEQ_LEN]
    assert re.search(said, check_refused(run(*judge, "-o", tmp_path / "judged.json"), tmp_path / "judged.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", None], ids=repr)
def test_a_file_that_is_no_selection_is_one_sentence(content: bytes | None, world: World, tmp_path: Path, run: Run) -> None:
    if content is not None:
        (tmp_path / "sel.json").write_bytes(content)
    assert "sel.json" in check_refused(run("evaluate", world.text_model, "--selection", tmp_path / "sel.json"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_selection_for_another_model_is_refused(
    family: str, selection: dict[str, Any], world: World, tmp_path: Path, run: Run
) -> None:
    model: Any = FAMILIES_TINY[family]()
    with torch.no_grad():
        next(model.parameters()).mul_(2)  # so that it is another one even if it is of the same family
    model.save_pretrained(tmp_path / "other")
    for path in world.text_model.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "other")
    (tmp_path / "sel.json").write_text(json.dumps(selection))
    sentence = check_refused(run("evaluate", tmp_path / "other", "--selection", tmp_path / "sel.json", "--data", world.text))
    assert str(world.text_model) in sentence and str(tmp_path / "other") in sentence


def test_a_selection_is_not_judged_on_what_chose_it(selection: dict[str, Any], world: World, tmp_path: Path, run: Run) -> None:
    (tmp_path / "sel.json").write_text(json.dumps(selection))
    judge = ["evaluate", world.text_model, "--selection", tmp_path / "sel.json", "--data", world.text / "train.txt"]
    for length in (SEQ_LEN, SEQ_LEN - 3):  # other windows of the same file
        assert re.search(r"train\.txt.*chose", check_refused(run(*judge, "--seq-len", length)))


# shrink


@pytest.fixture(scope="module")
def cuts(world: World, selection: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A selection (sel.json) and the folder that `shrink` makes of it (small), which nobody changes."""
    place = tmp_path_factory.mktemp("cuts")
    (place / "sel.json").write_text(json.dumps(selection))
    opened = sc.open_model(str(world.text_model), device="cpu")
    chosen, calibration = sc.Selection.load(place / "sel.json"), loaded(world, "text")[1]
    sc.cut(opened, chosen, place / "small", calibration=calibration, cutting=sc.Cutting(measure=False))
    return place


def test_shrink_writes_what_it_shows_and_again_the_same(cuts: Path, world: World, tmp_path: Path, run: Run) -> None:
    command = ["shrink", world.text_model, "--selection", cuts / "sel.json", "-o", tmp_path / "small", "--no-measure"]
    shown = run(*command)
    assert (shown.code, shown.complaints) == (0, [])
    record = run(*command, "--json").document
    assert f"{record['params']:,} of {record['dense_params']:,} parameters" in shown.out
    before = contents(tmp_path)
    assert run(*command).out == shown.out
    assert contents(tmp_path) == before
    assert (tmp_path / "small" / "model.safetensors").read_bytes() == (cuts / "small" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"units": head(0, 3)}, r"head 0\.3"),
        ({"units": head(3, 0)}, r"head 3\.0"),
        ({"units": head(0, 1, "mlp")}, r"mlp 0\.1"),
        ({"units": head(0, 0, "kv")}, r"sel\.json.*damaged"),
        ({"units": []}, "empty"),
        ({"settings": {"model_digest": "00000000-00000000", "dtype": "float32"}}, "00000000-00000000"),
        ({"settings": {"seq_len": "x"}}, r"sel\.json.*seq_len"),
        ({"settings": {"calibration": 5}}, r"sel\.json.*calibration"),
        ({"settings": {"batch_size": "x"}}, r"sel\.json.*batch_size"),
        ({"settings": {"batch_size": 0}}, r"batch size.*\b0\b"),
    ],
    ids=str,
)
def test_shrink_refuses_a_selection_that_it_cannot_use(
    changed: dict[str, Any], said: str, selection: dict[str, Any], world: World, tmp_path: Path, run: Run
) -> None:
    settings = selection["settings"] | changed.get("settings", {})
    (tmp_path / "sel.json").write_text(json.dumps(selection | changed | {"settings": settings}))
    ran = run("shrink", world.text_model, "--selection", tmp_path / "sel.json", "-o", tmp_path / "out", "--no-measure")
    assert re.search(said, check_refused(ran, tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layout", "none"], "'none'.*free.*uniform"),
        (["--layout", "uniform"], "uniform"),
        (["--repair", "--repair-form", "x"], "'x'.*least-squares"),
        (["--max-shard-size", "abc"], "'abc'.*5GB"),
        (["--calibration", "/nowhere"], "/nowhere"),
        (["--dtype", "int8"], "int8"),
        (["--selection", "/nowhere/sel.json"], "/nowhere/sel.json"),
    ],
    ids=str,
)
def test_shrink_refuses_settings_that_cannot_work(
    options: list[str], said: str, cuts: Path, world: World, tmp_path: Path, run: Run
) -> None:
    command = ["shrink", world.text_model, "--selection", cuts / "sel.json", "-o", tmp_path / "out", "--no-measure", *options]
    assert re.search(said, check_refused(run(*command), tmp_path / "out"))


@pytest.mark.parametrize("there", ["model", "cut", "record", "file"])
def test_shrink_refuses_a_place_with_something_else(there: str, cuts: Path, world: World, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    if there == "file":
        out.write_text("mine")
    elif there == "record":
        out.mkdir()
        (out / "secateur.json").write_text("mine")
    else:
        shutil.copytree(world.text_model if there == "model" else cuts / "small", out)
    before = contents(tmp_path)
    fields = json.loads((cuts / "sel.json").read_text())
    (cuts / "other.json").write_text(json.dumps(fields | {"units": fields["units"][:1]}))
    ran = run("shrink", world.text_model, "--selection", cuts / "other.json", "-o", out, "--no-measure")
    assert str(out) in check_refused(ran)
    assert contents(tmp_path) == before


def test_a_selection_for_the_dense_model_is_not_cut_out_of_the_shrunk_one(cuts: Path, tmp_path: Path, run: Run) -> None:
    ran = run("shrink", cuts / "small", "--selection", cuts / "sel.json", "-o", tmp_path / "out", "--no-measure")
    assert str(cuts / "small") in check_refused(ran, tmp_path / "out")


# measure


def test_measure_shows_two_models_of_a_kind(cuts: Path, world: World, run: Run) -> None:
    command = ["measure", world.text_model, cuts / "small", "--no-memory", "--repeats", 3, "--tokens", 4, "--new-tokens", 2]
    found = run(*command, "--batch-size", 2, "--json").document
    assert found["small_params"] < found["dense_params"] and found["small_disk"] > 0
    assert {timing["batch_size"] for timing in found["timings"]} == {2}
    shown = run(*command)
    assert (shown.code, shown.complaints) == (0, [])
    assert f"{found['small_params']:,}" in shown.out and "3 repetitions" in shown.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["IMAGE"], "same task"),
        (["SMALL", "--repeats", 1], r"\b1\b.*at least 3"),
        (["SMALL", "--new-tokens", 16], r"\b16\b"),
        (["SMALL", "--batch-size", 0], r"batch size.*\b0\b"),
        (["SMALL", "--tokens", 0], r"tokens.*\b0\b"),
        (["SMALL", "--threads", -1], r"threads.*-1\b"),
        (["/nowhere"], "/nowhere"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_one_sentence(options: list[Any], said: str, cuts: Path, world: World, run: Run) -> None:
    small = {"IMAGE": world.image_model, "SMALL": cuts / "small"}.get(options[0], options[0])
    ran = run("measure", world.text_model, small, "--no-memory", "--new-tokens", 2, *options[1:])
    assert re.search(said, check_refused(ran))


# Checkpoints that somebody changed


@pytest.mark.parametrize("command", ["evaluate", "prune", "select", "units"])
@pytest.mark.parametrize("how", ["code", "counts", "shape", "weights"])
def test_a_tampered_cut_is_one_sentence_and_its_code_is_not_run(
    how: str, command: str, cuts: Path, world: World, tmp_path: Path, run: Run
) -> None:
    if command == "units" and how in ("shape", "weights"):
        pytest.skip("it reads no weights")
    folder = Path(shutil.copytree(cuts / "small", tmp_path / "model"))
    (folder / "modeling_shrunk.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    weights = folder / "model.safetensors"
    if how == "code":
        with_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    elif how == "counts":
        with_config(folder, secateur={"layers": [{"heads": -1}]})
    elif how == "shape":
        tensors = load_file(weights)
        tensors["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(3)
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(weights.read_bytes()[:-8])
    more = {
        "evaluate": ["--data", world.text, "--seq-len", SEQ_LEN, "-o", tmp_path / "out.json"],
        "prune": ["--calibration", world.text, *FLAGS, "-o", tmp_path / "out"],
        "select": ["--calibration", world.text, *FLAGS, "-o", tmp_path / "out.json"],
        "units": [],
    }[command]
    assert str(folder) in check_refused(run(command, folder, *more), tmp_path / "out", tmp_path / "out.json", tmp_path / "mark")
