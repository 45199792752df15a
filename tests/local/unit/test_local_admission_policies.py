"""ValidatingAdmissionPolicies of the embedded API server: what they match, deny, and say."""

from __future__ import annotations

from typing import Any

import pytest

from springtide_local.api import policies
from springtide_local.api.auth import User
from springtide_local.api.kinds.admission_policies import Bindings, Policies
from springtide_local.api.kinds.registry import builtin_resources
from springtide_local.api.object_store import ObjectStore
from springtide_local.api.policies import Attempt
from springtide_local.api.resources import ResourceType
from springtide_local.api.store import Store
from springtide_local.api.writes import Options, create
from springtide_local.ports import ApiError

Object = dict[str, Any]

RULE = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
FIRST, REASON = "spec.validations[0].expression", "spec.validations[0].reason"
VARIABLE = "spec.variables[0].expression"
ALICE = User("alice", ("team-a",))


def policy(*validations: Object, rule: Object = RULE, **spec: Any) -> Object:
    constraints = {"resourceRules": [rule]}
    return {
        "metadata": {"name": "p"},
        "spec": {"matchConstraints": constraints, "validations": list(validations), **spec},
    }


def binding(*actions: str, **spec: Any) -> Object:
    return {
        "metadata": {"name": "b"},
        "spec": {"policyName": "p", "validationActions": list(actions) or ["Deny"], **spec},
    }


class Place:
    """A store with a policy and its binding."""

    def __init__(self, rules: Object, bound: Object | None = None) -> None:
        self.store: ObjectStore = Store()
        namespace = {"metadata": {"name": "n", "labels": {"team": "a"}}}
        create(self.store, self.resource("namespaces"), namespace, None, Options("test"))
        create(self.store, self.resource(policies.POLICIES), rules, None, Options("test"))
        create(self.store, self.resource(policies.BINDINGS), bound or binding(), None, Options("test"))

    def resource(self, storage: str) -> ResourceType:
        return self.store.registry.stored(storage)

    def judge(
        self,
        obj: Object | None = None,
        old: Object | None = None,
        operation: str = "CREATE",
        storage: str = "configmaps",
        subresource: str = "",
    ) -> list[str]:
        """Return the warnings. Raise ApiError where it is denied."""
        warnings: list[str] = []
        made = obj if obj is not None or operation == "DELETE" else config_map()
        attempt = Attempt(ALICE, operation, self.resource(storage), subresource, made, old)
        policies.judge(self.store, attempt, warnings)
        return warnings


def config_map(**data: str) -> Object:
    return {"metadata": {"name": "c", "namespace": "n", "labels": {"app": "x"}}, "data": data}


def test_a_validation_that_does_not_hold_denies() -> None:
    place = Place(policy({"expression": "object.data.a == '1'", "message": "a must be 1"}))
    assert place.judge(config_map(a="1")) == []
    with pytest.raises(ApiError) as caught:
        place.judge(config_map(a="2"))
    text = "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: a must be 1"
    assert caught.value.message == f'configmaps "c" is forbidden: {text}'
    assert (caught.value.code, caught.value.reason) == (422, "Invalid")
    assert caught.value.details["causes"] == [{"message": text}]


@pytest.mark.parametrize(
    ("validation", "says", "code"),
    [
        ({"expression": "false"}, "failed expression: false", 422),
        ({"expression": "false", "reason": "Forbidden", "message": "no"}, "no", 403),
        ({"expression": "false", "messageExpression": "'a is ' + object.data.a"}, "a is 2", 422),
        ({"expression": "false", "messageExpression": "object.data.nothing", "message": "m"}, "m", 422),
        ({"expression": "object.data.b == '1'"}, "resulted in error: ", 422),
    ],
)
def test_what_a_denial_says(validation: Object, says: str, code: int) -> None:
    with pytest.raises(ApiError) as caught:
        Place(policy(validation)).judge(config_map(a="2"))
    assert says in caught.value.message
    assert caught.value.code == code


def test_an_error_denies_unless_failures_are_ignored() -> None:
    broken = {"expression": "object.data.b == '1'"}
    with pytest.raises(ApiError):
        Place(policy(broken)).judge(config_map())
    assert Place(policy(broken, failurePolicy="Ignore")).judge(config_map()) == []


