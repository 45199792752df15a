"""Starting, finding, and stopping an embedded cluster from another process."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from springtide_local.images import add_image
from springtide_local.kubelet import blackout
from springtide_local.reaper import IN_USE
from springtide_local.settings import (
    CRASHED,
    KILLED,
    STATE_ANNOTATION,
    STOPPED,
    Files,
    Settings,
    default_data,
    node_names,
)

_POLL = 0.01
START_TIMEOUT = 30.0
STOP_TIMEOUT = 20.0
_NODE_TIMEOUT = 15.0


class ClusterError(Exception):
    """Something about the cluster is not as asked; the message says what and what to do."""


class Cluster:
    """An embedded cluster that uses the folder `data`. As a context manager it is stopped at the end.

    `Cluster.start(...)` starts one; `Cluster(data)` is a handle to one that may run.
    """

    def __init__(self, data: Path | None = None) -> None:
        self.files = Files((data or default_data()).expanduser().absolute())
        self._reaper: int | None = None

    @classmethod
    def start(
        cls, data: Path | None = None, settings: Settings | None = None, timeout: float = START_TIMEOUT
    ) -> Cluster:
        """Start it in the background and wait until it is ready.

        Args:
            data: its folder; None: the usual one.
            settings: nodes, their sizes and times; None: the usual ones.
            timeout: seconds until it has to be ready.

        Returns:
            The handle of the running cluster.

        Raises:
            ClusterError: it already runs, cannot run here, or does not get ready in time.
            ValueError: a setting is out of range.
        """
        settings = settings or Settings()
        settings.check()
        check_platform()
        cluster = cls(data)
        files = cluster.files
        if cluster.running:
            raise ClusterError(
                f"an embedded cluster already runs in {files.data} (process {cluster.pid}): export "
                f"KUBECONFIG={cluster.kubeconfig}"
            )
        _check_kubeconfig(settings)
        files.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(files.data, 0o700)
        files.settings.write_text(settings.dump())
        files.state.unlink(missing_ok=True)
        with open(files.log, "wb") as log:
            reaper = subprocess.Popen(
                [sys.executable, "-P", "-m", "springtide_local.reaper", str(files.data)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
            )
        deadline = time.monotonic() + timeout
        while not files.state.exists():
            status = reaper.poll()
            if status == IN_USE:
                raise ClusterError(
                    f"an embedded cluster was started in {files.data} at the same time: use that one, "
                    "or give --data"
                )
            if status is not None:
                raise ClusterError(
                    f"the embedded cluster ended with status {status} before it was ready. The end of "
                    f"{files.log}:\n{cluster.log_end()}"
                )
            if time.monotonic() > deadline:
                reaper.terminate()
                raise ClusterError(
                    f"the embedded cluster was not ready after {timeout:g} s. The end of "
                    f"{files.log}:\n{cluster.log_end()}"
                )
            time.sleep(_POLL)
        cluster._reaper = reaper.pid
        # It may run on when this process ends; so it is no mistake not to wait for it.
        reaper.returncode = 0
        return cluster

    @property
    def running(self) -> bool:
        """Whether a cluster holds the folder (also while it starts or is being cleaned up)."""
        try:
            descriptor = os.open(self.files.lock, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @property
    def state(self) -> dict[str, Any]:
        """id, pid, reaper, url, kubeconfig, network, nodes, started. Raise ClusterError when it is not
        ready.
        """
        try:
            if not self.running:
                raise FileNotFoundError
            loaded: dict[str, Any] = json.loads(self.files.state.read_text())
        except FileNotFoundError:
            raise ClusterError(
                f"no embedded cluster runs in {self.files.data}: start one with: springtide local start"
            ) from None
        return loaded

    @property
    def pid(self) -> int:
        """The process of the API server, scheduler, controllers and kubelets."""
        return int(self.state["pid"])

    @property
    def kubeconfig(self) -> Path:
        return Path(self.state["kubeconfig"])

    @property
    def url(self) -> str:
        return str(self.state["url"])

    def log_end(self, lines: int = 20) -> str:
        """The end of what the cluster's process said."""
        try:
            return "\n".join(self.files.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(there is no log)"

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Stop it with everything in it; nothing is left running. No error when it does not run. Raise
        ClusterError after `timeout` seconds.
        """
        if not self.running:
            return
        deadline = time.monotonic() + timeout
        while self.running:
            if self.files.state.exists():
                try:
                    os.kill(self.pid, signal.SIGTERM)
                    break
                except (ProcessLookupError, ClusterError):
                    break
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the cluster in {self.files.data} neither got ready nor ended within {timeout:g} s"
                )
            time.sleep(_POLL)
        self._await_end(timeout, f"the cluster in {self.files.data} did not end; kill its process by hand")

    def kill(self, timeout: float = STOP_TIMEOUT) -> None:
        """SIGKILL to its process, as an accident would; returns when what it left has been cleaned up."""
        os.kill(self.pid, signal.SIGKILL)
        self._await_end(timeout, f"what the killed cluster in {self.files.data} left was not cleaned up")

    def _await_end(self, timeout: float, complaint: str) -> None:
        _wait(lambda: not self.running, timeout, complaint)
        if self._reaper is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._reaper, 0)
            self._reaper = None

    def remove(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        shutil.rmtree(self.files.data, ignore_errors=True)

    def add_image(self, name: str, python: Path, root: Path) -> None:
        """Let the kubelet know an image.

        Args:
            name: as manifests spell it; without a tag it stands for every tag.
            python: the interpreter of its environment.
            root: its working directory.

        Raises:
            ValueError: one of them cannot be; the text says why.
        """
        self.files.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        add_image(self.files.images, name, python, root)

    def kill_node(self, name: str) -> None:
        """All processes of the node die, and nothing is heard of it any more."""
        self._set_node(name, KILLED)

    def crash_node(self, name: str) -> None:
        """Let the node's machine lose power: its processes are gone, its kubelet is silent, and so are its
        addresses (no FIN, no RST, new connections hang) until it is restored.

        Raise ClusterError where one process may not take over the sockets of another one.
        """
        if why := blackout.why_impossible():
            raise ClusterError(f"node {name} cannot crash on this machine: {why}")
        self._set_node(name, CRASHED)

    def stop_node(self, name: str) -> None:
        """All processes of the node are stopped (SIGSTOP), and nothing is heard of it any more."""
        self._set_node(name, STOPPED)

    def restore_node(self, name: str, timeout: float = _NODE_TIMEOUT) -> None:
        """Let a node work again, also when its Node object was deleted meanwhile; return when it is Ready.

        Args:
            name: of the node.
            timeout: seconds until it has to be.

        Raises:
            ClusterError: it does not become Ready in time, or there is no such node.
        """
        known = [node["metadata"]["name"] for node in self.request("GET", "/api/v1/nodes")["items"]]
        if name not in known and name in node_names(int(self.state["nodes"])):
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            self.request("POST", "/api/v1/nodes", node)
        else:
            self._set_node(name, None)
        _wait(lambda: self._is_ready(name), timeout, f"node {name} did not become Ready")

    def _set_node(self, name: str, state: str | None) -> None:
        patch = {"metadata": {"annotations": {STATE_ANNOTATION: state}}}
        self.request("PATCH", f"/api/v1/nodes/{name}", patch)

    def _is_ready(self, name: str) -> bool:
        conditions = self.request("GET", f"/api/v1/nodes/{name}")["status"]["conditions"]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call the Kubernetes API as its administrator.

        Args:
            method: of HTTP; PATCH is a merge patch.
            path: of the URL.
            body: plain JSON; None: no body.

        Returns:
            The answer's JSON.

        Raises:
            ClusterError: nobody answers, or the API server refuses, with its message.
        """
        address = urlsplit(self.url)
        context = ssl.create_default_context(cafile=self.files.pki / "ca.crt")
        context.load_cert_chain(self.files.pki / "admin.pem")
        connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, context=context, timeout=10
        )
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": kind}
            )
            response = connection.getresponse()
            text = response.read()
        except OSError as error:
            raise ClusterError(
                f"the API server at {self.url} does not answer ({error}): see {self.files.log}"
            ) from error
        finally:
            connection.close()
        answer = json.loads(text) if text[:1] in (b"{", b"[") else text.decode()
        if response.status >= 300:
            message = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise ClusterError(f"{method} {path}: {message}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def check_platform() -> None:
    """Raise ClusterError where the embedded cluster cannot run."""
    if sys.platform != "linux":
        raise ClusterError(
            f"the embedded cluster runs on Linux only (this is {sys.platform}): its kubelet needs "
            "pidfds, /proc and all of 127/8. "
            "Use a Linux machine, a Linux VM, or a real cluster"
        )
    if not hasattr(os, "pidfd_open"):
        raise ClusterError("the embedded cluster needs Linux 5.3 or newer (pidfd_open)")


def _check_kubeconfig(settings: Settings) -> None:
    path = Path(settings.kubeconfig) if settings.kubeconfig else None
    if path is not None and path.exists() and "springtide-local" not in path.read_text():
        raise ClusterError(
            f"{path} exists and is not of an embedded cluster: give --kubeconfig another path, it "
            "would be overwritten"
        )


def _wait(condition: Callable[[], bool], timeout: float, complaint: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{complaint} (waited {timeout:g} s)")
        time.sleep(_POLL)
