"""Write a model as an ONNX file that gives its logits, and compare the two:

    python examples/to_onnx.py FOLDER OUT.onnx

FOLDER holds any model that Secateur reads, dense or cut, its layers alike or not. A text model takes `input_ids` and
`attention_mask` (1 for a token, 0 for padding), batches and texts of any size; an image model takes `pixel_values`, batches
of any size. Needs `pip install 'secateur[onnx]'`.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import secateur as sc


class TextLogits(nn.Module):
    """A text model that takes and gives tensors alone: its logits, or without a head its last hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output: Any = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options)
        logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return logits


class ImageLogits(nn.Module):
    """An image model that takes and gives tensors alone: its logits, or without a head its embeddings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        output: Any = self.model(pixel_values)
        if isinstance(output, Tensor):
            return output  # timm's models
        logits: Tensor = output.logits if hasattr(output, "logits") else output.pooler_output
        return logits


def wrapped(model: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model as a function of tensors, and an example of what it takes."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "vocab_size"):
        ids = torch.arange(16).reshape(2, 8) % config.vocab_size
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0  # of a mask without zeros the exporter might make a constant
        return TextLogits(model), {"input_ids": ids, "attention_mask": mask}
    shape = (2, 3, *model.patch_embed.img_size) if config is None else (2, config.num_channels, *[config.image_size] * 2)
    return ImageLogits(model), {"pixel_values": torch.linspace(-1, 1, math.prod(shape)).reshape(shape)}


def export(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model, which is in float32 on the CPU."""
    module, example = wrapped(model)
    free = (0, 1) if "input_ids" in example else (0,)  # batch and, for a text, its length
    shapes = {name: dict.fromkeys(free, torch.export.Dim.DYNAMIC) for name in example}
    with torch.no_grad():
        program = torch.onnx.export(
            module.eval(), (), kwargs=example, dynamic_shapes=shapes, output_names=["logits"], dynamo=True, verbose=False
        )
    assert program is not None
    program.save(path)


def difference(model: nn.Module, path: str | os.PathLike[str]) -> float:
    """The largest difference of the file's logits from the model's, as a share of the largest logit; padding left out."""
    import onnxruntime

    module, example = wrapped(model)
    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(["logits"], {name: tensor.numpy() for name, tensor in example.items()})[0])
    with torch.no_grad():
        expected: Tensor = module(**example)
    real = example["attention_mask"].bool() if expected.dim() == 3 else ...  # a row for each token
    return float((found - expected)[real].abs().max() / expected[real].abs().max())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, path = sys.argv[1:]
    model = sc.load_shrunk(folder, device="cpu", dtype="float32")
    export(model, path)
    print(f"{path}: its logits differ from the model's by at most {difference(model, path):.1e} of the largest.")
