"""The cost of the CRD's rules, estimated by an API server's method when the CRD is created."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from springtide_local.api.cel.budget import inspect_rules
from springtide_local.api.cel.cost import DEFINITION_LIMIT, EXPRESSION_LIMIT
from springtide_local.api.kinds.crds import Definitions
from springtide_operator.api.crd import custom_resource_definition, template_definition

# Two expressions that the CRD once had, for which a real API server refused it.
SIZES = (
    "'workers.replicas is ' + string(self.replicas) + ', but must lie between minReplicas ('"
    " + string(self.minReplicas) + ') and maxReplicas ('"
    " + (has(self.maxReplicas) ? string(self.maxReplicas) : 'no limit') + ')'"
)
LOGICAL_WORKERS = (
    "'with strategy.allReduce.exact, workers.maxReplicas x processesPerPod must be at most"
    " logicalWorkers (' + string(self.strategy.allReduce.logicalWorkers) + '), and is '"
    " + (has(self.workers.maxReplicas) ? string(self.workers.maxReplicas * self.workers.processesPerPod)"
    " : 'not given') + ': a process without a logical part has nothing to compute'"
)


def definition() -> dict[str, Any]:
    made = copy.deepcopy(custom_resource_definition())
    made["spec"]["conversion"] = {"strategy": "None"}
    return made


def schema(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def rules_of(raw: dict[str, Any]) -> int:
    here = len(raw.get("x-kubernetes-validations") or ())
    more = [raw.get("items"), raw.get("additionalProperties")]
    below = [*(raw.get("properties") or {}).values(), *(child for child in more if isinstance(child, dict))]
    return here + sum(map(rules_of, below))


def test_no_rule_costs_a_tenth_of_what_kubernetes_allows() -> None:
    raw = schema(definition())
    found = inspect_rules(raw, "spec.validation.openAPIV3Schema")
    assert found.errors == []
    assert len(found.costs) == rules_of(raw) > 25
    dear = [each for each in found.costs if each.cost > EXPRESSION_LIMIT // 10]
    assert dear == []
    assert found.total <= DEFINITION_LIMIT // 10


def test_an_api_server_has_nothing_against_the_definition() -> None:
    assert [str(error) for error in Definitions().check(definition())] == []


@pytest.mark.parametrize("cluster", [False, True])
def test_an_api_server_has_nothing_against_templates(cluster: bool) -> None:
    made = copy.deepcopy(template_definition(cluster))
    made["spec"]["conversion"] = {"strategy": "None"}
    assert [str(error) for error in Definitions().check(made)] == []
    found = inspect_rules(schema(made), "spec.validation.openAPIV3Schema")
    assert found.errors == []
    assert found.total <= DEFINITION_LIMIT // 10


@pytest.mark.parametrize(
    ("path", "index", "expression"),
    [(("spec", "workers"), 1, SIZES), (("spec",), 0, LOGICAL_WORKERS)],
)
def test_the_old_message_expressions_are_refused(path: tuple[str, ...], index: int, expression: str) -> None:
    made = definition()
    inner, where = schema(made), "spec.validation.openAPIV3Schema"
    for name in path:
        inner, where = inner["properties"][name], f"{where}.properties[{name}]"
    inner["x-kubernetes-validations"][index]["messageExpression"] = expression
    where = f"{where}.x-kubernetes-validations[{index}].messageExpression"
    costs = {
        each.path: each.cost for each in inspect_rules(schema(made), where.split(".properties")[0]).costs
    }
    assert costs[where] > 100 * EXPRESSION_LIMIT
    hint = (
        "exceeds budget by factor of more than 100x (try simplifying the rule, or adding maxItems,"
        " maxProperties, and maxLength where arrays, maps, and strings are declared)"
    )
    assert [str(error) for error in Definitions().check(made)] == [
        f"{where}: Forbidden: estimated messageExpression cost {hint}",
        f"{where}: Forbidden: contributed to estimated rule cost total exceeding cost limit for entire"
        " OpenAPIv3 schema",
        "spec.validation.openAPIV3Schema: Forbidden: x-kubernetes-validations estimated rule cost total for"
        f" entire OpenAPIv3 schema {hint}",
    ]


def test_name_without_a_declared_limit_costs_too_much() -> None:
    made = definition()
    schema(made)["properties"]["metadata"] = {"type": "object"}
    for rule in schema(made)["x-kubernetes-validations"]:
        del rule["fieldPath"]
    most = max(each.cost for each in inspect_rules(schema(made), "").costs)
    assert EXPRESSION_LIMIT // 10 < most < EXPRESSION_LIMIT
