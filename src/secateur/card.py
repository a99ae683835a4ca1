"""The model card of a pruned checkpoint (README.md), and its tables; made of what secateur.json says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Any]
UNITS = {"head": "attention head", "mlp": "MLP channel group", "kv_group": "K/V group"}
FIGURES = {
    "loss": "loss",
    "perplexity": "perplexity",
    "last_word_accuracy": "last-word accuracy",
    "top1": "top-1",
    "top5": "top-5",
    "nonfinite_batches": "non-finite batches",
}


def model_card(record: Fields) -> str:
    """README.md: what was removed, how, what it cost and won, and how to load it."""
    name, settings = _plain(str(record["model"])), record["settings"]
    timm = str(record["family"]).startswith("timm/")
    left, total = record["params"], record["dense_params"]
    task = "text-generation" if record["task"] == "text" else "image-classification"
    chosen = ", ".join(f"{key} `{_plain(str(settings[key]))}`" for key in ("method", "target", "seed") if key in settings)
    how = (
        f"By Secateur: {chosen}, on the calibration data `{_plain(str(settings.get('calibration', '-')))}`; " if chosen else ""
    )
    library, base = "timm" if timm else "transformers", json.dumps(str(record["model"]), ensure_ascii=False)
    parts = [
        f"---\nbase_model: {base}\nlibrary_name: {library}\npipeline_tag: {task}\ntags:\n- pruned\n- secateur\n---",
        f"# `{name}`, pruned",
        f"This is `{name}` without {removed(record['units'])}: {left:,} of {total:,} parameters ({left / total:.1%}) are "
        "left. `secateur.json` lists what is gone.",
        "## Load it",
        f"```python\n{_loading(record, timm=timm)}\n```",
        "## What was removed, and how it was chosen",
        f"{how}{record.get('pulls', 0):,} paired measurements. Units as layer.index, counted from 0:",
        "\n".join(f"- {line}" for line in unit_lines(record["units"])),
        "## What it cost",
        _costs(record),
        "## Proof",
        f"On {record['proof']['batches']} calibration batches {record['proof']['sentence']}.",
    ]
    if record.get("repair"):
        parts += ["## Repair", record["repair"]["sentence"]]
    if record.get("goal"):
        parts += ["## Target", goal_sentence(record["goal"])]
    if record.get("measurement"):
        found = record["measurement"]
        titles, rows = measurement_table(found)
        parts += ["## What it won", markdown(titles, rows), measured_where(found), *found["verdicts"]]
    return "\n\n".join(parts) + "\n"


def removed(units: Sequence[Fields]) -> str:
    """How many units of which kind."""
    counts = {kind: sum(unit["kind"] == kind for unit in units) for kind in UNITS}
    return " and ".join(f"{n} {UNITS[kind]}{'s' if n > 1 else ''}" for kind, n in counts.items() if n)


def unit_lines(units: Sequence[Fields]) -> list[str]:
    """Each kind and layer with its indices, such as `head 3.5,6`."""
    by_layer: dict[tuple[str, int], list[int]] = {}
    for unit in units:
        by_layer.setdefault((unit["kind"], unit["layer"]), []).append(unit["index"])
    return [f"{kind} {layer}.{','.join(map(str, sorted(indices)))}" for (kind, layer), indices in sorted(by_layer.items())]


def goal_sentence(goal: Fields) -> str:
    text = (
        f"{float(goal['asked']):.1%} of the dense model's {goal['what']} were asked for, and {float(goal['got']):.2%} are left"
    )
    if goal.get("measured") is not None:
        text += f" by the table measured before; {float(goal['measured']):.2%} were measured afterwards"
    return text + "."


def measurement_table(found: Fields) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of dense and small side by side."""
    rows = [["parameters", f"{found['dense_params']:,}", f"{found['small_params']:,}", _ratio(found, "params"), ""]]
    for key, title in (("disk", "MB on disk"), ("memory", "peak MB in memory")):
        if found.get(f"dense_{key}") and found.get(f"small_{key}"):
            sides = [f"{found[f'{side}_{key}'] / 1e6:,.1f}" for side in ("dense", "small")]
            rows.append([title, *sides, _ratio(found, key), ""])
    for timing in found["timings"]:
        what = {"prefill": "ms for a prompt", "decode": "ms for a token", "forward": "images a second"}[timing["name"]]
        sides = [_interval(timing[f"{side}_median"], ".1f") for side in ("dense", "small")]
        if timing["name"] == "forward":
            sides = [f"{timing[f'{side}_images_per_second']:.1f}" for side in ("dense", "small")]
        speedup, flops = _interval(timing["speedup"], ".2f"), f"{timing['flop_ratio']:.2f}"
        rows.append([f"{what}, batch {timing['batch_size']}", *sides, speedup, flops])
    return ["", "dense", "small", "dense/small", "FLOPs dense/small"], rows


def measured_where(found: Fields) -> str:
    length = f"; a prompt has {found['tokens']} tokens" if found.get("tokens") else ""
    threads = f"{found['threads']} threads" if found["threads"] != 1 else "1 thread"
    return (
        f"Medians with 95% intervals of {len(found['timings'][0]['dense_ms'])} repetitions, the models taking turns: "
        f"{found['device']}, {threads}, {found['dtype']}, torch {found['torch_version']}{length}."
    )


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def _costs(record: Fields) -> str:
    titles = {"dense": "dense", "masked": "masked", "shrunk": "this model"}
    sides = {titles[key]: record[key] for key in titles if record.get(key)}
    if "this model" not in sides:
        return "It was not evaluated."
    rows = [
        [title, *(f"{float(side[key]):.4f}" for side in sides.values())]
        for key, title in FIGURES.items()
        if all(key in side for side in sides.values())
        and (key != "nonfinite_batches" or any(side[key] for side in sides.values()))
    ]
    return markdown(["", *sides], rows) + f"\n\nOn `{_plain(str(record['data']))}`, which did not choose the units."


def _loading(record: Fields, *, timm: bool) -> str:
    auto = "AutoModelForCausalLM" if record["task"] == "text" else "AutoModelForImageClassification"
    if record["layout"] == "uniform":
        if timm:
            return 'import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True)'
        return f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("FOLDER")'
    ours = 'import secateur\n\nmodel = secateur.load_shrunk("FOLDER")'
    if timm:
        return ours
    return (
        f"{ours}\n\n# or by the code in this folder, where Secateur is not installed\nfrom transformers import {auto}\n\n"
        f'model = {auto}.from_pretrained("FOLDER", trust_remote_code=True)'
    )


def _ratio(found: Fields, key: str) -> str:
    return f"{found[f'dense_{key}'] / found[f'small_{key}']:.3f}"


def _interval(median: Fields, form: str) -> str:
    return f"{median['value']:{form}} ({median['low']:{form}} to {median['high']:{form}})"


def _plain(text: str) -> str:
    """A name as code in Markdown: nothing that would end the code or its line."""
    return " ".join(text.replace("`", "'").split())
