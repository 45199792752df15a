"""Keys of a job: another one makes another coordinator, and no worker ends for it."""

from __future__ import annotations

from typing import Any

import pytest
from operator_world import World, job_object

from springtide_operator import records
from springtide_operator.api import names
from springtide_operator.api.job import Job, JobKey
from springtide_operator.plan import keys
from springtide_operator.plan.actions import CreateCoordinator, DeletePod, EnsureSecret, Plan
from springtide_operator.plan.observation import Observation

Object = dict[str, Any]
FIRST, SECOND = "aaaaaa", "bbbbbb"
DAY = 86_400.0


def started(key: str = FIRST, tls: bool = False, servers: int = 0, replicas: int = 2) -> World:
    job = job_object(replicas)
    if tls:
        job["spec"]["security"] = {"tls": True}
    if servers:
        job["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": servers}}
    world = World(job=job, key=key)
    world.settle()
    world.reports()
    return world


def secrets_of(pod: Object) -> dict[str, str]:
    """Variables that come from Secrets, each with the key's name and the entry."""
    prefix = names.secret_name("digits", "job-uid-1234") + "-"
    found = {}
    for entry in pod["spec"]["containers"][0]["env"]:
        reference = (entry.get("valueFrom") or {}).get("secretKeyRef")
        if reference:
            found[entry["name"]] = reference["name"].removeprefix(prefix) + ":" + reference["key"]
    return found


def reasons_of(decided: Plan) -> list[str]:
    """Return why coordinators are made."""
    return [action.reason for action in decided.actions if isinstance(action, CreateCoordinator)]


def key_of(pod: Object) -> JobKey:
    return JobKey.parse(pod["metadata"]["annotations"][names.ANNOTATION_KEY])


def roll(world: World) -> set[str]:
    """Live through rounds in which servers may be replaced; return which were, one at a time."""
    gone: list[str] = []
    for _ in range(14):
        world.reports()
        found = [action for action in world.round().actions if isinstance(action, DeletePod)]
        deletions = [action.uid for action in found if action.because == "KeyReplaced"]
        assert len(deletions) <= 1
        gone += deletions
        world.kubelet()
        world.now += 10
    assert len(gone) == len(set(gone))
    return set(gone)


def listed(world: World) -> list[str]:
    return [entry["id"] for entry in world.status["keys"]]


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def test_all_pods_are_made_with_the_key_that_status_names() -> None:
    world = started()
    assert world.status["keys"] == [{"id": FIRST, "secret": f"digits-token-job-uid--{FIRST}"}]
    assert world.secrets == {f"digits-token-job-uid--{FIRST}"}
    for pod in (*world.workers(), *world.coordinators()):
        assert secrets_of(pod) == {"SPRINGTIDE_TOKEN": f"{FIRST}:token"}
        assert pod["metadata"]["annotations"][names.ANNOTATION_KEY] == FIRST


def test_new_key_makes_a_coordinator_that_knows_both() -> None:
    world = started()
    workers, old = uids(world.workers()), world.coordinators()[0]
    world.key = SECOND
    assert [type(action) for action in world.round().actions] == [EnsureSecret]
    decided = world.round()
    assert reasons_of(decided) == ["the job has a new key"]
    deleted = [action.uid for action in decided.actions if isinstance(action, DeletePod)]
    assert deleted == [old["metadata"]["uid"]], "no worker ends"
    world.settle()
    (coordinator,) = world.coordinators()
    assert secrets_of(coordinator) == {
        "SPRINGTIDE_TOKEN": f"{SECOND}:token",
        "SPRINGTIDE_FORMER_TOKEN_1": f"{FIRST}:token",
    }
    assert uids(world.workers()) == workers
    assert listed(world) == [SECOND, FIRST]
    assert world.incarnations_made == [1, 2]


def test_older_key_counts_until_no_pod_has_it() -> None:
    world = started()
    world.key = SECOND
    world.settle()
    for number, pod in enumerate(world.workers(), 1):
        world.ask_deletion(pod)
        world.settle()
        (coordinator,) = world.coordinators()
        known = coordinator["metadata"]["annotations"][names.ANNOTATION_KEY]
        assert known == (f"{SECOND},{FIRST}" if number == 1 else SECOND)
    assert listed(world) == [SECOND]
    assert {secrets_of(pod)["SPRINGTIDE_TOKEN"] for pod in world.workers()} == {f"{SECOND}:token"}


