"""`python -m springtide_coordinator`: the control plane of one job."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from importlib import metadata

from springtide_coordinator import logs
from springtide_coordinator.service import PortTakenError, serve
from springtide_coordinator.settings import BadEnvironmentError, read_options
from springtide_protocol.lobby import raise_descriptor_limit
from springtide_protocol.span_export import job_resource, open_tracer

SPARE_DESCRIPTORS = 256
"""Beyond two for each process of the job, for its stream and its lifeline: for those that come back, the
operator, and pages."""


def main() -> int:
    """Serve until told to stop; 2 when the environment is wrong. `--version` prints the version."""
    if sys.argv[1:] == ["--version"]:
        print(f"springtide-coordinator {metadata.version('springtide')}")
        return 0
    logs.set_up(
        job=os.environ.get("SPRINGTIDE_JOB", "job"), namespace=os.environ.get("SPRINGTIDE_NAMESPACE", "")
    )
    log = logging.getLogger("springtide.coordinator")
    descriptors = raise_descriptor_limit()
    try:
        options = read_options(os.environ)
        if descriptors < (needed := 2 * (options.target + options.servers) + SPARE_DESCRIPTORS):
            log.warning(
                "this process may open %d files (its hard limit, RLIMIT_NOFILE), and needs %d for a job of %d"
                " processes and %d parameter servers: raise the container runtime's limit",
                descriptors,
                needed,
                options.target,
                options.servers,
            )
        spans = open_tracer("springtide-coordinator", job_resource(os.environ))
        try:
            asyncio.run(serve(options, spans))
        finally:
            if spans is not None:
                spans.close()
    except (BadEnvironmentError, PortTakenError, ValueError, OSError) as error:
        log.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
