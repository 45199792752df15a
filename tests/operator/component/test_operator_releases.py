"""Releases beside each other on the embedded API server: each runs its own jobs, and no two the same ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from chart_render import ROOT
from local_api import Api
from operator_cluster import FakeCoordinator
from operator_lists import ApiLists
from operator_running import until
from operator_world import job_object

from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.cluster import KubeCluster
from springtide_operator.runtime import Operator
from springtide_operator.settings import Settings

pytest_plugins = ["local_api_fixtures"]
Object = dict[str, Any]
LAB = "example.com/lab"


@pytest.fixture
def place(api: Api, monkeypatch: pytest.MonkeyPatch) -> Api:
    """A server with the CRD, to which operators connect."""
    api.do("apply", "-f", str(ROOT / "deploy/crd"))
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
    return api


@contextlib.asynccontextmanager
async def release(
    namespace: str, on_death: Callable[[str], None] = lambda why: None, **changes: Any
) -> AsyncIterator[Operator]:
    given = {"identity": f"pod-of-{namespace}", "release": f"release-{namespace}", "tick": 0.2, "resync": 0.5}
    settings = Settings(
        namespace=namespace, bind="127.0.0.1", metrics_port=0, root_key=b"k" * 32, **{**given, **changes}
    )
    lists = ApiLists()
    operator = Operator(settings, lists, connect=FakeCoordinator().connect, on_death=on_death)
    lists.feed = operator
    await operator.start()
    try:
        yield operator
    finally:
        await operator.stop()
        await lists.close()


def make_job(place: Api, namespace: str, name: str, managed_by: str | None) -> str:
    """Create a job; return its path."""
    job = job_object(1)
    job["metadata"] = {"name": name, "namespace": namespace}
    job.pop("status", None)
    if managed_by is not None:
        job["spec"]["managedBy"] = managed_by
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}"
    place.ok("POST", path, job)
    return f"{path}/{name}"


def made_for(place: Api, namespace: str, job: str) -> list[str]:
    """Names of all that exists for a job."""
    found = []
    for kind in ("pods", "secrets", "services", "events"):
        items = place.ok("GET", f"/api/v1/namespaces/{namespace}/{kind}")["items"]
        found += [item["metadata"]["name"] for item in items if item["metadata"]["name"].startswith(job)]
    return found


async def test_each_release_runs_the_jobs_of_its_class(place: Api) -> None:
    with place.namespace() as one, place.namespace() as two, place.namespace() as jobs:
        plain, lab = make_job(place, jobs, "plain", None), make_job(place, jobs, "lab", LAB)

        def has_coordinator(name: str) -> bool:
            return any("coordinator" in item for item in made_for(place, jobs, name))

        async with release(one, release="shop"):
            await until(lambda: has_coordinator("plain"), "the coordinator of the first job")
            untouched = place.ok("GET", lab)
            assert "status" not in untouched
            assert made_for(place, jobs, "lab") == []
            async with release(two, managed_by=LAB) as second:
                await until(lambda: has_coordinator("lab"), "the coordinator of the other class's job")
                assert second.cache.job_keys() == [(jobs, "lab")]
        writers = {entry["manager"] for entry in place.ok("GET", plain)["metadata"]["managedFields"]}
        assert len(writers) <= 2


async def test_second_release_of_the_class_ends_and_says_why(place: Api) -> None:
    with place.namespace() as one, place.namespace() as two, place.namespace() as jobs:
        deaths: list[str] = []
        async with release(one) as first:
            await until(lambda: first.acting, "the first release to act")
            async with release(two, on_death=deaths.append) as second:
                await until(lambda: deaths, "the second release to end", 20)
                assert f"{one}/springtide-operator" in deaths[0]
                assert f"'release-{one}'" in deaths[0]
                assert "jobs.managedBy" in deaths[0]
                assert second.dead() == deaths[0]
                make_job(place, jobs, "digits", None)
                await until(lambda: made_for(place, jobs, "digits"), "the first release to run the job")
                assert not second.acting
            assert first.acting
        # The first has given its Lease back: the other may begin.
        async with release(two) as second:
            await until(lambda: second.acting, "the second release, now alone", 10)


@pytest.mark.parametrize("first_sees_all", [True, False])
async def test_release_of_some_namespaces_ends_beside_one_with_them(place: Api, first_sees_all: bool) -> None:
    with place.namespace() as one, place.namespace() as two, place.namespace() as jobs:
        deaths: list[str] = []
        async with release(one, watched=() if first_sees_all else (jobs, one)) as first:
            await until(lambda: first.acting, "the first release to act")
            async with release(two, watched=(jobs,), on_death=deaths.append) as second:
                await until(lambda: deaths, "the second release to end", 20)
                assert f"{one}/springtide-operator" in deaths[0]
                assert not second.acting
            assert first.acting
            assert first.dead() is None


async def test_without_the_right_it_sees_its_own_lease_and_says_so(
    place: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(self: KubeCluster, name: str) -> None:
        raise ApiError(403, "Forbidden", "leases.coordination.k8s.io is forbidden")

    with place.namespace() as one, place.namespace() as two, place.namespace() as jobs:
        async with release(one) as first:
            await until(lambda: first.acting, "the first release to act")
            monkeypatch.setattr(KubeCluster, "list_leases", refuse)
            async with release(two, watched=(jobs,)) as second:
                await until(lambda: second.acting, "the second release to act")
                assert second.dead() is None
    assert "whether other releases run the same jobs cannot be seen" in caplog.text


async def test_releases_of_other_namespaces_run_side_by_side(place: Api) -> None:
    with place.namespace() as one, place.namespace() as two, place.namespace() as jobs:
        async with release(one, watched=(jobs,)) as first, release(two, watched=(two,)) as second:
            await until(lambda: first.acting and second.acting, "both to act")
            await asyncio.sleep(0)
            assert (first.dead(), second.dead()) == (None, None)
