"""The journal: every pull is written to disk as it happens, so that a killed run, started again, reaches the same Selection.

One JSON object per line. The first line is written with the first pull and holds the run's settings; a journal with other
settings belongs to another run and is refused. A torn last line (the process died while writing it) is cut off. Only one run
at a time can open a journal. Each line ends with a checksum of itself and of the line before, so that no changed, lost or
exchanged line is believed; a journal from before there were checksums has none, and goes on without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from secateur.errors import OutputError
from secateur.files import jsonio
from secateur.files.lines import Lines

CHECKSUM = "checksum"  # the last field of a line
UNCHECKED = "The journal {} is from before its lines had checksums: a change of it would not be noticed."


class Journal:
    """The pulls that a run made before it was killed (`replay`) and the pulls that it makes now (`append`).

    >>> with Journal(Path("out/journal.jsonl"), settings) as journal:
    ...     selection = select(meter, units, policy=UCB(), ratio=0.1, journal=journal)
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._new_folder = not path.parent.exists()
        self._lines = Lines(path, f"Another run is writing {path} right now; wait for it, or choose another place with -o.")
        self._header: dict[str, Any] | None = None  # written with the first pull
        self._last = ""  # the checksum of the last line
        self.checked = True  # whether the lines have checksums
        try:
            self._records = self._read(settings)
        except BaseException:
            self._lines.close()
            raise
        self._position = 0
        pulls = [record for record in self._records if not (isinstance(record, dict) and "fact" in record)]
        self.n_replayed = len(pulls)  # made before the run was killed
        self.replaying = False  # whether the last pull asked for was already in the journal

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. An empty journal is removed, so that it does not block a later run."""
        if self._header is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
                if self._new_folder:
                    self.path.parent.rmdir()
        self._lines.close()

    def replay(self, expected: dict[str, Any]) -> dict[str, Any] | None:
        """The next recorded pull, which must match `expected`; None if the journal has no more pulls."""
        self.replaying = self._position < len(self._records)
        if not self.replaying:
            return None
        record = self._records[self._position]
        self._position += 1
        if not isinstance(record, dict) or any(record.get(key) != value for key, value in jsonio.to_json(expected).items()):
            raise self.edited()
        return record

    def fact(self, name: str, find: Callable[[], int]) -> int:
        """A number that a run finds out once: what an earlier start found, or what `find` returns now and is written down."""
        recorded = self.replay({"fact": name})
        if recorded is not None:
            known = recorded.get("value")
            if not isinstance(known, int):
                raise self.edited()
            return known
        value = find()
        self.append({"fact": name, "value": value})
        return value

    def edited(self) -> OutputError:
        """The error to raise if this run did not write the line that was replayed last."""
        return OutputError(
            f"Line {self._position + 1} of {self.path} is not the pull that this run makes at this point: the file was "
            "edited, or written by another version. Delete it to start again."
        )

    def append(self, record: dict[str, Any]) -> None:
        """Write a pull; the first one is preceded by the settings."""
        records, self._header = [record] if self._header is None else [self._header, record], None
        self._lines.append([self._sealed(record) for record in records])

    def _sealed(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with its checksum, which the next one continues."""
        if not self.checked:
            return record
        self._last = hashlib.sha256((self._last + jsonio.dumps(record)).encode()).hexdigest()[:16]
        return {**record, CHECKSUM: self._last}

    def _read(self, settings: dict[str, Any]) -> list[Any]:
        lines, torn = self._lines.read()
        try:
            first = jsonio.dumps(self._sealed({"settings": settings})).encode()
            self._last = ""
            if not lines and first.startswith(torn):
                self._lines.drop(torn)  # a new journal, or the run died while writing the first line
                self._header = {"settings": settings}
                return []
            header, *records = [jsonio.loads(line) for line in lines]
            recorded = dict(header["settings"])
            self.checked = any(isinstance(record, dict) and CHECKSUM in record for record in (header, *records))
        except (ValueError, TypeError, KeyError) as error:
            raise OutputError(
                f"{self.path} is not a journal written by Secateur, or is damaged; move it away or choose another -o."
            ) from error
        check_same_run(self.path, recorded, settings)
        self._check_sums(lines, [header, *records])
        if torn:
            self._lines.drop(torn)
        return records

    def _check_sums(self, lines: list[bytes], records: list[Any]) -> None:
        """Refuse a line that is not, to the byte, what was written after the line before; takes the checksums off."""
        if not self.checked:
            return
        for number, (line, record) in enumerate(zip(lines, records, strict=True), 1):
            if isinstance(record, dict):
                record.pop(CHECKSUM, None)
            if not isinstance(record, dict) or jsonio.dumps(self._sealed(record)).encode() != line:
                raise OutputError(
                    f"Line {number} of {self.path} is not as it was written, or one before it is missing: its checksum does "
                    "not fit. Undo the change, or delete the file to start again."
                )


def check_same_run(path: Path, recorded: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse to continue or overwrite a run whose recorded settings differ from the current ones."""
    current = jsonio.to_json(current)
    differing = sorted(key for key in recorded.keys() | current.keys() if recorded.get(key) != current.get(key))
    if differing:
        shown = ", ".join(f"{key} {_short(recorded.get(key))}, now {_short(current.get(key))}" for key in differing[:3])
        raise OutputError(f"{path} belongs to another run ({shown}); choose another place with -o, or delete it.")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
