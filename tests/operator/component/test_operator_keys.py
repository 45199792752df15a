"""Another root key under an operator that runs: each job gets another key and another coordinator."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from operator_cluster import FakeCluster, FakeCoordinator
from operator_running import operator, until

from springtide_operator import rootkey, runtime
from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.job_credentials import JobCredentials

Object = dict[str, Any]
NAMESPACE = "springtide-system"


class Listening(FakeCoordinator):
    """Remembers which token was shown to which address."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[str, str]] = []

    def connect(self, address: str, token: str, authority: str = "", operator_token: str = "") -> Any:
        self.shown.append((address, token))
        return super().connect(address, token, authority, operator_token)


def root_key(cluster: FakeCluster) -> bytes:
    return base64.b64decode(cluster.objects["secrets", NAMESPACE, rootkey.NAME]["data"][rootkey.KEY])


def put_root_key(cluster: FakeCluster, key: bytes) -> None:
    data = {rootkey.KEY: base64.b64encode(key).decode()}
    cluster.put("secrets", {"metadata": {"name": rootkey.NAME, "namespace": NAMESPACE}, "data": data})


def coordinator(cluster: FakeCluster) -> Object:
    """Return the newest pod of the job's coordinator; empty before there is one."""
    pods = cluster.pods(names.ROLE_COORDINATOR)
    return max(pods, key=lambda pod: int(pod["metadata"]["labels"][names.LABEL_INCARNATION]), default={})


def address(pod: Object) -> str:
    return f"{pod['status']['podIP']}:{names.COORDINATOR_PORT}"


def tokens_shown(cluster: FakeCluster, heard: Listening) -> set[str]:
    """Return the tokens that the newest coordinator was shown, once it runs."""
    cluster.run_pods()
    pod = coordinator(cluster)
    runs = "podIP" in (pod.get("status") or {})
    return {token for at, token in heard.shown if runs and at == address(pod)}


async def test_replaced_root_key_reaches_the_coordinator_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ROOT_KEY_SECONDS", 0.2)
    cluster, heard = FakeCluster(), Listening()
    job = Job.parse(cluster.add_job())
    async with operator(cluster, heard, root_key=None, resync=600.0):
        await until(lambda: tokens_shown(cluster, heard), "the first coordinator to be called")
        first, old = coordinator(cluster), JobCredentials.of(root_key(cluster), job)
        assert tokens_shown(cluster, heard) == {old.token}
        cluster.remove("secrets", NAMESPACE, rootkey.NAME)

        def called() -> bool:
            pod = coordinator(cluster)
            return pod["metadata"]["name"] != first["metadata"]["name"] and bool(tokens_shown(cluster, heard))

        await until(called, "the second coordinator to be called", 20)
        new = JobCredentials.of(root_key(cluster), job)
        assert new.key != old.key
        pod = coordinator(cluster)
        assert pod["metadata"]["annotations"][names.ANNOTATION_KEY] == f"{new.key},{old.key}"
        assert tokens_shown(cluster, heard) == {new.token}
        assert {token for at, token in heard.shown if at == address(first)} == {old.token}
    secrets = [one for kind, _, one in cluster.objects if kind == "secrets"]
    for credentials in (old, new):
        assert names.secret_name("digits", job.uid, credentials.key) in secrets
    # None of these pods was asked to go.
    assert {pod["metadata"]["annotations"][names.ANNOTATION_KEY] for pod in cluster.pods()} == {old.key}
    assert not any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods())


async def test_root_key_that_cannot_be_read_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ROOT_KEY_SECONDS", 0.1)
    cluster, heard = FakeCluster(), Listening()
    cluster.add_job()
    async with operator(cluster, heard, root_key=None, resync=600.0) as running:
        await until(lambda: tokens_shown(cluster, heard), "the first coordinator to be called")
        first = coordinator(cluster)
        put_root_key(cluster, b"short")
        before = cluster.calls["get_secret"]
        await until(lambda: cluster.calls["get_secret"] > before + 2, "the root key to be read again")
        calls = len(heard.told)
        await until(lambda: len(heard.told) > calls, "another call")
        assert running.unready() is None
        assert coordinator(cluster)["metadata"]["name"] == first["metadata"]["name"]
        put_root_key(cluster, b"a key of sixteen bytes and more")
        name = first["metadata"]["name"]
        await until(lambda: coordinator(cluster)["metadata"]["name"] != name, "another coordinator")
