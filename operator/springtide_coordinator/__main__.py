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


def main() -> int:
    """Serve until told to stop; 2 when the environment is wrong. `--version` prints the version."""
    if sys.argv[1:] == ["--version"]:
        print(f"springtide-coordinator {metadata.version('springtide')}")
        return 0
    logs.set_up(
        job=os.environ.get("SPRINGTIDE_JOB", "job"), namespace=os.environ.get("SPRINGTIDE_NAMESPACE", "")
    )
    raise_descriptor_limit()
    try:
        asyncio.run(serve(read_options(os.environ)))
    except (BadEnvironmentError, PortTakenError, ValueError, OSError) as error:
        logging.getLogger("springtide.coordinator").error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
