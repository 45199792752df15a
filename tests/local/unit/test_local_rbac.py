"""Rights as a pure decision: against a naive oracle, and example by example in Kubernetes' words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.api.auth import User
from springtide_local.api.default_roles import cluster_role_bindings, cluster_roles
from springtide_local.api.errors import not_allowed
from springtide_local.api.kinds.registry import builtin_resources
from springtide_local.api.rbac import Attributes, Policy, authorize, describe_rule, missing, parse_rule
from springtide_local.api.requests import attributes_of, parse_target
from springtide_local.api.resources import Registry
from springtide_local.api.rights import BINDINGS, ROLES, Rights
from springtide_local.api.store import Store
from springtide_local.api.writes import aggregate_roles
from springtide_local.ports import ApiError

Object = dict[str, Any]
REGISTRY = Registry(builtin_resources())

VERBS, GROUPS, NAMES, SPACES = ("get", "list"), ("", "apps"), ("", "a", "b"), ("", "n", "m")
RESOURCES, SUBRESOURCES = ("pods", "jobs"), ("", "log", "scale")
PATHS = ("/healthz", "/apis", "/apis/apps")
USERS = ("system:serviceaccount:n:robot", "system:serviceaccount:m:robot", "jane")
TEAMS = ("team", "system:authenticated")


def some(*values: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True)


RESOURCE_RULES = st.fixed_dictionaries(
    {
        "verbs": some(*VERBS, "*"),
        "apiGroups": some(*GROUPS, "*"),
        "resources": some("pods", "jobs", "pods/log", "*/scale", "*"),
    },
    optional={"resourceNames": some("a", "b")},
)
URL_RULES = st.fixed_dictionaries(
    {"verbs": some(*VERBS, "*"), "nonResourceURLs": some("/healthz", "/apis", "/apis/*", "*")}
)
RULES = st.lists(st.one_of(RESOURCE_RULES, URL_RULES), max_size=2)
SUBJECTS = st.one_of(
    st.builds(lambda name: {"kind": "User", "name": name}, st.sampled_from(USERS)),
    st.builds(lambda name: {"kind": "Group", "name": name}, st.sampled_from(TEAMS)),
    st.builds(
        lambda space: {"kind": "ServiceAccount", "name": "robot", "namespace": space},
        st.sampled_from(("n", "m")),
    ),
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Object], list[Object]]:
    """Roles and bindings of two namespaces and of the cluster."""
    roles, bindings = [], []
    for space, name in (("", "one"), ("", "two"), ("n", "one"), ("m", "one")):
        meta = {"name": name, **({"namespace": space} if space else {})}
        roles.append({"metadata": meta, "rules": draw(RULES)})
    for number in range(draw(st.integers(0, 4))):
        space = draw(st.sampled_from(SPACES))
        kind = draw(st.sampled_from(("ClusterRole", "Role"))) if space else "ClusterRole"
        name = draw(st.sampled_from(("one", "two", "absent")))
        meta = {"name": f"b{number}", **({"namespace": space} if space else {})}
        subjects = draw(st.lists(SUBJECTS, max_size=2))
        bindings.append({"metadata": meta, "roleRef": {"kind": kind, "name": name}, "subjects": subjects})
    return roles, bindings


ASKED = st.one_of(
    st.builds(
        Attributes,
        *map(st.sampled_from, (VERBS, GROUPS, RESOURCES, SUBRESOURCES, SPACES, NAMES)),
    ),
    st.builds(lambda verb, path: Attributes(verb, path=path), *map(st.sampled_from, (VERBS, PATHS))),
)


def oracle(roles: list[Object], bindings: list[Object], user: str, groups: tuple[str, ...]) -> set[Any]:
    """Write out every single request that is allowed, by the description of RBAC alone."""
    allowed: set[Any] = set()
    for binding in bindings:
        home = binding["metadata"].get("namespace", "")
        mine = any(
            (s["kind"] == "User" and s["name"] == user)
            or (s["kind"] == "Group" and s["name"] in groups)
            or (
                s["kind"] == "ServiceAccount"
                and f"system:serviceaccount:{s['namespace']}:{s['name']}" == user
            )
            for s in binding["subjects"]
        )
        where = "" if binding["roleRef"]["kind"] == "ClusterRole" else home
        for role in roles if mine else ():
            if (role["metadata"].get("namespace", ""), role["metadata"]["name"]) != (
                where,
                binding["roleRef"]["name"],
            ):
                continue
            for rule in role["rules"]:
                allowed |= written_out(rule, home)
    return allowed


def written_out(rule: Object, home: str) -> set[Any]:
    verbs = VERBS if "*" in rule["verbs"] else rule["verbs"]
    if "nonResourceURLs" in rule:
        if home:
            return set()
        urls = {
            path
            for path in PATHS
            for url in rule["nonResourceURLs"]
            if url in ("*", path) or (url == "/apis/*" and path == "/apis/apps")
        }
        return set(itertools.product(verbs, urls))
    groups = GROUPS if "*" in rule["apiGroups"] else rule["apiGroups"]
    resources: set[tuple[str, str]] = set()
    for text in rule["resources"]:
        if text == "*":
            resources |= set(itertools.product(RESOURCES, SUBRESOURCES))
        elif text == "*/scale":
            resources |= {(resource, "scale") for resource in RESOURCES}
        else:
            name, _, sub = text.partition("/")
            resources.add((name, sub))
    spaces = (home,) if home else SPACES
    names = rule.get("resourceNames") or NAMES
    return {
        (verb, group, resource, sub, space, name)
        for verb, group, (resource, sub), space, name in itertools.product(
            verbs, groups, resources, spaces, names
        )
    }


@given(worlds(), st.sampled_from(USERS), st.sampled_from(((), TEAMS[:1], TEAMS)), ASKED)
def test_a_decision_is_that_of_the_naive_oracle(
    world: tuple[list[Object], list[Object]], user: str, groups: tuple[str, ...], asked: Attributes
) -> None:
    roles, bindings = world
    decision = authorize(Policy.of(roles, bindings).grants(user, groups), groups, asked)
    key = (
        (asked.verb, asked.group, asked.resource, asked.subresource, asked.namespace, asked.name)
        if asked.resource
        else (asked.verb, asked.path)
    )
    assert decision.allowed == (key in oracle(roles, bindings, user, groups))
    assert not decision.allowed or decision.reason.startswith("RBAC: allowed by ")
    assert authorize((), ("system:masters",), asked).allowed


@given(RULES, RULES)
def test_what_is_not_missing_is_held(held: list[Object], wanted: list[Object]) -> None:
    """Check that a user with the rules that `missing` names beside his own may do all that the wanted rules
    allow.
    """
    mine, theirs = [parse_rule(rule) for rule in held], [parse_rule(rule) for rule in wanted]
    lacking = missing(mine, theirs)
    assert missing([*mine, *lacking], theirs) == []
    for verb, group, resource, sub, name in itertools.product(VERBS, GROUPS, RESOURCES, SUBRESOURCES, NAMES):
        asked = Attributes(verb, group, resource, sub, "n", name)
        if any(rule.allows(asked) for rule in theirs):
            assert any(rule.allows(asked) for rule in [*mine, *lacking])
    if not lacking:
        for verb, path in itertools.product(VERBS, PATHS):
            asked = Attributes(verb, path=path)
            assert any(r.allows(asked) for r in mine) >= any(r.allows(asked) for r in theirs)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            Attributes("list", "", "pods", namespace="n"),
            'pods is forbidden: User "u" cannot list resource "pods" in API group "" in the namespace "n"',
        ),
        (
            Attributes("patch", "springtide.dev", "trainingjobs", "status", "n", "j"),
            'trainingjobs.springtide.dev "j" is forbidden: User "u" cannot patch resource '
            '"trainingjobs/status" in API group "springtide.dev" in the namespace "n"',
        ),
        (
            Attributes("get", "", "nodes", name="x"),
            'nodes "x" is forbidden: User "u" cannot get resource "nodes" in API group "" '
            "at the cluster scope",
        ),
        (Attributes("get", path="/debug"), 'forbidden: User "u" cannot get path "/debug"'),
    ],
)
def test_a_refusal_has_the_words_of_kubernetes(asked: Attributes, text: str) -> None:
    refusal = not_allowed("u", asked)
    assert (refusal.code, refusal.reason, refusal.message) == (403, "Forbidden", text)
    wanted = {"name": asked.name, "group": asked.group, "kind": asked.resource}
    assert refusal.details == {key: value for key, value in wanted.items() if value}


def test_a_binding_without_its_role_is_named() -> None:
    binding = {
        "metadata": {"name": "b", "namespace": "n"},
        "roleRef": {"kind": "Role", "name": "gone"},
        "subjects": [{"kind": "User", "name": "jane"}],
    }
    grants = Policy.of([], [binding]).grants("jane", ())
    decision = authorize(grants, (), Attributes("get", "", "pods", namespace="n"))
    assert decision == (False, 'RBAC: role.rbac.authorization.k8s.io "gone" not found')
    assert authorize(grants, (), Attributes("get", "", "pods", namespace="m")) == (False, "")


def test_the_reason_names_the_binding_and_its_subject() -> None:
    role = {
        "metadata": {"name": "r"},
        "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}],
    }
    binding = {
        "metadata": {"name": "b", "namespace": "n"},
        "roleRef": {"kind": "ClusterRole", "name": "r"},
        "subjects": [{"kind": "ServiceAccount", "name": "robot"}],
    }
    grants = Policy.of([role], [binding]).grants("system:serviceaccount:n:robot", ())
    decision = authorize(grants, (), Attributes("get", "", "pods", namespace="n", name="p"))
    text = 'RBAC: allowed by RoleBinding "b/n" of ClusterRole "r" to ServiceAccount "robot/n"'
    assert decision == (True, text)


@pytest.mark.parametrize(
    ("method", "path", "query", "asked"),
    [
        ("GET", "/api/v1/namespaces/n/pods", {}, Attributes("list", "", "pods", "", "n")),
        (
            "GET",
            "/api/v1/namespaces/n/pods",
            {"fieldSelector": "metadata.name=p", "watch": "1"},
            Attributes("watch", "", "pods", "", "n", "p"),
        ),
        ("GET", "/api/v1/namespaces/n/pods/p/log", {}, Attributes("get", "", "pods", "log", "n", "p")),
        ("POST", "/api/v1/namespaces/n/pods/p/exec", {}, Attributes("create", "", "pods", "exec", "n", "p")),
        ("GET", "/api/v1/namespaces/n", {}, Attributes("get", "", "namespaces", "", "n", "n")),
        ("GET", "/api/v1/namespaces", {}, Attributes("list", "", "namespaces")),
        (
            "DELETE",
            "/apis/apps/v1/namespaces/n/deployments",
            {},
            Attributes("deletecollection", "apps", "deployments", "", "n"),
        ),
        (
            "PATCH",
            "/apis/apps/v1/namespaces/n/deployments/d/scale",
            {},
            Attributes("patch", "apps", "deployments", "scale", "n", "d"),
        ),
        (
            "GET",
            "/apis/none.example/v1/things/t",
            {},
            Attributes("get", "none.example", "things", "", "", "t"),
        ),
        ("GET", "/apis/none.example/v1/watch/things", {}, Attributes("watch", "none.example", "things")),
        ("GET", "/apis/apps/v1", {}, Attributes("get", path="/apis/apps/v1")),
        ("GET", "/api/v1//pods", {}, Attributes("get", path="/api/v1//pods")),
        ("GET", "/version", {}, Attributes("get", path="/version")),
    ],
)
def test_a_request_is_taken_apart(method: str, path: str, query: dict[str, str], asked: Attributes) -> None:
    assert attributes_of(method, path, query, parse_target(REGISTRY, path)) == asked


def test_the_default_roles_are_whole_from_the_start() -> None:
    store = Store()
    rights = Rights(store)
    jane = User("jane", ("system:authenticated",))
    for name, allowed, refused in (
        ("view", Attributes("get", "", "pods", "log", "n", "p"), Attributes("get", "", "secrets", "", "n")),
        ("edit", Attributes("create", "", "pods", "", "n"), Attributes("create", "", "namespaces")),
        (
            "admin",
            Attributes("create", "rbac.authorization.k8s.io", "roles", "", "n"),
            Attributes("patch", "", "resourcequotas", "", "n"),
        ),
        ("cluster-admin", Attributes("get", path="/debug"), None),
    ):
        binding = {
            "metadata": {"name": "b"},
            "roleRef": {"kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "User", "name": "jane"}],
        }
        assert not rights.decide(jane, allowed).allowed
        store.create(BINDINGS[1], binding)
        assert rights.decide(jane, allowed).allowed
        assert refused is None or not rights.decide(jane, refused).allowed
        store.delete(BINDINGS[1], "b")
    assert rights.decide(jane, Attributes("get", path="/apis/apps/v1")).allowed
    assert {role["metadata"]["name"] for role in cluster_roles()} >= {
        binding["roleRef"]["name"] for binding in cluster_role_bindings()
    }


def test_aggregated_roles_follow_what_they_select() -> None:
    store = Store()
    rule = {"verbs": ["get"], "apiGroups": ["springtide.dev"], "resources": ["trainingjobs"]}
    label = {"rbac.authorization.k8s.io/aggregate-to-view": "true"}
    store.create(ROLES[1], {"metadata": {"name": "ours", "labels": label}, "rules": [rule]})
    while aggregate_roles(store):
        pass
    for name in ("view", "edit", "admin"):
        assert rule in store.get(ROLES[1], name)["rules"]
    store.delete(ROLES[1], "ours")
    while aggregate_roles(store):
        pass
    assert all(rule not in store.get(ROLES[1], name)["rules"] for name in ("view", "edit", "admin"))


def test_nobody_grants_what_he_does_not_hold() -> None:
    store = Store()
    rights = Rights(store)
    jane = User("jane", ("system:authenticated",))
    store.create(
        BINDINGS[0],
        {
            "metadata": {"name": "b"},
            "roleRef": {"kind": "ClusterRole", "name": "admin"},
            "subjects": [{"kind": "User", "name": "jane"}],
        },
        "default",
    )
    resource = store.registry.stored(ROLES[0])
    rule = {"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods"]}
    role = {"metadata": {"name": "r", "namespace": "default"}, "rules": [rule]}
    rights.check_escalation(jane, resource, role, None)
    more = {**role, "rules": [rule, {"verbs": ["get"], "apiGroups": [""], "resources": ["nodes"]}]}
    rights.check_escalation(jane, resource, more, more)
    with pytest.raises(ApiError, match="is attempting to grant RBAC permissions") as refused:
        rights.check_escalation(jane, resource, more, None)
    text = (
        'roles.rbac.authorization.k8s.io "r" is forbidden: user "jane" (groups=["system:authenticated"]) is '
        'attempting to grant RBAC permissions not currently held:\n{APIGroups:[""], Resources:["nodes"], '
        'Verbs:["get"]}'
    )
    assert (refused.value.code, refused.value.message) == (403, text)
    binding = {
        "metadata": {"name": "c", "namespace": "default"},
        "roleRef": {"kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "User", "name": "jane"}],
    }
    with pytest.raises(ApiError, match="is attempting to grant"):
        rights.check_escalation(jane, store.registry.stored(BINDINGS[0]), binding, None)
    assert describe_rule(parse_rule({"verbs": ["*"], "nonResourceURLs": ["*"]})) == (
        '{NonResourceURLs:["*"], Verbs:["*"]}'
    )
