"""`python -m springtide_operator`: run the operator until SIGTERM; `--version` prints the version."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import MutableMapping

from springtide_operator import logs
from springtide_operator.api import names
from springtide_operator.settings import BadEnvironmentError, read_settings

# New containers, until the youngest are looked through: an event of a watch makes hundreds, none in a circle.
GARBAGE_THRESHOLD = 20_000


def prepare(environ: MutableMapping[str, str], identity: str) -> None:
    """Set variables for libraries that read the environment.

    Without them gRPC's own log lines (about a coordinator that goes away) would stand between ours, and kopf
    would look its user's name up, which a user that the cluster assigned does not have.

    Args:
        environ: is changed in place.
        identity: of this process, for kopf.
    """
    environ.setdefault("GRPC_VERBOSITY", "ERROR")
    environ.setdefault("POD_ID", identity)


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"springtide-operator {names.PROGRAM_VERSION}")
        return
    logs.set_up()
    try:
        settings = read_settings(os.environ)
    except BadEnvironmentError as error:
        sys.exit(f"springtide-operator: {error}")
    prepare(os.environ, settings.identity)
    import kopf

    from springtide_operator import handlers

    assert handlers.watched is not None
    logging.getLogger("springtide").setLevel(settings.log_level)
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 50)
    kopf.run(clusterwide=not settings.watched, namespaces=settings.watched, standalone=True)
    if handlers.failure:
        sys.exit(1)


if __name__ == "__main__":
    main()
