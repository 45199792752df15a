"""Counts of a Lightning Trainer that a worker gets from another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


def made(folder: Path) -> tuple[Any, Any, list[str]]:
    """Return a Trainer, its `Progress`, and the names of the files that it saves from now on."""
    from springtide.integrations.lightning.carried import Progress

    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[pl.callbacks.ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    evaluations, saved = MagicMock(), list[str]()
    evaluations.begun = 15, 0, 7
    trainer.save_checkpoint = lambda path, *_: saved.append(Path(path).name)
    return trainer, Progress(trainer, evaluations), saved


def end_training(trainer: Any) -> None:
    trainer.checkpoint_callback.on_train_end(trainer, MagicMock())


def test_a_joiner_knows_what_is_saved_already(tmp_path: Path) -> None:
    """The callback does not save once more at the end of training, and so asks nobody about it."""
    trainer, progress, saved = made(tmp_path)
    end_training(trainer)
    joined, other, saved_again = made(tmp_path)
    other.load_state_dict(progress.state_dict())
    for each in (trainer, joined):
        end_training(each)
    assert (saved, saved_again) == (["last.ckpt"], [])


def test_a_state_of_an_earlier_release_is_taken(tmp_path: Path) -> None:
    _, progress, _ = made(tmp_path)
    values = progress.state_dict()
    now = json.loads(values["now"])
    del now["saved"]
    values["now"] = json.dumps(now)
    _, other, _ = made(tmp_path)
    other.load_state_dict(values)
