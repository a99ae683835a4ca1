"""Loading: from a name or a folder to a model with its tokenizer or image processor. The only file here that asks a model hub.

Only safetensors are read, nothing is unpickled, and the code in a checkpoint runs only if the user trusts it.
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
import shlex
import socket
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import MissingExtra, ModelError, SecateurError, SettingError, first_line, not_one_of, reasons
from secateur.files import jsonio
from secateur.files.sentences import sentence_modules, sentence_pooling
from secateur.files.weights import shards_of
from secateur.model.devices import device_name, resolve_device
from secateur.model.families import FAMILIES, anatomy, family_of, task_of, task_of_class, unsupported
from secateur.model.shrunk import CODE, Layout, fit, shrunk_class
from secateur.settings import MAP
from secateur.tasks import TASKS, TEXT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KNOWN_MODELS = Path(__file__).parent / "known_models.json"  # shapes of the paper's models, so that counting needs no hub
TIMM = "timm:"
MOST_BLOCKS = 1000
LARGEST_SIDE = 10_000  # pixels of a preprocessed image
IMPLEMENTATIONS = ("eager", "sdpa", "grouped_mm", "batched_mm")  # of attention and of experts, that need no download


def load(name: str, *, device: str = "auto", dtype: str = "float32", trust_remote_code: bool = False) -> tuple[nn.Module, Any]:
    """Load a pretrained model, ready to evaluate, with its tokenizer or its image processor.

    `name` is a folder, a hub name, or `timm:NAME`; `timm:NAME@FOLDER` reads the weights from a safetensors file in the folder.

    >>> model, tokenizer = load("HuggingFaceTB/SmolLM2-135M")
    """
    model = load_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    if not hasattr(model, "config"):
        with reasons(ModelError, f"timm cannot preprocess images as the model {name} asks"):
            return model, _timm_processor(model)
    return model, _processor(_transformer_place(name), TASKS[task_of(model)].inputs, trust_remote_code)


@dataclass(frozen=True)
class Opened:
    """A loaded model, the name it was loaded by, its tokenizer or image processor, and perhaps a loss of the user's own.

    >>> opened = open_model("gpt2")
    >>> opened.name
    'gpt2'
    """

    name: str
    model: nn.Module
    processor: Any = None
    trust_remote_code: bool = False
    loss: Callable[[nn.Module, Any], Tensor] | None = None

    @cached_property
    def digest(self) -> str:
        return digest(self.model)

    @property
    def device(self) -> str:
        return device_name(self.model)

    @property
    def dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")


def open_model(name: str, *, device: str = "auto", dtype: str = "float32", trust_remote_code: bool = False) -> Opened:
    """Load a pretrained model as `load` does, and keep it together with its name and its processor.

    >>> open_model("gpt2").name
    'gpt2'
    """
    model, processor = load(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    return Opened(name, model, processor, trust_remote_code)


def load_model(name: str, *, device: str = "auto", dtype: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """Load the model alone; without a dtype, in the dtype of the checkpoint."""
    if dtype is not None and dtype not in DTYPES:
        raise not_one_of("dtype", dtype, DTYPES)
    resolved = None if device == MAP else resolve_device(device, dtype)
    mend_torchvision()
    with reasons(ModelError, f"Cannot load the model {name}"):
        if name.startswith(TIMM) or _is_timm_folder(Path(name)):
            if resolved is None:
                raise SettingError(f"The timm model {name} lives on one device: --device {MAP} is for models of transformers.")
            model = _timm_model(name, pretrained=True)
            model = model.to(DTYPES[dtype]) if dtype else model
        else:
            model = _load_transformers(name, DTYPES[dtype] if dtype else "auto", trust_remote_code, mapped=resolved is None)
            if pooling := sentence_pooling(name):
                network: Any = model
                network.pooling = pooling  # how texts become embeddings (model/losses.py)
        family_of(model)
    if resolved is None:
        return model.eval()
    return model.to(resolved).eval()  # not to the dtype: transformers keeps rotary tables in float32 on purpose


def load_shapes(name: str, *, trust_remote_code: bool = False) -> nn.Module:
    """The model on the meta device: its shapes without its weights, made from a config alone.

    >>> len(candidate_units(load_shapes("gpt2"), target="both"))
    """
    with reasons(ModelError, f"Cannot make the model {name} from its config"):
        return _load_shapes(name, trust_remote_code)


def _load_shapes(name: str, trust_remote_code: bool) -> nn.Module:
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
    config.architectures = config.architectures or []  # from_config iterates over it
    auto = _auto_class(config)
    with torch.device("meta"), _model_errors(name):
        if hasattr(config, "secateur"):
            layout = _read_layout(name, config.secateur, getattr(config, "auto_map", None))
            model: nn.Module = _shrunk_kind(auto, config)(config)
            _check_blocks(name, model, layout)
        else:
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
    return model


def stored_dtype(name: str, *, trust_remote_code: bool = False) -> torch.dtype | None:
    """The dtype of a checkpoint's weights according to its config; None if the config does not say."""
    if name.startswith(TIMM) or _is_timm_folder(Path(name)):
        return None
    dtype = getattr(_config(name, trust_remote_code), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def timm_arguments(name: str) -> dict[str, Any]:
    """The arguments besides the architecture that a timm folder says its model is created with."""
    arguments = _timm_fields(Path(_timm_parts(name)[0])).get("model_args")
    return arguments if isinstance(arguments, dict) else {}


def digest(model: nn.Module) -> str:
    """A fingerprint of a model in two halves: one of its parameters' names and shapes, one of 64 values of each parameter."""
    shapes, values = hashlib.sha256(), hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].float()
        shapes.update(f"{name} {tuple(parameter.shape)}\n".encode())
        values.update(f"{name} {sample.tolist()}\n".encode())
    return f"{shapes.hexdigest()[:8]}-{values.hexdigest()[:8]}"


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a result depends on."""
    names = ("secateur", "torch", "transformers", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


_mended: list[torch.library.Library] = []


def mend_torchvision() -> None:
    """Let a torchvision built for CUDA be imported beside a CPU-only torch.

    The compiled half of such a torchvision fails to load, and its Python half then registers shapes for two operators that
    nobody has defined; torchvision, timm and even transformers cannot be imported. Defining the two operators is enough, since
    nothing here calls them. Does nothing if torchvision is absent or works.
    """
    if _mended or "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.origin:
        return
    for compiled in Path(spec.origin).parent.glob("_C.*"):
        with contextlib.suppress(OSError, ImportError):
            torch.ops.load_library(compiled)  # as torchvision itself does first; fails if the builds do not match
            return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _mended.append(library)  # the definitions live as long as this object


@contextlib.contextmanager
def asking_hub() -> Iterator[None]:
    """While the block lasts, let the hub's client use only its cache if the hub's host name cannot be resolved.

    Otherwise the client would retry for a while before it falls back to the cache.
    """
    from huggingface_hub import constants

    previous = constants.HF_HUB_OFFLINE
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    try:
        if not proxied:
            socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = previous


def _transformer_place(name: str) -> str:
    """The folder with the config and the weights: of a sentence-transformers folder it may be one inside."""
    inner = next((path for kind, path in sentence_modules(name) if kind == "Transformer"), "")
    return os.path.join(name, inner) if inner else name


def _load_transformers(name: str, dtype: torch.dtype | str, trust_remote_code: bool, *, mapped: bool = False) -> nn.Module:
    name = _transformer_place(name)
    config = _config(name, trust_remote_code)
    auto = _auto_class(config)
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        raise ModelError(_no_weights(name, auto))
    kind, layout = auto, None
    if hasattr(config, "secateur"):  # its layers differ; shrunk.py is run, not the copy in the folder
        layout = _read_layout(name, config.secateur, getattr(config, "auto_map", None))
        kind = _shrunk_kind(auto, config)
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": trust_remote_code}
    if mapped:
        if importlib.util.find_spec("accelerate") is None:
            raise MissingExtra("accelerate", "accelerate", f"--device {MAP}")
        options["device_map"] = "auto"
    with _model_errors(name), _no_pickles(name):
        _check_weight_files(name, getattr(config, "transformers_weights", None))
        loaded, info = kind.from_pretrained(name, config=config, output_loading_info=True, **options)
        if info["missing_keys"] and all(key.startswith("pooler.") for key in info["missing_keys"]):
            # A BERT that was saved without its pooler, which embeddings do not need.
            loaded, info = kind.from_pretrained(
                name, config=config, add_pooling_layer=False, output_loading_info=True, **options
            )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(f"The checkpoint {name} lacks {len(missing)} of the model's tensors, such as {missing[0]}.")
    model: nn.Module = loaded
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"The model {name} does not fit into the GPUs of this machine, so that parts of it would stay outside: use more "
            "GPUs, or --dtype bfloat16."
        )
    if layout is not None:
        _check_blocks(name, model, layout)
    _check_no_more_blocks(name, model, info["unexpected_keys"])
    return model


def _check_weight_files(name: str, named: Any) -> None:
    """Refuse weights that transformers would look for elsewhere than in the model's own safetensors files.

    An index may name any file, an adapter another model; `named` is what the config itself names in place of the usual file.
    """
    for index in _files(name, "*.safetensors.index.json", [named] if isinstance(named, str) else []):
        shards_of(index)
    if _files(name, "adapter_config.json"):
        raise ModelError(
            f"The model {name} has an adapter (adapter_config.json) that is not part of its weights; merge it with peft's "
            "merge_and_unload, save the model, and give that folder."
        )


def _files(name: str, pattern: str, more: Sequence[str] = ()) -> list[Path]:
    """The files of a model that match a pattern, in its folder or on the hub; there the usual name stands for the pattern."""
    if Path(name).is_dir():
        return [
            *Path(name).glob(pattern),
            *(path for file in more if (path := Path(name) / file).match(pattern) and path.is_file()),
        ]
    from transformers.utils.hub import cached_file

    names = [pattern.replace("*", "model"), *(file for file in more if Path(file).match(pattern))]
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = [cached_file(name, file, **quietly) for file in names]
    return [Path(path) for path in found if path is not None]


@contextlib.contextmanager
def _no_pickles(name: str) -> Iterator[None]:
    """While the block lasts, no library can unpickle weights, as transformers and timm do where they find no safetensors."""
    load = torch.load

    def refuse(*args: Any, **options: Any) -> Any:
        raise ModelError(f"The weights of {name} are pickled, and only safetensors are read; convert them, if you trust them.")

    torch.load = refuse
    try:
        yield
    finally:
        torch.load = load


def _check_no_more_blocks(name: str, model: nn.Module, unexpected: Iterable[str]) -> None:
    """Refuse a checkpoint with more blocks than its config says: the model would be a part of it."""
    known: dict[str, set[int]] = {}
    for layer in anatomy(model):
        parts = layer.name.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                known.setdefault(".".join(parts[:i]), set()).add(int(part))
    base = getattr(model, "base_model_prefix", "")
    for key in sorted(unexpected):
        for form in (key, f"{base}.{key}", key.removeprefix(f"{base}.")):
            for blocks, numbers in known.items():
                number = form.removeprefix(f"{blocks}.").partition(".")[0] if form.startswith(f"{blocks}.") else ""
                if number.isdecimal() and int(number) not in numbers:
                    raise ModelError(
                        f"The checkpoint {name} has more blocks than its config.json says: {key} is in none of the model's "
                        f"{len(numbers)}. Mend the number of layers in the config."
                    )


def _no_weights(name: str, auto: Any) -> str:
    """What to say of a folder without safetensors: of one with a pickle, also the command by which the user converts it."""
    said = f"The folder {name} holds no weights: there is no .safetensors file in it, and no other kind is read."
    if not any(Path(name).glob("pytorch_model*.bin")):
        return said
    code = f"import sys, transformers as t; t.{auto.__name__}.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])"
    command = f'python -c "{code}" {shlex.quote(name)}'
    return f"{said} Run `{command}` to convert its pytorch_model.bin, if you trust that file."


@dataclass(frozen=True)
class ImageProcessor:
    """Turns images into pixel values with an image processor of transformers."""

    processor: Any

    def __call__(self, images: list[Any]) -> Tensor:
        pixels: Tensor = self.processor(images=images, return_tensors="pt")["pixel_values"]
        return pixels

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        self.processor.save_pretrained(folder)


def _processor(name: str, inputs: str, trust_remote_code: bool) -> Any:
    import transformers

    with _model_errors(name, "tokenizer or image processor"):
        if inputs == TEXT:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
            # Without files for it, transformers makes a tokenizer that has only special tokens.
            if set(tokenizer.get_vocab().values()) <= special | set(tokenizer.all_special_ids):
                raise OSError("there is no tokenizer.json")
            return tokenizer
        # Always the PIL backend: the backends differ in the last bits of a resized image.
        images = transformers.AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=trust_remote_code)
        for field in ("size", "crop_size", "pad_size"):
            _check_sides(name, dict(getattr(images, field, None) or {}).values())
        return ImageProcessor(images)


def _check_sides(name: str, sides: Iterable[Any]) -> None:
    """Refuse to make images so large that they would take all memory."""
    for side in sides:
        if isinstance(side, int | float) and side > LARGEST_SIDE:
            raise ModelError(
                f"The model {name} asks for images of {side:,} pixels on a side, and at most {LARGEST_SIDE:,} are made."
            )


def _shrunk_kind(auto: Any, config: Any) -> Any:
    """The shrunk form of the model class that a config names, or else of the usual class for its type."""
    mapped = auto._model_mapping[type(config)]
    kinds = {kind.__name__: kind for kind in (mapped if isinstance(mapped, tuple | list) else (mapped,))}
    named = [str(name).removeprefix("Shrunk") for name in config.architectures or []]
    return shrunk_class(next((kinds[name] for name in named if name in kinds), next(iter(kinds.values()))))


def _read_layout(name: str, fields: Any, auto_map: Any) -> Layout:
    """The layout in a config; refuses a config that names other code, or that Secateur did not write."""
    named = [str(path) for path in auto_map.values()] if isinstance(auto_map, dict) else [str(auto_map)] if auto_map else []
    foreign = [path for path in named if not path.startswith(f"{CODE}.Shrunk")]
    if foreign:
        raise ModelError(
            f"The config.json in {name} names code to run that is not Secateur's ({foreign[0]}); the model is not loaded."
        )
    try:
        return Layout.from_json(fields)
    except ValueError as error:
        raise ModelError(
            f"The config.json in {name} does not describe its layers as Secateur does: {first_line(error)}"
        ) from error


def _check_blocks(name: str, model: nn.Module, layout: Layout) -> None:
    """Refuse a layout that does not list the blocks of the model."""
    if [layer.name for layer in anatomy(model)] != [layer.block for layer in layout.layers]:
        raise ModelError(f"The config.json in {name} does not list the blocks that its model has.")


def _config(name: str, trust_remote_code: bool) -> Any:
    name = _transformer_place(name)
    folder = Path(name)
    if folder.is_file():
        raise ModelError(f"{name} is a file; give the folder that holds it and its config.json.")
    if not folder.exists():
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
            raise ModelError(f"There is no folder {name!r}, and this cannot be the name of a model on a hub.")
    elif not (folder / "config.json").is_file():
        raise ModelError(
            f"The folder {name} holds no config.json: it is not a model. Give a folder that save_pretrained wrote."
        )
    import transformers

    with _model_errors(name, "config"):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    _check_implementations(name, config)
    _check_size(name, config)
    _check_dtype(name, config)
    tower = getattr(config, "vision_config", None)
    if config.model_type in ("clip", "siglip") and tower is not None:
        tower.architectures = []
        return tower  # of a model for texts and images, the part for images
    return config


def _check_size(name: str, config: Any) -> None:
    """Refuse a config of so many blocks that it would take minutes to make the model, or all memory."""
    depths = getattr(config, "depths", None)
    blocks = sum(depths) if isinstance(depths, list) else getattr(config, "num_hidden_layers", 0)
    if isinstance(blocks, int) and blocks > MOST_BLOCKS:
        raise ModelError(f"The config.json in {name} says that it has {blocks:,} blocks; at most {MOST_BLOCKS:,} are taken.")


def _check_dtype(name: str, config: Any) -> None:
    """Refuse a config whose weights are said to be anything but real numbers: nothing could be written in that dtype."""
    dtype = getattr(config, "dtype", None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ModelError(
            f"The config.json in {name} says that its weights have the dtype {str(dtype).removeprefix('torch.')}, which is "
            "none of real numbers; mend it, or give the model before it was quantised."
        )


def _check_implementations(name: str, config: Any) -> None:
    """Refuse a config that asks for attention or experts computed by code from elsewhere, which transformers would download."""
    parts = [config, *(part for key in getattr(config, "sub_configs", {}) if (part := getattr(config, key, None)) is not None)]
    for part in parts:
        for key in ("_attn_implementation_internal", "_experts_implementation_internal"):
            asked = getattr(part, key, None)
            if asked is not None and asked not in IMPLEMENTATIONS:
                raise ModelError(
                    f"The config.json in {name} asks for the implementation {asked!r}, which is not one of torch's own "
                    f"({', '.join(IMPLEMENTATIONS)}) and is not fetched; remove that field."
                )


def _auto_class(config: Any) -> Any:
    """The Auto class for the head that the config names, or else for what its family usually does."""
    import transformers

    if config.model_type not in FAMILIES:
        raise unsupported(f"model_type {config.model_type!r}")
    named = [str(name).removeprefix("Shrunk") for name in config.architectures or []]
    known = [task for name in named if (task := task_of_class(config.model_type, name))]
    return getattr(transformers, TASKS[known[0] if known else FAMILIES[config.model_type].task].auto_class)


@contextlib.contextmanager
def _model_errors(name: str, what: str = "model") -> Iterator[None]:
    """Turn whatever a loader raises about a checkpoint into a ModelError of one sentence."""
    from safetensors import SafetensorError

    try:
        with asking_hub() if not os.path.exists(name) else contextlib.nullcontext():
            yield
    except SafetensorError as error:
        raise ModelError(f"The weights in {name} are damaged or cut short: {first_line(error)} Download them again.") from error
    except SecateurError:
        raise
    except Exception as error:  # loaders raise all kinds, down to ZeroDivisionError, for a checkpoint they cannot use
        if "ignore_mismatched_sizes" in str(error):
            raise ModelError(f"The weights in {name} do not have the shapes that its config.json says.") from error
        if Path(name).exists():
            raise ModelError(f"Cannot read the {what} in {name}: {first_line(error)}") from error
        raise ModelError(
            f"There is no folder {name}, and the {what} of that name cannot be loaded from the model hub: {first_line(error)} "
            "Check the name and the network, or give a local folder."
        ) from error


def _is_timm_folder(folder: Path) -> bool:
    """Whether a folder has the form of timm's hub repositories: its config.json names an `architecture`."""
    fields = _timm_fields(folder)
    return "architecture" in fields and "model_type" not in fields


