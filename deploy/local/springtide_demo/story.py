"""The course of the demo: observe, decide, act, show; until the job ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from springtide_demo import actions, scenario
from springtide_demo.commits import History, samples_per_second, steps_per_second
from springtide_demo.kube import Kube
from springtide_demo.machine import Machine
from springtide_demo.observe import PodView, WorkerWatch, pod_view
from springtide_demo.patience import Patience
from springtide_demo.reference import ReferenceRun
from springtide_demo.scenario import Done, Observation, Pace
from springtide_demo.steplog import StepLogs
from springtide_demo.survivors import Target
from springtide_demo.view import Snapshot, View, WorkerRow
from springtide_kube.errors import ApiError

OPERATOR_NAMESPACE = "springtide-system"
OPERATOR_SELECTOR = "springtide.dev/role=operator"
POLL_SECONDS = 0.1
LIST_SECONDS = 0.4
ANNOUNCE_SECONDS = 0.3
# So many seconds of a machine of our own without anything new, and so many without a step or an event.
STILL_SECONDS = 60.0
NO_STEP_SECONDS = 240.0


class StoryError(Exception):
    """The demo cannot go on: its message says what happened and where to look."""


@dataclass
class Story:
    """Everything that was seen and done. `alone` runs beside the start, and tells the number of steps."""

    kube: Kube
    view: View
    logs: StepLogs
    job: str
    namespace: str
    alone: ReferenceRun
    pace: Pace = field(default_factory=Pace)
    machine: Machine = field(default_factory=Machine)
    list_seconds: float = LIST_SECONDS
    total_steps: int = 0
    history: History = field(default_factory=History)
    watch: WorkerWatch = field(default_factory=WorkerWatch)
    done: tuple[Done, ...] = ()
    targets: list[Target] = field(default_factory=list)
    over_at: float = float("inf")
    _workers: list[PodView] = field(default_factory=list)
    _coordinator: PodView | None = None
    _operator: PodView | None = None
    _job: dict[str, Any] = field(default_factory=dict)
    _listed: float = float("-inf")
    _rates: list[float] = field(default_factory=list)
    _waiting: str = ""
    _generation: int = 0

    def run(
        self,
        still: float = STILL_SECONDS,
        no_step: float = NO_STEP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Tell the story until the job has succeeded, for as long as it takes.

        Args:
            still: seconds in which nothing moves, and
            no_step: seconds without a step that was not made before: then the story is given up. Both count
                what the machine left to us.
            clock: for tests.

        Raises:
            StoryError: the job failed; or nothing moved, and what was waited for, and since when.
        """
        anything, steps = Patience(still), Patience(no_step)
        while True:
            self.machine.sample()
            self.observe(clock())
            failure = _condition(self._job, "Failed")
            if failure is not None:
                raise StoryError(f"the job failed: {failure.get('reason')}: {failure.get('message')}")
            if _condition(self._job, "Succeeded") is not None and self.watch.outcome:
                return
            now, load = clock(), self.machine.lately()
            advanced = {
                ("step", self.history.last_step),
                ("event", len(self.done)),
                ("alone", self.total_steps),
            }
            for patience, marks, what in (
                (anything, advanced | self._marks(), "nothing has moved"),
                (steps, advanced, "no step was made"),
            ):
                if patience.look(marks, now, load.others):
                    raise StoryError(
                        f"{what} for {patience.since(now):.0f} s: {self._waiting or self._state()}"
                        f" (step {self.history.last_step}; {load})"
                    )
            self.advance()
            self.show()
            time.sleep(POLL_SECONDS)

    # ---- observe

    def observe(self, now: float) -> None:
        """Read the step logs; list pods and job now and then. A silent API server is asked again later."""
        self.history.add(self.logs.poll())
        if not self.total_steps and self.alone.finished():
            curve = self.alone.curve()
            self.total_steps = len(curve)
            self.view.say(
                f"the undisturbed run has ended: {len(curve)} steps, last loss {curve[-1].loss:.4f}", "green"
            )
        if now - self._listed < self.list_seconds:
            return
        self._listed = now
        try:
            listed = [pod_view(p) for p in self.kube.pods(self.namespace, f"springtide.dev/job={self.job}")]
            operators = [pod_view(p) for p in self.kube.pods(OPERATOR_NAMESPACE, OPERATOR_SELECTOR)]
            self._job = self.kube.job(self.namespace, self.job)
        except ApiError as error:
            self._waiting = f"the cluster cannot be looked at: {error}"
            return
        moment = time.time()
        self._workers = [pod for pod in listed if "-worker-" in pod.name]
        self._coordinator = next((p for p in listed if "-coordinator-" in p.name and not p.leaving), None)
        self._operator = next((pod for pod in operators if not pod.leaving), None)
        self.watch.update(self._workers, moment)
        if self.watch.outcome and self.over_at == float("inf"):
            self.over_at = moment
        self._aim_at_those_that_scale_down(moment)
        self._rates.append(samples_per_second(self.history.recent(2.0)))

    def _aim_at_those_that_scale_down(self, now: float) -> None:
        """The operator chooses who goes when the job shrinks, and says so on the pod."""
        shrinks = next((done for done in self.done if done.kind == scenario.SCALE_DOWN), None)
        if shrinks is None:
            return
        uids = frozenset(pod.uid for pod in self._workers if pod.deleted_because == "ScaledDown")
        if uids - self._targeted(scenario.SCALE_DOWN):
            self.targets.append(Target(scenario.SCALE_DOWN, shrinks.at, uids))

    def _targeted(self, kind: str) -> frozenset[str]:
        return frozenset(uid for target in self.targets if target.kind == kind for uid in target.uids)

    def _marks(self) -> set[tuple[object, ...]]:
        """Return what may be new in a look at the cluster: states of pods, and of the job."""
        pods = [*self._workers, *(pod for pod in (self._coordinator, self._operator) if pod is not None)]
        seen: set[tuple[object, ...]] = {
            (pod.uid, pod.phase, pod.pid, pod.ready, pod.leaving) for pod in pods
        }
        return seen | {("job", self._state(), self._generation)}

    # ---- decide and act

    def advance(self) -> None:
        """Carry out the next event of the story if its time has come."""
        decision = scenario.decide(self._observation(), self.done, self.pace)
        self._waiting = decision.reason
        if decision.kind is None:
            return
        seen = actions.Seen(self._workers, self._coordinator, self._operator, self.history.active())
        try:
            act = actions.carry_out(decision.kind, self.kube, self.namespace, self.job, seen)
        except (actions.NotPossibleError, ApiError) as error:
            self._waiting = f"{decision.kind} has to wait: {error}"
            return
        self.done = (*self.done, Done(decision.kind, act.at, act.pid))
        self.targets.append(Target(decision.kind, act.at, act.uids))
        self._listed = float("-inf")
        self.view.say(f"{decision.kind}: {scenario.EXPLANATION[decision.kind]}", "bold yellow")
        self.view.say(f"    {act.line}", "yellow")

    def _observation(self) -> Observation:
        newest = self.history.newest()
        since = None if newest is None else self.history.first_commit[newest.generation]
        return Observation(
            now=time.time(),
            active=len(self.history.active()),
            generation_since=since,
            coordinator_pid=self._coordinator.pid if self._coordinator else None,
            operator_pid=self._operator.pid if self._operator else None,
            operator_ready=bool(self._operator and self._operator.ready),
            seconds_left=self._seconds_left(),
            finished=bool(self.watch.outcome),
        )

    def _seconds_left(self) -> float | None:
        """Unknown before the undisturbed run has told how many steps there are."""
        speed = steps_per_second(self.history.recent(2.0))
        if not self.total_steps or speed <= 0:
            return None
        return max(0, self.total_steps - self.history.last_step) / speed

    # ---- show

    def show(self) -> None:
        """Update the view; a new generation gets a line of its own."""
        newest = self.history.newest()
        active = self.history.active()
        # A moment later, when all its members have written their first commit.
        fresh = (
            newest is not None
            and time.time() - self.history.first_commit[newest.generation] < ANNOUNCE_SECONDS
        )
        if newest is not None and not fresh and newest.generation.number != self._generation:
            self._generation = newest.generation.number
            names = ", ".join(sorted(name.rsplit("-worker-", 1)[-1] for name in active))
            self.view.say(
                f"    generation {self._generation}: {len(active)} workers train ({names})", "green"
            )
        self.view.update(
            Snapshot(
                state=self._state(),
                step=newest.step if newest else 0,
                total_steps=self.total_steps,
                generation=self._generation,
                samples_per_second=self._rates[-1] if self._rates else 0.0,
                loss=newest.loss if newest else None,
                waiting=self._waiting,
                workers=[
                    WorkerRow(pod.name, pod.node, pod.pid, _standing(pod, active)) for pod in self._workers
                ],
                rates=self._rates,
            )
        )

    def _state(self) -> str:
        status = self._job.get("status") or {}
        return str(status.get("state") or "Pending")


def _standing(pod: PodView, active: frozenset[str]) -> str:
    if pod.leaving:
        return "leaving"
    if pod.phase in ("Succeeded", "Failed"):
        return "ended"
    if pod.pid is not None and pod.name in active:
        return "training"
    return "starting" if pod.pid is not None else pod.phase.lower()


def _condition(job: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the job's condition if it is true."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), None)
