"""Discovery, OpenAPI and tables over HTTP, and helm, which lives on them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from local_api import Api, EmbeddedServer

pytest_plugins = ["local_api_fixtures"]

AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


def test_discovery_lists_our_kind_with_its_parts(api: Api, widgets: str) -> None:
    groups = {group["name"]: group for group in api.ok("GET", "/apis")["groups"]}
    assert groups["widgets.test.springtide.dev"]["preferredVersion"]["version"] == "v1"
    resources = {entry["name"]: entry for entry in api.ok("GET", widgets)["resources"]}
    assert set(resources) == {"widgets", "widgets/status", "widgets/scale"}
    assert resources["widgets"]["shortNames"] == ["wdg"]
    assert resources["widgets/scale"]["kind"] == "Scale"
    assert set(resources["widgets"]["verbs"]) >= {
        "create",
        "delete",
        "deletecollection",
        "list",
        "patch",
        "watch",
    }
    assert api.ok("GET", "/api")["versions"] == ["v1"]


def test_aggregated_discovery_says_the_same(api: Api, widgets: str) -> None:
    for path in ("/api", "/apis"):
        status, answer, headers = api.request(
            "GET", path, headers={"Accept": f"{AGGREGATED},application/json"}
        )
        assert status == 200
        assert "as=APIGroupDiscoveryList" in headers["Content-Type"]
        assert answer["kind"] == "APIGroupDiscoveryList"
    group = next(
        item for item in answer["items"] if item["metadata"]["name"] == "widgets.test.springtide.dev"
    )
    resource = group["versions"][0]["resources"][0]
    assert (resource["resource"], resource["scope"]) == ("widgets", "Namespaced")
    assert {sub["subresource"] for sub in resource["subresources"]} == {"status", "scale"}


def test_openapi_lists_field_validation_and_our_schema(api: Api, widgets: str) -> None:
    index = api.ok("GET", "/openapi/v3")["paths"]
    url = index["apis/widgets.test.springtide.dev/v1"]["serverRelativeURL"]
    document = api.ok("GET", url)
    path = "/apis/widgets.test.springtide.dev/v1/namespaces/{namespace}/widgets/{name}"
    patch = document["paths"][path]["patch"]
    assert "fieldValidation" in {parameter.get("name") for parameter in patch["parameters"]}
    assert "application/strategic-merge-patch+json" not in patch["requestBody"]["content"]
    schema = next(s for n, s in document["components"]["schemas"].items() if n.endswith(".Widget"))
    assert schema["properties"]["spec"]["properties"]["size"]["description"] == "How large the widget is."


def test_every_reference_of_every_document_leads_somewhere(
    api: Api, embedded: EmbeddedServer, widgets: str
) -> None:
    for entry in api.ok("GET", "/openapi/v3")["paths"].values():
        document = api.ok("GET", entry["serverRelativeURL"])
        known = set(document["components"]["schemas"])
        assert _references(document) <= known, entry


def _references(value: Any) -> set[str]:
    if isinstance(value, list):
        return {name for item in value for name in _references(item)}
    if not isinstance(value, dict):
        return set()
    found = {name for item in value.values() for name in _references(item)}
    if isinstance(value.get("$ref"), str):
        found.add(value["$ref"].rpartition("/")[2])
    return found


def test_a_document_changes_its_hash_with_its_definitions(
    api: Api, embedded: EmbeddedServer, widgets: str
) -> None:
    name = "apis/widgets.test.springtide.dev/v1"
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.widgets.test.springtide.dev"
    path = "/spec/versions/0/schema/openAPIV3Schema/description"
    before = api.ok("GET", "/openapi/v3")["paths"][name]["serverRelativeURL"]
    core = api.ok("GET", "/openapi/v3")["paths"]["api/v1"]["serverRelativeURL"]
    operations = [{"op": "replace", "path": path, "value": "Another text."}]
    api.ok("PATCH", crd, operations, "application/json-patch+json")
    after = api.ok("GET", "/openapi/v3")["paths"][name]["serverRelativeURL"]
    assert urlsplit(before).path == urlsplit(after).path
    assert before != after
    assert api.ok("GET", "/openapi/v3")["paths"]["api/v1"]["serverRelativeURL"] == core


def test_tables_come_with_what_was_asked_for(api: Api, widgets: str, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    api.ok("POST", path, {"metadata": {"name": "a"}, "data": {"x": "1"}})
    for include, kind in (("Metadata", "PartialObjectMetadata"), ("Object", "ConfigMap"), ("None", None)):
        _, table, _ = api.request("GET", f"{path}/a?includeObject={include}", headers={"Accept": TABLE})
        assert table["kind"] == "Table"
        assert [column["name"] for column in table["columnDefinitions"]] == ["Name", "Data", "Age"]
        row = table["rows"][0]
        assert row["cells"][:2] == ["a", 1]
        assert (row.get("object") or {}).get("kind") == kind
    partial = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
    _, listed, _ = api.request("GET", path, headers={"Accept": partial})
    assert listed["kind"] == "PartialObjectMetadataList"
    assert all("data" not in item for item in listed["items"])


def test_health_and_version(api: Api, embedded: EmbeddedServer) -> None:
    for path in ("/healthz", "/livez", "/readyz"):
        assert api.request("GET", path)[:2] == (200, "ok")
    assert api.ok("GET", "/version")["minor"] == "32"
    status, answer, _ = api.request("GET", "/nowhere")
    assert (status, answer["reason"]) == (404, "NotFound")
    assert api.request("DELETE", "/version")[0] == 405


CHART = {
    "Chart.yaml": "apiVersion: v2\nname: tiny\nversion: 0.1.0\n",
    "values.yaml": "text: one\n",
    "templates/config.yaml": (
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: tiny}\ndata: {text: {{ .Values.text | quote }}}\n"
    ),
    "templates/service.yaml": (
        "apiVersion: v1\nkind: Service\nmetadata: {name: tiny}\n"
        "spec: {selector: {app: tiny}, ports: [{port: 80}]}\n"
    ),
}


def test_helm_installs_upgrades_and_uninstalls(
    api: Api, namespace: str, tmp_path: Path, require_tool: Callable[[str], str]
) -> None:
    tool = require_tool("helm")
    for name, text in CHART.items():
        path = tmp_path / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def helm(*arguments: str) -> str:
        done = subprocess.run(
            [tool, "--kubeconfig", str(api.kubeconfig), "-n", namespace, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    chart = str(tmp_path / "tiny")
    config = f"/api/v1/namespaces/{namespace}/configmaps/tiny"
    helm("install", "tiny", chart)
    assert api.ok("GET", config)["data"] == {"text": "one"}
    helm("upgrade", "tiny", chart, "--set", "text=two")
    assert api.ok("GET", config)["data"] == {"text": "two"}
    helm("rollback", "tiny", "1")
    assert api.ok("GET", config)["data"] == {"text": "one"}
    helm("uninstall", "tiny")
    assert api.request("GET", config)[0] == 404
