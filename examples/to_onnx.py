"""Write a model as an ONNX file that gives its logits, and compare the two:

    python examples/to_onnx.py FOLDER OUT.onnx

FOLDER holds any model that Secateur reads, dense or cut, its layers alike or not. A language model takes `input_ids` and
`attention_mask` (1 for a token, 0 for padding), batches and texts of any length; an image model takes `pixel_values`, batches
of any size. Needs `pip install 'secateur[onnx]'`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

import secateur as sc

ANY = torch.export.Dim.DYNAMIC


class Logits(nn.Module):
    """A model that takes and gives tensors alone, as a program must."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model


class TextLogits(Logits):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


class ImageLogits(Logits):
    def forward(self, pixel_values: Tensor) -> Tensor:
        output: Any = self.model(pixel_values)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits  # timm's models give a tensor
        return logits


def wrapped(model: nn.Module) -> tuple[Logits, dict[str, Tensor]]:
    """The model as a function of tensors, and an example of what it takes."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "vocab_size"):
        ids = torch.arange(16).reshape(2, 8) % config.vocab_size
        mask = torch.ones_like(ids)
        mask[0, :2] = 0  # so that the program heeds the mask
        return TextLogits(model), {"input_ids": ids, "attention_mask": mask}
    network: Any = model
    sizes = network.pretrained_cfg["input_size"][1:] if config is None else (config.image_size, config.image_size)
    channels = 3 if config is None else config.num_channels
    shape = (2, channels, *sizes)
    return ImageLogits(model), {"pixel_values": torch.linspace(-1, 1, math.prod(shape)).reshape(shape)}


def main(folder: str, path: str) -> None:
    import onnxruntime

    module, example = wrapped(sc.load_shrunk(folder, device="cpu", dtype="float32"))
    free = {"input_ids": {0: ANY, 1: ANY}, "attention_mask": {0: ANY, 1: ANY}, "pixel_values": {0: ANY}}
    shapes = {name: free[name] for name in example}
    with torch.no_grad():
        program = torch.onnx.export(
            module.eval(), (), kwargs=example, dynamic_shapes=shapes, dynamo=True, output_names=["logits"], verbose=False
        )
        assert program is not None
        program.save(path)
        expected = module(**example)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in example.items()})
    difference = float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max())
    print(f"{path}: the logits differ from the model's by at most {difference:.1e} of their scale.")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
