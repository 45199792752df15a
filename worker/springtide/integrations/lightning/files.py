"""Have loggers and checkpoints in one place, whichever worker of the job writes."""

from __future__ import annotations

import csv
import io
import os
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import CSVLogger

if TYPE_CHECKING:
    import lightning.pytorch as pl


def use_one_version(trainer: pl.Trainer, run: str) -> None:
    """Give loggers that number their folders the job's own name for one.

    Each process would count the folders that are there, and find other ones than those before it.

    Args:
        trainer: whose loggers they are.
        run: name of the job's run, the same in all its processes, and in no other job.
    """
    for logger in trainer.loggers:
        if "_version" in vars(logger) and logger._version is None:
            logger._version = run


def keep_earlier_rows(logger: Any, steps: int) -> None:
    """Have a CSVLogger go on with the file of the job's former rank 0, which it would delete.

    Args:
        logger: of any kind; others go on by themselves.
        steps: that are committed; rows of later ones belong to steps that were lost.
    """
    if not isinstance(logger, CSVLogger) or logger._experiment is not None:
        return
    path = os.path.join(logger.log_dir, "metrics.csv")
    if not logger._fs.isfile(path):
        return
    with logger._fs.open(path, "r", newline="") as file:
        reader = csv.DictReader(file)
        rows, names = [row for row in reader if int(row.get("step") or 0) <= steps], reader.fieldnames or []
    writer = logger.experiment
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, fieldnames=names)
    table.writeheader()
    table.writerows(rows)
    with logger._fs.open(path, "w", newline="") as file:
        file.write(text.getvalue())
    writer.metrics_keys = list(names)
