"""The startup probe that waits, and that our pods have it, and none that fails while they end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from operator_world import job_object

from springtide_operator.api.job import Job
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.startup import MARGIN_SECONDS, startup_probe

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 60


class Answering(BaseHTTPRequestHandler):
    """Answers with the next of `codes`, and with the last one for ever."""

    codes: list[int]

    def do_GET(self) -> None:
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        self.send_response(code if self.path == "/healthz" else 404)
        self.end_headers()
        self.wfile.write(b"what it says\n" * 10_000)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(server: HTTPServer) -> Iterator[None]:
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def bound(*codes: int) -> Iterator[HTTPServer]:
    """A server that has its port, and refuses connections until it serves."""
    handler = type("Handler", (Answering,), {"codes": list(codes)})
    server = HTTPServer(("127.0.0.1", 0), handler, bind_and_activate=False)
    server.server_bind()
    try:
        yield server
    finally:
        server.server_close()


def begin(server: HTTPServer, seconds: int = SECONDS) -> subprocess.Popen[str]:
    command = startup_probe(server.server_port, "/healthz", seconds)["exec"]["command"]
    assert command[0] == "python"
    return subprocess.Popen([sys.executable, *command[1:]], stderr=subprocess.PIPE, text=True)


def test_startup_probe_waits_for_a_late_port() -> None:
    with bound(503, 200) as server, begin(server) as probe:
        with pytest.raises(subprocess.TimeoutExpired):
            probe.wait(0.3)  # nobody listens, and it does not fail for that
        with serving(server):
            assert probe.wait(SECONDS) == 0


def test_startup_probe_in_vain_says_what_it_asked() -> None:
    with bound(503) as server, serving(server), begin(server, MARGIN_SECONDS + 1) as probe:
        _, said = probe.communicate(timeout=SECONDS)
    assert probe.returncode == 1
    assert f"port {server.server_port} has not answered /healthz within 1 s: HTTP/1.0 503" in said


def pods() -> dict[str, dict[str, Any]]:
    obj = job_object()
    obj["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 1}}
    job = Job.parse(obj)
    return {"coordinator": coordinator_pod(job, 1), "server": server_pod(job, 0, 0, "10.0.0.1:7070")}


@pytest.mark.parametrize(("role", "port"), [("coordinator", 9401), ("server", 9402)])
def test_probes_of_our_pods_fail_only_where_it_is_news(role: str, port: int) -> None:
    pod = pods()[role]
    kubernetes_validate.validate(pod, "1.31", strict=True)
    container = pod["spec"]["containers"][0]
    startup = container["startupProbe"]
    assert startup["exec"]["command"][:3] == ["python", "-S", "-c"]
    assert startup["exec"]["command"][4] == str(port)
    assert startup["timeoutSeconds"] == int(startup["exec"]["command"][6]) + MARGIN_SECONDS
    assert "readinessProbe" not in container  # kubelets ask it until the pod has ended
    assert "livenessProbe" in container


def test_the_operators_startup_probe_waits_as_well() -> None:
    documents = yaml.safe_load_all((ROOT / "deploy/operator.yaml").read_text())
    deployment = next(one for one in documents if one and one["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert "readinessProbe" not in container
    command = container["startupProbe"]["exec"]["command"]
    with bound(200) as server, serving(server):
        asked = [sys.executable, *command[1:3], str(server.server_port), "/healthz", command[5]]
        assert subprocess.run(asked, check=False, timeout=SECONDS).returncode == 0
