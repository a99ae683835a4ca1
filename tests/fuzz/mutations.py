"""Mutations: a good file, spoilt by a seeded generator. Knows bytes, JSON and TOML, and nothing of Secateur."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

DEEP = "[" * 100_000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 1.5, -0.5, 1e308, -1e308, 2**31, 2**63, 10**400, float("nan"), float("inf"),
    "", "x", "nan", "0", "-1", "../x", "/dev/zero", "é", "\ud800", "\x00", "$\\frac{$", "[bold", "%s{}", "a" * 5000,
    [], {}, [[]], [None], ["x"], [0], {"": 0}, {"x": {}}, {"0": "x"},
)  # fmt: skip
TEXTS = (
    "",
    " ",
    "\n",
    "null",
    "0",
    '"x"',
    "[]",
    "{}",
    "{",
    DEEP,
    '{"a":' * 100_000,
    "nan",
    "9" * 5000,
    "\ufeff{}",
    "\x00" * 64,
)

Spoil = Callable[[bytes, random.Random], bytes]


def spoil_bytes(content: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, doubled or strange bytes."""
    way = rng.randrange(7)
    at = rng.randrange(len(content) + 1)
    if way == 0:
        return content[:at]
    if way == 1:
        return rng.choice(TEXTS).encode()
    if way == 2:
        return rng.randbytes(rng.choice((1, 8, 200)))
    if way == 3:
        return content[:at] + rng.randbytes(rng.choice((1, 4))) + content[at:]
    if way == 4:
        end = min(len(content), at + rng.choice((1, 16, 200)))
        return content[:at] + content[end:]
    if way == 5:
        return content + content[at:]
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 8))):
        if changed:
            where = rng.randrange(min(len(changed), rng.choice((16, len(changed)))))  # the beginning, as often as all
            changed[where] ^= 1 << rng.randrange(8)
    return bytes(changed)


def spoil_json(content: bytes, rng: random.Random) -> bytes:
    """A document with another value, a missing or another name somewhere; or spoilt bytes."""
    if rng.random() < 0.15:
        return spoil_bytes(content, rng)
    return json.dumps(spoil_value(json.loads(content), rng)).encode()


def spoil_lines(content: bytes, rng: random.Random) -> bytes:
    """JSON lines, one of them spoilt, twice there, missing, or exchanged with another."""
    lines = content.splitlines(keepends=True)
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.randrange(8)
    if way == 0:
        return spoil_bytes(content, rng)
    if way == 1:
        del lines[at]
    elif way == 2:
        lines.insert(at, lines[other])
    elif way == 3:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = spoil_json(lines[at].rstrip(b"\n"), rng) + b"\n"
    return b"".join(lines)


def spoil_toml(content: bytes, rng: random.Random) -> bytes:
    """A TOML file with a spoilt value; or spoilt bytes."""
    if rng.random() < 0.25:
        return spoil_bytes(content, rng)
    document = spoil_value(tomllib.loads(content.decode()), rng)
    if not isinstance(document, dict):
        return b"x = " + _toml(document).encode(errors="surrogatepass")
    return "".join(f"{_toml_name(name)} = {_toml(value)}\n" for name, value in document.items()).encode(errors="surrogatepass")


def spoil_value(document: Any, rng: random.Random) -> Any:
    """A copy of plain data with one change, or a few."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 3))):
        places = list(_places(document))
        if not places:
            return rng.choice(VALUES)
        parent, key = rng.choice(places)
        way = rng.randrange(8)
        if way == 0:
            del parent[key]
        elif way == 1:
            parent[key] = copy.deepcopy(rng.choice(places)[0])  # a part of the document itself
        elif way == 2 and isinstance(parent, dict):
            parent[rng.choice(("", "x", "é", f"{key}x", str(key).upper()))] = parent.pop(key)
        elif way == 3 and isinstance(parent[key], list | str):
            parent[key] = parent[key] * 2 if rng.random() < 0.5 else parent[key][: len(parent[key]) // 2]
        elif way == 4 and isinstance(parent[key], int | float):
            parent[key] = rng.choice((-1, 0, 10, 1e6, -1e-9)) * parent[key]
        elif way == 5:
            parent[key] = [parent[key]]
        else:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each value in plain data, as its parent and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_name(name)} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:
        return '""'  # TOML has no null
    return json.dumps(value, ensure_ascii=False).replace("Infinity", "inf").replace("NaN", "nan")


def _toml_name(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
