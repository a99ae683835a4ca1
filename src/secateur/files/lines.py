"""Files of JSON lines with one writer at a time, who only appends: a run's journal, a store's records."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from secateur.errors import OutputError
from secateur.files import jsonio

if sys.platform != "win32":  # Windows has no fcntl: there, nothing stops a second writer
    import fcntl


class Lines:
    """The only writer of a file; a second one raises an OutputError with the message `busy`."""

    def __init__(self, path: Path, busy: str) -> None:
        self.path = path
        jsonio.refuse_special(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise jsonio.cannot_write(path, error) from error
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._file.close()
                raise OutputError(busy) from error

    def close(self) -> None:
        self._file.close()

    def read(self) -> tuple[list[bytes], bytes]:
        """The complete lines, and the torn last line that a killed process left, if any."""
        self._file.seek(0)
        *lines, torn = self._file.read().split(b"\n")
        return lines, torn

    def drop(self, torn: bytes) -> None:
        """Cut off a torn last line."""
        self._file.seek(-len(torn), os.SEEK_END)
        self._file.truncate()

    def append(self, records: Iterable[Any], *, sync: bool = False) -> None:
        """Append records, which then survive the end of this process; with `sync`, also a crash of the machine."""
        try:
            self._file.write(b"".join(jsonio.dumps(record).encode() + b"\n" for record in records))
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # a later close would try again to write the buffer
            raise jsonio.cannot_write(self.path, error) from error
