"""The operator's process over a cluster in memory: what it does when calls fail, when others write, when it
loses its lease; and how fast a death reaches the coordinator."""

from __future__ import annotations

import asyncio
import copy
import time
from functools import partial
from typing import Any

import aiohttp
import pytest
from operator_cluster import FakeCluster, FakeCoordinator
from operator_running import operator, until

from springtide_kube.errors import ApiError
from springtide_operator import lease
from springtide_operator.api import names
from springtide_operator.job_loop import JobLoop
from springtide_operator.plan.ledger import timestamp
from springtide_protocol import coordinator_pb2 as pb

Object = dict[str, Any]


async def test_a_job_gets_its_pods_and_status() -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=3)
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 3, "three workers")
    assert len(cluster.pods(names.ROLE_COORDINATOR)) == 1
    status = cluster.job()["status"]
    assert status["coordinator"]["incarnation"] == 1
    assert status["coordinator"]["address"] == "10.7.7.7:7070"
    assert cluster.calls["patch_status"] < 12


async def test_without_any_watch_the_resync_is_enough() -> None:
    cluster = FakeCluster()
    async with operator(cluster, watch=False, resync=0.1):
        cluster.add_job(replicas=2)
        await until(lambda: len(cluster.pods()) == 2, "two workers")
        cluster.remove("pods", "default", "digits-worker-0-0")
        await until(
            lambda: (
                {p["metadata"]["name"] for p in cluster.pods()} == {"digits-worker-0-1", "digits-worker-1-0"}
            ),
            "the replacement",
        )


async def test_death_reaches_coordinator_at_once_not_at_next_tick() -> None:
    cluster, coordinator = FakeCluster(), FakeCoordinator()
    cluster.add_job(replicas=3)
    async with operator(cluster, coordinator, tick=120.0):
        await until(lambda: len(cluster.pods()) == 3, "three workers")
        cluster.run_pods()
        await until(lambda: coordinator.told and len(coordinator.told[-1][2].living) == 3, "the first word")
        dead = cluster.pods()[1]
        dead["status"] = {
            "phase": "Failed",
            "containerStatuses": [
                {
                    "name": "worker",
                    "state": {"terminated": {"exitCode": 137, "finishedAt": timestamp(time.time())}},
                }
            ],
        }
        before = len(coordinator.told)
        cluster.put("pods", dead)

        def told() -> list[tuple[str, pb.SyncRequest]]:
            """Return the calls since then, without one that was under way."""
            uid, since = dead["metadata"]["uid"], coordinator.told[before:]
            return [(at, said) for _, at, said in since if uid not in {pod.uid for pod in said.living}]

        await until(told, "the word of the death")
        address, request = told()[0]
    assert address.endswith(":7070")
    assert request.observed
    assert request.target == 3
    assert request.incarnation_number == 1
    assert coordinator.open == 0


async def test_what_is_heard_of_while_the_operator_ends_begins_nothing() -> None:
    cluster, coordinator = FakeCluster(), FakeCoordinator()
    cluster.add_job(replicas=1)
    async with operator(cluster, coordinator) as made:
        await until(lambda: cluster.pods(), "a worker")
        cluster.run_pods()
        await until(lambda: coordinator.told, "a call")
        ending = asyncio.create_task(made.stop())
        deadline = time.monotonic() + 60.0
        while not ending.done():
            assert time.monotonic() < deadline, "the operator does not end"
            await asyncio.sleep(0)
            cluster.put("trainingjobs", copy.deepcopy(cluster.job()))
        await ending
        left = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in left if name.endswith("default/digits")]
    assert coordinator.open == 0


async def test_a_deletion_is_relayed_with_its_deadline() -> None:
    cluster, coordinator = FakeCluster(), FakeCoordinator()
    cluster.add_job(replicas=1)
    async with operator(cluster, coordinator, tick=5.0):
        await until(lambda: cluster.pods(), "a worker")
        cluster.run_pods()
        await until(lambda: coordinator.told, "the first word")
        pod = cluster.pods()[0]
        pod["metadata"] |= {
            "deletionTimestamp": timestamp(time.time() + 40),
            "deletionGracePeriodSeconds": 40,
        }
        cluster.put("pods", pod)
        uid = pod["metadata"]["uid"]
        await until(
            lambda: any(
                p.uid == uid and p.leave_by > time.time() + 30
                for _, _, r in coordinator.told
                for p in r.living
            ),
            "the word of the deletion",
        )


