"""The journal: every pull is written to disk as it happens, so that a killed run, started again, reaches the same Selection.

One JSON object per line. The first line is written with the first pull and holds the run's settings; a journal with other
settings belongs to another run and is refused. A torn last line (the process died while writing it) is cut off. Only one run
at a time can open a journal.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from secateur.errors import OutputError
from secateur.files import jsonio
from secateur.files.lines import Lines


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
        try:
            self._records = self._read(settings)
        except BaseException:
            self._lines.close()
            raise
        self._position = 0
        self.n_replayed = len(self._records)  # pulls made before the run was killed
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

    def edited(self) -> OutputError:
        """The error to raise if this run did not write the line that was replayed last."""
        return OutputError(
            f"Line {self._position + 1} of {self.path} is not the pull that this run makes at this point: the file was "
            "edited, or written by another version. Delete it to start again."
        )

    def append(self, record: dict[str, Any]) -> None:
        """Write a pull; the first one is preceded by the settings."""
        records, self._header = [record] if self._header is None else [self._header, record], None
        self._lines.append(records)

    def _read(self, settings: dict[str, Any]) -> list[Any]:
        lines, torn = self._lines.read()
        try:
            if not lines and jsonio.dumps({"settings": settings}).encode().startswith(torn):
                self._lines.drop(torn)  # a new journal, or the run died while writing the first line
                self._header = {"settings": settings}
                return []
            header, *records = [json.loads(line) for line in lines]
            recorded = dict(header["settings"])
        except (ValueError, TypeError, KeyError) as error:
            raise OutputError(
                f"{self.path} is not a journal written by Secateur, or is damaged; move it away or choose another -o."
            ) from error
        check_same_run(self.path, recorded, settings)
        if torn:
            self._lines.drop(torn)
        return records


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
