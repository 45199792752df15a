"""kopf's wiring and nothing else: watches feed the operator, which decides by itself.

Run with `python -m springtide_operator`, or `kopf run --all-namespaces -m springtide_operator.handlers`. Only
`kopf.on.event` is used: other handlers would put finalizers on jobs, and an uninstalled operator would leave
jobs and namespaces that can never be deleted.

Threads: kopf calls the handlers in the operator's event loop, since they are coroutines; `die` may be called
from any thread, and its timer ends the process by force.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import kopf

from springtide_operator.api import names
from springtide_operator.cluster import PAGE
from springtide_operator.credentials import Login
from springtide_operator.runtime import Operator
from springtide_operator.settings import read_settings
from springtide_operator.stateless import NoDifferences, NoProgress

log = logging.getLogger("springtide.operator")

LAST_SECONDS = 20.0  # for a process that ends by itself

_login = Login()
_BACKOFFS = (0.2, 0.5, 1, 2, 3, *([5] * 10_000))


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Start the operator; kopf calls it before it watches anything.

    Args:
        settings: kopf's, which are changed.
        memo: holds the operator.
    """
    ours = read_settings(os.environ)
    configure(settings, ours.watched)
    memo.operator = Operator(ours, on_death=die)
    await memo.operator.start()


failure = ""  # why this process ends by itself


def die(why: str) -> None:
    """End this process as for SIGTERM, which gives the lease back; by force if that takes too long."""
    global failure
    if failure:
        return
    failure = why
    last = threading.Timer(LAST_SECONDS, os._exit, (1,))
    last.daemon = True
    last.start()
    signal.raise_signal(signal.SIGTERM)


def configure(settings: kopf.OperatorSettings, watched: tuple[str, ...] = ()) -> None:
    """Let watches notice when they went silent, and kopf post nothing, look for no peers and leave no marks
    of its own.

    With `watched` namespaces there is no right to look at CRDs and namespaces, so kopf does not try.

    Args:
        settings: kopf's, which are changed.
        watched: namespaces; empty: all.
    """
    settings.scanning.disabled = bool(watched)
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.watching.server_timeout = 120
    settings.watching.client_timeout = 150
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = PAGE
    settings.watching.label_selectors["", "v1", "pods"] = names.OURS
    settings.networking.request_timeout = 10
    settings.networking.error_backoffs = _BACKOFFS
    settings.queueing.error_delays = _BACKOFFS
    settings.persistence.finalizer = f"{names.GROUP}/unused"
    settings.persistence.progress_storage = NoProgress()
    settings.persistence.diffbase_storage = NoDifferences()


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator | None = memo.get("operator")
    if operator is not None:
        await operator.stop()


@kopf.on.login()
async def login(**_: Any) -> kopf.AiohttpSession:
    try:
        return await _login.session()
    except kopf.LoginError as error:
        raise kopf.TemporaryError(str(error), delay=5) from error


# Nodes have no namespace: an operator of named namespaces has no right to read them.
if not os.environ.get("SPRINGTIDE_WATCH_NAMESPACES", "").strip():

    @kopf.on.event("", "v1", "nodes")
    async def node_event(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
        memo.operator.node_event(event["type"], dict(event["object"]))


# Coroutines, so that kopf runs them in the event loop and not in a thread.
@kopf.on.event(names.GROUP, names.VERSION, names.PLURAL)
async def job_event(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Feed the operator an event of a job.

    Args:
        event: type and object.
        memo: holds the operator.
    """
    memo.operator.job_event(event["type"], dict(event["object"]))


@kopf.on.event("", "v1", "pods")
async def pod_event(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Feed the operator an event of a pod.

    Args:
        event: type and object.
        memo: holds the operator.
    """
    memo.operator.pod_event(event["type"], dict(event["object"]))
