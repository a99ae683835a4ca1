"""HTML from plain values, up to a whole page: what is not HTML already is escaped, so that a name cannot become a tag."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

VOID = ("br", "col", "img", "meta")
HERE = Path(__file__).parent
POLICY = "default-src 'none'; base-uri 'none'; img-src data:; style-src 'unsafe-inline'"
MARK = '<meta name="generator" content="Secateur">'  # in page.html: by it a report is known for ours


class Html(str):
    """Text that is HTML already."""


def escaped(value: object) -> Html:
    """The value as HTML: as it is if it is HTML already, else as text."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def joined(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(escaped(part) for part in parts))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element. An attribute that is None or False is left out; `_` stands for `-`, and `class_` for class.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            shown = key.rstrip("_").replace("_", "-")
            words.append(shown if value is True else f'{shown}="{escaped(_plain(value))}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if name in VOID else f"{opening}{joined(children)}</{name}>")


def _plain(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) and math.isfinite(value) else value


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str, sortable: bool = False) -> Html:
    """A table that scrolls in a box of its own where the page is narrow; the first cell of a row is its heading."""
    heads = [tag("th", tag("button", name, type="button") if sortable and name else name, scope="col") for name in columns]
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *body),
        class_="sortable" if sortable else None,
    )
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def details(summary: str, *children: object) -> Html:
    return tag("details", tag("summary", summary), *children)


def figure(title: str, picture: object, *more: object, note: object = "") -> Html:
    """A picture under its title, with what is said and listed about it below."""
    said = tag("p", note, class_="note") if note else ""
    return tag("figure", tag("figcaption", title), picture, said, *more)


def number(value: float | None, digits: int = 4, *, sign: bool = False) -> str:
    """A number as people read it: so many significant digits, thousands apart; "–" for none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    text = f"{value:,.{max(0, digits - 1 - size)}f}" if -5 <= size < 9 else f"{value:.{digits - 1}e}"
    return ("+" if sign and value > 0 else "") + text.replace("-", "−", 1)


def between(low: float, high: float, digits: int = 4, *, sign: bool = False) -> str:
    return f"{number(low, digits, sign=sign)} to {number(high, digits, sign=sign)}"


def count(n: int, one: str, many: str = "") -> str:
    """A number of things in words: "1 unit", "2,000 units"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


# Pages and pictures


def page(title: str, head: Html, sections: Sequence[tuple[str, str, Html]]) -> str:
    """A whole page: its head, and sections of (anchor, heading, content), those without content left out."""
    shown = [(anchor, heading, content) for anchor, heading, content in sections if content]
    links = [tag("a", heading, href=f"#{anchor}") for anchor, heading, _ in shown]
    body = [tag("section", tag("h2", heading), content, id=anchor) for anchor, heading, content in shown]
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "policy": f"{POLICY}; script-src 'sha256-{digest}'",
        "title": escaped(title),
        "style": _asset("figure.css") + _asset("page.css"),
        "links": joined(links),
        "head": head,
        "body": joined(body),
        "script": script,
    }
    text = _asset("page.html")
    for name, value in parts.items():
        before, _, after = text.partition(f"<!--{name}-->")
        text = before + value + after
    return text


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Picture:
    """Something to look at: a notebook shows it, and `html` is what it shows.

    >>> len(map_of(Selection.load("out/selection.json")).html)
    """

    html: str

    def _repr_html_(self) -> str:
        return self.html


def picture(*parts: object) -> Picture:
    """A picture with the style it needs, for a notebook."""
    return Picture(tag("div", Html(f"<style>{_asset('figure.css')}</style>"), *parts, class_="secateur"))
