"""Wrong input gives one clear message in the place where a user looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from e2e_cluster import E2ECluster, RefusedError
from e2e_jobs import TRAIN, RunningJob, job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Start = Callable[..., RunningJob]

RAISES = """
import springtide
springtide.init()
def main():
    raise ValueError("the learning rate is a banana")
main()
"""
NO_DATA = "open('/data/missing/train.csv')\n"
ENDS_EARLY = "print('did nothing')\n"
WIDTH = 400_000
LARGE = (
    TRAIN.replace(
        "torch.nn.Linear(1, 1)",
        f"torch.nn.Sequential(torch.nn.Linear(1, {WIDTH}), torch.nn.Tanh(), torch.nn.Linear({WIDTH}, 1))",
    )
    .replace("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.AdamW(model.parameters(), lr=1e-4)")
    .replace("springtide.report(slope=model.weight.item())", "springtide.report(slope=0.0)")
)
PARAMETERS = 4 * (3 * WIDTH + 1)
"""Bytes of the model's parameters."""


def test_a_script_that_raises_fails_the_job_with_its_exception(start: Start) -> None:
    running = start("raises", RAISES, failurePolicy={"backoffLimit": 0})
    failed = running.until_condition("Failed", reason="BackoffLimitExceeded")
    assert "ValueError" in failed["message"]
    assert "the learning rate is a banana" in failed["message"]
    assert "train.py:5" in failed["message"]


def test_a_missing_dataset_before_init_shows_the_end_of_the_log(start: Start) -> None:
    running = start("nodata", NO_DATA, failurePolicy={"backoffLimit": 0})
    failed = running.until_condition("Failed")
    assert "FileNotFoundError" in failed["message"]
    assert "/data/missing/train.csv" in failed["message"]


def test_a_script_that_ends_without_training_is_no_success(start: Start) -> None:
    running = start("idle", ENDS_EARLY, failurePolicy={"backoffLimit": 0})
    failed = running.until_condition("Failed")
    assert (
        "init()" in failed["message"] or "never" in failed["message"] or "finish" in failed["message"].lower()
    )


def test_wrong_image_is_named_in_status_and_corrected_in_place(e2e: E2ECluster, start: Start) -> None:
    running = start("image", image="registry.invalid/nobody/nothing:none")
    degraded = running.until_condition("Degraded")
    assert "registry.invalid/nobody/nothing:none" in degraded["message"]
    assert "image-worker-0-0" in degraded["message"]
    assert running.condition("Failed").get("status") != "True"
    where = "/spec/workers/template/spec/containers/0/image"
    patch = json.dumps([{"op": "replace", "path": where, "value": e2e.image}])
    e2e.kubectl("patch", "stj/image", "-n", running.namespace, "--type=json", "-p", patch)
    running.until_condition("Succeeded")
    assert running.status()["restarts"]["total"] == 0


def test_a_wrong_command_is_named_in_the_status(start: Start) -> None:
    running = start("command", command=["no-such-program"], failurePolicy={"backoffLimit": 0})
    failed = running.until_condition("Failed")
    assert "no-such-program" in failed["message"]


def refused(e2e: E2ECluster, namespace: str, wrong: dict[str, Any]) -> str:
    with pytest.raises(RefusedError) as refusal:
        e2e.apply(wrong, namespace=namespace)
    return str(refusal.value)


def test_a_minimum_above_the_maximum_is_refused(e2e: E2ECluster, namespace: str) -> None:
    message = refused(e2e, namespace, job("sizes", e2e.image, workers=3, minimum=3, maximum=2))
    assert "minReplicas must not be greater than workers.maxReplicas" in message


def test_a_name_that_is_too_long_is_refused(e2e: E2ECluster, namespace: str) -> None:
    message = refused(e2e, namespace, job("a" * 41, e2e.image))
    assert "* metadata.name: Invalid value" in message or "is invalid: metadata.name:" in message
    assert "at most 40 characters" in message


def test_an_unknown_field_is_refused_by_name(e2e: E2ECluster, namespace: str) -> None:
    wrong = job("fields", e2e.image)
    wrong["spec"]["workers"]["replica"] = 3
    assert 'unknown field "spec.workers.replica"' in refused(e2e, namespace, wrong)


def test_a_scale_beyond_the_maximum_is_refused(e2e: E2ECluster, start: Start) -> None:
    running = start("limits", maximum=2)
    with pytest.raises(RefusedError, match="maxReplicas"):
        running.scale(3)


def test_unusable_template_fails_the_job_naming_the_field(e2e: E2ECluster, namespace: str) -> None:
    wrong = job("template", e2e.image)
    wrong["spec"]["workers"]["template"]["spec"]["volumes"].append({"name": "springtide-shm", "emptyDir": {}})
    e2e.apply(wrong, namespace=namespace)
    failed = RunningJob(e2e, namespace, "template").until_condition("Failed", reason="InvalidTemplate")
    assert "spec.workers.template.spec.volumes" in failed["message"]


@pytest.mark.slow
def test_a_model_without_room_at_the_minimum_does_not_begin(start: Start) -> None:
    """The template's limit holds the model of three workers, which share out the optimizer's state, and not
    that of one: nobody trains before the manifest says so.
    """
    environment = {"SPRINGTIDE_MEMORY_BYTES": str(int(3.5 * PARAMETERS))}
    sharded = {"type": "AllReduce", "allReduce": {"shard": "Optimizer"}}
    arguments: dict[str, Any] = {"environment": environment, "strategy": sharded, "workers": 3, "epochs": 2}
    running = start("large", LARGE, **arguments, minimum=1)
    failed = running.until_condition("Failed", reason="MemoryTooSmall")
    assert "with 1 worker, as few as workers.minReplicas allows" in failed["message"]
    assert "Set workers.minReplicas to 3, or raise the limit" in failed["message"]
    status = running.status()
    assert status["memory"] == {
        "perWorker": "16Mi",
        "perWorkerAtMinReplicas": "19Mi",
        "limit": "16Mi",
        "limitedBy": "Container",
        "fewestWorkers": 3,
    }
    assert running.steps_said() == -1
    again = start("large-enough", LARGE, **arguments, minimum=3)
    again.until_condition("Succeeded")
    assert again.status()["memory"]["fewestWorkers"] == 3
