"""A job with checkpoints on a claim is suspended and resumed at another size: nothing is trained twice."""

from __future__ import annotations

from typing import Any

import pytest
from e2e_cluster import E2ECluster, schedulable_nodes, why_no_volume
from e2e_jobs import TRAIN, RunningJob, job, script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EPOCHS = 200
# Slow until it is suspended, quick afterwards: a changed template holds for the pods made then.
PACED = TRAIN.replace("seconds = pace()", 'seconds = float(os.environ["PACE"])')
CLAIM: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "checkpoints"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
}


def hostname(e2e: E2ECluster, node: str) -> str:
    labels: dict[str, str] = e2e.read(f"/api/v1/nodes/{node}")["metadata"]["labels"]
    return labels["kubernetes.io/hostname"]


@pytest.mark.slow
def test_a_suspended_job_is_resumed_at_another_size_where_it_was(e2e: E2ECluster, namespace: str) -> None:
    if why := why_no_volume(e2e):
        pytest.skip(why)
    place = {"uri": "/checkpoints", "intervalSeconds": 3600}
    wanted = job("saved", e2e.image, workers=2, epochs=EPOCHS, checkpoint=place)
    spec = wanted["spec"]["workers"]["template"]["spec"]
    spec["volumes"].append({"name": "saved", "persistentVolumeClaim": {"claimName": "checkpoints"}})
    spec["containers"][0]["volumeMounts"].append({"name": "saved", "mountPath": "/checkpoints"})
    # All on one node: most volumes are attached to one at a time.
    spec["nodeSelector"] = {"kubernetes.io/hostname": hostname(e2e, schedulable_nodes(e2e)[0])}
    pace = {"name": "PACE", "value": "0.5"}
    spec["containers"][0]["env"].append(pace)
    e2e.apply(CLAIM, script("saved", PACED), wanted, namespace=namespace)
    running = RunningJob(e2e, namespace, "saved")
    running.until_trains(2)
    running.until_goes_on()
    where = ("stj/saved", "-n", namespace)
    e2e.kubectl("patch", *where, "--type=merge", "-p", '{"spec": {"suspend": true}}')

    def pods() -> int:
        return len(running.pods()) + len(running.pods("coordinator"))

    e2e.until(120, "all pods to go", lambda: pods() == 0)
    running.until_condition("Suspended")
    status = running.status()
    put_away = status["checkpoint"]
    assert put_away["upToDate"]
    assert put_away["step"] >= status["step"] > 0
    assert running.condition("Degraded")["status"] == "False"
    pace["value"] = "0"
    wanted["spec"]["workers"]["replicas"] = 1
    wanted["spec"]["suspend"] = False
    e2e.apply(wanted, namespace=namespace)
    running.until_condition("Succeeded")
    status = running.status()
    assert status["restored"] == "/".join([put_away["uri"], put_away["name"]])
    assert status.get("statesLost", 0) == 0
    assert status["restarts"]["total"] == 0
    assert status["step"] == 4 * EPOCHS
    assert status["data"]["totalSeen"] == 64 * EPOCHS
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)

    # It went on: the steps before were not trained again.
    # The operator tells of an end when it has written it down.
    def told() -> set[str]:
        return set(e2e.kubectl("get", "events", "-n", namespace, "-o", "jsonpath={.items[*].reason}").split())

    e2e.until(
        60, "word of the checkpoint and of the end", lambda: {"CheckpointRestored", "Succeeded"} <= told()
    )
    assert "StateLost" not in told()
