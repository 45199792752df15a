"""`python -m springtide_ps`: one parameter server."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from importlib import metadata

import torch
from prometheus_client import REGISTRY, start_http_server

from springtide_coordinator.client import read_authority
from springtide_ps import registration
from springtide_ps.metrics import ServerCollector
from springtide_ps.server import Server
from springtide_ps.settings import Settings, read
from springtide_ps.store import Store
from springtide_ps.tls import client_context, server_context
from springtide_ps.updates import Update

log = logging.getLogger("springtide.ps")
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """Serve until SIGTERM; in a job until the coordinator lets it go.

    Returns 1 when the coordinator refuses it, 2 when the environment is wrong; `--version` prints it.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"springtide-ps {metadata.version('springtide')}")
        return 0
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    # Before any thread exists: all of them leave these signals to the wait below.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        settings = read(os.environ)
        tls = server_context(settings.certificate, settings.key) if settings.certificate else None
        authority = read_authority(os.environ)
        peers = client_context(authority) if authority else None
        if settings.threads:
            torch.set_num_threads(settings.threads)
        _warm_up()
        server = Server(
            Store(settings.memory_limit), settings.token, settings.bind, settings.port, tls=tls, peers=peers
        )
        in_job = registration.read(os.environ, server.port)
    except (ValueError, OSError) as error:
        log.error("%s", error)
        return 2
    REGISTRY.register(ServerCollector(server))
    metrics, thread = _serve_metrics(settings)
    log.info("serves parameters on port %d, metrics on port %d", server.port, metrics.server_port)
    why, well = _serve_until_told(in_job)
    log.log(logging.INFO if well else logging.ERROR, "stops: %s; %s", why, server.status())
    metrics.shutdown()
    metrics.server_close()
    thread.join(5.0)
    server.close()
    # The interpreter's end would look through all of torch's objects for garbage, for most of a second.
    gc.freeze()
    return 0 if well else 1


def _serve_until_told(in_job: registration.Settings | None) -> tuple[str, bool]:
    """Why it ends, and whether that is as it should be."""
    if in_job is None:
        return signal.Signals(signal.sigwait(_STOPPING)).name, True
    known = registration.Registration(in_job)
    try:
        return known.wait(_STOPPING)
    finally:
        known.close()


def _warm_up() -> None:
    """The first optimizer of a process imports much of torch: no step shall wait for that."""
    for name in ("sgd", "adam"):
        Update(name).bind(torch.zeros(1))(torch.zeros(1))


def _serve_metrics(settings: Settings):  # type: ignore[no-untyped-def]  # (WSGIServer, Thread) of the library
    host = settings.bind or "0.0.0.0"
    try:
        return start_http_server(settings.metrics_port, addr=host)
    except OSError as error:
        log.warning("metrics port %d is not free (%s): another one is taken", settings.metrics_port, error)
        return start_http_server(0, addr=host)


if __name__ == "__main__":
    sys.exit(main())
