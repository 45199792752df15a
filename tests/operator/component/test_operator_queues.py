"""Other schedulers on a cluster: gang start and Kueue, against stand-ins of their controllers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import kueue_standin
import pytest
from chart_render import render
from e2e_cluster import E2ECluster, RefusedError, cluster
from gang_standin import CRDS, SCHEDULERS, gang_scheduler
from kueue_standin import V1BETA1, V1BETA2, Kueue
from kueue_webhook import ACCOUNT, ACCOUNT_NAMESPACE, GATE, PodWebhook, grant
from operator_fake_worker import FakeJob, read

Object = dict[str, Any]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2ECluster]:
    with cluster(tmp_path_factory.mktemp("queues")) as running:
        running.kubectl("apply", "-f", str(CRDS), "-f", str(kueue_standin.CRDS))
        yield running


@pytest.fixture
def job(system: E2ECluster) -> Iterator[FakeJob]:
    with system.namespace(f"queues-{secrets.token_hex(4)}") as namespace:
        yield FakeJob(system, namespace, "fake")


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_pods_start_together_when_the_group_is_whole(
    system: E2ECluster, job: FakeJob, scheduler: str
) -> None:
    api = SCHEDULERS[scheduler][0]
    plural = f"podgroups.{api.partition('/')[0]}"

    def group() -> Object:
        return read(system, plural, job.status()["gang"]["podGroup"], "-n", job.namespace)

    def start(**requests: str) -> None:
        asks = {"resources": {"requests": requests, "limits": requests}}
        job.start(replicas=2, pod={"schedulerName": scheduler}, container=asks)

    chip = "springtide.test/chip"
    start(cpu="100m", **{chip: "1"})
    system.until(60, "pods that wait for the scheduler", lambda: len(job.pods()) == 2)
    assert group()["spec"]["minMember"] == 2  # one worker and the coordinator
    assert group()["spec"]["minResources"][chip] == "1"
    # What is asked for follows an edit, also where it becomes less.
    start(cpu="100m")
    system.until(60, "the PodGroup to ask for less", lambda: chip not in group()["spec"]["minResources"])
    system.kubectl(*job.patch_of(workers={"minReplicas": 2}))
    system.until(60, "the PodGroup to grow", lambda: group()["spec"]["minMember"] == 3)
    with gang_scheduler(system, job.namespace):
        job.until_running("0-1", "1-1", seconds=60)  # the edit replaced what had not begun
    assert job.status()["gang"]["apiVersion"] == api
    made = group()
    assert made["metadata"]["ownerReferences"][0]["kind"] == "TrainingJob"
    assert made["spec"]["minResources"]["cpu"] == "250m"  # two workers' and the coordinator's
    job.until_events("GangRequested")
    system.kubectl(*job.patch_of(suspend=True))
    system.until(
        60,
        "the PodGroup to go with the pods",
        lambda: not read(system, plural, "-n", job.namespace)["items"] and "gang" not in job.status(),
    )


@pytest.mark.slow
def test_kubernetes_own_group_comes_and_goes_with_pods(system: E2ECluster, job: FakeJob) -> None:
    plural = "podgroups.scheduling.k8s.io"
    probe = {"name": "probe", "image": "probe"}
    pod = {"containers": [probe], "schedulingGroup": {"podGroupName": "probe"}}
    try:
        system.kubectl(
            "create",
            "--dry-run=server",
            "--validate=strict",
            "-n",
            job.namespace,
            "-f",
            "-",
            stdin=json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": pod}),
        )
    except RefusedError as error:
        pytest.skip(f"pods know no schedulingGroup before Kubernetes 1.36: {error}")

    def size() -> int:
        group = read(system, plural, job.status()["gang"]["podGroup"], "-n", job.namespace)
        return int(group["spec"]["schedulingPolicy"]["gang"]["minCount"])

    job.start(replicas=2, gangScheduling="Kubernetes")
    job.until_running("0-0", "1-0", seconds=60)
    assert job.status()["gang"]["apiVersion"] == "scheduling.k8s.io/v1alpha3"
    assert size() == 2  # one worker and the coordinator
    system.kubectl(*job.patch_of(workers={"minReplicas": 2}))
    system.until(60, "the PodGroup to grow", lambda: size() == 3)
    system.kubectl(*job.patch_of(suspend=True))
    system.until(
        60,
        "the PodGroup to go with the pods",
        lambda: not read(system, plural, "-n", job.namespace)["items"] and "gang" not in job.status(),
    )


CLASSES = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: spot}
spec: {nodeLabels: {pool: spot}, tolerations: [{key: spot, operator: Exists}]}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: urgent}
value: 1000
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: high}
value: 70
"""


