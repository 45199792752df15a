"""TLS of jobs that do not say: decided once from the operator's default, and kept."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from operator_cluster import FakeCluster, FakeCoordinator
from operator_running import operator, until
from operator_world import World, job_object

from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.plan.decide import invalid

Object = dict[str, Any]


class Lines(FakeCoordinator):
    """Remembers by which certificates it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.authorities: list[str] = []

    def connect(self, address: str, token: str, authority: str = "", operator_token: str = "") -> Any:
        self.authorities.append(authority)
        return super().connect(address, token, authority, operator_token)


def secret_of(cluster: FakeCluster) -> Object:
    found = [
        o for (plural, _, name), o in cluster.objects.items() if plural == "secrets" and "-token-" in name
    ]
    return found[0] if found else {}


def variables(pod: Object) -> set[str]:
    return {entry["name"] for entry in pod["spec"]["containers"][0]["env"]}


def with_tls(cluster: FakeCluster) -> list[bool]:
    """Return for each pod, the coordinator's first, whether it was made for TLS."""
    coordinators = ["SPRINGTIDE_TLS_KEY" in variables(p) for p in cluster.pods(names.ROLE_COORDINATOR)]
    return coordinators + ["SPRINGTIDE_TLS_CA" in variables(p) for p in cluster.pods()]


@contextlib.asynccontextmanager
async def running(cluster: FakeCluster, default: bool) -> AsyncIterator[Lines]:
    """An operator with this default, until it has called the coordinator of the job's three pods."""
    lines = Lines()
    async with operator(cluster, lines, jobs_tls=default):

        def called() -> bool:
            cluster.run_pods()
            return len(cluster.pods()) == 2 and bool(lines.told)

        await until(called, "two workers, and a call of the coordinator")
        yield lines


async def lose_a_worker(cluster: FakeCluster) -> None:
    """Delete one, and wait for the next that takes its place."""
    before = {pod["metadata"]["uid"] for pod in cluster.pods()}
    gone = cluster.pods()[0]["metadata"]
    cluster.remove("pods", gone["namespace"], gone["name"])

    def replaced() -> bool:
        now = {pod["metadata"]["uid"] for pod in cluster.pods()}
        return len(now) == 2 and now != before

    await until(replaced, "a worker in its place")


def say(cluster: FakeCluster, tls: bool) -> None:
    job = cluster.job()
    job["spec"]["security"] = {"tls": tls}
    cluster.put("trainingjobs", job)


@pytest.mark.parametrize("default", [True, False])
async def test_a_new_job_takes_the_operators_default(default: bool) -> None:
    cluster, noted = FakeCluster(), []

    def watch(method: str, name: str) -> None:
        if method in ("create_secret", "create_pod") and name.startswith("digits"):
            noted.append((cluster.job().get("status") or {}).get("tls"))

    cluster.before = watch
    cluster.add_job()
    async with running(cluster, default) as lines:
        assert with_tls(cluster) == [default] * 3
        assert ("tls.crt" in secret_of(cluster)["data"]) is default
        assert [bool(authority) for authority in lines.authorities] == [default]
    assert len(noted) >= 3
    assert set(noted) == {default}  # before anything is made


@pytest.mark.parametrize("own", [True, False])
async def test_a_job_that_says_so_has_no_default(own: bool) -> None:
    cluster = FakeCluster()
    cluster.add_job()
    say(cluster, own)
    async with running(cluster, not own):
        assert with_tls(cluster) == [own] * 3
        assert ("tls.crt" in secret_of(cluster)["data"]) is own
    assert "tls" not in cluster.job()["status"]


@pytest.mark.parametrize("first", [True, False])
async def test_another_default_flips_no_job_that_runs(first: bool) -> None:
    cluster = FakeCluster()
    cluster.add_job()
    async with running(cluster, first):
        pass
    async with running(cluster, not first) as lines:
        await lose_a_worker(cluster)
        assert with_tls(cluster) == [first] * 3
        assert {bool(authority) for authority in lines.authorities} == {first}
    assert cluster.job()["status"]["tls"] is first


async def test_an_upgrade_flips_no_job_that_runs() -> None:
    cluster = FakeCluster()
    cluster.add_job()
    async with running(cluster, False):
        pass
    job = cluster.job()
    del job["status"]["tls"]  # the version before wrote none
    cluster.put("trainingjobs", job)
    async with running(cluster, True) as lines:
        await lose_a_worker(cluster)
        assert with_tls(cluster) == [False] * 3
        assert set(lines.authorities) == {""}


def test_the_note_is_there_before_the_first_incarnation() -> None:
    """An upgrade may come between a job's first look, which makes its Secret, and its first pod."""
    world = World(job_object(1))
    waiting = {"coordinator": {"incarnation": 0}}
    world.job["status"] = waiting
    assert "tls" not in world.plan().status
    world.job["status"] = {}
    assert world.plan().status["tls"] is False


def test_a_job_that_was_refused_first_is_new() -> None:
    world = World(job_object(1))
    world.job["status"] = dict(invalid({}, 1, "spec is wrong", world.now).status)
    assert world.plan().status["tls"] is False


def test_a_forged_note_moves_no_job_that_says_so() -> None:
    raw = job_object(1)
    raw["spec"]["security"] = {"tls": True}
    for forged in (False, "no", None, [], {}):
        assert Job.parse({**raw, "status": {"tls": forged}}).tls
    raw["spec"]["security"] = {}
    for forged in ("true", 1, ["x"], {"a": 1}, None):
        assert not Job.parse({**raw, "status": {"tls": forged}}).tls
