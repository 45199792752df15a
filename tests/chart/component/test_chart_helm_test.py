"""The module behind `helm test` tells right from wrong, says what went wrong, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chart_render import pick, render

from springtide_kube.errors import ApiError
from springtide_operator import helm_test
from springtide_operator.helm_test import JobTest, TestError, judge, main, read_job
from springtide_operator.kube import Kube

JOB = {"kind": "TrainingJob", "metadata": {"name": "tiny", "namespace": "n"}}
JOB_PATH = "/apis/springtide.dev/v1alpha1/namespaces/n/trainingjobs/tiny"


def condition(kind: str, status: str = "True") -> dict[str, Any]:
    return {
        "status": {
            "conditions": [{"type": kind, "status": status, "reason": "R", "message": "m"}],
            "state": "Running",
        }
    }


class FakeApi(Kube):
    """One job whose looks follow each other, and the pods that outlive it for a few looks."""

    def __init__(self, looks: list[dict[str, Any]], pods_after_delete: int = 1, exists: bool = False) -> None:
        super().__init__()
        self.looks: Iterator[dict[str, Any]] = iter(looks)
        self.exists = exists
        self.left = pods_after_delete
        self.calls: list[str] = []
        self.trouble: list[ApiError] = []

    async def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        self.calls.append(f"{method} {path.rsplit('/', 1)[-1]}")
        if self.trouble:
            raise self.trouble.pop()
        if path.endswith("/pods"):
            self.left -= 1
            return {"items": [{"metadata": {"name": "tiny-worker-0-0"}}] if self.left >= 0 else []}
        if path.endswith("/events"):
            of_another = {"involvedObject": {"kind": "Pod", "name": "other"}, "metadata": {}, "message": "no"}
            ours = {
                "involvedObject": {"kind": "Pod", "name": "tiny-worker-0-0"},
                "metadata": {},
                "reason": "BackOff",
            }
            return {"items": [of_another, ours]}
        if method == "POST":
            self.exists = True
            return JOB
        if not self.exists:
            raise ApiError(404, "NotFound", "not found")
        if method == "DELETE":
            self.exists = False
            return {}
        return next(self.looks)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helm_test, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(helm_test, "RETRY_SECONDS", (0.001, 0.001))
    monkeypatch.setattr(helm_test, "CLEAN_UP_SECONDS", 0.05)


async def run(api: FakeApi, timeout: float = 60.0) -> list[str]:
    said: list[str] = []
    try:
        await JobTest(api, JOB, timeout, said.append).run()
    except (TestError, ApiError) as error:
        said.append(f"raised {error}")
    return said


async def test_success_is_told_and_cleaned_up() -> None:
    api = FakeApi([{}, condition("Running"), condition("Succeeded")], pods_after_delete=2)
    assert await run(api) == [
        "created n/tiny",
        "no status yet: the operator has not seen the job",
        "Running: ",
        "Succeeded: R: m",
        "the job is gone, and so are its pods",
    ]
    assert not api.exists


async def test_failure_shows_its_events_and_is_cleaned_up() -> None:
    api = FakeApi([condition("Failed")])
    said = await run(api)
    assert "event pod/tiny-worker-0-0 BackOff: " in said
    assert not any("other" in line for line in said)
    assert said[-1] == "raised the job failed: Failed: R: m"
    assert not api.exists


async def test_a_job_that_never_ends_is_given_up_and_cleaned_up() -> None:
    api = FakeApi([condition("Running")] * 1000)
    assert (await run(api, timeout=0.01))[-1].startswith("raised the job is not over after 0 s: Running")
    assert not api.exists


async def test_a_job_of_an_earlier_test_is_removed_first() -> None:
    api = FakeApi([condition("Succeeded")], exists=True)
    said = await run(api)
    assert said[0] == "a job of an earlier test is gone, and so are its pods"
    assert api.calls[0] == "DELETE tiny"


async def test_pods_that_stay_fail_the_test() -> None:
    api = FakeApi([condition("Succeeded")], pods_after_delete=10**6)
    assert "there is still pod/tiny-worker-0-0" in (await run(api))[-1]


async def test_pods_that_stay_do_not_hide_why_the_test_failed() -> None:
    api = FakeApi([condition("Failed")], pods_after_delete=10**6)
    said = await run(api)
    assert said[-1] == "raised the job failed: Failed: R: m"
    assert "there is still pod/tiny-worker-0-0" in said[-2]


def test_only_the_tests_pod_is_a_hook() -> None:
    """helm 3.10 prints the log of a pod of each hook's name: others would repeat it, or make it fail."""
    hooks = [o for o in render({}) if "helm.sh/hook" in (o["metadata"].get("annotations") or {})]
    assert [(hook["kind"], hook["metadata"]["name"]) for hook in hooks] == [("Pod", "springtide-helm-test")]


async def test_an_api_server_that_is_away_for_a_moment_is_asked_again() -> None:
    api = FakeApi([condition("Succeeded")])
    api.trouble = [ApiError(0, "Unreachable", "no answer"), ApiError(503, "ServiceUnavailable", "away")]
    assert (await run(api))[-1] == "the job is gone, and so are its pods"


async def test_a_refusal_is_not_asked_again() -> None:
    api = FakeApi([])
    api.trouble = [ApiError(403, "Forbidden", "no right")]
    assert await run(api) == ["raised no right (403 Forbidden)"]
    assert len(api.calls) == 1


async def test_a_missing_crd_is_named() -> None:
    class NoCrd(FakeApi):
        async def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")

    assert "install the CRD, or name an existing namespace instead of 'n'" in (await run(NoCrd([])))[-1]


def test_judge_looks_at_conditions_that_hold() -> None:
    assert judge(condition("Succeeded", "False")).outcome == "goes on"
    assert judge(condition("Failed")).outcome == "failed"


@pytest.mark.parametrize(
    ("text", "message"), [(None, "is not set"), ("{", "is not JSON"), ("[]", "must be a TrainingJob")]
)
def test_wrong_environment_is_named(text: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_job(text)


def test_without_environment_it_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SPRINGTIDE_TEST_JOB", raising=False)
    assert main([]) == 2
    assert "SPRINGTIDE_TEST_JOB is not set" in capsys.readouterr().err


def test_the_chart_writes_what_the_module_reads() -> None:
    hook = pick(render({"watchNamespaces": ["lab"]}), "Pod")["spec"]["containers"][0]
    text = next(entry["value"] for entry in hook["env"] if entry["name"] == "SPRINGTIDE_TEST_JOB")
    job = read_job(text)
    assert job["metadata"]["namespace"] == "lab"
    assert hook["command"] == ["python", "-m", helm_test.__name__]
    script = job["spec"]["workers"]["template"]["spec"]["containers"][0]["args"][0]
    compile(script, "script", "exec")
    assert yaml.safe_load(json.dumps(job)) == job
