"""The chart's life on a cluster, in order: install, test, train, upgrade, lose the leader, uninstall."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import standstill
import yaml
from chart_installation import ACCOUNT, NAMESPACE, CommandError, Installation, installed, scrape, until
from chart_metrics import names_in, server_series
from chart_render import CHART, MONITORING, ROOT, VALUE_FILES, render
from chart_rights import granted, used
from e2e_jobs import job, script

from deploy.grafana import dashboard
from springtide_operator.plan.values import parse_time

pytestmark = pytest.mark.timeout(600)

TEAM = "team-a"
JOB = "line"
LEASE_SECONDS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(tmp_path_factory.mktemp("chart")) as installation:
        yield installation


def worker_uids(place: Installation, name: str = JOB) -> set[str]:
    labels = f"springtide.dev/job={name},springtide.dev/role=worker"
    pods = place.read("pods", "-n", TEAM, "-l", labels)["items"]
    return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def rests(count: Callable[[], float]) -> bool:
    """Whether it does not move for a second."""
    before = count()
    time.sleep(1.0)
    return count() == before


def until_step_after(place: Installation, step: float, seconds: float = 90.0) -> float:
    def beyond() -> float | None:
        now = place.step(JOB, TEAM)
        return now if now > step else None

    return until(seconds, f"a step after {step:.0f}", beyond)


def test_two_operators_run_and_one_acts(place: Installation) -> None:
    operators = place.operators()
    assert len(operators) == 2
    acting = place.acting()
    lease = place.read("lease", "springtide-operator", "-n", NAMESPACE)
    assert lease["spec"]["holderIdentity"].startswith(acting.name)
    assert lease["spec"]["leaseDurationSeconds"] == LEASE_SECONDS


def test_server_takes_every_object(place: Installation) -> None:
    for name in (TEAM, "team-b", "lab"):
        place.kubectl("create", "namespace", name)
    for file in VALUE_FILES:
        # Not the kinds of the Prometheus operator, which the cluster does not serve, and not the test's pod,
        # whose service account is not there yet.
        objects = [
            o
            for o in render(file=file, api_versions=MONITORING)
            if "monitoring" not in o["apiVersion"] and o["kind"] != "Pod"
        ]
        place.kubectl(
            "apply",
            "--server-side",
            "--force-conflicts",
            "--dry-run=server",
            "-f",
            "-",
            stdin=yaml.safe_dump_all(objects),
        )


def test_commands_of_the_notes_work(place: Installation) -> None:
    notes = place.run("helm", "get", "notes", "springtide", "-n", NAMESPACE)
    commands = [line.strip() for line in notes.splitlines() if line.startswith("  kubectl ")]
    tried = [c for c in commands if "port-forward" not in c and " delete " not in c]
    assert len(tried) >= 3
    for command in tried:
        place.run(*shlex.split(command))


def test_helm_test_trains_a_tiny_job(place: Installation) -> None:
    output = place.run(
        "helm", "test", "springtide", "-n", NAMESPACE, "--logs", "--timeout", "240s", timeout=300
    )
    assert "Succeeded: WorkerFinished" in output
    assert "the job is gone, and so are its pods" in output
    assert place.read("stj", "-n", NAMESPACE)["items"] == []


def test_running_job_serves_what_dashboard_and_alerts_ask_for(place: Installation) -> None:
    workload = [
        script(JOB, _slow_script()),
        job(JOB, "springtide/worker:0.1.0", workers=2, epochs=100_000, minimum=1, maximum=4),
    ]
    place.kubectl("apply", "-n", TEAM, "-f", "-", stdin=yaml.safe_dump_all(workload))
    until_step_after(place, 10)
    asked = {query for queries in dashboard.queries(dashboard.dashboard()).values() for query in queries}
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    asked |= {rule["expr"] for group in groups for rule in group["rules"]}
    # Served once it has happened: no pod of this job recovered or was restarted yet.
    seldom = {"springtide_job_last_recovery_seconds", "springtide_operator_api_errors_total"}
    # This job has none of these.
    of_others = {"springtide_job_parameter_servers", "springtide_job_standbys", *server_series()}
    neither = ("springtide_launcher_", "springtide_worker_tracker_", "springtide_trace_spans_")
    wanted = {name for name in names_in(asked) - seldom - of_others if not name.startswith(neither)}
    # Some of it only when the operator has heard of the steps.
    until(60, f"all of {sorted(wanted)}", lambda: wanted <= set(served_now(place)))
    labels = served_now(place)["springtide_worker_step_seconds_bucket"]
    assert {"training_job", "job_namespace"} <= labels


def served_now(place: Installation) -> dict[str, set[str]]:
    """Names of labels by series, of the operators and of the job's pods."""
    served: dict[str, set[str]] = {}
    pods = place.read("pods", "-n", TEAM, "-l", f"springtide.dev/job={JOB}")["items"]
    pages = [scrape(operator.address, 9402) for operator in place.operators()]
    pages += [scrape(pod["status"]["podIP"], metrics_port(pod)) for pod in pods]
    for page in pages:
        for name, samples in page.items():
            served.setdefault(name, set()).update(*(labels for labels, _ in samples))
    return served


