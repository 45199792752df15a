"""Pods as processes: statuses, exit codes, restarts, grace, termination messages, images. Runs against any
cluster.
"""

from __future__ import annotations

import re
import time
from datetime import datetime

from local_cluster import FIXTURES, IMAGE, Kube, condition_of, state_of, status_of, until

cluster, kube, target_kubeconfig = FIXTURES


def test_a_pod_that_ends_well_has_succeeded(kube: Kube) -> None:
    kube.pod("good", ["sh", "-c", "echo done"])
    pod = kube.wait_phase("good", "Succeeded")
    ended = state_of(pod)["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (0, "Completed")
    assert ended["startedAt"] <= ended["finishedAt"]
    assert condition_of(pod, "Ready")["reason"] == "PodCompleted"
    assert condition_of(pod, "PodScheduled")["status"] == "True"
    assert pod["status"]["podIP"]
    assert pod["status"]["hostIP"]
    assert pod["status"]["startTime"]


def test_an_exit_code_is_told_with_its_termination_message(kube: Kube) -> None:
    kube.pod("bad", ["sh", "-c", "echo why > /dev/termination-log; exit 7"])
    pod = kube.wait_phase("bad", "Failed")
    ended = state_of(pod)["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"].strip()) == (7, "Error", "why")
    assert status_of(pod)["restartCount"] == 0


def test_failure_without_message_has_the_end_of_its_log(kube: Kube) -> None:
    script = "for i in $(seq 1 200); do echo line $i; done; exit 1"
    kube.pod("verbose", ["sh", "-c", script], terminationMessagePolicy="FallbackToLogsOnError")
    message = state_of(kube.wait_phase("verbose", "Failed"))["terminated"]["message"]
    lines = message.strip().splitlines()
    assert lines[-1] == "line 200"
    assert len(lines) <= 81
    assert len(message) <= 2048
    kube.pod("fine", ["sh", "-c", "echo talk; exit 0"], terminationMessagePolicy="FallbackToLogsOnError")
    assert "message" not in state_of(kube.wait_phase("fine", "Succeeded"))["terminated"]


def test_a_container_is_restarted_at_once_and_then_backed_off(kube: Kube) -> None:
    kube.pod("crash", ["sh", "-c", "echo run; exit 3"], spec={"restartPolicy": "Always"})
    pod = kube.wait_pod(
        "crash",
        lambda p: state_of(p).get("waiting", {}).get("reason") == "CrashLoopBackOff",
        "CrashLoopBackOff",
    )
    assert pod["status"]["phase"] == "Running"
    assert status_of(pod)["restartCount"] >= 1
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] == 3
    said = state_of(pod)["waiting"]["message"]
    assert re.match(r"back-off \d+s restarting failed container=main pod=crash_", said)
    assert condition_of(pod, "Ready")["status"] == "False"
    kube.until_event("crash", "BackOff")
    assert kube.logs("crash").strip() == "run"
    assert kube.logs("crash", previous="true").strip() == "run"


def test_on_failure_restarts_a_failure_but_not_a_success(kube: Kube) -> None:
    volume = {"name": "kept", "emptyDir": {}}
    script = "test -f /kept/second || { touch /kept/second; exit 1; }"
    kube.pod(
        "retry",
        ["sh", "-c", script],
        spec={"restartPolicy": "OnFailure", "volumes": [volume]},
        volumeMounts=[{"name": "kept", "mountPath": "/kept"}],
    )
    pod = kube.wait_phase("retry", "Succeeded")
    assert status_of(pod)["restartCount"] == 1
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] == 1


def test_deletion_sends_sigterm_and_waits_for_the_process(kube: Kube) -> None:
    script = (
        "import signal,sys,time\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\nprint('up', "
        "flush=True)\ntime.sleep(600)"
    )
    # It is gone long before its process would have ended by itself, or been killed.
    kube.pod("polite", ["python", "-c", script], spec={"terminationGracePeriodSeconds": 600})
    until(lambda: "up" in kube.try_logs("polite"), "the process to be up")
    kube.delete("pods", "polite")
    until(lambda: kube.gone("pods", "polite"), "the pod to be gone")
    assert kube.until_event("polite", "Killing") == "Stopping container main"


def test_deletion_kills_after_the_grace_period(kube: Kube) -> None:
    script = (
        "import signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', "
        "flush=True)\ntime.sleep(600)"
    )
    kube.pod("stubborn", ["python", "-c", script], spec={"terminationGracePeriodSeconds": 1})
    until(lambda: "up" in kube.try_logs("stubborn"), "the process to be up")
    started = time.monotonic()
    terminating = kube.delete("pods", "stubborn")
    assert terminating["metadata"]["deletionGracePeriodSeconds"] == 1
    until(lambda: kube.gone("pods", "stubborn"), "the pod to be gone")
    assert time.monotonic() - started > 0.5


