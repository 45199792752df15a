"""kopf's wiring and nothing else: lists and watches feed the operator, which decides by itself.

Run with `python -m springtide_operator`, or `kopf run --all-namespaces -m springtide_operator.handlers`. Only
`kopf.on.event` is used: other handlers would put finalizers on jobs, and an uninstalled operator would leave
jobs and namespaces that can never be deleted. kopf lists and watches what has a handler; the objects
themselves go from its session straight to the operator (`guarded_http.Feed`).

Threads: kopf calls the handlers in the operator's event loop, since they are coroutines; `die` may be called
from any thread, and its timer ends the process by force.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import kopf

from springtide_kube.errors import CredentialsError
from springtide_operator.api import names
from springtide_operator.cluster import PAGE
from springtide_operator.credentials import Login
from springtide_operator.kopf_lists import KopfLists
from springtide_operator.runtime import Operator
from springtide_operator.settings import read_settings
from springtide_operator.stateless import NoDifferences, NoProgress
from springtide_protocol.span_export import open_tracer

log = logging.getLogger("springtide.operator")

LAST_SECONDS = 20.0  # for a process that ends by itself

_POD = {"namespace.name": "POD_NAMESPACE", "pod.name": "POD_NAME", "pod.uid": "POD_UID"}
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
    memo.lists = KopfLists(ours.watched)
    pod = {f"k8s.{key}": os.environ.get(name, "") for key, name in _POD.items()}
    spans = open_tracer("springtide-operator", pod)
    memo.operator = Operator(ours, memo.lists, on_death=die, spans=spans)
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
    settings.watching.label_selectors["policy", "v1", "poddisruptionbudgets"] = names.OURS
    settings.watching.label_selectors["networking.k8s.io", "v1", "networkpolicies"] = names.OURS
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
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    try:
        return await _login.session(memo.get("operator"), memo.get("lists"))
    except CredentialsError as error:
        raise kopf.TemporaryError(str(error), delay=5) from error


async def watched(event: kopf.RawEvent, resource: kopf.Resource, memo: kopf.Memo, **_: Any) -> None:
    """Have kopf list and watch a kind of objects; feed the operator one that came to kopf all the same.

    Args:
        event: type and object.
        resource: the kind.
        memo: holds the operator.
    """
    memo.operator.take_event(resource.plural, event["type"], dict(event["object"]))


def watch(environ: Mapping[str, str]) -> None:
    """Have kopf watch jobs and pods, and what else this operator may read.

    Args:
        environ: of this process.
    """
    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL)(watched)
    kopf.on.event("", "v1", "pods")(watched)
    kopf.on.event("policy", "v1", "poddisruptionbudgets")(watched)
    if environ.get("SPRINGTIDE_NETWORK_POLICY"):
        kopf.on.event("networking.k8s.io", "v1", "networkpolicies")(watched)
    # Nodes have no namespace: an operator of named namespaces has no right to read them.
    if not environ.get("SPRINGTIDE_WATCH_NAMESPACES", "").strip():
        kopf.on.event("", "v1", "nodes")(watched)


watch(os.environ)
