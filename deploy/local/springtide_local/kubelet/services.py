"""Services that the pod workers of one node share.

Tasks: all workers of a node's pods share these in one event loop; `running` is set while the node works, and
they wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from springtide_local.events import EventRecorder
from springtide_local.images import Images
from springtide_local.informer import Informer, Informers
from springtide_local.kubelet.environment import service_environment
from springtide_local.kubelet.runtime import Runtime
from springtide_local.kubelet.tokens import PodTokens, TokenIssuer
from springtide_local.kubelet.volumes import Volumes, secret_data
from springtide_local.ports import ApiError, StorePort

Object = dict[str, Any]
_log = logging.getLogger(__name__)


class Addresses(Protocol):
    """Gives each pod an address of its own."""

    def take(self) -> str:
        """Raise RuntimeError when all are in use."""
        ...

    def give_back(self, address: str) -> None: ...


@dataclass(frozen=True)
class ApiAccess:
    """Address at which pods reach the API server."""

    host: str
    port: int

    def service(self) -> Object:
        """Return it as the Service `kubernetes`, as which it is announced to every container.

        That Service is no object here: its port would have to be 443, which only root may bind.
        """
        ports = [{"name": "https", "port": self.port, "protocol": "TCP"}]
        return {"metadata": {"name": "kubernetes"}, "spec": {"clusterIP": self.host, "ports": ports}}


class WatchedReferences:
    """Objects that pods refer to, in the state that the API server last reported."""

    def __init__(self, informers: Informers) -> None:
        self.config_maps = informers.of("configmaps")
        self.secrets = informers.of("secrets")
        self.services = informers.of("services")
        self.claims = informers.of("persistentvolumeclaims")


@dataclass
class NodeServices:
    """One node's share of the cluster. `running` is clear while the node is killed or stopped: nothing is
    decided or written then.
    """

    node: str
    host_ip: str
    cluster: str
    store: StorePort
    runtime: Runtime
    images: Images
    events: EventRecorder
    addresses: Addresses
    api: ApiAccess
    issue_token: TokenIssuer
    references: WatchedReferences
    pods_root: Path
    claims_root: Path
    allocatable: Mapping[str, str]
    logs_root: Path | None = None
    names_resolve: bool = True
    running: asyncio.Event = field(default_factory=asyncio.Event)

    def config_map(self, namespace: str, name: str) -> Object | None:
        """Return a ConfigMap as it is now; None when it is not there.

        Args:
            namespace: of the object.
            name: of the object.
        """
        return self._current(self.references.config_maps, "configmaps", namespace, name)

    def secret(self, namespace: str, name: str) -> Object | None:
        """Return a Secret as it is now; None when it is not there.

        Args:
            namespace: of the object.
            name: of the object.
        """
        return self._current(self.references.secrets, "secrets", namespace, name)

    def secret_data(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """Return the decoded data of a Secret; None when it is not there.

        Args:
            namespace: of the object.
            name: of the object.
        """
        return secret_data(self.secret(namespace, name))

    def _current(self, informer: Informer, resource: str, namespace: str, name: str) -> Object | None:
        # The watch of pods may run ahead of the watch of what they refer to, so what is not known is asked
        # for.
        found = informer.get(namespace, name)
        if found is None:
            try:
                found = self.store.get(resource, name, namespace)
            except ApiError as error:
                if error.code != 404:
                    raise
        return found

    def claim(self, namespace: str, name: str) -> Object | None:
        """Return a PersistentVolumeClaim as it is now; None when it is not there.

        Args:
            namespace: of the object.
            name: of the object.
        """
        return self._current(self.references.claims, "persistentvolumeclaims", namespace, name)

    def claim_folder(self, claim: Object) -> Path:
        folder = claim_folder(self.claims_root, claim)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def service_variables(self, pod: Object) -> dict[str, str]:
        services: list[Object] = []
        if pod["spec"].get("enableServiceLinks") is not False:
            services += self.references.services.all(pod["metadata"]["namespace"])
        return service_environment([self.api.service(), *services])

    def volumes(self, pod: Object, tokens: PodTokens) -> Volumes:
        """Return the volumes of a pod.

        Args:
            pod: the Pod.
            tokens: its tokens.
        """
        return Volumes(
            self.pods_root / pod["metadata"]["uid"] / "volumes",
            self.config_map,
            self.secret,
            self.claim,
            self.claim_folder,
            tokens,
            self.allocatable,
        )


def claim_folder(root: Path, claim: Object) -> Path:
    """Return the folder behind a claim.

    Args:
        root: of all claims.
        claim: the PersistentVolumeClaim.
    """
    metadata = claim["metadata"]
    return root / f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"
