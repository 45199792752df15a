"""The cluster's process: API server, scheduler, controllers and one kubelet per node on one event loop.

Tasks: one event loop runs all parts, each a task; the first one to fail, or a signal, ends them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from springtide_local.addresses import (
    PodAddresses,
    api_address,
    api_port,
    claim_network,
    node_address,
    service_range,
)
from springtide_local.api.auth import ISSUER
from springtide_local.api.discovery import VERSION
from springtide_local.api.server import ApiServer
from springtide_local.api.store import Store
from springtide_local.controllers.claims import Claims
from springtide_local.controllers.deployments import Deployments
from springtide_local.controllers.endpoints import EndpointsController
from springtide_local.controllers.nodes import NodeLifecycle
from springtide_local.controllers.proxy import ServiceProxy
from springtide_local.controllers.replicasets import ReplicaSets
from springtide_local.events import EventRecorder
from springtide_local.images import Images
from springtide_local.informer import Informers
from springtide_local.kubelet.log_provider import LogProvider
from springtide_local.kubelet.node import Kubelet, NodeShape
from springtide_local.kubelet.pod import PodWorker
from springtide_local.kubelet.pretend import OneAddress, PretendedPod
from springtide_local.kubelet.processes import ProcessRuntime
from springtide_local.kubelet.runtime import Runtime
from springtide_local.kubelet.services import ApiAccess, NodeServices, WatchedReferences
from springtide_local.kubelet.tokens import Issued
from springtide_local.pki import write_private
from springtide_local.ports import Object
from springtide_local.scheduler import Scheduler
from springtide_local.settings import AUDIT_VARIABLE, Files, Settings, node_names

_log = logging.getLogger(__name__)
_READY_TIMEOUT = 15.0
GARBAGE_THRESHOLD = 50_000  # new containers, until the youngest are looked through


def run_cluster(data: Path, identity: str, reaper: int) -> int:
    """Run the cluster of a folder until SIGTERM or SIGINT.

    Args:
        data: the folder, with its settings.
        identity: by which its processes are known.
        reaper: id of the process that kills what the cluster leaves behind.

    Returns:
        The exit status.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout
    )
    # Each write copies an object of a few hundred parts, none of them in a circle: at Python's own thresholds
    # a third of the time goes into looking for circles.
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 50)
    files = Files(data)
    settings = Settings.load(files.settings.read_text())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        asyncio.run(_until_stopped(LocalCluster(files, settings, identity, reaper)))
    except Exception:
        _log.exception("the cluster ends because of an error")
        return 1
    return 0


async def _until_stopped(cluster: LocalCluster) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.create_task(cluster.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, running):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stopping
    with contextlib.suppress(asyncio.CancelledError):
        await running


