"""The job's coordinator, as users ask for it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from springtide_operator.api import pod_template
from springtide_operator.api.base import ApiModel

Resources = Annotated[
    dict[str, Any], BeforeValidator(pod_template.without_nulls), WithJsonSchema(pod_template.resources())
]
Tolerations = Annotated[
    list[Any], BeforeValidator(pod_template.without_nulls), WithJsonSchema(pod_template.tolerations())
]
NodeSelector = Annotated[
    dict[str, str], BeforeValidator(pod_template.without_nulls), WithJsonSchema(pod_template.node_selector())
]
Affinity = Annotated[
    dict[str, Any], BeforeValidator(pod_template.without_nulls), WithJsonSchema(pod_template.affinity())
]


class Coordinator(ApiModel):
    """The pod that keeps the job's members together; it needs no device."""

    resources: Resources | None = Field(
        default=None,
        description="Requests and limits of its container. Absent: requests that grow with maxReplicas (or"
        " replicas) x processesPerPod, from 50m and 96Mi on.",
    )
    node_selector: NodeSelector | None = Field(
        default=None,
        description="Labels of the nodes that it may be on. Absent: those of the worker template.",
    )
    tolerations: Tolerations | None = Field(
        default=None,
        description="Taints that it bears. Absent: those of the worker template. A lost node is given up"
        " after 20 s, unless they say something else of it.",
    )
    affinity: Affinity | None = Field(
        default=None, description="Its affinity, as in a PodSpec. Absent: none; the workers' is not taken."
    )
    priority_class_name: str | None = Field(
        default=None,
        max_length=253,
        description="Its priority class. Absent: that of the worker template.",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Its image, with springtide_coordinator in it. Absent: the operator's own.",
    )
