"""Loading: a name or a folder in, a model with its tokenizer or image processor out. The only room that meets a model hub.

Only safetensors are read, nothing is unpickled, and code that a checkpoint brings along is not run unless asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import MissingExtra, ModelError, SecateurError, SettingError, first_line, not_one_of
from secateur.families import FAMILIES, anatomy, family_of, task_of, unsupported
from secateur.shrunk import CODE, fit, shrunk_class

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda", "mps")
KNOWN_MODELS = Path(__file__).parent / "known_models.json"  # shapes of the paper's models, so that counting needs no hub
TIMM = "timm:"


def load(name: str, *, device: str = "auto", dtype: str = "float32", trust_remote_code: bool = False) -> tuple[nn.Module, Any]:
    """A pretrained model, ready to evaluate, with its tokenizer or its image processor.

    `name` is a folder, a hub name, or `timm:NAME`, where `timm:NAME@FOLDER` takes the weights from a safetensors file there.

    >>> model, tokenizer = load("HuggingFaceTB/SmolLM2-135M")
    """
    model = load_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    if not hasattr(model, "config"):
        return model, _timm_processor(model)
    return model, _processor(name, task_of(model), trust_remote_code)


def load_model(name: str, *, device: str = "auto", dtype: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The model alone; without a dtype, in that of the checkpoint."""
    if dtype is not None and dtype not in DTYPES:
        raise not_one_of("dtype", dtype, DTYPES)
    where = resolve_device(device)
    mend_torchvision()
    if name.startswith(TIMM) or _is_timm_folder(Path(name)):
        model = _timm_model(name, pretrained=True)
        model = model.to(DTYPES[dtype]) if dtype else model
    else:
        model = _load_transformers(name, DTYPES[dtype] if dtype else "auto", trust_remote_code)
    family_of(model)
    return model.to(where).eval()  # not to the dtype: transformers keeps rotary tables in float32 on purpose


def load_shapes(name: str, *, trust_remote_code: bool = False) -> nn.Module:
    """The model on the meta device: its shapes without its weights, from a config alone."""
    known = json.loads(KNOWN_MODELS.read_text(encoding="utf-8"))
    mend_torchvision()
    if name.startswith(TIMM) or _is_timm_folder(Path(name)):
        with torch.device("meta"):
            return _timm_model(name, pretrained=False)
    if name in known and not Path(name).exists():
        import transformers

        fields = known[name] if isinstance(known[name], dict) else known[known[name]]
        config = transformers.AutoConfig.for_model(**fields)
    else:
        config = _config(name, trust_remote_code)
    config.architectures = config.architectures or []  # a list is what from_config goes through
    auto = _auto_class(config.model_type)
    with torch.device("meta"), _model_errors(name):
        if hasattr(config, "secateur"):
            _check_layout(name, config.secateur, getattr(config, "auto_map", None))
            model: nn.Module = _shrunk_kind(auto, config)(config)
            _check_blocks(name, model, config.secateur)
        else:
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
    return model


def stored_dtype(name: str, *, trust_remote_code: bool = False) -> torch.dtype | None:
    """The dtype that a checkpoint's config says its weights have; None where it says nothing."""
    if name.startswith(TIMM) or _is_timm_folder(Path(name)):
        return None
    found = getattr(_config(name, trust_remote_code), "dtype", None)
    return found if isinstance(found, torch.dtype) else None


def timm_arguments(name: str) -> dict[str, Any]:
    """What a timm folder says its model is made with, beside the architecture."""
    found = _timm_fields(Path(_timm_parts(name)[0])).get("model_args")
    return found if isinstance(found, dict) else {}


def digest(model: nn.Module) -> str:
    """A fingerprint of a model in two halves: its parameters' names and shapes, and 64 values of each parameter."""
    shapes, values = hashlib.sha256(), hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].float()
        shapes.update(f"{name} {tuple(parameter.shape)}\n".encode())
        values.update(f"{name} {sample.tolist()}\n".encode())
    return f"{shapes.hexdigest()[:8]}-{values.hexdigest()[:8]}"


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    names = ("secateur", "torch", "transformers", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in DEVICES or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise SettingError(
            f"The device is {device!r}, but must be auto, {', '.join(DEVICES)}, or such as cuda:1. Try --device cpu."
        )
    try:
        where = torch.device(device)
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"The device {device!r} cannot be used here: {first_line(error)} Try --device cpu.") from error
    return where


_mended: list[torch.library.Library] = []