def metrics_port(pod: dict[str, Any]) -> int:
    ports = pod["spec"]["containers"][0]["ports"]
    return int(next(port["containerPort"] for port in ports if port["name"] == "metrics"))


@pytest.mark.slow
def test_upgrade_leaves_the_job_training(place: Installation) -> None:
    workers, step = worker_uids(place), place.step(JOB, TEAM)
    before = {operator.name for operator in place.operators()}
    place.run(
        "helm", "upgrade", "springtide", str(CHART), "-n", NAMESPACE, "--wait", "--timeout", "180s",
        "--set-string", "podAnnotations.upgraded=yes",
    )  # fmt: skip
    # The last old one may act for a moment longer than helm waits for the new ones.
    until(60, "a new operator to act", lambda: place.acting().name not in before)
    assert worker_uids(place) == workers
    until_step_after(place, step)
    assert place.read("stj", JOB, "-n", TEAM)["status"]["restarts"]["total"] == 0
    # The release before may not know all fields of the samples.
    for sample in sorted((ROOT / "deploy" / "samples").glob("*.yaml")):
        place.kubectl("apply", "--dry-run=server", "-n", TEAM, "-f", str(sample))


@pytest.mark.slow
def test_a_leader_that_was_stopped_wakes_up_and_does_nothing(place: Installation) -> None:
    old = place.acting()

    def done() -> float:
        return old.value("springtide_operator_actions_total")

    # Whoever takes over sees to all that a job must have.
    until(60, "nothing more to do", lambda: rests(done))
    actions = done()
    standstill.stop(old.pid)
    try:
        # From now on nobody renews it.
        renewed = parse_time(place.read("lease", "springtide-operator", "-n", NAMESPACE)["spec"]["renewTime"])
        assert renewed is not None
        victim = place.read("pods", "-n", TEAM, "-l", f"springtide.dev/job={JOB},springtide.dev/slot=0")[
            "items"
        ][0]
        place.kubectl("delete", "pod", victim["metadata"]["name"], "-n", TEAM, "--force", "--grace-period=0")
        others = [operator for operator in place.operators() if operator.pid != old.pid]
        new = until(
            LEASE_SECONDS + 60,
            "the other operator to act",
            lambda: next((o for o in others if o.value("springtide_operator_acting") == 1), None),
        )
        taken = parse_time(place.read("lease", "springtide-operator", "-n", NAMESPACE)["spec"]["acquireTime"])
        assert taken is not None
        assert taken >= renewed + LEASE_SECONDS - 1.0  # times of leases may be cut to the second
        until(60, "a replacement of the deleted worker", lambda: len(worker_uids(place)) == 2)
    finally:
        old.send(signal.SIGCONT)
    until(
        60, "the old leader to say that it does not act", lambda: old.value("springtide_operator_acting") == 0
    )
    workers = worker_uids(place)
    # Two rounds of the old leader's own timer (2 s) pass while the job trains on.
    until_step_after(place, place.step(JOB, TEAM) + 100)
    assert done() == actions
    assert new.value("springtide_operator_acting") == 1
    assert worker_uids(place) == workers


@pytest.mark.slow
def test_operator_uses_no_rights_but_its_own(place: Installation) -> None:
    """Whether it uses all of them, the whole suite tells (`suite_rights`)."""
    _ask_rarely_used_rights(place)
    allowed = granted(render(), ACCOUNT)
    asked = used(place.requests(), f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}")
    assert asked - allowed == set(), "used without being granted"


def test_helm_test_uses_its_rights(place: Installation) -> None:
    account = "springtide-helm-test"
    allowed = granted(render(), account)
    asked = used(place.requests(), f"system:serviceaccount:{NAMESPACE}:{account}")
    assert asked <= allowed
    # Events are read only where the test fails.
    assert allowed - asked == {("list", "", "events")}


