"""Rights as clients see them: tokens of service accounts, kubectl auth can-i, impersonation, escalation."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

import pytest
import yaml
from local_api import Api, Object

pytest_plugins = ["local_api_fixtures"]
RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture
def robot(api: Api, namespace: str) -> Api:
    """Somebody who speaks as a service account without any right."""
    api.ok("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "robot"}})
    return speaker(api, namespace)


def speaker(api: Api, namespace: str, **spec: object) -> Api:
    """Speak with a token of the service account `robot`."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/robot/token"
    token = api.ok("POST", path, {"spec": spec})["status"]["token"]
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    file = api.kubeconfig.with_name(f"robot-{uuid.uuid4().hex[:6]}")
    file.write_text(json.dumps(config))
    return Api(file)


@pytest.fixture
def give(api: Api, namespace: str) -> Callable[..., None]:
    """`give(rule, ...)` lets the robot do what the rules say, in its namespace."""

    def granting(*rules: Object) -> None:
        name = f"r-{uuid.uuid4().hex[:6]}"
        where = f"{RBAC}/namespaces/{namespace}"
        api.ok("POST", f"{where}/roles", {"metadata": {"name": name}, "rules": list(rules)})
        subject = {"kind": "ServiceAccount", "name": "robot", "namespace": namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        binding = {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
        api.ok("POST", f"{where}/rolebindings", binding)

    return granting


def rule(verbs: str, resources: str, group: str = "", names: tuple[str, ...] = ()) -> Object:
    made: Object = {"verbs": verbs.split(), "resources": resources.split(), "apiGroups": [group]}
    return {**made, **({"resourceNames": list(names)} if names else {})}


def test_account_without_rights_is_refused(api: Api, robot: Api, namespace: str) -> None:
    status, answer, _ = robot.request("GET", f"/api/v1/namespaces/{namespace}/pods")
    user = f"system:serviceaccount:{namespace}:robot"
    assert (status, answer["reason"], answer["details"]) == (403, "Forbidden", {"kind": "pods"})
    assert answer["message"] == (
        f'pods is forbidden: User "{user}" cannot list resource "pods" in API group "" '
        f'in the namespace "{namespace}"'
    )
    status, answer, _ = robot.request("GET", "/apis/none.example/v1/things/x")
    assert (status, answer["message"]) == (
        403,
        f'things.none.example "x" is forbidden: User "{user}" cannot get resource "things" in API group '
        '"none.example" at the cluster scope',
    )
    status, answer, _ = robot.request("GET", "/metrics")
    assert (status, answer["message"]) == (403, f'forbidden: User "{user}" cannot get path "/metrics"')
    for path in ("/version", "/api", "/apis", "/apis/apps/v1", "/openapi/v3", "/readyz"):
        assert robot.request("GET", path)[0] == 200, path
    said = robot.kubectl("get", "pods", "-n", namespace)
    assert said.code == 1
    assert "Error from server (Forbidden): pods is forbidden" in said.err


def test_rights_hold_for_names_and_subresources(
    api: Api, robot: Api, namespace: str, give: Callable[..., None]
) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    for name in ("mine", "other"):
        api.ok("POST", path, {"metadata": {"name": name}})
    give(rule("get list patch", "configmaps", names=("mine",)), rule("get", "*/scale", "*"))
    assert robot.request("GET", f"{path}/mine")[0] == 200
    assert robot.request("GET", f"{path}/other")[0] == 403
    assert robot.request("GET", path)[0] == 403
    assert robot.request("GET", f"{path}?fieldSelector=metadata.name%3Dmine")[0] == 200
    assert robot.request("DELETE", f"{path}/mine")[0] == 403
    assert robot.request("DELETE", path)[0] == 403
    deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments/none"
    assert robot.request("GET", f"{deployments}/scale")[0] == 404
    assert robot.request("GET", deployments)[0] == 403
    assert robot.request("GET", f"{deployments}/status")[0] == 403


def test_server_side_apply_needs_create_for_a_new_object(
    robot: Api, api: Api, namespace: str, give: Callable[..., None]
) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/c"
    body = json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}).encode()

    def apply() -> tuple[int, str]:
        query = "?fieldManager=robot&force=true"
        status, answer, _ = robot.request("PATCH", path + query, body, "application/apply-patch+yaml")
        return status, str(answer.get("message", ""))

    give(rule("patch", "configmaps"))
    status, text = apply()
    assert status == 403
    assert 'cannot create resource "configmaps"' in text
    give(rule("create", "configmaps"))
    assert apply()[0] == 201
    assert apply()[0] == 200


