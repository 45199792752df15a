"""Keep Python's garbage collector away from what a process has made before it trains.

A full collection looks at each object of torch and its modules: 0.18 s with some 400,000 of them.
Steps leave few new objects and begin none, so it fell into the first recovery that a process took part in,
whose messages and lists are many, and everybody waited for it.
"""

from __future__ import annotations

import gc
import logging
import time

log = logging.getLogger(__name__)


def set_aside() -> None:
    """Collect garbage once more, and have later collections pass over all that is alive now."""
    began = time.monotonic()
    gc.collect()
    gc.freeze()
    # How many objects that is would take as long to count as the collection itself.
    log.info("what lives now is set aside from garbage collection (%.3f s)", time.monotonic() - began)
