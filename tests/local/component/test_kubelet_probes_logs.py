"""Probes, and what `kubectl logs` reads. Runs against any cluster but where said."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from local_cluster import EXTERNAL, FIXTURES, Kube, condition_of, status_of, until
from required import require_tool

from springtide_operator.manifests.startup import startup_probe

cluster, kube, target_kubeconfig = FIXTURES

# A probe's own patience is long: a busy machine may need more than Kubernetes' second to run one.
QUICK = {"periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 30}
# What a test says to a running container: a ConfigMap, mounted at /said.
SAID: dict[str, Any] = {
    "volumeMounts": [{"name": "said", "mountPath": "/said"}],
    "spec": {
        "volumes": [{"name": "said", "configMap": {"name": "said"}}],
        "terminationGracePeriodSeconds": 0,
    },
}


def _say(kube: Kube, word: str) -> None:
    body = {"kind": "ConfigMap", "metadata": {"name": "said"}, "data": {"word": word}}
    if kube.gone("configmaps", "said"):
        kube.create("configmaps", body)
    else:
        kube.patch("configmaps", "said", {"data": {"word": word}})


def _ready(pod: dict) -> bool:  # type: ignore[type-arg]
    return bool(condition_of(pod, "Ready").get("status") == "True")


def test_readiness_follows_an_exec_probe(kube: Kube) -> None:
    _say(kube, "no")
    probe = {"exec": {"command": ["grep", "-q", "yes", "/said/word"]}, **QUICK}
    kube.pod("follows", ["sleep", "600"], readinessProbe=probe, **SAID)
    pod = kube.wait_phase("follows", "Running")
    assert not _ready(pod)
    assert status_of(pod)["started"] is True
    kube.until_event("follows", "Unhealthy", "Readiness probe failed")
    _say(kube, "yes")
    kube.wait_pod("follows", _ready, "Ready", 180)
    _say(kube, "no")
    pod = kube.wait_pod("follows", lambda p: not _ready(p), "not Ready", 180)
    assert condition_of(pod, "Ready")["reason"] == "ContainersNotReady"
    assert status_of(pod)["restartCount"] == 0


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
    kube.wait_pod("server", _ready, "Ready")


def test_a_failing_liveness_probe_restarts_the_container(kube: Kube) -> None:
    probe = {"exec": {"command": ["sh", "-c", "echo broken; exit 1"]}, **QUICK}
    spec = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 0}
    kube.pod("sick", ["sleep", "600"], livenessProbe=probe, spec=spec)
    pod = kube.wait_pod("sick", lambda p: status_of(p).get("restartCount", 0) >= 1, "a restart")
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] in (137, 143)
    kube.until_event("sick", "Killing", "Container main failed liveness probe, will be restarted")
    kube.until_event("sick", "Unhealthy", "broken")


def test_other_probes_wait_for_the_startup_probe(kube: Kube) -> None:
    _say(kube, "no")
    command = {"exec": {"command": ["grep", "-q", "yes", "/said/word"]}}
    said = {**SAID, "spec": {**SAID["spec"], "restartPolicy": "Always"}}
    kube.pod(
        "slow",
        ["sleep", "600"],
        startupProbe={**command, **QUICK, "failureThreshold": 600},
        livenessProbe={**command, **QUICK},
        **said,
    )
    pod = kube.wait_phase("slow", "Running")
    assert status_of(pod)["started"] is False
    kube.until_event("slow", "Unhealthy", "Startup probe failed")
    _say(kube, "yes")
    pod = kube.wait_pod("slow", _ready, "Ready", 180)
    assert (status_of(pod)["started"], status_of(pod)["restartCount"]) == (True, 0)


def test_startup_probe_that_never_succeeds_restarts_container(kube: Kube) -> None:
    kube.pod(
        "never",
        ["sleep", "600"],
        startupProbe={"tcpSocket": {"port": 1}, **QUICK},
        spec={"restartPolicy": "Always", "terminationGracePeriodSeconds": 0},
    )
    kube.wait_pod("never", lambda p: status_of(p).get("restartCount", 0) >= 1, "a restart")
    kube.until_event("never", "Killing", "Container main failed startup probe, will be restarted")


def test_a_late_port_is_no_warning_to_a_probe_that_waits(kube: Kube) -> None:
    serve = (
        "import http.server, os, time; time.sleep(2);"
        " http.server.HTTPServer((os.environ.get('SPRINGTIDE_BIND', ''), 8090),"
        " http.server.SimpleHTTPRequestHandler).serve_forever()"
    )
    kube.pod("late", ["python", "-c", serve], startupProbe=startup_probe(8090, "/", 65))
    assert status_of(kube.wait_phase("late", "Running"))["started"] is False
    kube.wait_pod("late", _ready, "Ready")
    events = kube.list("events", fieldSelector="involvedObject.name=late")
    assert [event["message"] for event in events if event["type"] == "Warning"] == []


def test_readiness_is_asked_until_the_pod_has_ended(kube: Kube) -> None:
    _say(kube, "yes")
    probe = {"exec": {"command": ["grep", "-q", "yes", "/said/word"]}, **QUICK}
    lasts = (
        "import signal, threading; signal.signal(signal.SIGTERM, lambda *_: None)\nthreading.Event().wait()"
    )
    spec = {**SAID["spec"], "terminationGracePeriodSeconds": 120}
    kube.pod("ends", ["python", "-c", lasts], readinessProbe=probe, **{**SAID, "spec": spec})
    kube.wait_pod("ends", _ready, "Ready")
    kube.delete("pods", "ends")
    kube.until_event("ends", "Killing")
    _say(kube, "no")
    kube.until_event("ends", "Unhealthy", "Readiness probe failed")
    kube.delete("pods", "ends", gracePeriodSeconds=0)


def test_a_grpc_probe_asks_the_health_service(kube: Kube) -> None:
    script = """
