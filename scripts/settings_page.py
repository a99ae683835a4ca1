"""Writes docs/settings.md from settings.py and methods.py: `python scripts/settings_page.py`. A test holds the page to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from secateur.experiment.grid import grid_settings
from secateur.methods import METHODS, Method
from secateur.settings import SECTIONS, keywords

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings and methods

This page is written by `python scripts/settings_page.py` from `src/secateur/settings.py` and `src/secateur/methods.py`.

A setting has one name everywhere: `--pulls-per-step` on the command line is `pulls_per_step` in a grid file and a keyword of
`secateur.prune`. Those marked "grid" may stand under `[settings]` of a grid; target, ratios, methods, seeds and data have
keys of their own there. Two differ: `cache_memory` is in GiB on the command line and in bytes in Python, and `repair` is a form
(`least squares`, `bias`, `auto`) in Python and the two options `--repair` and `--repair-form` on the command line.

`--config FILE.toml` of `prune`, `select`, `evaluate`, `shrink` and `heal` takes a flat table of the command's settings by these
names, with underscores or hyphens; what is typed wins over it. There `cache_memory` is in GiB, `repair` is true, false or a
form, and paths start at the working directory:

```toml
ratio = 0.2
target = "kv_group+mlp"
calibration = "wikitext2"
batch-size = 8
repair = "auto"
```

The old names `--target-params`, `--target-flops` and `--target-latency` still work, with a note.
"""
METHODS_HEAD = """
## Methods

A bandit is compared with all the others. A method that depends on the seed is run for every seed of a grid; the others choose
once. Calibration images are drawn by seed, so there every method that looks at them depends on it. Every scoring method can
also screen (`--screen-by`).
"""


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for section in SECTIONS:
        fields = [(name, field) for name, (_, field) in keywords().items() if field.metadata["section"] == section]
        rows = [
            [f"`{name}`", _default(field.default), "yes" if name in grid_settings() else "", _help(field)]
            for name, field in fields
        ]
        parts.append(f"\n## {section}\n\n{table(['Setting', 'Default', 'Grid', 'What it does'], rows)}")
    rows = [[f"`{name}`", row.label, _how(row), row.role, _seeds(row), row.help] for name, row in METHODS.items()]
    titles = ["Method", "In tables", "Chooses by", "Role", "Depends on the seed for", "What it does"]
    return "".join([*parts, METHODS_HEAD, "\n", table(titles, rows)])


def _help(field: Any) -> str:
    text = field.metadata["help"]
    return str(text() if callable(text) else text)


def _default(value: Any) -> str:
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _how(row: Method) -> str:
    return "measuring" if row.policy else f"a score of {row.needs}" if row.score else f"a set, by {row.needs}"


def _seeds(row: Method) -> str:
    return (
        ", ".join({"text": "texts", "image": "images"}[task] for task in ("text", "image") if row.depends_on_seed(task)) or "-"
    )


def table(titles: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ["---"] * len(titles), *rows))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
