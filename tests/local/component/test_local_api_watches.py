"""Lists and watches, on any cluster."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from local_api import Api, EmbeddedServer

pytest_plugins = ["local_api_fixtures"]

MERGE = "application/merge-patch+json"


def config(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"own": "yes", **labels}}, "data": {"n": "0"}}


def test_a_watch_tells_every_change_in_order(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    api.ok("POST", path, config("a"))
    version = api.ok("GET", f"{path}?labelSelector=own")["metadata"]["resourceVersion"]
    with api.watch(f"{path}?watch=1&labelSelector=own&resourceVersion={version}") as events:
        api.ok("POST", path, config("b"))
        for number in range(5):
            api.ok("PATCH", f"{path}/a", {"data": {"n": str(number + 1)}}, MERGE)
        api.ok("DELETE", f"{path}/b")
        seen = [next(events) for _ in range(7)]
    assert [event["type"] for event in seen] == ["ADDED", *["MODIFIED"] * 5, "DELETED"]
    assert [event["object"]["data"]["n"] for event in seen[1:6]] == ["1", "2", "3", "4", "5"]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in seen]
    assert versions == sorted(versions)
    assert len(set(versions)) == 7


def test_without_a_version_what_exists_comes_first(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    for name in ("b", "a"):
        api.ok("POST", path, config(name))
    with api.watch(f"{path}?watch=true&labelSelector=own") as events:
        seen = [next(events) for _ in range(2)]
        api.ok("POST", path, config("c"))
        seen.append(next(events))
    assert {event["object"]["metadata"]["name"] for event in seen[:2]} == {"a", "b"}
    assert seen[2]["object"]["metadata"]["name"] == "c"
    assert {event["type"] for event in seen} == {"ADDED"}


def test_leaving_a_selection_deletes_and_entering_it_adds(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    api.ok("POST", path, config("a", team="red"))
    version = api.ok("GET", path)["metadata"]["resourceVersion"]
    with api.watch(f"{path}?watch=1&labelSelector=team%3Dred&resourceVersion={version}") as events:
        for team in ("blue", "red"):
            api.ok("PATCH", f"{path}/a", {"metadata": {"labels": {"team": team}}}, MERGE)
        assert [next(events)["type"] for _ in range(2)] == ["DELETED", "ADDED"]


def test_a_watch_can_be_for_one_name_and_ends_in_time(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    api.ok("POST", path, config("a"))
    api.ok("POST", path, config("b"))
    with api.watch(f"{path}?watch=1&fieldSelector=metadata.name%3Da&timeoutSeconds=1") as events:
        assert [event["object"]["metadata"]["name"] for event in events] == ["a"]


def test_a_forgotten_version_is_gone(api: Api, embedded: EmbeddedServer, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    old = api.ok("POST", path, config("a"))["metadata"]["resourceVersion"]
    api.ok("POST", path, config("b"))
    embedded.call(lambda: embedded.store.collection("configmaps").compact())
    with api.watch(f"{path}?watch=1&resourceVersion={old}") as events:
        event = next(events)
    assert event["type"] == "ERROR"
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")
    assert "too old resource version" in event["object"]["message"]


def test_bookmarks_come_when_a_watch_ends(api: Api, embedded: EmbeddedServer, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    version = api.ok("POST", path, config("a"))["metadata"]["resourceVersion"]
    query = f"watch=1&allowWatchBookmarks=true&timeoutSeconds=1&resourceVersion={version}"
    with api.watch(f"{path}?{query}") as events:
        last = list(events)[-1]
    assert last["type"] == "BOOKMARK"
    assert last["object"]["kind"] == "ConfigMap"
    assert int(last["object"]["metadata"]["resourceVersion"]) >= int(version)


def test_streaming_lists_are_refused_as_older_servers_do(
    api: Api, embedded: EmbeddedServer, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    status, answer, _ = api.request("GET", f"{path}?{query}")
    assert status == 422
    assert (
        "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
        in answer["message"]
    )


def test_a_list_in_pieces_is_consistent(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    names = [f"c{number}" for number in range(5)]
    for name in names:
        api.ok("POST", path, config(name))
    first = api.ok("GET", f"{path}?limit=2&labelSelector=own")
    api.ok("DELETE", f"{path}/c4")
    api.ok("POST", path, config("c9"))
    seen = [item["metadata"]["name"] for item in first["items"]]
    token = first["metadata"]["continue"]
    while token:
        page = api.ok("GET", f"{path}?limit=2&labelSelector=own&continue={quote(token)}")
        assert page["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        seen += [item["metadata"]["name"] for item in page["items"]]
        token = page["metadata"].get("continue")
    assert seen == names


def test_a_continue_token_that_is_none_is_refused(api: Api, namespace: str) -> None:
    status, answer, _ = api.request(
        "GET", f"/api/v1/namespaces/{namespace}/configmaps?limit=1&continue=nonsense"
    )
    assert status == 400
    assert "continue key is not valid" in answer["message"]


def test_a_version_of_the_future_is_refused(api: Api, embedded: EmbeddedServer, namespace: str) -> None:
    status, answer, _ = api.request(
        "GET", f"/api/v1/namespaces/{namespace}/configmaps?resourceVersion=999999999"
    )
    assert status == 504
    assert "Too large resource version" in answer["message"]


def test_a_watch_ends_with_its_definition(api: Api, embedded: EmbeddedServer, namespace: str) -> None:
    definition = {
        "metadata": {"name": "brief.brief.test.springtide.dev"},
        "spec": {
            "group": "brief.test.springtide.dev",
            "scope": "Namespaced",
            "names": {"plural": "brief", "kind": "Brief"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                    },
                }
            ],
        },
    }
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    api.ok("POST", crds, definition)
    path = f"/apis/brief.test.springtide.dev/v1/namespaces/{namespace}/brief"
    api.ok("POST", path, {"metadata": {"name": "a"}})
    with api.watch(f"{path}?watch=1") as events:
        assert next(events)["type"] == "ADDED"
        hold = {"metadata": {"finalizers": ["test.springtide.dev/hold"]}}
        api.ok("PATCH", f"{path}/a", hold, MERGE)
        api.ok("DELETE", f"{crds}/brief.brief.test.springtide.dev")
        assert [next(events)["type"] for _ in range(2)] == ["MODIFIED", "MODIFIED"]
        status, answer, _ = api.request("POST", path, {"metadata": {"name": "b"}})
        assert status == 405
        assert "create not allowed while custom resource definition is terminating" in answer["message"]
        api.ok("PATCH", f"{path}/a", {"metadata": {"finalizers": None}}, MERGE)
        assert [event["type"] for event in events] == ["DELETED"]
    api.until("the resource to be served no more", lambda: api.request("GET", path)[0] == 404)


def test_every_request_is_counted_by_who_did_what(api: Api, embedded: EmbeddedServer, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    embedded.call(embedded.server.audit.clear)
    api.ok("POST", path, config("a"))
    api.request("GET", path, headers={"User-Agent": "other/2"})
    report = api.ok("GET", "/debug/springtide/requests")["requests"]
    wanted = {("create", "api-test/1"), ("list", "other/2")}
    found = {(use["verb"], use["user_agent"]) for use in report if use["resource"] == "configmaps"}
    assert found == wanted
    assert {use["user"] for use in report} == {"springtide-admin"}
    assert json.dumps(report)
