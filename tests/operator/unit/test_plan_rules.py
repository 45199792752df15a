"""Rules, incidents and what they leave behind: avoided nodes, given-up pods, counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_failure_table import RAISED, disrupted, done, waits, worker
from operator_world import World, job_object

from springtide_operator.api import reasons
from springtide_operator.api.failure_rules import FailureRule
from springtide_operator.manifests.worker import TemplateError, worker_pod
from springtide_operator.plan import rules
from springtide_operator.plan.actions import CreateWorker
from springtide_operator.plan.ledger import TOGETHER_SECONDS, Incident, take_in
from springtide_operator.plan.observation import End
from springtide_operator.plan.outcome import raised


def a_rule(action: str = "FailJob", **when: object) -> FailureRule:
    return FailureRule.model_validate({"action": action, **when})


def failed(reason: str = "Error", code: int = 1, exception: str | None = None) -> End:
    return End(reasons.END_FAILED, reason, "boom", code, exception=exception)


PREEMPTED = End(reasons.END_PREEMPTED, "EvictionByEvictionAPI", "by drain", 137)


@pytest.mark.parametrize(
    ("rule", "end", "expected"),
    [
        (a_rule(reasons=["Evicted"]), PREEMPTED, True),
        (a_rule(reasons=["EvictionByEvictionAPI"]), PREEMPTED, True),
        (a_rule(reasons=["OOMkilled"]), failed("OOMKilled"), True),  # in any case
        (a_rule(reasons=["imagepullbackoff"]), failed("ErrImagePull"), True),
        (a_rule(reasons=["OOM"]), failed("OOMKilled"), False),
        (a_rule(exitCodes={"operator": "In", "values": [137]}), PREEMPTED, False),
        (a_rule(exitCodes={"operator": "NotIn", "values": [1]}), PREEMPTED, False),
        (a_rule(exitCodes={"operator": "In", "values": [1, 2]}), failed(), True),
        (a_rule(exitCodes={"operator": "NotIn", "values": [1, 2]}), failed(), False),
        (a_rule(exceptions=["Error"]), failed(exception="json.Error"), True),
        (a_rule(exceptions=["json.Error"]), failed(exception="json.Error"), True),
        (a_rule(exceptions=["other.Error"]), failed(exception="json.Error"), False),
        (a_rule(exceptions=["Error"]), failed(), False),
        (a_rule(reasons=["OOMKilled"], exceptions=["MemoryError"]), failed("OOMKilled"), False),
        (
            a_rule(reasons=["Error"], exitCodes={"operator": "In", "values": [1]}, exceptions=["E"]),
            failed(exception="E"),
            True,
        ),
    ],
)
def test_a_rule_holds_when_all_that_it_names_holds(rule: FailureRule, end: End, expected: bool) -> None:
    assert rules.holds(rule, end) is expected


@pytest.mark.parametrize(
    ("reason", "meant"),
    [
        ("OOMKiled", "OOMKilled"),
        ("evictd", "Evicted"),
        ("Evict", "Evicted"),
        ("NodeLos", "NodeLost"),
        ("ImagePullBackoffs", "ImagePullBackOff"),
        ("Unscheduleable", "Unschedulable"),
        ("oomkilled", ""),  # any case will do
        ("OOM", ""),
        ("GpuFellOffTheBus", ""),  # the list is open
        ("SpotReclaimed", ""),
    ],
)
def test_a_reason_that_is_almost_a_known_one_is_doubted(reason: str, meant: str) -> None:
    said = rules.doubts([a_rule(reasons=["Hung"]), a_rule(reasons=["Left", reason])])
    assert len(said) == bool(meant)
    assert all(f"rules[1]: no end of a worker is known by the reason {reason};" in text for text in said)
    assert all(f"did you mean {meant}?" in text for text in said)


@given(st.sampled_from(sorted(rules.KNOWN_REASONS)))
def test_known_reasons_are_not_doubted(reason: str) -> None:
    assert rules.doubts([a_rule(reasons=[reason, reason.upper()])]) == []


def test_a_doubt_is_told_once_for_each_version_of_the_spec() -> None:
    world = World()
    policy = world.job["spec"]["failurePolicy"]
    policy["rules"] = [{"action": "Ignore", "reasons": ["OOMKiled"]}]

    def told() -> int:
        return sum(event.reason == reasons.EVENT_REASON_UNKNOWN for event in world.round().events)

    assert [told() for _ in range(4)] == [1, 0, 0, 0]
    world.job["metadata"]["generation"] += 1
    assert [told() for _ in range(3)] == [1, 0, 0]
    policy["rules"][0]["reasons"] = ["OOMKilled"]
    world.job["metadata"]["generation"] += 1
    assert [told() for _ in range(3)] == [0, 0, 0]


def test_class_is_read_only_from_log_ending_with_traceback() -> None:
    head = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    f()\n'
    assert raised(head + "my.mod.Odd: a\nb: c\n") == "my.mod.Odd"
    assert raised(head + "KeyboardInterrupt\n") == "KeyboardInterrupt"
    assert raised(head + "    ^^^\nValueError: two\nlines\n") == "ValueError"
    assert raised("Error: no traceback\n") is None
    assert raised(head) is None
    assert raised("") is None


def running_world(replicas: int = 3, **policy: object) -> World:
    world = World(job=job_object(replicas))
    world.job["spec"]["failurePolicy"].update(policy)
    world.settle()
    for number, pod in enumerate(world.workers()):
        pod["spec"]["nodeName"] = f"node-{number}"
    world.now += 400
    return world


def test_200_failures_over_2_s_are_one_decision_and_two_events() -> None:
    world = running_world(200, backoffLimit=1)
    pods = world.workers()
    for pod in pods[:120]:
        world.end(pod, 1, RAISED % "OSError")
    first = world.round()
    world.now += 2
    for pod in pods[120:]:
        world.end(pod, 1, RAISED % "OSError")
    second = world.round()
    restarts = world.status["restarts"]
    assert (restarts["failures"], restarts["failedWorkers"]) == (1, 200)
    assert [e.reason for e in (*first.events, *second.events)] == ["WorkerFailed", "WorkerFailed"]
    assert "and 119 more: OSError: boom" in first.events[0].message
    assert len(world.workers()) == 200
    world.kubelet()
    for pod in world.workers():
        world.end(pod, 1, RAISED % "OSError")
    world.round()
    assert world.status["state"] == "Failed"
    assert world.status["restarts"]["failures"] == 2


def test_an_operator_that_takes_over_counts_on() -> None:
    world = running_world(3)
    world.end(worker(world, 0), 1, RAISED % "OSError")
    world.round(1)  # it dies after status was written
    world.die()
    world.end(worker(world, 1), 1, RAISED % "OSError")
    world.round()
    assert world.status["restarts"]["failures"] == 1
    world.now += TOGETHER_SECONDS
    world.end(worker(world, 2), 1, RAISED % "OSError")
    world.round()
    assert world.status["restarts"]["failures"] == 2
    world.now += TOGETHER_SECONDS
    world.round()
    assert "incidents" not in world.status["restarts"]


SLOTS = st.sets(st.integers(0, 4), min_size=1)


@given(st.lists(st.tuples(SLOTS, st.floats(0, 15), st.sampled_from(["a", "b"])), max_size=12))
def test_every_slot_counts_at_most_once_in_an_incident(
    story: list[tuple[set[int], float, str]],
) -> None:
    known: dict[str, Incident] = {}
    now, decisions = 1000.0, 0
    for slots, passed, cause in story:
        now += passed
        before = known.get(cause)
        known, new = take_in(known, cause, slots, now)
        joins = before is not None and before.is_open(now) and not before.slots & slots
        assert new is not joins
        assert known[cause].slots >= slots
        assert known[cause].is_open(now)
        decisions += new
        for incident in known.values():
            assert Incident.from_status(incident.to_status()).slots == incident.slots
    assert decisions <= len(story)


def test_replace_puts_next_attempt_on_another_node_then_forgets() -> None:
    policy = {"rules": [{"action": "Replace", "exitCodes": {"operator": "In", "values": [77]}}]}
    world = running_world(3, **policy)
    world.end(worker(world, 1), 77)
    decided = world.round()
    made = next(a for a in decided.actions if isinstance(a, CreateWorker))
    assert (made.slot, made.attempt, made.avoid) == (1, 1, "node-1")
    assert "not on node node-1" in made.reason
    assert world.status["slots"]["1"]["avoid"] == "node-1"
    world.die()
    world.vanish(worker(world, 1))  # as if its creation had never been answered
    world.round()  # finds the Service
    again = world.round()
    assert [a.avoid for a in again.actions if isinstance(a, CreateWorker)] == ["node-1"]
    world.settle()
    assert "avoid" not in world.status["slots"]["1"]


def test_given_up_pod_counts_once_and_is_replaced_after_deletion() -> None:
    world = running_world(3, rules=[{"action": "Replace", "reasons": ["ImagePullBackOff"]}])
    waits(world, 2, "ImagePullBackOff")
    assert done(world.round()) == {"-2-0:GivenUp"}
    world.die()
    world.round()  # finds the Service
    assert done(world.round()) >= {"+2-1"}
    assert world.status["restarts"]["failures"] == 1
    pod = worker(world, 2)
    terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-2"]}]}
    ]


def test_given_up_pod_counts_as_failed_also_if_status_was_lost() -> None:
    world = running_world(2, rules=[{"action": "Restart", "reasons": ["ImagePullBackOff"]}])
    waits(world, 1, "ImagePullBackOff")
    world.round()
    world.job["status"] = {}
    world.die()
    world.round()
    assert world.status["restarts"]["failures"] == 1


def test_avoided_node_is_added_to_each_alternative_of_affinity() -> None:
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}, {}]}
    kind = "requiredDuringSchedulingIgnoredDuringExecution"
    job = job_object(1)
    job["spec"]["workers"]["template"]["spec"]["affinity"] = {"nodeAffinity": {kind: required}}
    parsed = World(job=job).parsed()
    made = worker_pod(parsed, 0, 1, "10.0.0.1:7070", avoid="node-7")
    terms = made["spec"]["affinity"]["nodeAffinity"][kind]["nodeSelectorTerms"]
    field = {"key": "metadata.name", "operator": "NotIn", "values": ["node-7"]}
    assert terms[0] == {"matchExpressions": [{"key": "gpu", "operator": "Exists"}], "matchFields": [field]}
    assert terms[1] == {}  # it matches no node, and goes on to
    assert "affinity" in worker_pod(parsed, 0, 1, "10.0.0.1:7070")["spec"]
    required["nodeSelectorTerms"] = ["gpu"]
    with pytest.raises(TemplateError, match="nodeSelectorTerms: each must be an object"):
        worker_pod(World(job=job).parsed(), 0, 1, "10.0.0.1:7070", avoid="node-7")


def test_preemptions_have_a_budget_of_their_own() -> None:
    world = running_world(2, preemptionLimit=1, backoffLimit=0)
    for _ in range(2):
        disrupted(world, 0, "PreemptionByScheduler")
        world.settle()
        world.now += 60
    assert world.status["state"] == "Failed"
    failed = next(c for c in world.status["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "PreemptionLimitExceeded"


def test_coordinator_repeatedly_ending_young_waits_and_says_so() -> None:
    world = running_world(1)
    gaps = []
    for _ in range(5):
        pod = world.coordinators()[0]
        world.evict(pod)
        began = world.now
        world.round_until(world.coordinators, "a new coordinator")
        gaps.append(world.now - began)
        if len(gaps) == 4:
            degraded = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
            assert degraded["reason"] in (reasons.COORDINATOR_FAILING, reasons.HEALTHY)
        world.kubelet()
    assert gaps == sorted(gaps)
    assert 4 <= gaps[-1] <= 10
    assert world.status["backoff"]["coordinator"]["count"] >= 4
