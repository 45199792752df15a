"""The templates of the platform's team, as it writes them: TrainingTemplate and ClusterTrainingTemplate."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from springtide_operator.api import pod_template
from springtide_operator.api.base import ApiModel, rule
from springtide_operator.api.names import MAX_WORKERS
from springtide_operator.api.servers import MAX_SERVERS

# The fields of a job's spec, all of them optional: `api.crd` writes them here.
Defaults = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]
Quantities = Annotated[dict[str, Any], WithJsonSchema(pod_template.quantities())]
Image = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z0-9._/:@*-]+$")]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
FieldName = Annotated[
    str,
    Field(min_length=1, max_length=256, pattern=r"^[a-zA-Z][A-Za-z0-9]*(\.[A-Za-z0-9_/-]+)*$"),
]
MAX_ENTRIES = 64


class TemplateLimits(ApiModel):
    """Limits of the jobs with this template. A field that is absent limits nothing."""

    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WORKERS,
        description="Workers at most: of workers.maxReplicas, which a job that does not say it gets, and of"
        " workers.replicas.",
    )
    max_standby: int | None = Field(
        default=None, ge=0, le=MAX_WORKERS, description="Standbys at most (workers.standby)."
    )
    max_servers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SERVERS,
        description="Parameter servers at most (parameterServers.replicas).",
    )
    max_resources: Quantities | None = Field(
        default=None,
        description="By resource, how much of it a pod of the job may ask for at most: its containers' limits"
        " together, or requests where there are none. Not of a container that says nothing of the resource:"
        " a LimitRange gives it something to say.",
    )
    images: list[Image] | None = Field(
        default=None,
        max_length=MAX_ENTRIES,
        description="Images that containers of the job may have; * stands for any characters.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    service_account_names: list[ObjectName] | None = Field(
        default=None,
        max_length=MAX_ENTRIES,
        description="Service accounts that pods of the job may name.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    priority_class_names: list[ObjectName] | None = Field(
        default=None,
        max_length=MAX_ENTRIES,
        description="Priority classes that pods of the job may name.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    queue_names: list[ObjectName] | None = Field(
        default=None,
        max_length=MAX_ENTRIES,
        description="Queues of Kueue, one of which the job's label kueue.x-k8s.io/queue-name has to name.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    fixed_fields: list[FieldName] | None = Field(
        default=None,
        max_length=MAX_ENTRIES,
        description="Fields of the job's spec, such as strategy.allReduce or"
        " workers.template.spec.hostNetwork, that are as the template has them: a job that makes anything"
        " else of them is refused. Where the template does not have the field, no job has it.",
        json_schema_extra={
            "x-kubernetes-list-type": "set",
            "x-kubernetes-validations": [
                rule(
                    "self.all(one, !(one in ['workers', 'workers.replicas', 'suspend', 'managedBy']))",
                    "fixedFields names what only a job can say: workers.replicas, suspend or managedBy",
                )
            ],
        },
    )


class TrainingTemplateSpec(ApiModel):
    """Defaults and limits of the jobs with this template."""

    description: str = Field(
        default="", max_length=1024, description="For whom and what it is, shown by kubectl get -o wide."
    )
    defaults: Defaults = Field(
        default_factory=dict,
        description="Fields of a TrainingJob's spec, for jobs that leave them out. Objects are merged field"
        " by field; of lists, containers, volumes, variables, mounts and ports by name, and the job's own"
        " list takes the place of any other. managedBy, suspend and workers.replicas are the job's alone.",
    )
    limits: TemplateLimits = Field(
        default_factory=TemplateLimits,
        description="Limits of a job with this template, wherever its fields come from.",
    )