@pytest.mark.slow
def test_uninstall_keeps_crd_and_jobs_which_can_then_be_deleted(place: Installation) -> None:
    workers, step = worker_uids(place), place.step(JOB, TEAM)
    place.run("helm", "uninstall", "springtide", "-n", NAMESPACE, "--wait", "--timeout", "180s")
    assert place.read("deployments,services,pdb,networkpolicies", "-n", NAMESPACE)["items"] == []
    place.kubectl("get", "crd", "trainingjobs.springtide.dev")
    assert worker_uids(place) == workers
    until_step_after(place, step)
    place.kubectl("delete", "stj", JOB, "-n", TEAM, "--timeout=60s")
    until(60, "the job's pods to go", lambda: not place.read("pods", "-n", TEAM)["items"])
    place.kubectl(
        "apply", "-n", TEAM, "-f", "-", stdin=yaml.safe_dump(job("left", "springtide/worker:0.1.0"))
    )
    place.kubectl("delete", "namespace", TEAM, "--timeout=60s")
    with pytest.raises(CommandError, match="NotFound"):
        place.kubectl("get", "namespace", TEAM)


def _ask_rarely_used_rights(place: Installation) -> None:
    """Two rights serve only where somebody else is faster: make that happen."""
    # A pod that takes the name of a worker: creating it conflicts, and the operator looks whose it is.
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "taken-worker-0-0"}}
    pod["spec"] = {
        "containers": [{"name": "c", "image": "springtide/worker:0.1.0", "command": ["sleep", "60"]}]
    }
    place.kubectl("apply", "-n", TEAM, "-f", "-", stdin=yaml.safe_dump(pod))
    taken = job("taken", "springtide/worker:0.1.0")
    place.kubectl("apply", "-n", TEAM, "-f", "-", stdin=yaml.safe_dump_all([script("taken", "pass"), taken]))
    user = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
    until(
        60,
        "the operator to look at the pod in its way",
        lambda: ("get", "", "pods") in used(place.requests(), user),
    )
    # The job changes while the operator writes its status: the write conflicts, and the job is read again.
    path = f"/apis/springtide.dev/v1alpha1/namespaces/{TEAM}/trainingjobs/taken"

    def disturbed() -> bool:
        for size in (1, 2):
            place.cluster.request("PATCH", path, {"spec": {"workers": {"maxReplicas": 4, "replicas": size}}})
            for number in range(20):
                place.cluster.request("PATCH", path, {"metadata": {"annotations": {"n": str(number)}}})
        return ("get", "springtide.dev", "trainingjobs") in used(place.requests(), user)

    until(60, "the operator to read a job again after a conflict", disturbed)
    place.kubectl(
        "delete", "stj/taken", "pod/taken-worker-0-0", "-n", TEAM, "--timeout=60s", "--grace-period=1"
    )


def _slow_script() -> str:
    from e2e_jobs import TRAIN

    return TRAIN


@pytest.mark.slow
def test_operator_of_named_namespaces_has_its_rights_there(place: Installation) -> None:
    if place.operators():  # the story's other parts may have been left out
        place.run("helm", "uninstall", "springtide", "-n", NAMESPACE, "--wait", "--timeout", "180s")
    values = {"watchNamespaces": ["lab"], "replicas": 1, "rbac": {"aggregateToUserRoles": False}}
    values |= {"crds": {"enabled": False}}
    place.run(
        "helm", "install", "named", str(CHART), "-n", "named-system", "--create-namespace", "--wait",
        "--timeout", "180s", "--values", "-", stdin=json.dumps(values),
    )  # fmt: skip
    for namespace in ("team-b", "lab"):
        place.kubectl(
            "apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(job("j", "nowhere.example.com/none:1"))
        )
    until(60, "pods of the job in lab", lambda: len(place.read("pods", "-n", "lab")["items"]) == 2)
    assert place.read("stj", "j", "-n", "lab")["status"]["workers"]["desired"] == 1
    assert "status" not in place.read("stj", "j", "-n", "team-b")
    assert place.read("pods", "-n", "team-b")["items"] == []
    account = "named-springtide-operator"
    allowed = granted(render(values, release="named", namespace="named-system"), account)
    asked = used(place.requests(), f"system:serviceaccount:named-system:{account}")
    assert asked - allowed == set()
    assert ("watch", "springtide.dev", "trainingjobs") in asked
    assert ("list", "apiextensions.k8s.io", "customresourcedefinitions") not in asked
    assert ("list", "", "nodes") not in asked
    assert ("list", "coordination.k8s.io", "leases") in asked, "it looks for other releases"
    place.run("helm", "uninstall", "named", "-n", "named-system", "--wait", "--timeout", "180s")
