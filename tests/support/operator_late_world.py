"""A cluster in memory of which the operator hears late: events of a watch come one by one, some of them long
after; the coordinator's answers are as old; and between the operator's decision and each of its acts anything
may happen.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from operator_world import World, finished_message

from springtide_operator.api import names
from springtide_operator.plan.actions import (
    Action,
    CreateCoordinator,
    CreateWorker,
    DeleteJob,
    DeletePod,
    DeleteService,
    Event,
    Plan,
)
from springtide_operator.plan.observation import MemberReport, Report

Object = dict[str, Any]

SURPLUS = json.dumps({"outcome": "Left", "reason": "the job has finished", "finished": True})
LEFT = json.dumps({"outcome": "Left", "reason": "SIGTERM"})


def in_order(actions: Iterable[Action]) -> list[Action]:
    """Return actions in the order in which they are carried out: those that pods need and the coordinator,
    deletions, workers.
    """

    def rank(action: Action) -> int:
        if isinstance(action, DeletePod | DeleteJob | DeleteService):
            return 1
        return 2 if isinstance(action, CreateWorker) else 0

    return sorted(actions, key=rank)


@dataclass
class LateWorld(World):
    """`failed`, `disturbed`: uids of the workers that ended by themselves, and of those that somebody ended;
    `told`: the events that the operator has posted.
    """

    seen: dict[str, Object] = field(default_factory=dict)  # by uid, what the operator's cache holds
    failed: set[str] = field(default_factory=set)
    disturbed: set[str] = field(default_factory=set)
    told: list[Event] = field(default_factory=list)
    members: set[str] = field(default_factory=set)  # uids of the workers that train
    generation: int = 0
    made_by: int = 0  # the incarnation of the coordinator that made it
    over: bool = False  # all members were told that the last loop has ended
    said_finished: set[str] = field(default_factory=set)
    decided: Plan | None = None  # written to status and not carried out yet
    left: list[Action] = field(default_factory=list)
    answer: Report | None = None  # on its way
    _events: list[tuple[str, Object | None]] = field(default_factory=list)
    _known: dict[str, Object] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)

    # ---- what the operator hears

    def shown(self) -> Iterable[Object]:
        return self.seen.values()

    def record(self) -> None:
        """Make events of the watch from all changes since the last call."""
        for uid in [uid for uid in self._known if uid not in self.pods]:
            del self._known[uid]
            self._events.append((uid, None))
        for uid, pod in self.pods.items():
            if self._known.get(uid) != pod:
                self._known[uid] = copy.deepcopy(pod)
                self._events.append((uid, self._known[uid]))

    def deliver(self, count: int | None = None) -> None:
        """The operator hears the next events; None: all."""
        self.record()
        some = self._events[:count]
        del self._events[: len(some)]
        for uid, pod in some:
            self._hear(uid, pod)

    def list_all(self) -> None:
        """List everything: older events are old news then."""
        self.record()
        self._events.clear()
        for uid in [uid for uid in self.seen if uid not in self.pods]:
            self._hear(uid, None)
        for uid, pod in self._known.items():
            self._hear(uid, pod)

    def _hear(self, uid: str, pod: Object | None) -> None:
        if pod is None:
            self._gone.add(uid)
            self.seen.pop(uid, None)
        elif uid not in self._gone:
            self.seen[uid] = pod

    def _hear_own(self, uid: str) -> None:
        """The answer to a write: newer than all events of this pod so far."""
        self.record()
        mine = [pod for of, pod in self._events if of == uid]
        self._events = [event for event in self._events if event[0] != uid]
        if mine:
            self._hear(uid, mine[-1])

    # ---- the operator

    def decide(self) -> None:
        """Look, plan, write status."""
        assert self.decided is None
        self.decided = self.plan()
        self.write(self.decided.status)
        self.left = in_order(self.decided.actions)

    def carry_on(self, count: int | None = None) -> None:
        """Carry out the next actions of the round; after the last one, tell."""
        while self.left and (count is None or count > 0):
            self.act(self.left.pop(0))
            count = None if count is None else count - 1
        if not self.left and self.decided is not None:
            self.told += self.decided.events
            self.decided = None

    def act(self, action: object) -> None:
        if isinstance(action, CreateWorker | CreateCoordinator):
            assert "completionTime" not in self.status, f"{action} after the job's end"
        if isinstance(action, DeletePod) and action.uid not in self.pods:
            self._hear(action.uid, None)  # 404
        before = set(self.pods)
        super().act(action)
        for uid in set(self.pods) - before | ({action.uid} if isinstance(action, DeletePod) else set()):
            self._hear_own(uid)

    def die(self) -> None:
        super().die()
        self.decided, self.left, self.answer, self.unreachable_since = None, [], None, None
        self.list_all()

    def ask(self) -> None:
        """Call the coordinator: what it knows is on its way, or it does not answer."""
        status = self.status.get("coordinator") or {}
        number = status.get("incarnation", 0)
        there = [
            pod for pod in self.seen.values() if pod["metadata"]["uid"] in self._running_coordinators(number)
        ]
        if there:
            self.answer = self._report(number)
        elif any(pod["metadata"]["labels"].get(names.LABEL_INCARNATION) for pod in self.seen.values()):
            self.unreachable_since = self.unreachable_since or self.now

    def hear_answer(self) -> None:
        if self.answer is not None:
            self.report, self.unreachable_since, self.answer = self.answer, None, None

    # ---- the coordinator

    def _running_coordinators(self, number: int) -> set[str]:
        return {
            pod["metadata"]["uid"]
            for pod in self.coordinators()
            if pod["status"]["phase"] == "Running"
            and pod["metadata"]["labels"][names.LABEL_INCARNATION] == str(number)
        }

    @property
    def incarnation(self) -> int:
        """Return the incarnation of the coordinator that runs; 0: none does."""
        numbers = [
            int(pod["metadata"]["labels"][names.LABEL_INCARNATION])
            for pod in self.coordinators()
            if pod["status"]["phase"] == "Running"
        ]
        return max(numbers, default=0)

    def train(self) -> None:
        """A new generation of all workers that run."""
        running = {pod["metadata"]["uid"] for pod in self.running_workers() if not self.deleting(pod)}
        if self.incarnation and not self.over and running != self.members:
            self.members, self.generation, self.made_by = running, self.generation + 1, self.incarnation

    def _report(self, number: int) -> Report:
        members = tuple(
            MemberReport(uid, active=uid in self.members, connected=True, leaving=self.deleting(pod))
            for uid, pod in sorted((p["metadata"]["uid"], p) for p in self.running_workers())
        )
        trains = any(member.active for member in members) or (self.over and bool(self.generation))
        living = frozenset(
            uid
            for uid, pod in self.seen.items()
            if pod["status"]["phase"] in ("Pending", "Running")
            and names.LABEL_SLOT in pod["metadata"]["labels"]
        )
        return Report(
            incarnation=number,
            restart=0,
            at=self.now,
            phase=("AFTER_LOOP" if self.over else "RUNNING") if trains else "WAITING",
            generation=self.generation or None,
            generation_incarnation=self.made_by or None,
            step=10 * self.generation,
            members=members,
            data={"epoch": 1, "seen": 3, "totalSeen": 3},
            last_commit_at=self.now,
            asked_living=living,
        )

    # ---- workers

    def running_workers(self) -> list[Object]:
        """Return the worker pods with a process, also those that leave, by name."""
        return sorted(
            (pod for pod in self.workers(live=False) if pod["status"]["phase"] == "Running"),
            key=lambda pod: str(pod["metadata"]["name"]),
        )

    def finish(self) -> None:
        """The last loop is committed by all: each of its members will end well, unless it is ended before."""
        if self.incarnation and self.members & {p["metadata"]["uid"] for p in self.running_workers()}:
            self.over = True

    def end_with_the_job(self, pod: Object) -> None:
        """End a pod by itself, or as a newcomer that nobody needs any more."""
        if pod["metadata"]["uid"] in self.members:
            self.said_finished.add(pod["metadata"]["uid"])
            self.end(pod, 0, finished_message(self.made_by))
        elif self.said_finished:
            self.end(pod, 0, SURPLUS)

    def restart_in_vain(self) -> None:
        """All who said that they finished are gone before the operator could read it, and all who would have
        said so: the job begins anew.
        """
        there = {pod["metadata"]["uid"] for pod in self.workers(live=False)}
        running = {pod["metadata"]["uid"] for pod in self.running_workers()}
        if self.over and not (running & self.members or there & self.said_finished):
            self.over, self.members = False, set()
