"""The base of all models of the API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """camelCase on the wire, snake_case in Python; unknown fields are pruned."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


def rule(expression: str, message: str, **more: str) -> dict[str, Any]:
    """Make one entry of x-kubernetes-validations.

    There is no messageExpression: its cost is estimated when the CRD is created, an integer turned into a
    string counts as unbounded there, and one such expression gets the whole CRD refused. `message` costs
    nothing.

    Args:
        expression: The rule, which must be true.
        message: Text for the user when it is not.
        more: `reason` and `fieldPath`, a path below the place of the rule.

    Returns:
        The entry.
    """
    return {"rule": expression, "message": message, **more}
