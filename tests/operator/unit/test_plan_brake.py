"""The brake on mass node loss: rows, and random days of partitions, outages and clocks that jump."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from operator_failure_table import done, worker
from operator_world import World, job_object

from springtide_operator.api import names
from springtide_operator.cache import Cache
from springtide_operator.lookout import Hearing, Lookout
from springtide_operator.plan import sight
from springtide_operator.plan.actions import CreateCoordinator, DeletePod, Plan
from springtide_operator.plan.decide import plan
from springtide_operator.plan.observation import (
    CoordinatorPod,
    LeaseSeen,
    MemberReport,
    Node,
    Observation,
    Report,
    Sight,
)
from springtide_operator.plan.values import timestamp

Object = dict[str, Any]


# ---- rows


def world_of(nodes: int, zones: int = 1, workers: int = 3) -> World:
    """Workers on n0, n1, ...; the coordinator on n0; zones one after the other."""
    world = World(job=job_object(workers))
    world.nodes = {f"n{i}": Node(f"n{i}", zone=f"z{i * zones // nodes}") for i in range(nodes)}
    world.settle()
    for pod in world.workers():
        pod["spec"]["nodeName"] = f"n{int(pod['metadata']['labels'][names.LABEL_SLOT]) % nodes}"
    world.coordinators()[0]["spec"]["nodeName"] = "n0"
    world.now += 100
    world.reports()
    return world


def lose(world: World, *lost: str) -> None:
    """Kubernetes hears nothing of these nodes, and the coordinator nothing of the workers there."""
    for name in lost:
        world.node(name, ready=None)
    world.now += 60
    members = tuple(
        MemberReport(pod["metadata"]["uid"], True, pod["spec"]["nodeName"] not in lost, False)
        for pod in world.workers()
    )
    world.reports(members=members)


def degraded(world: World) -> tuple[str, str]:
    said = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
    return said["reason"], said["message"]


@pytest.mark.parametrize(
    ("nodes", "zones", "lost", "held"),
    [
        (1, 1, 1, "the only node looks lost"),
        (2, 1, 1, ""),  # one of two: more than a third, and one by one
        (3, 1, 2, ""),
        (5, 1, 2, ""),
        (12, 1, 4, ""),  # a third, and no more
        (2, 1, 2, "all 2 nodes look lost"),
        (8, 1, 3, "3 of 8 nodes look lost"),
        (12, 1, 5, "5 of 12 nodes look lost"),
        (12, 3, 3, "3 of 4 nodes of zone z2 look lost"),
        (30, 3, 4, "4 of 10 nodes of zone z2 look lost"),
        (30, 3, 3, ""),
        (6, 3, 2, ""),  # a whole zone of two, in a cluster that is heard
    ],
)
def test_brake_holds_from_a_third_of_the_nodes_on(nodes: int, zones: int, lost: int, held: str) -> None:
    world = world_of(nodes, zones)
    worker(world, 2)["spec"]["nodeName"] = f"n{nodes - 1}"
    lose(world, *(f"n{nodes - 1 - i}" for i in range(lost)))
    decided = world.round()
    if held:
        assert done(decided) == set()
        reason, text = degraded(world)
        assert (reason, text.startswith(held)) == ("TooManyNodesUnknown", True), text
        world.now += 3600
        world.reports(members=world.report.members if world.report else ())
        assert done(world.round()) == set()
        assert world.status["restarts"]["preemptions"] == 0
    else:
        assert {"+2-1", "-2-0:NodeLost"} <= done(decided)
        assert degraded(world)[0] != "TooManyNodesUnknown"


def test_released_brake_replaces_those_that_stay_lost() -> None:
    world = world_of(8)
    lose(world, "n2", "n3", "n4")
    assert done(world.round()) == set()
    world.node("n4", ready=True)
    assert done(world.round()) == {"+2-1", "-2-0:NodeLost"}
    assert degraded(world)[0] != "TooManyNodesUnknown"


def test_evicted_pod_is_replaced_while_brake_holds() -> None:
    """Kubernetes' own eviction is its decision, and no more the operator's to doubt."""
    world = world_of(8)
    lose(world, "n2", "n3", "n4")
    world.round()
    world.ask_deletion(worker(world, 2))
    assert done(world.round()) == {"+2-1"}


def test_deleted_nodes_do_not_count_as_lost() -> None:
    """An autoscaler takes away half of the nodes; another one is lost."""
    world = world_of(8)
    for name in ("n4", "n5", "n6", "n7"):
        world.lose_node(name)
    lose(world, "n2")
    assert {"+2-1", "-2-0:NodeLost"} <= done(world.round())


def test_silent_coordinator_stays_while_brake_holds() -> None:
    world = world_of(8)
    for name in ("n0", "n3", "n4"):
        world.node(name, ready=None)
    world.unreachable_since = world.now
    world.now += 60
    assert done(world.round()) == set()
    assert degraded(world)[0] == "TooManyNodesUnknown"
    world.node("n4", ready=True)
    assert done(world.round()) == {"+c2", "-c1:Superseded"}


def deaf_sight(world: World, unanswered: Mapping[str, int], answering: int) -> Callable[[], Observation]:
    """The operator's observation while its call to this coordinator has had no answer for a minute."""
    uid = world.coordinators()[0]["metadata"]["uid"]
    plain = world.observe
    seen = Sight(uid, 60.0, True, unanswered=unanswered, answering=answering)
    return lambda: replace(plain(), sight=seen)


