"""`make demo PROMETHEUS=1`: a real Prometheus beside the embedded cluster, and what the dashboard can show.

At the end each query of the dashboard is asked over the demo's time; metrics.json says for each panel how
many points it has, and panels.json has the points.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from springtide_demo.scrape_targets import TargetWriter

Say = Callable[[str, str], None]

SCRAPE_SECONDS = 1
RATE_WINDOW = f"{10 * SCRAPE_SECONDS}s"
READY_SECONDS = 15.0
STOP_SECONDS = 10.0
POINTS = 240  # per series at most
_PR_SET_PDEATHSIG = 1


class PrometheusError(RuntimeError):
    """Prometheus does not run, or does not answer; the message says where to look."""


def configuration(targets: Path) -> dict[str, Any]:
    """Scrape what the file of targets names."""
    return {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"},
        "scrape_configs": [
            {
                "job_name": "springtide",
                "honor_labels": True,
                "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "5s"}],
            }
        ],
    }


def panels(board: dict[str, Any]) -> dict[str, list[str]]:
    """{panel's title: its queries}, variables filled in for everything."""
    return {
        panel["title"]: [_filled(target["expr"]) for target in panel["targets"]]
        for panel in board["panels"]
        if panel["type"] != "row"
    }


def points(answer: dict[str, Any]) -> int:
    """Points of a range query's answer, over all its series."""
    return sum(len(series["values"]) for series in answer["data"]["result"])


def _filled(query: str) -> str:
    for variable, value in (("$namespace", ".*"), ("$training_job", ".*"), ("$__rate_interval", RATE_WINDOW)):
        query = query.replace(variable, value)
    return query


class Prometheus:
    """One process with its data below `folder`."""

    def __init__(self, program: str, targets: Path, folder: Path) -> None:
        self._log = folder / "prometheus.log"
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump(configuration(targets), sort_keys=False))
        self.url = f"http://127.0.0.1:{_free_port()}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )

    def wait_until_ready(self, timeout: float = READY_SECONDS) -> None:
        """Raises PrometheusError with the log's end."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2):
                    return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    end = self._log.read_text(errors="replace").strip().splitlines()[-3:]
                    raise PrometheusError(f"Prometheus does not run ({error}): {' / '.join(end)}") from error
            time.sleep(0.1)

    def range(self, query: str, start: float, end: float) -> dict[str, Any]:
        """Return the answer to a range query.

        Args:
            query: in PromQL.
            start: in unix seconds.
            end: in unix seconds.

        Raises:
            PrometheusError: it refuses the query, or does not answer.
        """
        step = max(float(SCRAPE_SECONDS), (end - start) / POINTS)
        text = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": f"{step:.3f}"})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{text}", timeout=20) as answer:
                result: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise PrometheusError(f"Prometheus refuses {query!r}: {said}") from error
        except OSError as error:
            raise PrometheusError(f"Prometheus does not answer ({error}): see {self._log}") from error
        return result

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def beside(kubeconfig: Path, board: Path, out: Path, say: Say) -> Iterator[None]:
    """Watch what happens inside the `with`, then write what the dashboard would show of it.

    metrics.json is {panel: number of points}; panels.json has `from` and `to` in unix seconds, and `panels`:
    {panel: for each of its queries the series of Prometheus' answer, [{metric, values}]}.

    Where Prometheus is not installed a line says so, and nothing else happens.

    Args:
        kubeconfig: of the cluster whose pods are scraped.
        board: file of the Grafana dashboard, whose queries are asked.
        out: folder of both files, and of Prometheus' own data.
        say: prints a line.

    Raises:
        PrometheusError: it does not start, or does not answer.
    """
    program = shutil.which("prometheus")
    if program is None:
        say(
            "    no Prometheus here (Debian: apt-get install prometheus): there will be no metrics.json",
            "yellow",
        )
        yield
        return
    queries = panels(json.loads(board.read_text()))
    started = time.time()
    folder = out / "prometheus"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prometheus = Prometheus(program, folder / "targets.json", folder)
    try:
        with TargetWriter(kubeconfig, folder / "targets.json"):
            prometheus.wait_until_ready()
            say(f"Prometheus watches at {prometheus.url}", "bold")
            yield
        ended = time.time()
        answers = {
            panel: [prometheus.range(query, started, ended) for query in asked]
            for panel, asked in queries.items()
        }
        counted = {panel: sum(map(points, found)) for panel, found in answers.items()}
        shown = {panel: [answer["data"]["result"] for answer in found] for panel, found in answers.items()}
        written = {"from": started, "to": ended, "panels": shown}
        (out / "panels.json").write_text(json.dumps(written) + "\n")
        (out / "metrics.json").write_text(json.dumps(counted, indent=2) + "\n")
        filled = sum(count > 0 for count in counted.values())
        say(
            f"{filled} of {len(counted)} panels of the dashboard have points: {out / 'metrics.json'}", "green"
        )
    finally:
        prometheus.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """Have the kernel kill this child when the demo ends, also by force (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
