"""The index of a model's weights: it may name safetensors in its own folder, and nothing else."""

from __future__ import annotations

from pathlib import Path

from secateur.errors import ModelError
from secateur.files import jsonio


def shards_of(index: Path) -> list[str]:
    """The files that an index of weights names: safetensors in its own folder, or a ModelError."""
    try:
        fields = jsonio.read(index)
        shards = sorted(set(fields["weight_map"].values()))
        safe = [
            shard.endswith(".safetensors") and not Path(shard).is_absolute() and ".." not in Path(shard).parts
            for shard in shards
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weights: it has no weight_map from tensors to files.") from error
    if not all(safe):
        raise ModelError(
            f"{index} names {shards[safe.index(False)]!r}, but only safetensors files in its own folder are read; the model is "
            "not loaded."
        )
    return shards