def test_a_missing_secret_keeps_no_coordinator_from_starting() -> None:
    world = started()
    world.key = SECOND
    world.settle()
    (coordinator,) = world.coordinators()
    optional = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"].get("optional", False)
        for entry in coordinator["spec"]["containers"][0]["env"]
        if "secretKeyRef" in entry.get("valueFrom", {})
    }
    assert optional == {"SPRINGTIDE_TOKEN": False, "SPRINGTIDE_FORMER_TOKEN_1": True}


def test_no_pod_is_made_before_the_secret_of_its_key() -> None:
    world = started()
    world.key = SECOND
    world.ask_deletion(world.workers()[0])
    world.kubelet()
    (first, *rest) = world.plan().actions
    assert isinstance(first, EnsureSecret)
    assert not any(type(action).__name__ == "CreateWorker" for action in rest)


def test_operator_that_dies_in_between_goes_on_where_it_was() -> None:
    for steps in range(1, 6):
        world = started()
        world.key = SECOND
        world.round(steps)
        world.die()
        world.settle()
        (coordinator,) = world.coordinators()
        assert coordinator["metadata"]["annotations"][names.ANNOTATION_KEY] == f"{SECOND},{FIRST}"
        assert len(world.workers()) == 2


def test_lost_status_forgets_no_key_that_a_worker_has() -> None:
    world = started()
    world.key = SECOND
    world.settle()
    world.job["status"] = {}
    world.die()
    world.settle()
    assert listed(world) == [SECOND, FIRST]


def test_pods_of_before_keys_had_names_are_let_in() -> None:
    world = started(key="")
    assert "keys" not in world.status
    world.key = SECOND
    world.settle()
    (coordinator,) = world.coordinators()
    former = names.secret_name("digits", "job-uid-1234") + ":token"
    assert secrets_of(coordinator)["SPRINGTIDE_FORMER_TOKEN_1"] == former
    assert listed(world) == [SECOND, ""]


def test_servers_of_an_older_key_hand_over_one_at_a_time() -> None:
    world = started(servers=2)
    workers, before = uids(world.workers()), uids(world.servers())
    world.key = SECOND
    assert roll(world) == before
    assert uids(world.workers()) == workers, "no worker ends"
    for pod in world.servers():
        assert secrets_of(pod) == {
            "SPRINGTIDE_TOKEN": f"{SECOND}:token",
            "SPRINGTIDE_FORMER_TOKEN_1": f"{FIRST}:token",
        }


def test_worker_beside_older_servers_has_their_token_too() -> None:
    world = started(servers=2)
    world.key = SECOND
    world.ask_deletion(world.workers()[0])
    world.settle()
    made = [pod for pod in world.workers() if key_of(pod).id == SECOND]
    assert [secrets_of(pod)["SPRINGTIDE_FORMER_TOKEN_1"] for pod in made] == [f"{FIRST}:token"]
    world = started()
    world.key = SECOND
    world.ask_deletion(world.workers()[0])
    world.settle()
    made = [pod for pod in world.workers() if key_of(pod).id == SECOND]
    assert [[*secrets_of(pod)] for pod in made] == [["SPRINGTIDE_TOKEN"]], "without servers it needs none"


def test_servers_know_certificates_and_authorities_of_older_keys() -> None:
    world = started(tls=True, servers=1)
    first = key_of(world.servers()[0])
    world.key = SECOND
    roll(world)
    (server,) = world.servers()
    second, found = key_of(server), secrets_of(server)
    assert (first.id, second.id) == (FIRST, SECOND)
    assert found["SPRINGTIDE_TLS_CA"] == f"{second.name}:ca.crt"
    assert found["SPRINGTIDE_TLS_CERTIFICATE"] == f"{second.name}:tls.crt"
    for variable, entry in (("CA", "ca.crt"), ("CERTIFICATE", "tls.crt"), ("KEY", "tls.key")):
        assert found[f"SPRINGTIDE_FORMER_{variable}_1"] == f"{first.name}:{entry}"


# ---- certificates


