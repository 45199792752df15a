"""Tell Prometheus whom to scrape, in a file that it watches (Debian's has no discovery by Kubernetes).

Threads: one thread of its own writes the file; `close` sets `_over` and joins it.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from springtide_demo.kube import Kube
from springtide_kube.errors import ApiError

Object = dict[str, Any]

SELECTOR = "app.kubernetes.io/name=springtide"
EVERY_SECONDS = 0.5
STOP_SECONDS = 15.0


def targets(pods: list[Object]) -> list[Object]:
    """Every container port named `metrics` of running pods, as file_sd takes them."""
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {"pod": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]},
        }
        for pod in pods
        if pod["status"].get("phase") == "Running" and pod["status"].get("podIP")
        for container in pod["spec"]["containers"]
        for port in container.get("ports") or []
        if port.get("name") == "metrics"
    ]


class TargetWriter:
    """Keeps the file up to date while the `with` lasts; an API server that is away changes nothing."""

    def __init__(self, kubeconfig: Path, file: Path) -> None:
        self._kubeconfig = kubeconfig
        self._file = file
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrape targets", daemon=True)
        self._write([])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        written: list[Object] = []
        with Kube(self._kubeconfig) as kube:
            while not self._over.wait(EVERY_SECONDS):
                try:
                    pods = kube.request("GET", "/api/v1/pods", labelSelector=SELECTOR)["items"]
                except ApiError:
                    continue
                found = targets(pods)
                if found != written:
                    self._write(found)
                    written = found

    def _write(self, found: list[Object]) -> None:
        aside = self._file.with_suffix(".new")
        aside.write_text(json.dumps(found))
        os.replace(aside, self._file)
