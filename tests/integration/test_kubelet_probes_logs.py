"""Probes, and what `kubectl logs` reads. Runs against any cluster but where said."""

from __future__ import annotations

import subprocess

import pytest
from local_cluster import EXTERNAL, FIXTURES, ApiFailure, Kube, condition_of, status_of, until
from required import require_tool

cluster, kube, target_kubeconfig = FIXTURES

QUICK = {"periodSeconds": 1, "failureThreshold": 1}


def _ready(pod: dict) -> bool:  # type: ignore[type-arg]
    return bool(condition_of(pod, "Ready").get("status") == "True")


def test_readiness_follows_an_exec_probe(kube: Kube) -> None:
    probe = {"exec": {"command": ["test", "-f", "/v/ready"]}, **QUICK}
    script = "until test -f /v/go; do sleep 0.05; done; touch /v/ready; sleep 1.5; rm /v/ready; sleep 60"
    kube.pod(
        "follows",
        ["sh", "-c", "(sleep 0.5; touch /v/go) & " + script],
        readinessProbe=probe,
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
        spec={"volumes": [{"name": "v", "emptyDir": {}}], "terminationGracePeriodSeconds": 0},
    )
    pod = kube.wait_pod("follows", lambda p: p["status"].get("phase") == "Running", "Running", 30)
    assert not _ready(pod)
    assert status_of(pod)["started"] is True
    kube.wait_pod("follows", _ready, "Ready", 30)
    pod = kube.wait_pod("follows", lambda p: not _ready(p), "not Ready", 30)
    assert condition_of(pod, "Ready")["reason"] == "ContainersNotReady"
    assert status_of(pod)["restartCount"] == 0
    assert any(
        message.startswith("Readiness probe failed") for message in kube.events("follows", "Unhealthy")
    )


@pytest.mark.parametrize("action", ["httpGet", "tcpSocket"])
def test_readiness_follows_a_server(kube: Kube, action: str) -> None:
    probe = {action: {"port": "web", **({"path": "/"} if action == "httpGet" else {})}, **QUICK}
    script = "import http.server, os; http.server.HTTPServer((os.environ.get('SPRINGTIDE_BIND', ''), 8088), "
    script += "http.server.SimpleHTTPRequestHandler).serve_forever()"
    kube.pod(
        "server",
        ["python", "-c", script],
        readinessProbe=probe,
        ports=[{"name": "web", "containerPort": 8088}],
    )
    kube.wait_pod("server", _ready, "Ready", 30)


def test_a_failing_liveness_probe_restarts_the_container(kube: Kube) -> None:
    probe = {"exec": {"command": ["sh", "-c", "echo broken; exit 1"]}, **QUICK}
    spec = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 0}
    kube.pod("sick", ["sleep", "60"], livenessProbe=probe, spec=spec)
    pod = kube.wait_pod("sick", lambda p: status_of(p).get("restartCount", 0) >= 1, "a restart", 30)
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] in (137, 143)
    assert "Container main failed liveness probe, will be restarted" in kube.events("sick", "Killing")
    assert any("broken" in message for message in kube.events("sick", "Unhealthy"))


def test_other_probes_wait_for_the_startup_probe(kube: Kube) -> None:
    startup = {"exec": {"command": ["test", "-f", "/v/up"]}, "periodSeconds": 1, "failureThreshold": 60}
    liveness = {"exec": {"command": ["test", "-f", "/v/up"]}, **QUICK}
    kube.pod(
        "slow",
        ["sh", "-c", "sleep 1.2; touch /v/up; sleep 60"],
        startupProbe=startup,
        livenessProbe=liveness,
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
        spec={
            "volumes": [{"name": "v", "emptyDir": {}}],
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 0,
        },
    )
    pod = kube.wait_pod("slow", lambda p: p["status"].get("phase") == "Running", "Running", 30)
    assert status_of(pod)["started"] is False
    pod = kube.wait_pod("slow", _ready, "Ready", 30)
    assert (status_of(pod)["started"], status_of(pod)["restartCount"]) == (True, 0)


def test_a_startup_probe_that_never_succeeds_restarts_the_container(kube: Kube) -> None:
    kube.pod(
        "never",
        ["sleep", "60"],
        startupProbe={"tcpSocket": {"port": 1}, **QUICK},
        spec={"restartPolicy": "Always", "terminationGracePeriodSeconds": 0},
    )
    kube.wait_pod("never", lambda p: status_of(p).get("restartCount", 0) >= 1, "a restart", 30)
    assert "Container main failed startup probe, will be restarted" in kube.events("never", "Killing")


