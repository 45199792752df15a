"""Generate the reference of jobs and templates: `python -m springtide_operator.api.docs > FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.crd import custom_resource_definition, template_definition, whole_spec

Schema = dict[str, Any]

_HEAD = f"""\
# The TrainingJob

Generated from the models by `python -m springtide_operator.api.docs`; `kubectl explain stj.spec` agrees.
API version `{names.API_VERSION}`, kind `{names.KIND}`, short name `{names.SHORT_NAME}`. What conditions,
events and metrics mean, and what to do about them, stands in [operations.md](operations.md).

`kubectl` refuses unknown fields by name. Fields without a default may be left out unless they are required.
Templates have all fields of a pod of Kubernetes 1.29 to 1.37; here are those that the operator reads first.
Defaults are the operator's: but for `workers.replicas` and `suspend` they are not written into the job, since
what a job leaves out may come from [its template](templates.md).
"""

_TEMPLATES = f"""\
## Templates

A `{names.TEMPLATE_KIND}` (short name `{names.TEMPLATE_SHORT_NAME}`) is for the jobs of its namespace, a
`{names.CLUSTER_TEMPLATE_KIND}` (`{names.CLUSTER_TEMPLATE_SHORT_NAME}`) for those of all; they have the same
fields. [templates.md](templates.md) says how they are used.
"""

OF_KUBERNETES = (".template", ".coordinator.resources", ".coordinator.tolerations")
"""Below these, fields are those of a pod."""


def markdown() -> str:
    """The text of docs/api.md."""
    crd = custom_resource_definition()
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    parts = [_HEAD]
    for part, title, head in (
        ("spec", "Spec", ("field", "type", "default", "meaning")),
        ("status", "Status", ("field", "type", "meaning")),
    ):
        root = whole_spec() if part == "spec" else schema["properties"][part]
        parts.append(f"## {title}\n\n{root.get('description', '')}\n")
        rows = [_row(path, field, required, len(head) == 4) for path, field, required in _fields(root, part)]
        parts.append(_table(head, rows))
    parts.append("## Rules\n\nThe API server refuses a job that breaks one of these, with this text.\n")
    parts.append(_table(("where", "what it says"), list(_rules(schema, ""))))
    parts.append("## Columns of `kubectl get stj`\n")
    columns = version["additionalPrinterColumns"]
    parts.append(
        _table(
            ("column", "from", "shown"),
            [
                (c["name"], f"`{c['jsonPath']}`", "with `-o wide`" if c.get("priority") else "")
                for c in columns
            ],
        )
    )
    parts.append("## Scale\n")
    scale = version["subresources"]["scale"]
    parts.append(
        "`kubectl scale stj NAME --replicas=N` and autoscalers write"
        f" `{scale['specReplicasPath']}`, and read `{scale['statusReplicasPath']}` and"
        f" `{scale['labelSelectorPath']}`.\n"
    )
    templates = template_definition(cluster=True)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts.append(_TEMPLATES)
    root = templates["properties"]["spec"]
    root["properties"]["defaults"].pop("properties")  # those of a job, above
    parts.append(
        _table(
            ("field", "type", "meaning"),
            [_row(path, one, False, False) for path, one, _ in _fields(root, "spec")],
        )
    )
    return "\n".join(parts)


def _fields(schema: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    """(path, schema, required) of all fields below, a parent before its children."""
    required = schema.get("required") or []
    for name, child in (schema.get("properties") or {}).items():
        here = f"{path}.{name}"
        if any(part in path for part in OF_KUBERNETES) and "description" not in child:
            continue  # a field of Kubernetes' own, which explains it
        yield here, child, name in required
        inner = child
        if child.get("type") == "array":
            here, inner = f"{here}[]", child["items"]
        elif isinstance(child.get("additionalProperties"), dict):
            here, inner = f"{here}.KEY", child["additionalProperties"]
        yield from _fields(inner, here)


def _row(path: str, schema: Schema, required: bool, with_default: bool) -> tuple[str, ...]:
    text = " ".join(str(schema.get("description", "")).split()).replace("|", "\\|")
    if not with_default:
        return f"`{path}`", _type(schema), text
    default = f"`{json.dumps(schema['default'])}`" if "default" in schema else "required" if required else ""
    return f"`{path}`", _type(schema), default, text


def _type(schema: Schema) -> str:
    kind = str(schema.get("type", "quantity"))  # which is a string or a number
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_type(schema['items'])}{most}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_type(schema['additionalProperties'])}"
    if "enum" in schema:
        return " \\| ".join(str(value) for value in schema["enum"])
    if kind == "integer" and "maximum" in schema:
        return f"integer, {schema.get('minimum', '')} to {schema['maximum']}"
    if kind == "integer" and "minimum" in schema:
        return f"integer, at least {schema['minimum']}"
    return "time" if schema.get("format") == "date-time" else kind


def _rules(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get("x-kubernetes-validations") or []:
        where = f"{path}{rule.get('fieldPath', '')}".lstrip(".")
        yield f"`{where}`", str(rule["message"]).replace("|", "\\|")
    for name, child in (schema.get("properties") or {}).items():
        yield from _rules(child, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from _rules(schema["items"], f"{path}[]")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