def test_first_process_without_a_handler_stays_its_grace(kube: Kube) -> None:
    """Let a program and a shell be process 1 of a container: neither dies of a SIGTERM that it does not
    catch.
    """
    kube.pod("sleeps", ["sleep", "600"], spec={"terminationGracePeriodSeconds": 4})
    shell = ["sh", "-c", "sleep 600; echo never"]
    kube.pod("shell", shell, spec={"terminationGracePeriodSeconds": 4})
    names = ("sleeps", "shell")
    for name in names:
        kube.wait_phase(name, "Running")
    started = time.monotonic()
    for name in names:
        kube.delete("pods", name)
    until(lambda: all(kube.gone("pods", name) for name in names), "the pods to be gone")
    assert time.monotonic() - started > 3.5


def test_later_deletion_shortens_what_is_told_and_not_the_kill(kube: Kube) -> None:
    """A kubelet asks its runtime once to stop a container, and does not take that back."""
    kube.pod("patient", ["sleep", "900"], spec={"terminationGracePeriodSeconds": 5})
    kube.wait_phase("patient", "Running")

    def told(**options: int) -> tuple[int, str]:
        metadata = kube.delete("pods", "patient", **options)["metadata"]
        return metadata["deletionGracePeriodSeconds"], metadata["deletionTimestamp"]

    started = time.monotonic()
    first = told()
    assert first[0] == 5
    assert told(gracePeriodSeconds=900) == told() == first
    grace, by = told(gracePeriodSeconds=1)
    assert grace == 1
    assert (moment(first[1]) - moment(by)).total_seconds() == 4
    until(lambda: kube.gone("pods", "patient"), "the pod to be gone", 60)
    assert time.monotonic() - started > 4.5


def test_pre_stop_hook_counts_in_the_grace(kube: Kube) -> None:
    hook = {"preStop": {"exec": {"command": ["sleep", "600"]}}}
    spec = {"terminationGracePeriodSeconds": 600}
    kube.pod("hooked", ["sleep", "900"], spec=spec, lifecycle=hook)
    kube.wait_phase("hooked", "Running")
    kube.delete("pods", "hooked", gracePeriodSeconds=2)
    until(lambda: kube.gone("pods", "hooked"), "the pod to be gone", 60)


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def test_a_pre_stop_hook_runs_before_sigterm(kube: Kube) -> None:
    script = """
import pathlib, signal, sys, time
def leave(*_):
    print("term", pathlib.Path("/v/hook").exists(), flush=True)
    time.sleep(500)  # as long as somebody wants to read the log
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(600)
"""
    kube.pod(
        "hooked",
        ["python", "-c", script],
        spec={"volumes": [{"name": "v", "emptyDir": {}}], "terminationGracePeriodSeconds": 600},
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
        lifecycle={"preStop": {"exec": {"command": ["touch", "/v/hook"]}}},
    )
    until(lambda: "up" in kube.try_logs("hooked"), "the process to be up")
    kube.delete("pods", "hooked")
    until(lambda: "term True" in kube.try_logs("hooked"), "SIGTERM after the hook")
    kube.delete("pods", "hooked", gracePeriodSeconds=0)


def test_an_unknown_image_is_err_image_pull_then_back_off(kube: Kube) -> None:
    kube.pod("lost", ["true"], image="registry.invalid/nobody/nothing:1")
    pod = kube.wait_pod(
        "lost", lambda p: state_of(p).get("waiting", {}).get("reason") == "ErrImagePull", "ErrImagePull"
    )
    assert "registry.invalid/nobody/nothing:1" in state_of(pod)["waiting"]["message"]
    pod = kube.wait_pod(
        "lost", lambda p: state_of(p).get("waiting", {}).get("reason") == "ImagePullBackOff", "back-off"
    )
    assert 'Back-off pulling image "registry.invalid/nobody/nothing:1"' in state_of(pod)["waiting"]["message"]
    assert pod["status"]["phase"] == "Pending"
    kube.until_event("lost", "Failed", "Failed to pull image")


def test_an_image_name_that_is_none_is_named(kube: Kube) -> None:
    kube.pod("odd", ["true"], image="Not A Name")
    pod = kube.wait_pod(
        "odd", lambda p: state_of(p).get("waiting", {}).get("reason") == "InvalidImageName", "the reason"
    )
    assert "Not A Name" in state_of(pod)["waiting"]["message"]