def test_kubectl_can_ask_what_it_may(api: Api, robot: Api, namespace: str, give: Callable[..., None]) -> None:
    give(rule("get list", "pods"), rule("get", "pods/log"))
    here = ("-n", namespace)
    assert robot.kubectl("auth", "can-i", "get", "pods", *here).out.strip() == "yes"
    assert robot.kubectl("auth", "can-i", "get", "pods", "--subresource=log", *here).out.strip() == "yes"
    refused = robot.kubectl("auth", "can-i", "delete", "pods", *here)
    assert (refused.code, refused.out.strip()) == (1, "no")
    listed = robot.do("auth", "can-i", "--list", *here)
    assert "pods/log" in listed
    assert "selfsubjectaccessreviews.authorization.k8s.io" in listed
    assert "/healthz" in listed
    user = f"--as=system:serviceaccount:{namespace}:robot"
    assert api.kubectl("auth", "can-i", "list", "pods", user, *here).out.strip() == "yes"
    assert api.kubectl("auth", "can-i", "list", "secrets", user, *here).out.strip() == "no"
    assert api.kubectl("auth", "can-i", "*", "*", "--all-namespaces").out.strip() == "yes"
    group = ("--as=jane", "--as-group=system:masters")
    assert api.kubectl("auth", "can-i", "delete", "nodes", *group).out.strip() == "yes"
    assert robot.kubectl("get", "pods", "--as=jane", *here).code == 1


def test_reviews_say_why(api: Api, robot: Api, namespace: str, give: Callable[..., None]) -> None:
    give(rule("get", "pods"))
    user = f"system:serviceaccount:{namespace}:robot"
    about = {"verb": "get", "resource": "pods", "namespace": namespace}
    path = "/apis/authorization.k8s.io/v1"
    answer = api.ok(
        "POST", f"{path}/subjectaccessreviews", {"spec": {"user": user, "resourceAttributes": about}}
    )
    assert answer["status"]["allowed"] is True
    assert answer["status"]["reason"].startswith('RBAC: allowed by RoleBinding "')
    local = f"{path}/namespaces/{namespace}/localsubjectaccessreviews"
    spec: Object = {"user": user, "resourceAttributes": {**about, "verb": "list"}}
    assert api.ok("POST", local, {"spec": spec})["status"] == {"allowed": False}
    spec["resourceAttributes"]["namespace"] = "elsewhere"
    assert api.request("POST", local, {"spec": spec})[0] in (400, 422)
    spec = {"user": "jane", "nonResourceAttributes": {"path": "/healthz", "verb": "get"}}
    assert api.ok("POST", f"{path}/subjectaccessreviews", {"spec": spec})["status"]["allowed"] is False
    for spec in ({}, {"user": "u"}, {"resourceAttributes": about, "nonResourceAttributes": {}}):
        assert api.request("POST", f"{path}/subjectaccessreviews", {"spec": spec})[0] in (400, 422)
    assert robot.request("POST", f"{path}/subjectaccessreviews", {"spec": {}})[0] == 403


