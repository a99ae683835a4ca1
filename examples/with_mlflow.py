"""Prune a model and follow it in MLflow:

    python examples/with_mlflow.py MODEL OUT [SETTINGS.toml]

The settings are those of docs/settings.md, a line each, such as `ratio = 0.2`. Needs `pip install mlflow`; MLflow's own
variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME) say where the run goes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import secateur as sc
from secateur.watcher import HealProgress, Progress


class MLflow(sc.Watcher):
    """Logs a run to the active run of MLflow."""

    def __init__(self) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        self._pulls = 0

    def pull(self, progress: Progress) -> None:
        self._pulls += 1
        self.mlflow.log_metric("pull.damage", progress.damage, step=self._pulls)

    def chosen(self, step: sc.Step, n_steps: int) -> None:
        known = {"chosen.damage": step.damage, "chosen.passes": step.passes, "chosen.sure": step.sure}
        self.mlflow.log_metrics({name: value for name, value in known.items() if value is not None}, step=step.step)

    def judged(self, side: str, evaluation: sc.Evaluation) -> None:
        figures = sorted(evaluation.figures - {"batch_losses"})
        self.mlflow.log_metrics({f"{side}.{name}": getattr(evaluation, name) for name in figures})

    def repaired(self, repair: sc.Repair) -> None:
        self.mlflow.log_metrics({f"repair.{form.replace(' ', '_')}": loss for form, loss in repair.losses.items()})

    def healed(self, progress: HealProgress) -> None:
        if progress.judged:
            self.mlflow.log_metrics({"heal.held_out": progress.loss}, step=progress.step)

    def measured(self, measurement: sc.Measurement) -> None:
        speedups = {f"speedup.{one.name}.batch_{one.batch_size}": one.speedup.value for one in measurement.timings}
        self.mlflow.log_metrics(speedups | {"params": measurement.small_params})


def main(model: str, out: str, file: str = "") -> None:
    settings = tomllib.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    watcher = MLflow()
    with watcher.mlflow.start_run():
        watcher.mlflow.log_params({"model": model, **settings})
        sc.prune(model, out=out, watcher=watcher, **settings)
        watcher.mlflow.log_artifact(f"{out}/selection.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
