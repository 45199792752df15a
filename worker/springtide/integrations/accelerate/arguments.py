"""Every argument of accelerate's `Accelerator`, and what becomes of it in an elastic job.

PURE: imports no accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from springtide.integrations.treatment import Field, Treatment, irrelevant, refused, supported

_SAME = "as in Accelerate"
_PARALLEL = (
    "use strategy.allReduce.shard in the manifest, or Accelerate by `springtide launch --torchrun-env`"
)
_COMPILE = (
    "a worker that joins would compile while all others wait for it, and it was not tried: compile parts of "
    "the model yourself (torch.compile(model.layer))"
)

ARGUMENTS: Final[Mapping[str, Field]] = {
    "device_placement": supported(_SAME),
    "split_batches": irrelevant("samples are dealt by the library"),
    "mixed_precision": refused(
        "its loss scale belongs to one process, or it was not tried: use bf16", None, "no", "bf16"
    ),
    "gradient_accumulation_steps": supported(
        "a factor of the global batch; a worker makes as many micro-batches as its part needs"
    ),
    "cpu": supported(_SAME),
    "dataloader_config": irrelevant("samples are dealt by the library"),
    "deepspeed_plugin": refused(_PARALLEL),
    "fsdp_plugin": refused(_PARALLEL),
    "torch_tp_plugin": refused(_PARALLEL),
    "megatron_lm_plugin": refused(_PARALLEL),
    "rng_types": irrelevant("random numbers in a step belong to (seed, step, part of the batch)"),
    "log_with": supported("the tracker begins where rank 0 logs for the first time"),
    "project_dir": supported("on a volume that all workers mount"),
    "project_config": supported(_SAME),
    "gradient_accumulation_plugin": refused("use gradient_accumulation_steps"),
    "step_scheduler_with_optimizer": supported(_SAME),
    "kwargs_handlers": supported("of autocast and profile; those of DistributedDataParallel mean nothing"),
    "dynamo_backend": refused(_COMPILE, None, "no", "NO"),
    "dynamo_plugin": refused(_COMPILE),
    "deepspeed_plugins": refused(_PARALLEL),
    "parallelism_config": refused(_PARALLEL),
}
"""Arguments of Accelerator by name, each with how `ElasticAccelerator` treats it."""


def unclassified(parameters: Mapping[str, Any]) -> list[str]:
    """Return the parameters of an installed Accelerator's constructor that `ARGUMENTS` lacks."""
    return [name for name in parameters if name not in ARGUMENTS and name != "self"]


def refusals(given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each argument that cannot be, which says why and what to do.

    Args:
        given: the arguments that the script gives, by name.
    """
    found = []
    for name, value in given.items():
        known = ARGUMENTS.get(name)
        if known is None:
            found.append(
                f"{name}={value!r}: this release of springtide does not know what becomes of it in an "
                "elastic job: leave it out"
            )
        elif known.treatment is Treatment.REFUSED and not known.is_allowed(value):
            found.append(f"{name}={value!r}: {known.note}")
    return found