@pytest.mark.parametrize(
    ("unanswered", "answering", "held"),
    [
        (
            {"n0": 1, "n3": 1},
            0,
            "2 of 2 coordinators do not answer",
        ),  # counted without the one on a lost node
        ({"n3": 1, "n4": 2}, 5, "3 of 8 coordinators do not answer"),
        ({"n3": 1, "n4": 2}, 6, ""),
        ({"n0": 9}, 0, ""),  # their node explains it
        ({"n3": 3}, 0, ""),  # one node may be lost, and Kubernetes not know it
    ],
)
def test_operator_that_hears_nobody_replaces_nobody(
    unanswered: dict[str, int], answering: int, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(8)
    world.node("n0", ready=None)
    world.unreachable_since = world.now
    world.now += 60
    if held.startswith("2 of 2"):
        unanswered = {"n5" if name == "n0" else name: count for name, count in unanswered.items()}
    monkeypatch.setattr(world, "observe", deaf_sight(world, unanswered, answering))
    decided = world.round()
    if held:
        assert done(decided) == set()
        assert degraded(world)[0] == "TooManyNodesUnknown"
        assert degraded(world)[1].startswith(held)
    else:
        assert done(decided) == {"+c2", "-c1:Superseded"}


def test_pod_heard_of_lately_stays_though_coordinator_lost_it() -> None:
    world = world_of(8)
    lose(world, "n2")
    uid = worker(world, 2)["metadata"]["uid"]
    seen = replace(world.observe(), heard_at={uid: world.now - 9.5})
    assert done(plan(world.parsed(), seen, world.now)) == set()
    seen = replace(seen, heard_at={uid: world.now - 10.5})
    assert done(plan(world.parsed(), seen, world.now)) == {"+2-1", "-2-0:NodeLost"}


def test_process_that_listens_since_a_moment_kills_nobody() -> None:
    """The operator does not know after a take-over the last words that its predecessor heard."""
    world = world_of(8)
    lose(world, "n2")
    seen = replace(world.observe(), listening_since=world.now - 9.5)
    assert done(plan(world.parsed(), seen, world.now)) == set()
    seen = replace(seen, listening_since=world.now - 10.5)
    assert done(plan(world.parsed(), seen, world.now)) == {"+2-1", "-2-0:NodeLost"}


def test_wall_clock_that_is_ahead_makes_no_coordinator_old() -> None:
    """The coordinator began a moment ago and learns of its members; the operator's clock is an hour ahead."""
    world = world_of(8)
    lose(world, "n2")
    assert world.report is not None
    world.report = replace(world.report, generation=None)
    seen = world.observe()
    steady = 5000.0
    seen = replace(
        seen,
        steady=steady,
        nodes={name: replace(node, since=steady - 60) for name, node in (seen.nodes or {}).items()},
        coordinators=tuple(replace(c, running_seen_at=steady - 9) for c in seen.coordinators),
    )
    assert done(plan(world.parsed(), seen, world.now + 3600)) == set()
    seen = replace(
        seen, coordinators=tuple(replace(c, running_seen_at=steady - 11) for c in seen.coordinators)
    )
    assert done(plan(world.parsed(), seen, world.now + 3600)) == {"+2-1", "-2-0:NodeLost"}


# ---- random days


NODES, ZONES, WORKERS = 9, 3, 6
BEAT, GRACE = 10, 40  # seconds, of kubelets and of Kubernetes' node life cycle controller


@dataclass
class Day(World):
    """A cluster whose nodes, network, clock and API server fail; the operator sees it through a real cache.

    `true` is the time that passes; `now`, the operator's wall clock, jumps. Workers that are cut from the
    coordinator train on in truth: killing them is the fault that is looked for.
    """

    seed: int = 0
    true: float = 5000.0
    dead: set[str] = field(default_factory=set)  # machines without power
    cut: set[str] = field(default_factory=set)  # whose kubelets do not reach the API server
    apart: set[str] = field(default_factory=set)  # whose workers do not reach the coordinator
    away: bool = False  # the API server
    closed: bool = False  # between the operator and coordinators
    beats: dict[str, float] = field(default_factory=dict)
    reported: dict[str, float] = field(
        default_factory=dict
    )  # by uid: when the operator was told that it lives
    began: dict[str, float] = field(default_factory=dict)  # of coordinators
    version: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    held_rounds: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.job = job_object(WORKERS, maxReplicas=WORKERS + 2)
        self.job["spec"]["failurePolicy"]["backoffLimit"] = 10_000
        self.nodes = {f"n{i}": Node(f"n{i}", zone=f"z{i * ZONES // NODES}") for i in range(NODES)}
        self.beats = dict.fromkeys(self.nodes, self.true)
        self.die()
        for _ in range(60):
            self.second()
        assert self.status["state"] == "Running", self.status

    # The operator.

    def die(self) -> None:
        super().die()
        self.unreachable_since = None
        self.cache = Cache(clock=lambda: self.true)
        self.cache.put_job(self.job)
        self.fed: dict[str, Node] = {}
        self.shown_pods: dict[str, Object] = {}
        self.hearing = Hearing(lambda: self.true)
        self.lookout = Lookout("default", "digits", clock=lambda: self.true, hearing=self.hearing)

    def feed(self) -> None:
        """The watches bring what is new, in the API server's words."""
        for name, node in self.nodes.items():
            if self.fed.get(name) != node:
                self.fed[name] = node
                self.feed_node(name, node)
        self.cache.nodes_listed = True
        for uid in set(self.shown_pods) - set(self.pods):
            self.cache.drop_pod(self.shown_pods.pop(uid))
        for uid, pod in self.pods.items():
            if self.shown_pods.get(uid) != pod:
                self.version += 1
                self.shown_pods[uid] = copy.deepcopy(pod)
                versioned = {**pod["metadata"], "resourceVersion": str(self.version)}
                self.cache.put_pod(copy.deepcopy({**pod, "metadata": versioned}))

    def feed_node(self, name: str, node: Node) -> None:
        self.version += 1
        meta: Object = {"name": name, "resourceVersion": str(self.version)}
        if node.gone:
            self.cache.drop_node({"metadata": meta})
            return
        ready = {True: "True", False: "False", None: "Unknown"}[node.ready]
        meta["labels"] = {"topology.kubernetes.io/zone": node.zone}
        said = {"type": "Ready", "status": ready, "lastTransitionTime": timestamp(node.since)}
        self.cache.put_node({"metadata": meta, "status": {"conditions": [said]}})

    def observe(self) -> Observation:
        uid = self.job["metadata"]["uid"]
        workers, coordinators = self.cache.pods(("default", "digits"), uid)
        silence, seen = self.lookout.silence, None
        if silence >= 1:
            asked = next((c for c in coordinators if c.node == self.lookout.node), None)
            leases = {n: LeaseSeen(self.true - at, renewed=True) for n, at in self.beats.items()}
            unanswered, answering = self.hearing.tally()
            told = asked.uid if asked is not None else ""
            seen = Sight(told, silence, True, (), leases, unanswered, answering)
        return replace(
            super().observe(),
            workers=workers,
            coordinators=coordinators,
            nodes=self.cache.nodes(),
            steady=self.true,
            heard_at=self.lookout.heard_at,
            listening_since=self.lookout.listening_since,
            sight=seen,
        )

    def ask(self) -> None:
        """One call of the coordinator, which answers or does not."""
        _, coordinators = self.cache.pods(("default", "digits"), self.job["metadata"]["uid"])
        number = (self.status.get("coordinator") or {}).get("incarnation", 0)
        pod = next((c for c in coordinators if c.incarnation == number and not c.deleting), None)
        if pod is None or pod.running_since is None:
            return
        self.lookout.asks(pod)
        if self.closed or not self.runs(pod):
            self.unreachable_since = self.unreachable_since or self.now
            return
        here = {p["metadata"]["uid"] for p in self.workers(live=False) if self.reaches(p, pod)}
        young = self.true - self.began.setdefault(pod.uid, self.true) < 5
        members = tuple(MemberReport(uid, True, True, False) for uid in sorted(here))
        missing = {p["metadata"]["uid"] for p in self.workers()} - here
        members += tuple(MemberReport(uid, True, False, False) for uid in sorted(missing))
        self.report = Report(
            incarnation=number,
            restart=0,
            at=self.now,
            phase="FORMING" if young else "RUNNING",
            generation=None if young else 1,
            step=None if young else 10,
            members=() if young else members,
            last_commit_at=self.now,
        )
        self.unreachable_since = None
        self.reported |= dict.fromkeys(self.report.connected, self.true)
        self.lookout.answered(self.report.connected)

    def runs(self, pod: CoordinatorPod) -> bool:
        """Whether the coordinator's process lives where the operator reaches it."""
        raw = self.pods.get(pod.uid)
        return raw is not None and raw["spec"].get("nodeName") not in self.dead | self.apart

    def reaches(self, pod: Object, coordinator: CoordinatorPod) -> bool:
        node = pod["spec"].get("nodeName")
        return pod["status"]["phase"] == "Running" and (
            node not in self.dead | self.apart or (node == coordinator.node and node not in self.dead)
        )

    # The cluster.

    def second(self) -> None:
        self.true += 1
        self.now += 1
        if not self.away:
            for number, (name, node) in enumerate(self.nodes.items()):
                if name not in self.dead | self.cut and int(self.true + number) % BEAT == 0:
                    self.beats[name] = self.true
                ready = True if self.true - self.beats[name] < GRACE else None
                if node.ready != ready and not node.gone:
                    self.node(name, ready=ready)
            self.kubelet()
            self.feed()
        if int(self.true) % 2 == 0:
            self.ask()
        decided = self.plan()
        if not self.away:  # without it status cannot be written, and nothing is done
            self.judge(decided)
            self.write(decided.status)
            for action in decided.actions:
                self.act(action)

    def kubelet(self) -> None:
        shown = self.nodes
        deaf = self.dead | self.cut
        self.nodes = {name: replace(n, ready=n.ready and name not in deaf) for name, n in shown.items()}
        super().kubelet()
        self.nodes = shown

    def judge(self, decided: Plan) -> None:
        """The two promises of the brake, by what the cluster shows and not by what the plan counts."""
        lost, total = Counter[str](), Counter[str]()
        for node in self.nodes.values():
            if not node.gone:
                total[node.zone] += 1
                lost[node.zone] += not node.ready
        many = {z for z in total if lost[z] > 2 and 3 * lost[z] > total[z]}
        everywhere = (lost.total() > 2 and 3 * lost.total() > total.total()) or lost.total() == total.total()
        self.held_rounds += everywhere or bool(many)
        for action in decided.actions:
            self.kinds[type(action).__name__] += 1
            if not isinstance(action, DeletePod):
                lives = any(pod["status"]["phase"] == "Running" for pod in self.coordinators())
                made = isinstance(action, CreateCoordinator)
                assert not (everywhere and lives and made), (
                    f"a successor comes while all look lost ({self.seed})"
                )
                continue
            self.kinds[action.because] += 1
            pod = self.pods[action.uid]
            if pod["status"]["phase"] == "Failed":  # its kubelet has said that it ended
                continue
            heard = self.true - self.reported.get(action.uid, float("-inf"))
            assert heard >= 10, f"{action.name} was reported alive {heard} s ago (seed {self.seed})"
            node = self.nodes.get(pod["spec"].get("nodeName", ""))
            if node is not None and not node.ready and not node.gone and not self.deleting(pod):
                assert not everywhere, f"{action.name} goes while all look lost (seed {self.seed})"
                assert node.zone not in many, f"{action.name} goes with its zone (seed {self.seed})"

    def happen(self) -> None:
        """One event, and some time after it."""
        dice, names_ = self.random, sorted(self.nodes)
        some = set(dice.sample(names_, dice.choice((1, 1, 2, 4, NODES))))
        zone = {n for n, node in self.nodes.items() if node.zone == f"z{dice.randrange(ZONES)}"}
        kind = dice.choice(
            ("cut", "cut zone", "apart", "flap", "dead", "dead", "closed", "away", "jump", "die", "gone")
        )
        wait = dice.choice((3, 8, 20, 60))
        self.kinds[kind] += 1
        if kind == "cut":
            self.cut |= some
        elif kind == "cut zone":  # a partition: neither the API server nor the coordinator hears of it
            self.cut |= zone
            self.apart |= zone
        elif kind == "apart":
            self.apart |= some
        elif kind == "flap":  # of links that were cut from the API server some time ago
            self.cut |= some
            self.seconds(55)
            self.apart |= some
            wait = 6
        elif kind == "dead" and len(self.dead) < 2:
            self.dead |= {names_[dice.randrange(NODES)]}
            wait = 60
        elif kind == "closed":
            self.closed = not self.closed
        elif kind == "away":
            self.away = True
            self.seconds(40)
            self.away = False
        elif kind == "jump":
            self.now += dice.choice((-600, -60, 60, 600, 3600))
        elif kind == "die":
            self.die()
        elif kind == "gone":
            self.lose_node(names_[dice.randrange(NODES)])
        self.seconds(wait)
        if dice.random() < 0.4:
            self.heal()

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.second()

    def heal(self) -> None:
        """All is well again; what ran on machines that lost power has ended."""
        for pod in list(self.pods.values()):
            if pod["spec"].get("nodeName") in self.dead and pod["status"]["phase"] == "Running":
                self.evict(pod)
        self.dead, self.cut, self.apart, self.closed = set(), set(), set(), False
        for name, node in self.nodes.items():
            if node.gone:  # registered anew
                self.node(name, ready=True, gone=False)
                self.beats[name] = self.true


def live(seed: int, events: int = 14) -> Day:
    day = Day(seed=seed)
    for _ in range(events):
        day.happen()
    day.heal()
    day.seconds(400)
    assert len(day.workers()) == WORKERS, "all come back in the end"
    assert day.status["state"] == "Running", day.status["message"]
    return day


@functools.cache
def lived(seed: int) -> Day:
    """Live a day with all rules in force, once."""
    return live(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_pod_is_deleted_that_was_reported_alive(seed: int) -> None:
    lived(seed)


@pytest.mark.slow
def test_random_days_have_losses_and_brakes() -> None:
    days = [lived(seed) for seed in range(4, 8)]
    assert sum(day.kinds["NodeLost"] for day in days) >= 6
    assert sum(day.held_rounds for day in days) >= 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("brake", lambda observation: sight.Brake()),
        ("lives", lambda uid, observation, now: False),
    ],
)
def test_without_a_rule_some_day_deletes_what_lives(
    what: str, instead: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The days above would find it: each part of the brake is needed."""
    monkeypatch.setattr(sight, what, instead)
    found = []
    for seed in range(16):
        try:
            live(seed)
        except AssertionError as error:
            found.append(str(error))
            break
    assert found, f"no day needs {what}"
    assert "reported alive" in found[0] or "look" in found[0] or "zone" in found[0], found
