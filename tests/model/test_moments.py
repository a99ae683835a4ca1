"""Checks the weighted sums over what enters a projection."""

from __future__ import annotations

import torch
from torch import nn

from secateur.model.families import anatomy
from secateur.model.moments import Moments, gather
from tiny import FAMILIES_TINY, hook_count, tiny_batch


def test_no_position_decides_however_large_or_small_its_activations() -> None:
    projection = nn.Linear(3, 2)
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for scale in (0, 1, 1e6):
        moments = Moments(projection, torch.tensor([0, 1]))
        moments.add(x[:0])  # a batch of nothing but padding
        moments.add(x[:25])
        moments.add(torch.cat([scale * x[25:26], x[26:]]))
        found.append(moments.means())
    for mean, products in found:
        torch.testing.assert_close(mean, found[1][0], rtol=0, atol=0.05)
        torch.testing.assert_close(products, found[1][1], rtol=0, atol=0.1)


def test_padding_is_left_out_of_the_sums() -> None:
    model = FAMILIES_TINY["bert"]()
    projection = anatomy(model)[1].mlp_out
    whole = tiny_batch(model)  # the third text has 3 tokens of padding
    rows = [{name: tensor[i : i + 1] for name, tensor in whole.items()} for i in range(3)]
    rows[2] = {name: tensor[:, :7] for name, tensor in rows[2].items()}
    found = []
    for batches in ([whole], rows):
        moments = Moments(projection)
        moments.weighing.usual = torch.tensor(1.0)  # the median of the first batch would differ
        gather(model, {projection: moments}, batches)
        found.append(moments.means())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert hook_count(model) == 0
