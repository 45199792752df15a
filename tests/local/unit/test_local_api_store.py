"""The store by itself: atomic writes, watches without gaps, history, tokens, garbage."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from springtide_local.api.auth import Tokens
from springtide_local.api.collection import Change, Collection, Stored
from springtide_local.api.gc import Collector
from springtide_local.api.store import Store
from springtide_local.ports import ApiError, WatchEvent


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def pod(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "x"}], **spec}}


def test_what_comes_back_is_a_copy() -> None:
    store = Store()
    given = pod("a")
    made = store.create("pods", given, "default")
    made["spec"]["containers"].clear()
    given["spec"]["containers"].clear()
    store.list("pods", "default")[0]["metadata"]["labels"] = {"x": "y"}
    assert store.get("pods", "a", "default")["spec"]["containers"][0]["image"] == "x"
    assert "labels" not in store.get("pods", "a", "default")["metadata"]


def test_mutate_writes_only_changes_and_only_its_part() -> None:
    store = Store()
    made = store.create("pods", pod("a"), "default")
    same = store.mutate("pods", "a", "default", lambda obj: None)
    assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]

    def change(obj: dict[str, Any]) -> None:
        obj["status"]["phase"] = "Running"
        obj["spec"]["nodeName"] = "n"

    done = store.mutate("pods", "a", "default", change, "status")
    assert (done["status"]["phase"], "nodeName" in done["spec"]) == ("Running", False)


def test_a_refused_write_changes_nothing() -> None:
    store = Store()
    store.create("pods", pod("a"), "default")
    before, version = store.get("pods", "a", "default"), store.version

    def change(obj: dict[str, Any]) -> None:
        obj["spec"]["containers"] = []

    with pytest.raises(ApiError) as caught:
        store.mutate("pods", "a", "default", change)
    assert caught.value.code == 422
    assert (store.get("pods", "a", "default"), store.version) == (before, version)


async def test_a_watch_has_no_gap_and_no_end() -> None:
    store = Store()
    store.create("pods", pod("a"), "default")
    seen: list[WatchEvent] = []
    watch = store.watch("pods", "default")
    seen.append(await anext(watch))
    store.create("pods", pod("b"), "default")
    store.mutate("pods", "b", "default", lambda obj: obj["metadata"].setdefault("labels", {}).update(x="y"))
    store.delete("pods", "a", "default")
    store.create("configmaps", {"metadata": {"name": "other"}}, "default")
    seen += [await anext(watch) for _ in range(3)]
    assert [(event.type, event.object["metadata"]["name"]) for event in seen] == [
        ("ADDED", "a"),
        ("ADDED", "b"),
        ("MODIFIED", "b"),
        ("DELETED", "a"),
    ]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watch), 0.02)
    await watch.aclose()  # type: ignore[attr-defined]
    assert not store.collection("pods").subscriptions


def test_history_is_bounded_and_reaches_back_exactly() -> None:
    collection = Collection(version=0, history=3)
    stored = [Stored({"metadata": {"name": str(number)}}) for number in range(6)]
    for number in range(1, 6):
        old = collection.items.get(("", "x"))
        kind = "ADDED" if old is None else "MODIFIED"
        collection.record(Change(number, kind, ("", "x"), stored[number], old))  # type: ignore[arg-type]
    assert [change.version for change in collection.changes_since(2, 5)] == [3, 4, 5]
    with pytest.raises(ApiError, match="too old resource version: 1"):
        collection.changes_since(1, 5)
    with pytest.raises(ApiError, match="unknown resource version"):
        collection.changes_since(6, 5)
    assert collection.at(3, 5) == {("", "x"): stored[3]}


def test_a_pod_s_deletion_is_graceful_once_bound() -> None:
    clock = Clock()
    store = Store(clock)
    store.create("pods", pod("a", nodeName="n", terminationGracePeriodSeconds=20), "default")
    marked = store.delete("pods", "a", "default")
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 20
    assert marked["metadata"]["deletionTimestamp"] == "2023-11-14T22:13:40Z"
    assert store.delete("pods", "a", "default", 60)["metadata"]["deletionGracePeriodSeconds"] == 20
    assert store.delete("pods", "a", "default", 5)["metadata"]["deletionGracePeriodSeconds"] == 5
    store.delete("pods", "a", "default", 0)
    with pytest.raises(ApiError, match='pods "a" not found'):
        store.get("pods", "a", "default")


def test_a_finished_pod_goes_at_once() -> None:
    store = Store()
    store.create("pods", pod("a", nodeName="n"), "default")
    store.mutate("pods", "a", "default", lambda obj: obj["status"].update(phase="Succeeded"), "status")
    store.delete("pods", "a", "default")
    assert store.list("pods") == []


async def test_a_chain_of_owners_goes_in_one_sweep() -> None:
    store = Store()
    collector = Collector(store)
    uid = ""
    for number in range(5):
        owners = (
            [{"apiVersion": "v1", "kind": "ConfigMap", "name": f"c{number - 1}", "uid": uid}]
            if number
            else []
        )
        meta = {"name": f"c{number}", "ownerReferences": owners}
        uid = store.create("configmaps", {"metadata": meta}, "default")["metadata"]["uid"]
    collector.work()
    assert len(store.list("configmaps", "default")) == 5
    store.delete("configmaps", "c0", "default")
    collector.work()
    assert store.list("configmaps", "default") == []


async def test_a_deleted_namespace_keeps_its_contents_a_moment() -> None:
    clock = Clock()
    store = Store(clock)
    collector = Collector(store, patience=1.0)
    store.create("namespaces", {"metadata": {"name": "n"}})
    store.create("configmaps", {"metadata": {"name": "c"}}, "n")
    held = {"metadata": {"name": "held", "finalizers": ["test.dev/hold"]}}
    store.create("configmaps", held, "n")
    store.delete("namespaces", "n")
    collector.work()
    assert len(store.list("configmaps", "n")) == 2
    clock.now += 1.1
    collector.work()
    assert [obj["metadata"]["name"] for obj in store.list("configmaps", "n")] == ["held"]
    store.mutate("configmaps", "held", "n", lambda obj: obj["metadata"].pop("finalizers"))
    collector.work()
    with pytest.raises(ApiError, match='namespaces "n" not found'):
        store.get("namespaces", "n")
    collector.work()


def test_services_use_a_full_range_once_each() -> None:
    store = Store(services="127.96.0.0/29")
    body = {"spec": {"ports": [{"port": 80}]}}
    made = [store.create("services", {"metadata": {"name": f"s{n}"}, **body}, "default") for n in range(6)]
    assert len({service["spec"]["clusterIP"] for service in made}) == 6
    with pytest.raises(ApiError, match="range is full"):
        store.create("services", {"metadata": {"name": "more"}, **body}, "default")
    store.delete("services", "s3", "default")
    again = store.create("services", {"metadata": {"name": "more"}, **body}, "default")
    assert again["spec"]["clusterIP"] == made[3]["spec"]["clusterIP"]


def test_tokens_end_with_their_time_their_account_and_their_pod() -> None:
    clock = Clock()
    store = Store(clock)
    tokens = Tokens(store)
    running = store.create("pods", pod("a"), "default")
    plain, expires = tokens.issue("default", "default", seconds=600)
    bound, _ = tokens.issue("default", "default", seconds=600, pod=running)
    user = tokens.check(plain)
    assert user is not None
    assert user.name == "system:serviceaccount:default:default"
    assert tokens.check(bound) is not None
    assert expires == clock.now + 600
    assert tokens.check(plain[:-2]) is None
    assert Tokens(store).check(plain) is None
    store.delete("pods", "a", "default")
    assert tokens.check(bound) is None
    clock.now += 601
    assert tokens.check(plain) is None
    lasting = tokens.issue_user("operator", ("g",))
    assert tokens.check(lasting) == ("operator", ("g", "system:authenticated"), "")
    with pytest.raises(ApiError, match='serviceaccounts "nobody" not found'):
        tokens.issue("default", "nobody")


def test_writing_pods_takes_a_few_milliseconds_at_most() -> None:
    store = Store()
    store.create("pods", pod("warm"), "default")
    started = time.process_time()
    for number in range(100):
        store.create("pods", pod(f"p{number}"), "default")
        store.mutate(
            "pods", f"p{number}", "default", lambda obj: obj["status"].update(phase="Running"), "status"
        )
    assert time.process_time() - started < 1.0