import os, time, grpc
from concurrent import futures
answers = [b"\\x08\\x02", b"\\x08\\x02"]  # twice not serving, then serving
def check(request, context):
    return answers.pop() if answers else b"\\x08\\x01"
handler = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {
    "Check": grpc.unary_unary_rpc_method_handler(check)})
server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
server.add_insecure_port(os.environ.get("SPRINGTIDE_BIND", "0.0.0.0") + ":8089")
server.start()
time.sleep(600)
"""
    kube.pod("healthy", ["python", "-c", script], readinessProbe={"grpc": {"port": 8089}, **QUICK})
    kube.wait_pod("healthy", _ready, "Ready")
    kube.until_event("healthy", "Unhealthy", "NOT_SERVING")


def test_logs_can_be_cut_and_stamped(kube: Kube) -> None:
    kube.pod("talk", ["sh", "-c", "for i in 1 2 3; do echo line $i; done; printf end"])
    kube.wait_phase("talk", "Succeeded")
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
    kube.wait_phase("ages", "Succeeded")
    stamp = kube.logs("ages", timestamps="true").splitlines()[-1].split(" ", 1)[0]
    # To the second, as the API has it: "old" is more than one second older.
    assert kube.logs("ages", sinceTime=f"{stamp[:19]}Z") == "new\n"
    assert kube.logs("ages", sinceSeconds=3600) == "old\nnew\n"


def test_logs_of_a_container_that_never_started_say_so(kube: Kube) -> None:
    kube.pod("lost", ["true"], image="registry.invalid/nobody/nothing:1")
    kube.wait_pod("lost", lambda p: p["status"].get("containerStatuses"), "a status")
    with pytest.raises(match='container "main" in pod "lost" is waiting to start'):
        kube.logs("lost")
    kube.pod("once", ["true"])
    kube.wait_phase("once", "Succeeded")
    with pytest.raises(match="previous terminated container"):
        kube.logs("once", previous="true")


def test_kubectl_follows_a_log_until_the_container_ends(kube: Kube) -> None:
    script = "trap 'echo end; exit 0' TERM; i=0; while true; do i=$((i+1)); echo tick $i; sleep 0.1; done"
    kube.pod("stream", ["sh", "-c", script], spec={"terminationGracePeriodSeconds": 60})
    kube.wait_pod("stream", lambda p: p["status"].get("phase") == "Running", "Running")
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
            [*kubectl, "delete", "pod", "stream"], check=True, timeout=120, stdout=subprocess.DEVNULL
        )
        lines += [line.strip() for line in process.stdout]
        assert process.wait(timeout=90) == 0
    assert lines == [*(f"tick {i + 1}" for i in range(len(lines) - 1)), "end"]


@pytest.mark.skipif(bool(EXTERNAL), reason="how much a pod may write is the cluster's business")
def test_much_output_is_kept_in_order(kube: Kube) -> None:
    kube.pod("flood", ["python", "-c", "for i in range(60000): print(i)"])
    kube.wait_phase("flood", "Succeeded")
    until(lambda: kube.logs("flood", tailLines=1).strip() == "59999", "the last line")
    assert kube.logs("flood") == "".join(f"{i}\n" for i in range(60000))