def mend_torchvision() -> None:
    """Let a torchvision built for CUDA be imported beside a CPU-only torch.

    Its Python half registers shapes for two operators that its compiled half, which then fails to load, should have
    defined; torchvision, timm and even transformers refuse to import. Defining the two is enough, since nothing here calls
    them. Does nothing where torchvision is absent or whole.
    """
    if _mended or "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.origin:
        return
    for compiled in Path(spec.origin).parent.glob("_C.*"):
        with contextlib.suppress(OSError, ImportError):
            torch.ops.load_library(compiled)  # as torchvision itself does first; it fails where the builds do not match
            return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _mended.append(library)  # the definitions live as long as this object


@contextlib.contextmanager
def asking_hub() -> Iterator[None]:
    """While a hub is asked: if its name cannot even be looked up, its client uses its cache at once and does not retry."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    try:
        if not proxied:
            socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _load_transformers(name: str, dtype: torch.dtype | str, trust_remote_code: bool) -> nn.Module:
    config = _config(name, trust_remote_code)
    auto = _auto_class(config.model_type)
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        raise ModelError(f"The folder {name} holds no weights: there is no .safetensors file in it, and no other kind is read.")
    kind = auto
    if hasattr(config, "secateur"):  # its layers differ; the code that came with it is not run, ours is the same
        _check_layout(name, config.secateur, getattr(config, "auto_map", None))
        kind = _shrunk_kind(auto, config)
    with _model_errors(name):
        found, info = kind.from_pretrained(
            name, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(f"The checkpoint {name} lacks {len(missing)} of the model's tensors, {missing[0]} among them.")
    model: nn.Module = found
    if kind is not auto:
        _check_blocks(name, model, config.secateur)
    return model


@dataclass(frozen=True)
class ImageProcessor:
    """From images to pixel values, by an image processor of transformers."""

    processor: Any

    def __call__(self, images: list[Any]) -> Tensor:
        pixels: Tensor = self.processor(images=images, return_tensors="pt")["pixel_values"]
        return pixels

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        self.processor.save_pretrained(folder)


def _processor(name: str, task: str, trust_remote_code: bool) -> Any:
    import transformers

    with _model_errors(name, "tokenizer or image processor"):
        if task == "text":
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            if set(tokenizer("a b")["input_ids"]) <= {tokenizer.unk_token_id}:  # an empty one, made where no files were
                raise OSError("there is no tokenizer.json")
            return tokenizer
        # The PIL backend, whether or not torchvision is there: the two differ in the last bits of a resized image.
        images = transformers.AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=trust_remote_code)
        return ImageProcessor(images)


def _shrunk_kind(auto: Any, config: Any) -> Any:
    """The shrunk form of the class that a config names, or of the one that its type usually has."""
    found = auto._model_mapping[type(config)]
    kinds = {kind.__name__: kind for kind in (found if isinstance(found, tuple | list) else (found,))}
    named = [str(name).removeprefix("Shrunk") for name in config.architectures or []]
    return shrunk_class(next((kinds[name] for name in named if name in kinds), next(iter(kinds.values()))))


def _check_layout(name: str, layout: Any, auto_map: Any) -> None:
    """Refuse a checkpoint that says its layers differ, but not as Secateur says so."""
    named = [str(path) for path in auto_map.values()] if isinstance(auto_map, dict) else [str(auto_map)] if auto_map else []
    foreign = [path for path in named if not path.startswith(f"{CODE}.Shrunk")]
    if foreign:
        raise ModelError(
            f"The config.json in {name} names code to run that is not Secateur's ({foreign[0]}); it is not loaded."
        )
    try:
        sound = all(_is_layer(counts) for counts in layout["layers"])
        names = layout["family"]
        sound &= all(isinstance(names[part], str) for part in ("attention", "out", "mlp_out"))
        sound &= all(isinstance(path, str) for part in ("qkv", "mlp_in") for path in names[part])
    except (KeyError, TypeError):
        sound = False
    if not sound:
        raise ModelError(f"The config.json in {name} does not say what is left of each layer as Secateur writes it.")


def _is_layer(counts: Any) -> bool:
    numbers = [counts[part] for part in ("heads", "kv_heads", "head_dim", "mlp_width")]
    if not isinstance(counts["block"], str) or not all(type(n) is int and 0 <= n < 2**24 for n in numbers):
        return False
    heads, kv_heads, index = counts["heads"], counts["kv_heads"], counts.get("kv_index")
    if index is None:
        return bool(heads % kv_heads == 0) if kv_heads else heads == 0
    ints = isinstance(index, list) and all(type(i) is int for i in index)
    return ints and len(index) == heads and index == sorted(index) and set(index) == set(range(kv_heads))


def _check_blocks(name: str, model: nn.Module, layout: Any) -> None:
    if [layer.name for layer in anatomy(model)] != [counts["block"] for counts in layout["layers"]]:
        raise ModelError(f"The config.json in {name} does not list the blocks that its model has.")


def _config(name: str, trust_remote_code: bool) -> Any:
    folder = Path(name)
    if folder.is_file():
        raise ModelError(f"{name} is a file; give the folder that holds it and its config.json.")
    if not folder.exists():
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
            raise ModelError(f"There is no folder {name!r}, and no model on a hub can be named so.")
    elif not (folder / "config.json").is_file():
        raise ModelError(
            f"The folder {name} holds no config.json: it is not a model. Give a folder that save_pretrained wrote."
        )
    import transformers

    with _model_errors(name, "config"):
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def _auto_class(model_type: str) -> Any:
    import transformers

    if model_type not in FAMILIES:
        raise unsupported(f"model_type {model_type!r}")
    return (
        transformers.AutoModelForCausalLM
        if FAMILIES[model_type].task == "text"
        else transformers.AutoModelForImageClassification
    )


@contextlib.contextmanager
def _model_errors(name: str, what: str = "model") -> Iterator[None]:
    """Whatever a loader raises about a checkpoint, as one sentence of ours."""
    from safetensors import SafetensorError

    try:
        with asking_hub() if not os.path.exists(name) else contextlib.nullcontext():
            yield
    except SafetensorError as error:
        raise ModelError(f"The weights in {name} are damaged or cut short: {first_line(error)} Get them again.") from error
    except SecateurError:
        raise
    except Exception as error:  # loaders raise all kinds, down to ZeroDivisionError, for a checkpoint they cannot use
        if "ignore_mismatched_sizes" in str(error):
            raise ModelError(f"The weights in {name} have other shapes than its config.json says.") from error
        if Path(name).exists():
            raise ModelError(f"Cannot read the {what} in {name}: {first_line(error)}") from error
        raise ModelError(
            f"There is no folder {name}, and the model hub did not give a {what} of that name: {first_line(error)} "
            "Check the name and the network, or give a local folder."
        ) from error


def _is_timm_folder(folder: Path) -> bool:
    """A folder in the form of timm's hub repositories: its config.json names an `architecture`."""
    fields = _timm_fields(folder)
    return "architecture" in fields and "model_type" not in fields


