"""Parameter servers, as users ask for them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from springtide_operator.api.base import ApiModel
from springtide_operator.api.pod_template import server_template, without_nulls

MAX_SERVERS = 64


class Consistency(StrEnum):
    SYNCHRONOUS = "Synchronous"
    BOUNDED_STALENESS = "BoundedStaleness"
    ASYNCHRONOUS = "Asynchronous"


class PushCompression(StrEnum):
    NONE = "None"
    BF16 = "BF16"
    FP16 = "FP16"
    TOP_K = "TopK"


class ParameterServer(ApiModel):
    """How parameters are kept on servers."""

    compression: PushCompression = Field(
        default=PushCompression.NONE,
        description="How gradients travel to the servers, which sum them in the parameters' own type. BF16,"
        " FP16: in 16 bits, with Hybrid the gradients of tables' rows. TopK, not with Hybrid: the largest"
        " elements of each part; what that leaves out is added to the next step's gradient. Immutable.",
    )
    top_k_ratio: float = Field(
        default=0.01,
        ge=0.0001,
        le=1,
        description="With compression TopK: which part of the elements travels, 0.01 for one in a hundred."
        " From 0.5 on all of them do. Immutable.",
    )
    early_values: bool = Field(
        default=True,
        description="Synchronous and Asynchronous: servers send a step's values while its other gradients are"
        " still computed, where nothing needs all gradients first. Takes twice the memory on the servers."
        " Immutable.",
    )
    consistency: Consistency = Field(
        default=Consistency.SYNCHRONOUS,
        description="Synchronous: a step counts when all workers' gradients of it are in; the numbers are"
        " those of one process. Asynchronous: each worker computes whole global batches by itself, and the"
        " servers apply its gradients when they come. BoundedStaleness: so, but no worker gets more than"
        " staleness steps ahead of the slowest. A change takes effect at a step boundary, to Synchronous at"
        " the end of the running epoch, and no process restarts.",
    )
    staleness: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="How many steps the fastest worker may be ahead of the slowest, with consistency"
        " BoundedStaleness. A change takes effect at a step boundary.",
    )
    replication: int = Field(
        default=1,
        ge=1,
        le=2,
        description="Servers that hold each part of the parameters. With 2 the loss of one loses nothing;"
        " with 1 what it held is lost, and training starts again, or from a checkpoint (unless consistency is"
        " not Synchronous: then from what workers pulled last). At most"
        " parameterServers.replicas. Immutable.",
    )


ServerTemplate = Annotated[
    dict[str, Any],
    BeforeValidator(without_nulls),
    WithJsonSchema(server_template()),
]


class ParameterServers(ApiModel):
    """The pods of parameter servers and how many of them there are."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=MAX_SERVERS,
        description="Servers wanted. A change moves parameters between servers at a step boundary; no worker"
        " restarts.",
    )
    template: ServerTemplate | None = Field(
        default=None,
        description="What the servers' pods are to have besides: resources, node selector, affinity, image."
        " Pull secrets, tolerations, node selector, priority class and scheduler are the worker template's"
        " unless given here. A change holds for pods made afterwards, and pods that have not begun are made"
        " anew; status.parameterServers.outdated counts the older ones.",
    )
