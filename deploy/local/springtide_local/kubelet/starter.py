"""Making a container: image, volumes, environment, process. A failure becomes the container's waiting state
and an event.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from springtide_local.images import Image, ImageError
from springtide_local.kubelet.environment import ConfigError, declared_environment, expand
from springtide_local.kubelet.launch import (
    SERVICE_ACCOUNT,
    ContainerFolder,
    ProcessEnv,
    build_launch,
    path_map,
)
from springtide_local.kubelet.logs import ContainerLog
from springtide_local.kubelet.paths import PathMap
from springtide_local.kubelet.runtime import Launch, RunningContainer, StartError
from springtide_local.kubelet.services import NodeServices
from springtide_local.kubelet.state import ContainerRecord, Running, Terminated, Waiting
from springtide_local.kubelet.tokens import PodTokens
from springtide_local.kubelet.volumes import MountError, mount_paths

Object = dict[str, Any]
_CONFIG_RETRY = 5.0
_PULL_RETRY = 10.0
_NEVER = 365 * 86400.0


class ContainerStarter:
    """Makes the containers of one pod, whose files are in `root`."""

    def __init__(self, node: NodeServices, root: Path, ip: str) -> None:
        self._node = node
        self._root = root
        self._ip = ip
        self._volumes: dict[str, Path] | None = None
        self._tokens = PodTokens(node.issue_token)
        self._execs = itertools.count()
        self._paths: dict[str, PathMap] = {}

    def folder(self, container: str) -> ContainerFolder:
        return ContainerFolder(self._root / container)

    def mount(self, pod: Object) -> None:
        """Set up the pod's volumes, once. Raise MountError or OSError when that cannot be (yet)."""
        if self._volumes is not None:
            return
        self._root.mkdir(parents=True, exist_ok=True)
        self._volumes = self._node.volumes(pod, self._tokens).set_up(pod)

    def refresh(self, pod: Object) -> None:
        """Write changed Secrets and ConfigMaps, and new tokens where they are due, into their volumes."""
        if self._volumes is not None:
            self._node.volumes(pod, self._tokens).set_up(pod)

    @property
    def refresh_at(self) -> float | None:
        """Return when a token is due to be replaced (seconds since 1970), or None."""
        return self._tokens.renew_at

    def start(
        self, pod: Object, container: Object, record: ContainerRecord, now: float
    ) -> tuple[Launch, RunningContainer] | None:
        """Start a container and move its record to Running; or to the state that says why not, with the
        moment of the next try.

        Args:
            pod: the Pod, with its addresses in status.
            container: of the pod's spec.
            record: of the container; it is changed.
            now: in unix seconds.

        Returns:
            The launch, and the running process; None when it could not be.
        """
        field = f"spec.containers{{{container['name']}}}"
        events = self._node.events
        image = self._image(pod, container, record, now, field)
        if image is None:
            return None
        try:
            launch = self._launch(pod, container, image, record.starts)
        except (ConfigError, MountError) as error:
            if not isinstance(record.state, Waiting) or record.state.message != str(error):
                events.warning(pod, "Failed", f"Error: {error}", field)
            record.state = Waiting("CreateContainerConfigError", str(error))
            record.retry_at = now + _CONFIG_RETRY
            return None
        ended = record.ended
        if ended is not None:
            record.backoff = record.backoff.next(ended.finished_at, now)
            record.restarts += 1
            record.last = ended
        record.starts += 1
        record.retry_at = 0.0
        events.normal(pod, "Created", f"Created container: {container['name']}", field)
        try:
            running = self._node.runtime.start(launch)
        except StartError as error:
            launch.log.close()
            events.warning(pod, "Failed", f"Error: {error}", field)
            failed = Terminated(128, "StartError", 0.0, now, message=str(error))
            if pod["spec"].get("restartPolicy", "Always") == "Never" and record.kind != "sidecar":
                record.state = failed
            else:
                record.state, record.last = Waiting("RunContainerError", str(error)), failed
            return None
        record.state = Running(running.id, now)
        events.normal(pod, "Started", f"Started container {container['name']}", field)
        return launch, running

    def _image(
        self, pod: Object, container: Object, record: ContainerRecord, now: float, field: str
    ) -> Image | None:
        reference = container["image"]
        events = self._node.events
        try:
            image = self._node.images.find(reference, container.get("imagePullPolicy") or "IfNotPresent")
        except ImageError as error:
            self._refuse_image(pod, record, error, now, field)
            return None
        if not record.image_id:
            events.normal(pod, "Pulled", f'Container image "{reference}" already present on machine', field)
        record.image_id = image.id
        return image

    def _refuse_image(
        self, pod: Object, record: ContainerRecord, error: ImageError, now: float, field: str
    ) -> None:
        """Alternate between a failed pull (ErrImagePull) and the wait for the next (ImagePullBackOff)."""
        reference, events = record.image, self._node.events
        before = record.state.reason if isinstance(record.state, Waiting) else ""
        if error.reason != "ErrImagePull":
            if before != error.reason:
                events.warning(pod, "Failed", f"Error: {error.reason}: {error.message}", field)
            record.state = Waiting(error.reason, error.message)
            record.retry_at = now + (_PULL_RETRY if error.retry else _NEVER)
        elif before == "ErrImagePull":
            text = f'Back-off pulling image "{reference}"'
            record.state = Waiting("ImagePullBackOff", f"{text}: ErrImagePull: {error.message}")
            record.retry_at = record.pull_backoff.updated + record.pull_backoff.delay
            events.normal(pod, "BackOff", text, field)
            events.warning(pod, "Failed", "Error: ImagePullBackOff", field)
        else:
            record.state = Waiting("ErrImagePull", error.message)
            record.pull_backoff = record.pull_backoff.next(now, now)
            record.retry_at = now + 1.0
            events.normal(pod, "Pulling", f'Pulling image "{reference}"', field)
            events.warning(pod, "Failed", f'Failed to pull image "{reference}": {error.message}', field)
            events.warning(pod, "Failed", "Error: ErrImagePull", field)

    def _launch(self, pod: Object, container: Object, image: Image, attempt: int) -> Launch:
        node, name = self._node, container["name"]
        if self._volumes is None:
            raise RuntimeError(
                f"container {name} was to be started before the volumes of its pod were set up"
            )
        declared = declared_environment(
            container, pod, node.config_map, node.secret_data, node.allocatable, node.service_variables(pod)
        )
        folder = self.folder(name)
        folder.prepare(attempt)
        mounts = mount_paths(container, self._volumes, lambda text: expand(text, declared))
        around = ProcessEnv(
            node.cluster,
            self._ip,
            pod["spec"].get("hostname") or pod["metadata"]["name"],
            mounts.get(SERVICE_ACCOUNT),
            node.names_resolve,
        )
        key = f"{node.cluster}/{pod['metadata']['uid']}/{name}/{attempt}"
        paths = self._paths[name] = path_map(container, image, mounts, folder.termination(attempt))
        return build_launch(key, container, image, declared, paths, folder, attempt, around)

    def exec_launch(self, container: str, launch: Launch, command: list[str]) -> Launch:
        """Return the launch of a command beside a running container, in its environment and folder; its
        output is kept apart.

        Args:
            container: its name.
            launch: of the container.
            command: program and arguments, with paths of the container.
        """
        argv = [self._paths[container].rewrite(part) for part in command]
        number = next(self._execs)
        log = ContainerLog(self._root / f"exec-{number}.log")
        return Launch(f"{launch.key}/exec-{number}", argv, launch.env, launch.cwd, log)