def _timm_fields(folder: Path) -> dict[str, Any]:
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _timm_model(name: str, *, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise MissingExtra("timm", "timm", f"The model {name}") from error
    name, weights = _timm_parts(name)
    source = name
    if Path(name).is_dir():
        source, weights = f"local-dir:{name}", weights or name  # we read the weights: timm would also take a pickle
    try:
        with asking_hub() if pretrained and not weights else contextlib.nullcontext():
            model: nn.Module = timm.create_model(source, pretrained=pretrained and not weights)
    except Exception as error:  # timm raises bare RuntimeErrors, and the hub client errors of its own
        raise ModelError(f"timm cannot make the model {name!r}: {first_line(error)}") from error
    layout = _timm_fields(Path(name)).get("secateur")
    if layout is not None:
        _check_layout(name, layout, None)
        with _model_errors(name):
            fit(model, layout)
        _check_blocks(name, model, layout)
        network: Any = model
        network.secateur = layout
    if pretrained and weights:
        _load_weights(model, Path(weights))
    return model


def _timm_parts(name: str) -> tuple[str, str]:
    """The architecture or folder, and where the weights are if that was said."""
    name = name.removeprefix(TIMM)
    architecture, _, weights = (name, "", "") if Path(name).is_dir() else name.partition("@")
    return architecture, weights


def _load_weights(model: nn.Module, path: Path) -> None:
    from safetensors.torch import load_file

    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"There are no weights {path}: give a .safetensors file, or a folder with a model.safetensors.")
    with _model_errors(str(path)):
        tensors = load_file(path)
    ours = model.state_dict()
    for name in sorted(ours.keys() | tensors.keys()):
        shapes = [tuple(found[name].shape) if name in found else None for found in (ours, tensors)]
        if shapes[0] != shapes[1]:
            wants, has = (f"of the shape {shape}" if shape is not None else "not there" for shape in shapes)
            raise ModelError(f"The weights in {path} are another model's: the tensor {name} is {has}, and should be {wants}.")
    model.load_state_dict(tensors)


def _timm_processor(model: nn.Module) -> Callable[[list[Any]], Tensor]:
    from timm import data

    transform = data.create_transform(**data.resolve_model_data_config(model), is_training=False)
    return lambda images: torch.stack([transform(image) for image in images])
