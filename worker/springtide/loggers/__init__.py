"""Experiment trackers: `springtide.init(loggers=[...])` writes what `report()` is given to them.

    springtide.init(loggers=[springtide.loggers.TensorBoard("/runs")], config={"lr": 0.1})

One process of the job writes: each committed step, none that was dropped, under the step's number. When
another one takes over, it reads how far the tracker is and goes on from there. See `Logger` for a tracker of
your own.
"""

from __future__ import annotations

from springtide.loggers.logger import Generation, Logger, Record, Recorded, Run
from springtide.loggers.mlflow import MLflow
from springtide.loggers.tensorboard import TensorBoard
from springtide.loggers.wandb import WandB

__all__ = ["Generation", "Logger", "MLflow", "Record", "Recorded", "Run", "TensorBoard", "WandB"]
