"""Nodes of the embedded cluster: placement, drain with the real kubectl, and nodes that die, hang and come
back.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from local_cluster import (
    EXTERNAL,
    FIXTURES,
    IMAGE,
    QUICK,
    Kube,
    alive,
    condition_of,
    pid_of,
    status_of,
    until,
)

from springtide_local.cluster import Cluster, ClusterError

cluster, kube, target_kubeconfig = FIXTURES

NODE_TIMES = QUICK
pytestmark = pytest.mark.skipif(bool(EXTERNAL), reason="makes nodes of the embedded cluster fail")
Object = dict[str, Any]


@pytest.fixture(autouse=True)
def nodes_are_whole_again(cluster: Cluster) -> Iterator[None]:
    yield
    for index in range(3):
        cluster.request("PATCH", f"/api/v1/nodes/springtide-{index}", {"spec": {"unschedulable": None}})
        cluster.restore_node(f"springtide-{index}")


def _node(cluster: Cluster, name: str) -> Object:
    found: Object = cluster.request("GET", f"/api/v1/nodes/{name}")
    return found


def _sleeper(kube: Kube, name: str, spec: Object | None = None, **container: Any) -> Object:
    kube.pod(name, ["sleep", "300"], spec={"terminationGracePeriodSeconds": 0, **(spec or {})}, **container)
    return kube.wait_phase(name, "Running")


def test_pods_spread_and_one_that_is_too_large_stays_pending(kube: Kube) -> None:
    resources = {"requests": {"cpu": "3"}}
    nodes = {_sleeper(kube, f"p{i}", resources=resources)["spec"]["nodeName"] for i in range(3)}
    assert nodes == {"springtide-0", "springtide-1", "springtide-2"}
    kube.pod("large", ["true"], resources=resources)
    pod = kube.wait_pod("large", lambda p: condition_of(p, "PodScheduled"), "the reason")
    said = condition_of(pod, "PodScheduled")
    assert (said["status"], said["reason"]) == ("False", "Unschedulable")
    assert said["message"].startswith("0/3 nodes are available: 3 Insufficient cpu. preemption:")
    assert kube.until_event("large", "FailedScheduling") == said["message"]
    kube.delete("pods", "p1")
    kube.wait_phase("large", "Succeeded")


def test_devices_and_selectors_are_obeyed(kube: Kube, cluster: Cluster) -> None:
    limits = {"limits": {"nvidia.com/gpu": "2"}}
    cluster.request("PATCH", "/api/v1/nodes/springtide-1", {"metadata": {"labels": {"disk": "fast"}}})
    pod = _sleeper(kube, "gpus", resources=limits, spec={"nodeSelector": {"disk": "fast"}})
    assert pod["spec"]["nodeName"] == "springtide-1"
    kube.pod("more", ["true"], resources=limits, spec={"nodeSelector": {"disk": "fast"}})
    pod = kube.wait_pod("more", lambda p: condition_of(p, "PodScheduled"), "the reason")
    message = condition_of(pod, "PodScheduled")["message"]
    assert "2 node(s) didn't match Pod's node affinity/selector" in message
    assert "1 Insufficient nvidia.com/gpu" in message


def test_a_claim_that_does_not_exist_is_named(kube: Kube) -> None:
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "nowhere"}}
    kube.pod("claims", ["true"], spec={"volumes": [volume]})
    pod = kube.wait_pod("claims", lambda p: condition_of(p, "PodScheduled"), "the reason")
    assert 'persistentvolumeclaim "nowhere" not found' in condition_of(pod, "PodScheduled")["message"]


def test_kubectl_cordon_keeps_pods_away_and_uncordon_admits(kube: Kube) -> None:
    for index in range(3):
        assert kube.kubectl("cordon", f"springtide-{index}").returncode == 0
    kube.pod("kept-out", ["true"])
    pod = kube.wait_pod("kept-out", lambda p: condition_of(p, "PodScheduled"), "the reason")
    assert condition_of(pod, "PodScheduled")["message"].startswith(
        "0/3 nodes are available: 3 node(s) were unschedulable."
    )
    assert kube.kubectl("uncordon", "springtide-2").returncode == 0
    assert kube.wait_phase("kept-out", "Succeeded")["spec"]["nodeName"] == "springtide-2"


def _deployment(kube: Kube, replicas: int, name: str = "app") -> None:
    container = {"name": "main", "image": IMAGE, "command": ["sleep", "300"]}
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    kube.create(
        "deployments", {"kind": "Deployment", "metadata": {"name": name}, "spec": spec}, "apis/apps/v1"
    )
    done = kube.kubectl("rollout", "status", f"deployment/{name}", "--timeout=90s")
    assert done.returncode == 0, done.stderr


def test_kubectl_drain_waits_for_the_disruption_budget(kube: Kube) -> None:
    _deployment(kube, 2)
    budget = {"minAvailable": 2, "selector": {"matchLabels": {"app": "app"}}}
    body = {"kind": "PodDisruptionBudget", "metadata": {"name": "keep"}, "spec": budget}
    kube.create("poddisruptionbudgets", body, "apis/policy/v1")
    until(
        lambda: (
            kube.get("poddisruptionbudgets", "keep", "apis/policy/v1").get("status", {}).get("currentHealthy")
            == 2
        ),
        "the budget's status",
    )
    pod = kube.list("pods")[0]
    node = pod["spec"]["nodeName"]
    kube.kubectl_says(
        "Cannot evict pod as it would violate the pod's disruption budget",
        *("drain", node, "--force", "--timeout=90s", "--ignore-daemonsets", "--delete-emptydir-data"),
    )
    kube.patch("deployments", "app", {"spec": {"replicas": 4}}, "apis/apps/v1")
    drained = kube.kubectl(
        "drain", node, "--force", "--timeout=90s", "--ignore-daemonsets", "--delete-emptydir-data"
    )
    assert drained.returncode == 0, drained.stderr
    until(
        lambda: len([p for p in kube.list("pods") if p["status"].get("phase") == "Running"]) == 4,
        "all pods elsewhere",
    )
    assert all(p["spec"]["nodeName"] != node for p in kube.list("pods"))


def test_a_killed_node_is_not_ready_and_its_pods_are_deleted(kube: Kube, cluster: Cluster) -> None:
    pod = _sleeper(kube, "victim", spec={"terminationGracePeriodSeconds": 1})
    node, pid = pod["spec"]["nodeName"], pid_of(pod)
    cluster.kill_node(node)
    until(lambda: not alive(pid), "the process to be dead")
    lost = until(
        lambda: (
            condition_of(_node(cluster, node), "Ready").get("status") == "Unknown" and _node(cluster, node)
        ),
        "NotReady",
    )
    assert condition_of(lost, "Ready")["reason"] == "NodeStatusUnknown"
    taints = until(lambda: _node(cluster, node)["spec"].get("taints"), "the taints")
    assert {(t["key"], t["effect"]) for t in taints} == {
        ("node.kubernetes.io/unreachable", "NoSchedule"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
    }
    pod = kube.wait_pod("victim", lambda p: p["metadata"].get("deletionTimestamp"), "deletion")
    assert condition_of(pod, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    # Nobody on the dead node can say how it ended, so it stays.
    assert pod["status"]["phase"] == "Running"
    until(lambda: "NodeNotReady" in kube.kubectl("describe", "node", node).stdout, "the event")
    assert "Starting kubelet." in kube.kubectl("describe", "node", node).stdout
    cluster.restore_node(node)
    until(lambda: kube.gone("pods", "victim"), "the pod to be gone")
    until(lambda: not _node(cluster, node)["spec"].get("taints"), "the taints to be gone")


def test_stopped_node_freezes_its_processes_until_restored(kube: Kube, cluster: Cluster) -> None:
    spec = {"tolerations": [{"operator": "Exists"}]}
    pod = _sleeper(kube, "frozen", spec=spec)
    node, pid = pod["spec"]["nodeName"], pid_of(pod)
    cluster.stop_node(node)
    until(lambda: _process_state(pid) == "T", "the process to be stopped")
    until(lambda: condition_of(_node(cluster, node), "Ready")["status"] == "Unknown", "NotReady")
    kube.wait_pod(
        "frozen", lambda p: condition_of(p, "Ready")["status"] == "False", "the pod not to be ready"
    )
    cluster.restore_node(node)
    assert _process_state(pid) == "S"
    pod = kube.wait_pod(
        "frozen", lambda p: condition_of(p, "Ready")["status"] == "True", "the pod to be ready"
    )
    assert (pid_of(pod), status_of(pod)["restartCount"]) == (pid, 0)


SERVER = """
import socket
listener = socket.create_server((__import__("os").environ["SPRINGTIDE_BIND"], 7000))
while True:
    connection, _ = listener.accept()
    connection.send(b"hello")
