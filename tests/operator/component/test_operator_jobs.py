"""The installed operator on a cluster, with workers that only pretend to train."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator

import pytest
import yaml
from e2e_cluster import OPERATOR_LABELS, OPERATOR_NAMESPACE, ROOT, E2ECluster, RefusedError, cluster
from operator_fake_worker import FakeJob, kill, read

pytestmark = pytest.mark.timeout(400)

Start = Callable[..., FakeJob]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2ECluster]:
    with cluster(tmp_path_factory.mktemp("operator")) as running:
        yield running


@pytest.fixture
def namespace(system: E2ECluster) -> Iterator[str]:
    with system.namespace(f"op-{secrets.token_hex(4)}") as name:
        yield name


@pytest.fixture
def job(system: E2ECluster, namespace: str) -> FakeJob:
    return FakeJob(system, namespace, "fake")


def kill_operator(system: E2ECluster) -> None:
    pods = read(system, "pods", "-n", OPERATOR_NAMESPACE, "-l", OPERATOR_LABELS)["items"]
    kill(system, next(pod for pod in pods if "deletionTimestamp" not in pod["metadata"]))


def test_a_job_is_made_scaled_and_deleted(system: E2ECluster, job: FakeJob) -> None:
    job.start(replicas=3)
    first = job.until_running("0-0", "1-0", "2-0")
    for pod in (*job.pods().values(), *job.pods("coordinator").values()):
        assert pod["metadata"]["ownerReferences"][0]["uid"] == job.read()["metadata"]["uid"]
        assert "finalizers" not in pod["metadata"]
    assert "finalizers" not in job.read()["metadata"]

    system.kubectl("scale", "stj/fake", "-n", job.namespace, "--replicas=5")
    grown = job.until_running("0-0", "1-0", "2-0", "3-0", "4-0")
    system.kubectl("scale", "stj/fake", "-n", job.namespace, "--replicas=2")
    shrunk = job.until_running("0-0", "1-0")
    assert first.items() <= grown.items()
    assert shrunk.items() <= first.items()
    assert job.status()["restarts"]["total"] == 0
    with pytest.raises(RefusedError, match=r"must lie between .* workers\.maxReplicas"):
        system.kubectl("scale", "stj/fake", "-n", job.namespace, "--replicas=7")
    header = system.kubectl("get", "stj", "-n", job.namespace).splitlines()[0].split()
    assert header == ["NAME", "STATE", "WORKERS", "PS", "STEP", "SAMPLES/S", "GOODPUT", "RESTARTS", "AGE"]
    wide = system.kubectl("get", "stj", "-n", job.namespace, "-o", "wide").splitlines()[0].split()
    assert wide == [*header, "PROGRESS", "ETA", "TEMPLATE", "MESSAGE"]

    system.kubectl("delete", "stj/fake", "-n", job.namespace, "--timeout=60s")

    def left() -> list[str]:
        kinds = "pods,services,secrets,networkpolicies"
        return system.kubectl(
            "get", kinds, "-n", job.namespace, "-l", "springtide.dev/job=fake", "-o", "name"
        ).split()

    system.until(60, "all that the job made to go", lambda: not left())


@pytest.mark.slow
def test_lost_workers_are_replaced_and_only_failures_count(system: E2ECluster, job: FakeJob) -> None:
    job.start(replicas=3)
    before = job.until_running("0-0", "1-0", "2-0")
    system.kubectl("delete", "pod", "fake-worker-0-0", "-n", job.namespace, "--wait=false")
    job.until_running("0-1", "1-0", "2-0")
    system.kubectl("delete", "pod", "fake-worker-1-0", "-n", job.namespace, "--force", "--grace-period=0")
    job.until_running("0-1", "1-1", "2-0")
    kill(system, job.pods()["fake-worker-0-1"])
    after = job.until_running("0-2", "1-1", "2-0")
    assert after["fake-worker-2-0"] == before["fake-worker-2-0"]
    # Whoever vanishes before the operator looks, and another one within ten seconds, are one decision.
    restarts = job.status()["restarts"]
    assert (restarts["failedWorkers"], restarts["preemptedWorkers"]) == (1, 2)
    assert job.status()["lastFailure"]["pod"] == "fake-worker-0-1"
    assert "signal 9" in job.status()["lastFailure"]["message"]
    job.until_events("WorkerFailed", "WorkerPreempted")


@pytest.mark.slow
def test_an_operator_that_dies_is_followed_by_one_that_goes_on(system: E2ECluster, job: FakeJob) -> None:
    job.start(replicas=2)
    job.until_running("0-0", "1-0")
    other = {"name": "other", "image": system.image, "command": ["sleep", "60"]}
    taken = {
        "metadata": {"name": "fake-worker-3-0"},
        "spec": {"schedulerName": "nobody", "containers": [other]},
    }
    system.apply({"apiVersion": "v1", "kind": "Pod", **taken}, namespace=job.namespace)
    kill_operator(system)
    kill(system, job.pods()["fake-worker-0-0"])
    system.kubectl("scale", "stj/fake", "-n", job.namespace, "--replicas=4")
    system.kubectl("delete", "pod", "fake-coordinator-1", "-n", job.namespace, "--force", "--grace-period=0")
    job.until_running("0-1", "1-0", "2-0", "3-1", seconds=120)  # the name of 3-0 is somebody's
    system.until(60, "the next coordinator", lambda: list(job.pods("coordinator")) == ["fake-coordinator-2"])
    status = job.status()
    assert status["restarts"]["failures"] == 1
    assert status["coordinator"]["incarnation"] == 2


def test_success_is_what_a_worker_says(job: FakeJob) -> None:
    job.start("finish", replicas=2)
    job.until_condition("Succeeded")
    status = job.status()
    assert status["state"] == "Succeeded"
    assert status["step"] == 12
    assert status["values"] == {"accuracy": "0.9"}
    assert status["data"]["totalSeen"] == 64
    job.cluster.until(60, "the coordinator to go", lambda: not job.pods("coordinator"))
    assert job.pods()  # ended ones stay, for their logs


def test_exit_code_0_is_no_success(job: FakeJob) -> None:
    job.start("exit0", failurePolicy={"backoffLimit": 0})
    failed = job.until_condition("Failed", "BackoffLimitExceeded")
    assert "springtide.init()" in failed["message"]
    job.cluster.until(60, "the coordinator to go", lambda: not job.pods("coordinator"))


def test_script_raising_before_init_fails_job_with_last_line(job: FakeJob) -> None:
    job.start("raise", failurePolicy={"backoffLimit": 1})
    failed = job.until_condition("Failed", "BackoffLimitExceeded")
    assert "FileNotFoundError: no data in /nowhere" in failed["message"]
    assert job.status()["restarts"]["failures"] == 2


@pytest.mark.slow
def test_a_quota_is_named_and_the_job_grows_when_it_does(system: E2ECluster, job: FakeJob) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"pods": "3"}},
    }
    system.apply(quota, namespace=job.namespace)
    job.start(replicas=4)
    job.until_running("0-0", "1-0")
    degraded = job.until_condition("Degraded", "PodCreationRefused")
    assert "exceeded quota: small" in degraded["message"]
    assert job.status()["restarts"]["failures"] == 0
    quota["spec"] = {"hard": {"pods": "9"}}
    system.apply(quota, namespace=job.namespace)
    job.until_running("0-0", "1-0", "2-0", "3-0")
    system.until(60, "the trouble to be over", lambda: job.condition("Degraded").get("status") == "False")


LIMITS = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "small"},
    "spec": {"limits": [{"type": "Container", "max": {"cpu": "1"}}]},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"pod": {"serviceAccountName": "nobody"}}, 'serviceaccount "nobody" not found'),
        ({"pod": {"priorityClassName": "nobody"}}, "no PriorityClass with name nobody was found"),
        ({"pod": {"hostNetwork": True}}, 'violates PodSecurity "baseline:latest"'),
        ({"container": {"resources": {"limits": {"cpu": "4"}}}}, "maximum cpu usage per Container is 1"),
    ],
    ids=["service account", "priority class", "pod security", "limit range"],
)
def test_refused_pod_is_reported_in_servers_words_as_no_failure(
    system: E2ECluster, job: FakeJob, template: dict[str, object], message: str
) -> None:
    if "container" in template:
        system.apply(LIMITS, namespace=job.namespace)
    level = "pod-security.kubernetes.io/enforce=baseline"
    system.kubectl("label", "namespace", job.namespace, level)
    job.start(replicas=2, **template)
    degraded = job.until_condition("Degraded", "PodCreationRefused")
    assert message in degraded["message"]
    assert job.status()["restarts"]["total"] == 0
    assert job.pods() == {}


def test_an_invalid_template_fails_at_once_and_names_the_field(job: FakeJob) -> None:
    with pytest.raises(RefusedError, match=r"unknown field .spec\.workers\.template\..*\.resource"):
        job.start(container={"resource": {"limits": {"cpu": "1"}}})
    job.start(container={"lifecycle": {"preStopp": {}}})  # so deep only the pod's own validation looks
    failed = job.until_condition("Failed", "InvalidTemplate")
    assert 'unknown field "spec.containers[0].lifecycle.preStopp"' in failed["message"]
    job.cluster.until(60, "the coordinator to go", lambda: not job.pods("coordinator"))


def test_a_rule_by_exception_fails_the_job_at_the_first_failure(job: FakeJob) -> None:
    rules = [{"action": "FailJob", "exceptions": ["FileNotFoundError"], "name": "no-data"}]
    job.start("raise", replicas=2, failurePolicy={"rules": rules})
    failed = job.until_condition("Failed", "FailureRuleMatched")
    assert "FileNotFoundError: no data in /nowhere" in failed["message"]
    assert "failurePolicy.rules[0] (no-data) says FailJob" in failed["message"]


def test_rule_that_says_replace_moves_worker_to_another_node(system: E2ECluster, job: FakeJob) -> None:
    rules = [{"action": "Replace", "exitCodes": {"operator": "In", "values": [137]}}]
    job.start(replicas=1, failurePolicy={"rules": rules})
    job.until_running("0-0")
    before = job.pods()["fake-worker-0-0"]
    kill(system, before)
    job.until_running("0-1")
    assert job.pods()["fake-worker-0-1"]["spec"]["nodeName"] != before["spec"]["nodeName"]


def granted() -> set[tuple[str, str, str]]:
    """(group, resource, verb) of the roles that deploy/operator.yaml binds to the operator."""
    documents = [d for d in yaml.safe_load_all((ROOT / "deploy" / "operator.yaml").read_text()) if d]
    bound = {
        (d["roleRef"]["kind"], d["roleRef"]["name"])
        for d in documents
        if d["kind"] in ("ClusterRoleBinding", "RoleBinding")
        and any(s["name"] == "springtide-operator" for s in d["subjects"])
    }
    return {
        (group, resource, verb)
        for d in documents
        if (d["kind"], d["metadata"]["name"]) in bound
        for rule in d["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def asked_for(system: E2ECluster) -> set[tuple[str, str, str]]:
    """(group, resource, verb) that the operator has used. Raise RefusedError where nobody counts."""
    answer = json.loads(system.kubectl("get", "--raw", "/debug/springtide/requests"))
    return {
        (
            use["group"],
            use["resource"] + (f"/{use['subresource']}" if use["subresource"] else ""),
            use["verb"],
        )
        for use in answer["requests"]
        if use["user"] == "system:serviceaccount:springtide-system:springtide-operator"
    }


def test_the_operator_uses_its_rights_and_no_others(system: E2ECluster, job: FakeJob) -> None:
    job.start(replicas=2)
    job.until_running("0-0", "1-0")
    system.kubectl("scale", "stj/fake", "-n", job.namespace, "--replicas=1")
    job.until_running("0-0")
    try:
        used = asked_for(system)
    except RefusedError:
        pytest.skip("only the embedded cluster tells who asked for what")
    rights = granted()
    assert used <= rights, used - rights
    needed_at_times = {
        ("", "pods", "get"),  # a name that is taken
        ("", "events", "patch"),  # of one that happens again
        ("", "secrets", "get"),  # the root key, at every start but the first
        ("networking.k8s.io", "networkpolicies", "create"),
        ("", "services", "create"),  # server-side apply of what is not there
        ("", "services", "delete"),  # of a job that has ended
        ("", "services", "patch"),  # an operator finds what the one before it made
        ("networking.k8s.io", "networkpolicies", "patch"),
        ("networking.k8s.io", "networkpolicies", "delete"),  # of an older version's name, without the uid
        ("springtide.dev", "trainingjobs", "delete"),  # ttlSecondsAfterFinished
        ("springtide.dev", "trainingjobs", "get"),  # a status that somebody else wrote
        ("springtide.dev", "trainingtemplates", "get"),  # of a job that names one; test_operator_templates.py
        ("springtide.dev", "clustertrainingtemplates", "get"),
        ("apiextensions.k8s.io", "customresourcedefinitions", "watch"),
    }
    # Other schedulers where they are installed, budgets of parameter servers: other files do that.
    elsewhere = (
        *("scheduling.volcano.sh", "scheduling.x-k8s.io", "kueue.x-k8s.io", "scheduling.k8s.io"),
        "policy",
    )
    needed = {right for right in rights - needed_at_times if right[0] not in elsewhere}
    # Events are posted, and leases renewed, some time after all else.
    system.until(60, f"uses of {needed - used}", lambda: needed <= asked_for(system))