def test_a_command_that_is_not_there_fails_to_start(kube: Kube) -> None:
    kube.pod("absent", ["no-such-program"])
    ended = state_of(kube.wait_phase("absent", "Failed"))["terminated"]
    assert ended["exitCode"] == 128
    assert ended["reason"] == "StartError"
    assert 'exec: "no-such-program": executable file not found in $PATH' in ended["message"]


def test_missing_command_is_tried_again_when_restarts_are_wanted(kube: Kube) -> None:
    kube.pod("absent", ["no-such-program"], spec={"restartPolicy": "Always"})
    pod = kube.wait_pod(
        "absent",
        lambda p: state_of(p).get("waiting", {}).get("reason") == "CrashLoopBackOff",
        "CrashLoopBackOff",
        60,
    )
    assert status_of(pod)["lastState"]["terminated"]["reason"] == "StartError"


def test_init_containers_run_in_order_before_the_others(kube: Kube) -> None:
    mounts = [{"name": "v", "mountPath": "/v"}]
    inits = [
        {
            "name": f"init-{i}",
            "image": IMAGE,
            "command": ["sh", "-c", f"echo {i} >> /v/order"],
            "volumeMounts": mounts,
        }
        for i in (1, 2)
    ]
    kube.pod(
        "ordered",
        ["cat", "/v/order"],
        spec={"initContainers": inits, "volumes": [{"name": "v", "emptyDir": {}}]},
        volumeMounts=mounts,
    )
    pod = kube.wait_phase("ordered", "Succeeded")
    assert kube.logs("ordered", container="main").split() == ["1", "2"]
    assert condition_of(pod, "Initialized")["status"] == "True"
    assert [
        status["state"]["terminated"]["exitCode"] for status in pod["status"]["initContainerStatuses"]
    ] == [0, 0]


def test_failing_init_container_fails_a_never_restarted_pod(kube: Kube) -> None:
    init = {"name": "init", "image": IMAGE, "command": ["sh", "-c", "exit 5"]}
    kube.pod("blocked", ["true"], spec={"initContainers": [init]})
    pod = kube.wait_phase("blocked", "Failed")
    assert state_of(pod)["waiting"]["reason"] == "PodInitializing"
    assert pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 5


def test_a_sidecar_runs_beside_and_ends_after_the_others(kube: Kube) -> None:
    sidecar = {"name": "side", "image": IMAGE, "command": ["sleep", "60"], "restartPolicy": "Always"}
    kube.pod(
        "pair", ["sh", "-c", "exit 0"], spec={"initContainers": [sidecar], "terminationGracePeriodSeconds": 2}
    )
    pod = kube.wait_phase("pair", "Succeeded")
    assert status_of(pod)["state"]["terminated"]["exitCode"] == 0


def test_all_containers_count_for_the_pods_end(kube: Kube) -> None:
    other = {"name": "other", "image": IMAGE, "command": ["sh", "-c", "exit 4"]}
    main = {"name": "main", "image": IMAGE, "command": ["sh", "-c", "sleep 0.3"]}
    kube.pod("two", spec={"containers": [main, other]})
    pod = kube.wait_phase("two", "Failed")
    assert state_of(pod, "other")["terminated"]["exitCode"] == 4
    assert state_of(pod, "main")["terminated"]["exitCode"] == 0


def test_a_pod_ends_at_its_deadline(kube: Kube) -> None:
    kube.pod("late", ["sleep", "60"], spec={"activeDeadlineSeconds": 1, "terminationGracePeriodSeconds": 0})
    pod = kube.wait_phase("late", "Failed")
    assert pod["status"]["reason"] == "DeadlineExceeded"
    assert pod["status"]["message"] == "Pod was active on the node longer than the specified deadline"


def test_a_forced_deletion_removes_at_once(kube: Kube) -> None:
    kube.pod("forced", ["sleep", "60"], spec={"terminationGracePeriodSeconds": 60})
    kube.wait_phase("forced", "Running")
    kube.delete("pods", "forced", gracePeriodSeconds=0)
    until(lambda: kube.gone("pods", "forced"), "the pod to be gone")


def test_variables_in_commands_are_expanded(kube: Kube) -> None:
    env = [{"name": "NAME", "value": "tide"}]
    kube.pod("expand", ["sh", "-c"], args=["printf %s '$(NAME) $$(NAME) $(OTHER)'"], env=env)
    kube.wait_phase("expand", "Succeeded")
    assert kube.logs("expand") == "tide $(NAME) $(OTHER)"
