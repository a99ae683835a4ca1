"""Prune a model and follow it in Weights & Biases:

    python examples/with_wandb.py MODEL OUT [SETTINGS.toml]

The settings are those of docs/settings.md, a line each, such as `ratio = 0.2`. Needs `pip install wandb`; its own variables
(WANDB_PROJECT, WANDB_MODE) say where the run goes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import secateur as sc
from secateur.watcher import HealProgress, Progress


class WandB(sc.Watcher):
    """Logs to a run of Weights & Biases. What has one value goes to its summary."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def pull(self, progress: Progress) -> None:
        self.run.log({"pull/damage": progress.damage, "pull/least mean damage": progress.best_damage})

    def chosen(self, step: sc.Step, n_steps: int) -> None:
        known = {"chosen/damage": step.damage, "chosen/passes": step.passes, "chosen/sure": step.sure}
        self.run.log({name: value for name, value in known.items() if value is not None})

    def judged(self, side: str, evaluation: sc.Evaluation) -> None:
        figures = sorted(evaluation.figures - {"batch_losses"})
        self.run.summary.update({f"{side}/{name}": getattr(evaluation, name) for name in figures})

    def repaired(self, repair: sc.Repair) -> None:
        self.run.summary.update({f"repair/{form}": loss for form, loss in repair.losses.items()})

    def healed(self, progress: HealProgress) -> None:
        if progress.judged:
            self.run.log({"heal/held out": progress.loss})

    def measured(self, measurement: sc.Measurement) -> None:
        speedups = {f"speedup/{one.name}, batch {one.batch_size}": one.speedup.value for one in measurement.timings}
        self.run.summary.update(speedups | {"params": measurement.small_params})


def main(model: str, out: str, file: str = "") -> None:
    import wandb

    settings = tomllib.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    with wandb.init(config={"model": model, **settings}) as run:
        sc.prune(model, out=out, watcher=WandB(run), **settings)
        run.save(f"{out}/selection.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
