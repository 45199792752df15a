"""Requests that nobody sends by mistake: each is refused in words, quickly, and the server goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest
from local_api import Api, EmbeddedServer

pytest_plugins = ["local_api_fixtures"]
MAPS, PODS = "/api/v1/namespaces/default/configmaps", "/api/v1/namespaces/default/pods"
TOKEN = "/api/v1/namespaces/default/serviceaccounts/default/token"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("POST", MAPS, DEEP, "json"),
        ("POST", MAPS, b"[" * 500_000, "json"),
        ("POST", MAPS, b"- " * 10_000 + b"x", "yaml"),
        ("PATCH", f"{MAPS}/x", DEEP, "merge-patch+json"),
        ("PATCH", f"{MAPS}/x?fieldManager=m", b"{a: " * 9_000, "apply-patch+yaml"),
        ("POST", MAPS, b'{"metadata":{"name":"x"},"data":{"a":NaN}}', "json"),
        ("DELETE", f"{MAPS}/x?gracePeriodSeconds=x", None, "json"),
        ("DELETE", f"{PODS}/x", {"gracePeriodSeconds": "x"}, "json"),
        ("DELETE", f"{PODS}/x", {"gracePeriodSeconds": [1]}, "json"),
        ("DELETE", f"{PODS}/x", {"preconditions": "x"}, "json"),
        ("DELETE", f"{PODS}/x", {"preconditions": {"uid": {}}}, "json"),
        ("DELETE", f"{PODS}/x", {"dryRun": "All"}, "json"),
        ("DELETE", f"{PODS}/x", {"dryRun": [1]}, "json"),
        ("DELETE", f"{PODS}/x", {"propagationPolicy": {}}, "json"),
        ("DELETE", f"{PODS}/x", ["x"], "json"),
        ("POST", f"{PODS}/x/eviction", {"deleteOptions": "x"}, "json"),
        ("POST", TOKEN, {"spec": {"expirationSeconds": {}}}, "json"),
        ("POST", TOKEN, {"spec": {"expirationSeconds": 2**70}}, "json"),
        ("POST", TOKEN, {"spec": {"boundObjectRef": ["x"]}}, "json"),
        ("POST", TOKEN, {"spec": {"boundObjectRef": {"kind": "Pod", "name": {}}}}, "json"),
        ("POST", REVIEWS, {"spec": {"user": {}, "resourceAttributes": {}}}, "json"),
        ("POST", REVIEWS, {"spec": {"user": "u", "resourceAttributes": {"verb": 1}}}, "json"),
        ("POST", "/apis/authentication.k8s.io/v1/tokenreviews", {"spec": {"audiences": 1}}, "json"),
    ],
)
def test_hostile_request_is_refused_quickly(
    api: Api, embedded: EmbeddedServer, method: str, path: str, body: Any, kind: str
) -> None:
    assert embedded is api.server
    began = time.monotonic()
    status, answer, _ = api.request(method, path, body, f"application/{kind}")
    assert time.monotonic() - began < 5.0  # seconds were minutes; a machine of tests may be busy
    assert 400 <= status < 500, answer
    assert answer["kind"] == "Status"
    assert len(answer["message"]) > 10
    assert api.request("GET", "/readyz")[0] == 200
