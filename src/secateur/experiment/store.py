"""The store: a folder whose results.jsonl has a line for every run that ended, and whose plans say which runs there are to be.

Lines are only ever appended, by one writer at a time. A run that was tried again has two lines, and the later counts. A torn
last line (the process died while writing it) is cut off. Every record carries a digest of itself, so that one edited by hand
is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from secateur import jsonio
from secateur.errors import StoreError
from secateur.lines import Lines

FORMAT = 1  # of a record and of a plan
RECORDS, PLANS = "results.jsonl", "plans"

Record = dict[str, Any]


class Store:
    """The one writer of a store.

    >>> with Store(Path("results")) as store:
    ...     store.append(record)
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda sentence: None) -> None:
        self.folder = folder
        busy = f"Another grid is writing to {folder} right now; wait for it, or choose another store with -o."
        self._lines = Lines(folder / RECORDS, busy)
        try:
            lines, torn = self._lines.read()
            self.records = _parse(self._lines.path, lines)
            if torn:
                self._lines.drop(torn)
                say(f"The last line of {self._lines.path} was torn and has been dropped; its run is done again.")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()

    def append(self, record: Record) -> None:
        """Write a record down for good, as the last word on its run."""
        whole = sealed(record)
        self._lines.append([whole], sync=True)
        self.records[whole["key"]] = whole

    def keep_plan(self, plan: dict[str, Any]) -> None:
        """Remember which runs a grid consists of, in place of what was remembered of a grid of this name."""
        text = jsonio.dumps({"format": FORMAT, **plan}, indent=1) + "\n"
        jsonio.write_text(self.folder / PLANS / f"{plan['grid']}.json", text)


def sealed(record: Record) -> Record:
    """The record as its line says it, with the digest of the rest."""
    fields = {name: value for name, value in jsonio.to_json({"format": FORMAT, **record}).items() if name != "digest"}
    return fields | {"digest": jsonio.fingerprint(fields)}


def read_store(folder: Path, say: Callable[[str], None] = lambda sentence: None) -> tuple[dict[str, Record], list[Record]]:
    """A store's records by their keys, and its plans by their names; reads beside a grid that is writing."""
    try:
        data = (folder / RECORDS).read_bytes()
        paths = sorted((folder / PLANS).glob("*.json"))
        plans = [_checked_plan(path, path.read_text(encoding="utf-8")) for path in paths]
    except FileNotFoundError as error:
        raise StoreError(
            f"There is no store at {folder}: no {RECORDS} is there; `secateur grid FILE -o {folder}` makes one."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"Cannot read the store {folder}: {getattr(error, 'strerror', None) or error}.") from error
    *lines, torn = data.split(b"\n")
    records = _parse(folder / RECORDS, lines)
    if torn:
        say(f"The last line of {folder / RECORDS} is torn and was left out.")
    return records, plans


def _parse(path: Path, lines: list[bytes]) -> dict[str, Record]:
    """The records by their keys."""
    records = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            theirs, key = record["format"], record["key"]
            seal = record["digest"]
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"Line {number} of {path} is not a record of Secateur's, or is damaged; delete that line to have its run done "
                "again."
            ) from error
        if theirs != FORMAT:
            raise StoreError(
                f"Line {number} of {path} has format {theirs!r}, and this version of Secateur reads {FORMAT}; use the version "
                "that wrote it, or another store."
            )
        if sealed(record)["digest"] != seal:
            raise StoreError(
                f"Line {number} of {path} was edited: it no longer agrees with its digest. Put back what it was, or delete the "
                "line to have its run done again."
            )
        records[key] = record
    return records


def _checked_plan(path: Path, text: str) -> Record:
    try:
        plan = json.loads(text)
        version, _, _ = plan["format"], plan["grid"], plan["tables"]
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{path} is not a plan of Secateur's, or is damaged; run its grid again to write it anew.") from error
    if version != FORMAT:
        raise StoreError(f"{path} has format {version!r}, and this version of Secateur reads {FORMAT}; run its grid again.")
    return dict(plan)