@pytest.mark.slow
def test_queued_job_starts_when_admitted_leaves_when_evicted(system: E2ECluster, job: FakeJob) -> None:
    system.kubectl("apply", "-f", "-", stdin=CLASSES)
    node = read(system, "nodes")["items"][0]["metadata"]["name"]
    system.kubectl("label", "node", node, "pool=spot", "--overwrite")
    queue = Kueue(system, job.namespace)
    labels = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "urgent"}
    job.start(replicas=3, pod={"priorityClassName": "high"}, labels=labels)
    asked = queue.until("queued")["spec"]
    assert [(one["name"], one["count"]) for one in asked["podSets"]] == [("coordinator", 1), ("workers", 3)]
    assert (asked["queueName"], asked["priority"], asked["podSets"][1]["minCount"]) == ("team-a", 1000, 1)
    job.until_condition("Suspended", "Queued", seconds=60)
    assert job.pods() == job.pods("coordinator") == {}
    system.kubectl(*job.patch_of(workers={"replicas": 2}))
    system.until(
        60, "the Workload to follow", lambda: queue.until("queued")["spec"]["podSets"][1]["count"] == 2
    )

    queue.admit(workers=1, flavor="spot")
    job.until_running("0-0", seconds=60)
    worker = job.pods()["fake-worker-0-0"]
    assert worker["spec"]["nodeName"] == node
    assert worker["spec"]["nodeSelector"] == {"pool": "spot", "kubernetes.io/os": "linux"}
    assert job.until_condition("Degraded", "QueueLimitsSize", seconds=60)["message"].startswith(
        "the queue team-a"
    )

    queue.evict()
    system.until(
        60, "the reservation to be given back", lambda: "admission" not in queue.until("Requeued")["status"]
    )
    assert job.pods("coordinator") == {}
    job.until_condition("Suspended", "EvictedFromQueue")
    system.kubectl("label", "stj/fake", "-n", job.namespace, "kueue.x-k8s.io/priority-class-")
    system.until(60, "the pods' priority", lambda: queue.until("queued")["spec"].get("priority") == 70)

    queue.admit()
    job.until_running("0-1", "1-0", seconds=60)
    system.kubectl(*job.patch_of(activeDeadlineSeconds=1))
    told = kueue_standin.condition(queue.until("Finished"), "Finished")
    assert told["reason"] == "Failed"
    assert "activeDeadlineSeconds" in told["message"]
    job.until_events("Queued", "Admitted", "EvictedFromQueue")


def test_a_suspended_job_leaves_the_queue(system: E2ECluster, job: FakeJob) -> None:
    queue = Kueue(system, job.namespace)
    job.start(labels={"kueue.x-k8s.io/queue-name": "team-a"})
    queue.admit()
    job.until_running("0-0", seconds=60)
    system.kubectl(*job.patch_of(suspend=True))
    system.until(60, "the Workload to go", lambda: queue.workload() is None)
    assert job.pods() == {}


QUEUED = {"kueue.x-k8s.io/queue-name": "team-a"}
JOBS = "TrainingJob.v1alpha1.springtide.dev"


