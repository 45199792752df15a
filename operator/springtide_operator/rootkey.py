"""The root key from which every job's token is derived: from the environment, or a Secret made at the first
start.
"""

from __future__ import annotations

import base64
import secrets

from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.cluster import Cluster

NAME = "springtide-root-key"
KEY = "key"


async def obtain(cluster: Cluster, namespace: str) -> bytes:
    """Return the root key. Two first starts at once agree: the Secret is created once, then read.

    Args:
        cluster: where the Secret is.
        namespace: the operator's own.

    Raises:
        ApiError: the API server refuses.
    """
    try:
        return _read(await cluster.get_secret(namespace, NAME), namespace)
    except ApiError as error:
        if error.code != 404:
            raise
    key = secrets.token_bytes(32)
    try:
        await cluster.create_secret(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "Opaque",
                "metadata": {
                    "name": NAME,
                    "namespace": namespace,
                    "labels": {names.LABEL_NAME: names.APP, names.LABEL_MANAGED_BY: names.MANAGER},
                },
                "data": {KEY: base64.b64encode(key).decode()},
            }
        )
    except ApiError as error:
        if error.code != 409:
            raise
        return _read(await cluster.get_secret(namespace, NAME), namespace)
    return key


def _read(secret: dict[str, object], namespace: str) -> bytes:
    data = secret.get("data")
    text = data.get(KEY) if isinstance(data, dict) else None
    key = base64.b64decode(text) if isinstance(text, str) else b""
    if len(key) < 16:
        raise ApiError(
            0,
            "BadRootKey",
            f"the Secret {namespace}/{NAME} has no key {KEY!r} of at least 16 bytes: delete it, and a new one"
            " is made: each job then gets another key and another coordinator, and trains on",
        )
    return key