def _timm_fields(folder: Path) -> dict[str, Any]:
    """The fields of a folder's config.json; empty if it cannot be read."""
    try:
        fields = jsonio.read(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _timm_model(name: str, *, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise MissingExtra("timm", "timm", f"The model {name}") from error
    local = name.startswith(f"{TIMM}local-dir:")
    name, weights = _timm_parts(name)
    if local and not Path(name).is_dir():
        raise ModelError(f"There is no folder {name!r}: give one that timm or Secateur wrote.")
    source = name
    if Path(name).is_dir():
        source, weights = f"local-dir:{name}", weights or name  # not read by timm, which would accept a pickle
    try:
        with asking_hub() if pretrained and not weights else contextlib.nullcontext(), _no_pickles(name):
            model: nn.Module = timm.create_model(source, pretrained=pretrained and not weights)
    except ModelError:
        raise
    except Exception as error:  # timm raises bare RuntimeErrors, and the hub client errors of its own
        raise ModelError(f"timm cannot create the model {name!r}: {first_line(error)}") from error
    fields = _timm_fields(Path(name)).get("secateur")
    if fields is not None:
        layout = _read_layout(name, fields, None)
        with _model_errors(name):
            fit(model, layout)
        _check_blocks(name, model, layout)
        network: Any = model
        network.secateur = fields
    if pretrained and weights:
        _load_weights(model, Path(weights))
    return model


def _timm_parts(name: str) -> tuple[str, str]:
    """The architecture or folder that a name starts with, and the path of its weights, empty if it has none."""
    name = name.removeprefix(TIMM).removeprefix("local-dir:")  # a folder is a folder, with timm's word before it or not
    architecture, _, weights = (name, "", "") if Path(name).is_dir() else name.partition("@")
    return architecture, weights


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load weights that have exactly the names and shapes of the model's tensors."""
    from safetensors.torch import load_file

    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"There is no file of weights {path}: give a .safetensors file, or a folder with a model.safetensors.")
    with _model_errors(str(path)):
        tensors = load_file(path)
    expected = model.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        shapes = [tuple(state[name].shape) if name in state else None for state in (expected, tensors)]
        if shapes[0] != shapes[1]:
            wants, has = (f"of shape {shape}" if shape is not None else "absent" for shape in shapes)
            raise ModelError(f"The weights in {path} are another model's: the tensor {name} is {has}, but should be {wants}.")
    model.load_state_dict(tensors)


def _timm_processor(model: nn.Module) -> Callable[[list[Any]], Tensor]:
    """A function from images to pixel values, with timm's transform for the model."""
    from timm import data

    config = data.resolve_model_data_config(model)
    _check_sides("of timm", config["input_size"])
    transform = data.create_transform(**config, is_training=False)
    return lambda images: torch.stack([transform(image) for image in images])
