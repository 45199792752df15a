"""`spec.checkpoint`, as users write it: where the state of a job is saved, and how often."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from springtide_operator.api.base import ApiModel

Uri = Annotated[
    str,
    StringConstraints(min_length=2, max_length=1024, pattern=r"^(/|[a-z][a-z0-9+.-]*://[^/\s]*)[^\s]*$"),
]


class Checkpoint(ApiModel):
    """Storage of a job's state, and how often it is saved."""

    uri: Uri = Field(
        description="A path that all worker pods have mounted, file:// and such a path, s3://BUCKET/PREFIX,"
        " or whatever else fsspec knows in the worker's image. The job's checkpoints are in a folder of its"
        " own below it: NAMESPACE-NAME-UID8. Immutable; a checkpoint can be added to a job, and not removed.",
    )
    interval_seconds: int = Field(
        default=60,
        ge=1,
        le=86400,
        description="A checkpoint is begun so long after the one before was. Holds for pods made afterwards.",
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="So many of the newest checkpoints stay. Holds for pods made afterwards.",
    )
    restore_from: Uri | None = Field(
        default=None,
        description="What a job begins from that has no checkpoint of its own: the folder of another job"
        " (URI/NAMESPACE-NAME-UID8; its newest one), or one checkpoint in such a folder. The script must be"
        " the same.",
    )