"""


def test_crashed_node_is_silent_until_it_is_restored(kube: Kube, cluster: Cluster) -> None:
    pod = kube.pod("served", ["python", "-c", SERVER], spec={"tolerations": [{"operator": "Exists"}]})
    pod = kube.wait_phase("served", "Running")
    node, pid, where = pod["spec"]["nodeName"], pid_of(pod), (pod["status"]["podIP"], 7000)

    def connect() -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(where, timeout=30)
        return None

    with until(connect, "the server to listen") as peer:
        assert peer.recv(5) == b"hello"
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 700)
        cluster.crash_node(node)
        until(lambda: not alive(pid), "the process to be dead")
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):  # a kernel that lives would have said FIN
            peer.recv(5)
        with pytest.raises(TimeoutError):  # and this one would have been refused
            socket.create_connection(where, timeout=0.3)
        peer.send(b"?")
        peer.settimeout(30)
        with pytest.raises(TimeoutError, match="timed out"):  # nothing acknowledges it
            peer.recv(5)
        until(lambda: condition_of(_node(cluster, node), "Ready")["status"] == "Unknown", "NotReady")
        assert kube.get("pods", "served")["status"]["phase"] == "Running"
        cluster.restore_node(node)
        kube.wait_phase("served", "Failed")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where, timeout=30)


def _process_state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_pod_that_is_always_restarted_comes_back_with_its_node(kube: Kube, cluster: Cluster) -> None:
    spec = {"restartPolicy": "Always", "tolerations": [{"operator": "Exists"}]}
    pod = _sleeper(kube, "returns", spec=spec)
    node, pid = pod["spec"]["nodeName"], pid_of(pod)
    cluster.kill_node(node)
    until(lambda: not alive(pid), "the process to be dead")
    cluster.restore_node(node)
    pod = kube.wait_pod(
        "returns",
        lambda p: status_of(p)["restartCount"] == 1 and status_of(p)["state"].get("running"),
        "a restart",
    )
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] == 137


def test_pod_forced_off_a_stopped_node_is_killed_at_its_return(kube: Kube, cluster: Cluster) -> None:
    pod = _sleeper(kube, "ghost", spec={"tolerations": [{"operator": "Exists"}]})
    node, pid = pod["spec"]["nodeName"], pid_of(pod)
    cluster.stop_node(node)
    until(lambda: condition_of(_node(cluster, node), "Ready")["status"] == "Unknown", "NotReady")
    kube.delete("pods", "ghost", gracePeriodSeconds=0)
    until(lambda: kube.gone("pods", "ghost"), "the pod to be gone")
    assert alive(pid)
    cluster.restore_node(node)
    until(lambda: not alive(pid), "the process to be dead")


def test_a_deleted_node_comes_back_and_its_pods_do_not(kube: Kube, cluster: Cluster) -> None:
    pod = _sleeper(kube, "lost", spec={"tolerations": [{"operator": "Exists"}]})
    node = pod["spec"]["nodeName"]
    cluster.kill_node(node)
    cluster.request("DELETE", f"/api/v1/nodes/{node}")
    until(lambda: kube.gone("pods", "lost"), "the pod to be collected")
    cluster.restore_node(node)
    assert _node(cluster, node)["metadata"]["labels"]["kubernetes.io/hostname"] == node


def test_node_that_registers_again_keeps_its_pods(kube: Kube, cluster: Cluster) -> None:
    pod = _sleeper(kube, "stays")
    node, pid = pod["spec"]["nodeName"], pid_of(pod)
    old = _node(cluster, node)["metadata"]["uid"]
    cluster.request("DELETE", f"/api/v1/nodes/{node}")

    def registered() -> bool:
        with contextlib.suppress(ClusterError):
            return bool(_node(cluster, node)["metadata"]["uid"] != old)
        return False

    until(registered, "the kubelet to register its node again")
    other = _sleeper(kube, "later")  # some time passes
    assert alive(pid)
    assert kube.get("pods", "stays")["metadata"]["uid"] == pod["metadata"]["uid"]
    assert alive(pid_of(other))


def test_an_unknown_node_is_named(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match='nodes "nowhere" not found'):
        cluster.kill_node("nowhere")
