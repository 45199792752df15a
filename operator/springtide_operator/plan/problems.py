"""Problems: what keeps the job from its size or its coordinator, worst first.

Of pods that a node has taken and whose containers do not begin, Kubernetes says only ContainerCreating, for
as long as it lasts. Why (a volume that cannot be attached, a network that is not ready, a very large image)
stands in the pod's events, which the operator does not read: it says which pod, on which node, and where to
look.
"""

from __future__ import annotations

from collections.abc import Sequence

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.api.model import OnHang
from springtide_operator.plan import (
    conditions,
    elasticity,
    gang,
    hangs,
    keys,
    kueue,
    memory,
    nodes,
    restarts,
    servers,
    sizing,
    standby,
    template,
)
from springtide_operator.plan import coordinator as coordinator_policy
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import CoordinatorPod, Observation, Problem, ServerPod, WorkerPod
from springtide_operator.plan.retry import LOOP_COUNT, decayed, namespace_goes
from springtide_operator.plan.values import timestamp

SILENT_SECONDS = 60.0
STARTING_SECONDS = 60.0  # a coordinator's process may need this long, on a busy machine, until it answers
TRY_SECONDS = 30.0  # a new worker in a crash loop that runs for longer is taken for one that will not crash
BEGIN_SECONDS = 120.0  # from a node's taking of a pod to its first container
SHOWN = 3
_Pod = WorkerPod | ServerPod | CoordinatorPod
_REFUSED = {
    "service": reasons.SERVICE_REFUSED,
    "networkpolicy": reasons.NETWORK_POLICY_REFUSED,
    "podgroup": reasons.POD_GROUP_REFUSED,
    "workload": reasons.WORKLOAD_REFUSED,
    "serverbudget": reasons.SERVER_BUDGET_REFUSED,
    "deletion": reasons.POD_DELETION_REFUSED,
}


