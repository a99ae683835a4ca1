from __future__ import annotations

from typing import Any

import pytest

from secateur.errors import SettingError
from secateur.healing import Healing
from secateur.settings import make_job
from worlds import one_sentence


@pytest.mark.parametrize(
    ("amount", "counted"),
    [
        ("30min", (1800, "seconds")),
        ("90s", (90, "seconds")),
        ("0.5h", (1800, "seconds")),
        ("200000tokens", (200000, "tokens")),
        ("5000images", (5000, "examples")),
        (" 12 steps ", (12, "steps")),
    ],
)
def test_an_amount_is_a_number_and_what_it_counts(amount: str, counted: tuple[float, str]) -> None:
    assert make_job("m", heal=amount).healing.counted == counted


@pytest.mark.parametrize("amount", ["30", "min", "0min", "-3s", "1e3tokens", "nanmin", "5 apples", "10**9h", "9999999999s"])
def test_what_is_no_amount_is_refused(amount: str) -> None:
    with pytest.raises(SettingError) as caught:
        make_job("m", heal=amount)
    assert "but must be a time" in one_sentence(caught, amount)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heal_lora": 4}, "nothing is healed"),
        ({"heal_augment": False}, "nothing is healed"),
        ({"heal": "9steps", "heal_rate": 0.0}, "learning rate is 0.0"),
        ({"heal": "9steps", "heal_rate": float("nan")}, "learning rate is nan"),
        ({"heal": "9steps", "heal_hidden": -1.0}, "weight of hidden states is -1.0"),
        ({"heal": "9steps", "heal_labels": float("inf")}, "weight of labels is inf"),
        ({"heal": "9steps", "heal_lora": -1}, "LoRA rank is -1"),
        ({"heal": "9steps", "heal_dtype": "float16"}, "float16"),
        ({"heal": "9steps", "heal_size": 1}, "healing size is 1"),
    ],
)
def test_settings_that_cannot_heal_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError) as caught:
        make_job("m", **settings)
    assert words in one_sentence(caught)


def test_what_decides_the_weights_is_in_the_key_and_what_does_not_is_not() -> None:
    key = Healing("9steps").to_key()
    assert Healing("9steps", dense=False, checkpointing=True).to_key() == key
    assert all(
        Healing("9steps", **other).to_key() != key
        for other in ({"rate": 1e-3}, {"lora": 2}, {"labels": 0.5}, {"dtype": "bfloat16"})
    )