@pytest.mark.slow
def test_job_lives_through_other_versions_of_kueue(system: E2ECluster, job: FakeJob) -> None:
    try:
        kueue_standin.serve(system, V1BETA1)
        classes = CLASSES.replace("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
        system.until(60, "the old version", lambda: system.kubectl("apply", "-f", "-", stdin=classes))
        job.start(replicas=3, labels={**QUEUED, "kueue.x-k8s.io/priority-class": "urgent"})
        old = Kueue(system, job.namespace, V1BETA1)
        asked = old.until("queued")["spec"]
        assert asked["priorityClassSource"] == "kueue.x-k8s.io/workloadpriorityclass"
        assert (asked["priorityClassName"], asked["priority"]) == ("urgent", 1000)
        old.admit()
        job.until_running("0-0", "1-0", "2-0", seconds=60)

        kueue_standin.serve(system)  # Kueue is away
        job.until_condition("Degraded", "QueueUnavailable", seconds=60)
        late = FakeJob(system, job.namespace, "late").start(labels=QUEUED)
        late.until_condition("Degraded", "QueueUnavailable", seconds=60)
        assert late.pods() == late.pods("coordinator") == {}
        system.kubectl(*job.patch_of(workers={"replicas": 4}))
        job.until_running("0-0", "1-0", "2-0", seconds=60)

        kueue_standin.serve(system, V1BETA2)
        new = Kueue(system, job.namespace, V1BETA2)
        system.until(90, "both Workloads", lambda: len(new.workloads()) == 2)
        assert late.pods() == {}
        job.until_running("0-0", "1-0", "2-0", seconds=60)
        system.kubectl(*job.patch_of(workers={"replicas": 1}))

        def given_back() -> bool:
            found = next(one for one in new.workloads() if one["metadata"]["name"].startswith("fake"))
            return kueue_standin.quota(found) == {"coordinator": 1, "workers": 1}

        system.until(60, "quota to be given back", given_back)
    finally:
        kueue_standin.serve(system, V1BETA2, V1BETA1)


def test_elastic_job_grows_while_its_workers_run(system: E2ECluster, job: FakeJob) -> None:
    queue = Kueue(system, job.namespace)
    job.start(replicas=1, labels=QUEUED, annotations={"kueue.x-k8s.io/elastic-job": "true"})
    queue.admit()
    job.until_running("0-0", seconds=60)
    system.kubectl(*job.patch_of(workers={"replicas": 3}))
    queue.grow()
    job.until_running("0-0", "1-0", "2-0", seconds=60)
    system.until(60, "the first Workload to go", lambda: len(queue.workloads()) == 1)
    assert queue.workloads()[0]["metadata"]["name"] == job.status()["queue"]["workload"]
    assert job.status()["queue"]["workers"] == 3


@pytest.mark.slow
def test_kueues_webhook_lets_pods_pass_with_the_charts_rights(system: E2ECluster, job: FakeJob) -> None:
    webhook = PodWebhook(system, (JOBS,), default_queue=True)
    webhook.install()
    queue = Kueue(system, job.namespace)
    job.start(labels=QUEUED)
    queue.admit()
    job.until_running("0-0", seconds=60)
    pods = job.all_pods()
    assert len(pods) == 2
    with pytest.raises(RefusedError, match="forbidden"):
        webhook.admit(pods[0])  # what the configuration alone would come to
    values = {"kueue": {"serviceAccount": f"{ACCOUNT_NAMESPACE}/{ACCOUNT}"}}
    made = [one for one in render(values) if one["metadata"]["name"] == "springtide-kueue"]
    grant(system, made)
    for pod in pods:
        assert webhook.admit(pod) == pod

    loose = FakeJob(system, job.namespace, "loose").start()
    loose.until_running("0-0", seconds=60)
    for pod in loose.all_pods():
        assert {"name": GATE} in webhook.admit(pod)["spec"]["schedulingGates"], "no job names its queue"
        assert PodWebhook(system, (JOBS,)).admit(pod) == pod
        assert PodWebhook(system).admit(pod) == pod, "Kueue does not know the owner, and asks nobody"
    # Where all jobs are to be in queues, the walk ends at the job, with or without a queue.
    assert PodWebhook(system, (JOBS,), without_queue_name=True).admit(pods[0]) == pods[0]
