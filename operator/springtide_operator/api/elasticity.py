"""`spec.elasticity`, as users write it: who decides how many workers there are."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from springtide_operator.api.base import ApiModel


class ElasticityPolicy(StrEnum):
    MANUAL = "Manual"
    CAPACITY = "Capacity"
    THROUGHPUT = "Throughput"


class Balance(StrEnum):
    SPEED = "Speed"
    EVEN = "Even"


class Elasticity(ApiModel):
    """How many workers there are, within minReplicas and maxReplicas, and how they share the work."""

    policy: ElasticityPolicy = Field(
        default=ElasticityPolicy.MANUAL,
        description="Manual: workers.replicas. Capacity: workers.replicas, and extra workers up to"
        " maxReplicas as long as nodes take them; extras are given back first, as soon as another pod waits"
        " for a node. Throughput: between minReplicas and workers.replicas, as long as a worker more brings"
        " enough samples per second.",
    )
    balance: Balance = Field(
        default=Balance.EVEN,
        description="How a global batch is cut. Speed: by the workers' measured speed, so that nobody waits"
        " for a slow one; with exact it is the number of logical parts that follows speed, and bits stay"
        " equal. Even: as evenly as can be, the same in each run. The batch itself stays what the script"
        " says. Not for workers that do not step together, nor within a mesh() of a pod. Holds for pods made"
        " afterwards; while workers differ in it, parts are even.",
    )
    patience_seconds: int = Field(
        default=30,
        ge=1,
        le=3600,
        description="How long extra workers may wait for a node before they are given back. The next try"
        " comes after twice as long, then after four times, ... at most ten minutes; at once when a node"
        " is added. With Throughput: how long workers of a size that is to be measured may wait.",
    )
    min_gain_percent: int = Field(
        default=50,
        ge=1,
        le=100,
        description="Throughput: what each added worker must bring at least, in percent of what a worker"
        " brought on average before.",
    )
    measure_seconds: int = Field(
        default=30,
        ge=1,
        le=3600,
        description="Throughput: how long a number of workers is measured, and at least ten steps.",
    )
    move_on_cordon: bool = Field(
        default=False,
        description="Whether workers move away from a node as soon as it is cordoned: the replacement starts"
        " elsewhere, and the worker leaves when that one trains. Without it they stay until they are evicted,"
        " as by kubectl drain. From a node with a taint that says that it is about to go (autoscalers,"
        " clouds) they always move.",
    )