def test_a_grpc_probe_asks_the_health_service(kube: Kube) -> None:
    script = """
import os, time, grpc
from concurrent import futures
state = {"answer": b"\\x08\\x02"}
handler = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {
    "Check": grpc.unary_unary_rpc_method_handler(lambda request, context: state["answer"])})
server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
server.add_insecure_port(os.environ.get("SPRINGTIDE_BIND", "0.0.0.0") + ":8089")
server.start()
time.sleep(1.5)
state["answer"] = b"\\x08\\x01"
time.sleep(60)
"""
    kube.pod("healthy", ["python", "-c", script], readinessProbe={"grpc": {"port": 8089}, **QUICK})
    kube.wait_pod("healthy", _ready, "Ready", 30)
    assert any("NOT_SERVING" in message for message in kube.events("healthy", "Unhealthy"))


def test_logs_can_be_cut_and_stamped(kube: Kube) -> None:
    kube.pod("talk", ["sh", "-c", "for i in 1 2 3; do echo line $i; done; printf end"])
    kube.wait_phase("talk", "Succeeded", 30)
    assert kube.logs("talk") == "line 1\nline 2\nline 3\nend"
    assert kube.logs("talk", tailLines=2) == "line 3\nend"
    assert kube.logs("talk", tailLines=0) == ""
    assert kube.logs("talk", limitBytes=6) == "line 1"
    assert kube.logs("talk", sinceSeconds=3600) == "line 1\nline 2\nline 3\nend"
    stamp, text = kube.logs("talk", timestamps="true").splitlines()[0].split(" ", 1)
    assert text == "line 1"
    assert stamp.endswith("Z")


def test_logs_of_since_leave_out_what_is_older(kube: Kube) -> None:
    kube.pod("ages", ["sh", "-c", "echo old; sleep 2.2; echo new"])
    kube.wait_phase("ages", "Succeeded", 30)
    assert kube.logs("ages", sinceSeconds=1) == "new\n"


def test_logs_of_a_container_that_never_started_say_so(kube: Kube) -> None:
    kube.pod("lost", ["true"], image="registry.invalid/nobody/nothing:1")
    kube.wait_pod("lost", lambda p: p["status"].get("containerStatuses"), "a status", 60)
    with pytest.raises(ApiFailure, match='container "main" in pod "lost" is waiting to start'):
        kube.logs("lost")
    kube.pod("once", ["true"])
    kube.wait_phase("once", "Succeeded", 30)
    with pytest.raises(ApiFailure, match="previous terminated container"):
        kube.logs("once", previous="true")


def test_kubectl_follows_a_log_until_the_container_ends(kube: Kube) -> None:
    script = "trap 'echo end; exit 0' TERM; i=0; while true; do i=$((i+1)); echo tick $i; sleep 0.1; done"
    kube.pod("stream", ["sh", "-c", script])
    kube.wait_pod("stream", lambda p: p["status"].get("phase") == "Running", "Running", 30)
    kubectl = [
        require_tool("kubectl"),
        "--kubeconfig",
        str(kube.kubeconfig),
        "-n",
        kube.namespace,
    ]
    with subprocess.Popen([*kubectl, "logs", "-f", "stream"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # Lines come while the container goes on writing: it ends only when it is told to, below.
        lines = [process.stdout.readline().strip() for _ in range(3)]
        subprocess.run(
            [*kubectl, "delete", "pod", "stream"], check=True, timeout=60, stdout=subprocess.DEVNULL
        )
        lines += [line.strip() for line in process.stdout]
        assert process.wait(timeout=30) == 0
    assert lines == [*(f"tick {i + 1}" for i in range(len(lines) - 1)), "end"]


@pytest.mark.skipif(bool(EXTERNAL), reason="how much a pod may write is the cluster's business")
def test_much_output_is_kept_in_order(kube: Kube) -> None:
    kube.pod("flood", ["python", "-c", "for i in range(60000): print(i)"])
    kube.wait_phase("flood", "Succeeded", 30)
    until(lambda: kube.logs("flood", tailLines=1).strip() == "59999", "the last line")
    assert kube.logs("flood") == "".join(f"{i}\n" for i in range(60000))
