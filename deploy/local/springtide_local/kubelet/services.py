"""What the pod workers of one node share."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from springtide_local.events import EventRecorder
from springtide_local.images import Images
from springtide_local.informer import Informer, Informers
from springtide_local.kubelet.environment import service_environment
from springtide_local.kubelet.runtime import Runtime
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
    """Where pods reach the API server. `authority` is its CA certificate (PEM)."""

    host: str
    port: int
    authority: str


class TokenIssuer(Protocol):
    def __call__(self, namespace: str, service_account: str) -> str:
        """A bearer token that the API server takes for this service account."""
        ...


class WatchedReferences:
    """What pods refer to, as the API last told."""

    def __init__(self, informers: Informers) -> None:
        self.config_maps = informers.of("configmaps")
        self.secrets = informers.of("secrets")
        self.services = informers.of("services")
        self.claims = informers.of("persistentvolumeclaims")
        self.service_accounts = informers.of("serviceaccounts")


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
    running: asyncio.Event = field(default_factory=asyncio.Event)

    def config_map(self, namespace: str, name: str) -> Object | None:
        return self._current(self.references.config_maps, "configmaps", namespace, name)

    def secret(self, namespace: str, name: str) -> Object | None:
        return self._current(self.references.secrets, "secrets", namespace, name)

    def secret_data(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
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
        return self._current(self.references.claims, "persistentvolumeclaims", namespace, name)

    def claim_folder(self, claim: Object) -> Path:
        folder = claim_folder(self.claims_root, claim)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def service_variables(self, pod: Object) -> dict[str, str]:
        if pod["spec"].get("enableServiceLinks") is False:
            return {}
        return service_environment(self.references.services.all(pod["metadata"]["namespace"]))

    def token(self, pod: Object) -> str:
        return self.issue_token(pod["metadata"]["namespace"], service_account(pod))

    def mounts_token(self, pod: Object) -> bool:
        """By the pod's automountServiceAccountToken, else by its service account's, else yes."""
        said = pod["spec"].get("automountServiceAccountToken")
        if said is None:
            account = self._current(
                self.references.service_accounts,
                "serviceaccounts",
                pod["metadata"]["namespace"],
                service_account(pod),
            )
            said = (account or {}).get("automountServiceAccountToken")
        return said is not False

    def kubeconfig(self, pod: Object) -> str:
        """A kubeconfig (YAML) that speaks as the pod's service account in the pod's namespace."""
        authority = base64.b64encode(self.api.authority.encode()).decode()
        cluster = {
            "server": f"https://{self.api.host}:{self.api.port}",
            "certificate-authority-data": authority,
        }
        context = {"cluster": "local", "user": "pod", "namespace": pod["metadata"]["namespace"]}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "local", "cluster": cluster}],
                "users": [{"name": "pod", "user": {"token": self.token(pod)}}],
                "contexts": [{"name": "local", "context": context}],
                "current-context": "local",
            }
        )

    def volumes(self, pod: Object) -> Volumes:
        return Volumes(
            self.pods_root / pod["metadata"]["uid"] / "volumes",
            self.config_map,
            self.secret,
            self.claim,
            self.claim_folder,
            self.token,
            self.api.authority,
            self.allocatable,
        )


def service_account(pod: Object) -> str:
    return str(pod["spec"].get("serviceAccountName") or "default")


def claim_folder(root: Path, claim: Object) -> Path:
    metadata = claim["metadata"]
    return root / f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"