def test_impersonation_needs_the_right_to_it(
    api: Api, robot: Api, namespace: str, give: Callable[..., None]
) -> None:
    review = "/apis/authentication.k8s.io/v1/selfsubjectreviews"

    def who(speaker: Api, **headers: str) -> tuple[int, Object]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        status, answer, _ = speaker.request("POST", review, {}, headers=sent)
        return status, answer

    other = f"system:serviceaccount:{namespace}:other"
    status, answer = who(robot, Impersonate_User=other)
    assert status == 403
    assert (
        f'serviceaccounts "other" is forbidden: User "system:serviceaccount:{namespace}:robot"'
        in (answer["message"])
    )
    give(rule("impersonate", "serviceaccounts", names=("other",)))
    status, answer = who(robot, Impersonate_User=other)
    assert status == 201
    info = answer["status"]["userInfo"]
    assert info["username"] == other
    assert f"system:serviceaccounts:{namespace}" in info["groups"]
    assert who(robot, Impersonate_User=other, Impersonate_Group="system:masters")[0] == 403
    assert who(robot, Impersonate_User="jane")[0] == 403
    status, answer = who(api, Impersonate_User="jane", Impersonate_Group="team")
    assert set(answer["status"]["userInfo"]["groups"]) == {"team", "system:authenticated"}
    assert who(api, Impersonate_Group="team")[0] == 500


def test_nobody_gives_more_than_he_has(
    api: Api, robot: Api, namespace: str, give: Callable[..., None]
) -> None:
    give(rule("get", "pods"), rule("*", "roles rolebindings", "rbac.authorization.k8s.io"))
    where = f"{RBAC}/namespaces/{namespace}"
    modest = {"metadata": {"name": "modest"}, "rules": [rule("get", "pods")]}
    assert robot.request("POST", f"{where}/roles", modest)[0] == 201
    greedy = {"metadata": {"name": "greedy"}, "rules": [rule("get", "secrets")]}
    give(rule("bind", "clusterroles", "rbac.authorization.k8s.io", names=("view",)))
    # `*` on roles is the right to escalate, too: so it may write any role, but bind none that it lacks.
    assert robot.request("POST", f"{where}/roles", greedy)[0] == 201
    subject = {"kind": "ServiceAccount", "name": "robot", "namespace": namespace}

    def bind(kind: str, name: str) -> tuple[int, str]:
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        binding = {"metadata": {"name": f"b-{name}"}, "roleRef": reference, "subjects": [subject]}
        status, answer, _ = robot.request("POST", f"{where}/rolebindings", binding)
        return status, str(answer.get("message", ""))

    assert bind("ClusterRole", "view")[0] == 201
    status, text = bind("ClusterRole", "cluster-admin")
    assert status == 403
    assert "is attempting to grant RBAC permissions not currently held:\n" in text
    assert '{APIGroups:["*"], Resources:["*"], Verbs:["*"]}' in text


def test_token_for_others_is_not_taken(api: Api, robot: Api, namespace: str) -> None:
    vault = speaker(api, namespace, audiences=["vault"])
    assert vault.request("GET", "/version")[0] == 401
    config = yaml.safe_load(vault.kubeconfig.read_text())
    token = config["users"][0]["user"]["token"]
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    for audiences, good in ((["vault"], True), ([], False)):
        answer = api.ok("POST", path, {"spec": {"token": token, "audiences": audiences}})
        assert answer["status"].get("authenticated", False) is good


@pytest.mark.parametrize("token", ["\xff.\xff.\xff", "a.b", "..", "\xe9", "a.b.c.d", "x" * 5000])
def test_malformed_tokens_are_nobodys(api: Api, token: str) -> None:
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["users"][0]["user"] = {}
    file = api.kubeconfig.with_name("nobody")
    file.write_text(json.dumps(config))
    stranger = Api(file)
    status, answer, _ = stranger.request("GET", "/api/v1/pods", headers={"Authorization": f"Bearer {token}"})
    assert (status, answer["message"]) == (401, "Unauthorized")


def test_default_service_account_comes_back(api: Api, namespace: str) -> None:
    where = f"/api/v1/namespaces/{namespace}"
    first = api.until("it", lambda: api.request("GET", f"{where}/serviceaccounts/default")[1].get("metadata"))
    api.ok("DELETE", f"{where}/serviceaccounts/default")

    def again() -> bool:
        status, answer, _ = api.request("GET", f"{where}/serviceaccounts/default")
        return status == 200 and bool(answer["metadata"]["uid"] != first["uid"])

    api.until("a new one", again)
    text = api.until(
        "the authority",
        lambda: api.request("GET", f"{where}/configmaps/kube-root-ca.crt")[1].get("data"),
    )
    assert text["ca.crt"].startswith("-----BEGIN CERTIFICATE-----")