def test_warnings_and_audits_let_pass() -> None:
    rules = policy({"expression": "false", "message": "no"})
    text = "Validation failed for ValidatingAdmissionPolicy 'p' with binding 'b': no"
    assert Place(rules, binding("Warn", "Audit")).judge() == [text]
    assert Place(policy({"expression": "false"}), binding("Audit")).judge() == []


def test_a_policy_without_a_binding_is_not_in_force() -> None:
    other = binding()
    other["spec"]["policyName"] = "other"
    assert Place(policy({"expression": "false"}), other).judge() == []


@pytest.mark.parametrize(
    ("change", "denied"),
    [
        ({}, True),
        ({"operations": ["UPDATE"]}, False),
        ({"operations": ["*"]}, True),
        ({"apiGroups": ["apps"]}, False),
        ({"apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*"]}, True),
        ({"resources": ["*/*"]}, True),
        ({"resources": ["configmaps/status"]}, False),
        ({"resources": ["secrets"]}, False),
        ({"scope": "Cluster"}, False),
        ({"scope": "Namespaced"}, True),
        ({"resourceNames": ["other"]}, False),
        ({"resourceNames": ["c"]}, True),
    ],
)
def test_which_requests_a_rule_is_about(change: Object, denied: bool) -> None:
    place = Place(policy({"expression": "false"}, rule={**RULE, **change}))
    if denied:
        with pytest.raises(ApiError):
            place.judge()
    else:
        assert place.judge() == []


@pytest.mark.parametrize(
    ("match", "denied"),
    [
        ({"namespaceSelector": {"matchLabels": {"team": "a"}}}, True),
        ({"namespaceSelector": {"matchLabels": {"team": "b"}}}, False),
        ({"objectSelector": {"matchLabels": {"app": "x"}}}, True),
        ({"objectSelector": {"matchLabels": {"app": "y"}}}, False),
        ({"excludeResourceRules": [RULE]}, False),
        ({"resourceRules": [{**RULE, "resources": ["pods"]}]}, False),
    ],
)
def test_a_binding_narrows_its_policy(match: Object, denied: bool) -> None:
    place = Place(policy({"expression": "false"}), binding(matchResources=match))
    if denied:
        with pytest.raises(ApiError):
            place.judge()
    else:
        assert place.judge() == []


def test_a_subresource_is_another_resource() -> None:
    rule = {**RULE, "operations": ["UPDATE"], "resources": ["pods"]}
    place = Place(policy({"expression": "false"}, rule=rule))
    assert place.judge(config_map(), config_map(), "UPDATE", "pods", "status") == []
    with pytest.raises(ApiError):
        place.judge(config_map(), config_map(), "UPDATE", "pods")


def test_what_expressions_see() -> None:
    expressions = [
        "request.operation == 'UPDATE' && request.resource.resource == 'configmaps'",
        "request.namespace == 'n' && request.name == 'c'",
        "request.userInfo.username == 'alice' && 'team-a' in request.userInfo.groups",
        "oldObject.data.a == '1' && object.data.a == '2'",
        "namespaceObject.metadata.labels.team == 'a'",
        "variables.twice == '22' && variables.thrice == '222'",
        "!has(object.data.b)",
    ]
    variables = [
        {"name": "twice", "expression": "object.data.a + object.data.a"},
        {"name": "thrice", "expression": "variables.twice + object.data.a"},
        {"name": "fails", "expression": "object.data.nothing"},
    ]
    rules = policy(*({"expression": text} for text in expressions), rule={**RULE, "operations": ["UPDATE"]})
    rules["spec"]["variables"] = variables
    assert Place(rules).judge(config_map(a="2"), config_map(a="1"), "UPDATE") == []


def test_a_variable_that_fails_denies_where_it_is_used() -> None:
    rules = policy({"expression": "variables.fails == '1'"})
    rules["spec"]["variables"] = [{"name": "fails", "expression": "object.data.nothing"}]
    with pytest.raises(ApiError, match="resulted in error"):
        Place(rules).judge(config_map())


def test_a_deletion_shows_the_old_object() -> None:
    rule = {**RULE, "operations": ["DELETE"]}
    place = Place(policy({"expression": "object == null && oldObject.data.keep != 'yes'"}, rule=rule))
    assert place.judge(old=config_map(keep="no"), operation="DELETE") == []
    with pytest.raises(ApiError):
        place.judge(old=config_map(keep="yes"), operation="DELETE")


