"""Decisions of the embedded cluster: rollouts, taints, evictions, endpoints, images, logs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.controllers import deployments
from springtide_local.controllers.endpoints import endpoints_object, endpoints_of, slice_object
from springtide_local.controllers.nodes import Silence, eviction_due, wanted_taints
from springtide_local.controllers.proxy import backends_of
from springtide_local.controllers.replicasets import victims
from springtide_local.images import Image, ImageError, Images, add_image, split_reference
from springtide_local.informer import Change, Informer
from springtide_local.kubelet.logs import ContainerLog, log_end, read_log
from springtide_local.ports import StorePort, WatchEvent
from springtide_local.settings import Settings

Object = dict[str, Any]
ROLLING = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}}


def replica_set(name: str, replicas: int, available: int) -> Object:
    return {
        "metadata": {"name": name},
        "spec": {"replicas": replicas},
        "status": {"availableReplicas": available},
    }


@pytest.mark.parametrize(
    ("surge", "unavailable", "wanted", "expected"),
    [
        ("25%", "25%", 4, (1, 1)),
        ("25%", "25%", 1, (1, 0)),
        (0, 0, 5, (0, 1)),
        ("50%", 0, 3, (2, 0)),
        (0, "10%", 5, (0, 1)),
    ],
)
def test_surge_is_rounded_up_and_unavailability_down(
    surge: int | str, unavailable: int | str, wanted: int, expected: tuple[int, int]
) -> None:
    rolling = {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}
    assert deployments.limits(rolling, wanted) == expected


@given(
    wanted=st.integers(0, 8),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 3),
    old=st.lists(st.integers(0, 5), max_size=2),
    luck=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_a_rollout_ends_and_never_leaves_its_limits(
    wanted: int, surge: int, unavailable: int, old: list[int], luck: list[bool]
) -> None:
    strategy = {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}
    surge, unavailable = deployments.limits(strategy, wanted)
    new = replica_set("new", 0, 0)
    before = [replica_set(f"old-{i}", size, size) for i, size in enumerate(old)]
    start = sum(old)
    for turn in range(200):
        sizes = deployments.decide(wanted, strategy, new, before, False)
        total = sizes.new + sum(sizes.old.values())
        assert total <= max(wanted + surge, start)
        assert sizes.new <= max(wanted, new["spec"]["replicas"])
        available = min(sizes.new, new["status"]["availableReplicas"])
        for rs in before:
            available += min(sizes.old[rs["metadata"]["name"]], rs["status"]["availableReplicas"])
        assert available >= min(wanted - unavailable, start)
        new["spec"]["replicas"] = sizes.new
        for rs in before:
            rs["spec"]["replicas"] = sizes.old[rs["metadata"]["name"]]
            rs["status"]["availableReplicas"] = min(rs["status"]["availableReplicas"], rs["spec"]["replicas"])
        if luck[turn % len(luck)] or turn > 100:
            ready = new["status"]["availableReplicas"] + 1
            new["status"]["availableReplicas"] = min(ready, new["spec"]["replicas"])
        start = min(start, total)
        if (
            sizes.new == wanted
            and not any(sizes.old.values())
            and new["status"]["availableReplicas"] == wanted
        ):
            return
    raise AssertionError(f"the rollout stands still: {sizes}")


def test_pods_that_never_became_available_go_first() -> None:
    broken = replica_set("broken", 3, 0)
    sizes = deployments.decide(3, ROLLING, replica_set("new", 0, 0), [broken], False)
    assert sizes.old["broken"] < 3
    assert sizes.new == 1


def test_recreate_waits_for_the_old_pods() -> None:
    strategy = {"type": "Recreate"}
    sizes = deployments.decide(2, strategy, replica_set("new", 0, 0), [replica_set("old", 2, 2)], True)
    assert (sizes.new, sizes.old) == (0, {"old": 0})
    sizes = deployments.decide(2, strategy, replica_set("new", 0, 0), [replica_set("old", 0, 0)], True)
    assert sizes.new == 0
    assert (
        deployments.decide(2, strategy, replica_set("new", 0, 0), [replica_set("old", 0, 0)], False).new == 2
    )


def test_equal_templates_have_equal_hashes() -> None:
    one = {"metadata": {"labels": {"a": "1", "b": "2"}}, "spec": {"x": 1}}
    same = {"spec": {"x": 1}, "metadata": {"labels": {"b": "2", "a": "1"}}}
    assert deployments.template_hash(one) == deployments.template_hash(same)
    assert deployments.template_hash(one) != deployments.template_hash({"spec": {"x": 2}})


def pod(name: str, ready: bool = True, phase: str = "Running", **metadata: Any) -> Object:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": name, "labels": {"app": "x"}, **metadata},
        "spec": {
            "nodeName": "n",
            "containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}],
        },
        "status": {
            "phase": phase,
            "podIP": f"127.9.16.{len(name)}",
            "conditions": [
                {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}
            ],
        },
    }


def test_the_least_useful_pods_are_deleted_first() -> None:
    pending = pod("pending", ready=False, phase="Pending")
    unbound = pod("unbound", ready=False, phase="Pending")
    unbound["spec"]["nodeName"] = ""
    young = pod("young", creationTimestamp="2026-01-02T00:00:00Z")
    old = pod("old", creationTimestamp="2026-01-01T00:00:00Z")
    unready = pod("unready", ready=False)
    order = [p["metadata"]["name"] for p in victims([old, young, unready, pending, unbound], 5)]
    assert order == ["unbound", "pending", "unready", "young", "old"]


def service(**spec: Any) -> Object:
    ports = [{"name": "http", "port": 80, "targetPort": "web"}, {"name": "raw", "port": 90}]
    metadata = {"name": "s", "namespace": "ns", "uid": "s"}
    return {
        "metadata": metadata,
        "spec": {"selector": {"app": "x"}, "clusterIP": "127.9.4.1", "ports": ports, **spec},
    }


def test_endpoints_are_the_ready_pods_that_live() -> None:
    pods = [
        pod("ready"),
        pod("not-ready", ready=False),
        pod("done", phase="Succeeded"),
        pod("going", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("other", labels={"app": "y"}),
    ]
    found = endpoints_of(service(), pods)
    assert {e.pod["metadata"]["name"]: (e.ready, e.serving, e.terminating) for e in found} == {
        "ready": (True, True, False),
        "not-ready": (False, False, False),
        "going": (False, True, True),
    }
    assert found[0].ports == (("http", 8080, "TCP"), ("raw", 90, "TCP"))
    published = endpoints_of(service(publishNotReadyAddresses=True), pods)
    assert all(endpoint.ready for endpoint in published)
    (subset,) = endpoints_object(service(), found)["subsets"]
    assert [a["targetRef"]["name"] for a in subset["addresses"]] == ["ready"]
    assert [a["targetRef"]["name"] for a in subset["notReadyAddresses"]] == ["going", "not-ready"]


def test_connections_go_to_ready_endpoints_only() -> None:
    found = endpoints_of(service(), [pod("ready"), pod("not-ready", ready=False)])
    part = slice_object(service(), found)
    assert backends_of(service(), [part]) == {80: [("127.9.16.5", 8080)], 90: [("127.9.16.5", 90)]}
    assert backends_of(service(clusterIP="None"), [part]) == {}
    assert backends_of(service(), []) == {80: [], 90: []}


def node(ready: str, **spec: Any) -> Object:
    return {
        "metadata": {"name": "n"},
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def test_taints_follow_the_node_and_keep_those_of_others() -> None:
    own = {"key": "team", "effect": "NoSchedule", "value": "red"}
    assert wanted_taints(node("True", taints=[own]), 0.0) == [own]
    lost = wanted_taints(node("Unknown", taints=[own], unschedulable=True), 0.0)
    assert [(t["key"].rpartition("/")[2], t["effect"]) for t in lost] == [
        ("team", "NoSchedule"),
        ("unschedulable", "NoSchedule"),
        ("unreachable", "NoSchedule"),
        ("unreachable", "NoExecute"),
    ]
    assert lost[3]["timeAdded"] == "1970-01-01T00:00:00Z"
    again = wanted_taints(node("Unknown", taints=lost, unschedulable=True), 99.0)
    assert again == lost
    assert wanted_taints(node("True", taints=lost), 100.0) == [own]


@pytest.mark.parametrize(
    ("tolerations", "due"),
    [
        ([], 105.0),
        ([{"operator": "Exists"}], None),
        ([{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 300}], 105.0),
        ([{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 2}], 102.0),
        ([{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}], 105.0),
    ],
)
def test_pods_leave_a_lost_node_after_their_toleration(tolerations: list[Object], due: float | None) -> None:
    lost = wanted_taints(node("Unknown"), 100.0)
    found = eviction_due({"spec": {"tolerations": tolerations}}, lost, toleration=5.0)
    assert (found[0] if found else None) == due


def test_a_taint_of_somebody_else_drives_out_at_once() -> None:
    taints = wanted_taints(node("True", taints=[{"key": "team", "effect": "NoExecute"}]), 100.0)
    assert eviction_due({"spec": {}}, taints, toleration=5.0) == (100.0, "team")


def test_nobody_is_silent_while_the_listener_itself_was_held_up() -> None:
    silence = Silence()
    silence.look({"a": "1"}, 0.0)
    assert silence.look({"a": "1"}, 0.25) == {"a": 0.25}
    assert silence.look({"a": "1"}, 60.0)["a"] <= 0.75
    assert silence.look({"a": "2"}, 60.1) == {"a": 0.0}
    assert silence.look({}, 61.0) == {}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("springtide/worker", ("springtide/worker", "latest")),
        ("springtide/worker:0.1.0", ("springtide/worker", "0.1.0")),
        ("docker.io/springtide/worker:1", ("springtide/worker", "1")),
        ("docker.io/library/python:3", ("python", "3")),
        ("host:5000/x/y", ("host:5000/x/y", "latest")),
        ("host:5000/x/y:2", ("host:5000/x/y", "2")),
        ("x/y@sha256:" + "0" * 64, ("x/y", "latest")),
    ],
)
def test_image_references(reference: str, expected: tuple[str, str]) -> None:
    assert split_reference(reference) == expected


def test_known_and_unknown_images(tmp_path: Path) -> None:
    images = Images(tmp_path / "images.json", tmp_path)
    built_in = images.find("springtide/operator:9")
    assert (built_in.bin / "python").exists()
    assert (built_in.root / "examples").is_dir()
    for reference, reason in (("nginx", "ErrImagePull"), ("Bad Name", "InvalidImageName")):
        with pytest.raises(ImageError) as caught:
            images.find(reference)
        assert caught.value.reason == reason
    with pytest.raises(ImageError) as caught:
        images.find("nginx", "Never")
    assert caught.value.reason == "ErrImageNeverPull"
    add_image(tmp_path / "images.json", "docker.io/nginx", Path(sys.executable), tmp_path)
    add_image(tmp_path / "images.json", "nginx:2", Path(sys.executable), tmp_path.parent)
    bin_folder = Path(sys.executable).parent
    assert images.find("nginx:1") == Image("nginx", bin_folder, tmp_path.resolve())
    assert images.find("nginx:2").root == tmp_path.parent.resolve()
    assert "nginx:2" in images.names()


async def _read(log: ContainerLog, **options: Any) -> bytes:
    return b"".join([data async for data in read_log(log.path, log, **options)])


async def test_a_log_is_followed_until_it_is_closed(tmp_path: Path) -> None:
    log = ContainerLog(tmp_path / "0.log")
    log.write(b"one\ntw")
    reading = asyncio.create_task(_read(log, follow=True))
    await asyncio.sleep(0)
    log.write(b"o\nthree")
    log.close()
    assert await asyncio.wait_for(reading, 60) == b"one\ntwo\nthree"
    assert await _read(log, tail_lines=2) == b"two\nthree"
    assert await _read(log, limit_bytes=5) == b"one\nt"
    assert log_end(log.path, lines=2, limit_bytes=100) == "two\nthree"
    assert log_end(log.path, lines=9, limit_bytes=3) == "ree"
    assert log_end(tmp_path / "none", 1, 1) == ""


async def test_a_rotated_log_is_followed_into_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_local.kubelet.logs.ROTATE_BYTES", 200)
    log = ContainerLog(tmp_path / "0.log")
    reading = asyncio.create_task(_read(log, follow=True))
    for index in range(40):
        log.write(b"line %d\n" % index)
        await asyncio.sleep(0.001)
    log.close()
    assert await asyncio.wait_for(reading, 60) == b"".join(b"line %d\n" % i for i in range(40))
    assert (tmp_path / "0.old").exists()


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_a_log_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    log = ContainerLog(tmp_path_factory.mktemp("log") / "0.log")
    for part in parts:
        log.write(part)
    log.close()
    assert asyncio.run(_read(log)) == b"".join(parts)


def test_settings_survive_being_written() -> None:
    settings = Settings(nodes=5, cpus="500m", gpus=2)
    assert Settings.load(settings.dump()) == settings
    assert settings.capacity()["nvidia.com/gpu"] == "2"


class ForgetfulStore:
    """A store whose first watch falls behind after one event, while one object goes and another comes."""

    def __init__(self) -> None:
        self.objects = {"a": {"metadata": {"name": "a"}}, "b": {"metadata": {"name": "b"}}}
        self.watches = 0

    def list(self, resource: str) -> list[Object]:
        return list(self.objects.values())

    async def watch(self, resource: str) -> AsyncIterator[WatchEvent]:
        self.watches += 1
        for obj in list(self.objects.values()):
            yield WatchEvent("ADDED", obj)
        if self.watches == 1:
            del self.objects["a"]
            self.objects["c"] = {"metadata": {"name": "c"}}
            raise RuntimeError("a watch of things in this process fell too far behind")


async def test_an_informer_that_fell_behind_misses_nothing() -> None:
    informer = Informer(cast(StorePort, ForgetfulStore()), "things")
    seen: list[tuple[str, str]] = []
    informer.on_change(lambda change: seen.append((change.type, change.object["metadata"]["name"])))
    await informer.run()
    assert ("DELETED", "a") in seen
    assert sorted(obj["metadata"]["name"] for obj in informer.all()) == ["b", "c"]


async def test_a_failing_handler_takes_no_news_from_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    informer = Informer(cast(StorePort, ForgetfulStore()), "things")
    seen: list[str] = []

    def broken(change: Change) -> None:
        raise KeyError("mistake")

    informer.on_change(broken)
    informer.on_change(lambda change: seen.append(change.object["metadata"]["name"]))
    await informer.run()
    assert {"a", "b", "c"} <= set(seen)
    assert "a handler of things failed" in caplog.text
