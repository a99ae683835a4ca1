"""What mkdocs.yml asks for: pages may link to files beside docs/, which the site then holds under `repository/`.

A page says `[repair.py](../src/secateur/cut/repair.py)`, which is right for whoever reads it in the repository. The site has
only what is in docs/, so each such file is added to it, and the link leads there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
BESIDE = "repository"
TARGET = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)")  # of a link or picture, without the part after #


def on_files(files: Files, config: Any) -> Files:
    """Add the files beside docs/ that pages link to, and those that these link to."""
    waiting = [(file.src_uri, Path(file.abs_src_path)) for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        uri, path = waiting.pop()
        for target in TARGET.findall(path.read_text(encoding="utf-8")):
            name = _of_root(uri, target)
            place = ROOT / name
            added = f"{BESIDE}/{name}"
            if name.startswith("docs/") or not place.is_file() or files.get_file_from_path(added):
                continue
            inclusion = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, added, abs_src_path=str(place), inclusion=inclusion))
            if place.suffix == ".md":
                waiting.append((added, place))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links to files beside docs/ as the site has them."""
    uri = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        name = _of_root(uri, found[1])
        there = name.removeprefix("docs/") if name.startswith("docs/") else f"{BESIDE}/{name}"
        return posixpath.relpath(there, posixpath.dirname(uri) or ".")

    return TARGET.sub(moved, markdown)


def _of_root(uri: str, target: str) -> str:
    """The path of a link's target from the root of the repository; `uri` is the page's place in the site."""
    page = uri.removeprefix(f"{BESIDE}/") if uri.startswith(f"{BESIDE}/") else f"docs/{uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
