"""`spec.failurePolicy.rules`, as users write them: what is done about an end of a worker, by its cause."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from springtide_operator.api.base import ApiModel, rule


class RuleAction(StrEnum):
    FAIL_JOB = "FailJob"
    RESTART = "Restart"
    IGNORE = "Ignore"
    REPLACE = "Replace"


class ExitCodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"


ExitCode = Annotated[int, Field(ge=0, le=255)]
ReasonWord = Annotated[str, Field(min_length=1, max_length=128, pattern="^[A-Za-z][A-Za-z0-9]*$")]
ExceptionName = Annotated[
    str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
]


class ExitCodes(ApiModel):
    """Exit codes of the container that runs the script."""

    operator: ExitCodeOperator = Field(description="In: one of the values. NotIn: none of them.")
    values: list[ExitCode] = Field(
        min_length=1,
        max_length=64,
        description="Exit codes, 0-255. 128 + n: killed by signal n.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )


class FailureRule(ApiModel):
    """One rule. All that it names must hold; the first rule that holds decides."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                rule(
                    "has(self.exitCodes) || has(self.reasons) || has(self.exceptions)",
                    "a rule of failurePolicy.rules must say when it holds:"
                    " give exitCodes, reasons or exceptions",
                )
            ]
        }
    )

    name: str | None = Field(
        default=None, min_length=1, max_length=63, description="Shown in conditions and events."
    )
    action: RuleAction = Field(
        description="FailJob: the job fails at once. Restart: the worker is replaced, and counts against"
        " backoffLimit. Ignore: it is replaced and counts against nothing. Replace: it is replaced on"
        " another node, and counts as it would without a rule."
    )
    exit_codes: ExitCodes | None = Field(
        default=None,
        description="Holds for these exit codes of a worker that failed by itself (never of one that was"
        " evicted, deleted or preempted).",
    )
    reasons: list[ReasonWord] | None = Field(
        default=None,
        min_length=1,
        max_length=32,
        description="Holds for one of these reasons, in any case: OOMKilled, Error, NotFinished, StartError,"
        " InitContainerFailed, Hung, Evicted, Preempted, NodeLost, NodeShutdown, Deleted, Left; or the reason"
        " that the pod's status gives. ImagePullBackOff, CreateContainerConfigError, Unschedulable and other"
        " reasons for which a pod waits hold as well: then Restart and Replace give the waiting pod up.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    exceptions: list[ExceptionName] | None = Field(
        default=None,
        min_length=1,
        max_length=32,
        description="Holds for one of these classes of the exception that ended the script, with or without"
        " its module: ValueError, torch.OutOfMemoryError.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
