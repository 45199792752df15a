"""The failure table, first part: workers that fail, workers that others end, and rules.

Each row has an event, the operator's actions and its words, through the real plan().
"""

from __future__ import annotations

import pytest
from operator_failure_table import (
    ALL_GO,
    EXCEEDED,
    OTHERS_GO,
    RAISED,
    RULED,
    TRACEBACK,
    Day,
    Object,
    disrupted,
    ended_by_the_node,
    live_through,
    waits,
    worker,
)
from operator_world import World, finished_message

from springtide_operator.plan.values import timestamp


def rule(action: str, **when: object) -> dict[str, object]:
    return {"rules": [{"action": action, **when}]}


def together(world: World, text: str) -> None:
    for pod in world.workers():
        world.end(pod, 1, text)


def young(world: World) -> None:
    """All workers have just started."""
    for pod in world.workers():
        pod["metadata"]["creationTimestamp"] = timestamp(world.now)


def sidecar_stays(world: World, code: int, text: str) -> None:
    """The script ended; an injected container runs on, so the pod's phase stays Running."""
    pod = worker(world)
    world.end(pod, code, text)
    pod["status"]["phase"] = "Running"
    pod["status"]["containerStatuses"].append({"name": "mesh-proxy", "state": {"running": {}}})


def over_its_limit(pod: Object) -> None:
    text = "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. "
    pod["status"]["message"] = text


RESTARTS = [
    Day(
        "script raises",
        lambda w: w.end(worker(w), 1, RAISED % "ValueError"),
        "+0-1",
        counts=(1, 0),
        event="WorkerFailed",
    ),
    Day(
        "script raises, no budget",
        lambda w: w.end(worker(w), 1, RAISED % "ValueError"),
        OTHERS_GO,
        ("Failed", EXCEEDED, "ValueError: boom (train.py:31 in main)"),
        (1, 0),
        {"backoffLimit": 0},
    ),
    Day(
        "script dies before init()",
        lambda w: w.end(worker(w), 1, TRACEBACK),
        OTHERS_GO,
        ("Failed", EXCEEDED, 'FileNotFoundError: no data in /nowhere (File "/springtide/train.py", line 7'),
        (1, 0),
        {"backoffLimit": 0},
    ),
    Day(
        "all fail at once for one cause",
        lambda w: together(w, RAISED % "OSError"),
        "+0-1 +1-1 +2-1",
        counts=(1, 0),
    ),
    Day(
        "all fail at once, limit 0",
        lambda w: together(w, RAISED % "OSError"),
        "-c1:JobOver",
        ("Failed", EXCEEDED, "1 worker failures"),
        (1, 0),
        {"backoffLimit": 0},
    ),
    Day(
        "two fail at once for two causes",
        lambda w: (w.end(worker(w, 0), 1, RAISED % "OSError"), w.end(worker(w, 1), 1, RAISED % "KeyError")),
        "+0-1 +1-1",
        counts=(2, 0),
    ),
    Day(
        "two fail young for two causes",
        lambda w: (
            young(w),
            w.end(worker(w, 0), 1, RAISED % "OSError"),
            w.end(worker(w, 1), 1, RAISED % "KeyError"),
        ),
        "",
        ("Degraded", "BackingOff", "boom"),
        (2, 0),
    ),
    Day("exit 0 without finishing", lambda w: w.end(worker(w), 0), "+0-1", counts=(1, 0)),
    Day("killed by a signal", lambda w: w.end(worker(w), 137), "+0-1", counts=(1, 0), event="WorkerFailed"),
    Day(
        "out of memory",
        lambda w: w.end(worker(w), 137, reason="OOMKilled"),
        OTHERS_GO,
        ("Failed", EXCEEDED, "out of memory"),
        (1, 0),
        {"backoffLimit": 0},
    ),
    Day(
        "more storage than its limit",
        lambda w: (ended_by_the_node(w, 0, "Evicted"), over_its_limit(w.workers(live=False)[0])),
        OTHERS_GO,
        ("Failed", EXCEEDED, "it used more storage than it may: Pod ephemeral local storage usage exceeds"),
        (1, 0),
        {"backoffLimit": 0},
    ),
    Day(
        "command not found",
        lambda w: w.end(worker(w), 128, "no such file", reason="StartError"),
        OTHERS_GO,
        ("Failed", EXCEEDED, "its command cannot be started"),
        (1, 0),
        {"backoffLimit": 0},
    ),
    Day(
        "a finished worker with an injected sidecar",
        lambda w: sidecar_stays(w, 0, finished_message(1)),
        "-0-0:JobOver",
        ("Succeeded", "WorkerFinished", ""),
    ),
    Day(
        "a failed worker with an injected sidecar",
        lambda w: sidecar_stays(w, 1, RAISED % "ValueError"),
        "+0-1 -0-0:Replaced",
        counts=(1, 0),
    ),
]

