"""The journal: every pull on disk as it happens, so that a killed run started again goes on to the same Selection.

One JSON object a line. The first line comes with the first pull and holds the run's settings; a journal with other settings is
another run's and is refused. A torn last line (the process died while writing it) is cut off. While a run holds its journal, no
other may.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from secateur import jsonio
from secateur.errors import OutputError
from secateur.lines import Lines


class Journal:
    """The pulls a run has made before (`replay`) and those it makes now (`append`).

    >>> with Journal(Path("out/journal.jsonl"), settings) as journal:
    ...     selection = select(meter, units, policy=UCB(), ratio=0.1, journal=journal)
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._new_folder = not path.parent.exists()
        self._lines = Lines(path, f"Another run is writing {path} right now; wait for it, or choose another place with -o.")
        self._header: dict[str, Any] | None = None  # still to be written
        try:
            self._records = self._read(settings)
        except BaseException:
            self._lines.close()
            raise
        self._position = 0
        self.n_replayed = len(self._records)  # the pulls of an earlier start

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; one without a pull is taken away, so that it stands in no later run's way."""
        if self._header is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
                if self._new_folder:
                    self.path.parent.rmdir()
        self._lines.close()

    def replay(self, expected: dict[str, Any]) -> dict[str, Any] | None:
        """The next recorded pull, or None when this one is new. It must be the pull that the run is about to make."""
        if self._position >= len(self._records):
            return None
        record = self._records[self._position]
        self._position += 1
        if not isinstance(record, dict) or any(record.get(key) != value for key, value in jsonio.to_json(expected).items()):
            raise self.edited()
        return record

    def edited(self) -> OutputError:
        """The error for the line last replayed, when it cannot be what this run wrote."""
        return OutputError(
            f"Line {self._position + 1} of {self.path} is not the pull that this run makes there: the file was edited, or "
            "written by another version. Delete it to start anew."
        )

    def append(self, record: dict[str, Any]) -> None:
        records, self._header = [record] if self._header is None else [self._header, record], None
        self._lines.append(records)

    def _read(self, settings: dict[str, Any]) -> list[Any]:
        lines, torn = self._lines.read()
        try:
            if not lines and jsonio.dumps({"settings": settings}).encode().startswith(torn):
                self._lines.drop(torn)  # new, or died while writing the first line
                self._header = {"settings": settings}
                return []
            header, *records = [json.loads(line) for line in lines]
            theirs = dict(header["settings"])
        except (ValueError, TypeError, KeyError) as error:
            raise OutputError(
                f"{self.path} is not a journal of Secateur's, or is damaged; move it away or choose another -o."
            ) from error
        check_same_run(self.path, theirs, settings)
        if torn:
            self._lines.drop(torn)
        return records


def check_same_run(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse to go on with, or to overwrite, the work of a run with other settings."""
    ours = jsonio.to_json(ours)
    differing = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if differing:
        shown = ", ".join(f"{key} {_short(theirs.get(key))}, now {_short(ours.get(key))}" for key in differing[:3])
        raise OutputError(f"{path} belongs to another run ({shown}); choose another place with -o, or delete it.")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
