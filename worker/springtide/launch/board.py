"""One place for the metrics and the health of all processes of a pod.

Each process serves its metrics on a free port of the loopback address and writes the port's number into a
file; whoever scrapes the launcher gets them all, each sample with its process's `local_rank`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families

log = logging.getLogger("springtide")

_SECONDS = 2.0

Scrape = Callable[[], str]


def merged(texts: Mapping[int, str]) -> str:
    """One exposition of those of several processes: same families, each sample with `local_rank`.

    A text that cannot be parsed is left out.
    """
    families: dict[str, Metric] = {}
    for rank, text in sorted(texts.items()):
        try:
            found = list(text_string_to_metric_families(text))
        except ValueError as error:
            log.warning("metrics of process %d cannot be read: %s", rank, error)
            continue
        for family in found:
            kept = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            for sample in family.samples:
                kept.samples.append(sample._replace(labels={**sample.labels, "local_rank": str(rank)}))
    return generate_latest(_Fixed(list(families.values()))).decode()


class _Fixed:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def read_port(path: Path) -> int | None:
    """The port that a process has written; None before, and for anything else."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def scrape(port: int) -> str:
    """Raise OSError."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_SECONDS) as answer:
        text: str = answer.read().decode()
        return text


class Board:
    """Serves /metrics and /healthz.

    ports: the files of the processes' ports, by local rank. own: the launcher's own series. health: (whether
    the launcher still keeps its processes, what to say of them); asked from the server's threads.
    """

    def __init__(
        self,
        ports: Mapping[int, Path],
        own: CollectorRegistry,
        health: Callable[[], tuple[bool, Mapping[str, object]]],
    ) -> None:
        self._ports, self._own, self._health = dict(ports), own, health
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, address: str, port: int) -> int:
        """Serve; a taken port is replaced by a free one. Return the port; 0 when none could be had."""
        board = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                board.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        for candidate in (port, 0):
            try:
                self._server = ThreadingHTTPServer((address or "0.0.0.0", candidate), Handler)
                break
            except OSError as error:
                log.warning("metrics: port %d cannot be used (%s)", candidate, error.strerror)
        if self._server is None:
            return 0
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="springtide-metrics", daemon=True
        )
        self._thread.start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(2.0)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        code, kind, body = 404, "text/plain", b"/metrics, /healthz\n"
        if path == "/metrics":
            code, kind, body = 200, CONTENT_TYPE_LATEST, self.metrics().encode()
        elif path == "/healthz":
            well, said = self._health()
            code, kind, body = 200 if well else 503, "application/json", json.dumps(said).encode() + b"\n"
        try:
            request.send_response(code)
            request.send_header("Content-Type", kind)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
        except ConnectionError:
            return  # who asked has gone

    def metrics(self) -> str:
        """The launcher's own series and those of all processes that answer within two seconds."""
        ports = {rank: port for rank, path in self._ports.items() if (port := read_port(path)) is not None}
        texts: dict[int, str] = {}
        if ports:
            with ThreadPoolExecutor(len(ports)) as pool:
                asked = {rank: pool.submit(scrape, port) for rank, port in ports.items()}
                for rank, answer in asked.items():
                    try:
                        texts[rank] = answer.result()
                    except (OSError, URLError) as error:
                        log.debug("process %d does not tell its metrics: %s", rank, error)
        return generate_latest(self._own).decode() + merged(texts)