async def test_the_coordinators_word_is_status_at_once() -> None:
    cluster, coordinator = FakeCluster(), FakeCoordinator()
    cluster.add_job(replicas=1)
    async with operator(cluster, coordinator):
        await until(lambda: cluster.pods(), "a worker")
        cluster.run_pods()
        uid = cluster.pods()[0]["metadata"]["uid"]
        coordinator.reply = pb.SyncReply(phase=pb.RUNNING, samples_per_second=12.5, goodput=0.5)
        coordinator.reply.generation.number = 4
        coordinator.reply.state.step = 9
        coordinator.reply.members.add(standing=pb.ACTIVE, connected=True).member.pod_uid = uid
        await until(lambda: cluster.job()["status"].get("state") == "Running", "state Running")
        status = cluster.job()["status"]
        assert (status["generation"], status["step"], status["workers"]["summary"]) == (4, 9, "1/1")
        coordinator.error = "UNAVAILABLE: gone"
        told = len(coordinator.told)
        await until(lambda: len(coordinator.told) > told + 2, "more calls")
        assert cluster.job()["status"]["state"] == "Running"
        assert len(cluster.pods()) == 1


async def test_somebody_elses_write_is_read_before_the_next_plan() -> None:
    """The status write carries the version it was planned from: on a conflict nothing is done by it."""
    cluster = FakeCluster()
    cluster.add_job(replicas=2)
    stolen = []

    def meddle(method: str, name: str) -> None:
        if method == "patch_status" and len(stolen) < 2:
            stolen.append(name)
            job = cluster.job()
            job["metadata"].setdefault("annotations", {})["note"] = str(len(stolen))
            watchers, cluster.watchers = cluster.watchers, []  # its watch event is late
            cluster.put("trainingjobs", job)
            cluster.watchers = watchers

    cluster.before = meddle
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 2, "two workers")
    assert cluster.calls["get_job"] == 2
    assert len(cluster.pods(names.ROLE_COORDINATOR)) == 1


async def test_an_outage_is_told_and_survived() -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=2)
    async with operator(cluster, resync=0.1) as made:
        await until(lambda: len(cluster.pods()) == 2, "two workers")
        cluster.down = True
        await until(lambda: made.unready() is not None, "the trouble to be told")
        assert "does not answer" in str(made.unready())
        cluster.down = False
        await until(lambda: made.unready() is None, "the trouble to be over")
        job = cluster.job()
        job["spec"]["workers"]["replicas"] = 3
        cluster.put("trainingjobs", job)
        await until(lambda: len(cluster.pods()) == 3, "three workers")


async def test_operator_started_before_api_server_says_so_and_waits() -> None:
    cluster = FakeCluster()
    cluster.down = True
    cluster.add_job(replicas=1)
    async with operator(cluster, resync=0.1) as made:
        await until(lambda: "does not answer" in str(made.unready()), "a try")
        assert not made.acting
        cluster.down = False
        await until(lambda: cluster.pods(), "a worker")


async def test_only_the_holder_of_the_lease_acts() -> None:
    cluster = FakeCluster()
    async with operator(cluster, identity="one") as first:
        await until(lambda: first.acting, "the first to act")
        async with operator(cluster, identity="two") as second:
            cluster.add_job(replicas=2)
            await until(lambda: len(cluster.pods()) == 2, "two workers")
            assert not second.acting
            assert second.unready() is None
            assert cluster.calls["create_pod"] == 3
            assert len({p["metadata"]["name"] for p in cluster.pods()}) == 2


