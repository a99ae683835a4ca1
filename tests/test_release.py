"""What is released: a wheel with the package and nothing else, a site that fetches nothing, and files that agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import secateur as sc
from worlds import ROOT

SOURCE = Path(sc.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def ran(*command: object, **settings: Any) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, **settings)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.mark.slow
def test_the_wheel_of_the_source_archive_holds_the_package_and_its_data_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="no build: pip install 'secateur[dev]'")
    ran("-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    (wheel,) = tmp_path.glob("*.whl")
    assert archive.name == f"secateur-{PROJECT['version']}.tar.gz" and wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        held = {name for name in files.namelist() if ".dist-info/" not in name}
        files.extractall(tmp_path / "installed")
    here = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert held == {path.relative_to(SOURCE.parent).as_posix() for path in here} and "secateur/py.typed" in held
    environment = {"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""}
    assert ran("-m", "secateur", "--version", cwd=tmp_path, env=environment) == f"secateur {PROJECT['version']}\n"
    found = ran("-c", "import secateur; print(secateur.METHODS['ucb'].label, secateur.__file__)", cwd=tmp_path, env=environment)
    assert found.split() == ["MAB-UCB", str(tmp_path / "installed" / "secateur" / "__init__.py")]


def test_the_files_of_a_release_agree() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(PROJECT['version'])}\]", changes, re.MULTILINE)
    assert [line for line in _lines_of_source() if f'"{PROJECT["version"]}"' in line] == []  # the version has one place
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = [name for names in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) for name in names]
    assert {re.split(r"[\[<>=]", name)[0] for name in wanted} <= pinned


def _lines_of_source() -> list[str]:
    return [line for path in SOURCE.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_citation_names_the_paper_and_the_workflow_runs_what_a_change_must_pass() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["preferred-citation"]["title"] in (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    assert [author["family-names"] for author in cited["preferred-citation"]["authors"]] == ["Ameen", "Vadera"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert "bash .ci/run" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    for form in ("bug", "feature"):
        fields = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(fields)
    assert '["make", "demo"]' in (ROOT / "Dockerfile").read_text(encoding="utf-8")


class Fetched(HTMLParser):
    """What a browser would fetch from elsewhere to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            leads = tag in ("a", "form") or (tag == "link" and ("rel", "canonical") in attrs)
            if name in ("src", "srcset", "href", "data", "poster") and not leads and re.match(r"(https?:)?//", value or ""):
                self.places.append(f"{tag} {value}")


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="no mkdocs-material: pip install 'secateur[docs]'")
    ran("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site", cwd=ROOT)
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    reader = Fetched()
    for page in pages:
        reader.feed(page.read_text(encoding="utf-8"))
    assert reader.places == []
    styles = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.css"))
    assert styles and re.findall(r"(?:url\(|@import)\s*[\"']?https?:", styles) == []
