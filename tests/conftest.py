"""Fixtures that several test files use.

`tiny` has models, `worlds` has folders with models and data, `fakes` has meters, `grids` and `stores` are for experiments.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from secateur.half import HALF, prepare_half

# Some processors show AMX but forbid it: a product in half precision would end the process. Others need no trial.
if "amx" in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""):
    for dtype in HALF:
        prepare_half(dtype)

from secateur.model.loading import mend_torchvision

mend_torchvision()  # before any test module imports transformers or timm

import transformers  # noqa: E402

from secateur.cli import app  # noqa: E402
from secateur.cut import costs  # noqa: E402
from secateur.experiment import work  # noqa: E402
from secateur.experiment.store import Table  # noqa: E402
from secateur.model.accounting import total_parameters  # noqa: E402
from secateur.model.loading import load  # noqa: E402
from stores import image_store, text_store  # noqa: E402
from tiny import SMOLLM2  # noqa: E402
from worlds import Encoders, Ran, Run, World, make_encoders, make_world  # noqa: E402

tf: Any = transformers  # its classes are not typed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, so that at the end no worker waits for another."""
    items.sort(key=lambda item: item.path.name != "test_real.py")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Read only: no test writes into it."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def encoders(world: World, tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    """Read only, too."""
    return make_encoders(tmp_path_factory.mktemp("encoders"), world)


@pytest.fixture(scope="session")
def text_tables(tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    """Tables 4, 6 and 7 of stores with the paper's numbers."""
    return text_store(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def image_tables(tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    """Tables 8 and 9 of stores with the paper's numbers."""
    return image_store(tmp_path_factory.mktemp("image"))


@pytest.fixture
def fresh_workplace() -> Iterator[None]:
    """The tasks of a grid begin with no model at hand, and leave none."""
    work.forget()
    yield
    work.forget()


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M with its tokenizer, for tests that `needs_smollm2` marks; they leave it as it was."""
    return load(str(SMOLLM2), device="cpu")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No try to reach the hub, which takes some twenty seconds to fail where there is no network."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def table_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine whose time is a little less each time that a latency table asks; how often it was asked."""
    asked: list[int] = []

    def measure(model: Any, small: Any, **settings: Any) -> Any:
        asked.append(1)
        ratio = total_parameters(model) / total_parameters(small)
        timing = SimpleNamespace(flop_ratio=ratio, speedup=SimpleNamespace(value=ratio * (1 + 0.01 * len(asked))))
        return SimpleNamespace(timings=[timing])

    monkeypatch.setattr(costs, "measure", measure)
    return asked


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in this process, and puts back what `main` changes of the process."""
    for name, value in {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", sys.argv)
    verbosity, terminate = tf.logging.get_verbosity(), signal.getsignal(signal.SIGTERM)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["secateur", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            app.main()
        return Ran(exit.value.code, *capsys.readouterr())

    yield call
    tf.logging.set_verbosity(verbosity)
    signal.signal(signal.SIGTERM, terminate)
