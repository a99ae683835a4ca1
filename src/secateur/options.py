"""What the commands can be told, in the order in which `--help` lists it, and what some of it stands for."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from secateur.cut import check_repair
from secateur.errors import SettingError
from secateur.models import DTYPES
from secateur.prune import AUTO, METHODS, SCREENS
from secateur.units import TARGETS

CHOOSING, SEARCH, DATA, CUTTING, MACHINE = "What to remove", "How to search", "Data", "Cutting", "Machine and output"

Model = Annotated[
    str,
    typer.Argument(help="A model folder, a hub name, or timm:NAME (timm:NAME@FOLDER for local weights).", show_default=False),
]
Target = Annotated[str, typer.Option(help=f"Which units may go: {', '.join(TARGETS)}.", rich_help_panel=CHOOSING)]
Ratio = Annotated[float, typer.Option(help="How much of the units to remove: 0.10 is a tenth.", rich_help_panel=CHOOSING)]
Method = Annotated[str, typer.Option(help=f"Who chooses: {', '.join(METHODS)}.", rich_help_panel=CHOOSING)]
GroupWidth = Annotated[int, typer.Option(help="MLP channels in a group.", rich_help_panel=CHOOSING)]
Seed = Annotated[int, typer.Option(help="Same seed and settings, same selection.", rich_help_panel=SEARCH)]
Pulls = Annotated[int, typer.Option(help="Paired measurements for each unit removed.", rich_help_panel=SEARCH)]
PullBatches = Annotated[int, typer.Option(help="Calibration batches in a measurement.", rich_help_panel=SEARCH)]
StepBatches = Annotated[
    int,
    typer.Option(
        help="Let the measurements for a unit share this many batches: fewer model passes; 0 draws from all.",
        rich_help_panel=SEARCH,
    ),
]
Temperature = Annotated[
    float, typer.Option(help="Scale of the damage: one of this size earns reward 0.27, none earns 0.5.", rich_help_panel=SEARCH)
]
UcbC = Annotated[float, typer.Option(help="How much UCB explores.", rich_help_panel=SEARCH)]
PoolSize = Annotated[
    int,
    typer.Option(help="Candidates tried for each unit removed; 0 takes twice the root of those left.", rich_help_panel=SEARCH),
]
Screen = Annotated[
    int,
    typer.Option(
        help="Consider only this many of lowest score; 0 considers all. [default: 48 for text, 0 for images]",
        show_default=False,
        rich_help_panel=SEARCH,
    ),
]
ScreenBy = Annotated[str, typer.Option(help=f"Whose score: {', '.join(SCREENS)}.", rich_help_panel=SEARCH)]
ScoreBatches = Annotated[
    int, typer.Option(help="Calibration batches that wanda, taylor and fisher look at.", rich_help_panel=SEARCH)
]
Calibration = Annotated[
    str,
    typer.Option(
        help="What chooses: builtin, wikitext2, lambada, a text, jsonl or parquet file, a folder, a hub data set.",
        rich_help_panel=DATA,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        help="What judges, named in the same ways; never what chose. [default: the held-out split of --calibration]",
        show_default=False,
        rich_help_panel=DATA,
    ),
]
SeqLen = Annotated[int, typer.Option(help="Tokens in a text.", rich_help_panel=DATA)]
BatchSize = Annotated[
    int, typer.Option(help="Texts or images in a batch. [default: 4 texts, 8 images]", show_default=False, rich_help_panel=DATA)
]
CalibrationSize = Annotated[
    int,
    typer.Option(
        help="Texts or images to calibrate on, at most. [default: 512 texts, 1024 images]",
        show_default=False,
        rich_help_panel=DATA,
    ),
]
EvaluationSize = Annotated[
    int,
    typer.Option(
        help="Texts or images to evaluate on, at most. [default: 1024 texts, 2000 images]",
        show_default=False,
        rich_help_panel=DATA,
    ),
]
EvaluationBatches = Annotated[
    int,
    typer.Option(
        help="Batches to evaluate on, at most; 0 is all. [default: 80 of texts, all of images]",
        show_default=False,
        rich_help_panel=DATA,
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        help="free: each layer loses what it can do without; uniform: each loses as much, and any loader reads the result; "
        "none: nothing is cut.",
        rich_help_panel=CHOOSING,
    ),
]
TargetParams = Annotated[
    float,
    typer.Option(
        help="Instead of a ratio: the share of the parameters to be left.", show_default=False, rich_help_panel=CHOOSING
    ),
]
TargetFlops = Annotated[
    float,
    typer.Option(help="Instead of a ratio: the share of the FLOPs to be left.", show_default=False, rich_help_panel=CHOOSING),
]
TargetLatency = Annotated[
    float,
    typer.Option(
        help="Instead of a ratio: the share of the time to be left, by a table measured on this machine.",
        show_default=False,
        rich_help_panel=CHOOSING,
    ),
]
Repair = Annotated[
    bool,
    typer.Option(
        "--repair", help="Fit what is left to make up for what is gone; kept only if it helps.", rich_help_panel=CUTTING
    ),
]
RepairForm = Annotated[
    str, typer.Option(help="least-squares, bias, or auto for the better of the two.", rich_help_panel=CUTTING)
]
Measuring = Annotated[
    bool, typer.Option("--measure/--no-measure", help="Measure dense against small at the end.", rich_help_panel=CUTTING)
]
ShardSize = Annotated[str, typer.Option(help="The largest file of weights.", rich_help_panel=CUTTING)]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps, or auto for the best there is.", rich_help_panel=MACHINE)]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.", rich_help_panel=MACHINE)]
CacheMemory = Annotated[
    float,
    typer.Option(
        help="GiB for kept block outputs; 0 keeps none. Changes the speed, not the result. [default: half of what is free]",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
Stack = Annotated[
    int,
    typer.Option(
        help="Masked runs made as one on a larger batch; may pay on a GPU, see secateur bench --stack.", rich_help_panel=MACHINE
    ),
]
Lanes = Annotated[
    int,
    typer.Option(
        help="Runs that go side by side, sharing the threads. [default: 2 on a CPU, 1 elsewhere]",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings along.", rich_help_panel=MACHINE)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=MACHINE)]


def repair_form_of(form: str) -> str:
    form = form.replace("-", " ")
    check_repair(form)
    return form


def lanes_of(lanes: int) -> int | None:
    if lanes != AUTO and lanes < 1:
        raise SettingError(f"The lanes are {lanes}, but must be at least 1.")
    return None if lanes == AUTO else lanes


def gibibytes(memory: float) -> int | None:
    if memory == AUTO:
        return None
    if not 0 <= memory < math.inf:
        raise SettingError(f"The cache memory is {memory} GiB, but must be a finite number, 0 or more.")
    return int(memory * 2**30)
