"""docs/api.md is what the models say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from springtide_operator.api.crd import custom_resource_definition
from springtide_operator.api.docs import OF_KUBERNETES, markdown

PAGE = Path(__file__).resolve().parents[3] / "docs/api.md"


def test_the_reference_is_generated_from_the_models() -> None:
    assert PAGE.read_text() == markdown(), "docs/api.md is older than the models: run make generate"


def every_field(schema: dict[str, Any], path: str) -> list[str]:
    found = []
    for name, child in (schema.get("properties") or {}).items():
        here = f"{path}.{name}"
        if any(part in path for part in OF_KUBERNETES) and "description" not in child:
            continue  # a field of Kubernetes' own
        found.append(here)
        found += every_field(child, here)
        found += every_field(child.get("items") or {}, f"{here}[]")
        more = child.get("additionalProperties")
        found += every_field(more if isinstance(more, dict) else {}, f"{here}.KEY")
    return found


def test_every_field_has_a_row_with_a_meaning() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    fields = every_field(properties["spec"], "spec") + every_field(properties["status"], "status")
    assert {"spec.workers.replicas", "status.conditions[].reason", "status.slots.KEY.uid"} <= set(fields)
    rows = {line.split("`")[1]: line for line in markdown().splitlines() if line.startswith("| `")}
    assert [field for field in fields if field not in rows] == []
    # The parts of a pod template belong to Kubernetes, which explains them.
    silent = [f for f in fields if rows[f].rstrip("| ").endswith("|") and ".template" not in f]
    assert silent == []


def test_rules_are_listed_with_the_text_that_a_user_sees() -> None:
    assert "strategy.type is immutable: create a new job" in markdown()
    assert "workers.replicas must lie between workers.minReplicas and workers.maxReplicas" in markdown()


def test_every_field_of_a_spec_is_on_a_handwritten_page() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    fields = [field for field in every_field(spec, "spec") if ".template." not in field]
    generated = ("api.md", "reference.md", "values.md")
    pages = [page for page in PAGE.parent.glob("*.md") if page.name not in generated]
    samples = (PAGE.parents[1] / "deploy" / "samples").glob("*.yaml")
    words = set(re.findall(r"[A-Za-z]+", " ".join(page.read_text() for page in [*pages, *samples])))
    assert len(fields) > 40
    assert [field for field in fields if field.rpartition(".")[2] not in words] == []
