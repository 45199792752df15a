"""`spec.strategy.allReduce`, as users write it: how workers sum gradients among themselves."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from springtide_operator.api.base import ApiModel
from springtide_operator.api.names import MAX_WORKERS


class Backend(StrEnum):
    AUTO = "Auto"
    GLOO = "Gloo"
    NCCL = "NCCL"


class Compression(StrEnum):
    NONE = "None"
    BF16 = "BF16"
    FP16 = "FP16"
    POWER_SGD = "PowerSGD"


class Shard(StrEnum):
    NONE = "None"
    OPTIMIZER = "Optimizer"
    GRADIENTS = "Gradients"


class AllReduce(ApiModel):
    """How gradients are summed."""

    backend: Backend = Field(
        default=Backend.AUTO,
        description="What carries the sums. Auto: NCCL for a model on a GPU, gloo for one on the CPU."
        " Gloo takes a GPU's gradients through the host. Holds for pods made afterwards.",
    )
    bucket_mib: int = Field(
        default=25,
        ge=1,
        le=1024,
        alias="bucketMiB",
        description="Size of the largest buckets in which gradients are reduced, in MiB; on CPUs a model has"
        " about eight in any case, of 2 MiB at least. Holds for pods made afterwards.",
    )
    compression: Compression = Field(
        default=Compression.NONE,
        description="How gradients travel. BF16, FP16: in 16 bits. PowerSGD: matrices as two factors of rank"
        " 4; what that leaves out is added to the next step's gradient. Not with exact. With Hybrid it is"
        " that of the dense gradients. Immutable.",
    )
    shard: Shard = Field(
        default=Shard.NONE,
        description="What is divided among the workers instead of being in each of them, for models larger"
        " than one worker. Optimizer: the optimizer's state; each part of it is in two workers, so that the"
        " loss of one costs nothing. Gradients: summed gradients as well (with exact: as Optimizer). With"
        " strategy.type AllReduce; not with compression. Immutable.",
    )
    exact: bool = Field(
        default=False,
        description="Whether the final weights are equal bit for bit at any number of workers, whatever"
        " happened to them (one machine type, one number of threads). Needs workers.maxReplicas; times"
        " processesPerPod it is at most logicalWorkers. Immutable.",
    )
    logical_workers: int = Field(
        default=8,
        ge=1,
        le=MAX_WORKERS,
        description="With exact: into how many parts each global batch is cut, whatever the number of"
        " workers. Immutable.",
    )