def test_certificate_is_renewed_in_time_by_a_new_coordinator() -> None:
    world = started(tls=True)
    first = key_of(world.coordinators()[0])
    begun, workers = world.now, uids(world.workers())
    assert first.certificate_ends == pytest.approx(begun + 90 * DAY, abs=3600)
    world.now = first.certificate_ends - 31 * DAY - 90 / 12 * DAY
    assert world.plan().actions == ()
    world.now = first.certificate_ends - 29 * DAY
    assert [type(action) for action in world.round().actions] == [EnsureSecret]
    decided = world.round()
    assert reasons_of(decided) == ["its certificate ends soon"]
    world.settle()
    (coordinator,) = world.coordinators()
    second = key_of(coordinator)
    assert second.id == first.id
    assert second.certificate_ends > first.certificate_ends + 59 * DAY
    assert secrets_of(coordinator)["SPRINGTIDE_TLS_CERTIFICATE"] == f"{second.name}:tls.crt"
    assert uids(world.workers()) == workers, "what they trust has not changed"


def degraded(world: World) -> tuple[str, str, str]:
    said = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
    return said["status"], said["reason"], said["message"]


def test_certificate_that_nobody_renews_is_said_before_its_end() -> None:
    world = started(tls=True, servers=1)
    (coordinator,), (server,) = world.coordinators(), world.servers()
    ends = key_of(coordinator).certificate_ends
    act = world.act
    world.act = lambda action: isinstance(action, EnsureSecret) or act(action)  # type: ignore
    for days, said in ((16, ""), (14, "of digits-coordinator-1 ends at"), (-1, "-1 has ended at")):
        world.now = ends - days * DAY
        world.reports()
        world.round()
        status, _, text = degraded(world)
        assert (status, "certificate" in text) == (str(bool(said)), bool(said)), text
        assert said in text
    assert degraded(world)[1] == "CertificateEnding"
    assert world.coordinators() == [coordinator], "the Secret that a successor reads is not there"
    assert world.servers() == [server]
    world.act = act  # type: ignore[method-assign]
    for _ in range(2):
        world.round()
        world.kubelet()
    world.round()
    assert "certificate of digits-ps-0-0 has ended at" in degraded(world)[2]
    assert roll(world) == {server["metadata"]["uid"]}
    assert "certificate" not in degraded(world)[2]


def test_plan_wakes_when_a_certificate_is_due() -> None:
    world = started(tls=True)
    at = world.plan().wake_at
    assert at is not None
    ends = key_of(world.coordinators()[0]).certificate_ends
    assert ends - 38 * DAY < at <= ends - 30 * DAY


def test_jobs_made_together_are_not_renewed_together() -> None:
    due = {round(keys.renewal(f"uid-{number}", 0, 90 * DAY)) for number in range(50)}
    assert len(due) > 40
    assert all(-38 * DAY < at <= -30 * DAY for at in due)


def test_certificate_of_a_clock_that_was_wrong_is_made_anew() -> None:
    seen = Observation(key=FIRST, certificate_seconds=90 * DAY)
    assert keys.certificate_end("uid", 0, seen, 1000.0) == 1000 + 90 * DAY
    assert keys.certificate_end("uid", int(10_000 * DAY), seen, 1000.0) == 1000 + 90 * DAY


def test_servers_are_renewed_one_at_a_time() -> None:
    world = started(tls=True, servers=2)
    first = key_of(world.servers()[0])
    world.now = first.certificate_ends - 29 * DAY
    before = uids(world.servers())
    assert roll(world) == before
    names_now = {pod["metadata"]["annotations"][names.ANNOTATION_KEY] for pod in world.servers()}
    assert len(names_now) == 1
    assert JobKey.parse(names_now.pop()).certificate_ends > first.certificate_ends


def test_forged_keys_in_status_lead_to_no_other_secret() -> None:
    obj = job_object(1)
    obj["status"] = {"keys": [{"id": "../x", "certificateEnds": "never"}, "x", {"id": 7}, {"id": SECOND}]}
    job = Job.parse(obj)
    assert [key.name for key in job.keys] == ["", "", SECOND]
    kept = keys.with_keys(job, Observation(key=FIRST), 0.0)
    assert [key.id for key in kept.keys] == [FIRST], "only what a pod was made with stays"


def test_users_word_for_another_key_is_read() -> None:
    obj = job_object(1)
    obj["metadata"]["annotations"] = {names.ANNOTATION_KEY_TURN: "x" * 100, "other": "y"}
    slim = records.job(obj)
    assert slim["metadata"]["annotations"] == {names.ANNOTATION_KEY_TURN: "x" * 100}
    assert Job.parse(slim).key_turn == "x" * 64