async def test_standby_has_looked_at_everything_when_lease_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Look at everything between the moment when a silent holder acts no more and the end of its lease."""
    ahead = 0.0
    clocked = partial(lease.Lease, clock=lambda: time.monotonic() + ahead)
    monkeypatch.setattr("springtide_operator.runtime.Lease", clocked)
    monkeypatch.setattr(lease, "SILENT", 0.3)
    monkeypatch.setattr(lease, "STANDBY_RETRY", 0.1)
    cluster = FakeCluster()
    cluster.add_job(replicas=2)
    spec = {"holderIdentity": "dead", "renewTime": "long ago", "leaseDurationSeconds": 600}
    cluster.put("leases", {"metadata": {"name": lease.NAME, "namespace": "springtide-system"}, "spec": spec})
    async with operator(cluster, identity="two", resync=600.0, namespace="springtide-system") as made:
        await until(lambda: cluster.calls["list_jobs"] == 2, "the list after the silence")
        assert not made.acting
        assert cluster.pods() == []
        ahead = 600.0
        await until(lambda: len(cluster.pods()) == 2, "two workers")
        assert made.acting
        assert cluster.calls["list_jobs"] == 2


async def test_what_was_seen_before_another_silence_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SILENT", 0.2)
    monkeypatch.setattr(lease, "STANDBY_RETRY", 0.05)
    cluster = FakeCluster()
    spec = {"holderIdentity": "dead", "renewTime": "first", "leaseDurationSeconds": 600}
    held = {"metadata": {"name": lease.NAME, "namespace": "springtide-system"}, "spec": spec}
    cluster.put("leases", held)
    async with operator(cluster, identity="two", resync=600.0, namespace="springtide-system") as made:
        await until(lambda: cluster.calls["list_jobs"] == 2, "the list after the silence")
        monkeypatch.setattr(
            lease, "SILENT", 600.0
        )  # it was not dead: it renews, and then gives the lease back
        cluster.put("leases", {**held, "spec": {**spec, "renewTime": "second"}})
        before = cluster.calls["get_lease"]
        await until(lambda: cluster.calls["get_lease"] >= before + 2, "a look at that")
        cluster.put("leases", {**held, "spec": {**spec, "renewTime": "third", "holderIdentity": ""}})
        await until(lambda: made.acting, "it to act")
        assert cluster.calls["list_jobs"] == 3


async def test_jobs_that_something_happened_to_last_are_seen_to_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, woken = FakeCluster(), []
    for name in ("a", "b", "c"):
        cluster.add_job(name)
    async with operator(cluster, resync=0.2):
        await until(lambda: len(cluster.pods()) == 6, "all jobs")
        monkeypatch.setattr(JobLoop, "wake", lambda loop: woken.append(loop.key[1]))
        for _ in range(20):  # one that is still at work may write its status in between, which is a change
            for name in ("c", "a", "b"):
                cluster.put("trainingjobs", cluster.job(name))
            woken.clear()
            await until(lambda: len(woken) >= 3, "the next list")
            if woken[:3] == ["b", "a", "c"]:
                return
    pytest.fail(f"jobs that were changed in the order c, a, b were seen to in the order {woken[:3]}")


async def test_a_taken_name_is_passed_over() -> None:
    cluster = FakeCluster()
    foreign = {"metadata": {"name": "digits-worker-0-0", "namespace": "default", "uid": "x", "labels": {}}}
    foreign["metadata"]["labels"] = {names.LABEL_ROLE: "somebody"}
    cluster.put("pods", foreign)
    cluster.add_job(replicas=1)
    async with operator(cluster):
        await until(lambda: cluster.pods(), "a worker")
    assert [p["metadata"]["name"] for p in cluster.pods()] == ["digits-worker-0-1"]


async def test_a_creation_whose_answer_was_lost_is_found_again() -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=1)
    lost = []
    create = cluster.create_pod

    async def lossy(pod: Object) -> Object:
        made = await create(pod)
        if "worker" in pod["metadata"]["name"] and not lost:
            lost.append(made)
            raise ApiError(0, "Unreachable", "no answer in time")
        return made

    cluster.create_pod = lossy  # type: ignore[method-assign]
    async with operator(cluster, watch=False):
        await until(lambda: "uid" in cluster.job().get("status", {}).get("slots", {}).get("0", {}), "its uid")
    assert len(cluster.pods()) == 1


async def test_a_foreign_service_is_not_taken_over() -> None:
    cluster = FakeCluster()
    cluster.put("services", {"metadata": {"name": "digits-coordinator", "namespace": "default"}, "spec": {}})
    cluster.add_job(replicas=1)

    def refused() -> bool:
        found = cluster.job().get("status", {}).get("conditions", [])
        return any(c["reason"] == "ServiceRefused" and "does not control" in c["message"] for c in found)

    async with operator(cluster):
        await until(refused, "the refusal to be told")
        assert cluster.pods() == []
        cluster.remove("services", "default", "digits-coordinator")
        await until(lambda: cluster.pods(), "a worker")


async def test_a_job_made_again_under_the_same_name_is_another_job() -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=1)
    async with operator(cluster) as made:
        await until(lambda: cluster.pods(), "a worker")
        cluster.remove("trainingjobs", "default", "digits")
        cluster.remove("services", "default", "digits-coordinator")
        again = cluster.add_job(replicas=1)
        uid = again["metadata"]["uid"]
        await until(
            lambda: any(p["metadata"]["ownerReferences"][0]["uid"] == uid for p in cluster.pods()),
            "its worker",
        )
        new = [p for p in cluster.pods() if p["metadata"]["ownerReferences"][0]["uid"] == uid]
        assert [p["metadata"]["name"] for p in new] == ["digits-worker-0-1"]  # 0-0 is still the old job's
        assert len(made.cache.job_keys()) == 1


async def test_an_unreadable_job_is_told_and_others_go_on() -> None:
    cluster = FakeCluster()
    wrong = cluster.add_job("wrong")
    wrong["spec"] = {"workers": {}}
    cluster.put("trainingjobs", wrong)
    cluster.add_job("right", 1)
    async with operator(cluster):
        await until(lambda: cluster.pods(), "a worker of the other job")
        await until(lambda: "conditions" in cluster.job("wrong").get("status", {}), "a condition")
    condition = cluster.job("wrong")["status"]["conditions"][0]
    assert condition["reason"] == "InvalidSpec"
    assert "spec.workers.template" in condition["message"]


async def test_metrics_come_and_go_with_the_job() -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=2)
    async with operator(cluster) as made, aiohttp.ClientSession() as session:
        base = f"http://127.0.0.1:{made.web_port}"

        async def text(path: str) -> tuple[int, str]:
            async with session.get(base + path) as response:
                return response.status, await response.text()

        await until(lambda: len(cluster.pods()) == 2, "two workers")
        await until(lambda: cluster.job()["status"]["workers"]["replicas"] == 2, "status of two workers")
        _, metrics = await text("/metrics")
        series = 'springtide_job_workers{job_namespace="default",state="existing",training_job="digits"} 2.0'
        assert series in metrics
        assert 'springtide_operator_actions_total{kind="create_worker"} 2.0' in metrics
        assert "springtide_operator_acting 1.0" in metrics
        assert 'springtide_operator_reconciles_total{result="success"}' in metrics
        assert await text("/readyz") == (200, "ok\n")
        assert (await text("/livez"))[0] == 200
        cluster.remove("trainingjobs", "default", "digits")
        _, metrics = await text("/metrics")
        assert "digits" not in metrics


@pytest.mark.parametrize(
    "method", ["patch_status", "create_pod", "apply_service", "create_secret", "create_event"]
)
async def test_any_call_may_fail_a_few_times(method: str) -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=2)
    failed = []

    def fail(called: str, name: str) -> None:
        if called == method and len(failed) < 2:
            failed.append(name)
            raise ApiError(500, "InternalError", "etcd has no leader")

    cluster.before = fail
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 2, "two workers", 15)
        job = cluster.job()
        for replicas in (3, 4):
            job["spec"]["workers"]["replicas"] = replicas
            job = cluster.put("trainingjobs", job)
            await until(lambda: len(cluster.pods()) == replicas, "one more worker", 15)  # noqa: B023
            job = cluster.job()
        await until(lambda: len(failed) == 2, "both failures")
    assert cluster.job()["status"]["restarts"]["total"] == 0


async def test_an_operator_that_ends_as_told_stays_ready() -> None:
    """Kubelets ask until the pod has ended, and make a Warning event of each No."""
    cluster = FakeCluster()
    async with operator(cluster) as made:
        await until(lambda: made.acting and made.unready() is None, "the operator to act")
        seen: list[str | None] = []
        cluster.before = lambda method, name: seen.append(made.unready())  # as it gives its lease back
        await made.stop()
    assert seen
    assert set(seen) == {None}


async def test_event_that_happens_again_is_counted_in_its_object() -> None:
    cluster = FakeCluster()
    cluster.add_job(replicas=1)

    def suspend(value: bool) -> None:
        job = cluster.job()
        job["spec"]["suspend"] = value
        job["metadata"]["generation"] += 1
        cluster.put("trainingjobs", job)

    def counts(reason: str) -> list[int]:
        return [event["count"] for event in cluster.events.values() if event["reason"] == reason]

    async with operator(cluster):
        await until(lambda: cluster.pods(), "a worker")
        for turn in (1, 2):
            suspend(True)
            await until(lambda: sum(counts("JobSuspended")) == turn, f"suspension {turn}")  # noqa: B023
            suspend(False)
            await until(lambda: sum(counts("JobResumed")) == turn, f"resumption {turn}")  # noqa: B023
        assert counts("JobSuspended") == counts("JobResumed") == [2]
        cluster.events.clear()  # as an API server does after an hour
        suspend(True)
        await until(lambda: counts("JobSuspended") == [1], "a new object")