def test_conditions_choose_requests() -> None:
    rules = policy({"expression": "false"})
    rules["spec"]["matchConditions"] = [{"name": "a", "expression": "request.userInfo.username != 'alice'"}]
    assert Place(rules).judge() == []


def test_parameters() -> None:
    rules = policy(
        {"expression": "object.data.a == params.data.a"}, paramKind={"apiVersion": "v1", "kind": "ConfigMap"}
    )
    by_name = {"name": "limits", "namespace": "n", "parameterNotFoundAction": "Deny"}
    place = Place(rules, binding(paramRef=by_name))
    with pytest.raises(ApiError, match="no params found"):
        place.judge(config_map(a="1"))
    limits = {"metadata": {"name": "limits"}, "data": {"a": "1"}}
    create(place.store, place.resource("configmaps"), limits, "n", Options("test"))
    assert place.judge(config_map(a="1")) == []
    with pytest.raises(ApiError):
        place.judge(config_map(a="2"))


def test_policies_themselves_are_never_denied() -> None:
    rule = {"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*"]}
    place = Place(policy({"expression": "false"}, rule=rule))
    assert place.judge(policy(), None, "CREATE", policies.POLICIES) == []


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        (
            {"validations": [{"expression": "object.a =="}]},
            FIRST,
            "compilation failed",
        ),
        ({"validations": [{"expression": "nobody.a"}]}, FIRST, "undeclared reference to 'nobody'"),
        ({"validations": [{"expression": "authorizer.a"}]}, FIRST, "undeclared reference to 'auth"),
        ({"validations": [{"expression": "object.?a.orValue(true)"}]}, FIRST, "compilation failed"),
        (
            {"validations": [{"expression": "'text'"}]},
            FIRST,
            "must evaluate to bool",
        ),
        (
            {"validations": [{"expression": ""}]},
            FIRST,
            "expression is not specified",
        ),
        (
            {"validations": [{"expression": "true", "messageExpression": "1"}]},
            "spec.validations[0].messageExpression",
            "must evaluate to string",
        ),
        (
            {"validations": [{"expression": "true", "reason": "Bad"}]},
            REASON,
            "Unsupported",
        ),
        ({"validations": []}, "spec.validations", "must contain at least one item"),
        ({"failurePolicy": "Maybe"}, "spec.failurePolicy", "Unsupported value"),
        ({"matchConstraints": {}}, "spec.matchConstraints.resourceRules", "Required"),
        (
            {"matchConstraints": {"resourceRules": [{**RULE, "operations": ["PATCH"]}]}},
            "spec.matchConstraints.resourceRules[0].operations[0]",
            "Unsupported value",
        ),
        (
            {"variables": [{"name": "a", "expression": "+"}]},
            VARIABLE,
            "compilation failed",
        ),
    ],
)
def test_a_policy_that_cannot_work_is_refused(change: Object, path: str, says: str) -> None:
    rules = policy({"expression": "true"})
    rules["spec"] |= change
    kind = Policies()
    kind.default(rules)
    [error] = kind.check(rules)
    assert error.path == path
    assert says in str(error)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"policyName": ""}, "spec.policyName"),
        ({"validationActions": []}, "spec.validationActions"),
        ({"validationActions": ["Deny", "Warn"]}, "spec.validationActions"),
        ({"validationActions": ["Refuse"]}, "spec.validationActions[0]"),
        ({"paramRef": {"parameterNotFoundAction": "Deny"}}, "spec.paramRef.name"),
        ({"paramRef": {"name": "a"}}, "spec.paramRef.parameterNotFoundAction"),
    ],
)
def test_a_binding_that_cannot_work_is_refused(change: Object, path: str) -> None:
    made = binding()
    made["spec"] |= change
    kind = Bindings()
    kind.default(made)
    assert [error.path for error in kind.check(made)] == [path]


def test_both_kinds_are_served() -> None:
    served = {(one.group, one.version, one.kind, one.namespaced) for one in builtin_resources()}
    for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"):
        assert ("admissionregistration.k8s.io", "v1", kind, False) in served
