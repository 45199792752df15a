"""`python -m springtide_ps`: one parameter server."""

from __future__ import annotations

from springtide_ps.server.stop_signals import STOPPING  # before torch

# isort: split
import gc
import logging
import os
import signal
import sys
from importlib import metadata

import torch
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from springtide_protocol.bounded_http import BoundedServer, Reply, Request, ThrottledValue, in_words, serve
from springtide_protocol.former_keys import former_authorities
from springtide_protocol.lobby import raise_descriptor_limit
from springtide_protocol.span_export import job_resource, open_tracer, process_began
from springtide_protocol.span_metrics import SpanCollector
from springtide_protocol.tls import read_authority
from springtide_protocol.tracing import OFF
from springtide_ps.params.optim import Update
from springtide_ps.server import registration
from springtide_ps.server.generation_spans import GenerationSpans
from springtide_ps.server.kv_store import Store
from springtide_ps.server.metrics import ServerCollector
from springtide_ps.server.server import CLIENTS_LIMIT, Server
from springtide_ps.server.settings import Settings, read
from springtide_ps.wire.tls import client_context, server_context

log = logging.getLogger("springtide.ps")


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
    # Again, for a process that was forked from one in which the signals were not blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        settings = read(os.environ)
        tls = None
        if settings.certificate:
            tls = server_context(settings.certificate, settings.key, settings.former_certificates)
        authority = read_authority(os.environ)
        peers = client_context("\n".join([authority, *former_authorities(os.environ)])) if authority else None
        # Each of a server's threads works on a chunk of its own; with threads of torch's besides, every
        # client's thread would get some, too.
        torch.set_num_threads(1)
        _warm_up()
        if (descriptors := raise_descriptor_limit()) < CLIENTS_LIMIT:
            log.warning(
                "this process may open %d files (its hard limit, RLIMIT_NOFILE), so fewer than %d clients "
                "can connect: raise the container runtime's limit for more",
                descriptors,
                CLIENTS_LIMIT,
            )
        spans = open_tracer("springtide-ps", job_resource(os.environ))
        uid = os.environ.get("SPRINGTIDE_JOB_UID", "")
        generations = GenerationSpans(spans or OFF, uid, process_began())
        server = Server(
            Store(settings.memory_limit),
            (settings.token, *settings.former_tokens),
            settings.bind,
            settings.port,
            tls=tls,
            peers=peers,
            threads=settings.threads,
            spans=generations,
        )
        generations.ready()
        in_job = registration.read(os.environ, server.port)
    except (ValueError, OSError) as error:
        log.error("%s", error)
        return 2
    REGISTRY.register(ServerCollector(server))
    if spans is not None:
        REGISTRY.register(SpanCollector(spans, {}))
    metrics = _serve_metrics(settings)
    log.info("serves parameters on port %d, metrics on port %d", server.port, metrics.port)
    why, well = _serve_until_stopped(in_job)
    log.log(logging.INFO if well else logging.ERROR, "stops: %s; %s", why, server.status())
    metrics.close()
    server.close()
    if spans is not None:
        spans.close()
    # The interpreter's end would look through all of torch's objects for garbage, for most of a second.
    gc.freeze()
    return 0 if well else 1


def _serve_until_stopped(in_job: registration.Settings | None) -> tuple[str, bool]:
    """Why it ends, and whether that is as it should be."""
    if in_job is None:
        return signal.Signals(signal.sigwait(STOPPING)).name, True
    known = registration.Registration(in_job)
    try:
        return known.wait(STOPPING)
    finally:
        known.close()


def _warm_up() -> None:
    """The first optimizer of a process imports much of torch: no step shall wait for that."""
    for name in ("sgd", "adam"):
        Update(name).bind(torch.zeros(1))(torch.zeros(1))


def _serve_metrics(settings: Settings) -> BoundedServer:
    """Raise OSError when no port can be had."""
    metrics = ThrottledValue(lambda: generate_latest(REGISTRY))

    def answer(request: Request) -> Reply:
        if request.path not in ("/metrics", "/"):
            return in_words(404, "/metrics")
        return Reply(200, metrics(), CONTENT_TYPE_LATEST)

    return serve(answer, settings.bind, settings.metrics_port)


if __name__ == "__main__":
    sys.exit(main())