class LocalCluster:
    """All parts, put together. `runtime` runs the containers; the default is local processes."""

    def __init__(
        self, files: Files, settings: Settings, identity: str, reaper: int, runtime: Runtime | None = None
    ) -> None:
        self._files = files
        self._settings = settings
        self._identity = identity
        self._reaper = reaper
        self._runtime = runtime or ProcessRuntime()

    async def run(self) -> None:
        """Run the cluster until cancelled. When this returns, no container runs any more."""
        started = time.monotonic()
        files = self._files
        for folder in (files.run, files.run / "pods", files.run / "claims", files.run / "root"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        network, claim = claim_network(str(files.data))
        with claim:
            address = api_address(network)
            store = Store(services=service_range(network))
            longest = self._settings.token_seconds or None
            server = ApiServer(store, files.pki, address, api_port(address), longest)
            await server.start()
            try:
                await self._run_parts(store, server, network, started)
            finally:
                await server.stop()
                self._leave_audit(server)

    def _leave_audit(self, server: ApiServer) -> None:
        """Write the requests of every user to a file, for comparison with the rights that were granted."""
        folder = os.environ.get(AUDIT_VARIABLE)
        if folder and Path(folder).is_dir():
            text = json.dumps({"requests": server.audit.report()})
            (Path(folder) / f"{self._identity}.json").write_text(text)

    async def _run_parts(self, store: Store, server: ApiServer, network: int, started: float) -> None:
        informers = Informers(store)
        kubelets = self._kubelets(store, server, informers, network)
        server.set_log_provider(LogProvider(kubelets))
        parts: list[Awaitable[None]] = [kubelet.run() for kubelet in kubelets]
        parts += [
            Scheduler(store, informers).run(),
            EndpointsController(store, informers).controller.run(),
            ServiceProxy(store, informers).run(),
            ReplicaSets(store, informers).controller.run(),
            Deployments(store, informers).controller.run(),
            Claims(store, informers, self._files.run / "claims").controller.run(),
            NodeLifecycle(store, informers, self._settings.times).run(),
            informers.run(),
            self._announce(store, server, network, started),
        ]
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await _first_failure(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _kubelets(self, store: Store, server: ApiServer, informers: Informers, network: int) -> list[Kubelet]:
        files, settings = self._files, self._settings
        images = Images(files.images, files.run / "root")
        addresses = PodAddresses(network)
        host, _, port = server.url.removeprefix("https://").partition(":")
        access = ApiAccess(host, int(port))
        references = WatchedReferences(informers)
        for kind in ("pods", "nodes"):
            informers.of(kind)

        def issue(pod: Object, audience: str, seconds: int) -> Issued:
            space, account = pod["metadata"]["namespace"], pod["spec"].get("serviceAccountName") or "default"
            audiences = (audience,) if audience else (ISSUER,)
            return Issued(*server.tokens.issue(space, account, seconds, audiences, pod))

        kubelets = []
        for index, name in enumerate(node_names(settings.nodes)):
            address = node_address(network, index)
            shape = NodeShape(name, address, settings.capacity(), VERSION["gitVersion"], {})
            node = NodeServices(
                node=name,
                host_ip=address,
                cluster=self._identity,
                store=store,
                runtime=self._runtime,
                images=images,
                events=EventRecorder(store, "kubelet", name),
                addresses=OneAddress(settings.pretend) if settings.pretend else addresses,
                api=access,
                issue_token=issue,
                pods_root=files.run / "pods",
                names_resolve=settings.dns,
                logs_root=Path(settings.pod_logs) if settings.pod_logs else None,
                claims_root=files.run / "claims",
                allocatable=settings.capacity(),
                references=references,
            )
            make_worker = PretendedPod if settings.pretend else PodWorker
            kubelets.append(Kubelet(shape, node, informers, settings.times.heartbeat, make_worker))
        return kubelets

    async def _announce(self, store: Store, server: ApiServer, network: int, started: float) -> None:
        """Write the kubeconfig and the state file once every node is ready. Raise TimeoutError naming those
        that are not.
        """
        files = self._files
        missing = set(node_names(self._settings.nodes))
        deadline = time.monotonic() + _READY_TIMEOUT
        while missing:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"nodes {', '.join(sorted(missing))} did not become ready within {_READY_TIMEOUT:g} s"
                )
            for node in store.list("nodes"):
                if not (node.get("spec") or {}).get("taints"):
                    missing.discard(node["metadata"]["name"])
            await asyncio.sleep(0.005)
        kubeconfig = Path(self._settings.kubeconfig or files.kubeconfig)
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        write_private(kubeconfig, server.kubeconfig().encode())
        pair = server.authority.client("springtide-admin", ["system:masters"])
        write_private(files.pki / "admin.pem", pair.key + pair.certificate)
        state: dict[str, Any] = {
            "id": self._identity,
            "pid": os.getpid(),
            "reaper": self._reaper,
            "url": server.url,
            "kubeconfig": str(kubeconfig),
            "network": f"127.{network}.0.0/16",
            "nodes": self._settings.nodes,
            "started": time.time(),
        }
        write_private(files.state, json.dumps(state, indent=1).encode())
        # What is there now stays: the collector need not look at it again, and so holds up nobody.
        gc.collect()
        gc.freeze()
        _log.info(
            "ready after %.2f s: %s with %d nodes",
            time.monotonic() - started,
            server.url,
            self._settings.nodes,
        )


async def _first_failure(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Wait until one of the tasks fails, and raise what it raised. They end by themselves only when their
    work is done.
    """
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