DISRUPTIONS = [
    Day(
        "evicted by drain",
        lambda w: disrupted(w, 0, "EvictionByEvictionAPI"),
        "+0-1",
        counts=(0, 1),
        event="WorkerPreempted",
    ),
    Day(
        "preempted by the scheduler",
        lambda w: disrupted(w, 0, "PreemptionByScheduler"),
        "+0-1",
        counts=(0, 1),
    ),
    Day("driven out by a taint", lambda w: disrupted(w, 0, "DeletionByTaintManager"), "+0-1", counts=(0, 1)),
    Day("collected with its node", lambda w: disrupted(w, 0, "DeletionByPodGC"), "+0-1", counts=(0, 1)),
    Day(
        "ended by the kubelet for the node's sake",
        lambda w: ended_by_the_node(w, 0, "Evicted"),
        "+0-1 -0-0:Replaced",
        counts=(0, 1),
    ),
    Day(
        "spot node shuts down",
        lambda w: ended_by_the_node(w, 0, "NodeShutdown"),
        "+0-1 -0-0:Replaced",
        counts=(0, 1),
    ),
    Day(
        "no room on the node after all",
        lambda w: ended_by_the_node(w, 0, "OutOfcpu"),
        "+0-1 -0-0:Replaced",
        counts=(0, 1),
    ),
    Day("deleted by a user", lambda w: w.ask_deletion(worker(w)), "+0-1", counts=(0, 1)),
    Day("deleted by force", lambda w: w.vanish(worker(w)), "+0-1", counts=(0, 1)),
    Day(
        "left after SIGTERM",
        lambda w: w.end(worker(w), 0, '{"outcome": "Left", "reason": "SIGTERM"}'),
        "+0-1 -0-0:Replaced",
        counts=(0, 1),
    ),
    Day(
        "preempted once too often",
        lambda w: disrupted(w, 0, "PreemptionByScheduler"),
        OTHERS_GO,
        ("Failed", "PreemptionLimitExceeded", "failurePolicy.preemptionLimit is 0"),
        (0, 1),
        {"preemptionLimit": 0},
    ),
    Day(
        "a zone is lost, limit 1",
        lambda w: [disrupted(w, n, "DeletionByTaintManager") for n in range(3)],
        "+0-1 +1-1 +2-1",
        counts=(0, 1),
        policy={"preemptionLimit": 1},
    ),
    Day("scaled down", lambda w: w.scale(2), "-2-0:ScaledDown"),
    Day(
        "failed before somebody deleted it",
        lambda w: (w.fail(worker(w)), setattr(w, "now", w.now + 5), w.ask_deletion(w.workers(live=False)[0])),
        "+0-1",
        counts=(1, 0),
    ),
]

RULES = [
    Day(
        "rule: exception class fails the job",
        lambda w: w.end(worker(w), 1, RAISED % "my.mod.BadConfig"),
        OTHERS_GO,
        ("Failed", RULED, "failurePolicy.rules[0] says FailJob"),
        (1, 0),
        rule("FailJob", exceptions=["BadConfig"]),
    ),
    Day(
        "rule: exception of a log's traceback",
        lambda w: w.end(worker(w), 1, TRACEBACK),
        OTHERS_GO,
        ("Failed", RULED, "no data in /nowhere"),
        (1, 0),
        rule("FailJob", exceptions=["FileNotFoundError"]),
    ),
    Day(
        "rule: another exception",
        lambda w: w.end(worker(w), 1, RAISED % "KeyError"),
        "+0-1",
        counts=(1, 0),
        policy=rule("FailJob", exceptions=["BadConfig"]),
    ),
    Day(
        "rule: exit code fails the job",
        lambda w: w.end(worker(w), 42),
        OTHERS_GO,
        ("Failed", RULED, "exited with code 42"),
        (1, 0),
        rule("FailJob", exitCodes={"operator": "In", "values": [42]}),
    ),
    Day(
        "rule: exit code is none of the retryable ones",
        lambda w: w.end(worker(w), 1),
        OTHERS_GO,
        ("Failed", RULED, "says FailJob"),
        (1, 0),
        rule("FailJob", exitCodes={"operator": "NotIn", "values": [75]}),
    ),
    Day(
        "rule: exit code 137 is not looked at where it was evicted",
        lambda w: ended_by_the_node(w, 0, "Evicted"),
        "+0-1 -0-0:Replaced",
        counts=(0, 1),
        policy=rule("FailJob", exitCodes={"operator": "In", "values": [137]}),
    ),
    Day(
        "rule: ignored",
        lambda w: w.end(worker(w), 3),
        "+0-1",
        policy=rule("Ignore", exitCodes={"operator": "In", "values": [3]}),
        event="WorkerEndIgnored",
    ),
    Day(
        "rule: out of memory goes to another node",
        lambda w: w.end(worker(w), 137, reason="OOMKilled"),
        "+0-1",
        counts=(1, 0),
        policy=rule("Replace", reasons=["OOMKilled"]),
    ),
    Day(
        "rule: evictions count as failures",
        lambda w: disrupted(w, 0, "EvictionByEvictionAPI"),
        "+0-1",
        counts=(1, 0),
        policy=rule("Restart", reasons=["Evicted"]),
    ),
    Day(
        "rule: a lost node fails the job",
        lambda w: disrupted(w, 0, "DeletionByTaintManager"),
        OTHERS_GO,
        ("Failed", RULED, ""),
        (0, 1),
        rule("FailJob", reasons=["NodeLost"]),
    ),
    Day(
        "rule: an image that cannot be pulled fails the job",
        lambda w: waits(w, 0, "ImagePullBackOff"),
        ALL_GO,
        ("Failed", RULED, "cannot be pulled"),
        (1, 0),
        rule("FailJob", reasons=["ImagePullBackOff"]),
    ),
    Day(
        "rule: an image that cannot be pulled is tried elsewhere",
        lambda w: waits(w, 0, "ErrImagePull"),
        "-0-0:GivenUp",
        ("Degraded", "ImagePullFailed", "cannot be pulled"),
        (1, 0),
        rule("Replace", reasons=["ImagePullBackOff"]),
    ),
    Day(
        "rule: first one that holds",
        lambda w: w.end(worker(w), 3),
        "+0-1",
        policy={
            "rules": [
                {"action": "Ignore", "exitCodes": {"operator": "In", "values": [3]}},
                {"action": "FailJob", "reasons": ["Error"]},
            ]
        },
    ),
]

DAYS = [*RESTARTS, *DISRUPTIONS, *RULES]


@pytest.mark.slow
@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.name)
def test_bad_day(day: Day) -> None:
    live_through(day)
