"""README and docs say what is so: links lead somewhere, commands parse, Python code and docstrings' examples run."""

from __future__ import annotations

import contextlib
import copy
import doctest
import functools
import inspect
import io
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from reference_pages import DOCS, PAGES, ROOMS, TABLES, files_page

import secateur as sc
from secateur import steps
from secateur.cli.app import make_app
from secateur.cli.config import read_config
from secateur.experiment.grid import read_grid
from secateur.methods import BANDIT, Look
from secateur.settings import keywords, make_job
from tiny import randomised, tf, tiny_tokenizer
from worlds import ROOT, Encoders, World

WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
names = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code in a language, without the spaces before a block in a list."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [inspect.cleandoc(code) for _, said, code in found if said == language]


# Links


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*WRITTEN, *OTHERS], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            lost.append(target)
    assert lost == []


def test_every_page_is_in_the_list_of_pages() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in sorted(DOCS.glob("*.md")) if page.name != "index.md" and f"({page.name}" not in index] == []


# The reference


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_made_from_the_code(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run python scripts/reference_pages.py"


def test_every_public_name_is_in_the_reference_once() -> None:
    headings = re.findall(r"^### (.*)$", (DOCS / "python.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(sc.__all__) and set(TABLES) < set(sc.__all__) and len(ROOMS) > 1


# Commands

COMMANDS = typer.main.get_command(make_app())
FOREIGN = {"ray", "vllm", "lm_eval", "llama.cpp/build/bin/llama-cli", "source", "export"}  # programs of others
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands(page: Path) -> list[list[str]]:
    """The commands of a page, each as its words; a line may hold two, with a semicolon between them."""
    lines = "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    words = [shlex.split(part, comments=True) for line in lines for part in line.split(" ;  ")]
    return [command for command in words if command]


def check_secateur(words: list[str]) -> None:
    """The command line takes the words, and the settings among them can work."""
    root: Any = COMMANDS
    if words[0].startswith("-"):
        assert words[0] in {name for option in root.params for name in option.opts}
        return
    context = root.commands[words[0]].make_context(words[0], words[1:])
    typed = {name: value for name, value in context.params.items() if value is not None and _typed(context, name)}
    settings = {name: value for name, value in typed.items() if name in keywords() and name not in ("repair", "cache_memory")}
    if typed.get("repair"):
        settings["repair"] = "auto"
    if words[0] in ("prune", "select", "shrink", "evaluate"):
        make_job(typed["model"], **settings)


def _typed(context: Any, name: str) -> bool:
    return bool(context.get_parameter_source(name).name != "DEFAULT")


def check_script(words: list[str]) -> None:
    """The script is there, and knows the options."""
    if words[0] in ("-c", "-m") or words[0].startswith("llama.cpp/"):
        return
    text = (ROOT / words[0]).read_text(encoding="utf-8")
    assert [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in text] == []


def check_command(words: list[str]) -> None:
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "secateur":
        check_secateur(rest)
    elif program == "torchrun":
        assert rest[rest.index("-m") + 1] == "secateur"
        check_secateur(rest[rest.index("-m") + 2 :])
    elif program == "python":
        check_script(rest)
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS
    elif program == "pip":
        asked = [extra for word in rest for part in re.findall(r"\[(.*)\]", word) for extra in part.split(",")]
        assert rest[0] == "install" and set(asked) <= set(EXTRAS)
    else:
        assert program in FOREIGN, f"{' '.join(words)} is no command: a block of what a command prints is marked text"


@names
def test_commands_on_a_page_are_such_as_the_programs_take(page: Path) -> None:
    for words in commands(page):
        try:
            check_command(words)
        except Exception as error:
            pytest.fail(f"{shlex.join(words)}: {error}")


@pytest.mark.parametrize(
    "words",
    ["secateur prune M --ration 1 -o o", "secateur prune M --target hat -o o", "make tea", "pip install '.[tea]'", "tea"],
)
def test_a_command_that_cannot_work_would_be_noticed(words: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check_command(shlex.split(words))


# Python code

QUICK = {"budget": "24forwards", "calibration_size": 32, "evaluation_batches": 2, "measure": False}
ELSEWHERE = {"deploy.md": "tests/test_deploy.py"}  # pages whose code other tests run
SNIPPETS = [
    pytest.param(page, i, id=f"{page.name}-{i}", marks=[pytest.mark.slow] if page.name == "checkpoint.md" else [])
    for page in WRITTEN
    if page.name not in ELSEWHERE
    for i in range(len(blocks(page, "python")))
]


@pytest.fixture(scope="module")
def desk(world: World, encoders: Encoders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the names that the pages use are folders of tiny models and data."""
    root, tokenizer = tmp_path_factory.mktemp("desk"), tiny_tokenizer()
    tokenizer.pad_token = "<s>"
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = tf.LlamaConfig(vocab_size=1024, intermediate_size=320, max_position_embeddings=256, **sizes)
    model: Any = randomised(tf.LlamaForCausalLM(config))
    for name in ("gpt2", "HuggingFaceTB/SmolLM2-135M"):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    shutil.copytree(world.image_model, root / "google" / "vit-base-patch16-224")
    shutil.copytree(encoders.masked, root / "bert-base-uncased")
    shutil.copytree(world.images, root / "images")
    for name in ("wikitext2", "lambada"):
        rng = np.random.default_rng(len(name))
        (root / name).mkdir()
        for split in ("train", "test"):
            words = rng.choice(["the", "cat", "a", "tree", "cuts"], 6000)
            (root / name / f"{split}.txt").write_text("\n\n".join(" ".join(words[i : i + 60]) for i in range(0, 6000, 60)))
    return root


def quick(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with small budgets, unless it is given others."""

    @functools.wraps(function)
    def called(*given: Any, **settings: Any) -> Any:
        return function(*given, **QUICK | settings)

    return called


@pytest.fixture
def here(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the desk's names; `prune` and `forecast_of` have small budgets."""
    for path in desk.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name in ("prune", "forecast_of"):
        monkeypatch.setattr(sc, name, quick(getattr(sc, name)))
    monkeypatch.setattr(steps, "peak_memory", lambda *given, **settings: 1)  # which starts processes
    monkeypatch.setattr(sc, "FAMILIES", dict(sc.FAMILIES))
    return tmp_path


def at_hand() -> dict[str, Any]:
    """What stands for the reader's own things."""
    opened = sc.open_model("gpt2")
    calibration, evaluation = (
        sc.text_batches("wikitext2", opened.processor, split=split, limit=limit, seq_len=64)
        for split, limit in (("train", 64), ("test", 8))
    )
    units = sc.candidate_units(opened.model, target="head")
    meter = sc.DamageMeter(opened.model, calibration, lanes=1)
    selection = sc.select(meter, units, policy=sc.UCB(), ratio=0.1, pulls_per_step=8)
    small = sc.shrink(opened.model, selection.units)
    public = {name: getattr(sc, name) for name in sc.__all__}
    mine = {"opened": opened, "model": opened.model, "tokenizer": opened.processor, "small": small, "Path": Path}
    data = {"calibration": calibration, "evaluation": evaluation, "batches": calibration}
    return public | mine | data | {"units": units, "meter": sc.DamageMeter(opened.model, calibration), "selection": selection}


def cut_small(given: dict[str, Any]) -> None:
    """A cut of the reader's model, in the folder `small`."""
    without_timing = sc.Cutting(measure=False)
    sc.cut(given["opened"], given["selection"], "small", calibration=given["calibration"], cutting=without_timing)


class Scored(tf.LlamaForCausalLM):  # type: ignore[misc]
    """A model of the reader's own: it gives a score for each text."""

    def forward(self, *given: Any, **inputs: Any) -> Any:
        return SimpleNamespace(score=super().forward(*given, **inputs).logits.mean((1, 2)))


def prepared(page: Path, number: int) -> dict[str, Any]:
    """What the code on a page finds, beside the desk."""
    if page.name == "encoders.md":
        model = Scored.from_pretrained("gpt2").eval()
        rows = [torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(4)]
        return {"sc": sc, "model": model, "batches": [{"inputs": {"input_ids": ids}, "wanted": torch.ones(2)} for ids in rows]}
    if page.name in ("checkpoint.md", "classifier.md", "tutorial.md"):
        opened = sc.open_model("gpt2")
        kind, layers = ("kv_group", 3) if page.name == "tutorial.md" else ("head", 1)  # the tutorial's layers are alike
        small = sc.shrink(opened.model, [sc.Unit(kind, layer, 0) for layer in range(layers)])
        sc.save_shrunk(small, "small", processor=opened.processor)
    if page.name == "heal.md":
        given = at_hand()
        sc.cut(
            given["opened"], given["selection"], "small", calibration=given["calibration"], cutting=sc.Cutting(measure=False)
        )
    if page.name == "checkpoint.md":
        (page_yaml,) = blocks(page, "yaml")
        Path("tasks").mkdir()
        Path("tasks/last_words.yaml").write_text(page_yaml)
        Path("passages.jsonl").write_text('{"text": "the cat cuts the tree"}\n' * 2)
    return {"Family": sc.Family, "Method": sc.Method, "BANDIT": BANDIT, "Look": Look, "EpsilonGreedy": sc.Greedy}


@pytest.mark.parametrize(("page", "number"), SNIPPETS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("here")
def test_python_code_on_a_page_runs(page: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, names = blocks(page, "python")[number], prepared(page, number)
    row = re.match(r'"(\w+)": \w+\(', code)
    if row:  # a row of a table
        made = eval("{" + code + "}", names)[row[1]]
        assert isinstance(made, (sc.Family, sc.Method))
        assert page.name != "add-a-family.md" or made == sc.FAMILIES[row[1]]
        return
    exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    if "EpsilonGreedy" in code:
        given = at_hand()
        chosen = sc.select(given["meter"], given["units"], policy=names["EpsilonGreedy"](), ratio=0.1, pulls_per_step=8)
        assert len(chosen.units) == 1 and chosen.pulls == 8


@names
def test_python_code_of_pages_that_other_tests_run_is_python(page: Path) -> None:
    for code in blocks(page, "python") if page.name in ELSEWHERE else []:
        compile(code, page.name, "exec")
        assert Path(ROOT / ELSEWHERE[page.name]).exists()


def test_settings_and_grids_on_the_pages_are_read(tmp_path: Path) -> None:
    (settings,) = blocks(DOCS / "settings.md", "toml")
    (grid,) = blocks(DOCS / "experiments.md", "toml")
    for name, text in (("settings.toml", settings), ("grid.toml", grid)):
        (tmp_path / name).write_text(text)
    assert read_config(tmp_path / "settings.toml", keywords())["ratio"] == 0.2
    assert len(read_grid(tmp_path / "grid.toml").runs) > 0


# Examples in docstrings

DESCRIBED = [name for name in sc.__all__ if name not in TABLES]


def is_error(it: Any) -> bool:
    return inspect.isclass(it) and issubclass(it, sc.SecateurError) and it is not sc.SecateurError


@pytest.fixture(scope="module")
def given(desk: Path) -> Iterator[dict[str, Any]]:
    with contextlib.chdir(desk):
        yield at_hand()


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_public_name_has_a_docstring_whose_example_runs(name: str, given: dict[str, Any], here: Path) -> None:
    it = getattr(sc, name)
    said = inspect.getdoc(it) or ""
    assert said[:1].isupper() or said.startswith(("exp ", "P_")), said
    examples = doctest.DocTestParser().get_examples(said)
    assert bool(examples) != is_error(it)
    names = given | {name: getattr(sc, name) for name in sc.__all__}
    names |= {
        "meter": sc.DamageMeter(given["model"], given["calibration"], batches_per_pull=1),
        "batch": given["calibration"][0],
        "small": copy.deepcopy(given["small"]),  # an example may heal it
        "settings": {},
    }
    if name == "heal_to":
        sc.cut(
            given["opened"], given["selection"], "small", calibration=given["calibration"], cutting=sc.Cutting(measure=False)
        )
    if name in ("curves_of", "map_of", "write_report", "Picture"):
        Path("out").mkdir()
        given["selection"].save("out/selection.json")
    if name in ("evaluate_on", "shrink_to"):
        given["selection"].save("sel.json")
    if name in ("compare_models", "load_shrunk"):
        sc.save_shrunk(given["small"], "small", processor=given["tokenizer"])
    for example in examples:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(compile(example.source, name, "single"), names)
        assert not example.want or shown.getvalue() == example.want


def test_the_page_of_files_has_every_key_that_prune_writes(here: Path) -> None:
    result = sc.prune("gpt2", ratio=0.1, calibration="wikitext2", repair="auto", out="out")
    assert result.cut
    listed = set(re.findall(r"`(\w+)`", files_page()))
    for document in (result.selection.to_json(), result.record.to_json(), result.cut.to_json()):
        assert set(document) - listed == set()
