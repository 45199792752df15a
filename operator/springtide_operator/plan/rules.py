"""`failurePolicy.rules`: which rule holds for an end of a worker, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from springtide_operator.api import reasons
from springtide_operator.api.failure_rules import ExitCodeOperator, FailureRule, RuleAction
from springtide_operator.plan import memory
from springtide_operator.plan.observation import End

FAILURE = "failure"
PREEMPTION = "preemption"
IGNORED = "ignored"

# Words for people, beside what the pod's status says.
_ALSO_CALLED = {
    "DeletionByPodGC": "NodeLost",
    "DeletionByTaintManager": "NodeLost",
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
    "Preempting": "Preempted",
    "PreemptionByKubeScheduler": "Preempted",
    "PreemptionByScheduler": "Preempted",
    "Shutdown": "NodeShutdown",
    "Terminated": "NodeShutdown",
    "ErrImagePull": "ImagePullBackOff",
}


# The list is open: runtimes and clouds give reasons of their own. It serves to notice typing errors.
KNOWN_REASONS = frozenset(
    [
        "Completed",
        "ContainerCannotRun",
        "ContainerStatusUnknown",
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "DeadlineExceeded",
        "Deleted",
        "DisruptionTarget",
        "ErrImageNeverPull",
        "Error",
        "Evicted",
        "Finished",
        "Hung",
        "ImageInspectError",
        "ImagePullBackOff",
        "InitContainerFailed",
        "InvalidImageName",
        "Left",
        "NodeAffinity",
        "NodeLost",
        "NodeShutdown",
        "NotFinished",
        "OOMKilled",
        "OutOfcpu",
        "OutOfmemory",
        "OutOfpods",
        "PodFailed",
        "Preempted",
        "RegistryUnavailable",
        "RunContainerError",
        "SignatureValidationFailed",
        "StartError",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        "Unschedulable",
        "Vanished",
    ]
).union(_ALSO_CALLED)
_ALIKE = 0.8  # of difflib's measure: one letter in six may be wrong


@dataclass(frozen=True)
class Verdict:
    """`counts`: FAILURE, PREEMPTION or IGNORED. `rule`: the one that decided, in words; "" for none.

    reason: of the job's failure, where it is to fail.
    """

    action: RuleAction
    counts: str
    rule: str = ""
    reason: str = reasons.FAILURE_RULE


def reasons_of(end: End) -> frozenset[str]:
    """The reasons by which rules may name an end."""
    return frozenset({end.reason, _ALSO_CALLED.get(end.reason, end.reason)})


def doubts(rules: Sequence[FailureRule]) -> list[str]:
    """Reasons that are almost those of known ends: sentences for people."""
    by_word = {word.casefold(): word for word in sorted(KNOWN_REASONS)}
    found = []
    for number, rule in enumerate(rules):
        for reason in rule.reasons or ():
            if reason.casefold() in by_word:
                continue
            alike = get_close_matches(reason.casefold(), by_word, n=1, cutoff=_ALIKE)
            if alike:
                found.append(
                    f"failurePolicy.rules[{number}]: no end of a worker is known by the reason {reason}; did"
                    f" you mean {by_word[alike[0]]}? The rule holds for {reason} as long as it says so"
                )
    return found


def judge(rules: Sequence[FailureRule], end: End) -> Verdict:
    """Return what the first rule that holds says; without one, a failure counts as such and all else as a
    preemption, and a job whose model does not fit into its workers' memory fails.

    Args:
        rules: of the job, in order.
        end: of a worker.
    """
    usual = FAILURE if end.kind == reasons.END_FAILED else PREEMPTION
    for number, rule in enumerate(rules):
        if not holds(rule, end):
            continue
        counts = {RuleAction.RESTART: FAILURE, RuleAction.IGNORE: IGNORED}.get(rule.action, usual)
        name = f" ({rule.name})" if rule.name else ""
        return Verdict(rule.action, counts, f"failurePolicy.rules[{number}]{name} says {rule.action.value}")
    if end.exception == memory.ERROR:
        return Verdict(RuleAction.FAIL_JOB, FAILURE, reason=reasons.MEMORY_TOO_SMALL)
    return Verdict(RuleAction.RESTART, usual)


def holds(rule: FailureRule, end: End) -> bool:
    """Return whether all that a rule names holds. Exit codes and exceptions are those of the script's own
    failures.

    Args:
        rule: of the job.
        end: of a worker.
    """
    failed = end.kind == reasons.END_FAILED
    if rule.exit_codes is not None:
        inside = end.exit_code in rule.exit_codes.values
        if not failed or end.waiting or inside != (rule.exit_codes.operator is ExitCodeOperator.IN):
            return False
    if rule.exceptions is not None and not (failed and _is_one_of(end.exception, rule.exceptions)):
        return False
    if rule.reasons is None:
        return True
    return not {word.casefold() for word in reasons_of(end)}.isdisjoint(
        word.casefold() for word in rule.reasons
    )


def _is_one_of(raised: str | None, names: Sequence[str]) -> bool:
    """`ValueError` names any class of that name, `a.b.Error` that one alone (its module may be unknown)."""
    if not raised:
        return False
    return any(name in (raised, raised.rpartition(".")[2]) for name in names)
