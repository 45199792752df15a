"""One place for the metrics and the health of all processes of a pod.

Each process serves its metrics on a free port of the loopback address and writes the port's number into a
file; whoever scrapes the launcher gets them all, each sample with its process's `local_rank`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from springtide_protocol.bounded_http import BoundedServer, Reply, Request, ThrottledValue, in_words

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


class MetricsProxy:
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
        self._server: BoundedServer | None = None
        self._of_processes = ThrottledValue(self._scrape_all)

    def start(self, address: str, port: int) -> int:
        """Serve; a taken port is replaced by a free one.

        Args:
            address: to listen on; all when empty.
            port: to listen on; 0 for a free one.

        Returns:
            The port; 0 when none could be had.
        """
        for candidate in (port, 0):
            try:
                self._server = BoundedServer(self.answer, address, candidate)
                break
            except OSError as error:
                log.warning("metrics: port %d cannot be used (%s)", candidate, error.strerror)
        return self._server.port if self._server is not None else 0

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

    def answer(self, request: Request) -> Reply:
        """Answer a request for one of the two pages."""
        if request.path == "/metrics":
            return Reply(200, self.metrics().encode(), CONTENT_TYPE_LATEST)
        if request.path == "/healthz":
            well, said = self._health()
            return Reply(200 if well else 503, json.dumps(said).encode() + b"\n", "application/json")
        return in_words(404, "/metrics, /healthz")

    def metrics(self) -> str:
        """Return the launcher's own series and those of all processes that answer within two seconds."""
        return generate_latest(self._own).decode() + self._of_processes()

    def _scrape_all(self) -> str:
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
        return merged(texts)
