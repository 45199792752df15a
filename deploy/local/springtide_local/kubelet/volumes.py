"""Volumes as folders: filled from Secrets, ConfigMaps, the downward API and tokens, shared per claim, or
just empty.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from springtide_local.kubelet.environment import ConfigError, Lookup, field_value, resource_value
from springtide_local.kubelet.payload import write_payload
from springtide_local.kubelet.tokens import PodTokens
from springtide_local.ports import ApiError

Object = dict[str, Any]


class MountError(Exception):
    """A volume cannot be set up (yet); the message is the kubelet's."""


def secret_data(secret: Object | None) -> dict[str, bytes] | None:
    if secret is None:
        return None
    return {name: base64.b64decode(value) for name, value in (secret.get("data") or {}).items()}


def config_map_data(config_map: Object | None) -> dict[str, bytes] | None:
    if config_map is None:
        return None
    data = {name: value.encode() for name, value in (config_map.get("data") or {}).items()}
    binary = {name: base64.b64decode(value) for name, value in (config_map.get("binaryData") or {}).items()}
    return {**data, **binary}


class Volumes:
    """The volumes of one pod, below `root`.

    `config_map`, `secret` and `claim` look up (namespace, name); `claim_folder` gives the folder of a claim
    object; `tokens` are those of the pod.
    """

    def __init__(
        self,
        root: Path,
        config_map: Lookup,
        secret: Lookup,
        claim: Lookup,
        claim_folder: Callable[[Object], Path],
        tokens: PodTokens,
        allocatable: Mapping[str, str],
    ) -> None:
        self._root = root
        self._config_map = config_map
        self._secret = secret
        self._claim = claim
        self._claim_folder = claim_folder
        self._tokens = tokens
        self._allocatable = allocatable

    def set_up(self, pod: Object) -> dict[str, Path]:
        """The real path of each volume, made and filled; harmless to call again. Raise MountError naming
        the volume and what it lacks.
        """
        return {volume["name"]: self._set_up(volume, pod) for volume in pod["spec"].get("volumes") or []}

    def remove(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def _set_up(self, volume: Object, pod: Object) -> Path:
        name = volume["name"]
        namespace = pod["metadata"]["namespace"]
        folder: Path = self._root / name
        if (host_path := volume.get("hostPath")) is not None:
            return _host_path(name, host_path)
        if source := volume.get("persistentVolumeClaim"):
            claim = self._claim(namespace, source["claimName"])
            if claim is None or (claim.get("status") or {}).get("phase") != "Bound":
                state = "not found" if claim is None else "not bound"
                raise MountError(
                    f'MountVolume.SetUp failed for volume "{name}" : persistentvolumeclaim '
                    f'"{source["claimName"]}" {state}'
                )
            return self._claim_folder(claim)
        folder.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            return folder
        try:
            files = self._files(volume, pod)
        except ConfigError as error:
            raise MountError(f'MountVolume.SetUp failed for volume "{name}" : {error}') from None
        write_payload(folder, files)
        return folder

    def _files(self, volume: Object, pod: Object) -> dict[str, tuple[bytes, int]]:
        if source := volume.get("projected"):
            files: dict[str, tuple[bytes, int]] = {}
            mode = source.get("defaultMode", 0o644)
            for part in source.get("sources") or []:
                files.update(self._source_files(part, pod, mode))
            return files
        if source := volume.get("secret"):
            return self._source_files(
                {"secret": {**source, "name": source["secretName"]}}, pod, source.get("defaultMode", 0o644)
            )
        for kind in ("configMap", "downwardAPI"):
            if source := volume.get(kind):
                return self._source_files({kind: source}, pod, source.get("defaultMode", 0o644))
        kind = next((key for key in volume if key != "name"), "none")
        raise ConfigError(
            f"the embedded cluster has no volumes of type {kind}; it has emptyDir, hostPath, secret, "
            "configMap, projected, downwardAPI "
            f"and persistentVolumeClaim"
        )

    def _source_files(self, source: Object, pod: Object, mode: int) -> dict[str, tuple[bytes, int]]:
        namespace = pod["metadata"]["namespace"]
        if part := source.get("secret"):
            return _items("secret", part, namespace, secret_data(self._secret(namespace, part["name"])), mode)
        if part := source.get("configMap"):
            return _items(
                "configmap", part, namespace, config_map_data(self._config_map(namespace, part["name"])), mode
            )
        if part := source.get("serviceAccountToken"):
            try:
                token = self._tokens.get(pod, part)
            except ApiError as error:
                raise ConfigError(f"failed to fetch token: {error}") from None
            return {part["path"]: (token.encode(), mode)}
        if (part := source.get("downwardAPI")) is not None:
            files = {}
            for item in part.get("items") or []:
                if item.get("fieldRef"):
                    value = field_value(pod, item["fieldRef"]["fieldPath"])
                else:
                    name = item["resourceFieldRef"].get("containerName")
                    container = next((c for c in pod["spec"]["containers"] if c["name"] == name), None)
                    if container is None:
                        raise ConfigError(
                            f"resourceFieldRef needs the name of one of the pod's containers, not {name!r}"
                        )
                    value = resource_value(item["resourceFieldRef"], container, self._allocatable)
                files[item["path"]] = (value.encode(), item.get("mode", mode))
            return files
        raise ConfigError(f"the embedded cluster cannot project {', '.join(source) or 'an empty source'}")


def _items(
    kind: str, source: Object, namespace: str, data: dict[str, bytes] | None, mode: int
) -> dict[str, tuple[bytes, int]]:
    optional = source.get("optional", False)
    if data is None:
        if optional:
            return {}
        raise ConfigError(f'{kind} "{source["name"]}" not found')
    if not source.get("items"):
        return {name: (value, mode) for name, value in data.items()}
    files = {}
    for item in source["items"]:
        if item["key"] in data:
            files[item["path"]] = (data[item["key"]], item.get("mode", mode))
        elif not optional:
            raise ConfigError(
                f"{kind} {namespace}/{source['name']} has no key {item['key']!r} (references "
                f"non-existent {kind} key)"
            )
    return files


def _host_path(name: str, source: Object) -> Path:
    path, kind = Path(source["path"]), source.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch(exist_ok=True)
    right = {
        "Directory": path.is_dir,
        "DirectoryOrCreate": path.is_dir,
        "File": path.is_file,
        "FileOrCreate": path.is_file,
        "Socket": path.is_socket,
        "CharDevice": path.is_char_device,
        "BlockDevice": path.is_block_device,
    }.get(kind)
    if right is not None and not right():
        raise MountError(
            f'MountVolume.SetUp failed for volume "{name}" : hostPath type check failed: {path} is '
            f"not a {kind.lower()}"
        )
    return path


def mount_paths(
    container: Object, volumes: Mapping[str, Path], expand: Callable[[str], str]
) -> dict[str, Path]:
    """Return the real path of each of the container's mount paths. Folders for `subPath` are made. Raise
    MountError for a volume or path that cannot be.

    Args:
        container: of the pod.
        volumes: the folder of each volume.
        expand: replaces `$(NAME)` by the container's variables.
    """
    mounts = {}
    for mount in container.get("volumeMounts") or []:
        if mount["name"] not in volumes:
            raise MountError(
                f'volume "{mount["name"]}" of mount path {mount["mountPath"]} is not among the pod\'s volumes'
            )
        real = volumes[mount["name"]]
        inside = mount.get("subPath") or expand(mount.get("subPathExpr") or "")
        if inside:
            if inside.startswith("/") or ".." in Path(inside).parts:
                raise MountError(
                    f'subPath {inside!r} of volume "{mount["name"]}" must stay inside the volume'
                )
            real = real / inside
            if not real.exists():
                real.mkdir(parents=True)
        mounts[mount["mountPath"]] = real
    return mounts


def refers_to(pod: Object, kind: str, name: str) -> bool:
    """Return whether a volume of the pod shows an object.

    Args:
        pod: the Pod.
        kind: Secret or ConfigMap; volumes show no others.
        name: of the object.
    """
    key, field = {"Secret": ("secret", "secretName"), "ConfigMap": ("configMap", "name")}.get(kind, ("", ""))
    for volume in pod["spec"].get("volumes") or []:
        sources = [volume.get(key) or {}]
        sources += [part.get(key) or {} for part in (volume.get("projected") or {}).get("sources") or []]
        if any(name in (source.get(field), source.get("name")) for source in sources):
            return True
    return False
