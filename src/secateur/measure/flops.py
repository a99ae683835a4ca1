"""FLOPs of matrix products, convolutions and attention, counted while they run; a product and an addition count as two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def counter() -> FlopCounterMode:
    """torch's counter, extended by the CPU's attention and the products of experts, whose FLOPs it does not count."""

    def attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **options: Any) -> int:
        rows, heads, length, width = query
        return int(2 * rows * heads * length * key[-2] * (width + value[-1]))

    def grouped(tokens: Any, weights: Any, *args: Any, out_shape: Any = None, **options: Any) -> int:
        return int(2 * tokens[0] * weights[-2] * weights[-1])  # each row meets the weights of one expert

    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={on_cpu: attention, torch.ops.aten._grouped_mm: grouped})


def count(work: Callable[[], Any]) -> int:
    """The FLOPs of one call.

    >>> count(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48
    """
    with counter() as counted:
        work()
    return int(counted.get_total_flops())
