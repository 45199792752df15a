"""Jobs by reference: they wait for their template, keep it as it was, and stay within its limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from e2e_cluster import E2ECluster, RefusedError
from e2e_jobs import TRAIN, RunningJob, job, script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Object = dict[str, Any]
FOR_EVER = 1_000_000  # epochs


@pytest.fixture
def template(e2e: E2ECluster, namespace: str) -> Iterator[str]:
    """The name of a ClusterTrainingTemplate that is not there yet, and is not there any more afterwards."""
    name = f"line-{namespace}"
    yield name
    e2e.kubectl("delete", "clustertrainingtemplate", name, "--ignore-not-found")


def document(e2e: E2ECluster, name: str, version: str, **limits: Any) -> Object:
    """Return a template with all that a job of TRAIN needs, and a variable by which its version is known."""
    whole = job(name, e2e.image, epochs=FOR_EVER, environment={"TEMPLATE_VERSION": version})["spec"]
    pod = whole["workers"]["template"]["spec"]
    pod.pop("volumes")  # the script's ConfigMap is the job's own
    defaults = {"workers": {"template": {"spec": pod}}, "failurePolicy": {"backoffLimit": 3}}
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "ClusterTrainingTemplate",
        "metadata": {"name": name},
        "spec": {"description": "a line", "defaults": defaults, "limits": limits},
    }


def put(e2e: E2ECluster, made: Object) -> None:
    e2e.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(made))


def start(e2e: E2ECluster, namespace: str, name: str, template: str, **spec: Any) -> RunningJob:
    """Apply a job of which the manifest says little more than the template's name."""
    pod = {"volumes": [{"name": "scripts", "configMap": {"name": name}}]}
    made = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"templateRef": {"name": template}, "workers": {"template": {"spec": pod}}, **spec},
    }
    e2e.apply(script(name, TRAIN), made, namespace=namespace)
    return RunningJob(e2e, namespace, name)


def staying(running: RunningJob) -> list[Object]:
    """Return the worker pods that nobody has asked to go."""
    return [pod for pod in running.pods() if "deletionTimestamp" not in pod["metadata"]]


def names(running: RunningJob) -> list[str]:
    return [str(pod["metadata"]["name"]) for pod in staying(running)]


def versions(running: RunningJob) -> list[str]:
    """Return the version of the template in each worker pod."""
    found = []
    for pod in staying(running):
        environment = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        found.append(str(environment["TEMPLATE_VERSION"]))
    return found


@pytest.mark.slow
def test_a_job_keeps_its_template_and_the_next_takes_the_new(
    e2e: E2ECluster, namespace: str, template: str
) -> None:
    first = start(e2e, namespace, "first", template)
    waits = first.until_condition("Degraded", reason="TemplateNotFound")
    assert f"there is no ClusterTrainingTemplate {template}: the job waits for it" in waits["message"]
    assert first.condition("Stalled")["status"] == "False"
    assert template in e2e.kubectl("get", "stj", "first", "-n", namespace, "-o", "wide")
    assert not first.all_pods()

    put(e2e, document(e2e, template, "one", maxReplicas=2))
    first.until_trains(1)
    assert first.condition("Degraded")["status"] == "False"
    assert "a line" in e2e.kubectl("get", "clustertrainingtemplates", template, "-o", "wide")

    put(e2e, document(e2e, template, "two", maxReplicas=2))
    second = start(e2e, namespace, "second", template)
    second.until_trains(1)
    assert second.status()["template"]["generation"] == 2
    assert versions(second) == ["two"]
    # A worker that is made after the edit is as those before, and none is outdated.
    first.scale(2)
    first.until_trains(2)
    assert versions(first) == ["one", "one"]
    status = first.status()
    assert (status["template"]["generation"], status["workers"]["outdated"]) == (1, 0)
    assert status["restarts"]["total"] == 0

    # The limit is the maximum of a job that says none; nothing ends where it is passed.
    first.scale(3)
    beyond = first.until_condition("Degraded", reason="BeyondTemplateLimits")
    assert "spec.workers.replicas is 3, and at most 2 are allowed" in beyond["message"]
    first.until_goes_on()
    assert len(first.pods()) == 2
    first.scale(1)
    first.until_trains(1)

    # Without the template the job goes on, and makes its pods as before.
    e2e.kubectl("delete", "clustertrainingtemplate", template)
    [pod] = names(first)
    first.delete_pod(pod, "--grace-period=0", "--force")
    # The status may still be that from before.
    e2e.until(60, "another worker", lambda: pod not in names(first) and versions(first))
    first.until_trains(1)
    assert versions(first) == ["one"]

    with pytest.raises(RefusedError, match="templateRef is immutable"):
        first.patch(templateRef={"name": "other"})
    with pytest.raises(RefusedError, match=r"strategy\.allReduce\.shard is immutable"):
        first.patch(strategy={"allReduce": {"shard": "Optimizer"}})


def test_a_job_says_what_it_needs_where_no_template_does(e2e: E2ECluster, namespace: str) -> None:
    made = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "nothing"},
        "spec": {"workers": {"replicas": 1}},
    }
    with pytest.raises(RefusedError, match=r"workers\.template is needed, unless templateRef names"):
        e2e.apply(made, namespace=namespace)


def test_a_template_of_the_namespace_is_looked_for_there(
    e2e: E2ECluster, namespace: str, template: str
) -> None:
    put(e2e, document(e2e, template, "of the cluster"))
    reference = {"kind": "TrainingTemplate", "name": template}
    waits = start(e2e, namespace, "third", template, templateRef=reference)
    found = waits.until_condition("Degraded", reason="TemplateNotFound")
    assert f"there is no TrainingTemplate {template} in namespace {namespace}" in found["message"]
    own = {**document(e2e, template, "of the namespace"), "kind": "TrainingTemplate"}
    e2e.apply(own, namespace=namespace)
    e2e.until(60, "a worker", lambda: versions(waits) == ["of the namespace"])
