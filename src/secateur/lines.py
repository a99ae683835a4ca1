"""Files of JSON lines that are only ever appended to, by one writer at a time: the journal of a run, the records of a store."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from secateur import jsonio
from secateur.errors import OutputError

if sys.platform != "win32":  # there, two writers of one file are the user's to avoid
    import fcntl


class Lines:
    """The one writer of a file; `busy` is what a second one is told."""

    def __init__(self, path: Path, busy: str) -> None:
        self.path = path
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
        """The whole lines, and what a process that died while writing left of the last."""
        self._file.seek(0)
        *lines, torn = self._file.read().split(b"\n")
        return lines, torn

    def drop(self, torn: bytes) -> None:
        """Cut off what was left of a last line."""
        self._file.seek(-len(torn), os.SEEK_END)
        self._file.truncate()

    def append(self, records: Iterable[Any], *, sync: bool = False) -> None:
        """Hand records to the system, so that they outlive this process; with `sync` to the disk, to outlive the machine."""
        try:
            self._file.write(b"".join(jsonio.dumps(record).encode() + b"\n" for record in records))
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # now: closing it later would try once more to write what the buffer still holds
            raise jsonio.cannot_write(self.path, error) from error
