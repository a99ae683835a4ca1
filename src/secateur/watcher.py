"""Who is told how a run goes."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.selection import Progress


class Watcher:
    """Is told how a run goes; this one keeps silent. The command line draws its progress bars with another."""

    def stage(self, name: str) -> None: ...
    def say(self, sentence: str) -> None: ...
    def pull(self, progress: Progress) -> None: ...
    def evaluated(self, batch: int, n_batches: int) -> None: ...


@dataclass(frozen=True)
class GridProgress:
    """Where a grid stands, after a run."""

    done: int
    failed: int
    left: int
    seconds_left: float | None
    latest: str
