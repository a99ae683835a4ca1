"""Team: processes that train one model together, each on a device of its own, as `accelerate launch` starts them.

All of them run the same command. The first one alone reads, judges and writes; the others add their gradients. torch is
imported where there is a team, so that the command line may ask for its size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from secateur.errors import MissingExtra

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

PIECE = 2**24  # numbers that are sent at once


def team_size() -> int:
    """How many processes a launcher started for this command."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def leads() -> bool:
    """Whether this process is the first of its team, or the only one."""
    return team_size() <= 1 or os.environ.get("RANK", "0") == "0"


class Team:
    """The processes that train one model; here, a process that is alone."""

    rank, size, device = 0, 1, ""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def shared(self, value: T) -> T:
        """What the first process has."""
        return value

    def total(self, number: int) -> int:
        """The sum of a number over the processes."""
        return number

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over the processes."""

    def copy(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of the first process."""


class _Launched(Team):
    """A process of several."""

    def __init__(self, cpu: bool) -> None:
        try:
            from accelerate import PartialState
            from accelerate.utils import broadcast_object_list
        except ImportError as error:
            raise MissingExtra("accelerate", "accelerate", "Healing on several devices") from error
        import torch

        state = PartialState(cpu=cpu)
        self._torch = torch
        self._broadcast = broadcast_object_list
        self.rank, self.size = state.process_index, state.num_processes
        self.device = "cpu" if state.device.type == "cpu" else str(state.device)

    def shared(self, value: T) -> T:
        held: list[Any] = [value]
        self._broadcast(held, from_process=0)
        return held[0]  # type: ignore[no-any-return]

    def total(self, number: int) -> int:
        held = self._torch.tensor(number, device=self.device)
        self._torch.distributed.all_reduce(held)
        return int(held)

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for piece in tensor.view(-1).split(PIECE):
                self._torch.distributed.all_reduce(piece)

    def copy(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._torch.distributed.broadcast(tensor, 0)


def join(device: str) -> Team:
    """The team that this process belongs to, for a device that was asked for."""
    return _Launched(cpu=device == "cpu") if team_size() > 1 else Team()
