"""Launch of a container: its environment, arguments and folders, all with real paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from springtide_local.images import WORKING_DIRECTORY, Image
from springtide_local.kubelet.environment import ConfigError, expand
from springtide_local.kubelet.logs import ContainerLog
from springtide_local.kubelet.paths import PathMap
from springtide_local.kubelet.runtime import Launch
from springtide_local.strays import CLUSTER_VARIABLE

Object = dict[str, Any]
TERMINATION_LOG = "/dev/termination-log"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
# Says where that is: the one path which programs know by heart, so that nobody hands it over to be rewritten.
SERVICE_ACCOUNT_DIR = "SPRINGTIDE_SERVICE_ACCOUNT_DIR"
# The C library asks no name server then (resolv.conf(5)): each look-up that /etc/hosts does not answer fails
# at once with EAI_AGAIN, as in a pod whose cluster's DNS is down. gRPC brings a resolver of its own, which
# is told to use the C library's.
NO_NAMES = {"RES_OPTIONS": "attempts:0", "GRPC_DNS_RESOLVER": "native"}


@dataclass(frozen=True)
class ContainerFolder:
    """The files that the kubelet keeps for one container; `attempt` counts its starts from 0."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    def log(self, attempt: int) -> Path:
        return self.root / f"{attempt}.log"

    def termination(self, attempt: int) -> Path:
        return self.root / f"{attempt}.termination"

    def prepare(self, attempt: int) -> None:
        """Make what the next start needs; what is older than the start before it goes."""
        for old in (
            self.log(attempt - 2),
            self.log(attempt - 2).with_suffix(".old"),
            self.termination(attempt - 2),
        ):
            old.unlink(missing_ok=True)
        self.home.mkdir(parents=True, exist_ok=True)
        self.termination(attempt).write_bytes(b"")


@dataclass(frozen=True)
class ProcessEnv:
    """Facts for a process's environment beside its pod's declarations.

    `service_account` is the real folder of what is mounted at SERVICE_ACCOUNT, or None. `names_resolve`:
    whether the cluster's DNS is up.
    """

    cluster: str
    bind: str
    hostname: str
    service_account: Path | None
    names_resolve: bool = True


def path_map(container: Object, image: Image, mounts: Mapping[str, Path], termination: Path) -> PathMap:
    """Return the container's paths: its image's working directory, its mounts, its termination message file.

    Args:
        container: of the pod's spec.
        image: its image.
        mounts: real folders, by path in the container.
        termination: the real file.
    """
    message = container.get("terminationMessagePath") or TERMINATION_LOG
    return PathMap({WORKING_DIRECTORY: image.root, **mounts, message: termination})


def build_launch(
    key: str,
    container: Object,
    image: Image,
    declared: Mapping[str, str],
    paths: PathMap,
    folder: ContainerFolder,
    attempt: int,
    around: ProcessEnv,
) -> Launch:
    """Return all that starting a container needs.

    Args:
        key: by which its processes are known.
        container: of the pod's spec.
        image: its image.
        declared: the environment of the pod's specification, before paths are rewritten.
        paths: of the container, as real ones.
        folder: of the container, for logs and home.
        attempt: number of the start, from 0.
        around: facts of the pod beside its declarations.

    Raises:
        ConfigError: there is nothing to run.
    """
    argv = command_line(container, declared)
    if not argv:
        raise ConfigError(
            "no command specified: the embedded cluster's images have no entry point, so give the "
            "container a command"
        )
    base = {
        "PATH": f"{image.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "HOME": str(folder.home),
        "HOSTNAME": around.hostname,
        "PYTHONUNBUFFERED": "1",
        "SPRINGTIDE_BIND": around.bind,
    }
    if around.service_account is not None:
        base[SERVICE_ACCOUNT_DIR] = str(around.service_account)
    if not around.names_resolve:
        base.update(NO_NAMES)
    env = {
        **base,
        **{name: paths.rewrite(value) for name, value in declared.items()},
        CLUSTER_VARIABLE: around.cluster,
    }
    cwd = paths.resolve(expand(container.get("workingDir") or WORKING_DIRECTORY, declared))
    return Launch(key, [paths.rewrite(part) for part in argv], env, cwd, ContainerLog(folder.log(attempt)))


def command_line(container: Object, declared: Mapping[str, str]) -> list[str]:
    """Return `command` and `args`, each expanded with the container's environment.

    Args:
        container: of the pod's spec.
        declared: values by name.
    """
    parts = [*(container.get("command") or []), *(container.get("args") or [])]
    return [expand(part, declared) for part in parts]
