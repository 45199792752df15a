"""What all models of the API share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """camelCase on the wire, snake_case in Python; unknown fields are pruned."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


def rule(expression: str, message: str, message_expression: str | None = None, **more: str) -> dict[str, Any]:
    """One entry of x-kubernetes-validations."""
    result: dict[str, Any] = {"rule": expression, "message": message, **more}
    if message_expression is not None:
        result["messageExpression"] = message_expression
    return result
