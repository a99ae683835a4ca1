"""The folder of a sentence-transformers model: the modules that it lists, and how it makes one embedding of a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from secateur.errors import ModelError, first_line
from secateur.files import jsonio

OLD_POOLING = {  # switches in older sentence-transformers folders; the length of an embedding does not matter here
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class _Module:
    """An entry of modules.json."""

    type: str
    path: str


def sentence_modules(name: str) -> list[tuple[str, str]]:
    """The modules of a sentence-transformers folder, each as its kind and its folder inside; none for any other folder."""
    try:
        listed = jsonio.decode(jsonio.read(Path(name) / "modules.json"), list[_Module])
        modules = [(module.type.rpartition(".")[2], module.path) for module in listed]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise ModelError(f"The modules.json in {name} is not one of sentence-transformers: {first_line(error)}") from error
    root = Path(name).resolve()
    if outside := [path for _, path in modules if not (root / path).resolve().is_relative_to(root)]:
        raise ModelError(f"The modules.json in {name} names a folder outside it ({outside[0]}); the model is not loaded.")
    return modules


def sentence_pooling(name: str) -> str | None:
    """How a sentence-transformers folder makes one embedding of a text's tokens; None for any other folder."""
    folder = next((path for kind, path in sentence_modules(name) if kind == "Pooling"), None)
    if folder is None:
        return None
    try:
        fields = jsonio.read(Path(name) / folder / "config.json")
        switched_on = [key for key, value in fields.items() if key.startswith("pooling_mode_") and value is True]
        mode = fields.get("pooling_mode") or " and ".join(OLD_POOLING.get(key, key) for key in switched_on) or "mean"
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"The pooling of {name} cannot be read from {folder}/config.json: {first_line(error)}") from error
    if mode not in ("mean", "cls", "max", "lasttoken"):
        raise ModelError(f"The sentence-transformers folder {name} pools by {mode!r}, which Secateur does not know.")
    return str(mode)