def find(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    """Return what keeps the job from its size or its coordinator, the worst first.

    Texts hold no changing numbers: each change of a text is a write to the API server.

    Args:
        job: with its status.
        observation: of the job.
        ledger: of this round.
        now: in unix seconds.
    """
    return [
        *_unknown_nodes(observation, now),
        *_coordinator(observation, ledger, now),
        *template.problems(job, observation),
        *_refused(job, observation, now),
        *_queue(job, observation),
        *_gang(job, observation),
        *_hung(job, observation),
        *_workers(job, observation, ledger),
        *_not_begun(observation, ledger, now),
        *servers.problems(job, observation, ledger, now),
        *_silent(observation, ledger, now),
        *_vanished(job, observation),
        *_backing_off(job, observation, ledger, now),
        *_unreachable(job, observation, ledger, now),
        *_held_back(observation),
        *memory.problems(job, observation.report_of(ledger.incarnation), job.status),
        *_checkpoints(observation),
        *_certificates(job, observation, now),
    ]


def _certificates(job: Job, observation: Observation, now: float) -> list[Problem]:
    found = keys.problem(job, observation, now)
    return [found] if found is not None else []


def _unknown_nodes(observation: Observation, now: float) -> list[Problem]:
    found = nodes.problem(observation, now)
    return [found] if found is not None else []


def _held_back(observation: Observation) -> list[Problem]:
    report = observation.report
    if report is None or not report.held_back:
        return []
    return [Problem(reasons.OPEN_FILES_LIMIT_SIZE, report.held_back)]


def _checkpoints(observation: Observation) -> list[Problem]:
    report = observation.report
    if report is None or not report.checkpoint_error:
        return []
    text = f"checkpoints fail, and training goes on without: {report.checkpoint_error}"
    return [Problem(reasons.CHECKPOINT_FAILING, text)]


def of_halted(job: Job, observation: Observation, now: float) -> list[Problem]:
    """Return the problems that keep a job from being admitted by its queue, or from being resumed.

    Args:
        job: that is halted.
        observation: with its Workload and refusals.
        now: unix seconds.
    """
    return [*template.problems(job, observation), *_refused(job, observation, now), *_queue(job, observation)]


def summary(problems: list[Problem]) -> Problem | None:
    """One condition's worth: the worst one's reason, the first few texts."""
    if not problems:
        return None
    texts = [problem.message for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        texts.append(f"and {len(problems) - SHOWN} more")
    return Problem(problems[0].reason, "; ".join(texts)[:4000])


def _coordinator(observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    pod = coordinator_policy.current(observation, ledger)
    if pod is None:
        backoff = ledger.backoff(coordinator_policy.ROLE)
        if backoff.until <= now:
            return []
        text = (
            "the coordinator's pods end soon after they begin;"
            f" the next one is made after {timestamp(backoff.until)}"
        )
        return [Problem(reasons.COORDINATOR_FAILING, text)]
    if pod.problem is None:
        return []
    loops = pod.problem.reason == reasons.CRASH_LOOP
    return [Problem(reasons.COORDINATOR_FAILING if loops else pod.problem.reason, pod.problem.message)]


def _refused(job: Job, observation: Observation, now: float) -> list[Problem]:
    if namespace_goes(observation):
        text = f"the namespace {job.namespace} is being deleted: nothing is made in it any more"
        return [Problem(reasons.NAMESPACE_TERMINATING, text)]
    result = []
    what = {
        "secret": "the job's Secret",
        "networkpolicy": "the job's NetworkPolicy",
        "workload": "the job's Workload",
        "podgroup": "the job's PodGroup",
        "service": "the coordinator's Service",
        "coordinator": "the coordinator's pod",
        "worker": "worker pods",
        "server": "parameter servers' pods",
        "serverbudget": "the disruption budget of the parameter servers",
        "deletion": "the deletion of pods",
    }
    for role, text in what.items():
        refusal = observation.refusals.get(role)
        if refusal is None or refusal.hidden(now) or (refusal.invalid and role in template.ROLES):
            continue
        if role == "worker" and not sizing.missing_slots(job, observation):
            continue  # nothing is asked for any more
        reason = _REFUSED.get(role, reasons.POD_CREATION_REFUSED)
        verb = "refuses"
        if refusal.transient:
            verb = "does not get to" if role == "deletion" else "fails to make"
        result.append(Problem(reason, f"the API server {verb} {text}: {refusal.message[:1000]}"))
    return result


def _queue(job: Job, observation: Observation) -> list[Problem]:
    found = kueue.problem(job, observation)
    return [found] if found is not None else []


def _gang(job: Job, observation: Observation) -> list[Problem]:
    found = gang.problem(job, observation)
    return [found] if found is not None else []


def _workers(job: Job, observation: Observation, ledger: Ledger) -> list[Problem]:
    """The same trouble of several workers is one problem that names the first and counts the others.

    Extra workers that no node takes are no trouble, and of standbys status.standby tells.
    """
    groups: dict[str, list[tuple[str, Problem]]] = {}
    live = observation.live_pods
    enough = sum(pod.placed for pod in live) >= elasticity.needed(job)
    for pod in _without_standbys(live, ledger):
        if pod.problem is not None and not (enough and pod.problem.reason == reasons.UNSCHEDULABLE):
            groups.setdefault(pod.problem.reason, []).append((pod.name, pod.problem))
    result = []
    for reason, members in groups.items():
        text = members[0][1].message
        if len(members) > 1:
            text += f" (and {len(members) - 1} more)"
        result.append(Problem(reason, text))
    return result


def _without_standbys(live: Sequence[WorkerPod], ledger: Ledger) -> list[WorkerPod]:
    standing = standby.pods(live, ledger)
    return [pod for pod in live if pod not in standing]


def _hung(job: Job, observation: Observation) -> list[Problem]:
    found = hangs.problem(job, observation)
    return [] if found is None else [found]


def _silent(observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    report = observation.report
    coordinator = coordinator_policy.current(observation, ledger)
    if report is None or coordinator is None:
        return []
    listens_since = coordinator.running_since or coordinator.created_at
    names = [
        pod.name
        for pod in _without_standbys(observation.live_pods, ledger)
        if pod.uid in report.silent
        and pod.running
        and pod.started_at is not None
        and now - max(pod.started_at, listens_since) >= SILENT_SECONDS
    ]
    if not names:
        return []
    verbs = ("runs", "has") if len(names) == 1 else ("run", "have")
    # They may have called it: a policy of the namespace or a service mesh can keep them from the coordinator.
    blocked = f"; or {coordinator.name} cannot be reached from there (then the worker's log says so)"
    return [
        Problem(
            reasons.WORKER_SILENT,
            f"{_some(names)}: {verbs[0]} for more than {SILENT_SECONDS:.0f} s and"
            f" {verbs[1]} not called springtide.init();"
            " call it at the script's start, before data is loaded" + blocked,
        )
    ]


def _vanished(job: Job, observation: Observation) -> list[Problem]:
    report = observation.report
    names = [pod.name for pod in observation.live_pods if report and pod.uid in report.vanished]
    if not names:
        return []
    verbs = ("runs, and is", "its process stands") if len(names) == 1 else ("run, and are", "they stand")
    text = (
        f"{_some(names)} {verbs[0]} not heard of any more: {verbs[1]} still, or the coordinator cannot be"
        " reached from there; others train on without, and a pod that is deleted is replaced"
    )
    if job.spec.failure_policy.on_hang is OnHang.REPLACE:
        text += "; none is replaced by itself while so many are silent: see the job and the network"
    return [Problem(reasons.WORKER_SILENT, text)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _backing_off(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    waits = any(restarts.waits(ledger, slot, now) for slot in sizing.missing_slots(job, observation))
    backoff = ledger.backoff(restarts.ROLE)
    loop = decayed(backoff.count, backoff.last, now) >= LOOP_COUNT
    # Each try is the same trouble, and no news, until it trains or has run for a while.
    tries = loop and now < backoff.until + TRY_SECONDS and not _all_train(job, observation, ledger)
    if not waits and not tries:
        return []
    last = ledger.last_failure or {}
    text = f"failed workers are replaced after {timestamp(backoff.until)}"
    if loop:
        text = f"workers end again and again ({backoff.count} times of late)"
        if waits:
            text += f"; the next try is after {timestamp(backoff.until)}"
    if last:
        text += f"; last failure: worker {last.get('pod')}: {last.get('message')}"
    return [Problem(reasons.CRASH_LOOP if loop else reasons.BACKING_OFF, text)]


def _all_train(job: Job, observation: Observation, ledger: Ledger) -> bool:
    """Whether every worker wanted takes part in the generation that trains. Without the coordinator's word
    they do if they did.
    """
    report = observation.report_of(ledger.incarnation)
    if report is None:
        return conditions.is_true(job.status, reasons.RUNNING)
    active = {member.pod_uid for member in report.members if member.active}
    live = observation.live_pods
    training = {pod.slot for pod in live if pod.uid in active}
    standing = {pod.slot for pod in standby.pods(live, ledger)}
    return set(sizing.wanted_slots(job, observation)) - standing <= training


def _unreachable(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    """Tell of silence where it is news: of a coordinator that has answered, or that its kubelet says is up.

    One whose pod was only just made, whose image is pulled or whose process still imports owes no answer.
    """
    since = observation.unreachable_since
    pod = coordinator_policy.current(observation, ledger)
    if since is None or pod is None or pod.problem is not None:
        return []
    report = observation.report_of(ledger.incarnation)
    if report is None:
        if pod.ready_since is None:
            return _not_up(pod, now)
        since = max(since, pod.ready_since)
    if now - since < coordinator_policy.UNREACHABLE_SECONDS:
        return []
    active = report is not None and any(member.active for member in report.members)
    trains = active or conditions.is_true(job.status, reasons.RUNNING)
    meanwhile = "workers train on meanwhile" if trains else "workers wait for it"
    text = f"the operator cannot reach {pod.name}: {observation.unreachable_why}; {meanwhile}"
    return [Problem(reasons.COORDINATOR_UNREACHABLE, text)]


def _not_up(pod: CoordinatorPod, now: float) -> list[Problem]:
    """Tell of a coordinator whose process runs and serves nothing."""
    if pod.running_since is None or now - pod.running_since < STARTING_SECONDS:
        return []
    text = f"{pod.name} runs, and has not begun to answer within {STARTING_SECONDS:.0f} s: see its log"
    return [Problem(reasons.COORDINATOR_UNREACHABLE, text)]


def _not_begun(observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    """One for each role, the coordinator first; it names the first pod and counts the others."""
    coordinator = coordinator_policy.current(observation, ledger)
    roles: tuple[tuple[str, list[_Pod]], ...] = (
        ("the coordinator", [coordinator] if coordinator is not None else []),
        ("worker", [*_without_standbys(observation.live_pods, ledger)]),
        ("parameter server", [*servers.live(observation)]),
    )
    result = []
    for role, pods in roles:
        stuck = [pod for pod in pods if _stuck(pod, now)]
        if stuck:
            result.append(Problem(reasons.CONTAINERS_NOT_STARTED, _not_begun_text(role, stuck)))
    return result


def _stuck(pod: _Pod, now: float) -> bool:
    if pod.problem is not None or pod.starting_since is None:
        return False
    return now - pod.starting_since >= BEGIN_SECONDS


def _not_begun_text(role: str, stuck: list[_Pod]) -> str:
    first = stuck[0]
    more = f" (and {len(stuck) - 1} more)" if len(stuck) > 1 else ""
    return (
        f"no container of {role} {first.name} on node {first.node} has begun within {BEGIN_SECONDS:.0f} s"
        f"{more}: its image is still pulled, a volume cannot be mounted, or its network is not ready;"
        f" the events of the pod say which (kubectl describe pod {first.name})"
    )
