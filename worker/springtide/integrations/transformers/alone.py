"""Let accelerate believe that this process is alone, on a device of its own, and tell it the rank in the job.

Accelerate asks the environment how many processes there are, and would form a group of its own with them,
which ends with the first one that is lost.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from accelerate import PartialState

from springtide.settings import Settings


def hide_local_rank(environ: MutableMapping[str, str]) -> None:
    """Rename LOCAL_RANK in a worker of a job, for accelerate takes it for torchrun's.

    Args:
        environ: of the process, before anything of accelerate is made.
    """
    if environ.get("SPRINGTIDE_COORDINATOR") and "LOCAL_RANK" in environ:
        environ["SPRINGTIDE_LOCAL_RANK"] = environ.pop("LOCAL_RANK")


def use_own_device(arguments: Any, settings: Settings) -> None:
    """Have the Trainer use one device, this process's own, whatever it sees.

    Args:
        arguments: a TrainingArguments, which has chosen the first GPU, or all of them.
        settings: of the process.
    """
    if arguments.device.type != "cuda":
        return
    if settings.local_world_size > 1:
        own = torch.device("cuda", settings.local_rank)
        torch.cuda.set_device(own)
        vars(arguments)["_setup_devices"] = own  # a cached property
        PartialState().device = own
    arguments._n_gpu = 1  # otherwise DataParallel would take all


def show_rank(rank: int) -> None:
    """Have the Trainer and accelerate know the rank, which says who writes and logs.

    Args:
        rank: of this process among the members, which come and go.
    """
    state = PartialState()
    state.process_index = state.local_process_index = rank
